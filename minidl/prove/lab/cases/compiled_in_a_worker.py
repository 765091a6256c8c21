"""The loop has compiled a function with torch.compile. A worker compiles another one, by a pool that it has not."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="fork in a program with threads",
    title="torch.compile in a worker waits for compile workers",
    users_see="A compiled transform works without workers, and hangs in the first worker that needs to compile.",
    fix="Compile in the loop only, or use multiprocessing_context='forkserver'.",
    truth=in_sample("thread-missing-after-fork"),
    methods=FORK,
)


def first(picture: torch.Tensor) -> torch.Tensor:
    return (picture * 2).sin()


def second(picture: torch.Tensor) -> torch.Tensor:
    return (picture * 3).cos()


class Transformed(Pictures):
    """One sample has a transform of its own."""

    def __getitem__(self, index: int) -> Any:
        picture = super().__getitem__(index)
        if index == self.options.at:
            picture = second(picture) if self.options.fixed else torch.compile(second)(picture)
        return picture


# The loop's own, before the program is ready: it takes a while.
COMPILED = torch.compile(first)(torch.ones(3)) if __name__ == "__main__" else None


def main(options: LabOptions) -> None:
    for number, _ in enumerate(DataLoader(Transformed(options), **options.loading)):
        step(number)
