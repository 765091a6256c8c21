"""Traced messages, queues, done event and processes for torch's own loader."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data._utils.worker import _ResumeIteration
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from minidl.record.channels import (
    UNKNOWN,
    About,
    TracedDoneEvent,
    TracedIndexQueue,
    TracedProcess,
    TracedQueue,
    TracedResultQueue,
    emit_failed,
    feeding,
)
from minidl.record.cpu_time import spent
from minidl.record.harmless import harmless
from minidl.record.indices import count
from minidl.record.observed_loader import ObservedLoader
from minidl.record.observed_worker import ObservedWorker, outcome_of_torch
from minidl.record.recorder import emit_of, no_emit, spanned
from minidl.record.shared import Shared, live
from minidl.record.slabs import emit_mapped, forget_mapped
from minidl.tracefile import events as ev
from minidl.wire.tensors import is_filling


# --- Messages ---------------------------------------------------------------------------------------------------------
class SentResult(About):
    """A result whose pickling and rebuilding are spans; the loader receives torch's own tuple."""

    def __init__(self, shared: Shared, message: tuple[Any, ...], task: int, worker: int) -> None:
        super().__init__(message, task, worker)
        self.shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        _begin_pickling(self.about, self.shared)
        if is_filling():  # what goes into slabs does not come by watch_sharing
            feeding.tensors = _tensors(self.message)[0]
        return _arrived, (_Arriving(self.shared.loader, *self.about), tuple(self.message))


class _Arriving:
    """Pickled in front of the data, so that its function is called before the data are rebuilt."""

    def __init__(self, *about: int) -> None:
        self.about = about

    def __reduce__(self) -> tuple[Any, ...]:
        return _arriving, self.about


class SentResume(About):
    """A worker's acknowledgement of a new epoch, with the worker's number, which torch's message lacks."""

    def __init__(self, message: tuple[Any, ...], loader: int, worker: int) -> None:
        super().__init__(message, -1, worker)
        self.loader = loader

    def __reduce__(self) -> tuple[Any, ...]:
        super().__reduce__()
        return _resumed, (self.loader, *self.about, tuple(self.message))


reading = threading.local()
"""The message that this thread rebuilds: `about` (loader, task, worker), `begun`, and `size`, its bytes."""


def _arriving(loader: int, task: int, worker: int) -> tuple[int, int, int]:
    about = reading.about = (loader, task, worker)
    reading.begun = True
    emit_mapped(task)
    emit_of(loader)(ev.RESULT_REBUILD[0], task, worker, getattr(reading, "size", 0))
    return about


def _arrived(about: tuple[int, int, int], message: tuple[Any, ...]) -> tuple[Any, ...]:
    end_rebuild(*_tensors(message))
    return message


def _resumed(loader: int, task: int, worker: int, message: tuple[Any, ...]) -> tuple[Any, ...]:
    reading.about, reading.begun = (loader, task, worker), False
    return message


def end_rebuild(tensors: int = 0, shared: int = 0) -> None:
    if getattr(reading, "begun", False):
        reading.begun = False
        emit_of(reading.about[0])(ev.RESULT_REBUILD[1], *reading.about[1:], tensors, shared)


@harmless((0, 0))
def _tensors(data: Any) -> tuple[int, int]:
    """Return the number of tensors in a nest of lists, tuples and mappings, and their storages' bytes."""
    return _tensors_in(data)


def _tensors_in(data: Any) -> tuple[int, int]:
    if isinstance(data, torch.Tensor):
        return 1, data.untyped_storage().nbytes() if data.layout is torch.strided else 0
    if isinstance(data, dict):
        data = list(data.values())
    if not isinstance(data, (list, tuple)):
        return 0, 0
    counts = [_tensors_in(item) for item in data]
    return sum(count for count, _ in counts), sum(size for _, size in counts)


def _begin_pickling(about: tuple[int, int], shared: Shared) -> None:
    feeding.about, feeding.emit, feeding.clock = about, shared.emit, shared.cpu
    feeding.pickling, feeding.tensors, feeding.copied = True, 0, 0
    feeding.emit(ev.RESULT_PICKLE[0], *about)
    feeding.began = feeding.clock()


def end_pickling(size: int) -> None:
    """Emit that the message is pickled, or could not be (size 0)."""
    if getattr(feeding, "pickling", False):
        feeding.pickling = False
        feeding.cpu = spent(feeding.began, feeding.clock())
        feeding.emit(ev.RESULT_PICKLE[1], *feeding.about, size, feeding.tensors, feeding.copied)


def watch_sharing() -> None:
    """Count, in a worker, each storage that is pickled; emit the copy of one that is not in shared memory yet."""
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(torch.UntypedStorage, name, _watched_sharing(getattr(torch.UntypedStorage, name)))


def _watched_sharing(share: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(share)
    def watched(storage: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(feeding, "pickling", False):
            return share(storage, *args, **kwargs)
        feeding.tensors += not is_filling()
        if storage.is_shared():
            return share(storage, *args, **kwargs)
        size = storage.nbytes()
        feeding.copied += size
        with spanned(feeding.emit, ev.SHM_COPY, *feeding.about, size, ev.Place.FEEDER, ev.Reason.NOT_SHARED_YET) as end:
            end.append(size)
            began = feeding.clock()
            shared = share(storage, *args, **kwargs)
            end.append(spent(began, feeding.clock()))
            return shared

    return watched


# --- Queues, the done event, processes --------------------------------------------------------------------------------
class ObservedShared(Shared):
    """State that the observed objects of one of torch's iterators share."""

    loader_side: ObservedLoader
    worker_side: ObservedWorker | None = None  # None in the loader's process
    with_state = False
    """A task is (idx, (index, ...)), a result (idx, (data, ...)), as of torchdata's StatefulDataLoader."""

    def fall_silent(self) -> None:
        """In a forked child that has inherited the iterator, and is none of its workers: it is the parent's."""
        self.emit = no_emit

    def content(self, message: tuple[Any, ...]) -> Any:
        """The indices of a task, or the data of a result."""
        return message[1][0] if self.with_state else message[1]


@harmless(None)
def _inherit() -> None:
    for shared in tuple(live):
        if isinstance(shared, ObservedShared):
            shared.fall_silent()


os.register_at_fork(after_in_child=_inherit)


class _ObservedQueue(TracedQueue):
    """The common part of both queues."""

    shared: ObservedShared
    _watched_by = 0  # pid: a forked child's queue has new pipe methods

    def _watch(self) -> None:
        if self._watched_by != os.getpid():
            self._watched_by = os.getpid()
            self._hook()

    # The queue refers to the functions of these two, so they must not refer to it: torch's result queue is closed when
    # its last reference is dropped.
    def _watched_send(self, send: Callable[[Any], None], write: tuple[int, int]) -> Callable[[Any], None]:
        emit = self.shared.emit

        def _send_bytes(data: Any) -> None:
            end_pickling(len(data))
            about = getattr(feeding, "about", UNKNOWN)
            emit(write[0], *about, len(data), getattr(feeding, "cpu", 0))
            send(data)
            emit(write[1], *about, len(data))

        return _send_bytes

    def _watched_receive(self, receive: Callable[[], bytes]) -> Callable[[], bytes]:
        emit = self.shared.emit

        def _recv_bytes() -> bytes:
            data = receive()
            reading.size = len(data)
            forget_mapped()
            emit(ev.RESULT_READ, -1, -1, len(data))
            return data

        return _recv_bytes


def _is_pair(message: Any) -> bool:
    """Tell whether a message has the form of torch's results."""
    return isinstance(message, tuple) and len(message) == 2


def _is_numbered(message: Any) -> bool:
    """Whether it is a task or a result, and not another message of torch's or of a subclass."""
    return _is_pair(message) and isinstance(message[0], int)


class ObservedIndexQueue(_ObservedQueue, TracedIndexQueue):
    """An index queue: the loader puts (task, indices), None or a new epoch's message; one worker gets."""

    shared: ObservedShared

    def put(self, message: Any, *args: Any, **kwargs: Any) -> None:
        self._watch()
        loader = self.shared.loader_side
        if _is_numbered(message):
            idx = message[0]
            loader.sending(idx, self.worker_id, self.shared.content(message))
            self.inner.put(About(message, idx, self.worker_id), *args, **kwargs)
            loader.sent()
            return
        if message is None:
            loader.sending_sentinel(self.worker_id)
            self.shared.emit(ev.SENTINEL_PUT, -1, self.worker_id, self.queue_id)
        elif isinstance(message, _ResumeIteration):
            loader.resuming(self.worker_id)
        self.inner.put(About(message, -1, self.worker_id), *args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        self._watch()
        worker = self.shared.worker_side
        if worker is None:
            return self.inner.get(*args, **kwargs)
        worker.asks()
        self.shared.emit(ev.INDEX_GET[0], -1, self.worker_id)
        try:
            message = self.inner.get(*args, **kwargs)
        except BaseException:
            self.shared.emit(ev.INDEX_GET[1], -1, self.worker_id, ev.Message.EMPTY)
            raise
        if _is_numbered(message):
            worker.task = idx, index = message[0], self.shared.content(message)
            self.shared.emit(ev.INDEX_GET[1], idx, self.worker_id, ev.Message.TASK, count(index))
        elif message is None:
            worker.has_sentinel = True
            self.shared.emit(ev.INDEX_GET[1], -1, self.worker_id, ev.Message.SENTINEL)
            self.shared.emit(ev.SENTINEL_GET, -1, self.worker_id, self.queue_id)
        elif isinstance(message, _ResumeIteration):
            self.shared.emit(ev.INDEX_GET[1], -1, self.worker_id, ev.Message.RESUME)
        else:  # a message of a subclass
            self.shared.emit(ev.INDEX_GET[1], -1, self.worker_id, ev.Message.EMPTY)
        return message


class ObservedResultQueue(_ObservedQueue, TracedResultQueue):
    """The result queue: each worker puts (task, data); the loader or torch's pin thread gets."""

    shared: ObservedShared

    def _hook(self) -> None:
        super()._hook()
        give_up, number = getattr(self.inner, "_on_queue_feeder_error", None), self.shared.loader
        if give_up is None:  # the loader's end of an arena writes nothing
            return

        def on_error(error: Exception, message: Any) -> None:
            pickling = getattr(feeding, "pickling", False)
            end_pickling(0)
            if pickling:  # else the pipe is gone
                emit_failed(error, number, *feeding.about)
            give_up(error, getattr(message, "message", message))

        self.inner._on_queue_feeder_error = on_error

    def put(self, message: Any, *args: Any, **kwargs: Any) -> None:
        self._watch()
        worker = self.shared.worker_side
        if worker is None:  # the loader has stopped the pin thread, wakes it and then joins it
            self.shared.loader_side.begin_shutdown()
            self.shared.emit(ev.DONE_EVENT_SET, x=ev.DoneEvent.PIN_THREAD)
            self.shared.emit(ev.SENTINEL_PUT, -1, -1, self.queue_id)
            self.inner.put(About(message, -1, -1), *args, **kwargs)
            self.shared.emit(ev.JOIN[0], x=ev.Actor.PIN_THREAD)
            self.joining = True
        elif _is_numbered(message):
            worker.answers(message[0], self.shared.content(message))
            self.inner.put(SentResult(self.shared, message, message[0], worker.worker_id), *args, **kwargs)
        elif _is_pair(message) and isinstance(message[0], _ResumeIteration):
            worker.resumes()
            self.inner.put(SentResume(message, self.shared.loader, worker.worker_id), *args, **kwargs)
        else:
            self.inner.put(About(message, -1, worker.worker_id), *args, **kwargs)

    joining = False

    def cancel_join_thread(self) -> None:
        if self.joining:
            self.joining = False
            self.shared.emit(ev.JOIN[1], x=ev.Actor.PIN_THREAD, y=1)
        super().cancel_join_thread()

    def get(self, *args: Any, **kwargs: Any) -> Any:
        self._watch()
        loader, seconds = self.shared.loader_side, kwargs.get("timeout") or 0
        task, worker = loader.waits()
        self.shared.emit(ev.RESULT_GET[0], task, worker, int(seconds * 1e9))
        began = time.monotonic()
        reading.about = (self.shared.loader, -1, -1)
        try:
            message = self.inner.get(*args, **kwargs)
        except BaseException as error:
            # A worker that dies resets its socket and then sends SIGCHLD, for which torch's handler raises anywhere.
            blocked = False
            try:
                blocked = signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # it may raise
            finally:
                self._got_nothing(error, worker, time.monotonic() - began)
                if not blocked:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            raise
        if _is_pair(message):
            self._got(message, reading.about[2])
        return message

    def _got_nothing(self, error: BaseException, worker: int, seconds: float) -> None:
        if getattr(reading, "begun", False) and isinstance(error, Exception):
            emit_failed(error, *reading.about)
        end_rebuild()
        self.shared.emit(ev.RESULT_GET[1], -1, worker, ev.Message.EMPTY)
        self.shared.loader_side.got_nothing(seconds, error)

    def _got(self, message: tuple[Any, Any], worker: int) -> None:
        idx = message[0]
        if _is_numbered(message):
            outcome = outcome_of_torch(self.shared.content(message))
            self.shared.emit(ev.RESULT_GET[1], idx, worker, ev.Message.RESULT, outcome)
            self.shared.loader_side.received(idx, worker, outcome)
        elif isinstance(idx, _ResumeIteration):
            self.shared.emit(ev.RESULT_GET[1], -1, worker, ev.Message.RESUME)
        elif idx is None:
            self.shared.emit(ev.RESULT_GET[1], -1, -1, ev.Message.SENTINEL)
            self.shared.emit(ev.SENTINEL_GET, -1, -1, self.queue_id)
        else:  # a message of a subclass
            self.shared.emit(ev.RESULT_GET[1], -1, worker, ev.Message.EMPTY)


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
