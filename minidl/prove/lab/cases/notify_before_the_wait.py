"""A worker waits until the loop opens the second stage; the loop did so before the epoch, and now waits for a batch."""

from __future__ import annotations

import multiprocessing
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="cycles of waiting",
    title="a notify came before the wait",
    users_see="A curriculum hangs at its second stage.",
    fix="Wait with wait_for() for a shared value that the loop sets.",
    truth=in_sample("nobody-answers", "cycle"),
    methods=FORK,
)


class Staged(Pictures):
    """The picture `at` belongs to the second stage."""

    def __init__(self, options: LabOptions) -> None:
        super().__init__(options)
        self.opened = multiprocessing.get_context("fork").Condition()
        self.stage = multiprocessing.get_context("fork").Value("i", 0)

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at:
            with self.opened:
                if self.options.fixed:
                    self.opened.wait_for(lambda: self.stage.value > 0)
                else:
                    self.opened.wait()
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    pictures = Staged(options)
    with pictures.opened:
        pictures.stage.value = 1
        pictures.opened.notify_all()
    for number, _ in enumerate(DataLoader(pictures, **options.loading)):
        step(number)
