"""A trace as Chrome trace JSON, the format of the Perfetto UI, chrome://tracing and viztracer's --combine.

Interface: `write_chrome(trace, path)` streams the document to a file; `to_chrome(trace)` returns it as a dict. `Export`
is what is drawn: `lanes` in the order of their roles, and `groups` of sheets. `perfetto` writes the same in the
Perfetto UI's own format.

A span with an end is an X slice with the caption of every view: "fetch 4", "wait for task 9". A span without one is a B
without E, which fades to the right in the UI. An instant is an i, but `index_put` and `yield` are slices of at most
2 us, since a batch's arrows begin and end there. A batch is one flow across the processes, and one async slice from its
`index_put` to its `yield`; a wait for a batch has flows from the batch's `fetch` and from its slowest sample.
An epoch is an async slice. The consumer has a pseudo-thread for each of the scene's slots: two iterators that run
together would otherwise overlap in part, and the UI drops such slices. `COUNTERS` describes the counters. `attached`
draws what other recorders saw, on tracks of its own.

Times are microseconds since the first event, exact to the nanosecond. The UI picks its colours by name and ignores
`cname`, so the colours of `colours.paint` cannot be used there.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

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
from minidl.tracefile.packs import whole
from minidl.tracefile.spans import nest
from minidl.tracefile.words import value_of
from minidl.views.attached import Attached
from minidl.views.colours import paint
from minidl.views.layout import LaneKind
from minidl.views.scene import (
    AT_END,
    FATES,
    Fate,
    Scene,
    is_named,
    numbered,
    scene_of,
    simulated_column,
)
from minidl.views.template import ANY, AT, INT, US, Sheet, compact, us

if TYPE_CHECKING:
    from os import PathLike

    from minidl.tracefile.process import Process
    from minidl.tracefile.reader import Trace

Sheets = Iterable[Sheet]

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

CAUSE: Final = "cause"
"""Category of the flows from work to the wait for it."""

NOTE, DEATH = "headline", "death"
"""Categories of the notes on the lane that the headline points at, and on that of a process that died."""

_CONSUMES: Final = ev.codes_where(lambda event: event.track is Track.CONSUMER)

Progress = Callable[[int, int], None]
"""Called with the number of events written and the number of all events."""


def to_chrome(trace: Trace) -> dict[str, Any]:
    """Return the whole document: {"traceEvents": [...], "otherData": {...}, "displayTimeUnit": "ns"}.

    Slower and larger than `write_chrome`: for traces that fit into memory several times.
    """
    document: dict[str, Any] = json.loads("".join(Export(trace).document(None)))
    return document


def write_chrome(trace: Trace, path: str | PathLike[str], progress: Progress | None = None) -> Path:
    """Write the document to `path`, replacing what is there, and return the path. Raises OSError as `open` does.

    progress is called after each kind of event.
    """
    return Export(trace).write(path, progress)


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


def _rank(process: Process) -> tuple[int, bool, int, int]:
    """Return the key that processes are sorted by. One that runs several iterators knows only the last one's number."""
    return process.rank, process.worker >= 0, process.loader, process.worker


class Export:
    """All that is drawn, for a document in the making. ranked: whether names say whose rank they are of."""

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

    def write(self, path: str | PathLike[str], progress: Progress | None = None) -> Path:
        """Write the document, as `write_chrome` does."""
        target = Path(path)
        with whole(target) as draft, draft.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(self.document(progress))
        return target

    @cached_property
    def scene(self) -> Scene:
        return scene_of(self.trace)

    @cached_property
    def spans(self) -> Rows:
        """The spans that are drawn."""
        spans: Rows = self.scene.spans[self.bars["span"]]
        spans["begin"] = self.bars["begin"] + self.start
        return spans

    @cached_property
    def bars(self) -> Rows:
        """The scene's bars, in the order of their spans; of polls that continue one wait, the last has the bar."""
        rows: Rows = self.scene.bars[np.argsort(self.scene.bars["span"])]
        return rows

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
        place = {index: n for n, index in enumerate(sorted(range(len(processes)), key=lambda i: _rank(processes[i])))}
        return sorted(out, key=lambda lane: (processes[lane.process].rank, lane.role, place[lane.process], lane.tid))

    def _line_of(self, slot: int) -> str:
        """Return the line of code that made the DataLoader of a slot, "train.py:12"; "" if it is not known."""
        made_at = self.trace.loaders.get(self.scene.slots[slot].loaders[0], {}).get("made_at")
        return str(made_at or "").rpartition("/")[2]

    @cached_property
    def attached(self) -> Attached:
        return Attached(self.trace, self.pids, self.start)

    @cached_property
    def batches(self) -> Batches:
        return Batches(self.events)

    def document(self, progress: Progress | None) -> Iterator[str]:
        """Yield the JSON text, piece by piece."""
        yield f'{{"displayTimeUnit":"ns","otherData":{compact(self.about())},\n"traceEvents":[\n'
        yield ",\n".join(self._metadata())
        done = 0
        for written, sheets in self.groups():
            for sheet in sheets:
                rest = iter(sheet.lines())
                while chunk := list(islice(rest, CHUNK)):
                    yield ",\n" + ",\n".join(chunk)
            done += written
            if progress is not None and written:
                progress(done, len(self.events))
        yield "\n]}\n"

    def groups(self) -> Iterator[tuple[int, Sheets]]:
        """Yield all that is drawn, in groups: how many of the trace's events a group draws, and the sheets."""
        yield 2 * (len(self.scene.spans) - len(self.spans)), ()
        yield from self._slices()
        yield from self._instants()
        for sheets in (
            self._note(),
            self._deaths(),
            self._last_poll(),
            self._arrivals(),
            self._flows(),
            self._causes(),
            self._in_flight(),
            self._counters(),
            self._sampled(),
            self.attached.sheets(),
        ):
            yield 0, sheets

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

    # --- Names of processes and threads
    def _metadata(self) -> list[str]:
        out = []

        def name(kind: str, pid: int, tid: int, **args: object) -> None:
            out.append(compact({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}))

        ranks = sorted({_rank(process) for process in self.trace.processes})
        for index, (pid, process) in enumerate(zip(self.pids, self.trace.processes, strict=True)):
            name("process_name", pid, 0, name=self.of_rank(self.actor(index), index))
            name("process_sort_index", pid, 0, sort_index=ranks.index(_rank(process)))
            if process.note:
                name("process_labels", pid, 0, labels=process.note)
        for lane in self.lanes:
            name("thread_name", self.pids[lane.process], lane.tid, name=self.of_rank(lane.name, lane.process))
        for title, pid in self.attached.processes.items():
            name("process_name", pid, 0, name=title)
        for pid, tid, title in self.attached.threads:
            name("thread_name", pid, tid, name=title)
        return out

    def actor(self, index: int) -> str:
        """Return what a process does: "loader", "worker 1", "worker 1 of iterator 3"."""
        process = self.trace.processes[index]
        several = process.worker >= 0 and self._is_one_of_several(index)
        return f"{process.actor} of iterator {process.loader}" if several else process.actor

    def _spans_of(self, code: int) -> Rows:
        rows: Rows = self.spans[self.spans["code"] == code]
        return rows

    def _index_feeders(self) -> dict[tuple[int, int], str]:
        """Return (process, tid) -> name of the threads that feed index queues: all have the same name in Python.

        With slabs there are none: the thread that puts a task also writes it.
        """
        found = distinct(self._spans_of(ev.INDEX_WRITE[0]), "process", "tid", "loader", "worker")
        putting = distinct(self.pick(ev.INDEX_PUT), "process", "tid")
        return {
            (process, tid): self.named(f"feeder to worker {worker}", loader)
            for process, tid, loader, worker in found
            if worker >= 0 and [process, tid] not in putting
        }

    # --- Slices and instants
    def _slices(self) -> Iterator[tuple[int, Sheets]]:
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
                names = _numbered(name, code, self.bars[mine])
                yield 2 * int(ended.sum()), self._drawn(names, event, rows, until, ended, end)
                for kind, words in FATES.items():
                    left = fate == kind
                    names = _numbered(name, code, self.bars[mine], f" ({words})")
                    yield int((left & (until >= 0)).sum()), self._drawn(names, event, rows, until, left & (until >= 0))
                    yield int((left & (until < 0)).sum()), self._drawn(names, event, rows, None, left & (until < 0))

    def _drawn_ends(self) -> Ints:
        """Return where each span is drawn to end, ns, so that spans nest on their track; -1 = at the trace's end."""
        spans, bars = self.spans.copy(), self.bars
        at_the_edge = (bars["fate"] != Fate.ENDED) & (bars["end"] >= self.scene.end)
        spans["end"] = np.where(at_the_edge, -1, bars["end"] + self.start)
        consumer = np.isin(spans["code"], _CONSUMES)
        lane = (consumer * 2 + (spans["code"] == ev.EPOCH[0])).astype(np.int64)
        return nest(spans, (spans["process"].astype(np.int64) << 49) | (lane << 32) | self._tids(spans))[0]

    def _titles(self, event: Event, mine: Bools) -> Iterator[tuple[str, Bools]]:
        """Yield the names of the event's spans, and which spans: the user's own names if the event has one."""
        for name, rows in _names(event, self.spans, mine, "b"):
            if not is_named(event):
                yield name, rows
                continue
            for process, text in distinct(self.spans[rows], "process", "bx"):
                title = name.replace(_label(event), self.trace.strings.get((process, text)) or event.name)
                yield title, rows & (self.spans["process"] == process) & (self.spans["bx"] == text)

    def _drawn(
        self,
        names: npt.NDArray[Any],
        event: Event,
        rows: Rows,
        until: Ints | None,
        which: Bools,
        end: Event | None = None,
    ) -> Sheets:
        """Return those `which` of the spans that begin with `event`: X slices up to `until`, or B events."""
        rows = rows[which]
        args = _Args(self, event)
        args.add_span(rows, end)
        columns = [names[which].tolist(), *self._where(rows), *us(rows["begin"] - self.start)]
        if until is None:
            return [args.sheet({"ph": "B", "name": ANY, **AT}, columns)]
        return [args.sheet({"ph": "X", "name": ANY, **AT, "dur": US}, columns + us(until[which] - rows["begin"]))]

    def _instants(self) -> Iterator[tuple[int, Sheets]]:
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
                columns = [*self._where(rows), *us(rows["time"] - self.start)]
                if code in (ev.INDEX_PUT, ev.YIELD):
                    event_of = {"ph": "X", "name": name, **AT, "dur": US}
                    yield len(rows), [args.sheet(event_of, columns + us(length[mine]))]
                else:
                    yield len(rows), [args.sheet({"ph": "i", "s": "t", "name": name, **AT}, columns)]

    def _note(self) -> Sheets:
        """Return the headline as a note on the lane that it points at; none if it points nowhere."""
        found = self.scene.headline
        if found.focus is None or self.scene.culprit < 0:
            return []
        row = self.scene.spans[self.scene.bars["span"][[self.scene.culprit]]]
        (pid,), (tid,) = self._where(row)
        at = us(np.array([max(found.focus.begin, found.focus.span) - self.start]))
        args = {"evidence": "; ".join(found.notes()), "next step": found.helps}
        event = {"ph": "i", "s": "t", "cat": NOTE, "name": found.title, "pid": pid, "tid": tid, "ts": US}
        return [Sheet({**event, "args": args}, at)]

    def _deaths(self) -> Iterator[Sheet]:
        """Yield a note at the last sign of life of each process that was found dead."""
        for death in self.scene.deaths:
            bar = self.scene.bars[self.scene.bars["lane"] == death.lane][-1:]
            (pid,), (tid,) = self._where(self.scene.spans[bar["span"]])
            event = {"ph": "i", "s": "t", "cat": DEATH, "name": death.words, "pid": pid, "tid": tid, "ts": US}
            yield Sheet(event, us(np.array([death.time])))

    def _last_poll(self) -> Iterator[Sheet]:
        """Yield the trace's last event if it is a poll that continues a wait: the UI's trace ends at its last line."""
        if len(self.spans) < len(self.scene.spans):
            row = self.events[-1:]
            (pid,), (tid,) = self._where(row)
            event = {"ph": "i", "s": "t", "name": "last event", "pid": pid, "tid": tid, "ts": US}
            yield Sheet(event, us(row["time"] - self.start))

    def _arrivals(self) -> Sheets:
        """Return the last moments of the waits that bring a pinned batch: slices for the batch's arrow to point at.

        The wait itself begins before its batch is pinned, and the UI lets no arrow point backwards in time.
        """
        spans = self._spans_of(ev.READY_GET[0])
        spans = spans[(spans["ex"] == Message.RESULT) & (spans["end"] >= 0)]
        event = EVENTS[ev.READY_GET[1]]
        args = _Args(self, event)
        args.add_span(spans, event)
        length = np.minimum(spans["end"] - spans["begin"], ANCHOR_NS)
        columns = [*self._where(spans), *us(spans["end"] - length - self.start), *us(length)]
        return [args.sheet({"ph": "X", "name": "arrived", **AT, "dur": US}, columns)]

    def _where(self, rows: Rows) -> list[list[int]]:
        """Return the columns pid and tid."""
        return [np.array(self.pids, np.int64)[rows["process"]].tolist(), self._tids(rows).tolist()]

    def _tids(self, rows: Rows) -> Ints:
        """Return the number of the lane of each row: of the consumer, of a device's stream, or of its thread."""
        consumes, tids = np.isin(rows["code"], _CONSUMES), rows["tid"].astype(np.int64)
        for process, loader in distinct(rows[consumes], "process", "loader"):
            mine = consumes & (rows["process"] == process) & (rows["loader"] == loader)
            tids[mine] = self._track(process, self._slot_of.get(loader, 0))
        streams = tids >= ev.DEVICE_TID
        for process, tid in distinct(rows[streams], "process", "tid"):
            tids[streams & (rows["process"] == process) & (rows["tid"] == tid)] = self._track(process, tid)
        return tids

    # --- Async slices: epochs and batches
    def _async(
        self, track: str, kind: str, rows: Rows, begin: Ints, end: Ints, args: Iterable[tuple[int, dict[str, object]]]
    ) -> Iterator[Sheet]:
        """Yield an async slice of a kind for each row. end: absolute ns as begin, NEVER = open; args: with its number.

        The UI names a track by what comes first on it, and shows the tracks of one name as one: so an instant with the
        track's name comes first, and the slice has its number in its name.
        """
        if not len(rows):
            return
        is_open = (end >= NEVER).tolist()
        numbered_args = list(args)
        names = [
            compact(f"{kind} {number}{f' ({FATES[Fate.OPEN]})' if lasts else ''}")
            for (number, _), lasts in zip(numbered_args, is_open, strict=True)
        ]
        tracks = [compact(self.named(track, loader)) for loader in rows["loader"].tolist()]
        pids = np.array(self.pids, np.int64)[rows["process"]].tolist()
        where = [[compact(f"{kind}{at}") for at in range(len(rows))], pids, pids]
        texts = [compact(words) for _, words in numbered_args]
        # The UI leaves an async slice without an end out: an open one ends with the trace, and its name says so.
        until = np.where(end < NEVER, end, int(self.events["time"][-1]))
        for phase, called, at, about in (
            ("n", tracks, begin, []),
            ("b", names, begin, [texts]),
            ("e", names, until, []),
        ):
            event = {"ph": phase, "name": ANY, "cat": "loader", "id2": {"local": ANY}, **AT}
            yield Sheet(event | ({"args": ANY} if about else {}), [called, *where, *us(at - self.start), *about])

    def _epochs(self, rows: Rows) -> Iterator[Sheet]:
        event, end = EVENTS[ev.EPOCH[0]], EVENTS[ev.EPOCH[1]]
        args = []
        for row in rows:
            words: dict[str, object] = {f.name: int(row[c]) for f, c in zip(event.fields, _BEGIN, strict=False)}
            for field, column in zip(end.fields, _END, strict=False):
                if row["end"] >= 0 or field.name not in words:
                    words[field.name] = value_of(field, int(row[column])) if row["end"] >= 0 else "did not end"
            args.append((int(row["bx"]), {**words, **_about(event)}))
        until = np.where(rows["end"] < 0, NEVER, rows["end"])
        return self._async("epoch", "epoch", rows, rows["begin"], until, args)

    def _in_flight(self) -> Iterator[Sheet]:
        """Yield a slice for each batch from index_put to yield: in as many rows as there are batches at once."""
        sent = self.batches.table
        ended = {0: "did not end", ev.EPOCH[1]: "given up: the epoch ended"}
        columns = zip(*(sent[name].tolist() for name in ("task", "worker", "ended_by")), strict=True)
        args: Iterator[tuple[int, dict[str, object]]] = (
            (task, {"task": task, "worker": worker, "ended by": ended.get(by) or EVENTS[by].name})
            for task, worker, by in columns
        )
        return self._async("batch in flight", "batch", self.pick(ev.INDEX_PUT), sent["put"], sent["end"], args)

    # --- Flows: a batch's path through the processes
    def _flows(self) -> Iterator[Sheet]:
        """Yield a flow for each batch, over the scene's stops: to its yield, or to the device that waits for it."""
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
        yield Sheet(event, [phase, *columns])

    def _stops(self) -> list[Ints]:
        """Return batch, time, process and tid of the stops on the batches' paths."""
        parts = []
        for rows, column in ((self.scene.spans, "span"), (self.events, "event")):
            stops = self.scene.stops[self.scene.stops[column] >= 0]
            mine = rows[stops[column]]
            time = stops["begin"] + self.start
            if column == "span":  # an arrow must end inside the slice, not at its end
                time = np.where(np.isin(stops["code"], AT_END), np.maximum(time - 1, mine["begin"]), time)
            parts.append((stops["batch"], time, mine["process"], self._tids(mine)))
        return [np.concatenate([np.asarray(part, np.int64) for part in column]) for column in zip(*parts, strict=True)]

    def _causes(self) -> Iterator[Sheet]:
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
        times = [(int(work["begin"]), max(int(work["begin"]), int(wait["begin"]))) for work, wait in ends]
        spans = self.scene.spans[np.array([bar["span"] for pair in ends for bar in pair], np.int64)]
        event = {"ph": ANY, "bp": "e", "cat": CAUSE, "name": "waited for", "id": INT, **AT}
        phases, numbers = ['"s"', '"f"'] * len(ends), np.arange(len(spans)) // 2
        at = us(np.array(times, np.int64).reshape(-1))
        yield Sheet(event, [phases, numbers.tolist(), *self._where(spans), *at])

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
    def _counters(self) -> Iterator[Sheet]:
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

    def _count(self, process: int, name: str, unit: str, steps: Steps) -> Sheet:
        """Return a counter's values; the UI shows it as "name unit"."""
        times, values = steps
        pid = self.pids[process]
        event = {"ph": "C", "cat": "loader", "name": name, "pid": pid, "tid": pid, "ts": US}
        return Sheet({**event, "args": {unit: INT}}, [*us(times - self.start), values.tolist()])

    def _queues(self, name: str, unit: str, put: int, got: int, message: Message) -> Iterator[Sheet]:
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

    def _sampled(self) -> Iterator[Sheet]:
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


_BEGIN, _END = ("bx", "by", "bz"), ("ex", "ey", "ez")


def _label(event: Event) -> str:
    """Return the name of a kind of span, as in every view. The UI makes a colour of it: of "idle" alone, red."""
    label = paint(event.code).label
    return "idle (no task)" if label == "idle" else label


def _names(event: Event, rows: Rows, mine: Bools, prefix: str) -> Iterator[tuple[str, Bools]]:
    """Yield the step's or the instant's name and the rows under it; the name of what is simulated says so.

    prefix: of the columns.
    """
    name, column = _label(event) if event.phase is Phase.BEGIN else event.name, simulated_column(event.code)
    if not column:
        yield name, mine
        return
    simulated = rows[prefix + column] != 0
    yield name, mine & ~simulated
    yield f"{name} (simulated)", mine & simulated


def _numbered(name: str, code: int, bars: Rows, words: str = "") -> npt.NDArray[Any]:
    """Return the title of each bar as JSON: name, number and words, as in captions."""
    before = numbered(code)[1]
    texts = np.array([f"{before} {n}" if n >= 0 else "" for n in bars["number"].tolist()], object)
    return compact(name)[:-1] + texts + compact(words)[1:]


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


class _Args:
    """The "args" of all events of one kind: what is the same for all, and columns of what differs."""

    def __init__(self, export: Export, event: Event) -> None:
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

    def sheet(self, event: Mapping[str, object], columns: list[list[Any]]) -> Sheet:
        """Return the events: `event` with its holes filled from `columns`, then the args."""
        args = {**dict.fromkeys(self.columns, ANY), **_about(self.event)}
        return Sheet({**event, "cat": self.event.track.value, "args": args}, [*columns, *self.columns.values()])
