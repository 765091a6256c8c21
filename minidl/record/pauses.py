"""Pauses of the garbage collector: each collection of a millisecond or more, in the thread that it stopped.

Interface: a `Pauses` that `watch()`es until `unwatch()`; `taken()` returns the pauses since the last call.

The collector calls `gc.callbacks` in the thread that it stops. A Python function there would be the first code to run
after a collection, so it would also run the handlers of signals that came meanwhile, and what a handler raises there,
as Ctrl-C's does, is lost: the collector drops the errors of its callbacks. So these callbacks consist of C functions
alone: `getattr(probe, "start", info)` reads a property that is `next(probe)`, and the probe is a `map` of C functions.
They keep the longest collections, so that a million short ones cost no memory, and need no decision about any.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappushpop
from itertools import repeat, starmap
from operator import itemgetter, sub
from typing import Any, Final, NamedTuple

LEAST_NS: Final = 1_000_000
"""A shorter collection is no pause."""

MOST: Final = 16
"""The pauses that are kept between two calls of `taken`: the longest."""


class Pause(NamedTuple):
    """One collection. took: ns; begin: ns, CLOCK_MONOTONIC; tid: the thread; about: what `gc` says of it."""

    took: int
    begin: int
    tid: int
    about: dict[str, int]


_NONE: Final[tuple[Any, ...]] = (0, 0, 0, {})


class _AtStart(map):  # type: ignore[type-arg]
    start, stop = property(next), None


class _AtStop(map):  # type: ignore[type-arg]
    start, stop = None, property(next)


class _Told(deque):  # type: ignore[type-arg]
    start = stop = property(None, deque.append)


class Pauses:
    """The collections of this process. A forked child begins with none."""

    def __init__(self) -> None:
        self._longest: list[tuple[Any, ...]] = [_NONE] * MOST  # a heap
        began, told = deque([time.monotonic_ns()], 1), _Told([{}], 1)
        now, thread = (starmap(read, repeat(())) for read in (time.monotonic_ns, threading.get_native_id))
        begin, about = (map(itemgetter(0), repeat(last)) for last in (began, told))
        pauses = zip(map(sub, now, begin), begin, thread, about)  # noqa: B905  # none of them ends
        self._callbacks: list[Callable[[str, Any], object]] = [
            partial(getattr, _AtStart(began.append, now)),
            partial(setattr, told),
            partial(getattr, _AtStop(heappushpop, repeat(self._longest), pauses)),
        ]
        _ALL.add(self)

    def watch(self) -> None:
        gc.callbacks += self._callbacks

    def unwatch(self) -> None:
        gc.callbacks[:] = [one for one in gc.callbacks if all(one is not mine for mine in self._callbacks)]

    def taken(self) -> list[Pause]:
        """Return the pauses since the last call, by time."""
        if max(self._longest)[0] < LEAST_NS:
            return []
        longest, self._longest[:] = self._longest.copy(), [_NONE] * MOST
        pauses = [Pause(*one) for one in longest if one[0] >= LEAST_NS]
        return sorted(pauses, key=lambda pause: pause.begin)

    def forget(self) -> None:
        self._longest[:] = [_NONE] * MOST


_ALL: weakref.WeakSet[Pauses] = weakref.WeakSet()


def _after_fork() -> None:
    for pauses in list(_ALL):
        pauses.forget()


os.register_at_fork(after_in_child=_after_fork)
