"""The model: from a state of the whole run, every step that some actor can take next.

`Model(configuration, protocol)` has `initial` and `steps(state)`. A step is a label (who, what, an argument) and the
state after it; its parts are `loader`, `workers` and `pin_thread`.

What only one actor can see is part of the step before it: the loader puts all tasks that it may into its buffers at
once. `reduced` makes more of this: a worker fetches what it takes, a feeder thread writes at once, and each place at
which a kill could have come between is a step of its own. A wait that brings nothing and changes nothing is no step.
A Ctrl-C may come wherever `Loader._place` is called. Time is not counted; a wait may run out only if the run can't go
on otherwise: first polls, then joins, which began later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from minidl.explore import world as at
from minidl.explore.ablated import ENDLESS
from minidl.explore.configurations import Configuration, Crash
from minidl.explore.decisions import Driving
from minidl.explore.guards import Protocol
from minidl.explore.loader import Loader
from minidl.explore.pin_thread import PinThread
from minidl.explore.steps import HOW_FAR, JOIN_OVER, PIN_THREAD, POLL, Step
from minidl.explore.workers import Workers
from minidl.explore.world import CRASHED, CREW, CTRL_C, FAULT, PHASE, SIGNALLED, Pin, State, Worker, World
from minidl.loader.protocol import PinState, WorkerState
from minidl.tracefile import events as ev
from minidl.tracefile.events import Message


class Model(Loader, Workers, PinThread):
    """One configuration under one protocol."""

    of_workers: ClassVar = (Crash.WORKER_KILLED, Crash.WORKER_STUCK, Crash.WORKER_STOPPED)
    """The crashes that a worker may have."""

    def __init__(
        self, configuration: Configuration, protocol: Protocol, *, reduced: bool = False, driving: Driving | None = None
    ) -> None:
        super().__init__(configuration, protocol, reduced=reduced, driving=driving)
        self._phases: dict[str, Callable[[State, list[Step]], None]] = {
            at.NEW: self._act, at.IDLE: self._act, at.LEAVES: self._act, at.GIVEN_UP: self._given_up,
            at.GETTING: self._getting, at.RESUMING: self._getting,
            **dict.fromkeys(self.phases.values(), self._act), at.CLOSED: self._exit, at.EXITING: self._exit,
            at.JOIN_CHILDREN: self._join_children, at.JOIN_FEEDERS: self._join_feeders,
            at.FINALISING: self._finalise,
        }  # fmt: skip

    @property
    def initial(self) -> State:
        """The workers and the pin thread run, and nothing is sent yet."""
        c = self.configuration
        crew = tuple(Worker(WorkerState.WAITING, at.RUNNING, (), self._share(i), 0) for i in range(c.workers))
        pin = Pin(PinState.WAITING, at.RUNNING) if c.pin else None
        empty = ((),) * c.workers
        return (
            at.NEW, self.driving.new, 0, (), empty, empty, crew, (), at.FREE,
            False, (), pin, False, False, False, None, False, not c.crashes, c.ctrl_c, c.goes_on, False, False, "",
        )  # fmt: skip

    def over(self, state: State) -> bool:
        """Whether the run has ended: the loader's process is gone, and every worker's."""
        return state[PHASE] in at.OVER and all(worker.place == at.GONE for worker in state[CREW])

    def steps(self, state: State) -> list[Step]:
        """What the actors can do next, crashes left out; nothing in a run that is over, hangs or has broken a rule."""
        out: list[Step] = []
        if state[FAULT]:
            return out
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
        """The crashes that may happen here, if none has happened yet; and a Ctrl-C."""
        out: list[Step] = []
        if state[CTRL_C] and not state[FAULT]:
            self._ctrl_c(state, out)
        if state[CRASHED]:
            return out
        for kind in self.configuration.crashes:
            if kind is Crash.LOADER_KILLED and state[PHASE] not in at.OVER:
                self._loader_killed(state, out)
            elif kind in (Crash.PIN_DIES, Crash.PIN_STUCK) and state[PHASE] not in at.OVER:
                self._pin_crashes(state, kind, out)
            elif kind in self.of_workers:
                for number, worker in enumerate(state[CREW]):
                    if worker.place != at.GONE:
                        self._worker_crashes(state, number, kind, out)
        return out

    # --- Waits that run out -------------------------------------------------------------------------------------------
    def _polls(self, state: State, out: list[Step]) -> None:
        """No other step is enabled: actors that poll time out and check again."""
        w = World(state)
        if w.phase in at.OVER:
            return
        waits = w.pin is not None and w.pin.life is not PinState.ENDED and w.pin.place == at.RUNNING
        if waits and w.pin_told and self.protocol.pin_timeout:
            self.say(PIN_THREAD, ev.RESULT_GET[1], -1, -1, Message.EMPTY)
            self._pin_ends(w)
            self._took(out, w, "pin thread", POLL)
        elif w.phase in (at.GETTING, at.RESUMING) and self.configuration.timeout:
            self._nothing_came(w, out, timed_out=True)

    def _joins_over(self, state: State, out: list[Step]) -> None:
        """The loader waits no longer for an actor that goes on."""
        w = World(state)
        joins = w.phase == at.JOIN_PIN or (w.phase in (at.JOIN_WORKERS, at.JOIN_LEFT) and not w.all_gone)
        if joins and w.decisions.effect.timeout < ENDLESS:
            self._perform(w, w.decisions.effect)
            self._took(out, w, "loader", JOIN_OVER)

    # --- The loader's process is killed -------------------------------------------------------------------------------
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
            self._took(out, cut, "loader", f"is killed{HOW_FAR[at.HALF_WRITTEN if torn else at.WRITTEN]}")
        for number, queue in enumerate(w.index):
            if self.reduced and w.crew[number].place != at.GONE:
                for kept in range(min(len(queue), self.configuration.index_room + 1)):
                    cut = self._without_loader(w)
                    cut.queue(number, (*queue[:kept], at.TORN))
                    self._took(out, cut, "loader", f"is killed in the middle of a message to worker {number}", kept)

    def _without_loader(self, w: World) -> World:
        """A copy in which the loader is dead; what only it knew is forgotten."""
        out = World(w.freeze())
        out.crashed, out.phase, out.decisions, out.pin = True, at.KILLED, None, None
        out.drawn, out.handed, out.ready, out.wake = 0, (), (), False
        for number, queue in enumerate(w.index):
            out.queue(number, queue[: self.configuration.index_room])
            out.buffer(number, ())
        if not self.reduced and out.lock == at.LOADERS_LOCK:
            out.lock = at.DEAD_LOCK
        return out
