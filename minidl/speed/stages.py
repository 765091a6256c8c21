"""The steps of loaders by stage, with their figures: what the summary lists and `diff` compares.

Interface: `by_stage(spans)` sorts spans into the stages of the event table; `Figures.of(took)` are the figures of one;
`start_up` and `prefetching` say how an iterator began. Times are in ns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minidl.speed.intervals import Rate
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Ints, Rows
from minidl.tracefile.events import EVENTS


@dataclass(frozen=True, slots=True)
class Figures:
    """The durations of a stage's steps in one run.

    rate: of steps by ns, with its variance within the run; its inverse is the mean. computing: the share of their time
    that steps with CPU time computed; None without CPU time.
    """

    count: int
    total: int
    p50: float
    p95: float
    p99: float
    most: int
    rate: Rate
    computing: float | None = None

    @property
    def mean(self) -> float:
        return self.total / self.count

    @classmethod
    def of(cls, took: Ints, cpu: Ints | None = None) -> Figures | None:
        """The figures of durations in order of time; None if there are none. cpu: their CPU time, 0 = unknown."""
        if not len(took):
            return None
        p50, p95, p99 = (float(p) for p in np.percentile(took, [50, 95, 99]))
        rate = Rate.of([(np.ones_like(took), took)])
        share = None if cpu is None or not cpu.any() else float(cpu.sum() / took[cpu > 0].sum())
        return cls(len(took), int(took.sum()), p50, p95, p99, int(took.max()), rate, share)


def by_stage(spans: Rows) -> dict[str, Rows]:
    """Stage -> its spans, in the event table's order. Several kinds may be one stage: both waits are "wait".

    spans: closed ones.
    """
    codes: dict[str, list[int]] = {}
    for event in EVENTS.values():
        if event.stage and event.phase is ev.Phase.BEGIN:
            codes.setdefault(event.stage, []).append(event.code)
    if np.any(spans["code"] == ev.READY_GET[0]):  # then the pin thread waits for results
        codes["wait"].remove(ev.RESULT_GET[0])
        codes["pin idle"] = [ev.RESULT_GET[0]]
    found = ((stage, spans[np.isin(spans["code"], wanted)]) for stage, wanted in codes.items())
    return {stage: mine for stage, mine in found if len(mine)}


def covered(spans: Rows) -> tuple[int, int]:
    """ns that at least one of the spans covers, and ns from the first to the last."""
    if not len(spans):
        return 0, 0
    spans = spans[np.argsort(spans["begin"], kind="stable")]
    ends: Ints = np.maximum.accumulate(spans["end"])
    gaps = np.maximum(spans["begin"][1:] - ends[:-1], 0)
    whole = int(ends[-1] - spans["begin"][0])
    return whole - int(gaps.sum()), whole


def prefetching(events: Rows) -> dict[str, int]:
    """The prefetch factor, from an epoch's begin; {} without workers."""
    begins = events[events["code"] == ev.EPOCH[0]]
    return {"prefetch_factor": int(begins["z"][0])} if len(begins) and begins["z"][0] else {}


def start_up(events: Rows) -> int | None:
    """From the first worker's start to the last worker's readiness."""
    starts, ready = events[events["code"] == ev.WORKER_START[0]], events[events["code"] == ev.WORKER_READY]
    return int(ready["time"][-1] - starts["time"][0]) if len(starts) and len(ready) else None
