"""What a recording tells of the costs of its steps: for each batch what needs a CPU, and what waits without one.

Interface: `read(trace)` -> `Recorded`; `Recorded.costs(setting)` are the `Costs` of another setting.

Rules of use: of a step, its CPU time needs a CPU, and the rest it waited. The time in which it was ready and had no CPU
counts as a wait if the steps hardly compute (the system took that long to wake them); otherwise it is left out, since
sharing CPUs makes it again. Steps that the recording lacks have the median of those that it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minidl.speed.cpu_use import cpus_of
from minidl.speed.plan.loading import Costs, load, steady
from minidl.speed.plan.machine import Work
from minidl.speed.plan.settings import LoaderSetting, PlanError
from minidl.speed.plan.transport_costs import TransportCosts, transport_costs
from minidl.speed.side import groups
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Floats, Ints, Rows
from minidl.tracefile.batches import keys_at
from minidl.tracefile.loaders import only
from minidl.tracefile.spans import durations, total
from minidl.tracefile.words import counted

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

FEWEST: Final = 20
"""Batches of a recording from which something can be predicted."""

LEAST_RESIZED: Final = 5
"""Batches of another size that the recorded samples must make."""

MOST: Final = 1000
"""Batches of a simulated epoch."""

OTHERS_MATTER: Final = 0.05
"""The share of the steps' time without a CPU from which other programs are looked for."""

COMPUTES: Final = 0.2
"""The share of the steps' time that is CPU time from which waits for a CPU are due to others that compute; with less,
they are what it takes to wake a thread."""

HOPS: Final = (250_000.0, 60_000.0, 80_000.0)
"""ns that a message travels, see `Costs.hops`: through a feeder thread and a pipe, and until its reader wakes."""

COLD: Final = 0.5
"""A first batch of a worker that takes longer than others by a larger share of their time warms the worker up."""

_UNSEEN_DEVICE: Final = (
    "the device's own time is not recorded: if the loop runs ahead of the device, it limits sooner than is predicted; "
    'minidl.span("step", device=...) around the step records it'
)

START: Final = (8e6, 15e6)
"""CPU ns to start a worker by fork, of the loader and of the worker, where the recording has started none."""


@dataclass(frozen=True)
class Parts:
    """The CPU time and the waits of one step of each batch, ns."""

    cpu: Floats
    wait: Floats

    def __add__(self, more: Parts) -> Parts:
        return Parts(self.cpu + more.cpu, self.wait + more.wait)

    def times(self, by: float) -> Parts:
        return Parts(self.cpu * by, self.wait * by)

    def at_once(self) -> Parts:
        """These parts without the waits."""
        return Parts(self.cpu, np.zeros_like(self.wait))

    def plus(self, cpu: Floats | float) -> Parts:
        """These parts with more CPU time, or less: at least a tenth of what it was."""
        return Parts(np.maximum(self.cpu / 10, self.cpu + cpu), self.wait)

    def steps(self) -> list[Work]:
        return [*map(Work, self.cpu.tolist(), self.wait.tolist())]


@dataclass(frozen=True)
class Recorded:
    """The costs that one recording shows. base: its own setting; rate: its batches/s in the steady state.

    sizes, tensors: bytes of each batch, and tensors of one. worker: what a worker's thread does beside a fetch, ns;
    epoch: batches of an epoch; others: threads of other programs that computed meanwhile; notes: what it cannot tell,
    in words.
    """

    trace: Trace
    params: dict[str, Any]
    base: LoaderSetting
    rate: float
    draw: Floats
    fetch: Parts
    send: Parts
    read: Parts
    pin: Parts
    step: Parts
    sizes: Ints
    tensors: float
    batch_size: float
    own: float
    worker: float
    start: tuple[float, Work]
    epoch: int
    shutdown: float
    transports: TransportCosts
    exclusive: float = 0.0
    slower: float = 0.0  # by what share CPU time grows with each CPU more that is in use
    others: float = 0.0
    notes: list[str] = field(default_factory=list)

    def order(self, setting: LoaderSetting) -> Ints:
        """The batches of a simulated epoch: as recorded, again from the first if there are few."""
        larger = setting.batch_size / self.batch_size if setting.batch_size else 1.0
        there = int(len(self.sizes) / max(1.0, larger))
        if there < LEAST_RESIZED:
            samples = round(len(self.sizes) * self.batch_size)
            raise PlanError(f"batch_size={setting.batch_size}: the recording has {samples} samples, and "
                            f"{LEAST_RESIZED} such batches are needed: record a longer run")  # fmt: skip
        return np.arange(max(min(there, MOST), 16 * setting.capacity, 10 * FEWEST)) % there

    def costs(self, setting: LoaderSetting) -> Costs:
        """What each batch costs with this setting. Raises PlanError for a step that was not recorded."""
        if setting.pin and not self.base.pin:
            raise PlanError(f"{self.trace.path}: no batch was pinned in the recording: record with pin_memory=True")
        base, table = self.base, self.transports
        had = base.transport if base.num_workers else "alone"
        gets = setting.transport if setting.num_workers else "alone"
        in_worker, in_loader = (
            {name: table.cpu(who, name, self.tensors, self.sizes) for name in (had, gets, "alone")} for who in (0, 1)
        )
        crowd = self._slowdown(setting) / self._slowdown(base)
        fetch = Parts(self.fetch.cpu * crowd + self.worker, self.fetch.wait - self.exclusive).times(setting.samples)
        alone = (fetch + self.send).plus(in_worker["alone"] - in_worker[had])
        worker = fetch.plus(in_worker[gets] - in_worker[had])
        send, read, step = self.send, self.read, self.step.times(setting.consumer)
        if gets != had:
            # Upstream's threads, the feeder and the one that sends descriptors, wait for a computing worker's GIL.
            # What a transport costs the loader beside reading is giving the memory back, while the loop goes on.
            send, read, more = send.at_once(), read.at_once(), in_loader[gets] - in_loader[had]
            reads = read.plus(more)
            read, step = reads, step.plus(float(np.mean(more - (reads.cpu - read.cpu))))
        costs, draw, sizes = [worker, send, read, self.pin, alone], self.draw, self.sizes
        if setting.batch_size and setting.batch_size != self.batch_size:
            by = setting.batch_size / self.batch_size
            costs = [_resized(parts, by) for parts in costs]
            step, draw = _resized(step, by), np.resize(draw, len(costs[0].cpu)) * by
            sizes = np.resize((sizes * by).astype(np.int64), len(costs[0].cpu))
        fetch, send, read, pin, alone = costs
        return Costs(
            draw=draw.tolist(), fetch=fetch.steps(), send=send.steps(), read=read.steps(), pin=pin.steps(),
            step=step.steps(), alone=alone.steps(), sizes=sizes.tolist(), exclusive=self.exclusive * setting.samples,
            own=self.own, start=(0.0, Work(0.0)) if setting.persistent else self.start, hops=HOPS,
            feeder=setting.transport == "upstream", samples=max(1, round(setting.batch_size or self.batch_size)),
        )  # fmt: skip

    def _slowdown(self, setting: LoaderSetting) -> float:
        return 1 + self.slower * (max(1.0, min(setting.num_workers, setting.cpus)) - 1)


def _resized(parts: Parts, by: float) -> Parts:
    """The costs of batches that are `by` times as large: the same samples, joined or divided in their order."""
    count = max(1, int(len(parts.cpu) / by))
    edges = np.arange(count + 1) * by

    def cut(values: Floats) -> Floats:
        whole = np.interp(edges, np.arange(len(values) + 1), np.concatenate([[0.0], np.cumsum(values)]))
        return np.diff(whole)

    return Parts(cut(parts.cpu), cut(parts.wait))


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
    return replace(recorded, others=_others(recorded) if reader.computes and reader.without_cpu else 0.0)


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
        self.workers = int(params.get("num_workers") or 0)
        fetches = self.of(ev.FETCH)
        fetches = fetches[fetches["ex"] == ev.Outcome.DATA]
        keys, first = np.unique(keys_at(trace.events, fetches, fetches["begin"]), return_index=True)
        self.keys, self.fetches = keys, fetches[first]
        steps = self.of(ev.CONSUMER)
        self.steps = steps[steps["task"] >= 0]
        self._refuse()
        rows = np.concatenate([self.fetches, self.steps])
        self.computes, self.without_cpu = (
            rows[name].sum() >= share * total(rows) for name, share in (("cpu", COMPUTES), ("cpu_wait", OTHERS_MATTER))
        )

    def of(self, *pairs: tuple[int, int]) -> Rows:
        rows: Rows = self.spans[np.isin(self.spans["code"], [pair[0] for pair in pairs])]
        return rows

    def _refuse(self) -> None:
        path, unseen = self.trace.path, self.params.get("unseen")
        if isinstance(unseen, list) and "next" in unseen:
            raise PlanError(f"{path} does not show when the loop waits: observe torch's loader without pin_memory, or "
                            f"record with minidl's loader (minidl run)")  # fmt: skip
        count = min(len(self.keys), len(self.steps))
        if count < FEWEST:
            lost = sum(process.lost for process in self.trace.processes)
            why = f"; {counted(lost, 'event')} are lost: record with minidl run --full" if lost else ""
            raise PlanError(f"{path} shows {counted(count, 'batch', 'batches')} from begin to end, at least {FEWEST} "
                            f"are needed: record a longer run{why}")  # fmt: skip
        if not self.fetches["cpu"].any():
            raise PlanError(f"{path} has no CPU times, so it does not tell which steps need a CPU: it shows "
                            f"{self._rate():.3g} batches/s with {counted(self.workers, 'worker')}, and nothing about "
                            f"other settings. Record it with minidl run --cpu-time on")  # fmt: skip

    def _rate(self) -> float:
        capacity = self.workers * int(self.params.get("prefetch_factor") or 2)
        rows = self.events[self.events["code"] == ev.YIELD]
        rows = rows[rows["x"] == ev.Outcome.DATA]
        epochs = keys_at(self.trace.events, rows, rows["time"]) >> 31
        each = [steady(rows["time"][epochs == epoch].astype(float), capacity) for epoch in np.unique(epochs)]
        return 1e9 * sum(n for n, _ in each) / max(1.0, sum(ns for _, ns in each))

    def aligned(self, rows: Rows, values: Floats) -> Floats:
        """A value for each batch: of the row with its key; the median where there is none, 0 without any row."""
        out = np.zeros(len(self.keys))
        if not len(rows):
            return out
        keys = keys_at(self.trace.events, rows, rows["begin"])
        at = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        known = self.keys[at] == keys
        there = np.zeros(len(self.keys), bool)
        there[at[known]] = True
        np.add.at(out, at[known], values[known])
        out[~there] = np.median(values)
        return out

    def split(self, rows: Rows) -> Parts:
        """The CPU time of spans, and their waits. A span without CPU time computes as much as others of its kind."""
        took, cpu = durations(rows).astype(float), rows["cpu"].astype(float)
        known = cpu > 0
        share = cpu[known].sum() / max(1.0, took[known].sum()) if known.any() else 1.0
        cpu = np.where(known, cpu, took * share)
        return Parts(cpu, np.maximum(0.0, took - cpu - rows["cpu_wait"] * self.computes))

    def parts(self, *pairs: tuple[int, int]) -> Parts:
        """The CPU time and waits of these spans, for each batch."""
        each = [(rows, self.split(rows)) for rows in map(self.of, pairs)]
        return Parts(
            sum((self.aligned(rows, own.cpu) for rows, own in each), np.zeros(len(self.keys))),
            sum((self.aligned(rows, own.wait) for rows, own in each), np.zeros(len(self.keys))),
        )

    def _step(self) -> Parts:
        """A step of the training loop takes at least as long as the device computes, though the loop may run ahead.

        The first one, which warms up, counts as an ordinary one.
        """
        step, device = self.split(self.steps), durations(self.of(ev.DEVICE_COMPUTE))
        least = float(np.median(device)) if len(device) else 0.0
        cpu, wait = step.cpu.copy(), np.maximum(step.wait, least - step.cpu)
        cpu[0], wait[0] = min(cpu[0], np.median(cpu)), min(wait[0], np.median(wait))
        return Parts(cpu, wait)

    def recorded(self) -> Recorded:
        params, slabs = self.params, self.params.get("transport") == "arena"
        base = LoaderSetting(
            num_workers=self.workers,
            prefetch_factor=int(params.get("prefetch_factor") or 2),
            transport="arena" if slabs else "upstream",
            in_order=params.get("in_order") is not False,
            persistent=bool(params.get("persistent_workers")),
            pin=bool(len(self.of(ev.PIN))),
            cpus=cpus_of(self.trace.manifest) or 1.0,
        )
        draws = self.of(ev.SAMPLER_NEXT)
        fetch, warm = self._warmed(self.split(self.fetches).plus(-self._recording()))
        rebuilt = self.of(ev.RESULT_REBUILD)
        send = self.parts(ev.RESULT_PICKLE, ev.RESULT_WRITE)
        epochs = max(1, int(np.count_nonzero(self.events["code"] == ev.EPOCH[0])))
        shutdown = durations(self.of(ev.SHUTDOWN))
        draw = self.aligned(draws, durations(draws).astype(float))
        return Recorded(
            trace=self.trace,
            params=params,
            base=base,
            rate=self._rate(),
            draw=draw,
            fetch=fetch,
            send=send,
            read=self.parts(ev.RESULT_REBUILD),
            pin=self.parts(ev.PIN),
            step=self._step(),
            sizes=self._sizes(),
            tensors=float(rebuilt["ex"].mean()) if len(rebuilt) else 1.0,
            batch_size=float(self.fetches["bx"].mean()) or 1.0,
            own=max(0.0, self._own() - float(np.median(draw))),
            worker=self._beside_fetches(float(np.median(send.cpu + send.wait)) if slabs else 0.0),
            start=self._start(warm),
            epoch=max(1, len(self.steps) // epochs),
            shutdown=float(shutdown.mean()) if len(shutdown) else 0.0,
            transports=transport_costs(self.trace.manifest),
            notes=[_UNSEEN_DEVICE] * (self._uses_device() and not len(self.of(ev.DEVICE_COMPUTE))),
        )

    def _uses_device(self) -> bool:
        return bool(len(self.of(ev.H2D, ev.COPY, ev.TO_DEVICE, ev.PIN)))

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
        inner = inner[np.isin(inner["tid"], np.unique(calls["tid"]))] if self.workers else self.of(ev.FETCH)
        at = np.searchsorted(calls["begin"], inner["begin"], side="right") - 1
        took = np.zeros(len(calls))
        np.add.at(took, at[at >= 0], durations(inner)[at >= 0])
        return float(np.median(np.maximum(0, durations(calls) - took)))

    def _beside_fetches(self, sending: float) -> float:
        """What a worker's thread does for a batch beside fetching, and beside sending with slabs."""
        gets = self.of(ev.INDEX_GET)
        found = []
        for process in np.unique(self.fetches["process"]) if self.workers else ():
            mine, fetches = gets[gets["process"] == process], self.fetches[self.fetches["process"] == process]
            before = np.searchsorted(mine["end"], fetches["begin"], side="right") - 1
            after = np.searchsorted(mine["begin"], fetches["end"])
            whole = (before >= 0) & (after < len(mine))
            took = mine["begin"][after[whole]] - mine["end"][before[whole]]
            found.append(took - durations(fetches[whole]))
        return max(0.0, float(np.median(np.concatenate(found))) - sending) if found else 0.0

    def _warmed(self, fetch: Parts) -> tuple[Parts, Work]:
        """The costs with each worker's first batch as its others, and what such a first one costs more on average."""
        _, first = np.unique(self.fetches["process"], return_index=True)
        cold, more = np.zeros(len(self.keys), bool), []
        cold[first] = True
        parts = []
        for values in (fetch.cpu, fetch.wait):
            median = float(np.median(values))
            more.append(max(0.0, float(values[cold].mean()) - median))
            parts.append(np.where(cold, np.minimum(values, median), values))
        slow = sum(more) > COLD * float(np.median(fetch.cpu + fetch.wait))
        return (Parts(*parts), Work(*more)) if slow else (fetch, Work(0.0))

    def _start(self, warm: Work) -> tuple[float, Work]:
        """What a worker's start costs the loader, and the worker until its first batch is as fast as others."""
        begun, ready = self.of(ev.WORKER_START), self.events[self.events["code"] == ev.WORKER_READY]
        if not len(begun) or not len(ready):
            return START[0], Work(START[1] + warm.cpu, warm.wait)
        order = np.argsort(begun["ex"])
        at = np.searchsorted(begun["ex"][order], ready["x"]).clip(max=len(begun) - 1)  # both have its pid
        after = ready["time"] - begun["end"][order[at]]
        return float(np.median(durations(begun))), Work(max(0.0, float(np.median(after))) + warm.cpu, warm.wait)


def _others(recorded: Recorded) -> float:
    """How many threads of other programs computed during the run: so many that the steps lacked a CPU as recorded."""
    costs, order = recorded.costs(recorded.base), recorded.order(recorded.base)

    def rate(others: float) -> float:
        count, ns = steady(load(costs, recorded.base, order[:200], others).yields, recorded.base.capacity)
        return 1e9 * count / ns

    low, high = 0.0, 8.0 * recorded.base.cpus
    if rate(0.0) <= recorded.rate * 1.02:
        return 0.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) > recorded.rate else (low, middle)
    return low if low > 0.1 else 0.0
