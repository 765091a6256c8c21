"""Traced messages, queues, done events, and handles of processes and threads.

Each is a proxy that emits and passes the call on, or a message that emits while it is pickled and rebuilt. Stamped
before a put and after a get.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final

import torch
import torch._utils
from torch.utils.data._utils.worker import _IterableDatasetStopIteration

from minidl.arena.arena_queue import ArenaWriter
from minidl.loader.ports import WhichQueue
from minidl.record.cpu_time import Reader, cpu_clock, run_delay, spent
from minidl.record.indices import count
from minidl.record.recorder import active, emit_of, spanned
from minidl.record.shared import Shared
from minidl.record.slabs import TracedArena, emit_mapped, forget_mapped
from minidl.tracefile import events as ev
from minidl.wire.errors import ExceptionWrapper
from minidl.wire.message import Envelope, rebuild
from minidl.wire.messages import RebuildFailure, Result, ResumeIteration, Sentinel, Task, WorkerExhausted
from minidl.wire.tensors import Reduced, TensorPickler

# Constants, because Python 3.11 calls a function to look up a member of an enumeration.
_DATA = ev.Outcome.DATA
_EMPTY, _TASK, _RESULT, _RESUME, _SENTINEL = ev.Message

# --- Messages ---------------------------------------------------------------------------------------------------------


feeding = threading.local()
"""The message that this thread has pickled last, and writes next: `about`, its task and worker; `emit`, its loader's;
`clock`, of CPU time; and `cpu`, what its pickling took. One thread may write the queues of several loaders, so every
message says all that when it is pickled, and none is taken for the one before it."""

UNKNOWN = -1, -1
"""About a message of a queue that pickles it in another way."""


class About:
    """A message that says what it is about when it is pickled; the other side gets the message itself."""

    def __init__(self, message: Any, task: int, worker: int) -> None:
        self.message = message
        self.about = task, worker

    def __reduce__(self) -> tuple[Any, ...]:
        feeding.about, feeding.cpu = self.about, 0
        return as_it_is, (self.message,)


def as_it_is(message: Any) -> Any:
    """Called by the unpickler of the other side."""
    return message


def copied(make: Callable[..., Any], storage: Any, *args: Any, **kwargs: Any) -> Any:
    """Copy a storage of the message into shared memory by `make`, and emit that."""
    emit, about, clock, size = feeding.emit, feeding.about, feeding.clock, storage.nbytes()
    with spanned(emit, ev.SHM_COPY, *about, size, ev.Place.FEEDER, ev.Reason.NOT_SHARED_YET) as end:
        end.append(size)
        began = clock()
        made = make(storage, *args, **kwargs)
        end.append(spent(began, clock()))
        return made


class TracedPickler(TensorPickler):
    """Emits the copies into shared memory that happen while a message is pickled."""

    def copy_storage(self, storage: torch.UntypedStorage) -> Reduced:
        reduced: Reduced = copied(super().copy_storage, storage)
        return reduced


class TracedEnvelope(Envelope):
    """An envelope that emits a result's pickling and its rebuilding.

    The feeder thread pickles; the reading thread rebuilds.
    """

    pickler = TracedPickler

    def __init__(self, message: Task | Result, loader: int, cpu: Reader) -> None:
        self.message = message
        self.loader = loader
        self.cpu = cpu

    def __reduce__(self) -> tuple[Any, ...]:
        message = self.message
        about = feeding.about = (message.idx, message.worker_id)
        emit = feeding.emit = emit_of(self.loader)
        clock = feeding.clock = self.cpu
        feeding.cpu = 0
        if isinstance(message, Task):
            return super().__reduce__()
        emit(ev.RESULT_PICKLE[0], *about)
        began = clock()
        payload, pickler = self.payload()
        feeding.cpu = spent(began, clock())
        emit(ev.RESULT_PICKLE[1], *about, len(payload), pickler.tensors, pickler.copied_bytes)
        return load_result, (self.loader, *about, payload, pickler.tensors, pickler.shared_bytes, message.state)

    def instead_of(self, data: Any, error: BaseException) -> ExceptionWrapper:
        sent = super().instead_of(data, error)
        if not isinstance(data, ExceptionWrapper):  # else the task's error is in the trace already
            emit_failed(error, self.loader, self.message.idx, self.message.worker_id)
        return sent


def emit_failed(error: BaseException, loader: int, task: int, worker: int) -> None:
    """Emit that a task has failed on its way: what it is about could not be pickled, rebuilt or pinned."""
    recording = active()
    if recording is not None:
        last_line = traceback.format_exception_only(type(error), error)[-1].strip()
        emit_of(loader)(ev.TASK_ERROR, task, worker, -1, -1, recording.string(last_line[:1000]))


def load_result(
    loader: int,
    idx: int,
    worker_id: int,
    payload: bytes,
    tensors: int,
    shared_bytes: int,
    state: tuple[int, bytes] | None = None,
) -> Result:
    """Rebuild a result, as `wire.message.load_result` does, with its events."""
    emit, recording = emit_of(loader), active()
    how = 0 if recording is None else recording.config.cpu_time
    clock, delay = cpu_clock(how), run_delay(how)
    emit_mapped(idx)
    emit(ev.RESULT_REBUILD[0], idx, worker_id, len(payload))
    delayed, began = delay(), clock()
    try:
        data = rebuild(payload)
        if type(data) is RebuildFailure:
            emit_failed(data.error, loader, idx, worker_id)
        return Result(idx, worker_id, data, state)
    finally:  # a Ctrl-C may come while it is rebuilt
        emit(ev.RESULT_REBUILD[1], idx, worker_id, tensors, shared_bytes, spent(began, clock()))
        rebuilding.waited = spent(delayed, delay())


rebuilding = threading.local()
"""Of the result that this thread has rebuilt since it began to get a message: `waited`, its `rebuild_wait`."""

_OUTCOMES: Final[dict[type, ev.Outcome]] = {
    **dict.fromkeys((ExceptionWrapper, RebuildFailure, torch._utils.ExceptionWrapper), ev.Outcome.ERROR),
    **dict.fromkeys((WorkerExhausted, _IterableDatasetStopIteration), ev.Outcome.EXHAUSTED),
}
"""Of minidl's messages and of torch's; all else is data."""


def outcome_of(data: Any) -> ev.Outcome:
    return _OUTCOMES.get(type(data), _DATA)


# --- Queues, events, processes, threads -------------------------------------------------------------------------------


_this_process = object()
"""Another object in each forked child. It is compared for each message; os.getpid() would cost four times as much."""


def _after_fork() -> None:
    global _this_process
    _this_process = object()


os.register_at_fork(after_in_child=_after_fork)


class Proxy:
    """A wrapper that passes on all that it does not trace. Pickled as the wrapped object and `shared`."""

    def __init__(self, shared: Shared, inner: Any) -> None:
        self.shared = shared
        self.inner = inner

    def seen_by(self, shared: Shared) -> Proxy:
        """The same object as another thread uses it."""
        other = copy.copy(self)
        other.shared = shared
        return other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of iterator {self.shared.loader}: {self.inner!r}>"


class TracedQueue(Proxy):
    """A queue of one of the three kinds."""

    queue_id: ev.QueueId
    get_span: tuple[int, int]
    write: tuple[int, int] | None = None
    resume: int | None = None  # the event of a new epoch's message
    _followed_in: object = None  # the process: a forked child's queue has new pipe methods

    def __init__(self, shared: Shared, inner: Any, worker_id: int = -1) -> None:
        super().__init__(shared, inner)
        self.worker_id = worker_id

    def __repr__(self) -> str:
        worker = f" of worker {self.worker_id}" if self.worker_id >= 0 else ""
        return f"<traced {self.queue_id.name.lower()} queue{worker}, iterator {self.shared.loader}: {self.inner!r}>"

    def _follow_pipe(self) -> None:
        """Trace the queue's pipe. Must be called before the feeder thread starts."""
        self._followed_in = _this_process
        send, receive = getattr(self.inner, "_send_bytes", None), getattr(self.inner, "_recv_bytes", None)
        if send is not None and self.write is not None:
            self.inner._send_bytes = self._watched_send(send, self.write)
        if receive is not None and self.queue_id is ev.QueueId.RESULT:
            self.inner._recv_bytes = self._watched_receive(receive)

    # The functions of these two must not refer to the queue, which refers to them: its descriptors would stay open
    # until the collector runs.
    def _watched_send(self, send: Callable[[Any], None], write: tuple[int, int]) -> Callable[[Any], None]:
        emit, clock = self.shared.emit, self.shared.cpu

        def _send_bytes(data: Any) -> None:
            about = getattr(feeding, "about", UNKNOWN)
            emit(write[0], *about, len(data), getattr(feeding, "cpu", 0))
            began = clock()
            try:
                send(data)
            finally:  # Ctrl-C may come in the loader's own thread, which goes on with sentinels for the workers
                emit(write[1], *about, len(data), spent(began, clock()))

        return _send_bytes

    def _watched_receive(self, receive: Callable[[], bytes]) -> Callable[[], bytes]:
        emit = self.shared.emit

        def _recv_bytes() -> bytes:
            data = receive()
            emit(ev.RESULT_READ, -1, -1, len(data))
            return data

        return _recv_bytes

    def enter_worker(self) -> None:
        """This process is the worker that writes to the queue."""
        if isinstance(self.inner, ArenaWriter):
            self.inner.enter_worker(functools.partial(TracedArena, self.shared, self.inner.worker_id))
        else:
            self.inner.enter_worker()

    def writer(self, worker_id: int) -> TracedQueue:
        """What a worker writes to, traced."""
        inner = self.inner.writer(worker_id)
        return self if inner is self.inner else type(self)(self.shared, inner)

    def put(self, message: Any) -> None:
        if self._followed_in is not _this_process:
            self._follow_pipe()
        self.emit_put(message)
        if self.write is not None and not isinstance(message, Envelope):
            message = self.labelled(message)
        self.inner.put(message)

    def labelled(self, message: Any) -> About:
        """A message that has no envelope, so that it says what it is about when it is pickled."""
        return About(message, -1, max(self.worker_id, getattr(message, "worker_id", -1)))

    def emit_put(self, message: Any) -> None:
        """Emit that `message` is about to enter the queue."""
        if isinstance(message, Sentinel):
            self.shared.emit(ev.SENTINEL_PUT, -1, self.worker_id, self.queue_id)
        elif isinstance(message, ResumeIteration) and self.resume is not None:
            self.shared.emit(self.resume, -1, message.worker_id, message.epoch)

    def get(self, timeout: float | None = None, **more: Any) -> Any:
        """Get a message, in a span whose end names it. more: "inbox" of minidl's queues, "block" of Python's."""
        if self._followed_in is not _this_process:
            self._follow_pipe()
        forget_mapped()
        rebuilding.waited = 0
        self.shared.emit_pauses(self.worker_id)
        task, worker = self.wanted()
        self.shared.emit(self.get_span[0], task, worker, 0 if timeout is None else int(timeout * 1e9))
        try:
            message = self.inner.get(timeout=timeout, **more)
        except BaseException as error:
            if inbox := more.get("inbox"):  # a signal's handler has raised after the message was taken
                self.emit_got(inbox[-1])
            else:
                self.emit_nothing(worker, error)
            raise
        self.emit_got(message)
        return message

    def emit_nothing(self, worker: int, error: BaseException | None = None) -> None:
        """Emit the end of a get without a message."""
        self.shared.emit(self.get_span[1], -1, worker, _EMPTY)

    def wanted(self) -> tuple[int, int]:
        """Return the task and the worker that the loader needs next."""
        dispatcher = self.shared.dispatcher
        info = None if dispatcher is None else dispatcher.task_info.get(dispatcher.rcvd_idx)
        return (-1, -1) if info is None or dispatcher is None else (dispatcher.rcvd_idx, info.worker_id)

    def emit_got(self, message: Any) -> None:
        """Emit the end of the get."""
        end = self.get_span[1]
        if isinstance(message, Result):
            outcome = _OUTCOMES.get(type(message.data), _DATA)  # once a batch: without a call of ours
            self.shared.emit(end, message.idx, message.worker_id, _RESULT, outcome, rebuilding.waited)
        elif isinstance(message, ResumeIteration):
            self.shared.emit(end, -1, message.worker_id, _RESUME)
        else:
            self.shared.emit(end, -1, self.worker_id, _SENTINEL)
            self.shared.emit(ev.SENTINEL_GET, -1, self.worker_id, self.queue_id)

    def cancel_join_thread(self) -> None:
        self.shared.emit(ev.CANCEL_JOIN_THREAD, -1, self.worker_id, self.queue_id)
        self.inner.cancel_join_thread()

    def close(self) -> None:
        self.shared.emit(ev.QUEUE_CLOSE, -1, self.worker_id, self.queue_id)
        self.inner.close()


class TracedIndexQueue(TracedQueue):
    """A worker's index queue: the loader puts, the worker gets."""

    queue_id = ev.QueueId.INDEX
    get_span = ev.INDEX_GET
    write = ev.INDEX_WRITE
    resume = ev.RESUME_PUT

    def emit_put(self, message: Any) -> None:
        if isinstance(message, Envelope):
            task: Any = message.message
            self.shared.emit(ev.INDEX_PUT, task.idx, task.worker_id, count(task.index))
        else:
            super().emit_put(message)

    def wanted(self) -> tuple[int, int]:
        return -1, self.worker_id

    def emit_got(self, message: Any) -> None:
        if isinstance(message, Task):
            self.shared.received = message.idx
            self.shared.emit(ev.INDEX_GET[1], message.idx, self.worker_id, _TASK, count(message.index))
        else:
            super().emit_got(message)


class TracedResultQueue(TracedQueue):
    """The result queue: each worker puts; the loader or the pin thread gets."""

    queue_id = ev.QueueId.RESULT
    get_span = ev.RESULT_GET
    write = ev.RESULT_WRITE
    resume = ev.RESUME_ACK

    def emit_put(self, message: Any) -> None:
        if isinstance(message, Envelope):
            result: Any = message.message
            if result.state is not None:
                number, state = result.state
                self.shared.emit(ev.STATE_PUT, result.idx, result.worker_id, len(state), number)
            self.shared.emit(ev.RESULT_PUT, result.idx, result.worker_id, outcome_of(result.data))
        else:
            super().emit_put(message)

    def wanted(self) -> tuple[int, int]:
        return (-1, -1) if self.shared.pinned else TracedQueue.wanted(self)  # the pin thread takes what comes


class TracedReadyQueue(TracedQueue):
    """The ready queue: the pin thread puts, the loader gets."""

    queue_id = ev.QueueId.READY
    get_span = ev.READY_GET

    def emit_put(self, message: Any) -> None:
        if isinstance(message, Result):
            self.shared.emit(ev.READY_PUT, message.idx, message.worker_id, outcome_of(message.data))
        else:
            super().emit_put(message)


TRACED_QUEUES: dict[WhichQueue, type[TracedQueue]] = {
    "index": TracedIndexQueue,
    "result": TracedResultQueue,
    "ready": TracedReadyQueue,
}


class TracedDoneEvent(Proxy):
    """A done event."""

    def __init__(self, shared: Shared, inner: Any, which: ev.DoneEvent) -> None:
        super().__init__(shared, inner)
        self.which = which

    def set(self) -> None:
        self.shared.emit(ev.DONE_EVENT_SET, x=self.which)
        self.inner.set()


class TracedProcess(Proxy):
    """The handle of a worker's process."""

    def __init__(self, shared: Shared, inner: Any, worker_id: int) -> None:
        super().__init__(shared, inner)
        self.worker_id = worker_id
        self.gone = False

    def start(self) -> None:
        chosen = getattr(self.inner, "_start_method", None)  # None: the program's default
        self.shared.describe_start(chosen or multiprocessing.get_start_method(), self.worker_id)
        with spanned(self.shared.emit, ev.WORKER_START, -1, self.worker_id) as end:
            self.inner.start()
            end.append(self.inner.pid)

    def join(self, timeout: float | None = None) -> None:
        _join(self, self.worker_id, ev.Actor.WORKER, timeout)

    def terminate(self) -> None:
        self.shared.emit(ev.TERMINATE, -1, self.worker_id, self.inner.pid, signal.SIGTERM)
        self.inner.terminate()

    def kill(self) -> None:
        self.shared.emit(ev.TERMINATE, -1, self.worker_id, self.inner.pid, signal.SIGKILL)
        self.inner.kill()

    def emit_gone(self) -> bool:
        """Emit, once, how the process ended; return whether it still runs."""
        if self.inner.pid is None or self.gone:
            return False
        code = self.inner.exitcode
        if code is not None:
            self.gone = True
            self.shared.emit(ev.WORKER_GONE, -1, self.worker_id, self.inner.pid, code)
        return code is None


class TracedThread(Proxy):
    """The pin-memory thread's handle."""

    def join(self, timeout: float | None = None) -> None:
        _join(self, -1, ev.Actor.PIN_THREAD, timeout)


def _join(handle: Proxy, worker_id: int, actor: ev.Actor, timeout: float | None) -> None:
    """Join a process or a thread in a span, whose end says whether it has ended."""
    nanoseconds = int((timeout or 0) * 1e9)
    with spanned(handle.shared.emit, ev.JOIN, -1, worker_id, actor, nanoseconds) as end:
        end += actor, 0
        handle.inner.join(timeout)
        end[1] = int(not handle.inner.is_alive())
