"""Reading a trace: a directory of a run that is live, finished or killed, or the one file it was packed into.

Interface: `read_trace(path)` -> `Trace`; its `events` (a structured array in time order), `spans()`, `select()`,
`to_pandas()`, `pack()`, and `problems`: what the trace lacks, in words.

Rules of use: whatever can be read is read, and the rest is said in `problems`; TraceError is for a path that holds no
trace, or one of a later format. Nothing of a file is executed or unpickled, and names inside a packed file are never
used as paths. A trace that is being written may be read: two readings are compared, and a record counts where they
agree.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minidl.tracing.attachments import NAME, Attachment, packed
from minidl.tracing.events import BY_NAME, EVENTS, FORMAT_VERSION, RECORD, WORKER_START, Event, Field, Phase, Track
from minidl.tracing.recorder import (
    EVENTS_SUFFIX,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MANIFEST,
    SIDE_SUFFIX,
    STATE,
    STATE_AT,
    TraceError,
)

if TYPE_CHECKING:
    import pandas as pd

    from minidl.tracing.causal import Order

__all__ = ["ROW", "SPAN", "Process", "Trace", "TraceError", "pairs", "read_trace"]

Rows = npt.NDArray[np.void]

PACKED_SUFFIX = ".minidl"

ROW = np.dtype([*((name, RECORD[name]) for name in RECORD.names or ()), ("pid", "<u4"), ("process", "<u4")])
"""One event of a Trace: a RECORD, and who emitted it (pid, and index in `Trace.processes`)."""

SPAN = np.dtype(
    [
        ("code", "<u2"),  # of the begin
        ("begin", "<i8"),  # ns, CLOCK_MONOTONIC
        ("end", "<i8"),  # ns; -1 = no end was recorded
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("process", "<u4"),
        ("loader", "<u2"),
        ("task", "<i8"),  # of the begin, or of the end where the begin has none
        ("worker", "<i8"),
        ("end_task", "<i8"),  # of the end; -1 = none, or open
        ("end_worker", "<i8"),
        *((name, "<i8") for name in ("bx", "by", "bz", "ex", "ey", "ez")),
    ]
)
"""One span: a begin and its end."""


def _code_table(holds: Callable[[Event], bool]) -> npt.NDArray[np.bool_]:
    """table[code] says whether `holds` is true of the code's event; False for the codes that the table has not."""
    table = np.zeros(1 << 16, bool)
    table[[code for code, event in EVENTS.items() if holds(event)]] = True
    return table


_MEMBER = re.compile(
    rf"manifest\.json|([0-9]{{1,9}}-[0-9]{{1,19}})(\.events|\.meta\.jsonl)|(?P<attachment>{NAME.pattern})"
)
_KNOWN = _code_table(lambda event: True)
_BEGIN = _code_table(lambda event: event.phase is Phase.BEGIN)
_END = _code_table(lambda event: event.phase is Phase.END)
_ROAMING = _code_table(lambda event: event.phase is not Phase.INSTANT and event.track in (Track.LOADER, Track.CONSUMER))


@dataclass
class Process:
    """One process that wrote to the trace. lost counts events that were overwritten or could not be recorded.

    whole_from: CLOCK_MONOTONIC ns of the oldest event, where older ones were overwritten; else 0. whole_until: of the
    newest one, where later ones could not be recorded; else 0. rank: where the trace joins several; else -1.
    """

    pid: int
    ppid: int = 0
    role: str = "other"
    worker: int = -1
    loader: int = 0
    start_ns: int = 0
    events: int = 0
    lost: int = 0
    whole_from: int = 0
    whole_until: int = 0
    rank: int = -1
    file: str = ""
    note: str = ""
    header: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        """For messages: "worker 2 (pid 71)", "rank 0 worker 2 (pid 71)"."""
        of = "" if self.rank < 0 else f"rank {self.rank} "
        return f"{of}{self.role}{'' if self.worker < 0 else f' {self.worker}'} (pid {self.pid})"


@dataclass
class Files:
    """A trace's files as bytes, wherever they came from; side and events files by their process's stem."""

    manifest: bytes | None = None
    side: dict[str, bytes] = field(default_factory=dict)
    events: dict[str, bytes] = field(default_factory=dict)
    attachments: list[Attachment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_trace(path: str | os.PathLike[str] | Trace) -> Trace:
    """Open the trace at `path`: a directory of a live, finished or killed run, or a packed file; a Trace is itself.

    Raises TraceError where there is no trace, where there are several, or where its format is of a later minidl.
    """
    if isinstance(path, Trace):
        return path
    place = Path(path)
    return Trace(place, read_files(place))


def read_files(place: Path) -> Files:
    """The files of the trace at `place`. Raises TraceError where there is none."""
    try:
        return _read_directory(place) if place.is_dir() else _read_packed(place)
    except OSError as error:
        raise TraceError(
            f"{place}: {error.strerror or error}: give the directory or the packed file of a trace"
        ) from error


# --- Where the bytes come from ----------------------------------------------------------------------------------------
def _read_directory(place: Path) -> Files:
    names = sorted(os.listdir(place))
    if not any(_MEMBER.fullmatch(name) for name in names):
        raise TraceError(no_trace_in(place, names))
    files = Files()
    for name in names:
        match = _MEMBER.fullmatch(name)
        if match is None or not (place / name).is_file():
            continue
        if match["attachment"]:
            files.attachments.append(Attachment(name, place / name))
            continue
        try:
            data = (place / name).read_bytes()
            if match[2] == EVENTS_SUFFIX:
                data = _agreed(data, (place / name).read_bytes())
        except OSError as error:
            files.problems.append(f"{name}: {error.strerror}")
            continue
        _file(files, match, data)
    return files


def _agreed(first: bytes, second: bytes) -> bytes:
    """The first of two readings of an events file, without the slots that were being written in between."""
    common = (min(len(first), len(second)) - HEADER_BYTES) // RECORD.itemsize
    if second.startswith(first) or common < 0:
        return first
    slots = [np.frombuffer(d, "<u8", 8 * common, HEADER_BYTES).reshape(common, 8) for d in (first, second)]
    same = (slots[0] == slots[1]).all(axis=1)
    return first[:HEADER_BYTES] + np.where(same[:, None], slots[0], np.uint64(0)).tobytes()


def _file(files: Files, match: re.Match[str], data: bytes) -> None:
    if match["attachment"]:
        files.attachments.append(Attachment(match["attachment"], data))
    elif match[2] is None:
        files.manifest = data
    else:
        (files.events if match[2] == EVENTS_SUFFIX else files.side)[match[1]] = data


def no_trace_in(place: Path, names: list[str]) -> str:
    """What to say of a directory with these names in it, which is no trace's."""
    inner = [n for n in names if (place / n / MANIFEST).is_file()]
    packed = [n for n in names if n.endswith(PACKED_SUFFIX)]
    if inner or packed:
        found = inner + packed
        return f"{place} is no trace but holds {len(found)}: give one of them: {', '.join(found[:8])}"
    if not names:
        return (
            f"{place} is an empty directory: no trace has been begun there. Record one with minidl run --trace {place} "
            f"SCRIPT, or by MINIDL_TRACE={place} in the environment of the job"
        )
    return f"{place} is no trace: it has no {MANIFEST}, but {', '.join(names[:4])}"


def _read_packed(place: Path) -> Files:
    with place.open("rb") as file:
        start = file.read(512)
        if start[:2] != b"\x1f\x8b":
            raise TraceError(_foreign(place, start))
        file.seek(0)
        plain, problem = _unzip(file)
    files = Files(problems=[f"{place.name}: {problem}"] if problem else [])
    for name, data in _members(plain, files.problems):
        match = _MEMBER.fullmatch(name)
        if match is None:
            files.problems.append(f"{place.name}: a member named {name[:80]!r} is no part of a trace and was left out")
        else:
            _file(files, match, data)
    if files.manifest is None and not files.side and not files.events:
        raise TraceError(f"{place} is compressed by gzip, but holds no minidl trace")
    return files


def _foreign(place: Path, start: bytes) -> str:
    if start.startswith(MAGIC) or place.name.endswith((EVENTS_SUFFIX, SIDE_SUFFIX)) or place.name == MANIFEST:
        return f"{place} is one file of a trace: give the directory that it is in: {place.absolute().parent}"
    found = "an empty file" if not start else f"a file that starts with {start[:16]!r}"
    return f"{place} is {found}, and no packed trace: give a file that minidl packed, or a trace's directory"


def _unzip(file: Any) -> tuple[bytes, str]:
    """All that a gzip file, perhaps cut short or damaged, still yields; and what is wrong with it, or ""."""
    unzip = zlib.decompressobj(wbits=31)
    parts = []
    try:
        while not unzip.eof and (piece := file.read(4096)):
            parts.append(unzip.decompress(piece))
    except zlib.error as error:
        return b"".join(parts), f"damaged ({error}): what comes before the damage was read"
    return b"".join(parts), "" if unzip.eof else "truncated: what is there was read"


def _members(plain: bytes, problems: list[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each plain member of a tar file, the last one perhaps cut short.

    Headers are taken one by one, and tarfile's own walk is not used: its extensions can lead it back and forth in a
    file made for that.
    """
    at = 0
    while any(block := plain[at : at + tarfile.BLOCKSIZE]) and len(block) == tarfile.BLOCKSIZE:
        try:
            member = tarfile.TarInfo.frombuf(block, "ascii", "replace")
        except tarfile.HeaderError as error:
            problems.append(f"the packed file is damaged behind its first {at} bytes ({error})")
            return
        at += tarfile.BLOCKSIZE
        size = max(0, member.size)
        if member.type == tarfile.REGTYPE:
            yield member.name, plain[at : at + size]
        else:
            problems.append(f"a member named {member.name[:80]!r} is no plain file and was left out")
        at += size + -size % tarfile.BLOCKSIZE


# --- What the bytes mean ----------------------------------------------------------------------------------------------
class Trace:
    """What a run recorded. Made by `read_trace`.

    manifest: dict, as written where the run began. events: array of ROW, by time. processes: by start.
    threads: (pid, tid) -> name. strings: (process, number) -> text. loaders: number -> parameters. attachments: what
    other recorders saw, by name; they are read when asked for their slices.
    problems: what the trace lacks, in words.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self.path = path
        self.problems: list[str] = list(files.problems)
        self.manifest: dict[str, Any] = self._read_manifest(files.manifest)
        self.processes: list[Process] = []
        self.threads: dict[tuple[int, int], str] = {}
        self.strings: dict[tuple[int, int], str] = {}
        self.loaders: dict[int, dict[str, Any]] = {}
        self.attachments: list[Attachment] = sorted(files.attachments, key=lambda one: one.name)
        self._lines: list[dict[str, Any]] = []
        self._files = Files(files.manifest, files.side)  # for `pack`; the events are kept once, in `events`
        parts = []
        for stem in sorted(files.side.keys() | files.events.keys(), key=_start_of):
            process = Process(pid=int(stem.split("-")[0]), start_ns=_start_of(stem)[0], file=stem)
            self.processes.append(process)
            self._read_side(len(self.processes) - 1, files.side.get(stem))
            parts.append(self._read_events(len(self.processes) - 1, files.events.get(stem)))
        everything = np.concatenate(parts) if parts else np.empty(0, ROW)
        everything = everything[np.argsort(everything["time"], kind="stable")]
        known = _KNOWN[everything["code"]]
        self.events: Rows = everything[known]
        self._unknown: Rows = everything[~known]
        self._note_gaps()

    def _read_manifest(self, data: bytes | None) -> dict[str, Any]:
        if data is None:
            self.problems.append(f"there is no {MANIFEST}: the run's versions, machine and command are unknown")
            return {}
        try:
            manifest = json.loads(data)
        except (ValueError, RecursionError):
            manifest = None
        if not isinstance(manifest, dict):
            self.problems.append(f"{MANIFEST} cannot be read: the run's versions, machine and command are unknown")
            return {}
        version = manifest.get("format")
        if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
            versions = manifest.get("versions")
            writer = versions.get("minidl", "?") if isinstance(versions, dict) else "?"
            raise TraceError(
                f"{self.path} was written by minidl {writer}, format {version}; this minidl reads up to format "
                f"{FORMAT_VERSION}: read it with the minidl that wrote it, or a later one"
            )
        lacks = manifest.get("lacks")  # what was found when several traces were joined
        self.problems += [text for text in lacks if isinstance(text, str)] if isinstance(lacks, list) else []
        return manifest

    def _read_side(self, index: int, data: bytes | None) -> None:
        process = self.processes[index]
        if data is None:
            self.problems.append(
                f"pid {process.pid}: {process.file}{SIDE_SUFFIX} is missing: role, thread names and texts are unknown"
            )
            return
        bad = 0
        for line in data.splitlines():
            try:
                facts = json.loads(line)
                self._take(index, _text(facts.pop("kind")), facts)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                bad += 1
        if bad:
            self.problems.append(
                f"pid {process.pid}: {_counted(bad, 'line')} of {process.file}{SIDE_SUFFIX} cannot be read"
            )

    def _take(self, index: int, kind: str, facts: dict[str, Any]) -> None:
        """Take in one line of a side file. Raises ValueError, TypeError or KeyError where it makes no sense."""
        process = self.processes[index]
        if kind == "process":
            process.role = _text(facts.get("role", process.role))
            process.ppid = int(facts.get("ppid", process.ppid))
            process.worker = int(facts.get("worker", process.worker))
            process.loader = int(facts.get("loader", process.loader))
            process.rank = int(facts.get("rank", process.rank))
        elif kind == "thread":
            self.threads[process.pid, int(facts["tid"])] = _text(facts["name"])
        elif kind == "string":
            self.strings[index, int(facts["id"])] = _text(facts["text"])
        elif kind == "loader":
            self.loaders[int(facts["loader"])] = {k: v for k, v in facts.items() if k != "loader"}
        elif kind == "refused":
            self.problems.append(
                f"pid {process.pid}: an event did not fit a record: code {facts['code']}, {facts['values']}"
            )
        self._lines.append({**facts, "kind": kind, "process": index})

    def _read_events(self, index: int, data: bytes | None) -> Rows:
        process = self.processes[index]
        problem = _header_problem(data)
        if problem:
            process.note = problem
            self.problems.append(f"pid {process.pid}: {process.file}{EVENTS_SUFFIX} {problem}")
            return np.empty(0, ROW)
        assert data is not None
        process.header = data[:HEADER_BYTES]
        ring = HEADER.unpack_from(data)[5]
        slots, process.lost, lost_lines, errno = STATE.unpack_from(data, STATE_AT)
        there = (len(data) - HEADER_BYTES) // RECORD.itemsize
        rows = _valid(data, ring)
        process.events = len(rows)
        if process.lost:
            process.whole_until = int(rows["time"].max()) if len(rows) else process.start_ns
            self._lack(process, f"{_counted(process.lost, 'event')} could not be recorded: {reason(errno)}")
        if lost_lines:
            self._lack(process, f"{_counted(lost_lines, 'description')} could not be recorded: {reason(errno)}")
        if there < slots:
            self._lack(process, f"its events file is truncated: {there} of {slots} slots are there")
        if len(rows):
            last = int(rows["seq"][-1])
            overwritten = max(0, last - ring) if ring else 0
            if overwritten:
                process.lost += overwritten
                process.whole_from = int(rows["time"][0])
                self._lack(process, f"the oldest {_counted(overwritten, 'event')} overwritten (the ring holds {ring})")
            if last - overwritten > len(rows):
                gaps = last - overwritten - len(rows)
                self._lack(
                    process,
                    f"{_counted(gaps, 'event')} missing: begun and never completed, or changed while being read",
                )
        out = np.empty(len(rows), ROW)
        for name in RECORD.names or ():
            out[name] = rows[name]
        out["pid"] = process.pid
        out["process"] = index
        return out

    def _lack(self, process: Process, what: str) -> None:
        process.note = f"{process.note}; {what}" if process.note else what
        self.problems.append(f"{process.name}: {what}")

    def _note_gaps(self) -> None:
        if not self.processes:
            self.problems.append("no process has recorded anything")
        for code, count in sorted(Counter(self._unknown["code"].tolist()).items()):
            self.problems.append(
                f"{_counted(count, 'event')} with code {code}, which this minidl does not know, left out"
            )
        started = self.events[self.events["code"] == WORKER_START[1]]
        for pid in sorted({int(row["x"]) for row in started if row["x"]} - {p.pid for p in self.processes}):
            self.problems.append(f"the worker with pid {pid} was started and has recorded nothing")

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        roles = Counter(p.role for p in self.processes)
        who = ", ".join(_counted(count, role) for role, count in roles.items())
        seconds = (int(self.events["time"][-1]) - int(self.events["time"][0])) / 1e9 if len(self) else 0
        lacks = f", {_counted(len(self.problems), 'problem')}" if self.problems else ""
        return f"<Trace {self.path}: {who or 'no processes'}; {_counted(len(self), 'event')} in {seconds:.3f} s{lacks}>"

    def described(self, kind: str) -> list[dict[str, Any]]:
        """All that was described under `kind`, in each process's order, with "process" (index) added."""
        return [line for line in self._lines if line["kind"] == kind]

    def text(self, row: np.void) -> str:
        """The text that an event of `events` carries in its string field; "" where it has none."""
        for column, own in zip("xyz", EVENTS[int(row["code"])].fields, strict=False):
            if own.unit == "string":
                return self.strings.get((int(row["process"]), int(row[column])), "")
        return ""

    def select(self, name: str, phase: Phase | None = None) -> Rows:
        """The events called `name`, of one phase or of all. Raises KeyError where the table has no such event."""
        codes = [e.code for (n, p), e in BY_NAME.items() if n == name and phase in (None, p)]
        if not codes:
            raise KeyError(f"no event is called {name!r} with phase {phase}: see minidl.tracing.events.BY_NAME")
        return self.events[np.isin(self.events["code"], codes)]

    def spans(self) -> Rows:
        """Every begin with its end: array of SPAN, by begin; end = -1 where none was recorded. See `pairs`."""
        return pairs(self)

    def whole_from(self, loader: int) -> int:
        """CLOCK_MONOTONIC ns from which on no process has overwritten events of this loader; 0 where none has."""
        there = np.unique(self.events["process"][self.events["loader"] == loader])
        return max((self.processes[index].whole_from for index in there), default=0)

    def whole_until(self, loader: int) -> int:
        """CLOCK_MONOTONIC ns up to which all processes have recorded this loader; the greatest int64 if to the end.

        A process whose disk is full stops recording, and its run goes on.
        """
        there = np.unique(self.events["process"][self.events["loader"] == loader])
        cut = [self.processes[index].whole_until for index in there if self.processes[index].whole_until]
        return min(cut, default=int(np.iinfo(np.int64).max))

    @cached_property
    def order(self) -> Order:
        """What happened before what, by sequence numbers and messages; see `causal.Order`. Made when first asked."""
        from minidl.tracing.causal import Order

        return Order(self)

    def before(self, event: int | np.void, task: int | None = None) -> npt.NDArray[np.bool_]:
        """mask[i]: did event i of `events` happen before `event` (its position, or its row)? No clock is asked.

        task: only what was done for that task. KeyError where the trace has no such event.
        """
        return self.order.before(event, task)

    def happened_before(self, a: int | np.void, b: int | np.void) -> bool | None:
        """True if `a` happened before `b`, False if after it, None if no message orders them. See `before`."""
        return self.order.happened_before(a, b)

    def chain(self, event: int | np.void) -> npt.NDArray[np.int64]:
        """Positions in `events` of the causes of `event` that came last, from its epoch's begin on to the event."""
        return self.order.chain(event)

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame, one row an event, in time order.

        Columns: name, phase, track, time_ns, pid, tid, process, role, task, worker, loader, and the events' own fields
        under their names, missing where an event has no such field; `pid`, where it is an event's own field, is
        called event_pid. Enumerations are given by name, strings as text. Needs pandas: ImportError says how to get it.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("Trace.to_pandas needs pandas: pip install pandas") from error
        rows = self.events
        roles = np.array([p.role for p in self.processes] or [""], dtype=object)
        codes = rows["code"]
        columns: dict[str, Any] = {
            "name": pd.Categorical(_per_code(codes, lambda e: e.name)),
            "phase": pd.Categorical(_per_code(codes, lambda e: e.phase.value)),
            "track": pd.Categorical(_per_code(codes, lambda e: e.track.value)),
            "time_ns": rows["time"],
            **{name: rows[name] for name in ("pid", "tid", "process")},
            "role": pd.Categorical(roles[rows["process"]]),
            **{name: rows[name] for name in ("task", "worker", "loader")},
        }
        own = {(f"event_{f.name}" if f.name in columns else f.name): f for e in self._kinds() for f in e.fields}
        for name, what in own.items():
            columns[name] = self._own_column(what)
        return pd.DataFrame(columns)

    def _kinds(self) -> list[Event]:
        """The events that occur, in the table's order."""
        present = set(np.unique(self.events["code"]).tolist())
        return [event for code, event in EVENTS.items() if code in present]

    def _own_column(self, what: Field) -> Any:
        """The values of one of the events' own fields, over all events; missing where an event has no such field."""
        import pandas as pd

        values = np.zeros(len(self), np.int64)
        there = np.zeros(len(self), bool)
        for event in self._kinds():
            for column, own in zip("xyz", event.fields, strict=False):
                if own.name == what.name:
                    mask = self.events["code"] == event.code
                    values[mask] = self.events[column][mask]
                    there |= mask
        if what.unit == "string":
            texts = [
                self.strings.get((p, n)) if t else None
                for p, n, t in zip(self.events["process"].tolist(), values.tolist(), there, strict=True)
            ]
            return pd.Series(texts, dtype=object)
        if what.enum is None:
            return pd.arrays.IntegerArray(values, ~there)
        members = list(what.enum)
        place = np.full(len(self), -1)
        for number, member in enumerate(members):
            place[there & (values == member.value)] = number
        return pd.Categorical.from_codes(place, [m.name for m in members])

    def pack(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace as one compressed file, without the slots that are not used.

        Attachments go with it as far as `attachments.MOST_PACKED` allows; of the others it keeps that they were there.
        Returns its path; `.minidl` is added where it is not the suffix. A file that is there is replaced once the new
        one is whole. The same trace gives the same bytes.
        """
        target = Path(path)
        target = target if target.suffix == PACKED_SUFFIX else target.with_name(target.name + PACKED_SUFFIX)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with (
                draft.open("wb") as file,
                gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as zipped,
                tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as tar,
            ):
                for name, data in self._packed_members():
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
        return target

    def _packed_members(self) -> Iterator[tuple[str, bytes]]:
        """The words before the events, so that a packed file that is cut short still knows whose events it lacks."""
        if self._files.manifest is not None:
            yield MANIFEST, self._files.manifest
        for stem, data in self._files.side.items():
            yield stem + SIDE_SUFFIX, data
        for index, process in enumerate(self.processes):
            if process.header:
                yield process.file + EVENTS_SUFFIX, self._events_file(index)
        yield from packed(self.attachments)

    def _events_file(self, index: int) -> bytes:
        """The process's events file again, each record in its slot, the unused end cut off."""
        header = bytearray(self.processes[index].header)
        ring = HEADER.unpack_from(header)[5]
        rows = np.concatenate([part[part["process"] == index] for part in (self.events, self._unknown)])
        slots = (rows["seq"] - np.uint64(1)) % np.uint64(ring) if ring else rows["seq"] - np.uint64(1)
        out = np.zeros(int(slots.max()) + 1 if len(rows) else 0, RECORD)
        for name in RECORD.names or ():
            out[name][slots] = rows[name]
        STATE.pack_into(header, STATE_AT, len(out), *STATE.unpack_from(header, STATE_AT)[1:])
        return bytes(header) + out.tobytes()


def _per_code(codes: npt.NDArray[np.uint16], what: Callable[[Event], str]) -> npt.NDArray[np.object_]:
    table = np.array([what(EVENTS[c]) if c in EVENTS else "" for c in range(max(EVENTS) + 1)], dtype=object)
    out: npt.NDArray[np.object_] = table[codes]
    return out


def _start_of(stem: str) -> tuple[int, int]:
    pid, start = stem.split("-")
    return int(start), int(pid)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _text(value: object) -> str:
    """`value`, a str, with escapes for what no encoding can write: who prints it must not fail for it."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a text belongs")
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def _header_problem(data: bytes | None) -> str:
    if data is None:
        return "is missing: none of its events are here"
    if len(data) < HEADER_BYTES or not any(data[:HEADER_BYTES]):
        return "has no header yet: the process was stopped, or the disk was full, before its first event"
    magic, version = HEADER.unpack_from(data)[:2]
    if magic != MAGIC:
        return f"starts with {data[:8]!r}, and is no events file"
    if version != FORMAT_VERSION:
        return f"is of format {version}, and this minidl reads format {FORMAT_VERSION}: read it with a later minidl"
    return ""


def reason(errno: int) -> str:
    """Of an errno that a file holds, in words."""
    return os.strerror(errno) if 0 < errno < 4096 else "reason unknown"


def _valid(data: bytes, ring: int) -> Rows:
    """The records of an events file, in order of emission: a slot counts if its sequence number belongs there."""
    slots = (len(data) - HEADER_BYTES) // RECORD.itemsize
    rows: Rows = np.frombuffer(data, RECORD, slots, HEADER_BYTES)
    number = rows["seq"] - np.uint64(1)  # of an empty slot: the greatest there is
    place = number % np.uint64(ring) if ring else number
    rows = rows[(place == np.arange(slots, dtype=np.uint64)) & (rows["seq"] > 0) & (rows["time"] > 0)]
    if ring and len(rows):
        rows = rows[np.argsort(rows["seq"], kind="stable")]
        rows = rows[rows["seq"] > max(0, int(rows["seq"][-1]) - ring)]
    return rows


# --- Spans ------------------------------------------------------------------------------------------------------------
def pairs(trace: Trace) -> Rows:
    """Every begin with its end: array of SPAN, by begin.

    An end closes the last open begin of its name in its thread and loader. What is left of the loader's own spans is
    tried again without the thread: an iterator may be closed by another thread than the one that began the epoch.
    """
    events = trace.events
    return _spans(events, np.flatnonzero(_BEGIN[events["code"]]), ends(events))


def ends(events: Rows) -> npt.NDArray[np.int64]:
    """For each event, a begin, the position of its end; -1 = none, or no begin."""
    codes = events["code"]
    end_of = np.full(len(events), -1, np.int64)
    _match(events, np.flatnonzero(_BEGIN[codes] | _END[codes]), ["process", "tid", "loader"], end_of)
    alone = end_of < 0
    alone[end_of[end_of >= 0]] = False
    _match(events, np.flatnonzero(_ROAMING[codes] & alone), ["process", "loader"], end_of)
    return end_of


def _match(events: Rows, index: npt.NDArray[np.int64], keys: list[str], end_of: npt.NDArray[np.int64]) -> None:
    """For the begins and ends at `index`, set end_of[begin] = position of its end, last in first out within `keys`."""
    codes = events["code"][index]
    is_begin = _BEGIN[codes]
    columns = [np.where(is_begin, codes, codes - 1), *(events[key][index] for key in keys)]
    order = np.lexsort(columns)
    new = np.zeros(len(order), bool)
    for column in columns:
        new[1:] |= column[order][1:] != column[order][:-1]
    group = np.cumsum(new)
    step = np.where(is_begin, 1, -1)[order]
    depth = np.cumsum(step) + (step < 0)  # after a begin, before an end: the same number for the two of a pair
    inner = np.lexsort((depth, group))
    begin, end = inner[:-1], inner[1:]
    paired = (group[begin] == group[end]) & (depth[begin] == depth[end]) & (step[begin] > 0) & (step[end] < 0)
    end_of[index[order[begin[paired]]]] = index[order[end[paired]]]


def _spans(events: Rows, begins: npt.NDArray[np.int64], end_of: npt.NDArray[np.int64]) -> Rows:
    out = np.zeros(len(begins), SPAN)
    first = events[begins]
    ends = end_of[begins]
    closed = ends >= 0
    last = events[ends[closed]]
    for name in ("code", "pid", "tid", "process", "loader", "task", "worker"):
        out[name] = first[name]
    out["begin"] = first["time"]
    for name in ("end", "end_task", "end_worker"):
        out[name] = -1
    out["end"][closed] = last["time"]
    for name in ("task", "worker"):
        out["end_" + name][closed] = last[name]
        out[name] = np.where(out[name] < 0, out["end_" + name], out[name])
    for name in "xyz":
        out["b" + name] = first[name]
        out["e" + name][closed] = last[name]
    return out
