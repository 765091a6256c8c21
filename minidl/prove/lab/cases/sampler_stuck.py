"""The sampler asks another process for the next indices. The loader calls it in the main process, and waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Sampler

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="the program's own code",
    title="a sampler does not give the next index",
    users_see="All workers are idle, and next(loader) does not return. The dataset is blamed.",
    fix="Let the sampler compute its order at the start, or give its request a deadline.",
    truth=lambda o: Truth("loop", -1, -1, ("sampler",), ("fifo",)),
)


class Curriculum(Sampler[int]):
    """Reads its order from a file that another process writes."""

    def __init__(self, options: LabOptions) -> None:
        self.options = options

    def __iter__(self) -> Iterator[int]:
        yield from range(40)
        if not self.options.fixed:
            Path("order").read_text()
        yield from range(40, 64)

    def __len__(self) -> int:
        return 64


def main(options: LabOptions) -> None:
    os.mkfifo("order")
    loading: dict[str, Any] = options.loading
    for number, _ in enumerate(DataLoader(Pictures(options), sampler=Curriculum(options), **loading)):
        step(number)
