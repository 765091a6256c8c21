"""The lifecycles of the loader, of a worker and of the pin thread, as tables.

Theory of operation
-------------------
Three kinds of actor share one epoch. The loader sends tasks and yields batches. Each worker turns tasks into results.
The pin thread, if there is one, stands between the workers and the loader. Each actor can be told to stop, can find the
others dead, and can die at any moment. So each actor is a table: (state, event) -> next state. The worker's table also
says what to do (an `Action`), because one message means different things in different states: a waiting worker fetches
a task, an exhausted worker skips it.

How they end together (article 4 §shutdown; `check.joint_rules` has it as rules that a trace, or a model, is held to):

1. The loader stops the pin thread before the workers. A worker that leaves may leave half a message behind, and the pin
   thread would read it.
2. A done event says "skip what is in flight". A sentinel tells a worker to leave, and wakes the pin thread,
   which leaves by its done event. A worker accepts a sentinel only if the workers' done event is set or its own dataset
   is exhausted.
3. A worker whose loader is gone leaves in any state, because no actor reads its results.
4. Every wait for another actor is bounded. The loader terminates a worker that does not end by itself.

A missing entry in a table *is* the error: `ProtocolError` names the actor, the event and the state. The live loader,
the replay of a trace, the checker and the explorer use these same tables. They do no I/O and read no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, Generic, TypeVar


class TableKey(enum.Enum):
    """An enumeration whose members are looked up in tables several times a batch."""

    __hash__ = object.__hash__  # Enum hashes a member's name, in Python; members are equal only to themselves anyway


State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


class ProtocolError(RuntimeError):
    """An actor met an event that its present state does not allow."""


class Lifecycle(Generic[State, Event]):
    """One actor's state, moved by events along a table."""

    def __init__(self, actor: str, initial: State, table: Mapping[State, Mapping[Event, State]]) -> None:
        self.actor = actor
        self.state = initial
        self._table = table

    def allows(self, event: Event) -> bool:
        """Whether `event` is possible now."""
        return event in self._table[self.state]

    def handle(self, event: Event) -> State:
        """Move to the state that follows `event`; raises ProtocolError if the table has no entry."""
        following = self._table[self.state].get(event)
        if following is None:
            raise ProtocolError(
                f"{self.actor}: event {event.name} is impossible in state {self.state.name}; "
                f"possible there: {', '.join(e.name for e in self._table[self.state]) or 'nothing'}"
            )
        self.state = following
        return following

    def __repr__(self) -> str:
        return f"<{self.actor} {self.state.name}>"


# --- The loader -------------------------------------------------------------------------------------------------------
class LoaderState(TableKey):
    """States of an iterator in the process that iterates."""

    NEW = enum.auto()  # nothing started yet
    STARTING = enum.auto()  # workers and pin thread are being started
    RESUMING = enum.auto()  # waiting for persistent workers to acknowledge a new epoch
    PRIMING = enum.auto()  # the first tasks of an epoch are being sent
    IDLE = enum.auto()  # the consumer's code runs; the loader does nothing until the next call of next()
    WAITING = enum.auto()  # inside __next__
    EXHAUSTED = enum.auto()  # the epoch is over
    STOPPING_PIN = enum.auto()  # shutdown 1: the pin-memory thread
    STOPPING_WORKERS = enum.auto()  # shutdown 2: done event and sentinels
    JOINING = enum.auto()  # shutdown 3: bounded joins
    TERMINATING = enum.auto()  # shutdown 4: workers that did not end
    CLOSED = enum.auto()


class LoaderEvent(TableKey):
    """Events of an iterator."""

    START = enum.auto()
    EPOCH_BEGIN = enum.auto()
    PRIMED = enum.auto()  # the first tasks are sent, to as many workers as there are tasks for
    NEXT = enum.auto()  # the consumer asks for a batch
    YIELD = enum.auto()  # ... and gets it
    RAISE = enum.auto()  # ... or an error
    EPOCH_END = enum.auto()  # ... or StopIteration
    RESUME = enum.auto()
    SHUT_DOWN = enum.auto()
    PIN_STOPPED = enum.auto()
    SIGNALLED = enum.auto()  # every worker has been sent its sentinel
    JOINED = enum.auto()
    TERMINATED = enum.auto()


_L, _LE = LoaderState, LoaderEvent
LOADER_TABLE: Mapping[LoaderState, Mapping[LoaderEvent, LoaderState]] = {
    _L.NEW: {_LE.START: _L.STARTING, _LE.SHUT_DOWN: _L.STOPPING_PIN},
    _L.STARTING: {_LE.EPOCH_BEGIN: _L.PRIMING, _LE.SHUT_DOWN: _L.STOPPING_PIN},
    _L.IDLE: {_LE.NEXT: _L.WAITING, _LE.RESUME: _L.RESUMING, _LE.SHUT_DOWN: _L.STOPPING_PIN},
    _L.WAITING: {
        _LE.YIELD: _L.IDLE,
        _LE.RAISE: _L.IDLE,
        _LE.EPOCH_END: _L.EXHAUSTED,
        _LE.SHUT_DOWN: _L.STOPPING_PIN,
    },
    _L.EXHAUSTED: {_LE.NEXT: _L.WAITING, _LE.RESUME: _L.RESUMING, _LE.SHUT_DOWN: _L.STOPPING_PIN},
    # If the sampler raises during priming, or a worker dies before it has acknowledged, the user may resume again.
    _L.RESUMING: {_LE.EPOCH_BEGIN: _L.PRIMING, _LE.RESUME: _L.RESUMING, _LE.SHUT_DOWN: _L.STOPPING_PIN},
    _L.PRIMING: {_LE.PRIMED: _L.IDLE, _LE.RESUME: _L.RESUMING, _LE.SHUT_DOWN: _L.STOPPING_PIN},
    # An exception (Ctrl-C in a join) cuts the shutdown short: then only its last step follows.
    _L.STOPPING_PIN: {_LE.PIN_STOPPED: _L.STOPPING_WORKERS, _LE.TERMINATED: _L.CLOSED},
    _L.STOPPING_WORKERS: {_LE.SIGNALLED: _L.JOINING, _LE.TERMINATED: _L.CLOSED},
    _L.JOINING: {_LE.JOINED: _L.TERMINATING, _LE.TERMINATED: _L.CLOSED},
    _L.TERMINATING: {_LE.TERMINATED: _L.CLOSED},
    # A signal's handler may close the loader while a batch is on its way to the consumer, which still gets it.
    _L.CLOSED: dict.fromkeys((_LE.NEXT, _LE.YIELD, _LE.RAISE, _LE.EPOCH_END), _L.CLOSED),
}
_AFTER_SHUT_DOWN = {_L.STOPPING_PIN, _L.STOPPING_WORKERS, _L.JOINING, _L.TERMINATING, _L.CLOSED}


class LoaderLifecycle(Lifecycle[LoaderState, LoaderEvent]):
    """The loader's lifecycle (article 4 §shutdown, "Main process")."""

    def __init__(self) -> None:
        super().__init__("loader", LoaderState.NEW, LOADER_TABLE)

    @property
    def shut_down(self) -> bool:
        """Whether the shutdown has begun."""
        return self.state in _AFTER_SHUT_DOWN

    def next(self) -> None:
        """The consumer asks for a batch. Raises ProtocolError, which says why it may not."""
        if (why_not := _NO_NEXT.get(self.state)) is not None:
            raise ProtocolError(why_not)
        self.handle(LoaderEvent.NEXT)


_IN_NEXT = (
    "next() on an iterator whose last next() still runs, in another thread or around this one. Give each thread an "
    "iterator of its own, or take turns with a lock"
)

_NEVER_BEGAN = (
    "next() on an iterator whose new epoch has not begun: iter(loader) has raised an error, or still runs in another "
    "thread. Call iter(loader) again; if that error named a worker that died, make a new DataLoader, since persistent "
    "workers are started only once"
)

_NO_NEXT: Final = {_L.WAITING: _IN_NEXT, _L.RESUMING: _NEVER_BEGAN, _L.PRIMING: _NEVER_BEGAN}
"""States in which a consumer may by mistake ask for a batch -> what it is told."""


# --- A worker ---------------------------------------------------------------------------------------------------------
class WorkerState(TableKey):
    """States of a worker process, as it sees itself."""

    STARTING = enum.auto()
    WAITING = enum.auto()  # at its index queue
    FETCHING = enum.auto()
    EXHAUSTED = enum.auto()  # its iterable dataset has ended; waits for the sentinel or for a new epoch
    ENDED = enum.auto()


class WorkerEvent(TableKey):
    """Events of a worker. The `_WHEN_DONE` events are the same messages with the done event set."""

    READY = enum.auto()
    TASK = enum.auto()
    TASK_WHEN_DONE = enum.auto()
    FETCHED = enum.auto()  # a batch or an error is in the result queue
    ITERATION_END = enum.auto()
    RESUME = enum.auto()
    SENTINEL = enum.auto()
    SENTINEL_WHEN_DONE = enum.auto()
    PARENT_DIED = enum.auto()
    INTERRUPTED = enum.auto()  # KeyboardInterrupt: the loader's process gets it too, and raises it


class Action(enum.Enum):
    """A worker's answer to an event."""

    WAIT = enum.auto()
    FETCH = enum.auto()
    SKIP = enum.auto()
    RESUME = enum.auto()  # acknowledge, drop the old fetcher
    LEAVE = enum.auto()


_W, _WE, _A = WorkerState, WorkerEvent, Action
_ALWAYS = {_WE.PARENT_DIED: (_W.ENDED, _A.LEAVE), _WE.INTERRUPTED: (_W.ENDED, _A.LEAVE)}
WORKER_TABLE: Mapping[WorkerState, Mapping[WorkerEvent, tuple[WorkerState, Action]]] = {
    _W.STARTING: {_WE.READY: (_W.WAITING, _A.WAIT), **_ALWAYS},
    _W.WAITING: {
        _WE.TASK: (_W.FETCHING, _A.FETCH),
        _WE.TASK_WHEN_DONE: (_W.WAITING, _A.SKIP),
        _WE.RESUME: (_W.WAITING, _A.RESUME),
        _WE.SENTINEL_WHEN_DONE: (_W.ENDED, _A.LEAVE),
        **_ALWAYS,
    },
    _W.FETCHING: {_WE.FETCHED: (_W.WAITING, _A.WAIT), _WE.ITERATION_END: (_W.EXHAUSTED, _A.WAIT), **_ALWAYS},
    _W.EXHAUSTED: {
        _WE.TASK: (_W.EXHAUSTED, _A.SKIP),
        _WE.TASK_WHEN_DONE: (_W.EXHAUSTED, _A.SKIP),
        _WE.RESUME: (_W.WAITING, _A.RESUME),
        _WE.SENTINEL: (_W.ENDED, _A.LEAVE),
        _WE.SENTINEL_WHEN_DONE: (_W.ENDED, _A.LEAVE),
        **_ALWAYS,
    },
    _W.ENDED: {},
}


class WorkerLifecycle(Lifecycle[WorkerState, WorkerEvent]):
    """A worker's lifecycle, with an action for each event (article 1 §2.4.5; article 4 §shutdown)."""

    def __init__(self, worker_id: int) -> None:
        states = {state: {event: entry[0] for event, entry in row.items()} for state, row in WORKER_TABLE.items()}
        super().__init__(f"worker {worker_id}", WorkerState.STARTING, states)
        self.worker_id = worker_id

    def decide(self, event: WorkerEvent) -> Action:
        """Handle `event`, return what to do about it; raises ProtocolError."""
        before = self.state
        self.handle(event)
        return WORKER_TABLE[before][event][1]


# --- The pin thread ---------------------------------------------------------------------------------------------------
class PinState(TableKey):
    """States of the pin thread."""

    STARTING = enum.auto()
    WAITING = enum.auto()  # at the result queue
    PINNING = enum.auto()
    PUTTING = enum.auto()  # at the queue that the loader reads
    ENDED = enum.auto()


class PinEvent(TableKey):
    """Events of the pin thread."""

    READY = enum.auto()
    RESULT = enum.auto()
    PINNED = enum.auto()
    PUT = enum.auto()
    WOKEN = enum.auto()  # by the sentinel
    DONE = enum.auto()  # it has seen its done event
    DIED = enum.auto()


_P, _PE = PinState, PinEvent
PIN_TABLE: Mapping[PinState, Mapping[PinEvent, PinState]] = {
    _P.STARTING: {_PE.READY: _P.WAITING, _PE.DIED: _P.ENDED},
    _P.WAITING: {_PE.RESULT: _P.PINNING, _PE.WOKEN: _P.WAITING, _PE.DONE: _P.ENDED, _PE.DIED: _P.ENDED},
    _P.PINNING: {_PE.PINNED: _P.PUTTING, _PE.DONE: _P.ENDED, _PE.DIED: _P.ENDED},
    _P.PUTTING: {_PE.PUT: _P.WAITING, _PE.DONE: _P.ENDED, _PE.DIED: _P.ENDED},
    _P.ENDED: {},
}


class PinLifecycle(Lifecycle[PinState, PinEvent]):
    """The pin thread's lifecycle (article 1 §2.4.6)."""

    def __init__(self) -> None:
        super().__init__("pin thread", PinState.STARTING, PIN_TABLE)
