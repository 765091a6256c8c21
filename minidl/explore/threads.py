"""The model of a loader whose workers are threads of its process, beside `loader.threads`.

The same classes decide. What differs: a message is there as soon as it is put, so there are no feeder threads, no pipes
and no lock that a dead process could hold. No worker is killed, and the loader does not die before its workers. What a
thread may do: end by an exception, stay in a sample forever, or until the loader is closed. Then the shutdown tells all
that are left to leave, joins them once more, and leaves behind those that are in a sample, with a warning. Such a
worker has to leave once its sample is there. Python's exit closes the loader first, and then ends the threads.
"""

from __future__ import annotations

from typing import Any, ClassVar

from minidl.check.joint_rules import Act, Fact
from minidl.explore import world as at
from minidl.explore.configurations import Configuration, Crash
from minidl.explore.decisions import Driving
from minidl.explore.guards import Protocol, ThreadProtocol
from minidl.explore.loader import PHASES
from minidl.explore.model import Model
from minidl.explore.steps import FAILED, MAIN, Step
from minidl.explore.world import State, World
from minidl.loader import driver as do
from minidl.loader.driver import Effect, Simple
from minidl.loader.protocol import LoaderState, PinState, WorkerEvent, WorkerState
from minidl.tracefile import events as ev
from minidl.tracefile.events import DoneEvent, Outcome, QueueId

IN_A_SAMPLE = (at.STUCK, at.SLEEPS)


class ThreadModel(Model):
    """One configuration with worker threads. Each step is there by itself: `reduced` has nothing to merge."""

    phases: ClassVar[dict[Any, str]] = {**PHASES, do.Terminate: at.JOIN_LEFT}
    of_workers: ClassVar = (Crash.WORKER_DIES, Crash.WORKER_STUCK, Crash.WORKER_SLEEPS)
    protocol: ThreadProtocol

    def __init__(
        self, configuration: Configuration, protocol: Protocol, *, reduced: bool = False, driving: Driving | None = None
    ) -> None:
        super().__init__(configuration, protocol, driving=driving)
        self._warned = False

    # --- Queues between threads ---------------------------------------------------------------------------------------
    def _put_index(self, w: World, worker: int, message: int) -> None:
        if w.crew[worker].place not in (at.GONE, at.DYING):
            w.queue(worker, (*w.index[worker], message))

    def _hand_over(self, w: World, number: int) -> None:
        """What the worker has put is in the result queue."""
        w.results = (*w.results, *w.crew[number].out)
        w.worker(number, out=())

    def _set_flag(self, w: World, effect: Simple) -> None:
        super()._set_flag(w, effect)
        if effect is Simple.WAKE_PIN:
            w.wake, w.results = False, (*w.results, at.result(at.WAKE, 0, 0))

    def _say_read(self, thread: tuple[int, int], kind: int, task: int, worker: int) -> None:
        """Nothing is read or rebuilt."""

    def _index_feeder(self, state: State, number: int, out: list[Step]) -> None:
        """There is none."""

    def _result_feeder(self, state: State, number: int, out: list[Step]) -> None:
        """There is none."""

    # --- A worker -----------------------------------------------------------------------------------------------------
    def _worker(self, state: State, number: int, out: list[Step]) -> None:
        w, who = World(state), f"worker {number}"
        worker = w.crew[number]
        if worker.place == at.FETCHING:
            self._fetching(state, number, out)
        elif worker.place == at.LEFT:
            self._thread_ends(w, number, 0)
            self._took(out, w, who, "ends")
        elif worker.place == at.DYING:
            self._hand_over(w, number)
            self._thread_ends(w, number, worker.code)
            self._took(out, w, who, "ends")
        elif worker.place == at.SLEEPS and w.phase == at.CLOSED and w.frozen is None:
            w.worker(number, place=at.FETCHING)
            self._took(out, w, who, "has its sample at last", worker.task)
        elif worker.place == at.RUNNING and (queue := w.index[number]):
            self._take(w, number, queue)
            self._hand_over(w, number)
            self._took(out, w, who, f"takes {at.named(queue[0])}")

    def _fetching(self, state: State, number: int, out: list[Step]) -> None:
        """It has its batch; or, if the loader ends, it stops before its next sample."""
        w = World(state)
        self._fetched(w, number)
        self._hand_over(w, number)
        self._took(out, w, f"worker {number}", "has fetched", state[at.CREW][number].task)
        if state[at.DONE]:
            w = World(state)
            self._decide(w, number, WorkerEvent.INTERRUPTED)
            self._took(out, w, f"worker {number}", "stops before its next sample")

    def _thread_ends(self, w: World, number: int, code: int) -> None:
        w.end(number, code, 0)
        w.queue(number, ())

    def _worker_crashes(self, state: State, number: int, kind: Crash, out: list[Step]) -> None:
        """It stays in its sample; or an exception ends it, of which it may be able to tell the loader."""
        w = World(state)
        if w.crew[number].place != at.FETCHING:
            return
        w.crashed, task, who = True, w.crew[number].task, f"worker {number}"
        if kind is not Crash.WORKER_DIES:
            stuck = kind is Crash.WORKER_STUCK
            w.worker(number, place=at.STUCK if stuck else at.SLEEPS)
            self._took(out, w, who, "is stuck in its dataset" if stuck else "is in a long sample", task)
            return
        for words, told in (("dies", (at.result(at.FAILED, task, number),)), ("dies without a word", ())):
            self.say((number, 0), ev.FETCH[1], task, number, Outcome.ERROR)
            w.worker(number, place=at.DYING, code=FAILED, out=told)
            self._took(out, w, who, words, task)

    # --- The loader hears of it ---------------------------------------------------------------------------------------
    def _decide_about(self, w: World, message: int) -> Effect | None:
        """Of an exception that has ended a worker: as `_explain` of the live iterator."""
        kind, task, worker = at.parts(message)
        if kind == at.FAILED:
            pin_alive = w.pin is None or w.pin.life is not PinState.ENDED
            effect = self._ask(w, "deaths", (w.dead, pin_alive, False, False))
            if effect is not None or w.fault:
                return effect
            message = at.result(at.DATA, task, worker)
        return super()._decide_about(w, message)

    # --- The shutdown -------------------------------------------------------------------------------------------------
    def _begin_join(self, w: World, effect: Effect) -> None:
        super()._begin_join(w, effect)
        if isinstance(effect, do.Terminate) and self.protocol.told_at_last:
            self._tell_those_left(w)

    def _tell_those_left(self, w: World) -> None:
        """Nothing is torn between threads, so the pin thread may still run."""
        self._do(w, Act.SET_WORKERS_DONE, -1, Fact.PIN_JOINED)
        self.say(MAIN, ev.DONE_EVENT_SET, -1, -1, DoneEvent.WORKERS)
        w.done = True
        for number, worker in enumerate(w.crew):
            if worker.place not in (at.GONE, at.DYING) and not w.decisions.told[number]:
                self._place()
                self._do(w, Act.SEND_SENTINEL, number, Fact.PIN_JOINED)
                self.say(MAIN, ev.SENTINEL_PUT, -1, number, QueueId.INDEX)
                self._put_index(w, number, at.SENTINEL)

    def _terminate(self, w: World, effect: do.Terminate) -> None:
        self._warned = effect.kill

    def _judge_left(self, w: World) -> None:
        """A worker may be left in a sample, if it was told to leave and there is a warning."""
        self._do(w, Act.CLOSE, -1, Fact.KILLED)
        for number, worker in enumerate(w.crew):
            told = worker.life is WorkerState.ENDED or (w.done and at.SENTINEL in w.index[number])
            if worker.place in (at.GONE, at.DYING):
                continue
            if worker.place not in IN_A_SAMPLE and not self.configuration.slow:
                w.fault = f"the shutdown leaves worker {number} behind, which is not in a sample"
            elif not told:
                w.fault = f"the shutdown leaves worker {number} behind, which was not told to leave"
            elif not self._warned:
                w.fault = f"the shutdown leaves worker {number} behind without a warning"

    # --- How Python exits ---------------------------------------------------------------------------------------------
    def _exit(self, state: State, out: list[Step]) -> None:
        """The program ends, once a worker that was left in a long sample has left."""
        w = World(state)
        stays = w.phase == at.CLOSED and any(worker.place not in (at.GONE, at.STUCK) for worker in w.crew)
        if w.frozen is not None:
            self._python_ends(w, out)
        elif not (stays and w.crashed):
            w.phase = at.JOIN_CHILDREN
            self._took(out, w, "loader", "exits")

    def _join_children(self, state: State, out: list[Step]) -> None:
        """Python joins threads that are no daemons, and then calls what closes the loader."""
        w = World(state)
        if not (self.protocol.daemon or w.all_gone):
            return
        w.frozen = -1
        if w.decisions.life is LoaderState.CLOSED:
            self._python_ends(w, out)
            return
        if self.protocol.closed_at_exit:
            self._perform(w, self._shut_down(w))
        elif any(worker.place not in (at.GONE, *IN_A_SAMPLE) for worker in w.crew):
            w.fault = "Python ends daemon threads that could have left: one that is in C++ may end the process"
        else:
            self._python_ends(w, out)
            return
        self._took(out, w, "loader", "closes at Python's exit")

    def _python_ends(self, w: World, out: list[Step]) -> None:
        """The process ends, and all of its threads."""
        for number in range(self.configuration.workers):
            self._thread_ends(w, number, w.crew[number].code)
        w.phase, w.results, w.ready = at.ENDED, (), ()
        self._took(out, w, "loader", "ends")


def model_of(
    configuration: Configuration, protocol: Protocol, *, reduced: bool = False, driving: Driving | None = None
) -> Model:
    """The model of a configuration with processes, or with threads."""
    kind = ThreadModel if configuration.threads else Model
    return kind(configuration, protocol, reduced=reduced, driving=driving)
