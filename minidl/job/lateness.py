"""Why a straggler is late: what its loader or its own step does that those of the other ranks do not.

Interface: `reason_of(meetings, found)` -> `LateReason`: in words, with evidence and what to do next. `REASONS` are all
that is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from minidl.job.meetings import Meetings, Straggler
from minidl.job.step_table import CAUSES, RankTable
from minidl.speed.own_step import OTHER
from minidl.speed.reasons import UNEVEN
from minidl.tracefile.arrays import Rows
from minidl.tracefile.words import counted, micros, percent

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


class _LateCase:
    """A straggler: its ranks' steps since they are late; what is typical for them (`own`), and for the other ranks.

    others: rows of these; more: the µs by cause that its loops waited longer than the median rank's, in the steps that
    waited, the largest first.
    """

    def __init__(self, meetings: Meetings, found: Straggler) -> None:
        self.meetings, self.found = meetings, found
        after = np.arange(found.since, len(meetings.keys))
        self.steps = meetings.steps_of(found.ranks, after)
        self.others = [row for row in range(len(meetings.tables)) if row not in found.ranks]
        self.own = _typical(self.steps)
        theirs = [_typical(meetings.steps_of([row], after)) for row in self.others]
        self.usual = {name: _median([one[name] for one in theirs]) for name in self.own}
        sums = meetings.by_cause(found.steps)
        more = sums[list(found.ranks)].mean(axis=0) - np.median(sums, axis=0)
        self.more = {CAUSES[at].value: float(more[at]) for at in np.argsort(-more, kind="stable")}

    @property
    def waits(self) -> str:
        """Whether fetches compute or wait; "" = not measured."""
        known = self.steps[self.steps["cpu"] > 0]
        share = known["cpu"].sum(dtype=np.float64) / max(1, known["fetch"].sum(dtype=np.float64))
        return "" if not len(known) else ", computing" if share > PART else ", mostly waiting"

    def tables(self, rows: Sequence[int]) -> list[RankTable]:
        return [self.meetings.tables[row] for row in rows]


def reason_of(meetings: Meetings, found: Straggler) -> LateReason:
    """Why these ranks are late: the first of REASONS that holds."""
    case, many = _LateCase(meetings, found), len(found.ranks) > 1
    words, reason = next((words, one) for one in REASONS if (words := one.says(case)))
    step = (reason.several if many else "") or reason.next_step
    return LateReason(words.format(**(_MANY if many else _ONE)), (*_evidence(case),), step)


_ONE: Final = {"it": "it", "its": "its", "has": "has", "s": "s", "loops": "loop waits"}
_MANY: Final = {"it": "they", "its": "their", "has": "have", "s": "", "loops": "loops wait"}
"""The words of a reason that differ between one rank and several."""


# --- Reasons ----------------------------------------------------------------------------------------------------------
def _more_data(case: _LateCase) -> str:
    for name, what in (("samples", "{:.0f} samples a batch, others {:.0f}"), ("bytes", "by bytes of a batch")):
        own, usual = case.own[name], case.usual[name]
        if own >= MORE * usual > 0:
            return f"{{it}} load{{s}} {_times(own / usual)} the data of other ranks ({what.format(own, usual)})"
    return ""


def _own_step(case: _LateCase) -> str:
    """What of its own step is longer than the other ranks', if the parts of steps show it."""
    meetings, found = case.meetings, case.found
    if found.loader >= PART:
        return ""
    own, usual = (_parts(case.tables(rows)) for rows in (found.ranks, case.others))
    more = {name: us - usual.get(name, 0.0) for name, us in own.items() if name != "collectives"}
    part = max(more, key=lambda name: more[name], default=OTHER)
    late = float(meetings.late[list(found.ranks)][:, found.steps].sum()) / len(found.ranks)
    words = f"{{its}} own step takes {micros(late / len(found.steps))} longer"
    if more.get(part, 0.0) * len(meetings.keys) < PART * late:
        return words
    factor = own[part] / usual[part] if usual.get(part) else 0.0
    return f"{words} ({part}{f', {_times(factor)} as long' if factor >= MORE else ''})"


def _one_worker(case: _LateCase) -> str:
    made = case.steps[case.steps["fetch"] > 0]
    own = {int(n): _median(made["fetch"][made["worker"] == n]) for n in np.unique(made["worker"]) if n >= 0}
    usual = case.usual["fetch"]
    if len(case.found.ranks) > 1 or len(own) < 2 or not usual:
        return ""
    worker = max(own, key=lambda one: own[one])
    if own[worker] < UNEVEN * max(usual, _median([took for number, took in own.items() if number != worker])):
        return ""
    slower = _times(own[worker] / usual)
    return f"its worker {worker} takes {slower} as long for a batch as other ranks' workers{case.waits}"


def _slow_batches(case: _LateCase) -> str:
    own, usual = case.own["fetch"], case.usual["fetch"]
    if not own >= MORE * usual > 0:
        return ""
    maker = "{its} workers take" if (case.steps["worker"] >= 0).any() else "{it} take{s}"
    return f"{maker} {_times(own / usual)} as long for a batch as other ranks'{case.waits}"


def _some_batches(case: _LateCase) -> str:
    mean = float(case.steps["fetch"].mean()) if len(case.steps) else 0.0
    if mean < MORE * case.own["fetch"] or not mean:
        return ""
    row = case.steps[np.argmax(case.steps["fetch"])]
    sample = f", sample {row['slowest']} of it {micros(row['slowest_took'])}" if row["slowest"] >= 0 else ""
    return f"some of {{its}} batches take long (up to {micros(row['fetch'])}{sample})"


def _fewer_workers(case: _LateCase) -> str:
    own = case.tables(case.found.ranks)[0].facts.workers
    usual = int(_median([table.facts.workers for table in case.tables(case.others)]))
    return f"{{it}} {{has}} {counted(own, 'worker')}, other ranks {usual}" if 0 < own < usual else ""


def _by_cause(case: _LateCase) -> str:
    return f"{{its}} {{loops}} for {next(iter(case.more))}"


_LOOK_AT_SAMPLES: Final = (
    "look at this rank's samples and where they are stored (its shard, its disk): minidl summary --rank N; shuffle, so "
    "that slow samples are spread over the ranks"
)
_LOOK_AT_NODE: Final = "look at what these ranks share: their machine, its disk or network, its other programs"


class _Reason(NamedTuple):
    """says: the reason in words, "" = it is not this; several: the next step of several ranks, "" = as of one."""

    says: Callable[[_LateCase], str]
    next_step: str
    several: str = ""


REASONS: Final = (
    _Reason(_more_data, "give all ranks batches of equal cost: the same batch_size, samples of all sizes on each"),
    _Reason(
        _own_step,
        "find out what this rank does in its step and the others do not (logging, checkpoints, validation), or whether "
        "its device or its CPUs are slower: minidl summary --rank N",
    ),
    _Reason(
        _one_worker,
        "find out what is different in this worker's samples: batch n goes to worker n mod num_workers",
    ),
    _Reason(_slow_batches, _LOOK_AT_SAMPLES, _LOOK_AT_NODE),
    _Reason(_some_batches, _LOOK_AT_SAMPLES, _LOOK_AT_NODE),
    _Reason(_fewer_workers, "give all ranks the same num_workers, and as many CPUs"),
    _Reason(_by_cause, "minidl summary --rank N says what bounds this rank's loader"),
)
"""What is tried, in this order; the last one always holds."""


# --- Evidence ---------------------------------------------------------------------------------------------------------
def _evidence(case: _LateCase) -> Iterator[str]:
    meetings, (worst, *_), held, waits = case.meetings, case.found.ranks, case.found.steps, case.found.loader
    at = np.ix_(np.asarray(case.found.ranks), held)
    each = float(meetings.late[at].sum() / max(1, np.count_nonzero(meetings.late_ones[at])))
    causes = f" ({', '.join([name for name, us in case.more.items() if us > 0][:2])})" * (waits >= LEAST)
    yield (
        f"late by {micros(each)} on average: {percent(waits)} of that is a longer wait for its batch{causes}, "
        f"{percent(1 - waits)} a longer step of its own"
    )
    steps = meetings.steps_of([worst], held)
    if waits >= PART and steps["fetch"].any():
        row = steps[np.argmax(steps["fetch"])]
        worker = f" of worker {row['worker']}" if row["worker"] >= 0 else ""
        sample = f"; its slowest sample, {row['slowest']}, {micros(row['slowest_took'])}" if row["slowest"] >= 0 else ""
        where = f"{row['number']} of epoch {row['epoch']} in {meetings.tables[worst].facts.name}{worker}"
        yield f"slowest batch: {where}: {micros(row['fetch'])}{sample}"


def _typical(steps: Rows) -> dict[str, float]:
    """The median µs of a rank's fetches, and the median samples and bytes of its batches."""
    made = steps[steps["fetch"] > 0]
    return {name: _median(made[name]) for name in ("fetch", "samples", "bytes")}


def _parts(tables: Sequence[RankTable]) -> dict[str, float]:
    """For each part of a step the median over ranks of its µs a step."""
    names = {name for table in tables for name in table.facts.parts}
    return {
        name: _median([table.facts.parts.get(name, 0) / 1000 / max(1, len(table.steps)) for table in tables])
        for name in names
    }


def _times(factor: float) -> str:
    return f"{factor:.2g} times" if factor < 10 else f"{factor:.0f} times"


def _median(values: object) -> float:
    found = np.asarray(values, np.float64)
    return float(np.median(found)) if len(found) else 0.0
