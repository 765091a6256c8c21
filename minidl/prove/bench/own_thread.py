"""The work of the loader's own thread for a batch, without other processes, so that it never waits.

Interface: `batch_by_batch()`. The driver is the loader's; an object in this process stands for worker and queues.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from minidl.loader import ports
from minidl.loader.dispatcher import Assignment, Deliver, Dispatcher
from minidl.loader.driver import DRAW, READY, Driver, Effect, Get
from minidl.loader.protocol import LoaderEvent, LoaderLifecycle
from minidl.record import channels
from minidl.record.ports import TracedPorts
from minidl.wire.message import dumps, load_result
from minidl.wire.messages import Result, Task


class _Shuttle:
    """Stands for a worker and its queues: a task that is put comes back as its result, rebuilt."""

    def __init__(self, load: Callable[[int, int], Result]) -> None:
        self._load = load
        self._tasks: deque[Task] = deque()

    def put(self, envelope: Any) -> None:
        self._tasks.append(envelope.message)

    def get(self, timeout: float) -> Result:
        self._recv_bytes()
        task = self._tasks.popleft()
        return self._load(task.idx, task.worker_id)

    def _recv_bytes(self) -> bytes:
        return b""


def batch_by_batch() -> Callable[[], None]:
    """Make a function that takes one batch through the driver of a loader with two workers.

    Made while a trace is recorded, it records what a loader's own thread does, 15 events a batch.
    """
    seam, payload = ports.new_ports(), dumps(0)[0]
    index_queue: Any
    result_queue: Any
    if isinstance(seam, TracedPorts):
        number = seam.loader
        shuttle = _Shuttle(lambda idx, worker_id: channels.load_result(number, idx, worker_id, payload, 0, 0))
        index_queue = channels.TracedIndexQueue(seam, shuttle, 0)
        result_queue = channels.TracedResultQueue(seam, shuttle)
    else:
        index_queue = result_queue = _Shuttle(lambda idx, worker_id: load_result(idx, worker_id, payload))
    lifecycle = seam.decider(LoaderLifecycle)
    driver = Driver(seam.decider(Dispatcher, 2, 2, True), lifecycle)
    sampling = seam.sampler_iter(itertools.repeat([5]))

    def perform(effect: Effect) -> None:
        """Perform effects up to the next batch, or up to the beginning of the epoch."""
        while type(effect) is not Deliver and effect is not READY:
            if type(effect) is Get:
                effect = driver.received(result_queue.get(timeout=effect.timeout))
                continue
            assert effect is DRAW
            index = next(sampling)
            given = driver.drawn(index)
            assert type(given) is Assignment
            index_queue.put(seam.envelope(Task(given.idx, given.worker_id, index)))
            effect = driver.done()

    def batch() -> None:
        perform(driver.next())
        driver.yielded()

    lifecycle.handle(LoaderEvent.START)
    perform(driver.begin())
    return batch
