"""Signs of life of a process, read from /proc: cheap, and without a signal to it.

Interface: `sample(pids)` of some processes, `vitals(pid)` of one, `exit_code(pid)` of a zombie, `started(pid)`,
`there_at(pid, moment)`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Final

from minidl.hang.evidence.machine import read_machine
from minidl.process_stat import ENDED, stat_fields, status_of, was_there
from minidl.tracefile.watched import Sample, Vitals

_TICK_MS: Final = 1000 / os.sysconf("SC_CLK_TCK")


def sample(pids: Iterable[int]) -> Sample:
    """Sample the existing processes and the machine that they share."""
    machine = read_machine(_read("/proc/self/cgroup").splitlines())
    kills = max((group.oom_kills for group in machine.cgroups), default=-1)
    processes = {pid: one for pid in pids if (one := vitals(pid)) is not None}
    return Sample(time.monotonic_ns(), processes, machine.shm_free, kills)


def vitals(pid: int) -> Vitals | None:
    """Sample a process; None if it is gone."""
    fields = _stat(pid)
    if fields is None:
        return None
    status = status_of(_read(f"/proc/{pid}/status"))
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
    """Return how a zombie ended, as multiprocessing's exitcode; None if it is none, or was reaped."""
    fields = _stat(pid)
    if fields is None or fields[0] not in ENDED:
        return None
    status = int(fields[49])
    return os.waitstatus_to_exitcode(status)


def started(pid: int) -> int:
    """Return the start of a process in the kernel's ticks, which with its id identifies it. 0 = it is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[19])


def there_at(pid: int, moment: int) -> bool:
    """Whether the process that has this id now was there at a moment (ns, CLOCK_MONOTONIC), to a second."""
    fields = _stat(pid)
    return fields is not None and was_there(fields, moment)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of a process that is there."""
    try:
        return stat_fields(pid)
    except OSError:
        return None


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
