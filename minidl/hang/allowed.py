"""`minidl doctor --check`: what this machine lets the doctor see of a process, before there is a hang.

Interface: `allowed()` -> `Allowed` values. It looks at a process that it starts for this, and that is no child of its
own: where only ancestors may look into a process, that is found out.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

from minidl.hang.evidence.collect import collect
from minidl.hang.evidence.model import MEMORY, STACKS, SeenProcess, SeenThread

_TRACING: Final = (
    "run the doctor as root or with CAP_SYS_PTRACE, or allow it: sysctl kernel.yama.ptrace_scope=0; in a container: "
    "docker run --cap-add SYS_PTRACE"
)
_INSTALL: Final = f"pip install py-spy; {_TRACING}"
_KERNEL: Final = "this kernel does not tell it to this user: run the doctor as root"


_FIRST_NAMESPACE: Final = 0xEFFFFFFC
"""The inode of the machine's own namespace of processes (the kernel's PROC_PID_INIT_INO); a container has another."""


class Allowed(NamedTuple):
    """One kind of evidence. there: whether it can be seen; otherwise: how to let the doctor see it.

    own: it is of processes that this user starts here, which most hangs need no more than.
    """

    what: str
    there: bool
    otherwise: str
    own: bool = True

    def line(self) -> str:
        return f"yes  {self.what}" if self.there else f"no   {self.what}: {self.otherwise}"


_KINDS: Final[tuple[tuple[str, Callable[[SeenProcess, SeenThread], bool], str], ...]] = (
    ("Python stacks, by py-spy", lambda process, main: main.stack is not None, _INSTALL),
    ("the system call that a thread is in", lambda process, main: main.syscall is not None, _TRACING),
    ("memory: owners of mutexes, values of semaphores", lambda process, main: not process.why_unseen(MEMORY), _TRACING),
    ("the bytes that a thread has read", lambda process, main: main.read[1] >= 0, _TRACING),
    ("the descriptors of a process", lambda process, main: bool(process.descriptors), _TRACING),
    ("the kernel's function that a thread waits in", lambda process, main: bool(main.wchan), _KERNEL),
    ("when a thread ran last", lambda process, main: main.idle >= 0, _KERNEL),
    ("the holders of file locks", lambda process, main: os.access("/proc/locks", os.R_OK), _KERNEL),
)
"""The kinds of evidence: what it is, whether a sleeping process shows it, and how to let the doctor see it."""

_SLEEPER: Final = """
import os, time
pid = os.fork()
if pid:
    print(pid, flush=True)
else:
    os.close(1)
    time.sleep(60)
"""


def allowed() -> list[Allowed]:
    """What the doctor can see on this machine. Takes about a second. Raises OSError if no process can be started."""
    started = subprocess.run([sys.executable, "-c", _SLEEPER], stdout=subprocess.PIPE, text=True, check=True)
    pid = int(started.stdout)
    try:
        process = collect(pid, interval=0.2).process(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
    main = None if process is None else process.main
    if process is None or main is None:
        raise OSError(f"process {pid}, started to be looked at, has ended: ask again")
    why = process.why_unseen(STACKS)
    found = [Allowed(what, test(process, main), otherwise) for what, test, otherwise in _KINDS]
    found[0] = found[0]._replace(otherwise=f"{why}; {_INSTALL}" if why else _INSTALL)
    return [*found, *_others()]


def _others() -> list[Allowed]:
    """Whether processes of others can be seen, which may hold what one of this user waits for."""
    outside = os.stat("/proc/self/ns/pid").st_ino == _FIRST_NAMESPACE
    return [
        Allowed("processes of other users", os.geteuid() == 0, "run the doctor as root", own=False),
        Allowed("processes outside of this container", outside, "run the doctor on the machine itself", own=False),
    ]
