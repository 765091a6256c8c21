"""Cost of a batch by how it travels: torch's loader, minidl's in torch's way, with slabs, and what else there is.

Interface: `bench_transports(rounds, length)`. In the process itself nothing travels: that row says what fetching and
collating alone cost. Each loader has a process of its own, as in `bench.loader`. SPDL and Hugging Face's datasets are
left out, with a line, if they are not installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.utils.data

import minidl
from minidl.bench.child import Child
from minidl.bench.loader import KINDS, Epoch, Kind, Samples, epochs_of, extra_of
from minidl.bench.pairs import Row, rows_of, take_turns
from minidl.tracefile.words import counted

TORCH, ALONE, RING, UPSTREAM, ARENA, OBSERVED, SPDL, DATASETS = (
    "torch", "torch in the process itself", "torch, collate into shared tensors that are used again",
    "minidl, transport upstream", "minidl, transport arena", "torch, observe(transport='arena')",
    "SPDL (threads)", "torch over datasets in torch format",
)  # fmt: skip
AGAINST = {TORCH: ""} | dict.fromkeys((ALONE, RING, UPSTREAM, ARENA, OBSERVED, SPDL, DATASETS), TORCH)
_NEEDS = {SPDL: "spdl", DATASETS: "datasets"}


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


class Threads:
    """SPDL's pipeline over a dataset, one for each epoch: its threads fetch and collate whole batches."""

    def __init__(self, samples: Samples, batch_size: int, workers: int) -> None:
        self._samples = samples
        self._batches = [range(begin, begin + batch_size) for begin in range(0, len(samples), batch_size)]
        self._workers = workers

    def _fetch(self, indices: range) -> Any:
        return torch.utils.data.default_collate([self._samples[index] for index in indices])

    def __iter__(self) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder

        pipe = PipelineBuilder().add_source(self._batches).pipe(self._fetch, concurrency=self._workers)
        pipeline = pipe.add_sink(2 * self._workers).build(num_threads=self._workers)
        with pipeline.auto_stop():
            yield from pipeline


def _rows_of_arrow(kind: Kind, count: int) -> Any:
    """`count` samples as a table of Hugging Face's datasets, which repeats the first 32."""
    import datasets

    samples = [kind.make(index) for index in range(32)]
    rows = [sample if isinstance(sample, dict) else {"x": sample} for sample in samples]
    columns = {name: [torch.as_tensor(row[name]).tolist() if name != "name" else row[name] for row in rows]
               for name in rows[0]}  # fmt: skip
    return datasets.Dataset.from_dict(columns).with_format("torch").select([index % 32 for index in range(count)])


@contextlib.contextmanager
def _loader(variant: str, kind: Kind, workers: int, batches: int) -> Iterator[Any]:
    samples: Any = Samples(kind.batch_size * batches, kind.make)
    if variant == SPDL:
        yield Threads(samples, kind.batch_size, workers)
        return
    make: Any = torch.utils.data.DataLoader
    options: dict[str, Any] = {} if variant == ALONE else {"num_workers": workers, "persistent_workers": True}
    if variant in (UPSTREAM, ARENA):
        make, options["transport"] = minidl.DataLoader, "arena" if variant == ARENA else "upstream"
    elif variant == OBSERVED:
        options["multiprocessing_context"] = minidl.observe(transport="arena")
    elif variant == RING:
        options["collate_fn"] = Ring(4)  # 2 of them are prefetched, one is collated, one is used
    elif variant == DATASETS:
        samples = _rows_of_arrow(kind, len(samples))
    made = make(samples, kind.batch_size, **options)
    try:
        yield made
    finally:
        if getattr(made, "_iterator", None) is not None:
            made._iterator._shutdown_workers()


# --- Measuring --------------------------------------------------------------------------------------------------------
def _epochs(variant: str, kind: Kind, workers: int, batches: int) -> Iterator[Epoch]:
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


def variants_for(kind: Kind) -> list[str]:
    """The loaders that are measured: those that are installed, and that the kind of batch allows."""
    one_tensor = not isinstance(kind.make(0), dict)
    return [
        variant
        for variant in AGAINST
        if (variant != RING or one_tensor)
        and (variant not in _NEEDS or importlib.util.find_spec(_NEEDS[variant]) is not None)
    ]


def bench_transports(rounds: int, length: float = 1.0, workers: tuple[int, ...] = (1, 2)) -> list[Row]:
    """Measure microseconds per batch of each loader, for each kind of batch and each number of workers.

    length: of an epoch, as a share of the kind's. extra: batches a second, speed in percent of that in the process
    itself, milliseconds to the first batch, medians of CPU microseconds per batch, and of their ratios.
    """
    for variant, package in _NEEDS.items():
        if importlib.util.find_spec(package) is None:
            print(f"left out: {variant}; `pip install {package}` brings it in", file=sys.stderr)
    return [
        row for name, kind in TRAVELLERS.items() for many in workers for row in _rows(name, kind, many, rounds, length)
    ]


def _rows(name: str, kind: Kind, workers: int, rounds: int, length: float) -> list[Row]:
    group, batches = f"{name}, {counted(workers, 'worker')}", max(1, round(kind.batches * length))
    variants = variants_for(kind)
    found: dict[str, list[Epoch]] = _in_turns(_epochs, variants, (kind, workers, batches), rounds, group)
    firsts = _in_turns(_firsts, variants, (kind, workers, batches), max(1, rounds // 3), f"{group}, first batch")
    walls = {variant: [epoch.wall for epoch in epochs] for variant, epochs in found.items()}
    extra = {}
    for variant, epochs in found.items():
        alone = median(100 * base / wall for base, wall in zip(walls[ALONE], walls[variant], strict=True))
        extra[variant] = {
            "batches/s": 1e6 / median(walls[variant]),
            "% of in-process": alone,
            "ms to first": median(firsts[variant]),
        } | extra_of(epochs, found.get(AGAINST[variant]))
    return rows_of(group, "µs/batch", walls, AGAINST, extra)


def _in_turns(work: Callable[..., Any], variants: list[str], args: tuple[Any, ...], rounds: int, what: str) -> Any:
    with contextlib.ExitStack() as stack:
        turns = {variant: stack.enter_context(Child(work, variant, *args)).ask for variant in variants}
        return take_turns(turns, rounds, f"transport: {what}")
