"""Miniatures of loaders that subclass the DataLoader and reach into it, and of a sampler: timm's and streaming's.

Each function takes the class to be subclassed: torch's, or minidl's, which stands in its place under `minidl run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data


# --- As timm's MultiEpochsDataLoader: one iterator for all epochs -----------------------------------------------------
class Endless:
    """A batch sampler that begins again."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.inner


def multi_epochs(base: Any) -> Any:
    """It unlocks the loader by its class's private name, puts an endless sampler in, and keeps the iterator."""

    class MultiEpochs(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            self.batch_sampler = Endless(self.batch_sampler)
            self._DataLoader__initialized = True
            self.endless = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.inner)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.endless)

        def close(self) -> None:
            self.endless._shutdown_workers()

    return MultiEpochs


# --- As timm's RepeatAugSampler: each sample comes several times in a row of the common order -------------------------
class Repeating(torch.utils.data.Sampler[int]):
    """Deals out an order in which each sample comes `repeats` times; of it, `most` places (None: all) for each rank.

    declared: whether it tells how often, by an attribute. own(rank): what else the order is seeded by. dealing: whether
    the rank gets its share, and not the order's begin.
    """

    def __init__(
        self, length: int, rank: int, ranks: int, repeats: int, most: int | None, *, declared: bool = True,
        own: Callable[[int], int] = lambda rank: 0, dealing: bool = True,
    ) -> None:  # fmt: skip
        self.length, self.rank, self.num_replicas, self.times, self.most = length, rank, ranks, repeats, most
        self.seeded, self.dealing, self.epoch = own(rank), dealing, 0
        if declared:
            self.num_repeats = repeats

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(1000 * self.seeded + self.epoch)
        order = torch.randperm(self.length, generator=generator).repeat_interleave(self.times).tolist()
        order += order[: -len(order) % self.num_replicas]
        mine = order[self.rank :: self.num_replicas] if self.dealing else order
        return iter(mine[: self.most])


# --- As streaming's StreamingDataLoader: it counts what it yields, and ends the workers itself ------------------------
class Shards(torch.utils.data.IterableDataset[int]):
    """Each worker takes its part of `length` samples; the dataset counts its epochs, in the worker that iterates it."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, -1

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        self.epoch += 1
        yield from (100 * self.epoch + number for number in range(first, self.length, step))

    def state_dict(self, samples: int) -> dict[str, int]:
        return {"samples": samples}


def streaming(base: Any) -> Any:
    """Its `__iter__` is a generator, its state is its dataset's, and `__del__` calls the iterator's shutdown."""

    class Streaming(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.yielded = 0

        def __iter__(self) -> Iterator[Any]:
            self.yielded = 0
            for batch in super().__iter__():
                self.yielded += len(batch)
                yield batch

        def state_dict(self) -> Any:
            return self.dataset.state_dict(self.yielded)

        def __del__(self) -> None:
            if self._iterator is not None:
                self._iterator._shutdown_workers()

    return Streaming
