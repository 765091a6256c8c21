"""A recorded run, stepped through: forwards and backwards, by events, by batches, or to a moment.

Interface: `Replay(trace, loader)` follows one iterator. At position p, its first p events have happened; `state` is
the `state.ProtocolState` after them, `event` the last of them, `words` that event as a sentence, `changed` its effect.

Rules of use: events are in the order of `follower.causal_order`: no message is received before it is sent. A state is
worked out from a copy of the follower kept every `EVERY` events, so a step back costs no more than `EVERY` forward; a
run for which `MOST_KEPT` copies do not suffice keeps them further apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from minidl.playback.actors import Row, as_dicts
from minidl.playback.follower import causal_order, follower_of
from minidl.playback.state import ProtocolState
from minidl.playback.words import FieldChange, changes, describe
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Ints, Positions, Rows
from minidl.tracefile.events import Outcome
from minidl.tracefile.open_spans import left_alive
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import ends

EVERY: Final = 512
"""Events between two kept copies, at least: a step back takes a millisecond."""

MOST_KEPT: Final = 512
"""Copies that are kept of a long run: one takes some 5 KB, and 1 KB for each worker."""

LONG: Final = 250_000
"""Following this many events takes about half a second; a longer way calls `progress`."""


class Replay:
    """One iterator's run at a position that moves.

    loader: the iterator's number; None takes the one with the most events. Raises ValueError if no such iterator has
    recorded anything.
    """

    def __init__(self, trace: Trace, loader: int | None = None) -> None:
        self.trace = trace
        self.loader = _choose(trace, loader)
        own = np.flatnonzero(trace.events["loader"] == self.loader)
        self.rows: Positions = own[causal_order(trace.events[own])]
        """Of each event in the order of the replay, its row in `trace.events`."""
        self._events = trace.events[self.rows]
        self._times = np.maximum.accumulate(self._events["time"])
        self.batch_positions = _batches(self._events)
        """Where `to_batch` goes for each batch."""
        self.wait_positions, self.wait_times = _waits(self._events)
        """Of each call of next(): the position after its begin; ns to its end, or to the last event if it has none."""
        self.progress: Callable[[int, int], None] | None = None
        """Called with (events followed, events to follow) on a long way, at every copy that is kept of it."""
        self._every = max(EVERY, -(-len(self.rows) // MOST_KEPT))
        self._kept = [follower_of(trace, self.loader, self._events)]
        self._at = copy.copy(self._kept[0])
        self._block: tuple[int, list[Row]] = -1, []
        self._before: ProtocolState | None = None
        self._state = self._at.state()

    # --- where it is
    def __len__(self) -> int:
        return len(self.rows)

    @property
    def position(self) -> int:
        """The number of events that have happened, from 0 to len(self)."""
        return self._at.stepped

    @property
    def state(self) -> ProtocolState:
        """The state at this position."""
        return self._state

    @property
    def event(self) -> np.void | None:
        """The row of `trace.events` that led here; None at the beginning."""
        return self._events[self.position - 1] if self.position else None

    @property
    def words(self) -> str:
        """The event that led here, in words."""
        return (
            "nothing has happened yet"
            if self.event is None
            else describe(self.trace, self.event, pinned=self._at.pinned)
        )

    @property
    def changed(self) -> tuple[FieldChange, ...]:
        """What the event that led here changed."""
        return () if self._before is None else changes(self._before, self._state)

    @property
    def batches(self) -> int:
        """The number of batches (or errors in place of one) that were handed out, in all epochs together."""
        return len(self.batch_positions)

    @property
    def batch(self) -> int:
        """The number of them that have been handed out by now."""
        return int(np.searchsorted(self.batch_positions, self.position, side="right"))

    @property
    def last_time(self) -> float:
        """The moment of the last event, seconds after the trace's first."""
        return int(self._times[-1] - self.trace.start) / 1e9 if len(self) else 0.0

    @property
    def ending(self) -> str:
        """How the run ended; "" if it did not: it was killed, or is still running."""
        codes = self._events["code"]
        if (codes == ev.SHUTDOWN[1]).any():
            return "shut down"
        if self.loader in left_alive(self.trace):
            return "alive at the program's end"
        alone = not np.isin(codes, (ev.TASK_ASSIGNED, ev.INDEX_PUT)).any()
        return "the epoch was over" if alone and (codes == ev.EPOCH[1]).any() else ""

    def __repr__(self) -> str:
        end = self.ending or "it did not end"
        return (
            f"<Replay of iterator {self.loader} of {self.trace.path}: at {self.position} of {len(self)} events; {end}>"
        )

    def __copy__(self) -> Replay:
        new = Replay.__new__(Replay)
        new.__dict__.update(self.__dict__, _at=copy.copy(self._at))
        return new

    # --- moving
    def to(self, position: int) -> ProtocolState:
        """Go to a position. Raises IndexError if there is none."""
        if not 0 <= position <= len(self):
            raise IndexError(f"event {position}: give 0 (before the first) to {len(self)} (the iterator's last)")
        if position != self.position or (position and self._before is None):
            if position == 0:
                self._at, self._before = copy.copy(self._kept[0]), None
            else:
                if position - 1 != self.position:
                    self._run_to(position - 1)
                    self._state = self._at.state()
                self._before = self._state
                self._run_to(position)
            self._state = self._at.state()
        return self._state

    def forward(self, n: int = 1) -> ProtocolState:
        """Go n events on, at most to the end."""
        return self.to(min(max(self.position + n, 0), len(self)))

    def back(self, n: int = 1) -> ProtocolState:
        """Go n events back, at most to the beginning."""
        return self.forward(-n)

    def at(self, seconds: float) -> ProtocolState:
        """Go to a moment: all that was stamped up to `seconds` after the trace's first event has happened.

        Raises IndexError for a moment that the trace does not reach.
        """
        time = self.trace.events["time"]
        length = int(time[-1] - time[0]) / 1e9
        if not 0 <= seconds <= length + 1e-6:  # a moment may be rounded, to the six digits in which it is shown
            raise IndexError(f"{seconds:g} s: give 0 to {length:.6f} s, which is the time of the trace's last event")
        moment = int(time[0]) + round(seconds * 1e9)
        return self.to(int(np.searchsorted(self._times, moment, side="right")))

    def to_batch(self, n: int) -> ProtocolState:
        """Go to where batch n (from 0, counted through all epochs) is in the consumer's hands. Raises IndexError."""
        if not 0 <= n < self.batches:
            raise IndexError(f"batch {n}: this run handed out {self.batches}, counted from 0")
        return self.to(int(self.batch_positions[n]))

    def next_batch(self) -> ProtocolState:
        """Go to where the next batch is in the consumer's hands; to the end if there is none."""
        return self.to_batch(self.batch) if self.batch < self.batches else self.to(len(self))

    def previous_batch(self) -> ProtocolState:
        """Go back to where the batch before is in the consumer's hands; to the beginning if there is none."""
        before = int(np.searchsorted(self.batch_positions, self.position, side="left"))
        return self.to_batch(before - 1) if before else self.to(0)

    def to_wait(self, by: int) -> ProtocolState:
        """Go to the begin of the next long wait for a batch (by = 1) or of the one before (-1); stay if there is none.

        Long: at least a tenth of the longest.
        """
        long = self.wait_positions[self.wait_times * 10 >= self.wait_times.max(initial=0)]
        there = long[long > self.position][:1] if by > 0 else long[long < self.position][-1:]
        return self.to(int(there[0])) if len(there) else self.state

    def to_longest_wait(self) -> ProtocolState:
        """Go to the begin of the longest wait for a batch; stay if there is no wait."""
        return self.to(int(self.wait_positions[self.wait_times.argmax()])) if len(self.wait_times) else self.state

    def to_fetch(self, worker: int) -> ProtocolState:
        """Go to a worker's next begin of a fetch, after the last one to the first. Raises IndexError if it has none."""
        found = np.flatnonzero((self._events["code"] == ev.FETCH[0]) & (self._events["worker"] == worker)) + 1
        if not len(found):
            known = ", ".join(map(str, np.unique(self._events["worker"][self._events["code"] == ev.FETCH[0]]).tolist()))
            raise IndexError(f"worker {worker} fetched no batch: give one of {known or 'none'}")
        later = found[found > self.position]
        return self.to(int(later[0] if len(later) else found[0]))

    def fetches(self, begin: int, end: int) -> list[list[int]]:
        """Return [position - begin, worker] of each begin of a fetch from position `begin` to `end`."""
        found = np.flatnonzero(self._events["code"] == ev.FETCH[0])
        found = found[(found + 1 >= begin) & (found + 1 <= end)]
        return [
            [at + 1 - begin, worker]
            for at, worker in zip(found.tolist(), self._events["worker"][found].tolist(), strict=True)
        ]

    def to_row(self, row: int) -> ProtocolState:
        """Go to just after the event at `row` in `trace.events`. Raises IndexError if it is another iterator's."""
        return self.to(self.position_of(row))

    def position_of(self, row: int) -> int:
        """Return the position just after the event at `row` in `trace.events`. Raises IndexError as `to_row` does."""
        found = np.flatnonzero(self.rows == row)
        if not len(found):
            raise IndexError(f"row {row} is not an event of iterator {self.loader}")
        return int(found[0]) + 1

    def walk(self, begin: int = 0, end: int | None = None) -> Iterator[ProtocolState]:
        """Yield the state at each position from `begin` to `end` (default: the last), going there."""
        for position in range(begin, len(self) + 1 if end is None else end + 1):
            yield self.to(position)

    def _run_to(self, position: int) -> None:
        """Bring the follower to `position`, from where it is or from the nearest kept copy before it."""
        nearest = min(position // self._every, len(self._kept) - 1)
        if not nearest * self._every <= self._at.stepped <= position:
            self._at = copy.copy(self._kept[nearest])
        begin = self._at.stepped
        while self._at.stepped < position:
            block, done = divmod(self._at.stepped, self._every)
            for event in self._events_of(block)[done : position - block * self._every]:
                self._at.step(event)
            if self._at.stepped == len(self._kept) * self._every:
                self._kept.append(copy.copy(self._at))
            if self.progress is not None and position - begin > LONG:
                self.progress(self._at.stepped - begin, position - begin)

    def _events_of(self, block: int) -> list[Row]:
        """The events between one kept copy and the next."""
        if self._block[0] != block:
            rows = slice(block * self._every, (block + 1) * self._every)
            self._block = block, list(as_dicts(self._events, rows))
        return self._block[1]


def _choose(trace: Trace, loader: int | None) -> int:
    numbers, counts = np.unique(trace.events["loader"], return_counts=True)
    there = {int(n): int(count) for n, count in zip(numbers, counts, strict=True) if n > 0}
    if not there:
        raise ValueError(f"{trace.path}: no iterator has recorded anything: record a run with minidl run --trace")
    if loader is None:
        return max(there, key=lambda number: (there[number], -number))
    if loader not in there:
        known = ", ".join(f"{number} ({count} events)" for number, count in there.items())
        raise ValueError(f"{trace.path} has no iterator {loader}: it has {known}")
    return loader


def _waits(events: Rows) -> tuple[Positions, Ints]:
    begins = np.flatnonzero(events["code"] == ev.NEXT[0])
    until = events["time"][ends(events)[begins]]  # without an end, position -1: the last event
    return begins + 1, until - events["time"][begins]


def _batches(events: Rows) -> Positions:
    """The positions at which each batch is in the consumer's hands: its consumer span has begun, if there is one."""
    codes = events["code"]
    handed = np.flatnonzero(codes == ev.YIELD)
    if not len(handed):  # of an observed loader, only the end of each call of next is recorded
        handed = np.flatnonzero((codes == ev.NEXT[1]) & (events["y"] != Outcome.EXHAUSTED))
    begins = np.append(np.flatnonzero(codes == ev.CONSUMER[0]), len(codes))
    begun = begins[np.searchsorted(begins, handed)]
    following = np.append(handed[1:], len(codes))
    return np.where(begun < following, begun, handed) + 1
