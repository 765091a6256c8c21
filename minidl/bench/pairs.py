"""Measurements in turns, and what is made of them.

Interface: `take_turns` measures several things round after round; a `Row` holds one thing's values and those of the
thing it is compared with, round for round; `table` prints rows.
Rule of use: a ratio is formed within a round, between neighbours in time, and the median is taken of the ratios:
what disturbs the machine for longer than a round then disturbs both sides, and falls out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from minidl.demo import progress

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """The median of some values, and the range in which the middle four fifths of them lie."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """That of `values`, which are not empty."""
        p10, p90 = np.percentile(values, (10, 90))
        return cls(statistics.median(values), float(p10), float(p90))

    def __str__(self) -> str:
        return f"{number(self.median)} [{number(self.p10)}..{number(self.p90)}]"


@dataclass(frozen=True)
class Row:
    """What was measured of one thing.

    group: what all rows that are comparable have in common. values: in `unit`, one for each round. against: the name
    of what it is compared with, "" where it is what others are compared with; base: that one's values, round for round.
    extra: further figures, each under its name with its unit.
    """

    group: str
    name: str
    unit: str
    values: tuple[float, ...]
    against: str = ""
    base: tuple[float, ...] = ()
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def value(self) -> Spread:
        """The values' spread."""
        return Spread.of(self.values)

    @property
    def ratios(self) -> tuple[float, ...]:
        """value / base of each round; empty where nothing is compared."""
        return tuple(value / base for value, base in zip(self.values, self.base, strict=True)) if self.against else ()

    @property
    def ratio(self) -> Spread | None:
        """The ratios' spread."""
        return Spread.of(self.ratios) if self.against else None

    def facts(self) -> dict[str, Any]:
        """All of it, for JSON."""
        ratio = None if self.ratio is None else asdict(self.ratio)
        return {**asdict(self), "value": asdict(self.value), "ratios": self.ratios, "ratio": ratio}


def take_turns(
    turns: Mapping[str, Callable[[], T]], rounds: int, what: str, *, warm: bool = True
) -> dict[str, list[T]]:
    """What each of `turns` returned in each round. warm: begin with a round that does not count.

    Every other round goes backwards, so that nobody always comes first. `what` is shown as progress.
    """
    found: dict[str, list[T]] = {name: [] for name in turns}
    for count in range(-1 if warm else 0, rounds):
        progress(f"{what}: round {count + 1} of {rounds}")
        for name in list(turns)[:: 1 if count % 2 == 0 else -1]:
            result = turns[name]()
            if count >= 0:
                found[name].append(result)
    progress("")
    return found


# --- For people -------------------------------------------------------------------------------------------------------
def number(value: float) -> str:
    """About three significant digits, never an exponent: "12,345", "12.3", "0.0123"; whole numbers as such."""
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3 if abs(value) >= 0.1 else 4
    return f"{value:.{digits}f}"


def table(rows: Sequence[Row]) -> str:
    """The rows as text, a block for each group."""
    return "\n".join(_block(list(group)) for _, group in groupby(rows, key=lambda row: (row.group, row.unit)))


def _block(rows: list[Row]) -> str:
    extras = list(dict.fromkeys(name for row in rows for name in row.extra))
    compared = any(row.against for row in rows)
    lines = [[rows[0].group, rows[0].unit, *(("ratio", "to") if compared else ()), *extras]]
    for row in rows:
        ratio = (str(row.ratio or ""), row.against) if compared else ()
        others = [number(row.extra[name]) if name in row.extra else "" for name in extras]
        lines.append([f"  {row.name}", str(row.value), *ratio, *others])
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
