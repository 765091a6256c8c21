"""From indices to a batch: ask the dataset for samples, then collate. The same fetchers serve workers and the loader.

A fetcher reports to its `Progress` before each step, so that an error or a timeout can name the sample. Article 1
§2.3.4; upstream: `torch.utils.data._utils.fetch`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any


class Progress:
    """The receiver of a fetcher's progress reports; this one ignores them."""

    def samples(self, count: int) -> None:
        """The dataset is called for `count` samples at once."""

    def sample(self, position: int, index: Any) -> None:
        """The sample at `position` of the batch is fetched next; `index` is None for an iterable dataset."""

    def collate(self, count: int) -> None:
        """`count` samples are fetched and go to collate_fn."""


_UNWATCHED = Progress()


def _length(samples: Any) -> int:
    """How many there are; -1 = they do not tell."""
    try:
        return operator.length_hint(samples, -1)
    except Exception:  # their class is the user's, and a batch needs no length
        return -1


class _BaseDatasetFetcher:
    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate_fn: Callable[[Any], Any],
        drop_last: bool,
        progress: Progress = _UNWATCHED,
    ) -> None:
        self.dataset = dataset
        self.auto_collation = auto_collation
        self.collate_fn = collate_fn
        self.drop_last = drop_last
        self.progress = progress

    def fetch(self, possibly_batched_index: Any) -> Any:
        """Return the batch of the indices, or one sample if the loader does not batch."""
        raise NotImplementedError


class _MapDatasetFetcher(_BaseDatasetFetcher):
    def fetch(self, possibly_batched_index: Any) -> Any:
        if self.auto_collation:
            data = self._samples(possibly_batched_index)
            self.progress.collate(_length(data))
        else:
            self.progress.sample(0, possibly_batched_index)
            data = self.dataset[possibly_batched_index]
            self.progress.collate(1)
        return self.collate_fn(data)

    def _samples(self, indices: Any) -> Any:
        if hasattr(self.dataset, "__getitems__") and self.dataset.__getitems__:
            self.progress.samples(_length(indices))
            return self.dataset.__getitems__(indices)
        data = []
        for position, index in enumerate(indices):
            self.progress.sample(position, index)
            data.append(self.dataset[index])
        return data


class _IterableDatasetFetcher(_BaseDatasetFetcher):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dataset_iter: Iterator[Any] = iter(self.dataset)
        self.ended = False

    def fetch(self, possibly_batched_index: Any) -> Any:
        """As above. StopIteration if the dataset has ended, or if drop_last drops the remaining samples."""
        if self.ended:
            raise StopIteration
        if self.auto_collation:
            data = self._samples(possibly_batched_index)
            if not data or (self.drop_last and len(data) < len(possibly_batched_index)):
                raise StopIteration
            self.progress.collate(len(data))
        else:
            self.progress.sample(0, None)
            data = next(self.dataset_iter)
            self.progress.collate(1)
        return self.collate_fn(data)

    def _samples(self, places: Any) -> list[Any]:
        data: list[Any] = []
        for position, _ in enumerate(places):
            self.progress.sample(position, None)
            try:
                data.append(next(self.dataset_iter))
            except StopIteration:
                self.ended = True
                break
        return data


class _DatasetKind:
    """The kind of a dataset: map-style or iterable."""

    Map = 0
    Iterable = 1

    @staticmethod
    def create_fetcher(kind: int, *options: Any) -> _BaseDatasetFetcher:
        """Return a fetcher for a dataset of this kind. options: a `_BaseDatasetFetcher`'s."""
        return (_MapDatasetFetcher if kind == _DatasetKind.Map else _IterableDatasetFetcher)(*options)
