"""torch's iterator, followed in its own process.

The observed queues, done event and processes report each call to `ObservedLoader`. It then reads the iterator's own
counters, and emits what follows from them: the events that the table calls derived. Nothing is guessed; a stamp may be
late.
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
from minidl.record.step_parts import here
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
        self.new_epoch()
        self.failing = False  # next() is about to raise what is no task's error
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
        self.in_hand: list[tuple[int, ev.Outcome]] = []  # received in turn or popped, and not emitted as yielded
        self.send_idx = self.rcvd_idx = 0
        self.results = 0  # received, of whatever kind
        self.ends: list[int] = []  # tasks answered with the end of a worker's data, as the pin thread has seen
        self.ended = 0  # workers of which the loader knows that
        self.resumed = 0  # batches that the loader counts already when the epoch begins
        self.sampled_all = False  # a batch was yielded and no task sent for it

    # --- what the iterator itself says
    def outstanding(self) -> int:
        return int(getattr(self.iterator(), "_tasks_outstanding", self.send_idx - self.results))

    def active(self) -> int:
        return sum(self.status)

    def batches(self) -> int | None:
        """Batches yielded in this epoch, without those from before the state that it was resumed from."""
        counted = getattr(self.iterator(), "_num_yielded", None)
        return None if counted is None else int(counted) - self.resumed

    # --- what has happened since the last call
    def catch_up(self, batches: int | None, all_but: int = 0) -> None:
        """Emit the batches that have left the reorder buffer, and the yields.

        all_but: 1 if the last yield is still to come. batches: the loader's own count of yields. Batches beyond it are
        lost: the sampler failed before a batch's successor was sent, and the loader dropped the batch.
        """
        if self.pinned:
            self.catch_up_pinned()
            return
        gone = sorted(task for task in self.kept if task not in self.tasks)
        coming = [*self.in_hand, *((task, self.kept[task]) for task in gone)]
        certain = [task for task, outcome in coming[: len(coming) - all_but] if outcome is ev.Outcome.DATA]
        lost = set(certain[: max(0, self.yielded + len(certain) - batches)] if batches is not None else [])
        if lost and self.in_hand and self.in_hand[0][0] in lost:
            self.in_hand.clear()
            self.leave_next(ev.Outcome.ERROR)
        for task in gone:
            self.hand_out()
            outcome = self.kept.pop(task)
            self.enter_next()
            self.rcvd_idx = task + 1
            self.emit(ev.REORDER_POP, task, self.workers.get(task, -1), self.rcvd_idx, len(self.kept))
            self.emit(ev.RCVD_ADVANCE, x=self.rcvd_idx, y=self.outstanding())
            if task in lost:
                self.leave_next(ev.Outcome.ERROR)
            else:
                self.in_hand.append((task, outcome))
        self.sampled_all = self.in_order and (self.sampled_all or len(self.in_hand) > all_but)
        self.hand_out(all_but)

    def catch_up_pinned(self) -> None:
        """Emit the batches that the loader has dropped: with torch's pin thread, it shows nothing else of them."""
        for task in sorted(task for task in self.kept if task not in self.tasks):
            outcome = self.kept.pop(task)
            if self.in_order or task == self.rcvd_idx:
                self.rcvd_idx = task + 1
                self.emit(ev.RCVD_ADVANCE, x=self.rcvd_idx, y=self.outstanding())
            self.in_hand.append((task, outcome))
            self.hand_out()
        for worker, active in enumerate(self.status):
            if not active:
                self.data_ended(worker)

    def data_ended(self, worker: int) -> None:
        """Emit that the loader knows, from the pin thread, that a worker's data have ended."""
        for task in [task for task in self.ends if self.workers.get(task) == worker]:
            self.ends.remove(task)
            self.ended += 1
            self.emit(ev.WORKER_EXHAUSTED, task, worker, self.num_workers - self.ended)

    @harmless(None)
    def sending_sentinel(self, worker: int) -> None:
        if self.pinned and not self.shutting_down:
            self.catch_up_pinned()
            self.data_ended(worker)

    def hand_out(self, all_but: int = 0) -> None:
        """Emit the yields of what is in hand."""
        while len(self.in_hand) > all_but:
            task, outcome = self.in_hand.pop(0)
            self.task = task
            self.yielded += outcome is ev.Outcome.DATA
            self.emit(ev.YIELD, task, self.workers.get(task, -1), outcome, self.yielded)
            self.leave_next(outcome, task)

    # --- next() and the consumer, in turn
    def enter_next(self) -> None:
        if not self.open_next and not self.pinned:
            self.end_consumer()
            self.begin_next(self.rcvd_idx)

    def leave_next(self, outcome: ev.Outcome, task: int = -1) -> None:
        if self.open_next:
            self.failing = False
            self.end_next(outcome, task)
            if outcome is not ev.Outcome.EXHAUSTED:
                self.begin_consumer(task if outcome is ev.Outcome.DATA else -1)

    def fail(self) -> None:
        """End a next() that has raised what is no task's error."""
        if self.failing:
            self.shared.emit_gone()
            self.leave_next(ev.Outcome.ERROR)

    # --- epochs
    def enter_epoch(self, turn: int = 0) -> None:
        """Emit that an epoch begins. turn: the worker that gets its first task."""
        if not self.open_epoch and not self.shutting_down:
            self.new_epoch()
            self.tasks = getattr(self.iterator(), "_task_info", self.tasks)
            self.status = getattr(self.iterator(), "_workers_status", self.status)
            self.begin_epoch(self.num_workers, self.prefetch_factor)
            self.resumed = self.batches() or 0
            if self.resumed:
                self.emit(ev.RESUMED, x=self.resumed, y=turn)
            dealt = dealt_by(getattr(self.iterator(), "_index_sampler", None))
            if dealt is not None:
                self.emit(ev.SHARE, -1, -1, *dealt[1])

    def primed(self) -> None:
        """Begin the consumer's time: the first tasks have been sent."""
        if self.task < 0 and not self.open_next and not self.open_consumer and not self.pinned:
            self.sampled_all = self.in_order and self.send_idx < self.num_workers * self.prefetch_factor
            self.begin_consumer()

    def leave_epoch(self, batches: int | None = None) -> None:
        if not self.open_epoch:
            return
        self.primed()
        self.catch_up(batches)
        self.fail()
        ending = ev.Ending.CLOSED if self.tasks else ev.Ending.EXHAUSTED
        if ending is ev.Ending.EXHAUSTED:
            self.enter_next()
            if self.rcvd_idx < self.send_idx:
                self.rcvd_idx = self.send_idx
                self.emit(ev.RCVD_ADVANCE, x=self.rcvd_idx, y=self.send_idx - self.results)
            self.leave_next(ev.Outcome.EXHAUSTED)
        self.end_consumer()
        self.end_epoch(ending)
        self.tasks = {}  # keeps no batch alive that the iterator has dropped

    # --- index queues
    @harmless(None)
    def sending(self, task: Task) -> None:
        """Emit that a task is about to be put. A batch in hand is yielded after it."""
        idx, worker = task.idx, task.worker_id
        self.enter_epoch(turn=worker)
        self.catch_up(self.batches(), all_but=1)
        self.sampled_all = False
        self.workers[idx] = worker
        self.send_idx = idx + 1
        self.emit(ev.TASK_ASSIGNED, idx, worker, idx + 1, self.outstanding() + 1)
        self.emit(ev.INDEX_PUT, idx, worker, count(task.index))

    @harmless(None)
    def sent(self) -> None:
        self.hand_out()
        if self.send_idx == self.num_workers * self.prefetch_factor:
            self.primed()

    @harmless(None)
    def resuming(self, worker: int) -> None:
        """Emit that a new epoch's message is about to be put."""
        self.leave_epoch()
        self.emit(ev.RESUME_PUT, -1, worker, self.epoch + 1)

    # --- the result queue
    @harmless((-1, -1))
    def waits(self) -> tuple[int, int]:
        """Emit what precedes a wait; return the task and the worker that the loader needs next."""
        self.wait, self.found_alive, self.wait_began = None, 0, time.monotonic()
        if not self.open_epoch or self.pinned:
            return -1, -1
        self.primed()
        self.catch_up(self.batches())
        self.fail()
        self.enter_next()
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
        here.leave_next()  # the yield may show late, and the consumer's step begins now
        if not self.open_epoch:
            return  # a leftover of the last epoch
        if self.pinned:
            # The pin thread has received it; the loader has not.
            if outcome is ev.Outcome.EXHAUSTED:
                self.ends.append(task)
            else:
                self.kept[task] = outcome
            return
        self.results += 1
        if outcome is ev.Outcome.EXHAUSTED:
            self.emit(ev.WORKER_EXHAUSTED, task, worker, self.active() - 1)
        elif task == self.rcvd_idx:
            self.rcvd_idx += 1
            self.in_hand.append((task, outcome))
            self.emit(ev.RCVD_ADVANCE, x=self.rcvd_idx, y=self.outstanding() - 1)
        elif self.in_order:
            self.kept[task] = outcome
            self.emit(ev.REORDER_STORE, task, worker, self.rcvd_idx, len(self.kept))
        else:
            self.in_hand.append((task, outcome))
        if self.sampled_all:
            self.hand_out()

    # --- processes
    @harmless(None)
    def looked_at(self, worker: int, process: Any, alive: bool) -> None:
        """Emit what follows from the loader's question whether a worker is alive."""
        if self.shutting_down:
            if worker == len(self.shared.workers) - 1 and not alive:
                self.shut_down()
        elif self.wait is None and not self.pinned:
            return  # other code asks
        elif not alive:
            self.failing = self.open_next
            self.emit(ev.FOUND_DEAD, -1, worker, ev.Actor.WORKER, process.pid, process.exitcode or 0)
        elif not self.failing:
            self.found_alive += 1
            timeout = getattr(self.iterator(), "_timeout", 0)
            if self.found_alive != self.active():
                return
            self.emit(ev.LIVENESS_CHECK, x=self.found_alive)
            if timeout > 0 and self.wait is not None:
                about = self.rcvd_idx, self.workers.get(self.rcvd_idx, -1)
                self.emit(ev.TIMED_OUT, *about, int(self.wait * 1e9))
                self.leave_next(ev.Outcome.ERROR)

    @harmless(None)
    def begin_shutdown(self) -> None:
        """Emit that the shutdown begins: the first done event is about to be set."""
        if self.shutting_down:
            return
        if self.epoch < 0 and self.num_workers == len(self.shared.workers):
            self.enter_epoch()  # of a sampler that gave nothing
        self.leave_epoch(self.batches())
        self.shutting_down = True
        self.emit(ev.SHUTDOWN[0])

    @harmless(None)
    def shut_down(self) -> None:
        """Emit that the shutdown has ended: the last worker is gone."""
        if self.shutting_down and not self.closed:
            self.closed = True
            self.emit(ev.SHUTDOWN[1], x=self.shared.emit_gone())
            self.shared.workers = []  # they hold the ports
