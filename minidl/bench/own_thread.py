"""What the loader's own thread does for a batch, without any other process, so that nothing is waited for.

Interface: `batch_by_batch()`. The classes are those that do it in a loader; only the queues' two ends are one place.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from minidl import ports
from minidl.dispatcher import Deliver, Wait
from minidl.messages import Result, Task
from minidl.protocol import LoaderEvent
from minidl.tracing import instrument
from minidl.transport.message import dumps, load_result


class _Shuttle:
    """Stands for a worker and the queues on both sides of it: a task that is put comes back as its result, rebuilt."""

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
    """A function that takes one batch through a loader of two workers, and sends the next task.

    Made while a trace is recorded, it records what a loader's own thread does, 15 events a batch.
    """
    seam, payload = ports.new_ports(), dumps(0)[0]
    index_queue: Any
    result_queue: Any
    if isinstance(seam, instrument.TracedPorts):
        number = seam.loader
        shuttle = _Shuttle(lambda idx, worker_id: instrument.load(number, idx, worker_id, payload, 0, 0))
        index_queue = instrument.TracedIndexQueue(seam, shuttle, 0)
        result_queue = instrument.TracedResultQueue(seam, shuttle)
    else:
        index_queue = result_queue = _Shuttle(lambda idx, worker_id: load_result(idx, worker_id, payload))
    lifecycle, dispatcher = seam.loader_lifecycle(), seam.dispatcher(2, 2, True)
    sampling = seam.sampler_iter(itertools.repeat([5]))

    def send() -> None:
        index = next(sampling)
        given = dispatcher.assign(index)
        assert given is not None
        index_queue.put(seam.task(given.idx, given.worker_id, index))

    def batch() -> None:
        lifecycle.handle(LoaderEvent.NEXT)
        assert isinstance(dispatcher.next_step(), Wait)
        result = result_queue.get(timeout=5.0)
        assert isinstance(dispatcher.receive(result.idx, result.data), Deliver)
        send()
        lifecycle.handle(LoaderEvent.YIELD)

    for event in (LoaderEvent.START, LoaderEvent.EPOCH_BEGIN):
        lifecycle.handle(event)
    for _ in range(dispatcher.capacity):
        send()
    lifecycle.handle(LoaderEvent.PRIMED)
    return batch
