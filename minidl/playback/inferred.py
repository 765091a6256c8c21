"""The dispatcher's attributes inferred from events, for traces in which its decisions can't be replayed.

That is so for an observed loader, after a worker's death, and after events that were overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from minidl.playback.actors import DispatcherReplay, Row
from minidl.playback.state import TaskState
from minidl.tracefile import events as ev
from minidl.tracefile.events import Message, Outcome, QueueId


@dataclass
class InferredDispatch:
    """The dispatcher's attributes as the events' own fields give them: no decision is made, and none is checked."""

    in_order: bool = True
    send_idx: int | None = None
    rcvd_idx: int | None = None
    outstanding: int | None = None
    tasks: dict[int, TaskState] = field(default_factory=dict)
    num_tasks: dict[int, int] = field(default_factory=dict)
    status: dict[int, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, replayed: DispatcherReplay) -> InferredDispatch:
        """Go on from the dispatcher's state."""
        d = replayed.dispatcher
        tasks = {task: TaskState(info.worker_id, info.fetched) for task, info in d.task_info.items()}
        status, num_tasks = dict(enumerate(d.workers_status)), dict(enumerate(d.workers_num_tasks))
        return cls(d.in_order, d.send_idx, d.rcvd_idx, d.tasks_outstanding, tasks, num_tasks, status)

    def __copy__(self) -> InferredDispatch:
        return replace(self, tasks=dict(self.tasks), num_tasks=dict(self.num_tasks), status=dict(self.status))

    def step(self, event: Row, received_by: int) -> None:
        """Follow one event. received_by: the code of the event by which the loader receives a result."""
        code, task, worker = event["code"], event["task"], event["worker"]
        if code == ev.TASK_ASSIGNED:
            self._assigned(task, worker, event["y"])
        elif code == ev.INDEX_PUT:  # it says the same, if the assignment is not recorded
            self._assigned(task, worker, None)
        elif code == received_by:
            if event["x"] == Message.RESULT and event["y"] != Outcome.EXHAUSTED and task >= 0:
                self._received(task, worker)
        elif code == ev.RCVD_ADVANCE:
            self._advanced(event["x"], event["y"])
        elif code == ev.YIELD:
            self._yielded(task)
        elif code == ev.WORKER_EXHAUSTED or (code == ev.SENTINEL_PUT and event["x"] == QueueId.INDEX):
            self.status[worker] = False
        elif code == ev.RESUME_PUT and self.send_idx:
            self.begin(len(self.status))

    def begin(self, num_workers: int) -> None:
        """Begin an epoch."""
        self.send_idx = self.rcvd_idx = self.outstanding = 0
        self.tasks.clear()
        self.num_tasks = dict.fromkeys(range(num_workers), 0)
        self.status = dict.fromkeys(range(num_workers), True)

    def _assigned(self, task: int, worker: int, outstanding: int | None) -> None:
        if task in self.tasks:
            return
        self.send_idx = task + 1
        self.outstanding = self._outstanding(1) if outstanding is None else outstanding
        self._enter(task, TaskState(worker, False))

    def _enter(self, task: int, known: TaskState) -> None:
        self.tasks[task] = known
        self.num_tasks[known.worker_id] = self.num_tasks.get(known.worker_id, 0) + 1
        self.status.setdefault(known.worker_id, True)

    def _leave(self, task: int) -> None:
        """Drop a task; one that is given up still counts as its worker's."""
        known = self.tasks.pop(task, None)
        if known is not None and known.fetched:
            self.num_tasks[known.worker_id] -= 1

    def _outstanding(self, by: int) -> int | None:
        return None if self.outstanding is None else max(0, self.outstanding + by)

    def _received(self, task: int, worker: int) -> None:
        known = self.tasks.get(task)
        if known is None or not known.fetched:
            self.outstanding = self._outstanding(-1)
        if known is not None:
            self.tasks[task] = replace(known, fetched=True)
        elif worker >= 0:
            self._enter(task, TaskState(worker, True))

    def _advanced(self, rcvd_idx: int, outstanding: int) -> None:
        self.rcvd_idx, self.outstanding = rcvd_idx, outstanding
        if self.in_order:
            for task in [task for task in self.tasks if task < rcvd_idx]:
                self._leave(task)

    def _yielded(self, task: int) -> None:
        self._leave(task)
        if self.in_order and task >= 0 and (self.rcvd_idx is None or self.rcvd_idx <= task):
            self.rcvd_idx = task + 1
