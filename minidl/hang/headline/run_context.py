"""One trace while its headline is computed: its last waits, the last step of each process, and the focus."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from minidl.hang.finding import Finding, Focus, HangCause, RecordedWait, RunOutcome, Sure, from_trace
from minidl.hang.limits import LONG, SUDDEN, is_long
from minidl.hang.places import LoaderStep
from minidl.hang.snapshot import Job
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.events import CALLS, Call, Ending, Outcome
from minidl.tracefile.open_spans import alive_until, open_at, open_call, since, step_at
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import durations
from minidl.tracefile.words import doing, listed, unit_of


@dataclass(frozen=True, slots=True)
class LastWait:
    """The last wait of an iterating process: a span of its own thread. until: as far as known, ns.

    past: the longest earlier wait of its kind, ns. ended: how it ended, "" if it did not.
    """

    row: np.void
    begin: int
    until: int
    past: int
    ended: str = ""

    @property
    def took(self) -> int:
        return self.until - self.begin

    @property
    def home(self) -> int:
        """The index of the process that waits."""
        return int(self.row["process"])

    @property
    def loader(self) -> int:
        return int(self.row["loader"])

    @property
    def at_its_end(self) -> int:
        """A moment at the end of the wait, before the events that this end caused."""
        return self.until - (self.took // 10 if self.ended else 0)

    @property
    def long(self) -> bool:
        """Whether it lasted so long that evidence was taken."""
        return self.took >= LONG * 1e9

    def is_hang(self, goes_on: bool) -> bool:
        """Whether it is a hang. goes_on: the run has not ended, so that a short wait may still end."""
        sudden = 0 < 10 * self.past <= self.took >= SUDDEN * 1e9
        return self.ended == _TIMED_OUT or is_long(self.took / 1e9, self.past / 1e9) or (sudden and not goes_on)

    @property
    def for_data(self) -> bool:
        return CALLS.get(int(self.row["code"])) is not Call.OWN


_TIMED_OUT, _INTERRUPTED = "its timeout passed", "it was interrupted"

_AT_HOME: Final = [code for code, call in CALLS.items() if call is not Call.OWN]
"""Events that only a process that iterates records."""

_NO_EVIDENCE: Final = "the call that blocks it: the trace has no evidence of it (record with MINIDL_HANG_AFTER=60)"

_CAUSES: Final = {
    RunOutcome.DIED: HangCause.DIED,
    RunOutcome.HUNG: HangCause.UNKNOWN,
    RunOutcome.ERROR: HangCause.ERROR,
    RunOutcome.SLOW: HangCause.SLOW,
}

STEPS: Final = {
    ev.SAMPLE[0]: LoaderStep.SAMPLE,
    ev.FETCH[0]: LoaderStep.SAMPLE,
    ev.COLLATE[0]: LoaderStep.COLLATE,
    ev.WORKER_INIT[0]: LoaderStep.INIT,
    ev.MAKE_FETCHER[0]: LoaderStep.OPEN,
    ev.INDEX_GET[0]: LoaderStep.IDLE,
    ev.RESULT_PICKLE[0]: LoaderStep.PICKLE,
    ev.RESULT_WRITE[0]: LoaderStep.WRITE,
    ev.RESULT_REBUILD[0]: LoaderStep.UNPICKLE,
    ev.SAMPLER_NEXT[0]: LoaderStep.SAMPLER,
    ev.PIN[0]: LoaderStep.PIN,
    ev.CONSUMER[0]: LoaderStep.CONSUMER,
    ev.SHUTDOWN[0]: LoaderStep.SHUTDOWN,
    ev.WORKER_START[0]: LoaderStep.START,
}
"""The loader's steps by the events of a trace."""


class RunContext:
    """One trace while its headline is computed. Times: ns, CLOCK_MONOTONIC; a process: its index in the trace.

    homes: the processes that iterate; over: those whose end is recorded; until: the last sign of life of each;
    unit: the unit of all durations in a title; runs: the job is running.
    """

    def __init__(self, trace: Trace, spans: Rows, job: Job | None) -> None:
        self.trace, self.spans, self.events, self.job = trace, spans, trace.events, job
        self.processes, self.runs = trace.processes, trace.seen > 0
        self.start, self.last = trace.start, trace.last
        self.until = alive_until(trace)
        last = max(self.last, trace.watched.until, *self.until)  # a process may hang long after its last event
        self.unit = unit_of(last - self.start)  # one unit for all durations in a title
        at_home = (trace.events["loader"] > 0) & np.isin(trace.events["code"], _AT_HOME)
        roles = np.array([process.role != "worker" for process in trace.processes], bool)
        found = np.unique(trace.events["process"][at_home])
        self.homes: list[int] = found[roles[found]].tolist()
        self.over = {line["process"] for kind in ("trace_end", "program_end") for line in trace.described(kind)}

    def finding(
        self, outcome: RunOutcome, what: str, evidence: Iterable[str] = (), next_step: str = "",
        focus: Focus | None = None, wait: RecordedWait | None = None, head: str = "",
    ) -> Finding:  # fmt: skip
        """A finding from the events alone."""
        hung = outcome is RunOutcome.HUNG
        who, where = ({}, {}) if focus is None else self._place(focus, outcome)
        return Finding(
            outcome, what, _CAUSES.get(outcome, HangCause.NONE), head, evidence=from_trace(*evidence),
            sure=Sure.UNKNOWN if hung else Sure.LIKELY, next_step=next_step,
            not_seen=(_NO_EVIDENCE,) if hung else (), who=who, where=where, focus=focus, wait=wait,
        )  # fmt: skip

    def _place(self, focus: Focus, outcome: RunOutcome) -> tuple[dict[str, Any], dict[str, Any]]:
        """The role and place that a finding is about."""
        process = self.processes[focus.process]
        of_worker = focus.worker >= 0 and outcome in (RunOutcome.ERROR, RunOutcome.DIED)
        number = focus.worker if of_worker else process.worker
        step = STEPS.get(focus.code, LoaderStep.OTHER).name.lower()
        where = {"step": step, "sample": self.sample(focus), "task": focus.task}
        role = "worker" if number >= 0 else "loop"
        return {"role": role, "worker": number, "pid": process.pid, "thread": focus.tid}, where

    # --- events and spans
    def events_of(self, code: int, loader: int) -> Rows:
        rows: Rows = self.events[(self.events["code"] == code) & (self.events["loader"] == loader)]
        return rows

    def spans_of(self, codes: Iterable[int], **fields: int) -> Rows:
        """The spans of some kinds, with these values of fields."""
        there = np.isin(self.spans["code"], list(codes))
        for name, value in fields.items():
            there &= self.spans[name] == value
        rows: Rows = self.spans[there]
        return rows

    def within(self, row: np.void) -> Rows:
        """The events of a span's loader while it lasted."""
        events = self.events
        inside = (events["loader"] == row["loader"]) & (events["time"] >= row["begin"]) & (events["time"] <= row["end"])
        rows: Rows = events[inside]
        return rows

    def step_at(self, process: int, moment: int, task: int = -1) -> np.void | None:
        """The innermost span of a process at a moment; a span of `task` if there is one."""
        return step_at(self.spans, process, moment, task)

    def process_of(self, loader: int, worker: int, pid: int = 0) -> int:
        """The worker's index in the trace's processes; the last iterating process's if it has recorded nothing."""
        numbered = enumerate(self.processes)
        found = [i for i, p in numbered if p.role == "worker" and (p.loader, p.worker) == (loader, worker)]
        found = [i for i in found if not pid or self.processes[i].pid == pid] or found
        return (found or self.homes or [0])[-1]

    def quiet(self, wait: LastWait, process: int) -> int:
        """The time since a process's last event when the wait ended, ns; an idle worker polls its queue."""
        own = self.events["time"][(self.events["process"] == process) & (self.events["time"] <= wait.until)]
        return wait.until - int(own[-1]) if len(own) else wait.took

    @property
    def out_of_memory(self) -> bool:
        """Whether the out-of-memory killer killed processes of the run's cgroup, as the watchdog saw."""
        samples = self.trace.watched.samples
        return len(samples) > 1 and samples[-1].oom_kills > samples[0].oom_kills

    # --- waits
    @cached_property
    def waits(self) -> list[LastWait]:
        """The last wait of each iterating process."""
        return [wait for home in self.homes if (wait := self.last_wait(home)) is not None]

    def last_wait(self, home: int) -> LastWait | None:
        """The wait of a process at its last sign of life, or the wait that an interruption ended."""
        mine = self.spans[(self.spans["process"] == home) & (self.spans["loader"] > 0)]
        row = None if home in self.over else open_call(self.trace, self.spans, home)
        return self._interrupted_wait(mine) if row is None else self._open_wait(home, mine, row)

    def _open_wait(self, home: int, mine: Rows, row: np.void) -> LastWait:
        begin = since(self.trace, row)
        if row["code"] == ev.CONSUMER[0]:  # the program's code may have gone on, and iterated over another loader
            own = self.events[(self.events["process"] == home) & (self.events["tid"] == row["tid"])]
            begin = max(begin, int(own["time"][-1]))
        return LastWait(row, begin, max(begin, self.until[home]), self._past(mine, row))

    def _interrupted_wait(self, mine: Rows) -> LastWait | None:
        """The last `next`, if it gave no batch, no task's error and no epoch's end; or else the consumer's span."""
        nexts = mine[(mine["code"] == ev.NEXT[0]) & (mine["end"] >= 0)]
        if not len(nexts):
            return None
        row = nexts[-1]
        begin, end, inside = int(row["begin"]), int(row["end"]), self.within(row)
        past = self._past(mine[mine["begin"] < begin], row)
        timed_out = inside[inside["code"] == ev.TIMED_OUT]
        if len(timed_out):
            return LastWait(row, begin, int(timed_out["time"][-1]), past, _TIMED_OUT)
        alone = not len(self.events_of(ev.INDEX_PUT, int(row["loader"])))
        if row["ey"] == Outcome.ERROR and (alone or not np.any(inside["code"] == ev.YIELD)):
            return LastWait(row, begin, end, past, _INTERRUPTED)
        return self._interrupted_code(mine, row)

    def _interrupted_code(self, mine: Rows, row: np.void) -> LastWait | None:
        """The consumer's span after the last `next`, if a worker was interrupted in it."""
        left = self.events[(self.events["code"] == ev.WORKER_EXIT) & (self.events["x"] == Ending.INTERRUPTED)]
        consumer = mine[(mine["code"] == ev.CONSUMER[0]) & (mine["begin"] >= row["end"])]
        if not len(left) or not len(consumer):
            return None
        end = min(int(left["time"][0]), int(consumer["end"][-1]))
        own = self.events[(self.events["tid"] == row["tid"]) & (self.events["time"] < end)]
        past = self._past(mine[mine["begin"] < consumer["begin"][-1]], consumer[-1])
        return LastWait(consumer[-1], int(own["time"][-1]), end, past, _INTERRUPTED)

    def _past(self, mine: Rows, row: np.void) -> int:
        """The longest of the process's earlier spans like this one, ns: an epoch's first `next` starts workers."""
        own = row["code"] == ev.CONSUMER[0]
        rows = mine[(mine["code"] == (ev.CONSUMER[0] if own else ev.NEXT[0])) & (mine["end"] >= 0)]
        later = row["code"] == ev.NEXT[0] and row["bx"] > 0
        rows = rows[rows["bx"] > 0] if later else rows
        followed = 0 if own or self.job is None else max(self.job.longest, 0 if later else self.job.first)
        return max(int(durations(rows).max(initial=0)), followed)

    # --- focus
    def focus_in(self, wait: LastWait, process: int, task: int, worker: int) -> Focus:
        """The focus on the step of `process` during a wait; a step of `task` if there is one."""
        row = self.step_at(process, wait.at_its_end, task)
        return self.focus(wait.row if row is None else row, wait.begin, wait.until, worker, wait.loader)

    def focus_of(self, row: np.void, end: int) -> Focus:
        return self.focus(row, int(row["begin"]), end)

    def focus(
        self, row: np.void | None, begin: int, end: int, worker: int = -1, loader: int = -1, process: int = -1
    ) -> Focus:
        """The focus on a step, None = the process was in none. begin, end: of the wait for it."""
        if row is None:
            loader = max(0, loader)
            return Focus(loader, begin, end, process, -1, 0, begin, -1, worker, self.epoch(loader, begin))
        loader = loader if loader >= 0 else int(row["loader"])
        where = int(row["process"]), int(row["tid"]), int(row["code"]), int(row["begin"]), int(row["task"])
        return Focus(loader, begin, end, *where, worker, self.epoch(loader, begin))

    def sample(self, focus: Focus) -> int:
        """The sample's index that the focus is in; -1 = none."""
        if focus.code != ev.SAMPLE[0]:
            return -1
        rows = self.spans_of(ev.SAMPLE[:1], process=focus.process, tid=focus.tid, begin=focus.span)
        return int(rows["by"][0]) if len(rows) else -1

    def epoch(self, loader: int, time: int) -> int:
        """A loader's epoch at a moment; -1 = unknown."""
        begun = self.events_of(ev.EPOCH[0], loader)
        begun = begun[begun["time"] <= time]
        return int(begun["x"][-1]) if len(begun) else -1

    # --- words
    def at(self, time: int) -> str:
        """A moment in words, since the trace's begin."""
        return self.unit.at(max(0, time - self.start))

    def rank(self, process: int) -> str:
        """The rank of a process, to stand before a sentence; "" = it has none."""
        rank = self.processes[process].rank
        return f"rank {rank}: " if rank >= 0 else ""

    def steps_around(self, focus: Focus) -> list[str]:
        """The chain of steps that the focus lies in, from the outermost on."""
        if not focus.code:
            return []
        spans = self.spans
        there = (spans["process"] == focus.process) & (spans["tid"] == focus.tid) & (spans["code"] != ev.EPOCH[0])
        rows = spans[there & open_at(spans, focus.span)]
        steps = (f"{doing(row)} since {self.at(since(self.trace, row))}" for row in rows)
        return [f"{self.processes[focus.process].name}: {', '.join(steps)}"] if len(rows) else []

    def signs(self, focus: Focus | None, until: int) -> str:
        """The last event of each process up to a time, the process in focus first."""
        order = sorted(range(len(self.processes)), key=lambda index: focus is None or index != focus.process)
        out = []
        for index in order:
            times = self.events["time"][(self.events["process"] == index) & (self.events["time"] <= until)]
            out.append(f"{self.processes[index].of_rank} {self.at(int(times[-1])) if len(times) else 'never'}")
        return listed(out)
