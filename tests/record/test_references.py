"""The function that an event names as ours is being executed when the event is emitted.

Real runs, with a hook on every `emit`: in the loader, its workers and feeder threads, the pin thread and the device
stage. What is traced is overridden in `minidl.record` under the same name, and so counts as the function itself.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import recorded
import workloads as wl

import minidl
from minidl.device.loader import DeviceLoader
from minidl.record import recorder
from minidl.record.device_clock import StreamTrack
from minidl.tracefile.events import EVENTS

pytestmark = pytest.mark.live

RUNS = (
    "no workers", "no workers, an error", "persistent", "persistent, left early", "in_order off", "iterable, uneven",
    "pinned, left early", "dataset error", "timeout", "killed worker", "reordered", "skipped tasks", "at once",
    "worker_init error", "unpicklable batch", "resumed", "resumed, no workers", "slabs", "training",
)  # fmt: skip

NOT_ALWAYS = {
    "host_wait": "the simulated device is seldom so far behind that the host waits",
}
"""Event -> why these runs may not emit it."""

RARE = {
    ("join", "loader.liveness:wait_for_a_dying_worker"): "a worker is killed before its batch is rebuilt",
    ("sentinel_get", "loader.pin_memory:_pin_memory_loop"): "the pin thread sees its done event first",
}
"""(Event, function) -> the race that decides whether a run has it."""


def device_stage() -> None:
    os.environ["MINIDL_SIMULATE_DEVICE"] = "1"
    loader = minidl.DataLoader(wl.Tensors(12), 2)
    for _ in DeviceLoader(loader, "sim", 2, transform=lambda batch: batch * 2):
        with minidl.span("forward", device="sim"):
            pass
    recorded.parts_on_a_device()


def locked_slabs() -> None:
    loader = minidl.DataLoader(wl.Tensors(4), 2, num_workers=1, transport="arena", pin_memory=True)
    assert len(list(DeviceLoader(loader, "sim"))) == 2


def shares() -> None:
    dataset = wl.Tensors(8)
    sampler = minidl.DistributedSampler(dataset, 2, 0)
    with minidl.DataLoader(dataset, sampler=sampler, num_workers=1, persistent_workers=True) as loader:
        assert len(list(loader)) == len(list(loader)) == 4


def pauses() -> None:
    """A collection of more than a millisecond."""
    with minidl.DataLoader(wl.Tensors(8)) as loader:
        assert wl.collect() > 0
        assert len(list(loader)) == 8


def chooses() -> None:
    """An epoch that a loader measures, and another one before which it chooses."""
    with minidl.DataLoader(wl.Stream(40), 1, num_workers="auto") as loader:
        for _ in range(2):
            list(loader)


def references() -> set[str]:
    """What is being executed, as the event table names it: "module:function"."""
    found = set()
    frame = sys._getframe(3)
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith(("minidl.", "multiprocessing.")):
            found.add(f"{module.removeprefix('minidl.')}:{function}")
        if module.startswith("minidl.record."):
            found.add(f"*:{function}")
        frame = frame.f_back  # type: ignore[assignment]
    return found


class Witness:
    """Writes, for each event that any process emits, which of its named functions were being executed."""

    def __init__(self, place: Path) -> None:
        self._fd = os.open(place, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._place = place
        self._written: set[str] = set()

    def look(self, code: int) -> None:
        executed = references()
        named = [ref for ref in EVENTS[code].ours.split(", ") if {ref, "*:" + ref.split(":")[1]} & executed]
        line = f"{code}|{','.join(named)}|{'' if named else ' '.join(sorted(executed))}\n"
        if line not in self._written:
            self._written.add(line)
            os.write(self._fd, line.encode())

    def read(self) -> Iterator[tuple[int, list[str], str]]:
        for line in self._place.read_text().splitlines():
            code, named, executed = line.split("|")
            yield int(code), named.split(",") if named else [], executed


@pytest.fixture(scope="module")
def witnessed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[tuple[list[str], str]]]:
    """Code -> what was being executed whenever it was emitted."""
    place = tmp_path_factory.mktemp("references")
    witness = Witness(place / "seen")
    emitters, note, emit_at_once = recorder._emitters, StreamTrack.note, recorder.Recorder.emit_at_once

    def watched_emitters(*args: Any) -> tuple[Callable[[int], recorder.Emit], Callable[..., None]]:
        emitter, write_into = emitters(*args)

        def watched(loader: int) -> recorder.Emit:
            emit = emitter(loader)

            def watched_emit(code: int, *args: int, **kwargs: int) -> None:
                witness.look(code)
                emit(code, *args, **kwargs)

            return watched_emit

        return watched, write_into

    def watched_note(track: StreamTrack, mark: Any, *event: int, **options: bool) -> None:
        """An event of a device is emitted when the device has come to its mark; it is about where the mark is set."""
        witness.look(event[0])
        note(track, mark, *event, **options)

    def watched_emit_at_once(recording: recorder.Recorder, *events: tuple[int, ...], also: Any = ()) -> None:
        """A collection is recorded afterwards."""
        for _, code, *_ in events if not also else ():  # a device's event is taken in that step
            witness.look(code)
        emit_at_once(recording, *events, also=also)

    runs = {name: recorded.RUNS[name] for name in RUNS} | {
        "device": device_stage,
        "locked": locked_slabs,
        "shares": shares,
        "pauses": pauses,
        "chooses": chooses,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "_emitters", watched_emitters)
        patch.setattr(StreamTrack, "note", watched_note)
        patch.setattr(recorder.Recorder, "emit_at_once", watched_emit_at_once)
        patch.setenv("MINIDL_SIMULATE_DEVICE", "0")  # restored, whatever a run sets
        for number, run in enumerate(runs.values()):
            with recorded.quiet(), minidl.trace(place / str(number)):
                run()
        recorded.killed_program(place / "killed")
    seen = defaultdict(list)
    for code, named, executed in witness.read():
        seen[code].append((named, executed))
    return seen


@pytest.mark.parametrize("code", EVENTS, ids=lambda code: f"{EVENTS[code].name}-{EVENTS[code].phase.value}")
def test_the_named_function_is_being_executed(witnessed: Any, code: int) -> None:
    event = EVENTS[code]
    assert code in witnessed or event.name in NOT_ALWAYS, "no run emits it"
    if code in witnessed:
        others = [executed for named, executed in witnessed[code] if not named]
        assert not others, f"{event.name} {event.phase.value} names {event.ours}, but was emitted in {others}"
        seen = {ref for named, _ in witnessed[code] for ref in named}
        never = [ref for ref in event.ours.split(", ") if ref not in seen and (event.name, ref) not in RARE]
        assert not never, f"{event.name} {event.phase.value} is never emitted in {never}"
