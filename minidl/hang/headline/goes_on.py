"""Headlines of recordings without the run's end: the recording was cut, or the run goes on."""

from __future__ import annotations

import dataclasses

import numpy as np

from minidl.hang.consult import diagnose_recorded
from minidl.hang.finding import Finding, HangCause, RunOutcome
from minidl.hang.headline.bounds import what_bounds
from minidl.hang.headline.run_context import LastWait, RunContext
from minidl.hang.headline.waiting import held_up, told_of
from minidl.hang.limits import LONG, SUDDEN
from minidl.tracefile import events as ev
from minidl.tracefile.events import Outcome
from minidl.tracefile.words import counted, doing, duration


def cut(run: RunContext, waits: list[LastWait]) -> Finding | None:
    """The finding of a recording without the run's end, in which no wait was a hang."""
    unended = [wait for wait in waits if not wait.ended and int(wait.row["process"]) not in run.over]
    if not unended:
        return None
    wait = unended[0]
    home = run.trace.processes[int(wait.row["process"])]
    nexts = run.spans[(run.spans["code"] == ev.NEXT[0]) & (run.spans["end"] >= 0)]
    batches = int(np.count_nonzero(nexts["ey"] == Outcome.DATA))
    step = run.step_at(int(wait.row["process"]), wait.until)
    at_work = doing(wait.row if step is None else step)
    whole = " (the file was cut)" if home.whole_until else ""
    what = (
        f"the recording ends after {counted(batches, 'batch', 'batches')}, before the run's end (killed, or "
        f"still running){whole}; {home.name} was {at_work} since {run.at(wait.begin)}"
    )
    if wait.took <= wait.past:
        moved = f"no sign of a hang: {home.name} had a longer wait before ({duration(wait.past)})"
    else:
        moved = f"too short for a hang: the longest wait before was {duration(wait.past)}"
    judged = what_bounds(run)
    evidence = (moved, f"last events: {run.signs(None, run.last)}", judged.sentence)
    helps = "if the run was killed, it was still making progress: find the sender of the signal (scheduler, dmesg)"
    *_, waited, state = held_up(run, wait)
    told = told_of(run, wait, state, waited, evidence)
    found = diagnose_recorded(run.trace, told) if wait.took >= LONG * 1e9 else None
    if found is not None and found.outcome is RunOutcome.MAYBE_HUNG:
        return dataclasses.replace(found, head=f"cut: {found.begins}", focus=waited, wait=told)
    return run.finding(RunOutcome.CUT, what, evidence, helps, waited, told)


def running(run: RunContext, waits: list[LastWait]) -> Finding:
    """The finding of a running job: its present wait if that is the longest, or else what bounds it so far."""
    now = [wait for wait in waits if not wait.ended and wait.took >= max(SUDDEN * 1e9, wait.past)]
    judged = what_bounds(run)
    if not now:
        return dataclasses.replace(
            judged,
            outcome=RunOutcome.RUNNING,
            cause=HangCause.NONE,
            head=f"running, so far {judged.begins}",
            focus=None,
        )
    wait = max(now, key=lambda wait: wait.for_data)
    what, step, focus, _ = held_up(run, wait)
    past = f"the longest wait before: {duration(wait.past)}" if wait.past else "no wait has ended before"
    missing = "but no batch" if wait.for_data else "no call of next"
    head = f"running, {missing} for {run.unit.of(wait.took)}, since {run.at(wait.begin)}"
    return run.finding(RunOutcome.RUNNING, what, (past, *run.steps_around(focus)), step, focus, head=head)
