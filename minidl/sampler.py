"""Samplers: in which order the indices of a dataset are visited, and how they group into batches.

Interface: iterate a sampler for one epoch's indices (Python ints); `BatchSampler` groups them into lists.
Rules of use: a sampler draws at the first `next()`, not at `iter()`, and takes exactly the random numbers that torch's
takes, so a seeded program continues identically after it. An epoch over n samples holds one permutation tensor and the
Python ints of one block, never a list of n ints. `Sampler` subclasses torch's as a marker only; like datasets, it has
no default `__len__`.

Articles: 1 (samplers), 2 (what distribution changes). Upstream: torch/utils/data/sampler.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, islice, repeat
from typing import Any, TypeVar

import torch
import torch.utils.data
from torch import Generator, Tensor

__all__ = [
    "BatchSampler",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
]

_T_co = TypeVar("_T_co", covariant=True)

DRAWN_AT_ONCE = 32  # indices in one draw with replacement; the size is visible in the numbers drawn
_WALKED_AT_ONCE = 4096  # ints alive at a time: large enough to hide the cost of a call, small enough to stay in cache


def permutation(n: int, generator: Generator | None) -> Tensor:
    """A random order of range(n), shape (n,): the numbers of `torch.randperm(n)`, in 4 bytes each where n allows.

    The draws do not depend on the element type, and the shuffle is bound by memory: half as wide, twice as fast.
    """
    dtype = torch.int32 if n <= torch.iinfo(torch.int32).max else torch.int64
    return torch.randperm(n, generator=generator, dtype=dtype)


def blocks(indices: Tensor) -> Iterator[list[int]]:
    """The elements of a tensor of shape (n,) as Python ints, in lists that exist one at a time.

    `chain.from_iterable` makes one iterator of them, at the speed of a list's: no Python code runs for an element.
    """
    return (block.tolist() for block in torch.split(indices, _WALKED_AT_ONCE))


class Sampler(torch.utils.data.Sampler[_T_co]):
    """Base class of samplers: subclasses define `__iter__`, and `__len__` where the number of items is known."""

    def __iter__(self) -> Iterator[_T_co]:
        raise NotImplementedError


class SequentialSampler(Sampler[int]):
    """0, 1, ..., len(data_source) - 1."""

    data_source: Sized

    def __init__(self, data_source: Sized) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))

    def __len__(self) -> int:
        return len(self.data_source)


class RandomSampler(Sampler[int]):
    """`num_samples` random indices: whole shuffles one after another, or, with `replacement`, independent draws.

    num_samples: by default len(data_source), asked for again every epoch, because the source may grow.
    generator: by default a new one for every epoch, seeded by one draw from torch's global state.
    TypeError when `replacement` is no bool; ValueError when `num_samples` is no positive int.
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
        # Drawn even when nothing of it is used: the caller's generator must end where torch would leave it.
        if rest or generator is self.generator:
            yield from blocks(permutation(n, generator)[:rest])

    def __len__(self) -> int:
        return self.num_samples


def _seeded_from_global_state() -> Generator:
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return torch.Generator().manual_seed(seed)


class SubsetRandomSampler(Sampler[int]):
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


class WeightedRandomSampler(Sampler[int]):
    """`num_samples` indices below len(weights), each drawn with probability proportional to its weight.

    weights: shape (n,), need not add up to 1. ValueError for another shape, a `num_samples` that is no positive int,
    or a `replacement` that is no bool; RuntimeError from the draw when there are too few nonzero weights.
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


class BatchSampler(Sampler[list[int]]):
    """Consecutive indices of `sampler` in lists of `batch_size`; `drop_last` drops a shorter last one.

    sampler: anything that can be iterated. ValueError when `batch_size` is no positive int or `drop_last` no bool.
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
