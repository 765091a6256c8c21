"""A library ends the process when its licence server is not there. The worker is gone without a signal."""

from __future__ import annotations

import os
import time
from typing import Any

from minidl.prove.lab.case import LabCase, Pictures, in_sample

CASE = LabCase(
    theme="a process that dies",
    title="a library calls exit in a worker",
    users_see="RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly, with no other word.",
    thread="https://github.com/pytorch/pytorch/issues/8976",
    fix="Run the sample alone with num_workers=0, and see what ends the process.",
    truth=in_sample("died"),
    ends=True,
)


class Photos(Pictures):
    """Sample `at` asks for a licence."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.options.pause)
        if index == self.options.at and not self.options.fixed:
            os._exit(7)
        return super().__getitem__(index)
