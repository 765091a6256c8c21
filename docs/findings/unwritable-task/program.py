"""Indices that cannot be pickled: without workers they are fine, with workers the loader waits for ever."""

import faulthandler
import multiprocessing
import os
import threading
import time

from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


def watchdog(seconds):
    time.sleep(seconds)
    faulthandler.dump_traceback()
    print(f"hole: the loader has hung for {seconds} s", flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


if __name__ == "__main__":
    batches = [range(4), (i for i in range(4, 8))]  # a generator: the fetcher takes it, pickle does not
    assert len(list(DataLoader(Numbers(), batch_sampler=batches))) == 2
    threading.Thread(target=watchdog, args=(7,), daemon=True).start()
    try:
        print(f"healed: {len(list(DataLoader(Numbers(), batch_sampler=batches, num_workers=1)))} batches")
    except RuntimeError as error:
        print("healed: the task's error was raised,", str(error).splitlines()[0])
