"""Several ranks: how far their clocks lie apart, and their traces joined into one.

Interface: `align_clocks()` is called by the training script, on every rank, once the process group is up and again
before it is destroyed, or by `minidl run --align-clocks` in its place (`aligning`); `join(paths, output)` is what
`minidl merge` does with several traces.

Ranks of one machine share CLOCK_MONOTONIC, and need no alignment. Between machines, each rank asks rank 0 for its time
over a gloo group of its own: the offset is known to half of the shortest round trip. No collective is ever started
unasked, and one that fails costs its timeout and a line on stderr, never the training.

A joined trace is a trace like any other: the files of all ranks, on rank 0's clock. Loaders, and processes of different
machines that have one pid, get numbers of their own; the manifest's `ranks` says what was done with which rank.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from minidl.tracing.attachments import Attachment
from minidl.tracing.events import EVENTS, RECORD
from minidl.tracing.instrument import pen
from minidl.tracing.reader import PACKED_SUFFIX, Files, Trace, TraceError, read_files
from minidl.tracing.recorder import EVENTS_SUFFIX, HEADER, HEADER_BYTES, MAGIC, MANIFEST, SIDE_SUFFIX

Ints = npt.NDArray[np.int64]

ROUNDS: Final = 30
"""Round trips of one alignment; the shortest counts."""

FIRST_NEW_PID: Final = 5_000_000
"""Above every pid of Linux: what processes are called whose pid another rank's process has."""

MOST_LOADERS: Final = 0xFFFF

ONE_RUN_NS: Final = 60_000_000_000
"""A rank that has recorded nothing yet when another one has ended already: up to here, one may be slow and one dead."""

_NAMED: Final = re.compile(r"rank[-_]?([0-9]{1,6})(?![0-9])")


# --- While the ranks run ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reading:
    """One alignment, as a rank knows it: at_ns on its own clock, it had to add offset_ns to have rank 0's time.

    error_ns: half of the shortest round trip, by which the offset may be wrong; 0 on rank 0.
    """

    rank: int
    world_size: int
    at_ns: int
    offset_ns: int
    error_ns: int


def align_clocks(timeout: float = 10.0) -> Reading | None:
    """Compare this rank's clock with rank 0's, and write the result into the trace that this process records.

    Every rank must call it, at the same point of the script and inside its trace: after `init_process_group`, and
    again before `destroy_process_group`, so that the clocks' drift is known too. It waits for the others, for at most
    `timeout` seconds a step. None where there is no process group, or where it failed, which is said on stderr; it
    raises nothing. Several calls are fine; a rank that is not traced must call it nevertheless.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        reading = _read(time.monotonic_ns, timeout)
    except Exception as error:  # whatever a backend raises: the training goes on
        print(f"minidl: the clocks of the ranks could not be aligned: {_first_line(error)}", file=sys.stderr)
        return None
    writer = pen()
    if writer is not None:
        facts = {name: getattr(reading, name) for name in ("rank", "world_size", "at_ns", "offset_ns", "error_ns")}
        writer.describe("clock", reference=0, **facts)
    return reading


@contextlib.contextmanager
def aligning() -> Iterator[None]:
    """While this is open, `align_clocks` is called whenever the script makes its process group, or destroys it.

    For scripts that are not to be touched; as `align_clocks`, it must be done on all ranks or on none.
    """
    make, destroy = dist.init_process_group, dist.destroy_process_group

    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        align_clocks()

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            align_clocks()
        destroy(group)

    try:
        dist.init_process_group, dist.destroy_process_group = init_process_group, destroy_process_group
        yield
    finally:
        dist.init_process_group, dist.destroy_process_group = make, destroy


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _read(clock: Callable[[], int], timeout: float) -> Reading:
    """One reading, over a group of its own: the training's group is not touched, whatever happens here."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return Reading(rank, size, clock(), 0, 0)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    try:
        if rank:
            at, offset, error = _ask(clock, group)
            return Reading(rank, size, at, offset, error)
        for other in range(1, size):
            _answer(clock, group, other)
        return Reading(rank, size, clock(), 0, 0)
    finally:
        dist.destroy_process_group(group)


def _ask(clock: Callable[[], int], group: Any) -> tuple[int, int, int]:
    """When, the offset to rank 0's clock, and by how much it may be wrong: by the shortest of `ROUNDS` round trips."""
    best = (0, 0, sys.maxsize)
    answer = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        before = clock()
        dist.send(answer, 0, group=group)
        dist.recv(answer, 0, group=group)
        after = clock()
        half = (after - before + 1) // 2
        if half < best[2]:
            best = before + half, int(answer) - before - half, half
    return best


def _answer(clock: Callable[[], int], group: Any, other: int) -> None:
    time_now = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        dist.recv(time_now, other, group=group)
        time_now[0] = clock()
        dist.send(time_now, other, group=group)


# --- Joining their traces ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Clock:
    """How a rank's times become those of the reference: by linear interpolation between what was read.

    error_ns: by how much they may be wrong, None = nobody knows. source: "same machine", "process group", ...
    """

    source: str
    error_ns: int | None
    at: tuple[int, ...] = (0,)
    offset: tuple[int, ...] = (0,)

    def shifted(self, times: Ints) -> Ints:
        """The times on the reference's clock. Before the first reading and after the last one, its offset holds."""
        further = np.array(self.offset) - self.offset[0]
        drift = np.rint(np.interp(times - self.at[0], np.array(self.at) - self.at[0], further))
        out: Ints = times + self.offset[0] + drift.astype(np.int64)
        return out

    def one(self, time: int) -> int:
        return int(self.shifted(np.array([time]))[0])

    @property
    def drift_ppm(self) -> float | None:
        """How much faster the reference's clock runs than this one, in millionths; None = not known."""
        took = self.at[-1] - self.at[0]
        return (self.offset[-1] - self.offset[0]) / took * 1e6 if took > 0 else None


_EXACT: Final = Clock("same machine", 0)


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
        """What stands for the machine, and its clock, from start to shutdown."""
        return str(self.manifest.get("boot_id") or "")

    @property
    def world_size(self) -> int | None:
        sizes = [self.manifest.get("world_size"), *(one.get("world_size") for one in self._told())]
        return next((size for size in sizes if type(size) is int and size > 0), None)

    def _told(self) -> list[dict[str, Any]]:
        return [*self.trace.described("clock"), *self.trace.loaders.values()]

    def readings(self) -> list[tuple[int, int, int]]:
        """(at, offset, error), ns, of each alignment that can be believed to be one."""
        found = []
        for line in self.trace.described("clock"):
            numbers = tuple(line.get(name) for name in ("at_ns", "offset_ns", "error_ns"))
            if all(type(number) is int and abs(number) < 1 << 62 for number in numbers):
                found.append(numbers)
        return sorted(set(found))  # type: ignore[arg-type]

    def window(self) -> tuple[int, int]:
        """From the first event to the last, on the reference's clock."""
        times = self.trace.events["time"]
        return (self.clock.one(int(times[0])), self.clock.one(int(times[-1]))) if len(times) else (0, 0)


def rank_of(trace: Trace) -> int | None:
    """The rank that recorded a trace: by its environment, by its process group, or by its path; None = unknown."""
    told = [trace.manifest, *trace.described("clock"), *trace.loaders.values()]
    for facts in told:
        if type(rank := facts.get("rank")) is int:
            return rank
    named = _NAMED.search(trace.path.name)
    return int(named[1]) if named else None


def traces_in(paths: Iterable[Path]) -> list[Path]:
    """The traces that lie at `paths`: each itself, or in the place of a directory that is none, those in it."""
    out = []
    for path in paths:
        inside = []
        if path.is_dir() and not (path / MANIFEST).is_file():
            inside = [p for p in sorted(path.iterdir()) if (p / MANIFEST).is_file() or p.suffix == PACKED_SUFFIX]
        out += inside or [path]
    return out


def join(paths: Sequence[Path], output: Path) -> tuple[Path, list[str]]:
    """Join the traces of several ranks; the path of the result, and what has to be said of it.

    output: a directory that does not exist yet or is empty, or a file that ends in .minidl. Raises TraceError where the
    traces are not of different ranks of one run and one format.
    """
    members = sorted((_member(path) for path in traces_in(paths)), key=lambda one: one.rank)
    if len(members) < 2:
        raise TraceError(
            f"merge: {', '.join(map(str, paths))}: one trace alone cannot be joined: give those of all ranks"
        )
    _check_distinct(members)
    _set_clocks(members)
    _check_same_run(members)
    _number(members)
    lacks = [*_missing(members), *_doubts(members)]
    files = _joined(members, lacks)
    if output.suffix == PACKED_SUFFIX:
        return Trace(output, files).pack(output), lacks
    return _write(output, files), lacks


def _member(path: Path) -> Member:
    files = read_files(path)
    trace = Trace(path, files)
    if trace.manifest.get("ranks"):
        raise TraceError(f"merge: {path} holds several ranks already: join the traces that it was made of")
    rank = rank_of(trace)
    if rank is None:
        raise TraceError(
            f"merge: {path} does not say which rank it is of: name its directory rank0, rank1, ... as the rank was"
        )
    return Member(path, files, trace, rank)


def _check_distinct(members: list[Member]) -> None:
    for one, other in pairwise(members):
        if one.rank == other.rank:
            raise TraceError(f"merge: rank {one.rank} twice: {one.path} and {other.path}: give those of one run alone")
        if one.manifest.get("format") != other.manifest.get("format"):
            raise TraceError(f"merge: {one.path} and {other.path} are of different formats: record with one minidl")


# --- Clocks
def _set_clocks(members: list[Member]) -> None:
    """Give each member its clock. The ranks of one machine have one clock, and get one: the best that any has read."""
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
    """By what the rank read of rank 0's clock; None where it read nothing."""
    readings = member.readings()
    if not readings:
        return None
    at, offset, error = zip(*readings, strict=True)
    return Clock("process group", max(error), at, offset)


def _relative(clock: Clock, reference: Clock | None) -> Clock:
    """`clock`, from rank 0's to the reference's, where that is another rank: rank 0's trace may be missing."""
    if reference is None or not any(reference.offset):
        return clock
    error = (clock.error_ns or 0) + (reference.error_ns or 0)
    return replace(clock, error_ns=error, offset=tuple(offset - reference.offset[0] for offset in clock.offset))


def _wall_clock(member: Member, reference: Member) -> Clock:
    """By the time of day, as good as the machines keep it; where a trace does not say it, not at all."""
    walls = [m.manifest.get("clock") for m in (member, reference)]
    offsets = [wall.get("realtime_minus_monotonic_ns") if isinstance(wall, dict) else None for wall in walls]
    if type(offsets[0]) is int and type(offsets[1]) is int:
        return Clock("wall clock", None, (0,), (offsets[0] - offsets[1],))
    return Clock("unknown", None)


# --- Is it one run?
def _check_same_run(members: list[Member]) -> None:
    sizes = {member.world_size for member in members} - {None}
    if len(sizes) > 1:
        told = ", ".join(f"{m.path} of {m.world_size}" for m in members if m.world_size is not None)
        raise TraceError(f"merge: the traces are of runs with different numbers of ranks: {told}")
    known = [member for member in members if member.clock.source != "unknown" and len(member.trace.events)]
    gap, early, late = _apart(known)
    if gap > ONE_RUN_NS:
        raise TraceError(
            f"merge: {early} ends {gap / 1e9:.0f} s before {late} begins: they are of different runs. Give the traces "
            "that the ranks of one run recorded at the same time"
        )


def _apart(members: list[Member]) -> tuple[int, str, str]:
    """The longest time, ns, from the end of one trace to the begin of another; negative where all overlap."""
    if not members:
        return -1, "", ""
    first = min(members, key=lambda member: member.window()[1])
    last = max(members, key=lambda member: member.window()[0])
    return last.window()[0] - first.window()[1], str(first.path), str(last.path)


def _missing(members: list[Member]) -> Iterator[str]:
    size = max([member.world_size or 0 for member in members])
    absent = sorted(set(range(size)) - {member.rank for member in members})
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        yield f"of {size} ranks, these are not here: {shown}"
    if any(member.rank >= size > 0 for member in members):
        yield f"a rank is beyond the run's number of ranks, {size}: {max(member.rank for member in members)}"


def _doubts(members: list[Member]) -> Iterator[str]:
    first = members[0]
    for member in members[1:]:
        where = f"rank {member.rank} ({member.manifest.get('host', 'unknown host')})"
        if member.clock.source == "wall clock":
            yield (
                f"the clock of {where} was never compared with rank {first.rank}'s: its times are by the time of day, "
                "and as wrong as the machines' clocks are; call minidl.align_clocks() on every rank"
            )
        elif member.clock.source == "unknown":
            yield f"the clock of {where} cannot be compared with rank {first.rank}'s: its times are its own"
        elif member.clock.source == "process group" and len(member.clock.at) < 2:
            yield f"the clock of {where} was compared once only: its drift is unknown"
    gap, early, late = _apart([m for m in members if m.clock.source != "unknown" and len(m.trace.events)])
    if gap > 0:
        yield f"{early} ends {gap / 1e9:.1f} s before {late} begins: are they of one run?"
    if len({tuple(map(str, member.manifest.get("command") or ())) for member in members}) > 1:
        yield "the ranks were started by different commands: are they of one run?"


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
            f"merge: the traces have {loaders} loaders together, and one trace holds {MOST_LOADERS} at most"
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
            name = _free_name(attachment.name, {one.name for one in files.attachments})
            files.attachments.append(Attachment(name, b"".join(_attachment(member, attachment.data()))))
    return files


def _about(member: Member) -> dict[str, Any]:
    """What the joined manifest says of a rank."""
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
    pid, start = map(int, stem.split("-"))
    return f"{member.pids.get(pid, pid)}-{max(0, member.clock.one(start))}"


def _side_line(member: Member, line: bytes) -> bytes:
    """A line of a side file with the joined trace's numbers and times; as it is where it makes no sense."""
    try:
        facts = json.loads(line)
        kind = facts["kind"]
        if type(facts.get("loader")) is int:
            facts["loader"] = member.loaders.get(facts["loader"], facts["loader"])
        if kind in ("process", "loader"):
            facts["rank"] = member.rank
        for name in ("pid", "ppid"):
            if type(facts.get(name)) is int:
                facts[name] = member.pids.get(facts[name], facts[name])
        for name in ("start_monotonic_ns", "monotonic_ns"):
            if type(facts.get(name)) is int:
                facts[name] = member.clock.one(facts[name])
        return json.dumps(facts).encode("ascii") + b"\n"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return line + b"\n"


_PIDS: Final = [
    (code, column) for code, e in EVENTS.items() for column, f in zip("xyz", e.fields, strict=False)
    if f.name in ("pid", "parent_pid")
]  # fmt: skip
"""Where events name processes."""

_TIMES: Final = [
    (code, column) for code, e in EVENTS.items() for column, f in zip("xyz", e.fields, strict=False)
    if f.name == "reference" and f.unit == "ns"
]  # fmt: skip
"""Where events name moments, apart from when they happened."""


def _events(member: Member, data: bytes) -> bytes:
    """An events file with the joined trace's numbers and times; as it is where it is none."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return data
    magic, version, pid, start, realtime, ring = HEADER.unpack_from(data)
    head = bytearray(data[:HEADER_BYTES])
    HEADER.pack_into(head, 0, magic, version, member.pids.get(pid, pid), member.clock.one(start), realtime, ring)
    slots = (len(data) - HEADER_BYTES) // RECORD.itemsize
    rows = np.frombuffer(data, RECORD, slots, HEADER_BYTES).copy()
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
    return bytes(head) + rows.tobytes()


def _free_name(name: str, taken: set[str]) -> str:
    """`name`, or where that is taken, its kind with the first free number."""
    kind, number = name.split("-")[0], 1
    while name in taken:
        name = f"{kind}-{number}.attachment.jsonl"
        number += 1
    return name


def _attachment(member: Member, data: bytes) -> Iterator[bytes]:
    """The lines of an attachment with the joined trace's pids and times."""
    for line in data.splitlines(keepends=True):
        try:
            facts = json.loads(line)
            if type(facts.get("pid")) is int:
                facts["pid"] = member.pids.get(facts["pid"], facts["pid"])
            if type(facts.get("loader")) is int:
                facts["loader"] = member.loaders.get(facts["loader"], facts["loader"])
            if type(facts.get("since")) is int:
                facts["since"] = member.clock.one(facts["since"])
            for track in facts.get("tracks", ()):
                track[0] = member.pids.get(track[0], track[0])
            yield json.dumps(facts, separators=(",", ":")).encode("ascii") + b"\n"
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            yield line


def _write(output: Path, files: Files) -> Path:
    """Write the trace into a directory that is whole as soon as it has its name."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise TraceError(f"merge: {output} is there already: give another place with -o")
    draft = output.with_name(f".{output.name}.{os.getpid()}")
    draft.mkdir(parents=True)
    try:
        for stem, data in files.side.items():
            (draft / (stem + SIDE_SUFFIX)).write_bytes(data)
        for stem, data in files.events.items():
            (draft / (stem + EVENTS_SUFFIX)).write_bytes(data)
        for attachment in files.attachments:
            (draft / attachment.name).write_bytes(attachment.data())
        (draft / MANIFEST).write_bytes(files.manifest or b"")
        draft.replace(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return output
