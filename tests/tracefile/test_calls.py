"""Which iterators wait, read from the events: pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minidl.tracefile import events as ev
from minidl.tracefile.calls import OpenCall, OpenCalls
from minidl.tracefile.format import RECORD
from minidl.tracefile.watched import NEXT, OWN, SHUTDOWN, START


def rows(*events: tuple[int, int], loader: int = 1) -> Any:
    """Events: (code, time)."""
    out = np.zeros(len(events), RECORD)
    for row, (code, time) in zip(out, events, strict=True):
        row["code"], row["time"], row["loader"], row["seq"] = code, time, loader, 1
    return out


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (ev.WORKER_START[0], START),
        (ev.WORKER_START[1], START),
        (ev.RESUME_PUT, START),
        (ev.EPOCH[0], START),
        (ev.NEXT[0], NEXT),
        (ev.SHUTDOWN[0], SHUTDOWN),
    ],
)
def test_what_an_iterator_waits_for(code: int, what: str) -> None:
    waits = OpenCalls()
    waits.take(rows((code, 7)))
    assert waits.open() == [OpenCall(1, what, 7)]


@pytest.mark.parametrize("code", [ev.NEXT[1], ev.YIELD, ev.CONSUMER[0], ev.EPOCH[1], ev.SHUTDOWN[1]])
def test_after_a_wait_it_is_the_turn_of_the_programs_own_code(code: int) -> None:
    waits = OpenCalls()
    waits.take(rows((ev.NEXT[0], 7), (code, 9)))
    assert (waits.open(), waits.longest) == ([OpenCall(1, OWN, 9)], {NEXT: 2, OWN: 0})
    waits.take(rows((ev.NEXT[0], 14)))
    assert (waits.open(), waits.longest) == ([OpenCall(1, NEXT, 14)], {NEXT: 2, OWN: 5})


def test_polls_and_samples_are_no_progress() -> None:
    waits = OpenCalls()
    waits.take(rows((ev.NEXT[0], 7)))
    waits.take(rows((ev.RESULT_GET[0], 8), (ev.RESULT_GET[1], 9), (ev.SAMPLER_NEXT[0], 10), (ev.FOUND_DEAD, 11)))
    assert waits.open() == [OpenCall(1, NEXT, 7)]


def test_iterators_are_told_apart() -> None:
    waits = OpenCalls()
    waits.take(rows((ev.NEXT[0], 7)))
    waits.take(rows((ev.NEXT[0], 8), (ev.YIELD, 9), loader=2))
    assert waits.open() == [OpenCall(1, NEXT, 7)]


def test_after_a_gap_an_older_wait_is_unknown() -> None:
    waits = OpenCalls()
    waits.take(rows((ev.NEXT[0], 7)))
    waits.take(rows((ev.RESULT_GET[0], 8)), gap=True)
    assert waits.open() == []
