"""Size of the explored loader, acts of its user, and crashes: `Configuration`.

`CONFIGURATIONS` is the table that `minidl explore` goes through. The loader's guards are in `guards`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final


class Crash(enum.Enum):
    """The one thing that goes wrong in a run, at any step of it. Values are how tables name them."""

    WORKER_KILLED = "worker killed"
    WORKER_STUCK = "worker stuck"  # in its dataset, forever
    WORKER_STOPPED = "worker stopped"  # SIGSTOP: alive, and SIGTERM does not reach it
    LOADER_KILLED = "loader killed"
    WORKER_DIES = "worker dies"  # of an exception such as SystemExit: a thread
    WORKER_SLEEPS = "worker sleeps"  # in its dataset, until the loader is closed: a thread
    PIN_DIES = "pin thread dies"  # of an exception
    PIN_STUCK = "pin thread stuck"  # in a copy, forever


@dataclass(frozen=True)
class Configuration:
    """One loader, its user, and what may go wrong.

    streams: batches in each worker's share of an iterable dataset; None for a map-style one of `tasks` batches.
    epochs: more than one only with persistent workers. index_room, result_room: messages that a pipe holds.
    may_break: the user may leave an epoch after any batch. exits: the interpreter exits while the program
    still holds the iterator, which is not closed. heard: the main thread iterates, so a worker's death interrupts it at
    once (SIGCHLD; and, as Ctrl-C may, also in a shutdown); else the loader has to check. timeout: the user has set one.
    slow: a join may run out of time though the actor that is joined could still end by itself.
    ctrl_c: how often Ctrl-C may interrupt the main thread, before or after any effect from the first task to the end of
    the shutdown, and between a message's arrival and the decision about it. goes_on: after so many errors or Ctrl-C the
    program goes on: with the next batch or epoch after an error, with the next epoch after a Ctrl-C.
    threads: the workers are threads of the loader's process, see `explore.threads`.
    """

    name: str
    workers: int = 2
    prefetch: int = 2
    tasks: int = 4
    streams: tuple[int, ...] | None = None
    persistent: bool = False
    epochs: int = 1
    pin: bool = False
    in_order: bool = True
    index_room: int = 2
    result_room: int = 2
    may_break: bool = False
    exits: bool = False
    heard: bool = False
    crashes: tuple[Crash, ...] = ()
    timeout: bool = False
    slow: bool = False
    ctrl_c: int = 0
    goes_on: int = 0
    threads: bool = False

    def describe(self) -> str:
        """In words, for the table."""
        data = f"{self.tasks} tasks" if self.streams is None else f"streams of {', '.join(map(str, self.streams))}"
        words = {
            "pin thread": self.pin,
            f"persistent, {self.epochs} epochs": self.persistent,
            "out of order": not self.in_order,
            "may break": self.may_break,
            "exits unclosed": self.exits,
            "SIGCHLD": self.heard,
            "user's timeout": self.timeout,
            "slow workers": self.slow,
            f"{self.ctrl_c} Ctrl-C": self.ctrl_c,
            f"goes on after {self.goes_on} errors": self.goes_on,
            f"crash: {', '.join(crash.value for crash in self.crashes)}": self.crashes,
        }
        said = (word for word, holds in words.items() if holds)
        kind = "worker threads" if self.threads else "workers"
        return "; ".join((f"{self.workers} {kind}, prefetch {self.prefetch}, {data}", *said))


# --- What `minidl explore` goes through -------------------------------------------------------------------------------
_ANY: Final = (Crash.WORKER_KILLED, Crash.LOADER_KILLED)
_ANY_PINNED: Final = (*_ANY, Crash.PIN_DIES)
_C = Configuration
OF_PROCESSES: Final = (
    _C("plain", may_break=True, crashes=_ANY),
    _C("six tasks", tasks=6, may_break=True, crashes=_ANY),
    _C("narrow pipes", tasks=6, may_break=True, index_room=1, result_room=1, crashes=_ANY),
    _C("three workers", workers=3, tasks=6, may_break=True),
    _C("three workers, crash", workers=3, tasks=4, crashes=_ANY),
    _C("out of order", tasks=6, in_order=False, may_break=True, crashes=_ANY),
    _C("pinned", pin=True, may_break=True, crashes=_ANY_PINNED),
    _C("pinned, six tasks", pin=True, tasks=6, crashes=_ANY_PINNED),
    _C("persistent", persistent=True, epochs=2, may_break=True, crashes=_ANY),
    _C("persistent, pinned", persistent=True, epochs=2, tasks=3, pin=True, may_break=True, crashes=_ANY_PINNED),
    _C("streams", streams=(1, 2), may_break=True, crashes=_ANY),
    _C("streams, pinned", streams=(1, 2), pin=True, may_break=True, crashes=_ANY_PINNED),
    _C("streams, persistent", streams=(0, 2), persistent=True, epochs=2, may_break=True, crashes=_ANY),
    _C("exit", exits=True, index_room=1, pin=True, may_break=True, crashes=(Crash.WORKER_KILLED, Crash.PIN_DIES)),
    _C("exit, persistent, pinned", exits=True, persistent=True, epochs=2, tasks=3, pin=True, crashes=_ANY_PINNED),
    _C("stuck", timeout=True, may_break=True, crashes=(Crash.WORKER_STUCK, Crash.WORKER_STOPPED)),
    _C("stuck, pinned", timeout=True, pin=True, may_break=True,
       crashes=(Crash.WORKER_STUCK, Crash.WORKER_STOPPED, Crash.PIN_STUCK)),
    _C("heard", heard=True, tasks=6, may_break=True, crashes=(Crash.WORKER_KILLED,)),
    _C("heard, pinned", heard=True, pin=True, may_break=True, crashes=(Crash.WORKER_KILLED,)),
    _C("heard, persistent", heard=True, persistent=True, epochs=2, may_break=True, crashes=(Crash.WORKER_KILLED,)),
    _C("heard, streams", heard=True, streams=(0, 2), may_break=True, crashes=(Crash.WORKER_KILLED,)),
    _C("slow", slow=True, pin=True, may_break=True, crashes=_ANY_PINNED),
    _C("Ctrl-C", ctrl_c=2, may_break=True),
    _C("Ctrl-C, pinned", ctrl_c=2, pin=True, tasks=3, may_break=True),
    _C("Ctrl-C, persistent", ctrl_c=2, goes_on=2, persistent=True, epochs=3, prefetch=1, tasks=2, may_break=True),
    _C("Ctrl-C, worker killed", ctrl_c=1, pin=True, prefetch=1, tasks=2, crashes=(Crash.WORKER_KILLED,)),
    _C("Ctrl-C, exit", ctrl_c=2, exits=True, pin=True, persistent=True, tasks=2, prefetch=1, may_break=True),
    _C("goes on", goes_on=2, tasks=6, may_break=True, crashes=(Crash.WORKER_KILLED,)),
    _C("goes on, pinned", goes_on=2, pin=True, may_break=True, crashes=_ANY_PINNED),
    _C("goes on, streams", goes_on=2, streams=(1, 2), may_break=True, crashes=(Crash.WORKER_KILLED,)),
)  # fmt: skip
"""From the smallest of its kind on; each with a crash of any one actor at any step, unless it says otherwise."""

_TO_A_THREAD: Final[dict[Crash, tuple[Crash, ...]]] = {
    Crash.WORKER_KILLED: (Crash.WORKER_DIES,),
    Crash.WORKER_STOPPED: (Crash.WORKER_SLEEPS,),
    Crash.LOADER_KILLED: (),
}
"""A crash of processes -> what may happen to threads. They end with their process."""


def with_threads(c: Configuration) -> Configuration:
    """The same with worker threads."""
    crashes = (each for crash in c.crashes for each in _TO_A_THREAD.get(crash, (crash,)))
    return replace(c, name=f"threads, {c.name}", threads=True, crashes=tuple(crashes))


_STUCK_THREADS: Final = (Crash.WORKER_STUCK, Crash.WORKER_SLEEPS)
OF_THREADS: Final = (
    *(with_threads(c) for c in OF_PROCESSES if not c.heard and c.name != "narrow pipes"),
    _C("threads, stuck, exit", threads=True, exits=True, timeout=True, may_break=True, crashes=_STUCK_THREADS),
    _C("threads, stuck, slow", threads=True, slow=True, timeout=True, may_break=True, crashes=_STUCK_THREADS),
    _C("threads, stuck, Ctrl-C", threads=True, ctrl_c=2, timeout=True, may_break=True, crashes=_STUCK_THREADS),
)  # fmt: skip
"""The same sizes with worker threads, as far as they differ: no signal tells of a thread's end, and no pipe is full."""

CONFIGURATIONS: Final = (*OF_PROCESSES, *OF_THREADS)

QUICK: Final = (
    *("plain", "pinned", "persistent", "streams", "exit", "stuck", "Ctrl-C"),
    *("threads, plain", "threads, stuck", "threads, exit"),
)
