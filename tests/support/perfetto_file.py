"""What is in a file of Perfetto's format: read by the rules of protobuf's encoding, without the code that writes it."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from minidl.tracefile.reader import Trace
from minidl.views.perfetto import write_perfetto

Fields = dict[int, list[Any]]


def fields(data: bytes) -> Fields:
    """The values of a message by their fields' numbers."""
    out: Fields = defaultdict(list)
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = number()
        match key & 7:
            case 0:
                out[key >> 3].append(number())
            case 1:
                out[key >> 3].append(data[at : at + 8])
                at += 8
            case 2:
                size = number()
                assert at + size <= len(data)
                out[key >> 3].append(data[at : at + size])
                at += size
            case kind:
                raise AssertionError(f"wire type {kind}")
    return out


class TrackRead(NamedTuple):
    title: str
    parent: int
    order: int
    about: str
    unit: str


class SliceRead(NamedTuple):
    """end: -1 = it has none. depth: 0 = in no other. flows: those that it is in, in the order of the events."""

    track: int
    name: str
    begin: int
    end: int
    depth: int
    args: dict[str, Any]


class PerfettoFile:
    """The tracks by number, slices, instants (slices without a length), counters and flows of a file."""

    def __init__(self, trace: Trace, place: Path) -> None:
        self.tracks: dict[int, TrackRead] = {}
        self.slices: list[SliceRead] = []
        self.instants: list[SliceRead] = []
        self.counts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.flows: dict[int, list[SliceRead]] = defaultdict(list)
        self._names: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        events = []
        for data in fields(write_perfetto(trace, place / "trace.pftrace").read_bytes())[1]:
            packet = fields(data)
            for descriptor in packet[60]:
                self._describe(fields(descriptor))
            for interned in packet[12]:
                for field, known in ((3, self._names), (29, self._texts)):
                    entries = (fields(one) for one in fields(interned)[field])
                    known.update({one[1][0]: one[2][0].decode() for one in entries})
            events += [(packet[8][0], fields(event)) for event in packet[11]]
        assert [time for time, _ in events] == sorted(time for time, _ in events)
        self._play(events)

    def _describe(self, own: Fields) -> None:
        (number,), (title,) = own[1], own[2]
        counter = fields(own[8][0]) if own[8] else {}
        parent = own[5][0] if own[5] else 0
        assert parent == 0 or parent in self.tracks
        self.tracks[number] = TrackRead(
            title.decode(), parent, own[12][0], b"".join(own[14]).decode(), b"".join(counter.get(6, [])).decode()
        )

    def _play(self, events: list[tuple[int, Fields]]) -> None:
        """As the processor does: an end is that of the innermost slice of its track."""
        stacks: dict[int, list[tuple[SliceRead, int]]] = defaultdict(list)
        steps: dict[int, list[int]] = defaultdict(list)
        for time, event in events:
            (kind,), (track,) = event[9], event[11]
            stack = stacks[track]
            if kind == 4:
                self.counts[track].append((time, event[30][0]))
                continue
            if kind == 2:
                _, place = stack.pop()
                self.slices[place] = self.slices[place]._replace(end=time)
            else:
                args = dict(self._annotation(fields(one)) for one in event[4])
                one = SliceRead(track, event[23][0].decode(), time, -1, len(stack), args)
                if kind == 3:
                    self.instants.append(one)
                    continue
                place = len(self.slices)
                self.slices.append(one)
                stack.append((one, place))
            for ident in event[47]:
                steps[struct.unpack("<Q", ident)[0]].append(place)
        self.flows.update({ident: [self.slices[place] for place in places] for ident, places in steps.items()})

    def _annotation(self, own: Fields) -> tuple[str, Any]:
        name = self._names[own[1][0]] if own[1] else ""
        if own[11]:
            return name, dict(self._annotation(fields(one)) for one in own[11])
        if own[12]:
            return name, [self._annotation(fields(one))[1] for one in own[12]]
        if own[17]:
            return name, self._texts[own[17][0]]
        if own[5]:
            return name, struct.unpack("<d", own[5][0])[0]
        if own[6]:
            return name, own[6][0].decode()
        if own[2]:
            return name, bool(own[2][0])
        (number,) = own[4]
        return name, number - (1 << 64) * (number >> 63)

    def title(self, track: int) -> str:
        return self.tracks[track].title

    def titles(self, parent: str = "") -> list[str]:
        """The titles of what lies in the tracks of this title, in their order; tracks of one title are shown as one."""
        numbers = [number for number, one in self.tracks.items() if one.title == parent] if parent else [0]
        inside = [one for one in self.tracks.values() if one.parent in numbers]
        return list(dict.fromkeys(one.title for one in sorted(inside, key=lambda one: one.order)))

    def tree(self, parent: int = 0, depth: int = 0) -> Iterator[str]:
        """Yield all titles in order, each indented by its depth."""
        inside = [number for number, one in self.tracks.items() if one.parent == parent]
        for number in sorted(inside, key=lambda number: self.tracks[number].order):
            yield "  " * depth + self.title(number)
            yield from self.tree(number, depth + 1)
