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
from collections.abc import Sequence
from datetime import timedelta
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

PATIENCE = 5.0
"""Seconds that ranks wait for each other in a meeting."""

KINDS = {
    "none": 3, "shard": 3, "compute": 3, "dies": 3,
    "node": 4, "moves": 4, "twice": 2, "never joins": 3, "never starts": 3, "hangs": 3, "raises": 3,
}  # fmt: skip
"""What is planted, and the number of ranks that it is recorded with."""


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of a rank; some are slow."""

    def __init__(self, kind: str, rank: int, size: int) -> None:
        self.kind, self.rank, self.size = kind, rank, size

    def __len__(self) -> int:
        return BATCH * STEPS * (1 + self._mine("twice"))

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE * (20 if self._is_slow(index) else 1))
        if self._mine("hangs") and index == BATCH * STEPS // 2:
            time.sleep(1000)
        return torch.full((8,), float(index))

    def _mine(self, kind: str) -> bool:
        return self.kind == kind and self.rank == SLOW

    def _is_slow(self, index: int) -> bool:
        batch = index // BATCH
        return (
            (self._mine("shard") and batch % 2 == 1)  # of one worker of two
            or (self.kind == "node" and 2 * self.rank >= self.size)
            or (self.kind == "moves" and batch // 2 % self.size == self.rank)  # each rank, and both of its workers
        )


def train(kind: str, rank: int, size: int) -> None:
    mine = rank == SLOW
    twice = 1 + (mine and kind == "twice")
    loader = minidl.DataLoader(Samples(kind, rank, size), batch_size=BATCH * twice, num_workers=2)
    weight = torch.ones(8, 1)
    for number, batch in enumerate(loader):
        time.sleep(STEP * (3 if mine and kind == "compute" else twice))
        if mine and number == STEPS // 2:
            if kind == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "raises":
                raise ValueError("planted")
        gradient = (batch.T @ (batch @ weight)).detach()
        dist.all_reduce(gradient)


def _rank(rank: int, kind: str, place: Path, size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    mine = rank == SLOW
    if mine and kind == "never starts":
        return
    node = f"node{2 * rank // size}" if kind == "node" else ""
    with minidl.trace(place / node / f"rank-{rank}", hang_after=2.0 if kind == "hangs" else 0.0), step_parts_recorded():
        if mine and kind == "never joins":
            time.sleep(PATIENCE + 1)
            return
        dist.init_process_group(
            "gloo", init_method=f"file://{place}.store", rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
        )
        train(kind, rank, size)
    dist.destroy_process_group()


def record(place: Path, kinds: Sequence[str] = (*KINDS,), size: int = 0) -> None:
    """Write the ranks' traces of each kind into a directory of its name in `place`. size: ranks; 0 = as in KINDS."""
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MINIDL_TRACE"):
        environment.pop(name, None)
    command = [sys.executable, __file__, str(place), str(size), *kinds]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    for planted in sys.argv[3:]:
        ranks = int(sys.argv[2]) or KINDS[planted]
        with contextlib.suppress(ProcessExitedException, ProcessRaisedException):
            start_processes(_rank, (planted, Path(sys.argv[1], planted), ranks), nprocs=ranks, start_method="fork")
