"""The training step takes three seconds. Batches are ready; the workers are idle."""

from __future__ import annotations

import time

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, step

CASE = LabCase(
    theme="healthy but slow",
    title="a training step of three seconds",
    users_see="The workers idle, and num_workers=32 does not help.",
    fix="None in the loader: make the step faster.",
    truth=None,
)


def train(number: int, seconds: float) -> None:
    """Forwards, backwards."""
    time.sleep(seconds)
    step(number)


def main(options: LabOptions) -> None:
    for number, _ in enumerate(DataLoader(Pictures(options), **options.loading)):
        train(number, 0.1 if options.fixed else 3.0)
