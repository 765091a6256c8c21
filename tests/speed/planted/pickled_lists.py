"""Samples are Python lists of 20,000 floats, which are pickled and built again float by float."""

import os
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Signals(Dataset):
    def __init__(self, length=20_000):
        rows = np.random.default_rng(1).random((8, length))
        self.rows = torch.from_numpy(rows) if os.environ.get("FIXED") == "1" else rows.tolist()  # the remedy: tensors

    def __len__(self):
        return 3200

    def __getitem__(self, index):
        return {"signal": self.rows[index % 8][:], "id": index}


def merge(samples):
    signals = [sample["signal"] for sample in samples]
    if isinstance(signals[0], torch.Tensor):
        signals = torch.stack(signals)
    return {"signals": signals, "ids": [sample["id"] for sample in samples]}


def fit(loader):
    peak = 0.0
    for batch in loader:
        peak = max(peak, float(batch["signals"][0][0]))
    return peak


if __name__ == "__main__":
    loader = DataLoader(Signals(), batch_size=32, num_workers=2, collate_fn=merge)
    start = time.perf_counter()
    fit(loader)
    print("batches_per_s", round(len(loader) / (time.perf_counter() - start), 2))
