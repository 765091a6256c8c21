"""The system call that a thread is in, decoded as far as it tells what the thread waits for.

Interface: `decoded(line, memory, machine)` -> `Syscall` takes a line of /proc/PID/task/TID/syscall. `memory` reads the
process's memory, for arguments that are pointers; without it those are unknown.

Rules of use: only calls that can block are named; others are "syscall N". Pure but for what `memory` does.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Final

from minidl.hang.evidence.model import Syscall
from minidl.live_repr import counted

Memory = Callable[[int, int], bytes]
"""(address, size) -> bytes, fewer or none if they can't be read."""

_X86_64: Final = (
    "0 read 1 write 2 open 3 close 7 poll 9 mmap 16 ioctl 17 pread64 18 pwrite64 19 readv 20 writev 23 select "
    "24 sched_yield 28 madvise 34 pause 35 nanosleep 40 sendfile 42 connect 43 accept 44 sendto 45 recvfrom "
    "46 sendmsg 47 recvmsg 56 clone 57 fork 58 vfork 59 execve 61 wait4 62 kill 65 semop 69 msgsnd 70 msgrcv 72 fcntl "
    "73 flock 74 fsync 75 fdatasync 77 ftruncate 82 rename 128 rt_sigtimedwait 130 rt_sigsuspend 162 sync 202 futex "
    "208 io_getevents 219 restart_syscall 220 semtimedop 230 clock_nanosleep 231 exit_group 232 epoll_wait "
    "242 mq_timedsend 243 mq_timedreceive 247 waitid 257 openat 262 newfstatat 270 pselect6 271 ppoll 275 splice "
    "281 epoll_pwait 285 fallocate 288 accept4 426 io_uring_enter 435 clone3 441 epoll_pwait2 449 futex_waitv"
)
_AARCH64: Final = (
    "22 epoll_pwait 25 fcntl 29 ioctl 32 flock 46 ftruncate 47 fallocate 56 openat 57 close 63 read 64 write 65 readv "
    "66 writev 67 pread64 68 pwrite64 72 pselect6 73 ppoll 76 splice 79 newfstatat 81 sync 82 fsync 83 fdatasync "
    "95 waitid 98 futex 101 nanosleep 115 clock_nanosleep 124 sched_yield 128 restart_syscall 129 kill "
    "133 rt_sigsuspend 137 rt_sigtimedwait 182 mq_timedsend 183 mq_timedreceive 189 msgsnd 188 msgrcv 192 semtimedop "
    "193 semop 202 accept 203 connect 206 sendto 207 recvfrom 211 sendmsg 212 recvmsg 220 clone 221 execve 222 mmap "
    "233 madvise 242 accept4 260 wait4 426 io_uring_enter 435 clone3 441 epoll_pwait2 449 futex_waitv"
)


def _table(text: str) -> dict[int, str]:
    words = text.split()
    return {int(number): name for number, name in zip(words[::2], words[1::2], strict=True)}


NAMES: Final = {"x86_64": _table(_X86_64), "aarch64": _table(_AARCH64)}

_DESCRIPTOR_FIRST: Final = (
    "read write pread64 pwrite64 readv writev ioctl connect accept accept4 sendto recvfrom sendmsg recvmsg fcntl flock "
    "fsync fdatasync ftruncate fallocate mq_timedsend mq_timedreceive splice io_uring_enter epoll_wait epoll_pwait "
    "epoll_pwait2 close"
)

_ON_A_DESCRIPTOR: Final = frozenset(_DESCRIPTOR_FIRST.split())

_FLOCK: Final = {1: "LOCK_SH", 2: "LOCK_EX", 8: "LOCK_UN"}
_FCNTL: Final = {7: "F_SETLKW", 38: "F_OFD_SETLKW"}
_WAIT_BITSET: Final = 9
"""FUTEX_WAIT_BITSET: it waits until a moment, of the clock that is up since the boot."""
_REALTIME: Final = 0x100
"""FUTEX_CLOCK_REALTIME: that moment is one of the clock of the day."""
_WAIT_OPS: Final = {0: "wait", _WAIT_BITSET: "wait", 6: "lock a priority-inheriting mutex", 11: "wait", 13: "lock"}
_PATIENT_MS: Final = 1 << 31

FOR_EVER: Final = -1.0
"""The timeout of a call that has none."""


def decoded(line: str, memory: Memory | None, machine: str) -> Syscall:
    """Decode "running", "-1 SP PC" or "NUMBER ARGS... SP PC"."""
    words = line.split()
    if not words or words[0] == "running":
        return Syscall("running")
    if words[0] == "-1":
        return Syscall("none", "blocked outside of a system call, as in a page fault")
    args = tuple(int(word, 16) for word in words[1:7])
    name = NAMES.get(machine, {}).get(int(words[0]), f"syscall {words[0]}")
    return _DECODERS.get(name, _other)(name, args, memory or (lambda address, size: b""))


def _other(name: str, args: tuple[int, ...], read: Memory) -> Syscall:
    """A call on a descriptor, or one of which only the name is known."""
    if name not in _ON_A_DESCRIPTOR:
        return Syscall(name, args=args)
    words = f"{args[2]} bytes" if name in ("read", "write", "pread64", "pwrite64") else ""
    timeout = _milliseconds(args[3]) if name in ("epoll_wait", "epoll_pwait") else -2.0
    return Syscall(name, words, args, _descriptor(args), timeout=timeout)


def _lock(name: str, args: tuple[int, ...], read: Memory) -> Syscall:
    words = _FLOCK.get(args[1] & ~4, "") if name == "flock" else _FCNTL.get(args[1], "")
    return Syscall(name, words, args, _descriptor(args), timeout=FOR_EVER)


def _descriptor(args: tuple[int, ...]) -> tuple[int, ...]:
    return (args[0] & 0x7FFFFFFF,)


def _open(name: str, args: tuple[int, ...], read: Memory) -> Syscall:
    path = _text(read, args[0] if name == "open" else args[1])
    return Syscall(name, f"opens {path}" if path else "", args)


def _poll(name: str, args: tuple[int, ...], read: Memory) -> Syscall:
    count = min(args[1], 1024)
    data = read(args[0], 8 * count)
    fds = tuple(fd for fd, _, _ in struct.iter_unpack("ihh", data[: len(data) // 8 * 8]) if fd >= 0)
    timeout = _milliseconds(args[2]) if name == "poll" else _timespec(read, args[2])
    return Syscall(name, counted(args[1], "descriptor"), args, fds, timeout=timeout)


def _select(name: str, args: tuple[int, ...], read: Memory) -> Syscall:
    size = (min(args[0], 1024) + 63) // 64 * 8
    sets = [int.from_bytes(read(address, size), "little") if address else 0 for address in args[1:4]]
    fds = tuple(fd for fd in range(min(args[0], 1024)) if any(one >> fd & 1 for one in sets))
    unit = 10**6 if name == "select" else 10**9
    return Syscall(name, counted(len(fds), "descriptor"), args, fds, timeout=_timespec(read, args[4], unit))


def _futex(name: str, args: tuple[int, ...], read: Memory) -> Syscall:
    op = args[1] & 0x7F
    words = "waits for a mutex" if _of_mutex(args) else _WAIT_OPS.get(op, f"operation {op}")
    seconds = _timespec(read, args[3])
    if op == _WAIT_BITSET and seconds >= 0:  # the seconds are a moment's
        clock = time.CLOCK_REALTIME if args[1] & _REALTIME else time.CLOCK_MONOTONIC
        seconds = round(max(0.0, seconds - time.clock_gettime(clock)), 3)
    return Syscall(name, words, args, address=args[0], timeout=seconds)


def waits_for_mutex(call: Syscall) -> bool:
    """Whether a futex is one of glibc's mutexes, which keep their owner's thread id beside them."""
    return call.name == "futex" and _of_mutex(call.args)


def _of_mutex(args: tuple[int, ...]) -> bool:
    """Whether a futex is waited for as glibc's mutexes do; its semaphores and conditions do not.

    A robust mutex waits for its owner's id with the bit for waiters.
    """
    return args[1] & 0x7F == 0 and (args[2] == 2 or bool(args[2] & 1 << 31))


def is_private(call: Syscall) -> bool:
    """Whether a futex belongs to one process."""
    return call.name == "futex" and bool(call.args[1] & 0x80)


_FLAGS: Final = {_WAIT_BITSET: "bitset", _REALTIME: "clock"}


def wait_flags(call: Syscall) -> frozenset[str]:
    """How a futex is waited for, beyond a plain wait: each library has its own way. {"unknown"} if it is no futex."""
    if call.name != "futex" or len(call.args) < 2:
        return frozenset({"unknown"})
    operation, clock = call.args[1] & 0x7F, call.args[1] & _REALTIME
    return frozenset(_FLAGS.get(flag, f"operation {flag}") for flag in (operation, clock) if flag)


def _sleep(name: str, args: tuple[int, ...], read: Memory) -> Syscall:
    seconds = _timespec(read, args[0] if name == "nanosleep" else args[2])
    if name == "clock_nanosleep" and args[1] & 1 and seconds >= 0:  # TIMER_ABSTIME: the seconds are a moment's
        seconds = round(max(0.0, seconds - time.clock_gettime(args[0])), 1)
        return Syscall(name, f"{seconds:g} s more", args, timeout=seconds)
    return Syscall(name, f"{seconds:g} s" if seconds >= 0 else "", args, timeout=seconds)


def _wait(name: str, args: tuple[int, ...], read: Memory) -> Syscall:
    raw = args[0] if name == "wait4" else args[1]
    pid = raw - (1 << 64) if raw >> 63 else raw
    pid = pid - (1 << 32) if 0 < pid and pid >> 31 else pid
    if name == "waitid" and args[0] == 0:
        pid = 0
    target = pid if pid > 0 else 0
    return Syscall(name, f"for process {target}" if target else "for any child", args, target=target, timeout=FOR_EVER)


_DECODERS: Final[dict[str, Callable[[str, tuple[int, ...], Memory], Syscall]]] = {
    "futex": _futex,
    **dict.fromkeys(("poll", "ppoll"), _poll),
    **dict.fromkeys(("select", "pselect6"), _select),
    **dict.fromkeys(("nanosleep", "clock_nanosleep"), _sleep),
    **dict.fromkeys(("wait4", "waitid"), _wait),
    **dict.fromkeys(("open", "openat"), _open),
    **dict.fromkeys(("flock", "fcntl"), _lock),
}
"""The calls with arguments of their own."""


def _milliseconds(raw: int) -> float:
    raw &= 0xFFFFFFFF
    return FOR_EVER if raw >= _PATIENT_MS else raw / 1000


def _timespec(read: Memory, address: int, unit: int = 10**9) -> float:
    if not address:
        return FOR_EVER
    data = read(address, 16)
    if len(data) < 16:
        return -2.0
    seconds, rest = struct.unpack("qq", data)
    return float(seconds + rest / unit) if 0 <= seconds < 1 << 40 else -2.0


def _text(read: Memory, address: int) -> str:
    for size in (4096, 256, 32):  # the text may end close to the end of what is mapped
        data = read(address, size)
        if data:
            return data.partition(b"\0")[0].decode(errors="replace")
    return ""
