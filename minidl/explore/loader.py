"""The loader's part of the model: the effects that the live driver decides are performed; how Python exits.

`_perform` performs effects in the world until one waits for another actor or is a step of its own: then that one is
`Decided.effect`, and its place is the loader's phase. No decision is made here; see `decisions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, Final

from minidl.check.joint_rules import Act, Fact
from minidl.explore import world as at
from minidl.explore.ablated import ENDLESS
from minidl.explore.configurations import Configuration
from minidl.explore.decisions import FORBIDDEN, Driving, decided
from minidl.explore.guards import Protocol
from minidl.explore.steps import INTERRUPTIBLE, KILLED, MAIN, SHUTTING_DOWN, Acting, Step, index_feeder, silent
from minidl.explore.world import DECISIONS, PHASE, READY, RESULTS, State, World
from minidl.loader import driver as do
from minidl.loader.dispatcher import Assignment, Deliver
from minidl.loader.driver import Effect, Simple
from minidl.loader.protocol import LoaderEvent, LoaderState, PinState
from minidl.record.cpu_time import no_reading
from minidl.record.decisions import TracedLoaderLifecycle
from minidl.tracefile import events as ev
from minidl.tracefile.events import Actor, DoneEvent, Message, QueueId

PHASES: Final = {
    Simple.SET_PIN_DONE: at.STOP_PIN,
    Simple.WAKE_PIN: at.STOP_PIN,
    do.JoinPin: at.JOIN_PIN,
    Simple.SET_WORKERS_DONE: at.TELL_WORKERS,
    do.PutSentinel: at.SEND_SENTINELS,
    do.JoinWorkers: at.JOIN_WORKERS,
    Simple.FORGET_WORKERS: at.TERMINATE,
}
"""Effects of a shutdown that are steps of their own -> where the loader is then; those of one place are one step."""

BLOCKED: Final[dict[str, Callable[[World], bool]]] = {
    at.JOIN_PIN: lambda w: w.pin is None or w.pin.life is not PinState.ENDED,
    at.TELL_WORKERS: lambda w: w.event_dead,  # in Event.set, whose lock a dead worker holds
    at.SEND_SENTINELS: lambda w: w.frozen is not None and w.frozen >= 0,  # in Queue.put: the lock of a stopped thread
    at.JOIN_WORKERS: lambda w: not w.all_gone,
    at.JOIN_LEFT: lambda w: not w.all_gone,
}
"""Where the loader is in its shutdown -> what keeps it there."""

FLAGS: Final = {
    Simple.SET_PIN_DONE: ("pin_told", Act.SET_PIN_DONE, ev.DONE_EVENT_SET, DoneEvent.PIN_THREAD),
    Simple.WAKE_PIN: ("wake", Act.WAKE_PIN, ev.SENTINEL_PUT, QueueId.RESULT),
    Simple.SET_WORKERS_DONE: ("done", Act.SET_WORKERS_DONE, ev.DONE_EVENT_SET, DoneEvent.WORKERS),
}
"""Effects that set one flag of the world -> the flag, the act, its event with x."""

MANY: Final = 1 << 30
"""More places than a step has."""

INTERVAL: Final = int(do.MP_STATUS_CHECK_INTERVAL * 1e9)
"""The bound that events of waits name, in ns."""


class _StruckError(Exception):
    """A Ctrl-C comes here."""


class Loader(Acting):
    """The loader's main thread, and its threads that feed the index queues. driving: the classes that decide."""

    phases: ClassVar[dict[Any, str]] = PHASES

    def __init__(
        self, configuration: Configuration, protocol: Protocol, *, reduced: bool = False, driving: Driving | None = None
    ) -> None:
        super().__init__(configuration, protocol, reduced=reduced)
        self.driving = driving or Driving(configuration, protocol)
        self.handed: Deliver | None = None  # last
        self._left = -1  # places that are left up to a Ctrl-C; -1: none comes
        self._get = ev.READY_GET if configuration.pin else ev.RESULT_GET
        self._answered: dict[Any, Callable[[World, Any], Effect | None]] = {
            Simple.DRAW: self._draw, do.Get: self._wait, Deliver: self._yield, Simple.READY: self._with_user_again,
            Simple.SHUT_DOWN: self._epoch_over, Simple.END: self._end, do.Raise: self._raise,
        }  # fmt: skip
        """Effects whose answer to the driver is their own -> what performs them; returns what comes next."""
        self._done: dict[Any, Callable[[World, Any], None]] = {
            Assignment: self._assigned, do.NoteDeath: self._note_death, do.PutResume: self._put_resume,
            do.PutSentinel: self._send_sentinel, do.JoinPin: self._pin_joined, do.JoinWorkers: self._workers_joined,
            Simple.CLOSE_RESULT_QUEUE: self._close_queues, Simple.CLOSE_INDEX_QUEUES: self._close_queues,
            Simple.FORGET_WORKERS: silent, do.Terminate: self._terminate, **dict.fromkeys(FLAGS, self._set_flag),
        }  # fmt: skip
        """Effects that `done` answers -> what performs them."""

    # --- The driver and its effects -----------------------------------------------------------------------------------
    def _ask(self, w: World, call: str, argument: Any = None) -> Effect | None:
        """Give the driver an input; what it forbids is a fault of the run."""
        rcvd_idx = w.decisions.rcvd_idx
        try:
            w.decisions, effect, told = self.driving.ask(w.decisions, call, argument)
        except FORBIDDEN as error:
            w.fault = f"the protocol forbids it: {error}"
            return None
        if w.decisions.miscounted:
            w.fault = "tasks_outstanding is not the number of tasks that have no answer"
        if self.say is not silent:
            for event in told:
                if isinstance(event[0], LoaderEvent):
                    self._say_moved(w, rcvd_idx, *event)
                else:
                    self.say(MAIN, *event)
        return effect

    def _perform(self, w: World, effect: Effect | None) -> None:
        """Perform effects until one is a step of its own; that one is pending then."""
        while effect is not None:
            if effect is not do.END:
                self._place()
            kind = effect if isinstance(effect, Simple) else type(effect)
            phase = self.phases.get(kind) if w.decisions.closed else None
            if phase is not None and phase != w.phase:
                w.phase, w.decisions = phase, decided(w.decisions.frozen, effect)
                self._begin_join(w, effect)
                return
            if (perform := self._done.get(kind)) is not None:
                perform(w, effect)
                self._place()
                effect = self._ask(w, "done")
            else:
                effect = self._answered[kind](w, effect)

    # --- The main thread's steps, and Ctrl-C --------------------------------------------------------------------------
    def _acts(self, state: State) -> Iterator[tuple[str, int, Callable[[World], None]]]:
        """What the main thread can do now, unless it waits: a label, and what does it."""
        phase = state[PHASE]
        if phase == at.NEW:
            yield "begins the epoch", -1, lambda w: self._perform(w, self._ask(w, "begin"))
        elif phase in (at.IDLE, at.LEAVES):
            yield from self._of_user(state)
        elif phase in (at.GETTING, at.RESUMING):
            queue = state[READY if self.configuration.pin else RESULTS]
            if queue and queue[0] != at.TORN:
                yield "receives", at.parts(queue[0])[1], self._receive
        elif (blocked := BLOCKED.get(phase)) is None or not blocked(World(state)):
            yield phase, -1, lambda w: self._perform(w, w.decisions.effect)

    def _act(self, state: State, out: list[Step]) -> None:
        """A step of the main thread."""
        for what, which, act in self._acts(state):
            w = World(state)
            act(w)
            self._took(out, w, "loader", what, which)

    def _ctrl_c(self, state: State, out: list[Step]) -> None:
        """A Ctrl-C while the main thread waits, or at each place of its next step."""
        if state[PHASE] not in (*INTERRUPTIBLE, *SHUTTING_DOWN, at.LEAVES, at.TERMINATE):
            return
        if state[PHASE] not in (at.NEW, at.IDLE, at.LEAVES):  # in the program's own code it interrupts no step
            self._struck(World(state), out, "")
        for what, which, act in self._acts(state):
            for place in range(self._places(act, state)):
                w = World(state)
                self._left = place
                try:
                    act(w)
                except _StruckError:
                    self._struck(w, out, f" as it {what}", which)

    def _places(self, act: Callable[[World], None], state: State) -> int:
        """At how many places a Ctrl-C may come while this is done."""
        say, self.say = self.say, silent
        self._left = MANY
        act(World(state))
        self.say, places, self._left = say, MANY - self._left, -1
        self.made.clear()
        return places

    def _place(self) -> None:
        """A place at which a Ctrl-C may come; here it does, if so many have passed."""
        if self._left >= 0:
            self._left -= 1
            if self._left < 0:
                raise _StruckError

    def _struck(self, w: World, out: list[Step], when: str, which: int = -1) -> None:
        """KeyboardInterrupt leaves the step, see `_BaseDataLoaderIter.__next__` and `Crew.shut_down`."""
        w.ctrl_c -= 1
        begins = w.phase == at.NEW
        if w.decisions.closed:
            self._cut_short(w)
        else:
            self._ask(w, "failed", w.decisions.life is LoaderState.WAITING)  # in next(), which may go on
            if w.patience and not begins:  # else iter() has raised: the program has no iterator
                w.patience, w.phase = w.patience - 1, at.LEAVES
            else:
                self._leave(w)
        self._took(out, w, "loader", f"is interrupted by Ctrl-C{when}", which)

    def _cut_short(self, w: World) -> None:
        """An error leaves a step of the shutdown, see `Crew.shut_down`: the leftovers follow, once."""
        self._ask(w, "interrupted")
        if w.second:
            w.let_go |= self.protocol.pin_sentinel_left
            w.second, w.phase = False, at.GIVEN_UP
        elif self.protocol.leftovers_ended:
            w.second = True
            self._perform(w, self._shut_down(w))
        else:
            self._closed(w)

    def _given_up(self, state: State, out: list[Step]) -> None:
        """The shutdown has raised. The program drops the iterator, or keeps it until Python exits."""
        w = World(state)
        if self.configuration.exits:
            w.phase = at.EXITING
            self._took(out, w, "loader", "ends")
        else:
            self._perform(w, self._shut_down(w))
            self._took(out, w, "loader", "drops the iterator")

    # --- An epoch -----------------------------------------------------------------------------------------------------
    def _with_user_again(self, w: World, _: Any) -> None:
        w.phase = at.IDLE

    def _draw(self, w: World, _: Any) -> Effect | None:
        c = self.configuration
        task = w.decisions.frozen[1][0]
        self.say(MAIN, ev.SAMPLER_NEXT[0], task)
        there = c.streams is not None or w.drawn < c.tasks
        self.say(MAIN, ev.SAMPLER_NEXT[1], task, -1, int(there), task if there else -1)
        w.drawn += there and c.streams is None
        return self._ask(w, "drawn" if there else "sampler_ended")

    def _assigned(self, w: World, given: Assignment) -> None:
        self._do(w, Act.SEND_TASK, given.worker_id)
        self.say(MAIN, ev.INDEX_PUT, given.idx, given.worker_id, 1)
        self._put_index(w, given.worker_id, given.idx)

    def _put_index(self, w: World, worker: int, message: int) -> None:
        """Into an index queue's buffer; if no worker reads it any more, it only takes up room."""
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

    def _of_user(self, state: State) -> Iterator[tuple[str, int, Callable[[World], None]]]:
        """The user's code runs: it asks for the next batch, begins the next epoch, or ends."""
        c, decisions = self.configuration, state[DECISIONS]
        goes_on = decisions.life is LoaderState.IDLE and state[PHASE] == at.IDLE
        if goes_on:
            yield "next", -1, lambda w: self._perform(w, self._ask(w, "next"))
        if not goes_on or c.may_break:
            again = c.persistent and decisions.epoch + 1 < c.epochs
            yield ("resumes", -1, self._resume) if again else ("ends", -1, self._leave)

    def _resume(self, w: World) -> None:
        effect = self._ask(w, "resume")
        w.drawn, w.handed = 0, ()
        self._perform(w, effect)

    def _leave(self, w: World) -> None:
        """The user is done, or has had an error: the iterator is closed, or the interpreter exits with it open."""
        c = self.configuration
        if not c.exits or (c.persistent and c.pin):
            self._perform(w, self._shut_down(w))
        else:
            w.phase = at.EXITING

    def _shut_down(self, w: World) -> Effect | None:
        effect = self._ask(w, "close")
        w.phase = ""
        return effect

    def _put_resume(self, w: World, effect: do.PutResume) -> None:
        self.say(MAIN, ev.RESUME_PUT, -1, effect.worker_id, effect.epoch)
        self._put_index(w, effect.worker_id, at.resume(effect.epoch))

    def _wait(self, w: World, effect: do.Get) -> None:
        """Begin to wait for a message."""
        self._do(w, Act.GET_RESULT, -1, *_bounded(effect))
        w.phase = at.RESUMING if w.decisions.resume_iteration_cnt else at.GETTING
        w.decisions = decided(w.decisions.frozen, effect)
        self.say(MAIN, self._get[0], *w.decisions.wanted, INTERVAL)

    def _yield(self, w: World, step: Deliver) -> None:
        if step.idx in w.handed:
            w.fault = f"task {step.idx} is yielded twice"
        elif self.configuration.in_order and w.handed and step.idx < w.handed[-1]:
            w.fault = f"task {step.idx} is yielded after task {w.handed[-1]}"
        w.handed = (*w.handed, step.idx) if self.configuration.in_order else tuple(sorted((*w.handed, step.idx)))
        self.handed = step
        self._ask(w, "yielded")
        w.phase = at.IDLE

    def _epoch_over(self, w: World, _: Any = None) -> Effect | None:
        c = self.configuration
        wanted = c.tasks if c.streams is None else sum(c.streams)
        lost = any(code for _, code in w.dead)  # its tasks were given up
        if len(w.handed) != wanted and not lost:
            w.fault = f"the epoch ends after {len(w.handed)} batches of {wanted}"
        w.phase = at.IDLE
        return None if c.persistent else self._shut_down(w)

    def _end(self, w: World, _: Any) -> None:
        if w.decisions.closed:
            self._closed(w)
        else:
            self._epoch_over(w)

    def _getting(self, state: State, out: list[Step]) -> None:
        """Waiting in a `get` of the data queue, in `next` or for the acknowledgements of a new epoch."""
        w, queue = World(state), state[READY if self.configuration.pin else RESULTS]
        torn = bool(queue) and queue[0] == at.TORN
        if torn and w.lock == at.DEAD_LOCK and not self.protocol.bounded_result_read:
            w.phase = at.READING
            self._took(out, w, "loader", "begins to read a torn message")
        elif queue and not torn:
            self._act(state, out)
        elif w.decisions.effect.timeout < ENDLESS:
            self._nothing_came(w, out)

    def _receive(self, w: World) -> None:
        """Take a message out of the queue, and decide about it; a Ctrl-C between the two loses it."""
        if self.configuration.pin:
            message, w.ready = w.ready[0], w.ready[1:]
        else:
            message, w.results = w.results[0], w.results[1:]
        self._place()
        kind, task, worker = at.parts(message)
        if not self.configuration.pin:
            self._say_read(MAIN, kind, task, worker)
        self._say_got(MAIN, self._get[1], kind, task, worker)
        self._perform(w, self._decide_about(w, message))

    def _decide_about(self, w: World, message: int) -> Effect | None:
        return self._ask(w, "received", message)

    def _nothing_came(self, w: World, out: list[Step], *, timed_out: bool = False) -> None:
        """A `get` has brought nothing in time; it is a step only if the driver finds a reason not to go on waiting."""
        dead, pin_alive = w.dead, w.pin is None or w.pin.life is not PinState.ENDED
        jammed = w.lock == at.DEAD_LOCK and (not w.results or w.results[0] == at.TORN)
        if not dead and pin_alive and not timed_out:
            return
        effect = self._ask(w, "nothing_came", (dead, pin_alive, timed_out, jammed))
        if type(effect) is do.Get:
            return
        self.say(MAIN, self._get[1], -1, -1, Message.EMPTY)
        if isinstance(effect, do.NoteDeath):
            who = (f"worker {effect.who} dead") if effect.who != do.PIN else "the pin thread dead"
            what = f"finds {who}"
        else:
            task, worker = w.decisions.wanted
            self.say(MAIN, ev.TIMED_OUT, task, worker, 0)
            what = "user's timeout"
        self._perform(w, effect)
        self._took(out, w, "loader", what)

    def _note_death(self, w: World, effect: do.NoteDeath) -> None:
        if effect.who == do.PIN:
            self.say(MAIN, ev.FOUND_DEAD, -1, -1, Actor.PIN_THREAD)
        else:
            self.say(MAIN, ev.FOUND_DEAD, -1, effect.who, Actor.WORKER, 0, w.crew[effect.who].code)

    def _raise(self, w: World, _: Any = None) -> None:
        """An error reaches the user, who goes on or gives up."""
        self._ask(w, "failed")
        if w.patience and not w.decisions.closed:
            w.patience, w.phase = w.patience - 1, at.IDLE
        else:
            self._leave(w)

    def _interrupted(self, state: State, out: list[Step]) -> None:
        """SIGCHLD's handler raises, wherever the main thread is: a shutdown goes on to its end at once."""
        w = World(state)
        w.signalled = False
        if w.phase in (at.GETTING, at.RESUMING):
            self.say(MAIN, self._get[1], -1, -1, Message.EMPTY)
        if w.phase in SHUTTING_DOWN:
            self._cut_short(w)
        else:
            self._raise(w)
        self._took(out, w, "loader", "is interrupted by SIGCHLD")

    # --- The shutdown -------------------------------------------------------------------------------------------------
    def _set_flag(self, w: World, effect: Simple) -> None:
        flag, act, code, x = FLAGS[effect]
        self._do(w, act)
        self.say(MAIN, code, -1, -1, x)
        setattr(w, flag, True)

    def _send_sentinel(self, w: World, effect: do.PutSentinel) -> None:
        self._do(w, Act.SEND_SENTINEL, effect.worker_id)
        self.say(MAIN, ev.SENTINEL_PUT, -1, effect.worker_id, QueueId.INDEX)
        self._put_index(w, effect.worker_id, at.SENTINEL)

    def _begin_join(self, w: World, effect: Effect) -> None:
        if isinstance(effect, do.JoinPin):
            self._do(w, Act.JOIN_PIN, -1, *_bounded(effect))
            self.say(MAIN, ev.JOIN[0], -1, -1, Actor.PIN_THREAD, INTERVAL)
        elif isinstance(effect, do.JoinWorkers):
            for number in range(self.configuration.workers):
                self._do(w, Act.JOIN_WORKER, number, *_bounded(effect))
            self.say(MAIN, ev.JOIN[0], -1, 0, Actor.WORKER, INTERVAL)

    def _pin_joined(self, w: World, _: Any) -> None:
        ended = w.pin is not None and w.pin.life is PinState.ENDED
        self.say(MAIN, ev.JOIN[1], -1, -1, Actor.PIN_THREAD, int(ended))

    def _workers_joined(self, w: World, _: Any) -> None:
        for number, worker in enumerate(w.crew):
            if number:
                self.say(MAIN, ev.JOIN[0], -1, number, Actor.WORKER, INTERVAL)
            self.say(MAIN, ev.JOIN[1], -1, number, Actor.WORKER, int(worker.place == at.GONE))

    def _close_queues(self, w: World, effect: Simple) -> None:
        results = effect is Simple.CLOSE_RESULT_QUEUE
        w.let_go |= results
        for number in (-1,) if results else range(self.configuration.workers):
            queue = QueueId.RESULT if results else QueueId.INDEX
            self.say(MAIN, ev.CANCEL_JOIN_THREAD, -1, number, queue)
            self.say(MAIN, ev.QUEUE_CLOSE, -1, number, queue)

    def _terminate(self, w: World, effect: do.Terminate) -> None:
        self._signal(w, 9 if effect.kill else 15, Act.KILL if effect.kill else Act.TERMINATE)

    def _closed(self, w: World) -> None:
        """The shutdown has ended: what has it left?"""
        if self._pin_left(w):
            w.fault = "the shutdown leaves the pin thread behind"
        self._judge_left(w)
        w.let_go |= w.second and self.protocol.pin_sentinel_left
        w.second, w.phase = False, at.CLOSED

    def _judge_left(self, w: World) -> None:
        """A worker that is left is a fault."""
        for number in range(self.configuration.workers):
            self._do(w, Act.CLOSE, number)
        left = sum(worker.place != at.GONE for worker in w.crew)
        if left:
            w.fault = f"the shutdown leaves {left} worker(s) behind"

    def _pin_left(self, w: World) -> bool:
        """Whether the pin thread runs on, though it could have ended by itself."""
        if w.pin is None or w.pin.life is PinState.ENDED or w.pin.place == at.STUCK:
            return False
        c = self.configuration
        ends_later = c.slow or ((c.heard or c.ctrl_c) and w.pin_told and w.pin.place == at.RUNNING)
        return w.frozen is None and not ends_later

    def _signal(self, w: World, signal: int, act: Act | None = None) -> None:
        for number, worker in enumerate(w.crew):
            if worker.place != at.GONE:
                if act is not None:
                    self._do(w, act, number)
                self.say(MAIN, ev.TERMINATE, -1, number, 0, signal)
                if worker.place != at.STOPPED or signal == 9:
                    # torch's handler of SIGTERM in a worker exits with 0
                    w.end(number, KILLED if signal == 9 else 0, self.configuration.index_room)

    # --- What the loader's lifecycle tells ----------------------------------------------------------------------------
    def _say_moved(self, w: World, rcvd_idx: int, event: LoaderEvent, before: LoaderState) -> None:
        """Have the traced lifecycle emit a move. What it would remember of the run is read off the state after it."""
        c = self.configuration
        seen = SimpleNamespace(num_workers=c.workers, prefetch_factor=c.prefetch, rcvd_idx=rcvd_idx)
        traced: Any = TracedLoaderLifecycle(SimpleNamespace(
            emit=self._emit, dispatcher=seen, delivered=self.handed, position=None, single_process=False, loader=0,
            let_go=silent, dataloader=None, cpu=no_reading, delay=no_reading,
            emit_gone=lambda: self._say_gone(w)))  # type: ignore[arg-type]  # fmt: skip
        traced.state, traced.task = before, w.handed[-1] if w.handed else -1
        traced.epoch = w.decisions.epoch - (event in (LoaderEvent.EPOCH_BEGIN, LoaderEvent.RESUME))
        traced.yielded = len(w.handed) - (event is LoaderEvent.YIELD)
        traced.open_consumer = before is LoaderState.IDLE
        traced.open_epoch = before not in (LoaderState.EXHAUSTED, LoaderState.RESUMING)
        traced.open_next, traced.shuts_down = before is LoaderState.WAITING, True
        traced.handle(event)

    def _emit(self, code: int, task: int = -1, worker: int = -1, x: int = 0, y: int = 0, z: int = 0) -> None:
        self.say(MAIN, code, task, worker, x, y, z)

    def _say_gone(self, w: World) -> int:
        """Workers that are seen to have ended; a trace tells each of them once. Returns how many have not."""
        gone = [(number, worker.code) for number, worker in enumerate(w.crew) if worker.place == at.GONE]
        for number, code in gone:
            self.say(MAIN, ev.WORKER_GONE, -1, number, 0, code)
        return len(w.crew) - len(gone)

    # --- How Python exits ---------------------------------------------------------------------------------------------
    def _exit(self, state: State, out: list[Step]) -> None:
        """multiprocessing's own exit function: terminate daemonic children, join all, join feeder threads."""
        w = World(state)
        if w.frozen is not None:
            w.phase = at.ENDED
            self._took(out, w, "loader", "ends")
            return
        if self.protocol.daemon and not w.all_gone:
            self._signal(w, 15)
        w.phase = at.JOIN_CHILDREN
        self._took(out, w, "loader", "exits")

    def _join_children(self, state: State, out: list[Step]) -> None:
        w = World(state)
        if w.all_gone:
            w.phase = at.JOIN_FEEDERS
            self._took(out, w, "loader", at.JOIN_CHILDREN)

    def _join_feeders(self, state: State, out: list[Step]) -> None:
        """Feeder threads: one that writes to a full pipe without a reader, or waits for a dead lock, never ends."""
        w = World(state)
        if w.wake and not w.let_go:  # the pin thread's sentinel is not written, and its feeder was not let go of
            return
        cancelled = self.protocol.cancel_index_join or w.decisions.closed
        if cancelled or all(len(queue) <= self.configuration.index_room for queue in w.index):
            w.phase = at.FINALISING
            self._took(out, w, "loader", at.JOIN_FEEDERS)

    def _finalise(self, state: State, out: list[Step]) -> None:
        """Threads are stopped wherever they are, perhaps inside a queue's lock; objects that are left get __del__."""
        w = World(state)
        if w.decisions.closed or self.protocol.exit_flag:
            w.phase = at.ENDED
            self._took(out, w, "loader", "ends")
            return
        for held in range(-1, self.configuration.workers):
            w = World(state)
            w.frozen = held
            w.pin = None if w.pin is None else w.pin._replace(place=at.BLOCKED)
            self._perform(w, self._shut_down(w))
            self._took(out, w, "loader", "stops its threads, and shuts down in __del__", held)


def _bounded(wait: do.Get | do.JoinPin | do.JoinWorkers) -> tuple[Fact, ...]:
    return (Fact.BOUNDED,) if wait.timeout < ENDLESS else ()
