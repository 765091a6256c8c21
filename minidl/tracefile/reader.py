"""Reading a trace: a directory of a run that is live, finished or killed, or the one file it was packed into.

Interface: `read_trace(path)` -> `Trace`; its `events` (a structured array in time order), `spans()`, `select()`,
`to_pandas()`, `pack()`, and `problems`: what the trace lacks, in words.

Rules of use: whatever can be read is read, and the rest is said in `problems`; TraceError is for a path that holds no
trace, or one of a later format. Nothing of a file is executed or unpickled, and names inside a packed file are never
used as paths. A trace that is being written may be read: two readings are compared, and a record counts if they
agree.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from minidl.tracefile import stack_samples, watched
from minidl.tracefile.arrays import Bools, Ints, Rows, table_of
from minidl.tracefile.attachments import Attachment, packed
from minidl.tracefile.events import EVENTS, GC, WORKER_START, Event, Field, Phase, codes_where
from minidl.tracefile.facts import LATEST, MOST_TASKS, MOST_WORKERS, read_facts
from minidl.tracefile.files import Files, read_files
from minidl.tracefile.format import (
    EVENTS_SUFFIX,
    FORMAT_VERSION,
    MANIFEST,
    RECORD,
    ROW,
    SIDE_SUFFIX,
    Header,
    TraceError,
    errno_in_words,
    events_file,
    header_problem,
    parts_of,
    records,
    slots_of,
)
from minidl.tracefile.order import Order
from minidl.tracefile.packs import write_packed
from minidl.tracefile.process import Process
from minidl.tracefile.spans import pairs
from minidl.tracefile.stack_samples import StackSamples
from minidl.tracefile.watched import Watched
from minidl.tracefile.words import counted, duration, plain

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Process", "Trace", "read_trace"]


_KNOWN = table_of(EVENTS)

T = TypeVar("T")


def read_trace(path: str | os.PathLike[str] | Trace) -> Trace:
    """Open the trace at `path`: a directory of a live, finished or killed run, or a packed file; a Trace is itself.

    Raises TraceError if there is no trace, if there are several, or if its format is of a later minidl.
    """
    if isinstance(path, Trace):
        return path
    place = Path(path)
    return Trace(place, read_files(place))


def _imports(rows: Rows) -> Ints:
    """Find a process's first events that are pauses of the collector, and ended: those of imports, seconds earlier."""
    pauses = np.isin(rows["code"], GC)
    first = rows["time"][~pauses].min(initial=np.iinfo(np.int64).max)
    early = np.flatnonzero(pauses & (rows["time"] < first)) if not pauses.all() else np.empty(0, np.int64)
    early = early[np.argsort(rows["time"][early], kind="stable")]
    depth = np.cumsum(np.where(rows["code"][early] == GC[0], 1, -1))
    return early[: np.flatnonzero(depth == 0)[-1] + 1] if np.any(depth == 0) else early[:0]


# --- What the bytes mean ----------------------------------------------------------------------------------------------
class Trace:
    """What a run recorded. Made by `read_trace`.

    manifest: dict, as written where the run began. events: array of ROW, by time. left_out: the events of unknown
    codes, and the collector's pauses before anything else that a process does, but for workers. processes: by start.
    threads: (pid, tid) -> name. strings: (process, number) -> text. loaders: number -> parameters. attachments: what
    other recorders saw, by name; they are read when asked for their slices. lines: all that was described, in each
    process's order, with "process" (index) added.
    start: CLOCK_MONOTONIC ns of time 0, that of its first event. seen: of the look at a run that goes on, else 0.
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
        attached = sorted(files.attachments, key=lambda one: one.name)
        self.attachments: list[Attachment] = [one for one in attached if one.kind != watched.KIND]
        self._watches = [one for one in attached if one.kind == watched.KIND]
        self.lines: list[dict[str, Any]] = []
        self._part = files.part
        self._files = Files(files.manifest, files.side)  # for `pack`; the events are kept once, in `events`
        parts, known = [], []
        for stem in sorted(files.side.keys() | files.events.keys(), key=lambda stem: parts_of(stem)[::-1]):
            pid, start = parts_of(stem)
            process = Process(pid=pid, start_ns=start, file=stem)
            self.processes.append(process)
            self._read_side(len(self.processes) - 1, files.side.get(stem))
            parts.append(self._read_events(len(self.processes) - 1, files.events.get(stem)))
            known.append(_KNOWN[parts[-1]["code"]])
            if process.role != "worker":
                known[-1][_imports(parts[-1])] = False
        everything = np.concatenate(parts) if parts else np.empty(0, ROW)
        order = np.argsort(everything["time"], kind="stable")
        everything, seen = everything[order], (np.concatenate(known) if known else np.empty(0, bool))[order]
        self.events: Rows = everything[seen]
        self.left_out: Rows = everything[~seen]
        self.start = int(self.events["time"][0]) if len(self.events) else 0
        self.seen = 0
        self._made: dict[str, tuple[Rows, Any]] = {}
        self._place_ranks()
        self._note_gaps()

    def _read_manifest(self, data: bytes | None) -> dict[str, Any]:
        if data is None:
            self.problems.append(f"there is no {MANIFEST}: the run's versions, machine and command are unknown")
            return {}
        try:
            manifest, unsound = read_facts(data)
        except (ValueError, RecursionError):
            self.problems.append(f"{MANIFEST} cannot be read: the run's versions, machine and command are unknown")
            return {}
        version = manifest.get("format")
        if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
            versions = manifest.get("versions")
            writer = plain(str(versions.get("minidl", "?"))) if isinstance(versions, dict) else "?"
            raise TraceError(
                f"{self.path} was written by minidl {writer}, format {version!r}; this minidl reads up to format "
                f"{FORMAT_VERSION}: read it with the minidl that wrote it, or a later one"
            )
        self.problems += [f"{MANIFEST}: its {plain(name)} cannot be read" for name in unsound]
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
                facts, unsound = read_facts(line)
                self._take(index, _text(facts.pop("kind")), facts)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                bad += 1
            else:
                bad += bool(unsound)
        if bad:
            self.problems.append(
                f"pid {process.pid}: {counted(bad, 'line')} of {process.file}{SIDE_SUFFIX} cannot be read"
            )

    def _take(self, index: int, kind: str, facts: dict[str, Any]) -> None:
        """Take in one line of a side file. Raises ValueError, TypeError or KeyError if it makes no sense."""
        process = self.processes[index]
        if "monotonic_ns" in facts:
            facts["monotonic_ns"] = int(facts["monotonic_ns"])
        if kind == "process":
            process.role = plain(_text(facts.get("role", process.role)))
            process.ppid = int(facts.get("ppid", process.ppid))
            process.worker = int(facts.get("worker", process.worker))
            process.loader = int(facts.get("loader", process.loader))
            process.rank = int(facts.get("rank", process.rank))
        elif kind == "thread":
            self.threads[process.pid, int(facts["tid"])] = plain(_text(facts["name"]))
        elif kind == "string":
            self.strings[index, int(facts["id"])] = _text(facts["text"])
        elif kind == "loader":
            self.loaders[int(facts["loader"])] = {  # plain values; a list only of what is unseen
                key: value
                for key, value in facts.items()
                if key != "loader" and (key == "unseen" or not isinstance(value, (dict, list)))
            }
        elif kind == "refused":
            self.problems.append(
                f"pid {process.pid}: an event did not fit a record: code {facts['code']}, {facts['values']}"
            )
        self.lines.append({**facts, "kind": kind, "process": index})

    def _place_ranks(self) -> None:
        """Give each process and each iterator its rank: a worker's is its iterator's, which is its process's."""
        for line in self.described("loader"):
            process, facts = self.processes[line["process"]], self.loaders[int(line["loader"])]
            if type(facts.get("rank")) is int:
                process.rank = facts["rank"]
            elif process.rank >= 0:
                facts["rank"] = process.rank
        for process in self.processes:
            rank = self.loaders.get(process.loader, {}).get("rank")
            if process.rank < 0 and type(rank) is int:
                process.rank = rank
        if len({process.rank for process in self.processes} - {-1}) < 2:
            for process in self.processes:
                process.rank = -1  # one rank alone, which the manifest names

    def _read_events(self, index: int, data: bytes | None) -> Rows:
        process = self.processes[index]
        problem = header_problem(data)
        if problem:
            process.note = problem
            self.problems.append(f"pid {process.pid}: {process.file}{EVENTS_SUFFIX} {problem}")
            return np.empty(0, ROW)
        assert data is not None
        process.header = header = Header.read(data)
        slots = records(data)
        rows = _valid(slots, header.ring)
        process.events = len(rows)
        self._note_end(process, header, slots, rows)
        if len(rows):
            self._note_ring(process, header.ring, rows)
        out = np.empty(len(rows), ROW)
        for name in RECORD.names or ():
            out[name] = rows[name]
        out["pid"] = process.pid
        out["process"] = index
        return out

    def _note_end(self, process: Process, header: Header, slots: Rows, rows: Rows) -> None:
        """Note what a process could not record, and what was cut off its file."""
        process.lost = header.lost_events
        reason = errno_in_words(header.errno) if header.errno else "an exception of a signal's handler came between"
        truncated = len(slots) < header.slots
        if process.lost or truncated:
            whole = _before_a_gap(rows) if truncated or not header.errno else rows
            process.whole_until = int(whole["time"].max()) if len(whole) else process.start_ns
        if process.lost:
            self._lack(process, f"{counted(process.lost, 'event')} could not be recorded: {reason}")
        if header.lost_lines:
            self._lack(process, f"{counted(header.lost_lines, 'description')} could not be recorded: {reason}")
        if truncated:
            self._lack(process, f"its events file is truncated: {len(slots)} of {header.slots} slots are there")

    def _note_ring(self, process: Process, ring: int, rows: Rows) -> None:
        """Note what was overwritten, and what is missing between the oldest record and the newest."""
        last = int(rows["seq"][-1])
        overwritten = max(0, last - ring) if ring else 0
        if overwritten:
            process.whole_from = int(rows["time"][0])
            if self._part:
                return
            process.lost += overwritten
            self._lack(process, f"the oldest {counted(overwritten, 'event')} overwritten (the ring holds {ring})")
        if gaps := max(0, last - overwritten - len(rows)):
            why = "begun and never completed, damaged, or changed while being read"
            self._lack(process, f"{counted(gaps, 'event')} missing: {why}")

    def _lack(self, process: Process, what: str) -> None:
        process.note = f"{process.note}; {what}" if process.note else what
        self.problems.append(f"{process.name}: {what}")

    def _note_gaps(self) -> None:
        if not self.processes:
            self.problems.append("no process has recorded anything")
        unknown = self.left_out["code"][~_KNOWN[self.left_out["code"]]]
        for code, count in sorted(Counter(unknown.tolist()).items()):
            self.problems.append(
                f"{counted(count, 'event')} with code {code}, which this minidl does not know, left out"
            )
        started = self.events[self.events["code"] == WORKER_START[1]]
        for pid in sorted({int(row["x"]) for row in started if row["x"]} - {p.pid for p in self.processes}):
            self.problems.append(f"the worker with pid {pid} was started and has recorded nothing")

    @property
    def last(self) -> int:
        """CLOCK_MONOTONIC ns up to which the run is known: its last event, or the last look at it while it goes on."""
        return max(self.seen, int(self.events["time"][-1]) if len(self.events) else 0)

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        roles = Counter(p.role for p in self.processes)
        who = ", ".join(counted(count, role) for role, count in roles.items())
        took = int(self.events["time"][-1] - self.events["time"][0]) if len(self) else 0
        lacks = f", {counted(len(self.problems), 'problem')}" if self.problems else ""
        return f"<Trace {self.path}: {who or 'no processes'}; {counted(len(self), 'event')} in {duration(took)}{lacks}>"

    def described(self, kind: str) -> list[dict[str, Any]]:
        """Those of `lines` that are of this kind."""
        return [line for line in self.lines if line["kind"] == kind]

    def device_failure(self, loader: int) -> str:
        """Why the device of a loader's batches failed or hung; "" if it did not. What it was doing has no end."""
        mine = [
            (line["process"], line.get("device")) for line in self.described("device") if line.get("loader") == loader
        ]
        failures = self.described("device_failed")
        return next((str(line.get("why")) for line in failures if (line["process"], line.get("device")) in mine), "")

    def text(self, row: np.void) -> str:
        """The text that an event of `events` carries in its string field; "" if it has none."""
        for column, own in EVENTS[int(row["code"])].columns.items():
            if own.unit == "string":
                return self.strings.get((int(row["process"]), int(row[column])), "")
        return ""

    def select(self, name: str, phase: Phase | None = None) -> Rows:
        """The events called `name`, of one phase or of all. Raises KeyError if the table has no such event."""
        wanted = codes_where(lambda event: event.name == name and phase in (None, event.phase))
        if not wanted:
            raise KeyError(f"no event is called {name!r} with phase {phase}: see minidl.tracefile.events.EVENTS")
        return self.events[np.isin(self.events["code"], wanted)]

    def spans(self) -> Rows:
        """Every begin with its end: array of SPAN, by begin; end = -1 if none was recorded. See `pairs`.

        cpu, cpu_wait: ns that its thread computed, and that it was ready to and had no CPU; 0 = not measured, as in a
        trace of an older minidl. `manifest["cpu_time"]` says whether it was recorded.
        """
        return pairs(self.events)

    def whole_from(self, loader: int) -> int:
        """CLOCK_MONOTONIC ns from which on no process has overwritten events of this loader; 0 if none has."""
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
    def watched(self) -> Watched:
        """What the trace's watchdogs saw: signs of life, deaths, evidence of hangs; false if there was none."""
        return watched.read(self._watches, self.threads)

    @cached_property
    def stack_samples(self) -> StackSamples:
        """Where the threads that fetch and train were, as sampling found them; empty if none was sampled."""
        return stack_samples.read(self.described("sampled"), self.strings)

    @property
    def order(self) -> Order:
        """What happened before what, by sequence numbers and messages; see `order.Order`. Made when first asked."""
        return self.once("order", lambda: Order(self.events, self.processes))

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` returns, made once as long as the events are the same ones. name: of what it makes."""
        events, made = self._made.get(name, (None, None))
        if events is not self.events:
            made = make()
            self._made[name] = self.events, made
        return made  # type: ignore[return-value]

    def cut(self, kept: Bools) -> Trace:
        """The trace with these of its events alone; time 0, and what it says beside events, stay."""
        out = copy.copy(self)
        out.events, out._made = self.events[kept], {}
        return out

    def before(self, event: int | np.void, task: int | None = None) -> Bools:
        """mask[i]: did event i of `events` happen before `event` (its position, or its row)? No clock is asked.

        task: only what was done for that task. KeyError if the trace has no such event.
        """
        return self.order.before(event, task)

    def happened_before(self, a: int | np.void, b: int | np.void) -> bool | None:
        """True if `a` happened before `b`, False if after it, None if no message orders them. See `before`."""
        return self.order.happened_before(a, b)

    def chain(self, event: int | np.void) -> Ints:
        """Positions in `events` of the causes of `event` that came last, from its epoch's begin on to the event."""
        return self.order.chain(event)

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame, one row an event, in time order.

        Columns: name, phase, track, time_ns, pid, tid, process, role, task, worker, loader, and the events' own fields
        under their names, missing if an event has no such field or it was not measured; `pid`, if it is an event's own
        field, is called event_pid. Enumerations are given by name, strings as text. Needs pandas: ImportError says how
        to get it.
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
        """The values of one of the events' own fields, over all events; missing if an event has no such field."""
        import pandas as pd

        values = np.zeros(len(self), np.int64)
        there = np.zeros(len(self), bool)
        for event in self._kinds():
            for column, own in event.columns.items():
                if own.name == what.name:
                    mask = self.events["code"] == event.code
                    values[mask] = self.events[column][mask]
                    there |= mask & (values != 0) if own.may_lack else mask
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
        Returns its path; `.minidl` is added if it is not the suffix. A file that is there is replaced once the new
        one is whole. The same trace gives the same bytes.
        """
        return write_packed(Path(path), self._packed_members())

    def _packed_members(self) -> Iterator[tuple[str, bytes]]:
        yield from self._files.members()
        for index, process in enumerate(self.processes):
            if process.header is not None:
                yield process.file + EVENTS_SUFFIX, events_file(process.header, self._rows_of(index))
        yield from packed(sorted((*self.attachments, *self._watches), key=lambda one: one.name))

    def _rows_of(self, index: int) -> Rows:
        """Return all that the process recorded, with the codes that this minidl does not know."""
        return np.concatenate([part[part["process"] == index] for part in (self.events, self.left_out)])


def _per_code(codes: npt.NDArray[np.uint16], what: Callable[[Event], str]) -> npt.NDArray[np.object_]:
    table = np.array([what(EVENTS[c]) if c in EVENTS else "" for c in range(max(EVENTS) + 1)], dtype=object)
    return table[codes]


def _text(value: object) -> str:
    """Escape what no encoding can write: printing the text can't fail then."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a text belongs")
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def _valid(slots: Rows, ring: int) -> Rows:
    """The records of an events file, in order of emission.

    A slot counts if its sequence number belongs there, and its time, task and worker are possible.
    """
    in_place = slots_of(slots, ring) == np.arange(len(slots), dtype=np.uint64)
    rows: Rows = slots[in_place & (slots["seq"] > 0)]
    rows = rows[(rows["time"] > 0) & (rows["time"] < LATEST)]
    rows = rows[(rows["task"] >= -1) & (rows["task"] < MOST_TASKS)]
    rows = rows[(rows["worker"] >= -1) & (rows["worker"] < MOST_WORKERS)]
    if ring and len(rows):
        rows = rows[np.argsort(rows["seq"], kind="stable")]
        rows = rows[rows["seq"] > max(0, int(rows["seq"][-1]) - ring)]
    return rows


def _before_a_gap(rows: Rows) -> Rows:
    """The first records, as far as none is missing between them. The end of a truncated ring lacks some in between."""
    gaps = np.flatnonzero(np.diff(rows["seq"].astype(np.int64)) != 1)
    return rows[: gaps[0] + 1] if len(gaps) else rows
