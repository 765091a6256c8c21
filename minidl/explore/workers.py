"""The workers' part of the model, beside `minidl.loader.worker`: their loops, their feeder threads, their crashes.

What a worker does about a message is asked of the live lifecycle, see `decisions`.
"""

from __future__ import annotations

from collections.abc import Iterator

from minidl.explore import world as at
from minidl.explore.configurations import Crash
from minidl.explore.decisions import worker_decides
from minidl.explore.steps import (
    FAILED,
    HOW_FAR,
    INTERRUPTIBLE,
    KILLED,
    SHUTTING_DOWN,
    TAKES_LOCK,
    Acting,
    Step,
    index_feeder,
    result_feeder,
)
from minidl.explore.world import State, World
from minidl.loader.protocol import Action, ProtocolError, WorkerEvent
from minidl.record.decisions import TracedWorkerLifecycle
from minidl.tracefile import events as ev
from minidl.tracefile.events import Actor, DoneEvent, Message, Outcome, QueueId


class Workers(Acting):
    """All worker processes, each with its main thread and the thread that feeds the result queue."""

    def _worker(self, state: State, number: int, out: list[Step]) -> None:
        w = World(state)
        worker = w.crew[number]
        if worker.place == at.LEFT:
            self._after_loop(state, number, out)
        elif worker.place == at.JOINING:
            if not worker.out and (self.reduced or not self._holds(w, number)):
                self._ended(w, number)
                self._took(out, w, f"worker {number}", "ends")
        elif worker.place == at.FETCHING:
            self._fetched(w, number)
            self._took(out, w, f"worker {number}", "has fetched", worker.task)
        elif worker.place == at.RUNNING:
            self._in_loop(state, number, out)

    def _in_loop(self, state: State, number: int, out: list[Step]) -> None:
        w = World(state)
        queue = w.index[number]
        torn = bool(queue) and queue[0] == at.TORN
        orphan = w.phase in at.OVER
        if queue and not torn:
            self._take(w, number, queue)
            self._took(out, w, f"worker {number}", f"takes {at.named(queue[0])}")
        elif torn and orphan and not self.protocol.bounded_index_read:
            w.worker(number, place=at.BLOCKED)
            self._took(out, w, f"worker {number}", "begins to read a torn message")
            return
        if orphan and self.protocol.watchdog and (queue or self.protocol.worker_timeout):
            w = World(state)
            self.say((number, 0), ev.INDEX_GET[1], -1, number, Message.EMPTY)
            self.say((number, 0), ev.FOUND_DEAD, -1, number, Actor.LOADER)
            self._decide(w, number, WorkerEvent.PARENT_DIED)
            self._took(out, w, f"worker {number}", "finds the loader dead")

    def _take(self, w: World, number: int, queue: tuple[int, ...]) -> None:
        message = queue[0]
        w.queue(number, queue[1:])
        if self.reduced and len(queue) > self.configuration.index_room:
            self._say_written(number, queue)
        me = (number, 0)
        if at.resumed(message) >= 0:
            self.say(me, ev.INDEX_GET[1], -1, number, Message.RESUME)
            self._decide(w, number, WorkerEvent.RESUME, message)
            return
        kind = Message.SENTINEL if message == at.SENTINEL else Message.TASK
        self.say(me, ev.INDEX_GET[1], max(message, -1), number, kind, int(message >= 0))
        if w.event_dead:
            w.worker(number, place=at.BLOCKED)  # in Event.is_set, whose lock a dead process holds
        elif message == at.SENTINEL:
            self.say(me, ev.SENTINEL_GET, -1, number, QueueId.INDEX)
            self._decide(w, number, WorkerEvent.SENTINEL_WHEN_DONE if w.done else WorkerEvent.SENTINEL)
        else:
            self._decide(w, number, WorkerEvent.TASK_WHEN_DONE if w.done else WorkerEvent.TASK, message)

    def _say_written(self, number: int, queue: tuple[int, ...]) -> None:
        """The pipe has room again: the feeder ends one write and begins the next."""
        room, feeder = self.configuration.index_room, index_feeder(number)
        self.say(feeder, ev.INDEX_WRITE[1], max(queue[room], -1), number, 64)
        if len(queue) > room + 1:
            self.say(feeder, ev.INDEX_WRITE[0], max(queue[room + 1], -1), number, 64)

    def _decide(self, w: World, number: int, event: WorkerEvent, message: int = -1) -> None:
        """Ask the lifecycle what to do about an event, and do it."""
        me, worker = (number, 0), w.crew[number]
        try:
            life, action = worker_decides(worker.life, event)
        except ProtocolError as error:
            w.end(number, FAILED, self.configuration.index_room)
            w.fault = f"the protocol forbids it: worker {number}{str(error)[len('worker 0') :]}"
            return
        w.worker(number, life=life)
        if action is Action.LEAVE:
            self.say(me, ev.WORKER_EXIT, -1, number, TracedWorkerLifecycle.ENDINGS[event])
            w.worker(number, place=at.LEFT)
            return
        if action is Action.FETCH:
            self.say(me, ev.FETCH[0], message, number, 1)
            w.worker(number, place=at.FETCHING, task=message)
            if self.reduced:
                self._fetched(w, number)
            return
        if action is Action.RESUME:
            epoch = at.resumed(message)
            self.say(me, ev.RESUME_ACK, -1, number, epoch)
            w.worker(number, out=(*worker.out, at.result(at.ACK, epoch, number)), left=self._share(number))
        elif event is WorkerEvent.TASK_WHEN_DONE:
            self.say(me, ev.DONE_EVENT_SEEN, message, number, DoneEvent.WORKERS)
        self.say(me, ev.INDEX_GET[0], -1, number)

    def _fetched(self, w: World, number: int) -> None:
        """A worker has its batch, and puts it into its buffer."""
        me, worker = (number, 0), w.crew[number]
        streams = self.configuration.streams is not None
        ends = streams and not worker.left
        outcome = Outcome.EXHAUSTED if ends else Outcome.DATA
        self.say(me, ev.FETCH[1], worker.task, number, outcome)
        self.say(me, ev.RESULT_PUT, worker.task, number, outcome)
        life, _ = worker_decides(worker.life, WorkerEvent.ITERATION_END if ends else WorkerEvent.FETCHED)
        sent = at.result(at.EXHAUSTED if ends else at.DATA, worker.task, number)
        left = worker.left - (streams and not ends)
        w.worker(number, life=life, out=(*worker.out, sent), left=left, place=at.RUNNING, task=-1)
        self.say(me, ev.INDEX_GET[0], -1, number)

    def _after_loop(self, state: State, number: int, out: list[Step]) -> None:
        """Out of the loop: end at once, or wait until the feeder thread has written everything."""
        p = self.protocol
        w = World(state)
        orphan = w.phase in at.OVER
        cancels = w.done and p.cancel_results_when_done
        cancels = cancels or (orphan and p.cancel_results_when_orphaned) or not p.join_results_until_done
        if w.event_dead:
            return
        if not cancels:
            w.worker(number, place=at.JOINING)
            self._took(out, w, f"worker {number}", at.JOINING)
            return
        for how, variant in self._cut_off(w, number, 0):
            self.say((number, 0), ev.CANCEL_JOIN_THREAD, -1, -1, QueueId.RESULT)
            self.say((number, 0), ev.QUEUE_CLOSE, -1, -1, QueueId.RESULT)
            self._took(out, variant, f"worker {number}", f"ends{how}")

    def _ended(self, w: World, number: int) -> None:
        """Its feeder was joined, so it holds no lock."""
        if w.lock == number:
            w.lock = at.FREE
        w.end(number, 0, self.configuration.index_room)

    @staticmethod
    def _holds(w: World, number: int) -> bool:
        """Whether the worker's feeder holds the result queue's lock (reduced: may hold it still)."""
        return w.lock >= 0 and w.lock % at.TAKEN == number

    def _cut_off(self, w: World, number: int, code: int) -> Iterator[tuple[str, World]]:
        """Each state in which a worker's process may end while its feeder thread runs."""
        room, state = self.configuration.index_room, w.freeze()
        ended = World(state)
        ended.end(number, code, room)
        holds = self._holds(w, number)
        if not self.reduced:
            ended.lock = at.DEAD_LOCK if holds else w.lock
            yield HOW_FAR[w.lock - number] if holds else "", ended
            return
        ended.lock = at.FREE if holds else w.lock
        yield "", ended
        may_take = w.lock != at.DEAD_LOCK and bool(w.crew[number].out) and w.crew[number].place != at.STOPPED
        if holds or may_take:
            ended.lock = at.DEAD_LOCK
            yield HOW_FAR[at.WRITTEN], ended
        if may_take:
            ended.results = (*w.results, at.TORN)
            yield HOW_FAR[at.HALF_WRITTEN], ended

    # --- Feeder threads that write to the result queue ----------------------------------------------------------------
    def _result_feeder(self, state: State, number: int, out: list[Step]) -> None:
        """A worker's thread that writes its results: lock, one part, the other, unlock."""
        w = World(state)
        worker, who = w.crew[number], f"worker {number}'s feeder"
        if worker.place == at.STOPPED:
            return
        if self.reduced:
            if worker.out and self._may_write(w):
                self._begin_write(w, number)
                task = self._end_write(w, number)
                self._took(out, w, who, "writes", task)
        elif w.lock == at.FREE and worker.out:
            w.lock = number + at.TAKEN
            self._took(out, w, who, TAKES_LOCK)
        elif w.lock == number + at.TAKEN and len(w.results) < self.configuration.result_room:
            self._begin_write(w, number)
            self._took(out, w, who, "begins to write", at.parts(worker.out[0])[1])
        elif w.lock == number + at.HALF_WRITTEN:
            task = self._end_write(w, number)
            self._took(out, w, who, "has written", task)
        elif w.lock == number:
            w.lock = at.FREE
            self._took(out, w, who, "lets go of the lock")

    def _begin_write(self, w: World, number: int) -> None:
        kind, task, _ = at.parts(w.crew[number].out[0])
        about = (-1 if kind == at.ACK else task, number)
        if kind != at.ACK:
            self.say(result_feeder(number), ev.RESULT_PICKLE[0], *about)
            self.say(result_feeder(number), ev.RESULT_PICKLE[1], *about, 64)
        self.say(result_feeder(number), ev.RESULT_WRITE[0], *about, 64)
        w.results = (*w.results, at.TORN)
        w.lock = number + at.HALF_WRITTEN

    def _end_write(self, w: World, number: int) -> int:
        """The second part is written; the task."""
        out = w.crew[number].out
        kind, task, _ = at.parts(out[0])
        self.say(result_feeder(number), ev.RESULT_WRITE[1], -1 if kind == at.ACK else task, number, 64)
        w.results = (*w.results[:-1], out[0])
        w.lock = number
        w.worker(number, out=out[1:])
        return task

    # --- Crashes ------------------------------------------------------------------------------------------------------
    def _worker_crashes(self, state: State, number: int, kind: Crash, out: list[Step]) -> None:
        w = World(state)
        w.crashed = True
        who = f"worker {number}"
        if kind is Crash.WORKER_KILLED:
            heard = self.configuration.heard and (w.phase in INTERRUPTIBLE or w.phase in SHUTTING_DOWN)
            for how, variant in self._cut_off(w, number, KILLED):
                variant.signalled = heard
                self._took(out, variant, who, f"is killed{how}")
            asks = w.crew[number].place == at.RUNNING and bool(w.index[number]) and w.index[number][0] >= at.SENTINEL
            if asks and not self.protocol.lock_free_event and not w.event_dead:
                w.event_dead, w.signalled = True, heard
                w.end(number, KILLED, self.configuration.index_room)
                self._took(out, w, who, "is killed in the lock of the done event")
        elif kind is Crash.WORKER_STOPPED:
            w.worker(number, place=at.STOPPED)
            self._took(out, w, who, "is stopped")
        elif w.crew[number].place == at.FETCHING:
            w.worker(number, place=at.STUCK)
            self._took(out, w, who, "is stuck in its dataset", w.crew[number].task)
        elif self.reduced and w.crew[number].place == at.RUNNING and w.index[number] and w.index[number][0] >= 0:
            task = w.index[number][0]
            w.queue(number, w.index[number][1:])
            self.say((number, 0), ev.INDEX_GET[1], task, number, Message.TASK, 1)
            self.say((number, 0), ev.FETCH[0], task, number, 1)
            w.worker(number, place=at.STUCK, life=worker_decides(w.crew[number].life, WorkerEvent.TASK)[0])
            self._took(out, w, who, "is stuck in its dataset", task)
