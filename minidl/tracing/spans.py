"""`span`: what the user's own code does with a batch, marked in the trace.

    for batch in loader:
        with minidl.span("forward", device="cuda"):
            loss = model(batch)

Rules of use: spans may lie in each other. Each belongs to the batch that was handed out last. Where no trace is being
recorded when `span` is called, it costs three calls of functions that do nothing.
"""

from __future__ import annotations

import functools
from types import TracebackType

import torch
from typing_extensions import Self

from minidl.device import open_device
from minidl.streams import Device
from minidl.tracing import events as ev
from minidl.tracing import recorder
from minidl.tracing.device_clock import DeviceClock, StreamTrack, clock_of


class BatchInUse:
    """Which batch the consumer has: its loader's number in the trace, and its task."""

    loader = 0
    task = -1

    def set(self, loader: int, task: int) -> None:
        """It is this one from now on."""
        self.loader, self.task = loader, task


batch_in_use = BatchInUse()
"""That of this process; set by whoever hands a batch out."""


class Unrecorded:
    """A part of the user's code that no trace has."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


_UNRECORDED = Unrecorded()


class Span(Unrecorded):
    """A part of the user's code, from `with` on to its end."""

    __slots__ = ("_about", "_device", "_name", "_pen", "_track")

    def __init__(self, pen: recorder.Recorder, name: str, device: str | int | torch.device | None) -> None:
        self._pen = pen
        self._name = name
        self._device = device

    def __enter__(self) -> Self:
        self._about = batch_in_use.loader, batch_in_use.task, -1, self._pen.string(self._name)
        self._pen.emit(ev.COMPUTE[0], *self._about)
        self._track = None if self._device is None else _consumer_track(self._device)
        self._mark(ev.DEVICE_COMPUTE[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mark(ev.DEVICE_COMPUTE[1])
        self._pen.emit(ev.COMPUTE[1], *self._about)

    def _mark(self, code: int) -> None:
        if self._track is not None:
            clock, track = self._track
            track.note(clock.device.mark(True), code, *self._about, int(clock.device.simulated))
            track.poll()


def span(name: str, device: str | int | torch.device | None = None) -> Unrecorded:
    """Mark a part of the training step: `with span("forward"):`, in the consumer's thread.

    device: also mark it in that device's current stream, so that the trace shows when the device did it. Where no
    trace is recorded, nothing happens. Article 1 §2.5.
    """
    pen = recorder.active()
    return _UNRECORDED if pen is None else Span(pen, name, device)


CONSUMER = "compute"
"""The track of the stream that the user's code runs in."""


def _consumer_track(device: str | int | torch.device) -> tuple[DeviceClock, StreamTrack] | None:
    port = _port(device)
    clock = None if port is None else clock_of(port, batch_in_use.loader)
    return None if clock is None else (clock, clock.track(CONSUMER, CONSUMER))


@functools.cache
def _port(device: str | int | torch.device) -> Device | None:
    """The device called so, None where there is none: a trace must not break what runs without one."""
    try:
        return open_device(device)
    except (RuntimeError, ValueError):
        return None
