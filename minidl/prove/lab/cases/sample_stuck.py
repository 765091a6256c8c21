"""One file of the dataset is a pipe that no process writes to. The worker lives, and its read does not return."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="a sample that never comes",
    title="a read of one sample does not return",
    users_see="The progress bar stops. No error, no CPU use; Ctrl-C shows the main process in queue.get.",
    thread="https://github.com/pytorch/pytorch/issues/96629",
    fix="Read with a deadline, and leave out what is no regular file; timeout= makes the loader raise an error.",
    truth=in_sample("fifo"),
)


class Photos(Pictures):
    """One file a sample."""

    def __getitem__(self, index: int) -> Any:
        path = Path("photos", f"{index}.raw")
        if self.options.fixed and not path.is_file():
            return torch.zeros(3, 16, 16)
        time.sleep(self.options.pause)
        pixels = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        return pixels.reshape(3, 16, 16).float()


def main(options: LabOptions) -> None:
    photos = Photos(options)
    Path("photos").mkdir()
    for index in range(len(photos)):
        Path("photos", f"{index}.raw").write_bytes(bytes(3 * 16 * 16))
    damaged = Path("photos", f"{options.at}.raw")
    damaged.unlink()
    os.mkfifo(damaged)
    for number, _ in enumerate(DataLoader(photos, **options.loading)):
        step(number)
