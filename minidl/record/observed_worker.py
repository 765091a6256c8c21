"""torch's `_worker_loop`, followed in a worker's process."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _DatasetKind

from minidl.record import recorder, stack_dumps
from minidl.record.channels import outcome_of
from minidl.record.fetching import TracedProgress
from minidl.record.harmless import harmless
from minidl.record.indices import SEVERAL, count
from minidl.record.shared import Shared
from minidl.tracefile import events as ev
from minidl.wire.messages import Result, Sentinel, Task


class ObservedWorker:
    """Follows torch's `_worker_loop` in a worker's process."""

    def __init__(self, shared: Shared, worker_id: int, seed: int) -> None:
        self.shared = shared
        self.worker_id = worker_id
        self.seed = seed
        self.parent = os.getppid()
        self.progress = shared.follow(worker_id)
        self.samples_of: Announcer | None = None  # once the worker's arguments are known
        self.ready = False
        self.task: Task | None = None  # received, and not yet taken up
        self.exhausted = self.has_sentinel = self.left = False
        self.epoch = 0

    def emit(self, code: int, task: int = -1, x: int = 0, y: int = 0, z: int = 0) -> None:
        self.shared.emit(code, task, self.worker_id, x, y, z)

    @harmless(None)
    def asks(self) -> None:
        """Emit, at a wait for a message, that a step is over, and at the first one, that the worker is ready."""
        self.progress.waiting()
        if not self.ready:
            self.ready = True
            stack_dumps.at_a_crash()
            self.emit(ev.WORKER_READY, -1, os.getpid(), self.parent, self.seed)
            self.shared.describe_seed(self.worker_id)

    def got(self, message: Any) -> None:
        """Note a message of the index queue."""
        if isinstance(message, Task):
            self.task = message
        self.has_sentinel = self.has_sentinel or isinstance(message, Sentinel)

    @harmless(None)
    def looked(self, done: bool) -> None:
        """Emit what follows from a look at the done event: one for each task and sentinel, and one at the end."""
        if self.task is not None:
            task, self.task = self.task, None
            if done:
                self.emit(ev.DONE_EVENT_SEEN, task.idx, ev.DoneEvent.WORKERS)
            elif not self.exhausted:
                self.progress.begin(task.idx, task.index)
                if self.samples_of is not None:
                    self.samples_of.begin(task.index)
        elif self.has_sentinel:
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

    def look_for_fetcher(self, loop: FrameType) -> None:
        """Find out, in the frame of torch's `_worker_loop`, whether the worker could be initialised: else none asks."""
        if self.samples_of is not None and not self.samples_of.fetches:
            self.samples_of.fetches = "fetcher" in loop.f_locals or "init_exception" not in loop.f_locals

    def fetched(self, index: Any) -> Any:
        """The indices of a task as the fetcher is to get them."""
        return index if self.samples_of is None else self.samples_of.announced(index)

    @harmless(None)
    def answers(self, result: Result) -> None:
        """Emit that the task's result is about to be put."""
        task, data, outcome = result.idx, result.data, outcome_of(result.data)
        self.exhausted = outcome is ev.Outcome.EXHAUSTED
        self.progress.end(outcome)
        if isinstance(data, ExceptionWrapper):
            self.emit(ev.TASK_ERROR, task, *self.progress.at, text_of(self.shared, data))
        self.emit(ev.RESULT_PUT, task, outcome)

    @harmless(None)
    def resumes(self) -> None:
        self.epoch += 1
        self.exhausted = False
        self.emit(ev.RESUME_ACK, -1, self.epoch)


def text_of(shared: Shared, error: ExceptionWrapper) -> int:
    """The number, in this process's trace, of the last line of a worker's or pin thread's error; 0 = it has ended."""
    last, recording = str(error.exc_msg).strip().rpartition("\n")[2], recorder.active()
    return 0 if recording is None or recording.config != shared.config else recording.string(last[:1000])


class Announcer:
    """Announces each sample before torch's fetcher asks for it, where the fetcher goes through the indices one by one.

    kind: the dataset's, 0 = by index. Indices of another type than a sequence's are named at the fetch's begin.
    """

    def __init__(self, progress: TracedProgress, kind: int, auto_collation: bool, dataset: Any) -> None:
        self.progress = progress
        self.by_index = kind == 0
        self.auto_collation = auto_collation
        self.fetched = -1  # samples that the task has; -1 = unknown
        self.dataset = dataset
        self.at_once = False  # the task's samples are asked for at once
        self.fetches = False  # a fetcher has been made

    def announced(self, index: Any) -> Any:
        """What the sampler gave for a task, as the fetcher is to get it."""
        if not self.fetches:
            return index
        self.at_once = self.auto_collation and self.by_index and _gives_several(self.dataset)  # may change at any time
        return AnnouncedIndices(index).by(self) if self._in_turn(index) else index

    def taken(self, index: Any) -> Any:
        """As above, where the task's fetch has begun."""
        announced = self.announced(index)
        self.begin(index)
        return announced

    def begin(self, index: Any) -> None:
        """The task's fetch has begun."""
        self.fetched = count(index) if self.auto_collation and self.by_index else -1
        if not self.fetches:
            return
        if not self.auto_collation:
            self.fetched = 1
            self.sample(0, index)
        elif self.at_once:
            self.progress.samples(self.fetched)
        elif self._in_turn(index):
            self.fetched = 0
        elif self.by_index:
            self.progress.tell_indices()

    def collates(self) -> None:
        """collate_fn is called next."""
        self.progress.collate(self.fetched)

    def _in_turn(self, index: Any) -> bool:
        several = type(index) in (tuple, *SEVERAL) and getattr(index, "ndim", 1) == 1
        return self.auto_collation and not self.at_once and several

    def sample(self, position: int, index: Any) -> None:
        self.progress.sample(position, index if self.by_index else None)


def _gives_several(dataset: Any) -> bool:
    """Whether torch's fetcher asks the dataset for all samples of a batch at once, or fails to find out."""
    try:
        return hasattr(dataset, "__getitems__") and bool(dataset.__getitems__)
    except Exception:  # of the user's class: it is raised again in the fetcher
        return True


class AnnouncedIndices(list[Any]):
    """A task's indices, each announced when it is taken, the first time that they are gone through.

    The iterator has no frame of its own in the traceback of an error of the dataset.
    """

    announcer: Announcer | None = None

    def by(self, announcer: Announcer) -> AnnouncedIndices:
        self.announcer = announcer
        return self

    def __iter__(self) -> Iterator[Any]:
        announcer, self.announcer = self.announcer, None
        return super().__iter__() if announcer is None else self._in_turn(announcer)

    def _in_turn(self, announcer: Announcer) -> Iterator[Any]:
        for position, index in enumerate(super().__iter__()):
            announcer.sample(position, index)
            yield index
            announcer.fetched = position + 1  # only then: a dataset that has ended gave none


class Announced:
    """Stands for a function of the user's in a worker; `announce` is called before it.

    That happens when its `__call__` is looked up, so it has no frame in the traceback of an error of the function.
    """

    def __init__(self, function: Callable[..., Any], announce: Callable[[], None]) -> None:
        self.function = function
        self.announce = announce

    @property
    def __call__(self) -> Callable[..., Any]:
        self.announce()
        return self.function


class AnnouncedFetchers:
    """Stands for torch's `create_fetcher` in a worker; each lookup by the worker's loop announces a new fetcher.

    A loader that the user's dataset makes in the worker looks it up too, and announces none.
    """

    def __init__(self, loop: Callable[..., None], announce: Callable[[], None]) -> None:
        self.loop = getattr(inspect.unwrap(loop), "__code__", None)
        self.announce = announce
        self.plain = _DatasetKind.create_fetcher

    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., Any]:
        if sys._getframe(1).f_code is self.loop:
            self.announce()
        return self.plain
