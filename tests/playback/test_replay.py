"""Replay: equal to the live loader at every moment, the same backwards, and good for traces of any run."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import fcntl
import functools
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
import workloads as wl
from damages import TRACES
from made_trace import Run, made
from oracle_trace import rows_of, trace_of, write_process
from pages import EVIL, Parsed, needs_chromium, opened

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
from minidl.tracefile.events import CALLS, Message
from minidl.tracefile.reader import Trace, read_trace
from minidl.views import replay_page
from minidl.views.colours import paint
from minidl.views.replay_page import html, picture, replay
from minidl.views.replay_terminal import render

DISPATCH = ("send_idx", "rcvd_idx", "tasks_outstanding", "workers_num_tasks", "workers_status")


# --- The live loader --------------------------------------------------------------------------------------------------
def live(iterator: Any) -> dict[str, Any]:
    """What a live iterator says of itself under upstream's names."""
    tasks = {task: (info[0], len(info) == 2) for task, info in iterator._task_info.items()}
    return {name: _plain(getattr(iterator, f"_{name}")) for name in DISPATCH} | {"task_info": tasks}


def replayed(state: ProtocolState) -> dict[str, Any]:
    """The same of a replayed state."""
    tasks = {task: dataclasses.astuple(info) for task, info in state.task_info.items()}
    return {name: _plain(getattr(state, name)) for name in DISPATCH} | {"task_info": tasks}


def _plain(value: Any) -> Any:
    return value if isinstance(value, int) else list(value)


Moments = list[tuple[float, dict[str, Any]]]
"""When a live iterator was asked (s since the trace's first event), and what it said."""


def since_begin(trace: Trace, said: list[tuple[int, dict[str, Any]]]) -> Moments:
    """These moments, which are ns of the clock, counted from the trace's first event."""
    return [((at - int(trace.events["time"][0])) / 1e9, words) for at, words in said]


def recorded(
    path: Path, epochs: int = 1, leave_at: int = 1000, ring_bytes: int | None = None, **options: Any
) -> tuple[Trace, Moments]:
    """Run a live loader, recorded; ask it after each batch. leave_at: in all epochs but the last."""
    said = []
    with minidl.trace(path, ring_bytes=ring_bytes):
        loader = minidl.DataLoader(num_workers=2, **{"batch_size": 2} | options)
        for epoch in range(epochs):
            iterator = iter(loader)
            for number in range(1000):
                said.append((time.monotonic_ns(), live(iterator)))
                if number > leave_at and epoch < epochs - 1:
                    break
                try:
                    next(iterator)
                except StopIteration:
                    break
                except ZeroDivisionError:
                    pass
        iterator.close()
        del iterator
        loader.close()
    trace = read_trace(path)
    return trace, since_begin(trace, said)


def violations(at: Replay) -> list[str]:
    return [state.violation for state in at.walk() if state.violation]


LOADERS: dict[str, dict[str, Any]] = {
    "map": {"dataset": wl.Tensors(30)},
    "persistent": {"dataset": wl.Tensors(24), "persistent_workers": True, "epochs": 3, "leave_at": 2},
    "out of order": {"dataset": wl.Tensors(30), "in_order": False},
    "iterable": {"dataset": wl.Stream(21)},
    "iterable again": {"dataset": wl.Stream(21), "persistent_workers": True, "epochs": 2},
    "pinned": {"dataset": wl.Tensors(30), "pin_memory": True},
    "pinned again": {
        "dataset": wl.Tensors(24), "pin_memory": True, "persistent_workers": True, "epochs": 2, "leave_at": 3,
    },
    "errors": {"dataset": wl.At(20, 7, lambda: 1 // 0)},
}  # fmt: skip


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Trace, Moments]]:
    """A loader's trace and moments by its name; each is recorded once."""

    @functools.cache
    def found(kind: str) -> tuple[Trace, Moments]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MINIDL_SIMULATE_DEVICE", "1")
            return recorded(tmp_path_factory.mktemp("recorded") / "t", **LOADERS[kind])

    return found


@pytest.mark.live
@pytest.mark.parametrize("kind", LOADERS)
def test_the_state_is_the_live_loaders_at_every_moment(kind: str, recordings: Any) -> None:
    trace, moments = recordings(kind)
    at = replay(trace)
    assert len(moments) > 10
    for moment, said in moments + moments[::-1]:
        assert replayed(at.at(moment)) == said
        at.forward(40)  # past it, and back
    assert violations(at) == []
    assert all(state.known for state in at.walk())
    assert (at.state.loader, at.ending) == (LoaderState.CLOSED, "shut down")
    assert {(one.state, one.exit_code, one.index_queue) for one in at.state.workers} == {(WorkerState.ENDED, 0, ())}
    assert (at.state.result_queue, at.state.ready_queue, at.state.bytes_in_flight) == ((), (), 0)
    assert at.state.simulated == kind.startswith("pinned")


@pytest.mark.live
def test_the_state_is_the_live_loaders_while_it_waits_and_batches_lie_in_the_reorder_buffer(tmp_path: Path) -> None:
    gate, main, asked = tmp_path / "gate", threading.get_native_id(), []

    def quiet() -> bool:
        """Two batches lie in the reorder buffer, and the loader and worker 1 have sat down to wait."""
        events = read_trace(tmp_path / "t").events
        last = {int(row["tid"]): int(row["code"]) for row in events}
        workers = {int(row["worker"]): int(row["tid"]) for row in events[events["code"] == ev.WORKER_READY]}
        waits = last.get(main) == ev.RESULT_GET[0] and last.get(workers.get(1, 0)) == ev.INDEX_GET[0]
        return waits and int((events["code"] == ev.REORDER_STORE).sum()) == 2

    def ask(iterator: Any) -> None:
        deadline = time.monotonic() + wl.BOUND
        while not (calm := quiet()) and time.monotonic() < deadline:
            time.sleep(0.01)
        asked.append((calm, time.monotonic_ns(), live(iterator), [worker.pid for worker in iterator._workers]))
        gate.touch()

    with minidl.trace(tmp_path / "t"):
        iterator = iter(minidl.DataLoader(wl.Gate(16, gate), batch_size=2, num_workers=2))
        asker = threading.Thread(target=ask, args=(iterator,))
        asker.start()
        assert [batch.tolist() for batch in iterator] == [[n, n + 1] for n in range(0, 16, 2)]
        asker.join()
        iterator.close()
        del iterator
    at = replay(tmp_path / "t")
    ((calm, time_ns, said, pids),) = asked
    assert calm
    ((moment, said),) = since_begin(at.trace, [(time_ns, said)])
    for _ in range(2):
        state = at.at(moment)
        assert replayed(state) == said
        assert (state.reorder_buffer, state.loader) == ((1, 3), LoaderState.WAITING)
        assert (state.consumer, state.in_hand) == (None, None)
        assert [worker.pid for worker in state.workers] == pids
        stuck, idle = state.workers
        assert (stuck.state, stuck.task, stuck.position, stuck.index) == (WorkerState.FETCHING, 0, 0, 0)
        assert [message.task for message in stuck.index_queue] == [2]
        assert (idle.state, idle.index_queue) == (WorkerState.WAITING, ())
        at.to(len(at))


@pytest.mark.live
def test_counts_begin_anew_before_persistent_workers_are_told_of_the_epoch(recordings: Any) -> None:
    resuming = [state for state in replay(recordings("persistent")[0]).walk() if state.loader is LoaderState.RESUMING]
    assert {(state.send_idx, state.rcvd_idx, state.tasks_outstanding) for state in resuming} == {(0, 0, 0)}
    told = {(m.worker, m.kind) for state in resuming for worker in state.workers for m in worker.index_queue}
    assert {(worker, Message.RESUME) for worker in range(2)} <= told
    answers = {(m.worker, m.stage) for s in resuming for m in s.result_queue if m.kind is Message.RESUME}
    stages = (MessageStage.ENQUEUED, MessageStage.WRITING, MessageStage.READ)
    assert {(worker, stage) for worker in range(2) for stage in stages} <= answers


@pytest.mark.live
@pytest.mark.parametrize("name", ["persistent", "shutdown-error", "workers-0"])
def test_the_table_of_events_and_the_lifecycles_tell_the_same_call(name: str, recordings: Any) -> None:
    """After a yield, `next` has handed its batch over, and its end follows at once."""
    trace = recordings(name)[0] if name in LOADERS else read_trace(TRACES / f"{name}.minidl")
    run, calls = Replay(trace), OpenCalls()
    for row in run.rows:
        state, event = run.forward(), run.trace.events[row : row + 1]
        calls.take(event)
        if event["code"][0] in {*CALLS, *LoaderReplay.READS} - {ev.YIELD}:
            assert [one.call for one in calls.open()] == [state.call], run.words


@pytest.mark.heavy
@pytest.mark.parametrize("most_kept", [7, stepper.MOST_KEPT])
def test_going_back_is_going_forward_mirrored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_kept: int) -> None:
    """However few copies are kept of a run, the states are the same."""
    at = replay(made(tmp_path / "t", batches=10, pin=True, epochs=2))
    there = [(state, at.changed) for state in at.walk()]
    assert len(there) == len(at) + 1 > 500
    monkeypatch.setattr(stepper, "EVERY", 10)
    monkeypatch.setattr(stepper, "MOST_KEPT", most_kept)
    at = replay(at.trace)
    at.to(len(at))
    for position in range(len(at) - 1, -1, -1):
        assert (at.back(), at.changed, at.position) == (*there[position], position)
    assert at.back() == there[0][0]
    assert len(at._kept) == min(most_kept, 1 + len(at) // 10)
    for position in np.random.default_rng(0).integers(0, len(at) + 1, 300).tolist():
        assert (at.to(position), at.changed) == there[position]


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The events that are followed from now on."""
    seen: list[Any] = []
    step = Follower.step
    monkeypatch.setattr(Follower, "step", lambda self, event: seen.append(event) or step(self, event))
    return seen


def test_a_step_back_follows_no_more_than_a_block_of_events_again(tmp_path: Path, followed: list[Any]) -> None:
    at = replay(made(tmp_path / "t", batches=80))
    assert len(at) > 4 * EVERY
    at.to(len(at))
    for go in (at.back, lambda: at.to(3 * EVERY), at.back, lambda: at.to(2 * EVERY - 1), at.forward):
        followed.clear()
        go()
        assert len(followed) <= EVERY


def test_no_more_of_a_run_is_followed_than_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], followed: list[Any]
) -> None:
    made(tmp_path / "t", batches=80)
    assert cli.main(["replay", str(tmp_path / "t"), "--event", "20"]) == 0
    assert len(followed) == 20


def test_of_a_long_way_it_is_told_how_far_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, told = replay(made(tmp_path / "t", batches=80)), []
    at.progress = lambda done, of: told.append((done, of))
    at.to(len(at))
    monkeypatch.setattr(stepper, "LONG", 3 * EVERY)
    at.to(0)
    at.to(len(at))
    at.back()
    assert told == [], "it is no long way, and then the copies that are kept save it"
    again, way = replay(at.trace), len(at) - 1
    again.progress = at.progress
    again.to(len(at))
    assert told == [(done, way) for done in [*range(EVERY, way, EVERY), way]]


# --- Where to go ------------------------------------------------------------------------------------------------------
def test_batches_are_where_they_are_in_the_consumers_hands(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", batches=5, epochs=2))
    assert (at.batches, at.batch) == (10, 0)
    seen, back = [], []
    while at.next_batch() and at.position < len(at):
        assert at.state.loader is LoaderState.IDLE
        seen.append((at.state.epoch, at.state.consumer, at.state.yielded, at.batch))
    assert seen == [(e, n, n + 1, e * 5 + n + 1) for e in range(2) for n in range(5)]
    while at.previous_batch() and at.position > 0:
        back.append((at.state.epoch, at.state.consumer, at.state.yielded, at.batch))
    assert back == seen[::-1]
    assert at.to_batch(7) == replay(at.trace).to_batch(7)
    assert (at.state.epoch, at.state.consumer) == (1, 2)
    at.forward()
    assert at.previous_batch() == at.to_batch(7)


def test_positions_events_moments_and_rows(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", **made_trace.HEALTHY)
    at, times = replay(tmp_path / "t"), trace.events["time"]  # a path will do
    assert (at.event, at.words, at.changed) == (None, "nothing has happened yet", ())
    assert at.forward(3) == at.to(3)
    assert at.event == trace.events[at.rows[2]]
    assert at.to_row(int(at.rows[99])) == at.to(100)
    for position in (1, 50, len(at)):
        now = times[at.rows[position - 1]]
        at.at(int(now - times[0]) / 1e9)
        assert at.event["time"] == now
        assert at.position == len(at) or times[at.rows[at.position]] > now
    assert at.forward(7) == at.to(len(at))
    assert at.back(10**6) == at.to(0)
    assert re.fullmatch(r"<Replay of iterator 1 of .*: at 0 of \d+ events; shut down>", repr(at))


@pytest.mark.parametrize(
    ("go", "where", "said"),
    [
        ("at", float("nan"), r"nan s: give 0 to 0\.\d{6} s"),
        ("at", -1.0, "-1 s: give 0 to"),
        ("at", 1e6, r"1e\+06 s: give 0 to"),
        ("to", 999999, r"event 999999: give 0 \(before the first\) to \d+ "),
        ("to_row", 999999, "row 999999 is not an event of iterator 1"),
        ("to_batch", 12, "batch 12: this run handed out 12, counted from 0"),
        ("to_fetch", 7, "worker 7 fetched no batch: give one of 0, 1"),
    ],
)
def test_a_place_that_is_not_there_is_an_error_and_moves_nothing(
    healthy: Trace, go: str, where: float, said: str
) -> None:
    at = replay(healthy)
    at.to(50)
    with pytest.raises(IndexError, match=said):
        getattr(at, go)(where)
    assert at.position == 50


def test_a_loader_is_chosen_by_its_number(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", Run(batches=4), Run(batches=9, loader=2, first_pid=3000))
    assert (replay(trace).loader, replay(trace, 1).batches) == (2, 4)
    with pytest.raises(ValueError, match=r"has no iterator 7: it has 1 \(\d+ events\), 2 \(\d+ events\)"):
        replay(trace, 7)
    with pytest.raises(ValueError, match="no iterator has recorded anything"):
        replay(trace_of(tmp_path / "none", []))


def test_the_order_is_causal() -> None:
    rows = np.zeros(6, dtype=[("time", "i8"), ("seq", "u8"), ("process", "u4")])
    # Process 0 emitted times 10, 30, 20 (a thread that had lost the processor), 40; process 1 emitted 25 and 35.
    rows["time"], rows["seq"], rows["process"] = [10, 20, 25, 30, 35, 40], [1, 3, 1, 2, 2, 4], [0, 0, 1, 0, 1, 0]
    ordered = rows[causal_order(rows)]
    assert ordered[["process", "seq"]].tolist() == [(0, 1), (1, 1), (0, 2), (0, 3), (1, 2), (0, 4)]
    assert len(causal_order(rows[:0])) == 0


def test_waits_fetches_and_the_focus_are_found(hung: Trace) -> None:
    """Task 9 of the hung run is waited for to its end; worker 1 is in its sample."""
    at = replay(hung)
    at.to_longest_wait()
    assert (at.event["code"], at.batch) == (ev.NEXT[0], 9)  # type: ignore[index]
    longest, seen = at.position, []
    at.to(0)
    while at.to_wait(1) and at.position not in seen:
        seen.append(at.position)
    assert seen[-1] == longest
    took = dict(zip(at.wait_positions.tolist(), at.wait_times.tolist(), strict=True))
    assert seen == [position for position in took if took[position] * 10 >= max(took.values())]
    at.to_wait(-1)
    assert at.position == [longest, *seen][-2]
    replay_page.to_focus(at)
    assert at.state.worker(1).doing == "in sample 38 (task 9)"
    at.to(0)
    assert [at.to_fetch(1) and int(at.event["task"]) for _ in range(6)] == [1, 3, 5, 7, 9, 1]  # type: ignore[index]


# --- What is shown ----------------------------------------------------------------------------------------------------
def test_a_task_is_in_one_place_at_a_time_and_takes_its_bytes_along(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", batches=6, workers=1, prefetch_factor=1))
    places: list[tuple[str, MessageStage | None]] = []
    most = 0
    for state in at.walk():
        sent = [m.stage for worker in state.workers for m in worker.index_queue if m.task == 2]
        here = [("index queue", stage) for stage in sent]
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
        *(("index queue", stage) for stage in (S.ENQUEUED, S.WRITING, S.WRITTEN)), ("worker", None),
        *(("result queue", stage) for stage in (S.ENQUEUED, S.PICKLING, S.PICKLED, S.WRITING, S.WRITTEN, S.READ)),
        ("result queue", S.REBUILDING), ("result queue", S.REBUILT), ("hand", None), ("consumer", None),
    ]  # fmt: skip
    assert (most, at.state.bytes_in_flight) == (made_trace.MIB + 900, 0)


def test_changes_name_the_fields_and_say_what_became_of_them(healthy: Trace) -> None:
    at = replay(healthy)
    told: dict[str, list[str]] = {}
    for _ in at.walk(1):
        told.setdefault(ev.EVENTS[int(at.event["code"])].name, [str(change) for change in at.changed])
    assert told["task_assigned"] == [
        "send_idx: 0 → 1", "tasks_outstanding: 0 → 1", "task_info[0]: now worker 0, outstanding",
        "workers_num_tasks[0]: 0 → 1",
    ]  # fmt: skip
    assert told["index_put"] == ["workers[0].index_queue[task 0]: now enqueued"]
    assert told["reorder_store"] == ["reorder_buffer: none → 3", "in_hand: 3 → none"]
    assert told["shutdown"][0].endswith("→ STOPPING_PIN")
    assert changes(at.state, at.state) == ()


def test_every_event_has_words_of_its_own(tmp_path: Path) -> None:
    rows = rows_of("code", *((code,) for code in ev.EVENTS), task=3, worker=1, x=1, y=2, z=3)
    trace = trace_of(tmp_path, rows, lines=[{"kind": "string", "id": 3, "text": "boom \x1b[2J"}])
    told = [describe(trace, row) for row in trace.events]
    assert len(set(told)) == len(told)
    assert not any("{" in words or "\x1b" in words for words in told)
    assert any(words.endswith("boom \\x1b[2J") for words in told)


@pytest.mark.parametrize(
    ("code", "xyz", "words"),
    [
        (ev.SAMPLE[0], (0, 65, 0), "worker 1 asks the dataset for sample 65 of task 3"),
        (ev.SAMPLE[0], (2, -1, 0), "worker 1 asks the dataset for the sample at position 2 of task 3"),
        (ev.SAMPLE[0], (-1, -1, 0), "worker 1 asks the dataset for the samples of task 3"),
        (ev.FETCH[0], (1, 0, 0), "worker 1 begins to fetch task 3: 1 sample"),
        (ev.FETCH[0], (4, 0, 0), "worker 1 begins to fetch task 3: 4 samples"),
        (ev.STATE_TAKEN, (1, 0, 0), "the program takes the loader's state: 1 batch"),
        (ev.SHARE, (7, 1, 4), "the sampler has epoch 7, and gives rank 1 of 4 its share"),
        (
            ev.SLAB_LOCK, (1 << 20, 0, 1),
            "the loader has page-locked the 1.0 MiB of a new slab of worker 1 for a device (simulated)",
        ),
        (ev.SLAB_LOCK, (0, 0, 0), "the loader could not page-lock a new slab of worker 1 for a device"),
    ],
)  # fmt: skip
def test_an_event_says_how_many_and_which(tmp_path: Path, code: int, xyz: tuple[int, ...], words: str) -> None:
    trace = trace_of(tmp_path, rows_of("code x y z", (code, *xyz), task=3, worker=1))
    assert describe(trace, trace.events[0]) == words


def test_with_slabs_the_worker_sends_and_no_feeder(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", **made_trace.SLABS)
    told = [describe(trace, event) for event in trace.events if event["worker"] >= 0]
    assert not [words for words in told if "feeder" in words and "index queue" not in words]
    assert {
        "worker 1 takes slab 2 (1.0 MiB, new) for task 5",
        "worker 1 takes slab 0 (1.0 MiB, recycled) for task 7",
        "worker 1 begins to write task 7 (900 B) to its socket",
        "nothing in the reader's process refers to slab 0 of worker 0 any more: freed",
    } <= set(told)
    at = Replay(trace)
    (sent,) = np.flatnonzero((trace.events["code"] == ev.SLAB_SEND) & (trace.events["task"] == 7))
    after = at.to_row(int(sent)).bytes_in_flight
    assert after - at.back().bytes_in_flight == made_trace.MIB


def test_pretended_pinning_is_called_simulated(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", batches=4, pin=True, simulated=True))
    (started,) = np.flatnonzero(at.trace.events["code"] == ev.PIN_START)
    assert at.to_row(int(started)).simulated
    assert at.words == "the pin thread runs (simulated)"
    assert any("pin thread" in line and "(simulated)" in line for line in render(at))


# --- Runs that did not go well ----------------------------------------------------------------------------------------
def test_a_killed_run_is_replayed_to_where_it_stopped(hung: Trace) -> None:
    at = replay(hung)
    state = at.to(len(at))
    assert (at.batches, state.rcvd_idx, state.yielded) == (9, 9, 9)
    assert (at.ending, repr(at).endswith("; it did not end>")) == ("", True)
    assert (state.loader, state.waiting_for, state.reorder_buffer) == (LoaderState.WAITING, 9, (10, 12))
    stuck = state.worker(1)
    assert (stuck.state, stuck.task, stuck.position, stuck.index) == (WorkerState.FETCHING, 9, 2, 38)
    assert stuck.doing == "in sample 38 (task 9)"
    assert any("the run did not end" in line for line in render(at))
    with pytest.raises(KeyError, match=r"worker 5 is in no event so far: there are \[0, 1\]"):
        state.worker(5)


@pytest.mark.live
@pytest.mark.usefixtures("no_sigchld")
def test_a_worker_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with minidl.trace(tmp_path / "t"):
        with monkeypatch.context() as patch:  # for the waits of the epoch, and not for the joins
            wl.impatient(patch)
            iterator = iter(minidl.DataLoader(wl.At(20, 7, wl.kill_myself), batch_size=2, num_workers=2))
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            list(iterator)
        said = [(time.monotonic_ns(), live(iterator))]
        iterator.close()
        del iterator
    at = replay(tmp_path / "t")
    assert violations(at) == []
    ((moment, last),) = since_begin(at.trace, said)
    state = at.at(moment)
    assert replayed(state) == last
    assert (state.worker(1).exit_code, state.worker(1).state) == (-signal.SIGKILL, WorkerState.FETCHING)
    assert ("found dead" in state.note, state.known) == (True, False)
    assert at.to(len(at)).loader is LoaderState.CLOSED


@pytest.mark.live
def test_a_ring_tells_what_it_can_until_the_next_epoch_begins(tmp_path: Path) -> None:
    options = {"dataset": wl.Tensors(80), "batch_size": 4, "persistent_workers": True, "epochs": 5}
    trace, moments = recorded(tmp_path / "t", ring_bytes=1 << 16, **options)
    at = replay(trace)
    assert any("overwritten" in problem for problem in trace.problems)
    states = list(at.walk())
    first = [state.known for state in states].index(True)
    assert [state.known for state in states] == [False] * first + [True] * (len(states) - first)
    assert "overwritten" in states[0].note
    assert "until the next epoch begins" in states[0].note
    assert at.to(first)
    assert int(at.event["code"]) == ev.EPOCH[0]
    assert violations(at) == []
    later = [(moment, said) for moment, said in moments if moment > states[first].time]
    assert len(later) >= 10
    for moment, said in later:
        assert replayed(at.at(moment)) == said


@pytest.mark.live
def test_a_ring_within_one_epoch_comes_to_know_the_tasks_again(tmp_path: Path) -> None:
    trace, moments = recorded(tmp_path / "t", ring_bytes=1 << 16, dataset=wl.Tensors(600), batch_size=4)
    at = replay(trace)
    assert not any(state.known or state.violation for state in at.walk())
    assert at.to(0).send_idx is None
    for moment, said in moments[-12:-5]:  # later, the workers are told to leave
        assert replayed(at.at(moment)) == said
    assert (at.to(len(at)).result_queue, at.state.worker(0).index_queue) == ((), ())


@pytest.mark.live
def test_an_iterator_without_workers(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        assert len(list(minidl.DataLoader(wl.Tensors(10), batch_size=4))) == 3
    at = replay(tmp_path / "t")
    doing = {state.worker(-1).doing for state in at.walk() if state.workers}
    assert {"in sample 5 (task 1)", "collating task 2"} <= doing
    assert (at.batches, at.ending) == (3, "the epoch was over")
    assert (at.state.send_idx, at.state.task_info, at.state.known) == (None, {}, True)
    assert any("no workers" in line for line in render(at))


@pytest.mark.live
def test_torchs_own_loader_observed(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        context = minidl.observe("fork")
        loader = torch.utils.data.DataLoader(wl.Numbers(24), 2, num_workers=2, multiprocessing_context=context)
        assert len(list(loader)) == 12
        del loader
    at = replay(tmp_path / "t")
    states = list(at.walk())
    assert not any(state.violation or state.known for state in states)
    assert "observed" in states[0].note
    assert max(state.send_idx or 0 for state in states) == at.batches == 12
    assert {LoaderState.WAITING, LoaderState.IDLE} <= {state.loader for state in states}
    assert {m.task for state in states for m in state.result_queue if m.kind is Message.RESULT} == set(range(12))
    assert (states[-1].result_queue, states[-1].task_info) == ((), {})


def yield_another(events: list[tuple[int, ...]]) -> None:
    where = [n for n, event in enumerate(events) if event[1] == ev.YIELD][4]
    events[where] = (*events[where][:4], 9, *events[where][5:])


def forget_a_put(events: list[tuple[int, ...]]) -> None:
    del events[next(n for n, event in enumerate(events) if event[1] == ev.INDEX_PUT)]


@pytest.mark.parametrize(
    ("change", "words", "violation"),
    [
        (
            yield_another, "task 9 is handed to the training loop: data",
            "task to be yielded: the dispatcher has 4, the trace 9",
        ),
        (forget_a_put, "", "task 0 comes out of worker 0's index queue, and was not in it"),
        (list, "", ""),
    ],
    ids=["another task is yielded", "nobody sent it", "as it was"],
)  # fmt: skip
def test_what_the_protocol_does_not_allow_is_said_and_stepping_goes_on(
    tmp_path: Path, change: Callable[[list[tuple[int, ...]]], None], words: str, violation: str
) -> None:
    processes = Run(**made_trace.HEALTHY).run()
    main = processes[0].events
    primed = next(at for at, event in enumerate(main) if event[1] == ev.NEXT[0])
    main.insert(primed, (main[primed][0], ev.CONSUMER[0], 1, processes[0].pid, -1, -1, 0, 0, 0))
    change(main)
    for process in processes:
        process.write(tmp_path)
    at = replay(tmp_path)
    said = [(at.words, state.violation) for state in at.walk() if state.violation]
    assert [one for _, one in said] == ([violation] if violation else [])
    assert (at.state.send_idx, at.state.rcvd_idx, at.state.loader) == (12, 12, LoaderState.CLOSED)
    if words:
        assert said[0][0] == words
        assert "the dispatcher decides differently" in at.state.note


def test_any_events_at_all_are_followed(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    codes = rng.choice(list(ev.EVENTS), 3000)
    small, huge = rng.integers(-2, 6, (3000, 5)), rng.integers(-(1 << 62), 1 << 62, (3000, 5))
    values = np.where(rng.random((3000, 5)) < 0.05, huge, small)
    tids = [int(rng.integers(3)) for _ in range(3000)]
    write_process(tmp_path, rows_of("code tid task worker x y z", *np.column_stack([codes, tids, values]).tolist()))
    at = replay(tmp_path)
    states = list(at.walk())
    assert any(state.violation for state in states)
    assert len(at) > 2000, "the reader leaves out events that no recorder writes"
    for position in (len(at) - 1, 1500, 3):
        assert at.to(position) == states[position]
        assert render(at)


# --- The command ------------------------------------------------------------------------------------------------------
@pytest.fixture
def hangs(tmp_path: Path) -> str:
    """The path of a trace of a run that hangs for long."""
    return str(made_trace.write(tmp_path / "t", Run(**made_trace.HUNG | {"poll": 5_000_000_000})))


@pytest.mark.parametrize("width", [20, 62, 100])
def test_lines_are_wrapped_and_nothing_is_cut(hung: Trace, width: int) -> None:
    at = replay(hung)
    at.to(len(at))
    wrapped, whole = render(at, width), render(at, width, cut=False)
    assert max(map(len, wrapped)) <= width
    assert "".join("".join(wrapped).split()) == "".join("".join(whole).split())


TITLE = "hung for 30.0 s, since 0.01 s: waiting for worker 1 (pid 1101), in sample 38"


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        ("", 0, ["sample 38"]),
        ("--batch 3", 0, ["batches 4 of 9", "works on task 3"]),
        ("--at 0", 0, ["event 1 of"]),
        ("--event 3", 0, [TITLE]),
        ("--batch 99", 2, ["replay: batch 99: this run handed out 9"]),
        ("--iterator 3", 2, ["has no iterator 3"]),
        ("--event 99999", 2, ["event 99999: give 0"]),
        ("--at 99", 2, ["99 s: give 0 to"]),
    ],
)
def test_without_a_terminal_a_state_is_printed(
    hangs: str, capsys: pytest.CaptureFixture[str], asked: str, code: int, said: list[str]
) -> None:
    assert cli.main(["replay", hangs, *asked.split()]) == code
    shown = capsys.readouterr()
    assert [words for words in said if words not in (shown.err if code else shown.out)] == []
    assert "\x1b" not in shown.out
    assert shown.out.startswith(TITLE) == (code == 0)


def test_of_a_run_whose_own_code_failed_the_loader_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The headline points at the program's code, which is of no iterator."""
    made_trace.write(tmp_path / "t", Run(**made_trace.HEALTHY))
    with min((tmp_path / "t").glob("*.jsonl")).open("a") as side:
        side.write('{"kind": "uncaught", "error": "ValueError: boom", "at": ["train.py:5 main"]}\n')
    assert cli.main(["replay", str(tmp_path / "t")]) == 0
    shown = capsys.readouterr().out
    assert "error: ValueError: boom in the program's own code" in shown
    assert "   iterator 1 of " in shown


class Terminal:
    """`minidl replay` on a terminal of its own, in a child that is forked, as to import torch takes seconds."""

    def __init__(self, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.shown = ""
        self.ended = False
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

    def wait_for(self, pattern: str) -> None:
        """Read until the pattern is shown, behind what was read before."""
        deadline = time.monotonic() + wl.BOUND
        while (found := re.search(pattern, self.shown, re.DOTALL)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} is not shown; last: {self.shown[-2000:]!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                self.shown += os.read(self.master, 65536).decode()
        self.shown = self.shown[found.end() :]

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> int:
        """Its exit code; the terminal is as it was before."""
        self.wait_for(r"\x1b\[\?25h\x1b\[\?1049l")
        self.ended = True
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert termios.tcgetattr(self.slave) == self.before
        return code


@contextlib.contextmanager
def shown_in_a_terminal(*arguments: str) -> Iterator[Terminal]:
    """Start `minidl replay`, and kill it if it has not ended."""
    terminal = Terminal(*arguments)
    try:
        terminal.wait_for(r"event \d+ of ")
        yield terminal
    finally:
        if not terminal.ended:
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)
        os.close(terminal.master)
        os.close(terminal.slave)


KEYS = [
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
    ("gL", r"the training loop asks for a batch.*9 batches of this epoch"),
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
]


@pytest.mark.live
def test_keys_step_through_a_run(hung: Trace) -> None:
    with shown_in_a_terminal(str(hung.path)) as terminal:
        terminal.wait_for(r"in sample 38 \(task 9\)")  # what the trace's headline points at
        for keys, shown in KEYS:
            terminal.type(keys)
            terminal.wait_for(shown)
        terminal.type("q")
        assert terminal.end() == 0


@pytest.mark.live
def test_a_long_jump_says_on_the_terminal_how_far_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "LONG", EVERY)
    made(tmp_path / "t", batches=80)
    with shown_in_a_terminal(str(tmp_path / "t")) as terminal:
        terminal.type("gG")
        terminal.wait_for(r"\x1b\[Kfollowing the run's events: 512 of \d,\d+\r.*\r\x1b\[K\x1b\[H.*the trace ends here")
        terminal.type("\x03")
        assert terminal.end() == 130


@pytest.mark.live
def test_the_terminal_is_put_back_by_a_signal(hung: Trace) -> None:
    with shown_in_a_terminal(str(hung.path)) as terminal:
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.end() == 128 + signal.SIGTERM


# --- The page ---------------------------------------------------------------------------------------------------------
def told(page: Any) -> dict[str, Any]:
    """What a page's script reads."""
    script = Parsed(page).inside["data"]
    text = script if script.startswith("{") else gzip.decompress(base64.b64decode(script))
    out: dict[str, Any] = json.loads(text)
    return out


def test_the_page_has_the_states_of_the_replay(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", batches=6, pin=True, simulated=True))
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
    assert page["batches"] == at.batch_positions.tolist()
    assert page["lanes"] == ["consumer", "loader", "pin thread", "worker 0", "worker 1"]
    fetches = [span for span in page["spans"] if page["lanes"][span[0]].startswith("worker")]
    assert sorted(task for *_, task, code in fetches) == list(range(6))
    assert {page["looks"][str(code)]["colour"] for *_, code in fetches} == {paint(ev.FETCH[0]).colour}
    assert any(state["pin"] and state["pin"]["simulated"] for state in states)


def test_a_page_holds_a_window_and_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_page, "MOST_EVENTS", 400)
    at = replay(made(tmp_path / "t", batches=40))
    assert len(at) > 1200
    at.to(len(at) // 2)
    page = told(at.html())
    assert (page["begin"], len(page["words"]), page["begin"] + page["at"]) == (len(at) // 2 - 200, 401, at.position)
    assert page["handed_out"] + len(page["batches"]) < page["all_batches"] == 40
    part = told(at.html(begin=100, end=120))
    assert (part["begin"], len(part["words"]), part["at"]) == (100, 21, 20)
    assert part["base"] == json.loads(json.dumps(picture(at.to(100))))
    assert len(at.html()) < 60_000
    with pytest.raises(IndexError, match="positions 5 to 99999: this replay has 0 to"):
        at.html(begin=5, end=99999)


def test_a_page_is_written_the_same_again_with_the_headline_as_title(tmp_path: Path, hangs: str) -> None:
    at = replay(read_trace(hangs))
    assert at.html(tmp_path / "a.html") == tmp_path / "a.html"
    again = at.html()
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == again
    assert cli.main(["replay", hangs, "--html", str(tmp_path / "b.html"), "--event", "0"]) == 0
    page = told((tmp_path / "b.html").read_text())
    assert page["words"] == told(again)["words"]
    assert (page["headline"].startswith(TITLE), page["wrong"]) == (True, True)


def test_a_notebook_shows_a_replay_in_a_frame_that_reaches_nothing(tmp_path: Path) -> None:
    at = replay(made(tmp_path / "t", batches=4))
    ((tag, attributes),) = Parsed(at._repr_html_()).tags
    assert (tag, attributes["sandbox"], attributes["title"]) == ("iframe", "allow-scripts", "replay of a minidl trace")
    assert attributes["srcdoc"] == at.html()
    parsed = Parsed(at.html())
    for name, inside in parsed.tags:
        assert not {"src", "href", "action", "srcset", "style"} & inside.keys(), name
        assert not [attribute for attribute in inside if attribute.startswith("on")]
    forbidden = r"\beval\b|Function\(|fetch\(|XMLHttp|WebSocket|import\(|@import|url\(|https?:|HTML|document\.write"
    assert re.findall(forbidden, parsed.inside["script"] + parsed.inside["style"]) == []
    (policy,) = [a["content"] for name, a in parsed.tags if name == "meta" and "http-equiv" in a]
    assert str(policy).startswith("default-src 'none'")


@pytest.mark.parametrize("compress", [True, False])
def test_what_a_trace_says_stays_text_in_the_page(tmp_path: Path, compress: bool) -> None:
    folder = tmp_path / "a<b>&'\""
    events = [{"code": ev.NEXT[0]}, {"code": ev.TASK_ERROR, "task": 0, "worker": 0, "z": 7}]
    lines = [{"kind": "string", "id": 7, "text": EVIL}, {"kind": "loader", "loader": 1, "dataset": EVIL}]
    evil = trace_of(folder, events, pid=7, role=EVIL, lines=lines)
    plain = trace_of(tmp_path / "plain", events, pid=7, lines=[{"kind": "string", "id": 7, "text": "x"}])
    page = html(replay(evil), compress=compress)
    assert [tag for tag, _ in Parsed(page).tags] == [tag for tag, _ in Parsed(html(replay(plain))).tags]
    assert "<script>alert(1)</script>" in told(page)["words"][2]
    assert Parsed(page).inside["title"] == f"iterator 1 of {folder.name}"


@pytest.mark.live
@needs_chromium
def test_a_browser_draws_it(hung: Trace, tmp_path: Path) -> None:
    at = replay(hung)
    at.to(len(at))
    page = at.html(tmp_path / "page.html")
    assert isinstance(page, Path)
    dom, root = opened(page, tmp_path / "profile")
    assert root.get("data-states") == str(len(at) + 1), "the page's script has failed"
    chips = [a["data-task"] for _, a in Parsed(dom).tags if "data-task" in a]
    assert chips == ["10", "12", "11", "9"]  # the reorder buffer, worker 1's queue, worker 1
    assert "in sample 38 (task 9)" in dom
    assert "the run did not: it was killed" in dom
