"""Measurements in turns, and their table.

Interface: `compare` measures several alternatives round after round, and makes a `Row` of each, which holds its values
and those of the alternative that it is compared with, round for round; `table` prints rows. `take_turns` and `rows_of`
are its two halves.
Rule of use: a ratio is formed within a round, between neighbours in time, and the result is the median of the ratios:
what disturbs the machine for longer than a round disturbs both sides, and cancels out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np

from minidl.terminal import progress
from minidl.tracefile import words

T = TypeVar("T")


class Measured(NamedTuple):
    """What one turn has measured: the value, and further figures by their names with units.

    cpu: the CPU time of all processes, which the ratio of CPU times is formed of; 0 = not measured.
    """

    value: float
    extra: Mapping[str, float] = {}
    cpu: float = 0.0


@dataclass(frozen=True)
class Spread:
    """Median of some values, and the range of the middle four fifths."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        p10, p90 = np.percentile(values, (10, 90))
        return cls(statistics.median(values), float(p10), float(p90))

    def __str__(self) -> str:
        return f"{number(self.median)} [{number(self.p10)}..{number(self.p90)}]"


@dataclass(frozen=True)
class Row:
    """The measurements of one alternative.

    group: common to all rows that are comparable. values: in `unit`, one for each round. against: the name of the row
    that it is compared with, "" = none; base: that row's values, round for round. extra: further figures by their names
    with units.
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
        return Spread.of(self.values)

    @property
    def ratios(self) -> tuple[float, ...]:
        """value / base of each round; empty without a comparison."""
        return tuple(value / base for value, base in zip(self.values, self.base, strict=True)) if self.against else ()

    @property
    def ratio(self) -> Spread | None:
        return Spread.of(self.ratios) if self.against else None

    def facts(self) -> dict[str, Any]:
        """Return the row for JSON."""
        ratio = None if self.ratio is None else asdict(self.ratio)
        return {**asdict(self), "value": asdict(self.value), "ratios": self.ratios, "ratio": ratio}


def take_turns(
    turns: Mapping[str, Callable[[], T]], rounds: int, what: str, *, warm: bool = True
) -> dict[str, list[T]]:
    """Return what each of `turns` returned in each round. warm: begin with a round that does not count.

    Every other round goes backwards, so that none always comes first. `what` is shown as progress.
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


def rows_of(
    group: str,
    unit: str,
    found: Mapping[str, Sequence[Measured]],
    against: Mapping[str, str],
    extra: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Row]:
    """Return a Row for each name in `found`, compared with the one that `against` names, if any.

    Its further figures are the medians of those of its readings, the median ratio of CPU times, and those in `extra`.
    """
    rows = []
    for name, readings in found.items():
        base = found.get(against.get(name, ""), ())
        figures = {each: statistics.median(one.extra[each] for one in readings) for each in readings[0].extra}
        if base and readings[0].cpu:
            figures["CPU ratio"] = statistics.median(a.cpu / b.cpu for a, b in zip(readings, base, strict=True))
        values, others = (tuple(reading.value for reading in some) for some in (readings, base))
        figures |= (extra or {}).get(name, {})
        rows.append(Row(group, name, unit, values, against.get(name, ""), others, figures))
    return rows


def compare(
    topic: str,
    group: str,
    unit: str,
    turns: Mapping[str, Callable[[], Measured]],
    rounds: int,
    against: Mapping[str, str],
    *,
    warm: bool = True,
) -> list[Row]:
    """Measure the alternatives in turns; return a Row for each. topic: for the line that shows the progress."""
    return rows_of(group, unit, take_turns(turns, rounds, f"{topic}: {group}", warm=warm), against)


# --- For people -------------------------------------------------------------------------------------------------------
def number(value: float) -> str:
    """Format with about three significant digits and no exponent: "12,345", "12.3", "0.0123"; whole numbers as such."""
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3 if abs(value) >= 0.1 else 4
    return f"{value:.{digits}f}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, a block for each group."""
    return "\n".join(_block(list(group)) for _, group in groupby(rows, key=lambda row: (row.group, row.unit)))


def _block(rows: list[Row]) -> str:
    extras = list(dict.fromkeys(name for row in rows for name in row.extra))
    compared = any(row.against for row in rows)
    lines = [[rows[0].group, rows[0].unit, *(("ratio", "to") if compared else ()), *extras]]
    for row in rows:
        ratio = (str(row.ratio or ""), row.against) if compared else ()
        others = [number(row.extra[name]) if name in row.extra else "" for name in extras]
        lines.append([f"  {row.name}", str(row.value), *ratio, *others])
    return "\n".join(words.table(lines))
