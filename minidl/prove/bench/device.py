"""Performance of the device stage: bandwidth, copies hidden behind compute, time that each stage saves the GPU.

Interface: `bench_device(quick, simulate)`; `minidl bench --device` runs it. Needs an accelerator that torch can use.
`simulate` runs the same code on `sim`, with small sizes: each group of rows is marked as simulated, and its figures
are the host's. Figures that only a trace has come from a traced epoch after the measured ones.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

import minidl
from minidl.device import sim
from minidl.device.augment import Augment
from minidl.device.loader import open_device
from minidl.device.streams import AcceleratorDevice
from minidl.prove.bench.loader import epochs_of
from minidl.prove.bench.pairs import Measured, Row, compare, rows_of, take_turns
from minidl.speed.device_use import device_use
from minidl.tracefile import events as ev

MIB = 1 << 20

MEASURABLE = 20.0
"""ms of compute that are timed to choose the repetitions of a step."""


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurements. device: DeviceLoader's argument. sizes: MiB of a copied batch; copies: of each size.

    images, side, crop: of a batch of the training step; steps: of an epoch; work: ms of compute in a step.
    """

    device: str
    sizes: tuple[int, ...] = (1, 16, 64)
    copies: int = 64
    images: int = 128
    side: int = 224
    crop: int = 192
    steps: int = 60
    work: float = 12.0
    workers: int = 6

    @property
    def simulated(self) -> bool:
        return torch.device(self.device).type == sim.NAME

    def named(self, group: str) -> str:
        return f"{group} (simulated)" if self.simulated else group


QUICK: dict[str, Any] = {"sizes": (16,), "copies": 16, "steps": 12}
"""What `--quick` changes of a real device's plan; a simulated one's is small already."""


def plan(simulate: bool, quick: bool = False) -> Plan:
    """Return the plan for this machine; quick: fewer sizes, copies and steps.

    Raises LookupError without an accelerator, unless one is simulated.
    """
    if simulate:
        sim.use()
        return Plan(sim.NAME, sizes=(1,), copies=8, images=4, side=64, crop=48, steps=8, work=1.0, workers=1)
    if not torch.accelerator.is_available():
        raise LookupError(
            "bench --device: this machine has no accelerator that torch can use: `--device sim` runs the same "
            "code on a simulated one, and measures the host only"
        )
    return Plan(str(torch.accelerator.current_accelerator()), **(QUICK if quick else {}))


def bench_device(quick: bool, simulate: bool = False) -> list[Row]:
    """Return all rows. quick: a smaller plan, and 3 rounds instead of 9.

    Raises LookupError without an accelerator, unless one is simulated.
    """
    mine, rounds = plan(simulate, quick), 3 if quick else 9
    print(", ".join(f"{name} {value}" for name, value in accelerator(mine).items()))
    rows = [row for size in mine.sizes for row in _copy_rows(mine, size, rounds)]
    rows += _way_rows(mine, rounds) + _step_rows(mine, rounds)
    return rows if mine.simulated else rows + cross_check(mine)


def _timed(work: Callable[[], Any], figure: Callable[[float], float]) -> Callable[[], Measured]:
    """Return a turn that does the work and returns the figure of its seconds."""

    def turn() -> Measured:
        torch.accelerator.synchronize()
        start = time.perf_counter()
        work()
        torch.accelerator.synchronize()
        return Measured(figure(time.perf_counter() - start))

    return turn


# --- Copies alone -----------------------------------------------------------------------------------------------------
PLAIN, PLAIN_PAGEABLE, OURS, OURS_PAGEABLE = (
    "plain copy, pinned", "plain copy, pageable", "DeviceLoader, pinned", "DeviceLoader, pageable",
)  # fmt: skip


def _copy_rows(plan: Plan, size: int, rounds: int) -> list[Row]:
    """Measure the GB/s of each way to copy batches of `size` MiB; a plain copy from pinned memory is the limit."""
    pageable = [torch.ones(size * MIB, dtype=torch.uint8) for _ in range(4)]
    pinned = [batch.pin_memory() for batch in pageable]
    copies = {
        PLAIN: _plain(plan, pinned),
        OURS: _ours(plan, pinned),
        PLAIN_PAGEABLE: _plain(plan, pageable),
        OURS_PAGEABLE: _ours(plan, pageable),
    }
    total = plan.copies * size * MIB / 1e9
    turns = {name: _timed(copy, lambda seconds: total / seconds) for name, copy in copies.items()}
    against = {OURS: PLAIN, PLAIN_PAGEABLE: PLAIN, OURS_PAGEABLE: PLAIN_PAGEABLE}
    return compare("device", plan.named(f"copies of {size} MiB"), "GB/s", turns, rounds, against)


def _plain(plan: Plan, batches: list[torch.Tensor]) -> Callable[[], None]:
    """Copy into allocated memory, one batch directly after the other."""
    there = [torch.empty_like(batches[0], device=_where(plan)) for _ in range(2)]

    def copy() -> None:
        for number in range(plan.copies):
            there[number % 2].copy_(batches[number % len(batches)], non_blocking=True)

    return copy


def _ours(plan: Plan, batches: list[torch.Tensor]) -> Callable[[], object]:
    loader = minidl.DeviceLoader(_Cycle(batches, plan.copies), plan.device)
    return lambda: deque(loader, maxlen=0)


def _where(plan: Plan) -> torch.device:
    return open_device(plan.device).device


@dataclass(frozen=True)
class _Cycle:
    """An iterable that repeats a few batches."""

    batches: list[torch.Tensor]
    count: int

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.batches[number % len(self.batches)] for number in range(self.count))


# --- From the workers to the device -----------------------------------------------------------------------------------
BY_TORCH, BY_UPSTREAM, BY_ARENA = (
    "torch, pin thread, copied by the loop", "minidl, transport upstream, pin thread, DeviceLoader",
    "minidl, transport arena, page-locked, DeviceLoader",
)  # fmt: skip
"""The ways of a batch, all with pin_memory=True."""


@dataclass(frozen=True)
class _There:
    """The batches, moved if they are not on the device yet; the device's work has ended when they end."""

    batches: Iterable[torch.Tensor]
    where: torch.device

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self.batches:
            yield batch.to(self.where, non_blocking=True)
        torch.accelerator.synchronize()


def _way_rows(plan: Plan, rounds: int) -> list[Row]:
    """Measure the GB/s of image batches from the dataset, which has them, to the device.

    extra: CPU seconds per GB of this process and its workers. A simulated device's own work is part of it.
    """
    images = _Images(plan.images * plan.steps, plan.side)
    options: dict[str, Any] = {"num_workers": plan.workers, "pin_memory": True, "persistent_workers": True}
    plain = torch.utils.data.DataLoader(images, plan.images, **options)
    ours: dict[str, minidl.DataLoader[Any]] = {
        BY_UPSTREAM: minidl.DataLoader(images, plan.images, transport="upstream", **options),
        BY_ARENA: minidl.DataLoader(images, plan.images, transport="arena", **options),
    }
    staged = {name: minidl.DeviceLoader(loader, plan.device) for name, loader in ours.items()}
    ways: dict[str, Iterable[torch.Tensor]] = {BY_TORCH: plain, **staged}
    group, gb = plan.named(f"{plan.images} images to the device"), plan.images * 3 * plan.side**2 / 1e9

    def reading(epochs: Iterator[Measured]) -> Measured:
        epoch = next(epochs)
        return Measured(1e6 * gb / epoch.value, {"CPU s/GB": epoch.cpu / 1e6 / gb})

    try:
        turns = {name: functools.partial(reading, epochs_of(_There(way, _where(plan)))) for name, way in ways.items()}
        return compare("device", group, "GB/s", turns, rounds, dict.fromkeys(ours, BY_TORCH))
    finally:
        for each in staged.values():
            each.close()
        if plain._iterator is not None:
            plain._iterator._shutdown_workers()  # type: ignore[attr-defined]


# --- A training step --------------------------------------------------------------------------------------------------
COMPUTE, IN_STEP_PAGEABLE, IN_STEP, ASIDE_PAGEABLE, ASIDE, BY_WORKERS = (
    "compute alone", "copied in the step, pageable", "copied in the step, pinned", "DeviceLoader, pageable",
    "DeviceLoader, pinned", "DeviceLoader, augmented by workers",
)  # fmt: skip
"""The ways to feed a step. All but the last augment on the device."""


class _Images(minidl.Dataset[torch.Tensor]):
    """Decoded images, uint8 (side, side, 3), from a small store; index -> image."""

    def __init__(self, count: int, side: int) -> None:
        self.count = count
        self.store = torch.randint(0, 256, (64, side, side, 3), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.store[index % len(self.store)]


class _AugmentAll:
    """Collates, and augments in the worker."""

    def __init__(self, crop: int) -> None:
        self.augment = Augment(crop)

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        return minidl.default_collate(list(self.augment(torch.stack(samples))))


class _Work:
    """Compute of a given length in the consumer's stream: a repeated matrix product."""

    def __init__(self, plan: Plan) -> None:
        side = 64 if plan.simulated else 2048
        self.factor = torch.ones(side, side, device=_where(plan)) / side
        self.times, turn = 1, _timed(self, lambda seconds: 1000 * seconds)
        while (took := turn().value) < MEASURABLE:
            self.times *= 2
        self.times = max(1, round(self.times * plan.work / took))

    def __call__(self) -> torch.Tensor:
        product = self.factor
        for _ in range(self.times):
            product = product @ self.factor
        return product


def _loader(plan: Plan, name: str, persistent: bool) -> minidl.DataLoader[Any]:
    return minidl.DataLoader(
        _Images(plan.images * plan.steps, plan.side),
        plan.images,
        num_workers=plan.workers,
        pin_memory=name in (IN_STEP, ASIDE, BY_WORKERS),
        collate_fn=_AugmentAll(plan.crop) if name == BY_WORKERS else None,
        persistent_workers=persistent,
        prefetch_factor=4,
    )


def _steps(plan: Plan, name: str, loader: Any, work: _Work) -> Callable[[], None]:
    """Return an epoch of the training loop that is fed in this way."""
    augment = Augment(plan.crop)

    def train(batches: Iterable[Any], prepare: Callable[[Any], Any]) -> None:
        for batch in batches:
            prepare(batch)
            with minidl.span("compute", device=plan.device):
                work()

    if name == COMPUTE:
        return lambda: train(range(plan.steps), lambda batch: batch)
    if name in (IN_STEP, IN_STEP_PAGEABLE):
        where = _where(plan)
        return lambda: train(loader, lambda batch: augment(batch.to(where, non_blocking=True)))
    there = minidl.DeviceLoader(loader, plan.device, transform=None if name == BY_WORKERS else augment)
    return lambda: train(there, lambda batch: batch)


def _step_rows(plan: Plan, rounds: int) -> list[Row]:
    """Measure the ms of a step, fed in each way. idle %: share of its time without compute. The rest: see `_traced`."""
    work = _Work(plan)
    names = (COMPUTE, IN_STEP_PAGEABLE, IN_STEP, ASIDE_PAGEABLE, ASIDE, BY_WORKERS)
    loaders = {name: _loader(plan, name, True) for name in names if name != COMPUTE}
    epochs = {name: _steps(plan, name, loaders.get(name), work) for name in names}
    turns = {name: _timed(epoch, lambda seconds: 1000 * seconds / plan.steps) for name, epoch in epochs.items()}
    group = plan.named(f"a step of {plan.images} images")
    try:
        found = take_turns(turns, rounds, f"device: {group}")
    finally:
        for loader in loaders.values():
            loader.close()
    extra = {}
    for name in loaders:
        idle = (100 * (1 - alone.value / fed.value) for alone, fed in zip(found[COMPUTE], found[name], strict=True))
        extra[name] = {"idle %": statistics.median(idle), **_traced(plan, name, work)}
    return rows_of(group, "ms", found, dict.fromkeys(loaders, COMPUTE), extra)


def _traced(plan: Plan, name: str, work: _Work) -> dict[str, float]:
    """Trace an epoch; return the % of copy and transform hidden, and a batch's ms and MiB, copied and pinned."""
    with tempfile.TemporaryDirectory(prefix="minidl-bench-") as place:
        directory = Path(place) / "trace"
        with minidl.trace(directory, detail="batch"), _loader(plan, name, False) as loader:
            _steps(plan, name, loader, work)()
        trace = minidl.read_trace(directory)
    spans = trace.spans()
    pins = spans[spans["code"] == ev.PIN[0]]
    out: dict[str, float] = {}
    (number,) = np.unique(spans["loader"][spans["code"] == ev.NEXT[0]]).tolist()
    use = device_use(trace, number, spans)
    if use is not None:
        out |= {"hidden %": 100 * use.hidden_share, "copy ms": use.copy / use.batches / 1e6}
        out |= {"transform ms": use.transform / use.batches / 1e6, "MiB": use.bytes / use.batches / MIB}
        out |= {"clock error µs": use.error / 1e3}
    if len(pins):
        out |= {"pin ms": float(np.median(pins["end"] - pins["begin"])) / 1e6, "pin MiB": pins["ex"].mean() / MIB}
    return out


# --- Against torch's profiler -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Compared:
    """Each copy of one run, as our trace and as torch.profiler recorded it; ns."""

    bytes: np.ndarray[Any, Any]
    ours: np.ndarray[Any, Any]
    theirs: np.ndarray[Any, Any]
    begins: np.ndarray[Any, Any]  # ours - theirs, both on CLOCK_MONOTONIC
    error: int  # of our clock, as the trace states it


def compare_with_profiler(plan: Plan, size: int, batches: int) -> Compared:
    """Trace and profile one iteration. Raises RuntimeError if the two have not the same copies."""
    from torch.profiler import ProfilerActivity, profile

    source = _Cycle([torch.ones(size * MIB, dtype=torch.uint8).pin_memory() for _ in range(4)], batches)
    work = _Work(plan)
    with tempfile.TemporaryDirectory(prefix="minidl-bench-") as place:
        with (
            profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler,
            minidl.trace(Path(place) / "trace"),
        ):
            for _ in minidl.DeviceLoader(source, plan.device):
                work()
            torch.accelerator.synchronize()
        profiler.export_chrome_trace(str(Path(place) / "profile.json"))
        theirs = _memcpys(json.loads((Path(place) / "profile.json").read_text()), size * MIB)
        trace = minidl.read_trace(Path(place) / "trace")
    spans = trace.spans()
    ours = spans[(spans["code"] == ev.COPY[0]) & (spans["end"] >= 0)]
    if not len(ours) == len(theirs) == batches:
        raise RuntimeError(f"{batches} batches: {len(ours)} copies in our trace, {len(theirs)} in torch.profiler's")
    to_monotonic = trace.manifest["realtime_ns"] - trace.manifest["monotonic_ns"]
    return Compared(
        bytes=ours["bx"],
        ours=ours["end"] - ours["begin"],
        theirs=theirs[:, 1],
        begins=ours["begin"] - (theirs[:, 0] - to_monotonic),
        error=int(trace.select("clock_calibration")["y"].max()),
    )


def _memcpys(document: dict[str, Any], size: int) -> np.ndarray[Any, Any]:
    """Return begin (ns since 1970) and length (ns) of a profile's host-to-device copies of `size` bytes, in order."""
    base = int(document.get("baseTimeNanoseconds", 0))
    found = [
        (base + round(event["ts"] * 1000), round(event["dur"] * 1000))
        for event in document["traceEvents"]
        if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"] and event["args"].get("bytes") == size
    ]
    return np.array(sorted(found), np.int64).reshape(-1, 2)


def cross_check(plan: Plan, size: int = 16, batches: int = 64) -> list[Row]:
    """Return the microseconds of each copy, by our clock and by the profiler's.

    clocks off: the median of our begins minus theirs, which is the difference of the host clocks. begin off: the range
    of the middle nine tenths of these differences.
    """
    found = compare_with_profiler(plan, size, batches)
    ours, theirs = ([Measured(ns / 1000) for ns in values.tolist()] for values in (found.ours, found.theirs))
    off = (found.begins - np.median(found.begins)) / 1000
    low, high = np.percentile(off, (5, 95))
    extra = {"begin off µs": float(high - low), "clocks off µs": float(np.median(found.begins)) / 1000}
    values, extra["error µs"] = {"by torch.profiler": theirs, "by our trace": ours}, found.error / 1000
    group = f"each of {batches} copies of {size} MiB"
    return rows_of(group, "µs", values, {"by our trace": "by torch.profiler"}, {"by our trace": extra})


def accelerator(plan: Plan) -> dict[str, str]:
    """Return the measured device's name, and CUDA's version."""
    device = open_device(plan.device)
    assert isinstance(device, AcceleratorDevice)
    name = getattr(device.module, "get_device_name", lambda of: device.name)(device.device)
    return {"device": str(name)} | ({} if plan.simulated else {"cuda": str(torch.version.cuda)})
