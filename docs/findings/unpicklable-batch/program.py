"""A batch that cannot be pickled: the worker prints a traceback, and the loader waits for the batch for ever."""

import faulthandler
import multiprocessing
import os
import threading
import time

from torch.utils.data import DataLoader, Dataset


class Functions(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return lambda: index  # pickle refuses it


def watchdog(seconds):
    time.sleep(seconds)
    faulthandler.dump_traceback()
    print(f"hole: the loader has hung for {seconds} s", flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=watchdog, args=(7,), daemon=True).start()
    try:
        list(DataLoader(Functions(), num_workers=1, batch_size=None))
    except RuntimeError as error:
        print("healed: the batch's error was raised,", str(error).splitlines()[0])
