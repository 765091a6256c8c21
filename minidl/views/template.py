"""Events that differ only in some values: a `Sheet` is one event with holes, and columns that fill them row by row.

`INT`, `US` and `ANY` mark the holes. `Sheet.lines` writes the rows as JSON: formatting with "%" is several times faster
than `json.dumps` of an object for each event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from minidl.tracefile.arrays import Ints

INT: Final = "%d"
US: Final = "%d.%03d"
ANY: Final = "%s"
"""Holes: an integer; microseconds, from the two columns that `us` returns; JSON that is already written."""

AT: Final = {"pid": INT, "tid": INT, "ts": US}
"""Where and when an event is drawn."""


def compact(value: object) -> str:
    """Return short JSON. It is not restricted to ASCII, since the Perfetto UI shows \\u escapes as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def template(event: Mapping[str, object]) -> str:
    """Return the event's JSON as a "%" format. Each value that is a hole stays one; every other "%" is literal."""
    text = compact(event).replace("%", "%%")
    for hole in (INT, US, ANY):
        text = text.replace(compact(hole).replace("%", "%%"), hole)
    return text


class Sheet(NamedTuple):
    """Rows of one event. columns: fill its holes in order, two for US; without any, the event is one row."""

    event: Mapping[str, object]
    columns: list[list[Any]]

    def lines(self) -> Iterable[str]:
        """Return the rows as JSON."""
        if not self.columns:
            return [compact(self.event)]
        return map(template(self.event).__mod__, zip(*self.columns, strict=True))


def us(ns: Ints) -> list[list[int]]:
    """Return the two columns for US: whole microseconds, and the nanoseconds after the point."""
    return [(ns // 1000).tolist(), (ns % 1000).tolist()]
