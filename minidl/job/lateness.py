"""Why a straggler is late: what its loader or its own step does that those of the other ranks do not.

Interface: `reason_of(meetings, found)` -> `LateReason`: in words, with evidence and what to do next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from minidl.job.meetings import Meetings, Straggler
from minidl.job.step_table import CAUSES, RankTable
from minidl.speed.own_step import OTHER
from minidl.speed.reasons import UNEVEN
from minidl.speed.wall_clock import Cause
from minidl.tracefile.arrays import Rows
from minidl.tracefile.words import counted, duration, percent

MORE: Final = 1.5
"""A rank stands out from the others by this factor."""

PART: Final = 0.5
"""The share of a rank's lateness that one of its causes has to explain."""

LEAST: Final = 0.05
"""Evidence leaves smaller shares out."""


class LateReason(NamedTuple):
    """words: follow "wait for rank 3: "; evidence, next_step: as in a finding."""

    words: str
    evidence: tuple[str, ...]
    next_step: str


class _Typical(NamedTuple):
    """What is usual for a rank's batches: median µs of fetches, of all and by worker; medians of samples and bytes."""

    fetch: float
    workers: dict[int, float]
    samples: float
    size: float

    @classmethod
    def of(cls, steps: Rows) -> _Typical:
        made = steps[steps["fetch"] > 0]
        workers = {int(n): _median(made["fetch"][made["worker"] == n]) for n in np.unique(made["worker"]) if n >= 0}
        return cls(_median(made["fetch"]), workers, _median(made["samples"]), _median(made["bytes"]))


@dataclass(frozen=True)
class _LateCase:
    """A straggler: its ranks' steps since they are late, what is usual for them, and for the other ranks."""

    meetings: Meetings
    found: Straggler
    steps: Rows
    own: _Typical
    usual: _Typical
    workers: tuple[int, int]  # of the worst rank, and of the median other one

    @property
    def many(self) -> bool:
        return len(self.found.ranks) > 1

    @property
    def whose(self) -> str:
        return "their" if self.many else "its"

    @property
    def waits(self) -> str:
        """Whether fetches compute or wait; "" = not measured."""
        known = self.steps[self.steps["cpu"] > 0]
        share = known["cpu"].sum(dtype=np.float64) / max(1, known["fetch"].sum(dtype=np.float64))
        return "" if not len(known) else ", computing" if share > PART else ", mostly waiting"

    def excess(self) -> dict[Cause, float]:
        """The µs by cause that the ranks' loops waited longer than the median rank's, in the steps that waited."""
        sums = self.meetings.by_cause(self.found.steps)
        more = sums[list(self.found.ranks)].mean(axis=0) - np.median(sums, axis=0)
        return dict(zip(CAUSES, more.tolist(), strict=True))


def reason_of(meetings: Meetings, found: Straggler) -> LateReason:
    """Why these ranks are late: the first of the reasons that holds."""
    after = np.arange(found.since, len(meetings.keys))
    mine = np.concatenate([meetings.steps_of(row, after) for row in found.ranks])
    others = [row for row in range(len(meetings.tables)) if row not in found.ranks]
    theirs = [_Typical.of(meetings.steps_of(row, after)) for row in others]
    fetch, samples, size = (_median([getattr(one, name) for one in theirs]) for name in ("fetch", "samples", "size"))
    workers = [meetings.tables[row].facts.workers for row in (found.ranks[0], *others)]
    case = _LateCase(
        meetings, found, mine, _Typical.of(mine), _Typical(fetch, {}, samples, size),
        (workers[0], int(_median(workers[1:]))),
    )  # fmt: skip
    words, step = next(said for test in _TESTS if (said := test(case)) is not None)
    return LateReason(words, tuple(filter(None, (_lateness(case), _slowest(case)))), step)


# --- Reasons ----------------------------------------------------------------------------------------------------------
_Said = tuple[str, str] | None
"""The reason in words, and what to do next; None = it is not this."""


def _more_data(case: _LateCase) -> _Said:
    own, usual = case.own, case.usual
    for mine, others, what in (
        (own.samples, usual.samples, f"{own.samples:.0f} samples a batch, others {usual.samples:.0f}"),
        (own.size, usual.size, "by bytes of a batch"),
    ):
        if mine >= MORE * others > 0:
            words = (
                f"{'they load' if case.many else 'it loads'} {_times(mine / others)} the data of other ranks ({what})"
            )
            return words, "give all ranks batches of equal cost: the same batch_size, samples of all sizes on each"
    return None


def _own_step(case: _LateCase) -> _Said:
    """What of its own step is longer than the other ranks', if the parts of steps show it."""
    meetings, found = case.meetings, case.found
    if found.loader >= PART:
        return None
    own, usual = (
        _parts([table for row, table in enumerate(meetings.tables) if (row in found.ranks) is late])
        for late in (True, False)
    )
    more = {name: us - usual.get(name, 0.0) for name, us in own.items() if name != "collectives"}
    part = max(more, key=lambda name: more[name], default=OTHER)
    late = float(meetings.late[list(found.ranks)][:, found.steps].sum()) / len(found.ranks)
    words = f"{case.whose} own step takes {_ms(late / len(found.steps))} longer"
    if more.get(part, 0.0) * len(meetings.keys) < PART * late:
        return words, _LOOK_AT_STEP
    factor = own[part] / usual[part] if usual.get(part) else 0.0
    return f"{words} ({part}{f', {_times(factor)} as long' if factor >= MORE else ''})", _LOOK_AT_STEP


def _one_worker(case: _LateCase) -> _Said:
    own, usual = case.own.workers, case.usual.fetch
    if case.many or len(own) < 2 or not usual:
        return None
    worker = max(own, key=lambda one: own[one])
    if own[worker] < UNEVEN * max(usual, _median([took for number, took in own.items() if number != worker])):
        return None
    words = f"its worker {worker} takes {_times(own[worker] / usual)} as long for a batch as other ranks' workers"
    return words + case.waits, (
        "find out what is different in this worker's samples: batch n goes to worker n mod num_workers"
    )


def _slow_batches(case: _LateCase) -> _Said:
    own, usual = case.own.fetch, case.usual.fetch
    if own < MORE * usual or not usual:
        return None
    maker = f"{case.whose} workers take" if case.own.workers else "they take" if case.many else "it takes"
    words = f"{maker} {_times(own / usual)} as long for a batch as other ranks'{case.waits}"
    return words, _LOOK_AT_NODE if case.many else _LOOK_AT_SAMPLES


def _some_batches(case: _LateCase) -> _Said:
    mean = float(case.steps["fetch"].mean()) if len(case.steps) else 0.0
    if mean < MORE * case.own.fetch or not mean:
        return None
    row = case.steps[np.argmax(case.steps["fetch"])]
    sample = f", sample {row['slowest']} of it {_ms(row['slowest_took'])}" if row["slowest"] >= 0 else ""
    return f"some of {case.whose} batches take long (up to {_ms(row['fetch'])}{sample})", _LOOK_AT_SAMPLES


def _fewer_workers(case: _LateCase) -> _Said:
    own, usual = case.workers
    if not 0 < own < usual:
        return None
    words = f"{'they have' if case.many else 'it has'} {counted(own, 'worker')}, other ranks {usual}"
    return words, "give all ranks the same num_workers, and as many CPUs"


def _by_cause(case: _LateCase) -> _Said:
    more = case.excess()
    waits = "loops wait" if case.many else "loop waits"
    return f"{case.whose} {waits} for {max(more, key=lambda cause: more[cause]).value}", _LOOK_AT_LOADER


_TESTS: Final[tuple[Callable[[_LateCase], _Said], ...]] = (
    _more_data, _own_step, _one_worker, _slow_batches, _some_batches, _fewer_workers, _by_cause,
)  # fmt: skip
"""What is tried, in this order; the last one always holds."""

_LOOK_AT_SAMPLES: Final = (
    "look at this rank's samples and where they are stored (its shard, its disk): minidl summary --rank N; shuffle, so "
    "that slow samples are spread over the ranks"
)
_LOOK_AT_NODE: Final = "look at what these ranks share: their machine, its disk or network, its other programs"
_LOOK_AT_LOADER: Final = "minidl summary --rank N says what bounds this rank's loader"
_LOOK_AT_STEP: Final = (
    "find out what this rank does in its step and the others do not (logging, checkpoints, validation), or whether its "
    "device or its CPUs are slower: minidl summary --rank N"
)


# --- Evidence ---------------------------------------------------------------------------------------------------------
def _lateness(case: _LateCase) -> str:
    ranks, steps = list(case.found.ranks), case.found.steps
    late = case.meetings.late[ranks][:, steps]
    each = float(late.sum() / max(1, np.count_nonzero(case.meetings.late_ones[ranks][:, steps])))
    waits, more = case.found.loader, case.excess()
    named = [cause.value for cause in sorted(more, key=lambda cause: -more[cause])[:2] if more[cause] > 0]
    causes = f" ({', '.join(named)})" * (waits >= LEAST)
    return (
        f"late by {_ms(each)} on average: {percent(waits)} of that is a longer wait for its batch{causes}, "
        f"{percent(1 - waits)} a longer step of its own"
    )


def _slowest(case: _LateCase) -> str:
    """The slowest batch of the worst rank among the steps that waited for it."""
    worst = case.found.ranks[0]
    steps = case.meetings.steps_of(worst, case.found.steps)
    if case.found.loader < PART or not len(steps) or not steps["fetch"].any():
        return ""
    row = steps[np.argmax(steps["fetch"])]
    worker = f" of worker {row['worker']}" if row["worker"] >= 0 else ""
    sample = f"; its slowest sample, {row['slowest']}, {_ms(row['slowest_took'])}" if row["slowest"] >= 0 else ""
    name = case.meetings.tables[worst].facts.name
    return f"slowest batch: {row['number']} of epoch {row['epoch']} in {name}{worker}: {_ms(row['fetch'])}{sample}"


def _parts(tables: Sequence[RankTable]) -> dict[str, float]:
    """For each part of a step the median over ranks of its µs a step."""
    names = {name for table in tables for name in table.facts.parts}
    each = {
        name: [table.facts.parts.get(name, 0) / 1000 / max(1, len(table.steps)) for table in tables] for name in names
    }
    return {name: _median(values) for name, values in each.items()}


def _times(factor: float) -> str:
    return f"{factor:.2g} times" if factor < 10 else f"{factor:.0f} times"


def _ms(us: float) -> str:
    return duration(1000 * float(us))


def _median(values: object) -> float:
    found = np.asarray(values, np.float64)
    return float(np.median(found)) if len(found) else 0.0
