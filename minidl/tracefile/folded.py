"""Fold the files of workers that have ended: a job that makes new workers for each epoch leaves two files of each.

Interface: `due(names, here)` says which workers' files are to be folded, `fold(directory, stems, most_bytes)` does so;
`NAME` is a pack's name, `packs_of(names)` are the packs, `left_out(packs)` how many workers' files are in none.

The rule: let N be the number of processes that the trace has now, at least KEPT. Once 2 * N workers that have ended
have files, all but the newest N of them are folded. Their files go into packs, `ended-FIRST-LAST.minidl`, packed traces
whose members have the names of the files; the numbers count the workers that were folded, from 1. Two packs of one size
become one of twice that size, up to MERGED bytes. If all packs together are larger than `most_bytes`, the oldest are
deleted; None deletes none. So of workers that have ended a trace has fewer than 4 files for each process that it has at
one time (or 4 * KEPT), and of packs one for each doubling of their number and one for each MERGED bytes.

A pack is whole before it has its name, and what it holds is deleted afterwards: killed at any moment, every event is in
a file, or in two with the same content. One process at a time folds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from minidl.tracefile.format import (
    EVENTS_SUFFIX,
    PACKED_SUFFIX,
    SIDE_SUFFIX,
    Header,
    events_file,
    header_problem,
    parts_of,
    records,
    slots_of,
)
from minidl.tracefile.packs import members_of, write_packed

KEPT: Final = 16
MERGED: Final = 4 << 20

NAME: Final = re.compile(r"ended-([0-9]{1,12})-([0-9]{1,12})" + re.escape(PACKED_SUFFIX))


def due(ended: Collection[str], here: int) -> list[str]:
    """The stems whose files are to be folded now, the oldest first; none as long as they are few.

    ended: stems of workers that have ended and have files. here: how many processes the trace has at one time.
    """
    kept = max(KEPT, here)
    stems = sorted(ended, key=lambda stem: parts_of(stem)[1])
    return stems[:-kept] if len(stems) >= 2 * kept else []


def packs_of(names: Collection[str]) -> list[tuple[int, int, str]]:
    """(first, last, name) of each pack, in order; one that another one holds is left out."""
    found = sorted(
        ((int(match[1]), int(match[2]), name) for name in names if (match := NAME.fullmatch(name))),
        key=lambda pack: (pack[0], -pack[1]),
    )
    out: list[tuple[int, int, str]] = []
    for pack in found:
        if not out or pack[1] > out[-1][1]:
            out.append(pack)
    return out


def left_out(packs: Sequence[tuple[int, int, str]]) -> int:
    """How many workers' files were deleted with the oldest packs."""
    return packs[0][0] - 1 if packs else 0


def fold(directory: Path, stems: Sequence[str], most_bytes: int | None) -> None:
    """Fold these workers' files, if no other process folds in this trace. Raises OSError; then the files are there."""
    held = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        packs = packs_of(os.listdir(directory))
        first = packs[-1][1] + 1 if packs else 1
        files = [stem + suffix for stem in stems for suffix in (SIDE_SUFFIX, EVENTS_SUFFIX)]
        name = _pack(directory, first, first + len(stems) - 1, _contents(directory, files))
        _delete(directory, files)
        _merge(directory, [*packs, (first, first + len(stems) - 1, name)])
        _limit(directory, most_bytes)
    finally:
        os.close(held)


def _contents(directory: Path, files: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    for name in files:
        with contextlib.suppress(FileNotFoundError):  # it has recorded no event
            data = (directory / name).read_bytes()
            yield name, _used(data) if name.endswith(EVENTS_SUFFIX) else data


def _used(data: bytes) -> bytes:
    """An events file without the empty slots at its end."""
    if header_problem(data):
        return data
    header, slots = Header.read(data), records(data)
    places = slots_of(rows := slots[slots["seq"] > 0], header.ring)
    return events_file(header, rows) if not len(rows) or places.max() < len(slots) else data  # it may be damaged


def _pack(directory: Path, first: int, last: int, members: Iterator[tuple[str, bytes]]) -> str:
    name = f"ended-{first}-{last}{PACKED_SUFFIX}"
    write_packed(directory / name, members)
    return name


def _delete(directory: Path, names: Collection[str]) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


def _merge(directory: Path, packs: list[tuple[int, int, str]]) -> None:
    """Make one pack of the last two as long as the last is no smaller than the one before: as a counter carries."""
    while len(packs) > 1:
        (first, middle, before), (follows, last, after) = packs[-2:]
        sizes = [(directory / name).stat().st_size for name in (before, after)]
        if middle - first > last - follows or sum(sizes) > MERGED:
            return
        members = _once(one for name in (before, after) for one in members_of(directory / name))
        packs[-2:] = [(first, last, _pack(directory, first, last, members))]
        _delete(directory, (before, after))


def _once(members: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Each member once: after a fold that was killed, the next one folds again what was not deleted yet."""
    seen = set()
    for name, data in members:
        if name not in seen:
            seen.add(name)
            yield name, data


def _limit(directory: Path, most_bytes: int | None) -> None:
    """Delete the packs that others hold, and the oldest ones of those that take too much; the newest stays."""
    names = os.listdir(directory)
    packs = packs_of(names)
    _delete(directory, {name for name in names if NAME.fullmatch(name)} - {name for _, _, name in packs})
    sizes = [(directory / name).stat().st_size for _, _, name in packs]
    while most_bytes is not None and len(packs) > 1 and sum(sizes) > most_bytes:
        _delete(directory, [packs.pop(0)[2]])
        del sizes[0]
