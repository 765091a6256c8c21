"""Headlines of waits that did not end: in the loop, at Python's exit, of a worker that outlived its loader."""

from __future__ import annotations

import dataclasses

import numpy as np

from minidl.hang.consult import diagnose_recorded
from minidl.hang.finding import Finding, Focus, HangCause, RecordedWait, RunOutcome, Sure, from_trace
from minidl.hang.headline.run_context import LastWait, RunContext
from minidl.hang.headline.waiting import finished_behind, held_up, still, told_of
from minidl.hang.limits import LONG
from minidl.hang.places import LoaderStep
from minidl.tracefile import events as ev
from minidl.tracefile.watched import OWN, SHUTDOWN, Stall
from minidl.tracefile.words import doing, duration, signal_name


def hang_with_evidence(run: RunContext, waits: list[LastWait]) -> LastWait | None:
    """A wait that is not long for this run, but that no process can end, by a watchdog's evidence."""
    for wait in sorted(waits, key=lambda wait: not wait.for_data):
        if wait.ended or wait.took < LONG * 1e9 or not run.trace.watched.looks:
            continue
        *_, focus, state = held_up(run, wait)
        found = diagnose_recorded(run.trace, told_of(run, wait, state, focus, ()))
        if found is not None and found.outcome is RunOutcome.HUNG:
            return wait
    return None


def hung(run: RunContext, wait: LastWait, others: list[LastWait]) -> Finding:
    """The finding of a wait that did not end; the doctor's, if a watchdog took evidence. others: further hangs."""
    for_how_long = f"{run.unit.of(wait.took)}, since {run.at(wait.begin)}"
    for_how_long += f", until {wait.ended}" if wait.ended else ""
    home = run.trace.processes[int(wait.row["process"])]
    rank = f" in rank {home.rank}" if home.rank >= 0 else ""
    what, step, focus, state = held_up(run, wait, f" for {for_how_long}")
    since_when = f"{home.name} has been waiting since {run.at(wait.begin)}"
    past = f"; its longest wait before: {duration(wait.past)}" if wait.past else ""
    evidence = [since_when + past] if wait.for_data else []
    evidence += run.steps_around(focus)
    evidence += [f"finished behind it: {behind}"] if wait.for_data and (behind := finished_behind(state)) else []
    evidence += [f"{_who(run, other)} for {duration(other.took)}: it may wait for the other" for other in others]
    during = wait.until - (wait.took // 10 if wait.ended else 0)  # without events that the end of the wait caused
    evidence.append(f"last events: {run.signs(focus, during)}")
    told = told_of(run, wait, state, focus, tuple(evidence))
    head, found = f"hung for {for_how_long}{rank}", diagnose_recorded(run.trace, told)
    if found is None and not wait.for_data:  # it may be an evaluation, a checkpoint or a hang
        return run.finding(
            RunOutcome.CUT, what, (*_at_work(run, wait), *evidence), step, focus, told, head=f"cut{rank}"
        )
    if found is None:
        return run.finding(RunOutcome.HUNG, what, evidence, step, focus, told, head)
    focus = _stopped(run, wait, focus, found, told)
    if found.outcome is not RunOutcome.HUNG:
        return dataclasses.replace(found, head=f"cut: {found.begins}", focus=focus, wait=told)
    step = found.next_step if found.helps else step
    return dataclasses.replace(found, head=head, next_step=step, focus=focus, wait=told)


def _stopped(run: RunContext, wait: LastWait, focus: Focus, found: Finding, told: RecordedWait) -> Focus:
    """The focus on a process that the evidence shows as stopped: none of its steps is the cause."""
    if found.cause is not HangCause.STOPPED:
        return focus
    pids = [process.pid for process in run.trace.processes]
    at = pids.index(found.who["pid"]) if found.who.get("pid") in pids else focus.process
    if at != focus.process:
        focus = run.focus_in(wait, at, -1, run.trace.processes[at].worker)
    needed = told.task if told.worker_pid == run.trace.processes[at].pid else -1
    return still(run, wait, focus, "stopped:", needed)


def _at_work(run: RunContext, wait: LastWait) -> list[str]:
    """The CPU time that a process used in a wait, by the watchdog's samples."""
    pid = run.trace.processes[int(wait.row["process"])].pid
    seen = [one for one in run.trace.watched.samples if pid in one.processes and wait.begin <= one.at <= wait.until]
    if len(seen) < 2:
        return []
    used = (seen[-1].processes[pid].cpu_ms - seen[0].processes[pid].cpu_ms) * 1_000_000
    return [f"pid {pid} used {duration(used)} of CPU time in {duration(seen[-1].at - seen[0].at)} of that"]


def _who(run: RunContext, wait: LastWait) -> str:
    return f"{run.trace.processes[int(wait.row['process'])].name} has been {doing(wait.row)}"


def at_exit(run: RunContext) -> Finding | None:
    """The finding of a process that hangs after its program: at Python's exit, or in a loader's shutdown.

    The evidence is a watchdog's. A wait is a hang if the doctor says so, or if it exceeds the watchdog's limit.
    """
    for home in run.homes:
        stall = _stall_after(run, home)
        if stall is None:
            continue
        ends = [line for line in run.trace.described("program_end") if line["process"] == home]
        begin = max([stall.since, *(line.get("monotonic_ns", 0) for line in ends)])
        took = run.trace.watched.until - begin
        allowed = 1e9 * (run.trace.watched.hang_after_s or LONG)
        told = RecordedWait(
            hung=took >= min(1e9 * LONG, allowed), since=begin, seconds=took / 1e9, pid=stall.pid, tid=stall.pid,
            own_code=stall.what == OWN,
        )  # fmt: skip
        found = diagnose_recorded(run.trace, told)
        place = LoaderStep.EXIT if stall.what == OWN else LoaderStep.SHUTDOWN
        if found is None:
            continue
        between = stall.what == OWN and found.outcome is RunOutcome.HUNG and _no_loader_waits(run, home, stall.since)
        if not between and found.loop_step is not place:
            continue
        head = f"hung for {run.unit.of(took)}, since {run.at(begin)}"
        if found.outcome is RunOutcome.HUNG:
            return dataclasses.replace(found, head=head, wait=told)
        if found.outcome is RunOutcome.MAYBE_HUNG and home in run.over and took >= allowed:
            helps = found.fix or "end all threads and processes that the program has started before the program ends"
            return dataclasses.replace(  # the doctor's reason is about a wait for a batch
                found, outcome=RunOutcome.HUNG, head=f"{head}, after the program's end", what=found.waiting, brief="",
                cause=HangCause.UNKNOWN, sure=Sure.UNKNOWN, also=(), next_step=helps, fix="", wait=told,
            )  # fmt: skip
    return None


def _no_loader_waits(run: RunContext, home: int, moment: int) -> bool:
    """Whether no thread of a process was in a loader's `next` after a moment."""
    mine = (run.spans["process"] == home) & (run.spans["code"] == ev.NEXT[0])
    return not np.any(mine & ((run.spans["end"] < 0) | (run.spans["end"] > moment)))


def _stall_after(run: RunContext, home: int) -> Stall | None:
    """The last stall that the watchdog saw, if it came after the program: Python's exit, or an open shutdown."""
    pid = run.trace.processes[home].pid
    stalls = [one.stall for one in run.trace.watched.looks if one.stall.pid == pid]
    stall = stalls[-1] if stalls else None
    if stall is None or stall.what not in (OWN, SHUTDOWN):
        return None
    if stall.what == OWN:
        own = (run.events["process"] == home) & (run.events["tid"] == pid)  # its feeders may go on for a while
        after = stall.since >= run.events["time"][own].max(initial=0)
    else:
        spans = run.spans[(run.spans["process"] == home) & (run.spans["code"] == ev.SHUTDOWN[0])]
        after = home in run.over and bool(np.any(spans["end"] < 0))
    return stall if after else None


def outlived(run: RunContext) -> Finding | None:
    """The finding of a worker that outlived the shutdown: Python's exit waits for it without a timeout."""
    events, spans = run.events, run.spans
    gone = events["x"][events["code"] == ev.WORKER_GONE]
    in_vain = spans[(spans["code"] == ev.JOIN[0]) & (spans["end"] >= 0) & (spans["ey"] == 0)]
    for row in events[(events["code"] == ev.TERMINATE) & ~np.isin(events["x"], gone)]:
        mine = (in_vain["loader"] == row["loader"]) & (in_vain["worker"] == row["worker"])
        ends = in_vain["end"][mine & (in_vain["begin"] >= row["time"])]
        if len(ends):
            return _did_not_end(run, row, int(ends[-1]))
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
    home, pid = run.trace.processes[int(row["process"])].pid, run.trace.processes[process].pid
    told = RecordedWait(
        hung=True, since=sent, seconds=(until - sent) / 1e9, pid=home, tid=int(row["tid"]), worker=worker,
        worker_pid=pid, numbers={pid: worker},
    )  # fmt: skip
    found = diagnose_recorded(run.trace, told)
    if found is None or found.who.get("pid") != pid:
        in_step = f": it was {doing(step)}" if step is not None else ""
        said = f"{run.trace.processes[process].name} did not end by {name}{in_step}"
        return run.finding(RunOutcome.HUNG, said, evidence, helps, focus, head=head)
    return dataclasses.replace(  # it may have been slow then
        found, outcome=RunOutcome.HUNG, head=head, evidence=(*found.evidence, *from_trace(*evidence)), next_step=helps,
        fix="", focus=focus, wait=told,
    )  # fmt: skip
