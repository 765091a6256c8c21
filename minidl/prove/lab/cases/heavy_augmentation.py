"""Each sample needs a second of computing. The workers are busy all the time."""

from __future__ import annotations

import time
from typing import Any

import torch

from minidl.prove.lab.case import LabCase, Pictures

CASE = LabCase(
    theme="healthy but slow",
    title="an augmentation that computes for long",
    users_see="One batch in several seconds, all workers at 100 % CPU.",
    thread="https://github.com/pytorch/pytorch/issues/19836",
    fix="More workers if there are more CPUs; augment whole batches.",
    truth=None,
    workers=(1, 2),
)


class Photos(Pictures):
    """Computes for some time."""

    def __getitem__(self, index: int) -> Any:
        until = time.thread_time() + (0.02 if self.options.fixed else 2.0 / self.options.batch_size)
        picture = torch.rand(64, 64)
        while time.thread_time() < until:
            picture = torch.tanh(picture @ picture.T)
        return picture
