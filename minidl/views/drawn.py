"""What the exports draw, kind by kind, as columns: `export` makes it, `chrome` and `perfetto` write it.

Times are ns since the trace's first event. Where something is drawn is the number of a process and of a thread, or of
what is drawn as one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from minidl.tracefile.arrays import Ints
from minidl.tracefile.batches import NEVER
from minidl.tracefile.events import Event

T = TypeVar("T", bound=Hashable)
U = TypeVar("U")

CAUSE: Final = "cause"
"""Category of the flows from work to the wait for it."""

NOTE, DEATH = "headline", "death"
"""Categories of the notes on the lane that the headline points at, and on that of a process that died."""


@dataclass(frozen=True, kw_only=True)
class Things:
    """Things of one kind, each with a name, a place and a time.

    columns: arguments that differ, by name (None = it has none); same: those that all share. own: the arguments of
    each, in place of these. event: the row of the event table that they are of, if they are of one.
    """

    category: str = ""
    names: Sequence[str]
    pids: Ints
    tids: Ints
    begin: Ints
    columns: Mapping[str, Sequence[Hashable]] = field(default_factory=dict)
    same: Mapping[str, object] = field(default_factory=dict)
    own: Sequence[Mapping[str, object]] = ()
    event: Event | None = None

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, kw_only=True)
class Instants(Things):
    """Things without a length."""


@dataclass(frozen=True, kw_only=True)
class DrawnSlices(Things):
    """Things with a length. Those of one place nest. end: NEVER = it has none."""

    end: Ints

    @property
    def lasts(self) -> Ints:
        return np.where(self.end == NEVER, NEVER, self.end - self.begin)


@dataclass(frozen=True, kw_only=True)
class Overlapping(DrawnSlices):
    """Slices that overlap, on tracks of their own. kind: "epoch" or "batch"; tracks: the title of each one's track."""

    kind: str
    tracks: Sequence[str]


@dataclass(frozen=True)
class Flows:
    """Points of flows, by flow and time: the slices around them are joined. numbers: of the flow of each."""

    category: str
    name: str
    numbers: Ints
    pids: Ints
    tids: Ints
    times: Ints


@dataclass(frozen=True)
class Counts:
    """A counter of a process, which viewers show as "name unit": values[i] from times[i] on."""

    name: str
    unit: str
    pid: int
    times: Ints
    values: Ints


def encoded(values: Iterable[T], encode: Callable[[T], U]) -> list[U]:
    """Return each value as `encode` does, which is called once for each different value."""
    values = list(values)
    known = {value: encode(value) for value in dict.fromkeys(values)}
    return [known[value] for value in values]
