"""The training is killed in the middle of writing a task: the worker reads the rest of it for ever."""

import os
import select
import signal
import time
from multiprocessing.connection import Connection

from torch.utils.data import DataLoader, _utils


def tear(connection, message):
    os.write(connection.fileno(), message[: len(message) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def train():
    iterator = iter(DataLoader(range(100), num_workers=2, batch_size=None))
    time.sleep(1)
    Connection._send = tear  # the fault: the next write of this process is its last, and half
    next(iterator)
    time.sleep(10)


if __name__ == "__main__":
    _utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5  # torch's 5 s, shortened: how often a worker looks for its parent
    ended, held = os.pipe()
    if not (training := os.fork()):
        os.setpgrp()
        train()
    os.close(held)  # the workers hold it, too: its end of file is theirs
    os.waitpid(training, 0)
    if select.select([ended], [], [], 6)[0]:
        print("healed: the workers have ended")
    else:
        print("hole: a worker lives on")
        os.killpg(training, signal.SIGKILL)
