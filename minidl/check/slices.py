"""The shortest slice: of a trace's events, as few as still break the same rule at the same event for the same reason.

`shortest(loader, violation)` returns rows of the trace. Removing any one of them makes the breach vanish or become
another one, if `Slice.minimal`; a breach of the replayed dispatcher may depend on a whole epoch, and is then cut only
as far as the budget goes. What is missing can't be in a slice: `Violation.missing` names it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from minidl.check.view import TABLE, LoaderView, Violation
from minidl.playback.actors import DispatcherReplay, LoaderReplay
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


def shows(loader: LoaderView, violation: Violation, rows: Positions) -> bool:
    """Whether `rows` of the view alone break the violation's rule at its event for its reason."""
    if not len(rows):
        return False
    same = (violation.at, violation.reason)
    found = TABLE[violation.rule].check(loader.restricted(rows))
    return any((each.at, each.reason) == same for each in found)


def shortest(loader: LoaderView, violation: Violation) -> Slice:
    """The shortest slice of `loader`'s events that shows `violation`, which a rule found in it."""
    tries = itertools.count(1)

    @functools.cache
    def is_enough(*rows: int) -> bool:
        if next(tries) > BUDGET:
            raise _BudgetSpentError
        return shows(loader, violation, np.array(rows, np.intp))

    own = np.flatnonzero(np.isin(loader.origin, violation.rows)).tolist()
    if not own:
        return Slice(tuple(sorted(violation.rows)), minimal=False)
    shown, minimal = own, False
    with contextlib.suppress(_BudgetSpentError):
        for rows in _candidates(loader, int(np.flatnonzero(loader.origin == violation.at)[0]), own):
            if len(rows) <= LONGEST and is_enough(*rows):
                shown, minimal = _cut(rows, is_enough)
                break
    return Slice(tuple(loader.origin[shown].tolist()), minimal)


def _candidates(loader: LoaderView, at: int, own: list[int]) -> Iterator[list[int]]:
    """Selections that may show the breach, the smallest first: its own rows, with their epoch's begin, and more."""
    yield own
    begin = loader.begins[loader.begins <= at][-1:]
    yield sorted({*own, *begin.tolist()})
    before = np.arange(max(own) + 1)
    related = np.isin(loader.key[before], loader.key[own]) | np.isin(loader.code[before], _FRAME)
    if loader.worker[at] >= 0:
        related |= loader.worker[before] == loader.worker[at]
    in_epoch = before >= (begin[0] if len(begin) else 0)
    decisions = np.isin(loader.code[before], _DECISIONS)
    for chosen in (related & in_epoch, decisions & in_epoch, related, in_epoch, before >= 0):
        yield sorted({*own, *np.flatnonzero(chosen).tolist()})


_FRAME: Final = [*ev.EPOCH, ev.FOUND_DEAD, ev.WORKER_EXHAUSTED, ev.DONE_EVENT_SET, ev.SENTINEL_PUT, ev.SENTINEL_GET]
_DECISIONS: Final = [*DispatcherReplay.READS, *LoaderReplay.READS]


def _cut(rows: list[int], is_enough: Callable[..., bool]) -> tuple[list[int], bool]:
    """Delta debugging: leave out ever smaller pieces for as long as the rest shows the breach; at last single rows."""
    size = max(1, len(rows) // 2)
    try:
        while True:
            start, shrunk = 0, False
            while start < len(rows):
                rest = rows[:start] + rows[start + size :]
                if is_enough(*rest):
                    rows, shrunk = rest, True
                else:
                    start += size
            if size == 1 and not shrunk:
                return rows, True
            size = size if shrunk and size == 1 else max(1, size // 2)
    except _BudgetSpentError:
        return rows, False
