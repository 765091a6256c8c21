"""The model: from a state of the whole run, every step that some actor can take next.

`Model(configuration, protocol)` has `initial` and `steps(state)`. A step is a label (who, what, an argument) and the
state after it. The loader here is written beside `minidl.iterators` and `minidl.shutdown`, workers beside
`minidl.worker`, the pin thread beside `minidl.pin_memory`; what they decide they ask of `decisions`.

What only one actor can see is part of the step before it: the loader puts all tasks that it may into its buffers at
once. `reduced` makes more of this: a worker fetches what it takes, a feeder thread writes at once, and each place at
which a kill could have come between is a step of its own. A wait that brings nothing and changes nothing is no step.
Time is not counted; a wait may run out only where the run can't go on otherwise: first polls, then joins, which began
later.

`say`, where it is set, hears the events that the steps stand for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

from minidl.dispatcher import EPOCH_END, Assignment, Deliver, DispatchError
from minidl.explore import world as at
from minidl.explore.configurations import Configuration, Crash, Protocol
from minidl.explore.decisions import STATUS, Dispatching, loader_moved, pin_moved, worker_decides
from minidl.explore.world import CRASHED, CREW, LIFE, LOCK, PHASE, READY, RESULTS, SIGNALLED, Pin, State, Worker, World
from minidl.protocol import (
    Action,
    LoaderEvent,
    LoaderState,
    PinEvent,
    PinState,
    ProtocolError,
    WorkerEvent,
    WorkerState,
)
from minidl.tracing import events as ev
from minidl.tracing.events import Actor, DoneEvent, Ending, Message, Outcome, QueueId

Label = tuple[str, str, int]
"""Who takes the step, what it does, and with which worker, task or variant (-1 = none)."""

Step = tuple[Label, State]
Say = Callable[..., None]

MAIN: Final = (-1, 0)
"""Process and thread of an event: the loader's main thread. A worker's process has the worker's number."""
PIN_THREAD: Final = (-1, 1)
WAKER: Final = (-1, 2)

KILLED, FAILED = -9, 1
POLL, JOIN_OVER = "poll", "join over"
RAN_OUT: Final = (POLL, JOIN_OVER)
"""Steps that a run without a crash must not need."""


def index_feeder(worker: int) -> tuple[int, int]:
    return (-1, 3 + worker)


def result_feeder(worker: int) -> tuple[int, int]:
    return (worker, 1)


_HOW_FAR: Final = {
    at.WRITTEN: ", its feeder in the result queue's lock",
    at.TAKEN: ", its feeder in the result queue's lock",
    at.HALF_WRITTEN: ", its feeder in the middle of a message",
}


_INTERRUPTIBLE: Final = (at.NEW, at.IDLE, at.GETTING, at.RESUMING, at.READING)
_SHUTTING_DOWN: Final = (at.STOP_PIN, at.JOIN_PIN, at.TELL_WORKERS, at.SEND_SENTINELS, at.JOIN_WORKERS)


def _silent(*event: Any) -> None:
    """Hear nothing."""


class Model:
    """One configuration under one protocol."""

    def __init__(self, configuration: Configuration, protocol: Protocol, *, reduced: bool = False) -> None:
        self.configuration = configuration
        self.protocol = protocol
        self.reduced = reduced
        self.say: Say = _silent
        self.dispatching = Dispatching(configuration.workers, configuration.prefetch, configuration.in_order)
        self._plan = self._order_of_shutdown()
        self._phases: dict[str, Callable[[State, list[Step]], None]] = {
            at.NEW: self._begin, at.IDLE: self._with_user, at.GETTING: self._getting, at.RESUMING: self._getting,
            at.STOP_PIN: self._stop_pin, at.JOIN_PIN: self._join_pin, at.TELL_WORKERS: self._tell_workers,
            at.SEND_SENTINELS: self._send_sentinels, at.JOIN_WORKERS: self._join_workers,
            at.TERMINATE: self._terminate, at.CLOSED: self._exit, at.EXITING: self._exit,
            at.JOIN_CHILDREN: self._join_children, at.JOIN_FEEDERS: self._join_feeders,
            at.FINALISING: self._finalise,
        }  # fmt: skip

    def _order_of_shutdown(self) -> dict[str, str]:
        pin = [at.STOP_PIN, at.JOIN_PIN] if self.configuration.pin else []
        workers = [at.TELL_WORKERS, at.SEND_SENTINELS, at.JOIN_WORKERS]
        order = [*pin, *workers] if self.protocol.pin_first else [*workers, *pin]
        order = ["", *order, at.TERMINATE, at.CLOSED]
        return dict(itertools.pairwise(order))

    # --- What may happen in a state
    @property
    def initial(self) -> State:
        """The workers and the pin thread run, and nothing is sent yet."""
        c = self.configuration
        crew = tuple(Worker(WorkerState.WAITING, at.RUNNING, (), self._share(i), 0) for i in range(c.workers))
        pin = Pin(PinState.WAITING, at.RUNNING) if c.pin else None
        empty = ((),) * c.workers
        return (
            at.NEW, LoaderState.STARTING, self.dispatching.new, 0, 0, 0, (), False, empty, empty, crew, (), at.FREE,
            False, (), pin, False, False, False, None, False, not c.crashes, "",
        )  # fmt: skip

    def _share(self, worker: int) -> int:
        return 0 if self.configuration.streams is None else self.configuration.streams[worker]

    def over(self, state: State) -> bool:
        """Whether the run has ended: the loader's process is gone, and every worker's."""
        return state[PHASE] in at.OVER and all(worker.place == at.GONE for worker in state[CREW])

    def steps(self, state: State) -> list[Step]:
        """What the actors can do next, crashes left out; nothing, in a run that is over or that hangs."""
        out: list[Step] = []
        act = self._interrupted if state[SIGNALLED] else self._phases.get(state[PHASE])
        if act is not None:
            act(state, out)
        for number, worker in enumerate(state[CREW]):
            if worker.place != at.GONE:
                self._index_feeder(state, number, out)
                self._worker(state, number, out)
                self._result_feeder(state, number, out)
        self._pin_thread(state, out)
        if not out:
            self._polls(state, out)
        if not out or self.configuration.slow:
            self._joins_over(state, out)
        return out

    def crashes(self, state: State) -> list[Step]:
        """The crashes that may happen here, if none has happened yet."""
        out: list[Step] = []
        if state[CRASHED]:
            return out
        for kind in self.configuration.crashes:
            if kind is Crash.LOADER_KILLED and state[PHASE] not in at.OVER:
                self._loader_killed(state, out)
            elif kind in (Crash.PIN_DIES, Crash.PIN_STUCK) and state[PHASE] not in at.OVER:
                self._pin_crashes(state, kind, out)
            elif kind in (Crash.WORKER_KILLED, Crash.WORKER_STUCK, Crash.WORKER_STOPPED):
                for number, worker in enumerate(state[CREW]):
                    if worker.place != at.GONE:
                        self._worker_crashes(state, number, kind, out)
        return out

    def _took(self, out: list[Step], world: World, who: str, what: str, which: int = -1) -> None:
        out.append(((who, what, which), world.freeze()))

    # --- The loader: iterators.py -------------------------------------------------------------------------------------
    def _ask(self, w: World, call: str, *arguments: Any) -> Any:
        """Ask the dispatcher; what it forbids is a fault of the run."""
        w.decisions, answer, told = self.dispatching.ask(w.decisions, call, *arguments)
        for event in told:
            self.say(MAIN, event[0], *event[2:])
        if isinstance(answer, DispatchError):
            w.fault = f"the dispatcher forbids it: {answer}"
        return answer

    def _handle(self, w: World, event: LoaderEvent) -> None:
        try:
            w.life = loader_moved(w.life, event)
        except ProtocolError as error:
            w.fault = f"the protocol forbids it: {error}"

    def _begin(self, state: State, out: list[Step]) -> None:
        w = World(state)
        self._prime(w)
        self._took(out, w, "loader", "begins the epoch")

    def _prime(self, w: World) -> None:
        self._handle(w, LoaderEvent.EPOCH_BEGIN)
        c = self.configuration
        self.say(MAIN, ev.EPOCH[0], -1, -1, w.epoch, c.workers, c.prefetch)
        for _ in range(self.dispatching.capacity):
            self._try_put_index(w)
        self._handle(w, LoaderEvent.PRIMED)
        self._with_user_again(w, -1)

    def _with_user_again(self, w: World, task: int) -> None:
        w.phase = at.IDLE
        self.say(MAIN, ev.CONSUMER[0], task, -1, len(w.handed))

    def _user_ends(self, w: World) -> None:
        """The user's code has control no more."""
        if w.life in (LoaderState.IDLE, LoaderState.PRIMING):
            self.say(MAIN, ev.CONSUMER[1], w.handed[-1] if w.handed else -1)

    def _try_put_index(self, w: World) -> None:
        c = self.configuration
        task = w.decisions[0]
        self.say(MAIN, ev.SAMPLER_NEXT[0], task)
        there = c.streams is not None or w.drawn < c.tasks
        self.say(MAIN, ev.SAMPLER_NEXT[1], task, -1, int(there), task if there else -1)
        if not there:
            return
        w.drawn += c.streams is None
        given = self._ask(w, "assign", None)
        if isinstance(given, Assignment):
            self.say(MAIN, ev.INDEX_PUT, given.idx, given.worker_id, 1)
            self._put_index(w, given.worker_id, given.idx)

    def _put_index(self, w: World, worker: int, message: int) -> None:
        """Into an index queue's buffer; if nobody reads it any more, it only takes up room."""
        room = self.configuration.index_room
        queue = w.index[worker]
        if w.crew[worker].place == at.GONE:
            w.queue(worker, (*queue, at.LEFTOVER)[: room + 1])
        elif not self.reduced:
            w.buffer(worker, (*w.unsent[worker], message))
        else:
            w.queue(worker, (*queue, message))
            if len(queue) <= room:
                self._say_index_write(worker, message, ended=len(queue) < room)

    def _say_index_write(self, worker: int, message: int, *, ended: bool) -> None:
        about = (max(message, -1), worker, 64)
        self.say(index_feeder(worker), ev.INDEX_WRITE[0], *about)
        if ended:
            self.say(index_feeder(worker), ev.INDEX_WRITE[1], *about)

    def _index_feeder(self, state: State, number: int, out: list[Step]) -> None:
        """The loader's thread that writes to a worker, in two parts: a kill may come between them."""
        w = World(state)
        unsent, pipe = w.unsent[number], w.index[number]
        if not unsent or w.phase in at.OVER:
            return
        feeder, about = f"index feeder {number}", (max(unsent[0], -1), number, 64)
        if pipe and pipe[-1] == at.TORN:
            self.say(index_feeder(number), ev.INDEX_WRITE[1], *about)
            w.queue(number, (*pipe[:-1], unsent[0]))
            w.buffer(number, unsent[1:])
            self._took(out, w, feeder, "has written", unsent[0])
        elif len(pipe) < self.configuration.index_room:
            self.say(index_feeder(number), ev.INDEX_WRITE[0], *about)
            w.queue(number, (*pipe, at.TORN))
            self._took(out, w, feeder, "begins to write", unsent[0])

    def _with_user(self, state: State, out: list[Step]) -> None:
        """The user's code runs: it asks for the next batch, begins the next epoch, or ends."""
        c = self.configuration
        w = World(state)
        if w.life is LoaderState.IDLE and not w.fault:
            self._user_ends(w)
            self._handle(w, LoaderEvent.NEXT)
            self.say(MAIN, ev.NEXT[0], w.decisions[1], -1, w.decisions[1])
            self._next_data(w)
            self._took(out, w, "loader", "next")
        if state[LIFE] is LoaderState.EXHAUSTED or c.may_break:
            w = World(state)
            if c.persistent and w.epoch + 1 < c.epochs:
                self._resume(w)
                self._took(out, w, "loader", "resumes")
            else:
                self._leave(w)
                self._took(out, w, "loader", "ends")

    def _leave(self, w: World) -> None:
        """The user is done, or has had an error: the iterator is closed, or the interpreter exits with it open."""
        c, p = self.configuration, self.protocol
        if not c.exits or (c.persistent and c.pin and p.closed_at_exit):
            self._shut_down(w)
        else:
            self._user_ends(w)
            w.phase = at.EXITING

    def _resume(self, w: World) -> None:
        self._user_ends(w)
        if w.life is not LoaderState.EXHAUSTED:
            self.say(MAIN, ev.EPOCH[1], -1, -1, w.epoch, len(w.handed), Ending.CLOSED)
        self._handle(w, LoaderEvent.RESUME)
        w.epoch += 1
        w.drawn, w.handed, w.decisions = 0, (), self.dispatching.new
        for number in range(self.configuration.workers):
            self.say(MAIN, ev.RESUME_PUT, -1, number, w.epoch)
            self._put_index(w, number, at.resume(w.epoch))
        w.missing = self.configuration.workers
        w.phase = at.RESUMING
        self._say_get(w)

    def _say_get(self, w: World) -> None:
        code = ev.READY_GET[0] if self.configuration.pin else ev.RESULT_GET[0]
        self.say(MAIN, code, *self._wanted(w), 5_000_000_000)

    @staticmethod
    def _wanted(w: World) -> tuple[int, int]:
        rcvd, tasks = w.decisions[1], w.decisions[2]
        return next(((rcvd, worker) for idx, worker, _ in tasks if idx == rcvd), (-1, -1))

    def _next_data(self, w: World) -> None:
        """Inside `__next__`: a batch is yielded, or waited for, or the epoch is over."""
        step = self._ask(w, "next_step")
        if step is EPOCH_END:
            self._epoch_ends(w)
        elif isinstance(step, Deliver):
            self._yield(w, step)
        elif not w.fault:
            w.phase = at.GETTING
            self._say_get(w)

    def _yield(self, w: World, step: Deliver) -> None:
        self._try_put_index(w)
        if step.idx in w.handed:
            w.fault = f"task {step.idx} is yielded twice"
        elif self.configuration.in_order and w.handed and step.idx < w.handed[-1]:
            w.fault = f"task {step.idx} is yielded after task {w.handed[-1]}"
        w.handed = (*w.handed, step.idx) if self.configuration.in_order else tuple(sorted((*w.handed, step.idx)))
        self._handle(w, LoaderEvent.YIELD)
        self.say(MAIN, ev.YIELD, step.idx, step.worker_id, Outcome.DATA, len(w.handed))
        self.say(MAIN, ev.NEXT[1], step.idx, -1, len(w.handed), Outcome.DATA)
        self._with_user_again(w, step.idx)

    def _epoch_ends(self, w: World) -> None:
        c = self.configuration
        self._handle(w, LoaderEvent.EPOCH_END)
        self.say(MAIN, ev.NEXT[1], -1, -1, len(w.handed), Outcome.EXHAUSTED)
        self.say(MAIN, ev.EPOCH[1], -1, -1, w.epoch, len(w.handed), Ending.EXHAUSTED)
        wanted = c.tasks if c.streams is None else sum(c.streams)
        if len(w.handed) != wanted:
            w.fault = f"the epoch ends after {len(w.handed)} batches of {wanted}"
        if c.persistent:
            w.phase = at.IDLE
        else:
            self._shut_down(w)

    def _getting(self, state: State, out: list[Step]) -> None:
        """Waiting in a `get` of the data queue, in `next` or for the acknowledgements of a new epoch."""
        pin = self.configuration.pin
        queue = state[READY if pin else RESULTS]
        if queue and queue[0] == at.TORN:
            queue = ()
            if state[LOCK] == at.DEAD_LOCK and not self.protocol.bounded_result_read:
                w = World(state)
                w.phase = at.READING
                self.say(MAIN, ev.RESULT_READ, -1, -1, 0)
                self._took(out, w, "loader", "begins to read a torn message")
                return
        if queue:
            w = World(state)
            w.ready, w.results = (queue[1:], w.results) if pin else (w.ready, queue[1:])
            self._received(w, queue[0])
            self._took(out, w, "loader", "receives", at.parts(queue[0])[1])
        else:
            self._found_dead(state, out)

    def _received(self, w: World, message: int) -> None:
        kind, task, worker = at.parts(message)
        self._say_received(kind, task, worker)
        if w.phase == at.RESUMING:
            w.missing -= kind == at.ACK and task == w.epoch
            if w.missing:
                self._say_get(w)
            else:
                self._prime(w)
        elif kind == at.EXHAUSTED:
            self._ask(w, "exhausted", task, worker)
            if not self.configuration.persistent:
                if self.protocol.exhausted_sentinel:
                    self._send_sentinel(w, worker)
                self._ask(w, "worker_unavailable", worker)
            self._try_put_index(w)
            self._next_data(w)
        elif kind == at.DATA:
            step = self._ask(w, "receive", task, None)
            if isinstance(step, Deliver):
                self._yield(w, step)
            else:
                self._next_data(w)
        else:
            w.fault = "an acknowledgement comes in the middle of an epoch"

    def _say_received(self, kind: int, task: int, worker: int) -> None:
        if not self.configuration.pin:
            self._say_read(MAIN, kind, task, worker)
        code = ev.READY_GET[1] if self.configuration.pin else ev.RESULT_GET[1]
        self._say_got(MAIN, code, kind, task, worker)

    def _say_read(self, thread: tuple[int, int], kind: int, task: int, worker: int) -> None:
        self.say(thread, ev.RESULT_READ, -1, -1, 64)
        if kind in (at.DATA, at.EXHAUSTED):
            self.say(thread, ev.RESULT_REBUILD[0], task, worker, 64)
            self.say(thread, ev.RESULT_REBUILD[1], task, worker, 0, 0)

    def _say_got(self, thread: tuple[int, int], code: int, kind: int, task: int, worker: int) -> None:
        if kind == at.ACK:
            self.say(thread, code, -1, worker, Message.RESUME)
        elif kind == at.WAKE:
            self.say(thread, code, -1, -1, Message.SENTINEL)
            self.say(thread, ev.SENTINEL_GET, -1, -1, QueueId.RESULT)
        else:
            outcome = Outcome.EXHAUSTED if kind == at.EXHAUSTED else Outcome.DATA
            self.say(thread, code, task, worker, Message.RESULT, outcome)

    def _found_dead(self, state: State, out: list[Step]) -> None:
        """A `get` has brought nothing within the interval: does everybody live who could send something?"""
        p = self.protocol
        w = World(state)
        if not p.loader_timeout:
            return
        dead = self._dead(w)
        if dead and p.liveness_check:
            self._say_nothing_came(w)
            for number in dead:
                self.say(MAIN, ev.FOUND_DEAD, -1, number, Actor.WORKER, 0, w.crew[number].code)
                if w.decisions[STATUS][number]:
                    self._send_sentinel(w, number)
                    self._ask(w, "worker_unavailable", number)
            self._raise(w)
            self._took(out, w, "loader", "finds a worker dead", dead[0])
        elif w.pin is not None and w.pin.life is PinState.ENDED and p.pin_liveness_check:
            self._say_nothing_came(w)
            self.say(MAIN, ev.FOUND_DEAD, -1, -1, Actor.PIN_THREAD)
            self._raise(w)
            self._took(out, w, "loader", "finds the pin thread dead")

    def _dead(self, w: World) -> list[int]:
        """Workers that died before they were told to leave; else those that died with the result queue's lock."""
        status = w.decisions[STATUS]
        gone = [number for number, worker in enumerate(w.crew) if worker.place == at.GONE]
        failed = [number for number in gone if status[number]]
        jammed = w.lock == at.DEAD_LOCK and (not w.results or w.results[0] == at.TORN)
        if failed or not (self.protocol.leavers_checked and jammed):
            return failed
        return [number for number in gone if w.crew[number].code != 0]

    def _say_nothing_came(self, w: World) -> None:
        code = ev.READY_GET[1] if self.configuration.pin else ev.RESULT_GET[1]
        self.say(MAIN, code, -1, -1, Message.EMPTY)

    def _raise(self, w: World) -> None:
        """An error reaches the user, who gives up."""
        if w.life is LoaderState.WAITING:
            self._handle(w, LoaderEvent.RAISE)
            self._say_gone(w)
            self.say(MAIN, ev.NEXT[1], -1, -1, len(w.handed), Outcome.ERROR)
            self._with_user_again(w, -1)
        self._leave(w)

    def _interrupted(self, state: State, out: list[Step]) -> None:
        """SIGCHLD's handler raises, wherever the main thread is: a shutdown goes on to its end at once."""
        w = World(state)
        w.signalled = False
        if w.phase in (at.GETTING, at.RESUMING):
            self._say_nothing_came(w)
        if w.phase in _SHUTTING_DOWN:
            w.phase = at.TERMINATE
        else:
            self._raise(w)
        self._took(out, w, "loader", "is interrupted by SIGCHLD")

    def _say_gone(self, w: World) -> None:
        """Workers that are seen to have ended; a trace tells each of them once."""
        for number, worker in enumerate(w.crew):
            if worker.place == at.GONE:
                self.say(MAIN, ev.WORKER_GONE, -1, number, 0, worker.code)

    def _send_sentinel(self, w: World, worker: int) -> None:
        self.say(MAIN, ev.SENTINEL_PUT, -1, worker, QueueId.INDEX)
        self._put_index(w, worker, at.SENTINEL)

    # --- The loader: shutdown.py --------------------------------------------------------------------------------------
    def _shut_down(self, w: World) -> None:
        self._user_ends(w)
        if w.life not in (LoaderState.EXHAUSTED, LoaderState.RESUMING):
            self.say(MAIN, ev.EPOCH[1], -1, -1, w.epoch, len(w.handed), Ending.CLOSED)
        self._handle(w, LoaderEvent.SHUT_DOWN)
        self.say(MAIN, ev.SHUTDOWN[0])
        w.closed = True
        w.phase = ""
        if not self.configuration.pin:
            self._handle(w, LoaderEvent.PIN_STOPPED)
        self._go_on(w)

    def _go_on(self, w: World, event: LoaderEvent | None = None) -> None:
        """To the next step of the shutdown. In another order than the lifecycle's, only its end is told."""
        w.phase = self._plan[w.phase]
        if event is not None and (self.protocol.pin_first or not self.configuration.pin):
            self._handle(w, event)
        if w.phase == at.JOIN_WORKERS:
            self.say(MAIN, ev.JOIN[0], -1, 0, Actor.WORKER, 5_000_000_000)
        elif w.phase == at.JOIN_PIN:
            self.say(MAIN, ev.JOIN[0], -1, -1, Actor.PIN_THREAD, 5_000_000_000)

    def _stop_pin(self, state: State, out: list[Step]) -> None:
        w = World(state)
        if self.protocol.pin_done:
            self.say(MAIN, ev.DONE_EVENT_SET, -1, -1, DoneEvent.PIN_THREAD)
            w.pin_told = True
        if self.protocol.wake_pin:
            self.say(MAIN, ev.SENTINEL_PUT, -1, -1, QueueId.RESULT)
            w.wake = True
        self._go_on(w)
        self._took(out, w, "loader", at.STOP_PIN)

    def _join_pin(self, state: State, out: list[Step]) -> None:
        w = World(state)
        if w.pin is not None and w.pin.life is PinState.ENDED:
            self._pin_joined(w, 1)
            self._took(out, w, "loader", at.JOIN_PIN)

    def _pin_joined(self, w: World, ended: int) -> None:
        self.say(MAIN, ev.JOIN[1], -1, -1, Actor.PIN_THREAD, ended)
        self.say(MAIN, ev.CANCEL_JOIN_THREAD, -1, -1, QueueId.RESULT)
        self.say(MAIN, ev.QUEUE_CLOSE, -1, -1, QueueId.RESULT)
        self._go_on(w, LoaderEvent.PIN_STOPPED)

    def _tell_workers(self, state: State, out: list[Step]) -> None:
        w = World(state)
        if w.event_dead:
            return  # blocked in Event.set, whose lock a dead worker holds
        if self.protocol.workers_done:
            self.say(MAIN, ev.DONE_EVENT_SET, -1, -1, DoneEvent.WORKERS)
            w.done = True
        self._go_on(w)
        self._took(out, w, "loader", at.TELL_WORKERS)

    def _send_sentinels(self, state: State, out: list[Step]) -> None:
        w = World(state)
        if w.frozen is not None and w.frozen >= 0:
            return  # blocked in Queue.put, whose lock belongs to a thread that is stopped for good
        for number in range(self.configuration.workers):
            if self.protocol.sentinel and (self.configuration.persistent or w.decisions[STATUS][number]):
                self._send_sentinel(w, number)
                self._ask(w, "worker_unavailable", number)
        self._go_on(w, LoaderEvent.SIGNALLED)
        self._took(out, w, "loader", at.SEND_SENTINELS)

    def _join_workers(self, state: State, out: list[Step]) -> None:
        w = World(state)
        if w.nobody:
            self._workers_joined(w)
            self._took(out, w, "loader", at.JOIN_WORKERS)

    def _workers_joined(self, w: World) -> None:
        for number, worker in enumerate(w.crew):
            if number:
                self.say(MAIN, ev.JOIN[0], -1, number, Actor.WORKER, 5_000_000_000)
            self.say(MAIN, ev.JOIN[1], -1, number, Actor.WORKER, int(worker.place == at.GONE))
        for number in range(len(w.crew)):
            self.say(MAIN, ev.CANCEL_JOIN_THREAD, -1, number, QueueId.INDEX)
            self.say(MAIN, ev.QUEUE_CLOSE, -1, number, QueueId.INDEX)
        self._go_on(w, LoaderEvent.JOINED)

    def _terminate(self, state: State, out: list[Step]) -> None:
        w = World(state)
        if w.pin is not None and self.protocol.pin_done and self.protocol.pin_told_at_last and not w.pin_told:
            self.say(MAIN, ev.DONE_EVENT_SET, -1, -1, DoneEvent.PIN_THREAD)
            w.pin_told = True
        for signal in (15, 9) if self.protocol.killed_at_last else (15,):
            self._signal(w, signal)
        self._say_gone(w)
        left = sum(worker.place != at.GONE for worker in w.crew)
        self.say(MAIN, ev.SHUTDOWN[1], -1, -1, left)
        self._handle(w, LoaderEvent.TERMINATED)
        self._go_on(w)
        if self._pin_left(w):
            w.fault = "the shutdown leaves the pin thread behind"
        if left:
            w.fault = f"the shutdown leaves {left} worker(s) behind"
        self._took(out, w, "loader", at.TERMINATE)

    def _pin_left(self, w: World) -> bool:
        """Whether the pin thread runs on, though it could have ended by itself."""
        if w.pin is None or w.pin.life is PinState.ENDED or w.pin.place == at.STUCK:
            return False
        ends_later = self.configuration.slow or (self.configuration.heard and w.pin_told and w.pin.place == at.RUNNING)
        return w.frozen is None and not ends_later

    def _signal(self, w: World, signal: int) -> None:
        for number, worker in enumerate(w.crew):
            if worker.place != at.GONE:
                self.say(MAIN, ev.TERMINATE, -1, number, 0, signal)
                if worker.place != at.STOPPED or signal == 9:
                    # torch's handler of SIGTERM in a worker exits with 0
                    w.end(number, KILLED if signal == 9 else 0, self.configuration.index_room)

    # --- The loader's process: how Python exits -----------------------------------------------------------------------
    def _exit(self, state: State, out: list[Step]) -> None:
        """multiprocessing's own exit function: terminate daemonic children, join all, join feeder threads."""
        w = World(state)
        if w.frozen is not None:
            w.phase = at.ENDED
            self._took(out, w, "loader", "ends")
            return
        if self.protocol.daemon and not w.nobody:
            self._signal(w, 15)
        w.phase = at.JOIN_CHILDREN
        self._took(out, w, "loader", "exits")

    def _join_children(self, state: State, out: list[Step]) -> None:
        w = World(state)
        if w.nobody:
            w.phase = at.JOIN_FEEDERS
            self._took(out, w, "loader", at.JOIN_CHILDREN)

    def _join_feeders(self, state: State, out: list[Step]) -> None:
        """The index queues' feeders: one that writes to a full pipe which nobody reads never ends."""
        w = World(state)
        cancelled = self.protocol.cancel_index_join or w.closed
        if cancelled or all(len(queue) <= self.configuration.index_room for queue in w.index):
            w.phase = at.FINALISING
            self._took(out, w, "loader", at.JOIN_FEEDERS)

    def _finalise(self, state: State, out: list[Step]) -> None:
        """Threads are stopped wherever they are, perhaps inside a queue's lock; objects that are left get __del__."""
        w = World(state)
        if w.closed or self.protocol.exit_flag:
            w.phase = at.ENDED
            self._took(out, w, "loader", "ends")
            return
        for held in range(-1, self.configuration.workers):
            w = World(state)
            w.frozen = held
            w.pin = None if w.pin is None else w.pin._replace(place=at.BLOCKED)
            self._shut_down(w)
            self._took(out, w, "loader", "stops its threads, and shuts down in __del__", held)

    # --- A worker: worker.py ------------------------------------------------------------------------------------------
    def _worker(self, state: State, number: int, out: list[Step]) -> None:
        w = World(state)
        worker = w.crew[number]
        if worker.place == at.LEFT:
            self._after_loop(state, number, out)
        elif worker.place == at.JOINING:
            if not worker.out and (self.reduced or not self._holds(w, number)):
                self._ended(w, number)
                self._took(out, w, f"worker {number}", "ends")
        elif worker.place == at.FETCHING:
            self._fetched(w, number)
            self._took(out, w, f"worker {number}", "has fetched", worker.task)
        elif worker.place == at.RUNNING:
            self._in_loop(state, number, out)

    def _in_loop(self, state: State, number: int, out: list[Step]) -> None:
        w = World(state)
        queue = w.index[number]
        torn = bool(queue) and queue[0] == at.TORN
        orphan = w.phase in at.OVER
        if queue and not torn:
            self._take(w, number, queue)
            self._took(out, w, f"worker {number}", "takes", queue[0])
        elif torn and orphan and not self.protocol.bounded_index_read:
            w.worker(number, place=at.BLOCKED)
            self._took(out, w, f"worker {number}", "begins to read a torn message")
            return
        if orphan and self.protocol.watchdog and (queue or self.protocol.worker_timeout):
            w = World(state)
            self.say((number, 0), ev.INDEX_GET[1], -1, number, Message.EMPTY)
            self.say((number, 0), ev.FOUND_DEAD, -1, number, Actor.LOADER)
            self._decide(w, number, WorkerEvent.PARENT_DIED)
            self._took(out, w, f"worker {number}", "finds the loader dead")

    def _take(self, w: World, number: int, queue: tuple[int, ...]) -> None:
        message = queue[0]
        w.queue(number, queue[1:])
        if self.reduced and len(queue) > self.configuration.index_room:
            self._say_written(number, queue)
        me = (number, 0)
        if at.resumed(message) >= 0:
            self.say(me, ev.INDEX_GET[1], -1, number, Message.RESUME)
            self._decide(w, number, WorkerEvent.RESUME, message)
            return
        kind = Message.SENTINEL if message == at.SENTINEL else Message.TASK
        self.say(me, ev.INDEX_GET[1], max(message, -1), number, kind, int(message >= 0))
        if w.event_dead:
            w.worker(number, place=at.BLOCKED)  # in Event.is_set, whose lock a dead process holds
        elif message == at.SENTINEL:
            self.say(me, ev.SENTINEL_GET, -1, number, QueueId.INDEX)
            self._decide(w, number, WorkerEvent.SENTINEL_WHEN_DONE if w.done else WorkerEvent.SENTINEL)
        else:
            self._decide(w, number, WorkerEvent.TASK_WHEN_DONE if w.done else WorkerEvent.TASK, message)

    def _say_written(self, number: int, queue: tuple[int, ...]) -> None:
        """The pipe has room again: the feeder ends one write and begins the next."""
        room, feeder = self.configuration.index_room, index_feeder(number)
        self.say(feeder, ev.INDEX_WRITE[1], max(queue[room], -1), number, 64)
        if len(queue) > room + 1:
            self.say(feeder, ev.INDEX_WRITE[0], max(queue[room + 1], -1), number, 64)

    def _decide(self, w: World, number: int, event: WorkerEvent, message: int = -1) -> None:
        """Ask the lifecycle what to do about an event, and do it."""
        me, worker = (number, 0), w.crew[number]
        try:
            life, action = worker_decides(worker.life, event)
        except ProtocolError as error:
            w.end(number, FAILED, self.configuration.index_room)
            w.fault = f"the protocol forbids it: worker {number}{str(error)[len('worker 0') :]}"
            return
        w.worker(number, life=life)
        if action is Action.LEAVE:
            orphaned = event is WorkerEvent.PARENT_DIED
            self.say(me, ev.WORKER_EXIT, -1, number, Ending.ORPHANED if orphaned else Ending.SENTINEL)
            w.worker(number, place=at.LEFT)
            return
        if action is Action.FETCH:
            self.say(me, ev.FETCH[0], message, number, 1)
            w.worker(number, place=at.FETCHING, task=message)
            if self.reduced:
                self._fetched(w, number)
            return
        if action is Action.RESUME:
            epoch = at.resumed(message)
            self.say(me, ev.RESUME_ACK, -1, number, epoch)
            w.worker(number, out=(*worker.out, at.result(at.ACK, epoch, number)), left=self._share(number))
        elif event is WorkerEvent.TASK_WHEN_DONE:
            self.say(me, ev.DONE_EVENT_SEEN, message, number, DoneEvent.WORKERS)
        self.say(me, ev.INDEX_GET[0], -1, number)

    def _fetched(self, w: World, number: int) -> None:
        """A worker has its batch, and puts it into its buffer."""
        me, worker = (number, 0), w.crew[number]
        streams = self.configuration.streams is not None
        ends = streams and not worker.left
        outcome = Outcome.EXHAUSTED if ends else Outcome.DATA
        self.say(me, ev.FETCH[1], worker.task, number, outcome)
        self.say(me, ev.RESULT_PUT, worker.task, number, outcome)
        life, _ = worker_decides(worker.life, WorkerEvent.ITERATION_END if ends else WorkerEvent.FETCHED)
        sent = at.result(at.EXHAUSTED if ends else at.DATA, worker.task, number)
        left = worker.left - (streams and not ends)
        w.worker(number, life=life, out=(*worker.out, sent), left=left, place=at.RUNNING, task=-1)
        self.say(me, ev.INDEX_GET[0], -1, number)

    def _after_loop(self, state: State, number: int, out: list[Step]) -> None:
        """Out of the loop: end at once, or wait until the feeder thread has written everything."""
        p = self.protocol
        w = World(state)
        orphan = w.phase in at.OVER
        cancels = w.done and p.cancel_results_when_done
        cancels = cancels or (orphan and p.cancel_results_when_orphaned) or not p.join_results_until_done
        if w.event_dead:
            return
        if not cancels:
            w.worker(number, place=at.JOINING)
            self._took(out, w, f"worker {number}", at.JOINING)
            return
        for how, variant in self._cut_off(w, number, 0):
            self.say((number, 0), ev.CANCEL_JOIN_THREAD, -1, -1, QueueId.RESULT)
            self.say((number, 0), ev.QUEUE_CLOSE, -1, -1, QueueId.RESULT)
            self._took(out, variant, f"worker {number}", f"ends{how}")

    def _ended(self, w: World, number: int) -> None:
        """Its feeder was joined, so it holds no lock."""
        if w.lock == number:
            w.lock = at.FREE
        w.end(number, 0, self.configuration.index_room)

    @staticmethod
    def _holds(w: World, number: int) -> bool:
        """Whether the worker's feeder holds the result queue's lock (reduced: may hold it still)."""
        return w.lock >= 0 and w.lock % at.TAKEN == number

    def _cut_off(self, w: World, number: int, code: int) -> Iterator[tuple[str, World]]:
        """Each state in which a worker's process may end while its feeder thread runs."""
        room, state = self.configuration.index_room, w.freeze()
        ended = World(state)
        ended.end(number, code, room)
        holds = self._holds(w, number)
        if not self.reduced:
            ended.lock = at.DEAD_LOCK if holds else w.lock
            yield _HOW_FAR[w.lock - number] if holds else "", ended
            return
        ended.lock = at.FREE if holds else w.lock
        yield "", ended
        may_take = w.lock != at.DEAD_LOCK and bool(w.crew[number].out) and w.crew[number].place != at.STOPPED
        if holds or may_take:
            ended.lock = at.DEAD_LOCK
            yield _HOW_FAR[at.WRITTEN], ended
        if may_take:
            ended.results = (*w.results, at.TORN)
            yield _HOW_FAR[at.HALF_WRITTEN], ended

    # --- Feeder threads that write to the result queue ----------------------------------------------------------------
    def _may_write(self, w: World) -> bool:
        free = w.lock != at.DEAD_LOCK if self.reduced else w.lock == at.FREE
        return free and len(w.results) < self.configuration.result_room

    def _result_feeder(self, state: State, number: int, out: list[Step]) -> None:
        """A worker's thread that writes its results: lock, one part, the other, unlock."""
        w = World(state)
        worker, who = w.crew[number], f"worker {number}'s feeder"
        if worker.place == at.STOPPED:
            return
        if self.reduced:
            if worker.out and self._may_write(w):
                self._begin_write(w, number)
                task = self._end_write(w, number)
                self._took(out, w, who, "writes", task)
        elif w.lock == at.FREE and worker.out:
            w.lock = number + at.TAKEN
            self._took(out, w, who, "takes the lock")
        elif w.lock == number + at.TAKEN and len(w.results) < self.configuration.result_room:
            self._begin_write(w, number)
            self._took(out, w, who, "begins to write", at.parts(worker.out[0])[1])
        elif w.lock == number + at.HALF_WRITTEN:
            task = self._end_write(w, number)
            self._took(out, w, who, "has written", task)
        elif w.lock == number:
            w.lock = at.FREE
            self._took(out, w, who, "lets go of the lock")

    def _begin_write(self, w: World, number: int) -> None:
        kind, task, _ = at.parts(w.crew[number].out[0])
        about = (-1 if kind == at.ACK else task, number)
        if kind != at.ACK:
            self.say(result_feeder(number), ev.RESULT_PICKLE[0], *about)
            self.say(result_feeder(number), ev.RESULT_PICKLE[1], *about, 64)
        self.say(result_feeder(number), ev.RESULT_WRITE[0], *about, 64)
        w.results = (*w.results, at.TORN)
        w.lock = number + at.HALF_WRITTEN

    def _end_write(self, w: World, number: int) -> int:
        """The second part is written; the task."""
        out = w.crew[number].out
        kind, task, _ = at.parts(out[0])
        self.say(result_feeder(number), ev.RESULT_WRITE[1], -1 if kind == at.ACK else task, number, 64)
        w.results = (*w.results[:-1], out[0])
        w.lock = number
        w.worker(number, out=out[1:])
        return task

    # --- The pin thread: pin_memory.py --------------------------------------------------------------------------------
    def _pin_thread(self, state: State, out: list[Step]) -> None:
        w = World(state)
        if w.phase not in at.OVER:
            self._waker(state, out)
        if w.pin is None or w.pin.life is PinState.ENDED or w.pin.place != at.RUNNING or not w.results:
            return
        message = w.results[0]
        if message == at.TORN:
            if w.lock == at.DEAD_LOCK and not self.protocol.bounded_result_read:
                w.pin = w.pin._replace(place=at.BLOCKED)
                self._took(out, w, "pin thread", "begins to read a torn message")
            return
        w.results = w.results[1:]
        self._pin(w, message)
        self._took(out, w, "pin thread", "receives", at.parts(message)[1])

    def _waker(self, state: State, out: list[Step]) -> None:
        """The loader's thread that writes the pin thread's sentinel into the result queue."""
        w = World(state)
        if w.wake and self._may_write(w):
            self.say(WAKER, ev.RESULT_WRITE[0], -1, -1, 16)
            self.say(WAKER, ev.RESULT_WRITE[1], -1, -1, 16)
            w.wake, w.lock, w.results = False, at.LOADERS_LOCK, (*w.results, at.result(at.WAKE, 0, 0))
            self._took(out, w, "loader's feeder", "writes the pin thread's sentinel")
        elif w.lock == at.LOADERS_LOCK and not self.reduced:
            w.lock = at.FREE
            self._took(out, w, "loader's feeder", "lets go of the lock")

    def _pin(self, w: World, message: int) -> None:
        assert w.pin is not None
        kind, task, worker = at.parts(message)
        self._say_read(PIN_THREAD, kind, task, worker)
        self._say_got(PIN_THREAD, ev.RESULT_GET[1], kind, task, worker)
        if kind == at.WAKE:
            life = pin_moved(w.pin.life, PinEvent.WOKEN)
        else:
            life = pin_moved(w.pin.life, PinEvent.RESULT, PinEvent.PINNED)
            if not w.pin_told:
                life = pin_moved(life, PinEvent.PUT)
                self._say_pinned(kind, task, worker)
                w.ready = (*w.ready, message)
        w.pin = w.pin._replace(life=life)
        if w.pin_told:
            self._pin_ends(w)
        else:
            self.say(PIN_THREAD, ev.RESULT_GET[0], -1, -1, 5_000_000_000)

    def _say_pinned(self, kind: int, task: int, worker: int) -> None:
        if kind == at.DATA:
            self.say(PIN_THREAD, ev.PIN[0], task, worker, 64, 1)
            self.say(PIN_THREAD, ev.PIN[1], task, worker, 64, 1)
        if kind != at.ACK:
            self.say(
                PIN_THREAD, ev.READY_PUT, task, worker, Outcome.EXHAUSTED if kind == at.EXHAUSTED else Outcome.DATA
            )

    def _pin_ends(self, w: World) -> None:
        assert w.pin is not None
        w.pin = w.pin._replace(life=pin_moved(w.pin.life, PinEvent.DONE))
        w.ready = ()
        self.say(PIN_THREAD, ev.PIN_EXIT, -1, -1, Ending.SENTINEL)

    # --- Waits that run out -------------------------------------------------------------------------------------------
    def _polls(self, state: State, out: list[Step]) -> None:
        """Nothing else can happen: who polls looks round."""
        w = World(state)
        if w.phase in at.OVER:
            return
        waits = w.pin is not None and w.pin.life is not PinState.ENDED and w.pin.place == at.RUNNING
        if waits and w.pin_told and self.protocol.pin_timeout:
            self.say(PIN_THREAD, ev.RESULT_GET[1], -1, -1, Message.EMPTY)
            self._pin_ends(w)
            self._took(out, w, "pin thread", POLL)
        elif w.phase in (at.GETTING, at.RESUMING) and self.configuration.timeout:
            self._say_nothing_came(w)
            task, worker = self._wanted(w)
            self.say(MAIN, ev.TIMED_OUT, task, worker, 0)
            self._raise(w)
            self._took(out, w, "loader", "user's timeout")

    def _joins_over(self, state: State, out: list[Step]) -> None:
        w = World(state)
        if w.phase == at.JOIN_PIN and self.protocol.bounded_pin_join:
            self._pin_joined(w, 0)
            self._took(out, w, "loader", JOIN_OVER)
        elif w.phase == at.JOIN_WORKERS and self.protocol.bounded_joins and not w.nobody:
            self._workers_joined(w)
            self._took(out, w, "loader", JOIN_OVER)

    # --- Crashes ------------------------------------------------------------------------------------------------------
    def _worker_crashes(self, state: State, number: int, kind: Crash, out: list[Step]) -> None:
        w = World(state)
        w.crashed = True
        who = f"worker {number}"
        if kind is Crash.WORKER_KILLED:
            heard = self.configuration.heard and (w.phase in _INTERRUPTIBLE or w.phase in _SHUTTING_DOWN)
            for how, variant in self._cut_off(w, number, KILLED):
                variant.signalled = heard
                self._took(out, variant, who, f"is killed{how}")
            asks = w.crew[number].place == at.RUNNING and bool(w.index[number]) and w.index[number][0] >= at.SENTINEL
            if asks and not self.protocol.lock_free_event and not w.event_dead:
                w.event_dead, w.signalled = True, heard
                w.end(number, KILLED, self.configuration.index_room)
                self._took(out, w, who, "is killed in the lock of the done event")
        elif kind is Crash.WORKER_STOPPED:
            w.worker(number, place=at.STOPPED)
            self._took(out, w, who, "is stopped")
        elif w.crew[number].place == at.FETCHING:
            w.worker(number, place=at.STUCK)
            self._took(out, w, who, "is stuck in its dataset", w.crew[number].task)
        elif self.reduced and w.crew[number].place == at.RUNNING and w.index[number] and w.index[number][0] >= 0:
            task = w.index[number][0]
            w.queue(number, w.index[number][1:])
            self.say((number, 0), ev.INDEX_GET[1], task, number, Message.TASK, 1)
            self.say((number, 0), ev.FETCH[0], task, number, 1)
            w.worker(number, place=at.STUCK, life=worker_decides(w.crew[number].life, WorkerEvent.TASK)[0])
            self._took(out, w, who, "is stuck in its dataset", task)

    def _loader_killed(self, state: State, out: list[Step]) -> None:
        """The process is gone, with its threads; its feeders may have been in the middle of something."""
        w = World(state)
        if w.phase == at.TELL_WORKERS and not self.protocol.lock_free_event:
            held = self._without_loader(w)
            held.event_dead = True
            self._took(out, held, "loader", "is killed in the lock of the done event")
        self._took(out, self._without_loader(w), "loader", "is killed")
        torns = [False, True] if w.wake and (self.reduced or w.lock == at.FREE) and w.lock != at.DEAD_LOCK else []
        if w.lock == at.LOADERS_LOCK and self.reduced:
            torns = [False, *torns[1:]]
        for torn in torns:
            cut = self._without_loader(w)
            cut.lock = at.DEAD_LOCK
            cut.results = (*w.results, at.TORN) if torn else w.results
            self._took(out, cut, "loader", f"is killed{_HOW_FAR[at.HALF_WRITTEN if torn else at.WRITTEN]}")
        for number, queue in enumerate(w.index):
            if self.reduced and w.crew[number].place != at.GONE:
                for kept in range(min(len(queue), self.configuration.index_room + 1)):
                    cut = self._without_loader(w)
                    cut.queue(number, (*queue[:kept], at.TORN))
                    self._took(out, cut, "loader", f"is killed in the middle of a message to worker {number}", kept)

    def _without_loader(self, w: World) -> World:
        """A copy in which the loader is dead; what only it knew is forgotten."""
        out = World(w.freeze())
        out.crashed, out.phase, out.life, out.decisions, out.pin = True, at.KILLED, LoaderState.CLOSED, None, None
        out.drawn, out.missing, out.handed, out.ready, out.wake = 0, 0, (), (), False
        for number, queue in enumerate(w.index):
            out.queue(number, queue[: self.configuration.index_room])
            out.buffer(number, ())
        if not self.reduced and out.lock == at.LOADERS_LOCK:
            out.lock = at.DEAD_LOCK
        return out

    def _pin_crashes(self, state: State, kind: Crash, out: list[Step]) -> None:
        w = World(state)
        if w.pin is None or w.pin.life is PinState.ENDED or w.pin.place != at.RUNNING:
            return
        w.crashed = True
        if kind is Crash.PIN_DIES:
            w.pin = w.pin._replace(life=pin_moved(w.pin.life, PinEvent.DIED))
            self.say(PIN_THREAD, ev.RESULT_GET[1], -1, -1, Message.EMPTY)
            self.say(PIN_THREAD, ev.PIN_EXIT, -1, -1, Ending.ERROR)
            self._took(out, w, "pin thread", "dies")
        elif w.results and at.parts(w.results[0])[0] == at.DATA:
            task, worker = at.parts(w.results[0])[1:]
            self._say_read(PIN_THREAD, at.DATA, task, worker)
            self._say_got(PIN_THREAD, ev.RESULT_GET[1], at.DATA, task, worker)
            self.say(PIN_THREAD, ev.PIN[0], task, worker, 64, 1)
            w.results = w.results[1:]
            w.pin = Pin(pin_moved(w.pin.life, PinEvent.RESULT), at.STUCK)
            self._took(out, w, "pin thread", "is stuck in a copy", task)
