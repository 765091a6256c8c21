"""The rule on spans: each begin has its end, unless it is where its thread was when the trace ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from minidl.check.view import LoaderView, Violation, rule
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Ints, Positions, table_of
from minidl.tracefile.events import EVENTS, Ending, Outcome, Phase
from minidl.tracefile.words import name_of

_IS_BEGIN: Final = table_of(ev.BEGINS)

_ANY_THREAD: Final = np.array([*ev.EPOCH, *ev.NEXT, *ev.CONSUMER, *ev.SHUTDOWN, *ev.JOIN])
"""A thread may begin an epoch that another one iterates over and a third, running the collector, shuts down."""

_NESTS: Final = {ev.COMPUTE[0], ev.DEVICE_COMPUTE[0]}
"""The user's own, which may lie in each other, and end when the user says so."""

_LEAVES: Final = {span[0] for span in (ev.INDEX_GET, ev.INDEX_WRITE, ev.RESULT_WRITE, ev.RESULT_REBUILD)}
"""Spans during which their thread records nothing else of this loader."""

_FOLLOWING: Final = {
    ev.FETCH[0]: ev.RESULT_PUT,
    ev.RESULT_PICKLE[0]: ev.RESULT_WRITE[0],
    ev.WORKER_START[0]: ev.EPOCH[0],
    ev.EPOCH[0]: ev.SHUTDOWN[1],
}
"""What happens, for the same task or epoch, only once the span has ended; spans inside one another are known anyway."""


@rule(
    "spans",
    "begins and ends alternate, and no end is missing if its thread went on",
    "Events are missing in the middle of a thread's record.",
    needs="all",
)
def spans(loader: LoaderView) -> Iterator[Violation]:
    for begin, rows in _span_rows(loader):
        begins = loader.code[rows] == begin
        lane = _lane(loader, rows)
        same = np.r_[lane[1:] == lane[:-1], False]
        for at in np.flatnonzero(begins & np.r_[begins[1:], True] & same):
            if not _interrupted(loader, int(rows[at]), int(rows[at + 1])):
                yield loader.broken("the one before it has no end", rows[at + 1], rows[at])
        orphan = ~begins & ~(np.r_[False, begins[:-1]] & np.r_[False, same[:-1]])
        if not loader.complete:  # the begin may be among what was overwritten
            orphan &= np.r_[False, same[:-1]]
        for at in np.flatnonzero(orphan):
            yield loader.broken("an end without its begin", rows[at], missing=name_of(begin))
        for at in np.flatnonzero(begins & ~same):
            if (after := _went_on(loader, int(rows[at]))) is not None:
                told = f"the {name_of(begin)} before it has no end"
                yield loader.broken(told, after, rows[at], missing=name_of(begin + 1))


def _span_rows(loader: LoaderView) -> Iterator[tuple[int, Positions]]:
    """For each kind of span: its begin's code and its rows, lane by lane in order of time."""
    for begin in ev.BEGINS:
        rows = loader.pick(begin, begin + 1)
        if len(rows) and begin not in _NESTS:
            yield begin, rows[np.argsort(_lane(loader, rows), kind="stable")]


def _lane(loader: LoaderView, rows: Positions) -> Ints:
    """A number for each thread; spans of one kind never overlap on one thread."""
    tid = np.where(np.isin(loader.code[rows], _ANY_THREAD), 0, loader.tid[rows]).astype(np.int64)
    return (loader.process[rows].astype(np.int64) << 32) | tid


def _went_on(loader: LoaderView, row: int) -> int | None:
    """The row of an event that can only have come after the span at `row` had ended, if there is one."""
    code = int(loader.code[row])
    found = []
    if code in _FOLLOWING:
        after = loader.pick(_FOLLOWING[code])
        after = after[(after > row) & (loader.process[after] == loader.process[row])]
        after = after[loader.key[after] == loader.key[row]] if loader.task[row] >= 0 else after
        if loader.worker[row] < 0 or loader.task[row] >= 0 or code == ev.WORKER_START[0]:
            found += after[:1].tolist()
    lane = (
        row
        + 1
        + np.flatnonzero(
            (loader.process[row + 1 :] == loader.process[row])
            & (loader.tid[row + 1 :] == loader.tid[row])
            & ~np.isin(loader.code[row + 1 :], ev.LATE)
        )
    )
    if code in _LEAVES:
        found += lane[:1].tolist()
    elif (end := _end_of_a_span_around(loader, lane)) is not None:
        found.append(end)
    return min(found) if found and not _interrupted(loader, row, len(loader.code)) else None


def _interrupted(loader: LoaderView, row: int, until: int) -> bool:
    """Whether a Ctrl-C may have come before the event that ends the span at `row`: what is around it is cut short.

    A worker leaves next; in a process that says so, `next` raises, an epoch is closed, or the shutdown begins in it.
    """
    mine = row + 1 + np.flatnonzero(loader.process[row + 1 : until] == loader.process[row])
    following = mine[loader.tid[mine] == loader.tid[row]][:1]
    if np.any((loader.code[following] == ev.WORKER_EXIT) & (loader.x[following] == Ending.INTERRUPTED)):
        return True
    if not loader.was_interrupted(row):
        return False
    codes = loader.code[mine]
    raises = (codes == ev.NEXT[1]) & (loader.y[mine] == Outcome.ERROR)
    closes = (codes == ev.EPOCH[1]) & (loader.z[mine] == Ending.CLOSED)
    stops = (codes == ev.SHUTDOWN[0]) & (loader.code[row] == ev.EPOCH[0])
    return bool(np.any(raises | closes | stops))


def _end_of_a_span_around(loader: LoaderView, lane: Positions) -> int | None:
    """The first end in the rest of a thread's events that closes what was begun before them."""
    inner: list[int] = []
    for row in lane[_IS_BEGIN[loader.code[lane]] | _IS_BEGIN[loader.code[lane] - 1]].tolist():
        code = int(loader.code[row])
        if EVENTS[code].phase is Phase.BEGIN:
            inner.append(code)
        elif code - 1 not in inner:
            return int(row)
        else:
            del inner[inner.index(code - 1) :]
    return None
