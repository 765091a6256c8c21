"""A trace in Perfetto's own format: what `export` draws, on explicitly ordered tracks.

Interface: `write_perfetto(trace, path)` writes the file; `GROUPS` are the tracks to unfold at first.

Each lane is a track of its own, not a thread: the UI then titles it as it is called, leaves it where the order puts it,
and folds under it what belongs to it. The outermost track is the headline, and lasts as long as the trace. In it lie
the lanes by role, or a group for each rank, by number. In a rank the worker that the headline points at comes before
the other workers, and those of its iterator before other iterators'. Of several ranks, the lanes after the workers are
folded. A process has its feeder threads, the depths of its queues, its samples and other recorders' tracks folded under
its lane. Batches in flight share as many rows as there are at once. An event's values are annotations.

The format is https://perfetto.dev/docs/reference/synthetic-track-event, encoded as
https://protobuf.dev/programming-guides/encoding. The few lines that encode it are here, since importing minidl needs
torch and NumPy alone; the tests of `viewer` let Perfetto's own trace processor read the file.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from minidl.hang.finding import RunOutcome
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Ints
from minidl.tracefile.batches import NEVER
from minidl.tracefile.events import Phase
from minidl.tracefile.packs import whole
from minidl.views.colours import BATCHES, RED, THEMES, paint, perfettos_name
from minidl.views.drawn import CAUSE, DEATH, NOTE, Counts, DrawnSlices, Flows, Instants, Overlapping, Things, encoded
from minidl.views.export import COUNTERS, SAMPLED, Drawn, DrawnLane, Export, LaneRole, Progress
from minidl.views.scene import ALARMS

if TYPE_CHECKING:
    from os import PathLike

    from minidl.tracefile.reader import Trace

HEADLINE: Final = "headline"
"""Title of the outermost track."""

GROUPS: Final = f"^({HEADLINE}|rank [0-9]+)$"
"""Regular expression for the titles of the tracks that lanes lie in."""

BEGIN, END, INSTANT, COUNT = 1, 2, 3, 4
"""TrackEvent.Type."""

_EXPLICIT: Final = 3
"""TrackDescriptor.ChildTracksOrdering: by each child's rank."""

_SEQUENCE: Final = 1
"""All packets are of one sequence, which begins with the texts that the others name by number."""

_EARLIER, _BEGINS, _AT, _ENDS = range(4)
"""Order of what happens at one time on one track: slices that end, that begin, what lies in them, empty ones' ends."""

CHUNK: Final = 20_000
"""Packets that are joined before they are written."""


def write_perfetto(trace: Trace, path: str | PathLike[str], progress: Progress | None = None) -> Path:
    """Write the trace to `path`, replacing what is there, and return the path. Raises OSError as `open` does.

    progress is called after each kind of event.
    """
    target = Path(path)
    file = _File(Export(trace, ranked=False))
    file.add_all(progress)
    with whole(target) as draft, draft.open("wb") as out:
        out.writelines(file.pieces())
    return target


# --- Encoding ---------------------------------------------------------------------------------------------------------
def varint(number: int) -> bytes:
    """Return a number as a varint; a negative one as its two's complement of 64 bits."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_SHORT: Final = [varint(number) for number in range(4096)]


def number_field(field: int, number: int) -> bytes:
    return varint(field << 3) + varint(number)


def bytes_field(field: int, value: bytes | str) -> bytes:
    data = value.encode("utf-8", "backslashreplace") if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(data)) + data


def _prefixed(tag: bytes, bodies: Iterable[bytes]) -> list[bytes]:
    """Return each body as a field: tag, length, body."""
    return [tag + (_SHORT[size] if (size := len(body)) < 4096 else varint(size)) + body for body in bodies]


def _varints(numbers: Ints) -> list[bytes]:
    """Return each number, 0 or more, as a varint of nine bytes: a reader accepts one that is longer than it need be."""
    shifts = np.arange(9, dtype=np.int64) * 7
    digits = (numbers[:, None] >> shifts & 0x7F | np.where(np.arange(9) < 8, 0x80, 0)).astype(np.uint8)
    data = digits.tobytes()
    return [data[at : at + 9] for at in range(0, len(data), 9)]


# --- The file ---------------------------------------------------------------------------------------------------------
class _File:
    """The packets of one trace: those of `Export.things`, one by one, then all in the order of their times."""

    def __init__(self, export: Export) -> None:
        self.export = export
        self.tracks = _Tracks(export)
        self._names: dict[str, int] = {}  # of annotations
        self._texts: dict[str, int] = {}  # that all events of a kind share
        self._events: list[bytes] = []  # without their times
        self._keys: list[tuple[Ints, Ints, Ints]] = []  # of the events: time, order at that time, how long it lasts
        self._slices: list[tuple[Ints, ...]] = []  # track, begin, end; of begin and end their event (-1 = none)
        self._points: list[tuple[str, Ints, Ints, Ints]] = []  # of flows: what they say; number, track, time

    def add_all(self, progress: Progress | None) -> None:
        self._headline()
        for thing in self.export.things(progress):
            self._add(thing)

    def pieces(self) -> Iterator[bytes]:
        """Yield the file: the texts, the tracks, and the events in the order of their times."""
        interned = b"".join(
            bytes_field(field, number_field(1, number) + bytes_field(2, text))
            for field, known in ((3, self._names), (29, self._texts))
            for text, number in known.items()
        )
        first = number_field(13, 3) + number_field(87, 1) + bytes_field(12, interned)
        yield bytes_field(1, number_field(10, _SEQUENCE) + first)
        yield from self.tracks.packets()
        if not self._keys:
            return
        self._bind_flows()
        time, order, lasts = (np.concatenate(column) for column in zip(*self._keys, strict=True))
        places = np.lexsort((-lasts, order, time))
        for at in range(0, len(places), CHUNK):
            some = places[at : at + CHUNK]
            events = _prefixed(b"\x5a", map(self._events.__getitem__, some.tolist()))
            whole_events = zip(repeat(b"\x40"), _varints(time[some]), events, repeat(_END_OF_PACKET))
            yield b"".join(_prefixed(b"\x0a", map(b"".join, whole_events)))

    def _put(self, time: Ints, order: Ints | int, lasts: Ints, events: Iterable[bytes]) -> int:
        """Keep track events, and return the number of the first. lasts: ns, of slices that begin."""
        first = len(self._events)
        self._events.extend(events)
        self._keys.append((time, np.broadcast_to(np.int64(order), time.shape), lasts))
        return first

    def _put_slices(self, begin: Ints, end: Ints, lanes: Ints, events: Iterable[bytes]) -> None:
        """Keep slices. end: NEVER = they do not end. events: their begins."""
        ended = end < NEVER
        lasts = np.where(ended, end - begin, NEVER)
        begins = self._put(begin, _BEGINS, lasts, events) + np.arange(len(begin))
        tracks = {lane: number_field(9, END) + number_field(11, lane) for lane in np.unique(lanes).tolist()}
        order = np.where(lasts > 0, _EARLIER, _ENDS)[ended]
        first = self._put(end[ended], order, lasts[ended], map(tracks.__getitem__, lanes[ended].tolist()))
        self._slices.append((lanes, begin, end, begins, np.where(ended, first + np.cumsum(ended) - 1, -1)))

    def _bind_flows(self) -> None:
        """Name the flows in the events of the slices that their points lie in.

        A flow goes from slice to slice in the order of these events. So a slice that began before the slice that the
        flow comes from names it at its end, if it has one.
        """
        if not self._points or not self._slices:
            return
        lane, begin, end, begins, ends = (np.concatenate(column) for column in zip(*self._slices, strict=True))
        order = np.lexsort((-end, begin, lane))
        bound: dict[tuple[str, int], list[int]] = defaultdict(list)
        points = [
            (track, at, what, number)
            for what, numbers, tracks, times in self._points
            for number, track, at in zip(numbers.tolist(), tracks.tolist(), times.tolist(), strict=True)
        ]
        inside = _innermost(lane[order], begin[order], end[order], points)
        for (_, _, what, number), held in zip(points, inside, strict=True):
            if held:
                # A wait for a batch lies in the loop's `next`.
                place = order[held[0] if what == CAUSE and bound[what, number] else held[-1]]
                bound[what, number].append(int(place))
        for ident, slices in enumerate(bound.values(), 1):
            flow = b"\xf9\x02" + np.uint64(ident).tobytes()  # flow_ids, fixed64
            last = -1
            for place in slices if len(slices) > 1 else ():
                late = begin[place] < last and ends[place] >= 0
                last = int(end[place] if late else begin[place])
                self._events[ends[place] if late else begins[place]] += flow

    # --- Events
    def _add(self, thing: Drawn) -> None:
        match thing:
            case Overlapping():
                lanes = self._rows_of(thing)
                self._put_slices(thing.begin, thing.end, lanes, self._bodies(BEGIN, thing, lanes))
            case DrawnSlices():
                lanes = self._lanes(thing.pids, thing.tids)
                self._put_slices(thing.begin, thing.end, lanes, self._bodies(BEGIN, thing, lanes))
            case Instants():
                lanes = self._lanes(thing.pids, thing.tids)
                self._put(thing.begin, _AT, thing.begin * 0, self._bodies(INSTANT, thing, lanes))
            case Counts() if len(thing.times):
                head = number_field(9, COUNT) + number_field(11, self.tracks.counter(thing.pid, thing.name, thing.unit))
                counts = [head + number_field(30, value) for value in thing.values.tolist()]
                self._put(thing.times, _AT, thing.times * 0, counts)
            case Flows() if len(thing.times):
                lanes = self._lanes(thing.pids, thing.tids)
                self._points.append((thing.category, thing.numbers, lanes, thing.times))

    def _rows_of(self, thing: Overlapping) -> Ints:
        """Return the row of each slice: the first one of its track that is free."""
        free: dict[tuple[int, str], list[int]] = defaultdict(list)
        busy: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)  # until when, and number, of each row
        lanes = np.zeros(len(thing), np.int64)
        for at in np.argsort(thing.begin, kind="stable").tolist():
            track = pid, title = int(thing.pids[at]), thing.tracks[at]
            while busy[track] and busy[track][0][0] <= thing.begin[at]:
                heapq.heappush(free[track], heapq.heappop(busy[track])[1])
            number = heapq.heappop(free[track]) if free[track] else len(busy[track])
            heapq.heappush(busy[track], (max(int(thing.end[at]), int(thing.begin[at])), number))
            lanes[at] = self.tracks.row(pid, title, number)
        return lanes

    def _headline(self) -> None:
        """Keep the headline: a slice as long as the trace, which says what the trace is and what it lacks."""
        export, found = self.export, self.export.scene.headline
        lane = np.array([self.tracks.root()])
        if not len(export.trace):
            return
        about: dict[str, object] = {f"evidence {n}": text for n, text in enumerate(found.notes(), 1)}
        about |= {"next step": found.helps} if found.helps else {}
        about |= {key: value for key, value in export.about().items() if key != "headline" and value}
        body = (
            number_field(9, BEGIN) + number_field(11, int(lane[0])) + bytes_field(23, found.title) + _colour(self._mood)
        )
        body += b"".join(self._annotation(key, value) for key, value in about.items())
        self._put_slices(lane * 0, lane * 0 + export.scene.last, lane, [body])

    def _lanes(self, pids: Ints, tids: Ints) -> Ints:
        keys = zip(pids.tolist(), tids.tolist(), strict=True)
        return np.array(encoded(keys, lambda key: self.tracks.lane(*key)), np.int64)

    def _bodies(self, kind: int, thing: Things, lanes: Ints) -> Iterable[bytes]:
        """Return the track events of a kind: type, track, category, name and annotations."""
        head = number_field(9, kind) + bytes_field(22, thing.category) + self._coloured(thing)
        columns = [encoded(lanes.tolist(), lambda lane: number_field(11, lane))]
        columns.append(encoded(thing.names, lambda name: bytes_field(23, name)))
        columns += [encoded(values, self._reader(name)) for name, values in thing.columns.items()]
        if thing.own:
            known = {id(one): self._annotations(one) for one in thing.own}
            columns.append([known[id(one)] for one in thing.own])
        tail = b"".join(self._shared(name, value) for name, value in thing.same.items())
        return map(b"".join, zip(repeat(head), *columns, repeat(tail)))

    def _coloured(self, thing: Things) -> bytes:
        """Return the correlation id of a kind of event, of which the UI makes its colour: that of the other views."""
        match thing:
            case Overlapping():
                return _colour(_OVERLAPPING[thing.kind], lightest=True)
            case Instants() if thing.category in (NOTE, DEATH):
                return _colour(RED if thing.category == DEATH else self._mood)
            case Instants() if thing.event is not None:
                return _colour(RED if thing.event.code in ALARMS else THEMES["light"]["faint"])
            case DrawnSlices() if thing.event is not None and thing.event.phase is not Phase.INSTANT:
                look = paint(thing.event.code)
                return _colour(look.colour, lightest=look.waits)
        return b""

    @property
    def _mood(self) -> str:
        """The colour of the headline."""
        kind = self.export.scene.headline.outcome
        return RED if kind.wrong else _MOODS.get(kind, THEMES["light"]["faint"])

    def _reader(self, name: str) -> Callable[[object], bytes]:
        return lambda value: b"" if value is None else self._annotation(name, value)

    def _annotations(self, values: Mapping[str, object]) -> bytes:
        return b"".join(self._annotation(key, value) for key, value in values.items())

    def _annotation(self, name: str, value: object) -> bytes:
        return bytes_field(4, self._name(name) + self._value(value))

    def _shared(self, name: str, value: object) -> bytes:
        if not isinstance(value, str):
            return self._annotation(name, value)
        number = self._texts.setdefault(value, len(self._texts) + 1)
        return bytes_field(4, self._name(name) + number_field(17, number))

    def _name(self, name: str) -> bytes:
        """Return the name of an annotation. The UI reads a dot or brackets in it as a path."""
        plain = name.replace(" [", ", ").replace("]", "").replace("[", " ").replace(".", " ")
        return number_field(1, self._names.setdefault(plain, len(self._names) + 1))

    def _value(self, value: object) -> bytes:
        match value:
            case bool():
                return number_field(2, value)
            case int():
                return number_field(4, value)
            case float():
                return b"\x29" + np.float64(value).tobytes()
            case dict():
                return b"".join(bytes_field(11, self._name(str(k)) + self._value(v)) for k, v in value.items())
            case list() | tuple():
                return b"".join(bytes_field(12, self._value(one)) for one in value)
            case _:
                return bytes_field(6, str(value))


def _colour(colour: str, lightest: bool = False) -> bytes:
    return bytes_field(53, perfettos_name(colour, lightest))


_OVERLAPPING: Final = {"epoch": paint(ev.EPOCH[0]).colour, "batch": BATCHES[0]}
"""Colours of the slices that overlap, by kind."""

_MOODS: Final = dict.fromkeys(
    (RunOutcome.SLOW, RunOutcome.CUT, RunOutcome.MAYBE_HUNG, RunOutcome.MOVES), paint(ev.COPY[0]).colour
)
"""Colours of the headlines of runs that nothing is wrong with; grey if it says that all is well."""

_END_OF_PACKET: Final = number_field(10, _SEQUENCE) + number_field(13, 2)


def _innermost(
    lane: Ints, begin: Ints, end: Ints, points: Sequence[tuple[int, int, str, int]]
) -> list[tuple[int, ...]]:
    """Return for each point (its lane and time come first) the slices around it, the innermost last.

    lane, begin, end: of slices, by these; they nest.
    """
    out: list[tuple[int, ...]] = [()] * len(points)
    bounds = {int(one): at for one, at in zip(*np.unique(lane, return_index=True), strict=True)}
    begins, ends = begin.tolist(), end.tolist()
    for track, mine in groupby(sorted(range(len(points)), key=points.__getitem__), key=lambda n: points[n][0]):
        next_slice, around = bounds.get(track, len(lane)), list[int]()
        for number in mine:
            at = points[number][1]
            while next_slice < len(lane) and lane[next_slice] == track and begins[next_slice] <= at:
                around.append(next_slice)
                next_slice += 1
            around = [one for one in around if ends[one] > at or begins[one] == at]
            out[number] = tuple(around)
    return out


# --- Tracks -----------------------------------------------------------------------------------------------------------
class _Tracks:
    """The tracks that events ask for: each with its title, what it lies in, and its place there."""

    def __init__(self, export: Export) -> None:
        self.export = export
        self._lanes = {(export.pids[lane.process], lane.tid): (n, lane) for n, lane in enumerate(export.lanes)}
        self._processes = {pid: index for index, pid in enumerate(export.pids)}
        self._attached = {pid: title for title, pid in export.attached.processes.items()}
        self._threads = {(pid, tid): title for pid, tid, title in export.attached.threads}
        self._ranks = len({export.rank(index) for index in range(len(export.pids))})
        spot = export.scene.headline.focus
        self._first = (-1, -1) if spot is None else (spot.process, spot.loader)
        self._numbers: dict[object, int] = {}
        self._fields: dict[int, bytes] = {}  # of each track's descriptor, but for its place
        self._places: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)  # parent -> child -> place

    def packets(self) -> Iterator[bytes]:
        """Yield the descriptors, a parent's before its children's."""
        order = {
            track: place
            for children in self._places.values()
            for place, track in enumerate(sorted(children, key=lambda track: (children[track], track)), 1)
        }
        for track, fields in self._fields.items():
            yield bytes_field(1, bytes_field(60, fields + number_field(12, order.get(track, 0))))

    def _track(self, key: object, parent: int, place: tuple[int, ...], title: str, more: bytes = b"") -> int:
        """Return the number of a track, which is made when it is first asked for."""
        if key not in self._numbers:
            track = self._numbers[key] = len(self._numbers) + 1
            self._places[parent][track] = place
            within = number_field(5, parent) if parent else b""
            self._fields[track] = (
                number_field(1, track) + bytes_field(2, title) + within + number_field(11, _EXPLICIT) + more
            )
        return self._numbers[key]

    def root(self) -> int:
        return self._track(HEADLINE, 0, (), HEADLINE)

    def _group(self, index: int) -> int:
        """Return what the lanes of a process's rank lie in."""
        rank = self.export.rank(index)
        return self.root() if rank < 0 else self._track(("rank", rank), self.root(), (-1, rank), f"rank {rank}")

    def _comes_later(self, worker: int) -> int:
        """Return 0 for the worker that the headline points at, 1 for others of its iterator, 2 for the rest."""
        process, loader = self._first
        return (worker != process) + (self.export.trace.processes[worker].loader != loader)

    def _rest(self, index: int) -> int:
        """Return what the lanes after the workers lie in: of several ranks, a group, so that more ranks can be seen."""
        if self._ranks < 2:
            return self._group(index)
        key, title = ("rest", self.export.rank(index)), "pin thread, device, batches"
        return self._track(key, self._group(index), (LaneRole.PIN_THREAD,), title)

    def _of_process(self, pid: int) -> int:
        """Return the lane of a process; that of a device that only an attachment knows."""
        if pid in self._attached:
            return self._track(("attached", pid), self._group(0), (_ATTACHED, pid), self._attached[pid])
        index = self._processes[pid]
        return self.lane(pid, self.export.trace.processes[index].pid)

    def lane(self, pid: int, tid: int) -> int:
        """Return the track of a thread, or of what is drawn as one."""
        place, lane = self._lanes.get((pid, tid), (0, None))
        if lane is None:
            title = self._threads.get((pid, tid), f"thread {tid}")
            return self._track((pid, tid), self._of_process(pid), (_ATTACHED, tid), title)
        if lane.role is LaneRole.THREAD:
            return self._track((pid, tid), self._of_process(pid), (lane.role, place), lane.name)
        later = self._comes_later(lane.process) if lane.role is LaneRole.WORKER else 0
        inside = self._group(lane.process) if lane.role <= LaneRole.WORKER else self._rest(lane.process)
        return self._track((pid, tid), inside, (lane.role, later, place), self._title(lane))

    def _title(self, lane: DrawnLane) -> str:
        pid = self.export.trace.processes[lane.process].pid
        return f"{lane.name}, pid {pid}" if lane.tid == pid else lane.name

    def row(self, pid: int, title: str, number: int) -> int:
        """Return a row of slices that overlap. The UI stacks rows with one title; epochs are drawn first."""
        group = self._rest(self._processes[pid])
        return self._track(("row", pid, title, number), group, (_ROWS,), title)

    def counter(self, pid: int, name: str, unit: str) -> int:
        """Return a counter's track: of a worker's process, under its lane; of a loader's, in a group for its rank."""
        title, index = f"{name} {unit}".strip(), self._processes[pid]
        parent = self._of_process(pid)
        if self.export.trace.processes[index].worker < 0:
            parent = self._track(("counters", index), self._rest(index), (_COUNTERS, index), "counters")
        about = (COUNTERS | SAMPLED).get(title.rpartition(": ")[2], "")
        more = bytes_field(8, bytes_field(6, unit)) + (bytes_field(14, about) if about else b"")
        return self._track(("counter", pid, title), parent, (_COUNTERS, len(self._numbers)), title, more)


_ROWS, _ATTACHED, _COUNTERS = range(len(LaneRole), len(LaneRole) + 3)
"""Places after the lanes."""
