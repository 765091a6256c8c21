"""The first epoch reads a mapped file page by page from the disk; later epochs find it in memory."""

import os
import tempfile
import time

import numpy as np
from torch.utils.data import DataLoader, Dataset

PAGE, PAGES = 4096, 1 << 16


class Mapped(Dataset):
    def __init__(self, path):
        self.file = np.memmap(path, np.uint8, "r")
        self.file._mmap.madvise(1)  # MADV_RANDOM: no reading ahead
        self.places = np.random.default_rng(0).permutation(PAGES).reshape(-1, 64)

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        return np.stack([self.file[page * PAGE : page * PAGE + 16] for page in self.places[index]])


def make_file(file):
    for _ in range(PAGES // 256):
        file.write(os.urandom(PAGE) * 256)
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # as after a boot
    if os.environ.get("FIXED") == "1":
        with open(file.name, "rb", buffering=0) as whole:
            while whole.read(1 << 24):  # the remedy: read the file once, in its order, before the training
                pass


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        start, steps = time.perf_counter(), 0
        make_file(file)
        loader = DataLoader(Mapped(file.name), batch_size=16, num_workers=2, persistent_workers=True)
        start = time.perf_counter()
        steps = sum(1 for epoch in range(3) for _ in loader)
        print("batches_per_s", round(steps / (time.perf_counter() - start), 2))
