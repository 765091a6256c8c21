"""`num_workers="auto"`: a loader that measures its batches and chooses its number of workers; see `auto.loading`."""

from __future__ import annotations

from typing import Any


class ChosenWorkers(int):
    """A number of workers that was chosen: a DataLoader that is made with it chooses again, as with "auto".

    A framework that makes a loader anew gives it the old one's num_workers.
    """


def is_auto(num_workers: Any) -> bool:
    """Whether the loader is to choose."""
    return isinstance(num_workers, ChosenWorkers) or num_workers == "auto"
