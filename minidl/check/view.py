"""What the rules see: one iterator's events as columns, what of them is missing, and how a breach is told.

`LoaderView` holds the rows of one loader; `rule` registers a check under a name; `Violation` is what a check yields.

Rules of use: a check yields violations whose first row is the *first impossible event*: up to it the trace could still
have been a behaviour of the protocol. A check compares what is there; if it concludes from an event that is *not*
there it asks `complete`, `whole_task` or `whole_epoch` first, which know what was overwritten or lost. Positions are
positions in the view's own columns; `origin` maps them to the trace's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Positions, Rows
from minidl.tracefile.events import EVENTS, Message, Outcome
from minidl.tracefile.words import name_of

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

NO_ROWS: Positions = np.empty(0, np.intp)


@dataclass(frozen=True, slots=True)
class Violation:
    """One breach.

    rule: a key of RULES. about: the first impossible event in words; reason: why it can't be. rows: positions in
    `trace.events`, the first impossible event first, then what shows it. missing: the event that should have come
    before it, in words, if the breach is that it did not.
    """

    rule: str
    about: str
    reason: str
    rows: tuple[int, ...] = ()
    missing: str = ""
    loader: int = 0

    @property
    def message(self) -> str:
        """The breach in one line, without its rule."""
        return f"{self.about}: {self.reason}" if self.about else self.reason

    @property
    def at(self) -> int:
        """Row of the first impossible event; -1 if the breach belongs to none."""
        return self.rows[0] if self.rows else -1

    def __str__(self) -> str:
        where = f"  [rows {', '.join(map(str, self.rows))}]" if self.rows else ""
        return f"{self.rule}: {self.message}{where}"


Check = Callable[["LoaderView"], Iterator[Violation]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What the protocol demands. means: what a breach means for who ran it, and what to do. needs: what must not be
    lost for the rule to be judged ("" = it needs no more than the events that it names; "task", "epoch", "all")."""

    name: str
    demand: str
    means: str
    needs: str
    check: Check


TABLE: dict[str, Rule] = {}


def rule(name: str, demand: str, means: str, needs: str = "") -> Callable[[Check], Check]:
    """Register a check; of two rules that are broken by one event, the one registered first names the reason."""

    def register(check: Check) -> Check:
        @functools.wraps(check)
        def named(loader: LoaderView) -> Iterator[Violation]:
            return (replace(violation, rule=name) for violation in check(loader))

        TABLE[name] = Rule(name, demand, means, needs, named)
        return check

    return register


LOADER_THREAD: Final = np.array(
    [
        *(*ev.EPOCH, *ev.SAMPLER_NEXT, ev.TASK_ASSIGNED, ev.INDEX_PUT, *ev.NEXT, ev.YIELD, *ev.CONSUMER),
        *(ev.RCVD_ADVANCE, ev.REORDER_STORE, ev.REORDER_POP, ev.WORKER_EXHAUSTED, ev.RESUME_PUT),
        *(ev.RESUMED, ev.STATE_KEPT, ev.STATE_TAKEN),
    ]
)
"""What only the loader's own thread records."""

IN_WORKER: Final = np.array(
    [
        *(*ev.WORKER_INIT, *ev.MAKE_FETCHER, ev.WORKER_READY, *ev.INDEX_GET),
        *(*ev.FETCH, *ev.SAMPLE, ev.SAMPLE_INDEX, *ev.COLLATE),
        *(ev.RESULT_PUT, ev.RESUME_ACK, ev.DONE_EVENT_SEEN, ev.WORKER_EXIT, ev.STATE_PUT),
    ]
)
"""What only a worker's main thread records, if there are workers."""


@dataclass(frozen=True, slots=True)
class Lacks:
    """What a loader's events lack.

    start, until: of the loader's events, those judged; before it, the loader's own are overwritten, and nothing tells
    of which epoch a task is. since: row of the view from which every event of every process is there. overwritten:
    (process's name, events). cut, beyond: why, and how many, events after `until` are not judged. absent: workers of
    which nothing was recorded at all. partial: made from outside, it has only some kinds of events.
    """

    start: int = 0
    since: int = 0
    until: int = 0
    overwritten: tuple[tuple[str, int], ...] = ()
    cut: str = ""
    beyond: int = 0
    absent: frozenset[int] = frozenset()
    partial: bool = False


class LoaderView:
    """One iterator. Tasks are numbered anew in each epoch, so a task is identified by `.key`: epoch and task."""

    def __init__(self, trace: Trace, number: int, origin: Positions) -> None:
        self.trace = trace
        self.number = number
        self.params: dict[str, Any] = dict(trace.loaders.get(number, {}))
        events = trace.events[origin]
        self.lacks = _lacks(trace, events, self.params)
        judged = slice(self.lacks.start, self.lacks.until)
        self._columns(events[judged], origin[judged])
        if len(redone := self._redone()):
            rows = np.delete(np.arange(len(self.code)), redone)
            self._columns(self.events[rows], self.origin[rows])

    def _redone(self) -> Positions:
        """What has come again because a next() was interrupted, which the loader then does again; no rule sees it.

        A task is put into its queue again, and its worker drops it; or a message is rebuilt again. Without workers
        samples are fetched again: there it is those that came first.
        """
        raised = self.raised()
        if not len(raised):
            return NO_ROWS
        if not self.multiprocess:
            fetched, begins = self.pick(*ev.SAMPLE, ev.SAMPLE_INDEX, *ev.COLLATE), self.pick(ev.NEXT[0])
            cut = [
                fetched[(fetched > begin) & (fetched < end)]
                for begin, end in zip(self.last_before(raised, begins), raised, strict=True)
            ]
            return np.concatenate(cut)
        rows = self.pick(ev.INDEX_PUT, ev.SLAB_MAP, *ev.RESULT_REBUILD)
        rows = rows[self.task[rows] >= 0]
        first: dict[tuple[int, int, int], int] = {}
        found = []
        for row in rows.tolist():
            what = int(self.code[row]), int(self.key[row]), int(self.x[row]) if self.code[row] == ev.SLAB_MAP else -1
            if (begin := first.setdefault(what, row)) < row and np.any((raised > begin) & (raised < row)):
                found.append(row)
        puts = np.array([row for row in found if self.code[row] == ev.INDEX_PUT], np.intp)
        gets = self.stage(ev.INDEX_GET[1])
        again = gets[np.isin(self.key[gets], self.key[puts])]
        again = again[self.match(again, gets) != again]
        begins = self.pick(ev.INDEX_GET[0])
        for row in again.tolist():
            found += [row, *begins[(begins < row) & (self.process[begins] == self.process[row])][-1:].tolist()]
        return np.array(sorted(found), np.intp)

    def raised(self) -> Positions:
        """The ends of each next that raised without yielding: by an interruption, or an error that is no task's."""
        rows = self.pick(ev.NEXT[1], ev.YIELD)
        after_yield = np.r_[False, self.code[rows] == ev.YIELD][: len(rows)]
        ends = (self.code[rows] == ev.NEXT[1]) & (self.y[rows] == Outcome.ERROR)
        found: Positions = rows[ends & ~after_yield]
        return found

    def _columns(self, events: Rows, origin: Positions) -> None:
        self.events, self.origin = events, origin
        self.code, self.task, self.worker, self.time, self.x, self.y, self.z, self.tid, self.process = (
            np.ascontiguousarray(events[name])
            for name in ("code", "task", "worker", "time", "x", "y", "z", "tid", "process")
        )
        order = np.argsort(self.code, kind="stable")
        codes, starts = np.unique(self.code[order], return_index=True)
        self._of_code: dict[int, Positions] = dict(
            zip(codes.tolist(), np.split(order, starts[1:]), strict=bool(len(codes)))
        )
        self.pinned = len(self.pick(ev.PIN_START)) > 0 or len(self.pick(ev.READY_GET[0])) > 0
        self.pinned |= bool(self.lacks.partial and self.params.get("pin_memory"))
        self.multiprocess = len(self.pick(ev.TASK_ASSIGNED)) > 0
        self.received = ev.READY_GET[1] if self.pinned else ev.RESULT_GET[1]
        self._number_epochs()

    def restricted(self, rows: Positions) -> LoaderView:
        """The same loader with nothing but `rows`, as if that were all that happened."""
        part = copy.copy(self)
        part.__dict__.pop("capacity", None)
        part.lacks = Lacks(partial=self.lacks.partial, absent=self.lacks.absent)
        pinned, multiprocess, received = self.pinned, self.multiprocess, self.received
        part._columns(self.events[rows], self.origin[rows])
        part.pinned, part.multiprocess, part.received = pinned, multiprocess, received
        return part

    def _number_epochs(self) -> None:
        """`key` of every row stands for its epoch and its task; `at_epoch` numbers epochs, 0: its begin is not there.

        What the loader's thread does belongs to the epoch that it has begun. Work on a task belongs to the epoch whose
        first task has been assigned: a persistent worker's leftovers of the last epoch are all read before that.
        """
        begins, assigned = self.pick(ev.EPOCH[0]), self.pick(ev.TASK_ASSIGNED)
        self.begins = begins
        firsts = begins
        if len(assigned):
            place = np.searchsorted(assigned, begins)
            firsts = np.where(place < len(assigned), assigned[np.minimum(place, len(assigned) - 1)], len(self.code))
        rows = np.arange(len(self.code))
        by_begin = np.searchsorted(begins, rows, side="right")
        by_first = np.searchsorted(np.maximum.accumulate(firsts), rows, side="right") if len(firsts) else by_begin
        own = np.isin(self.code, LOADER_THREAD)
        self.at_epoch = np.where(own, by_begin, by_first).astype(np.int64)
        _, self.key = np.unique((self.at_epoch << 40) | (self.task + 1), return_inverse=True)

    # --- Picking rows
    def pick(self, *codes: int) -> Positions:
        """Positions with one of `codes`, in order."""
        if len(codes) == 1:
            return self._of_code.get(codes[0], NO_ROWS)
        return np.sort(np.concatenate([self._of_code.get(code, NO_ROWS) for code in codes]))

    def about(self, code: int, x: int) -> Positions:
        """Positions of `code` whose x is this: the message that a get brought, the queue that a sentinel went into."""
        rows = self.pick(code)
        those: Positions = rows[self.x[rows] == x]
        return those

    def stage(self, code: int) -> Positions:
        """Positions of one stage of a task's way; of a get, those that brought what the stage is about."""
        wanted = {ev.INDEX_GET[1]: Message.TASK, ev.RESULT_GET[1]: Message.RESULT, ev.READY_GET[1]: Message.RESULT}
        rows = self.about(code, wanted[code]) if code in wanted else self.pick(code)
        return rows[self.task[rows] >= 0]

    def field(self, code: int, name: str) -> Ints:
        """The column of an event's own field, or of what every event has: "task", "worker"."""
        own = dict(zip((field.name for field in EVENTS[code].fields), "xyz", strict=False))
        column: Ints = getattr(self, own.get(name, name))
        return column

    def differing(
        self, name: str, before: int, after: int, *, last: bool = False
    ) -> Iterator[tuple[int, int, int, int]]:
        """Rows of a stage whose task had another value of `name` at the stage before: the two rows, then the values.

        last: compared with the task's last event of that stage that came before, else with its first one.
        """
        rows, come = self.matched(self.stage(after), self.stage(before), last=last)
        has, had = self.field(after, name)[rows], self.field(before, name)[come]
        for at in np.flatnonzero(has != had).tolist():
            yield int(rows[at]), int(come[at]), int(has[at]), int(had[at])

    def of_worker(self, rows: Positions, worker: int) -> Positions:
        """Those of `rows` that name the worker."""
        mine: Positions = rows[self.worker[rows] == worker]
        return mine

    def match(self, rows: Positions, others: Positions) -> Positions:
        """For each of `rows` the first of `others` with the same key, or -1."""
        return self._of_task(rows, others, self.key[rows] * len(self.code), 0)

    def last_of_task(self, rows: Positions, others: Positions) -> Positions:
        """For each of `rows` the last of `others` with the same key that comes before it, or -1."""
        return self._of_task(rows, others, self.key[rows] * len(self.code) + rows, -1)

    def _of_task(self, rows: Positions, others: Positions, sought: Ints, step: int) -> Positions:
        """By keys, and rows among those with one key: the place of each of `sought` in `others`, plus `step`."""
        if not len(others):
            return np.full(len(rows), -1, dtype=np.intp)
        others = others[np.argsort(self.key[others], kind="stable")]
        place = np.searchsorted(self.key[others] * len(self.code) + others, sought) + step
        found = others[np.clip(place, 0, len(others) - 1)]
        there = (place >= 0) & (place < len(others)) & (self.key[found] == self.key[rows])
        return np.where(there, found, -1)

    def matched(self, rows: Positions, others: Positions, *, last: bool = False) -> tuple[Positions, Positions]:
        """Those of `rows` that `match` (or `last_of_task`) finds one of `others` for, and what it finds."""
        found = self.last_of_task(rows, others) if last else self.match(rows, others)
        return rows[found >= 0], found[found >= 0]

    def last_before(self, rows: Positions, others: Positions) -> Positions:
        """For each of `rows` the last of `others` that comes before it, or -1."""
        if not len(others):
            return np.full(len(rows), -1, dtype=np.intp)
        place = np.searchsorted(others, rows) - 1
        return np.where(place >= 0, others[np.maximum(place, 0)], -1)

    def records(self, *codes: int) -> bool:
        """Whether events of each of these kinds can be expected: in a trace made from outside, only of those it has."""
        return not self.lacks.partial or all(len(self.pick(code)) for code in codes)

    @property
    def unseen(self) -> list[str]:
        """In a trace made from outside: names of the kinds of events that it has none of, though a run would."""
        told = self.params.get("unseen")
        return [str(name) for name in told] if isinstance(told, list) else []

    # --- What may be concluded
    @property
    def complete(self) -> bool:
        """Whether nothing is missing from the loader's beginning to the last event judged."""
        return not self.lacks.overwritten

    def whole_epoch(self, rows: Positions) -> Bools:
        """For each row: was its epoch begun when everything was recorded already?"""
        if self.complete:
            return np.ones(len(rows), bool)
        starts = np.r_[-1, self.begins]
        judged: Bools = starts[self.at_epoch[rows]] >= self.lacks.since
        return judged

    def whole_task(self, rows: Positions) -> Bools:
        """For each row: was its task assigned (drawn, if there are no workers) when everything was recorded?"""
        there: Bools = ~np.isin(self.worker[rows], list(self.lacks.absent))
        if self.complete:
            return there
        births = self.pick(ev.TASK_ASSIGNED if self.multiprocess else ev.SAMPLER_NEXT[0])
        return there & (self.match(rows, births) >= self._drawn_since)

    @functools.cached_property
    def _drawn_since(self) -> int:
        """Row of the first draw since everything was recorded: a task assigned before it was perhaps drawn earlier."""
        if not self.records(ev.SAMPLER_NEXT[0]):
            return self.lacks.since
        draws = self.pick(ev.SAMPLER_NEXT[0])
        later = draws[draws >= self.lacks.since]
        return int(later[0]) if len(later) else len(self.code)

    @functools.cached_property
    def capacity(self) -> tuple[int, int] | None:
        """num_workers and prefetch_factor, as an epoch's begin says, or the loader's facts; None without workers."""
        if len(self.begins):
            first = self.begins[0]
            return (int(self.y[first]), int(self.z[first])) if min(self.y[first], self.z[first]) > 0 else None
        workers, factor = self.params.get("num_workers"), self.params.get("prefetch_factor")
        return (workers, factor) if isinstance(workers, int) and isinstance(factor, int) and workers * factor else None

    @property
    def in_order(self) -> bool:
        return self.params.get("in_order", True) is not False

    @functools.cached_property
    def homes(self) -> dict[int, int]:
        """Worker -> its process: the one that said it was ready, else the first that did a worker's work."""
        rows = self.pick(*IN_WORKER.tolist()) if self.multiprocess else self.pick(ev.WORKER_READY)
        rows = rows[self.worker[rows] >= 0]
        out: dict[int, int] = {}
        for some in (rows[self.code[rows] == ev.WORKER_READY], rows):
            workers, first = np.unique(self.worker[some], return_index=True)
            for worker, at in zip(workers.tolist(), first.tolist(), strict=True):
                out.setdefault(worker, int(self.process[some[at]]))
        return out

    def epoch(self, row: int) -> int:
        """The epoch's own number: what its begin says; of one whose begin is not there, what the next one implies."""
        place = int(self.at_epoch[row])
        if place:
            return int(self.x[self.begins[place - 1]])
        return max(0, int(self.x[self.begins[0]]) - 1) if len(self.begins) and not self.complete else 0

    # --- Telling
    def tell(self, row: int) -> str:
        """A row in words: "iterator 1, epoch 0, task 12, worker 3, fetch begin"."""
        parts = [f"iterator {self.number}", f"epoch {self.epoch(row)}"]
        parts += [f"task {self.task[row]}"] if self.task[row] >= 0 else []
        parts += [f"worker {self.worker[row]}"] if self.worker[row] >= 0 else []
        return ", ".join([*parts, name_of(int(self.code[row]))])

    def was_interrupted(self, row: int) -> bool:
        """Whether the recorder of the row's process says that a signal's handler has raised in it."""
        header = self.trace.processes[int(self.process[row])].header
        return header is not None and header.lost_events > 0 and not header.errno

    def broken(self, reason: str, *rows: int, missing: str = "") -> Violation:
        """A violation whose first impossible event is the first of `rows`; `rule` fills in its rule's name."""
        origins = tuple(int(self.origin[row]) for row in rows)
        return Violation("", self.tell(rows[0]), reason, origins, missing, self.number)


# --- What is missing --------------------------------------------------------------------------------------------------
def _lacks(trace: Trace, events: Rows, params: dict[str, Any]) -> Lacks:
    """Find out between which rows of a loader's events nothing is missing."""
    start, since, until, overwritten, cut = 0, 0, len(events), [], ""
    home = events["process"][np.isin(events["code"], LOADER_THREAD)][:1].tolist()
    home = home or [index for index, process in enumerate(trace.processes) if process.role == "loader"]
    for index in np.unique(events["process"]).tolist():
        process = trace.processes[index]
        if process.whole_from:
            oldest = trace.events[trace.events["process"] == index]
            overwritten.append((process.name, int(oldest["seq"].min()) - 1))
            there = int(np.searchsorted(events["time"], oldest["time"][0]))
            since, start = max(since, there), max(start, there if index in home else 0)
        if process.whole_until:
            last = int(np.searchsorted(events["time"], process.whole_until, side="right"))
            if last < until:
                until, cut = last, f"{process.name} could not record any more (a full disk, say)"
                if process.header is not None and not process.header.errno:
                    cut = f"an exception of a signal's handler kept {process.name} from recording an event"
                if process.header is not None and not process.header.lost_events:
                    cut = f"the events file of {process.name} is truncated"
    stopped = _stopped(trace, events)
    if stopped < until:
        until, cut = stopped, "the loader's own process had stopped recording"
    absent = _absent(events) if until else frozenset()
    beyond, partial = len(events) - until, bool(params.get("observed"))
    return Lacks(start, since - start, until, tuple(overwritten), cut, beyond, absent, partial)


def _stopped(trace: Trace, events: Rows) -> int:
    """How many of a loader's events came before its own process stopped recording: all, if it was shut down first.

    A loader may outlive its `with minidl.trace(...)`. Its workers then go on recording, alone.
    """
    home = np.flatnonzero(np.isin(events["code"], LOADER_THREAD))
    if not len(home) or np.any(events["code"] == ev.SHUTDOWN[1]):
        return len(events)
    process = int(events["process"][home[0]])
    if process not in {line["process"] for line in trace.described("trace_end")}:
        return len(events)
    last = np.flatnonzero(trace.events["process"] == process)[-1]
    return int(np.searchsorted(events["time"], trace.events["time"][last], side="right"))


def _absent(events: Rows) -> frozenset[int]:
    """Workers that got tasks, and whose results came, though no process recorded any work of theirs."""
    answered = events["worker"][
        np.isin(events["code"], [ev.RESULT_READ, *ev.RESULT_REBUILD, ev.RESULT_GET[1], ev.YIELD])
    ]
    wrote = events["worker"][np.isin(events["code"], IN_WORKER)]
    return frozenset((set(answered.tolist()) - set(wrote.tolist())) - {-1})
