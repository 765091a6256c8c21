"""The state of a whole run: loader, workers, pin thread, and everything between them, as one hashable tuple.

`World(state)` is a state laid open to be changed, `freeze()` closes it again. Messages are small integers. What is
decided is not kept here: it is asked of the live loader's own classes, see `decisions`.

A message that is half written is TORN in its pipe, and so it stays if its writer dies. The lock of the result queue
says which actor holds it, and how far that actor is.
"""

from __future__ import annotations

import operator
from typing import Any, Final, NamedTuple

from minidl.loader.protocol import PinState, WorkerState

State = tuple[Any, ...]
"""A frozen World."""

# --- What is in an index queue: a task's number, or one of these ------------------------------------------------------
SENTINEL: Final = -1
TORN: Final = -2
"""The first part of a message, of which the rest may or may not follow. In either kind of queue, always the last."""
LEFTOVER: Final = -3
"""A message to a worker that is gone: it only takes up room."""
_RESUME: Final = -10


def resume(epoch: int) -> int:
    """The message that begins epoch number `epoch`."""
    return _RESUME - epoch


def resumed(message: int) -> int:
    """The epoch that an index queue's message begins; negative if it begins none."""
    return _RESUME - message


def named(message: int) -> str:
    """An index queue's message in words."""
    return f"task {message}" if message >= 0 else "the sentinel" if message == SENTINEL else "the new epoch's message"


# --- What is in the result queue: what, of which worker, for which task (or epoch) ------------------------------------
DATA, EXHAUSTED, ACK, WAKE, FAILED = range(5)


def result(kind: int, task: int, worker: int) -> int:
    """A message to the loader; `task` is the epoch in an ACK. WAKE is the pin thread's sentinel.

    FAILED: the exception that has ended a worker thread in the task.
    """
    return kind | worker << 3 | task << 9


def parts(message: int) -> tuple[int, int, int]:
    """Kind, task and worker of such a message."""
    return message & 7, message >> 9, message >> 3 & 63


# --- The lock that writers of the result queue share ------------------------------------------------------------------
FREE: Final = -1
DEAD_LOCK: Final = -2
"""Its holder is dead. From 0: its holder, a worker or the loader's own feeder thread; added to it, how far that is."""
LOADERS_LOCK: Final = 7
WRITTEN, TAKEN, HALF_WRITTEN = 0, 10, 20

# --- Where actors are -------------------------------------------------------------------------------------------------
RUNNING, FETCHING, LEFT, JOINING, STUCK, BLOCKED, STOPPED, GONE = (
    "running", "fetches", "has left its loop", "joins its feeder", "stuck in its dataset", "blocked", "stopped", "gone",
)  # fmt: skip
SLEEPS, DYING = "in a long sample", "dying of an exception"
"""Where only a worker thread is: a sample that comes once the loader is closed; no longer alive, and not ended yet."""


class Worker(NamedTuple):
    """A worker: its lifecycle's state, where it is, results not yet written, its stream's rest, exit code, and task."""

    life: WorkerState
    place: str
    out: tuple[int, ...]
    left: int
    code: int
    task: int = -1


class Pin(NamedTuple):
    """The pin thread: its lifecycle's state, and whether it waits in a `get` or in a read that nothing can end."""

    life: PinState
    place: str


NEW, IDLE, GETTING, RESUMING, CLOSED, EXITING, FINALISING, ENDED, KILLED, READING = (
    "new", "with the user", "waits for a result", "waits for the workers to resume", "closed", "exits", "finalises",
    "ended", "killed", "blocked in a torn message",
)  # fmt: skip
STOP_PIN, JOIN_PIN, TELL_WORKERS, SEND_SENTINELS, JOIN_WORKERS, TERMINATE, JOIN_LEFT = (
    "stops the pin thread", "joins the pin thread", "sets the workers' done event", "sends the sentinels",
    "joins the workers", "terminates the workers that are left", "joins the threads that are left",
)  # fmt: skip
JOIN_CHILDREN, JOIN_FEEDERS = "joins its children", "joins its feeders"
LEAVES, GIVEN_UP = "with the user, who leaves the epoch", "out of its shutdown, which was interrupted twice"
OVER: Final = (ENDED, KILLED)


_FIELDS = (
    "phase", "decisions", "drawn", "handed", "unsent", "index", "crew", "results",
    "lock", "wake", "ready", "pin", "pin_told", "done", "event_dead", "frozen", "signalled", "crashed",
    "ctrl_c", "patience", "second", "let_go", "fault",
)  # fmt: skip
_FROZEN = operator.attrgetter(*_FIELDS)


class World:
    """A state that may be changed. See `minidl.loader.iterators` for what the loader's fields stand for."""

    __slots__ = _FIELDS

    phase: str  # where the loader is
    decisions: Any  # `decisions.Decided`: the driver's state; None once the loader is killed
    drawn: int  # indices that the sampler has given
    handed: tuple[int, ...]  # tasks handed out in this epoch
    unsent: tuple[tuple[int, ...], ...]  # what the index queues' feeder threads have still to write
    index: tuple[tuple[int, ...], ...]  # what is in each index queue's pipe
    crew: tuple[Worker, ...]
    results: tuple[int, ...]  # the result pipe
    lock: int
    wake: bool  # the loader's feeder still has the pin thread's sentinel
    ready: tuple[int, ...]  # the pin thread's output
    pin: Pin | None
    pin_told: bool
    done: bool
    event_dead: bool  # the lock of the workers' done event is held by a dead process
    frozen: int | None  # the index queue whose lock a stopped feeder holds, -1 for none; None while Python still runs
    signalled: bool  # SIGCHLD has come, and its handler is about to raise
    crashed: bool  # the one crash of a run has been
    ctrl_c: int  # that may still come
    patience: int  # errors after which the program still goes on
    second: bool  # the shutdown was interrupted, and is at its leftovers
    let_go: bool  # Python's exit does not wait for the feeder thread of the pin thread's sentinel
    fault: str  # what has gone wrong, in words

    def __init__(self, state: State) -> None:
        (
            self.phase, self.decisions, self.drawn, self.handed, self.unsent, self.index, self.crew, self.results,
            self.lock, self.wake, self.ready, self.pin, self.pin_told,
            self.done, self.event_dead, self.frozen, self.signalled, self.crashed,
            self.ctrl_c, self.patience, self.second, self.let_go, self.fault,
        ) = state  # fmt: skip

    def freeze(self) -> State:
        """The state."""
        state: State = _FROZEN(self)
        return state

    def worker(self, number: int, **changes: Any) -> None:
        """Change one worker."""
        crew = self.crew
        self.crew = (*crew[:number], crew[number]._replace(**changes), *crew[number + 1 :])

    def queue(self, number: int, messages: tuple[int, ...]) -> None:
        """Replace what is in one index queue's pipe."""
        self.index = (*self.index[:number], messages, *self.index[number + 1 :])

    def buffer(self, number: int, messages: tuple[int, ...]) -> None:
        """Replace what an index queue's feeder has still to write."""
        self.unsent = (*self.unsent[:number], messages, *self.unsent[number + 1 :])

    def end(self, number: int, code: int, room: int) -> None:
        """A worker's process ends; what is in its queue only takes up room, and more than fills it is not counted."""
        worker = self.crew[number]
        life = WorkerState.ENDED if code == 0 else worker.life
        self.worker(number, place=GONE, out=(), left=0, code=code, life=life, task=-1)
        waiting = len(self.index[number]) + len(self.unsent[number])
        self.queue(number, (LEFTOVER,) * min(waiting, room + 1))
        self.buffer(number, ())

    @property
    def dead(self) -> tuple[tuple[int, int], ...]:
        """The workers that are not alive, each with its exit code."""
        return tuple((number, one.code) for number, one in enumerate(self.crew) if one.place in (GONE, DYING))

    @property
    def all_gone(self) -> bool:
        """Whether every worker is gone."""
        return all(worker.place == GONE for worker in self.crew)


PHASE, DECISIONS, INDEX, CREW, RESULTS, LOCK, READY, DONE, SIGNALLED, CRASHED, CTRL_C, FAULT = map(_FIELDS.index, (
    "phase", "decisions", "index", "crew", "results", "lock", "ready", "done",
    "signalled", "crashed", "ctrl_c", "fault",
))  # fmt: skip
"""Places in a State."""
