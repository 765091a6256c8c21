"""The whole protocol's state, as a loader's events lead to it one by one.

Interface: `Follower(trace, loader, rows)`; `step(event)` takes one event, `state()` gives a `ProtocolState`, and
`copy.copy` of a Follower goes its own way. What the loader decides comes from `replay.DispatcherReplay` and the
lifecycles from the other replays, all of them the live loader's own classes; queues, hands and bytes are counted here.

Rules of use: events come in an order in which no message is received before it is sent (`stepper.causal_order`). What
the protocol does not allow is said in `ProtocolState.violation`, and following goes on from what the events say.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from minidl.dispatcher import DispatchError
from minidl.protocol import LoaderState, PinState, ProtocolError, WorkerState
from minidl.tracing import events as ev
from minidl.tracing.events import Actor, DoneEvent, Message, Outcome, Place, QueueId
from minidl.tracing.replay import DispatcherReplay, LoaderReplay, PinReplay, WorkerReplay

if TYPE_CHECKING:
    from minidl.tracing.reader import Trace

Row = Mapping[str, int]

MOST_WORKERS: Final = 1 << 14
"""A number of workers, or a worker's number, beyond it is a damaged record; nothing is allocated for it."""


# --- What there is to see ---------------------------------------------------------------------------------------------
class Stage(enum.Enum):
    """How far a message has come."""

    ENQUEUED = "enqueued"  # in the sender's own memory, for its feeder thread to take
    PICKLING = "pickling"
    PICKLED = "pickled"
    WRITING = "being written"
    WRITTEN = "in the pipe"
    READ = "read"
    REBUILDING = "rebuilding"
    REBUILT = "rebuilt"


class Activity(enum.Enum):
    """What a worker's main thread does."""

    STARTING = "starting"
    READY = "between two steps"
    WAITING = "waiting for a task"
    TAKEN = "has taken"
    FETCHING = "fetching"
    SAMPLE = "asks the dataset"
    COLLATING = "collating"
    ANSWERED = "has answered"
    LEFT = "has left its loop"
    GONE = "gone"


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
    stage: Stage = Stage.ENQUEUED
    payload: int = 0
    shared: int = 0

    @property
    def name(self) -> str:
        """For a reader: "task 3", "resume", "sentinel"."""
        return f"task {self.task}" if self.task >= 0 else self.kind.name.lower()


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """One worker. worker -1 is the loader's own process where there are no workers and it fetches itself.

    task, position, index: what `activity` is about, -1 = none. making: bytes of shared memory that the batch in work
    has by now. exit_code: None while the process runs, as far as the loader knows.
    """

    worker: int
    pid: int = 0
    state: WorkerState = WorkerState.STARTING
    activity: Activity = Activity.STARTING
    task: int = -1
    position: int = -1
    index: int = -1
    making: int = 0
    index_queue: tuple[Queued, ...] = ()
    exit_code: int | None = None

    @property
    def doing(self) -> str:
        """`activity` in words."""
        about = f" task {self.task}" if self.task >= 0 and self.activity in _ABOUT_A_TASK else ""
        if self.activity is Activity.SAMPLE:
            which = f"sample {self.index}" if self.index >= 0 else "a sample"
            place = f" (place {self.position + 1})" if self.position >= 0 else ""
            return f"in {which} of task {self.task}{place}"
        if self.activity is Activity.GONE and self.exit_code is not None:
            about = f", exit code {self.exit_code}"
        return f"{self.activity.value}{about}"


_ALONE: Final = {Activity.FETCHING, Activity.SAMPLE, Activity.COLLATING, Activity.READY}
_ABOUT_A_TASK: Final = {
    Activity.TAKEN, Activity.FETCHING, Activity.COLLATING, Activity.ANSWERED
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PinNow:
    """The pin-memory thread. task: the one it holds, -1 = none."""

    state: PinState = PinState.STARTING
    task: int = -1
    simulated: bool = False


@dataclass(frozen=True)
class ProtocolState:
    """Everything that the protocol's actors have and do at one moment. Equal states compare equal.

    send_idx, rcvd_idx, task_info, tasks_outstanding, workers_num_tasks, workers_status: the dispatcher's attributes
    (upstream: the iterator's, with an underscore); a number is None where nothing has told it yet. reorder_buffer:
    tasks that are here before their turn. in_hand: the task that the loader has received and not yet stored or handed
    out. waiting_for: the task that a waiting loader needs, -1 = whichever comes. consumer: the task whose batch the
    training loop works on, -1 = its code runs without one, None = it waits or is not running. result_queue: what is in
    the pipe, in order, then what waits in the workers' feeders. bytes_in_flight: of this epoch's batches, from the
    memory that collate makes for one, or its pickle, to its yield. joining: (actor, worker) that the loader waits for.

    time: seconds since the trace's first event. known: decided by the loader's own Dispatcher, from an epoch's begin
    on; otherwise told from the events alone, and `note` says why. violation: what the protocol does not allow about
    the event that led here, "" = nothing.
    """

    time: float
    epoch: int | None
    loader: LoaderState
    pid: int
    send_idx: int | None
    rcvd_idx: int | None
    task_info: Mapping[int, TaskState]
    tasks_outstanding: int | None
    workers_num_tasks: tuple[int, ...]
    workers_status: tuple[bool, ...]
    reorder_buffer: tuple[int, ...]
    sampling: int | None
    in_hand: int | None
    waiting_for: int | None
    consumer: int | None
    yielded: int
    workers: tuple[WorkerNow, ...]
    result_queue: tuple[Queued, ...]
    pin: PinNow | None
    ready_queue: tuple[Queued, ...]
    bytes_in_flight: int
    done_events: tuple[DoneEvent, ...]
    joining: tuple[tuple[Actor, int], ...]
    known: bool
    note: str
    violation: str

    def worker(self, worker_id: int) -> WorkerNow:
        """The worker of this number; KeyError where it has not been heard of."""
        for worker in self.workers:
            if worker.worker == worker_id:
                return worker
        raise KeyError(f"worker {worker_id} has not been heard of; there are {[w.worker for w in self.workers]}")

    @property
    def simulated(self) -> bool:
        """Whether pinning is a pretence."""
        return self.pin is not None and self.pin.simulated


# --- What is told, where decisions can't be replayed ------------------------------------------------------------------
@dataclass
class _Told:
    """The dispatcher's attributes as the events' own fields tell them: no decision is made, and none is checked."""

    in_order: bool = True
    send_idx: int | None = None
    rcvd_idx: int | None = None
    outstanding: int | None = None
    tasks: dict[int, TaskState] = field(default_factory=dict)
    num_tasks: dict[int, int] = field(default_factory=dict)
    status: dict[int, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, replayed: DispatcherReplay) -> _Told:
        """Go on from where the dispatcher stood."""
        d = replayed.dispatcher
        tasks = {task: TaskState(info.worker_id, info.fetched) for task, info in d.task_info.items()}
        status, num_tasks = dict(enumerate(d.workers_status)), dict(enumerate(d.workers_num_tasks))
        return cls(d.in_order, d.send_idx, d.rcvd_idx, d.tasks_outstanding, tasks, num_tasks, status)

    def __copy__(self) -> _Told:
        return replace(self, tasks=dict(self.tasks), num_tasks=dict(self.num_tasks), status=dict(self.status))

    def begin(self, num_workers: int) -> None:
        """An epoch begins."""
        self.send_idx = self.rcvd_idx = self.outstanding = 0
        self.tasks.clear()
        self.num_tasks = dict.fromkeys(range(num_workers), 0)
        self.status = dict.fromkeys(range(num_workers), True)

    def assigned(self, task: int, worker: int, outstanding: int | None) -> None:
        """A task is given to a worker, or put for it where nothing else tells that."""
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
        """A task that is given up still counts as its worker's."""
        known = self.tasks.pop(task, None)
        if known is not None and known.fetched:
            self.num_tasks[known.worker_id] -= 1

    def _outstanding(self, by: int) -> int | None:
        return None if self.outstanding is None else max(0, self.outstanding + by)

    def received(self, task: int, worker: int) -> None:
        """Its result is here."""
        known = self.tasks.get(task)
        if known is None or not known.fetched:
            self.outstanding = self._outstanding(-1)
        if known is not None:
            self.tasks[task] = replace(known, fetched=True)
        elif worker >= 0:
            self._enter(task, TaskState(worker, True))

    def advanced(self, rcvd_idx: int, outstanding: int | None) -> None:
        """rcvd_idx is told."""
        self.rcvd_idx = rcvd_idx
        if outstanding is not None:
            self.outstanding = outstanding
        if self.in_order:
            for task in [task for task in self.tasks if task < rcvd_idx]:
                self._leave(task)

    def yielded(self, task: int) -> None:
        """It is handed out."""
        self._leave(task)
        if self.in_order and task >= 0 and (self.rcvd_idx is None or self.rcvd_idx <= task):
            self.rcvd_idx = task + 1


# --- Following --------------------------------------------------------------------------------------------------------
_LOADER_FORCED: Final = {
    ev.EPOCH[0]: LoaderState.PRIMING,
    ev.NEXT[0]: LoaderState.WAITING,
    ev.NEXT[1]: LoaderState.IDLE,
    ev.CONSUMER[0]: LoaderState.IDLE,
    ev.EPOCH[1]: LoaderState.EXHAUSTED,
    ev.RESUME_PUT: LoaderState.RESUMING,
    ev.SHUTDOWN[0]: LoaderState.STOPPING_PIN,
    ev.SHUTDOWN[1]: LoaderState.CLOSED,
}
_WORKER_FORCED: Final = {
    ev.WORKER_READY: WorkerState.WAITING,
    ev.FETCH[0]: WorkerState.FETCHING,
    ev.FETCH[1]: WorkerState.WAITING,
    ev.RESUME_ACK: WorkerState.WAITING,
    ev.RESULT_PUT: WorkerState.WAITING,
    ev.SENTINEL_GET: WorkerState.ENDED,
    ev.WORKER_EXIT: WorkerState.ENDED,
}
_PIN_FORCED: Final = {
    ev.PIN_START: PinState.WAITING,
    ev.RESULT_GET[1]: PinState.PINNING,
    ev.PIN[0]: PinState.PINNING,
    ev.READY_PUT: PinState.WAITING,
    ev.PIN_EXIT: PinState.ENDED,
}
"""Where an actor is after an event that its table did not allow, or that came after events that are lost."""

_AT_HOME: Final = (*ev.EPOCH, *ev.NEXT, *ev.CONSUMER, *ev.WORKER_START, ev.TASK_ASSIGNED, ev.INDEX_PUT, *ev.SHUTDOWN)
"""What only the loader's own process records."""

_WITH_WORKERS: Final = (
    *ev.WORKER_START,
    ev.WORKER_READY,
    ev.TASK_ASSIGNED,
    ev.INDEX_PUT,
    *ev.INDEX_GET,
    *ev.RESULT_GET,
)
"""What an iterator without workers never records."""

_IN_PIPE: Final = (Stage.WRITING, Stage.WRITTEN)


@dataclass(slots=True)
class _Worker:
    """A worker while it is followed: most events change one, so it is changed in place; see `WorkerNow`."""

    worker: int
    pid: int = 0
    state: WorkerState = WorkerState.STARTING
    activity: Activity = Activity.STARTING
    task: int = -1
    position: int = -1
    index: int = -1
    making: int = 0
    index_queue: list[Queued] = field(default_factory=list)
    exit_code: int | None = None

    def __copy__(self) -> _Worker:
        return replace(self, index_queue=list(self.index_queue))

    def now(self) -> WorkerNow:
        """As it is now."""
        return WorkerNow(
            self.worker, self.pid, self.state, self.activity, self.task, self.position, self.index, self.making,
            tuple(self.index_queue), self.exit_code,
        )  # fmt: skip


class Follower:
    """One loader's state, event by event. rows: its events in causal order, a part of `trace.events`."""

    def __init__(self, trace: Trace, loader: int, rows: npt.NDArray[np.void]) -> None:
        facts = trace.loaders.get(loader, {})
        self.in_order = facts.get("in_order", True) is not False
        codes = rows["code"]
        self.pinned = bool(np.isin(codes, (ev.PIN_START, *ev.READY_GET, ev.READY_PUT)).any())
        self.received_by = ev.READY_GET[1] if self.pinned else ev.RESULT_GET[1]
        done = rows[(codes == ev.DONE_EVENT_SET) & (rows["x"] == DoneEvent.WORKERS)]
        self.done_set_at = int(done["time"][0]) if len(done) else None
        self.alone = not np.isin(codes, _WITH_WORKERS).any()
        self.observed = facts.get("observed") is True
        self.knows_from, self.note = _beginning(trace, rows, self.observed)
        self.lossy = any(trace.processes[index].lost for index in np.unique(rows["process"]).tolist())
        home = rows["pid"][np.isin(codes, _AT_HOME)]
        self.pid = int(home[0]) if len(home) else 0
        self.start = int(trace.events["time"][0]) if len(trace.events) else 0
        self._begin()

    def _begin(self) -> None:
        self.stepped = 0
        self.time = self.start
        self.partial = self.knows_from is None or self.knows_from > 0
        self.exact: DispatcherReplay | None = None
        self.told = _Told(self.in_order)
        self.loader_life = LoaderReplay()
        self.worker_lives: dict[int, WorkerReplay] = {}
        self.pin_life = PinReplay()
        self.epoch: int | None = None
        self.sampling: int | None = None
        self.in_hand: int | None = None
        self.waiting_for: int | None = None
        self.consumer: int | None = None
        self.yielded = 0
        self.workers: dict[int, _Worker] = {}
        self.pipe: list[Queued] = []
        self.outbox: list[Queued] = []  # results that their feeder threads have not begun to write
        self.ready: list[Queued] = []
        self.in_flight: dict[int, int] | None = {}  # task -> bytes; None between two epochs
        self.pin: PinNow | None = None
        self.done_events: tuple[DoneEvent, ...] = ()
        self.joining: tuple[tuple[Actor, int], ...] = ()
        self.violation = ""

    def __copy__(self) -> Follower:
        new = Follower.__new__(Follower)
        lives = {worker: copy.copy(life) for worker, life in self.worker_lives.items()}
        new.__dict__.update(
            self.__dict__,
            exact=copy.copy(self.exact),
            told=copy.copy(self.told),
            loader_life=copy.copy(self.loader_life),
            worker_lives=lives,
            pin_life=copy.copy(self.pin_life),
            workers={number: copy.copy(worker) for number, worker in self.workers.items()},
            pipe=list(self.pipe),
            outbox=list(self.outbox),
            ready=list(self.ready),
            in_flight=copy.copy(self.in_flight),
        )
        return new

    # --- one event
    def step(self, event: Row) -> None:
        """Follow one event; never raises for what the event says."""
        self.violation = ""
        self.time = event["time"]
        if self.partial and self.knows_from is not None and self.stepped >= self.knows_from:
            self._know()
        self.stepped += 1
        for follow in _FOLLOWED[event["code"]]:
            follow(self, event)

    def _know(self) -> None:
        """From this epoch's begin on nothing is missing; at that moment every queue is empty."""
        self.partial, self.note = False, ""
        self.pipe, self.outbox, self.ready = [], [], []
        for worker in self.workers.values():
            worker.index_queue.clear()

    def _violated(self, what: str) -> None:
        if not self.partial:
            lacking = "; but events of this trace were lost" if self.lossy else ""
            self.violation = f"{self.violation}; {what}" if self.violation else what + lacking

    def _live(self, replayed: Any, forced: Mapping[int, Any], event: Row) -> None:
        """Move an actor's lifecycle; where it refuses, by what the event says of its state."""
        try:
            replayed.step(event)
        except ProtocolError as error:
            self._violated(str(error))
            replayed.life.state = forced.get(event["code"], replayed.life.state)

    def _loader_lives(self, event: Row) -> None:
        self._live(self.loader_life, _LOADER_FORCED, event)

    def _worker_lives(self, event: Row) -> None:
        number = event["worker"]
        if not 0 <= number < MOST_WORKERS:
            return
        life = self.worker_lives.get(number)
        if life is None:
            life = self.worker_lives[number] = WorkerReplay(number, self.done_set_at)
        self._live(life, _WORKER_FORCED, event)
        self._worker(number).state = life.life.state

    def _pin_lives(self, event: Row) -> None:
        if self.pinned:
            self._live(self.pin_life, _PIN_FORCED, event)

    # --- what is decided
    def _decide(self, event: Row) -> None:
        code = event["code"]
        if code == ev.EPOCH[0]:
            self._begin_epoch(event)
        if self.exact is not None:
            try:
                self.exact.step(event)
                if code == ev.FOUND_DEAD and event["x"] == Actor.WORKER:
                    self._part(self.exact, "a worker was found dead: from here on told from the events, not decided")
            except DispatchError as error:
                self._violated(str(error))
                self._part(self.exact, "the dispatcher decides otherwise: from here on told from the events")
        self._tell(event)

    def _part(self, exact: DispatcherReplay, note: str) -> None:
        """Go on without the dispatcher until the next epoch begins."""
        self.told, self.exact, self.note = _Told.of(exact), None, note

    def _begin_epoch(self, event: Row) -> None:
        workers, prefetch = event["y"], event["z"]
        followed = not self.partial and 0 < workers <= MOST_WORKERS and prefetch > 0
        if not self.partial:
            self.note = ""
        if followed:
            was = None if self.exact is None else self.exact.dispatcher
            if was is None or (was.num_workers, was.prefetch_factor) != (workers, prefetch):
                self.exact = DispatcherReplay(workers, prefetch, self.in_order, self.received_by)
            return
        self.exact = None
        self.told = _Told(self.in_order)
        if not self.alone:
            self.told.begin(min(max(workers, 0), MOST_WORKERS))

    def _tell(self, event: Row) -> None:
        if self.exact is not None or self.alone:
            return
        told, code, task, worker = self.told, event["code"], event["task"], event["worker"]
        if code == ev.TASK_ASSIGNED:
            told.assigned(task, worker, event["y"])
        elif code == ev.INDEX_PUT:
            told.assigned(task, worker, None)
        elif code == self.received_by:
            if event["x"] == Message.RESULT and event["y"] != Outcome.EXHAUSTED and task >= 0:
                told.received(task, worker)
        elif code == ev.RCVD_ADVANCE:
            told.advanced(event["x"], event["y"])
            self._prune(event["x"])
        elif code == ev.YIELD:
            told.yielded(task)
        elif code == ev.WORKER_EXHAUSTED or (code == ev.SENTINEL_PUT and event["x"] == QueueId.INDEX):
            told.status[worker] = False
        elif code == ev.RESUME_PUT and told.send_idx:
            told.begin(len(told.status))

    def _prune(self, rcvd_idx: int) -> None:
        """In order, what comes before rcvd_idx has been received, though the event that said so may be lost."""
        if not (self.partial and self.in_order):
            return
        self.pipe, self.outbox, self.ready = (
            [m for m in queue if not 0 <= m.task < rcvd_idx] for queue in (self.pipe, self.outbox, self.ready)
        )
        for worker in self.workers.values():
            worker.index_queue[:] = [m for m in worker.index_queue if not 0 <= m.task < rcvd_idx]
        if self.in_flight is not None:
            self.in_flight = {task: size for task, size in self.in_flight.items() if task >= rcvd_idx}

    # --- the state
    def state(self) -> ProtocolState:
        """The state after the events so far."""
        return ProtocolState(
            time=(self.time - self.start) / 1e9,
            epoch=self.epoch,
            loader=self.loader_life.life.state,
            pid=self.pid,
            **self._dispatched(),
            sampling=self.sampling,
            in_hand=self.in_hand,
            waiting_for=self.waiting_for,
            consumer=self.consumer,
            yielded=self.yielded,
            workers=tuple(self.workers[number].now() for number in sorted(self.workers)),
            result_queue=(*self.pipe, *self.outbox),
            pin=None if self.pin is None else replace(self.pin, state=self.pin_life.life.state),
            ready_queue=tuple(self.ready),
            bytes_in_flight=sum((self.in_flight or {}).values()),
            done_events=self.done_events,
            joining=self.joining,
            known=not self.partial and not self.note,
            note=self.note,
            violation=self.violation,
        )

    def _dispatched(self) -> dict[str, Any]:
        if self.exact is None:
            told = self.told
            tasks = dict(sorted(told.tasks.items()))
            counts = tuple(told.num_tasks[worker] for worker in sorted(told.num_tasks))
            status = tuple(told.status[worker] for worker in sorted(told.status))
            send_idx, rcvd_idx, outstanding = told.send_idx, told.rcvd_idx, told.outstanding
        else:
            d = self.exact.dispatcher
            tasks = {task: TaskState(info.worker_id, info.fetched) for task, info in d.task_info.items()}
            counts, status = tuple(d.workers_num_tasks), tuple(d.workers_status)
            send_idx, rcvd_idx, outstanding = d.send_idx, d.rcvd_idx, d.tasks_outstanding
        return {
            "send_idx": send_idx,
            "rcvd_idx": rcvd_idx,
            "task_info": tasks,
            "tasks_outstanding": outstanding,
            "workers_num_tasks": counts,
            "workers_status": status,
            "reorder_buffer": tuple(task for task, known in tasks.items() if known.fetched and task != self.in_hand),
        }

    # --- workers and their index queues
    def _worker(self, number: int) -> _Worker:
        worker = self.workers.get(number)
        if worker is None:
            worker = self.workers[number] = _Worker(number)
            if number < 0:  # the loader's own process, which has no lifecycle of a worker's
                worker.pid, worker.state = self.pid, WorkerState.WAITING
        return worker

    def _work(self, event: Row, activity: Activity, position: int = -1, index: int = -1) -> _Worker | None:
        """What the main thread of the event's worker does from here on; the worker, if the event's number is one."""
        number = event["worker"]
        if not (0 <= number < MOST_WORKERS or (number == -1 and activity in _ALONE)):
            return None
        worker = self._worker(number)
        worker.activity, worker.task, worker.position, worker.index = activity, event["task"], position, index
        if number < 0:
            worker.state = WorkerState.WAITING if activity is Activity.READY else WorkerState.FETCHING
        return worker

    def _put_index(self, event: Row, message: Message) -> None:
        number = event["worker"]
        if 0 <= number < MOST_WORKERS:
            self._worker(number).index_queue.append(Queued(message, event["task"], number))

    def _write_index(self, event: Row, before: Stage, after: Stage) -> None:
        worker = self.workers.get(event["worker"])
        for at, entry in enumerate(() if worker is None else worker.index_queue):
            if worker is not None and entry.stage is before and entry.task == event["task"]:
                worker.index_queue[at] = entry._replace(stage=after, payload=event["x"])
                return

    def _take_index(self, number: int, kind: Message, task: int, *, surely: bool = True) -> None:
        """A message leaves the index queue; it should be the first one there."""
        worker = self.workers.get(number)
        entries = [] if worker is None else worker.index_queue
        for at, entry in enumerate(entries):
            if entry.kind is kind and entry.task == task:
                if at and surely:
                    self._violated(f"{entry.name} leaves worker {number}'s index queue before {entries[0].name}")
                del entries[at]
                return
        if surely:
            what = f"task {task}" if task >= 0 else kind.name.lower()
            self._violated(f"{what} comes out of worker {number}'s index queue, and was not in it")

    def _index_got(self, event: Row) -> None:
        message, worker = event["x"], event["worker"]
        if message == Message.EMPTY or message not in _MESSAGES:
            self._work(event, Activity.READY)
            return
        self._take_index(worker, Message(message), event["task"])
        self._work(event, Activity.TAKEN if message == Message.TASK else Activity.READY)

    def _sampled(self, event: Row) -> None:
        self._work(event, Activity.SAMPLE, event["x"], event["y"])

    def _worker_started(self, event: Row) -> None:
        worker = self.workers.get(event["worker"])
        if worker is not None and event["x"]:  # what it does is told by itself, perhaps before this
            worker.pid = event["x"]

    def _worker_ready(self, event: Row) -> None:
        worker = self._work(event, Activity.READY)
        if worker is not None:
            worker.pid = event["x"]

    def _worker_gone(self, event: Row) -> None:
        self._gone(event, event["x"], event["y"])

    def _found_dead(self, event: Row) -> None:
        if event["x"] == Actor.WORKER:
            self._gone(event, event["y"], event["z"])

    def _gone(self, event: Row, pid: int, exit_code: int) -> None:
        worker = self._work(event, Activity.GONE)
        if worker is not None:
            worker.pid, worker.exit_code, worker.task = pid, exit_code, -1

    # --- results
    def _shm(self, event: Row) -> None:
        """A segment is made, for a batch in work, or for one that is pickled."""
        if event["task"] < 0 or not 0 <= event["worker"] < MOST_WORKERS:
            return
        if not self._change(self.outbox, event, shared=event["x"]):
            self._worker(event["worker"]).making += event["x"]
        if event["code"] == ev.SHM_ALLOC and event["y"] == Place.COLLATE:
            self._made(event["task"], event["x"])

    def _made(self, task: int, size: int) -> None:
        if self.in_flight is not None:
            self.in_flight[task] = self.in_flight.get(task, 0) + size

    def _put_result(self, event: Row) -> None:
        worker = self._work(event, Activity.ANSWERED)
        shared = 0
        if worker is not None:
            shared, worker.making = worker.making, 0
        self.outbox.append(Queued(Message.RESULT, event["task"], event["worker"], shared=shared))

    def _acknowledge(self, event: Row) -> None:
        self.outbox.append(Queued(Message.RESUME, -1, event["worker"]))

    def _change(self, queue: list[Queued], event: Row, stage: Stage | None = None, shared: int = 0) -> bool:
        """Change the first message of the event's task and worker; False where it is not there."""
        for at, entry in enumerate(queue):
            if entry.task == event["task"] and entry.worker == event["worker"]:
                queue[at] = entry._replace(stage=stage or entry.stage, shared=entry.shared + shared)
                return True
        return False

    def _pickled(self, event: Row) -> None:
        self._made(event["task"], event["x"] + event["z"])
        for at, entry in enumerate(self.outbox):
            if entry.task == event["task"] and entry.worker == event["worker"]:
                self.outbox[at] = entry._replace(stage=Stage.PICKLED, payload=event["x"])
                return

    def _write_result(self, event: Row) -> None:
        """Whoever writes has the pipe for itself, so the order of the begins is the order in the pipe."""
        worker = self._sender(event)
        for at, entry in enumerate(self.outbox):
            if entry.task == event["task"] and entry.worker == worker:
                self.pipe.append(self.outbox.pop(at)._replace(stage=Stage.WRITING, payload=event["x"]))
                return

    def _result_written(self, event: Row) -> None:
        sought = (event["task"], self._sender(event), Stage.WRITING)
        for at, entry in enumerate(self.pipe):
            if (entry.task, entry.worker, entry.stage) == sought:
                self.pipe[at] = entry._replace(stage=Stage.WRITTEN)
                return

    def _sender(self, event: Row) -> int:
        """Whose message is written. What is no result names no worker: an acknowledgement, or the loader's sentinel."""
        if event["worker"] >= 0:
            return event["worker"]
        return next((n for n, worker in self.workers.items() if worker.pid == event["pid"] != self.pid), -1)

    def _read_result(self, event: Row) -> None:
        """The reader reads one message after the other, so a second read before the first is taken is not believed."""
        if any(entry.stage not in _IN_PIPE for entry in self.pipe):
            return
        for at, entry in enumerate(self.pipe):
            if entry.stage in _IN_PIPE:
                self.pipe[at] = entry._replace(stage=Stage.READ)
                return

    def _take_result(self, event: Row) -> None:
        """A message leaves the result queue. Without detail of the feeders it has never been seen in the pipe."""
        kind, task, worker = Message(event["x"]), event["task"], event["worker"]
        for queue in (self.pipe, self.outbox):
            for at, entry in enumerate(queue):
                if entry.kind is kind and entry.task == task and (worker < 0 or entry.worker == worker):
                    del queue[at]
                    return
        what = f"task {task}'s result" if task >= 0 else kind.name.lower()
        self._violated(f"{what} comes out of the result queue, and was not in it")

    def _wait(self, event: Row) -> None:
        self.in_hand = None  # of leftovers of the last epoch, and of answers that no task waits for any more
        self._seem(LoaderState.WAITING)
        self.waiting_for = event["task"]

    def _result_wait(self, event: Row) -> None:
        if not self.pinned:
            self._wait(event)

    def _result_got(self, event: Row) -> None:
        message = event["x"]
        if message != Message.EMPTY and message in _MESSAGES:
            self._take_result(event)
        if not self.pinned:
            self._got(event)
        elif message == Message.RESULT:
            self.pin = replace(self.pin or PinNow(), task=event["task"])
        elif message == Message.RESUME and DoneEvent.PIN_THREAD not in self.done_events:
            self.ready.append(Queued(Message.RESUME, -1, event["worker"]))  # passed on as it is, without an event

    def _got(self, event: Row) -> None:
        self.waiting_for = None
        if event["x"] == Message.RESULT:
            self.in_hand = event["task"]

    def _ready_got(self, event: Row) -> None:
        kind = event["x"]
        if kind != Message.EMPTY:
            for at, entry in enumerate(self.ready):
                if entry.kind == kind and entry.task == event["task"]:
                    del self.ready[at]
                    break
            else:
                self._violated(f"task {event['task']} comes out of the ready queue, and was not in it")
        self._got(event)

    # --- the pin thread
    def _pin_started(self, event: Row) -> None:
        self.pin = PinNow(simulated=bool(event["x"]))

    def _pinning(self, event: Row) -> None:
        self.pin = PinNow(task=event["task"], simulated=bool(event["y"]))

    def _pin_ended(self, event: Row) -> None:
        self.pin = replace(self.pin or PinNow(), task=-1)

    def _put_ready(self, event: Row) -> None:
        self.ready.append(Queued(Message.RESULT, event["task"], event["worker"]))
        self.pin = replace(self.pin or PinNow(), task=-1)

    # --- the loader
    def _epoch_begun(self, event: Row) -> None:
        self.epoch, self.yielded = event["x"], 0
        self.in_hand = self.waiting_for = self.consumer = None
        self.in_flight = {}

    def _yielded(self, event: Row) -> None:
        self._landed(event)
        self.in_hand = None
        self.yielded = event["y"]
        self._seem(LoaderState.IDLE)

    def _landed(self, event: Row) -> None:
        if self.in_flight is not None:
            self.in_flight.pop(event["task"], None)

    def _exhausted(self, event: Row) -> None:
        self._landed(event)
        self.in_hand = None

    def _epoch_ended(self, event: Row) -> None:
        self.in_flight = None

    def _seem(self, state: LoaderState) -> None:
        """An observed loader does not tell when it is called: what it does tells."""
        if self.observed:
            self.loader_life.life.state = state

    def _done(self, event: Row) -> None:
        if event["x"] in _DONE_EVENTS:
            self.done_events = tuple(sorted({*self.done_events, DoneEvent(event["x"])}))

    def _join_begun(self, event: Row) -> None:
        if event["x"] in _ACTORS:
            self.joining = (*self.joining, (Actor(event["x"]), event["worker"]))

    def _join_ended(self, event: Row) -> None:
        self.joining = tuple(who for who in self.joining if who != (event["x"], event["worker"]))

    def _sentinel_put(self, event: Row) -> None:
        if event["x"] == QueueId.INDEX:
            self._put_index(event, Message.SENTINEL)
        else:
            self.outbox.append(Queued(Message.SENTINEL))

    def _sentinel_got(self, event: Row) -> None:
        if event["x"] == QueueId.INDEX:  # taken already, where the wait before it was recorded
            self._take_index(event["worker"], Message.SENTINEL, -1, surely=False)


_MESSAGES: Final = frozenset(map(int, Message))
_DONE_EVENTS: Final = frozenset(map(int, DoneEvent))
_ACTORS: Final = frozenset(map(int, Actor))

_Handler = Callable[[Follower, Row], object]


def _works(activity: Activity) -> _Handler:
    return lambda follower, event: follower._work(event, activity)


def _has(what: str) -> _Handler:
    return lambda follower, event: setattr(follower, what, event["task"])


def _lets_go_of(what: str) -> _Handler:
    return lambda follower, event: setattr(follower, what, None)


_HANDLERS: Final[Mapping[int, _Handler]] = {
    ev.EPOCH[0]: Follower._epoch_begun,
    ev.EPOCH[1]: Follower._epoch_ended,
    ev.SAMPLER_NEXT[0]: _has("sampling"),
    ev.SAMPLER_NEXT[1]: _lets_go_of("sampling"),
    ev.INDEX_PUT: lambda follower, event: follower._put_index(event, Message.TASK),
    ev.INDEX_WRITE[0]: lambda follower, event: follower._write_index(event, Stage.ENQUEUED, Stage.WRITING),
    ev.INDEX_WRITE[1]: lambda follower, event: follower._write_index(event, Stage.WRITING, Stage.WRITTEN),
    ev.INDEX_GET[0]: _works(Activity.WAITING),
    ev.INDEX_GET[1]: Follower._index_got,
    ev.FETCH[0]: _works(Activity.FETCHING),
    ev.SAMPLE[0]: Follower._sampled,
    ev.SAMPLE[1]: _works(Activity.FETCHING),
    ev.COLLATE[0]: _works(Activity.COLLATING),
    ev.COLLATE[1]: _works(Activity.FETCHING),
    ev.FETCH[1]: _works(Activity.READY),
    ev.SHM_ALLOC: Follower._shm,
    ev.SHM_COPY[0]: Follower._shm,
    ev.RESULT_PUT: Follower._put_result,
    ev.RESULT_PICKLE[0]: lambda follower, event: follower._change(follower.outbox, event, Stage.PICKLING),
    ev.RESULT_PICKLE[1]: Follower._pickled,
    ev.RESULT_WRITE[0]: Follower._write_result,
    ev.RESULT_WRITE[1]: Follower._result_written,
    ev.RESULT_GET[0]: Follower._result_wait,
    ev.RESULT_READ: Follower._read_result,
    ev.RESULT_REBUILD[0]: lambda follower, event: follower._change(follower.pipe, event, Stage.REBUILDING),
    ev.RESULT_REBUILD[1]: lambda follower, event: follower._change(follower.pipe, event, Stage.REBUILT),
    ev.RESULT_GET[1]: Follower._result_got,
    ev.PIN_START: Follower._pin_started,
    ev.PIN[0]: Follower._pinning,
    ev.READY_PUT: Follower._put_ready,
    ev.PIN_EXIT: Follower._pin_ended,
    ev.READY_GET[0]: Follower._wait,
    ev.READY_GET[1]: Follower._ready_got,
    ev.REORDER_STORE: _lets_go_of("in_hand"),
    ev.REORDER_POP: _has("in_hand"),
    ev.WORKER_EXHAUSTED: Follower._exhausted,
    ev.YIELD: Follower._yielded,
    ev.NEXT[0]: _lets_go_of("consumer"),
    ev.NEXT[1]: _lets_go_of("waiting_for"),
    ev.CONSUMER[0]: _has("consumer"),
    ev.CONSUMER[1]: _lets_go_of("consumer"),
    ev.WORKER_START[0]: _works(Activity.STARTING),
    ev.WORKER_START[1]: Follower._worker_started,
    ev.WORKER_READY: Follower._worker_ready,
    ev.WORKER_EXIT: _works(Activity.LEFT),
    ev.WORKER_GONE: Follower._worker_gone,
    ev.FOUND_DEAD: Follower._found_dead,
    ev.RESUME_PUT: lambda follower, event: follower._put_index(event, Message.RESUME),
    ev.RESUME_ACK: Follower._acknowledge,
    ev.DONE_EVENT_SET: Follower._done,
    ev.SENTINEL_PUT: Follower._sentinel_put,
    ev.SENTINEL_GET: Follower._sentinel_got,
    ev.JOIN[0]: Follower._join_begun,
    ev.JOIN[1]: Follower._join_ended,
}

_READERS: Final[tuple[tuple[_Handler, tuple[int, ...]], ...]] = (
    (Follower._decide, DispatcherReplay.READS),
    (Follower._tell, (ev.INDEX_PUT,)),
    (Follower._loader_lives, LoaderReplay.READS),
    (Follower._worker_lives, WorkerReplay.READS),
    (Follower._pin_lives, PinReplay.READS),
    *((handler, (code,)) for code, handler in _HANDLERS.items()),
)
_FOLLOWED: Final = {code: [follow for follow, reads in _READERS if code in reads] for code in ev.EVENTS}
"""Of each event, who follows it, in this order."""


def _beginning(trace: Trace, rows: npt.NDArray[np.void], observed: bool) -> tuple[int | None, str]:
    """The row from which on everything is known (None = never), and what to say until then."""
    if observed:
        return None, "observed from outside: what the loader keeps to itself is told from what could be seen"
    begun = 0
    for process in np.unique(rows["process"]):
        own = trace.events[trace.events["process"] == process]
        first = own[np.argmin(own["seq"])]
        if first["seq"] > 1:
            begun = max(begun, int(first["time"]))
    if not begun:
        return 0, ""
    epochs = np.flatnonzero((rows["code"] == ev.EPOCH[0]) & (rows["time"] >= begun))
    note = "the trace's beginning was overwritten: what is shown is told from the events since"
    return (int(epochs[0]), note + ", until the next epoch begins") if len(epochs) else (None, note)
