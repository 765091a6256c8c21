"""`minidl doctor`: examine a process, a trace, or a trace whose processes still run, and say what holds it up.

Interface: `examine(target)` -> `Finding`. target: the id of a process (the training, one of its ranks or workers, its
launcher or shell), a trace (its directory or its packed file), or a directory of the traces of a job's ranks.

Rules of use: it changes nothing in the processes that it examines. If the first look does not show a hang, it looks
again after `seconds`: a process that moved between the looks does not hang.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from minidl import check
from minidl.hang import live
from minidl.hang.consult import recorded_looks
from minidl.hang.diagnose import diagnose
from minidl.hang.evidence.collect import collect
from minidl.hang.evidence.model import RunEvidence
from minidl.hang.finding import EvidenceLine, Finding, HangCause, HangDegree, RecordedWait, RunOutcome
from minidl.hang.headline import headline
from minidl.hang.job import ranks_beside
from minidl.hang.life import is_here, is_running, life
from minidl.hang.limits import STILL, is_long
from minidl.hang.snapshot import Job
from minidl.job.digests import read_job, trace_of
from minidl.job.report import JobReport
from minidl.process_stat import children_of, stat_fields, stat_of
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.format import EVENTS_SUFFIX, TraceError
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import plain

APART: Final = 3.5
"""Seconds between the two looks."""

INTERVAL: Final = 0.5

MOST_RANKS: Final = 64
"""Ranks of a job that has ended whose looks are put together: each one's trace is read."""

QUICK: Final = 16 << 20
"""Bytes of events that are read whole of a running job: again after each look."""


def examine(target: str, *, py_spy: bool = True, seconds: float = APART) -> Finding:
    """Say what holds up a process or a traced run. Raises TraceError if there is neither."""
    if target.isdecimal() and not os.path.exists(target):
        pid = home_of(int(target))
        if not live.records_trace(pid):
            return look_at(pid, lambda: None, py_spy=py_spy, seconds=seconds, others=ranks_beside(pid))
        target = str(pid)
    path = live.find_trace(target)
    job = read_job([path])
    if job is None:
        return of_trace(*_opened(path), py_spy=py_spy, seconds=seconds)
    report, places = JobReport(job), {table.facts.rank: table.path for table in job.ranks}
    ranks = [report.facts[row].rank for row in sorted(report.outliers())]
    opened = [_newest(places[rank] or path) or (trace_of([path], rank), None) for rank in ranks]
    found = [of_trace(trace, before, py_spy=py_spy, seconds=seconds) for trace, before in opened]
    if not any(one.outcome.stopped or one.outcome is RunOutcome.MOVES for one in (report.finding, *found)):
        return report.finding  # each rank for itself says less
    names = [f"rank {rank}" for rank in ranks]
    if len(places) <= MOST_RANKS and not any(_running(trace) for trace, _ in opened):
        together = _together([trace_of([path], rank) for rank in sorted(places)])
        if together is not None:
            names, found = ["all ranks", *names], [together, *found]  # of two that are as sure, it comes first
    return _of_job(names, found)


def _together(traces: Sequence[Trace]) -> Finding | None:
    """The finding of ranks that have ended, by the last looks of their watchdogs: as if one had looked at them all.

    None if one of them runs, if they were on several machines, or if less than two of them have a look.
    """
    if any(map(_running, traces)) or len({str(trace.manifest.get("boot_id")) for trace in traces}) > 1:
        return None
    waits = [(trace, wait) for trace in traces if (wait := headline(trace).wait) is not None]
    seen = [(wait, looks) for trace, wait in waits if (looks := recorded_looks(trace, wait))]
    if len(seen) < 2:
        return None
    told = RecordedWait(
        hung=all(wait.hung for wait, _ in seen), seconds=min(wait.seconds for wait, _ in seen),
        past=max(wait.past for wait, _ in seen), own_code=all(wait.own_code for wait, _ in seen),
        numbers={pid: number for wait, _ in seen for pid, number in wait.numbers.items()},
        others=frozenset(pid for wait, _ in seen for pid in wait.others),
        ranks={pid: rank for wait, _ in seen for pid, rank in wait.ranks.items()},
    )  # fmt: skip
    both = (0, -1) if all(len(looks) > 1 for _, looks in seen) else (-1,)
    found = diagnose([_merged([looks[at] for _, looks in seen]) for at in both], told)
    if found.outcome is RunOutcome.MAYBE_HUNG:
        return replace(found, head=f"cut: {found.begins}")
    return found if found.outcome is RunOutcome.HUNG else None


def _merged(looks: Sequence[RunEvidence]) -> RunEvidence:
    """Looks of several watchdogs at about one moment, as one."""
    return replace(
        looks[0],
        moment=max(one.moment for one in looks),
        processes=tuple({process.pid: process for one in looks for process in one.processes}.values()),
        locks=tuple(dict.fromkeys(lock for one in looks for lock in one.locks)),
        not_seen=tuple(dict.fromkeys(text for one in looks for text in one.not_seen)),
    )


def _of_job(names: Sequence[str], found: Sequence[Finding]) -> Finding:
    """The finding of several traces: of the rank that goes on least, with the others' sentences as evidence.

    A rank that waits in a collective only names a wait for others.
    """
    order = [*HangDegree]
    worst = min(found, key=lambda one: (order.index(one.degree), one.cause in (HangCause.COLLECTIVE, HangCause.NONE)))
    others = (f"{name}: {one.title}" for name, one in zip(names, found, strict=True) if one is not worst)
    return replace(worst, evidence=(*worst.evidence, *(EvidenceLine(text, "its trace") for text in others)))


_WRAPPERS: Final = frozenset({"sh", "bash", "dash", "zsh", "timeout", "time", "env", "nice", "nohup", "setsid"})
"""Programs that start another one and wait for it."""


def home_of(pid: int) -> int:
    """The process that reads the batches of a loader's worker, by its parents; of a shell, the program that it runs.

    Any other process is its own home.
    """
    try:
        while stat_of(Path(f"/proc/{pid}/stat").read_text(errors="replace"))[0] in _WRAPPERS:
            (pid,) = children_of(pid)
    except (OSError, ValueError):  # it runs none, or several
        pass
    try:
        name, fields = stat_of(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
        parent = int(fields[1])
        if parent <= 1 or not name.startswith("pt_data_worker"):
            return pid
        while b"multiprocessing.forkserver" in Path(f"/proc/{parent}/cmdline").read_bytes():
            parent = int(stat_fields(parent)[1])
    except OSError:  # one of them has ended
        return pid
    return parent


def look_at(
    pid: int, told: Callable[[], RecordedWait | None], *, py_spy: bool, seconds: float, others: Sequence[int] = ()
) -> Finding:
    """Look at a process, its children and some others: once, twice, or three times.

    told: reads the trace's wait after each look, because the wait of the first look may have ended. If the threads
    that have to go on have slept since before the first look, a second one would see the same. A process that moved
    between the first two looks, and not in the second one, may have stopped since: a starting worker may hang at the
    end of its start.
    """
    if not os.path.exists(f"/proc/{pid}"):
        raise TraceError(f"there is no process {pid}: give the id of one that runs, or a trace")
    looks: list[RunEvidence] = [collect(pid, others, interval=INTERVAL, py_spy=py_spy)]
    recorded = told()
    found = diagnose(looks, _until(recorded, looks[-1].moment))
    # A trace shows that the loop waits for long. The processes that it waits for may still move: they may take turns.
    settled = (RunOutcome.HUNG,) if recorded is None else ()
    if not seconds or found.outcome in settled or found.still > max(seconds, STILL) + INTERVAL:
        return found
    for _ in range(2):
        time.sleep(seconds)
        looks.append(collect(pid, others, interval=INTERVAL, py_spy=py_spy))
        recorded = told()
        found = diagnose(looks[-2:], _until(recorded, looks[-1].moment))
        last = diagnose(looks[-1:], _until(recorded, looks[-1].moment))
        if found.outcome is not RunOutcome.MOVES or last.outcome is RunOutcome.MOVES:
            break
    return found


def _until(told: RecordedWait | None, moment: int) -> RecordedWait | None:
    """An open wait, measured up to a moment."""
    if told is None or not told.since:
        return told
    seconds = (moment - told.since) / 1e9
    return replace(told, seconds=seconds, hung=is_long(seconds, told.past))


def _newest(path: Path) -> tuple[Trace, Job] | None:
    """The newest events of a trace that is large and still written, and what the run did before; None = another one."""
    if not path.is_dir() or live.is_small(path, QUICK):
        return None
    trace, _ = live.LiveTrace(path).read()
    if not trace.seen:
        return None
    before = Job()
    before.take(trace)
    for index, process in enumerate(trace.processes):
        if process.role != "worker":
            calls = live.search(path / (process.file + EVENTS_SUFFIX), [*ev.NEXT, ev.EPOCH[0]])
            before.longest = max(before.longest, _longest(calls, first=False))
            before.first = max(before.first, _longest(calls, first=True))
            trace.events = _with_epoch(trace.events, calls, index)
    return trace, before


def _longest(calls: Rows, *, first: bool) -> int:
    """The longest `next` that has ended, of an epoch's first or of the others, ns; 0 = none. calls: of one process."""
    nexts = calls[np.isin(calls["code"], ev.NEXT)]
    nexts = nexts[np.argsort(nexts["tid"], kind="stable")]
    begins, ends = nexts[:-1], nexts[1:]
    whole = (begins["code"] == ev.NEXT[0]) & (ends["code"] == ev.NEXT[1]) & (begins["tid"] == ends["tid"])
    whole &= (begins["x"] == 0) == first
    return int((ends["time"] - begins["time"])[whole].max(initial=0))


def _with_epoch(events: Rows, calls: Rows, process: int) -> Rows:
    """A process's events with the begin of the present epoch of each of its loaders, if that came before them."""
    begun, own = calls[calls["code"] == ev.EPOCH[0]], events[events["process"] == process]
    begun = begun[np.argsort(begun["seq"])]  # a ring's file does not begin with its oldest event
    at = [np.flatnonzero(begun["loader"] == loader)[-1] for loader in np.unique(begun["loader"])]
    begun = begun[np.sort(np.array(at, np.int64))]
    if not len(own) or not len(begun := begun[begun["seq"] < own["seq"].min()]):
        return events
    rows = np.zeros(len(begun), events.dtype)
    for name in calls.dtype.names or ():
        rows[name] = begun[name]
    rows["pid"], rows["process"] = own["pid"][0], process
    return np.concatenate([rows, events])


def _opened(path: Path) -> tuple[Trace, Job | None]:
    """A trace: all of it, or of a large one that is still written the newest events, with what the run did before."""
    return _newest(path) or (read_trace(path), None)


def _wait_in(path: Path) -> RecordedWait | None:
    """The wait that a trace shows now."""
    trace, before = _opened(path)
    return headline(trace, job=before).wait


def of_trace(trace: Trace, before: Job | None = None, *, py_spy: bool, seconds: float) -> Finding:
    """The finding of a trace, with its evidence; for a running job, with the present state of its processes.

    before: has followed the run up to the trace, if the trace has only the newest events.
    """
    found = headline(trace, job=before)
    running = _running(trace) if found.outcome not in (RunOutcome.DIED, RunOutcome.ERROR) else []
    if running:
        ended = [line.get("monotonic_ns", 0) for line in trace.described("trace_end")]
        unknown = RecordedWait(pid=running[0], own_code=len(trace) > 0, since=max(ended, default=0))
        pid = found.wait.pid if found.wait is not None and found.wait.pid in running else running[0]
        others = [one for one in dict.fromkeys((*running, *ranks_beside(pid))) if one != pid]
        now = look_at(
            pid,
            lambda: _wait_in(trace.path) or unknown,
            py_spy=py_spy,
            seconds=seconds,
            others=others,
        )
        if now.outcome in (RunOutcome.DIED, RunOutcome.ENDED):  # between the looks: its trace says more
            trace = read_trace(trace.path)
            found = headline(trace)
        elif not ended or _is_blocked(now):  # else the program goes on after the trace: the finding is about the trace
            return now
    return replace(found, evidence=(*found.evidence, *_broken_rules(trace, found)))


def _is_blocked(now: Finding) -> bool:
    may_be = now.outcome is RunOutcome.MAYBE_HUNG and now.cause not in (HangCause.COMPUTING, HangCause.DEVICE)
    return may_be or now.outcome is RunOutcome.HUNG


def _running(trace: Trace) -> list[int]:
    """The trace's processes that run, without workers; else the one that began it, which may have recorded nothing."""
    if not is_here(trace.manifest):
        return []
    found = [p.pid for p in trace.processes if p.role != "worker" and life(p.pid, p.start_ns).there]
    if not found and is_running(trace.path, trace.manifest):
        found = [trace.manifest["pid"]]
    return found


CHECKED: Final = 300_000
"""The largest number of events for which the doctor also checks the protocol: more would take too long."""


def _broken_rules(trace: Trace, found: Finding) -> list[EvidenceLine]:
    """The protocol violations in the trace of a run that went wrong."""
    if not found.outcome.wrong or len(trace) > CHECKED:
        return []
    return [EvidenceLine(plain(one.message), f"check: {one.rule}") for one in check.examine(trace).violations[:3]]
