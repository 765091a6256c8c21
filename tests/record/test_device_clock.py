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


class TickMark:
    def __init__(self, at: int, done: Callable[[], bool] = lambda: True) -> None:
        self.at, self.done = at, done

    def wait(self) -> None: ...

    def since(self, earlier: TickMark) -> int:
        return self.at - earlier.at


class Ticks:
    """A host's clock that a test moves, and a device whose clock runs at `rate` of it."""

    name, simulated, captures, device = "fake:0", False, False, torch.device("cpu")

    def __init__(self, rate: float = 1.0, round_trips: tuple[int, ...] = (2_000,)) -> None:
        self.now, self.rate, self.round_trips, self.looks = 1_000_000, rate, round_trips, 0

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

    def mark(self, timed: bool = False) -> TickMark:
        return TickMark(self.at())

    def current(self) -> int:
        return 0


class Pen:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, ...]] = []
        self.stamps: list[int] = []
        self.tids: list[int] = []
        self.codes: list[int] = []
        self.failures: list[str] = []

    def emit(self, *values: int) -> None:
        self.told.append(values)

    def emit_at_once(self, event: tuple[int, ...], also: list[Callable[[], Any]]) -> None:
        self.stamps.append(event[0])
        self.codes.append(event[1])
        self.tids.append(event[3])
        for step in also:
            step()

    def describe(self, kind: str, **facts: Any) -> None:
        if kind == "device_failed":
            self.failures.append(facts["why"])


@pytest.fixture
def pen() -> Pen:
    return Pen()


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture
def clock(ticks: Ticks, pen: Pen) -> DeviceClock:
    return DeviceClock(ticks, pen, now=ticks.read)


def test_the_quickest_look_calibrates_and_half_of_it_is_the_error(pen: Pen) -> None:
    ticks = Ticks(round_trips=(9_000, 2_000, 5_000))
    found = DeviceClock(ticks, pen, 3, ticks.read).calibration
    assert ticks.looks == device_clock.LOOKS
    assert found.error == 1_000 + device_clock.RESOLUTION
    assert abs(found.reference - (found.mark.at - 777)) <= 1  # type: ignore[attr-defined]
    assert pen.told == [(ev.CLOCK_CALIBRATION, 3, -1, -1, found.reference, 1_500, 0)]


def test_a_drifting_clock_is_corrected_for_and_its_drift_told(pen: Pen) -> None:
    ticks = Ticks(rate=1 + 40e-6)
    clock = DeviceClock(ticks, pen, now=ticks.read)
    for _ in range(30):
        ticks.now += 1_000_000_000
        clock.keep_time()
    ticks.now += 900_000_000
    assert abs(clock.calibration.host_time(ticks.mark()) - ticks.now) < 100, "uncorrected, it would be 36,000"
    assert [values[6] for values in pen.told[1:]] == pytest.approx([40_000] * 30, abs=2)


def test_calibrations_are_frequent_at_first_and_then_rare(ticks: Ticks, pen: Pen, clock: DeviceClock) -> None:
    for _ in range(3000):
        ticks.now += 1_000_000
        clock.keep_time()
    assert 7 <= len(pen.told) <= 12, "after 10, 20, 40, ... ms, and then each second"


def test_marks_become_events_in_their_order_and_never_backwards(ticks: Ticks, pen: Pen, clock: DeviceClock) -> None:
    reached = False
    track = clock.track("a", "copies")
    assert clock.track("a", "copies") is track
    track.note(TickMark(ticks.at(), done=lambda: reached), ev.COPY[0], 1)
    track.note(TickMark(ticks.at() - 5_000), ev.COPY[1], 1)
    assert not track.poll()
    assert pen.codes == [], "the second waits for the first"
    reached = True
    assert track.poll()
    assert pen.codes == [*ev.COPY]
    assert pen.stamps[0] == pen.stamps[1], "one stream's time does not run backwards"
    assert pen.tids[0] >= ev.DEVICE_TID


def test_a_failed_device_does_not_break_the_tracer(pen: Pen, clock: DeviceClock) -> None:
    def fails() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    track = clock.track("a", "copies")
    for _ in range(2):
        track.note(TickMark(0, done=fails), ev.COPY[0], 1)
        assert track.poll()
    assert pen.failures == ["CUDA error: an illegal memory access was encountered"]


def test_an_exception_of_a_signals_handler_is_no_failure_of_the_device_and_loses_no_event(
    ticks: Ticks, pen: Pen, clock: DeviceClock
) -> None:
    """As that of SIGCHLD's, which tells that a worker was killed."""

    def handler(signum: int, frame: Any) -> None:
        raise RuntimeError("a worker has died")

    def interrupted() -> bool:
        looks.append(True)
        if len(looks) == 1:
            signal.raise_signal(signal.SIGUSR1)
        return True

    looks: list[bool] = []

    track = clock.track("a", "copies")
    track.note(TickMark(ticks.at(), done=interrupted), ev.COPY[0], 1)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="a worker has died"):
            track.poll()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert track.poll()
    assert (pen.failures, pen.codes) == ([], [ev.COPY[0]])


def test_an_event_that_could_not_be_written_yet_is_not_lost(
    ticks: Ticks, pen: Pen, clock: DeviceClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come between any two steps: taking the event and writing it are one."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    track = clock.track("a", "copies")
    track.note(TickMark(ticks.at()), ev.COPY[0], 1)
    with monkeypatch.context() as patch:
        patch.setattr(pen, "emit_at_once", interrupt)
        with pytest.raises(KeyboardInterrupt):
            track.poll()
    assert track.poll()
    assert pen.codes == [ev.COPY[0]]


def test_a_device_that_hangs_is_waited_for_once_and_not_for_ever(
    ticks: Ticks, pen: Pen, clock: DeviceClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> int:
        ticks.now += 1_000_000_000
        return ticks.now

    kept, looks = clock.calibration, ticks.looks
    monkeypatch.setattr(clock, "now", read)
    monkeypatch.setattr(TickMark, "__init__", lambda self, at: vars(self).update(at=at, done=lambda: False))
    for _ in range(3):
        clock.keep_time()
    assert clock.calibration is kept
    assert pen.failures == ["it has done nothing for 5 s"]
    assert ticks.looks == looks + 1


def test_each_stream_of_the_consumer_has_a_track_of_its_own(
    ticks: Ticks, pen: Pen, clock: DeviceClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans on two streams lie beside each other, each as long as it took."""
    first = clock.consumer()
    monkeypatch.setattr(ticks, "current", lambda: 5)
    second = clock.consumer()
    assert first is not second
    assert clock.consumer() is second
    for track, took in ((first, 40_000), (second, 9_000)):
        track.note(TickMark(ticks.at()), ev.DEVICE_COMPUTE[0], 0)
        track.note(TickMark(ticks.at() + took), ev.DEVICE_COMPUTE[1], 0)
        assert track.poll()
    assert np.diff(pen.stamps)[::2].tolist() == [40_000, 9_000]
    assert pen.tids[0] != pen.tids[2]


def spans_named(trace: minidl.Trace, name: str) -> np.ndarray:
    spans = trace.spans()
    return spans[np.isin(spans["code"], [code for code, event in ev.EVENTS.items() if event.name == name])]


def test_a_device_that_fails_keeps_neither_the_users_error_nor_the_next_trace_from_coming(
    ticks: Ticks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(timed: bool = False) -> TickMark:
        raise RuntimeError("device error: unspecified launch failure")

    monkeypatch.setattr(consumer_stream, "_port", lambda name: ticks)

    def train() -> None:
        with minidl.span("step", device="any"):
            pass
        with minidl.span("step", device="any"):
            monkeypatch.setattr(ticks, "mark", fails)
            monkeypatch.setattr(ticks, "idle_mark", fails)
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"), minidl.trace(tmp_path / "one"):
        train()
    assert active() is None
    assert len(spans_named(minidl.read_trace(tmp_path / "one"), "compute")) == 2
    with minidl.trace(tmp_path / "two"):
        pass


def test_a_device_without_times_is_named_and_not_traced(
    ticks: Ticks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def since(mark: TickMark, earlier: Any) -> int:
        raise AttributeError("'Event' object has no attribute 'elapsed_time'")

    monkeypatch.setattr(TickMark, "since", since)
    monkeypatch.setattr(consumer_stream, "_port", lambda name: ticks)
    with minidl.trace(tmp_path / "t"):
        for _ in range(2):
            with minidl.span("step", device="any"):
                pass
    assert capsys.readouterr().err.count("device fake:0: it gives no times, so its work is not traced: 'Event'") == 1
    trace = minidl.read_trace(tmp_path / "t")
    assert len(spans_named(trace, "compute")) == 2
    assert not len(spans_named(trace, "device_compute"))


def test_a_trace_ends_whatever_fails_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"), minidl.trace(tmp_path / "one"):
        patch.setattr(device_clock, "flush", fails)
    assert active() is None
    with minidl.trace(tmp_path / "two"):
        pass
