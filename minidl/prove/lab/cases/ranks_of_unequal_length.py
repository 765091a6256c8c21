"""Two ranks train together. One has fewer batches, and is done; the other waits in all_reduce for it."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="several ranks",
    title="ranks with unequal numbers of batches",
    users_see="The job hangs near the end of an epoch, in a collective; NCCL's watchdog says so after 10 minutes.",
    thread="https://github.com/pytorch/pytorch/issues/33148",
    fix="DistributedSampler pads; drop_last; or `with Join([model]):`.",
    truth=lambda o: Truth("loop", -1, -1, ("consumer", "other"), ("collective",)),
    workers=(1, 1),
    methods=FORK,
)


def rank(number: int, options: LabOptions) -> None:
    """Train as one of two ranks; then wait for the end of the others, as a job's last barrier does."""
    dist.init_process_group("gloo", init_method=f"file://{Path('meeting').absolute()}", rank=number, world_size=2)
    samples = 32 if options.fixed else 24 + 16 * number
    for batch, pictures in enumerate(DataLoader(Pictures(options, samples), **options.loading)):
        loss = torch.as_tensor(pictures).mean()
        dist.all_reduce(loss)
        if number:
            step(batch)
    while not number and not Path("done").exists():
        time.sleep(0.2)
    Path("done").touch()
    dist.destroy_process_group()


def main(options: LabOptions) -> None:
    start_processes(rank, args=(options,), nprocs=2)  # type: ignore[no-untyped-call]
