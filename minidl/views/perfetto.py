"""A trace in Perfetto's own format: the content of `chrome`, on explicitly ordered tracks.

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
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minidl.hang.finding import RunOutcome
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Ints
from minidl.tracefile.events import EVENTS, Phase
from minidl.tracefile.packs import whole
from minidl.views.chrome import CAUSE, COUNTERS, DEATH, NOTE, SAMPLED, DrawnLane, Export, LaneRole, Progress
from minidl.views.colours import BATCHES, RED, THEMES, paint, perfettos_name
from minidl.views.scene import ALARMS
from minidl.views.template import ANY, INT, US, Sheet

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

_FOREVER: Final = 1 << 62

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
    """The packets of one trace: those of `Export.groups`, one by one, then all in the order of their times."""

    def __init__(self, export: Export) -> None:
        self.export = export
        self.tracks = _Tracks(export)
        self._names: dict[str, int] = {}  # of annotations
        self._texts: dict[str, int] = {}  # that all events of a kind share
        self._events: list[bytes] = []  # without their times
        self._keys: list[tuple[Ints, Ints, Ints]] = []  # of the events: time, order at that time, how long it lasts
        self._slices: list[tuple[Ints, Ints, Ints, int]] = []  # track, begin, end; the event of the first one's begin
        self._points: list[tuple[str, Ints, Ints, Ints]] = []  # of flows: what they say; number, track, time
        self._titles: dict[str, tuple[int, str]] = {}  # of an async slice: its process, and its track's title

    def add_all(self, progress: Progress | None) -> None:
        done = 0
        self._headline()
        for drawn, sheets in self.export.groups():
            for sheet in sheets:
                self._add(sheet)
            done += drawn
            if progress is not None and drawn:
                progress(done, len(self.export.events))

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

    def _put_slices(self, begin: Ints, lasts: Ints, lanes: Ints, events: Iterable[bytes]) -> None:
        """Keep slices. lasts: ns, _FOREVER = they do not end. events: their begins."""
        self._slices.append((lanes, begin, begin + lasts, self._put(begin, _BEGINS, lasts, events)))
        if len(lasts) and lasts[0] < _FOREVER:
            ends = {lane: number_field(9, END) + number_field(11, lane) for lane in np.unique(lanes).tolist()}
            order = np.where(lasts > 0, _EARLIER, _ENDS)
            self._put(begin + lasts, order, lasts, map(ends.__getitem__, lanes.tolist()))

    def _bind_flows(self) -> None:
        """Name the flows in the events of the slices that their points lie in.

        A flow goes from slice to slice in the order of these events. So a slice that began before the slice that the
        flow comes from names it at its end, if it has one.
        """
        if not self._points or not self._slices:
            return
        lane, begin, end = (np.concatenate([part[n] for part in self._slices]) for n in range(3))
        begins = np.concatenate([first + np.arange(len(lanes)) for lanes, _, _, first in self._slices])
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
                late = begin[place] < last and end[place] < _FOREVER
                at = int(begins[place]) + (self._ends_after(int(begins[place])) if late else 0)
                last = int(end[place] if late else begin[place])
                self._events[at] += flow

    def _ends_after(self, begin: int) -> int:
        """Return how many events after that of a slice's begin its end is."""
        return next(len(lanes) for lanes, _, _, first in self._slices if first <= begin < first + len(lanes))

    # --- Events
    def _add(self, sheet: Sheet) -> None:
        rows = _Filled(sheet)
        if not rows.count:
            return
        time = rows.ns("ts")
        match sheet.event["ph"]:
            case "X" | "B" as phase:
                lasts = rows.ns("dur") if phase == "X" else np.full(rows.count, _FOREVER)
                lanes = self._lanes(rows)
                self._put_slices(time, lasts, lanes, self._bodies(BEGIN, rows, lanes))
            case "i":
                self._put(time, _AT, time * 0, self._bodies(INSTANT, rows, self._lanes(rows)))
            case "C":
                self._counts(rows, time)
            case "n":
                tracks = zip(rows["pid"], map(json.loads, rows["name"]), strict=True)
                self._titles.update(zip(rows["id2.local"], tracks, strict=True))
            case "b":
                self._begun = rows, time
            case "e":
                self._async_slices(*self._begun, time)
            case _:
                self._points.append((rows["cat"][0], np.array(rows["id"], np.int64), self._lanes(rows), time))

    def _async_slices(self, rows: _Filled, begin: Ints, end: Ints) -> None:
        """Keep slices that overlap: each on the first row of its track that is free."""
        lasts = np.maximum(end - begin, 0)
        free: dict[tuple[int, str], list[int]] = defaultdict(list)
        busy: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)  # until when, and number, of each row
        lanes = np.zeros(rows.count, np.int64)
        keys = rows["id2.local"]
        for at in np.argsort(begin, kind="stable").tolist():
            pid, title = track = self._titles[keys[at]]
            while busy[track] and busy[track][0][0] <= begin[at]:
                heapq.heappush(free[track], heapq.heappop(busy[track])[1])
            number = heapq.heappop(free[track]) if free[track] else len(busy[track])
            heapq.heappush(busy[track], (int(begin[at] + lasts[at]), number))
            lanes[at] = self.tracks.row(pid, title, number)
        self._put_slices(begin, lasts, lanes, self._bodies(BEGIN, rows, lanes))

    def _counts(self, rows: _Filled, time: Ints) -> None:
        (unit,) = (key.removeprefix("args.") for key in rows.keys if key.startswith("args."))
        track = self.tracks.counter(rows["pid"][0], rows["name"][0], unit)
        head = number_field(9, COUNT) + number_field(11, track)
        self._put(time, _AT, time * 0, [head + number_field(30, value) for value in rows[f"args.{unit}"]])

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

    def _lanes(self, rows: _Filled) -> Ints:
        keys = list(zip(rows["pid"], rows["tid"], strict=True))
        tracks = {key: self.tracks.lane(*key) for key in dict.fromkeys(keys)}
        return np.array([tracks[key] for key in keys], np.int64)

    def _bodies(self, kind: int, rows: _Filled, lanes: Ints) -> Iterable[bytes]:
        """Return the track events of a kind: type, track, category, name and annotations."""
        head = number_field(9, kind) + bytes_field(22, str(rows.constants.get("cat", ""))) + self._coloured(rows)
        tail = b""
        tracks = {lane: number_field(11, lane) for lane in np.unique(lanes).tolist()}
        columns: list[Iterable[bytes]] = [map(tracks.__getitem__, lanes.tolist())]
        if "name" in rows.constants:
            head += bytes_field(23, str(rows.constants["name"]))
        else:
            columns.append(_encoded(rows["name"], lambda text: bytes_field(23, json.loads(text))))
        for key in rows.keys:
            name = key.removeprefix("args.")
            if key == "args":
                columns.append(_encoded(rows[key], self._annotations))
            elif name == key:
                continue
            elif key in rows.constants:
                tail += self._shared(name, str(rows.constants[key]))
            else:
                columns.append(_encoded(rows[key], self._reader(name)))
        return map(b"".join, zip(repeat(head), *columns, repeat(tail)))

    def _coloured(self, rows: _Filled) -> bytes:
        """Return the correlation id of a kind of event, of which the UI makes its colour: that of the other views."""
        category = rows.constants.get("cat")
        if category in (NOTE, DEATH):
            return _colour(RED if category == DEATH else self._mood)
        event = BY_WORD.get(str(rows.constants.get("args.event", "")))
        if event is None:
            kind = str(rows["id2.local"][0]).strip('"').rstrip("0123456789") if "id2.local" in rows.keys else ""
            return _colour(_ASYNC[kind], lightest=True) if kind in _ASYNC else b""
        if rows.constants["ph"] == "i":
            return _colour(RED if event.code in ALARMS else THEMES["light"]["faint"])
        look = paint(event.code) if event.phase is Phase.BEGIN else None
        return b"" if look is None else _colour(look.colour, lightest=look.waits)

    @property
    def _mood(self) -> str:
        """The colour of the headline."""
        kind = self.export.scene.headline.outcome
        return RED if kind.wrong else _MOODS.get(kind, THEMES["light"]["faint"])

    def _reader(self, name: str) -> Callable[[str], bytes]:
        return lambda text: b"" if text == "null" else self._annotation(name, json.loads(text))

    def _annotations(self, text: str) -> bytes:
        return b"".join(self._annotation(key, value) for key, value in json.loads(text).items())

    def _annotation(self, name: str, value: object) -> bytes:
        return bytes_field(4, self._name(name) + self._value(value))

    def _shared(self, name: str, text: str) -> bytes:
        number = self._texts.setdefault(text, len(self._texts) + 1)
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


BY_WORD: Final = {f"{event.name}": event for event in EVENTS.values() if event.phase is not Phase.END}
"""The event of a kind of slice or instant."""

_ASYNC: Final = {"epoch": paint(ev.EPOCH[0]).colour, "batch": BATCHES[0]}
"""Colours of the slices that overlap, by kind."""

_MOODS: Final = dict.fromkeys(
    (RunOutcome.SLOW, RunOutcome.CUT, RunOutcome.MAYBE_HUNG, RunOutcome.MOVES), paint(ev.COPY[0]).colour
)
"""Colours of the headlines of runs that nothing is wrong with; grey if it says that all is well."""

_END_OF_PACKET: Final = number_field(10, _SEQUENCE) + number_field(13, 2)


def _encoded(texts: Sequence[str], encode: Callable[[str], bytes]) -> list[bytes]:
    """Return each text as `encode` does, which is asked once for each different text."""
    known = {text: encode(text) for text in dict.fromkeys(texts)}
    return [known[text] for text in texts]


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


class _Filled:
    """The columns of a sheet by the keys of its event: "args.task" for one of its args. constants: the other values."""

    def __init__(self, sheet: Sheet) -> None:
        rest = iter(sheet.columns)
        self.count = len(sheet.columns[0])
        self.constants: dict[str, object] = {}
        self._columns: dict[str, list[Any]] = {}
        self._parts: dict[str, tuple[list[int], list[int]]] = {}
        for key, value in chain.from_iterable(_flat(key, value) for key, value in sheet.event.items()):
            if value == US:
                self._parts[key] = next(rest), next(rest)
            elif value in (INT, ANY):
                self._columns[key] = next(rest)
            else:
                self.constants[key] = value
        self.keys = [*self.constants, *self._columns]

    def __getitem__(self, key: str) -> list[Any]:
        return self._columns[key] if key in self._columns else [self.constants[key]] * self.count

    def ns(self, key: str) -> Ints:
        """Return a column of times, ns."""
        whole_us, rest = self._parts[key]
        return np.array(whole_us, np.int64) * 1000 + np.array(rest, np.int64)


def _flat(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{key}.{name}", inner
    else:
        yield key, value


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
        """Return a row of slices that overlap. The UI stacks rows with one title."""
        group = self._rest(self._processes[pid])
        return self._track(("row", pid, title, number), group, (_ROWS, -("epoch" in title)), title)

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
