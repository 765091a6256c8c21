"""The main process computed with several threads, then forked. In a worker, OpenMP waits for threads that it lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="fork in a program with threads",
    title="OpenMP's threads are not there in a forked worker",
    users_see="Evaluation on the CPU, then training: no batch comes, once set_num_threads is in the worker.",
    thread="https://github.com/pytorch/pytorch/issues/75147",
    fix="Leave one thread to each worker (the default), or use multiprocessing_context='spawn'.",
    truth=lambda o: Truth("worker", 0, 0, ("sample",), ("thread-missing-after-fork",)),
    methods=FORK,
)


class Photos(Pictures):
    """Large pictures, filtered with several threads."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1200, 1200).add(1).sum(dim=0)


def more_threads(worker_id: int) -> None:
    """Let the worker compute with two threads."""
    torch.set_num_threads(2)


def main(options: LabOptions) -> None:
    torch.set_num_threads(2)
    print("a first look:", float(Photos(options)[0].sum()) > 0, flush=True)
    initialize = None if options.fixed else more_threads
    for number, _ in enumerate(DataLoader(Photos(options), worker_init_fn=initialize, **options.loading)):
        step(number)
