"""Replay: equal to the live loader at every moment, the same backwards, and good for traces of any run."""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import gzip
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
import torch.utils.data
from damages import TRACES
from made_trace import Run, made
from oracle_trace import write_process
from pages import EVIL, Parsed, needs_chromium, opened
from workloads import (
    BOUND,
    At,
    Gate,
    Numbers,
    Stream,
    Tensors,
    impatient,
    kill_group,
    kill_myself,
    pids_said_by,
    started,
    touch,
)

import minidl
from minidl import cli
from minidl.loader.protocol import LoaderState, WorkerState
from minidl.playback import stepper
from minidl.playback.actors import LoaderReplay
from minidl.playback.follower import Follower, causal_order
from minidl.playback.state import MessageStage, ProtocolState
from minidl.playback.stepper import EVERY, Replay
from minidl.playback.words import changes, describe
from minidl.tracefile import events as ev
from minidl.tracefile.calls import OpenCalls
from minidl.tracefile.events import CALLS, Message, Phase
from minidl.tracefile.reader import Trace, read_trace
from minidl.views import replay_page
from minidl.views.colours import paint
from minidl.views.replay_page import html, picture, replay
from minidl.views.replay_terminal import render

DISPATCH = ("send_idx", "rcvd_idx", "task_info", "tasks_outstanding", "workers_num_tasks", "workers_status")


# --- The live loader --------------------------------------------------------------------------------------------------
def live(iterator: Any) -> dict[str, Any]:
    """What a live iterator, torch's or ours, says of itself under upstream's names."""
    return {
        "send_idx": iterator._send_idx,
        "rcvd_idx": iterator._rcvd_idx,
        "task_info": {task: (info[0], len(info) == 2) for task, info in iterator._task_info.items()},
        "tasks_outstanding": iterator._tasks_outstanding,
        "workers_num_tasks": list(iterator._workers_num_tasks),
        "workers_status": list(iterator._workers_status),
    }


def replayed(state: ProtocolState) -> dict[str, Any]:
    """The same of a replayed state."""
    out = {name: getattr(state, name) for name in DISPATCH}
    out["task_info"] = {task: dataclasses.astuple(info) for task, info in state.task_info.items()}
    return out | {name: list(out[name]) for name in ("workers_num_tasks", "workers_status")}


Moments = list[tuple[int, dict[str, Any]]]
"""When a live iterator was asked (CLOCK_MONOTONIC, as in the trace), and what it said."""


def recorded(path: Path, epochs: int = 1, leave_at: int | None = None, **options: Any) -> tuple[Trace, Moments]:
    """Run a live loader, recorded; ask it after each batch. leave_at: in all epochs but the last."""
    moments: Moments = []
    with minidl.trace(path):
        loader = minidl.DataLoader(**options)
        for epoch in range(epochs):
            iterator = iter(loader)
            moments.append((time.monotonic_ns(), live(iterator)))
            for number in range(1000):
                try:
                    next(iterator)
                except StopIteration:
                    break
                except ZeroDivisionError:
                    pass
                moments.append((time.monotonic_ns(), live(iterator)))
                if number == leave_at and epoch < epochs - 1:
                    break
        iterator.close()
        del iterator
        loader.close()
    return read_trace(path), moments


def seconds(trace: Trace, moment: int) -> float:
    return (moment - int(trace.events["time"][0])) / 1e9


def divide() -> int:
    return 1 // 0


LOADERS: dict[str, dict[str, Any]] = {
    "map": {"dataset": Tensors(30), "num_workers": 2},
    "persistent": {"dataset": Tensors(24), "num_workers": 2, "persistent_workers": True, "epochs": 3, "leave_at": 2},
    "out of order": {"dataset": Tensors(30), "num_workers": 2, "in_order": False},
    "iterable": {"dataset": Stream(21), "num_workers": 2},
    "iterable again": {"dataset": Stream(21), "num_workers": 2, "persistent_workers": True, "epochs": 2},
    "pinned": {"dataset": Tensors(30), "num_workers": 2, "pin_memory": True},
    "pinned again": {
        "dataset": Tensors(24), "num_workers": 2, "pin_memory": True, "persistent_workers": True, "epochs": 2,
        "leave_at": 3,
    },
    "errors": {"dataset": At(20, 7, divide), "num_workers": 2},
}  # fmt: skip


@pytest.mark.live
@pytest.mark.parametrize("kind", LOADERS)
def test_the_state_is_the_live_loaders_at_every_moment(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    trace, moments = recorded(tmp_path / "t", batch_size=2, **LOADERS[kind])
    at = replay(trace)
    assert len(moments) > 10
    for moment, said in moments:
        assert replayed(at.at(seconds(trace, moment))) == said
    for moment, said in reversed(moments):  # past it, and back
        at.forward(40)
        assert replayed(at.at(seconds(trace, moment))) == said
    assert [state.violation for state in at.walk() if state.violation] == []
    assert all(state.known for state in at.walk())
    assert at.state.loader is LoaderState.CLOSED
    assert at.ending == "shut down"
    assert {worker.state for worker in at.state.workers} == {WorkerState.ENDED}
    assert all(worker.exit_code == 0 and not worker.index_queue for worker in at.state.workers)
    assert (at.state.result_queue, at.state.ready_queue, at.state.bytes_in_flight) == ((), (), 0)
    assert at.state.simulated == kind.startswith("pinned")


@pytest.mark.live
def test_the_state_is_the_live_loaders_while_it_waits_and_batches_lie_in_the_reorder_buffer(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    said: list[tuple[int, dict[str, Any], list[int]]] = []

    def quiet() -> bool:
        """Two batches lie in the reorder buffer, and the loader and worker 1 have sat down to wait."""
        events = read_trace(tmp_path / "t").events
        last = {int(row["tid"]): int(row["code"]) for row in events}
        workers = {int(row["worker"]): int(row["tid"]) for row in events[events["code"] == ev.WORKER_READY]}
        stored = int((events["code"] == ev.REORDER_STORE).sum())
        waits = last.get(main) == ev.RESULT_GET[0] and last.get(workers.get(1, 0)) == ev.INDEX_GET[0]
        return stored == 2 and waits

    def ask(iterator: Any) -> None:
        deadline = time.monotonic() + BOUND
        while not (calm := quiet()) and time.monotonic() < deadline:
            time.sleep(0.01)
        were_calm.append(calm)
        said.append((time.monotonic_ns(), live(iterator), [worker.pid for worker in iterator._workers]))
        touch(str(gate))

    main = threading.get_native_id()
    were_calm: list[bool] = []
    with minidl.trace(tmp_path / "t"):
        iterator = iter(minidl.DataLoader(Gate(16, gate), batch_size=2, num_workers=2))
        asker = threading.Thread(target=ask, args=(iterator,))
        asker.start()
        assert [batch.tolist() for batch in iterator] == [[n, n + 1] for n in range(0, 16, 2)]
        asker.join()
        iterator.close()
        del iterator
    trace = read_trace(tmp_path / "t")
    at = replay(trace)
    assert were_calm == [True]
    ((moment, dispatched, pids),) = said
    for _ in range(2):
        state = at.at(seconds(trace, moment))
        assert replayed(state) == dispatched
        assert state.reorder_buffer == (1, 3)
        assert (state.loader, state.consumer, state.in_hand) == (LoaderState.WAITING, None, None)
        assert [worker.pid for worker in state.workers] == pids
        stuck, idle = state.workers
        assert (stuck.state, stuck.task, stuck.position, stuck.index) == (WorkerState.FETCHING, 0, 0, 0)
        assert [message.task for message in stuck.index_queue] == [2]
        assert (idle.state, idle.index_queue) == (WorkerState.WAITING, ())
        at.to(len(at))


@pytest.mark.live
def test_counts_begin_anew_before_persistent_workers_are_told_of_the_epoch(tmp_path: Path) -> None:
    trace, _ = recorded(tmp_path / "t", batch_size=2, **LOADERS["persistent"])
    at = replay(trace)
    resuming = [state for state in at.walk() if state.loader is LoaderState.RESUMING]
    assert resuming
    assert {(state.send_idx, state.rcvd_idx, state.tasks_outstanding) for state in resuming} == {(0, 0, 0)}
    told = {(m.worker, m.kind) for state in resuming for worker in state.workers for m in worker.index_queue}
    assert {(worker, Message.RESUME) for worker in range(2)} <= told
    answers = {(m.worker, m.stage) for s in resuming for m in s.result_queue if m.kind is Message.RESUME}
    assert {
        (worker, stage)
        for worker in range(2)
        for stage in (MessageStage.ENQUEUED, MessageStage.WRITING, MessageStage.READ)
    } <= answers


@pytest.mark.parametrize("name", ["persistent", "shutdown-closed", "shutdown-error", "workers-0"])
def test_the_table_of_events_and_the_lifecycles_tell_the_same_call(name: str) -> None:
    """After a yield, `next` has handed its batch over, and its end follows at once."""
    run, calls = Replay(read_trace(TRACES / f"{name}.minidl")), OpenCalls()
    for row in run.rows:
        state, event = run.forward(), run.trace.events[row : row + 1]
        calls.take(event)
        if event["code"][0] in {*CALLS, *LoaderReplay.READS} - {ev.YIELD}:
            assert [one.call for one in calls.open()] == [state.call], run.words


@pytest.mark.live
def test_going_back_is_going_forward_mirrored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    trace, _ = recorded(tmp_path / "t", batch_size=2, **LOADERS["pinned again"] | {"dataset": Tensors(50)})
    at = replay(trace)
    there = list(at.walk())
    told = [at.changed for _ in at.walk()]
    assert len(there) == len(at) + 1 > 1024  # across several kept copies
    assert there[0] != there[-1]
    assert there == list(replay(trace).walk())
    for position in range(len(at) - 1, -1, -1):
        assert at.back() == there[position]
        assert at.changed == told[position]
        assert at.position == position
    assert at.back() == there[0]
    rng = np.random.default_rng(0)
    for position in rng.integers(0, len(at) + 1, 300).tolist():
        assert at.to(position) == there[position]
        assert at.changed == told[position]


def test_a_step_back_follows_no_more_than_a_block_of_events_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = replay(made(tmp_path / "t", Run(batches=80)))
    assert len(at) > 4 * EVERY
    at.to(len(at))
    followed: list[int] = []
    step = Follower.step
    monkeypatch.setattr(Follower, "step", lambda self, event: followed.append(1) or step(self, event))
    for go in (at.back, lambda: at.to(3 * EVERY), at.back, lambda: at.to(2 * EVERY - 1), at.forward):
        followed.clear()
        go()
        assert len(followed) <= EVERY


def test_however_long_a_run_is_few_copies_are_kept_and_the_states_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = made(tmp_path / "t", Run(batches=40))
    there = list(replay(trace).walk())
    monkeypatch.setattr(stepper, "EVERY", 10)
    monkeypatch.setattr(stepper, "MOST_KEPT", 7)
    at = replay(trace)
    assert [at.to(position) for position in range(len(at), -1, -1)] == there[::-1]
    assert len(at._kept) == 7


def test_of_a_long_way_it_is_told_how_far_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = replay(made(tmp_path / "t", Run(batches=80)))
    told: list[tuple[int, int]] = []
    at.progress = lambda done, of: told.append((done, of))
    at.to(len(at))
    assert told == []
    monkeypatch.setattr(stepper, "LONG", 3 * EVERY)
    at.to(0)
    at.to(len(at))
    at.back()
    assert told == [], "the copies that are kept save the way"
    at = replay(at.trace)
    at.progress = lambda done, of: told.append((done, of))
    way = len(at) - 1
    at.to(len(at))
    assert told == [(done, way) for done in [*range(EVERY, way, EVERY), way]]


# --- Where to go ------------------------------------------------------------------------------------------------------
def test_batches_are_where_they_are_in_the_consumers_hands(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", Run(batches=5, epochs=2)))
    assert (at.batches, at.batch) == (10, 0)
    seen = []
    while at.next_batch() and at.position < len(at):
        assert at.state.loader is LoaderState.IDLE
        seen.append((at.state.epoch, at.state.consumer, at.state.yielded, at.batch))
    assert seen == [(e, n, n + 1, e * 5 + n + 1) for e in range(2) for n in range(5)]
    back = []
    while at.previous_batch() and at.position > 0:
        back.append((at.state.epoch, at.state.consumer, at.state.yielded, at.batch))
    assert back == seen[::-1]
    assert at.to_batch(7) == replay(at.trace).to_batch(7)
    assert (at.state.epoch, at.state.consumer) == (1, 2)
    at.forward()
    assert at.previous_batch() == at.to_batch(7)
    with pytest.raises(IndexError, match="batch 10: this run handed out 10, counted from 0"):
        at.to_batch(10)


def test_positions_events_moments_and_rows(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", Run(**made_trace.HEALTHY))
    at = replay(tmp_path / "t")  # a path will do
    assert at.event is None
    assert at.words == "nothing has happened yet"
    assert at.changed == ()
    assert at.forward(3) == at.to(3)
    assert at.event == trace.events[at.rows[2]]
    assert at.to_row(int(at.rows[99])) == at.to(100)
    for position in (1, 50, len(at)):
        moment = (int(at.to(position) and at.event["time"]) - int(trace.events["time"][0])) / 1e9
        at.at(moment)
        assert at.event["time"] == trace.events[at.rows[position - 1]]["time"]
        assert at.position == len(at) or trace.events[at.rows[at.position]]["time"] > at.event["time"]
    for moment, end in ((float("nan"), 50), (-1.0, 0), (1e6, len(at))):
        at.to(end)
        with pytest.raises(IndexError, match=rf"{re.escape(f'{moment:g} s')}: give 0 to 0\.\d{{6}} s"):
            at.at(moment)
        assert at.position == end
    assert at.forward(7) == at.to(len(at))
    assert at.back(10**6) == at.to(0)
    with pytest.raises(IndexError, match=rf"event 999999: give 0 \(before the first\) to {len(at)} "):
        at.to(999999)
    with pytest.raises(IndexError, match="row 999999 is not an event of iterator 1"):
        at.to_row(999999)
    assert re.fullmatch(r"<Replay of iterator 1 of .*: at 0 of \d+ events; shut down>", repr(at))


def test_a_loader_is_chosen_by_its_number(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", Run(batches=4), Run(batches=9, loader=2, first_pid=3000))
    assert replay(trace).loader == 2
    assert replay(trace, 1).batches == 4
    with pytest.raises(ValueError, match=r"has no iterator 7: it has 1 \(\d+ events\), 2 \(\d+ events\)"):
        replay(trace, 7)
    write_process(tmp_path / "none", [])
    with pytest.raises(ValueError, match="no iterator has recorded anything"):
        replay(tmp_path / "none")


def test_the_order_is_causal() -> None:
    rows = np.zeros(6, dtype=[("time", "i8"), ("seq", "u8"), ("process", "u4")])
    # Process 0 emitted times 10, 30, 20 (a thread that had lost the processor), 40; process 1 emitted 25 and 35.
    rows["time"], rows["seq"], rows["process"] = [10, 20, 25, 30, 35, 40], [1, 3, 1, 2, 2, 4], [0, 0, 1, 0, 1, 0]
    ordered = rows[causal_order(rows)]
    assert [(int(r["process"]), int(r["seq"])) for r in ordered] == [(0, 1), (1, 1), (0, 2), (0, 3), (1, 2), (0, 4)]
    assert len(causal_order(rows[:0])) == 0


# --- What is shown ----------------------------------------------------------------------------------------------------
def walked(at: Replay) -> Iterator[tuple[int, ProtocolState]]:
    for state in at.walk(1):
        yield int(at.event["code"]), state


def test_a_task_is_in_one_place_at_a_time_and_takes_its_bytes_along(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", Run(batches=6, workers=1, prefetch_factor=1)))
    places: list[tuple[str, MessageStage | None]] = []
    most = 0
    for _, state in walked(at):
        here: list[tuple[str, MessageStage | None]] = [
            ("index queue", m.stage) for m in state.workers[0].index_queue if m.task == 2
        ] if state.workers else []  # fmt: skip
        here += [("result queue", m.stage) for m in state.result_queue if m.task == 2]
        here += [("worker", None)] if state.workers and state.workers[0].task == 2 and not here else []
        here += [("hand", None)] if state.in_hand == 2 else []
        here += [("consumer", None)] if state.consumer == 2 else []
        assert len(here) <= 1 or here[0][0] == "hand" or here[-1][0] in ("hand", "consumer")
        places += [place for place in here if place not in places]
        if places and places[-1][0] == "result queue":
            most = max(most, state.bytes_in_flight)
    S = MessageStage  # noqa: N806
    assert places == [
        ("index queue", S.ENQUEUED), ("index queue", S.WRITING), ("index queue", S.WRITTEN),
        ("worker", None),
        ("result queue", S.ENQUEUED), ("result queue", S.PICKLING), ("result queue", S.PICKLED),
        ("result queue", S.WRITING), ("result queue", S.WRITTEN), ("result queue", S.READ),
        ("result queue", S.REBUILDING), ("result queue", S.REBUILT), ("hand", None), ("consumer", None),
    ]  # fmt: skip
    assert most == made_trace.MIB + 900
    assert at.state.bytes_in_flight == 0


def test_changes_name_the_fields_and_say_what_became_of_them(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", Run(**made_trace.HEALTHY)))
    told: dict[str, list[str]] = {}
    for code, _ in walked(at):
        told.setdefault(ev.EVENTS[code].name, [str(change) for change in at.changed])
    assert told["task_assigned"] == [
        "send_idx: 0 → 1", "tasks_outstanding: 0 → 1", "task_info[0]: now worker 0, outstanding",
        "workers_num_tasks[0]: 0 → 1",
    ]  # fmt: skip
    assert told["index_put"] == ["workers[0].index_queue[task 0]: now enqueued"]
    assert told["reorder_store"] == ["reorder_buffer: none → 3", "in_hand: 3 → none"]
    assert told["shutdown"][0].endswith("→ STOPPING_PIN")
    assert changes(at.state, at.state) == ()


def test_every_event_has_words_of_its_own(tmp_path: Path) -> None:
    rows = [{"code": code, "task": 3, "worker": 1, "x": 1, "y": 2, "z": 3} for code in ev.EVENTS]
    write_process(tmp_path, rows, lines=[{"kind": "string", "id": 3, "text": "boom \x1b[2J"}])
    trace = read_trace(tmp_path)
    told = [describe(trace, row) for row in trace.events]
    assert len(set(told)) == len(told)
    assert not any("{" in words or "\x1b" in words for words in told)
    assert any(words.endswith("boom \\x1b[2J") for words in told)


def test_an_event_says_how_many_and_which(tmp_path: Path) -> None:
    rows = [
        {"code": ev.SAMPLE[0], "task": 3, "worker": 1, "x": 0, "y": 65},
        {"code": ev.SAMPLE[0], "task": 3, "worker": 1, "x": 2, "y": -1},
        {"code": ev.SAMPLE[0], "task": 3, "worker": 1, "x": -1, "y": -1},
        {"code": ev.FETCH[0], "task": 3, "worker": 1, "x": 1},
        {"code": ev.FETCH[0], "task": 3, "worker": 1, "x": 4},
        {"code": ev.STATE_TAKEN, "x": 1},
        {"code": ev.SHARE, "x": 7, "y": 1, "z": 4},
        {"code": ev.SLAB_LOCK, "worker": 1, "x": 1 << 20, "z": 1},
        {"code": ev.SLAB_LOCK, "worker": 1, "x": 0},
    ]
    write_process(tmp_path, rows)
    trace = read_trace(tmp_path)
    assert [describe(trace, row) for row in trace.events] == [
        "worker 1 asks the dataset for sample 65 of task 3",
        "worker 1 asks the dataset for the sample at position 2 of task 3",
        "worker 1 asks the dataset for the samples of task 3",
        "worker 1 begins to fetch task 3: 1 sample",
        "worker 1 begins to fetch task 3: 4 samples",
        "the program takes the loader's state: 1 batch",
        "the sampler has epoch 7, and gives rank 1 of 4 its share",
        "the loader has page-locked the 1.0 MiB of a new slab of worker 1 for a device (simulated)",
        "the loader could not page-lock a new slab of worker 1 for a device",
    ]


def test_pretended_pinning_is_called_simulated(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", Run(batches=4, pin=True, simulated=True)))
    (started,) = np.flatnonzero(at.trace.events["code"] == ev.PIN_START)
    assert at.to_row(int(started)).simulated
    assert at.words == "the pin thread runs (simulated)"
    assert any("pin thread" in line and "(simulated)" in line for line in render(at))


# --- Runs that did not go well ----------------------------------------------------------------------------------------
def test_a_killed_run_is_replayed_to_where_it_stopped(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", Run(**made_trace.HUNG)))
    state = at.to(len(at))
    assert at.ending == ""
    assert "it did not end" in repr(at)
    assert (state.loader, state.waiting_for, state.reorder_buffer) == (LoaderState.WAITING, 9, (10, 12))
    stuck = state.worker(1)
    assert (stuck.state, stuck.task, stuck.position, stuck.index) == (WorkerState.FETCHING, 9, 2, 38)
    assert stuck.doing == "in sample 38 (task 9)"
    assert any("the run did not end" in line for line in render(at))
    with pytest.raises(KeyError, match=r"worker 5 is in no event so far: there are \[0, 1\]"):
        state.worker(5)


KILLED = """
import sys, minidl, workloads
def thing():
    workloads.touch(sys.argv[2])
    workloads.hang()
with minidl.trace(sys.argv[1]):
    for batch in minidl.DataLoader(workloads.At(40, 6, thing), batch_size=2, num_workers=2):
        print(*batch.tolist(), flush=True)
"""


@pytest.mark.live
def test_a_run_that_is_killed_with_all_its_workers(tmp_path: Path) -> None:
    program = started(KILLED, tmp_path / "t", tmp_path / "hangs")
    try:
        assert [pids_said_by(program) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
        deadline = time.monotonic() + BOUND
        while not (tmp_path / "hangs").exists() or len(read_trace(tmp_path / "t").select("next", Phase.BEGIN)) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        kill_group(program)
    at = replay(tmp_path / "t")
    assert [state.violation for state in at.walk() if state.violation] == []
    assert (at.ending, at.batches, at.state.rcvd_idx, at.state.yielded) == ("", 3, 3, 3)
    assert at.state.worker(1).doing == "in sample 6 (task 3)"
    assert at.state.known
    assert at.previous_batch().consumer == 2
    assert at.state == replay(at.trace).to_batch(2)


@pytest.mark.live
@pytest.mark.usefixtures("no_sigchld")
def test_a_worker_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with minidl.trace(tmp_path / "t"):
        with monkeypatch.context() as patch:  # for the waits of the epoch, and not for the joins
            impatient(patch)
            iterator = iter(minidl.DataLoader(At(20, 7, kill_myself), batch_size=2, num_workers=2))
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            for _ in iterator:
                pass
        last = live(iterator)
        moment = time.monotonic_ns()
        iterator.close()
        del iterator
    at = replay(tmp_path / "t")
    assert [state.violation for state in at.walk() if state.violation] == []
    state = at.at(seconds(at.trace, moment))
    assert replayed(state) == last
    assert (state.worker(1).exit_code, state.worker(1).state) == (-signal.SIGKILL, WorkerState.FETCHING)
    assert "found dead" in state.note
    assert not state.known
    assert at.to(len(at)).loader is LoaderState.CLOSED


@pytest.mark.live
def test_a_ring_tells_what_it_can_until_the_next_epoch_begins(tmp_path: Path) -> None:
    path = tmp_path / "t"
    moments: Moments = []
    with minidl.trace(path, ring_bytes=1 << 16):
        loader = minidl.DataLoader(Tensors(80), batch_size=4, num_workers=2, persistent_workers=True)
        for _ in range(5):
            iterator = iter(loader)
            for _ in iterator:
                moments.append((time.monotonic_ns(), live(iterator)))
        iterator.close()
        del iterator
        loader.close()
    trace = read_trace(path)
    at = replay(trace)
    assert any("overwritten" in problem for problem in trace.problems)
    states = list(at.walk())
    known = [state.known for state in states]
    first = known.index(True)
    assert first > 0
    assert not any(known[:first])
    assert all(known[first:])
    assert "overwritten" in states[0].note
    assert "until the next epoch begins" in states[0].note
    at.to(first)
    assert int(at.event["code"]) == ev.EPOCH[0]
    assert [state.violation for state in states if state.violation] == []
    later = [(moment, said) for moment, said in moments if seconds(trace, moment) > at.state.time]
    assert len(later) >= 10
    for moment, said in later:
        assert replayed(at.at(seconds(trace, moment))) == said


@pytest.mark.live
def test_a_ring_within_one_epoch_comes_to_know_the_tasks_again(tmp_path: Path) -> None:
    path = tmp_path / "t"
    moments: Moments = []
    with minidl.trace(path, ring_bytes=1 << 16):
        iterator = iter(minidl.DataLoader(Tensors(600), batch_size=4, num_workers=2))
        for _ in iterator:
            moments.append((time.monotonic_ns(), live(iterator)))
        del iterator
    trace = read_trace(path)
    at = replay(trace)
    assert not any(state.known or state.violation for state in at.walk())
    assert at.to(0).send_idx is None
    for moment, said in moments[-12:-5]:  # later, the workers are told to leave
        assert replayed(at.at(seconds(trace, moment))) == said
    assert (at.to(len(at)).result_queue, at.state.worker(0).index_queue) == ((), ())


@pytest.mark.live
def test_an_iterator_without_workers(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        assert len(list(minidl.DataLoader(Tensors(10), batch_size=4))) == 3
    at = replay(tmp_path / "t")
    doing = [state.worker(-1).doing for state in at.walk() if state.workers]
    assert "in sample 5 (task 1)" in doing
    assert "collating task 2" in doing
    assert (at.batches, at.ending) == (3, "the epoch was over")
    assert at.state.send_idx is None
    assert at.state.task_info == {}
    assert at.state.known
    assert any("no workers" in line for line in render(at))


@pytest.mark.live
def test_torchs_own_loader_observed(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        context = minidl.observe("fork")
        loader = torch.utils.data.DataLoader(
            Numbers(24), batch_size=2, num_workers=2, multiprocessing_context=context
        )  # fmt: skip
        assert len(list(loader)) == 12
        del loader
    at = replay(tmp_path / "t")
    states = list(at.walk())
    assert not any(state.violation or state.known for state in states)
    assert "observed" in states[0].note
    assert max(state.send_idx or 0 for state in states) == 12
    assert {LoaderState.WAITING, LoaderState.IDLE} <= {state.loader for state in states}
    assert {m.task for state in states for m in state.result_queue if m.kind is Message.RESULT} == set(range(12))
    assert at.batches == 12
    assert (states[-1].result_queue, states[-1].task_info) == ((), {})


def broken(path: Path, change: Callable[[list[tuple[int, ...]]], None]) -> Replay:
    """A made run, with the loader's own events changed before they are written."""
    run = Run(**made_trace.HEALTHY)
    processes = run.run()
    main = processes[0].events
    primed = next(at for at, event in enumerate(main) if event[1] == ev.NEXT[0])
    main.insert(primed, (main[primed][0], ev.CONSUMER[0], 1, processes[0].pid, -1, -1, 0, 0, 0))
    change(main)
    for process in processes:
        process.write(path)
    return replay(path)


def test_what_the_protocol_does_not_allow_is_said_and_stepping_goes_on(tmp_path: Path) -> None:
    assert not any(state.violation for state in broken(tmp_path / "whole", lambda events: None).walk())

    def yield_another(events: list[tuple[int, ...]]) -> None:
        where = [n for n, event in enumerate(events) if event[1] == ev.YIELD][4]
        events[where] = (*events[where][:4], 9, *events[where][5:])

    at = broken(tmp_path / "other", yield_another)
    said = [(at.words, state.violation) for state in at.walk() if state.violation]
    assert said == [
        ("task 9 is handed to the training loop: data", "task to be yielded: the dispatcher has 4, the trace 9")
    ]
    assert "the dispatcher decides differently" in at.state.note
    assert (at.state.send_idx, at.state.rcvd_idx, at.state.loader) == (12, 12, LoaderState.CLOSED)


def test_a_message_that_nobody_sent_is_a_violation(tmp_path: Path) -> None:
    def forget(events: list[tuple[int, ...]]) -> None:
        del events[next(n for n, event in enumerate(events) if event[1] == ev.INDEX_PUT)]

    at = broken(tmp_path / "t", forget)
    said = [state.violation for state in at.walk() if state.violation]
    assert said == ["task 0 comes out of worker 0's index queue, and was not in it"]
    assert at.state.loader is LoaderState.CLOSED


def test_any_events_at_all_are_followed(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    codes = rng.choice(list(ev.EVENTS), 3000)
    small = rng.integers(-2, 6, (3000, 5))
    huge = rng.integers(-(1 << 62), 1 << 62, (3000, 5))
    values = np.where(rng.random((3000, 5)) < 0.05, huge, small)
    names = ("task", "worker", "x", "y", "z")
    rows = [
        {"code": int(code), "tid": int(rng.integers(3)), **dict(zip(names, map(int, value), strict=True))}
        for code, value in zip(codes, values, strict=True)
    ]
    write_process(tmp_path, rows)
    at = replay(tmp_path)
    states = list(at.walk())
    assert any(state.violation for state in states)
    assert len(at) > 2000, "the reader leaves out events that no recorder writes"
    for position in (len(at) - 1, 1500, 3):
        assert at.to(position) == states[position]
        assert render(at)


# --- Places that are looked for ---------------------------------------------------------------------------------------
def test_waits_fetches_and_the_focus_are_found(tmp_path: Path) -> None:
    """Task 9 of the hung run is waited for to its end; worker 1 is in its sample."""
    at = replay(made(tmp_path / "t", Run(**made_trace.HUNG)))
    at.to_longest_wait()
    assert (at.event["code"], at.batch) == (ev.NEXT[0], 9)  # type: ignore[index]
    hung = at.position
    at.to(0)
    seen = []
    while at.to_wait(1) and at.position not in seen:
        seen.append(at.position)
    assert seen[-1] == hung
    assert all(at.wait_times[at.wait_positions.tolist().index(place)] * 10 >= at.wait_times.max() for place in seen)
    at.to_wait(-1)
    assert at.position == (seen[-2] if len(seen) > 1 else hung)
    replay_page.to_focus(at)
    assert [now.doing for now in at.state.workers if now.worker == 1] == ["in sample 38 (task 9)"]
    at.to(0)
    fetched = [at.to_fetch(1) and int(at.event["task"]) for _ in range(6)]  # type: ignore[index]
    assert fetched == [1, 3, 5, 7, 9, 1]
    with pytest.raises(IndexError, match="worker 7 fetched no batch: give one of 0, 1"):
        at.to_fetch(7)


def test_of_a_run_whose_own_code_failed_the_loader_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The headline points at the program's code, which is of no iterator."""
    made_trace.write(tmp_path / "t", Run(**made_trace.HEALTHY))
    first = min((tmp_path / "t").glob("*.jsonl"))
    error = {"kind": "uncaught", "error": "ValueError: boom", "at": ["train.py:5 main"]}
    first.write_text(first.read_text() + json.dumps(error) + "\n")
    assert cli.main(["replay", str(tmp_path / "t")]) == 0
    shown = capsys.readouterr().out
    assert "error: ValueError: boom in the program's own code" in shown
    assert "   iterator 1 of " in shown


@pytest.mark.parametrize("width", [20, 62, 100])
def test_lines_are_wrapped_and_nothing_is_cut(tmp_path: Path, width: int) -> None:
    at = replay(made(tmp_path / "t", Run(**made_trace.HUNG)))
    at.to(len(at))
    wrapped, whole = render(at, width), render(at, width, cut=False)
    assert max(map(len, wrapped)) <= width
    assert "".join("".join(wrapped).split()) == "".join("".join(whole).split())


# --- The command ------------------------------------------------------------------------------------------------------
def test_without_a_terminal_a_state_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "t", Run(**made_trace.HUNG))
    assert cli.main(["replay", str(tmp_path / "t"), "--batch", "3"]) == 0
    shown = capsys.readouterr().out
    assert "batches 4 of 9" in shown
    assert "works on task 3" in shown
    assert "\x1b" not in shown
    assert cli.main(["replay", str(tmp_path / "t")]) == 0
    assert "sample 38" in capsys.readouterr().out
    assert cli.main(["replay", str(tmp_path / "t"), "--at", "0"]) == 0
    assert "event 1 of" in capsys.readouterr().out
    for bad, said in (
        (["--batch", "99"], "replay: batch 99: this run handed out 9"),
        (["--iterator", "3"], "has no iterator 3"),
        (["--event", "99999"], "event 99999: give 0"),
        (["--at", "99"], "99 s: give 0 to"),
    ):
        assert cli.main(["replay", str(tmp_path / "t"), *bad]) == 2
        assert said in capsys.readouterr().err


def test_no_more_of_a_run_is_followed_than_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "t", Run(batches=80))
    followed: list[int] = []
    step = Follower.step
    monkeypatch.setattr(Follower, "step", lambda self, event: followed.append(1) or step(self, event))
    assert cli.main(["replay", str(tmp_path / "t"), "--event", "20"]) == 0
    assert len(followed) == 20


class Terminal:
    """`minidl replay` on a terminal of its own, in a child that is forked, as to import torch takes seconds."""

    def __init__(self, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.shown = ""
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._be_the_child(*arguments)

    def _be_the_child(self, *arguments: str) -> None:
        code: Any = 99
        try:
            os.setsid()
            fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)
            for fd in (0, 1, 2):
                os.dup2(self.slave, fd)
            os.close(self.master)  # else no hang-up would end it if the test is killed
            os.close(self.slave)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ["NO_COLOR"] = "1"
            code = cli.main(["replay", *arguments])
        except SystemExit as left:
            code = left.code
        finally:
            os._exit(code)

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern is shown, behind what was read before; what matched."""
        deadline = time.monotonic() + BOUND
        while (found := re.search(pattern, self.shown, re.DOTALL)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} is not shown; last: {self.shown[-2000:]!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                self.shown += os.read(self.master, 65536).decode()
        self.shown = self.shown[found.end() :]
        return found[0]

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> int:
        """Its exit code; the terminal is as it was before."""
        self.wait_for(r"\x1b\[\?25h\x1b\[\?1049l")
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert termios.tcgetattr(self.slave) == self.before
        return self.code

    def close(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made(tmp_path / "t", Run(**made_trace.HUNG))
    terminal = Terminal(str(tmp_path / "t"))
    yield terminal
    terminal.close()


@pytest.mark.live
def test_keys_step_through_a_run(terminal: Terminal) -> None:
    terminal.wait_for(r"event \d+ of 4\d\d .*in sample 38 \(task 9\)")  # what the trace's headline points at
    for keys, shown in (
        ("g", r"event 0 of 4\d\d .*nothing has happened yet"),
        ("l", r"event 1 of .*the loader starts worker 0"),
        ("\x1b[C\x1b[C", r"event 3 of "),
        ("\x1b[D", r"event 2 of "),
        ("n", r"batches 1 of 9 .*works on task 0"),
        ("nnn", r"batches 4 of 9 .*works on task 3"),
        ("p", r"batches 3 of 9 .*works on task 2"),
        ("j", r"event \d+ of "),
        ("/0.001\x7f2\r", r"0\.00\d+ s "),
        ("b99\r", r"batch 99: this run handed out 9"),
        ("bx\r", r"'x': give a number \(batch\)"),
        ("b8\r", r"batches 9 of 9 .*works on task 8"),
        ("G", r"the run did not end.*sample 38"),
        ("g", r"event 0 of "),
        ("L", r"the training loop asks for a batch.*9 batches of this epoch"),
        ("g", r"event 0 of "),
        ("F", r"in sample 38 \(task 9\)"),
        ("gw", r"the training loop asks for a batch"),
        ("v1\r", r"worker 1"),
        ("v7\r", r"worker 7 fetched no batch: give one of 0, 1"),
        ("?", r"the next long wait for a batch"),
        ("?+", r"20 events a second"),
        ("g ", r"20 events a second  space stop"),
        (" i", r"the trace has no other iterator"),
        ("g", r"event 0 of "),
    ):
        terminal.type(keys)
        terminal.wait_for(shown)
    terminal.type("q")
    assert terminal.end() == 0


@pytest.mark.live
def test_a_long_jump_says_on_the_terminal_how_far_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "LONG", EVERY)
    made(tmp_path / "t", Run(batches=80))
    terminal = Terminal(str(tmp_path / "t"))
    try:
        terminal.wait_for(r"event \d+ of ")
        terminal.type("gG")
        terminal.wait_for(r"\x1b\[Kfollowing the run's events: 512 of \d,\d+\r.*\r\x1b\[K\x1b\[H.*the trace ends here")
        terminal.type("q")
        assert terminal.end() == 0
    finally:
        terminal.close()


@pytest.mark.live
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_the_terminal_is_put_back(terminal: Terminal, how: str) -> None:
    terminal.wait_for(r"event \d+ of ")
    if how == "Ctrl-C":
        terminal.type("\x03")
    else:
        os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.end() == (130 if how == "Ctrl-C" else 128 + signal.SIGTERM)


# --- The page ---------------------------------------------------------------------------------------------------------
def told(page: Any) -> dict[str, Any]:
    """What a page's script reads."""
    script = Parsed(page).inside["data"]
    text = script if script.startswith("{") else gzip.decompress(base64.b64decode(script))
    out: dict[str, Any] = json.loads(text)
    return out


def test_the_page_has_the_states_of_the_replay(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", Run(batches=6, pin=True, simulated=True)))
    at.to(50)
    page = told(at.html())
    assert at.position == 50  # to make a page moves nothing
    assert (page["begin"], page["at"], page["total"], page["ending"]) == (0, 50, len(at), "shut down")
    states = [page["base"]]
    for step in page["steps"]:
        states.append({**states[-1], **step})
    for position, state in enumerate(at.walk()):
        assert states[position] == json.loads(json.dumps(picture(state)))
        assert page["words"][position] == at.words
        assert page["changed"][position] == [[change.field, change.words] for change in at.changed]
        assert page["times"][position] == round(state.time * 1e6)
    assert page["batches"] == [int(position) for position in at.batch_positions]
    assert page["lanes"] == ["consumer", "loader", "pin thread", "worker 0", "worker 1"]
    fetches = [span for span in page["spans"] if page["lanes"][span[0]].startswith("worker")]
    assert sorted(task for *_, task, code in fetches) == list(range(6))
    assert {page["looks"][str(code)]["colour"] for *_, code in fetches} == {paint(ev.FETCH[0]).colour}
    assert any(state["pin"] and state["pin"]["simulated"] for state in states)


def test_a_page_holds_a_window_and_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_page, "MOST_EVENTS", 400)
    at = replay(made(tmp_path / "t", Run(batches=40)))
    assert len(at) > 1200
    at.to(len(at) // 2)
    page = told(at.html())
    assert (page["begin"], len(page["words"])) == (len(at) // 2 - 200, 401)
    assert page["begin"] + page["at"] == at.position
    assert page["handed_out"] + len(page["batches"]) < page["all_batches"] == 40
    part = told(at.html(begin=100, end=120))
    assert (part["begin"], len(part["words"]), part["at"]) == (100, 21, 20)
    assert part["base"] == json.loads(json.dumps(picture(at.to(100))))
    assert len(at.html()) < 60_000
    with pytest.raises(IndexError, match="positions 5 to 99999: this replay has 0 to"):
        at.html(begin=5, end=99999)


def test_a_page_is_written_and_is_the_same_again(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", Run(batches=4)))
    assert at.html(tmp_path / "a.html") == tmp_path / "a.html"
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == at.html() == at.html()
    assert cli.main(["replay", str(tmp_path / "t"), "--html", str(tmp_path / "b.html"), "--event", "0"]) == 0
    assert told((tmp_path / "b.html").read_text())["words"] == told(at.html())["words"]


def test_a_notebook_shows_a_replay_in_a_frame_that_reaches_nothing(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", Run(batches=4)))
    ((tag, attributes),) = Parsed(at._repr_html_()).tags
    assert (tag, attributes["sandbox"], attributes["title"]) == ("iframe", "allow-scripts", "replay of a minidl trace")
    assert attributes["srcdoc"] == at.html()
    for name, inside in Parsed(at.html()).tags:
        assert not {"src", "href", "action", "srcset", "style"} & inside.keys(), name
        assert not [attribute for attribute in inside if attribute.startswith("on")]
    code = Parsed(at.html()).inside["script"] + Parsed(at.html()).inside["style"]
    forbidden = r"\beval\b|Function\(|fetch\(|XMLHttp|WebSocket|import\(|@import|url\(|https?:|HTML|document\.write"
    assert re.findall(forbidden, code) == []
    (policy,) = [a["content"] for name, a in Parsed(at.html()).tags if name == "meta" and "http-equiv" in a]
    assert str(policy).startswith("default-src 'none'")


@pytest.mark.parametrize("compress", [True, False])
def test_what_a_trace_says_stays_text_in_the_page(tmp_path: Path, compress: bool) -> None:
    folder = tmp_path / "a<b>&'\""
    events = [{"code": ev.NEXT[0]}, {"code": ev.TASK_ERROR, "task": 0, "worker": 0, "z": 7}]
    lines = [{"kind": "string", "id": 7, "text": EVIL}, {"kind": "loader", "loader": 1, "dataset": EVIL}]
    write_process(folder, events, pid=7, role=EVIL, lines=lines)
    write_process(tmp_path / "plain", events, pid=7, lines=[{"kind": "string", "id": 7, "text": "x"}])
    page, plain = (html(replay(path), compress=compress) for path in (folder, tmp_path / "plain"))
    assert [tag for tag, _ in Parsed(page).tags] == [tag for tag, _ in Parsed(plain).tags]
    assert "<script>alert(1)</script>" in told(page)["words"][2]
    assert Parsed(page).inside["title"] == f"iterator 1 of {folder.name}"


@pytest.mark.live
@needs_chromium
def test_a_browser_draws_it(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", Run(**made_trace.HUNG)))
    at.to(len(at))
    page = at.html(tmp_path / "page.html")
    assert isinstance(page, Path)
    dom, root = opened(page, tmp_path / "profile")
    parsed = Parsed(dom).tags
    assert root.get("data-states") == str(len(at) + 1), "the page's script has failed"
    chips = [a["data-task"] for _, a in parsed if "data-task" in a]
    assert chips == ["10", "12", "11", "9"]  # the reorder buffer, worker 1's queue, worker 1
    assert "in sample 38 (task 9)" in dom
    assert "the run did not: it was killed" in dom


def test_a_replay_has_the_headline_as_title(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "t", Run(**made_trace.HUNG | {"poll": 5_000_000_000}))
    assert cli.main(["replay", str(tmp_path / "t"), "--html", str(tmp_path / "page.html")]) == 0
    page = told((tmp_path / "page.html").read_text())
    title = "hung for 30.0 s, since 0.01 s: waiting for worker 1 (pid 1101), in sample 38"
    assert page["headline"].startswith(title)
    assert page["wrong"]
    capsys.readouterr()
    assert cli.main(["replay", str(tmp_path / "t"), "--event", "3"]) == 0
    assert capsys.readouterr().out.startswith(title)


def test_with_slabs_the_worker_sends_and_no_feeder(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", Run(**made_trace.SLABS))
    told_all = [describe(trace, event) for event in trace.events if event["worker"] >= 0]
    assert not [words for words in told_all if "feeder" in words and "index queue" not in words]
    assert "worker 1 takes slab 2 (1.0 MiB, new) for task 5" in told_all
    assert "worker 1 takes slab 0 (1.0 MiB, recycled) for task 7" in told_all
    assert "worker 1 begins to write task 7 (900 B) to its socket" in told_all
    assert "nothing in the reader's process refers to slab 0 of worker 0 any more: freed" in told_all
    sent = np.flatnonzero((trace.events["code"] == ev.SLAB_SEND) & (trace.events["task"] == 7))
    before, after = (Replay(trace) for _ in range(2))
    own = np.flatnonzero(trace.events["loader"] == 1)
    place = int(np.searchsorted(own, sent[0]))
    before.to(place)
    after.to(place + 1)
    assert after.state.bytes_in_flight - before.state.bytes_in_flight == made_trace.MIB
