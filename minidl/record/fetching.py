"""Traced fetching: the samples and the collation of a task."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from minidl.data.fetch import Progress
from minidl.loader.progress import WorkerProgress
from minidl.record.cpu_time import SHORT_NS, Reader, no_reading, spent
from minidl.record.draws import Draws
from minidl.record.indices import SEVERAL, count, indices_of, whole_number
from minidl.record.recorder import Emit
from minidl.tracefile import events as ev

_SAMPLE_END = ev.SAMPLE[1]


class TracedProgress(Progress):
    """Emits the steps of a task, and those between tasks; each closes the one before it.

    One reading of the CPU clock serves the end of a step and the begin of the next. clock, delay: a `cpu_clock` and a
    `run_delay` of the thread that fetches. samples: whether samples are recorded; shortest: ns of a sample that is
    given CPU time.
    """

    def __init__(
        self,
        emit: Emit,
        worker_id: int,
        clock: Reader,
        delay: Reader,
        samples: bool = True,
        shortest: int = SHORT_NS,
    ) -> None:
        self.emit = emit
        self.worker_id = worker_id
        self.clock, self.delay = clock, delay
        self.shortest = shortest
        self.times_samples = samples and clock is not no_reading
        self.step_cpu = self.fetch_cpu = self.fetch_delay = 0  # readings at the last begin
        self.read_at = 0  # when the clock was read last
        self.task = -1
        self.index: Any = None  # what the fetcher got for the task
        self.open: tuple[int, int, int] | None = None  # code of the end to emit, with position and index of a sample
        self.fetching = False
        self.at = -1, -1  # position and index of the sample asked for last
        self.draws: Draws | None = None

    def _end_step(self, now: int) -> None:
        """End the step that is open, if one is. now: a reading of the CPU clock, also the next step's; 0 = none."""
        if self.open is not None:
            code, position, key = self.open
            self.open = None
            cpu = spent(self.step_cpu, now) if now else 0
            if code == _SAMPLE_END:
                self.emit(code, self.task, self.worker_id, position, key, cpu)
            else:
                self.emit(code, self.task, self.worker_id, cpu)
        if now:
            self.step_cpu = now

    def initialising(self) -> None:
        """worker_init_fn is called next."""
        self._begin_without_task(ev.WORKER_INIT)

    def opening(self) -> None:
        """A fetcher is made next."""
        self._begin_without_task(ev.MAKE_FETCHER)

    def waiting(self) -> None:
        """The worker waits for a message next."""
        if self.open is not None:
            self._end_step(self.clock())

    def _begin_without_task(self, span: tuple[int, int]) -> None:
        self._end_step(self.clock())
        self.task, self.open = -1, (span[1], -1, -1)
        self.emit(span[0], -1, self.worker_id)

    def begin(self, task: int, index: Any) -> None:
        """Begin a task."""
        self.task, self.index, self.fetching, self.at = task, index, True, (-1, -1)
        self.emit(ev.FETCH[0], task, self.worker_id, count(index))
        self.fetch_delay = self.delay()
        self.fetch_cpu = self.step_cpu = self.clock()
        self.read_at = monotonic_ns()

    def samples(self, count: int) -> None:
        self.tell_indices()
        self.sample(-1, -1)

    def tell_indices(self) -> None:
        """Emit each index of the task: no sample of it will be seen by itself."""
        for position, index in enumerate(indices_of(self.index)):
            self.emit(ev.SAMPLE_INDEX, self.task, self.worker_id, position, whole_number(index))

    def sample(self, position: int, index: Any) -> None:
        reading = 0
        if self.times_samples and (now := monotonic_ns()) - self.read_at > self.shortest:
            self.read_at = now
            reading = self.clock()
        self._end_step(reading)
        key = whole_number(index)
        if key < 0 and index is self.index and isinstance(index, SEVERAL):  # no automatic batching: a batch at once
            self.tell_indices()
            position = -1
        self.at, self.open = (position, key), (ev.SAMPLE[1], position, key)
        self.emit(ev.SAMPLE[0], self.task, self.worker_id, position, key)

    def collate(self, count: int) -> None:
        self._end_step(self.clock())
        self.at, self.open = (-1, -1), (ev.COLLATE[1], -1, -1)
        self.emit(ev.COLLATE[0], self.task, self.worker_id, count)

    def end(self, outcome: int) -> None:
        """End the task's fetch."""
        if self.fetching:
            now = self.clock()
            self._end_step(now)
            cpu = spent(self.fetch_cpu, now)
            self.fetching, self.index = False, None
            self.emit(ev.FETCH[1], self.task, self.worker_id, outcome, cpu, spent(self.fetch_delay, self.delay()))
            if self.draws is not None:
                self.draws.look()


class TracedWorkerProgress(WorkerProgress):
    """Writes to the board, and passes each step to `watch`."""

    watch: TracedProgress
    initialised: Callable[[], None] | None = None

    def initialising(self) -> None:
        super().initialising()
        self.watch.initialising()

    def opening(self) -> None:
        """Making a fetcher; before the first one, worker_init_fn has been called."""
        super().opening()
        if self.initialised is not None:
            self.initialised()
            self.initialised = None
        self.watch.opening()

    def waiting(self) -> None:
        WorkerProgress.waiting(self)
        self.watch.waiting()

    def begin(self, task: int, index: Any) -> None:
        super().begin(task, index)
        self.watch.begin(task, index)

    def samples(self, count: int) -> None:
        super().samples(count)
        self.watch.samples(count)

    def sample(self, position: int, index: Any) -> None:
        WorkerProgress.sample(self, position, index)
        self.watch.sample(position, index)

    def collate(self, count: int) -> None:
        super().collate(count)
        self.watch.collate(count)

    def end(self, outcome: int) -> None:
        self.watch.end(outcome)
        super().end(outcome)
