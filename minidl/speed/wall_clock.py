"""The ledger of the training loop's wall clock: what the loop did, or waited for, in each interval of its time.

Interface: `WallClock(trace, loader, spans)` is the ledger of one iterator; `waiting(trace, loader)` -> `Waiting`, its
sums, from which verdicts and views take their figures.

Rules of use: the loop waits while it is in `iter(loader)`, in `next`, and while the loader shuts down. Each nanosecond
of waiting has one cause, which follows from the state of all threads at that time; if several workers were busy, it is
divided among their steps.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minidl.playback.state import MOST_WORKERS
from minidl.speed.cpu_use import CpuUse, cpu_use
from minidl.speed.own_step import made_at, warm_up
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Floats, Ints, Rows
from minidl.tracefile.batches import are_batches
from minidl.tracefile.events import BEGINS, CALLS, Call
from minidl.tracefile.spans import durations, total

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

FEW_BATCHES: Final = 5
"""The fewest batches for a verdict: with fewer, one slow sample or one busy moment decides the shares."""

NEVER: Final = np.iinfo(np.int64).max


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
    PROGRAM = "program-bound"
    SUPPLY = "supply-bound"
    HEAD_OF_LINE = "head-of-line blocking"
    READING = "rebuild/pin-bound"
    START_UP = "start-up-bound"
    SAMPLER = "sampler-bound"
    OVERHEAD = "overhead-bound"
    TOO_FEW = "too few batches to say"
    UNSEEN = "not seen"


KIND_OF: Final = {
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
    share of the blocking. first: waiting for the first batches of epochs. opening: by cause, waiting for the first
    batch, if that happens once: workers, one iterator, one epoch. warming: what the first steps of the loop take longer
    than the others, if that happens once. uneven: waiting while a worker had run out of
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
    opening: dict[Cause, int] = field(default_factory=dict)
    warming: int = 0
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

    @property
    def once(self) -> int:
        """The waiting that happens once, however long the run is, ns."""
        return self.causes[Cause.START_UP] + sum(self.opening.values())

    @property
    def step_time(self) -> int:
        """The loop's own steps, without what happens once, ns."""
        return self.consumer - self.warming

    def of(self, kind: Bound) -> int:
        """The steady waiting for what bounds a loader in this way, ns."""
        mine = [cause for cause in KIND_OF if KIND_OF[cause] is kind]
        return sum(self.causes[cause] - self.opening.get(cause, 0) for cause in mine)

    def largest(self, kind: Bound) -> Cause:
        """The cause of this kind that costs most.

        If a training step hides a part of the workers' work, the wait falls into a task's last steps: so all their
        work is compared.
        """
        costs = self.work if kind is Bound.SUPPLY and self.work else self.causes
        return max((cause for cause in KIND_OF if KIND_OF[cause] is kind), key=lambda cause: costs[cause])

    def share(self, *causes: Cause) -> float:
        """The share of the waiting that is due to these causes; 0 without any waiting."""
        return self.share_of(sum(self.causes[cause] for cause in causes))

    def share_of(self, ns: int) -> float:
        """`ns` as a share of the waiting."""
        return ns / max(1, self.total)

    def __add__(self, more: Waiting) -> Waiting:
        """The times and counts of both; the blocking batch, and what is an average, stay those of the first."""
        added = ("consumer", "batches", "first", "warming", "uneven", "ending", "cpu", "together")
        return replace(
            self,
            out=self.out if self.out >= 0 else more.out,
            opening={},  # each of them has a first batch
            causes={cause: ns + more.causes[cause] for cause, ns in self.causes.items()},
            work={cause: ns + more.work[cause] for cause, ns in self.work.items()},
            **{name: getattr(self, name) + getattr(more, name) for name in added},
        )


def waiting(trace: Trace, loader: int, spans: Rows | None = None) -> Waiting:
    """Sum up the waiting for this loader iterator; near-linear in its events. spans: the trace's, if known already."""
    params = trace.loaders.get(loader, {})
    clock = WallClock(trace, loader, trace.spans() if spans is None else spans)
    task, worker, lasting = clock.blocker()
    uneven, out = clock.uneven()
    alike = sum(other == params for other in trace.loaders.values()) if params else 1
    made = Counter(map(made_at, trace.loaders.values()))[made_at(params)]
    took, early = durations(clock.steps(ev.CONSUMER)), len(clock.warm_up)
    messages, samples = clock.steps(ev.RESULT_REBUILD), clock.steps(ev.SAMPLE)
    samples = samples[(samples["task"] == task) & (samples["worker"] == worker)]
    averages = [float(messages[column].mean()) if len(messages) else 0.0 for column in ("bx", "ey", "ex")]
    return Waiting(
        causes=clock.causes(),
        consumer=int(took.sum()),
        batches=int(np.count_nonzero(are_batches(clock.events))),
        workers=clock.workers,
        alike=alike,
        busy=clock.share_of_workers(ev.FETCH, clock.gets, none=0.0),
        work=clock.work(),
        task=task,
        worker=worker,
        sample=int(samples["by"][np.argmax(durations(samples))]) if len(samples) else -1,
        spare=clock.share_of_workers(ev.INDEX_GET, clock.gets & ~clock.not_begun, none=1.0),
        lasting=lasting,
        first=clock.first(),
        opening=clock.opening() if made <= 1 else {},
        warming=int(took[:early].sum() - early * np.median(took[early:])) if early else 0,
        uneven=uneven,
        ending=clock.ending(),
        out=out,
        payload=averages[0],
        shared=averages[1],
        tensors=averages[2],
        cpu=cpu_use(clock.whole),
    )


_AFTER_SET_UP: Final = [code for code in BEGINS if CALLS.get(code) in (Call.NEXT, Call.OWN)]
"""Begins of what follows `iter(loader)`."""

_STATES: Final = [*Cause]
_SUPPLY: Final = len(_STATES)
_OWN: Final = _SUPPLY + 1


class WallClock:
    """The intervals in which no step of any thread begins or ends. at: their begins; width: their lengths, in ns.

    state: the position of a Cause; _SUPPLY, several workers at the causes of `work`; or _OWN, the loop in its own code.
    whole: the spans that the trace has from begin to end. needs: for each interval, the latest wait for a result.
    """

    def __init__(self, trace: Trace, loader: int, spans: Rows) -> None:
        # Outside of that time, the events of some processes are missing, so that a wait may have no visible cause.
        begin, end = trace.whole_from(loader), trace.whole_until(loader)
        time = trace.events["time"]
        # The collector's pauses may lie before the loader: they are recorded by the first loader that there is.
        steps = time[(trace.events["loader"] == loader) & ~np.isin(trace.events["code"], ev.GC)]
        begin = max(begin, int(steps.min())) if len(steps) else begin
        self.events = events = trace.events[(trace.events["loader"] == loader) & (time >= begin) & (time <= end)]
        spans = spans[spans["loader"] == loader]
        self.whole = spans[(spans["begin"] >= begin) & (spans["end"] <= end)]
        self.spans = spans = _ended(spans, events, begin, end)
        self.epochs: Ints = events["time"][events["code"] == ev.EPOCH[0]].astype(np.int64)
        told = events["y"][events["code"] == ev.EPOCH[0]]
        self.workers = min(max(int(told.max(initial=0)), 1 + int(events["worker"].max(initial=-1))), MOST_WORKERS)
        set_up = self._set_up()
        edges = np.unique(np.concatenate([spans["begin"], spans["end"], events["time"], *set_up]))
        self.at: Ints = edges[:-1]
        self.width: Ints = np.diff(edges)
        self.setting_up: Bools = _open(*set_up, self.at) > 0
        self.ending_up: Bools = self.open(ev.SHUTDOWN) > 0
        self.waits: Bools = (self.open(ev.NEXT) > 0) | self.ending_up | self.setting_up
        # With a pin thread, only that thread waits for results, and the loop for the pin thread.
        get = ev.READY_GET if np.any(events["code"] == ev.READY_GET[0]) else ev.RESULT_GET
        self.needs = self._latest(events["code"] == get[0])
        self.gets: Bools = (self.open(get) > 0) & self.waits
        self.not_begun = self._not_begun()
        self.warm_up = warm_up(trace, loader, self.steps(ev.CONSUMER))
        self.state = self._states()

    def steps(self, *pairs: tuple[int, int]) -> Rows:
        """The spans of these kinds."""
        return self.spans[np.isin(self.spans["code"], [pair[0] for pair in pairs])]

    def open(self, *pairs: tuple[int, int]) -> Ints:
        """The number of open spans of these kinds in each interval."""
        rows = self.steps(*pairs)
        return _open(rows["begin"], rows["end"], self.at)

    def took(self, which: Bools) -> int:
        """The ns of these intervals."""
        return int(self.width[which].sum())

    def _set_up(self) -> tuple[Ints, Ints]:
        """Begins and ends of `iter(loader)`: up to the first epoch, and from each epoch's begin to the consumer's."""
        events = self.events
        if not len(self.epochs):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        left = events["time"][np.isin(events["code"], _AFTER_SET_UP)].astype(np.int64)
        place = np.searchsorted(left, self.epochs, side="right")
        ends = np.append(left, events["time"][-1])[place]
        begins = self.epochs.copy()
        begins[0] = min(begins[0], events["time"][0])
        return begins, ends

    def _latest(self, which: Bools) -> Ints:
        """For each interval, the position in `events` of the latest event of `which`; -1 before the first."""
        places = np.append(np.flatnonzero(which), -1)  # index -1 finds the last
        return places[np.searchsorted(self.events["time"][places[:-1]], self.at, side="right") - 1]

    def _of_latest(self, latest: Ints, column: str) -> Ints:
        return np.append(self.events[column].astype(np.int64), -1)[latest]  # index -1 finds the appended one

    def _is_after(self, code: int, *others: int) -> Bools:
        """Whether the latest event of these codes is one of the first."""
        latest = self._latest(np.isin(self.events["code"], [code, *others]))
        return np.asarray(self._of_latest(latest, "code") == code)

    def _depth(self) -> Ints:
        """The reorder buffer's depth; an epoch begins with an empty one."""
        kept = (ev.REORDER_STORE, ev.REORDER_POP)
        latest = self._latest(np.isin(self.events["code"], [*kept, ev.EPOCH[0]]))
        return np.where(self._is_after(ev.EPOCH[0], *kept), 0, np.maximum(0, self._of_latest(latest, "y")))

    def _not_begun(self) -> Bools:
        """Whether the worker that the loop waits for has not begun its first fetch of the epoch."""
        first = np.full((len(self.epochs) + 1, self.workers + 1), NEVER)  # last column: any worker
        rows = self.steps(ev.FETCH)
        epoch = np.searchsorted(self.epochs, rows["begin"], side="right")
        np.minimum.at(first, (epoch, np.clip(rows["worker"], 0, self.workers)), rows["begin"])
        first[:, -1] = first.min(axis=1)
        first[0] = 0  # an epoch of which the begin is not in the trace
        worker = np.clip(self._of_latest(self.needs, "worker"), -1, self.workers)
        return np.asarray(self.at < first[np.searchsorted(self.epochs, self.at, side="right"), worker])

    def _by_step(self, measure: Callable[..., Any]) -> dict[Cause, Any]:
        """A measure of the spans of each supplying step; a fetch without its collation is the samples."""
        collate, sending = measure(ev.COLLATE), measure(ev.RESULT_PICKLE, ev.RESULT_WRITE)
        return {Cause.SAMPLES: np.maximum(0, measure(ev.FETCH) - collate), Cause.COLLATE: collate, Cause.IPC: sending}

    def _states(self) -> Ints:
        self.supplying: dict[Cause, Ints] = self._by_step(self.open)  # the number of workers at each step
        self.working = sum(self.supplying.values(), np.zeros(len(self.at), np.int64))
        state = {cause: place for place, cause in enumerate(_STATES)}
        # The first that holds is the cause. The loader's own thread comes before other threads, and the reading side
        # before head-of-line blocking: while the reader works, it may hold the missing batch.
        rules = [
            (_OWN, ~self.waits),
            (state[Cause.SAMPLER], self.open(ev.SAMPLER_NEXT) > 0),
            (state[Cause.START_UP], self.setting_up | self.ending_up),
            (state[Cause.PIN], self.open(ev.PIN) > 0),
            (state[Cause.REBUILD], self.open(ev.RESULT_REBUILD) > 0),
            (state[Cause.START_UP], self.gets & self.not_begun),
            (state[Cause.HEAD_OF_LINE], self.gets & (self._depth() > 0) & (self.open(ev.INDEX_GET) > 0)),
            (_SUPPLY, (self.working > 0) & (self.gets | (self.workers == 0))),
        ]
        return np.select([holds for _, holds in rules], [np.int64(one) for one, _ in rules], state[Cause.OVERHEAD])

    def between_batches(self) -> Bools:
        """Whether an interval lies after the first batch of an epoch and before its last, and in no warm-up."""
        rows = self.events[are_batches(self.events) | (self.events["code"] == ev.EPOCH[0])]
        batch = np.concatenate([[False], rows["code"] == ev.YIELD, [False]])
        place = np.searchsorted(rows["time"], self.at, side="right")
        warm = _open(self.warm_up["begin"], self.warm_up["end"], self.at) > 0
        return np.asarray(batch[place] & batch[place + 1] & ~warm)

    @cached_property
    def shares(self) -> dict[Cause, Floats]:
        """For each cause the ns of each interval that were waited for it."""
        width: Floats = self.width.astype(np.float64)
        out: dict[Cause, Floats] = {cause: np.where(self.state == at, width, 0.0) for at, cause in enumerate(_STATES)}
        each = width * (self.state == _SUPPLY) / np.maximum(1, self.working)
        return out | {cause: out[cause] + each * count for cause, count in self.supplying.items()}

    def causes(self, when: Bools | None = None) -> dict[Cause, int]:
        """The ns of waiting by cause. when: the intervals that count, by default all."""
        when = np.ones(len(self.at), bool) if when is None else when
        out = {cause: int(ns[when].sum()) for cause, ns in self.shares.items()}
        out[Cause.OVERHEAD] += self.took(when & self.waits) - sum(out.values())  # of rounding
        return out

    def causes_in(self, rows: Rows) -> dict[Cause, Floats]:
        """The ns of waiting by cause in each of these spans, which do not overlap, by begin."""
        place = np.searchsorted(rows["begin"], self.at, side="right") - 1
        inside = (place >= 0) & (self.at < rows["end"][place])
        sums = {cause: np.bincount(place[inside], ns[inside], len(rows)) for cause, ns in self.shares.items()}
        return {cause: ns.astype(np.float64) for cause, ns in sums.items()}

    def work(self) -> dict[Cause, int]:
        """The total duration of the supplying steps, in ns."""
        return {step: int(ns) for step, ns in self._by_step(lambda *pairs: total(self.steps(*pairs))).items()}

    def blocker(self) -> tuple[int, int, float]:
        """The task and the worker that blocked the line longest, and that worker's share of it; -1 = no blocking.

        The share is 0 if one or two tasks caused all blocking: then no worker is the cause.
        """
        line = self.state == _STATES.index(Cause.HEAD_OF_LINE)
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

    def share_of_workers(self, span: tuple[int, int], when: Bools, none: float) -> float:
        """The share of the workers' time in these intervals that such spans take; `none` if there is no such time."""
        time = self.took(when) * self.workers
        return float((self.open(span) * self.width)[when].sum() / time) if time else none

    def first(self) -> int:
        """The ns waited for the first batches of epochs, after `iter(loader)`; 0 with one epoch only."""
        if len(self.epochs) < 2:
            return 0
        return self.took(self.waits & self._is_after(ev.EPOCH[0], ev.YIELD) & ~self.setting_up)

    def opening(self) -> dict[Cause, int]:
        """The ns waited for the first batch, by cause; {} without workers, or with several epochs."""
        if len(self.epochs) != 1 or not self.workers:
            return {}
        # A device loader takes two batches before it hands over the first one.
        got = ev.HAND_OVER if np.any(self.events["code"] == ev.HAND_OVER) else ev.YIELD
        first = self.waits & self._is_after(ev.EPOCH[0], got) & ~self.setting_up
        apart = Cause.SAMPLER, Cause.START_UP, Cause.HEAD_OF_LINE
        return {cause: ns for cause, ns in self.causes(first).items() if cause not in apart}

    def ending(self) -> int:
        """The ns in which the shutdown ran without a set-up."""
        return self.took(self.ending_up & ~self.setting_up)

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
        tail = self.waits & self._is_after(ev.WORKER_EXHAUSTED, ev.EPOCH[0]) & ~self.ending_up
        return self.took(tail), int(self.events["worker"][ran_out[0]])


def _ended(spans: Rows, events: Rows, begin: int, end: int) -> Rows:
    """The spans between two times, cut to these; open ones end with the trace.

    Spans that an exiting worker's feeder leaves open are dropped.
    """
    feeding = np.isin(spans["code"], [ev.RESULT_PICKLE[0], ev.RESULT_WRITE[0], ev.SHM_COPY[0]])
    spans = spans[(spans["end"] >= 0) | ~feeding].copy()
    if len(events):
        spans["end"][spans["end"] < 0] = events["time"][-1]
    spans = spans[(spans["end"] >= begin) & (spans["begin"] <= end)]
    spans["begin"], spans["end"] = np.maximum(spans["begin"], begin), np.minimum(spans["end"], end)
    return spans


def _open(begins: Ints, ends: Ints, at: Ints) -> Ints:
    begun = np.searchsorted(np.sort(begins), at, side="right")
    return np.asarray(begun - np.searchsorted(np.sort(ends), at, side="right"), np.int64)
