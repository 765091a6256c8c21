"""A spawned worker fails before it has read its dataset: the loader writes the rest into a pipe that nobody reads."""

import faulthandler
import multiprocessing
import os
import threading
import time

if __name__ == "__mp_main__":
    raise ImportError("the script cannot be imported")  # for example, because it reads sys.argv, or lacks a guard

from torch.utils.data import DataLoader


def watchdog(seconds):
    time.sleep(seconds)
    faulthandler.dump_traceback()
    print(f"hole: the loader has hung for {seconds} s", flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=watchdog, args=(10,), daemon=True).start()
    dataset = [bytes(1000)] * 200 + [bytes(200_000)]  # its pickle is larger than a pipe
    try:
        list(DataLoader(dataset, num_workers=1, batch_size=None, multiprocessing_context="spawn"))
    except (RuntimeError, BrokenPipeError) as error:
        print("healed:", type(error).__name__, error)
