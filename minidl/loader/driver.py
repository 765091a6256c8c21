"""What the loader does next: pure decisions around the dispatcher, returned as effects that an actor performs.

Theory of operation
-------------------
A `Driver` owns the dispatcher (which task to whom) and the loader's lifecycle (what may happen when). An actor calls an
*input*, gets one *effect*, performs it, and reports with the next input:

    effect      performed by                                    answered by
    DRAW        asking the sampler for an index                 drawn(index), sampler_ended()
    Assignment  putting the task into the worker's queue        done()
    Get         reading one message, for at most `timeout`      received(message), nothing_came(evidence)
    Deliver     giving the batch to the consumer                yielded(), or failed() for an error
    SHUT_DOWN   running the shutdown: close(), then its steps   done()
    END         StopIteration; nothing is left to do            next(), resume()
    READY       nothing: an epoch has begun                     next()
    Raise       raising the error that it names                 failed()
    any other   one step, see its docstring                     done()

An epoch begins with `begin` or `resume`; `next` asks for one batch; `close` begins the shutdown, at any time: also from
the sampler or from a signal handler, between an effect and its answer. That answer then returns END. If performing an
effect raises, the actor calls `failed` (in an epoch) or `interrupted` (in the shutdown). If a signal's handler has
raised before the answer, the actor may perform the effect `again`.

What is decided (article 1 §2.4; article 4 §shutdown):

1. An epoch begins with `capacity` draws. Each batch that is yielded is first replaced by one more task.
2. A worker whose iterable has ended gets its sentinel, unless it is persistent, and one more task goes to the others.
3. A sentinel counts as sent when `done` answers it. The shutdown sends one to each worker that has had none. As
   upstream, it sends one to each persistent worker, too: of two sentinels for a dead worker nobody reads the second.
4. The pin-memory thread is stopped before the workers are. Every join is bounded. A worker that is still alive then is
   terminated, and at last killed. After an interruption the shutdown skips to these last steps. A second `close` does
   nothing.

No processes, queues, clocks or tensors here. The live iterator, `minidl explore` and `minidl bench` run this class.
`freeze` and `thaw` save and restore the state. `explore.ablated` removes single guards, by overriding their methods.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from minidl.live_repr import LiveRepr, counted, numbers
from minidl.loader.dispatcher import EPOCH_END, Assignment, Deliver, Dispatcher, DispatchError, Frozen, NoBatch, Wait
from minidl.loader.protocol import LoaderEvent, LoaderLifecycle, LoaderState
from minidl.wire.messages import Result, ResumeIteration, WorkerExhausted

MP_STATUS_CHECK_INTERVAL = 5.0
"""Seconds after which a wait for another actor looks whether it lives, and that a join of workers may last."""


# --- Effects ----------------------------------------------------------------------------------------------------------
class Simple(enum.Enum):
    """Effects without arguments."""

    DRAW = "ask the sampler for an index"
    READY = "the epoch has begun"
    SHUT_DOWN = "the epoch is over, and the workers are not persistent"
    END = "stop"
    SET_PIN_DONE = "set the pin thread's done event"
    WAKE_PIN = "put a sentinel into the result queue"
    CLOSE_RESULT_QUEUE = "cancel the join of its feeder, and close it"
    SET_WORKERS_DONE = "set the workers' done event"
    CLOSE_INDEX_QUEUES = "cancel the joins of their feeders, and close them"
    FORGET_WORKERS = "SIGCHLD of these workers raises no more"


DRAW: Final = Simple.DRAW
READY: Final = Simple.READY
SHUT_DOWN: Final = Simple.SHUT_DOWN
END: Final = Simple.END


@dataclass(frozen=True, slots=True)
class Get:
    """Read one message; timeout in seconds."""

    timeout: float


@dataclass(frozen=True, slots=True)
class PutResume:
    """Put the message that begins epoch number `epoch` into the worker's queue."""

    worker_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PutSentinel:
    """Put a sentinel into the worker's queue."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class NoteDeath:
    """Note that a liveness check has found the worker (PIN: the pin thread) dead."""

    who: int


class Failure(enum.Enum):
    """Why the loader raises an error of its own."""

    WORKER_DIED = enum.auto()
    PIN_THREAD_DIED = enum.auto()
    TIMED_OUT = enum.auto()
    TASK_LOST = enum.auto()


@dataclass(frozen=True, slots=True)
class Raise:
    """Raise the error for `why`; workers: that died, that is waited for, or that got no task."""

    why: Failure
    workers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinPin:
    """Join the pin thread for at most `timeout` seconds; warn if it goes on."""

    timeout: float


@dataclass(frozen=True, slots=True)
class JoinWorkers:
    """Join the workers, one deadline of `timeout` seconds for all of them."""

    timeout: float


@dataclass(frozen=True, slots=True)
class Terminate:
    """End the workers that are alive, by SIGTERM or, if `kill`, SIGKILL; join each for at most `timeout` seconds."""

    kill: bool
    timeout: float


Effect = (
    Simple | Get | Assignment | Deliver | Raise | NoteDeath
    | PutResume | PutSentinel | JoinPin | JoinWorkers | Terminate
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _WasTold:
    """A step of a plan that the driver performs itself: this worker (PIN: the pin thread) has been told to leave."""

    who: int


PIN: Final = -1

Plan = tuple[Effect | LoaderEvent | _WasTold, ...]
"""Steps that come one after the other: effects, and between them what the driver does itself."""


# --- Evidence ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Evidence:
    """What the actor sees after a `Get` that brought no message, or one that can't be rebuilt.

    dead: exit codes of the workers that have ended. timed_out: the user's timeout has passed. jammed: whether the lock
    of the result queue is held by a process that writes nothing; it counts only if `Driver.leavers` names somebody.
    unsent: workers to which a message could not be written; it counts only if they have work to do.
    """

    dead: Mapping[int, int | None]
    pin_alive: bool = True
    timed_out: bool = False
    jammed: bool = False
    unsent: tuple[int, ...] = ()


# --- The driver -------------------------------------------------------------------------------------------------------
class Driver(LiveRepr):
    """The loader's decisions. See the module's docstring for the order of inputs and effects.

    Raises DispatchError and ProtocolError for inputs that break the rules of the dispatcher or of the lifecycle.
    timeout: the user's, in seconds, 0 = none.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        lifecycle: LoaderLifecycle,
        *,
        persistent: bool = False,
        timeout: float = 0,
    ) -> None:
        self.dispatcher = dispatcher
        self.lifecycle = lifecycle
        self.persistent = persistent
        self.get = Get(timeout or MP_STATUS_CHECK_INTERVAL)
        self.pin = False  # whether there is a pin thread
        self.epoch = 0
        self.resume_iteration_cnt = 0  # acknowledgements of the epoch that are waited for
        self.plan: Plan = ()  # what comes next: the first draws, a batch, a shutdown; () = as the dispatcher says
        self.told: list[bool] = []  # for each worker that was started: whether its sentinel was sent
        self.pin_told = False
        self.closed = False  # the shutdown has begun
        self.abandoned = False  # ... and was interrupted

    def _phrases(self) -> Iterator[str]:
        yield f"{self.lifecycle.state.name} in epoch {self.epoch}"
        yield from self.dispatcher._counts()
        if self.resume_iteration_cnt:
            yield f"{counted(self.resume_iteration_cnt, 'acknowledgement')} missing"
        yield from self._next_step()
        if told := [worker for worker, is_told in enumerate(self.told) if is_told]:
            yield f"told to leave: {numbers('worker', told)}"
        if self.pin_told:
            yield "told to leave: pin thread"
        if self.abandoned:
            yield "shutdown interrupted"

    def _next_step(self) -> Iterator[str]:
        """The next effect of the plan, if it has one."""
        for step in [step for step in self.plan if not isinstance(step, (LoaderEvent, _WasTold))][:1]:
            if self.lifecycle.state is LoaderState.PRIMING:
                yield f"{counted(1 + self.plan.count(DRAW), 'draw')} of the first {self.dispatcher.capacity} left"
            elif type(step) is Deliver:
                yield f"task {step.idx} is yielded next"
            else:
                yield f"after this step {getattr(step, 'name', step)}"

    @property
    def ended(self) -> bool:
        """Whether the shutdown is over."""
        return self.lifecycle.state is LoaderState.CLOSED

    # --- The start ----------------------------------------------------------------------------------------------------
    def worker_started(self) -> None:
        """One more worker runs. Only those are told to leave, and joined."""
        self.told.append(False)

    def pin_started(self) -> None:
        """The pin-memory thread runs."""
        self.pin = True

    def begin(self) -> Effect:
        """Begin the first epoch. Article 1 §2.4.3."""
        return self._prime()

    def resume(self) -> Effect:
        """Begin the next epoch: a message to every worker, and wait until all have acknowledged it."""
        if self.lifecycle.allows(LoaderEvent.RAISE):  # an exception has interrupted `failed`
            self.lifecycle.handle(LoaderEvent.RAISE)
        self.lifecycle.handle(LoaderEvent.RESUME)
        self.epoch += 1
        self.dispatcher.reset()
        self.resume_iteration_cnt = self.dispatcher.num_workers
        return self._follow(*(PutResume(worker, self.epoch) for worker in range(self.resume_iteration_cnt)), self.get)

    def _acknowledged(self, message: Any) -> Effect:
        """Count acknowledgements of this epoch; every other message belongs to an earlier epoch.

        Such a message may be an acknowledgement, too, if that epoch's beginning was interrupted.
        """
        self.resume_iteration_cnt -= isinstance(message, ResumeIteration) and message.epoch == self.epoch
        return self.get if self.resume_iteration_cnt else self._prime()

    def _prime(self) -> Effect:
        self.lifecycle.handle(LoaderEvent.EPOCH_BEGIN)
        return self._follow(*[DRAW] * self.dispatcher.capacity, LoaderEvent.PRIMED, READY)

    # --- One batch ----------------------------------------------------------------------------------------------------
    def next(self) -> Effect:
        """The consumer asks for a batch. Article 1 §2.4.7. Raises ProtocolError if the epoch has not begun."""
        self.lifecycle.next()
        return END if self.closed else self._after(self.dispatcher.next_step())

    def again(self) -> None:
        """The consumer asks for a batch again: the effect that was not answered is performed again."""
        self.lifecycle.next()

    def _after(self, step: Deliver | Wait | NoBatch) -> Effect:
        """What follows from the dispatcher's step."""
        if step is EPOCH_END:
            self.lifecycle.handle(LoaderEvent.EPOCH_END)
            return END if self.persistent else self._follow(SHUT_DOWN, END)
        if type(step) is Deliver:
            self.plan = (step,)  # the batch waits here while its replacement is drawn: one leaves, one task follows
            return DRAW
        return self.get

    def drawn(self, index: Any) -> Effect:
        """The sampler gave `index`: which worker gets the task. Article 1 §2.4.4."""
        if self.closed:
            return END
        return self.dispatcher.assign(index) or self.done()

    def sampler_ended(self) -> Effect:
        """The sampler has no more indices."""
        return self.done()

    def done(self) -> Effect:
        """The effect is performed: what comes next, by the plan or, once it is done, by the dispatcher."""
        while plan := self.plan:
            step, self.plan = plan[0], plan[1:]
            if type(step) is not LoaderEvent and type(step) is not _WasTold:
                return step  # type: ignore[return-value]
            self._take(step)
        return END if self.closed else self._after(self.dispatcher.next_step())

    def received(self, message: Any) -> Effect:
        """A message has come."""
        if self.closed:
            return END
        if self.resume_iteration_cnt:
            return self._acknowledged(message)
        if type(message) is not Result:
            raise DispatchError(f"{message} came in the middle of epoch {self.epoch}, where only results can")
        if type(message.data) is WorkerExhausted:
            return self._exhausted(message)
        return self._after(self.dispatcher.receive(message.idx, message.data))

    def _exhausted(self, result: Result) -> Effect:
        """A worker's dataset has ended: it gets its sentinel, unless it is persistent; the others get one more task."""
        worker = result.worker_id
        self.dispatcher.exhausted(result.idx, worker)
        leave = () if self.persistent else self._sentinel(worker)
        return self._follow(*leave, DRAW)

    def yielded(self) -> None:
        """The consumer has the batch."""
        self.lifecycle.handle(LoaderEvent.YIELD)

    def failed(self, *, again: bool = False) -> None:
        """An error goes to the consumer, raised by an effect or by what it delivered.

        again: the effect has no answer, and may be performed again.
        """
        if not (self.closed or again):
            self.plan = ()
        if self.lifecycle.allows(LoaderEvent.RAISE):
            self.lifecycle.handle(LoaderEvent.RAISE)

    # --- Nothing came -------------------------------------------------------------------------------------------------
    def nothing_came(self, evidence: Evidence) -> Effect:
        """A `Get` brought no message: check that each actor that could send one is alive. Article 4 §shutdown."""
        if self.closed:
            return END
        died = self.deaths(evidence)
        if died is not None:
            return died
        if lost := self._at_work(evidence.unsent):
            return Raise(Failure.TASK_LOST, tuple(lost))
        if evidence.timed_out:
            info = self.dispatcher.task_info.get(self.dispatcher.rcvd_idx)
            return Raise(Failure.TIMED_OUT, () if info is None else (info.worker_id,))
        if not evidence.pin_alive:
            return self._follow(NoteDeath(PIN), Raise(Failure.PIN_THREAD_DIED))
        return self.get

    def deaths(self, evidence: Evidence) -> Effect | None:
        """What follows if a worker died before it was told to leave, or while the others depended on it; else None."""
        if self.closed:
            return END
        failed = self._failed(evidence)
        if not failed:
            return None
        noted = (step for worker in failed for step in (NoteDeath(worker), *self._sentinel(worker)))
        return self._follow(*noted, Raise(Failure.WORKER_DIED, tuple(failed)))

    def _failed(self, evidence: Evidence) -> list[int]:
        """Workers that died with work to do; else those that died with the result queue's lock."""
        return self._at_work(evidence.dead) or (self.leavers(evidence.dead) if evidence.jammed else [])

    def _at_work(self, workers: Iterable[int]) -> list[int]:
        return [worker for worker in workers if self.dispatcher.workers_status[worker]]

    def leavers(self, dead: Mapping[int, int | None]) -> list[int]:
        """Dead workers with an exit code other than 0, if none of the dead had work; none after `close`."""
        if self.closed or self._at_work(dead):
            return []
        return [worker for worker, code in dead.items() if code != 0]

    # --- The shutdown -------------------------------------------------------------------------------------------------
    def close(self) -> Effect:
        """Begin the shutdown, or go on with one that was interrupted; END if there is nothing to do."""
        if self.abandoned:
            self.abandoned = False
            return self._follow(*self._tell_pin_at_last(), *self._leftovers())
        if self.closed:
            return END
        if not self.lifecycle.shut_down:  # else an exception has come between this and the next line
            self.lifecycle.handle(LoaderEvent.SHUT_DOWN)
        self.closed = True
        self.resume_iteration_cnt = 0
        return self._follow(*self._stages(), *self._leftovers())

    def interrupted(self) -> None:
        """An error or a signal interrupted the shutdown; unless it is over, the next `close` goes on with leftovers."""
        if self.closed:
            self.plan, self.abandoned = (), not self.ended

    def _stages(self) -> Plan:
        """Stop the pin thread while the result queue is still whole, then tell the workers to leave, and join them."""
        pin = (*self._stop_pin(), LoaderEvent.PIN_STOPPED)
        return (*pin, *self._signal(), LoaderEvent.SIGNALLED, *self._join(), LoaderEvent.JOINED)

    def _stop_pin(self) -> Plan:
        """Set the thread's done event, wake it with a sentinel, join it for longer than its own timeout.

        The sentinel may not arrive: a worker may have died with the queue's lock. The thread then looks at its done
        event after its timeout. The join is bounded because the user's own pin_memory() may take any time.
        """
        if not self.pin:
            return ()
        return (*self._tell_pin(), Simple.WAKE_PIN, JoinPin(2 * MP_STATUS_CHECK_INTERVAL), Simple.CLOSE_RESULT_QUEUE)

    def _tell_pin(self) -> Plan:
        return Simple.SET_PIN_DONE, _WasTold(PIN)

    def _tell_pin_at_last(self) -> Plan:
        """Tell the pin thread to end, if the shutdown was interrupted before that."""
        return self._tell_pin() if self.pin and not self.pin_told else ()

    def _signal(self) -> Plan:
        """Set the done event, then send the sentinels."""
        if not self.told:
            return ()
        tell = (step for worker in range(len(self.told)) for step in self._sentinel(worker, again=self.persistent))
        return (Simple.SET_WORKERS_DONE, *tell)

    def _join(self) -> Plan:
        return JoinWorkers(MP_STATUS_CHECK_INTERVAL), Simple.CLOSE_INDEX_QUEUES

    def _leftovers(self) -> Plan:
        """Terminate, and finally kill, the workers that did not leave.

        The pids are forgotten after the joins, which end with the error if SIGCHLD has told that a worker was killed.
        """
        return (
            Simple.FORGET_WORKERS,
            Terminate(kill=False, timeout=MP_STATUS_CHECK_INTERVAL),
            Terminate(kill=True, timeout=MP_STATUS_CHECK_INTERVAL),
            LoaderEvent.TERMINATED,
            END,
        )

    def _sentinel(self, worker: int, *, again: bool = False) -> Plan:
        return () if self.told[worker] and not again else (PutSentinel(worker), _WasTold(worker))

    # --- Plans --------------------------------------------------------------------------------------------------------
    def _follow(self, *steps: Effect | LoaderEvent | _WasTold) -> Effect:
        self.plan = steps
        return self.done()

    def _take(self, step: LoaderEvent | _WasTold) -> None:
        """Take a step that is the driver's own."""
        if isinstance(step, LoaderEvent):
            self.lifecycle.handle(step)
        elif step.who == PIN:
            self.pin_told = True
        else:
            self.told[step.who] = True
            self.dispatcher.worker_unavailable(step.who)

    # --- A state put aside --------------------------------------------------------------------------------------------
    def freeze(self) -> Frozen:
        """The state as a tuple, which is hashable if the indices and the data are; `thaw` restores it.

        It leaves out the constructor's other arguments, and whether there is a pin thread.
        """
        return (
            self.lifecycle.state, self.dispatcher.freeze(), self.epoch, self.resume_iteration_cnt, self.plan,
            tuple(self.told), self.pin_told, self.closed, self.abandoned,
        )  # fmt: skip

    def thaw(self, frozen: Frozen) -> None:
        """Continue from a state that `freeze` returned."""
        (
            self.lifecycle.state, dispatcher, self.epoch, self.resume_iteration_cnt, self.plan, told,
            self.pin_told, self.closed, self.abandoned,
        ) = frozen  # fmt: skip
        self.dispatcher.thaw(dispatcher)
        self.told = list(told)
