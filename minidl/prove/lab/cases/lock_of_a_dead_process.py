"""A process was killed while it held a multiprocessing.Lock. The lock has no owner, so no process can get it now."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="a sample that never comes",
    title="a semaphore that a killed process took along",
    users_see="All workers hang in Lock.acquire, and no process that is there holds the lock.",
    thread="https://github.com/python/cpython/issues/88304",
    fix="Lock a file (flock): its lock ends with its process. Acquire with a timeout.",
    truth=in_sample("dead-lock-holder", "permit-lost", "semaphore"),
    simulated="the process kills itself",
    methods=FORK,
)


def indexing(lock: Any, release: bool) -> None:
    """Build the index, under the lock, and be killed."""
    lock.acquire()
    if release:
        lock.release()
    os.kill(os.getpid(), signal.SIGKILL)


class Cached(Pictures):
    """Sample `at` goes into a cache that processes share."""

    def __init__(self, options: LabOptions, lock: Any) -> None:
        super().__init__(options)
        self.lock = lock

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at:
            with self.lock:
                return super().__getitem__(index)
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    context = multiprocessing.get_context("fork")
    lock = context.Lock()
    indexer = context.Process(target=indexing, args=(lock, options.fixed))
    indexer.start()
    indexer.join()
    for number, _ in enumerate(DataLoader(Cached(options, lock), **options.loading)):
        step(number)
