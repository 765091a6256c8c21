"""collate_fn pads texts with a vocabulary that it reads at its first use, from a network file system that hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a sample that never comes",
    title="collate_fn does not return",
    users_see="Every dataset[i] works, and the loader hangs.",
    fix="Read in the dataset's __init__; look at collate_fn when single samples work.",
    truth=lambda o: Truth("worker", 0, -1, ("collate",), ("fifo",)),
    simulated="an open pipe stands in for the file system",
)


def padded(samples: list[Any]) -> Any:
    """A batch, with the vocabulary's size."""
    words = Path("vocabulary").read_text().split()
    return torch.stack(samples), len(words)


def main(options: LabOptions) -> None:
    if options.fixed:
        Path("vocabulary").write_text("a cat on a mat")
    else:
        os.mkfifo("vocabulary")
    for number, _ in enumerate(DataLoader(Pictures(options), collate_fn=padded, **options.loading)):
        step(number)
