"""Workers put statistics into a bounded queue. The loop empties it at the end of the epoch, which does not come."""

from __future__ import annotations

import multiprocessing
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="cycles of waiting",
    title="workers fill a queue that the loop empties too late",
    users_see="Small datasets work. With the whole one, the first epoch hangs after the same number of samples.",
    fix="Empty the queue in the loop; or send the statistics with the samples.",
    truth=lambda o: Truth("worker", -1, -1, ("sample",), ("bounded-queue", "cycle")),
    methods=FORK,
)


class Counted(Pictures):
    """Tells the size of each sample."""

    def __init__(self, options: LabOptions, sizes: Any) -> None:
        super().__init__(options)
        self.sizes = sizes

    def __getitem__(self, index: int) -> Any:
        self.sizes.put(index)
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    sizes = multiprocessing.get_context("fork").Queue(maxsize=30)
    for number, batch in enumerate(DataLoader(Counted(options, sizes), **options.loading)):
        step(number)
        for _ in range(len(batch) if options.fixed else 0):
            sizes.get()
    for _ in range(0 if options.fixed else 64):
        sizes.get()
