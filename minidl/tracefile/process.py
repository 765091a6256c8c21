"""A process that wrote to a trace, and what is missing of it."""

from __future__ import annotations

from dataclasses import dataclass

from minidl.tracefile.format import Header
from minidl.tracefile.words import counted


@dataclass(repr=False)
class Process:
    """One process that wrote to the trace. lost counts events that were overwritten or could not be recorded.

    whole_from: CLOCK_MONOTONIC ns of the oldest event if older ones were overwritten, else 0. whole_until: of the
    newest one if later ones could not be recorded, or were cut off with the end of its file, else 0. rank: if the trace
    has several, else -1.
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
    file: str = ""
    note: str = ""
    header: Header | None = None

    @property
    def name(self) -> str:
        """For messages: "worker 2 (pid 71)", "rank 0 worker 2 (pid 71)"."""
        of = "" if self.rank < 0 else f"rank {self.rank} "
        return f"{of}{self.role}{'' if self.worker < 0 else f' {self.worker}'} (pid {self.pid})"

    def __repr__(self) -> str:
        return f"<Process {self.name}: {counted(self.events, 'event')}{'; ' * bool(self.note)}{self.note}>"
