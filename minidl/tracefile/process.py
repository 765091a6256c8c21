"""A process that wrote to a trace, what is missing of it, and whether it is there."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from minidl.tracefile.format import Header
from minidl.tracefile.words import counted


class ProcessLife(enum.Enum):
    """Whether a process is there, and what keeps it."""

    ALIVE = "alive"
    DISK = "disk"  # in the kernel, waiting for a disk or a network file system; no signal reaches it
    STOPPED = "stopped"  # by a signal (SIGSTOP, SIGTSTP) or by a debugger
    GONE = "gone"
    UNKNOWN = "?"

    @property
    def there(self) -> bool:
        """Whether the process is known to exist."""
        return self not in (ProcessLife.GONE, ProcessLife.UNKNOWN)


@dataclass(repr=False)
class Process:
    """One process that wrote to the trace. lost counts events that were overwritten or could not be recorded.

    whole_from: CLOCK_MONOTONIC ns of the oldest event if older ones were overwritten, else 0. whole_until: of the
    newest one if later ones could not be recorded, or were cut off with the end of its file, else 0. rank: if the trace
    has several, else -1. life: when the trace was read while it was written.
    """

    pid: int
    ppid: int = 0
    role: str = "other"
    worker: int = -1
    loader: int = 0
    start_ns: int = 0
    events: int = 0
    lost: int = 0
    whole_from: int = 0
    whole_until: int = 0
    rank: int = -1
    life: ProcessLife = ProcessLife.UNKNOWN
    file: str = ""
    note: str = ""
    header: Header | None = None

    @property
    def name(self) -> str:
        """For messages: "worker 2 (pid 71)", "rank 0 worker 2 (pid 71)"."""
        return f"{self.of_rank} (pid {self.pid})"

    @property
    def actor(self) -> str:
        """What it is in its iterator: "worker 2", "loader"."""
        return self.role if self.worker < 0 else f"{self.role} {self.worker}"

    @property
    def of_rank(self) -> str:
        """The same with its rank, if there are several: "rank 0 worker 2"."""
        return self.actor if self.rank < 0 else f"rank {self.rank} {self.actor}"

    def __repr__(self) -> str:
        return f"<Process {self.name}: {counted(self.events, 'event')}{'; ' * bool(self.note)}{self.note}>"
