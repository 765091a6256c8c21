"""A batch of detection targets is 480 small tensors, each of them sent and pinned on its own."""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Detection(Dataset):
    """Images with twenty objects, each object a dict of three small tensors."""

    def __len__(self):
        return 240

    def __getitem__(self, index):
        return [{"box": torch.rand(4), "label": torch.zeros(1), "points": torch.rand(17, 2)} for _ in range(20)]


def as_list(batch):
    return batch


def as_three_tensors(batch):
    """The remedy: one tensor for each field of the whole batch, and the counts to split them."""
    objects = [thing for sample in batch for thing in sample]
    fields = {key: torch.stack([thing[key] for thing in objects]) for key in objects[0]}
    return fields | {"counts": torch.tensor([len(sample) for sample in batch])}


def main(epochs=2):
    collate = as_three_tensors if os.environ.get("FIXED") == "1" else as_list
    loader = DataLoader(Detection(), batch_size=8, num_workers=2, collate_fn=collate, pin_memory=True)
    start = time.perf_counter()
    seen = 0
    for _ in range(epochs):
        for _ in loader:
            seen += 1
    print("batches_per_s", round(seen / (time.perf_counter() - start), 2))


if __name__ == "__main__":
    main()
