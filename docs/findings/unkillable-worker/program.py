"""A worker is stuck and ignores SIGTERM: the loader gives it up, and the program does not exit."""

import faulthandler
import multiprocessing
import os
import signal
import threading
import time

from torch.utils.data import DataLoader, Dataset, _utils


class Stuck(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as libraries do that want to save their state
        time.sleep(3600)


def watchdog(seconds):
    time.sleep(seconds)
    faulthandler.dump_traceback()
    print(f"hole: the program has not exited for {seconds} s", flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


if __name__ == "__main__":
    _utils.MP_STATUS_CHECK_INTERVAL = 0.5  # torch's 5 s, shortened: how long a join lasts
    threading.Thread(target=watchdog, args=(8,), daemon=True).start()
    try:
        list(DataLoader(Stuck(), num_workers=1, timeout=1))
    except RuntimeError as error:
        print("healed, if the program exits:", error, flush=True)
