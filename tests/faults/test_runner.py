"""The matrix of faults: each cell is a test. Those that are slow run with `-m slow`, or by `minidl faults`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minidl.faults import runner as judging
from minidl.faults.cells import Cell, Expected, Follows, cells
from minidl.faults.runner import Runner

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


def parameters() -> Iterator[object]:
    """All cells. The first by fork of each fault is quick, unless time has to pass in it; and two imports are."""
    seen = set()
    for cell in cells():
        first, waits = (cell.step, cell.fault) not in seen, cell.name == "SIGSTOP" or cell.fault == "maps"
        imports = cell.step == "import" and cell.fault in ("exception", "SIGKILL")
        quick = first and ((cell.method == "fork" and not waits) or imports)
        seen.add((cell.step, cell.fault))
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
    assert recorded.startswith("the trace holds no error 'another fault': ['InjectedError: the injected fault'")


def test_a_cell_that_hangs_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "BOUND", 0.0)
    monkeypatch.setattr(judging, "GRACE", 0.0)
    monkeypatch.setattr(judging, "_recorded", lambda *_: [])
    with Runner() as runner:
        first, second = runner.run(Cell("sample", "exception"), tmp_path)
    assert first == "it did not end within 0 s"
    assert second.startswith("processes are left: [")
