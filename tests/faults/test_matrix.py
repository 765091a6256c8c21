"""Cells of the table of faults: a few of each step in the suite; `python -m minidl.faults` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest

from minidl.faults import matrix
from minidl.faults.matrix import STEPS, Cell, cells, run_cell, table

QUICK = (
    Cell("start", "SIGKILL"),
    Cell("init", "exception", kind="iterable"),
    Cell("sample", "SIGSEGV", persistent=True),
    Cell("collate", "unpicklable"),
    Cell("feeder", "sys.exit"),
    Cell("between epochs", "SIGTERM", persistent=True),
    Cell("loop", "SIGKILL", kind="iterable"),
    Cell("worker's exit", "os._exit"),
)


@pytest.mark.live
@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_a_cell_passes(cell: Cell, tmp_path: Path) -> None:
    assert run_cell(cell, tmp_path) == []


@pytest.mark.live
def test_a_cell_that_says_and_records_something_else_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "WORDS", "another fault")
    said, recorded = run_cell(Cell("sample", "exception"), tmp_path)
    assert said.startswith("no error says 'another fault': ['InjectedError: Caught InjectedError")
    assert recorded.startswith("the trace holds no error: ['InjectedError: the injected fault'")


@pytest.mark.live
def test_a_cell_that_hangs_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "BOUND", 0.01)
    monkeypatch.setattr(matrix, "GRACE", 0.0)
    monkeypatch.setattr(matrix, "_recorded", lambda *_: [])
    first, second = run_cell(Cell("sample", "exception"), tmp_path)
    assert first == "it did not end within 0.01 s"
    assert second.startswith("processes are left: [")


def test_the_table_lists_every_fault_of_every_step() -> None:
    every = list(cells())
    assert len(every) == len(set(every))
    assert {(cell.step, cell.fault) for cell in every} == {(s, f) for s, faults in STEPS.items() for f in faults}
    assert set(QUICK) <= set(every)
    lines = list(table({cell: ([] if cell.persistent else ["no"], 1.0) for cell in every}))
    assert len(lines) == 1 + sum(map(len, STEPS.values()))
    assert lines[1].split() == ["start", "os._exit", *["WRONG", "1.0", "s", "ok", "1.0", "s"] * 2]
