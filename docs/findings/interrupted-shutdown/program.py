"""An exception cuts the shutdown short before the pin thread is told to leave: the thread stays."""

import threading
import time

import torch
from torch.utils.data import DataLoader

torch.accelerator.is_available = lambda: True  # a pin thread on a machine without an accelerator
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.set_device_index = lambda index: None


class OnceInterrupted(threading.Event().__class__):
    interrupted = False

    def set(self):
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt  # the fault: Ctrl-C, or the error of a worker's death, comes here
        super().set()


if __name__ == "__main__":
    iterator = iter(DataLoader(list("abcd"), num_workers=1, pin_memory=True, batch_size=None))
    next(iterator)
    iterator._pin_memory_thread_done_event.__class__ = OnceInterrupted
    try:
        iterator._shutdown_workers()
    except KeyboardInterrupt:
        print("Ctrl-C")
    time.sleep(6)
    alive = iterator._pin_memory_thread.is_alive()
    print("hole: the pin thread lives on" if alive else "healed: the pin thread has ended")
