"""What each rank of a run saw: the passes of its DataLoaders over their datasets, and its workers' seeds.

Interface: `collect(trace, loaders, rank, subjects)` adds a rank's iterators to the subjects, one a DataLoader.

It uses: the indices of samples (`sample`, `sample_index`), or without them each task's count and digest
(`sampler_next`); the settings of a sampler of shares (`share`); the workers' seeds (after worker_init_fn, or
`worker_ready`); the yielded tasks (`yield`). An index counts as seen when the training loop received its batch. Two
ranks' DataLoaders are the same if their datasets have the same class, the same line of the program made both, and
both have the same number among those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from minidl.speed.findings import AuditFinding
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Ints, Rows
from minidl.tracefile.batches import are_batches, latest
from minidl.tracefile.reader import Trace


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


# --- What each rank saw -----------------------------------------------------------------------------------------------
def collect(trace: Trace, loaders: list[int], rank: int, subjects: dict[tuple[Any, ...], Subject]) -> None:
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
    if not asked:  # an older minidl observed the loader
        tasks = rows[rows["code"] == ev.INDEX_PUT]
    epoch = np.searchsorted(begins["time"], tasks["time"], side="right") - 1
    yielded = np.zeros(len(tasks), bool)
    at = _task_of(tasks, rows[are_batches(rows)])
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
