"""The seam to an accelerator: a side stream, marks in streams, and a clock.

Interface: `AcceleratorDevice` talks to torch's device module; `SimulatedDevice` simulates the stream by a thread, so
that the same code runs without an accelerator. Each gives a `stream()` for copies and transforms, and marks:
`mark()` in the consumer's current stream, `idle_mark()` in a stream without other work, and those of the side stream.

Rules of use: copy, then transform, then mark, then hand_over; all four in the consumer's thread. The results
of `copy` and `transform` are only for `transform` and `hand_over`: the batch is complete once it is handed over.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Protocol

import torch

from minidl.device.nest import map_nested, tensors_in

DEAD_CHECK: Final = 5.0
"""Seconds between two liveness checks of the simulated stream's thread; also the timeout of its join."""


class Mark(Protocol):
    """A position in a stream."""

    def done(self) -> bool:
        """Whether the stream has reached it."""

    def wait(self) -> None:
        """Block this thread until the stream has reached it."""

    def since(self, earlier: Any) -> int:
        """Return the ns from an earlier mark to this one on the device's clock; both must be timed and done."""


class Stream(Protocol):
    """The side stream of one iteration. `number` identifies it."""

    number: int

    def copy(self, batch: Any) -> Any:
        """Enqueue the copies of all of the batch's tensors."""

    def transform(self, function: Callable[[Any], Any], copied: Any) -> Any:
        """Let `function` enqueue its work on the copied batch."""

    def mark(self, timed: bool = False) -> Mark:
        """Return a mark after all work that is enqueued so far."""

    def hand_over(self, copied: Any, ready: Any) -> Any:
        """Return the batch for the consumer's current stream, which waits for `ready` first."""

    def wait(self, mark: Mark) -> None:
        """Block this thread until a mark in the consumer's stream is reached."""

    def close(self) -> None:
        """Accept no more work."""


class Device(Protocol):
    """A device, real or simulated."""

    name: str
    device: torch.device
    simulated: bool

    def stream(self) -> Stream:
        """Return a side stream for one iteration."""

    def mark(self, timed: bool = False) -> Mark:
        """Return a mark in the consumer's current stream."""

    def current(self) -> int:
        """Return the number of the consumer's current stream."""

    def idle_mark(self) -> Mark:
        """Return a timed mark in a stream without other work."""


# --- An accelerator ---------------------------------------------------------------------------------------------------
class AcceleratorMark:
    """An event of torch's device module."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, earlier: AcceleratorMark) -> int:
        return int(earlier.event.elapsed_time(self.event) * 1e6)


class AcceleratorDevice:
    """An accelerator whose torch module has streams and events (cuda, xpu).

    It keeps one side stream for all iterations, because a stream cannot use memory that another one has cached.
    RuntimeError if the module has no streams.
    """

    simulated = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)
        self.module: Any = torch.get_device_module(device)
        if not (hasattr(self.module, "Stream") and hasattr(self.module, "Event")):
            raise RuntimeError(
                f"DeviceLoader: torch.{device.type} has no streams to copy on: iterate over the loader itself"
            )
        self.side: Any = self.module.Stream(device=device)
        self._idle: Any = None

    def stream(self) -> AcceleratorStream:
        return AcceleratorStream(self)

    def mark(self, timed: bool = False) -> AcceleratorMark:
        # A thread that waits for an untimed mark is far ahead of the device: it may sleep and free its core.
        sleeps = {"blocking": True} if self.device.type == "cuda" and not timed else {}
        return self.record(self.module.current_stream(self.device), timed, **sleeps)

    def current(self) -> int:
        return int(self.module.current_stream(self.device).stream_id)

    def idle_mark(self) -> AcceleratorMark:
        if self._idle is None:
            self._idle = self.module.Stream(device=self.device)
        return self.record(self._idle, True)

    def record(self, stream: Any, timed: bool, **options: bool) -> AcceleratorMark:
        """Return a new mark in `stream`."""
        event = self.module.Event(enable_timing=timed, **options)
        event.record(stream)
        return AcceleratorMark(event)


class AcceleratorStream:
    """The accelerator's side stream, during one iteration."""

    def __init__(self, device: AcceleratorDevice) -> None:
        self.on = device
        self.number = int(device.side.stream_id)
        # The consumer's stream may still compute tensors that the transform uses: weights, mean and scale.
        device.side.wait_stream(device.module.current_stream(device.device))

    def copy(self, batch: Any) -> Any:
        self._follow(batch)
        with self.on.module.stream(self.on.side):
            return map_nested(batch, self._moved)

    def _moved(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(self.on.device, non_blocking=True)
        if callable(getattr(item, "to", None)):
            try:
                return item.to(self.on.device, non_blocking=True)
            except TypeError:
                return item.to(self.on.device)
        return NotImplemented

    def _follow(self, batch: Any) -> None:
        """Let the side stream wait for tensors already on the device: their producers may still be queued."""
        there = [tensor for tensor in tensors_in(batch) if tensor.device == self.on.device]
        if there:
            self.on.side.wait_stream(self.on.module.current_stream(self.on.device))
        for tensor in there:
            tensor.record_stream(self.on.side)

    def transform(self, function: Callable[[Any], Any], copied: Any) -> Any:
        with self.on.module.stream(self.on.side):
            return function(copied)

    def mark(self, timed: bool = False) -> AcceleratorMark:
        return self.on.record(self.on.side, timed)

    def hand_over(self, copied: Any, ready: AcceleratorMark) -> Any:
        consumer = self.on.module.current_stream(self.on.device)
        consumer.wait_event(ready.event)
        for tensor in tensors_in(copied):
            if tensor.device == self.on.device:
                tensor.record_stream(consumer)  # keeps its memory until the consumer's stream has used it
        return copied

    def wait(self, mark: Mark) -> None:
        mark.wait()

    def close(self) -> None:
        pass  # running work ends by itself; the allocators know which streams still use the memory


# --- Simulated device -------------------------------------------------------------------------------------------------
class SimulatedMark:
    """A mark that the stream's thread reaches; its clock is the host's."""

    def __init__(self, stream: SimulatedStream | None = None) -> None:
        self._stream = stream
        self._reached = threading.Event()
        self._time = 0

    def reach(self) -> None:
        """Record that the stream has reached this mark."""
        self._time = time.monotonic_ns()
        self._reached.set()

    def done(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        while not self._reached.wait(DEAD_CHECK):
            if self._stream is None or not self._stream.is_alive():
                raise RuntimeError(
                    "DeviceLoader: the simulated stream's thread has ended; this batch is lost: begin a new iteration"
                )

    def since(self, earlier: SimulatedMark) -> int:
        return self._time - earlier._time


class SimulatedDevice:
    """A device simulated on the CPU: its memory is the host's, the consumer's stream is the host itself."""

    name = "simulated"
    simulated = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._count = 0

    def stream(self) -> SimulatedStream:
        self._count += 1
        return SimulatedStream(self._count)

    def mark(self, timed: bool = False) -> SimulatedMark:
        mark = SimulatedMark()
        mark.reach()
        return mark

    def current(self) -> int:
        return 0

    def idle_mark(self) -> SimulatedMark:
        return self.mark(True)


class SimulatedStream:
    """A stream simulated by a thread, which performs the enqueued work in order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # The thread refers only to the queue, so that a stream without references is collected and ends it.
        self._thread = threading.Thread(target=_play, args=(self._work,), name="simulated_stream", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the stream's thread is alive."""
        return self._thread.is_alive()

    def copy(self, batch: Any) -> Future[Any]:
        return self._later(lambda: map_nested(batch, _cloned))

    def transform(self, function: Callable[[Any], Any], copied: Future[Any]) -> Future[Any]:
        return self._later(lambda: function(copied.result()))

    def _later(self, make: Callable[[], Any]) -> Future[Any]:
        made: Future[Any] = Future()
        self._work.put(lambda: _fill(made, make))
        return made

    def mark(self, timed: bool = False) -> SimulatedMark:
        mark = SimulatedMark(self)
        self._work.put(mark.reach)
        return mark

    def hand_over(self, copied: Future[Any], ready: SimulatedMark) -> Any:
        ready.wait()
        return copied.result()

    def wait(self, mark: Mark) -> None:
        mark.wait()

    def close(self) -> None:
        self._work.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(DEAD_CHECK)

    def __del__(self) -> None:
        self._work.put(None)


def _fill(made: Future[Any], make: Callable[[], Any]) -> None:
    try:
        made.set_result(make())
    except Exception as error:
        made.set_exception(error)


def _play(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    torch.set_num_threads(1)  # thread-local: the copies must not take every core
    while (step := work.get()) is not None:
        step()
        del step  # holds a batch


def _cloned(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.clone()
    return item.to("cpu") if callable(getattr(item, "to", None)) else NotImplemented
