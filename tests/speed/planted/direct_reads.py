"""Samples are read with O_DIRECT in blocks of 4 KiB, so each epoch waits for the disk again."""

import mmap
import os
import tempfile
import time

import numpy as np
from torch.utils.data import DataLoader, Dataset

RECORD, BLOCK, COUNT = 1 << 20, 4096, 96


class Records(Dataset):
    def __init__(self, path):
        self.path = path
        # The remedy: plain reads, which the page cache answers from the second epoch on.
        self.flags = os.O_RDONLY if os.environ.get("FIXED") == "1" else os.O_RDONLY | os.O_DIRECT
        self.fd = None

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        if self.fd is None:
            self.fd = os.open(self.path, self.flags)
            self.block = mmap.mmap(-1, BLOCK)  # O_DIRECT needs an aligned buffer
        record = np.empty(RECORD, np.uint8)
        for at in range(0, RECORD, BLOCK):
            os.preadv(self.fd, [self.block], index * RECORD + at)
            record[at : at + BLOCK] = np.frombuffer(self.block, np.uint8)
        return record[::64].astype(np.float32)


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile(dir=os.environ.get("TMPDIR", "/var/tmp")) as file:
        file.write(os.urandom(RECORD) * COUNT)
        os.fsync(file.fileno())
        loader = DataLoader(Records(file.name), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
        start = time.perf_counter()
        means = [float(batch.mean()) for epoch in range(4) for batch in loader]
        print("batches_per_s", round(len(means) / (time.perf_counter() - start), 2))
