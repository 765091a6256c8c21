"""The matrix of faults: each cell is a test. Those that are slow run with `-m slow`, or by `minidl faults`."""

from __future__ import annotations

import io
import signal
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minidl.loader import threads as loader_threads
from minidl.loader.threads import WorkerThread
from minidl.prove.faults import runner as judging
from minidl.prove.faults import threads
from minidl.prove.faults.cells import Cell, Expected, Follows, cells
from minidl.prove.faults.runner import Runner

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


ALIKE = {"sys.exit", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGTERM", "SIGSEGV of both", "os._exit of both"}
"""Ways in which a process ends by itself or by a signal: one each is quick in any step."""
OF_PROCESSES = {"stop pin thread", "set done flag", "send sentinel", "join workers", "kill"}
"""Steps of the shutdown in which a kill is quick: before and after workers are told to leave, and while they do."""

OF_THREADS = {"sample", "loop", "shutdown: set done flag"}
"""Steps in which the end of the process is quick whose threads are the workers: it leaves nothing of them anywhere."""


def is_quick(cell: Cell) -> bool:
    # Python's exit may abort a program whose own daemon thread is in C++ then, whichever loader that thread has.
    waits = cell.name == "SIGSTOP" or cell.fault in ("maps", "exit while a thread iterates") or "hang" in cell.fault
    if cell.method not in ("fork", "thread") or waits or (cell.fault in ALIKE and cell.step != "sample"):
        return cell.step == "import" and cell.fault in ("exception", "SIGKILL")
    if cell.in_threads and cell.fault in ("SIGKILL", "os._exit"):
        return cell.step in OF_THREADS
    if cell.step.startswith("shutdown: ") and cell.name == "SIGKILL" and not cell.in_threads:
        return cell.step.removeprefix("shutdown: ") in OF_PROCESSES
    return True


def parameters() -> Iterator[object]:
    """All cells. The first by fork of each fault is quick, unless time has to pass in it; and two imports are."""
    seen = set()
    for cell in (*cells(), *cells("thread")):
        quick = (cell.step, cell.fault, cell.in_threads) not in seen and is_quick(cell)
        seen.add((cell.step, cell.fault, cell.in_threads))
        yield pytest.param(cell, id=str(cell), marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("cell", list(parameters()))
def test_the_loader_survives(cell: Cell, runner: Runner, tmp_path: Path) -> None:
    assert runner.run(cell, tmp_path) == []


def test_a_cell_that_says_and_records_something_else_fails(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cell, "outcome", Expected(Follows.ERROR, "another fault"))
    said, silent, recorded = runner.run(Cell("sample", "exception"), tmp_path)
    assert said.startswith("there was another error: InjectedError: Caught InjectedError")
    assert silent == "no error says 'another fault'"
    assert recorded.startswith("the trace holds no error 'another fault': ['minidl.prove.faults.program.InjectedError")


def test_a_cell_that_does_not_end_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "BOUND", 0.0)
    monkeypatch.setattr(judging, "_recorded", lambda *_: [])
    with Runner() as runner:
        assert "it did not end within 0 s" in runner.run(Cell("sample", "exception"), tmp_path)


def test_what_a_cell_leaves_is_told_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "GRACE", 0.0)
    monkeypatch.setattr(judging, "_recorded", lambda *_: [])
    runner, left = Runner(), subprocess.Popen(["sleep", "100"], start_new_session=True)
    segment = Path(f"/dev/shm/torch_{left.pid}_17_0")
    answers = iter([str(left.pid), "null"])

    def answer() -> str:
        segment.touch()  # once the runner has looked at what was there before
        return next(answers)

    monkeypatch.setattr(runner, "_answer", answer)
    runner._server = SimpleNamespace(stdin=io.StringIO())  # type: ignore[assignment]
    try:
        assert runner.run(Cell("sample", "exception"), tmp_path) == [
            "it did not end within 60 s",
            f"processes are left: [{left.pid}]",
            f"left under /dev/shm: ['{segment.name}']",
        ]
        assert left.wait() == -signal.SIGKILL
    finally:
        segment.unlink()


def test_what_a_cell_with_threads_leaves_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(threads, "SOON", 0.1)
    with warnings.catch_warnings():
        judge = threads.Judge(Cell("loop", "SIGINT", transport="thread"), tmp_path)
        go, stay = threading.Event(), threading.Event()
        spec: Any = SimpleNamespace(worker_id=1)
        worker = WorkerThread(lambda spec: stay.wait(60), (spec,), daemon=True)
        monkeypatch.setattr(loader_threads, "_in_this_thread", lambda spec: spec)
        worker.start()
        with (tmp_path.parent / "left").open("w"):
            found = list(judge.found(go))
    assert found == [
        "threads are left behind without a warning: ['worker 1']",
        f"threads do not leave though they can: [{worker!r}]",
        f"files are left open: ['{tmp_path.parent}/left']",
    ]
    assert go.is_set()
    stay.set()
    worker.join()
    assert list(judge.found(go)) == []
