"""The headline of a trace: what held the loader up, in one sentence, with its evidence, its place and what to do next.

Interface: `headline(trace)` -> `Headline`. Every view has its `sentence` as title and begins at its `focus`. Of a trace
that is read while its run goes on (`Trace.seen`), it says what holds the loader up now.

Rules of use: of all that went wrong, the headline is the first cause: a process that died, then a wait that did not
end, then an error that ended the run. What bounds the loader is asked only if nothing of that happened. A wait counts
as a hang if it is long by itself and by the waits of the run before it: a run that is killed while all moves has not
hung. Durations end with the last event of a process, and with its last sign of life if it was found dead.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from minidl.analysis.consult import second_opinion
from minidl.analysis.now import IteratorSnapshot, Job
from minidl.analysis.verdict import Bound, Cause, summed, verdict
from minidl.doctor.case import Told
from minidl.doctor.diagnosis import Diagnosis, EvidenceLine, HangCause, State
from minidl.doctor.places import LoaderStep
from minidl.playback.state import Activity, MessageStage, ProtocolState
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.events import Actor, Ending, Message, Outcome
from minidl.tracefile.loaders import NamedLoader, dataloaders
from minidl.tracefile.process import Process, ProcessLife
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import durations, total
from minidl.tracefile.unended import alive_until, left_alive, since
from minidl.tracefile.watched import OWN, SHUTDOWN, Stall
from minidl.tracefile.words import counted, doing, duration, listed, plain, signal_name, unit_of

LONG: Final = 5_000_000_000
"""ns of waiting from which on it is a hang, if it is twice the longest of the run. The loader polls as often."""

SUDDEN: Final = 1_000_000_000
"""ns of waiting from which on it is a hang if it is ten times the longest of the run."""

MOST_SUMMED: Final = 20
"""Iterators of one DataLoader that are judged together: those that were waited for longest."""

LONGEST: Final = 170
"""Characters of a sentence: it is a title. Of a longer one the evidence has the whole."""


MANY: Final = 4
"""Steps of one kind from which on one of them may be no worse than the others."""

NOTABLE: Final = 0.2
"""Share of all waiting from which on one wait is worth a look of its own."""


class What(enum.Enum):
    """What became of the run; the sentence begins with it."""

    DIED = "died"
    HUNG = "hung"
    ERROR = "error"
    CUT = "cut"
    RUNNING = "running"
    SLOW = "slow"
    FINE = "fine"

    @property
    def wrong(self) -> bool:
        """Whether it ended the run, or kept it from going on."""
        return self in (What.DIED, What.HUNG, What.ERROR)


class Blamed(enum.Enum):
    """What a view frames, of a spot."""

    STEP = "the step"
    PROCESS = "its process, which stands still: what its thread was in is not to blame"
    ALIKE = "every step of its kind: none is much worse than the others"


@dataclass(frozen=True, slots=True)
class Spot:
    """Where to look: a span of one thread, while somebody waited. Times: ns, CLOCK_MONOTONIC.

    begin, end: of the wait, or of what was waited for. process: its position in `Trace.processes`; code: of the span's
    begin, 0 = the thread was in none; span: when that was. task, worker: -1 = none. epoch: -1 = unknown. frame: what is
    to blame; since: of a process that stands still, its last sign of life; words: what is said there, "" = its name.
    """

    loader: int
    begin: int
    end: int
    process: int
    tid: int
    code: int
    span: int
    task: int = -1
    worker: int = -1
    epoch: int = -1
    frame: Blamed = Blamed.STEP
    since: int = 0
    words: str = ""


@dataclass(frozen=True, slots=True)
class Headline:
    """What held the loader up. next_step: what helps in this case, "" if nothing has to be done.

    told: the last wait, for the doctor; None if the last thing that happened was none. diagnosis: the doctor's, if the
    trace has evidence of what its processes were blocked in; then the sentence is its sentence.
    """

    kind: What
    sentence: str
    evidence: tuple[str, ...] = ()
    next_step: str = ""
    focus: Spot | None = None
    told: Told | None = None
    diagnosis: Diagnosis | None = None

    def lines(self) -> list[str]:
        """The headline for a terminal."""
        step = [f"  next step: {self.next_step}"] if self.next_step else []
        return [self.sentence, *(f"  {text}" for text in self.evidence), *step]


_known: WeakKeyDictionary[Trace, tuple[Rows, Headline]] = WeakKeyDictionary()
"""The headlines that were computed, each with the events that it was computed from."""


def headline(trace: Trace, spans: Rows | None = None, job: Job | None = None) -> Headline:
    """What held the loader up in `trace`. spans: `trace.spans()`, if the caller has them already.

    job: what has followed the run up to this trace, if the trace has only its newest events.
    """
    events, found = _known.get(trace, (None, None))
    if found is None or events is not trace.events:
        found = _computed(trace, spans, job)
        _known[trace] = trace.events, found
    return found


def _computed(trace: Trace, spans: Rows | None, job: Job | None) -> Headline:
    if not len(trace):
        return Headline(What.RUNNING, _NOTHING_YET) if trace.seen else Headline(What.CUT, "cut: nothing was recorded")
    found = _Inquiry(trace, trace.spans() if spans is None else spans, job).headline()
    explored = trace.manifest.get("explored")
    if found.kind is What.CUT and isinstance(explored, dict):  # nothing was killed: the model's run ends there
        words = f"cut: a run of minidl explore ends here: {explored.get('wrong')}"
        found = dataclasses.replace(found, sentence=words, next_step="")
    sentence = titled(plain(found.sentence))
    whole = () if sentence == plain(found.sentence) else (found.sentence,)
    evidence = tuple(map(plain, (*whole, *found.evidence)))
    return dataclasses.replace(found, sentence=sentence, evidence=evidence, next_step=plain(found.next_step))


_NOTHING_YET: Final = "running: no iterator of a DataLoader has recorded anything yet"


@dataclass(frozen=True, slots=True)
class _Wait:
    """What a process that iterates was in last: a span of its own thread. until: as far as that is known, ns.

    ended: how it ended, "" if it did not.
    """

    row: np.void
    begin: int
    until: int
    past: int
    ended: str = ""

    @property
    def took(self) -> int:
        return self.until - self.begin

    def is_hang(self, goes_on: bool) -> bool:
        """Whether it is a hang. goes_on: the run has not ended, so that what is sudden may still end."""
        sudden = 0 < 10 * self.past <= self.took >= SUDDEN
        return self.ended == _TIMED_OUT or self.took >= max(LONG, 2 * self.past) or (sudden and not goes_on)

    @property
    def for_data(self) -> bool:
        return int(self.row["code"]) != ev.CONSUMER[0]


_TIMED_OUT, _INTERRUPTED = "its timeout passed", "it was interrupted"

_OUTER: Final = (ev.NEXT[0], ev.CONSUMER[0], ev.SHUTDOWN[0], ev.WORKER_START[0], ev.RESULT_GET[0], ev.READY_GET[0])
"""What a loader's process may be in as a whole: in the loader, or in the program's own code."""


class _Inquiry:
    """One trace, while its headline is looked for."""

    def __init__(self, trace: Trace, spans: Rows, job: Job | None) -> None:
        self.trace, self.spans, self.events, self.job = trace, spans, trace.events, job
        self.start, self.last = trace.start, trace.last
        self.until = alive_until(trace)
        last = max(self.last, trace.watched.until, *self.until)  # a process may hang long after its last event
        self.unit = unit_of(last - self.start)  # one unit for all that a title says
        at_home = (trace.events["loader"] > 0) & np.isin(trace.events["code"], [ev.NEXT[0], ev.EPOCH[0], *_OUTER[2:4]])
        roles = np.array([process.role != "worker" for process in trace.processes], bool)
        found = np.unique(trace.events["process"][at_home])
        self.homes: list[int] = found[roles[found]].tolist()
        self.over = {line["process"] for kind in ("trace_end", "program_end") for line in trace.described(kind)}
        self.alive = left_alive(trace)

    def headline(self) -> Headline:
        deaths = self._deaths()
        if len(deaths):
            return self._hung_before(deaths[0]) or self._died(deaths)
        waits = [wait for home in self.homes if (wait := self._last_wait(home)) is not None]
        goes_on = self.trace.seen > 0
        hung = [wait for wait in waits if wait.is_hang(goes_on)]
        hung.sort(key=lambda wait: (not wait.for_data, wait.begin))
        if hung and (hung[0].for_data or not goes_on):  # of a run that goes on, the loop may do something else
            return self._hung(hung[0], hung[1:])
        if (evident := self._evident(waits)) is not None:
            return self._hung(evident, [])
        for look in (self._at_exit, self._killed, self._main_died, self._error, self._raised, self._outlived):
            if (found := look()) is not None:
                return found
        ended = self._running(waits) if goes_on else self._cut(waits)
        return ended or self._judged()

    # --- what the processes that iterate were in last
    def _last_wait(self, home: int) -> _Wait | None:
        """The wait that a process was in when it was seen last, or that an interruption ended."""
        mine = self.spans[(self.spans["process"] == home) & (self.spans["loader"] > 0)]
        return self._open_wait(home, mine) or self._interrupted_wait(home, mine)

    def _open_wait(self, home: int, mine: Rows) -> _Wait | None:
        rows = mine[(mine["end"] < 0) & np.isin(mine["code"], _OUTER)]
        rows = rows[~np.isin(rows["loader"], list(self.alive))]
        returned = int(mine["end"][mine["code"] == ev.NEXT[0]].max(initial=0))  # an exception leaves its inner get open
        rows = rows[~np.isin(rows["code"], [ev.RESULT_GET[0], ev.READY_GET[0]]) | (rows["begin"] > returned)]
        if not len(rows) or home in self.over:
            return None
        latest = rows[rows["loader"] == rows["loader"][-1]]  # in order of their begins: what runs now began last
        row = latest[0]
        begin = since(self.trace, row)
        if row["code"] == ev.CONSUMER[0]:  # the program's code may have gone on, and iterated over another loader
            own = self.events[(self.events["process"] == home) & (self.events["tid"] == row["tid"])]
            begin = max(begin, int(own["time"][-1]))
        return _Wait(row, begin, max(begin, self.until[home]), self._past(mine, int(row["code"])))

    def _interrupted_wait(self, home: int, mine: Rows) -> _Wait | None:
        """The last `next`, if it gave neither a batch nor a task's error nor the epoch's end; or the consumer's."""
        nexts = mine[(mine["code"] == ev.NEXT[0]) & (mine["end"] >= 0)]
        if not len(nexts):
            return None
        row = nexts[-1]
        begin, end = int(row["begin"]), int(row["end"])
        inside = self._within(row)
        alone = not np.any(self.events["code"][self.events["loader"] == row["loader"]] == ev.INDEX_PUT)
        past = self._past(mine[mine["begin"] < begin], ev.NEXT[0])
        timed_out = inside[inside["code"] == ev.TIMED_OUT]
        if len(timed_out):
            return _Wait(row, begin, int(timed_out["time"][-1]), past, _TIMED_OUT)
        if row["ey"] == Outcome.ERROR and (alone or not np.any(inside["code"] == ev.YIELD)):
            return _Wait(row, begin, end, past, _INTERRUPTED)
        left = self.events[(self.events["code"] == ev.WORKER_EXIT) & (self.events["x"] == Ending.INTERRUPTED)]
        consumer = mine[(mine["code"] == ev.CONSUMER[0]) & (mine["begin"] >= end)]
        if len(left) and len(consumer):
            end = min(int(left["time"][0]), int(consumer["end"][-1]))
            own = self.events[(self.events["tid"] == row["tid"]) & (self.events["time"] < end)]
            past = self._past(mine[mine["begin"] < consumer["begin"][-1]], ev.CONSUMER[0])
            return _Wait(consumer[-1], int(own["time"][-1]), end, past, _INTERRUPTED)
        return None

    def _within(self, row: np.void) -> Rows:
        events = self.events
        inside = (events["loader"] == row["loader"]) & (events["time"] >= row["begin"]) & (events["time"] <= row["end"])
        rows: Rows = events[inside]
        return rows

    def _past(self, mine: Rows, code: int) -> int:
        """The longest of the process's earlier spans of this kind, ns."""
        kind = ev.CONSUMER[0] if code == ev.CONSUMER[0] else ev.NEXT[0]
        rows = mine[(mine["code"] == kind) & (mine["end"] >= 0)]
        followed = self.job.longest if self.job is not None and kind == ev.NEXT[0] else 0
        return max(int(durations(rows).max(initial=0)), followed)

    # --- hung
    def _evident(self, waits: list[_Wait]) -> _Wait | None:
        """A wait that is not long for this run, but that its processes can't end, as a watchdog saw."""
        for wait in sorted(waits, key=lambda wait: not wait.for_data):
            if wait.ended or wait.took < LONG or not self.trace.watched.looks:
                continue
            *_, focus, state = self._held_up(wait)
            found = second_opinion(self.trace, self._told(wait, state, focus, ()))
            if found is not None and found.state is State.HUNG:
                return wait
        return None

    def _held_up(self, wait: _Wait, how_long: str = "") -> tuple[str, str, Spot, ProtocolState]:
        """What the wait is for, what helps, where to look, and the loader's state. how_long: said of its own code."""
        shot, state = self._state(wait)
        found = self._missing(wait, shot, state) if wait.for_data else self._own_code(wait, state, how_long)
        return *found, state

    def _hung(self, wait: _Wait, others: list[_Wait]) -> Headline:
        for_how_long = f"{self.unit.of(wait.took)}, since {self._at(wait.begin)}"
        for_how_long += f", until {wait.ended}" if wait.ended else ""
        home = self.trace.processes[int(wait.row["process"])]
        rank = f" in rank {home.rank}" if home.rank >= 0 else ""
        what, step, focus, state = self._held_up(wait, f" for {for_how_long}")
        since_when = f"{home.name} waits since {self._at(wait.begin)}"
        past = f"; its longest wait before: {duration(wait.past)}" if wait.past else ""
        evidence = [since_when + past] if wait.for_data else []
        evidence += self._opened(focus)
        evidence += [f"finished behind it: {behind}"] if wait.for_data and (behind := _finished(state)) else []
        evidence += [f"{self._who(other)} for {duration(other.took)}: it may wait for the other" for other in others]
        during = wait.until - (wait.took // 10 if wait.ended else 0)  # what the end of the wait set free is no sign
        evidence.append(f"last events: {self._signs(focus, during)}")
        told = self._told(wait, state, focus, tuple(evidence))
        head, found = f"hung for {for_how_long}{rank}", second_opinion(self.trace, told)
        if found is None and not wait.for_data:  # an evaluation, a checkpoint or a hang: nothing here tells them apart
            return Headline(What.CUT, f"cut{rank}: {what}", (*self._at_work(wait), *evidence), step, focus, told)
        if found is None:
            return Headline(What.HUNG, f"{head}: {what}", tuple(evidence), step, focus, told)
        focus = self._stopped(wait, focus, found, told)
        chain = [*found.chain, *(fact.line() for fact in found.evidence)]
        helps = "; ".join(filter(None, (found.next_step, found.fix)))
        if found.state is not State.HUNG:
            return Headline(What.CUT, f"cut: {found.title}", tuple(chain), helps, focus, told, found)
        said = f"{head}: {found.title.partition(': ')[2]}"
        return Headline(What.HUNG, said, tuple(chain), helps or step, focus, told, found)

    def _stopped(self, wait: _Wait, focus: Spot, found: Diagnosis, told: Told) -> Spot:
        """The place of a process that the evidence shows as stopped: none of its steps is to blame."""
        if found.cause is not HangCause.STOPPED:
            return focus
        pids = [process.pid for process in self.trace.processes]
        at = pids.index(found.who["pid"]) if found.who.get("pid") in pids else focus.process
        if at != focus.process:
            focus = self._focus(wait, at, -1, self.trace.processes[at].worker)
        needed = told.task if told.worker_pid == self.trace.processes[at].pid else -1
        return self._still(wait, focus, "stopped:", needed)

    def _still(self, wait: _Wait, focus: Spot, words: str, task: int) -> Spot:
        """The place of a process that stands still. task: what the loader waits for from it, -1 = unknown."""
        since = wait.until - self._quiet(wait, focus.process)
        needed = f"; the loader waits for its task {task}" if task >= 0 else ""
        words = f"{words} no sign of life since {self._at(since)}{needed}"
        return dataclasses.replace(focus, frame=Blamed.PROCESS, since=since, words=words)

    def _at_work(self, wait: _Wait) -> list[str]:
        """The CPU time that a process used in a wait, by the watchdog's samples."""
        pid = self.trace.processes[int(wait.row["process"])].pid
        seen = [
            one for one in self.trace.watched.samples if pid in one.processes and wait.begin <= one.at <= wait.until
        ]
        if len(seen) < 2:
            return []
        used = (seen[-1].processes[pid].cpu_ms - seen[0].processes[pid].cpu_ms) * 1_000_000
        return [f"pid {pid} used {duration(used)} of CPU time in {duration(seen[-1].at - seen[0].at)} of that"]

    def _at_exit(self) -> Headline | None:
        """A process that hangs after its program: at Python's exit, or in a loader's shutdown. A watchdog has seen it.

        What the doctor calls a hang is one; another wait is one if it is longer than the watchdog was to allow.
        """
        for home in self.homes:
            stall = self._stall_after(home)
            if stall is None:
                continue
            ends = [line for line in self.trace.described("program_end") if line["process"] == home]
            begin = max([stall.since, *(line.get("monotonic_ns", 0) for line in ends)])
            took = self.trace.watched.until - begin
            patience = 1e9 * self.trace.watched.hang_after_s or LONG
            told = Told(
                hung=took >= min(LONG, patience), since=begin, seconds=took / 1e9, pid=stall.pid, tid=stall.pid,
                own_code=stall.what == OWN,
            )  # fmt: skip
            found = second_opinion(self.trace, told)
            place = LoaderStep.EXIT if stall.what == OWN else LoaderStep.SHUTDOWN
            if found is None:
                continue
            between = stall.what == OWN and found.state is State.HUNG and self._no_loader_waits(home, stall.since)
            if not between and not any(place.value in link for link in found.chain[:1]):
                continue
            chain = (*found.chain, *(fact.line() for fact in found.evidence))
            head = f"hung for {self.unit.of(took)}, since {self._at(begin)}"
            if found.state is State.HUNG:
                helps = "; ".join(filter(None, (found.next_step, found.fix)))
                return Headline(What.HUNG, f"{head}: {found.title.partition(': ')[2]}", chain, helps, None, told, found)
            if found.state is State.MAYBE_HUNG and home in self.over and took >= patience:
                waits = found.title.partition(": ")[2].partition(": ")[0]  # what follows is said of a wait for a batch
                helps = found.fix or "end what the program has started, threads and processes, before the program ends"
                said = f"{head}, after the program's end: {waits}"
                return Headline(What.HUNG, said, chain, helps, None, told)
        return None

    def _no_loader_waits(self, home: int, moment: int) -> bool:
        """Whether no thread of a process was inside of a loader's next after a moment."""
        mine = (self.spans["process"] == home) & (self.spans["code"] == ev.NEXT[0])
        return not np.any(mine & ((self.spans["end"] < 0) | (self.spans["end"] > moment)))

    def _stall_after(self, home: int) -> Stall | None:
        """What the watchdog saw a process in last, if that came after its program: its exit, or an open shutdown."""
        pid = self.trace.processes[home].pid
        stalls = [one.stall for one in self.trace.watched.looks if one.stall.pid == pid]
        stall = stalls[-1] if stalls else None
        if stall is None or stall.what not in (OWN, SHUTDOWN):
            return None
        if stall.what == OWN:
            own = (self.events["process"] == home) & (self.events["tid"] == pid)  # its feeders may go on for a while
            after = stall.since >= self.events["time"][own].max(initial=0)
        else:
            spans = self.spans[(self.spans["process"] == home) & (self.spans["code"] == ev.SHUTDOWN[0])]
            after = home in self.over and bool(np.any(spans["end"] < 0))
        return stall if after else None

    def _outlived(self) -> Headline | None:
        """A worker that had not ended when the shutdown gave up on it: Python's exit waits for it without a bound."""
        events, spans = self.events, self.spans
        gone = events["x"][events["code"] == ev.WORKER_GONE]
        in_vain = spans[(spans["code"] == ev.JOIN[0]) & (spans["end"] >= 0) & (spans["ey"] == 0)]
        for row in events[(events["code"] == ev.TERMINATE) & ~np.isin(events["x"], gone)]:
            mine = (in_vain["loader"] == row["loader"]) & (in_vain["worker"] == row["worker"])
            ends = in_vain["end"][mine & (in_vain["begin"] >= row["time"])]
            if len(ends):
                return self._did_not_end(row, int(ends[-1]))
        return None

    def _did_not_end(self, row: np.void, until: int) -> Headline:
        """A worker that a signal did not end. row: the signal's; until: when the shutdown gave up."""
        loader, worker, sent = (int(row[field]) for field in ("loader", "worker", "time"))
        name = signal_name(int(row["y"]))
        process = self._process_of(loader, worker, int(row["x"]))
        step = self._step_at(process, until)
        where = (int(step["tid"]), int(step["code"]), int(step["begin"])) if step is not None else (-1, 0, sent)
        task = int(step["task"]) if step is not None else -1
        focus = Spot(loader, sent, until, process, *where, task, worker, self._epoch(loader, sent))
        in_step = f": it was {doing(step)}" if step is not None else ""
        said = f"hung for {self.unit.of(until - sent)}, since {self._at(sent)}"
        said += f": {self.trace.processes[process].name} did not end by {name}{in_step}"
        evidence = (
            f"{name} was sent at {self._at(sent)}, and the shutdown gave up at {self._at(until)}",
            *self._opened(focus),
            "Python's exit waits for its workers without a bound; the trace does not tell whether this one ended",
        )
        helps = f"leave {name} alone in workers: their code, or a library's, ignores or blocks it; or it is stopped"
        return Headline(What.HUNG, said, evidence, helps, focus)

    def _told(self, wait: _Wait, state: ProtocolState, focus: Spot, evidence: tuple[str, ...]) -> Told:
        """The wait, as the doctor asks for it."""
        processes, number = self.trace.processes, focus.worker
        home, made_by = processes[int(wait.row["process"])], self._process_of(focus.loader, number)
        mine = [p for p in processes if p.role == "worker" and (p.loader, p.ppid) == (focus.loader, home.pid)]
        step = self._step_at(focus.process, wait.until) if focus.process != int(wait.row["process"]) else None
        return Told(
            hung=wait.is_hang(self.trace.seen > 0),
            since=wait.begin,
            seconds=wait.took / 1e9,
            past=wait.past / 1e9,
            pid=home.pid,
            tid=int(wait.row["tid"]),
            task=-1 if state.waiting_for is None else state.waiting_for,
            worker=number if wait.for_data else -1,
            worker_pid=processes[made_by].pid if number >= 0 and wait.for_data else 0,
            sample=self._sample(focus),
            step=doing(step) if step is not None else "",
            step_since=since(self.trace, step) if step is not None else 0,
            own_code=not wait.for_data,
            numbers={process.pid: process.worker for process in mine},
            others=frozenset(p.pid for p in processes if p.role == "worker" and p.loader != focus.loader),
            ranks={process.pid: process.rank for process in processes if process.rank >= 0 and process.worker < 0},
            facts=tuple((text, "trace") for text in evidence),
        )

    def _state(self, wait: _Wait) -> tuple[IteratorSnapshot, ProtocolState]:
        """The loader in the wait; of one that was ended, before all that its end did."""
        if self.job is not None and not wait.ended:
            return self._followed(self.job, self.trace, wait)
        moment = wait.until - (wait.took // 10 if wait.ended else 0)
        cut = copy.copy(self.trace)
        cut.__dict__.pop("order", None)
        number = int(wait.row["loader"])
        until = (self.events["time"] <= moment) & (self.events["loader"] == number)
        cut.events = self.events[until]
        job = Job()
        job.take(cut)
        return self._followed(job, cut, wait)

    def _followed(self, job: Job, trace: Trace, wait: _Wait) -> tuple[IteratorSnapshot, ProtocolState]:
        number = int(wait.row["loader"])
        lives = {process.pid: process.life for process in trace.processes} if self.trace.seen else {}
        (shot,) = (one for one in job.snapshot(trace, wait.until, lives).loaders if one.number == number)
        return shot, job.iterators[number].state

    def _missing(self, wait: _Wait, shot: IteratorSnapshot, state: ProtocolState) -> tuple[str, str, Spot]:
        """What is waited for and not there, what helps, and where to look."""
        task, number = state.waiting_for, state.waiting_worker
        task = -1 if task is None else task
        what = shot.waits or shot.doing.words
        if number < 0:  # whichever comes, or there are no workers: the first that is at work
            busy = [w.worker for w in state.workers if not w.idle]
            number = busy[0] if busy and not state.alone else -1
        home = int(wait.row["process"])
        pinned = state.pin is not None and state.pin.task == task >= 0
        process = self._process_of(int(wait.row["loader"]), number) if number >= 0 and not pinned else home
        focus = self._focus(wait, process, task, number)
        if pinned:
            step = f"try pin_memory=False; while it hangs, py-spy dump --pid {self.trace.processes[home].pid}"
            return what, step, focus
        rebuilt = any(m.task == task and m.stage is MessageStage.REBUILDING for m in state.result_queue)
        quiet = self._quiet(wait, process) if number >= 0 and (rebuilt or focus.code == ev.INDEX_GET[0]) else 0
        if rebuilt and quiet > wait.took // 2:
            who = self.trace.processes[process]
            what = f"{who.name} stands still: is it stopped? The loader needs it to hand over the memory of task {task}"
            step = f"see whether it is stopped (T), or keeps the GIL: ps -o stat,wchan -p {who.pid}"
            return what, step, self._still(wait, focus, "stopped?", task)
        if self.trace.processes[process].life is ProcessLife.STOPPED:
            focus = self._still(wait, focus, "stopped by a signal:", task)
        elif quiet > wait.took // 2:
            what = f"{self.trace.processes[process].name} has not taken task {task}: is it stopped?"
            focus = self._still(wait, focus, "stopped?", task)
        step = _what_helps(focus, state, self.trace.processes[process], self._sample(focus), quiet > wait.took // 2)
        return what, step, focus

    def _quiet(self, wait: _Wait, process: int) -> int:
        """For how long a process had recorded nothing when the wait ended, ns; an idle worker polls its queue."""
        own = self.events["time"][(self.events["process"] == process) & (self.events["time"] <= wait.until)]
        return wait.until - int(own[-1]) if len(own) else wait.took

    def _own_code(self, wait: _Wait, state: ProtocolState, how_long: str = "") -> tuple[str, str, Spot]:
        row, home = wait.row, int(wait.row["process"])
        after = f" after task {int(row['task'])}" if row["task"] >= 0 else ""
        ready = len(state.reorder_buffer) + len(state.ready_queue) + len(state.result_queue)
        what = f"the training loop's own code{after} has not called next{how_long}; batches that are ready: {ready}"
        step = (
            f"see where the loop stands: py-spy dump --pid {self.trace.processes[home].pid}; with several ranks it may "
            "wait for another rank, whose trace tells more"
        )
        focus = Spot(
            int(row["loader"]), wait.begin, wait.until, home, int(row["tid"]), int(row["code"]), int(row["begin"]),
            int(row["task"]), epoch=self._epoch(int(row["loader"]), wait.begin),
        )  # fmt: skip
        return what, step, focus

    def _focus(self, wait: _Wait, process: int, task: int, worker: int) -> Spot:
        """The innermost step of `process` in the wait: of what it did for the task, or of its main thread."""
        moment = wait.until - (wait.took // 10 if wait.ended else 0)
        loader = int(wait.row["loader"])
        row = self._step_at(process, moment, task)
        if row is None:
            row = wait.row
        epoch = self._epoch(loader, wait.begin)
        where = int(row["process"]), int(row["tid"]), int(row["code"]), int(row["begin"])
        return Spot(loader, wait.begin, wait.until, *where, int(row["task"]), worker, epoch)

    def _step_at(self, process: int, moment: int, task: int = -1) -> np.void | None:
        spans = self.spans
        there = (spans["process"] == process) & (spans["begin"] <= moment)
        there &= (spans["end"] < 0) | (spans["end"] > moment)
        rows = spans[there & ~np.isin(spans["code"], [ev.EPOCH[0], ev.READY_GET[0]])]
        mine = rows[rows["task"] == task] if task >= 0 else rows[:0]
        rows = mine if len(mine) else rows
        return rows[-1] if len(rows) else None

    # --- died
    def _deaths(self) -> Rows:
        """By which events workers or the pin thread were found dead, but for the workers that the loader ended."""
        events = self.events
        found = events[(events["code"] == ev.FOUND_DEAD) & (events["x"] != Actor.LOADER)]
        gone = events[(events["code"] == ev.WORKER_GONE) & (events["y"] != 0)]
        ended = events[events["code"] == ev.TERMINATE]
        ours = set(zip(ended["loader"].tolist(), ended["worker"].tolist(), strict=True))
        named = [(int(row["loader"]), int(row["worker"])) in ours for row in gone]
        rows: Rows = np.concatenate([found, gone[~np.array(named, bool)]])
        return rows[np.argsort(rows["time"], kind="stable")]

    def _hung_before(self, death: np.void) -> Headline | None:
        """The hang that a kill of the whole run ended, whose loader found a worker dead in its own last moment.

        kill -9 is how a person ends a run that hangs. A loader that lives on ends its `next` with an error.
        """
        home, (pid, code) = int(death["process"]), _dead(death)
        together = self.until[home] - int(death["time"]) < SUDDEN and home not in self.over and not self.trace.seen
        wait = self._last_wait(home)
        if code != -signal.SIGKILL or not together or self._starved or wait is None or wait.ended or not wait.for_data:
            return None
        wait = dataclasses.replace(wait, until=int(death["time"]) - 1)
        if not wait.is_hang(goes_on=False) and self._evident([wait]) is None:
            return None
        found = self._hung(wait, [])
        if found.kind is not What.HUNG:
            return None
        at = self._at(int(death["time"]))
        both = f"SIGKILL ended the whole run at {at}: its loader found pid {pid} dead, and died"
        known = found.diagnosis
        if known is not None:
            known = dataclasses.replace(known, evidence=(*known.evidence, EvidenceLine(both, "trace")))
        return dataclasses.replace(found, evidence=(*found.evidence, both), diagnosis=known)

    @property
    def _starved(self) -> bool:
        """Whether the kernel killed processes of the run's cgroup for memory, as the watchdog saw."""
        samples = self.trace.watched.samples
        return len(samples) > 1 and samples[-1].oom_kills > samples[0].oom_kills

    def _died(self, deaths: Rows) -> Headline:
        row = deaths[0]
        if row["code"] == ev.FOUND_DEAD and row["x"] == Actor.PIN_THREAD:
            return self._pin_thread_died(row)
        pid, code = _dead(row)
        loader, worker = int(row["loader"]), int(row["worker"])
        process = self._process_of(loader, worker, pid)
        of = f"rank {self.trace.processes[process].rank} " if self.trace.processes[process].rank >= 0 else ""
        step = self._step_at(process, self.until[process])
        if step is not None and int(step["tid"]) != pid:  # its feeder thread sends, and its main thread is at work
            spans = self.spans
            own = spans[(spans["process"] == process) & (spans["end"] < 0) & (spans["tid"] == pid)]
            own = own[np.isin(own["code"], [ev.SAMPLE[0], ev.FETCH[0], ev.COLLATE[0]])]
            step = own[-1] if len(own) else step
        last = min(self.until[process], int(row["time"]))  # a watchdog may see the end later than the loader does
        what = f"{of}worker {worker} (pid {pid}), last seen at {self._at(last)}, {_exit(code)}"
        if step is not None:
            what += f" while it was {doing(step)}"
            where = int(step["process"]), int(step["tid"]), int(step["code"]), int(step["begin"])
            task = int(step["task"])
        else:
            where, task = (process, -1, 0, last), -1
        others = {(int(other["loader"]), int(other["worker"])) for other in deaths} - {(loader, worker)}
        also = f"; so did {counted(len(others), 'other worker')}" if others else ""
        focus = Spot(loader, min(where[3], last), int(row["time"]), *where, task, worker, self._epoch(loader, last))
        noticed = duration(int(row["time"]) - last)
        evidence = [f"found dead {noticed} after its last sign of life"]
        evidence += self._opened(focus)
        return Headline(
            What.DIED, f"died: {what}{also}", tuple(evidence), _after_death(code, self._sample(focus)), focus
        )

    def _pin_thread_died(self, row: np.void) -> Headline:
        loader, home = int(row["loader"]), int(row["process"])
        exits = self.events[(self.events["code"] == ev.PIN_EXIT) & (self.events["loader"] == loader)]
        place = exits[-1] if len(exits) else row
        pins = self.spans[(self.spans["code"] == ev.PIN[0]) & (self.spans["loader"] == loader)]
        task = int(pins["task"][-1]) if len(pins) else -1
        where = f", last seen with task {task}" if task >= 0 else ""
        code = int(pins["code"][-1]) if len(pins) else 0
        begin = int(pins["begin"][-1]) if len(pins) else int(place["time"])
        focus = Spot(
            loader, begin, int(row["time"]), home, int(place["tid"]), code, begin, task,
            epoch=self._epoch(loader, begin),
        )  # fmt: skip
        what = f"died: the pin thread of {self.trace.processes[home].name} ended with an error{where}"
        step = "read the program's error, which has the pin thread's own; try pin_memory=False"
        return Headline(What.DIED, what, (f"found at {self._at(int(row['time']))}",), step, focus)

    def _killed(self) -> Headline | None:
        """A process that iterates was ended by a signal, as the watchdog saw.

        kill -9 is also how a person ends a run to look at it: it says nothing of the run, unless memory ran out.
        """
        starved = self._starved
        for home in self.homes:
            process = self.trace.processes[home]
            seen = self.trace.watched.death_of(process.pid)
            if seen is None or seen.code is None or home in self.over:
                continue
            code = seen.code
            if code >= 0 or code == -signal.SIGINT or (code == -signal.SIGKILL and not starved):
                continue
            same = [one for one in self.trace.watched.ended if one.code == code and one.pid != process.pid]
            with_it = f", and so were {counted(len(same), 'other process', 'other processes')}" if same else ""
            step = self._step_at(home, self.until[home])
            where = (int(step["tid"]), int(step["code"]), int(step["begin"])) if step is not None else (-1, 0, seen.at)
            what = f" while it was {doing(step)}" if step is not None else ""
            loader, task = (int(step["loader"]), int(step["task"])) if step is not None else (0, -1)
            focus = Spot(
                loader, min(where[2], seen.at), seen.at, home, *where, task, epoch=self._epoch(loader, seen.at)
            )
            evidence = [f"the watchdog saw it end at {self._at(seen.at)}"]
            evidence += ["the kernel has killed processes of its cgroup for memory"] if starved else []
            said = f"died: {process.name} {_exit(code)}{with_it}{what}"
            return Headline(What.DIED, said, tuple(evidence), _after_death(code, -1), focus)
        return None

    def _main_died(self) -> Headline | None:
        rows = self.events[(self.events["code"] == ev.FOUND_DEAD) & (self.events["x"] == Actor.LOADER)]
        found = {home: self.trace.processes[home] for home in self.homes}
        homes = [home for home, process in found.items() if process.pid in set(rows["y"].tolist())]
        gone = [home for home, process in found.items() if process.life is ProcessLife.GONE]
        gone = [home for home in gone if (wait := self._last_wait(home)) is not None and not wait.ended]
        if not homes and not gone:
            return None
        home = (homes or gone)[0]
        last, process = self.until[home], self.trace.processes[home]
        step = self._step_at(home, last)
        what = f" while it was {doing(step)}" if step is not None else ""
        focus = None
        if step is not None:
            loader = int(rows["loader"][0]) if homes else int(step["loader"])
            where = int(step["tid"]), int(step["code"]), int(step["begin"])
            focus = Spot(
                loader, int(step["begin"]), last, home, *where, int(step["task"]), epoch=self._epoch(loader, last)
            )
        later = (f"a worker found it gone {duration(int(t) - last)} later, when it next looked" for t in rows["time"])
        evidence = (next(later, "it is no longer there"), "nothing had waited longer than before")
        helps = "find who sent the signal: the scheduler's log, or dmesg for the kernel's out-of-memory killer"
        died = f"died: {process.name}, last seen at {self._at(last)}, ended without a shutdown{what}"
        return Headline(What.DIED, died, evidence, helps, focus)

    # --- an error
    def _error(self) -> Headline | None:
        """The first error after the last batch of a process: what came before it, the program went on from."""
        for home in self.homes:
            nexts = self.spans[(self.spans["process"] == home) & (self.spans["code"] == ev.NEXT[0])]
            nexts = nexts[nexts["end"] >= 0]
            good = np.flatnonzero(nexts["ey"] == Outcome.DATA)
            failed = nexts[(good[-1] + 1 if len(good) else 0) :]
            failed = failed[failed["ey"] == Outcome.ERROR]
            if len(failed):
                return self._failed(home, failed[0])
        return None

    def _failed(self, home: int, row: np.void) -> Headline:
        loader, inside = int(row["loader"]), self._within(row)
        errors = inside[(inside["code"] == ev.YIELD) & (inside["x"] == Outcome.ERROR)]
        epoch = self._epoch(loader, int(row["begin"]))
        of = f"rank {self.trace.processes[home].rank}: " if self.trace.processes[home].rank >= 0 else ""
        if not len(errors):
            return self._failed_outside(home, row, of)
        task, worker = int(errors["task"][0]), int(errors["worker"][0])
        told = self.events[(self.events["loader"] == loader) & (self.events["code"] == ev.TASK_ERROR)]
        told = told[(told["task"] == task) & (told["time"] <= row["end"])]
        text = self.trace.text(told[-1]) if len(told) else ""
        steps = self.spans[(self.spans["loader"] == loader) & (self.spans["task"] == task)]
        steps = steps[np.isin(steps["code"], [ev.FETCH[0], ev.SAMPLE[0], ev.COLLATE[0]])]
        steps = steps[(steps["begin"] <= row["end"])]
        step = steps[-1] if len(steps) else row
        where = f" {doing(step)}" if len(steps) else f" of task {task}"
        unseen = len(told) > 0 and step["code"] == ev.FETCH[0]  # torch's loader shows no step for a sample
        asked = int(told["y"][-1]) if unseen else -1
        where = f" in sample {asked} (task {task})" if asked >= 0 else where
        who = f", worker {worker}" if worker >= 0 else ""
        when = f", at {self._at(int(told['time'][-1]))}" if len(told) else ""
        sentence = f"error: {of}{_shortened(text) or 'an exception'}{where}{who}{when}"
        focus = Spot(
            loader, int(step["begin"]), int(row["end"]), int(step["process"]), int(step["tid"]), int(step["code"]),
            int(step["begin"]), task, worker, epoch,
        )  # fmt: skip
        evidence = [f"handed out in the batch's turn at {self._at(int(row['end']))}"]
        sample = asked if asked >= 0 else self._sample(focus)
        helps = f"run dataset[{sample}] alone" if sample >= 0 else "make that batch alone, with num_workers=0"
        return Headline(What.ERROR, sentence, tuple(evidence), helps, focus)

    def _failed_outside(self, home: int, row: np.void, of: str) -> Headline:
        """A `next` that failed for no task: by the sampler, or by an exception from outside."""
        inside = self._within(row)
        before = inside[(inside["tid"] == row["tid"]) & (inside["code"] != ev.NEXT[1])][-1]
        took = self.unit.of(int(row["end"] - row["begin"]))
        if before["code"] == ev.SAMPLER_NEXT[1] and not before["x"]:
            what = f"error: {of}the sampler raised when it was asked for task {before['task']}"
            focus = self._focus_of(row, int(row["end"]))
            return Headline(What.ERROR, what, (f"next had lasted {took}",), "iterate over the sampler alone", focus)
        if (raised := self._raised(home, row)) is not None:
            return self._timed_out(home, raised)
        wait = self._last_wait(home)
        assert wait is not None
        missing, step, focus = self._missing(wait, *self._state(wait))
        what = f"cut: {of}interrupted (Ctrl-C?) after waiting {took}, since {self._at(wait.begin)}: {missing}"
        evidence = (f"too short to call it a hang: the longest wait before was {duration(wait.past)}",)
        return Headline(What.CUT, what, (*evidence, *self._opened(focus)), step, focus)

    def _timed_out(self, home: int, raised: Headline) -> Headline:
        """An exception of the loader's that gave up a wait, with what it waited for."""
        wait = self._last_wait(home)
        if wait is None or not wait.for_data or "timed out after" not in raised.sentence:
            return raised
        _, step, focus = self._missing(wait, *self._state(wait))
        opened = self._opened(focus)
        sentence = raised.sentence + "".join(f"; {one}" for one in opened[:1])
        return dataclasses.replace(raised, sentence=sentence, next_step=step, focus=focus)

    def _raised(self, home: int = -1, row: np.void | None = None) -> Headline | None:
        """The exception that ended the program, as it was written down. row: the `next` that it came from."""
        for line in self.trace.described("uncaught"):
            process, error = int(line["process"]), str(line.get("error"))
            if process not in ([home] if home >= 0 else self.homes) or error.startswith(_NO_ERRORS):
                continue
            at = [str(one) for one in line.get("at", [])]
            where = " in next" if row is not None else " in the program's own code"
            sentence = f"error: {_shortened(error)}{where}" + (f", at {PurePath(at[0]).name}" if at else "")
            last = self.events["time"][self.events["process"] == process].max(initial=0)
            moment = line.get("monotonic_ns", int(last))
            if row is not None:
                focus = self._focus_of(row, int(row["end"]))
            else:
                tid = self.trace.processes[process].pid
                focus = Spot(0, moment, moment, process, tid, ev.CONSUMER[0], moment)
            evidence = (f"raised at {self._at(moment)}", *(f"called from {one}" for one in at[1:4]))
            return Headline(What.ERROR, sentence, evidence, _after_error(error), focus)
        return None

    # --- cut, slow, fine
    def _cut(self, waits: list[_Wait]) -> Headline | None:
        """A recording without the run's end, in which all moved."""
        unended = [wait for wait in waits if not wait.ended and int(wait.row["process"]) not in self.over]
        if not unended:
            return None
        wait = unended[0]
        home = self.trace.processes[int(wait.row["process"])]
        nexts = self.spans[(self.spans["code"] == ev.NEXT[0]) & (self.spans["end"] >= 0)]
        batches = int(np.count_nonzero(nexts["ey"] == Outcome.DATA))
        step = self._step_at(int(wait.row["process"]), wait.until)
        at_work = doing(wait.row if step is None else step)
        whole = " (the file was cut)" if home.whole_until else ""
        what = (
            f"cut: the recording ends after {counted(batches, 'batch', 'batches')}, before the run's end (killed, or "
            f"still running){whole}; {home.name} was {at_work} since {self._at(wait.begin)}"
        )
        if wait.took <= wait.past:
            moved = f"all moved: {home.name} has waited longer before, {duration(wait.past)}"
        else:
            moved = f"too short to call it a hang: the longest before was {duration(wait.past)}"
        judged = self._judged()
        evidence = (moved, f"last events: {self._signs(None, self.last)}", judged.sentence)
        helps = "if it was killed, nothing here had stopped: find who sent the signal (scheduler, dmesg)"
        *_, waited, state = self._held_up(wait)
        told = self._told(wait, state, waited, evidence)
        found = second_opinion(self.trace, told) if wait.took >= LONG else None
        if found is not None and found.state is State.MAYBE_HUNG:
            chain = (*found.chain, *(fact.line() for fact in found.evidence))
            return Headline(What.CUT, f"cut: {found.title}", chain, found.next_step, waited, told, found)
        return Headline(What.CUT, what, evidence, helps, waited, told)

    def _running(self, waits: list[_Wait]) -> Headline:
        """A run that goes on: what it waits for now, if that is longer than before, or else what bounds it so far."""
        now = [wait for wait in waits if not wait.ended and wait.took >= max(SUDDEN, wait.past)]
        judged = self._judged()
        if not now:
            return Headline(What.RUNNING, f"running, so far {judged.sentence}", judged.evidence, judged.next_step)
        wait = max(now, key=lambda wait: wait.for_data)
        what, step, focus, _ = self._held_up(wait)
        past = f"the longest before: {duration(wait.past)}" if wait.past else "none has ended before"
        missing = "but no batch" if wait.for_data else "no call of next"
        sentence = f"running, {missing} for {self.unit.of(wait.took)}, since {self._at(wait.begin)}: {what}"
        return Headline(What.RUNNING, sentence, (past, *self._opened(focus)), step, focus)

    def _focus_of(self, row: np.void, end: int) -> Spot:
        loader = int(row["loader"])
        where = int(row["process"]), int(row["tid"]), int(row["code"]), int(row["begin"])
        epoch = self._epoch(loader, int(row["begin"]))
        return Spot(loader, int(row["begin"]), end, *where, int(row["task"]), epoch=epoch)

    def _judged(self) -> Headline:
        """What bounds the DataLoader that was waited for longest: its iterators together, one for each epoch."""
        waits = self.spans[(self.spans["code"] == ev.NEXT[0]) & (self.spans["end"] >= 0)]
        numbers = [int(number) for number in np.unique(self.events["loader"]) if number]
        if not numbers:
            return Headline(What.FINE, "fine: no iterator of a DataLoader has recorded anything")
        waited = {number: total(waits[waits["loader"] == number]) for number in numbers}
        named = dataloaders(self.trace)
        known = [one for one in named if _is_known(self.trace, one)]
        groups = {_of_rank(one): [n for n in one.iterators if n in waited] for one in known}
        single = set(numbers) - {number for group in groups.values() for number in group}
        groups |= {f"iterator {number}": [number] for number in sorted(single)}
        name, group = max(groups.items(), key=lambda item: (sum(waited[number] for number in item[1]), -min(item[1])))
        group.sort(key=lambda number: (-waited[number], number))
        number = group[0]
        together = summed(self.trace, group[:MOST_SUMMED], self.spans) if len(group) > 1 else None
        found = together or verdict(self.trace, number, self.spans)
        said, _, rest = plainer(found.sentence).partition("; ")
        evidence = (*([rest] if rest else []), *found.evidence)
        if len(groups) > 1:
            kind = "iterators" if name == f"iterator {number}" else "DataLoaders"
            evidence = (f"of {len(groups)} {kind} the one that was waited for longest: {name}", *evidence)
            params, several = self.trace.loaders.get(number, {}), len({one.name for one in known}) > 1
            who = [f"rank {params['rank']}"] if len({one.rank for one in known}) > 1 else []
            who += [PurePath(str(params["made_at"])).name] if several and params.get("made_at") else []
            said = f"{' '.join(who)} is {said}" if who and said.startswith(found.kind.value) else said
        if found.kind in (Bound.NOT_INPUT, Bound.TOO_FEW, Bound.UNSEEN):
            return Headline(What.FINE, f"fine: {said}", evidence, found.next_step)
        mine = waits[(waits["loader"] == number) & (waits["ey"] == Outcome.DATA)]
        later = mine[mine["bx"] > 0]  # an epoch's first batch waits for workers that begin
        named = mine[mine["task"] == found.task]
        if len(named):
            mine = named
        elif found.kind is not Bound.START_UP and len(mine) > 1:
            mine = later if 3 * total(later) >= total(mine) else mine[1:]
        longest = mine[np.argmax(durations(mine))] if len(mine) else None
        if found.kind is Bound.START_UP:
            focus = self._start(number)
        else:
            focus = None if longest is None else self._waited_for(longest)
        alone = found.kind is Bound.HEAD_OF_LINE
        if focus is not None and not alone and self._is_one_of_many(focus, group, total(mine)):
            focus = dataclasses.replace(focus, frame=Blamed.ALIKE)
        return Headline(What.SLOW, f"slow: {said}", evidence, found.next_step, focus)

    def _is_one_of_many(self, focus: Spot, group: list[int], waited: int) -> bool:
        """Whether the step in focus is hardly worse than others of its kind, or its wait is a small part of all."""
        rows = self.spans[np.isin(self.spans["loader"], group) & (self.spans["code"] == focus.code)]
        rows = rows[rows["end"] >= 0]
        step = rows[(rows["process"] == focus.process) & (rows["begin"] == focus.span)]
        if len(rows) < MANY or not len(step):
            return False
        usual = float(np.median(durations(rows)))
        return int(durations(step)[0]) < 2 * usual or focus.end - focus.begin < waited * NOTABLE

    def _start(self, number: int) -> Spot | None:
        """What took longest of what an iterator's workers do before their first batch, or of their ends."""
        kinds = [ev.WORKER_INIT[0], ev.MAKE_FETCHER[0], ev.WORKER_START[0], ev.JOIN[0]]
        rows = self.spans[(self.spans["loader"] == number) & np.isin(self.spans["code"], kinds)]
        rows = rows[rows["end"] >= 0]
        if not len(rows):
            return None
        row = rows[np.argmax(durations(rows))]
        return self._focus_of(row, int(row["end"]))

    def _waited_for(self, row: np.void) -> Spot:
        """The step that the longest wait waited for: of its task, the innermost while it lasted."""
        focus = self._focus_of(row, int(row["end"]))
        spans = self.spans
        there = (
            (spans["loader"] == row["loader"]) & (spans["task"] == row["task"]) & (spans["process"] != row["process"])
        )
        there &= (spans["begin"] <= row["end"]) & (spans["end"] >= row["begin"])
        steps = spans[there & np.isin(spans["code"], [ev.SAMPLE[0], ev.COLLATE[0], ev.FETCH[0]])]
        if not len(steps):
            return focus
        inner = steps[steps["code"] != ev.FETCH[0]]
        steps = inner if len(inner) else steps
        overlap = np.minimum(steps["end"], row["end"]) - np.maximum(steps["begin"], row["begin"])
        step = steps[np.argmax(overlap)]
        where = int(step["process"]), int(step["tid"]), int(step["code"]), int(step["begin"])
        return Spot(focus.loader, focus.begin, focus.end, *where, focus.task, int(step["worker"]), focus.epoch)

    # --- words and places
    def _at(self, time: int) -> str:
        return self.unit.at(max(0, time - self.start))

    def _who(self, wait: _Wait) -> str:
        return f"{self.trace.processes[int(wait.row['process'])].name} has been {doing(wait.row)}"

    def _opened(self, focus: Spot) -> list[str]:
        """The chain of steps that the focus lies in, from the outermost on."""
        if not focus.code:
            return []
        spans = self.spans
        there = (spans["process"] == focus.process) & (spans["tid"] == focus.tid) & (spans["begin"] <= focus.span)
        rows = spans[there & ((spans["end"] < 0) | (spans["end"] > focus.span)) & (spans["code"] != ev.EPOCH[0])]
        name = self.trace.processes[focus.process].name
        steps = (f"{doing(row)} since {self._at(since(self.trace, row))}" for row in rows)
        return [f"{name}: {', '.join(steps)}"] if len(rows) else []

    def _signs(self, focus: Spot | None, until: int) -> str:
        """When each process was last heard of up to a time, the one in focus first."""
        order = sorted(range(len(self.trace.processes)), key=lambda index: focus is None or index != focus.process)
        out = []
        for index in order:
            times = self.events["time"][(self.events["process"] == index) & (self.events["time"] <= until)]
            seen = self._at(int(times[-1])) if len(times) else "never"
            out.append(f"{_named(self.trace.processes[index])} {seen}")
        return listed(out)

    def _sample(self, focus: Spot) -> int:
        """The sample's index that the focus is in; -1 = none."""
        if focus.code != ev.SAMPLE[0]:
            return -1
        spans = self.spans
        rows = spans[(spans["process"] == focus.process) & (spans["tid"] == focus.tid) & (spans["begin"] == focus.span)]
        rows = rows[rows["code"] == ev.SAMPLE[0]]
        return int(rows["by"][0]) if len(rows) else -1

    def _process_of(self, loader: int, worker: int, pid: int = 0) -> int:
        """The worker's place in the trace's processes; that of the loader's own if it has recorded nothing."""
        processes = self.trace.processes
        found = [i for i, p in enumerate(processes) if p.role == "worker" and (p.loader, p.worker) == (loader, worker)]
        found = [i for i in found if not pid or processes[i].pid == pid] or found
        return (found or self.homes or [0])[-1]

    @cached_property
    def _epochs(self) -> Rows:
        rows: Rows = self.events[self.events["code"] == ev.EPOCH[0]]
        return rows

    def _epoch(self, loader: int, time: int) -> int:
        begun = self._epochs[(self._epochs["loader"] == loader) & (self._epochs["time"] <= time)]
        return int(begun["x"][-1]) if len(begun) else -1


def _of_rank(one: NamedLoader) -> str:
    return f"rank {one.rank}: {one.name}" if one.rank >= 0 else one.name


def _is_known(trace: Trace, one: NamedLoader) -> bool:
    """Whether it is recorded which DataLoader made these iterators, and there are events of one."""
    there = np.isin(one.iterators, trace.events["loader"]).any()
    return bool(there and trace.loaders[one.iterators[0]].get("dataloader"))


def plainer(verdict: str) -> str:
    """Return a verdict's sentence for a title: one share, and not a share of a share."""
    said = verdict.replace("the training loop", "the loop")
    said = re.sub(r", (\d+)% of that ", lambda share: ", mostly " if int(share[1]) >= 50 else ", partly ", said)
    for cause, verb in _MADE.items():
        said = said.replace(f" made batches, mostly {cause.value}", f" {verb}")
    return said


_MADE: Final = {
    Cause.SAMPLES: "fetched samples",
    Cause.COLLATE: "collated batches",
    Cause.IPC: "pickled and sent batches",
}
"""What workers mostly did as they made batches."""


# --- Words ------------------------------------------------------------------------------------------------------------
def _named(process: Process) -> str:
    of = "" if process.rank < 0 else f"rank {process.rank} "
    return f"{of}{process.role}{'' if process.worker < 0 else f' {process.worker}'}"


def _dead(row: np.void) -> tuple[int, int]:
    """Which process a death is of, and its exit code: the two events that tell of one have them in other fields."""
    pid, code = ("y", "z") if row["code"] == ev.FOUND_DEAD else ("x", "y")
    return int(row[pid]), int(row[code])


def _exit(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def titled(sentence: str) -> str:
    """Return the sentence in at most LONGEST characters: without what is not its cause, first of all.

    First go what waits behind, a share of a share, the folders of paths, the functions and lines of code; the middle
    goes last, for a sentence begins with what happened and ends with why.
    """
    for pattern, short in (
        (r"; later batches that wait behind it: \d+", ""),
        (r" \(\d+% of their time\)", ""),
        (r"(?<![\w.])/\S*/", ".../"),
        (r" \((?:[^()]* at )?[^()\s]*:\d+\)", ""),
        (r" \(pid \d+\)", ""),
    ):
        if len(sentence) > LONGEST:
            sentence = re.sub(pattern, short, sentence)
    if len(sentence) > LONGEST:
        begin = LONGEST // 3
        first, last = sentence[:begin].rpartition(" ")[0], sentence[begin + 5 - LONGEST :].partition(" ")[2]
        sentence = f"{first or sentence[:begin]} ... {last or sentence[begin + 5 - LONGEST :]}"
    return sentence


def _shortened(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _finished(state: ProtocolState) -> str:
    """The batches that are made and wait behind the missing one."""
    there = (MessageStage.WRITTEN, MessageStage.READ, MessageStage.REBUILDING, MessageStage.REBUILT)
    piped: Iterable[int] = (m.task for m in state.result_queue if m.kind is Message.RESULT and m.stage in there)
    ready: Iterable[int] = (m.task for m in state.ready_queue if m.kind is Message.RESULT)
    tasks = sorted({*state.reorder_buffer, *piped, *ready} - {state.waiting_for})
    return f"{counted(len(tasks), 'task')} ({listed(tasks)})" if tasks else ""


_STEPS: Final = {
    ev.COLLATE[0]: "call collate_fn on the samples of that task alone",
    ev.FETCH[0]: "fetch the samples of that task alone, with num_workers=0",
    ev.WORKER_INIT[0]: "call worker_init_fn alone; a lock that was held at the fork stays locked: try "
    "multiprocessing_context='forkserver'",
    ev.MAKE_FETCHER[0]: "iterate over the dataset without workers; a lock that was held at the fork stays locked: try "
    "multiprocessing_context='forkserver'",
    ev.RESULT_PICKLE[0]: "pickle that batch alone",
    ev.SHM_COPY[0]: "look for room in shared memory: df -h /dev/shm",
    ev.RESULT_WRITE[0]: "find who holds the result pipe: its reader reads no more, or a writer was stopped in a write",
    ev.PIN[0]: "try pin_memory=False",
    ev.SAMPLER_NEXT[0]: "iterate over the sampler alone",
}


def _what_helps(focus: Spot, state: ProtocolState, process: Process, sample: int, silent: bool) -> str:
    look = f"see where it stands: py-spy dump --pid {process.pid}"
    if silent:
        return f"see whether it is stopped (T) or swapped out: ps -o stat,wchan -p {process.pid}"
    if sample >= 0:
        return f"run dataset[{sample}] alone; while it hangs, {look}"
    if any(worker.activity is Activity.STARTING for worker in state.workers if worker.worker == focus.worker):
        return f"see whether the worker's process has come up: imports, the dataset's unpickling; {look}"
    known = _STEPS.get(focus.code)
    return f"{known}; while it hangs, {look}" if known else f"while it hangs, {look}"


_NO_ERRORS: Final = ("KeyboardInterrupt", "SystemExit", "GeneratorExit")
"""Exceptions with which a program ends because it was asked to."""


def _after_error(error: str) -> str:
    if re.search(r"Too many open files|ancdata|Errno 24", error):
        return (
            "no file descriptors are left: ulimit -n 65536; keep copies of tensors and not the batches; "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        )
    if re.search(r"No space left|unable to (allocate|resize|write|mmap)|Errno 28", error):
        return "look for room in shared memory: df -h /dev/shm (of a container: --shm-size); smaller batches"
    return "read the program's traceback"


def _after_death(code: int, sample: int) -> str:
    alone = f"run dataset[{sample}] alone" if sample >= 0 else "run the same samples with num_workers=0"
    return {
        -signal.SIGKILL: "look for the kernel's out-of-memory killer: dmesg -T | grep -i 'killed process'; if it was "
        "that, fewer workers or a smaller prefetch_factor",
        -signal.SIGBUS: "look for room in shared memory: df -h /dev/shm (of a container: --shm-size); smaller batches",
        -signal.SIGSEGV: f"{alone} under python -X faulthandler",
        -signal.SIGABRT: f"{alone} under python -X faulthandler",
        -signal.SIGTERM: "find who sent the signal: a scheduler, or another process of the job",
        -signal.SIGINT: "somebody interrupted the job (Ctrl-C)",
    }.get(code, alone)
