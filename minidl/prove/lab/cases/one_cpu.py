"""The job may use one CPU, and four workers compute on it."""

from __future__ import annotations

import os
import time
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, step

CASE = LabCase(
    theme="healthy but slow",
    title="all workers on one CPU",
    users_see="Eight CPUs in the machine, and one of them is busy.",
    thread="https://github.com/pytorch/pytorch/issues/101850",
    fix="os.sched_setaffinity(0, range(os.cpu_count())) before the loader; ask the scheduler for more CPUs.",
    truth=None,
    workers=(2, 3),
)


class Photos(Pictures):
    """Computes."""

    def __getitem__(self, index: int) -> Any:
        until = time.thread_time() + (0.01 if self.options.fixed else 1.0 / self.options.batch_size)
        while time.thread_time() < until:
            sum(range(1000))
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    if not options.fixed:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for number, _ in enumerate(DataLoader(Photos(options), **options.loading)):
        step(number)
