"""`minidl diff` of two jobs: how much faster B makes its steps, what keeps each of them, and which ranks changed.

Interface: `JobDiff(a, b)` of two reports: `text()` and `facts()`. A step of a job is the median over its ranks' steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from minidl.job.report import JobReport
from minidl.job.step_table import CAUSES
from minidl.tracefile.words import counted, micros, percent

EQUAL: Final = 1.02
"""Jobs whose steps differ by a smaller factor are equally fast."""

CHANGED: Final = 0.1
"""The share of all lateness by which a rank's has to change to be named."""

MOST_NAMED: Final = 6

_LATE, _OWN = "waits for the last rank", "own step without that"


@dataclass(frozen=True)
class JobDiff:
    """Two jobs, compared."""

    a: JobReport
    b: JobReport

    @cached_property
    def headline(self) -> str:
        """How much faster B is."""
        took = [float(np.mean(one.meetings.took)) if len(one.meetings.took) else 0.0 for one in (self.a, self.b)]
        if not all(took):
            return "one of the jobs has no step of several ranks: nothing to compare"
        factor = took[0] / took[1]
        each = f"{micros(took[1])} a step, A {micros(took[0])}"
        if 1 / EQUAL < factor < EQUAL:
            return f"A and B are equally fast: {each}"
        return f"B makes {factor:.2f} times as many steps as A in the same time: {each}"

    def parts(self) -> dict[str, tuple[float, float]]:
        """Name -> µs a step, in A and in B: what the ranks wait for, the largest first."""
        both = [_parts(one) for one in (self.a, self.b)]
        names = sorted(both[0], key=lambda name: -max(both[0][name], both[1][name]))
        return {name: (both[0][name], both[1][name]) for name in names if max(both[0][name], both[1][name]) >= 1}

    def ranks(self) -> dict[int, tuple[float, float]]:
        """Rank -> its share of all lateness in A and in B, of those whose share changed."""
        shares = [
            dict(zip((one.rank for one in job.facts), job.meetings.weights.tolist(), strict=True))
            for job in (self.a, self.b)
        ]
        both = {rank: (shares[0].get(rank, 0.0), shares[1].get(rank, 0.0)) for rank in shares[0] | shares[1]}
        changed = {rank: one for rank, one in both.items() if abs(one[1] - one[0]) >= CHANGED}
        return dict(sorted(changed.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:MOST_NAMED])

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.headline
        for name, job in (("A", self.a), ("B", self.b)):
            yield f"  {name} ({counted(len(job.facts), 'rank')}): {job.finding.title}"
            yield from (f"    {text}" for text in job.lacks)
        yield f"  {'a step, mean over ranks':<40}{'A':>10}{'B':>10}"
        for what, (before, after) in self.parts().items():
            yield f"  {what:<40}{micros(before):>10}{micros(after):>10}"
        for rank, (before, after) in self.ranks().items():
            yield f"  rank {rank}: {percent(before)} of all lateness in A, {percent(after)} in B"

    def facts(self) -> dict[str, Any]:
        """The same as plain values, for programs; times in µs."""
        return {
            "headline": self.headline,
            "jobs": {name: job.finding.to_dict() for name, job in (("a", self.a), ("b", self.b))},
            "parts": self.parts(),
            "ranks": self.ranks(),
        }


def _parts(job: JobReport) -> dict[str, float]:
    meetings = job.meetings
    cells = max(1, int(meetings.there.sum()))
    waits = meetings.by_cause(np.arange(len(meetings.keys))).sum(axis=0) / cells
    found = {cause.value: float(waited) for cause, waited in zip(CAUSES, waits, strict=True)}
    late = float(meetings.for_others.sum()) / cells
    return found | {_LATE: late, _OWN: max(0.0, float(meetings.own.sum()) / cells - late)}
