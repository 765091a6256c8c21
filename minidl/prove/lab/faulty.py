"""Datasets that answer, stand still or die at one sample; for the guards' programs and for tests.

All of them run in torch's workers and in ours: they ask `torch.utils.data.get_worker_info`, which answers in both.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch
import torch.utils.data


def worker() -> tuple[int, int, int]:
    """(id, num_workers, seed) of this worker; (-1, 0, 0) in the loader's own process."""
    info = torch.utils.data.get_worker_info()
    return (-1, 0, 0) if info is None else (info.id, info.num_workers, info.seed)


def chances() -> tuple[float, float, float]:
    """One draw from each global generator, or from each of a worker thread's own."""
    own: Any = getattr(torch.utils.data.get_worker_info(), "rng", None)
    if own is not None:
        drawn = torch.rand((), generator=own.torch_generator)
        return own.random_generator.random(), float(own.numpy_generator.random()), float(drawn)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Numbers:
    """Map-style by duck typing: i -> i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return index


class SharedStream(torch.utils.data.IterableDataset[Any]):
    """torch's kind of stream: each worker serves its share of range(n)."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        mine, workers, _ = worker()
        for index in range(self.n)[max(mine, 0) :: max(workers, 1)]:
            yield index, worker(), chances()


class At(Numbers):
    """i -> i, but `thing` at index `at`."""

    def __init__(self, n: int, at: int, thing: Any) -> None:
        super().__init__(n)
        self.at = at
        self.thing = thing

    def __getitem__(self, index: int) -> Any:
        return self.thing() if index == self.at else index


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> NoReturn:
    """Nothing but a signal ends it."""
    while True:
        time.sleep(3600)


def hang_without_sigterm() -> NoReturn:
    """Not even SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang()


def worker_spec() -> Any:
    """The arguments of the worker loop that runs this code, found on its stack."""
    frame: Any = sys._getframe()
    while "spec" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["spec"]


def wait_for_the_end() -> int:
    """A sample that is served only when the loader has told its workers to skip the rest."""
    while not worker_spec().done_event.is_set():
        time.sleep(0.002)
    return 0


def die_in_the_middle_of_a_message() -> None:
    """Be killed in a long write of a result."""
    begin_message(worker_spec().result_queue)
    kill_myself()


def begin_message(queue: Any) -> None:
    """Announce a message of a million bytes and write seven, with the lock that every writer takes."""
    queue._wlock.acquire()
    os.write(queue._writer.fileno(), struct.pack("!i", 1_000_000) + b"partial")
