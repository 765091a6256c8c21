"""worker_init_fn builds an index for some seconds before a worker's first sample."""

from __future__ import annotations

import time

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, step

CASE = LabCase(
    theme="healthy but slow",
    title="workers that prepare themselves for long",
    users_see="The first batch of each epoch takes ten seconds.",
    thread="https://github.com/pytorch/pytorch/issues/15849",
    fix="Build the index once, in the main process; persistent_workers=True.",
    truth=None,
    workers=(1, 2),
)


class Preparation:
    """Computes for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, worker_id: int) -> None:
        until = time.thread_time() + self.seconds
        index: dict[int, int] = {}
        while time.thread_time() < until:
            index[len(index) % 100_000] = hash(str(len(index)))


def main(options: LabOptions) -> None:
    prepare = Preparation(0.1 if options.fixed else 5.0)
    for _ in range(2):
        for number, _ in enumerate(DataLoader(Pictures(options), worker_init_fn=prepare, **options.loading)):
            step(number)
