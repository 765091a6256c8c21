"""The waits of threads: the wait of each thread, and the processes that could end it, across the kernel's objects.

Interface: `waits(evidence)` -> (pid, tid) -> `KernelWait`. Pure: it reads evidence, and no process.

Rules of use: a holder is a process that could end the wait. For a file lock it is the process that holds it. A pipe or
a semaphore may have several: then `certain` is False, because the kernel does not know which of them will.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from minidl.hang.evidence.model import (
    BACKLOG,
    Descriptor,
    FileLock,
    RunEvidence,
    SeenProcess,
    SeenThread,
    Semaphore,
    Syscall,
)
from minidl.hang.evidence.syscalls import is_private
from minidl.hang.limits import POLLED

BUSY: Final = 0.25
"""A thread with at least this share of a CPU computes; below, it only wakes from time to time."""


class Blocked(enum.Enum):
    """The kinds of a thread's wait or activity."""

    COMPUTES = "computes"
    READY = "is ready to run but gets little CPU time"
    MOVES = "runs from time to time"
    SLEEPS = "sleeps"
    STOPPED = "is stopped by a signal"
    TRACED = "is stopped by a debugger"
    UNINTERRUPTIBLE = "is in an uninterruptible sleep"
    ENDED = "has ended"
    FILE_LOCK = "waits for a file lock"
    PIPE_READ = "waits for data in a pipe"
    PIPE_WRITE = "waits for room in a pipe"
    FIFO = "waits for the other end of a FIFO"
    SOCKET = "waits at a socket"
    SEMAPHORE = "waits for a semaphore that processes share"
    MUTEX = "waits for a mutex"
    FUTEX = "waits for a lock or a condition of its own process"
    CHILD = "waits for a child process"
    EVENT = "waits for an event"
    FILE = "waits for a file"
    TERMINAL = "waits for input"
    SIGNAL = "waits for a signal"
    OTHER = "waits in the kernel"
    UNKNOWN = "can't be seen"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process or thread that could end a wait. tid: 0 = the process as a whole. why: how that is known.

    listens: it has not accepted the connection yet. inherited: another process took the lock, and passed it on.
    """

    pid: int
    tid: int = 0
    why: str = ""
    listens: bool = False
    inherited: bool = False


@dataclass(frozen=True, slots=True)
class KernelWait:
    """The wait of a thread. words: for a sentence, after "it is"; target: the name of the object, "" = none.

    holders: could end it. certain: one of them must. bounded: the wait has a timeout, and will end by itself.
    """

    kind: Blocked
    words: str
    target: str = ""
    holders: tuple[Holder, ...] = ()
    certain: bool = False
    bounded: bool = False


def waits(evidence: RunEvidence) -> dict[tuple[int, int], KernelWait]:
    """The wait of each thread in the evidence."""
    ends = _Ends(evidence)
    found = (_Waiting(process, thread, evidence, ends) for process in evidence.processes for thread in process.threads)
    return {(one.process.pid, one.thread.tid): _wait(one) for one in found}


class _Ends:
    """Which processes have an object: by its inode."""

    def __init__(self, evidence: RunEvidence) -> None:
        self.pipes: dict[tuple[int, str], dict[int, None]] = defaultdict(dict)  # of a pipe's inode and end, "r" or "w"
        self.sockets: dict[int, dict[int, None]] = defaultdict(dict)
        self.semaphores: dict[int, dict[int, None]] = defaultdict(dict)
        self.keepers: dict[tuple[int, int], list[tuple[int, Descriptor]]] = defaultdict(list)  # of a locked open file
        for process in evidence.processes:
            for one in process.descriptors:
                self._take(process.pid, one)
            for semaphore in process.semaphores:
                self.semaphores[semaphore.inode][process.pid] = None

    def _take(self, pid: int, one: Descriptor) -> None:
        if one.kind in ("pipe", "fifo"):
            for end in one.mode:
                self.pipes[one.inode, end][pid] = None
        elif one.kind == "socket":
            self.sockets[one.inode][pid] = None
        if one.locks:
            self.keepers[one.device, one.inode].append((pid, one))


class _Waiting(NamedTuple):
    """A thread whose wait is to be found, with all evidence."""

    process: SeenProcess
    thread: SeenThread
    evidence: RunEvidence
    ends: _Ends

    @property
    def call(self) -> Syscall:
        return self.thread.call

    @property
    def bounded(self) -> bool:
        return self.call.timeout >= 0

    @property
    def files(self) -> list[Descriptor]:
        """The descriptors that it waits at; of an epoll those that this watches."""
        found = self._known(self.call.fds)
        if self.call.name in _POLLS and found and found[0].kind == "epoll":
            return self._known(found[0].watched) or found
        return found

    def _known(self, fds: Iterable[int]) -> list[Descriptor]:
        return [one for fd in fds if (one := self.process.descriptor(fd)) is not None]


_BY_STATE: Final = {"T": Blocked.STOPPED, "t": Blocked.TRACED, "Z": Blocked.ENDED, "X": Blocked.ENDED}


def _wait(at: _Waiting) -> KernelWait:
    thread = at.thread
    if (kind := _BY_STATE.get(thread.state[1])) is not None:
        return KernelWait(kind, kind.value.removeprefix("is "))
    if thread.state == ("D", "D") and thread.used == 0 and thread.switches[0] == thread.switches[1]:
        where = f", in the kernel's {thread.wchan}" if thread.wchan else ""
        named = (f"{one.target} ({one.about})" if one.about else one.target for one in at.files)
        what = next((f", in {at.call.name} of {text}" for text in named), f" ({at.call.words})" * bool(at.call.words))
        return KernelWait(Blocked.UNINTERRUPTIBLE, f"in an uninterruptible sleep{what}{where}")
    return _at_cpu(at) or _in_call(at)


def _at_cpu(at: _Waiting) -> KernelWait | None:
    """The activity of a thread that runs, wants to run or ran between the looks; None = it was in one call."""
    thread, interval = at.thread, at.evidence.interval
    share = thread.used / interval if interval else 0.0
    if share >= BUSY:
        return KernelWait(Blocked.COMPUTES, f"computing ({share:.0%} of a CPU)")
    if thread.state == ("R", "R"):
        return KernelWait(Blocked.READY, f"ready to run, but gets only {share:.0%} of a CPU")
    if thread.slept or _same_call(thread):
        return None
    if thread.syscall is None and thread.wchan and "R" not in thread.state:  # it may poll: what it waits in now
        return replace(_by_function(thread), bounded=True)
    return KernelWait(Blocked.MOVES, "running from time to time", bounded=True)


def _same_call(thread: SeenThread) -> bool:
    now, then = thread.syscall, thread.syscall_before
    if now is None or then is None:
        return False
    return (now.name, now.fds, now.address) == (then.name, then.fds, then.address)


# --- By the system call -----------------------------------------------------------------------------------------------
_WRITES: Final = frozenset(("write", "writev", "pwrite64", "sendto", "sendmsg", "connect", "sendfile"))
_POLLS: Final = frozenset(("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2"))

_ASKS_FOR_LOCK: Final = re.compile(r"(?<![a-z])lock|Lock|acquire|busy|BlockingIO|FileExists")

POLL: Final = 1.0
"""Seconds: a thread with sleeps up to this length may poll."""


def _in_call(at: _Waiting) -> KernelWait:
    if not at.call.name:
        return _by_lock_table(at) or _by_function(at.thread)
    handler = _CALLS.get(at.call.name, _at_descriptors)
    return (_at_descriptors if handler is _at_file_lock and not at.call.words else handler)(at)


def _for_child(at: _Waiting) -> KernelWait:
    children = (at.call.target,) if at.call.target > 0 else at.process.children
    holders = tuple(Holder(pid, why="is its child") for pid in children)
    return KernelWait(Blocked.CHILD, f"waiting {at.call.words}", holders=holders, certain=at.call.target > 0)


def _opening(at: _Waiting) -> KernelWait:
    named = at.call.words.removeprefix("opens ")
    if at.thread.wchan in ("wait_for_partner", "fifo_open"):
        return KernelWait(Blocked.FIFO, f"opening {named}, a FIFO whose other end no process has opened", named)
    return KernelWait(Blocked.FILE, f"opening {named}", named)


def _for_signal(at: _Waiting) -> KernelWait:
    return KernelWait(Blocked.SIGNAL, f"waiting for a signal ({at.call.name})")


def _asleep(at: _Waiting) -> KernelWait:
    """A sleep; or a poll for a file lock that another process holds, for a lock file that exists.

    SQLite waits like this: its C code requests a POSIX lock repeatedly, and the kernel knows of no wait. In Python,
    the code that sleeps tells by its names that it asks for a lock.
    """
    stack = at.thread.stack or ()
    in_c = bool(stack) and bool(stack[0].source) and "sleep" not in stack[0].source
    asks = in_c or any(_ASKS_FOR_LOCK.search(frame.function + frame.source) for frame in stack[:2])
    for file in at.process.descriptors if asks and 0 <= at.call.timeout <= POLL else ():
        held = [one for one in _locks_of(at, file) if one.mode == "WRITE" and (one.kind == "POSIX" or not in_c)]
        pids = dict.fromkeys(one.pid for one in held)
        if pids and at.process.pid not in pids:
            why = f"holds it ({held[0].kind} WRITE in /proc/locks)"
            holders = tuple(Holder(pid, why=why) for pid in pids if pid > 0)
            doing = f"polling for the lock of {file.target}" + " (its C code sleeps)" * in_c
            return KernelWait(Blocked.FILE_LOCK, doing, file.target, holders, len(holders) == 1, True)
        if file.fd < 0 and not pids:
            doing = f"polling until {file.target} is deleted" + f": {file.about}" * bool(file.about)
            return KernelWait(Blocked.FILE_LOCK, doing, file.target, bounded=True)
    words = f"asleep ({at.call.words})" if at.call.words else "asleep"
    return KernelWait(Blocked.SLEEPS, words, bounded=True)


# --- Locks and semaphores ---------------------------------------------------------------------------------------------
def _at_futex(at: _Waiting) -> KernelWait:
    process, thread, address = at.process, at.thread, at.call.address
    if (semaphore := semaphore_at(process, address)) is not None:
        return _at_semaphore(at, semaphore)
    if thread.owner > 0:
        return _at_mutex(at)
    same = sum(one is not thread and one.call.address == address for one in process.threads if one.syscall)
    crowd = f", as do {same} more of its threads" if same else ""
    words = f"waiting for a lock or a condition of its own process{crowd}{_more(at)}"
    return KernelWait(Blocked.FUTEX, words, f"futex:{process.pid}:{address:x}", bounded=at.bounded)


def _more(at: _Waiting) -> str:
    """How long a wait lasts at most, if that is longer than a poll."""
    return f" ({at.call.timeout:.0f} s more at most)" if at.call.timeout > POLLED else ""


def _at_semaphore(at: _Waiting, semaphore: Semaphore) -> KernelWait:
    others = [pid for pid in at.ends.semaphores[semaphore.inode] if pid != at.process.pid]
    value = f", whose value is {semaphore.value}" if semaphore.value >= 0 else ""
    shared = f"shared with {len(others) or 'no'} other process{'' if len(others) == 1 else 'es'}"
    words = f"waiting for the semaphore {semaphore.name}{value}, {shared}{_more(at)}"
    holders = tuple(Holder(pid, why="shares it") for pid in others)
    return KernelWait(Blocked.SEMAPHORE, words, f"semaphore:{semaphore.inode}", holders, bounded=at.bounded)


def _at_mutex(at: _Waiting) -> KernelWait:
    process, owner = at.process, at.thread.owner
    holders: tuple[Holder, ...] = ()
    if owner == at.thread.tid:
        words = "waiting for a mutex that it holds itself"
    elif process.thread(owner) is not None:
        holders = (Holder(process.pid, owner, "the mutex names it as its owner"),)
        words = f"waiting for a mutex that its thread {owner} holds"
    else:
        elsewhere = next((p for p in at.evidence.processes if p.thread(owner) is not None), None)
        whose = f"a thread of process {elsewhere.pid}" if elsewhere is not None else "a thread that has ended"
        words = f"waiting for a mutex that was locked at the fork: its owner, thread {owner}, is {whose}"
        if not is_private(at.call):
            words = f"waiting for a mutex shared between processes: its owner, thread {owner}, is {whose}"
            holders = (Holder(elsewhere.pid, owner, "the mutex names it as its owner"),) if elsewhere else ()
    return KernelWait(Blocked.MUTEX, words, f"mutex:{process.pid}:{at.call.address:x}", holders, True)


def semaphore_at(process: SeenProcess, address: int) -> Semaphore | None:
    """The named semaphore that a futex belongs to."""
    return next((one for one in process.semaphores if one.address <= address < one.address + 32), None)


def _at_file_lock(at: _Waiting) -> KernelWait:
    file = at.process.descriptor(at.call.fds[0])
    if file is None:
        return KernelWait(Blocked.FILE_LOCK, f"waiting in {at.call.name}", certain=True)
    holders = tuple(_lock_holders(at, file))
    words = f"waiting in {at.call.name}{' for a lock' * (at.call.name == 'fcntl')} on {file.target}"
    known = all(one.pid != at.process.pid and at.evidence.process(one.pid) for one in holders)
    return KernelWait(Blocked.FILE_LOCK, words, file.target, holders, bool(holders) and known)


def _locks_of(at: _Waiting, file: Descriptor) -> list[FileLock]:
    """The locks that are held on a file."""
    place = file.device, file.inode
    return [one for one in at.evidence.locks if (one.device, one.inode) == place and not one.waits]


def _lock_holders(at: _Waiting, file: Descriptor) -> Iterator[Holder]:
    """The holders of a file's lock. A flock lock belongs to an open file that forks share: its taker may have ended.

    The waiter itself holds the lock by another open file if it took the lock, or if no other process has that file.
    """
    held, own = _locks_of(at, file), at.process.pid
    kept = at.ends.keepers[file.device, file.inode] if held else []
    takers = [one.pid for one in held if one.kind != "POSIX" and one.pid > 0]
    others, locks = [pid for pid, _ in kept if pid != own], at.call.name == "flock"
    mine = locks and any(pid == own and one.fd != file.fd and "FLOCK" in str(one.locks) for pid, one in kept)
    keepers = [own, *others] if mine and (own in takers or not others) else others
    for pid in keepers:
        inherited = bool(takers) and pid not in takers
        ended = "" if takers and at.evidence.process(takers[0]) else ", which has ended,"
        passed = f", which process {takers[0]}{ended} took and passed on" if inherited else ""
        why = f"has the open file that holds it ({held[0].kind} {held[0].mode}){passed}"
        yield Holder(pid, why=why, inherited=inherited)
    passed_on = {one.pid for one in at.evidence.processes if one.descriptors} | (set(takers) if keepers else set())
    for one in held:
        has_it = one.kind == "POSIX" or one.pid not in passed_on
        if has_it and one.pid > 0 and one.pid not in (*keepers, own):
            yield Holder(one.pid, why=f"holds it ({one.kind} {one.mode} in /proc/locks)")


def _by_lock_table(at: _Waiting) -> KernelWait | None:
    """The file lock that a process waits for if its system calls can't be read: every user may read /proc/locks."""
    mine = next((one for one in at.evidence.locks if one.waits and one.pid == at.process.pid), None)
    if mine is None or at.thread.tid != at.process.pid:
        return None
    held = [one for one in at.evidence.locks if one.number == mine.number and not one.waits]
    holders = tuple(Holder(one.pid, why=f"holds it ({one.kind} {one.mode} in /proc/locks)") for one in held)
    words = f"waiting for a file lock ({mine.kind}, inode {mine.inode})"
    certain = bool(holders) and mine.kind == "POSIX"  # a process may have passed an open file's lock on
    return KernelWait(Blocked.FILE_LOCK, words, f"inode {mine.inode}", holders, certain)


# --- Descriptors ------------------------------------------------------------------------------------------------------
def _at_descriptors(at: _Waiting) -> KernelWait:
    """A call at one descriptor or several, or at none that is known."""
    call, files = at.call, at.files
    if call.name in _POLLS and not call.fds and at.bounded:
        return KernelWait(Blocked.SLEEPS, f"asleep in {call.name} ({call.timeout:g} s)", bounded=True)
    parts = [_at_descriptor(at, one) for one in files]
    if not parts:
        about = f" ({call.words})" if call.words else ""
        return KernelWait(Blocked.OTHER, f"in {call.name}{about}", bounded=at.bounded)
    if call.name not in _POLLS or len(parts) == 1:
        return replace(parts[0], bounded=at.bounded)
    holders = tuple(dict.fromkeys(holder for part in parts for holder in part.holders))
    words = f"waiting for one of {len(parts)} descriptors"
    return KernelWait(parts[0].kind, words, holders=holders, bounded=at.bounded)


_TIMER: Final = re.compile(r"it_value \((\d+), (\d+)\)")
"""The seconds and nanoseconds after which a timerfd ticks."""


def _at_descriptor(at: _Waiting, one: Descriptor) -> KernelWait:
    if one.kind in ("pipe", "fifo"):
        return _at_pipe(at, one)
    if one.kind == "socket":
        return _at_socket(at, one)
    if one.kind == "device" and one.target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
        return KernelWait(Blocked.TERMINAL, f"waiting for input at {one.target}", one.target)
    if one.kind == "eventfd":
        return KernelWait(Blocked.EVENT, f"waiting for an event ({one.about})", one.target)
    if one.kind == "timerfd" and (left := _TIMER.match(one.about)) and left.groups() != ("0", "0"):  # it is set
        return KernelWait(Blocked.MOVES, f"waiting for its timer ({left[1]} s more)")
    if one.kind == "pidfd":
        pid = int(one.about.split()[-1]) if one.about.split()[-1:] else 0
        return KernelWait(Blocked.CHILD, f"waiting for process {pid}", one.target, (Holder(pid),), True)
    kind = Blocked.FILE if one.kind in ("file", "directory", "device", "shm") else Blocked.OTHER
    return KernelWait(kind, f"in {at.call.name} of {one.target}", one.target)


_CONNECTING: Final = {"accept": "waiting for a connection", "connect": "waiting to connect to a server"}


def _at_socket(at: _Waiting, one: Descriptor) -> KernelWait:
    backlog = one.about == BACKLOG
    why = "listens, and has not accepted the connection" if backlog else "has the socket's other end"
    peers = at.ends.sockets.get(one.peer, ()) if one.peer else ()
    doing = "waiting to write to a socket" if at.call.name in _WRITES else "waiting for data at a socket"
    doing = _CONNECTING.get(at.call.name.removesuffix("4"), doing)
    doing += ", in a connection that was not accepted yet" if backlog else ""
    return KernelWait(Blocked.SOCKET, doing, one.target, tuple(Holder(pid, why=why, listens=backlog) for pid in peers))


def _at_pipe(at: _Waiting, one: Descriptor) -> KernelWait:
    writes = at.call.name in _WRITES
    kind, what, end, mode = (
        (Blocked.PIPE_WRITE, "room", "reading", "r") if writes else (Blocked.PIPE_READ, "data", "writing", "w")
    )
    have_it = at.ends.pipes[one.inode, mode]
    holders = tuple(Holder(pid, why=f"has the pipe's {end} end") for pid in have_it if pid != at.process.pid)
    doing = f"waiting for {what} in {one.target if one.kind == 'fifo' else f'pipe {one.inode}'}"
    if (one.fd, writes) == (0, False):
        doing += " (its standard input)"
    if not holders:
        others = "only its own process has" if have_it else "none of these processes has"
        doing += f", whose {end} end {others}"
    return KernelWait(kind, doing, f"pipe:{one.inode}", holders)


_CALLS: Final[dict[str, Callable[[_Waiting], KernelWait]]] = {
    "futex": _at_futex,
    **dict.fromkeys(("nanosleep", "clock_nanosleep"), _asleep),
    **dict.fromkeys(("wait4", "waitid"), _for_child),
    **dict.fromkeys(("flock", "fcntl"), _at_file_lock),
    **dict.fromkeys(("open", "openat"), _opening),
    **dict.fromkeys(("pause", "rt_sigsuspend", "rt_sigtimedwait"), _for_signal),
}
"""What a thread waits for, by its system call; any other call waits at its descriptors."""


# --- By the kernel's function -----------------------------------------------------------------------------------------
_FUNCTIONS: Final = (
    ("futex", Blocked.FUTEX, "waiting for a lock or a condition"),
    ("nanosleep", Blocked.SLEEPS, "asleep"),
    ("pipe_read", Blocked.PIPE_READ, "waiting for data in a pipe"),
    ("pipe_write", Blocked.PIPE_WRITE, "waiting for room in a pipe"),
    ("wait_for_partner", Blocked.FIFO, "opening a FIFO whose other end no process has opened"),
    ("locks_lock_inode_wait|flock|fcntl_setlk", Blocked.FILE_LOCK, "waiting for a file lock"),
    ("do_wait", Blocked.CHILD, "waiting for a child process"),
    ("skb_wait|unix_stream", Blocked.SOCKET, "waiting at a socket"),
    ("poll_schedule", Blocked.OTHER, "waiting for a descriptor (poll)"),
    ("ep_poll", Blocked.OTHER, "waiting for a descriptor (epoll)"),
)
"""Parts of the names of the kernel's functions, what a thread waits for in one of them, and the words."""


def _by_function(thread: SeenThread) -> KernelWait:
    """The wait by the kernel's function, if the system call can't be read."""
    name = thread.wchan
    if not name:
        return KernelWait(Blocked.UNKNOWN, "asleep")
    for part, kind, words in _FUNCTIONS:
        if re.search(part, name):
            return KernelWait(kind, f"{words} (the kernel's {name})")
    return KernelWait(Blocked.OTHER, f"asleep in the kernel's {name}")
