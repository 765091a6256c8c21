"""A worker was killed with the lock of the result pipe, and Ctrl-C ends the shutdown: the program does not exit."""

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


def interrupt():
    raise KeyboardInterrupt


def watchdog(seconds):
    time.sleep(seconds)
    faulthandler.dump_traceback()
    print(f"hole: the program has not exited for {seconds} s", flush=True)
    for child in active_children():
        child.kill()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=watchdog, args=(8,), daemon=True).start()
    iterator = iter(DataLoader(list("abcd"), num_workers=1, pin_memory=True, batch_size=None))
    next(iterator)
    iterator._worker_result_queue._wlock.acquire()  # the fault: a worker is killed with this lock,
    iterator._pin_memory_thread.join = interrupt  # and Ctrl-C comes while the loader joins its thread
    try:
        iterator._shutdown_workers()
    except KeyboardInterrupt:
        print("healed, if the program exits", flush=True)
