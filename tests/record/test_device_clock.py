"""The device's clock: calibration and drift, marks that become events, and a device that fails or gives no times.

The host's clock and the device's are simulated numbers; no accelerator is needed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minidl
from minidl.record import consumer_stream, device_clock
from minidl.record.device_clock import DeviceClock
from minidl.record.recorder import active
from minidl.tracefile import events as ev


def of(trace: minidl.Trace, name: str) -> np.ndarray:
    spans = trace.spans()
    return spans[np.isin(spans["code"], [code for code, event in ev.EVENTS.items() if event.name == name])]


class Ticks:
    """A host's clock that a test moves, and a device whose clock runs at `rate` of it."""

    def __init__(self, rate: float = 1.0, round_trips: tuple[int, ...] = (2_000,)) -> None:
        self.now = 1_000_000
        self.rate = rate
        self.round_trips = round_trips
        self.looks = 0

    name, simulated, captures, device = "fake:0", False, False, torch.device("cpu")

    def read(self) -> int:
        return self.now

    def at(self) -> int:
        """What the device's clock shows now."""
        return round(777 + self.now * self.rate)

    def idle_mark(self) -> TickMark:
        self.looks += 1
        half = self.round_trips[self.looks % len(self.round_trips)] // 2
        self.now += half
        mark = TickMark(self.at())
        self.now += half
        return mark

    def stream(self) -> Any:
        raise NotImplementedError

    def mark(self, timed: bool = False) -> TickMark:
        return TickMark(self.at())

    def current(self) -> int:
        return 0


class TickMark:
    def __init__(self, at: int, done: bool = True) -> None:
        self.at, self.is_done = at, done

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        pass

    def since(self, earlier: TickMark) -> int:
        return self.at - earlier.at


class Pen:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, ...]] = []
        self.at: list[tuple[int, ...]] = []
        self.failures: list[str] = []

    def emit(self, *values: int) -> None:
        self.told.append(values)

    def emit_at_once(self, event: tuple[int, ...], also: list[Callable[[], Any]]) -> None:
        stamp, code, _, tid, *_ = event
        self.at.append((stamp, tid, code))
        for step in also:
            step()

    def describe(self, kind: str, **facts: Any) -> None:
        if kind == "device_failed":
            self.failures.append(facts["why"])


def test_the_quickest_look_calibrates_and_half_of_it_is_the_error() -> None:
    ticks, pen = Ticks(round_trips=(9_000, 2_000, 5_000)), Pen()
    clock = DeviceClock(ticks, pen, 3, ticks.read)
    assert ticks.looks == device_clock.LOOKS
    assert clock.calibration.error == 1_000 + device_clock.RESOLUTION
    assert abs(clock.calibration.reference - (clock.calibration.mark.at - 777)) <= 1  # type: ignore[attr-defined]
    assert pen.told == [(ev.CLOCK_CALIBRATION, 3, -1, -1, clock.calibration.reference, 1_500, 0)]


def test_a_drifting_clock_is_corrected_for_and_its_drift_told() -> None:
    ticks, pen = Ticks(rate=1 + 40e-6), Pen()
    clock = DeviceClock(ticks, pen, now=ticks.read)
    for _ in range(30):
        ticks.now += 1_000_000_000
        clock.keep_time()
    ticks.now += 900_000_000
    assert abs(clock.calibration.host_time(ticks.mark()) - ticks.now) < 100, "uncorrected, it would be 36,000"
    drifts = [values[6] for values in pen.told[1:]]
    assert drifts == pytest.approx([40_000] * 30, abs=2)


def test_calibrations_are_frequent_at_first_and_then_rare() -> None:
    ticks, pen = Ticks(), Pen()
    clock = DeviceClock(ticks, pen, now=ticks.read)
    for _ in range(3000):
        ticks.now += 1_000_000
        clock.keep_time()
    assert 7 <= len(pen.told) <= 12, "after 10, 20, 40, ... ms, and then each second"


def test_marks_become_events_in_their_order_and_never_backwards() -> None:
    ticks, pen = Ticks(), Pen()
    clock = DeviceClock(ticks, pen, now=ticks.read)
    track = clock.track("a", "copies")
    assert clock.track("a", "copies") is track
    first, second = TickMark(ticks.at(), done=False), TickMark(ticks.at() - 5_000)
    track.note(first, ev.COPY[0], 1)
    track.note(second, ev.COPY[1], 1)
    assert not track.poll()
    assert pen.at == [], "the second waits for the first"
    first.is_done = True
    assert track.poll()
    assert [row[2] for row in pen.at] == [ev.COPY[0], ev.COPY[1]]
    assert pen.at[0][0] == pen.at[1][0], "one stream's time does not run backwards"
    assert pen.at[0][1] >= ev.DEVICE_TID


def test_a_failed_device_does_not_break_the_tracer() -> None:
    class Broken(TickMark):
        def done(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ticks, pen = Ticks(), Pen()
    track = DeviceClock(ticks, pen, now=ticks.read).track("a", "copies")
    for _ in range(2):
        track.note(Broken(0), ev.COPY[0], 1)
        assert track.poll()
    assert pen.failures == ["CUDA error: an illegal memory access was encountered"]


def test_an_exception_of_a_signals_handler_is_no_failure_of_the_device_and_loses_no_event() -> None:
    """As that of SIGCHLD's, which tells that a worker was killed."""

    def handler(signum: int, frame: Any) -> None:
        raise RuntimeError("a worker has died")

    class Interrupted(TickMark):
        def done(self) -> bool:
            self.looks = getattr(self, "looks", 0) + 1
            if self.looks == 1:
                signal.raise_signal(signal.SIGUSR1)
            return True

    ticks, pen = Ticks(), Pen()
    track = DeviceClock(ticks, pen, now=ticks.read).track("a", "copies")
    track.note(Interrupted(ticks.at()), ev.COPY[0], 1)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="a worker has died"):
            track.poll()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert track.poll()
    assert (pen.failures, [row[2] for row in pen.at]) == ([], [ev.COPY[0]])


def test_an_event_that_could_not_be_written_yet_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come between any two steps: taking the event and writing it are one."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    ticks, pen = Ticks(), Pen()
    track = DeviceClock(ticks, pen, now=ticks.read).track("a", "copies")
    track.note(TickMark(ticks.at()), ev.COPY[0], 1)
    with monkeypatch.context() as patch:
        patch.setattr(pen, "emit_at_once", interrupt)
        with pytest.raises(KeyboardInterrupt):
            track.poll()
    assert track.poll()
    assert [row[2] for row in pen.at] == [ev.COPY[0]]


def test_a_device_that_hangs_is_waited_for_once_and_not_for_ever() -> None:
    class Hanging(Ticks):
        hangs = False

        def idle_mark(self) -> TickMark:
            mark = super().idle_mark()
            mark.is_done = not self.hangs
            return mark

        def read(self) -> int:
            self.now += 1_000_000_000
            return self.now

    ticks, pen = Hanging(), Pen()
    clock = DeviceClock(ticks, pen, now=ticks.read)
    kept, looks, ticks.hangs = clock.calibration, ticks.looks, True
    for _ in range(3):
        clock.keep_time()
    assert clock.calibration is kept
    assert pen.failures == ["it has done nothing for 5 s"]
    assert ticks.looks == looks + 1


def test_each_stream_of_the_consumer_has_a_track_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans on two streams lie beside each other, each as long as it took."""
    ticks, pen = Ticks(), Pen()
    clock = DeviceClock(ticks, pen, now=ticks.read)
    first = clock.consumer()
    monkeypatch.setattr(ticks, "current", lambda: 5)
    second = clock.consumer()
    assert first is not second
    assert clock.consumer() is second
    long, short = (
        (TickMark(ticks.at()), TickMark(ticks.at() + 40_000)),
        (TickMark(ticks.at()), TickMark(ticks.at() + 9_000)),
    )
    for track, (begin, end) in ((first, long), (second, short)):
        track.note(begin, ev.DEVICE_COMPUTE[0], 0)
        track.note(end, ev.DEVICE_COMPUTE[1], 0)
        assert track.poll()
    assert [pen.at[1][0] - pen.at[0][0], pen.at[3][0] - pen.at[2][0]] == [40_000, 9_000]
    assert pen.at[0][1] != pen.at[2][1]


class Dying(Ticks):
    """A device that fails at its next call, if told so."""

    dead = False

    def idle_mark(self) -> TickMark:
        if self.dead:
            raise RuntimeError("device error: unspecified launch failure")
        return super().idle_mark()

    mark = lambda self, timed=False: self.idle_mark()  # noqa: E731


def test_a_device_that_fails_keeps_neither_the_users_error_nor_the_next_trace_from_coming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Dying()
    monkeypatch.setattr(consumer_stream, "_port", lambda name: device)

    def train() -> None:
        with minidl.span("step", device="any"):
            pass
        with minidl.span("step", device="any"):
            device.dead = True
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"), minidl.trace(tmp_path / "one"):
        train()
    assert active() is None
    trace = minidl.read_trace(tmp_path / "one")
    assert len(of(trace, "compute")) == 2
    with minidl.trace(tmp_path / "two"):
        pass


def test_a_device_without_times_is_named_and_not_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def since(mark: TickMark, earlier: Any) -> int:
        raise AttributeError("'Event' object has no attribute 'elapsed_time'")

    monkeypatch.setattr(TickMark, "since", since)
    monkeypatch.setattr(consumer_stream, "_port", lambda name: Ticks())
    with minidl.trace(tmp_path / "t"):
        for _ in range(2):
            with minidl.span("step", device="any"):
                pass
    assert capsys.readouterr().err.count("device fake:0: it gives no times, so its work is not traced: 'Event'") == 1
    trace = minidl.read_trace(tmp_path / "t")
    assert len(of(trace, "compute")) == 2
    assert not len(of(trace, "device_compute"))


def test_a_trace_ends_whatever_fails_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"), minidl.trace(tmp_path / "one"):
        patch.setattr(device_clock, "flush", fails)
    assert active() is None
    with minidl.trace(tmp_path / "two"):
        pass
