"""The workers close their caches when they end, for three seconds; the main process waits for them after each epoch."""

from __future__ import annotations

import time
from multiprocessing.util import Finalize

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, step

CASE = LabCase(
    theme="healthy but slow",
    title="workers that take long to end",
    users_see="A pause after each epoch.",
    thread="https://github.com/pytorch/pytorch/issues/26072",
    fix="persistent_workers=True.",
    truth=None,
    workers=(1, 2),
)


class Caches:
    """Closes the worker's caches at its end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, worker_id: int) -> None:
        Finalize(None, time.sleep, (self.seconds,), exitpriority=10)


def main(options: LabOptions) -> None:
    caches = Caches(0.1 if options.fixed else 3.0)
    for _ in range(3):
        for number, _ in enumerate(DataLoader(Pictures(options), worker_init_fn=caches, **options.loading)):
            step(number)
