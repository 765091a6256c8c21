"""What the processes that fetch did with their time: computed, were ready to and had no CPU, or waited for something.

Interface: `cpu_use(spans)` -> `CpuUse` of the fetches among them; `cpus_of(manifest)`, the CPUs that the run could use.

Rules of use: it is the time of the thread that fetches: what it has other threads or processes do, it waits for. A
trace without CPU time gives `CpuLimit.UNKNOWN`, and no words.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.spans import total
from minidl.tracefile.words import percent

SHORT = 0.25
"""Share of the fetching spent ready to run and without a CPU from which CPUs are short: with a CPU for each worker it
is a few percent."""

FULL = 0.85
"""Of the CPUs that the run could use, the part that fetches use from which none is left for more workers."""


class CpuLimit(enum.Enum):
    """What fetches mostly do; the value says it in messages, after "samples"."""

    COMPUTES = "which compute"
    SHORT = "which wait for a CPU"
    WAITS = "which wait for a disk, a network or a lock"
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Fetches with CPU time, summed, in ns: how long they took, computed, and were ready to and had no CPU.

    during: how long at least one of them went on. told: whether the kernel told for how long they had no CPU.
    """

    wall: int = 0
    cpu: int = 0
    no_cpu: int = 0
    during: int = 0
    told: bool = False

    def __add__(self, other: CpuUse) -> CpuUse:
        """The sum of two that were not at the same time."""
        return CpuUse(
            self.wall + other.wall,
            self.cpu + other.cpu,
            self.no_cpu + other.no_cpu,
            self.during + other.during,
            self.told or other.told,
        )

    @property
    def at_once(self) -> float:
        """CPUs that the fetches used at a time, on average, while any went on."""
        return self.cpu / max(1, self.during)

    def held(self, cpus: float | None) -> tuple[CpuLimit, float]:
        """What they mostly did, and the share of their time. cpus: that the run could use.

        Where all these are in use, whoever does not compute waits for them: a quota's throttling, and a kernel that
        does not tell of waits for a CPU, show no other way.
        """
        if not self.wall:
            return CpuLimit.UNKNOWN, 0.0
        computed, no_cpu = self.cpu / self.wall, self.no_cpu / self.wall
        waited = 1 - computed - no_cpu
        if no_cpu >= max(SHORT, waited):
            return CpuLimit.SHORT, no_cpu
        if cpus is not None and self.at_once >= FULL * cpus and 1 - computed >= SHORT:
            return CpuLimit.SHORT, 1 - computed
        if computed >= waited:
            return CpuLimit.COMPUTES, computed
        return (CpuLimit.WAITS, waited) if self.told else (CpuLimit.UNKNOWN, 0.0)

    def line(self, cpus: float | None) -> str:
        """The shares in words; "" if nothing is known. cpus: that the run could use."""
        if not self.wall:
            return ""
        parts = [f"computing {percent(self.cpu / self.wall)}"]
        if self.told:
            rest = self.wall - self.cpu - self.no_cpu
            parts += [f"ready but without a CPU {percent(self.no_cpu / self.wall)}"]
            parts += [f"waiting for something else {percent(rest / self.wall)}"]
        elif self.cpu < self.wall:
            parts.append(f"waiting, for a CPU or for something else, {percent(1 - self.cpu / self.wall)}")
        of = "" if cpus is None else f" of {cpus:g}"
        return f"fetching was {', '.join(parts)}; it used {self.at_once:.1f}{of} CPUs at a time"


def cpu_use(spans: Rows) -> CpuUse:
    """Sum up the fetches among `spans`: array of SPAN."""
    rows = spans[(spans["code"] == ev.FETCH[0]) & (spans["end"] >= 0) & (spans["cpu"] > 0)]
    if not len(rows):
        return CpuUse()
    rows = rows[np.argsort(rows["begin"], kind="stable")]
    till = np.maximum.accumulate(rows["end"])
    idle = np.maximum(0, rows["begin"][1:] - till[:-1])
    during = int(till[-1] - rows["begin"][0] - idle.sum())
    told = bool(rows["cpu_wait"].any())
    return CpuUse(total(rows), int(rows["cpu"].sum()), int(rows["cpu_wait"].sum()), during, told)


def cpus_of(manifest: Mapping[str, Any]) -> float | None:
    """The CPUs that the run could use: the machine's, or fewer by affinity or a cgroup's quota; None = unknown."""
    named = (manifest.get(name) for name in ("cpus", "cpus_allowed", "cpu_quota"))
    known = [number for number in named if isinstance(number, (int, float)) and number > 0]
    return min(known, default=None)
