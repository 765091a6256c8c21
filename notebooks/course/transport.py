"""Questions and checks of 11_transport, its dataset, and transports that have only some ideas of the arena."""

from __future__ import annotations

import queue
import random
import resource
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import minidl
from course import place, recorded
from course.asking import Asked, Choice, Count, question, rows
from course.checking import Wrong, exercise, whole
from minidl.transport import arena, arena_queue
from minidl.transport.arena import ALONE, FREE, INLINE, KEPT, TAKEN, Arena
from minidl.transport.arena_queue import ArenaWriter

SIZE = 4
"""Samples in a batch."""


class Scenes(minidl.Dataset[dict[str, Any]]):
    """Samples without work: an image of 3 * side * side floats, a mask of side * side, a box of 4, and a label."""

    def __init__(self, size: int, side: int = 128) -> None:
        self.size = size
        self.image, self.mask, self.box = torch.rand(3, side, side), torch.zeros(side, side), torch.zeros(4)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.image, "mask": self.mask, "box": self.box, "label": index}


def loader(batches: int, side: int = 128, **options: Any) -> minidl.DataLoader[Any]:
    """A loader of so many batches of scenes, with one worker."""
    options = {"num_workers": 1, "multiprocessing_context": "fork"} | options
    return minidl.DataLoader(Scenes(SIZE * batches, side), batch_size=SIZE, **options)


def run(batches: int, keep: Callable[[Any], Any] | None = None, **options: Any) -> tuple[list[Any], minidl.Trace]:
    """Record an epoch of scenes; what `keep` has kept of each batch, and the trace."""
    directory, kept = place(options.get("transport", "upstream")), []
    with minidl.trace(directory), loader(batches, **options) as batches_of:
        for batch in batches_of:
            kept.append(None if keep is None else keep(batch))
            del batch
    return kept, recorded(directory)


# --- An arena with some of its ideas ----------------------------------------------------------------------------------
IDEAS = ("inline leaves", "one slab a batch", "recycling", "no feeder thread")


class SomeIdeas(Arena):
    """A worker's slabs, with only some of the ideas."""

    ideas: Sequence[str] = IDEAS
    made: torch.Tensor
    """How many memory files the worker has made: one number, in shared memory."""

    def __init__(self, states: memoryview) -> None:
        self._mine = threading.local()  # the feeder thread sends one batch while the next one is collated
        self._lock = threading.Lock()
        super().__init__(states if "recycling" in self.ideas else states[:0])

    @property
    def _open(self) -> list[Any]:  # type: ignore[override]
        return self._mine.__dict__.setdefault("slabs", [])

    @_open.setter
    def _open(self, slabs: list[Any]) -> None:
        self._mine.slabs = slabs

    def _room(self, size: int) -> tuple[int, int]:
        if self._open and "one slab a batch" not in self.ideas:
            self._open[-1].used = self._open[-1].slab.size  # full
        return super()._room(size)

    def _take(self, size: int) -> Any:
        with self._lock:
            slab = super()._take(size)
        self.made[0] += not slab.announced
        return slab


class SomeIdeasWriter(ArenaWriter):
    """A worker's end of the result queue; without "no feeder thread", another thread pickles and writes."""

    arena: type[SomeIdeas]

    def enter_worker(self, *_: Any) -> None:
        if "inline leaves" not in self.arena.ideas:
            arena.INLINE = -1  # in this process, the worker
        with mock.patch.object(arena_queue, "Arena", self.arena):
            super().enter_worker()
        if "no feeder thread" not in self.arena.ideas:
            self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
            threading.Thread(target=self._feed, daemon=True).start()

    def put(self, message: Any) -> None:
        if "no feeder thread" in self.arena.ideas:
            super().put(message)
        else:
            opened, self._arena._open = self._arena._open, []
            self._waiting.put((message, opened))

    def _feed(self) -> None:
        while True:
            message, self._arena._open = self._waiting.get()
            super().put(message)


@dataclass(frozen=True)
class Measured:
    """A run of one transport. made: memory files of a batch; faults: page faults of worker and loop for a batch."""

    name: str
    made: float
    faults: float
    ms: float


def measured(ideas: Sequence[str], side: int = 128, batches: int = 200) -> Measured:
    """Run a loader whose transport has these ideas of the arena; times in ms a batch."""
    made = torch.zeros(1, dtype=torch.int64).share_memory_()
    kind = type("Part", (SomeIdeas,), {"ideas": tuple(ideas), "made": made})
    writer = type("Writer", (SomeIdeasWriter,), {"arena": kind})
    with mock.patch.object(arena_queue, "ArenaWriter", writer), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of slabs that are used once, as is asked for here
        faults, ms = _timed(batches, side, transport="arena")
    return Measured(" + ".join(ideas) or "none of them", int(made[0]) / batches, faults, ms)


def upstream(side: int = 128, batches: int = 200) -> Measured:
    """The same with the faithful transport."""
    _, trace = run(8, side=side)
    faults, ms = _timed(batches, side)
    return Measured("as upstream", float(tensors(trace)), faults, ms)


def tensors(trace: minidl.Trace) -> int:
    """How many memory segments a batch's message names, in a trace of the faithful transport."""
    return int(trace.to_pandas().tensors[rows(trace, "result_rebuild", "E")[0]])


def _timed(batches: int, side: int, **options: Any) -> tuple[float, float]:
    """Page faults and ms of a batch."""
    before = _faults()
    with loader(batches, side, **options) as of:
        iterator: Iterator[Any] = iter(of)
        next(iterator)
        begin = time.perf_counter()
        for _ in iterator:
            pass
        ms = (time.perf_counter() - begin) * 1e3 / batches
    return (_faults() - before) / batches, ms


def _faults() -> int:
    """Page faults of this process, and of its children that have ended."""
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(resource.getrusage(each).ru_minflt for each in who)
