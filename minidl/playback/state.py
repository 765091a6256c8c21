"""The state of an iterator, its workers, its pin thread and its queues at one moment of a recorded run.

Interface: `ProtocolState`, made of `TaskState`, `WorkerNow`, `PinNow` and `Queued`. `follower.Follower` makes one from
events, `words.lines` renders one. Equal states compare equal; none is changed once it is returned. `since` is in ns of
CLOCK_MONOTONIC, as the events' times; `time` is in seconds after the trace's first event.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from minidl.loader.protocol import LoaderState, PinState, WorkerState
from minidl.tracefile import events as ev
from minidl.tracefile.events import Actor, Call, DoneEvent, Message
from minidl.tracefile.words import doing

MOST_WORKERS: Final = 1 << 14
"""A larger number of workers, or worker's number, is a damaged record; nothing is allocated for it."""


class MessageStage(enum.Enum):
    """How far a message has come."""

    ENQUEUED = "enqueued"  # in the sender's own memory, for its feeder thread to take
    PICKLING = "pickling"
    COPYING = "being copied to shared memory"  # a part of pickling
    PICKLED = "pickled"
    WRITING = "being written"
    WRITTEN = "in the pipe"
    READ = "read"
    REBUILDING = "rebuilding"
    REBUILT = "rebuilt"

    @property
    def sent(self) -> bool:
        """Whether its sender has written all of it."""
        return self in (self.WRITTEN, self.READ, self.REBUILDING, self.REBUILT)


STARTING: Final = 0
"""What a worker does of which no event has told anything yet."""

_ABOUT_A_TASK: Final = (ev.INDEX_GET[1], ev.FETCH[0], ev.SAMPLE[0], ev.COLLATE[0], ev.RESULT_PUT)

_L: Final = LoaderState
_CALLS: Final = {
    **dict.fromkeys((_L.STARTING, _L.RESUMING, _L.PRIMING), Call.START),
    _L.WAITING: Call.NEXT,
    **dict.fromkeys((_L.STOPPING_PIN, _L.STOPPING_WORKERS, _L.JOINING, _L.TERMINATING), Call.SHUTDOWN),
}
"""The call that the program is in, by the loader's state; in any other state its own code runs."""

_BETWEEN: Final = {
    _L.NEW: "starting",
    _L.STARTING: "starting",
    _L.PRIMING: "sending the first tasks",
    _L.EXHAUSTED: "between two epochs",
}


@dataclass(frozen=True, slots=True)
class TaskState:
    """One entry of `task_info`: whose task it is, and whether its result is here (in the reorder buffer)."""

    worker_id: int
    fetched: bool


class Queued(NamedTuple):
    """One message in a queue. task, worker: -1 = none. payload: pickled bytes; shared: bytes in shared memory."""

    kind: Message
    task: int = -1
    worker: int = -1
    stage: MessageStage = MessageStage.ENQUEUED
    payload: int = 0
    shared: int = 0
    since: int = 0
    """When it reached this stage."""

    @property
    def name(self) -> str:
        """For a reader: "task 3", "resume", "sentinel"."""
        return f"task {self.task}" if self.task >= 0 else self.kind.name.lower()

    def at(self, stage: MessageStage, since: int, payload: int = 0, shared: int = 0) -> Queued:
        """Return it at another stage. payload: 0 = as before; shared: bytes to add."""
        return Queued(self.kind, self.task, self.worker, stage, payload or self.payload, self.shared + shared, since)

    def __repr__(self) -> str:
        return f"<{self.name}{f' of worker {self.worker}' if self.worker >= 0 else ''}: {self.stage.value}>"


@dataclass(slots=True, repr=False)
class WorkerNow:
    """One worker. worker -1 is the loader's own process if there are no workers and it fetches itself.

    activity: the event from which on its main thread does what it does (`Event.doing`), or STARTING. task, position,
    index: what `activity` is about, -1 = none. making: bytes of shared memory that the batch in work
    has by now. exit_code: None while the process runs, as far as the loader knows. since: when it began `activity`; an
    idle worker, when it became idle, however often it has polled its queue.
    """

    worker: int
    pid: int = 0
    state: WorkerState = WorkerState.STARTING
    activity: int = STARTING
    task: int = -1
    position: int = -1
    index: int = -1
    making: int = 0
    index_queue: tuple[Queued, ...] = ()
    exit_code: int | None = None
    since: int = 0

    @property
    def about(self) -> int:
        """The task that `activity` is about; -1 = none."""
        return self.task if self.activity in _ABOUT_A_TASK else -1

    @property
    def held(self) -> int:
        """The task that it has taken and not answered; -1 = none."""
        return -1 if self.activity == ev.RESULT_PUT else self.task

    @property
    def idle(self) -> bool:
        """Whether it waits for a task, or has left."""
        return self.activity in (ev.INDEX_GET[0], ev.WORKER_EXIT, ev.WORKER_GONE)

    @property
    def doing(self) -> str:
        """`activity` in words."""
        if self.activity == STARTING:
            return "starting"
        code = f", exit code {self.exit_code}" if self.activity == ev.WORKER_GONE and self.exit_code is not None else ""
        step = {"code": self.activity, "task": self.task, "worker": self.worker, "bx": self.position, "by": self.index}
        return doing(step) + code

    def __repr__(self) -> str:
        who = f"worker {self.worker}" if self.worker >= 0 else "no worker"
        return f"<{who} (pid {self.pid or 'unknown'}) {self.state.name}: {self.doing}; {len(self.index_queue)} queued>"


@dataclass(frozen=True, slots=True)
class PinNow:
    """The pin-memory thread. task: the one it holds, -1 = none."""

    state: PinState = PinState.STARTING
    task: int = -1
    simulated: bool = False


@dataclass(repr=False)
class ProtocolState:
    """The complete state of the protocol's actors at one moment.

    send_idx, rcvd_idx, task_info, tasks_outstanding, workers_num_tasks, workers_status: the dispatcher's attributes
    (upstream: the iterator's, with an underscore); None as long as no event has given a number. reorder_buffer: tasks
    that are here before their turn. in_hand: the task that the loader has received and not yet stored or handed out.
    waiting_for, waiting_worker: the task that a waiting loader needs and its worker, -1 = whichever comes. consumer:
    the task whose batch the training loop works on, -1 = its code runs without one, None = it waits or is not running.
    resumed: batches of the epoch that were yielded before it was resumed, in another process. kept: worker -> the task,
    yielded, with which its state came. taken: batches in the loader's state that the program has asked for last.
    result_queue: what is in the pipe, in order, then what waits in the workers' feeders. bytes_in_flight: of this
    epoch's batches, from the memory that collate makes for one, or its pickle, to its yield. joining: (actor, worker)
    that the loader waits for. alone: there are no workers. since: when the loader began what it does.

    known: decided by the loader's own Dispatcher, from an epoch's begin on; otherwise inferred from the events alone,
    and `note` gives the reason. violation: why the protocol does not allow the event that led here; "" = it does.
    """

    time: float = 0.0
    since: int = 0
    epoch: int | None = None
    loader: LoaderState = LoaderState.NEW
    pid: int = 0
    alone: bool = False
    send_idx: int | None = None
    rcvd_idx: int | None = None
    task_info: Mapping[int, TaskState] = field(default_factory=dict)
    tasks_outstanding: int | None = None
    workers_num_tasks: tuple[int, ...] = ()
    workers_status: tuple[bool, ...] = ()
    reorder_buffer: tuple[int, ...] = ()
    sampling: int | None = None
    in_hand: int | None = None
    waiting_for: int | None = None
    waiting_worker: int = -1
    consumer: int | None = None
    yielded: int = 0
    resumed: int = 0
    kept: Mapping[int, int] = field(default_factory=dict)
    taken: int | None = None
    workers: tuple[WorkerNow, ...] = ()
    result_queue: tuple[Queued, ...] = ()
    pin: PinNow | None = None
    ready_queue: tuple[Queued, ...] = ()
    bytes_in_flight: int = 0
    done_events: tuple[DoneEvent, ...] = ()
    joining: tuple[tuple[Actor, int], ...] = ()
    known: bool = True
    note: str = ""
    violation: str = ""

    def worker(self, worker_id: int) -> WorkerNow:
        """Return the worker of this number. Raises KeyError if no event has named it."""
        for worker in self.workers:
            if worker.worker == worker_id:
                return worker
        raise KeyError(f"worker {worker_id} is in no event so far: there are {[w.worker for w in self.workers]}")

    @property
    def simulated(self) -> bool:
        """Whether pinning is simulated."""
        return self.pin is not None and self.pin.simulated

    @property
    def over(self) -> bool:
        """Whether the iterator has ended: shut down, or at the end of its one epoch without workers."""
        return self.loader is LoaderState.CLOSED or (self.alone and self.loader is LoaderState.EXHAUSTED)

    @property
    def call(self) -> Call:
        """The call of the iterator that the program is in."""
        return _CALLS.get(self.loader, Call.OWN)

    @property
    def shutting_down(self) -> bool:
        """Whether the shutdown has begun and is not over."""
        return self.call is Call.SHUTDOWN

    @property
    def waiting(self) -> bool:
        """Whether the training loop waits in next(), or the loader for its workers to resume."""
        blocked = self.waiting_for is not None and not self.over and not self.shutting_down
        return blocked or self.loader in (LoaderState.WAITING, LoaderState.RESUMING)

    @property
    def doing(self) -> str:
        """What the loader's own thread does, in words."""
        if self.over:
            return "has ended"
        if self.shutting_down:
            joining = "".join(f", waiting for {_name(*actor)} to end" for actor in self.joining[-1:])
            return f"shutting down{joining}"
        if self.loader is LoaderState.RESUMING:
            return "waiting for its workers to resume"
        if self.consumer is not None:
            return doing({"code": ev.CONSUMER[0], "task": self.consumer, "worker": -1})
        step = self._step()
        if self.loader is LoaderState.WAITING and self.waiting_for is None:
            return f"in next, {step}" if step else "in next"
        return step or _BETWEEN.get(self.loader, "between two calls")

    def _step(self) -> str:
        """The inner step of the loader's thread, if there is one."""
        rebuilt = [m.task for m in self.result_queue if m.stage is MessageStage.REBUILDING and self.pin is None]
        new = [w.worker for w in self.workers if not w.pid and self.loader in (LoaderState.NEW, LoaderState.STARTING)]
        if rebuilt:
            code, task, worker = ev.RESULT_REBUILD[0], rebuilt[0], -1
        elif self.waiting_for is not None:
            code, task, worker = ev.RESULT_GET[0], self.waiting_for, self.waiting_worker
        elif self.sampling is not None:
            code, task, worker = ev.SAMPLER_NEXT[0], self.sampling, -1
        elif new:
            code, task, worker = ev.WORKER_START[0], -1, new[0]
        else:
            own = self.workers[0] if self.workers else None
            return own.doing if own is not None and own.worker < 0 <= own.about else ""
        return doing({"code": code, "task": task, "worker": worker})

    def __repr__(self) -> str:
        violation = f"; not allowed: {self.violation}" if self.violation else ""
        return (
            f"<ProtocolState at {self.time:.6f} s: epoch {self.epoch}, loader {self.loader.name} ({self.doing}), "
            f"{self.yielded} yielded, {self.tasks_outstanding} outstanding, {len(self.workers)} workers{violation}>"
        )


def _name(actor: Actor, worker: int) -> str:
    return f"worker {worker}" if actor is Actor.WORKER else f"the {actor.name.lower().replace('_', ' ')}"
