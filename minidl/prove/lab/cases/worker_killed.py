"""A worker gets SIGKILL: from the kernel, which needs memory, or from an operator. The error cannot tell which."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import ANY_METHOD, LabCase, LabOptions, Pictures, in_sample, launch, step

CASE = LabCase(
    theme="a process that dies",
    title="a worker is killed by SIGKILL",
    users_see="RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
    thread="https://github.com/pytorch/pytorch/issues/8976",
    fix="Look for oom_kill in the cgroup's memory.events; fewer workers, smaller samples, prefetch_factor=1.",
    truth=in_sample("died"),
    simulated="the worker kills itself, in place of the out-of-memory killer",
    ends=True,
    methods=ANY_METHOD,
    lookalikes=("worker_segfault", "torn_message", "shared_memory_full"),
)


class Photos(Pictures):
    """Sample `at` is too large."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.options.pause)
        if index == self.options.at and not self.options.fixed:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    for number, _ in enumerate(DataLoader(Photos(options), **options.loading)):
        step(number)


if __name__ == "__main__":
    launch(main)
