"""What an imagined loop waited for, as `waiting` finds it in a trace."""

from __future__ import annotations

from typing import Any

from minidl.speed.wall_clock import Cause, Waiting


def waited(consumer: int = 0, batches: int = 100, workers: int = 2, alike: int = 1, **given: Any) -> Waiting:
    """given: ns by the name of a cause, as `samples=50`, and other fields of Waiting."""
    causes = {cause: given.pop(cause.name.lower(), 0) for cause in Cause}
    return Waiting(causes, consumer, batches, workers, alike, **given)
