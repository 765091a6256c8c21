"""Cost of a loader's state: of what travels with each batch, and of asking for it.

Interface: `bench_states(rounds, length)`. The dataset is iterable and has a state of 1 KiB; the batches are small. A
loader whose state is not asked for is compared with one whose dataset has none; the difference is noise.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import minidl
from minidl.prove.bench.child import children
from minidl.prove.bench.pairs import Measured, Row, compare

WITHOUT, UNUSED = "a dataset without state", "state unused"
EVERY = {f"state_every {every}": every for every in (100, 10, 1)}
AGAINST = {WITHOUT: "", UNUSED: WITHOUT, **dict.fromkeys(EVERY, UNUSED)}
BATCHES = 400


class _Walk(Iterator[int]):
    """0 to count - 1."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> _Walk:
        return self

    def __next__(self) -> int:
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        return self.at - 1


class _WalkWithState(_Walk):
    """The same with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": bytes(1024)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class _Numbers(minidl.IterableDataset[int]):
    """So many numbers from each worker."""

    def __init__(self, walk: type[_Walk], count: int) -> None:
        self.walk, self.count = walk, count

    def __iter__(self) -> Iterator[int]:
        return self.walk(self.count)


def _epochs(variant: str, workers: int, batches: int) -> Iterator[Measured]:
    """Measure epochs of one loader, without end: microseconds per batch, and of one state_dict() in the middle."""
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # on a machine with one core
    walk = _Walk if variant == WITHOUT else _WalkWithState
    data = _Numbers(walk, 4 * batches // max(1, workers))
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loader: minidl.DataLoader[Any] = minidl.DataLoader(data, 4, state_every=EVERY.get(variant), **options)
    with loader:
        while True:
            start = time.perf_counter_ns()
            count = sum(1 for _ in loader)
            whole = time.perf_counter_ns() - start
            for _ in zip(range(count // 2), loader, strict=False):
                pass
            start = time.perf_counter_ns()
            loader.state_dict()
            yield Measured(whole / 1000 / count, {"state_dict() µs": (time.perf_counter_ns() - start) / 1000})


def bench_states(rounds: int, length: float = 1.0, workers: tuple[int, ...] = (0, 2)) -> list[Row]:
    """Measure microseconds per batch with and without states; extra: microseconds of one state_dict().

    length: of an epoch, as a share of 400 batches.
    """
    rows: list[Row] = []
    for many in workers:
        with children(_epochs, AGAINST, many, max(1, round(BATCHES * length))) as turns:
            rows += compare("state", f"state of 1 KiB, {many} workers", "µs/batch", turns, rounds, AGAINST)
    return rows
