"""`minidl audit`: did the ranks of a run see what they should have seen?

Interface: `audit(traces)` takes a joined trace, or one trace a rank, and gives an `Audit`: per DataLoader and epoch
what each rank saw, and findings. A finding is a mistake, is harmless (padding, say), or says what this trace cannot
tell. `run(arguments)` is the command; its exit code is 1 where a mistake was found.

What is looked at: the indices that samples were asked by (`sample`), or without them each task's count and digest
(`sampler_next`); what a sampler of shares was told (`share`); the workers' seeds (`worker_ready`); which tasks were
yielded (`yield`). An index counts as seen when its batch was handed to the training loop. Two ranks' DataLoaders are
the same one where their datasets have the same class, and are the same in number of those.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from minidl.tracing import events as ev
from minidl.tracing.lanes import latest
from minidl.tracing.ranks import rank_of, traces_in
from minidl.tracing.reader import Trace, TraceError, read_trace

Rows = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]

MISTAKE, HARMLESS, UNKNOWN = "mistake", "harmless", "unknown"

BY_CHANCE: Final = 8
"""Samples from which on two epochs have one order by chance less often than once in 40,000 times."""

_SHUFFLING: Final = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
_IN_ORDER: Final = ("SequentialSampler", "_InfiniteConstantSampler")


@dataclass(frozen=True)
class Finding:
    """One verdict. rule: its name; text: what was found, with the evidence; fix: what to do, "" for nothing."""

    level: str
    rule: str
    text: str
    fix: str = ""

    def lines(self) -> list[str]:
        word = {MISTAKE: "MISTAKE", HARMLESS: "harmless", UNKNOWN: "not known"}[self.level]
        return [f"{word} ({self.rule}): {self.text}"] + ([f"    fix: {self.fix}"] if self.fix else [])


@dataclass(frozen=True)
class Share:
    """What a sampler of shares was told before a pass: its epoch, whose share, of how many."""

    epoch: int
    replica: int
    replicas: int


@dataclass(frozen=True)
class Pass:
    """One rank's way through a DataLoader: an epoch of it.

    indices: of the samples of all yielded batches, in the sampler's order; None where the trace does not have them.
    marks: something of each yielded task by which orders can be compared. complete: it went to the sampler's end.
    """

    rank: int
    epoch: int
    loader: int
    batches: int
    samples: int
    complete: bool
    indices: tuple[int, ...] | None
    marks: tuple[int, ...]
    share: Share | None

    @property
    def order(self) -> tuple[int, ...]:
        return self.marks if self.indices is None else self.indices


@dataclass
class Subject:
    """One DataLoader of the script, as all ranks have used it. seeds: rank -> its iterators' workers' seeds."""

    name: str
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    passes: dict[int, list[Pass]] = field(default_factory=dict)
    seeds: dict[int, list[dict[int, int]]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.passes)

    @property
    def length(self) -> int | None:
        """Of the dataset, where all ranks agree on it."""
        lengths = {facts.get("dataset_length") for facts in self.facts.values()}
        length = lengths.pop() if len(lengths) == 1 else None
        return length if type(length) is int and length >= 0 else None

    def fact(self, name: str) -> set[Any]:
        return {facts.get(name) for facts in self.facts.values()}

    def epochs(self) -> Iterator[tuple[int, dict[int, Pass]]]:
        """The passes of each epoch, by rank."""
        for epoch in range(max(map(len, self.passes.values()), default=0)):
            yield epoch, {rank: mine[epoch] for rank, mine in sorted(self.passes.items()) if epoch < len(mine)}


@dataclass
class Audit:
    """What was found. world: how many ranks the run had, as far as is known."""

    ranks: list[int]
    world: int
    subjects: list[Subject]
    findings: list[Finding]

    @property
    def mistakes(self) -> int:
        return sum(f.level == MISTAKE for f in self._all())

    def _all(self) -> list[Finding]:
        return [*self.findings, *(f for subject in self.subjects for f in subject.findings)]

    def text(self) -> str:
        """All of it, as lines for a terminal."""
        lines = [f"{_counted(len(self.ranks), 'rank')} of {self.world}, {_counted(len(self.subjects), 'DataLoader')}"]
        lines += [line for finding in self.findings for line in finding.lines()]
        for subject in self.subjects:
            lines += ["", *_table(subject)]
            lines += [f"  {line}" for finding in subject.findings for line in finding.lines()]
        found = _counted(self.mistakes, "mistake") if self.mistakes else "no mistake"
        return "\n".join([*lines, "", f"{found} found"])

    def to_json(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "ranks": self.ranks,
            "world_size": self.world,
            "mistakes": self.mistakes,
            "findings": [asdict(finding) for finding in self.findings],
            "dataloaders": [_subject_json(subject) for subject in self.subjects],
        }


def _subject_json(subject: Subject) -> dict[str, Any]:
    told = ("rank", "epoch", "loader", "batches", "samples", "complete")
    passes = [one for rank in subject.ranks for one in subject.passes[rank]]
    return {
        "name": subject.name,
        "dataset_length": subject.length,
        "passes": [{name: getattr(one, name) for name in told} for one in passes],
        "findings": [asdict(finding) for finding in subject.findings],
    }


def _table(subject: Subject) -> list[str]:
    """What each rank saw, as batches/samples a rank and an epoch."""
    samplers = ", ".join(sorted(map(str, subject.fact("sampler"))))
    size = "" if subject.length is None else f" of {_counted(subject.length, 'sample')}"
    lines = [f"{subject.name}{size}, sampler {samplers}: batches/samples seen; * = not to the end"]
    lines.append("  epoch " + "".join(f"{f'rank {rank}':>14}" for rank in subject.ranks))
    for epoch, passes in subject.epochs():
        cells = [f"{p.batches}/{p.samples}{'' if p.complete else '*'}" if p else "-" for p in
                 (passes.get(rank) for rank in subject.ranks)]  # fmt: skip
        lines.append(f"  {epoch:<6}" + "".join(f"{cell:>14}" for cell in cells))
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="a joined trace, or those of the ranks, or their directory",
    )
    parser.add_argument("--json", action="store_true", help="the report for machines")


def run(arguments: argparse.Namespace) -> int:
    """The command; prints the report. 1 where a mistake was found, else 0."""
    report = audit([read_trace(path) for path in traces_in(arguments.traces)])
    json.dump(report.to_json(), sys.stdout) if arguments.json else print(report.text(), end="")
    print()
    return 1 if report.mistakes else 0


def audit(traces: Sequence[Trace]) -> Audit:
    """Look at what the ranks saw. Raises TraceError where two traces are of one rank, or one does not say its rank."""
    subjects: dict[tuple[Any, ...], Subject] = {}
    ranks: set[int] = set()
    for trace in traces:
        of = _ranks(trace)
        here = set(of.values()) or {_alone(trace, traces)}
        if ranks & here:
            raise TraceError(
                f"audit: rank {min(ranks & here)} twice: {trace.path} is one of them: give one run's traces"
            )
        ranks |= here
        for rank in sorted(here):
            _collect(trace, [loader for loader, its in of.items() if its == rank], rank, subjects)
    world = max([len(ranks), *_sizes(traces)])
    report = Audit(sorted(ranks), world, list(subjects.values()), list(_about_the_traces(traces, ranks, world)))
    for subject in report.subjects:
        subject.findings += _judge(subject, world)
    return report


def _alone(trace: Trace, traces: Sequence[Trace]) -> int:
    rank = rank_of(trace)
    if rank is None and len(traces) > 1:
        raise TraceError(f"audit: {trace.path} does not say which rank it is of: name its directory rank0, rank1, ...")
    return rank or 0


def _ranks(trace: Trace) -> dict[int, int]:
    """loader -> rank, of all loaders that have events."""
    numbers = [number for number in np.unique(trace.events["loader"]).tolist() if number]
    if not trace.manifest.get("ranks"):
        rank = rank_of(trace)
        return dict.fromkeys(numbers, 0 if rank is None else rank) if rank is not None else {}
    of_process = {process.loader: process.rank for process in trace.processes if process.rank >= 0}
    told = {n: trace.loaders.get(n, {}).get("rank", of_process.get(n)) for n in numbers}
    return {number: rank for number, rank in told.items() if type(rank) is int}


def _sizes(traces: Iterable[Trace]) -> Iterator[int]:
    for trace in traces:
        for facts in (trace.manifest, *trace.loaders.values(), *trace.described("clock")):
            if type(size := facts.get("world_size")) is int:
                yield size


def _about_the_traces(traces: Sequence[Trace], ranks: set[int], world: int) -> Iterator[Finding]:
    absent = sorted(set(range(world)) - ranks)
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        yield Finding(UNKNOWN, "ranks", f"of {world} ranks, no trace is here of {shown}: what they saw is not known")
    for trace in traces:
        cut = [process.name for process in trace.processes if process.whole_from]
        if cut:
            yield Finding(
                UNKNOWN,
                "overwritten",
                f"{trace.path.name}: the oldest events of {len(cut)} processes were overwritten, and the first epochs",
                "record with ring_bytes=None, or with MINIDL_TRACE_RING=full",
            )


# --- What each rank saw -----------------------------------------------------------------------------------------------
def _collect(trace: Trace, loaders: list[int], rank: int, subjects: dict[tuple[Any, ...], Subject]) -> None:
    """Add the rank's loaders to the subjects: iterators of one DataLoader to one of them."""
    loaders = loaders or [number for number in np.unique(trace.events["loader"]).tolist() if number]
    events = trace.events[np.argsort(trace.events["loader"], kind="stable")]
    numbers = np.array(loaders, np.int64)
    bounds = np.searchsorted(events["loader"], np.stack([numbers, numbers + 1]))
    keys: dict[Any, tuple[Any, ...]] = {}
    known: Counter[tuple[Any, ...]] = Counter()
    for loader, first, last in zip(loaders, *bounds.tolist(), strict=True):
        facts, rows = trace.loaders.get(loader, {}), events[first:last]
        if not np.isin(rows["code"], [ev.EPOCH[0], ev.YIELD]).any():
            continue  # made, and never iterated
        dataset = (str(facts.get("dataset", "unknown dataset")), str(facts.get("dataset_kind", "")))
        identity = facts.get("dataloader") or (*dataset, facts.get("sampler"), facts.get("batch_size"))
        if identity not in keys:
            keys[identity] = (*dataset, known[dataset])
            known[dataset] += 1
        key = keys[identity]
        again = f" (number {key[2] + 1})" if key[2] else ""
        subject = subjects.setdefault(key, Subject(f"DataLoader of {dataset[0]}{again}"))
        subject.facts.setdefault(rank, facts)
        mine = subject.passes.setdefault(rank, [])
        mine += _passes(rows, rank, loader, len(mine))
        ready = rows[rows["code"] == ev.WORKER_READY]
        subject.seeds.setdefault(rank, []).append(dict(zip(ready["worker"].tolist(), ready["z"].tolist(), strict=True)))


def _passes(rows: Rows, rank: int, loader: int, number: int) -> Iterator[Pass]:
    """The passes of one iterator. rows: its events, by time; what came before its first epoch's begin is left out."""
    begins, ends = rows[rows["code"] == ev.EPOCH[0]], rows[rows["code"] == ev.EPOCH[1]]
    tasks = rows[(rows["code"] == ev.SAMPLER_NEXT[1]) & (rows["x"] > 0)]
    asked = len(tasks) > 0
    if not asked:  # the loader was observed from outside
        tasks = rows[rows["code"] == ev.INDEX_PUT]
    epoch = np.searchsorted(begins["time"], tasks["time"], side="right") - 1
    yields = rows[(rows["code"] == ev.YIELD) & (rows["x"] == ev.Outcome.DATA)]
    yielded = np.zeros(len(tasks), bool)
    at = _task_of(tasks, yields)
    yielded[at[at >= 0]] = True
    indices = _indices(tasks, rows[rows["code"] == ev.SAMPLE[0]])
    shares = rows[rows["code"] == ev.SHARE]
    for this, begin in enumerate(begins):
        mine = np.flatnonzero((epoch == this) & yielded)
        mine = mine[np.argsort(tasks["task"][mine], kind="stable")]
        known = [indices[task] for task in mine.tolist()]
        own = ends[(ends["time"] >= begin["time"]) & (ends["x"] == begin["x"])]
        yield Pass(
            rank=rank,
            epoch=number + this,
            loader=loader,
            batches=len(mine),
            samples=int(tasks["x"][mine].sum()),
            complete=bool(len(own)) and int(own["z"][0]) == ev.Ending.EXHAUSTED,
            indices=None if any(k is None for k in known) else tuple(i for k in known for i in k or ()),
            marks=_marks(tasks[mine]) if asked else (),
            share=_share(shares, tasks["time"][epoch == this]),
        )


def _task_of(tasks: Rows, rows: Rows) -> Ints:
    """Position in `tasks` of the task that each row is about: the last of its number so far; -1 = none."""
    return latest(tasks["task"], tasks["time"], rows["task"], rows["time"], np.zeros(len(rows), bool))


def _indices(tasks: Rows, samples: Rows) -> list[tuple[int, ...] | None]:
    """For each task the indices of its samples, in their places; None where one of them is not known."""
    at = _task_of(tasks, samples)
    order = np.lexsort((samples["x"], at))
    order = order[at[order] >= 0]
    bounds = np.searchsorted(at[order], np.arange(len(tasks) + 1))
    found = samples["y"][order]
    out: list[tuple[int, ...] | None] = []
    for task, count in enumerate(tasks["x"].tolist()):
        mine = found[bounds[task] : bounds[task + 1]]
        out.append(tuple(mine.tolist()) if len(mine) == count and (mine >= 0).all() else None)
    return out


def _marks(tasks: Rows) -> tuple[int, ...]:
    """The tasks' digests, or, where a trace has none, their first indices; () where it has neither."""
    column = "z" if tasks["z"].all() else "y"
    return tuple(tasks[column].tolist()) if len(tasks) and (column == "z" or (tasks["y"] >= 0).all()) else ()


def _share(shares: Rows, times: Ints) -> Share | None:
    """What the sampler was told last before the pass's first task."""
    before = shares[shares["time"] <= times[0]] if len(times) else shares
    return Share(*(int(before[-1][name]) for name in "xyz")) if len(before) else None


# --- Verdicts ---------------------------------------------------------------------------------------------------------
def _judge(subject: Subject, world: int) -> Iterator[Finding]:
    yield from _uneven(subject)
    causes = list(_shares(subject, world))
    found = [*causes, *_coverage(subject, world), *_same_order(subject)]
    follow = {rule for cause in causes for rule in _FOLLOW[cause.rule]}
    yield from (finding for finding in found if finding.rule not in follow)
    yield from _seeds(subject)


_FOLLOW: Final = {
    "wrong share": ("overlap", "missing"),
    "set_epoch on some ranks": ("overlap", "missing", "forgotten set_epoch"),
    "different sampler seeds": ("overlap", "missing"),
}
"""What a mistake brings with it, and is not told as another one."""


def _uneven(subject: Subject) -> Iterator[Finding]:
    """Ranks that take different numbers of steps: the one that takes more waits for the others' gradients for ever."""
    for epoch, passes in subject.epochs():
        done = {rank: one.batches for rank, one in passes.items() if one.complete}
        beyond = {
            r: p.batches
            for r, p in passes.items()
            if not p.complete and p.batches > min(done.values(), default=1 << 62)
        }
        counts = done | beyond
        if len(set(counts.values())) > 1:
            told = ", ".join(f"rank {rank} {count}" for rank, count in sorted(counts.items()))
            yield Finding(
                MISTAKE, "uneven batches",
                f"in epoch {epoch}, the ranks took different numbers of batches: {told}. In "
                "DistributedDataParallel, the rank that takes one more waits for gradients that nobody sends",
                "give every rank as many batches: a DistributedSampler (it pads, or drops with drop_last=True), or run "
                "the loop under torch.distributed.algorithms.join.Join",
            )  # fmt: skip
            return


def _shares(subject: Subject, world: int) -> Iterator[Finding]:
    """What the ranks' samplers were told."""
    for epoch, passes in subject.epochs():
        told = {rank: one.share for rank, one in passes.items() if one.share is not None}
        wrong = {r: s for r, s in told.items() if world > 1 and (s.replica != r or s.replicas != world)}
        if wrong:
            rank, share = min(wrong.items())
            yield Finding(
                MISTAKE, "wrong share",
                f"in epoch {epoch}, the sampler of rank {rank} of {world} deals out share {share.replica} of "
                f"{share.replicas}" + (f", and {len(wrong) - 1} more ranks' are wrong too" if len(wrong) > 1 else ""),
                "make the sampler after init_process_group, without rank= and num_replicas=, which it then finds out",
            )  # fmt: skip
            return
        if len({share.epoch for share in told.values()}) > 1:
            which = ", ".join(f"rank {rank} epoch {share.epoch}" for rank, share in sorted(told.items()))
            yield Finding(
                MISTAKE, "set_epoch on some ranks",
                f"in epoch {epoch} of the loader, the samplers were told different epochs ({which}), so their shares "
                "are of different permutations: some samples are seen twice, some by nobody",
                "call sampler.set_epoch(epoch) with the same number on every rank",
            )  # fmt: skip
            return
    seeds = subject.fact("sampler_seed")
    if len(seeds) > 1 and any(p[0].share is not None for p in subject.passes.values() if p):
        yield Finding(
            MISTAKE, "different sampler seeds",
            f"the ranks' samplers have different seeds ({', '.join(sorted(map(str, seeds)))}), so their shares are of "
            "different permutations: some samples are seen twice, some by nobody",
            "give DistributedSampler the same seed on every rank",
        )  # fmt: skip


def _coverage(subject: Subject, world: int) -> Iterator[Finding]:
    """Which samples were seen by several ranks, or by none. Each kind of finding is told for its first epoch."""
    if "iterable" in subject.fact("dataset_kind"):
        yield Finding(
            UNKNOWN, "overlap",
            "an iterable dataset has no indices: whether ranks and workers saw the same samples is not in the trace",
        )  # fmt: skip
        return
    told: set[str] = set()
    for epoch, passes in subject.epochs():
        for finding in _overlap(subject, epoch, passes, world):
            if finding.rule not in told:
                told.add(finding.rule)
                yield finding


def _overlap(subject: Subject, epoch: int, passes: dict[int, Pass], world: int) -> Iterator[Finding]:
    dealt = any(one.share is not None for one in passes.values())
    if any(one.indices is None for one in passes.values()):
        yield _without_indices(subject, epoch, passes, dealt)
        return
    seen = Counter(index for one in passes.values() for index in one.indices or ())
    padding = _padding(subject, passes)
    twice = {index: count for index, count in (seen - padding).items() if count > 1}
    redrawn = any(len(set(one.indices or ())) < len(one.indices or ()) for one in passes.values()) and not dealt
    if twice and len(passes) > 1 and not redrawn and _across(passes, twice):
        yield _seen_twice(subject, epoch, passes, twice, dealt)
    elif twice:
        yield Finding(
            HARMLESS, "drawn twice",
            f"in epoch {epoch}, {_counted(len(twice), 'sample')} came twice or more ({_some(twice)}), and some of them "
            "on one rank: the sampler draws with replacement",
        )  # fmt: skip
    if padding and not twice:
        yield Finding(
            HARMLESS, "padding",
            f"in epoch {epoch}, {_counted(padding.total(), 'sample')} came twice so that all ranks have as many: "
            f"{_some(padding)}. For training that is fine; a metric counts them twice",
        )  # fmt: skip
    if len(passes) == world and all(one.complete for one in passes.values()):
        yield from _unseen(subject, epoch, passes, seen, dealt)


def _padding(subject: Subject, passes: dict[int, Pass]) -> Counter[int]:
    """The samples that a sampler of shares repeats so that all shares are as long: those behind its order's end."""
    length, out = subject.length, Counter[int]()
    for one in passes.values():
        if one.share is not None and length and one.indices is not None:
            first = max(0, -(-(length - one.share.replica) // one.share.replicas))  # in this share, behind the end
            out.update(one.indices[first:])
    return out


def _across(passes: dict[int, Pass], indices: dict[int, int]) -> bool:
    """Is one of these seen by several ranks?"""
    sets = [indices.keys() & set(one.indices or ()) for one in passes.values()]
    return sum(map(len, sets)) > len(set().union(*sets))


def _seen_twice(subject: Subject, epoch: int, passes: dict[int, Pass], twice: dict[int, int], dealt: bool) -> Finding:
    distinct = len({index for one in passes.values() for index in one.indices or ()})
    which = f"{len(twice)} of {distinct} samples were seen by several of {len(passes)} ranks ({_some(twice)})"
    found = f"in epoch {epoch}, {which}"
    if dealt:
        return Finding(
            MISTAKE, "overlap", f"{found}, and that is no padding: the ranks' shares are not of one order",
            "give all ranks' samplers the same dataset length, seed, shuffle and epoch, and each its own rank",
        )  # fmt: skip
    return _no_shares(subject, found)


def _without_indices(subject: Subject, epoch: int, passes: dict[int, Pass], dealt: bool) -> Finding:
    """What can be said of overlap by what all indices of a task amount to."""
    marks, found = [one.marks for one in passes.values()], ""
    if len(passes) > 1 and not dealt:
        if all(marks) and len(set(marks)) == 1:
            found = "all ranks had the same samples in the same order"
        elif subject.length and all(one.samples == subject.length and one.complete for one in passes.values()):
            found = f"each rank saw {subject.length} samples, as many as the dataset has"
    if found:
        return _no_shares(subject, f"in epoch {epoch}, {found}")
    return Finding(
        UNKNOWN, "overlap", "the trace does not have the samples' indices, so which were seen twice cannot be told",
        'record with detail="sample", and a dataset without __getitems__',
    )  # fmt: skip


def _no_shares(subject: Subject, found: str) -> Finding:
    samplers = ", ".join(sorted(map(str, subject.fact("sampler"))))
    return Finding(
        MISTAKE, "forgotten DistributedSampler",
        f"{found}, and no sampler dealt out shares: it was {samplers} on each rank. Unless each rank's dataset holds a "
        "share of its own, every rank trains on the same data",
        "DataLoader(dataset, sampler=DistributedSampler(dataset), ...) in place of shuffle=True",
    )  # fmt: skip


def _unseen(
    subject: Subject, epoch: int, passes: dict[int, Pass], seen: Counter[int], dealt: bool
) -> Iterator[Finding]:
    length = subject.length
    if not length or not dealt:
        return
    missing = sorted(set(range(length)) - seen.keys())
    if not missing:
        return
    by_sampler = length % len(passes) if subject.fact("sampler_drop_last") == {True} else 0
    sizes = {size for size in subject.fact("batch_size") if type(size) is int}
    by_loader = (max(sizes, default=1) - 1) * len(passes) if subject.fact("drop_last") == {True} else 0
    found = f"in epoch {epoch}, {_counted(len(missing), 'sample')} of {length} came to no rank: {_some(missing)}"
    if len(missing) <= by_sampler + by_loader:
        yield Finding(
            HARMLESS, "dropped", f"{found}. drop_last does that, and with set_epoch they are others each time"
        )
    else:
        yield Finding(
            MISTAKE, "missing", f"{found}, more than drop_last explains",
            "each rank's sampler needs its own rank, and the same length, seed and epoch as the others",
        )  # fmt: skip


def _same_order(subject: Subject) -> Iterator[Finding]:
    """One order in several epochs: a forgotten `set_epoch`, a generator that is seeded anew, or no shuffling."""
    if "iterable" in subject.fact("dataset_kind"):
        return
    whole = {rank: [one for one in mine if one.complete] for rank, mine in sorted(subject.passes.items())}
    pairs = {rank: list(pairwise(mine)) for rank, mine in whole.items()}
    if not any(pairs.values()):
        yield Finding(UNKNOWN, "set_epoch", "there is only one whole epoch: whether orders differ cannot be told")
        return
    if not any(first.order for each in pairs.values() for first, _ in each):
        yield Finding(UNKNOWN, "set_epoch", "the trace says nothing of the order of the samples")
    alike = {rank: [(a, b) for a, b in each if a.order and a.order == b.order] for rank, each in pairs.items()}
    rank, same = next(((rank, each) for rank, each in alike.items() if each), (0, []))
    if not same:
        return
    first, second = same[0]
    found = f"rank {rank} had the same order in epochs {first.epoch} and {second.epoch}"
    found += f" (and in {len(same) - 1} more pairs)" if len(same) > 1 else ""
    if subject.fact("sampler_shuffle") == {False} or subject.fact("sampler") <= set(_IN_ORDER):
        yield Finding(HARMLESS, "no shuffling", f"{found}: its sampler does not shuffle. Right for a validation loader")
    elif first.share is not None and second.share is not None and first.share.epoch == second.share.epoch:
        yield Finding(
            MISTAKE, "forgotten set_epoch",
            f"{found}: its sampler shuffles by its seed and epoch, and was told epoch {first.share.epoch} both times",
            "call sampler.set_epoch(epoch) before each epoch, on every rank",
        )  # fmt: skip
    elif not (subject.fact("sampler") <= set(_SHUFFLING) or subject.fact("sampler_shuffle") == {True}):
        yield Finding(
            UNKNOWN, "same order in each epoch", f"{found}. Whether its sampler should shuffle is not in the trace",
        )  # fmt: skip
    elif first.samples >= BY_CHANCE:
        yield Finding(
            MISTAKE, "same order in each epoch",
            f"{found}, and its sampler ({', '.join(sorted(map(str, subject.fact('sampler'))))}) shuffles: its "
            "generator starts anew each time",
            "seed the generator once, before the first epoch",
        )  # fmt: skip


def _seeds(subject: Subject) -> Iterator[Finding]:
    """Seeds that several ranks' workers have, or one rank's workers in several epochs."""
    if not any(seeds for each in subject.seeds.values() for seeds in each):
        yield Finding(
            UNKNOWN, "seeds", "there are no workers, so samples are made with the random numbers of the rank's own "
            "process, whose seed is not in the trace",
        )  # fmt: skip
        return
    owners: dict[int, set[tuple[int, int]]] = {}
    for rank, iterators in subject.seeds.items():
        for seeds in iterators:
            for worker, seed in seeds.items():
                owners.setdefault(seed, set()).add((rank, worker))
    shared = {seed: who for seed, who in owners.items() if len({rank for rank, _ in who}) > 1}
    if shared:
        seed, who = min(shared.items(), key=lambda item: sorted(item[1]))
        whom = " and ".join(f"worker {worker} of rank {rank}" for rank, worker in sorted(who)[:4])
        yield Finding(
            MISTAKE, "same seeds on several ranks",
            f"{whom} have the same seed, {seed}" + (f"; so have {len(shared) - 1} more" if len(shared) > 1 else "")
            + ". Where samples are drawn or augmented at random, the ranks do the same to their samples",
            "torch.manual_seed(seed + rank), or DataLoader(generator=torch.Generator().manual_seed(seed + rank))",
        )  # fmt: skip
    for rank, iterators in sorted(subject.seeds.items()):
        again = [(i, j) for i, a in enumerate(iterators) for j, b in enumerate(iterators[:i]) if a and a == b]
        if again:
            later, earlier = again[0]
            yield Finding(
                MISTAKE, "same seeds in each epoch",
                f"the workers of rank {rank} had the same seeds when the loader was iterated for the "
                f"{_ordinal(earlier)} and for the {_ordinal(later)} time. Where samples are augmented at random, each "
                "epoch does the same to them",
                "seed once, before the first epoch: not in the loop, and no generator that is made anew",
            )  # fmt: skip
            return


def _ordinal(number: int) -> str:
    return {0: "first", 1: "second", 2: "third"}.get(number, f"{number + 1}th")


def _some(indices: Iterable[int]) -> str:
    listed = sorted(set(indices))
    return "index " * (len(listed) == 1) + ", ".join(map(str, listed[:6])) + (", ..." if len(listed) > 6 else "")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
