"""A file says that a download runs. The process that wrote it was killed last week; each worker waits for its end."""

from __future__ import annotations

import time
from pathlib import Path

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a worker that does not begin",
    title="worker_init_fn polls for the end of a download that no process does",
    users_see="After a crash, no run of this job gets its first batch any more, until a .lock file is deleted.",
    fix="Use a lock that ends with its process (flock), or write a pid into the file and check it; bound the wait.",
    truth=lambda o: Truth("worker", 0, -1, ("init",), ("sleep",)),
)

LOCK = Path("download.lock")


def prepare(worker_id: int) -> None:
    """Wait until the data is there."""
    while LOCK.exists():
        time.sleep(0.2)


def main(options: LabOptions) -> None:
    LOCK.write_text("")
    if options.fixed:
        LOCK.unlink()
    for number, _ in enumerate(DataLoader(Pictures(options), worker_init_fn=prepare, **options.loading)):
        step(number)
