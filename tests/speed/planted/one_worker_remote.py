"""Every sample is a request of 5 ms to an object store, and a single worker sends them one after the other."""

import os
import time

import numpy as np
from torch.utils.data import DataLoader, Dataset


class Bucket:
    """Stand for an object store: each request takes a round trip."""

    def get(self, key):
        time.sleep(0.005)
        return np.full(256, key, dtype=np.float32).tobytes()


class RemoteSamples(Dataset):
    def __init__(self, bucket, keys):
        self.bucket = bucket
        self.keys = keys

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        return np.frombuffer(self.bucket.get(self.keys[index]), dtype=np.float32).copy()


def main():
    workers = 4 if os.environ.get("FIXED") == "1" else 1  # the remedy: more requests at once
    loader = DataLoader(RemoteSamples(Bucket(), range(1280)), batch_size=16, num_workers=workers)
    start = time.perf_counter()
    for step, batch in enumerate(loader):
        time.sleep(0.003)  # the step on the accelerator
        if step % 20 == 0:
            print("step", step, "mean", float(batch.mean()))
    print("batches_per_s", round(len(loader) / (time.perf_counter() - start), 2))


if __name__ == "__main__":
    main()
