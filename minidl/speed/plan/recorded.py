"""What a recording tells of the costs of its steps: for each batch what needs a CPU, and what waits without one.

Interface: `read(trace)` -> `Recorded`; `Recorded.costs(setting)` are the `Costs` of another setting.

Rules of use: of a step, its CPU time needs a CPU, and the rest it waited. The time in which it was ready and had no CPU
counts as a wait if the steps hardly compute (the system took that long to wake them); otherwise it is left out, since
sharing CPUs makes it again. Steps that the recording lacks have the median of those that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minidl.speed.cpu_use import cpus_of
from minidl.speed.plan.loading import CPU, STEPS, WAIT, Costs, Parts, load, steady_rate
from minidl.speed.plan.machine import Work
from minidl.speed.plan.settings import LoaderSetting, PlanError
from minidl.speed.side import groups
from minidl.speed.transport_costs import TransportCosts, transport_costs
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Floats, Ints, Rows
from minidl.tracefile.batches import are_batches, keys_at, latest
from minidl.tracefile.loaders import only
from minidl.tracefile.spans import durations, total
from minidl.tracefile.words import and_joined, counted

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

FEWEST: Final = 20
"""Batches of a recording from which something can be predicted."""

LEAST_RESIZED: Final = 5
"""Batches of another size that the recorded samples must make."""

UNEQUAL: Final = 1.5
"""An iterable dataset whose busiest worker has so many times the mean of batches cannot be shared by another number."""

MOST: Final = 1000
"""Batches of a simulated epoch."""

OTHERS_MATTER: Final = 0.05
"""The share of the steps' time without a CPU from which other programs are looked for."""

COMPUTES: Final = 0.2
"""The share of the steps' time that is CPU time from which waits for a CPU are due to others that compute; with less,
they are what it takes to wake a thread."""

HOPS: Final = {"multiprocessing": (250_000.0, 60_000.0, 80_000.0), "thread": (50_000.0, 0.0, 50_000.0)}
"""ns that a message travels, see `Costs.hops`: through a feeder thread and a pipe, and until its reader wakes."""

COLD: Final = 0.5
"""A first batch of a worker that takes longer than others by a larger share of their time warms the worker up."""

_UNSEEN_DEVICE: Final = (
    "the device's own time is not recorded: if the loop runs ahead of the device, it limits sooner than is predicted; "
    'minidl.span("step", device=...) around the step records it'
)

START: Final = {"multiprocessing": (8e6, 15e6), "thread": (2e5, 1e5)}
"""CPU ns to start a worker, a process by fork, of the loader and of the worker, if the recording has started none."""


# --- Parts of a step --------------------------------------------------------------------------------------------------
def at_once(parts: Parts) -> Parts:
    """These parts without the waits."""
    return np.stack([parts[CPU], np.zeros_like(parts[WAIT])])


def plus(parts: Parts, cpu: Floats | float) -> Parts:
    """These parts with more CPU time, or less: at least a tenth of what it was."""
    return np.stack([np.maximum(parts[CPU] / 10, parts[CPU] + cpu), parts[WAIT]])


def _resized(costs: Costs, by: float) -> Costs:
    """The costs of batches that are `by` times as large: the same samples, joined or divided in their order."""

    def cut(parts: Parts) -> Parts:
        edges = np.arange(max(1, int(parts.shape[1] / by)) + 1) * by
        sums = np.pad(np.cumsum(parts, axis=1), ((0, 0), (1, 0)))
        return np.stack([np.diff(np.interp(edges, np.arange(len(row)), row)) for row in sums])

    steps: dict[str, Any] = {name: cut(getattr(costs, name)) for name in STEPS}
    draw, sizes = (np.resize(one, steps["fetch"].shape[1]) for one in (costs.draw * by, costs.sizes * by))
    return replace(costs, **steps, draw=draw, sizes=sizes.astype(np.int64), samples=costs.samples * by)


@dataclass(frozen=True)
class Recorded:
    """The costs that one recording shows. base: its own setting; rate: its batches/s in the steady state.

    steps: the costs as they were recorded. tensors: of a batch. worker: what a worker's thread does beside a fetch, ns;
    epoch: batches of an epoch; shutdown: ns; slower: by what share CPU time grows with each CPU more that is in use;
    held: the share of CPU time that holds the interpreter's lock, None = unknown; notes: what it cannot tell, in words.
    """

    trace: Trace
    params: dict[str, Any]
    base: LoaderSetting
    rate: float
    steps: Costs
    tensors: float
    worker: float
    epoch: int
    shutdown: float
    transports: TransportCosts
    slower: float = 0.0
    held: float | None = None
    notes: list[str] = field(default_factory=list)

    def larger(self, setting: LoaderSetting) -> float:
        """How many times as large the batches of this setting are."""
        return setting.batch_size / self.steps.samples if setting.batch_size else 1.0

    def order(self, setting: LoaderSetting) -> Ints:
        """The batches of a simulated epoch: as recorded, again from the first if there are few."""
        recorded = len(self.steps.sizes)
        there = int(recorded / max(1.0, self.larger(setting)))
        if there < LEAST_RESIZED:
            samples = round(recorded * self.steps.samples)
            raise PlanError(f"batch_size={setting.batch_size}: the recording has {samples} samples, and "
                            f"{LEAST_RESIZED} such batches are needed: record a longer run")  # fmt: skip
        return np.arange(max(min(there, MOST), 16 * setting.capacity, 10 * FEWEST)) % there

    def costs(self, setting: LoaderSetting) -> Costs:
        """What each batch costs with this setting. Raises PlanError for a step that was not recorded."""
        if setting.pin_memory and not self.base.pin_memory:
            raise PlanError(f"{self.trace.path}: no batch was pinned in the recording: record with pin_memory=True")
        steps, had, gets = self.steps, self.base.way, setting.way
        crowd = self._slowdown(setting) / self._slowdown(self.base)
        fetch = np.stack([steps.fetch[CPU] * crowd + self.worker, steps.fetch[WAIT] - steps.exclusive])
        send, read, step = steps.send, steps.read, steps.step * setting.consumer
        fetch = fetch * setting.samples + send * (gets == "alone")
        if gets != had:
            # Upstream's threads, the feeder and the one that sends descriptors, wait for a computing worker's GIL.
            # What a transport costs the loader beside reading is giving the memory back, while the loop goes on.
            in_worker, in_loader = (self._cpu(who, gets) - self._cpu(who, had) for who in (0, 1))
            fetch, send, kept = plus(fetch, in_worker), at_once(send), at_once(read)
            read = plus(kept, in_loader)
            step = plus(step, float(np.mean(in_loader - (read - kept)[CPU])))
        method, start = setting.worker_method, steps.start
        if setting.threads != self.base.threads:
            start = START[method][0], Work(START[method][1])
        costs = replace(
            steps, fetch=fetch, send=send, read=read, step=step, exclusive=steps.exclusive * setting.samples,
            start=(0.0, Work(0.0)) if setting.persistent_workers else start, hops=HOPS[method],
            held=(self.held or 0.0) * setting.threads,
        )  # fmt: skip
        return costs if self.larger(setting) == 1 else _resized(costs, self.larger(setting))

    def _cpu(self, who: int, way: str) -> Floats:
        """CPU time of a way of batches, of the worker (who=0) or of the loader (1)."""
        return self.transports.cpu(who, way, self.tensors, self.steps.sizes)

    def _slowdown(self, setting: LoaderSetting) -> float:
        return 1 + self.slower * (max(1.0, min(setting.num_workers, setting.cpus)) - 1)


# --- From a trace -----------------------------------------------------------------------------------------------------
def read(trace: Trace, dataloader: str | None = None) -> Recorded:
    """Return what the trace's loader with the most batches cost. Raises PlanError if that is not enough to predict."""
    trace = only(trace, dataloader)
    if "planned" in trace.manifest:
        raise PlanError(f"{trace.path} is simulated by minidl plan: give the recording that it was made from")
    return costs_of(trace, *groups(trace)[0])


def costs_of(trace: Trace, numbers: tuple[int, ...], params: dict[str, Any]) -> Recorded:
    """Return what these iterators of one DataLoader cost. Raises PlanError if that is not enough to predict."""
    reader = _CostsReader(trace, numbers, params)
    recorded = reader.recorded()
    others = _others(recorded) if reader.computes and reader.without_cpu else 0.0
    return replace(recorded, steps=replace(recorded.steps, others=others))


class _CostsReader:
    """Reads the costs of the iterators `numbers`, whose parameters are `params`."""

    def __init__(self, trace: Trace, numbers: tuple[int, ...], params: dict[str, Any]) -> None:
        self.trace, self.params = trace, params
        begin = max(trace.whole_from(number) for number in numbers)
        end = min(trace.whole_until(number) for number in numbers)
        events = trace.events[np.isin(trace.events["loader"], numbers)]
        self.events = events[(events["time"] >= begin) & (events["time"] <= end)]
        spans = trace.spans()
        mine = np.isin(spans["loader"], numbers) & (spans["end"] >= 0)
        self.spans = spans[mine & (spans["begin"] >= begin) & (spans["end"] <= end)]
        self.base = LoaderSetting(
            num_workers=int(params.get("num_workers") or 0),
            prefetch_factor=int(params.get("prefetch_factor") or 2),
            transport="arena" if params.get("transport") == "arena" else "upstream",
            in_order=params.get("in_order") is not False,
            persistent_workers=bool(params.get("persistent_workers")),
            pin_memory=bool(len(self.of(ev.PIN))),
            worker_method="thread" if params.get("transport") == "thread" else "multiprocessing",
            cpus=cpus_of(trace.manifest) or 1.0,
        )
        fetches = self.of(ev.FETCH)
        fetches = fetches[fetches["ex"] == ev.Outcome.DATA]
        self.keys, first = np.unique(self.keys_of(fetches), return_index=True)
        self.fetches = fetches[first]
        steps = self.of(ev.CONSUMER)
        self.trained = steps[steps["task"] >= 0]
        self._refuse()
        rows = np.concatenate([self.fetches, self.trained])
        self.computes, self.without_cpu = (
            rows[name].sum() >= share * total(rows) for name, share in (("cpu", COMPUTES), ("cpu_wait", OTHERS_MATTER))
        )

    def of(self, *pairs: tuple[int, int]) -> Rows:
        rows: Rows = self.spans[np.isin(self.spans["code"], [pair[0] for pair in pairs])]
        return rows

    def keys_of(self, rows: Rows, time: str = "begin") -> Ints:
        return keys_at(self.trace.events, rows, rows[time])

    def _refuse(self) -> None:
        path, unseen = self.trace.path, self.params.get("unseen")
        if isinstance(unseen, list) and "next" in unseen:
            raise PlanError(f"{path} does not show when the loop waits: an older minidl observed a loader with pinned "
                            f"memory: record it again")  # fmt: skip
        count = min(len(self.keys), len(self.trained))
        if count < FEWEST:
            lost = sum(process.lost for process in self.trace.processes)
            why = f"; {counted(lost, 'event')} are lost: record with minidl run --full" if lost else ""
            raise PlanError(f"{path} shows {counted(count, 'batch', 'batches')} from begin to end, at least {FEWEST} "
                            f"are needed: record a longer run{why}")  # fmt: skip
        shares = np.bincount(self.fetches["worker"] + 1, minlength=self.base.num_workers + 1)[1:]
        if self.params.get("dataset_kind") == "iterable" and max(shares, default=0) > UNEQUAL * np.mean(shares):
            raise PlanError(f"{path}: the workers had {and_joined([*map(str, shares)])} batches: the dataset is "
                            f"iterable and shares its samples unequally. The run has {self._rate():.3g} batches/s, and "
                            f"tells nothing about other numbers of workers: record each that you compare")  # fmt: skip
        if not self.fetches["cpu"].any():
            raise PlanError(f"{path} has no CPU times, so it does not tell which steps need a CPU: it shows "
                            f"{self._rate():.3g} batches/s with {counted(self.base.num_workers, 'worker')}, and "
                            f"nothing about other settings. Record it with minidl run --cpu-time on")  # fmt: skip

    def _rate(self) -> float:
        rows = self.events[are_batches(self.events)]
        epochs, times = self.keys_of(rows, "time") >> 31, rows["time"].astype(float)
        return steady_rate([times[epochs == epoch] for epoch in np.unique(epochs)], self.base.capacity)

    def aligned(self, rows: Rows, values: Floats) -> Floats:
        """A value for each batch: of the rows with its key; the median where there is none, 0 without any row."""
        keys = self.keys_of(rows)
        known = np.isin(keys, self.keys)
        at = np.searchsorted(self.keys, keys[known])
        out = np.full(len(self.keys), np.median(values) if len(values) else 0.0)
        out[at] = 0.0
        np.add.at(out, at, values[known])
        return out

    def split(self, rows: Rows) -> Parts:
        """The CPU time of spans, and their waits. A span without CPU time computes as much as others of its kind."""
        took, cpu = durations(rows).astype(float), rows["cpu"].astype(float)
        known = cpu > 0
        share = cpu[known].sum() / max(1.0, took[known].sum()) if known.any() else 1.0
        cpu = np.where(known, cpu, took * share)
        return np.stack([cpu, np.maximum(0.0, took - cpu - rows["cpu_wait"] * self.computes)])

    def parts(self, *pairs: tuple[int, int]) -> Parts:
        """The CPU time and waits of these spans, for each batch."""
        out = np.zeros((2, len(self.keys)))
        for rows in map(self.of, pairs):
            out += [self.aligned(rows, values) for values in self.split(rows)]
        return out

    def _step(self) -> Parts:
        """A step of the training loop takes at least as long as the device computes, though the loop may run ahead.

        The first one, which warms up, counts as an ordinary one.
        """
        step, device = self.split(self.trained), durations(self.of(ev.DEVICE_COMPUTE))
        least = float(np.median(device)) if len(device) else 0.0
        step[WAIT] = np.maximum(step[WAIT], least - step[CPU])
        step[:, 0] = np.minimum(step[:, 0], np.median(step, axis=1))
        return step

    def recorded(self) -> Recorded:
        draws, rebuilt = self.of(ev.SAMPLER_NEXT), self.of(ev.RESULT_REBUILD)
        fetch, warm = self._warmed(plus(self.split(self.fetches), -self._recording()))
        send = self.parts(ev.RESULT_PICKLE, ev.RESULT_WRITE)
        shutdown = durations(self.of(ev.SHUTDOWN))
        draw = self.aligned(draws, durations(draws).astype(float))
        free_threaded = str(self.trace.manifest.get("versions", {}).get("python")).endswith("t")
        uses_device = len(self.of(ev.H2D, ev.COPY, ev.TO_DEVICE, ev.PIN)) and not len(self.of(ev.DEVICE_COMPUTE))
        steps = Costs(
            draw=draw,
            fetch=fetch,
            send=send,
            read=self.parts(ev.RESULT_REBUILD),
            pin=self.parts(ev.PIN),
            step=self._step(),
            sizes=self._sizes(),
            own=max(0.0, self._own() - float(np.median(draw))),
            start=self._start(warm),
            samples=float(self.fetches["bx"].mean()) or 1.0,
        )
        return Recorded(
            trace=self.trace,
            params=self.params,
            base=self.base,
            rate=self._rate(),
            steps=steps,
            tensors=float(rebuilt["ex"].mean()) if len(rebuilt) else 1.0,
            worker=self._beside_fetches(float(np.median(send.sum(axis=0))) if self.base.transport == "arena" else 0.0),
            epoch=max(1, len(self.trained) // max(1, int(np.count_nonzero(self.events["code"] == ev.EPOCH[0])))),
            shutdown=float(shutdown.mean()) if len(shutdown) else 0.0,
            transports=transport_costs(self.trace.manifest),
            held=0.0 if free_threaded or self.base.threads else None,
            notes=[_UNSEEN_DEVICE] * bool(uses_device),
        )

    def _recording(self) -> Floats:
        """What recording each sample cost a fetch, ns: what lies between two samples is half of it."""
        samples = self.of(ev.SAMPLE)
        samples = samples[np.lexsort((samples["begin"], samples["process"]))]
        same = (samples["task"][1:] == samples["task"][:-1]) & (samples["process"][1:] == samples["process"][:-1])
        gaps = (samples["begin"][1:] - samples["end"][:-1])[same]
        found: Floats = (2.0 * float(np.median(gaps)) if len(gaps) else 0.0) * self.fetches["bx"].astype(np.float64)
        return found

    def _sizes(self) -> Ints:
        """The bytes of each batch, in shared memory and in its message."""
        rebuilt, pickled = self.of(ev.RESULT_REBUILD), self.of(ev.RESULT_PICKLE)
        values = self.aligned(rebuilt, rebuilt["ey"].astype(float)) + self.aligned(pickled, pickled["ex"].astype(float))
        return values.astype(np.int64)

    def _own(self) -> float:
        """The time of the loader's thread in `next` for each batch, without its waits for results and rebuilding."""
        calls = self.of(ev.NEXT)
        calls = calls[calls["ey"] == ev.Outcome.DATA]
        ready = self.of(ev.READY_GET)
        inner = ready if len(ready) else self.of(ev.RESULT_GET)
        inner = inner[np.isin(inner["tid"], calls["tid"])] if self.base.num_workers else self.of(ev.FETCH)
        at = np.searchsorted(calls["begin"], inner["begin"], side="right") - 1
        took = np.zeros(len(calls))
        np.add.at(took, at[at >= 0], durations(inner)[at >= 0])
        return float(np.median(np.maximum(0, durations(calls) - took)))

    def _beside_fetches(self, sending: float) -> float:
        """What a worker's thread does for a batch beside fetching, and beside sending with slabs."""
        gets, fetches = self.of(ev.INDEX_GET), self.fetches
        receives, process = (rows["process"].astype(np.int64) for rows in (gets, fetches))
        before = latest(receives, gets["end"], process, fetches["begin"])
        after = latest(receives, gets["begin"], process, fetches["end"], early=True)
        whole = (before >= 0) & (after >= 0)
        took = gets["begin"][after[whole]] - gets["end"][before[whole]] - durations(fetches[whole])
        return max(0.0, float(np.median(took)) - sending) if whole.any() else 0.0

    def _warmed(self, fetch: Parts) -> tuple[Parts, Work]:
        """The costs with each worker's first batch as its others, and what such a first one costs more on average."""
        _, first = np.unique(self.fetches["process"], return_index=True)
        cold, median = fetch[:, np.sort(first)], np.median(fetch, axis=1)
        more = np.maximum(0.0, cold.mean(axis=1) - median)
        if more.sum() <= COLD * float(np.median(fetch.sum(axis=0))):
            return fetch, Work(0.0)
        warm = fetch.copy()
        warm[:, np.sort(first)] = np.minimum(cold, median[:, None])
        return warm, Work(*more.tolist())

    def _start(self, warm: Work) -> tuple[float, Work]:
        """What a worker's start costs the loader, and the worker until its first batch is as fast as others."""
        begun, ready = self.of(ev.WORKER_START), self.events[self.events["code"] == ev.WORKER_READY]
        _, a, b = np.intersect1d(begun["ex"], ready["x"], return_indices=True)  # both have its pid
        if not len(a):
            loader, worker = START[self.base.worker_method]
            return loader, Work(worker + warm.cpu, warm.wait)
        after = float(np.median(ready["time"][b] - begun["end"][a]))
        return float(np.median(durations(begun))), Work(max(0.0, after) + warm.cpu, warm.wait)


def _others(recorded: Recorded) -> float:
    """How many threads of other programs computed during the run: so many that the steps lacked a CPU as recorded."""
    base, costs = recorded.base, recorded.costs(recorded.base)
    order = recorded.order(base)[:200]

    def rate(others: float) -> float:
        return load(replace(costs, others=others), base, order).by_s

    if rate(0.0) <= recorded.rate * 1.02:
        return 0.0
    others = largest(8.0 * base.cpus, lambda others: rate(others) > recorded.rate, halvings=8)
    return others if others > 0.1 else 0.0


def largest(most: float, holds: Callable[[float], bool], halvings: int = 10) -> float:
    """The largest number up to `most` for which something holds, which holds for all smaller ones: from below."""
    low, high = 0.0, most
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
