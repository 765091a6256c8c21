"""How another clock lies beside this process's: it is read between two readings of ours.

The other reading happened somewhere between the two, so the middle is wrong by half of their distance at most. A
process may be stopped in between, so the shortest of several attempts counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")


class Bracketed(NamedTuple):
    """When our clock was read before and after the other one, ns."""

    before: int
    after: int

    @property
    def middle(self) -> int:
        return (self.before + self.after) // 2

    @property
    def error(self) -> int:
        """By how much the middle may be off, ns."""
        return (self.after - self.before + 1) // 2


def bracketed(
    read: Callable[[], _T], attempts: int = 1, clock: Callable[[], int] = time.monotonic_ns
) -> tuple[_T, Bracketed]:
    """Return what `read` gave in the shortest of some attempts, and when that was."""
    found: list[tuple[_T, Bracketed]] = []
    for _ in range(attempts):
        before = clock()
        value = read()
        found.append((value, Bracketed(before, clock())))
    return min(found, key=lambda each: each[1].after - each[1].before)
