"""A file that the dataset maps becomes shorter. The next read of a page beyond its end kills the worker: SIGBUS."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a process that dies",
    title="a mapped file was cut",
    users_see="DataLoader worker is killed by signal: Bus error. Shared memory has much room.",
    fix="Write data files under another name, and rename them when they are complete.",
    truth=lambda o: Truth("worker", -1, -1, ("sample",), ("died",)),  # the others read that file, too
    ends=True,
    methods=FORK,
)

PAGES = 64


class Mapped(Pictures):
    """Each sample reads a page of a file."""

    def __init__(self, options: LabOptions) -> None:
        super().__init__(options)
        self.pages = np.memmap("pages.bin", np.uint8, "r", shape=(PAGES, 4096))

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at and not self.options.fixed:
            os.truncate("pages.bin", 4096)
        return super().__getitem__(index) + float(self.pages[index, 0])


def main(options: LabOptions) -> None:
    np.zeros((PAGES, 4096), np.uint8).tofile("pages.bin")
    for number, _ in enumerate(DataLoader(Mapped(options), **options.loading)):
        step(number)
