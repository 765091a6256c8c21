"""Ask processes for their Python stacks by a signal (see `record.stack_dumps`), and read what they write.

Interface: `Asked(directory)` knows which processes answer; `stacks(pids)` asks them. `parsed(text)` reads a dump.
`crash_in(file)` is what a process wrote into its file when a fault ended it.

Rules of use: the signal is handled in the process's main thread, and ends some of the calls that this may be in: poll,
select, epoll_wait, a sleep, a wait with a timeout. Python goes on with them; C code gets EINTR, and may take that for
an error. So a process is asked only if its main thread has not given up the CPU by itself for QUIET_SECONDS, up to the
moment of the signal, and computes, or is in a call that the kernel takes up again after the signal (`interrupts`).
What it is in is read in /proc/PID/syscall: where that may not be read, no process is asked.

A process is also asked only if it handles the signal, and its descriptor is the file that it named: a program that the
process has turned into by exec would die of the signal, and a descriptor that was closed may be another file by now.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from minidl.hang.evidence.model import Frame, Syscall
from minidl.hang.evidence.proc import ProcFiles
from minidl.hang.evidence.processes import ThreadLook, thread_look
from minidl.hang.evidence.stacks import Stack, Stacks, frame_at
from minidl.hang.evidence.syscalls import FOR_EVER
from minidl.process_stat import signal_if
from minidl.tracefile.format import SIDE_SUFFIX, parts_of
from minidl.tracefile.stack_samples import CodeLine

ANSWER_SECONDS: Final = 3.0
"""The time limit for answers: a process that is stopped, or in an uninterruptible sleep, gives none."""

QUIET_SECONDS: Final = 0.2
"""A process is asked only if its main thread has been in one call, or has computed, for this long."""

_HEAD: Final = re.compile(r"(Current thread|Thread) 0x([0-9a-f]{1,16})(?: \[(.*)\])? \(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(.*)", line (\d{1,9}) in (.*)')
_MOST_BYTES: Final = 1 << 20
_TID_AT: Final = 0x2D0 if platform.machine() == "x86_64" else 0xD0
"""Where glibc's `struct pthread`, which a thread's ident points to, has its number. What is read is checked."""


class Answering(NamedTuple):
    """The way to ask a process. threads: what pthreads calls a thread -> its number and name."""

    pid: int
    signum: int
    fd: int
    file: str
    threads: dict[int, tuple[int, str]]


class DumpedThread(NamedTuple):
    """A thread of a dump. ident: what pthreads calls it; current: the signal ran in it. frames: innermost first."""

    ident: int
    current: bool
    name: str
    frames: tuple[Frame, ...]


def parsed(text: str) -> list[DumpedThread]:
    """Read a dump of faulthandler's; a line that makes no sense is left out."""
    out: list[DumpedThread] = []
    frames: list[Frame] = []
    for line in text.splitlines():
        if head := _HEAD.fullmatch(line):
            frames = []
            out.append(DumpedThread(int(head[2], 16), head[1].startswith("Current"), head[3] or "", ()))
        elif out and (frame := _FRAME.fullmatch(line)):
            file, number = frame[1], int(frame[2])
            frames.append(frame_at(frame[3], file, number, {}))
            out[-1] = out[-1]._replace(frames=tuple(frames))
    return out


class FatalDump(NamedTuple):
    """The dump of a fault that ended a process. stack: of the thread that it came in, outermost frame first."""

    signum: int
    stack: tuple[CodeLine, ...]


_FAULTS: Final = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Floating-point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
    "Aborted": signal.SIGABRT,
}
"""The signals by the words of faulthandler."""


def crash_in(file: Path) -> FatalDump | None:
    """The fault in a file of dumps; None = the process has written none."""
    try:
        _, found, text = file.read_bytes()[-_MOST_BYTES:].decode("utf-8", "replace").rpartition("Fatal Python error: ")
    except OSError:
        return None
    signum = _FAULTS.get(text.partition("\n")[0].strip()) if found else None
    if signum is None:
        return None
    frames = next((thread.frames for thread in parsed(text) if thread.current), ())
    return FatalDump(signum, tuple(CodeLine(one.file, one.line, one.function, one.source) for one in frames[::-1]))


class Asked:
    """The processes of the trace in `directory` that can be asked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def stacks(self, pids: Iterable[int]) -> Stacks:
        """Return the stacks of those processes that answer, by process and by the kernel's number of the thread."""
        known = [(how, _main_thread(how.pid)) for pid in pids if (how := self._how(pid)) is not None]
        time.sleep(QUIET_SECONDS)
        asked = [(how, size) for how, before in known if (size := self._ask(how, before)) >= 0]
        until = time.monotonic() + ANSWER_SECONDS
        dumps = [(how, parsed(_written(self._file(how), size, until))) for how, size in asked]
        return {how.pid: found for how, dump in dumps if (found := _by_tid(dump, how))}

    def _how(self, pid: int) -> Answering | None:
        """Read in the side files of the trace how a process is asked."""
        answering, threads = None, dict[int, tuple[int, str]]()
        names = (path.name.removesuffix(SIDE_SUFFIX) for path in self.directory.glob(f"{pid}-*{SIDE_SUFFIX}"))
        for name in sorted(names, key=parts_of):
            for line in _lines(self.directory / (name + SIDE_SUFFIX)):
                if line.get("kind") == "stacks":
                    with contextlib.suppress(KeyError, TypeError, ValueError):
                        answering = (int(line["signal"]), int(line["fd"]), str(line["file"]))
                elif line.get("kind") == "thread" and type(line.get("ident")) is int:
                    threads[line["ident"]] = (int(line["tid"]), str(line["name"]))
        return None if answering is None else Answering(pid, *answering, threads)

    def _file(self, how: Answering) -> Path:
        return self.directory / os.path.basename(how.file)

    def _ask(self, how: Answering, before: ThreadLook | None) -> int:
        """Ask a process, if that does no harm; return how much its file held before, -1 = it was not asked."""
        try:
            size = self._file(how).stat().st_size
        except OSError:
            return -1
        asked = signal_if(how.pid, how.signum, lambda: _handles(how, self._file(how)) and not interrupts(how, before))
        return size if asked else -1


def interrupts(how: Answering, before: ThreadLook | None) -> bool:
    """Whether the signal might end a call of the process. before: its main thread QUIET_SECONDS ago."""
    now = _main_thread(how.pid)
    if before is None or now is None or before.call is None or now.call is None:
        return True
    blocked = int(now.known.get("SigBlk", "0"), 16) >> (how.signum - 1) & 1  # then another thread would get it
    same = (before.call.name, before.call.args, before.switches) == (now.call.name, now.call.args, now.switches)
    computes = now.call.name == "running" and before.system == now.system  # and does not call poll all the time
    return bool(blocked) or not same or not (computes or _goes_on(how.pid, now.call))


def _goes_on(pid: int, call: Syscall) -> bool:
    """Whether the kernel takes a call up again after a signal that was handled, by signal(7)."""
    if call.name in ("read", "readv", "write", "writev"):  # at a socket it may have a timeout
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{pid}/fd/{call.fds[0]}").startswith("pipe:")
        return False
    return call.name in _TAKEN_UP and call.timeout == FOR_EVER


_TAKEN_UP: Final = frozenset(("futex", "wait4", "waitid", "flock", "fcntl"))


def _main_thread(pid: int) -> ThreadLook | None:
    return thread_look(pid, pid)


def _handles(how: Answering, file: Path) -> bool:
    """Whether the process handles the signal now, and its descriptor is the file still."""
    try:
        there, own = os.stat(f"/proc/{how.pid}/fd/{how.fd}"), file.stat()
    except OSError:
        return False
    caught = int(ProcFiles(how.pid).status().get("SigCgt", "0"), 16)
    return bool(caught >> (how.signum - 1) & 1) and (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


def _written(file: Path, before: int, until: float) -> str:
    """Return what is written behind `before`, once nothing more comes, or at the moment `until`."""
    size, since = before, time.monotonic()
    while time.monotonic() < until:
        time.sleep(0.005)
        try:
            now = file.stat().st_size
        except OSError:
            return ""
        if now != size:
            size, since = now, time.monotonic()
        elif size > before and time.monotonic() - since > 0.05:
            break
    with file.open("rb") as opened:
        opened.seek(before)
        return opened.read(_MOST_BYTES).decode("utf-8", "replace")


def _by_tid(threads: list[DumpedThread], how: Answering) -> dict[int, Stack]:
    """Give the dumped threads their numbers in the kernel; a thread whose number is not to be had is left out."""
    files, out = ProcFiles(how.pid), {}
    tids = set(files.tids())
    for thread in threads:
        tid, name = how.threads.get(thread.ident) or (_tid_of(thread.ident, files, tids), thread.name)
        if not tid and thread.current:
            tid = how.pid  # a signal to a process runs in its first thread
        if tid in tids:
            out[tid] = Stack(thread.frames, name or thread.name)
    return out


def _tid_of(ident: int, files: ProcFiles, tids: set[int]) -> int:
    """Read the kernel's number of a thread where glibc keeps it; 0 where that is none of the process's."""
    tid = int.from_bytes(files.memory(ident + _TID_AT, 4), sys.byteorder)
    return tid if tid in tids else 0


def _lines(path: Path) -> list[dict[str, Any]]:
    out = []
    with contextlib.suppress(OSError):
        for text in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
                out += [line] if isinstance(line, dict) else []
    return out
