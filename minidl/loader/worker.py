"""A worker process: receive indices, fetch, send the batch; until the sentinel, or until no process reads its results.

`_worker_loop` is what the process runs; what to do about each message is decided by `protocol.WorkerLifecycle`.
Article 1 §2.4.5 and article 4 §shutdown; upstream: `torch.utils.data._utils.worker`.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.random  # now: NumPy imports it when it is used first, which would be in each forked worker
import torch
import torch.multiprocessing
import torch.utils.data._utils.worker as torch_worker
from torch._C import _set_worker_signal_handlers

from minidl.data import worker_info
from minidl.data.fetch import _BaseDatasetFetcher, _DatasetKind
from minidl.data.worker_info import WorkerInfo
from minidl.loader.driver import MP_STATUS_CHECK_INTERVAL
from minidl.loader.ports import Fetching, FoundDead, Ports, WorkerEntered
from minidl.loader.progress import ProgressBoard
from minidl.loader.protocol import Action, WorkerEvent, WorkerLifecycle
from minidl.wire import signal_handling
from minidl.wire.errors import ExceptionWrapper
from minidl.wire.message import SentPayload, WorkerPayload
from minidl.wire.messages import RebuildFailure, Result, ResumeIteration, Sentinel, Task, WorkerExhausted
from minidl.wire.tensors import remove_unsized


class Users(NamedTuple):
    """What the user has given to a worker."""

    dataset: Any = None
    collate_fn: Any = None
    worker_init_fn: Callable[[int], None] | None = None


@dataclass(frozen=True)
class WorkerSpec:
    """A worker's arguments. users: holds a `Users`; manager_pid: the loader's process; None if a fork server starts the
    worker."""

    worker_id: int
    num_workers: int
    dataset_kind: int
    users: WorkerPayload | SentPayload
    auto_collation: bool
    drop_last: bool
    base_seed: int
    index_queue: Any
    result_queue: Any
    done_event: Any
    board: ProgressBoard
    ports: Ports
    manager_pid: int | None
    fetching: Fetching
    method: str = "process"

    @property
    def seed(self) -> int:
        """The worker's own seed for `random` and torch."""
        return self.base_seed + self.worker_id

    @property
    def where(self) -> str:
        """How errors name this worker."""
        return f"in DataLoader worker {self.method} {self.worker_id}"


class ManagerWatchdog:
    """Tells a worker whether the loader's process still lives: an orphan has another parent.

    manager_pid None: the parent may be a fork server, which lives on for as long as any worker holds its pipe. So the
    worker also checks that the loader still holds the other end of the worker's own pipe.
    """

    def __init__(self, manager_pid: int | None = None) -> None:
        self._parent_pid = os.getppid() if manager_pid is None else manager_pid
        self._loader = multiprocessing.parent_process() if manager_pid is None else None
        self.manager_pid = (self._loader.pid if self._loader is not None else None) or self._parent_pid
        self.manager_dead = False

    def is_alive(self) -> bool:
        """Whether the loader's process is still there; once False, always False."""
        orphaned = os.getppid() != self._parent_pid or (self._loader is not None and not self._loader.is_alive())
        self.manager_dead = self.manager_dead or orphaned
        return not self.manager_dead


def _end_orphan(watchdog: ManagerWatchdog) -> None:
    """End this process some time after the loader's, if it is still here: its dataset may be in a call without end.

    Runs in a thread, so a call in C that keeps the GIL delays it. PR_SET_PDEATHSIG needs no thread, but it ends the
    worker as soon as the thread that started the worker ends.
    """
    while watchdog.is_alive():
        time.sleep(MP_STATUS_CHECK_INTERVAL)
    time.sleep(2 * MP_STATUS_CHECK_INTERVAL)  # until then, `_Worker.run` leaves as it should
    os._exit(1)


def numpy_seed(base_seed: int, worker_id: int) -> list[int]:
    """Four 32-bit words for `numpy.random.seed`, from NumPy's SeedSequence of (worker_id, base_seed).

    NumPy and `random` use the same generator. With the same seed they could return the same numbers.
    """
    return [int(word) for word in numpy.random.SeedSequence((worker_id, base_seed)).generate_state(4)]


def _seed(spec: WorkerSpec) -> None:
    random.seed(spec.seed)
    torch.manual_seed(spec.seed)
    numpy.random.seed(numpy_seed(spec.base_seed, spec.worker_id))


def _publish_worker_info(spec: WorkerSpec, dataset: Any) -> None:
    """Let `get_worker_info` answer, ours and torch's: users' sharding code may call either."""
    info = WorkerInfo(id=spec.worker_id, num_workers=spec.num_workers, seed=spec.seed, dataset=dataset)
    worker_info._worker_info = info
    torch_worker._worker_info = info  # type: ignore[assignment]  # the same fields under the same names


class _Worker:
    """A worker: its state between two messages, and what it does about each."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.watchdog = self.watch()
        self.lifecycle = spec.ports.decider(WorkerLifecycle, spec.worker_id)
        self.progress = spec.ports.worker_progress(spec.board, spec.worker_id)
        self.fetcher: _BaseDatasetFetcher | None = None
        self.init_exception: ExceptionWrapper | None = None
        self.unusable: ExceptionWrapper | None = None  # why there is no dataset
        self.lacks = ""  # why there is no fetcher, once that was said
        self.epoch, self.last = 0, -1  # the epoch, and the last task in it
        self.users = Users()

    def watch(self) -> ManagerWatchdog:
        """What tells whether the loader's process lives, and ends this one some time after it."""
        watchdog = ManagerWatchdog(self.spec.manager_pid)
        threading.Thread(target=_end_orphan, args=(watchdog,), name="end_orphan", daemon=True).start()
        return watchdog

    def unpack(self) -> None:
        """Unpickle what the user has given, which imports modules. If that fails, each task says so."""
        try:
            self.users = self.spec.users.unpack()
        except Exception as error:
            self.unusable = ExceptionWrapper(error, f"{self.spec.where} while it unpickled its dataset")

    def make_fetcher(self) -> None:
        """Make a fetcher for a new epoch. If that fails (an iterable's __iter__ raises, say), the next task says so."""
        self.progress.opening()
        if self.unusable is not None:
            return
        self.fetcher = None  # if the new one fails, the old one would go on with the old epoch's samples
        try:
            self.fetcher = self.spec.fetching.open(self.users.dataset, self.create_fetcher)
        except Exception as error:
            self.init_exception = ExceptionWrapper(error, self.spec.where)

    def create_fetcher(self) -> _BaseDatasetFetcher:
        """A fetcher of the whole dataset."""
        spec, users = self.spec, self.users
        options = users.dataset, spec.auto_collation, users.collate_fn, spec.drop_last, self.progress
        return _DatasetKind.create_fetcher(spec.dataset_kind, *options)

    def initialise(self) -> None:
        """Run worker_init_fn and make the first fetcher."""
        try:
            if self.users.worker_init_fn is not None:
                self.progress.initialising()
                self.users.worker_init_fn(self.spec.worker_id)
        except Exception as error:
            self.init_exception = ExceptionWrapper(error, self.spec.where)
        else:
            self.make_fetcher()

    def fetch(self, task: Task) -> Any:
        """The task's batch, or what is sent in its place: an ExceptionWrapper or a WorkerExhausted."""
        if self.unusable is not None:
            return self.unusable
        if self.init_exception is not None:
            data, self.init_exception = self.init_exception, None
            self.lacks = data.last_line
            return data
        if isinstance(task.index, ExceptionWrapper):  # the task itself could not be pickled
            return task.index
        if isinstance(task.index, RebuildFailure):
            where = f"{self.spec.where} while it unpickled a task's indices"
            return ExceptionWrapper(task.index.error, where, f"Task {task.idx}.")
        try:
            if self.fetcher is None:
                raise RuntimeError(f"the worker has no fetcher, because its initialisation failed: {self.lacks}")
            return self.fetcher.fetch(task.index)
        except Exception as error:
            if isinstance(error, StopIteration) and self.spec.dataset_kind == _DatasetKind.Iterable:
                return WorkerExhausted(self.spec.worker_id)
            remove_unsized(error)
            place = self.progress.place() if self.fetcher is not None else f"Task {task.idx}."  # nothing was fetched
            return ExceptionWrapper(error, self.spec.where, place)

    def work(self, task: Task) -> None:
        """Fetch and send."""
        self.progress.begin(task.idx, task.index)
        data, state = self.spec.fetching.after(self.fetch(task), task.idx, self.spec.where)
        exhausted = isinstance(data, WorkerExhausted)
        self.progress.end(2 if exhausted else int(isinstance(data, ExceptionWrapper)))
        result = Result(task.idx, self.spec.worker_id, data, state)
        self.spec.result_queue.put(self.spec.ports.envelope(result))
        self.lifecycle.decide(WorkerEvent.ITERATION_END if exhausted else WorkerEvent.FETCHED)
        self.progress.waiting()

    def resume(self, message: ResumeIteration) -> None:
        """Acknowledge, then begin the new epoch."""
        left, failure = self.spec.fetching.between(message.epoch, self.spec.where)
        self.spec.result_queue.put(ResumeIteration(message.epoch, self.spec.worker_id, left))
        self.make_fetcher()
        self.init_exception = self.init_exception or failure
        self.progress.waiting()

    def has_come_before(self, message: Any) -> bool:
        """Whether it was sent twice, because an exception has interrupted the loader while it sent it."""
        if isinstance(message, ResumeIteration):
            again, self.epoch, self.last = message.epoch <= self.epoch, message.epoch, -1
        elif isinstance(message, Task):
            again, self.last = message.idx <= self.last, message.idx
        else:
            return False
        return again

    def event_of(self, message: Any) -> WorkerEvent:
        """What a message means, given the done event."""
        if isinstance(message, ResumeIteration):
            return WorkerEvent.RESUME
        done = self.spec.done_event.is_set()
        if isinstance(message, Sentinel):
            return WorkerEvent.SENTINEL_WHEN_DONE if done else WorkerEvent.SENTINEL
        return WorkerEvent.TASK_WHEN_DONE if done else WorkerEvent.TASK

    def run(self) -> None:
        """The loop."""
        watchdog = self.watchdog
        self.progress.waiting()  # also after each message, but not at each poll: that would reset the time of the wait
        self.lifecycle.decide(WorkerEvent.READY)
        action = Action.WAIT
        while action is not Action.LEAVE:
            if not watchdog.is_alive():
                self.spec.ports.note(FoundDead("loader", self.spec.worker_id, watchdog.manager_pid, None))
                self.lifecycle.decide(WorkerEvent.PARENT_DIED)
                # No process reads, and this process also holds the pipe's reading end: its feeder would wait forever.
                self.spec.result_queue.cancel_join_thread()
                return
            try:
                message = self.spec.index_queue.get(timeout=MP_STATUS_CHECK_INTERVAL)
            except queue.Empty:
                continue
            if self.has_come_before(message):
                continue
            action = self.lifecycle.decide(self.event_of(message))
            if action is Action.FETCH:
                self.work(message)
            elif action is Action.RESUME:
                self.resume(message)
            del message  # otherwise the indices stay in memory until the next message comes


def _hear_no_interrupt() -> None:
    """From here the worker ends. What is left is short, and a Ctrl-C in it would only print a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _worker_loop(spec: WorkerSpec) -> None:
    """Run a worker to its end (upstream: `_worker_loop`; article 1 §2.4.5).

    A KeyboardInterrupt ends it without a traceback, because the loader's process gets the same signal and raises it.
    """
    worker: _Worker | None = None
    try:
        signal_handling.run_again()
        worker = _Worker(spec)
        _set_worker_signal_handlers()
        torch.set_num_threads(1)
        torch.multiprocessing._set_thread_name("pt_data_worker")
        worker.unpack()
        _seed(spec)
        _publish_worker_info(spec, worker.users.dataset)
        spec.result_queue.enter_worker()
        spec.ports.note(WorkerEntered(spec.worker_id, spec.seed))
        worker.initialise()
        worker.run()
        _hear_no_interrupt()
    except KeyboardInterrupt:
        _hear_no_interrupt()
        if worker is None:
            return
        if worker.lifecycle.allows(WorkerEvent.INTERRUPTED):  # it has not left yet
            worker.lifecycle.decide(WorkerEvent.INTERRUPTED)
    worker.progress.ended()
    if spec.done_event.is_set():
        # The loader reads no more, so waiting for the feeder thread to flush could last forever.
        spec.result_queue.cancel_join_thread()
        spec.result_queue.close()
