"""Cost of a batch by how it travels: torch's loader, minidl's in torch's way, and minidl's with slabs.

Interface: `bench_transports(rounds, length)`. Without workers nothing travels: these rows say what fetching and
collating alone cost. Each loader has a process of its own, as in `bench.loader`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data

import minidl
from minidl.bench.child import Child
from minidl.bench.loader import KINDS, Epoch, Kind, Samples, epochs_of, extra_of
from minidl.bench.pairs import Row, rows_of, take_turns
from minidl.tracefile.words import counted

TORCH, UPSTREAM, ARENA = "torch", "minidl, transport upstream", "minidl, transport arena"
AGAINST = {TORCH: "", UPSTREAM: TORCH, ARENA: TORCH}


@functools.cache
def _pictures() -> torch.Tensor:
    return torch.rand(32, 3, 224, 224)


def _float_picture(index: int) -> torch.Tensor:
    return _pictures()[index % 32]


TRAVELLERS = {
    "tiny": KINDS["tiny"],
    "record": KINDS["record"],
    "32 x 3 x 224 x 224 floats": Kind(_float_picture, 32, 24),
}
"""What travels. The pictures are there already, so that the time is that of collating and of the way."""


@contextlib.contextmanager
def _loader(variant: str, kind: Kind, workers: int, batches: int) -> Iterator[Any]:
    make: Any = torch.utils.data.DataLoader if variant == TORCH else minidl.DataLoader
    way = {} if variant == TORCH else {"transport": "arena" if variant == ARENA else "upstream"}
    samples = Samples(kind.batch_size * batches, kind.make)
    made = make(samples, kind.batch_size, num_workers=workers, persistent_workers=workers > 0, **way)
    try:
        yield made
    finally:
        if made._iterator is not None:
            made._iterator._shutdown_workers()


def _epochs(variant: str, kind: Kind, workers: int, batches: int) -> Iterator[Epoch]:
    with _loader(variant, kind, workers, batches) as loader:
        yield from epochs_of(loader)


def bench_transports(rounds: int, length: float = 1.0, workers: tuple[int, ...] = (0, 1, 2)) -> list[Row]:
    """Measure microseconds per batch of each transport, for each kind of batch and each number of workers.

    length: of an epoch, as a share of the kind's. extra: medians of CPU microseconds per batch, and of their ratios.
    """
    return [
        row for name, kind in TRAVELLERS.items() for many in workers for row in _rows(name, kind, many, rounds, length)
    ]


def _rows(name: str, kind: Kind, workers: int, rounds: int, length: float) -> list[Row]:
    group, batches = f"{name}, {counted(workers, 'worker')}", max(1, round(kind.batches * length))
    with contextlib.ExitStack() as stack:
        turns = {
            variant: stack.enter_context(Child(_epochs, variant, kind, workers, batches)).ask for variant in AGAINST
        }
        found: dict[str, list[Epoch]] = take_turns(turns, rounds, f"transport: {group}")
    extra = {variant: extra_of(epochs, found.get(AGAINST[variant])) for variant, epochs in found.items()}
    walls = {variant: [epoch.wall for epoch in epochs] for variant, epochs in found.items()}
    return rows_of(group, "µs/batch", walls, AGAINST, extra)
