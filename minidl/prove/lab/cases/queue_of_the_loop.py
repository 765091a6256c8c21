"""The loop hands metrics to a thread by a bounded queue. The thread has died; the queue is full; the loop waits."""

from __future__ import annotations

import queue
import threading
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth

CASE = LabCase(
    theme="the program's own code",
    title="the training loop waits for its logging thread",
    users_see="The loader is blamed, since the progress bar is on it. Batches are ready.",
    fix="Let the thread tell its error; put with a timeout.",
    truth=lambda o: Truth("loop", -1, -1, ("consumer", "other"), ("bounded-queue", "nobody-answers")),
)


def write_metrics(metrics: queue.Queue[Any], broken: bool) -> None:
    """Write what comes, until the disk is full."""
    while True:
        number = metrics.get()
        if broken and number == 3:
            return
        print("batch", number, flush=True)


def main(options: LabOptions) -> None:
    metrics: queue.Queue[Any] = queue.Queue(maxsize=2)
    loader = iter(DataLoader(Pictures(options), **options.loading))
    threading.Thread(target=write_metrics, args=(metrics, not options.fixed), daemon=True).start()
    for number, _ in enumerate(loader):
        log_step(metrics, number)


def log_step(metrics: queue.Queue[Any], number: int) -> None:
    """Hand on the figures of a step."""
    metrics.put(number)
