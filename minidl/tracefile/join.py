"""The traces of several ranks, joined into one.

Interface: `join(paths, output)`; `rank_of(trace)` says of which rank a trace is, and `ranks_of(trace)` takes a joined
one apart. `beside(paths, zeros)` joins two runs in the same way, to show them on one axis. A joined trace is a
trace like any other: the files of all ranks, on rank 0's clock. Iterators, and processes of different machines that
have one pid, get numbers of their own; the manifest's `ranks` says what was done with which rank.

Rules of use: the ranks of one machine share a clock. Those of other machines are shifted by what they read of rank 0's
clock (`record.clocks`), or else by the wall clock, which is said in the joined trace.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from minidl.tracefile.arrays import Ints
from minidl.tracefile.attachments import Attachment, free_name
from minidl.tracefile.events import columns_where
from minidl.tracefile.facts import time_of_day
from minidl.tracefile.files import Files, read_files
from minidl.tracefile.format import (
    HEADER_BYTES,
    MAGIC,
    PACKED_SUFFIX,
    Header,
    TraceError,
    parts_of,
    records,
    stem_of,
)
from minidl.tracefile.members import rank_in_name, traces_in
from minidl.tracefile.ranks import last_start
from minidl.tracefile.reader import Trace
from minidl.tracefile.words import duration, listed

FIRST_NEW_PID: Final = 5_000_000
"""Above every pid of Linux: what processes are called whose pid another rank's process has."""

MOST_LOADERS: Final = 0xFFFF

ONE_RUN_NS: Final = 60_000_000_000
"""A rank that has recorded nothing yet when another one has ended already: up to here, one may be slow and one dead."""


@dataclass(frozen=True)
class Clock:
    """How a rank's times become those of the reference: by linear interpolation between readings.

    error_ns: by how much they may be wrong, None = unknown. source: "same machine", "process group", ...
    """

    source: str
    error_ns: int | None
    at: tuple[int, ...] = (0,)
    offset: tuple[int, ...] = (0,)

    def shifted(self, times: Ints) -> Ints:
        """Return the times on the reference's clock; outside the readings, the nearest one's offset holds."""
        further = np.array(self.offset) - self.offset[0]
        drift = np.rint(np.interp(times - self.at[0], np.array(self.at) - self.at[0], further))
        out: Ints = times + self.offset[0] + drift.astype(np.int64)
        return out

    def one(self, time: int) -> int:
        return int(self.shifted(np.array([time]))[0])

    @property
    def drift_ppm(self) -> float | None:
        """How much faster the reference's clock runs than this one, in millionths; None = unknown."""
        took = self.at[-1] - self.at[0]
        return (self.offset[-1] - self.offset[0]) / took * 1e6 if took > 0 else None


_EXACT: Final = Clock("same machine", 0)


_MEANS: Final = {
    **dict.fromkeys(("pid", "ppid", "ended"), "pid"),
    "loader": "loader",
    **dict.fromkeys(("start_monotonic_ns", "monotonic_ns", "begun_ns", "since", "sample", "at"), "time"),
}
"""Facts of side files' and attachments' lines that are numbers of the trace, or times on its clock."""


@dataclass
class Member:
    """One rank's trace, and how it goes into the joined one."""

    path: Path
    files: Files
    trace: Trace
    rank: int
    clock: Clock = _EXACT
    pids: dict[int, int] = field(default_factory=dict)
    loaders: dict[int, int] = field(default_factory=dict)

    @property
    def manifest(self) -> dict[str, Any]:
        return self.trace.manifest

    @property
    def boot_id(self) -> str:
        """Identity of the machine, and of its clock, from start to shutdown."""
        return str(self.manifest.get("boot_id") or "")

    @property
    def world_size(self) -> int | None:
        return next((size for size in told(self.trace, "world_size") if size > 0), None)

    def readings(self) -> list[tuple[int, int, int]]:
        """Return (at, offset, error), ns, of each alignment with plausible numbers."""
        found = []
        for line in self.trace.described("clock"):
            numbers = tuple(line.get(name) for name in ("at_ns", "offset_ns", "error_ns"))
            if all(type(number) is int and abs(number) < 1 << 62 for number in numbers):
                found.append(numbers)
        return sorted(set(found))  # type: ignore[arg-type]

    def moved(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return a line's facts with the joined trace's numbers and times. Evidence keeps those of its own machine."""
        out: dict[str, Any] = {
            name: self._move(_MEANS[name], value) if name in _MEANS and type(value) is int else value
            for name, value in facts.items()
        }
        if "stall" in out:
            out["stall"] = self.moved(out["stall"])
        if "processes" in out:
            out["processes"] = {str(self._move("pid", int(pid))): of for pid, of in out["processes"].items()}
        if "tracks" in out:
            out["tracks"] = [[self._move("pid", pid), *rest] for pid, *rest in out["tracks"]]
        return out

    def _move(self, what: str, value: int) -> int:
        if what == "time":
            return self.clock.one(value)
        return (self.pids if what == "pid" else self.loaders).get(value, value)

    def window(self) -> tuple[int, int]:
        """Return the times of the first and the last event, on the reference's clock."""
        times = self.trace.events["time"]
        return (self.clock.one(int(times[0])), self.clock.one(int(times[-1]))) if len(times) else (0, 0)


def rank_of(trace: Trace) -> int | None:
    """Return the rank that recorded a trace: by its environment, its process group, or its path; None = unknown."""
    named = rank_in_name(trace.path)
    return next(told(trace, "rank"), None if named < 0 else named)


def told(trace: Trace, name: str) -> Iterator[int]:
    """Yield each number of this name, "rank" or "world_size", that environment, process group and iterators give."""
    for facts in (trace.manifest, *trace.described("clock"), *trace.loaders.values()):
        if type(number := facts.get(name)) is int:
            yield number


def ranks_of(trace: Trace) -> dict[int, Trace]:
    """The trace of each rank in a trace; of the last start, if the ranks were started anew. -1 = it does not say."""
    ranks = numbered_in(trace)
    if len(ranks) < 2:
        alone = next(iter(ranks), rank_of(trace))
        return {-1 if alone is None else alone: trace}
    restarts, _ = last_start(trace.lines)
    of_process = np.array([process.rank for process in trace.processes])[trace.events["process"]]
    stale = [n for n, params in trace.loaders.items() if params.get("restart", 0) != restarts]
    fresh = ~np.isin(trace.events["loader"], stale)
    out = {}
    for rank in sorted(ranks):
        out[rank] = one = trace.cut((of_process == rank) & fresh)
        one.loaders = {n: of for n, of in trace.loaders.items() if of.get("rank") == rank and n not in stale}
    return out


def numbered_in(trace: Trace) -> set[int]:
    """The ranks whose processes recorded events; a trace that was cut keeps the processes of the others."""
    return {trace.processes[process].rank for process in np.unique(trace.events["process"]).tolist()} - {-1}


def join(paths: Sequence[Path], output: Path) -> tuple[Path, list[str]]:
    """Join the traces of several ranks; return the path of the result and what it lacks.

    output: a directory that does not exist yet or is empty, or a file that ends in .minidl. Raises TraceError if the
    traces are not of different ranks of one run and one format.
    """
    members = sorted((_member(path) for path in traces_in(paths)), key=lambda one: one.rank)
    if len(members) < 2:
        raise TraceError(f"merge: {', '.join(map(str, paths))} is a single trace: give the traces of all ranks")
    _check_distinct(members)
    _set_clocks(members)
    _check_same_run(members)
    _number(members)
    lacks = [*_missing(members), *_doubts(members)]
    files = _joined(members, lacks)
    if output.suffix == PACKED_SUFFIX:
        return Trace(output, files).pack(output), lacks
    return _write(output, files), lacks


def beside(paths: Sequence[Path], zeros: Sequence[int]) -> Trace:
    """Join the traces of several runs, as ranks 0, 1, ..., so that they have their moments `zeros` at one time.

    zeros: ns, CLOCK_MONOTONIC of each run. The trace is in memory alone.
    """
    members = []
    for number, (path, zero) in enumerate(zip(paths, zeros, strict=True)):
        files = read_files(path)
        clock = Clock("aligned", None, (0,), (zeros[0] - zero,))
        members.append(Member(path, files, Trace(path, files), number, clock))
    _number(members)
    return Trace(Path(" and ".join(path.name for path in paths)), _joined(members, []))


def _member(path: Path) -> Member:
    files = read_files(path)
    trace = Trace(path, files)
    if trace.manifest.get("ranks"):
        raise TraceError(f"merge: {path} contains several ranks already: give its original traces")
    rank = rank_of(trace)
    if rank is None:
        raise TraceError(f"merge: {path} does not name its rank: rename its directory to rank0, rank1, ...")
    return Member(path, files, trace, rank)


def _check_distinct(members: list[Member]) -> None:
    for one, other in pairwise(members):
        if one.rank == other.rank:
            raise TraceError(f"merge: {one.path} and {other.path} are both of rank {one.rank}: give one run's")
        if one.manifest.get("format") != other.manifest.get("format"):
            raise TraceError(f"merge: {one.path} and {other.path} have different formats: record with one minidl")


# --- Clocks
def _set_clocks(members: list[Member]) -> None:
    """Give each member its clock: the ranks of one machine get the best one that any of them has read."""
    reference = members[0]
    for member in members[1:]:
        if member.boot_id and member.boot_id == reference.boot_id:
            continue
        peers = [m for m in members if m is member or (m.boot_id and m.boot_id == member.boot_id)]
        read = [clock for m in peers if (clock := _read_clock(m)) is not None]
        if read and (reference.rank == 0 or reference.readings()):
            member.clock = _relative(min(read, key=lambda clock: clock.error_ns or 0), _read_clock(reference))
        else:
            member.clock = _wall_clock(member, reference)


def _read_clock(member: Member) -> Clock | None:
    """Return the clock by the rank's readings of rank 0's; None without a reading."""
    readings = member.readings()
    if not readings:
        return None
    at, offset, error = zip(*readings, strict=True)
    return Clock("process group", max(error), at, offset)


def _relative(clock: Clock, reference: Clock | None) -> Clock:
    """Return `clock` relative to the reference, which is not rank 0 if rank 0's trace is missing."""
    if reference is None or not any(reference.offset):
        return clock
    error = (clock.error_ns or 0) + (reference.error_ns or 0)
    return replace(clock, error_ns=error, offset=tuple(offset - reference.offset[0] for offset in clock.offset))


def _wall_clock(member: Member, reference: Member) -> Clock:
    """Return the offset by wall clock (NTP accuracy), or unknown if a trace lacks it."""
    mine, other = time_of_day(member.manifest), time_of_day(reference.manifest)
    if mine and other:
        return Clock("wall clock", None, (0,), (mine - other,))
    return Clock("unknown", None)


# --- Is it one run?
def _check_same_run(members: list[Member]) -> None:
    sizes = {member.world_size for member in members} - {None}
    if len(sizes) > 1:
        told = ", ".join(f"{m.path} of {m.world_size}" for m in members if m.world_size is not None)
        raise TraceError(f"merge: the traces come from runs with different numbers of ranks: {told}")
    known = [member for member in members if member.clock.source != "unknown" and len(member.trace.events)]
    gap, early, late = _apart(known)
    if gap > ONE_RUN_NS:
        raise TraceError(
            f"merge: {early} ends {duration(gap)} before {late} begins: they come from different runs. Give the "
            "traces of one run"
        )


def _apart(members: list[Member]) -> tuple[int, str, str]:
    """Return the longest gap, ns, from the end of one trace to the begin of another (negative: none), and both."""
    if not members:
        return -1, "", ""
    first = min(members, key=lambda member: member.window()[1])
    last = max(members, key=lambda member: member.window()[0])
    return last.window()[0] - first.window()[1], str(first.path), str(last.path)


def _missing(members: list[Member]) -> Iterator[str]:
    size = max([member.world_size or 0 for member in members])
    absent = sorted(set(range(size)) - {member.rank for member in members})
    if absent:
        yield f"missing ranks, of {size}: {listed(absent)}"
    if any(member.rank >= size > 0 for member in members):
        yield f"a rank is beyond the run's number of ranks, {size}: {max(member.rank for member in members)}"


def _doubts(members: list[Member]) -> Iterator[str]:
    first = members[0]
    for member in members[1:]:
        where = f"rank {member.rank} ({member.manifest.get('host', 'unknown host')})"
        if member.clock.source == "wall clock":
            yield (
                f"the clock of {where} was never compared with rank {first.rank}'s: its times rely on the time of "
                "day, with the error of the machines' clocks; call minidl.align_clocks() on every rank"
            )
        elif member.clock.source == "unknown":
            yield f"the clock of {where} cannot be compared with rank {first.rank}'s: its times are not aligned"
        elif member.clock.source == "process group" and len(member.clock.at) < 2:
            yield f"the clock of {where} was compared only once: its drift is unknown"
    gap, early, late = _apart([m for m in members if m.clock.source != "unknown" and len(m.trace.events)])
    if gap > 0:
        yield f"{early} ends {duration(gap)} before {late} begins: they may come from different runs"
    if len({tuple(map(str, member.manifest.get("command") or ())) for member in members}) > 1:
        yield "the ranks have different commands: they may come from different runs"


# --- New numbers, new files
def _number(members: list[Member]) -> None:
    """Give pids that occur twice, and all loaders, numbers of their own."""
    taken: set[int] = set()
    free = FIRST_NEW_PID
    loaders = 0
    for member in members:
        for pid in sorted({process.pid for process in member.trace.processes}):
            member.pids[pid] = pid if pid not in taken else free
            free += pid in taken
            taken.add(pid)
        seen = np.unique(member.trace.events["loader"]).tolist()
        told = {*seen, *member.trace.loaders, *(process.loader for process in member.trace.processes)}
        for number in sorted(n for n in told if 0 < n <= MOST_LOADERS):
            loaders += 1
            member.loaders[number] = loaders
    if loaders > MOST_LOADERS:
        raise TraceError(
            f"merge: the traces have {loaders} loaders together; the limit for one trace is {MOST_LOADERS}"
        )


def _joined(members: list[Member], lacks: list[str]) -> Files:
    base = {key: value for key, value in members[0].manifest.items() if key not in ("rank", "local_rank")}
    sizes = [member.world_size for member in members if member.world_size]
    manifest = base | {"world_size": sizes[0] if sizes else None, "ranks": list(map(_about, members)), "lacks": lacks}
    files = Files(json.dumps(manifest, indent=1).encode("ascii") + b"\n")
    for member in members:
        for stem, data in member.files.side.items():
            files.side[_stem(member, stem)] = b"".join(_side_line(member, line) for line in data.splitlines())
        for stem, data in member.files.events.items():
            files.events[_stem(member, stem)] = _events(member, data)
        for attachment in member.files.attachments:
            name = free_name(attachment.name, {one.name for one in files.attachments})
            files.attachments.append(Attachment(name, b"".join(_attachment(member, attachment.data()))))
    return files


def _about(member: Member) -> dict[str, Any]:
    """Return a rank's entry in the joined manifest."""
    clock = member.clock
    return {
        "rank": member.rank,
        "host": member.manifest.get("host"),
        "boot_id": member.boot_id,
        "pid": member.pids.get(member.manifest.get("pid", -1), member.manifest.get("pid")),
        "command": member.manifest.get("command"),
        "clock": clock.source,
        "offset_ns": clock.offset[0],
        "error_ns": clock.error_ns,
        "drift_ppm": clock.drift_ppm,
        "trace": member.path.name,
        "lacks": member.trace.problems,
    }


def _stem(member: Member, stem: str) -> str:
    pid, start = parts_of(stem)
    return stem_of(member.pids.get(pid, pid), max(0, member.clock.one(start)))


def _side_line(member: Member, line: bytes) -> bytes:
    """Return a line of a side file with the joined trace's numbers and times; unchanged if it can't be read."""
    try:
        facts = member.moved(json.loads(line))
        if facts["kind"] in ("process", "loader"):
            facts["rank"] = member.rank
        return json.dumps(facts).encode("ascii") + b"\n"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return line + b"\n"


_PIDS: Final = columns_where(lambda field: field.name in ("pid", "parent_pid"))
"""Where events name processes."""

_TIMES: Final = columns_where(lambda field: field.name == "reference" and field.unit == "ns")
"""Where events name moments, apart from when they happened."""


def _events(member: Member, data: bytes) -> bytes:
    """Return an events file with the joined trace's numbers and times; unchanged if it is none."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return data
    header = Header.read(data)
    header = header._replace(pid=member.pids.get(header.pid, header.pid), start_ns=member.clock.one(header.start_ns))
    rows = records(data).copy()
    there = rows["seq"] > 0
    rows["time"][there] = member.clock.shifted(rows["time"][there])
    table = np.arange(MOST_LOADERS + 1, dtype=np.uint16)
    table[list(member.loaders)] = list(member.loaders.values())
    rows["loader"] = table[rows["loader"]]
    for code, column in _PIDS:
        mine = there & (rows["code"] == code)
        rows[column][mine] = [member.pids.get(pid, pid) for pid in rows[column][mine].tolist()]
    for code, column in _TIMES:
        mine = there & (rows["code"] == code)
        rows[column][mine] = member.clock.shifted(rows[column][mine])
    return header.page() + rows.tobytes()


def _attachment(member: Member, data: bytes) -> Iterator[bytes]:
    """Yield the lines of an attachment with the joined trace's pids and times."""
    for line in data.splitlines(keepends=True):
        try:
            yield json.dumps(member.moved(json.loads(line)), separators=(",", ":")).encode("ascii") + b"\n"
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            yield line


def _write(output: Path, files: Files) -> Path:
    """Write the trace into a draft directory, and then rename it."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise TraceError(f"merge: {output} is there already: give another place with -o")
    draft = output.with_name(f".{output.name}.{os.getpid()}")
    draft.mkdir(0o700, parents=True)
    try:
        for name, data in (*files.members(), *((one.name, one.data()) for one in files.attachments)):
            (draft / name).write_bytes(data)
        draft.replace(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return output
