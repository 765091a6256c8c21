"""Rules that couple the actors: the rows of `JOINT_RULES`, applied to the acts in a trace.

`_Trace` translates events to acts and facts, and applies the rows; each rule here consists of the rows of its name.
Three rules add checks that need a trace: an actor that ended without an event, a count of remaining workers.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Final

import numpy as np

from minidl.check.joint_rules import MAKES, Act, Fact, JointState
from minidl.check.view import LoaderView, Violation, rule
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Positions
from minidl.tracefile.events import Actor, DoneEvent, Ending, Message, QueueId

_ACTS: Final[dict[tuple[int, int], Act]] = {
    (ev.DONE_EVENT_SET, DoneEvent.PIN_THREAD): Act.SET_PIN_DONE,
    (ev.DONE_EVENT_SET, DoneEvent.WORKERS): Act.SET_WORKERS_DONE,
    (ev.SENTINEL_PUT, QueueId.RESULT): Act.WAKE_PIN,
    (ev.SENTINEL_PUT, QueueId.INDEX): Act.SEND_SENTINEL,
    (ev.JOIN[0], Actor.PIN_THREAD): Act.JOIN_PIN,
    (ev.JOIN[0], Actor.WORKER): Act.JOIN_WORKER,
    (ev.DONE_EVENT_SEEN, DoneEvent.WORKERS): Act.SKIP,
    (ev.SENTINEL_GET, QueueId.INDEX): Act.LEAVE,
    (ev.WORKER_EXIT, Ending.ORPHANED): Act.LEAVE_ORPHANED,
    (ev.PIN_EXIT, Ending.SENTINEL): Act.END,
}
"""Event code and x -> the act that it tells."""

_TELLS: Final[dict[tuple[int, int | None], Fact]] = {
    **{told: MAKES[act] for told, act in _ACTS.items() if act in MAKES and told[0] != ev.JOIN[0]},
    (ev.JOIN[1], Actor.PIN_THREAD): Fact.PIN_JOINED,
    (ev.JOIN[1], Actor.WORKER): Fact.JOINED,
    (ev.FOUND_DEAD, Actor.WORKER): Fact.DEAD,
    (ev.FOUND_DEAD, Actor.LOADER): Fact.LOADER_DEAD,
    (ev.RESULT_GET[1], Message.RESUME): Fact.RESUMED,
    (ev.READY_GET[1], Message.RESUME): Fact.RESUMED,
    (ev.WORKER_EXHAUSTED, None): Fact.EXHAUSTED,
    (ev.WORKER_GONE, None): Fact.DEAD,
}
"""Event code and x (None: whatever it is) -> the fact that it tells of its worker."""

_MISSING: Final = {
    Fact.RESUMED: "resume_ack of worker {}",
    Fact.PIN_DONE: "done_event_set of the pin thread",
    Fact.PIN_WOKEN: "sentinel_put into the result queue",
    Fact.PIN_JOINED: "join end of the pin thread",
    Fact.WORKERS_DONE: "done_event_set of the workers",
    Fact.TOLD: "sentinel_put for worker {}",
    Fact.JOINED: "join end of worker {}",
    Fact.KILLED: "terminate of worker {} by SIGKILL",
    Fact.TERMINATED: "terminate of worker {} by SIGTERM",
    Fact.LOADER_DEAD: "found_dead",
}
"""The event that would have told a fact."""

_READ: Final = (
    *(ev.EPOCH[0], ev.RESUME_PUT, ev.QUEUE_CLOSE, *ev.SHUTDOWN, ev.TERMINATE),
    *dict.fromkeys(code for code, _ in [*_ACTS, *_TELLS] if code not in (ev.RESULT_GET[1], ev.READY_GET[1])),
)


class _Trace:
    """Follows the acts of one loader. `breaches(name)` gives what breaks the rows of one name."""

    def __init__(self, loader: LoaderView) -> None:
        self.loader = loader
        # A trace tells the timeout of a get, but not whether a join has one; an interrupted shutdown is not told.
        self.state = JointState(Fact.BOUNDED, Fact.FIRST_EPOCH, Fact.CUT_SHORT)
        if not loader.pinned:
            self.state.add(Fact.NO_PIN_THREAD)
        self.threads = loader.params.get("transport") == "thread"
        if self.threads:  # between them no message is torn: the pin thread may run on
            self.state.add(Fact.PIN_JOINED)
        self.workers = range(loader.capacity[0] if loader.capacity else 0)
        self.started: dict[int, int] = {}
        for row in loader.pick(ev.WORKER_START[1]):
            if loader.x[row] > 0:
                self.started.setdefault(int(loader.worker[row]), int(row))
        self.shutting_down = False

    def breaches(self, name: str) -> Iterator[Violation]:
        """Yield an event's breaches, and then let it happen."""
        loader = self.loader
        rows = np.union1d(loader.pick(*_READ), loader.about(loader.received, Message.RESUME))
        for row in rows.tolist():
            for act, worker, *shown in self._acts(row):
                for broken in self.state.broken(act, worker):
                    if broken.name == name:
                        missing = next((_MISSING[fact] for fact in broken.requires if fact in _MISSING), "")
                        about = f"worker {worker}: " if act in (Act.CLOSE, Act.BEGIN_EPOCH) and worker >= 0 else ""
                        reason = f"{about}it requires that {broken.condition}"
                        yield loader.broken(reason, row, *shown, missing=missing.format(worker))
            self._happens(row)

    def _acts(self, row: int) -> Iterator[tuple[Act, int] | tuple[Act, int, int]]:
        """The acts that an event tells, each with the worker that it concerns and, perhaps, a row to show beside it."""
        loader = self.loader
        code, x, worker = int(loader.code[row]), int(loader.x[row]), int(loader.worker[row])
        act = _ACTS.get((code, x))
        if act is not None and (act is not Act.JOIN_WORKER or self.shutting_down):  # before, a dying one is waited for
            yield act, worker
        elif code == ev.TERMINATE and self.shutting_down and not loader.lacks.partial:
            yield (Act.KILL if loader.y[row] == signal.SIGKILL else Act.TERMINATE), worker
        elif code == ev.EPOCH[0]:
            yield from ((Act.BEGIN_EPOCH, worker) for worker in self.workers)
        elif code == ev.SHUTDOWN[1]:
            yield from ((Act.CLOSE, worker, at) for worker, at in self.started.items() if at < row)

    def _happens(self, row: int) -> None:
        """Take over the facts that an event tells."""
        loader, state = self.loader, self.state
        code, x, worker = int(loader.code[row]), int(loader.x[row]), int(loader.worker[row])
        for key in ((code, x), (code, None)):
            if key in _TELLS:
                state.add(_TELLS[key], worker)
        if self.threads and (code, x) == (ev.JOIN[1], Actor.WORKER) and state.holds(Fact.TOLD, worker):
            state.add(Fact.KILLED, worker)  # a thread can't be: this is all that can be done
        if code == ev.EPOCH[0]:
            for fact in (Fact.FIRST_EPOCH, Fact.RESUMED):
                state.remove(fact)
        elif code == ev.RESUME_PUT:
            state.remove(Fact.EXHAUSTED, worker)
        elif (code, x) == (ev.QUEUE_CLOSE, QueueId.INDEX):  # after the joins
            state.remove(Fact.CUT_SHORT)
        elif code == ev.TERMINATE:
            killed = loader.y[row] == signal.SIGKILL or loader.lacks.partial
            state.add(Fact.KILLED if killed else Fact.TERMINATED, worker)
        self.shutting_down |= code == ev.SHUTDOWN[0]


@rule(
    "resume",
    "a persistent loader's next epoch begins only when every worker has answered that it has dropped the old one",
    "Samples of the old epoch may be yielded in the new one.",
)
def resume(loader: LoaderView) -> Iterator[Violation]:
    if loader.capacity is not None and loader.records(loader.received):
        yield from _Trace(loader).breaches("resume")


@rule(
    "pin-first",
    "the pin thread is told to stop, woken and joined before the workers are told to leave",
    "If a worker leaves in the middle of a message, the pin thread reads forever and the exit hangs.",
)
def pin_first(loader: LoaderView) -> Iterator[Violation]:
    if not loader.pinned or not loader.records(ev.SENTINEL_PUT):
        return
    yield from _Trace(loader).breaches("pin-first")
    exits, ran = loader.pick(ev.PIN_EXIT), len(loader.pick(ev.PIN_START)) > 0
    joins = loader.about(ev.JOIN[1], Actor.PIN_THREAD)
    for join in joins[loader.y[joins] == 1]:
        if ran and loader.records(ev.PIN_EXIT) and loader.complete and not np.any(exits < join):
            yield loader.broken("it has ended without an event of its end", join, missing="pin_exit")


def _rows_alone(name: str, demand: str, means: str, *codes: int, needs: str = "all") -> None:
    """Register a rule that is the rows of its name and no more. codes: the events without which it is not judged."""

    def check(loader: LoaderView) -> Iterator[Violation]:
        if loader.records(*codes):
            yield from _Trace(loader).breaches(name)

    rule(name, demand, means, needs)(check)


_rows_alone(
    "pin-end",
    "the pin thread leaves its loop only if its done event is set, or with an error",
    "Batches are left in the result queue, and the loader waits for them.",
    ev.DONE_EVENT_SET,
    needs="",
)
_rows_alone(
    "done-first",
    "a worker is told to leave, and leaves, only if the workers' done event is set, its dataset has ended, or it is "
    "dead; a task is skipped only if the done event is set",
    "A worker leaves while it has tasks: their batches are lost, and the loader waits for them.",
    ev.DONE_EVENT_SET,
)
_rows_alone(
    "told-first",
    "in a shutdown a worker is joined only after it was told to leave, was sent a signal, or is known to be dead",
    "The loader joins a worker that waits for a task: the exit lasts until the join's timeout.",
    ev.SENTINEL_PUT,
)
_rows_alone(
    "join-first",
    "a worker is sent SIGTERM only after its join, and SIGKILL only after SIGTERM, unless the shutdown is interrupted",
    "A worker that could have left by itself is terminated, and its open message is lost.",
)


@rule(
    "leftovers",
    "a worker that did not end while it was joined is terminated, and at last killed, before the shutdown ends; "
    "the shutdown counts the workers that are left",
    "A process outlives its loader.",
    needs="all",
)
def leftovers(loader: LoaderView) -> Iterator[Violation]:
    ends = loader.pick(ev.SHUTDOWN[1])
    if not len(ends) or not loader.records(ev.WORKER_START[1], ev.WORKER_GONE):
        return
    end, state = int(ends[0]), _Trace(loader)
    seen: Positions = loader.pick(ev.WORKER_GONE)
    gone = set(loader.worker[seen[seen < end]].tolist())
    there = {worker: row for worker, row in state.started.items() if row < end and worker not in gone}
    if len(there) != loader.x[end]:
        told = f"{loader.x[end]} still alive, but these workers have no end event: {sorted(there) or 'none'}"
        yield loader.broken(told, end, *there.values(), missing="worker_gone")
    yield from state.breaches("leftovers")


@rule(
    "explained",
    "every actor's end has an explanation: its own event, a signal of the loader, or its exit code",
    "A worker vanished without an event: its code ended the process (os._exit, sys.exit).",
    needs="all",
)
def explained(loader: LoaderView) -> Iterator[Violation]:
    if not loader.records(ev.WORKER_EXIT):
        return
    exits, heard = loader.pick(ev.WORKER_EXIT), loader.pick(ev.SENTINEL_GET)
    known = loader.pick(ev.WORKER_EXIT, ev.FOUND_DEAD, ev.TERMINATE)  # torch's handler of SIGTERM exits with code 0
    for row in loader.pick(ev.WORKER_GONE):
        worker = int(loader.worker[row])
        said = np.any(loader.of_worker(known, worker) < row)
        if loader.y[row] == 0 and not said and worker not in loader.lacks.absent:
            yield loader.broken(
                "exit code 0 without an event that explains it", row, missing=f"worker_exit of worker {worker}"
            )
    for row in exits[loader.x[exits] == Ending.SENTINEL]:
        if not np.any(loader.of_worker(heard, int(loader.worker[row])) < row):
            yield loader.broken("it leaves for a sentinel that it has not received", row, missing="sentinel_get")
    yield from _Trace(loader).breaches("explained")


@rule(
    "bounded",
    "every wait of the loader for a result has a timeout, so that a death is found",
    "A worker that dies while the loader waits for it would block the loader forever.",
)
def bounded(loader: LoaderView) -> Iterator[Violation]:
    state = JointState()
    rows = loader.pick(*ev.AWAITS)
    for row in rows[loader.x[rows] <= 0]:
        for broken in state.broken(Act.GET_RESULT):
            yield loader.broken(f"it requires that {broken.condition}", row)
