"""A trace's files as bytes: read from a directory, with the packs of workers that have ended, or from a packed file.

Interface: `read_files(path)` -> `Files`; `read_words(directory)`: without events. Unreadable parts of a trace are left
out and named in `Files.problems`; TraceError is for a path without a trace, or a packed file with too large contents.
Names inside a packed file are never used as paths, and links are not followed. A live file is read twice, and a slot
counts if both readings agree.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from minidl.tracefile.attachments import NAME, Attachment
from minidl.tracefile.folded import left_out, packs_of
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
from minidl.tracefile.packs import ZIPPED, Unzipped, members
from minidl.tracefile.words import counted

_MEMBER = re.compile(
    rf"manifest\.json|([0-9]{{1,9}}-[0-9]{{1,19}})(\.events|\.meta\.jsonl)|(?P<attachment>{NAME.pattern})"
)


@dataclass
class Files:
    """A trace's files as bytes, from a directory or a packed file; side and events files by their process's stem.

    part: only the newest events were requested.
    """

    manifest: bytes | None = None
    side: dict[str, bytes] = field(default_factory=dict)
    events: dict[str, bytes] = field(default_factory=dict)
    attachments: list[Attachment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    part: bool = False

    def members(self) -> Iterator[tuple[str, bytes]]:
        """Yield names and contents, side files before events: what is cut short still names the processes it lacks."""
        if self.manifest is not None:
            yield MANIFEST, self.manifest
        yield from ((stem + SIDE_SUFFIX, data) for stem, data in self.side.items())
        yield from ((stem + EVENTS_SUFFIX, data) for stem, data in self.events.items())


def read_files(place: Path) -> Files:
    """The files of the trace at `place`. Raises TraceError if there is none."""
    try:
        return _read_directory(place) if place.is_dir() else _read_packed(place)
    except OSError as error:
        closed = isinstance(error, PermissionError)
        remedy = "read it as its owner, or chmod it" if closed else "give the directory or the packed file of a trace"
        raise TraceError(f"{place}: {error.strerror or error}: {remedy}") from error


def read_words(place: Path) -> Files:
    """The manifest and the side files of the trace in a directory, also while it is folded; none if it is gone."""
    try:
        return _read_directory(place, events=False)
    except (OSError, TraceError):
        return Files()


TRIES: Final = 5
"""The most readings of a directory while files in it are being folded."""


def _read_directory(place: Path, events: bool = True) -> Files:
    for _ in range(TRIES):
        packs = _packs_in(place)
        files = _read_once(place, packs, events)
        if packs == _packs_in(place):
            break  # else a file that was there no more when it was read may be in a pack that was not
    return files


def _packs_in(place: Path) -> list[tuple[int, int, str]]:
    return packs_of(os.listdir(place))


def _read_once(place: Path, packs: list[tuple[int, int, str]], events: bool) -> Files:
    files = Files(part=not events)
    if gone := left_out(packs):
        files.problems.append(f"the files of the {counted(gone, 'worker')} that ended first (--full keeps all)")
    for _, _, name in packs:
        _take_pack(files, place / name)
    for name, match in members_in(place, files.problems):
        if match["attachment"]:
            files.attachments.append(Attachment(name, place / name))
            continue
        if match[2] == EVENTS_SUFFIX and not events:
            continue
        try:
            data = (place / name).read_bytes()
            if match[2] == EVENTS_SUFFIX:
                data = _agreed(data, (place / name).read_bytes())
        except OSError as error:
            if match[1] not in files.side:  # it was folded at this moment
                files.problems.append(f"{name}: {error.strerror}")
            continue
        _file(files, match, data)
    return files


def members_in(place: Path, problems: list[str]) -> list[tuple[str, re.Match[str]]]:
    """The names of a trace's files in a directory, each with its match. Raises TraceError if there is none.

    A link could bring any file of this machine into what is packed and given away: it is left out and said.
    """
    names = sorted(os.listdir(place))
    found = [(name, match) for name in names if (match := _MEMBER.fullmatch(name))]
    if not found:
        raise TraceError(no_trace_in(place, names))
    out = []
    for name, match in found:
        with contextlib.suppress(FileNotFoundError):  # it was deleted just now
            if stat.S_ISREG((place / name).lstat().st_mode):
                out.append((name, match))
            else:
                problems.append(f"{name} is a link, a directory or a device, not a file of the trace: left out")
    return out


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
            f"{place} is an empty directory, without a trace: record one with minidl run --trace {place} SCRIPT, or "
            f"with MINIDL_TRACE={place} in the environment of the job"
        )
    return f"{place} is not a trace: it has no {MANIFEST}, only {', '.join(names[:4])}"


def _take_pack(files: Files, place: Path) -> None:
    """Take in a pack of workers that have ended, as far as it can be read."""
    try:
        if not stat.S_ISREG(place.lstat().st_mode):
            files.problems.append(f"{place.name} is a link, a directory or a device: left out")
        else:
            _take_packed(files, place)
    except FileNotFoundError:  # it is in a larger one by now
        return
    except TraceError as error:
        files.problems.append(str(error))


def _read_packed(place: Path) -> Files:
    with place.open("rb") as file:
        start = file.read(512)
    if not start.startswith(ZIPPED):
        raise TraceError(_foreign(place, start))
    files = Files()
    _take_packed(files, place)
    if files.manifest is None and not files.side and not files.events:
        raise TraceError(f"{place} is a gzip file without a minidl trace")
    return files


def _take_packed(files: Files, place: Path) -> None:
    """Take in the members of a packed file. Raises TraceError if its contents are too large."""
    seen = set[str]()
    with place.open("rb") as file:
        plain = Unzipped(place, file)
        for name, data in members(plain, files.problems):
            match = _MEMBER.fullmatch(name)
            if match is None or name in seen:
                what = "occurs twice" if match else "does not belong to a trace"
                files.problems.append(f"{place.name}: a member named {name[:80]!r} {what} and was left out")
            else:
                seen.add(name)
                _file(files, match, data)
        for _ in plain.rest():
            pass
    if plain.problem:
        files.problems.insert(0, f"{place.name}: {plain.problem}")


def _foreign(place: Path, start: bytes) -> str:
    if start.startswith(MAGIC) or place.name.endswith((EVENTS_SUFFIX, SIDE_SUFFIX)) or place.name == MANIFEST:
        return f"{place} is one file of a trace: give its directory, {place.absolute().parent}"
    found = "an empty file" if not start else f"a file that starts with {start[:16]!r}"
    return f"{place} is {found}, not a packed trace: give a file made by minidl pack, or a trace's directory"
