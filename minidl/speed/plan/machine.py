"""A simulated machine: a clock, CPUs that are shared among all that can run, and mailboxes between actors.

Interface: an actor is a generator. It yields a `Work`, which needs a CPU for some time and then waits without one, or a
`Mailbox`, which gives it the next message. `SimulatedMachine.run` runs all actors until one of them has ended.

Rules of use: CPUs are shared equally (processor sharing). As long as no more actors compute than there are CPUs, each
has one. `others` counts the threads of other programs that compute all the time. Times are in ns.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What an actor does: it computes for `cpu` ns of CPU time, then waits for `wait` ns."""

    cpu: float
    wait: float = 0.0


class Mailbox:
    """Messages to one actor, in the order in which they arrive."""

    __slots__ = ("messages", "reader")

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()
        self.reader: Actor | None = None


class Serial:
    """What only one actor can use at a time, in the order in which they ask for it: a disk, a lock."""

    __slots__ = ("free",)

    def __init__(self) -> None:
        self.free = 0.0


class Hold(NamedTuple):
    """Use `what` alone for `ns`, after all who asked before."""

    what: Serial
    ns: float


Actor = Generator[Work | Mailbox | Hold, Any, None]


class SimulatedMachine:
    """A clock and `cpus` CPUs, a part of which may be a fraction. now: ns; used: ns of CPU time so far."""

    def __init__(self, cpus: float, others: float = 0.0) -> None:
        self.cpus, self.others = cpus, others
        self.now = self.used = 0.0
        self._timers: list[tuple[float, int, Actor | None, Any]] = []  # when, order, who, the mailbox of a message
        self._computing: list[tuple[float, int, Actor, float]] = []  # share at which it is done, order, who, its wait
        self._share = 0.0  # CPU time that an actor has had which has always computed
        self._order = 0

    def start(self, actor: Actor) -> None:
        """Let the actor begin now."""
        self._at(self.now, actor, None)

    def send(self, mailbox: Mailbox, message: Any, after: float = 0.0) -> None:
        """Put a message into a mailbox, where it arrives `after` ns."""
        if after:
            self._at(self.now + after, None, (mailbox, message))
        else:
            self._arrive(mailbox, message)

    def run(self, until: Actor) -> None:
        """Run until this actor, which is started first, has ended. Raises RuntimeError if all wait for each other."""
        self._end, self._ended = until, False
        self.start(until)
        while not self._ended:
            done = self._next_done()
            if self._timers and self._timers[0][0] <= done:
                when, _, actor, message = heapq.heappop(self._timers)
                self._pass(when)
                if actor is None:
                    self._arrive(*message)
                else:
                    self._resume(actor, message)
            elif self._computing:
                self._pass(done)
                share, _, actor, wait = heapq.heappop(self._computing)
                self._share = max(self._share, share)
                if wait:
                    self._at(self.now + wait, actor, None)
                else:
                    self._resume(actor, None)
            else:
                raise RuntimeError(
                    "all actors of the simulation wait for each other: a bug in minidl, please report it"
                )

    # --- Time ---------------------------------------------------------------------------------------------------------
    def _rate(self) -> float:
        return min(1.0, self.cpus / (len(self._computing) + self.others))

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

    def _at(self, when: float, actor: Actor | None, message: Any) -> None:
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, actor, message))

    # --- Actors -------------------------------------------------------------------------------------------------------
    def _arrive(self, mailbox: Mailbox, message: Any) -> None:
        if mailbox.reader is None:
            mailbox.messages.append(message)
        else:
            reader, mailbox.reader = mailbox.reader, None
            self._at(self.now, reader, message)

    def _resume(self, actor: Actor, value: Any) -> None:
        """Let the actor go on until it computes, or waits for time or a message."""
        while True:
            try:
                asked = actor.send(value)
            except StopIteration:
                self._ended = self._ended or actor is self._end
                return
            value = None
            if type(asked) is Mailbox:
                if not asked.messages:
                    asked.reader = actor
                    return
                value = asked.messages.popleft()
            elif type(asked) is Hold:
                asked.what.free = max(asked.what.free, self.now) + asked.ns
                self._at(asked.what.free, actor, None)
                return
            elif type(asked) is Work and asked.cpu > 0:
                self._order += 1
                heapq.heappush(self._computing, (self._share + asked.cpu, self._order, actor, asked.wait))
                return
            elif type(asked) is Work and asked.wait > 0:
                self._at(self.now + asked.wait, actor, None)
                return
