"""The main process was writing to a log file when the workers were forked. Their copy of the stream stays locked."""

from __future__ import annotations

import io
import threading
import time
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="fork in a program with threads",
    title="a log stream that was being written at the fork",
    users_see="A worker hangs at its first log line. logging's own locks are made new at a fork, the stream's is not.",
    thread="https://github.com/python/cpython/issues/50970",
    fix="Open the log in each worker; or log through a queue; or start the workers before the threads.",
    truth=in_sample("lock-held-at-fork"),
    simulated="a slow raw stream stands in for a slow network file system",
    methods=FORK,
)


class SlowDisk(io.RawIOBase):
    """Where a write takes long."""

    def writable(self) -> bool:
        return True

    def write(self, text: Any) -> int:
        time.sleep(1)
        return len(text)


LOG = io.BufferedWriter(SlowDisk(), 64)


class Photos(Pictures):
    """Logs one sample."""

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at and not self.options.fixed:
            LOG.write(b"an odd one\n")
        return super().__getitem__(index)


def chatter(stop: threading.Event) -> None:
    """Write lines of metrics."""
    while not stop.is_set():
        LOG.write(b"loss 0.1, accuracy 0.9, learning rate 0.001 and more such figures in a long line\n")


def main(options: LabOptions) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=chatter, args=(stop,), daemon=True)
    thread.start()
    time.sleep(0.2)
    for number, _ in enumerate(DataLoader(Photos(options), **options.loading)):
        step(number)
    stop.set()
    thread.join()
