"""torch's own DataLoader, unmodified, recorded by the events of this package.

Interface: `DataLoader(..., num_workers=2, multiprocessing_context=minidl.observe())`. The context hands the loader the
queues, events and processes that it asks for, wrapped so that they record what passes through them and pass it on.
`observed_loaders()` gives every loader of a program such a context. `SEEN`, `DERIVED` and `UNSEEN` say which events
such a trace has.

Rules of use: an iterator is recorded if a trace is on when it is made (`with minidl.trace(...)`, MINIDL_TRACE, or
`observe(trace=...)`); where none is, and for whoever else uses the context, it is the plain one. What the loader
decides between two calls is read from its own counters at the second (`_Loader`): it is never guessed, and may be
stamped late. A loader without workers has no context, and so no events.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, Final

import torch
import torch.utils.data
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.worker import _IterableDatasetStopIteration, _ResumeIteration, _worker_loop
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from minidl import ports as plain_ports
from minidl.tracing import events as ev
from minidl.tracing import functions, recorder
from minidl.tracing.instrument import (
    TracedDoneEvent,
    TracedIndexQueue,
    TracedPorts,
    TracedProcess,
    TracedProgress,
    TracedResultQueue,
    _count,
    _facts,
    _feeding,
    _live,
    _TracedQueue,
    _watch_new_shared,
    emit_of,
    number_loader,
)
from minidl.tracing.recorder import TraceConfig

# --- Which events such a trace has ------------------------------------------------------------------------------------
SEEN: Final[dict[str, str]] = {
    "worker_start": "the process is started",
    "worker_ready": "the worker's first get: torch has seeded it and run worker_init_fn by then",
    "worker_gone": "the exit code, where the loader looks at the process",
    "index_put": "a put",
    "index_write": "the index queue's pipe",
    "index_get": "a get",
    "fetch": "from the worker's look at the done event, which follows the get, to its put",
    "collate": "collate_fn is looked up, to the worker's put; its samples are counted by the task's indices",
    "task_error": "what is put; position and index are not seen",
    "shm_alloc": "torch makes a shared storage in the worker",
    "shm_copy": "torch shares a storage in the worker's feeder thread",
    "result_put": "a put",
    "result_pickle": "the message is asked for its parts, to its write",
    "result_write": "the result queue's pipe",
    "result_get": "a get",
    "result_read": "the result queue's pipe",
    "result_rebuild": "the message's parts are put together",
    "resume_put": "a put",
    "resume_ack": "a put",
    "done_event_set": "a call of set()",
    "sentinel_put": "a put",
    "sentinel_get": "a get",
    "join": "a call of join()",
    "terminate": "a call of terminate()",
    "cancel_join_thread": "a call",
    "queue_close": "a call",
}
"""Event -> the call that shows it. Stamped when it happens."""

DERIVED: Final[dict[str, str]] = {
    "epoch": "begins with the first put of an epoch; ends with the first message of the next, or with the shutdown. It "
    "counts as exhausted if the loader has kept none of its tasks",
    "task_assigned": "the put that follows; outstanding is the loader's own count",
    "reorder_store": "the result that came is not the one whose turn it is",
    "reorder_pop": "a batch that was kept is no longer kept, at the loader's next call",
    "rcvd_advance": "the loader's own count, at its next call",
    "next": "from the loader's first call for a batch to its yield",
    "consumer": "from a yield to the loader's next call",
    "yield": "follows the put that replaces the batch; where the sampler has no more, seen at the loader's next call",
    "worker_exhausted": "what came out of the result queue",
    "found_dead": "is_alive() says no after a get that brought nothing",
    "timed_out": "is_alive() says yes of all after a get that took the loader's whole timeout",
    "done_event_seen": "a worker that holds a task looks at the done event, which is set",
    "worker_exit": "a worker that holds no task looks at the done event",
    "shutdown": "from the first done event to the last worker's end",
}
"""Event -> what it is concluded from. Its place among its thread's events is right; its time may be late."""

UNSEEN: Final[dict[str, str]] = {
    "sampler_next": "the sampler is asked by the loader itself",
    "share": "the sampler is iterated by the loader itself",
    "sample": "the dataset is asked by torch's fetcher",
    "pin": "torch's thread calls torch",
    "pin_start": "torch's thread",
    "pin_exit": "torch's thread",
    "ready_put": "a queue.Queue of the loader's own",
    "ready_get": "a queue.Queue of the loader's own",
}
"""Event -> why no queue, event or process shows it. Such an event is not in the trace."""


UNSEEN_BEHIND_PIN: Final = ("next", "consumer", "reorder_store", "reorder_pop", "timed_out")
"""Not seen either where memory is pinned: the loader gets its batches from a queue of its own then."""


# --- The context ------------------------------------------------------------------------------------------------------
def observe(
    start_method: str | BaseContext | None = None, *, trace: str | os.PathLike[str] | None = None
) -> ObservedContext:
    """Make a multiprocessing context that records torch's DataLoader; pass it as its `multiprocessing_context`.

    start_method: "fork", "spawn", "forkserver", a context to be used, or None for the program's default. trace: a
    directory, made at once, that iterators are recorded into where no other trace is on; a rank of a distributed run
    has DIRECTORY/rankN. One context serves any number of loaders. Raises ValueError for an unknown start method,
    TraceError where `trace` cannot be begun.
    """
    if isinstance(start_method, str):
        multiprocessing.get_context(start_method)
    if trace is None or multiprocessing.parent_process() is not None:  # a spawned child imports the script again
        return ObservedContext(start_method)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        trace = os.path.join(trace, f"rank{os.environ.get('RANK', '0')}")
    return ObservedContext(start_method, str(recorder.create(trace)))


class ObservedContext(BaseContext):
    """See `observe`. Whatever torch's iterators do not ask for is the plain context's."""

    def __init__(self, chosen: str | BaseContext | None, trace: str | None = None) -> None:
        self.chosen = chosen
        self.trace = trace

    def get_context(self, method: str | None = None) -> Any:
        """The plain context."""
        if method is not None or not isinstance(self.chosen, BaseContext):
            return multiprocessing.get_context(method or self.chosen)  # type: ignore[arg-type]
        return self.chosen

    def get_start_method(self, allow_none: bool = False) -> str:
        return str(self.get_context().get_start_method())

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802  # as its base class calls it
        """The result queue, if it is an iterator's first, else a worker's index queue."""
        plain = self.get_context().Queue(maxsize)
        ports = self._ports(sys._getframe(1))
        return plain if ports is None else ports.queue(plain)

    def Event(self) -> Any:  # noqa: N802
        """The workers' done event."""
        event = self.get_context().Event()
        ports = self._ports(sys._getframe(1))
        return event if ports is None else ObservedDoneEvent(ports, event, ev.DoneEvent.WORKERS)

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        """A worker."""
        make, ports = self.get_context().Process, self._ports(sys._getframe(1))
        if ports is None or kwargs.get("target") is not _worker_loop:
            return make(*args, **kwargs)
        return ports.process(make, kwargs)

    def _ports(self, caller: Any) -> ObservedPorts | None:
        """The ports of the iterator whose method calls; None where no iterator of torch's does, or no trace is on."""
        iterator = caller.f_locals.get("self")
        if not isinstance(iterator, _MultiProcessingDataLoaderIter) or not _known():
            return None
        if iterator not in _observed:
            _observed[iterator] = self._new_ports(iterator)
        return _observed[iterator]

    def _new_ports(self, iterator: Any) -> ObservedPorts | None:
        traced = plain_ports.new_ports()  # begins the trace that MINIDL_TRACE asks for
        if isinstance(traced, TracedPorts):
            made = ObservedPorts(traced.config, traced.loader)
        elif self.trace is not None:
            pen = recorder.active() or recorder.start(TraceConfig(self.trace))
            made = ObservedPorts(pen.config, number_loader(pen.config.directory))
        else:
            return None
        made.begin(iterator)
        return made

    def __repr__(self) -> str:
        return f"minidl.observe({self.chosen!r})"


@functools.cache
def _known() -> bool:
    """Whether torch's worker takes what we look for; said once on stderr where it does not."""
    missing = _TAKEN - set(inspect.signature(_worker_loop).parameters)
    if missing:
        told = f"torch {torch.__version__}'s workers take no {', '.join(sorted(missing))}"
        print(f"minidl: torch's loader is not recorded: {told}. The run goes on.", file=sys.stderr)
    return not missing


_TAKEN: Final = {
    *("index_queue", "data_queue", "done_event", "worker_id", "base_seed", "dataset_kind", "auto_collation"),
    "collate_fn",
}

_observed: weakref.WeakKeyDictionary[Any, ObservedPorts | None] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def observed_loaders() -> Iterator[None]:
    """While this is open, each torch DataLoader with workers that is made gets an observing context around its own."""
    loader: Any = torch.utils.data.DataLoader
    plain = loader.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self.num_workers > 0 and not isinstance(self.multiprocessing_context, ObservedContext):
            self.multiprocessing_context = observe(self.multiprocessing_context)

    loader.__init__ = init
    try:
        yield
    finally:
        loader.__init__ = plain


# --- The ports of one iterator ----------------------------------------------------------------------------------------
class ObservedPorts(TracedPorts):
    """What the wrapped things of one of torch's iterators share. `loader_side` and `worker_side` say who is here."""

    loader_side: _Loader
    worker_side: _Worker | None = None  # None in the loader's process
    has_result_queue = False
    index_queues = 0

    def begin(self, iterator: Any) -> None:
        """In the loader's process."""
        _live.add(self)
        self.loader_side = _Loader(self, iterator)
        pen = recorder.start(self.config)
        pen.role("loader", loader=self.loader)
        unseen = {*UNSEEN, *(UNSEEN_BEHIND_PIN if self.loader_side.pinned else ())}
        pen.describe("loader", loader=self.loader, observed=True, unseen=sorted(unseen), **_facts(iterator))

    def enter(self, worker_id: int, seed: int) -> _Worker:
        """In a worker's process."""
        pen = recorder.start(self.config)
        pen.role("worker", worker=worker_id, loader=self.loader)
        self.worker_side = _Worker(self, worker_id, seed)
        _watch_new_shared(self, worker_id)
        _watch_sharing()
        if self.config.functions_min_us is not None:
            functions.start(self.config.directory, self.config.functions_min_us, worker_id, self.loader)
        return self.worker_side

    def queue(self, plain: Any) -> Any:
        """The iterator asks for the result queue first, then for a queue a worker."""
        if not self.has_result_queue:
            self.has_result_queue = True
            return ObservedResultQueue(self, plain)
        self.index_queues += 1
        return ObservedIndexQueue(self, plain, self.index_queues - 1)

    def process(self, make: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The worker of the index queue that was made last."""
        target, args = arguments["target"], arguments["args"]
        watched = arguments | {"target": _observed_loop, "args": (self, target, args)}
        return ObservedProcess(self, make(**watched), self.index_queues - 1)


# --- The loader, between two calls of ours ----------------------------------------------------------------------------
class _Loader:
    """Follows one iterator in its own process. Upstream: what `_MultiProcessingDataLoaderIter` counts.

    `tasks` is the iterator's own `_task_info` of this epoch, what is sent and not yielded, and `status` its
    `_workers_status`, who has data left. They stay with us when a new epoch gives the iterator new ones, so they show
    what has been handed out since the last call.
    """

    def __init__(self, ports: ObservedPorts, iterator: Any) -> None:
        self.ports = ports
        self.iterator = weakref.ref(iterator)
        self.num_workers: int = iterator._num_workers
        self.prefetch_factor: int = iterator._prefetch_factor
        self.in_order: bool = getattr(iterator, "_in_order", True)
        self.pinned = bool(iterator._pin_memory)
        self.epoch = -1
        self.new_epoch()
        self.in_epoch = self.in_next = self.in_consumer = False  # begun, and not ended
        self.failing = False  # next() is about to raise what is no task's error
        self.wait: float | None = None  # seconds that the last get took, where it brought nothing
        self.found_alive = 0  # of the workers that have been looked at since
        self.shutting_down = self.closed = False

    def new_epoch(self) -> None:
        """Forget the last epoch."""
        self.tasks: dict[int, Any] = {}
        self.status: list[bool] = []
        self.workers: dict[int, int] = {}  # task -> worker
        self.kept: dict[int, ev.Outcome] = {}  # the reorder buffer, as told
        self.in_hand: list[tuple[int, ev.Outcome]] = []  # received in turn or popped, and not told as yielded
        self.send_idx = self.rcvd_idx = self.yielded = 0
        self.results = 0  # received, of whatever kind
        self.ends: list[int] = []  # tasks answered with the end of a worker's data, as the pin thread has seen
        self.ended = 0  # workers of which the loader knows that
        self.last = -1  # the task yielded last
        self.sampled_all = False  # a batch was yielded and no task sent for it

    def emit(self, code: int, task: int = -1, worker: int = -1, x: int = 0, y: int = 0, z: int = 0) -> None:
        self.ports.emit(code, task, worker, x, y, z)

    # --- what the iterator itself says
    def outstanding(self) -> int:
        return int(getattr(self.iterator(), "_tasks_outstanding", self.send_idx - self.results))

    def active(self) -> int:
        return sum(self.status)

    def batches(self) -> int | None:
        return getattr(self.iterator(), "_num_yielded", None)

    # --- what has happened since the last call
    def catch_up(self, batches: int | None, all_but: int = 0) -> None:
        """Emit what has left the reorder buffer, and the yields; `all_but` = 1 where the last of them is still to come.

        batches: the loader's own count of yields. What it lacks is lost: the sampler failed while a batch's successor
        was to be sent, and the batch in hand went with it.
        """
        if self.pinned:
            self.catch_up_pinned()
            return
        gone = sorted(task for task in self.kept if task not in self.tasks)
        coming = [*self.in_hand, *((task, self.kept[task]) for task in gone)]
        certain = [task for task, outcome in coming[: len(coming) - all_but] if outcome is ev.Outcome.DATA]
        lost = set(certain[: max(0, self.yielded + len(certain) - batches)] if batches is not None else [])
        if lost and self.in_hand and self.in_hand[0][0] in lost:
            self.in_hand.clear()
            self.end_next(ev.Outcome.ERROR)
        for task in gone:
            self.hand_out()
            outcome = self.kept.pop(task)
            self.begin_next()
            self.rcvd_idx = task + 1
            self.emit(ev.REORDER_POP, task, self.workers.get(task, -1), self.rcvd_idx, len(self.kept))
            self.emit(ev.RCVD_ADVANCE, x=self.rcvd_idx, y=self.outstanding())
            if task in lost:
                self.end_next(ev.Outcome.ERROR)
            else:
                self.in_hand.append((task, outcome))
        self.sampled_all = self.in_order and (self.sampled_all or len(self.in_hand) > all_but)
        self.hand_out(all_but)

    def catch_up_pinned(self) -> None:
        """Where torch's pin thread receives, what the loader no longer keeps is all that it shows of its batches."""
        for task in sorted(task for task in self.kept if task not in self.tasks):
            outcome = self.kept.pop(task)
            if self.in_order or task == self.rcvd_idx:
                self.rcvd_idx = task + 1
                self.emit(ev.RCVD_ADVANCE, x=self.rcvd_idx, y=self.outstanding())
            self.in_hand.append((task, outcome))
            self.hand_out()
        for worker, active in enumerate(self.status):
            if not active:
                self.data_ended(worker)

    def data_ended(self, worker: int) -> None:
        """The loader has learnt from the pin thread that a worker's data have ended."""
        for task in [task for task in self.ends if self.workers.get(task) == worker]:
            self.ends.remove(task)
            self.ended += 1
            self.emit(ev.WORKER_EXHAUSTED, task, worker, self.num_workers - self.ended)

    def telling_to_leave(self, worker: int) -> None:
        if self.pinned and not self.shutting_down:
            self.catch_up_pinned()
            self.data_ended(worker)

    def hand_out(self, all_but: int = 0) -> None:
        """Emit the yields of what is in hand."""
        while len(self.in_hand) > all_but:
            task, outcome = self.in_hand.pop(0)
            self.last = task
            self.yielded += outcome is ev.Outcome.DATA
            self.emit(ev.YIELD, task, self.workers.get(task, -1), outcome, self.yielded)
            self.end_next(outcome, task)

    # --- next() and the consumer, in turn
    def begin_next(self) -> None:
        if not self.in_next and not self.pinned:
            self.end_consumer()
            self.in_next = True
            self.emit(ev.NEXT[0], self.rcvd_idx, x=self.rcvd_idx)

    def end_next(self, outcome: ev.Outcome, task: int = -1) -> None:
        if self.in_next:
            self.in_next = self.failing = False
            self.emit(ev.NEXT[1], task, x=self.yielded, y=outcome)
            if outcome is not ev.Outcome.EXHAUSTED:
                self.begin_consumer(task if outcome is ev.Outcome.DATA else -1)

    def fail(self) -> None:
        """End a next() that has raised what is no task's error."""
        if self.failing:
            self.ports.emit_gone()
            self.end_next(ev.Outcome.ERROR)

    def begin_consumer(self, task: int = -1) -> None:
        self.in_consumer = True
        self.emit(ev.CONSUMER[0], task, x=self.yielded)

    def end_consumer(self) -> None:
        if self.in_consumer:
            self.in_consumer = False
            self.emit(ev.CONSUMER[1], self.last)

    # --- epochs
    def begin_epoch(self) -> None:
        if not self.in_epoch and not self.shutting_down:
            self.in_epoch = True
            self.epoch += 1
            self.new_epoch()
            self.tasks = getattr(self.iterator(), "_task_info", self.tasks)
            self.status = getattr(self.iterator(), "_workers_status", self.status)
            self.emit(ev.EPOCH[0], x=self.epoch, y=self.num_workers, z=self.prefetch_factor)

    def primed(self) -> None:
        """The first tasks have been sent."""
        if self.last < 0 and not self.in_next and not self.in_consumer and not self.pinned:
            self.sampled_all = self.in_order and self.send_idx < self.num_workers * self.prefetch_factor
            self.begin_consumer()

    def end_epoch(self, batches: int | None = None) -> None:
        if not self.in_epoch:
            return
        self.primed()
        self.catch_up(batches)
        self.fail()
        self.in_epoch = False
        ending = ev.Ending.CLOSED if self.tasks else ev.Ending.EXHAUSTED
        if ending is ev.Ending.EXHAUSTED:
            self.begin_next()
            if self.rcvd_idx < self.send_idx:
                self.rcvd_idx = self.send_idx
                self.emit(ev.RCVD_ADVANCE, x=self.rcvd_idx, y=self.send_idx - self.results)
            self.end_next(ev.Outcome.EXHAUSTED)
        self.end_consumer()
        self.emit(ev.EPOCH[1], x=self.epoch, y=self.yielded, z=ending)
        self.tasks = {}  # of batches that the iterator has let go, none must live because of us

    # --- index queues
    def sending(self, idx: int, worker: int, index: Any) -> None:
        """A task is about to be put; where a batch is in hand, for that batch, which is yielded afterwards."""
        self.begin_epoch()
        self.catch_up(self.batches(), all_but=1)
        self.sampled_all = False
        self.workers[idx] = worker
        self.send_idx = idx + 1
        self.emit(ev.TASK_ASSIGNED, idx, worker, idx + 1, self.outstanding() + 1)
        self.emit(ev.INDEX_PUT, idx, worker, _count(index))

    def sent(self) -> None:
        self.hand_out()
        if self.send_idx == self.num_workers * self.prefetch_factor:
            self.primed()

    def resuming(self, worker: int) -> None:
        """A worker is told of a new epoch."""
        self.end_epoch()
        self.emit(ev.RESUME_PUT, -1, worker, self.epoch + 1)

    # --- the result queue
    def waits(self) -> tuple[int, int]:
        """The loader is about to wait; task and worker that it needs next."""
        self.wait, self.found_alive = None, 0
        if not self.in_epoch or self.pinned:
            return -1, -1
        self.primed()
        self.catch_up(self.batches())
        self.fail()
        self.begin_next()
        rcvd_idx = int(getattr(self.iterator(), "_rcvd_idx", self.rcvd_idx))
        if rcvd_idx > self.rcvd_idx:
            self.rcvd_idx = rcvd_idx
            self.emit(ev.RCVD_ADVANCE, x=rcvd_idx, y=self.outstanding())
        return self.rcvd_idx, self.workers.get(self.rcvd_idx, -1)

    def got_nothing(self, seconds: float, error: BaseException) -> None:
        """The wait has brought no message: what next() does now is seen where it looks at the workers."""
        self.wait = seconds
        self.failing = self.in_next and not isinstance(error, queue.Empty)

    def received(self, task: int, worker: int, outcome: ev.Outcome) -> None:
        """A result has come; what the loader does about it follows from whose turn it is."""
        if not self.in_epoch:
            return  # a leftover of the last epoch
        if self.pinned:
            # By the pin thread; the loader has yet to receive it.
            if outcome is ev.Outcome.EXHAUSTED:
                self.ends.append(task)
            else:
                self.kept[task] = outcome
            return
        self.results += 1
        if outcome is ev.Outcome.EXHAUSTED:
            self.emit(ev.WORKER_EXHAUSTED, task, worker, self.active() - 1)
        elif task == self.rcvd_idx:
            self.rcvd_idx += 1
            self.in_hand.append((task, outcome))
            self.emit(ev.RCVD_ADVANCE, x=self.rcvd_idx, y=self.outstanding() - 1)
        elif self.in_order:
            self.kept[task] = outcome
            self.emit(ev.REORDER_STORE, task, worker, self.rcvd_idx, len(self.kept))
        else:
            self.in_hand.append((task, outcome))
        if self.sampled_all:
            self.hand_out()

    # --- processes
    def looked_at(self, worker: int, process: Any, alive: bool) -> None:
        """The loader has asked whether a worker lives."""
        if self.shutting_down:
            if worker == len(self.ports.workers) - 1 and not alive:
                self.shut_down()
        elif self.wait is None and not self.pinned:
            return  # somebody else asks
        elif not alive:
            self.failing = self.in_next
            self.emit(ev.FOUND_DEAD, -1, worker, ev.Actor.WORKER, process.pid, process.exitcode or 0)
        elif not self.failing:
            self.found_alive += 1
            timeout = getattr(self.iterator(), "_timeout", 0)
            if timeout > 0 and self.found_alive == self.active() and self.wait is not None:
                about = self.rcvd_idx, self.workers.get(self.rcvd_idx, -1)
                self.emit(ev.TIMED_OUT, *about, int(self.wait * 1e9))
                self.end_next(ev.Outcome.ERROR)

    def begin_shutdown(self) -> None:
        """The first of the done events is about to be set."""
        if self.shutting_down:
            return
        if self.epoch < 0 and self.num_workers == len(self.ports.workers):
            self.begin_epoch()  # of a sampler that gave nothing
        self.end_epoch(self.batches())
        self.shutting_down = True
        self.emit(ev.SHUTDOWN[0])

    def shut_down(self) -> None:
        """The last worker has ended."""
        if self.shutting_down and not self.closed:
            self.closed = True
            self.emit(ev.SHUTDOWN[1], x=self.ports.emit_gone())
            self.ports.workers = []  # they hold the ports


# --- A worker ---------------------------------------------------------------------------------------------------------
class _Worker:
    """Follows torch's `_worker_loop` in a worker's process."""

    def __init__(self, ports: ObservedPorts, worker_id: int, seed: int) -> None:
        self.ports = ports
        self.worker_id = worker_id
        self.seed = seed
        self.parent = os.getppid()
        self.progress = TracedProgress(ports, worker_id)
        self.ready = False
        self.task: tuple[int, Any] | None = None  # received, and not yet taken up
        self.samples = -1  # of the task that is being fetched, as its indices say
        self.exhausted = self.told = self.left = False
        self.epoch = 0

    def emit(self, code: int, task: int = -1, x: int = 0, y: int = 0, z: int = 0) -> None:
        self.ports.emit(code, task, self.worker_id, x, y, z)

    def asks(self) -> None:
        """It waits for a message."""
        if not self.ready:
            self.ready = True
            self.emit(ev.WORKER_READY, -1, os.getpid(), self.parent, self.seed)

    def looked(self, done: bool) -> None:
        """It has looked at the done event, as it does once for each message that is no new epoch, and at its end."""
        if self.task is not None:
            (task, index), self.task = self.task, None
            if done:
                self.emit(ev.DONE_EVENT_SEEN, task, ev.DoneEvent.WORKERS)
            elif not self.exhausted:
                self.samples = _count(index)
                self.progress.begin(task, index)
        elif self.told:
            if done or self.exhausted:  # else torch refuses the sentinel
                self.leave(ev.Ending.SENTINEL)
        elif os.getppid() != self.parent:
            self.emit(ev.FOUND_DEAD, -1, ev.Actor.LOADER, self.parent)
            self.leave(ev.Ending.ORPHANED)
        else:
            self.leave(ev.Ending.INTERRUPTED)

    def leave(self, ending: ev.Ending) -> None:
        if not self.left:
            self.left = True
            self.emit(ev.WORKER_EXIT, -1, ending)

    def answers(self, task: int, data: Any) -> None:
        """The task's result is about to be put."""
        outcome = _outcome(data)
        self.exhausted = outcome is ev.Outcome.EXHAUSTED
        self.progress.end(outcome)
        if isinstance(data, ExceptionWrapper):
            last = str(data.exc_msg).strip().rpartition("\n")[2]
            text = recorder.start(self.ports.config).string(last[:1000])
            self.emit(ev.TASK_ERROR, task, -1, -1, text)
        self.emit(ev.RESULT_PUT, task, outcome)

    def resumes(self) -> None:
        self.epoch += 1
        self.exhausted = False
        self.emit(ev.RESUME_ACK, -1, self.epoch)


def _outcome(data: Any) -> ev.Outcome:
    if isinstance(data, _IterableDatasetStopIteration):
        return ev.Outcome.EXHAUSTED
    return ev.Outcome.ERROR if isinstance(data, ExceptionWrapper) else ev.Outcome.DATA


class _WatchedCollate:
    """Stands for collate_fn in a worker. Being looked up for a call is what it notices, so it has no frame of its own
    in the traceback of an error that collate_fn raises."""

    def __init__(self, worker: _Worker, collate_fn: Callable[..., Any], counted: bool) -> None:
        self.worker = worker
        self.collate_fn = collate_fn
        self.counted = counted

    @property
    def __call__(self) -> Callable[..., Any]:
        self.worker.progress.collate(self.worker.samples if self.counted else -1)
        return self.collate_fn


def _observed_loop(ports: ObservedPorts, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """What a worker's process runs: torch's loop."""
    call = inspect.signature(target).bind(*args)
    given = call.arguments
    worker = ports.enter(given["worker_id"], int(given["base_seed"]) + given["worker_id"])
    for name in ("index_queue", "data_queue", "done_event"):
        given[name].ports = ports
    counted = given["dataset_kind"] == 0 and given["auto_collation"]
    given["collate_fn"] = _WatchedCollate(worker, given["collate_fn"], counted)
    target(*call.args, **call.kwargs)


# --- Messages ---------------------------------------------------------------------------------------------------------
class _Sent:
    """A task on its way to a worker: tells the feeder thread which it is. What arrives is torch's own tuple."""

    def __init__(self, message: tuple[Any, ...], *about: int) -> None:
        self.message = message
        self.about = about

    def __reduce__(self) -> tuple[Any, ...]:
        _feeding.about = self.about
        return tuple, (self.message,)


class _Answer(_Sent):
    """A result on its way to the loader: its pickling and its rebuilding are spans. What arrives is torch's tuple."""

    def __reduce__(self) -> tuple[Any, ...]:
        _feeding.about = self.about
        _begin_pickling(self.about)
        return _arrived, (_Arriving(*self.about), tuple(self.message))


class _Arriving:
    """Pickled in front of the data, so that what it calls is called before the data are rebuilt."""

    def __init__(self, *about: int) -> None:
        self.about = about

    def __reduce__(self) -> tuple[Any, ...]:
        return _arriving, self.about


class _Resumed(_Sent):
    """A worker's acknowledgement of a new epoch: says whose it is, which torch's own message does not."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _resumed, (*self.about, tuple(self.message))


_reading = threading.local()
"""What this thread rebuilds: `about` (loader, task, worker) and `begun`, and `size`, the message's bytes."""


def _arriving(loader: int, task: int, worker: int) -> tuple[int, int, int]:
    about = _reading.about = (loader, task, worker)
    _reading.begun = True
    emit_of(loader)(ev.RESULT_REBUILD[0], task, worker, getattr(_reading, "size", 0))
    return about


def _arrived(about: tuple[int, int, int], message: tuple[Any, ...]) -> tuple[Any, ...]:
    _end_rebuild(*_tensors(message))
    return message


def _resumed(loader: int, task: int, worker: int, message: tuple[Any, ...]) -> tuple[Any, ...]:
    _reading.about, _reading.begun = (loader, task, worker), False
    return message


def _end_rebuild(tensors: int = 0, shared: int = 0) -> None:
    if getattr(_reading, "begun", False):
        _reading.begun = False
        emit_of(_reading.about[0])(ev.RESULT_REBUILD[1], *_reading.about[1:], tensors, shared)


def _tensors(data: Any) -> tuple[int, int]:
    """How many tensors, and their storages' bytes, in a nest of lists, tuples and mappings."""
    if isinstance(data, torch.Tensor):
        return 1, data.untyped_storage().nbytes() if data.layout is torch.strided else 0
    if isinstance(data, dict):
        data = list(data.values())
    if not isinstance(data, (list, tuple)):
        return 0, 0
    counts = [_tensors(item) for item in data]
    return sum(count for count, _ in counts), sum(size for _, size in counts)


def _begin_pickling(about: tuple[int, ...]) -> None:
    _feeding.pickling, _feeding.tensors, _feeding.copied = about, 0, 0
    emit_of(about[0])(ev.RESULT_PICKLE[0], *about[1:])


def _end_pickling(size: int) -> None:
    """The message is pickled, or could not be (size 0)."""
    about = getattr(_feeding, "pickling", None)
    if about is not None:
        _feeding.pickling = None
        emit_of(about[0])(ev.RESULT_PICKLE[1], *about[1:], size, _feeding.tensors, _feeding.copied)


def _watch_sharing() -> None:
    """In a worker: count each storage that is pickled, and emit the copy of one that is not in shared memory yet."""
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(torch.UntypedStorage, name, _watched_sharing(getattr(torch.UntypedStorage, name)))


def _watched_sharing(share: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(share)
    def watched(storage: Any, *args: Any, **kwargs: Any) -> Any:
        about = getattr(_feeding, "pickling", None)
        if about is None:
            return share(storage, *args, **kwargs)
        _feeding.tensors += 1
        if storage.is_shared():
            return share(storage, *args, **kwargs)
        emit, size = emit_of(about[0]), storage.nbytes()
        _feeding.copied += size
        emit(ev.SHM_COPY[0], *about[1:], size, ev.Place.FEEDER, ev.Reason.NOT_SHARED_YET)
        try:
            return share(storage, *args, **kwargs)
        finally:
            emit(ev.SHM_COPY[1], *about[1:], size)

    return watched


# --- Queues, the done event, processes --------------------------------------------------------------------------------
class _ObservedQueue(_TracedQueue):
    """What both queues share."""

    ports: ObservedPorts
    _watched_by = 0  # pid: a forked child's queue has new pipe methods

    def _watch(self) -> None:
        if self._watched_by != os.getpid():
            self._watched_by = os.getpid()
            self._hook()

    # These hang on the queue, so they must not hold it: torch leaves its result queue to be closed as it is let go.
    def _watched_send(self, send: Callable[[Any], None], write: tuple[int, int]) -> Callable[[Any], None]:
        emit, other = self.ports.emit, (self.ports.loader, -1, self.worker_id)

        def _send_bytes(data: Any) -> None:
            about = getattr(_feeding, "about", other)
            _end_pickling(len(data))
            emit(write[0], *about[1:], len(data))
            send(data)
            emit(write[1], *about[1:], len(data))
            _feeding.about = other  # the next message may be none of those that say what they are

        return _send_bytes

    def _watched_receive(self, receive: Callable[[], bytes]) -> Callable[[], bytes]:
        emit = self.ports.emit

        def _recv_bytes() -> bytes:
            data = receive()
            _reading.size = len(data)
            emit(ev.RESULT_READ, -1, -1, len(data))
            return data

        return _recv_bytes


def _is_pair(message: Any) -> bool:
    """Whether it is of the form of torch's tasks and results."""
    return isinstance(message, tuple) and len(message) == 2


class ObservedIndexQueue(_ObservedQueue, TracedIndexQueue):
    """The loader puts (task, indices), None or a new epoch's message; one worker gets."""

    ports: ObservedPorts

    def put(self, message: Any, *args: Any, **kwargs: Any) -> None:
        self._watch()
        loader = self.ports.loader_side
        if _is_pair(message):
            idx, index = message
            loader.sending(idx, self.worker_id, index)
            self.inner.put(_Sent(message, self.ports.loader, idx, self.worker_id), *args, **kwargs)
            loader.sent()
            return
        if message is None:
            loader.telling_to_leave(self.worker_id)
            self.ports.emit(ev.SENTINEL_PUT, -1, self.worker_id, self.queue_id)
        elif isinstance(message, _ResumeIteration):
            loader.resuming(self.worker_id)
        self.inner.put(message, *args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        self._watch()
        worker = self.ports.worker_side
        if worker is None:
            return self.inner.get(*args, **kwargs)
        worker.asks()
        self.ports.emit(ev.INDEX_GET[0], -1, self.worker_id)
        try:
            message = self.inner.get(*args, **kwargs)
        except BaseException:
            self.ports.emit(ev.INDEX_GET[1], -1, self.worker_id, ev.Message.EMPTY)
            raise
        if _is_pair(message):
            worker.task = message[0], message[1]
            self.ports.emit(ev.INDEX_GET[1], message[0], self.worker_id, ev.Message.TASK, _count(message[1]))
        elif message is None:
            worker.told = True
            self.ports.emit(ev.INDEX_GET[1], -1, self.worker_id, ev.Message.SENTINEL)
            self.ports.emit(ev.SENTINEL_GET, -1, self.worker_id, self.queue_id)
        else:
            self.ports.emit(ev.INDEX_GET[1], -1, self.worker_id, ev.Message.RESUME)
        return message


class ObservedResultQueue(_ObservedQueue, TracedResultQueue):
    """Every worker puts (task, data); the loader gets, or torch's pin thread."""

    ports: ObservedPorts

    def _hook(self) -> None:
        super()._hook()
        give_up = self.inner._on_queue_feeder_error

        def on_error(error: Exception, message: Any) -> None:
            _end_pickling(0)
            give_up(error, getattr(message, "message", message))

        self.inner._on_queue_feeder_error = on_error

    def put(self, message: Any, *args: Any, **kwargs: Any) -> None:
        self._watch()
        worker, number = self.ports.worker_side, self.ports.loader
        if worker is None:  # the loader wakes the pin thread, which it has told to stop, and then waits for it
            self.ports.loader_side.begin_shutdown()
            self.ports.emit(ev.DONE_EVENT_SET, x=ev.DoneEvent.PIN_THREAD)
            self.ports.emit(ev.SENTINEL_PUT, -1, -1, self.queue_id)
            self.inner.put(message, *args, **kwargs)
            self.ports.emit(ev.JOIN[0], x=ev.Actor.PIN_THREAD)
            self.joining = True
        elif not _is_pair(message):
            self.inner.put(message, *args, **kwargs)
        elif isinstance(message[0], _ResumeIteration):
            worker.resumes()
            self.inner.put(_Resumed(message, number, -1, worker.worker_id), *args, **kwargs)
        else:
            worker.answers(*message)
            self.inner.put(_Answer(message, number, message[0], worker.worker_id), *args, **kwargs)

    joining = False

    def cancel_join_thread(self) -> None:
        if self.joining:
            self.joining = False
            self.ports.emit(ev.JOIN[1], x=ev.Actor.PIN_THREAD, y=1)
        super().cancel_join_thread()

    def get(self, *args: Any, **kwargs: Any) -> Any:
        self._watch()
        loader, seconds = self.ports.loader_side, kwargs.get("timeout") or 0
        task, worker = loader.waits()
        self.ports.emit(ev.RESULT_GET[0], task, worker, int(seconds * 1e9))
        began = time.monotonic()
        _reading.about = (self.ports.loader, -1, -1)
        try:
            message = self.inner.get(*args, **kwargs)
        except BaseException as error:
            _end_rebuild()
            self.ports.emit(ev.RESULT_GET[1], -1, worker, ev.Message.EMPTY)
            loader.got_nothing(time.monotonic() - began, error)
            raise
        if _is_pair(message):
            self._got(message[0], message[1], _reading.about[2])
        return message

    def _got(self, idx: Any, data: Any, worker: int) -> None:
        if isinstance(idx, _ResumeIteration):
            self.ports.emit(ev.RESULT_GET[1], -1, worker, ev.Message.RESUME)
        elif idx is None:
            self.ports.emit(ev.RESULT_GET[1], -1, -1, ev.Message.SENTINEL)
            self.ports.emit(ev.SENTINEL_GET, -1, -1, self.queue_id)
        else:
            outcome = _outcome(data)
            self.ports.emit(ev.RESULT_GET[1], idx, worker, ev.Message.RESULT, outcome)
            self.ports.loader_side.received(idx, worker, outcome)


class ObservedDoneEvent(TracedDoneEvent):
    """The loader sets it; a worker looks at it after each message."""

    ports: ObservedPorts

    def set(self) -> None:
        loader = self.ports.loader_side
        loader.begin_shutdown()
        super().set()
        if not self.ports.workers:
            loader.shut_down()

    def is_set(self) -> bool:
        done: bool = self.inner.is_set()
        if self.ports.worker_side is not None:
            self.ports.worker_side.looked(done)
        return done


class ObservedProcess(TracedProcess):
    """A worker's process, as torch's loader handles it."""

    ports: ObservedPorts

    @property
    def daemon(self) -> bool:
        return bool(self.inner.daemon)

    @daemon.setter
    def daemon(self, value: bool) -> None:
        self.inner.daemon = value

    def start(self) -> None:
        super().start()
        self.ports.workers.append(self)  # as the loader lists it, once it has started

    def is_alive(self) -> bool:
        alive: bool = self.inner.is_alive()
        self.ports.loader_side.looked_at(self.worker_id, self.inner, alive)
        return alive

    def terminate(self) -> None:
        super().terminate()
        self.terminated = True
        if not _joins_the_terminated():
            self._ended()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self.terminated:
            self._ended()

    def _ended(self) -> None:
        if self in self.ports.workers[-1:]:
            self.ports.loader_side.shut_down()

    terminated = False


@functools.cache
def _joins_the_terminated() -> bool:
    """Whether torch waits for a worker that it has terminated: 2.13 does, 2.11 does not."""
    return "join" in inspect.getsource(_MultiProcessingDataLoaderIter._shutdown_workers).partition("terminate()")[2]
