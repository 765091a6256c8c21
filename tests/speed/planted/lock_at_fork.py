"""No batch ever comes: workers are forked while a thread of the main process holds a lock they need."""

import os
import signal
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

index_lock = threading.Lock()


def refresh_index():
    """Read the index of the archive anew, in the background."""
    with index_lock:
        time.sleep(1.5)


class Archive(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, item):
        with index_lock:
            offset = item * 512
        time.sleep(0.01)
        return torch.tensor([item, offset])


def main():
    refresher = threading.Thread(target=refresh_index, name="index-refresher")
    refresher.start()
    time.sleep(0.1)
    if os.environ.get("FIXED") == "1":
        refresher.join()  # the remedy: fork no worker while a thread holds the lock
    start = time.perf_counter()
    patience = threading.Timer(float(os.environ.get("HANG_S", "9")), os.kill, (os.getpid(), signal.SIGINT))
    patience.start()  # the user loses patience and presses Ctrl-C
    steps = sum(1 for _ in DataLoader(Archive(), batch_size=8, num_workers=2))
    patience.cancel()
    print("batches_per_s", round(steps / (time.perf_counter() - start), 2))


main()
