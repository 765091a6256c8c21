"""A loader on a simulated machine: its own decisions, with recorded costs in place of work.

Interface: `Costs` is what each batch costs; `load(costs, setting, order)` -> `Loading`, an epoch that has run;
`steady_rate(epochs, capacity)`, the rate of epochs in their steady state.

Rules of use: `loader.driver.Driver` and `loader.dispatcher.Dispatcher` decide, as in the live loader. Here is what they
ask for: the loader's thread with the training loop, the workers, their feeder threads, the pin thread. A subclass of
`Loading` hears each step (`say`). Times are in ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Final

import numpy as np
from typing_extensions import Self

from minidl.loader.dispatcher import Assignment, Dispatcher
from minidl.loader.driver import DRAW, END, MP_STATUS_CHECK_INTERVAL, Driver, Effect, Get
from minidl.loader.protocol import LoaderEvent, LoaderLifecycle
from minidl.record.made_up import Thread, pid_of
from minidl.speed.plan.machine import Actor, Mailbox, SimulatedMachine, Work
from minidl.speed.plan.settings import LoaderSetting
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Floats, Ints
from minidl.wire.messages import Result

MAIN: Final[Thread] = (-1, 0)
PIN_THREAD: Final[Thread] = (-1, 1)

MESSAGE: Final = 300
"""Bytes of a pickled result whose tensors go by handle."""

POLL: Final = int(MP_STATUS_CHECK_INTERVAL * 1e9)


Parts = Floats
"""What one step of each batch takes, ns: a row of CPU times, and a row of waits."""

CPU, WAIT = 0, 1

STEPS: Final = ("fetch", "send", "read", "pin", "step")


@dataclass(frozen=True)
class Costs:
    """What the steps of a loader cost; a column for each recorded batch, in the order of tasks.

    draw: of the sampler, ns. fetch: in the worker, or in the loop itself, with all that its thread does for a batch;
    exclusive: ns of its waiting for what only one worker can use at a time. send: pickling and writing. read: receiving
    and rebuilding; pin: copying into page-locked memory. step: of the training loop, a column for each yielded batch.
    sizes: bytes; samples: of a batch, on average. own: CPU time of the loader's thread for each batch. start: CPU time
    of the loader to start a worker, and what the worker does before its first batch. hops: waits between putting a task
    and the worker's work on it, between a result and its feeder's work, between writing and reading it. others: threads
    of other programs that compute all the time. held: the share of all this CPU time for which workers that are threads
    hold the interpreter's lock.
    """

    draw: Floats
    fetch: Parts
    send: Parts
    read: Parts
    pin: Parts
    step: Parts
    sizes: Ints
    exclusive: float = 0.0
    own: float = 0.0
    start: tuple[float, Work] = (0.0, Work(0.0))
    hops: tuple[float, float, float] = (0.0, 0.0, 0.0)
    samples: float = 1.0
    others: float = 0.0
    held: float = 0.0


class Loading:
    """One epoch of a loader, and what became of it. order: which recorded batch each task repeats.

    yields: ns of each batch; waits: ns that the loop waited for each; starved: ns that the loader's thread waited for
    results, and blocked, those of them in which later batches were there; idle: ns that the workers waited for tasks;
    queued: for their turn.
    """

    def __init__(self, costs: Costs, setting: LoaderSetting, order: Ints) -> None:
        self.costs, self.setting, self.samples = costs, setting, max(1, round(costs.samples))
        self.draw, self.sizes = costs.draw[order].tolist(), costs.sizes[order].tolist()
        self.fetch, self.send, self.read, self.pin = (
            _works(parts, order) for parts in (costs.fetch, costs.send, costs.read, costs.pin)
        )
        self.step = _works(costs.step, np.arange(len(order)) % costs.step.shape[1])
        self.machine = SimulatedMachine(setting.cpus, costs.others, costs.held)
        self.results, self.ready = Mailbox(), Mailbox()
        self.tasks = [Mailbox() for _ in range(setting.num_workers)]
        self.feeds = [Mailbox() for _ in range(setting.num_workers)]
        self.shared = Mailbox()
        self.machine.send(self.shared, None)
        self.drawn = 0
        self.kept = [(0, 0)]  # changes of the batches, and of their bytes, that are made and not yielded
        self.yields: list[float] = []
        self.waits: list[float] = []
        self.starved = self.blocked = self.idle = self.queued = 0.0
        self.lifecycle, self.dispatcher = self._deciders()

    @property
    def by_s(self) -> float:
        """Batches/s in the steady state."""
        return steady_rate([self.yields], self.setting.capacity)

    @property
    def time(self) -> float:
        """From the first batch to the last, ns."""
        return max(1.0, self.yields[-1] - self.yields[0])

    @property
    def waiting(self) -> float:
        """The share of this time in which the loop waited."""
        return float(np.sum(self.waits[1:])) / self.time

    @property
    def used(self) -> float:
        """The CPUs in use on average."""
        return self.machine.used / max(1.0, self.machine.now)

    @property
    def peak(self) -> tuple[int, int]:
        """The most batches, and bytes, that were made and not yielded."""
        batches, size = np.cumsum(self.kept, axis=0).max(axis=0).tolist()
        return batches, size

    def _deciders(self) -> tuple[LoaderLifecycle, Dispatcher]:
        setting = self.setting
        return LoaderLifecycle(), Dispatcher(max(1, setting.num_workers), setting.prefetch_factor, setting.in_order)

    def say(self, thread: Thread, code: int, task: int = -1, worker: int = -1, *own: int) -> None:
        """Hear of an event that happens now; this class keeps none."""

    def _during(
        self, thread: Thread, span: tuple[int, int], step: Work, task: int = -1, worker: int = -1,
        begin: tuple[int, ...] = (), end: tuple[int, ...] = (),
    ) -> Actor:  # fmt: skip
        """Take a step as a span. end: the end's own numbers; the step's CPU time is added."""
        self.say(thread, span[0], task, worker, *begin)
        yield step
        self.say(thread, span[1], task, worker, *end, int(step.cpu))

    def run(self) -> Self:
        """Run the epoch."""
        self.machine.run(self._train())
        return self

    # --- The loader's thread ------------------------------------------------------------------------------------------
    def _train(self) -> Actor:
        """The training loop, and the loader that it asks for batches."""
        workers = self.setting.num_workers
        driver = Driver(self.dispatcher, self.lifecycle, persistent=True)
        if workers:
            self.lifecycle.handle(LoaderEvent.START)
            yield from self._start(driver)
        self.say(MAIN, ev.EPOCH[0], -1, -1, 0, workers, self.setting.prefetch_factor * (workers > 0))
        if workers:
            yield from self._perform(driver, driver.begin())
        yield from self._during(MAIN, ev.CONSUMER, Work(0.0))
        while True:
            asked, wanted = self.machine.now, self.dispatcher.rcvd_idx if workers else self.drawn
            self.say(MAIN, ev.NEXT[0], wanted, -1, wanted)
            got = yield from (self._next(driver) if workers else self._fetches())
            if got is None:
                break
            yield from self._trains(asked, *got)
        self.say(MAIN, ev.NEXT[1], -1, -1, len(self.yields), ev.Outcome.EXHAUSTED)
        self.say(MAIN, ev.EPOCH[1], -1, -1, 0, len(self.yields))

    def _fetches(self) -> Actor:
        """Fetch a batch in the loop itself; return its task and worker."""
        task = self.drawn
        if not (yield from self._draws()):
            return None
        yield from self._makes(MAIN, task, -1)
        return task, -1

    def _next(self, driver: Driver) -> Actor:
        """Have the driver deliver a batch; return its task and worker."""
        yield Work(self.costs.own)
        effect = yield from self._perform(driver, driver.next())
        if effect is END:
            return None
        driver.yielded()
        return effect.idx, effect.worker_id

    def _trains(self, asked: float, task: int, worker: int) -> Actor:
        """The loop gets a batch, for which it asked at `asked`, and takes a step."""
        now, count = self.machine.now, len(self.yields) + 1
        self.yields.append(now)
        self.waits.append(now - asked)
        self.kept.append((-1, -self.sizes[task]))
        self.say(MAIN, ev.YIELD, task, worker, ev.Outcome.DATA, count)
        self.say(MAIN, ev.NEXT[1], task, -1, count)
        yield from self._during(MAIN, ev.CONSUMER, self.step[count - 1], task, -1, (count,))

    def _start(self, driver: Driver) -> Actor:
        for worker in range(self.setting.num_workers):
            start = Work(self.costs.start[0])
            yield from self._during(MAIN, ev.WORKER_START, start, -1, worker, (), (pid_of(worker),))
            driver.worker_started()
            self.machine.start(self._worker(worker))
            if self.setting.way == "upstream":
                self.machine.start(self._feeder(worker))
        if self.setting.pin_memory:
            driver.pin_started()
            self.machine.start(self._pin_thread())

    def _perform(self, driver: Driver, effect: Effect) -> Actor:
        """Perform each effect and answer it, up to the next one that is for the loop."""
        while True:
            if effect is DRAW:
                there = yield from self._draws()
                effect = driver.drawn(self.drawn - 1) if there else driver.sampler_ended()
            elif type(effect) is Assignment:
                self.say(MAIN, ev.INDEX_PUT, effect.idx, effect.worker_id, self.samples)
                self.machine.send(self.tasks[effect.worker_id], effect.idx, self.costs.hops[0])
                effect = driver.done()
            elif type(effect) is Get:
                effect = driver.received((yield from self._get()))
            else:
                return effect

    def _draws(self) -> Actor:
        """Ask the sampler; return whether it had one more task."""
        there = self.drawn < len(self.draw)
        self.say(MAIN, ev.SAMPLER_NEXT[0], self.drawn)
        if there:
            yield Work(self.draw[self.drawn])
        self.say(MAIN, ev.SAMPLER_NEXT[1], self.drawn, -1, self.samples * there)
        self.drawn += there
        return there

    def _get(self) -> Actor:
        """Receive a result."""
        asked, kept, wanted = self.machine.now, self.dispatcher.reorder_depth, self.dispatcher.rcvd_idx
        get = ev.READY_GET if self.setting.pin_memory else ev.RESULT_GET
        self.say(MAIN, get[0], wanted, self.dispatcher.task_info[wanted].worker_id, POLL)
        result = yield self.ready if self.setting.pin_memory else self.results
        if self.yields:
            self.starved += self.machine.now - asked
            self.blocked += (self.machine.now - asked) * (kept > 0)
        if not self.setting.pin_memory:
            yield from self._rebuilds(MAIN, result)
        self.say(MAIN, get[1], result.idx, result.worker_id, ev.Message.RESULT, ev.Outcome.DATA)
        return result

    def _rebuilds(self, thread: Thread, result: Result) -> Actor:
        """Rebuild a result that has come from another process."""
        if self.setting.way == "alone":
            return
        task, worker, shared = result.idx, result.worker_id, (1, self.sizes[result.idx])
        self.say(thread, ev.RESULT_READ, -1, -1, MESSAGE)
        yield from self._during(thread, ev.RESULT_REBUILD, self.read[task], task, worker, (MESSAGE,), shared)

    # --- Workers and threads ------------------------------------------------------------------------------------------
    def _worker(self, number: int) -> Actor:
        machine, main = self.machine, (number, 0)
        yield self.costs.start[1]
        self.say(main, ev.WORKER_READY, -1, number, pid_of(number), pid_of(-1), number)
        while True:
            waits = machine.now
            self.say(main, ev.INDEX_GET[0], -1, number)
            task = yield self.tasks[number]
            self.say(main, ev.INDEX_GET[1], task, number, ev.Message.TASK, self.samples)
            self.idle += machine.now - waits if self.yields else 0.0
            yield from self._makes(main, task, number)
            self.say(main, ev.RESULT_PUT, task, number, ev.Outcome.DATA)
            if self.setting.way == "upstream":
                machine.send(self.feeds[number], task, self.costs.hops[1])
            else:
                yield from self._send(main, task)

    def _makes(self, thread: Thread, task: int, worker: int) -> Actor:
        """Fetch a batch, in part while no other worker can."""
        yield from self._during(thread, ev.FETCH, self.fetch[task], task, worker, (self.samples,), (ev.Outcome.DATA,))
        if self.costs.exclusive:
            asked = self.machine.now
            yield self.shared
            self.queued += self.machine.now - asked
            yield Work(0.0, self.costs.exclusive)
            self.machine.send(self.shared, None)
        self.kept.append((1, self.sizes[task]))

    def _feeder(self, number: int) -> Actor:
        while True:
            task = yield self.feeds[number]
            yield from self._send((number, 1), task)

    def _send(self, thread: Thread, task: int) -> Actor:
        worker = thread[0]
        if self.setting.way != "alone":
            yield from self._during(thread, ev.RESULT_PICKLE, self.send[task], task, worker, (), (MESSAGE, 1, 0))
            yield from self._during(thread, ev.RESULT_WRITE, Work(0.0), task, worker, (MESSAGE,), (MESSAGE,))
        self.machine.send(self.results, Result(task, worker, task), self.costs.hops[2])

    def _pin_thread(self) -> Actor:
        self.say(PIN_THREAD, ev.PIN_START)
        while True:
            self.say(PIN_THREAD, ev.RESULT_GET[0], -1, -1, POLL)
            result = yield self.results
            task, worker, size = result.idx, result.worker_id, (self.sizes[result.idx], 1)
            yield from self._rebuilds(PIN_THREAD, result)
            self.say(PIN_THREAD, ev.RESULT_GET[1], task, worker, ev.Message.RESULT, ev.Outcome.DATA)
            yield from self._during(PIN_THREAD, ev.PIN, self.pin[task], task, worker, size, size)
            self.say(PIN_THREAD, ev.READY_PUT, task, worker, ev.Outcome.DATA)
            self.machine.send(self.ready, result, self.costs.hops[2] / 2)


def _works(parts: Parts, order: Ints) -> list[Work]:
    return [*starmap(Work, parts[:, order].T.tolist())]


def load(costs: Costs, setting: LoaderSetting, order: Ints) -> Loading:
    """Simulate one epoch. order: which recorded batch each task repeats."""
    return Loading(costs, setting, order).run()


def steady_rate(epochs: Sequence[Floats | Sequence[float]], capacity: int) -> float:
    """Batches/s, without the beginning of each epoch: the first ones, which workers made beforehand.

    epochs: when each batch of one was yielded, ns; capacity: batches that may be ahead.
    """
    steady = [yields[min(capacity, len(yields) // 4) :] for yields in epochs]
    ns = sum(float(yields[-1] - yields[0]) for yields in steady)
    return 1e9 * sum(len(yields) - 1 for yields in steady) / max(1.0, ns)
