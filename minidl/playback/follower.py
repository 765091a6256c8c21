"""The follower: from events to states, one event at a time, also while the trace still grows.

Interface: `Follower(facts)` follows one iterator; `announce(rows)` prepares it for events, `step(event)` takes one of
them, `state()` makes a `ProtocolState`, and `copy.copy` of a Follower is independent of it. What the loader decides
comes from `actors.DispatcherReplay` and the lifecycles from the other actors: they run the live loader's own classes.
Queues, messages in hand and bytes are counted here.

Rules of use: events come in an order in which no message is received before it is sent (`causal_order`). An event that
the protocol does not allow is described in `ProtocolState.violation`; following goes on from what the events say.
Memory is bounded by what is in flight, not by the number of events.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minidl.loader.dispatcher import DispatchError
from minidl.loader.protocol import LoaderState, ProtocolError, WorkerState
from minidl.playback.actors import DispatcherReplay, LifecycleReplay, LoaderReplay, PinReplay, Row, WorkerReplay
from minidl.playback.inferred import InferredDispatch
from minidl.playback.state import MOST_WORKERS, STARTING, MessageStage, PinNow, ProtocolState, Queued, WorkerNow
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Positions, Rows
from minidl.tracefile.events import Actor, DoneEvent, Message, Place, QueueId
from minidl.tracefile.loaders import first_epochs

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


_AT_HOME: Final = (*ev.EPOCH, *ev.NEXT, *ev.CONSUMER, *ev.WORKER_START, ev.TASK_ASSIGNED, ev.INDEX_PUT, *ev.SHUTDOWN)
"""Events that only the loader's own process records."""

_WITH_WORKERS: Final = (
    *ev.WORKER_START,
    *ev.WORKER_INIT,
    *ev.MAKE_FETCHER,
    ev.WORKER_READY,
    ev.TASK_ASSIGNED,
    ev.INDEX_PUT,
    *ev.INDEX_GET,
    *ev.RESULT_GET,
)
"""Events that an iterator without workers never records."""

_ALONE: Final = (ev.FETCH[0], ev.SAMPLE[0], ev.COLLATE[0], ev.WORKER_READY)
"""What the loader's own process does without workers."""

_OBSERVED: Final = "observed from outside: the loader's inner state is inferred from its events"
_CUT: Final = "earlier events were overwritten: the state is inferred from later events, until the next epoch begins"

_BETWEEN_TASKS: Final = (ev.WORKER_READY, ev.INDEX_GET[0], ev.RESULT_PUT)
"""What an idle worker does; a poll of its queue that brings nothing makes it no less idle."""

_IN_PIPE: Final = (MessageStage.WRITING, MessageStage.WRITTEN)


def _place(
    queue: list[Queued],
    task: int,
    worker: int | None = None,
    kind: Message | None = None,
    stage: MessageStage | None = None,
) -> int:
    """Return where the first such message is; None = any. -1 = it is not there."""
    for at, entry in enumerate(queue):
        same = entry.task == task and worker in (None, entry.worker)
        if same and kind in (None, entry.kind) and stage in (None, entry.stage):
            return at
    return -1


def _move(
    queue: list[Queued], event: Row, stage: MessageStage, before: MessageStage | None = None, **sizes: int
) -> bool:
    """Move the message that the event is about on to a stage; False if none, or none at stage `before`, is there."""
    at = _place(queue, event["task"], event["worker"], stage=before)
    if at >= 0:
        queue[at] = queue[at].at(stage, event["time"], **sizes)
    return at >= 0


class Follower:
    """One iterator's state, event by event. now: what of it the events say by themselves; `state` adds the rest.

    facts: its parameters as the trace has them. start: time of the trace's first event. first_epoch: the number of its
    first epoch (see `loaders.first_epochs`). Before events are stepped,
    `announce` has to look at them: whether there are workers or a pin thread holds from the first event on.
    """

    def __init__(self, facts: Mapping[str, Any], start: int = 0, first_epoch: int = 0) -> None:
        self.now = ProtocolState(time=0.0, since=start, alone=facts.get("num_workers", 0) == 0)
        self.first_epoch = first_epoch
        self.in_order = facts.get("in_order", True) is not False
        self.observed = facts.get("observed") is True
        self.pinned = self.lossy = False
        self.done_set_at: int | None = None
        self.start = start
        self.stepped = 0
        self.whole_from = 0  # before this time events are missing
        self.partial = self.observed
        self.now.note = _OBSERVED if self.observed else ""
        self.exact: DispatcherReplay | None = None
        self.inferred = InferredDispatch(self.in_order)
        self.loader_life = LoaderReplay()
        self.worker_lives: dict[int, WorkerReplay] = {}
        self.pin_life = PinReplay()
        self.kept: dict[int, int] = {}  # worker -> task with which its state came
        self.workers: dict[int, WorkerNow] = {}  # without what their lifecycles and index queues say
        self.index_queues: dict[int, list[Queued]] = {}
        self.pipe: list[Queued] = []
        self.outbox: list[Queued] = []  # results that their feeder threads have not begun to write
        self.ready: list[Queued] = []
        self.in_flight: dict[int, int] | None = {}  # task -> bytes; None between two epochs

    def announce(self, rows: Rows, missing_until: int = 0, *, lossy: bool = False) -> None:
        """Look ahead at the next events of this iterator, in the order in which they will be stepped.

        missing_until: events before this time are missing that no earlier call has announced; 0 = none are. lossy:
        others may be missing as well, and a violation mentions it.
        """
        codes = rows["code"]
        self.lossy |= lossy
        self.pinned = self.pinned or bool(np.isin(codes, (ev.PIN_START, *ev.READY_GET, ev.READY_PUT)).any())
        self.now.alone = self.now.alone and not np.isin(codes, _WITH_WORKERS).any()
        done = rows[(codes == ev.DONE_EVENT_SET) & (rows["x"] == DoneEvent.WORKERS)]
        if self.done_set_at is None and len(done):
            self.done_set_at = int(done["time"][0])
            for life in self.worker_lives.values():
                life.done_set_at = self.done_set_at
        home = rows["pid"][np.isin(codes, _AT_HOME)]
        if not self.now.pid and len(home):
            self.now.pid = int(home[0])
        if not self.stepped and len(rows):
            self.now.since = int(rows["time"][0])
        if missing_until:
            self._lose(missing_until)

    def _lose(self, until: int) -> None:
        """Events are missing: until an epoch begins, the state follows from later events alone."""
        self.whole_from = max(self.whole_from, until)
        if self.observed:
            return
        if self.exact is not None:
            self._part(self.exact, _CUT)
        self.partial, self.now.note = True, _CUT

    def __copy__(self) -> Follower:
        new = Follower.__new__(Follower)
        new.__dict__.update(
            self.__dict__,
            now=replace(self.now),
            exact=copy.copy(self.exact),
            inferred=copy.copy(self.inferred),
            loader_life=copy.copy(self.loader_life),
            worker_lives={worker: copy.copy(life) for worker, life in self.worker_lives.items()},
            pin_life=copy.copy(self.pin_life),
            workers={number: replace(worker) for number, worker in self.workers.items()},
            index_queues={worker: list(queue) for worker, queue in self.index_queues.items()},
            pipe=list(self.pipe),
            outbox=list(self.outbox),
            ready=list(self.ready),
            in_flight=copy.copy(self.in_flight),
            kept=dict(self.kept),
        )
        return new

    @property
    def received_by(self) -> int:
        """The event by which the loader receives a result."""
        return ev.READY_GET[1] if self.pinned else ev.RESULT_GET[1]

    # --- one event
    def step(self, event: Row) -> None:
        """Follow one event; never raises for what the event says."""
        self.now.violation = ""
        self.now.time = (event["time"] - self.start) / 1e9
        self.stepped += 1
        for follow in _FOLLOWED[event["code"]]:
            follow(self, event)

    def _violated(self, what: str) -> None:
        if not self.partial:
            lacking = " (events of this trace were lost)" if self.lossy else ""
            self.now.violation = f"{self.now.violation}; {what}" if self.now.violation else what + lacking

    def _live(self, replayed: LifecycleReplay, event: Row) -> None:
        """Move an actor's lifecycle; if it refuses, by what the event says of its state."""
        try:
            replayed.step(event)
        except ProtocolError as error:
            self._violated(str(error))
            replayed.force(event)

    def _loader_lives(self, event: Row) -> None:
        life = self.loader_life.life
        before, was_down = life.state, life.shut_down
        self._live(self.loader_life, event)
        if life.state is not before and not (was_down and life.state is not LoaderState.CLOSED):
            self.now.since = event["time"]

    def _worker_lives(self, event: Row) -> None:
        number = event["worker"]
        if 0 <= number < MOST_WORKERS:
            if number not in self.worker_lives:
                self.worker_lives[number] = WorkerReplay(number, self.done_set_at)
            self._live(self.worker_lives[number], event)
            self._worker(number)

    def _pin_lives(self, event: Row) -> None:
        if self.pinned:
            self._live(self.pin_life, event)

    # --- what is decided
    def _decide(self, event: Row) -> None:
        code = event["code"]
        if code == ev.EPOCH[0]:
            if self.partial and not self.observed and event["time"] >= self.whole_from:
                self._know()
            self._begin_epoch(event)
        if self.exact is not None:
            try:
                self.exact.step(event)
                if code == ev.FOUND_DEAD and event["x"] == Actor.WORKER:
                    self._part(self.exact, "a worker was found dead: inferred from events from here on")
            except DispatchError as error:
                self._violated(str(error))
                self._part(self.exact, "the dispatcher decides differently: inferred from events from here on")
        self._infer(event)

    def _infer(self, event: Row) -> None:
        if self.exact is None and not self.now.alone:
            self.inferred.step(event, self.received_by)
            if event["code"] == ev.RCVD_ADVANCE and self.partial and self.in_order:
                self._prune(event["x"])

    def _part(self, exact: DispatcherReplay, note: str) -> None:
        """Go on without the dispatcher until the next epoch begins."""
        self.inferred, self.exact, self.now.note = InferredDispatch.of(exact), None, note

    def _know(self) -> None:
        """From this epoch's begin on nothing is missing; at that moment every queue is empty."""
        self.partial, self.now.note = False, ""
        for queue in self._queues():
            queue.clear()

    def _prune(self, rcvd_idx: int) -> None:
        """Drop what comes before rcvd_idx: in order, it has been received, even if that event is lost."""
        for queue in self._queues():
            queue[:] = [message for message in queue if not 0 <= message.task < rcvd_idx]
        if self.in_flight is not None:
            self.in_flight = {task: size for task, size in self.in_flight.items() if task >= rcvd_idx}

    def _queues(self) -> list[list[Queued]]:
        return [self.pipe, self.outbox, self.ready, *self.index_queues.values()]

    def _begin_epoch(self, event: Row) -> None:
        workers, prefetch = event["y"], event["z"]
        if not self.partial:
            self.now.note = ""
            if 0 < workers <= MOST_WORKERS and prefetch > 0:
                self.exact = DispatcherReplay(workers, prefetch, self.in_order, self.received_by)
                return
        self.exact = None
        self.inferred = InferredDispatch(self.in_order)
        if not self.now.alone:
            self.inferred.begin(min(max(workers, 0), MOST_WORKERS))

    # --- the state
    def state(self) -> ProtocolState:
        """The state after the events so far."""
        known = self.inferred if self.exact is None else InferredDispatch.of(self.exact)
        tasks = dict(sorted(known.tasks.items()))
        pin = self.now.pin
        return replace(
            self.now,
            loader=self.loader_life.life.state,
            send_idx=known.send_idx,
            rcvd_idx=known.rcvd_idx,
            task_info=tasks,
            tasks_outstanding=known.outstanding,
            workers_num_tasks=tuple(known.num_tasks[worker] for worker in sorted(known.num_tasks)),
            workers_status=tuple(known.status[worker] for worker in sorted(known.status)),
            reorder_buffer=tuple(task for task, it in tasks.items() if it.fetched and task != self.now.in_hand),
            kept=dict(sorted(self.kept.items())),
            workers=tuple(map(self._worker_now, sorted(self.workers))),
            result_queue=(*self.pipe, *self.outbox),
            pin=pin and replace(pin, state=self.pin_life.life.state),
            ready_queue=tuple(self.ready),
            bytes_in_flight=sum((self.in_flight or {}).values()),
            known=not self.partial and not self.now.note,
        )

    def _worker_now(self, number: int) -> WorkerNow:
        worker = self.workers[number]
        if number < 0:  # the loader's own process, which has no lifecycle of a worker's
            state = WorkerState.WAITING if worker.activity == ev.WORKER_READY else WorkerState.FETCHING
            return replace(worker, pid=self.now.pid, state=state)
        state = self.worker_lives[number].life.state if number in self.worker_lives else worker.state
        return replace(worker, state=state, index_queue=tuple(self.index_queues.get(number, ())))

    # --- workers and their index queues
    def _worker(self, number: int) -> WorkerNow:
        if number not in self.workers:
            self.workers[number] = WorkerNow(number)
        return self.workers[number]

    def _work(self, event: Row, activity: int, position: int = -1, index: int = -1) -> WorkerNow:
        """Note what the event's worker does from here on; return it (one that is not kept, if its number is none)."""
        number = event["worker"]
        if not (0 <= number < MOST_WORKERS or (number == -1 and activity in _ALONE)):
            return WorkerNow(number)
        worker = self._worker(number)
        if activity not in _BETWEEN_TASKS or worker.activity not in _BETWEEN_TASKS:
            worker.since = event["time"]
        worker.activity, worker.task, worker.position, worker.index = activity, event["task"], position, index
        return worker

    def _put_index(self, event: Row, message: Message) -> None:
        number = event["worker"]
        if 0 <= number < MOST_WORKERS:
            self._worker(number)
            queue = self.index_queues.setdefault(number, [])
            queue.append(Queued(message, event["task"], number, since=event["time"]))

    def _write_index(self, event: Row, before: MessageStage, after: MessageStage) -> None:
        _move(self.index_queues.get(event["worker"], []), event, after, before, payload=event["x"])

    def _take_index(self, number: int, kind: Message, task: int) -> None:
        """A message leaves the index queue; it should be the first one there."""
        queue = self.index_queues.get(number, [])
        at = _place(queue, task, kind=kind)
        if at > 0:
            self._violated(f"{queue[at].name} leaves worker {number}'s index queue before {queue[0].name}")
        elif at < 0:
            self._violated(f"{_named(kind, task)} comes out of worker {number}'s index queue, and was not in it")
        del queue[0 if self.partial else at : at + 1]  # it is first in, first out

    def _index_got(self, event: Row) -> None:
        message = event["x"]
        if message != Message.EMPTY and message in _MESSAGES:
            self._take_index(event["worker"], Message(message), event["task"])
        self._work(event, ev.INDEX_GET[1] if message == Message.TASK else ev.WORKER_READY)

    def _worker_started(self, event: Row) -> None:
        number = event["worker"]
        if 0 <= number < MOST_WORKERS and event["x"]:  # its own events say what it does, perhaps earlier ones
            worker = self._worker(number)
            worker.pid = event["x"]
            if worker.activity == STARTING:
                worker.since = event["time"]

    def _worker_ready(self, event: Row) -> None:
        self._work(event, ev.WORKER_READY).pid = event["x"]

    def _gone(self, event: Row, pid: int, exit_code: int) -> None:
        worker = self._work(event, ev.WORKER_GONE)
        worker.pid, worker.exit_code, worker.task = pid, exit_code, -1

    def _found_dead(self, event: Row) -> None:
        if event["x"] == Actor.WORKER:
            self._gone(event, event["y"], event["z"])

    # --- results
    def _shm(self, event: Row) -> None:
        """A segment is made, for a batch in work, or for one that is pickled."""
        number, size = event["worker"], event["x"]
        if event["task"] < 0 or not 0 <= number < MOST_WORKERS:
            return
        stage = MessageStage.COPYING if event["code"] == ev.SHM_COPY[0] else MessageStage.PICKLING
        if not _move(self.outbox, event, stage, shared=size):
            self._worker(number).making += size
        if event["code"] == ev.SHM_ALLOC and event["y"] == Place.COLLATE:
            self._made(event["task"], size)

    def _slab(self, event: Row) -> None:
        """A slab is taken for a batch in work, or for one that is pickled; it is sent with what is in it."""
        number, size = event["worker"], event["y"]
        if event["task"] < 0 or not 0 <= number < MOST_WORKERS:
            return
        if event["code"] == ev.SLAB_SEND:
            self._made(event["task"], size)
        elif not _move(self.outbox, event, MessageStage.PICKLING, shared=size):
            self._worker(number).making += size

    def _made(self, task: int, size: int) -> None:
        if self.in_flight is not None:
            self.in_flight[task] = self.in_flight.get(task, 0) + size

    def _put_result(self, event: Row) -> None:
        worker = self._work(event, ev.RESULT_PUT)
        shared, worker.making = worker.making, 0
        self.outbox.append(Queued(Message.RESULT, event["task"], event["worker"], shared=shared, since=event["time"]))

    def _acknowledge(self, event: Row) -> None:
        self.outbox.append(Queued(Message.RESUME, -1, event["worker"], since=event["time"]))

    def _pickled(self, event: Row) -> None:
        self._made(event["task"], event["x"] + event["z"])
        _move(self.outbox, event, MessageStage.PICKLED, payload=event["x"])

    def _write_result(self, event: Row) -> None:
        """Move a result into the pipe: writers hold a lock, so the order of the begins is the order in the pipe."""
        at = _place(self.outbox, event["task"], self._sender(event))
        if at >= 0:
            self.pipe.append(self.outbox.pop(at).at(MessageStage.WRITING, event["time"], event["x"]))

    def _result_written(self, event: Row) -> None:
        at = _place(self.pipe, event["task"], self._sender(event), stage=MessageStage.WRITING)
        if at >= 0:
            self.pipe[at] = self.pipe[at].at(MessageStage.WRITTEN, event["time"])

    def _sender(self, event: Row) -> int:
        """Return the worker whose message is written; an acknowledgement or the loader's sentinel names none."""
        if event["worker"] >= 0:
            return event["worker"]
        return next((n for n, worker in self.workers.items() if worker.pid == event["pid"] != self.now.pid), -1)

    def _read_result(self, event: Row) -> None:
        """Mark a message as read; readers take one after the other, so a second one before that is ignored."""
        if self.pipe and all(entry.stage in _IN_PIPE for entry in self.pipe):
            self.pipe[0] = self.pipe[0].at(MessageStage.READ, event["time"])

    def _take_result(self, event: Row) -> None:
        """A message leaves the result queue; without events of the feeders, it never was in the pipe."""
        kind, task, worker = Message(event["x"]), event["task"], event["worker"]
        for queue in (self.pipe, self.outbox):
            at = _place(queue, task, worker if worker >= 0 else None, kind)
            if at >= 0:
                its_worker = queue[at].worker
                earlier = [m for m in queue[:at] if m.worker != its_worker] if self.partial else queue[:at]
                queue[: at + 1] = earlier  # of one worker, the pipe is first in, first out
                return
        result = "'s result" if task >= 0 else ""
        self._violated(f"{_named(kind, task)}{result} comes out of the result queue, and was not in it")

    def _wait(self, event: Row) -> None:
        self.now.in_hand = None  # of leftovers of the last epoch, and of answers that no task waits for any more
        self._seem(LoaderState.WAITING, event)
        self.now.waiting_for, self.now.waiting_worker = (event["task"], event["worker"]) if self.in_order else (-1, -1)

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
            self.now.pin = replace(self.now.pin or PinNow(), task=event["task"])
        elif message == Message.RESUME and DoneEvent.PIN_THREAD not in self.now.done_events:
            # It is passed on as it is, without an event.
            self.ready.append(Queued(Message.RESUME, -1, event["worker"], since=event["time"]))

    def _got(self, event: Row) -> None:
        self.now.waiting_for, self.now.waiting_worker = None, -1
        if event["x"] == Message.RESULT:
            self.now.in_hand = event["task"]

    def _ready_got(self, event: Row) -> None:
        if event["x"] in _MESSAGES and event["x"] != Message.EMPTY:
            at = _place(self.ready, event["task"], kind=Message(event["x"]))
            if at < 0:
                self._violated(f"task {event['task']} comes out of the ready queue, and was not in it")
            del self.ready[at : at + 1]
        self._got(event)

    # --- the pin thread
    def _pin(self, simulated: int, task: int = -1) -> None:
        self.now.pin = PinNow(task=task, simulated=bool(simulated))

    def _unpin(self, event: Row) -> None:
        self.now.pin = replace(self.now.pin or PinNow(), task=-1)

    def _put_ready(self, event: Row) -> None:
        self.ready.append(Queued(Message.RESULT, event["task"], event["worker"], since=event["time"]))
        self._unpin(event)

    # --- the loader
    def _epoch_begun(self, event: Row) -> None:
        self.now.epoch, self.now.yielded, self.now.resumed = event["x"] + self.first_epoch, 0, 0
        self.kept, self.now.taken = {}, None
        self.now.in_hand = self.now.waiting_for = self.now.consumer = None
        self.in_flight = {}

    def _yielded(self, event: Row) -> None:
        self._landed(event)
        self.now.yielded = event["y"]
        self._seem(LoaderState.IDLE, event)

    def _landed(self, event: Row) -> None:
        """Let go of a task that is yielded, or that ends its worker's dataset."""
        self.now.in_hand = None
        if self.in_flight is not None:
            self.in_flight.pop(event["task"], None)

    def _was_resumed(self, event: Row) -> None:
        self.now.resumed = event["x"]

    def _state_kept(self, event: Row) -> None:
        if -1 <= event["worker"] < MOST_WORKERS:
            self.kept[event["worker"]] = event["task"]

    def _state_taken(self, event: Row) -> None:
        self.now.taken = event["x"]

    def _epoch_ended(self, event: Row) -> None:
        self.in_flight = None
        if self.loader_life.life.state is LoaderState.PRIMING:  # the sampler has failed
            self._set_state(LoaderState.EXHAUSTED, event)

    def _seem(self, state: LoaderState, event: Row) -> None:
        """Infer the loader's state from what it does: an observed one does not record when it is called."""
        if self.observed and self.loader_life.life.state is not state:
            self._set_state(state, event)

    def _set_state(self, state: LoaderState, event: Row) -> None:
        self.loader_life.life.state, self.now.since = state, event["time"]

    def _done(self, event: Row) -> None:
        if event["x"] in _DONE_EVENTS:
            self.now.done_events = tuple(sorted({*self.now.done_events, DoneEvent(event["x"])}))

    def _join_begun(self, event: Row) -> None:
        if event["x"] in _ACTORS:
            self.now.joining = (*self.now.joining, (Actor(event["x"]), event["worker"]))

    def _join_ended(self, event: Row) -> None:
        self.now.joining = tuple(who for who in self.now.joining if who != (event["x"], event["worker"]))

    def _sentinel_put(self, event: Row) -> None:
        if event["x"] == QueueId.INDEX:
            self._put_index(event, Message.SENTINEL)
        else:
            self.outbox.append(Queued(Message.SENTINEL, since=event["time"]))

    def _sentinel_got(self, event: Row) -> None:
        """Drop the sentinel from the index queue, if the wait before this event was not recorded."""
        queue = self.index_queues.get(event["worker"], [])
        at = _place(queue, -1, kind=Message.SENTINEL)
        if event["x"] == QueueId.INDEX and at >= 0:
            del queue[0 if self.partial else at : at + 1]


def _named(kind: Message, task: int) -> str:
    return f"task {task}" if task >= 0 else kind.name.lower()


_MESSAGES: Final = frozenset(map(int, Message))
_DONE_EVENTS: Final = frozenset(map(int, DoneEvent))
_ACTORS: Final = frozenset(map(int, Actor))

_Handler = Callable[[Follower, Row], object]


def _works(activity: int) -> _Handler:
    return lambda follower, event: follower._work(event, activity)


def _moves(queue: str, stage: MessageStage) -> _Handler:
    return lambda follower, event: _move(getattr(follower, queue), event, stage)


def _writes_index(before: MessageStage, after: MessageStage) -> _Handler:
    return lambda follower, event: follower._write_index(event, before, after)


def _puts_index(message: Message) -> _Handler:
    return lambda follower, event: follower._put_index(event, message)


def _has(what: str) -> _Handler:
    return lambda follower, event: setattr(follower.now, what, event["task"])


def _lets_go_of(what: str) -> _Handler:
    return lambda follower, event: setattr(follower.now, what, None)


_DOES: Final = {
    ev.WORKER_START[0]: STARTING,
    **{span[0]: span[0] for span in (ev.WORKER_INIT, ev.MAKE_FETCHER, ev.INDEX_GET, ev.FETCH, ev.COLLATE)},
    **dict.fromkeys((ev.SAMPLE[1], ev.COLLATE[1]), ev.FETCH[0]),
    **dict.fromkeys((ev.WORKER_INIT[1], ev.MAKE_FETCHER[1], ev.FETCH[1]), ev.WORKER_READY),
    ev.WORKER_EXIT: ev.WORKER_EXIT,
}
"""Event -> what its worker does from there on (`WorkerNow.activity`)."""

_HANDLERS: Final[Mapping[int, _Handler]] = {
    **{code: _works(activity) for code, activity in _DOES.items()},
    ev.EPOCH[0]: Follower._epoch_begun,
    ev.EPOCH[1]: Follower._epoch_ended,
    ev.SAMPLER_NEXT[0]: _has("sampling"),
    ev.SAMPLER_NEXT[1]: _lets_go_of("sampling"),
    ev.INDEX_PUT: _puts_index(Message.TASK),
    ev.INDEX_WRITE[0]: _writes_index(MessageStage.ENQUEUED, MessageStage.WRITING),
    ev.INDEX_WRITE[1]: _writes_index(MessageStage.WRITING, MessageStage.WRITTEN),
    ev.INDEX_GET[1]: Follower._index_got,
    ev.SAMPLE[0]: lambda follower, e: follower._work(e, ev.SAMPLE[0], e["x"], e["y"]),
    ev.SHM_ALLOC: Follower._shm,
    ev.SLAB_TAKE: Follower._slab,
    ev.SLAB_SEND: Follower._slab,
    ev.SHM_COPY[0]: Follower._shm,
    ev.SHM_COPY[1]: _moves("outbox", MessageStage.PICKLING),
    ev.RESULT_PUT: Follower._put_result,
    ev.RESULT_PICKLE[0]: _moves("outbox", MessageStage.PICKLING),
    ev.RESULT_PICKLE[1]: Follower._pickled,
    ev.RESULT_WRITE[0]: Follower._write_result,
    ev.RESULT_WRITE[1]: Follower._result_written,
    ev.RESULT_GET[0]: Follower._result_wait,
    ev.RESULT_READ: Follower._read_result,
    ev.RESULT_REBUILD[0]: _moves("pipe", MessageStage.REBUILDING),
    ev.RESULT_REBUILD[1]: _moves("pipe", MessageStage.REBUILT),
    ev.RESULT_GET[1]: Follower._result_got,
    ev.PIN_START: lambda follower, event: follower._pin(event["x"]),
    ev.PIN[0]: lambda follower, event: follower._pin(event["y"], event["task"]),
    ev.READY_PUT: Follower._put_ready,
    ev.PIN_EXIT: Follower._unpin,
    ev.READY_GET[0]: Follower._wait,
    ev.READY_GET[1]: Follower._ready_got,
    ev.REORDER_STORE: _lets_go_of("in_hand"),
    ev.REORDER_POP: _has("in_hand"),
    ev.WORKER_EXHAUSTED: Follower._landed,
    ev.YIELD: Follower._yielded,
    ev.NEXT[0]: _lets_go_of("consumer"),
    ev.NEXT[1]: _lets_go_of("waiting_for"),
    ev.CONSUMER[0]: _has("consumer"),
    ev.CONSUMER[1]: _lets_go_of("consumer"),
    ev.WORKER_START[1]: Follower._worker_started,
    ev.WORKER_READY: Follower._worker_ready,
    ev.WORKER_GONE: lambda follower, event: follower._gone(event, event["x"], event["y"]),
    ev.FOUND_DEAD: Follower._found_dead,
    ev.RESUME_PUT: _puts_index(Message.RESUME),
    ev.RESUME_ACK: Follower._acknowledge,
    ev.RESUMED: Follower._was_resumed,
    ev.STATE_KEPT: Follower._state_kept,
    ev.STATE_TAKEN: Follower._state_taken,
    ev.DONE_EVENT_SET: Follower._done,
    ev.SENTINEL_PUT: Follower._sentinel_put,
    ev.SENTINEL_GET: Follower._sentinel_got,
    ev.JOIN[0]: Follower._join_begun,
    ev.JOIN[1]: Follower._join_ended,
}

_READERS: Final[tuple[tuple[_Handler, tuple[int, ...]], ...]] = (
    (Follower._decide, DispatcherReplay.READS),
    (Follower._infer, (ev.INDEX_PUT,)),
    (Follower._loader_lives, LoaderReplay.READS),
    (Follower._worker_lives, WorkerReplay.READS),
    (Follower._pin_lives, PinReplay.READS),
    *((handler, (code,)) for code, handler in _HANDLERS.items()),
)
_FOLLOWED: Final = {code: [follow for follow, reads in _READERS if code in reads] for code in ev.EVENTS}
"""Of each event, who follows it, in this order."""


# --- Before the first event -------------------------------------------------------------------------------------------
def causal_order(events: Rows) -> Positions:
    """Return positions in `events` (rows of `Trace.events`) in an order that could have been the real one.

    By time, but within a process by the order of emission: an event that was emitted later than another of its process
    did not come before it, though a thread that lost the processor may have read the clock earlier. A put is stamped
    before it is made and a get after it has returned, on one clock, so every message is sent before it is received.
    """
    order = np.lexsort((events["seq"], events["process"]))
    time, process = events["time"][order], events["process"][order]
    for one in np.unique(process):
        begin, end = np.searchsorted(process, (one, one + 1))
        np.maximum.accumulate(time[begin:end], out=time[begin:end])
    return order[np.argsort(time, kind="stable")]


def follower_of(trace: Trace, loader: int, rows: Rows) -> Follower:
    """Return a Follower of a recorded iterator before its first event.

    rows: all its events in causal order. If a process's first events were overwritten, what it sent is unknown up to
    its oldest event that is left.
    """
    missing = trace.whole_from(loader)
    lossy = any(trace.processes[index].lost for index in np.unique(rows["process"]).tolist())
    follower = Follower(trace.loaders.get(loader, {}), trace.start, first_epochs(trace).get(loader, 0))
    follower.announce(rows, missing, lossy=lossy)
    return follower
