"""Cost of a batch: torch's loader, the one-page loader, ours, and ours while it is traced.

Interface: `bench_loader(rounds, length)`; `KINDS` are the batches, `VARIANTS` the loaders. Each loader has a process of
its own, keeps its workers, and runs an epoch in its turn; the first epoch does not count. Kinds that need Pillow are
left out if it is not installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

import minidl
from minidl import demo, mini
from minidl.prove.bench.child import children
from minidl.prove.bench.pairs import Measured, Row, compare
from minidl.tracefile.words import counted


# --- Batches ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Samples:
    """A map-style dataset: index -> make(index)."""

    count: int
    make: Callable[[int], Any]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@dataclass(frozen=True)
class Kind:
    """A kind of batch. batches: in an epoch. collate_fn: None = each library's default."""

    make: Callable[[int], Any]
    batch_size: int
    batches: int
    collate_fn: Callable[[list[Any]], Any] | None = None


def _itself(index: int) -> int:
    return index


def _zero(samples: list[Any]) -> int:
    return 0


def _picture(index: int) -> torch.Tensor:
    photographs = _photographs()
    return demo.augment(demo.decode(photographs[index % len(photographs)]))


@functools.cache
def _photographs() -> list[Path]:
    return sorted((Path(demo.__file__).parent / "photos").glob("*.jpg"))


def _record(index: int) -> dict[str, Any]:
    return {
        "image": torch.full((3, 8, 8), float(index)),
        "box": torch.arange(4) + index,
        "weights": torch.ones(16),
        "label": index % 10,
        "name": f"sample {index}",
    }


KINDS = {
    "empty": Kind(_itself, 1, 400, _zero),
    "tiny": Kind(_itself, 4, 400),
    "record": Kind(_record, 8, 100),
    "image": Kind(_picture, 8, 16),
}


# --- Loaders ----------------------------------------------------------------------------------------------------------
TORCH, MINI, PLAIN, ENDED, BATCHES, SAMPLES = (
    "torch", "minidl.mini", "minidl", "minidl, after a trace", "minidl, traced by batch", "minidl, traced by sample",
)  # fmt: skip
VARIANTS = {TORCH: "", MINI: TORCH, PLAIN: TORCH, ENDED: PLAIN, BATCHES: PLAIN, SAMPLES: PLAIN}
"""Each loader, and the one that it is compared with. The difference between ENDED and PLAIN is the noise."""


@contextlib.contextmanager
def _tracing(variant: str, directory: Path) -> Iterator[None]:
    if variant == ENDED:
        with minidl.trace(directory):
            list(minidl.DataLoader(range(2)))
    with contextlib.ExitStack() as stack:
        if variant in (BATCHES, SAMPLES):
            stack.enter_context(minidl.trace(directory, detail="batch" if variant == BATCHES else "sample"))
        yield


@contextlib.contextmanager
def serving(loader: Any) -> Iterator[Any]:
    """Yield a loader of any library; shut its workers down at the end."""
    try:
        yield loader
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()


def _loader(variant: str, kind: Kind, workers: int, batches: int) -> AbstractContextManager[Any]:
    makers: dict[str, Any] = {TORCH: torch.utils.data.DataLoader, MINI: mini.DataLoader}
    samples, options = Samples(kind.batch_size * batches, kind.make), {"collate_fn": kind.collate_fn}
    make = makers.get(variant, minidl.DataLoader)
    return serving(make(samples, kind.batch_size, num_workers=workers, persistent_workers=workers > 0, **options))


# --- Measuring --------------------------------------------------------------------------------------------------------
def _epochs(variant: str, kind: Kind, workers: int, batches: int, traces: Path) -> Iterator[Measured]:
    """Measure epochs of one loader, without end."""
    with _tracing(variant, traces / variant), _loader(variant, kind, workers, batches) as loader:
        yield from epochs_of(loader)


def epochs_of(loader: Any) -> Iterator[Measured]:
    """Measure epochs of a loader, without end; a first one, which starts the workers, does not count.

    Values are microseconds per batch: on the clock; extra: of CPU time in the loader's process and in all its workers.
    """
    _count(loader)
    pids = [process.pid for process in multiprocessing.active_children()]
    while True:
        start = time.perf_counter_ns(), time.process_time_ns(), _cpu_ns(pids)
        count = _count(loader)
        end = time.perf_counter_ns(), time.process_time_ns(), _cpu_ns(pids)
        wall, own, others = ((after - before) / 1000 / count for before, after in zip(start, end, strict=True))
        yield Measured(wall, {"CPU µs, loader": own, "CPU µs, workers": others}, cpu=own + others)


def _count(loader: Any) -> int:
    return sum(1 for _ in loader)


def _cpu_ns(pids: list[int | None]) -> int:
    """Return the CPU time of processes so far. clock_getcpuclockid(3) computes the same number of a process's clock."""
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in pids if pid is not None)


def bench_loader(rounds: int, length: float = 1.0, workers: tuple[int, ...] = (0, 1, 2)) -> list[Row]:
    """Measure microseconds per batch of each loader, for each kind of batch and each number of workers.

    length: of an epoch, as a share of the kind's. extra: the medians of CPU microseconds per batch in the loader's
    process and in the workers, of the ratios of their sums, and the events that a batch leaves in the trace.
    """
    kinds = {name: kind for name, kind in KINDS.items() if kind.make is not _picture or importlib.util.find_spec("PIL")}
    return [row for name, kind in kinds.items() for many in workers for row in _rows(name, kind, many, rounds, length)]


def _rows(name: str, kind: Kind, workers: int, rounds: int, length: float) -> list[Row]:
    group, batches = f"{name} batch, {counted(workers, 'worker')}", max(1, round(kind.batches * length))
    with tempfile.TemporaryDirectory(prefix="minidl-bench-") as place:
        with children(_epochs, VARIANTS, kind, workers, batches, Path(place)) as turns:
            rows = compare("loader", group, "µs/batch", turns, rounds, VARIANTS)
        served = batches * (rounds + 2)  # the first epoch, and the round that warms up
        traced = {name: {"events": len(minidl.read_trace(Path(place, name))) / served} for name in (BATCHES, SAMPLES)}
    return [replace(row, extra={**row.extra, **traced.get(row.name, {})}) for row in rows]
