"""A batch cannot be unpickled in the training's process: the error is raised once, and the next batch never comes."""

import faulthandler
import os
import threading
import time
from multiprocessing import active_children

from torch.utils.data import DataLoader


class Batch:
    def __init__(self, index):
        self.index = index

    def __setstate__(self, state):
        if state["index"] == 1:
            raise ValueError("sample 1 cannot be rebuilt")


def watchdog(seconds):
    time.sleep(seconds)
    faulthandler.dump_traceback()
    print(f"hole: the loader has hung for {seconds} s", flush=True)
    for child in active_children():
        child.kill()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=watchdog, args=(7,), daemon=True).start()
    iterator = iter(DataLoader(range(4), num_workers=1, batch_size=None, collate_fn=Batch))
    next(iterator)
    try:
        next(iterator)
    except ValueError as error:
        print("skipped:", error)
    print(f"healed: {len(list(iterator))} batches follow")
