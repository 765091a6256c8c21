"""Traces of runs that never happened, to the nanosecond: what the views are tested on.

`write(directory, ...)` lets an imagined loader run (fixed costs, no clock, no processes) and writes its events in the
recorder's own file format. The same arguments give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oracle_trace import write_process

from minidl.tracefile import events as ev
from minidl.tracefile.format import FORMAT_VERSION, MANIFEST
from minidl.tracefile.reader import Trace, read_trace

START = 5_000_000_000_000  # monotonic ns of the first event: a machine that has been up for 5,000 s
LOADER_PID = 1000
MIB = 1 << 20
NEVER = 10**15


@dataclass
class Process:
    """A process of the imagined run: its facts, its threads, its events so far."""

    pid: int
    role: str
    parent: int = 1
    worker: int = -1
    loader: int = 0
    threads: dict[int, str] = field(default_factory=dict)
    strings: list[str] = field(default_factory=list)
    events: list[tuple[int, ...]] = field(default_factory=list)

    def emit(self, at: int, tid: int, code: int, task: int = -1, worker: int = -1, xyz: tuple[int, ...] = ()) -> None:
        """Note one event at `at` ns after START."""
        self.events.append((START + at, code, self.loader, tid, task, worker, *(*xyz, 0, 0, 0)[:3]))

    def write(self, directory: Path) -> None:
        """Write the two files that the recorder would have written."""
        names = ("time", "code", "loader", "tid", "task", "worker", "x", "y", "z")
        lines: list[dict[str, object]] = [
            {"kind": "thread", "tid": t, "name": name} for t, name in self.threads.items()
        ]
        lines += [{"kind": "string", "id": n, "text": text} for n, text in enumerate(self.strings, 1)]
        write_process(
            directory,
            [dict(zip(names, event, strict=True)) for event in sorted(self.events, key=lambda event: event[0])],
            pid=self.pid,
            start_ns=START,
            lines=lines,
            role=self.role,
            worker=self.worker,
            loader=self.loader,
            ppid=self.parent,
        )


@dataclass
class Run:
    """An imagined loader of `workers` workers that serves `batches` batches of `batch_size` samples.

    cost(task): ns that its fetch takes, NEVER for one that hangs in its third sample. step: ns of a training step.
    cpu(ns): of a step of a worker that takes so long, its CPU time and, of a fetch, its wait for a CPU.
    stuck: the code of the step that hangs instead of the sample: INDEX_GET, COLLATE or RESULT_PICKLE, its begin.
    slabs: batches travel in slabs, of which each worker has one more than tasks in advance.
    """

    batches: int
    workers: int = 2
    prefetch_factor: int = 2
    batch_size: int = 4
    step: int = 300_000
    cost: Callable[[int], int] = lambda task: 900_000 + 150_000 * (task % 3)
    epochs: int = 1
    pin: bool = False
    simulated: bool = False
    loader: int = 1
    first_pid: int = LOADER_PID
    killed_at: int = 0
    cpu: Callable[[int], tuple[int, int]] = lambda took: (0, 0)
    polls: int = 0  # empty waits of the loader before a hang's kill
    poll: int = 1_000_000  # ns of each of them
    stuck: int = ev.SAMPLE[0]
    slabs: bool = False

    def __post_init__(self) -> None:
        pid = self.first_pid
        self.main = Process(pid, "loader", loader=self.loader, threads={pid: "MainThread"})
        self.main.threads |= {pid + 1 + w: f"QueueFeederThread-{w}" for w in range(self.workers * (not self.slabs))}
        self.pin_tid = pid + 50
        if self.pin:
            self.main.threads[self.pin_tid] = "pin_memory"
        self.crew = [
            Process(pid + 100 + w, "worker", pid, w, self.loader,
                    {pid + 100 + w: "MainThread"} | ({} if self.slabs else {pid + 150 + w: "QueueFeederThread"}))
            for w in range(self.workers)
        ]  # fmt: skip
        self.free = [0] * self.workers
        self.written = [0] * self.workers  # when the feeder of each index queue is idle again
        self.done: dict[int, tuple[int, int]] = {}  # task -> when its result is written, bytes
        self.now = 0
        self.pinned = False

    def say(self, code: int, task: int = -1, worker: int = -1, *xyz: int) -> None:
        """An event of the loader's main thread, now; the clock moves on by a microsecond."""
        self.main.emit(self.now, self.main.pid, code, task, worker, xyz)
        self.now += 1_000

    def run(self) -> list[Process]:
        """Let it run; the processes with their events."""
        for w, process in enumerate(self.crew):
            self.say(ev.WORKER_START[0], -1, w)
            self.now += 200_000
            self.say(ev.WORKER_START[1], -1, w, process.pid)
            self.free[w] = self.now + 100_000
            process.emit(self.free[w], process.pid, ev.WORKER_READY, -1, w, (process.pid, self.main.pid, 42 + w))
        if all(self.epoch(number) for number in range(self.epochs)):
            self.shut_down()
        else:
            for w, process in enumerate(self.crew):
                if self.free[w] < NEVER:
                    process.emit(self.free[w], process.pid, ev.INDEX_GET[0], -1, w)
        return [self.main, *self.crew]

    def shut_down(self) -> None:
        self.say(ev.SHUTDOWN[0])
        self.say(ev.DONE_EVENT_SET, -1, -1, ev.DoneEvent.WORKERS)
        for w, process in enumerate(self.crew):
            self.say(ev.SENTINEL_PUT, -1, w, ev.QueueId.INDEX)
            process.emit(self.now + 30_000, process.pid, ev.SENTINEL_GET, -1, w, (ev.QueueId.INDEX,))
            process.emit(self.now + 40_000, process.pid, ev.WORKER_EXIT, -1, w, (ev.Ending.SENTINEL,))
        for w, process in enumerate(self.crew):
            self.say(ev.JOIN[0], -1, w, ev.Actor.WORKER, 5_000_000_000)
            self.now += 200_000
            self.say(ev.JOIN[1], -1, w, ev.Actor.WORKER, 1)
            self.say(ev.WORKER_GONE, -1, w, process.pid, 0)
        self.say(ev.SHUTDOWN[1], -1, -1, 0)

    def epoch(self, number: int) -> bool:
        """One epoch; False if it hangs."""
        self.sent = self.outstanding = 0
        self.done.clear()
        self.stored: set[int] = set()
        self.say(ev.EPOCH[0], -1, -1, number, self.workers, self.prefetch_factor)
        for _ in range(self.workers * self.prefetch_factor):
            self.assign()
        for rcvd in range(self.batches):
            self.say(ev.NEXT[0], -1, -1, rcvd)
            if not self.next(rcvd):
                return False
            self.say(ev.NEXT[1], rcvd, -1, rcvd + 1)
            self.say(ev.CONSUMER[0], rcvd, -1, rcvd + 1)
            self.now += self.step
            self.say(ev.CONSUMER[1], rcvd, -1)
            if self.slabs:
                self.say(ev.SLAB_RELEASE, rcvd, rcvd % self.workers, self.slab(rcvd), MIB, ev.SlabEnd.FREED)
        self.say(ev.EPOCH[1], -1, -1, number, self.batches)
        return True

    def slab(self, task: int) -> int:
        """The number of the slab that a task's batch lies in."""
        return task // self.workers % (self.prefetch_factor + 1)

    def assign(self) -> None:
        if self.sent == self.batches:
            return
        task, worker = self.sent, self.sent % self.workers
        self.say(ev.SAMPLER_NEXT[0], task)
        self.say(ev.SAMPLER_NEXT[1], task, -1, self.batch_size, task * self.batch_size)
        self.sent += 1
        self.outstanding += 1
        self.say(ev.TASK_ASSIGNED, task, worker, self.sent, self.outstanding)
        self.say(ev.INDEX_PUT, task, worker, self.batch_size)
        feeder, begin = self.main.pid + 1 + worker, max(self.now + 20_000, self.written[worker])
        if self.slabs:  # without feeder threads
            feeder, begin, self.now = self.main.pid, self.now, self.now + 10_000
        self.written[worker] = begin + 10_000
        self.main.emit(begin, feeder, ev.INDEX_WRITE[0], task, worker, (60,))
        self.main.emit(begin + 9_000, feeder, ev.INDEX_WRITE[1], task, worker, (60,))
        self.work(task, worker, begin + 5_000)

    def work(self, task: int, worker: int, put: int) -> None:
        process, t = self.crew[worker], self.free[worker]
        if t >= NEVER:
            return
        process.emit(t, process.pid, ev.INDEX_GET[0], -1, worker)
        if self.cost(task) >= NEVER and self.stuck == ev.INDEX_GET[0]:
            self.free[worker] = NEVER
            return
        t = max(t, put) + 10_000
        process.emit(t, process.pid, ev.INDEX_GET[1], task, worker, (ev.Message.TASK, self.batch_size))
        process.emit(t + 2_000, process.pid, ev.FETCH[0], task, worker, (self.batch_size,))
        end = self.fetch(process, task, worker, t + 4_000)
        self.free[worker] = end + 8_000 if end < NEVER else NEVER
        if end >= NEVER:
            return
        process.emit(end, process.pid, ev.FETCH[1], task, worker, (ev.Outcome.DATA, *self.cpu(end - t - 2_000)))
        process.emit(end + 4_000, process.pid, ev.RESULT_PUT, task, worker, (ev.Outcome.DATA,))
        feeder, size = process.pid + 50 * (not self.slabs), 900
        process.emit(end + 20_000, feeder, ev.RESULT_PICKLE[0], task, worker)
        if self.cost(task) >= NEVER:
            self.free[worker] = NEVER
            return
        process.emit(end + 60_000, feeder, ev.RESULT_PICKLE[1], task, worker, (size, 2, 0))
        if self.slabs:
            process.emit(end + 61_000, feeder, ev.SLAB_SEND, task, worker, (self.slab(task), MIB, 0))
            self.free[worker] = end + 74_000
        process.emit(end + 62_000, feeder, ev.RESULT_WRITE[0], task, worker, (size,))
        process.emit(end + 72_000, feeder, ev.RESULT_WRITE[1], task, worker, (size,))
        self.done[task] = (end + 80_000, size)

    def fetch(self, process: Process, task: int, worker: int, t: int) -> int:
        """Samples, then collation; when it is over, or NEVER."""
        cost = self.cost(task)
        hangs = cost >= NEVER
        cost = 900_000 if hangs else cost
        each = (400_000 if hangs else cost * 3 // 4) // self.batch_size
        for position in range(self.batch_size):
            key = (position, task * self.batch_size + position)
            process.emit(t, process.pid, ev.SAMPLE[0], task, worker, key)
            if hangs and position == 2 and self.stuck == ev.SAMPLE[0]:
                return NEVER
            t += each
            process.emit(t - 1_000, process.pid, ev.SAMPLE[1], task, worker, (*key, self.cpu(each - 1_000)[0]))
        process.emit(t, process.pid, ev.COLLATE[0], task, worker, (self.batch_size,))
        if hangs and self.stuck == ev.COLLATE[0]:
            return NEVER
        where: tuple[int, ...] = (MIB, ev.Place.COLLATE, ev.Reason.COLLATE_SHORTCUT)
        if self.slabs:
            new = task // self.workers == self.slab(task)
            where = (self.slab(task), MIB, ev.SlabSource.NEW if new else ev.SlabSource.RECYCLED)
        made = ev.SLAB_TAKE if self.slabs else ev.SHM_ALLOC
        process.emit(t + cost // 16, process.pid, made, task, worker, where)
        t += cost // 4
        process.emit(t - 1_000, process.pid, ev.COLLATE[1], task, worker, self.cpu(cost // 4 - 1_000)[:1])
        return t

    def next(self, rcvd: int) -> bool:
        """Receive until task `rcvd` is here; False if it never comes."""
        if rcvd in self.stored:
            self.stored.remove(rcvd)
            self.say(ev.REORDER_POP, rcvd, rcvd % self.workers, rcvd, len(self.stored))
        else:
            while (task := self.receive(rcvd)) != rcvd:
                if task < 0:
                    return False
                self.stored.add(task)
                self.say(ev.REORDER_STORE, task, task % self.workers, rcvd, len(self.stored))
        self.say(ev.RCVD_ADVANCE, -1, -1, rcvd + 1, self.outstanding)
        self.assign()
        self.say(ev.YIELD, rcvd, rcvd % self.workers, ev.Outcome.DATA, rcvd + 1)
        return True

    def receive(self, rcvd: int) -> int:
        """Wait for whichever result comes first; its task, or -1 for a hang."""
        get = ev.READY_GET if self.pin else ev.RESULT_GET
        while not self.done:
            if not self.polls:
                self.say(get[0], rcvd, rcvd % self.workers, 5_000_000_000)
                return -1
            self.polls -= 1
            self.say(get[0], rcvd, rcvd % self.workers, self.poll)
            self.now += self.poll
            self.say(get[1], -1, -1, ev.Message.EMPTY)
        task = min(self.done, key=self.done.__getitem__)
        came, size = self.done.pop(task)
        self.say(get[0], rcvd, rcvd % self.workers, 5_000_000_000)
        self.now = max(self.now, came)
        if self.pin:
            self.pin_batch(task, size)
        else:
            self.rebuild(self.main.pid, task, size)
        self.say(get[1], task, task % self.workers, ev.Message.RESULT, ev.Outcome.DATA)
        self.outstanding -= 1
        return task

    def rebuild(self, tid: int, task: int, size: int) -> None:
        def say(code: int, who: int, *xyz: int) -> None:
            self.main.emit(self.now, tid, code, task if who >= 0 else -1, who, xyz)
            self.now += 1_000

        say(ev.RESULT_READ, -1, size)
        if self.slabs:
            say(ev.SLAB_MAP, task % self.workers, self.slab(task), MIB, int(task // self.workers == self.slab(task)))
        say(ev.RESULT_REBUILD[0], task % self.workers, size)
        self.now += 40_000
        say(ev.RESULT_REBUILD[1], task % self.workers, 2, MIB)

    def pin_batch(self, task: int, size: int) -> None:
        """What the pin thread does while the loader waits."""
        worker = task % self.workers
        if not self.pinned:
            self.main.emit(self.now - 60_000, self.pin_tid, ev.PIN_START, -1, -1, (int(self.simulated),))
            self.pinned = True
        self.main.emit(self.now - 50_000, self.pin_tid, ev.RESULT_GET[0], -1, -1, (5_000_000_000,))
        self.rebuild(self.pin_tid, task, size)
        come = (ev.Message.RESULT, ev.Outcome.DATA)
        for code, took, xyz in (
            (ev.RESULT_GET[1], 1_000, come),
            (ev.PIN[0], 120_000, (MIB, int(self.simulated))),
            (ev.PIN[1], 1_000, (MIB, int(self.simulated))),
            (ev.READY_PUT, 5_000, (ev.Outcome.DATA,)),
        ):
            self.main.emit(self.now, self.pin_tid, code, task, worker, xyz)
            self.now += took


def write(directory: Path, *runs: Run) -> Path:
    """Write the trace of the runs (several = several loaders of one machine) into `directory`; its path."""
    directory.mkdir(parents=True, exist_ok=True)
    manifest = {"format": FORMAT_VERSION, "versions": {"minidl": "0", "torch": "2.13.0"}, "command": ["train.py"],
                "host": "imaginary", "detail": "sample", "ring_bytes": None, "pid": LOADER_PID,
                "realtime_ns": 10**18, "monotonic_ns": START}  # fmt: skip
    (directory / MANIFEST).write_text(json.dumps(manifest))
    for run in runs:
        for process in run.run():
            process.write(directory)
        if run.slabs:
            describe(directory, run.first_pid, run.loader, transport="arena")
    return directory


def describe(directory: Path, pid: int = LOADER_PID, loader: int = 1, **params: Any) -> None:
    """Add parameters of a loader to what its process has written."""
    (side,) = directory.glob(f"{pid}-*.meta.jsonl")
    with side.open("a") as file:
        file.write(json.dumps({"kind": "loader", "loader": loader, **params}) + "\n")


def made(directory: Path, *runs: Run, **run: Any) -> Trace:
    """Write the trace of the runs, or of `Run(**run)`, into `directory` and read it."""
    return read_trace(write(directory, *(runs or (Run(**run),))))


def made_killed(directory: Path, workers: int = 2, dead: int = 1, **run: Any) -> Trace:
    """Write and read the trace of a hang at whose end the loader finds so many workers dead, worker 1 first."""
    path = write(directory, Run(**HUNG | {"workers": workers} | run))
    end = int(read_trace(path).events["time"][-1])
    found = [
        {"time": end + n, "code": ev.FOUND_DEAD, "loader": 1, "worker": worker, "x": ev.Actor.WORKER,
         "y": LOADER_PID + 100 + worker, "z": -9}
        for n, worker in enumerate((1 + n) % workers for n in range(dead))
    ]  # fmt: skip
    write_process(path, found, pid=999, role="other", start_ns=START)
    return read_trace(path)


HEALTHY = {"batches": 12}
SLABS: dict[str, Any] = HEALTHY | {"slabs": True}
HUNG = {"batches": 30, "cost": lambda task: NEVER if task == 9 else 900_000 + 150_000 * (task % 3), "polls": 6}

WAITS_FOR_TASK_0: list[dict[str, int]] = [
    {"time": 1, "code": ev.EPOCH[0], "y": 1, "z": 2},
    {"time": 2, "code": ev.TASK_ASSIGNED, "task": 0, "worker": 0, "x": 1, "y": 1},
    {"time": 3, "code": ev.INDEX_PUT, "task": 0, "worker": 0},
    {"time": 4, "code": ev.NEXT[0], "task": 0},
    {"time": 5, "code": ev.RESULT_GET[0], "task": 0, "worker": 0},
]
"""The events of a loop, for `write_process`, that waits for task 0 of its one worker."""
