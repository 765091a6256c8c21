"""A batch does not fit into the shared memory that is left."""

from __future__ import annotations

import resource
from typing import Any

import torch
from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a process that dies",
    title="shared memory is exhausted",
    users_see="unable to write to file </torch_...>, or: killed by signal: Bus error. It might be possible that ...",
    thread="https://github.com/pytorch/pytorch/issues/5040",
    fix="docker run --shm-size=8g; budget workers x prefetch_factor x bytes of a batch.",
    truth=lambda o: Truth("worker", o.at % o.workers, -1, (), ("error",)),
    simulated="a limit on the size of files stands in for a small /dev/shm: shared memory counts as a file",
    ends=True,
    methods=FORK,
)


class Photos(Pictures):
    """One sample is large."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 500, 500) if index == self.options.at else torch.zeros(3, 5, 5)


def small_memory(worker_id: int) -> None:
    """Let shared memory hold at most 1 MB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))


def main(options: LabOptions) -> None:
    start = None if options.fixed else small_memory
    loading = options.loading | {"batch_size": 1}
    for number, _ in enumerate(DataLoader(Photos(options), worker_init_fn=start, **loading)):
        step(number)
