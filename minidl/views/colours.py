"""Labels, colours and patterns of all views.

Interface: `paint(code)` -> `Paint`, of a kind of step; `legend` lists what is drawn; `BATCHES` are colours for the ways
of batches, `ACTORS` for ranks and workers; `RED` means that something went wrong, and nothing else is red; `THEMES` are
the colours of paper and ink. `rgb`, `mixed`, `on_paper`, `is_light`, `nearest_256` and `perfettos_name` adapt a colour
"#rrggbb" to what it is drawn on.

Work is filled, a wait is hatched, a step around others is pale, what is simulated is dotted: they differ without
colour. Two kinds of work that share a lane differ by a CIEDE2000 of at least 20; as seen without one kind of cones, of
at least 15; in grey, of at least 9. The way of a first batch differs by at least 15 from every step, also without one
kind of cones. `tests/views/test_colours.py` measures this and names how it simulates sight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS

WAITING: Final = tuple(dict.fromkeys(event.label for event in EVENTS.values() if event.waits))
FRAMES: Final = tuple(dict.fromkeys(event.label for event in EVENTS.values() if event.frames))
"""Labels of spans around other steps: their own time is not work."""

BATCHES: Final = ("#4c01ba", "#1f1f1f", "#8a5a00", "#00707d")
"""Of the ways of batches, in the order in which these are asked for. Drawn with a white edge, also on black."""

ACTORS: Final = ("#439bef", "#da9c27", "#579564", "#6d3f9c", "#7d7a1b", "#586a87", "#4189a4", "#c07fae")
"""Of ranks (and of iterators that run at the same time), or of the workers of one iterator, by number."""

STATES: Final = {code: event.marker for code, event in EVENTS.items() if event.marker}
"""Markers of a loader's state in a figure (sent by a worker, counted, resumed from, taken), of chosen workers."""

RED: Final = EVENTS[ev.FOUND_DEAD].colour

THEMES: Final = {
    "light": {
        "paper": "#ffffff", "panel": "#f6f7f9", "line": "#d9dee4", "ink": "#1c2733", "faint": "#5f6c79",
        "accent": "#1459c7", "alarm": RED,
    },
    "dark": {
        "paper": "#11161c", "panel": "#1a2129", "line": "#313c47", "ink": "#e4e9ef", "faint": "#98a4b1",
        "accent": "#7fb0ff", "alarm": "#ff8a80",
    },
}  # fmt: skip

SOFT, HATCHED = 0.3, 0.12
"""Opacity of a pale colour, and of that behind a hatch."""


@dataclass(frozen=True, slots=True)
class Paint:
    """Style of one kind of span. soft: no work is done in it (a wait, or a frame around steps): pale; waits: hatch."""

    label: str
    colour: str
    soft: bool
    waits: bool


@dataclass(frozen=True, slots=True)
class Sign:
    """An entry of a legend. pattern: "work", "around", "wait", "simulated", "open", "cause", "failed", "state", or ""
    for words alone. marker: of a state, matplotlib's name of it."""

    label: str
    colour: str = ""
    pattern: str = "work"
    marker: str = ""


@cache
def paint(code: int) -> Paint:
    """Return the style of the spans that begin with `code`. Raises KeyError for a code that is not in the table."""
    event = EVENTS[code]
    soft, waits = event.label in (*WAITING, *FRAMES), event.label in WAITING
    return Paint(event.label, event.colour, soft, waits)


def legend(
    codes: Iterable[int], *, simulated: bool = False, unended: bool = False, letters: str = "", cause: bool = False,
    failed: bool = False, states: Iterable[int] = (),
) -> list[Sign]:  # fmt: skip
    """Return the signs of the spans with these codes: work by its label, what is around it, waits, the patterns, marks.

    simulated, unended, cause, failed: whether there is something simulated or without an end, an arrow to what is
    waited for, a failure; states: codes of the marks of a loader's state. letters: "t task, s sample".
    """
    looks = [paint(code) for code in sorted(codes)]
    signs = [Sign(label, colour) for label, colour in dict.fromkeys((a.label, a.colour) for a in looks if not a.soft)]
    if around := [look for look in looks if look.label in FRAMES]:
        signs.append(Sign(", ".join(dict.fromkeys(look.label for look in around)), around[0].colour, "around"))
    if waits := [look.colour for look in looks if look.waits]:
        signs.append(Sign("waiting", waits[0], "wait"))
    signs += [Sign("simulated", "", "simulated")] * simulated
    signs += [Sign("no end recorded", "", "open")] * unended
    signs += [Sign("cause of the wait", "", "cause")] * cause
    signs += [Sign("failure", RED, "failed")] * failed
    signs += [Sign(paint(code).label, paint(code).colour, "state", STATES[code]) for code in states]
    return signs + [Sign(f"numbers: {letters}", "", "")] * bool(letters)


def rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def mixed(colour: str, share: float) -> str:
    """Return the colour that a share of `colour`, 0 to 1, has on white."""
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in rgb(colour))


def on_paper(look: Paint) -> str:
    """Return the opaque colour that the style's filling has on white."""
    return mixed(look.colour, HATCHED if look.waits else SOFT if look.soft else 1)


def is_light(colour: tuple[int, int, int]) -> bool:
    """Tell whether black text contrasts more with the colour (red, green, blue) than white text, as WCAG 2 counts."""
    return hue_and_lightness(colour)[1] > 49.4  # a luminance of 0.179; the better one of the two has at least 4.5 to 1


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


# --- In the Perfetto UI -----------------------------------------------------------------------------------------------
DARKEST, LIGHTEST = 40, 79
"""Lightness, in percent, of what the UI draws; its saturation is always 80 %."""

NEAR: Final = 6
"""Degrees of hue and percent of lightness, together, that a reader does not see."""


@cache
def perfettos_name(colour: str, lightest: bool = False) -> str:
    """Return a word that the Perfetto UI draws in nearly the colour, if it is an event's correlation id.

    The UI takes hue and lightness (HSLuv) from two hashes of the word. lightest: of the hue alone, as light as can be.
    """
    hue, lightness = hue_and_lightness(rgb(colour))
    lightness = LIGHTEST if lightest else min(LIGHTEST, max(DARKEST, lightness))
    nearest = math.inf
    for number in range(8000):
        turn = abs(_perfettos_hash(word := f"{number} {colour}", 360) - hue)
        apart = min(turn, 360 - turn) + abs(_perfettos_hash(word + "x", 40) + DARKEST - lightness)
        if apart < nearest:
            best, nearest = word, apart
        if nearest <= NEAR:
            break
    return best


def _perfettos_hash(text: str, below: int) -> int:
    """Return the UI's hash: FNV-1a in 32 bits, whose products are rounded to doubles."""
    number = 18652613
    for unit in text:
        number = int(16777619.0 * (number ^ ord(unit))) & 0xFFFFFFFF
        number -= (number >> 31) << 32
    return abs(number) % below


def hue_and_lightness(colour: tuple[int, int, int]) -> tuple[float, float]:
    """Return hue, degrees, and lightness, percent, of red, green and blue, as in HSLuv: those of CIELUV under D65."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (c / 255 for c in colour)
    ]
    x, y, z = (sum(a * b for a, b in zip(row, linear, strict=True)) for row in _XYZ)
    lightness = 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y
    whole = x + 15 * y + 3 * z
    if not whole:
        return 0.0, lightness
    u, v = 4 * x / whole - 0.19783, 9 * y / whole - 0.46832
    return math.degrees(math.atan2(v, u)) % 360, lightness


_XYZ: Final = ((0.41239, 0.35758, 0.18048), (0.21264, 0.71517, 0.07219), (0.01933, 0.11919, 0.95053))
"""Red, green and blue to X, Y and Z, of sRGB."""
