"""What a loader measures of itself: fetches where they are made, and the training loop's steps between them.

Interface: `MeasuredFetching` goes to a worker and writes what its fetches take into a row of shared memory; a
`LoopMeter` follows the loop's thread; its `measured()` puts both together.
Rules of use: seconds. Time in which a thread was ready to run and had no CPU is left out, where the kernel tells it:
another number of workers would have less or more of it. The first fetch of each worker, which opens files and imports
modules, and the first steps are left out, too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minidl.auto.choice import BatchCosts
from minidl.device.nest import tensors_in
from minidl.loader.ports import Fetching
from minidl.record.cpu_time import run_delay

Floats = NDArray[np.float64]

WALL, THREAD_CPU, PROCESS_CPU, DELAY, LONGEST, COUNT = range(6)
"""What a row holds, as sums over fetches but for the longest; the first four are those of `clocks`."""

SKIPPED: Final = 2
"""Steps that are not measured: the first batch waits for the workers' start, and the first step prepares for more."""


def clocks(shared: bool = False) -> Callable[[], Floats]:
    """What reads the clocks of the calling thread. shared: other workers are threads of this process, too."""
    process_cpu, delay = time.thread_time if shared else time.process_time, run_delay(1)
    return lambda: np.array([time.perf_counter(), time.thread_time(), process_cpu(), delay() / 1e9])


def new_rows(workers: int) -> Tensor:
    """A row of shared memory for each worker."""
    return torch.zeros((workers, COUNT + 1), dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call, no-any-return]


class MeasuredFetching(Fetching):
    """Fetches as `inner` does, and writes what it takes into `row`."""

    def __init__(self, inner: Fetching, row: Tensor) -> None:
        self.inner, self.row, self.loader_pid = inner, row, os.getpid()
        self.after, self.between = inner.after, inner.between  # type: ignore[method-assign]

    def open(self, dataset: Any, make: Callable[[], Any]) -> Any:
        fetcher = self.inner.open(dataset, make)
        fetcher.fetch = _timed(fetcher.fetch, self.row.numpy(), clocks(os.getpid() == self.loader_pid))
        return fetcher


def _timed(fetch: Callable[[Any], Any], row: Floats, now: Callable[[], Floats]) -> Callable[[Any], Any]:
    """A fetcher's `fetch` that writes what each call but the first takes."""
    left: Floats | None = None

    def timed(index: Any) -> Any:
        nonlocal left
        before = now()
        data = fetch(index)
        after = now()
        if left is not None:
            took = after - before
            took[PROCESS_CPU] = after[PROCESS_CPU] - left[PROCESS_CPU]  # with what sends the last batch
            row[:LONGEST] += took
            row[LONGEST] = max(row[LONGEST], took[WALL] - took[DELAY])
            row[COUNT] += 1
        left = after
        return data

    return timed


class LoopMeter:
    """Follows the training loop through an iterator: it `asks` for each batch, and `gets` it. rows: of its workers."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.numpy()
        self.rows[:, LONGEST] = 0  # persistent workers have come through other epochs
        self.before = self.rows.sum(0)
        self.clocks = clocks()
        self.asked = self.size = 0
        self.last = self.clocks()
        self.in_step, self.in_next = np.zeros(LONGEST), np.zeros(LONGEST)

    def asks(self) -> None:
        """The loop wants the next batch."""
        now = self.clocks()
        if self.asked > SKIPPED:
            self.in_step += now - self.last
        self.asked, self.last = self.asked + 1, now

    def gets(self, batch: Any) -> None:
        """The loop gets it."""
        now = self.clocks()
        if self.asked > SKIPPED:
            self.in_next += now - self.last
        else:
            with contextlib.suppress(Exception):  # the batch is the program's: for example, a list in itself
                self.size = max(self.size, sum(tensor.nbytes for tensor in tensors_in(batch)))
        self.last = now

    @property
    def steps(self) -> int:
        """How many batches, each with the step after it, are measured when the loop asks."""
        return max(0, self.asked - SKIPPED - 1)

    @property
    def fetched(self) -> Floats:
        """The sums of what the workers have fetched."""
        return np.array(self.rows.sum(0) - self.before)

    def measured(self) -> BatchCosts | None:
        """The means so far, when the loop asks; None if too little was seen."""
        if not self.steps or not self.fetched[COUNT]:
            return None
        fetch, step, taking = self.fetched / self.fetched[COUNT], self.in_step / self.steps, self.in_next / self.steps
        return BatchCosts(
            fetch=fetch[WALL] - fetch[DELAY],
            send=max(0.0, fetch[PROCESS_CPU] - fetch[THREAD_CPU]),
            longest=self.rows[:, LONGEST].max(),
            worker_cpu=fetch[PROCESS_CPU],
            step=step[WALL] - step[DELAY],
            take=taking[THREAD_CPU],
            own_cpu=(step + taking)[PROCESS_CPU],
            period=(step + taking)[WALL],
            waits=taking[WALL],
            size=self.size,
            workers=len(self.rows),
        )
