"""What the exports draw of a trace: `chrome` writes it as JSON, `perfetto` in Perfetto's own format.

Interface: `Export(trace)`: `things()` yields all that is drawn, kind by kind (see `drawn`); `lanes` are the threads in
the order of their roles; `about()` says where the trace comes from and what it lacks.

A span is a slice with the caption of every view: "fetch 4", "wait for task 9". An instant is one, too, if it is an
`index_put` or a `yield`: slices of at most 2 us, since a batch's arrows begin and end there. A batch is one flow across
the processes, and one overlapping slice from its `index_put` to its `yield`; a wait for a batch has flows from the
batch's `fetch` and from its slowest sample. An epoch is an overlapping slice. The consumer has a pseudo-thread for each
of the scene's slots: two iterators that run together would otherwise overlap in part, and the UI drops such slices.
`COUNTERS` describes the counters. `attached` draws what other recorders saw, on tracks of its own.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Ints, Rows, distinct, starts
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
from minidl.tracefile.spans import nest
from minidl.tracefile.words import value_of
from minidl.views.attached import Attached
from minidl.views.colours import paint
from minidl.views.drawn import (
    CAUSE,
    DEATH,
    NOTE,
    Counts,
    DrawnSlices,
    Flows,
    Instants,
    Overlapping,
    Things,
    encoded,
)
from minidl.views.layout import LaneKind
from minidl.views.scene import AT_END, FATES, Fate, Scene, is_named, numbered, scene_of, simulated_column

if TYPE_CHECKING:
    from minidl.tracefile.process import Process
    from minidl.tracefile.reader import Trace

Drawn = Things | Flows | Counts
Columns = dict[str, list[Any]]
Kind = TypeVar("Kind", bound=Things)

ANCHOR_NS: Final = 2_000
"""Longest slice that an instant is drawn as for arrows to start from; shorter if the thread's next event is near."""

PSEUDO_TID: Final = 1 << 22
"""Above every real thread and process number of Linux: from here on, numbers of tracks that are not threads."""

COUNTERS: Final = {
    "send_idx": "of task_assigned; 0 when an epoch begins",
    "rcvd_idx": "of rcvd_advance; 0 when an epoch begins",
    "tasks outstanding": "`outstanding` of task_assigned and rcvd_advance; one less at reorder_store, at "
    "worker_exhausted, and at a yield without either since its result came; 0 when an epoch begins",
    "reorder buffer batches": "`depth` of reorder_store and reorder_pop; 0 when an epoch begins",
    "in flight bytes": "up by `bytes` at a batch's shm_alloc in collate and slab_send, and by `bytes` + `copied` at "
    "the end of its result_pickle, down by all of it when the batch is yielded or given up",
    "index queue tasks": "of a worker: up at index_put, down at the end of the index_get that brings the task",
    "result queue batches": "of a worker: up at result_put, down at the end of the result_get that brings the result",
}
"""Each counter, and the events that it is derived from."""

SAMPLED: Final = {
    "CPU percent": "of a process, of one CPU, since the sample before",
    "memory KiB": "of a process, resident",
    "shared memory KiB": "of a process's resident memory",
    "descriptors open": "of a process",
    "/dev/shm bytes free": "what all processes have left",
}
"""Each counter that a watchdog has sampled."""

_CONSUMES: Final = ev.codes_where(lambda event: event.track is Track.CONSUMER)
_BEGIN, _END = ("bx", "by", "bz"), ("ex", "ey", "ez")

Progress = Callable[[int, int], None]
"""Called with the number of events written and the number of all events."""


class LaneRole(enum.IntEnum):
    """Actor of a lane, in the order in which the lanes of a rank stand."""

    CONSUMER = 0
    LOADER = 1
    WORKER = 2
    PIN_THREAD = 3
    STREAM = 4  # of a device
    THREAD = 5  # another thread of a process: it belongs to the lane of the process


class DrawnLane(NamedTuple):
    """A lane in the process with that index. tid: of its thread, or the number of a track that is not a thread."""

    process: int
    tid: int
    name: str
    role: LaneRole


def rank_of(process: Process) -> tuple[int, bool, int, int]:
    """Return the key that processes are sorted by. One that runs several iterators knows only the last one's number."""
    return process.rank, process.worker >= 0, process.loader, process.worker


class Export:
    """All that is drawn of a trace. ranked: whether names say whose rank they are of."""

    def __init__(self, trace: Trace, ranked: bool = True) -> None:
        self.trace = trace
        self.ranked = ranked
        self.events: Rows = trace.events
        self.start = trace.start
        self.pids: list[int] = []
        for process in trace.processes:  # a number for each: its pid, unless an earlier process had the same one
            self.pids.append(process.pid if process.pid not in self.pids else PSEUDO_TID + len(self.pids))
        rows = self.pick(ev.EPOCH[0], ev.EPOCH[1], ev.INDEX_PUT, ev.NEXT[0], ev.YIELD)
        loaders, first = np.unique(rows["loader"], return_index=True)
        self.home: dict[int, int] = dict(zip(loaders.tolist(), rows["process"][first].tolist(), strict=True))
        """Number of an iterator -> the process that runs it."""
        self._iterators = Counter(trace.processes[process].rank for process in self.home.values())
        self._tracks: dict[tuple[int, int], int] = {}  # (process, what) -> the number of a pseudo-thread

    def pick(self, *codes: int) -> Rows:
        """Return the events with one of the codes, in time order."""
        return self.events[np.isin(self.events["code"], codes)]

    @cached_property
    def scene(self) -> Scene:
        return scene_of(self.trace)

    @cached_property
    def bars(self) -> Rows:
        """The scene's bars, in the order of their spans; of polls that continue one wait, the last has the bar."""
        rows: Rows = self.scene.bars[np.argsort(self.scene.bars["span"])]
        return rows

    @cached_property
    def spans(self) -> Rows:
        """The span of each bar."""
        spans: Rows = self.scene.spans[self.bars["span"]]
        return spans

    def named(self, what: str, loader: int) -> str:
        """Return `what`, with its rank and, if the rank has several iterators, the iterator's number before it."""
        process = self.home.get(loader, 0)
        of = f"iterator {loader}: {what}" if self._is_one_of_several(process) else what
        return self.of_rank(of, process)

    def of_rank(self, what: str, index: int) -> str:
        """Return `what` of a process, with the process's rank before it if names say it."""
        rank = self.rank(index)
        return f"rank {rank} {what}" if rank >= 0 and self.ranked else what

    def rank(self, index: int) -> int:
        """Return the rank of a process; -1 = the job has one rank."""
        own = self.trace.processes[index].rank if self.trace.processes else -1
        known = self.trace.manifest.get("rank")
        return known if own < 0 and isinstance(known, int) else own

    def _is_one_of_several(self, process: int) -> bool:
        return bool(self.trace.processes) and self._iterators[self.trace.processes[process].rank] > 1

    @cached_property
    def _slot_of(self) -> dict[int, int]:
        """Return the slot of each iterator."""
        return {loader: at for at, slot in enumerate(self.scene.slots) for loader in slot.loaders}

    def _track(self, process: int, what: int) -> int:
        """Return the number of a pseudo-thread: a small one, since the UI shows it. what: a slot, or a stream's tid."""
        if (process, what) not in self._tracks:
            mine = self.trace.processes[process].pid
            taken = {number for (index, _), number in self._tracks.items() if index == process}
            taken |= {tid for pid, tid in self.trace.threads if pid == mine} | {mine}
            self._tracks[process, what] = next(n for n in count(1) if n not in taken)
        return self._tracks[process, what]

    @cached_property
    def lanes(self) -> list[DrawnLane]:
        """The lanes of threads, and of pseudo-threads: the consumers and the streams of devices. By rank and role."""
        consuming = self.spans[np.isin(self.spans["code"], _CONSUMES)]
        found = {(index, self._slot_of.get(loader, 0)) for index, loader in distinct(consuming, "process", "loader")}
        out = []
        for index, slot in sorted(found):
            several = sum(process == index for process, _ in found) > 1
            name = f"{self._line_of(slot) if several else ''} consumer".strip()
            out.append(DrawnLane(index, self._track(index, slot), name, LaneRole.CONSUMER))
        feeders = self._index_feeders()
        for index, process in enumerate(self.trace.processes):
            role = LaneRole.WORKER if process.worker >= 0 else LaneRole.LOADER
            out.append(DrawnLane(index, process.pid, self.actor(index), role))
            for (owner, tid), thread in self.trace.threads.items():
                if owner != process.pid or tid == owner:
                    continue
                if tid >= ev.DEVICE_TID:
                    out.append(DrawnLane(index, self._track(index, tid), thread, LaneRole.STREAM))
                elif thread == "pin_memory":
                    out.append(DrawnLane(index, tid, "pin thread", LaneRole.PIN_THREAD))
                else:
                    known = "feeder" if thread == "QueueFeederThread" else thread
                    out.append(DrawnLane(index, tid, feeders.get((index, tid), known), LaneRole.THREAD))
        processes = self.trace.processes
        place = {index: n for n, index in enumerate(sorted(range(len(processes)), key=lambda i: rank_of(processes[i])))}
        return sorted(out, key=lambda lane: (processes[lane.process].rank, lane.role, place[lane.process], lane.tid))

    def _line_of(self, slot: int) -> str:
        """Return the line of code that made the DataLoader of a slot, "train.py:12"; "" if it is not known."""
        made_at = self.trace.loaders.get(self.scene.slots[slot].loaders[0], {}).get("made_at")
        return str(made_at or "").rpartition("/")[2]

    @cached_property
    def attached(self) -> Attached:
        return Attached(self.trace, self.pids, self.start)

    def actor(self, index: int) -> str:
        """Return what a process does: "loader", "worker 1", "worker 1 of iterator 3"."""
        process = self.trace.processes[index]
        several = process.worker >= 0 and self._is_one_of_several(index)
        return f"{process.actor} of iterator {process.loader}" if several else process.actor

    def _index_feeders(self) -> dict[tuple[int, int], str]:
        """Return (process, tid) -> name of the threads that feed index queues: all have the same name in Python.

        With slabs there are none: the thread that puts a task also writes it.
        """
        found = distinct(self.spans[self.spans["code"] == ev.INDEX_WRITE[0]], "process", "tid", "loader", "worker")
        putting = distinct(self.pick(ev.INDEX_PUT), "process", "tid")
        return {
            (process, tid): self.named(f"feeder to worker {worker}", loader)
            for process, tid, loader, worker in found
            if worker >= 0 and [process, tid] not in putting
        }

    @cached_property
    def batches(self) -> Batches:
        return Batches(self.events)

    def things(self, progress: Progress | None = None) -> Iterator[Drawn]:
        """Yield all that is drawn. progress is called after each kind of event."""
        done, total = 0, len(self.events)
        for thing in self._things():
            yield thing
            if progress is not None and isinstance(thing, Things):
                done = min(total, done + len(thing) * (2 if isinstance(thing, DrawnSlices) else 1))
                progress(done, total)
        if progress is not None:
            progress(total, total)

    def _things(self) -> Iterator[Drawn]:
        for things in (
            self._slices(),
            self._epochs(),
            self._instants(),
            self._notes(),
            self._arrivals(),
            self._in_flight(),
            self._ways(),
            self._causes(),
            self._counters(),
            self._sampled(),
            self.attached.things(),
        ):
            yield from things

    def about(self) -> dict[str, Any]:
        """Return what a document says about itself: where it comes from, and what is missing."""
        return {
            "source": str(self.trace.path),
            "clock": "CLOCK_MONOTONIC minus first_event_ns",
            "first_event_ns": self.start,
            "manifest": self.trace.manifest,
            "loaders": self.trace.loaders,
            "headline": self.scene.headline.lines(),
            "problems": self.trace.problems + self.attached.problems,
            "attachments": {one.name: one.about for one in self.trace.attachments},
            "counters": COUNTERS | (SAMPLED if self.trace.watched.samples else {}),
        }

    # --- Slices and instants
    def _of(
        self, kind: type[Kind], event: Event, rows: Rows, names: list[str], begin: Ints, columns: Columns, **more: Any
    ) -> Kind:
        """Return things of an event, which are in `rows`."""
        pids, tids = self._where(rows)
        return kind(
            category=event.track.value, names=names, pids=pids, tids=tids, begin=begin, columns=columns,
            same=_about(event), event=event, **more,
        )  # fmt: skip

    def _slices(self) -> Iterator[DrawnSlices]:
        """Yield every span: without an end if it is open at the trace's end. An open one's name says so."""
        until, has_ended = self._drawn_ends(), self.spans["end"] >= 0
        for code in np.unique(self.spans["code"]).tolist():
            for ended in (True, False):
                mine = (self.spans["code"] == code) & (has_ended == ended)
                if code != ev.EPOCH[0] and mine.any():
                    event, spans, bars = EVENTS[code], self.spans[mine], self.bars[mine]
                    names, columns = self._titles(event, spans, bars), self._of_span(event, spans, ended)
                    yield self._of(DrawnSlices, event, spans, names, bars["begin"], columns, end=until[mine])

    def _drawn_ends(self) -> Ints:
        """Return where each span is drawn to end, so that spans nest on their track; NEVER = it has no end."""
        spans, bars = self.spans.copy(), self.bars
        at_the_edge = (bars["fate"] != Fate.ENDED) & (bars["end"] >= self.scene.end)
        spans["begin"], spans["end"] = bars["begin"], np.where(at_the_edge, -1, bars["end"])
        consumer = np.isin(spans["code"], _CONSUMES)
        lane = (consumer * 2 + (spans["code"] == ev.EPOCH[0])).astype(np.int64)
        until = nest(spans, (spans["process"].astype(np.int64) << 49) | (lane << 32) | self._where(spans)[1])[0]
        return np.where(until < 0, NEVER, until)

    def _titles(self, event: Event, spans: Rows, bars: Rows) -> list[str]:
        """Return the name of each slice: its caption, whether it is simulated, and how it ends."""
        labels, before = [_label(event)] * len(spans), numbered(event.code)[1]
        if is_named(event):
            keys = zip(spans["process"].tolist(), spans["bx"].tolist(), strict=True)
            labels = [self.trace.strings.get(key) or event.name for key in keys]
        ends = {fate: f" ({FATES[Fate(fate)]})" if fate else "" for fate in np.unique(bars["fate"]).tolist()}
        parts = zip(labels, *(bars[name].tolist() for name in ("simulated", "number", "fate")), strict=True)
        return [
            f"{label}{' (simulated)' if simulated else ''}{f'{before} {number}' if number >= 0 else ''}{ends[fate]}"
            for label, simulated, number, fate in parts
        ]

    def _instants(self) -> Iterator[Instants | DrawnSlices]:
        """Yield every instant; those that a batch's arrows start from or end at as short slices."""
        length = _room(self.events)
        for code in np.unique(self.events["code"]).tolist():
            event, mine = EVENTS[code], self.events["code"] == code
            if event.phase is not Phase.INSTANT:
                continue
            rows, column = self.events[mine], simulated_column(code)
            is_simulated = rows[column].tolist() if column else [0] * len(rows)
            names = [f"{event.name} (simulated)" if one else event.name for one in is_simulated]
            begin, columns = rows["time"] - self.start, self._fields(rows, event, "xyz")
            if code in (ev.INDEX_PUT, ev.YIELD):
                yield self._of(DrawnSlices, event, rows, names, begin, columns, end=begin + length[mine])
            else:
                yield self._of(Instants, event, rows, names, begin, columns)

    def _notes(self) -> Iterator[Instants]:
        """Yield the headline on the lane that it points at, each death, and the last event if no bar reaches it."""
        found, scene = self.scene.headline, self.scene
        if found.focus is not None and scene.culprit >= 0:
            at = max(found.focus.begin, found.focus.span) - self.start
            args = {"evidence": "; ".join(found.notes()), "next step": found.helps}
            yield self._note(NOTE, found.title, at, scene.spans[scene.bars["span"][[scene.culprit]]], **args)
        for death in scene.deaths:
            bar = scene.bars[scene.bars["lane"] == death.lane][-1:]
            yield self._note(DEATH, death.words, death.time, scene.spans[bar["span"]])
        if len(self.spans) < len(scene.spans):  # a poll that continues a wait: the UI's trace ends at its last line
            yield self._note("", "last event", int(self.events["time"][-1]) - self.start, self.events[-1:])

    def _note(self, category: str, name: str, at: int, row: Rows, **args: object) -> Instants:
        pids, tids = self._where(row)
        return Instants(category=category, names=[name], pids=pids, tids=tids, begin=np.array([at]), same=args)

    def _arrivals(self) -> Iterator[DrawnSlices]:
        """Yield the last moments of the waits that bring a pinned batch: slices for the batch's arrow to point at.

        The wait itself begins before its batch is pinned, and the UI lets no arrow point backwards in time.
        """
        mine = (self.spans["code"] == ev.READY_GET[0]) & (self.spans["ex"] == Message.RESULT) & (self.spans["end"] >= 0)
        spans, end = self.spans[mine], self.spans["end"][mine] - self.start
        event = EVENTS[ev.READY_GET[1]]
        begin = np.maximum(self.bars["begin"][mine], end - ANCHOR_NS)
        yield self._of(
            DrawnSlices, event, spans, ["arrived"] * len(spans), begin, self._of_span(event, spans, True), end=end
        )

    def _where(self, rows: Rows) -> tuple[Ints, Ints]:
        """Return where each row is drawn: its process, and the consumer, a device's stream, or its thread."""
        consumes, tids = np.isin(rows["code"], _CONSUMES), rows["tid"].astype(np.int64)
        for process, loader in distinct(rows[consumes], "process", "loader"):
            mine = consumes & (rows["process"] == process) & (rows["loader"] == loader)
            tids[mine] = self._track(process, self._slot_of.get(loader, 0))
        streams = tids >= ev.DEVICE_TID
        for process, tid in distinct(rows[streams], "process", "tid"):
            tids[streams & (rows["process"] == process) & (rows["tid"] == tid)] = self._track(process, tid)
        return np.array(self.pids, np.int64)[rows["process"]], tids

    # --- Arguments
    def _of_span(self, event: Event, rows: Rows, ended: bool) -> Columns:
        """Return the fields of spans' begins, replaced by those of their ends that have the same name.

        A wait's begin names the task that is needed next, its end the one that came.
        """
        waits = event.stage == "wait"
        out = {f"awaited {key}": _numbers(rows[key]) for key in ("task", "worker")} if waits else {}
        rows = rows.copy()
        for key in ("task", "worker"):
            came = rows["end_" + key]
            rows[key] = came if waits else np.where(came < 0, rows[key], came)
        if event.phase is Phase.BEGIN:
            out |= self._fields(rows, event, _BEGIN)
        if ended:
            out |= self._fields(rows, EVENTS[event.code + (event.phase is Phase.BEGIN)], _END)
        for key in ("cpu", "cpu_wait"):
            if rows[key].any():
                out[f"{key}_ms"] = [ns / 1e6 if ns else None for ns in rows[key].tolist()]
        return out

    def _fields(self, rows: Rows, event: Event, own: Iterable[str]) -> Columns:
        """Return iterator, task, worker, and the event's own fields, which are in the columns `own`."""
        out = {"iterator": _numbers(rows["loader"])} if len(self.home) > 1 else {}
        out |= {"task": _numbers(rows["task"])} if event.has_task else {}
        out |= {"worker": _numbers(rows["worker"])} if event.has_worker else {}
        for field, column in zip(event.fields, own, strict=False):
            if not field.is_cpu:
                key = f"{field.name} [{field.unit}]" if field.unit and field.unit != "string" else field.name
                out[key] = self._in_words(field, rows, column)
        return out

    def _in_words(self, field: Field, rows: Rows, column: str) -> list[Any]:
        values: list[int] = rows[column].tolist()
        if field.unit == "string":
            keys = zip(rows["process"].tolist(), values, strict=True)
            return [self.trace.strings.get(key, "") for key in keys]
        return values if field.enum is None else encoded(values, lambda value: value_of(field, value))

    # --- Overlapping slices: epochs and batches
    def _overlapping(
        self, track: str, kind: str, rows: Rows, numbers: Ints, begin: Ints, end: Ints, columns: Columns,
        same: dict[str, str],
    ) -> Iterator[Overlapping]:  # fmt: skip
        """Yield a slice of a kind for each row, with its number in its name. end: NEVER = open.

        The UI leaves out what has no end: so an open one ends with the trace, and its name says that it did not.
        """
        if not len(rows):
            return
        names = [
            f"{kind} {number}{f' ({FATES[Fate.OPEN]})' if lasts else ''}"
            for number, lasts in zip(numbers.tolist(), (end >= NEVER).tolist(), strict=True)
        ]
        tracks = encoded(rows["loader"].tolist(), lambda loader: self.named(track, loader))
        pids = np.array(self.pids, np.int64)[rows["process"]]
        until = np.where(end < NEVER, end, int(self.events["time"][-1])) - self.start
        yield Overlapping(
            category="loader", kind=kind, tracks=tracks,
            names=names, pids=pids, tids=pids, begin=begin - self.start, end=until, columns=columns, same=same,
        )  # fmt: skip

    def _epochs(self) -> Iterator[Overlapping]:
        rows = self.spans[self.spans["code"] == ev.EPOCH[0]]
        event, end = EVENTS[ev.EPOCH[0]], EVENTS[ev.EPOCH[1]]
        columns: Columns = {field.name: rows[c].tolist() for field, c in zip(event.fields, _BEGIN, strict=False)}
        for field, column in zip(end.fields, _END, strict=False):
            words, ended = self._in_words(field, rows, column), (rows["end"] >= 0).tolist()
            told = [word if is_told else "did not end" for word, is_told in zip(words, ended, strict=True)]
            columns.setdefault(field.name, told)
        until = np.where(rows["end"] < 0, NEVER, rows["end"])
        return self._overlapping("epoch", "epoch", rows, rows["bx"], rows["begin"], until, columns, _about(event))

    def _in_flight(self) -> Iterator[Overlapping]:
        """Yield a slice for each batch from index_put to yield: in as many rows as there are batches at once."""
        sent = self.batches.table
        words = {0: "did not end", ev.EPOCH[1]: "given up: the epoch ended"}
        columns: Columns = {name: sent[name].tolist() for name in ("task", "worker")}
        columns["ended by"] = encoded(sent["ended_by"].tolist(), lambda by: words.get(by) or EVENTS[by].name)
        rows = self.pick(ev.INDEX_PUT)
        return self._overlapping("batch in flight", "batch", rows, sent["task"], sent["put"], sent["end"], columns, {})

    # --- Flows: a batch's path through the processes
    def _ways(self) -> Iterator[Flows]:
        """Yield a flow for each batch, over the scene's stops: to its yield, or to the device that waits for it."""
        parts = []
        for rows, column in ((self.scene.spans, "span"), (self.events, "event")):
            stops = self.scene.stops[self.scene.stops[column] >= 0]
            mine, time = rows[stops[column]], stops["begin"]
            if column == "span":  # an arrow must end inside the slice, not at its end
                time = np.where(np.isin(stops["code"], AT_END), np.maximum(time - 1, mine["begin"] - self.start), time)
            parts.append((stops["batch"], *self._where(mine), time))
        batch, pids, tids, times = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((times, batch))
        _, place, size = np.unique(batch[order], return_inverse=True, return_counts=True)
        order = order[size[place] > 1]
        yield Flows("batch", "batch", batch[order], pids[order], tids[order], times[order])

    def _causes(self) -> Iterator[Flows]:
        """Yield flows to waits from what was waited for: the batch's fetch and slowest sample, the headline's step.

        Only where the fetch did not end before the wait: else the batch was there. A flow's end is bound to the step
        that began last, so it lies at the wait's begin, or later if the work had not begun then.
        """
        all_bars = self.scene.bars
        bars = all_bars[all_bars["batch"] >= 0]
        fetches, samples = (bars[bars["code"] == code] for code in (ev.FETCH[0], ev.SAMPLE[0]))
        samples = samples[np.lexsort((samples["end"] - samples["begin"], samples["batch"]))]
        slowest = dict(zip(samples["batch"].tolist(), samples, strict=True))
        fetched = dict(zip(fetches["batch"].tolist(), fetches, strict=True))
        # A `next` that did not end has no batch: the wait in it says which one is awaited.
        awaits = np.isin(bars["code"], ev.AWAITS) & (bars["fate"] != Fate.ENDED)
        awaits &= np.array([lane.kind is LaneKind.LOADER for lane in self.scene.lanes], bool)[bars["lane"]]
        ends: list[tuple[np.void, np.void]] = []  # work, wait
        for wait in bars[(bars["code"] == ev.NEXT[0]) | awaits]:
            fetch, sample = fetched.get(int(wait["batch"])), slowest.get(int(wait["batch"]))
            if fetch is not None and wait["begin"] < fetch["end"]:
                ends += [(work, wait) for work in (fetch, sample) if work is not None]
        ends += self._headline_cause({int(work["span"]) for work, _ in ends})
        times = np.array([(work["begin"], max(work["begin"], wait["begin"])) for work, wait in ends], np.int64)
        spans = self.scene.spans[np.array([bar["span"] for pair in ends for bar in pair], np.int64)]
        yield Flows(CAUSE, "waited for", np.arange(len(spans)) // 2, *self._where(spans), times.reshape(-1))

    def _headline_cause(self, known: set[int]) -> list[tuple[np.void, np.void]]:
        """Return the step that the headline points at, if it is not known, and the loop's longest wait meanwhile."""
        bars, spot, culprit = self.scene.bars, self.scene.headline.focus, self.scene.culprit
        if spot is None or culprit < 0 or int(bars["span"][culprit]) in known:
            return []
        waits = bars[bars["code"] == ev.NEXT[0]]
        begin, end = spot.begin - self.start, spot.end - self.start
        together = np.minimum(waits["end"], end) - np.maximum(waits["begin"], begin)
        if bars["code"][culprit] == ev.NEXT[0] or not (together > 0).any():
            return []
        return [(bars[culprit], waits[int(together.argmax())])]

    # --- Counters
    def _counters(self) -> Iterator[Counts]:
        for loader, process in self.home.items():
            events = self.events[self.events["loader"] == loader]
            for name, unit, steps in (
                ("send_idx", "", field_values(events, {ev.TASK_ASSIGNED: "x"})),
                ("rcvd_idx", "", field_values(events, {ev.RCVD_ADVANCE: "x"})),
                ("tasks", "outstanding", outstanding(events)),
                ("reorder buffer", "batches", reorder_depth(events)),
                ("in flight", "bytes", bytes_in_flight(self.batches, self.batches.table["loader"] == loader)),
            ):
                yield self._count(process, self.named(name, loader), unit, steps)
        yield from self._queues("index queue", "tasks", ev.INDEX_PUT, ev.INDEX_GET[1], Message.TASK)
        yield from self._queues("result queue", "batches", ev.RESULT_PUT, ev.RESULT_GET[1], Message.RESULT)

    def _count(self, process: int, name: str, unit: str, steps: Steps) -> Counts:
        times, values = steps
        return Counts(name, unit, self.pids[process], times - self.start, values)

    def _queues(self, name: str, unit: str, put: int, got: int, message: Message) -> Iterator[Counts]:
        """Yield a counter for each worker: what was put, and not yet received."""
        puts, gets = self.pick(put), self.pick(got)
        gets = gets[gets["x"] == message]
        rows = np.concatenate([puts, gets])
        changes = np.concatenate([np.ones(len(puts), np.int64), np.full(len(gets), -1, np.int64)])
        for loader, worker in distinct(rows, "loader", "worker"):
            mine = (rows["loader"] == loader) & (rows["worker"] == worker)
            process = self._process_of(loader, worker)
            title = name if process != self.home.get(loader) else f"{name} of worker {worker}"
            yield self._count(process, self.named(title, loader), unit, sums(rows["time"][mine], changes[mine]))

    def _sampled(self) -> Iterator[Counts]:
        """Yield what a watchdog has sampled, a counter for each process."""
        samples = self.trace.watched.samples
        for index, process in enumerate(self.trace.processes):
            mine = [(one.at, one.processes[process.pid]) for one in samples if process.pid in one.processes]
            at = np.array([time for time, _ in mine], np.int64)
            spent = np.diff(np.array([one.cpu_ms for _, one in mine], np.int64))
            used = spent * 100_000_000 // np.maximum(np.diff(at), 1)
            for name, unit, values in (
                ("CPU", "percent", np.concatenate([[-1], used])[: len(at)]),
                ("memory", "KiB", np.array([one.rss_kib for _, one in mine], np.int64)),
                ("shared memory", "KiB", np.array([one.shm_kib for _, one in mine], np.int64)),
                ("descriptors", "open", np.array([one.fds for _, one in mine], np.int64)),
            ):
                seen = (values >= 0) & (at > self.start)
                yield self._count(index, self.of_rank(name, index), unit, (at[seen], values[seen]))
        free = np.array([(one.at, one.shm_free) for one in samples if one.shm_free >= 0], np.int64).reshape(-1, 2)
        for index in list(self.home.values())[:1]:
            since = free[free[:, 0] > self.start]
            yield self._count(index, "/dev/shm", "bytes free", (since[:, 0], since[:, 1]))

    def _process_of(self, loader: int, worker: int) -> int:
        """Return the process of an iterator's worker, or the iterator's own if the worker left no trace."""
        for index, process in enumerate(self.trace.processes):
            if process.role == "worker" and process.loader == loader and process.worker == worker:
                return index
        return self.home.get(loader, 0)


def _label(event: Event) -> str:
    """Return the name of a kind of span, as in every view. The UI makes a colour of it: of "idle" alone, red."""
    label = paint(event.code).label
    return "idle (no task)" if label == "idle" else label


def _room(rows: Rows) -> Ints:
    """Return half the ns from each event to the next one of its thread, at most ANCHOR_NS.

    The other half is left to what is around the event, so that an arrow can end there.
    """
    order = np.lexsort((np.arange(len(rows)), rows["tid"], rows["process"]))
    out = np.full(len(rows), ANCHOR_NS, np.int64)
    process, tid, time = (rows[name][order] for name in ("process", "tid", "time"))
    same = ~starts(process, tid)[1:]
    out[order[:-1]] = np.where(same, np.minimum((time[1:] - time[:-1]) // 2, ANCHOR_NS), ANCHOR_NS)
    return out


def _about(event: Event) -> dict[str, str]:
    """Return what the event table says about an event."""
    about = {
        "event": event.name,
        "step": _label(event) if event.phase is Phase.BEGIN else "",
        "meaning": event.meaning,
        "ours": event.ours,
        "upstream": event.upstream,
        "article": event.article,
    }
    return {key: text for key, text in about.items() if text}


def _numbers(values: Ints) -> list[int | None]:
    """Return numbers; -1 means none."""
    return [None if value == -1 else value for value in values.tolist()]
