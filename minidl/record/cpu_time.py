"""CPU time of spans: which spans carry it in a trace, and the clocks that the traced steps read for it.

Interface: `choose(asked)` decides for a new trace; `CpuClocks(level)` holds what a process reads; `spent` is what an
event carries of two readings; `usable_cpus()` describes what this process may use of the machine.

A thread's CPU clock has no fast path in the kernel: each reading is a system call, of 150 to 600 ns. So it is chosen by
measurement, when a trace begins, where CPU time costs at most 100 ns an event: the steps of a fetch follow each other,
and one reading serves a sample's end and the next one's begin, so a reading may cost 200 ns; the spans that a batch has
once (fetch, collation, pickling, pinning, the consumer) are read at for about a quarter of a batch's events, so there
it may cost 400 ns. All processes of a trace do the same, and its manifest says which.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

Reader = Callable[[], int]

LEVELS: Final = ("off", "batch", "sample")
"""Spans with CPU time: none; those that a batch has once; also each sample."""

SAMPLE_NS: Final = 200
BATCH_NS: Final = 400
"""The most that a reading may cost for these levels to be chosen."""

_TURNS, _READINGS = 8, 32


def choose(asked: bool | None = None, read: Reader = time.thread_time_ns) -> tuple[str, dict[str, Any]]:
    """Choose a level, and return it with what the manifest says of it: spans, reading_ns, and whether it was measured.

    asked: True for all spans, False for none, None to measure.
    """
    cost = _cost(read)
    if asked is None:
        level = "sample" if cost <= SAMPLE_NS else "batch" if cost <= BATCH_NS else "off"
    else:
        level = "sample" if asked else "off"
    return level, {"spans": level, "reading_ns": cost, "chosen_by": "cost" if asked is None else "user"}


def _cost(read: Reader) -> int:
    """Return the ns of a reading, in the fastest of some turns: others are those that were interrupted."""
    turns = []
    for _ in range(_TURNS):
        begin = time.perf_counter_ns()
        for _ in range(_READINGS):
            read()
        turns.append(time.perf_counter_ns() - begin)
    return min(turns) // _READINGS


def spent(before: int, after: int) -> int:
    """Return what an event says of the time between two readings: ns, at least 1; 0 = not measured, as a reading of 0.

    The difference may be wrong if the readings are of two threads: the reader of a trace looks at that.
    """
    return max(1, after - before) if before and after else 0


def no_reading() -> int:
    return 0


class CpuClocks:
    """The calling thread's CPU clock, ns; or `no_reading` where the trace carries none.

    level: of `LEVELS`; detail: "sample" if samples are recorded. batch: for spans that a batch has once; sample: for
    samples.
    """

    def __init__(self, level: str, detail: str = "sample") -> None:
        self.batch: Reader = no_reading if level == "off" else time.thread_time_ns
        self.sample: Reader = self.batch if level == detail == "sample" else no_reading

    def delay(self) -> Reader:
        """Return the calling thread's `RunDelay`: without CPU time it would say nothing."""
        return no_reading if self.batch is no_reading else RunDelay()


class RunDelay:
    """How long the thread that made this has been ready to run and had no CPU, ns and 1; 0 if the kernel does not say.

    The second number of Linux's /proc/thread-self/schedstat, read through one descriptor: 0.5 us.
    """

    def __init__(self) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> int:
        if self._fd < 0:
            return 0
        try:
            return int(os.pread(self._fd, 96, 0).split()[1]) + 1
        except (OSError, ValueError, IndexError):
            return 0

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


# --- What the machine gives -------------------------------------------------------------------------------------------
def usable_cpus() -> dict[str, Any]:
    """Describe the CPUs that this process may use: cpus_allowed, by its affinity; cpu_quota, in CPUs, by its cgroups.

    None where nothing limits it, or nothing says so.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {"cpus_allowed": allowed, "cpu_quota": cpu_quota()}


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the least quota of this process's cgroups, of either version; None = none is set."""
    with contextlib.suppress(OSError, ValueError):
        found = []
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            group = top / path.strip("/")
            found += [_quota(folder) for folder in (group, *group.parents) if folder.is_relative_to(top)]
        return min((quota for quota in found if quota is not None), default=None)
    return None


def _quota(group: Path) -> float | None:
    """Return the quota of one cgroup, in CPUs: quota over period."""
    with contextlib.suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if float(quota) > 0:
            return float(quota) / float(period)
    return None
