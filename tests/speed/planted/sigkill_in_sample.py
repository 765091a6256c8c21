"""One sample needs too much memory, the kernel kills its worker, and the training ends with an error."""

import os
import signal
import time

import torch
from torch.utils.data import DataLoader, Dataset, Subset


class Scans(Dataset):
    TOO_LARGE = 437

    def __len__(self):
        return 640

    def __getitem__(self, index):
        if index == self.TOO_LARGE:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        time.sleep(0.015)
        return torch.ones(16) * index


def main():
    scans = Scans()
    if os.environ.get("FIXED") == "1":  # the remedy: leave the scan out (or cut it into parts)
        scans = Subset(scans, [i for i in range(len(scans)) if i != Scans.TOO_LARGE])
    loader = DataLoader(scans, batch_size=8, num_workers=2)
    start = time.perf_counter()
    for step, batch in enumerate(loader):
        if step % 10 == 0:
            print("step", step, batch.shape, flush=True)
    print("batches_per_s", round((step + 1) / (time.perf_counter() - start), 2))


if __name__ == "__main__":
    main()
