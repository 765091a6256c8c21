"""The training step is the limit: batches lie ready, the loader is healthy, and more workers would change nothing."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


def train_one_epoch(model, loader, optimizer):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    torch.set_num_threads(1)
    data = TensorDataset(torch.rand(640, 3, 48, 48), torch.randint(10, (640,)))
    loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)
    model = build(16 if os.environ.get("FIXED") == "1" else 48)  # the only remedy: a cheaper step
    optimizer = torch.optim.AdamW(model.parameters())
    start = time.perf_counter()
    for epoch in range(2):
        print("epoch", epoch, "loss", train_one_epoch(model, loader, optimizer))
    print("batches_per_s", round(2 * len(loader) / (time.perf_counter() - start), 2))


if __name__ == "__main__":
    main()
