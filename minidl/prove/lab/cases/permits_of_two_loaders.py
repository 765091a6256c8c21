"""Two loaders share a budget of permits. The one that is ahead holds all of them; the loop waits for the other one."""

from __future__ import annotations

import multiprocessing
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="cycles of waiting",
    title="two loaders wait for each other's permits",
    users_see="zip(labelled, unlabelled) hangs. Each loader works alone.",
    fix="A budget for each loader; or give a permit back when the sample is read, not when its batch is consumed.",
    truth=lambda o: Truth("", -1, -1, (), ("cycle", "semaphore", "permit-lost")),
    workers=(1, 2),
    methods=FORK,
)


class Budgeted(Pictures):
    """Takes a permit for each sample; the loop gives it back."""

    def __init__(self, options: LabOptions, permits: Any) -> None:
        super().__init__(options)
        self.permits = permits

    def __getitem__(self, index: int) -> Any:
        self.permits.acquire()
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    context = multiprocessing.get_context("fork")
    in_flight = 2 * options.workers * options.batch_size
    permits = context.Semaphore(in_flight * (4 if options.fixed else 1))
    labelled = iter(DataLoader(Budgeted(options, permits), **options.loading))
    unlabelled = DataLoader(Budgeted(options, permits), **options.loading)
    next(labelled)
    for _ in range(options.batch_size):
        permits.release()
    for number, (one, other) in enumerate(zip(labelled, unlabelled, strict=False)):
        for _ in range(len(one) + len(other)):
            permits.release()
        step(number)
