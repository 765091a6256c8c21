"""The headline of ranks with different numbers of batches: one has ended its epoch, and another waits for it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from minidl.hang.finding import Finding, RunOutcome
from minidl.hang.headline.run_context import RunContext
from minidl.hang.limits import SUDDEN
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.batches import are_batches
from minidl.tracefile.events import Ending
from minidl.tracefile.loaders import dataloaders
from minidl.tracefile.spans import durations

_SLOW: Final = 10
"""A step waits for another rank if it takes this many times the rank's median."""

OF_A_WAIT: Final = re.compile("time|connection|gloo|nccl", re.IGNORECASE)
"""In errors of a rank that waited for another one in vain."""

REMEDY: Final = (
    "give all ranks the same number of batches by a DistributedSampler (it pads, or drops with drop_last=True), or run "
    "the loop under torch.distributed.algorithms.join.Join; see minidl audit"
)


def uneven_ranks(run: RunContext) -> Finding | None:
    """The long last step of a rank, after more batches than another rank had in this epoch of the DataLoader."""
    groups: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for one in dataloaders(run.trace):
        if one.rank >= 0:
            groups[one.name][one.rank] = one.iterators
    for ranks in groups.values():
        last = {rank: last_epoch(run.events, iterators) for rank, iterators in ranks.items()}
        for rank, other in had_fewer(last):
            found = _waiting(run, rank, last[rank].batches, (last[other].batches, other), ranks)
            if found is not None:
                return found
    return None


class LastEpoch(NamedTuple):
    """The last epoch of a DataLoader: its number from 0, the batches that were taken, and whether that was all."""

    number: int = -1
    batches: int = 0
    ended: bool = False


def had_fewer(last: Mapping[int, LastEpoch]) -> Iterator[tuple[int, int]]:
    """Yield each rank that is within its last epoch, and the rank that ended that epoch with the fewest batches."""
    over = [(one.batches, rank) for rank, one in last.items() if one.ended]
    for rank, mine in last.items():
        fewer = [one for one in over if not mine.ended and one[0] < mine.batches and last[one[1]].number == mine.number]
        if fewer:
            yield rank, min(fewer)[1]


def last_epoch(events: Rows, iterators: Sequence[int]) -> LastEpoch:
    """The last epoch of a DataLoader."""
    events = events[np.isin(events["loader"], iterators)]
    begins = events["time"][events["code"] == ev.EPOCH[0]]
    mine = events[events["time"] >= begins.max(initial=0)]
    batches = mine[are_batches(mine)]
    ends = mine[mine["code"] == ev.EPOCH[1]]
    return LastEpoch(len(begins) - 1, len(batches), bool(np.any(ends["z"] == Ending.EXHAUSTED)))


def _waiting(
    run: RunContext, rank: int, batches: int, other: tuple[int, int], ranks: dict[int, tuple[int, ...]]
) -> Finding | None:
    """The finding if the rank's last step took far longer than those before, and the other had ended by then."""
    mine = ranks[rank]
    steps = run.spans_of(ev.CONSUMER[:1])
    steps = steps[np.isin(steps["loader"], mine) & (steps["end"] >= 0)]
    begins = run.events["time"][np.isin(run.events["loader"], mine) & (run.events["code"] == ev.EPOCH[0])]
    if len(steps) < 3 or steps["begin"][-1] < begins.max(initial=0):
        return None
    took = durations(steps)
    if took[-1] < max(SUDDEN * 1e9, _SLOW * float(np.median(took[:-1]))):
        return None
    texts = (str(one.get("error")) for one in run.trace.described("uncaught") if one["process"] == steps["process"][-1])
    if any(not OF_A_WAIT.search(text) for text in texts):
        return None  # it raised an error of its own
    had, first = other
    ends = run.events[np.isin(run.events["loader"], ranks[first]) & (run.events["code"] == ev.EPOCH[1])]
    if ends["time"].max(initial=0) > steps["end"][-1]:
        return None
    spent = run.unit.of(int(took[-1]))
    what = (
        f"rank {rank} waited in its step after batch {batches}; the epoch of rank {first} had ended after {had}: the "
        "ranks have different numbers of batches"
    )
    focus = run.focus_of(steps[-1], int(steps[-1]["end"]))
    at = f"the step began at {run.at(int(steps[-1]['begin']))}"
    return run.finding(RunOutcome.HUNG, what, (at,), REMEDY, focus, head=f"hung for {spent}")
