"""Samplers: the order of a dataset's indices, and their grouping into batches.

Interface: iterate a sampler for one epoch's indices (Python ints); `BatchSampler` groups them into lists.
Rules of use: a sampler draws at the first `next()`, not at `iter()`, and takes exactly the random numbers that torch's
takes, so that a seeded program continues identically. An epoch over n samples holds one permutation tensor and the
Python ints of one block, never a list of n ints. `Sampler` subclasses torch's as a marker only; like datasets, it has
no default `__len__`.

Article 4 §sampler. Upstream: torch/utils/data/sampler.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, islice, repeat
from typing import Any, TypeVar

import torch
import torch.utils.data
from torch import Generator, Tensor

_T_co = TypeVar("_T_co", covariant=True)

DRAWN_AT_ONCE = 32  # indices in one draw with replacement; another size would draw other numbers
_WALKED_AT_ONCE = 4096  # ints in memory at a time: hides the cost of a call, fits into the cache


def permutation(n: int, generator: Generator | None) -> Tensor:
    """Return `torch.randperm(n)`, shape (n,), with 4 bytes per element if n permits.

    The draws do not depend on the element type. The shuffle is bound by memory: half the width, twice the speed.
    """
    dtype = torch.int32 if n <= torch.iinfo(torch.int32).max else torch.int64
    return torch.randperm(n, generator=generator, dtype=dtype)


def blocks(indices: Tensor) -> Iterator[list[int]]:
    """Yield the elements of a tensor of shape (n,) as lists of Python ints, one list at a time.

    `chain.from_iterable` makes one iterator of the lists, in which no Python code runs per element.
    """
    return (block.tolist() for block in torch.split(indices, _WALKED_AT_ONCE))


class Sampler(torch.utils.data.Sampler[_T_co]):
    """Base class of samplers: subclasses define `__iter__`, and `__len__` if the number of items is known."""

    def __iter__(self) -> Iterator[_T_co]:
        raise NotImplementedError


class SequentialSampler(Sampler[int], torch.utils.data.SequentialSampler):
    """0, 1, ..., len(data_source) - 1."""

    data_source: Sized

    def __init__(self, data_source: Sized) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))

    def __len__(self) -> int:
        return len(self.data_source)


class RandomSampler(Sampler[int], torch.utils.data.RandomSampler):
    """`num_samples` random indices: whole shuffles one after another, or, with `replacement`, independent draws.

    num_samples: default len(data_source), read again in every epoch, because the source may grow.
    generator: default a new one in every epoch, seeded by one draw from torch's global state.
    TypeError if `replacement` is not a bool; ValueError if `num_samples` is not a positive int.
    """

    data_source: Sized
    replacement: bool

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: Generator | None = None,
    ) -> None:
        self.data_source = data_source
        self.replacement = replacement
        self._num_samples = num_samples
        self.generator = generator
        if not isinstance(replacement, bool):
            raise TypeError(f"replacement should be a boolean value, but got replacement={replacement}")
        if not isinstance(self.num_samples, int) or self.num_samples <= 0:
            raise ValueError(f"num_samples should be a positive integer value, but got num_samples={self.num_samples}")

    @property
    def num_samples(self) -> int:
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._blocks())

    def _blocks(self) -> Iterator[list[int]]:
        n = len(self.data_source)
        generator = self.generator if self.generator is not None else _seeded_from_global_state()
        if self.replacement:
            yield from self._draws(n, generator)
        else:
            yield from self._shuffles(n, generator)

    def _draws(self, n: int, generator: Generator) -> Iterator[list[int]]:
        whole, rest = divmod(self.num_samples, DRAWN_AT_ONCE)
        for size in chain(repeat(DRAWN_AT_ONCE, whole), [rest]):
            yield torch.randint(high=n, size=(size,), generator=generator).tolist()

    def _shuffles(self, n: int, generator: Generator) -> Iterator[list[int]]:
        for _ in range(self.num_samples // n):
            yield from blocks(permutation(n, generator))
        rest = self.num_samples % n
        # Drawn even if none of it is used: the caller's generator must end in the state in which torch leaves it.
        if rest or generator is self.generator:
            yield from blocks(permutation(n, generator)[:rest])

    def __len__(self) -> int:
        return self.num_samples


def _seeded_from_global_state() -> Generator:
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return torch.Generator().manual_seed(seed)


class SubsetRandomSampler(Sampler[int], torch.utils.data.SubsetRandomSampler):
    """The given indices, shuffled."""

    indices: Sequence[int]

    def __init__(self, indices: Sequence[int], generator: Generator | None = None) -> None:
        self.indices = indices
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        for position in chain.from_iterable(blocks(permutation(len(self.indices), self.generator))):
            yield self.indices[position]

    def __len__(self) -> int:
        return len(self.indices)


class WeightedRandomSampler(Sampler[int], torch.utils.data.WeightedRandomSampler):
    """`num_samples` indices below len(weights), each drawn with probability proportional to its weight.

    weights: shape (n,), any sum. ValueError for another shape, a `num_samples` that is not a positive int, or a
    `replacement` that is not a bool; RuntimeError from the draw if there are too few nonzero weights.
    """

    weights: Tensor
    num_samples: int
    replacement: bool

    def __init__(
        self,
        weights: Sequence[float] | Tensor,
        num_samples: int,
        replacement: bool = True,
        generator: Generator | None = None,
    ) -> None:
        _require_positive_int("num_samples", num_samples)
        _require_bool("replacement", replacement)
        self.weights = torch.as_tensor(weights, dtype=torch.double)
        if self.weights.dim() != 1:
            raise ValueError(
                f"weights should be a 1d sequence but given weights have shape {tuple(self.weights.shape)}"
            )
        self.num_samples = num_samples
        self.replacement = replacement
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        drawn = torch.multinomial(self.weights, self.num_samples, self.replacement, generator=self.generator)
        yield from chain.from_iterable(blocks(drawn))

    def __len__(self) -> int:
        return self.num_samples


class BatchSampler(Sampler[list[int]], torch.utils.data.BatchSampler):
    """Consecutive indices of `sampler` in lists of `batch_size`; `drop_last` drops a shorter last list.

    sampler: any iterable. ValueError if `batch_size` is not a positive int or `drop_last` is not a bool.
    """

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool) -> None:
        _require_positive_int("batch_size", batch_size)
        _require_bool("drop_last", drop_last)
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while batch := list(islice(indices, self.batch_size)):
            if self.drop_last and len(batch) < self.batch_size:
                return
            yield batch

    def __len__(self) -> int:
        size = len(self.sampler)  # type: ignore[arg-type]
        return size // self.batch_size if self.drop_last else -(-size // self.batch_size)


def _require_positive_int(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} should be a positive integer value, but got {name}={value}")


def _require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} should be a boolean value, but got {name}={value}")
