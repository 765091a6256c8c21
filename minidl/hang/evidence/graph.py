"""The graph of waits: the wait of each thread, and the processes that could end it, across the kernel's objects.

Interface: `waits(evidence)` -> (pid, tid) -> `KernelWait`. Pure: it reads evidence, and no process.

Rules of use: a holder is a process that could end the wait. For a file lock it is the process that holds it. A pipe or
a semaphore may have several: then `certain` is False, because the kernel does not know which of them will.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from minidl.hang.evidence.model import BACKLOG, Descriptor, FileLock, RunEvidence, SeenProcess, SeenThread, Semaphore

BUSY: Final = 0.25
"""A thread with at least this share of a CPU computes; below, it only wakes from time to time."""


class Blocked(enum.Enum):
    """What a thread is in."""

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

    listens: it has not accepted the connection yet.
    """

    pid: int
    tid: int = 0
    why: str = ""
    listens: bool = False


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
    return {
        (process.pid, thread.tid): _wait(process, thread, evidence, ends)
        for process in evidence.processes
        for thread in process.threads
    }


class _Ends:
    """Which processes have an object: by its inode."""

    def __init__(self, evidence: RunEvidence) -> None:
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.writers: dict[int, list[int]] = defaultdict(list)
        self.sockets: dict[int, list[int]] = defaultdict(list)
        self.semaphores: dict[int, list[int]] = defaultdict(list)
        self.keepers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for process in evidence.processes:
            for one in process.descriptors:
                self._take(process.pid, one)
            for semaphore in process.semaphores:
                self.semaphores[semaphore.inode].append(process.pid)

    def _take(self, pid: int, one: Descriptor) -> None:
        if one.kind in ("pipe", "fifo"):
            for ends, letter in ((self.readers, "r"), (self.writers, "w")):
                if letter in one.mode and pid not in ends[one.inode]:
                    ends[one.inode].append(pid)
        elif one.kind == "socket":
            self.sockets[one.inode].append(pid)
        if one.locks:
            self.keepers[one.device, one.inode].append(pid)


def _wait(process: SeenProcess, thread: SeenThread, evidence: RunEvidence, ends: _Ends) -> KernelWait:
    state = thread.state[1]
    share = thread.used / evidence.interval if evidence.interval else 0.0
    by_state = {"T": Blocked.STOPPED, "t": Blocked.TRACED, "Z": Blocked.ENDED, "X": Blocked.ENDED}
    if state in by_state:
        return KernelWait(by_state[state], by_state[state].value.removeprefix("is "))
    if thread.state == ("D", "D") and thread.used == 0 and thread.switches[0] == thread.switches[1]:
        where = f", in the kernel's {thread.wchan}" if thread.wchan else ""
        return KernelWait(Blocked.UNINTERRUPTIBLE, f"in an uninterruptible sleep{where}")
    if share >= BUSY:
        return KernelWait(Blocked.COMPUTES, f"computing ({share:.0%} of a CPU)")
    if "R" in thread.state and thread.state[0] == thread.state[1]:
        return KernelWait(Blocked.READY, f"ready to run, but gets only {share:.0%} of a CPU")
    if not thread.slept and not _same_call(thread):
        if thread.syscall is None and thread.wchan and "R" not in thread.state:  # it may poll: what it waits in now
            return replace(_by_function(thread), bounded=True)
        return KernelWait(Blocked.MOVES, "running from time to time", bounded=True)
    return _in_call(process, thread, evidence, ends)


def _same_call(thread: SeenThread) -> bool:
    now, then = thread.syscall, thread.syscall_before
    if now is None or then is None:
        return False
    return (now.name, now.fds, now.address) == (then.name, then.fds, then.address)


_WRITES: Final = frozenset(("write", "writev", "pwrite64", "sendto", "sendmsg", "connect", "sendfile"))
_POLLS: Final = frozenset(("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2"))


def _in_call(process: SeenProcess, thread: SeenThread, evidence: RunEvidence, ends: _Ends) -> KernelWait:
    call = thread.syscall
    if call is None:
        return _by_lock_table(process, thread, evidence) or _by_function(thread)
    if call.name == "futex":
        return _futex(process, thread, evidence, ends)
    if call.name in ("nanosleep", "clock_nanosleep"):
        return _asleep(process, thread, evidence)
    if call.name in ("wait4", "waitid"):
        children = (call.target,) if call.target > 0 else process.children
        holders = tuple(Holder(pid, why="is its child") for pid in children)
        return KernelWait(Blocked.CHILD, f"waiting {call.words}", holders=holders, certain=call.target > 0)
    if call.name == "flock" or (call.name == "fcntl" and call.words):
        return _file_lock(process, thread, evidence, ends)
    if call.name in ("open", "openat"):
        named = call.words.removeprefix("opens ")
        kind = Blocked.FIFO if thread.wchan in ("wait_for_partner", "fifo_open") else Blocked.FILE
        end = "" if kind is Blocked.FILE else ", a FIFO whose other end no process has opened"
        return KernelWait(kind, f"opening {named}{end}", named)
    if call.name in ("pause", "rt_sigsuspend", "rt_sigtimedwait"):
        return KernelWait(Blocked.SIGNAL, f"waiting for a signal ({call.name})")
    bounded = call.timeout >= 0
    found = [one for fd in call.fds if (one := process.descriptor(fd)) is not None]
    if call.name in _POLLS and found and found[0].kind == "epoll":
        found = [one for fd in found[0].watched if (one := process.descriptor(fd)) is not None] or found
    if call.name in _POLLS and len(found) > 1:
        parts = [_descriptor(process, one, call.name, ends) for one in found]
        holders = tuple(dict.fromkeys(holder for part in parts for holder in part.holders))
        return KernelWait(parts[0].kind, f"waiting for one of {len(found)} descriptors", "", holders, False, bounded)
    if found:
        return replace(_descriptor(process, found[0], call.name, ends), bounded=bounded)
    if call.name in _POLLS and not call.fds and bounded:
        return KernelWait(Blocked.SLEEPS, f"asleep in {call.name} ({call.timeout:g} s)", bounded=True)
    return KernelWait(Blocked.OTHER, f"in {call.name}" + (f" ({call.words})" if call.words else ""), bounded=bounded)


POLL: Final = 1.0
"""Seconds: a thread with sleeps up to this length may poll."""


def _asleep(process: SeenProcess, thread: SeenThread, evidence: RunEvidence) -> KernelWait:
    """A sleep; or a poll for a file lock: C code sleeps with a file open that another process has locked.

    SQLite waits like this: its busy handler requests a POSIX lock repeatedly, and the kernel knows of no wait.
    """
    call = thread.syscall
    assert call is not None
    words = f"asleep ({call.words})" if call.words else "asleep"
    line = thread.stack[0].source if thread.stack else ""
    if line and "sleep" not in line and 0 <= call.timeout <= POLL:
        for file in process.descriptors:
            held = [
                one for one in evidence.locks
                if (one.device, one.inode, one.kind) == (file.device, file.inode, "POSIX") and not one.waits
            ]  # fmt: skip
            pids = dict.fromkeys(one.pid for one in held if one.mode == "WRITE")
            if pids and process.pid not in pids:
                holders = tuple(Holder(pid, why="holds it (POSIX WRITE in /proc/locks)") for pid in pids if pid > 0)
                doing = f"polling for the lock of {file.target} (its C code sleeps)"
                return KernelWait(Blocked.FILE_LOCK, doing, file.target, holders, len(holders) == 1, True)
    return KernelWait(Blocked.SLEEPS, words, bounded=True)


def _by_lock_table(process: SeenProcess, thread: SeenThread, evidence: RunEvidence) -> KernelWait | None:
    """The file lock that a process waits for if its system calls can't be read: every user may read /proc/locks."""
    mine = next((one for one in evidence.locks if one.waits and one.pid == process.pid), None)
    if mine is None or thread.tid != process.pid:
        return None
    held = [one for one in evidence.locks if one.number == mine.number and not one.waits]
    holders = tuple(Holder(one.pid, why=f"holds it ({one.kind} {one.mode} in /proc/locks)") for one in held)
    words = f"waiting for a file lock ({mine.kind}, inode {mine.inode})"
    certain = bool(holders) and mine.kind == "POSIX"  # a process may have passed an open file's lock on
    return KernelWait(Blocked.FILE_LOCK, words, f"inode {mine.inode}", holders, certain)


def _by_function(thread: SeenThread) -> KernelWait:
    """The wait by the kernel's function, if the system call can't be read."""
    name = thread.wchan
    known = (
        ("futex", Blocked.FUTEX, "waiting for a lock or a condition"),
        ("nanosleep", Blocked.SLEEPS, "asleep"),
        ("pipe_read", Blocked.PIPE_READ, "waiting for data in a pipe"),
        ("pipe_write", Blocked.PIPE_WRITE, "waiting for room in a pipe"),
        ("wait_for_partner", Blocked.FIFO, "opening a FIFO whose other end no process has opened"),
        ("locks_lock_inode_wait", Blocked.FILE_LOCK, "waiting for a file lock"),
        ("flock", Blocked.FILE_LOCK, "waiting for a file lock"),
        ("fcntl_setlk", Blocked.FILE_LOCK, "waiting for a file lock"),
        ("do_wait", Blocked.CHILD, "waiting for a child process"),
        ("skb_wait", Blocked.SOCKET, "waiting at a socket"),
        ("unix_stream", Blocked.SOCKET, "waiting at a socket"),
        ("poll_schedule", Blocked.OTHER, "waiting for a descriptor (poll)"),
        ("ep_poll", Blocked.OTHER, "waiting for a descriptor (epoll)"),
    )
    for start, kind, words in known:
        if start in name:
            return KernelWait(kind, f"{words} (the kernel's {name})")
    return KernelWait(
        Blocked.OTHER if name else Blocked.UNKNOWN, f"asleep in the kernel's {name}" if name else "asleep"
    )


# --- Locks and semaphores ---------------------------------------------------------------------------------------------
def _futex(process: SeenProcess, thread: SeenThread, evidence: RunEvidence, ends: _Ends) -> KernelWait:
    call = thread.syscall
    assert call is not None
    bounded = call.timeout >= 0
    semaphore = semaphore_at(process, call.address)
    if semaphore is not None:
        others = [pid for pid in dict.fromkeys(ends.semaphores[semaphore.inode]) if pid != process.pid]
        holders = tuple(Holder(pid, why="shares it") for pid in others)
        value = f", whose value is {semaphore.value}" if semaphore.value >= 0 else ""
        shared = f"shared with {len(others) or 'no'} other process{'' if len(others) == 1 else 'es'}"
        words = f"waiting for the semaphore {semaphore.name}{value}, {shared}"
        return KernelWait(Blocked.SEMAPHORE, words, f"semaphore:{semaphore.inode}", holders, False, bounded)
    if thread.owner > 0:
        return _mutex(process, thread, evidence)
    place = f"futex:{process.pid}:{call.address:x}"
    same = [one for one in process.threads if one is not thread and one.syscall and one.syscall.address == call.address]
    crowd = f", as do {len(same)} more of its threads" if same else ""
    return KernelWait(
        Blocked.FUTEX, f"waiting for a lock or a condition of its own process{crowd}", place, (), False, bounded
    )


def _mutex(process: SeenProcess, thread: SeenThread, evidence: RunEvidence) -> KernelWait:
    call, owner = thread.syscall, thread.owner
    assert call is not None
    place = f"mutex:{process.pid}:{call.address:x}"
    if owner == thread.tid:
        return KernelWait(Blocked.MUTEX, "waiting for a mutex that it holds itself", place, (), True)
    if process.thread(owner) is not None:
        holder = (Holder(process.pid, owner, "the mutex names it as its owner"),)
        return KernelWait(Blocked.MUTEX, f"waiting for a mutex that its thread {owner} holds", place, holder, True)
    elsewhere = next((p for p in evidence.processes if p.thread(owner) is not None), None)
    whose = f"a thread of process {elsewhere.pid}" if elsewhere is not None else "a thread that has ended"
    words = f"waiting for a mutex that was locked at the fork: its owner, thread {owner}, is {whose}"
    return KernelWait(Blocked.MUTEX, words, place, (), True)


def semaphore_at(process: SeenProcess, address: int) -> Semaphore | None:
    """The named semaphore that a futex belongs to."""
    return next((one for one in process.semaphores if one.address <= address < one.address + 32), None)


def _file_lock(process: SeenProcess, thread: SeenThread, evidence: RunEvidence, ends: _Ends) -> KernelWait:
    call = thread.syscall
    assert call is not None
    file = process.descriptor(call.fds[0])
    what = f"{call.name} on {file.target}" if file is not None else call.name
    if file is None:
        return KernelWait(Blocked.FILE_LOCK, f"waiting in {what}", certain=True)
    seen = {one.pid for one in evidence.processes if one.descriptors}
    holders = tuple(_lock_holders(process, file, evidence.locks, ends, seen))
    return KernelWait(Blocked.FILE_LOCK, f"waiting in {what}", file.target, holders, bool(holders))


def _lock_holders(
    process: SeenProcess, file: Descriptor, locks: tuple[FileLock, ...], ends: _Ends, seen: set[int]
) -> Iterable[Holder]:
    """The holders of a file's lock. A flock lock belongs to an open file that forks share: its taker may have ended."""
    held = [one for one in locks if (one.device, one.inode) == (file.device, file.inode) and not one.waits]
    keepers = [pid for pid in ends.keepers[file.device, file.inode] if pid != process.pid] if held else []
    for pid in keepers:
        taker = next((one.pid for one in held if one.kind != "POSIX" and one.pid > 0), pid)
        passed = f", which process {taker} took and passed on" if taker != pid else ""
        yield Holder(pid, why=f"has the open file that holds it ({held[0].kind} {held[0].mode}){passed}")
    for one in held:
        passed_on = one.kind != "POSIX" and (keepers or one.pid in seen)
        if one.pid not in (*keepers, process.pid) and one.pid > 0 and not passed_on:
            yield Holder(one.pid, why=f"holds it ({one.kind} {one.mode} in /proc/locks)")


# --- Descriptors ------------------------------------------------------------------------------------------------------
def _descriptor(process: SeenProcess, one: Descriptor, call: str, ends: _Ends) -> KernelWait:
    writes = call in _WRITES
    if one.kind in ("pipe", "fifo"):
        return _pipe(process, one, writes, ends)
    if one.kind == "socket":
        peers = [pid for pid in ends.sockets.get(one.peer, []) if one.peer]
        backlog = one.about == BACKLOG
        why = "listens, and has not accepted the connection" if backlog else "has the socket's other end"
        holders = tuple(Holder(pid, why=why, listens=backlog) for pid in dict.fromkeys(peers))
        doing = {
            "accept": "waiting for a connection",
            "accept4": "waiting for a connection",
            "connect": "waiting to connect to a server",
        }.get(call, "waiting to write to a socket" if writes else "waiting for data at a socket")
        doing += ", in a connection that was not accepted yet" if backlog else ""
        return KernelWait(Blocked.SOCKET, doing, one.target, holders)
    if one.kind == "device" and one.target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
        return KernelWait(Blocked.TERMINAL, f"waiting for input at {one.target}", one.target)
    if one.kind == "eventfd":
        return KernelWait(Blocked.EVENT, f"waiting for an event ({one.about})", one.target)
    if one.kind == "pidfd":
        pid = int(one.about.split()[-1]) if one.about.split()[-1:] else 0
        return KernelWait(Blocked.CHILD, f"waiting for process {pid}", one.target, (Holder(pid),), True)
    if one.kind in ("file", "directory", "device", "shm"):
        return KernelWait(Blocked.FILE, f"in {call} of {one.target}", one.target)
    return KernelWait(Blocked.OTHER, f"in {call} of {one.target}", one.target)


def _pipe(process: SeenProcess, one: Descriptor, writes: bool, ends: _Ends) -> KernelWait:
    others = [pid for pid in (ends.readers if writes else ends.writers)[one.inode] if pid != process.pid]
    own = process.pid in (ends.readers if writes else ends.writers)[one.inode]
    end = "reading" if writes else "writing"
    holders = tuple(Holder(pid, why=f"has the pipe's {end} end") for pid in others)
    name = one.target if one.kind == "fifo" else f"pipe {one.inode}"
    doing = f"waiting for {'room' if writes else 'data'} in {name}"
    kind = Blocked.PIPE_WRITE if writes else Blocked.PIPE_READ
    if not others:
        doing += f", whose {end} end " + ("only its own process has" if own else "none of these processes has")
    return KernelWait(kind, doing, f"pipe:{one.inode}", holders, False)
