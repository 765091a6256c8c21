"""Headlines of waits that did not end: in the loop, at Python's exit, of a worker that outlived its loader.

Also of recordings without the run's end in which no wait was a hang: the recording was cut, or the run goes on.
"""

from __future__ import annotations

import dataclasses
import signal
from typing import Final

import numpy as np

from minidl.hang.consult import diagnose_recorded
from minidl.hang.finding import Finding, Focus, HangCause, RecordedWait, RunOutcome, from_trace
from minidl.hang.headline.bounds import what_bounds
from minidl.hang.headline.held_up import held_up, still
from minidl.hang.headline.run_context import LastWait, RunContext
from minidl.hang.limits import LONG, SUDDEN
from minidl.hang.places import LoaderStep
from minidl.tracefile import events as ev
from minidl.tracefile.events import Call, Outcome
from minidl.tracefile.reader import Trace
from minidl.tracefile.watched import Stall
from minidl.tracefile.words import counted, doing, duration, signal_name

_LONGER: Final = "run it longer, or run minidl doctor PID while it waits: this wait may have been a hang or work"


# --- In the loop ------------------------------------------------------------------------------------------------------
def long_wait(run: RunContext) -> Finding | None:
    """The finding of a wait that is long for this run; one of the loader comes first."""
    found = [wait for wait in run.waits if wait.is_hang(run.runs)]
    found.sort(key=lambda wait: (not wait.for_data, wait.begin))
    if not found or (run.runs and not found[0].for_data):  # in a running job, the loop may do something else
        return None
    return hung(run, found[0], found[1:])


def wait_with_evidence(run: RunContext) -> Finding | None:
    """The finding of a wait that is not long for this run, but that no process can end, by a watchdog's evidence."""
    for wait in sorted(run.waits, key=lambda wait: not wait.for_data):
        if shown_to_hang(run, wait):
            return hung(run, wait, [])
    return None


def shown_to_hang(run: RunContext, wait: LastWait) -> bool:
    """Whether a watchdog's evidence shows that no process can end a wait."""
    if wait.ended or not wait.long or not run.trace.watched.looks:
        return False
    found = held_up(run, wait).opinion()
    return found is not None and found.outcome is RunOutcome.HUNG


def hung(run: RunContext, wait: LastWait, others: list[LastWait]) -> Finding:
    """The finding of a wait that did not end; the doctor's, if a watchdog took evidence. others: further hangs."""
    for_how_long = f"{run.unit.of(wait.took)}, since {run.at(wait.begin)}"
    for_how_long += f", until {wait.ended}" if wait.ended else ""
    home = run.processes[wait.home]
    rank = f" in rank {home.rank}" if home.rank >= 0 else ""
    held = held_up(run, wait, f" for {for_how_long}")
    evidence = _evidence(run, wait, held.focus, held.finished_behind, others)
    head, found = f"hung for {for_how_long}{rank}", held.opinion(evidence)
    if found is not None:
        focus = _stopped(run, wait, held.focus, found)
        if found.outcome is not RunOutcome.HUNG:
            head = f"waited for {for_how_long}{rank}" if wait.ended else f"cut: {found.begins}"
            helps = found.next_step if run.runs else held.step if wait.ended else _LONGER
            return dataclasses.replace(found, head=head, focus=focus, next_step=helps)
        return dataclasses.replace(
            found, head=head, next_step=found.next_step if found.helps else held.step, focus=focus
        )
    outcome, helps = RunOutcome.HUNG, held.step
    if not wait.for_data:  # it may be an evaluation, a checkpoint or a hang
        outcome, head, evidence = RunOutcome.CUT, f"cut{rank}", [*_at_work(run, wait), *evidence]
    elif not wait.ended and (held.goes_on or not wait.long):
        outcome, head, helps = RunOutcome.CUT, f"cut{rank}", _LONGER
    return run.finding(outcome, held.what, evidence, helps, held.focus, held.told(evidence), head)


def _evidence(run: RunContext, wait: LastWait, focus: Focus, behind: list[str], others: list[LastWait]) -> list[str]:
    """The evidence of a hang by its events. behind: the finished batches; others: further hangs."""
    past = f"; its longest wait before: {duration(wait.past)}" if wait.past else ""
    waiting = f"{run.processes[wait.home].name} has been waiting since {run.at(wait.begin)}{past}"
    return [
        *([waiting] if wait.for_data else []),
        *run.steps_around(focus),
        *(behind if wait.for_data else []),
        *(f"{run.processes[one.home].name} has been {doing(one.row)} for {duration(one.took)}: it may wait for the "
          "other" for one in others),
        f"last events: {run.signs(focus, wait.at_its_end)}",
    ]


def _stopped(run: RunContext, wait: LastWait, focus: Focus, found: Finding) -> Focus:
    """The focus on a process that the evidence shows as stopped: none of its steps is the cause."""
    if found.cause is not HangCause.STOPPED or found.wait is None:
        return focus
    pids = [process.pid for process in run.processes]
    at = pids.index(found.who["pid"]) if found.who.get("pid") in pids else focus.process
    if at != focus.process:
        focus = run.focus_in(wait, at, -1, run.processes[at].worker)
    return still(run, wait, focus, "stopped:", found.wait.task if found.wait.worker_pid == pids[at] else -1)


def _at_work(run: RunContext, wait: LastWait) -> list[str]:
    """The CPU time that a process used in a wait, by the watchdog's samples."""
    pid = run.processes[wait.home].pid
    seen = [one for one in run.trace.watched.samples if pid in one.processes and wait.begin <= one.at <= wait.until]
    if len(seen) < 2:
        return []
    used = (seen[-1].processes[pid].cpu_ms - seen[0].processes[pid].cpu_ms) * 1_000_000
    return [f"pid {pid} used {duration(used)} of CPU time in {duration(seen[-1].at - seen[0].at)} of that"]


# --- Without a loader -------------------------------------------------------------------------------------------------
def before_any_loader(trace: Trace) -> Finding | None:
    """The finding of a trace without events, by a watchdog's evidence: its program waited before it had a loader."""
    watched = trace.watched
    look = next((one for one in reversed(watched.looks) if one.stall.call is Call.OWN), None)
    if look is None or trace.seen:
        return None
    stall, took = look.stall, watched.until - look.stall.since
    allowed = min(LONG, watched.hang_after_s or LONG)
    told = RecordedWait(
        hung=took >= 1e9 * allowed, since=stall.since, seconds=took / 1e9, pid=stall.pid, tid=stall.pid, own_code=True,
        no_loader=True,
    )  # fmt: skip
    found = diagnose_recorded(trace, told)
    if found is None or found.outcome is RunOutcome.MOVES:
        return None
    hung = found.outcome is RunOutcome.HUNG
    head = f"{'hung' if hung else 'cut: may hang'} for {duration(took)}, before any DataLoader"
    return dataclasses.replace(found, head=head, wait=told)


# --- At the end of the program ----------------------------------------------------------------------------------------
def at_exit(run: RunContext, *, killed: bool = False) -> Finding | None:
    """The finding of a process that hangs after its program: at Python's exit, or in a loader's shutdown.

    killed: of one that may have hung there, or after its last loader, until a signal ended it.
    The evidence is a watchdog's. A wait is a hang if the doctor says so, or if it exceeds the watchdog's limit.
    """
    found = (_after(run, home, stall, killed) for home in run.homes if (stall := _stall_after(run, home)) is not None)
    return next((one for one in found if one is not None), None)


def _after(run: RunContext, home: int, stall: Stall, killed: bool) -> Finding | None:
    """The finding of a stall after a process's program, if that is a hang. killed: may have been one."""
    ends = [line for line in run.trace.described("program_end") if line["process"] == home]
    begin = max([stall.since, *(line.get("monotonic_ns", 0) for line in ends)])
    took, own = run.trace.watched.until - begin, stall.call is Call.OWN
    allowed = 1e9 * (run.trace.watched.hang_after_s or LONG)
    told = RecordedWait(
        hung=took >= min(1e9 * LONG, allowed), since=begin, seconds=took / 1e9, pid=stall.pid, tid=stall.pid,
        own_code=own,
    )  # fmt: skip
    found = diagnose_recorded(run.trace, told)
    if found is None:
        return None
    in_place = found.loop_step is (LoaderStep.EXIT if own else LoaderStep.SHUTDOWN)
    head, found = f"hung for {run.unit.of(took)}, since {run.at(begin)}", dataclasses.replace(found, wait=told)
    there = in_place or (own and _no_loader_waits(run, home, stall.since))
    if found.outcome is RunOutcome.HUNG:
        return dataclasses.replace(found, head=head) if there else None
    if killed:
        death, maybe = run.trace.watched.death_of(stall.pid), found.outcome is RunOutcome.MAYBE_HUNG
        ended = death is not None and (death.code or 0) < 0 and there and told.hung and maybe
        return dataclasses.replace(found, head=f"cut: {found.begins}") if ended else None
    return _after_the_end(found, head) if in_place and home in run.over and took >= allowed else None


def _after_the_end(found: Finding, head: str) -> Finding | None:
    """The finding of a process that may hang, and that lasts too long after its program."""
    if found.outcome is not RunOutcome.MAYBE_HUNG:
        return None
    helps = found.fix or "end all threads and processes that the program has started before the program ends"
    return dataclasses.replace(  # the doctor's reason is about a wait for a batch
        found, outcome=RunOutcome.HUNG, head=f"{head}, after the program's end", what=found.waiting, brief="", also=(),
        next_step=helps, fix="",
    )  # fmt: skip


def _no_loader_waits(run: RunContext, home: int, moment: int) -> bool:
    """Whether no thread of a process was in a loader's `next` after a moment."""
    nexts = run.spans_of(ev.NEXT[:1], process=home)
    return not np.any((nexts["end"] < 0) | (nexts["end"] > moment))


def _stall_after(run: RunContext, home: int) -> Stall | None:
    """The last stall that the watchdog saw, if it came after the program: Python's exit, or an open shutdown."""
    pid = run.processes[home].pid
    look = next((one for one in reversed(run.trace.watched.looks) if one.stall.pid == pid), None)
    if look is None or (stall := look.stall).call not in (Call.OWN, Call.SHUTDOWN):
        return None
    if stall.call is Call.SHUTDOWN:
        after = home in run.over and bool(np.any(run.spans_of(ev.SHUTDOWN[:1], process=home)["end"] < 0))
    else:
        own = (run.events["process"] == home) & (run.events["tid"] == pid)  # its feeders may go on for a while
        after = look.at >= run.events["time"][own].max(initial=0)  # a collection of garbage ends no wait
    return stall if after else None


def outlived(run: RunContext) -> Finding | None:
    """The finding of a worker that outlived the shutdown: Python's exit waits for it without a timeout."""
    events = run.events
    gone = events["x"][events["code"] == ev.WORKER_GONE]
    for row in events[(events["code"] == ev.TERMINATE) & ~np.isin(events["x"], gone)]:
        joins = run.spans_of(ev.JOIN[:1], loader=row["loader"], worker=row["worker"])
        in_vain = joins["end"][(joins["end"] >= 0) & (joins["ey"] == 0) & (joins["begin"] >= row["time"])]
        if len(in_vain):
            return _did_not_end(run, row, int(in_vain[-1]))
    return None


def _did_not_end(run: RunContext, row: np.void, until: int) -> Finding:
    """The finding of a worker that a signal did not end. row: the signal; until: when the shutdown gave up."""
    loader, worker, sent = (int(row[field]) for field in ("loader", "worker", "time"))
    name = signal_name(int(row["y"]))
    process = run.process_of(loader, worker, int(row["x"]))
    step = run.step_at(process, until)
    focus = run.focus(step, sent, until, worker, loader, process)
    head = f"hung for {run.unit.of(until - sent)}, since {run.at(sent)}"
    evidence = (
        f"the loader sent {name} at {run.at(sent)}, and its shutdown gave up at {run.at(until)}",
        *run.steps_around(focus),
        "Python's exit waits for its workers without a timeout; the trace does not show whether this one ended",
    )
    helps = f"do not ignore or block {name} in workers: check their code and its libraries; or the worker is stopped"
    home, pid = run.processes[int(row["process"])].pid, run.processes[process].pid
    told = RecordedWait(
        hung=True, since=sent, seconds=(until - sent) / 1e9, pid=home, tid=int(row["tid"]), worker=worker,
        worker_pid=pid, numbers={pid: worker},
    )  # fmt: skip
    found = diagnose_recorded(run.trace, told)
    if found is None or found.who.get("pid") != pid:
        in_step = f": it was {doing(step)}" if step is not None else ""
        said = f"{run.processes[process].name} did not end by {name}{in_step}"
        return run.finding(RunOutcome.HUNG, said, evidence, helps, focus, head=head)
    return dataclasses.replace(  # it may have been slow then
        found, outcome=RunOutcome.HUNG, head=head, evidence=(*found.evidence, *from_trace(*evidence)), next_step=helps,
        fix="", focus=focus, wait=told,
    )  # fmt: skip


# --- No hang ----------------------------------------------------------------------------------------------------------
def cut(run: RunContext) -> Finding | None:
    """The finding of a recording without the run's end, in which no wait was a hang."""
    wait = next((wait for wait in run.waits if not wait.ended and wait.home not in run.over), None)
    if run.runs or wait is None:
        return None if run.runs else _killed_after_its_loaders(run)
    home, step = run.processes[wait.home], run.step_at(wait.home, wait.until)
    nexts = run.spans_of(ev.NEXT[:1])
    batches = int(np.count_nonzero((nexts["end"] >= 0) & (nexts["ey"] == Outcome.DATA)))
    whole = " (the file was cut)" if home.whole_until else ""
    what = (
        f"the recording ends after {counted(batches, 'batch', 'batches')}, before the run's end (killed, or "
        f"still running){whole}; {home.name} was {doing(wait.row if step is None else step)} since {run.at(wait.begin)}"
    )
    helps = _LONGER
    moved = f"too short for a hang: the longest wait before was {duration(wait.past)}"
    if wait.took <= wait.past:
        helps = "if the run was killed, it was still making progress: find the sender of the signal (scheduler, dmesg)"
        moved = f"no sign of a hang: {home.name} had a longer wait before ({duration(wait.past)})"
    evidence = (moved, f"last events: {run.signs(None, run.last)}", what_bounds(run).sentence)
    held = held_up(run, wait)
    found = held.opinion(evidence) if wait.long else None
    if found is not None and found.outcome is RunOutcome.MAYBE_HUNG:
        return dataclasses.replace(found, head=f"cut: {found.begins}", focus=held.focus, next_step=_LONGER)
    return run.finding(RunOutcome.CUT, what, evidence, helps, held.focus, held.told(evidence))


def _killed_after_its_loaders(run: RunContext) -> Finding | None:
    """The finding of a run that SIGKILL ended, not its program, when no process had an iterator left."""
    for home in () if run.over.intersection(run.homes) else run.homes:  # a program may kill its own children
        death = run.trace.watched.death_of(run.processes[home].pid)
        if death is not None and death.code == -signal.SIGKILL:
            after = duration(death.at - int(run.events["time"][run.events["process"] == home][-1]))
            what = f"{run.processes[home].name} was killed {after} after its last event, when it had no iterator"
            evidence = ("SIGKILL, as the watchdog saw; its program had not ended", what_bounds(run).sentence)
            helps = "if it did not end by itself, run minidl doctor PID while it waits: a thread may hold up its exit"
            return run.finding(RunOutcome.CUT, what, evidence, helps)
    return None


def running(run: RunContext) -> Finding | None:
    """The finding of a running job: its present wait if that is the longest, or else what bounds it so far."""
    if not run.runs:
        return None
    now = [wait for wait in run.waits if not wait.ended and wait.took >= max(SUDDEN * 1e9, wait.past)]
    if not now:
        judged = what_bounds(run)
        head = f"running, so far {judged.begins}"
        return dataclasses.replace(judged, outcome=RunOutcome.RUNNING, cause=HangCause.NONE, head=head, focus=None)
    wait = max(now, key=lambda wait: wait.for_data)
    held = held_up(run, wait)
    past = f"the longest wait before: {duration(wait.past)}" if wait.past else "no wait has ended before"
    missing = "but no batch" if wait.for_data else "no call of next"
    head = f"running, {missing} for {run.unit.of(wait.took)}, since {run.at(wait.begin)}"
    evidence = (past, *run.steps_around(held.focus))
    return run.finding(RunOutcome.RUNNING, held.what, evidence, held.step, held.focus, head=head)
