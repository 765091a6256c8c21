"""The pin thread's part of the model, beside `loader.pin_memory`, with the loader's thread that writes its sentinel."""

from __future__ import annotations

from minidl.check.joint_rules import Act
from minidl.explore import world as at
from minidl.explore.configurations import Crash
from minidl.explore.decisions import pin_moved
from minidl.explore.steps import PIN_THREAD, WAKER, Acting, Step
from minidl.explore.world import Pin, State, World
from minidl.loader.protocol import PinEvent, PinState
from minidl.tracefile import events as ev
from minidl.tracefile.events import Ending, Message, Outcome


class PinThread(Acting):
    """The pin thread, if the configuration has one."""

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
        self._do(w, Act.END)
        w.pin = w.pin._replace(life=pin_moved(w.pin.life, PinEvent.DONE))
        w.ready = ()
        self.say(PIN_THREAD, ev.PIN_EXIT, -1, -1, Ending.SENTINEL)

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
