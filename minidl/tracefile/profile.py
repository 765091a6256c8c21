"""What torch.profiler exported, as an attachment on the trace's clock.

Interface: `profile(path, trace)` reads one file of `export_chrome_trace` (.json, .json.gz). Its times are wall-clock
times. They become CLOCK_MONOTONIC by the offset between the two clocks that every process of the trace noted when it
began, and the run when it ended; the attachment states how well those agree. A profile that cannot be of this run is
refused: another host's, another process's, another time's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np

from minidl.tracefile import attachments
from minidl.tracefile.arrays import Rows
from minidl.tracefile.attachments import SLICE, Attachment, Name, SliceTrack
from minidl.tracefile.facts import LATEST
from minidl.tracefile.format import TraceError
from minidl.tracefile.packs import Unzipped
from minidl.tracefile.reader import Trace
from minidl.tracefile.words import duration

_ON_DEVICE: Final = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync"}
"""Categories of slices whose pid is a device's number, and whose tid is a stream's."""

_RUNTIME: Final = ("_runtime", "_driver")
"""What the categories of calls end with that start something on a device, under the same `correlation`."""

_UNTOLD: Final = {"Ev Idx", "Record function id", "External id", "device", "stream"}
"""Arguments that say nothing outside the profile, or that the track says."""

CLOCK_SET_NS: Final = 100_000_000
"""Processes that disagree by more about the wall clock were not merely held up between reading two clocks."""

_CHUNK: Final = 20_000

GZIP: Final = b"\x1f\x8b"


def profile(path: Path, trace: Trace, others: Sequence[Attachment] = ()) -> bytes:
    """The profile at `path` as an attachment's bytes, on the trace's clock.

    others: attachments that are about to be made. Raises TraceError if it is no profile of torch's, is cut short,
    cannot be of the trace's run, or is in the trace already; OSError if it cannot be read.
    """
    document = _parsed(path)
    base = document["baseTimeNanoseconds"]
    offset, error, furthest = _wall_offset(trace)
    found = _Found(base - offset)
    for event in document["traceEvents"]:
        found.take(event)
    _check_origin(path, document, found, trace)
    identity = str(document.get("trace_id", "")) or f"{path.name} {base} {len(document['traceEvents'])}"
    if any(one.about.get("identity") == identity for one in [*trace.attachments, *others]):
        raise TraceError(f"{path} is in this trace already: nothing was changed")
    first = attachments.description(
        "profiler", "torch.profiler", str(document.get("schemaVersion", "")), found.pid,
        "wall clock minus the offset to CLOCK_MONOTONIC that the trace's processes noted", error,
        offset_ns=offset, identity=identity, file=path.name,
    )  # fmt: skip
    doubt = f"the wall clock seems to have been set during the run: its times may be off by {duration(furthest)}"
    warning = attachments.note(doubt) if furthest > CLOCK_SET_NS else b""
    return first + warning + b"".join(found.lines())


def _parsed(path: Path) -> dict[str, Any]:
    """The document, its fractions as Decimal: microseconds since 1970 with three decimals are too fine for a float."""
    data = path.read_bytes()
    if data.startswith(GZIP):
        with path.open("rb") as file:
            plain = Unzipped(path, file)
            data = b"".join(plain.rest())
        if plain.problem:
            why = plain.problem.partition(":")[0]
            raise TraceError(f"{path} is cut short or damaged ({why}): export or copy the profile again")
    try:
        document = json.loads(data, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        if b'"traceEvents"' in data[:4096] and b"baseTimeNanoseconds" in data[:4096]:
            raise TraceError(f"{path} is cut short or damaged ({error}): export or copy the profile again") from error
        raise _no_profile(path, "it is not JSON") from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise _no_profile(path, "it has no list of traceEvents")
    if type(document.get("baseTimeNanoseconds")) is not int:
        raise _no_profile(path, "it does not say its clock's baseTimeNanoseconds")
    return document


def _no_profile(path: Path, why: str) -> TraceError:
    return TraceError(
        f"{path} is not a profile of torch.profiler: {why}. Give the file that `export_chrome_trace` wrote"
    )


def _wall_offset(trace: Trace) -> tuple[int, int, int]:
    """CLOCK_REALTIME minus CLOCK_MONOTONIC during the run: the median of what its processes noted, ns.

    Then how far the middle half of the notes lie from it, and how far the furthest one does: a process may be stopped
    between reading one clock and the other. Both clocks are slewed alike; only a wall clock that is set parts them.
    """
    noted = [trace.manifest, *trace.described("trace_end")]
    noted += [
        {"monotonic_ns": line.get("start_monotonic_ns"), "realtime_ns": line.get("start_realtime_ns")}
        for line in trace.described("process")
    ]
    pairs = [(line.get("realtime_ns"), line.get("monotonic_ns")) for line in noted]
    offsets = sorted(wall - mono for wall, mono in pairs if type(wall) is int and type(mono) is int)
    if not offsets:
        raise TraceError(f"{trace.path} does not say how its clock is related to the wall clock: nothing can be merged")
    middle = offsets[len(offsets) // 2]
    cut = len(offsets) // 4
    near = max(middle - offsets[cut], offsets[-1 - cut] - middle)
    return middle, near, max(middle - offsets[0], offsets[-1] - middle)


def _check_origin(path: Path, document: dict[str, Any], found: _Found, trace: Trace) -> None:
    """Raise TraceError if the profile is of another run."""
    host, own = document.get("host_name"), trace.manifest.get("host")
    if isinstance(host, str) and isinstance(own, str) and host != own:
        raise TraceError(
            f"{path} was recorded on {host!r}, and {trace.path} on {own!r}: give a profile of the same run"
        )
    if not found.begin:
        raise TraceError(f"{path} holds nothing that took time: was the profiler stopped before it was exported?")
    if not len(trace.events):
        raise TraceError(f"{trace.path} holds no events to put a profile beside")
    first, last = int(trace.events["time"][0]), int(trace.events["time"][-1])
    begin, end = min(found.begin), max(b + d for b, d in zip(found.begin, found.duration, strict=True))
    if end < first or begin > last:
        late = begin > last
        gap = begin - last if late else first - end
        raise TraceError(
            f"{path} {'begins' if late else 'ends'} {duration(gap)} {'after' if late else 'before'} {trace.path} "
            f"{'ends' if late else 'begins'}: they are of different runs, or of different boots of the machine"
        )
    pids = {process.pid for process in trace.processes}
    if not found.pids & pids:
        theirs = ", ".join(map(str, sorted(found.pids))) or "none"
        raise TraceError(
            f"{path} is of process {theirs}, and {trace.path} of {', '.join(map(str, sorted(pids)))}: "
            "give the profile of the process that iterated over the loader"
        )


@dataclass
class _Found:
    """The slices of a profile. base: CLOCK_MONOTONIC ns of its time 0."""

    base: int
    pids: set[int] = field(default_factory=set)
    titles: dict[tuple[int, int], str] = field(default_factory=dict)
    tracks: dict[SliceTrack, int] = field(default_factory=dict)
    names: dict[Name, int] = field(default_factory=dict)
    begin: list[int] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    track: list[int] = field(default_factory=list)
    name: list[int] = field(default_factory=list)
    args: dict[int, dict[str, Any]] = field(default_factory=dict)
    launches: dict[int, int] = field(default_factory=dict)  # correlation -> slice
    launched: list[tuple[int, int]] = field(default_factory=list)  # correlation, slice

    @property
    def pid(self) -> int:
        """The profiled process."""
        return min(self.pids, default=0)

    def take(self, event: Any) -> None:
        """Take over an event, if it is a slice of a thread or a stream; skip what can't be read."""
        if not isinstance(event, dict):
            return
        pid, tid, args = event.get("pid"), event.get("tid"), event.get("args")
        args = args if isinstance(args, dict) else {}
        if type(pid) is not int or type(tid) is not int:
            return  # the profiler's own notes: their pid is a text
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            self.titles[pid, tid] = str(args.get("name", ""))
        begin, duration = _ns(event.get("ts")), _ns(event.get("dur"))
        if event.get("ph") == "X" and begin is not None and duration is not None:
            begin += self.base
            if 0 <= begin < LATEST // 2 and duration >= 0:
                self._take_slice(event, pid, tid, args, begin, duration)

    def _take_slice(self, event: Any, pid: int, tid: int, args: dict[str, Any], begin: int, duration: int) -> None:
        category = str(event.get("cat", ""))
        number = len(self.begin)
        self.begin.append(begin)
        self.duration.append(duration)
        self.name.append(self.names.setdefault(Name(str(event.get("name", "")), category), len(self.names)))
        track = self._stream(pid, tid, category, args) if category in _ON_DEVICE else SliceTrack(pid, tid, "")
        self.track.append(self.tracks.setdefault(track, len(self.tracks)))
        if category not in _ON_DEVICE:
            self.pids.add(pid)
        told = {str(key): _plain(value) for key, value in args.items() if key not in _UNTOLD}
        if told:
            self.args[number] = told
        correlation = args.get("correlation")
        if type(correlation) is int and correlation > 0:
            if category.endswith(_RUNTIME):
                self.launches.setdefault(correlation, number)
            elif category in _ON_DEVICE:
                self.launched.append((correlation, number))

    def _stream(self, pid: int, tid: int, category: str, args: dict[str, Any]) -> SliceTrack:
        """Return the stream's track, or its track of annotations, which overlap the other slices."""
        device = args.get("device", pid)
        title = f"stream {args.get('stream', tid)}" + (": annotations" if category == "gpu_user_annotation" else "")
        return SliceTrack(pid, tid, title, f"GPU {device}")

    def lines(self) -> Iterator[bytes]:
        """Yield all lines of the attachment but the first."""
        rows = np.empty(len(self.begin), SLICE)
        rows["begin"], rows["track"], rows["name"] = self.begin, self.track, self.name
        rows["end"] = rows["begin"] + self.duration
        named = [
            t if t.title else t._replace(title=self.titles.get((t.pid, t.tid), f"thread {t.tid}")) for t in self.tracks
        ]
        for at in range(0, len(rows), _CHUNK):
            yield self._chunk(rows[at : at + _CHUNK], at, named)
        yield attachments.arrows((self.launches[c], n) for c, n in self.launched if c in self.launches)
        yield attachments.closing()

    def _chunk(self, rows: Rows, at: int, tracks: list[SliceTrack]) -> bytes:
        """Return a chunk with only the names that occur in it."""
        used, own = np.unique(rows["name"], return_inverse=True)
        all_names = list(self.names)
        rows = rows.copy()
        rows["name"] = own
        args = {n - at: self.args[n] for n in range(at, at + len(rows)) if n in self.args}
        return attachments.chunk(tracks, [all_names[n] for n in used.tolist()], rows, args)


def _ns(us: object) -> int | None:
    """Return microseconds as whole ns; None for anything else."""
    if isinstance(us, bool) or not isinstance(us, (int, Decimal)):
        return None
    exact = Decimal(us)
    return round(exact * 1000) if abs(exact) < LATEST // 2000 else None


def _plain(value: Any) -> Any:
    """Return a value of args for JSON; lists and objects as text."""
    if isinstance(value, (list, dict)):
        try:
            return json.dumps(value, default=float)
        except (ValueError, RecursionError):
            return "?"
    return float(value) if isinstance(value, Decimal) else value
