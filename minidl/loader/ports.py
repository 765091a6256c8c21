"""What is put into a loader from outside: ports, which tracing replaces; a transport; a record of each epoch.

Ports are how the actors reach queues, events, processes, threads and copies. `Ports` hands out plain objects. Tracing
replaces it by a subclass that hands out the same objects wrapped (see `record/ports.py`). So the actors have no line
that exists only for tracing, but for `note`, which tells what no queue or process shows: an empty call without a trace.
One Ports object belongs to one iterator. It goes to the workers with their other arguments, so it must pickle.

`use(factory)` decides which ports new iterators get, and returns the undo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from minidl.data.fetch import Progress
from minidl.loader.progress import ProgressBoard, WorkerProgress
from minidl.wire.message import Envelope
from minidl.wire.messages import Result, Task
from minidl.wire.queues import BoundedQueue, SharedFlag

WhichQueue = Literal["index", "result", "ready"]
"""A worker's index queue, the result queue of all workers, or the pin thread's output."""

WhichDoneEvent = Literal["workers", "pin thread"]

D = TypeVar("D")
"""A class that decides: `Dispatcher`, `LoaderLifecycle`, `WorkerLifecycle`, `PinLifecycle`."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An iterator of `loader` was created."""

    iterator: Any
    loader: Any


@dataclass(frozen=True, slots=True)
class WorkerEntered:
    """This process, or this thread, is a worker and is seeded."""

    worker_id: int
    seed: int


@dataclass(frozen=True, slots=True)
class FoundAlive:
    """A liveness check has found the pin thread, and all workers that have work, alive."""

    workers: int


@dataclass(frozen=True, slots=True)
class FoundDead:
    """A liveness check has found a dead actor. exit_code: None if it is unknown."""

    what: Literal["worker", "pin thread", "loader"]
    worker_id: int
    pid: int
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The loader's timeout has passed: it waited `seconds` for task `idx` of a worker."""

    idx: int
    worker_id: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """The loader has chosen its number of workers. reason: in words."""

    workers: int
    before: int
    reason: str


Note = Opened | WorkerEntered | FoundAlive | FoundDead | TimedOut | Chosen
"""What an actor reports because no queue, event or decision shows it."""


# --- What layers on the loader replace: its transport, and what it keeps of an epoch ----------------------------------
# The classes here keep nothing: each epoch begins at the beginning, as upstream's. Those of `resume.stateful` keep what
# is needed to save a loader, and to resume it.
class Transport:
    """How tensors travel between the processes: as upstream, each in new shared memory. `arena` has another way.

    page_locked: whether batches come in page-locked memory: then nothing pins them.
    """

    page_locked = False

    def index_queue(self, context: Any) -> Any:
        """A queue for one worker's tasks, of a multiprocessing context."""
        return BoundedQueue(context)

    def result_queue(self, context: Any, num_workers: int, done_event: Any, ports: Ports) -> Any:
        """The queue of all workers' results. done_event: theirs."""
        return BoundedQueue(context)

    def done_event(self) -> Any:
        """What tells all workers that the loader ends."""
        return SharedFlag()

    def board(self, num_workers: int) -> ProgressBoard:
        """Where the workers write how far they have come."""
        return ProgressBoard(num_workers)


class Fetching:
    """How a worker makes its fetchers, and what it sends along with its batches; it goes to the worker, so it pickles.

    where: the worker, as errors name it.
    """

    def open(self, dataset: Any, make: Callable[[], Any]) -> Any:
        """A fetcher for an epoch. make: creates one, which asks the dataset for its iterator."""
        return make()

    def after(self, data: Any, task: int, where: str) -> tuple[Any, Any]:
        """What is sent for a task, given what was fetched, and the state that goes along; None: no state."""
        return data, None

    def between(self, epoch: int, where: str) -> tuple[Any, Any]:
        """The dataset's state before an epoch, and the error for the epoch's first task if it can't be taken."""
        return None, None


class EpochRecord:
    """Follows one epoch of an iterator. loader: the `DataLoader`; a task and its worker are a pair of numbers."""

    base_seed: int | None = None
    """The workers' seed, if it is known before it is drawn."""

    def __init__(self) -> None:
        self._counted = 0

    @property
    def batches(self) -> int:
        """How many of the epoch's batches were yielded before this iterator."""
        return 0

    @property
    def turn(self) -> int:
        """The worker whose turn it is first."""
        return 0

    @property
    def counted(self) -> int:
        """How many batches and errors the iterator has handed out."""
        return self._counted

    # --- Its begin; with workers, they are started (`seeded`, `fetching`) before the sampler is opened
    def before_seed(self, loader: Any) -> None:
        """The base seed is drawn next."""

    def before_draws(self, loader: Any) -> None:
        """The index sampler is asked for its iterator next."""

    def opening(self, index_sampler: Any) -> Iterator[Any]:
        """An iterator that nobody draws from: with workers, upstream asks for one before it starts them."""
        return iter(index_sampler)

    def draws(self, index_sampler: Any) -> Iterator[Any]:
        """The index sampler's iterator."""
        return iter(index_sampler)

    def skip(self) -> None:
        """Draw what this epoch leaves out."""

    def seeded(self, base_seed: int) -> None:
        """The workers get this seed."""

    def fetching(self, worker: int, loader: Any) -> Fetching:
        """What a worker makes its fetchers with."""
        return Fetching()

    def opened(self, loader: Any, make: Callable[[], Any]) -> Any:
        """The fetcher of an epoch in this process."""
        return make()

    def begun(self, loader: Any) -> None:
        """`iter()` has all that it needs."""

    # --- Its course
    def first_draw(self, base_seed: int) -> None:
        """The sampler draws for the first time, without workers."""

    def fetch(self, fetcher: Any, index: Any) -> Any:
        """The next batch of this process's dataset."""
        return fetcher.fetch(index)

    def state_came(self, message: Any, *, stale: bool) -> None:
        """A worker has sent a state along. stale: with a result of the last epoch."""

    def hand_out(self, task_and_worker: tuple[int, int]) -> None:
        """The consumer gets a task's batch."""
        self._counted += 1

    def fail(self, task_and_worker: tuple[int, int]) -> None:
        """The consumer gets a task's error."""
        self._counted += 1

    def end(self) -> None:
        """The consumer gets the end of the epoch."""

    def goes_on(self, ports: Ports, num_workers: int) -> None:
        """Another iterator, which has these ports and so many workers, goes on with the epoch."""


# --- The ports --------------------------------------------------------------------------------------------------------
class Ports:
    """Plain ports; each method is one thing that an actor needs."""

    def note(self, note: Note) -> None:
        """Take notice of `note`; nothing depends on it."""

    def decider(self, kind: Callable[..., D], *args: Any) -> D:
        """An object that decides: `kind(*args)`."""
        return kind(*args)

    envelope: Callable[[Task | Result], Any] = Envelope
    """Makes what is put into a queue for a task or a result."""

    # --- in the loader's process
    def follow_epoch(self, position: Any) -> None:
        """The epoch of this position, which another iterator has begun, goes on in this one."""

    def sampler_iter(self, sampler: Iterable[Any], draws: Callable[[Any], Iterator[Any]] = iter) -> Iterator[Any]:
        """The sampler's iterator for one epoch, which `draws` makes."""
        return draws(sampler)

    def queue(self, which: WhichQueue, queue: Any, worker_id: int = -1) -> Any:
        """The queue as the actors use it. worker_id: whose index queue it is."""
        return queue

    def done_event(self, which: WhichDoneEvent, event: Any) -> Any:
        """A done event as the actors use it."""
        return event

    def worker(self, context: Any, worker_id: int, target: Callable[..., None], args: tuple[Any, ...]) -> Any:
        """A process, not started yet."""
        return context.Process(target=target, args=args, daemon=True)

    def pin_memory_thread(self, thread: threading.Thread) -> Any:
        """The pin-memory thread, not started yet."""
        return thread

    # --- where batches are fetched: in a worker, or without workers in the loader's process
    def progress(self) -> Progress:
        """The observer of a fetch in the loader's process."""
        return Progress()

    def worker_progress(self, board: ProgressBoard, worker_id: int) -> WorkerProgress:
        """The observer of a worker's fetches, which writes to the board."""
        return board.writer(worker_id)

    def in_thread(self, *things: Any) -> tuple[Any, ...]:
        """Ports, and things that ports have made, for the thread that asks: a worker's."""
        return self, *things

    # --- in the pin thread
    def pinning(self, pin_memory: Callable[[Any], Any], device: str) -> Callable[[Result], Any]:
        """A function that pins a result's data, for this type of device."""

        def pin(result: Result) -> Any:
            return pin_memory(result.data)

        return pin

    # --- in the device stage
    def device_stream(self, device: Any, prefetch: int, loader: Any) -> Any:
        """The side stream, of a `device.streams.AcceleratorDevice`, that an iteration over `loader` copies on."""
        return device.stream()


_factory: Callable[[], Ports] = Ports


def new_ports() -> Ports:
    """Ports for a new iterator."""
    return _factory()


def use(factory: Callable[[], Ports]) -> Callable[[], None]:
    """Let new iterators have the ports that `factory` returns; return the undo."""
    global _factory
    previous, _factory = _factory, factory

    def undo() -> None:
        global _factory
        _factory = previous

    return undo
