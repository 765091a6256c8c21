"""What this process may use of its machine: CPUs and memory, and how many ranks share them.

Interface: `usable_cpus()` describes the CPUs; `cpu_share()` is this rank's part of them, `memory_left()` what may still
be allocated, `tasks_left()` how many processes and threads may be started, `ranks_here()` how many ranks of this job
the machine has; `private_memory()` is what one process has to itself, `size_of()` reads a size that a user gives.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

_RANKS_HERE: Final = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip
"""The variables of torchrun, Open MPI, MPICH, and srun, whose "4(x2),3" is for all machines."""

UNLIMITED: Final = 1 << 60
"""Of the older cgroups, no limit is a number of this size."""


def usable_cpus() -> dict[str, Any]:
    """Describe the CPUs that this process may use: cpus_allowed, by its affinity; cpu_quota, in CPUs, by its cgroups.

    None where nothing limits it, or nothing says so.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {"cpus_allowed": allowed, "cpu_quota": cpu_quota()}


def cpu_share() -> float:
    """Return how many CPUs this rank may count on: those it is bound to, at most its share of what all ranks have."""
    usable, there = usable_cpus(), os.cpu_count() or 1
    return float(min(usable["cpus_allowed"] or there, (usable["cpu_quota"] or there) / ranks_here(os.environ)))


def ranks_here(variables: Mapping[str, str]) -> int:
    """Return how many ranks a process with these environment variables shares its machine with, itself among them."""
    numbers = (re.match(r"\d+", variables.get(name, "")) for name in _RANKS_HERE)
    return next((max(1, int(number[0])) for number in numbers if number), 1)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the least quota of this process's cgroups, of either version; None = none is set."""
    return min((quota for group in _groups(root, "cpu") if (quota := quota_of(group)) is not None), default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Return the bytes that the machine, and this process's cgroups, have left; None = nothing says so."""
    found = [_left(group) for group in _groups(root, "memory")]
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = (root / "proc/meminfo").read_text()
        found.append(1024 * int(text.partition("MemAvailable:")[2].split()[0]))
    return min((left for left in found if left is not None), default=None)


def shared_memory_left() -> int | None:
    """Return the bytes that /dev/shm has left; None = there is none."""
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
        return shm.f_bavail * shm.f_frsize
    return None


def tasks_left(root: Path = Path("/")) -> int | None:
    """Return how many more processes and threads may be started; None = nothing limits them.

    By the cgroups, and by RLIMIT_NPROC, which counts all that the user has, and does not bind root.
    """
    found = []
    for group in _groups(root, "pids"):
        with contextlib.suppress(OSError, ValueError):  # "max"
            found.append(int((group / "pids.max").read_text()) - int((group / "pids.current").read_text()))
    limit, user = resource.getrlimit(resource.RLIMIT_NPROC)[0], os.getuid()
    if user and limit != resource.RLIM_INFINITY:
        for status in (root / "proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                text = status.read_text()
                if f"\nUid:\t{user}\t" in text:
                    limit -= int(text.partition("\nThreads:")[2].split()[0])
        found.append(limit)
    return max(0, min(found)) if found else None


def private_memory(pid: int | None) -> int:
    """Return the bytes that a process shares with no other one; 0 = unknown."""
    with contextlib.suppress(OSError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return 1024 * sum(map(int, re.findall(r"^Private_\w+: +(\d+)", rollup, re.MULTILINE)))
    return 0


def size_of(text: str) -> int | None:
    """Return the bytes that a text like "2G" or "500 MiB" says, in powers of 1,024; None = it says none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE)
    return int(min(2.0**62, float(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " "))) if found else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroups that may limit it by this controller, innermost first."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = top / path.strip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def quota_of(group: Path) -> float | None:
    """Return the quota of one cgroup, in CPUs: quota over period."""
    with contextlib.suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if float(quota) > 0:
            return float(quota) / float(period)
    return None


def _left(group: Path) -> int | None:
    """Return the bytes that one cgroup has left; inactive pages of files are given back when memory is short."""
    with contextlib.suppress(OSError, ValueError):
        second = (group / "memory.max").exists()
        names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (int((group / name).read_text()) for name in names)
        stat = (group / "memory.stat").read_text()
        file = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
        return max(0, limit - used + int(file[1] if file else 0)) if limit < UNLIMITED else None
    return None
