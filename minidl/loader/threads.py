"""Workers that are threads of this process (`worker_method="thread"`): the same protocol, without pickling.

The iterator, the driver, the dispatcher and the worker's lifecycle are those of worker processes. What differs is here:
queues that hand over the objects themselves, handles with the interface of a `Process`, generators of random numbers
for each worker, and the end. A thread can't be killed, so a worker that is told to leave looks at the done event before
each sample too. One that stays in a sample is waited for as long as a process would be, and then left behind as a
daemon thread, with a warning that names it; if its sample ends, it reads its sentinel and leaves. When Python exits, it
is interrupted, which ends a sample that computes.

Each worker has its own shallow copy of the dataset: what it, or worker_init_fn, assigns to attributes is its own, as in
a process; what the attributes refer to is shared by all workers and the program. Name and default of `worker_method`
are those that torch's WorkerInfo documents since torch 2.13.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.multiprocessing

from minidl.data import worker_info
from minidl.data.fetch import Progress, _BaseDatasetFetcher
from minidl.data.worker_info import WorkerInfo
from minidl.loader.crew import Crew
from minidl.loader.iterators import Loader, _MultiProcessingDataLoaderIter
from minidl.loader.ports import Ports, Transport, WorkerEntered
from minidl.loader.progress import ProgressBoard, Stage
from minidl.loader.protocol import WorkerEvent
from minidl.loader.worker import ManagerWatchdog, WorkerSpec, _Worker, numpy_seed
from minidl.wire.errors import ExceptionWrapper
from minidl.wire.messages import RebuildFailure, Result, Sentinel
from minidl.wire.queues import ReadyQueue

LAST_JOIN = 1.0
"""Seconds of the last join of the workers: at the end of the shutdown, and again at Python's exit, after the
interrupt."""


# --- Queues -----------------------------------------------------------------------------------------------------------
class ThreadQueue(ReadyQueue):
    """A queue of tasks or of results between threads. It has a `BoundedQueue`'s interface; it never closes or fails.

    What is put is what comes out: an envelope, whose task is to pickle its message, is left away.
    """

    failure = ""

    def put(self, message: Any) -> None:
        """Hand over the message itself."""
        super().put(getattr(message, "message", message))

    def writer(self, worker_id: int) -> ThreadQueue:
        """What a worker writes to."""
        return self

    def cancel_join_thread(self) -> None:
        """No thread writes for this queue."""

    def close(self) -> None:
        """A worker that was left behind may still read its sentinel."""

    def jammed(self) -> bool:
        """No lock is held while a message is written."""
        return False

    def let_go(self) -> None:
        """Drop the batches that nobody has read."""
        while not self._messages.empty():
            self._messages.get()


class Flag:
    """A done event between threads; unlike `threading.Event`, it has no lock that a signal's handler could wait for."""

    _set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


class ThreadTransport(Transport):
    """Batches stay where they are."""

    def index_queue(self, context: Any) -> ThreadQueue:
        return ThreadQueue()

    def result_queue(self, context: Any, num_workers: int, done_event: Any, ports: Ports) -> ThreadQueue:
        return ThreadQueue()

    def done_event(self) -> Flag:
        return Flag()

    def board(self, num_workers: int) -> ProgressBoard:
        return ProgressBoard(num_workers, shared=False)


# --- A worker ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RNG:
    """A worker's own generators, in the state of a worker process's global ones; fields are those of torch 2.13's.

    They draw what `random`, torch and NumPy's `rand` draw in a process.
    """

    random_generator: random.Random
    torch_generator: torch.Generator
    numpy_generator: np.random.Generator

    @classmethod
    def of(cls, spec: WorkerSpec) -> RNG:
        """The generators of a worker."""
        bits: Any = np.random.MT19937()
        bits.state = np.random.RandomState(numpy_seed(spec.base_seed, spec.worker_id)).get_state(legacy=False)
        torch_generator = torch.Generator().manual_seed(spec.seed)
        return cls(random.Random(spec.seed), torch_generator, np.random.Generator(bits))


class _UntilDone(Progress):
    """Passes on where a fetch is, and ends it before its next sample once the done event is set."""

    def __init__(self, progress: Progress, done_event: Any) -> None:
        self.samples, self.collate = progress.samples, progress.collate  # type: ignore[method-assign]
        self._sample = progress.sample
        self._done_event = done_event

    def sample(self, position: int, index: Any) -> None:
        if self._done_event.is_set():
            raise KeyboardInterrupt  # which ends a worker silently, in whatever state it is
        self._sample(position, index)


class _SameProcess(ManagerWatchdog):
    """The loader does not die before its threads."""

    def is_alive(self) -> bool:
        return True


class _ThreadWorker(_Worker):
    """A worker in a thread: its dataset is a shallow copy."""

    def watch(self) -> ManagerWatchdog:
        return _SameProcess(self.spec.manager_pid)

    def unpack(self) -> None:
        super().unpack()
        try:
            self.users = self.users._replace(dataset=_own(self.users.dataset))
        except Exception as error:
            self.unusable = ExceptionWrapper(error, f"{self.spec.where} while it copied its dataset")

    def create_fetcher(self) -> _BaseDatasetFetcher:
        fetcher = super().create_fetcher()
        fetcher.progress = _UntilDone(fetcher.progress, self.spec.done_event)
        return fetcher

    def publish(self) -> None:
        """Let `get_worker_info` answer in this thread, ours and torch's."""
        spec, dataset = self.spec, self.users.dataset
        about = {"id": spec.worker_id, "num_workers": spec.num_workers, "seed": spec.seed, "dataset": dataset}
        worker_info.enter_thread(WorkerInfo(**about, rng=RNG.of(spec), worker_method="thread"))


class _TakenError(Exception):
    """An interrupt that this thread has sent itself."""


@atexit.register  # at import, so that Python calls it after what closes the loaders
def _interrupt_left() -> None:
    """Interrupt the workers that still compute: if Python ended while one is in C++, that would abort the process.

    The interrupt comes with a thread's next step in Python; it is taken back from a thread that only waits. While one
    is pending, a Python 3.11 that is traced or debugged enters no Python function. So none is called here. At last this
    thread interrupts itself: nothing else clears the interpreter's flag.
    """
    left = {thread.ident or 0 for thread in threading.enumerate() if isinstance(thread, WorkerThread)}
    if not left:
        return
    interrupt, until = ctypes.pythonapi.PyThreadState_SetAsyncExc, time.monotonic() + LAST_JOIN
    for thread in left:
        interrupt(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
    while left & sys._current_frames().keys() and time.monotonic() < until:
        time.sleep(0.01)
    for thread in left:
        interrupt(ctypes.c_ulong(thread), ctypes.py_object())
    try:
        interrupt(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_TakenError))
        while time.monotonic() < until + LAST_JOIN:  # pragma: no cover: it is raised in the tracer, before this counts
            time.sleep(0)
    except _TakenError:
        pass


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Join them, one deadline for all."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _own(dataset: Any) -> Any:
    """A copy that has attributes of its own; an array, or what has no attributes, is returned itself.

    Most are copied by hand: `copy.copy` copies an array's elements, and asks the new object for `__setstate__` before
    it has attributes: a `__getattr__` that delegates to one of them would call itself without end.
    """
    classes = type(dataset).__mro__[:-1]
    slots = any(vars(one).get("__slots__") for one in classes)
    if isinstance(dataset, (np.ndarray, torch.Tensor)) or not (slots or hasattr(dataset, "__dict__")):
        return dataset
    if slots or any(name in vars(one) for one in classes for name in _COPIES):
        return copy.copy(dataset)
    try:
        new = object.__new__(type(dataset))
    except TypeError:  # it has more than attributes: it is a list, say
        return copy.copy(dataset)
    new.__dict__.update(dataset.__dict__)
    return new


_COPIES = ("__copy__", "__reduce_ex__", "__reduce__", "__getstate__")
"""The methods by which a class says how it is copied."""


def _thread_loop(spec: WorkerSpec) -> None:
    """Run a worker to its end.

    An exception that ends it goes to the loader in place of its batch, and ends the thread.
    """
    torch.multiprocessing._set_thread_name("pt_data_worker")
    worker = _ThreadWorker(spec)
    try:
        worker.unpack()
        worker.publish()
        spec.ports.note(WorkerEntered(spec.worker_id, spec.seed))
        worker.initialise()
        worker.run()
    except KeyboardInterrupt:
        if not spec.done_event.is_set():  # the sample's own: Python raises that of a Ctrl-C in the main thread
            worker.progress.end(1)
            raise
        worker.lifecycle.decide(WorkerEvent.INTERRUPTED)
    except BaseException:
        worker.progress.end(1)
        raise
    worker.progress.ended()


class WorkerThread(threading.Thread):
    """The handle of a worker: a thread with the interface of a `Process`. pid: the thread's number in the kernel."""

    _start_method = "thread"
    exitcode: int | None = None

    def __init__(self, target: Callable[..., None], args: tuple[WorkerSpec], daemon: bool) -> None:
        super().__init__(name=f"worker {args[0].worker_id}", daemon=daemon)
        self._loop, self._args = target, args
        self._begun = threading.Event()
        self._grad = torch.is_grad_enabled()

    @property
    def pid(self) -> int | None:
        return self.native_id

    def start(self) -> None:
        """Start it. It computes with one core; this thread, and threads that begin later, with as many as before."""
        threads = torch.get_num_threads()  # before: a thread that has never asked takes the number that was set last
        super().start()
        self._begun.wait()
        torch.set_num_threads(threads)

    def run(self) -> None:
        torch.set_grad_enabled(self._grad)  # which is each thread's own
        torch.set_num_threads(1)
        torch.get_num_threads()  # the first call in a thread takes what any thread has set last
        self._begun.set()
        spec = _in_this_thread(*self._args)
        del self._args  # the dataset goes with the worker
        try:
            self._loop(spec)
        except BaseException as error:
            self.exitcode = _exit_code(error)
            _say_why(spec, error)
            if not isinstance(error, SystemExit):
                raise
        else:
            self.exitcode = 0
        finally:
            worker_info.leave_thread()

    def is_alive(self) -> bool:
        return self.exitcode is None and super().is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end; not in the thread itself, where the collector may end an iterator."""
        if threading.current_thread() is not self:
            super().join(timeout)


def _in_this_thread(spec: WorkerSpec) -> WorkerSpec:
    ports, *channels = spec.ports.in_thread(spec.index_queue, spec.result_queue, spec.done_event)
    index_queue, result_queue, done_event = channels
    return replace(
        spec, method="thread", ports=ports, index_queue=index_queue, result_queue=result_queue, done_event=done_event
    )


def _say_why(spec: WorkerSpec, error: BaseException) -> None:
    """Have the loader look at once who has died, if it waits for a task: that explains a message without data."""
    place = spec.board.read(spec.worker_id)
    if place.stage not in (Stage.FETCHING, Stage.COLLATING):
        return
    result = Result(place.task, spec.worker_id, RebuildFailure(cast(Exception, error)))
    spec.result_queue.put(spec.ports.envelope(result))


def _exit_code(error: BaseException) -> int:
    """What a process would end with."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


class ThreadContext:
    """In place of a multiprocessing context."""

    Process = WorkerThread

    @staticmethod
    def get_start_method() -> str:
        return WorkerThread._start_method


# --- The loader's side ------------------------------------------------------------------------------------------------
class ThreadCrew(Crew):
    """Worker threads: no signal tells of their death, no segment is left, and the shutdown can only ask."""

    handles = "thread"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Before Python ends its daemon threads: one that comes back from a call in C++ then might end the process.
        self.close_at_exit()

    def pids(self) -> list[int]:
        return []

    def watch_pids(self) -> None:
        """A thread's end raises no signal."""

    def _let_go(self) -> None:
        self.result_queue.let_go()  # a worker that stays may still read its sentinel

    def _terminate(self, end: str, timeout: float) -> None:
        """At first, tell those to leave that an interrupted shutdown has not told; at last, warn of those that stay."""
        alive = [number for number, worker in enumerate(self.workers) if worker.is_alive()]
        if end == "kill":
            self._warn_of([number for number in alive if self.workers[number].ident != threading.get_ident()])
            return
        self.done_event.set()
        for number in alive:
            if not self.driver.told[number]:
                self.index_queues[number].put(Sentinel())
        _join([self.workers[number] for number in alive], min(LAST_JOIN, timeout))

    def _warn_of(self, stuck: list[int]) -> None:
        if stuck:
            where = "; ".join(
                f"worker {number} (thread {self.workers[number].pid}) is {self.doing(number)}, for "
                f"{self.board.read(number).seconds:.1f} s"
                for number in stuck
            )
            warnings.warn(
                f"the loader is closed, and does not wait any longer: {where}. A thread can't be killed: it is left "
                "behind as a daemon thread, and leaves when its sample is there. Give what it waits for a timeout, or "
                "use worker_method='multiprocessing'",
                RuntimeWarning,
                stacklevel=2,
            )


class _ThreadDataLoaderIter(_MultiProcessingDataLoaderIter):
    """Hands tasks to worker threads and yields what they send back."""

    _crew_type = ThreadCrew
    _loop = staticmethod(_thread_loop)

    def _context(self, loader: Loader) -> Any:
        return ThreadContext
