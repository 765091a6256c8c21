"""The call of an iterator that a program is in, and since when: read from the events of its process.

Interface: `OpenCalls.take(rows)` the new events of one process, in its order; `open()` the calls that have begun and
not ended. Pure. `Event.call` says which event begins and ends one; `open_spans` reads the same from spans.

If a program is in no call, its own code runs until it returns to an iterator.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from minidl.tracefile.arrays import Rows
from minidl.tracefile.events import CALLS, Call

_CODES: Final = np.array(sorted(CALLS), np.uint16)


class OpenCall(NamedTuple):
    """A call of an iterator, or the program's own code (`Call.OWN`). since: ns, CLOCK_MONOTONIC."""

    loader: int
    call: Call
    since: int


class OpenCalls:
    """The calls that one process is in. longest: ns of the longest ended call of a kind."""

    def __init__(self) -> None:
        self.longest: dict[Call, int] = {Call.NEXT: 0, Call.OWN: 0}
        self._now: dict[int, OpenCall] = {}

    def take(self, rows: Rows, *, gap: bool = False) -> None:
        """Follow events. gap: earlier ones were not read, so an older call may have ended."""
        if gap:
            self._now.clear()
        for row in rows[np.isin(rows["code"], _CODES)]:
            self._after(int(row["loader"]), CALLS[int(row["code"])], int(row["time"]))

    def _after(self, loader: int, call: Call, time: int) -> None:
        before = self._now.pop(loader, None)
        if before is not None and before.call in self.longest and before.call is not call:
            self.longest[before.call] = max(self.longest[before.call], time - before.since)
        self._now[loader] = OpenCall(loader, call, time)

    def open(self) -> list[OpenCall]:
        """The open calls; one entry for the program's own code, from the last event on."""
        own = [one for one in self._now.values() if one.call is Call.OWN]
        calls = [one for one in self._now.values() if one.call is not Call.OWN]
        return calls or sorted(own, key=lambda one: one.since)[-1:]
