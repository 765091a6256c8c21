"""The spans of the thread that iterates over a loader: epoch, next and consumer, with the batches yielded between them.

minidl's own lifecycle emits them when it decides (`decisions`), and what follows torch's iterator when it finds out
(`observed_loader`).
"""

from __future__ import annotations

from minidl.record.cpu_time import spent
from minidl.record.shared import Shared
from minidl.record.step_parts import ConsumerLoop, LoopThread, here
from minidl.tracefile import events as ev


class LoaderSpans:
    """Which of one iterator's spans are open, and the events that open and close them.

    If a signal's handler raises in here, an end may be missing, but none comes without its begin.

    epoch: its number. yielded: batches of this epoch. task: the one yielded last, -1 = none.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared, self.emit = shared, shared.emit
        self.epoch, self.yielded, self.task = -1, 0, -1
        self.open_epoch = self.open_next = self.open_consumer = False
        self.loop = ConsumerLoop(shared.loader, shared.emit)
        self.clock, self.delay = shared.cpu, shared.delay
        self.consumer_cpu = self.consumer_delay = 0

    def begin_epoch(self, workers: int, prefetch_factor: int) -> None:
        self.epoch += 1
        self.yielded, self.task = 0, -1
        self.loop.dataloader = self.shared.dataloader
        here.thread.begin_epoch(self.loop)
        self.emit(ev.EPOCH[0], x=self.epoch, y=workers, z=prefetch_factor)
        self.open_epoch = True

    def end_epoch(self, ending: ev.Ending) -> None:
        if self.open_epoch:
            self.open_epoch = False
            self.emit(ev.EPOCH[1], x=self.epoch, y=self.yielded, z=ending)

    def begin_next(self, wanted: int) -> None:
        """Begin `__next__`. wanted: the task whose turn it is."""
        here.thread.begin_next()
        self.emit(ev.NEXT[0], wanted, -1, wanted)
        self.open_next = True

    def end_next(self, outcome: ev.Outcome, task: int = -1) -> None:
        here.thread.leave_next()
        if self.open_next:
            self.open_next = False
            self.emit(ev.NEXT[1], task, -1, self.yielded, outcome)

    def begin_consumer(self, task: int = -1) -> None:
        self.loop.begin(task)
        self.emit(ev.CONSUMER[0], task, -1, self.yielded, LoopThread.recorded and here.thread.sampled and task >= 0)
        self.open_consumer = True
        self.consumer_delay = self.delay()
        self.consumer_cpu = self.clock()

    def end_consumer(self) -> None:
        if self.open_consumer:
            self.loop.end()
            cpu, delay = spent(self.consumer_cpu, self.clock()), spent(self.consumer_delay, self.delay())
            self.open_consumer = False
            self.emit(ev.CONSUMER[1], self.task, -1, cpu, delay)
