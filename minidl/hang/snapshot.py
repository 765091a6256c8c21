"""The snapshot: what a job's iterators and workers do at one moment, and what a stalled iterator waits for.

Interface: `snapshot(trace, now, lives)` -> `Snapshot` is pure, and its `text()` prints it. A `Job` takes a trace's new
events, look by look, and makes snapshots. `views.top` shows them, `headline` uses them for a trace's end.

Rules of use: the replay's follower turns events into states, so both show the same. A look reads only the events since
the last one; earlier ones than the first look's are unknown and not guessed. The trace of an ended run is shown as of
its last event.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from minidl.hang.limits import LONG
from minidl.hang.recent import Gaps
from minidl.loader.protocol import LoaderState
from minidl.playback.actors import as_dicts
from minidl.playback.follower import Follower, causal_order
from minidl.playback.missing import BatchPlace, MissingBatch, missing_batch
from minidl.playback.state import STARTING, MessageStage, ProtocolState, Queued, WorkerNow
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Positions, Rows
from minidl.tracefile.calls import OpenCalls
from minidl.tracefile.events import Call, Message, Outcome
from minidl.tracefile.format import errno_in_words
from minidl.tracefile.loaders import first_epochs, in_words
from minidl.tracefile.process import Process, ProcessLife
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import durations, pairs
from minidl.tracefile.words import counted, doing, plain, seconds, size

WINDOW = 5.0
"""Seconds over which rates are averaged; fewer if the events that were read cover less."""

MOST_RECENT = 50_000
"""The number of events that are kept for the rates; a window with more events is shorter."""


# --- What there is to see ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Doing:
    """The activity of a thread, in words, and its minimum duration in seconds."""

    words: str
    seconds: float

    def text(self) -> str:
        return f"{self.words} for {seconds(self.seconds)}"


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker. doing: its main thread; feeder: its feeder thread, None if that is idle; queued: tasks in its index
    queue. sender: the thread that pickles and writes its results: the feeder, or with slabs the worker itself."""

    worker: int
    pid: int
    life: ProcessLife
    idle: bool
    doing: Doing
    feeder: Doing | None
    queued: int
    sender: str = "its feeder"

    def text(self, over: bool) -> str:
        """Return the worker's line; without a time if the iterator is over."""
        start = f"{self.worker:<8}{self.pid:<9}{self.life.value:<9}"
        if over:
            return f"{start}{self.doing.words}"
        feeder = f"; {self.sender} is {self.feeder.text()}" if self.feeder and self.feeder.seconds >= 1 else ""
        return f"{start}{self.queued:>6}  {self.doing.words:<38} {seconds(self.doing.seconds):>8}{feeder}"

    def where(self) -> str:
        """Return the worker's part of the sentence on a stall."""
        name = f"worker {self.worker} (pid {self.pid})"
        if self.life is ProcessLife.GONE:
            return f"{name}, which has ended, last seen {self.doing.words}"
        kept = {ProcessLife.STOPPED: ", which is stopped by a signal", ProcessLife.DISK: ", which waits for a disk"}
        return f"{name}{kept.get(self.life, '')}, {self.doing.words}"


@dataclass(frozen=True, slots=True)
class IteratorSnapshot:
    """One iterator. name: in words. epoch, yielded: -1 if the events that were read do not show it.

    depths: tasks in flight by place. window: seconds over which the rates were averaged. wait: the training loop's mean
    wait for a batch in seconds, None without a batch. waits: what the loop waits for and why it is missing; "" if the
    loop does not wait or the reason is unknown.
    """

    number: int
    name: str
    epoch: int
    yielded: int
    state: LoaderState
    over: bool
    doing: Doing
    depths: dict[str, int]
    pinned: bool
    window: float
    batches_per_s: float
    bytes_per_s: float
    wait: float | None
    workers: list[WorkerSnapshot]
    waits: str

    @property
    def stalled(self) -> str:
        """The stall as a sentence; "" if the wait is not long."""
        long = self.waits and self.doing.seconds >= LONG
        return f"stalled for {seconds(self.doing.seconds)}: {self.waits}" if long else ""

    def text(self) -> str:
        """Return the iterator's lines."""
        lines = [self.title(self.doing.words if self.over else self.doing.text())]
        if not self.over:
            lines.append(f"  {self.rates()}")
            lines += [f"  in flight: {self._places()}"] if self.workers else []
        if self.workers:
            head = "is" if self.over else f"{'queued':>6}  {'is':<38} {'for':>8}"
            lines.append(f"  {'worker':<8}{'pid':<9}{'process':<9}{head}")
            lines += [f"  {worker.text(self.over)}" for worker in self.workers]
        return "\n".join(lines)

    def title(self, *more: str) -> str:
        """The iterator's name, its progress, and `more`."""
        epoch = [f"epoch {self.epoch}"] if self.epoch >= 0 else []
        yielded = [f"{self.yielded} yielded"] if self.yielded >= 0 else []
        return f"{self.name}: {', '.join([*epoch, *yielded, *more])}"

    def rates(self) -> str:
        """The rate of batches, and the training loop's wait for one."""
        moved = f"{size(self.bytes_per_s)}/s, " if self.workers else ""
        wait = "no batch" if self.wait is None else f"{self.wait * 1e3:.1f} ms of waiting per batch"
        return f"{self.batches_per_s:.1f} batches/s, {moved}{wait}, over the last {seconds(self.window)}"

    def _places(self) -> str:
        hidden = () if self.pinned else ("pin thread", "ready queue")
        return ", ".join(f"{place} {depth}" for place, depth in self.depths.items() if place not in hidden)


@dataclass(frozen=True)
class Snapshot:
    """A job at one moment. state: of the run, in words; over: no more events will come; hidden: iterators not shown.

    headline: of the whole trace; "" = unknown, and then the title names the present stalls.
    """

    path: str
    command: str
    state: str
    over: bool
    loaders: list[IteratorSnapshot]
    hidden: int = 0
    notes: list[str] = field(default_factory=list)
    headline: str = ""

    def text(self) -> str:
        """Return what `minidl top` shows."""
        stalled = [f"iterator {loader.number} {loader.stalled}" for loader in self.loaders if loader.stalled]
        lines = [self.headline] if self.headline else stalled
        lines.append(f"{self.path}: {self.state}")
        lines += [f"  {text}" for text in (self.command, *self.notes) if text]
        lines += [loader.text() for loader in self.loaders] or ["no iterator has begun yet"]
        lines += [f"not shown: {counted(self.hidden, 'iterator')} that ended before"] if self.hidden else []
        return "\n".join(lines)


# --- From the events to the picture -----------------------------------------------------------------------------------
def snapshot(trace: Trace, now: int, lives: Mapping[int, ProcessLife] | None = None) -> Snapshot:
    """Return the traced run as it stands at `now` (ns, CLOCK_MONOTONIC of its machine).

    lives: pid -> ProcessLife of the trace's processes; a missing one is UNKNOWN.
    """
    job = Job()
    job.take(trace)
    return job.snapshot(trace, now, lives or {})


class Job:
    """A traced run, look by look: `take` a trace with the new events, then `snapshot` it.

    The open iterators and their tasks in flight bound the memory.
    """

    def __init__(self) -> None:
        self.iterators: dict[int, _Iterator] = {}
        self.ended = 0  # iterators that were dropped
        self.gaps = Gaps()
        self.longest = self.first = 0  # ns of a `next` that ended; of an epoch's first one

    def take(self, trace: Trace) -> None:
        """Follow the events of `trace`, which are later than all events taken before."""
        missing = self.gaps.take(trace)
        for number in np.unique(trace.events["loader"]).tolist():
            if number:
                rows = trace.events[trace.events["loader"] == number]
                if number not in self.iterators:
                    self.iterators[number] = _Iterator(number, trace)
                self.iterators[number].take(trace, rows[causal_order(rows)], missing)
                calls = self.iterators[number].calls
                self.longest, self.first = max(self.longest, calls.longest[Call.NEXT]), max(self.first, calls.first)
        over = [number for number, one in self.iterators.items() if one.state.over]
        for number in over[:-1] if len(over) == len(self.iterators) else over:
            if number != max(self.iterators):
                del self.iterators[number]
                self.ended += 1

    def cut(self, process: Process) -> int:
        """Return the time since which a process can no longer record; 0 if it can."""
        return self.gaps.last.get(process.file, (0, process.start_ns))[1] if process.whole_until else 0

    def snapshot(self, trace: Trace, now: int, lives: Mapping[int, ProcessLife]) -> Snapshot:
        """Return the run as it stands at `now`; `trace` is the one taken last."""
        known = [one.snapshot(self, trace, now, lives) for _, one in sorted(self.iterators.items()) if one.home]
        shown = [loader for loader in known if not loader.over] or known[-1:]
        state, over = _state(trace, known, lives)
        notes = []
        for process in trace.processes:
            if process.header is not None and process.header.lost_events:
                lost = counted(process.header.lost_events, "event")
                reason = errno_in_words(process.header.errno)
                notes.append(f"{process.name} stopped recording ({reason}): its last {lost} are missing")
        command = plain(shlex.join(map(str, trace.manifest.get("command", []))))
        return Snapshot(str(trace.path), command, state, over, shown, self.ended + len(known) - len(shown), notes)

    def moment(self, trace: Trace, lives: Mapping[int, ProcessLife]) -> int:
        """Return the present time if a process may still record events; else the time of the last event."""
        ended = trace.described("trace_end") or not any(life.there for life in lives.values())
        last = max((moment for _, moment in self.gaps.last.values()), default=0)
        return last if ended and last else time.monotonic_ns()


def _state(trace: Trace, loaders: list[IteratorSnapshot], lives: Mapping[int, ProcessLife]) -> tuple[str, bool]:
    """Return the state of the run in words, and whether it is over."""
    programs = [process for process in trace.processes if process.role != "worker"]
    mains = [lives.get(process.pid, ProcessLife.UNKNOWN) for process in programs]
    if not mains:
        over = lives.get(int(trace.manifest.get("pid") or 0)) is ProcessLife.GONE
        return "the process has ended without recording anything" if over else "nothing has been recorded yet", over
    workers = [p.pid for p in trace.processes if p.role == "worker" and p.pid in lives and lives[p.pid].there]
    left = f"; its worker processes still exist: pid {', '.join(map(str, workers))}" if workers else ""
    full, all_over = any(process.whole_until for process in programs), all(loader.over for loader in loaders)
    cut = ", but its recording has stopped (see below): shown as of its last event" if full else ""
    as_of = "shown as of its last event"
    rows = (
        (trace.described("trace_end"), "the trace has ended" + ("" if all_over else f", {as_of}"), True),
        (any(life.there for life in mains),
         ("stopped by a signal" if ProcessLife.STOPPED in mains else "running") + cut, False),
        (ProcessLife.UNKNOWN in mains, f"recorded on another machine or before a restart, {as_of}", True),
        (all_over, f"the run has ended{left}", not workers),
        (full, f"the process has ended after its recording, {as_of}{left}", not workers),
        (True, f"the process has ended without a shutdown (killed?), {as_of}{left}", not workers),
    )  # fmt: skip
    return next((words, over) for applies, words, over in rows if applies)


_FOR_RATES = (ev.RESULT_REBUILD[0], ev.RESULT_REBUILD[1], ev.YIELD, ev.NEXT[0], ev.NEXT[1])
_FEEDING = {
    MessageStage.PICKLING: ev.RESULT_PICKLE[0],
    MessageStage.COPYING: ev.SHM_COPY[0],
    MessageStage.WRITING: ev.RESULT_WRITE[0],
}
"""The stages in which a worker's feeder thread works."""

_WHERE = {
    MessageStage.ENQUEUED: "{sender} has not begun to pickle it",
    MessageStage.PICKLED: "{sender} has not written it",
    MessageStage.WRITTEN: "{sender} has written it to the pipe, but the loader has not read it yet",
    MessageStage.READ: "the loader has read it, but not rebuilt it",
    MessageStage.REBUILDING: "it is being rebuilt",
    MessageStage.REBUILT: "it is rebuilt, but not handed on",
}
"""The place of a worker's result on its way, in words."""


class _Iterator:
    """One iterator while it is followed."""

    def __init__(self, number: int, trace: Trace) -> None:
        self.number = number
        self.facts = trace.loaders.get(number, {})
        self.follower = Follower(self.facts, int(trace.events["time"][0]), first_epochs(trace).get(number, 0))
        self.state: ProtocolState = self.follower.state()
        self.home = ""  # the file of the process that iterates
        self.begun = 0
        self.calls = OpenCalls()
        self.recent: Rows = trace.events[:0]

    def take(self, trace: Trace, rows: Rows, missing: Mapping[int, int]) -> None:
        """Follow new events, in causal order."""
        at_home = np.array([p.role != "worker" for p in trace.processes], bool)[rows["process"]]
        if at_home.any():
            if not self.home:
                self.home = trace.processes[int(rows["process"][at_home][-1])].file
                self.begun = int(rows["time"][at_home][0])
            files = np.array([p.file for p in trace.processes])
            own = at_home & (files[rows["process"]] == self.home)
            self.calls.take(rows[own], gap=not missing.keys().isdisjoint(rows["process"][own].tolist()))
            self.recent = np.concatenate([self.recent, rows[own & np.isin(rows["code"], _FOR_RATES)]])[-MOST_RECENT:]
            rows = rows[own | ~at_home]  # another process may have used the same number
        there = np.unique(rows["process"]).tolist()
        self.follower.announce(rows, max((missing.get(index, 0) for index in there), default=0))
        for event in as_dicts(rows, _needed(rows)):
            self.follower.step(event)
        self.state = self.follower.state()

    # --- what the loader does
    def snapshot(self, job: Job, trace: Trace, now: int, lives: Mapping[int, ProcessLife]) -> IteratorSnapshot:
        state = self.state
        cut = next((job.cut(p) for p in trace.processes if p.file == self.home), 0)
        now = min(now, cut or now)  # what the loader has done since then is unknown
        doing = Doing(state.doing, max(0, now - state.since) / 1e9)
        workers = list(self._workers(job, trace, now, bool(cut), lives))
        return IteratorSnapshot(
            self.number,
            in_words(trace, self.number),
            -1 if state.epoch is None else state.epoch,
            state.yielded if state.yielded or state.epoch is not None else -1,
            state.loader,
            state.over,
            doing,
            self._depths(),
            self.follower.pinned,
            *self._rates(now),
            workers,
            "" if cut else self._waits(doing, workers),
        )

    def _depths(self) -> dict[str, int]:
        state = self.state
        return {
            "index queue": sum(_tasks(worker.index_queue, Message.TASK) for worker in state.workers),
            "worker": sum(worker.held >= 0 for worker in state.workers if worker.worker >= 0),
            "result queue": _tasks(state.result_queue, Message.RESULT),
            "pin thread": int(state.pin is not None and state.pin.task >= 0),
            "ready queue": _tasks(state.ready_queue, Message.RESULT),
            "reorder buffer": len(state.reorder_buffer),
        }

    def _rates(self, now: int) -> tuple[float, float, float, float | None]:
        """Return window in s, batches/s, bytes/s that reached the loader's process, mean wait in s."""
        full = len(self.recent) == MOST_RECENT
        begin = max(now - int(WINDOW * 1e9), int(self.recent["time"][0]) if full else self.begun)
        window = max((now - begin) / 1e9, 1e-9)
        nexts = pairs(self.recent[np.isin(self.recent["code"], ev.NEXT)])
        nexts = nexts[(nexts["end"] >= begin) & (nexts["ey"] == Outcome.DATA)]
        wait = float(durations(nexts).mean()) / 1e9 if len(nexts) else None
        self.recent = self.recent[np.searchsorted(self.recent["time"], begin - int(WINDOW * 1e9)) :]
        recent = self.recent[self.recent["time"] >= begin]
        moved = recent["x"][recent["code"] == ev.RESULT_REBUILD[0]].sum()
        moved += recent["y"][recent["code"] == ev.RESULT_REBUILD[1]].sum()
        return window, np.count_nonzero(recent["code"] == ev.YIELD) / window, float(moved) / window, wait

    # --- what the workers do
    def _workers(
        self, job: Job, trace: Trace, now: int, cut: bool, lives: Mapping[int, ProcessLife]
    ) -> Iterator[WorkerSnapshot]:
        processes = {p.worker: p for p in trace.processes if p.role == "worker" and p.loader == self.number}
        followed = {worker.worker: worker for worker in self.state.workers if worker.worker >= 0}
        sender = "it" if self.facts.get("transport") == "arena" else "its feeder"
        for number in sorted(processes.keys() | followed.keys()):
            worker, process = followed.get(number, WorkerNow(number)), processes.get(number)
            pid = worker.pid if process is None else process.pid
            if not pid:
                continue  # it could not be started
            words, since = self._does(job, worker, process, cut)
            life, queued = lives.get(pid, ProcessLife.UNKNOWN), _tasks(worker.index_queue, Message.TASK)
            shown = Doing(words, max(0, now - since) / 1e9)
            yield WorkerSnapshot(number, pid, life, worker.idle, shown, self._feeder(number, now), queued, sender)

    def _does(self, job: Job, worker: WorkerNow, process: Process | None, cut: bool) -> tuple[str, int]:
        """The activity of a worker, in words, and since when. cut: the loader's recording has stopped."""
        if process is None:
            return "starting (nothing recorded yet)", worker.since or self.begun
        if process.whole_until and not cut:
            return "no longer recorded", job.cut(process)
        return worker.doing, process.start_ns if worker.activity == STARTING else worker.since

    def _feeder(self, worker: int, now: int) -> Doing | None:
        for message in self.state.result_queue:
            if message.worker == worker and message.stage in _FEEDING:
                step = {"code": _FEEDING[message.stage], "task": message.task, "worker": worker}
                return Doing(doing(step), max(0, now - message.since) / 1e9)
        return None

    # --- what is wrong
    def _waits(self, loader: Doing, workers: list[WorkerSnapshot]) -> str:
        state = self.state
        if not (state.waiting or state.shutting_down):
            return ""
        gone = [w.worker for w in workers if w.life is ProcessLife.GONE]
        missing, behind = missing_batch(state, gone), len(state.reorder_buffer)
        wanted = next((w for w in workers if state.waiting and w.worker == state.waiting_worker), None)
        if wanted is None or missing.place is BatchPlace.UNKNOWN:
            busy = (w.where() for w in workers if w.worker in gone or not w.idle)
            return "; ".join([loader.words, *busy])
        return _why(missing, wanted) + (f"; later batches that wait behind it: {behind}" if behind else "")


def _why(missing: MissingBatch, maker: WorkerSnapshot) -> str:
    """Why a batch is missing, in words."""
    stage = "" if missing.stage is None else _WHERE.get(missing.stage, "").format(sender=maker.sender)
    if missing.stage is not None and maker.feeder is not None and not missing.stage.sent:
        stage = f"{maker.sender} is {maker.feeder.words}"
    task = f"task {missing.task}"
    return missing.place.value.format(task=task, worker=maker.worker, maker=maker.where(), stage=stage)


def _tasks(queue: tuple[Queued, ...], kind: Message) -> int:
    return sum(message.kind is kind for message in queue)


def _needed(rows: Rows) -> Positions:
    """Return the positions of the events to follow: of a thread's samples, only those since its last other event.

    A sample only shows what a worker is doing, and a later event of its thread overwrites it.
    """
    _, thread = np.unique(rows["process"].astype(np.int64) << 32 | rows["tid"], return_inverse=True)
    sample = np.isin(rows["code"], [*ev.SAMPLE, ev.SAMPLE_INDEX])
    last = np.full(len(rows), -1, np.intp)
    np.maximum.at(last, thread[~sample], np.flatnonzero(~sample))
    return np.flatnonzero(~sample | (np.arange(len(rows)) > last[thread]))
