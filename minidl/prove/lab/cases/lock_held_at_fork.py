"""A thread holds a lock while the workers are forked. In them the lock stays held: its holder was not copied."""

from __future__ import annotations

import threading
import time
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="fork in a program with threads",
    title="a lock that a thread held at the fork",
    users_see="Sometimes the first batch never comes; it depends on the moment at which the workers start.",
    thread="https://github.com/pytorch/pytorch/issues/130610",
    fix="Start the threads after the workers, or use multiprocessing_context='forkserver'.",
    truth=lambda o: Truth("worker", 0, 0, ("sample",), ("lock-held-at-fork",)),
    methods=FORK,
)

CACHE: dict[int, float] = {}
CACHE_LOCK = threading.Lock()


def refresh(stop: threading.Event) -> None:
    """Bring the cache up to date, again and again."""
    while not stop.is_set():
        with CACHE_LOCK:
            CACHE.update({index: float(index) for index in range(64)})
            time.sleep(0.5)


class Cached(Pictures):
    """Looks a sample up in the cache."""

    def __getitem__(self, index: int) -> Any:
        with CACHE_LOCK:
            scale = CACHE.get(index, 1.0)
        return super().__getitem__(index) * scale


def main(options: LabOptions) -> None:
    stop = threading.Event()
    loader = DataLoader(Cached(options), **options.loading)
    batches = iter(loader) if options.fixed else None  # the workers first, then the thread
    threading.Thread(target=refresh, args=(stop,), daemon=True).start()
    time.sleep(0.1)
    for number, _ in enumerate(batches or loader):
        step(number)
    stop.set()
