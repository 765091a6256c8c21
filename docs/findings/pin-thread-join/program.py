"""The pin thread does not come back from a copy: the shutdown joins it for ever, and timeout= does not help."""

import faulthandler
import os
import threading
import time
from multiprocessing import active_children

import torch
from torch.utils.data import DataLoader

torch.accelerator.is_available = lambda: True  # a pin thread on a machine without an accelerator
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.set_device_index = lambda index: None


class Sticky:
    def pin_memory(self):
        time.sleep(3600)  # the fault: a driver that hangs, or a user's method that waits for a lock


def watchdog(seconds):
    time.sleep(seconds)
    faulthandler.dump_traceback()
    print(f"hole: the shutdown has hung, {seconds} s", flush=True)
    for child in active_children():
        child.kill()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=watchdog, args=(14,), daemon=True).start()
    loader = DataLoader(range(4), num_workers=1, pin_memory=True, timeout=1, collate_fn=lambda samples: Sticky())
    try:
        next(iter(loader))
    except RuntimeError as error:
        print("raised:", error, flush=True)
    print("healed: the loader has shut down")
