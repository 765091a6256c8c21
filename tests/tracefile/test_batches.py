"""Which batch and epoch an event is about, and the counters, against plain loops over the events."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.tracefile import events as ev
from minidl.tracefile.batches import NEVER, Batches, bytes_in_flight, epochs, keys, latest, outstanding, reorder_depth
from minidl.tracefile.reader import Trace, read_trace

TRACES = Path(__file__).parents[2] / "traces"
NAMES = ["persistent", "iterable-uneven-shards", "head-of-line-out-of-order", "worker-sigkilled", "ranks-2-one-gpu"]


@pytest.fixture(params=NAMES)
def trace(request: pytest.FixtureRequest) -> Trace:
    return read_trace(TRACES / f"{request.param}.minidl")


PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=12)


@given(PAIRS, PAIRS, st.booleans())
def test_the_latest_up_to_a_moment_and_the_earliest_from_it(
    known: list[tuple[int, int]], wanted: list[tuple[int, int]], early: bool
) -> None:
    columns = [np.array([pair[i] for pair in pairs], np.int64) for pairs in (known, wanted) for i in (0, 1)]
    for at, (key, when) in zip(latest(*columns, early).tolist(), wanted, strict=True):
        times = [time for other, time in known if other == key and (time >= when if early else time <= when)]
        assert (at < 0) == (not times)
        assert at < 0 or known[at] == (key, min(times) if early else max(times))


def test_keys_are_in_order_and_hold_loader_and_epoch() -> None:
    rows = [(1, -1, 0), (1, 0, 5), (1, 1, 0), (2, 0, 2**31 - 1)]
    found = keys(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))
    assert (np.diff(found) > 0).all()
    assert (found >> 31).tolist() == [1 << 16, (1 << 16) + 1, (1 << 16) + 2, (2 << 16) + 1]


def test_each_batch_and_what_ended_it(trace: Trace) -> None:
    """One pass over the events, with what is under way in a dictionary."""
    open_batches: dict[tuple[int, int], int] = {}
    rows: list[list[int]] = []
    epoch: dict[int, int] = {}
    for loader, task, time, code, worker, x in trace.events[["loader", "task", "time", "code", "worker", "x"]].tolist():
        at = open_batches.get((loader, task), -1)
        if code == ev.EPOCH[0]:
            epoch[loader] = x
        elif code == ev.INDEX_PUT:
            open_batches[loader, task] = len(rows)
            rows.append([loader, epoch.get(loader, 0), task, worker, time, -1, NEVER, 0])
        elif code in (ev.YIELD, ev.WORKER_EXHAUSTED) and at >= 0 and not rows[at][7]:
            rows[at][5:] = [time if code == ev.YIELD else -1, time, code]
        elif code == ev.EPOCH[1]:
            for one in rows:
                if one[0] == loader and not one[7]:
                    one[6:] = [time, code]
    table = Batches(trace.events).table
    names = ["loader", "epoch", "task", "worker", "put", "yielded", "end", "ended_by"]
    assert table[names].tolist() == [tuple(row) for row in rows]


def test_the_epoch_of_a_moment(trace: Trace) -> None:
    found = epochs(trace.events, trace.events["loader"], trace.events["time"])
    now: dict[int, int] = {}
    expected = []
    for loader, code, x in trace.events[["loader", "code", "x"]].tolist():
        if code == ev.EPOCH[0]:
            now[loader] = x
        expected.append(now.get(loader, -1))
    assert np.count_nonzero(found != expected) <= np.count_nonzero(np.diff(trace.events["time"]) == 0)


def test_nothing_is_in_flight_when_all_is_yielded(healthy: Trace) -> None:
    batches = Batches(healthy.events)
    assert (batches.table["ended_by"] == ev.YIELD).all()
    times, values = bytes_in_flight(batches, np.ones(len(batches.table), bool))
    assert (np.diff(times) >= 0).all()
    assert values.max() > values[-1] == 0
    for counter in (outstanding, reorder_depth):
        _, values = counter(healthy.events)
        assert values.min() >= values[-1] == 0


def test_a_trace_without_batches() -> None:
    empty = np.empty(0, read_trace(TRACES / "persistent.minidl").events.dtype)
    assert len(Batches(empty).table) == 0
    assert len(epochs(empty, empty["loader"], empty["time"])) == 0
