"""The comparison of two runs: how much faster B is, and what changed where.

Interface: `diff(a, b)` -> `Diff`: its `headline` compares the rates, `sentence()` adds what explains the difference,
`text()` the tables, and `facts()` are the same figures for programs. The traces must have the same dataset, unless
`force` is given; batch sizes, workers, transports and loaders may differ.

Rules of use: the headline's rates are steady (see `side`), with an interval of 95%; what the starts and ends of epochs
cost is told apart. A stage has changed if its interval of 99% leaves out 1 and its factor is NOTABLE.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from minidl.speed.intervals import FEWEST, SURE, Rate, Ratio, ratio
from minidl.speed.side import OF_ONE_ITERATOR, Group, Side, groups, side
from minidl.speed.stages import Figures
from minidl.speed.transport_use import compared
from minidl.speed.wall_clock import Cause
from minidl.tracefile.events import EVENTS
from minidl.tracefile.format import TraceError
from minidl.tracefile.loaders import name_of
from minidl.tracefile.reader import Trace
from minidl.tracefile.words import and_joined, counted, duration, lacking, named_ranks, percent, rounded, size

NOTABLE = 1.1
"""A stage's change by a smaller factor is none, however certain it is."""

EQUAL = 1.01
"""Rates and batch sizes that differ by a smaller factor are equal, however certain the difference is."""

ENOUGH = 0.6
"""The share of a difference that one part of the loop's time explains alone; otherwise two are named."""

NEGLIGIBLE = 0.01
"""A change of a stage by a smaller share of a batch's cycle is not mentioned."""

SAME_WORK = ("dataset", "dataset_kind")
"""Parameters that must be equal: a sample of another dataset is other work."""

MOST_LOADERS = 4
"""Loaders of a trace that are compared, those with the most batches."""

SAME_LOADER = (*SAME_WORK, "sampler", "dataset_length", "made_at", "batch_size")
"""The loader in B that is compared is the one most like A's in these; the first counts most."""

CAUSES = ("sampling", "fetch", "pickle", "write", "rebuild", "pin", "consumer")
"""Stages whose change can be a cause; waiting and idling are effects."""

PARTS = {"fetch": ("sample", "collate"), "pickle": ("copy",)}
"""The parts of a stage, one of which may explain its change."""

ONE_BY_ONE = ("sample", "start", "fetcher", "shutdown")
"""Stages that do not take longer if batches are larger."""


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
@dataclass(frozen=True)
class Change:
    """One stage in both runs; worker -1 = all workers. seen: both recordings can show it.

    larger: how many times as large a batch of B is, for a stage of batches.
    """

    stage: str
    worker: int
    a: Figures | None
    b: Figures | None
    seen: bool = True
    larger: float = 1.0

    @property
    def ratio(self) -> Ratio:
        """The mean in B by the mean in A, of equally large batches; NaN if a run does not have the stage."""
        if self.a is None or self.b is None:
            return Ratio(float("nan"), float("nan"), float("nan"))
        return ratio(self.b.rate, self.a.rate, SURE).times(1 / self.larger)

    @property
    def verdict(self) -> Comparison:
        if not self.seen:
            return Comparison.UNSEEN
        if min((figures.count for figures in (self.a, self.b) if figures), default=0) < FEWEST:
            return Comparison.FEW
        if self.a is None or self.b is None:
            return Comparison.ONLY_B if self.a is None else Comparison.ONLY_A
        if not self.ratio.is_certain or 1 / NOTABLE < self.ratio.factor < NOTABLE:
            return Comparison.SAME
        return Comparison.SLOWER if self.ratio.factor > 1 else Comparison.FASTER

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
        factor = f"{self.ratio.factor:.2f}".replace("nan", "-")
        return f"{name:<12}{counts}{times}{factor:>8}  {self.verdict.value}"


@dataclass(frozen=True, slots=True)
class Part:
    """What the loop did, or waited for (cause None = its own steps): ns of a batch or a sample, in A and in B."""

    cause: Cause | None
    a: float
    b: float

    @property
    def change(self) -> float:
        return self.b - self.a

    @property
    def name(self) -> str:
        return "the loop's own steps" if self.cause is None else f"waiting for {self.cause.value}"


@dataclass(frozen=True, slots=True)
class Explained:
    """The parts of the loop's time that explain most of a difference, and their share of it.

    ranks: the only ones in which they do; the share is then of the difference there. () = all.
    """

    parts: tuple[Part, ...]
    share: float
    ranks: tuple[int, ...] = ()

    @classmethod
    def by(cls, parts: list[Part]) -> Explained:
        """Take the largest part of the difference; the second one, too, if the first is not ENOUGH."""
        whole = sum(part.change for part in parts) or 1.0
        most = sorted(parts, key=lambda part: -part.change / whole)[:2]
        most = most[: 1 if most[0].change / whole >= ENOUGH else 2]
        return cls(tuple(most), sum(part.change for part in most) / whole)

    def told(self, per: str) -> str:
        where = f" in {named_ranks(self.ranks, 4, and_joined)}" if self.ranks else ""
        what = ", and ".join(f"{p.name}: {duration(p.b)} instead of {duration(p.a)} a {per}" for p in self.parts)
        share = "all" if self.share >= 0.995 else percent(self.share)
        return f"{what}{where}, {share} of the difference{' there' if self.ranks else ''}"


@dataclass(frozen=True)
class Diff:
    """What `diff` found. stages: the consumer's cycle and wait first, then the event table's; workers: the same of each
    one; differences: in what the runs differ, in words; notes: what else to know; others: other loaders' headlines."""

    a: Side
    b: Side
    stages: list[Change]
    workers: list[Change]
    differences: list[str]
    notes: list[str]
    others: Sequence[str] = ()

    # --- how fast
    @cached_property
    def in_samples(self) -> bool:
        """Whether both traces tell how many samples a batch has; otherwise batches are compared."""
        return self.a.tells_samples and self.b.tells_samples

    @cached_property
    def rates(self) -> tuple[Rate, Rate]:
        """The steady rates of samples, or of batches."""
        return self.a.steady(self.in_samples), self.b.steady(self.in_samples)

    @cached_property
    def speed(self) -> Ratio:
        """B's steady rate by A's."""
        return ratio(*self.rates)

    @cached_property
    def whole(self) -> tuple[float, float]:
        """The rates in all of the loops' time, with the starts and ends of epochs, by s."""
        return self.a.whole(self.in_samples), self.b.whole(self.in_samples)

    @property
    def fewest(self) -> int:
        """The number of steady batches in the rank and run that has fewest."""
        return min(len(loop.steady(False)[1]) for each in (self.a, self.b) for loop in each.loops.values())

    @property
    def is_certain(self) -> bool:
        """Whether the rates differ: by the interval or, with too few batches for one, by their size."""
        found = self.speed
        return bool(self.fewest) and not found.low <= 1 <= found.high and not 1 / EQUAL < found.factor < EQUAL

    @property
    def differs(self) -> bool:
        """Whether there is a difference to explain: a certain one, or one so large that a longer run may confirm it."""
        large = not self.starts_matter and not 1 / NOTABLE < self.speed.factor < NOTABLE
        return self.is_certain or (bool(self.fewest) and large)

    @property
    def starts_matter(self) -> bool:
        """Whether the starts and ends of epochs change the comparison."""
        steady = self.speed.factor if self.is_certain else 1.0
        return bool(self.fewest) and not 1 / NOTABLE < self.whole[1] / self.whole[0] / steady < NOTABLE

    @property
    def headline(self) -> str:
        """The ratio of the rates with its interval; and that with the starts of epochs, if it is another one."""
        if not self.fewest:
            return "too few batches to compare the rates: a run has none after the first of each epoch"
        unit, (a, b) = "samples/s" if self.in_samples else "batches/s", self.whole
        starts = f"with the starts and ends of epochs: {rounded(b)} instead of {rounded(a)} {unit}"
        if not self.starts_matter:
            return self._of_steady(unit)
        if self.is_certain:
            return f"{self._of_steady(unit)}; {_times(b / a)} {starts}"
        return f"B is {_times(b / a)} {starts}; between them, {self._of_steady(unit)}"

    def _of_steady(self, unit: str) -> str:
        a, b = (rounded(each.by_s) for each in self.rates)
        factor, low, high = self.speed.factor, self.speed.low, self.speed.high
        if not self.is_certain:
            what = "no notable difference" if self.speed.is_certain else "no difference is certain"
            between = f"95% interval: B is {rounded(low)} to {rounded(high)} times as fast"
            return f"{what}: {b} instead of {a} {unit} ({between if self.speed.is_known else _TOO_FEW})"
        low, high = (low, high) if factor > 1 else (1 / high, 1 / low)
        within = f"95% interval {rounded(low)} to {rounded(high)}" if self.speed.is_known else _TOO_FEW
        return f"B is {_times(factor)}: {b} instead of {a} {unit} ({within})"

    # --- what changed in the loop's time
    @property
    def per(self) -> str:
        """What times are given for: a batch, or a sample if batches are not equally large."""
        return "batch" if _larger(self.a, self.b) == 1 else "sample"

    @property
    def ranks(self) -> list[int]:
        """The ranks in both runs; -1 = without ranks."""
        return sorted(self.a.loops.keys() & self.b.loops.keys())

    def split(self, rank: int | None = None) -> list[Part]:
        """The loop's steady time by what it did, in one rank or on average; [] if a trace does not show it."""
        a, b = (each.split(self.per == "sample", rank) for each in (self.a, self.b))
        return (
            [Part(cause, a[cause], b[cause]) for cause in a if a[cause] or b[cause]] if a and b and self.fewest else []
        )

    @cached_property
    def explained(self) -> Explained | None:
        """What explains most of the difference; None = no difference, or waiting is not in a trace.

        In several ranks, a wait comes before own steps: these contain the waits for slower ranks.
        """
        if not self.differs or not self.split():
            return None
        found = {rank: Explained.by(self.split(rank)) for rank in self.ranks}
        waits = {rank: each.parts[0] for rank, each in found.items() if each.parts[0].cause is not None}
        if not 0 < len(waits) < len(found):
            return Explained.by(self.split())
        first = max(waits, key=lambda rank: abs(waits[rank].change))
        return replace(found[first], ranks=tuple(rank for rank in waits if waits[rank].cause is waits[first].cause))

    # --- what changed in the stages
    def stage(self, name: str) -> Change | None:
        """Return the change of one stage over all workers."""
        return next((change for change in self.stages if change.stage == name), None)

    def impact(self, change: Change) -> float:
        """Return how many ns more of a stage an equally large batch takes in B."""
        return self.b.per_batch(change.b) / _larger(self.a, self.b) - self.a.per_batch(change.a)

    def most(self) -> Change | None:
        """Return the stage that changed most, in the direction of the difference; None if no cause changed clearly."""
        names = [*CAUSES, *(part for parts in PARTS.values() for part in parts)]
        slower = 1 - self.speed.factor if self.differs else 0
        clear = [c for c in self.stages if c.stage in names and c.is_clear and self.impact(c) * slower >= 0]
        most = max(clear, key=lambda change: abs(self.impact(change)), default=None)
        cycle = self.stage("cycle")
        if most is None or cycle is None:
            return None
        if abs(self.impact(most)) < NEGLIGIBLE * max(figures.mean for figures in (cycle.a, cycle.b) if figures):
            return None
        parts = [c for c in clear if c.stage in PARTS.get(most.stage, ())]
        return next((part for part in parts if self.impact(part) / self.impact(most) >= 0.5), most)

    def _of_stage(self, change: Change) -> str:
        a, b = change.a, change.b
        if not a or not b:
            only, what = (b, "new and takes") if b else (a, "gone and took")
            assert only is not None
            return f"{change.stage} changed most: it is {what} {duration(only.mean)} on average ({only.count} measured)"
        factor, equal = change.ratio.factor, "" if change.larger == 1 else " for equally many samples"
        how = f"{factor:.3g} times as long" if factor >= 1 else f"{1 / factor:.3g} times as fast"
        return (
            f"{change.stage} changed most: on average it takes {duration(b.mean)} instead of {duration(a.mean)}, "
            f"{how}{equal} ({a.count} and {b.count} measured{self._where(change)})"
        )

    def _where(self, change: Change) -> str:
        """Say in which workers of the only rank a stage changed, if there are several."""
        own = [c for c in self.workers if c.stage == change.stage]
        same = [c.worker for c in own if c.verdict is change.verdict]
        if len(own) < 2 or len(self.ranks) > 1:  # each rank has a worker 0
            return ""
        if all(1 / NOTABLE < c.ratio.factor < NOTABLE for c in own):
            return f", not within any of the {len(own)} workers: only their shares of the work changed"
        if len(same) == 1:
            return f", in worker {same[0]} alone"
        return f", in {len(same)} of {len(own)} workers" if same else ""

    # --- in words
    def story(self) -> list[str]:
        """What changed, a sentence each: the loop's time, a stage, the transport; and whether a run ends in a wait."""
        told, most, sides = [], self.most(), (self.a, self.b)
        if self.explained is not None:
            told.append(self.explained.told(self.per))
        if self.starts_matter and not self.is_certain:
            took = [duration(each.starting) for each in sides]
            told.append(f"{Cause.START_UP.value}: {took[1]} instead of {took[0]} in all")
        if most is not None:
            told.append(f"among the stages, {self._of_stage(most)}")
        a, b = self.a.way, self.b.way
        copied = (self.a.copied or 1.0, self.b.copied or 1.0)
        if a.transport and b.transport and a.transport != b.transport:
            told.append(f"{b.transport} instead of {a.transport}: {'; '.join(compared(a, b))}")
        elif self.a.copied and self.b.copied and not 1 / NOTABLE < copied[1] / copied[0] < NOTABLE:
            told.append(f"the bytes copied per batch changed from {size(copied[0])} to {size(copied[1])}")
        for name, each in zip("AB", sides, strict=True):
            if each.pending:
                wait = f"a wait of {duration(each.pending)} for a batch"
                told.append(f"{name} ends in {wait}, not counted here (see minidl summary)")
        return [*told, *self.others]

    def sentence(self) -> str:
        """The headline and what changed."""
        return "; ".join([self.headline, *self.story()])

    def text(self, workers: bool = False) -> str:
        """Return the headline, what changed, and tables of the loop, the runs and the stages; `workers`: of each."""
        lines = [self.headline, *self.story(), f"A: {self.a.path}", f"B: {self.b.path}"]
        lines += [f"differs: {difference}" for difference in self.differences]
        lines += ["", *self._of_loop(), f"{'':<24}{'A':>14}{'B':>14}", *self._rows(), ""]
        heads = "".join(f"{f'{name} {each}':>9}" for name in ("p50", "p95", "p99") for each in "AB")
        lines.append(f"{'stage, ms':<12}{'n A':>8}{'n B':>8}{heads}{'B / A':>8}")
        for change in self.stages:
            lines.append(change.text())
            lines += [c.text() for c in self.workers if workers and c.stage == change.stage]
        return "\n".join([*lines, *self.notes])

    def _of_loop(self) -> Iterator[str]:
        """Yield the loop's time by what it did, for all ranks, then what changed most in each."""
        if not (parts := self.split()):
            return
        yield f"{f'the loop, ms a {self.per}':<54}{'A':>10}{'B':>10}{'B - A':>10}"
        a, b = sum(part.a for part in parts), sum(part.b for part in parts)
        rows = [(part.name, part) for part in parts if max(part.a, part.b) >= NEGLIGIBLE / 2 * max(a, b)]
        rows.append(("together", Part(None, a, b)))
        for rank in self.ranks if len(self.ranks) > 1 else ():
            rows += [(f"rank {rank}: {part.name}", part) for part in Explained.by(self.split(rank)).parts]
        for name, part in rows:
            sign = "-" if part.change < 0 else "+"
            yield f"{name:<54}{_ms(part.a):>10}{_ms(part.b):>10}{sign + _ms(abs(part.change)):>10}"
        yield ""

    def _rows(self) -> Iterator[str]:
        def row(name: str, what: Callable[[Side], str]) -> str:
            return f"{name:<24}{what(self.a):>14}{what(self.b):>14}"

        yield row("batches", lambda side: str(side.batches))
        yield row("batches/s", lambda side: f"{side.whole(False):.2f}")
        yield row("  after the first", lambda side: f"{side.steady(False).by_s:.2f}".replace("nan", "?"))
        yield row("samples/s", lambda side: f"{side.whole(True):.1f}" if side.tells_samples else "?")
        yield row("waiting for batches", lambda side: percent(side.waiting_share))
        yield row("first batch of an epoch", lambda side: "?" if side.first is None else duration(side.first))
        yield row("start of the workers", lambda side: "?" if side.start_up is None else duration(side.start_up))
        yield row("bytes copied per batch", lambda side: "?" if side.copied is None else size(side.copied))
        yield row("copies of each byte", lambda side: f"{side.ledger.copies_per_byte:.2f}".replace("nan", "?"))
        yield row("avoidable bytes", lambda side: size(int(side.ledger.batches["avoidable"].sum())))

    def facts(self) -> dict[str, Any]:
        """The figures, for JSON; null if there are too few batches. rate: steady, and in all, by s."""
        why, found = self.explained, self.speed
        return {
            "headline": self.headline, "story": self.story(), "differences": self.differences, "notes": self.notes,
            "unit": "samples" if self.in_samples else "batches", "factor": found.factor if self.fewest else None,
            "interval": [found.low, found.high] if found.is_known else None, "is_certain": self.is_certain,
            "explained": why and {"by": [part.name for part in why.parts], "share": why.share, "ranks": why.ranks},
            "runs": [
                {"path": each.path, "rate": rate.by_s if self.fewest else None, "rate_in_all": whole,
                 "batches": each.batches, "samples": each.samples, "waiting_share": each.waiting_share}
                for each, rate, whole in zip((self.a, self.b), self.rates, self.whole, strict=True)
            ],
            "loop": [
                {"rank": rank, "what": part.name, "per": self.per, "a_ms": part.a / 1e6, "b_ms": part.b / 1e6}
                for rank in (None, *(self.ranks if len(self.ranks) > 1 else ())) for part in self.split(rank)
            ],
            "stages": [
                {"stage": c.stage, "worker": c.worker, "a_ms": c.a and c.a.mean / 1e6, "b_ms": c.b and c.b.mean / 1e6,
                 "verdict": c.verdict.value}
                for c in (*self.stages, *self.workers)
            ],
        }  # fmt: skip


_TOO_FEW = "too few batches for an interval"


def _times(factor: float) -> str:
    return f"{rounded(factor)} times as fast" if factor >= 1 else f"{rounded(1 / factor)} times as slow"


def _ms(nanoseconds: float) -> str:
    milliseconds = nanoseconds / 1e6
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _larger(a: Side, b: Side) -> float:
    """How many times as large a batch of B is; 1 if they are about equal, or it is not known."""
    found = b.batch_size / a.batch_size
    return 1.0 if not found > 0 or 1 / EQUAL < found < EQUAL else found


# --- From two traces to the comparison --------------------------------------------------------------------------------
def diff(a: Trace, b: Trace, *, force: bool = False) -> Diff:
    """Compare two runs, A before and B after: the loader with which A's loop spent most time, in all epochs and ranks.

    Of the other loaders that both runs have, only the headlines are told. Raises IncomparableError if the dataset
    differs, unless `force`, and TraceError if one of them has no batch.
    """
    groups_a, groups_b = groups(a), groups(b)
    pairs = [(mine, _alike(mine, groups_b)) for mine in groups_a]
    same = [(mine, other) for mine, other in pairs if all(_equal(mine, other)[: len(SAME_WORK)])]
    same = same[:MOST_LOADERS] if same[:1] == pairs[:1] else pairs[:1]
    sides = [(side(a, *mine), side(b, *theirs)) for mine, theirs in same]
    sides.sort(key=lambda pair: -pair[0].time)
    differences = _differences(*sides[0])
    vital = [differences[name] for name in SAME_WORK if name in differences]
    if vital and not force:
        raise IncomparableError(
            f"{a.path} and {b.path} did not do the same work: {'; '.join(vital)}. Record both with the same "
            f"dataset, or compare them anyway with force=True (--force)"
        )
    notes = _notes((a, b), (groups_a, groups_b), sides)
    first, *others = (Diff(*pair, *_changes(*pair), [*differences.values()], notes) for pair in sides)
    told = [
        f"{name_of(dict(other.a.params))}: {other.headline}" for other in others if other.differs or other.starts_matter
    ]
    return replace(first, others=told)


def _alike(mine: Group, others: list[Group]) -> Group:
    """Return the loader that is most like `mine`."""
    return max(others, key=lambda other: _equal(mine, other))


def _equal(a: Group, b: Group) -> list[bool]:
    return [a[1].get(name) == b[1].get(name) for name in SAME_LOADER]


_ORDER = ["cycle", "next", *dict.fromkeys(e.stage for e in EVENTS.values() if e.stage), "pin idle"]
"""cycle: the consumer's time from one batch to the next; next: its wait for each."""


def _changes(a: Side, b: Side) -> tuple[list[Change], list[Change]]:
    """Compare the stages over all workers, and of each worker."""
    found = []
    for stage, worker in sorted({*a.stages, *b.stages}, key=lambda key: (_ORDER.index(key[0]), key[1])):
        in_a, in_b = (each.stages.get((stage, worker)) for each in (a, b))
        larger = 1.0 if stage in ONE_BY_ONE else _larger(a, b)
        found.append(Change(stage, worker, in_a, in_b, stage not in a.unseen | b.unseen, larger))
    return [change for change in found if change.worker < 0], [change for change in found if change.worker >= 0]


def _differences(a: Side, b: Side) -> dict[str, str]:
    """Return the settings that differ, in words, by name."""
    ours, theirs = _settings(a), _settings(b)
    names = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    return {name: f"{name} {ours[name]!r} in A, {theirs[name]!r} in B" for name in names}


def _settings(side: Side) -> dict[str, Any]:
    """Return what is known of the loader and the machine; made_at changes with every edit of the program."""
    params = {name: value for name, value in sorted(side.params.items()) if name not in (*OF_ONE_ITERATOR, "made_at")}
    loader = {"loader": "torch's, observed" if side.params.get("observed") is True else "minidl's"}
    machine = {"host": "host", "cpus": "cpus", "detail of the recording": "detail"}
    known = {name: side.manifest.get(key) for name, key in machine.items()} | side.manifest.get("versions", {})
    return params | loader | {name: value for name, value in known.items() if value is not None}


def _notes(
    traces: tuple[Trace, Trace], found: tuple[list[Group], list[Group]], sides: list[tuple[Side, Side]]
) -> list[str]:
    notes = []
    for name, trace, loaders, own in zip("AB", traces, found, zip(*sides, strict=True), strict=True):
        if not trace.loaders.keys() & set(own[0].loaders):
            notes.append(f"{name}: the loader's parameters are not in the trace, so they could not be compared")
        others = {number for numbers, _ in loaders for number in numbers} - {n for each in own for n in each.loaders}
        if others:
            notes.append(f"{name}: the comparison leaves out iterators with other parameters: {len(others)}")
        lost = sum(process.lost for process in trace.processes)
        if lost:
            notes.append(f"{name}: {counted(lost, 'lost event is', 'lost events are')} missing from the figures")
        notes += [f"{name}: {text}" for text in lacking(trace.problems)]
    return [*notes, "The intervals are measured within each run: two runs do not show how much runs vary."]
