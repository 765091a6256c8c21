"""Trainings of several gloo ranks, each with one planted problem, recorded a rank a trace: `record(place)`.

Run as a program it is the launcher, which forks the ranks. Times are sleeps, so that a busy machine changes little.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

import minidl
from minidl.record.step_parts import step_parts_recorded

SAMPLE, STEP = 0.002, 0.020
"""Seconds of a sample and of a step."""

BATCH, STEPS, SLOW = 4, 24, 1
"""Samples of a batch, batches of a rank, and the rank that has the problem."""

KINDS = ("none", "shard", "compute", "dies")


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of a rank; those of a slow shard take long for one of two workers: of every second batch."""

    def __init__(self, slow: bool) -> None:
        self.slow = slow

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE * (20 if self.slow and index // BATCH % 2 else 1))
        return torch.full((8,), float(index))


def train(kind: str, rank: int) -> None:
    mine = rank == SLOW
    loader = minidl.DataLoader(Samples(mine and kind == "shard"), batch_size=BATCH, num_workers=2)
    weight = torch.ones(8, 1)
    for number, batch in enumerate(loader):
        time.sleep(STEP * (3 if mine and kind == "compute" else 1))
        if mine and kind == "dies" and number == STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = (batch.T @ (batch @ weight)).detach()
        dist.all_reduce(gradient)


def _rank(rank: int, kind: str, place: Path, size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}.store", rank=rank, world_size=size)
    with minidl.trace(place / f"rank-{rank}"), step_parts_recorded():
        train(kind, rank)
    dist.destroy_process_group()


def record(place: Path, size: int = 3) -> None:
    """Write the ranks' traces of each kind into a directory of its name in `place`."""
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MINIDL_TRACE"):
        environment.pop(name, None)
    command = [sys.executable, __file__, str(place), str(size)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    for planted in KINDS:
        with contextlib.suppress(ProcessExitedException, ProcessRaisedException):
            job = (planted, Path(sys.argv[1], planted), int(sys.argv[2]))
            start_processes(_rank, job, nprocs=job[2], start_method="fork")
