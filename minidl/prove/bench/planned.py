"""How well a plan predicts: each workload is recorded once, with two workers, and predicted and measured with others.

Interface: `bench_plan(quick)` -> rows, in which a prediction is compared with its measurement, and the fastest threads
with the fastest processes; the last group sums up: the errors' median and 90th percentile, how fast the recommended
setting is compared with the best measured one, and how many threads are in the range that is predicted for them.

Rules of use: a sample's cost is a sleep, CPU time that is burnt up to a number of ns, or a real JPEG. Predictions use
this machine's transport costs, which are measured first. Measured runs are not recorded.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

import minidl
from minidl.prediction import plan, read
from minidl.prove.bench.child import in_child
from minidl.prove.bench.loader import Samples, _picture, _record, epochs_of, serving
from minidl.prove.bench.pairs import Row
from minidl.speed.plan.loading import steady_rate
from minidl.speed.plan.predicted import Predicted
from minidl.speed.plan.settings import TRANSPORTS, LoaderSetting
from minidl.speed.transport_costs import Line, TransportCosts
from minidl.terminal import progress

WORKERS: Final = (0, 1, 2, 4, 8)
RECORDED: Final = 2
MS: Final = 1_000_000


# --- Workloads --------------------------------------------------------------------------------------------------------
def burn(ns: float) -> None:
    """Use so much CPU time in this thread."""
    until = time.thread_time_ns() + ns
    while time.thread_time_ns() < until:
        pass


@dataclass(frozen=True)
class Cost:
    """A sample that sleeps and computes so many ms, `slow` ms more once in `each`; shape: of its tensor."""

    sleeps: float = 0.0
    burns: float = 0.0
    slow: float = 0.0
    each: int = 40
    shape: tuple[int, ...] = (3, 32, 32)

    def __call__(self, index: int) -> torch.Tensor:
        burn(self.burns * MS)
        if wait := self.sleeps + self.slow * (index % self.each == self.each // 2):
            time.sleep(wait / 1000)
        return torch.zeros(self.shape)


class Stream(minidl.IterableDataset[Any]):
    """The same samples as a stream, of which each worker has its share."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self.count, self.make = count, make

    def __iter__(self) -> Iterator[Any]:
        info = minidl.get_worker_info()
        first, each = (0, 1) if info is None else (info.id, info.num_workers)
        return map(self.make, range(first, self.count, each))


@dataclass(frozen=True)
class Workload:
    """A program: samples, batches, and a training step that sleeps and burns so many ms."""

    make: Callable[[int], Any]
    batch_size: int = 4
    batches: int = 150
    sleeps: float = 1.0
    burns: float = 0.0
    in_order: bool = True
    stream: bool = False

    def loader(self, num_workers: Any, **options: Any) -> Any:
        count = self.batch_size * self.batches
        dataset = Stream(count, self.make) if self.stream else Samples(count, self.make)
        return minidl.DataLoader(dataset, self.batch_size, num_workers=num_workers, in_order=self.in_order, **options)

    def run(self, setting: LoaderSetting) -> list[int]:
        """Train for an epoch; return when each batch came, ns."""
        way = {"worker_method": "thread"} if setting.threads else {"transport": setting.transport}
        workers: dict[str, Any] = {"prefetch_factor": setting.prefetch_factor, **way}
        with self.loader(setting.num_workers, **workers if setting.num_workers else {}) as loader:
            return self.train(loader)

    def train(self, loader: Any) -> list[int]:
        """Train for an epoch; return when each batch came, ns."""
        torch.set_num_threads(1)
        came = []
        for _batch in loader:
            came.append(time.perf_counter_ns())
            if self.burns:
                burn(self.burns * MS)
            if self.sleeps:
                time.sleep(self.sleeps / 1000)
        return came


WORKLOADS: Final = {
    "waiting": Workload(Cost(sleeps=5)),
    "computing": Workload(Cost(burns=2)),
    "waiting and computing": Workload(Cost(sleeps=2, burns=1)),
    "one slow sample in 40": Workload(Cost(sleeps=2, slow=50), batches=200),
    "one slow sample in 40, not in order": Workload(Cost(sleeps=2, slow=50), batches=200, in_order=False),
    "large batches": Workload(Cost(sleeps=3, shape=(3, 512, 512)), batches=100, sleeps=3),
    "slow consumer": Workload(Cost(sleeps=4), sleeps=15),
    "consumer that computes": Workload(Cost(burns=2), sleeps=0, burns=6),
    "real JPEGs": Workload(_picture, 8, sleeps=3),
    "a stream": Workload(Cost(sleeps=3, burns=0.5), stream=True),
    "many tiny samples": Workload(_record, 64),
}


def workloads() -> dict[str, Workload]:
    """Those that can run here: JPEGs need Pillow."""
    left_out = set() if importlib.util.find_spec("PIL") else {"real JPEGs"}
    return {name: workload for name, workload in WORKLOADS.items() if name not in left_out}


# --- Measuring --------------------------------------------------------------------------------------------------------
def _rate(workload: Workload, setting: LoaderSetting) -> float:
    return steady_rate([in_child(workload.run, setting)], setting.capacity)


def _run_recorded(workload: Workload, setting: LoaderSetting, place: str) -> None:
    with minidl.trace(place, cpu_time=True):
        workload.run(setting)


def bench_plan(quick: bool) -> list[Row]:
    """Predict and measure each workload with each number of workers and transport.

    Values are batches/s as predicted, compared with the median of those measured. quick: measure once, not thrice.
    """
    costs = calibrated(rounds=3 if quick else 8)
    rows, errors, shares, held = [], [], [], []
    for name, workload in workloads().items():
        own, threads = _rows(name, workload, costs, rounds=1 if quick else 3)
        rows += [*own, *threads, _fastest(name, threads, own)]
        errors += [abs(row.values[0] / row.base[0] - 1) for row in own]
        held += [row.extra["low"] <= row.base[0] <= row.extra["high"] for row in threads]
        best = max(row.base[0] for row in own)
        shares.append(next(row.base[0] for row in own if row.extra["recommended"]) / best)
    summary = {"error, median": statistics.median(errors), "error, 90th percentile": float(np.percentile(errors, 90)),
               "recommended by the best, least": min(shares),
               "recommended within 10%, of all": float(np.mean([share >= 0.9 for share in shares])),
               "threads in their range, of all": float(np.mean(held))}  # fmt: skip
    return rows + [Row("all workloads", what, "share", (value,)) for what, value in summary.items()]


def _fastest(name: str, threads: list[Row], processes: list[Row]) -> Row:
    """How fast threads are, compared with processes, each with the number of workers that is best for them."""
    best, others = (max(row.base[0] for row in rows) for rows in (threads, processes))
    return Row(name, "best threads", "batches/s, measured", (best,), "best processes", (others,))


def _rows(name: str, workload: Workload, costs: TransportCosts, rounds: int) -> tuple[list[Row], list[Row]]:
    """Those of processes, and those of threads."""
    with tempfile.TemporaryDirectory(prefix="minidl-bench-") as place:
        progress(f"plan: {name}: recording")
        in_child(_run_recorded, workload, LoaderSetting(RECORDED), place + "/trace")
        recorded = read(minidl.read_trace(place + "/trace"))
        found = plan(recorded.trace, num_workers=WORKERS, transport=TRANSPORTS, transports=costs)
        threads = plan(recorded.trace, num_workers=WORKERS[1:], worker_method="thread", transports=costs)
    measured: dict[LoaderSetting, list[float]] = {}
    for count, one in itertools.product(range(rounds), [*found.predicted, *threads.predicted]):
        progress(f"plan: {name}: {one.setting.name}, round {count + 1} of {rounds}")
        measured.setdefault(one.setting, []).append(_rate(workload, one.setting))
    progress("")

    def row(one: Predicted) -> Row:
        rate = statistics.median(measured[one.setting])
        extra = {"measured": rate, "low": one.low, "high": one.high, "recommended": float(one is found.recommended)}
        return Row(name, one.setting.name, "batches/s, predicted", (one.by_s,), "measured", (rate,), extra)

    return [row(one) for one in found.predicted], [row(one) for one in threads.predicted]


# --- The costs of transports ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Same:
    """A sample that costs nothing: so many tensors of so many bytes, always the same."""

    tensors: int
    size: int

    def __call__(self, index: int) -> tuple[torch.Tensor, ...]:
        return (torch.from_numpy(np.zeros(self.size, np.uint8)),) * self.tensors


def calibrated(rounds: int = 8) -> TransportCosts:
    """Measure what a batch costs by each transport, in CPU time of a worker and of the loader."""
    lines: dict[str, tuple[Line, Line]] = {}
    size, large, many = 1 << 10, 1 << 22, 17
    for name in ("alone", *TRANSPORTS):
        progress(f"transport: calibrating {name}")
        kinds = _Same(1, size), _Same(1, large), _Same(many, size)
        one, larger, more = (np.array(in_child(_cpu_times, name, kind, rounds)) for kind in kinds)
        byte = (larger - one).clip(0) / (large - size)
        tensor = ((more - one) / (many - 1) - byte * size).clip(0)
        batch = (one - tensor - byte * size).clip(0)
        lines[name] = tuple(tuple(map(float, line)) for line in np.array([batch, tensor, byte]).T)  # type: ignore[assignment]
    progress("")
    return TransportCosts(lines, measured=True)


def _cpu_times(name: str, make: _Same, rounds: int) -> tuple[float, float]:
    """CPU ns of such a batch, of the worker (or, alone, of all) and of the loader."""
    batches = 200 if make.size < 1 << 20 else 50
    options: dict[str, Any] = {"num_workers": 1, "transport": name, "persistent_workers": True}
    options = {} if name == "alone" else options
    with serving(minidl.DataLoader(Samples(batches, make), 1, **options)) as loader:
        found = [next(epochs).extra for epochs in [epochs_of(loader)] for _ in range(rounds)]
    own, workers = (1000 * statistics.median(one[f"CPU µs, {who}"] for one in found) for who in ("loader", "workers"))
    return (own, 0.0) if name == "alone" else (workers, own)
