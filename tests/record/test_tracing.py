"""Live runs, traced: which events come, in which order, from whom; what survives a kill; and that nothing else changes.

Orders are written as partial orders, as trio's tests write them: a list means "in this order", a set (a tuple, since
lists don't hash) means "in any order, interleaved at will".
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import shutil
import signal
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
import workloads as wl
from recorded import parts_on_a_device, reordered, resumed, skipped, training, until_recorded
from sizes import slow

import minidl
from minidl.arena.packets import TaskQueue
from minidl.check import check
from minidl.device import sim
from minidl.loader import iterators, ports
from minidl.loader.dispatcher import Dispatcher
from minidl.record import recorder, session
from minidl.record.ports import TracedPorts
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS, Phase
from minidl.tracefile.reader import Trace, read_trace

Order = Any  # "name", [Order, ...] in order, or (Order, ...) in any order


# --- Traced runs, each made once --------------------------------------------------------------------------------------
def drain(iterator: Any) -> list[Any]:
    """All batches; an error in the place of each that failed."""
    seen: list[Any] = []
    for _ in range(1000):
        try:
            seen.append(next(iterator))
        except StopIteration:
            return seen
        except Exception as error:
            seen.append(str(error))
    raise AssertionError("the epoch does not end")


def plain(directory: Path) -> None:
    drain(iter(minidl.DataLoader(wl.Tensors(8), batch_size=2, num_workers=2)))


def at_once(directory: Path) -> None:
    drain(iter(minidl.DataLoader(wl.Batched(8), batch_size=2, num_workers=1)))


def pinned(directory: Path) -> None:
    drain(iter(minidl.DataLoader(wl.Tensors(8), batch_size=2, num_workers=2, pin_memory=True)))


def persistent(directory: Path) -> None:
    """Two epochs, and a third that is broken off."""
    with minidl.DataLoader(wl.Tensors(8), batch_size=2, num_workers=2, persistent_workers=True) as loader:
        drain(iter(loader))
        drain(iter(loader))
        next(iter(loader))


def single(directory: Path) -> None:
    with minidl.DataLoader(wl.Failing(8, wl.SimpleError("no"), at=(3,)), batch_size=2) as loader:
        drain(iter(loader))
        next(iter(loader))


def stream(directory: Path) -> None:
    drain(iter(minidl.DataLoader(wl.Stream(5), batch_size=2, num_workers=2, worker_init_fn=wl.draw_once)))


def unshared(directory: Path) -> None:
    drain(iter(minidl.DataLoader(wl.Tensors(4), 2, num_workers=1, collate_fn=wl.not_shared)))


def collecting(directory: Path) -> None:
    """The collector pauses in workers, and at the end in this process."""
    drain(iter(minidl.DataLoader(wl.At(6, 1, wl.collect), num_workers=2, collate_fn=wl.as_list)))
    wl.collect()


def failing(directory: Path) -> None:
    for thing in (wl.Unpicklable, wl.Unbuildable):
        drain(iter(minidl.DataLoader(wl.At(6, 1, thing), num_workers=2, collate_fn=wl.as_list)))
    drain(iter(minidl.DataLoader(wl.Failing(6, wl.SimpleError("no"), at=(3,)), batch_size=2, num_workers=2)))


def killed_worker(directory: Path) -> None:
    drain(wl.killed_in_a_sample(directory))


def timed_out(directory: Path) -> None:
    """And then ended by a signal."""
    iterator: Any = iter(minidl.DataLoader(wl.At(20, 1, wl.hang), num_workers=1, timeout=0.3))
    until_recorded("result_write", Phase.END, task=0)  # the first batch is to be there in time
    next(iterator)
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)
    iterator.close()


def dead_pin_thread(directory: Path) -> None:
    def loop(result_queue: Any, ready_queue: Any, *args: Any) -> None:
        class Broken(queue.Queue):  # type: ignore[type-arg]
            def put(self, *args: Any) -> None:
                raise ZeroDivisionError

        really_loop(result_queue, Broken(), *args)

    really_loop, iterators._pin_memory_loop = iterators._pin_memory_loop, loop
    try:
        iterator: Any = iter(minidl.DataLoader(wl.Tensors(4), num_workers=1, pin_memory=True))
        with pytest.raises(RuntimeError, match="Pin memory thread exited unexpectedly"):
            next(iterator)
        iterator.close()
    finally:
        iterators._pin_memory_loop = really_loop


def on_a_device(directory: Path) -> None:
    data = wl.Tensors(16)
    share = minidl.DistributedSampler(data, num_replicas=2, rank=1)
    loader = minidl.DataLoader(data, batch_size=2, sampler=share, num_workers=1, pin_memory=True)
    for batch in minidl.DeviceLoader(loader, "sim", transform=lambda batch: batch + 1):
        with minidl.span("step", device="sim"):
            assert batch.shape == (2, 4)
            sim.sleep(50_000_000)  # ns: the device falls behind, and the host waits
    parts_on_a_device()


def one_share(directory: Path) -> None:
    sampler = minidl.DistributedSampler(wl.Numbers(8), num_replicas=2, rank=1)
    list(minidl.DataLoader(wl.Tensors(8), batch_size=2, sampler=sampler))


SCRIPT = """
import sys, time
import minidl, minidl.loader.worker, workloads as wl

minidl.loader.worker.MP_STATUS_CHECK_INTERVAL = 0.3
directory, what = sys.argv[1:3]
if __name__ == "__main__":
    with minidl.trace(directory):
        if what in ("spawn", "forkserver"):
            list(minidl.DataLoader(wl.Tensors(8), batch_size=2, num_workers=2, multiprocessing_context=what))
        else:
            iterator = iter(minidl.DataLoader(wl.Gate(99, "/no/such/file", at=5), num_workers=2, prefetch_factor=1))
            for number, batch in enumerate(iterator):
                if number == 4:
                    while "task 5, sample" not in iterator._board.read(1).describe([5]):
                        time.sleep(0.005)
                    print(*(worker.pid for worker in iterator._workers), flush=True)
"""


def script(what: str) -> Callable[[Path], None]:
    def run(directory: Path) -> None:
        done = wl.run(SCRIPT, directory / "trace", what)
        assert done.returncode == 0, done.stderr

    return run


def waits_behind_a_stored_batch(directory: Path) -> bool:
    """Whether the last that the loader's process recorded is that it waits, with batch 6 out of order."""
    trace = read_trace(directory)
    (loader,) = [process.pid for process in trace.processes if process.role == "loader"]
    mine = trace.events[trace.events["pid"] == loader]
    return 6 in trace.select("reorder_store")["task"] and mine[-1]["code"] == ev.RESULT_GET[0]


def signalled(number: int) -> Callable[[Path], None]:
    """A program in the middle of an epoch, worker 1 in a sample, whose group (or, killed, itself) gets a signal."""

    def run(directory: Path) -> None:
        with wl.started(SCRIPT, directory / "trace", "wait") as program:
            idle, stuck = wl.pids_said_by(program)
            # Only then: an interrupt that comes in the middle of an event takes it along, and the trace says so. The
            # test's own timeout ends it.
            while not waits_behind_a_stored_batch(directory / "trace"):
                time.sleep(0.01)
            if number == signal.SIGKILL:
                program.kill()
                wl.wait_until_gone([idle])
                os.kill(stuck, signal.SIGKILL)
            else:
                os.killpg(program.pid, number)
            program.wait(wl.BOUND)
        wl.wait_until_gone([idle, stuck])

    return run


RUNS: dict[str, Callable[[Path], None]] = {
    "plain": plain,
    "at once": at_once,
    "pinned": pinned,
    "persistent": persistent,
    "single": single,
    "stream": stream,
    "unshared": unshared,
    "reordered": reordered,
    "collecting": collecting,
    "failing": failing,
    "skipped": lambda directory: skipped(),
    "killed worker": killed_worker,
    "timed out": timed_out,
    "dead pin thread": dead_pin_thread,
    "on a device": on_a_device,
    "one share": one_share,
    "resumed": lambda directory: resumed(2),
    "training": lambda directory: training(),
    "spawn": script("spawn"),
    "forkserver": script("forkserver"),
    "killed program": signalled(signal.SIGKILL),
    "interrupted program": signalled(signal.SIGINT),
}
OF_THEIR_OWN = {"spawn", "forkserver", "killed program", "interrupted program"}
STUCK = {"killed worker", "timed out", "dead pin thread"}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """Every run's trace."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, wl.no_sigchld():
        patch.setenv("MINIDL_SIMULATE_DEVICE", "1")
        for name, run in RUNS.items():
            directory = tmp_path_factory.mktemp(name.replace(" ", "_"))
            if name in OF_THEIR_OWN:
                run(directory)
            else:
                with minidl.trace(directory / "trace"), pytest.MonkeyPatch.context() as inner:
                    if name in STUCK:
                        wl.impatient(inner)
                    run(directory)
            found[name] = read_trace(directory / "trace")
    return found


# --- Everything in the table happens ----------------------------------------------------------------------------------
def codes(trace: Trace) -> set[int]:
    return set(np.unique(trace.events["code"]).tolist())


@pytest.mark.live
def test_every_event_of_the_table_is_emitted_by_some_run(traces: dict[str, Trace]) -> None:
    seen = set().union(*map(codes, traces.values()))
    missing = {f"{EVENTS[code].name} {EVENTS[code].phase.value}" for code in set(EVENTS) - seen}
    assert missing == {f"{EVENTS[code].name} i" for code in (*SLABS, ev.WORKERS_CHOSEN)}  # test_auto.py has the last


SLABS = (ev.SLAB_TAKE, ev.SLAB_SEND, ev.SLAB_FALLBACK, ev.SLAB_MAP, ev.SLAB_LOCK, ev.SLAB_RELEASE)
"""Of the other transport: test_slabs.py emits them, with all of their values."""


@pytest.mark.live
def test_every_value_of_the_enumerations_is_emitted_by_some_run(traces: dict[str, Trace]) -> None:
    """Which message, outcome, ending, actor, queue, ...: each at some event, save those named here."""
    seen: set[str] = set()
    for trace in traces.values():
        for code in codes(trace):
            rows = trace.events[trace.events["code"] == code]
            for column, field in zip("xyz", EVENTS[code].fields, strict=False):
                if field.enum is not None:
                    seen |= {repr(field.enum(value)) for value in np.unique(rows[column]).tolist()}
    here = [event for code, event in EVENTS.items() if code not in SLABS]
    kinds = {field.enum for event in here for field in event.fields if field.enum is not None}
    missing = {repr(member) for kind in kinds for member in kind} - seen
    assert missing == {
        repr(ev.QueueId.READY),  # no sentinel is put there, and it is not closed: it is a queue within the process
    }


@pytest.mark.live
def test_every_run_is_whole_and_obeys_the_protocol(traces: dict[str, Trace]) -> None:
    for name, trace in traces.items():
        assert trace.problems == [], name
        assert [str(violation) for violation in check(trace)] == [], name


@pytest.mark.live
def test_processes_say_who_they_are(traces: dict[str, Trace]) -> None:
    for name in ("plain", "spawn", "forkserver"):
        trace = traces[name]
        who = sorted((p.role, p.worker) for p in trace.processes)
        assert who == [("loader", -1), ("worker", 0), ("worker", 1)], name
        assert len({p.pid for p in trace.processes}) == 3
        (facts,) = trace.loaders.values()
        assert facts["dataset"] == "Tensors"
        assert (facts["num_workers"], facts["batch_size"], facts["sampler"]) == (2, 2, "SequentialSampler")
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


def way(work: list[Order], reading: list[Order]) -> Order:
    """A task's whole way. A write's end is stamped by its writer when the reader may have gone on already."""
    worked = ["index_get E", "fetch B", *work, "fetch E", "result_put"]
    return [*SENDING, ("index_write E", [*worked, *reading])]


def sent(copied: bool, following: list[Order]) -> list[Order]:
    copies = ["shm_copy B", "shm_copy E"] if copied else []
    return ["result_pickle B", *copies, "result_pickle E", "result_write B", ("result_write E", following)]


COLLATED = ["collate B", "shm_alloc", "collate E"]
ORDERS: dict[str, tuple[range, Order]] = {
    "plain": (range(4), way(SAMPLES + COLLATED, sent(False, READING + HANDING_OUT))),
    "spawn": (range(4), way(SAMPLES + COLLATED, sent(False, READING + HANDING_OUT))),
    "forkserver": (range(4), way(SAMPLES + COLLATED, sent(False, READING + HANDING_OUT))),
    "unshared": (range(2), way([*SAMPLES, "collate B", "collate E"], sent(True, READING + HANDING_OUT))),
    "pinned": (
        range(4),
        way(
            SAMPLES + COLLATED,
            sent(False, [*READING, "pin B", "pin E", "ready_put", "ready_get E", *HANDING_OUT]),
        ),
    ),
    "single": (
        range(1),
        ["sampler_next B", "sampler_next E", "fetch B", *SAMPLES, "collate B", "collate E", "fetch E", *HANDING_OUT],
    ),
    "reordered": (
        range(1, 2),
        way(
            ["sample B", "sample E", "collate B", "collate E"],  # a tensor made of a number takes no shortcut
            sent(True, [*READING, "reorder_store", "reorder_pop", *HANDING_OUT]),
        ),
    ),
}


@pytest.mark.live
@pytest.mark.parametrize("name", ORDERS)
def test_a_tasks_events_come_in_their_order(name: str, traces: dict[str, Trace]) -> None:
    tasks, order = ORDERS[name]
    for task in tasks:
        seen = [event for event in story(traces[name], task) if event not in ("reorder_store", "reorder_pop")]
        if name == "reordered":
            seen = story(traces[name], task)
        assert breaches(order, seen) == [], f"task {task}: {seen}"


@pytest.mark.live
def test_the_shutdown_comes_in_its_order(traces: dict[str, Trace]) -> None:
    """Pin thread first, then the workers, then what is left of the queues."""
    trace = traces["pinned"]
    rows = trace.events[trace.events["time"] >= trace.select("shutdown", Phase.BEGIN)["time"][0]]
    here = rows[rows["pid"] == trace.processes[0].pid]
    who = {ev.Actor.WORKER: "worker", ev.Actor.PIN_THREAD: "pin thread"}
    which = {ev.DoneEvent.WORKERS: "workers", ev.DoneEvent.PIN_THREAD: "pin thread"}
    queues = {queue_id.value: queue_id.name.lower() for queue_id in ev.QueueId}
    seen = []
    for row in here:
        name, x = named(row), int(row["x"])
        if name.startswith("join"):
            name += f" {who[ev.Actor(x)]}"
        elif name == "done_event_set":
            name += f" {which[ev.DoneEvent(x)]}"
        elif name in ("sentinel_put", "sentinel_get", "queue_close", "cancel_join_thread"):
            name += f" {queues[x]}"
        if not name.startswith(("result_", "ready_", "pin_exit", "worker_gone", "rcvd", "epoch", "index_write")):
            seen.append(name)
    assert breaches(
        [
            "shutdown B",
            "done_event_set pin thread",
            "sentinel_put result",
            ("sentinel_get result", "join B pin thread"),
            "join E pin thread",
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
    ) == []  # fmt: skip
    assert [int(row["y"]) for row in trace.select("worker_gone")] == [0, 0]


@pytest.mark.live
def test_a_resumed_epoch_begins_when_all_have_answered(traces: dict[str, Trace]) -> None:
    trace = traces["persistent"]
    names = [
        named(row) for row in trace.events if EVENTS[int(row["code"])].name in ("resume_put", "resume_ack", "epoch")
    ]
    order: list[Order] = ["epoch B", "epoch E"]
    for ends in (["epoch E"], ["epoch E"]):
        order += ["resume_put", ("resume_put", "resume_ack", "resume_ack"), "epoch B", *ends]
    assert breaches(order, names) == []
    assert trace.select("epoch", Phase.BEGIN)["x"].tolist() == [0, 1, 2]
    assert trace.select("epoch", Phase.END)["y"].tolist() == [4, 4, 1]
    assert len(trace.select("worker_start", Phase.BEGIN)) == 2


@pytest.mark.live
def test_streams_end_worker_by_worker(traces: dict[str, Trace]) -> None:
    trace = traces["stream"]
    assert trace.select("worker_exhausted")["x"].tolist() == [1, 0]
    outcomes = trace.select("result_put")["x"].tolist()
    assert sorted(outcomes) == [0] * 3 + [ev.Outcome.EXHAUSTED] * 2


@pytest.mark.live
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


@pytest.mark.live
def test_deaths_and_timeouts(traces: dict[str, Trace]) -> None:
    (row,) = traces["killed worker"].select("found_dead")
    assert (int(row["x"]), int(row["worker"]), int(row["z"])) == (ev.Actor.WORKER, 1, -9)
    (row,) = traces["timed out"].select("timed_out")
    assert (int(row["task"]), int(row["worker"])) == (1, 0)
    assert int(row["x"]) >= 300_000_000
    assert traces["timed out"].select("terminate")["y"].tolist() == [signal.SIGTERM]
    (row,) = traces["killed program"].select("found_dead")
    assert (int(row["x"]), int(row["worker"])) == (ev.Actor.LOADER, 0)
    assert traces["killed program"].select("worker_exit")["x"].tolist() == [ev.Ending.ORPHANED]
    assert ev.Ending.INTERRUPTED in traces["interrupted program"].select("worker_exit")["x"].tolist()


@pytest.mark.live
def test_the_bytes_are_the_batchs(traces: dict[str, Trace]) -> None:
    """A batch of two samples of four float32."""
    for name in ("plain", "spawn", "forkserver", "pinned"):
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


@pytest.mark.live
def test_torchs_collate_takes_its_shortcut_in_our_workers(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "trace"):
        loader = minidl.DataLoader(
            wl.Tensors(4), 2, num_workers=1, collate_fn=torch.utils.data.default_collate
        )  # fmt: skip
        assert all(batch.is_shared() for batch in loader)
    trace = read_trace(tmp_path / "trace")
    assert trace.select("shm_alloc")["x"].tolist() == [32, 32]
    assert len(trace.select("shm_copy")) == 0


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


@pytest.mark.live
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
        recorded = begun[begun["pid"] == pid]["y"].tolist()
        # The one event in front of the line may be the last thing that the worker did.
        assert recorded[: len(mine)] == mine
        assert len(recorded) <= len(mine) + 1
    assert [violation.rule for violation in check(trace)] == []


@pytest.mark.live
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


# --- Off, and failing -------------------------------------------------------------------------------------------------
@pytest.mark.live
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


@pytest.mark.live
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
        drain(follower)
    assert len(read_trace(tmp_path / "trace").select("yield")) == 1
    following = read_trace(tmp_path / "next")
    assert np.unique(following.events["loader"]).tolist() == sorted(following.loaders)
    assert len(following.select("result_rebuild", Phase.BEGIN)) == 4


@pytest.mark.live
def test_a_pin_thread_waits_for_no_task_in_particular(traces: dict[str, Trace]) -> None:
    waits = traces["pinned"].select("result_get", Phase.BEGIN)
    assert len(waits)
    assert set(zip(waits["task"].tolist(), waits["worker"].tolist(), strict=True)) == {(-1, -1)}
    assert (traces["pinned"].select("ready_get", Phase.BEGIN)["task"] >= 0).any()


@pytest.mark.live
def test_a_trace_that_nobody_ends_is_ended_by_the_program_in_silence(tmp_path: Path) -> None:
    program = """
import contextlib, sys
import minidl, workloads as wl
contextlib.ExitStack().enter_context(minidl.trace(sys.argv[1]))  # collected, and with it ended, at once
stack = contextlib.ExitStack()
stack.enter_context(minidl.trace(sys.argv[1] + "-2"))
list(minidl.DataLoader(wl.Tensors(8), num_workers=1))
"""
    done = wl.run(program, tmp_path / "trace")
    assert (done.returncode, done.stderr) == (0, "")
    trace = read_trace(tmp_path / "trace-2")
    assert (len(trace.select("yield")), trace.problems) == (8, [])


@pytest.mark.live
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


@pytest.mark.live
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


# --- For a whole program ----------------------------------------------------------------------------------------------
PROGRAM = """
import sys
import minidl, workloads as wl

print(len(list(minidl.DataLoader(wl.Numbers(6), num_workers=1))), len(list(minidl.DataLoader(wl.Numbers(4)))))
"""


@pytest.mark.live
def test_the_environment_traces_a_program_and_keeps_each_run(tmp_path: Path) -> None:
    base = tmp_path / "run"
    for number, directory in enumerate([base, tmp_path / "run.2", base / "rank-1"]):
        more = {"WORLD_SIZE": "2", "RANK": "1", "MINIDL_TRACE_DETAIL": "batch"} if number == 2 else {}
        done = wl.run(PROGRAM, MINIDL_TRACE=str(base), **more)
        assert (done.returncode, done.stdout) == (0, "6 4\n"), done.stderr
        assert done.stderr == f"minidl: recording to {directory}\n"
        trace = read_trace(directory)
        assert trace.problems == []
        assert sorted(trace.loaders) == [1, 2]
        assert len(trace.select("yield")) == 10
        assert len(trace.select("sample", Phase.BEGIN)) == (0 if number == 2 else 10)


@pytest.mark.live
def test_an_environment_that_cannot_be_followed_is_said_and_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = wl.run(PROGRAM, MINIDL_TRACE=str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (0, "6 4\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("minidl: MINIDL_TRACE: no trace is recorded: ")
    assert "file" in line


SETTINGS: list[tuple[dict[str, str], dict[str, Any] | str]] = [
    ({}, {"detail": "sample", "ring_bytes": recorder.RING_BYTES, "hang_after": 0.0}),
    ({"MINIDL_TRACE_RING": "full"}, {"ring_bytes": None}),
    ({"MINIDL_TRACE_RING": "1"}, {"ring_slots": 16384}),
    *(
        ({"MINIDL_TRACE_RING": text}, "MINIDL_TRACE_RING is 'full' or a whole number of MiB")
        for text in ("none", "0", "-3")
    ),
    ({"MINIDL_TRACE_CPU": "on"}, {"cpu_time": True}),
    ({"MINIDL_TRACE_CPU": "off"}, {"cpu_time": False}),
    ({"MINIDL_TRACE_CPU": "perhaps"}, "MINIDL_TRACE_CPU is 'on' or 'off', not 'perhaps'"),
    ({"MINIDL_TRACE_DETAIL": "everything"}, "detail is 'sample' or 'batch', not 'everything'"),
    ({"MINIDL_HANG_AFTER": "2.5"}, {"hang_after": 2.5}),
]


@pytest.mark.parametrize(("given", "found"), SETTINGS, ids=str)
def test_the_environments_settings(
    given: dict[str, str], found: dict[str, Any] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (given | {"MINIDL_TRACE": str(tmp_path / "trace")}).items():
        monkeypatch.setenv(name, value)
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            session._config_from_environment()
        assert not (tmp_path / "trace").exists()
    else:
        config = session._config_from_environment()
        assert {name: getattr(config, name) for name in found} == found


DESCRIPTORS = """
import gc, os, sys, time
import minidl, workloads as wl

def descriptors():
    return len(os.listdir("/proc/self/fd"))

gc.disable()
counts = []
with minidl.trace(sys.argv[1]):
    for _ in range(4):
        list(minidl.DataLoader(wl.Tensors(8), batch_size=2, num_workers=2))
        deadline = time.monotonic() + 10
        while counts and descriptors() > counts[0] and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread that passes descriptors on may still hold one
        counts.append(descriptors())
print(*counts)
"""


@pytest.mark.live
def test_no_queue_of_a_traced_loader_waits_for_the_collector(tmp_path: Path) -> None:
    done = wl.run(DESCRIPTORS, tmp_path / "trace")
    assert done.returncode == 0, done.stderr
    first, *others = map(int, done.stdout.split())
    assert max(others) <= first


@pytest.mark.live
def test_two_traces_at_once_are_refused(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "one"), pytest.raises(minidl.TraceError, match="end that trace first"):
        minidl.trace(tmp_path / "two").__enter__()
    with pytest.raises(minidl.TraceError, match="already holds a trace"):
        minidl.trace(tmp_path / "one").__enter__()


# --- A worker's end after the trace -----------------------------------------------------------------------------------
class Suicidal(minidl.Dataset[int]):
    """Sample 5 kills the worker that fetches it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.live
def test_a_killed_workers_end_is_recorded_though_the_shutdown_comes_after_the_trace(tmp_path: Path) -> None:
    with minidl.DataLoader(Suicidal(), batch_size=2, num_workers=2) as loader:
        with pytest.raises(RuntimeError), minidl.trace(tmp_path / "trace"):
            list(loader)
        recorded = read_trace(tmp_path / "trace")
    gone = recorded.select("worker_gone")
    assert [(row["worker"], row["y"]) for row in gone] == [(0, -signal.SIGKILL)]
