"""The page of a job: what it holds, what the server answers, and what a browser shows."""

from __future__ import annotations

import base64
import json
import os
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from browser import driven, needs_driver
from made_jobs import MadeJob, copied, late_job
from made_trace import HUNG, Run, write

from minidl import cli
from minidl.job.report import JobReport
from minidl.process_stat import boot_id
from minidl.tracefile.format import MANIFEST
from minidl.tracefile.reader import read_trace
from minidl.views import job_page as module
from minidl.views.job_page import JobPage
from minidl.views.viewer import Viewer


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return copied(tmp_path / "job", "workers-4", "workers-1")


@pytest.mark.parametrize(("ranks", "rows"), [(4, 4), (60, 3)])
def test_the_ranks_that_matter_come_first_with_their_steps(ranks: int, rows: int) -> None:
    words = module._shown(JobReport(late_job(ranks, 40, lambda step: step % 2 == 1)))
    assert "wait for rank 2" in words["headline"]
    assert len(words["rows"]) == rows
    assert (words["rows"][0]["name"], words["rows"][0]["late"]) == ("rank 2", "100%")
    strips = base64.b64decode(words["strips"])
    assert len(strips) == rows * 3 * 40 * 3
    last, red = strips[2 * 40 * 3 :][: 40 * 3], bytes(module.rgb(module.RED))
    assert [last[3 * at :][:3] == red for at in range(1, 40)] == [bool(at % 2) for at in range(1, 40)]
    assert len(base64.b64decode(words["map"])) == (ranks * 40 * 3 if ranks > rows else 0)
    assert module._shown(JobReport(MadeJob(4, 0).record()))["columns"] == 0


@pytest.mark.heavy
def test_the_server_shows_a_job_and_each_of_its_ranks(job: Path) -> None:
    with Viewer(JobPage([job], live=False)) as viewer:
        answers = {}
        for name in ("", "live", "rank-1/", "rank-1"):
            with urllib.request.urlopen(viewer.url + name) as answer:
                answers[name] = answer.read().decode()
        assert "ranks running" in answers[""]
        assert json.loads(answers["live"])["over"]
        assert answers["rank-1/"] == answers["rank-1"]  # it is led there
        assert "rank-1" in answers["rank-1/"]
        for name in ("rank-2/", "rank-1/live", "rank-1/nothing", "rank-x/"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(viewer.url + name)


def test_the_page_of_a_rank_that_runs_follows_it(tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    for rank in (0, 1):
        place = write(tmp_path / f"rank-{rank}", Run(**HUNG))
        here = {"boot_id": boot_id(), "host": socket.gethostname(), "monotonic_ns": time.monotonic_ns()}
        here["pid"] = os.getpid() if rank else 1 << 30
        (place / MANIFEST).write_text(json.dumps(json.loads((place / MANIFEST).read_text()) | here))
    pages = [JobPage([tmp_path], live=live).rank(rank) for live, rank in ((True, 1), (True, 0), (False, 1))]
    assert [type(one).__name__ for one in pages] == ["LivePage", "Page", "Page"]
    read_trace(place).pack(tmp_path / "packed" / "rank-1.minidl")
    assert type(JobPage([tmp_path / "packed"], live=True).rank(1)).__name__ == "Page"


@pytest.mark.heavy
def test_the_command_takes_a_job_and_options_of_one_trace_need_a_rank(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []
    monkeypatch.setattr("minidl.views.viewer._show", lambda viewer, *told: shown.append(viewer.trace))
    assert cli.main(["view", "--no-browser", str(job)]) == cli.OK
    assert cli.main(["view", "--no-browser", "--live", str(job)]) == cli.OK
    assert cli.main(["view", "--no-browser", "--rank", "1", str(job)]) == cli.OK
    assert [type(one).__name__ for one in shown] == ["JobPage", "JobPage", "Trace"]
    assert cli.main(["view", "--perfetto", str(job)]) == cli.USAGE
    assert "need --rank N" in capsys.readouterr().err


@pytest.mark.live
@needs_driver
def test_a_browser_shows_the_ranks_and_opens_one(job: Path, tmp_path: Path) -> None:
    with Viewer(JobPage([job], live=False)) as viewer, driven(tmp_path / "profile") as browser:
        browser.post("/url", url=viewer.url)
        browser.until("return document.documentElement.dataset.looks >= 1")
        assert browser.run("return document.querySelectorAll('#rows tr canvas').length") == 2
        assert browser.run("return document.querySelector('#rows canvas').height") == 3
        browser.run("document.querySelector('#rows a').click()")
        browser.until("return location.pathname.includes('/rank-') && document.getElementById('headline').textContent")
