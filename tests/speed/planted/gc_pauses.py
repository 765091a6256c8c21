"""The main process holds millions of objects, and each garbage collection stops the training for a while."""

import gc
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Annotated(Dataset):
    """A data set with all its annotations as Python objects."""

    def __init__(self, count):
        self.annotations = [{"box": [i, i, i + 9, i + 9], "tags": [i % 7]} for i in range(count)]

    def __len__(self):
        return 1600

    def __getitem__(self, index):
        annotation = self.annotations[index * 97]
        return torch.tensor(annotation["box"]), annotation["tags"][0]


def train(loader):
    steps = 0
    for epoch in range(2):
        for boxes, _tags in loader:
            boxes.float().mean()
            time.sleep(0.003)  # the step on the accelerator
            steps += 1
            if steps % 15 == 0:
                gc.collect()  # "to keep the memory down"
        print("epoch", epoch)
    return steps


if __name__ == "__main__":
    data = Annotated(1_000_000)
    if os.environ.get("FIXED") == "1":
        gc.freeze()  # the remedy: the collector leaves alone what stays anyway
    loader = DataLoader(data, batch_size=20, shuffle=True, num_workers=2, persistent_workers=True)
    start = time.perf_counter()
    print("batches_per_s", round(train(loader) / (time.perf_counter() - start), 2))
