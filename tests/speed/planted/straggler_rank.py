"""Rank 1 reads from a slow disk, and rank 0 waits for it in every all-reduce."""

import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Disk(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 480

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.randn(32)


def train(rank, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    slow = rank == 1 and os.environ.get("FIXED") != "1"  # the remedy: rank 1 gets a disk like that of rank 0
    data = Disk(0.03 if slow else 0.002)
    loader = DataLoader(data, batch_size=8, num_workers=1, sampler=DistributedSampler(data, 2, rank))
    model = DistributedDataParallel(nn.Linear(32, 4))
    for step, batch in enumerate(loader):
        if step == 0:
            start = time.perf_counter()  # the worker has started
        model(batch).square().mean().backward()
    if rank == 0:
        print("batches_per_s", round(step / (time.perf_counter() - start), 2))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(f"{folder}/rendezvous",), nprocs=2)
