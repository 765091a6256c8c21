"""The shortest slice: of a trace's events, as few as still break the same rule at the same event for the same reason.

`shortest(loader, violation)` returns rows of the trace. Removing any one of them makes the breach vanish or become
another one, if `Slice.minimal`; a breach of the replayed dispatcher may depend on a whole epoch, and is then cut only
as far as the budget goes. What is missing can't be in a slice: `Violation.missing` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from minidl.check.view import TABLE, LoaderView, Violation
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Positions

BUDGET: Final = 1_000
"""So many smaller slices are tried at most, each at the cost of one rule on a few events."""

LONGEST: Final = 2_000
"""A slice that must be cut from more events than these is not cut at all."""


@dataclass(frozen=True, slots=True)
class Slice:
    """rows of the trace, in order; minimal: whether none of them can be left out."""

    rows: tuple[int, ...]
    minimal: bool


class _BudgetSpentError(Exception):
    """The budget is used up."""


class _Oracle:
    """Does a selection of rows still show the breach?"""

    def __init__(self, loader: LoaderView, violation: Violation) -> None:
        self.loader, self.violation = loader, violation
        self.check = TABLE[violation.rule].check
        self.left = BUDGET
        self.known: dict[tuple[int, ...], bool] = {}

    def __call__(self, rows: Sequence[int]) -> bool:
        key = tuple(rows)
        if key not in self.known:
            if not self.left:
                raise _BudgetSpentError
            self.left -= 1
            self.known[key] = shows(self.loader, self.violation, np.asarray(rows, np.intp))
        return self.known[key]


def shows(loader: LoaderView, violation: Violation, rows: Positions) -> bool:
    """Whether `rows` of the view alone break the violation's rule at its event for its reason."""
    if not len(rows):
        return False
    part = loader.restricted(rows)
    same = (violation.at, violation.reason)
    return any((found.at, found.reason) == same for found in TABLE[violation.rule].check(part))


def shortest(loader: LoaderView, violation: Violation) -> Slice:
    """The shortest slice of `loader`'s events that shows `violation`, which a rule found in it."""
    oracle = _Oracle(loader, violation)
    place = {int(row): at for at, row in enumerate(loader.origin)} if len(violation.rows) > 8 else None
    own = [_place(loader, row) if place is None else place.get(row, -1) for row in violation.rows]
    own = sorted({row for row in own if row >= 0})
    if not own:
        return Slice(tuple(sorted(violation.rows)), minimal=False)
    for rows in _candidates(loader, violation, own):
        try:
            if len(rows) <= LONGEST and oracle(rows):
                return _origins(loader, *_cut(rows, oracle))
        except _BudgetSpentError:
            break
    return _origins(loader, own, False)


def _place(loader: LoaderView, row: int) -> int:
    at = int(np.searchsorted(loader.origin, row))
    return at if at < len(loader.origin) and loader.origin[at] == row else -1


def _origins(loader: LoaderView, rows: Sequence[int], minimal: bool) -> Slice:
    return Slice(tuple(int(loader.origin[row]) for row in rows), minimal)


def _candidates(loader: LoaderView, violation: Violation, own: list[int]) -> Iterator[list[int]]:
    """Selections that may show the breach, the smallest first: its own rows, with their epoch's begin, and more."""
    yield own
    at = _place(loader, violation.at)
    begin = loader.begins[loader.begins <= at][-1:]
    yield sorted({*own, *begin.tolist()})
    before = np.arange(max(own) + 1)
    related = np.isin(loader.key[before], loader.key[own]) | np.isin(loader.code[before], _FRAME)
    if loader.worker[at] >= 0:
        related |= loader.worker[before] == loader.worker[at]
    since = int(begin[0]) if len(begin) else 0
    in_epoch = before >= since
    yield sorted({*own, *np.flatnonzero(related & in_epoch).tolist()})
    for chosen in (in_epoch & np.isin(loader.code[before], _DECISIONS), related, in_epoch, before >= 0):
        yield sorted({*own, *np.flatnonzero(chosen).tolist()})


_FRAME: Final = [*ev.EPOCH, ev.FOUND_DEAD, ev.WORKER_EXHAUSTED, ev.DONE_EVENT_SET, ev.SENTINEL_PUT, ev.SENTINEL_GET]
_DECISIONS: Final = [
    *(*ev.EPOCH, ev.TASK_ASSIGNED, ev.RESULT_GET[1], ev.READY_GET[1], ev.WORKER_EXHAUSTED, ev.FOUND_DEAD),
    *(ev.REORDER_STORE, ev.REORDER_POP, ev.RCVD_ADVANCE, ev.YIELD, *ev.NEXT, *ev.CONSUMER, *ev.SHUTDOWN),
]


def _cut(rows: list[int], oracle: Callable[[Sequence[int]], bool]) -> tuple[list[int], bool]:
    """Delta debugging: leave out ever smaller pieces for as long as the rest shows the breach; at last single rows."""
    size = max(1, len(rows) // 2)
    try:
        while True:
            start, shrunk = 0, False
            while start < len(rows):
                rest = rows[:start] + rows[start + size :]
                if oracle(rest):
                    rows, shrunk = rest, True
                else:
                    start += size
            if size == 1 and not shrunk:
                return rows, True
            size = size if shrunk and size == 1 else max(1, size // 2)
    except _BudgetSpentError:
        return rows, False
