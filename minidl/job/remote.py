"""A job where fsspec reads: on S3 and its like, in memory, or here; its ranks are read by the tasks of an engine.

Interface: `read_remote(url, engine)` -> `JobRecord`. A task reads a rank's digest, or, without one, its events.

Rules of use: what is here is read as `digests` reads it. Of a file system elsewhere, a digest is as new as its trace if
the names and sizes of the files are those that it was made from, and of several runs the last one by name is read:
copies have other times. Nothing is written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from minidl.job.digests import JobRecord, load, make, merged, part_of, place_of, read_digest, whole_job
from minidl.job.each import reduced
from minidl.tracefile.format import PACKED_SUFFIX, TraceError
from minidl.tracefile.members import JobMembers, RankPlace, below, members_at, one_run, rank_in_name, run_of


def read_remote(url: str, engine: str) -> JobRecord:
    """Read the job at a URL, or at a path that all workers of the engine see.

    Raises TraceError if there is none, ImportError if the engine or what the URL needs is not installed.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    files, root = fsspec.core.url_to_fs(url)
    is_here = isinstance(files, LocalFileSystem)
    members = members_at([Path(root)]) if is_here else _members_in(files, Path(root))
    if members is None or not members.places:
        raise TraceError(f"{url}: no traces of ranks are there: their names begin with rank-N")
    part = reduced(_read_here if is_here else partial(_read, url), merged, members.places, engine)
    return whole_job(url, merged([JobRecord(problems=members.problems), part]))


def _members_in(files: Any, job: Path) -> JobMembers:
    """The traces of ranks below a path of a file system: directories of files, and packed files."""
    try:
        found = [Path(path) for path in files.find("" if job == Path() else str(job))]
    except OSError as error:
        raise TraceError(f"{job}: {error}") from error
    traces = {path if path.suffix == PACKED_SUFFIX else path.parent for path in found} - {job}
    ranks = sorted(trace for trace in traces if rank_in_name(trace) >= 0)
    return one_run(str(job), below(job, ranks), begun=lambda run: (len(name := run_of(run[0].path)), name))


def _read_here(place: RankPlace) -> JobRecord:
    """Read a rank, in a process of the engine."""
    return part_of(place, load(place.path) or make(place.path))


def _read(url: str, place: RankPlace) -> JobRecord:
    """Read a rank of the job at a URL, in a process of the engine."""
    import fsspec

    files, _ = fsspec.core.url_to_fs(url)
    digest = place_of(place.path)
    try:
        packed = files.isfile(str(place.path))
        names = [str(place.path)] if packed else [name for name in files.find(str(place.path)) if name != str(digest)]
        sizes = {(Path(name).name, files.size(name)) for name in names}
        kept = files.cat_file(str(digest)) if files.isfile(str(digest)) else b""
        found = read_digest(kept, lambda known: {one[:2] for one in known} == sizes)
        return part_of(place, found or _from_events(files, place.path, names))
    except OSError as error:
        return JobRecord(problems=(f"rank not read: {place.path}: {error}",))


def _from_events(files: Any, trace: Path, names: Sequence[str]) -> JobRecord:
    with TemporaryDirectory(prefix="minidl-rank-") as folder:
        files.get(names, [str(Path(folder, Path(name).relative_to(trace.parent))) for name in names])
        return make(Path(folder, trace.name))
