"""What is drawn where: a trace as lanes of bars, marks, batches' ways and counters. No drawing, no clock, no files.

Interface: `scene(trace, ...)` -> `Scene`, arrays and small dataclasses; `Scene.pick` and `Scene.arrows` for the batches
that are asked for; `paint(code)` for a stage's label and colour; `per_pixel` for what is narrower than a pixel. The
picture and the page draw from these alone, so that they cannot say different things.

Rules of use: times are ns since the trace's first event. A lane is an actor and not a thread: iterators that follow
each other share their lanes, those that run at the same time have lanes of their own. A row of a lane holds one kind of
step or several that never overlap; what happens inside a step lies a row deeper. The table `events` says the rest.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from minidl.tracing import events as ev
from minidl.tracing.events import EVENTS, Phase, Place, Track

if TYPE_CHECKING:
    from minidl.tracing.reader import Process, Trace

Rows = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
BatchName = int | tuple[int, int, int]

NEVER: Final = np.iinfo(np.int64).max
EDGE: Final = 0.04
"""Share of the trace's time that is added at its end where something is open, so that it can be seen to be."""

MAX_ROWS: Final = 6
"""Rows of a lane; deeper steps, which only damaged traces have, are drawn in the last one."""


class Kind(enum.IntEnum):
    """What a lane is the lane of, in the order in which lanes are drawn."""

    EPOCHS = 0
    CONSUMER = 1
    DEVICE = 2  # a stream of a device, by the device's clock
    LOADER = 3
    QUEUE_FEEDERS = 4  # the feeder threads of the loader's process: a row for each index queue
    PIN = 5
    WORKER = 6
    FEEDER = 7  # a worker's feeder thread, drawn below it


class Fate(enum.IntEnum):
    """How a bar ends."""

    ENDED = 0
    OPEN = 1  # did not end: to the edge of the trace, or to where its process was found dead
    LOST = 2  # what encloses it has ended, so it has too, but nothing says when
    UNSEEN = 3  # its process stopped recording, and ran on


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane. top, heights: of the lane and of each of its rows, where a row of plain steps has height 1."""

    kind: Kind
    slot: int
    worker: int
    title: str
    note: str
    top: float
    heights: tuple[float, ...]

    @property
    def bottom(self) -> float:
        return self.top + sum(self.heights)

    def row_top(self, row: int) -> float:
        return self.top + sum(self.heights[:row])


@dataclass(frozen=True, slots=True)
class Slot:
    """Iterators that follow each other and share lanes."""

    title: str
    loaders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Counter:
    """A value that changes in steps: values[i] from times[i] (ns) on, 0 before."""

    name: str
    unit: str
    slot: int
    times: Ints
    values: Ints


@dataclass(frozen=True, slots=True)
class Paint:
    """How a kind of span is drawn. soft: nothing is worked on (a wait, or a frame around steps): draw it pale."""

    label: str
    colour: str
    soft: bool


BAR = np.dtype(
    [
        ("lane", "<i4"), ("row", "<i4"), ("code", "<u2"), ("fate", "u1"), ("simulated", "?"),
        ("begin", "<i8"), ("end", "<i8"), ("task", "<i8"), ("worker", "<i8"),
        ("batch", "<i8"),  # index in Scene.batches; -1 = of no batch
        ("span", "<i8"),  # index in Scene.spans
    ]
)  # fmt: skip
MARK = np.dtype(
    [
        ("lane", "<i4"), ("code", "<u2"), ("time", "<i8"), ("task", "<i8"), ("worker", "<i8"),
        ("batch", "<i8"), ("event", "<i8"),  # event: index in Trace.events
        ("alarm", "?"),  # something went wrong
    ]
)  # fmt: skip
BATCH = np.dtype(
    [
        ("slot", "<i4"), ("loader", "<i4"), ("epoch", "<i8"), ("task", "<i8"), ("worker", "<i8"),
        ("put", "<i8"), ("yielded", "<i8"),  # ns; yielded = -1: never
    ]
)  # fmt: skip
STOP = np.dtype(
    [
        ("batch", "<i8"), ("lane", "<i4"), ("row", "<i4"), ("code", "<u2"), ("begin", "<i8"), ("end", "<i8"),
        ("span", "<i8"), ("event", "<i8"),  # index in Scene.spans, or in Trace.events; -1 = it is the other
    ]
)  # fmt: skip
"""A place on a batch's way."""

ARROW = np.dtype(
    [
        ("batch", "<i8"), ("from_lane", "<i4"), ("from_row", "<i4"), ("left", "<i8"),
        ("to_lane", "<i4"), ("to_row", "<i4"), ("reached", "<i8"), ("code", "<u2"),
    ]
)  # fmt: skip
"""From the end of one stop (`left`, ns) to the begin of the next (`reached`); code: what is reached."""

COLUMN = np.dtype(
    [("lane", "<i4"), ("row", "<i4"), ("code", "<u2"), ("pixel", "<i8"), ("share", "<f8"), ("bars", "<i8")]
)
"""Bars narrower than a pixel, put together: `share` of the pixel's time is theirs."""

WAY: Final = (
    *(ev.INDEX_WRITE[0], ev.FETCH[0], ev.RESULT_PICKLE[0], ev.RESULT_WRITE[0], ev.RESULT_REBUILD[0], ev.PIN[0]),
    *(ev.READY_GET[0], ev.H2D[0], ev.COPY[0], ev.TRANSFORM[0], ev.DEVICE_WAIT[0]),
)
"""Spans that a batch passes between its index_put and its yield, and then, where it goes to a device, its use there."""

AT_END: Final = (ev.READY_GET[0], ev.DEVICE_WAIT[0])
"""Those that it passes where they end: a wait for the batch begins before the batch is ready."""

FADING: Final = (Fate.OPEN, Fate.UNSEEN)
"""Bars that are drawn to the edge."""

FATES: Final = {
    Fate.OPEN: "did not end",
    Fate.LOST: "its end is not in the trace",
    Fate.UNSEEN: "still under way when the recording was ended",
}
"""What is said of bars whose end was not recorded."""

ALARMS: Final = (ev.FOUND_DEAD, ev.TIMED_OUT, ev.TASK_ERROR, ev.TERMINATE)
"""Marks of what went wrong; so is a worker_gone with another exit code than 0, if none of these has said it."""

_WAITS = (ev.RESULT_GET[0], ev.READY_GET[0])
_SOFT = (*_WAITS, ev.INDEX_GET[0], ev.NEXT[0], ev.EPOCH[0], ev.JOIN[0], ev.DEVICE_WAIT[0], ev.HOST_WAIT[0])
_BY_WORKER = (ev.INDEX_GET, ev.FETCH, ev.SAMPLE, ev.COLLATE)
_OF_WORKER = [code for pair in _BY_WORKER for code in pair] + [ev.WORKER_READY, ev.RESULT_PUT, ev.WORKER_EXIT]
_SIZE = max(EVENTS) + 2


def _table(codes: Iterable[int]) -> Bools:
    """table[code]: is the code one of `codes`?"""
    out = np.zeros(_SIZE, bool)
    out[list(codes)] = True
    return out


def _on(track: Track) -> Bools:
    return _table(code for code, event in EVENTS.items() if event.track is track)


_SAYS_WORKER, _FEEDS, _PINS, _CONSUMES = _table(_OF_WORKER), _on(Track.FEEDER), _on(Track.PIN), _on(Track.CONSUMER)
_COMES_LATE = _table([*_WAITS, ev.INDEX_GET[0], ev.NEXT[0]])  # spans that learn their task at their end
_COMES_EARLY = _table([ev.SAMPLER_NEXT[0], ev.TASK_ASSIGNED])  # their batch is put after them


# --- How a kind of span is drawn --------------------------------------------------------------------------------------
@cache
def paint(code: int) -> Paint:
    """Label and colour of the spans that begin with `code`. KeyError for a code that the table has not."""
    event = EVENTS[code]
    return Paint(event.stage or event.name, event.colour, code in _SOFT)


def simulated_column(code: int) -> str:
    """The column, "x" to "z", in which an event says that it was simulated; "" where it has no such field."""
    for column, field in zip("xyz", EVENTS[code].fields, strict=False):
        if field.name == "simulated":
            return column
    return ""


@cache
def number_column(code: int) -> str:
    """The column of SPAN with the number that tells a span apart: of a sample, an epoch, a task or a worker; or ""."""
    event = EVENTS[code]
    if code == ev.INDEX_GET[0]:
        return ""
    for column, field in zip(("bx", "by", "bz"), event.fields, strict=False):
        if field.name in ("index", "epoch"):
            return column
    if event.has_task:
        return "end_task" if _COMES_LATE[code] else "task"
    return "worker" if event.has_worker else ""


def caption(scene: Scene, bar: np.void) -> tuple[str, str]:
    """What a bar says of itself, in full and in short: ("sample 65", "65")."""
    code = int(bar["code"])
    label, column = _name(scene, bar) or paint(code).label, number_column(code)
    in_vain = scene.lanes[bar["lane"]].kind is Kind.LOADER and scene.spans[bar["span"]]["end_task"] < 0
    if column == "end_task" and (bar["fate"] != Fate.ENDED or in_vain):
        label, column = f"{label} for" if code in _WAITS else label, "task"
    if code == ev.EPOCH[0] and len(scene.trace.loaders) > 1:
        label = f"loader {scene.spans[bar['span']]['loader']} epoch"
    number = int(scene.spans[bar["span"]][column]) if column else -1
    return (f"{label} {number}", str(number)) if number >= 0 else (label.removesuffix(" for"), "")


def _name(scene: Scene, bar: np.void) -> str:
    """What the user has called the bar's span; "" where that is not the user's to say."""
    span, fields = scene.spans[bar["span"]], EVENTS[int(bar["code"])].fields
    named = fields and fields[0].unit == "string"
    return scene.trace.strings.get((int(span["process"]), int(span["bx"])), "") if named else ""


def alarm(scene: Scene, mark: np.void) -> str:
    """What a mark says of itself: its name, whom and what it is about."""
    row, event = scene.trace.events[mark["event"]], EVENTS[int(mark["code"])]
    if mark["code"] == ev.WORKER_GONE:
        return f"worker {row['worker']} gone: {_left_with(int(row['y']))}"
    words = [event.name.replace("_", " ")]
    for column, field in zip("xyz", event.fields, strict=False):
        if field.enum is not None:
            words += [m.name.lower().replace("_", " ") for m in field.enum if m == row[column]]
    if row["worker"] >= 0 and scene.lanes[mark["lane"]].worker < 0:
        words.append(f"worker {row['worker']}" if words[-1] != "worker" else str(row["worker"]))
    text = scene.trace.text(row)
    return " ".join(words) + (f": {text}" if text else "")


def alarming(events: Rows) -> Bools:
    """Which of a trace's events say that something went wrong, each death once."""
    out: Bools = np.isin(events["code"], ALARMS)
    told = events[np.isin(events["code"], [ev.FOUND_DEAD, ev.TERMINATE])]
    known = {(int(row["process"]), int(row["loader"]), int(row["worker"])) for row in told}
    for at in np.flatnonzero((events["code"] == ev.WORKER_GONE) & (events["y"] != 0)).tolist():
        row = events[at]
        out[at] = (int(row["process"]), int(row["loader"]), int(row["worker"])) not in known
    return out


def _left_with(code: int) -> str:
    """An exit code in words: a negative one is a signal's number."""
    try:
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except ValueError:
        return f"killed by signal {-code}"


def title_of(trace: Trace) -> str:
    """The last part of the trace's path, as text that every encoding can write."""
    return trace.path.name.encode("utf-8", "backslashreplace").decode()


# --- The scene --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Scene:
    """All that can be drawn of a trace. Arrays: bars of BAR by lane, row and begin; marks of MARK by lane and time;
    batches of BATCH by put; stops of STOP by batch and time. begin, end: the window, ns.
    """

    trace: Trace
    start: int  # CLOCK_MONOTONIC ns of time 0
    begin: int
    end: int
    slots: tuple[Slot, ...]
    lanes: tuple[Lane, ...]
    bars: Rows
    marks: Rows
    batches: Rows
    stops: Rows
    counters: tuple[Counter, ...]
    spans: Rows

    @property
    def height(self) -> float:
        return max((lane.bottom for lane in self.lanes), default=0.0)

    def pick(self, names: Iterable[BatchName]) -> Ints:
        """Indices of the batches called so: a task's number, in any loader and epoch, or (loader, epoch, task).

        ValueError where there is no such batch.
        """
        known = self.batches
        out = []
        for name in names:
            if isinstance(name, tuple):
                loader, epoch, task = name
                found = (known["loader"] == loader) & (known["epoch"] == epoch) & (known["task"] == task)
            else:
                found = known["task"] == name
            if not found.any():
                have = f"tasks 0 to {known['task'].max()}" if len(known) else "no batch that was sent to a worker"
                raise ValueError(f"batches: the trace has no batch {name}: it has {have}")
            out.append(np.flatnonzero(found))
        return np.unique(np.concatenate(out)) if out else np.empty(0, np.int64)

    def arrows(self, batches: Ints) -> Rows:
        """Array of ARROW for the batches with these indices, by batch and time."""
        stops = self.stops[np.isin(self.stops["batch"], batches)]
        tail, head = stops[:-1], stops[1:]
        joined = tail["batch"] == head["batch"]
        tail, head = tail[joined], head[joined]
        out = np.zeros(len(tail), ARROW)
        for name, source, column in (
            ("batch", tail, "batch"), ("from_lane", tail, "lane"), ("from_row", tail, "row"),
            ("to_lane", head, "lane"), ("to_row", head, "row"), ("reached", head, "begin"), ("code", head, "code"),
        ):  # fmt: skip
            out[name] = source[column]
        # A reader may begin before its writer has come back from the write.
        out["left"] = np.minimum(tail["end"], head["begin"])
        return out


def scene(
    trace: Trace, *, since: float | None = None, until: float | None = None, workers: Iterable[int] | None = None
) -> Scene:
    """Lay the trace out. since, until: seconds from its first event; workers: those whose lanes are wanted.

    ValueError where the window is empty or outside the trace, or a worker is not in the trace.
    """
    stage = _Stage(trace)
    begin, end = window_of(stage.edge, since, until)
    lanes, bars, marks = stage.lanes, stage.bars(), stage.marks()
    if workers is not None:
        lanes, bars, marks = _only(lanes, bars, marks, set(workers))
    stops = _stops(bars, marks)
    bars = bars[(bars["begin"] <= end) & (bars["end"] >= begin)]
    marks = marks[(marks["time"] <= end) & (marks["time"] >= begin)]
    return Scene(
        trace, stage.start, begin, end, stage.crew.slots, lanes, bars, marks, stage.batches.table, stops,
        tuple(_clipped(counter, begin, end) for counter in stage.counters()), stage.spans,
    )  # fmt: skip


def window_of(edge: int, since: float | None, until: float | None) -> tuple[int, int]:
    """Begin and end, ns, of the window in a trace that ends at `edge`. ValueError where it holds nothing of it."""
    begin, end = 0, max(edge, 1)
    if all(math.isfinite(second) for second in (since, until) if second is not None):
        begin, end = (at if s is None else round(s * 1e9) for s, at in ((since, begin), (until, end)))
        if begin < end and begin < max(edge, 1) and end > 0:
            return begin, end
    raise ValueError(
        f"since={since} s, until={until} s: nothing lies between them; the trace goes from 0 to {edge / 1e9:.6g} s"
    )


def _only(lanes: tuple[Lane, ...], bars: Rows, marks: Rows, workers: set[int]) -> tuple[tuple[Lane, ...], Rows, Rows]:
    """The lanes of the loader's side and of these workers."""
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
    return _stacked([lanes[n] for n in kept]), out[0], out[1]


def _clipped(counter: Counter, begin: int, end: int) -> Counter:
    """The counter within the window, with its value at the window's begin."""
    first = max(0, int(np.searchsorted(counter.times, begin, side="right")) - 1)
    last = int(np.searchsorted(counter.times, end, side="right"))
    return Counter(counter.name, counter.unit, counter.slot, counter.times[first:last], counter.values[first:last])


def _stops(bars: Rows, marks: Rows) -> Rows:
    came = (bars["fate"] == Fate.ENDED) | ~np.isin(bars["code"], AT_END)
    spans = bars[np.isin(bars["code"], WAY) & (bars["batch"] >= 0) & came]
    points = marks[np.isin(marks["code"], [ev.INDEX_PUT, ev.YIELD]) & (marks["batch"] >= 0)]
    out = np.zeros(len(spans) + len(points), STOP)
    for name in ("batch", "lane", "code"):
        out[name] = np.concatenate([spans[name], points[name]])
    out["row"][: len(spans)] = spans["row"]
    out["begin"] = np.concatenate([spans["begin"], points["time"]])
    out["end"] = np.concatenate([spans["end"], points["time"]])
    out["span"] = np.concatenate([spans["span"], np.full(len(points), -1)])
    out["event"] = np.concatenate([np.full(len(spans), -1), points["event"]])
    late = np.isin(out["code"], AT_END)
    out["begin"][late] = out["end"][late]
    return out[np.lexsort((out["begin"], out["batch"]))]


# --- Whose lane an event belongs in -----------------------------------------------------------------------------------
class _Crew:
    """Who emitted: for each pair of process and loader that occurs, its worker's number, its iterator and its slot."""

    def __init__(self, trace: Trace) -> None:
        events = trace.events
        pair = _pair(events)
        self.pairs, inverse = np.unique(pair, return_inverse=True)
        self.worker = np.full(len(self.pairs), -1, np.int64)
        says = _SAYS_WORKER[events["code"]] & (events["worker"] >= 0)
        self.worker[inverse[says]] = events["worker"][says]
        self._ask_roles(trace)
        self.group = self._groups(trace)
        first, last = _extent(self.group[inverse], events["time"])
        self.slot_of, self.slots = self._share(trace, first, last)
        self.slot = self.slot_of[self.group]
        self.first = first

    def _ask_roles(self, trace: Trace) -> None:
        """A worker whose telling events were overwritten still has its role."""
        for at, pair in enumerate(self.pairs.tolist()):
            process = trace.processes[pair >> 16]
            if self.worker[at] < 0 and process.role == "worker" and process.loader == pair & 0xFFFF:
                self.worker[at] = process.worker

    def _groups(self, trace: Trace) -> Ints:
        """A number for each iterator: a loader's number counts in its own process, and workers count with theirs."""
        homes: dict[int, list[int]] = {}
        for pair, worker in zip(self.pairs.tolist(), self.worker.tolist(), strict=True):
            if worker < 0:
                homes.setdefault(pair & 0xFFFF, []).append(pair >> 16)
        out, numbers = [], dict[tuple[int, int], int]()
        for pair, worker in zip(self.pairs.tolist(), self.worker.tolist(), strict=True):
            process, loader = pair >> 16, pair & 0xFFFF
            home = process if worker < 0 else _home(trace, process, homes.get(loader, []))
            out.append(numbers.setdefault((home, loader), len(numbers)))
        self.home = list(numbers)
        return np.array(out, np.int64)

    def _share(self, trace: Trace, first: Ints, last: Ints) -> tuple[Ints, tuple[Slot, ...]]:
        """Give each iterator the first slot of its process that is free when it begins."""
        slots: list[tuple[int, int, list[int]]] = []  # process, ns until which it is taken, groups
        slot_of = np.zeros(len(first), np.int64)
        for group in np.argsort(first, kind="stable").tolist():
            home = self.home[group][0]
            for number, (owner, taken, groups) in enumerate(slots):
                if owner == home and taken <= first[group]:
                    slots[number] = (home, int(last[group]), [*groups, group])
                    break
            else:
                number = len(slots)
                slots.append((home, int(last[group]), [group]))
            slot_of[group] = number
        rank_of = [trace.processes[owner].rank for owner, _, _ in slots]
        order = sorted(range(len(slots)), key=rank_of.__getitem__)
        named = []
        for number in order:
            loaders = tuple(self.home[group][1] for group in slots[number][2])
            of = "" if rank_of[number] < 0 else f"rank {rank_of[number]} \N{MIDDLE DOT} "
            named.append(Slot(of + _loaders(loaders), loaders))
        return np.argsort(order)[slot_of], tuple(named)

    def of(self, rows: Rows) -> Ints:
        """Index in `pairs` of each row's process and loader."""
        return np.searchsorted(self.pairs, _pair(rows))


def _pair(rows: Rows) -> Ints:
    pair: Ints = (rows["process"].astype(np.int64) << 16) | rows["loader"]
    return pair


def _home(trace: Trace, process: int, candidates: list[int]) -> int:
    """The process that iterates over a worker's loader: its parent, if that is a candidate, or the first."""
    parent = trace.processes[process].ppid
    for candidate in candidates:
        if trace.processes[candidate].pid == parent:
            return candidate
    return candidates[0] if candidates else process


def _extent(group: Ints, times: Ints) -> tuple[Ints, Ints]:
    size = int(group.max()) + 1 if len(group) else 0
    first, last = np.full(size, NEVER), np.zeros(size, np.int64)
    np.minimum.at(first, group, times)
    np.maximum.at(last, group, times)
    return first, last


def _loaders(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return f"loader {numbers[0]}" if numbers[0] else "no loader"
    shown = ", ".join(map(str, numbers[:4]))
    return f"loaders {shown}{', …' if len(numbers) > 4 else ''}"


# --- From events to bars ----------------------------------------------------------------------------------------------
class _Stage:
    """A trace, and what several parts of its scene need to know."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events: Rows = trace.events
        self.start = int(self.events["time"][0]) if len(self.events) else 0
        self.last = int(self.events["time"][-1]) - self.start if len(self.events) else 0
        self.spans = trace.spans()
        self.crew = _Crew(trace)
        self.pinning = np.unique(_thread(self.events[_PINS[self.events["code"]]]))
        self.instant = _table(c for c, e in EVENTS.items() if e.phase is Phase.INSTANT)[self.events["code"]]
        span_keys, mark_keys = self._keys(self.spans), self._keys(self.events[self.instant])
        self.keys = np.unique(np.concatenate([span_keys, mark_keys]))
        self.span_lane = np.searchsorted(self.keys, span_keys)
        self.mark_lane = np.searchsorted(self.keys, mark_keys)
        self.edge = self.last
        if (self.spans["end"] < 0).any():
            self.edge = min(self.last + max(1, round(self.last * EDGE)), int(np.iinfo(np.int64).max))
        self.until, self.fate = self._ends()
        self.row, self.rows = self._rows()
        self.lanes = self._lanes()
        self.batches = _Batches(self)

    def _keys(self, rows: Rows) -> Ints:
        """A number for each row's lane, in the order in which lanes are drawn."""
        code, at = rows["code"], self.crew.of(rows)
        worker = self.crew.worker[at]
        inside = worker >= 0
        kind = np.where(inside, Kind.WORKER, Kind.LOADER)
        kind[~inside & np.isin(_thread(rows), self.pinning)] = Kind.PIN
        kind[_FEEDS[code]] = np.where(inside, Kind.FEEDER, Kind.QUEUE_FEEDERS)[_FEEDS[code]]
        kind[_CONSUMES[code]] = Kind.CONSUMER
        kind[rows["tid"] >= ev.DEVICE_TID] = Kind.DEVICE
        kind[code == ev.EPOCH[0]] = Kind.EPOCHS
        below = np.where(kind >= Kind.WORKER, (np.clip(worker, 0, 1 << 30) << 1) | (kind == Kind.FEEDER), 0)
        below = np.where(kind == Kind.DEVICE, rows["tid"].astype(np.int64) - ev.DEVICE_TID, below)
        key: Ints = (((self.crew.slot[at] << 3) | np.minimum(kind, Kind.WORKER)) << 32) | below
        return key

    def _ends(self) -> tuple[Ints, npt.NDArray[np.uint8]]:
        """Where each span's bar ends, ns, and how."""
        begin, end = self.spans["begin"] - self.start, self.spans["end"].astype(np.int64)
        is_open = end < 0
        until = np.where(is_open, self.edge, end - self.start)
        fate = is_open.astype(np.uint8) * np.uint8(Fate.OPEN)
        for lane in np.unique(self.span_lane[is_open]).tolist():
            mine = np.flatnonzero(self.span_lane == lane)
            for at, limit in _enclosing(begin[mine], until[mine], is_open[mine]):
                until[mine[at]] = limit
                fate[mine[at]] = Fate.LOST
        self._bury(until, fate)
        stopped = [line["process"] for line in self.trace.described("trace_end")]
        fate[(fate == Fate.OPEN) & np.isin(self.spans["process"], stopped)] = Fate.UNSEEN
        self._succeed(until, fate)
        return until, fate

    def _bury(self, until: Ints, fate: npt.NDArray[np.uint8]) -> None:
        """What a dead process had open ends where it was seen to be dead."""
        rows = self.events[np.isin(self.events["code"], [ev.WORKER_GONE, ev.FOUND_DEAD])]
        dead: dict[int, int] = {}
        for row in rows:
            pid = int(row["x"] if row["code"] == ev.WORKER_GONE else row["y"])
            dead.setdefault(pid, int(row["time"]) - self.start)
        for at in np.flatnonzero(fate == Fate.OPEN).tolist():
            seen = dead.get(int(self.spans["pid"][at]), NEVER)
            if seen >= self.spans["begin"][at] - self.start:
                until[at] = min(until[at], seen)

    def _succeed(self, until: Ints, fate: npt.NDArray[np.uint8]) -> None:
        """What an iterator has left open ends where another one takes over its lanes."""
        crew, is_open = self.crew, np.flatnonzero(np.isin(fate, FADING))
        group = crew.group[crew.of(self.spans[is_open])]
        for slot in np.unique(crew.slot_of[group]).tolist():
            begins = np.sort(crew.first[crew.slot_of == slot]) - self.start
            mine = crew.slot_of[group] == slot
            after = np.searchsorted(begins, crew.first[group[mine]] - self.start, side="right")
            limit = np.append(begins, NEVER)[after]
            spans = is_open[mine]
            fate[spans[limit < until[spans]]] = Fate.LOST
            until[spans] = np.minimum(until[spans], limit)

    def _rows(self) -> tuple[Ints, list[list[int]]]:
        """The row of each span in its lane; and for each lane its rows, each as one of its codes or its worker."""
        row = np.zeros(len(self.spans), np.int64)
        rows: list[list[int]] = []
        order = np.argsort(self.span_lane, kind="stable")
        bounds = np.searchsorted(self.span_lane[order], np.arange(len(self.keys) + 1))
        for lane in range(len(self.keys)):
            mine = order[bounds[lane] : bounds[lane + 1]]
            spans = self.spans[mine]
            if self._kind(lane) is Kind.QUEUE_FEEDERS:
                level = np.maximum(spans["worker"], -1)
            else:
                level = _levels(spans["code"], spans["begin"] - self.start, self.until[mine])
            known, row[mine] = np.unique(level, return_inverse=True)
            rows.append(known.tolist() or [0])
        return row, rows

    def _kind(self, lane: int) -> Kind:
        key = int(self.keys[lane])
        return Kind.FEEDER if key >> 32 & 7 == Kind.WORKER and key & 1 else Kind(key >> 32 & 7)

    def _lanes(self) -> tuple[Lane, ...]:
        out = []
        for number, (key, note) in enumerate(zip(self.keys.tolist(), self._notes(), strict=True)):
            kind, slot = self._kind(number), key >> 35
            worker = (key & 0xFFFFFFFF) >> 1 if kind >= Kind.WORKER else -1
            heights = _heights(kind, len(self.rows[number]))
            title = self._stream(number) if kind is Kind.DEVICE else _title(kind, worker)
            out.append(Lane(kind, slot, worker, title, note, 0.0, heights))
        return _stacked(out)

    def _stream(self, lane: int) -> str:
        """What the stream of a device's lane is called."""
        rows = self.spans[self.span_lane == lane]
        name = self.trace.threads.get((int(rows["pid"][0]), int(rows["tid"][0])), "") if len(rows) else ""
        return name.replace("simulated", "sim.") or "device"

    def _notes(self) -> list[str]:
        """For each lane: the processes that it is made of, and what their records lack."""
        lane = np.concatenate([self.span_lane, self.mark_lane])
        process = np.concatenate([self.spans["process"], self.events["process"][self.instant]]).astype(np.int64)
        members: list[list[Process]] = [[] for _ in self.keys]
        for pair in np.unique((lane << 32) | process).tolist():
            members[pair >> 32].append(self.trace.processes[pair & 0xFFFFFFFF])
        return [_note(found) for found in members]

    def bars(self) -> Rows:
        spans = self.spans
        out = np.zeros(len(spans), BAR)
        out["lane"], out["row"], out["code"], out["fate"] = self.span_lane, self.row, spans["code"], self.fate
        out["begin"], out["end"] = spans["begin"] - self.start, self.until
        for name in ("task", "worker"):
            came = _COMES_LATE[spans["code"]] & (spans["end"] >= 0)
            out[name] = np.where(came, spans["end_" + name], spans[name])
        for code in np.unique(spans["code"]).tolist():
            if column := simulated_column(code):
                mine = spans["code"] == code
                out["simulated"][mine] = spans["b" + column][mine] != 0
        late = _COMES_LATE[spans["code"]]
        times = np.where(late & (spans["end"] >= 0), spans["end"], spans["begin"]) - self.start
        out["batch"] = self.batches.find(self.crew.of(spans), out["task"], times, _COMES_EARLY[spans["code"]])
        out["batch"][(spans["code"] == ev.SAMPLER_NEXT[0]) & (spans["ex"] == 0)] = -1  # the sampler had no more
        out["span"] = np.arange(len(spans))
        return out[np.lexsort((out["begin"], out["row"], out["lane"]))]

    def marks(self) -> Rows:
        rows = self.events[self.instant]
        out = np.zeros(len(rows), MARK)
        out["lane"], out["time"] = self.mark_lane, rows["time"] - self.start
        for name in ("code", "task", "worker"):
            out[name] = rows[name]
        out["batch"] = self.batches.find(self.crew.of(rows), rows["task"], out["time"], _COMES_EARLY[rows["code"]])
        out["event"] = np.flatnonzero(self.instant)
        out["alarm"] = alarming(rows)
        return out[np.lexsort((out["time"], out["lane"]))]

    def counters(self) -> list[Counter]:
        return _counters(self)


def _note(processes: list[Process]) -> str:
    pids = ", ".join(str(p.pid) for p in processes[:4]) + (", …" if len(processes) > 4 else "")
    lacks = "; ".join(p.note for p in processes if p.note)
    return f"pid {pids}" + (f": {lacks}" if lacks else "")


def _thread(rows: Rows) -> Ints:
    thread: Ints = (rows["process"].astype(np.int64) << 32) | rows["tid"]
    return thread


def _enclosing(begin: Ints, until: Ints, is_open: Bools) -> Iterable[tuple[int, int]]:
    """For each open span (by begin) inside an ended one: its position, and the end of the innermost such span."""
    around: list[int] = []  # ends of the ended spans that are not over yet
    first = int(np.argmax(is_open))
    before = np.flatnonzero(~is_open[:first] & (until[:first] > begin[first])).tolist()
    for at in [*before, *range(first, len(begin))]:
        while around and around[-1] <= begin[at]:
            around.pop()
        if not is_open[at]:
            around.append(int(until[at]))
        elif around:
            yield at, around[-1]


def _levels(code: npt.NDArray[np.uint16], begin: Ints, until: Ints) -> Ints:
    """How deep each span's kind lies at its deepest: the same row for a kind, wherever it occurs."""
    depth = np.arange(len(begin)) - np.searchsorted(np.sort(until), begin, side="right")
    deepest = np.zeros(_SIZE, np.int64)
    np.maximum.at(deepest, code, np.clip(depth, 0, MAX_ROWS - 1))
    return deepest[code]


def _title(kind: Kind, worker: int) -> str:
    return {
        Kind.EPOCHS: "epochs", Kind.CONSUMER: "consumer", Kind.LOADER: "loader", Kind.QUEUE_FEEDERS: "queue feeders",
        Kind.PIN: "pin thread", Kind.WORKER: f"worker {worker}", Kind.FEEDER: f"feeder {worker}",
    }[kind]  # fmt: skip


def _heights(kind: Kind, rows: int) -> tuple[float, ...]:
    if kind is Kind.QUEUE_FEEDERS:
        return (min(0.3, 1.8 / rows),) * rows
    first = {Kind.EPOCHS: 0.75, Kind.FEEDER: 0.55}.get(kind, 1.0)
    return (first, *(0.7 * first for _ in range(rows - 1)))


def _stacked(lanes: list[Lane]) -> tuple[Lane, ...]:
    """The lanes, one below the other; a feeder close to its worker, a slot apart from the one before it."""
    out: list[Lane] = []
    for lane in lanes:
        above = out[-1] if out else None
        gap = 0.0 if above is None else 1.6 if above.slot != lane.slot else 0.12 if lane.kind is Kind.FEEDER else 0.45
        top = (above.bottom if above else (1.0 if lanes[-1].slot else 0.0)) + gap
        out.append(Lane(lane.kind, lane.slot, lane.worker, lane.title, lane.note, top, lane.heights))
    return tuple(out)


# --- Batches ----------------------------------------------------------------------------------------------------------
class _Batches:
    """Every batch that was sent to a worker, and which of them an event is about."""

    def __init__(self, stage: _Stage) -> None:
        crew = stage.crew
        puts = stage.events[stage.events["code"] == ev.INDEX_PUT]
        self.group = crew.group
        self.time = puts["time"] - stage.start
        self.key = _task_key(crew.group[crew.of(puts)], puts["task"])
        self.table = np.zeros(len(puts), BATCH)
        self.table["slot"] = crew.slot[crew.of(puts)]
        for name in ("loader", "task", "worker"):
            self.table[name] = puts[name]
        self.table["put"] = self.time
        self.table["epoch"] = self._epochs(stage, puts)
        yields = stage.events[stage.events["code"] == ev.YIELD]
        when = yields["time"] - stage.start
        batch = self.find(crew.of(yields), yields["task"], when, np.zeros(len(yields), bool))
        self.table["yielded"] = -1
        self.table["yielded"][batch[batch >= 0]] = when[batch >= 0]

    def _epochs(self, stage: _Stage, puts: Rows) -> Ints:
        """The number of the epoch that each batch was sent in, as the last `epoch` of its loader says; 0 before any."""
        begins = stage.events[stage.events["code"] == ev.EPOCH[0]]
        crew, nothing = stage.crew, np.zeros(len(puts), bool)
        at = latest(crew.group[crew.of(begins)], begins["time"], crew.group[crew.of(puts)], puts["time"], nothing)
        return np.where(at >= 0, np.append(begins["x"], 0)[at], 0)

    def find(self, pairs: Ints, task: Ints, times: Ints, early: Bools) -> Ints:
        """The batch of each event: the last one put with its task, or where `early` the next; -1 = none."""
        found = latest(self.key, self.time, _task_key(self.group[pairs], task), times, early)
        return np.where(task >= 0, found, -1)


def _task_key(group: Ints, task: Ints) -> Ints:
    key: Ints = (group << 44) | (task & ((1 << 44) - 1))
    return key


def latest(keys: Ints, times: Ints, wanted: Ints, when: Ints, early: Bools) -> Ints:
    """For each wanted key, the position in `keys` of the same key at the latest time up to `when`; -1 = none.

    Where `early`, at the earliest time from `when` on.
    """
    out = np.full(len(wanted), -1, np.int64)
    for forward, mine in ((True, np.flatnonzero(~early)), (False, np.flatnonzero(early))):
        sign = 1 if forward else -1
        key = np.concatenate([keys, wanted[mine]])
        time = sign * np.concatenate([times, when[mine]])
        asks = np.arange(len(key)) >= len(keys)
        order = np.lexsort((asks, time, key))
        last = np.maximum.accumulate(np.where(asks[order], -1, np.arange(len(order))))
        known = np.append(order, -1)[last]
        same = (last >= 0) & (key[np.where(last >= 0, known, 0)] == key[order])
        asked = asks[order]
        out[mine[order[asked] - len(keys)]] = np.where(same, known, -1)[asked]
    return out


# --- Counters ---------------------------------------------------------------------------------------------------------
def _counters(stage: _Stage) -> list[Counter]:
    """For each slot: tasks outstanding, batches in the reorder buffer, bytes in flight."""
    out = []
    slot_of_event = stage.crew.slot[stage.crew.of(stage.events)]
    for slot in range(len(stage.crew.slots)):
        events = stage.events[slot_of_event == slot]
        for name, unit, (times, values) in (
            ("outstanding", "tasks", outstanding(events)),
            ("reorder buffer", "batches", _reorder_depth(events)),
            ("in flight", "B", _in_flight(stage, events, slot)),
        ):
            if values.any():
                out.append(Counter(name, unit, slot, times - stage.start, values))
    return out


def outstanding(events: Rows) -> tuple[Ints, Ints]:
    """When the number of outstanding tasks changes, CLOCK_MONOTONIC ns, and to what.

    It is the dispatcher's own count where an event tells it, and one less where a task is taken from it: by a
    reorder_store, a worker_exhausted, or a yield, if nothing was told since its result came (out of order, when the
    sampler has no more). Where no get is seen in the loader's own thread, since the yield before it.
    """
    yielding = np.unique(events["tid"][events["code"] == ev.YIELD])
    came = np.isin(events["code"], _GOT) & (events["x"] == ev.Message.RESULT) & np.isin(events["tid"], yielding)
    rows = events[np.isin(events["code"], [*_TELLS, *_TAKES, ev.YIELD]) | came]
    at, tells, yields = np.arange(len(rows)), np.isin(rows["code"], _TELLS), rows["code"] == ev.YIELD
    last_told = np.maximum.accumulate(np.where(tells, at, -1))
    last_come = np.concatenate([[-1], np.maximum.accumulate(np.where(yields | np.isin(rows["code"], _GOT), at, -1))])
    takes = np.isin(rows["code"], _TAKES) | (yields & (last_told < last_come[:-1]))
    told = np.where(rows["code"] == ev.EPOCH[0], 0, rows["y"]) * tells
    base, taken = np.maximum(last_told, 0), np.cumsum(takes)
    values = np.maximum(told[base] - (taken - taken[base]), 0)
    return rows["time"][tells | takes], values[tells | takes]


_GOT = (ev.RESULT_GET[1], ev.READY_GET[1])
_TELLS = (ev.EPOCH[0], ev.TASK_ASSIGNED, ev.RCVD_ADVANCE)
_TAKES = (ev.REORDER_STORE, ev.WORKER_EXHAUSTED)


def _reorder_depth(events: Rows) -> tuple[Ints, Ints]:
    rows = events[np.isin(events["code"], [ev.EPOCH[0], ev.REORDER_STORE, ev.REORDER_POP])]
    return rows["time"], np.where(rows["code"] == ev.EPOCH[0], 0, rows["y"])


def _in_flight(stage: _Stage, events: Rows, slot: int) -> tuple[Ints, Ints]:
    """Bytes of batches made and not yet yielded: in shared memory and in pickles.

    Up by `bytes` at a shm_alloc in collate and by `bytes` + `copied` at a result_pickle's end; a batch's bytes go when
    it is yielded, its worker turns out to be exhausted, or its epoch ends.
    """
    made = events[np.isin(events["code"], [ev.SHM_ALLOC, ev.RESULT_PICKLE[1]])]
    in_collate = made["x"] * (made["y"] == Place.COLLATE)
    size = np.where(made["code"] == ev.SHM_ALLOC, in_collate, made["x"] + made["z"])
    nothing = np.zeros(len(made), bool)
    batch = stage.batches.find(stage.crew.of(made), made["task"], made["time"] - stage.start, nothing)
    gone = _gone(stage, events)
    counts = (batch >= 0) & (made["time"] <= np.append(gone, NEVER)[batch])
    total = np.zeros(len(gone), np.int64)
    np.add.at(total, batch[counts], size[counts])
    ends = np.flatnonzero((gone < NEVER) & (stage.batches.table["slot"] == slot))
    times = np.concatenate([made["time"][counts], gone[ends]])
    change = np.concatenate([size[counts], -total[ends]])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(change[order])


def _gone(stage: _Stage, events: Rows) -> Ints:
    """When each batch was out of flight, CLOCK_MONOTONIC ns, or NEVER."""
    batches, crew = stage.batches, stage.crew
    out = np.full(len(batches.table), NEVER)
    ends = events[np.isin(events["code"], [ev.YIELD, ev.WORKER_EXHAUSTED])]
    batch = batches.find(crew.of(ends), ends["task"], ends["time"] - stage.start, np.zeros(len(ends), bool))
    np.minimum.at(out, batch[batch >= 0], ends["time"][batch >= 0])
    over = events[events["code"] == ev.EPOCH[1]]
    group, put = batches.key >> 44, batches.time + stage.start
    every = np.ones(len(put), bool)
    at = latest(crew.group[crew.of(over)], over["time"], group, put, every)
    given_up = (at >= 0) & (out == NEVER)
    out[given_up] = over["time"][at[given_up]]
    return out


# --- What is narrower than a pixel ------------------------------------------------------------------------------------
def per_pixel(bars: Rows, begin: int, end: int, pixels: int) -> tuple[Rows, Rows]:
    """The bars that are a pixel wide or more, as they are; and array of COLUMN for the rest.

    Each narrow bar counts in the pixel that its middle lies in: how many there are, and how much time is theirs.
    """
    size = (end - begin) / pixels
    took = bars["end"] - bars["begin"]
    wide = (took >= size) | np.isin(bars["fate"], FADING)
    thin = bars[~wide]
    pixel = np.clip(((thin["begin"] + thin["end"]) / 2 - begin) // size, 0, pixels - 1).astype(np.int64)
    order = np.lexsort((pixel, thin["code"], thin["row"], thin["lane"]))
    thin, pixel, took = thin[order], pixel[order], took[~wide][order]
    new = np.ones(len(thin), bool)
    key = np.stack([thin["lane"], thin["row"], thin["code"], pixel]).astype(np.int64)
    new[1:] = (key[:, 1:] != key[:, :-1]).any(axis=0)
    first = np.flatnonzero(new)
    out = np.zeros(len(first), COLUMN)
    for name in ("lane", "row", "code"):
        out[name] = thin[name][first]
    out["pixel"] = pixel[first]
    if len(first):
        out["share"] = np.minimum(1.0, np.add.reduceat(took, first) / size)
        out["bars"] = np.diff(np.append(first, len(thin)))
    return bars[wide], out
