"""A job where fsspec reads: on S3 and its like, in memory, or here; its ranks are read by the tasks of an engine.

Interface: `read_remote(url, engine)` -> `JobRecord`. A task reads a rank's digest, or, without one, its events.

Rules of use: of a file system elsewhere, a digest is as new as its trace if the names and sizes of the files are those
that it was made from: copies have other times. Nothing is written there.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from minidl.job.digests import DIGEST, JobRecord, load, make, merged, part_of, place_of, tables_in, whole_job
from minidl.job.each import reduced
from minidl.tracefile.format import PACKED_SUFFIX, TraceError
from minidl.tracefile.members import RankPlace, rank_in_name
from minidl.tracefile.words import listed


@dataclass(frozen=True)
class _RemoteRank:
    """A rank's trace. url: of the job; path: in its file system; files: names, sizes; digest: its path, "" = none."""

    url: str
    path: str
    rank: int
    node: str
    files: tuple[tuple[str, int], ...]
    digest: str


def read_remote(url: str, engine: str) -> JobRecord:
    """Read the job at a URL, or at a path that all workers of the engine see.

    Raises TraceError if there is none, ImportError if the engine or what the URL needs is not installed.
    """
    ranks, left = _ranks_at(url)
    if not ranks:
        raise TraceError(f"{url}: no traces of ranks are there: their names begin with rank-N")
    part = reduced(_read, merged, ranks, engine)
    return whole_job(url, merged([JobRecord(problems=left), part]))


def _ranks_at(url: str) -> tuple[list[_RemoteRank], tuple[str, ...]]:
    """The ranks below a URL, in order; of several attempts the last one by name, and what is left out, in words."""
    import fsspec

    files, root = fsspec.core.url_to_fs(url)
    try:
        found: dict[str, dict[str, Any]] = files.find(root, detail=True)
    except OSError as error:
        raise TraceError(f"{url}: {error}") from error
    traces: dict[PurePosixPath, dict[str, int]] = {}
    for path, about in found.items():
        parts = PurePosixPath(path).relative_to(root).parts
        at = next((n for n, part in enumerate(parts) if rank_in_name(Path(part)) >= 0), -1)
        if at >= 0 and (at < len(parts) - 1 or parts[at].endswith(PACKED_SUFFIX)):
            traces.setdefault(PurePosixPath(*parts[: at + 1]), {})["/".join(parts[at + 1 :])] = about["size"]
    last = {rank_in_name(Path(trace.name)): trace for trace in sorted(traces, key=lambda one: (len(one.name), one))}
    left = sorted(str(trace) for trace in traces if trace not in last.values())
    ranks = []
    for rank, trace in sorted(last.items()):
        place = f"{root.rstrip('/')}/{trace}"
        is_file = "" in traces[trace]
        digest = str(place_of(Path(place))) if is_file else f"{place}/{DIGEST}"
        sizes = [(name or trace.name, size) for name, size in sorted(traces[trace].items()) if name != DIGEST]
        node = "" if trace.parent == PurePosixPath() else str(trace.parent)
        ranks.append(_RemoteRank(url, place, rank, node, tuple(sizes), digest if digest in found else ""))
    return ranks, (f"several traces of a rank: these are not read: {listed(left)}",) if left else ()


def _read(rank: _RemoteRank) -> JobRecord:
    """Read a rank, in a process of the engine."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    files, _ = fsspec.core.url_to_fs(rank.url)
    path = Path(rank.path)
    place = RankPlace(path, rank.rank, rank.node)
    try:
        if isinstance(files, LocalFileSystem):
            return part_of(place, load(path) or make(path))
        kept = files.cat_file(rank.digest) if rank.digest else b""
        found = tables_in(io.BytesIO(kept), lambda known: {one[:2] for one in known} == {*rank.files})
        return part_of(place, found or _from_events(files, rank))
    except OSError as error:
        return part_of(place, f"rank not read: {rank.path}: {error}")


def _from_events(files: Any, rank: _RemoteRank) -> Any:
    with TemporaryDirectory(prefix="minidl-rank-") as folder:
        local = Path(folder, PurePosixPath(rank.path).name)
        if files.isdir(rank.path):
            local.mkdir()
            for name, _ in rank.files:
                files.get_file(f"{rank.path}/{name}", str(local / name))
        else:
            files.get_file(rank.path, str(local))
        return make(local)
