"""What the kernel says of processes in /proc, and signals to them. Needs no torch: see `watch`.

Interface: `stat_fields(pid)`, `stat_of(text)` of a file that was read, `born(fields)`, `was_there(fields, moment)`,
`is_alive(pid)`, `status_of(text)`; `children_of(pid)`, `descendants_of(pid)`, `every_process()`; `boot_id()`;
`HeldProcess(pid)`, `signal_if(pid, signum, is_meant)`, `kill_if(pid, is_meant)`; `remove_segments_of(pids)`;
`launched(variables)`: which rank of a job a process is.
proc(5) names the fields; here the first one is the state, since the name before it may have blanks and brackets.

Rules of use: a process that is no child of this one is signalled by these alone: once it has ended, its id may be
another process's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

SAMPLER_NAME = "minidl-sampler"
"""The kernel's name of a thread that samples stacks (`record.stack_samples`): it is none of the program's."""

ENDED = ("Z", "X")
"""States of a process that has ended, and that its parent has not waited for."""


class Launched(NamedTuple):
    """A process's place in its job; -1 = it is no rank of several. restart: how often the ranks were started before.

    job: what tells this job from others, "" = the launcher does not say.
    """

    rank: int = -1
    ranks: int = -1
    local_rank: int = -1
    restart: int = 0
    job: str = ""


LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_RESTART_COUNT", "SLURM_JOB_ID SLURM_STEP_ID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "", "PMIX_NAMESPACE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "", ""),
)
"""The variables of torchrun (Accelerate and Ray Train set them, too), srun, Open MPI, and MPICH or Intel MPI.

A batch script outside of srun has SLURM_PROCID and SLURM_NTASKS, and is no rank.
"""


def launched(variables: Mapping[str, str]) -> Launched:
    """Which rank of a job the process with these environment variables is."""
    for *numbers, jobs in LAUNCHERS:
        texts = [variables.get(name, "") for name in numbers]
        rank, ranks, local, restart = (int(text) if text.isdecimal() else -1 for text in texts)
        if 0 <= rank < ranks > 1:
            ids = [variables.get(name, "") for name in jobs.split()]
            job = re.sub(r"[^\w.-]+", "-", ".".join(one for one in ids if one not in ("", "none")))
            return Launched(rank, ranks, local, max(0, restart), job)
    return Launched()


def stat_of(text: str) -> tuple[str, list[str]]:
    """The process's name, and the fields from the state on."""
    head, _, tail = text.rpartition(")")
    return head.partition("(")[2], tail.split()


def stat_fields(pid: int) -> list[str]:
    """The fields from the state on. Raises OSError if the process is gone."""
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # a third of the time that Path takes
        return stat_of(file.read(4096).decode(errors="replace"))[1]


def born(fields: list[str]) -> float:
    """When a process with these fields began: seconds, CLOCK_MONOTONIC; equal for those that began in one tick."""
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    return round(int(fields[19]) / os.sysconf("SC_CLK_TCK") - round(asleep, 1), 2)


def was_there(fields: list[str], moment: int) -> bool:
    """Whether a process with these fields was there at a moment (ns, CLOCK_MONOTONIC), to a second."""
    return born(fields) <= moment / 1e9 + 1


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


def children_of(pid: int) -> list[int]:
    """The children of all of a process's threads; those that were orphaned are not among them."""
    out: list[int] = []
    with contextlib.suppress(OSError):  # it, or one of its threads, has ended meanwhile
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                out += map(int, Path(f"/proc/{pid}/task/{tid}/children").read_text().split())
    return out


def descendants_of(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    return [one for child in children_of(pid) for one in (child, *descendants_of(child))]


def status_of(text: str) -> dict[str, str]:
    """The lines of /proc/PID/status."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def boot_id() -> str:
    """What stands for this machine, and its clock, from start to shutdown; "" = unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_PIDFD_INFO = struct.Struct("=Q52xi")  # `struct pidfd_info`: what is asked for and known; the status of the end
_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class HeldProcess:
    """A process that is held by a pidfd: what is asked of it, and sent to it, never reaches another one of its id.

    fd: can be read from once the process has ended; one that is open already may be given. Raises OSError if it is
    gone, or if the kernel has no pidfd (before Linux 5.3).
    """

    def __init__(self, pid: int, fd: int = -1) -> None:
        self.pid, self.fd = pid, os.pidfd_open(pid) if fd < 0 else fd
        self._ends = select.poll()
        self._ends.register(self.fd, select.POLLIN)

    def is_there(self) -> bool:
        """Whether it has not ended; a zombie has."""
        return not self._ends.poll(0)

    def exit_code(self) -> int | None:
        """The exit code, as multiprocessing has it, of a process whose parent has waited for it.

        None if it has none, or if the kernel does not tell (before Linux 6.15).
        """
        info = bytearray(_PIDFD_INFO.size)
        _PIDFD_INFO.pack_into(info, 0, _INFO_EXIT, 0)
        try:
            fcntl.ioctl(self.fd, _PIDFD_GET_INFO, info, True)
        except OSError:
            return None
        known, status = _PIDFD_INFO.unpack(info)
        return os.waitstatus_to_exitcode(status) if known & _INFO_EXIT else None

    def send(self, signum: int) -> bool:
        """Send it a signal; return whether it was there, and may be sent one."""
        try:
            signal.pidfd_send_signal(self.fd, signum)
        except OSError:
            return False
        return True

    def close(self) -> None:
        os.close(self.fd)


def signal_if(pid: int, signum: int, is_meant: Callable[[], bool]) -> bool:
    """Send a signal to the process `pid` if `is_meant()`, which is asked once the id can't become another process's."""
    try:
        held = HeldProcess(pid)
    except OSError:
        return False
    try:
        return is_meant() and held.send(signum)
    except OSError:  # it has ended before `is_meant` could read about it
        return False
    finally:
        held.close()


def kill_if(pid: int, is_meant: Callable[[list[str]], bool]) -> bool:
    """Kill the process `pid` if its fields say that it is the one."""
    return signal_if(pid, signal.SIGKILL, lambda: is_meant(stat_fields(pid)))


_SEGMENT = re.compile(r"torch_(\d+)_")


def remove_segments_of(pids: Collection[int]) -> None:
    """Remove the segments that have the name of a process of `pids` that has ended.

    torch's strategy `file_descriptor` takes a segment's name away as soon as it is mapped. A process that is killed in
    that moment leaves it. Where a process with its id is alive, that may be of another program.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/shm"):
            maker = _SEGMENT.match(name)
            if maker is not None and (pid := int(maker[1])) in pids and not is_alive(pid):
                with contextlib.suppress(OSError):
                    os.unlink(f"/dev/shm/{name}")
