"""Rank 1's worker hangs in a sample. Rank 0 shows the error: it waits in all_reduce for rank 1."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="several ranks",
    title="a rank waits for another rank's worker",
    users_see="The watchdog's traceback is of all_reduce, on every rank but one. That one says nothing.",
    thread="https://github.com/Lightning-AI/litData/issues/823",
    fix="Look at the rank that is in its loader, not at those that are in the collective.",
    truth=in_sample("fifo"),
    workers=(1, 1),
    methods=FORK,
)


class Photos(Pictures):
    """On rank 1, sample `at` is a pipe that no process writes to."""

    def __init__(self, options: LabOptions, rank: int) -> None:
        super().__init__(options)
        self.rank = rank

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at and self.rank == 1 and not self.options.fixed:
            Path("photo.raw").read_bytes()
        return super().__getitem__(index)


def rank(number: int, options: LabOptions) -> None:
    """Train as one of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{Path('meeting').absolute()}", rank=number, world_size=2)
    for batch, pictures in enumerate(DataLoader(Photos(options, number), **options.loading)):
        loss = torch.as_tensor(pictures).mean()
        dist.all_reduce(loss)
        if number:
            step(batch)
    dist.destroy_process_group()


def main(options: LabOptions) -> None:
    os.mkfifo("photo.raw")
    start_processes(rank, args=(options,), nprocs=2)  # type: ignore[no-untyped-call]
