"""When a device did something, on the host's clock.

Interface: `clock_of(device)` is the `DeviceClock` of a device in the trace that this process records, None without one;
`DeviceClock.track` gives a `StreamTrack`, which takes timed marks in a stream's order and emits an event for each as
soon as the stream has come to it; `flush` emits what is left, at a trace's end.

Rules of use: a device's events tell only how far apart two marks are. So a mark is placed in a stream that nothing else
is in, and the host looks at its clock before and after it (`calibrate`): the mark lay between, and half of the shortest
such look is the error that the trace states. That is done again and again, since the clocks drift, and what the drift
has been so far is corrected for. Each event is stamped with the moment of its mark; its `seq` says when it was learned.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from minidl.streams import Device, Mark
from minidl.tracing import events as ev
from minidl.tracing import recorder

LOOKS: Final = 8
"""Marks of one calibration, of which the quickest counts."""

RESOLUTION: Final = 500
"""ns to which an accelerator's events are exact."""

SOONEST, LATEST = 10_000_000, 1_000_000_000
"""ns between two calibrations: as long as all of them have taken so far, within these."""

FLUSH: Final = 5.0
"""Seconds that marks which a stream has not come to are waited for at a trace's end."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A mark that lay at `reference` on the host's clock, give or take `error`; ns. rate: host ns in a device's ns."""

    mark: Mark
    reference: int
    error: int
    rate: float = 1.0

    def host_time(self, mark: Mark) -> int:
        """When a later mark was reached, CLOCK_MONOTONIC ns."""
        return self.reference + round(mark.since(self.mark) * self.rate)


class DeviceClock:
    """A device's clock, in one trace."""

    def __init__(self, device: Device, pen: Any, loader: int = 0, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.device = device
        self.pen = pen
        self.pid = os.getpid()
        self.loader = loader  # whose iteration has last looked at it
        self._now = now
        self._tids = itertools.count()
        self._tracks: dict[object, StreamTrack] = {}
        self._first: Calibration | None = None
        self._calibration: Calibration | None = None
        self.calibration = self.calibrate()

    def calibrate(self) -> Calibration:
        """Compare the clocks, now."""
        quickest, best = 0, None
        for _ in range(LOOKS):
            before = self._now()
            mark = self.device.idle_mark()
            mark.wait()
            took = self._now() - before
            if best is None or took < quickest:
                quickest, best = took, (mark, before + took // 2)
        assert best is not None
        error = -(-quickest // 2) + (0 if self.device.simulated else RESOLUTION)
        self.calibration = self._since_the_last(Calibration(*best, error))
        return self.calibration

    def _since_the_last(self, found: Calibration) -> Calibration:
        """Emit it, with the drift since the last one; with the rate that is known by now."""
        drift, last, first = 0, self._calibration, self._first
        if last is not None and first is not None:
            drift = found.mark.since(last.mark) - (found.reference - last.reference)
            took = found.mark.since(first.mark)
            rate = (found.reference - first.reference) / took if took > 0 else 1.0
            found = Calibration(found.mark, found.reference, found.error, rate)
        self._first, self._calibration = first or found, found
        self.pen.emit(ev.CLOCK_CALIBRATION, self.loader, -1, -1, found.reference, found.error, drift)
        return found

    def keep_time(self) -> None:
        """Calibrate where it is due."""
        assert self._first is not None
        now, first = self._now(), self._first.reference
        if now - self.calibration.reference > min(LATEST, max(SOONEST, self.calibration.reference - first)):
            self.calibrate()

    def track(self, key: object, what: str) -> StreamTrack:
        """The track of the stream that is known by `key`; `what` names it."""
        if key not in self._tracks:
            tid = ev.DEVICE_TID + next(_tids)
            again = sum(track.what == what for track in self._tracks.values())
            name = f"{self.device.name} {what}" + (f" {again + 1}" if again else "")
            self.pen.describe("thread", tid=tid, name=name)
            self._tracks[key] = StreamTrack(self, tid, what)
        return self._tracks[key]

    def poll(self, seconds: float = 0.0) -> None:
        """Emit what the device has come to; wait so long for the rest."""
        deadline = time.monotonic() + seconds
        for track in tuple(self._tracks.values()):
            while not track.poll() and time.monotonic() < deadline:
                time.sleep(0.001)


class StreamTrack:
    """The marks of one stream that are not events yet."""

    def __init__(self, clock: DeviceClock, tid: int, what: str) -> None:
        self.clock = clock
        self.tid = tid
        self.what = what
        self._waiting: deque[tuple[Mark, Calibration, tuple[int, ...]]] = deque()
        self._last = 0
        self._polling = threading.Lock()

    def note(self, mark: Mark, *event: int) -> None:
        """`mark`, which has just been placed in the stream, is to become this event: code, loader, task, ..."""
        self._waiting.append((mark, self.clock.calibration, event))

    def poll(self) -> bool:
        """Emit the events of the marks that are reached; whether none is left. Never raises an error of the device's.

        A device that has failed answers no more: what it owes is dropped, and the run meets the failure itself.
        """
        if not self._polling.acquire(blocking=False):  # another thread does it, or one that a signal interrupted
            return True
        try:
            while self._waiting and self._waiting[0][0].done():
                mark, calibration, event = self._waiting.popleft()
                self._last = max(self._last, calibration.host_time(mark))
                self.clock.pen.emit_at(self._last, self.tid, *event)
        except RuntimeError:
            self._waiting.clear()
        finally:
            self._polling.release()
        return not self._waiting


_tids = itertools.count()
_clocks: dict[str, DeviceClock] = {}


def clock_of(device: Device, loader: int) -> DeviceClock | None:
    """The clock of `device` in the trace that is recorded now; its next calibrations are for `loader`'s sake."""
    pen = recorder.active()
    if pen is None:
        return None
    clock = _clocks.get(device.name)
    if clock is None or clock.pen is not pen or clock.pid != os.getpid():
        clock = _clocks[device.name] = DeviceClock(device, pen, loader)
    clock.loader = loader
    return clock


def flush() -> None:
    """Emit what the devices have come to, waiting for the rest, not long; forget the clocks."""
    while _clocks:
        _, clock = _clocks.popitem()
        if clock.pid == os.getpid():
            clock.calibrate()
            clock.poll(FLUSH)


atexit.register(flush)
