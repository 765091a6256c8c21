"""A worker gets SIGKILL: from the kernel, which needs memory, or from an operator. The error cannot tell which."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from minidl.prove.lab.case import LabCase, Pictures, in_sample

CASE = LabCase(
    theme="a process that dies",
    title="a worker is killed by SIGKILL",
    users_see="RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
    thread="https://github.com/pytorch/pytorch/issues/8976",
    fix="Look for oom_kill in the cgroup's memory.events; fewer workers, smaller samples, prefetch_factor=1.",
    truth=in_sample("died"),
    simulated="the worker kills itself, in place of the out-of-memory killer",
    ends=True,
)


class Photos(Pictures):
    """Sample `at` is too large."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.options.pause)
        if index == self.options.at and not self.options.fixed:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)
