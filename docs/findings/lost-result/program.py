"""Ctrl-C comes when a result has been read and not yet stored: the loader waits for this result for ever."""

import faulthandler
import multiprocessing
import os
import threading
import time

from torch.utils.data import DataLoader


def watchdog(seconds):
    time.sleep(seconds)
    faulthandler.dump_traceback()
    print(f"hole: the loader has hung for {seconds} s", flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=watchdog, args=(7,), daemon=True).start()
    iterator = iter(DataLoader(range(4), num_workers=1, batch_size=None))
    get = iterator._data_queue.get

    def interrupted(timeout):
        get(timeout=timeout)
        raise KeyboardInterrupt  # the fault: Ctrl-C comes when get() returns

    iterator._data_queue.get = interrupted
    try:
        next(iterator)
    except KeyboardInterrupt:
        print("Ctrl-C", flush=True)
    del iterator._data_queue.get
    print(f"healed: {len(list(iterator))} batches")
