"""One look of the watchdog at a stall, in a process of its own: evidence, and the sentence of an alarm.

Interface: `look_at(stall, ...)` -> evidence; `alarm(stall, ...)` -> the sentence. Both may take long, or never end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from minidl.hang.evidence.model import RunEvidence
from minidl.tracefile.events import Call
from minidl.tracefile.watched import Stall

_SINCE: Final = {
    Call.NEXT: "has waited for a batch",
    Call.START: "has been starting",
    Call.SHUTDOWN: "has been shutting down",
}


def waited(stall: Stall) -> float:
    """The duration of a stall by now, seconds."""
    return (time.monotonic_ns() - stall.since) / 1e9


def in_words(stall: Stall) -> str:
    """A stall of the loader: which iterator waits, and how long."""
    return f"iterator {stall.loader} of pid {stall.pid} {_SINCE[stall.call]} for {waited(stall):.0f} s"


def look_at(stall: Stall, directory: Path, main: int, pids: Iterable[int], *, stacks: bool) -> RunEvidence:
    """Evidence of a run's processes. stacks: those without a stack are asked for it, if that does no harm."""
    from minidl.hang.evidence.collect import collect, with_stacks
    from minidl.watch.dumps import Asked

    found = collect(main, pids)
    if stall.call is Call.OWN or not stacks:  # the program's own code is not disturbed
        return found
    there = [one for one in found.processes if not one.ended and one.state in "RS"]  # others can't answer
    unseen = [one.pid for one in there if all(thread.stack is None for thread in one.threads)]
    return with_stacks(found, Asked(directory).stacks(unseen)) if unseen else found


def alarm(stall: Stall, directory: Path, evidence: RunEvidence) -> str:
    """The alarm's sentence; "" if the wait may only be a long step of the program's own code."""
    cause = ""
    with contextlib.suppress(Exception):  # an error in a rule must not hide the hang
        cause = _cause(stall, directory, evidence)
    if cause or stall.call is Call.OWN:
        return cause
    return f"{in_words(stall)}; the trace has the state of its processes"


def _cause(stall: Stall, directory: Path, evidence: RunEvidence) -> str:
    """The cause that holds the run up, in a sentence; "" if that is unknown."""
    from minidl.hang.consult import opinion
    from minidl.hang.finding import RecordedWait, RunOutcome
    from minidl.hang.headline import headline
    from minidl.hang.live import LiveTrace

    found, own = headline(LiveTrace(directory).read()[0]), stall.call is Call.OWN
    told = None if own else found.wait
    told = told or RecordedWait(since=stall.since, pid=stall.pid, own_code=own, no_loader=not stall.loader)
    seen = opinion([evidence], dataclasses.replace(told, hung=True, seconds=waited(stall)))
    if own:
        return seen.title if seen is not None and seen.outcome is RunOutcome.HUNG else ""
    return (seen or found).title
