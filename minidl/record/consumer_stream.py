"""A device's stream in which the user's code runs: `mark_consumer` places a timed mark there, which becomes an event.

Rule of use: it raises nothing: an error of the user's code must not be replaced by one of tracing.
"""

from __future__ import annotations

import functools

import torch

from minidl.device.loader import open_device
from minidl.device.streams import AcceleratorDevice
from minidl.record.device_clock import clock_of
from minidl.record.harmless import harmless


@harmless(None)
def mark_consumer(
    device: str | int | torch.device, code: int, loader: int, task: int, text: int, behind: bool = False
) -> None:
    """Mark a device's current stream with an event that has a text's number.

    behind: the event also says how long after this call the device is there. Nothing happens without a trace, without
    such a device or its clock, and while the stream is captured into a graph.
    """
    port = _port(device)
    if port is None or port.captures or (clock := clock_of(port, loader)) is None:
        return
    clock.keep_time()
    track = clock.consumer()
    values = (text, 0, int(port.simulated)) if behind else (text, int(port.simulated))
    track.note(port.mark(True), code, loader, task, -1, *values, behind=behind)
    track.poll()


@functools.cache
def _port(device: str | int | torch.device) -> AcceleratorDevice | None:
    """Return the device, None if there is none: tracing must not break the program."""
    try:
        return open_device(device)
    except (RuntimeError, ValueError):
        return None
