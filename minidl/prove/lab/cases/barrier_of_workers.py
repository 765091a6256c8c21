"""The workers meet at a barrier before each batch. One has fewer batches, and does not come any more."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="cycles of waiting",
    title="workers wait at a barrier for one that has no more work",
    users_see="Each epoch hangs near its end, if the number of batches does not divide by the number of workers.",
    fix="No barrier between workers; or abort it when a worker is done.",
    truth=lambda o: Truth("worker", -1, -1, ("collate",), ("barrier", "cycle")),
    workers=(2, 3),
    methods=FORK,
)


class Together:
    """Makes a batch when all workers are about to."""

    def __init__(self, workers: int, patience: float | None) -> None:
        self.barrier = multiprocessing.get_context("fork").Barrier(workers)
        self.patience = patience

    def __call__(self, samples: list[Any]) -> Any:
        info: Any = get_worker_info()
        if info is not None and not self.barrier.broken:
            try:
                self.barrier.wait(self.patience)
            except threading.BrokenBarrierError:
                pass
        return torch.stack(samples)


def main(options: LabOptions) -> None:
    batches = 4 * options.workers + 1
    pictures = Pictures(options, batches * options.batch_size)
    together = Together(options.workers, 1.0 if options.fixed else None)
    for number, _ in enumerate(DataLoader(pictures, collate_fn=together, **options.loading)):
        step(number)
