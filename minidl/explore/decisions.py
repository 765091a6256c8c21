"""The live loader's own classes, asked for what they would do in a given state: nothing is decided here.

`Dispatching` drives a `minidl.dispatcher.Dispatcher`, `moved` and the like the lifecycles of `minidl.protocol`. They
are built anew for a question, from a state that is a plain tuple, and the answer is remembered: a model asks the same
thing a thousand times. The traced subclass is used, so that each decision also tells its events.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from minidl.dispatcher import Dispatcher, DispatchError, TaskInfo
from minidl.protocol import (
    Action,
    LoaderEvent,
    LoaderLifecycle,
    LoaderState,
    PinEvent,
    PinLifecycle,
    PinState,
    WorkerEvent,
    WorkerLifecycle,
    WorkerState,
)
from minidl.tracing.instrument import TracedDispatcher

Frozen = tuple[Any, ...]
"""A dispatcher's state."""

Told = tuple[tuple[int, ...], ...]
"""Events: each what the traced dispatcher gives `emit`."""


class _Turns(Iterator[int]):
    """`itertools.cycle(range(count))` that knows where it is."""

    def __init__(self, count: int, at: int) -> None:
        self.count, self.at = count, at

    def __next__(self) -> int:
        at, self.at = self.at, (self.at + 1) % self.count
        return at


class _Ear:
    """Stands in for TracedPorts: hears what the traced dispatcher tells."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, ...]] = []

    def emit(self, *event: int) -> None:
        self.heard.append(event)


class Dispatching:
    """Answers for one configuration. `ask(state, call, ...)` gives the state after it, the answer and the events."""

    def __init__(self, workers: int, prefetch: int, in_order: bool) -> None:
        self._make = functools.partial(TracedDispatcher, workers, prefetch, in_order)
        self.new = self._freeze(self._made())
        self.capacity = self._made().capacity
        self._known: dict[Any, tuple[Frozen, Any, Told]] = {}

    def ask(self, state: Frozen, call: str, *arguments: Any) -> tuple[Frozen, Any, Told]:
        """Call the dispatcher's method `call`; where it raises DispatchError, that is the answer."""
        question = (state, call, arguments)
        known = self._known.get(question)
        if known is None:
            known = self._known[question] = self._asked(state, call, arguments)
        return known

    def _asked(self, state: Frozen, call: str, arguments: tuple[Any, ...]) -> tuple[Frozen, Any, Told]:
        dispatcher = self._thaw(state)
        ear = dispatcher.ports = _Ear()  # type: ignore[assignment]
        try:
            answer = getattr(dispatcher, call)(*arguments)
        except DispatchError as error:
            return self._freeze(dispatcher), error, tuple(ear.heard)
        return self._freeze(dispatcher), answer, tuple(ear.heard)

    def _made(self) -> TracedDispatcher:
        dispatcher = self._make()
        dispatcher._cycle = _Turns(dispatcher.num_workers, 0)  # type: ignore[assignment]
        return dispatcher

    @staticmethod
    def _freeze(dispatcher: Dispatcher) -> Frozen:
        tasks = tuple((idx, info.worker_id, info.fetched) for idx, info in dispatcher.task_info.items())
        return (
            dispatcher.send_idx, dispatcher.rcvd_idx, tasks, dispatcher.tasks_outstanding,
            tuple(dispatcher.workers_status), tuple(dispatcher.workers_num_tasks),
            dispatcher._cycle.at, tuple(sorted(dispatcher._given_up)),  # type: ignore[attr-defined]
        )  # fmt: skip

    def _thaw(self, state: Frozen) -> TracedDispatcher:
        dispatcher = self._made()
        (
            dispatcher.send_idx, dispatcher.rcvd_idx, tasks, dispatcher.tasks_outstanding, status, counts, at, given_up,
        ) = state  # fmt: skip
        for idx, worker_id, fetched in tasks:
            info = dispatcher.task_info[idx] = TaskInfo(worker_id, None)
            if fetched:
                info.data = None
        dispatcher.workers_status, dispatcher.workers_num_tasks = list(status), list(counts)
        dispatcher._cycle.at = at  # type: ignore[attr-defined]
        dispatcher._given_up = set(given_up)
        return dispatcher


STATUS = 4
"""Where a frozen dispatcher keeps `workers_status`."""


@functools.cache
def loader_moved(state: LoaderState, event: LoaderEvent) -> LoaderState:
    """The loader's next state; raises ProtocolError."""
    life = LoaderLifecycle()
    life.state = state
    return life.handle(event)


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
