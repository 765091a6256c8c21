"""A thread of the main process counts in pure Python and keeps the GIL, so taking a batch takes long."""

import collections
import os
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset


class WordStatistics(threading.Thread):
    def __init__(self):
        super().__init__(name="word-statistics", daemon=True)
        self.counts = collections.Counter()

    def run(self):
        number = 0
        while True:
            number = (number * 1103515245 + 12345) % 2147483648
            self.counts[number % 5000] += 1


class Words(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        return {"word": torch.arange(index, index + 16), "target": index % 7, "weight": 1.0}


def main():
    statistics = WordStatistics()
    if os.environ.get("FIXED") != "1":  # the remedy: count in a process of its own, or after the training
        statistics.start()
    loader = DataLoader(Words(), batch_size=20, num_workers=2, shuffle=True)
    start = time.perf_counter()
    for batch in loader:
        (batch["word"].float().mean(1) * batch["weight"]).sum()
    print("batches_per_s", round(len(loader) / (time.perf_counter() - start), 2))


if __name__ == "__main__":
    main()
