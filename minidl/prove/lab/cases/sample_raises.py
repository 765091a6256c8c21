"""A sample raises an error. The traceback has three processes' frames and no index."""

from __future__ import annotations

import time
from typing import Any

from minidl.prove.lab.case import LabCase, Pictures, in_sample

CASE = LabCase(
    theme="an error that ends the run",
    title="a sample raises an exception",
    users_see="KeyError: Caught KeyError in DataLoader worker process 1. It does not name the sample.",
    thread="https://github.com/pytorch/pytorch/issues/7238",
    fix="Handle the sample that the verdict names, or leave it out.",
    truth=in_sample("error"),
    ends=True,
)

LABELS = {"cat": 0, "dog": 1}


class Photos(Pictures):
    """Labels come from a table that lacks one of them."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.options.pause)
        name = "cow" if index == self.options.at else "cat"
        return super().__getitem__(index), LABELS.get(name, -1) if self.options.fixed else LABELS[name]
