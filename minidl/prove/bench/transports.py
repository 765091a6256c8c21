"""Cost of a batch by how it travels: torch's loader, minidl's in torch's way, with slabs, and what else there is.

Interface: `bench_transports(rounds, length)`. In the process itself nothing travels: that row says what fetching and
collating alone cost. Where a batch is one tensor, copying its bytes into memory that is there already bounds all of
them. Epochs are long: when one begins, the kernel needs some milliseconds to put loader and workers on separate cores,
and the time to the first batch is a figure of its own. Each loader has a process of its own, as in `bench.loader`. SPDL
and Hugging Face's datasets are left out, with a line, if they are not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.utils.data
from typing_extensions import Self

import minidl
from minidl.prove.bench.child import children, in_child
from minidl.prove.bench.loader import KINDS, Kind, Samples, epochs_of, serving
from minidl.prove.bench.memory import held
from minidl.prove.bench.pairs import Measured, Row, rows_of, take_turns
from minidl.tracefile.words import counted

TORCH, ALONE, COPY, RING, UPSTREAM, ARENA, OBSERVED, SPDL, DATASETS = (
    "torch", "torch in the process itself", "the copy alone, in the process itself",
    "torch, collate into shared tensors that are used again",
    "minidl, transport upstream", "minidl, transport arena", "torch, observe(transport='arena')",
    "SPDL (threads)", "torch over datasets in torch format",
)  # fmt: skip
AGAINST = {TORCH: ""} | dict.fromkeys((ALONE, COPY, RING, UPSTREAM, ARENA, OBSERVED, SPDL, DATASETS), TORCH)
_NEEDS = {SPDL: "spdl", DATASETS: "datasets"}


@functools.cache
def _pictures() -> torch.Tensor:
    return torch.rand(32, 3, 224, 224)


def _float_picture(index: int) -> torch.Tensor:
    return _pictures()[index % 32]


TRAVELLERS = {
    "tiny": replace(KINDS["tiny"], batches=2000),
    "record": replace(KINDS["record"], batches=500),
    "32 x 3 x 224 x 224 floats": Kind(_float_picture, 32, 100),
}
"""What travels. The pictures are there already, so that the time is that of collating and of the way."""

IN_TURN = 3
"""Batches of one worker that are in memory at once: one is used, one is ready, and one is in work."""


PAUSE = 0.05
"""Seconds that the loop waits before memory is measured, so that the workers are as far ahead as they may be."""

LOOKS, EPOCHS = 3, 3
"""How often memory is measured in an epoch, and in how many epochs."""


# --- Loaders ----------------------------------------------------------------------------------------------------------
class Ring:
    """A collate function that stacks tensors into one of `slots` shared ones, in turns.

    It saves the segments, and is what people write by hand: a batch that is kept for longer is overwritten.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._made: list[torch.Tensor] = []
        self._turn = itertools.cycle(range(slots))

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        tensors = [torch.as_tensor(sample) for sample in samples]
        while len(self._made) < self._slots:
            self._made.append(torch.stack(tensors).share_memory_())  # type: ignore[no-untyped-call]
        return torch.stack(tensors, out=self._made[next(self._turn)])


class Copies:
    """The bytes of one batch, copied again and again into the memory of as many batches as a loader needs in turn.

    The memory has been written before. One place alone could stay in the CPU's caches.
    """

    def __init__(self, batch: torch.Tensor, batches: int) -> None:
        self._from, self._batches = batch, batches
        self._places = [batch.clone() for _ in range(IN_TURN)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self._places[number % IN_TURN].copy_(self._from) for number in range(self._batches))


class Threads:
    """SPDL's pipeline over a dataset: threads that stay, and fetch and collate whole batches, yielded in order."""

    def __init__(self, samples: Samples, batch_size: int, workers: int) -> None:
        from spdl.pipeline import PipelineBuilder

        self._samples = samples
        batches = [range(begin, begin + batch_size) for begin in range(0, len(samples), batch_size)]
        source = PipelineBuilder().add_source(batches, continuous=True)
        pipe = source.pipe(self._fetch, concurrency=workers, output_order="input")
        self._pipeline = pipe.add_sink(2 * workers).build(num_threads=workers)

    def _fetch(self, indices: range) -> Any:
        return torch.utils.data.default_collate([self._samples[index] for index in indices])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pipeline.get_iterator())

    def __enter__(self) -> Self:
        self._pipeline.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._pipeline.stop()


@functools.cache  # its making is no part of the time to the first batch
def _rows_of_arrow(kind: Kind, count: int) -> Any:
    """`count` samples as a table of Hugging Face's datasets, which repeats the first 32. Arrays keep their shapes."""
    import datasets

    samples = [kind.make(index) for index in range(32)]
    rows = [sample if isinstance(sample, dict) else {"x": sample} for sample in samples]
    shapes = {
        name: value.shape for name, value in rows[0].items() if isinstance(value, torch.Tensor) and value.ndim > 1
    }
    rows = [{name: np.asarray(v) if isinstance(v, torch.Tensor) else v for name, v in row.items()} for row in rows]
    features = datasets.Dataset.from_list(rows[:1]).features
    for name, shape in shapes.items():
        kind_of_array = getattr(datasets, f"Array{len(shape)}D")
        features[name] = kind_of_array(shape, str(rows[0][name].dtype))
    table = datasets.Dataset.from_list(rows, features=features)
    return table.with_format("torch").select([index % 32 for index in range(count)])


def _loader(variant: str, kind: Kind, workers: int, batches: int) -> AbstractContextManager[Any]:
    samples: Any = Samples(kind.batch_size * batches, kind.make)
    if variant == SPDL:
        return Threads(samples, kind.batch_size, workers)
    if variant == COPY:
        batch = torch.utils.data.default_collate([kind.make(number) for number in range(kind.batch_size)])
        return nullcontext(Copies(batch, batches))
    make: Any = torch.utils.data.DataLoader
    options: dict[str, Any] = {} if variant == ALONE else {"num_workers": workers, "persistent_workers": True}
    if variant in (UPSTREAM, ARENA):
        make, options["transport"] = minidl.DataLoader, "arena" if variant == ARENA else "upstream"
    elif variant == OBSERVED:
        options["multiprocessing_context"] = minidl.observe(transport="arena")
    elif variant == RING:
        options["collate_fn"] = Ring(IN_TURN + 1)  # the loop may still hold a batch when a worker gets the next task
    elif variant == DATASETS:
        samples = _rows_of_arrow(kind, len(samples))
    return serving(make(samples, kind.batch_size, **options))


# --- Measuring --------------------------------------------------------------------------------------------------------
def _epochs(variant: str, kind: Kind, workers: int, batches: int) -> Iterator[Measured]:
    with _loader(variant, kind, workers, batches) as loader:
        yield from epochs_of(loader)


def _firsts(variant: str, kind: Kind, workers: int, batches: int) -> Iterator[float]:
    """Milliseconds from the making of a loader to its first batch."""
    while True:
        began = time.perf_counter()
        with _loader(variant, kind, workers, batches) as loader:
            next(iter(loader))
            ended = time.perf_counter()
        yield (ended - began) * 1e3


def _memory(variant: str, kind: Kind, workers: int, batches: int) -> tuple[float, float]:
    """MiB that the loader and its workers have at most, and how many more in the last epoch than in the one before."""
    own = [os.getppid(), os.getpid()]  # it shares pages with its parent, and each worker with both
    before, peaks = held(own), []
    with _loader(variant, kind, workers, batches) as loader:
        for _ in range(EPOCHS):
            peaks.append(0.0)
            for number, batch in enumerate(loader):
                if number % max(1, batches // LOOKS) == 0:
                    time.sleep(PAUSE)
                    pids = (process.pid for process in multiprocessing.active_children())
                    now = held([*own, *(pid for pid in pids if pid is not None)])
                    peaks[-1] = max(peaks[-1], (now - before) / (1 << 20))
                del batch
    return max(peaks), peaks[-1] - peaks[-2]


def variants_for(kind: Kind) -> list[str]:
    """The loaders that are measured: those that are installed, and that the kind of batch allows."""
    sample = kind.make(0)
    return [
        variant
        for variant in AGAINST
        if (variant != RING or not isinstance(sample, dict))
        and (variant != COPY or isinstance(sample, torch.Tensor))
        and (variant not in _NEEDS or importlib.util.find_spec(_NEEDS[variant]) is not None)
    ]


def bench_transports(rounds: int, length: float = 1.0, workers: tuple[int, ...] = (1, 2)) -> list[Row]:
    """Measure microseconds per batch of each loader, for each kind of batch and each number of workers.

    length: of an epoch, as a share of the kind's. extra: batches a second, speed in percent of that in the process
    itself, milliseconds to the first batch, memory (see `_memory`), medians of CPU microseconds per batch, and of their
    ratios.
    """
    for variant, package in _NEEDS.items():
        if importlib.util.find_spec(package) is None:
            print(f"left out: {variant}; `pip install {package}` brings it in", file=sys.stderr)
    return [
        row for name, kind in TRAVELLERS.items() for many in workers for row in _rows(name, kind, many, rounds, length)
    ]


def _rows(name: str, kind: Kind, workers: int, rounds: int, length: float) -> list[Row]:
    group, batches = f"{name}, {counted(workers, 'worker')}", max(1, round(kind.batches * length))
    loaders = variants_for(kind), kind, workers, batches
    with children(_epochs, *loaders) as turns:
        found: dict[str, list[Measured]] = take_turns(turns, rounds, f"transport: {group}")
    with children(_firsts, *loaders) as turns:
        firsts = take_turns(turns, max(1, rounds // 3), f"transport: {group}, first batch")
    extra = {}
    for variant, epochs in found.items():
        peak, grown = in_child(_memory, variant, kind, workers, batches)
        extra[variant] = {
            "batches/s": 1e6 / median(epoch.value for epoch in epochs),
            "% of in-process": median(100 * a.value / b.value for a, b in zip(found[ALONE], epochs, strict=True)),
            "ms to first": median(firsts[variant]),
            "peak MiB": peak,
            "grown MiB": grown,
        }
    return rows_of(group, "µs/batch", found, AGAINST, extra)
