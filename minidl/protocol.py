"""Who may do what, and when: the lifecycles of the loader, of a worker and of the pin-memory thread.

Theory of operation
-------------------
Three kinds of actor share one epoch. The loader sends tasks and yields batches; each worker turns tasks into results;
the pin-memory thread, where there is one, stands between the workers and the loader. Each of them can be told to stop,
can find the others dead, and can die at any moment, so each is written as a table: (state, event) -> next state. The
worker's table also says what to do (an `Action`), since the same message means different things in different states:
a task is fetched by a waiting worker and skipped by an exhausted one.

How an end is agreed on (article 4, shutdown):

1. The pin-memory thread is stopped before the workers, because a worker that is going away may leave half a message
   behind, and the pin-memory thread would read it.
2. A done event says "skip what is in flight"; a sentinel in the queue says "now leave". A worker therefore accepts a
   sentinel only when the workers' done event is set, or when its own dataset is exhausted.
3. A worker that finds its parent gone leaves in any state: nobody reads what it makes.
4. Every wait of the loader for another actor is bounded; who does not end by itself is terminated.

A missing entry in a table *is* the error: `ProtocolError` names the actor, the event and the state. The live loader,
the replay of a trace and the checker run these same classes; they do no I/O and know no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar


class _Name(enum.Enum):
    """An enumeration whose members are looked up in tables several times a batch."""

    __hash__ = object.__hash__  # Enum hashes a member's name, in Python; members are equal only to themselves anyway


State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


class ProtocolError(RuntimeError):
    """An actor met an event that its present state does not allow."""


class Lifecycle(Generic[State, Event]):
    """One actor's state, moved by events along a table. `history` of moves is the tracer's business, not kept here."""

    def __init__(self, actor: str, initial: State, table: Mapping[State, Mapping[Event, State]]) -> None:
        self.actor = actor
        self.state = initial
        self._table = table

    def allows(self, event: Event) -> bool:
        """Whether `event` is possible now."""
        return event in self._table[self.state]

    def handle(self, event: Event) -> State:
        """Move to the state that follows `event`; raises ProtocolError where the table has no entry."""
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
class LoaderState(_Name):
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
    TERMINATING = enum.auto()  # shutdown 4: whoever is left
    CLOSED = enum.auto()


class LoaderEvent(_Name):
    """What can happen to an iterator."""

    START = enum.auto()
    EPOCH_BEGIN = enum.auto()
    PRIMED = enum.auto()  # every worker has its first tasks
    NEXT = enum.auto()  # the consumer asks for a batch
    YIELD = enum.auto()  # ... and gets it
    RAISE = enum.auto()  # ... or an error
    EPOCH_END = enum.auto()  # ... or StopIteration
    RESUME = enum.auto()
    SHUT_DOWN = enum.auto()
    PIN_STOPPED = enum.auto()
    SIGNALLED = enum.auto()  # every worker has its sentinel under way
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
    # A sampler may raise while the epoch is primed, or a worker die while it is waited for: then resuming may be
    # tried anew.
    _L.RESUMING: {_LE.EPOCH_BEGIN: _L.PRIMING, _LE.RESUME: _L.RESUMING, _LE.SHUT_DOWN: _L.STOPPING_PIN},
    _L.PRIMING: {_LE.PRIMED: _L.IDLE, _LE.RESUME: _L.RESUMING, _LE.SHUT_DOWN: _L.STOPPING_PIN},
    # A shutdown that was interrupted (Ctrl-C in a join) may be asked for again, and then only ends what is left.
    _L.STOPPING_PIN: {_LE.PIN_STOPPED: _L.STOPPING_WORKERS, _LE.TERMINATED: _L.CLOSED},
    _L.STOPPING_WORKERS: {_LE.SIGNALLED: _L.JOINING, _LE.TERMINATED: _L.CLOSED},
    _L.JOINING: {_LE.JOINED: _L.TERMINATING, _LE.TERMINATED: _L.CLOSED},
    _L.TERMINATING: {_LE.TERMINATED: _L.CLOSED},
    _L.CLOSED: {_LE.NEXT: _L.CLOSED, _LE.EPOCH_END: _L.CLOSED, _LE.RAISE: _L.CLOSED},
}
_AFTER_SHUT_DOWN = {_L.STOPPING_PIN, _L.STOPPING_WORKERS, _L.JOINING, _L.TERMINATING, _L.CLOSED}


class LoaderLifecycle(Lifecycle[LoaderState, LoaderEvent]):
    """The loader's own lifecycle (article 4, shutdown, "Main process")."""

    def __init__(self) -> None:
        super().__init__("loader", LoaderState.NEW, LOADER_TABLE)

    @property
    def shut_down(self) -> bool:
        """Whether the shutdown has begun."""
        return self.state in _AFTER_SHUT_DOWN


# --- A worker ---------------------------------------------------------------------------------------------------------
class WorkerState(_Name):
    """States of a worker process, as it sees itself."""

    STARTING = enum.auto()
    WAITING = enum.auto()  # at its index queue
    FETCHING = enum.auto()
    EXHAUSTED = enum.auto()  # its iterable dataset has ended; waits for the sentinel or for a new epoch
    ENDED = enum.auto()


class WorkerEvent(_Name):
    """What can happen to a worker. The `_WHEN_DONE` events are the same messages with the done event set."""

    READY = enum.auto()
    TASK = enum.auto()
    TASK_WHEN_DONE = enum.auto()
    FETCHED = enum.auto()  # a batch or an error is on its way
    ITERATION_END = enum.auto()
    RESUME = enum.auto()
    SENTINEL = enum.auto()
    SENTINEL_WHEN_DONE = enum.auto()
    PARENT_DIED = enum.auto()
    INTERRUPTED = enum.auto()  # KeyboardInterrupt: the loader's process has it too, and speaks for both


class Action(enum.Enum):
    """What a worker does about an event."""

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
    """A worker's lifecycle, with the action that each event asks for (article 1 §2.4.5; article 4, shutdown)."""

    def __init__(self, worker_id: int) -> None:
        states = {state: {event: entry[0] for event, entry in row.items()} for state, row in WORKER_TABLE.items()}
        super().__init__(f"worker {worker_id}", WorkerState.STARTING, states)
        self.worker_id = worker_id

    def decide(self, event: WorkerEvent) -> Action:
        """Handle `event` and say what to do about it; raises ProtocolError."""
        before = self.state
        self.handle(event)
        return WORKER_TABLE[before][event][1]


# --- The pin-memory thread --------------------------------------------------------------------------------------------
class PinState(_Name):
    """States of the pin-memory thread."""

    STARTING = enum.auto()
    WAITING = enum.auto()  # at the result queue
    PINNING = enum.auto()
    PUTTING = enum.auto()  # at the queue that the loader reads
    ENDED = enum.auto()


class PinEvent(_Name):
    """What can happen to the pin-memory thread."""

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
    """The pin-memory thread's lifecycle (article 1 §2.4.6)."""

    def __init__(self) -> None:
        super().__init__("pin thread", PinState.STARTING, PIN_TABLE)
