"""torch's iterator, followed in its own process.

The observed queues, done event and processes report each call to `ObservedLoader`, and so do the iterator's own
`_next_data` and `_next_index`. It reads the iterator's counters, and emits what follows from them: the events that the
table calls derived. Nothing is guessed; a stamp may be late.
"""

from __future__ import annotations

import queue
import time
import weakref
from typing import Any

from minidl.record.channels import outcome_of
from minidl.record.harmless import harmless
from minidl.record.indices import count
from minidl.record.loader_spans import LoaderSpans
from minidl.record.sampling import dealt_by
from minidl.record.shared import Shared
from minidl.tracefile import events as ev
from minidl.wire.messages import Result, Task


class ObservedLoader(LoaderSpans):
    """Follows one iterator in its own process. Upstream: what `_MultiProcessingDataLoaderIter` counts.

    `tasks` is the iterator's own `_task_info` of this epoch, what is sent and not yielded, and `status` its
    `_workers_status`, the workers with data left. This object keeps them when a new epoch gives the iterator new ones,
    so they show what has been handed out since the last call.
    """

    def __init__(self, shared: Shared, iterator: Any) -> None:
        super().__init__(shared)
        self.iterator = weakref.ref(iterator)
        self.num_workers: int = iterator._num_workers
        self.prefetch_factor: int = iterator._prefetch_factor
        self.in_order: bool = getattr(iterator, "_in_order", True)
        self.pinned = bool(iterator._pin_memory)
        self.pin_done: Any = None  # the pin thread's done event
        self.new_epoch()
        self.failing = False  # the last get, or a look at a worker after it, makes next() raise
        self.wait_began = 0.0  # of the last get, seconds
        self.wait: float | None = None  # seconds that it took, if it returned nothing
        self.found_alive = 0  # of the workers that have been looked at since
        self.shutting_down = self.closed = False

    def new_epoch(self) -> None:
        """Forget the last epoch."""
        self.tasks: dict[int, Any] = {}
        self.status: list[bool] = []
        self.workers: dict[int, int] = {}  # task -> worker
        self.kept: dict[int, ev.Outcome] = {}  # the reorder buffer, as emitted
        self.in_hand: tuple[int, ev.Outcome] | None = None  # received in turn or popped, and not yielded
        self.send_idx = self.rcvd_idx = 0
        self.results = 0  # received, of whatever kind

    # --- what the iterator itself says
    def outstanding(self) -> int:
        return int(getattr(self.iterator(), "_tasks_outstanding", self.send_idx - self.results))

    def active(self) -> int:
        return sum(self.status)

    def turn(self) -> int:
        """The worker that gets an epoch's first task: of torchdata's loader, the one after that of the last batch."""
        return (getattr(self.iterator(), "_last_yielded_worker_id", -1) + 1) % self.num_workers

    # --- epochs
    def enter_epoch(self) -> None:
        """Emit that an epoch begins."""
        if not self.open_epoch and not self.shutting_down:
            self.new_epoch()
            self.tasks = getattr(self.iterator(), "_task_info", self.tasks)
            self.status = getattr(self.iterator(), "_workers_status", self.status)
            self.begin_epoch(self.num_workers, self.prefetch_factor)
            resumed = int(getattr(self.iterator(), "_num_yielded", 0))
            if resumed:
                self.emit(ev.RESUMED, x=resumed, y=self.turn())
            dealt = dealt_by(getattr(self.iterator(), "_index_sampler", None))
            if dealt is not None:
                self.emit(ev.SHARE, -1, -1, *dealt[1])

    def primed(self) -> None:
        """Begin the consumer's time: the first tasks have been sent."""
        if self.task < 0 and not self.open_next and not self.open_consumer:
            self.begin_consumer()

    def leave_epoch(self) -> None:
        if not self.open_epoch:
            return
        self.primed()
        exhausted = self.open_next and not self.tasks
        if exhausted and self.rcvd_idx < self.send_idx:
            self.rcvd_idx = self.send_idx
            self.emit(ev.RCVD_ADVANCE, x=self.rcvd_idx, y=self.send_idx - self.results)
        self.end_next(ev.Outcome.EXHAUSTED if exhausted else ev.Outcome.ERROR)
        self.end_consumer()
        self.end_epoch(ev.Ending.EXHAUSTED if exhausted else ev.Ending.CLOSED)
        self.tasks = {}  # keeps no batch alive that the iterator has dropped

    # --- next() and the consumer, in turn
    @harmless(None)
    def enter_next(self) -> None:
        if self.open_epoch and not self.open_next:
            self.primed()
            self.end_consumer()
            self.begin_next(self.rcvd_idx)

    @harmless(None)
    def leave_next(self, error: BaseException | None = None) -> None:
        """Emit that next() returns a batch, or raises. The error of a task is yielded as a batch is."""
        batch, self.in_hand = self.in_hand, None
        if isinstance(error, StopIteration) and batch is None:
            self.leave_epoch()
        elif batch is not None and (error is None or batch[1] is ev.Outcome.ERROR):
            self.task, outcome = batch
            self.yielded += outcome is ev.Outcome.DATA
            self.emit(ev.YIELD, self.task, self.workers.get(self.task, -1), outcome, self.yielded)
            self._end_next(outcome, self.task)
        elif self.open_next:
            self.shared.emit_gone()
            self._end_next(ev.Outcome.ERROR)

    def _end_next(self, outcome: ev.Outcome, task: int = -1) -> None:
        self.end_next(outcome, task)
        self.begin_consumer(task if outcome is ev.Outcome.DATA else -1)

    # --- the sampler
    @harmless(-1)
    def drawing(self) -> int:
        """Emit what precedes a draw; return the task that it is for."""
        self.enter_epoch()
        for task in sorted(self.kept.keys() - self.tasks.keys()):
            self.in_hand = task, self.kept.pop(task)
            self.rcvd_idx = task + 1
            self.emit(ev.REORDER_POP, task, self.workers.get(task, -1), self.rcvd_idx, len(self.kept))
            self.emit(ev.RCVD_ADVANCE, x=self.rcvd_idx, y=self.outstanding())
        return self.send_idx

    # --- index queues
    @harmless(None)
    def sending(self, task: Task) -> None:
        """Emit that a task is about to be put."""
        idx, worker = task.idx, task.worker_id
        self.workers[idx] = worker
        self.send_idx = idx + 1
        self.emit(ev.TASK_ASSIGNED, idx, worker, idx + 1, self.outstanding() + 1)
        self.emit(ev.INDEX_PUT, idx, worker, count(task.index))

    @harmless(None)
    def sent(self) -> None:
        if self.send_idx == self.num_workers * self.prefetch_factor:
            self.primed()

    @harmless(None)
    def resuming(self, worker: int) -> None:
        """Emit that a new epoch's message is about to be put."""
        self.leave_epoch()
        self.emit(ev.RESUME_PUT, -1, worker, self.epoch + 1)

    # --- the queue that the loader reads
    @harmless((-1, -1))
    def waits(self) -> tuple[int, int]:
        """Emit what precedes a wait; return the task and the worker that the loader needs next."""
        self.wait, self.found_alive, self.failing, self.wait_began = None, 0, False, time.monotonic()
        if not self.open_epoch:
            return -1, -1
        rcvd_idx = int(getattr(self.iterator(), "_rcvd_idx", self.rcvd_idx))
        if rcvd_idx > self.rcvd_idx:
            self.rcvd_idx = rcvd_idx
            self.emit(ev.RCVD_ADVANCE, x=rcvd_idx, y=self.outstanding())
        return self.rcvd_idx, self.workers.get(self.rcvd_idx, -1)

    @harmless(None)
    def got_nothing(self, error: BaseException | None) -> None:
        """Note a wait without a message. What next() does about it shows when it looks at the workers."""
        self.wait = time.monotonic() - self.wait_began
        self.failing = self.open_next and not isinstance(error, queue.Empty)

    @harmless(None)
    def received(self, result: Result) -> None:
        """Emit what the loader does with a result, which depends on whose turn it is."""
        task, worker, outcome = result.idx, result.worker_id, outcome_of(result.data)
        if not self.open_epoch:
            return  # a leftover of the last epoch
        self.results += 1
        if outcome is ev.Outcome.EXHAUSTED:
            self.emit(ev.WORKER_EXHAUSTED, task, worker, self.active() - 1)
        elif task == self.rcvd_idx:
            self.rcvd_idx += 1
            self.in_hand = task, outcome
            self.emit(ev.RCVD_ADVANCE, x=self.rcvd_idx, y=self.outstanding() - 1)
        elif self.in_order:
            self.kept[task] = outcome
            self.emit(ev.REORDER_STORE, task, worker, self.rcvd_idx, len(self.kept))
        else:
            self.in_hand = task, outcome

    # --- processes
    @harmless(None)
    def looked_at(self, worker: int, process: Any, alive: bool) -> None:
        """Emit what follows from the loader's question whether a worker is alive."""
        if self.shutting_down:
            if worker == len(self.shared.workers) - 1 and not alive:
                self.shut_down()
        elif self.wait is None:
            return  # other code asks
        elif not alive:
            self.failing = True
            self.emit(ev.FOUND_DEAD, -1, worker, ev.Actor.WORKER, process.pid, process.exitcode or 0)
        elif not self.failing:
            self.found_alive += 1
            timeout = getattr(self.iterator(), "_timeout", 0)
            if self.found_alive != self.active():
                return
            self.emit(ev.LIVENESS_CHECK, x=self.found_alive)
            if timeout > 0:
                about = self.rcvd_idx, self.workers.get(self.rcvd_idx, -1)
                self.emit(ev.TIMED_OUT, *about, int(self.wait * 1e9))

    @harmless(None)
    def begin_shutdown(self) -> None:
        """Emit that the shutdown begins: the first done event is about to be set."""
        if self.shutting_down:
            return
        self.leave_epoch()
        self.shutting_down = True
        self.emit(ev.SHUTDOWN[0])

    @harmless(None)
    def shut_down(self) -> None:
        """Emit that the shutdown has ended: the last worker is gone."""
        if self.shutting_down and not self.closed:
            self.closed = True
            self.emit(ev.SHUTDOWN[1], x=self.shared.emit_gone())
            self.shared.workers = []  # they hold the ports
