"""A worker is killed in the middle of a write: the thread that iterates reads the rest of the message for ever."""

import faulthandler
import os
import threading
from multiprocessing import active_children
from multiprocessing.connection import Connection

from torch.utils.data import DataLoader


def tear(connection, message):
    os.write(connection.fileno(), message[: len(message) // 2])
    os.kill(os.getpid(), 9)


class Numbers(list):
    def __getitem__(self, index):
        if index == 4:
            Connection._send = tear  # the fault: the next write of this worker is its last, and half
        return index


def iterate():
    try:
        list(DataLoader(Numbers(range(20)), num_workers=2, batch_size=None, timeout=3))  # only the timeout watches
    except RuntimeError as error:
        print("healed:", error, flush=True)


thread = threading.Thread(target=iterate, daemon=True)
thread.start()
thread.join(10)
if thread.is_alive():
    faulthandler.dump_traceback()
    print("hole: the thread has hung for 10 s, in spite of timeout=3", flush=True)
for child in active_children():
    child.kill()
os._exit(0)
