"""Rules on the loader's decisions: capacity, counts, turns, the reorder buffer.

They compare neighbours, so that two or three events show a breach; `replayed.decisions` knows the whole state, and
finds what they leave.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minidl.check.view import LoaderView, Violation, rule
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Positions
from minidl.tracefile.events import Message


def orderly(loader: LoaderView, rows: Positions) -> Bools:
    """For each row: is it before the first death of its epoch? After one the loader only raises and shuts down."""
    deaths = loader.pick(*ev.DEATHS)
    starts = np.r_[0, loader.begins]
    begun = starts[np.searchsorted(loader.begins, rows, side="right")]
    alive: Bools = np.searchsorted(deaths, rows) == np.searchsorted(deaths, begun)
    return alive


def _neighbours(loader: LoaderView, rows: Positions) -> tuple[Positions, Positions]:
    """Of rows that include epoch begins: each row that is none, with the one before it; only those in order."""
    later = np.arange(1, len(rows))
    later = later[(loader.code[rows[1:]] != ev.EPOCH[0]) & orderly(loader, rows[1:])]
    return rows[later], rows[later - 1]


@rule(
    "capacity",
    "no more tasks are outstanding than prefetch_factor * num_workers",
    "The loader runs ahead: more memory is held than prefetch_factor allows.",
)
def capacity(loader: LoaderView) -> Iterator[Violation]:
    if loader.capacity is None:
        return
    most = loader.capacity[0] * loader.capacity[1]
    rows = loader.pick(ev.TASK_ASSIGNED)
    for row in rows[loader.y[rows] > most]:
        told = f"{loader.y[row]} tasks outstanding, the capacity is {most}"
        yield loader.broken(told, row, *loader.last_before(row[None], loader.begins))


@rule(
    "outstanding",
    "the number of outstanding tasks grows when a task is assigned, and falls when a result is received",
    "The loader expects more or fewer results than there are: it waits forever, or stops too early.",
)
def outstanding(loader: LoaderView) -> Iterator[Violation]:
    if not loader.multiprocess or not loader.records(ev.RCVD_ADVANCE, loader.received):
        return
    got = loader.about(loader.received, Message.RESULT)
    rows = loader.pick(ev.EPOCH[0], ev.TASK_ASSIGNED, ev.RCVD_ADVANCE)
    said = np.where(loader.code == ev.EPOCH[0], 0, loader.y)
    rows, before = _neighbours(loader, rows)
    received = np.searchsorted(got, rows) - np.searchsorted(got, before)
    expected = said[before] + (loader.code[rows] == ev.TASK_ASSIGNED) - received
    for at in np.flatnonzero(said[rows] != expected):
        between = got[(got > before[at]) & (got < rows[at])].tolist()
        told = f"{said[rows[at]]} tasks outstanding; by the events since the last count there are {expected[at]}"
        yield loader.broken(told, rows[at], before[at], *between)


@rule(
    "exhausted",
    "a worker's dataset ends once in an epoch, and the worker then gets no more tasks in it",
    "An iterable dataset's end is miscounted: the epoch ends too early, or never.",
)
def exhausted(loader: LoaderView) -> Iterator[Violation]:
    rows = loader.pick(ev.EPOCH[0], ev.WORKER_EXHAUSTED)
    if loader.capacity is None or not len(rows):
        return
    left = np.where(loader.code == ev.EPOCH[0], loader.y, loader.x)
    for row, before in zip(*_neighbours(loader, rows), strict=True):
        if left[row] != left[before] - 1:
            yield loader.broken(f"{left[row]} workers left, after {left[before]}", row, before)
    for end in loader.pick(ev.WORKER_EXHAUSTED):
        given = loader.of_worker(loader.pick(ev.TASK_ASSIGNED), int(loader.worker[end]))
        for row in given[(given > end) & (loader.at_epoch[given] == loader.at_epoch[end])][:1]:
            yield loader.broken("this worker's dataset has ended in this epoch", row, end)


@rule(
    "turn",
    "with in_order, workers get tasks in turn, from the first or the resumed one, except those that have ended",
    "The work is distributed unevenly, and the order of the batches depends on it.",
)
def turn(loader: LoaderView) -> Iterator[Violation]:
    if not loader.multiprocess or not loader.in_order or loader.capacity is None:
        return
    workers = loader.capacity[0]
    rows = loader.pick(ev.EPOCH[0], ev.TASK_ASSIGNED)
    rows, before = _neighbours(loader, rows)
    begun = loader.code[before] == ev.EPOCH[0]
    last = np.where(begun, -1, loader.worker[before])
    for resumed in loader.pick(ev.RESUMED):
        last[begun & (loader.at_epoch[before] == loader.at_epoch[resumed])] = loader.y[resumed] - 1
    ended = loader.pick(ev.WORKER_EXHAUSTED)
    for at in np.flatnonzero(loader.worker[rows] != (last + 1) % workers):
        row = int(rows[at])
        gone = ended[(ended < row) & (loader.at_epoch[ended] == loader.at_epoch[row])]
        over = set(loader.worker[gone].tolist())
        turns = [(int(last[at]) + step) % workers for step in range(1, workers + 1)]
        due = next((worker for worker in turns if worker not in over), None)
        if due != loader.worker[row]:
            told = "every worker's dataset has ended" if due is None else f"it is worker {due}'s turn"
            skipped = [int(end) for end in gone if loader.worker[end] in turns[: turns.index(due or 0)]]
            yield loader.broken(told, row, int(before[at]), *skipped)


@rule(
    "reorder",
    "a batch before its turn enters the reorder buffer once and leaves it once, and the depth counts it; none without "
    "in_order",
    "A buffered batch is lost or comes twice.",
)
def reorder(loader: LoaderView) -> Iterator[Violation]:
    if not loader.records(ev.REORDER_STORE):
        return
    for row in loader.pick(ev.REORDER_STORE)[: None if not loader.in_order else 0]:
        yield loader.broken("without in_order no batch waits for its turn", row)
    pops, stores = loader.stage(ev.REORDER_POP), loader.stage(ev.REORDER_STORE)
    stored = loader.match(pops, stores)
    for row in pops[((stored < 0) | (stored > pops)) & loader.whole_epoch(pops)]:
        missing = f"reorder_store of task {loader.task[row]}"
        yield loader.broken("this task is not in the reorder buffer", row, missing=missing)
    both = loader.pick(ev.EPOCH[0], ev.REORDER_STORE, ev.REORDER_POP)
    depth = np.where(loader.code == ev.EPOCH[0], 0, loader.y)
    rows, before = _neighbours(loader, both)
    for at in np.flatnonzero(depth[rows] != depth[before] + np.where(loader.code[rows] == ev.REORDER_STORE, 1, -1)):
        yield loader.broken(f"its depth is {depth[rows[at]]}, after {depth[before[at]]}", rows[at], before[at])
    yields = loader.stage(ev.YIELD)
    stored, popped = loader.match(yields, stores), loader.match(yields, pops)
    for at in np.flatnonzero((stored >= 0) & ((popped < 0) | (popped > yields))):
        missing = f"reorder_pop of task {loader.task[yields[at]]}"
        yield loader.broken("it is still in the reorder buffer", yields[at], stored[at], missing=missing)


@rule(
    "rcvd-idx",
    "rcvd_idx only grows, never past send_idx, and with in_order by one per batch, unless a worker has ended",
    "The loader waits for the wrong task: batches are skipped, or it hangs though its batch is there.",
)
def rcvd_idx(loader: LoaderView) -> Iterator[Violation]:
    if not loader.multiprocess:
        return
    rows, before = _neighbours(loader, loader.pick(ev.EPOCH[0], ev.RCVD_ADVANCE))
    value = np.where(loader.code == ev.EPOCH[0], 0, loader.x)
    step = value[rows] - value[before]
    ended = loader.pick(ev.WORKER_EXHAUSTED)
    begun = np.r_[0, loader.begins][loader.at_epoch[rows]]
    over = np.searchsorted(ended, rows) > np.searchsorted(ended, begun)
    wrong = (step <= 0) | ((step > 1) & ~over & loader.in_order)
    for at in np.flatnonzero(wrong):
        yield loader.broken(f"rcvd_idx goes from {value[before[at]]} to {value[rows[at]]}", rows[at], before[at])
    sent = loader.last_before(rows, loader.pick(ev.TASK_ASSIGNED))
    for at in np.flatnonzero((sent >= 0) & (value[rows] > loader.x[sent]) & ~wrong):
        yield loader.broken(f"rcvd_idx is {value[rows[at]]}, send_idx is {loader.x[sent[at]]}", rows[at], sent[at])
    yields = loader.stage(ev.YIELD)
    last = loader.last_before(yields, loader.pick(ev.EPOCH[0], ev.RCVD_ADVANCE))
    for at in np.flatnonzero((last >= 0) & loader.in_order & (value[last] != loader.task[yields] + 1)):
        yield loader.broken(f"rcvd_idx is {value[last[at]]} by its last event", yields[at], last[at])
