"""A worker is killed while it asks the done event: its lock is never released, and the loader waits for it for ever."""

import faulthandler
import os
import threading
import time
from multiprocessing import active_children, synchronize

from torch.utils.data import DataLoader


def die(event):
    event._cond.acquire()  # as Event.is_set does
    os.kill(os.getpid(), 9)


class Numbers(list):
    def __getitem__(self, index):
        if index == 3:
            synchronize.Event.is_set = die  # the fault: killed when it next looks at its done event
        return index


def watchdog(seconds):
    time.sleep(seconds)
    faulthandler.dump_traceback()
    print(f"hole: the loader has hung for {seconds} s", flush=True)
    for child in active_children():
        child.kill()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=watchdog, args=(12,), daemon=True).start()
    try:
        list(DataLoader(Numbers(range(20)), num_workers=2, batch_size=None))
    except RuntimeError as error:
        print("raised:", error, flush=True)
    print("healed: the loader has shut down")
