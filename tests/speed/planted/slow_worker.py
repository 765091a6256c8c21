"""Worker 2 reads from a replica ten times as slow as the others, and the loader waits for its turns."""

import os
import time

import numpy as np
from torch.utils.data import DataLoader, Dataset, get_worker_info

LATENCY = {"replica-a": 0.003, "replica-b": 0.003, "replica-c": 0.03, "replica-d": 0.003}


class Replicated(Dataset):
    def __init__(self, replicas):
        self.replicas = list(replicas)

    def __len__(self):
        return 800

    def __getitem__(self, index):
        replica = self.replicas[get_worker_info().id % len(self.replicas)]
        time.sleep(LATENCY[replica])
        return np.float32([index, index / 2])


def main():
    replicas = set(LATENCY)
    if os.environ.get("FIXED") == "1":
        replicas.remove("replica-c")  # the remedy: take the slow replica out
    loader = DataLoader(Replicated(sorted(replicas)), batch_size=8, num_workers=4)
    start = time.perf_counter()
    for batch in loader:
        assert batch.shape == (8, 2)
        time.sleep(0.002)  # the step on the accelerator
    print("batches_per_s", round(len(loader) / (time.perf_counter() - start), 2))


if __name__ == "__main__":
    main()
