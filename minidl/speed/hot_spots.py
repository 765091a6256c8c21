"""The line of the program that slow steps were mostly in, by stack samples.

Interface: `hot_spot(samples, rows)` -> `HotSpot` of these spans, None = too few looks fell into them; `spot_of(samples,
looks)`, of these looks.

Rules of use: the place is the innermost line of the user's code that at least MOST of the looks were in, or in what it
called; if no line has so many, the innermost function. A look that found the interpreter between two lines of a library
alone counts, and names none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar

import numpy as np

from minidl.tracefile.arrays import Bools, Ints, Rows
from minidl.tracefile.stack_samples import CodeLine, StackSamples, library
from minidl.tracefile.words import counted, percent

FEWEST: Final = 8
"""Looks into the steps from which they tell something."""

MOST: Final = 0.5
"""The part of the looks that a place has to have."""

T = TypeVar("T")


class HotSpot(NamedTuple):
    """A place. at: its frame; line: whether the share is that line's, and not all its function's; calls: the function
    of a library that it is mostly in, "" = none; share: its part of `looks`; on_cpu: the part of that time that the
    thread had a CPU, -1 = unknown.
    """

    at: CodeLine
    line: bool
    calls: str
    share: float
    looks: int
    on_cpu: float

    @property
    def where(self) -> str:
        """The place: "tiles.py:31", or "load (tiles.py)"."""
        return self.at.base if self.line else f"{self.at.function} ({self.at.base.partition(':')[0]})"

    def place(self, most: int = 60) -> str:
        """The place and its text: "tiles.py:31 `file.seek(at)`". most: characters of the text, 0 = none."""
        source = self.at.source.partition("  #")[0] if self.line and most else ""
        source = source if len(source) <= most else f"{source[: most - 3].rstrip()}..."
        return self.where + f" `{source}`" * bool(source)

    def brief(self, most: int) -> str:
        """For a sentence: "83% at tiles.py:31 `file.seek(at)`". most: as in `place`."""
        return f"{percent(self.share)} at {self.place(most)}"

    def words(self) -> str:
        """For evidence: what was seen, how often, and whether it computes."""
        inside = f", in {self.calls}" * bool(self.calls)
        source = f": `{self.at.source}`" if self.line and self.at.source else ""
        cpu = f"; there it had a CPU for {percent(self.on_cpu)} of the time" * (self.on_cpu >= 0)
        place = f"{self.at.function} ({self.at.base})" if self.line else self.where
        looks = counted(self.looks, "look")
        return f"stack samples: {percent(self.share)} of {looks} at {place}{source}{inside}{cpu}"


def hot_spot(samples: StackSamples, rows: Rows) -> HotSpot | None:
    """The place that these spans were mostly in."""
    return spot_of(samples, samples.inside(rows)) if len(samples) else None


def spot_of(samples: StackSamples, looks: Bools) -> HotSpot | None:
    """The place that these looks mostly found."""
    inside = np.flatnonzero(looks)
    stacks = [samples.stacks[number] for number in samples.stack[inside].tolist()]
    own = [tuple(frame for frame in stack if not library(frame.file)) or stack for stack in stacks]
    if len(stacks) < FEWEST:
        return None
    by_line, by_function = _deepest(own, lambda frame: frame[:3]), _deepest(own, lambda frame: frame[::2])
    line = by_line is not None
    key = by_line if line else by_function
    if key is None:
        return None
    part = slice(None, 3) if line else slice(None, None, 2)
    mine = [at for at, stack in enumerate(own) if any(frame[part] == key for frame in stack)]
    at = next(frame for frame in reversed(own[mine[0]]) if frame[part] == key)
    calls, on_cpu = _calls([stacks[one] for one in mine], at), _cpu(samples, inside[mine])
    return HotSpot(at, line, calls, len(mine) / len(own), len(own), on_cpu)


def _deepest(stacks: Iterable[tuple[CodeLine, ...]], key: Callable[[CodeLine], T]) -> T | None:
    """The place that lies innermost of those that enough stacks have; None = no place has."""
    every = list(stacks)
    depths: dict[T, int] = {}
    times: Counter[T] = Counter()
    for stack in every:
        places = {key(frame): depth for depth, frame in enumerate(stack)}
        times.update(places.keys())
        for place, depth in places.items():
            depths[place] = max(depth, depths.get(place, 0))
    often = [place for place, number in times.items() if number >= MOST * len(every)]
    return max(often, key=lambda place: (depths[place], times[place]), default=None)


def _calls(stacks: list[tuple[CodeLine, ...]], at: CodeLine) -> str:
    """The library's function that the place calls in most of its stacks."""
    called = Counter(
        next((frame.function for frame in stack[stack.index(at) + 1 :] if library(frame.file)), "")
        for stack in stacks
        if at in stack
    )
    name, number = called.most_common(1)[0] if called else ("", 0)
    return name if number >= MOST * len(stacks) else ""


def _cpu(samples: StackSamples, looks: Ints) -> float:
    """The part of the time before these looks that their thread had a CPU; -1 = unknown."""
    known = looks[samples.since[looks] > 0]
    return float(min(1.0, samples.cpu[known].sum() / samples.since[known].sum())) if len(known) else -1.0
