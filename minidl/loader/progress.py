"""How far each worker has come: a small board in shared memory that workers write and the loader reads.

It is what lets a timeout say "in task 1, sample index 9 (place 2 of 8), for 1.0 s", and an error name its sample, with
tracing off.
A row is four integers (task, stage, position, since); a worker writes only its own. Nothing is locked or ordered: the
reader may see some of a row's writes without the others, in any order on aarch64. It uses them in messages, and the
stage also to see that a worker has started (`Crew.forget_names`), or that a thread died in a task (`threads`).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from minidl.data.fetch import Progress
from minidl.live_repr import LiveRepr

_FIELDS = 4


class Stage(enum.IntEnum):
    """What a worker is doing."""

    STARTING = 0
    INITIALISING = 1  # in worker_init_fn
    OPENING = 2  # making a fetcher, which calls __iter__ of an iterable dataset
    WAITING = 3  # for a task
    FETCHING = 4  # in the dataset
    COLLATING = 5
    ENDED = 6


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is. position -1: in no sample, or in a whole batch; since: CLOCK_MONOTONIC, ns."""

    task: int
    stage: Stage
    position: int
    since: int

    @property
    def seconds(self) -> float:
        """How long it has been there."""
        return (time.monotonic_ns() - self.since) / 1e9

    def describe(self, index: Any = None) -> str:
        """In words, for messages; `index` is what the task's indices are, where the reader knows them."""
        if self.stage in (Stage.FETCHING, Stage.COLLATING):
            return f"in task {self.task}, {what_at(self.stage, self.position, index)}"
        return _IN_WORDS[self.stage]


_IN_WORDS = {
    Stage.STARTING: "starting",
    Stage.INITIALISING: "in worker_init_fn",
    Stage.OPENING: "making its fetcher (an iterable dataset's __iter__)",
    Stage.WAITING: "waiting for a task",
    Stage.ENDED: "at its end",
}


def what_at(stage: Stage, position: int, index: Any) -> str:
    """ "sample index 137 (place 3 of 8)"; places count from 1."""
    if stage is Stage.COLLATING:
        return "collating"
    if not isinstance(index, (list, tuple)):
        known = f"sample index {index!r}" if index is not None else f"sample {position + 1} of its stream's batch"
        return known if position >= 0 else "its whole batch (__getitems__)"
    if position < 0 or position >= len(index):
        return f"its whole batch of {len(index)} (__getitems__)"
    name = "a sample" if index[position] is None else f"sample index {index[position]!r}"
    return f"{name} (place {position + 1} of {len(index)})"


class ProgressBoard(LiveRepr):
    """Rows for `num_workers` workers, an int64 tensor of shape (num_workers, 4) in shared memory; picklable.

    shared: False for workers that are threads, which need no shared memory.
    """

    def __init__(self, num_workers: int, *, shared: bool = True) -> None:
        self._cells = torch.zeros((num_workers, _FIELDS), dtype=torch.int64)
        self._cells[:, 3] = time.monotonic_ns()  # each is starting, since now
        if shared:
            self._cells.share_memory_()  # type: ignore[no-untyped-call]

    def _phrases(self) -> Iterator[str]:
        for worker_id in range(len(self._cells)):
            place = self.read(worker_id)
            at = f" sample {place.position}" if place.stage is Stage.FETCHING and place.position >= 0 else ""
            task = f" task {place.task}" if place.stage in (Stage.FETCHING, Stage.COLLATING) else ""
            yield f"worker {worker_id} {place.stage.name}{task}{at} for {place.seconds:.1f} s"

    def read(self, worker_id: int) -> Place:
        """What the worker wrote last."""
        task, stage, position, since = self._cells[worker_id].tolist()
        return Place(task, Stage(stage), position, since)

    def writer(self, worker_id: int) -> WorkerProgress:
        """What the worker writes its own row through."""
        return WorkerProgress(worker_id, self.row(worker_id))

    def row(self, worker_id: int) -> memoryview:
        """The worker's own row, writable."""
        return memoryview(self._cells[worker_id].numpy())  # type: ignore[arg-type]


class WorkerProgress(Progress):
    """The worker's side, which writes to the board."""

    def __init__(self, worker_id: int, row: memoryview) -> None:
        self._worker_id = worker_id
        self._row = row
        self._index: Any = None

    def _write(self, stage: Stage, position: int) -> None:
        row = self._row
        row[3] = time.monotonic_ns()
        row[2] = position
        row[1] = stage

    def initialising(self) -> None:
        """In worker_init_fn."""
        self._write(Stage.INITIALISING, -1)

    def opening(self) -> None:
        """Making the fetcher of an epoch."""
        self._write(Stage.OPENING, -1)

    def waiting(self) -> None:
        """At the index queue."""
        self._write(Stage.WAITING, -1)

    def begin(self, task: int, index: Any) -> None:
        """A task has been taken up; `index` is what the fetcher gets."""
        self._row[0] = task
        self._index = index
        self._write(Stage.FETCHING, -1)

    def samples(self, count: int) -> None:
        self._write(Stage.FETCHING, -1)

    def sample(self, position: int, index: Any) -> None:
        self._write(Stage.FETCHING, position)

    def collate(self, count: int) -> None:
        self._write(Stage.COLLATING, -1)

    def end(self, outcome: int) -> None:
        """The task's fetch has ended (`outcome`: 0 data, 1 error, 2 exhausted)."""
        self._index = None

    def ended(self) -> None:
        """The worker is about to leave."""
        self._write(Stage.ENDED, -1)

    @property
    def position(self) -> int:
        """Place in the batch of the sample last asked for, from 0; -1 if none."""
        return int(self._row[2])

    def place(self) -> str:
        """Where the present task stands, in words, for its error."""
        stage = Stage(self._row[1])
        return f"Task {self._row[0]} of worker {self._worker_id}: {what_at(stage, self.position, self._index)}."
