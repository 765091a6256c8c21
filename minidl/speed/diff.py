"""The comparison of two runs: the time of each stage, the throughput, and the largest change in one sentence.

Interface: `diff(a, b)` -> `Diff`; its `sentence()` names the largest change with its evidence, `text()` adds the
tables. The traces must have the same dataset and batch size, unless `force` is given.

Rules of use: a change counts if it is larger than the spread within the runs. Each run is cut into `BLOCKS` parts
of equal count; the spread of a stage is from the second lowest to the second highest mean of these parts. Two runs
differ if there is a gap between their spreads (between equal runs, one stage in a thousand has one). The spread does
not show how much runs vary: record several runs for that. Times are in ns unless a name says otherwise.
"""

from __future__ import annotations

import argparse
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidl import terminal
from minidl.speed.ledger import Ledger, ledger, part
from minidl.speed.stages import FEWEST, Figures, by_stage, prefetching, start_up
from minidl.speed.transport_use import Way, compared, way
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Rows, starts
from minidl.tracefile.batches import keys_at
from minidl.tracefile.events import EVENTS
from minidl.tracefile.format import TraceError
from minidl.tracefile.loaders import only
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.spans import durations
from minidl.tracefile.words import counted, duration, lacking, percent, size

NOTABLE = 1.1
"""A difference with a smaller factor between the means is no change, however certain it is."""

NEGLIGIBLE = 0.01
"""A change of a stage by a smaller share of a batch's cycle is not mentioned."""

HANGS = 10**9
"""A wait at the end of a run is mentioned if it takes this many ns and is longer than all before."""

SAME_WORK = ("dataset", "dataset_kind", "batch_size")
"""Parameters that must be equal: with another dataset or batch size, a batch is other work."""

CAUSES = ("sampling", "fetch", "pickle", "write", "rebuild", "pin", "consumer")
"""Stages whose change can be a cause; waiting and idling are effects."""

PARTS = {"fetch": ("sample", "collate"), "pickle": ("copy",)}
"""The parts of a stage, one of which may explain its change."""


class IncomparableError(TraceError):
    """The two runs did not do the same work. The message names the differences, and how to compare them anyway."""


class Comparison(enum.Enum):
    """The change of a stage from A to B."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "within the spread"
    FEW = "too few to say"
    ONLY_A = "only in A"
    ONLY_B = "only in B"
    UNSEEN = "not recorded in one"


# --- What is compared -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Change:
    """One stage in both runs; worker -1 = all workers. seen: both recordings can show it."""

    stage: str
    worker: int
    a: Figures | None
    b: Figures | None
    seen: bool = True

    @property
    def means(self) -> tuple[float, float]:
        """Means in A and in B, ns; NaN if there is none."""
        a, b = (figures.mean if figures else float("nan") for figures in (self.a, self.b))
        return a, b

    @property
    def factor(self) -> float:
        """Mean in B by mean in A; NaN if one is missing."""
        a, b = self.means
        return b / max(a, 1e-9)

    @property
    def verdict(self) -> Comparison:
        if not self.seen:
            return Comparison.UNSEEN
        if min((figures.count for figures in (self.a, self.b) if figures), default=0) < FEWEST:
            return Comparison.FEW
        if self.a is None or self.b is None:
            return Comparison.ONLY_B if self.a is None else Comparison.ONLY_A
        if self.b.low > self.a.high and self.factor >= NOTABLE:
            return Comparison.SLOWER
        if self.b.high < self.a.low and self.factor <= 1 / NOTABLE:
            return Comparison.FASTER
        return Comparison.SAME

    @property
    def is_clear(self) -> bool:
        return self.verdict not in (Comparison.SAME, Comparison.FEW, Comparison.UNSEEN)

    def text(self) -> str:
        """The stage's row."""
        name = self.stage if self.worker < 0 else f"  worker {self.worker}"
        counts = "".join(f"{f.count if f else '-':>8}" for f in (self.a, self.b))
        times = "".join(
            f"{_ms(getattr(f, quantile)) if f and f.count >= enough else '-':>9}"
            for quantile, enough in (("p50", 1), ("p95", 20), ("p99", 100))
            for f in (self.a, self.b)
        )
        factor = f"{self.factor:>8.2f}" if self.a and self.b else f"{'-':>8}"
        return f"{name:<12}{counts}{times}{factor}  {self.verdict.value}"


@dataclass(frozen=True)
class Side:
    """One run: the iterators of one loader. waited: in `next` for batches; wall: from an epoch's first `next` to its
    last batch, summed. samples and start_up are None if the trace does not tell; first: mean wait for an epoch's
    first batch; pending: ns of a wait in which the trace ends, if it is longer than all before, else 0. unseen: stages
    that such a recording does not show. way: how batches travelled. durations: in order of time, by stage and worker
    (-1 = all)."""

    path: str
    loaders: tuple[int, ...]
    params: Mapping[str, Any]
    manifest: Mapping[str, Any]
    batches: int
    samples: int | None
    wall: int
    waited: int
    start_up: float | None
    first: float | None
    ledger: Ledger
    durations: dict[tuple[str, int], Ints] = field(repr=False)
    pending: int = 0
    unseen: frozenset[str] = frozenset()
    way: Way = field(default_factory=Way)

    @property
    def batches_per_s(self) -> float:
        return self.batches / max(self.wall, 1) * 1e9

    @property
    def steady_per_s(self) -> float:
        """Batches/s without the first batch of each epoch, which waits for the workers' start."""
        cycles = self.durations["cycle", -1]
        return len(cycles) / max(int(cycles.sum()), 1) * 1e9

    @property
    def samples_per_s(self) -> float | None:
        return None if self.samples is None else self.samples / max(self.wall, 1) * 1e9

    @property
    def waiting_share(self) -> float:
        return min(1.0, self.waited / max(self.wall, 1))

    @property
    def copied(self) -> float | None:
        """Bytes copied for a batch, on average."""
        return float(self.ledger.sent["copied"].mean()) if len(self.ledger.sent) else None

    def per_batch(self, figures: Figures | None) -> float:
        """Return a stage's ns for each batch, over all workers."""
        return figures.total / max(self.batches, 1) if figures else 0.0


@dataclass(frozen=True)
class Diff:
    """What `diff` found. stages: the consumer's cycle and wait first, then the event table's; workers: the same of each
    one; differences: in what the runs differ, in words; notes: what else to know."""

    a: Side
    b: Side
    stages: list[Change]
    workers: list[Change]
    differences: list[str]
    notes: list[str]

    def stage(self, name: str) -> Change | None:
        """Return the change of one stage over all workers."""
        return next((change for change in self.stages if change.stage == name), None)

    @property
    def cycle(self) -> Change | None:
        """The consumer's time from one batch to the next; None if there are too few batches to compare it."""
        found = self.stage("cycle")
        return found if found is not None and found.a and found.b and found.verdict is not Comparison.FEW else None

    def impact(self, change: Change) -> float:
        """Return how many ns more of a stage a batch takes in B."""
        return self.b.per_batch(change.b) - self.a.per_batch(change.a)

    def most(self) -> Change | None:
        """Return the stage that changed most, by its time for a batch; None if no cause changed clearly."""
        names = [*CAUSES, *(part for parts in PARTS.values() for part in parts)]
        clear = [c for c in self.stages if c.stage in names and c.is_clear]
        most = max(clear, key=lambda change: abs(self.impact(change)), default=None)
        cycle = self.stage("cycle")
        if most is None or cycle is None:
            return None
        if abs(self.impact(most)) < NEGLIGIBLE * max(figures.mean for figures in (cycle.a, cycle.b) if figures):
            return None
        parts = [c for c in clear if c.stage in PARTS.get(most.stage, ())]
        return next((part for part in parts if self.impact(part) / self.impact(most) >= 0.5), most)

    def sentence(self) -> str:
        """The largest change, with direction, factor and evidence; and whether a run ends in a wait."""
        hung = (
            f"; {name} ends in a wait of {duration(side.pending)} for a batch, not counted here (see minidl summary)"
            for name, side in (("A", self.a), ("B", self.b))
            if side.pending
        )
        a, b = self.a.way, self.b.way
        if a.transport and b.transport and a.transport != b.transport:
            return self._of_transports() + "".join(hung)
        return self._compared() + "".join(hung)

    def _of_transports(self) -> str:
        """The effect of another transport on the time of a batch, and its reasons."""
        most, took = self.most(), f"too few batches to compare their times ({FEWEST} needed)"
        if self.cycle is not None:
            how = _times(self.cycle.factor) if self.cycle.is_clear else "within its spread"
            a, b = self.cycle.means
            took = f"each batch took {duration(b)} instead of {duration(a)}, {how}"
        told = f"{self.b.way.transport} instead of {self.a.way.transport}: {took}"
        told += f": {'; '.join(compared(self.a.way, self.b.way))}"
        return told if most is None else f"{told}. Among the stages, {self._of_stage(most)}"

    def _compared(self) -> str:
        if self.cycle is None:
            counts = " and ".join(str(len(side.durations["cycle", -1])) for side in (self.a, self.b))
            needed = f"without the first of each epoch (at least {FEWEST} are needed)"
            return f"too few batches to say what changed: {counts} {needed}"
        most, throughput = self.most(), self._of_throughput(self.cycle)
        if most is not None:
            told = f"{self._of_stage(most)}; {throughput}"
        elif self.cycle.is_clear:
            told = f"{throughput}, but no single stage changed by more than its spread"
        else:
            told = f"no stage changed by more than its spread, and {throughput}"
        return told + self._of_bytes()

    def _of_stage(self, change: Change) -> str:
        a, b = change.a, change.b
        own = [c for c in self.workers if c.stage == change.stage]
        same = sum(c.verdict is change.verdict for c in own)
        where = f", in {same} of {len(own)} workers" if len(own) > 1 else ""
        if len(own) > 1 and not any(c.is_clear for c in own):
            where = f", not within any of the {len(own)} workers: only their shares of the work changed"
        if a and b:
            return (
                f"{change.stage} changed most: on average it takes {duration(b.mean)} instead of {duration(a.mean)}, "
                f"{_times(change.factor)} ({a.count} and {b.count} measured{where})"
            )
        only, what = (b, "new and takes") if b else (a, "gone and took")
        assert only is not None
        return f"{change.stage} changed most: it is {what} {duration(only.mean)} on average ({only.count} measured)"

    def _of_throughput(self, cycle: Change) -> str:
        a, b = (1e9 / max(mean, 1e-9) for mean in cycle.means)
        if not cycle.is_clear:
            return f"throughput ({a:.3g} and {b:.3g} batches/s) changed only within its spread"
        how = "fell" if cycle.verdict is Comparison.SLOWER else "rose"
        return f"throughput {how} from {a:.3g} to {b:.3g} batches/s"

    def _of_bytes(self) -> str:
        a, b = self.a.copied, self.b.copied
        if not a or not b or 1 / NOTABLE < b / a < NOTABLE:
            return ""
        return f"; the bytes copied per batch changed from {size(a)} to {size(b)}"

    def text(self, workers: bool = False) -> str:
        """Return warnings, the sentence, the runs side by side, and the stages; with `workers`, of each worker too."""
        lines = [f"A: {self.a.path}", f"B: {self.b.path}"]
        lines += [f"differs: {difference}" for difference in self.differences]
        lines += [self.sentence(), "", f"{'':<24}{'A':>14}{'B':>14}", *self._rows(), ""]
        heads = "".join(f"{f'{name} {side}':>9}" for name in ("p50", "p95", "p99") for side in "AB")
        lines.append(f"{'stage, ms':<12}{'n A':>8}{'n B':>8}{heads}{'B / A':>8}")
        for change in self.stages:
            lines.append(change.text())
            lines += [c.text() for c in self.workers if workers and c.stage == change.stage]
        return "\n".join([*lines, *self.notes])

    def _rows(self) -> Iterator[str]:
        def row(name: str, what: Callable[[Side], str]) -> str:
            return f"{name:<24}{what(self.a):>14}{what(self.b):>14}"

        yield row("batches", lambda side: str(side.batches))
        yield row("batches/s", lambda side: f"{side.batches_per_s:.2f}")
        yield row("  after the first", lambda side: f"{side.steady_per_s:.2f}")
        yield row("samples/s", lambda side: "?" if side.samples_per_s is None else f"{side.samples_per_s:.1f}")
        yield row("waiting for batches", lambda side: percent(side.waiting_share))
        yield row("first batch of an epoch", lambda side: "?" if side.first is None else duration(side.first))
        yield row("start of the workers", lambda side: "?" if side.start_up is None else duration(side.start_up))
        yield row("bytes copied per batch", lambda side: "?" if side.copied is None else size(side.copied))
        yield row("copies of each byte", lambda side: f"{side.ledger.copies_per_byte:.2f}".replace("nan", "?"))
        yield row("avoidable bytes", lambda side: size(int(side.ledger.batches["avoidable"].sum())))


def _times(factor: float) -> str:
    return f"{factor:.3g} times as long" if factor >= 1 else f"{1 / max(factor, 1e-9):.3g} times as fast"


def _ms(nanoseconds: float) -> str:
    milliseconds = nanoseconds / 1e6
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"


# --- From two traces to the comparison --------------------------------------------------------------------------------
def diff(a: Trace, b: Trace, *, force: bool = False) -> Diff:
    """Compare two runs, A before and B after: all iterators of the loader with the most batches in each.

    Raises IncomparableError if the dataset or the batch size differ, unless `force`, and TraceError if one of
    them has no batch.
    """
    groups_a, groups_b = _groups(a), _groups(b)
    mine = groups_a[0]
    theirs = next((group for group in groups_b if _work(group[1]) == _work(mine[1])), groups_b[0])
    one, two = _side(a, *mine), _side(b, *theirs)
    vital, others = _differences(one, two)
    if vital and not force:
        raise IncomparableError(
            f"{one.path} and {two.path} did not do the same work: {'; '.join(vital)}. Record both with equal ones, or "
            f"compare them anyway with force=True (--force)"
        )
    names = list(dict.fromkeys([*one.durations, *two.durations]))

    def figures(side: Side, stage: str, worker: int) -> Figures | None:
        return Figures.of(side.durations.get((stage, worker), np.empty(0, np.int64)))

    unseen = one.unseen | two.unseen
    changes = [
        Change(stage, worker, figures(one, stage, worker), figures(two, stage, worker), stage not in unseen)
        for stage, worker in sorted(names, key=lambda key: (_ORDER.index(key[0]), key[1]))
    ]
    return Diff(
        a=one,
        b=two,
        stages=[change for change in changes if change.worker < 0],
        workers=[change for change in changes if change.worker >= 0],
        differences=vital + others,
        notes=_notes((a, b), (one, two), (groups_a, groups_b)),
    )


_ORDER = ["cycle", "next", *dict.fromkeys(e.stage for e in EVENTS.values() if e.stage), "pin idle"]
"""cycle: the consumer's time from one batch to the next; next: its wait for each."""

Group = tuple[tuple[int, ...], dict[str, Any]]


def _groups(trace: Trace) -> list[Group]:
    """Group the iterators with the same parameters (one loader's epochs); the group with the most batches first."""
    yields = trace.select("yield")
    yields = yields[yields["x"] == ev.Outcome.DATA]
    found: dict[str, list[int]] = {}
    params: dict[int, dict[str, Any]] = {}
    for number in np.unique(yields["loader"]).tolist():
        own = trace.events[trace.events["loader"] == number]
        params[number] = trace.loaders.get(number, {}) | prefetching(own)
        found.setdefault(repr(sorted(params[number].items())), []).append(number)
    if not found:
        raise TraceError(f"{trace.path} contains no yielded batch: there is nothing to compare")
    groups = sorted(found.values(), key=lambda numbers: -int(np.isin(yields["loader"], numbers).sum()))
    return [(tuple(numbers), params[numbers[0]]) for numbers in groups]


def _work(params: Mapping[str, Any]) -> list[Any]:
    return [params.get(name) for name in SAME_WORK]


def _differences(a: Side, b: Side) -> tuple[list[str], list[str]]:
    """Return the differences that make the runs incomparable, and the other ones."""
    # The first is a number within the process; the second changes with every edit of the program.
    names = sorted((a.params.keys() & b.params.keys()) - {"dataloader", "made_at"})
    different = {name: f"{name} {a.params[name]!r} in A, {b.params[name]!r} in B" for name in names
                 if a.params[name] != b.params[name]}  # fmt: skip
    loaders = ["torch's (observed)" if side.params.get("observed") is True else "minidl's" for side in (a, b)]
    kinds = [f"the loader is {loaders[0]} in A, {loaders[1]} in B"] if loaders[0] != loaders[1] else []
    pairs = {name: (value, _machine(b.manifest)[name]) for name, value in _machine(a.manifest).items()}
    machines = [f"{n} {x!r} in A, {y!r} in B" for n, (x, y) in pairs.items() if None not in (x, y) and x != y]
    vital = [text for name, text in different.items() if name in SAME_WORK]
    return vital, [*(text for name, text in different.items() if name not in SAME_WORK), *kinds, *machines]


def _machine(manifest: Mapping[str, Any]) -> dict[str, Any]:
    versions = manifest.get("versions", {})
    own = {"host": "host", "cpus": "cpus", "detail of the recording": "detail"}
    return {name: manifest.get(key) for name, key in own.items()} | {
        name: versions.get(name) for name in ("minidl", "torch", "numpy", "python")
    }


def _notes(traces: tuple[Trace, Trace], sides: tuple[Side, Side], groups: tuple[list[Group], list[Group]]) -> list[str]:
    notes = []
    for name, trace, side, found in zip("AB", traces, sides, groups, strict=True):
        if not trace.loaders.keys() & set(side.loaders):
            notes.append(f"{name}: the loader's parameters are not in the trace, so they could not be compared")
        others = sum(len(numbers) for numbers, _ in found) - len(side.loaders)
        if others:
            notes.append(f"{name}: the comparison leaves out iterators with other parameters: {others}")
        lost = sum(process.lost for process in trace.processes)
        if lost:
            notes.append(f"{name}: {counted(lost, 'lost event is', 'lost events are')} missing from the figures")
        notes += [f"{name}: {text}" for text in lacking(trace.problems)]
    return [*notes, "The spread is measured within each run: two runs do not show how much runs vary."]


def _side(trace: Trace, loaders: tuple[int, ...], params: dict[str, Any]) -> Side:
    spans = trace.spans()
    spans = spans[np.isin(spans["loader"], loaders) & (spans["end"] >= 0)]
    own = part(trace, ledger(trace), loaders)
    cycles, first, keys = _cycles(trace, loaders)
    pending = _pending(trace, loaders)
    waits = spans[(spans["code"] == ev.NEXT[0]) & (spans["ey"] == ev.Outcome.DATA)]
    waited, early = durations(waits), waits["ex"] == 1  # it has yielded one batch when it ends
    start_ups = (start_up(trace.events[trace.events["loader"] == number]) for number in loaders)
    starts = [took for took in start_ups if took is not None]
    return Side(
        path=str(trace.path),
        loaders=loaders,
        params=params,
        manifest=trace.manifest,
        batches=len(cycles),
        samples=_samples(trace, spans, keys),
        wall=int(cycles.sum()),
        waited=int(waited.sum()),
        way=way(trace, loaders, params, own),
        start_up=float(np.mean(starts)) if starts else None,
        first=float(waited[early].mean()) if early.any() else None,
        pending=pending if pending > max(waited.max(initial=0), HANGS) else 0,
        unseen=_unseen(trace, params),
        ledger=own,
        durations={("cycle", -1): cycles[~first], ("next", -1): waited[~early], **_durations(spans)},
    )


def _pending(trace: Trace, loaders: tuple[int, ...]) -> int:
    """Return the duration of a `next` that was open at the trace's end, ns; 0 = none."""
    spans = trace.spans()
    opened = spans[(spans["code"] == ev.NEXT[0]) & (spans["end"] < 0) & np.isin(spans["loader"], loaders)]
    if not len(opened):
        return 0
    end = min(int(trace.events["time"][-1]), trace.whole_until(int(opened["loader"][-1])))
    return max(0, end - int(opened["begin"][-1]))


def _unseen(trace: Trace, params: Mapping[str, Any]) -> frozenset[str]:
    """Return the stages that this recording does not have: by its detail, or because it observed torch's loader."""
    told = params.get("unseen")
    names = set(map(str, told)) if isinstance(told, list) else set()
    begins = [event for event in EVENTS.values() if event.stage and event.phase is ev.Phase.BEGIN]
    left_out = {e.stage for e in begins if e.name in names or (e.detail and trace.manifest.get("detail") == "batch")}
    shown = {e.stage for e in begins if e.name not in names and not e.detail}
    return frozenset(left_out - shown)


def _cycles(trace: Trace, loaders: tuple[int, ...]) -> tuple[Ints, Bools, Ints]:
    """Return each batch's ns since the one before (or the epoch's first `next`), whether it is the first, and its key.

    A batch without an earlier one is left out if its epoch's begin is lost.
    """
    rows = trace.events[
        np.isin(trace.events["code"], [ev.NEXT[0], ev.YIELD]) & np.isin(trace.events["loader"], loaders)
    ]
    keys = keys_at(trace.events, rows, rows["time"])
    order = np.lexsort((rows["time"], keys >> 31))
    rows, keys = rows[order], keys[order]
    new = starts(keys >> 31)
    is_batch = (rows["code"] == ev.YIELD) & (rows["x"] == ev.Outcome.DATA)
    kept = is_batch | new  # the rest are later calls of next, errors
    rows, keys, new, is_batch = rows[kept], keys[kept], new[kept], is_batch[kept]
    since = np.diff(rows["time"], prepend=rows["time"][:1])
    first = np.zeros(len(rows), bool)
    first[1:] = new[:-1]
    counts = is_batch & ~new
    return since[counts].astype(np.int64), (first & (rows["y"] == 1))[counts], keys[counts]


def _samples(trace: Trace, spans: Rows, batches: Ints) -> int | None:
    """Count the samples in these batches, by their collation if that is recorded."""
    for code in (ev.COLLATE[0], ev.FETCH[0]):
        rows = spans[spans["code"] == code]
        if len(rows):
            return int(rows["bx"][np.isin(keys_at(trace.events, rows, rows["begin"]), batches)].sum())
    return None


def _durations(spans: Rows) -> dict[tuple[str, int], Ints]:
    """Return durations in order of time, by stage and worker; worker -1 = all."""
    found = {}
    for stage, mine in by_stage(spans).items():
        found[stage, -1] = took = durations(mine)
        if stage not in _OF_THE_LOADER:
            found |= {(stage, int(w)): took[mine["worker"] == w] for w in np.unique(mine["worker"]) if w >= 0}
    return found


_OF_THE_LOADER = ("sampling", "wait", "pin idle", "consumer", "shutdown", "rebuild", "pin")
"""Stages outside of the workers, though their spans name the worker of the batch."""


# --- The command ------------------------------------------------------------------------------------------------------
def run(arguments: argparse.Namespace) -> int:
    """`minidl diff`; the exit code. Raises TraceError if a trace can't be read or the two can't be compared."""
    with terminal.busy("comparing"):
        a, b = (only(read_trace(path), arguments.dataloader) for path in (arguments.a, arguments.b))
        found = diff(a, b, force=arguments.force)
    print(found.text(workers=arguments.workers))
    return 0
