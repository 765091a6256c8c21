"""The table of a rank's steps: what its loop waited for, how long its own code ran, which worker made its batch.

Interface: `tables_of(trace)` -> a `RankTable` for each rank of a trace. Times of the table are in microseconds, its
moments in ns of the rank's CLOCK_MONOTONIC.

Rules of use: the steps are those of the DataLoader that the loop spent most time with. A step whose own code did not
end is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from minidl.hang.finding import Finding, HangCause, RunOutcome
from minidl.hang.headline import headline
from minidl.hang.headline.uneven import OF_A_WAIT, LastEpoch, last_epoch
from minidl.hang.life import is_running, now
from minidl.speed.own_step import parts_of
from minidl.speed.wall_clock import Cause, WallClock
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Floats, Ints, Rows
from minidl.tracefile.batches import NEVER, are_batches, epochs, keys, keys_at, latest
from minidl.tracefile.events import Outcome
from minidl.tracefile.facts import time_of_day
from minidl.tracefile.join import ranks_of, told
from minidl.tracefile.loaders import dataloaders, numbered_epochs
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import durations, total, within
from minidl.tracefile.words import plain

CAUSES: Final = tuple(Cause)

STEP = np.dtype(
    [
        ("epoch", "<u4"),  # of its DataLoader, from 0
        ("number", "<u4"),  # of the batch in its epoch, from 0
        ("waits", "<u4", (len(CAUSES),)),  # what the loop waited for in next, by cause
        ("own", "<u4"),  # the loop's own code, with the two below
        ("collective", "<u4"),  # its calls of torch.distributed
        ("backward", "<u4"),  # in which DistributedDataParallel meets the other ranks; 0 = not recorded in this step
        ("worker", "<i2"),  # that made the batch; -1 = none
        ("fetch", "<u4"),  # that worker's time for the batch
        ("cpu", "<u4"),  # CPU time of that; 0 = not measured
        ("samples", "<u4"),  # of the batch
        ("bytes", "<i8"),  # of the batch as it was sent; 0 = unknown
        ("slowest", "<i8"),  # index of its slowest sample; -1 = unknown
        ("slowest_took", "<u4"),
    ]
)
"""One step of a rank: a batch, and what the loop did with it. Durations in microseconds."""


@dataclass(frozen=True)
class RankFacts:
    """What is known of a rank beside its steps; plain values alone, as JSON has them.

    loader: name of the DataLoader whose steps these are. taken: batches that its loop got, in all epochs. began, ended:
    first and last event, ns of the time of day; if that is unknown, 0 and ns of its clock. over: its end is recorded;
    running: see `is_running`. outcome, what, next_step: of its own headline; waits_for_others: that is a wait for other
    ranks. parts: ns of each part of its steps. problem: what its trace lacks.
    """

    rank: int
    world: int = 0
    node: str = ""
    command: str = ""
    loader: str = ""
    workers: int = 0
    taken: int = 0
    last: LastEpoch = field(default_factory=LastEpoch)
    began: int = 0
    ended: int = 0
    events: int = 0
    over: bool = False
    running: bool = False
    outcome: str = RunOutcome.UNKNOWN.value
    what: str = ""
    next_step: str = ""
    waits_for_others: bool = False
    parts: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def name(self) -> str:
        """The rank for messages: "rank 37 (node4)"."""
        return f"rank {self.rank}" + (f" ({self.node})" if self.node else "")


@dataclass(frozen=True, eq=False)
class RankTable:
    """A rank: what is known of it, and its steps (array of STEP). path: its trace's in a job."""

    facts: RankFacts
    steps: Rows
    path: Path | None = None

    @cached_property
    def waited(self) -> Floats:
        """The µs that its loop waited, by CAUSES."""
        sums: Floats = self.steps["waits"].sum(axis=0, dtype=np.float64)
        return sums

    @cached_property
    def own(self) -> float:
        """The µs that its loop's own code took."""
        return float(self.steps["own"].sum(dtype=np.float64))

    def with_facts(self, **facts: Any) -> RankTable:
        """The same with some facts changed."""
        return replace(self, facts=replace(self.facts, **facts))

    @property
    def waiting(self) -> float:
        """The share of its time that its loop waited for batches."""
        return float(self.waited.sum() / max(1.0, self.waited.sum() + self.own))


def tables_of(trace: Trace) -> list[RankTable]:
    """The table of each rank in a trace."""
    parts = ranks_of(trace)
    return [_table(one, rank, several=len(parts) > 1) for rank, one in parts.items()]


def _table(trace: Trace, rank: int, several: bool) -> RankTable:
    spans = trace.spans()
    name, numbers = _main_loader(trace, spans)
    steps = [_steps(trace, number, spans, first) for number, first in numbered_epochs(trace, numbers).items()]
    mine = spans[np.isin(spans["loader"], numbers) & (spans["code"] == ev.CONSUMER[0]) & (spans["end"] >= 0)]
    facts = _facts(trace, rank, several, name, numbers, parts_of(spans, mine))
    return RankTable(facts, np.concatenate([np.empty(0, STEP), *steps]))


def _main_loader(trace: Trace, spans: Rows) -> tuple[str, list[int]]:
    """The name and the iterators of the DataLoader that the loop spent most time with.

    Those that are made at one line are one: a program may make one in each epoch.
    """
    loop = spans[np.isin(spans["code"], [ev.NEXT[0], ev.CONSUMER[0]]) & (spans["end"] >= 0)]
    spent = {n: total(loop[loop["loader"] == n]) for n in np.unique(trace.events["loader"]).tolist() if n}
    named: dict[str, list[int]] = defaultdict(list)
    for one in dataloaders(trace):
        named[one.place] += one.iterators
    for number in spent.keys() - {number for numbers in named.values() for number in numbers}:
        named[f"iterator {number}"] = [number]
    name = max(named, key=lambda one: sum(spent.get(number, 0) for number in named[one]), default="")
    return name, sorted(named[name])


# --- Its steps --------------------------------------------------------------------------------------------------------
def _steps(trace: Trace, number: int, spans: Rows, first: int) -> Rows:
    """The steps of an iterator. spans: the trace's; first: the number of its first epoch."""
    mine = spans[spans["loader"] == number]
    nexts = mine[(mine["code"] == ev.NEXT[0]) & (mine["end"] >= 0) & (mine["ey"] == Outcome.DATA)]
    nexts = nexts[nexts["begin"] >= trace.whole_from(number)]
    loop = mine[(mine["code"] == ev.CONSUMER[0]) & (mine["task"] >= 0)]
    place = np.searchsorted(loop["begin"], nexts["end"])
    ends = np.append(loop["end"], -1)[place]
    nexts, place = nexts[ends >= 0], place[ends >= 0]
    if not len(nexts):
        return np.empty(0, STEP)
    loop = loop[place]
    out = np.zeros(len(nexts), STEP)
    epoch = np.maximum(0, epochs(trace.events, nexts["loader"], nexts["end"]))
    out["epoch"], out["number"] = epoch + first, np.maximum(0, nexts["ex"] - 1)
    out["own"] = _us(durations(loop))
    for name, code in (("collective", ev.COLLECTIVE[0]), ("backward", ev.BACKWARD[0])):
        out[name] = _us(_inside(spans[spans["code"] == code], loop))
    waited = WallClock(trace, number, spans).causes_in(nexts)
    out["waits"] = np.stack([_us(waited[cause]) for cause in CAUSES], axis=1)
    _add_batches(trace, mine, keys(nexts["loader"], epoch, nexts["task"]), out)
    return out


def _us(ns: Any) -> Any:
    return np.clip(np.rint(np.asarray(ns) / 1000), 0, np.iinfo(np.uint32).max)


def _inside(rows: Rows, loop: Rows) -> Ints:
    """The ns of `rows` within each of the loop's steps, in its thread."""
    place = within(rows, loop)
    return np.bincount(place[place >= 0], durations(rows[place >= 0]), len(loop)).astype(np.int64)


def _add_batches(trace: Trace, mine: Rows, batch: Ints, out: Rows) -> None:
    """Fill in who made each batch, and how. mine: the iterator's spans; batch: the key of each step's batch."""
    out["worker"] = out["slowest"] = -1

    def found(code: int) -> tuple[Bools, Rows]:
        """Which steps have a closed span of a kind, and the longest one of each of these."""
        rows = mine[(mine["code"] == code) & (mine["end"] >= 0) & (mine["task"] >= 0)]
        of = keys_at(trace.events, rows, rows["end"])
        at = latest(of, durations(rows), batch, np.full(len(batch), NEVER))
        return at >= 0, rows[at[at >= 0]]

    has, rows = found(ev.FETCH[0])
    out["worker"][has], out["samples"][has] = rows["worker"], rows["bx"]
    out["fetch"][has], out["cpu"][has] = _us(durations(rows)), _us(rows["cpu"])
    has, rows = found(ev.RESULT_REBUILD[0])
    out["bytes"][has] = rows["bx"] + rows["ey"]
    has, rows = found(ev.SAMPLE[0])
    out["slowest"][has], out["slowest_took"][has] = rows["by"], _us(durations(rows))


# --- What is known of it ----------------------------------------------------------------------------------------------
def _facts(
    trace: Trace, rank: int, several: bool, name: str, numbers: Sequence[int], parts: Mapping[str, int]
) -> RankFacts:
    events, manifest = trace.events, trace.manifest
    ends = {line["process"] for kind in ("trace_end", "program_end") for line in trace.described(kind)}
    homes = {process for process in np.unique(events["process"]).tolist() if trace.processes[process].role != "worker"}
    over = bool(homes & ends if homes else ends)
    running = not over and is_running(trace.path, manifest)
    if running:
        trace.seen = now(manifest)
    said = headline(trace)
    bounded = said.outcome in (RunOutcome.SLOW, RunOutcome.FINE)
    mine = events[np.isin(events["loader"], numbers)]
    wall, last_event = time_of_day(manifest), int(events["time"].max(initial=0))
    return RankFacts(
        rank=rank,
        world=max(told(trace, "world_size"), default=0),
        node=plain(str(manifest.get("host") or "")),
        command=plain(" ".join(map(str, manifest.get("command") or []))),
        loader=name,
        workers=int(mine["y"][mine["code"] == ev.EPOCH[0]].max(initial=0)),
        taken=int(np.count_nonzero(are_batches(mine))),
        last=last_epoch(mine, numbers),
        began=trace.start + wall if wall and trace.start else 0,
        ended=wall + last_event,
        events=len(events),
        over=over,
        running=running,
        outcome=said.outcome.value,
        what=said.title.partition(": ")[2] if bounded else said.title,
        next_step=said.helps,
        waits_for_others=not bounded and _waits_for_others(trace, said, homes),
        parts=dict(parts),
        problem=plain(next(iter(trace.problems), "")) if not several else "",
    )


def _waits_for_others(trace: Trace, said: Finding, homes: set[int]) -> bool:
    """Whether a rank that went wrong, or was cut, was waiting for other ranks."""
    if said.cause is HangCause.COLLECTIVE:
        return True
    raised = [str(one.get("error")) for one in trace.described("uncaught") if one["process"] in homes or not homes]
    if said.outcome is RunOutcome.ERROR:
        return any(map(OF_A_WAIT.search, raised))
    spans = trace.spans()
    meets = np.isin(spans["code"], [ev.COLLECTIVE[0], ev.BACKWARD[0]]) & np.isin(spans["process"], list(homes))
    return bool(np.any(meets & (spans["end"] < 0)))
