"""Each epoch of 300 steps begins with a shuffle of 12 million indices, while the workers wait without work."""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Clicks(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return torch.tensor([index % 1000, index % 77])


def loader_for(clicks, batch_size, steps):
    if os.environ.get("FIXED") == "1":  # the remedy: draw only the indices that the epoch uses
        drawn = RandomSampler(clicks, replacement=True, num_samples=steps * batch_size)
        return DataLoader(clicks, batch_size, sampler=drawn, num_workers=2, persistent_workers=True)
    return DataLoader(clicks, batch_size, shuffle=True, num_workers=2, persistent_workers=True)


def main(epochs=3, steps=300):
    loader = loader_for(Clicks(12_000_000), 4, steps)
    start = time.perf_counter()
    for _ in range(epochs):
        for step, rows in enumerate(loader, 1):
            rows.float().mean()
            if step == steps:
                break
    print("batches_per_s", round(epochs * steps / (time.perf_counter() - start), 2))


if __name__ == "__main__":
    main()
