"""Another program has locked the index for an hour. Each worker asks for the lock again and again, and sleeps."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a sample that never comes",
    title="a file lock that another program holds is polled",
    users_see="The loader hangs while the index is rebuilt by another job on this machine.",
    thread="https://github.com/huggingface/datasets/issues/5849",
    fix="Give the lock a timeout, and read a finished copy of the index.",
    truth=lambda o: Truth("", -1, -1, (), ("file-lock",)),
)

INDEX = Path("index.lock")
REBUILDS = """
import fcntl, time
index = open("index.lock", "w")
fcntl.flock(index, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(3600)
"""


def locked(file: Any) -> None:
    """Lock a file, by asking for it again and again."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)


class Indexed(Pictures):
    """One sample is looked up in the index."""

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at:
            with INDEX.open("w") as file:
                locked(file)
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    command = ["true"] if options.fixed else [sys.executable, "-c", REBUILDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for number, _ in enumerate(DataLoader(Indexed(options), **options.loading)):
            step(number)
        other.kill()
