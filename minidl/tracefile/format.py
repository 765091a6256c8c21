"""The files of a trace: their names, the header page, the 64-byte slot, and the lines of a side file.

A trace is a directory. It holds `manifest.json`; for each process `<pid>-<start>.events`, a header page and then one
slot an event, and `<pid>-<start>.meta.jsonl`, a line of JSON for each fact that needs words; and attachments. Packed,
the same files are the members of one gzipped tar file, `*.minidl`; those of workers that have ended may be so within
the directory (`folded`).

Interface: `PACK` and `RECORD` (a slot as `struct` writes it and as NumPy reads it), `Header` (the header page),
`records` (the slots of a file), `events_file` and `side_line` (to write them), `stem_of` and `parts_of` (file names).
The recorder writes the header in place with `HEADER` and `STATE`; every other module uses `Header`.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from minidl.tracefile.arrays import Rows

FORMAT_VERSION: Final = 1
"""Version of the record layout and of the files around it; written into each trace's manifest."""

MANIFEST: Final = "manifest.json"
EVENTS_SUFFIX: Final = ".events"
SIDE_SUFFIX: Final = ".meta.jsonl"
PACKED_SUFFIX: Final = ".minidl"
STACKS_SUFFIX: Final = ".stacks"
"""Of the file that a process writes its stacks to when the watchdog asks; no part of a packed trace."""

LOADERS: Final = "loaders"
"""A file that grows by a byte for each iterator's number that was handed out; no part of a packed trace."""

PACK: Final = struct.Struct("<qHHIqqqqqQ")
"""time, code, loader, tid, task, worker, x, y, z, seq. The sequence number (counted from 1) comes last: `pack_into`
zeroes the slot first and writes in order, so a slot torn by a kill reads as empty and not as a record: on any CPU a
process is killed between two instructions, of which the first are done. Who reads while the process writes may see the
writes in another order on aarch64; `tail` therefore reads twice."""

RECORD: Final = np.dtype(
    [
        ("time", "<i8"),  # ns, CLOCK_MONOTONIC
        ("code", "<u2"),  # key of events.EVENTS
        ("loader", "<u2"),  # number of the iterator, from 1; 0 = none
        ("tid", "<u4"),  # native thread id
        ("task", "<i8"),  # the task's index, its `send_idx` when it was sent; -1 = none
        ("worker", "<i8"),  # worker id; -1 = none
        ("x", "<i8"),
        ("y", "<i8"),
        ("z", "<i8"),
        ("seq", "<u8"),  # order of emission in its process, from 1; 0 = an empty slot
    ]
)
assert PACK.size == RECORD.itemsize == 64
SLOT_BYTES: Final = PACK.size

ROW: Final = np.dtype([*((name, RECORD[name]) for name in RECORD.names or ()), ("pid", "<u4"), ("process", "<u4")])
"""One event of a Trace: a RECORD, and who emitted it (pid, and index in `Trace.processes`)."""

MAGIC: Final = b"minidlEV"
HEADER: Final = struct.Struct("<8sIIqqQ")
"""Start of an events file: magic, format version, pid, start in monotonic and realtime ns, slots of the ring or 0."""

STATE: Final = struct.Struct("<QQQq")
"""At `STATE_AT`, rewritten in place: slots in the file, events and side-file lines that are lost, the last errno."""

STATE_AT: Final = 64
HEADER_BYTES: Final = 4096


class TraceError(Exception):
    """A trace cannot be begun or read. The message names the file, the problem and the remedy."""


class Header(NamedTuple):
    """The header page of an events file. ring: slots of the ring, 0 = the file grows; slots: of the file."""

    pid: int
    start_ns: int  # CLOCK_MONOTONIC
    realtime_ns: int = 0
    ring: int = 0
    slots: int = 0
    lost_events: int = 0
    lost_lines: int = 0
    errno: int = 0
    version: int = FORMAT_VERSION

    @classmethod
    def read(cls, data: bytes | bytearray) -> Header:
        """Read the header of an events file of which `header_problem` has found nothing wrong."""
        _, version, pid, start, realtime, ring = HEADER.unpack_from(data)
        slots, lost_events, lost_lines, errno = STATE.unpack_from(data, STATE_AT)
        return cls(pid, start, realtime, ring, slots, lost_events, lost_lines, errno, version)

    def page(self) -> bytes:
        """The header page, HEADER_BYTES long."""
        page = bytearray(HEADER_BYTES)
        HEADER.pack_into(page, 0, MAGIC, self.version, self.pid, self.start_ns, self.realtime_ns, self.ring)
        STATE.pack_into(page, STATE_AT, self.slots, self.lost_events, self.lost_lines, self.errno)
        return bytes(page)


def header_problem(data: bytes | None) -> str:
    """Why the events file with this content cannot be read, as the rest of a sentence; "" if it can be."""
    if data is None:
        return "is missing, with all its events"
    if len(data) < HEADER_BYTES or not any(data[:HEADER_BYTES]):
        return "has no header: the process was stopped, or the disk was full, before its first event"
    magic, version = HEADER.unpack_from(data)[:2]
    if magic != MAGIC:
        return f"starts with {data[:8]!r}: it is not an events file"
    if version != FORMAT_VERSION:
        return f"has format {version}, but this minidl reads format {FORMAT_VERSION}: read it with a later minidl"
    return ""


def errno_in_words(errno: int) -> str:
    """Return the system's text for an errno that a file holds."""
    return os.strerror(errno) if 0 < errno < 4096 else "reason unknown"


def records(data: bytes | bytearray) -> Rows:
    """Return the slots of an events file as an array of RECORD; a slot that is cut off at the end is left out."""
    slots = max(0, len(data) - HEADER_BYTES) // SLOT_BYTES
    return np.frombuffer(data, RECORD, slots, HEADER_BYTES) if slots else np.empty(0, RECORD)


def slots_of(rows: Rows, ring: int) -> npt.NDArray[np.uint64]:
    """Return the slot that each event belongs in; of an empty slot, the greatest number or, in a ring, any."""
    number: npt.NDArray[np.uint64] = rows["seq"] - np.uint64(1)
    return number % np.uint64(ring) if ring else number


def events_file(header: Header, rows: Rows) -> bytes:
    """Return the events file that holds `rows` (with the columns of RECORD, and perhaps others), each in its slot."""
    slots = slots_of(rows, header.ring)
    out = np.zeros(int(slots.max()) + 1 if len(rows) else 0, RECORD)
    for name in RECORD.names or ():
        out[name][slots] = rows[name]
    return header._replace(slots=len(out)).page() + out.tobytes()


def side_line(kind: str, **facts: Any) -> bytes:
    """Return a line of a side file. Raises TypeError or ValueError for facts that JSON cannot hold."""
    return json.dumps({"kind": kind, **facts}).encode("ascii") + b"\n"


def stem_of(pid: int, start_ns: int) -> str:
    """Name a process's two files, without their suffixes."""
    return f"{pid}-{start_ns}"


def parts_of(stem: str) -> tuple[int, int]:
    """Return the pid and the start (ns, CLOCK_MONOTONIC) that `stem_of` has put into a file's name."""
    pid, start = stem.split("-")
    return int(pid), int(start)
