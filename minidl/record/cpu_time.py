"""CPU time of spans: whether a trace carries it, and the clocks that the traced steps read for it.

Interface: `choose(asked)` decides for a new trace; `cpu_clock` and `run_delay` are what a process reads; `spent` is
what an event carries of two readings.

A thread's CPU clock has no fast path in the kernel: each reading is a system call, of 150 to 1,000 ns. So its cost is
measured when a trace begins. A clock of up to 400 ns is always read: the spans that a batch has once (fetch, collation,
pickling, writing, rebuilding, pinning, the consumer) are read at for about half of a batch's events, which is 200 ns an
event. A slower one is read only while its readings have cost at most SHARE of the process's time; the reading pauses
above that, and goes on below it. Batches of a few milliseconds all have CPU times on any machine; of shorter ones, some
have. The run delay is read six times a batch.
Samples may be any number and of any length, so there the cost is bounded by their length: the clock is read at a
sample's end if `shortest` ns have gone by since the last reading. The manifest says what a reading costs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

Reader = Callable[[], int]

MOST_NS: Final = 400
"""The most that a reading may cost to be read in any case."""

SHARE: Final = 0.01
"""The part of a process's time that the readings of a slower clock may cost."""

LOOK: Final = 64
"""Readings after which that is looked at."""

SHORT_NS: Final = 50_000
"""Samples shorter than this have no CPU time of their own: a reading, with what it delays, would cost over 1 % of them.
What they compute counts with the next reading's sample, which is off by so much at most."""

_TURNS, _READINGS = 8, 32


def choose(asked: bool | None = None, read: Reader = time.thread_time_ns) -> tuple[int, dict[str, Any]]:
    """Return how CPU times are recorded, and what the manifest says of it. asked: None = by what a reading costs.

    How: 0 = not at all; 1 = always; more = what a reading costs in ns: while all have cost at most SHARE of the time.
    """
    _forget_readers()
    cost = _cost(read)
    how = int(asked) if asked is not None else cost if cost > MOST_NS else 1
    return how, {"recorded": how > 0, "reading_ns": cost, "chosen_by": "cost" if asked is None else "user"}


def shortest(how: int) -> int:
    """The shortest sample that has a CPU time of its own, ns; how: as `choose` returns it."""
    return max(SHORT_NS, round(2 * how / SHARE))  # half of the share is for what a batch has once


def _cost(read: Reader) -> int:
    """Return the ns of a reading, in the fastest of some turns: others are those that were interrupted."""
    turns = []
    for _ in range(_TURNS):
        begin = time.perf_counter_ns()
        for _ in range(_READINGS):
            read()
        turns.append(time.perf_counter_ns() - begin)
    return min(turns) // _READINGS


def spent(before: int, after: int) -> int:
    """Return what an event says of the time between two readings: ns, at least 1; 0 = not measured, as a reading of 0.

    The difference may be wrong if the readings are of two threads: the reader of a trace looks at that.
    """
    return max(1, after - before) if before and after else 0


no_reading: Reader = itertools.repeat(0).__next__
"""It returns 0, without a frame of Python."""


class _Budget:
    """What this process's readings of slow clocks have cost, ns; spent: more than SHARE of the time."""

    def __init__(self) -> None:
        self.since, self.cost, self.spent = time.monotonic_ns(), 0, False

    def take(self, cost: int) -> None:
        self.cost += cost
        self.spent = self.cost > SHARE * (time.monotonic_ns() - self.since)


class _Frugal:
    """A reader that returns 0 while the budget of all readers is spent. cost: of a reading, ns."""

    def __init__(self, read: Reader, cost: int) -> None:
        self._read, self._cost, self._count = read, cost, 0

    def __call__(self) -> int:
        self._count += 1
        if not self._count % LOOK:
            _budget.take(0 if _budget.spent else LOOK * self._cost)
        return 0 if _budget.spent else self._read()


@functools.cache
def cpu_clock(how: int) -> Reader:
    """Return the calling thread's CPU clock, ns; how: as `choose` returns it."""
    return no_reading if not how else time.thread_time_ns if how == 1 else _Frugal(time.thread_time_ns, how)


@functools.cache
def run_delay(how: int) -> Reader:
    """Return a function that reads how long its caller has been ready to run and had no CPU, ns; 0 = it cannot say."""
    if how <= 1:
        return _delay_of_caller if how else no_reading
    return _Frugal(_delay_of_caller, _cost(_delay_of_caller))


def _delay_of_caller() -> int:
    reader: _RunDelay
    try:
        reader = _delays.reader
    except AttributeError:
        reader = _delays.reader = _RunDelay()
    return reader()


class _RunDelay:
    """The second number of a thread's schedstat in Linux's /proc, and 1; read through one descriptor, in 0.5 us."""

    def __init__(self) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self._file = os.fstat(self._fd)

    def __call__(self) -> int:
        if self._fd < 0:
            return 0
        try:
            return int(os.pread(self._fd, 96, 0).split()[1]) + 1
        except (OSError, ValueError, IndexError):
            return 0

    def __del__(self) -> None:
        with contextlib.suppress(OSError):  # the program may have closed it, and have another file by its number
            if self._fd >= 0 and os.path.samestat(os.fstat(self._fd), self._file):
                os.close(self._fd)


_budget = _Budget()

_delays: Any = threading.local()
"""`reader`: the calling thread's."""


def _forget_readers() -> None:
    """What the clocks have cost so far is another process's, or another trace's."""
    global _budget
    _budget = _Budget()
    cpu_clock.cache_clear()
    run_delay.cache_clear()


def _after_fork() -> None:
    global _delays
    _delays = threading.local()  # those of the parent's threads are closed
    _forget_readers()


os.register_at_fork(after_in_child=_after_fork)
