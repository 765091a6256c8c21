"""After each epoch the main process evaluates for long, without the loader, whose workers persist."""

from __future__ import annotations

import time

import torch
from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, step

CASE = LabCase(
    theme="healthy but slow",
    title="a long evaluation between two epochs",
    users_see="The workers do nothing for a while.",
    fix="Nothing.",
    truth=None,
)


def evaluate(seconds: float) -> None:
    """Compute."""
    until = time.thread_time() + seconds
    weights = torch.rand(128, 128)
    while time.thread_time() < until:
        weights = torch.tanh(weights @ weights.T)


def main(options: LabOptions) -> None:
    loader = DataLoader(Pictures(options), persistent_workers=True, **options.loading)
    for _ in range(3):
        for number, _ in enumerate(loader):
            step(number)
        evaluate(0.2 if options.fixed else 6.0)
