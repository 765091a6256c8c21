"""torch's `_worker_loop`, followed in a worker's process."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _DatasetKind

from minidl.record import recorder
from minidl.record.channels import outcome_of
from minidl.record.harmless import harmless
from minidl.record.indices import count, indices_of, whole_number
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
        self.ready = False
        self.by_index = False  # of a map dataset, whose samples its tasks name
        self.task: Task | None = None  # received, and not yet taken up
        self.samples = -1  # of the task that is being fetched, as its indices say
        self.failed = -1, -1  # position and index of the sample that raised, if the task has failed
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
                self.samples = count(task.index)
                self.progress.begin(task.idx, task.index)
                if self.by_index:
                    self.progress.tell_indices()
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

    @harmless(None)
    def collates(self, counted: bool) -> None:
        """Emit that collate_fn is called next. counted: the task has an index for each sample."""
        self.progress.collate(self.samples if counted else -1)

    @harmless(None)
    def answers(self, result: Result) -> None:
        """Emit that the task's result is about to be put."""
        task, data, outcome = result.idx, result.data, outcome_of(result.data)
        self.exhausted = outcome is ev.Outcome.EXHAUSTED
        self.progress.end(outcome)
        if isinstance(data, ExceptionWrapper):
            last = str(data.exc_msg).strip().rpartition("\n")[2]
            text = recorder.start(self.shared.config).string(last[:1000])
            self.emit(ev.TASK_ERROR, task, *self.failed, text)
        self.emit(ev.RESULT_PUT, task, outcome)

    @harmless(None)
    def resumes(self) -> None:
        self.epoch += 1
        self.exhausted = False
        self.emit(ev.RESUME_ACK, -1, self.epoch)


@harmless((-1, -1))
def failing_sample(error: BaseException | None, indices: Any) -> tuple[int, int]:
    """Position and index of the sample that the dataset was asked for by torch's fetcher; -1 = unknown, or for none.

    indices: the task's. The index is the argument of the `__getitem__` that the fetcher called, if it is one of them.
    """
    trace, called = None if error is None else error.__traceback__, False
    while trace is not None:
        code = trace.tb_frame.f_code
        if called and code.co_name == "__getitem__" and code.co_argcount > 1:
            index = whole_number(trace.tb_frame.f_locals.get(code.co_varnames[1]))
            numbers = [whole_number(one) for one in indices_of(indices)]
            return (numbers.index(index), index) if index >= 0 and index in numbers else (-1, -1)
        called = code.co_filename == fetch.__file__
        trace = trace.tb_next
    return -1, -1


class NotedErrors:
    """Stands for torch's `ExceptionWrapper` in a worker's loop, which makes one where it catches an error."""

    def __init__(self, worker: ObservedWorker, wrapper: Callable[..., Any]) -> None:
        self.worker = worker
        self.wrapper = wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.worker.failed = failing_sample(sys.exc_info()[1], self.worker.progress.index)
        return self.wrapper(*args, **kwargs)


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
