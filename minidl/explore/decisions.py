"""The live loader's own classes, asked for what they would do in a given state: nothing is decided here.

`Driving` drives a `minidl.loader.driver.Driver`, `worker_decides` and `pin_moved` the lifecycles of
`minidl.loader.protocol`. A state is taken up by `thaw`, one input is given, the state after it is put aside by
`freeze`. Answers are remembered, because a model asks the same thing a thousand times. The dispatcher is the traced
one, so that decisions tell their events.
"""

from __future__ import annotations

import functools
from typing import Any

from minidl.explore import world as at
from minidl.explore.ablated import ABLATED, ablated
from minidl.explore.configurations import Configuration
from minidl.explore.guards import Protocol
from minidl.loader.dispatcher import NOT_FETCHED, DispatchError, Frozen
from minidl.loader.driver import Driver, Effect, Evidence
from minidl.loader.protocol import (
    Action,
    LoaderEvent,
    LoaderLifecycle,
    LoaderState,
    PinEvent,
    PinLifecycle,
    PinState,
    ProtocolError,
    WorkerEvent,
    WorkerLifecycle,
    WorkerState,
)
from minidl.record.decisions import TracedDispatcher
from minidl.wire.messages import Result, ResumeIteration, WorkerExhausted

Told = tuple[tuple[Any, ...], ...]
"""What was decided, in order: arguments of `emit`, or (event of the loader's lifecycle, state before it)."""


class Decided:
    """A driver's state and the effect that it waits for. Each exists once, so it is compared and hashed by identity."""

    def __init__(self, frozen: Frozen, effect: Effect | None) -> None:
        self.frozen, self.effect = frozen, effect
        (
            self.life, dispatcher, self.epoch, self.resume_iteration_cnt, _, self.told, _, self.closed, self.abandoned,
        ) = frozen  # fmt: skip
        self.rcvd_idx: int = dispatcher[1]
        unfetched = sum(data is NOT_FETCHED for _, _, _, data in dispatcher[2])
        self.miscounted = dispatcher[3] != unfetched + len(dispatcher[7])
        """Whether tasks_outstanding is not the number of tasks that were sent and not answered."""
        self.workers_status: tuple[bool, ...] = dispatcher[4]
        wanted = (worker for idx, worker, *_ in dispatcher[2] if idx == self.rcvd_idx)
        worker = next(wanted, -1)
        self.wanted = (self.rcvd_idx if worker >= 0 else -1, worker)
        """Task and worker that the loader waits for, (-1, -1) if there is none."""

    def __repr__(self) -> str:
        return f"<decided: {self.life.name}, epoch {self.epoch}, rcvd_idx {self.rcvd_idx}, then {self.effect}>"


decided = functools.cache(Decided)


class _Listener:
    """Stands in for TracedPorts: keeps what the traced classes emit."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def emit(self, *event: int) -> None:
        self.told.append(event)


class _ToldLifecycle(LoaderLifecycle):
    """The loader's lifecycle; a listener keeps its events."""

    def __init__(self, listener: _Listener) -> None:
        super().__init__()
        self.listener = listener

    def handle(self, event: LoaderEvent) -> LoaderState:
        before = self.state
        after = super().handle(event)
        self.listener.told.append((event, before))
        return after


class Driving:
    """Answers for one configuration under one protocol. dispatcher, driver: the classes that give them."""

    def __init__(
        self, c: Configuration, protocol: Protocol, *, dispatcher: type[TracedDispatcher] = TracedDispatcher,
        driver: type[Driver] = Driver,
    ) -> None:  # fmt: skip
        self._listener = _Listener()
        decides = dispatcher(self._listener, c.workers, c.prefetch, c.in_order)  # type: ignore[arg-type]
        lifecycle = _ToldLifecycle(self._listener)
        timeout = 1 if c.timeout else 0
        kind = ablated([guard for guard in ABLATED if not getattr(protocol, guard)], driver)
        self._driver = kind(decides, lifecycle, persistent=c.persistent, timeout=timeout)
        lifecycle.handle(LoaderEvent.START)
        for _ in range(c.workers):
            self._driver.worker_started()
        if c.pin:
            self._driver.pin_started()
        self.new = decided(self._driver.freeze(), None)
        self._known: dict[Any, tuple[Decided, Effect | None, Told]] = {}

    def ask(self, state: Decided, call: str, argument: Any = None) -> tuple[Decided, Effect | None, Told]:
        """Give the driver an input; the state after it, the effect, and what was told. Raises as the driver does.

        argument: of `received` a message as `world` has it, of `nothing_came` and `deaths` the fields of an Evidence,
        of `failed` whether the effect could be performed again.
        """
        question = (state, call, argument)
        known = self._known.get(question)
        if known is None:
            known = self._known[question] = self._asked(state, call, argument)
        return known

    def _asked(self, state: Decided, call: str, argument: Any) -> tuple[Decided, Effect | None, Told]:
        self._driver.thaw(state.frozen)
        self._listener.told = []
        ask = getattr(self._driver, call)
        effect: Effect | None
        if call == "received":
            effect = ask(_message(argument))
        elif call in ("nothing_came", "deaths"):
            dead, *others = argument
            effect = ask(Evidence(dict(dead), *others))
        elif call == "failed":
            effect = ask(again=bool(argument))
        else:
            effect = ask(None) if call == "drawn" else ask()
        return decided(self._driver.freeze(), None), effect, tuple(self._listener.told)


def _message(message: int) -> Any:
    """The live message for one of the model's."""
    kind, task, worker = at.parts(message)
    if kind == at.ACK:
        return ResumeIteration(task, worker)
    return Result(task, worker, WorkerExhausted(worker) if kind == at.EXHAUSTED else None)


FORBIDDEN = (DispatchError, ProtocolError)
"""What the live classes raise if a run breaks their rules."""


@functools.cache
def worker_decides(state: WorkerState, event: WorkerEvent) -> tuple[WorkerState, Action]:
    """A worker's next state and what it does; raises ProtocolError."""
    life = WorkerLifecycle(0)
    life.state = state
    action = life.decide(event)
    return life.state, action


@functools.cache
def pin_moved(state: PinState, *events: PinEvent) -> PinState:
    """The pin thread's state after these events; raises ProtocolError."""
    life = PinLifecycle()
    life.state = state
    for event in events:
        life.handle(event)
    return life.state
