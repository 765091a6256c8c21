"""One process as /proc shows it: its threads twice, limits, signals, descriptors, semaphores, children.

Interface: `first_look(pid)` reads what changes; `read_process(pid, before)` reads it again with all the rest. Both
return None for a process that is gone. What may not be read is named in `not_seen`.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from minidl.hang.evidence.descriptors import read_descriptors
from minidl.hang.evidence.model import MEMORY, SeenProcess, SeenThread, Syscall
from minidl.hang.evidence.proc import ProcFiles, Unseen, numbers_of, semaphores_of, signals_of
from minidl.hang.evidence.syscalls import decoded, is_private, waits_for_mutex
from minidl.process_stat import SAMPLER_NAME, children_of

MOST_THREADS: Final = 256
_MACHINE: Final = platform.machine()


class ThreadLook(NamedTuple):
    """The values of a thread that change. switches: how often it gave up the CPU by itself; cpu: seconds.

    system: of its CPU time that in the kernel, in ticks. known: the lines of /proc/PID/task/TID/status. read: bytes.
    """

    name: str
    state: str
    cpu: float
    system: int
    switches: int
    call: Syscall | None
    known: dict[str, str]
    read: int = -1


@dataclass(slots=True)
class FirstLook:
    """A process at the first look.

    started: in the kernel's ticks, as /proc has it: of two processes with one id it tells which; "" = not seen.
    """

    pid: int
    started: str = ""
    threads: dict[int, ThreadLook] = field(default_factory=dict)


def first_look(pid: int) -> FirstLook | None:
    """The values to be compared with a second look; None = the process is gone."""
    files = ProcFiles(pid)
    stat, tids = files.stat(), files.tids()[:MOST_THREADS]
    threads = {tid: seen for tid in tids if (seen := thread_look(pid, tid)) is not None}
    return FirstLook(pid, stat.started if stat is not None else "", threads) if threads else None


def thread_look(pid: int, tid: int, unseen: Unseen | None = None) -> ThreadLook | None:
    """The values of a thread now; None = it is gone."""
    files = ProcFiles(pid, tid, unseen)
    stat, known = files.stat(), files.status()
    if stat is None or not known:
        return None
    line, exact = files.text("syscall", "system calls"), files.cpu_seconds()
    call = decoded(line, files.memory, _MACHINE) if line else None
    switches = int(known.get("voluntary_ctxt_switches", "0"))
    cpu = exact if exact >= 0 else stat.cpu
    return ThreadLook(stat.name, stat.state, cpu, stat.system, switches, call, known, files.read_bytes())


def read_process(pid: int, before: FirstLook | None) -> SeenProcess | None:
    """A process with all that may be read of it; None = it is gone. before: its first look."""
    unseen = Unseen()
    files = ProcFiles(pid, unseen=unseen)
    stat, known = files.stat(), files.status()
    if stat is None or not known:
        return None
    if before is None or before.started != stat.started:
        before = FirstLook(pid)
    if not known.get("Kthread", "0").startswith("1") and not stat.ended and not files.memory_allowed():
        unseen.add(MEMORY, "ptrace is not allowed")
    maps, (rank, ranks) = files.text("maps", "memory mappings"), files.rank()
    return SeenProcess(
        pid=pid,
        ppid=stat.ppid,
        name=stat.name,
        command=files.command(),
        state=stat.state,
        started=stat.born,
        ended=stat.ended,
        exit_code=stat.exit_code,
        threads=tuple(_threads(files, before)),
        descriptors=tuple(read_descriptors(files)),
        semaphores=semaphores_of(maps, files.memory),
        children=tuple(children_of(pid)),
        ignored=signals_of(known.get("SigIgn", "")),
        caught=signals_of(known.get("SigCgt", "")),
        limits=files.limits(),
        maps=len(maps.splitlines()) or -1,
        cpus=numbers_of(known.get("Cpus_allowed_list", "")),
        cgroups=tuple(files.cgroups()),
        tracer=int(known.get("TracerPid", "0")),
        rank=rank,
        ranks=ranks,
        not_seen=() if stat.ended else unseen.all(),
    )


def _threads(files: ProcFiles, before: FirstLook) -> Iterator[SeenThread]:
    tids, unseen = files.tids(), files.unseen
    if len(tids) > MOST_THREADS:
        unseen.add(f"{len(tids) - MOST_THREADS} of {len(tids)} threads", f"only the first {MOST_THREADS} are read")
    for tid in tids[:MOST_THREADS]:
        now, own = thread_look(files.pid, tid, unseen), ProcFiles(files.pid, tid, unseen)
        if now is None or now.name == SAMPLER_NAME:
            continue  # it has ended meanwhile, or is ours
        then = before.threads.get(tid, now)
        yield SeenThread(
            tid=tid,
            name=now.name,
            state=(then.state, now.state),
            cpu=(then.cpu, now.cpu),
            switches=(then.switches, now.switches),
            wchan=own.wchan(),
            syscall=now.call,
            syscall_before=then.call,
            blocked=signals_of(now.known.get("SigBlk", "")),
            owner=_owner(now.call, own),
            idle=own.idle(),
            read=(then.read, now.read),
        )


def copies(process: SeenProcess, family: Iterable[int]) -> dict[str, int]:
    """The value of the lock that a process's main thread waits for, in the processes of its fork's family.

    A lock of Python is a semaphore of glibc (until 3.13), which lies in memory of malloc at the same address in all of
    them, behind the same size of its chunk.
    """
    main, found = process.main, dict[str, int]()
    if main is None or main.owner > 0 or not is_private(main.call):
        return found
    own = ProcFiles(process.pid).memory(main.call.address - 8, 16)
    for files in map(ProcFiles, family if any(own[:8]) and own[8:12] == bytes(4) else ()):
        other = files.memory(main.call.address - 8, 16)
        if other or files.memory_allowed():  # else it is not mapped there
            value, waiters = struct.unpack("<II", other[8:]) if other[:8] == own[:8] else (-1, 0)
            found[str(files.pid)] = value if value in (0, 1) and waiters < 1 << 16 else -1
    return found


def _owner(call: Syscall | None, files: ProcFiles) -> int:
    """The thread that a glibc mutex names as its owner, which stands 8 bytes behind the futex; -1 = none."""
    if call is None or not waits_for_mutex(call):
        return -1
    data = files.memory(call.address + 8, 4)
    owner = int.from_bytes(data, "little") if len(data) == 4 else 0
    return owner if 0 < owner < 1 << 22 else -1
