"""What the notebooks share: datasets for their workers, a training that can be killed, the grading of predictions.

Datasets live here and not in the notebooks, because a spawned worker imports what it runs. Their work is waiting
(`time.sleep`, or for an event), so that a run has the shape that a notebook is about on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.synchronize import Event
from typing import Any

import torch

import minidl

PATIENCE = 60
"""Seconds after which a wait for another process gives up."""

STEP = 0.05
"""Seconds of a training step."""


class Sized(minidl.Dataset[Any]):
    """A dataset of `size` samples."""

    size: int

    def __len__(self) -> int:
        return self.size


class Uneven(Sized):
    """`size` samples; sample i is `tensor(i)` and takes `seconds` of waiting, or `slow[i]` where it is named there."""

    def __init__(self, size: int, seconds: float = 0.01, slow: Mapping[int, float] | None = None) -> None:
        self.size = size
        self.seconds = seconds
        self.slow = dict(slow or {})

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.slow.get(index, self.seconds))
        return torch.tensor(index)


class Held(Sized):
    """`size` samples; sample i is i. Sample `held` is not ready before the event `gate` is set."""

    def __init__(self, size: int, held: int, gate: Event) -> None:
        self.size, self.held, self.gate = size, held, gate

    def __getitem__(self, index: int) -> int:
        if index == self.held and not self.gate.wait(PATIENCE):
            raise TimeoutError(f"sample {index}: the gate was not opened for {PATIENCE} s")
        return index


class Walk(Iterator[int]):
    """An iterator over numbers with a state: how many of them it has given."""

    def __init__(self, numbers: range, seconds: float) -> None:
        self.numbers, self.seconds, self.given = numbers, seconds, 0

    def __next__(self) -> int:
        if self.given == len(self.numbers):
            raise StopIteration
        time.sleep(self.seconds)
        self.given += 1
        return self.numbers[self.given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Stream(minidl.IterableDataset[int]):
    """The numbers below `size`: worker w of W gives w, w + W, w + 2W, ... stateful: its iterator has a state."""

    def __init__(self, size: int, *, seconds: float = 0, stateful: bool = True) -> None:
        self.size, self.seconds, self.stateful = size, seconds, stateful

    def __iter__(self) -> Iterator[int]:
        info = minidl.get_worker_info()
        share = range(self.size) if info is None else range(info.id, self.size, info.num_workers)
        return Walk(share, self.seconds) if self.stateful else iter(list(share))


class Canonical(minidl.IterableDataset[int]):
    """One order of the samples for any number of ranks and workers, from the sample in the epoch at which to begin.

    The order is cut into global batches of `global_batch` samples, each of which is cut into a share for each rank.
    Worker w of W has the global batches w, w + W, w + 2W, ... A loader needs a batch_size of global_batch / ranks.
    state: epoch, sample_in_epoch (what all ranks together have been given), seed. slow: sample `slow` waits for `gate`.
    Upstream: the way of `streaming`, reduced to one canonical node.
    """

    def __init__(
        self, size: int, global_batch: int, state: Mapping[str, int], rank: int = 0, ranks: int = 1,
        slow: int | None = None, gate: Event | None = None,
    ) -> None:  # fmt: skip
        if global_batch % ranks or size % global_batch:
            raise ValueError(f"{size} samples in batches of {global_batch} do not divide evenly among {ranks} ranks")
        self.size, self.global_batch, self.state = size, global_batch, dict(state)
        self.rank, self.ranks, self.slow, self.gate = rank, ranks, slow, gate

    def order(self) -> list[int]:
        """The samples of the epoch, from its begin."""
        generator = torch.Generator().manual_seed(self.state["seed"] + self.state["epoch"])
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order

    def read(self, sample: int) -> int:
        """The sample; the slow one when its gate is open."""
        if sample == self.slow and self.gate is not None and not self.gate.wait(PATIENCE):
            raise TimeoutError(f"sample {sample}: the gate was not opened for {PATIENCE} s")
        return sample

    def __iter__(self) -> Iterator[int]:
        info = minidl.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        order, share = self.order(), self.global_batch // self.ranks
        begins = range(self.state["sample_in_epoch"], self.size, self.global_batch)
        for begin in begins[worker::workers]:
            yield from map(self.read, order[begin + self.rank * share :][:share])


def numbers(samples: list[Any]) -> list[int]:
    """Collate samples into a list of numbers."""
    return [int(sample) for sample in samples]


def until(true: Callable[[], bool], seconds: float, pause: float = 0.01) -> bool:
    """Wait until it is true, at most so long, looking again after each pause; whether it is."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(pause)
    return true()
