"""The live loader's own pure classes, driven by a trace's events to the state that they were in.

`DispatcherReplay`, `LoaderReplay`, `WorkerReplay` and `PinReplay` each take one iterator's events, one epoch after the
other, through `step(event)`; an event is a row of `Trace.events` that the class `READS`. `step` raises DispatchError
or ProtocolError if the event is not what the class, in its present state, would decide or allow.

Rules of use: after an error the state is no longer the loader's; begin anew, or with the next epoch. `copy.copy` of one
is independent of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final

from minidl.loader.dispatcher import EPOCH_END, STORED, Deliver, Dispatcher, DispatchError, Wait
from minidl.loader.protocol import (
    LoaderEvent,
    LoaderLifecycle,
    LoaderState,
    PinEvent,
    PinLifecycle,
    PinState,
    ProtocolError,
    WorkerEvent,
    WorkerLifecycle,
    WorkerState,
)
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Positions, Rows
from minidl.tracefile.events import Actor, DoneEvent, Ending, Message, Outcome, QueueId

Row = Mapping[str, int]
"""One row of `Trace.events` as `as_dicts` makes it."""


def as_dicts(events: Rows, rows: Positions | slice) -> Iterator[dict[str, int]]:
    """Yield rows of `Trace.events` as dictionaries: reading single rows of the array would take most of the time."""
    columns = [events[name][rows].tolist() for name in ("time", "code", "task", "worker", "x", "y", "z", "pid")]
    for time, code, task, worker, x, y, z, pid in zip(*columns, strict=True):
        yield {"time": time, "code": code, "task": task, "worker": worker, "x": x, "y": y, "z": z, "pid": pid}


def _value(member: int) -> int:
    """Return a plain integer: comparing thousands of rows to enumeration members is slow."""
    return int(member)


_TASK, _RESULT, _RESUME, _SENTINEL = map(_value, (Message.TASK, Message.RESULT, Message.RESUME, Message.SENTINEL))
_DATA, _ERROR, _OUT_OF_DATA = map(_value, (Outcome.DATA, Outcome.ERROR, Outcome.EXHAUSTED))


class DispatcherReplay:
    """Drive a Dispatcher. received: the code by which the loader receives: ready_get's end if it pins memory."""

    READS: Final = (
        *(*ev.EPOCH, ev.TASK_ASSIGNED, ev.RESULT_GET[1], ev.READY_GET[1], ev.WORKER_EXHAUSTED, ev.FOUND_DEAD),
        *(ev.REORDER_STORE, ev.REORDER_POP, ev.RCVD_ADVANCE, ev.YIELD, ev.RESUME_PUT, ev.SENTINEL_PUT),
        ev.RESUMED,
    )

    def __init__(self, num_workers: int, prefetch_factor: int, in_order: bool, received: int) -> None:
        self.dispatcher: Dispatcher = Dispatcher(num_workers, prefetch_factor, in_order)
        self.due: int | None = None  # the task whose turn it is, until it is yielded
        self.stored: int | None = None  # the task that has just come before its turn
        self.announced = 0  # rcvd_idx in the trace's last event that has it
        self.idle = True  # nothing is decided between epochs, when leftovers are dropped, and after a worker's death
        self._received_code = received

    def __copy__(self) -> DispatcherReplay:
        new = DispatcherReplay.__new__(DispatcherReplay)
        new.__dict__.update(self.__dict__, dispatcher=copy.copy(self.dispatcher))
        return new

    def step(self, event: Row) -> None:
        """Follow one event."""
        code = event["code"]
        if code in (ev.EPOCH[0], ev.RESUME_PUT):  # counts begin anew before persistent workers know
            self.dispatcher.reset()
            self.due = self.stored = None
            self.announced = 0
            self.idle = code == ev.RESUME_PUT
        elif code == ev.SENTINEL_PUT:
            if event["x"] == QueueId.INDEX and 0 <= event["worker"] < self.dispatcher.num_workers:
                self.dispatcher.worker_unavailable(event["worker"])
        elif not self.idle:
            self._follow(code, event)

    def _follow(self, code: int, event: Row) -> None:
        task, worker, x, y = event["task"], event["worker"], event["x"], event["y"]
        if code == self._received_code:
            if x == _RESULT and y != _OUT_OF_DATA:
                self._received(task)
        elif code == ev.TASK_ASSIGNED:
            self._assigned(task, worker, y)
        elif code == ev.YIELD:
            self._yielded(task)
        elif code == ev.RCVD_ADVANCE:
            self._advanced(x)
        elif code == ev.REORDER_STORE:
            self._stored(task, x, y)
        elif code == ev.REORDER_POP:
            self._popped(task, y)
        elif code == ev.WORKER_EXHAUSTED:
            self.dispatcher.exhausted(task, worker)
        elif code == ev.RESUMED and 0 <= y < self.dispatcher.num_workers:
            self.dispatcher.start_at(y)
        elif code in (ev.FOUND_DEAD, ev.EPOCH[1]):
            self.idle = True
            if code == ev.EPOCH[1] and event["z"] == Ending.EXHAUSTED:
                self._ended()

    def _assigned(self, task: int, worker: int, outstanding: int) -> None:
        decided = self.dispatcher.assign(None)
        if decided is None or (decided.idx, decided.worker_id) != (task, worker):
            own = "nothing" if decided is None else f"task {decided.idx} for worker {decided.worker_id}"
            raise DispatchError(f"the dispatcher assigns {own}; the trace has task {task} for worker {worker}")
        _same("tasks outstanding", self.dispatcher.tasks_outstanding, outstanding)

    def _received(self, task: int) -> None:
        if self.stored is not None:
            raise DispatchError(f"task {self.stored} came before its turn, but the trace has no reorder_store of it")
        if not isinstance(step := self.dispatcher.next_step(), Wait):
            raise DispatchError(f"a result is received while the dispatcher decides {step}")
        answer = self.dispatcher.receive(task, None)
        self.due = answer.idx if isinstance(answer, Deliver) else None
        self.stored = task if answer is STORED else None

    def _stored(self, task: int, rcvd_idx: int, depth: int) -> None:
        stored, self.stored = self.stored, None
        _same("task to be stored", stored, task)
        _same("rcvd_idx", self.dispatcher.rcvd_idx, rcvd_idx)
        _same("depth of the reorder buffer", self.dispatcher.reorder_depth, depth)

    def _popped(self, task: int, depth: int) -> None:
        step = self.dispatcher.next_step()
        self.due = step.idx if isinstance(step, Deliver) else None
        _same("task whose turn it is", self.due, task)
        _same("depth of the reorder buffer", self.dispatcher.reorder_depth, depth)

    def _advanced(self, rcvd_idx: int) -> None:
        if self.due is None and isinstance(step := self.dispatcher.next_step(), Deliver):
            raise DispatchError(f"rcvd_idx moves on while task {step.idx} is due")
        _same("rcvd_idx", self.dispatcher.rcvd_idx, rcvd_idx)
        self.announced = rcvd_idx

    def _yielded(self, task: int) -> None:
        due, self.due = self.due, None
        _same("task to be yielded", due, task)
        _same("rcvd_idx, as announced", self.dispatcher.rcvd_idx, self.announced)

    def _ended(self) -> None:
        if self.dispatcher.next_step() is not EPOCH_END:
            raise DispatchError("the epoch ends, but the dispatcher still has a batch to yield or to wait for")


def _same(what: str, decided: int | None, found: int) -> None:
    if decided != found:
        own = "none" if decided is None else decided
        raise DispatchError(f"{what}: the dispatcher has {own}, the trace {found}")


class _Alive:
    """Base of the classes that drive a lifecycle, `life`; a copy drives its own."""

    def __copy__(self) -> Any:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, life=copy.copy(self.__dict__["life"]))
        return new


class LoaderReplay(_Alive):
    """Drive a LoaderLifecycle."""

    READS: Final = (
        *(*ev.EPOCH, *ev.NEXT, *ev.CONSUMER, *ev.SHUTDOWN, ev.WORKER_START[0], ev.RESUME_PUT),
        *(ev.DONE_EVENT_SET, ev.JOIN[0], ev.TERMINATE),
    )
    _OUTCOMES: Final = {_DATA: LoaderEvent.YIELD, _ERROR: LoaderEvent.RAISE, _OUT_OF_DATA: LoaderEvent.EPOCH_END}
    _SHUTDOWN: Final = {
        LoaderState.STOPPING_PIN: LoaderEvent.PIN_STOPPED,
        LoaderState.STOPPING_WORKERS: LoaderEvent.SIGNALLED,
        LoaderState.JOINING: LoaderEvent.JOINED,
    }

    def __init__(self) -> None:
        self.life = LoaderLifecycle()

    def step(self, event: Row) -> None:
        """Follow one event."""
        code = event["code"]
        if code == ev.EPOCH[0]:
            self._start_or_resume()
            self.life.handle(LoaderEvent.EPOCH_BEGIN)
        elif code in (ev.WORKER_START[0], ev.RESUME_PUT):
            self._start_or_resume()
        elif code in (ev.DONE_EVENT_SET, ev.JOIN[0], ev.TERMINATE):
            self._shut_down_further(code, event["x"])
        elif code == ev.CONSUMER[0] and self.life.state is LoaderState.PRIMING:
            self.life.handle(LoaderEvent.PRIMED)
        elif code == ev.NEXT[0]:
            self.life.handle(LoaderEvent.NEXT)
        elif code == ev.NEXT[1]:
            self._handed_out(event["y"])
        elif code == ev.SHUTDOWN[0]:
            self.life.handle(LoaderEvent.SHUT_DOWN)
        elif code == ev.SHUTDOWN[1]:
            while (done := self._SHUTDOWN.get(self.life.state)) is not None:
                self.life.handle(done)  # steps that leave no event of their own
            self.life.handle(LoaderEvent.TERMINATED)

    def _start_or_resume(self) -> None:
        """Handle the one event of all workers at the first of them, or at the epoch that follows."""
        if self.life.state is LoaderState.NEW:
            self.life.handle(LoaderEvent.START)
        elif self.life.state not in (LoaderState.STARTING, LoaderState.RESUMING):
            self.life.handle(LoaderEvent.RESUME)

    def _shut_down_further(self, code: int, x: int) -> None:
        """Handle the shutdown's steps at their first events; an interrupted shutdown lacks some."""
        state = self.life.state
        if code == ev.DONE_EVENT_SET and x == DoneEvent.WORKERS and state is LoaderState.STOPPING_PIN:
            self.life.handle(LoaderEvent.PIN_STOPPED)
        elif code == ev.JOIN[0] and x == Actor.WORKER and state is LoaderState.STOPPING_WORKERS:
            self.life.handle(LoaderEvent.SIGNALLED)
        elif code == ev.TERMINATE and state is LoaderState.JOINING:
            self.life.handle(LoaderEvent.JOINED)

    def _handed_out(self, outcome: int) -> None:
        happened = self._OUTCOMES.get(outcome)
        if happened is None:
            raise ProtocolError(f"{self.life.actor}: next ends with the unknown outcome {outcome}")
        self.life.handle(happened)


class WorkerReplay(_Alive):
    """Drive a WorkerLifecycle. done_set_at: when the workers' done event was set (ns), None if it never was."""

    READS: Final = (
        *(ev.WORKER_READY, ev.INDEX_GET[1], ev.DONE_EVENT_SEEN, *ev.FETCH, ev.RESULT_PUT, ev.RESUME_ACK),
        *(ev.SENTINEL_GET, ev.WORKER_EXIT),
    )
    _LEAVES_FOR: Final = {
        int(Ending.ORPHANED): WorkerEvent.PARENT_DIED,
        int(Ending.INTERRUPTED): WorkerEvent.INTERRUPTED,
    }

    def __init__(self, worker_id: int, done_set_at: int | None) -> None:
        self.life = WorkerLifecycle(worker_id)
        self.done_set_at = done_set_at
        self.pending: int | None = None  # the task that came, of which the next event says whether it is skipped

    def step(self, event: Row) -> None:
        """Follow one event."""
        code, x = event["code"], event["x"]
        if self.pending is not None:
            self._taken(code, event["task"])
        if code == ev.WORKER_READY:
            self.life.handle(WorkerEvent.READY)
        elif code == ev.INDEX_GET[1] and x == _TASK:
            self.pending = event["task"]
        elif code == ev.FETCH[0] and self.life.state is not WorkerState.FETCHING:
            raise ProtocolError(f"{self.life.actor}: it fetches in state {self.life.state.name}, with no task taken")
        elif code == ev.FETCH[1]:
            self.life.handle(WorkerEvent.ITERATION_END if x == _OUT_OF_DATA else WorkerEvent.FETCHED)
        elif code == ev.RESUME_ACK:
            self.life.handle(WorkerEvent.RESUME)
        elif code == ev.SENTINEL_GET:
            self._sentinel(event["time"])
        elif code == ev.WORKER_EXIT and x == Ending.SENTINEL and self.life.state is not WorkerState.ENDED:
            raise ProtocolError(f"{self.life.actor}: it leaves for a sentinel that it has not received")
        elif code == ev.WORKER_EXIT and (why := self._LEAVES_FOR.get(x)) is not None:
            self.life.handle(why)

    def _taken(self, code: int, task: int) -> None:
        """Handle the task that came, now that its next event says whether it is fetched, answered or skipped."""
        pending, self.pending = self.pending, None
        if code == ev.DONE_EVENT_SEEN and task == pending:
            self.life.handle(WorkerEvent.TASK_WHEN_DONE)
            return
        self.life.handle(WorkerEvent.TASK)
        if code == ev.RESULT_PUT and task == pending:  # the worker's initialisation has failed
            self.life.handle(WorkerEvent.FETCHED)

    def _sentinel(self, time: int) -> None:
        if self.life.allows(WorkerEvent.SENTINEL):
            self.life.handle(WorkerEvent.SENTINEL)
            return
        if self.done_set_at is None or self.done_set_at > time:
            raise ProtocolError(f"{self.life.actor}: a sentinel before the done event, its dataset not ended")
        self.life.handle(WorkerEvent.SENTINEL_WHEN_DONE)


class PinReplay(_Alive):
    """Drive a PinLifecycle."""

    READS: Final = (ev.PIN_START, ev.RESULT_GET[1], *ev.PIN, ev.READY_PUT, ev.PIN_EXIT)

    def __init__(self) -> None:
        self.life = PinLifecycle()

    def step(self, event: Row) -> None:
        """Follow one event."""
        code, x = event["code"], event["x"]
        if code == ev.PIN_START:
            self.life.handle(PinEvent.READY)
        elif code == ev.RESULT_GET[1]:
            self._received(x)
        elif code in ev.PIN and self.life.state is not PinState.PINNING:
            raise ProtocolError(f"{self.life.actor}: it pins in state {self.life.state.name}")
        elif code == ev.READY_PUT:
            self.life.handle(PinEvent.PINNED)
            self.life.handle(PinEvent.PUT)
        elif code == ev.PIN_EXIT:
            self.life.handle(PinEvent.DIED if x == Ending.ERROR else PinEvent.DONE)

    def _received(self, message: int) -> None:
        if message == _SENTINEL:
            self.life.handle(PinEvent.WOKEN)
        elif message in (_RESULT, _RESUME):
            self.life.handle(PinEvent.RESULT)
        if message == _RESUME:  # passed on as it is, which leaves no event
            self.life.handle(PinEvent.PINNED)
            self.life.handle(PinEvent.PUT)
