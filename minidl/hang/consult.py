"""The doctor's finding on a hang whose evidence is in the trace.

Interface: `diagnose_recorded(trace, told)` -> `Finding`; None if the trace has no evidence of that wait, or if the
evidence adds nothing to the events.
"""

from __future__ import annotations

import dataclasses

from minidl.hang.diagnose import diagnose
from minidl.hang.evidence.model import EvidenceError, RunEvidence
from minidl.hang.finding import EvidenceLine, Finding, HangCause, RecordedWait, RunOutcome
from minidl.hang.limits import LOOK, OLD, STILL
from minidl.tracefile.reader import Trace
from minidl.tracefile.watched import StallLook
from minidl.tracefile.words import seconds


def recorded_looks(trace: Trace, told: RecordedWait) -> list[RunEvidence]:
    """A watchdog's evidence of a wait: its last look, and the look to compare it with. Damaged ones are left out."""
    late, death = int(LOOK * 1e9), trace.watched.death_of(told.pid)
    until = told.since + int(told.seconds * 1e9) + late
    found = [one for one in trace.watched.looks if told.since - late <= one.at <= until]
    found = [one for one in found if one.stall.pid == told.pid] or found
    if death is not None:  # a kill of the whole run ends processes one by one: no evidence of the wait
        found = [one for one in found if one.at < death.at - late] or found
    out = [evidence for one in found if (evidence := _readable(one)) is not None]
    if not out:
        return []
    earlier = [one for one in out if out[-1].moment - one.moment >= STILL * 1e9] or out[:-1]
    return [*earlier[-1:], out[-1]]


def _readable(look: StallLook) -> RunEvidence | None:
    try:
        return RunEvidence.from_data(look.evidence)
    except EvidenceError:
        return None


def diagnose_recorded(trace: Trace, told: RecordedWait) -> Finding | None:
    """The finding by the evidence of a trace's last wait."""
    found, until = opinion(recorded_looks(trace, told), told), told.since + int(told.seconds * 1e9)
    old = (until - max((one.at for one in trace.watched.looks), default=until)) / 1e9
    if found is None or old < OLD:
        return found
    said = f"the watchdog's last look was {seconds(old)} before the recording ends: it may not show the last state"
    return dataclasses.replace(found, evidence=(*found.evidence, EvidenceLine(said, "trace")))


def opinion(looks: list[RunEvidence], told: RecordedWait) -> Finding | None:
    """The finding by looks at a wait; None if they add nothing to the events."""
    if not looks:
        return None
    found = diagnose(looks, told)
    if found.outcome in (RunOutcome.MOVES, RunOutcome.MAYBE_HUNG):
        return found
    placed = found.who.get("role") == "worker" and "file" in found.where  # its line tells more than its events
    return found if found.outcome is RunOutcome.HUNG and (placed or found.cause is not HangCause.UNKNOWN) else None
