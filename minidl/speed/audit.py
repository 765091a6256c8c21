"""`minidl audit`: check that the ranks of a run saw the samples that they should have seen.

Interface: `audit(traces)` takes a joined trace, or one trace a rank, and gives an `Audit`: per DataLoader and epoch
what each rank saw, and findings. A finding is a mistake; a question, if the same facts are right in one program and a
mistake in another; harmless (such as padding); or it says what the trace does not show. `run(arguments)` is the
command; its exit code is 1 after a mistake that the user has not allowed by name.

It uses: the indices of samples (`sample`, `sample_index`), or without them each task's count and digest
(`sampler_next`); the settings of a sampler of shares (`share`); the workers' seeds (after worker_init_fn, or
`worker_ready`); the yielded tasks (`yield`). An index counts as seen when the training loop received its batch. Two
ranks' DataLoaders are the same if their datasets have the same class, the same line of the program made both, and
both have the same number among those.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from minidl import terminal
from minidl.guides import more
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Ints, Rows
from minidl.tracefile.batches import latest
from minidl.tracefile.format import TraceError
from minidl.tracefile.join import rank_of, told, traces_in
from minidl.tracefile.loaders import only
from minidl.tracefile.ranks import last_start
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import counted, listed, plain

MISTAKE, QUESTION, HARMLESS, UNKNOWN, ALLOWED = "mistake", "question", "harmless", "unknown", "allowed"

BY_CHANCE: Final = 8
"""With this many samples, two epochs have the same order by chance less than once in 40,000 times."""

MOST_REPEATS: Final = 32
"""The most times in a row that a sampler may give a sample by design; each needs a pass over the order."""

_SHUFFLING: Final = ("RandomSampler", "SeedableRandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
_IN_ORDER: Final = ("SequentialSampler", "_InfiniteConstantSampler")


@dataclass(frozen=True)
class AuditFinding:
    """One verdict, or the template of one. text: the evidence; fix: the remedy, "" = none is needed."""

    level: str
    rule: str
    text: str
    fix: str = ""

    def of(self, **facts: Any) -> AuditFinding:
        """Return the finding with the facts in its text."""
        return replace(self, text=self.text.format(**facts))

    def lines(self) -> list[str]:
        word = {MISTAKE: "MISTAKE", UNKNOWN: "unknown"}.get(self.level, self.level)
        return [f"{word} ({self.rule}): {self.text}"] + ([f"    fix: {self.fix}"] if self.fix else [])


class Share(NamedTuple):
    """The settings of a sampler of shares before a pass: its epoch, its rank's share, of how many."""

    epoch: int
    replica: int
    replicas: int


@dataclass(frozen=True)
class Pass:
    """One rank's epoch of a DataLoader.

    indices: of the samples of all yielded batches, in the sampler's order; None if the trace does not have them.
    dealt_in: the number of samples that each rank gets in its turn. marks: a number for each yielded task, to compare
    orders by. complete: it went to the sampler's end. whole: it is complete, or took the sampler's last batch without
    asking for another, as frameworks do.
    """

    rank: int
    epoch: int
    loader: int
    batches: int
    samples: int
    complete: bool
    whole: bool
    indices: tuple[int, ...] | None
    marks: tuple[int, ...]
    share: Share | None
    dealt_in: int = 1

    @property
    def order(self) -> tuple[int, ...]:
        return self.marks if self.indices is None else self.indices

    @property
    def seen(self) -> tuple[int, ...]:
        """The indices, as far as known."""
        return self.indices or ()


class Seeds(NamedTuple):
    """The seeds of one iterator's workers, by worker.

    whole: its last epoch went to the sampler's end. drawn: a worker drew random numbers for samples.
    """

    of: dict[int, int]
    whole: bool
    drawn: bool


@dataclass
class Subject:
    """One DataLoader of the script on all ranks. seeds: rank -> seeds of its iterators that yielded batches."""

    name: str
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    passes: dict[int, list[Pass]] = field(default_factory=dict)
    seeds: dict[int, list[Seeds]] = field(default_factory=dict)
    findings: list[AuditFinding] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.passes)

    @property
    def length(self) -> int | None:
        """Length of the dataset, if all ranks agree on it."""
        lengths = {facts.get("dataset_length") for facts in self.facts.values()}
        length = lengths.pop() if len(lengths) == 1 else None
        return length if type(length) is int and length >= 0 else None

    @property
    def samplers(self) -> str:
        return ", ".join(sorted(map(str, self.fact("sampler"))))

    def fact(self, name: str) -> set[Any]:
        return {facts.get(name) for facts in self.facts.values()}

    def has(self, **facts: Any) -> bool:
        """Whether these facts are so on every rank."""
        return all(self.fact(name) == {value} for name, value in facts.items())

    def of_ranks(self, ranks: Iterable[int]) -> Subject:
        """Return the subject as if only these ranks had used it."""
        of_these = set(ranks).__contains__
        return replace(
            self,
            facts={rank: facts for rank, facts in self.facts.items() if of_these(rank)},
            passes={rank: passes for rank, passes in self.passes.items() if of_these(rank)},
            seeds={rank: seeds for rank, seeds in self.seeds.items() if of_these(rank)},
        )

    def epochs(self) -> Iterator[tuple[int, dict[int, Pass]]]:
        """The passes of each epoch, by rank."""
        for epoch in range(max(map(len, self.passes.values()), default=0)):
            yield epoch, {rank: mine[epoch] for rank, mine in sorted(self.passes.items()) if epoch < len(mine)}


@dataclass
class Audit:
    """All findings. world: the number of ranks of the run, as far as known."""

    ranks: list[int]
    world: int
    subjects: list[Subject]
    findings: list[AuditFinding]

    @property
    def mistakes(self) -> int:
        return self._count(MISTAKE)

    @property
    def questions(self) -> int:
        return self._count(QUESTION)

    def _count(self, level: str) -> int:
        return sum(f.level == level for found in self._each() for f in found)

    def _each(self) -> list[list[AuditFinding]]:
        return [self.findings, *(subject.findings for subject in self.subjects)]

    def allow(self, rules: Iterable[str]) -> None:
        """Allow the findings of these rules, as the user asked. Raises TraceError for an unknown name."""
        for rule in rules:
            if rule not in RULES:
                raise TraceError(f"audit --allow: no finding is called {rule!r}: give one of {listed(RULES, 99)}")
            for found in self._each():
                found[:] = [replace(one, level=ALLOWED, fix="") if one.rule == rule else one for one in found]

    def text(self) -> str:
        """Return the audit as lines for a terminal."""
        lines = [f"{counted(len(self.ranks), 'rank')} of {self.world}, {counted(len(self.subjects), 'DataLoader')}"]
        lines += [line for finding in self.findings for line in finding.lines()]
        for subject in self.subjects:
            lines += ["", *_table(subject)]
            lines += [f"  {line}" for finding in subject.findings for line in finding.lines()]
        found = counted(self.mistakes, "mistake") if self.mistakes else "no mistake"
        asked = f", and {counted(self.questions, 'question')} for you" if self.questions else ""
        help = [f"  {more('ranks')}"] if self.mistakes or self.questions else []
        return "\n".join([*map(plain, lines), "", f"{found} found{asked}", *help])

    def to_json(self) -> dict[str, Any]:
        """Return the audit as plain values."""
        return {
            "ranks": self.ranks,
            "world_size": self.world,
            "mistakes": self.mistakes,
            "questions": self.questions,
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
    """Return the table of batches/samples by rank and epoch."""
    size = "" if subject.length is None else f" of {counted(subject.length, 'sample')}"
    lines = [f"{subject.name}{size}, sampler {subject.samplers}: batches/samples seen; * = ended early"]
    lines.append("  epoch " + "".join(f"{f'rank {rank}':>14}" for rank in subject.ranks))
    for epoch, passes in subject.epochs():
        cells = [f"{p.batches}/{p.samples}{'' if p.whole else '*'}" if p else "-" for p in
                 (passes.get(rank) for rank in subject.ranks)]  # fmt: skip
        lines.append(f"  {epoch:<6}" + "".join(f"{cell:>14}" for cell in cells))
    return lines


def run(arguments: argparse.Namespace) -> int:
    """`minidl audit`: print the report; return 1 if a mistake was found that is not allowed, else 0."""
    with terminal.busy("comparing the ranks"):
        report = audit([only(read_trace(path), arguments.dataloader) for path in traces_in(arguments.traces)])
    report.allow(arguments.allow)
    json.dump(report.to_json(), sys.stdout) if arguments.json else print(report.text(), end="")
    print()
    return 1 if report.mistakes else 0


def audit(traces: Sequence[Trace]) -> Audit:
    """Judge what the ranks saw. Raises TraceError if two traces are of one rank, or one does not say its rank."""
    subjects: dict[tuple[Any, ...], Subject] = {}
    ranks: set[int] = set()
    for trace in traces:
        of = _ranks(trace)
        here = set(of.values()) or {_alone(trace, traces)}
        if ranks & here:
            raise TraceError(
                f"audit: two traces of rank {min(ranks & here)}, one is {trace.path}: give the traces of one run"
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
        raise TraceError(f"audit: {trace.path} does not name its rank: rename its directory to rank0, rank1, ...")
    return rank or 0


def _ranks(trace: Trace) -> dict[int, int]:
    """Return loader -> rank, of the loaders of the ranks' last start that have events: as recorded, if several are."""
    restarts, _ = last_start(trace.lines)
    numbers = [number for number in np.unique(trace.events["loader"]).tolist() if number]
    numbers = [number for number in numbers if trace.loaders.get(number, {}).get("restart", 0) == restarts]
    recorded = {n: rank for n in numbers if type(rank := trace.loaders.get(n, {}).get("rank")) is int}
    if trace.manifest.get("ranks") or len(set(recorded.values())) > 1:
        return recorded
    rank = rank_of(trace)
    return {} if rank is None else dict.fromkeys(numbers, rank)


def _sizes(traces: Iterable[Trace]) -> Iterator[int]:
    for trace in traces:
        yield from told(trace, "world_size")
        yield from (size for line in last_start(trace.lines)[1] if type(size := line.get("world_size")) is int)


def _about_the_traces(traces: Sequence[Trace], ranks: set[int], world: int) -> Iterator[AuditFinding]:
    absent = sorted(set(range(world)) - ranks)
    if absent:
        yield _ABSENT.of(world=world, absent=listed(absent))
    for trace in traces:
        restarts, _ = last_start(trace.lines)
        if restarts:
            yield _RESTARTED.of(times=counted(restarts, "time"))
        cut = sum(process.whole_from > 0 for process in trace.processes)
        if cut:
            yield _OVERWRITTEN.of(name=trace.path.name, processes=counted(cut, "process", "processes"))


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
        dataset = tuple(str(facts.get(name, "")) for name in ("dataset", "dataset_kind", "made_at"))
        identity = (*dataset, facts.get("dataloader") or (facts.get("sampler"), facts.get("batch_size")))
        if identity not in keys:
            keys[identity] = (*dataset, known[dataset])
            known[dataset] += 1
        key = keys[identity]
        if key not in subjects:
            number = sum(other[0] == key[0] for other in subjects)
            again = f" (number {number + 1})" if number else ""
            subjects[key] = Subject(f"DataLoader of {dataset[0] or 'unknown dataset'}{again}")
        subject = subjects[key]
        subject.facts.setdefault(rank, facts)
        mine = subject.passes.setdefault(rank, [])
        own = list(_passes(rows, rank, loader, len(mine), facts))
        mine += own
        if any(one.batches for one in own):  # else the training loop got nothing from this rank's workers
            seeds = Seeds(_seeds_of(trace, loader, rows), own[-1].whole, _drawn(trace, loader))
            subject.seeds.setdefault(rank, []).append(seeds)


def _seeds_of(trace: Trace, loader: int, rows: Rows) -> dict[int, int]:
    """worker -> seed after worker_init_fn; older traces only have the seed before it."""
    ready = rows[rows["code"] == ev.WORKER_READY]
    seeds = dict(zip(ready["worker"].tolist(), ready["z"].tolist(), strict=True))
    own = (line for line in trace.described("seed") if line.get("loader") == loader)
    pairs = ((line.get("worker"), line.get("seed")) for line in own)
    return seeds | {worker: seed for worker, seed in pairs if type(worker) is int and type(seed) is int}


def _drawn(trace: Trace, loader: int) -> bool:
    return any(line.get("drawn") is True for line in trace.described("drawn") if line.get("loader") == loader)


def _passes(rows: Rows, rank: int, loader: int, number: int, facts: dict[str, Any]) -> Iterator[Pass]:
    """The passes of one iterator. rows: its events, by time; those before its first epoch's begin are left out."""
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
    indices = _indices(tasks, rows[np.isin(rows["code"], [ev.SAMPLE[0], ev.SAMPLE_INDEX]) & (rows["x"] >= 0)])
    shares = rows[rows["code"] == ev.SHARE]
    no_more = rows[(rows["code"] == ev.SAMPLER_NEXT[1]) & (rows["x"] == 0)]
    ended = set((np.searchsorted(begins["time"], no_more["time"], side="right") - 1).tolist())
    for this, begin in enumerate(begins):
        mine = np.flatnonzero((epoch == this) & yielded)
        mine = mine[np.argsort(tasks["task"][mine], kind="stable")]
        known = [indices[task] for task in mine.tolist()]
        own = ends[(ends["time"] >= begin["time"]) & (ends["x"] == begin["x"])]
        complete = bool(len(own)) and int(own["z"][0]) == ev.Ending.EXHAUSTED
        share = _share(shares, tasks["time"][epoch == this])
        took_all = len(mine) > 0 and len(mine) == int((epoch == this).sum())
        yield Pass(
            rank=rank,
            epoch=number + this,
            loader=loader,
            batches=len(mine),
            samples=int(tasks["x"][mine].sum()),
            complete=complete,
            whole=complete or (took_all and (this in ended or int(tasks["x"][mine].sum()) >= _least(facts, share))),
            indices=None if any(k is None for k in known) else tuple(i for k in known for i in k or ()),
            marks=_marks(tasks[mine]) if asked else (),
            share=share,
            dealt_in=int(tasks["x"][epoch == this][:1].sum()) if facts.get("dealt_in") == "batches" else 1,
        )


def _least(facts: dict[str, Any], share: Share | None) -> int:
    """The fewest samples of a whole pass: a share of the dataset, minus those that drop_last leaves out."""
    length, batch = facts.get("dataset_length"), facts.get("batch_size")
    if type(length) is not int or length <= 0:
        return 1 << 62
    dropped = batch - 1 if facts.get("drop_last") is True and type(batch) is int else 0
    return max(1, length // max(1, share.replicas if share is not None else 1) - dropped)


def _task_of(tasks: Rows, rows: Rows) -> Ints:
    """Return the position in `tasks` of each row's task: the latest one with its number; -1 = none."""
    return latest(tasks["task"], tasks["time"], rows["task"], rows["time"])


def _indices(tasks: Rows, samples: Rows) -> list[tuple[int, ...] | None]:
    """Return each task's indices, in their places; None if one of them is unknown."""
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
    """Return the tasks' digests, or else their first indices; () if the trace has neither."""
    column = "z" if tasks["z"].all() else "y"
    return tuple(tasks[column].tolist()) if len(tasks) and (column == "z" or (tasks["y"] >= 0).all()) else ()


def _share(shares: Rows, times: Ints) -> Share | None:
    """Return the sampler's last setting before the pass's first task."""
    before = shares[shares["time"] <= times[0]] if len(times) else shares
    return Share(*(int(before[-1][name]) for name in "xyz")) if len(before) else None


# --- Verdicts ---------------------------------------------------------------------------------------------------------
_UNEVEN: Final = AuditFinding(
    MISTAKE, "uneven batches", "in epoch {epoch}, the ranks took different numbers of batches: {counts}. In "
    "DistributedDataParallel, the rank that takes one more waits for gradients that no other rank sends",
    "give all ranks the same number of batches by a DistributedSampler (it pads, or drops with drop_last=True), or run "
    "the loop under torch.distributed.algorithms.join.Join")  # fmt: skip
_UNEVEN_OR_NOT: Final = AuditFinding(
    QUESTION, "uneven batches", "in epoch {epoch}, the ranks took different numbers of batches: {counts}. That is "
    "right if the ranks do not wait for each other in each step, as in an evaluation or under Join. In "
    "DistributedDataParallel, the rank that takes one more waits for gradients that no other rank sends",
    "if you train on these batches: give all ranks the same number")  # fmt: skip
_WRONG_SHARE: Final = AuditFinding(
    MISTAKE, "wrong share", "in epoch {epoch}, the sampler of rank {rank} of {world} deals out share {share.replica} "
    "of {share.replicas}{more}",
    "make the sampler after init_process_group, without rank= and num_replicas=: it finds both itself")  # fmt: skip
_SHARED: Final = AuditFinding(
    QUESTION, "shares of several ranks", "the samplers deal out {shares} shares to {world} ranks, each to {each} ranks "
    "({which}). That is right if these ranks hold the parts of one model (tensor or pipeline parallelism). If each has "
    "a whole model, they train on the same samples",
    "if each rank has a whole model: make the sampler without rank= and num_replicas=")  # fmt: skip
_SET_EPOCH_ON_SOME: Final = AuditFinding(
    MISTAKE, "set_epoch on some ranks", "in epoch {epoch} of the loader, the samplers had different epochs "
    "({which}), so their shares come from different permutations: some samples are seen twice, some by no rank",
    "call sampler.set_epoch(epoch) with the same number on every rank")  # fmt: skip
_SAMPLER_SEEDS: Final = AuditFinding(
    MISTAKE, "different sampler seeds", "the ranks' samplers have different seeds ({seeds}), so their shares come from "
    "different permutations: some samples are seen twice, some by no rank",
    "give DistributedSampler the same seed on every rank")  # fmt: skip
_OVERLAP: Final = AuditFinding(
    MISTAKE, "overlap", "{found}, and that is not padding: the ranks' shares come from different orders",
    "give all ranks' samplers the same dataset length, seed, shuffle and epoch, and each its own rank")  # fmt: skip
_ONE_SHARE: Final = AuditFinding(
    MISTAKE, "overlap", "{found}: {ranks} had the same samples in the same order, and the sampler, {samplers}, has a "
    "share for each",
    "let the sampler's order depend on its rank: indices[rank::num_replicas]. If it repeats samples by design, give it "
    "an attribute num_repeats")  # fmt: skip
_REPEATED: Final = AuditFinding(
    HARMLESS, "repeated", "in epoch {epoch}, {samples} came {times} times each, in a row in the order that "
    "{samplers} deals out: it repeats them by design. {unseen}")  # fmt: skip
_NO_SHARES: Final = AuditFinding(
    MISTAKE, "forgotten DistributedSampler", "{found}, and no sampler dealt out shares: it was {samplers} on each "
    "rank. Unless each rank's dataset contains only its own share, every rank trains on the same data",
    "use DataLoader(dataset, sampler=DistributedSampler(dataset), ...) instead of shuffle=True")  # fmt: skip
_EACH_ALL: Final = AuditFinding(
    QUESTION, "the same samples on each rank", "{found}, and no sampler dealt out shares: it was {samplers} on each "
    "rank. That is right if each rank evaluates all samples, or if the ranks hold the parts of one model. If "
    "they train copies of one model, every rank trains on the same data",
    "if they train copies: use DataLoader(dataset, sampler=DistributedSampler(dataset), ...)")  # fmt: skip
_OWN_DATA: Final = AuditFinding(
    UNKNOWN, "overlap", "no sampler dealt out shares, and the ranks' datasets differ: each may be a separate "
    "share, as split_dataset_by_node and Subset make it")  # fmt: skip
_ITERABLE: Final = AuditFinding(
    UNKNOWN, "overlap", "an iterable dataset has no indices: the trace does not show whether ranks and workers saw the "
    "same samples")  # fmt: skip
_NO_INDICES: Final = AuditFinding(
    UNKNOWN, "overlap", "the trace does not contain the samples' indices, so it does not show which were seen twice",
    'record with detail="sample"')  # fmt: skip
_DRAWN_TWICE: Final = AuditFinding(
    HARMLESS, "drawn twice", "in epoch {epoch}, {samples} came twice or more ({which}), some of them on the same rank: "
    "the sampler draws with replacement")  # fmt: skip
_PADDED: Final = AuditFinding(
    HARMLESS, "padding", "in epoch {epoch}, {samples} came twice so that all ranks have the same number: {which}. For "
    "training that is fine, but a metric counts them twice")  # fmt: skip
_DROPPED: Final = AuditFinding(
    HARMLESS, "dropped", "{found}. This is due to drop_last; with set_epoch, each epoch drops others")  # fmt: skip
_MISSED: Final = AuditFinding(
    MISTAKE, "missing", "{found}, more than drop_last explains",
    "give each rank's sampler its own rank, and all of them the same length, seed and epoch")  # fmt: skip
_SKIPPED: Final = AuditFinding(
    QUESTION, "missing", "{found}: the samplers gave fewer than the ranks' shares. That is right if an epoch was "
    "resumed in its middle, or if a sampler leaves samples out by design",
    "otherwise find out why the sampler ends early, or begins late")  # fmt: skip
_ONE_EPOCH: Final = AuditFinding(
    UNKNOWN, "set_epoch", "there is only one whole epoch, so no two orders can be compared")  # fmt: skip
_NO_ORDER: Final = AuditFinding(UNKNOWN, "set_epoch", "the trace does not show the order of the samples")
_NO_SHUFFLING: Final = AuditFinding(
    HARMLESS, "no shuffling", "{found}: its sampler does not shuffle, which is right for validation")  # fmt: skip
_FORGOTTEN_SET_EPOCH: Final = AuditFinding(
    MISTAKE, "forgotten set_epoch", "{found}: its sampler shuffles by its seed and epoch, and its epoch was "
    "{share.epoch} both times",
    "call sampler.set_epoch(epoch) before each epoch, on every rank")  # fmt: skip
_PERHAPS_SHUFFLING: Final = AuditFinding(
    UNKNOWN, "same order in each epoch", "{found}. It is unknown whether its sampler should shuffle")  # fmt: skip
_SAME_ORDER: Final = AuditFinding(
    MISTAKE, "same order in each epoch", "{found}, and its sampler ({samplers}) shuffles: its generator restarts in "
    "each epoch",
    "seed the generator once, before the first epoch")  # fmt: skip
_NO_WORKERS: Final = AuditFinding(
    UNKNOWN, "seeds", "there are no workers, so samples use the random numbers of the rank's own process, "
    "whose seed is not in the trace")  # fmt: skip
_SEEDS_OF_RANKS: Final = AuditFinding(
    MISTAKE, "same seeds on several ranks", "{whom} have the same seed, {seed}{more}, and draw random numbers "
    "for their samples: the ranks draw the same numbers",
    "torch.manual_seed(seed + rank), or DataLoader(generator=torch.Generator().manual_seed(seed + rank))")  # fmt: skip
_SEEDS_OF_ONE_STREAM: Final = AuditFinding(
    QUESTION, "same seeds on several ranks", "{whom} have the same seed, {seed}{more}, and the ranks had the same "
    "samples in the same order. That is right if they should see the same samples, as the parts of one model do",
    "otherwise call torch.manual_seed(seed + rank)")  # fmt: skip
_SEEDS_UNDRAWN: Final = AuditFinding(
    QUESTION, "same seeds on several ranks", "{whom} have the same seed, {seed}{more}. That is right if samples are "
    "not random. No worker drew from torch's, random's or NumPy's generator; other generators are not recorded",
    "if samples are random: call torch.manual_seed(seed + rank)")  # fmt: skip
_SEEDS_UNDRAWN_AGAIN: Final = AuditFinding(
    QUESTION, "same seeds in each epoch", "the workers of rank {rank} had the same seeds when the loader was iterated "
    "for the {earlier} and for the {later} time. That is right if samples are not random. No worker drew from "
    "torch's, random's or NumPy's generator; other generators are not recorded",
    "if samples are random: seed once, before the first epoch")  # fmt: skip
_SEEDS_AFTER_BREAK: Final = AuditFinding(
    QUESTION, "same seeds in each epoch", "the workers of rank {rank} had the same seeds when the loader was iterated "
    "for the {earlier} and for the {later} time. That is right if the later iteration resumes the earlier one, "
    "which did not reach its end",
    "otherwise seed once, before the first epoch")  # fmt: skip
_SEEDS_OF_EPOCHS: Final = AuditFinding(
    MISTAKE, "same seeds in each epoch", "the workers of rank {rank} had the same seeds when the loader was iterated "
    "for the {earlier} and for the {later} time, and draw random numbers for samples, the same in each epoch",
    "seed once, before the first epoch: do not seed, or make a generator, in the loop")  # fmt: skip

_ABSENT: Final = AuditFinding(
    UNKNOWN, "ranks", "of {world} ranks, the traces of {absent} are missing: it is unknown what they saw")  # fmt: skip
_RESTARTED: Final = AuditFinding(
    HARMLESS, "restarted", "the ranks were restarted {times}: the audit judges only the last start")  # fmt: skip
_OVERWRITTEN: Final = AuditFinding(
    UNKNOWN, "overwritten", "{name}: the oldest events of {processes} were overwritten, with the first epochs",
    "record with ring_bytes=None, or with MINIDL_TRACE_RING=full")  # fmt: skip

RULES: Final = tuple(sorted({one.rule for one in globals().values() if isinstance(one, AuditFinding)}))
"""The findings' names, which `--allow` takes."""

_FOLLOW: Final = {
    _WRONG_SHARE.rule: ("overlap", "missing"),
    _SET_EPOCH_ON_SOME.rule: ("overlap", "missing", "forgotten set_epoch"),
    _SAMPLER_SEEDS.rule: ("overlap", "missing"),
}
"""Findings that follow from a mistake; the audit does not report them separately."""


def _judge(subject: Subject, world: int) -> Iterator[AuditFinding]:
    yield from _uneven(subject)
    of_share = _ranks_of_shares(subject, world)
    each = len(of_share[0])
    if each > 1:
        which = "; ".join(f"share {share} to {listed(ranks)}" for share, ranks in enumerate(of_share))
        yield _SHARED.of(shares=len(of_share), world=world, each=each, which=which)
    one_of_each = subject.of_ranks(ranks[0] for ranks in of_share) if each > 1 else subject
    causes = list(_shares(subject, world, of_share))
    found = [*causes, *_coverage(one_of_each, world // each), *_same_order(subject)]
    follow = {rule for cause in causes for rule in _FOLLOW[cause.rule]}
    yield from (finding for finding in found if finding.rule not in follow)
    yield from _seeds(one_of_each)


def _ranks_of_shares(subject: Subject, world: int) -> list[list[int]]:
    """The ranks of each share, if all shares have equally many; else one rank each, with the share's number."""
    shares = {rank: mine[0].share for rank, mine in subject.passes.items() if mine and mine[0].share is not None}
    replicas = {share.replicas for share in shares.values()}
    count = replicas.pop() if len(replicas) == 1 else 0
    each = range(min(count, world))
    of_share = [[rank for rank in sorted(shares) if shares[rank].replica == share] for share in each]
    equally = len(shares) == world and count > 1 and {len(ranks) for ranks in of_share} == {world // count}
    return of_share if equally else [[rank] for rank in range(world)]


def _uneven(subject: Subject) -> Iterator[AuditFinding]:
    """Find ranks that take different numbers of steps: a rank that takes more waits for the others' gradients forever.

    The trace does not show whether they wait. It is a question if batches need not be even: by the sampler's own
    attribute, without shuffling, or for a stream.
    """
    by_design = subject.has(sampler_even_batches=False) or _in_order(subject)
    finding = _UNEVEN_OR_NOT if by_design else _UNEVEN
    for epoch, passes in subject.epochs():
        least = min((one.batches for one in passes.values() if one.whole), default=1 << 62)
        counts = {rank: one.batches for rank, one in passes.items() if one.whole or one.batches > least}
        if len(set(counts.values())) > 1:
            yield finding.of(epoch=epoch, counts=", ".join(f"rank {rank} {n}" for rank, n in sorted(counts.items())))
            return


def _in_order(subject: Subject) -> bool:
    """Whether its sampler does not shuffle, as in an evaluation or for a stream."""
    return subject.has(sampler_shuffle=False) or subject.fact("sampler") <= set(_IN_ORDER)


def _shares(subject: Subject, world: int, of_share: list[list[int]]) -> Iterator[AuditFinding]:
    """Judge the settings of the ranks' samplers. of_share: the ranks of each share."""
    right = {rank: (share, len(of_share)) for share, ranks in enumerate(of_share) for rank in ranks}
    for epoch, passes in subject.epochs():
        shares = {rank: one.share for rank, one in passes.items() if one.share is not None}
        wrong = {r: s for r, s in shares.items() if world > 1 and (s.replica, s.replicas) != right.get(r)}
        if wrong:
            rank, share = min(wrong.items())
            others = counted(len(wrong) - 1, "more rank's is", "more ranks' are")
            more = f", and {others} wrong too" if len(wrong) > 1 else ""
            yield _WRONG_SHARE.of(epoch=epoch, rank=rank, world=world, share=share, more=more)
            return
        if len({share.epoch for share in shares.values()}) > 1:
            which = ", ".join(f"rank {rank} epoch {share.epoch}" for rank, share in sorted(shares.items()))
            yield _SET_EPOCH_ON_SOME.of(epoch=epoch, which=which)
            return
    seeds = subject.fact("sampler_seed")
    if len(seeds) > 1 and any(p[0].share is not None for p in subject.passes.values() if p):
        yield _SAMPLER_SEEDS.of(seeds=", ".join(sorted(map(str, seeds))))


def _coverage(subject: Subject, world: int) -> Iterator[AuditFinding]:
    """Find samples that several ranks saw, or no rank. Each kind of finding is reported for its first epoch."""
    if "iterable" in subject.fact("dataset_kind"):
        yield _ITERABLE
        return
    reported: set[str] = set()
    for epoch, passes in subject.epochs():
        for finding in _overlap(subject, epoch, passes, world):
            if finding.rule not in reported:
                reported.add(finding.rule)
                yield finding


def _overlap(subject: Subject, epoch: int, passes: dict[int, Pass], world: int) -> Iterator[AuditFinding]:
    dealt = any(one.share is not None for one in passes.values())
    if any(one.indices is None for one in passes.values()):
        found = _alike(subject, passes) if len(passes) > 1 and not dealt else ""
        yield _without_shares(subject, f"in epoch {epoch}, {found}", passes) if found else _NO_INDICES
        return
    seen = Counter(index for one in passes.values() for index in one.seen)
    if dealt and (times := _repeats(subject, passes)):
        yield _repeated(subject, epoch, passes, seen, times)
        return
    cut = _is_cut(subject, passes)
    padding = _padding(subject, passes) + (_at_the_ends(passes) if cut else Counter())
    twice = {index: count for index, count in (seen - padding).items() if count > 1}
    if twice and _across(passes, twice) and not _redraws(subject, passes, dealt):
        which = f"{len(twice)} of {len(seen)} samples were seen by several of {len(passes)} ranks ({_some(twice)})"
        found = f"in epoch {epoch}, {which}"
        yield _OVERLAP.of(found=found) if dealt else _without_shares(subject, found, passes)
    elif twice:
        yield _DRAWN_TWICE.of(epoch=epoch, samples=counted(len(twice), "sample"), which=_some(twice))
    elif padding:
        yield _PADDED.of(epoch=epoch, samples=counted(padding.total(), "sample"), which=_some(padding))
    if len(passes) == world and all(one.whole for one in passes.values()) and dealt:
        yield from _unseen(subject, epoch, len(passes), seen, cut)


def _redraws(subject: Subject, passes: dict[int, Pass], dealt: bool) -> bool:
    """Whether a rank may see a sample twice by its sampler's design."""
    again = not dealt and any(len(set(one.seen)) < len(one.seen) for one in passes.values())
    return again or subject.has(sampler_replacement=True) or subject.has(sampler="WeightedRandomSampler")


def _without_shares(subject: Subject, found: str, passes: dict[int, Pass]) -> AuditFinding:
    """Judge that several ranks saw the same indices, which are the same samples only in the same dataset.

    In the same order, that may be intended: ranks with different orders are certainly not the parts of one model.
    """
    if len(subject.fact("dataset_fingerprint")) > 1:
        return _OWN_DATA
    meant = _in_order(subject) or len({one.order for one in passes.values()}) == 1
    return (_EACH_ALL if meant else _NO_SHARES).of(found=found, samplers=subject.samplers)


def _is_cut(subject: Subject, passes: dict[int, Pass]) -> bool:
    """Whether every rank's sampler gave fewer than its share, as in an epoch that was resumed in its middle."""
    shares = [(len(one.seen), one.share.replicas) for one in passes.values() if one.share is not None]
    length = subject.length or 0
    dropped = not subject.has(sampler_drop_last=False)
    return bool(shares) and all(count < (length if dropped else length + n - 1) // n for count, n in shares)


def _at_the_ends(passes: dict[int, Pass]) -> Counter[int]:
    """Count the repeated samples at the end of the ranks' shares: padding, if the begin of a share is missing."""
    ends, seen = Counter[int](), Counter(index for one in passes.values() for index in one.seen)
    for one in passes.values():
        ends.update(index for index in one.seen[-one.dealt_in :] if seen[index] > 1 + ends[index])
    return ends


def _places(one: Pass) -> Ints:
    """Return the place of each of the pass's samples in the order that the sampler of shares deals out."""
    assert one.share is not None
    turn, place = np.divmod(np.arange(len(one.seen)), one.dealt_in)
    return (turn * one.share.replicas + one.share.replica) * one.dealt_in + place


def _padding(subject: Subject, passes: dict[int, Pass]) -> Counter[int]:
    """Count the samples that a sampler of shares repeats to make all shares equally long, after its order's end."""
    length, out = subject.length, Counter[int]()
    for one in passes.values():
        if one.share is not None and length and one.indices is not None:
            out.update(one.indices[at] for at in np.flatnonzero(_places(one) >= length).tolist())
    return out


def _repeats(subject: Subject, passes: dict[int, Pass]) -> int:
    """The number of times that the ranks' order repeats each sample in a row, as timm's RepeatAugSampler does; or 0.

    Such an order consists of blocks of equal size, with one sample in each block. Its end may be padding.
    """
    if subject.length is None or any(one.share is None for one in passes.values()):
        return 0
    places = np.concatenate([_places(one) for one in passes.values()])
    samples = np.concatenate([np.array(one.indices, np.int64) for one in passes.values()])
    order = np.lexsort((places, samples))
    places, samples = places[order], samples[order]
    if len(places) < BY_CHANCE or not np.diff(places)[np.diff(samples) == 0].all():  # two ranks have the same place
        return 0
    for times in range(2, MOST_REPEATS + 1):
        inside = places < times * subject.length
        block, again = places[inside] // times, np.diff(samples[inside]) == 0
        in_one_block = again.any() and not np.diff(block)[again].any()
        if in_one_block and len(np.unique(block)) == len(block) - again.sum():
            return times
    return 0


def _repeated(subject: Subject, epoch: int, passes: dict[int, Pass], seen: Counter[int], times: int) -> AuditFinding:
    """Judge samples that the ranks' common order repeats in a row; ranks with the same share look alike."""
    most = min(len(one.seen) for one in passes.values())
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for rank, one in passes.items():
        ranks_of.setdefault(one.seen[:most], []).append(rank)
    alike = max(ranks_of.values(), key=len) if most else []
    samples = counted(len(seen), "sample")
    if len(alike) > 1 and not subject.has(sampler_repeats=times):
        found = f"in epoch {epoch}, {samples} came {times} times each"
        return _ONE_SHARE.of(found=found, ranks=f"ranks {listed(alike)}", samplers=subject.samplers)
    missing = (subject.length or 0) - len(seen)
    unseen = f"{counted(missing, 'sample')} of {subject.length} came to no rank" if missing else "All samples came"
    return _REPEATED.of(epoch=epoch, samples=samples, times=times, samplers=subject.samplers, unseen=unseen)


def _across(passes: dict[int, Pass], indices: dict[int, int]) -> bool:
    """Whether several ranks saw one of these."""
    sets = [indices.keys() & set(one.seen) for one in passes.values()]
    return sum(map(len, sets)) > len(set().union(*sets))


def _alike(subject: Subject, passes: dict[int, Pass]) -> str:
    """Name the marks or counts that show that all ranks saw the same; "" if none does."""
    marks = [one.marks for one in passes.values()]
    if all(marks) and len(set(marks)) == 1:
        return "all ranks had the same samples in the same order"
    if subject.length and all(one.samples == subject.length and one.whole for one in passes.values()):
        return f"each rank saw {subject.length} samples, as many as the dataset has"
    return ""


def _unseen(subject: Subject, epoch: int, ranks: int, seen: Counter[int], cut: bool = False) -> Iterator[AuditFinding]:
    length = subject.length or 0
    missing = length - sum(0 <= index < length for index in seen)
    if not missing:
        return
    which = _some(islice((index for index in range(length) if index not in seen), 7))
    by_sampler = length % ranks if subject.has(sampler_drop_last=True) else 0
    sizes = {size for size in subject.fact("batch_size") if type(size) is int}
    in_turn = max(sizes, default=1) * ranks - (1 if subject.has(dealt_in="batches") else ranks)
    by_loader = in_turn if subject.has(drop_last=True) else 0
    found = f"in epoch {epoch}, {counted(missing, 'sample')} of {length} came to no rank: {which}"
    explained = missing <= by_sampler + by_loader
    yield (_DROPPED if explained else _SKIPPED if cut else _MISSED).of(found=found)


def _same_order(subject: Subject) -> Iterator[AuditFinding]:
    """Find the same order in several epochs: a forgotten `set_epoch`, a reseeded generator, or no shuffling."""
    if "iterable" in subject.fact("dataset_kind"):
        return
    whole = {rank: [one for one in mine if one.whole] for rank, mine in sorted(subject.passes.items())}
    pairs = {rank: list(pairwise(mine)) for rank, mine in whole.items()}
    if not any(pairs.values()):
        yield _ONE_EPOCH
        return
    if not any(first.order for each in pairs.values() for first, _ in each):
        yield _NO_ORDER
    alike = {rank: [(a, b) for a, b in each if a.order and a.order == b.order] for rank, each in pairs.items()}
    rank, same = next(((rank, each) for rank, each in alike.items() if each), (0, []))
    if not same:
        return
    first, second = same[0]
    found = f"rank {rank} had the same order in epochs {first.epoch} and {second.epoch}"
    found += f" (and in {counted(len(same) - 1, 'more pair')})" if len(same) > 1 else ""
    shuffles = subject.fact("sampler") <= set(_SHUFFLING) or subject.has(sampler_shuffle=True)
    if _in_order(subject):
        yield _NO_SHUFFLING.of(found=found)
    elif first.share is not None and second.share is not None and first.share.epoch == second.share.epoch >= 0:
        yield _FORGOTTEN_SET_EPOCH.of(found=found, share=first.share)
    elif not shuffles:
        yield _PERHAPS_SHUFFLING.of(found=found)
    elif first.samples >= BY_CHANCE:
        yield _SAME_ORDER.of(found=found, samplers=subject.samplers)


def _seeds(subject: Subject) -> Iterator[AuditFinding]:
    """Find equal seeds of several ranks' workers, or of one rank's workers in several epochs."""
    if not any(seeds.of for each in subject.seeds.values() for seeds in each):
        yield _NO_WORKERS
        return
    yield from _seeds_of_ranks(subject)
    yield from islice(_seeds_of_epochs(subject), 1)


def _seeds_of_ranks(subject: Subject) -> Iterator[AuditFinding]:
    owners: dict[int, set[tuple[int, int]]] = {}
    for rank, iterators in subject.seeds.items():
        for worker, seed in (pair for seeds in iterators for pair in seeds.of.items()):
            owners.setdefault(seed, set()).add((rank, worker))
    shared = {seed: who for seed, who in owners.items() if len({rank for rank, _ in who}) > 1}
    if shared:
        seed, who = min(shared.items(), key=lambda item: sorted(item[1]))
        whom = " and ".join(f"worker {worker} of rank {rank}" for rank, worker in sorted(who)[:4])
        more = f"; so have {len(shared) - 1} more" if len(shared) > 1 else ""
        drawn = any(seeds.drawn for rank, _ in who for seeds in subject.seeds[rank])
        finding = _SEEDS_OF_ONE_STREAM if _one_stream(subject) else _SEEDS_OF_RANKS if drawn else _SEEDS_UNDRAWN
        yield finding.of(whom=whom, seed=seed, more=more)


def _seeds_of_epochs(subject: Subject) -> Iterator[AuditFinding]:
    for rank, iterators in sorted(subject.seeds.items()):
        again = [(i, j) for i, a in enumerate(iterators) for j, b in enumerate(iterators[:i]) if a.of and a.of == b.of]
        if again:
            later, earlier = min(again, key=lambda pair: not iterators[pair[1]].whole)
            drawn = any(seeds.drawn for seeds in iterators)
            finding = _SEEDS_OF_EPOCHS if drawn else _SEEDS_UNDRAWN_AGAIN
            finding = finding if iterators[earlier].whole else _SEEDS_AFTER_BREAK
            yield finding.of(rank=rank, earlier=_ordinal(earlier), later=_ordinal(later))


def _one_stream(subject: Subject) -> bool:
    """Whether all ranks had the same samples in the same order, in every epoch."""
    orders = [{one.order for one in passes.values()} for _, passes in subject.epochs()]
    return bool(orders) and all(len(order) == 1 and order != {()} for order in orders)


def _ordinal(number: int) -> str:
    """Return "first" for 0, "21st" for 20."""
    nth = number + 1
    ending = "th" if nth % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(nth % 10, "th")
    return {1: "first", 2: "second", 3: "third"}.get(nth, f"{nth}{ending}")


def _some(indices: Iterable[int]) -> str:
    found = sorted(set(indices))
    return "index " * (len(found) == 1) + listed(found, most=6)
