"""JSON lines written from columns of numbers: a template for each kind of line, filled row by row.

A template is built once with `template`; `INT`, `US` and `ANY` mark its holes. Formatting with "%" is several times
faster than `json.dumps` of an object for each event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

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


def filled(event: Mapping[str, object], *columns: Iterable[Any]) -> Iterable[str]:
    """Yield the event's JSON for each row of the columns, which fill its holes in order."""
    return map(template(event).__mod__, zip(*columns, strict=True))


def us(ns: Ints) -> list[list[int]]:
    """Return the two columns for US: whole microseconds, and the nanoseconds after the point."""
    return [(ns // 1000).tolist(), (ns % 1000).tolist()]
