"""What a trace says of slabs: taken, sent, mapped, released, and what goes without one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import pytest
import recorded
import torch

from minidl.arena.arena import FREE, KEPT, reading
from minidl.arena.pickling import SlabPickler, filling
from minidl.record import recorder
from minidl.record.recorder import TraceConfig
from minidl.record.shared import Shared
from minidl.record.slabs import TracedArena, TracedMappings, emit_mapped, forget_mapped
from minidl.tracefile.events import EVENTS, SlabEnd, SlabSource
from minidl.tracefile.reader import Trace, read_trace
from minidl.wire.message import dumps, rebuild
from minidl.wire.messages import RebuildFailure

WIDE = 20_000
"""Bytes that do not go inline."""


class Pair:
    """A worker's side and a loader's, traced, in one process. share: what the worker's side has wrapped is restored."""

    def __init__(self, directory: Path, slabs: int) -> None:
        states = memoryview(bytearray(slabs))
        config = TraceConfig(str(recorder.create(directory, cpu_time={})))
        recorder.start(config)
        shared = Shared(config, 1)
        shared.follow(0)
        self.directory, self.states, self.progress = directory, states, shared.fetching
        self.arena, self.mappings = TracedArena(shared, 0, states), TracedMappings(shared, states, 0)

    def pickled(self, task: int, *batch: torch.Tensor) -> tuple[bytes, bytearray, list[Any]]:
        self.progress.task = task
        with filling(self.arena):
            data, _ = dumps(batch, SlabPickler)
        slabs, small = self.arena.seal()
        news = [not slab.announced for slab in slabs]
        for slab in slabs:
            slab.announced = True
        return data, bytearray(small), list(zip(slabs, news, strict=True))

    def rebuilt(self, task: int, data: bytes, small: bytearray, slabs: list[Any]) -> Any:
        forget_mapped()
        roots: list[Any] = []
        for slab, new in slabs:
            if new:
                self.mappings.map(slab.number, slab.size, slab.fd)
            roots.append(self.mappings.root(slab.number))
        named = [(slab.number, root) for (slab, _), root in zip(slabs, roots, strict=True)]
        self.mappings.deliver(named, self.mappings.forks)
        named.clear()
        with reading([*roots, small]):
            del roots
            if task >= 0:
                emit_mapped(task)
            return rebuild(data)

    def sent(self, task: int, *batch: torch.Tensor) -> Any:
        return self.rebuilt(task, *self.pickled(task, *batch))

    def trace(self) -> Trace:
        recorder.stop()
        return read_trace(self.directory)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        monkeypatch.setattr(torch.UntypedStorage, name, getattr(torch.UntypedStorage, name))
    yield Pair(tmp_path / "trace", slabs=2)
    recorder.stop()


def told(trace: Trace) -> list[tuple[Any, ...]]:
    """Name, task and own values of each event."""
    return [
        (e.name, int(row["task"]), *(int(row[c]) for c in "xyz"))
        for row in trace.events
        if (e := EVENTS[int(row["code"])]).name.startswith("slab_")
    ]


def test_a_slab_s_life(pair: Pair) -> None:
    """Taken, sent, mapped, released; the second time it is not new. A batch that is in view has its slab for itself."""
    for task in range(3):
        kept = pair.sent(task, torch.zeros(WIDE, dtype=torch.uint8))
        if task < 2:
            del kept
    size = 1 << 16
    assert told(pair.trace()) == [
        ("slab_take", 0, 0, size, SlabSource.NEW), ("slab_send", 0, 0, WIDE, WIDE), ("slab_map", 0, 0, size, 1),
        ("slab_release", 0, 0, size, SlabEnd.FREED),
        ("slab_take", 1, 0, size, SlabSource.RECYCLED), ("slab_send", 1, 0, WIDE, WIDE), ("slab_map", 1, 0, size, 0),
        ("slab_release", 1, 0, size, SlabEnd.FREED),
        ("slab_take", 2, 0, size, SlabSource.RECYCLED), ("slab_send", 2, 0, WIDE, WIDE), ("slab_map", 2, 0, size, 0),
    ]  # fmt: skip
    assert kept[0].eq(0).all()


def test_more_batches_than_slabs(pair: Pair) -> None:
    """Each further one has a slab for itself, with a number of its own, and is released too."""
    batches = [pair.sent(task, torch.zeros(WIDE, dtype=torch.uint8)) for task in range(4)]
    del batches
    trace = pair.trace()
    sources = [SlabSource.NEW] * 2 + [SlabSource.ALONE] * 2
    assert [SlabSource(z) for z in trace.select("slab_take")["z"]] == sources
    assert len(set(trace.select("slab_map")["x"].tolist())) == 4
    assert sorted(trace.select("slab_release")["task"].tolist()) == [0, 1, 2, 3]


def test_what_goes_in_no_slab_is_counted(pair: Pair) -> None:
    """What is shared already; what is collated into a slab is not copied; small leaves are no part of either."""
    storage = pair.arena.allocate(WIDE)
    made, small = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (WIDE,)), torch.zeros(3)
    shared = torch.zeros(1000).share_memory_()
    batch = pair.sent(7, made, small, shared, torch.zeros(WIDE + 8, dtype=torch.uint8))
    assert batch[2].shape == (1000,)
    resource_sharer.stop()  # the thread that hands descriptors over
    trace = pair.trace()
    assert [(int(row["y"]), int(row["z"])) for row in trace.select("slab_send")] == [(2 * WIDE + 8, WIDE + 8)]
    assert [(row["task"], row["x"], row["y"]) for row in trace.select("slab_fallback")] == [(7, 1, 4000)]


def test_a_message_that_is_not_rebuilt_frees_its_slab(pair: Pair) -> None:
    _, small, slabs = pair.pickled(0, torch.zeros(WIDE, dtype=torch.uint8))
    assert isinstance(pair.rebuilt(-1, b"torn", small, slabs), RebuildFailure)
    gc.collect()
    pair.sent(1, torch.zeros(WIDE, dtype=torch.uint8))
    trace = pair.trace()
    assert trace.select("slab_map")["task"].tolist() == [1]
    assert trace.select("slab_release")["task"].tolist() == [-1, 1]
    assert pair.states[0] == FREE


def test_a_lost_descriptor_and_a_fork_take_slabs_out_of_use(pair: Pair) -> None:
    batch = pair.sent(0, torch.zeros(WIDE, dtype=torch.uint8))
    pair.mappings.forked()
    pair.mappings.lost(1)
    del batch
    trace = pair.trace()
    ends = [(int(row["x"]), SlabEnd(row["z"])) for row in trace.select("slab_release")]
    assert ends == [(0, SlabEnd.KEPT), (1, SlabEnd.LOST)]
    assert list(pair.states) == [KEPT, KEPT]


@pytest.mark.live
def test_a_real_run_s_batches_are_sent_and_mapped_once() -> None:
    trace = recorded.recorded("slabs")
    assert trace.loaders[1]["transport"] == "arena"
    assert len(trace.select("shm_alloc")) == 0
    for name in ("slab_send", "slab_map"):
        rows = trace.select(name)
        assert sorted(rows["task"].tolist()) == sorted([*range(12)] * 2), name
    assert trace.select("slab_send")["y"].tolist() == [24_000 + 12_000] * 24
    assert trace.select("slab_send")["z"].tolist() == [12_000] * 24
    assert trace.select("slab_fallback")["x"].tolist() == [1] * 24
    ends = trace.select("slab_release")["z"].tolist()
    assert ends.count(SlabEnd.FREED) + ends.count(SlabEnd.KEPT) == 24
    assert 1 <= ends.count(SlabEnd.KEPT) <= 4, "the batch that is visible, and those that came before their turn"
