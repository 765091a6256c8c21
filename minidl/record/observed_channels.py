"""Traced messages, queues, done event and processes for torch's own loader.

They are those of `channels`, which are given torch's messages in this package's words (`ObservedShared.told`). Each
also reports what passes to the follower of its process, an `ObservedLoader` or an `ObservedWorker`.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data._utils.worker import _ResumeIteration
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from minidl.arena.pickling import SlabPickler, is_filling
from minidl.record import recorder
from minidl.record.channels import (
    About,
    TracedDoneEvent,
    TracedIndexQueue,
    TracedProcess,
    TracedQueue,
    TracedReadyQueue,
    TracedResultQueue,
    copied,
    emit_failed,
    feeding,
    load_result,
    outcome_of,
)
from minidl.record.cpu_time import spent
from minidl.record.harmless import harmless
from minidl.record.observed_loader import ObservedLoader
from minidl.record.observed_worker import ObservedWorker, text_of
from minidl.record.ports import nbytes
from minidl.record.recorder import no_emit
from minidl.record.shared import Shared, live
from minidl.tracefile import events as ev
from minidl.wire.message import dumps
from minidl.wire.messages import RebuildFailure, Result, ResumeIteration, Sentinel, Task


class ObservedShared(Shared):
    """State that the observed objects of one of torch's iterators share."""

    loader_side: ObservedLoader
    worker_side: ObservedWorker | None = None  # None in the loader's process
    with_state = False
    """A task is (idx, (index, ...)), a result (idx, (data, ...)), as of torchdata's StatefulDataLoader."""

    def fall_silent(self) -> None:
        """In a forked child that has inherited the iterator, and is none of its workers: it is the parent's."""
        self.emit = self.loader_side.emit = no_emit

    def told(self, message: Any, worker: int, kind: type[Task] | type[Result]) -> Any:
        """A message of torch's in this package's words; None for one of a subclass's own."""
        pair: tuple[Any, Any] = message if isinstance(message, tuple) and len(message) == 2 else (message, None)
        first, rest = pair
        if isinstance(first, int):
            return kind(first, worker, rest[0] if self.with_state else rest)
        if isinstance(first, _ResumeIteration):
            return ResumeIteration(-1, worker)
        return Sentinel() if first is None else None


@harmless(None)
def _inherit() -> None:
    for shared in tuple(live):
        if isinstance(shared, ObservedShared):
            shared.fall_silent()


os.register_at_fork(after_in_child=_inherit)


# --- Messages ---------------------------------------------------------------------------------------------------------
@dataclass
class _Counts:
    """Of the message that is pickled: tensors, bytes of their storages, and of these what was copied."""

    tensors: int = 0
    shared: int = 0
    copied: int = 0


class SentResult(About):
    """A result whose pickling and rebuilding are spans; the loader receives torch's own tuple."""

    def __init__(self, shared: Shared, message: Any, task: int, worker: int) -> None:
        super().__init__(message, task, worker)
        self.shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        number, emit, clock = self.shared.loader, self.shared.emit, self.shared.cpu
        feeding.about, feeding.emit, feeding.clock = self.about, emit, clock
        counts, data = _Counts(), b""
        emit(ev.RESULT_PICKLE[0], *self.about)
        began = clock()
        try:
            data = self._pickled(counts)
        except Exception as error:
            emit_failed(error, number, *self.about)
            raise
        finally:
            feeding.cpu = spent(began, clock())
            emit(ev.RESULT_PICKLE[1], *self.about, len(data), counts.tensors, counts.copied)
        return _arrived, (number, *self.about, data, counts.tensors, counts.shared)

    def _pickled(self, counts: _Counts) -> bytes:
        feeding.counts = counts
        try:
            if is_filling():
                data, pickler = dumps(self.message, SlabPickler)
                counts.tensors, counts.shared = pickler.tensors, pickler.shared_bytes
                return data
            buffer = io.BytesIO()
            ForkingPickler(buffer).dump(self.message)  # as torch's queues do
            return buffer.getvalue()
        finally:
            feeding.counts = None


class SentAnswer(About):
    """A message with the number of the worker that has sent it, which torch's messages lack."""

    def __reduce__(self) -> tuple[Any, ...]:
        super().__reduce__()
        return _answered, (self.about[1], self.message)


reading = threading.local()
"""Of the message that this thread has rebuilt last: `worker`, which has sent it."""


def _arrived(loader: int, task: int, worker: int, *sent: Any) -> Any:
    """Return a result as torch's tuple; raise the error of its rebuilding."""
    reading.worker = worker
    message = load_result(loader, task, worker, *sent).data
    if isinstance(message, RebuildFailure):
        raise message.error
    return message


def _answered(worker: int, message: Any) -> Any:
    reading.worker = worker
    return message


def watch_sharing() -> None:
    """Count, in a worker, each storage that is pickled; emit the copy of one that is not in shared memory yet."""
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(torch.UntypedStorage, name, _watched_sharing(getattr(torch.UntypedStorage, name)))


def _watched_sharing(share: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(share)
    def watched(storage: Any, *args: Any, **kwargs: Any) -> Any:
        counts = getattr(feeding, "counts", None)
        if counts is None:
            return share(storage, *args, **kwargs)
        size = storage.nbytes()
        counts.tensors += 1
        counts.shared += size
        if storage.is_shared():
            return share(storage, *args, **kwargs)
        counts.copied += size
        return copied(share, storage, *args, **kwargs)

    return watched


# --- Queues, the done event, processes --------------------------------------------------------------------------------
class ObservedIndexQueue(TracedIndexQueue):
    """An index queue: the loader puts (task, indices), None or a new epoch's message; one worker gets."""

    shared: ObservedShared

    def put(self, message: Any) -> None:
        super().put(message)
        if isinstance(self._told(message), Task):
            self.shared.loader_side.sent()

    def _told(self, message: Any) -> Any:
        return self.shared.told(message, self.worker_id, Task)

    def emit_put(self, message: Any) -> None:
        loader, told = self.shared.loader_side, self._told(message)
        if isinstance(told, Task):
            loader.sending(told)
        elif isinstance(told, ResumeIteration):
            loader.resuming(self.worker_id)
        elif told is not None:
            super().emit_put(told)

    def labelled(self, message: Any) -> About:
        return About(message, getattr(self._told(message), "idx", -1), self.worker_id)

    def get(self, timeout: float | None = None, **more: Any) -> Any:
        worker = self.shared.worker_side
        if worker is None:
            return self.inner.get(timeout=timeout, **more)
        worker.asks()
        message = super().get(timeout, **more)
        if not isinstance(self._told(message), Task):
            return message
        idx, rest = message
        worker.look_for_fetcher(sys._getframe(1))
        return idx, (worker.fetched(rest[0]), *rest[1:]) if self.shared.with_state else worker.fetched(rest)

    def emit_got(self, message: Any) -> None:
        worker, told = self.shared.worker_side, self._told(message)
        if told is None or worker is None:
            self.emit_nothing(self.worker_id)
        else:
            worker.got(told)
            super().emit_got(told)


class ReadByLoader(TracedQueue):
    """The queue that the loader reads: the result queue, or behind torch's pin thread the ready queue."""

    shared: ObservedShared

    def sender(self, message: Any) -> int:
        """The worker that has sent the message, which was just got."""
        raise NotImplementedError

    def wanted(self) -> tuple[int, int]:
        return self.shared.loader_side.waits()

    def emit_nothing(self, worker: int, error: BaseException | None = None) -> None:
        # A worker that dies resets its socket and then sends SIGCHLD, for which torch's handler raises anywhere.
        blocked = False
        try:
            blocked = signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # it may raise
        finally:
            super().emit_nothing(worker)
            self.shared.loader_side.got_nothing(error)
            if not blocked:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def emit_got(self, message: Any) -> None:
        worker = self.sender(message)
        told = self.shared.told(message, worker, Result)
        if told is None:
            super().emit_nothing(worker)
            return
        super().emit_got(told)
        if isinstance(told, Result):
            self.shared.loader_side.received(told)


class ObservedResultQueue(TracedResultQueue):
    """The result queue: each worker puts (task, data); the loader or torch's pin thread gets."""

    shared: ObservedShared
    joining = False  # the pin thread

    def put(self, message: Any) -> None:
        super().put(message)
        if self.shared.worker_side is None:  # the loader has woken the pin thread, and joins it next
            self.shared.emit(ev.JOIN[0], x=ev.Actor.PIN_THREAD)
            self.joining = True

    def emit_put(self, message: Any) -> None:
        worker = self.shared.worker_side
        if worker is None:  # the loader has stopped the pin thread, and wakes it
            self.shared.loader_side.begin_shutdown()
            self.shared.emit(ev.DONE_EVENT_SET, x=ev.DoneEvent.PIN_THREAD)
            super().emit_put(Sentinel())
            return
        told = self.shared.told(message, worker.worker_id, Result)
        if isinstance(told, Result):
            worker.answers(told)
        elif isinstance(told, ResumeIteration):
            worker.resumes()

    def labelled(self, message: Any) -> About:
        worker = self.shared.worker_side
        if worker is None:
            return super().labelled(message)
        told = self.shared.told(message, worker.worker_id, Result)
        if isinstance(told, Result):
            return SentResult(self.shared, message, told.idx, worker.worker_id)
        return SentAnswer(message, -1, worker.worker_id)

    def cancel_join_thread(self) -> None:
        if self.joining:
            self.joining = False
            self.shared.emit(ev.JOIN[1], x=ev.Actor.PIN_THREAD, y=1)
        super().cancel_join_thread()


class ResultsForLoader(ReadByLoader, ObservedResultQueue):
    """A result queue that the loader reads."""

    def sender(self, message: Any) -> int:
        return int(reading.worker)

    def wanted(self) -> tuple[int, int]:
        reading.worker = -1
        return super().wanted()


class ResultsForPinThread(ObservedResultQueue):
    """A result queue that torch's pin thread reads. It pins between its get and its put."""

    pinning: tuple[int, int] | None = None  # task and worker
    began = tid = 0

    def wanted(self) -> tuple[int, int]:
        reading.worker = -1
        return -1, -1

    def emit_got(self, message: Any) -> None:
        told = self.shared.told(message, reading.worker, Result)
        if told is None:
            self.emit_nothing(reading.worker)
            return
        super().emit_got(told)
        if isinstance(told, Result) and outcome_of(told.data) is ev.Outcome.DATA:
            self.pins(told)

    @harmless(None)
    def pins(self, told: Result) -> None:
        done = self.shared.loader_side.pin_done
        if done is None or not done.is_set():
            self.pinning, self.tid = (told.idx, told.worker_id), threading.get_native_id()
            self.shared.emit(ev.PIN[0], *self.pinning, nbytes(told.data))
            self.began = self.shared.cpu()

    @harmless(None)
    def pinned(self, told: Result) -> None:
        """The thread puts what it has pinned, or the error."""
        about, self.pinning = self.pinning, None
        if about is not None:
            if outcome_of(told.data) is ev.Outcome.ERROR:
                self.shared.emit(ev.TASK_ERROR, *about, -1, -1, text_of(self.shared, told.data))
            self.shared.emit(ev.PIN[1], *about, nbytes(told.data), 0, spent(self.began, self.shared.cpu()))

    def cancel_join_thread(self) -> None:
        about, self.pinning = self.pinning, None
        recording = recorder.active()
        if about is not None and recording is not None:  # the thread has ended, and has put nothing
            recording.emit_at_once((time.monotonic_ns(), ev.PIN[1], self.shared.loader, self.tid, *about, 0, 0, 0))
        super().cancel_join_thread()


class ReadyWatch(ReadByLoader, TracedReadyQueue):
    """What is emitted for the ready queue: torch's pin thread puts, the loader gets."""

    def __init__(self, shared: ObservedShared, inner: Any, results: ResultsForPinThread) -> None:
        super().__init__(shared, inner)
        self.results = results
        self.senders: dict[int, int] = {}  # the id of a message in the queue -> the worker

    def emit_put(self, message: Any) -> None:
        worker = self.senders[id(message)] = getattr(reading, "worker", -1)
        told = self.shared.told(message, worker, Result)
        if isinstance(told, Result):
            self.results.pinned(told)
        if told is not None:
            super().emit_put(told)

    def sender(self, message: Any) -> int:
        return self.senders.pop(id(message), -1)


class _PlainQueue:
    """A `ObservedReadyQueue`, without what is emitted. It stays out of reference cycles."""

    def __init__(self, ready: queue.Queue[Any]) -> None:
        self.ready = weakref.ref(ready)

    def get(self, **how: Any) -> Any:
        return queue.Queue.get(self.ready(), **how)  # type: ignore[arg-type]

    def put(self, message: Any) -> None:
        queue.Queue.put(self.ready(), message)  # type: ignore[arg-type]


class ObservedReadyQueue(queue.Queue[Any]):
    """The class that torch's ready queue gets, which both threads have already. It has room for any number."""

    observed: ReadyWatch

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return self.observed.get(timeout, block=block)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self.observed.put(item)


@harmless(None)
def watch_ready(shared: ObservedShared) -> None:
    """Observe, before a result can come, the ready queue of an iterator that has one."""
    iterator: Any = shared.loader_side.iterator()
    ready = getattr(iterator, "_data_queue", None)
    if type(ready) is queue.Queue:
        watched: Any = ready
        shared.loader_side.pin_done = iterator._pin_memory_thread_done_event
        observed = ReadyWatch(shared, _PlainQueue(watched), iterator._worker_result_queue)
        watched.observed, watched.__class__ = observed, ObservedReadyQueue


class ObservedDoneEvent(TracedDoneEvent):
    """The workers' done event: the loader sets it; a worker looks at it after each message."""

    shared: ObservedShared

    def set(self) -> None:
        loader = self.shared.loader_side
        loader.begin_shutdown()
        super().set()
        if not self.shared.workers:
            loader.shut_down()

    def is_set(self) -> bool:
        done: bool = self.inner.is_set()
        if self.shared.worker_side is not None:
            self.shared.worker_side.looked(done)
        return done


class ObservedProcess(TracedProcess):
    """The handle of a worker's process."""

    shared: ObservedShared

    @property
    def daemon(self) -> bool:
        return bool(self.inner.daemon)

    @daemon.setter
    def daemon(self, value: bool) -> None:
        self.inner.daemon = value

    def start(self) -> None:
        super().start()
        self.shared.workers.append(self)  # as the loader lists it, once it has started

    def is_alive(self) -> bool:
        alive: bool = self.inner.is_alive()
        self.shared.loader_side.looked_at(self.worker_id, self.inner, alive)
        return alive

    def terminate(self) -> None:
        super().terminate()
        self.terminated = True
        if not joins_the_terminated():
            self._ended()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self.terminated:
            self._ended()

    def _ended(self) -> None:
        if self in self.shared.workers[-1:]:
            self.shared.loader_side.shut_down()

    terminated = False


@functools.cache
def joins_the_terminated() -> bool:
    """Tell whether torch joins a worker that it has terminated: 2.13 does, 2.11 does not."""
    return "join" in inspect.getsource(_MultiProcessingDataLoaderIter._shutdown_workers).partition("terminate()")[2]
