"""One sample takes eight seconds; batches behind it are ready and wait for their turn."""

from __future__ import annotations

import time
from typing import Any

from minidl.prove.lab.case import LabCase, Pictures

CASE = LabCase(
    theme="healthy but slow",
    title="one slow sample holds up all batches behind it",
    users_see="Now and then a pause of some seconds, then several batches at once.",
    thread="https://github.com/pytorch/pytorch/issues/105203",
    fix="in_order=False; samples of equal size in a batch.",
    truth=None,
    workers=(2, 3),
)


class Videos(Pictures):
    """Some are long."""

    def __getitem__(self, index: int) -> Any:
        long = index == self.options.at or index == self.options.at + 30
        time.sleep((1 if self.options.fixed else 8) if long else 0.05)
        return super().__getitem__(index)
