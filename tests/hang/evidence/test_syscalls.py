"""System calls, lock tables and masks of /proc, read from their texts."""

from __future__ import annotations

import os
import struct
import time

import pytest

from minidl.hang.evidence.machine import locks_of
from minidl.hang.evidence.proc import numbers_of, semaphores_of, signals_of
from minidl.hang.evidence.syscalls import decoded, is_private, waits_for_mutex


def memory(address: int, size: int) -> bytes:
    """poll's array at 16, a timespec of 2.5 s at 64, a path at 128."""
    data = bytes(16) + struct.pack("ihhihh", 3, 1, 0, 9, 1, 0)
    data = data.ljust(64, b"\0") + struct.pack("qq", 2, 500_000_000)
    data = data.ljust(128, b"\0") + b"/data/a.fifo\0"
    return data[address : address + size]


@pytest.mark.parametrize(
    ("line", "name", "words", "fds", "timeout"),
    [
        ("running", "running", "", (), -2.0),
        ("7 0x10 0x2 0x1388 0x0 0x0 0x0 0x7f 0x7f", "poll", "2 descriptors", (3, 9), 5.0),
        ("7 0x10 0x2 0xffffffff 0x0 0x0 0x0 0x7f 0x7f", "poll", "2 descriptors", (3, 9), -1.0),
        ("73 0x5 0x2 0x0 0x0 0x0 0x0 0x7f 0x7f", "flock", "LOCK_EX", (5,), -1.0),
        ("72 0x5 0x7 0x0 0x0 0x0 0x0 0x7f 0x7f", "fcntl", "F_SETLKW", (5,), -1.0),
        ("35 0x40 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f", "nanosleep", "2.5 s", (), 2.5),
        ("257 0xffffff9c 0x80 0x0 0x0 0x0 0x0 0x7f 0x7f", "openat", "opens /data/a.fifo", (), -2.0),
        ("202 0x40 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", "futex", "wait", (), -1.0),
        ("61 0xffffffffffffffff 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f", "wait4", "for any child", (), -1.0),
        ("61 0x2a 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f", "wait4", "for process 42", (), -1.0),
        ("999 0x0 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f", "syscall 999", "", (), -2.0),
    ],
)
def test_a_call_is_decoded(line: str, name: str, words: str, fds: tuple[int, ...], timeout: float) -> None:
    call = decoded(line, memory, "x86_64")
    assert (call.name, call.words, call.fds, call.timeout) == (name, words, fds, timeout)


@pytest.mark.parametrize(("op", "clock"), [(0x89, time.CLOCK_MONOTONIC), (0x189, time.CLOCK_REALTIME)])
def test_the_moment_until_which_a_lock_is_waited_for_is_told_as_what_is_left(op: int, clock: int) -> None:
    until = struct.pack("qq", int(time.clock_gettime(clock)) + 3600, 0)
    left = decoded(f"202 0x40 {op:#x} 0x0 0x8 0x0 0xffffffff 0x7f 0x7f", lambda at, size: until, "x86_64").timeout
    assert 3000 < left <= 3600
    assert decoded("202 0x40 0x80 0x0 0x40 0x0 0x0 0x7f 0x7f", memory, "x86_64").timeout == 2.5


def test_without_memory_pointers_are_unknown_and_nothing_fails() -> None:
    call = decoded("7 0x10 0x2 0x1388 0x0 0x0 0x0 0x7f 0x7f", None, "x86_64")
    assert (call.name, call.fds, call.timeout) == ("poll", (), 5.0)
    assert decoded("32 0x5 0x2 0x0 0x0 0x0 0x0 0x7f 0x7f", None, "aarch64").name == "flock"


def test_a_mutex_of_glibc_is_told_from_a_semaphore() -> None:
    assert waits_for_mutex(decoded("202 0x40 0x80 0x2 0x0 0x0 0x0 0x7f 0x7f", None, "x86_64"))
    assert not waits_for_mutex(decoded("202 0x40 0x189 0x0 0x0 0x0 0x0 0x7f 0x7f", None, "x86_64"))


@pytest.mark.parametrize("value", ["0x2", "0x8000a3f1"])
def test_a_mutex_of_several_processes_is_told_robust_or_not(value: str) -> None:
    call = decoded(f"202 0x40 0x0 {value} 0x0 0x0 0x0 0x7f 0x7f", None, "x86_64")
    assert (waits_for_mutex(call), is_private(call)) == (True, False)


def test_the_lock_table_has_holders_and_those_that_wait() -> None:
    held, waits = locks_of(
        "1: FLOCK  ADVISORY  WRITE 712 08:01:13 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 713 08:01:13 0 EOF\n"
    )
    assert (held.pid, held.inode, held.waits) == (712, 13, False)
    assert (waits.pid, waits.number, waits.waits) == (713, 1, True)
    assert held.device == os.makedev(8, 1)


def test_masks_lists_and_names_with_brackets() -> None:
    assert signals_of("0000000000004002") == ("SIGINT", "SIGTERM")
    assert numbers_of("0-2,5\n") == (0, 1, 2, 5)


def test_a_named_semaphore_has_its_value_and_its_waiters() -> None:
    maps = "7f00-7f40 rw-s 00000000 00:1b 906 /dev/shm/sem.mp-x (deleted)\n7f50-7f60 rw-p 0 00:00 0\n"
    (found,) = semaphores_of(maps, lambda address, size: struct.pack("<II", 0, 2))
    assert (found.name, found.inode, found.value, found.waiters) == ("sem.mp-x", 906, 0, 2)


def test_a_lock_of_a_file_that_is_not_known_is_left_out() -> None:
    assert locks_of("1: POSIX  ADVISORY  WRITE 0 <none>:0 0 EOF") == ()
