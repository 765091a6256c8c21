"""Traced sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from minidl.record.harmless import harmless
from minidl.record.indices import facts_of_index
from minidl.record.shared import Shared
from minidl.tracefile import events as ev


class Dealt(NamedTuple):
    """What a sampler of shares says of itself before a pass: its epoch (-1 = it has none), whose share, of how many."""

    epoch: int
    replica: int
    replicas: int


_NAMES = ("rank", "num_replicas"), ("process_index", "num_processes")
"""Of a share and of their number: torch's DistributedSampler, Accelerate's BatchSamplerShard."""


@harmless(None)
def dealt_by(index_sampler: Any) -> tuple[Any, Dealt] | None:
    """The sampler of shares in a loader's sampler, and what it deals out; None if no sampler in it does."""
    nest = list(nested_samplers(index_sampler))
    for depth, sampler in enumerate(nest):
        for names in _NAMES:
            replica, replicas = (getattr(sampler, name, None) for name in names)
            if type(replica) is int and type(replicas) is int:
                epochs = (getattr(inner, "epoch", None) for inner in nest[depth:])
                epoch = next((epoch for epoch in epochs if type(epoch) is int), -1)
                return sampler, Dealt(epoch, replica, replicas)
    return None


def nested_samplers(index_sampler: Any) -> Iterator[Any]:
    """A loader's sampler, then what it takes its indices from, from the outermost to the innermost."""
    seen: list[Any] = []
    while index_sampler is not None and all(index_sampler is not other for other in seen):
        seen.append(index_sampler)
        yield index_sampler
        index_sampler = getattr(index_sampler, "sampler", getattr(index_sampler, "batch_sampler", None))


class TracedSampler:
    """The iterator of a sampler, traced."""

    def __init__(self, shared: Shared, inner: Iterator[Any]) -> None:
        self.shared = shared
        self.inner = inner
        shared.next_task = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        shared = self.shared
        task = shared.next_task if shared.dispatcher is None else shared.dispatcher.send_idx
        shared.emit_pauses()
        shared.emit(ev.SAMPLER_NEXT[0], task)
        count, first, digest = 0, -1, 0
        try:
            index = next(self.inner)
            count, first, digest = facts_of_index(index)
        finally:
            shared.emit(ev.SAMPLER_NEXT[1], task, -1, count, first, digest)
        shared.next_task += 1
        if shared.single_process and shared.fetching is not None:
            shared.fetching.begin(task, index)
        return index
