"""CPU use of fetches: the time that they computed, were ready without a CPU, or waited for something else.

Interface: `cpu_use(spans)` -> `CpuUse` of the fetches among them; `cpus_of(manifest)`, the CPUs that the run could use.

Rules of use: only the thread that fetches counts; it waits while other threads or processes work for it. A trace
without CPU time gives `CpuLimit.UNKNOWN`, and no words.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minidl.speed.stages import covered
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.spans import total
from minidl.tracefile.words import percent

SHORT = 0.25
"""CPUs are short if fetches are ready without a CPU for this share of their time: with a CPU for each worker the
share is a few percent."""

FULL = 0.85
"""No CPU is left for more workers if fetches use this share of the usable CPUs."""


class CpuLimit(enum.Enum):
    """What fetches mostly do; the value is for messages, after "samples, which"."""

    COMPUTES = "compute"
    SHORT = "wait for a CPU"
    WAITS = "wait (disk, network, lock, sleep)"
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Sums over fetches with CPU time, in ns: their duration, their CPU time, their time ready without a CPU.

    during: the time with at least one open fetch. told: whether the kernel reports the time without a CPU.
    """

    wall: int = 0
    cpu: int = 0
    no_cpu: int = 0
    during: int = 0
    told: bool = False

    def __add__(self, other: CpuUse) -> CpuUse:
        """The sum of two that did not overlap in time."""
        return CpuUse(
            self.wall + other.wall,
            self.cpu + other.cpu,
            self.no_cpu + other.no_cpu,
            self.during + other.during,
            self.told or other.told,
        )

    @property
    def at_once(self) -> float:
        """The average number of CPUs in use while at least one fetch is open."""
        return self.cpu / max(1, self.during)

    def held(self, cpus: float | None) -> tuple[CpuLimit, float]:
        """What fetches mostly did, and the share of their time. cpus: that the run could use.

        If all these CPUs are in use, a fetch that does not compute waits for a CPU: the throttling of a quota, or a
        kernel that does not report such waits, can be seen in no other way.
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
        """The shares in words; "" = unknown. cpus: that the run could use."""
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
        return f"fetching was {', '.join(parts)}; it used {self.at_once:.1f}{of} CPUs on average"


def cpu_use(spans: Rows) -> CpuUse:
    """Sum up the fetches among `spans`: array of SPAN."""
    rows = spans[(spans["code"] == ev.FETCH[0]) & (spans["end"] >= 0) & (spans["cpu"] > 0)]
    during, _ = covered(rows)
    told = bool(rows["cpu_wait"].any())
    return CpuUse(total(rows), int(rows["cpu"].sum()), int(rows["cpu_wait"].sum()), during, told)


def cpus_of(manifest: Mapping[str, Any]) -> float | None:
    """The CPUs that the run could use: the machine's, or fewer by affinity or a cgroup's quota; None = unknown."""
    named = (manifest.get(name) for name in ("cpus", "cpus_allowed", "cpu_quota"))
    known = [number for number in named if isinstance(number, (int, float)) and number > 0]
    return min(known, default=None)
