"""A helper class has a lock. A thread held it while the workers were forked, and is over before they need it."""

from __future__ import annotations

import threading
import time
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="fork in a program with threads",
    title="the lock of a helper class was held at the fork by a thread that is over",
    users_see="The loader hangs at the first sample that is not in a cache; no thread of the program is left.",
    thread="https://github.com/pytorch/pytorch/issues/130610",
    fix="Wait for the thread before the workers start, or use multiprocessing_context='forkserver'.",
    truth=in_sample("lock-held-at-fork"),
    methods=FORK,
    workers=(2, 3),
)


class Labels:
    """Labels by sample, which a thread loads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, float] = {}

    def load(self) -> None:
        """Load all labels."""
        with self._lock:
            time.sleep(2)
            self._known.update({index: float(index) for index in range(64)})

    def get(self, index: int) -> float:
        """The label of a sample."""
        with self._lock:
            return self._known.get(index, 0.0)


LABELS = Labels()


class Labelled(Pictures):
    """One sample asks for its label."""

    def __getitem__(self, index: int) -> Any:
        scale = LABELS.get(index) if index == self.options.at else 1.0
        return super().__getitem__(index) * scale


def main(options: LabOptions) -> None:
    loads = threading.Thread(target=LABELS.load, daemon=True)
    loads.start()
    time.sleep(2.5 if options.fixed else 0.1)
    for number, _ in enumerate(DataLoader(Labelled(options), **options.loading)):
        step(number)
