"""The dataset's thread pool was used in the main process. A forked worker inherits the pool and none of its threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="fork in a program with threads",
    title="a thread pool whose threads the fork did not copy",
    users_see="dataset[0] works in the notebook, and afterwards the loader hangs at its first batch.",
    thread="https://github.com/huggingface/tokenizers/issues/187",
    fix="Make the pool in the worker, at its first use; or use multiprocessing_context='forkserver'.",
    truth=lambda o: Truth("worker", 0, 0, ("sample",), ("thread-missing-after-fork",)),
    methods=FORK,
)


class Photos(Pictures):
    """Decodes on a pool."""

    def __init__(self, options: LabOptions) -> None:
        super().__init__(options)
        self.pool = ThreadPoolExecutor(max_workers=1)

    def __getitem__(self, index: int) -> Any:
        return self.pool.submit(super().__getitem__, index).result()


def main(options: LabOptions) -> None:
    photos = Photos(options)
    if not options.fixed:
        print("a first look:", tuple(photos[0].shape), flush=True)
    for number, _ in enumerate(DataLoader(photos, **options.loading)):
        step(number)
