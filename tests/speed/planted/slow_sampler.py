"""A sampler of our own goes through all class weights in Python for each index, in the main process."""

import os
import random
import time

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset


class BalancedSampler(Sampler):
    """Draw indices so that rare classes come as often as frequent ones."""

    def __init__(self, labels, draws):
        self.labels, self.draws = labels, draws
        self.frequency = [labels.count(label) for label in range(10)]

    def __len__(self):
        return self.draws

    def __iter__(self):
        weights = [1 / self.frequency[label] for label in self.labels]
        if os.environ.get("FIXED") == "1":  # the remedy: draw the whole epoch in one call
            yield from torch.multinomial(torch.tensor(weights), self.draws, replacement=True).tolist()
            return
        for _ in range(self.draws):
            rest, index = random.random() * sum(weights), -1
            while rest > 0:
                index += 1
                rest -= weights[index]
            yield index


def main():
    labels = [min(i % 17, 9) for i in range(20_000)]
    data = TensorDataset(torch.rand(20_000, 4), torch.tensor(labels))
    loader = DataLoader(data, batch_size=32, sampler=BalancedSampler(labels, 3200), num_workers=2)
    start = time.perf_counter()
    seen = torch.zeros(10)
    for _, targets in loader:
        seen += torch.bincount(targets, minlength=10)
    print("batches_per_s", round(len(loader) / (time.perf_counter() - start), 2))


main()
