"""Where the traces of a job's ranks are: below a directory, up to DEEPEST levels, one a rank, or in a list.

Interface: `members_at(paths)` -> `JobMembers`, or None if the paths are no job but one trace. `traces_in(paths)` finds
traces; `rank_in_name(path)` is the rank that a trace's name has. Of files elsewhere, `below` and `one_run` do the same.

Rules of use: a directory is a job if its traces' names begin with a rank: rank-0, rank_0, rank0.minidl, also below a
directory for each node. It holds one run: of ranks that occur twice, the run that began last is read. Only names and
the times of manifests are looked at.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minidl.tracefile.format import MANIFEST, PACKED_SUFFIX
from minidl.tracefile.words import counted, listed, plain

DEEPEST: Final = 4
"""Levels of directories below a job's in which ranks are looked for."""

_NAMED: Final = re.compile(r"^rank[-_]?([0-9]{1,6})(?![0-9])")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's trace. rank: by its name, -1 = its name has none. node: the directory of its node, "" = none."""

    path: Path
    rank: int
    node: str = ""


@dataclass(frozen=True, slots=True)
class JobMembers:
    """A job's traces, by rank. problems: what was found there and is not read, in words."""

    name: str
    places: tuple[RankPlace, ...]
    problems: tuple[str, ...] = ()

    def of(self, rank: int) -> RankPlace | None:
        return next((one for one in self.places if one.rank == rank), None)


def rank_in_name(path: Path) -> int:
    """The rank that a trace's name has: 3 for "rank-3" and "rank3.minidl"; -1 = none."""
    named = _NAMED.search(path.name)
    return int(named[1]) if named else -1


def traces_in(paths: Iterable[Path], problems: list[str] | None = None) -> list[Path]:
    """The traces at `paths`; a directory that is no trace stands for the traces below it.

    problems: takes what is said of directories that cannot be looked into; None = the first one raises OSError.
    """
    out: list[Path] = []
    for path in paths:
        out += (path.is_dir() and not (path / MANIFEST).is_file() and [*_below(path, DEEPEST, problems)]) or [path]
    return out


def _below(directory: Path, levels: int, problems: list[str] | None) -> Iterator[Path]:
    """Yield the traces below a directory. One that is named after a rank counts as its trace, whatever it holds."""
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        path = directory / entry.name
        try:
            if not entry.is_dir():
                if path.suffix == PACKED_SUFFIX:
                    yield path
            elif rank_in_name(path) >= 0 or (path / MANIFEST).is_file():
                yield path
            elif levels > 1:
                yield from _below(path, levels - 1, problems)
        except OSError as error:
            if problems is None:
                raise
            problems.append(f"not looked into: {path}: {error.strerror}")


def members_at(paths: Sequence[Path]) -> JobMembers | None:
    """The members of the job at `paths`: a directory, or a list of traces. None for a single trace, or several runs."""
    problems: list[str] = []
    found = traces_in(paths, problems)
    if found == [*paths] and len(found) < 2:
        return None
    places = below(paths[0], found) if len(paths) == 1 else [RankPlace(path, rank_in_name(path)) for path in found]
    if len(paths) == 1 and any(place.rank < 0 for place in places):
        return None
    return one_run(str(paths[0]) if len(paths) == 1 else counted(len(paths), "trace"), places, problems)


def below(job: Path, traces: Iterable[Path]) -> list[RankPlace]:
    """The places of the traces below a job's directory; a node is named by the directories between."""
    return [RankPlace(path, rank_in_name(path), plain("/".join(path.relative_to(job).parts[:-1]))) for path in traces]


def one_run(
    name: str,
    places: Sequence[RankPlace],
    problems: Sequence[str] = (),
    begun: Callable[[Sequence[RankPlace]], Any] | None = None,
) -> JobMembers:
    """The members of a job, by rank; if ranks occur twice, of the run that began last, and what is left out is said.

    begun: when a run did, to be compared with others; None = by the times of its files.
    """
    kept, left = _latest(places, begun or _begun)
    return JobMembers(name, tuple(sorted(kept, key=lambda one: (one.rank, one.path))), (*problems, *left))


def _latest(
    places: Sequence[RankPlace], begun: Callable[[Sequence[RankPlace]], Any]
) -> tuple[Sequence[RankPlace], list[str]]:
    """The members of the run that began last, if ranks occur twice; and what is left out, in words."""
    counts = Counter(place.rank for place in places if place.rank >= 0)
    if all(count == 1 for count in counts.values()):
        return places, []
    runs: dict[tuple[str, Path], list[RankPlace]] = {}
    for place in (one for one in places if one.rank >= 0):
        runs.setdefault((run_of(place.path), place.path.parent), []).append(place)
    kept = [place for place in places if place.rank < 0]
    left: list[str] = []
    newest = sorted(runs, key=lambda one: begun(runs[one]), reverse=True)
    for name, parent in newest:
        run = runs[name, parent]
        if name != newest[0][0] or {place.rank for place in run} & {place.rank for place in kept}:
            left.append(f"{run[0].path} and others" if len(run) > 1 else f"{run[0].path}")
        else:
            kept += run
    twice = listed(rank for rank, count in sorted(counts.items()) if count > 1)
    return kept, [
        f"several traces of rank {twice}: these are traces of several runs. The latest one is read "
        f"({counted(len(kept), 'rank')}), these are not: {listed(left)}. To read another "
        "one, give its traces alone"
    ]


def run_of(path: Path) -> str:
    """What tells the traces of one run from another's in a directory: the number behind the rank, as in "rank-0.2"."""
    return _NAMED.sub("", path.name.removesuffix(PACKED_SUFFIX))


def _begun(run: Sequence[RankPlace]) -> float:
    """When the newest manifest of a run was written, seconds."""
    files = [place.path / MANIFEST if place.path.is_dir() else place.path for place in run]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
