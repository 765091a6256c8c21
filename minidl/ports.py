"""What the actors touch the world through: queues, events, processes, threads, copies. The seam for instrumentation.

`Ports` hands out the plain things. Tracing replaces it by a subclass that hands out the same things wrapped (see
`tracing/instrument.py`), so that the actors hold no line that exists only for tracing, and nothing is paid when it is
off. One Ports object belongs to one iterator; it goes to the workers with their other arguments, so it must pickle.

`use(factory)` decides what new iterators get, and returns the undo.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from minidl.dispatcher import Dispatcher
from minidl.fetch import Progress, Unwatched
from minidl.messages import Result, Task
from minidl.progress import ProgressBoard, WorkerProgress
from minidl.protocol import LoaderLifecycle, PinLifecycle, WorkerLifecycle
from minidl.streams import Device, Stream
from minidl.transport.message import Envelope
from minidl.transport.queues import BoundedQueue, SharedFlag

MP_STATUS_CHECK_INTERVAL = 5.0
"""Seconds that a wait for another actor lasts before the actor's life is checked, and that a join may last."""


class Ports:
    """Plain ports; each method is one thing that an actor needs."""

    # --- in the loader's process
    def opened(self, iterator: Any) -> None:
        """An iterator begins; it describes itself."""

    def sampler_iter(self, sampler: Iterable[Any]) -> Iterator[Any]:
        """The sampler's iterator for one epoch."""
        return iter(sampler)

    def loader_lifecycle(self) -> LoaderLifecycle:
        return LoaderLifecycle()

    def dispatcher(self, num_workers: int, prefetch_factor: int, in_order: bool) -> Dispatcher:
        return Dispatcher(num_workers, prefetch_factor, in_order)

    def progress_board(self, num_workers: int) -> ProgressBoard:
        return ProgressBoard(num_workers)

    def progress(self) -> Progress:
        """Who follows a fetch in the loader's own process."""
        return Unwatched()

    def index_queue(self, context: Any, worker_id: int) -> Any:
        return BoundedQueue(context)

    def result_queue(self, context: Any) -> Any:
        return BoundedQueue(context)

    def ready_queue(self) -> Any:
        """The pin thread's output; a queue within the process."""
        return queue.Queue()

    def workers_done_event(self) -> Any:
        return SharedFlag()

    def pin_memory_thread_done_event(self) -> Any:
        return threading.Event()

    def worker(self, context: Any, worker_id: int, target: Callable[..., None], args: tuple[Any, ...]) -> Any:
        """A process, not started yet."""
        return context.Process(target=target, args=args, daemon=True)

    def pin_memory_thread(self, thread: threading.Thread) -> Any:
        return thread

    def found_dead(self, what: str, worker_id: int, pid: int, exit_code: int | None) -> None:
        """A liveness check found somebody dead: what is "worker", "pin thread" or "loader"."""

    def timed_out(self, idx: int, worker_id: int, seconds: float) -> None:
        """The loader's timeout has passed."""

    # --- messages, in either process
    def task(self, idx: int, worker_id: int, index: Any) -> Any:
        """What is put into an index queue for a task."""
        return Envelope(Task(idx, worker_id, index))

    def result(self, idx: int, worker_id: int, data: Any) -> Any:
        """What is put into the result queue for a task."""
        return Envelope(Result(idx, worker_id, data))

    # --- in a worker
    def enter_worker(self, worker_id: int, num_workers: int, seed: int) -> None:
        """The worker is about to enter its loop."""

    def worker_lifecycle(self, worker_id: int) -> WorkerLifecycle:
        return WorkerLifecycle(worker_id)

    def worker_progress(self, board: ProgressBoard, worker_id: int) -> WorkerProgress:
        return board.writer(worker_id)

    # --- in the pin thread
    def pin_lifecycle(self) -> PinLifecycle:
        return PinLifecycle()

    def pinning(self, pin_memory: Callable[[Any], Any], simulated: bool) -> Callable[[Result], Any]:
        """What pins a result's data."""

        def pin(result: Result) -> Any:
            return pin_memory(result.data)

        return pin

    # --- in the device stage
    def device_stream(self, device: Device, prefetch: int, loader: Any) -> Stream:
        """The side stream that an iteration over `loader` copies on."""
        return device.stream()


_factory: Callable[[], Ports] = Ports


def new_ports() -> Ports:
    """Ports for a new iterator."""
    return _factory()


def use(factory: Callable[[], Ports]) -> Callable[[], None]:
    """Give iterators that are made from now on the ports that `factory` returns; call the answer to undo this."""
    global _factory
    previous, _factory = _factory, factory

    def undo() -> None:
        global _factory
        _factory = previous

    return undo
