"""Jobs that never ran: tables of steps in which ranks meet once a step, to the microsecond. Simulated, not recorded.

And jobs whose ranks are copies of recorded traces.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minidl.hang.headline.uneven import LastEpoch
from minidl.job.digests import JobRecord
from minidl.job.step_table import CAUSES, STEP, RankFacts, RankTable
from minidl.speed.wall_clock import Cause

FETCH, STEP_TAKES, MEETING = 4_000, 20_000, 500
"""Microseconds of a fetch by one of two workers, of a step's computation, and of a meeting without waiting."""


@dataclass(frozen=True)
class MadeJob:
    """Ranks in lockstep. fetch, step: µs of rank r for its batch k; samples: of a batch of rank r; nodes: its node."""

    ranks: int = 8
    steps: int = 60
    fetch: Callable[[int, int], int] = lambda rank, step: FETCH
    step: Callable[[int, int], int] = lambda rank, step: STEP_TAKES
    samples: Callable[[int], int] = lambda rank: 32
    nodes: Callable[[int], str] = lambda rank: "one"
    seen: str = "collective"  # where the meeting is recorded: "collective", "backward", or "" = nowhere
    meet: bool = True  # else the ranks do not wait for each other
    begins: tuple[int, ...] = ()  # µs that each rank is in its first step longer, as it began earlier
    facts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    missing: tuple[int, ...] = ()

    def record(self) -> JobRecord:
        fetch, own = (
            np.array([[cost(rank, step) for step in range(self.steps)] for rank in range(self.ranks)])
            for cost in (self.fetch, self.step)
        )
        waits = np.maximum(0, fetch - own.min(axis=0))  # what a step does not hide
        work = waits + own
        own[:, :1] += np.array(self.begins)[:, None] if self.begins else 0
        met = (work.max(axis=0) - work) * self.meet + MEETING
        several = len({self.nodes(rank) for rank in range(self.ranks)}) > 1
        tables = []
        for rank in sorted(set(range(self.ranks)) - set(self.missing)):
            rows = np.zeros(self.steps, STEP)
            rows["number"] = np.arange(self.steps)
            rows["waits"][:, CAUSES.index(Cause.SAMPLES)] = waits[rank]
            rows["own"] = own[rank] + met[rank]
            if self.seen:
                rows[self.seen] = met[rank]
            rows["worker"], rows["fetch"], rows["samples"] = np.arange(self.steps) % 2, fetch[rank], self.samples(rank)
            rows["slowest"], rows["slowest_took"] = -1, 0
            parts = {"forward": int(own[rank].sum()) * 1000, "collectives": int(met[rank].sum()) * 1000}
            facts = RankFacts(
                rank, self.ranks, self.nodes(rank) * several, "train.py", "Photos", 2, self.steps,
                LastEpoch(0, self.steps, True), 2, 1 + 10**9, 100, True, outcome="fine", what="not input-bound",
                parts=parts,
            )  # fmt: skip
            tables.append(RankTable(facts, rows).with_facts(**self.facts.get(rank, {})))
        return JobRecord("made", tuple(tables))


def late_job(
    ranks: int = 4, steps: int = 60, when: Callable[[int], bool] = lambda step: True, **more: Any
) -> JobRecord:
    """A job that waits for rank 2 in the steps of which `when` says so."""
    slow = lambda rank, step: 60_000 if rank == 2 and when(step) else FETCH  # noqa: E731
    return MadeJob(ranks, steps, fetch=slow, **more).record()


def copied(place: Path, *names: str) -> Path:
    """A directory with a rank for each name of a recorded trace."""
    place.mkdir(exist_ok=True)
    for rank, name in enumerate(names):
        shutil.copy(Path(__file__).parents[2] / "traces" / f"{name}.minidl", place / f"rank-{rank}.minidl")
    return place
