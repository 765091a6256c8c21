"""What couples the actors of a loader: the joint rules, each with the reason, its place in torch and in the articles.

An actor may do an act only if certain facts hold. The rules of each actor alone are the tables of `loader.protocol`.
The checker applies the rows to a trace, the explorer to each step of its model, the companion shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from minidl.loader.protocol import ProtocolError, TableKey


class Role(TableKey):
    """The kinds of actor."""

    LOADER = "loader"
    WORKER = "worker"
    PIN_THREAD = "pin thread"


class Act(TableKey):
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


class Fact(TableKey):
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
        """Let `fact` hold no longer, for this worker or (-1) for any."""
        self._facts -= {(fact, worker)} if worker >= 0 else {each for each in self._facts if each[0] is fact}

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
