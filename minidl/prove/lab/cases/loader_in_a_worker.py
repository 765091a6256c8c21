"""A dataset makes a loader of its own, with workers. Workers are daemons, and may not have children."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, Pictures, in_sample

CASE = LabCase(
    theme="an error that ends the run",
    title="a loader with workers inside a worker",
    users_see="AssertionError: daemonic processes are not allowed to have children",
    thread="https://github.com/pytorch/pytorch/issues/15950",
    fix="num_workers=0 for the inner loader.",
    truth=in_sample("error"),
    ends=True,
    methods=FORK,
)


class Episodes(Pictures):
    """Sample `at` loads a whole dataset."""

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at:
            inner = DataLoader(Pictures(self.options, 4), num_workers=0 if self.options.fixed else 1)
            return next(iter(inner)).squeeze(0)
        return super().__getitem__(index)
