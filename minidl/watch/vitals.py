"""Signs of life of a process, read from /proc: cheap, and without a signal to it.

Interface: `vitals(pid)`, `exit_code(pid)` of a zombie, `shm_free()`, `OomKills`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from minidl.tracefile.watched import Vitals

_TICK_MS: Final = 1000 / os.sysconf("SC_CLK_TCK")


def vitals(pid: int) -> Vitals | None:
    """Sample a process; None if it is gone."""
    fields = _stat(pid)
    if fields is None:
        return None
    status = dict(line.split(":", 1) for line in _read(f"/proc/{pid}/status").splitlines() if ":" in line)
    return Vitals(
        state=fields[0],
        cpu_ms=round((int(fields[11]) + int(fields[12])) * _TICK_MS),
        rss_kib=_kib(status.get("VmRSS", "")),
        shm_kib=_kib(status.get("RssShmem", "")),
        fds=_descriptors(pid),
        threads=int(fields[17]),
        wchan=_read(f"/proc/{pid}/wchan").strip().removeprefix("0"),
    )


def exit_code(pid: int) -> int | None:
    """Return how a zombie ended, as multiprocessing's exitcode; None if it is no zombie, or its parent has reaped it."""
    fields = _stat(pid)
    if fields is None or fields[0] not in "ZX":
        return None
    status = int(fields[49])
    return os.waitstatus_to_exitcode(status)


def started(pid: int) -> int:
    """Return when a process began, in the kernel's ticks: with its id, it tells processes apart. 0 = it is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[19])


def shm_free() -> int:
    """Bytes that /dev/shm has left; -1 = unknown."""
    try:
        there = os.statvfs("/dev/shm")
    except OSError:
        return -1
    return there.f_bavail * there.f_frsize


def oom_kills() -> int:
    """Return how many processes of this cgroup the kernel has killed for memory; -1 = unknown."""
    try:
        group = next(line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::"))
        lines = Path(f"/sys/fs/cgroup{group}/memory.events").read_text().split()
        return int(lines[lines.index("oom_kill") + 1])
    except (OSError, ValueError, StopIteration):
        return -1


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on."""
    text = _read(f"/proc/{pid}/stat")
    return text.rpartition(")")[2].split() or None


def _descriptors(pid: int) -> int:
    folder = f"/proc/{pid}/fd"
    try:
        return os.stat(folder).st_size or len(os.listdir(folder))  # Linux 6.2 and later give the count as the size
    except OSError:
        return -1


def _kib(text: str) -> int:
    word = text.split()
    return int(word[0]) if word and word[0].isdecimal() else -1


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(16384).decode("ascii", "replace")
    except OSError:
        return ""
