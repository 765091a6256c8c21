"""The steps of all ranks side by side: which rank came last to each meeting of the ranks, and by how much.

Interface: `Meetings(tables)`; its arrays have a row a rank and a column a step, in microseconds. `straggler(meetings)`
-> `Straggler`: the rank, or the ranks, that the others wait for; or that it is another one in each step; or None.

Rules of use: no clock is compared. Ranks meet in each step, so each step takes all of them equally long, and the rank
that waits least in the meeting is the one that the others wait for: it is late by what the median rank waits more. A
meeting is where ranks wait for each other as far as that was recorded: in collectives; in these and in backward, where
DistributedDataParallel meets; or anywhere in the loop's own code. Each of the three is a lower bound, so the largest
one counts. A rank that is slow and for which no rank waits is no straggler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from minidl.job.step_table import CAUSES, STEP, RankTable
from minidl.speed.verdict import KEEPS_UP, MARGIN
from minidl.tracefile.arrays import Bools, Floats, Ints, Rows

HELD_UP: Final = 0.1
"""A step waits for a rank if its lateness is this share of what a step usually takes, or more."""

FEWEST: Final = 3
"""Steps that wait for a straggler at least: one or two may be an accident."""

LEAST: Final = 1000.0
"""Microseconds that a rank is late at least: less may be the machine's."""

STAYS: Final = 0.5
"""The share of all lateness from which a rank, or a few, are the straggler; below, it moves."""

CHANCE: Final = 0.02
"""The probability at most with which a straggler would be one if the last rank of each step were drawn by lot."""

MOST_OCCASIONS: Final = 200
"""Steps that are counted for that: with more, nothing is by chance."""

SPANS: Final = 6
"""Spans of time in which a straggler's share of the lateness is compared."""

AS_SLOW: Final = 0.8
"""A rank is as slow as a straggler if its steps could not be faster than this part of the straggler's."""

RARE: Final = 0.2
"""A rank is late from a step on if it was late before it at most this part as often as after it."""

NEAR: Final = 0.5
"""A rank is late in a step if it is late by this share of what the last one is, or more."""

Times = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Straggler:
    """The ranks that the others wait for. ranks: rows of the meetings, the worst one first; () = another in each step.

    steps: the columns that wait for them. loader: the part of their lateness that their loops waited for batches; the
    rest are their own steps. since: the column from which on they are late.
    """

    ranks: tuple[int, ...]
    steps: Ints
    loader: float
    since: int = 0


class Meetings:
    """The ranks' steps, array of STEP: a row a rank, a column a step; there: whether a rank has it; keys: (epoch,
    number) of each step; waits, own: what a loop waited for its batch, and how long its own code took; late: by how
    much a rank was later than the median rank; last: the last rank; cost: its lateness; took: what a step took the
    median rank; usual: the median of that; begins: the first steps of epochs, which wait for starts; held: the other
    steps that waited for a rank.
    """

    def __init__(self, tables: Sequence[RankTable]) -> None:
        self.tables = list(tables)
        every = [keys_of(table.steps) for table in self.tables]
        known, counts = np.unique(np.concatenate(every), return_counts=True)
        known = known[counts >= min(2, len(self.tables))]
        self.keys: list[tuple[int, int]] = [(int(key >> 32), int(key & 0xFFFFFFFF)) for key in known]
        self.steps: Rows = np.zeros((len(self.tables), len(known)), STEP)
        self.there: Bools = np.zeros(self.steps.shape, bool)
        for row, (table, keys) in enumerate(zip(self.tables, every, strict=True)):
            shared = np.isin(keys, known)
            place = np.searchsorted(known, keys[shared])
            self.steps[row, place], self.there[row, place] = table.steps[shared], True
        self.waits: Times = self.steps["waits"].sum(axis=2, dtype=np.float32)
        self.own, collective, backward = (self.steps[of].astype(np.float32) for of in ("own", "collective", "backward"))
        late = np.zeros(self.there.shape, np.float32)
        for meeting in (self._if_all(collective), self._if_all(collective + backward), self.own):
            late = np.maximum(late, _middle(meeting, self.there, upper=True) - meeting)
        self.late: Times = np.where(self.there, late, 0)
        self.took: Floats = _middle(self.waits + self.own, self.there).astype(np.float64)
        self.cost: Floats = self.late.max(axis=0, initial=0).astype(np.float64)
        self.last: Ints = self.late.argmax(axis=0)
        self.usual = float(np.median(self.took)) if len(self.took) else 0.0
        self.begins: Bools = np.array([number == 0 for _, number in self.keys], bool)
        self.held: Bools = (self.cost >= max(LEAST, HELD_UP * self.usual)) & ~self.begins

    def _if_all(self, meeting: Times) -> Times:
        """The meeting, in the steps in which each rank recorded it; else 0: it tells nothing."""
        return meeting * ((meeting > 0) | ~self.there).all(axis=0)

    @cached_property
    def late_ones(self) -> Bools:
        """Which ranks were late in the steps that waited for a rank."""
        found: Bools = (self.late >= NEAR * self.cost) & self.there & self.held
        return found

    @property
    def lost(self) -> float:
        """The share of the job's steady time that the median rank waits for the last one."""
        return float(self.cost[self.held].sum() / max(1.0, self.steady))

    @property
    def steady(self) -> float:
        """The µs that the median rank took for all steps but the first ones of epochs."""
        return float(self.took[~self.begins].sum())

    @property
    def share(self) -> float:
        """The share of the steps that wait for a rank."""
        return float(np.count_nonzero(self.held) / max(1, len(self.keys)))

    @cached_property
    def weights(self) -> Floats:
        """For each rank the share of all lateness in steps in which it was late."""
        weights: Floats = self.late_ones @ self.cost / max(1.0, self.cost[self.held].sum())
        return weights

    @property
    def for_others(self) -> Times:
        """What each rank waited in each step for the last one."""
        return np.where(self.there, np.maximum(0, self.cost - self.late), 0)

    def by_cause(self, steps: Ints) -> Floats:
        """A row a rank: what its loop waited for in these steps, by CAUSES."""
        sums: Floats = self.steps["waits"][:, steps].sum(axis=1, dtype=np.float64)
        return sums

    def why(self) -> Floats:
        """For each step the µs of the last rank's lateness: a row for each of CAUSES, and one for its own step."""
        at = np.arange(len(self.keys))
        out = np.zeros((len(CAUSES) + 1, len(at)))
        for row in range(len(CAUSES)):
            waited = self.steps["waits"][:, :, row]
            out[row] = np.maximum(0, waited[self.last, at] - _middle(waited, self.there))
        out *= np.minimum(1, self.cost / np.maximum(1e-9, out.sum(axis=0)))
        out[-1] = self.cost - out.sum(axis=0)
        return out

    def steps_of(self, rows: Sequence[int], steps: Ints) -> Rows:
        """What some ranks did in these steps: array of STEP, one rank after the other."""
        at = np.ix_(np.asarray(rows), steps)
        found: Rows = self.steps[at][self.there[at]]
        return found


def straggler(meetings: Meetings) -> Straggler | None:
    """The ranks that the others wait for; None if these waits, without the longest, are a small share of the time."""
    held = np.flatnonzero(meetings.held)
    cost = meetings.cost[held]
    if len(held) < FEWEST or cost.sum() - cost.max() < KEEPS_UP * meetings.steady:
        return None
    group = _clear(meetings)
    if not len(group):
        return Straggler((), held, _of_loader(meetings, np.arange(len(meetings.tables)), held))
    if not _waited_for(meetings, group):
        return None
    if _of_loader(meetings, group, held) >= NEAR:
        group = _with_those_as_slow(meetings, group)
    theirs = held[meetings.late_ones[group][:, held].any(axis=0)]
    return Straggler(tuple(group.tolist()), theirs, _of_loader(meetings, group, theirs), _since(meetings, theirs))


def _clear(meetings: Meetings) -> Ints:
    """The ranks that stay late, the worst first: each is, or a node is, and clearly more than all others; else none."""
    weights, cost = meetings.weights, meetings.cost
    order = np.argsort(-weights, kind="stable")
    node = np.array([table.facts.node for table in meetings.tables])[order]
    nodes = [order[node == name] for name in np.unique(node)]
    by_node = np.array([cost[meetings.late_ones[rows].any(axis=0)].sum() for rows in nodes]) / cost[meetings.held].sum()
    for shares, rows in ((weights, order[weights[order] >= STAYS]), (by_node, nodes[int(by_node.argmax())])):
        if 0 < 2 * len(rows) <= len(order) and _stand_out(meetings, rows, shares):
            return rows
    return order[:0]


def _stand_out(meetings: Meetings, rows: Ints, shares: Floats) -> bool:
    """Whether these ranks have clearly more of all lateness than the others, and not by chance. shares: of all."""
    mine = shares >= STAYS
    if not mine.any() or shares[~mine].max(initial=0) > MARGIN * shares[mine].min():
        return False
    cost = meetings.cost[meetings.held]
    occasions = min(MOST_OCCASIONS, int(cost.sum() ** 2 / np.square(cost).sum()))  # equal ones, as uncertain as these
    odds, least = min(1.0, float(shares.mean())), float(shares[mine].min())
    more = range(math.ceil(least * occasions - 1e-6), occasions + 1)
    by_lot = sum(math.comb(occasions, n) * odds**n * (1 - odds) ** (occasions - n) for n in more)
    theirs = cost * meetings.late_ones[rows][:, meetings.held].any(axis=0)
    count = min(SPANS, len(cost))
    of_spans = [np.array([span.sum() for span in np.array_split(of, count)]) for of in (theirs, cost)]
    spans = of_spans[0] / of_spans[1]
    steady = spans.mean() - 2 * spans.std() / math.sqrt(count - 1) >= odds  # else they were late for some time
    return bool(by_lot * len(shares) <= CHANCE and steady)


def _with_those_as_slow(meetings: Meetings, ranks: Ints) -> Ints:
    """These ranks, and those whose loaders are as slow: their batches are ready when they have waited for these ranks.

    Without these ranks, the others would wait for them.
    """
    pace = np.array([_fetch_each(table) for table in meetings.tables])
    rest = np.setdiff1d(np.arange(len(pace)), ranks)
    more = rest[pace[rest] >= AS_SLOW * pace[ranks].min()]
    others = np.setdiff1d(rest, more)
    clear = len(others) >= len(ranks) + len(more) and AS_SLOW * AS_SLOW * pace[ranks].min() >= np.median(pace[others])
    return np.concatenate([ranks, more]) if clear else ranks


def _fetch_each(table: RankTable) -> float:
    """The µs between two batches that a rank's workers fetch without a pause."""
    fetch = table.steps["fetch"]
    return float(np.median(fetch)) / max(1, table.facts.workers) if len(fetch) else 0.0


def _waited_for(meetings: Meetings, ranks: Ints) -> bool:
    """Whether the others wait for these ranks: else these take longer for their steps, and fall behind the others."""
    counts = meetings.there[ranks] & ~meetings.begins
    took = np.where(counts, meetings.waits[ranks] + meetings.own[ranks] - meetings.took, 0)
    return bool(took.sum() <= NEAR * meetings.late[ranks].sum())


def _of_loader(meetings: Meetings, ranks: Ints, steps: Ints) -> float:
    """The part of these ranks' lateness in these steps that their loops waited for batches, longer than the median."""
    usual = _middle(meetings.waits[:, steps], meetings.there[:, steps])
    late = np.where(meetings.late_ones[ranks][:, steps], meetings.late[ranks][:, steps], 0)
    more = np.clip(meetings.waits[ranks][:, steps] - usual, 0, late)
    return float(more.sum() / max(1.0, late.sum()))


def _since(meetings: Meetings, steps: Ints) -> int:
    """The step from which on these are most steps, if they are few before it; else 0."""
    count = len(meetings.keys)
    theirs, cost = np.zeros(count), meetings.cost[steps]
    theirs[steps] = np.minimum(cost, np.median(cost))  # a short wait before weighs less, a very long one no more
    at = np.arange(1, count)
    before = np.cumsum(theirs)[:-1]
    early, later = before / at, (theirs.sum() - before) / (count - at)
    clear = (later - early) * np.sqrt(at * (count - at))  # a change near an end is less certain
    best = int(np.argmax(clear)) if count > 1 else 0
    sudden = count > 1 and early[best] <= RARE * later[best] and before[best] <= RARE * theirs.sum()
    return best + 1 if sudden else 0


def keys_of(steps: Rows) -> Ints:
    """One number a step, in order: the same in all ranks."""
    found: Ints = (steps["epoch"].astype(np.int64) << 32) + steps["number"]
    return found


def _middle(values: Times, there: Bools, upper: bool = False) -> Times:
    """The median of each column over the ranks that have the step, without a mean: of two, the lower or the upper."""
    count = there.sum(axis=0)
    order = np.sort(np.where(there, values, np.inf), axis=0)
    at = np.maximum(0, np.where(upper, count // 2, (count - 1) // 2))
    return np.where(count > 0, order[np.minimum(at, len(values) - 1), np.arange(values.shape[1])], 0).astype(np.float32)
