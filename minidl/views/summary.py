"""The summary of a trace: time by stage and worker, bytes and copies, the slowest samples, steps that never ended.

`summary(trace)` computes a `Summary`; `minidl summary` prints its `text()`. Times are in ns unless a name says
otherwise; the event table defines the stages. `speed.verdict` judges what bounds a loader.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl.hang.finding import Finding, RunOutcome
from minidl.hang.headline import headline
from minidl.speed.cpu_use import cpus_of
from minidl.speed.device_use import DeviceUse, device_use
from minidl.speed.ledger import Copy, Ledger, ledger, part
from minidl.speed.stages import Figures, by_stage, prefetching, start_up
from minidl.speed.verdict import Verdict, summed, verdict
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.batches import are_batches
from minidl.tracefile.events import Ending
from minidl.tracefile.loaders import NamedLoader, dataloaders, first_epochs
from minidl.tracefile.open_spans import alive_at_end, how_ended, left_alive, open_spans
from minidl.tracefile.ranks import lacking
from minidl.tracefile.spans import durations, total
from minidl.tracefile.words import counted, duration, ending, percent, plain, size

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


MANY_ALIKE = 4
"""From this number of iterators with the same parameters on, most have one line each: without persistent workers,
each epoch is an iterator of its own."""


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """One worker: its tasks, its time (ns, from ready to its last event), and the parts for fetching and waiting."""

    worker: int
    pid: int
    tasks: int
    time: int
    fetching: int
    idle: int
    ended: str


@dataclass(frozen=True, slots=True, eq=False)
class LoaderSummary:
    """One iterator. waited: ns inside `next`. stages: by name, in the event table's order.

    slowest: array of SPAN, the slowest samples, or the slowest fetches if no samples are recorded. account: the bytes
    that were copied. first_epoch: the number of its first epoch, if its DataLoader has further iterators; else -1.
    """

    number: int
    params: dict[str, Any]
    epochs: int
    batches: int
    wall: int
    waited: int
    consumer: int
    start_up: int | None
    shutdown: int | None
    stages: dict[str, Figures]
    workers: list[WorkerTime]
    slowest: Rows
    account: Ledger
    pin_simulated: bool
    errors: int
    verdict: Verdict
    device: DeviceUse | None = None
    left_alive: bool = False
    first_epoch: int = -1

    def text(self, hints: bool = True) -> str:
        """The iterator's part of the summary. hints: with the next step for its speed, and its slowest samples."""
        wall = f"{duration(self.wall)} from the first event to the last"
        lines = [
            f"{self._name()}{_of_rank(self.params)}{_params(self.params)}",
            f"  {counted(self.batches, 'batch', 'batches')} in {self._epochs()}, {wall}",
            f"  waited inside next() {duration(self.waited)}, consumer's own time {duration(self.consumer)}",
            *(f"  {line}" for line in (self.verdict if hints else replace(self.verdict, next_step="")).lines()),
        ]
        lines += [f"  {counted(self.errors, 'task')} ended in an error"] if self.errors else []
        lines.append(f"  {', '.join(self._start_and_end())}")
        lines += [*self._stage_lines(), *self._worker_lines(), *self._byte_lines()]
        lines += [f"  {self.device.text()}"] if self.device is not None else []
        if len(self.slowest) and hints:
            lines.append("  slowest " + "; ".join(map(_slow, self.slowest)))
        return "\n".join(lines)

    def line(self, like: int) -> str:
        """The iterator in one line, if iterator `like` has the same parameters."""
        return (
            f"{self._name()} (as iterator {like}): {counted(self.batches, 'batch', 'batches')} "
            f"in {duration(self.wall)}, waited inside next() {duration(self.waited)}: {self.verdict.kind.value}"
        )

    def _name(self) -> str:
        return f"iterator {self.number}" + (f", epoch {self.first_epoch}" if self.first_epoch >= 0 else "")

    def _start_and_end(self) -> Iterator[str]:
        if self.start_up is not None:
            yield f"workers ready after {duration(self.start_up)}"
        if self.shutdown is not None:
            yield f"shutdown took {duration(self.shutdown)}"
        else:
            yield "alive at the program's end" if self.left_alive else "no shutdown recorded"

    def _epochs(self) -> str:
        return counted(self.epochs, "epoch") if self.epochs else "a part of an epoch" if self.batches else "no epoch"

    def _stage_lines(self) -> list[str]:
        if not self.stages:
            return []
        head = f"  {'stage':<15}{'count':>8}{'total s':>10}{'p50 ms':>10}{'p95 ms':>10}{'max ms':>10}"
        head += f"{'computing':>11}" * any(one.computing for one in self.stages.values())
        return [head, *itertools.starmap(_stage_line, self.stages.items())]

    def _worker_lines(self) -> list[str]:
        if not self.workers:
            return []
        head = f"  {'worker':<8}{'pid':>9}{'tasks':>8}{'fetching':>10}{'idle':>8}  ended"
        return [head] + [
            f"  {w.worker:<8}{w.pid:>9}{w.tasks:>8}{percent(w.fetching / max(1, w.time)):>10}"
            f"{percent(w.idle / max(1, w.time)):>8}  {w.ended}"
            for w in self.workers
        ]

    def _byte_lines(self) -> list[str]:
        moved, slabs = self.account.moved, self.account.slabs
        in_slabs, piped = slabs is not None, moved(Copy.WRITE, Copy.INDEX_WRITE)[0]
        (shared, segments), (fed, by_feeder), (pinned, _) = map(moved, (Copy.COLLATE, Copy.FEEDER, Copy.PIN))
        parts = [
            (shared and not in_slabs, f"collated into shared memory {size(shared)} ({segments} segments)"),
            (fed, f"copied there by the feeder {size(fed)} ({by_feeder})"),
            (in_slabs, f"into slabs {size(moved(Copy.COLLATE, Copy.SLAB)[0])}"),
            (piped, f"through {'sockets and ' * in_slabs}pipes {size(piped)}"),
            (pinned, f"pinned{' (simulated)' * self.pin_simulated} {size(pinned)}"),
        ]
        told = ", ".join(text for there, text in parts if there)
        return [*([f"  bytes: {told}"] if told else []), *([f"  {slabs.text()}"] if slabs is not None else [])]


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of `summary`. open: the step of each thread at the trace's end, in words."""

    headline: Finding
    path: str
    command: str
    machine: str
    processes: int
    events: int
    lost: int
    wall: int
    loaders: list[LoaderSummary]
    open: list[str] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    attachments: list[str] = field(default_factory=list)
    dataloaders: list[tuple[tuple[int, ...], str]] = field(default_factory=list)

    def text(self) -> str:
        """The whole summary, as lines for a terminal."""
        lost = f", {self.lost} lost" if self.lost else ""
        processes = counted(self.processes, "process", "processes")
        unended = ["when the trace ends:", *(f"  {text}" for text in self.open)] if self.open else []
        step = f"  next step: {self.headline.helps}" if self.headline.helps else ""
        lines = self.headline.lines() + unended if self._broken else list(filter(None, (self.headline.title, step)))
        lines.append(f"{self.path}: {counted(self.events, 'event')} of {processes} in {duration(self.wall)}{lost}")
        lines += [f"  {text}" for text in (self.command, self.machine) if text]
        told = "\n".join(self._loader_texts()) or "no iterator in this trace"
        lines += [line for line in told.split("\n") if not (line and step and step.startswith(line))]
        if unended and not self._broken:
            lines += unended
        for title, texts in (
            ("how it ended:", self.ended),
            ("alive at the program's end:", self.alive),
            ("what other recorders saw:", self.attachments),
            ("missing from the trace:", self.problems),
        ):
            lines += [title, *(f"  {text}" for text in texts)] if texts else []
        return "\n".join(plain(line) for line in "\n".join(lines).split("\n"))

    @property
    def _broken(self) -> bool:
        """Whether the run did not end well: then its speed does not matter."""
        return self.headline.outcome not in (RunOutcome.SLOW, RunOutcome.FINE)

    def _loader_texts(self) -> Iterator[str]:
        """The iterators' texts; of many with the same parameters, only the first and the slowest one in full."""
        groups: dict[str, list[LoaderSummary]] = {}
        for loader in self.loaders:
            groups.setdefault(repr(sorted(loader.params.items())), []).append(loader)
        said = {numbers[0]: text for numbers, text in self.dataloaders}
        for group in groups.values():
            yield from [said[loader.number] for loader in group if loader.number in said]
            first, longest = group[0], max(group, key=lambda one: one.waited)
            for loader in group:
                full = len(group) < MANY_ALIKE or loader in (first, longest)
                yield loader.text(hints=not self._broken) if full else loader.line(first.number)


def summary(trace: Trace) -> Summary:
    """Sum `trace` up; near-linear in its events."""
    spans = trace.spans()
    said = headline(trace, spans)
    times, alive = trace.events["time"], left_alive(trace)
    numbers = [int(number) for number in np.unique(trace.events["loader"]) if number]
    several, account = _several(trace), ledger(trace)
    return Summary(
        headline=said,
        path=str(trace.path),
        command=plain(shlex.join(map(str, trace.manifest.get("command", [])))),
        machine=_machine(trace.manifest),
        processes=len(trace.processes),
        events=len(trace),
        lost=sum(process.lost for process in trace.processes),
        wall=int(times[-1] - times[0]) if len(times) else 0,
        loaders=[_loader(trace, spans, account, one, one in alive, several.get(one, -1)) for one in numbers],
        open=open_spans(trace, spans, first=said.focus.process if said.focus is not None else -1),
        alive=alive_at_end(trace, spans),
        ended=how_ended(trace),
        problems=[*trace.problems, *lacking(trace.manifest, trace.lines)],
        attachments=[one.line for one in trace.attachments],
        dataloaders=[(one.iterators, _about(trace, one, spans)) for one in dataloaders(trace) if _has_name(trace, one)],
    )


def _has_name(trace: Trace, one: NamedLoader) -> bool:
    there = np.unique(trace.events["loader"])
    return bool(np.isin(one.iterators, there).all()) and bool(trace.loaders[one.iterators[0]].get("dataset"))


def _about(trace: Trace, one: NamedLoader, spans: Rows) -> str:
    """Return a DataLoader's name, and the verdict on its iterators together if there are several."""
    of_rank = f" of rank {one.rank}" if one.rank >= 0 else ""
    if len(one.iterators) == 1:
        return f"{one.name}{of_rank}: iterator {one.iterators[0]}"
    verdict = summed(trace, one.iterators, spans)
    return f"{one.name}{of_rank}: iterators {', '.join(map(str, one.iterators))}; together {verdict.sentence}"


def _machine(manifest: dict[str, Any]) -> str:
    parts = [str(manifest["host"])] if manifest.get("host") else []
    cpus, usable = manifest.get("cpus"), cpus_of(manifest)
    fewer = f", of which the run could use {usable:g}" if usable is not None and usable != cpus else ""
    parts += [f"{cpus} CPUs{fewer}"] if cpus and usable is not None else []
    parts += [f"{name} {version}" for name, version in manifest.get("versions", {}).items()]
    return ", ".join(parts)


def _several(trace: Trace) -> dict[int, int]:
    """The first epoch of each iterator whose DataLoader has further ones."""
    first = first_epochs(trace)
    several = [one.iterators for one in dataloaders(trace) if len(one.iterators) > 1]
    return {number: first[number] for numbers in several for number in numbers if number in first}


def _loader(
    trace: Trace, all_spans: Rows, account: Ledger, number: int, alive: bool, first_epoch: int
) -> LoaderSummary:
    events = trace.events[trace.events["loader"] == number]
    spans = all_spans[(all_spans["loader"] == number) & (all_spans["end"] >= 0)]

    def of(pair: tuple[int, int]) -> Rows:
        found: Rows = spans[spans["code"] == pair[0]]
        return found

    def count(code: int) -> int:
        return int(np.count_nonzero(events["code"] == code))

    figures = {stage: Figures.of(durations(mine), mine["cpu"]) for stage, mine in by_stage(spans).items()}
    return LoaderSummary(
        number=number,
        params=trace.loaders.get(number, {}) | prefetching(events),
        epochs=count(ev.EPOCH[0]),
        batches=int(np.count_nonzero(are_batches(events))),
        wall=int(events["time"][-1] - events["time"][0]),
        waited=total(of(ev.NEXT)),
        consumer=total(of(ev.CONSUMER)),
        start_up=start_up(events),
        shutdown=total(of(ev.SHUTDOWN)) if len(of(ev.SHUTDOWN)) else None,
        stages={stage: one for stage, one in figures.items() if one is not None},
        workers=_workers(trace, events, spans),
        slowest=_slowest(of(ev.SAMPLE), of(ev.FETCH)),
        account=part(trace, account, [number]),
        pin_simulated=bool(of(ev.PIN)["ey"].any()),
        errors=count(ev.TASK_ERROR),
        verdict=verdict(trace, number, all_spans),
        device=device_use(trace, number, all_spans),
        left_alive=alive,
        first_epoch=first_epoch,
    )


def _workers(trace: Trace, events: Rows, spans: Rows) -> list[WorkerTime]:
    out = []
    for index, process in enumerate(trace.processes):
        own = events[events["process"] == index]
        if process.role != "worker" or not len(own):
            continue
        mine = spans[spans["process"] == index]
        ready = own["time"][own["code"] == ev.WORKER_READY]
        fetches, gets = mine[mine["code"] == ev.FETCH[0]], mine[mine["code"] == ev.INDEX_GET[0]]
        out.append(
            WorkerTime(
                worker=process.worker,
                pid=process.pid,
                tasks=len(fetches),
                time=int(own["time"][-1] - (ready[0] if len(ready) else own["time"][0])),
                fetching=total(fetches),
                idle=total(gets),
                ended=_ended(events, own, process.worker),
            )
        )
    return sorted(out, key=lambda w: w.worker)


def _ended(events: Rows, own: Rows, worker: int) -> str:
    """How the worker ended, as far as recorded."""
    gone = events[(events["code"] == ev.WORKER_GONE) & (events["worker"] == worker)]
    if len(gone) and gone["y"][-1]:
        return ending(int(gone["y"][-1]))
    left = own[own["code"] == ev.WORKER_EXIT]
    if len(left):
        return next((one.name.lower() for one in Ending if one == left["x"][-1]), "unknown")
    return "exit code 0" if len(gone) else "not recorded"


def _slowest(samples: Rows, fetches: Rows) -> Rows:
    rows = samples if len(samples) else fetches
    slowest: Rows = rows[np.argsort(durations(rows), kind="stable")[::-1][:3]]
    return slowest


# --- Wording ----------------------------------------------------------------------------------------------------------
def _slow(row: np.void) -> str:
    what = f"sample {row['by']}" if row["code"] == ev.SAMPLE[0] and row["by"] >= 0 else "batch"
    worker = f", worker {row['worker']}" if row["worker"] >= 0 else ""
    return f"{what} (task {row['task']}{worker}) {duration(int(row['end'] - row['begin']))}"


def _stage_line(name: str, of: Figures) -> str:
    share = "" if of.computing is None else percent(of.computing)
    times = f"{of.total / 1e9:>10.3f}{of.p50 / 1e6:>10.2f}{of.p95 / 1e6:>10.2f}{of.most / 1e6:>10.2f}"
    return f"  {name:<15}{of.count:>8}{times}{share:>11}".rstrip()


def _of_rank(params: dict[str, Any]) -> str:
    return f" of rank {params['rank']}" if type(params.get("rank")) is int else ""


def _params(params: dict[str, Any]) -> str:
    """The parameters that shape a run, if they are known: ": num_workers=4, prefetch_factor=2, in_order=True"."""
    names = ("num_workers", "batch_size", "prefetch_factor", "in_order", "persistent_workers", "pin_memory")
    known = [f"{name}={params[name]}" for name in names if name in params]
    known += ["transport=arena"] if params.get("transport") == "arena" else []
    return f": {', '.join(known)}" if known else ""
