"""Shared by the parts of the model: steps, how they are offered, and the events that stand for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from minidl.check.joint_rules import MAKES, RULES_OF, Act, Fact
from minidl.explore import world as at
from minidl.explore.configurations import Configuration
from minidl.explore.guards import GUARDS, Protocol
from minidl.explore.world import State, World
from minidl.loader.protocol import LoaderState
from minidl.tracefile import events as ev
from minidl.tracefile.events import Message, Outcome, QueueId

Label = tuple[str, str, int]
"""Who takes the step, what it does, and with which worker, task or variant (-1 = none)."""

Step = tuple[Label, State]
Say = Callable[..., None]

MAIN: Final = (-1, 0)
"""Process and thread of an event: the loader's main thread. A worker's process has the worker's number."""
PIN_THREAD: Final = (-1, 1)
WAKER: Final = (-1, 2)

KILLED, FAILED = -9, 1
TAKES_LOCK: Final = "takes the lock"
POLL, JOIN_OVER = "poll", "join over"
RAN_OUT: Final = (POLL, JOIN_OVER)
"""Steps that a run without a crash must not need."""


def index_feeder(worker: int) -> tuple[int, int]:
    """The loader's thread that writes to a worker."""
    return (-1, 3 + worker)


def result_feeder(worker: int) -> tuple[int, int]:
    """A worker's thread that writes its results."""
    return (worker, 1)


HOW_FAR: Final = {
    at.WRITTEN: ", its feeder in the result queue's lock",
    at.TAKEN: ", its feeder in the result queue's lock",
    at.HALF_WRITTEN: ", its feeder in the middle of a message",
}


INTERRUPTIBLE: Final = (at.NEW, at.IDLE, at.GETTING, at.RESUMING, at.READING)
SHUTTING_DOWN: Final = (at.STOP_PIN, at.JOIN_PIN, at.TELL_WORKERS, at.SEND_SENTINELS, at.JOIN_WORKERS, at.JOIN_LEFT)


def silent(*event: Any) -> None:
    """Ignore an event."""


_HOLDS: Final[dict[Fact, Callable[[World, int], bool]]] = {
    Fact.NO_PIN_THREAD: lambda w, _: w.pin is None,
    Fact.PIN_DONE: lambda w, _: w.pin_told,
    Fact.PIN_JOINED: lambda w, _: w.decisions.life is not LoaderState.STOPPING_PIN,
    Fact.WORKERS_DONE: lambda w, _: w.done,
    Fact.UNTOLD: lambda w, worker: not w.decisions.told[worker],
    Fact.TOLD: lambda w, worker: w.decisions.told[worker],
    Fact.EXHAUSTED: lambda w, worker: not w.decisions.workers_status[worker],
    Fact.DEAD: lambda w, worker: w.crew[worker].place in (at.GONE, at.DYING),
    Fact.JOINED: lambda w, _: w.decisions.life is LoaderState.TERMINATING,
    Fact.CUT_SHORT: lambda w, _: w.decisions.closed and w.decisions.life is not LoaderState.TERMINATING,
}
"""Facts of the joint rules that a state tells."""


class Acting:
    """A part of the model: one configuration under one protocol.

    `reduced` merges steps that only one actor can tell apart, see `model`. `say`, if it is set, gets the events that
    a step stands for: their process and thread, and the arguments of `Recorder.emit` without the loader.
    """

    def __init__(self, configuration: Configuration, protocol: Protocol, *, reduced: bool = False) -> None:
        self.configuration = configuration
        self.protocol = protocol
        self.reduced = reduced
        self.say: Say = silent
        self.made: set[tuple[Fact, int]] = set()  # facts that the acts of this step have made
        self._rules = {
            act: tuple(
                rule for rule in rules
                if rule.requires and all(getattr(protocol, GUARDS[guard].field) for guard in rule.guards)
            )
            for act, rules in RULES_OF.items()
        }  # fmt: skip

    def _do(self, w: World, act: Act, worker: int = -1, *facts: Fact) -> None:
        """Do an act. What the joint rules forbid, of those whose guards are there, is a fault of the run."""
        for rule in self._rules[act]:
            for fact in rule.requires:
                if fact in facts or (fact, worker) in self.made or (fact in _HOLDS and _HOLDS[fact](w, worker)):
                    break
            else:
                w.fault = f"the {rule.who.value} {act.value}, which requires that {rule.condition}; else {rule.why}"
        if act in MAKES:
            self.made.add((MAKES[act], worker))

    def _took(self, out: list[Step], world: World, who: str, what: str, which: int = -1) -> None:
        self.made.clear()
        out.append(((who, what, which), world.freeze()))

    def _share(self, worker: int) -> int:
        return 0 if self.configuration.streams is None else self.configuration.streams[worker]

    def _may_write(self, w: World) -> bool:
        free = w.lock != at.DEAD_LOCK if self.reduced else w.lock == at.FREE
        return free and len(w.results) < self.configuration.result_room

    def _say_read(self, thread: tuple[int, int], kind: int, task: int, worker: int) -> None:
        self.say(thread, ev.RESULT_READ, -1, -1, 64)
        if kind in (at.DATA, at.EXHAUSTED):
            self.say(thread, ev.RESULT_REBUILD[0], task, worker, 64)
            self.say(thread, ev.RESULT_REBUILD[1], task, worker, 0, 0)

    def _say_got(self, thread: tuple[int, int], code: int, kind: int, task: int, worker: int) -> None:
        if kind == at.ACK:
            self.say(thread, code, -1, worker, Message.RESUME)
        elif kind == at.WAKE:
            self.say(thread, code, -1, -1, Message.SENTINEL)
            self.say(thread, ev.SENTINEL_GET, -1, -1, QueueId.RESULT)
        else:
            outcome = Outcome.EXHAUSTED if kind == at.EXHAUSTED else Outcome.DATA
            self.say(thread, code, task, worker, Message.RESULT, outcome)
