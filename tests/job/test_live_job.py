"""A running job in the terminal and in the browser."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import planted_jobs
import pytest
from made_jobs import copied, late_job

from minidl import cli
from minidl.job.digests import load, make
from minidl.job.live_job import RECENT, LiveJob, recent, state
from minidl.job.report import JobReport
from minidl.tracefile.format import TraceError
from minidl.views.top import follow_job, screen

TRACES = Path(__file__).parent.parent.parent / "traces"


def test_the_newest_steps_are_judged() -> None:
    job = late_job(4, 50 + RECENT, lambda step: step < 50)
    assert "wait for rank 2" in JobReport(job).finding.sentence
    now = recent(job)
    assert [len(table.steps) for table in now.ranks] == [RECENT] * 4
    assert JobReport(now).finding.sentence.startswith("fine: no straggler")
    assert recent(now) is now


def test_the_screen_has_the_headline_the_ranks_and_their_steps() -> None:
    facts = {1: {"running": True}, 2: {"outcome": "slow"}, 3: {"outcome": "died", "what": "died: it was killed"}}
    report = JobReport(late_job(facts=facts))
    assert state(report) == "1 of 4 ranks running; 2 ended well, 1 died"
    lines = screen(report, 60).splitlines()
    assert lines[0].startswith("died, rank 3")
    at = lines.index("1 of 4 ranks running; 2 ended well, 1 died; the newest 60 steps:")
    assert lines[at + 3].startswith("rank 2    ####"), lines


def test_a_digest_that_is_a_little_behind_its_rank_is_taken_if_that_is_allowed(tmp_path: Path) -> None:
    path = copied(tmp_path, "workers-2") / "rank-0.minidl"
    make(path)
    now = time.time()
    os.utime(path, (now + 100, now + 100))
    assert load(path) is None
    assert load(path, behind=150) is not None
    assert load(path, behind=50) is None


@pytest.mark.heavy
def test_top_shows_a_job_or_a_rank_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(copied(tmp_path, "workers-2", "workers-2"))
    assert cli.main(["top", "--once", job]) == cli.OK
    assert "0 of 2 ranks running; " in capsys.readouterr().out
    for place in (job, f"{job}/rank-1.minidl"):
        assert cli.main(["top", "--once", place, "--rank", "1"]) == cli.OK
        assert f"{job}/rank-1.minidl: " in capsys.readouterr().out
    with pytest.raises(TraceError, match="is no job"):
        LiveJob([tmp_path / "rank-1.minidl"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["{job}/rank-1.minidl", "--rank", "2"], "has no rank 2"),
        ([str(TRACES / "ranks-4-one-gpu.minidl"), "--rank", "1"], "several ranks in one trace"),
        (["4711000", "--rank", "1"], "omit --rank"),
        (["{job}", "--dataloader", "Photos"], "--dataloader needs one of its ranks, by --rank N"),
    ],
)
def test_top_refuses_what_is_no_rank_of_a_job(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = copied(tmp_path, "workers-2", "workers-2")
    assert cli.main(["top", "--once", *(option.format(job=job) for option in options)]) == cli.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.live
def test_a_running_job_is_followed_to_its_end(tmp_path: Path) -> None:
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    command = [sys.executable, planted_jobs.__file__, str(tmp_path), "3", "compute"]
    with subprocess.Popen(command, env=environment) as launcher:
        until = time.monotonic() + 60
        while len([*tmp_path.glob("compute/rank-*/*.events")]) < 9 and time.monotonic() < until:
            time.sleep(0.02)
        out = io.StringIO()
        report = follow_job([tmp_path / "compute"], 0.05, out=out)
        assert launcher.wait(60) == 0
    assert "3 of 3 ranks running" in out.getvalue()
    assert "running" not in state(report).partition("; ")[2]
    assert "wait for rank 1: its own step" in out.getvalue()
