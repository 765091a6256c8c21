"""The digest of a rank: its table of steps in a small file beside its events, and the reading of a whole job by them.

Interface: `read_job(paths)` -> `JobRecord`, or None if the paths are no job; `job_of(trace)` of a trace with several
ranks. Where a digest is missing or older than its trace, it is made from the events, of many ranks by several
processes, and kept where that can be written. A rank's watchdog writes it each minute and at the end.

Rules of use: a digest is an .npz file without pickled objects, in a trace's directory or beside a packed file; it names
the sizes and times of the files that it was made from. Of a rank whose end is not recorded, it is kept when the
rank's files have been at rest for a while. Whatever is wrong with a digest, the events are read instead.
"""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.lib.recfunctions import structured_to_unstructured, unstructured_to_structured

from minidl.hang.finding import RunOutcome
from minidl.hang.life import is_running
from minidl.job.each import each
from minidl.job.step_table import STEP, RankFacts, RankTable, tables_of
from minidl.tracefile.arrays import Rows
from minidl.tracefile.facts import read_facts
from minidl.tracefile.format import MANIFEST, TraceError
from minidl.tracefile.join import numbered_in, ranks_of
from minidl.tracefile.members import JobMembers, RankPlace, members_at
from minidl.tracefile.packs import whole
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import counted, listed

DIGEST: Final = "steps.npz"
VERSION: Final = 5

ROOM, ROOM_OF_A_STEP = 60_000, 9.4
"""Bytes that a digest may have, and for each step: 1 MB for 100,000 steps."""

FINE: Final = 8
"""Of a larger digest, times are rounded to a part of the usual step: this power of two at best."""

BYTES_OF_A_MICROSECOND: Final = 64
"""Sizes of batches are rounded to so many bytes then, for each microsecond that times are rounded to."""

GROWING: Final = 3
"""The first columns of STEP, epoch, number and begin, are kept as their changes."""

LARGEST: Final = 1 << 28
"""Bytes that a digest may have unpacked."""

AT_REST: Final = 600.0
"""Seconds without a change after which the files of a rank without an end are taken as final."""

MOST_CELLS: Final = 2_000_000
"""Steps of all ranks together that are judged: of a longer job, runs of RUN steps evenly spread over it."""

RUN: Final = 8

MOST_RANKS: Final = 1 << 20
"""A damaged file may say any number."""

Progress = Callable[[int, int], None]

_Found = list[RankTable] | str
"""A trace's tables, or why it cannot be read."""

_Signature = list[tuple[str, int, float]]
"""Name, size and time of each of its files."""


@dataclass(frozen=True)
class JobRecord:
    """A job as it was read, or some of its ranks. ranks: by rank; problems: what of it could not be read, in words;
    kept: one step in so many was."""

    name: str = ""
    ranks: tuple[RankTable, ...] = ()
    problems: tuple[str, ...] = ()
    kept: int = 1

    @property
    def world(self) -> int:
        """The number of ranks, as they say, or as many as there are."""
        said = (max(table.facts.rank + 1, table.facts.world) for table in self.ranks)
        return max((number for number in said if number <= MOST_RANKS), default=0)

    @property
    def missing(self) -> list[int]:
        """The ranks of which there is no trace."""
        return sorted(set(range(self.world)) - {table.facts.rank for table in self.ranks})


# --- A job ------------------------------------------------------------------------------------------------------------
def read_job(
    paths: Sequence[Path], progress: Progress = lambda done, total: None, *, behind: float = 0.0
) -> JobRecord | None:
    """Read the job at `paths`, by its digests. None if they are a single trace, or several runs.

    progress: called with the numbers of ranks read and of all. behind: by so many seconds a digest may be older than
    its rank's events; those of ranks that run are kept then. Raises TraceError if no rank can be read.
    """
    members = members_at(paths)
    return None if members is None else _record(members, progress, behind)


def job_of(trace: Trace) -> JobRecord | None:
    """The job in a trace that has several ranks; None if it has one."""
    return record_of(trace) if len(numbered_in(trace)) > 1 else None


def record_of(path: Trace | Path) -> JobRecord:
    """A trace as a job, of one rank or of several. Raises TraceError if there is none."""
    trace = read_trace(path)
    return whole_job(str(trace.path), JobRecord("", (*tables_of(trace),), tuple(trace.problems)))


def _record(members: JobMembers, progress: Progress = lambda done, total: None, behind: float = 0.0) -> JobRecord:
    read = JobRecord(problems=members.problems)
    for done, (place, found) in enumerate(_read_all(members.places, behind), 1):
        progress(done, len(members.places))
        read = merged([read, part_of(place, found)])
    return whole_job(members.name, read)


def part_of(place: RankPlace, found: _Found) -> JobRecord:
    """One trace as a part of its job, with the rank and the node that its place names."""
    if isinstance(found, str):
        return JobRecord(problems=(found,))
    alone = {"rank": place.rank} if place.rank >= 0 and len(found) == 1 else {}
    named: dict[str, Any] = alone | ({"node": place.node} if place.node else {})
    return JobRecord("", tuple(RankTable(replace(one.facts, **named), one.steps, place.path) for one in found))


def merged(parts: Sequence[JobRecord]) -> JobRecord:
    """The parts as one, with as many steps as can be judged: the same in whichever order they are merged."""
    kept = max(part.kept for part in parts)
    ranks = [_every(table, kept) for part in parts for table in part.ranks]
    while len(ranks) * max((len(table.steps) for table in ranks), default=0) > MOST_CELLS:
        kept *= 2
        ranks = [_every(table, kept) for table in ranks]
    return JobRecord("", tuple(ranks), tuple(text for part in parts for text in part.problems), kept)


def whole_job(name: str, read: JobRecord) -> JobRecord:
    """The job, if these are all of its ranks: in order. Raises TraceError if none can be read.

    A rank that does not say its number gets the next free one. If all are on one node, none is named.
    """
    if not read.ranks:
        raise TraceError(f"{name}: none of its ranks can be read: {[*read.problems, 'there is none'][-1]}")
    every = [table.facts for table in read.ranks]
    several = len({one.node for one in every} - {""}) > 1
    free = iter(sorted({*range(2 * len(every))} - {one.rank for one in every}))
    named = [replace(one, rank=one.rank if one.rank >= 0 else next(free), node=one.node * several) for one in every]
    ranks = [replace(table, facts=facts) for table, facts in zip(read.ranks, named, strict=True)]
    return replace(read, name=name, ranks=tuple(sorted(ranks, key=lambda table: table.facts.rank)))


def _every(table: RankTable, kept: int) -> RankTable:
    """The table with the steps of one run in `kept`, a power of two: the same ones of each rank."""
    run = table.steps["epoch"].astype(np.int64) * 7919 + table.steps["number"] // RUN
    return table if kept == 1 else replace(table, steps=table.steps[run % kept == 0])


def trace_of(paths: Sequence[Path], rank: int | None, *, or_alone: bool = False) -> Trace:
    """The trace at `paths`; of a job, and of a trace with several ranks, that of one rank, by its number in the job.

    or_alone: a trace of one rank is given whatever its number is. Raises TraceError if there is no such rank, or if
    they are a job and no rank is given.
    """
    members = members_at(paths)
    if rank is None:
        if members is not None:
            ranks = counted(len(members.places), "rank")
            raise TraceError(f"{members.name} is a job of {ranks}: choose one with --rank N")
        return read_trace(paths[0])
    if members is None:
        known = ranks_of(read_trace(paths[0]))
        if rank in known or (or_alone and len(known) == 1):
            return known[rank] if rank in known else next(iter(known.values()))
        has = "does not name its rank: omit --rank" if [*known] == [-1] else f"has {listed(known)}"
        raise TraceError(f"{paths[0]} has no rank {rank}: it {has}")
    named = members.of(rank)
    if named is not None and len(parts := ranks_of(read_trace(named.path))) == 1:
        return next(iter(parts.values()))
    of_rank = {table.facts.rank: table.path for table in _record(members).ranks}
    if (path := of_rank.get(rank)) is None:
        raise TraceError(f"{members.name} has no rank {rank}: it has {listed(of_rank)}")
    parts = ranks_of(read_trace(path))
    return parts[rank] if len(parts) > 1 else next(iter(parts.values()))


# --- Its ranks --------------------------------------------------------------------------------------------------------
def _read_all(places: Sequence[RankPlace], behind: float) -> Iterator[tuple[RankPlace, _Found]]:
    """Yield each place with its tables; digests first."""
    missing = []
    for place in places:
        if (tables := load(place.path, behind)) is not None:
            yield place, tables
        else:
            missing.append(place)
    yield from zip(missing, each(partial(make, always=behind > 0), [place.path for place in missing]), strict=True)


def make(path: Path, *, always: bool = False) -> _Found:
    """Read a rank's events, and keep its digest. The tables as the digest has them, or why there are none.

    always: also keep that of a rank that is running.
    """
    return _made(path, always, 0)[0]


def keep(path: Path, dropped: int) -> bool:
    """Keep the digest of a rank as of now; return whether it is there. dropped: earlier ones that were not written."""
    return _made(path, True, dropped)[1]


def _made(path: Path, always: bool, dropped: int) -> tuple[_Found, bool]:
    signature = _signature(path)
    try:
        tables = [_noted(table, dropped) for table in tables_of(read_trace(path))]
    except (TraceError, OSError) as error:
        return f"rank not read: {error}", False
    at_rest = time.time() - max((changed for *_, changed in signature), default=0.0) >= AT_REST
    final = all(table.facts.over or (at_rest and not table.facts.running) for table in tables)
    data, tables = _fitting(signature, tables)
    return tables, (always or final) and _save(path, data)


def _noted(table: RankTable, dropped: int) -> RankTable:
    said = (f"{counted(dropped, 'digest')} could not be written",) * bool(dropped)
    return replace(table, facts=replace(table.facts, problems=(*table.facts.problems, *said)))


# --- The file ---------------------------------------------------------------------------------------------------------
def place_of(path: Path) -> Path:
    """Where a trace's digest is kept."""
    return path / DIGEST if path.is_dir() else path.with_suffix(f".{DIGEST}")


def _signature(path: Path) -> _Signature:
    """Name, size and time of each file of a trace; [] if it cannot be looked at."""
    try:
        files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.name != DIGEST)
        return [(one.name, one.stat().st_size, one.stat().st_mtime) for one in files if one.name[:1] != "."]
    except OSError:
        return []


def _fitting(signature: _Signature, tables: Sequence[RankTable]) -> tuple[bytes, list[RankTable]]:
    """A digest of the size that is allowed, and the tables that it has: if they are too large, with rounded numbers."""
    steps = sum(len(table.steps) for table in tables)
    took = np.concatenate([table.steps["waits"].sum(axis=1) + table.steps["own"] for table in tables] or [np.zeros(1)])
    data = _written(signature, tables)
    for part in range(FINE, 0, -1):
        if len(data) <= ROOM + ROOM_OF_A_STEP * steps:
            break
        unit = max(1, int(np.median(took)) >> part)
        tables = [replace(table, steps=_rounded(table.steps, unit)) for table in tables]
        data = _written(signature, tables)
    return data, [*tables]


def _rounded(steps: Rows, unit: int) -> Rows:
    """The steps with times in whole units of so many µs; slowest samples of the slowest tenth of batches alone."""
    out = steps.copy()
    for name in ("waits", "own", "collective", "backward", "fetch", "cpu", "slowest_took"):
        out[name] = np.minimum((out[name].astype(np.int64) + unit // 2) // unit * unit, np.iinfo(np.uint32).max)
    out["begin"] -= out["begin"] % (1000 * unit)
    out["bytes"] -= out["bytes"] % (BYTES_OF_A_MICROSECOND * unit)
    fast = out["fetch"] < np.quantile(out["fetch"], 0.9)
    out["slowest"][fast], out["slowest_took"][fast] = -1, 0
    return out


def _written(signature: _Signature, tables: Sequence[RankTable]) -> bytes:
    about = {"version": VERSION, "files": signature, "ranks": [asdict(table.facts) for table in tables]}
    arrays: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    arrays |= {str(number): _packed(table.steps) for number, table in enumerate(tables)}
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _save(path: Path, data: bytes) -> bool:
    """Write a digest; return whether that was possible."""
    try:
        with whole(place_of(path)) as draft, open(draft, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(data)
        return True
    except OSError:
        return False  # the directory is read-only, or full


def load(path: Path, behind: float = 0.0) -> list[RankTable] | None:
    """The tables in a trace's digest; None if there is none that is as new as the trace, or older by `behind` s.

    A digest that says that a rank runs, which has ended since, is not taken.
    """
    place = place_of(path)

    def is_new(known: _Signature) -> bool:
        files = _signature(path)
        late = max((changed for *_, changed in files), default=0.0) - place.stat().st_mtime
        is_young = time.time() - place.stat().st_mtime <= 2 * behind
        return known == files or (0 < behind >= late and is_young)

    tables = tables_in(place, is_new) if os.path.isfile(place) else None  # no error if its directory cannot be read
    ran = tables is not None and any(table.facts.running for table in tables)
    return None if ran and not is_running(path, _manifest(path)) else tables


def _manifest(path: Path) -> dict[str, Any]:
    try:
        return read_facts((path / MANIFEST).read_bytes()).said
    except (OSError, ValueError, RecursionError):
        return {}


def tables_in(digest: Path | BinaryIO, is_new: Callable[[_Signature], bool]) -> list[RankTable] | None:
    """The tables in a digest; None if it is damaged, or not new, by the files that it was made from."""
    try:
        with zipfile.ZipFile(digest) as file:
            if sum(member.file_size for member in file.infolist()) > LARGEST:
                return None
        with np.load(digest, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            if about["version"] != VERSION or not is_new([tuple(one) for one in about["files"]]):
                return None
            ranks = enumerate(about["ranks"])
            return [RankTable(_facts(facts), _unpacked(arrays[str(number)])) for number, facts in ranks] or None
    except Exception:  # zipfile, zlib and NumPy raise errors of many kinds for damaged bytes
        return None


def _facts(said: dict[str, Any]) -> RankFacts:
    """The facts in a digest. Raises an error of some kind if they are not what `RankFacts` has."""
    known: dict[str, Any] = {name: tuple(of) if isinstance(of, list) else of for name, of in said.items()}
    facts, values = RankFacts(**known), known.values()
    if [*map(type, values)] != [*map(type, vars(RankFacts(0)).values())]:
        raise ValueError(f"facts of other kinds: {said}")
    RunOutcome(facts.outcome)
    last, every = facts.taken
    array("q", [last, every, *facts.parts.values(), *(of for of in values if type(of) is int)])
    "".join([*facts.problems, *facts.parts])
    return facts


def _packed(steps: Rows) -> Any:
    """The columns byte by byte, those that grow as their changes: the high bytes are all alike, and need no room."""
    wide = structured_to_unstructured(steps, np.int64)
    wide[1:, :GROWING] = np.diff(wide[:, :GROWING], axis=0)
    return np.ascontiguousarray(wide.T)[..., None].view(np.uint8).transpose(0, 2, 1).copy()


def _unpacked(planes: Any) -> Rows:
    wide = np.ascontiguousarray(planes.transpose(0, 2, 1)).view(np.int64)[..., 0].T.copy()
    wide[:, :GROWING] = np.cumsum(wide[:, :GROWING], axis=0)
    return unstructured_to_structured(wide, STEP)
