"""Training is over. An exit handler waits until all metrics are uploaded, and the uploading thread has gone."""

from __future__ import annotations

import atexit
import threading

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="the end of a program",
    title="an exit handler does not return",
    users_see="The last line was printed, and the job does not end. It costs its time limit.",
    thread="https://github.com/wandb/wandb/issues/12079",
    fix="Wait with a timeout in exit handlers.",
    truth=lambda o: Truth("loop", -1, -1, ("exit",), ("nobody-answers",)),
)

UPLOADED = threading.Event()


def finish() -> None:
    """Wait for the last upload."""
    UPLOADED.wait()


def main(options: LabOptions) -> None:
    atexit.register(finish)
    for number, _ in enumerate(DataLoader(Pictures(options), **options.loading)):
        step(number)
    if options.fixed:
        UPLOADED.set()
