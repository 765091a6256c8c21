"""A mutex in shared memory, as LMDB's writers have it. The process that writes keeps it, and sleeps."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import time
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a sample that never comes",
    title="another process keeps a mutex in shared memory",
    users_see="env.begin(write=True) of LMDB never returns in a worker.",
    fix="Keep write transactions short, and let one process write.",
    truth=lambda o: Truth("", -1, -1, (), ("lock",)),
    simulated="a mutex of pthreads stands in for LMDB's",
    methods=FORK,
)

LIBC = ctypes.CDLL(None)


class Mutex:
    """A mutex that processes share."""

    def __init__(self) -> None:
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        kind = ctypes.create_string_buffer(64)
        LIBC.pthread_mutexattr_init(kind)
        LIBC.pthread_mutexattr_setpshared(kind, 1)
        LIBC.pthread_mutex_init(self.place, kind)

    @property
    def place(self) -> ctypes.c_void_p:
        """Its address."""
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self.page)))


def write(mutex: Mutex, begun: Any, pause: float) -> None:
    """Write for a while."""
    LIBC.pthread_mutex_lock(mutex.place)
    begun.set()
    time.sleep(pause)
    LIBC.pthread_mutex_unlock(mutex.place)


class Records(Pictures):
    """One sample is counted, in a transaction."""

    def __init__(self, options: LabOptions, mutex: Mutex) -> None:
        super().__init__(options)
        self.mutex = mutex

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at:
            LIBC.pthread_mutex_lock(self.mutex.place)
            LIBC.pthread_mutex_unlock(self.mutex.place)
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    context, mutex = multiprocessing.get_context("fork"), Mutex()
    begun = context.Event()
    pause = 0.1 if options.fixed else 3600
    writer = context.Process(target=write, args=(mutex, begun, pause), daemon=True)
    writer.start()
    begun.wait()
    for number, _ in enumerate(DataLoader(Records(options, mutex), **options.loading)):
        step(number)
    writer.kill()
