"""worker_init_fn builds a vocabulary in each worker, and does so again in every epoch."""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Sentences(Dataset):
    vocabulary = None

    def __len__(self):
        return 320

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.tensor([self.vocabulary[f"word-{(index * 31 + k) % 5000}"] for k in range(12)])


def build_vocabulary(worker_id):
    vocabulary = {}
    for number in range(800_000):
        vocabulary[f"word-{number}"] = number
    get_worker_info().dataset.vocabulary = vocabulary


def run(epochs):
    loader = DataLoader(
        Sentences(),
        batch_size=16,
        num_workers=2,
        worker_init_fn=build_vocabulary,
        persistent_workers=os.environ.get("FIXED") == "1",  # the remedy: build it once for each worker
    )
    for _ in range(epochs):
        for tokens in loader:
            tokens.float().mean()
    return epochs * len(loader)


if __name__ == "__main__":
    start = time.perf_counter()
    print("batches_per_s", round(run(4) / (time.perf_counter() - start), 2))
