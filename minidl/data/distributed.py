"""Samplers that give each process of a distributed run its own share of the indices.

Interface: `DistributedSampler` is the Python API's: rank r takes every num_replicas-th index of one common order.
`DistributedRandomSampler` and `DistributedSequentialSampler` are the C++ API's: rank r takes one contiguous block,
which `next(batch_size)` returns in parts.
Rules of use: call `set_epoch` on every rank before each epoch. All ranks shuffle by the same seed and epoch, so
they need no communication. The C++ samplers shuffle at `reset()`: there, `set_epoch` takes effect at the next reset.

Article 2 §3.1 to §3.4. Upstream: torch/utils/data/distributed.py;
torch/csrc/api/include/torch/data/samplers/distributed.h.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import chain, islice
from typing import IO, Any, TypeVar

import torch
import torch.distributed
import torch.utils.data
from torch import Tensor

from minidl._libstdcxx import Mt19937, shuffle
from minidl.data.sampler import Sampler, blocks, permutation

_T_co = TypeVar("_T_co", covariant=True)
Archive = MutableMapping[str, Tensor] | str | os.PathLike[str] | IO[bytes]


class DistributedSampler(Sampler[_T_co], torch.utils.data.DistributedSampler[_T_co]):
    """One rank's share: positions rank, rank + num_replicas, ... of an order that all ranks have in common.

    If the length is not a multiple of num_replicas, the order is padded from its beginning, or cut with `drop_last`.
    num_replicas, rank: by default those of the current process group. shuffle: permute by seed + epoch.
    ValueError for a rank outside [0, num_replicas); RuntimeError if a default is needed and torch.distributed
    is missing; AssertionError on iterating if the dataset's length has changed so that the shares no longer fit.
    Article 2 §3.1 to §3.3; upstream torch.utils.data.DistributedSampler.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if (num_replicas is None or rank is None) and not torch.distributed.is_available():
            raise RuntimeError("Requires distributed package to be available")
        num_replicas = torch.distributed.get_world_size() if num_replicas is None else num_replicas
        rank = torch.distributed.get_rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]")
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.epoch = 0
        self.drop_last = drop_last
        n = len(dataset)  # type: ignore[arg-type]
        uneven = n % num_replicas != 0
        self.num_samples = math.ceil((n - num_replicas if drop_last and uneven else n) / num_replicas)
        self.total_size = self.num_samples * num_replicas
        self.shuffle = shuffle
        self.seed = seed
        self._kept: tuple[tuple[int, int, slice, int], Tensor] | None = None
        self.yielded = 0  # by the iteration that was begun last
        self.next_yielded: int | None = None  # where the next iteration begins

    def __iter__(self) -> Iterator[_T_co]:
        n, total_size = len(self.dataset), self.total_size  # type: ignore[arg-type]
        if n < total_size if self.drop_last else n > total_size:
            raise AssertionError(f"Number of indices ({n}) does not match total_size ({total_size})")
        share = slice(self.rank, total_size, self.num_replicas)
        positions = range(total_size)[share]
        if len(positions) != self.num_samples:
            raise AssertionError(
                f"Number of subsampled indices ({len(positions)}) does not match num_samples ({self.num_samples})"
            )
        within = range(n)[share]
        wrapped = [position % n for position in positions[len(within) :]]
        if not self.shuffle:
            return self._counted(chain(within, wrapped))
        return self._counted(chain.from_iterable(blocks(self._shuffled(n, share, wrapped))))

    def _counted(self, indices: Iterator[int]) -> Iterator[Any]:
        self.yielded, self.next_yielded = self.next_yielded or 0, None
        for index in islice(indices, self.yielded, None):
            self.yielded += 1
            yield index

    def _shuffled(self, n: int, share: slice, wrapped: list[int]) -> Tensor:
        """Return this rank's share of the permutation of seed + epoch, shape (num_samples,).

        It is cached: a loader with workers takes two iterators of its sampler in each epoch, and the permutation takes
        nearly all of the time.
        """
        key = n, self.seed + self.epoch, share, len(wrapped)
        if self._kept is None or self._kept[0] != key:
            order = permutation(n, torch.Generator().manual_seed(self.seed + self.epoch))
            # A copy, so that the whole permutation is freed here.
            self._kept = key, torch.cat([order[share], order[wrapped]])
        return self._kept[1]

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration shuffle by seed + epoch; without it every epoch has the same order."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many indices the last iteration has yielded; a loader's own state says what it yielded.

        torchdata's StatefulDistributedSampler reads it, and its states, which have no epoch, can be loaded here.
        """
        return {"epoch": self.epoch, "yielded": self.yielded if self.next_yielded is None else self.next_yielded}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Let the next iteration leave out what was yielded. ValueError for what is no state of such a sampler."""
        yielded = state_dict.get("yielded")
        if not isinstance(yielded, int) or yielded < 0:
            raise ValueError(
                f"DistributedSampler.load_state_dict: expected a number of indices as 'yielded', got {dict(state_dict)}"
            )
        self.next_yielded = yielded
        self.epoch = state_dict.get("epoch", self.epoch)


class _BlockSampler(ABC):
    """Base of the C++ samplers: rank r owns positions [r * count, (r + 1) * count) of all indices.

    count is size / num_replicas, rounded up with `allow_duplicates` (the first indices are then used twice), else down
    (the last indices are then used by no rank). A loader takes one epoch as `iter(lambda: sampler.next(64), None)`.
    ValueError for a negative size or a rank outside [0, num_replicas), which C++ does not check.
    """

    def __init__(self, size: int, num_replicas: int = 1, rank: int = 0, allow_duplicates: bool = True) -> None:
        if not 0 <= rank < num_replicas:
            raise ValueError(f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]")
        self._num_replicas = num_replicas
        self._rank = rank
        self._epoch = 0
        self._allow_duplicates = allow_duplicates
        self.reset(size)

    def reset(self, new_size: int | None = None) -> None:
        """Begin again, with `new_size` indices; None keeps the size."""
        if new_size is not None:
            if new_size < 0:
                raise ValueError(f"{type(self).__name__}: size must be 0 or more, got {new_size}")
            self._size = new_size
        count = self._local_sample_count()
        self._begin_index = self._rank * count
        self._end_index = self._begin_index + count
        self._sample_index = self._begin_index

    def next(self, batch_size: int) -> list[int] | None:
        """Return the next `batch_size` indices of this rank, fewer at the end of its block, then None."""
        if batch_size < 0:
            raise ValueError(f"{type(self).__name__}.next: batch_size must be 0 or more, got {batch_size}")
        if self._sample_index == self._end_index:
            return None
        start = self._sample_index
        self._sample_index = min(start + batch_size, self._end_index)
        return self._indices(start, self._sample_index)

    def index(self) -> int:
        """Return the position, counted over all ranks, of the next index."""
        return self._sample_index

    def epoch(self) -> int:
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next `reset()`; the current epoch does not change."""
        self._epoch = epoch

    def save(self, archive: Archive) -> None:
        """Write the position (and a random sampler's epoch) into a dict, a path or a binary file.

        Keys and values are those of the C++ archive: int64 tensors of shape (). Neither size nor rank is stored.
        """
        if isinstance(archive, MutableMapping):
            archive.update(self._state())
        else:
            torch.save(self._state(), archive)

    def load(self, archive: Archive | Mapping[str, Tensor]) -> None:
        """Continue from what `save` wrote, in a sampler made with the same arguments.

        An archive that C++ wrote is read as `dict(torch.jit.load(path).named_buffers())`.
        ValueError, leaving the sampler as it was, when the stored position is past the end of this rank's block.
        """
        self._restore(archive if isinstance(archive, Mapping) else torch.load(archive, weights_only=True))

    def _restore(self, stored: Mapping[str, Tensor]) -> None:
        position = int(stored["sample_index_"])
        if position > self._end_index:
            raise ValueError(
                f"{type(self).__name__}.load: position {position} is past this rank's block, which ends at "
                f"{self._end_index}; load into a sampler of the size, num_replicas and rank that was saved"
            )
        self._sample_index = position

    def _local_sample_count(self) -> int:
        rounding = self._num_replicas - 1 if self._allow_duplicates else 0
        return (self._size + rounding) // self._num_replicas

    def _state(self) -> dict[str, Tensor]:
        return {"sample_index_": torch.tensor(self._sample_index)}

    @abstractmethod
    def _indices(self, start: int, end: int) -> list[int]:
        """The indices at positions [start, end)."""


class DistributedSequentialSampler(_BlockSampler):
    """Each rank's block in order; after the last index, index 0 follows.

    Article 2 §3.4.2.2; upstream torch::data::samplers::DistributedSequentialSampler.
    """

    def _indices(self, start: int, end: int) -> list[int]:
        return [position % self._size for position in range(start, end)]


class DistributedRandomSampler(_BlockSampler):
    """Each rank's block of all indices shuffled by the epoch: at construction by epoch 0, then at every `reset()`.

    As in torch, the duplicates are 0, 1, 2, ... in sequence, so with more than twice as many ranks as indices some of
    them exceed the size. Article 2 §3.4.2.1; upstream torch::data::samplers::DistributedRandomSampler.
    """

    def reset(self, new_size: int | None = None) -> None:
        super().reset(new_size)
        self._shuffle()

    def _shuffle(self) -> None:
        dealt = self._local_sample_count() * self._num_replicas
        self._all_indices = array("Q", chain(range(min(dealt, self._size)), range(dealt - self._size)))
        shuffle(self._all_indices, Mt19937(self._epoch))

    def _indices(self, start: int, end: int) -> list[int]:
        return self._all_indices[start:end].tolist()

    def _state(self) -> dict[str, Tensor]:
        return super()._state() | {"epoch_": torch.tensor(self._epoch)}

    def _restore(self, stored: Mapping[str, Tensor]) -> None:
        epoch = int(stored["epoch_"])
        super()._restore(stored)
        self._epoch = epoch
        self._shuffle()
