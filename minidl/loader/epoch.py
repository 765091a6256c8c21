"""What an iterator asks about its epoch, and tells of it.

These two classes keep nothing: each epoch begins at the beginning, as upstream's. Those of `resume.stateful` keep what
is needed to save a loader, and to resume it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Fetching:
    """How a worker makes its fetchers, and what it sends along with its batches; it goes to the worker, so it pickles.

    where: the worker, as errors name it.
    """

    def open(self, dataset: Any, make: Callable[[], Any]) -> Any:
        """A fetcher for an epoch. make: creates one, which asks the dataset for its iterator."""
        return make()

    def after(self, data: Any, task: int, where: str) -> tuple[Any, Any]:
        """What is sent for a task, given what was fetched, and the state that goes along; None: no state."""
        return data, None

    def between(self, epoch: int, where: str) -> tuple[Any, Any]:
        """The state before an epoch, and the error of its first task if there should be one and it can't be taken."""
        return None, None


class EpochRecord:
    """Follows one epoch of an iterator. loader: the `DataLoader`; a task and its worker are a pair of numbers."""

    base_seed: int | None = None
    """The workers' seed, if it is known before it is drawn."""

    def __init__(self) -> None:
        self._counted = 0

    @property
    def batches(self) -> int:
        """How many of the epoch's batches were yielded before this iterator."""
        return 0

    @property
    def turn(self) -> int:
        """The worker whose turn it is first."""
        return 0

    @property
    def counted(self) -> int:
        """How many batches and errors the iterator has handed out."""
        return self._counted

    # --- Its begin, in this order
    def before_seed(self, loader: Any) -> None:
        """The base seed is drawn next."""

    def before_draws(self, loader: Any) -> None:
        """The index sampler is asked for its iterator next."""

    def draws(self, index_sampler: Any) -> Iterator[Any]:
        """The index sampler's iterator."""
        return iter(index_sampler)

    def skip(self) -> None:
        """Draw what this epoch leaves out."""

    def seeded(self, base_seed: int) -> None:
        """The workers get this seed."""

    def fetching(self, worker: int, loader: Any) -> Fetching:
        """What a worker makes its fetchers with."""
        return Fetching()

    def opened(self, loader: Any, make: Callable[[], Any]) -> Any:
        """The fetcher of an epoch in this process."""
        return make()

    def begun(self, loader: Any) -> None:
        """`iter()` has all that it needs."""

    # --- Its course
    def first_draw(self, base_seed: int) -> None:
        """The sampler draws for the first time, without workers."""

    def asks_for(self, task: int) -> None:
        """This process's dataset is asked for a task's samples."""

    def fetched(self, task: int) -> None:
        """They are here."""

    def state_came(self, message: Any, *, stale: bool) -> None:
        """A worker has sent a state along. stale: with a result of the last epoch."""

    def hand_out(self, task_and_worker: tuple[int, int]) -> None:
        """The consumer gets a task's batch."""
        self._counted += 1

    def fail(self, task_and_worker: tuple[int, int]) -> None:
        """The consumer gets a task's error."""
        self._counted += 1

    def end(self) -> None:
        """The consumer gets the end of the epoch."""
