"""Figures of `minidl timeline -o`, read back from their shapes."""

from __future__ import annotations

from collections import Counter

Bars = Counter[tuple[int, int, int]]


def artists(figure: object, kind: str) -> list[tuple[list[int], object]]:
    """The artists whose gid begins with `kind`, with the numbers that follow it."""
    found = []
    for artist in figure.findobj():  # type: ignore[attr-defined]
        word, *rest = (artist.get_gid() or "unnamed").split()
        if word == kind:
            found.append(([int(n) for n in rest if n.isdigit()], artist))
    return found


def drawn_bars(figure: object) -> tuple[Bars, Bars]:
    """How many bars of each (lane, row, code) the figure holds: with an end, and fading."""
    ended, fading = Bars(), Bars()
    for key, shape in artists(figure, "bars"):
        ended[tuple(key)] += len(shape.get_paths())  # type: ignore[attr-defined, index]
    for key, _ in artists(figure, "open"):
        fading[tuple(key)] += 1  # type: ignore[index]
    return ended, fading
