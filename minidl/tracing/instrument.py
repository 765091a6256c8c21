"""The one place where a running loader is turned into events: ports that are wrapped, transitions that are watched.

`trace(directory)` gives iterators that are made inside it a `TracedPorts`; MINIDL_TRACE=DIRECTORY does it for a whole
program. A TracedPorts hands out what `ports.Ports` hands out, wrapped: the pure classes in subclasses that emit what
they decided, queues, events, processes and threads in proxies that emit and pass on. Nothing here changes what the
loader does; an emit never raises. Stamp before a put and after a get.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from minidl import ports
from minidl.dispatcher import STORED, Assignment, Deliver, Dispatcher, Signal, Wait
from minidl.errors import ExceptionWrapper
from minidl.fetch import Progress
from minidl.messages import RebuildFailure, Result, ResumeIteration, Sentinel, Task, WorkerExhausted
from minidl.progress import ProgressBoard, WorkerProgress
from minidl.protocol import (
    Action,
    LoaderEvent,
    LoaderLifecycle,
    LoaderState,
    PinEvent,
    PinLifecycle,
    PinState,
    WorkerEvent,
    WorkerLifecycle,
)
from minidl.streams import Device, Stream
from minidl.tracing import device_clock, recorder
from minidl.tracing import events as ev
from minidl.tracing import functions as function_level
from minidl.tracing.device_stage import TracedStream
from minidl.tracing.recorder import Emit, TraceConfig, TraceError
from minidl.tracing.spans import batch_in_use
from minidl.transport.message import Envelope, rebuild
from minidl.transport.tensors import Reduced, TensorPickler

_feeding = threading.local()
"""What this thread is pickling or writing: `about`, the message's task and worker, and `emit`, its loader's."""

_recorded: dict[int, Emit] = {}
"""The loaders of the trace that this process records now."""

_live: weakref.WeakSet[TracedPorts] = weakref.WeakSet()
"""Ports of iterators that this process has made and not let go."""

_this_process = object()
"""Another one in a forked child; compared for every message, which would be four times dearer with os.getpid()."""


def _after_fork() -> None:
    global _this_process
    _this_process = object()


os.register_at_fork(after_in_child=_after_fork)


def _no_emit(*args: int) -> None: ...


def emit_of(loader: int) -> Emit:
    """The loader's `emit`, or one that does nothing where it belongs to no trace, or to one that has ended."""
    return _recorded.get(loader, _no_emit)


def _count(index: Any) -> int:
    return len(index) if isinstance(index, (list, tuple)) else 1


def _facts_of_index(index: Any) -> tuple[int, int, int]:
    """How many indices, the first of them, and a number for all of them and their order, the same in each process.

    -1 and 0 stand for the first and the number where the indices are no integers. Without an event for each sample,
    the number tells whether two epochs, or two ranks, had the same ones.
    """
    if not isinstance(index, (list, tuple)):
        return 1, index if isinstance(index, int) else -1, 0
    first = index[0] if index else -1
    if not isinstance(first, int):
        return len(index), -1, 0
    try:
        return len(index), first, hash(tuple(index)) if first >= 0 else 0
    except TypeError:
        return len(index), first, 0


def _outcome(data: Any) -> ev.Outcome:
    kind = type(data)
    if kind is WorkerExhausted:
        return ev.Outcome.EXHAUSTED
    return ev.Outcome.ERROR if kind is ExceptionWrapper or kind is RebuildFailure else ev.Outcome.DATA


def nbytes(data: Any) -> int:
    """Bytes of the tensors in a nest of lists, tuples and mappings."""
    if isinstance(data, torch.Tensor):
        return data.nbytes
    if isinstance(data, (list, tuple)):
        return sum(map(nbytes, data))
    return sum(map(nbytes, data.values())) if isinstance(data, dict) else 0


class TracedPorts(ports.Ports):
    """Ports of one iterator, which has the number `loader` in the trace."""

    def __init__(self, config: TraceConfig, loader: int) -> None:
        self.config = config
        self.loader = loader
        self.emit = _recorded[loader] = recorder.start(config).emitter(loader)
        self.decisions: TracedDispatcher | None = None
        self.sampling: TracedSampler | None = None
        self.workers: list[TracedProcess] = []
        self.pid = os.getpid()
        self.alone = False  # no workers: this process fetches
        self.pinned = False  # a pin thread reads the result queue
        self.simulated = False  # pinning is a pretence
        self.received = -1  # in a worker: the task that came last

    def __getstate__(self) -> tuple[TraceConfig, int]:
        return self.config, self.loader

    def __setstate__(self, state: tuple[TraceConfig, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # a spawned worker opens a recorder of its own

    # --- in the loader's process
    def opened(self, iterator: Any) -> None:
        pen = recorder.start(self.config)
        pen.role("loader", loader=self.loader)
        pen.describe("loader", loader=self.loader, **_facts(iterator))

    def sampler_iter(self, sampler: Iterable[Any]) -> Iterator[Any]:
        share = getattr(sampler, "sampler", sampler)
        numbers = [getattr(share, name, None) for name in ("epoch", "rank", "num_replicas")]
        if all(type(number) is int for number in numbers):
            self.emit(ev.SHARE, -1, -1, *numbers)
        self.sampling = TracedSampler(self, iter(sampler))
        return self.sampling

    def loader_lifecycle(self) -> LoaderLifecycle:
        return TracedLoaderLifecycle(self)

    def dispatcher(self, num_workers: int, prefetch_factor: int, in_order: bool) -> Dispatcher:
        self.decisions = TracedDispatcher(num_workers, prefetch_factor, in_order)
        self.decisions.ports = self
        return self.decisions

    def progress(self) -> Progress:
        self.alone = True
        return TracedProgress(self, -1)

    def index_queue(self, context: Any, worker_id: int) -> Any:
        return TracedIndexQueue(self, super().index_queue(context, worker_id), worker_id)

    def result_queue(self, context: Any) -> Any:
        return TracedResultQueue(self, super().result_queue(context))

    def ready_queue(self) -> Any:
        self.pinned = True
        return TracedReadyQueue(self, super().ready_queue())

    def workers_done_event(self) -> Any:
        return TracedDoneEvent(self, super().workers_done_event(), ev.DoneEvent.WORKERS)

    def pin_memory_thread_done_event(self) -> Any:
        return TracedDoneEvent(self, super().pin_memory_thread_done_event(), ev.DoneEvent.PIN_THREAD)

    def worker(self, context: Any, worker_id: int, target: Callable[..., None], args: tuple[Any, ...]) -> Any:
        process = TracedProcess(self, super().worker(context, worker_id, target, args), worker_id)
        self.workers.append(process)
        return process

    def pin_memory_thread(self, thread: threading.Thread) -> Any:
        return TracedThread(self, thread)

    def found_dead(self, what: str, worker_id: int, pid: int, exit_code: int | None) -> None:
        actor = {"worker": ev.Actor.WORKER, "pin thread": ev.Actor.PIN_THREAD, "loader": ev.Actor.LOADER}[what]
        self.emit(ev.FOUND_DEAD, -1, worker_id, actor, pid, exit_code or 0)

    def emit_gone(self) -> int:
        """Emit the ends of workers that have ended; how many have not."""
        return sum(process.emit_gone() for process in self.workers) if self.pid == os.getpid() else 0

    def let_go(self) -> None:
        """Hold nothing more that holds these ports: descriptors of ended workers would wait for the collector."""
        self.workers = [process for process in self.workers if not process.gone]
        self.decisions = self.sampling = None

    def timed_out(self, idx: int, worker_id: int, seconds: float) -> None:
        self.emit(ev.TIMED_OUT, idx, worker_id, int(seconds * 1e9))

    # --- messages
    def task(self, idx: int, worker_id: int, index: Any) -> Any:
        return TracedEnvelope(Task(idx, worker_id, index), self.loader)

    def result(self, idx: int, worker_id: int, data: Any) -> Any:
        if isinstance(data, ExceptionWrapper):
            text = recorder.start(self.config).string(data.last_line[:1000])
            position, index = self.fetching.at if self.fetching is not None else (-1, -1)
            self.emit(ev.TASK_ERROR, idx, worker_id, position, index, text)
        return TracedEnvelope(Result(idx, worker_id, data), self.loader)

    # --- in a worker
    fetching: TracedProgress | None = None

    def enter_worker(self, worker_id: int, num_workers: int, seed: int) -> None:
        recorder.start(self.config).role("worker", worker=worker_id, loader=self.loader)
        _watch_new_shared(self, worker_id)
        self.emit(ev.WORKER_READY, -1, worker_id, os.getpid(), os.getppid(), seed)
        if self.config.functions_min_us is not None:
            function_level.start(self.config.directory, self.config.functions_min_us, worker_id, self.loader)

    def worker_lifecycle(self, worker_id: int) -> WorkerLifecycle:
        return TracedWorkerLifecycle(self, worker_id)

    def worker_progress(self, board: ProgressBoard, worker_id: int) -> WorkerProgress:
        progress = TracedWorkerProgress(worker_id, board.row(worker_id))
        self.fetching = progress.watch = TracedProgress(self, worker_id)
        return progress

    # --- in the pin thread
    def pin_lifecycle(self) -> PinLifecycle:
        return TracedPinLifecycle(self)

    def pinning(self, pin_memory: Callable[[Any], Any], simulated: bool) -> Callable[[Result], Any]:
        self.simulated = simulated

        def pin(result: Result) -> Any:
            about = result.idx, result.worker_id
            self.emit(ev.PIN[0], *about, nbytes(result.data), int(simulated))
            pinned = None  # nothing, where pinning raises
            try:
                pinned = pin_memory(result.data)
            finally:
                self.emit(ev.PIN[1], *about, nbytes(pinned), int(simulated))
            return pinned

        return pin

    # --- in the device stage
    def device_stream(self, device: Device, prefetch: int, loader: Any) -> Stream:
        pen, clock = recorder.start(self.config), device_clock.clock_of(device, self.loader)
        stream = super().device_stream(device, prefetch, loader)
        if clock is None:
            return stream
        if self.sampling is None:  # not minidl's: nobody has described it yet
            pen.role("loader", loader=self.loader)
            pen.describe("loader", loader=self.loader, dataset=type(loader).__qualname__)
        pen.describe("device", loader=self.loader, device=device.name, prefetch=prefetch, simulated=device.simulated)
        return TracedStream(self, stream, device, prefetch, clock)


def _facts(iterator: Any) -> dict[str, Any]:
    """An iterator's parameters, for the trace's reader."""
    share = getattr(iterator._index_sampler, "sampler", iterator._index_sampler)
    return {
        "dataloader": _dataloader(iterator._index_sampler),
        "dataset_length": None if iterator._dataset_kind else _length(iterator._dataset),
        "dataset": type(iterator._dataset).__qualname__,
        "dataset_kind": "iterable" if iterator._dataset_kind else "map",
        "num_workers": iterator._num_workers,
        "prefetch_factor": iterator._prefetch_factor,
        "in_order": iterator._in_order,
        "persistent_workers": iterator._persistent_workers,
        "pin_memory": iterator._pin_memory,
        "pin_memory_device": iterator._pin_memory_device,
        "timeout_s": iterator._timeout,
        "batch_size": getattr(iterator._index_sampler, "batch_size", None),
        "drop_last": iterator._drop_last,
        "sampler": type(share).__qualname__,
        "collate_fn": getattr(iterator._collate_fn, "__qualname__", repr(iterator._collate_fn)),
        **{
            f"sampler_{name}": value
            for name in ("shuffle", "seed", "drop_last")
            if isinstance(value := getattr(share, name, None), int)
        },
        **_place_in_group(),
    }


_dataloaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _dataloader(index_sampler: Any) -> int:
    """A number that the iterators of one DataLoader have in common, by its index sampler; 0 = unknown."""
    try:
        return _dataloaders.setdefault(index_sampler, len(_dataloaders) + 1)
    except TypeError:
        return 0


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # whatever the user's own __len__ raises: it was not asked for by the user
        return None


def _place_in_group() -> dict[str, int]:
    """This process's rank, where it is in a process group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    return {"rank": torch.distributed.get_rank(), "world_size": torch.distributed.get_world_size()}


# --- The pure classes, watched ----------------------------------------------------------------------------------------
class TracedDispatcher(Dispatcher):
    """Emits what the dispatcher decided. `delivered` is the last step that yields a batch.

    Here and in other places that a batch comes through, the base class is called by its name: super() costs 0.1
    microseconds more in Python 3.11.
    """

    ports: TracedPorts
    delivered: Deliver | None = None

    def reset(self) -> None:
        super().reset()
        self.delivered = None

    def assign(self, index: Any) -> Assignment | None:
        given = Dispatcher.assign(self, index)
        if given is not None:
            self.ports.emit(ev.TASK_ASSIGNED, given.idx, given.worker_id, self.send_idx, self.tasks_outstanding)
        return given

    def next_step(self) -> Deliver | Wait | Signal:
        before = self.rcvd_idx
        step = Dispatcher.next_step(self)
        if isinstance(step, Deliver):
            self.delivered = step
            self.ports.emit(ev.REORDER_POP, step.idx, step.worker_id, self.rcvd_idx, self.reorder_depth)
        if self.rcvd_idx != before:
            self.ports.emit(ev.RCVD_ADVANCE, -1, -1, self.rcvd_idx, self.tasks_outstanding)
        return step

    def receive(self, idx: int, data: Any) -> Deliver | Signal:
        before = self.rcvd_idx
        step = Dispatcher.receive(self, idx, data)
        if step is STORED:
            worker_id = self.task_info[idx].worker_id
            self.ports.emit(ev.REORDER_STORE, idx, worker_id, self.rcvd_idx, self.reorder_depth)
        elif isinstance(step, Deliver):
            self.delivered = step
            if self.rcvd_idx != before:
                self.ports.emit(ev.RCVD_ADVANCE, -1, -1, self.rcvd_idx, self.tasks_outstanding)
        return step

    def exhausted(self, idx: int, worker_id: int) -> None:
        super().exhausted(idx, worker_id)
        self.ports.emit(ev.WORKER_EXHAUSTED, idx, worker_id, sum(self.workers_status))


class TracedLoaderLifecycle(LoaderLifecycle):
    """Emits epochs, the time in `__next__`, the consumer's time, and the shutdown."""

    def __init__(self, ports: TracedPorts) -> None:
        super().__init__()
        self.ports = ports
        self.epoch = -1
        self.yielded = 0
        self.open_epoch = self.open_consumer = self.open_next = False
        self.task = -1  # yielded last

    def handle(self, event: LoaderEvent) -> LoaderState:
        before = self.state
        if self.open_consumer and (event is LoaderEvent.NEXT or event is LoaderEvent.SHUT_DOWN):
            self._end_consumer()
        after = LoaderLifecycle.handle(self, event)
        if before is not LoaderState.CLOSED:
            watcher = self.WATCHERS.get(event)
            if watcher is not None:
                watcher(self)
        elif event is LoaderEvent.RAISE and self.open_next:  # close() was called while next() ran
            self._end_fetch_alone(ev.Outcome.EXHAUSTED)
            self._end_next(ev.Outcome.EXHAUSTED)
        return after

    def _epoch_begin(self) -> None:
        self.epoch += 1
        self.yielded = 0
        self.task = -1
        self.open_epoch = True
        decisions = self.ports.decisions
        workers, prefetch = (0, 0) if decisions is None else (decisions.num_workers, decisions.prefetch_factor)
        self.ports.emit(ev.EPOCH[0], x=self.epoch, y=workers, z=prefetch)

    def _end_epoch(self, ending: ev.Ending) -> None:
        if self.open_epoch:
            self.open_epoch = False
            self.ports.emit(ev.EPOCH[1], x=self.epoch, y=self.yielded, z=ending)

    def _begin_consumer(self, task: int = -1) -> None:
        self.open_consumer = True
        self.ports.emit(ev.CONSUMER[0], task, x=self.yielded)

    def _end_consumer(self) -> None:
        if self.open_consumer:
            self.open_consumer = False
            self.ports.emit(ev.CONSUMER[1], self.task)

    def _delivered(self) -> Deliver | None:
        return None if self.ports.decisions is None else self.ports.decisions.delivered

    def _next(self) -> None:
        decisions, sampling = self.ports.decisions, self.ports.sampling
        wanted = decisions.rcvd_idx if decisions is not None else sampling.task if sampling is not None else -1
        self.open_next = True
        self.ports.emit(ev.NEXT[0], wanted, -1, wanted)

    def _end_next(self, outcome: ev.Outcome, task: int = -1) -> None:
        self.open_next = False
        self.ports.emit(ev.NEXT[1], task, -1, self.yielded, outcome)

    def _yield(self) -> None:
        self.yielded += 1
        self._handed_out(ev.Outcome.DATA)
        self.open_consumer = True
        self.ports.emit(ev.CONSUMER[0], self.task, -1, self.yielded)

    def _raise(self) -> None:
        """The error of a task is handed out like a batch; a timeout or a death belongs to no task."""
        step = self._delivered()
        of_task = self.ports.alone or (step is not None and isinstance(step.data, ExceptionWrapper))
        if of_task:
            self._handed_out(ev.Outcome.ERROR)
        else:
            self.ports.emit_gone()  # the handler of SIGCHLD may have raised, before any liveness check
            self._end_next(ev.Outcome.ERROR)
        self._begin_consumer()

    def _handed_out(self, outcome: ev.Outcome) -> None:
        ports = self.ports
        worker = -1
        if ports.decisions is None:
            self._end_fetch_alone(outcome)
            self.task = -1 if ports.sampling is None else ports.sampling.task - 1
        elif (step := ports.decisions.delivered) is not None:
            self.task, worker = step.idx, step.worker_id
            step.data = None  # the tracer must not keep a batch alive that the loader has let go
        self.open_next = False
        ports.emit(ev.YIELD, self.task, worker, outcome, self.yielded)
        ports.emit(ev.NEXT[1], self.task, -1, self.yielded, outcome)
        batch_in_use.set(ports.loader, self.task)

    def _end_fetch_alone(self, outcome: ev.Outcome) -> None:
        if self.ports.alone and self.ports.fetching is not None:
            self.ports.fetching.end(outcome)

    def _epoch_end(self) -> None:
        self._end_fetch_alone(ev.Outcome.EXHAUSTED)
        self._end_next(ev.Outcome.EXHAUSTED)
        self._end_epoch(ev.Ending.EXHAUSTED)

    def _resume(self) -> None:
        self._end_consumer()
        self._end_epoch(ev.Ending.CLOSED)

    def _shut_down(self) -> None:
        self._end_epoch(ev.Ending.CLOSED)
        self.ports.emit(ev.SHUTDOWN[0])

    def _terminated(self) -> None:
        self.ports.emit(ev.SHUTDOWN[1], x=self.ports.emit_gone())
        self.ports.let_go()

    WATCHERS: ClassVar = {
        LoaderEvent.EPOCH_BEGIN: _epoch_begin,
        LoaderEvent.PRIMED: _begin_consumer,
        LoaderEvent.NEXT: _next,
        LoaderEvent.YIELD: _yield,
        LoaderEvent.RAISE: _raise,
        LoaderEvent.EPOCH_END: _epoch_end,
        LoaderEvent.RESUME: _resume,
        LoaderEvent.SHUT_DOWN: _shut_down,
        LoaderEvent.TERMINATED: _terminated,
    }


class TracedWorkerLifecycle(WorkerLifecycle):
    """Emits what a worker skips and why it leaves."""

    ENDINGS: ClassVar = {
        WorkerEvent.SENTINEL: ev.Ending.SENTINEL,
        WorkerEvent.SENTINEL_WHEN_DONE: ev.Ending.SENTINEL,
        WorkerEvent.PARENT_DIED: ev.Ending.ORPHANED,
        WorkerEvent.INTERRUPTED: ev.Ending.INTERRUPTED,
    }

    def __init__(self, ports: TracedPorts, worker_id: int) -> None:
        super().__init__(worker_id)
        self.ports = ports

    def decide(self, event: WorkerEvent) -> Action:
        action = super().decide(event)
        if event is WorkerEvent.TASK_WHEN_DONE:
            seen = ev.DoneEvent.WORKERS
            self.ports.emit(ev.DONE_EVENT_SEEN, self.ports.received, self.worker_id, seen)
        elif event in self.ENDINGS:
            self.ports.emit(ev.WORKER_EXIT, -1, self.worker_id, self.ENDINGS[event])
        return action


class TracedPinLifecycle(PinLifecycle):
    """Emits the pin thread's beginning and end."""

    def __init__(self, ports: TracedPorts) -> None:
        super().__init__()
        self.ports = ports

    def handle(self, event: PinEvent) -> PinState:
        after = super().handle(event)
        if event is PinEvent.READY:
            self.ports.emit(ev.PIN_START, x=int(self.ports.simulated))
        elif event in (PinEvent.DONE, PinEvent.DIED):
            ending = ev.Ending.SENTINEL if event is PinEvent.DONE else ev.Ending.ERROR
            self.ports.emit(ev.PIN_EXIT, x=ending)
        return after


# --- Sampling and fetching --------------------------------------------------------------------------------------------
class TracedSampler:
    """The sampler's iterator; `task` is the task that it is asked for next where there is no dispatcher."""

    def __init__(self, ports: TracedPorts, inner: Iterator[Any]) -> None:
        self.ports = ports
        self.inner = inner
        self.task = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        ports = self.ports
        task = ports.decisions.send_idx if ports.decisions is not None else self.task
        ports.emit(ev.SAMPLER_NEXT[0], task)
        count, first, digest = 0, -1, 0
        try:
            index = next(self.inner)
            count, first, digest = _facts_of_index(index)
        finally:
            ports.emit(ev.SAMPLER_NEXT[1], task, -1, count, first, digest)
        self.task += 1
        if ports.alone and ports.fetching is not None:
            ports.fetching.begin(task, index)
        return index


class TracedProgress:
    """A `fetch.Progress` that emits fetch, samples and collation; each step closes the one before it."""

    def __init__(self, ports: TracedPorts, worker_id: int) -> None:
        self.ports = ports
        self.worker_id = worker_id
        self.task = -1
        self.open: tuple[int, int, int] | None = None  # code of the end to emit, with its x and y
        self.fetching = False
        self.at = -1, -1  # position and index of the sample asked for last
        ports.fetching = self

    def _end_step(self) -> None:
        if self.open is not None:
            code, x, y = self.open
            self.open = None
            self.ports.emit(code, self.task, self.worker_id, x, y)

    def begin(self, task: int, index: Any) -> None:
        """A task is taken up."""
        self.task, self.fetching, self.at = task, True, (-1, -1)
        self.ports.emit(ev.FETCH[0], task, self.worker_id, _count(index))

    def samples(self, count: int) -> None:
        self.sample(-1, -1)

    def sample(self, position: int, index: Any) -> None:
        self._end_step()
        key = index if isinstance(index, int) else -1
        self.at, self.open = (position, key), (ev.SAMPLE[1], position, key)
        self.ports.emit(ev.SAMPLE[0], self.task, self.worker_id, position, key)

    def collate(self, count: int) -> None:
        self._end_step()
        self.open = ev.COLLATE[1], 0, 0
        self.ports.emit(ev.COLLATE[0], self.task, self.worker_id, count)

    def end(self, outcome: int) -> None:
        """The task's fetch has ended."""
        if self.fetching:
            self._end_step()
            self.fetching = False
            self.ports.emit(ev.FETCH[1], self.task, self.worker_id, outcome)


class TracedWorkerProgress(WorkerProgress):
    """Writes to the board as ever, and tells `watch`."""

    watch: TracedProgress

    def begin(self, task: int, index: Any) -> None:
        super().begin(task, index)
        self.watch.begin(task, index)

    def samples(self, count: int) -> None:
        super().samples(count)
        self.watch.samples(count)

    def sample(self, position: int, index: Any) -> None:
        WorkerProgress.sample(self, position, index)
        self.watch.sample(position, index)

    def collate(self, count: int) -> None:
        super().collate(count)
        self.watch.collate(count)

    def end(self, outcome: int) -> None:
        self.watch.end(outcome)
        super().end(outcome)


def _watch_new_shared(ports: TracedPorts, worker_id: int) -> None:
    """In a worker: emit each segment that collate makes, ours or torch's, since both ask UntypedStorage for it."""
    make: Callable[..., Any] = torch.UntypedStorage._new_shared

    def _new_shared(cls: type, size: int, *args: Any, **kwargs: Any) -> Any:
        storage = make(size, *args, **kwargs)
        task = ports.fetching.task if ports.fetching is not None else -1
        place, reason = ev.Place.COLLATE, ev.Reason.COLLATE_SHORTCUT
        ports.emit(ev.SHM_ALLOC, task, worker_id, storage.nbytes(), place, reason)
        return storage

    torch.UntypedStorage._new_shared = classmethod(_new_shared)  # type: ignore[assignment]


# --- Messages ---------------------------------------------------------------------------------------------------------
class TracedPickler(TensorPickler):
    """Emits the copies into shared memory that happen while a message is pickled."""

    def copy_storage(self, storage: torch.UntypedStorage) -> Reduced:
        emit, about, size = _feeding.emit, _feeding.about, storage.nbytes()
        emit(ev.SHM_COPY[0], *about, size, ev.Place.FEEDER, ev.Reason.NOT_SHARED_YET)
        try:
            return super().copy_storage(storage)
        finally:
            emit(ev.SHM_COPY[1], *about, size)


class TracedEnvelope(Envelope):
    """Emits a result's pickling, in the feeder thread, and its rebuilding, in the reader's."""

    pickler = TracedPickler

    def __init__(self, message: Task | Result, loader: int) -> None:
        self.message = message
        self.loader = loader

    def __reduce__(self) -> tuple[Any, ...]:
        message = self.message
        about = _feeding.about = (message.idx, message.worker_id)
        emit = _feeding.emit = emit_of(self.loader)
        if isinstance(message, Task):
            return super().__reduce__()
        emit(ev.RESULT_PICKLE[0], *about)
        payload, pickler = self.payload()
        emit(ev.RESULT_PICKLE[1], *about, len(payload), pickler.tensors, pickler.copied_bytes)
        return load, (self.loader, *about, payload, pickler.tensors, pickler.shared_bytes)


def load(loader: int, idx: int, worker_id: int, payload: bytes, tensors: int, shared_bytes: int) -> Result:
    """Rebuild a result, with its events (`transport.message.load`)."""
    emit = emit_of(loader)
    emit(ev.RESULT_REBUILD[0], idx, worker_id, len(payload))
    try:
        return Result(idx, worker_id, rebuild(payload))
    finally:  # a Ctrl-C may come while it is rebuilt
        emit(ev.RESULT_REBUILD[1], idx, worker_id, tensors, shared_bytes)


# --- Queues, events, processes, threads -------------------------------------------------------------------------------
class _Proxy:
    """Passes on whatever it does not watch. Pickles as the thing and the ports."""

    def __init__(self, ports: TracedPorts, inner: Any) -> None:
        self.ports = ports
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return repr(self.inner)


class _TracedQueue(_Proxy):
    """A queue of one of the three kinds."""

    queue_id: ev.QueueId
    get_span: tuple[int, int]
    write: tuple[int, int] | None = None
    worker_id = -1
    _hooked_in: object = None  # the process: a forked child's queue has new pipe methods

    def _hook(self) -> None:
        """Watch the pipe under a multiprocessing queue; must happen before the feeder thread starts."""
        self._hooked_in = _this_process
        send, receive = getattr(self.inner, "_send_bytes", None), getattr(self.inner, "_recv_bytes", None)
        if send is not None and self.write is not None:
            self.inner._send_bytes = self._watched_send(send, self.write)
        if receive is not None and self.queue_id is ev.QueueId.RESULT:
            self.inner._recv_bytes = self._watched_receive(receive)

    # What these two give must not hold the queue, which holds them: its descriptors would wait for the collector.
    def _watched_send(self, send: Callable[[Any], None], write: tuple[int, int]) -> Callable[[Any], None]:
        emit, unknown = self.ports.emit, (-1, self.worker_id)

        def _send_bytes(data: Any) -> None:
            about = getattr(_feeding, "about", unknown)
            emit(write[0], *about, len(data))
            send(data)
            emit(write[1], *about, len(data))
            _feeding.about = unknown  # a sentinel has no envelope to say what it is

        return _send_bytes

    def _watched_receive(self, receive: Callable[[], bytes]) -> Callable[[], bytes]:
        emit = self.ports.emit

        def _recv_bytes() -> bytes:
            data = receive()
            emit(ev.RESULT_READ, -1, -1, len(data))
            return data

        return _recv_bytes

    def put(self, message: Any) -> None:
        if self._hooked_in is not _this_process:
            self._hook()
        self.emit_put(message)
        self.inner.put(message)

    def emit_put(self, message: Any) -> None:
        """Emit that `message` is about to enter the queue."""
        if isinstance(message, Sentinel):
            self.ports.emit(ev.SENTINEL_PUT, -1, self.worker_id, self.queue_id)

    def get(self, timeout: float | None = None) -> Any:
        """Get with a span around it; the end says what came."""
        if self._hooked_in is not _this_process:
            self._hook()
        emit, (begin, end) = self.ports.emit, self.get_span
        task, worker = self.wanted()
        emit(begin, task, worker, 0 if timeout is None else int(timeout * 1e9))
        try:
            message = self.inner.get(timeout=timeout)
        except BaseException:
            emit(end, -1, worker, ev.Message.EMPTY)
            raise
        self.emit_got(message)
        return message

    def wanted(self) -> tuple[int, int]:
        """Task and worker that the loader needs next; in order, it can yield nothing else."""
        decisions = self.ports.decisions
        info = None if decisions is None else decisions.task_info.get(decisions.rcvd_idx)
        return (-1, -1) if info is None or decisions is None else (decisions.rcvd_idx, info.worker_id)

    def emit_got(self, message: Any) -> None:
        """Emit what has come."""
        end = self.get_span[1]
        if isinstance(message, Result):
            self.ports.emit(end, message.idx, message.worker_id, ev.Message.RESULT, _outcome(message.data))
        elif isinstance(message, ResumeIteration):
            self.ports.emit(end, -1, message.worker_id, ev.Message.RESUME)
        else:
            self.ports.emit(end, -1, -1, ev.Message.SENTINEL)
            self.ports.emit(ev.SENTINEL_GET, -1, self.worker_id, self.queue_id)

    def cancel_join_thread(self) -> None:
        self.ports.emit(ev.CANCEL_JOIN_THREAD, -1, self.worker_id, self.queue_id)
        self.inner.cancel_join_thread()

    def close(self) -> None:
        self.ports.emit(ev.QUEUE_CLOSE, -1, self.worker_id, self.queue_id)
        self.inner.close()


class TracedIndexQueue(_TracedQueue):
    """The loader puts, one worker gets."""

    queue_id = ev.QueueId.INDEX
    get_span = ev.INDEX_GET
    write = ev.INDEX_WRITE

    def __init__(self, ports: TracedPorts, inner: Any, worker_id: int) -> None:
        super().__init__(ports, inner)
        self.worker_id = worker_id

    def emit_put(self, message: Any) -> None:
        if isinstance(message, Envelope):
            task: Any = message.message
            self.ports.emit(ev.INDEX_PUT, task.idx, task.worker_id, _count(task.index))
        elif isinstance(message, ResumeIteration):
            self.ports.emit(ev.RESUME_PUT, -1, self.worker_id, message.epoch)
        else:
            super().emit_put(message)

    def wanted(self) -> tuple[int, int]:
        return -1, self.worker_id

    def emit_got(self, message: Any) -> None:
        end = self.get_span[1]
        if isinstance(message, Task):
            self.ports.received = message.idx
            self.ports.emit(end, message.idx, self.worker_id, ev.Message.TASK, _count(message.index))
        elif isinstance(message, Sentinel):
            self.ports.emit(end, -1, self.worker_id, ev.Message.SENTINEL)
            self.ports.emit(ev.SENTINEL_GET, -1, self.worker_id, self.queue_id)
        else:
            super().emit_got(message)


class TracedResultQueue(_TracedQueue):
    """Every worker puts; the loader gets, or the pin thread where there is one."""

    queue_id = ev.QueueId.RESULT
    get_span = ev.RESULT_GET
    write = ev.RESULT_WRITE

    def emit_put(self, message: Any) -> None:
        if isinstance(message, Envelope):
            result: Any = message.message
            self.ports.emit(ev.RESULT_PUT, result.idx, result.worker_id, _outcome(result.data))
        elif isinstance(message, ResumeIteration):
            self.ports.emit(ev.RESUME_ACK, -1, message.worker_id, message.epoch)
        else:
            super().emit_put(message)

    def wanted(self) -> tuple[int, int]:
        return (-1, -1) if self.ports.pinned else super().wanted()  # the pin thread takes what comes


class TracedReadyQueue(_TracedQueue):
    """The pin thread puts, the loader gets."""

    queue_id = ev.QueueId.READY
    get_span = ev.READY_GET

    def emit_put(self, message: Any) -> None:
        if isinstance(message, Result):
            self.ports.emit(ev.READY_PUT, message.idx, message.worker_id, _outcome(message.data))
        else:
            super().emit_put(message)


class TracedDoneEvent(_Proxy):
    """A done event."""

    def __init__(self, ports: TracedPorts, inner: Any, which: ev.DoneEvent) -> None:
        super().__init__(ports, inner)
        self.which = which

    def set(self) -> None:
        self.ports.emit(ev.DONE_EVENT_SET, x=self.which)
        self.inner.set()


class TracedProcess(_Proxy):
    """A worker's process, as the loader handles it."""

    def __init__(self, ports: TracedPorts, inner: Any, worker_id: int) -> None:
        super().__init__(ports, inner)
        self.worker_id = worker_id
        self.gone = False

    def start(self) -> None:
        self.ports.emit(ev.WORKER_START[0], -1, self.worker_id)
        try:
            self.inner.start()
        finally:
            self.ports.emit(ev.WORKER_START[1], -1, self.worker_id, self.inner.pid or 0)

    def join(self, timeout: float | None = None) -> None:
        self.ports.emit(ev.JOIN[0], -1, self.worker_id, ev.Actor.WORKER, int((timeout or 0) * 1e9))
        try:
            self.inner.join(timeout)
        finally:
            self.ports.emit(ev.JOIN[1], -1, self.worker_id, ev.Actor.WORKER, int(not self.inner.is_alive()))

    def terminate(self) -> None:
        self.ports.emit(ev.TERMINATE, -1, self.worker_id, self.inner.pid, signal.SIGTERM)
        self.inner.terminate()

    def kill(self) -> None:
        self.ports.emit(ev.TERMINATE, -1, self.worker_id, self.inner.pid, signal.SIGKILL)
        self.inner.kill()

    def emit_gone(self) -> bool:
        """Emit, once, how the process ended; True where it has not."""
        if self.inner.pid is None or self.gone:
            return False
        code = self.inner.exitcode
        if code is not None:
            self.gone = True
            self.ports.emit(ev.WORKER_GONE, -1, self.worker_id, self.inner.pid, code)
        return code is None


class TracedThread(_Proxy):
    """The pin-memory thread, as the loader handles it."""

    def join(self, timeout: float | None = None) -> None:
        self.ports.emit(ev.JOIN[0], x=ev.Actor.PIN_THREAD, y=int((timeout or 0) * 1e9))
        try:
            self.inner.join(timeout)
        finally:
            self.ports.emit(ev.JOIN[1], x=ev.Actor.PIN_THREAD, y=int(not self.inner.is_alive()))


# --- On and off -------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def trace(
    directory: str | os.PathLike[str],
    *,
    detail: str = "sample",
    ring_bytes: int | None = recorder.RING_BYTES,
    functions: bool = False,
    functions_main: bool = False,
    functions_min_us: float = function_level.DEFAULT_MIN_US,
) -> Iterator[Path]:
    """Record every loader whose iterator is made inside the `with` block into `directory`, which is made for it.

    detail: "sample" has an event for each sample, "batch" has not. ring_bytes: keep only the newest events of each
    process, in about so many bytes of disk (64 MiB hold a million); None keeps all. functions: in workers, also record
    each function that takes `functions_min_us` microseconds or more, with viztracer; functions_main: also in this
    process. Gives the directory's path. Raises TraceError where the directory holds a trace already, where this process
    records one, or where viztracer is missing.

    Workers go on recording until they end; an iterator that outlives the block is recorded up to the block's end.
    """
    if recorder.active() is not None:
        raise TraceError(f"this process already records to {recorder.active()!r}: end that trace first")
    if functions or functions_main:
        function_level.require()
    path = recorder.create(directory, detail=detail, ring_bytes=ring_bytes)
    pen = recorder.start(TraceConfig(str(path), detail, ring_bytes, functions_min_us if functions else None))
    undo = ports.use(lambda: _new_ports(pen.config))
    own_functions = function_level.start(str(path), functions_min_us) if functions_main else None
    finalizing = sys.is_finalizing  # where nobody closes this, the interpreter does, with this module's names gone
    try:
        yield path
    finally:
        if not finalizing():
            if own_functions is not None:
                own_functions.finish()
            undo()
            _end(pen)


def _end(pen: recorder.Recorder) -> None:
    for loader in tuple(_live):
        loader.emit_gone()
    device_clock.flush()
    pen.describe("trace_end", monotonic_ns=time.monotonic_ns(), realtime_ns=time.time_ns())
    recorder.stop()
    _recorded.clear()


def _new_ports(config: TraceConfig) -> TracedPorts:
    ports = TracedPorts(config, number_loader(config.directory))
    _live.add(ports)
    return ports


def number_loader(directory: str) -> int:
    """A number for a loader of the trace in `directory`.

    Not that of an iterator of an earlier trace that still has workers: their messages come to this process, too.
    """
    while True:
        number = recorder.number_loader(directory)
        if not any(ports.loader == number and ports.workers for ports in tuple(_live)):
            return number


def trace_from_environment() -> None:
    """Where MINIDL_TRACE names a directory, record every loader of this program from the first iterator on.

    MINIDL_TRACE_DETAIL is "sample" (default) or "batch"; MINIDL_TRACE_RING is "full", or the MiB that a process's file
    may grow to (default 64). A rank of a distributed run records into DIRECTORY/rankN. A
    directory that holds a trace already is left alone: the next free DIRECTORY.2, DIRECTORY.3, ... is taken. A failure
    is said on stderr, and the program runs without a trace.
    """
    if os.environ.get("MINIDL_TRACE"):
        ports.use(_ports_from_environment)


def _ports_from_environment() -> ports.Ports:
    pen = _pen_from_environment()
    return ports.Ports() if pen is None else _new_ports(pen.config)


def _pen_from_environment() -> recorder.Recorder | None:
    pen = recorder.active()
    if pen is None:
        try:
            pen = recorder.start(_config_from_environment())
        except (OSError, TraceError, ValueError) as error:
            print(f"minidl: MINIDL_TRACE: no trace is recorded: {error}", file=sys.stderr)
            ports.use(ports.Ports)
            return None
        print(f"minidl: recording to {pen.config.directory}", file=sys.stderr)
    return pen


def pen() -> recorder.Recorder | None:
    """This process's recorder, begun where MINIDL_TRACE asks for a trace that has not begun; None without a trace."""
    return recorder.active() or (_pen_from_environment() if os.environ.get("MINIDL_TRACE") else None)


def _config_from_environment() -> TraceConfig:
    base = os.environ["MINIDL_TRACE"]
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        base = os.path.join(base, f"rank{os.environ.get('RANK', '0')}")
    detail, ring_bytes = os.environ.get("MINIDL_TRACE_DETAIL", "sample"), _ring_from_environment()
    for number in range(1, 1000):
        config = TraceConfig(base if number == 1 else f"{base}.{number}", detail, ring_bytes)
        try:
            recorder.create(config.directory, detail=detail, ring_bytes=ring_bytes)
            return config
        except TraceError as error:
            if error.__cause__ is not None:  # not taken, but impossible, and so would be the next
                raise
    raise TraceError(f"{base} and its numbered successors all hold traces: delete some, or name another directory")


def _ring_from_environment() -> int | None:
    text = os.environ.get("MINIDL_TRACE_RING", "")
    if text == "full":
        return None
    if text and not (text.isdecimal() and int(text)):
        raise ValueError(f"MINIDL_TRACE_RING is 'full' or a whole number of MiB from 1, not {text!r}")
    return int(text) << 20 if text else recorder.RING_BYTES
