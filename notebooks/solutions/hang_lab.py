"""Solutions of 09_hang_lab."""

from __future__ import annotations


def stopped(before: str, now: str) -> bool:
    """Whether a process is stopped by a signal."""
    return before == now == "T"


def lost(loop: str, workers: list[str]) -> bool:
    """Whether the loop waits for a batch that nobody has."""
    return loop == "NEXT" and all(step == "IDLE" for step in workers)
