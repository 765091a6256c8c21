"""The records of other recorders (`Trace.attachments`), on tracks of their own in an export.

Interface: `Attached(trace, pids, start)`: `processes` and `threads` that its tracks belong to, `things()` with slices,
arrows and instants, `problems` in words. A track of a process that the trace knows is drawn in that process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from minidl.tracefile.arrays import Ints
from minidl.tracefile.attachments import Attachment, Name, Slices, SliceTrack, places
from minidl.tracefile.spans import stack
from minidl.views.drawn import DrawnSlices, Flows, Instants

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


ATTACHED_IDS: Final = 1 << 23
"""From here on: numbers of attached tracks, of processes that only an attachment knows (a GPU), and of arrows."""

_WORDS: Final = {"functions": ("functions", "defined at"), "profiler": ("operators", "category")}
"""What a track shows, and what `Name.about` is, by kind of attachment."""


@dataclass(frozen=True)
class _Drawn:
    """The drawn slices of one kind. rows: of `slices`, in time order; begin, end: ns since the trace's first event."""

    kind: str
    slices: Slices
    rows: Ints
    begin: Ints
    end: Ints
    pids: Ints
    tids: Ints


class Attached:
    """The attachments of a trace. processes: title -> pid, of those that only an attachment knows.

    pids: the number that each process of the trace is drawn under. start: the trace's first event, ns.
    threads: pid, tid and title of each track.
    """

    def __init__(self, trace: Trace, pids: list[int], start: int) -> None:
        self.trace = trace
        self.start = start
        self.processes: dict[str, int] = {}
        self.threads: list[tuple[int, int, str]] = []
        self._pids = pids
        self._tids: dict[tuple[str, SliceTrack, int], int] = {}
        by_kind: dict[str, list[Attachment]] = {}
        for one in trace.attachments:
            by_kind.setdefault(one.kind, []).append(one)
        joined = {kind: _joined(parts) for kind, parts in by_kind.items()}
        homes = {kind: [self._pid(kind, track) for track in slices.tracks] for kind, slices in joined.items()}
        self.problems = [problem for one in trace.attachments for problem in one.problems]
        self._drawn = [self._draw(kind, slices, homes[kind]) for kind, slices in joined.items()]

    def things(self) -> Iterator[DrawnSlices | Flows | Instants]:
        """Yield the slices, their arrows, and an instant at the end of an incomplete attachment."""
        for drawn in self._drawn:
            yield self._slices(drawn)
            yield from self._arrows(drawn)
        yield from self._ends()

    def _pid(self, kind: str, track: SliceTrack) -> int:
        """Return the process that a track is drawn in."""
        for pid, process in zip(self._pids, self.trace.processes, strict=True):
            if process.pid == track.pid and not track.group:
                return pid
        title = f"{track.group or f'process {track.pid}'} ({kind})"
        return self.processes.setdefault(title, ATTACHED_IDS + len(self.processes))

    def _draw(self, kind: str, slices: Slices, pids: list[int]) -> _Drawn:
        lane, end = stack(slices.rows)
        early = (end <= self.start) & (slices.rows["begin"] < self.start)
        for what, count in (("overlap too deeply", (lane < 0).sum()), ("end before the first event", early.sum())):
            if count:
                self.problems.append(f"{kind}: {count} slices {what} and are not drawn")
        rows = np.flatnonzero((lane >= 0) & ~early)
        rows = rows[np.argsort(slices.rows["begin"][rows], kind="stable")]
        track = slices.rows["track"][rows]
        tids = {}
        for number, row in np.unique(np.stack([track, lane[rows]], axis=1), axis=0).tolist():
            known = (kind, slices.tracks[number], row)
            tid = self._tids.setdefault(known, ATTACHED_IDS + len(self.processes) + len(self._tids))
            tids[number, row] = tid
            self.threads.append((pids[number], tid, self._title(*known)))
        return _Drawn(
            kind, slices, rows, np.maximum(slices.rows["begin"][rows] - self.start, 0), end[rows] - self.start,
            np.array(pids or [0], np.int64)[track],
            np.array([tids[key] for key in zip(track.tolist(), lane[rows].tolist(), strict=True)], np.int64),
        )  # fmt: skip

    def _title(self, kind: str, track: SliceTrack, row: int) -> str:
        known = None if track.group or kind != "functions" else self.trace.threads.get((track.pid, track.tid))
        what = "" if track.group else f"{_WORDS.get(kind, (kind, ''))[0]}: "
        return f"{what}{known or track.title}{f' ({row + 1})' if row else ''}"

    def _slices(self, drawn: _Drawn) -> DrawnSlices:
        about = _WORDS.get(drawn.kind, ("", "about"))[1]
        slices = drawn.slices
        same = [{about: name.about} if name.about else {} for name in slices.names]
        which = slices.rows["name"][drawn.rows].tolist()
        own = [
            {about: slices.names[name].about} | slices.args[row] if row in slices.args else same[name]
            for row, name in zip(drawn.rows.tolist(), which, strict=True)
        ]
        names = [slices.names[n].name for n in which]
        return DrawnSlices(
            category=drawn.kind, names=names, own=own, pids=drawn.pids, tids=drawn.tids, begin=drawn.begin,
            end=drawn.end,
        )  # fmt: skip

    def _arrows(self, drawn: _Drawn) -> Iterator[Flows]:
        """Yield arrows from a request to what it requested, as from a launch to its kernel."""
        place = {row: n for n, row in enumerate(drawn.rows.tolist())} if drawn.slices.arrows else {}
        known = [
            (number, place[one], place[other])
            for number, (one, other) in enumerate(drawn.slices.arrows)
            if one in place and other in place
        ]
        if known:
            numbers = np.array(known, np.int64)
            rows, ids = numbers[:, 1:].reshape(-1), ATTACHED_IDS + np.repeat(numbers[:, 0], 2)
            yield Flows(drawn.kind, "launch", ids, drawn.pids[rows], drawn.tids[rows], drawn.begin[rows])

    def _ends(self) -> Iterator[Instants]:
        """Yield an instant after the last slice of each incomplete attachment."""
        for one in self.trace.attachments:
            rows = one.slices.rows
            if not one.problems or not len(rows):
                continue
            last = int(np.argmax(rows["end"]))
            track = one.slices.tracks[int(rows["track"][last])]
            tid = self._tids.get((one.kind, track, 0))
            if tid is not None:
                yield Instants(
                    category=one.kind, names=[f"{one.kind} lost"], pids=np.array([self._pid(one.kind, track)]),
                    tids=np.array([tid]), begin=rows["end"][[last]] - self.start, same={"lacks": one.problems},
                )  # fmt: skip


def _joined(parts: list[Attachment]) -> Slices:
    """Return the slices of several attachments as those of one."""
    if len(parts) == 1:
        return parts[0].slices
    tracks: dict[SliceTrack, int] = {}
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
