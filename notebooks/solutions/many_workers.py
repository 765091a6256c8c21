"""Solutions of 05_many_workers."""

from collections.abc import Sequence
from typing import Any

import minidl
from minidl.loader.dispatcher import STORED, Deliver, Dispatcher, NoBatch


class MyDispatcher(Dispatcher):
    def receive(self, idx: int, data: Any) -> Deliver | NoBatch:
        self.tasks_outstanding -= 1
        self.task_info[idx].data = data
        return self._deliver(idx) if idx == self.rcvd_idx else STORED


def next_worker(active: Sequence[bool], held: Sequence[int], turn: int, capacity: int) -> int | None:
    share = capacity // sum(active)
    for step in range(len(active)):
        worker = (turn + step) % len(active)
        if active[worker] and held[worker] < share:
            return worker
    return None


def deepest(trace: minidl.Trace) -> int:
    events = trace.to_pandas()
    stored = events[events.name == "reorder_store"]
    return int(stored.depth.max()) if len(stored) else 0
