"""A worker is killed in the write of a large result. The loop, in a thread, read the head and waits for the rest."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a result that is lost on its way",
    title="a worker is killed in the middle of a message",
    users_see="After an out-of-memory kill the job hangs, and even timeout= does not fire. In a script it raised.",
    thread="https://github.com/pytorch/pytorch/issues/21554",
    fix="Send less through the pipe (tensors go through shared memory); minidl's loader gives such a message up.",
    truth=lambda o: Truth("", -1, -1, (), ("torn-message",)),
    ours=lambda o: Truth("worker", 0, -1, (), ("died",)),
    ends_ours=True,
    simulated="the worker kills itself, in place of the out-of-memory killer",
    workers=(1, 1),
    methods=FORK,
)


def out_of_memory() -> None:
    """Be killed while a thread waits for room in the pipe; after 3 s if the kernel hides what threads wait for."""
    for _ in range(60):
        time.sleep(0.05)
        with contextlib.suppress(OSError):  # a thread that has just ended
            if any("pipe_write" in wchan.read_text() for wchan in Path("/proc/self/task").glob("*/wchan")):
                break
    os.kill(os.getpid(), signal.SIGKILL)


class Texts(Pictures):
    """Large objects that are no tensors, so that they go through the pipe."""

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        if index >= self.options.batch_size * self.options.workers and info.id == 0 and not self.options.fixed:
            threading.Thread(target=out_of_memory).start()
        return bytes(8_000_000)


def train(options: LabOptions) -> None:
    """The loop. SIGCHLD's handler, which raises an error when a worker dies, runs in the main thread alone."""
    for number, _ in enumerate(DataLoader(Texts(options), collate_fn=list, **options.loading)):
        step(number)
        time.sleep(2 if number == 0 else 0)


def main(options: LabOptions) -> None:
    training = threading.Thread(target=train, args=(options,))
    training.start()
    training.join()
