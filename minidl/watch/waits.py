"""Which iterators of a process wait for a batch, start or shut down, and since when: read from the events it emits.

Interface: `Waits.take(rows)` the new events of one process, in its order; `open()` what waits now. Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.watched import NEXT, SHUTDOWN, START

_NOTHING = ""

_AFTER: Final[dict[int, str]] = {
    ev.WORKER_START[0]: START,
    ev.WORKER_START[1]: START,
    ev.RESUME_PUT: START,
    ev.EPOCH[0]: START,
    ev.EPOCH[1]: _NOTHING,
    ev.NEXT[0]: NEXT,
    ev.NEXT[1]: _NOTHING,
    ev.YIELD: _NOTHING,
    ev.CONSUMER[0]: _NOTHING,
    ev.SHUTDOWN[0]: SHUTDOWN,
    ev.SHUTDOWN[1]: _NOTHING,
}
"""What an iterator does after an event: it waits for one of these, or for nothing."""

_CODES: Final = np.array(sorted(_AFTER), np.uint16)


class OpenWait(NamedTuple):
    """An iterator that waits. what: NEXT, START or SHUTDOWN; since: ns, CLOCK_MONOTONIC."""

    loader: int
    what: str
    since: int


class Waits:
    """The waits of one process's iterators. longest: ns of the longest wait in next() that has ended."""

    def __init__(self) -> None:
        self.longest = 0
        self._now: dict[int, OpenWait] = {}

    def take(self, rows: Rows, *, gap: bool = False) -> None:
        """Follow events. gap: some before these were not read, so that an older wait may have ended."""
        if gap:
            self._now.clear()
        for row in rows[np.isin(rows["code"], _CODES)]:
            self._after(int(row["loader"]), _AFTER[int(row["code"])], int(row["time"]))

    def _after(self, loader: int, what: str, time: int) -> None:
        before = self._now.pop(loader, None)
        if before is not None and before.what == NEXT and what != NEXT:
            self.longest = max(self.longest, time - before.since)
        if what:
            self._now[loader] = OpenWait(loader, what, time)

    def open(self) -> list[OpenWait]:
        return list(self._now.values())
