"""DeviceLoader: copies the batches of any loader to a device ahead of their use. Article 2 §1.4; torch has none.

A copy on the computing stream waits for the computations on it. On a side stream, copies from pinned host memory run at
the same time. `_DeviceIter` then has to keep three things in order: the consumer's stream waits for
the copy before it uses the batch; the batch's memory is not given to the next copy while the consumer still reads it
(`record_stream`); and the host does not run so far ahead that batches pile up on the device.

Rules of use: use a batch on the stream that is current when `next` is called. `transform` gets the batch on the device
and runs on the side stream; what it needs must be made before the iteration begins. What stays on the host (an array)
may be in page-locked memory: a copy of your own from it must end before you let go of it. Streams come from `streams`.

Over a `DataLoader` with workers, transport="arena" and pin_memory=True, the memory that the workers write batches into
(`arena.arena`) is page-locked itself, once: there is no pin thread, and no copy into other memory. A worker writes
into it again only after the copy of its batch, because the batch is kept here until then. Who loops over the same
loader without a DeviceLoader copies at any time, so the pin thread runs there. xpu and mps have no such locks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import torch
from typing_extensions import Self

from minidl.dataloader import DataLoader, LoaderWithoutState
from minidl.device import sim
from minidl.device.streams import AcceleratorDevice, AcceleratorMark, is_reached
from minidl.guides import more
from minidl.live_repr import LiveRepr, counted, short
from minidl.loader import ports
from minidl.loader.driver import MP_STATUS_CHECK_INTERVAL
from minidl.loader.iterators import _BaseDataLoaderIter
from minidl.loader.pin_memory import accelerator_type
from minidl.resume.position import EpochPosition
from minidl.resume.stateful import Record
from minidl.wire.atomic import at_once
from minidl.wire.signal_handling import STEPS

STEPS.add(__name__)


def open_device(device: str | int | torch.device) -> AcceleratorDevice:
    """Return the named device; "sim" is the simulated one, also if the environment does not ask for it.

    RuntimeError if there is no accelerator, ValueError if it is of another type.
    """
    if str(device).partition(":")[0] == sim.NAME:
        sim.load()
    sim.load_if_wanted()
    available = sim.NAME if sim.is_loaded() and str(device).startswith(sim.NAME) else accelerator_type()
    if available is None:
        raise RuntimeError(
            f"DeviceLoader: device {str(device)!r}: this machine has no accelerator that torch can use: iterate over "
            "the loader itself, or choose 'sim', the simulated one (MINIDL_SIMULATE_DEVICE=1)"
        )
    wanted = torch.device(available, device) if isinstance(device, int) else torch.device(device)
    if wanted.type != available:
        raise ValueError(
            f"DeviceLoader: device {str(device)!r}: the accelerator of this machine is {available!r}: choose it, or "
            "iterate over the loader itself for batches on the CPU"
        )
    index = torch.accelerator.current_device_index() if wanted.index is None else wanted.index
    return AcceleratorDevice(torch.device(wanted.type, index))


class DeviceLoader(LiveRepr):
    """Yields the batches of `loader` on `device`, copied and transformed while earlier ones are used.

    loader: any iterable of batches: nests of tensors, objects with a `to` method, and other objects, which stay.
    device: "cuda", "cuda:1", 1, a torch.device; "sim" for the simulated accelerator.
    prefetch: the limit of batches that are enqueued but not yielded; as many more may be in use on the device.
    transform: batch on the device -> batch, on the side stream.
    timeout: seconds to wait for a device that is behind, 0 = no limit; torch's own waits (a copy from pageable memory,
    `item`) know no limit. After the RuntimeError, iteration may continue.

    An error of the loader or of `transform` is raised in place of its batch, and iteration may continue. A Ctrl-C in
    next() loses no batch: the next call copies and transforms it again. Raises ValueError for a prefetch below 1 or a
    negative timeout, and the errors of `open_device`.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: str | int | torch.device,
        prefetch: int = 2,
        transform: Callable[[Any], Any] | None = None,
        timeout: float = 0,
    ) -> None:
        if prefetch < 1:
            raise ValueError(f"DeviceLoader: prefetch={prefetch}: choose 1 batch or more")
        if timeout < 0:
            raise ValueError(f"DeviceLoader: timeout={timeout:g}: choose seconds, or 0 for no limit")
        self.loader = loader
        self.prefetch = prefetch
        self.transform = transform
        self.timeout = timeout
        self._device = open_device(device)
        self._live: weakref.WeakSet[_DeviceIter] = weakref.WeakSet()

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self._device.device

    @property
    def simulated(self) -> bool:
        """Whether the device is simulated."""
        return self._device.simulated

    def __iter__(self) -> _DeviceIter:
        iterator = _DeviceIter(self)
        self._live.add(iterator)
        return iterator

    def __len__(self) -> int:
        """The length of the loader; TypeError if it has none."""
        return len(self.loader)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, of the batches that were handed out here; those in flight come again."""
        return self._stateful().state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict` at the next iter(); see DataLoader.load_state_dict."""
        self._stateful().load_state_dict(state_dict)

    def _stateful(self) -> Any:
        if not isinstance(self.loader, DataLoader):
            raise TypeError(
                f"DeviceLoader: the state of a {type(self.loader).__name__} counts batches in flight as handed out: "
                "wrap a minidl.DataLoader, which knows them apart"
            )
        return self.loader

    def close(self) -> None:
        """End all iterations, and close the loader if it has `close`. A new iteration may begin afterwards."""
        for iterator in tuple(self._live):
            iterator.close()
        _close(self.loader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _phrases(self) -> Iterator[str]:
        yield f"to {self._device.name}, prefetch {self.prefetch}"
        yield counted(len(self._live), "live iteration")
        yield f"of {short(self.loader)}"


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch in flight. copied: the stream's result; ready: the mark after it; source: its host memory.

    count: the loader's batches and errors up to this one.
    """

    copied: Any
    ready: AcceleratorMark
    source: Any
    count: int


@dataclass(frozen=True, slots=True)
class _FailedBatch:
    """An error in place of a batch."""

    error: Exception
    count: int


_unread: dict[AcceleratorMark, Any] = {}
"""What a device that hangs had not read when an iteration ended, by the mark after it."""


def _let_go() -> None:
    """Let go of what has been read meanwhile. Another thread, or the garbage collector, may end an iteration here."""
    for mark in list(_unread):
        if not _may_read(mark):
            _unread.pop(mark, None)


def _may_read(mark: AcceleratorMark) -> bool:
    try:
        return not mark.done()
    except RuntimeError:  # the device has failed
        return False


class _DeviceIter(LiveRepr):
    """One iteration of a DeviceLoader.

    `_in_flight`: batches enqueued but not yielded, at most `prefetch`. `_in_use`: batches yielded that the device may
    still read; the host memory of each is kept until its copy has ended, and its mark in the consumer's stream is
    reached. That stream need not be the one that waits for the copy: the program may have changed it.
    """

    def __init__(self, owner: DeviceLoader) -> None:
        self._pid = os.getpid()  # a forked child must not end the iteration
        self._closed = False
        self._exhausted = False
        self._taken: list[Any] = []  # the batch that the loader has given, until it is in flight
        self._in_flight: deque[_Flight | _FailedBatch] = deque()
        self._in_use: deque[tuple[tuple[AcceleratorMark, ...], Any]] = deque()
        self._yielded: tuple[AcceleratorMark, Any] | None = None  # of the last batch, until the next is asked for
        self._latest: AcceleratorMark | None = None  # in the side stream, after all copies
        self._prefetch, self._transform, self._device = owner.prefetch, owner.transform, owner._device
        self._timeout = owner.timeout
        self._inner: Iterator[Any] | None = _iterator(owner.loader, self._device)
        own = self._inner if isinstance(self._inner, _BaseDataLoaderIter) else None
        _let_go()
        its = own._ports if own is not None else ports.new_ports()
        self._stream = its.device_stream(self._device, owner.prefetch, owner.loader)
        record = own._record if own is not None else None
        self._position = record.position if isinstance(record, Record) else EpochPosition([], False)
        self._position.defer()  # the loader's state is of what is handed out here

    def __iter__(self) -> Self:
        return self

    def _phrases(self) -> Iterator[str]:
        yield f"to {self._device.name}, {'closed' if self._closed else 'open'}"
        yield f"batches: {len(self._in_flight)} in flight, {len(self._in_use)} in use"
        if self._inner is not None:
            yield f"of {short(self._inner)}"

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        self._retire()
        self._fill()
        if not self._in_flight:
            self._position.release(self._position.counted)
            self._end()
            raise StopIteration
        try:
            batch = self._hand_over(self._in_flight[0])
        except Exception:
            self._position.release(self._in_flight[0].count, self._in_flight.popleft)
            raise
        # Only now: a Ctrl-C has lost no batch.
        self._position.release(self._in_flight[0].count, self._in_flight.popleft)
        return batch

    def _retire(self) -> None:
        """Mark the end of the last batch's use in the consumer's stream; release batches whose marks are reached.

        Waits if the device is more than `prefetch` batches behind: this bounds the device's memory.
        """
        if self._yielded is not None:
            ready, source = self._yielded
            self._in_use.append(((self._device.mark(), ready), source))
            self._yielded = None
        while self._in_use and (len(self._in_use) > self._prefetch or all(mark.done() for mark in self._in_use[0][0])):
            if not all(self._stream.wait(mark, self._timeout) for mark in self._in_use[0][0]):
                raise RuntimeError(
                    f"DeviceLoader timed out after {self._timeout:g} seconds: {self._device.name} has not finished its "
                    f"work with the last {len(self._in_use)} batches: a kernel or a copy hangs, or takes longer than "
                    f"the timeout ({more('device')})"
                )
            self._in_use.popleft()

    def _fill(self) -> None:
        """Take batches from the loader and enqueue their copies, up to the prefetch limit or an error.

        An interrupt (Ctrl-C) loses no batch that is in flight.
        """
        while not (self._exhausted or len(self._in_flight) >= self._prefetch or self._failing()):
            try:
                if not self._taken:
                    self._taken.extend(islice(self._inner, 1))  # type: ignore[arg-type]  # given and stored at once
            except Exception as error:
                self._in_flight.append(_FailedBatch(error, self._position.counted))
            else:
                self._exhausted = not self._taken
                flights = map(self._enqueue, tuple(self._taken))
                at_once(partial(self._in_flight.extend, flights), self._taken.clear)

    def _failing(self) -> bool:
        return bool(self._in_flight) and isinstance(self._in_flight[-1], _FailedBatch)

    def _enqueue(self, batch: Any) -> _Flight | _FailedBatch:
        """Enqueue the copies, the transform and a mark on the side stream."""
        try:
            copied = self._stream.copy(batch)
            if self._transform is not None:
                copied = self._stream.transform(self._transform, copied)
            self._latest = self._stream.mark()
            return _Flight(copied, self._latest, batch, self._position.counted)
        except BaseException as error:
            self._keep(batch)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            return _FailedBatch(error, self._position.counted)

    def _keep(self, batch: Any) -> None:
        """Keep a batch that has failed: some of its copies may be under way."""
        with contextlib.suppress(RuntimeError):  # a device that has failed reads nothing
            self._latest = self._stream.mark()
            self._in_use.append(((self._latest,), batch))

    def _hand_over(self, flight: _Flight | _FailedBatch) -> Any:
        if isinstance(flight, _FailedBatch):
            try:
                raise flight.error
            finally:
                del flight  # the error's traceback has this frame: a cycle would keep the batch
        batch = self._stream.hand_over(flight.copied, flight.ready)
        self._yielded = flight.ready, flight.source
        return batch

    def _end(self) -> None:
        """End the stream's work. Copies that are running are awaited, with a timeout: they still read host memory.

        A device that has failed reads nothing any more; its error comes with its next use. What one that hangs may
        still read is kept until the next use of a DeviceLoader. If the wait is interrupted, it begins again, once.
        """
        self._closed = True
        self._inner = None
        try:
            self._await_copies()
        except BaseException:
            self._await_copies()
            raise
        finally:
            self._in_flight.clear()
            self._taken.clear()
            self._stream.close()
            self._in_use.clear()
            self._yielded = None
            _let_go()

    def _await_copies(self) -> None:
        if self._latest is not None:
            sources = [flight.source for flight in self._in_flight if isinstance(flight, _Flight)]
            _unread[self._latest] = [*sources, *self._in_use, self._yielded]
            with contextlib.suppress(RuntimeError):
                is_reached(self._latest, MP_STATUS_CHECK_INTERVAL)

    def close(self) -> None:
        """Drop what is in flight, and close the loader's iterator if it can be. Calling next() raises StopIteration."""
        if self._closed or self._pid != os.getpid():
            return
        inner = self._inner
        try:
            self._end()
        finally:
            try:
                _let_go()  # again: an exception may have come before it
            finally:
                _close(inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The loader's iterator is released, not closed: a persistent one serves the next iteration.
        if sys is None or sys.is_finalizing() or getattr(self, "_closed", True) or not hasattr(self, "_stream"):
            return
        if self._pid == os.getpid():
            self._end()

    def __getstate__(self) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled: pickle its DeviceLoader's loader instead")


def _iterator(loader: Iterable[Any], device: AcceleratorDevice) -> Iterator[Any]:
    """An iterator; of a minidl loader, one that may page-lock the memory of its batches for the device."""
    return loader.iterate_for(device) if isinstance(loader, LoaderWithoutState) and device.locks else iter(loader)


def _close(what: Any) -> None:
    close = getattr(what, "close", None)
    if callable(close):
        close()
