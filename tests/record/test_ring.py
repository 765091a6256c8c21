"""A ring keeps a process's newest events: every view of such a trace works, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import workloads as wl

import minidl
from minidl import cli
from minidl.record.recorder import FIRST_SLOTS, RING_BYTES
from minidl.tracefile import events as ev
from minidl.tracefile.format import SLOT_BYTES

BATCHES = 400


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 400 batches; the loader, by far the most talkative, and its two workers keep 1024 events each."""
    path = tmp_path_factory.mktemp("ring") / "trace"
    with minidl.trace(path, ring_bytes=FIRST_SLOTS * SLOT_BYTES):
        assert sum(1 for _ in minidl.DataLoader(wl.Tensors(2 * BATCHES), batch_size=2, num_workers=2)) == BATCHES
    return path


@pytest.mark.live
def test_the_newest_events_of_each_process_are_there(ring: Path) -> None:
    trace = minidl.read_trace(ring)
    assert [(p.events, p.lost > 0, p.whole_from > 0) for p in trace.processes] == [(FIRST_SLOTS, True, True)] * 3
    assert len(trace) == 3 * FIRST_SLOTS
    begin = trace.whole_from(1)
    assert begin == max(trace.events["time"][trace.events["process"] == index][0] for index in range(3))
    whole = trace.events[trace.events["time"] >= begin]
    tasks = whole["task"][whole["code"] == ev.YIELD].tolist()
    assert 10 < len(tasks) < BATCHES
    assert tasks == list(range(BATCHES))[-len(tasks) :]


@pytest.mark.live
@pytest.mark.parametrize(
    "command", ["summary", "check", "ledger", "timeline", "export", "pack", "before --batch 399", "replay"]
)
def test_every_command_reads_it(command: str, ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, *more = command.split()
    out = {"export": "out.json", "pack": "out.minidl"}.get(name)
    more += ["-o", str(tmp_path / out)] if out else []
    assert cli.main([name, str(ring), *more]) == 0, capsys.readouterr().out
    if name in ("summary", "check", "timeline"):
        said = capsys.readouterr().out
        assert said.count("overwritten (the ring holds 1024)") == 3, said


@pytest.mark.live
def test_pictures_of_it(ring: Path, tmp_path: Path) -> None:
    assert minidl.timeline(ring) is not None
    assert "overwritten (the ring holds 1024)" in json.dumps(str(minidl.html(ring)))


@pytest.mark.live
def test_the_verdict_asks_only_the_time_that_everybody_tells_of(ring: Path) -> None:
    trace = minidl.read_trace(ring)
    from minidl.speed.wall_clock import waiting

    split = waiting(trace, 1)
    assert split.workers == 2
    assert sum(split.causes.values()) + split.consumer <= int(trace.events["time"][-1]) - trace.whole_from(1)


@pytest.mark.live
@pytest.mark.parametrize(
    ("flags", "ring_bytes", "chosen_by"), [([], RING_BYTES, "cost"), (["--full", "--cpu-time", "off"], None, "user")]
)
def test_run_records_as_it_is_asked_to(flags: list[str], ring_bytes: int, chosen_by: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from torch.utils.data import DataLoader\nprint(list(DataLoader(range(3))))\n")
    trace = tmp_path / "trace"
    assert cli.main(["run", "--trace", str(trace), *flags, str(tmp_path / "script.py")]) == 0
    manifest = minidl.read_trace(trace).manifest
    assert (manifest["ring_bytes"], manifest["cpu_time"]["chosen_by"]) == (ring_bytes, chosen_by)
    assert chosen_by == "cost" or not manifest["cpu_time"]["recorded"]
