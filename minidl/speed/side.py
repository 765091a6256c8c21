"""The figures of one run that `diff` compares: the rates of its training loops, their time, and its stages.

Interface: `groups(trace)` lists the loaders of a trace, `side(trace, *group)` -> `Side` has the figures of one.

Rules of use: "steady" is without the first batch of each epoch, which waits for the workers' start, and without the
steps of a warm-up. Ranks run side by side: their rates are added up. Times are in ns unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from minidl.speed.intervals import Rate
from minidl.speed.ledger import Ledger, ledger, part
from minidl.speed.stages import Figures, by_stage, prefetching, start_up
from minidl.speed.transport_use import Way, way
from minidl.speed.wall_clock import Cause, WallClock
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Rows, starts
from minidl.tracefile.batches import are_batches, keys_at
from minidl.tracefile.events import EVENTS
from minidl.tracefile.format import TraceError
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import durations, total

HANGS = 10**9
"""A wait at the end of a run is mentioned if it takes this many ns and is longer than all before."""

OF_ONE_ITERATOR = ("rank", "dataset_fingerprint", "dataloader")
"""Parameters in which the iterators of one loader may differ: by rank, or since the program makes it anew."""

CAUSES: Final[tuple[Cause | None, ...]] = (*Cause, None)
"""What the loop does: it waits for one of these, None = its own steps."""

_OF_THE_LOADER = ("sampling", "wait", "pin idle", "consumer", "shutdown", "rebuild", "pin")
"""Stages outside of the workers, though their spans name the worker of the batch."""


@dataclass(frozen=True)
class Loop:
    """The training loop of one rank. took: ns of each batch since the one before, or since the epoch's first `next`.

    first: whether it is the first of its epoch, or comes after a step of the warm-up. samples: in each; None if the
    trace does not tell. split: the shares of the steady time by what the loop waited for, None = its own steps; {} if
    the trace does not show waiting. whole: ns of the loop with the starts and ends of epochs; starting: of these, for
    starting and ending workers.
    """

    took: Ints = field(repr=False)
    first: Bools = field(repr=False)
    samples: Ints | None = field(repr=False)
    split: Mapping[Cause | None, float]
    whole: int = 1
    starting: int = 0

    def work(self, samples: bool) -> Ints:
        """The samples of each batch, or 1 for each."""
        return self.samples if samples and self.samples is not None else np.ones_like(self.took)

    def steady(self, samples: bool) -> tuple[Ints, Ints]:
        """The samples, or 1, and ns of each steady batch."""
        return self.work(samples)[~self.first], self.took[~self.first]


@dataclass(frozen=True)
class Side:
    """One run: the iterators of one loader. loops: by rank, -1 = without ranks. waited: in `next` for batches.

    start_up: None if the trace does not tell; first: mean wait for an epoch's first batch; pending: ns of a wait in
    which the trace ends, if it is longer than all before, else 0. unseen: stages that such a recording does not show.
    way: how batches travelled. stages: by name and worker (-1 = all).
    """

    path: str
    loaders: tuple[int, ...]
    params: Mapping[str, Any]
    manifest: Mapping[str, Any]
    loops: Mapping[int, Loop]
    waited: int
    start_up: float | None
    first: float | None
    ledger: Ledger
    stages: Mapping[tuple[str, int], Figures]
    pending: int = 0
    unseen: frozenset[str] = frozenset()
    way: Way = field(default_factory=Way)

    @property
    def time(self) -> int:
        """The loops' time, ns."""
        return sum(loop.whole for loop in self.loops.values())

    @property
    def batches(self) -> int:
        return sum(len(loop.took) for loop in self.loops.values())

    @property
    def samples(self) -> int | None:
        return sum(int(loop.work(True).sum()) for loop in self.loops.values()) if self.tells_samples else None

    @property
    def tells_samples(self) -> bool:
        return all(loop.samples is not None for loop in self.loops.values())

    @property
    def batch_size(self) -> float:
        """Samples of a batch, on average; NaN if the trace does not tell."""
        return (self.samples or float("nan")) / self.batches

    def steady(self, samples: bool) -> Rate:
        """The steady rate, by ns: of samples, or of batches."""
        return Rate.of([loop.steady(samples) for loop in self.loops.values()])

    def whole(self, samples: bool) -> float:
        """The rate in all of the loops' time, by s."""
        return sum(1e9 * int(loop.work(samples).sum()) / max(loop.whole, 1) for loop in self.loops.values())

    def split(self, samples: bool, rank: int | None = None) -> dict[Cause | None, float]:
        """The ns of a steady batch, or sample, by what the loop did: in one rank, None = on average of all.

        {} if the trace does not show waiting.
        """
        loops = [loop for number, loop in self.loops.items() if rank in (None, number)]
        if not all(loop.split for loop in loops):
            return {}
        each = [took.sum() / max(1, work.sum()) / len(loops) for work, took in (loop.steady(samples) for loop in loops)]
        return {cause: sum(loop.split[cause] * ns for loop, ns in zip(loops, each, strict=True)) for cause in CAUSES}

    @property
    def starting(self) -> float:
        """How long a loop waited for workers to start and to end."""
        return sum(loop.starting for loop in self.loops.values()) / len(self.loops)

    @property
    def waiting_share(self) -> float:
        return min(1.0, self.waited / max(1, self.time))

    @property
    def copied(self) -> float | None:
        """Bytes copied for a batch, on average."""
        return float(self.ledger.sent["copied"].mean()) if len(self.ledger.sent) else None

    def per_batch(self, figures: Figures | None) -> float:
        """Return a stage's ns for each batch, over all workers."""
        return figures.total / max(self.batches, 1) if figures else 0.0


# --- From a trace -----------------------------------------------------------------------------------------------------
Group = tuple[tuple[int, ...], dict[str, Any]]
"""The iterators of one loader, and its parameters."""


def groups(trace: Trace) -> list[Group]:
    """Group the iterators of one loader: of its epochs and ranks; the group with the most batches first.

    Raises TraceError if the trace has no batch.
    """
    yields = trace.events[are_batches(trace.events)]
    found: dict[str, list[int]] = {}
    params: dict[int, dict[str, Any]] = {}
    for number in np.unique(yields["loader"]).tolist():
        own = trace.events[trace.events["loader"] == number]
        params[number] = trace.loaders.get(number, {}) | prefetching(own)
        by_rank = ("dataset_length",) if "rank" in params[number] else ()
        same = [item for item in sorted(params[number].items()) if item[0] not in (*OF_ONE_ITERATOR, *by_rank)]
        found.setdefault(repr(same), []).append(number)
    if not found:
        raise TraceError(f"{trace.path} contains no yielded batch: there is nothing to compare")
    most = sorted(found.values(), key=lambda numbers: -int(np.isin(yields["loader"], numbers).sum()))
    return [(tuple(numbers), params[numbers[0]]) for numbers in most]


def side(trace: Trace, loaders: tuple[int, ...], params: dict[str, Any]) -> Side:
    """Return the figures of these iterators."""
    spans = trace.spans()
    closed = spans[np.isin(spans["loader"], loaders) & (spans["end"] >= 0)]
    own = part(trace, ledger(trace), loaders)
    pending = _pending(trace, loaders)
    waits = closed[(closed["code"] == ev.NEXT[0]) & (closed["ey"] == ev.Outcome.DATA)]
    waited, early = durations(waits), waits["ex"] == 1  # it has yielded one batch when it ends
    start_ups = (start_up(trace.events[trace.events["loader"] == number]) for number in loaders)
    known = [took for took in start_ups if took is not None]
    ranks: dict[int, list[int]] = {}
    for number in loaders:
        rank = trace.loaders.get(number, {}).get("rank")
        ranks.setdefault(rank if type(rank) is int else -1, []).append(number)
    loops = {rank: _loop(trace, ranks[rank], params, spans) for rank in sorted(ranks)}
    cycles = np.concatenate([loop.steady(False)[1] for loop in loops.values()])
    took = {("cycle", -1): cycles, ("next", -1): waited[~early], **_durations(closed)}
    return Side(
        path=str(trace.path),
        loaders=loaders,
        params=params,
        manifest=trace.manifest,
        loops=loops,
        waited=int(waited.sum()),
        way=way(trace, loaders, params, own),
        start_up=float(np.mean(known)) if known else None,
        first=float(waited[early].mean()) if early.any() else None,
        pending=pending if pending > max(waited.max(initial=0), HANGS) else 0,
        unseen=_unseen(trace, params),
        ledger=own,
        stages={key: figures for key, took in took.items() if (figures := Figures.of(took))},
    )


def _loop(trace: Trace, loaders: list[int], params: Mapping[str, Any], spans: Rows) -> Loop:
    """Return one rank's loop over these iterators. spans: all of the trace."""
    warm = []
    split = dict.fromkeys(CAUSES, 0)
    whole = starting = 0
    for clock in (WallClock(trace, number, spans) for number in loaders):
        warm.append(clock.warm_up["end"])
        steady = clock.between_batches()
        split[None] += clock.took(steady & ~clock.waits)
        for cause, ns in clock.causes(steady).items():
            split[cause] += ns
        whole += clock.took(clock.waits) + total(clock.steps(ev.CONSUMER))
        starting += clock.causes()[Cause.START_UP]
    took, first, keys = _cycles(trace, loaders, np.concatenate(warm))
    unseen, all_ns = params.get("unseen"), max(1, sum(split.values()))
    shares = {cause: ns / all_ns for cause, ns in split.items() if not isinstance(unseen, list) or "next" not in unseen}
    closed = spans[np.isin(spans["loader"], loaders) & (spans["end"] >= 0)]
    return Loop(took, first, _samples(trace, params, closed, keys), shares, max(whole, int(took.sum())), starting)


def _pending(trace: Trace, loaders: tuple[int, ...]) -> int:
    """Return the duration of a `next` that was open at the trace's end, ns; 0 = none."""
    spans = trace.spans()
    opened = spans[(spans["code"] == ev.NEXT[0]) & (spans["end"] < 0) & np.isin(spans["loader"], loaders)]
    if not len(opened):
        return 0
    end = min(int(trace.events["time"][-1]), trace.whole_until(int(opened["loader"][-1])))
    return max(0, end - int(opened["begin"][-1]))


def _unseen(trace: Trace, params: Mapping[str, Any]) -> frozenset[str]:
    """Return the stages that this recording does not have: by its detail, or because it observed torch's loader."""
    told = params.get("unseen")
    names = set(map(str, told)) if isinstance(told, list) else set()
    begins = [event for event in EVENTS.values() if event.stage and event.phase is ev.Phase.BEGIN]
    left_out = {e.stage for e in begins if e.name in names or (e.detail and trace.manifest.get("detail") == "batch")}
    shown = {e.stage for e in begins if e.name not in names and not e.detail}
    return frozenset(left_out - shown)


def _cycles(trace: Trace, loaders: list[int], warm: Ints) -> tuple[Ints, Bools, Ints]:
    """Return each batch's ns since the one before (or the epoch's first `next`), whether it is apart, and its key.

    Apart is the first batch of an epoch, and one after a step that ends at one of `warm`.
    A batch without an earlier one is left out if its epoch's begin is lost.
    """
    rows = trace.events[
        np.isin(trace.events["code"], [ev.NEXT[0], ev.YIELD]) & np.isin(trace.events["loader"], loaders)
    ]
    keys = keys_at(trace.events, rows, rows["time"])
    order = np.lexsort((rows["time"], keys >> 31))
    rows, keys = rows[order], keys[order]
    new = starts(keys >> 31)
    is_batch = are_batches(rows)
    kept = is_batch | new  # the rest are later calls of next, errors
    rows, keys, new, is_batch = rows[kept], keys[kept], new[kept], is_batch[kept]
    since = np.diff(rows["time"], prepend=rows["time"][:1])
    first = np.zeros(len(rows), bool)
    first[1:] = new[:-1]
    counts = is_batch & ~new
    first &= rows["y"] == 1
    first |= ((rows["time"] - since < warm[:, None]) & (warm[:, None] <= rows["time"])).any(axis=0)
    return since[counts].astype(np.int64), first[counts], keys[counts]


def _samples(trace: Trace, params: Mapping[str, Any], spans: Rows, batches: Ints) -> Ints | None:
    """Return the number of samples in each of these batches: by its collation or fetch, or as the loader was told.

    A batch of which the trace lacks these counts as the median one.
    """
    for code in (ev.COLLATE[0], ev.FETCH[0]):
        rows = spans[spans["code"] == code]
        if len(rows):
            keys, at = np.unique(keys_at(trace.events, rows, rows["begin"]), return_index=True)
            place = np.searchsorted(keys, batches).clip(max=len(keys) - 1)
            found = np.where(keys[place] == batches, rows["bx"][at][place], int(np.median(rows["bx"])))
            return np.maximum(1, found).astype(np.int64)
    told = params.get("batch_size")
    return np.full(len(batches), told, np.int64) if type(told) is int and 0 < told < 1 << 31 else None


def _durations(spans: Rows) -> dict[tuple[str, int], Ints]:
    """Return durations in order of time, by stage and worker; worker -1 = all."""
    found = {}
    for stage, mine in by_stage(spans).items():
        found[stage, -1] = took = durations(mine)
        if stage not in _OF_THE_LOADER:
            found |= {(stage, int(w)): took[mine["worker"] == w] for w in np.unique(mine["worker"]) if w >= 0}
    return found
