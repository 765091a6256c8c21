"""Solutions of 09_hang_lab.

The six runs are these programs of `minidl lab`: sample_stuck, worker_stopped, result_not_picklable, lock_order,
threads_lost_at_fork and barrier_of_workers.
"""

from __future__ import annotations


def stopped(before: str, now: str) -> bool:
    """Whether a process is stopped by a signal."""
    return before == now == "T"


def lost(loop: str, workers: list[str]) -> bool:
    """Whether the loop waits for a batch that nobody has."""
    return loop == "NEXT" and all(step == "IDLE" for step in workers)
