"""The same program on torch's DataLoader, observed, and on ours, traced: the same events per actor, the same messages.

`python tests/record/test_observe_differential.py` prints the table: programs, events compared, differences. A program
runs once on each side; its trace is brought into a normal form (`Run`), which leaves out what chance decides (see
`Run._chance`), and both are compared actor by actor. A difference is either a row of DIFFERENCES or a failure, and a
row that nothing needs is a failure as well.
"""

from __future__ import annotations

import collections
import difflib
import functools
import itertools
import multiprocessing
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.utils.data
import workloads as wl
from sizes import slow
from torch.utils.data import DistributedSampler

import minidl
from minidl.check import check
from minidl.loader import driver
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS, Ending, Message, Phase, Track
from minidl.tracefile.reader import Trace, read_trace

pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

OURS, TORCH = "ours", "torch"


# --- What differs on purpose ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Difference:
    """One row of the table. what: "event" or "event.field"; side: who alone has the event, "" for a field."""

    what: str
    side: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.side} only)' * bool(self.side)}"


DIFFERENCES: Final = (
    Difference("pin_start", OURS, EVENTS[ev.PIN_START].unseen),
    Difference("pin_exit", OURS, EVENTS[ev.PIN_EXIT].unseen),
    Difference("share", OURS, "told whenever the sampler is iterated; of torch's loader, at an epoch's first put"),
    Difference("join.timeout", "", "ours joins all workers against one deadline, torch each for five seconds"),
    Difference("index_write.bytes", "", "the message's class and the observer's note travel with it"),
    Difference("result_write.bytes", "", "as index_write.bytes"),
    Difference("result_pickle.bytes", "", "as index_write.bytes"),
    Difference("result_read.bytes", "", "as index_write.bytes"),
    Difference("result_rebuild.bytes", "", "also, torch's span covers the whole message, ours its data"),
)


# --- Normal form ------------------------------------------------------------------------------------------------------
Step = tuple[Any, ...]
"""An event: its name, phase, task, worker and those of its fields that can be compared."""

_ARRIVAL = {
    *(ev.REORDER_STORE, ev.REORDER_POP, *ev.RESULT_GET, ev.RESULT_READ, *ev.RESULT_REBUILD, ev.WORKER_EXHAUSTED),
    *(*ev.PIN, ev.READY_PUT, *ev.READY_GET),
}
"""What the loader does depends, here, on which worker is faster."""


@dataclass
class Run:
    """One program's trace in its normal form. actors: name -> its steps in order; edges: messages sent and received.

    ordered: results can come in one order only, since there is one worker. free: what depends on who is faster, and is
    left out of the steps: "workers" (who is given a task; each task is an actor then, whoever works on it), "tasks"
    (which task brings a worker's next batch), or "" (nothing but the order in which results come).
    """

    trace: Trace
    ordered: bool
    free: str
    actors: dict[str, list[Step]] = field(default_factory=lambda: collections.defaultdict(list))
    edges: collections.Counter[Step] = field(default_factory=collections.Counter)
    events: int = 0

    def __post_init__(self) -> None:
        self.unfinished: dict[int, int] = {}  # loader -> its last epoch, where that was not run to its end
        for row in self.trace.select("epoch", Phase.END):
            self.unfinished.pop(int(row["loader"]), None)
            if row["z"] != Ending.EXHAUSTED:
                self.unfinished[int(row["loader"])] = int(row["x"])
        self.pins = set(self.trace.select("pin")["tid"].tolist())
        self.lost = {(int(row["loader"]), int(row["worker"])) for row in self.trace.select("found_dead")}
        self.yielded: set[tuple[int, int, int]] = set()  # loader, epoch, task
        epochs: collections.Counter[int] = collections.Counter()
        for row in self.trace.events:
            number = int(row["loader"])
            epochs[number] += row["code"] == ev.EPOCH[0]
            if row["code"] == ev.YIELD:
                self.yielded.add((number, epochs[number] - 1, int(row["task"])))
        self._walk()

    def _walk(self) -> None:
        """Bring every event to its actor."""
        epochs: collections.Counter[str] = collections.Counter()
        waiting: dict[str, Step] = {}
        for row in self.trace.events:
            code, actor = int(row["code"]), self._actor(row)
            if self._begins_epoch(actor, row):
                epochs[actor] += 1
            if self._chance(actor, row, epochs[actor]):
                continue
            self.events += 1
            step = self._step(row)
            if code in (ev.INDEX_GET[0], ev.RESULT_GET[0], ev.READY_GET[0]):
                waiting[actor] = step  # told with its end, or not at all
                continue
            if code in (ev.INDEX_GET[1], ev.RESULT_GET[1], ev.READY_GET[1]):
                if row["x"] == Message.EMPTY:
                    waiting.pop(actor, None)
                    self.events -= 2
                    continue
                began = waiting.pop(actor, None)
                if not self.free and began is not None:
                    self.actors[actor].append(began)
            self.actors[self._whoever(actor, row, epochs[actor])].append(step)
            self._edge(row, epochs[actor])

    def _actor(self, row: Any) -> str:
        process, event, number = self.trace.processes[int(row["process"])], EVENTS[int(row["code"])], int(row["loader"])
        if event.code in ev.INDEX_WRITE:
            return f"index feeder {row['worker']} of loader {number}"
        if event.track is Track.FEEDER:
            return f"result feeder {process.worker} of loader {number}"
        if int(row["tid"]) in self.pins:
            return f"pin thread of loader {number}"
        return f"worker {process.worker} of loader {number}" if process.role == "worker" else f"loader {number}"

    def _whoever(self, actor: str, row: Any, epoch: int) -> str:
        """Where chance says who works on a task, the task stands for them."""
        if self.free == "workers" and row["task"] >= 0 and not actor.startswith("loader"):
            return f"whose task is {row['task']} in epoch {epoch}, as {actor.partition(' ')[0]}"
        return actor

    @staticmethod
    def _begins_epoch(actor: str, row: Any) -> bool:
        """Whether the actor's events belong to the next epoch from here on. Sentinels come last, and do no harm."""
        code = int(row["code"])
        if "feeder" in actor:
            return code in (ev.INDEX_WRITE[0], ev.RESULT_WRITE[0]) and row["task"] < 0
        return code == ev.RESUME_ACK or (code == ev.EPOCH[0] and row["x"] > 0)

    def _chance(self, actor: str, row: Any, epoch: int) -> bool:
        """Whether chance decides if, or where, the event comes."""
        code, task = int(row["code"]), int(row["task"])
        if code in (ev.INDEX_WRITE[1], ev.RESULT_WRITE[1]):
            return True  # the writer may be gone before it has told that it has written
        if code == ev.INDEX_WRITE[0] and task < 0 and (int(row["loader"]), int(row["worker"])) in self.lost:
            return True  # nobody waits until a dead worker's sentinel is written: the recording may end before
        if code in ev.GC:
            return True
        if code == ev.LIVENESS_CHECK:
            return True  # where nothing came for seconds
        if code == ev.DONE_EVENT_SEEN:
            return True  # of tasks that nobody waits for: a worker may see it, or only its own data's end, or neither
        if not self.ordered and code in _ARRIVAL:
            return True
        number = int(row["loader"])
        closed = number in self.unfinished
        if code in (ev.CANCEL_JOIN_THREAD, ev.QUEUE_CLOSE) and actor.startswith("worker") and not closed:
            return True  # a worker that leaves as its data end may see the done event, or be faster
        if self.free and code in (ev.RCVD_ADVANCE, *ev.SAMPLER_NEXT):
            return True
        if self.free == "tasks" and (code in _OF_TASKS or (code == ev.INDEX_GET[1] and row["x"] == Message.TASK)):
            return True
        if not closed or epoch != self.unfinished[number] or task < 0 or (number, epoch, task) in self.yielded:
            return False
        return not (actor.startswith("loader") and code in (ev.TASK_ASSIGNED, ev.INDEX_PUT))

    def _step(self, row: Any) -> Step:
        event = EVENTS[int(row["code"])]
        values = [
            f"{spec.name}={int(row[column])}"
            for column, spec in zip("xyz", event.fields, strict=False)
            if self._compared(event, spec)
        ]
        task, worker = int(row["task"]), int(row["worker"])
        if self.free == "tasks" or (self.free == "workers" and event.code in _TASK_BY_CHANCE):
            task = -1
        if self.free and (self.free == "workers" or event.code == ev.YIELD) and event.code not in _OWN_WORKER:
            worker = -1
        return event.name, event.phase.value, task, worker, *values

    def _compared(self, event: ev.Event, spec: ev.Field) -> bool:
        if spec.is_cpu or spec.name in ("pid", "parent_pid", "waited", "text"):
            return False  # text: an identifier; errors are compared by what the program sees
        if spec.name in ("outstanding", "depth") and not self.ordered:
            return False
        if f"{event.name}.{spec.name}" in _UNCOMPARED:
            return False
        return not self.free or spec.name not in ("send_idx", "rcvd_idx")

    def _edge(self, row: Any, epoch: int) -> None:
        """Count the two ends of each message."""
        kind = _EDGES.get(int(row["code"]))
        if kind is not None:
            self.edges[(*kind, *self._step(row)[2:4], epoch)] += 1


_UNCOMPARED = {row.what for row in DIFFERENCES if "." in row.what}
_EDGES: Final = {
    ev.INDEX_PUT: ("task", "sent"),
    ev.RESULT_PUT: ("result", "sent"),
    ev.SENTINEL_PUT: ("sentinel", "sent"),
    ev.SENTINEL_GET: ("sentinel", "received"),
    ev.RESUME_PUT: ("new epoch", "sent"),
    ev.RESUME_ACK: ("new epoch", "received"),
    ev.WORKER_START[1]: ("worker", "started"),
    ev.WORKER_READY: ("worker", "ready"),
    ev.WORKER_GONE: ("worker", "gone"),
}
_OF_TASKS: Final = {ev.TASK_ASSIGNED, ev.INDEX_PUT, *ev.INDEX_WRITE, ev.INDEX_GET[0], ev.SENTINEL_PUT}
"""Of a stream whose end one worker meets sooner than the other: how many tasks are sent meanwhile is chance."""

_TASK_BY_CHANCE: Final = {*ev.NEXT, ev.YIELD, *ev.CONSUMER}
"""Where order is free: which batch is the next to come."""

_OWN_WORKER: Final = {
    *(*ev.WORKER_START, ev.WORKER_READY, ev.WORKER_EXIT, ev.WORKER_GONE, ev.RESUME_PUT, ev.RESUME_ACK, *ev.JOIN),
    *(ev.SENTINEL_PUT, ev.SENTINEL_GET, ev.CANCEL_JOIN_THREAD, ev.QUEUE_CLOSE),
}
"""Of one worker, whoever is faster."""


# --- Programs ---------------------------------------------------------------------------------------------------------
Program = Callable[[Any, Any], Any]
"""Given the library and what stands for its context, run; what it returns must be equal."""


@dataclass(frozen=True)
class Case:
    """A program and what is known of it. method: how its workers start."""

    name: str
    program: Program
    method: str = "fork"
    ordered: bool = False
    free: str = ""


def epochs(lib: Any, context: Any, dataset: Any, count: int = 1, **options: Any) -> Any:
    loader = lib.DataLoader(dataset, multiprocessing_context=context, **options)
    seen = [steps(loader) for _ in range(count)]
    end(loader)
    return seen


def end(loader: Any) -> None:
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()
    loader._iterator = None


def steps(iterable: Iterable[Any], limit: int = 50) -> list[Any]:
    """Batches as nested lists, and errors in their places."""
    iterator, seen = iter(iterable), []
    for _ in range(limit):
        try:
            seen.append(plain(next(iterator)))
        except StopIteration:
            break
        except Exception as error:
            seen.append((type(error).__name__, _CALLED.sub("", str(error).partition("\n")[0])))
            if "exited unexpectedly" in str(error) or "timed out" in str(error):
                break
    del iterator
    return seen


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return [plain(item) for item in batch] if isinstance(batch, (list, tuple)) else batch


_CALLED: Final = re.compile(r" \((pid\(s\) [\d, ]*|worker .*)\)|: waited .*")
"""Pids, and what ours says more."""

KINDS: Final[dict[str, Callable[[], Any]]] = {
    "map": lambda: wl.Tensors(13),
    "iterable": lambda: wl.Stream(12),
    "uneven": lambda: wl.Stream(7),
}

GRID: Final = (
    # workers, their start method, data, persistent, in order, batches ahead
    (1, "fork", "map", False, True, 1),
    (2, "fork", "map", False, True, 1),
    (3, "fork", "map", False, True, 2),
    (2, "fork", "map", False, True, 4),
    (2, "fork", "iterable", True, False, 2),
    (3, "fork", "iterable", False, True, 1),
    (3, "fork", "uneven", False, False, 4),
    (1, "forkserver", "iterable", True, True, 4),
    (2, "forkserver", "uneven", False, True, 2),
    (3, "forkserver", "map", True, False, 1),
    (1, "spawn", "uneven", True, False, 1),
    (1, "spawn", "map", False, True, 2),
    (1, "spawn", "iterable", False, True, 4),
    (2, "spawn", "map", False, True, 1),
    (3, "spawn", "map", False, True, 1),
)
"""Each pair of two options' values comes at least once."""


def grid_cases() -> Iterator[Case]:
    for workers, method, kind, persistent, in_order, ahead in GRID:
        name = f"{workers} {method} {kind}{' persistent' * persistent}{' any order' * (not in_order)} {ahead} ahead"
        free = "" if workers == 1 else "tasks" if kind != "map" else "" if in_order else "workers"
        options = {"num_workers": workers, "persistent_workers": persistent, "in_order": in_order}
        program = functools.partial(_grid_program, kind, free, options | {"prefetch_factor": ahead})
        yield Case(name, program, method, ordered=workers == 1, free=free)


def _grid_program(kind: str, free: str, options: dict[str, Any], lib: Any, context: Any) -> Any:
    seen = epochs(lib, context, KINDS[kind](), 3 if options["persistent_workers"] else 1, batch_size=2, **options)
    return [sorted(map(str, epoch)) for epoch in seen] if free else seen


def errors(dataset: Any, **options: Any) -> Program:
    return lambda lib, context: epochs(lib, context, dataset(), **({"num_workers": 2} | options))


def first_step(dataset: Callable[[], Any], **options: Any) -> Program:
    """Only the first batch, or error: what comes after it is said more kindly by ours."""

    def program(lib: Any, context: Any) -> Any:
        iterator = iter(lib.DataLoader(dataset(), multiprocessing_context=context, **options))
        seen = steps(iterator, limit=1)
        iterator._shutdown_workers()
        return seen

    return program


def broken_off(taken: int, **options: Any) -> Program:
    """Take some batches, and let the iterator go."""

    def program(lib: Any, context: Any) -> Any:
        loader = lib.DataLoader(wl.Tensors(12), multiprocessing_context=context, **options)
        seen = [plain(list(itertools.islice(loader, taken))), plain(list(itertools.islice(loader, taken)))]
        end(loader)
        return seen

    return program


def closed(lib: Any, context: Any) -> Any:
    """The iterator is shut down by hand, and asked again."""
    iterator = iter(lib.DataLoader(wl.Tensors(12), num_workers=2, multiprocessing_context=context))
    seen = [plain(next(iterator)) for _ in range(3)]
    iterator._shutdown_workers()
    return seen


def dies(how: Callable[[], Any], **options: Any) -> Program:
    """A worker ends at sample 4, once the batches before it are here."""

    def program(lib: Any, context: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            gate = Path(folder) / "gate"
            loader = lib.DataLoader(wl.Gate(8, gate, 4, how), multiprocessing_context=context, **options)
            iterator = iter(loader)
            seen = [plain(next(iterator)) for _ in range(4)]
            gate.touch()
            seen += steps(iterator)
            iterator._shutdown_workers()
            return seen

    return program


def timed_out(lib: Any, context: Any) -> Any:
    """The worker is let go once the timeout has been seen."""
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder) / "gate"
        loader = lib.DataLoader(wl.Gate(6, gate, at=2), num_workers=2, timeout=60, multiprocessing_context=context)
        iterator = iter(loader)
        seen = [plain(next(iterator)), plain(next(iterator))]
        iterator._timeout = 0.3
        if lib is minidl:
            iterator._driver.get = driver.Get(0.3)
        seen += steps(iterator)
        gate.touch()
        iterator._shutdown_workers()
        return seen


def pinned(program: Callable[..., Any]) -> Program:
    def with_a_device(lib: Any, context: Any) -> Any:
        loader = functools.partial(lib.DataLoader, pin_memory=True)
        with wl.pretended_device():
            return program(SimpleNamespace(DataLoader=loader), context)

    return with_a_device


def two_loaders(lib: Any, context: Any) -> Any:
    """One context serves both, in turn."""
    pair = [lib.DataLoader(wl.Tensors(4 + n), num_workers=1, multiprocessing_context=context) for n in range(2)]
    return [plain(pair_of_batches) for pair_of_batches in zip(*pair, strict=False)]


def special_cases() -> Iterator[Case]:
    one = {"num_workers": 1}
    yield Case("error in a sample", errors(lambda: wl.Failing(8, wl.SimpleError("one"), at=(2, 3)), batch_size=2))
    yield Case("error in a sample, one worker", errors(lambda: wl.Failing(8, KeyError("one")), **one), ordered=True)
    yield Case("error in collate", errors(lambda: wl.Numbers(8), batch_size=2, collate_fn=wl.failing_collate))
    yield Case("error in a whole batch", errors(lambda: wl.FailingBatch(6), batch_size=2, **one), ordered=True)
    yield Case("error of a stream", errors(lambda: wl.FailingStream(4, "next"), **one), ordered=True)
    yield Case("error in the sampler", errors(lambda: wl.Numbers(9), sampler=wl.FailingSampler([0, 1, 2, 3, 4, 5])))
    yield Case("error in the sampler, one worker", errors(
        lambda: wl.Numbers(9), sampler=wl.FailingSampler([0, 1, 2, 3]), **one), ordered=True)  # fmt: skip
    yield Case("worker_init_fn", errors(lambda: wl.Numbers(8), worker_init_fn=wl.draw_once))
    yield Case("error in worker_init_fn", errors(lambda: wl.Numbers(2), worker_init_fn=wl.failing_init))
    yield Case("error in worker_init_fn, no batches", first_step(
        lambda: wl.Numbers(2), worker_init_fn=wl.failing_init, batch_size=None, **one), ordered=True)  # fmt: skip
    yield Case("error in __iter__", first_step(lambda: wl.FailingStream(4, "iter"), **one), ordered=True)
    yield Case("a share", errors(lambda: wl.Numbers(8), sampler=DistributedSampler(range(8), 2, 0)))
    yield Case("no batches", errors(lambda: wl.Numbers(0), sampler=[]))
    yield Case("fewer batches than workers", errors(lambda: wl.Tensors(2), num_workers=3))
    yield Case("private memory", errors(lambda: wl.Tensors(6), collate_fn=wl.not_shared, batch_size=3))
    yield Case("everything", errors(lambda: wl.Mixed(6), batch_size=2, **one), ordered=True)
    yield Case("broken off", broken_off(3, num_workers=2))
    yield Case("broken off, one worker", broken_off(3, **one))
    yield Case("broken off, persistent", broken_off(3, num_workers=2, persistent_workers=True))
    yield Case("broken off before the first batch", broken_off(0, num_workers=2))
    yield Case("closed", closed)
    yield Case("a killed worker", dies(wl.kill_myself, num_workers=2))
    yield Case("a worker that exits", dies(wl.exit_at_once, num_workers=1), ordered=True)
    yield Case("a persistent worker that is killed", dies(wl.kill_myself, num_workers=2, persistent_workers=True))
    yield Case("a timeout", timed_out)
    yield Case("two loaders of one context", two_loaders, ordered=True)
    yield Case("pinned", pinned(errors(lambda: wl.Mixed(6), batch_size=2, **one)), ordered=True)
    yield Case("pinned, two workers, persistent", pinned(broken_off(3, num_workers=2, persistent_workers=True)))
    yield Case("pinned, a stream", pinned(errors(lambda: wl.Stream(7), batch_size=2, **one)), ordered=True)
    yield Case("pinned, a persistent stream", pinned(
        errors(lambda: wl.Stream(7), count=2, persistent_workers=True, **one)), ordered=True)  # fmt: skip
    yield Case("pinned, an error in a sample", pinned(
        errors(lambda: wl.Failing(8, KeyError("one")), **one)), ordered=True)  # fmt: skip
    yield Case("pinned, an error of pinning", pinned(
        errors(lambda: wl.Numbers(4), collate_fn=wl.Unpinnable, **one)), ordered=True)  # fmt: skip


_CASES: Final = (*grid_cases(), *special_cases())
SPAWNED: Final = [case for case in _CASES if case.method == "spawn"][1:]
"""Each takes seconds."""
CASES: Final = [case for case in _CASES if case not in SPAWNED]


# --- Comparison -------------------------------------------------------------------------------------------------------
@dataclass
class Comparison:
    """What came of one case."""

    case: str
    events: int = 0
    used: collections.Counter[Difference] = field(default_factory=collections.Counter)
    unexplained: list[str] = field(default_factory=list)
    shown: set[str] = field(default_factory=set)  # the kinds of events that torch's loader has shown


def run(case: Case, side: str, folder: Path) -> tuple[Any, Run]:
    """What the program returned, and its trace, which breaks no rule."""
    lib, context = (torch.utils.data, minidl.observe(case.method)) if side == TORCH else (minidl, case.method)
    torch.manual_seed(0)
    with minidl.trace(folder / side):
        seen = case.program(lib, context)
    trace = read_trace(folder / side)
    # A worker that leaves does not wait for its feeder thread, which may be in the middle of an event.
    cut = re.compile(r"worker \d+ \(pid \d+\): 1 event missing: begun and never completed")
    assert all(cut.match(problem) for problem in trace.problems), trace.problems
    assert not check(trace), "\n".join(map(str, check(trace)))
    return seen, Run(trace, case.ordered, case.free)


def compare(case: Case, folder: Path) -> Comparison:
    theirs, torch_run = run(case, TORCH, folder)
    ours, our_run = run(case, OURS, folder)
    assert repr(ours) == repr(theirs)
    out = Comparison(case.name, torch_run.events + our_run.events)
    out.shown = {EVENTS[int(code)].name for code in set(torch_run.trace.events["code"].tolist())}
    for row in DIFFERENCES:
        if "." in row.what:
            out.used[row] += sum(uses_field(row.what, side.trace) for side in (torch_run, our_run))
    for actor in sorted({*torch_run.actors, *our_run.actors}):
        out.unexplained += unexplained(actor, torch_run.actors[actor], our_run.actors[actor], case, out.used)
    for edge in {**torch_run.edges, **our_run.edges}:
        if torch_run.edges[edge] != our_run.edges[edge]:
            out.unexplained.append(f"{edge}: torch {torch_run.edges[edge]}, ours {our_run.edges[edge]}")
    return out


def uses_field(what: str, trace: Trace) -> int:
    """In how many events the field was not compared."""
    name, _, wanted = what.partition(".")
    rows = [event for event in EVENTS.values() if event.name == name and wanted in {spec.name for spec in event.fields}]
    return sum(int((trace.events["code"] == event.code).sum()) for event in rows)


def unexplained(
    actor: str, theirs: Sequence[Step], ours: Sequence[Step], case: Case, used: collections.Counter[Difference]
) -> Iterator[str]:
    """Yield the steps that only one side has, and that no row of DIFFERENCES allows."""
    for side, step in only_one_side(theirs, ours):
        row = next((r for r in DIFFERENCES if r.what == step[0] and r.side == side), None)
        if row is None:
            yield f"{actor}: only {side}: {step}"
        else:
            used[row] += 1


def only_one_side(theirs: Sequence[Step], ours: Sequence[Step]) -> Iterator[tuple[str, Step]]:
    matcher = difflib.SequenceMatcher(None, theirs, ours, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            yield from ((TORCH, step) for step in theirs[a:b])
            yield from ((OURS, step) for step in ours[c:d])


def table(results: Sequence[Comparison]) -> str:
    """The differential table."""
    lines = [f"{len(results)} programs, {sum(r.events for r in results)} events compared"]
    lines += [f"  {result.events:6}  {result.case}" for result in results]
    used: collections.Counter[Difference] = collections.Counter()
    for result in results:
        used += result.used
    lines += [f"{len(DIFFERENCES)} differences on purpose"]
    lines += [f"  {used[row]:6}  {row}: {row.reason}" for row in DIFFERENCES]
    wrong = [f"  {r.case}: {text}" for r in results for text in r.unexplained]
    return "\n".join([*lines, f"{len(wrong)} other differences", *wrong])


# --- The tests --------------------------------------------------------------------------------------------------------
_results: list[Comparison] = []


@pytest.fixture(autouse=True)
def nobody_is_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because a busy machine is slow to end a process."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", wl.BOUND)
    monkeypatch.setattr(driver, "MP_STATUS_CHECK_INTERVAL", wl.BOUND)
    gets = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(gets, "__defaults__", (wl.BOUND,))


@pytest.fixture(scope="module", autouse=True)
def fork_server_knows_torch() -> None:
    """Its children then start in no time; where it runs already, slowly."""
    multiprocessing.set_forkserver_preload(["torch.utils.data", "minidl"])


@pytest.mark.parametrize("case", [*CASES, *slow(*SPAWNED)], ids=lambda case: case.name.replace(" ", "-"))
def test_both_loaders_do_the_same(case: Case, tmp_path: Path) -> None:
    result = compare(case, tmp_path)
    _results.append(result)
    assert not result.unexplained, table([result])


# --- The table --------------------------------------------------------------------------------------------------------
def test_every_difference_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Also shows the table, with -s."""
    if len(_results) < len(CASES):
        pytest.skip("needs the results of all programs")
    needed = {row for result in _results for row, count in result.used.items() if count}
    with capsys.disabled():
        print("\n" + table(_results))
    assert needed == set(DIFFERENCES)


def test_what_the_table_says_of_torchs_loader_holds() -> None:
    """What it says is shown is shown, but for signals to workers that hang, which cost seconds; nothing else is.

    Slabs are of the other transport (see test_slabs.py), and torchdata's loader is resumed (see test_observe.py). The
    garbage collector is shown if it takes a millisecond, which depends on the machine.
    """
    if len(_results) < len(CASES):
        pytest.skip("needs the results of all programs")
    shown = set().union(*(result.shown for result in _results)) - {"gc"}
    told = {event.name for event in EVENTS.values() if event.seen or event.derived}
    assert shown == {name for name in told if not name.startswith("slab_")} - {"terminate", "resumed"}


if __name__ == "__main__":
    found = []
    for each in (*CASES, *SPAWNED):
        if len(sys.argv) > 1 and sys.argv[1] not in each.name:
            continue
        place = Path(tempfile.mkdtemp())
        try:
            found.append(compare(each, place))
        except Exception as error:
            found.append(Comparison(each.name, unexplained=[f"not compared: {error}"]))
        finally:
            shutil.rmtree(place)
    print(table(found))
