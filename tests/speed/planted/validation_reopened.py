"""Every epoch makes a new validation loader, and each of its workers opens a large archive at its first sample."""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

KEEP = os.environ.get("FIXED") == "1"  # the remedy: one loader for all epochs, whose workers stay


class Archive(Dataset):
    def __init__(self):
        self.table = None

    def __len__(self):
        return 96

    def __getitem__(self, index):
        if self.table is None:
            time.sleep(1.2)  # reads the archive's table of contents from the network drive
            self.table = list(range(96))
        return torch.full((8,), float(self.table[index]))


def make_validation():
    return DataLoader(Archive(), 8, num_workers=4, persistent_workers=KEEP)


def main():
    train = DataLoader(TensorDataset(torch.rand(480, 8)), 16, num_workers=2, persistent_workers=True)
    validation, steps = make_validation(), 0
    start = time.perf_counter()
    for _ in range(5):
        for _ in train:
            time.sleep(0.004)  # the step on the accelerator
            steps += 1
        validation = validation if KEEP else make_validation()
        steps += sum(1 for batch in validation if batch.mean() >= 0)
    print("batches_per_s", round(steps / (time.perf_counter() - start), 2))


main()
