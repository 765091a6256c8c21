"""The byte ledger: constructed runs of the live loader, whose bytes are known, and traces made by hand."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workloads as wl
from oracle_trace import write_process

import minidl
from minidl.speed.ledger import HANDLE_BYTES, LARGE_PAYLOAD, MANY_TENSORS, Copy, Ledger, Slabs, Why, ledger, part
from minidl.tracefile import events as ev
from minidl.tracefile.reader import Trace, read_trace
from minidl.wire.message import dumps

MESSAGE = (Copy.PICKLE, Copy.WRITE, Copy.READ, Copy.REBUILD)
WIDTH = 250
ROW_BYTES = 4 * WIDTH


class Stream(minidl.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(WIDTH)] * 4)


def stacked(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


def many(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros(3) for _ in range(MANY_TENSORS + 1)]


def few(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return many(samples)[1:]


def text(samples: list[torch.Tensor]) -> dict[str, Any]:
    return {"raw": b"x" * (LARGE_PAYLOAD + 1), "text": "y" * 1000}


def shared(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return [sample.share_memory_() for sample in samples]


def failing(samples: list[torch.Tensor]) -> Any:
    if samples[0][0] == 4:
        raise ValueError("no")
    return torch.stack(samples)


def loader(dataset: Any = None, **options: Any) -> minidl.DataLoader[Any]:
    """Of three batches of four float32 vectors of WIDTH, if no other dataset is given."""
    options = {"batch_size": 4, "num_workers": 1} | options
    return minidl.DataLoader(wl.Tensors(12, WIDTH) if dataset is None else dataset, **options)


def bytes_of(found: Ledger, kind: Copy) -> list[int]:
    return found.batches[kind.name.lower()].tolist()


# --- The live loader --------------------------------------------------------------------------------------------------
LIVE: dict[str, dict[str, Any]] = {
    "default": {"num_workers": 2},
    "own stack": {"collate_fn": stacked},
    "many": {"collate_fn": many},
    "few": {"collate_fn": few},
    "text": {"collate_fn": text},
    "shared": {"collate_fn": shared},
    "stream": {"dataset": Stream()},
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ledger]:
    """The part of each loader in the ledger of one recording."""
    place = tmp_path_factory.mktemp("live") / "trace"
    with minidl.trace(place):
        for options in LIVE.values():
            list(loader(**options))
    trace = read_trace(place)
    whole = ledger(trace)
    parts = {name: part(trace, whole, [number]) for name, number in zip(LIVE, sorted(trace.loaders), strict=True)}
    assert len(whole.copies) == sum(len(found.copies) for found in parts.values())
    return parts


@pytest.mark.live
def test_default_collate_stacks_into_shared_memory_and_nothing_is_copied_again(live: dict[str, Ledger]) -> None:
    found = live["default"]
    assert bytes_of(found, Copy.COLLATE) == found.batches["by_handle"].tolist() == [4 * ROW_BYTES] * 3
    assert bytes_of(found, Copy.FEEDER) == [0] * 3
    assert found.batches["tensors"].tolist() == [1] * 3
    assert found.batches["worker"].tolist() == [0, 1, 0]
    assert found.batches["yielded"].all()
    assert not found.batches["avoidable"].any()
    pipe = sum(found.batches[kind.name.lower()] for kind in (Copy.INDEX_WRITE, *MESSAGE))
    assert found.batches["copied"].tolist() == pipe.tolist()
    assert not found.notes


@pytest.mark.live
def test_a_stack_of_ones_own_costs_one_more_copy_of_exactly_the_batch(live: dict[str, Ledger]) -> None:
    found = live["own stack"]
    assert bytes_of(found, Copy.COLLATE) == [0] * 3
    assert bytes_of(found, Copy.FEEDER) == found.batches["by_handle"].tolist() == [4 * ROW_BYTES] * 3
    assert found.batches["avoidable"].tolist() == [4 * ROW_BYTES] * 3
    assert set(found.copies["why"][found.copies["kind"] == Copy.FEEDER]) == {Why.NOT_SHARED_YET}
    assert "default_collate stacks tensors" in found.text()


@pytest.mark.live
def test_many_tensors_are_many_segments_and_their_message_is_all_handles(live: dict[str, Ledger]) -> None:
    found, count = live["many"], MANY_TENSORS + 1
    assert found.batches["tensors"].tolist() == [count] * 3
    assert found.copies["bytes"][found.copies["kind"] == Copy.FEEDER].tolist() == [12] * 3 * count
    assert 0 < found.batches["payload"].max() <= HANDLE_BYTES * (count + 1)
    assert set(found.copies["why"][np.isin(found.copies["kind"], MESSAGE)]) == {Why.MANY_TENSORS}
    assert "many tensors: join the tensors" in found.text()
    remarkable = live["few"]
    assert remarkable.batches["tensors"].tolist() == [MANY_TENSORS] * 3
    assert bytes_of(remarkable, Copy.FEEDER) == remarkable.batches["avoidable"].tolist()


@pytest.mark.live
def test_what_is_no_tensor_goes_through_the_pipe_and_is_copied_each_time(live: dict[str, Ledger]) -> None:
    found, payload = live["text"], len(pickle.dumps(text([]), pickle.HIGHEST_PROTOCOL))
    assert payload == len(dumps(text([]))[0]) > LARGE_PAYLOAD
    assert bytes_of(found, Copy.PICKLE) == bytes_of(found, Copy.REBUILD) == [payload] * 3
    assert bytes_of(found, Copy.WRITE) == bytes_of(found, Copy.READ)
    assert found.batches["write"].min() > payload
    assert not found.batches["by_handle"].any()
    assert (
        bytes_of(found, Copy.PICKLE)
        != found.batches["avoidable"].tolist()
        == [sum(each) for each in zip(*(bytes_of(found, kind) for kind in MESSAGE), strict=True)]
    )
    assert "pickled data: send the data as a tensor" in found.text()


@pytest.mark.live
def test_what_is_shared_already_crosses_without_a_copy(live: dict[str, Ledger]) -> None:
    found = live["shared"]
    assert found.batches["by_handle"].tolist() == [4 * ROW_BYTES] * 3
    assert bytes_of(found, Copy.COLLATE) == bytes_of(found, Copy.FEEDER) == [0] * 3
    assert not found.batches["avoidable"].any()
    assert found.copies_per_byte < 1


def test_without_workers_nothing_crosses(tmp_path: Path) -> None:
    with minidl.trace(tmp_path):
        list(loader(num_workers=0))
    trace = read_trace(tmp_path)
    (number,) = trace.loaders
    found = ledger(trace)
    assert len(found.copies) == 0
    assert found.text() == (
        "no worker sent a batch to the loader\n"
        f"  iterator {number} has no workers: it sends no batches, and the trace does not have its bytes"
    )


@pytest.mark.live
def test_tasks_that_are_no_batches_are_not_counted_as_such(tmp_path: Path, live: dict[str, Ledger]) -> None:
    exhausted = live["stream"]
    assert len(exhausted.sent) == 1
    assert ev.Outcome.EXHAUSTED in exhausted.batches["outcome"]
    with minidl.trace(tmp_path), pytest.raises(ValueError, match="no"):
        list(loader(collate_fn=failing))
    failed = ledger(read_trace(tmp_path))
    assert failed.batches["outcome"].tolist()[:2] == [ev.Outcome.DATA, ev.Outcome.ERROR]
    assert 1 not in failed.sent["task"]


@pytest.mark.live
def test_epochs_of_persistent_workers_are_told_apart(tmp_path: Path) -> None:
    """Also where an epoch is left in the middle: what was prefetched for it is its own, and never yielded."""
    with minidl.trace(tmp_path), loader(persistent_workers=True, num_workers=2, prefetch_factor=1) as three:
        for _ in range(3):
            next(iter(three))
    found = ledger(read_trace(tmp_path))
    assert set(found.batches["epoch"].tolist()) == {0, 1, 2}
    for number in (0, 1):  # the last epoch's tasks may be cut short by the shutdown
        batches = found.batches[found.batches["epoch"] == number]
        assert batches["task"].tolist() == [0, 1, 2]
        assert batches["yielded"].tolist() == [True, False, False]
        assert batches["collate"].tolist() == batches["by_handle"].tolist() == [4 * ROW_BYTES] * 3


class Pinner:
    """A batch that pins itself, as a user's class may."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.samples = torch.stack(samples)

    def pin_memory(self) -> Pinner:
        self.samples = self.samples.clone()
        return self


@pytest.mark.live
@pytest.mark.parametrize(
    ("collate_fn", "pinned", "notes"),
    [(None, 4 * ROW_BYTES, []), (Pinner, 0, ["batches whose pinning shows no bytes: 3;"])],
    ids=["tensors", "objects that pin themselves"],
)
def test_pinning_is_a_copy_and_a_simulated_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collate_fn: Any, pinned: int, notes: list[str]
) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    with minidl.trace(tmp_path):
        list(loader(pin_memory=True, collate_fn=collate_fn))
    found = ledger(read_trace(tmp_path))
    assert bytes_of(found, Copy.PIN) == [pinned] * 3
    assert bytes_of(found, Copy.READ) == bytes_of(found, Copy.WRITE)
    assert [note.partition(" 3;")[0] + " 3;" for note in found.notes if note != "the pinning is simulated"] == notes
    assert "the pinning is simulated" in found.notes


# --- Traces made by hand ----------------------------------------------------------------------------------------------
LOADER, WORKER, FEEDER = 100, 200, 201


def event(code: int, task: int, time: int, x: int = 0, y: int = 0, z: int = 0, **more: int) -> dict[str, int]:
    return {"code": code, "task": task, "worker": 0, "time": time, "x": x, "y": y, "z": z, **more}


def params(number: int, **given: object) -> dict[str, object]:
    return {"kind": "loader", "loader": number, **given}


def made(path: Path, loader: list[dict[str, int]], worker: list[dict[str, int]], *lines: dict[str, object]) -> Trace:
    write_process(path, loader, pid=LOADER, role="loader", loader=1, lines=lines)
    write_process(path, worker, pid=WORKER, role="worker", worker=0, loader=1)
    return read_trace(path)


def message(task: int, at: int, payload: int, written: int, tensors: int, copied: int) -> list[dict[str, int]]:
    """What a feeder thread says of one result."""
    events = [
        event(ev.RESULT_PICKLE[0], task, at),
        event(ev.SHM_COPY[0], task, at + 1, copied, ev.Place.FEEDER, ev.Reason.NOT_SHARED_YET),
        event(ev.SHM_COPY[1], task, at + 2, copied),
        event(ev.RESULT_PICKLE[1], task, at + 3, payload, tensors, copied),
        event(ev.RESULT_WRITE[0], task, at + 4, written),
        event(ev.RESULT_WRITE[1], task, at + 5, written),
    ]
    return [e | {"tid": FEEDER} for e in events]


def arrival(task: int, at: int, payload: int, read: int, tensors: int, by_handle: int) -> list[dict[str, int]]:
    return [
        event(ev.RESULT_READ, -1, at, read, worker=-1),
        event(ev.RESULT_REBUILD[0], task, at + 1, payload),
        event(ev.RESULT_REBUILD[1], task, at + 2, tensors, by_handle),
        event(ev.YIELD, task, at + 3, ev.Outcome.DATA),
    ]


def epoch(number: int, at: int) -> dict[str, int]:
    return event(ev.EPOCH[0], -1, at, number, worker=-1)


def test_each_copy_is_counted_once_and_in_its_epoch(tmp_path: Path) -> None:
    acknowledged = event(ev.RESULT_READ, -1, 45, 62, worker=-1)  # a read with no rebuilding: no batch's
    trace = made(
        tmp_path / "t",
        [epoch(4, 1), *arrival(0, 20, 300, 400, 2, 5000), acknowledged, epoch(5, 50), *arrival(0, 70, 301, 402, 2, 7)],
        [*message(0, 10, 300, 400, 2, 5000), *message(0, 60, 301, 402, 2, 7)],
    )
    found = ledger(trace)
    columns = ["epoch", "task", "by_handle", "payload", "feeder", "write", "read", "rebuild", "copied", "avoidable"]
    assert found.batches[columns].tolist() == [
        (4, 0, 5000, 300, 5000, 400, 400, 300, 5000 + 2 * 300 + 2 * 400, 5000),
        (5, 0, 7, 301, 7, 402, 402, 301, 7 + 2 * 301 + 2 * 402, 7),
    ]
    assert found.copies["pid"].tolist() == [WORKER] * 3 + [LOADER] * 2 + [WORKER] * 3 + [LOADER] * 2
    assert found.copies["tid"].tolist() == [FEEDER] * 3 + [LOADER] * 2 + [FEEDER] * 3 + [LOADER] * 2
    assert found.text() == (
        "2 batches were sent, on average 2.4 KiB by handle in 2 tensors and 300 B pickled; "
        "after collation each byte was copied 1.39 times\n"
        "  copy              bytes   per batch   copies  avoidable  what\n"
        "  feeder          4.9 KiB     2.4 KiB        2       100%  tensors into shared memory, by the feeder\n"
        "        not shared yet: default_collate stacks tensors and arrays straight into shared memory;\n"
        "        numbers, unbatched samples and the results of your own collate_fn are in private memory\n"
        "        until the feeder copies them\n"
        "  pickle            601 B       300 B        2         0%  the rest into a message, by the feeder\n"
        "  write             802 B       401 B        2         0%  the message into the pipe, by the feeder\n"
        "  read              802 B       401 B        2         0%  the message out of the pipe, by the reader\n"
        "  rebuild           601 B       300 B        2         0%  the message into objects, by the reader"
    )
    assert repr(found) == "<Ledger: 2 batches, 0 B collated, 7.6 KiB copied, 4.9 KiB of it avoidable>"


def test_two_threads_that_read_do_not_take_each_others_messages(tmp_path: Path) -> None:
    """The pin threads of two loaders in one process: a read belongs to the rebuilding that follows in its thread."""
    one, two = arrival(0, 20, 300, 400, 1, 1), arrival(0, 20, 500, 600, 1, 1)
    mixed = [e | {"tid": 1, "loader": 1} for e in one] + [e | {"tid": 2, "loader": 2} for e in two]
    both = [epoch(0, 1), epoch(0, 2) | {"loader": 2}, *sorted(mixed, key=lambda e: e["time"])]
    found = ledger(made(tmp_path / "t", both, []))
    assert found.batches[["loader", "read", "rebuild"]].tolist() == [(1, 400, 300), (2, 600, 500)]
    # Thread 1 ends with a read that no rebuilding follows; of thread 2's first rebuilding, the read is lost.
    lone = [event(ev.RESULT_READ, -1, 90, 62, worker=-1, tid=1, loader=1)]
    cut = [e for e in both if not (e["code"] == ev.RESULT_READ and e.get("tid") == 2)]
    found = ledger(made(tmp_path / "u", [*cut, *lone], []))
    assert found.batches[["loader", "read", "rebuild"]].tolist() == [(1, 400, 300), (2, 0, 500)]


def test_a_copy_that_did_not_end_is_left_out_and_said(tmp_path: Path) -> None:
    worker = message(0, 10, 300, 400, 2, 5000)[:-1]
    found = ledger(made(tmp_path / "t", [epoch(0, 1)], worker))
    assert bytes_of(found, Copy.WRITE) == [0]
    assert bytes_of(found, Copy.FEEDER) == [5000]
    assert found.notes == ["copies that did not end before the trace, left out: 1"]


def test_a_write_whose_end_is_not_recorded_but_whose_message_was_read_has_ended(tmp_path: Path) -> None:
    worker = message(0, 10, 300, 400, 2, 5000)[:-1]
    found = ledger(made(tmp_path / "t", [epoch(0, 1), *arrival(0, 20, 300, 400, 2, 5000)], worker))
    assert bytes_of(found, Copy.WRITE) == bytes_of(found, Copy.READ) == [400]
    assert not found.notes


def test_an_epoch_whose_begin_is_lost_is_said(tmp_path: Path) -> None:
    found = ledger(made(tmp_path / "t", [epoch(3, 50)], message(0, 10, 300, 400, 2, 5000) + message(0, 60, 1, 2, 1, 3)))
    assert found.batches["epoch"].tolist() == [-1, 3]
    assert found.notes == ["3 copies belong to an epoch whose begin is not in the trace"]


@pytest.mark.parametrize(
    ("other", "proven"),
    [
        ({"pin_memory": True, "pin_memory_device": "cuda"}, True),
        ({"pin_memory": True, "pin_memory_device": "simulated"}, False),
        ({"pin_memory": True, "pin_memory_device": None}, False),
        ({"pin_memory": False, "pin_memory_device": "cuda"}, False),
    ],
)
def test_pageable_is_said_where_another_loader_proves_an_accelerator(
    tmp_path: Path, other: dict[str, object], proven: bool
) -> None:
    plain = params(1, pin_memory=False, pin_memory_device=None)
    trace = made(tmp_path / "t", [epoch(0, 1), *arrival(0, 20, 300, 400, 2, 5000)], [], plain, params(2, **other))
    notes = ledger(trace).notes
    assert bool(notes) == proven
    if proven:
        assert notes[0].startswith("iterator 1 does not pin, and the machine has an accelerator (cuda")
        assert "its 4.9 KiB are pageable" in notes[0]
        assert notes[0].endswith("pin_memory=True")


@pytest.mark.parametrize(
    ("payload", "tensors", "why"),
    [
        (LARGE_PAYLOAD, 0, Why.NEEDED),
        (LARGE_PAYLOAD + 1, 0, Why.PICKLED_DATA),
        (LARGE_PAYLOAD + 1, LARGE_PAYLOAD // HANDLE_BYTES, Why.MANY_TENSORS),  # handles explain it
        (LARGE_PAYLOAD * 2, LARGE_PAYLOAD // HANDLE_BYTES, Why.PICKLED_DATA),  # and here they do not
        (300, MANY_TENSORS, Why.NEEDED),
        (300, MANY_TENSORS + 1, Why.MANY_TENSORS),
    ],
)
def test_why_a_message_is_large(tmp_path: Path, payload: int, tensors: int, why: Why) -> None:
    trace = made(tmp_path / "t", [epoch(0, 1)], message(0, 10, payload, payload + 70, tensors, 0))
    found = ledger(trace)
    reasons = {kind: found.copies["why"][found.copies["kind"] == kind].tolist() for kind in (Copy.PICKLE, Copy.WRITE)}
    assert reasons == {Copy.PICKLE: [why], Copy.WRITE: [why]}


def test_an_empty_trace(tmp_path: Path) -> None:
    found = ledger(made(tmp_path / "t", [], []))
    assert found.text() == "no worker sent a batch to the loader"
    assert np.isnan(found.copies_per_byte)


# --- Slabs ------------------------------------------------------------------------------------------------------------
def test_what_goes_in_slabs(tmp_path: Path) -> None:
    """Collated into a slab, copied into it, or in no slab: each to the byte; what is inline is the message's."""
    worker = [
        event(ev.SLAB_TAKE, 0, 5, 0, 1 << 16, ev.SlabSource.NEW),
        event(ev.RESULT_PUT, 0, 6, ev.Outcome.DATA),
        event(ev.RESULT_PICKLE[0], 0, 7), event(ev.RESULT_PICKLE[1], 0, 8, 300, 40),
        event(ev.SLAB_SEND, 0, 9, 0, 50_000, 20_000), event(ev.SLAB_FALLBACK, 0, 9, 2, 8000),
        event(ev.RESULT_WRITE[0], 0, 10, 400), event(ev.RESULT_WRITE[1], 0, 11, 400),
        event(ev.SLAB_TAKE, 1, 12, 256, 1 << 16, ev.SlabSource.ALONE),
    ]  # fmt: skip
    loader = [epoch(0, 1), *arrival(0, 20, 300, 400, 40, 58_064), event(ev.SLAB_RELEASE, 0, 30, 0, 1 << 16)]
    found = ledger(made(tmp_path, loader, worker, params(1, num_workers=1, transport="arena", arena_bytes=1 << 20)))
    assert [bytes_of(found, kind) for kind in (Copy.COLLATE, Copy.SLAB, Copy.FEEDER)] == [[30_000], [20_000], [0]]
    assert found.batches["by_handle"].tolist() == [58_000]
    assert found.batches["avoidable"].tolist() == [20_000], "that of many tensors each has its handle costs no segment"
    assert found.slabs == Slabs(
        made=1, used=1, alone=1, kept=0, lost=0, leaves=2, most=2, most_bytes=2 << 16, alone_bytes=1 << 16,
        budget=1 << 20,
    )  # fmt: skip
    text = found.text()
    assert "feeder" not in text
    assert "into the worker's socket, by the worker" in text
    assert (
        "1 slab made, each used 1 times on average; at most 2 in use at once (128.0 KiB); 1 slab (64.0 KiB) for" in text
    )
    assert "beyond a worker's budget of 1.0 MiB (MINIDL_ARENA_BYTES)" in text
