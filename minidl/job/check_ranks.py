"""`minidl check` of a job: each rank's trace by itself, and a report of those that break a rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from minidl.check import examine
from minidl.job.each import each
from minidl.job.members import JobMembers
from minidl.tracefile.format import TraceError
from minidl.tracefile.reader import read_trace
from minidl.tracefile.words import counted, listed

TOLD: Final = 3
"""The ranks whose reports are printed."""


class _Checked(NamedTuple):
    """One rank's report; violations -1 = its trace cannot be read."""

    violations: int
    text: str
    report: dict[str, Any]


def _checked(path: Path) -> _Checked:
    try:
        report = examine(read_trace(path))
    except (TraceError, OSError) as error:
        return _Checked(-1, str(error), {"error": str(error)})
    return _Checked(len(report.violations), report.text(), report.json())


def check_ranks(members: JobMembers, *, as_json: bool = False) -> int:
    """Print which ranks break the protocol, and the first reports; 1 if one does, else 0."""
    ranks = [place.rank for place in members.places]
    every = dict(zip(ranks, each(_checked, [place.path for place in members.places]), strict=True))
    wrong = [rank for rank, found in every.items() if found.violations > 0]
    unread = [rank for rank, found in every.items() if found.violations < 0]
    if as_json:
        print(json.dumps({str(rank): found.report for rank, found in every.items()}, indent=1))
        return 1 if wrong else 0
    print(f"{counted(len(every), 'rank')}, {len(every) - len(wrong) - len(unread)} of them break no rule")
    print(*(f"not read: rank {rank}: {every[rank].text}" for rank in unread[:TOLD]), sep="\n", end="\n" * bool(unread))
    if wrong:
        print(f"NOT a behaviour of the protocol: rank{'s' * (len(wrong) > 1)} {listed(wrong)}")
    for rank in wrong[:TOLD]:
        print(f"\nrank {rank}: {every[rank].text}")
    return 1 if wrong else 0
