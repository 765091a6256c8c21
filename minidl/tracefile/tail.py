"""The end of an events file that is being written, at a cost that does not grow with the file.

Interface: `tail(path, most)`. A live file is read twice; a record counts if both readings agree.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from minidl.tracefile.arrays import Rows
from minidl.tracefile.format import HEADER_BYTES, MAGIC, RECORD, SLOT_BYTES, Header, slots_of

BLOCK: Final = 64
"""Slots that are searched together for the newest event: a single slot may stay empty for good."""


def tail(path: Path, most: int, after: int = 0) -> bytes:
    """Return the events file at `path` with its last events alone, laid out as that of a ring of so many.

    most: how many events at most. after: only those with a greater sequence number. b"" if it can't be read yet. Costs
    some 20 reads of 4 KiB and two of the end, whatever the file's size.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        header = os.pread(fd, HEADER_BYTES, 0)
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            return header
        slots = (os.fstat(fd).st_size - HEADER_BYTES) // SLOT_BYTES  # of a ring that has been around: all it may have
        newest = _newest(fd, slots)
        count = max(0, min(most, newest - after, slots))
        rows = _agreed(fd, newest - count, newest, slots)
    finally:
        os.close(fd)
    rows = rows[(rows["seq"] > newest - count) & (rows["seq"] <= newest)]  # a slot may have kept what it held before
    ring = max(count, 1)
    out = np.zeros(ring, RECORD)
    out[slots_of(rows, ring)] = rows
    return Header.read(header)._replace(ring=ring, slots=ring).page() + out.tobytes()


def _newest(fd: int, slots: int) -> int:
    """The greatest sequence number in the file. In a ring too, the blocks written since the first one come after it."""

    def block(number: int) -> npt.NDArray[np.uint64]:
        data = os.pread(fd, BLOCK * SLOT_BYTES, HEADER_BYTES + number * BLOCK * SLOT_BYTES)
        rows = np.frombuffer(data[: len(data) // SLOT_BYTES * SLOT_BYTES], "<u8")  # a file may be cut in a slot
        seq: npt.NDArray[np.uint64] = rows.reshape(-1, SLOT_BYTES // 8)[:, -1]
        return seq[seq > 0]

    base = block(0)
    if not len(base):
        return 0
    low, high = 0, (slots - 1) // BLOCK  # low is such a block; behind high there is none
    while low < high:
        middle = (low + high + 1) // 2
        seq = block(middle)
        if len(seq) and seq.max() >= base.max():
            low = middle
        else:
            high = middle - 1
    return int(block(low).max())


def _agreed(fd: int, begin: int, end: int, slots: int) -> Rows:
    """The records numbered from `begin` + 1 to `end`, of two readings those that were the same in both."""

    def once() -> Rows:
        first, last = begin % slots, (end - 1) % slots + 1
        parts = [(first, last)] if first < last else [(first, slots), (0, last)]
        data = b"".join(os.pread(fd, (b - a) * SLOT_BYTES, HEADER_BYTES + a * SLOT_BYTES) for a, b in parts)
        return np.frombuffer(data[: len(data) // SLOT_BYTES * SLOT_BYTES], RECORD)

    if end <= begin:
        return np.empty(0, RECORD)
    one, two = once(), once()
    common = min(len(one), len(two))
    rows: Rows = one[:common][one[:common] == two[:common]]
    return rows
