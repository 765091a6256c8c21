"""torch's `_worker_loop`, followed in a worker's process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data._utils.worker import _IterableDatasetStopIteration

from minidl.record import recorder
from minidl.record.fetching import TracedProgress, count
from minidl.record.shared import Shared
from minidl.tracefile import events as ev


class ObservedWorker:
    """Follows torch's `_worker_loop` in a worker's process."""

    def __init__(self, shared: Shared, worker_id: int, seed: int) -> None:
        self.shared = shared
        self.worker_id = worker_id
        self.seed = seed
        self.parent = os.getppid()
        self.progress = shared.fetching = TracedProgress(shared.emit, worker_id)
        self.ready = False
        self.by_index = False  # of a map dataset, whose samples its tasks name
        self.task: tuple[int, Any] | None = None  # received, and not yet taken up
        self.samples = -1  # of the task that is being fetched, as its indices say
        self.exhausted = self.has_sentinel = self.left = False
        self.epoch = 0

    def emit(self, code: int, task: int = -1, x: int = 0, y: int = 0, z: int = 0) -> None:
        self.shared.emit(code, task, self.worker_id, x, y, z)

    def asks(self) -> None:
        """Emit, at the first wait for a message, that the worker is ready."""
        if not self.ready:
            self.ready = True
            self.emit(ev.WORKER_READY, -1, os.getpid(), self.parent, self.seed)
            self.shared.describe_seed(self.worker_id)

    def looked(self, done: bool) -> None:
        """Emit what follows from a look at the done event: one for each task and sentinel, and one at the end."""
        if self.task is not None:
            (task, index), self.task = self.task, None
            if done:
                self.emit(ev.DONE_EVENT_SEEN, task, ev.DoneEvent.WORKERS)
            elif not self.exhausted:
                self.samples = count(index)
                self.progress.begin(task, index)
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

    def answers(self, task: int, data: Any) -> None:
        """Emit that the task's result is about to be put."""
        outcome = outcome_of_torch(data)
        self.exhausted = outcome is ev.Outcome.EXHAUSTED
        self.progress.end(outcome)
        if isinstance(data, ExceptionWrapper):
            last = str(data.exc_msg).strip().rpartition("\n")[2]
            text = recorder.start(self.shared.config).string(last[:1000])
            self.emit(ev.TASK_ERROR, task, -1, -1, text)
        self.emit(ev.RESULT_PUT, task, outcome)

    def resumes(self) -> None:
        self.epoch += 1
        self.exhausted = False
        self.emit(ev.RESUME_ACK, -1, self.epoch)


def outcome_of_torch(data: Any) -> ev.Outcome:
    if isinstance(data, _IterableDatasetStopIteration):
        return ev.Outcome.EXHAUSTED
    return ev.Outcome.ERROR if isinstance(data, ExceptionWrapper) else ev.Outcome.DATA


class ObservedCollate:
    """Stands for collate_fn in a worker.

    It emits when its `__call__` is looked up, so it has no frame in the traceback of an error of collate_fn.
    """

    def __init__(self, worker: ObservedWorker, collate_fn: Callable[..., Any], counted: bool) -> None:
        self.worker = worker
        self.collate_fn = collate_fn
        self.counted = counted

    @property
    def __call__(self) -> Callable[..., Any]:
        self.worker.progress.collate(self.worker.samples if self.counted else -1)
        return self.collate_fn
