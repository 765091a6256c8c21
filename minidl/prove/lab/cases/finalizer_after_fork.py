"""A worker's garbage collector runs a finalizer that it inherited. The finalizer waits for a thread of its parent."""

from __future__ import annotations

import gc
import threading
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="fork in a program with threads",
    title="the garbage collector runs an inherited finalizer",
    users_see="The run hangs at a random step; each time the stack shows another line of the dataset.",
    thread="https://github.com/wandb/wandb/issues/12079",
    fix="Let the finalizer ask whether it is in the process that made the object; gc.freeze() before the fork.",
    truth=lambda o: Truth("worker", o.worker, o.at, ("signal-handler",), ("thread-missing-after-fork",)),
    methods=FORK,
)


class Uploader:
    """Hands what it gets to a thread, and waits for the thread when it goes."""

    def __init__(self) -> None:
        self.me = self  # a circle: only the collector ends it
        self.closing, self.closed = threading.Event(), threading.Event()
        threading.Thread(target=self.work, args=(self.closing, self.closed), daemon=True).start()

    @staticmethod
    def work(closing: threading.Event, closed: threading.Event) -> None:
        """Work until the owner goes."""
        closing.wait()
        closed.set()

    def __del__(self) -> None:
        self.closing.set()
        self.closed.wait()


class Photos(Pictures):
    """Collects garbage now and then."""

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at:
            gc.collect()
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    gc.disable()
    Uploader()
    if options.fixed:
        gc.freeze()
    for number, _ in enumerate(DataLoader(Photos(options), **options.loading)):
        step(number)
