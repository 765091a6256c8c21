"""Ranks with different numbers of batches: who waits, and for whom."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle_trace import write_process

from minidl.hang.finding import Finding, RunOutcome
from minidl.hang.headline import headline
from minidl.tracefile import events as ev
from minidl.tracefile.events import Ending, Outcome
from minidl.tracefile.reader import read_trace

MS = 1_000_000


def rank(
    folder: Path, number: int, batches: int, last_ms: int, ended: bool, epochs: int = 1, error: str = "", later: int = 0
) -> None:
    """A rank without workers, whose steps take 5 ms, the last one `last_ms`."""
    loader, pid = number + 1, 100 + number
    events, at = [], 1000 + later * MS

    def emit(code: int, after: int = 1, **values: int) -> None:
        nonlocal at
        at += after * MS
        events.append({"time": at, "code": code, "loader": loader, "tid": pid} | values)

    for epoch in range(epochs):
        emit(ev.EPOCH[0], x=epoch)
        for task in range(batches):
            emit(ev.NEXT[0], task=task)
            emit(ev.YIELD, task=task, x=Outcome.DATA)
            emit(ev.NEXT[1], task=task, y=Outcome.DATA)
            emit(ev.CONSUMER[0], task=task)
            emit(ev.CONSUMER[1], last_ms if task == batches - 1 else 5, task=task)
        if ended or epoch < epochs - 1:
            emit(ev.EPOCH[1], x=epoch, y=batches, z=Ending.EXHAUSTED)
    lines = [
        {"kind": "loader", "loader": loader, "rank": number, "dataset": "D", "made_at": "train.py:7", "dataloader": 1}
    ]
    lines += [{"kind": "uncaught", "error": error, "at": ["train.py:9"]}] * bool(error)
    write_process(folder, events, pid=pid, role="loader", loader=loader, lines=lines, rank=number)


def found(folder: Path) -> Finding:
    return headline(read_trace(folder))


def test_the_rank_that_waits_and_the_one_that_has_no_more(tmp_path: Path) -> None:
    rank(tmp_path, 0, 41, 6000, ended=False)
    rank(tmp_path, 1, 40, 5, ended=True)
    told = found(tmp_path)
    assert told.outcome is RunOutcome.HUNG
    assert told.title == (
        "hung for 6.00 s: rank 0 waited in its step after batch 41; the epoch of rank 1 had ended after 40: the ranks "
        "have different numbers of batches"
    )
    assert "minidl audit" in told.helps


@pytest.mark.parametrize(
    ("error", "later", "uneven"),
    [
        ("RuntimeError: Timed out waiting 6000ms for recv", 0, True),
        ("ValueError: bad label", 0, False),
        ("", 20_000, False),
    ],
    ids=["the wait's own error", "an error of its own", "the other ended later"],
)
def test_what_ends_the_step_and_when_decides(error: str, later: int, uneven: bool, tmp_path: Path) -> None:
    rank(tmp_path, 0, 41, 6000, ended=False, error=error)
    rank(tmp_path, 1, 40, 5, ended=True, later=later)
    assert ("different numbers of batches" in found(tmp_path).title) is uneven


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"batches": 41, "last_ms": 6000, "ended": False}, {"batches": 41, "last_ms": 5, "ended": True}),
        ({"batches": 41, "last_ms": 5, "ended": False}, {"batches": 40, "last_ms": 5, "ended": True}),
        ({"batches": 41, "last_ms": 6000, "ended": True}, {"batches": 40, "last_ms": 5, "ended": True}),
        ({"batches": 41, "last_ms": 6000, "ended": False}, {"batches": 40, "last_ms": 5, "ended": True, "epochs": 2}),
    ],
    ids=["as many batches", "no long step", "it went on", "another epoch"],
)
def test_other_ends_are_not_called_uneven(tmp_path: Path, first: dict[str, int], second: dict[str, int]) -> None:
    rank(tmp_path, 0, **first)  # type: ignore[arg-type]
    rank(tmp_path, 1, **second)  # type: ignore[arg-type]
    assert "different numbers of batches" not in found(tmp_path).title
