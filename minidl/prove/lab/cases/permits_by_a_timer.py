"""A timer of the main process hands out permits, four every 20 s: between two of them all workers wait."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, step

CASE = LabCase(
    theme="healthy but slow",
    title="samples that a timer's permits limit",
    users_see="A few batches, then a pause, again and again.",
    fix="Nothing.",
    truth=None,
    workers=(1, 2),
    methods=FORK,
)


class Metered(Pictures):
    """Takes a permit for each sample."""

    def __init__(self, options: LabOptions, permits: Any) -> None:
        super().__init__(options)
        self.permits = permits

    def __getitem__(self, index: int) -> Any:
        self.permits.acquire()
        return super().__getitem__(index)


def refill(permits: Any, seconds: float) -> None:
    """Hand out permits, and begin the next timer."""
    for _ in range(4):
        permits.release()
    timer = threading.Timer(seconds, refill, (permits, seconds))
    timer.daemon = True
    timer.start()


def main(options: LabOptions) -> None:
    permits = multiprocessing.get_context("fork").Semaphore(0)
    refill(permits, 0.02 if options.fixed else 20.0)
    for number, _ in enumerate(DataLoader(Metered(options, permits), **options.loading)):
        step(number)
