"""`span`: parts of the user's own code, recorded with the batch that it works on.

    for batch in loader:
        with minidl.span("forward", device="cuda"):
            loss = model(batch)

Rules of use: spans may lie in each other. Each belongs to the batch that was handed out last. If no trace is
recorded when `span` is called, it costs three calls of functions that do nothing.
"""

from __future__ import annotations

import torch
from typing_extensions import Self

from minidl.record.consumer_stream import mark_consumer
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

    __slots__ = ("_about", "_device", "_name", "_recorder")

    def __init__(self, recorder: Recorder, name: str, device: str | int | torch.device | None) -> None:
        self._recorder = recorder
        self._name = name
        self._device = device

    def __enter__(self) -> Self:
        self._about = batch_in_use.loader, batch_in_use.task, self._recorder.string(self._name)
        self._emit(ev.COMPUTE[0])
        self._mark(ev.DEVICE_COMPUTE[0])
        return self

    def __exit__(self, *error: object) -> None:
        self._mark(ev.DEVICE_COMPUTE[1])
        self._emit(ev.COMPUTE[1])

    def _emit(self, code: int) -> None:
        loader, task, text = self._about
        self._recorder.emit(code, loader, task, -1, text)

    def _mark(self, code: int) -> None:
        if self._device is not None:
            mark_consumer(self._device, code, *self._about)


def span(name: str, device: str | int | torch.device | None = None) -> Unrecorded:
    """Mark a part of the training step: `with span("forward"):`, in the consumer's thread.

    device: also mark it in that device's current stream, so that the trace shows when the device did it. If no
    trace is recorded, nothing happens. Article 2 §1.2.
    """
    recorder = active()
    return _UNRECORDED if recorder is None else Span(recorder, name, device)
