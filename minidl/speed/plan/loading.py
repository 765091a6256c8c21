"""A loader on a simulated machine: its own decisions, with recorded costs in place of work.

Interface: `Costs` is what each batch costs; `load(costs, setting, order)` -> `Loaded`, when each batch was yielded, and
what the actors did meanwhile.

Rules of use: `loader.driver.Driver` and `loader.dispatcher.Dispatcher` decide, as in the live loader. Here is what they
ask for: the loader's thread with the training loop, the workers, their feeder threads, the pin thread. A subclass of
`Loading` hears each step (`say`). Times are in ns.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from minidl.loader.dispatcher import Assignment, Deliver, Dispatcher
from minidl.loader.driver import DRAW, END, READY, Driver, Effect, Get
from minidl.loader.protocol import LoaderEvent, LoaderLifecycle
from minidl.speed.plan.machine import Actor, Hold, Mailbox, Serial, SimulatedMachine, Work
from minidl.speed.plan.settings import LoaderSetting
from minidl.tracefile.arrays import Floats, Ints
from minidl.wire.messages import Result

Doing = Generator[Any, Any, Any]
"""A part of an actor."""

LEAVE: Final = None
"""The message that ends an actor."""


@dataclass(frozen=True)
class Costs:
    """What the steps of a loader cost. Lists have an item for each recorded batch, in the order of tasks.

    draw: of the sampler, ns. fetch: in the worker, with all that its thread does for a batch; exclusive: ns of its
    waiting for what only one worker can use at a time. send: pickling and writing, by a feeder thread if `feeder`.
    read: receiving and rebuilding; pin: copying into page-locked memory. step: of the training loop, an item for each
    yielded batch. alone: fetching without workers. sizes: bytes. own: CPU time of the loader's thread for each batch.
    start: CPU time of the loader to start a worker, and what the worker does before its first batch. hops: waits
    between putting a task and the worker's work on it, between a result and its feeder's work, between writing and
    reading it.
    """

    draw: Sequence[float]
    fetch: Sequence[Work]
    send: Sequence[Work]
    read: Sequence[Work]
    pin: Sequence[Work]
    step: Sequence[Work]
    alone: Sequence[Work]
    sizes: Sequence[int]
    exclusive: float = 0.0
    own: float = 0.0
    start: tuple[float, Work] = (0.0, Work(0.0))
    hops: tuple[float, float, float] = (0.0, 0.0, 0.0)
    feeder: bool = True


@dataclass
class Loaded:
    """What became of it.

    yields: ns of each batch; waits: ns that the loop waited for each; peak: most batches, and bytes, that were made and
    not yielded; used: CPUs in use on average; starved: ns that the loader's thread waited for results, and blocked,
    those of them in which later batches were there; idle: ns that the workers waited for tasks; queued: for their turn.
    """

    yields: Floats = field(default_factory=lambda: np.zeros(0))
    waits: Floats = field(default_factory=lambda: np.zeros(0))
    peak_batches: int = 0
    peak_bytes: int = 0
    used: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0
    idle: float = 0.0
    queued: float = 0.0


class Loading:
    """One epoch of a loader in the making. order: which recorded batch each task repeats."""

    def __init__(self, costs: Costs, setting: LoaderSetting, order: Ints, others: float = 0.0) -> None:
        self.costs, self.setting, self.order = costs, setting, order.tolist()
        self.machine = SimulatedMachine(setting.cpus, others)
        self.results, self.ready = Mailbox(), Mailbox()
        self.tasks = [Mailbox() for _ in range(setting.num_workers)]
        self.feeds = [Mailbox() for _ in range(setting.num_workers)]
        self.shared = Serial()
        self.found = Loaded()
        self.drawn = 0
        self.there = self.there_bytes = 0  # batches that are made and not yielded
        self.yields: list[float] = []
        self.waits: list[float] = []
        self.lifecycle, self.dispatcher = self._deciders()

    def _deciders(self) -> tuple[LoaderLifecycle, Dispatcher]:
        setting = self.setting
        return LoaderLifecycle(), Dispatcher(max(1, setting.num_workers), setting.prefetch_factor, setting.in_order)

    def say(self, who: str, code: tuple[str, ...] | int, task: int = -1, worker: int = -1, *xyz: int) -> None:
        """Hear of a step that begins or ends now; this class keeps nothing."""

    def run(self) -> Loaded:
        """Run the epoch."""
        self.machine.run(self._with_workers() if self.setting.num_workers else self._alone())
        found = self.found
        found.yields, found.waits = np.array(self.yields), np.array(self.waits)
        found.used = self.machine.used / max(1.0, self.machine.now)
        return found

    # --- The loader's thread ------------------------------------------------------------------------------------------
    def _alone(self) -> Actor:
        """The loop that fetches by itself."""
        costs, machine = self.costs, self.machine
        for place, batch in enumerate(self.order):
            asked = machine.now
            yield Work(costs.draw[batch])
            yield costs.alone[batch]
            yield from self._hold()
            self._made(batch)
            self._yielded(batch, asked)
            yield costs.step[place % len(costs.step)]

    def _with_workers(self) -> Actor:
        """The loop, and the loader that it asks for batches."""
        driver = Driver(self.dispatcher, self.lifecycle, persistent=True)
        self.lifecycle.handle(LoaderEvent.START)
        yield from self._start(driver)
        yield from self._perform(driver, driver.begin())
        while True:
            asked = self.machine.now
            yield Work(self.costs.own)
            effect = yield from self._perform(driver, driver.next())
            if effect is END:
                break
            place = len(self.yields)
            driver.yielded()
            self._yielded(self.order[effect.idx], asked)
            yield self.costs.step[place % len(self.costs.step)]

    def _start(self, driver: Driver) -> Doing:
        for worker in range(self.setting.num_workers):
            yield Work(self.costs.start[0])
            driver.worker_started()
            self.machine.start(self._worker(worker))
            if self.costs.feeder:
                self.machine.start(self._feeder(worker))
        if self.setting.pin:
            driver.pin_started()
            self.machine.start(self._pin_thread())

    def _perform(self, driver: Driver, effect: Effect) -> Doing:
        """Perform each effect and answer it, up to the next one that is for the loop."""
        while True:
            if effect is DRAW:
                effect = yield from self._draw(driver)
            elif type(effect) is Assignment:
                self.machine.send(self.tasks[effect.worker_id], effect.idx, self.costs.hops[0])
                effect = driver.done()
            elif type(effect) is Get:
                effect = driver.received((yield from self._get()))
            elif type(effect) is Deliver or effect is END or effect is READY:
                return effect
            else:
                raise RuntimeError(f"the simulation cannot perform {effect}: a bug in minidl, please report it")

    def _draw(self, driver: Driver) -> Doing:
        if self.drawn == len(self.order):
            return driver.sampler_ended()
        yield Work(self.costs.draw[self.order[self.drawn]])
        self.drawn += 1
        return driver.drawn(self.drawn - 1)

    def _get(self) -> Doing:
        """Receive a result."""
        asked, kept = self.machine.now, self.dispatcher.reorder_depth
        result = yield self.ready if self.setting.pin else self.results
        if self.yields:
            self.found.starved += self.machine.now - asked
            self.found.blocked += (self.machine.now - asked) * (kept > 0)
        if not self.setting.pin:
            yield self.costs.read[self.order[result.idx]]
        return result

    def _yielded(self, batch: int, asked: float) -> None:
        now = self.machine.now
        self.yields.append(now)
        self.waits.append(now - asked)
        self.there -= 1
        self.there_bytes -= self.costs.sizes[batch]

    # --- Workers and threads ------------------------------------------------------------------------------------------
    def _worker(self, number: int) -> Actor:
        costs, machine = self.costs, self.machine
        yield costs.start[1]
        while True:
            waits = machine.now
            task = yield self.tasks[number]
            self.found.idle += machine.now - waits if self.yields else 0.0
            batch = self.order[task]
            yield costs.fetch[batch]
            yield from self._hold()
            self._made(batch)
            if costs.feeder:
                machine.send(self.feeds[number], task, costs.hops[1])
            else:
                yield from self._send(number, task)

    def _hold(self) -> Doing:
        if self.costs.exclusive:
            asked = self.machine.now
            yield Hold(self.shared, self.costs.exclusive)
            self.found.queued += self.machine.now - asked - self.costs.exclusive

    def _made(self, batch: int) -> None:
        self.there += 1
        self.there_bytes += self.costs.sizes[batch]
        self.found.peak_batches = max(self.found.peak_batches, self.there)
        self.found.peak_bytes = max(self.found.peak_bytes, self.there_bytes)

    def _feeder(self, number: int) -> Actor:
        while True:
            task = yield self.feeds[number]
            yield from self._send(number, task)

    def _send(self, number: int, task: int) -> Doing:
        yield self.costs.send[self.order[task]]
        self.machine.send(self.results, Result(task, number, task), self.costs.hops[2])

    def _pin_thread(self) -> Actor:
        while True:
            result = yield self.results
            batch = self.order[result.idx]
            yield self.costs.read[batch]
            yield self.costs.pin[batch]
            self.machine.send(self.ready, result, self.costs.hops[2] / 2)


def load(costs: Costs, setting: LoaderSetting, order: Ints, others: float = 0.0) -> Loaded:
    """Simulate one epoch. order: which recorded batch each task repeats; others: threads of other programs."""
    return Loading(costs, setting, order, others).run()


def steady(yields: Floats, capacity: int) -> tuple[int, float]:
    """Batches, and the ns that they took, without the beginning: the first ones, which workers made beforehand."""
    skipped = min(capacity, len(yields) // 4)
    return len(yields) - 1 - skipped, float(yields[-1] - yields[skipped])
