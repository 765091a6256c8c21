"""Stack samples: where the program's own code was, at moments that have nothing to do with its steps.

Interface: `text_of(frames)` and `frames_of(text)` write and read a stack; `read(lines, strings)` -> `StackSamples`,
of a trace `Trace.stack_samples`; `library(file)` tells the user's code from the rest.

A process that is sampled (see `record.stack_samples`) describes its looks in its side file, kind "sampled". tid: of the
thread. monotonic_ns: of the first look. looks: each one's µs since the first, the number of the stack's string (0 =
none of it is the program's), and the µs of CPU time that the thread has used since the look before, -1 = unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from minidl.tracefile.arrays import Bools, Ints, Rows
from minidl.tracefile.words import plain

_LIBRARY: Final = re.compile(
    r"site-packages/|dist-packages/|/lib/python3|^<frozen|^<string>|(^|/)minidl/(data/|loader/|transport/|wire/)?"
)


def library(file: str) -> bool:
    """Whether a file belongs to Python, an installed package or this one, and not to the user's program."""
    return bool(_LIBRARY.search(file.replace("\\", "/")))


class CodeLine(NamedTuple):
    """A frame of a stack: what runs there. source: the line's text, "" = unknown."""

    file: str
    line: int
    function: str
    source: str = ""

    @property
    def base(self) -> str:
        """Where it is, without folders: "tiles.py:31"."""
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}"


def text_of(frames: Iterable[CodeLine]) -> str:
    """A stack, outermost frame first, as a string of a trace."""
    return json.dumps([list(frame) for frame in frames])


def frames_of(text: str) -> tuple[CodeLine, ...]:
    """The stack that a string stands for; () if it stands for none."""
    try:
        found = [CodeLine(plain(str(f)), int(n), plain(str(name)), plain(str(s))) for f, n, name, s in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        return ()
    return tuple(found)


@dataclass(frozen=True)
class StackSamples:
    """The looks of a trace, by time. at: ns; process: its position in the trace; tid: the thread; stack: a position in
    `stacks`, of which the first is empty; cpu: ns of CPU time since the look before, and since: ns of time, -1 = none.
    """

    at: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    process: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    tid: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    stack: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    cpu: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    since: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    stacks: tuple[tuple[CodeLine, ...], ...] = ((),)

    def __len__(self) -> int:
        return len(self.at)

    def inside(self, rows: Rows) -> Bools:
        """Whether each look fell into one of these spans: of its thread, and not in one another."""
        found = np.zeros(len(self), bool)
        for process, tid in {(int(row["process"]), int(row["tid"])) for row in rows[["process", "tid"]]}:
            mine = rows[(rows["process"] == process) & (rows["tid"] == tid) & (rows["end"] >= 0)]
            mine = mine[np.argsort(mine["begin"])]
            looks = np.flatnonzero((self.process == process) & (self.tid == tid))
            place = np.searchsorted(mine["begin"], self.at[looks], side="right") - 1
            found[looks] = (place >= 0) & (self.at[looks] <= mine["end"][place]) if len(mine) else False
        return found


_NONE: Final = StackSamples()


def read(lines: Iterable[Mapping[str, Any]], strings: Mapping[tuple[int, int], str]) -> StackSamples:
    """The looks that the lines of kind "sampled" tell. A line that makes no sense is left out."""
    known: dict[tuple[CodeLine, ...], int] = {(): 0}
    numbers: dict[tuple[int, int], int] = {}
    out: list[tuple[int, ...]] = []
    last: dict[tuple[int, int], int] = {}
    for line in lines:
        try:
            process, tid, begin = int(line["process"]), int(line["tid"]), int(line["monotonic_ns"])
            looks = [(begin + 1000 * int(us), int(number), 1000 * int(cpu)) for us, number, cpu in line["looks"]]
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
        for at_ns, number, cpu in looks:
            key = process, number
            if key not in numbers:
                stack = frames_of(strings.get(key, "[]"))
                numbers[key] = known.setdefault(stack, len(known))
            before = last.get((process, tid), -1)
            since = at_ns - before if before >= 0 and cpu >= 0 else -1
            out.append((at_ns, process, tid, numbers[key], cpu if since > 0 else -1, since))
            last[process, tid] = at_ns
    if not out:
        return _NONE
    try:
        columns = np.array(sorted(out), np.int64).T
    except OverflowError:  # of a damaged file
        return _NONE
    at, process, tid, stack, used, since = columns
    return StackSamples(at, process, tid, stack, used, since, tuple(known))
