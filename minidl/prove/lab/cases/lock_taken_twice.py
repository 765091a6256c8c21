"""A method that has taken a lock calls another one that takes it. The program also has a thread, which is innocent."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="cycles of waiting",
    title="a method takes a lock that its caller has taken",
    users_see="The loader hangs at one sample. The program has threads, so that a lock held at the fork is suspected.",
    fix="threading.RLock, or a method without the lock for callers that have it.",
    truth=in_sample("lock-held-by-itself"),
    methods=FORK,
)

LOCK = threading.Lock()


class Shards(Pictures):
    """Samples of shards that are opened when needed."""

    def open(self, shard: int) -> float:
        """Open a shard."""
        with LOCK:
            return float(shard)

    def __getitem__(self, index: int) -> Any:
        picture = super().__getitem__(index)
        if index != self.options.at or self.options.fixed:
            return picture * self.open(index // 16)
        with LOCK:
            scale = self.open(index // 16)
            return picture * scale


def main(options: LabOptions) -> None:
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True, name="monitor").start()
    for number, _ in enumerate(DataLoader(Shards(options), **options.loading)):
        step(number)
    stop.set()
