"""`DeviceLoader`: batches of any loader, copied to a device ahead of their use. Article 1 §2.5; torch has none.

A copy on the stream that computes waits for what computes there. On a side stream it runs at the same time, if the host
memory is pinned, and three things must then be kept in order, which `_DeviceIter` does: the consumer's stream waits for
the copy before it uses the batch; the batch's memory is not given to the next copy while the consumer still reads it
(`record_stream`); and the host does not run so far ahead that batches pile up on the device.

Rules of use: use a batch on the stream that is current when `next` is called. `transform` gets the batch on the device
and runs on the side stream; what it needs must be made before the iteration begins. Streams come from `streams`.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
from typing_extensions import Self

from minidl import ports
from minidl.iterators import _BaseDataLoaderIter
from minidl.pin_memory import SIMULATED, accelerator_type
from minidl.ports import MP_STATUS_CHECK_INTERVAL
from minidl.streams import AcceleratorDevice, Device, Mark, SimulatedDevice

POLL = 0.001
"""Seconds between two looks at a mark, where a wait must end in time even if the device hangs."""


def open_device(device: str | int | torch.device) -> Device:
    """The device called so; "simulated", or any without an accelerator under MINIDL_SIMULATE_DEVICE=1, is simulated.

    Raises RuntimeError where there is no accelerator, ValueError where it is of another type.
    """
    available = accelerator_type()
    if device == SIMULATED or available == SIMULATED:
        return SimulatedDevice()
    if available is None:
        raise RuntimeError(
            f"DeviceLoader: device {str(device)!r}: this machine has no accelerator that torch can use: iterate over "
            "the loader itself, or set MINIDL_SIMULATE_DEVICE=1 to have the copies simulated"
        )
    wanted = torch.device(available, device) if isinstance(device, int) else torch.device(device)
    if wanted.type != available:
        raise ValueError(
            f"DeviceLoader: device {str(device)!r}: the accelerator here is {available!r}, and a batch for the CPU is "
            "what the loader itself yields"
        )
    index = torch.accelerator.current_device_index() if wanted.index is None else wanted.index
    return AcceleratorDevice(torch.device(wanted.type, index))


class DeviceLoader:
    """Yields the batches of `loader` on `device`, copied and transformed while earlier ones are used.

    loader: any iterable of batches: nests of tensors, of objects with a `to` method, and of what is just passed on.
    device: "cuda", "cuda:1", 1, a torch.device; "simulated" for a pretence on the CPU.
    prefetch: how many batches may be enqueued and not handed out yet; as many may be in use on the device beside them.
    transform: batch on the device -> batch, on the side stream.

    An error of the loader or of `transform` is raised in its batch's place, and iteration may go on after it. Raises
    ValueError for a prefetch below 1, and what `open_device` raises.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: str | int | torch.device,
        prefetch: int = 2,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if prefetch < 1:
            raise ValueError(f"DeviceLoader: prefetch is the number of batches under way, 1 or more, not {prefetch}")
        self.loader = loader
        self.prefetch = prefetch
        self.transform = transform
        self._device = open_device(device)
        self._live: weakref.WeakSet[_DeviceIter] = weakref.WeakSet()

    @property
    def device(self) -> torch.device:
        """Where the batches are."""
        return self._device.device

    @property
    def simulated(self) -> bool:
        """Whether the device is a pretence."""
        return self._device.simulated

    def __iter__(self) -> _DeviceIter:
        iterator = _DeviceIter(self)
        self._live.add(iterator)
        return iterator

    def __len__(self) -> int:
        """That of the loader; TypeError where it has none."""
        return len(self.loader)  # type: ignore[arg-type]

    def close(self) -> None:
        """End every iteration that still goes on, and the loader if it can be closed. Another may begin after it."""
        for iterator in tuple(self._live):
            iterator.close()
        _close(self.loader)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<DeviceLoader to {self._device.name}, prefetch {self.prefetch}, of {self.loader!r}>"


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch on its way. copied: what the stream made of it; ready: the mark behind it; source: its host memory."""

    copied: Any
    ready: Mark
    source: Any


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error in a batch's place."""

    error: Exception


class _DeviceIter:
    """One iteration of a DeviceLoader.

    `_in_flight`: enqueued and not handed out, `prefetch` at most. `_in_use`: handed out, and perhaps still read by the
    device; the host memory of each is kept until its mark in the consumer's stream is reached.
    """

    def __init__(self, owner: DeviceLoader) -> None:
        self._pid = os.getpid()  # a child that is forked with this object has no part in it
        self._closed = False
        self._exhausted = False
        self._in_flight: deque[_Flight | _Failure] = deque()
        self._in_use: deque[tuple[Mark, Any]] = deque()
        self._source: Any = None
        self._ready: Mark | None = None  # behind the copy of the batch that was handed out last
        self._handed_out = False
        self._prefetch, self._transform, self._device = owner.prefetch, owner.transform, owner._device
        self._inner: Iterator[Any] | None = iter(owner.loader)
        its = self._inner._ports if isinstance(self._inner, _BaseDataLoaderIter) else None
        self._stream = (its or ports.new_ports()).device_stream(self._device, owner.prefetch, owner.loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        self._retire()
        self._fill()
        if not self._in_flight:
            self._end()
            raise StopIteration
        try:
            batch = self._hand_over(self._in_flight[0])
        except Exception:
            self._in_flight.popleft()
            raise
        self._in_flight.popleft()  # only now: an interrupt of the wait leaves the batch in its place
        return batch

    def _retire(self) -> None:
        """The consumer is done with its batch as soon as its stream has come to here; let go of what it is done with.

        Waits where the device is more than `prefetch` batches behind: this bounds the device's memory.
        """
        if self._handed_out:
            self._in_use.append((self._device.mark(), self._source))
            self._handed_out, self._source = False, None
        while self._in_use and (len(self._in_use) > self._prefetch or self._in_use[0][0].done()):
            self._stream.wait(self._in_use[0][0])
            self._in_use.popleft()

    def _fill(self) -> None:
        """Take batches from the loader and enqueue their copies, as far as the depth allows; not beyond an error.

        Whoever interrupts this (Ctrl-C) finds all that is in flight in its place.
        """
        while not (self._exhausted or len(self._in_flight) >= self._prefetch or self._failing()):
            try:
                batch = next(self._inner)  # type: ignore[arg-type]
            except StopIteration:
                self._exhausted = True
            except Exception as error:
                self._in_flight.append(_Failure(error))
            else:
                self._in_flight.append(self._enqueue(batch))

    def _failing(self) -> bool:
        return bool(self._in_flight) and isinstance(self._in_flight[-1], _Failure)

    def _enqueue(self, batch: Any) -> _Flight | _Failure:
        """Copies, transform and the mark behind them, on the side stream."""
        try:
            copied = self._stream.copy(batch)
            if self._transform is not None:
                copied = self._stream.transform(self._transform, copied)
            return _Flight(copied, self._stream.mark(), batch)
        except Exception as error:
            return _Failure(error)

    def _hand_over(self, flight: _Flight | _Failure) -> Any:
        if isinstance(flight, _Failure):
            raise flight.error
        batch = self._stream.hand_over(flight.copied, flight.ready)
        self._source, self._ready, self._handed_out = flight.source, flight.ready, True
        return batch

    def _end(self) -> None:
        """The loader has no more, or nobody wants it: end the stream's part. What is under way is waited for, not long.

        Until it has ended, the host memory that it reads must stay.
        """
        self._closed = True
        self._inner = None
        last = [self._ready, *(flight.ready for flight in self._in_flight if isinstance(flight, _Flight))][-1]
        deadline = time.monotonic() + MP_STATUS_CHECK_INTERVAL
        while last is not None and not last.done() and time.monotonic() < deadline:
            time.sleep(POLL)
        self._in_flight.clear()
        self._stream.close()
        self._in_use.clear()
        self._source = None

    def close(self) -> None:
        """Drop what is in flight, and close the loader's iterator if it can be. Calling next() raises StopIteration."""
        if self._closed or self._pid != os.getpid():
            return
        inner = self._inner
        self._end()
        _close(inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The loader's iterator is let go, not closed: a persistent one serves the next iteration.
        if sys is None or sys.is_finalizing() or getattr(self, "_closed", True) or not hasattr(self, "_stream"):
            return
        if self._pid == os.getpid():
            self._end()

    def __getstate__(self) -> NoReturn:
        raise NotImplementedError("{} cannot be pickled", self.__class__.__name__)


def _close(what: Any) -> None:
    close = getattr(what, "close", None)
    if callable(close):
        close()
