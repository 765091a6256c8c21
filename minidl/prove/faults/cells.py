"""The table of faults: steps of the protocol, the faults that each is given, and what must follow.

Interface: `cells()` is the selection, `Cell.outcome` is what must follow from a cell. A cell is one fault at one step
of one kind of loader: started by fork, spawn or forkserver; with a pin thread or without; with persistent workers or
not; over a map-style or an iterable dataset.

Not every combination is run, but every pair of choices: each fault at each step meets fork and one of spawn and
forkserver, a pin thread and none, persistent workers and others, both kinds of dataset, unless the step needs one of
them. The pairs of these options all occur, too.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

WORDS: Final = "the injected fault"
"""What an injected error says."""

TRANSPORTS: Final = ("upstream", "arena", "file_system", "mini", "thread")
"""How batches cross to the loader: `DataLoader(transport=...)`, or upstream's with torch's other sharing strategy, or
upstream's in the loader on one page, `minidl.mini`; or not at all, because the workers are threads."""

OF_MINI: Final = ("start", "init", "sample", "collate", "pin", "loop", "between epochs", "use")
"""The steps that `mini` answers. As torch's loader, it has no answer to a fault within a queue, or before a worker runs
its loop; and its shutdown has no steps of its own."""

NOT_OF_MINI: Final = (
    "unpicklable", "descriptors", "maps", "file size", "shm full", "SIGSTOP", "SIGSTOP of a worker",
    "SIGKILL of the group", "loader killed while a sample hangs",
)  # fmt: skip
"""Faults in these steps that it has no answer to: what torch's queues can't send, an earlier batch of a stopped worker,
which can't be handed over, the names of semaphores that outlive all processes, a worker that hangs as an orphan."""


# --- The steps --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """about: what is going on; place: in which process; needs: the options without which a loader has no such step."""

    about: str
    place: Literal["worker", "loader"]
    faults: tuple[str, ...]
    needs: dict[str, Any] = field(default_factory=dict)


def _faults(*names: str) -> tuple[str, ...]:
    """Split at commas."""
    return tuple(name.strip() for line in names for name in line.split(","))


PINNED: Final = {"pin": True}

SHUTDOWN: Final = _faults(
    "stop pin thread, wake pin thread, join pin thread, close results",
    "set done flag, send sentinel, join workers, close tasks, forget pids, terminate, kill",
)
"""The steps of a shutdown in their order; the first four have a pin thread."""

STUCK: Final = _faults("close tasks, forget pids, terminate, kill")
"""The steps that come after the workers have left: there, workers hang in a sample, and ignore SIGTERM."""

HANGING: Final = _faults("sample hangs and ignores SIGTERM, loader killed while a sample hangs")

STEPS: Final[dict[str, Step]] = {
    "make iterator": Step("the loader makes queues and flags", "loader", _faults("shm full, descriptors")),
    "start": Step(
        "a child is forked and has done nothing yet", "worker",
        _faults("os._exit, SIGKILL, SIGSEGV, SIGSTOP"), {"method": "fork"},
    ),
    "import": Step(
        "a new interpreter unpickles its dataset, and imports", "worker",
        _faults(
            "exception, sys.exit, os._exit, SIGKILL, SIGABRT, SIGSTOP, unpicklable",
            "SIGTERM of the group, SIGKILL of the group",
        ),
        {"method": "spawn"},
    ),
    "init": Step(
        "worker_init_fn", "worker",
        _faults("exception, sys.exit, os._exit, SIGKILL, SIGTERM, SIGINT, SIGSEGV, SIGSTOP"),
    ),
    "index get": Step(
        "the worker unpickles a task", "worker",
        _faults("exception, sys.exit, SIGKILL, SIGBUS, SIGSTOP, unpicklable"), {"kind": "map"},
    ),
    "sample": Step(
        "the dataset makes a sample", "worker",
        _faults(
            "exception, sys.exit, os._exit, SIGKILL, SIGTERM, SIGINT, SIGSEGV, SIGBUS, SIGABRT, SIGSTOP, unpicklable",
            "exception of both, os._exit of both, SIGKILL of both, SIGSEGV of both",
            "SIGTERM of the group, SIGINT of the group, SIGKILL of the group",
            "shm full, file size, descriptors, maps",
        ),
    ),
    "collate": Step(
        "collate_fn", "worker", _faults("exception, sys.exit, SIGKILL, SIGABRT, SIGSTOP, unpicklable")
    ),
    "pickling": Step(
        "the feeder thread pickles a result", "worker",
        _faults("exception, sys.exit, os._exit, SIGKILL, SIGTERM, SIGSTOP"),
    ),
    "before write": Step(
        "the feeder thread holds the lock of the pipe", "worker",
        _faults("exception, os._exit, SIGKILL, SIGBUS, SIGSTOP"),
    ),
    "in write": Step(
        "half of the message is in the pipe", "worker", _faults("os._exit, SIGKILL, SIGTERM, SIGSEGV, SIGSTOP")
    ),
    "after write": Step(
        "the message is in the pipe, its lock still held", "worker",
        _faults("os._exit, SIGKILL, SIGABRT, SIGSTOP"),
    ),
    "hand-over": Step(
        "the loader asks the worker for a descriptor", "worker",
        _faults("exception, os._exit, SIGKILL, SIGSEGV, SIGSTOP"), {"transport": "upstream"},
    ),
    "pin": Step(
        "the pin thread pins a batch", "loader",
        _faults("exception, sys.exit, os._exit, SIGKILL, SIGTERM, SIGSEGV"), PINNED,
    ),
    "loop": Step(
        "the training loop has a batch", "loader",
        _faults(
            "exception, sys.exit, os._exit, SIGKILL, SIGTERM, SIGINT, SIGSEGV, SIGBUS, SIGABRT, SIGSTOP",
            "SIGKILL of a worker, SIGKILL of both, SIGSEGV of both, SIGSTOP of a worker",
            "SIGTERM of the group, SIGINT of the group, SIGKILL of the group",
            "descriptors, maps",
        ),
    ),
    "between epochs": Step(
        "persistent workers wait", "loader",
        _faults("SIGKILL of a worker, SIGTERM of a worker, SIGSEGV of a worker, SIGSTOP of a worker, SIGKILL of both"),
        {"persistent": True},
    ),
    **{
        f"shutdown: {name}": Step(
            "before this step of the shutdown", "loader",
            _faults("SIGINT, SIGKILL, SIGKILL of a worker, SIGSTOP of a worker"), PINNED if number < 4 else {},
        )
        for number, name in enumerate(SHUTDOWN)
    },
    "worker's exit": Step("a worker has left its loop", "worker", _faults("os._exit, SIGKILL, SIGSEGV, SIGSTOP")),
    "use": Step(
        "the program leaves the loader, or uses it from elsewhere", "loader",
        _faults(
            "del, break, exit with a live iterator, nested loaders, loader in a thread, forked child with the iterator",
            *HANGING,
        ),
    ),
}  # fmt: skip
"""Step -> its faults, in the order of the protocol."""

IN_A_THREAD: Final = _faults("exception, sys.exit, KeyboardInterrupt, os._exit, SIGKILL, SIGINT, hangs")
"""What user's code may do in a worker that is a thread. A signal reaches the program: SIGINT is a Ctrl-C meanwhile."""

OF_THREADS: Final[dict[str, Step]] = {
    "start": Step("the loader starts a thread", "loader", _faults("exception, SIGINT")),
    "started": Step("a thread runs that the loader has not listed", "loader", _faults("SIGINT")),
    "copy": Step("the worker copies its dataset", "worker", IN_A_THREAD),
    "init": Step("worker_init_fn", "worker", IN_A_THREAD),
    "open": Step("the dataset's __iter__", "worker", IN_A_THREAD, {"kind": "iterable"}),
    "sampler": Step("the sampler draws an index", "loader", _faults("exception, sys.exit, SIGINT"), {"kind": "map"}),
    "sample": Step(
        "the dataset makes a sample", "worker",
        IN_A_THREAD + _faults(
            "SIGTERM, SIGSEGV, SIGABRT, SIGINT while it hangs, exception of both, sys.exit of both, hangs of both",
            "descriptors, maps",
        ),
    ),
    "collate": Step("collate_fn", "worker", IN_A_THREAD),
    "pin": Step(
        "the pin thread pins a batch", "loader",
        _faults("exception, sys.exit, os._exit, SIGKILL, SIGINT, SIGSEGV, hangs"), PINNED,
    ),
    "loop": Step(
        "the training loop has a batch", "loader",
        _faults("exception, sys.exit, os._exit, SIGKILL, SIGTERM, SIGINT, SIGSEGV, SIGSTOP, descriptors, maps"),
    ),
    "between epochs": Step(
        "persistent workers wait", "loader", _faults("exception, sys.exit, SIGINT, SIGKILL"), {"persistent": True}
    ),
    **{
        f"shutdown: {name}": Step(
            "before this step of the shutdown", "loader", _faults("SIGINT, SIGKILL"), PINNED if number < 4 else {},
        )
        for number, name in enumerate(SHUTDOWN)
    },
    "use": Step(
        "the program leaves the loader, or uses it from elsewhere", "loader",
        _faults(
            "del, break, collected in a cycle, collected by a worker, nested loaders, loader in a thread",
            "exit with a live iterator, exit while a thread iterates, exit while a sample computes",
            "forked child with the iterator, forked child with a loader, forked by a worker",
            "sample hangs, exit while a sample hangs, loader killed while a sample hangs",
        ),
    ),
}  # fmt: skip
"""Step -> its faults if the workers are threads. A worker does not die by itself."""


# --- What follows -----------------------------------------------------------------------------------------------------
class Follows(enum.Enum):
    """What must follow from a fault."""

    ERROR = "task's error"
    DEATH = "worker's death"
    TIMEOUT = "timeout"
    RAISED = "raised in the loop"
    ENDED = "program ended"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Expected:
    """kind; says: a pattern of the error, "" if there must be none; code: exit code of the process that has the fault.

    must: whether the error has to come; else it may.
    """

    kind: Follows
    says: str = ""
    code: int = 0
    must: bool = True


CODES: Final = {
    "sys.exit": 3, "os._exit": 3,
    **{sign.name: -sign.value for sign in map(signal.Signals, (1, 2, 6, 7, 9, 11, 15))},
}  # fmt: skip
"""Fault -> exit code of the process that has it."""

RESOURCES: Final = {
    # torch 2.11 adds another call's errno to the first: "Success (0)"
    "shm full": r"unable to allocate shared memory|No space left on device|File too large|killed by signal: Bus error",
    "file size": r"File too large",
    "descriptors": r"Too many open files",
    "maps": r"Cannot allocate memory|killed by signal",
}
"""What is used up -> what names it."""

DIED: Final = r"exited unexpectedly|killed by signal"

TORN: Final = r"ConnectionResetError|ConnectionRefusedError|FileNotFoundError|EOFError"
"""What torch's loader, and `mini`, may say in its place: the worker died before it handed over an earlier batch."""

PIN_DIED: Final = "Pin memory thread exited unexpectedly"


@dataclass(frozen=True)
class Cell:
    """One fault at one step of one kind of loader."""

    step: str
    fault: str
    method: str = "fork"
    pin: bool = False
    persistent: bool = False
    kind: str = "map"
    transport: str = TRANSPORTS[0]
    in_order: bool = True

    def __str__(self) -> str:
        order = "" if self.in_order else "in no order"
        options = (self.method, "pin" * self.pin, "persistent" * self.persistent, order, self.kind)
        others = self.transport if self.transport not in (TRANSPORTS[0], self.method) else ""
        return ", ".join(filter(None, (self.step, self.fault, *options, others)))

    @property
    def name(self) -> str:
        """The fault, without those that have it."""
        return self.fault.partition(" of ")[0]

    @property
    def who(self) -> str:
        """Those that have the fault: "" is the process at the step; "a worker", "both" workers, "the group"."""
        return self.fault.partition(" of ")[2]

    @property
    def hangs(self) -> bool:
        """Whether the workers hang in a sample, and ignore SIGTERM, once the training loop has some batches."""
        return "sample hangs" in self.fault or self.step.removeprefix("shutdown: ") in STUCK

    @property
    def in_threads(self) -> bool:
        """Whether the workers are threads."""
        return self.transport == "thread"

    @property
    def about(self) -> Step:
        """The step's row."""
        return (OF_THREADS if self.in_threads else STEPS)[self.step]

    @property
    def in_loader(self) -> bool:
        """Whether the loader's process has the fault."""
        return self.who == "the group" or (not self.who and self.about.place == "loader")

    @property
    def outcome(self) -> Expected:
        """What must follow: derived from the fault and from the process that has it."""
        found = self._outcome()
        if self.transport == "mini":
            others = TORN if DIED in found.says else PIN_DIED if self.step == "pin" and self.name == "sys.exit" else ""
            return replace(found, says="|".join(filter(None, (found.says, others))))
        return found

    def _outcome(self) -> Expected:
        if self.step == "use":
            killed = self.fault.startswith("loader killed")
            return Expected(Follows.ENDED, code=-signal.SIGKILL) if killed else Expected(Follows.NOTHING)
        if self.name in RESOURCES:
            in_step = self.about.place == "worker"
            reused = self.transport in ("arena", "thread")  # the arena's memory is used again, and no file
            needed = not reused or self.step == "make iterator"
            return Expected(Follows.ERROR if in_step else Follows.RAISED, RESOURCES[self.name], must=needed)
        if self.in_loader:
            return self._in_loader()
        if self.step.startswith("shutdown") or self.step == "worker's exit":  # the loader needs the worker no more
            return Expected(Follows.NOTHING, DIED, must=False)
        return self._in_worker()

    def _in_loader(self) -> Expected:
        if self.name == "SIGSTOP":  # a stopped program is killed
            return Expected(Follows.ENDED, code=-signal.SIGKILL)
        if self.name == "hangs":
            return Expected(Follows.TIMEOUT, "timed out")
        if (self.step, self.name) == ("pin", "exception"):
            return Expected(Follows.ERROR, WORDS)
        if self.fault == "SIGINT of the group":  # persistent workers leave, too, and the next epoch finds that
            return Expected(Follows.RAISED, f"KeyboardInterrupt|{DIED}")
        if self.name in ("exception", "sys.exit", "SIGINT"):
            raised = {"exception": WORDS, "sys.exit": "SystemExit: 3", "SIGINT": "KeyboardInterrupt"}
            return Expected(Follows.RAISED, raised[self.name])
        return Expected(Follows.ENDED, code=CODES[self.name])

    def _in_thread(self) -> Expected:
        """Of a fault in a worker that is a thread: what would end its process ends the program."""
        if "SIGINT" in self.name:
            return Expected(Follows.RAISED, "KeyboardInterrupt")
        if self.name in ("sys.exit", "KeyboardInterrupt"):
            return Expected(Follows.DEATH, DIED, {"sys.exit": 3}.get(self.name, 1))
        if self.name in CODES:
            return Expected(Follows.ENDED, code=CODES[self.name])
        return Expected(Follows.ERROR, WORDS) if self.name == "exception" else Expected(Follows.TIMEOUT, "timed out")

    def _in_worker(self) -> Expected:
        if self.in_threads:
            return self._in_thread()
        if self.name == "SIGSTOP":
            return Expected(Follows.TIMEOUT, "timed out")
        if (self.step, self.name) == ("import", "unpicklable"):  # the loader pickles the worker's arguments
            return Expected(Follows.RAISED, WORDS)
        if (self.step, self.name) == ("before write", "exception"):  # nothing can be sent: the worker ends
            return Expected(Follows.DEATH, DIED, 1)
        if self.name in ("exception", "unpicklable"):
            return Expected(Follows.ERROR, "has closed the connection|EOFError" if self.step == "hand-over" else WORDS)
        if (self.step, self.name) == ("pickling", "sys.exit"):
            return Expected(Follows.ERROR, "SystemExit: 3")
        if self.name == "SIGINT":  # a worker leaves its loop without a word: the loader gets the Ctrl-C, too
            return Expected(Follows.DEATH, DIED, 0)
        if (self.name, self.who) == ("SIGTERM", "a worker"):  # torch's handler takes it from the parent as an order
            return Expected(Follows.DEATH, DIED, 0)
        return Expected(Follows.DEATH, DIED, CODES[self.name])


# --- The selection ----------------------------------------------------------------------------------------------------
def cells(transport: str = TRANSPORTS[0]) -> Iterator[Cell]:
    """The selection: for each fault at a step, two opposite kinds of loader by fork, and one by spawn or forkserver.

    Of loaders with threads there are two, too.
    """
    if transport == "thread":
        yield from _of_threads()
        return
    pairs = [(name, fault) for name, step in STEPS.items() for fault in step.faults]
    found: dict[Cell, None] = {}
    for number, (name, fault) in enumerate(pairs):
        other = ("spawn", "forkserver")[number % 2]
        for bits, method in ((number, "fork"), (~number, "fork"), (number // 2, other)):
            options: dict[str, Any] = {
                "pin": bool(bits & 1), "persistent": bool(bits & 2), "kind": ("map", "iterable")[bits >> 2 & 1],
            }  # fmt: skip
            if transport == "mini" and (name not in OF_MINI or fault in NOT_OF_MINI):
                continue
            needs = STEPS[name].needs
            if needs.get("method") == "spawn":  # what spawn needs, a fork server has too
                method, needs = ("spawn", "forkserver")[(number + bits) % 2], {}
            if needs.get("transport", transport) == transport:
                chosen = {"method": method, "transport": transport, **options, **needs}
                found[Cell(name, fault, **chosen)] = None
    yield from found


def _of_threads() -> Iterator[Cell]:
    pairs = [(name, fault) for name, step in OF_THREADS.items() for fault in step.faults]
    for number, (name, fault) in enumerate(pairs):
        for bits in (number, ~number):
            options: dict[str, Any] = {
                "pin": bool(bits & 1), "persistent": bool(bits & 2), "kind": ("map", "iterable")[bits >> 2 & 1],
                "in_order": not bits & 8 or "both" in fault,  # else one worker may get the samples of both
            }  # fmt: skip
            yield Cell(name, fault, **{"method": "thread", "transport": "thread", **options, **OF_THREADS[name].needs})
