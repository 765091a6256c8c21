"""Batches of 77 MB: the images are float32, and copying them into shared memory takes longer than all other work."""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Slides(Dataset):
    def __init__(self, dtype, count=1280):
        self.count = count
        self.tiles = [(torch.rand(3, 448, 448) * 255).to(dtype) for _ in range(6)]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.tiles[index % len(self.tiles)]


def step(images):
    """Look at a corner only: the accelerator does the rest."""
    return images[:, :, :32, :32].float().div(255).mean()


def main():
    # The remedy: send bytes, and make floats of them on the accelerator.
    dtype = torch.uint8 if os.environ.get("FIXED") == "1" else torch.float32
    loader = DataLoader(Slides(dtype), batch_size=32, shuffle=True, num_workers=2, prefetch_factor=2)
    start = time.perf_counter()
    steps = 0
    while steps < 40:
        for images in loader:
            step(images)
            steps += 1
    print("batches_per_s", round(steps / (time.perf_counter() - start), 2))


if __name__ == "__main__":
    main()
