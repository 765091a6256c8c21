"""A trace's files as bytes: read from a directory or a packed file, and packed.

Interface: `read_files(path)` -> `Files`, `write_packed(path, members)`. What cannot be read of a trace that is there
is left out and said in `Files.problems`; TraceError is for a path that holds no trace. Names inside a packed file are
never used as paths. A live file is read twice, and a slot counts if both readings agree.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidl.tracefile.attachments import NAME, Attachment
from minidl.tracefile.format import (
    EVENTS_SUFFIX,
    HEADER_BYTES,
    MAGIC,
    MANIFEST,
    PACKED_SUFFIX,
    SIDE_SUFFIX,
    TraceError,
    records,
)

_MEMBER = re.compile(
    rf"manifest\.json|([0-9]{{1,9}}-[0-9]{{1,19}})(\.events|\.meta\.jsonl)|(?P<attachment>{NAME.pattern})"
)


@dataclass
class Files:
    """A trace's files as bytes, wherever they came from; side and events files by their process's stem.

    part: only the newest events were asked for.
    """

    manifest: bytes | None = None
    side: dict[str, bytes] = field(default_factory=dict)
    events: dict[str, bytes] = field(default_factory=dict)
    attachments: list[Attachment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    part: bool = False


def read_files(place: Path) -> Files:
    """The files of the trace at `place`. Raises TraceError if there is none."""
    try:
        return _read_directory(place) if place.is_dir() else _read_packed(place)
    except OSError as error:
        raise TraceError(
            f"{place}: {error.strerror or error}: give the directory or the packed file of a trace"
        ) from error


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
    if second.startswith(first) or min(len(first), len(second)) < HEADER_BYTES:
        return first
    slots = [records(data) for data in (first, second)]
    common = min(map(len, slots))
    kept = slots[0][:common].copy()
    kept[kept != slots[1][:common]] = 0
    return first[:HEADER_BYTES] + kept.tobytes()


def _file(files: Files, match: re.Match[str], data: bytes) -> None:
    if match["attachment"]:
        files.attachments.append(Attachment(match["attachment"], data))
    elif match[2] is None:
        files.manifest = data
    else:
        (files.events if match[2] == EVENTS_SUFFIX else files.side)[match[1]] = data


def no_trace_in(place: Path, names: list[str]) -> str:
    """The message for a directory that holds these names and is not a trace."""
    inner = [n for n in names if (place / n / MANIFEST).is_file()]
    packed = [n for n in names if n.endswith(PACKED_SUFFIX)]
    if inner or packed:
        found = inner + packed
        return f"{place} is not a trace but holds {len(found)}: give one of them: {', '.join(found[:8])}"
    if not names:
        return (
            f"{place} is an empty directory: no trace was recorded there. Record one with minidl run --trace {place} "
            f"SCRIPT, or by MINIDL_TRACE={place} in the environment of the job"
        )
    return f"{place} is not a trace: it has no {MANIFEST}, only {', '.join(names[:4])}"


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
    return f"{place} is {found}, not a packed trace: give a file made by minidl pack, or a trace's directory"


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


_REMEDIES = {
    errno.ENOENT: "its directory does not exist: create that first, or give another path",
    errno.EISDIR: "this is a directory: give the path of a file",
}
"""What the user can do if a file cannot be written."""


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Give the path of a draft beside `target`, with its suffix; it takes the target's place if the block succeeds.

    What was there before is kept until then, also after Ctrl-C or on a full disk. Raises OSError as `open` does, about
    the target and not about the draft.
    """
    draft = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        yield draft
        draft.replace(target)
    except OSError as error:
        if str(error.filename) != str(draft):
            raise
        raise OSError(error.errno, _REMEDIES.get(error.errno or 0, error.strerror), str(target)) from error
    finally:
        draft.unlink(missing_ok=True)


def write_packed(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """Write the named files as one packed trace and return its path, with its suffix added if it is missing.

    A file that is there is replaced once the new one is whole. Only its owner can read it. The same members give the
    same bytes.
    """
    target = path if path.suffix == PACKED_SUFFIX else path.with_name(path.name + PACKED_SUFFIX)
    with (
        whole(target) as draft,
        open(draft, "wb", opener=_private) as file,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return target


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
