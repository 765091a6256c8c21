"""A trace as Chrome trace JSON, the format of the Perfetto UI, chrome://tracing and viztracer's --combine.

Interface: `write_chrome(trace, path)` streams the document to a file; `to_chrome(trace)` returns it as a dict;
`process_titles(trace)` lists the processes as the Perfetto UI titles them.

A span with an end is an X slice. A span without one is a B without E, which fades to the right in the UI. An instant is
an i, but `index_put` and `yield` are slices of at most 2 us, since a batch's arrows begin and end there. A batch is one
flow across the processes, and one async slice "batch in flight" from its `index_put` to its `yield`. An epoch is an
async slice, and the consumer has a pseudo-thread for each iterator: two iterators that run together would otherwise
overlap in part, and the UI drops such slices. `COUNTERS` describes the counters. `attached` draws what other recorders
saw, on tracks of its own.

Times are microseconds since the first event, exact to the nanosecond. The UI picks its colours by name and ignores
`cname`, so the colours of `colours.paint` cannot be used there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Rows, distinct, starts
from minidl.tracefile.batches import (
    NEVER,
    Batches,
    Steps,
    bytes_in_flight,
    field_values,
    outstanding,
    reorder_depth,
    sums,
)
from minidl.tracefile.events import EVENTS, Event, Field, Message, Phase, Track
from minidl.tracefile.files import whole
from minidl.tracefile.spans import nest
from minidl.tracefile.words import value_of
from minidl.views.attached import Attached
from minidl.views.scene import AT_END, FATES, Fate, is_named, scene_of, simulated_column
from minidl.views.template import ANY, AT, INT, US, compact, filled, us

if TYPE_CHECKING:
    from os import PathLike

    from minidl.tracefile.process import Process
    from minidl.tracefile.reader import Trace

Lines = Iterable[str]

ANCHOR_NS: Final = 2_000
"""Longest slice that an instant is drawn as for arrows to start from; shorter if the thread's next event is near."""

PSEUDO_TID: Final = 1 << 22
"""Above every real thread and process number of Linux: from here on, numbers of tracks that are not threads."""

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

_CONSUMES: Final = [code for code, event in EVENTS.items() if event.track is Track.CONSUMER]

Progress = Callable[[int, int], None]
"""Called with the number of events written and the number of all events."""


def to_chrome(trace: Trace) -> dict[str, Any]:
    """Return the whole document: {"traceEvents": [...], "otherData": {...}, "displayTimeUnit": "ns"}.

    Slower and larger than `write_chrome`: for traces that fit into memory several times.
    """
    document: dict[str, Any] = json.loads("".join(_Export(trace).document(None)))
    return document


def write_chrome(trace: Trace, path: str | PathLike[str], progress: Progress | None = None) -> Path:
    """Write the document to `path`, replacing what is there, and return the path. Raises OSError as `open` does.

    progress is called after each kind of event.
    """
    target = Path(path)
    with whole(target) as draft, draft.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(_Export(trace).document(progress))
    return target


def process_titles(trace: Trace) -> list[str]:
    """Return name and pid of each process, as the UI titles them: loaders, processes of attachments, then workers."""
    export = _Export(trace)
    order = sorted(range(len(trace.processes)), key=lambda i: (*_rank(trace.processes[i]), i))
    titles = [f"{export.process_name(i)} {export.pids[i]}" for i in order]
    workers = sum(process.worker >= 0 for process in trace.processes)
    at = len(titles) - workers
    titles[at:at] = [f"{title} {pid}" for title, pid in export.attached.processes.items()]
    return titles


def _rank(process: Process) -> tuple[int, bool, int, int]:
    """Return the key that processes are sorted by. One that runs several iterators knows only the last one's number."""
    return process.rank, process.worker >= 0, process.loader, process.worker


class _Export:
    """One document in the making."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events: Rows = trace.events
        self.start = int(self.events["time"][0]) if len(self.events) else 0
        self.pids: list[int] = []
        for process in trace.processes:  # a number for each: its pid, unless an earlier process had the same one
            self.pids.append(process.pid if process.pid not in self.pids else PSEUDO_TID + len(self.pids))
        rows = self.pick(ev.EPOCH[0], ev.EPOCH[1], ev.INDEX_PUT, ev.NEXT[0], ev.YIELD)
        loaders, first = np.unique(rows["loader"], return_index=True)
        self.home: dict[int, int] = dict(zip(loaders.tolist(), rows["process"][first].tolist(), strict=True))
        """Number of an iterator -> the process that runs it."""
        self._iterators = Counter(trace.processes[process].rank for process in self.home.values())
        self._tracks: dict[tuple[int, int, int], int] = {}  # (process, tid, loader) -> the consumer's pseudo-thread

    def pick(self, *codes: int) -> Rows:
        """Return the events with one of the codes, in time order."""
        return self.events[np.isin(self.events["code"], codes)]

    def named(self, what: str, loader: int) -> str:
        """Return `what`, with the iterator's number before it if the rank has several iterators."""
        return f"iterator {loader}: {what}" if self._is_one_of_several(self.home.get(loader, 0)) else what

    def _is_one_of_several(self, process: int) -> bool:
        return bool(self.trace.processes) and self._iterators[self.trace.processes[process].rank] > 1

    def _track(self, process: int, tid: int, loader: int) -> int:
        """Return the pseudo-thread of an iterator's consumer in that thread."""
        return self._tracks.setdefault((process, tid, loader), PSEUDO_TID + len(self._tracks))

    @cached_property
    def attached(self) -> Attached:
        return Attached(self.trace, self.pids, self.start)

    @cached_property
    def batches(self) -> Batches:
        return Batches(self.events)

    def document(self, progress: Progress | None) -> Iterator[str]:
        """Yield the JSON text, piece by piece."""
        self.scene = scene_of(self.trace)
        self.bars: Rows = self.scene.bars[np.argsort(self.scene.bars["span"])]
        self.spans: Rows = self.scene.spans[self.bars["span"]]  # of polls that continue one wait, the last
        self.spans["begin"] = self.bars["begin"] + self.start
        yield f'{{"displayTimeUnit":"ns","otherData":{compact(self._other_data())},\n"traceEvents":[\n'
        yield ",\n".join(self._metadata())
        done = 0
        for count, lines in self._groups():
            rest = iter(lines)
            while chunk := list(islice(rest, CHUNK)):
                yield ",\n" + ",\n".join(chunk)
            done += count
            if progress is not None and count:
                progress(done, len(self.events))
        yield "\n]}\n"

    def _groups(self) -> Iterator[tuple[int, Lines]]:
        """Yield all lines but the metadata, in groups: how many of the trace's events a group writes first, lines."""
        yield 2 * (len(self.scene.spans) - len(self.spans)), ()
        yield from self._slices()
        yield from self._instants()
        for lines in (self._arrivals(), self._flows(), self._in_flight(), self._counters(), self.attached.lines()):
            yield 0, lines

    def _other_data(self) -> dict[str, Any]:
        """Return what the document says about itself: where it comes from, and what is missing."""
        return {
            "source": str(self.trace.path),
            "clock": "CLOCK_MONOTONIC minus first_event_ns",
            "first_event_ns": self.start,
            "manifest": self.trace.manifest,
            "loaders": self.trace.loaders,
            "problems": self.trace.problems + self.attached.problems,
            "attachments": {one.name: one.about for one in self.trace.attachments},
            "counters": COUNTERS,
        }

    # --- Names of processes and threads
    def _metadata(self) -> list[str]:
        out = []

        def name(kind: str, pid: int, tid: int, **args: object) -> None:
            out.append(compact({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}))

        feeders = self._index_feeders()
        ranks = sorted({_rank(process) for process in self.trace.processes})
        for index, (pid, process) in enumerate(zip(self.pids, self.trace.processes, strict=True)):
            name("process_name", pid, 0, name=self.process_name(index))
            name("process_sort_index", pid, 0, sort_index=ranks.index(_rank(process)))
            if process.note:
                name("process_labels", pid, 0, labels=process.note)
            for (owner, tid), thread in self.trace.threads.items():
                if owner == process.pid:
                    name("thread_name", pid, tid, name=feeders.get((index, tid), thread))
        for index, tid, loader in distinct(self._spans_of(ev.CONSUMER[0]), "process", "tid", "loader"):
            track = self._track(index, tid, loader)
            name("thread_name", self.pids[index], track, name=self.named("consumer", loader))
        for title, pid in self.attached.processes.items():
            name("process_name", pid, 0, name=title)
        for pid, tid, title in self.attached.threads:
            name("thread_name", pid, tid, name=title)
        return out

    def process_name(self, index: int) -> str:
        process, rank = self.trace.processes[index], self.trace.manifest.get("rank")
        what = process.role if process.worker < 0 else f"{process.role} {process.worker}"
        if self._is_one_of_several(index) and process.worker >= 0:
            what += f" of iterator {process.loader}"
        if process.rank >= 0:
            return f"rank {process.rank} \N{MIDDLE DOT} {what}"
        return what if rank is None else f"{what} (rank {rank})"

    def _spans_of(self, code: int) -> Rows:
        rows: Rows = self.spans[self.spans["code"] == code]
        return rows

    def _index_feeders(self) -> dict[tuple[int, int], str]:
        """Return (process, tid) -> name of the threads that feed index queues: all have the same name in Python."""
        found = distinct(self._spans_of(ev.INDEX_WRITE[0]), "process", "tid", "loader", "worker")
        return {
            (process, tid): self.named(f"feeder to worker {worker}", loader)
            for process, tid, loader, worker in found
            if worker >= 0
        }

    # --- Slices and instants
    def _slices(self) -> Iterator[tuple[int, Lines]]:
        """Yield every span: as an X slice, or as a B if it is open at the trace's end. An open one's name says so."""
        fates, drawn = self.bars["fate"], self._drawn_ends()
        for code in np.unique(self.spans["code"]).tolist():
            event, end = EVENTS[code], EVENTS[code + 1]
            for name, mine in self._titles(event, self.spans["code"] == code):
                rows, until, fate = self.spans[mine], drawn[mine], fates[mine]
                ended = rows["end"] >= 0
                if code == ev.EPOCH[0]:
                    yield int(len(rows) + ended.sum()), self._epochs(rows)
                    continue
                yield 2 * int(ended.sum()), self._drawn(name, event, rows[ended], until[ended], end)
                for kind, words in FATES.items():
                    left = fate == kind
                    stops, stays = left & (until >= 0), left & (until < 0)
                    yield int(stops.sum()), self._drawn(f"{name} ({words})", event, rows[stops], until[stops], None)
                    yield int(stays.sum()), self._drawn(f"{name} ({words})", event, rows[stays], None, None)

    def _drawn_ends(self) -> Ints:
        """Return where each span is drawn to end, ns, so that spans nest on their track; -1 = at the trace's end."""
        spans, bars = self.spans.copy(), self.bars
        at_the_edge = (bars["fate"] != Fate.ENDED) & (bars["end"] >= self.scene.end)
        spans["end"] = np.where(at_the_edge, -1, bars["end"] + self.start)
        consumer = np.isin(spans["code"], _CONSUMES)
        lane = np.where(consumer, spans["loader"].astype(np.int64) + 2, spans["code"] == ev.EPOCH[0])
        return nest(spans, (spans["process"].astype(np.int64) << 49) | (lane << 32) | spans["tid"])[0]

    def _titles(self, event: Event, mine: Bools) -> Iterator[tuple[str, Bools]]:
        """Yield the names of the event's spans, and which spans: the user's own names if the event has one."""
        for name, rows in _names(event, self.spans, mine, "b"):
            if not is_named(event):
                yield name, rows
                continue
            for process, text in distinct(self.spans[rows], "process", "bx"):
                title = name.replace(event.name, self.trace.strings.get((process, text)) or event.name)
                yield title, rows & (self.spans["process"] == process) & (self.spans["bx"] == text)

    def _drawn(self, name: str, event: Event, rows: Rows, until: Ints | None, end: Event | None) -> Lines:
        """Return spans that begin with `event`: X slices up to `until`, or B events."""
        args = _Args(self, event)
        args.add_span(rows, end)
        columns = [*self._where(event, rows), *us(rows["begin"] - self.start)]
        if until is None:
            return args.lines({"ph": "B", "name": name, **AT}, columns)
        return args.lines({"ph": "X", "name": name, **AT, "dur": US}, columns + us(until - rows["begin"]))

    def _instants(self) -> Iterator[tuple[int, Lines]]:
        """Yield every instant; those that a batch's arrows start from or end at as short slices."""
        codes = self.events["code"]
        length = _room(self.events)
        for code in np.unique(codes).tolist():
            event = EVENTS[code]
            if event.phase is not Phase.INSTANT:
                continue
            for name, mine in _names(event, self.events, codes == code, ""):
                rows = self.events[mine]
                args = _Args(self, event)
                args.add_fields(rows, event, "xyz")
                columns = [*self._where(event, rows), *us(rows["time"] - self.start)]
                if code in (ev.INDEX_PUT, ev.YIELD):
                    yield len(rows), args.lines({"ph": "X", "name": name, **AT, "dur": US}, columns + us(length[mine]))
                else:
                    yield len(rows), args.lines({"ph": "i", "s": "t", "name": name, **AT}, columns)

    def _arrivals(self) -> Lines:
        """Return the last moments of the waits that bring a pinned batch: slices for the batch's arrow to point at.

        The wait itself begins before its batch is pinned, and the UI lets no arrow point backwards in time.
        """
        spans = self._spans_of(ev.READY_GET[0])
        spans = spans[(spans["ex"] == Message.RESULT) & (spans["end"] >= 0)]
        event = EVENTS[ev.READY_GET[1]]
        args = _Args(self, event)
        args.add_span(spans, event)
        length = np.minimum(spans["end"] - spans["begin"], ANCHOR_NS)
        columns = [*self._where(event, spans), *us(spans["end"] - length - self.start), *us(length)]
        return args.lines({"ph": "X", "name": "arrived", **AT, "dur": US}, columns)

    def _where(self, event: Event, rows: Rows) -> list[list[int]]:
        """Return the columns pid and tid."""
        pids = np.array(self.pids, np.int64)[rows["process"]].tolist()
        return [pids, self._tids(rows) if event.track is Track.CONSUMER else rows["tid"].tolist()]

    def _tids(self, rows: Rows) -> list[int]:
        """Return the consumer's pseudo-thread for each row."""
        keys = zip(rows["process"].tolist(), rows["tid"].tolist(), rows["loader"].tolist(), strict=True)
        return [self._track(*key) for key in keys]

    # --- Async slices: epochs and batches
    def _async(
        self, name: str, number: str, rows: Rows, begin: Ints, end: Ints, args: Iterable[dict[str, object]]
    ) -> Iterator[str]:
        """Yield an async slice for each row. name: without its iterator; end: absolute ns as begin, NEVER = open."""
        columns = (rows["process"].tolist(), rows["loader"].tolist(), begin.tolist(), end.tolist(), args)
        for at, (process, loader, left, right, words) in enumerate(zip(*columns, strict=True)):
            where = {"pid": self.pids[process], "tid": self.pids[process]}
            what = {"cat": "loader", "name": self.named(name, loader), "id2": {"local": f"{number}{at}"}, **where}
            yield compact({"ph": "b", **what, "ts": (left - self.start) / 1000, "args": words})
            if right < NEVER:
                yield compact({"ph": "e", **what, "ts": (right - self.start) / 1000, "args": {}})

    def _epochs(self, rows: Rows) -> Iterator[str]:
        event, end = EVENTS[ev.EPOCH[0]], EVENTS[ev.EPOCH[1]]
        args = []
        for row in rows:
            words: dict[str, object] = {f.name: int(row[c]) for f, c in zip(event.fields, _BEGIN, strict=False)}
            for field, column in zip(end.fields, _END, strict=False):
                words[field.name] = value_of(field, int(row[column])) if row["end"] >= 0 else "did not end"
            args.append({**words, **_about(event)})
        until = np.where(rows["end"] < 0, NEVER, rows["end"])
        return self._async("epoch", "e", rows, rows["begin"], until, args)

    def _in_flight(self) -> Iterator[str]:
        """Yield a slice for each batch from index_put to yield: in as many rows as there are batches at once."""
        sent = self.batches.table
        ended = {0: "did not end", ev.EPOCH[1]: "given up: the epoch ended"}
        columns = zip(*(sent[name].tolist() for name in ("task", "worker", "ended_by")), strict=True)
        args: Iterator[dict[str, object]] = (
            {"task": task, "worker": worker, "ended by": ended.get(by) or EVENTS[by].name}
            for task, worker, by in columns
        )
        return self._async("batch in flight", "b", self.pick(ev.INDEX_PUT), sent["put"], sent["end"], args)

    # --- Flows: a batch's path through the processes
    def _flows(self) -> Lines:
        """Return a flow for each batch, over the scene's stops: to its yield, or to the device that waits for it."""
        batch, time, process, tid = self._stops()
        order = np.lexsort((time, batch))
        order = order[batch[order] >= 0]
        new = np.ones(len(order) + 1, bool)
        new[1:-1] = batch[order][1:] != batch[order][:-1]
        first, last = new[:-1], new[1:]
        several = ~(first & last)
        joined = order[several]
        phase = np.where(first, '"s"', np.where(last, '"f"', '"t"'))[several].tolist()
        pids = np.array(self.pids, np.int64)[process[joined]].tolist()
        columns = [batch[joined].tolist(), pids, tid[joined].tolist(), *us(time[joined] - self.start)]
        event = {"ph": ANY, "bp": "e", "cat": "batch", "name": "batch", "id": INT, **AT}
        return filled(event, phase, *columns)

    def _stops(self) -> list[Ints]:
        """Return batch, time, process and tid of the stops on the batches' paths."""
        parts = []
        for rows, column in ((self.scene.spans, "span"), (self.events, "event")):
            stops = self.scene.stops[self.scene.stops[column] >= 0]
            mine = rows[stops[column]]
            time = stops["begin"] + self.start
            if column == "span":  # an arrow must end inside the slice, not at its end
                time = np.where(np.isin(stops["code"], AT_END), np.maximum(time - 1, mine["begin"]), time)
            tid = mine["tid"].astype(np.int64)
            consumes = np.isin(mine["code"], _CONSUMES)
            tid[consumes] = self._tids(mine[consumes])
            parts.append((stops["batch"], time, mine["process"], tid))
        return [np.concatenate([np.asarray(part, np.int64) for part in column]) for column in zip(*parts, strict=True)]

    # --- Counters
    def _counters(self) -> Iterator[str]:
        for loader, process in self.home.items():
            events = self.events[self.events["loader"] == loader]
            for name, unit, steps in (
                ("send_idx", "", field_values(events, {ev.TASK_ASSIGNED: "x"})),
                ("rcvd_idx", "", field_values(events, {ev.RCVD_ADVANCE: "x"})),
                ("tasks", "outstanding", outstanding(events)),
                ("reorder buffer", "batches", reorder_depth(events)),
                ("in flight", "bytes", bytes_in_flight(self.batches, self.batches.table["loader"] == loader)),
            ):
                yield from self._count(process, loader, name, unit, steps)
        yield from self._queues("index queue", "tasks", ev.INDEX_PUT, ev.INDEX_GET[1], Message.TASK)
        yield from self._queues("result queue", "batches", ev.RESULT_PUT, ev.RESULT_GET[1], Message.RESULT)

    def _count(self, process: int, loader: int, name: str, unit: str, steps: Steps) -> Lines:
        """Return a counter's lines; the UI shows it as "name unit"."""
        times, values = steps
        pid = self.pids[process]
        event = {"ph": "C", "cat": "loader", "name": self.named(name, loader), "pid": pid, "tid": pid, "ts": US}
        return filled({**event, "args": {unit: INT}}, *us(times - self.start), values.tolist())

    def _queues(self, name: str, unit: str, put: int, got: int, message: Message) -> Iterator[str]:
        """Yield a counter for each worker: what was put, and not yet received."""
        puts, gets = self.pick(put), self.pick(got)
        gets = gets[gets["x"] == message]
        rows = np.concatenate([puts, gets])
        changes = np.concatenate([np.ones(len(puts), np.int64), np.full(len(gets), -1, np.int64)])
        for loader, worker in distinct(rows, "loader", "worker"):
            mine = (rows["loader"] == loader) & (rows["worker"] == worker)
            process = self._process_of(loader, worker)
            title = name if process != self.home.get(loader) else f"{name} of worker {worker}"
            yield from self._count(process, loader, title, unit, sums(rows["time"][mine], changes[mine]))

    def _process_of(self, loader: int, worker: int) -> int:
        """Return the process of an iterator's worker, or the iterator's own if the worker left no trace."""
        for index, process in enumerate(self.trace.processes):
            if process.role == "worker" and process.loader == loader and process.worker == worker:
                return index
        return self.home.get(loader, 0)


_BEGIN, _END = ("bx", "by", "bz"), ("ex", "ey", "ez")


def _names(event: Event, rows: Rows, mine: Bools, prefix: str) -> Iterator[tuple[str, Bools]]:
    """Yield the event's name and the rows under it; the name of what is simulated says so. prefix: of the columns."""
    column = simulated_column(event.code)
    if not column:
        yield event.name, mine
        return
    simulated = rows[prefix + column] != 0
    yield event.name, mine & ~simulated
    yield f"{event.name} (simulated)", mine & simulated


def _room(rows: Rows) -> Ints:
    """Return the ns from each event to the next one of its thread, at most ANCHOR_NS."""
    order = np.lexsort((np.arange(len(rows)), rows["tid"], rows["process"]))
    out = np.full(len(rows), ANCHOR_NS, np.int64)
    process, tid, time = (rows[name][order] for name in ("process", "tid", "time"))
    same = ~starts(process, tid)[1:]
    out[order[:-1]] = np.where(same, np.minimum(time[1:] - time[:-1], ANCHOR_NS), ANCHOR_NS)
    return out


def _about(event: Event) -> dict[str, str]:
    """Return what the event table says about an event."""
    about = {"meaning": event.meaning, "ours": event.ours, "upstream": event.upstream, "article": event.article}
    return {key: text for key, text in about.items() if text}


class _Args:
    """The "args" of all events of one kind: what is the same for all, and columns of what differs."""

    def __init__(self, export: _Export, event: Event) -> None:
        self.export = export
        self.event = event
        self.columns: dict[str, list[str]] = {}

    def add_span(self, rows: Rows, end: Event | None) -> None:
        """Add the fields of spans' begins, replaced by those of `end` that have the same name.

        A wait's begin names the task that is needed next, its end the one that came.
        """
        if self.event.stage == "wait":
            self._add("awaited task", rows["task"])
            self._add("awaited worker", rows["worker"])
        rows = rows.copy()
        for key in ("task", "worker"):
            came = rows["end_" + key]
            rows[key] = came if self.event.stage == "wait" else np.where(came < 0, rows[key], came)
        self.add_fields(rows, self.event, _BEGIN)
        if end is not None:
            self.add_fields(rows, end, _END)
        for key in ("cpu", "cpu_wait"):
            if rows[key].any():
                self.columns[f"{key}_ms"] = [str(ns / 1e6) if ns else "null" for ns in rows[key].tolist()]

    def add_fields(self, rows: Rows, event: Event, own: Iterable[str]) -> None:
        """Add iterator, task, worker, and the event's own fields, which are in the columns `own`."""
        if len(self.export.home) > 1:
            self._add("iterator", rows["loader"])
        if event.has_task:
            self._add("task", rows["task"])
        if event.has_worker:
            self._add("worker", rows["worker"])
        for field, column in zip(event.fields, own, strict=False):
            if field.is_cpu:
                continue
            key = f"{field.name} [{field.unit}]" if field.unit and field.unit != "string" else field.name
            self.columns[key] = self._in_words(field, rows, column)

    def _add(self, key: str, values: Ints) -> None:
        """Add a column of numbers; -1 means none."""
        self.columns[key] = ["null" if v == -1 else str(v) for v in values.tolist()]

    def _in_words(self, field: Field, rows: Rows, column: str) -> list[str]:
        values: list[int] = rows[column].tolist()
        if field.unit == "string":
            texts = self.export.trace.strings
            keys = zip(rows["process"].tolist(), values, strict=True)
            return [compact(texts.get(key, "")) for key in keys]
        if field.enum is None:
            return [str(v) for v in values]
        words = {v: compact(value_of(field, v)) for v in set(values)}
        return [words[v] for v in values]

    def lines(self, event: dict[str, object], columns: list[list[int]]) -> Lines:
        """Return one JSON object an event: `event` with its holes filled from `columns`, then the args."""
        args = {**dict.fromkeys(self.columns, ANY), **_about(self.event)}
        return filled({**event, "cat": self.event.track.value, "args": args}, *columns, *self.columns.values())
