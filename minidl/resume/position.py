"""How far the consumer has come in an epoch, and where a resumed epoch goes on. Pure decisions.

Workers run ahead of the consumer, so a state tells what was *yielded*; what was fetched and not yielded is fetched
again. Two kinds of dataset need two kinds of position:

- map-style: draws from the sampler, numbered from 0. Those below `low` are yielded, and so are those in `ahead`, if
  batches may come out of order. A resumed epoch draws them again and drops them; nothing is fetched for that.
- iterable: a `Position` for each worker, with the number of its batches that are yielded, and its last state, which is
  that of batch number `at`. A resumed worker loads the state, and fetches and drops `yielded - at` batches.

A state comes with a batch and counts from the moment when this batch is yielded; until then it waits in `arrived`.
`defer` delays the counting: a device stage takes batches before its own consumer does, and releases them one by one.
`lag` keeps the last ones back for `settle_but`: a framework may take some ahead of its training, and say so only when
it asks for the state.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final

from minidl.wire.atomic import Step, at_once

END: Final = object()
"""Stands for the end of the epoch among the deferred batches, and of a sampler."""

LAZY: Final = 256
"""Batches that are counted at once if no state waits for one of them."""

DEFERRED: Final = 1 << 62
"""As a patience: nothing is counted before it is released."""


@dataclass(slots=True)
class Position:
    """How far one worker has come. state: packed, of its batch number `at`. over: it belongs to the epoch before."""

    yielded: int = 0
    at: int = 0
    state: bytes | None = None
    over: bool = False
    arrived: deque[tuple[int, int, bytes]] = field(default_factory=deque)  # number, task, state

    @property
    def behind(self) -> int:
        """Batches to fetch again after the state is loaded."""
        return self.yielded - self.at


@dataclass(slots=True)
class EpochPosition:
    """How far the consumer has come in one epoch.

    places: one for each worker, or one for the loader's own process. indexed: whether tasks are draws from a sampler.
    batches: yielded without an error. turn: the worker whose turn is next. drawn: (draws, state) of the sampler.
    lag: so many of the last batches are not counted before the state is asked for.
    """

    places: list[Position]
    indexed: bool
    low: int = 0
    ahead: set[int] = field(default_factory=set)
    batches: int = 0
    turn: int = 0
    drawn: deque[tuple[int, bytes]] = field(default_factory=deque)
    ended: bool = False
    log: deque[Any] = field(default_factory=deque)  # (task, worker) that were handed out and are not counted yet
    settled: int = 0  # entries of the log that are counted
    patience: int = LAZY  # so many entries are counted at once
    lag: int = 0
    released: int = 0  # entries, if they are deferred
    gaps: list[int] = field(init=False)  # draws below the highest in `ahead` that were not yielded: the first tasks
    beyond: int = field(init=False)  # draw number of the task after them

    def __post_init__(self) -> None:
        self.beyond = max(self.ahead) + 1 if self.ahead else self.low
        self.gaps = [number for number in range(self.low, self.beyond) if number not in self.ahead]

    @property
    def resumed(self) -> bool:
        """Whether the epoch begins in its middle."""
        return bool(self.low or self.ahead or self.log or any(place.yielded for place in self.places))

    def draw_of(self, task: int) -> int:
        """The number of the draw that is task `task`; tasks are numbered from 0 in a resumed epoch, too."""
        return self.gaps[task] if task < len(self.gaps) else self.beyond + task - len(self.gaps)

    # --- What comes from the workers and the sampler
    def received(self, task: int, worker: int, state: tuple[int, bytes]) -> None:
        """A result has come with a state; (number, state): that of the worker's batch of this number."""
        place = self.places[worker]
        place.arrived.append((state[0], task, state[1]))
        self.settle()
        self._catch_up(worker, place)

    def epoch_begun(self, worker: int, state: bytes | None) -> None:
        """A persistent worker begins the epoch with what the last one left; forget its leftovers."""
        self.places[worker] = Position(state=state, over=state is not None)

    def drew(self, number: int, state: bytes) -> None:
        """The sampler's state after its first `number` draws."""
        self.drawn.append((number, state))
        self.settle()
        self.sampler_state()

    def sampler_state(self) -> tuple[int, bytes] | None:
        """The sampler's last state that is not ahead of what was yielded; drops those before it."""
        with suppress(ValueError, IndexError):  # a signal's handler has dropped it, or there is one alone
            while (first := self.drawn[0]) and self.drawn[1][0] <= self.low:
                self.drawn.remove(first)
        return self.drawn[0] if self.drawn and self.drawn[0][0] <= self.low else None

    # --- What goes to the consumer
    def hand_out(self, task_and_worker: tuple[int, int]) -> None:
        """The consumer gets a task's batch. The last step says so; those before count earlier ones, if it is time."""
        if len(self.log) >= self.patience + self.lag:
            if self.patience > 1 and self.indexed and not self.lag:
                self._settle_at_once()
            self.settle()
        self.log.append(task_and_worker)

    def fail(self, task_and_worker: tuple[int, int]) -> None:
        """The consumer gets a task's error, which counts as its batch, but not in `batches`."""
        self.log.append((*task_and_worker, True))
        self.settle()

    def end(self) -> None:
        """The consumer gets the end of the epoch."""
        self.log.append(END)
        self.settle()

    @property
    def counted(self) -> int:
        """Batches and errors, and the end, that the iterator has handed out."""
        return self.settled + len(self.log)

    def defer(self) -> None:
        """Count nothing from here on before it is released."""
        self.settle()
        self.patience = DEFERRED

    def release(self, until: int, *steps: Step) -> None:
        """Let what is deferred count, as far as `counted` was `until`; at once with `steps`. Counts what was before."""
        self._count(self.released - self.lag)
        at_once(*steps, partial(setattr, self, "released", max(self.released, until)))

    def settle(self) -> None:
        """Count what was handed out, if it is not deferred, but for the lag."""
        if self.patience != DEFERRED:
            self._count(self.counted - self.lag)
            waits = len(self.drawn) > 1 or any(place.arrived for place in self.places)
            self.patience = 1 if waits else LAZY

    def settle_but(self, ahead: int | None) -> None:
        """Count what was handed out or released; but for the last `ahead` batches, and the end, if it is a number."""
        until = min(self.counted, self.released) if self.patience == DEFERRED else self.counted
        if ahead is not None:
            until -= ahead + (until == self.counted and END in self.log)
        self._count(until)
        for worker, place in enumerate(self.places):  # an exception may have ended a count before it did
            self._catch_up(worker, place)

    def _settle_at_once(self) -> None:
        """Count draws in a row: the same as `_count`, at a sixth of the time."""
        with suppress(ValueError):  # a signal's handler has counted some
            tasks, workers = zip(*self.log, strict=True)
            first, many = tasks[0], len(tasks)
            in_a_row = not self.ahead and first >= len(self.gaps) and tasks == tuple(range(first, first + many))
            if not in_a_row or self.draw_of(first) != self.low:
                return
            yielded = {worker: self.places[worker].yielded + batches for worker, batches in Counter(workers).items()}
            at_once(
                partial(self.log.remove, (first, workers[0])),
                *(partial(setattr, self.places[worker], "yielded", batches) for worker, batches in yielded.items()),
                partial(setattr, self, "low", self.low + many),
                partial(setattr, self, "batches", self.batches + many),
                partial(setattr, self, "settled", self.settled + many),
                partial(setattr, self, "turn", (workers[-1] + 1) % len(self.places)),
                self.log.clear,
            )

    def _count(self, until: int) -> None:
        """Count up to entry number `until`. An exception of a signal's handler leaves each counted or not counted."""
        with suppress(ValueError, IndexError):  # a signal's handler has counted it, or there are no more
            while (entry := self.log[0]) and self.settled < until:
                at_once(partial(self.log.remove, entry), *self._counting(entry))
                if entry is not END:
                    self._catch_up(entry[1], self.places[entry[1]])

    def _counting(self, entry: Any) -> Iterator[Step]:
        yield partial(setattr, self, "settled", self.settled + 1)
        if entry is END:
            yield partial(setattr, self, "ended", True)
            return
        task, worker, *failed = entry
        place = self.places[worker]
        yield partial(setattr, place, "yielded", place.yielded + 1)
        yield partial(setattr, self, "batches", self.batches + (not failed))
        yield partial(setattr, self, "turn", (worker + 1) % len(self.places))
        if self.indexed:
            yield from self._yielding(self.draw_of(task))

    def _yielding(self, draw: int) -> Iterator[Step]:
        if draw != self.low:
            yield partial(self.ahead.add, draw)
            return
        low = draw + 1
        while low in self.ahead:
            yield partial(self.ahead.remove, low)
            low += 1
        yield partial(setattr, self, "low", low)

    def _catch_up(self, worker: int, place: Position) -> None:
        """Let the states of what is yielded count."""
        with suppress(ValueError, IndexError):  # a signal's handler has let it count, or there are no more
            while (arrived := place.arrived[0])[0] <= place.yielded:
                number, task, state = arrived
                at_once(
                    partial(place.arrived.remove, arrived),
                    partial(setattr, place, "at", number),
                    partial(setattr, place, "state", state),
                    partial(setattr, place, "over", False),
                )
                self.keep(task, worker)

    # --- For the trace
    def keep(self, task: int, worker: int) -> None:
        """The state that came with the task is the worker's from here on."""

    def taken(self) -> None:
        """The program takes the loader's state."""

    @property
    def deferred_batches(self) -> int:
        """Batches that wait for their release."""
        return sum(entry is not END and len(entry) == 2 for entry in self.log)


def fast_forward(indices: Iterator[Any], drawn: int, low: int, ahead: Iterable[int]) -> Iterator[Any]:
    """What is left of a sampler's `indices` without draws below `low` and in `ahead`; `drawn` are behind already.

    Raises ValueError if the sampler ends before.
    """
    ahead, left = set(ahead), []
    for number in range(drawn, max(ahead, default=low - 1) + 1):
        index = next(indices, END)
        if index is END:
            raise ValueError(
                f"the state to resume from was saved after {low} draws from the sampler, which now gives {number}: "
                "load it into a loader of the same dataset and sampler, or begin a new epoch with load_state_dict({})"
            )
        if number >= low and number not in ahead:
            left.append(index)
    return chain(left, indices) if left else indices
