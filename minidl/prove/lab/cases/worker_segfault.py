"""A decoder in C reads where nothing is mapped. The worker dies by SIGSEGV."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from minidl.prove.lab.case import LabCase, Pictures, in_sample

CASE = LabCase(
    theme="a process that dies",
    title="native code crashes in a worker",
    users_see="RuntimeError: DataLoader worker (pid 4711) is killed by signal: Segmentation fault.",
    thread="https://github.com/pytorch/pytorch/issues/53894",
    fix="Run the sample alone, with num_workers=0 and python -X faulthandler.",
    truth=in_sample("died"),
    ends=True,
)


class Photos(Pictures):
    """Sample `at` is damaged."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.options.pause)
        if index == self.options.at and not self.options.fixed:
            ctypes.string_at(0)
        return super().__getitem__(index)
