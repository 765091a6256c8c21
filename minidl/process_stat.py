"""What the kernel says of processes in /proc/PID/stat. Needs no torch: see `watch`.

Interface: `stat_fields(pid)`, `stat_of(text)` of a file that was read, `is_alive(pid)`, `every_process()`.
proc(5) names the fields; here the first one is the state, since the name before it may have blanks and brackets.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ENDED = ("Z", "X")
"""States of a process that has ended, and that its parent has not waited for."""


def stat_of(text: str) -> tuple[str, list[str]]:
    """The process's name, and the fields from the state on."""
    head, _, tail = text.rpartition(")")
    return head.partition("(")[2], tail.split()


def stat_fields(pid: int) -> list[str]:
    """The fields from the state on. Raises OSError if the process is gone."""
    return stat_of(Path(f"/proc/{pid}/stat").read_text(errors="replace"))[1]


def is_alive(pid: int) -> bool:
    """Whether the process is there; a zombie has ended."""
    try:
        return stat_fields(pid)[0] not in ENDED
    except OSError:
        return False


def every_process() -> Iterator[tuple[int, list[str]]]:
    """All processes that this one may see, with their fields."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                yield int(entry), stat_fields(int(entry))
