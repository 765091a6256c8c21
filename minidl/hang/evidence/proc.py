"""The files of /proc: one reader for each, of a process or of one of its threads.

Interface: `ProcFiles(pid)`, or `ProcFiles(pid, tid)` of a thread. `Unseen` collects what could not be read; `numbered`
reads files of "NAME NUMBER" lines. proc(5) describes the files.

Rules of use: it opens files for reading and nothing else. A process that is gone has empty files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import struct
from pathlib import Path
from typing import Final, NamedTuple

from minidl.hang.evidence.model import Semaphore
from minidl.hang.evidence.syscalls import Memory
from minidl.process_stat import ENDED, born, launched, stat_of, status_of

TICK: Final = os.sysconf("SC_CLK_TCK")
_MOST_BYTES: Final = 1 << 24
_LIMITS: Final = {
    "Max open files": "open files",
    "Max file size": "file size",
    "Max address space": "address space",
    "Max processes": "processes",
    "Max locked memory": "locked memory",
}


class Unseen:
    """The list of all that could not be read, each once, with the reason."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def add(self, what: str, why: str) -> None:
        self._found[f"{what}: {why}"] = None

    def because(self, what: str, error: OSError) -> None:
        """Add what an error has hidden."""
        why = (error.strerror or str(error)).lower()
        if error.errno in (errno.EPERM, errno.EACCES):
            why = "not allowed (another user's process, or ptrace is forbidden here)"
        self.add(what, "this kernel does not tell" if error.errno == errno.ENOENT else why)

    def all(self) -> tuple[str, ...]:
        return tuple(self._found)


class Stat(NamedTuple):
    """The file stat. started: in ticks; born: seconds, CLOCK_MONOTONIC; cpu, system: seconds, ticks of CPU time.

    exit_code: a wait status, -1 = it has not ended. minor_faults, major_faults: of pages, without and with a read.
    """

    name: str
    state: str
    ppid: int
    cpu: float
    system: int
    threads: int
    started: str
    born: float
    exit_code: int
    minor_faults: int
    major_faults: int

    @property
    def ended(self) -> bool:
        return self.state in ENDED


class ProcFiles:
    """The files of a process, or of one of its threads. unseen: is told what may not be read."""

    def __init__(self, pid: int, tid: int = 0, unseen: Unseen | None = None) -> None:
        self.pid, self.unseen = pid, Unseen() if unseen is None else unseen
        self.place = f"/proc/{pid}/task/{tid}" if tid else f"/proc/{pid}"

    def text(self, name: str, what: str = "") -> str:
        """A file; "" if it is gone or may not be read. what: its name in `unseen` then, "" = it is not missed."""
        try:
            with open(f"{self.place}/{name}", "rb", buffering=0) as file:
                text = b""
                while len(text) < _MOST_BYTES and (part := file.read(1 << 16)):
                    text += part
                return text.decode(errors="backslashreplace")
        except (FileNotFoundError, ProcessLookupError):
            pass
        except OSError as error:
            if what:
                self.unseen.because(what, error)
        return ""

    def names(self, folder: str) -> list[int]:
        """The numbers of a folder's files, sorted. Raises OSError."""
        return sorted(map(int, os.listdir(f"{self.place}/{folder}")))

    def stat(self) -> Stat | None:
        """The file stat; None if the process is gone."""
        if not (text := self.text("stat")):
            return None
        name, fields = stat_of(text)
        user, system, status = int(fields[11]), int(fields[12]), int(fields[49]) if fields[0] in ENDED else -1
        ids = name, fields[0], int(fields[1])
        faults = int(fields[7]), int(fields[9])
        return Stat(*ids, (user + system) / TICK, system, int(fields[17]), fields[19], born(fields), status, *faults)

    def status(self) -> dict[str, str]:
        return status_of(self.text("status"))

    def tids(self) -> list[int]:
        try:
            return self.names("task")
        except OSError:
            return []

    def command(self) -> tuple[str, ...]:
        return tuple(self.text("cmdline").split("\0")[:-1])[:64]

    def rank(self) -> tuple[int, int]:
        """The number of a job's rank and of its ranks, by the variables that a launcher sets; -1 = it has none."""
        known = dict(one.partition("=")[::2] for one in self.text("environ").split("\0"))
        return launched(known)[:2]

    def cgroups(self) -> list[str]:
        return self.text("cgroup").splitlines()

    def limits(self) -> dict[str, int]:
        """The soft limits that are not infinite."""
        rows = ((line[:25].strip(), line[26:].split()[:1]) for line in self.text("limits").splitlines())
        return {_LIMITS[name]: int(most[0]) for name, most in rows if name in _LIMITS and most[0].isdecimal()}

    def wchan(self) -> str:
        """The kernel's function that a thread waits in; "" = in none, or it is hidden, which `unseen` is told."""
        what = "the kernel function that threads wait in"
        name = self.text("wchan", what)
        if name == "0" and (stat := self.stat()) is not None and stat.state in "SD":
            self.unseen.add(what, "hidden (ptrace is forbidden here, or by the kernel)")
        return re.sub(r"\.constprop.*|\.isra.*|^0$", "", name)

    def cpu_seconds(self) -> float:
        """The CPU time, which schedstat has exactly; -1 = unknown."""
        words = self.text("schedstat").split()
        return int(words[0]) / 1e9 if words else -1.0

    def read_bytes(self) -> int:
        """The bytes that it has read from files and pipes, not from sockets; -1 = unknown."""
        found = re.match(r"rchar: (\d+)", self.text("io"))
        return int(found[1]) if found else -1

    def idle(self) -> float:
        """Seconds since a thread ran last, by the scheduler's clock, which this thread's file tells; -1 = unknown."""
        its, now = self._ran_at("when threads ran last"), _Own()._ran_at("")
        return max(0.0, (now - its) / 1e3) if its > 0 and now > 0 else -1.0

    def _ran_at(self, what: str) -> float:
        found = re.search(r"^se\.exec_start\s*:\s*([\d.]+)", self.text("sched", what), re.MULTILINE)
        return float(found[1]) if found else -1.0

    # --- memory
    def memory_allowed(self) -> bool:
        try:
            with open(f"{self.place}/mem", "rb", buffering=0):
                return True
        except OSError:
            return False

    def memory(self, address: int, size: int) -> bytes:
        """Read the process's memory; nothing where that is not allowed."""
        try:
            with open(f"{self.place}/mem", "rb", buffering=0) as file:
                return os.pread(file.fileno(), size, address)
        except (OSError, OverflowError, ValueError):
            return b""


class _Own(ProcFiles):
    """The files of this thread."""

    def __init__(self) -> None:
        super().__init__(os.getpid())
        self.place = "/proc/thread-self"


# --- Texts ------------------------------------------------------------------------------------------------------------
def signals_of(mask: str) -> tuple[str, ...]:
    """The names of a mask of signals, as "0000000000004002"."""
    bits, known = int(mask or "0", 16), {int(one): one.name for one in signal.Signals}
    return tuple(known.get(number, f"signal {number}") for number in range(1, 65) if bits >> (number - 1) & 1)


def numbers_of(text: str) -> tuple[int, ...]:
    """The numbers of a list as "0-3,8"."""
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return tuple(number for first, _, last in parts for number in range(int(first), int(last or first) + 1))


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


def numbered(path: str | Path) -> dict[str, int]:
    """The lines "NAME NUMBER" of a file, as "MemTotal: 512 kB" or "oom_kill 3"; {} = it can't be read."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def number(path: str | Path) -> int:
    """The number that is all of a file; -1 = unknown."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(path).read_text())
    return -1
