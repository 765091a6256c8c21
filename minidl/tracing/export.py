"""A trace as Chrome trace JSON, the format that the Perfetto UI, chrome://tracing and viztracer's --combine read.

Interface: `to_chrome(trace)` gives the document as a dict, `write_chrome(trace, path)` streams the same one to a file;
`nest(spans, track)` says what is inside what; `process_titles(trace)` what the viewer calls the processes.
What becomes what: a span with an end is an X slice, a span without one a B without E (the viewer lets it fade to the
right), an instant an i. `index_put` and `yield` are drawn as slices of at most 2 us, since a batch's arrows begin and
end there. Each batch is one flow across the processes, and one async slice "batch in flight", from its `index_put` to
its `yield`; the flow goes on to a device. An epoch is an async slice too, and the consumer has a pseudo-thread for each
loader: two loaders that are iterated together would otherwise overlap in part, and the viewer drops such slices. What
the user has named (`minidl.span`) has that name. `COUNTERS` says how counters are derived. What other recorders saw
(`Trace.attachments`) is drawn on tracks of its own, under the threads that it is of.

Times are monotonic microseconds since the first event, exact to the nanosecond. The viewer picks its colours by name
and heeds no `cname`, so the colours of `lanes.paint` cannot be had there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from minidl.tracing import events as ev
from minidl.tracing.attachments import Attachment, Name, Slices, lanes, places
from minidl.tracing.attachments import Track as GuestTrack
from minidl.tracing.events import EVENTS, Event, Field, Message, Phase, Place, Track
from minidl.tracing.lanes import AT_END, FATES, Fate, Scene, outstanding, scene

if TYPE_CHECKING:
    from os import PathLike

    from minidl.tracing.reader import Process, Trace

Rows = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Lines = Iterable[str]

ANCHOR_NS: Final = 2_000
"""Longest that an instant is drawn as a slice for arrows to start from; less where the thread's next event is near."""

PSEUDO_TID: Final = 1 << 22
"""Above every real thread and process number of Linux: from here on, numbers of tracks that are no threads."""

CHUNK: Final = 20_000
"""Lines that are joined before they are written."""

COUNTERS: Final = {
    "send_idx": "of task_assigned; 0 when an epoch begins",
    "rcvd_idx": "of rcvd_advance; 0 when an epoch begins",
    "tasks outstanding": "`outstanding` of task_assigned and rcvd_advance; one less at reorder_store, at "
    "worker_exhausted, and at a yield without either since its result came; 0 when an epoch begins",
    "reorder buffer batches": "`depth` of reorder_store and reorder_pop; 0 when an epoch begins",
    "in flight bytes": "up by `bytes` at a batch's shm_alloc in collate and by `bytes` + `copied` at the end of its "
    "result_pickle, down by both when the batch is yielded or given up",
    "index queue tasks": "of a worker: up at index_put, down at the end of the index_get that brings the task",
    "result queue batches": "of a worker: up at result_put, down at the end of the result_get that brings the result",
}
"""Each counter, and the events that it is derived from."""


Progress = Callable[[int, int], None]
"""Is told how many events are written, and how many there are."""


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The whole document: {"traceEvents": [...], "otherData": {...}, "displayTimeUnit": "ns"}.

    Slower and larger than `write_chrome`; for traces that fit in memory several times.
    """
    document: dict[str, Any] = json.loads("".join(_document(trace, None)))
    return document


def write_chrome(trace: Trace, path: str | PathLike[str], progress: Progress | None = None) -> Path:
    """Write the document to `path`, replacing what is there, and return the path. OSError as `open` raises it.

    progress is called with (events written, events in all), once for each kind of event.
    """
    target = Path(path)
    with target.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(_document(trace, progress))
    return target


def _document(trace: Trace, progress: Progress | None) -> Iterator[str]:
    """The JSON text, piece by piece."""
    view = _View(trace)
    yield f'{{"displayTimeUnit":"ns","otherData":{_json(_other_data(view))},\n"traceEvents":[\n'
    yield ",\n".join(_metadata(view))
    done = 0
    for count, lines in _groups(view):
        for chunk in _chunks(lines):
            yield ",\n" + chunk
        done += count
        if progress is not None and count:
            progress(done, len(trace.events))
    yield "\n]}\n"


def _chunks(lines: Lines) -> Iterator[str]:
    rest = iter(lines)
    while chunk := list(islice(rest, CHUNK)):
        yield ",\n".join(chunk)


def _groups(view: _View) -> Iterator[tuple[int, Lines]]:
    """All events but the metadata, as (events of the trace that these lines say for the first time, lines)."""
    yield from _slices(view)
    yield from _instants(view)
    yield from _flows(view)
    yield 0, _in_flight(view)
    yield 0, _counters(view)
    yield 0, _attached(view)


def _other_data(view: _View) -> dict[str, Any]:
    """What the document says of itself: where it comes from, and what it lacks."""
    trace = view.trace
    return {
        "source": str(trace.path),
        "clock": "CLOCK_MONOTONIC minus first_event_ns",
        "first_event_ns": view.start,
        "manifest": trace.manifest,
        "loaders": trace.loaders,
        "problems": trace.problems + view.guests.problems,
        "attachments": {one.name: one.about for one in trace.attachments},
        "counters": COUNTERS,
    }


# --- What is where ----------------------------------------------------------------------------------------------------
class _View:
    """The trace, and what several parts of the export need to know of it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events: Rows = trace.events
        self.start = int(self.events["time"][0]) if len(self.events) else 0
        self.pids = _distinct_pids(trace.processes)
        self.home = self._homes()
        self.of_rank = Counter(trace.processes[process].rank for process in self.home.values())
        self.lanes: dict[tuple[int, int, int], int] = {}  # (process, tid, loader) -> number of the consumer's track

    def pick(self, *codes: int) -> Rows:
        """The events with one of the codes, in time order."""
        return self.events[np.isin(self.events["code"], codes)]

    def _homes(self) -> dict[int, int]:
        """loader -> the process that iterates over it."""
        rows = self.pick(ev.EPOCH[0], ev.EPOCH[1], ev.INDEX_PUT, ev.NEXT[0], ev.YIELD)
        loaders, first = np.unique(rows["loader"], return_index=True)
        return dict(zip(loaders.tolist(), rows["process"][first].tolist(), strict=True))

    def owner(self, loader: int, worker: int) -> int:
        """The process of the loader's worker, or the loader's own where the worker left no trace."""
        for index, process in enumerate(self.trace.processes):
            if process.role == "worker" and process.loader == loader and process.worker == worker:
                return index
        return self.home.get(loader, 0)

    def of(self, what: str, loader: int) -> str:
        """`what`, with the loader's number before it where there are several loaders."""
        return f"loader {loader}: {what}" if self.several(self.home.get(loader, 0)) else what

    def several(self, process: int) -> bool:
        """Does the process's rank have several loaders?"""
        return bool(self.trace.processes) and self.of_rank[self.trace.processes[process].rank] > 1

    def lane(self, process: int, tid: int, loader: int) -> int:
        """The pseudo-thread of the loader's consumer in that thread."""
        return self.lanes.setdefault((process, tid, loader), PSEUDO_TID + len(self.lanes))

    @cached_property
    def spans(self) -> Rows:
        return self.trace.spans()

    @cached_property
    def scene(self) -> Scene:
        """What every view draws."""
        return scene(self.trace)

    @cached_property
    def fate(self) -> Ints:
        """How each span ends: a `lanes.Fate`."""
        out = np.zeros(len(self.spans), np.int64)
        out[self.scene.bars["span"]] = self.scene.bars["fate"]
        return out

    @cached_property
    def drawn(self) -> Ints:
        """Where each span is drawn to end, ns, so that spans nest on their track; -1 = not at all."""
        spans, bars = self.spans.copy(), self.scene.bars
        at_the_edge = (bars["fate"] != Fate.ENDED) & (bars["end"] >= self.scene.end)
        spans["end"][bars["span"]] = np.where(at_the_edge, -1, bars["end"] + self.start)
        return nest(spans, self._tracks())[0]

    def _tracks(self) -> Ints:
        """A number for the track that each span is drawn on."""
        spans = self.spans
        consumer = np.isin(spans["code"], [c for c, e in EVENTS.items() if e.track is Track.CONSUMER])
        lane = np.where(consumer, spans["loader"].astype(np.int64) + 2, spans["code"] == ev.EPOCH[0])
        track: Ints = (spans["process"].astype(np.int64) << 49) | (lane << 32) | spans["tid"]
        return track

    @cached_property
    def guests(self) -> _Guests:
        return _Guests(self)

    @cached_property
    def batches(self) -> _Batches:
        return _Batches.of(self)


def _distinct_pids(processes: list[Process]) -> list[int]:
    """A number for each process: its pid, unless an earlier process had the same one."""
    out: list[int] = []
    for process in processes:
        out.append(process.pid if process.pid not in out else PSEUDO_TID + len(out))
    return out


def nest(spans: Rows, track: Ints) -> tuple[Ints, Ints]:
    """An end for each span no later than that of the span around it, and which one that is, both among `spans`' track.

    spans: array of SPAN; track: a number for each. The end is -1 where neither has one; around is -1 for an outer span.
    """
    never = np.iinfo(np.int64).max
    ends = np.where(spans["end"] < 0, never, spans["end"])
    order = np.lexsort((-ends, spans["begin"], track))
    end: list[int] = ends.tolist()
    parent = [-1] * len(end)
    around: list[int] = []
    on = -1
    for i, lane, begin in zip(order.tolist(), track[order].tolist(), spans["begin"][order].tolist(), strict=True):
        if lane != on:
            on, around = lane, []
        while around and end[around[-1]] <= begin:
            around.pop()
        if around:
            parent[i] = around[-1]
            end[i] = min(end[i], end[around[-1]])
        around.append(i)
    until = np.array(end, np.int64)
    return np.where(until == never, -1, until), np.array(parent, np.int64)


@dataclass(frozen=True)
class _Batches:
    """The batches that were sent to a worker; a batch is a task of one epoch, since task numbers begin again."""

    view: _View
    puts: Rows  # the index_put of each
    keys: Ints  # (loader, task) of each, as one number, sorted; a search tree together with `rows`
    rows: Ints  # its position in the trace
    order: Ints  # the batch that keys[i] and rows[i] belong to
    end: Ints  # ns; -1 where it is still in flight when the trace ends
    how: list[str]  # why it ended there

    @classmethod
    def of(cls, view: _View) -> _Batches:
        at = np.flatnonzero(view.events["code"] == ev.INDEX_PUT)
        puts = view.events[at]
        keys = _key(puts)
        order = np.lexsort((at, keys))
        none = np.full(len(puts), -1, np.int64)
        batches = cls(view, puts, keys[order], at[order], order, none, ["did not end"] * len(puts))
        batches._close()
        return batches

    def _close(self) -> None:
        """Find what ended each batch: its yield, its worker's exhaustion, or the end of the epoch."""
        enders = self.view.pick(ev.YIELD, ev.WORKER_EXHAUSTED)
        for batch, row in zip(self.find(enders, enders["time"]).tolist(), enders, strict=True):
            if batch >= 0 and self.end[batch] < 0:
                self.end[batch] = row["time"]
                self.how[batch] = EVENTS[int(row["code"])].name
        for row in self.view.pick(ev.EPOCH[1]):
            mine = (self.puts["loader"] == row["loader"]) & (self.puts["time"] < row["time"]) & (self.end < 0)
            for batch in np.flatnonzero(mine).tolist():
                self.end[batch] = row["time"]
                self.how[batch] = "given up: the epoch ended"

    def find(self, rows: Rows, times: Ints, task: str = "task") -> Ints:
        """The batch that each event or span is about: the last one sent with its loader and task; -1 = none."""
        known, rank = np.unique(self.keys, return_inverse=True)
        out = np.full(len(rows), -1, np.int64)
        if not len(known):
            return out
        size = len(self.view.events) + 1
        wanted = _key(rows, task)
        place = np.clip(np.searchsorted(known, wanted), 0, len(known) - 1)
        exists = (known[place] == wanted) & (rows[task] >= 0)
        row = np.searchsorted(self.view.events["time"], times, side="right")
        last = np.searchsorted(rank * size + self.rows, place * size + row) - 1
        exists &= (last >= 0) & (rank[last] == place)
        out[exists] = self.order[last[exists]]
        return out


def _key(rows: Rows, task: str = "task") -> Ints:
    key: Ints = (rows["loader"].astype(np.int64) << 44) | rows[task]
    return key


# --- Names of processes and threads -----------------------------------------------------------------------------------
def process_titles(trace: Trace) -> list[str]:
    """Name and pid of each process, as the viewer titles them: the loaders' own, what guests saw, then the workers."""
    view = _View(trace)
    order = sorted(range(len(trace.processes)), key=lambda i: (*_rank(trace.processes[i]), i))
    titles = [f"{_process_name(view, i)} {view.pids[i]}" for i in order]
    workers = sum(process.worker >= 0 for process in trace.processes)
    titles[len(titles) - workers : len(titles) - workers] = [f"{t} {pid}" for t, pid in view.guests.processes.items()]
    return titles


def _rank(process: Process) -> tuple[int, bool, int, int]:
    """Where a process belongs; one that runs several loaders knows only the last one's number."""
    return process.rank, process.worker >= 0, process.loader, process.worker


def _metadata(view: _View) -> list[str]:
    out = []

    def name(kind: str, pid: int, tid: int, **args: object) -> None:
        out.append(_json({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}))

    fed = _index_feeders(view)
    ranks = sorted({_rank(process) for process in view.trace.processes})
    for index, (pid, process) in enumerate(zip(view.pids, view.trace.processes, strict=True)):
        name("process_name", pid, 0, name=_process_name(view, index))
        name("process_sort_index", pid, 0, sort_index=ranks.index(_rank(process)))
        if process.note:
            name("process_labels", pid, 0, labels=process.note)
        for (owner, tid), thread in view.trace.threads.items():
            if owner == process.pid:
                name("thread_name", pid, tid, name=fed.get((index, tid), thread))
    for process_index, tid, loader in _consumers(view):
        lane = view.lane(process_index, tid, loader)
        name("thread_name", view.pids[process_index], lane, name=view.of("consumer", loader))
    for title, pid in view.guests.processes.items():
        name("process_name", pid, 0, name=title)
    for drawn in view.guests.drawn:
        for pid, tid, title in drawn.threads:
            name("thread_name", pid, tid, name=title)
    return out


def _process_name(view: _View, index: int) -> str:
    process, rank = view.trace.processes[index], view.trace.manifest.get("rank")
    what = process.role if process.worker < 0 else f"{process.role} {process.worker}"
    if view.several(index) and process.worker >= 0:
        what += f" of loader {process.loader}"
    if process.rank >= 0:
        return f"rank {process.rank} \N{MIDDLE DOT} {what}"
    return what if rank is None else f"{what} (rank {rank})"


def _index_feeders(view: _View) -> dict[tuple[int, int], str]:
    """(process, tid) -> name of the threads that feed index queues: multiprocessing names all of them the same."""
    spans = view.spans[view.spans["code"] == ev.INDEX_WRITE[0]]
    keys = np.stack([spans[name].astype(np.int64) for name in ("process", "tid", "loader", "worker")], axis=1)
    return {
        (process, tid): view.of(f"feeder to worker {worker}", loader)
        for process, tid, loader, worker in np.unique(keys, axis=0).tolist()
        if worker >= 0
    }


def _consumers(view: _View) -> list[tuple[int, int, int]]:
    spans = view.spans[view.spans["code"] == ev.CONSUMER[0]]
    found = np.unique(np.stack([spans["process"], spans["tid"], spans["loader"]], axis=1).astype(np.int64), axis=0)
    return [tuple(row) for row in found.tolist()]


# --- Slices and instants ----------------------------------------------------------------------------------------------
def _slices(view: _View) -> Iterator[tuple[int, Lines]]:
    """Every span: an X slice, or a B where it goes on to the trace's end. What has no end says why in its name."""
    for code in np.unique(view.spans["code"]).tolist():
        event, end = EVENTS[code], EVENTS[code + 1]
        for name, mine in _titles(view, event, view.spans["code"] == code):
            rows, until, fate = view.spans[mine], view.drawn[mine], view.fate[mine]
            ended = rows["end"] >= 0
            if code == ev.EPOCH[0]:
                yield int(len(rows) + ended.sum()), _epochs(view, rows)
                continue
            yield 2 * int(ended.sum()), _closed(view, name, event, rows[ended], until[ended], end)
            for kind, words in FATES.items():
                left = fate == kind
                said = f"{name} ({words})"
                stops, goes_on = left & (until >= 0), left & (until < 0)
                yield int(stops.sum()), _closed(view, said, event, rows[stops], until[stops], None)
                yield int(goes_on.sum()), _open(view, said, event, rows[goes_on])


def _titles(view: _View, event: Event, mine: Mask) -> Iterator[tuple[str, Mask]]:
    """The names of the event's spans: the user's own, where the event carries one."""
    for name, rows in _names(event, view.spans, mine, ("bx", "by", "bz")):
        if not (event.fields and event.fields[0].unit == "string"):
            yield name, rows
            continue
        texts = np.stack([view.spans["process"][rows], view.spans["bx"][rows]], axis=1).astype(np.int64)
        for process, text in np.unique(texts, axis=0).tolist():
            title = name.replace(event.name, view.trace.strings.get((process, text)) or event.name)
            yield title, rows & (view.spans["process"] == process) & (view.spans["bx"] == text)


def _names(event: Event, rows: Rows, mine: Mask, columns: tuple[str, str, str]) -> Iterator[tuple[str, Mask]]:
    """The name to draw the event's rows under, and which rows: what was simulated says so in its name."""
    fields = [field.name for field in event.fields]
    if "simulated" not in fields:
        yield event.name, mine
        return
    simulated = rows[columns[fields.index("simulated")]] != 0
    yield event.name, mine & ~simulated
    yield f"{event.name} (simulated)", mine & simulated


def _closed(view: _View, name: str, event: Event, rows: Rows, until: Ints, end: Event | None) -> Lines:
    args = _Args(view, event)
    args.add_span(rows, end)
    columns = [*_where(view, event, rows), *_us(rows["begin"] - view.start), *_us(until - rows["begin"])]
    return args.lines({"ph": "X", "name": name, **_AT, "dur": _US}, columns)


def _open(view: _View, name: str, event: Event, rows: Rows) -> Lines:
    args = _Args(view, event)
    args.add_span(rows, None)
    columns = [*_where(view, event, rows), *_us(rows["begin"] - view.start)]
    return args.lines({"ph": "B", "name": name, **_AT}, columns)


def _instants(view: _View) -> Iterator[tuple[int, Lines]]:
    """Every instant; those that a batch's arrows start from or end at as short slices."""
    codes = view.events["code"]
    length = _room(view.events)
    for code in np.unique(codes).tolist():
        event = EVENTS[code]
        if event.phase is not Phase.INSTANT:
            continue
        for name, mine in _names(event, view.events, codes == code, ("x", "y", "z")):
            rows = view.events[mine]
            args = _Args(view, event)
            args.add_fields(rows, event, "xyz")
            columns = [*_where(view, event, rows), *_us(rows["time"] - view.start)]
            if code in (ev.INDEX_PUT, ev.YIELD):
                yield len(rows), args.lines({"ph": "X", "name": name, **_AT, "dur": _US}, columns + _us(length[mine]))
            else:
                yield len(rows), args.lines({"ph": "i", "s": "t", "name": name, **_AT}, columns)


def _arrivals(view: _View, spans: Rows) -> Lines:
    """The last moments of the waits that bring a pinned batch: a slice for the batch's arrow to point at.

    The wait itself begins before its batch is pinned, and the viewer lets no arrow point backwards in time.
    """
    event = EVENTS[ev.READY_GET[1]]
    args = _Args(view, event)
    args.add_span(spans, event)
    length = np.minimum(spans["end"] - spans["begin"], ANCHOR_NS)
    columns = [*_where(view, event, spans), *_us(spans["end"] - length - view.start), *_us(length)]
    return args.lines({"ph": "X", "name": "arrived", **_AT, "dur": _US}, columns)


def _room(rows: Rows) -> Ints:
    """ns from each event to the next one of its thread, ANCHOR_NS at most."""
    order = np.lexsort((np.arange(len(rows)), rows["tid"], rows["process"]))
    out = np.full(len(rows), ANCHOR_NS, np.int64)
    process, tid, time = (rows[name][order] for name in ("process", "tid", "time"))
    same = (process[1:] == process[:-1]) & (tid[1:] == tid[:-1])
    gap = np.where(same, np.minimum(time[1:] - time[:-1], ANCHOR_NS), ANCHOR_NS)
    out[order[:-1]] = gap
    return out


def _where(view: _View, event: Event, rows: Rows) -> list[list[int]]:
    """The columns pid and tid."""
    pids = np.array(view.pids, np.int64)[rows["process"]].tolist()
    tids: list[int] = rows["tid"].tolist()
    if event.track is Track.CONSUMER:
        who = zip(rows["process"].tolist(), tids, rows["loader"].tolist(), strict=True)
        tids = [view.lane(*key) for key in who]
    return [pids, tids]


def _us(ns: Ints) -> list[list[int]]:
    """Two columns for "%d.%03d": whole microseconds, and the nanoseconds after the point."""
    return [(ns // 1000).tolist(), (ns % 1000).tolist()]


class _Args:
    """The "args" of all events of one kind: what is the same for all, and columns of what differs."""

    def __init__(self, view: _View, event: Event) -> None:
        self.view = view
        self.event = event
        self.columns: dict[str, list[str]] = {}

    def add_span(self, rows: Rows, end: Event | None) -> None:
        """The fields of spans' begins, overridden by those of `end` where it has the same ones.

        A wait's begin names the task that is needed next, its end the one that came.
        """
        if self.event.stage == "wait":
            self.add("awaited task", rows["task"])
            self.add("awaited worker", rows["worker"])
        rows = rows.copy()
        for key in ("task", "worker"):
            came = rows["end_" + key]
            rows[key] = came if self.event.stage == "wait" else np.where(came < 0, rows[key], came)
        self.add_fields(rows, self.event, ("bx", "by", "bz"))
        if end is not None:
            self.add_fields(rows, end, ("ex", "ey", "ez"))

    def add_fields(self, rows: Rows, event: Event, own: Iterable[str]) -> None:
        """Loader, task, worker, and the event's own fields."""
        if len(self.view.home) > 1:
            self.add("loader", rows["loader"])
        if event.has_task:
            self.add("task", rows["task"])
        if event.has_worker:
            self.add("worker", rows["worker"])
        for field, column in zip(event.fields, own, strict=False):
            key = f"{field.name} [{field.unit}]" if field.unit and field.unit != "string" else field.name
            self.columns[key] = self._words(field, rows, column)

    def add(self, key: str, values: Ints) -> None:
        """A column of numbers, -1 standing for none."""
        self.columns[key] = ["null" if v == -1 else str(v) for v in values.tolist()]

    def _words(self, field: Field, rows: Rows, column: str) -> list[str]:
        values: list[int] = rows[column].tolist()
        if field.unit == "string":
            texts = self.view.trace.strings
            keys = zip(rows["process"].tolist(), values, strict=True)
            return [_json(texts.get(key, "")) for key in keys]
        if field.enum is None:
            return [str(v) for v in values]
        words = {v: _json(_word(field, v)) for v in set(values)}
        return [words[v] for v in values]

    def lines(self, event: dict[str, object], columns: list[list[int]]) -> Lines:
        """One JSON object an event: `event` with its holes filled from `columns`, then the args."""
        args = {**dict.fromkeys(self.columns, _ANY), **_about(self.event)}
        template = _template({**event, "cat": self.event.track.value, "args": args})
        return map(template.__mod__, zip(*columns, *self.columns.values(), strict=True))


_INT, _US, _ANY = "%d", "%d.%03d", "%s"
"""Holes in a template: an integer, microseconds in two columns, ready-made JSON."""

_AT: Final = {"pid": _INT, "tid": _INT, "ts": _US}


def _json(value: object) -> str:
    """JSON in as few characters as it takes; not ASCII only, since the viewer shows \\u escapes as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _template(event: dict[str, object]) -> str:
    """The event as JSON and as a "%" format: each value that is a hole stays one, every other "%" is itself."""
    text = _json(event).replace("%", "%%")
    for hole in (_INT, _US, _ANY):
        text = text.replace(_json(hole).replace("%", "%%"), hole)
    return text


def _word(field: Field, value: int) -> str | int:
    """The value, in words where it is of an enumeration and known to it."""
    names = {int(m): m.name.lower() for m in field.enum or ()}
    return names.get(value, value)


def _about(event: Event) -> dict[str, str]:
    """What the table says of an event."""
    about = {"meaning": event.meaning, "ours": event.ours, "upstream": event.upstream, "article": event.article}
    return {key: text for key, text in about.items() if text}


# --- Async slices: epochs and batches ---------------------------------------------------------------------------------
def _async(phase: str, name: str, number: str, pid: int, ns: int, args: dict[str, object] | None = None) -> str:
    where = {"pid": pid, "tid": pid, "ts": ns / 1000}
    return _json({"ph": phase, "cat": "loader", "name": name, "id2": {"local": number}, **where, "args": args or {}})


def _epochs(view: _View, rows: Rows) -> Iterator[str]:
    event, end = EVENTS[ev.EPOCH[0]], EVENTS[ev.EPOCH[1]]
    for number, row in enumerate(rows):
        ended = row["end"] >= 0
        args: dict[str, object] = {f.name: int(row[c]) for f, c in zip(event.fields, ("bx", "by", "bz"), strict=False)}
        for field, column in zip(end.fields, ("ex", "ey", "ez"), strict=False):
            args[field.name] = _word(field, int(row[column])) if ended else "did not end"
        pid, name = view.pids[row["process"]], view.of("epoch", int(row["loader"]))
        yield _async("b", name, f"e{number}", pid, int(row["begin"]) - view.start, {**args, **_about(event)})
        if ended:
            yield _async("e", name, f"e{number}", pid, int(row["end"]) - view.start)


def _in_flight(view: _View) -> Iterator[str]:
    """From index_put to yield, a slice for each batch, in as many rows as there are batches under way at once."""
    batches = view.batches
    for number, (put, end, how) in enumerate(zip(batches.puts, batches.end.tolist(), batches.how, strict=True)):
        pid, name = view.pids[put["process"]], view.of("batch in flight", int(put["loader"]))
        args: dict[str, object] = {"task": int(put["task"]), "worker": int(put["worker"]), "ended by": how}
        yield _async("b", name, f"b{number}", pid, int(put["time"]) - view.start, args)
        if end >= 0:
            yield _async("e", name, f"b{number}", pid, end - view.start)


# --- Flows: a batch's way through the processes -----------------------------------------------------------------------
def _flows(view: _View) -> Iterator[tuple[int, Lines]]:
    """A flow for each batch, from its index_put over `lanes.WAY` to its yield, or to the device that waits for it.

    With the slices that are made for it alone.
    """
    brings = (view.spans["code"] == ev.READY_GET[0]) & (view.spans["ex"] == Message.RESULT) & (view.spans["end"] >= 0)
    ready = view.spans[brings]
    yield 0, _arrivals(view, ready)
    batch, time, process, tid = _steps(view)
    order = np.lexsort((time, batch))
    order = order[batch[order] >= 0]
    new = np.ones(len(order) + 1, bool)
    new[1:-1] = batch[order][1:] != batch[order][:-1]
    first, last = new[:-1], new[1:]
    joined = order[~(first & last)]
    phase = np.where(first, '"s"', np.where(last, '"f"', '"t"'))[~(first & last)].tolist()
    pids = np.array(view.pids, np.int64)[process[joined]].tolist()
    columns = [batch[joined].tolist(), pids, tid[joined].tolist(), *_us(time[joined] - view.start)]
    line = _template({"ph": _ANY, "bp": "e", "cat": "batch", "name": "batch", "id": _INT, **_AT})
    yield 0, map(line.__mod__, zip(phase, *columns, strict=True))


def _steps(view: _View) -> list[Ints]:
    """The places that batches pass: batch, time, process, tid."""
    parts = []
    for rows, stops in (
        (view.spans, view.scene.stops[view.scene.stops["span"] >= 0]),
        (view.events, view.scene.stops[view.scene.stops["event"] >= 0]),
    ):
        mine = rows[stops["span"] if rows is view.spans else stops["event"]]
        late = np.isin(stops["code"], AT_END)  # inside the slice, not after it
        time = stops["begin"] + view.start
        time = np.where(late, np.maximum(time - 1, mine["begin"] if rows is view.spans else time), time)
        parts.append((stops["batch"], time, mine["process"], _tids(view, mine)))
    return [np.concatenate([np.asarray(part, np.int64) for part in column]) for column in zip(*parts, strict=True)]


def _tids(view: _View, rows: Rows) -> list[int]:
    """The thread that each row is drawn on."""
    consumes = np.isin(rows["code"], [code for code, event in EVENTS.items() if event.track is Track.CONSUMER])
    where = zip(rows["process"].tolist(), rows["tid"].tolist(), rows["loader"].tolist(), consumes.tolist(), strict=True)
    return [view.lane(process, tid, loader) if lane else tid for process, tid, loader, lane in where]


# --- Counters ---------------------------------------------------------------------------------------------------------
def _counters(view: _View) -> Iterator[str]:
    for loader, process in view.home.items():
        pid = view.pids[process]
        for name, unit, steps in (
            ("send_idx", "", _values(view, loader, {ev.TASK_ASSIGNED: "x"})),
            ("rcvd_idx", "", _values(view, loader, {ev.RCVD_ADVANCE: "x"})),
            ("tasks", "outstanding", outstanding(view.events[view.events["loader"] == loader])),
            ("reorder buffer", "batches", _values(view, loader, {ev.REORDER_STORE: "y", ev.REORDER_POP: "y"})),
            ("in flight", "bytes", _bytes_in_flight(view, loader)),
        ):
            yield from _count(view, pid, loader, name, unit, steps)
    yield from _queues(view, "index queue", "tasks", ev.INDEX_PUT, ev.INDEX_GET[1], Message.TASK)
    yield from _queues(view, "result queue", "batches", ev.RESULT_PUT, ev.RESULT_GET[1], Message.RESULT)


def _count(view: _View, pid: int, loader: int, name: str, unit: str, steps: tuple[Ints, Ints]) -> Lines:
    """A counter's lines; the viewer shows it as "name unit"."""
    times, values = steps
    event = {"ph": "C", "cat": "loader", "name": view.of(name, loader), "pid": pid, "tid": pid, "ts": _US}
    line = _template({**event, "args": {unit: _INT}})
    return map(line.__mod__, zip(*_us(times - view.start), values.tolist(), strict=True))


def _values(view: _View, loader: int, columns: dict[int, str]) -> tuple[Ints, Ints]:
    """Times and values of a counter that is an event's own field; 0 when an epoch begins."""
    rows = view.pick(*columns, ev.EPOCH[0])
    rows = rows[rows["loader"] == loader]
    values = np.zeros(len(rows), np.int64)
    for code, column in columns.items():
        mine = rows["code"] == code
        values[mine] = rows[column][mine]
    return rows["time"], values


def _sums(times: Ints, changes: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(changes[order])


def _bytes_in_flight(view: _View, loader: int) -> tuple[Ints, Ints]:
    rows = view.pick(ev.SHM_ALLOC, ev.RESULT_PICKLE[1])
    rows = rows[rows["loader"] == loader]
    made = np.where(rows["code"] == ev.SHM_ALLOC, rows["x"] * (rows["y"] == Place.COLLATE), rows["x"] + rows["z"])
    rows, made = rows[made > 0], made[made > 0]
    batch = view.batches.find(rows, rows["time"])
    end = view.batches.end
    there = (batch >= 0) & ((end[batch] < 0) | (rows["time"] <= end[batch])) if len(end) else np.zeros(len(rows), bool)
    total = np.zeros(len(end), np.int64)
    np.add.at(total, batch[there], made[there])
    gone = (end >= 0) & (view.batches.puts["loader"] == loader)
    return _sums(np.concatenate([rows["time"][there], end[gone]]), np.concatenate([made[there], -total[gone]]))


def _queues(view: _View, name: str, unit: str, put: int, got: int, message: Message) -> Iterator[str]:
    """A counter for each worker: what was put, and not yet received."""
    puts, gets = view.pick(put), view.pick(got)
    gets = gets[gets["x"] == message]
    rows = np.concatenate([puts, gets])
    changes = np.concatenate([np.ones(len(puts), np.int64), np.full(len(gets), -1, np.int64)])
    who = np.stack([rows["loader"], rows["worker"]], axis=1).astype(np.int64)
    for loader, worker in np.unique(who, axis=0).tolist():
        mine = (rows["loader"] == loader) & (rows["worker"] == worker)
        owner = view.owner(loader, worker)
        title = name if owner != view.home.get(loader) else f"{name} of worker {worker}"
        steps = _sums(rows["time"][mine], changes[mine])
        yield from _count(view, view.pids[owner], loader, title, unit, steps)


# --- Guests: what other recorders saw ---------------------------------------------------------------------------------
GUEST_IDS: Final = PSEUDO_TID << 1
"""From here on, numbers of guests' tracks, of processes that only they know (a GPU), and of their arrows."""

_SAYS: Final = {"functions": ("functions", "defined at"), "profiler": ("operators", "category")}
"""What is on a guest's track, and what a name's `about` is, by kind of attachment."""


@dataclass(frozen=True)
class _Drawn:
    """The slices of all attachments of one kind. rows: of `slices`, those shown, in time order."""

    kind: str
    slices: Slices
    rows: Ints
    begin: Ints  # since the view's start, as are the ends
    end: Ints
    pids: Ints
    tids: Ints
    threads: list[tuple[int, int, str]]  # pid, tid, title


class _Guests:
    """The trace's attachments, and where they are drawn."""

    def __init__(self, view: _View) -> None:
        self.view = view
        self.attachments: list[Attachment] = view.trace.attachments
        self.kinds = {
            one.kind: _joined([a for a in self.attachments if a.kind == one.kind]) for one in self.attachments
        }
        self.not_drawn: list[str] = []
        self.processes: dict[str, int] = {}  # title -> pid, of processes that only a guest knows
        self.pids = {kind: [self._pid(kind, track) for track in joined.tracks] for kind, joined in self.kinds.items()}
        self.tids: dict[tuple[str, GuestTrack, int], int] = {}

    def _pid(self, kind: str, track: GuestTrack) -> int:
        """The process that a track is drawn in."""
        for pid, process in zip(self.view.pids, self.view.trace.processes, strict=True):
            if process.pid == track.pid and not track.group:
                return pid
        title = f"{track.group or f'process {track.pid}'} ({kind})"
        return self.processes.setdefault(title, GUEST_IDS + len(self.processes))

    @property
    def problems(self) -> list[str]:
        """What the attachments lack, and what of them is not drawn."""
        drawn = self.drawn  # which finds what cannot be
        return [problem for one in self.attachments for problem in one.problems] + (self.not_drawn if drawn else [])

    @cached_property
    def drawn(self) -> list[_Drawn]:
        return [self._draw(kind, joined) for kind, joined in self.kinds.items()]

    def _draw(self, kind: str, joined: Slices) -> _Drawn:
        start = self.view.start
        lane, end = lanes(joined.rows)
        early = (end <= start) & (joined.rows["begin"] < start)
        for what, count in (("overlap too deeply", (lane < 0).sum()), ("end before the first event", early.sum())):
            if count:
                self.not_drawn.append(f"{kind}: {count} slices {what} and are not drawn")
        rows = np.flatnonzero((lane >= 0) & ~early)
        rows = rows[np.argsort(joined.rows["begin"][rows], kind="stable")]
        track = joined.rows["track"][rows]
        found = np.unique(np.stack([track, lane[rows]], axis=1), axis=0).tolist()
        tids = {(t, n): self._tid(kind, joined.tracks[t], n) for t, n in found}
        return _Drawn(
            kind,
            joined,
            rows,
            np.maximum(joined.rows["begin"][rows] - start, 0),
            end[rows] - start,
            np.array(self.pids[kind] or [0], np.int64)[track],
            np.array([tids[key] for key in zip(track.tolist(), lane[rows].tolist(), strict=True)], np.int64),
            [(self.pids[kind][t], tids[t, n], self._title(kind, joined.tracks[t], n)) for t, n in found],
        )

    def _tid(self, kind: str, track: GuestTrack, lane: int) -> int:
        return self.tids.setdefault((kind, track, lane), GUEST_IDS + len(self.processes) + len(self.tids))

    def _title(self, kind: str, track: GuestTrack, lane: int) -> str:
        known = None if track.group or kind != "functions" else self.view.trace.threads.get((track.pid, track.tid))
        what = "" if track.group else f"{_SAYS.get(kind, (kind, ''))[0]}: "
        return f"{what}{known or track.title}{f' ({lane + 1})' if lane else ''}"


def _joined(parts: list[Attachment]) -> Slices:
    """The slices of several attachments as those of one."""
    if len(parts) == 1:
        return parts[0].slices
    tracks: dict[GuestTrack, int] = {}
    names: dict[Name, int] = {}
    out = Slices()
    rows = [out.rows]
    count = 0
    for slices in (part.slices for part in parts):
        mine = slices.rows.copy()
        mine["track"] = places(tracks, slices.tracks)[mine["track"]]
        mine["name"] = places(names, slices.names)[mine["name"]]
        out.args |= {count + row: args for row, args in slices.args.items()}
        out.arrows += [(count + a, count + b) for a, b in slices.arrows]
        rows.append(mine)
        count += len(mine)
    out.tracks, out.names, out.rows = list(tracks), list(names), np.concatenate(rows)
    return out


def _attached(view: _View) -> Lines:
    """The guests' slices, their arrows, and where one of them saw no more."""
    for drawn in view.guests.drawn:
        yield from _guest_slices(drawn)
        yield from _guest_arrows(view, drawn)
    yield from _guest_ends(view)


def _guest_slices(drawn: _Drawn) -> Lines:
    about = _SAYS.get(drawn.kind, ("", "about"))[1]
    slices, rows = drawn.slices, drawn.rows.tolist()
    names = [_json(name.name) for name in slices.names]
    same = [_json({about: name.about} if name.about else {}) for name in slices.names]
    which = slices.rows["name"][drawn.rows].tolist()
    args = [
        _json({about: slices.names[name].about} | slices.args[row]) if row in slices.args else same[name]
        for row, name in zip(rows, which, strict=True)
    ]
    line = _template({"ph": "X", "name": _ANY, "cat": drawn.kind, **_AT, "dur": _US, "args": _ANY})
    columns = [[names[n] for n in which], drawn.pids.tolist(), drawn.tids.tolist()]
    times = [*_us(drawn.begin), *_us(drawn.end - drawn.begin)]
    return map(line.__mod__, zip(*columns, *times, args, strict=True))


def _guest_arrows(view: _View, drawn: _Drawn) -> Lines:
    """From what asked for something to what it asked for, as from a launch to its kernel."""
    place = {row: n for n, row in enumerate(drawn.rows.tolist())} if drawn.slices.arrows else {}
    for number, ends in enumerate(drawn.slices.arrows):
        if ends[0] in place and ends[1] in place:
            for phase, n in zip("sf", (place[ends[0]], place[ends[1]]), strict=True):
                at = {"pid": int(drawn.pids[n]), "tid": int(drawn.tids[n]), "ts": int(drawn.begin[n]) / 1000}
                what = {"ph": phase, "bp": "e", "cat": drawn.kind, "name": "launch", "id": GUEST_IDS + number}
                yield _json({**what, **at})


def _guest_ends(view: _View) -> Lines:
    """An instant behind the last slice of each attachment that lacks something."""
    for one in view.guests.attachments:
        rows = one.slices.rows
        if not one.problems or not len(rows):
            continue
        last = int(np.argmax(rows["end"]))
        track = one.slices.tracks[int(rows["track"][last])]
        tid = view.guests.tids.get((one.kind, track, 0))
        if tid is not None:
            at = {
                "pid": view.guests._pid(one.kind, track),
                "tid": tid,
                "ts": int(rows["end"][last] - view.start) / 1000,
            }
            yield _json(
                {
                    "ph": "i",
                    "s": "t",
                    "name": f"{one.kind} lost",
                    "cat": one.kind,
                    **at,
                    "args": {"lacks": one.problems},
                }
            )
