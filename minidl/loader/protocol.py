"""The lifecycles of the loader, of a worker and of the pin thread as tables, and the joint rules that couple them.

Theory of operation
-------------------
Three kinds of actor share one epoch. The loader sends tasks and yields batches. Each worker turns tasks into results.
The pin thread, if there is one, stands between the workers and the loader. Each actor can be told to stop, can find the
others dead, and can die at any moment. So each actor is a table: (state, event) -> next state. The worker's table also
says what to do (an `Action`), because one message means different things in different states: a waiting worker fetches
a task, an exhausted worker skips it.

The actors are coupled by the rows of `JOINT_RULES`: an actor may do an act only if certain facts hold. How they end
together (article 4 §shutdown):

1. The loader stops the pin thread before the workers. A worker that leaves may leave half a message behind, and the pin
   thread would read it.
2. A done event says "skip what is in flight". A sentinel in a queue says "leave now". A worker accepts a sentinel only
   if the workers' done event is set or its own dataset is exhausted.
3. A worker whose loader is gone leaves in any state, because no actor reads its results.
4. Every wait for another actor is bounded. The loader terminates a worker that does not end by itself.

A missing entry in a table *is* the error: `ProtocolError` names the actor, the event and the state. The live loader,
the replay of a trace, the checker and the explorer use these same tables. They do no I/O and read no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar


class _Name(enum.Enum):
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
    TERMINATING = enum.auto()  # shutdown 4: workers that did not end
    CLOSED = enum.auto()


class LoaderEvent(_Name):
    """Events of an iterator."""

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
    _L.CLOSED: {_LE.NEXT: _L.CLOSED, _LE.EPOCH_END: _L.CLOSED, _LE.RAISE: _L.CLOSED},
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


# --- A worker ---------------------------------------------------------------------------------------------------------
class WorkerState(_Name):
    """States of a worker process, as it sees itself."""

    STARTING = enum.auto()
    WAITING = enum.auto()  # at its index queue
    FETCHING = enum.auto()
    EXHAUSTED = enum.auto()  # its iterable dataset has ended; waits for the sentinel or for a new epoch
    ENDED = enum.auto()


class WorkerEvent(_Name):
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
class PinState(_Name):
    """States of the pin thread."""

    STARTING = enum.auto()
    WAITING = enum.auto()  # at the result queue
    PINNING = enum.auto()
    PUTTING = enum.auto()  # at the queue that the loader reads
    ENDED = enum.auto()


class PinEvent(_Name):
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


# --- A slab -----------------------------------------------------------------------------------------------------------
class SlabState(_Name):
    """States of one slab of a worker (transport "arena"), as both processes together see it."""

    FREE = enum.auto()  # no process can see what is in it
    WRITING = enum.auto()  # the worker makes a batch in it
    SENT = enum.auto()  # the message that names it is on its way
    VISIBLE = enum.auto()  # something in the reader's process refers to its batch
    GIVEN_UP = enum.auto()  # a forked child may see its batch, or its descriptor did not arrive


class SlabEvent(_Name):
    """Events of a slab. The worker makes, takes and sends; the reader does the rest."""

    MAKE = enum.auto()  # new memory under this number
    TAKE = enum.auto()  # the memory that is there
    SEND = enum.auto()
    MAP = enum.auto()
    FREE = enum.auto()
    DROP = enum.auto()  # its message could not be rebuilt
    KEEP = enum.auto()  # a child was forked
    LOSE = enum.auto()  # its descriptor did not arrive


_S, _SE = SlabState, SlabEvent
SLAB_TABLE: Mapping[SlabState, Mapping[SlabEvent, SlabState]] = {
    _S.FREE: {_SE.TAKE: _S.WRITING, _SE.MAKE: _S.WRITING},
    _S.WRITING: {_SE.SEND: _S.SENT},
    _S.SENT: {_SE.MAP: _S.VISIBLE, _SE.DROP: _S.FREE, _SE.KEEP: _S.GIVEN_UP, _SE.LOSE: _S.GIVEN_UP},
    _S.VISIBLE: {_SE.FREE: _S.FREE, _SE.KEEP: _S.GIVEN_UP},
    _S.GIVEN_UP: {_SE.MAKE: _S.WRITING},
}


class SlabLifecycle(Lifecycle[SlabState, SlabEvent]):
    """The lifecycle of one slab: written only while no process can see it. Not in torch."""

    def __init__(self, worker_id: int, number: int) -> None:
        super().__init__(f"slab {number} of worker {worker_id}", SlabState.FREE, SLAB_TABLE)


# --- Joint rules: what one actor may do depends on the others ---------------------------------------------------------
class Role(_Name):
    """The kinds of actor."""

    LOADER = "loader"
    WORKER = "worker"
    PIN_THREAD = "pin thread"


class Act(_Name):
    """A step of one actor that is allowed only in some joint states. The value continues "the loader ..."."""

    GET_RESULT = "waits for a result"
    BEGIN_EPOCH = "begins an epoch"
    SEND_TASK = "sends a worker a task"
    SET_PIN_DONE = "sets the pin thread's done event"
    WAKE_PIN = "sends the pin thread's sentinel"
    JOIN_PIN = "joins the pin thread"
    SET_WORKERS_DONE = "sets the workers' done event"
    SEND_SENTINEL = "sends a worker its sentinel"
    JOIN_WORKER = "joins a worker"
    TERMINATE = "sends a worker SIGTERM"
    KILL = "sends a worker SIGKILL"
    CLOSE = "ends the shutdown"
    GET_TASK = "waits for a task"
    FETCH = "fetches a task"
    SKIP = "skips a task"
    LEAVE = "leaves for its sentinel"
    LEAVE_ORPHANED = "leaves without a sentinel"
    GET_MESSAGE = "waits for a message"
    PUT_READY = "puts a batch into the ready queue"
    END = "ends its loop"


class Fact(_Name):
    """A part of the joint state. "its" is about the worker that acts or is acted on."""

    BOUNDED = "the wait has a timeout"
    FIRST_EPOCH = "it is the first epoch"
    RESUMED = "it has acknowledged the new epoch"
    NO_PIN_THREAD = "there is no pin thread"
    PIN_DONE = "the pin thread's done event is set"
    PIN_NOT_DONE = "the pin thread's done event is not set"
    PIN_WOKEN = "the pin thread's sentinel is sent"
    PIN_JOINED = "the join of the pin thread is over"
    WORKERS_DONE = "the workers' done event is set"
    WORKERS_NOT_DONE = "the workers' done event is not set"
    UNTOLD = "its sentinel is not sent"
    TOLD = "its sentinel is sent"
    WAITING = "it waits at its index queue"
    EXHAUSTED = "its dataset has ended"
    DEAD = "it is known to be dead"
    JOINED = "its join is over"
    TERMINATED = "it was sent SIGTERM"
    KILLED = "it was sent SIGKILL"
    CUT_SHORT = "an exception has cut the shutdown short"
    LOADER_DEAD = "its loader's process is gone"


@dataclass(frozen=True)
class JointRule:
    """One row: `who` may do `act` only if one of the facts in `requires` holds; without facts, always.

    If an act has several rows, all must allow it. name: the one in `minidl check`. why: what goes wrong otherwise.
    article: the section that explains it; upstream: "module:function" of torch that keeps it, "" if none does.
    guards: the guards of `explore.guards` that keep it here.
    """

    name: str
    who: Role
    act: Act
    requires: tuple[Fact, ...]
    why: str
    article: str = "4 §shutdown"
    upstream: str = "dataloader:_shutdown_workers"
    guards: tuple[str, ...] = ()

    @property
    def condition(self) -> str:
        """What is required, in words."""
        return " or ".join(fact.value for fact in self.requires)

    @property
    def demand(self) -> str:
        """The rule as a sentence without its full stop."""
        return f"the {self.who.value} {self.act.value} " + (f"only if {self.condition}" if self.requires else "always")


_R, _D, _F = Role, Act, Fact
_FETCHING = "dataloader:_try_get_data"
_LOOP, _PIN_LOOP = "_utils.worker:_worker_loop", "_utils.pin_memory:_pin_memory_loop"
JOINT_RULES = (
    # Every wait for another actor is bounded; the joins are below.
    JointRule("bounded", _R.LOADER, _D.GET_RESULT, (_F.BOUNDED,),
              "a worker that dies while the loader waits for it would block the loader forever",
              "4 §shutdown", _FETCHING, ("get-timeout-loader",)),
    JointRule("bounded", _R.WORKER, _D.GET_TASK, (_F.BOUNDED,),
              "a worker whose loader is gone would wait forever for a task", "4 §shutdown", _LOOP,
              ("get-timeout-worker",)),
    JointRule("bounded", _R.PIN_THREAD, _D.GET_MESSAGE, (_F.BOUNDED,),
              "a pin thread that no message can reach would not see its done event", "4 §shutdown", _PIN_LOOP,
              ("get-timeout-pin",)),
    # An epoch begins when every persistent worker has dropped the last one.
    JointRule("resume", _R.LOADER, _D.BEGIN_EPOCH, (_F.FIRST_EPOCH, _F.RESUMED),
              "samples of the old epoch may be yielded in the new one", "1 §2.4.3", "dataloader:_reset"),
    JointRule("told-to-leave", _R.LOADER, _D.SEND_TASK, (_F.UNTOLD,),
              "the worker would never answer, and the loader would wait for it", "1 §2.4.4",
              "dataloader:_try_put_index"),
    # Batches. A worker's rows say the same as WORKER_TABLE; a test compares the two.
    JointRule("lifecycle", _R.WORKER, _D.FETCH, (_F.WAITING,),
              "the fetcher of an exhausted worker has no samples", "1 §2.4.5", _LOOP),
    JointRule("lifecycle", _R.WORKER, _D.FETCH, (_F.WORKERS_NOT_DONE,),
              "after the done event no actor reads results", "1 §2.4.5", _LOOP),
    JointRule("lifecycle", _R.PIN_THREAD, _D.PUT_READY, (_F.PIN_NOT_DONE,),
              "after the done event no actor reads batches", "1 §2.4.6", _PIN_LOOP),
    # Shutdown, step 1: the pin thread.
    JointRule("pin-first", _R.LOADER, _D.SET_PIN_DONE, (), "the pin thread skips what is in flight"),
    JointRule("pin-first", _R.LOADER, _D.WAKE_PIN, (_F.PIN_DONE,),
              "a pin thread that is woken before would go on waiting", guards=("pin-done-event",)),
    JointRule("pin-end", _R.PIN_THREAD, _D.END, (_F.PIN_DONE,),
              "batches would be left in the result queue, and the loader would wait for them", "1 §2.4.6", _PIN_LOOP),
    JointRule("pin-first", _R.LOADER, _D.JOIN_PIN, (_F.PIN_DONE,),
              "the pin thread ends only after its done event: the join would last until its timeout",
              guards=("pin-done-event",)),
    JointRule("pin-first", _R.LOADER, _D.JOIN_PIN, (_F.PIN_WOKEN,),
              "a pin thread that waits for a message does not see its done event before its timeout",
              guards=("pin-sentinel",)),
    JointRule("bounded", _R.LOADER, _D.JOIN_PIN, (_F.BOUNDED,),
              "a pin thread that is stuck in a user's pin_memory() would block the loader forever", upstream="",
              guards=("bounded-pin-join",)),
    # Shutdown, step 2: the workers.
    JointRule("pin-first", _R.LOADER, _D.SET_WORKERS_DONE, (_F.NO_PIN_THREAD, _F.PIN_JOINED),
              "a worker that leaves in the middle of a message leaves the pin thread reading it forever",
              guards=("pin-first",)),
    JointRule("pin-first", _R.LOADER, _D.SEND_SENTINEL, (_F.NO_PIN_THREAD, _F.PIN_JOINED, _F.EXHAUSTED, _F.DEAD),
              "a worker that leaves in the middle of a message leaves the pin thread reading it forever",
              guards=("pin-first",)),
    JointRule("done-first", _R.LOADER, _D.SEND_SENTINEL, (_F.WORKERS_DONE, _F.EXHAUSTED, _F.DEAD),
              "a worker would leave while it has tasks, and the loader would wait for their batches",
              upstream="dataloader:_mark_worker_as_unavailable", guards=("done-event",)),
    JointRule("done-first", _R.WORKER, _D.SKIP, (_F.WORKERS_DONE, _F.EXHAUSTED),
              "the task's batch would be lost, and the loader would wait for it", "1 §2.4.5", _LOOP),
    JointRule("done-first", _R.WORKER, _D.LEAVE, (_F.WORKERS_DONE, _F.EXHAUSTED),
              "tasks that wait behind the sentinel would be lost", "1 §2.4.5", _LOOP),
    JointRule("messages", _R.WORKER, _D.LEAVE, (_F.TOLD,),
              "the worker would leave on a message that no actor sent", "1 §2.4.5", _LOOP),
    JointRule("explained", _R.WORKER, _D.LEAVE_ORPHANED, (_F.LOADER_DEAD,),
              "only an orphan leaves without a sentinel, and it may do so in any state", "4 §shutdown", _LOOP),
    # Shutdown, step 3: joins.
    JointRule("told-first", _R.LOADER, _D.JOIN_WORKER, (_F.TOLD, _F.TERMINATED, _F.KILLED, _F.DEAD),
              "the loader would wait for a worker that waits for a task: the join would last until its timeout",
              guards=("sentinel", "none-after-exhaustion")),
    JointRule("bounded", _R.LOADER, _D.JOIN_WORKER, (_F.BOUNDED,),
              "a worker that is stuck in its dataset would block the loader forever", guards=("bounded-joins",)),
    # Shutdown, step 4: workers that did not end.
    JointRule("join-first", _R.LOADER, _D.TERMINATE, (_F.JOINED, _F.CUT_SHORT),
              "a worker that is terminated while it could still leave may lose shared memory"),
    JointRule("join-first", _R.LOADER, _D.KILL, (_F.TERMINATED,),
              "a killed worker can't run its cleanup; SIGTERM lets it", upstream="", guards=("kill-at-last",)),
    JointRule("leftovers", _R.LOADER, _D.CLOSE, (_F.KILLED, _F.DEAD),
              "a worker would outlive its loader", upstream="", guards=("kill-at-last",)),
    JointRule("leftovers", _R.LOADER, _D.CLOSE, (_F.NO_PIN_THREAD, _F.PIN_DONE),
              "the pin thread would outlive its loader", upstream="", guards=("pin-told-at-last",)),
)  # fmt: skip
"""What couples the actors, in the order of a loader's life."""

MAKES: Mapping[Act, Fact] = {
    _D.SET_PIN_DONE: _F.PIN_DONE,
    _D.WAKE_PIN: _F.PIN_WOKEN,
    _D.JOIN_PIN: _F.PIN_JOINED,
    _D.SET_WORKERS_DONE: _F.WORKERS_DONE,
    _D.SEND_SENTINEL: _F.TOLD,
    _D.JOIN_WORKER: _F.JOINED,
    _D.TERMINATE: _F.TERMINATED,
    _D.KILL: _F.KILLED,
}
"""The fact that holds once an act is done."""

RULES_OF: Mapping[Act, tuple[JointRule, ...]] = {
    act: tuple(rule for rule in JOINT_RULES if rule.act is act) for act in Act
}
"""The rows of each act."""


class JointState:
    """The facts that hold between the actors of one loader, each about one worker or (worker -1) about all of them."""

    def __init__(self, *facts: Fact) -> None:
        self._facts = {(fact, -1) for fact in facts}

    def holds(self, fact: Fact, worker: int = -1) -> bool:
        """Whether `fact` holds; for a worker, also if it holds for all."""
        return (fact, -1) in self._facts or (fact, worker) in self._facts

    def add(self, fact: Fact, worker: int = -1) -> None:
        """Let `fact` hold from now on."""
        self._facts.add((fact, worker))

    def remove(self, fact: Fact, worker: int = -1) -> None:
        """Let `fact` hold no longer."""
        self._facts.discard((fact, worker))

    def broken(self, act: Act, worker: int = -1) -> Iterator[JointRule]:
        """The rows that forbid `act` now."""
        for rule in RULES_OF[act]:
            if rule.requires and not any(self.holds(fact, worker) for fact in rule.requires):
                yield rule

    def do(self, who: Role, act: Act, worker: int = -1) -> None:
        """Let `who` do `act`, which concerns `worker`; raises ProtocolError if a row forbids it or if there is none."""
        name = f"worker {worker}" if who is Role.WORKER else who.value
        if all(rule.who is not who for rule in RULES_OF[act]):
            raise ProtocolError(f"{name}: {act.name} is impossible: no joint rule lets a {who.value} do it")
        for rule in self.broken(act, worker):
            raise ProtocolError(
                f"{name}: {act.name} is impossible: it requires that {rule.condition}; "
                f"now {self.describe(worker)}; otherwise {rule.why} (rule {rule.name}, article {rule.article})"
            )
        if act in MAKES:
            self.add(MAKES[act], worker)

    def describe(self, worker: int = -1) -> str:
        """What holds for `worker`, in words."""
        return ", ".join(fact.value for fact in Fact if self.holds(fact, worker)) or "nothing holds"
