"""Stuck workers are joined one after the other, 5 s each: the end of the loop takes 5 s times their number."""

import multiprocessing
import time

from torch.utils.data import DataLoader, _utils

stuck = multiprocessing.Semaphore(0)


class Slow(list):
    def __getitem__(self, index):
        if index:
            stuck.release()
            time.sleep(3600)  # a server that does not answer
        return index


if __name__ == "__main__":
    _utils.MP_STATUS_CHECK_INTERVAL = 1  # torch's 5 s, shortened: how long a join lasts
    iterator = iter(DataLoader(Slow(range(20)), num_workers=6))
    next(iterator)
    for _ in range(6):  # a worker that has not begun its sample ends at once
        stuck.acquire()
    began = time.monotonic()
    del iterator  # as `break` does
    took = time.monotonic() - began
    print(f"{'hole' if took > 4 else 'healed'}: the shutdown took {took:.1f} s for 6 workers and an interval of 1 s")
