"""The reading path of 45 minutes, and the note on the whole protocol that torch never wrote.

Interface: `stops()`, in their order; `note()` -> its parts by name, in the order of note.ini.

The path is in `path.ini`: a stop has `minutes`, `ours`, `upstream`, `moments`, and in "en", "ru", "zh" the question
that it answers as the heading, and how to read it as the text. The note is in `note.ini`: each part is about one way to
fail, with `guards` (see `explore.guards`), `diagrams` (files of `minidl/diagrams`) and `moments`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from minidl.companion.rows import Translated, listed, read
from minidl.references import places


@dataclass(frozen=True, slots=True)
class PathStop:
    """One stop of the reading path."""

    words: Translated
    minutes: int
    ours: tuple[str, ...]
    upstream: tuple[str, ...]
    moments: tuple[str, ...]

    @property
    def lines(self) -> int:
        """Lines to read here."""
        return sum(place.last - place.first + 1 for each in self.ours for place in places(each, "minidl"))


@dataclass(frozen=True, slots=True)
class NotePart:
    """One part of the note."""

    words: Translated
    guards: tuple[str, ...]
    diagrams: tuple[str, ...]
    moments: tuple[str, ...]


@functools.cache
def stops() -> tuple[PathStop, ...]:
    """Return the stops."""
    return tuple(
        PathStop(
            Translated.of(fields), int(fields["minutes"]), listed(fields, "ours"), listed(fields, "upstream"),
            listed(fields, "moments"),
        )
        for fields in read("path.ini").values()
    )  # fmt: skip


@functools.cache
def note() -> Mapping[str, NotePart]:
    """Return the parts of the note."""
    return {
        name: NotePart(Translated.of(fields), *(listed(fields, each) for each in ("guards", "diagrams", "moments")))
        for name, fields in read("note.ini").items()
    }
