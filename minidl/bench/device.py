"""What the device stage reaches: copy bandwidth, copies hidden behind compute, what each stage of it spares the GPU.

Interface: `bench_device(rounds, simulate)`; `minidl bench --device` runs it. Needs an accelerator that torch can use;
`simulate` takes the same way without one, with small sizes, and every group of rows then says so: its figures are the
host's, and say nothing of any device. Figures that only a trace knows come from a traced epoch after the measured ones.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import minidl
from minidl.augment import Augment
from minidl.bench.pairs import Row, take_turns
from minidl.device import open_device
from minidl.streams import AcceleratorDevice
from minidl.tracing import events as ev
from minidl.tracing.device_use import device_use

MIB = 1 << 20

MEASURABLE = 20.0
"""ms of compute that are timed to know how much of it makes a step."""


@dataclass(frozen=True)
class Plan:
    """How much is measured. device: what DeviceLoader is given. sizes: MiB of a copied batch; copies: of each size.

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
        """Whether the device is a pretence."""
        return self.device == "simulated"

    def named(self, group: str) -> str:
        """The name of a group of rows."""
        return f"{group} (simulated)" if self.simulated else group


def plan(simulate: bool) -> Plan:
    """The plan for this machine. Raises LookupError where it has no accelerator and none is to be simulated."""
    if simulate:
        return Plan("simulated", sizes=(1,), copies=8, images=4, side=64, crop=48, steps=8, work=1.0, workers=1)
    if not torch.accelerator.is_available():
        raise LookupError(
            "bench --device: this machine has no accelerator that torch can use: `--device simulated` runs the same "
            "code on a pretence of one, which measures nothing of a device"
        )
    return Plan(str(torch.accelerator.current_accelerator()))


def bench_device(rounds: int, simulate: bool = False) -> list[Row]:
    """All rows. Raises LookupError where there is no accelerator, unless one is simulated."""
    mine = plan(simulate)
    print(", ".join(f"{name} {value}" for name, value in accelerator(mine).items()))
    rows = [row for size in mine.sizes for row in _copy_rows(mine, size, rounds)] + _step_rows(mine, rounds)
    return rows if mine.simulated else rows + cross_check(mine)


def _synchronize(plan: Plan) -> None:
    if not plan.simulated:
        torch.accelerator.synchronize()


# --- Copies alone -----------------------------------------------------------------------------------------------------
PLAIN, PLAIN_PAGEABLE, OURS, OURS_PAGEABLE = (
    "plain copy, pinned", "plain copy, pageable", "DeviceLoader, pinned", "DeviceLoader, pageable",
)  # fmt: skip


def _copy_rows(plan: Plan, size: int, rounds: int) -> list[Row]:
    """GB/s of each way to copy batches of `size` MiB; the best that there is, is a plain copy from pinned memory."""
    pageable = [torch.ones(size * MIB, dtype=torch.uint8) for _ in range(4)]
    pinned = pageable if plan.simulated else [batch.pin_memory() for batch in pageable]
    turns = {
        PLAIN: _plain(plan, pinned),
        OURS: _ours(plan, pinned),
        PLAIN_PAGEABLE: _plain(plan, pageable),
        OURS_PAGEABLE: _ours(plan, pageable),
    }
    group = plan.named(f"copies of {size} MiB")
    found = take_turns(turns, rounds, f"device: {group}")
    against = {OURS: PLAIN, PLAIN_PAGEABLE: PLAIN, OURS_PAGEABLE: PLAIN_PAGEABLE}
    return [
        Row(group, name, "GB/s", tuple(values), against.get(name, ""), tuple(found[against.get(name, name)]))
        for name, values in found.items()
    ]


def _plain(plan: Plan, batches: list[torch.Tensor]) -> Callable[[], float]:
    """Copies into memory that is there already, one behind the other, with nothing between them."""
    there = [torch.empty_like(batches[0], device=_where(plan)) for _ in range(2)]

    def copies() -> None:
        for number in range(plan.copies):
            there[number % 2].copy_(batches[number % len(batches)], non_blocking=True)

    return lambda: _rate(plan, copies, batches[0].nbytes)


def _ours(plan: Plan, batches: list[torch.Tensor]) -> Callable[[], float]:
    loader = minidl.DeviceLoader(_Cycle(batches, plan.copies), plan.device)

    def copies() -> None:
        for _ in loader:
            pass

    return lambda: _rate(plan, copies, batches[0].nbytes)


def _where(plan: Plan) -> torch.device:
    return open_device(plan.device).device


def _rate(plan: Plan, copies: Callable[[], None], size: int) -> float:
    _synchronize(plan)
    start = time.perf_counter()
    copies()
    _synchronize(plan)
    return plan.copies * size / (time.perf_counter() - start) / 1e9


@dataclass(frozen=True)
class _Cycle:
    """The same few batches, again and again."""

    batches: list[torch.Tensor]
    count: int

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.batches[number % len(self.batches)] for number in range(self.count))


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
    """Compute of a given length in the consumer's stream: the same product again and again."""

    def __init__(self, plan: Plan) -> None:
        side = 64 if plan.simulated else 2048
        self.factor = torch.ones(side, side, device=_where(plan)) / side
        self.times, turn = 1, _timed(plan, self)
        while (took := turn() * plan.steps) < MEASURABLE:
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
        pin_memory=name in (IN_STEP, ASIDE, BY_WORKERS) and not plan.simulated,
        collate_fn=_AugmentAll(plan.crop) if name == BY_WORKERS else None,
        persistent_workers=persistent,
        prefetch_factor=4,
    )


def _steps(plan: Plan, name: str, loader: Any, work: _Work) -> Callable[[], None]:
    """An epoch of the training loop that is fed this way."""
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
    """ms of a step, fed in each way. idle %: of its time, that in which no step computed. The rest: see `_told`."""
    work = _Work(plan)
    names = (COMPUTE, IN_STEP_PAGEABLE, IN_STEP, ASIDE_PAGEABLE, ASIDE, BY_WORKERS)
    loaders = {name: _loader(plan, name, True) for name in names if name != COMPUTE}
    turns = {name: _timed(plan, _steps(plan, name, loaders.get(name), work)) for name in names}
    group = plan.named(f"a step of {plan.images} images")
    try:
        found = take_turns(turns, rounds, f"device: {group}")
    finally:
        for loader in loaders.values():
            loader.close()
    rows = []
    for name in names:
        idle = (100 * (1 - alone / took) for alone, took in zip(found[COMPUTE], found[name], strict=True))
        extra = {} if name == COMPUTE else {"idle %": statistics.median(idle), **_told(plan, name, work)}
        against = "" if name == COMPUTE else COMPUTE
        rows.append(Row(group, name, "ms", tuple(found[name]), against, tuple(found[COMPUTE]), extra))
    return rows


def _timed(plan: Plan, epoch: Callable[[], Any]) -> Callable[[], float]:
    def turn() -> float:
        _synchronize(plan)
        start = time.perf_counter()
        epoch()
        _synchronize(plan)
        return (time.perf_counter() - start) * 1000 / plan.steps

    return turn


def _told(plan: Plan, name: str, work: _Work) -> dict[str, float]:
    """What a trace of one epoch tells: % of copy and transform hidden; a batch's ms and MiB, copied and pinned."""
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
    """Copies as our trace and as torch.profiler saw them, in one run, one by one; ns."""

    bytes: np.ndarray[Any, Any]
    ours: np.ndarray[Any, Any]
    theirs: np.ndarray[Any, Any]
    begins: np.ndarray[Any, Any]  # ours - theirs, both on CLOCK_MONOTONIC
    error: int  # of our clock, as the trace states it


def compare_with_profiler(plan: Plan, size: int, batches: int) -> Compared:
    """Trace and profile one iteration. Raises RuntimeError where they do not see the same copies."""
    from torch.profiler import ProfilerActivity, profile

    source = _Cycle([torch.ones(size * MIB, dtype=torch.uint8).pin_memory() for _ in range(4)], batches)
    work = _Work(plan)
    with tempfile.TemporaryDirectory(prefix="minidl-bench-") as place:
        with (
            profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler,
            minidl.trace(Path(place) / "trace"),
        ):
            for _ in minidl.DeviceLoader(source, plan.device):
                work()
            _synchronize(plan)
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
    """Begin (ns since 1970) and length (ns) of the profile's host-to-device copies of so many bytes, in order."""
    base = int(document.get("baseTimeNanoseconds", 0))
    found = [
        (base + round(event["ts"] * 1000), round(event["dur"] * 1000))
        for event in document["traceEvents"]
        if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"] and event["args"].get("bytes") == size
    ]
    return np.array(sorted(found), np.int64).reshape(-1, 2)


def cross_check(plan: Plan, size: int = 16, batches: int = 64) -> list[Row]:
    """Microseconds of each copy, by our clock and by the profiler's. begin off: how far our begins lie from theirs, the
    median taken away (what the two host clocks differ by) and the middle nine tenths' spread."""
    found = compare_with_profiler(plan, size, batches)
    ours, theirs = (tuple((values / 1000).tolist()) for values in (found.ours, found.theirs))
    off = (found.begins - np.median(found.begins)) / 1000
    low, high = np.percentile(off, (5, 95))
    extra = {"begin off µs": float(high - low), "clocks off µs": float(np.median(found.begins)) / 1000}
    group = f"each of {batches} copies of {size} MiB"
    return [
        Row(group, "by torch.profiler", "µs", theirs),
        Row(group, "by our trace", "µs", ours, "by torch.profiler", theirs, extra | {"error µs": found.error / 1000}),
    ]


def accelerator(plan: Plan) -> dict[str, str]:
    """What the figures are of: the device's name, and the driver's versions."""
    if plan.simulated:
        return {"device": "simulated"}
    device = open_device(plan.device)
    assert isinstance(device, AcceleratorDevice)
    name = getattr(device.module, "get_device_name", lambda of: device.name)(device.device)
    return {"device": str(name), "cuda": str(torch.version.cuda)}
