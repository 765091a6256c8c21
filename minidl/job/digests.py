"""The digest of a rank: its table of steps in a small file beside its events, and the reading of a whole job by them.

Interface: `read_job(paths)` -> `JobRecord`, or None if the paths are no job; `job_of(trace)` of a trace with several
ranks. Where a digest is missing or older than its trace, it is made from the events, of many ranks by several
processes, and kept where that can be written. A rank's watchdog writes it each minute and at the end.

Rules of use: a digest is an .npz file without pickled objects, in a trace's directory or beside a packed file; it names
the sizes and times of the files that it was made from. Of a rank whose end is not recorded, it is kept when the
rank's files have been at rest for a while. Whatever is wrong with a digest, the events are read instead.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from minidl.hang.finding import RunOutcome
from minidl.hang.headline.uneven import LastEpoch
from minidl.hang.life import is_running
from minidl.job.each import each
from minidl.job.step_table import STEP, RankFacts, RankTable, tables_of
from minidl.tracefile.arrays import Rows
from minidl.tracefile.facts import MOST_RANKS, facts_in
from minidl.tracefile.format import MANIFEST, PACKED_SUFFIX, TraceError
from minidl.tracefile.join import numbered_in, ranks_of
from minidl.tracefile.members import JobMembers, RankPlace, members_at
from minidl.tracefile.packs import whole
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import counted, listed

DIGEST: Final = "steps.npz"
VERSION: Final = 6

ROOM, ROOM_OF_A_STEP = 60_000, 9.4
"""Bytes that a digest may have, and for each step: 1 MB for 100,000 steps."""

FINE: Final = 8
"""Of a larger digest, times are rounded to a part of the usual step: this power of two at best."""

LARGEST: Final = 1 << 28
"""Bytes that a digest may have unpacked."""

AT_REST: Final = 600.0
"""Seconds without a change after which the files of a rank without an end are taken as final."""

MOST_CELLS: Final = 2_000_000
"""Steps of all ranks together that are judged: of a longer job, runs of RUN steps evenly spread over it."""

RUN: Final = 8

Progress = Callable[[int, int], None]

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
        said = (max(table.facts.rank + 1, table.facts.world) for table in self.ranks)  # a damaged one, any number
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
    return None if members is None else read_members(members, progress, behind)


def job_of(trace: Trace) -> JobRecord | None:
    """The job in a trace that has several ranks; None if it has one."""
    return record_of(trace) if len(numbered_in(trace)) > 1 else None


def record_of(path: Trace | Path) -> JobRecord:
    """A trace as a job, of one rank or of several. Raises TraceError if there is none."""
    trace = read_trace(path)
    return whole_job(str(trace.path), JobRecord("", (*tables_of(trace),), tuple(trace.problems)))


def read_members(members: JobMembers, progress: Progress = lambda done, total: None, behind: float = 0.0) -> JobRecord:
    """Read these members of a job, as `read_job` does."""
    read = JobRecord(problems=members.problems)
    for done, part in enumerate(_parts(members.places, behind), 1):
        progress(done, len(members.places))
        read = merged([read, part])
    return whole_job(members.name, read)


def _parts(places: Sequence[RankPlace], behind: float) -> Iterator[JobRecord]:
    """Yield each trace as a part of its job; digests first."""
    missing = []
    for place in places:
        if (found := load(place.path, behind)) is not None:
            yield part_of(place, found)
        else:
            missing.append(place)
    yield from map(part_of, missing, each(partial(make, always=behind > 0), [place.path for place in missing]))


def part_of(place: RankPlace, read: JobRecord) -> JobRecord:
    """What was read of a trace, with the rank and the node that its place names."""
    of_place: dict[str, Any] = {"node": place.node} if place.node else {}
    if place.rank >= 0 and len(read.ranks) == 1:
        of_place["rank"] = place.rank
    return replace(read, ranks=tuple(replace(one.with_facts(**of_place), path=place.path) for one in read.ranks))


def merged(parts: Iterable[JobRecord]) -> JobRecord:
    """The parts as one, with as many steps as can be judged: the same in whichever order they are merged."""
    parts = [*parts]
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
    several = len({table.facts.node for table in read.ranks} - {""}) > 1
    taken = {table.facts.rank for table in read.ranks}
    free = (number for number in itertools.count() if number not in taken)
    named = [
        one.with_facts(rank=one.facts.rank if one.facts.rank >= 0 else next(free), node=one.facts.node * several)
        for one in read.ranks
    ]
    return replace(read, name=name, ranks=tuple(sorted(named, key=lambda table: table.facts.rank)))


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
    if rank is None and members is not None:
        ranks = counted(len(members.places), "rank")
        raise TraceError(f"{members.name} is a job of {ranks}: choose one with --rank N")
    if rank is None:
        return read_trace(paths[0])
    path = paths[0] if members is None else _path_of(members, rank)
    parts = ranks_of(read_trace(path))
    if len(parts) == 1 and (or_alone or members is not None):
        return next(iter(parts.values()))
    if rank not in parts:
        has = "does not name its rank: omit --rank" if [*parts] == [-1] else f"has {listed(parts)}"
        raise TraceError(f"{path} has no rank {rank}: it {has}")
    return parts[rank]


def _path_of(members: JobMembers, rank: int) -> Path:
    """The trace that has a rank: by its name, else by the numbers that the report gives."""
    if (named := members.of(rank)) is not None:
        return named.path
    of_rank = {table.facts.rank: table.path for table in read_members(members).ranks}
    if (path := of_rank.get(rank)) is None:
        raise TraceError(f"{members.name} has no rank {rank}: it has {listed(of_rank)}")
    return path


# --- Its ranks --------------------------------------------------------------------------------------------------------
def make(path: Path, *, always: bool = False) -> JobRecord:
    """Read a trace's events, and keep its digest if that can be written. What the digest has, or why there is none.

    always: also keep that of a rank that is running.
    """
    signature = _signature(path)
    try:
        tables = tables_of(read_trace(path))
    except (TraceError, OSError) as error:
        return JobRecord(problems=(f"rank not read: {error}",))
    at_rest = time.time() - max((changed for *_, changed in signature), default=0.0) >= AT_REST
    final = all(table.facts.over or (at_rest and not table.facts.running) for table in tables)
    data, tables = _fitting(signature, tables)
    if always or final:
        with contextlib.suppress(OSError):  # the directory is read-only, or full
            _save(path, data)
    return JobRecord(ranks=tuple(tables))


def keep(path: Path, dropped: int) -> None:
    """Keep the digest of a trace as of now. dropped: earlier ones that were not written. Raises OSError, TraceError."""
    signature, tables = _signature(path), tables_of(read_trace(path))
    said = f"{counted(dropped, 'digest')} could not be written" * bool(dropped)
    noted = [table.with_facts(problem=table.facts.problem or said) for table in tables]
    _save(path, _fitting(signature, noted)[0])


# --- The file ---------------------------------------------------------------------------------------------------------
def place_of(path: Path) -> Path:
    """Where a trace's digest is kept."""
    is_file = path.suffix == PACKED_SUFFIX or path.is_file()
    return path.with_suffix(f".{DIGEST}") if is_file else path / DIGEST


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
    took = np.concatenate([table.steps["waits"].sum(axis=1) + table.steps["own"] for table in tables])
    data = _written(signature, tables)
    for part in range(FINE, 0, -1):
        if len(data) <= ROOM + ROOM_OF_A_STEP * steps:
            break
        unit = max(1, int(np.median(took)) >> part)
        tables = [replace(table, steps=_rounded(table.steps, unit)) for table in tables]
        data = _written(signature, tables)
    return data, [*tables]


def _rounded(steps: Rows, unit: int) -> Rows:
    """The steps with times to so many µs, sizes to so many bytes, and the slowest samples of slow batches alone."""
    out = steps.copy()
    for name in ("waits", "own", "collective", "backward", "fetch", "cpu", "slowest_took", "bytes"):
        nearest = (out[name].astype(np.int64) + unit // 2) // unit * unit
        out[name] = np.minimum(nearest, np.iinfo(out[name].dtype).max)
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


def _save(path: Path, data: bytes) -> None:
    with whole(place_of(path)) as draft, open(draft, "wb", opener=partial(os.open, mode=0o600)) as file:
        file.write(data)


def load(path: Path, behind: float = 0.0) -> JobRecord | None:
    """What a trace's digest has; None if there is none that is as new as the trace, or older by `behind` s.

    A digest that says that a rank runs, which has ended since, is not taken.
    """
    place = place_of(path)

    def is_new(known: _Signature) -> bool:
        files = _signature(path)
        late = max((changed for *_, changed in files), default=0.0) - place.stat().st_mtime
        is_young = time.time() - place.stat().st_mtime <= 2 * behind
        return known == files or (0 < behind >= late and is_young)

    try:
        if not place.is_file() or place.stat().st_size > LARGEST:
            return None
        found = read_digest(place.read_bytes(), is_new)
        ran = found is not None and any(table.facts.running for table in found.ranks)
        return None if ran and not is_running(path, facts_in((path / MANIFEST).read_bytes())) else found
    except OSError:  # there is none, or this user may not read it
        return None


def read_digest(data: bytes, is_new: Callable[[_Signature], bool]) -> JobRecord | None:
    """What a digest has; None if it is damaged, or not new, by the files that it was made from."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            if sum(member.file_size for member in arrays.zip.infolist()) > LARGEST:
                return None
            about = json.loads(arrays["about"].tobytes())
            if about["version"] != VERSION or not is_new([tuple(one) for one in about["files"]]):
                return None
            ranks = [RankTable(_facts(of), _unpacked(arrays[str(n)])) for n, of in enumerate(about["ranks"])]
            return JobRecord(ranks=tuple(ranks)) if ranks else None
    except Exception:  # zipfile, zlib and NumPy raise errors of many kinds for damaged bytes
        return None


def _facts(said: dict[str, Any]) -> RankFacts:
    """The facts in a digest. Raises an error of some kind if they are not what `RankFacts` has."""
    facts = RankFacts(**said | {"last": LastEpoch(*said["last"])})
    values = vars(facts).values()
    if [*map(type, values)] != [*map(type, vars(RankFacts(0)).values())]:
        raise ValueError(f"facts of other kinds: {said}")
    RunOutcome(facts.outcome)
    array("q", [*facts.last, *facts.parts.values(), *(of for of in values if type(of) is int)])
    "".join(facts.parts)
    return facts


def _packed(steps: Rows) -> Any:
    """The steps byte by byte, first the first bytes of all: the high bytes of a column are alike, and need no room."""
    return steps.view(np.uint8).reshape(len(steps), STEP.itemsize).T.copy()


def _unpacked(planes: Any) -> Rows:
    steps: Rows = planes.T.copy().view(STEP).reshape(-1)
    return steps
