"""Which task goes to which worker, and what is yielded next (upstream: `_try_put_index` and `_next_data`).

`send_idx` numbers tasks as they are sent, and `rcvd_idx` is the task to be yielded next. `task_info` holds each task in
[rcvd_idx, send_idx) that will still be yielded. A batch that comes before its turn stays there: the reorder buffer.

Rules of use: call `assign` for each index that the sampler gives, and `next_step` for each batch that the consumer
wants. On `Wait`, read a result, pass it to `receive` (or to `exhausted`, if its worker's dataset has ended), and call
`next_step` again. On `Deliver`, which `receive` may also return, call `assign` once more and yield the data. On
`EPOCH_END`, stop. No processes, queues, clocks or tensors here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from minidl.live_repr import LiveRepr, numbers

if TYPE_CHECKING:
    from typing_extensions import Self

Frozen = tuple[Any, ...]
"""A saved state, see `freeze`."""

NOT_FETCHED: Final = object()
"""`TaskInfo.data` of a task that is outstanding: sent, and not received yet."""


@dataclass(slots=True)
class TaskInfo:
    """What the loader knows of a task that is not yielded yet."""

    worker_id: int
    index: Any
    data: Any = NOT_FETCHED

    @property
    def fetched(self) -> bool:
        """Whether the result is here, waiting for its turn."""
        return self.data is not NOT_FETCHED


@dataclass(slots=True)
class Assignment:
    """Task `idx` goes to worker `worker_id`."""

    idx: int
    worker_id: int


@dataclass(slots=True, unsafe_hash=True)
class Deliver:
    """Task `idx` is to be yielded now."""

    idx: int
    worker_id: int
    data: Any


@dataclass(slots=True)
class Wait:
    """No batch can be yielded before another result comes; if in order, that of task `idx` of worker `worker_id`."""

    idx: int
    worker_id: int


class NoBatch(enum.Enum):
    """Why no batch is yielded now."""

    EPOCH_END = enum.auto()
    STORED = enum.auto()  # the result came before its turn and is kept
    STALE = enum.auto()  # the result of a task that was given up when its worker ended; drop it


EPOCH_END: Final = NoBatch.EPOCH_END
STORED: Final = NoBatch.STORED
STALE: Final = NoBatch.STALE


class DispatchError(AssertionError):
    """A call broke the dispatcher's rules, or a result came for a task that is not outstanding."""


@dataclass(slots=True, repr=False)
class Dispatcher(LiveRepr):
    """The state of one epoch (upstream: the attributes that `_MultiProcessingDataLoaderIter._reset` sets).

    Raises DispatchError for a result of an unknown or already received task, and for a task beyond the capacity of
    `prefetch_factor * num_workers`. Article 1 §2.4.3, §2.4.4, §2.4.7; article 4 §iterator.
    """

    num_workers: int
    prefetch_factor: int
    in_order: bool = True
    send_idx: int = field(init=False)
    rcvd_idx: int = field(init=False)
    task_info: dict[int, TaskInfo] = field(init=False)
    tasks_outstanding: int = field(init=False)  # not answered: those in task_info that are not fetched, and _given_up
    workers_status: list[bool] = field(init=False)  # whether the worker still has work to do *in this epoch*
    workers_num_tasks: list[int] = field(init=False)  # tasks sent to the worker and not delivered yet
    _turn: int = field(init=False)  # the worker whose turn is next
    _given_up: set[int] = field(init=False)  # tasks skipped because their worker ended first

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin an epoch: round robin starts at worker 0 again, and every worker counts as having work."""
        self.send_idx = 0
        self.rcvd_idx = 0
        self.task_info = {}
        self.tasks_outstanding = 0
        self.workers_status = [True] * self.num_workers
        self.workers_num_tasks = [0] * self.num_workers
        self._turn = 0
        self._given_up = set()

    def start_at(self, worker_id: int) -> None:
        """Give the epoch's first task to this worker: a resumed epoch goes on in turn."""
        self._turn = worker_id

    @property
    def capacity(self) -> int:
        """Most tasks that may be outstanding at once."""
        return self.prefetch_factor * self.num_workers

    @property
    def reorder_depth(self) -> int:
        """Batches in the reorder buffer."""
        return sum(info.fetched for info in self.task_info.values())

    def check_capacity(self) -> None:
        """Raise DispatchError unless one more task may be outstanding; `assign` asks.

        The driver never meets this error. It draws `capacity` indices, then one for each batch that is delivered and
        one for each worker whose dataset has ended.
        """
        if self.tasks_outstanding >= self.prefetch_factor * self.num_workers:
            raise DispatchError(
                f"task {self.send_idx}: {self.tasks_outstanding} tasks are outstanding, "
                f"the capacity is {self.prefetch_factor} * {self.num_workers} = {self.capacity}"
            )

    def assign(self, index: Any) -> Assignment | None:
        """Give `index` to the next worker in turn that may take it; None (and the index is dropped) if none may."""
        self.check_capacity()
        worker_id = self._next_worker()
        if worker_id is None:
            return None
        assignment = Assignment(self.send_idx, worker_id)
        self.task_info[self.send_idx] = TaskInfo(worker_id, index)
        self.workers_num_tasks[worker_id] += 1
        self.tasks_outstanding += 1
        self.send_idx += 1
        return assignment

    def _next_worker(self) -> int | None:
        count, worker_id = self.num_workers, self._turn
        for _ in range(count):
            self._turn = following = (worker_id + 1) % count
            if self.workers_status[worker_id] and (self.in_order or self._has_room(worker_id)):
                return worker_id
            worker_id = following
        return None

    def _has_room(self, worker_id: int) -> bool:
        """If not in order, active workers hold equal shares of the capacity, so that a slow one gets fewer tasks."""
        return self.workers_num_tasks[worker_id] < self.capacity // sum(self.workers_status)

    def next_step(self) -> Deliver | Wait | NoBatch:
        """What to do for the consumer's next batch. Skips tasks whose worker ended before it fetched them."""
        while self.rcvd_idx < self.send_idx:
            info = self.task_info.get(self.rcvd_idx)
            if info is not None:
                if info.data is not NOT_FETCHED:
                    return self._deliver(self.rcvd_idx)
                if self.workers_status[info.worker_id]:
                    return Wait(self.rcvd_idx, info.worker_id)
                del self.task_info[self.rcvd_idx]
                self._given_up.add(self.rcvd_idx)
            self.rcvd_idx += 1
        return EPOCH_END

    def receive(self, idx: int, data: Any) -> Deliver | NoBatch:
        """A result has come: deliver it if it is its turn (or order does not matter), else keep it."""
        info = self.task_info.get(idx)
        if info is None or info.data is not NOT_FETCHED:
            return self._unexpected(idx)
        self.tasks_outstanding -= 1
        info.data = data
        if idx == self.rcvd_idx or not self.in_order:
            return self._deliver(idx)
        return STORED

    def _unexpected(self, idx: int) -> NoBatch:
        if idx not in self._given_up:
            self._outstanding(idx)  # raises
        self._given_up.remove(idx)
        self.tasks_outstanding -= 1
        return STALE

    def exhausted(self, idx: int, worker_id: int) -> None:
        """The worker answered task `idx`: its iterable dataset has ended."""
        if self._outstanding(idx).worker_id != worker_id:
            raise DispatchError(f"task {idx} was sent to another worker than {worker_id}")
        del self.task_info[idx]
        self.tasks_outstanding -= 1
        self.workers_status[worker_id] = False

    def worker_unavailable(self, worker_id: int) -> None:
        """Send the worker nothing more in this epoch: it is dead or told to leave."""
        self.workers_status[worker_id] = False

    def _outstanding(self, idx: int) -> TaskInfo:
        info = self.task_info.get(idx)
        if info is None or info.fetched:
            raise DispatchError(f"a result came for task {idx}, which is {'fetched already' if info else 'unknown'}")
        return info

    def _deliver(self, idx: int) -> Deliver:
        info = self.task_info.pop(idx)
        self.workers_num_tasks[info.worker_id] -= 1
        if idx == self.rcvd_idx:
            self.rcvd_idx += 1
        return Deliver(idx, info.worker_id, info.data)

    def held_by(self, worker_id: int) -> list[int]:
        """The tasks that the worker has not answered yet."""
        tasks = tuple(self.task_info.items())  # in one step: another thread may ask for the repr
        return [idx for idx, info in tasks if info.worker_id == worker_id and not info.fetched]

    def _counts(self) -> Iterator[str]:
        yield f"rcvd_idx {self.rcvd_idx}, send_idx {self.send_idx}"
        yield f"{self.tasks_outstanding} of {self.capacity} tasks outstanding"
        if early := [idx for idx, info in tuple(self.task_info.items()) if info.fetched]:
            yield f"reorder buffer: {numbers('task', early)}"

    def _phrases(self) -> Iterator[str]:
        yield from self._counts()
        for worker_id, active in enumerate(self.workers_status):
            yield f"worker {worker_id}: {numbers('task', self.held_by(worker_id))}{'' if active else ', no more work'}"

    def freeze(self) -> Frozen:
        """The state as a tuple, which is hashable if the indices and the data are; `thaw` restores it."""
        tasks = tuple((idx, info.worker_id, info.index, info.data) for idx, info in self.task_info.items())
        return (
            self.send_idx, self.rcvd_idx, tasks, self.tasks_outstanding, tuple(self.workers_status),
            tuple(self.workers_num_tasks), self._turn, tuple(sorted(self._given_up)),
        )  # fmt: skip

    def thaw(self, frozen: Frozen) -> None:
        """Continue from a state that `freeze` returned."""
        self.send_idx, self.rcvd_idx, tasks, self.tasks_outstanding, status, counts, self._turn, given_up = frozen
        self.task_info = {idx: TaskInfo(*info) for idx, *info in tasks}
        self.workers_status, self.workers_num_tasks = list(status), list(counts)
        self._given_up = set(given_up)

    def __copy__(self) -> Self:
        new = type(self)(self.num_workers, self.prefetch_factor, self.in_order)
        new.thaw(self.freeze())
        return new
