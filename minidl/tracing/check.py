"""Does a trace obey the protocol? The same decisions and lifecycles as the live loader's, held against what happened.

`check(trace)` gives the violations; `examine(trace)` gives a `Report`: the violations, the spans that were open when
the trace ended, and what could not be judged and why. `RULES` names every rule and says what it demands.

A rule that needs *all* events (one that says "is missing") is not judged for a loader of which events were overwritten
or lost; the report says so. An end that a killed or running process still owes is `open`, not violated. Rules work on
columns, not on single events; only the replays walk, and they walk over a few events a task.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from minidl.dispatcher import DispatchError
from minidl.protocol import ProtocolError
from minidl.tracing import events as ev
from minidl.tracing.events import EVENTS, DoneEvent, Ending, Message, Outcome, Phase, QueueId
from minidl.tracing.replay import DispatcherReplay, LoaderReplay, PinReplay, WorkerReplay
from minidl.tracing.summary import open_spans

if TYPE_CHECKING:
    from minidl.tracing.reader import Trace

Rows = npt.NDArray[np.intp]

MOST_ROWS_SHOWN: Final = 20
"""Of one rule and loader, so many violations are listed one by one; the rest is counted."""

TORN_SLOTS: Final = 16
"""A killed process leaves slots that its threads had begun to write, among its last; an earlier gap is a loss."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One breach: the rule's name (a key of RULES), what happened, and the rows of `trace.events` that show it."""

    rule: str
    message: str
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f"  [rows {', '.join(map(str, self.rows))}]" if self.rows else ""
        return f"{self.rule}: {self.message}{where}"


@dataclass(slots=True)
class Report:
    """What `examine` found. `open`: spans without an end that nothing forbids. `unjudged`: rules left out, and why."""

    violations: list[Violation] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    loaders: int = 0
    events: int = 0

    def text(self) -> str:
        """The report for a reader: verdict, violations, open spans, what was not judged."""
        if self.violations:
            verdict = f"{len(self.violations)} violation(s)"
        else:
            verdict = f"none of {len(RULES)} rules is broken" if self.loaders else "no loader in this trace"
        lines = [f"{self.events} events of {self.loaders} loader iterator(s): {verdict}"]
        lines += [f"  {violation}" for violation in self.violations]
        lines += [f"  open: {text}" for text in self.open]
        lines += [f"  not judged: {text}" for text in self.unjudged]
        return "\n".join(lines)


RULES: dict[str, str] = {}
_Check = Callable[["_Loader"], Iterator[Violation]]
_checks: list[tuple[_Check, bool]] = []


def _rule(name: str, demand: str, *, needs_all: bool = False) -> Callable[[_Check], _Check]:
    """Register a rule; needs_all: it concludes from the absence of an event, so none may have been lost."""

    def register(check: _Check) -> _Check:
        RULES[name] = demand
        _checks.append((check, needs_all))
        return check

    return register


def check(trace: Trace) -> list[Violation]:
    """Return every breach of the protocol in `trace`, in the order of RULES and then of time."""
    return examine(trace).violations


def examine(trace: Trace) -> Report:
    """Judge every loader iterator in `trace`; about 10 s for a million events at most."""
    report = Report(events=len(trace.events))
    report.violations += _limited(_recording(trace))
    lossy = {index for index, process in enumerate(trace.processes) if process.lost}
    for number in np.unique(trace.events["loader"]):
        if number == 0:
            continue
        loader = _Loader(trace, int(number))
        report.loaders += 1
        if loader.beyond:
            told = f"{loader.beyond} events of its workers after its own process had stopped recording"
            report.unjudged.append(f"{loader.name}: {told}")
        whole = lossy.isdisjoint(loader.processes)
        if not whole:
            report.unjudged.append(f"{loader.name}: events were lost, so nothing is concluded from a missing one")
        for rule, needs_all in _checks:
            if whole or not needs_all:
                report.violations += _limited(rule(loader))
    report.open += open_spans(trace)
    report.unjudged += trace.problems
    return report


def _limited(found: Iterable[Violation]) -> Iterator[Violation]:
    """Pass on the first violations of each rule and count the rest: one root cause may break a rule for every task."""
    counts: dict[str, int] = {}
    for violation in found:
        counts[violation.rule] = counts.get(violation.rule, 0) + 1
        if counts[violation.rule] <= MOST_ROWS_SHOWN:
            yield violation
    for name, count in counts.items():
        if count > MOST_ROWS_SHOWN:
            yield Violation(name, f"… and {count - MOST_ROWS_SHOWN} more")


# --- One loader's events, with the epoch of each ----------------------------------------------------------------------
class _Loader:
    """The events of one loader iterator. Rows are positions in `.events`; `.origin[row]` is the row in the trace.

    Tasks are numbered anew in every epoch of a persistent loader, so a task is identified by `.key`: epoch and task.
    """

    def __init__(self, trace: Trace, number: int) -> None:
        self.number = number
        self.name = f"loader {number}"
        self.trace = trace
        origin: Rows = np.flatnonzero(trace.events["loader"] == number)
        self.origin = origin[: _judged(trace, origin)]
        self.beyond = len(origin) - len(self.origin)
        self.events = trace.events[self.origin]
        self.processes = set(np.unique(self.events["process"]).tolist())
        self.params: dict[str, Any] = dict(trace.loaders.get(number, {}))
        self.code = self.events["code"]
        self.task = self.events["task"]
        self.worker = self.events["worker"]
        self.time = self.events["time"]
        self.key = (self._epochs() << 40) | (self.task + 1)
        self.multiprocess = len(self.pick(ev.TASK_ASSIGNED)) > 0
        self.pinned = len(self.pick(ev.PIN_START)) > 0
        self.received = ev.READY_GET[1] if self.pinned else ev.RESULT_GET[1]

    def _epochs(self) -> npt.NDArray[np.int64]:
        """The epoch (from 0) of every row.

        What the loader's thread does belongs to the epoch that it has begun. Work on a task belongs to the epoch whose
        first task has been assigned: a persistent worker's leftovers of the last epoch are all read before that.
        """
        begins = np.flatnonzero(self.code == ev.EPOCH[0])
        assigned = np.flatnonzero(self.code == ev.TASK_ASSIGNED)
        place = np.searchsorted(assigned, begins)
        firsts = np.where(place < len(assigned), np.append(assigned, 0)[np.minimum(place, len(assigned))], begins)
        if not len(assigned):
            firsts = begins
        rows = np.arange(len(self.events))
        by_begin = np.searchsorted(begins, rows, side="right") - 1
        by_first = np.searchsorted(np.maximum.accumulate(firsts), rows, side="right") - 1
        own = np.isin(self.code, _LOADER_THREAD_CODES)
        return np.maximum(np.where(own, by_begin, by_first), 0).astype(np.int64)

    def pick(self, *codes: int) -> Rows:
        """Rows with one of `codes`, in order of time."""
        wanted = np.isin(self.code, codes) if len(codes) > 1 else self.code == codes[0]
        rows: Rows = np.flatnonzero(wanted)
        return rows

    def messages(self, code: int, message: Message) -> Rows:
        """Rows of a get's end that brought `message`."""
        rows = self.pick(code)
        brought: Rows = rows[self.events["x"][rows] == message]
        return brought

    def stage(self, code: int) -> Rows:
        """Rows of one stage of a task's way; of a get, those that brought what the stage is about."""
        wanted = {ev.INDEX_GET[1]: Message.TASK, ev.RESULT_GET[1]: Message.RESULT, ev.READY_GET[1]: Message.RESULT}
        return self.messages(code, wanted[code]) if code in wanted else self.pick(code)

    def match(self, rows: Rows, others: Rows) -> Rows:
        """For each of `rows` the first of `others` with the same key, or -1."""
        if not len(others):
            return np.full(len(rows), -1, dtype=np.intp)
        order = np.argsort(self.key[others], kind="stable")
        keys = self.key[others][order]
        place = np.minimum(np.searchsorted(keys, self.key[rows]), len(keys) - 1)
        found: Rows = np.where(keys[place] == self.key[rows], others[order[place]], -1)
        return found

    def epoch(self, row: int) -> int:
        return int(self.key[row]) >> 40

    def tell(self, row: int) -> str:
        """A row in words: "loader 1, epoch 0, task 12, worker 3, fetch begin"."""
        event = EVENTS[int(self.code[row])]
        parts = [self.name, f"epoch {self.epoch(row)}"]
        parts += [f"task {self.task[row]}"] if self.task[row] >= 0 else []
        parts += [f"worker {self.worker[row]}"] if self.worker[row] >= 0 else []
        phase = "" if event.phase is Phase.INSTANT else f" {event.phase.name.lower()}"
        return ", ".join(parts + [event.name + phase])

    def broken(self, rule: str, message: str, *rows: int) -> Violation:
        """A violation seen at `rows`; the first of them is told in full."""
        subject = self.tell(rows[0]) if rows else self.name
        return Violation(rule, f"{subject}: {message}", tuple(int(self.origin[row]) for row in rows))

    def endings(self) -> dict[int, int]:
        """Epoch -> how it ended (an Ending); an epoch that is still open is not in it."""
        return {self.epoch(row): int(self.events["z"][row]) for row in self.pick(ev.EPOCH[1])}


def _judged(trace: Trace, origin: Rows) -> int:
    """How many of a loader's events can be judged: all, or those up to the moment when its process stopped recording.

    A loader may outlive its `with minidl.trace(...)`. Its workers then go on recording, alone.
    """
    home = np.isin(trace.events["code"][origin], _LOADER_THREAD_CODES)
    shut = np.any(trace.events["code"][origin] == ev.SHUTDOWN[1])
    stopped = {line["process"] for line in trace.described("trace_end")}
    if shut or not home.any() or int(trace.events["process"][origin[home][0]]) not in stopped:
        return len(origin)
    last = np.flatnonzero(trace.events["process"] == trace.events["process"][origin[home][0]])[-1]
    return int(np.searchsorted(origin, last, side="right"))


_LOADER_THREAD_CODES: Final = np.array(
    [
        *(*ev.EPOCH, *ev.SAMPLER_NEXT, ev.TASK_ASSIGNED, ev.INDEX_PUT, *ev.NEXT, ev.YIELD, *ev.CONSUMER),
        *(ev.RCVD_ADVANCE, ev.REORDER_STORE, ev.REORDER_POP, ev.WORKER_EXHAUSTED, ev.RESUME_PUT),
    ]
)


# --- The recording itself ---------------------------------------------------------------------------------------------
RULES["recording"] = "each process numbers its events without gap or repetition, and no thread's clock runs backwards"


def _recording(trace: Trace) -> Iterator[Violation]:
    seq, time = trace.events["seq"].astype(np.int64), trace.events["time"]
    process, tid = trace.events["process"], trace.events["tid"]
    final = np.zeros(len(trace.processes), np.int64)
    np.maximum.at(final, process, seq)
    order = np.lexsort((seq, process))
    same = process[order][1:] == process[order][:-1]
    step = np.diff(seq[order])
    for at in np.flatnonzero(same & (step == 0)):
        rows = (int(order[at]), int(order[at + 1]))
        yield Violation("recording", f"process {process[rows[0]]} has two events number {seq[rows[0]]}", rows)
    for at in np.flatnonzero(same & (step > 1)):
        torn = final[process[order[at]]] - seq[order[at]] <= TORN_SLOTS
        if not torn and not trace.processes[process[order[at]]].lost:
            rows = (int(order[at]), int(order[at + 1]))
            told = f"process {process[rows[0]]} lacks {step[at] - 1} event(s) after number {seq[rows[0]]}"
            yield Violation("recording", told, rows)
    order = np.lexsort((seq, tid, process))
    same = (process[order][1:] == process[order][:-1]) & (tid[order][1:] == tid[order][:-1])
    for at in np.flatnonzero(same & (np.diff(time[order]) < 0)):
        rows = (int(order[at]), int(order[at + 1]))
        yield Violation("recording", f"the clock of thread {tid[rows[0]]} runs backwards", rows)


@_rule("vocabulary", "every event is declared, and a field with an enumeration holds one of its values")
def _vocabulary(loader: _Loader) -> Iterator[Violation]:
    for code in np.unique(loader.code):
        rows = loader.pick(code)
        event = EVENTS.get(int(code))
        if event is None:
            yield Violation("vocabulary", f"{loader.name}: code {code} is not declared", (int(loader.origin[rows[0]]),))
            continue
        for column, spec in zip("xyz", event.fields, strict=False):
            if spec.enum is not None:
                bad = rows[~np.isin(loader.events[column][rows], [int(value) for value in spec.enum])]
                for row in bad:
                    yield loader.broken("vocabulary", f"{spec.name} is {loader.events[column][row]}", row)


# --- A task's way -----------------------------------------------------------------------------------------------------
_WAY: Final = (
    *(ev.TASK_ASSIGNED, ev.INDEX_PUT, ev.INDEX_GET[1], ev.FETCH[0], ev.FETCH[1], ev.RESULT_PUT),
    *(ev.RESULT_PICKLE[0], ev.RESULT_PICKLE[1], ev.RESULT_WRITE[0], ev.RESULT_GET[1]),
    *(ev.PIN[0], ev.PIN[1], ev.READY_PUT, ev.READY_GET[1], ev.YIELD),
)
"""What happens to a task, in order. A stage may be left out only as `_may_skip` says."""


def _way(loader: _Loader) -> tuple[int, ...]:
    """The stages that a task of this loader passes through."""
    if not loader.multiprocess:
        return (ev.FETCH[0], ev.FETCH[1], ev.YIELD)
    pin_only = {*ev.PIN, ev.READY_PUT, ev.READY_GET[1]}
    return tuple(code for code in _WAY if loader.pinned or code not in pin_only)


def _may_skip(code: int) -> bool:
    """Errors are not fetched (a worker's init has failed) and not pinned; the feeder's stages are optional detail."""
    return code in (*ev.FETCH, *ev.PIN, *ev.RESULT_PICKLE, *ev.RESULT_WRITE)


@_rule("once", "a task passes through each stage at most once in an epoch")
def _once(loader: _Loader) -> Iterator[Violation]:
    for code in _way(loader):
        rows = loader.stage(code)
        rows = rows[loader.task[rows] >= 0]
        order = rows[np.argsort(loader.key[rows], kind="stable")]
        for at in np.flatnonzero(np.diff(loader.key[order]) == 0):
            yield loader.broken("once", "happened before", order[at + 1], order[at])


@_rule("sequence", "tasks are assigned in the order 0, 1, 2, …, and send_idx counts them")
def _sequence(loader: _Loader) -> Iterator[Violation]:
    rows = loader.pick(ev.TASK_ASSIGNED)
    if not len(rows):
        return
    epochs = loader.key[rows] >> 40
    starts = np.flatnonzero(np.r_[True, np.diff(epochs) != 0])
    expected = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
    for at in np.flatnonzero(loader.task[rows] != expected):
        yield loader.broken("sequence", f"the next task is {expected[at]}", rows[at])
        return  # all that follow are shifted by the same
    for row in rows[loader.events["x"][rows] != loader.task[rows] + 1]:
        yield loader.broken("sequence", f"send_idx is {loader.events['x'][row]} after task {loader.task[row]}", row)


@_rule("own-worker", "only the worker that a task was assigned to receives it, fetches it and answers it")
def _own_worker(loader: _Loader) -> Iterator[Violation]:
    assigned = loader.pick(ev.TASK_ASSIGNED)
    for code in _way(loader)[1:]:
        rows = loader.stage(code)
        rows = rows[loader.task[rows] >= 0]
        to = loader.match(rows, assigned)
        rows, to = rows[to >= 0], to[to >= 0]
        for at in np.flatnonzero(loader.worker[rows] != loader.worker[to]):
            told = f"the task was assigned to worker {loader.worker[to[at]]}"
            yield loader.broken("own-worker", told, rows[at], to[at])


@_rule("own-process", "a worker's events come from one process, which is no other worker's")
def _own_process(loader: _Loader) -> Iterator[Violation]:
    if not loader.multiprocess:
        return
    rows = loader.pick(ev.WORKER_READY, *ev.INDEX_GET, *ev.FETCH, *ev.COLLATE, ev.RESULT_PUT, ev.WORKER_EXIT)
    rows = rows[loader.worker[rows] >= 0]
    home: dict[int, int] = {}
    for row in loader.pick(ev.WORKER_READY):
        home.setdefault(int(loader.worker[row]), int(loader.events["process"][row]))
    for worker in np.unique(loader.worker[rows]):
        mine = rows[loader.worker[rows] == worker]
        process = home.get(int(worker), int(loader.events["process"][mine[0]]))
        for row in mine[loader.events["process"][mine] != process]:
            yield loader.broken("own-process", f"worker {worker} is process {process}", row)


@_rule("whole-way", "a task that has reached a stage has passed the stages before it", needs_all=True)
def _whole_way(loader: _Loader) -> Iterator[Violation]:
    way = [code for code in _way(loader) if not _may_skip(code)]
    for before, after in itertools.pairwise(way):
        rows = loader.stage(after)
        rows = rows[loader.task[rows] >= 0]
        for row in rows[loader.match(rows, loader.stage(before)) < 0]:
            yield loader.broken("whole-way", f"there is no {_name(before)} of the task before it", row)
    data = loader.pick(ev.RESULT_PUT)
    data = data[loader.events["x"][data] == Outcome.DATA]
    for row in data[loader.match(data, loader.pick(ev.FETCH[1])) < 0]:
        yield loader.broken("whole-way", "data that no fetch has made", row)


@_rule("causality", "on the one clock of all processes, no stage of a task's way comes before the stages before it")
def _causality(loader: _Loader) -> Iterator[Violation]:
    stages = [loader.stage(code) for code in _way(loader)]
    for place, rows in enumerate(stages[1:], start=1):
        rows = rows[loader.task[rows] >= 0]
        for earlier in stages[:place]:
            before = loader.match(rows, earlier)
            late = (before >= 0) & (loader.time[before] > loader.time[rows])
            for at in np.flatnonzero(late):
                by = (loader.time[before[at]] - loader.time[rows[at]]) / 1000
                told = f"{_name(int(loader.code[before[at]]))} comes {by:.1f} µs later"
                yield loader.broken("causality", told, rows[at], before[at])


def _name(code: int) -> str:
    event = EVENTS[code]
    return event.name if event.phase is Phase.INSTANT else f"{event.name} {event.phase.name.lower()}"


# --- What is yielded --------------------------------------------------------------------------------------------------
@_rule(
    "accounted-for", "a task of an epoch that ran to its end is yielded, or its worker ended or died", needs_all=True
)
def _accounted_for(loader: _Loader) -> Iterator[Violation]:
    endings = loader.endings()
    assigned = loader.pick(ev.TASK_ASSIGNED)
    missing = assigned[loader.match(assigned, loader.pick(ev.YIELD)) < 0]
    excused = {(loader.epoch(row), int(loader.worker[row])) for row in loader.pick(ev.WORKER_EXHAUSTED)}
    dead = set(loader.worker[loader.pick(ev.FOUND_DEAD)].tolist())
    withheld = _withheld(loader)
    read = loader.match(missing, loader.stage(loader.received)) >= 0
    for row, was_read in zip(missing, read, strict=True):
        epoch, worker = loader.epoch(row), int(loader.worker[row])
        if endings.get(epoch) != Ending.EXHAUSTED or (epoch, worker) in excused or worker in dead:
            continue
        if was_read and withheld.get(epoch, 0):
            withheld[epoch] -= 1
            continue
        yield loader.broken("accounted-for", "never yielded, though the epoch ran to its end", row)


def _withheld(loader: _Loader) -> dict[int, int]:
    """Epoch -> times that next raised without yielding: the sampler failed while the next task was to be sent.

    The batch that was due is lost then, in torch as here.
    """
    rows = loader.pick(ev.NEXT[1], ev.YIELD)
    raised = (loader.code[rows] == ev.NEXT[1]) & (loader.events["y"][rows] == Outcome.ERROR)
    after_yield = np.r_[False, loader.code[rows][:-1] == ev.YIELD]
    out: dict[int, int] = {}
    for row in rows[raised & ~after_yield]:
        out[loader.epoch(row)] = out.get(loader.epoch(row), 0) + 1
    return out


@_rule("in-order", "with in_order, batches are yielded in the order of their tasks")
def _in_order(loader: _Loader) -> Iterator[Violation]:
    rows = loader.pick(ev.YIELD)
    if loader.params.get("in_order", True) is False or len(rows) < 2:
        return
    keys = loader.key[rows]
    for at in np.flatnonzero(np.diff(keys) < 0):
        yield loader.broken("in-order", f"yielded after task {loader.task[rows[at]]}", rows[at + 1], rows[at])


@_rule("counts", "the batches counted by yield, next and epoch are the batches yielded", needs_all=True)
def _counts(loader: _Loader) -> Iterator[Violation]:
    batches = loader.pick(ev.YIELD)
    batches = batches[loader.events["x"][batches] == Outcome.DATA]
    starts = np.r_[0, loader.pick(ev.EPOCH[0])]
    for code, column in ((ev.YIELD, "y"), (ev.NEXT[1], "x"), (ev.EPOCH[1], "y")):
        rows = loader.pick(code)
        begun = starts[np.searchsorted(starts, rows, side="right") - 1]
        seen = np.searchsorted(batches, rows, side="right") - np.searchsorted(batches, begun)
        for at in np.flatnonzero(loader.events[column][rows] != seen):
            said = loader.events[column][rows[at]]
            yield loader.broken("counts", f"it counts {said} batches of this epoch, there are {seen[at]}", rows[at])


@_rule("capacity", "no more tasks are outstanding than prefetch_factor * num_workers")
def _capacity(loader: _Loader) -> Iterator[Violation]:
    capacity = _capacity_of(loader)
    if capacity is None:
        return
    most = capacity[0] * capacity[1]
    rows = loader.pick(ev.TASK_ASSIGNED)
    for row in rows[loader.events["y"][rows] > most]:
        yield loader.broken("capacity", f"{loader.events['y'][row]} tasks outstanding, the capacity is {most}", row)


def _capacity_of(loader: _Loader) -> tuple[int, int] | None:
    """num_workers and prefetch_factor, as an epoch's begin says; None where there are no workers."""
    begins = loader.events[loader.pick(ev.EPOCH[0])]
    if not len(begins) or begins["y"][0] <= 0 or begins["z"][0] <= 0:
        return None
    return int(begins["y"][0]), int(begins["z"][0])


# --- Replays: the live loader's own classes ---------------------------------------------------------------------------
@_rule("decisions", "the dispatcher, replayed, decides what the trace says it decided", needs_all=True)
def _decisions(loader: _Loader) -> Iterator[Violation]:
    capacity = _capacity_of(loader)
    if not loader.multiprocess or capacity is None:
        return
    in_order = loader.params.get("in_order", True) is not False
    replay = DispatcherReplay(*capacity, in_order, loader.received)
    lost = False
    for row in loader.pick(*DispatcherReplay.READS):
        if loader.code[row] == ev.EPOCH[0]:
            lost = False
        if not lost:
            try:
                replay.step(loader.events[row])
            except DispatchError as error:
                yield loader.broken("decisions", str(error), int(row))
                lost = True


@_rule("lifecycle", "loader, workers and pin thread do what the protocol's tables allow in their state", needs_all=True)
def _lifecycles(loader: _Loader) -> Iterator[Violation]:
    yield from _followed(loader, LoaderReplay(), loader.pick(*LoaderReplay.READS))
    if loader.pinned:
        yield from _followed(loader, PinReplay(), loader.pick(*PinReplay.READS))
    if not loader.multiprocess:
        return
    done = loader.pick(ev.DONE_EVENT_SET)
    done = done[loader.events["x"][done] == DoneEvent.WORKERS]
    set_at = int(loader.time[done[0]]) if len(done) else None
    rows = loader.pick(*WorkerReplay.READS)
    for worker in np.unique(loader.worker[rows]):
        if worker >= 0:
            replay = WorkerReplay(int(worker), set_at)
            yield from _followed(loader, replay, rows[loader.worker[rows] == worker])


def _followed(loader: _Loader, replay: LoaderReplay | WorkerReplay | PinReplay, rows: Rows) -> Iterator[Violation]:
    """Take the rows through a replay, up to its first error."""
    for row in rows:
        try:
            replay.step(loader.events[row])
        except ProtocolError as error:
            yield loader.broken("lifecycle", str(error), int(row))
            return


# --- The end ----------------------------------------------------------------------------------------------------------
@_rule(
    "messages", "a sentinel or a new epoch's message is received once for each time that it was sent", needs_all=True
)
def _messages(loader: _Loader) -> Iterator[Violation]:
    queue = loader.events["x"]
    told, heard = loader.pick(ev.SENTINEL_PUT), loader.pick(ev.SENTINEL_GET)
    resumed = (
        loader.pick(ev.RESUME_PUT),
        loader.pick(ev.RESUME_ACK),
        loader.messages(ev.RESULT_GET[1], Message.RESUME),
    )
    for worker in np.unique(loader.worker[np.concatenate([told, heard, *resumed])]):
        for which in QueueId:
            both = (rows[(loader.worker[rows] == worker) & (queue[rows] == which)] for rows in (told, heard))
            yield from _answered(loader, *both)
        steps = [rows[loader.worker[rows] == worker] for rows in resumed]
        for before, after in itertools.pairwise(steps):
            yield from _answered(loader, before, after)


def _answered(loader: _Loader, before: Rows, after: Rows) -> Iterator[Violation]:
    """The n-th of `after` answers the n-th of `before`, and comes later."""
    for row in after[len(before) :]:
        yield loader.broken("messages", f"it is number {len(after)}, and {len(before)} were sent", row)
    for sent, got in zip(before, after, strict=False):
        if sent > got:
            yield loader.broken("messages", "it was sent later", got, sent)


@_rule("sentinel", "a worker that was told to leave is sent no more tasks, and fetches none")
def _sentinel(loader: _Loader) -> Iterator[Violation]:
    told = loader.pick(ev.SENTINEL_PUT)
    told = told[loader.events["x"][told] == QueueId.INDEX]
    pairs = ((told, loader.pick(ev.INDEX_PUT)), (loader.pick(ev.SENTINEL_GET), loader.pick(ev.FETCH[0], ev.RESULT_PUT)))
    for signals, tasks in pairs:
        for signal in signals:
            for row in tasks[(tasks > signal) & (loader.worker[tasks] == loader.worker[signal])]:
                yield loader.broken("sentinel", f"after its {_name(int(loader.code[signal]))}", row, signal)


@_rule("pin-first", "the pin thread is stopped before the workers are told to leave")
def _pin_first(loader: _Loader) -> Iterator[Violation]:
    done = loader.pick(ev.DONE_EVENT_SET)
    which = loader.events["x"][done]
    workers = done[which == DoneEvent.WORKERS]
    if not loader.pinned or not len(workers):
        return
    if not np.any(done[which == DoneEvent.PIN_THREAD] < workers[0]):
        yield loader.broken("pin-first", "the pin thread's done event was not set before", workers[0])
    for row in loader.pick(ev.PIN_EXIT):
        if row > workers[0]:
            yield loader.broken("pin-first", "the pin thread still runs; it ends later", workers[0], row)


@_rule("workers-end", "after a shutdown, each worker has left its loop or is known to be gone", needs_all=True)
def _workers_end(loader: _Loader) -> Iterator[Violation]:
    if not len(loader.pick(ev.SHUTDOWN[1])):
        return
    ended = set(loader.worker[loader.pick(ev.WORKER_EXIT, ev.WORKER_GONE)].tolist())
    for row in loader.pick(ev.WORKER_READY):
        if int(loader.worker[row]) not in ended:
            yield loader.broken("workers-end", "neither worker_exit nor worker_gone follows", row)


@_rule("spans", "begins and ends alternate, and no end is missing whose thread went on", needs_all=True)
def _spans(loader: _Loader) -> Iterator[Violation]:
    for begin, rows in _span_rows(loader):
        begins = loader.code[rows] == begin
        following = np.r_[begins[1:], True]
        lane = _lane(loader, rows)
        same = np.r_[lane[1:] == lane[:-1], False]
        for at in np.flatnonzero(begins & following & same):
            yield loader.broken("spans", "it has no end, and the next one begins", rows[at], rows[at + 1])
        orphan = ~begins & ~(np.r_[False, begins[:-1]] & np.r_[False, same[:-1]])
        for at in np.flatnonzero(orphan):
            yield loader.broken("spans", "an end without its begin", rows[at])
        for at in np.flatnonzero(begins & ~same):
            if (after := _went_on(loader, int(rows[at]))) is not None:
                yield loader.broken("spans", "it has no end, though its thread went on", rows[at], after)


def _span_rows(loader: _Loader) -> Iterator[tuple[int, Rows]]:
    """For each kind of span: its begin's code and its rows, lane by lane in order of time."""
    for code in np.unique(loader.code[np.isin(loader.code, _BEGINS) | np.isin(loader.code - 1, _BEGINS)]):
        begin = int(code) if code in _BEGINS else int(code) - 1
        if code != begin and np.any(loader.code == begin):
            continue  # done with its begin
        rows = loader.pick(begin, begin + 1)
        yield begin, rows[np.argsort(_lane(loader, rows), kind="stable")]


_BEGINS: Final = np.array([event.code for event in EVENTS.values() if event.phase is Phase.BEGIN])
_ANY_THREAD: Final = np.array([*ev.EPOCH, *ev.NEXT, *ev.CONSUMER, *ev.SHUTDOWN, *ev.JOIN])
"""A thread may begin an epoch that another one iterates over and a third, running the collector, shuts down."""


def _lane(loader: _Loader, rows: Rows) -> npt.NDArray[np.int64]:
    """A number for each thread; spans of one kind never overlap on one thread."""
    tid = np.where(np.isin(loader.code[rows], _ANY_THREAD), 0, loader.events["tid"][rows]).astype(np.int64)
    return (loader.events["process"][rows].astype(np.int64) << 32) | tid


def _went_on(loader: _Loader, row: int) -> int | None:
    """The row of an event that can only have come after the span at `row` had ended, if there is one."""
    code, same = int(loader.code[row]), loader.events["process"] == loader.events["process"][row]
    if code in _FOLLOWING:
        after = loader.pick(_FOLLOWING[code])
        after = after[(after > row) & (loader.key[after] == loader.key[row]) & same[after]]
        if len(after):
            return int(after[0])
    lane = np.flatnonzero(same & (loader.events["tid"] == loader.events["tid"][row]))
    lane = lane[lane > row]
    if code in _LEAVES:
        return int(lane[0]) if len(lane) else None
    return _end_of_a_span_around(loader, lane)


def _end_of_a_span_around(loader: _Loader, lane: Rows) -> int | None:
    """The first end in the rest of a thread's events that closes what was begun before them."""
    inner: list[int] = []
    for row in lane[np.isin(loader.code[lane], _BEGINS) | np.isin(loader.code[lane] - 1, _BEGINS)]:
        code = int(loader.code[row])
        if EVENTS[code].phase is Phase.BEGIN:
            inner.append(code)
        elif code - 1 not in inner:
            return int(row)
        else:
            del inner[inner.index(code - 1) :]
    return None


_LEAVES: Final = {span[0] for span in (ev.INDEX_GET, ev.INDEX_WRITE, ev.RESULT_WRITE, ev.RESULT_REBUILD)}
"""Spans during which their thread records nothing else of this loader."""

_FOLLOWING: Final = {
    ev.FETCH[0]: ev.RESULT_PUT,
    ev.RESULT_PICKLE[0]: ev.RESULT_WRITE[0],
    ev.WORKER_START[0]: ev.EPOCH[0],
    ev.EPOCH[0]: ev.SHUTDOWN[1],
}
"""What happens, for the same task or epoch, only once the span has ended; spans inside one another are known anyway."""
