"""The command for a machine with a GPU: parts that fail or hang, the report, and a machine that has none."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import on_gpu
import pytest
from on_gpu import Outcome, Part


def part(name: str, script: str, share: float = 1.0) -> Part:
    return Part(name, (sys.executable, "-c", script), share)


@pytest.mark.live
def test_each_part_runs_whatever_became_of_the_one_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    waits = "'import signal; signal.pause()'"
    hangs = f"import subprocess, sys; print('begun'); subprocess.run([sys.executable, '-c', {waits}])"
    sets = "import os; print(os.environ['MINIDL_TEST_GPU'], '{minutes}')"
    todo = [part("good", sets), part("bad", "print('why'); exit(3)"), part("slow", hangs, 0.02), part("last", "pass")]
    outcomes = on_gpu.run(todo, time.monotonic() + 100, "cuda")
    assert [(each.name, each.last) for each in outcomes[:3]] == [("good", "1 0.9"), ("bad", "why"), ("slow", "begun")]
    results = [each.result for each in outcomes]
    assert (results[0], results[1], results[3]) == ("passed", "FAILED: exit code 3", "passed")
    assert results[2].startswith("FAILED: stopped after ")
    assert "=== 3 of 4: slow, at most" in capsys.readouterr().out


def test_what_does_not_fit_into_the_time_is_not_begun() -> None:
    (outcome,) = on_gpu.run([part("late", "")], time.monotonic(), "sim")
    assert outcome.result == "NOT BEGUN: the time is over"


def test_the_report_says_what_passed_and_what_was_written() -> None:
    outcomes = [
        Outcome("tests", "passed", 83.2, "9 passed"),
        Outcome("recordings", "FAILED: exit code 1", 5, "no disk"),
    ]
    assert on_gpu.report(outcomes, [Path("a/x.minidl")], 90.4, "a GPU") == (
        "on a GPU, in 90 s:\n"
        "tests          83 s  passed: 9 passed\n"
        "recordings      5 s  FAILED: exit code 1: no disk\n"
        "written: x.minidl"
    )


def test_a_machine_without_a_gpu_is_told_what_runs_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert on_gpu.main(["-o", str(tmp_path / "out")]) == 2
    assert "torch finds no GPU: run it on a machine that has one, or choose --device sim" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
