"""The calls that a program is in, read from its events: pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minidl.tracefile import events as ev
from minidl.tracefile.calls import OpenCall, OpenCalls
from minidl.tracefile.events import CALLS, Call
from minidl.tracefile.format import RECORD


def rows(*events: tuple[int, int], loader: int = 1, x: int = 1) -> Any:
    """Events: (code, time). x: of all of them; of a `next`, rcvd_idx."""
    out = np.zeros(len(events), RECORD)
    for row, (code, time) in zip(out, events, strict=True):
        row["code"], row["time"], row["loader"], row["seq"], row["x"] = code, time, loader, 1, x
    return out


@pytest.mark.parametrize("code", [code for code, call in CALLS.items() if call is not Call.OWN])
def test_an_iterator_is_in_the_call_of_its_latest_event(code: int) -> None:
    calls = OpenCalls()
    calls.take(rows((code, 7)))
    assert calls.open() == [OpenCall(1, CALLS[code], 7)]


@pytest.mark.parametrize("code", [code for code, call in CALLS.items() if call is Call.OWN])
def test_after_a_call_the_programs_own_code_runs(code: int) -> None:
    calls = OpenCalls()
    calls.take(rows((ev.NEXT[0], 7), (code, 9)))
    assert (calls.open(), calls.longest) == ([OpenCall(1, Call.OWN, 9)], {Call.NEXT: 2, Call.OWN: 0})
    calls.take(rows((ev.NEXT[0], 14)))
    assert (calls.open(), calls.longest) == ([OpenCall(1, Call.NEXT, 14)], {Call.NEXT: 2, Call.OWN: 5})


def test_polls_and_samples_are_no_progress_and_iterators_are_told_apart() -> None:
    calls = OpenCalls()
    calls.take(rows((ev.NEXT[0], 7)))
    calls.take(rows((ev.RESULT_GET[0], 8), (ev.RESULT_GET[1], 9), (ev.SAMPLER_NEXT[0], 10), (ev.FOUND_DEAD, 11)))
    calls.take(rows((ev.NEXT[0], 12), (ev.YIELD, 13), loader=2))
    assert calls.open() == [OpenCall(1, Call.NEXT, 7)]


def test_after_a_gap_an_older_wait_is_unknown() -> None:
    calls = OpenCalls()
    calls.take(rows((ev.NEXT[0], 7)))
    calls.take(rows((ev.RESULT_GET[0], 8)), gap=True)
    assert calls.open() == []


def test_an_epochs_first_wait_is_no_measure_for_the_others() -> None:
    """Workers start in it: 30 s there say nothing of a wait in the middle of an epoch."""
    calls = OpenCalls()
    calls.take(rows((ev.NEXT[0], 10), (ev.YIELD, 40), x=0))
    calls.take(rows((ev.NEXT[0], 41), (ev.YIELD, 43), (ev.NEXT[0], 50)))
    (now,) = calls.open()
    assert (now.first, calls.past(now)) == (False, 2)
    calls.take(rows((ev.YIELD, 51), (ev.NEXT[0], 61), x=0))
    (now,) = calls.open()
    assert (now.first, calls.past(now)) == (True, 30)
