"""The iterable data set parses its whole index whenever a worker starts to iterate, in each epoch."""

import json
import os
import time

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Rows(IterableDataset):
    def __init__(self, count):
        self.lines = [json.dumps({"row": i, "offset": 4096 * i, "tags": list(range(12))}) for i in range(count)]
        # The remedy: parse once, before the workers start.
        self.index = self.parse() if os.environ.get("FIXED") == "1" else None

    def parse(self):
        return [json.loads(line) for line in self.lines]

    def __iter__(self):
        index = self.index or self.parse()
        info = get_worker_info()
        for entry in index[info.id : 480 : info.num_workers]:
            time.sleep(0.001)
            yield torch.tensor([entry["row"], entry["offset"]])


if __name__ == "__main__":
    loader = DataLoader(Rows(90_000), batch_size=8, num_workers=2)
    start, steps = time.perf_counter(), 0
    for _ in range(3):
        for batch in loader:
            batch.sum()
            steps += 1
    print("batches_per_s", round(steps / (time.perf_counter() - start), 2))
