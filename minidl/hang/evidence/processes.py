"""One process as /proc shows it: its threads twice, memory, limits, signals, semaphores, children.

Interface: `first_look(pid)` reads what changes; `read_process(pid, before)` reads it again with all the rest. Both
return None for a process that is gone. `memory_of(pid)`.

Rules of use: it opens files of /proc for reading and nothing else. What may not be read is named in `not_seen`.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import signal
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from minidl.hang.evidence.descriptors import read_descriptors
from minidl.hang.evidence.model import SeenProcess, SeenThread, Semaphore, Syscall
from minidl.hang.evidence.syscalls import Memory, decoded, waits_for_mutex
from minidl.process_stat import born, children_of, stat_of, status_of

MOST_THREADS: Final = 256
_TICK: Final = os.sysconf("SC_CLK_TCK")
_MACHINE: Final = platform.machine()
_MEMORY: Final = ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmHWM", "VmSwap", "VmSize")
_LIMITS: Final = {
    "Max open files": "open files",
    "Max file size": "file size",
    "Max address space": "address space",
    "Max processes": "processes",
    "Max locked memory": "locked memory",
}


class Unseen:
    """What could not be read, each once: what, and the reason."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def add(self, what: str, why: str) -> None:
        self._found[f"{what}: {why}"] = None

    def because(self, what: str, error: OSError) -> None:
        self.add(what, reason(error))

    def all(self) -> tuple[str, ...]:
        return tuple(self._found)


def reason(error: OSError) -> str:
    """Why something could not be read, in words."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return "not allowed (another user's process, or ptrace is forbidden here)"
    if error.errno == errno.ENOENT:
        return "this kernel does not tell"
    return (error.strerror or str(error)).lower()


@dataclass(slots=True)
class FirstLook:
    """What was seen of a process at the first look.

    started: in the kernel's ticks, as /proc has it: of two processes with one id it tells which; "" = not seen.
    """

    pid: int
    started: str = ""
    threads: dict[int, ThreadLook] = field(default_factory=dict)


class ThreadLook(NamedTuple):
    """What changes of a thread. switches: how often it gave up the CPU by itself; cpu: seconds; the rest as SeenThread.

    system: of its CPU time that in the kernel, in ticks. known: the lines of /proc/PID/task/TID/status.
    """

    state: str
    cpu: float
    system: int
    switches: int
    call: Syscall | None
    known: dict[str, str]


# --- Texts of /proc ---------------------------------------------------------------------------------------------------
def signals_of(mask: str) -> tuple[str, ...]:
    """The names of a mask of signals, as "0000000000004002"."""
    bits = int(mask or "0", 16)
    out = []
    for number in range(1, 65):
        if bits >> (number - 1) & 1:
            try:
                out.append(signal.Signals(number).name)
            except ValueError:
                out.append(f"signal {number}")
    return tuple(out)


def numbers_of(text: str) -> tuple[int, ...]:
    """The numbers of a list as "0-3,8"."""
    out: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        out.extend(range(int(first), int(last or first) + 1))
    return tuple(out)


def semaphores_of(maps: str, memory: Memory) -> tuple[Semaphore, ...]:
    """The named semaphores among a process's mappings."""
    found = {}
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith("/dev/shm/sem."):
            name, address = words[5].removesuffix(" (deleted)"), int(words[0].partition("-")[0], 16)
            data = memory(address, 8)  # glibc keeps the value in the low half, those that wait in the high one
            value, waiters = struct.unpack("<II", data) if len(data) == 8 else (-1, -1)
            found[address] = Semaphore(Path(name).name, int(words[4]), address, value, waiters)
    return tuple(found.values())


# --- Reading ----------------------------------------------------------------------------------------------------------
def memory_of(pid: int) -> Memory:
    """A reader of a process's memory, which reads nothing where that is not allowed."""

    def read(address: int, size: int) -> bytes:
        try:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
                return os.pread(file.fileno(), size, address)
        except (OSError, OverflowError, ValueError):
            return b""

    return read


def first_look(pid: int) -> FirstLook | None:
    """What is to be compared with a second look; None = the process is gone."""
    look = FirstLook(pid, _started(pid))
    memory = memory_of(pid)
    for tid in _tasks(pid)[:MOST_THREADS]:
        if (seen := thread_look(pid, tid, memory)) is not None:
            look.threads[tid] = seen
    return look if look.threads else None


def thread_look(pid: int, tid: int, memory: Memory, unseen: Unseen | None = None) -> ThreadLook | None:
    """What a thread does now; None = it is gone."""
    place = f"/proc/{pid}/task/{tid}"
    stat, status = _read(f"{place}/stat", None, ""), _read(f"{place}/status", None, "")
    if not stat or not status:
        return None
    (name, fields), known = stat_of(stat), status_of(status)
    exact = _read(f"{place}/schedstat", None, "")
    cpu = int(exact.split()[0]) / 1e9 if exact else (int(fields[11]) + int(fields[12])) / _TICK
    switches = int(known.get("voluntary_ctxt_switches", "0"))
    line = _read(f"{place}/syscall", unseen, "system calls")
    call = decoded(line, memory, _MACHINE) if line else None
    return ThreadLook(fields[0], cpu, int(fields[12]), switches, call, known | {"Name": name})


def read_process(pid: int, before: FirstLook | None) -> SeenProcess | None:
    """A process with all that may be read of it; None = it is gone. before: its first look."""
    unseen = Unseen()
    stat, status = _read(f"/proc/{pid}/stat", None, ""), _read(f"/proc/{pid}/status", None, "")
    if not stat or not status:
        return None
    name, fields = stat_of(stat)
    if before is None or before.started != fields[19]:
        before = FirstLook(pid)
    known = status_of(status)
    memory = memory_of(pid)
    if not known.get("Kthread", "0").startswith("1") and fields[0] not in "ZX" and not _memory_allowed(pid):
        unseen.add("memory (poll's descriptors, the values of semaphores, owners of mutexes)", "ptrace is not allowed")
    maps = _read(f"/proc/{pid}/maps", unseen, "memory mappings") or ""
    ended = fields[0] in "ZX"
    return SeenProcess(
        pid=pid,
        ppid=int(fields[1]),
        name=name,
        command=_command(pid),
        state=fields[0],
        started=born(fields),
        ended=ended,
        exit_code=int(fields[49]) if ended and len(fields) > 49 else -1,
        uid=int(known.get("Uid", "-1").split()[0]),
        threads=tuple(_threads(pid, before, memory, unseen)),
        descriptors=tuple(read_descriptors(pid, unseen.because)),
        semaphores=semaphores_of(maps, memory),
        children=tuple(children_of(pid)),
        ignored=signals_of(known.get("SigIgn", "")),
        caught=signals_of(known.get("SigCgt", "")),
        pending=signals_of(known.get("ShdPnd", "")),
        memory={key: int(known[key].split()[0]) * 1024 for key in _MEMORY if key in known},
        limits=_limits(pid),
        maps=len(maps.splitlines()) if maps else -1,
        oom_score=int(_read(f"/proc/{pid}/oom_score", None, "") or -1),
        cpus=numbers_of(known.get("Cpus_allowed_list", "")),
        cgroups=tuple((_read(f"/proc/{pid}/cgroup", None, "") or "").split("\n")[:-1]),
        tracer=int(known.get("TracerPid", "0")),
        not_seen=() if ended else unseen.all(),
    )


def _threads(pid: int, before: FirstLook, memory: Memory, unseen: Unseen) -> Iterable[SeenThread]:
    tids = _tasks(pid)
    if len(tids) > MOST_THREADS:
        unseen.add(f"{len(tids) - MOST_THREADS} of {len(tids)} threads", f"only the first {MOST_THREADS} are read")
    for tid in tids[:MOST_THREADS]:
        place, now = f"/proc/{pid}/task/{tid}", thread_look(pid, tid, memory, unseen)
        if now is None:
            continue  # it has ended meanwhile
        then = before.threads.get(tid, now)
        asleep = _read(f"{place}/wchan", unseen, "the kernel function that threads wait in")
        if asleep == "0" and now.state in "SD":
            unseen.add(
                "the kernel function that threads wait in", "hidden (ptrace is forbidden here, or by the kernel)"
            )
        yield SeenThread(
            tid=tid,
            name=now.known["Name"],
            state=(then.state, now.state),
            cpu=(then.cpu, now.cpu),
            switches=(then.switches, now.switches),
            wchan=_wchan(asleep),
            syscall=now.call,
            syscall_before=then.call,
            blocked=signals_of(now.known.get("SigBlk", "")),
            pending=signals_of(now.known.get("SigPnd", "")),
            owner=_owner(now.call, memory),
            idle=_idle(f"{place}/sched", unseen),
        )


def _idle(path: str, unseen: Unseen) -> float:
    """Seconds since a thread ran last, by the scheduler's clock, which this thread's own entry tells; -1 = unknown."""
    its = _ran_at(_read(path, unseen, "when threads ran last"))
    now = _ran_at(_read("/proc/thread-self/sched", None, ""))
    return max(0.0, (now - its) / 1e3) if its > 0 and now > 0 else -1.0


def _ran_at(text: str | None) -> float:
    found = re.search(r"^se\.exec_start\s*:\s*([\d.]+)", text or "", re.MULTILINE)
    return float(found[1]) if found else -1.0


def _owner(call: Syscall | None, memory: Memory) -> int:
    """The thread that a glibc mutex names as its owner, which stands 8 bytes behind the futex; -1 = none."""
    if call is None or not waits_for_mutex(call):
        return -1
    data = memory(call.address + 8, 4)
    owner = int.from_bytes(data, "little") if len(data) == 4 else 0
    return owner if 0 < owner < 1 << 22 else -1


def _wchan(text: str | None) -> str:
    return "" if text in (None, "0") else re.sub(r"\.constprop.*|\.isra.*", "", text or "")


def _memory_allowed(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0):
            return True
    except OSError:
        return False


def _command(pid: int) -> tuple[str, ...]:
    words = (_read(f"/proc/{pid}/cmdline", None, "") or "").split("\0")
    return tuple(words[:-1])[:64]


def _limits(pid: int) -> dict[str, int]:
    """The soft limits that are not infinite."""
    out = {}
    for line in (_read(f"/proc/{pid}/limits", None, "") or "").splitlines():
        for start, name in _LIMITS.items():
            if line.startswith(start) and line[26:].split()[0].isdecimal():
                out[name] = int(line[26:].split()[0])
    return out


def _started(pid: int) -> str:
    stat = _read(f"/proc/{pid}/stat", None, "")
    return stat_of(stat)[1][19] if stat else ""


def _tasks(pid: int) -> list[int]:
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return []


def _read(path: str, unseen: Unseen | None, what: str) -> str | None:
    """A file of /proc; None if it is gone or may not be read, which `unseen` is told as `what`."""
    try:
        with open(path, "rb", buffering=0) as file:
            return _whole(file.read).decode(errors="backslashreplace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        if unseen is not None:
            unseen.because(what, error)
        return None


def _whole(read: Callable[[int], bytes | None]) -> bytes:
    """All of a file of /proc, whose size is not known; at most 16 MiB."""
    text = b""
    while len(text) < 1 << 24 and (part := read(1 << 16)):
        text += part
    return text
