"""The loop breaks early. One worker is in a long sample, and a library has made it ignore SIGTERM."""

from __future__ import annotations

import signal
import time
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="the end of a program",
    title="a worker does not end, and the main process joins it",
    users_see="'Training finished' is on the screen, and the program does not end.",
    thread="https://github.com/pytorch/pytorch/issues/39570",
    fix="Leave SIGTERM alone in workers; close the iterator yourself. minidl's loader kills such a worker at last.",
    truth=in_sample("sleep"),
    ours=lambda o: None,
    ends_ours=True,
    at=(16, 30),
    workers=(2, 3),
    methods=FORK,
)


class Photos(Pictures):
    """Sample `at` is fetched from a tape."""

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at and not self.options.fixed:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    started = time.monotonic()
    for number, _ in enumerate(DataLoader(Photos(options), **options.loading)):
        step(number)
        if (number + 1) * options.batch_size > options.at - options.batch_size or time.monotonic() - started > 60:
            time.sleep(0.5)  # for the worker to be in that sample: one that is told to end before begins no other
            break
