"""Each sample comes from a slow disk. The loader is healthy, and waits for it."""

from __future__ import annotations

import time
from typing import Any

from minidl.prove.lab.case import LabCase, Pictures

CASE = LabCase(
    theme="healthy but slow",
    title="samples from a slow disk",
    users_see="2 s for a batch, and the accelerator idles.",
    thread="https://github.com/pytorch/pytorch/issues/19836",
    fix="More workers, larger reads, a local copy.",
    truth=None,
)


class Photos(Pictures):
    """A picture takes its time."""

    def __getitem__(self, index: int) -> Any:
        time.sleep((0.2 if self.options.fixed else 2.0) / self.options.batch_size)
        return super().__getitem__(index)
