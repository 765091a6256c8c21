"""A queue and a flag that stay usable if a process dies while it uses them (article 4 §shutdown).

`multiprocessing.Queue` waits without a bound for the rest of a message that has begun: a writer that is killed in the
middle leaves its reader in a read that no timeout, done event or liveness check reaches. `BoundedQueue.get` also keeps
its timeout in the middle of a message. `multiprocessing.Event` holds a lock while a process reads it, and a killed
process never releases it; `SharedFlag` has no lock.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.queues
import operator
import os
import pickle
import queue
import select
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler as _ForkingPickler
from multiprocessing.synchronize import SemLock as _SemLock
from typing import Any

import torch

from minidl.live_repr import LiveRepr, counted
from minidl.wire import signal_handling
from minidl.wire.atomic import Step, at_once

_SIZE = struct.Struct("!i")  # how a Connection announces a message; -1: an 8-byte size follows
_LONG_SIZE = struct.Struct("!Q")

# Their private parts are not in their type stubs.
SemLock: Any = _SemLock
_Queue: Any = multiprocessing.queues.Queue


class NoThreadError(RuntimeError):
    """A message can't be written: no thread can be started for it, and writing it here could block."""


_PIECE = 65536
"""Bytes that are read at once: what a pipe holds."""

_TO_END = 0.2
"""Seconds that the feeder thread of a closed queue may take to end by itself."""


class _Incoming:
    """The bytes that were read from a pipe and not taken: a part of the next message, or that message and more."""

    def __init__(self, pipe: Connection) -> None:
        self._fd = pipe.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._bytes = bytearray()
        self._pieces: list[bytes] = []  # one at most: it was read, and is not in `_bytes` yet

    @property
    def whole(self) -> bool:
        """Whether the next message is here, which is the present one then; `_present`: where it begins and ends."""
        here, begin = len(self._bytes), _SIZE.size
        size = _SIZE.unpack_from(self._bytes)[0] if here >= begin else 0
        if size < 0:
            begin += _LONG_SIZE.size
            size = _LONG_SIZE.unpack_from(self._bytes, _SIZE.size)[0] if here >= begin else 0
        self._present = begin, begin + size
        return here >= begin + size

    @property
    def pending(self) -> int:
        """Bytes that have been read and not taken."""
        return len(self._bytes)

    def arriving(self) -> bool:
        """Whether there is something to read. Another thread may wait for it meanwhile, with its own poll object."""
        looking = select.poll()
        looking.register(self._fd, select.POLLIN)
        return bool(looking.poll(0))

    @signal_handling.wait
    def _wait(self, seconds: float | None) -> bool:
        signal_handling.raise_now()
        return bool(self._poll.poll(None if seconds is None else seconds * 1e3))

    def read(self, seconds: float | None) -> bool:
        """Wait for bytes and read some; False if none came. None: wait without a bound."""
        if not self._pieces:
            if not self._wait(seconds):
                return False
            most = max(_PIECE, self._present[1] - len(self._bytes))
            self._pieces.extend(map(os.read, (self._fd,), (most,)))  # read and stored in one step
        (piece,) = self._pieces
        at_once(partial(self._bytes.extend, piece), self._pieces.clear)
        if not piece:
            raise EOFError("every writer of the queue's pipe is gone")
        return True

    def message(self) -> memoryview:
        """The present message, which stays until `drop`."""
        begin, end = self._present
        return memoryview(self._bytes)[begin:end]

    def drop(self, *steps: Step) -> None:
        """Forget the present message, at once with `steps`: the next one may come."""
        at_once(partial(setattr, self, "_bytes", self._bytes[self._present[1] :]), *steps)


def start_tracker_apart() -> None:
    """Start the resource tracker of `multiprocessing`, if none runs, in a session of its own.

    Under spawn and forkserver semaphores have names under /dev/shm until `forget_names`. The tracker removes them if
    this process is killed before that. In this process's group it would be killed with it by a kill of the group.
    """

    def spawn(path: Any, arguments: list[str], *rest: Any) -> Any:
        if "resource_tracker" in arguments[-1]:
            arguments = [*arguments[:-1], f"import os; os.setsid(); {arguments[-1]}"]
        return original(path, arguments, *rest)

    private: Any = util
    original = private.spawnv_passfds
    private.spawnv_passfds = spawn
    try:
        resource_tracker.ensure_running()
    finally:
        private.spawnv_passfds = original


def _let_go(lock: Any) -> None:
    """Release a lock between processes if this thread has it: an exception may have come right after `acquire`."""
    if lock._semlock._is_mine():
        lock.release()


class _News:
    """Tells one thread that something has come; the thread then looks what is there, which may be nothing.

    A signal's handler that raises within `tell` may lose the news: the loader repeats a `put` that was interrupted.
    """

    def __init__(self) -> None:
        self._none = threading.Lock()  # taken by the one that waits; released as soon as there is news

    def tell(self) -> None:
        """There is news."""
        try:
            if self._none.locked():
                self._none.release()
        except RuntimeError as error:  # another thread or a handler has told meanwhile; or a handler raises
            if "unlocked" not in str(error):
                raise

    @signal_handling.wait
    def wait(self, seconds: float = -1) -> bool:
        """Wait for news, at most so long (-1 = without a bound); return whether there is any."""
        signal_handling.raise_now()
        return self._none.acquire(timeout=seconds)


class _NotEmpty:
    """A condition with one waiter, a queue's feeder thread, that an error or a handler's `put` in `put` leaves whole.

    `with` calls functions in C alone, so it never takes the lock without giving it back. A `threading.Condition` may.
    """

    __enter__ = property(operator.attrgetter("_lock.__enter__"))
    __exit__ = property(operator.attrgetter("_lock.__exit__"))

    def __init__(self) -> None:
        self._at_fork_reinit()

    def _at_fork_reinit(self) -> None:
        """Begin anew; in a forked child, another thread of the parent may have the lock."""
        self._lock, self._news = threading.RLock(), _News()
        self.acquire, self.release, self.notify = self._lock.acquire, self._lock.release, self._news.tell

    def wait(self) -> None:
        """Give the lock back, wait for news, take the lock."""
        self.release()
        self._news.wait()
        self.acquire()


class BoundedQueue(LiveRepr, _Queue):  # type: ignore[misc]
    """A multiprocessing queue with one reader, whose `get` keeps its timeout even in the middle of a message.

    The reader takes what is in the pipe, also of later messages. It keeps a part of a message, so that a writer that
    was only slow, or stopped, can complete it. The class uses private parts of its base class, which are the same in
    Python 3.10 to 3.14.
    """

    _thread: Any

    def __init__(self, context: Any) -> None:
        super().__init__(ctx=context.get_context())

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)
        if not after_fork:
            # A signal handler may interrupt a put and shut the loader down: its own put must not wait for the first.
            self._notempty = _NotEmpty()
        self._failure: Exception | None = None
        self._ends_process = self._let_go = False
        self._on_queue_feeder_error = partial(_not_written, weakref.ref(self))
        self._incoming = _Incoming(self._reader)
        self._recv_bytes = self._incoming.message

    def _phrases(self) -> Iterator[str]:
        if self._closed:
            yield "closed"
        else:
            yield counted(self.qsize(), "message")
            if self._incoming.pending:
                yield f"{self._incoming.pending} B of the next one read"
        if self._buffer:
            yield f"{len(self._buffer)} not written{'' if self._thread.is_alive() else ', no feeder thread'}"
        for name, lock in (("read", self._rlock), ("write", self._wlock)):
            if lock._semlock._is_zero():
                yield f"{name} lock held"

    def writer(self, worker_id: int) -> BoundedQueue:
        """What a worker gets to write to: all workers share one pipe."""
        return self

    def enter_worker(self) -> None:
        """This process is a worker: it ends if its feeder thread fails. Else the loader would wait for ever."""
        self._ends_process = True
        threading.excepthook = partial(self._end_with_feeder, threading.excepthook)

    def _end_with_feeder(self, hook: Callable[[Any], Any], about: Any) -> None:
        """threading.excepthook: call `hook`, the one before, and end the process if the thread is the feeder."""
        try:
            hook(about)
        finally:
            if about.thread is self._thread:
                sys.stderr.flush()
                os._exit(1)

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Hand a message to the feeder thread, which the first one starts.

        Since Python 3.12, a program that exits can start no thread. Then the calling thread writes the message. Raises
        NoThreadError if writing it could block.
        """
        try:
            if self._thread is not None:
                super().put(obj, block, timeout)
                return
            with signal_handling.put_off_all():
                super().put(obj, block, timeout)
        except RuntimeError as error:
            if "new thread" not in str(error):
                raise  # by the SIGCHLD handler, for example: the message may be on its way already
            self._thread = None
            written = False
            try:
                written = self._write(obj)
            finally:
                if not written:
                    self._sem.release()
            if not written:
                raise NoThreadError(str(error)) from error

    def _write(self, obj: Any) -> bool:
        """Write a message in the calling thread if that does not block; return whether it was written."""
        data = _ForkingPickler.dumps(obj)
        out = select.poll()
        out.register(self._writer.fileno(), select.POLLOUT)
        # A pipe takes at most PIPE_BUF bytes at once. The lock's holder may be dead, so the wait for it is bounded.
        try:
            if len(data) > select.PIPE_BUF - _SIZE.size or not self._wlock.acquire(timeout=1.0):
                return False
            there_is_room = bool(out.poll(0))
            if there_is_room:
                self._send_bytes(data)
            return there_is_room
        finally:
            _let_go(self._wlock)

    @property
    def failure(self) -> str:
        """Why a message was lost that this process has put; "" if none was."""
        if self._failure is not None:
            return f"{type(self._failure).__name__}: {self._failure}"
        ended = self._thread is not None and not self._thread.is_alive() and not self._closed
        return "the thread that writes it has ended" if ended else ""

    def get(self, block: bool = True, timeout: float | None = None, inbox: list[Any] | None = None) -> Any:
        """The next message. Raises queue.Empty if no whole one has come within `timeout` seconds.

        inbox: the message is put there in the step that takes it from the queue.
        """
        if self._closed:
            raise ValueError(f"Queue {self!r} is closed")
        seconds = timeout if block else 0.0
        deadline = None if seconds is None else time.monotonic() + seconds
        inbox = [] if inbox is None else inbox
        try:
            if not self._rlock._semlock._is_mine() and not self._rlock.acquire(block, seconds):
                raise queue.Empty
            while not self._incoming.whole:
                if not self._incoming.read(seconds if deadline is None else max(0.0, deadline - time.monotonic())):
                    raise queue.Empty
            message = pickle.loads(self._recv_bytes())
            self._incoming.drop(self._sem.release, partial(inbox.append, message))
        finally:
            _let_go(self._rlock)
        return inbox[-1]

    def close(self) -> None:
        """Close it; the feeder thread ends. It also does if a signal's handler raises here."""
        try:
            super().close()
        except BaseException:
            super().close()
            if self._thread is not None:
                self._finalize_close(self._buffer, self._notempty)
            raise

    def let_go(self) -> None:
        """All workers have ended: let the feeder thread of this process end, too, if it can't by itself.

        A worker that ended in the middle of a write holds the lock of the pipe's writing end forever, and nobody reads
        what fills the pipe of a worker that ended.
        """
        if self._thread in (None, threading.current_thread()) or not self._closed:
            return
        self._thread.join(timeout=_TO_END)
        if self._thread.is_alive():
            self._let_go = True
            self._close_pipe()
            if self._wlock._semlock._is_zero() and not self._wlock._semlock._count():
                self._wlock.release()

    def _close_pipe(self) -> None:
        """Close the pipe's reading end, and leave its descriptor to the feeder thread, which closes it."""
        with contextlib.suppress(OSError), open(os.devnull, "rb") as nothing:
            here = self._reader.fileno()
            if os.path.sameopenfile(here, self._writer.fileno()):  # both ends of a pipe are one file
                os.dup2(nothing.fileno(), here, inheritable=False)

    def forget_names(self) -> None:
        """Remove the names of the queue's semaphores under /dev/shm; called once every process has opened them.

        With spawn and forkserver they have names, which `multiprocessing` removes when this process or its resource
        tracker ends. A kill of the whole process group ends both at once, and nobody is left to do it.
        """
        names = {lock._semlock.name for lock in (self._rlock, self._wlock, self._sem)}
        for finalizer in tuple(util._finalizer_registry.values()):  # type: ignore[attr-defined]
            if finalizer._callback is SemLock._cleanup and finalizer._args[0] in names:
                finalizer()

    def jammed(self) -> bool:
        """Whether a process that writes nothing holds the lock of the pipe's writing end, which all writers share.

        Called after a worker's death: a live holder writes, or releases the lock within a second; a dead one does
        neither.
        """
        had = self._wlock._semlock._is_mine()
        try:
            return not self._wlock.acquire(timeout=1.0) and not self._incoming.arriving()
        finally:
            if not had:
                _let_go(self._wlock)


def _not_written(reference: Callable[[], BoundedQueue | None], error: Exception, message: Any) -> None:
    """Print why the feeder thread could not write a message, and end the process if it is a worker.

    An `Envelope` has sent what can be sent. What is left is a pipe that can't be written, or no memory for the bytes;
    the other side would wait for the message forever. The thread has this function, and a thread that had the queue
    would keep it: a queue that nobody refers to any more ends its thread.
    """
    queue = reference()
    if queue is not None and queue._let_go:
        return
    _Queue._on_queue_feeder_error(error, message)
    if queue is not None:
        queue._failure = error
        if queue._ends_process:
            sys.stderr.flush()
            os._exit(1)


class ReadyQueue(LiveRepr):
    """A queue between threads, of which one gets: the pin thread's output.

    A `queue.Queue` waits and takes in Python, where an error that a signal's handler raises can lose a message. And
    `queue.SimpleQueue` waits for ever once a handler has taken longer than what was left of its timeout.
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._news = _News()

    def put(self, message: Any) -> None:
        """Hand over a message."""
        self._messages.put(message)
        self._news.tell()

    def _phrases(self) -> Iterator[str]:
        yield counted(self._messages.qsize(), "message")

    def get(self, timeout: float | None = None, inbox: list[Any] | None = None) -> Any:
        """The next message. Raises queue.Empty if none comes within `timeout` seconds.

        inbox: the message is put there in the step that takes it from the queue.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self._messages.empty():
            if not self._news.wait(-1 if until is None else max(0.0, until - time.monotonic())):
                raise queue.Empty
        inbox = [] if inbox is None else inbox
        inbox.extend(map(self._messages.get, (False,)))  # taken and stored in one step
        return inbox[-1]


class SharedFlag(LiveRepr):
    """An event between processes that can be set and read, but not waited for: one byte in shared memory.

    It orders nothing else in memory: who reads it only ends.
    """

    def __init__(self) -> None:
        self._cell = torch.zeros(1, dtype=torch.uint8)
        self._cell.share_memory_()  # type: ignore[no-untyped-call]
        self._byte = self._view()

    def _view(self) -> memoryview:
        return memoryview(self._cell.numpy())  # type: ignore[arg-type]

    def __getstate__(self) -> torch.Tensor:
        return self._cell

    def __setstate__(self, cell: torch.Tensor) -> None:
        self._cell = cell
        self._byte = self._view()

    def _phrases(self) -> Iterator[str]:
        yield "set" if self.is_set() else "not set"

    def set(self) -> None:
        self._byte[0] = 1

    def is_set(self) -> bool:
        return self._byte[0] != 0
