"""`minidl doctor`: look at a process, a trace, or a trace whose processes still run, and say what holds it up.

Interface: `examine(target)` -> `Diagnosis`. target: a process id, or a trace (its directory or its packed file).

Rules of use: it changes nothing in the processes that it looks at. A process is looked at twice if the first look does
not show a hang by itself, `seconds` apart: what moved between the looks is no hang.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Final

from minidl.analysis import live
from minidl.analysis.headline import Headline, What, headline
from minidl.doctor.case import Told
from minidl.doctor.diagnose import diagnose
from minidl.doctor.diagnosis import Diagnosis, EvidenceLine, HangCause, State, Sure
from minidl.evidence.collect import collect
from minidl.evidence.model import RunEvidence
from minidl.tracefile.format import TraceError
from minidl.tracefile.reader import Trace, read_trace

APART: Final = 3.5
"""Seconds between the two looks."""

INTERVAL: Final = 0.5
LONG: Final = 5.0
"""Seconds of waiting from which on it is a hang, if it is twice the longest wait before; as in a headline."""


def examine(target: str, *, py_spy: bool = True, seconds: float = APART) -> Diagnosis:
    """Say what holds up a process or a traced run. Raises TraceError if there is neither."""
    if target.isdecimal() and not os.path.exists(target):
        pid = int(target)
        if not live.records_trace(pid):
            return look_at(pid, None, py_spy=py_spy, seconds=seconds)
    path = live.find_trace(target)
    return of_trace(read_trace(path), py_spy=py_spy, seconds=seconds)


def look_at(pid: int, told: Told | None, *, py_spy: bool, seconds: float) -> Diagnosis:
    """Look at a process and its children, once or twice."""
    if not os.path.exists(f"/proc/{pid}"):
        raise TraceError(f"there is no process {pid}: give the id of one that runs, or a trace")
    looks: list[RunEvidence] = [collect(pid, interval=INTERVAL, py_spy=py_spy)]
    found = diagnose(looks, _until(told, looks[-1].moment))
    if found.state is State.HUNG or not seconds:
        return found
    time.sleep(seconds)
    looks.append(collect(pid, interval=INTERVAL, py_spy=py_spy))
    return diagnose(looks, _until(told, looks[-1].moment))


def _until(told: Told | None, moment: int) -> Told | None:
    """A wait that goes on, measured up to a moment."""
    if told is None or not told.since:
        return told
    seconds = (moment - told.since) / 1e9
    return replace(told, seconds=seconds, hung=seconds >= max(LONG, 2 * told.past))


def of_trace(trace: Trace, *, py_spy: bool, seconds: float) -> Diagnosis:
    """What a trace says, with the evidence in it; of a run that still runs, with what its processes are in now."""
    found = headline(trace)
    running = [p for p in trace.processes if p.role != "worker" and _runs(trace, p.pid, p.start_ns)]
    if running and found.kind in (What.HUNG, What.CUT, What.RUNNING) and found.told is not None:
        pid = found.told.pid if any(p.pid == found.told.pid for p in running) else running[0].pid
        return look_at(pid, found.told, py_spy=py_spy, seconds=seconds)
    return found.diagnosis or of_headline(found)


def _runs(trace: Trace, pid: int, start_ns: int) -> bool:
    return live.is_here(trace.manifest) and live.life(pid, start_ns).there


_STATES: Final = {
    What.DIED: (State.DIED, HangCause.DIED),
    What.HUNG: (State.HUNG, HangCause.UNKNOWN),
    What.ERROR: (State.ERROR, HangCause.ERROR),
    What.CUT: (State.CUT, HangCause.NONE),
    What.SLOW: (State.SLOW, HangCause.SLOW),
    What.FINE: (State.FINE, HangCause.NONE),
    What.RUNNING: (State.MOVES, HangCause.NONE),
}


def of_headline(found: Headline) -> Diagnosis:
    """The diagnosis of a trace without evidence of its processes: what its events say."""
    state, cause = _STATES[found.kind]
    told = found.told
    where = {"step": "unseen", "sample": told.sample, "task": told.task} if told is not None else {}
    who = {"role": "worker" if told.worker >= 0 else "loop", "worker": told.worker} if told is not None else {}
    hung = found.kind is What.HUNG
    return Diagnosis(
        state=state,
        cause=cause,
        sentence=found.sentence,
        evidence=tuple(EvidenceLine(text, "trace") for text in found.evidence),
        sure=Sure.UNKNOWN if hung else Sure.LIKELY,
        next_step=found.next_step,
        fix="",
        not_seen=("what it is blocked in: the trace has no evidence of its processes (record with a watchdog: "
                  "MINIDL_HANG_AFTER=60)",) if hung else (),
        who=who,
        where=where,
    )  # fmt: skip
