"""Two workers each lock a shard of a cache, and then want the one that the other has."""

from __future__ import annotations

import fcntl
import time
from typing import Any

from torch.utils.data import get_worker_info

from minidl.prove.lab.case import FORK, LabCase, Pictures, Truth

CASE = LabCase(
    theme="cycles of waiting",
    title="two workers lock two files in opposite orders",
    users_see="The run stops at a random step, sooner with more workers. All are asleep.",
    fix="Lock the files in one order, by name; or write to a separate file and rename it.",
    truth=lambda o: Truth("worker", -1, -1, ("sample",), ("cycle",)),
    workers=(2, 3),
    methods=FORK,
)


class Cached(Pictures):
    """Copies samples between two shards."""

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        if info.id < 2:
            names = ["left.lock", "right.lock"] if info.id == 0 else ["right.lock", "left.lock"]
            first, second = sorted(names) if self.options.fixed else names
            with open(first, "w") as one, open(second, "w") as two:
                fcntl.flock(one, fcntl.LOCK_EX)
                time.sleep(0.5 if not self.options.fixed else 0)
                fcntl.flock(two, fcntl.LOCK_EX)
        return super().__getitem__(index)
