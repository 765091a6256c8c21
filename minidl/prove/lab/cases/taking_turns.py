"""The workers read from one device, and take turns with a file lock, a second each."""

from __future__ import annotations

import fcntl
import time
from typing import Any

from minidl.prove.lab.case import LabCase, Pictures

CASE = LabCase(
    theme="healthy but slow",
    title="workers that take turns with a lock",
    users_see="More workers do not help.",
    fix="One reader and larger reads; or a lock for each file.",
    truth=None,
    workers=(2, 3),
)


class Tapes(Pictures):
    """One reads at a time."""

    def __getitem__(self, index: int) -> Any:
        with open("drive.lock", "w") as drive:
            fcntl.flock(drive, fcntl.LOCK_EX)
            time.sleep((0.1 if self.options.fixed else 1.0) / self.options.batch_size)
        return super().__getitem__(index)
