"""Why a straggler is late: what its loader or its own step does that those of the other ranks do not.

Interface: `reason_of(meetings, found)` -> `LateReason`: in words, with evidence and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """What is usual for one rank's batches: median durations of fetches in µs, all and by worker, and their sizes."""

    fetch: float
    workers: dict[int, float]
    samples: float
    size: float

    @classmethod
    def of(cls, steps: Rows) -> _Typical:
        made = steps[steps["fetch"] > 0]
        workers = {int(n): _median(made["fetch"][made["worker"] == n]) for n in np.unique(made["worker"]) if n >= 0}
        return cls(_median(made["fetch"]), workers, _median(made["samples"]), _median(made["bytes"]))


def reason_of(meetings: Meetings, found: Straggler) -> LateReason:
    """Why these ranks are late."""
    many = len(found.ranks) > 1
    worst = found.ranks[0]
    after = np.arange(found.since, len(meetings.keys))
    mine = meetings.steps_of(worst, after)
    others = [row for row in range(len(meetings.tables)) if row not in found.ranks]
    theirs = [_Typical.of(meetings.steps_of(row, after)) for row in others]
    own, usual = _Typical.of(mine), _middle_of(theirs)
    evidence = tuple(filter(None, (_lateness(meetings, found), _slowest(meetings, found))))
    facts = meetings.tables[worst].facts
    few = int(_median([meetings.tables[row].facts.workers for row in others]))
    whose, verb = ("their", "s") if many else ("its", "")
    if words := _more_data(own, usual, many):
        step = "give all ranks batches of equal cost: the same batch_size, and samples of all sizes on each rank"
        return LateReason(words, evidence, step)
    if found.loader < PART:
        return LateReason(_own_step(meetings, found, whose), evidence, _OWN_STEP)
    waits = _waits_in_words(mine)
    if words := _one_worker(own, usual):
        step = "find out what is different in this worker's samples: batch n goes to worker n mod num_workers"
        return LateReason(f"its {words} as other ranks' workers{waits}", evidence, step)
    if own.fetch >= MORE * usual.fetch > 0:
        maker = f"{whose} workers take" if own.workers else f"{'they take' if many else 'it takes'}"
        words = f"{maker} {_times(own.fetch / usual.fetch)} as long for a batch as other ranks'{waits}"
        return LateReason(words, evidence, _SLOW_NODE if many else _SLOW_SAMPLES)
    mean = float(mine["fetch"].mean()) if len(mine) else 0.0
    if mean >= MORE * own.fetch > 0:
        row = mine[np.argmax(mine["fetch"])]
        sample = f", sample {row['slowest']} of it {_ms(row['slowest_took'])}" if row["slowest"] >= 0 else ""
        words = f"some of {whose} batches take long (up to {_ms(row['fetch'])}{sample})"
        return LateReason(words, evidence, _SLOW_SAMPLES)
    if 0 < facts.workers < few:
        words = f"{'they have' if many else 'it has'} {counted(facts.workers, 'worker')}, other ranks {few}"
        return LateReason(words, evidence, "give all ranks the same num_workers, and as many CPUs")
    cause = max(_excess(meetings, found).items(), key=lambda item: item[1])[0]
    return LateReason(f"{whose} loop{verb} wait{'s' * (not many)} for {cause.value}", evidence, _SLOW_LOADER)


_SLOW_SAMPLES: Final = (
    "look at this rank's samples and where they are stored (its shard, its disk): minidl summary --rank N; shuffle, so "
    "that slow samples are spread over the ranks"
)
_SLOW_NODE: Final = "look at what these ranks share: their machine, its disk or network, its other programs"
_SLOW_LOADER: Final = "minidl summary --rank N says what bounds this rank's loader"
_OWN_STEP: Final = (
    "find out what this rank does in its step and the others do not (logging, checkpoints, validation), or whether its "
    "device or its CPUs are slower: minidl summary --rank N"
)


def _times(factor: float) -> str:
    return f"{factor:.2g} times" if factor < 10 else f"{factor:.0f} times"


def _ms(us: float) -> str:
    return duration(1000 * float(us))


def _median(values: object) -> float:
    found = np.asarray(values, np.float64)
    return float(np.median(found)) if len(found) else 0.0


def _middle_of(typical: Sequence[_Typical]) -> _Typical:
    """What is usual for the median rank."""
    fetch, samples, size = (_median([getattr(one, name) for one in typical]) for name in ("fetch", "samples", "size"))
    return _Typical(fetch, {}, samples, size)


def _more_data(own: _Typical, usual: _Typical, many: bool) -> str:
    for mine, others, what in (
        (own.samples, usual.samples, f"{own.samples:.0f} samples a batch, others {usual.samples:.0f}"),
        (own.size, usual.size, "by bytes of a batch"),
    ):
        if mine >= MORE * others > 0:
            return f"{'they load' if many else 'it loads'} {_times(mine / others)} the data of other ranks ({what})"
    return ""


def _one_worker(own: _Typical, usual: _Typical) -> str:
    if len(own.workers) < 2 or not usual.fetch:
        return ""
    worker = max(own.workers, key=lambda one: own.workers[one])
    took = own.workers[worker]
    rest = _median([one for number, one in own.workers.items() if number != worker])
    if took < UNEVEN * max(rest, usual.fetch):
        return ""
    return f"worker {worker} takes {_times(took / usual.fetch)} as long for a batch"


def _waits_in_words(steps: Rows) -> str:
    """Whether fetches compute or wait; "" = not measured."""
    known = steps[steps["cpu"] > 0]
    share = known["cpu"].sum(dtype=np.float64) / max(1, known["fetch"].sum(dtype=np.float64))
    return "" if not len(known) else ", computing" if share > PART else ", mostly waiting"


def _excess(meetings: Meetings, found: Straggler) -> dict[Cause, float]:
    """The µs by cause that the straggler's loop waited longer than the median rank's, in the steps that waited."""
    sums = meetings.by_cause(found.steps)
    more = sums[list(found.ranks)].mean(axis=0) - np.median(sums, axis=0)
    return dict(zip(CAUSES, more.tolist(), strict=True))


def _lateness(meetings: Meetings, found: Straggler) -> str:
    late = meetings.late[list(found.ranks)][:, found.steps]
    each = float(late.sum() / max(1, np.count_nonzero(meetings.late_ones[list(found.ranks)][:, found.steps])))
    more = {cause: us for cause, us in _excess(meetings, found).items() if us > 0}
    waits = found.loader
    named = sorted(more, key=lambda cause: -more[cause])[:2]
    causes = f" ({', '.join(cause.value for cause in named)})" * (waits >= LEAST)
    return (
        f"late by {_ms(each)} on average: {percent(waits)} of that is a longer wait for its batch{causes}, "
        f"{percent(1 - waits)} a longer step of its own"
    )


def _slowest(meetings: Meetings, found: Straggler) -> str:
    """The slowest batch of the worst rank among the steps that waited for it."""
    steps = meetings.steps_of(found.ranks[0], found.steps)
    if found.loader < PART or not len(steps) or not steps["fetch"].any():
        return ""
    row = steps[np.argmax(steps["fetch"])]
    worker = f" of worker {row['worker']}" if row["worker"] >= 0 else ""
    sample = f"; its slowest sample, {row['slowest']}, {_ms(row['slowest_took'])}" if row["slowest"] >= 0 else ""
    name = meetings.tables[found.ranks[0]].facts.name
    return f"slowest batch: {row['number']} of epoch {row['epoch']} in {name}{worker}: {_ms(row['fetch'])}{sample}"


def _own_step(meetings: Meetings, found: Straggler, whose: str) -> str:
    """What of the straggler's own step is longer than the other ranks', if the parts of steps show it."""
    own, usual = (_parts(tables) for tables in _both(meetings, found))
    more = {name: us - usual.get(name, 0.0) for name, us in own.items() if name != "collectives"}
    part = max(more, key=lambda name: more[name], default=OTHER)
    late = meetings.late[list(found.ranks)][:, found.steps].sum() / max(1, len(found.ranks) * len(meetings.keys))
    words = f"{whose} own step takes {_ms(late * len(meetings.keys) / len(found.steps))} longer"
    if more.get(part, 0.0) < PART * late:
        return words
    factor = own[part] / usual[part] if usual.get(part) else 0.0
    return f"{words} ({part}{f', {_times(factor)} as long' if factor >= MORE else ''})"


def _both(meetings: Meetings, found: Straggler) -> tuple[list[RankTable], list[RankTable]]:
    mine = [meetings.tables[row] for row in found.ranks]
    return mine, [table for row, table in enumerate(meetings.tables) if row not in found.ranks]


def _parts(tables: Sequence[RankTable]) -> dict[str, float]:
    """For each part of a step the median over ranks of its µs a step."""
    names = {name for table in tables for name in table.facts.parts}
    each = {
        name: [table.facts.parts.get(name, 0) / 1000 / max(1, len(table.steps)) for table in tables] for name in names
    }
    return {name: _median(values) for name, values in each.items()}
