"""Live runs, traced: which events come, in which order, from whom; what survives a kill; and that nothing else changes.

Orders are written as partial orders, as trio's tests write them: a list means "in this order", a set (a tuple, since
lists don't hash) means "in any order, interleaved at will".
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import random
import shutil
import signal
import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded
import torch
import torch.utils.data
import workloads as wl
from recorded import loop
from sizes import slow

import minidl
from minidl.arena.packets import TaskQueue
from minidl.check import check
from minidl.device import sim
from minidl.loader import iterators, ports
from minidl.loader.dispatcher import Dispatcher
from minidl.record import recorder
from minidl.record.device_clock import StreamTrack
from minidl.record.ports import TracedPorts
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS, Phase
from minidl.tracefile.reader import Trace, read_trace

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(300),  # the first test makes all runs
]

Order = Any  # "name", [Order, ...] in order, or (Order, ...) in any order


# --- Traced runs, each made once --------------------------------------------------------------------------------------
def collecting() -> None:
    """The collector pauses in workers, and at the end in this process."""
    loop(wl.At(6, 1, wl.collect), collate_fn=wl.as_list)
    wl.collect()


def failing() -> None:
    for thing in (wl.Unpicklable, wl.Unbuildable):
        loop(wl.At(6, 1, thing), batch_size=1, collate_fn=wl.as_list)
    loop(wl.Failing(6, wl.SimpleError("no"), at=(3,)))


def interrupted_worker() -> None:
    with pytest.MonkeyPatch.context() as patch:
        wl.impatient(patch)
        loop(wl.At(6, 3, functools.partial(signal.raise_signal, signal.SIGINT)), batch_size=1)


def dead_pin_thread() -> None:
    def pin_loop(result_queue: Any, ready_queue: Any, *args: Any) -> None:
        class Broken(queue.Queue):  # type: ignore[type-arg]
            def put(self, *args: Any) -> None:
                raise ZeroDivisionError

        really_loop(result_queue, Broken(), *args)

    really_loop = iterators._pin_memory_loop
    with pytest.MonkeyPatch.context() as patch:
        wl.impatient(patch)
        patch.setattr(iterators, "_pin_memory_loop", pin_loop)
        iterator: Any = iter(minidl.DataLoader(wl.Tensors(4), num_workers=1, pin_memory=True))
        with pytest.raises(RuntimeError, match="Pin memory thread exited unexpectedly"):
            next(iterator)
        iterator.close()


def on_a_device() -> None:
    """The device falls behind, and the host waits."""
    loader = minidl.DataLoader(wl.Tensors(10), batch_size=2, num_workers=1, pin_memory=True)
    for batch in minidl.DeviceLoader(loader, "sim", transform=lambda batch: batch + 1):
        with minidl.span("step", device="sim"):
            assert batch.shape == (2, 4)
            sim.sleep(200_000_000)  # ns
    recorded.parts_on_a_device()


def locked_slabs() -> None:
    loader = minidl.DataLoader(wl.Tensors(4), 2, num_workers=1, transport="arena", pin_memory=True)
    assert len(list(minidl.DeviceLoader(loader, "sim"))) == 2


def shares(**options: Any) -> None:
    dataset = wl.Tensors(8)
    loop(dataset, epochs=2, sampler=minidl.DistributedSampler(dataset, num_replicas=2, rank=1), **options)


def chooses() -> None:
    """An epoch that a loader measures, and another one before which it chooses."""
    loop(wl.Stream(40), batch_size=1, num_workers="auto", epochs=2)


RECORDED = (
    "no workers", "no workers, an error", "persistent", "persistent, left early", "in_order off", "iterable, uneven",
    "pinned, left early", "dataset error", "timeout", "killed worker", "reordered", "skipped tasks", "at once",
    "worker_init error", "unpicklable batch", "resumed", "resumed, no workers", "slabs", "training",
)  # fmt: skip
RUNS: dict[str, Callable[[], None]] = {name: recorded.RUNS[name] for name in RECORDED} | {
    "plain": lambda: loop(wl.Tensors(8)),
    "pinned": lambda: recorded.pinning(wl.Tensors(8)),
    "unshared": lambda: loop(wl.Tensors(4), num_workers=1, collate_fn=wl.not_shared),
    "torch's collate": lambda: loop(wl.Tensors(4), num_workers=1, collate_fn=torch.utils.data.default_collate),
    "stream": lambda: loop(wl.Stream(5), worker_init_fn=wl.draw_once),
    "collecting": collecting,
    "failing": failing,
    "dead pin thread": dead_pin_thread,
    "on a device": on_a_device,
    "locked slabs": locked_slabs,
    "shares": functools.partial(shares, num_workers=1, persistent_workers=True),
    "shares, no workers": functools.partial(shares, num_workers=0),
    "chooses": chooses,
}
"""Each records loaders of this process; the functions that emit its events are looked at."""

ENDED_OTHERWISE: dict[str, Callable[[], None]] = {
    "interrupted worker": interrupted_worker,
    "single, closed": lambda: loop(wl.Failing(8, wl.SimpleError("no"), at=(3,)), num_workers=0),  # its error keeps it
}
"""An event is emitted on the way out of the function that the table names, or where there is no crew of workers."""

RECORDED_HERE = (*RUNS, *ENDED_OTHERWISE, "killed program")
START_METHODS = ("spawn", "forkserver")


def functions_being_executed() -> set[str]:
    """As the event table names them: "module:function"; those of `minidl.record` stand for what they override."""
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
        executed = functions_being_executed()
        named = [ref for ref in EVENTS[code].ours.split(", ") if {ref, "*:" + ref.split(":")[1]} & executed]
        line = f"{code}|{','.join(named)}|{'' if named else ' '.join(sorted(executed))}\n"
        if line not in self._written:
            self._written.add(line)
            os.write(self._fd, line.encode())

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Look at each event from here on."""
        emitters, note, emit_at_once = recorder._emitters, StreamTrack.note, recorder.Recorder.emit_at_once

        def watched_emitters(*args: Any) -> tuple[Callable[[int], recorder.Emit], Callable[..., None]]:
            emitter, write_into = emitters(*args)

            def watched(loader: int) -> recorder.Emit:
                emit = emitter(loader)

                def watched_emit(code: int, *args: int, **kwargs: int) -> None:
                    self.look(code)
                    emit(code, *args, **kwargs)

                return watched_emit

            return watched, write_into

        def watched_note(track: StreamTrack, mark: Any, *event: int, **options: bool) -> None:
            """An event of a device is emitted when the device comes to its mark; it is about where the mark is set."""
            self.look(event[0])
            note(track, mark, *event, **options)

        def watched_emit_at_once(recording: recorder.Recorder, *events: tuple[int, ...], also: Any = ()) -> None:
            """A collection is recorded afterwards."""
            for _, code, *_ in events if not also else ():  # a device's event is taken in that step
                self.look(code)
            emit_at_once(recording, *events, also=also)

        patch.setattr(recorder, "_emitters", watched_emitters)
        patch.setattr(StreamTrack, "note", watched_note)
        patch.setattr(recorder.Recorder, "emit_at_once", watched_emit_at_once)

    def read(self) -> dict[int, list[tuple[list[str], str]]]:
        """Code -> the named functions, and if there were none, all functions, that were being executed."""
        seen = defaultdict(list)
        for line in self._place.read_text().splitlines():
            code, named, executed = line.split("|")
            seen[int(code)].append((named.split(",") if named else [], executed))
        return seen


@pytest.fixture(scope="module")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Witness:
    return Witness(tmp_path_factory.mktemp("witness") / "seen")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, witness: Witness) -> dict[str, Trace]:
    """Every run's trace."""
    place = tmp_path_factory.mktemp("traces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIDL_SIMULATE_DEVICE", "1")
        witness.watch(patch)
        for name, run in RUNS.items():
            with recorded.quiet(), minidl.trace(place / name):
                run()
        recorded.killed_program(place / "killed program")
    for name, run in ENDED_OTHERWISE.items():
        with recorded.quiet(), minidl.trace(place / name):
            run()
    found = {name: read_trace(place / name) for name in RECORDED_HERE}
    return found | {method: recorded.recorded(method) for method in START_METHODS}


# --- Everything in the table happens ----------------------------------------------------------------------------------
RARE = {
    ("join", "loader.liveness:wait_for_a_dying_worker"): "a worker is killed before its batch is rebuilt",
    ("sentinel_get", "loader.pin_memory:_pin_memory_loop"): "the pin thread sees its done event first",
}
"""(Event, function) -> the race that decides whether a run has it."""


@pytest.mark.parametrize("code", EVENTS, ids=lambda code: f"{EVENTS[code].name}-{EVENTS[code].phase.value}")
def test_each_event_is_emitted_while_its_named_function_is_being_executed(
    code: int, witness: Witness, traces: dict[str, Trace]
) -> None:
    event, seen = EVENTS[code], witness.read()
    assert code in seen, "no run emits it"
    others = [executed for named, executed in seen[code] if not named]
    assert not others, f"{event.name} {event.phase.value} names {event.ours}, but was emitted in {others}"
    found = {ref for named, _ in seen[code] for ref in named}
    never = [ref for ref in event.ours.split(", ") if ref not in found and (event.name, ref) not in RARE]
    assert not never, f"{event.name} {event.phase.value} is never emitted in {never}"


def test_every_value_of_the_enumerations_is_emitted_by_some_run(traces: dict[str, Trace]) -> None:
    """Which message, outcome, ending, actor, queue, ...: each at some event, save those named here."""
    seen: set[str] = set()
    for trace in traces.values():
        for code in np.unique(trace.events["code"]).tolist():
            rows = trace.events[trace.events["code"] == code]
            for column, field in zip("xyz", EVENTS[code].fields, strict=False):
                if field.enum is not None:
                    seen |= {repr(field.enum(value)) for value in np.unique(rows[column]).tolist()}
    here = [event for event in EVENTS.values() if not event.name.startswith("slab_")]  # test_slabs.py has all of theirs
    kinds = {field.enum for event in here for field in event.fields if field.enum is not None}
    missing = {repr(member) for kind in kinds for member in kind} - seen
    assert missing == {
        repr(ev.QueueId.READY),  # no sentinel is put there, and it is not closed: it is a queue within the process
    }


@pytest.mark.parametrize("name", [*RECORDED_HERE, *START_METHODS])
def test_every_run_is_whole_and_obeys_the_protocol(name: str, traces: dict[str, Trace]) -> None:
    assert traces[name].problems == []
    assert [str(violation) for violation in check(traces[name])] == []


@pytest.mark.parametrize(("name", "workers"), [("plain", 2), ("spawn", 1), ("forkserver", 1)])
def test_processes_say_who_they_are(name: str, workers: int, traces: dict[str, Trace]) -> None:
    trace = traces[name]
    who = sorted((p.role, p.worker) for p in trace.processes)
    assert who == [("loader", -1), *(("worker", worker) for worker in range(workers))]
    assert len({p.pid for p in trace.processes}) == 1 + workers
    (facts,) = trace.loaders.values()
    assert facts["dataset"] == "Tensors"
    assert (facts["num_workers"], facts["batch_size"], facts["sampler"]) == (workers, 2, "SequentialSampler")
    assert {"QueueFeederThread", "MainThread"} <= set(trace.threads.values())


# --- In which order ---------------------------------------------------------------------------------------------------
def flat(order: Order) -> list[str]:
    return [order] if isinstance(order, str) else [name for part in order for name in flat(part)]


def breaches(order: Order, seen: list[str]) -> list[str]:
    """Where `seen` leaves the partial order, in words; names that occur more than once are numbered by occurrence."""
    if sorted(flat(order)) != sorted(seen):
        return [f"expected {sorted(flat(order))}, saw {sorted(seen)}"]
    counts: Counter[str] = Counter()

    def numbered(part: Order) -> Order:
        if isinstance(part, str):
            counts[part] += 1
            return f"{part} #{counts[part]}"
        return type(part)(numbered(inner) for inner in part)

    wanted = numbered(order)
    counts.clear()
    place = {numbered(name): at for at, name in enumerate(seen)}
    return [f"{late} before {early}" for early, late in before(wanted) if place[early] > place[late]]


def before(order: Order) -> Iterator[tuple[str, str]]:
    """Every pair that the order puts one before the other."""
    if isinstance(order, str):
        return
    for part in order:
        yield from before(part)
    if isinstance(order, list):
        for first, second in itertools.combinations(order, 2):
            yield from itertools.product(flat(first), flat(second))


def named(row: Any) -> str:
    event = EVENTS[int(row["code"])]
    return event.name if event.phase is Phase.INSTANT else f"{event.name} {event.phase.value}"


# Around the consumer's call; and begins of waits, which name the task that is wanted, and not the one that comes.
AROUND = {"next B", "consumer B", "consumer E", "result_get B", "ready_get B"}


def story(trace: Trace, task: int) -> list[str]:
    """The events of a task of the first loader, by time.

    A worker that leaves when all is done does not wait for its feeder thread, which may be about to say that it has
    written the last result: that is added where it is missing.
    """
    rows = trace.events[(trace.events["task"] == task) & (trace.events["loader"] == min(trace.loaders))]
    names = [name for name in map(named, rows) if name not in AROUND]
    puts = trace.select("result_put")
    last = [int(puts["task"][puts["worker"] == worker].max()) for worker in np.unique(puts["worker"])]
    if task in last and "result_write E" not in names:
        names.insert(names.index("result_write B") + 1, "result_write E")
    return names


SAMPLES = ["sample B", "sample E"] * 2
SENDING = ["sampler_next B", "sampler_next E", "task_assigned", "index_put", "index_write B"]
READING = ["result_rebuild B", "result_rebuild E", "result_get E"]
HANDING_OUT = ["yield", "next E"]
COLLATED = ["collate B", "shm_alloc", "collate E"]
PRIVATE = ["collate B", "collate E"]


def way(work: list[Order], reading: list[Order], copied: bool = False) -> Order:
    """A task's whole way. A write's end is stamped by its writer when the reader may have gone on already."""
    copies = ["shm_copy B", "shm_copy E"] if copied else []
    written = ["result_pickle B", *copies, "result_pickle E", "result_write B", ("result_write E", reading)]
    return [*SENDING, ("index_write E", ["index_get E", "fetch B", *work, "fetch E", "result_put", *written])]


USUAL = way(SAMPLES + COLLATED, READING + HANDING_OUT)
PINNING = ["pin B", "pin E", "ready_put", "ready_get E"]
ORDERS: dict[str, tuple[range, Order]] = {
    "plain": (range(4), USUAL),
    "spawn": (range(4), USUAL),
    "forkserver": (range(4), USUAL),
    "unshared": (range(2), way(SAMPLES + PRIVATE, READING + HANDING_OUT, copied=True)),
    "pinned": (range(4), way(SAMPLES + COLLATED, READING + PINNING + HANDING_OUT)),
    "single, closed": (
        range(1),
        ["sampler_next B", "sampler_next E", "fetch B", *SAMPLES, *PRIVATE, "fetch E", *HANDING_OUT],
    ),
    "reordered": (
        range(1, 2),  # a tensor made of a number takes no shortcut
        way(SAMPLES[:2] + PRIVATE, [*READING, "reorder_store", "reorder_pop", *HANDING_OUT], copied=True),
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_tasks_events_come_in_their_order(name: str, traces: dict[str, Trace]) -> None:
    tasks, order = ORDERS[name]
    by_chance = () if name == "reordered" else ("reorder_store", "reorder_pop")
    for task in tasks:
        seen = [event for event in story(traces[name], task) if event not in by_chance]
        assert breaches(order, seen) == [], f"task {task}: {seen}"


def test_the_shutdown_comes_in_its_order(traces: dict[str, Trace]) -> None:
    """Pin thread first, then the workers, then what is left of the queues."""
    trace = traces["pinned"]
    rows = trace.events[trace.events["time"] >= trace.select("shutdown", Phase.BEGIN)["time"][0]]
    here = rows[rows["pid"] == trace.processes[0].pid]
    whose = {"join B": ev.Actor, "join E": ev.Actor, "done_event_set": ev.DoneEvent} | dict.fromkeys(
        ("sentinel_put", "sentinel_get", "queue_close", "cancel_join_thread"), ev.QueueId
    )
    seen = []
    for row in here:
        name = named(row)
        if name in whose:
            name += f" {whose[name](row['x']).name.lower()}"
        by_chance = "result_", "ready_", "pin_exit", "worker_gone", "rcvd", "epoch", "index_write", "gc"
        if not name.startswith(by_chance):
            seen.append(name)
    assert breaches(
        [
            "shutdown B",
            "done_event_set pin_thread",
            "sentinel_put result",
            ("sentinel_get result", "join B pin_thread"),
            "join E pin_thread",
            "cancel_join_thread result",
            "queue_close result",
            "done_event_set workers",
            "sentinel_put index",
            "sentinel_put index",
            *["join B worker", "join E worker"] * 2,
            *["cancel_join_thread index", "queue_close index"] * 2,
            "shutdown E",
        ],
        seen,
    ) == [], seen  # fmt: skip
    assert [int(row["y"]) for row in trace.select("worker_gone")] == [0, 0]


def test_a_resumed_epoch_begins_when_all_have_answered(traces: dict[str, Trace]) -> None:
    trace = traces["persistent"]
    names = [
        named(row) for row in trace.events if EVENTS[int(row["code"])].name in ("resume_put", "resume_ack", "epoch")
    ]
    order: list[Order] = ["epoch B", "epoch E"]
    for _ in range(2):
        order += ["resume_put", ("resume_put", "resume_ack", "resume_ack"), "epoch B", "epoch E"]
    assert breaches(order, names) == []
    assert trace.select("epoch", Phase.BEGIN)["x"].tolist() == [0, 1, 2]
    assert trace.select("epoch", Phase.END)["y"].tolist() == [8, 8, 8]
    assert traces["persistent, left early"].select("epoch", Phase.END)["y"].tolist() == [3, 3, 3]
    assert len(trace.select("worker_start", Phase.BEGIN)) == 2


def test_streams_end_worker_by_worker(traces: dict[str, Trace]) -> None:
    trace = traces["stream"]
    assert trace.select("worker_exhausted")["x"].tolist() == [1, 0]
    outcomes = trace.select("result_put")["x"].tolist()
    assert sorted(outcomes) == [0] * 3 + [ev.Outcome.EXHAUSTED] * 2


def test_errors_name_their_sample_and_carry_their_text(traces: dict[str, Trace]) -> None:
    trace = traces["failing"]
    errors = trace.select("task_error")
    assert [trace.text(row) for row in errors] == [
        "TypeError: this object does not travel",
        "ValueError: this object does not arrive",
        "workloads.SimpleError: no",
    ]
    assert [row[["task", "worker", "x", "y"]].tolist() for row in errors] == [(1, 1, -1, -1)] * 2 + [(1, 1, 1, 3)]
    assert sorted(trace.select("yield")["x"].tolist()) == [0] * 12 + [ev.Outcome.ERROR] * 3


def test_deaths_and_timeouts(traces: dict[str, Trace]) -> None:
    (row,) = traces["killed worker"].select("found_dead")
    assert (int(row["x"]), int(row["worker"]), int(row["z"])) == (ev.Actor.WORKER, 0, -9)
    rows = traces["timeout"].select("timed_out")
    assert set(rows[["task", "worker"]].tolist()) == {(1, 0)}
    assert rows["x"].min() >= 200_000_000
    assert traces["timeout"].select("terminate")["y"].tolist() == [signal.SIGTERM]
    rows = traces["killed program"].select("found_dead")
    assert sorted(rows[["x", "worker"]].tolist()) == [(ev.Actor.LOADER, 0), (ev.Actor.LOADER, 1)]
    assert traces["killed program"].select("worker_exit")["x"].tolist() == [ev.Ending.ORPHANED] * 2
    assert ev.Ending.INTERRUPTED in traces["interrupted worker"].select("worker_exit")["x"].tolist()


def test_the_bytes_are_the_batchs(traces: dict[str, Trace]) -> None:
    """A batch of two samples of four float32."""
    for name in ("plain", "pinned", *START_METHODS):
        assert traces[name].select("shm_alloc")["x"].tolist() == [32] * 4, name
        assert traces[name].select("result_rebuild", Phase.END)["y"].tolist() == [32] * 4, name
        assert traces[name].select("result_pickle", Phase.END)["z"].tolist() == [0] * 4, name
    copied = traces["unshared"].select("shm_copy", Phase.BEGIN)
    assert copied["x"].tolist() == [32, 32]
    feeders = {tid for (_, tid), name in traces["unshared"].threads.items() if name == "QueueFeederThread"}
    assert set(copied["tid"].tolist()) <= feeders
    assert traces["unshared"].select("result_pickle", Phase.END)["z"].tolist() == [32, 32]
    sizes = [traces["plain"].select(name, Phase.BEGIN)["x"] for name in ("result_write", "index_write")]
    assert all(0 < size < 2000 for size in np.concatenate(sizes).tolist())
    assert sorted(traces["plain"].select("result_read")["x"].tolist()) == sorted(sizes[0].tolist())


def test_torchs_collate_takes_its_shortcut_in_our_workers(traces: dict[str, Trace]) -> None:
    assert traces["torch's collate"].select("shm_alloc")["x"].tolist() == [32, 32]
    assert len(traces["torch's collate"].select("shm_copy")) == 0


def test_a_pin_thread_waits_for_no_task_in_particular(traces: dict[str, Trace]) -> None:
    waits = traces["pinned"].select("result_get", Phase.BEGIN)
    assert set(waits[["task", "worker"]].tolist()) == {(-1, -1)}
    assert (traces["pinned"].select("ready_get", Phase.BEGIN)["task"] >= 0).any()


# --- A trace survives its process -------------------------------------------------------------------------------------
JOURNAL = """
import sys
import minidl, minidl.loader.worker, workloads as wl

minidl.loader.worker.MP_STATUS_CHECK_INTERVAL = 0.2
directory, journal = sys.argv[1:3]
with minidl.trace(directory):
    iterator = iter(minidl.DataLoader(wl.Journal(10**6, journal), batch_size=3, num_workers=2))
    print(*(worker.pid for worker in iterator._workers), flush=True)
    for batch in iterator:
        pass
"""


@pytest.mark.parametrize(("victim", "seed"), [("program", 1), *slow(("program", 2)), ("worker", 3)])
def test_what_was_emitted_before_a_kill_is_in_the_trace(victim: str, seed: int, tmp_path: Path) -> None:
    """Each worker keeps a journal of its own beside the trace: a line for each sample, written when it is served."""
    journal = tmp_path / "journal"
    with wl.started(JOURNAL, tmp_path / "trace", journal) as program:
        pids = wl.pids_said_by(program)
        enough = random.Random(seed).randint(500, 30_000)
        while not journal.exists() or journal.stat().st_size < enough:
            time.sleep(0.001)
        os.kill(program.pid if victim == "program" else pids[1], signal.SIGKILL)
        program.wait(wl.BOUND)
    wl.wait_until_gone(pids)
    trace = read_trace(tmp_path / "trace")
    begun = trace.select("sample", Phase.BEGIN)
    served = [tuple(map(int, line.split())) for line in journal.read_text().splitlines()]
    assert len(served) > 20
    for worker, pid in enumerate(pids):
        mine = [index for who, _, index in served if who == worker]
        found = begun[begun["pid"] == pid]["y"].tolist()
        # The one event in front of the line may be the last thing that the worker did.
        assert found[: len(mine)] == mine
        assert len(found) <= len(mine) + 1
    assert [violation.rule for violation in check(trace)] == []


def test_ctrl_c_while_the_loader_writes_a_task_leaves_no_open_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slabs the loader's own thread writes the tasks, and then, at its end, the workers' sentinels."""

    def flush(self: TaskQueue) -> bool:
        monkeypatch.undo()
        really_flush(self)
        raise KeyboardInterrupt

    really_flush = TaskQueue._flush
    with minidl.trace(tmp_path / "trace"):
        iterator: Any = iter(minidl.DataLoader(wl.Tensors(40), num_workers=1, transport="arena"))
        next(iterator)
        monkeypatch.setattr(TaskQueue, "_flush", flush)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        iterator.close()
    trace = read_trace(tmp_path / "trace")
    assert check(trace) == []
    written = trace.select("index_write", Phase.END)["task"].tolist()
    assert written == [0, 1, 2, 3, -1]  # the sentinel belongs to no task


def test_a_killed_workers_end_is_recorded_though_the_shutdown_comes_after_the_trace(tmp_path: Path) -> None:
    with minidl.DataLoader(wl.At(12, 5, wl.kill_myself), batch_size=2, num_workers=2) as loader:
        with pytest.raises(RuntimeError), minidl.trace(tmp_path / "trace"):
            list(loader)
        gone = read_trace(tmp_path / "trace").select("worker_gone")
    assert gone[["worker", "y"]].tolist() == [(0, -signal.SIGKILL)]


# --- Off, and failing -------------------------------------------------------------------------------------------------
def test_without_a_trace_nothing_is_wrapped() -> None:
    assert recorder.active() is None
    before = torch.UntypedStorage._new_shared
    iterator: Any = iter(minidl.DataLoader(wl.Tensors(8), num_workers=2))
    assert type(iterator._ports) is ports.Ports
    assert type(iterator._dispatcher) is Dispatcher
    kinds = {type(thing).__module__ for thing in [*iterator._index_queues, iterator._worker_result_queue]}
    assert kinds == {"minidl.wire.queues"}
    assert {type(worker).__module__ for worker in iterator._workers} == {"multiprocessing.context"}
    assert type(iterator._workers_done_event).__module__ == "minidl.wire.queues"
    assert type(iterator._sampler_iter).__module__ == "builtins"  # the sampler's own generator
    iterator.close()
    assert torch.UntypedStorage._new_shared == before


def test_tracing_is_undone_at_the_blocks_end_and_an_iterator_that_outlives_it_goes_on(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "trace"):
        iterator: Any = iter(minidl.DataLoader(wl.Tensors(8), batch_size=2, num_workers=2))
        assert isinstance(iterator._ports, TracedPorts)
        next(iterator)
    assert recorder.active() is None
    assert type(ports.new_ports()) is ports.Ports
    with minidl.trace(tmp_path / "next"):  # which is not its own
        follower = iter(minidl.DataLoader(wl.Tensors(4), num_workers=1))
        assert len(list(iterator)) == 3
        assert len(list(follower)) == 4
    assert len(read_trace(tmp_path / "trace").select("yield")) == 1
    following = read_trace(tmp_path / "next")
    assert np.unique(following.events["loader"]).tolist() == sorted(following.loaders)
    assert len(following.select("result_rebuild", Phase.BEGIN)) == 4


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "pin_memory": True}], ids=str)
def test_no_batch_is_kept_alive(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    with minidl.trace(tmp_path / "trace"):
        iterator = iter(minidl.DataLoader(wl.Tensors(8), batch_size=2, **options))
        for _ in range(3):
            batch = next(iterator)
            last = weakref.ref(batch)
            del batch
            assert last() is None
        del iterator


def directory_is_deleted(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(trace)


def disk_is_full(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", no_room)


@pytest.mark.parametrize("when", ["at once", "in the middle"])
@pytest.mark.parametrize("accident", [directory_is_deleted, disk_is_full])
def test_a_tracer_that_fails_does_not_break_the_run(
    accident: Any, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says so, once a process, and the batches come."""
    with minidl.trace(tmp_path / "trace"):
        if when == "at once":
            accident(tmp_path / "trace", monkeypatch)
        with minidl.DataLoader(wl.Tensors(400, width=1), num_workers=2, persistent_workers=True) as loader:
            seen = [batch.item() for batch in itertools.islice(loader, 200)]
            if when == "in the middle":
                accident(tmp_path / "trace", monkeypatch)
            seen += [batch.item() for batch in loader]
    monkeypatch.undo()
    assert seen == [*range(200), *range(400)]
    said = capfd.readouterr().err
    assert 1 <= said.count("The run goes on.") <= 3, said
    assert "Traceback" not in said
