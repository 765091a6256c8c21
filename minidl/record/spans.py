"""`span`: parts of the user's own code, recorded with the batch that it works on.

    for batch in loader:
        with minidl.span("forward", device="cuda"):
            loss = model(batch)

Rules of use: spans may lie in each other. Each belongs to the batch that was handed out last. If no trace is
recorded when `span` is called, it costs three calls of functions that do nothing.
"""

from __future__ import annotations

import functools

import torch
from typing_extensions import Self

from minidl.device.loader import open_device
from minidl.device.streams import AcceleratorDevice
from minidl.record.device_clock import DeviceClock, StreamTrack, clock_of
from minidl.record.recorder import Recorder, active
from minidl.record.step_parts import batch_in_use
from minidl.tracefile import events as ev


class Unrecorded:
    """A part of the user's code that is not recorded."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


_UNRECORDED = Unrecorded()


class Span(Unrecorded):
    """A part of the user's code, from `with` on to its end."""

    __slots__ = ("_about", "_device", "_name", "_recorder", "_track")

    def __init__(self, recorder: Recorder, name: str, device: str | int | torch.device | None) -> None:
        self._recorder = recorder
        self._name = name
        self._device = device

    def __enter__(self) -> Self:
        self._about = batch_in_use.loader, batch_in_use.task, -1, self._recorder.string(self._name)
        self._recorder.emit(ev.COMPUTE[0], *self._about)
        self._track = None if self._device is None else _consumer_track(self._device)
        self._mark(ev.DEVICE_COMPUTE[0])
        return self

    def __exit__(self, *error: object) -> None:
        self._mark(ev.DEVICE_COMPUTE[1])
        self._recorder.emit(ev.COMPUTE[1], *self._about)

    def _mark(self, code: int) -> None:
        if self._track is None:
            return
        clock, track = self._track
        try:
            track.note(clock.device.mark(True), code, *self._about, int(clock.device.simulated))
        except Exception:  # the device has failed; an error of the user's code must not be replaced by that
            self._track = None
        track.poll()


def span(name: str, device: str | int | torch.device | None = None) -> Unrecorded:
    """Mark a part of the training step: `with span("forward"):`, in the consumer's thread.

    device: also mark it in that device's current stream, so that the trace shows when the device did it. If no
    trace is recorded, nothing happens. Article 2 §1.2.
    """
    recorder = active()
    return _UNRECORDED if recorder is None else Span(recorder, name, device)


def _consumer_track(device: str | int | torch.device) -> tuple[DeviceClock, StreamTrack] | None:
    port = _port(device)
    clock = None if port is None else clock_of(port, batch_in_use.loader)
    return None if clock is None else (clock, clock.consumer())


@functools.cache
def _port(device: str | int | torch.device) -> AcceleratorDevice | None:
    """Return the device, None if there is none: tracing must not break the program."""
    try:
        return open_device(device)
    except (RuntimeError, ValueError):
        return None
