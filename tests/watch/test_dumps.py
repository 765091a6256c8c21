"""A process is asked for its stacks by a signal only while that ends no call of it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import NOT_HANDED_ON, ROOT, write

from minidl.record import stack_dumps
from minidl.watch.dumps import Asked, crash_in

LIBC = ctypes.CDLL(None, use_errno=True)
MINUTE = 60_000


CRASH = """Fatal Python error: {}

Thread 0x00007f0000000001 (most recent call first):
  File "/home/a/other.py", line 3 in wait

Current thread 0x00007f0000000002 [MainThread] (most recent call first):
  File "/home/a/tiles.py", line 31 in load
  File "/home/a/train.py", line 9 in <module>

Extension modules: numpy._core._multiarray_umath (total: 1)
"""


@pytest.mark.parametrize(
    ("words", "signum"),
    [
        ("Segmentation fault", signal.SIGSEGV), ("Bus error", signal.SIGBUS), ("Aborted", signal.SIGABRT),
        ("Floating-point exception", signal.SIGFPE), ("Illegal instruction", signal.SIGILL), ("none of them", None),
    ],
)  # fmt: skip
def test_the_fault_that_ended_a_process_is_read(tmp_path: Path, words: str, signum: int | None) -> None:
    file = tmp_path / "1-1.stacks"
    assert crash_in(file) is None
    file.write_text(CRASH.format("Segmentation fault").partition("\n\n")[2])
    assert crash_in(file) is None, "it was asked for its stacks, and has not ended"
    file.write_text("Thread 0x1 (most recent call first):\n" + CRASH.format(words))
    crash = crash_in(file)
    assert (None if crash is None else crash.signum) == signum
    if crash is not None:
        stack = [("<module>", "train.py:9"), ("load", "tiles.py:31")]
        assert [(one.function, one.base) for one in crash.stack] == stack


def in_poll(fd: int) -> object:
    return LIBC.poll((ctypes.c_int * 2)(fd, 1), 1, MINUTE)


def in_select(fd: int) -> object:
    return LIBC.select(fd + 1, (ctypes.c_long * 16)(1 << fd), None, None, None)


def in_epoll_wait(fd: int) -> object:
    epoll = select.epoll()
    epoll.register(fd)
    return LIBC.epoll_wait(epoll.fileno(), ctypes.create_string_buffer(12), 1, MINUTE)


def in_usleep(fd: int) -> object:
    return LIBC.usleep(MINUTE * 1000)


def in_a_lock_with_a_timeout(fd: int) -> object:
    lock = threading.Lock()
    return lock.acquire() and lock.acquire(timeout=60)


def in_short_sleeps(fd: int) -> object:
    while True:
        LIBC.usleep(10_000)


def in_a_pipe(fd: int) -> object:
    return os.read(fd, 1)


def in_a_lock(fd: int) -> object:
    lock = threading.Lock()
    return lock.acquire() and lock.acquire()


def in_a_file_lock(fd: int) -> object:
    with open(__file__) as file, open(__file__) as again:
        fcntl.flock(file, fcntl.LOCK_EX)
        return fcntl.flock(again, fcntl.LOCK_EX)


def in_a_computation(fd: int) -> object:
    while True:
        pass


@contextlib.contextmanager
def child(folder: Path, call: Callable[[int], object]) -> Any:
    """A child that answers, in a call that does not end by itself; gives its id and the pipe that the call ends at."""
    (r, w), (ready, told), (ended, tell) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            side = folder / f"{os.getpid()}-1.meta.jsonl"
            stack_dumps.answer(
                str(folder), lambda kind, **facts: side.write_text(json.dumps(facts | {"kind": kind}) + "\n")
            )
            os.write(told, b"!")
            os.write(tell, f"{call(r)} {ctypes.get_errno()}".encode())
        os._exit(0)
    try:
        os.read(ready, 1)
        yield pid, ended
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (r, w, ready, told, ended, tell):
            os.close(fd)


def settled(pid: int, call: Callable[[int], object]) -> None:
    """Wait until a child is in its call: it runs no more, or, if it computes, has used CPU time in it."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        text = Path(f"/proc/{pid}/syscall").read_text()
        if text.startswith("running") == (call is in_a_computation):
            return
        time.sleep(0.01)


@pytest.mark.live
@pytest.mark.parametrize(
    "call", [in_poll, in_select, in_epoll_wait, in_usleep, in_a_lock_with_a_timeout, in_short_sleeps]
)
def test_a_call_that_the_signal_would_end_is_not_disturbed(tmp_path: Path, call: Callable[[int], object]) -> None:
    with child(tmp_path, call) as (pid, ended):
        settled(pid, call)
        assert Asked(tmp_path).stacks([pid]) == {}
        (file,) = tmp_path.glob(f"{pid}-*.stacks")
        assert file.read_text() == ""
        assert not select.select([ended], [], [], 0)[0], "its call goes on"


@pytest.mark.live
@pytest.mark.parametrize("call", [in_a_pipe, in_a_lock, in_a_file_lock, in_a_computation])
def test_a_call_that_goes_on_is_named(tmp_path: Path, call: Callable[[int], object]) -> None:
    with child(tmp_path, call) as (pid, ended):
        settled(pid, call)
        until, found = time.monotonic() + 60, {}
        while not found and time.monotonic() < until:  # on a busy machine it may have computed in the kernel
            found = Asked(tmp_path).stacks([pid])
        assert call.__name__ in [frame.function for frame in found[pid][pid].frames]
        assert not select.select([ended], [], [], 0)[0], "its call goes on"


C_CALLS = """
import ctypes, glob, os, select, threading, time
import torch
from torch.utils.data import DataLoader, Dataset

LIBC, MINUTE = ctypes.CDLL(None, use_errno=True), 60_000
READ, WRITE = os.pipe()

{calls}
def in_short_usleeps(fd):
    while not select.select([fd], [], [], 0)[0]:
        if LIBC.usleep(900_000):
            return -1
    return 1

CALLS = in_poll, in_select, in_epoll_wait, in_short_usleeps

class Samples(Dataset):
    def __len__(self):
        return len(CALLS)

    def __getitem__(self, index):
        return torch.tensor([index, CALLS[index](READ), ctypes.get_errno()])

def looks():
    return sum(open(name, "rb").read().count(b'{{"look":') for name in glob.glob("trace/watch-*"))

def until_looks(number):
    end = time.monotonic() + 60
    while looks() < number and time.monotonic() < end:
        time.sleep(0.05)
    os.write(WRITE, b"!")

if __name__ == "__main__":
    waiting = threading.Thread(target=until_looks, args=(1,))
    waiting.start()
    for batch in DataLoader(Samples(), batch_size=1, num_workers=4):
        index, found, errno = batch[0].tolist()
        print(CALLS[index].__name__, found, errno)
    waiting.join()
    os.read(READ, 1)
    waiting = threading.Thread(target=until_looks, args=(looks() + 1,))
    waiting.start()
    print("own", in_poll(READ), ctypes.get_errno())
    waiting.join()
""".format(calls="\n".join(map(inspect.getsource, (in_poll, in_select, in_epoll_wait))))


@pytest.mark.live
def test_a_recorded_program_sees_no_interrupted_call(tmp_path: Path) -> None:
    """Without py-spy, C code of workers and of the loop waits while the watchdog looks at it."""
    write(tmp_path / "train.py", C_CALLS)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(os.path.realpath(sys.executable))  # there is no py-spy beside it
    own = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    command = ["bin/python", "-m", "minidl", "run", "--trace", "trace", "--hang-after", "4", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=own | {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split("\n")) == (
        0, ["in_poll 1 0", "in_select 1 0", "in_epoll_wait 1 0", "in_short_usleeps 1 0", "own 1 0", ""]
    ), done.stderr  # fmt: skip
