"""Datasets: the samples that can be loaded, and ways to combine datasets.

Interface: `Dataset` (samples by key) and `IterableDataset` (a stream of samples) are the two kinds. `TensorDataset`,
`StackDataset`, `ConcatDataset`, `ChainDataset` and `Subset` build datasets from others; `random_split` divides one.
Rules of use: a map-style dataset defines `__getitem__`, usually `__len__`, and `__getitems__(indices)` if fetching a
whole batch at once is cheaper. There is no default `__len__`, because `list(dataset)` must see that it is missing.
Both kinds subclass torch's class of the same name, as a marker only, so each library's loader accepts the other's
datasets. Every check below is therefore made against torch's class.

Article 4 §dataset, article 2 §2.2. Upstream: torch/utils/data/dataset.py.
"""

from __future__ import annotations

import bisect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.utils.data
from torch import Generator, Tensor

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_T_stack = TypeVar("_T_stack", tuple[Any, ...], dict[str, Any])


class Dataset(torch.utils.data.Dataset[_T_co]):
    """A map from keys to samples: subclasses define `__getitem__`, and may define `__len__` and `__getitems__`.

    `__getitems__(indices: list) -> list` is not defined here: the fetcher calls it if it exists.
    """

    def __getitem__(self, index: Any) -> _T_co:
        raise NotImplementedError("Subclasses of Dataset should implement __getitem__.")

    def __add__(self, other: torch.utils.data.Dataset[_T_co]) -> ConcatDataset[_T_co]:
        return ConcatDataset([self, other])


class IterableDataset(Dataset[_T_co], torch.utils.data.IterableDataset[_T_co]):
    """A stream of samples: subclasses define `__iter__` (abstract: without it, TypeError on construction).

    Each worker iterates over its own copy. Unless the copies divide the work by `get_worker_info()`, every sample
    arrives `num_workers` times.
    """

    def __add__(self, other: torch.utils.data.Dataset[_T_co]) -> ChainDataset[_T_co]:  # type: ignore[override]
        return ChainDataset([self, other])


class TensorDataset(Dataset[tuple[Tensor, ...]], torch.utils.data.TensorDataset):
    """Tensors of equal length as a dataset: sample i is the tuple of their rows i.

    tensors: each of shape (n, ...), the same n. AssertionError if the first sizes differ.
    """

    tensors: tuple[Tensor, ...]

    def __init__(self, *tensors: Tensor) -> None:
        if any(tensor.size(0) != tensors[0].size(0) for tensor in tensors):
            raise AssertionError("Size mismatch between tensors")
        self.tensors = tensors

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __len__(self) -> int:
        return self.tensors[0].size(0)


class StackDataset(Dataset[_T_stack], torch.utils.data.StackDataset[_T_stack]):
    """Parallel datasets: sample i holds sample i of each, in a tuple (positional arguments) or a dict (keywords).

    ValueError if none is given, if both ways are mixed, or if the lengths differ.
    """

    datasets: tuple[Any, ...] | dict[str, Any]

    def __init__(self, *args: torch.utils.data.Dataset[Any], **kwargs: torch.utils.data.Dataset[Any]) -> None:
        if args and kwargs:
            raise ValueError(
                "Supported either ``tuple``- (via ``args``) or"
                "``dict``- (via ``kwargs``) like input/output, but both types are given."
            )
        if not args and not kwargs:
            raise ValueError("At least one dataset should be passed")
        self.datasets = args or kwargs
        sizes = [len(dataset) for dataset in self._members()]
        if any(size != sizes[0] for size in sizes):
            raise ValueError("Size mismatch between datasets")
        self._length = sizes[0]

    def _members(self) -> Sequence[Any]:
        return list(self.datasets.values()) if isinstance(self.datasets, dict) else self.datasets

    def _sample(self, parts: Iterable[Any]) -> Any:
        return dict(zip(self.datasets, parts, strict=True)) if isinstance(self.datasets, dict) else tuple(parts)

    def __getitem__(self, index: Any) -> _T_stack:
        sample: _T_stack = self._sample([dataset[index] for dataset in self._members()])
        return sample

    def __getitems__(self, indices: list[Any]) -> list[_T_stack]:
        """Return one sample for each index, by the members' own `__getitems__` if they have one.

        ValueError if a member's `__getitems__` returns another number of items than it was asked for.
        """
        columns = [_fetch_many(dataset, indices) for dataset in self._members()]
        return [self._sample(parts) for parts in zip(*columns, strict=True)]

    def __len__(self) -> int:
        return self._length


def _fetch_many(dataset: Any, indices: list[Any]) -> Sequence[Any]:
    if not _fetches_batches(dataset):
        return [dataset[index] for index in indices]
    items: Sequence[Any] = dataset.__getitems__(indices)
    if len(items) != len(indices):
        raise ValueError(f"Nested dataset's output size mismatch. Expected {len(indices)}, got {len(items)}")
    return items


def _fetches_batches(dataset: Any) -> bool:
    return callable(getattr(dataset, "__getitems__", None))


class ConcatDataset(Dataset[_T_co], torch.utils.data.ConcatDataset[_T_co]):
    """Map-style datasets end to end: index i belongs to the first whose cumulative size exceeds it.

    AssertionError for an empty list, or for an iterable dataset (it has no index). ValueError for an index below -len.
    """

    datasets: list[Any]
    cumulative_sizes: list[int]

    @staticmethod
    def cumsum(sequence: Iterable[Any]) -> list[int]:
        return list(itertools.accumulate(len(part) for part in sequence))

    def __init__(self, datasets: Iterable[torch.utils.data.Dataset[_T_co]]) -> None:
        super(torch.utils.data.ConcatDataset, self).__init__()
        self.datasets = list(datasets)
        if not self.datasets:
            raise AssertionError("datasets should not be an empty iterable")
        if any(isinstance(dataset, torch.utils.data.IterableDataset) for dataset in self.datasets):
            raise AssertionError("ConcatDataset does not support IterableDataset")
        self.cumulative_sizes = self.cumsum(self.datasets)

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, idx: int) -> _T_co:
        if idx < 0:
            if -idx > len(self):
                raise ValueError("absolute value of index should not exceed dataset length")
            idx += len(self)
        which = bisect.bisect_right(self.cumulative_sizes, idx)
        start = self.cumulative_sizes[which - 1] if which > 0 else 0
        item: _T_co = self.datasets[which][idx - start]
        return item

    @property
    def cummulative_sizes(self) -> list[int]:
        """The misspelt name of older torch versions; FutureWarning on use."""
        warnings.warn(
            "`cummulative_sizes` attribute is renamed to `cumulative_sizes`", category=FutureWarning, stacklevel=2
        )
        return self.cumulative_sizes


class ChainDataset(IterableDataset[_T_co], torch.utils.data.ChainDataset):
    """Streams one after another, each opened when it is needed. AssertionError for a map-style dataset."""

    def __init__(self, datasets: Iterable[torch.utils.data.Dataset[_T_co]]) -> None:
        super(torch.utils.data.ChainDataset, self).__init__()
        self.datasets = datasets

    def _streams(self) -> Iterator[Any]:
        for dataset in self.datasets:
            if not isinstance(dataset, torch.utils.data.IterableDataset):
                raise AssertionError("ChainDataset only supports IterableDataset")
            yield dataset

    def __iter__(self) -> Iterator[_T_co]:
        for stream in self._streams():
            yield from stream

    def __len__(self) -> int:
        return sum(len(stream) for stream in self._streams())


class Subset(Dataset[_T_co], torch.utils.data.Subset[_T_co]):
    """Sample i is `dataset[indices[i]]`.

    The fetcher prefers `__getitems__`, so it would silently bypass a subclass that overrides only `__getitem__`:
    constructing one raises NotImplementedError.
    """

    dataset: torch.utils.data.Dataset[_T_co]
    indices: Sequence[int]

    def __init__(self, dataset: torch.utils.data.Dataset[_T_co], indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = indices
        cls = type(self)
        if cls.__getitem__ is not Subset.__getitem__ and cls.__getitems__ is Subset.__getitems__:
            raise NotImplementedError(
                f"{cls.__name__} overrides __getitem__ but not __getitems__. "
                "When subclassing Subset and overriding __getitem__, you must also override "
                "__getitems__ to ensure DataLoader works correctly with your custom logic. "
                "A simple implementation:\n\n"
                "def __getitems__(self, indices):\n"
                "    return [self.__getitem__(idx) for idx in indices]"
            )

    def __getitem__(self, idx: Any) -> _T_co:
        if isinstance(idx, list):
            return self.dataset[[self.indices[i] for i in idx]]
        return self.dataset[self.indices[idx]]

    def __getitems__(self, indices: list[int]) -> list[_T_co]:
        chosen = [self.indices[idx] for idx in indices]
        if _fetches_batches(self.dataset):
            fetch: Callable[[list[int]], list[_T_co]] = self.dataset.__getitems__  # type: ignore[attr-defined]
            return fetch(chosen)
        return [self.dataset[index] for index in chosen]

    def __len__(self) -> int:
        return len(self.indices)


def random_split(
    dataset: torch.utils.data.Dataset[_T],
    lengths: Sequence[int | float],
    generator: Generator | None = torch.default_generator,
) -> list[Subset[_T]]:
    """Divide `dataset` into disjoint random subsets, by one permutation drawn from `generator`.

    lengths: sample counts that add up to len(dataset), or fractions that add up to 1. Fractions are rounded down;
    the remaining samples go to the subsets in turn, one each. UserWarning for a subset that stays empty.
    ValueError for a fraction outside [0, 1] or lengths that do not add up.
    """
    size = len(dataset)  # type: ignore[arg-type]
    if math.isclose(sum(lengths), 1) and sum(lengths) <= 1:
        counts = _counts_of_fractions(lengths, size)
        for i, count in enumerate(counts):
            if count == 0:
                message = f"Length of split at index {i} is 0. This might result in an empty dataset."
                warnings.warn(message, stacklevel=2)
    else:
        counts = list(lengths)  # type: ignore[arg-type]
    if sum(counts) != size:
        raise ValueError("Sum of input lengths does not equal the length of the input dataset!")
    order = torch.randperm(sum(counts), generator=generator).tolist()
    ends = list(itertools.accumulate(counts))
    return [Subset(dataset, order[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def _counts_of_fractions(fractions: Sequence[float], size: int) -> list[int]:
    for i, fraction in enumerate(fractions):
        if not 0 <= fraction <= 1:
            raise ValueError(f"Fraction at index {i} is not between 0 and 1")
    counts = [math.floor(size * fraction) for fraction in fractions]
    for i in range(size - sum(counts)):
        counts[i % len(counts)] += 1
    return counts
