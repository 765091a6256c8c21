"""A worker whose stream has ended is killed with the lock of the result pipe: the loader hangs."""

import faulthandler
import os
import threading
from multiprocessing import active_children
from multiprocessing.connection import Connection

from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def write_and_die(connection, message, write=Connection._send):
    write(connection, message)
    os.kill(os.getpid(), 9)  # the message has been written, its lock is not released


class OneSided(IterableDataset):
    def __iter__(self):
        if get_worker_info().id == 0:
            Connection._send = write_and_die  # the fault: worker 0 has no samples, says so, and is killed
            return iter(())
        return iter(range(20))


def iterate():
    try:
        list(DataLoader(OneSided(), num_workers=2, batch_size=None))
    except RuntimeError as error:
        print("healed:", error, flush=True)


thread = threading.Thread(target=iterate, daemon=True)  # a thread has no SIGCHLD handler
thread.start()
thread.join(14)
if thread.is_alive():
    faulthandler.dump_traceback()
    print("hole: the loader has hung for 14 s", flush=True)
for child in active_children():
    child.kill()
os._exit(0)
