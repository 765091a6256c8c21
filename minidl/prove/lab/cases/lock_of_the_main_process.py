"""The main process locked the cache's index file to build it, and keeps the lock. A worker wants it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a sample that never comes",
    title="a worker waits for a file lock that the main process keeps",
    users_see="The loader hangs the first time that a sample is missing in the cache.",
    thread="https://github.com/huggingface/datasets/issues/1672",
    fix="Let go of the lock before the loop begins: `with` around the flock.",
    truth=lambda o: Truth("", -1, -1, (), ("file-lock", "cycle")),
)

INDEX = Path("index.lock")


class Cached(Pictures):
    """A sample that the cache lacks is written to it, under a lock."""

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at:
            own = os.open(INDEX, os.O_RDWR)
            fcntl.flock(own, fcntl.LOCK_EX)
            os.close(own)
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    lock = os.open(INDEX, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    Path("index").write_text("0-63")
    if options.fixed:
        fcntl.flock(lock, fcntl.LOCK_UN)
    for number, _ in enumerate(DataLoader(Cached(options), **options.loading)):
        step(number)
