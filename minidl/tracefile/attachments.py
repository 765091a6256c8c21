"""Attachments: recordings of the same run by other recorders (functions of the workers, operators of the training).

Interface: `Attachment(name, source)` is one such file; `about` describes it, `line` does so in a sentence, `slices` is
its content, `problems` names missing parts. `description`, `chunk` and `closing` make the lines of such a file.

The file, `<kind>-<number>.attachment.jsonl` or with a second number, is JSON by the line: first the description (kind,
program, version, pid, how the times became CLOCK_MONOTONIC ns, with the error), then chunks of slices, each of which
stands alone, perhaps notes on losses, and finally a line that marks it complete. It is read up to the first invalid
line, and reading executes nothing. It is read on demand, because it may be longer than the trace itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from minidl.tracefile.arrays import Ints, Rows
from minidl.tracefile.facts import LATEST, is_long, loads
from minidl.tracefile.words import duration, plain, size

FORMAT: Final = 1
SUFFIX: Final = ".attachment.jsonl"
NAME: Final = re.compile(r"[a-z]{1,20}-[0-9]{1,19}(?:-[0-9]{1,19})?\.attachment\.jsonl")
MOST_PACKED: Final = 64 << 20
"""Bytes of attachments, before compression, that a packed trace takes along, smaller ones first."""

LONGEST_DESCRIPTION: Final = 1 << 16

SLICE = np.dtype([("begin", "<i8"), ("end", "<i8"), ("track", "<i8"), ("name", "<i8")])
"""One slice: from when to when (ns, CLOCK_MONOTONIC), and its places in `Slices.tracks` and `Slices.names`."""


class SliceTrack(NamedTuple):
    """A thread, or a stream. group: what it belongs to if that is no process: "GPU 0"."""

    pid: int
    tid: int
    title: str
    group: str = ""


class Name(NamedTuple):
    """What a slice is called, and where that is defined or what kind of thing it is."""

    name: str
    about: str = ""


@dataclass
class Slices:
    """What an attachment holds. args: of single slices, by number. arrows: (from, to), numbers of slices."""

    tracks: list[SliceTrack] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)
    rows: Rows = field(default_factory=lambda: np.empty(0, SLICE))
    args: dict[int, dict[str, Any]] = field(default_factory=dict)
    arrows: list[tuple[int, int]] = field(default_factory=list)


# --- Writing ----------------------------------------------------------------------------------------------------------
def description(kind: str, program: str, version: str, pid: int, clock: str, error_ns: int, **facts: Any) -> bytes:
    """Return the first line. clock: how the times became CLOCK_MONOTONIC ns; error_ns: by how much they may be off."""
    about = {"attachment": FORMAT, "kind": kind, "program": program, "version": version, "pid": pid}
    return line({**about, "clock": clock, "error_ns": error_ns, **facts})


def chunk(
    tracks: Sequence[SliceTrack], names: Sequence[Name], rows: Rows, args: Mapping[int, dict[str, Any]] | None = None
) -> bytes:
    """Return a line with slices. rows: array of SLICE, its places are in `tracks` and `names`; args by row."""
    since = int(rows["begin"].min()) if len(rows) else 0
    return line({
        "tracks": tracks,
        "names": names,
        "since": since,
        "track": rows["track"].tolist(),
        "name": rows["name"].tolist(),
        "begin": (rows["begin"] - since).tolist(),
        "duration": (rows["end"] - rows["begin"]).tolist(),
        "args": args or {},
    })  # fmt: skip


def arrows(pairs: Iterable[tuple[int, int]]) -> bytes:
    """Return a line with arrows between slices, which are numbered through the whole file from 0."""
    return line({"arrows": list(pairs)})


def note(text: str) -> bytes:
    """Return a line on what the file lacks."""
    return line({"note": text})


def closing() -> bytes:
    """Return the last line: the file is complete."""
    return line({"end": True})


def line(content: dict[str, Any]) -> bytes:
    """Return a line; what JSON cannot hold becomes its repr."""
    return json.dumps(content, separators=(",", ":"), default=repr).encode("ascii") + b"\n"


# --- Reading ----------------------------------------------------------------------------------------------------------
class Attachment:
    """One file of another recorder. name: of the file; source: its bytes, or its path.

    about: its description, {} if that cannot be read. Nothing here raises for what is in the file.
    """

    def __init__(self, name: str, source: bytes | Path) -> None:
        self.name = name
        self.source = source
        self._first_problem = ""
        self.about: dict[str, Any] = self._describe()
        self.kind = str(self.about.get("kind", "unknown"))

    def _describe(self) -> dict[str, Any]:
        try:
            about = loads(self._head())
        except OSError as error:
            self._first_problem = f"cannot be read: {error.strerror}"
            return {}
        except (ValueError, RecursionError):
            about = None
        if not isinstance(about, dict) or not isinstance(about.get("attachment"), int):
            self._first_problem = "has no description in its first line: left out"
            return {}
        if about["attachment"] != FORMAT:
            self._first_problem = f"has format {about['attachment']}, but this minidl reads {FORMAT}: left out"
            return {}
        return _shallow(about)

    def _head(self) -> bytes:
        if isinstance(self.source, bytes):
            return self.source[:LONGEST_DESCRIPTION].split(b"\n", 1)[0]
        with self.source.open("rb") as file:
            return file.readline(LONGEST_DESCRIPTION)

    @property
    def size(self) -> int:
        """Bytes of the file; 0 if it is gone."""
        if isinstance(self.source, bytes):
            return len(self.source)
        try:
            return self.source.stat().st_size
        except OSError:
            return 0

    def stub(self) -> bytes:
        """Return what a packed trace keeps of an attachment that is too large."""
        why = f"left out when the trace was packed: it has {size(self.size)}, and all may have {size(MOST_PACKED)}"
        return self._head().rstrip(b"\n") + b"\n" + note(why) + closing()

    def data(self) -> bytes:
        """Return the whole file. Raises OSError if it is gone."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()

    @property
    def who(self) -> str:
        """Its subject: "functions of worker 2"."""
        worker = self.about.get("worker", -1)
        pid = self.about.get("pid", "?")
        whom = f"worker {worker} (pid {pid})" if isinstance(worker, int) and worker >= 0 else f"pid {pid}"
        return plain(f"{self.kind} of {whom}")

    @cached_property
    def _read(self) -> tuple[Slices, list[str]]:
        return _Reader(self).read()

    @property
    def slices(self) -> Slices:
        """Its content, as far as it can be read."""
        return self._read[0]

    @property
    def problems(self) -> list[str]:
        """Its problems, in words."""
        return [f"{self.who} ({self.name}): {what}" for what in self._read[1]]

    @property
    def line(self) -> str:
        """Its description and problems in one sentence."""
        if not self.about:
            return "; ".join(self.problems)
        program = f"{self.about.get('program', '?')} {self.about.get('version', '')}".strip()
        lacks = "".join(f"; {what}" for what in self._read[1])
        return plain(f"{self.who} ({program}): {len(self.slices.rows)} slices{lacks}")

    def __repr__(self) -> str:
        return f"<Attachment {self.name}: {self.who}>"


class _Reader:
    """Reads one file from its second line on."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.out = Slices()
        self.parts: list[Rows] = []
        self.count = 0
        self.tracks: dict[SliceTrack, int] = {}
        self.names: dict[Name, int] = {}
        self.notes: list[str] = []
        self.complete = False

    def read(self) -> tuple[Slices, list[str]]:
        first = self.attachment._first_problem
        if first:
            return self.out, [first]
        try:
            lines = self.attachment.data().split(b"\n")[1:]
        except OSError as error:
            return self.out, [f"cannot be read: {error.strerror}"]
        for number, text in enumerate(lines, 2):
            if text and not self._take(text):
                self.notes.append(f"line {number} is damaged or cut: the rest was not read")
                break
        if not self.complete:
            self.notes.append(self._incomplete())
        return self._result(), [plain(note) for note in self.notes]

    def _incomplete(self) -> str:
        if self.attachment.kind != "functions":
            return "its end is missing"
        last = max((int(part["end"].max()) for part in self.parts if len(part)), default=0)
        since = self.attachment.about.get("begun_ns")
        when = f", {duration(last - since)} after its begin" if last and isinstance(since, int) else ""
        return (
            f"it ends with its last save{when}: its process was killed, or still runs; later slices, and functions "
            "that had not returned, are missing"
        )

    def _take(self, text: bytes) -> bool:
        """Take in one line; return False if it is damaged."""
        try:
            content = loads(text)
            if "begin" in content:
                self._take_slices(content)
            elif "arrows" in content:
                self.out.arrows += [(int(a), int(b)) for a, b in content["arrows"]]
            elif "note" in content:
                self.notes.append(str(content["note"]))
            else:
                self.complete = self.complete or content["end"] is True
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return False
        return True

    def _take_slices(self, content: dict[str, Any]) -> None:
        """Take in a chunk; raises ValueError, TypeError, KeyError or OverflowError, and then has taken in nothing."""
        tracks = [
            SliceTrack(int(pid), int(tid), str(title), str(group)) for pid, tid, title, group in content["tracks"]
        ]
        names = [Name(str(name), str(about)) for name, about in content["names"]]
        begin = _column(content["begin"], LATEST) + time_in(content["since"])
        rows = np.empty(len(begin), SLICE)
        rows["begin"] = begin
        rows["end"] = begin + _column(content["duration"], LATEST)
        rows["track"] = places(self.tracks, tracks)[_column(content["track"], len(tracks))]
        rows["name"] = places(self.names, names)[_column(content["name"], len(names))]
        if len(rows) and int(rows["end"].max()) >= LATEST:
            raise ValueError(f"slice end {int(rows['end'].max())} ns exceeds 2**62")
        args = {self.count + int(place): _shallow(values) for place, values in content["args"].items()}
        if any(not self.count <= place < self.count + len(rows) for place in args):
            raise ValueError("args of no slice")
        self.out.args |= args
        self.parts.append(rows)
        self.count += len(rows)

    def _result(self) -> Slices:
        self.out.tracks, self.out.names = list(self.tracks), list(self.names)
        self.out.rows = np.concatenate(self.parts) if self.parts else self.out.rows
        self.out.arrows = [pair for pair in self.out.arrows if all(0 <= end < self.count for end in pair)]
        return self.out


def _shallow(values: dict[str, Any]) -> dict[str, Any]:
    """Replace lists, objects and numbers of more than 64 bits by their JSON text: any viewer can be given that."""
    return {
        key: json.dumps(one) if isinstance(one, (list, dict)) or is_long(one) else one for key, one in values.items()
    }


def places(known: dict[Any, int], own: list[Any]) -> Ints:
    """Return the place in `known` of each of `own`, and add what is new."""
    return np.array([known.setdefault(one, len(known)) for one in own] or [0], np.int64)


def time_in(value: object) -> int:
    """Return a time, ns. Raises ValueError if it is none."""
    if type(value) is not int or not 0 <= value < LATEST:
        raise ValueError("no time")
    return value


def _column(values: object, bound: int) -> Ints:
    """Return a list of integers from 0 to below `bound` as an array. Raises ValueError if it is none."""
    if not isinstance(values, list):
        raise ValueError("no column")
    column = np.array(values, np.int64) if not values else np.array(values)
    if column.ndim != 1 or column.dtype != np.int64 or (len(column) and not 0 <= column.min() <= column.max() < bound):
        raise ValueError("a column of something else than numbers in range")
    return column


def free_name(name: str, taken: set[str]) -> str:
    """Return `name`, or if it is taken, its kind with the first free number."""
    kind, number = name.split("-")[0], 1
    while name in taken:
        name = f"{kind}-{number}{SUFFIX}"
        number += 1
    return name


def too_large(attachments: Sequence[Attachment]) -> list[Attachment]:
    """Return the attachments that a packed trace leaves out."""
    room, out = MOST_PACKED, []
    for needs, _, one in sorted((one.size, one.name, one) for one in attachments):
        if needs <= room:
            room -= needs
        else:
            out.append(one)
    return out


def packed(attachments: Sequence[Attachment]) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of what goes into a packed trace; of a file that is too large, its stub."""
    left_out = too_large(attachments)
    for one in attachments:
        try:
            data = one.data() if one not in left_out else one.stub()
        except OSError:
            continue  # it is gone since the trace was opened
        yield one.name, data
