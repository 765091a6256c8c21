"""The Python stacks of a recorded process, written by itself when the watchdog asks, even while a call keeps the GIL.

Interface: `answer(directory, describe)` prepares this process; `at_a_crash()` has it also write its stack when a fault
(SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) ends it; `no_longer()` ends both.

The watchdog sends a real-time signal, and faulthandler's handler, which is C and takes no lock, writes the stacks of
all threads to a file in the trace's folder. The signal is one that nothing in this process uses. The kernel takes up
again some of the system calls that it interrupts; poll, select, epoll_wait and sleeps end with EINTR, so that the
watchdog does not send it to a process that may be in one (see `minidl.watch.dumps`). Before faulthandler takes the
signal it is ignored, so that one that comes while the interpreter ends, which gives the signal back, kills nothing.

After a fault, faulthandler gives the signal to the handler that was there before. torch's workers have one, which
says what a SIGBUS means: a worker calls `at_a_crash` once torch has set it. A program that uses faulthandler itself
keeps it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from minidl.process_stat import status_of
from minidl.tracefile.format import STACKS_SUFFIX


@dataclass
class _Answering:
    pid: int
    signum: int
    file: IO[bytes]
    handlers: tuple[int, ...] = ()  # of the faults, once it writes its stack at one


_answering: _Answering | None = None


def answer(directory: str, describe: Callable[..., Any]) -> None:
    """Write this process's stacks when asked to, and describe how to ask. Does nothing if it does already, or can't.

    A forked child that calls it gets a file of its own.
    """
    global _answering
    inherited = _answering
    if inherited is not None and inherited.pid == os.getpid():
        return
    if inherited is not None:
        _leave_faults(inherited)  # what is written would go into its parent's file
    signum = free_signal() if inherited is None else inherited.signum
    if signum is None:
        return
    name = f"{os.getpid()}-{time.monotonic_ns()}{STACKS_SUFFIX}"
    try:
        file = open(os.path.join(directory, name), "ab", buffering=0)  # noqa: SIM115  # it stays open
        try:
            if inherited is None:
                signal.signal(signum, signal.SIG_IGN)  # ValueError in another thread than the main one
            faulthandler.register(signum, file, all_threads=True, chain=False)
        except (ValueError, RuntimeError, OSError):
            file.close()
            os.unlink(os.path.join(directory, name))
            return
    except OSError:  # no descriptor, no room: the stacks are not to be had, and the run goes on
        return
    _answering = _Answering(os.getpid(), signum, file)
    describe("stacks", signal=signum, fd=file.fileno(), file=name)


def at_a_crash() -> None:
    """Write this process's stack into its file when a fault ends it, unless the program has faulthandler do so."""
    if _answering is not None and _answering.pid == os.getpid() and not faulthandler.is_enabled():
        with contextlib.suppress(OSError, RuntimeError):
            faulthandler.enable(_answering.file, all_threads=True)
            _answering.handlers = _handlers()


def no_longer() -> None:
    """Give the signal back and delete the file. To be called when no doctor asks any more."""
    global _answering
    if _answering is None or _answering.pid != os.getpid():
        return
    was, _answering = _answering, None
    faulthandler.unregister(was.signum)
    _leave_faults(was)
    with contextlib.suppress(ValueError):  # in another thread than the main one it stays ignored
        signal.signal(was.signum, signal.SIG_DFL)
    was.file.close()
    with contextlib.suppress(OSError):
        os.unlink(was.file.name)


def _leave_faults(was: _Answering) -> None:
    """Give the faults back. faulthandler would also take them from a handler that another library has set since."""
    if was.handlers and _handlers() == was.handlers:
        faulthandler.disable()
    elif was.handlers:
        faulthandler.enable(2)  # that library may hand a fault on


_FAULTS: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_SIGACTION_BYTES: Final = 256
"""More than the C library's `struct sigaction` has, which begins with the handler."""


def _handlers() -> tuple[int, ...]:
    """The addresses of the C functions that handle the faults now."""
    found, held = [], ctypes.create_string_buffer(_SIGACTION_BYTES)
    for signum in _FAULTS:
        ctypes.CDLL(None).sigaction(int(signum), None, held)
        found.append(int.from_bytes(held.raw[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder))
    return tuple(found)


def free_signal() -> int | None:
    """Return a real-time signal that this process neither handles nor ignores nor blocks; None if there is none.

    The middle of the range: libraries take the ends.
    """
    masks = _masks(Path("/proc/self/status"))
    if masks is None:
        return None
    first, last = int(signal.SIGRTMIN), int(signal.SIGRTMAX)
    middle = (first + last) // 2
    for signum in [*range(middle, last), *range(first, middle)]:
        if not masks >> (signum - 1) & 1 and signal.getsignal(signum) is signal.SIG_DFL:
            return int(signum)
    return None


def _masks(status: Path) -> int | None:
    """Return the signals that are handled, ignored or blocked, as one mask; None if that can't be read."""
    try:
        lines = status_of(status.read_text())
        return int(lines["SigCgt"], 16) | int(lines["SigIgn"], 16) | int(lines["SigBlk"], 16)
    except (OSError, ValueError, KeyError):
        return None
