"""The files of a recorded run stay few, however many workers it makes one after the other."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from sizes import slow

import minidl
from minidl.check import examine
from minidl.tracefile.folded import KEPT, NAME
from minidl.tracefile.format import SIDE_SUFFIX, side_line, stem_of
from minidl.tracefile.process import ProcessLife
from minidl.tracefile.reader import Trace, read_trace
from minidl.watch import folding

EPOCHS, WORKERS = 12, 4
MOST = 2 * (2 * KEPT + WORKERS) + 12
"""Files: of workers that have ended, of those of one more epoch; packs, and of the trace and its process."""


def numbers(trace: Trace) -> list[int]:
    return sorted(process.worker for process in trace.processes if process.role == "worker")


def test_workers_whose_process_is_gone_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, gone, main = (stem_of(pid, 5) for pid in (101, 102, 104))
    monkeypatch.setattr(folding, "life", lambda pid, since: ProcessLife.ALIVE if pid == 101 else ProcessLife.GONE)
    for stem in (running, gone, main):
        (tmp_path / (stem + SIDE_SUFFIX)).write_bytes(side_line("process", role="main" if stem == main else "worker"))
    without_file = stem_of(105, 5) + SIDE_SUFFIX
    assert folding.ended_workers(tmp_path, [*sorted(os.listdir(tmp_path)), without_file]) == [gone]


@pytest.mark.live
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("hang_after", [*slow(0), 60], ids=["without a watchdog", "with a watchdog"])
def test_a_run_that_makes_new_workers_for_each_epoch_has_few_files(tmp_path: Path, hang_after: float) -> None:
    place, most = tmp_path / "trace", 0
    with minidl.trace(place, ring_bytes=None, hang_after=hang_after):
        while hang_after and not list(place.glob("watch-*")):
            time.sleep(0.05)  # the watchdog starts
        for epoch in range(EPOCHS):
            assert sum(len(batch) for batch in minidl.DataLoader(range(8), batch_size=2, num_workers=WORKERS)) == 8
            until = time.monotonic() + 60
            while len(os.listdir(place)) > MOST and time.monotonic() < until:
                time.sleep(0.05)  # a fold takes its time on a busy machine
            most = max(most, len(os.listdir(place)))
            if epoch == 9:  # a fold may run
                assert numbers(read_trace(place)) == sorted([*range(WORKERS)] * (epoch + 1))
    until = time.monotonic() + 30
    while not any(map(NAME.fullmatch, os.listdir(place))) and time.monotonic() < until:
        time.sleep(0.05)
    assert any(map(NAME.fullmatch, os.listdir(place)))
    assert most <= MOST
    trace = read_trace(place)
    assert [text for text in trace.watched.said if "fail" in text] == []
    assert (trace.problems, examine(trace).violations) == ([], [])
    assert numbers(trace) == sorted([*range(WORKERS)] * EPOCHS)
