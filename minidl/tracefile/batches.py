"""Which batch and epoch an event is about, and the loader's counters over time.

Interface: `Batches(events)` has a row for each batch that was sent to a worker, and `find`, which batch an event is
about; `are_batches(events)`; `epochs(events, loader, time)`; `keys(loader, epoch, task)`, one number for each batch;
`latest`, the search. Counters: `outstanding`, `reorder_depth`, `bytes_in_flight`, each as (times, values).

Rules of use: a batch is a task of one epoch, since task numbers begin again with each epoch of a persistent loader. Its
iterator is known by a number: `loader`, or the `groups` that a caller gives if two processes used the same number.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Rows
from minidl.tracefile.events import Message, Outcome, Place

Steps = tuple[Ints, Ints]
"""A counter: times (ns, CLOCK_MONOTONIC) at which it changes, and to what."""

NEVER: Final = int(np.iinfo(np.int64).max)

SENT = np.dtype(
    [
        ("group", "<i8"),  # of its iterator
        ("loader", "<i8"),
        ("epoch", "<i8"),  # 0 before the first epoch that the trace knows
        ("task", "<i8"),
        ("worker", "<i8"),
        ("put", "<i8"),  # ns, CLOCK_MONOTONIC: its index_put
        ("yielded", "<i8"),  # ns; -1 = never
        ("end", "<i8"),  # ns: no longer in flight; NEVER = it still is when the trace ends
        ("ended_by", "<i8"),  # YIELD, WORKER_EXHAUSTED, or EPOCH's end: given up; 0 = nothing
    ]
)
"""One batch that was sent to a worker."""


def are_batches(events: Rows) -> Bools:
    """Which events hand a batch to the loop: a `yield` of data, and not of an error."""
    out: Bools = (events["code"] == ev.YIELD) & (events["x"] == Outcome.DATA)
    return out


def latest(keys: Ints, times: Ints, wanted: Ints, when: Ints, early: Bools | bool = False) -> Ints:
    """For each wanted key, the position in `keys` of the same key at the latest time up to `when`; -1 = none.

    If `early`, at the earliest time from `when` on.
    """
    if not len(keys) or not len(wanted):
        return np.full(len(wanted), -1, np.int64)
    order = np.lexsort((times, keys))
    known, group = np.unique(keys[order], return_inverse=True)
    moments, size = np.sort(times), len(times) + 1
    place = group * size + np.searchsorted(moments, times[order])
    mine = np.minimum(np.searchsorted(known, wanted), len(known) - 1)

    def at(forward: bool) -> Ints:
        if forward:
            return np.searchsorted(place, mine * size + np.searchsorted(moments, when, side="right")) - 1
        return np.searchsorted(place, mine * size + np.searchsorted(moments, when)).astype(np.int64)

    found = np.where(early, at(False), at(True)) if np.any(early) else at(True)
    inside = (found >= 0) & (found < len(order))
    found = np.where(inside, found, 0)
    return np.where(inside & (known[mine] == wanted) & (group[found] == mine), order[found], -1)


def epochs(events: Rows, loader: npt.NDArray[Any], time: Ints) -> Ints:
    """The epoch of each (loader, time in ns); -1 = no epoch of that loader has begun in the trace.

    Time decides, in every process: a loader begins an epoch only when all workers have answered that they have left
    the one before, and their answers come behind all that they sent for it.
    """
    begins = events[events["code"] == ev.EPOCH[0]]
    at = latest(begins["loader"].astype(np.int64), begins["time"], loader.astype(np.int64), time)
    return np.where(at >= 0, np.append(begins["x"], 0)[at], -1)


def keys(loader: npt.NDArray[Any], epoch: Ints, task: Ints) -> Ints:
    """One number for each (loader, epoch, task), in their order; from bit 31 on it is (loader, epoch).

    Tasks and epochs stay below 2**31 and 2**16; a task of -1 counts as 0, and so does an epoch of -1 before 0.
    """
    return (loader.astype(np.int64) << 47) + ((epoch + 1) << 31) + np.maximum(task, 0)


def keys_at(events: Rows, rows: Rows, time: Ints) -> Ints:
    """Return the keys of rows that have no column for the epoch; time: of each row, ns."""
    return keys(rows["loader"], epochs(events, rows["loader"], time), rows["task"])


class Batches:
    """Every batch that was sent to a worker. table: array of SENT, in order of their index_put.

    groups: for each of `events` the number of its iterator; None = its loader's number.
    """

    def __init__(self, events: Rows, groups: Ints | None = None) -> None:
        self.events = events
        self.groups: Ints = events["loader"].astype(np.int64) if groups is None else groups
        put = self._at(ev.INDEX_PUT)
        self.table = np.zeros(len(put), SENT)
        self.table["group"] = self.groups[put]
        for name in ("loader", "task", "worker"):
            self.table[name] = events[name][put]
        self.table["put"] = events["time"][put]
        self._keys = _of_task(self.table["group"], self.table["task"])
        begins = self._at(ev.EPOCH[0])
        began = latest(self.groups[begins], events["time"][begins], self.table["group"], self.table["put"])
        self.table["epoch"] = np.where(began >= 0, np.append(events["x"][begins], 0)[began], 0)
        self._close()

    def __repr__(self) -> str:
        yielded = np.count_nonzero(self.table["yielded"] >= 0)
        return f"<Batches: {len(self.table)} sent, {yielded} yielded>"

    def _at(self, *codes: int) -> Ints:
        return np.flatnonzero(np.isin(self.events["code"], codes))

    def _close(self) -> None:
        """Find what ended each batch: its yield, its worker's exhaustion, or the end of the epoch."""
        table, events = self.table, self.events
        table["yielded"], table["end"] = -1, NEVER
        over = self._at(ev.EPOCH[1])
        end = latest(self.groups[over], events["time"][over], table["group"], table["put"], early=True)
        table["end"][end >= 0] = events["time"][over[end[end >= 0]]]
        table["ended_by"][end >= 0] = ev.EPOCH[1]
        for code in (ev.WORKER_EXHAUSTED, ev.YIELD):
            at = self._at(code)
            batch = self.find(self.groups[at], events["task"][at], events["time"][at])
            at, batch = at[batch >= 0][::-1], batch[batch >= 0][::-1]  # of several, the first stays
            sooner = (events["time"][at] <= table["end"][batch]) | (table["ended_by"][batch] == ev.EPOCH[1])
            table["end"][batch[sooner]] = events["time"][at[sooner]]
            table["ended_by"][batch[sooner]] = code
            if code == ev.YIELD:
                table["yielded"][batch] = events["time"][at]

    def find(self, groups: Ints, task: Ints, times: Ints, early: Bools | bool = False) -> Ints:
        """The batch of each event: the last one put with its task, or if `early` the next; -1 = none. Times in ns."""
        found = latest(self._keys, self.table["put"], _of_task(groups, task), times, early)
        return np.where(task >= 0, found, -1)


def _of_task(group: npt.NDArray[Any], task: Ints) -> Ints:
    return (group.astype(np.int64) << 44) | (task & ((1 << 44) - 1))


# --- Counters ---------------------------------------------------------------------------------------------------------
_SAYS: Final = (ev.EPOCH[0], ev.TASK_ASSIGNED, ev.RCVD_ADVANCE)
_TAKES: Final = (ev.REORDER_STORE, ev.WORKER_EXHAUSTED)


def outstanding(events: Rows) -> Steps:
    """The number of outstanding tasks. events: of one iterator.

    It is the dispatcher's own count where an event carries it, and one less when a task is taken from it: by a
    reorder_store, a worker_exhausted, or a yield, if no event has carried the count since its result came (out of
    order, when the sampler has no more). If no get is seen in the loader's own thread, since the yield before it.
    """
    yielding = np.unique(events["tid"][events["code"] == ev.YIELD])
    came = np.isin(events["code"], ev.CAME) & (events["x"] == Message.RESULT) & np.isin(events["tid"], yielding)
    rows = events[np.isin(events["code"], [*_SAYS, *_TAKES, ev.YIELD]) | came]
    at, says, yields = np.arange(len(rows)), np.isin(rows["code"], _SAYS), rows["code"] == ev.YIELD
    last_said = np.maximum.accumulate(np.where(says, at, -1))
    last_come = np.concatenate([[-1], np.maximum.accumulate(np.where(yields | np.isin(rows["code"], ev.CAME), at, -1))])
    takes = np.isin(rows["code"], _TAKES) | (yields & (last_said < last_come[:-1]))
    said = np.where(rows["code"] == ev.EPOCH[0], 0, rows["y"]) * says
    base, taken = np.maximum(last_said, 0), np.cumsum(takes)
    values = np.maximum(said[base] - (taken - taken[base]), 0)
    return rows["time"][says | takes], values[says | takes]


def field_values(events: Rows, columns: dict[int, str]) -> Steps:
    """A counter that is a field of some events: columns maps their codes to it; 0 when an epoch begins."""
    rows = events[np.isin(events["code"], [*columns, ev.EPOCH[0]])]
    values = np.zeros(len(rows), np.int64)
    for code, column in columns.items():
        values[rows["code"] == code] = rows[column][rows["code"] == code]
    return rows["time"], values


def reorder_depth(events: Rows) -> Steps:
    """The number of batches in the reorder buffer; 0 when an epoch begins. events: of one iterator."""
    return field_values(events, {ev.REORDER_STORE: "y", ev.REORDER_POP: "y"})


def bytes_in_flight(batches: Batches, wanted: Bools) -> Steps:
    """Bytes of batches made and not yet yielded: in shared memory and in pickles. wanted: which batches count.

    Up by `bytes` at a shm_alloc in collate and at a slab_send, and by `bytes` + `copied` at a result_pickle's end; a
    batch's bytes go when it is yielded, its worker turns out to be exhausted, or its epoch ends.
    """
    at = batches._at(ev.SHM_ALLOC, ev.SLAB_SEND, ev.RESULT_PICKLE[1])
    made = batches.events[at]
    in_collate = made["x"] * (made["y"] == Place.COLLATE)
    in_message = np.where(made["code"] == ev.RESULT_PICKLE[1], made["x"] + made["z"], made["y"])
    amount = np.where(made["code"] == ev.SHM_ALLOC, in_collate, in_message)
    batch = batches.find(batches.groups[at], made["task"], made["time"])
    end = np.append(batches.table["end"], NEVER)
    counts = (batch >= 0) & np.append(wanted, False)[batch] & (made["time"] <= end[batch]) & (amount > 0)
    total = np.zeros(len(batches.table), np.int64)
    np.add.at(total, batch[counts], amount[counts])
    gone = np.flatnonzero(wanted & (batches.table["end"] < NEVER))
    return sums(
        np.concatenate([made["time"][counts], batches.table["end"][gone]]),
        np.concatenate([amount[counts], -total[gone]]),
    )


def sums(times: Ints, changes: Ints) -> Steps:
    """A counter by its changes, in any order of time."""
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(changes[order])
