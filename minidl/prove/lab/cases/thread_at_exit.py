"""Training is over. A thread that writes the log waits for the next line, and is no daemon: Python waits for it."""

from __future__ import annotations

import queue
import threading

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="the end of a program",
    title="a thread that is no daemon holds up the exit",
    users_see="The last line was printed, and the job does not end.",
    fix="Put None into its queue at the end, or make it a daemon.",
    truth=lambda o: Truth("loop", -1, -1, ("exit", "other"), ("nobody-answers", "empty-queue")),
)

LINES: queue.Queue[str | None] = queue.Queue()


def write_log() -> None:
    """Write line by line."""
    while (line := LINES.get()) is not None:
        print("log", line, flush=True)


def main(options: LabOptions) -> None:
    threading.Thread(target=write_log, name="log").start()
    for number, _ in enumerate(DataLoader(Pictures(options), **options.loading)):
        step(number)
        LINES.put(f"batch {number}")
    if options.fixed:
        LINES.put(None)
