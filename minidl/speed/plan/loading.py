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
from minidl.loader.driver import DRAW, END, MP_STATUS_CHECK_INTERVAL, READY, Driver, Effect, Get
from minidl.loader.protocol import LoaderEvent, LoaderLifecycle
from minidl.record.made_up import pid_of
from minidl.speed.plan.machine import Actor, Hold, Mailbox, Serial, SimulatedMachine, Work
from minidl.speed.plan.settings import LoaderSetting
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Floats, Ints
from minidl.wire.messages import Result

Doing = Generator[Any, Any, Any]
"""A part of an actor."""

Thread = tuple[int, int]
"""A thread: its process, a worker's number or -1 for the loader's, and its number there, 0 = the main one."""

MAIN: Final[Thread] = (-1, 0)
PIN_THREAD: Final[Thread] = (-1, 1)

MESSAGE: Final = 300
"""Bytes of a pickled result whose tensors go by handle."""

POLL: Final = int(MP_STATUS_CHECK_INTERVAL * 1e9)


@dataclass(frozen=True)
class Costs:
    """What the steps of a loader cost. Lists have an item for each recorded batch, in the order of tasks.

    draw: of the sampler, ns. fetch: in the worker, with all that its thread does for a batch; exclusive: ns of its
    waiting for what only one worker can use at a time. send: pickling and writing, by a feeder thread if `feeder`.
    read: receiving and rebuilding; pin: copying into page-locked memory. step: of the training loop, an item for each
    yielded batch. alone: fetching without workers. sizes: bytes; samples: of a batch. own: CPU time of the loader's
    thread for each batch. start: CPU time of the loader to start a worker, and what the worker does before its first
    batch. hops: waits between putting a task and the worker's work on it, between a result and its feeder's work,
    between writing and reading it.
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
    samples: int = 1


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

    def say(self, thread: Thread, code: int, task: int = -1, worker: int = -1, *own: int) -> None:
        """Hear of an event that happens now; this class keeps none."""

    def _during(
        self, thread: Thread, span: tuple[int, int], step: Work, task: int, worker: int,
        begin: tuple[int, ...] = (), end: tuple[int, ...] = (),
    ) -> Doing:  # fmt: skip
        """Take a step as a span. end: the end's own numbers; the step's CPU time is added."""
        self.say(thread, span[0], task, worker, *begin)
        yield step
        self.say(thread, span[1], task, worker, *end, int(step.cpu))

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
        costs = self.costs
        self.say(MAIN, ev.EPOCH[0])
        yield from self._during(MAIN, ev.CONSUMER, Work(0.0), -1, -1)
        for place, batch in enumerate(self.order):
            asked = self.machine.now
            self.say(MAIN, ev.NEXT[0], place, -1, place)
            yield from self._draws()
            yield from self._during(MAIN, ev.FETCH, costs.alone[batch], place, -1, (costs.samples,), (ev.Outcome.DATA,))
            yield from self._hold()
            self._made(batch)
            yield from self._trains(place, -1, asked)
        self.say(MAIN, ev.EPOCH[1], -1, -1, 0, len(self.yields))

    def _with_workers(self) -> Actor:
        """The loop, and the loader that it asks for batches."""
        driver = Driver(self.dispatcher, self.lifecycle, persistent=True)
        self.lifecycle.handle(LoaderEvent.START)
        yield from self._start(driver)
        self.say(MAIN, ev.EPOCH[0], -1, -1, 0, self.setting.num_workers, self.setting.prefetch_factor)
        yield from self._perform(driver, driver.begin())
        yield from self._during(MAIN, ev.CONSUMER, Work(0.0), -1, -1)
        while True:
            asked = self.machine.now
            self.say(MAIN, ev.NEXT[0], self.dispatcher.rcvd_idx, -1, self.dispatcher.rcvd_idx)
            yield Work(self.costs.own)
            effect = yield from self._perform(driver, driver.next())
            if effect is END:
                break
            driver.yielded()
            yield from self._trains(effect.idx, effect.worker_id, asked)
        self.say(MAIN, ev.NEXT[1], -1, -1, len(self.yields), ev.Outcome.EXHAUSTED)
        self.say(MAIN, ev.EPOCH[1], -1, -1, 0, len(self.yields))

    def _trains(self, task: int, worker: int, asked: float) -> Doing:
        """The loop gets a batch, for which it asked at `asked`, and takes a step."""
        costs, now, count = self.costs, self.machine.now, len(self.yields) + 1
        self.yields.append(now)
        self.waits.append(now - asked)
        self.there -= 1
        self.there_bytes -= costs.sizes[self.order[task]]
        self.say(MAIN, ev.YIELD, task, worker, ev.Outcome.DATA, count)
        self.say(MAIN, ev.NEXT[1], task, -1, count)
        yield from self._during(MAIN, ev.CONSUMER, costs.step[(count - 1) % len(costs.step)], task, -1, (count,))

    def _start(self, driver: Driver) -> Doing:
        for worker in range(self.setting.num_workers):
            self.say(MAIN, ev.WORKER_START[0], -1, worker)
            yield Work(self.costs.start[0])
            self.say(MAIN, ev.WORKER_START[1], -1, worker, pid_of(worker))
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
                there = yield from self._draws()
                effect = driver.drawn(self.drawn - 1) if there else driver.sampler_ended()
            elif type(effect) is Assignment:
                self.say(MAIN, ev.INDEX_PUT, effect.idx, effect.worker_id, self.costs.samples)
                self.machine.send(self.tasks[effect.worker_id], effect.idx, self.costs.hops[0])
                effect = driver.done()
            elif type(effect) is Get:
                effect = driver.received((yield from self._get()))
            elif type(effect) is Deliver or effect is END or effect is READY:
                return effect
            else:
                raise RuntimeError(f"the simulation cannot perform {effect}: a bug in minidl, please report it")

    def _draws(self) -> Doing:
        """Ask the sampler; return whether it had one more task."""
        there = self.drawn < len(self.order)
        self.say(MAIN, ev.SAMPLER_NEXT[0], self.drawn)
        if there:
            yield Work(self.costs.draw[self.order[self.drawn]])
        self.say(MAIN, ev.SAMPLER_NEXT[1], self.drawn, -1, self.costs.samples * there)
        self.drawn += there
        return there

    def _get(self) -> Doing:
        """Receive a result."""
        asked, kept, wanted = self.machine.now, self.dispatcher.reorder_depth, self.dispatcher.rcvd_idx
        get = ev.READY_GET if self.setting.pin else ev.RESULT_GET
        self.say(MAIN, get[0], wanted, self.dispatcher.task_info[wanted].worker_id, POLL)
        result = yield self.ready if self.setting.pin else self.results
        if self.yields:
            self.found.starved += self.machine.now - asked
            self.found.blocked += (self.machine.now - asked) * (kept > 0)
        if not self.setting.pin:
            yield from self._rebuilds(MAIN, result)
        self.say(MAIN, get[1], result.idx, result.worker_id, ev.Message.RESULT, ev.Outcome.DATA)
        return result

    def _rebuilds(self, thread: Thread, result: Result) -> Doing:
        """Rebuild a result that has come."""
        batch = self.order[result.idx]
        self.say(thread, ev.RESULT_READ, -1, -1, MESSAGE)
        shared = (1, self.costs.sizes[batch])
        yield from self._during(
            thread, ev.RESULT_REBUILD, self.costs.read[batch], result.idx, result.worker_id, (MESSAGE,), shared
        )

    # --- Workers and threads ------------------------------------------------------------------------------------------
    def _worker(self, number: int) -> Actor:
        costs, machine, main = self.costs, self.machine, (number, 0)
        yield costs.start[1]
        self.say(main, ev.WORKER_READY, -1, number, pid_of(number), pid_of(-1), number)
        while True:
            waits = machine.now
            self.say(main, ev.INDEX_GET[0], -1, number)
            task = yield self.tasks[number]
            self.say(main, ev.INDEX_GET[1], task, number, ev.Message.TASK, costs.samples)
            self.found.idle += machine.now - waits if self.yields else 0.0
            batch = self.order[task]
            yield from self._during(main, ev.FETCH, costs.fetch[batch], task, number, (costs.samples,), (0,))
            yield from self._hold()
            self._made(batch)
            self.say(main, ev.RESULT_PUT, task, number, ev.Outcome.DATA)
            if costs.feeder:
                machine.send(self.feeds[number], task, costs.hops[1])
            else:
                yield from self._send(main, task)

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
            yield from self._send((number, 1), task)

    def _send(self, thread: Thread, task: int) -> Doing:
        worker = thread[0]
        self.say(thread, ev.RESULT_PICKLE[0], task, worker)
        yield self.costs.send[self.order[task]]
        self.say(thread, ev.RESULT_PICKLE[1], task, worker, MESSAGE, 1, 0)
        yield from self._during(thread, ev.RESULT_WRITE, Work(0.0), task, worker, (MESSAGE,), (MESSAGE,))
        self.machine.send(self.results, Result(task, worker, task), self.costs.hops[2])

    def _pin_thread(self) -> Actor:
        self.say(PIN_THREAD, ev.PIN_START)
        while True:
            self.say(PIN_THREAD, ev.RESULT_GET[0], -1, -1, POLL)
            result = yield self.results
            yield from self._rebuilds(PIN_THREAD, result)
            self.say(PIN_THREAD, ev.RESULT_GET[1], result.idx, result.worker_id, ev.Message.RESULT, ev.Outcome.DATA)
            size = self.costs.sizes[self.order[result.idx]]
            pin = self.costs.pin[self.order[result.idx]]
            yield from self._during(PIN_THREAD, ev.PIN, pin, result.idx, result.worker_id, (size, 1), (size, 1))
            self.say(PIN_THREAD, ev.READY_PUT, result.idx, result.worker_id, ev.Outcome.DATA)
            self.machine.send(self.ready, result, self.costs.hops[2] / 2)


def load(costs: Costs, setting: LoaderSetting, order: Ints, others: float = 0.0) -> Loaded:
    """Simulate one epoch. order: which recorded batch each task repeats; others: threads of other programs."""
    return Loading(costs, setting, order, others).run()


def steady(yields: Floats, capacity: int) -> tuple[int, float]:
    """Batches, and the ns that they took, without the beginning: the first ones, which workers made beforehand."""
    skipped = min(capacity, len(yields) // 4)
    return len(yields) - 1 - skipped, float(yields[-1] - yields[skipped])
