"""Traced pure classes: subclasses that emit their decisions.

Interface: `TRACED` maps each class that decides to the subclass that `TracedPorts.decider` makes in its place. No class
traces the driver itself: an iterator without workers has a lifecycle and no driver, and a driver that emits what its
dispatcher decides has to repeat `_step` and `received`, for 3 to 6 % of a traced batch's CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

from minidl.arena.arena import Mappings
from minidl.loader.dispatcher import STORED, Assignment, Deliver, Dispatcher, NoBatch, Wait
from minidl.loader.protocol import (
    Action,
    LoaderEvent,
    LoaderLifecycle,
    LoaderState,
    PinEvent,
    PinLifecycle,
    PinState,
    WorkerEvent,
    WorkerLifecycle,
)
from minidl.record import recorder, stack_dumps
from minidl.record.loader_spans import LoaderSpans
from minidl.record.shared import Shared
from minidl.record.slabs import TracedMappings
from minidl.resume.position import EpochPosition
from minidl.tracefile import events as ev
from minidl.wire.errors import ExceptionWrapper

# Constants, because Python 3.11 calls a function to look up a member of an enumeration.
_NEXT, _YIELD, _CLOSED = LoaderEvent.NEXT, LoaderEvent.YIELD, LoaderState.CLOSED
_READY = WorkerEvent.READY
_DATA, _ERROR, _EXHAUSTED = ev.Outcome


class TracedDispatcher(Dispatcher):
    """Emits the decisions of the class `decides`, which a subclass may replace by another dispatcher.

    In methods that run for each batch, it is called by its name: super() costs 0.1 us more in Python 3.11.
    """

    decides: ClassVar[type[Dispatcher]] = Dispatcher

    def __init__(self, shared: Shared, num_workers: int, prefetch_factor: int, in_order: bool) -> None:
        self.shared, self.emit = shared, shared.emit
        shared.dispatcher = self
        super().__init__(num_workers, prefetch_factor, in_order)

    def reset(self) -> None:
        super().reset()
        self.shared.delivered = None

    def assign(self, index: Any) -> Assignment | None:
        given = self.decides.assign(self, index)
        if given is not None:
            self.emit(ev.TASK_ASSIGNED, given.idx, given.worker_id, self.send_idx, self.tasks_outstanding)
        return given

    def next_step(self) -> Deliver | Wait | NoBatch:
        before = self.rcvd_idx
        step = self.decides.next_step(self)
        if isinstance(step, Deliver):
            self.shared.delivered = step
            self.emit(ev.REORDER_POP, step.idx, step.worker_id, self.rcvd_idx, self.reorder_depth)
        if self.rcvd_idx != before:
            self.emit(ev.RCVD_ADVANCE, -1, -1, self.rcvd_idx, self.tasks_outstanding)
        return step

    def receive(self, idx: int, data: Any) -> Deliver | NoBatch:
        before = self.rcvd_idx
        step = self.decides.receive(self, idx, data)
        if step is STORED:
            worker_id = self.task_info[idx].worker_id
            self.emit(ev.REORDER_STORE, idx, worker_id, self.rcvd_idx, self.reorder_depth)
        elif isinstance(step, Deliver):
            self.shared.delivered = step
            if self.rcvd_idx != before:
                self.emit(ev.RCVD_ADVANCE, -1, -1, self.rcvd_idx, self.tasks_outstanding)
        return step

    def exhausted(self, idx: int, worker_id: int) -> None:
        super().exhausted(idx, worker_id)
        self.emit(ev.WORKER_EXHAUSTED, idx, worker_id, sum(self.workers_status))


class TracedEpochPosition(EpochPosition):
    """Emits from which batch on a worker's state counts, and when the program takes the loader's."""

    def __init__(self, shared: Shared, *args: Any) -> None:
        EpochPosition.__init__(self, *args)
        self.emit, self.shared = shared.emit, shared
        shared.position = self

    def keep(self, task: int, worker: int) -> None:
        self.emit(ev.STATE_KEPT, task, -1 if self.shared.single_process else worker, self.places[worker].at)

    def taken(self) -> None:
        self.emit(ev.STATE_TAKEN, -1, -1, self.batches, self.deferred_batches, int(self.ended))


class TracedLoaderLifecycle(LoaderSpans, LoaderLifecycle):
    """Emits epochs, the time in `__next__`, the consumer's time, and the shutdown."""

    def __init__(self, shared: Shared) -> None:
        LoaderLifecycle.__init__(self)
        LoaderSpans.__init__(self, shared)
        self.shuts_down = False

    def handle(self, event: LoaderEvent) -> LoaderState:
        try:
            return self._handle(event)
        except BaseException:  # of a signal's handler, most likely
            if (recording := recorder.active()) is not None:
                recording.interrupted()
            raise

    def _handle(self, event: LoaderEvent) -> LoaderState:
        before = self.state
        if self.open_consumer and (event is _NEXT or event is LoaderEvent.SHUT_DOWN):
            self.end_consumer()
        after = LoaderLifecycle.handle(self, event)
        if before is _CLOSED:
            if event is LoaderEvent.RAISE and self.open_next:  # close() was called while next() ran
                self._end_own_fetch(_EXHAUSTED)
                self.end_next(_EXHAUSTED)
        elif event is _NEXT:  # the two of each batch need no table, and no call more than these
            dispatcher = self.shared.dispatcher
            self.begin_next(self.shared.next_task if dispatcher is None else dispatcher.rcvd_idx)
        elif event is _YIELD:
            self.yielded += 1
            self._handed_out(_DATA)
            self.begin_consumer(self.task)
        elif (watcher := self.WATCHERS.get(event)) is not None:
            watcher(self)
        return after

    def _epoch_begin(self) -> None:
        decides = self.shared.dispatcher
        self.begin_epoch(*(0, 0) if decides is None else (decides.num_workers, decides.prefetch_factor))
        position = self.shared.position
        if position is not None and position.resumed:
            behind = sum(place.behind for place in position.places) * (not position.indexed)
            self.emit(ev.RESUMED, x=position.batches + position.deferred_batches, y=position.turn, z=behind)

    def _raise(self) -> None:
        """Emit a task's error as its batch; a timeout, a death or a Ctrl-C belongs to no task."""
        step = self.shared.delivered
        if self.shared.single_process:
            of_task = isinstance(sys.exc_info()[1], Exception)  # else the loader does it again
        else:
            of_task = step is not None and isinstance(step.data, ExceptionWrapper)
        if of_task:
            self._handed_out(_ERROR)
        else:
            if self.shared.single_process and self.shared.fetching is not None:
                self.shared.fetching.waiting()  # the sample ends, and the fetch goes on with the next call
            self.shared.emit_gone()  # the handler of SIGCHLD may have raised, before any liveness check
            self.end_next(_ERROR)
        self.begin_consumer()

    def _handed_out(self, outcome: ev.Outcome) -> None:
        shared, worker = self.shared, -1
        if shared.dispatcher is None:
            self._end_own_fetch(outcome)
            self.task = max(-1, shared.next_task - 1)
        elif (step := shared.delivered) is not None:
            self.task, worker = step.idx, step.worker_id
            step.data = None  # the tracer must not keep a batch alive that the loader has let go
        self.emit(ev.YIELD, self.task, worker, outcome, self.yielded)
        self.end_next(outcome, self.task)

    def _end_own_fetch(self, outcome: ev.Outcome) -> None:
        if self.shared.single_process and self.shared.fetching is not None:
            self.shared.fetching.end(outcome)

    def _epoch_end(self) -> None:
        self._end_own_fetch(_EXHAUSTED)
        self.end_next(_EXHAUSTED)
        self.end_epoch(ev.Ending.EXHAUSTED)

    def _resume(self) -> None:
        self.end_consumer()
        self.end_epoch(ev.Ending.CLOSED)

    def _shut_down(self) -> None:
        self.end_epoch(ev.Ending.CLOSED)
        self.emit(ev.SHUTDOWN[0])
        self.shuts_down = True

    def _terminated(self) -> None:
        gone = self.shared.emit_gone()
        if self.shuts_down:
            self.emit(ev.SHUTDOWN[1], x=gone)
        self.shared.let_go()

    WATCHERS: ClassVar = {
        LoaderEvent.EPOCH_BEGIN: _epoch_begin,
        LoaderEvent.PRIMED: LoaderSpans.begin_consumer,
        LoaderEvent.RAISE: _raise,
        LoaderEvent.EPOCH_END: _epoch_end,
        LoaderEvent.RESUME: _resume,
        LoaderEvent.SHUT_DOWN: _shut_down,
        LoaderEvent.TERMINATED: _terminated,
    }


class TracedWorkerLifecycle(WorkerLifecycle):
    """Emits that a worker is ready, the tasks that it skips, and the reason of its end."""

    ENDINGS: ClassVar = {
        WorkerEvent.SENTINEL: ev.Ending.SENTINEL,
        WorkerEvent.SENTINEL_WHEN_DONE: ev.Ending.SENTINEL,
        WorkerEvent.PARENT_DIED: ev.Ending.ORPHANED,
        WorkerEvent.INTERRUPTED: ev.Ending.INTERRUPTED,
    }

    def __init__(self, shared: Shared, worker_id: int) -> None:
        super().__init__(worker_id)
        self.shared, self.emit = shared, shared.emit

    def decide(self, event: WorkerEvent) -> Action:
        action = super().decide(event)
        if event is WorkerEvent.TASK_WHEN_DONE:
            seen = ev.DoneEvent.WORKERS
            self.emit(ev.DONE_EVENT_SEEN, self.shared.received, self.worker_id, seen)
        elif event in self.ENDINGS:
            self.emit(ev.WORKER_EXIT, -1, self.worker_id, self.ENDINGS[event])
        elif event is _READY:
            stack_dumps.at_a_crash()
            self.emit(ev.WORKER_READY, -1, self.worker_id, *self.shared.recording.numbers, self.shared.seed)
        return action


class TracedPinLifecycle(PinLifecycle):
    """Emits the pin thread's beginning and end."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared, self.emit = shared, shared.emit

    def handle(self, event: PinEvent) -> PinState:
        after = super().handle(event)
        if event is PinEvent.READY:
            self.emit(ev.PIN_START, x=int(self.shared.simulated))
        elif event in (PinEvent.DONE, PinEvent.DIED):
            ending = ev.Ending.SENTINEL if event is PinEvent.DONE else ev.Ending.ERROR
            self.emit(ev.PIN_EXIT, x=ending)
        return after


TRACED: dict[Callable[..., Any], Callable[..., Any]] = {
    EpochPosition: TracedEpochPosition,
    Mappings: TracedMappings,
    Dispatcher: TracedDispatcher,
    LoaderLifecycle: TracedLoaderLifecycle,
    WorkerLifecycle: TracedWorkerLifecycle,
    PinLifecycle: TracedPinLifecycle,
}
