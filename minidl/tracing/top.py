"""`minidl top`: what a running job's loaders and workers do right now, followed in the terminal through their trace.

Interface: `snapshot(trace, now, lives)` -> `Snapshot` is pure, and its `text()` draws it; `follow(target)` reads, draws
and sleeps in turn; `find_trace` finds the trace of a process; a `Follower` reads the ends of a trace's files.

Rules of use: only the last `TAIL` events of each process are read, so the cost of a look does not grow with the trace;
what lies further back is not known, and not guessed. Nothing is sent to the processes that are watched. A trace whose
run has ended is shown as it was at its last event.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import os
import shlex
import shutil
import socket
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from minidl.tracing import events as ev
from minidl.tracing.attachments import plain
from minidl.tracing.events import EVENTS, RECORD
from minidl.tracing.ledger import size
from minidl.tracing.reader import Files, Process, Trace, no_trace_in, read_trace, reason
from minidl.tracing.recorder import (
    EVENTS_SUFFIX,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MANIFEST,
    SIDE_SUFFIX,
    SLOT_BYTES,
    STATE,
    STATE_AT,
    TraceError,
)

Rows = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]

TAIL = 8192
"""Events of each process that a look reads: 512 KiB. A batch is some 16 events in the loader's process, and in a
worker's two for each sample, so this covers the tasks in flight of any usual loader."""

EXITED_TAIL = 64
"""The same of a worker that has left: a job that makes new workers for each epoch leaves many of them behind."""

BLOCK = 64
"""Slots that are looked at together when a file's last event is searched for: a single slot may stay empty for good."""

WINDOW = 5.0
"""Seconds over which rates are taken; less where the events that were read do not reach so far back."""

STALLED_AFTER = 5.0
"""Seconds of waiting from which on it is a stall. After as many the loader itself checks that its workers live."""


class Life(enum.Enum):
    """Whether a process is there, and what keeps it."""

    ALIVE = "alive"
    DISK = "disk"  # in the kernel, waiting for a disk or a network file system; no signal reaches it
    STOPPED = "stopped"  # by a signal (SIGSTOP, SIGTSTP) or by a debugger
    GONE = "gone"
    UNKNOWN = "?"


class Place(enum.IntEnum):
    """Where a task is, in the order in which it gets there."""

    INDEX_QUEUE = 1
    WORKER = 2
    RESULT_QUEUE = 3
    PIN_THREAD = 4
    READY_QUEUE = 5
    LOADER = 6  # received, and on its way to the consumer
    REORDER_BUFFER = 7
    DELIVERED = 8


class Phase(enum.Enum):
    """What a loader is at."""

    STARTING = "starting"
    WAITING = "waiting"  # inside next, or for its workers' answers
    CONSUMER = "consumer"
    PAUSED = "paused"  # between two epochs
    SHUTTING_DOWN = "shutting down"
    ENDED = "ended"


# --- What there is to see ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Doing:
    """What a thread does, in words, and for how many seconds at least."""

    words: str
    seconds: float

    def text(self) -> str:
        return f"{self.words} for {_seconds(self.seconds)}"


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """One worker. idle: it waits for a task, or has left; doing: its main thread; feeder: its feeder thread, where that
    is at something; queued: tasks in its index queue."""

    worker: int
    pid: int
    life: Life
    idle: bool
    doing: Doing
    feeder: Doing | None
    queued: int

    def text(self) -> str:
        """The worker's line."""
        feeder = f"; its feeder is {self.feeder.text()}" if self.feeder and self.feeder.seconds >= 1 else ""
        return (
            f"{self.worker:<8}{self.pid:<9}{self.life.value:<9}{self.queued:>6}  "
            f"{self.doing.words:<38} {_seconds(self.doing.seconds):>8}{feeder}"
        )

    def where(self) -> str:
        """For the sentence on a stall."""
        name = f"worker {self.worker} (pid {self.pid})"
        if self.life is Life.GONE:
            return f"{name}, which is gone, last {self.doing.words}"
        how = {Life.STOPPED: ", which is stopped by a signal", Life.DISK: ", which waits for a disk"}.get(self.life, "")
        return f"{name}{how}, {self.doing.text()}"


@dataclass(frozen=True, slots=True)
class LoaderNow:
    """One loader's iterator. epoch and yielded are -1 where the events that were read do not tell.

    depths: tasks in flight by place. window: seconds over which the rates were taken. wait: mean seconds that the
    consumer waited for a batch, None where it got none. stalled: a sentence, or "".
    """

    number: int
    epoch: int
    yielded: int
    phase: Phase
    doing: Doing
    depths: dict[Place, int]
    pinned: bool
    window: float
    batches_per_s: float
    bytes_per_s: float
    wait: float | None
    workers: list[WorkerNow]
    stalled: str

    def text(self) -> str:
        """The loader's lines."""
        epoch = f"epoch {self.epoch}, " if self.epoch >= 0 else ""
        yielded = f"{self.yielded} yielded, " if self.yielded >= 0 else ""
        ended = self.phase is Phase.ENDED
        lines = [f"loader {self.number}: {epoch}{yielded}{self.doing.words if ended else self.doing.text()}"]
        if not ended:
            lines.append(f"  {self._rates()}")
            lines += [f"  in flight: {self._places()}"] if self.workers else []
        lines += [f"  {self.stalled}"] if self.stalled else []  # before the workers: a screen may end among them
        if self.workers:
            lines.append(f"  {'worker':<8}{'pid':<9}{'process':<9}{'queued':>6}  {'is':<38} {'for':>8}")
            lines += [f"  {worker.text()}" for worker in self.workers]
        return "\n".join(lines)

    def _rates(self) -> str:
        moved = f"{size(self.bytes_per_s)}/s, " if self.workers else ""
        wait = "no batch" if self.wait is None else f"{self.wait * 1e3:.1f} ms of waiting a batch"
        return f"{self.batches_per_s:.1f} batches/s, {moved}{wait}, over the last {_seconds(self.window)}"

    def _places(self) -> str:
        hidden = {Place.LOADER, Place.DELIVERED} | (set() if self.pinned else {Place.PIN_THREAD, Place.READY_QUEUE})
        shown = [place for place in Place if place not in hidden]
        return ", ".join(f"{place.name.lower().replace('_', ' ')} {self.depths.get(place, 0)}" for place in shown)


@dataclass(frozen=True)
class Snapshot:
    """A job at one moment. state: of the run, in words; over: nothing more will come; hidden: loaders not shown."""

    path: str
    command: str
    state: str
    over: bool
    loaders: list[LoaderNow]
    hidden: int = 0
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """What `minidl top` shows."""
        lines = [f"{self.path}: {self.state}"]
        lines += [f"  {text}" for text in (self.command, *self.notes) if text]
        lines += [loader.text() for loader in self.loaders] or ["no loader has begun yet"]
        lines += [f"and {self.hidden} loaders that have ended"] if self.hidden else []
        return "\n".join(lines)


# --- From the events to the picture -----------------------------------------------------------------------------------
def snapshot(trace: Trace, now: int, lives: Mapping[int, Life] | None = None) -> Snapshot:
    """The traced run as it stands at `now` (ns, CLOCK_MONOTONIC of its machine).

    lives: pid -> Life for the trace's processes; what is missing is UNKNOWN. `trace` may hold the last events only, as
    a Follower's does.
    """
    lives = lives or {}
    spans = trace.spans()
    open_spans = spans[spans["end"] < 0]
    views = [_View(trace, spans, open_spans, int(n), now, lives) for n in np.unique(trace.events["loader"]) if n]
    loaders = [view.loader() for view in views if len(view.own)]
    shown = [loader for loader in loaders if loader.phase is not Phase.ENDED] or loaders[-1:]
    state, over = _state(trace, loaders, lives)
    lost = [
        (p.name, count, reason(errno))
        for p in trace.processes
        if p.whole_until
        for _, count, _, errno in [STATE.unpack_from(p.header, STATE_AT)]
    ]
    return Snapshot(
        path=str(trace.path),
        command=plain(shlex.join(map(str, trace.manifest.get("command") or []))),
        state=state,
        over=over,
        loaders=shown,
        hidden=len(loaders) - len(shown),
        notes=[
            f"{name} has stopped recording, its last {count} events are missing: {why}" for name, count, why in lost
        ],
    )


def _state(trace: Trace, loaders: list[LoaderNow], lives: Mapping[int, Life]) -> tuple[str, bool]:
    """How the run stands, and whether it is over."""
    mains = [lives.get(p.pid, Life.UNKNOWN) for p in trace.processes if p.role != "worker"]
    workers = [p.pid for p in trace.processes if p.role == "worker" and lives.get(p.pid) not in (None, *_NOT_THERE)]
    left = f"; worker processes are left: pid {', '.join(map(str, workers))}" if workers else ""
    if not mains:
        over = lives.get(int(trace.manifest.get("pid") or 0)) is Life.GONE
        return "the process is gone, and has recorded nothing" if over else "nothing is recorded yet", over
    if trace.described("trace_end"):
        return "the trace has ended", True
    deaf = any(p.whole_until for p in trace.processes if p.role != "worker")
    if any(life not in _NOT_THERE for life in mains):
        stopped = Life.STOPPED in mains
        cut = ", but no longer recorded (see below): shown as of its last event" if deaf else ""
        return ("stopped by a signal" if stopped else "running") + cut, False
    if Life.UNKNOWN in mains:
        return "recorded on another machine or before a restart, shown as of its last event", True
    if all(loader.phase is Phase.ENDED for loader in loaders):
        return f"the run has ended{left}", not workers
    if deaf:
        return f"the process is gone, and had stopped recording before, shown as of its last event{left}", not workers
    return f"the process is gone without a shutdown (killed?), shown as of its last event{left}", not workers


_NOT_THERE = (Life.GONE, Life.UNKNOWN)
_LOADER_THREAD = [ev.EPOCH[0], ev.SAMPLER_NEXT[0], ev.TASK_ASSIGNED, ev.NEXT[0], ev.CONSUMER[0], ev.WORKER_START[0],
                  ev.RESUME_PUT, ev.SHUTDOWN[0]]  # fmt: skip
"""What only the thread that iterates over the loader emits."""


class _View:
    """One loader's events at one moment, and what follows from them."""

    def __init__(
        self, trace: Trace, spans: Rows, open_spans: Rows, number: int, now: int, lives: Mapping[int, Life]
    ) -> None:
        self.trace, self.number, self.now, self.lives = trace, number, now, lives
        self.params = trace.loaders.get(number, {})
        self.rows: Rows = trace.events[trace.events["loader"] == number]
        self.spans: Rows = spans[spans["loader"] == number]
        self.open: Rows = open_spans[open_spans["loader"] == number]
        in_worker = np.array([p.role == "worker" for p in trace.processes], bool)
        self.own: Rows = self.rows[~in_worker[self.rows["process"]]]
        if not len(self.own):
            return  # a worker whose loader's events were not read
        self.own = self.own[self.own["process"] == self.own["process"][-1]]
        self.cut = trace.processes[int(self.own["process"][0])].whole_until
        self.now = min(now, self.cut or now)  # what the loader does since then is not known: it may be far on
        mine = self.own[np.isin(self.own["code"], _LOADER_THREAD)]
        self.thread: Rows = self.own[self.own["tid"] == (mine["tid"][-1] if len(mine) else self.own["tid"][-1])]
        begun = np.flatnonzero(self.own["code"] == ev.EPOCH[0])
        self.epoch = int(self.own["x"][begun[-1]]) if len(begun) else -1
        self.since: Rows = self.own[begun[-1] if len(begun) else 0 :]
        self.pinned = bool(np.isin(self.own["code"], [ev.READY_PUT, ev.READY_GET[0]]).any())
        self._place_tasks()

    # --- where the tasks are
    def _place_tasks(self) -> None:
        """rcvd: the first task not delivered; place, worker_of: of the tasks from there to the last one sent."""
        assigned, advanced = (self.since[self.since["code"] == c] for c in (ev.TASK_ASSIGNED, ev.RCVD_ADVANCE))
        first = int(assigned["task"][0]) if len(assigned) and self.epoch < 0 else 0
        self.rcvd = int(advanced["x"][-1]) if len(advanced) else first
        count = max(0, int(assigned["x"][-1]) - self.rcvd) if len(assigned) else 0
        self.place, self.worker_of, put_at = (np.full(count, start, np.int64) for start in (0, -1, 0))
        self._reach(self.since[self.since["code"] == ev.INDEX_PUT], Place.INDEX_QUEUE, put_at, self.worker_of)
        # Workers' events may reach back into an epoch with the same task numbers: what precedes the put is not meant.
        for code, message, place in (
            (ev.INDEX_GET[1], ev.Message.TASK, Place.WORKER),
            (ev.RESULT_PUT, None, Place.RESULT_QUEUE),
            (ev.RESULT_GET[1], ev.Message.RESULT, Place.PIN_THREAD if self.pinned else Place.LOADER),
            (ev.READY_PUT, None, Place.READY_QUEUE),
            (ev.READY_GET[1], ev.Message.RESULT, Place.LOADER),
            (ev.REORDER_STORE, None, Place.REORDER_BUFFER),
            (ev.REORDER_POP, None, Place.DELIVERED),
            (ev.YIELD, None, Place.DELIVERED),
        ):
            rows = self.rows[self.rows["code"] == code]
            self._reach(rows if message is None else rows[rows["x"] == message], place, put_at)

    def _reach(self, rows: Rows, place: Place, put_at: Ints, worker_of: Ints | None = None) -> None:
        """Move the tasks that `rows` are about on to `place`; the puts themselves also say when, and to whom."""
        rows = rows[(rows["task"] >= self.rcvd) & (rows["task"] < self.rcvd + len(self.place))]
        task = rows["task"] - self.rcvd
        if worker_of is not None:
            put_at[task], worker_of[task] = rows["time"], rows["worker"]
        late = rows["time"] >= put_at[task]
        np.maximum.at(self.place, task[late], int(place))

    # --- what the loader does
    def loader(self) -> LoaderNow:
        phase, doing = self._doing()
        workers = self._workers()
        rates = self._rates()
        return LoaderNow(
            number=self.number,
            epoch=self.epoch,
            yielded=self._yielded(),
            phase=phase,
            doing=doing,
            depths={place: int(np.count_nonzero(self.place == place)) for place in Place},
            pinned=self.pinned,
            window=rates[0],
            batches_per_s=rates[1],
            bytes_per_s=rates[2],
            wait=rates[3],
            workers=workers,
            stalled=self._stalled(phase, doing, workers),
        )

    def _yielded(self) -> int:
        yields = self.since[self.since["code"] == ev.YIELD]
        return int(yields["y"][-1]) if len(yields) else 0 if self.epoch >= 0 else -1

    def _rates(self) -> tuple[float, float, float, float | None]:
        """Window in s, batches/s, bytes/s that reached the loader's process, mean wait in s."""
        begin = max(self.now - int(WINDOW * 1e9), int(self.own["time"][0]))
        window = max((self.now - begin) / 1e9, 1e-9)
        recent = self.own[self.own["time"] >= begin]
        moved = recent[recent["code"] == ev.RESULT_REBUILD[0]]["x"].sum()
        moved += recent[recent["code"] == ev.RESULT_REBUILD[1]]["y"].sum()
        waits = self.spans[(self.spans["code"] == ev.NEXT[0]) & (self.spans["end"] >= begin)]
        waits = waits[waits["ey"] == ev.Outcome.DATA]
        wait = float((waits["end"] - waits["begin"]).mean()) / 1e9 if len(waits) else None
        return window, np.count_nonzero(recent["code"] == ev.YIELD) / window, float(moved) / window, wait

    def _doing(self) -> tuple[Phase, Doing]:
        begun = {int(row["code"]): row for row in self._open_in_thread()}
        if ev.SHUTDOWN[0] in begun:
            join = begun.get(ev.JOIN[0])
            whom = "" if join is None else f", waiting for {_joined(join)} to end"
            return Phase.SHUTTING_DOWN, self._since(f"shutting down{whom}", begun[ev.SHUTDOWN[0]]["begin"])
        if ev.NEXT[0] in begun:
            return Phase.WAITING, self._since(self._waiting(), begun[ev.NEXT[0]]["begin"])
        if ev.CONSUMER[0] in begun:
            return Phase.CONSUMER, self._since("in the consumer's code", begun[ev.CONSUMER[0]]["begin"])
        if self._gets():
            return self._doing_for_long()
        return self._doing_otherwise()

    def _doing_for_long(self) -> tuple[Phase, Doing]:
        """It waits, but for no `next` that was read: for its workers to resume, or since before what was read."""
        resumed = self.thread[self.thread["code"] == ev.RESUME_PUT]
        if len(resumed) and resumed["time"][-1] > self.since["time"][0]:
            first = resumed[resumed["x"] == resumed["x"][-1]][0]
            return Phase.WAITING, self._since("waiting for its workers to resume", first["time"])
        return Phase.WAITING, self._since(self._waiting(), self.thread["time"][0])

    def _doing_otherwise(self) -> tuple[Phase, Doing]:
        """Neither in next, nor in the consumer's code, nor in its shutdown."""
        inner, last = self.inner, self.thread[-1]
        if inner is not None and inner["code"] != ev.EPOCH[0]:
            return Phase.STARTING, self._since(_words(inner), inner["begin"])
        if last["code"] == ev.SHUTDOWN[1] or (last["code"] == ev.EPOCH[1] and self.params.get("num_workers") == 0):
            return Phase.ENDED, self._since("has ended", last["time"])
        if last["code"] == ev.EPOCH[1]:
            return Phase.PAUSED, self._since("between two epochs", last["time"])
        return Phase.STARTING, self._since(f"after {EVENTS[int(last['code'])].name}", last["time"])

    def _open_in_thread(self) -> Rows:
        mine = self.open[self.open["process"] == self.thread["process"][-1]]
        here: Rows = mine[mine["tid"] == self.thread["tid"][-1]]
        return here

    @property
    def inner(self) -> np.void | None:
        """The loader's thread's innermost open span."""
        mine = self._open_in_thread()
        return mine[-1] if len(mine) else None

    def _gets(self) -> bool:
        """Whether the loader waits at the queue that batches come from."""
        return self.inner is not None and self.inner["code"] in (ev.RESULT_GET[0], ev.READY_GET[0])

    def _wants_one(self) -> bool:
        """Whether it waits for one task, and can use no other."""
        return self._gets() and self.inner is not None and self.inner["task"] >= 0 and self.params.get("in_order", True)

    def _since(self, words: str, begin: int) -> Doing:
        return Doing(words, max(0, self.now - int(begin)) / 1e9)

    def _waiting(self) -> str:
        inner = self.inner
        if inner is None or inner["code"] == ev.NEXT[0]:
            return "in next"
        if self._wants_one():
            return f"waiting for task {inner['task']} of worker {inner['worker']}"
        return "waiting for a batch" if self._gets() else f"in next, {_words(inner)}"

    # --- what the workers do
    def _workers(self) -> list[WorkerNow]:
        found = [
            self._worker(index, process)
            for index, process in enumerate(self.trace.processes)
            if process.role == "worker" and process.loader == self.number
        ]
        known = {worker.pid for worker in found}
        for row in self.own[self.own["code"] == ev.WORKER_START[1]]:
            if row["x"] and int(row["x"]) not in known:  # 0: it could not be started
                silent = self._since("starting, has recorded nothing", row["time"])
                found.append(self._worker_now(int(row["worker"]), int(row["x"]), False, silent, None))
        return sorted(found, key=lambda worker: worker.worker)

    def _worker_now(self, worker: int, pid: int, idle: bool, doing: Doing, feeder: Doing | None) -> WorkerNow:
        queued = int(np.count_nonzero((self.place == Place.INDEX_QUEUE) & (self.worker_of == worker)))
        return WorkerNow(worker, pid, self.lives.get(pid, Life.UNKNOWN), idle, doing, feeder, queued)

    def _worker(self, index: int, process: Process) -> WorkerNow:
        if process.whole_until and not self.cut:
            unknown = self._since("no longer recorded", process.whole_until)
            return self._worker_now(process.worker, process.pid, False, unknown, None)
        rows = self.rows[self.rows["process"] == index]
        opened = self.open[self.open["process"] == index]
        main = rows["tid"][np.isin(rows["code"], _WORKER_THREAD)]
        if not len(main):
            starting = Doing("starting", max(0, self.now - process.start_ns) / 1e9)
            return self._worker_now(process.worker, process.pid, False, starting, None)
        rows, others = rows[rows["tid"] == main[-1]], opened[opened["tid"] != main[-1]]
        feeder = self._since(_words(others[-1]), others[-1]["begin"]) if len(others) else None
        idle, doing = self._working(rows, opened[opened["tid"] == main[-1]])
        return self._worker_now(process.worker, process.pid, idle, doing, feeder)

    def _working(self, rows: Rows, opened: Rows) -> tuple[bool, Doing]:
        """Whether a worker's main thread, with these events and open spans, is idle, and what it does."""
        left = rows["time"][rows["code"] == ev.WORKER_EXIT]
        if len(left):
            return True, self._since("has left", left[-1])
        if not len(opened):
            return False, self._since(f"after {EVENTS[int(rows['code'][-1])].name}", rows["time"][-1])
        inner = opened[-1]
        if inner["code"] != ev.INDEX_GET[0]:
            return False, self._since(_words(inner), inner["begin"])
        # It polls: it has waited since it did something else.
        polls = rows["code"] == ev.INDEX_GET[0]
        polls |= (rows["code"] == ev.INDEX_GET[1]) & (rows["x"] == ev.Message.EMPTY)
        busy = rows["time"][~polls]
        return True, self._since(_words(inner), busy[-1] if len(busy) else rows["time"][0])

    # --- what is wrong
    def _stalled(self, phase: Phase, doing: Doing, workers: list[WorkerNow]) -> str:
        if phase not in (Phase.WAITING, Phase.SHUTTING_DOWN) or doing.seconds < STALLED_AFTER or self.cut:
            return ""
        wanted = [
            w for w in workers if self._wants_one() and self.inner is not None and w.worker == self.inner["worker"]
        ]
        if wanted and len(self.place):
            reason = self._why_not_here(Place(int(self.place[0]) or 1), wanted[0])
        else:
            reason = "; ".join([doing.words, *(w.where() for w in workers if w.life is Life.GONE or not w.idle)])
        return f"stalled for {_seconds(doing.seconds)}: {reason}"

    def _why_not_here(self, place: Place, wanted: WorkerNow) -> str:
        """Why the task that is needed next, of the worker `wanted`, is not here."""
        task = f"task {self.rcvd}"
        behind = int(np.count_nonzero(self.place[1:] == Place.REORDER_BUFFER))
        others = f"; later batches that wait behind it: {behind}" if behind else ""
        if place is Place.WORKER or wanted.life is Life.GONE:
            return f"waiting for {wanted.where()}{others}"
        if place is Place.INDEX_QUEUE:
            return f"{task} is still in the index queue of {wanted.where()}{others}"
        if place is Place.RESULT_QUEUE:
            return f"worker {wanted.worker} has put {task} into the result queue; {self._feeding(wanted)}{others}"
        where = {Place.PIN_THREAD: "the pin thread has it", Place.READY_QUEUE: "it is in the ready queue"}
        return f"{task} has left worker {wanted.worker}: {where.get(place, 'the loader has it')}{others}"

    def _feeding(self, worker: WorkerNow) -> str:
        """How far the worker's feeder thread got with the task that is needed next."""
        if worker.feeder is not None:
            return f"its feeder is {worker.feeder.text()}"
        rows = self.rows[(self.rows["pid"] == worker.pid) & (self.rows["task"] == self.rcvd)]
        codes = rows["code"][np.flatnonzero(rows["code"] == ev.RESULT_PUT)[-1] :]
        if ev.RESULT_WRITE[1] in codes:
            return "its feeder has written it to the pipe, and nobody has read it"
        return (
            "its feeder has not written it" if ev.RESULT_PICKLE[0] in codes else "its feeder has not begun to pickle it"
        )


_WORKER_THREAD = [ev.WORKER_READY, ev.INDEX_GET[0], ev.INDEX_GET[1], ev.FETCH[0], ev.SAMPLE[0], ev.SAMPLE[1],
                  ev.RESULT_PUT, ev.WORKER_EXIT, ev.RESUME_ACK]  # fmt: skip
"""What only a worker's main thread emits."""

_WORDS = {
    ev.INDEX_GET[0]: "waiting for a task",
    ev.FETCH[0]: "fetching task {task}",
    ev.COLLATE[0]: "collating task {task}",
    ev.SHM_COPY[0]: "copying task {task} to shared memory",
    ev.RESULT_PICKLE[0]: "pickling task {task}",
    ev.RESULT_WRITE[0]: "writing task {task} to the pipe",
    ev.RESULT_REBUILD[0]: "rebuilding task {task}",
    ev.PIN[0]: "pinning task {task}",
    ev.WORKER_START[0]: "starting worker {worker}",
    ev.SAMPLER_NEXT[0]: "asking the sampler",
}


def _words(span: np.void) -> str:
    """What a thread is doing whose innermost open span this is."""
    code, task = int(span["code"]), int(span["task"])
    if code != ev.SAMPLE[0]:
        return _WORDS.get(code, f"in {EVENTS[code].name}").format(task=task, worker=int(span["worker"]))
    if span["by"] >= 0:
        return f"in sample {span['by']} (task {task})"
    what = f"the sample at place {span['bx']}" if span["bx"] >= 0 else "the samples"
    return f"in {what} of task {task}"


def _joined(join: np.void) -> str:
    return "the pin thread" if join["bx"] == ev.Actor.PIN_THREAD else f"worker {join['worker']}"


def _seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


# --- Reading the ends of a trace's files ------------------------------------------------------------------------------
class Follower:
    """Reads the last events of each process of the trace in `directory`, again and again.

    A process that is gone is read once. Raises TraceError where there is no trace.
    """

    def __init__(self, directory: Path, records: int = TAIL) -> None:
        self.directory = directory
        self.records = records
        self._gone: dict[str, bytes] = {}

    def read(self) -> tuple[Trace, dict[int, Life]]:
        """The trace, with these events alone, and whether its processes are there."""
        try:
            names = sorted(os.listdir(self.directory))
            if MANIFEST not in names:
                raise TraceError(no_trace_in(self.directory, names))
            manifest = (self.directory / MANIFEST).read_bytes()
        except OSError as error:
            raise TraceError(f"{self.directory}: {error.strerror}: give the directory of a trace") from error
        files = Files(manifest=manifest)
        for name in names:
            if name.endswith(SIDE_SUFFIX):
                with contextlib.suppress(OSError):  # the directory is being deleted: the next look says so
                    files.side[name.removesuffix(SIDE_SUFFIX)] = (self.directory / name).read_bytes()
        lives = {stem: life(*_pid_and_start(stem)) for stem in files.side}
        for stem in files.side:
            files.events[stem] = self._events(stem, lives[stem])
        trace = Trace(self.directory, files)
        return trace, self._by_pid(trace, lives)

    def _by_pid(self, trace: Trace, lives: Mapping[str, Life]) -> dict[int, Life]:
        if not _is_here(trace.manifest):
            return {}
        first, begun = trace.manifest.get("pid"), trace.manifest.get("monotonic_ns")
        found = {first: life(first, begun)} if isinstance(first, int) and isinstance(begun, int) else {}
        for stem, state in lives.items():
            pid = _pid_and_start(stem)[0]
            if found.get(pid) in (None, *_NOT_THERE):  # two of a trace's processes may have had the same id
                found[pid] = state
        return found

    def _events(self, stem: str, state: Life) -> bytes:
        known = self._gone.get(stem)
        if known is not None:
            return known
        data = tail(self.directory / (stem + EVENTS_SUFFIX), self.records)
        if state is Life.GONE:
            exited = ev.WORKER_EXIT in np.frombuffer(data[HEADER_BYTES:], RECORD)["code"]
            data = tail(self.directory / (stem + EVENTS_SUFFIX), EXITED_TAIL) if exited else data
            self._gone[stem] = data
        return data


def tail(path: Path, records: int) -> bytes:
    """The events file at `path` with its last `records` events alone, laid out as that of a ring of so many.

    b"" where it can't be read yet. Costs some 20 reads of 4 KiB and two of the end, whatever the file's size.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        header = os.pread(fd, HEADER_BYTES, 0)
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            return header
        slots = (os.fstat(fd).st_size - HEADER_BYTES) // SLOT_BYTES  # of a ring that has been around: all it may have
        newest = _newest(fd, slots)
        count = min(records, newest, slots)
        rows = _agreed(fd, newest - count, newest, slots)
    finally:
        os.close(fd)
    rows = rows[(rows["seq"] > newest - count) & (rows["seq"] <= newest)]  # a slot may have kept what it held before
    out = np.zeros(records, RECORD)
    out[(rows["seq"] - np.uint64(1)) % np.uint64(records)] = rows
    fixed = bytearray(header)
    HEADER.pack_into(fixed, 0, *HEADER.unpack_from(header)[:5], records)
    STATE.pack_into(fixed, STATE_AT, records, *STATE.unpack_from(header, STATE_AT)[1:])
    return bytes(fixed) + out.tobytes()


def _newest(fd: int, slots: int) -> int:
    """The greatest sequence number in the file. In a ring too, the blocks written since the first one come after it."""

    def block(number: int) -> npt.NDArray[np.uint64]:
        rows = np.frombuffer(os.pread(fd, BLOCK * SLOT_BYTES, HEADER_BYTES + number * BLOCK * SLOT_BYTES), "<u8")
        seq: npt.NDArray[np.uint64] = rows.reshape(-1, SLOT_BYTES // 8)[:, -1]
        return seq[seq > 0]

    base = block(0)
    if not len(base):
        return 0
    low, high = 0, (slots - 1) // BLOCK  # low is such a block; behind high there is none
    while low < high:
        middle = (low + high + 1) // 2
        seq = block(middle)
        if len(seq) and seq.max() >= base.max():
            low = middle
        else:
            high = middle - 1
    return int(block(low).max())


def _agreed(fd: int, begin: int, end: int, slots: int) -> Rows:
    """The records numbered from `begin` + 1 to `end`, of two readings those that were the same in both."""

    def once() -> Rows:
        first, last = begin % slots, (end - 1) % slots + 1
        parts = [(first, last)] if first < last else [(first, slots), (0, last)]
        data = b"".join(os.pread(fd, (b - a) * SLOT_BYTES, HEADER_BYTES + a * SLOT_BYTES) for a, b in parts)
        rows: Rows = np.frombuffer(data[: len(data) // SLOT_BYTES * SLOT_BYTES], RECORD)
        return rows

    if end <= begin:
        return np.empty(0, RECORD)
    one, two = once(), once()
    common = min(len(one), len(two))
    rows: Rows = one[:common][one[:common] == two[:common]]
    return rows


def _pid_and_start(stem: str) -> tuple[int, int]:
    pid, start = stem.split("-")
    return int(pid), int(start)


def life(pid: int, start_ns: int) -> Life:
    """Whether the process `pid`, which was there at `start_ns` (CLOCK_MONOTONIC), still is; a later one is another."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return Life.GONE if os.path.exists("/proc/self/stat") else Life.UNKNOWN
    except OSError:
        return Life.UNKNOWN
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    born = int(rest[18]) / os.sysconf("SC_CLK_TCK") - asleep
    if born > start_ns / 1e9 + 1 or state in (b"Z", b"X"):
        return Life.GONE
    return {b"T": Life.STOPPED, b"t": Life.STOPPED, b"D": Life.DISK}.get(state, Life.ALIVE)


def _is_here(manifest: Mapping[str, object]) -> bool:
    """Whether the trace's clock and process ids mean something here: the same machine (or container), not restarted."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return False
    return manifest.get("boot_id") == boot and manifest.get("host") == socket.gethostname()


# --- Finding the trace ------------------------------------------------------------------------------------------------
def find_trace(target: str | os.PathLike[str]) -> Path:
    """The trace that `target` names: a path, or the id of a process that records one, itself or through its children.

    Raises TraceError where there is none, or more than one.
    """
    name = os.fspath(target)
    if os.path.exists(name):
        return Path(name)
    if name.isdecimal():
        return _trace_of(int(name))
    raise TraceError(f"{name}: there is no such file or directory: give a trace's directory, or the id of a process")


def _trace_of(pid: int) -> Path:
    if not os.path.exists(f"/proc/{pid}"):
        raise TraceError(f"there is no process {pid}: give the id of one that runs, or a trace's directory")
    try:
        mapped = list(_mapped(pid))
    except PermissionError as error:
        raise TraceError(f"process {pid} is another user's: name its trace's directory instead") from error
    except OSError as error:
        raise TraceError(f"process {pid} has just ended: name its trace's directory instead") from error
    for child in _descendants(pid):
        try:
            mapped += _mapped(child)
        except OSError:  # it has ended meanwhile
            continue
    places = sorted({path.parent for path in mapped})
    if len(places) > 1:
        raise TraceError(f"process {pid} records {len(places)} traces: give one of them: {', '.join(map(str, places))}")
    if not places:
        raise TraceError(_records_nothing(pid))
    if not (places[0] / MANIFEST).exists():
        raise TraceError(f"process {pid} records to {places[0]}, which is not there: deleted, or in another container")
    return places[0]


def _mapped(pid: int) -> Iterator[Path]:
    """The events files that the process has mapped."""
    for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
        name = line.split(maxsplit=5)[5:]
        if name and name[0].removesuffix(" (deleted)").endswith(EVENTS_SUFFIX):
            yield Path(name[0].removesuffix(" (deleted)"))


def _descendants(pid: int) -> Iterator[int]:
    """Yield the children of all its threads, and theirs."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def _records_nothing(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        variables = []
    wanted = [v.partition(b"=")[2].decode(errors="replace") for v in variables if v.startswith(b"MINIDL_TRACE=")]
    if wanted:
        return f"process {pid} has MINIDL_TRACE={wanted[0]}, and records nothing: no loader of minidl's has begun in it"
    return (
        f"process {pid} records no trace, nor does a child of it: start it with MINIDL_TRACE=DIRECTORY set, "
        f"or with minidl run"
    )


# --- The loop ---------------------------------------------------------------------------------------------------------
def follow(
    target: str | os.PathLike[str], interval: float = 1.0, once: bool = False, out: TextIO | None = None
) -> Snapshot:
    """Show the state of the job `target` (see `find_trace`) every `interval` seconds, until its run is over.

    once: show it once. out: where to (default: sys.stdout); a terminal is redrawn, anything else gets one snapshot
    after the other. Returns the last one. Raises TraceError where there is no trace.
    """
    out = sys.stdout if out is None else out
    place = find_trace(target)
    follower = None if place.is_file() else Follower(place)
    while True:
        trace, lives = (read_trace(place), {}) if follower is None else follower.read()
        shot = snapshot(trace, _moment(trace, lives), lives)
        out.write(_framed(shot.text()) if out.isatty() and not once else f"{shot.text()}\n")
        out.flush()
        if once or shot.over:
            return shot
        time.sleep(interval)
        out.write("" if out.isatty() else "\n")


def _moment(trace: Trace, lives: Mapping[int, Life]) -> int:
    """Now, where somebody may still emit; else the time of the last event."""
    ended = trace.described("trace_end") or all(found in _NOT_THERE for found in lives.values())
    return int(trace.events["time"][-1]) if ended and len(trace) else time.monotonic_ns()


def _framed(text: str) -> str:
    """From the top of a cleared screen, folded to its width and cut to its height."""
    columns, rows = shutil.get_terminal_size()
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, columns, subsequent_indent=" " * 4)]
    if len(lines) > rows - 1:
        lines = [*lines[: max(0, rows - 2)], f"({len(lines) - rows + 2} more lines)"]
    return "\x1b[H\x1b[2J" + "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` needs."""
    parser.add_argument(
        "target", metavar="DIR|PID", help="a trace's directory, or the id of a process that records one"
    )
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between two looks (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="look once, print it, and leave")
    parser.epilog = (
        "Example: minidl top 4711, or minidl top --once minidl-traces/run-1. Ctrl-C leaves; the job runs on."
    )


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.05 to 3600")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """`minidl top`; the exit code. Raises TraceError where there is no trace."""
    try:
        follow(arguments.target, arguments.interval, arguments.once)
    except KeyboardInterrupt:  # the usual way to leave
        print()
    return 0
