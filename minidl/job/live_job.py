"""A running job, looked at again and again.

Interface: `LiveJob(paths)`: `look()` -> the report of the newest steps; `over`: no rank runs; `pause`: seconds to the
next look. `minidl top` and a job's page show it.

Rules of use: of a small job, the events are read at each look; of a large one the digests, which the ranks' watchdogs
renew each minute, and the events of the ranks without one. Looks take at most a fifth of the time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from minidl.hang.finding import RunOutcome
from minidl.hang.live import is_small
from minidl.job.digests import JobRecord, read_members
from minidl.job.meetings import keys_of
from minidl.job.report import JobReport
from minidl.tracefile.format import TraceError
from minidl.tracefile.members import members_at
from minidl.tracefile.words import counted, listed

FEW: Final = 8
"""Ranks of a small job."""

BEHIND: Final = 150.0
"""Seconds that a digest may be behind its rank: it is renewed each minute, or more seldom if that takes long."""

RECENT: Final = 240
"""The newest steps that are judged."""

SHARE: Final = 5
"""Looks take at most this part of the time."""


class LiveJob:
    """The job at `paths`. Raises TraceError if it is none."""

    def __init__(self, paths: Sequence[Path]) -> None:
        members = members_at(paths)
        if members is None:
            raise TraceError(f"{paths[0]} is no job")
        self.paths, self.name = paths, members.name
        self.over, self.pause = False, 0.0

    def look(self, *, newest: bool = True) -> JobReport:
        """Read what is new. newest: judge the newest steps alone. Raises TraceError if no rank can be read."""
        begun = time.monotonic()
        if (members := members_at(self.paths)) is None:
            raise TraceError(f"{self.name} is no job any more")
        small = len(members.places) <= FEW and all(is_small(one.path) for one in members.places)
        record = read_members(members, behind=0.0 if small or not newest else BEHIND)
        report = JobReport(recent(record) if newest else record)
        self.over = not any(one.running for one in report.facts)
        self.pause = (SHARE - 1) * (time.monotonic() - begun)
        return report


def recent(record: JobRecord) -> JobRecord:
    """The job with its newest steps alone."""
    known = np.unique(np.concatenate([keys_of(table.steps) for table in record.ranks]))
    if len(known) <= RECENT:
        return record
    ranks = [replace(one, steps=one.steps[keys_of(one.steps) >= known[-RECENT]]) for one in record.ranks]
    return replace(record, ranks=tuple(ranks))


def state(report: JobReport) -> str:
    """How many ranks run, and what became of the others."""
    ended = [RunOutcome(one.outcome) for one in report.facts if not one.running]
    counts = Counter(one.value if one.stopped or one is RunOutcome.UNKNOWN else "ended well" for one in ended)
    running = len(report.facts) - len(ended)
    others = [f"{count} {name}" for name, count in counts.most_common()]
    return f"{running} of {counted(len(report.facts), 'rank')} running" + f"; {listed(others)}" * bool(others)
