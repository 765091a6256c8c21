"""The training is killed while a worker waits for a sample that never comes: the worker stays for ever."""

import os
import select
import signal
import time

from torch.utils.data import DataLoader, Dataset, _utils


class Silent(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index:
            time.sleep(3600)  # a server that does not answer
        return index


def train():
    iterator = iter(DataLoader(Silent(), num_workers=2, batch_size=None))
    next(iterator)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short


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
        print("hole: the workers live on")
        os.killpg(training, signal.SIGKILL)
