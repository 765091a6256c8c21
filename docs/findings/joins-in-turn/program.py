"""Stuck workers are joined one after the other, 5 s each: the end of the loop takes 5 s times their number."""

import time

from torch.utils.data import DataLoader, _utils


class Slow(list):
    def __getitem__(self, index):
        if index:
            time.sleep(3600)  # a server that does not answer
        return index


if __name__ == "__main__":
    _utils.MP_STATUS_CHECK_INTERVAL = 1  # torch's 5 s, shortened: how long a join lasts
    iterator = iter(DataLoader(Slow(range(20)), num_workers=6))
    next(iterator)
    began = time.monotonic()
    del iterator  # as `break` does
    took = time.monotonic() - began
    print(f"{'hole' if took > 4 else 'healed'}: the shutdown took {took:.1f} s for 6 workers and an interval of 1 s")
