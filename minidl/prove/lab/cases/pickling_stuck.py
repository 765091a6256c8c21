"""A batch holds an object that reads its data when it is pickled: in the feeder thread, and the read hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a result that is lost on its way",
    title="an object's __reduce__ does not return",
    users_see="The worker seems to be idle: its main thread waits for a task. The batch that it made never arrives.",
    fix="Read the data in __getitem__; let __reduce__ and __getstate__ only return what is there.",
    truth=lambda o: Truth("worker", o.worker, -1, ("pickle",), ("fifo",)),
)


class Lazy:
    """A file's bytes, once they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return bytes, (self.path.read_bytes(),)


class Photos(Pictures):
    """Sample `at` is lazy."""

    def __getitem__(self, index: int) -> Any:
        return Lazy(Path("photo.raw")) if index == self.options.at else super().__getitem__(index)


def main(options: LabOptions) -> None:
    if options.fixed:
        Path("photo.raw").write_bytes(b"pixels")
    else:
        os.mkfifo("photo.raw")
    for number, _ in enumerate(DataLoader(Photos(options), collate_fn=list, **options.loading)):
        step(number)
