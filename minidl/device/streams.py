"""The seam to an accelerator: a side stream, marks in streams, and a clock.

Interface: `AcceleratorDevice` talks to torch's device module (cuda, xpu, and `sim`, the simulated one). It gives a
`stream()` for copies and transforms, and marks: `mark()` in the consumer's current stream, `idle_mark()` in a stream
without other work, and those of the side stream.

Rules of use: copy, then transform, then mark, then hand_over; all four in the consumer's thread. The results
of `copy` and `transform` are only for `transform` and `hand_over`: the batch is complete once it is handed over.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from minidl.device import sim
from minidl.device.nest import map_nested, tensors_in

POLL = 0.001
"""Interval of polls of a mark in seconds."""

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices of the process."""


def is_reached(mark: AcceleratorMark, seconds: float) -> bool:
    """Poll a mark for at most `seconds`; return whether it is reached. The wait ends even if the device hangs."""
    deadline = time.monotonic() + seconds
    while not (done := mark.done()) and time.monotonic() < deadline:
        time.sleep(POLL)
    return done


@functools.cache
def _keep_garbage_in_forks() -> None:
    """From now on, a forked child does not collect what was garbage in this process.

    An event in a cycle would be destroyed in the child, where CUDA is not initialised: that aborts the child.
    """
    os.register_at_fork(after_in_child=gc.freeze)


# --- An accelerator ---------------------------------------------------------------------------------------------------
class AcceleratorMark:
    """A position in a stream: an event of torch's device module."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        """Whether the stream has reached it."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Block this thread until the stream has reached it."""
        self.event.synchronize()

    def since(self, earlier: AcceleratorMark) -> int:
        """Return the ns from an earlier mark to this one on the device's clock; both must be timed and done."""
        return int(earlier.event.elapsed_time(self.event) * 1e6)


class AcceleratorDevice:
    """An accelerator whose torch module has streams and events (cuda, xpu, sim).

    It keeps one side stream for all iterations, because a stream cannot use memory that another one has cached.
    RuntimeError if the module has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.simulated = device.type == sim.NAME
        self.name = str(device)
        self.module: Any = torch.get_device_module(device)
        if not (hasattr(self.module, "Stream") and hasattr(self.module, "Event")):
            raise RuntimeError(
                f"DeviceLoader: torch.{device.type} has no streams to copy on: iterate over the loader itself"
            )
        self.side: Any = self.module.Stream(device=device)
        self._idle: Any = None
        _keep_garbage_in_forks()

    def stream(self) -> AcceleratorStream:
        """Return a side stream for one iteration."""
        return AcceleratorStream(self)

    def mark(self, timed: bool = False) -> AcceleratorMark:
        """Return a mark in the consumer's current stream."""
        # A thread that waits for an untimed mark is far ahead of the device: it may sleep and free its core.
        sleeps = {"blocking": True} if self.device.type == "cuda" and not timed else {}
        return self.record(self.module.current_stream(self.device), timed, **sleeps)

    def current(self) -> int:
        """Return the number of the consumer's current stream."""
        return int(self.module.current_stream(self.device).stream_id)

    @property
    def captures(self) -> bool:
        """Whether the consumer's current stream is captured into a graph: then no mark may be placed or asked for."""
        capturing = getattr(self.module, "is_current_stream_capturing", None)
        return capturing is not None and bool(capturing())

    def idle_mark(self) -> AcceleratorMark:
        """Return a timed mark in a stream without other work."""
        if self._idle is None:
            self._idle = self.module.Stream(device=self.device)
        return self.record(self._idle, True)

    @property
    def locks(self) -> bool:
        """Whether `lock` may succeed."""
        return hasattr(self.module, "cudart")

    def lock(self, address: int, size: int) -> None:
        """Page-lock host memory, so that copies from it do not block the host. OSError says why that can't be done."""
        cudart = self.module.cudart()
        with self.module.stream(self.side):  # on this device: CUDA opens a context on the current one
            status = cudart.cudaHostRegister(address, size, _PORTABLE)
        if int(status):
            self._forget_error()
            raise OSError(f"cudaHostRegister of {size} bytes: {cudart.cudaGetErrorString(status)}")

    def unlock(self, address: int) -> None:
        """Undo it; copies from there have ended."""
        with contextlib.suppress(RuntimeError), self.module.stream(self.side):  # of a device that has failed
            if int(self.module.cudart().cudaHostUnregister(address)):
                self._forget_error()

    def _forget_error(self) -> None:
        """CUDA keeps an error for the next kernel of the program, which would raise it: let it be this one."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def record(self, stream: Any, timed: bool, **options: bool) -> AcceleratorMark:
        """Return a new mark in `stream`."""
        event = self.module.Event(enable_timing=timed, **options)
        event.record(stream)
        return AcceleratorMark(event)


class AcceleratorStream:
    """The accelerator's side stream, during one iteration. `number` identifies it."""

    def __init__(self, device: AcceleratorDevice) -> None:
        self.on = device
        self.number = int(device.side.stream_id)
        # The consumer's stream may still compute tensors that the transform uses: weights, mean and scale.
        device.side.wait_stream(device.module.current_stream(device.device))

    def copy(self, batch: Any) -> Any:
        """Enqueue the copies of all of the batch's tensors."""
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
        """Let `function` enqueue its work on the copied batch."""
        with self.on.module.stream(self.on.side):
            return function(copied)

    def mark(self, timed: bool = False) -> AcceleratorMark:
        """Return a mark after all work that is enqueued so far."""
        return self.on.record(self.on.side, timed)

    def hand_over(self, copied: Any, ready: AcceleratorMark) -> Any:
        """Return the batch for the consumer's current stream, which waits for `ready` first."""
        consumer = self.on.module.current_stream(self.on.device)
        consumer.wait_event(ready.event)
        for tensor in tensors_in(copied):
            if tensor.device == self.on.device:
                tensor.record_stream(consumer)  # keeps its memory until the consumer's stream has used it
        return copied

    def wait(self, mark: AcceleratorMark, seconds: float) -> bool:
        """Block this thread until a mark, of the consumer's stream or of this one, is reached, and return True.

        seconds: return False after so long; 0 = no limit.
        """
        if seconds:
            return is_reached(mark, seconds)
        mark.wait()
        return True

    def close(self) -> None:
        """Accept no more work. What runs ends by itself; the allocators know which streams still use the memory."""
