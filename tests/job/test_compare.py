"""Two jobs compared: how much faster, which ranks changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_jobs import MadeJob, copied, late_job
from made_trace import write

from minidl import cli
from minidl.job.compare import JobDiff
from minidl.job.report import JobReport

TRACES = Path(__file__).parent.parent.parent / "traces"
SOUND, LATE = JobReport(MadeJob(4).record()), JobReport(late_job())


def test_a_straggler_that_is_gone_is_what_made_the_job_faster() -> None:
    said = JobDiff(LATE, SOUND)
    lines = said.text().splitlines()
    assert lines[0] == "B makes 2.95 times as many steps as A in the same time: 20.5 ms a step, A 60.5 ms"
    assert lines[1].startswith("  A (4 ranks): slow: 98% of the job's steps wait for rank 2")
    assert lines[2].startswith("  B (4 ranks): fine: no straggler")
    assert said.parts()["waits for the last rank"] == (pytest.approx(30_000), 0)
    assert said.parts()["samples"] == (pytest.approx(10_000), 0)
    assert said.ranks() == {2: (1.0, 0.0)}
    assert lines[-1] == "  rank 2: 100% of all lateness in A, 0% in B"


def test_what_a_job_lacks_is_said() -> None:
    lacking, empty = (JobReport(MadeJob(4, steps, missing=(3,)).record()) for steps in (60, 0))
    assert JobDiff(LATE, lacking).text().splitlines()[3] == "    no trace of 1 rank of 4: 3"
    assert JobDiff(SOUND, SOUND).headline == "A and B are equally fast: 20.5 ms a step, A 20.5 ms"
    assert JobDiff(SOUND, empty).headline.startswith("one of the jobs has no step")


def test_waits_are_those_of_the_steps_that_two_ranks_have() -> None:
    record = MadeJob(2, fetch=lambda rank, step: 60_000).record()
    record.ranks[1].steps["number"] += 50  # 10 steps are shared
    job = JobReport(record)
    assert JobDiff(job, job).parts()["samples"] == (pytest.approx(40_000), pytest.approx(40_000))


@pytest.mark.heavy
def test_the_command_compares_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(copied(tmp_path / "a", "workers-1", "workers-2"))
    b = str(copied(tmp_path / "b", "workers-4", "workers-8"))
    assert cli.main(["diff", a, b, "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out)["headline"].startswith("B makes")
    assert cli.main(["diff", a, b, "--rank", "0", "--force"]) == cli.OK
    assert cli.main(["diff", a, str(TRACES / "workers-4.minidl"), "--rank", "0", "--force"]) == cli.OK
    assert cli.main(["diff", a, b, "-o", "x.png"]) == cli.USAGE
    assert cli.main(["diff", a, b, "--workers"]) == cli.USAGE
    assert "--workers needs one rank of each" in capsys.readouterr().err


def test_the_command_checks_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = copied(tmp_path, "workers-1", "workers-2")
    assert cli.main(["check", str(place)]) == cli.OK
    assert capsys.readouterr().out == "2 ranks, 2 of them break no rule\n"
    for rank in range(2, 6):
        write(place / f"rank-{rank}")
    assert cli.main(["check", str(place)]) == cli.OK
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "6 ranks, 2 of them break no rule"
    assert lines[0].startswith("rank 2: not judged: ")
    assert lines[3:] == ["not judged in whole: rank 2, rank 3, rank 4, rank 5"]
    (place / "rank-0.minidl").write_bytes(b"nothing")
    assert cli.main(["check", str(place)]) == cli.USAGE
    assert "not read: rank 0: " in capsys.readouterr().out


def test_a_rank_that_breaks_the_protocol_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(copied(tmp_path / "job", "workers-2", "torn-message-pin-thread"))
    code = cli.main(["check", job, "--json"])
    assert set(json.loads(capsys.readouterr().out)) == {"0", "1"}
    assert code == cli.main(["check", job])
    assert ("NOT a behaviour of the protocol: rank 1" in capsys.readouterr().out) == (code == cli.FOUND)


def test_traces_whose_names_have_no_rank_are_all_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = tmp_path / "bad\n.minidl", TRACES / "workers-2.minidl"
    bad.write_bytes(b"nothing")
    assert cli.main(["check", str(bad), str(good)]) == cli.USAGE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 ranks, 1 of them break no rule"
    assert lines[1].startswith(f"not read: {tmp_path}/bad\\n.minidl: ")
    assert cli.main(["check", str(bad), str(good), "--json"]) == cli.USAGE
    assert len(json.loads(capsys.readouterr().out)) == 2


@pytest.mark.parametrize("command", ["replay", "before --batch 3", "ledger", "export", "pack"])
def test_commands_on_one_trace_ask_for_a_rank(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, *options = command.split()
    job = str(copied(tmp_path, "workers-2", "workers-2"))
    assert cli.main([name, job, *options]) == cli.USAGE
    assert "is a job of 2 ranks: choose one with --rank N" in capsys.readouterr().err
    if name not in ("export", "pack"):
        assert cli.main([name, job, *options, "--rank", "1"]) == cli.OK
