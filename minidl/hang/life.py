"""Whether a process is there, and how it ended: by its id and a moment, since ids are used again.

Interface: `life(pid, moment)`, `exit_code(pid)` of a zombie; `is_here(manifest)` tells whether the
process ids of a trace are this machine's, `is_running(path, manifest)` whether the process that records it is there.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minidl.process_stat import ENDED, boot_id, stat_fields, was_there
from minidl.tracefile.facts import time_of_day
from minidl.tracefile.process import ProcessLife

_STATES: Final = {
    **dict.fromkeys(ENDED, ProcessLife.GONE),
    "T": ProcessLife.STOPPED, "t": ProcessLife.STOPPED, "D": ProcessLife.DISK,
}  # fmt: skip


FRESH: Final = 90.0
"""Seconds for which the files of a rank that runs on another machine may stay as they are: its watchdog writes its
digest each minute."""


def life(pid: int, moment: int) -> ProcessLife:
    """Whether the process `pid` that existed at a moment (ns, CLOCK_MONOTONIC) still exists; a later one is another."""
    try:
        fields = stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ProcessLife.GONE if os.path.exists("/proc/self/stat") else ProcessLife.UNKNOWN
    except OSError:
        return ProcessLife.UNKNOWN
    return _STATES.get(fields[0], ProcessLife.ALIVE) if was_there(fields, moment) else ProcessLife.GONE


def exit_code(pid: int) -> int | None:
    """The exit code of a zombie, as multiprocessing has it; None if it is none, or was reaped."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] in ENDED else None


def is_here(manifest: Mapping[str, object]) -> bool:
    """Whether the trace's clock and process ids are valid here: the same machine (or container), not restarted."""
    boot = boot_id()
    return bool(boot) and manifest.get("boot_id") == boot and manifest.get("host") == socket.gethostname()


def is_running(path: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether the process that records at `path` is there; one on another machine is while it writes its files."""
    pid, begun = manifest.get("pid"), manifest.get("monotonic_ns")
    if is_here(manifest):
        return isinstance(pid, int) and isinstance(begun, int) and life(pid, begun).there
    if not time_of_day(manifest) or manifest.get("host") == socket.gethostname():  # it was restarted since
        return False
    try:
        return path.is_dir() and time.time() - max(one.stat().st_mtime for one in path.iterdir()) < FRESH
    except OSError:
        return False


def now(manifest: Mapping[str, Any]) -> int:
    """This moment by the clock of the machine that records, ns."""
    return time.monotonic_ns() if is_here(manifest) else time.time_ns() - time_of_day(manifest)
