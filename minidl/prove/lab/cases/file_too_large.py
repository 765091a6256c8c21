"""The dataset writes a cache, up to the limit of a file's size. The disk is not full, and shared memory is not."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="an error that ends the run",
    title="a file reaches the limit of its size",
    users_see="OSError: [Errno 27] File too large.",
    fix="ulimit -f unlimited, or smaller files.",
    truth=lambda o: Truth("worker", o.worker, o.at, ("sample",), ("error",)),
    ends=True,
    methods=("fork",),
)


class Caching(Pictures):
    """One sample writes into a cache."""

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at and not self.options.fixed:
            Path("sample.cache").write_bytes(bytes(1 << 20))
        return super().__getitem__(index)


def limit(worker_id: int) -> None:
    """Limit the size of files that this worker writes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def main(options: LabOptions) -> None:
    for number, _ in enumerate(DataLoader(Caching(options), worker_init_fn=limit, **options.loading)):
        step(number)
