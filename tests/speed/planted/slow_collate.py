"""The collate function pads every sentence token by token in Python, and the training waits for it."""

import os
import random
import time

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

sentences = [[random.randrange(30000) for _ in range(random.randrange(400, 1000))] for _ in range(512)]


def collate(batch):
    if os.environ.get("FIXED") == "1":  # the remedy: one call for the whole batch
        tokens = pad_sequence([torch.tensor(s) for s in batch], batch_first=True)
        return tokens, tokens != 0
    longest = max(len(s) for s in batch)
    tokens = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, sentence in enumerate(batch):
        for column, token in enumerate(sentence):
            tokens[row, column] = token
            mask[row, column] = True
    return tokens, mask


def train(loader, epochs):
    embedding = torch.nn.Embedding(30000, 16)
    total = 0.0
    for _ in range(epochs):
        for tokens, mask in loader:
            with torch.no_grad():
                total += float((embedding(tokens).mean(-1) * mask).sum())
    return total


if __name__ == "__main__":
    loader = DataLoader(sentences, batch_size=16, shuffle=True, num_workers=2, collate_fn=collate)
    start = time.perf_counter()
    train(loader, epochs=2)
    print("batches_per_s", round(2 * len(loader) / (time.perf_counter() - start), 2))
