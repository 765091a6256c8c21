"""The verdict: whether the loader is the bottleneck, and which part of it, by what the training loop waited for.

Interface: `waiting(trace, loader)` -> `Waiting`, the loop's waiting split by cause; `verdict(trace, loader)` ->
`Verdict`, one sentence with its evidence and what to do next. Both are pure functions over the trace's arrays.

Rules of use: the loop waits while it is in `iter(loader)`, in `next`, and while the loader shuts down. Each nanosecond
of waiting has one cause, which follows from the state of all threads at that time; if several workers were busy, it is
divided among their steps. The CPU time of fetches (`cpu_use`) shows whether samples compute, wait for a CPU or wait
for a disk; in a trace without it, the next step names both cases.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl.playback.state import MOST_WORKERS
from minidl.speed.cpu_use import CpuLimit, CpuUse, cpu_use, cpus_of
from minidl.speed.ledger import HANDLE_BYTES, LARGE_PAYLOAD, MANY_TENSORS
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Rows
from minidl.tracefile.spans import total
from minidl.tracefile.words import counted, duration, percent, size

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


KEEPS_UP = 0.1
"""The loader keeps up if the share of waiting is below this: a perfect loader could save no more."""

ONCE = 0.5
"""The share from which a start-up that happens once is the bottleneck: a smaller one vanishes in a longer run."""

FEW_BATCHES = 5
"""The fewest batches for a verdict: with fewer, one slow sample or one busy moment decides the shares."""

SPARE = 0.25
"""Workers that wait for tasks for a smaller share of their time are the limit, whatever the loop does meanwhile:
a faster reader would only wait for them. If the reader is the limit, workers idle most of the time."""

ONE_SIDED = 0.7
"""The share of head-of-line blocking from which one worker is the cause; also the share of epochs' first batches."""

UNEVEN = 0.3
"""The share of waiting with a worker out of data from which even shards are the first remedy."""

LARGE_SAMPLES = 1 << 20
"""Bytes of a batch's tensor from which copying dominates collation, and not the number of tensors."""

NEVER = np.iinfo(np.int64).max


class Cause(enum.Enum):
    """What the loop waited for; the value is its name in messages."""

    START_UP = "starting and ending workers"
    SAMPLER = "the sampler"
    SAMPLES = "samples"
    COLLATE = "collation"
    IPC = "pickling and sending"
    HEAD_OF_LINE = "one batch while later ones are ready"
    REBUILD = "rebuilding messages"
    PIN = "pinning"
    OVERHEAD = "messages in transit and bookkeeping"


class Bound(enum.Enum):
    """What bounds a loader."""

    NOT_INPUT = "not input-bound"
    SUPPLY = "supply-bound"
    HEAD_OF_LINE = "head-of-line blocking"
    READING = "rebuild/pin-bound"
    START_UP = "start-up-bound"
    SAMPLER = "sampler-bound"
    OVERHEAD = "overhead-bound"
    TOO_FEW = "too few batches to say"
    UNSEEN = "not seen"


KIND_OF = {
    Cause.SAMPLES: Bound.SUPPLY,
    Cause.COLLATE: Bound.SUPPLY,
    Cause.IPC: Bound.SUPPLY,
    Cause.HEAD_OF_LINE: Bound.HEAD_OF_LINE,
    Cause.REBUILD: Bound.READING,
    Cause.PIN: Bound.READING,
    Cause.SAMPLER: Bound.SAMPLER,
    Cause.OVERHEAD: Bound.OVERHEAD,
}
"""The causes that can bound a long run; start-up ends by itself and is judged separately."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One loader iterator's waiting, in ns. busy: the share of the workers' time meanwhile that they spent fetching.

    spare: the share of that time, after their first fetch, that they waited for tasks. work: the duration of all
    supplying steps. task, worker, sample: of the batch that blocked the line longest, -1 = none; lasting: that worker's
    share of the blocking. first: waiting for the first batches of epochs. uneven: waiting while a worker had run out of
    data and others had not; out: the worker that ran out first, -1 = none. ending: waiting for the workers' end.
    payload, shared, tensors: bytes pickled, bytes by handle, and tensors of a message, on average. cpu: the CPU use of
    fetching. alike: the number of iterators with the same parameters in the trace; together: how many of them these
    figures sum up.
    """

    causes: dict[Cause, int]
    consumer: int
    batches: int
    workers: int
    alike: int
    busy: float = 0.0
    task: int = -1
    worker: int = -1
    sample: int = -1
    work: dict[Cause, int] = field(default_factory=dict)
    spare: float = 1.0
    lasting: float = 0.0
    first: int = 0
    uneven: int = 0
    out: int = -1
    ending: int = 0
    payload: float = 0.0
    shared: float = 0.0
    tensors: float = 0.0
    cpu: CpuUse = field(default_factory=CpuUse)
    together: int = 1

    @property
    def ends_slowly(self) -> bool:
        """Whether ending the workers took longer than starting them."""
        return 2 * self.ending > self.causes[Cause.START_UP]

    @property
    def total(self) -> int:
        return sum(self.causes.values())

    def share(self, *causes: Cause) -> float:
        """The share of the waiting that is due to these causes; 0 without any waiting."""
        return self.share_of(sum(self.causes[cause] for cause in causes))

    def share_of(self, ns: int) -> float:
        """`ns` as a share of the waiting."""
        return ns / max(1, self.total)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a loader, in words; cause: the largest one of that kind, None = no cause.

    brief: the sentence for a title, with one share only; apart: the part that is judged separately, "" = none.
    task: the task that the sentence names, -1 = none.
    """

    kind: Bound
    sentence: str
    evidence: tuple[str, ...]
    next_step: str
    cause: Cause | None = None
    task: int = -1
    brief: str = ""
    apart: str = ""

    def lines(self) -> list[str]:
        """The verdict for a terminal."""
        step = [f"next step: {self.next_step}"] if self.next_step else []
        return [self.sentence, *(f"  {text}" for text in self.evidence), *step]


def verdict(trace: Trace, loader: int, spans: Rows | None = None) -> Verdict:
    """What bounds this loader iterator of `trace`. spans: `trace.spans()`, if the caller has them already."""
    spans = trace.spans() if spans is None else spans
    found = waiting(trace, loader, spans)
    if found.alike > 1 and _kind(found)[0] is Bound.TOO_FEW:
        found = _joined(trace, loader, found, spans)
    return judge(found, trace.loaders.get(loader, {}), cpus_of(trace.manifest))


def _joined(trace: Trace, loader: int, found: Waiting, spans: Rows) -> Waiting:
    """The waiting of this iterator and of its neighbours with the same parameters, until there are enough batches."""
    params = trace.loaders.get(loader, {})
    alike = [other for other, theirs in trace.loaders.items() if other != loader and theirs == params]
    for other in sorted(alike, key=lambda number: abs(number - loader))[: 2 * FEW_BATCHES]:
        if found.batches >= FEW_BATCHES:
            break
        found = _sum(found, waiting(trace, other, spans))
    return found


def summed(trace: Trace, loaders: Sequence[int], spans: Rows) -> Verdict:
    """Return one verdict on several iterators of one DataLoader, as if they were one."""
    each = sorted((waiting(trace, loader, spans) for loader in loaders), key=lambda one: one.total)
    found = each.pop()
    for more in each:
        found = _sum(found, more)
    return judge(found, trace.loaders.get(loaders[0], {}), cpus_of(trace.manifest))


def _sum(found: Waiting, more: Waiting) -> Waiting:
    """Return `found` with the times and counts of `more` added; the blocking batch stays that of `found`."""
    return replace(
        found,
        causes={cause: ns + more.causes[cause] for cause, ns in found.causes.items()},
        work={cause: ns + more.work[cause] for cause, ns in found.work.items()},
        consumer=found.consumer + more.consumer,
        batches=found.batches + more.batches,
        first=found.first + more.first,
        uneven=found.uneven + more.uneven,
        ending=found.ending + more.ending,
        cpu=found.cpu + more.cpu,
        together=found.together + 1,
    )


# --- The waiting, split -----------------------------------------------------------------------------------------------
def waiting(trace: Trace, loader: int, spans: Rows | None = None) -> Waiting:
    """Split the loop's waiting for this loader iterator by cause; near-linear in its events."""
    spans = trace.spans() if spans is None else spans
    # Outside of that time, the events of some processes are missing, so that a wait may have no visible cause.
    begin, end = trace.whole_from(loader), trace.whole_until(loader)
    time = trace.events["time"]
    events = trace.events[(trace.events["loader"] == loader) & (time >= begin) & (time <= end)]
    mine = _ended(spans[spans["loader"] == loader], events)
    mine = mine[(mine["end"] >= begin) & (mine["begin"] <= end)]
    mine["begin"], mine["end"] = np.maximum(mine["begin"], begin), np.minimum(mine["end"], end)
    params = trace.loaders.get(loader, {})
    moments = _WaitIntervals(events, mine)
    causes, line = moments.causes()
    consumer = mine[mine["code"] == ev.CONSUMER[0]]
    task, worker, lasting = moments.blocker(line)
    uneven, out = moments.uneven()
    messages = mine[mine["code"] == ev.RESULT_REBUILD[0]]
    return Waiting(
        causes=causes,
        consumer=total(consumer),
        batches=int(np.count_nonzero(events["code"] == ev.YIELD)),
        workers=moments.workers,
        alike=sum(other == params for other in trace.loaders.values()) if params else 1,
        busy=moments.busy(),
        work=_work(mine),
        task=task,
        worker=worker,
        sample=_slowest_sample(mine, task, worker),
        spare=moments.spare(),
        lasting=lasting,
        first=moments.first(),
        uneven=uneven,
        ending=moments.ending(),
        out=out,
        payload=_mean(messages["bx"]),
        shared=_mean(messages["ey"]),
        tensors=_mean(messages["ex"]),
        cpu=cpu_use(spans[(spans["loader"] == loader) & (spans["begin"] >= begin) & (spans["end"] <= end)]),
    )


def _ended(spans: Rows, events: Rows) -> Rows:
    """The spans; open ones end with the trace, but spans that an exiting worker's feeder leaves open are dropped."""
    feeding = np.isin(spans["code"], [ev.RESULT_PICKLE[0], ev.RESULT_WRITE[0], ev.SHM_COPY[0]])
    spans = spans[(spans["end"] >= 0) | ~feeding].copy()
    if len(events):
        spans["end"][spans["end"] < 0] = events["time"][-1]
    return spans


def _work(spans: Rows) -> dict[Cause, int]:
    """The total duration of the supplying steps, in ns."""

    def took(*pairs: tuple[int, int]) -> int:
        return total(spans[np.isin(spans["code"], [pair[0] for pair in pairs])])

    collate = took(ev.COLLATE)
    sending = took(ev.RESULT_PICKLE, ev.RESULT_WRITE)
    return {Cause.SAMPLES: max(0, took(ev.FETCH) - collate), Cause.COLLATE: collate, Cause.IPC: sending}


def _mean(values: Ints) -> float:
    return float(values.mean()) if len(values) else 0.0


def _slowest_sample(spans: Rows, task: int, worker: int) -> int:
    rows = spans[(spans["code"] == ev.SAMPLE[0]) & (spans["task"] == task) & (spans["worker"] == worker)]
    return int(rows["by"][np.argmax(rows["end"] - rows["begin"])]) if len(rows) else -1


class _WaitIntervals:
    """The intervals of waiting in which no span begins or ends: `at` are their begins, `width` their lengths, in ns."""

    def __init__(self, events: Rows, spans: Rows) -> None:
        self.events, self.spans = events, spans
        self.epochs: Ints = events["time"][events["code"] == ev.EPOCH[0]].astype(np.int64)
        told = events["y"][events["code"] == ev.EPOCH[0]]
        self.workers = min(max(int(told.max(initial=0)), 1 + int(events["worker"].max(initial=-1))), MOST_WORKERS)
        self.set_up = self._set_up()
        edges = np.unique(np.concatenate([spans["begin"], spans["end"], events["time"], *self.set_up]))
        self.at: Ints = edges[:-1]
        waits = (self.open(ev.NEXT, ev.SHUTDOWN) > 0) | self.setting_up()
        self.width: Ints = np.diff(edges)[waits]
        self.at = self.at[waits]
        self.needs = self._latest(events["code"] == self._get()[0])

    def _get(self) -> tuple[int, int]:
        """The wait of the loader's own thread: with a pin thread, only that thread waits for results."""
        return ev.READY_GET if np.any(self.events["code"] == ev.READY_GET[0]) else ev.RESULT_GET

    def _set_up(self) -> tuple[Ints, Ints]:
        """Begins and ends of `iter(loader)`: up to the first epoch, and from each epoch's begin to the consumer's."""
        events = self.events
        if not len(self.epochs):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        left = events["time"][np.isin(events["code"], [ev.CONSUMER[0], ev.NEXT[0]])].astype(np.int64)
        place = np.searchsorted(left, self.epochs, side="right")
        ends = np.append(left, events["time"][-1])[place]
        begins = self.epochs.copy()
        begins[0] = min(begins[0], events["time"][0])
        return begins, ends

    def open(self, *pairs: tuple[int, int]) -> Ints:
        """The number of open spans of these kinds in each interval."""
        rows = self.spans[np.isin(self.spans["code"], [pair[0] for pair in pairs])]
        return _open(rows["begin"], rows["end"], self.at)

    def setting_up(self) -> Bools:
        return _open(*self.set_up, self.at) > 0

    def _latest(self, which: Bools) -> Ints:
        """For each interval, the position in `events` of the latest event of `which`; -1 before the first."""
        places = np.append(np.flatnonzero(which), -1)  # index -1 finds the last
        return places[np.searchsorted(self.events["time"][places[:-1]], self.at, side="right") - 1]

    def _of_latest(self, latest: Ints, column: str) -> Ints:
        return np.where(latest < 0, -1, self.events[column][latest].astype(np.int64))

    def _depth(self) -> Ints:
        """The reorder buffer's depth; an epoch begins with an empty one."""
        kept = np.isin(self.events["code"], [ev.REORDER_STORE, ev.REORDER_POP, ev.EPOCH[0]])
        latest = self._latest(kept)
        begins = self._of_latest(latest, "code") == ev.EPOCH[0]
        return np.where(begins, 0, np.maximum(0, self._of_latest(latest, "y")))

    def _not_begun(self) -> Bools:
        """Whether the worker that the loop waits for has not begun its first fetch of the epoch."""
        first = np.full((len(self.epochs) + 1, self.workers + 1), NEVER)  # last column: any worker
        rows = self.spans[self.spans["code"] == ev.FETCH[0]]
        epoch = np.searchsorted(self.epochs, rows["begin"], side="right")
        np.minimum.at(first, (epoch, np.clip(rows["worker"], 0, self.workers)), rows["begin"])
        first[:, -1] = first.min(axis=1)
        first[0] = 0  # an epoch of which the begin is not in the trace
        worker = np.clip(self._of_latest(self.needs, "worker"), -1, self.workers)
        return self.at < first[np.searchsorted(self.epochs, self.at, side="right"), worker]

    def causes(self) -> tuple[dict[Cause, int], Bools]:
        """The ns of each cause, and the intervals with head-of-line blocking."""
        collate, fetch = self.open(ev.COLLATE), self.open(ev.FETCH)
        sending = self.open(ev.RESULT_PICKLE, ev.RESULT_WRITE)
        steps = {Cause.SAMPLES: np.maximum(0, fetch - collate), Cause.COLLATE: collate, Cause.IPC: sending}
        working = sum(steps.values(), np.zeros(len(self.at), np.int64))
        gets = self.open(self._get()) > 0
        idle = self.open(ev.INDEX_GET) > 0
        # The first that holds is the cause. The loader's own thread comes before other threads, and the reading side
        # before head-of-line blocking: while the reader works, it may hold the missing batch.
        rules = [
            (Cause.SAMPLER, self.open(ev.SAMPLER_NEXT) > 0),
            (Cause.START_UP, self.setting_up() | (self.open(ev.SHUTDOWN) > 0)),
            (Cause.PIN, self.open(ev.PIN) > 0),
            (Cause.REBUILD, self.open(ev.RESULT_REBUILD) > 0),
            (Cause.START_UP, gets & self._not_begun()),
            (Cause.HEAD_OF_LINE, gets & (self._depth() > 0) & idle),
        ]
        out = dict.fromkeys(Cause, 0)
        left = np.ones(len(self.at), bool)
        for cause, holds in rules:
            hit = left & holds
            out[cause] += int(self.width[hit].sum())
            left &= ~hit
        supplied = left & (working > 0) & (gets | (self.workers == 0))
        for cause, count in steps.items():
            out[cause] += int((self.width * count / np.maximum(1, working))[supplied].sum())
        out[Cause.OVERHEAD] = int(self.width.sum()) - sum(out.values())
        return out, hit  # of the last rule: head-of-line blocking

    def blocker(self, line: Bools) -> tuple[int, int, float]:
        """The task and the worker that blocked the line longest, and that worker's share of it; -1 = no blocking.

        The share is 0 if one or two tasks caused all blocking: then no worker is the cause.
        """
        if not line.any():
            return -1, -1, 0.0
        places, group = np.unique(self.needs[line], return_inverse=True)
        tasks, owner = np.unique(self.events["task"][places], return_inverse=True)
        stood = np.bincount(owner[group], self.width[line])
        task = int(tasks[np.argmax(stood)])
        worker = int(self.events["worker"][places][owner == np.argmax(stood)][0])
        for_worker = self.width[line][self.events["worker"][places][group] == worker]
        others = int(for_worker.sum()) - int(stood.max())
        lasting = float(for_worker.sum() / max(1, stood.sum())) if others > stood.max() else 0.0
        return task, worker, lasting

    def busy(self) -> float:
        """The share of the workers' time that they fetch while the loop waits for results."""
        return self._share_in(ev.FETCH, self.open(self._get()) > 0, none=0.0)

    def spare(self) -> float:
        """The share of the workers' time without a task while the loop waits for results that they have begun; or 1."""
        return self._share_in(ev.INDEX_GET, (self.open(self._get()) > 0) & ~self._not_begun(), none=1.0)

    def _share_in(self, span: tuple[int, int], when: Bools, none: float) -> float:
        time = int(self.width[when].sum()) * self.workers
        return float((self.open(span) * self.width)[when].sum() / time) if time else none

    def first(self) -> int:
        """The ns waited for the first batches of epochs, after `iter(loader)`; 0 with one epoch only."""
        if len(self.epochs) < 2:
            return 0
        latest = self._latest(np.isin(self.events["code"], [ev.EPOCH[0], ev.YIELD]))
        return int(self.width[(self._of_latest(latest, "code") == ev.EPOCH[0]) & ~self.setting_up()].sum())

    def ending(self) -> int:
        """The ns in which the shutdown ran without a set-up."""
        return int(self.width[(self.open(ev.SHUTDOWN) > 0) & ~self.setting_up()].sum())

    def uneven(self) -> tuple[int, int]:
        """The ns waited after a worker had run out of data, and the first such worker; or 0, -1.

        It counts only if the others had enough batches left: with even shards, each has one at most.
        """
        codes = self.events["code"]
        ran_out = np.flatnonzero(codes == ev.WORKER_EXHAUSTED)
        if self.workers < 2 or not len(ran_out):
            return 0, -1
        after = self.events["time"][codes == ev.YIELD] > self.events["time"][ran_out[0]]
        if np.count_nonzero(after) < self.workers + FEW_BATCHES:
            return 0, -1
        latest = self._latest(np.isin(codes, [ev.EPOCH[0], ev.WORKER_EXHAUSTED]))
        tail = (self._of_latest(latest, "code") == ev.WORKER_EXHAUSTED) & (self.open(ev.SHUTDOWN) == 0)
        return int(self.width[tail].sum()), int(self.events["worker"][ran_out[0]])


def _open(begins: Ints, ends: Ints, at: Ints) -> Ints:
    begun = np.searchsorted(np.sort(begins), at, side="right")
    return np.asarray(begun - np.searchsorted(np.sort(ends), at, side="right"), np.int64)


# --- The judgement ----------------------------------------------------------------------------------------------------
def judge(found: Waiting, params: dict[str, Any] | None = None, cpus: float | None = None) -> Verdict:
    """Judge `found`. params: the loader's parameters in its trace; cpus: the usable CPUs, if known."""
    if isinstance(unseen := (params or {}).get("unseen"), list) and "next" in unseen:
        sentence = (
            "unknown what bounds the loader: an observed loader with pinned memory does not show when the loop waits"
        )
        step = "observe it without pin_memory, or record with minidl's loader"
        return Verdict(Bound.UNSEEN, sentence, (), step, brief=sentence)
    kind, cause = _kind(found)
    whose = _whose(found) if kind is Bound.HEAD_OF_LINE else ""
    sentence, brief = (_sentence(found, kind, cause, cpus, brief) + whose for brief in (False, True))
    apart = _apart(found, kind) if cause is not None else ""
    step = _next_step(kind, cause, found, params or {}, cpus)
    task = found.task if whose else -1
    whole = f"{sentence}; {apart}" if apart else sentence
    return Verdict(kind, whole, _evidence(found, cpus), step, cause, task, brief, apart)


def _sentence(found: Waiting, kind: Bound, cause: Cause | None, cpus: float | None, brief: bool) -> str:
    """What bounds the loader. brief: with one share, and not a share of a share."""
    loop = "the loop" if brief else "the training loop"
    share = found.total / max(1, found.total + found.consumer)
    if kind is Bound.TOO_FEW:
        return f"too few batches to say what bounds the loader: {found.batches} (at least {FEW_BATCHES} are needed)"
    if kind is Bound.NOT_INPUT:
        steady = found.total - found.causes[Cause.START_UP]
        kept = steady / max(1, steady + found.consumer)
        also = f" ({percent(share)} with the start and end of its workers)" if share - kept >= 0.05 else ""
        return f"not input-bound: the loader keeps up, {loop} waited {percent(kept)} of its time{also}"
    assert cause is not None
    what = f"{_part(found.share(cause), brief)} for {cause.value}"
    if kind is Bound.SUPPLY:
        what = _supply(found, cause, cpus, brief)
    name = "shutdown-bound" if kind is Bound.START_UP and found.ends_slowly else kind.value
    return f"{name}: {loop} waited {percent(share)} of its time, {what}"


def _part(share: float, brief: bool) -> str:
    """A share of the waiting; the brief form has no number."""
    return f"{percent(share)} of that" if not brief else "mostly" if round(share, 2) >= 0.5 else "partly"


def _supply(found: Waiting, cause: Cause, cpus: float | None, brief: bool) -> str:
    """What the workers did while the loop waited for them."""
    supply, reading = found.share(Cause.SAMPLES, Cause.COLLATE, Cause.IPC), found.share(Cause.REBUILD, Cause.PIN)
    held, part = found.cpu.held(cpus)
    known = cause is Cause.SAMPLES and held is not CpuLimit.UNKNOWN
    how = f", {held.value} ({percent(part)} of their time)" if known else ""
    if reading > supply:
        return f"while the workers were busy, mostly with {cause.value}{how}: faster reading would not help"
    did = _MADE[cause] if brief else f"made batches, mostly {cause.value}"
    return f"{_part(supply, brief)} while workers {did}{how}"


_MADE = {
    Cause.SAMPLES: "fetched samples",
    Cause.COLLATE: "collated batches",
    Cause.IPC: "pickled and sent batches",
}
"""What workers mostly did when they made batches."""


def _kind(found: Waiting) -> tuple[Bound, Cause | None]:
    """The kind, and the cause to blame. Steady waiting is judged without start-up, which a longer run spreads."""
    start_up = found.causes[Cause.START_UP]
    steady = found.total - start_up
    again = found.alike > 1 and found.workers > 0
    if found.batches < FEW_BATCHES and not again:
        return Bound.TOO_FEW, None
    whole = max(1, found.total + found.consumer)
    if 2 * start_up > found.total and start_up / whole >= (KEEPS_UP if again else ONCE):
        return Bound.START_UP, Cause.START_UP
    if found.batches < FEW_BATCHES:
        return Bound.TOO_FEW, None
    if steady / max(1, steady + found.consumer) < KEEPS_UP:
        return Bound.NOT_INPUT, None
    of_kind = {kind: sum(found.causes[c] for c in KIND_OF if KIND_OF[c] is kind) for kind in KIND_OF.values()}
    kind = max(of_kind, key=lambda k: of_kind[k])
    if kind is Bound.READING and found.workers and found.spare < SPARE:
        kind = Bound.SUPPLY
    # If a training step hides a part of the work, the wait falls into a task's last steps: so all work is compared.
    costs = found.work if kind is Bound.SUPPLY and found.work else found.causes
    return kind, max((c for c in KIND_OF if KIND_OF[c] is kind), key=lambda c: costs[c])


def _apart(found: Waiting, kind: Bound) -> str:
    """Why start-up is not the verdict, if the loop waited longer for it than for all causes of `kind`."""
    blamed = sum(found.causes[cause] for cause in KIND_OF if KIND_OF[cause] is kind)
    if kind is Bound.START_UP or found.causes[Cause.START_UP] <= blamed:
        return ""
    share = percent(found.share(Cause.START_UP))
    return f"{share} of the waiting was for {Cause.START_UP.value}, which does not count here: a longer run reduces it"


def _whose(found: Waiting) -> str:
    sample = f", sample {found.sample}" if found.sample >= 0 else ""
    return f" (longest: task {found.task} of worker {found.worker}{sample})" if found.task >= 0 else ""


def _evidence(found: Waiting, cpus: float | None) -> tuple[str, ...]:
    ranked = sorted((c for c in Cause if found.share(c) >= 0.005), key=lambda c: -found.causes[c])
    where = "inside next() and while workers started and ended" if found.causes[Cause.START_UP] else "inside next()"
    shares = ", ".join(f"{cause.value} {percent(found.share(cause))}" for cause in ranked)
    lines = [f"waited {duration(found.total)} {where}: {shares}"]
    if found.workers:
        lines.append(f"while the loop waited for a result, workers fetched for {percent(found.busy)} of their time")
    lines += [line] if (line := found.cpu.line(cpus)) else []
    if found.share_of(found.uneven) >= UNEVEN:
        share = percent(found.share_of(found.uneven))
        lines.append(f"{share} of the waiting came after worker {found.out} had run out of data")
    if found.share_of(found.first) >= ONE_SIDED:
        lines.append(f"{percent(found.share_of(found.first))} of the waiting was for the first batches of epochs")
    if sum(found.work.values()):
        told = (f"{cause.value} {percent(ns / sum(found.work.values()))}" for cause, ns in found.work.items())
        lines.append("work on the batches: " + ", ".join(told))
    if found.together > 1:
        lines.append(f"{found.together} of {found.alike} iterators with the same parameters, taken together")
    elif found.alike > 1:
        lines.append(f"one of {found.alike} iterators with the same parameters")
    return tuple(lines)


def _next_step(kind: Bound, cause: Cause | None, found: Waiting, params: dict[str, Any], cpus: float | None) -> str:
    if kind is Bound.SUPPLY:
        return _supply_step(cause, found, params, cpus)
    return {
        Bound.NOT_INPUT: "make the training step faster: the loader has time to spare",
        Bound.HEAD_OF_LINE: _line_step(found),
        Bound.READING: "send fewer bytes per batch, or do not pin"
        if cause is Cause.PIN
        else _reading_step(found, cpus),
        Bound.START_UP: _start_step(found, params),
        Bound.SAMPLER: "make the sampler faster: it runs in the loader's thread, so more workers do not help",
        Bound.OVERHEAD: "use larger batches: each batch costs the same messages, whatever its size",
        Bound.TOO_FEW: "",
    }[kind]


def _line_step(found: Waiting) -> str:
    step = "set in_order=False if the order does not matter; otherwise "
    if found.lasting >= ONE_SIDED:
        return (
            f"{step}find out why worker {found.worker} is slower than the others (it blocked the line for "
            f"{percent(found.lasting)} of the time): its samples (batch n goes to worker n mod {found.workers}: "
            "shuffle) or its process"
        )
    return f"{step}spread slow samples over the batches, or raise prefetch_factor"


def _reading_step(found: Waiting, cpus: float | None) -> str:
    """The next step by the cost of rebuilding a batch: it grows with the pickled bytes and the number of tensors."""
    if found.payload > max(LARGE_PAYLOAD, (found.tensors + 1) * HANDLE_BYTES):
        return (
            f"send the data as tensors, which travel by handle: {size(found.payload)} of each batch are pickled; see "
            "`minidl ledger`"
        )
    if found.tensors > MANY_TENSORS:
        return f"join the tensors of a batch: it has {found.tensors:.0f}, and each of them costs a mapping"
    larger = "use larger batches: rebuilding costs the same for each batch, whatever its size"
    at_work, (held, _) = found.busy * found.workers, found.cpu.held(cpus)
    if held is CpuLimit.WAITS or cpus is None or at_work < cpus:
        return larger
    shared = f"{at_work:.1f} workers on average were busy and shared {_cpus(cpus)} with the reader"
    if held is CpuLimit.UNKNOWN:
        return f"if samples compute, make them cheaper: {shared}; if they wait (disk, network), {larger}"
    return f"make samples cheaper: {shared}"


def _cpus(number: float) -> str:
    return f"{number:g} CPU{'s' * (number != 1)}"


def _start_step(found: Waiting, params: dict[str, Any]) -> str:
    if found.ends_slowly:
        slow = "find what delays a worker's end (py-spy dump while it is joined): a thread or a library's exit handler"
        return f"use persistent_workers=True, which ends workers only once; or {slow}" if found.alike > 1 else slow
    cheaper = "make the start cheaper: fewer workers, less work in worker_init_fn, and with spawn fewer imports and a "
    cheaper += "small pickled dataset"
    if found.alike > 1 and not params.get("persistent_workers"):
        return f"use persistent_workers=True, which starts workers once and not in each epoch; or {cheaper}"
    return f"{cheaper}; it happens once, so its share falls in a longer run"


def _supply_step(cause: Cause | None, found: Waiting, params: dict[str, Any], cpus: float | None) -> str:
    if not found.workers:
        return "use num_workers=1 or more, so that workers make batches during the training step"
    if found.share_of(found.uneven) >= UNEVEN:
        return (
            f"make the shards even: worker {found.out} ran out of data and idled while other workers had batches left"
        )
    if found.share_of(found.first) >= ONE_SIDED:
        return "make epochs longer: workers begin no batch before its epoch, so the loop waits for each first one"
    if cause is Cause.IPC:
        less = "send fewer bytes in fewer tensors; see `minidl ledger`"
        return less if params.get("transport") == "arena" else f'{less}; or use transport="arena", without segments'
    if cause is Cause.COLLATE:
        if found.cpu.held(cpus)[0] is CpuLimit.WAITS:
            return "find what collation waits for (py-spy dump of a worker); or use more workers, which wait together"
        own = params.get("collate_fn", "default_collate") != "default_collate"
        return "make collation cheaper" + (
            ": default_collate, unlike your own collate_fn, stacks into shared memory without another copy"
            if own
            else ": use fewer bytes per sample (uint8 instead of float32, converted on the device)"
            if found.shared > LARGE_SAMPLES * max(1.0, found.tensors)
            else ": use fewer and larger tensors per sample"
        )
    return _samples_step(found, cpus)


def _samples_step(found: Waiting, cpus: float | None) -> str:
    """The next step for slow samples: more workers can wait together, but compute together only with enough CPUs."""
    held, _ = found.cpu.held(cpus)
    if held is CpuLimit.WAITS:
        return "use more workers, which wait together; or let samples wait less: a cache, a local copy, larger files"
    if held is CpuLimit.SHORT:
        there = "" if cpus is None else f" ({_cpus(cpus)} for {counted(found.workers, 'worker')})"
        rest = cpus is not None and found.cpu.at_once < cpus / 2
        others = f"; other work uses most of them: fetching used {found.cpu.at_once:.1f} on average" if rest else ""
        return f"make samples cheaper, or use more CPUs: they are short{there}, so more workers do not help{others}"
    if cpus is None:
        return "use more workers if CPUs are idle, or make samples cheaper"
    if found.workers < cpus:
        return f"use more workers ({found.workers} for {_cpus(cpus)}), or make samples cheaper"
    step = f"make samples cheaper: there are {counted(found.workers, 'worker')} for {_cpus(cpus)}, so more workers "
    if held is CpuLimit.COMPUTES:
        return f"{step}do not help samples that compute"
    return f"{step}help only if samples wait (disk, network) and do not compute"
