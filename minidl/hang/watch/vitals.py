"""Signs of life of processes, read from /proc: cheap, and without a signal to them.

Interface: `sample(pids)` of some processes, `vitals(pid)` of one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from minidl.hang.evidence.machine import read_machine
from minidl.hang.evidence.proc import ProcFiles
from minidl.tracefile.watched import Sample, Vitals


def sample(pids: Iterable[int]) -> Sample:
    """Sample the existing processes and the machine that they share."""
    machine = read_machine(ProcFiles(os.getpid()).cgroups())
    kills = max((group.oom_kills for group in machine.cgroups), default=-1)
    processes = {pid: one for pid in pids if (one := vitals(pid)) is not None}
    return Sample(time.monotonic_ns(), processes, machine.shm_free, kills)


def vitals(pid: int) -> Vitals | None:
    """Sample a process; None if it is gone."""
    files = ProcFiles(pid)
    stat, status = files.stat(), files.status()
    if stat is None:
        return None
    rss, shared = (int(status.get(name, "-1").split()[0]) for name in ("VmRSS", "RssShmem"))
    return Vitals(stat.state, round(1000 * stat.cpu), rss, shared, _descriptors(files), stat.threads, files.wchan())


def _descriptors(files: ProcFiles) -> int:
    try:
        return os.stat(f"{files.place}/fd").st_size or len(files.names("fd"))  # since Linux 6.2, the size is the count
    except OSError:
        return -1
