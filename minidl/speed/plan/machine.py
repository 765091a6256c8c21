"""A simulated machine: a clock, CPUs that are shared among all that can run, and mailboxes between actors.

Interface: an actor is a generator. It yields a `Work`, which needs a CPU for some time and then waits without one, or a
`Mailbox`, which gives it the next message. `SimulatedMachine.run` runs all actors until one of them has ended.

Rules of use: CPUs are shared equally (processor sharing). As long as no more actors compute than there are CPUs, each
has one. `others` counts the threads of other programs that compute all the time. `held` is the share of their CPU time
for which actors hold one lock that all of them need, as an interpreter's: no more than 1 / held of them run at a time.
What only one actor can use at a time (a disk) is a mailbox with one message, which each of them takes and sends back.
Times are in ns.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What an actor does: it computes for `cpu` ns of CPU time, then waits for `wait` ns."""

    cpu: float
    wait: float = 0.0


class Mailbox:
    """Messages in the order in which they arrive, to actors in the order in which they ask."""

    __slots__ = ("messages", "readers")

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()
        self.readers: deque[Actor] = deque()


Actor = Generator[Work | Mailbox, Any, Any]
"""What runs on the machine, or a part of it."""


class SimulatedMachine:
    """A clock and `cpus` CPUs, a part of which may be a fraction. now: ns; used: ns of CPU time so far."""

    def __init__(self, cpus: float, others: float = 0.0, held: float = 0.0) -> None:
        self.cpus, self.others, self.held = cpus, others, held
        self.now = self.used = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # when, order, what happens then
        self._computing: list[tuple[float, int, Actor, float]] = []  # share at which it is done, order, who, its wait
        self._share = 0.0  # CPU time that an actor has had which has always computed
        self._order = 0

    def start(self, actor: Actor) -> None:
        """Let the actor begin now."""
        self._at(self.now, partial(self._resume, actor, None))

    def send(self, mailbox: Mailbox, message: Any, after: float = 0.0) -> None:
        """Put a message into a mailbox, where it arrives `after` ns."""
        if after:
            self._at(self.now + after, partial(self._arrive, mailbox, message))
        else:
            self._arrive(mailbox, message)

    def run(self, until: Actor) -> None:
        """Run until this actor, which is started first, has ended. Raises RuntimeError if all wait for each other."""
        self._last: Actor | None = until
        self.start(until)
        while self._last is not None:
            done = self._next_done()
            if self._timers and self._timers[0][0] <= done:
                when, _, action = heapq.heappop(self._timers)
                self._pass(when)
                action()
            elif self._computing:
                self._pass(done)
                share, _, actor, wait = heapq.heappop(self._computing)
                self._share = max(self._share, share)
                if wait:
                    self._at(self.now + wait, partial(self._resume, actor, None))
                else:
                    self._resume(actor, None)
            else:
                raise RuntimeError(
                    "all actors of the simulation wait for each other: a bug in minidl, please report it"
                )

    # --- Time ---------------------------------------------------------------------------------------------------------
    def _rate(self) -> float:
        """The share of a CPU that each actor has which computes."""
        count = len(self._computing)
        running = min(count, 1 / self.held) if self.held else count
        return min(1.0, self.cpus / (running + self.others)) * running / count

    def _next_done(self) -> float:
        if not self._computing:
            return float("inf")
        return self.now + max(0.0, self._computing[0][0] - self._share) / self._rate()

    def _pass(self, until: float) -> None:
        if self._computing:
            share = (until - self.now) * self._rate()
            self._share += share
            self.used += share * len(self._computing)
        self.now = until

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, action))

    # --- Actors -------------------------------------------------------------------------------------------------------
    def _arrive(self, mailbox: Mailbox, message: Any) -> None:
        if mailbox.readers:
            self._at(self.now, partial(self._resume, mailbox.readers.popleft(), message))
        else:
            mailbox.messages.append(message)

    def _resume(self, actor: Actor, value: Any) -> None:
        """Let the actor go on until it computes, or waits for time or a message."""
        while True:
            try:
                asked = actor.send(value)
            except StopIteration:
                self._last = None if actor is self._last else self._last
                return
            value = None
            if type(asked) is Mailbox:
                if not asked.messages:
                    asked.readers.append(actor)
                    return
                value = asked.messages.popleft()
            elif type(asked) is Work and asked.cpu > 0:
                self._order += 1
                heapq.heappush(self._computing, (self._share + asked.cpu, self._order, actor, asked.wait))
                return
            elif type(asked) is Work and asked.wait > 0:
                self._at(self.now + asked.wait, partial(self._resume, actor, None))
                return
