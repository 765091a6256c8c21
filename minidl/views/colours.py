"""Label and colours of each kind of step, as the event table declares them.

Interface: `paint(code)` -> `Paint`; `WAITING`, the labels of time in which a thread has nothing to do; `rgb`,
`on_paper`, `is_light` and `nearest_256` adapt a colour "#rrggbb" to what it is drawn on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

from minidl.tracefile.events import EVENTS

WAITING: Final = ("idle", "wait", "host wait", "device wait", "join")
FRAMES: Final = ("epoch", "next")
"""Labels of spans around other steps: their own time is not work."""

SLOTS: Final = ("#3f5f8f", "#e07b00", "#00897b", "#8e3fc0", "#8d6e63", "#4f7f4f")
"""Of the counters and titles of iterators that run at the same time, in order: of the ranks. None is red."""

BATCHES: Final = ("#1459c7", "#e07b00", "#7a1fa2", "#00796b", "#5d4037", "#3949ab")
"""Of the ways of batches, in the order in which these are asked for. None is red, which means a failure."""

SOFT: Final = 0.3
"""Opacity of a pale colour."""


@dataclass(frozen=True, slots=True)
class Paint:
    """Style of one kind of span. soft: no work is done (a wait, or a frame around steps): draw it pale."""

    label: str
    colour: str
    soft: bool


@cache
def paint(code: int) -> Paint:
    """Return the style of the spans that begin with `code`. Raises KeyError for a code that is not in the table."""
    event = EVENTS[code]
    label = event.stage or event.name
    return Paint(label, event.colour, label in (*WAITING, *FRAMES))


def rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def on_paper(look: Paint) -> str:
    """Return the opaque colour that the style has on white."""
    return "#" + "".join(f"{round(255 - (255 - part) * (SOFT if look.soft else 1)):02x}" for part in rgb(look.colour))


def is_light(colour: Iterable[int]) -> bool:
    """Tell whether black text is easier to read on the colour (red, green, blue) than white text."""
    red, green, blue = colour
    return 0.3 * red + 0.59 * green + 0.11 * blue > 140


def nearest_256(colour: str) -> int:
    """Return the nearest terminal colour: in the cube of 6 x 6 x 6 colours or among the 24 greys."""
    return min(range(16, 256), key=lambda code: (_distance(rgb(colour), rgb_256(code)), code))


def rgb_256(code: int) -> tuple[int, int, int]:
    """Return red, green and blue of a terminal colour, 16 to 255."""
    if code >= 232:
        return (8 + 10 * (code - 232),) * 3
    steps = (0, 95, 135, 175, 215, 255)
    red, green, blue = (steps[(code - 16) // size % 6] for size in (36, 6, 1))
    return red, green, blue


def _distance(one: Iterable[int], other: Iterable[int]) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
