"""A batch holds something that cannot be pickled. torch's worker finds out in a thread that drops it and goes on."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a result that is lost on its way",
    title="a batch that cannot be pickled is dropped",
    users_see="The loader hangs after a traceback of queues.py, _feed, that scrolled away. All workers are idle.",
    thread="https://github.com/pytorch/pytorch/issues/142884",
    fix="Return what can be pickled: tensors, arrays, plain containers. minidl's loader raises the error at this task.",
    truth=lambda o: Truth("worker", o.worker, -1, (), ("lost-result",)),
    ours=lambda o: Truth("worker", o.worker, -1, (), ("error",)),
    ends_ours=True,
    methods=FORK,
)


class Photo:
    """A picture with its source."""

    def __init__(self, pixels: torch.Tensor, index: int) -> None:
        self.pixels, self.index = pixels, index
        self.source: Any = None


class Photos(Pictures):
    """Sample `at` keeps an open file."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.options.pause)
        photo = Photo(super().__getitem__(index), index)
        if index == self.options.at and not self.options.fixed:
            photo.source = open("/proc/version", "rb")  # noqa: SIM115
        return photo


def main(options: LabOptions) -> None:
    for number, _ in enumerate(DataLoader(Photos(options), collate_fn=list, **options.loading)):
        step(number)
