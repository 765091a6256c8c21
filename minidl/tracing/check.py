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

from minidl.dispatcher import EPOCH_END, Deliver, Dispatcher, DispatchError, Wait
from minidl.protocol import ProtocolError, WorkerEvent, WorkerLifecycle, WorkerState
from minidl.tracing import events as ev
from minidl.tracing.events import EVENTS, DoneEvent, Ending, Message, Outcome, Phase, QueueId
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
            verdict = f"nothing found by {len(RULES)} rules" if self.loaders else "no loader in this trace"
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
        whole = lossy.isdisjoint(loader.processes)
        if not whole:
            report.unjudged.append(f"loader {number}: events were lost, so nothing is concluded from a missing one")
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
        self.origin: Rows = np.flatnonzero(trace.events["loader"] == number)
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
        return np.flatnonzero(np.isin(self.code, codes)) if len(codes) > 1 else np.flatnonzero(self.code == codes[0])

    def messages(self, code: int, message: Message) -> Rows:
        """Rows of a get's end that brought `message`."""
        rows = self.pick(code)
        return rows[self.events["x"][rows] == message]

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
        return np.where(keys[place] == self.key[rows], others[order[place]], -1)

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

    def last_row_of_thread(self, row: int) -> int:
        """The last row that this row's thread wrote, for whichever loader iterator of ours."""
        same = (self.events["process"] == self.events["process"][row]) & (self.events["tid"] == self.events["tid"][row])
        return int(np.flatnonzero(same)[-1])


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
    for row in missing:
        ended_well = endings.get(loader.epoch(row)) == Ending.EXHAUSTED
        worker = int(loader.worker[row])
        if ended_well and (loader.epoch(row), worker) not in excused and worker not in dead:
            yield loader.broken("accounted-for", "never yielded, though the epoch ran to its end", row)


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
    rows = loader.pick(ev.YIELD)
    epochs = loader.key[rows] >> 40
    for row in loader.pick(ev.EPOCH[1]):
        said, seen = int(loader.events["y"][row]), int(np.count_nonzero(epochs == loader.epoch(row)))
        if said != seen:
            yield loader.broken("counts", f"it says {said} batches were yielded, there are {seen}", row)


@_rule("capacity", "no more tasks are outstanding than prefetch_factor * num_workers, and their count is kept right")
def _capacity(loader: _Loader) -> Iterator[Violation]:
    most = _capacity_of(loader)
    rows = loader.pick(ev.TASK_ASSIGNED)
    if most is None:
        return
    for row in rows[loader.events["y"][rows] > most]:
        yield loader.broken("capacity", f"{loader.events['y'][row]} tasks outstanding, the capacity is {most}", row)


def _capacity_of(loader: _Loader) -> int | None:
    workers, factor = loader.params.get("num_workers"), loader.params.get("prefetch_factor")
    begins = loader.pick(ev.EPOCH[0])
    if not workers and len(begins):
        workers, factor = int(loader.events["y"][begins[0]]), int(loader.events["z"][begins[0]])
    return int(workers) * int(factor) if workers and factor and int(workers) > 0 else None


# --- Replays: the live loader's own classes ---------------------------------------------------------------------------
@_rule("decisions", "the dispatcher, replayed, assigns the same tasks and yields the same batches", needs_all=True)
def _decisions(loader: _Loader) -> Iterator[Violation]:
    if not loader.multiprocess or _capacity_of(loader) is None:
        return
    rows = loader.pick(
        *(ev.TASK_ASSIGNED, loader.received, ev.WORKER_EXHAUSTED, ev.YIELD, ev.FOUND_DEAD, ev.EPOCH[0], ev.EPOCH[1])
    )
    replay = _DispatcherReplay(loader)
    for row in rows:
        try:
            replay.step(int(row))
        except DispatchError as error:
            yield loader.broken("decisions", str(error), int(row))
            replay.lost_track = True  # the state has parted from the loader's until the next epoch begins


class _DispatcherReplay:
    """Drives a Dispatcher with a loader's events; raises DispatchError where the two part."""

    def __init__(self, loader: _Loader) -> None:
        self.events = loader.events
        begin = loader.events[loader.pick(ev.EPOCH[0])[:1]]
        self.received = loader.received
        workers = int(loader.params.get("num_workers") or begin["y"][0])
        factor = int(loader.params.get("prefetch_factor") or begin["z"][0])
        self.dispatcher = Dispatcher(workers, factor, loader.params.get("in_order", True) is not False)
        self.due: int | None = None  # the task that was received in its turn and is to be yielded next
        self.lost_track = False

    def step(self, row: int) -> None:
        event = self.events[row]
        code, task, worker = int(event["code"]), int(event["task"]), int(event["worker"])
        if code == ev.EPOCH[0]:
            self.dispatcher.reset()
            self.due, self.lost_track = None, False
        elif self.lost_track:
            return
        elif code == ev.TASK_ASSIGNED:
            self._assigned(task, worker, int(event["y"]))
        elif code == ev.WORKER_EXHAUSTED:
            self.dispatcher.exhausted(task, worker)
        elif code == ev.FOUND_DEAD:
            self.lost_track = True  # what follows is an error, not a decision
        elif code == ev.YIELD:
            self._yielded(task)
        elif code == ev.EPOCH[1]:
            self._ended(int(event["z"]))
        elif event["x"] == Message.RESULT and event["y"] != Outcome.EXHAUSTED:
            self._received(task)

    def _assigned(self, task: int, worker: int, outstanding: int) -> None:
        decided = self.dispatcher.assign(None)
        if decided is None or (decided.idx, decided.worker_id) != (task, worker):
            raise DispatchError(f"the dispatcher decides {decided}, the trace has task {task} for worker {worker}")
        if outstanding != self.dispatcher.tasks_outstanding:
            counted = self.dispatcher.tasks_outstanding
            raise DispatchError(f"{counted} tasks are outstanding, the trace has {outstanding}")

    def _received(self, task: int) -> None:
        if self.dispatcher.send_idx == 0:
            return  # a leftover of the last epoch, read and dropped before the new one begins
        if not isinstance(step := self.dispatcher.next_step(), Wait):
            raise DispatchError(f"a result is received while the dispatcher decides {step}")
        answer = self.dispatcher.receive(task, None)
        self.due = answer.idx if isinstance(answer, Deliver) else None

    def _yielded(self, task: int) -> None:
        due, self.due = self.due, None
        if due is None:
            step = self.dispatcher.next_step()
            due = step.idx if isinstance(step, Deliver) else None
        if due != task:
            raise DispatchError(f"the dispatcher yields {'nothing' if due is None else f'task {due}'} now")

    def _ended(self, ending: int) -> None:
        if ending == Ending.EXHAUSTED and self.dispatcher.next_step() is not EPOCH_END:
            raise DispatchError("the epoch ends, the dispatcher still has something to yield or to wait for")


@_rule("lifecycle", "each worker does what the protocol's table allows in its state", needs_all=True)
def _lifecycles(loader: _Loader) -> Iterator[Violation]:
    done = loader.pick(ev.DONE_EVENT_SET)
    done = done[loader.events["x"][done] == DoneEvent.WORKERS]
    set_at = int(loader.time[done[0]]) if len(done) else None
    rows = loader.pick(
        *(ev.WORKER_READY, ev.INDEX_GET[1], ev.DONE_EVENT_SEEN, ev.FETCH[0], ev.FETCH[1], ev.RESULT_PUT),
        *(ev.RESUME_ACK, ev.SENTINEL_GET, ev.WORKER_EXIT),
    )
    rows = rows[loader.worker[rows] >= 0]
    for worker in np.unique(loader.worker[rows]):
        replay = _WorkerReplay(int(worker), loader, set_at)
        for row in rows[loader.worker[rows] == worker]:
            try:
                replay.step(int(row))
            except ProtocolError as error:
                yield loader.broken("lifecycle", str(error), int(row))
                break


class _WorkerReplay:
    """Drives a WorkerLifecycle with a worker's events; raises ProtocolError where they part."""

    def __init__(self, worker: int, loader: _Loader, done_set_at: int | None) -> None:
        self.life = WorkerLifecycle(worker)
        self.events = loader.events
        self.done_set_at = done_set_at
        self.pending: int | None = None  # the task that came, and of which the next event says whether it is skipped

    def step(self, row: int) -> None:
        event = self.events[row]
        code = int(event["code"])
        if self.pending is not None:
            self._resolve(code, int(event["task"]))
        if code == ev.WORKER_READY:
            self.life.handle(WorkerEvent.READY)
        elif code == ev.INDEX_GET[1] and event["x"] == Message.TASK:
            self.pending = int(event["task"])
        elif code == ev.FETCH[1]:
            ended = event["x"] == Outcome.EXHAUSTED
            self.life.handle(WorkerEvent.ITERATION_END if ended else WorkerEvent.FETCHED)
        elif code == ev.RESUME_ACK:
            self.life.handle(WorkerEvent.RESUME)
        elif code == ev.SENTINEL_GET:
            self._sentinel(int(event["time"]))
        elif code == ev.WORKER_EXIT:
            self._exit(int(event["x"]))

    def _resolve(self, code: int, task: int) -> None:
        """Was the task that came fetched or skipped?"""
        pending, self.pending = self.pending, None
        if code == ev.DONE_EVENT_SEEN and task == pending:
            self.life.handle(WorkerEvent.TASK_WHEN_DONE)
        else:
            self.life.handle(WorkerEvent.TASK)
            if code == ev.RESULT_PUT and task == pending:  # answered without a fetch: the worker's init has failed
                self.life.handle(WorkerEvent.FETCHED)

    def _sentinel(self, time: int) -> None:
        if not self.life.allows(WorkerEvent.SENTINEL):
            if self.done_set_at is None or self.done_set_at > time:
                raise ProtocolError(f"{self.life.actor}: a sentinel before the done event, its dataset not ended")
            self.life.handle(WorkerEvent.SENTINEL_WHEN_DONE)
        else:
            self.life.handle(WorkerEvent.SENTINEL)

    def _exit(self, ending: int) -> None:
        if ending == Ending.SENTINEL and self.life.state is not WorkerState.ENDED:
            raise ProtocolError(f"{self.life.actor}: it leaves for a sentinel that it has not received")


# --- The end ----------------------------------------------------------------------------------------------------------
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
                yield loader.broken("spans", "it has no end, though the span around it has", rows[at], after)


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
    """The row of an end that can only have come after the span at `row` had ended, if there is one."""
    around = _AROUND.get(int(loader.code[row]))
    if around is None:
        return None
    ends = loader.pick(around)
    ends = ends[(ends > row) & (loader.key[ends] == loader.key[row])]
    ends = ends[loader.events["process"][ends] == loader.events["process"][row]]
    return int(ends[0]) if len(ends) else None


_AROUND: Final = {ev.SAMPLE[0]: ev.FETCH[1], ev.COLLATE[0]: ev.FETCH[1], ev.FETCH[0]: ev.RESULT_PUT}
