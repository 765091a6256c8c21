"""A worker gets SIGSTOP: from a batch system, a debugger, or a Ctrl-Z that met one process only. It counts as alive."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="a sample that never comes",
    title="a worker is stopped by a signal",
    users_see="The run stands still. is_alive() says True, terminate() does nothing.",
    thread="https://github.com/pytorch/pytorch/issues/165832",
    fix="kill -CONT PID; find out who sends SIGSTOP.",
    truth=in_sample("stopped"),
    simulated="the worker sends the signal to itself; in the field another process sends it",
    methods=FORK,
)


class Photos(Pictures):
    """Sample `at` is the one during which the worker is stopped."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.options.pause)
        if index == self.options.at:
            Path("pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


def resume() -> None:
    """What the operator does."""
    time.sleep(2)
    os.kill(int(Path("pid").read_text()), signal.SIGCONT)


def main(options: LabOptions) -> None:
    loader = iter(DataLoader(Photos(options), **options.loading))
    if options.fixed:
        while not Path("pid").exists():
            time.sleep(0.1)
        resume()
    for number, _ in enumerate(loader):
        step(number)
