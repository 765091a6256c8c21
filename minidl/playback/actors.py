"""The live loader's own pure classes, driven by a trace's events to the state that they were in.

`DispatcherReplay`, `LoaderReplay`, `WorkerReplay` and `PinReplay` each take one iterator's events, one epoch after the
other, through `step(event)`; an event is a row of `Trace.events` that the class `READS`. `step` raises DispatchError
or ProtocolError if the event is not what the class, in its present state, would decide or allow.

Rules of use: after an error the state is no longer the loader's; begin anew, or with the next epoch. `copy.copy` of one
is independent of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NoReturn

from minidl.loader.dispatcher import EPOCH_END, STORED, Deliver, Dispatcher, DispatchError, Wait
from minidl.loader.protocol import (
    LoaderEvent,
    LoaderLifecycle,
    LoaderState,
    PinEvent,
    PinLifecycle,
    PinState,
    ProtocolError,
    TableKey,
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


class DispatcherReplay:
    """Drive a Dispatcher. received: the code by which the loader receives: ready_get's end if it pins memory."""

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
        if not self.idle or event["code"] in self._ALWAYS:
            self._STEPS[event["code"]](self, event)

    def _begun(self, event: Row) -> None:
        """Begin counts anew: the loader does so before persistent workers know of the epoch."""
        self.dispatcher.reset()
        self.due = self.stored = None
        self.announced = 0
        self.idle = event["code"] == ev.RESUME_PUT

    def _told_to_leave(self, event: Row) -> None:
        if event["x"] == QueueId.INDEX and 0 <= event["worker"] < self.dispatcher.num_workers:
            self.dispatcher.worker_unavailable(event["worker"])

    def _resumed(self, event: Row) -> None:
        if 0 <= event["y"] < self.dispatcher.num_workers:
            self.dispatcher.start_at(event["y"])

    def _assigned(self, event: Row) -> None:
        task, worker = event["task"], event["worker"]
        decided = self.dispatcher.assign(None)
        if decided is None or (decided.idx, decided.worker_id) != (task, worker):
            own = "nothing" if decided is None else f"task {decided.idx} for worker {decided.worker_id}"
            raise DispatchError(f"the dispatcher assigns {own}; the trace has task {task} for worker {worker}")
        _same("tasks outstanding", self.dispatcher.tasks_outstanding, event["y"])

    def _received(self, event: Row) -> None:
        if event["code"] != self._received_code or event["x"] != Message.RESULT or event["y"] == Outcome.EXHAUSTED:
            return
        if self.stored is not None:
            raise DispatchError(f"task {self.stored} came before its turn, but the trace has no reorder_store of it")
        if not isinstance(step := self.dispatcher.next_step(), Wait):
            raise DispatchError(f"a result is received while the dispatcher decides {step}")
        answer = self.dispatcher.receive(event["task"], None)
        self.due = answer.idx if isinstance(answer, Deliver) else None
        self.stored = event["task"] if answer is STORED else None

    def _exhausted(self, event: Row) -> None:
        self.dispatcher.exhausted(event["task"], event["worker"])

    def _stored(self, event: Row) -> None:
        stored, self.stored = self.stored, None
        _same("task to be stored", stored, event["task"])
        _same("rcvd_idx", self.dispatcher.rcvd_idx, event["x"])
        _same("depth of the reorder buffer", self.dispatcher.reorder_depth, event["y"])

    def _popped(self, event: Row) -> None:
        step = self.dispatcher.next_step()
        self.due = step.idx if isinstance(step, Deliver) else None
        _same("task whose turn it is", self.due, event["task"])
        _same("depth of the reorder buffer", self.dispatcher.reorder_depth, event["y"])

    def _advanced(self, event: Row) -> None:
        if self.due is None and isinstance(step := self.dispatcher.next_step(), Deliver):
            raise DispatchError(f"rcvd_idx moves on while task {step.idx} is due")
        _same("rcvd_idx", self.dispatcher.rcvd_idx, event["x"])
        self.announced = event["x"]

    def _yielded(self, event: Row) -> None:
        due, self.due = self.due, None
        _same("task to be yielded", due, event["task"])
        _same("rcvd_idx, as announced", self.dispatcher.rcvd_idx, self.announced)

    def _stopped(self, event: Row) -> None:
        self.idle = True
        ran_out = event["code"] == ev.EPOCH[1] and event["z"] == Ending.EXHAUSTED
        if ran_out and self.dispatcher.next_step() is not EPOCH_END:
            raise DispatchError("the epoch ends, but the dispatcher still has a batch to yield or to wait for")

    _STEPS: Final[Mapping[int, Callable[[DispatcherReplay, Row], None]]] = {
        ev.EPOCH[0]: _begun,
        ev.RESUME_PUT: _begun,
        ev.SENTINEL_PUT: _told_to_leave,
        ev.RESUMED: _resumed,
        ev.TASK_ASSIGNED: _assigned,
        ev.RESULT_GET[1]: _received,
        ev.READY_GET[1]: _received,
        ev.WORKER_EXHAUSTED: _exhausted,
        ev.REORDER_STORE: _stored,
        ev.REORDER_POP: _popped,
        ev.RCVD_ADVANCE: _advanced,
        ev.YIELD: _yielded,
        ev.FOUND_DEAD: _stopped,
        ev.EPOCH[1]: _stopped,
    }
    _ALWAYS: Final = (ev.EPOCH[0], ev.RESUME_PUT, ev.SENTINEL_PUT)
    READS: Final = tuple(_STEPS)


def _same(what: str, decided: int | None, found: int) -> None:
    if decided != found:
        own = "none" if decided is None else decided
        raise DispatchError(f"{what}: the dispatcher has {own}, the trace {found}")


# --- The lifecycles ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ToldStep:
    """A step of its actor's lifecycle that an event tells.

    x, y: the event's numbers with which it tells the step, () = any; at: the states in which it does, () = any;
    otherwise: only if it tells no step before. happened: a text says instead why the event is impossible then.
    """

    happened: TableKey | str
    x: Sequence[int] = ()
    y: Sequence[int] = ()
    at: Sequence[TableKey] = ()
    otherwise: bool = False

    def told_by(self, event: Row, state: TableKey) -> bool:
        """Whether an event tells it to an actor in this state."""
        x, y = not self.x or event["x"] in self.x, not self.y or event["y"] in self.y
        return x and y and (not self.at or state in self.at)


_Told = tuple[TableKey | None, tuple[ToldStep, ...]]
_DATA, _ERROR, _OUT_OF_DATA = ((int(outcome),) for outcome in Outcome)


def _tells(forced: TableKey | None, *steps: ToldStep) -> _Told:
    return forced, steps


class LifecycleReplay:
    """Drive a lifecycle, `life`; a copy drives its own.

    TABLE: of each event that it reads, where the actor is after it, if its lifecycle does not allow it (None: where it
    was), and the steps that the event tells, in order.
    """

    TABLE: ClassVar[Mapping[int, _Told]]

    def __init__(self, life: Any) -> None:
        self.life = life

    def __copy__(self) -> LifecycleReplay:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, life=copy.copy(self.life))
        return new

    def step(self, event: Row) -> None:
        """Follow one event."""
        told = False
        for step in self.TABLE[event["code"]][1]:
            if not (told and step.otherwise) and step.told_by(event, self.life.state):
                told = True
                if isinstance(step.happened, str):
                    self._refuse(step.happened)
                self.life.handle(step.happened)

    def force(self, event: Row) -> None:
        """Go where an event leads that `step` has refused."""
        self.life.state = self.TABLE[event["code"]][0] or self.life.state

    def _refuse(self, why: str) -> NoReturn:
        raise ProtocolError(f"{self.life.actor}: {why.format(state=self.life.state.name)}")


_L, _LE = LoaderState, LoaderEvent
_START_OR_RESUME: Final = (  # one step of all workers: told by the first of them, or by the epoch that follows
    ToldStep(_LE.RESUME, at=tuple(set(_L) - {_L.NEW, _L.STARTING, _L.RESUMING})),
    ToldStep(_LE.START, at=(_L.NEW,)),
)
_ENDS_OF_NEXT: Final = {_LE.YIELD: _DATA, _LE.RAISE: _ERROR, _LE.EPOCH_END: _OUT_OF_DATA}
_PIN_STOPPED: Final = ToldStep(_LE.PIN_STOPPED, at=(_L.STOPPING_PIN,))
_SIGNALLED: Final = ToldStep(_LE.SIGNALLED, at=(_L.STOPPING_WORKERS,))
_JOINED: Final = ToldStep(_LE.JOINED, at=(_L.JOINING,))


class LoaderReplay(LifecycleReplay):
    """Drive a LoaderLifecycle. A step of the shutdown ends at the first event of the next one, if it leaves one."""

    TABLE: ClassVar = {
        ev.WORKER_START[0]: _tells(None, *_START_OR_RESUME),
        ev.RESUME_PUT: _tells(_L.RESUMING, *_START_OR_RESUME),
        ev.EPOCH[0]: _tells(_L.PRIMING, *_START_OR_RESUME, ToldStep(_LE.EPOCH_BEGIN)),
        ev.CONSUMER[0]: _tells(_L.IDLE, ToldStep(_LE.PRIMED, at=(_L.PRIMING,))),
        ev.NEXT[0]: _tells(_L.WAITING, ToldStep(_LE.NEXT)),
        ev.NEXT[1]: _tells(
            _L.IDLE,
            *(ToldStep(happened, y=outcome) for happened, outcome in _ENDS_OF_NEXT.items()),
            ToldStep("next ends with an unknown outcome", otherwise=True),
        ),
        ev.SHUTDOWN[0]: _tells(_L.STOPPING_PIN, ToldStep(_LE.SHUT_DOWN)),
        ev.DONE_EVENT_SET: _tells(None, replace(_PIN_STOPPED, x=(DoneEvent.WORKERS,))),
        ev.JOIN[0]: _tells(None, replace(_SIGNALLED, x=(Actor.WORKER,))),
        ev.TERMINATE: _tells(None, _JOINED),
        ev.SHUTDOWN[1]: _tells(_L.CLOSED, _PIN_STOPPED, _SIGNALLED, _JOINED, ToldStep(_LE.TERMINATED)),
    }
    READS: Final = tuple(TABLE)

    def __init__(self) -> None:
        super().__init__(LoaderLifecycle())


_W, _WE = WorkerState, WorkerEvent
_UNASKED: Final = ToldStep("it fetches in state {state}, with no task taken", at=tuple(set(_W) - {_W.FETCHING}))
_UNTOLD: Final = ToldStep("it leaves for a sentinel that it has not received", at=tuple(set(_W) - {_W.ENDED}))


class WorkerReplay(LifecycleReplay):
    """Drive a WorkerLifecycle. done_set_at: when the workers' done event was set (ns), None if it never was."""

    TABLE: ClassVar = {
        ev.WORKER_READY: _tells(_W.WAITING, ToldStep(_WE.READY)),
        ev.INDEX_GET[1]: _tells(None),  # see `_taken`
        ev.DONE_EVENT_SEEN: _tells(None),
        ev.FETCH[0]: _tells(_W.FETCHING, _UNASKED),
        ev.FETCH[1]: _tells(
            _W.WAITING, ToldStep(_WE.ITERATION_END, x=_OUT_OF_DATA), ToldStep(_WE.FETCHED, otherwise=True)
        ),
        ev.RESULT_PUT: _tells(_W.WAITING),
        ev.RESUME_ACK: _tells(_W.WAITING, ToldStep(_WE.RESUME)),
        ev.SENTINEL_GET: _tells(_W.ENDED),  # see `_sentinel`
        ev.WORKER_EXIT: _tells(
            _W.ENDED,
            replace(_UNTOLD, x=(Ending.SENTINEL,)),
            ToldStep(_WE.PARENT_DIED, x=(Ending.ORPHANED,)),
            ToldStep(_WE.INTERRUPTED, x=(Ending.INTERRUPTED,)),
        ),
    }
    READS: Final = tuple(TABLE)

    def __init__(self, worker_id: int, done_set_at: int | None) -> None:
        super().__init__(WorkerLifecycle(worker_id))
        self.done_set_at = done_set_at
        self.pending: int | None = None  # the task that came, of which the next event says whether it is skipped

    def step(self, event: Row) -> None:
        """Follow one event."""
        if self.pending is not None:
            self._taken(event["code"], event["task"])
        if event["code"] == ev.INDEX_GET[1] and event["x"] == Message.TASK:
            self.pending = event["task"]
        elif event["code"] == ev.SENTINEL_GET:
            self._sentinel(event["time"])
        super().step(event)

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
        elif self.done_set_at is None or self.done_set_at > time:
            self._refuse("a sentinel before the done event, its dataset not ended")
        else:
            self.life.handle(WorkerEvent.SENTINEL_WHEN_DONE)


_P, _PE = PinState, PinEvent
_PUT: Final = (ToldStep(_PE.PINNED), ToldStep(_PE.PUT))
_AT_ANOTHER_STEP: Final = ToldStep("it pins in state {state}", at=tuple(set(_P) - {_P.PINNING}))


class PinReplay(LifecycleReplay):
    """Drive a PinLifecycle. It passes a resumption's answer on as it is, which leaves no event."""

    TABLE: ClassVar = {
        ev.PIN_START: _tells(_P.WAITING, ToldStep(_PE.READY)),
        ev.RESULT_GET[1]: _tells(
            _P.PINNING,
            ToldStep(_PE.WOKEN, x=(Message.SENTINEL,)),
            ToldStep(_PE.RESULT, x=(Message.RESULT, Message.RESUME)),
            *(replace(step, x=(Message.RESUME,)) for step in _PUT),
        ),
        ev.PIN[0]: _tells(_P.PINNING, _AT_ANOTHER_STEP),
        ev.PIN[1]: _tells(None, _AT_ANOTHER_STEP),
        ev.READY_PUT: _tells(_P.WAITING, *_PUT),
        ev.PIN_EXIT: _tells(_P.ENDED, ToldStep(_PE.DIED, x=(Ending.ERROR,)), ToldStep(_PE.DONE, otherwise=True)),
    }
    READS: Final = tuple(TABLE)

    def __init__(self) -> None:
        super().__init__(PinLifecycle())
