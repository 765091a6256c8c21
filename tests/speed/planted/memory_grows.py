"""Each worker keeps a copy of every sample it has made, so its memory grows from epoch to epoch."""

import multiprocessing
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Augmented(Dataset):
    def __init__(self):
        self.history = []

    def __len__(self):
        return 400

    def __getitem__(self, index):
        image = torch.rand(3, 224, 224) + index
        self.history.append(image.clone())  # meant for a look at the last few
        if os.environ.get("FIXED") == "1":
            del self.history[:-4]  # the remedy: keep a bounded number
        return image.mean(dim=(1, 2))


def resident_mb():
    statms = [Path(f"/proc/{child.pid}/statm").read_text() for child in multiprocessing.active_children()]
    return sum(int(statm.split()[1]) for statm in statms) * os.sysconf("SC_PAGESIZE") >> 20


if __name__ == "__main__":
    loader = DataLoader(Augmented(), batch_size=10, shuffle=True, num_workers=2, persistent_workers=True)
    start, steps = time.perf_counter(), 0
    for epoch in range(5):
        for _ in loader:
            time.sleep(0.03)  # the step on the accelerator
            steps += 1
        print("epoch", epoch, "resident_mb", resident_mb())
    print("batches_per_s", round(steps / (time.perf_counter() - start), 2))
