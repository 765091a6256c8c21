"""Which iterators of a process wait for a batch, start or shut down, and since when: read from the events it emits.

Interface: `OpenCalls.take(rows)` the new events of one process, in its order; `open()` what waits now. Pure.

If no iterator waits, the program's own code runs until it returns to one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.watched import NEXT, OWN, SHUTDOWN, START

_AFTER: Final[dict[int, str]] = {
    ev.WORKER_START[0]: START,
    ev.WORKER_START[1]: START,
    ev.RESUME_PUT: START,
    ev.EPOCH[0]: START,
    ev.EPOCH[1]: OWN,
    ev.NEXT[0]: NEXT,
    ev.NEXT[1]: OWN,
    ev.YIELD: OWN,
    ev.CONSUMER[0]: OWN,
    ev.SHUTDOWN[0]: SHUTDOWN,
    ev.SHUTDOWN[1]: OWN,
}
"""The state of an iterator after an event: it waits for one of these, or the program's own code runs."""

_CODES: Final = np.array(sorted(_AFTER), np.uint16)


class OpenCall(NamedTuple):
    """An iterator that waits. what: NEXT, START, SHUTDOWN, or OWN: it is waited for; since: ns, CLOCK_MONOTONIC."""

    loader: int
    what: str
    since: int


class OpenCalls:
    """The waits of one process's iterators. longest: ns of the longest ended wait of each kind."""

    def __init__(self) -> None:
        self.longest: dict[str, int] = {NEXT: 0, OWN: 0}
        self._now: dict[int, OpenCall] = {}

    def take(self, rows: Rows, *, gap: bool = False) -> None:
        """Follow events. gap: earlier ones were not read, so an older wait may have ended."""
        if gap:
            self._now.clear()
        for row in rows[np.isin(rows["code"], _CODES)]:
            self._after(int(row["loader"]), _AFTER[int(row["code"])], int(row["time"]))

    def _after(self, loader: int, what: str, time: int) -> None:
        before = self._now.pop(loader, None)
        if before is not None and before.what in self.longest and before.what != what:
            self.longest[before.what] = max(self.longest[before.what], time - before.since)
        self._now[loader] = OpenCall(loader, what, time)

    def open(self) -> list[OpenCall]:
        """The open waits; one entry for the program's own code, from the last event on."""
        own = [wait for wait in self._now.values() if wait.what == OWN]
        waits = [wait for wait in self._now.values() if wait.what != OWN]
        return waits or sorted(own, key=lambda wait: wait.since)[-1:]
