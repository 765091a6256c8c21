"""Real traces pass; a real trace with one thing wrong is caught, by the rule that the wrong thing breaks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minidl
from minidl.tracing import events as ev
from minidl.tracing.check import RULES, check, examine
from minidl.tracing.events import EVENTS, DoneEvent, Ending, Message, Outcome, Phase
from minidl.tracing.reader import Trace, read_trace

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

Rows = Any


class Squares(minidl.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index * index))


class Uneven(minidl.IterableDataset[torch.Tensor]):
    """Worker 0 ends long before the last one."""

    def __iter__(self) -> Any:
        info = minidl.get_worker_info()
        return iter(torch.arange(3.0 + 4 * (info.id if info is not None else 0)))


def record(directory: Path, dataset: Any, *, epochs: int = 1, stop_after: int | None = None, **options: Any) -> Trace:
    """Iterate over a real loader for some epochs, each stopped after so many batches, and read what was recorded."""
    with minidl.trace(directory), minidl.DataLoader(dataset, **options) as loader:
        for _ in range(epochs):
            for number, _batch in enumerate(loader, start=1):
                if number == stop_after:
                    break
    return read_trace(directory)


@pytest.fixture(scope="module")
def persistent(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Two epochs of eight tasks, two workers."""
    place = tmp_path_factory.mktemp("traces") / "persistent"
    return record(place, Squares(), epochs=2, batch_size=4, num_workers=2, persistent_workers=True)


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """One epoch through a pin thread; the pinning itself is simulated."""
    before = os.environ.get("MINIDL_SIMULATE_DEVICE")
    os.environ["MINIDL_SIMULATE_DEVICE"] = "1"
    try:
        place = tmp_path_factory.mktemp("traces") / "pinned"
        return record(place, Squares(), batch_size=4, num_workers=2, pin_memory=True)
    finally:
        os.environ.pop("MINIDL_SIMULATE_DEVICE")
        os.environ.update({} if before is None else {"MINIDL_SIMULATE_DEVICE": before})


# --- Real traces ------------------------------------------------------------------------------------------------------
REAL: dict[str, tuple[type, dict[str, Any]]] = {
    "no workers": (Squares, {"batch_size": 4}),
    "workers": (Squares, {"batch_size": 4, "num_workers": 2, "epochs": 2}),
    "left early": (Squares, {"batch_size": 2, "num_workers": 2, "epochs": 2, "stop_after": 3}),
    "left early, persistent": (
        Squares,
        {"batch_size": 2, "num_workers": 2, "epochs": 3, "stop_after": 3, "persistent_workers": True},
    ),
    "out of order": (Squares, {"batch_size": 2, "num_workers": 3, "in_order": False}),
    "iterable": (Uneven, {"batch_size": 2, "num_workers": 3}),
    "iterable, persistent, out of order": (
        Uneven,
        {"batch_size": 2, "num_workers": 3, "epochs": 2, "persistent_workers": True, "in_order": False},
    ),
    "spawn": (Squares, {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "spawn"}),
}


@pytest.mark.parametrize("case", REAL)
def test_a_real_run_keeps_every_rule(tmp_path: Path, case: str) -> None:
    dataset, options = REAL[case]
    trace = record(tmp_path / "trace", dataset(), **options)
    assert examine(trace).loaders >= 1
    assert check(trace) == []


def test_a_run_that_pins_keeps_every_rule(pinned: Trace) -> None:
    assert len(pinned.select("pin", Phase.BEGIN)) == 8
    assert check(pinned) == []


def test_a_run_that_raises_keeps_every_rule(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "trace"):
        loader = minidl.DataLoader([1, 2, "three", 4], batch_size=1, num_workers=2, collate_fn=reciprocal)
        with pytest.raises(TypeError):
            list(loader)
        loader.close()
    trace = read_trace(tmp_path / "trace")
    assert len(trace.select("task_error")) == 1
    assert check(trace) == []


def test_a_batch_that_a_failing_sampler_keeps_back_is_no_breach(tmp_path: Path) -> None:
    """Sending the next task fails, and the batch that was due goes with it: torch's loader does the same."""

    class Failing(minidl.Sampler[int]):
        def __iter__(self) -> Any:
            yield from range(7)
            raise ArithmeticError

    with minidl.trace(tmp_path / "trace"):
        loader = minidl.DataLoader(Squares(), batch_size=2, num_workers=1, sampler=Failing())
        batches = iter(loader)
        next(batches)
        with pytest.raises(ArithmeticError):
            next(batches)
        assert len(list(batches)) == 1
        loader.close()
    trace = read_trace(tmp_path / "trace")
    assert len(trace.select("task_assigned")) == len(trace.select("yield")) + 1
    assert check(trace) == []
    gone = altered(trace, lambda events: without(events, rows(events, ev.YIELD, 2)))
    assert "accounted-for" in broken_rules(gone)


def test_a_pinning_that_fails_keeps_every_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    options: dict[str, Any] = {"num_workers": 2, "batch_size": 1, "pin_memory": True}
    with minidl.trace(tmp_path / "trace"), minidl.DataLoader([1, 2, 3], collate_fn=Unpinnable, **options) as loader:
        batches = iter(loader)
        for _ in range(3):
            with pytest.raises(ValueError, match="can't be pinned"):
                next(batches)
    assert check(read_trace(tmp_path / "trace")) == []


class Unpinnable:
    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def pin_memory(self) -> None:
        raise ValueError("can't be pinned")


def test_a_loader_that_outlives_its_trace_is_judged_up_to_there(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "trace"):
        loader = minidl.DataLoader(Squares(), batch_size=2, num_workers=2)
        batches = iter(loader)
        next(batches)
    assert len(list(batches)) == 15
    loader.close()
    report = examine(read_trace(tmp_path / "trace"))
    assert report.violations == []
    assert any("had stopped recording" in text for text in report.unjudged)


def reciprocal(samples: list[Any]) -> float:
    return 1 / samples[0]


# --- One thing wrong --------------------------------------------------------------------------------------------------
def rows(events: Rows, code: int, task: int | None = None, worker: int | None = None, epoch: int = 0) -> Any:
    """Positions of a kind of event: of a task, its occurrence in `epoch`; else all."""
    found = events["code"] == code
    found &= True if task is None else events["task"] == task
    found &= True if worker is None else events["worker"] == worker
    at = np.flatnonzero(found)
    assert len(at), f"no {EVENTS[code].name} of task {task}, worker {worker}: the test alters nothing"
    return at if task is None else at[epoch : epoch + 1]


def without(events: Rows, at: Any) -> Rows:
    return np.delete(events, at)


def doubled(events: Rows, at: Any) -> Rows:
    again = events[at].copy()
    again["time"] += 1
    return np.concatenate([events, again])


def changed(events: Rows, at: Any, **columns: int) -> Rows:
    for column, value in columns.items():
        events[column][at] = value
    return events


def swapped(events: Rows, first: Any, second: Any, *columns: str) -> Rows:
    for column in columns:
        events[column][first], events[column][second] = events[column][second].copy(), events[column][first].copy()
    return events


def altered(trace: Trace, edit: Callable[[Rows], Rows], *, renumber: bool = True) -> Trace:
    """The trace with its events edited; numbered anew, so that the numbers do not give the edit away."""
    other = copy.copy(trace)
    events = edit(trace.events.copy())
    events = events[np.argsort(events["time"], kind="stable")]
    if renumber:
        for process in np.unique(events["process"]):
            own = np.flatnonzero(events["process"] == process)
            events["seq"][own] = np.arange(1, len(own) + 1)
    other.events = events
    return other


def broken_rules(trace: Trace) -> set[str]:
    return {violation.rule for violation in check(trace)}


def worker_of(events: Rows, task: int, epoch: int = 0) -> int:
    return int(events["worker"][rows(events, ev.TASK_ASSIGNED, task, epoch=epoch)][0])


def to_another_worker(events: Rows) -> Rows:
    """Task 3 goes to the other worker, and every event agrees: only who decides can tell."""
    other = 1 - worker_of(events, 3)
    home = rows(events, ev.WORKER_READY, worker=other)
    first, second = np.flatnonzero((events["task"] == 3) & (events["code"] == ev.TASK_ASSIGNED))[:2]
    mine = (events["task"] == 3) & (np.arange(len(events)) >= first) & (np.arange(len(events)) < second)
    in_worker = mine & (events["process"] != events["process"][first])
    for column in ("process", "pid"):
        events[column][in_worker] = events[column][home]
    events["worker"][mine & (events["worker"] >= 0)] = other
    return events


def moved_before(events: Rows, code: int, other: int, task: int) -> Rows:
    return changed(events, rows(events, code, task), time=int(events["time"][rows(events, other, task)][0]) - 1)


def another_fetch(events: Rows) -> Rows:
    """The worker fetches once more after its sentinel."""
    extra = events[rows(events, ev.FETCH[0], 0)].copy()
    gone = rows(events, ev.SENTINEL_GET, worker=int(extra["worker"][0]))
    extra["time"], extra["task"] = events["time"][gone][0] + 1, 99
    return np.concatenate([events, extra])


def another_put(events: Rows) -> Rows:
    """The loader sends one more task to a worker that has its sentinel."""
    extra = events[rows(events, ev.INDEX_PUT, 0)].copy()
    extra["time"] = events["time"][rows(events, ev.SENTINEL_PUT, worker=int(extra["worker"][0]))][0] + 1
    extra["task"] = 99
    return np.concatenate([events, extra])


def no_end_of_workers(events: Rows) -> Rows:
    ends = np.isin(events["code"], [ev.WORKER_EXIT, ev.WORKER_GONE, ev.SENTINEL_GET]) & (events["worker"] == 1)
    return without(events, np.flatnonzero(ends))


def workers_done(events: Rows) -> Any:
    at = rows(events, ev.DONE_EVENT_SET)
    return at[events["x"][at] == DoneEvent.WORKERS]


WRONG: dict[str, tuple[str, Callable[[Rows], Rows]]] = {
    "a task is assigned twice": ("once", lambda e: doubled(e, rows(e, ev.TASK_ASSIGNED, 3))),
    "a task is put twice": ("once", lambda e: doubled(e, rows(e, ev.INDEX_PUT, 3))),
    "a task is received twice": ("once", lambda e: doubled(e, rows(e, ev.INDEX_GET[1], 3))),
    "a task is fetched twice": (
        "once",
        lambda e: doubled(doubled(e, rows(e, ev.FETCH[0], 3)), rows(e, ev.FETCH[1], 3)),
    ),
    "a task is answered twice": ("once", lambda e: doubled(e, rows(e, ev.RESULT_PUT, 3))),
    "a result is read twice": ("once", lambda e: doubled(e, rows(e, ev.RESULT_GET[1], 3))),
    "a batch is yielded twice": ("once", lambda e: doubled(e, rows(e, ev.YIELD, 3))),
    "a batch is yielded twice, and counted": ("counts", lambda e: doubled(e, rows(e, ev.YIELD, 3))),
    "a task's number is left out": ("sequence", lambda e: without(e, rows(e, ev.TASK_ASSIGNED, 3))),
    "send_idx is off by one": ("sequence", lambda e: changed(e, rows(e, ev.TASK_ASSIGNED, 3), x=5)),
    "a task is assigned and never put": ("whole-way", lambda e: without(e, rows(e, ev.INDEX_PUT, 3))),
    "a fetch without its task": ("whole-way", lambda e: without(e, rows(e, ev.INDEX_GET[1], 3))),
    "data that nobody fetched": (
        "whole-way",
        lambda e: without(without(e, rows(e, ev.FETCH[1], 3)), rows(e, ev.FETCH[0], 3)),
    ),
    "a batch read that nobody sent": ("whole-way", lambda e: without(e, rows(e, ev.RESULT_PUT, 3))),
    "a batch yielded that nobody read": ("whole-way", lambda e: without(e, rows(e, ev.RESULT_GET[1], 3))),
    "a batch that vanishes": ("accounted-for", lambda e: without(e, rows(e, ev.YIELD, 3))),
    "another worker fetches the task": (
        "own-worker",
        lambda e: changed(e, rows(e, ev.FETCH[0], 3), worker=1 - worker_of(e, 3)),
    ),
    "another worker answers the task": (
        "own-worker",
        lambda e: changed(e, rows(e, ev.RESULT_PUT, 3), worker=1 - worker_of(e, 3)),
    ),
    "another process fetches": ("own-process", lambda e: changed(e, rows(e, ev.FETCH[0], 3), process=0)),
    "two batches in the wrong order": (
        "in-order",
        lambda e: swapped(e, rows(e, ev.YIELD, 3), rows(e, ev.YIELD, 4), "task", "worker"),
    ),
    "a batch is read before it is sent": (
        "causality",
        lambda e: moved_before(e, ev.RESULT_GET[1], ev.RESULT_PUT, 3),
    ),
    "a task arrives before it is put": ("causality", lambda e: moved_before(e, ev.INDEX_GET[1], ev.INDEX_PUT, 7)),
    "a batch is yielded before it is read": ("causality", lambda e: moved_before(e, ev.YIELD, ev.RESULT_GET[1], 3)),
    "too many tasks outstanding": ("capacity", lambda e: changed(e, rows(e, ev.TASK_ASSIGNED, 3), y=5)),
    "outstanding tasks miscounted": ("decisions", lambda e: changed(e, rows(e, ev.TASK_ASSIGNED, 3), y=3)),
    "rcvd_idx jumps": ("decisions", lambda e: changed(e, rows(e, ev.RCVD_ADVANCE)[2], x=7)),
    "a task is given to another worker in turn": ("decisions", to_another_worker),
    "a sentinel that nobody sent": (
        "messages",
        lambda e: without(e, np.intersect1d(rows(e, ev.SENTINEL_PUT), rows(e, ev.SENTINEL_PUT, worker=1))),
    ),
    "a new epoch that nobody announced": ("messages", lambda e: without(e, rows(e, ev.RESUME_PUT, worker=1))),
    "a new epoch that is answered by nobody": ("messages", lambda e: without(e, rows(e, ev.RESUME_ACK, worker=1))),
    "rcvd_idx moves on untold": ("decisions", lambda e: without(e, rows(e, ev.RCVD_ADVANCE)[2])),
    "a fetch after the sentinel": ("sentinel", another_fetch),
    "a task put after the sentinel": ("sentinel", another_put),
    "a fetch without an end": ("spans", lambda e: without(e, rows(e, ev.FETCH[1], 3))),
    "a sample without an end": ("spans", lambda e: without(e, rows(e, ev.SAMPLE[1], 3)[:1])),
    "an end without a fetch": ("spans", lambda e: without(e, rows(e, ev.FETCH[0], 3))),
    "a next without an end": ("spans", lambda e: without(e, rows(e, ev.NEXT[1], 3))),
    "an unknown outcome": ("vocabulary", lambda e: changed(e, rows(e, ev.RESULT_PUT, 3), x=7)),
    "an epoch that miscounts": ("counts", lambda e: changed(e, rows(e, ev.EPOCH[1])[:1], y=7)),
    "a worker that leaves unbidden": ("lifecycle", lambda e: without(e, rows(e, ev.SENTINEL_GET, worker=1))),
    "a sentinel before the done event": ("lifecycle", lambda e: without(e, workers_done(e))),
    "a worker that works before it is ready": ("lifecycle", lambda e: without(e, rows(e, ev.WORKER_READY, worker=1))),
    "a next inside a next": ("lifecycle", lambda e: doubled(e, rows(e, ev.NEXT[0], 3))),
    "a batch for an epoch that was never begun": ("lifecycle", lambda e: without(e, rows(e, ev.EPOCH[0])[:1])),
    "a shutdown that leaves a worker": ("workers-end", no_end_of_workers),
}


@pytest.mark.parametrize("what", WRONG)
def test_one_thing_wrong_is_caught_by_its_rule(persistent: Trace, what: str) -> None:
    rule, edit = WRONG[what]
    assert check(persistent) == []
    assert rule in broken_rules(altered(persistent, edit))


WRONG_PIN: dict[str, tuple[str, Callable[[Rows], Rows]]] = {
    "a batch is pinned twice": ("once", lambda e: doubled(doubled(e, rows(e, ev.PIN[0], 3)), rows(e, ev.PIN[1], 3))),
    "a batch is read that was not handed on": ("whole-way", lambda e: without(e, rows(e, ev.READY_PUT, 3))),
    "the pin thread is not told to stop": (
        "pin-first",
        lambda e: without(e, np.setdiff1d(rows(e, ev.DONE_EVENT_SET), workers_done(e))),
    ),
    "the pin thread outlives the workers' done event": (
        "pin-first",
        lambda e: changed(e, rows(e, ev.PIN_EXIT), time=int(e["time"][workers_done(e)][0]) + 1),
    ),
    "the pin thread pins what it has not received": ("lifecycle", lambda e: without(e, rows(e, ev.RESULT_GET[1], 3))),
    "the pin thread works before it runs": (
        "lifecycle",
        lambda e: changed(e, rows(e, ev.PIN_START), time=int(e["time"][-1]) + 1),
    ),
}


@pytest.mark.parametrize("what", WRONG_PIN)
def test_one_thing_wrong_with_the_pin_thread_is_caught_by_its_rule(pinned: Trace, what: str) -> None:
    rule, edit = WRONG_PIN[what]
    assert check(pinned) == []
    assert rule in broken_rules(altered(pinned, edit))


WRONG_RECORDING: dict[str, Callable[[Rows], Rows]] = {
    "an event is missing": lambda e: without(e, rows(e, ev.RESULT_READ)[3]),
    "an event is there twice": lambda e: doubled(e, rows(e, ev.RESULT_READ)[3:4]),
    "a clock runs backwards": lambda e: swapped(e, *rows(e, ev.YIELD)[[3, 5]], "time"),
}


@pytest.mark.parametrize("what", WRONG_RECORDING)
def test_a_flaw_of_the_recording_is_caught(persistent: Trace, what: str) -> None:
    assert "recording" in broken_rules(altered(persistent, WRONG_RECORDING[what], renumber=False))


def test_every_rule_is_broken_by_some_test() -> None:
    assert {rule for rule, _ in [*WRONG.values(), *WRONG_PIN.values()]} | {"recording"} == set(RULES)


# --- What the loss of any one event does ------------------------------------------------------------------------------
UNNOTICED = {
    "cancel_join_thread": "no rule asks for it",
    "queue_close": "no rule asks for it",
    "result_read": "it belongs to no task",
    "shm_alloc": "how many segments a batch needs is the batch's business",
    "worker_gone": "the worker has told of its own exit",
    "worker_exit": "the loader has told that the worker is gone",
    "join": "a worker may be gone before it is waited for",
}


def test_the_loss_of_any_one_event_is_noticed_or_excused(persistent: Trace) -> None:
    """Of every kind of event, one is dropped after which its thread went on: a last one may be missing by right."""
    events = persistent.events
    lane = events["process"].astype(np.int64) << 32 | events["tid"]
    went_on = np.array([np.any(lane[at + 1 :] == lane[at]) for at in range(len(events))])
    unnoticed = set()
    for code in np.unique(events["code"]):
        drop = np.flatnonzero((events["code"] == code) & went_on)[-1:]
        if len(drop) and not broken_rules(altered(persistent, lambda e, drop=drop: without(e, drop))):  # type: ignore[misc]
            unnoticed.add(EVENTS[int(code)].name)
    assert unnoticed <= set(UNNOTICED)


# --- What can't be judged ---------------------------------------------------------------------------------------------
def test_a_trace_that_ends_anywhere_breaks_no_rule_and_tells_what_was_open(persistent: Trace) -> None:
    """Cut at a hundred moments: what a SIGKILL of the whole run leaves."""
    times = persistent.events["time"]
    begun = times[rows(persistent.events, ev.EPOCH[0])[0]]
    for cut in np.linspace(begun, times[-1], 100).astype(np.int64)[:-1]:
        report = examine(altered(persistent, lambda events, cut=cut: events[events["time"] <= cut]))  # type: ignore[misc]
        assert report.violations == []
        assert report.open


def test_the_hanging_sample_is_named(persistent: Trace) -> None:
    at = int(persistent.events["time"][rows(persistent.events, ev.SAMPLE[0], 5)][0])
    hung = examine(altered(persistent, lambda events: events[events["time"] <= at]))
    assert any("in sample 20 (task 5)" in text for text in hung.open)


def test_where_events_were_lost_nothing_is_concluded_from_a_missing_one(persistent: Trace) -> None:
    lossy = altered(persistent, lambda events: without(events, rows(events, ev.INDEX_PUT, 3)))
    assert check(lossy) != []
    lossy.processes = [copy.copy(process) for process in lossy.processes]
    lossy.processes[0].lost = 1
    report = examine(lossy)
    assert report.violations == []
    assert any("events were lost" in text for text in report.unjudged)


def test_where_events_were_lost_a_thing_done_twice_is_still_seen(persistent: Trace) -> None:
    lossy = altered(persistent, lambda events: doubled(events, rows(events, ev.YIELD, 3)))
    lossy.processes = [copy.copy(process) for process in lossy.processes]
    lossy.processes[0].lost = 1
    assert "once" in broken_rules(lossy)


def test_a_worker_that_is_killed_owes_nothing(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "trace"):
        loader = minidl.DataLoader(Deadly(), batch_size=2, num_workers=2)
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            list(loader)
        loader.close()
    report = examine(read_trace(tmp_path / "trace"))
    assert report.violations == []
    assert any("ended while it was in sample 5" in text for text in report.open)


class Deadly(Squares):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


def test_many_breaches_of_one_rule_are_counted_not_listed(persistent: Trace) -> None:
    def every_message_unknown(events: Rows) -> Rows:
        return changed(events, rows(events, ev.SAMPLE[1]), task=-1, code=ev.RESULT_PUT, x=77)

    found = [v for v in check(altered(persistent, every_message_unknown)) if v.rule == "vocabulary"]
    assert len(found) == 21
    assert found[-1].message == f"… and {64 - 20} more"


def test_a_violation_names_loader_epoch_task_worker_and_rows(persistent: Trace) -> None:
    worse = altered(persistent, lambda e: doubled(e, rows(e, ev.YIELD, 3, epoch=1)))
    violation = next(v for v in check(worse) if v.rule == "once")
    number = persistent.events["loader"].max()
    worker = worker_of(persistent.events, 3, epoch=1)
    assert str(violation).startswith(f"once: loader {number}, epoch 1, task 3, worker {worker}, yield: happened before")
    assert [int(worse.events["code"][row]) for row in violation.rows] == [ev.YIELD, ev.YIELD]


def test_enumerations_used_by_the_tests_are_the_tables() -> None:
    assert (Outcome.DATA, Message.TASK, Ending.EXHAUSTED) == (0, 1, 0)
