"""Workers are spawned anew in every epoch, and each of them imports torch again before its first sample."""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __init__(self, size=160):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.tensor([index, index**2], dtype=torch.float32)


def main():
    keep = os.environ.get("FIXED") == "1"  # the remedy: workers that live as long as the loader
    loader = DataLoader(
        Squares(), batch_size=8, num_workers=2, multiprocessing_context="spawn", persistent_workers=keep
    )
    start = time.perf_counter()
    steps = 0
    for epoch in range(3):
        for _ in loader:
            steps += 1
        print(f"epoch {epoch} done after {time.perf_counter() - start:.1f} s")
    print("batches_per_s", round(steps / (time.perf_counter() - start), 2))


if __name__ == "__main__":
    main()
