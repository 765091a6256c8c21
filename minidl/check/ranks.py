"""`minidl check` of a job: each rank's trace by itself, and a report of those that break a rule."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from minidl.check import examine
from minidl.job.each import each
from minidl.tracefile.format import TraceError
from minidl.tracefile.members import JobMembers
from minidl.tracefile.reader import read_trace
from minidl.tracefile.words import counted, listed, plain

TOLD: Final = 3
"""The ranks whose reports are printed."""


class _Checked(NamedTuple):
    """One rank's report; violations -1 = its trace cannot be read; lacks: why a part of it was not judged."""

    violations: int
    text: str
    report: dict[str, Any]
    lacks: Sequence[str] = ()


def _checked(path: Path) -> _Checked:
    try:
        report = examine(read_trace(path))
    except (TraceError, OSError) as error:
        return _Checked(-1, str(error), {"error": str(error)})
    lacks = [*report.trace.problems, *["it has no iterator"] * (not report.loaders)]
    return _Checked(len(report.violations), report.text(), report.json(), lacks)


def check_ranks(members: JobMembers, *, as_json: bool = False) -> int:
    """Print which ranks break the protocol, and the first reports; 1 if one does, else 2 if one cannot be read, else 0.

    A trace whose name has no rank is named by its path.
    """
    places = members.places
    names = [plain(f"rank {place.rank}" if place.rank >= 0 else str(place.path)) for place in places]
    every = [*zip(names, each(_checked, [place.path for place in places]), strict=True)]
    wrong = {name: found for name, found in every if found.violations > 0}
    unread = {name: found for name, found in every if found.violations < 0}
    partly = {name: found for name, found in every if found.violations == 0 and found.lacks}
    print(*map(plain, members.problems), sep="\n", end="\n" * bool(members.problems), file=sys.stderr)
    if as_json:
        print(json.dumps({name.removeprefix("rank "): found.report for name, found in every}, indent=1))
    else:
        sound = len(every) - len(wrong) - len(unread) - len(partly)
        lines = [f"{counted(len(every), 'rank')}, {sound} of them break no rule"]
        lines += [f"not read: {name}: {plain(unread[name].text)}" for name in [*unread][:TOLD]]
        lines += [f"{name}: not judged: {plain(partly[name].lacks[0])}" for name in [*partly][:TOLD]]
        lines += [f"not judged in whole: {listed(partly)}"] * (len(partly) > TOLD)
        lines += [f"NOT a behaviour of the protocol: {listed(wrong)}"] * bool(wrong)
        lines += [f"\n{name}: " + "\n".join(map(plain, wrong[name].text.splitlines())) for name in [*wrong][:TOLD]]
        print(*lines, sep="\n")
    return 1 if wrong else 2 if unread else 0
