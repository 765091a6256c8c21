"""The loader's part of the model, beside `minidl.iterators` and `minidl.shutdown`, and how Python exits.

What is decided is asked of the live dispatcher and lifecycle, see `decisions`.
"""

from __future__ import annotations

import itertools
from typing import Any

from minidl.dispatcher import EPOCH_END, Assignment, Deliver, DispatchError
from minidl.explore import world as at
from minidl.explore.configurations import Configuration, Protocol
from minidl.explore.decisions import STATUS, Dispatching, loader_moved
from minidl.explore.steps import KILLED, MAIN, SHUTTING_DOWN, Acting, Step, index_feeder
from minidl.explore.world import LIFE, LOCK, READY, RESULTS, State, World
from minidl.protocol import LoaderEvent, LoaderState, PinState, ProtocolError
from minidl.tracing import events as ev
from minidl.tracing.events import Actor, DoneEvent, Ending, Message, Outcome, QueueId


class Loader(Acting):
    """The loader's main thread, and its threads that feed the index queues."""

    def __init__(self, configuration: Configuration, protocol: Protocol, *, reduced: bool = False) -> None:
        super().__init__(configuration, protocol, reduced=reduced)
        self.dispatching = Dispatching(configuration.workers, configuration.prefetch, configuration.in_order)
        self._plan = self._order_of_shutdown()

    def _order_of_shutdown(self) -> dict[str, str]:
        pin = [at.STOP_PIN, at.JOIN_PIN] if self.configuration.pin else []
        workers = [at.TELL_WORKERS, at.SEND_SENTINELS, at.JOIN_WORKERS]
        order = [*pin, *workers] if self.protocol.pin_first else [*workers, *pin]
        order = ["", *order, at.TERMINATE, at.CLOSED]
        return dict(itertools.pairwise(order))

    def _ask(self, w: World, call: str, *arguments: Any) -> Any:
        """Ask the dispatcher; what it forbids is a fault of the run."""
        w.decisions, answer, told = self.dispatching.ask(w.decisions, call, *arguments)
        for event in told:
            self.say(MAIN, *event)
        if isinstance(answer, DispatchError):
            w.fault = f"the dispatcher forbids it: {answer}"
        return answer

    def _handle(self, w: World, event: LoaderEvent) -> None:
        try:
            w.life = loader_moved(w.life, event)
        except ProtocolError as error:
            w.fault = f"the protocol forbids it: {error}"

    # --- iterators.py -------------------------------------------------------------------------------------------------
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
            self._took(out, w, feeder, f"has written {at.named(unsent[0])}")
        elif len(pipe) < self.configuration.index_room:
            self.say(index_feeder(number), ev.INDEX_WRITE[0], *about)
            w.queue(number, (*pipe, at.TORN))
            self._took(out, w, feeder, f"begins to write {at.named(unsent[0])}")

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

    def _found_dead(self, state: State, out: list[Step]) -> None:
        """A `get` has brought nothing within the interval: does everybody live who could send something?"""
        p = self.protocol
        w = World(state)
        if not p.loader_timeout:
            return
        dead = self._dead(w)
        if dead and p.liveness_check:
            self._say_nothing_came()
            for number in dead:
                self.say(MAIN, ev.FOUND_DEAD, -1, number, Actor.WORKER, 0, w.crew[number].code)
                if w.decisions[STATUS][number]:
                    self._send_sentinel(w, number)
                    self._ask(w, "worker_unavailable", number)
            self._raise(w)
            self._took(out, w, "loader", "finds a worker dead", dead[0])
        elif w.pin is not None and w.pin.life is PinState.ENDED and p.pin_liveness_check:
            self._say_nothing_came()
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

    def _say_nothing_came(self) -> None:
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
            self._say_nothing_came()
        if w.phase in SHUTTING_DOWN:
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

    # --- shutdown.py --------------------------------------------------------------------------------------------------
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

    # --- How Python exits ---------------------------------------------------------------------------------------------
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
