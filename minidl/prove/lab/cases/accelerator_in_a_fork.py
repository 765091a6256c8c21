"""A transform moves samples to the accelerator, in a forked worker. Its context does not survive a fork."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="an error that ends the run",
    title="a worker uses the accelerator after a fork",
    users_see="RuntimeError: Cannot re-initialize CUDA in forked subprocess.",
    thread="https://github.com/pytorch/pytorch/issues/40403",
    fix="Return CPU tensors from the workers, and move batches in the loop.",
    truth=lambda o: Truth("worker", 0, 0, ("sample",), ("error",)),
    simulated="an object that knows its process stands in for the accelerator",
    ends=True,
    methods=FORK,
)


class Accelerator:
    """Works in the process that made it."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def move(self, tensor: Any) -> Any:
        """The tensor, on the device. Raises RuntimeError in a forked process."""
        if os.getpid() != self.pid:
            raise RuntimeError("Cannot re-initialize the device in a forked subprocess")
        return tensor


class Photos(Pictures):
    """Moves each sample."""

    def __init__(self, options: LabOptions, device: Accelerator) -> None:
        super().__init__(options)
        self.device = device

    def __getitem__(self, index: int) -> Any:
        picture = super().__getitem__(index)
        return picture if self.options.fixed else self.device.move(picture)


def main(options: LabOptions) -> None:
    device = Accelerator()
    for number, batch in enumerate(DataLoader(Photos(options, device), **options.loading)):
        device.move(batch)
        step(number)
