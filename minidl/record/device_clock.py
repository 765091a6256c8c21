"""Times of a device's work on the host's clock.

Interface: `clock_of(device)` is the `DeviceClock` of a device in the trace that this process records, None without one;
`DeviceClock.track` gives a `StreamTrack`, which takes timed marks in a stream's order and emits an event for each when
the stream has reached it; `flush` emits the remaining ones at a trace's end.

A device's events give only the time between two marks. So `calibrate` places a mark in an idle stream and reads the
host's clock before and after it: the mark lay between, and half of the shortest such interval is the error that the
trace states. Calibration is repeated, because the clocks drift, and the drift so far is corrected. Each event is
stamped with the moment of its mark; its `seq` says when it was emitted.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from minidl.device.streams import AcceleratorDevice, AcceleratorMark
from minidl.record.bracketing import bracketed
from minidl.record.harmless import is_of_a_handler
from minidl.record.recorder import active
from minidl.tracefile import events as ev

LOOKS: Final = 8
"""Marks of one calibration; the quickest counts."""

RESOLUTION: Final = 500
"""ns to which an accelerator's events are exact."""

SOONEST, LATEST = 10_000_000, 1_000_000_000
"""Limits of the ns between two calibrations; within them, as long as the time since the first one."""

FLUSH: Final = 5.0
"""Seconds to wait for a device that may hang: for the marks left at a trace's end, and for one in an idle stream."""

CONSUMER: Final = "compute"
"""Name of the track of a stream in which the user's code runs."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A mark at `reference` +- `error` ns on the host's clock. rate: host ns in a device's ns."""

    mark: AcceleratorMark
    reference: int
    error: int
    rate: float = 1.0

    def host_time(self, mark: AcceleratorMark) -> int:
        """Return the time at which a later mark was reached, CLOCK_MONOTONIC ns."""
        return self.reference + round(mark.since(self.mark) * self.rate)


class DeviceClock:
    """A device's clock, in one trace."""

    def __init__(
        self, device: AcceleratorDevice, recorder: Any, loader: int = 0, now: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.device = device
        self.recorder = recorder
        self.pid = os.getpid()
        self.loader = loader  # whose iteration has last looked at it
        self.now = now
        self._tids = itertools.count()
        self._tracks: dict[object, StreamTrack] = {}
        self._first: Calibration | None = None
        self._failed = False
        self.calibration: Calibration
        self.calibrate()
        self.calibration.mark.since(self.calibration.mark)  # raises now if the device's events give no times

    def calibrate(self) -> None:
        """Compare the clocks now."""
        mark, ours = bracketed(self._reached, LOOKS, self.now)
        self._keep(mark, ours.middle, ours.error + RESOLUTION)

    def _reached(self) -> AcceleratorMark:
        """A mark that an idle stream has reached. TimeoutError if the device hangs: the run must not wait for that."""
        since, mark = self.now(), self.device.idle_mark()
        while not mark.done():
            if self.now() - since > FLUSH * 1e9:
                raise TimeoutError(f"it has done nothing for {FLUSH:g} s")
            time.sleep(0)  # lets the device's driver run
        return mark

    def _keep(self, mark: AcceleratorMark, reference: int, error: int) -> None:
        """Emit a calibration and its drift since the last one; keep it, with the rate since the first one."""
        drift, rate, first = 0, 1.0, self._first
        if first is not None:
            drift = mark.since(self.calibration.mark) - (reference - self.calibration.reference)
            took = mark.since(first.mark)
            rate = (reference - first.reference) / took if took > 0 else 1.0
        self.calibration = Calibration(mark, reference, error, rate)
        self._first = first or self.calibration
        self.recorder.emit(ev.CLOCK_CALIBRATION, self.loader, -1, -1, reference, error, drift)

    def keep_time(self) -> None:
        """Calibrate if it is due; a device that has failed keeps its last calibration."""
        assert self._first is not None
        if self._failed:
            return
        now, first = self.now(), self._first.reference
        if now - self.calibration.reference > min(LATEST, max(SOONEST, self.calibration.reference - first)):
            try:
                self.calibrate()
            except Exception as error:  # the run itself meets it
                self.failed(str(error))

    def track(self, key: object, what: str) -> StreamTrack:
        """Return the track of the stream with this key; `what` names a new one."""
        if key not in self._tracks:
            tid = ev.DEVICE_TID + next(_tids)
            again = sum(track.what == what for track in self._tracks.values())
            name = f"{self.device.name} {what}" + (f" {again + 1}" if again else "")
            self.recorder.describe("thread", tid=tid, name=name)
            self._tracks[key] = StreamTrack(self, tid, what)
        return self._tracks[key]

    def consumer(self) -> StreamTrack:
        """Return the track of the consumer's current stream: work on another one is no part of its time."""
        return self.track((CONSUMER, self.device.current()), CONSUMER)

    def poll(self, seconds: float = 0.0) -> bool:
        """Emit the marks that are reached; wait up to `seconds` for the rest; return whether none is left."""
        deadline = time.monotonic() + seconds
        none_left = True
        for track in tuple(self._tracks.values()):
            while not (done := track.poll()) and time.monotonic() < deadline:
                time.sleep(0.001)
            none_left &= done
        return none_left

    def failed(self, why: str) -> None:
        """Note, once, that the device does no more: what it was to do has no end in the trace."""
        if not self._failed:
            self._failed = True
            self.recorder.describe("device_failed", device=self.device.name, why=why)


class StreamTrack:
    """Marks of one stream that are not events yet."""

    def __init__(self, clock: DeviceClock, tid: int, what: str) -> None:
        self.clock = clock
        self.tid = tid
        self.what = what
        self._waiting: deque[tuple[AcceleratorMark, Calibration, int, tuple[int, ...]]] = deque()
        self._last = 0
        self._polling = threading.Lock()

    def note(
        self, mark: AcceleratorMark, code: int, loader: int, task: int = -1, worker: int = -1,
        x: int = 0, y: int = 0, z: int = 0, *, behind: bool = False,
    ) -> None:  # fmt: skip
        """Keep a mark that was just placed, with its event; behind: its y becomes the ns until the mark is reached."""
        placed = self.clock.now() if behind else 0
        self._waiting.append((mark, self.clock.calibration, placed, (code, loader, task, worker, x, y, z)))

    def poll(self) -> bool:
        """Emit the events of the marks that are reached; return whether none is left.

        It raises no error of the device: if the device has failed, that is noted, and the run itself fails.
        """
        if not self._polling.acquire(blocking=False):  # another thread polls, or this one, interrupted by a signal
            return True
        try:
            while self._waiting and self._waiting[0][0].done():
                mark, calibration, placed, (code, loader, task, worker, x, y, z) = self._waiting[0]
                self._last = max(self._last, calibration.host_time(mark))
                y = max(0, self._last - placed) if placed else y
                event = self._last, code, loader, self.tid, task, worker, x, y, z
                self.clock.recorder.emit_at_once(event, also=[self._waiting.popleft])
        except Exception as error:
            if is_of_a_handler(error):
                raise
            self._waiting.clear()
            self.clock.failed(str(error))
        finally:
            self._polling.release()
        return not self._waiting


_tids = itertools.count()
_clocks: dict[str, DeviceClock] = {}
_without_times: set[str] = set()


def clock_of(device: AcceleratorDevice, loader: int) -> DeviceClock | None:
    """Return the clock of `device` in this process's trace; None without a trace, or if the device gives no times.

    Its next calibrations are emitted as events of `loader`. Why there is no clock is said on stderr: tracing must not
    break the program.
    """
    recorder = active()
    if recorder is None or device.name in _without_times:
        return None
    clock = _clocks.get(device.name)
    if clock is None or clock.recorder is not recorder or clock.pid != os.getpid():
        try:
            clock = _clocks[device.name] = DeviceClock(device, recorder, loader)
        except Exception as error:
            _without_times.add(device.name)
            print(
                f"minidl: device {device.name}: it gives no times, so its work is not traced: {error}", file=sys.stderr
            )
            return None
    clock.loader = loader
    return clock


def flush() -> None:
    """Emit the marks that the devices have reached, wait briefly for the rest, forget the clocks.

    It raises no error of a device: one that has failed must not keep the trace from its end.
    """
    _without_times.clear()
    while _clocks:
        _, clock = _clocks.popitem()
        if clock.pid == os.getpid():
            try:
                if clock.poll(FLUSH):
                    clock.calibrate()
                else:
                    clock.failed(f"it had not done its work {FLUSH:g} s after the trace's end")
            except Exception as error:
                clock.failed(str(error))


atexit.register(flush)
