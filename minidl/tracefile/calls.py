"""The call of an iterator that a program is in, and since when: read from the events of its process.

Interface: `OpenCalls.take(rows)` the new events of one process, in its order; `open()` the calls that have begun and
not ended. Pure. `Event.call` says which event begins and ends one; `open_spans` reads the same from spans.

If a program is in no call, its own code runs until it returns to an iterator.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from minidl.tracefile.arrays import Rows
from minidl.tracefile.events import CALLS, NEXT, Call

_CODES: Final = np.array(sorted(CALLS), np.uint16)


class OpenCall(NamedTuple):
    """A call of an iterator, or the program's own code (`Call.OWN`). since: ns, CLOCK_MONOTONIC.

    first: it is the first `next` of an epoch, in which workers start.
    """

    loader: int
    call: Call
    since: int
    first: bool = False


class OpenCalls:
    """The calls that one process is in. longest: ns of the longest ended call of a kind; first: of an epoch's first
    `next`, which is no measure for the others.
    """

    def __init__(self) -> None:
        self.longest: dict[Call, int] = {Call.NEXT: 0, Call.OWN: 0}
        self.first = 0
        self._now: dict[int, OpenCall] = {}

    def take(self, rows: Rows, *, gap: bool = False) -> None:
        """Follow events. gap: earlier ones were not read, so an older call may have ended."""
        if gap:
            self._now.clear()
        for row in rows[np.isin(rows["code"], _CODES)]:
            first = bool(row["code"] == NEXT[0] and row["x"] == 0)
            self._after(OpenCall(int(row["loader"]), CALLS[int(row["code"])], int(row["time"]), first))

    def _after(self, now: OpenCall) -> None:
        before = self._now.pop(now.loader, None)
        if before is not None and before.call in self.longest and before.call is not now.call:
            took = now.since - before.since
            if before.first:
                self.first = max(self.first, took)
            else:
                self.longest[before.call] = max(self.longest[before.call], took)
        self._now[now.loader] = now

    def past(self, one: OpenCall) -> int:
        """The longest ended call that is like this one, ns."""
        like = self.longest.get(one.call)
        return max(self.first, self.longest[Call.NEXT]) if one.first or like is None else like

    def open(self) -> list[OpenCall]:
        """The open calls; one entry for the program's own code, from the last event on."""
        own = [one for one in self._now.values() if one.call is Call.OWN]
        calls = [one for one in self._now.values() if one.call is not Call.OWN]
        return calls or sorted(own, key=lambda one: one.since)[-1:]
