"""The lanes of a trace: which lane and row each span and each instant lies in, and where the lanes stand.

Interface: `Layout(trace, spans)` has the lane of each; `Layout.stack(until)` finds their rows and builds the `Lane`s.
`Emitters` tells which iterator emitted each event, and in which worker.

A lane is an actor, not a thread. Iterators that run one after the other share lanes (a `Slot`); those that run at the
same time have lanes of their own. A row of a lane holds steps that never overlap; a step inside another one lies a row
deeper. `Track` in the event table says which of a process's lanes an event belongs to.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Rows, table_of
from minidl.tracefile.events import EVENTS, Phase, Track
from minidl.tracefile.loaders import name_of

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


MAX_ROWS: Final = 6
"""Rows of a lane. Deeper steps occur only in damaged traces and are drawn in the last row."""

SIZE: Final = max(EVENTS) + 2


class LaneKind(enum.IntEnum):
    """Actor of a lane, in the order in which lanes are drawn."""

    EPOCHS = 0
    CONSUMER = 1
    DEVICE = 2  # a stream of a device, in the device's time
    LOADER = 3
    QUEUE_FEEDERS = 4  # the feeder threads of the loader's process: a row for each index queue
    PIN_THREAD = 5
    WORKER = 6
    FEEDER = 7  # a worker's feeder thread, drawn below the worker


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane. top, heights: of the lane and of each of its rows; a row of plain steps has height 1."""

    kind: LaneKind
    slot: int
    worker: int
    title: str
    top: float
    heights: tuple[float, ...]

    @property
    def bottom(self) -> float:
        return self.top + sum(self.heights)

    def actor(self, slots: int) -> int:
        """Return the number that the lane's colour stands for: of its slot, if there are several, or of its worker.

        -1 = none.
        """
        return self.slot if slots > 1 else self.worker

    def row_top(self, row: int) -> float:
        return self.top + sum(self.heights[:row])


@dataclass(frozen=True, slots=True)
class Slot:
    """Iterators that run one after the other and share lanes; their numbers in `loaders`. rank: -1 = of no rank."""

    name: str
    loaders: tuple[int, ...]
    rank: int = -1

    @property
    def title(self) -> str:
        return self.name if self.rank < 0 else f"rank {self.rank} \N{MIDDLE DOT} {self.name}"


def _on(track: Track) -> Bools:
    return table_of(ev.codes_where(lambda event: event.track is track))


_IN_WORKER = table_of(
    [
        *(*ev.WORKER_INIT, *ev.MAKE_FETCHER, ev.WORKER_READY, *ev.INDEX_GET),
        *(*ev.FETCH, *ev.SAMPLE, ev.SAMPLE_INDEX, *ev.COLLATE),
        *(ev.RESULT_PUT, ev.WORKER_EXIT),
    ]
)
"""Events that only a worker emits, with its own number. (A sample is also fetched without workers: with number -1.)"""

_FEEDS, _PINS, _CONSUMES = _on(Track.FEEDER), _on(Track.PIN), _on(Track.CONSUMER)
_PUTS = table_of([ev.INDEX_PUT, ev.RESULT_PUT])
_INSTANT = table_of(ev.codes_where(lambda event: event.phase is Phase.INSTANT and not event.detail))
"""The instants that are drawn: an instant for each sample would hide all others."""


# --- Who emitted ------------------------------------------------------------------------------------------------------
class Emitters:
    """Emitter of each event: for each pair of process and loader number, the worker, the iterator and the slot.

    pairs: sorted. worker, iterator, slot: of each pair (worker -1 = none). begun: of each iterator, the time of its
    first event, CLOCK_MONOTONIC ns. slot_of: of each iterator. slots: in the order in which they are drawn.
    """

    def __init__(self, trace: Trace) -> None:
        events = trace.events
        self.pairs, inverse = np.unique(_pair(events), return_inverse=True)
        self.worker = self._workers(trace, inverse)
        home = self._homes(trace)
        numbers = {key: number for number, key in enumerate(dict.fromkeys(home))}
        self.iterator = np.array([numbers[key] for key in home], np.int64)
        self.begun, ended = np.zeros((2, len(numbers)), np.int64)
        mine = self.iterator[inverse]  # events are in time order, and of several assignments the last one counts
        self.begun[mine[::-1]], ended[mine] = events["time"][::-1], events["time"]
        self.slot_of, self.slots = self._share(trace, list(numbers), ended)
        self.slot = self.slot_of[self.iterator]

    def of(self, rows: Rows) -> Ints:
        """Return the position in `pairs` of each row's process and loader."""
        return np.searchsorted(self.pairs, _pair(rows))

    def _workers(self, trace: Trace, inverse: Ints) -> Ints:
        """Return each pair's worker: as its events say, or its process's role if those events were overwritten."""
        events = trace.events
        out = np.full(len(self.pairs), -1, np.int64)
        for at, pair in enumerate(self.pairs.tolist()):
            process = trace.processes[pair >> 16]
            if process.role == "worker" and process.loader == pair & 0xFFFF:
                out[at] = process.worker
        says = _IN_WORKER[events["code"]] & (events["worker"] >= 0)
        out[inverse[says]] = events["worker"][says]
        return out

    def _homes(self, trace: Trace) -> list[tuple[int, int]]:
        """Return each pair's iterator: the process that runs it, and its number there.

        The iterator of a worker runs in the worker's parent, or in the first process with the same loader number.
        """
        candidates: dict[int, list[int]] = {}
        for pair in self.pairs[self.worker < 0].tolist():
            candidates.setdefault(pair & 0xFFFF, []).append(pair >> 16)
        out = []
        for pair, worker in zip(self.pairs.tolist(), self.worker.tolist(), strict=True):
            process, loader = pair >> 16, pair & 0xFFFF
            found = candidates.get(loader, [process]) if worker >= 0 else [process]
            parent = trace.processes[process].ppid
            out.append((next((one for one in found if trace.processes[one].pid == parent), found[0]), loader))
        return out

    def _share(self, trace: Trace, homes: Sequence[tuple[int, int]], ended: Ints) -> tuple[Ints, tuple[Slot, ...]]:
        """Give each iterator the first slot of its process and its DataLoader's name that is free when it begins."""
        of = {number: name_of(params) for number, params in trace.loaders.items() if params.get("dataloader")}
        taken: list[tuple[int, list[int]]] = []  # of each slot: its process, and its iterators
        slot_of = np.zeros(len(homes), np.int64)
        for iterator in np.argsort(self.begun, kind="stable").tolist():
            process, loader = homes[iterator]
            free = (
                n
                for n, at in enumerate(taken)
                if at[0] == process and ended[at[1][-1]] <= self.begun[iterator]
                if of.get(homes[at[1][-1]][1]) == of.get(loader)
            )
            number = next(free, len(taken))
            if number == len(taken):
                taken.append((process, []))
            taken[number][1].append(iterator)
            slot_of[iterator] = number
        rank = [trace.processes[process].rank for process, _ in taken]
        order = sorted(range(len(taken)), key=rank.__getitem__)
        slots = []
        for number in order:
            loaders = tuple(homes[iterator][1] for iterator in taken[number][1])
            beside = {of.get(loader) for process, loader in homes if process == taken[number][0]}
            name = f"{of[loaders[0]]}: " if loaders[0] in of and len(beside) > 1 else ""
            slots.append(Slot(f"{name}{_iterators(loaders)}", loaders, rank[number]))
        return np.argsort(order)[slot_of], tuple(slots)


def _pair(rows: Rows) -> Ints:
    pair: Ints = (rows["process"].astype(np.int64) << 16) | rows["loader"]
    return pair


def _iterators(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return f"iterator {numbers[0]}" if numbers[0] else "no iterator"
    return f"iterators {', '.join(map(str, numbers[:4]))}{', …' if len(numbers) > 4 else ''}"


def _thread(rows: Rows) -> Ints:
    thread: Ints = (rows["process"].astype(np.int64) << 32) | rows["tid"]
    return thread


# --- The lanes --------------------------------------------------------------------------------------------------------
class Layout:
    """Lanes of a trace.

    spans: array of SPAN. marks: positions in `Trace.events` of the instants. span_lane, mark_lane: of each of these the
    number of its lane, in the order in which lanes are drawn.
    """

    def __init__(self, trace: Trace, spans: Rows) -> None:
        self.trace = trace
        self.spans = spans
        self.crew = Emitters(trace)
        events = trace.events
        self.marks = np.flatnonzero(_INSTANT[events["code"]])
        self._pinning = np.unique(_thread(events[_PINS[events["code"]]]))
        self._putting = np.unique(_thread(events[_PUTS[events["code"]]]))
        span_keys, mark_keys = self._keys(spans), self._keys(events[self.marks])
        self._lane_keys = np.unique(np.concatenate([span_keys, mark_keys]))
        self.span_lane = np.searchsorted(self._lane_keys, span_keys)
        self.mark_lane = np.searchsorted(self._lane_keys, mark_keys)

    def _keys(self, rows: Rows) -> Ints:
        """Return a number for each row's lane; the order of these numbers is that in which lanes are drawn."""
        code, at = rows["code"], self.crew.of(rows)
        worker = self.crew.worker[at]
        inside = worker >= 0
        kind = np.where(inside, LaneKind.WORKER, LaneKind.LOADER)
        kind[~inside & np.isin(_thread(rows), self._pinning)] = LaneKind.PIN_THREAD
        feeds = _FEEDS[code] & ~np.isin(_thread(rows), self._putting)  # with slabs, the thread that puts also writes
        kind[feeds] = np.where(inside, LaneKind.FEEDER, LaneKind.QUEUE_FEEDERS)[feeds]
        kind[_CONSUMES[code]] = LaneKind.CONSUMER
        kind[rows["tid"] >= ev.DEVICE_TID] = LaneKind.DEVICE
        kind[code == ev.EPOCH[0]] = LaneKind.EPOCHS
        below = np.where(kind >= LaneKind.WORKER, (np.clip(worker, 0, 1 << 30) << 1) | (kind == LaneKind.FEEDER), 0)
        below = np.where(kind == LaneKind.DEVICE, rows["tid"].astype(np.int64) - ev.DEVICE_TID, below)
        return (((self.crew.slot[at] << 3) | np.minimum(kind, LaneKind.WORKER)) << 32) | below

    def stack(self, begin: Ints, until: Ints, drawn: Bools) -> tuple[Ints, tuple[Lane, ...]]:
        """Return the row of each span within its lane, and the lanes. begin, until: of each span's bar, if it is drawn.

        A row of the queue feeders belongs to a worker; other rows hold the same kinds of step wherever these occur.
        """
        row = np.zeros(len(self.spans), np.int64)
        lanes = []
        order = np.argsort(self.span_lane, kind="stable")
        bounds = np.searchsorted(self.span_lane[order], np.arange(len(self._lane_keys) + 1))
        for number, key in enumerate(self._lane_keys.tolist()):
            slot, kind, below = key >> 35, LaneKind(key >> 32 & 7), key & 0xFFFFFFFF
            worker = below >> 1 if kind is LaneKind.WORKER else -1
            kind = LaneKind.FEEDER if kind is LaneKind.WORKER and below & 1 else kind
            mine = order[bounds[number] : bounds[number + 1]]
            mine = mine[drawn[mine]]
            mine = mine[np.argsort(begin[mine], kind="stable")]
            if kind is LaneKind.QUEUE_FEEDERS:
                level = np.maximum(self.spans["worker"][mine], -1)
            else:
                level = _levels(self.spans["code"][mine], begin[mine], until[mine])
            known, row[mine] = np.unique(level, return_inverse=True)
            title = self._stream(self.spans[mine[:1]]) if kind is LaneKind.DEVICE else _title(kind, worker)
            lanes.append(Lane(kind, slot, worker, title, 0.0, _heights(kind, max(1, len(known)))))
        return row, stacked(lanes)

    def _stream(self, spans: Rows) -> str:
        """Return the name of the device stream of the spans."""
        name = self.trace.threads.get((int(spans["pid"][0]), int(spans["tid"][0])), "") if len(spans) else ""
        return name.replace("simulated", "sim.") or "device"


def _levels(code: npt.NDArray[np.uint16], begin: Ints, until: Ints) -> Ints:
    """Return the greatest depth of each span's kind, so that a kind has the same row everywhere."""
    depth = np.arange(len(begin)) - np.searchsorted(np.sort(until), begin, side="right")
    deepest = np.zeros(SIZE, np.int64)
    np.maximum.at(deepest, code, np.clip(depth, 0, MAX_ROWS - 1))
    return deepest[code]


def _title(kind: LaneKind, worker: int) -> str:
    name = kind.name.lower().replace("_", " ")
    return f"{name} {worker}" if worker >= 0 else name


def _heights(kind: LaneKind, rows: int) -> tuple[float, ...]:
    if kind is LaneKind.QUEUE_FEEDERS:
        return (min(0.3, 1.8 / rows),) * rows
    first = {LaneKind.EPOCHS: 0.75, LaneKind.FEEDER: 0.55}.get(kind, 1.0)
    return (first, *(0.7 * first for _ in range(rows - 1)))


def stacked(lanes: Sequence[Lane]) -> tuple[Lane, ...]:
    """Return the lanes one below the other: a feeder close to its worker, each slot apart from the one before it."""
    out: list[Lane] = []
    bottom = 1.0 if lanes and lanes[-1].slot else 0.0
    for lane in lanes:
        gap = 0.0
        if out:
            gap = 1.6 if out[-1].slot != lane.slot else 0.12 if lane.kind is LaneKind.FEEDER else 0.45
        out.append(replace(lane, top=bottom + gap))
        bottom = out[-1].bottom
    return tuple(out)


def only(lanes: tuple[Lane, ...], bars: Rows, marks: Rows, workers: set[int]) -> tuple[tuple[Lane, ...], Rows, Rows]:
    """Return what remains without the other workers. Raises ValueError for a worker that has no lane."""
    there = {lane.worker for lane in lanes if lane.worker >= 0}
    if workers - there:
        raise ValueError(f"workers={sorted(workers - there)}: the trace has {sorted(there) or 'no workers'}")
    kept = [n for n, lane in enumerate(lanes) if lane.worker < 0 or lane.worker in workers]
    new = np.full(len(lanes), -1, np.int32)
    new[kept] = np.arange(len(kept))
    out = []
    for rows in (bars, marks):
        rows = rows[new[rows["lane"]] >= 0]
        rows["lane"] = new[rows["lane"]]
        out.append(rows)
    return stacked([lanes[n] for n in kept]), out[0], out[1]
