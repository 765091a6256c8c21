"""Guards around torch's own DataLoader, put on from outside: `minidl.harden()`.

Interface: `harden(without=...)` guards each iterator with workers that begins from now on. It returns `Hardened`, which
says what is guarded and what is out of reach; `Hardened.undo()` takes the guards away. A guard has the name of the
finding that it answers: docs/findings/NAME shows what happens without it.

Rules of use: torch's classes stay, and decide as before. An iterator gets a multiprocessing context whose queues, event
and processes are guarded, and five of its methods are wrapped. Workers started by spawn unpickle the guarded things, so
they are guarded, too. torch's `__init__` of an iterator, and the first `_reset` that it calls, see a view of the
loader: `type(loader) is DataLoader` is false there. Nothing here changes which batches come, or in which order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing.context
import os
import pickle
import select
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing import popen_spawn_posix, queues
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils
from torch.utils.data._utils.worker import _ResumeIteration
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as _Iterator

from minidl.loader.worker import ManagerWatchdog, _end_orphan
from minidl.record.harmless import WithContext
from minidl.wire.queues import SharedFlag, _Incoming, _let_go

GUARDS: Final = {
    "unpicklable-batch": "a batch that cannot be pickled is raised as its error",
    "unwritable-task": "indices that cannot be pickled are raised as an error of their batch",
    "unreadable-batch": "a batch that cannot be unpickled is raised as its error, and the next ones follow",
    "torn-result": "a timeout, and a look at the workers, also come in the middle of a result",
    "torn-task": "a worker gives up a task of which its dead loader has written a part",
    "orphan-full-pipe": "a worker whose loader is gone ends, though its results fill the pipe",
    "orphan-in-sample": "a worker whose loader is gone ends, though its sample lasts",
    "done-event-lock": "a worker that is killed cannot keep the lock of the done event",
    "exhausted-worker": "a worker that was killed with the result pipe's lock after its stream had ended is found",
    "unkillable-worker": "a worker that SIGTERM does not end is killed",
    "joins-in-turn": "all workers are joined before one deadline",
    "pin-thread-join": "a pin thread that does not end is left behind after 5 s",
    "interrupted-shutdown": "the pin thread is told to leave, though an exception cuts the shutdown short",
    "exit-feeder": "Python exits without the pin thread's sentinel, if nobody can write it",
    "interrupted-epoch": "a worker's answer to an epoch whose beginning was interrupted is dropped",
    "spawn-import": "a spawned worker that dies before it has read its dataset raises an error",
}
"""Guard, named after its finding -> what it does."""

UNREACHABLE: Final = (
    "a batch that Ctrl-C loses in next() (lost-result): next() would have to be another",
    "iterators that have begun already, and those of classes that are not derived from torch's",
    "workers of a context that is none of multiprocessing's: they may be threads",
    "a worker that ignores SIGTERM, if the program exits while it holds the iterator: multiprocessing ends it then",
)
"""What no guard reaches."""

TORCH: Final = ((2, 11), (2, 15))
"""The first and the last version of torch whose loader these guards fit."""

INTERVAL: Final = 5.0
"""Seconds that a join lasts: torch's own MP_STATUS_CHECK_INTERVAL."""


# --- What travels -----------------------------------------------------------------------------------------------------
class _Sent(tuple[Any, Any]):
    """A task or a result, (idx, data), whose data is pickled apart, so that an error of pickle can take its place."""

    queue: _Queue

    def __reduce__(self) -> tuple[Any, ...]:
        (idx, data), guards, results = self, self.queue.guards, self.queue.results
        try:
            pickled = bytes(ForkingPickler.dumps(data))
        except Exception:
            if ("unpicklable-batch" if results else "unwritable-task") not in guards:
                raise
            error = data if isinstance(data, ExceptionWrapper) else _wrapped(idx, results)
            error.exc_type = RuntimeError  # the class itself can be what pickle refuses
            pickled = bytes(ForkingPickler.dumps(error if results else _Unsent(error)))
        return _rebuilt, (idx, pickled, results and "unreadable-batch" in guards)


def _wrapped(idx: Any, result: bool) -> ExceptionWrapper:
    """The error that is handled, as torch sends one."""
    sent = f"the result of task {idx}" if result else f"task {idx}"
    return ExceptionWrapper(where=f"as {sent} cannot be sent to another process")  # type: ignore[no-untyped-call]


def _rebuilt(idx: Any, pickled: bytes, lenient: bool) -> tuple[Any, Any]:
    """Called by the reading side's unpickler."""
    try:
        return idx, pickle.loads(pickled)
    except Exception:
        if not lenient:
            raise
        return idx, ExceptionWrapper(where="while a batch was unpickled")  # type: ignore[no-untyped-call]


class _Unsent:
    """In place of a task's indices: whoever uses it gets the error."""

    def __init__(self, error: ExceptionWrapper) -> None:
        self.error = error

    def _raise(self, *_: Any) -> Any:
        self.error.reraise()  # type: ignore[no-untyped-call]

    __iter__ = __index__ = __len__ = __hash__ = __eq__ = __getitem__ = _raise


@dataclass(frozen=True)
class _Resume(_ResumeIteration):
    """The message that begins an epoch, with a number that its answer repeats."""

    number: int = 0


_numbers = itertools.count(1)


_PlainQueue: Any = queues.Queue  # its private parts are not in its type stub


class _Queue(_PlainQueue):  # type: ignore[misc]
    """A queue of an iterator: its results, or a worker's tasks. guards: those that it has."""

    def __init__(self, context: Any, guards: Collection[str], results: bool) -> None:
        self.guards, self.results = guards, results
        super().__init__(ctx=context)

    def __getstate__(self) -> Any:
        return self.guards, self.results, super().__getstate__()

    def __setstate__(self, state: Any) -> None:
        self.guards, self.results, rest = state
        super().__setstate__(rest)

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)
        _of_this_process.add(self)
        if ("torn-result" if self.results else "torn-task") in self.guards:
            self._incoming = _Incoming(self._reader)
            self._poll, self._recv_bytes = self._whole_message, self._take

    def _whole_message(self, timeout: float | None = 0.0) -> bool:
        """Whether a whole message is there within `timeout` seconds; a part of one is kept."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._incoming.whole:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._incoming.read(left):
                return False
        return True

    def _take(self) -> bytes:
        self._whole_message(None)
        message = bytes(self._incoming.message())
        self._incoming.drop()
        return message

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        if type(obj) is _ResumeIteration and "interrupted-epoch" in self.guards:
            obj = _Resume(obj.seed, next(_numbers))
        elif hasattr(obj, "message"):  # of an observed queue
            obj.message = self._sent(obj.message)
        super().put(self._sent(obj), block, timeout)

    def _sent(self, obj: Any) -> Any:
        """A task or a result so that it cannot get lost; anything else as it is."""
        if type(obj) is not tuple or not isinstance(obj[0], int):
            return obj
        sent = _Sent(obj)
        sent.queue = self
        return sent

    def jammed(self) -> bool:
        """Whether a process that writes nothing holds the writing end's lock: a live one lets go within a second."""
        try:
            return not self._wlock.acquire(timeout=1.0) and not self._reader.poll(0)
        finally:
            _let_go(self._wlock)


_of_this_process: weakref.WeakSet[_Queue] = weakref.WeakSet()


# --- Workers ----------------------------------------------------------------------------------------------------------
class _Deadline:
    """Of all joins of a shutdown: it begins with the first."""

    at: float | None = None

    def within(self, timeout: float) -> float:
        """What is left of the timeout."""
        self.at = time.monotonic() + timeout if self.at is None else self.at
        return max(0.0, self.at - time.monotonic())


class _GuardedWorker:
    """A worker's process. deadline: of the loader's joins, while it shuts down."""

    deadline: _Deadline | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.guards = _guards

    def run(self) -> None:
        """Run torch's loop; as an orphan, end."""
        watchdog = ManagerWatchdog()
        if "orphan-in-sample" in self.guards:
            threading.Thread(target=_end_orphan, args=(watchdog,), name="end_orphan", daemon=True).start()
        super().run()  # type: ignore[misc]
        if "orphan-full-pipe" in self.guards and not watchdog.is_alive():
            for each in _of_this_process:
                each.cancel_join_thread()

    def join(self, timeout: float | None = None) -> None:
        if timeout is not None and self.deadline is not None:
            timeout = self.deadline.within(timeout)
        super().join(timeout)  # type: ignore[misc]

    def terminate(self) -> None:
        self.deadline = None
        super().terminate()  # type: ignore[misc]


class _ForkWorker(_GuardedWorker, multiprocessing.context.ForkProcess): ...


class _SpawnWorker(_GuardedWorker, multiprocessing.context.SpawnProcess): ...


class _ForkServerWorker(_GuardedWorker, multiprocessing.context.ForkServerProcess): ...


_WORKERS: Final[dict[type, type[BaseProcess]]] = {
    multiprocessing.context.ForkContext: _ForkWorker,
    multiprocessing.context.SpawnContext: _SpawnWorker,
    multiprocessing.context.ForkServerContext: _ForkServerWorker,
}


class _ChildPipe:
    """In place of the file through which a spawned worker gets its arguments: a dead worker ends the write."""

    def __init__(self, pipe: int, pid: int) -> None:
        self.pipe, self.pid = pipe, pid

    def write(self, data: memoryview) -> None:
        os.set_blocking(self.pipe, False)
        room = select.poll()
        room.register(self.pipe, select.POLLOUT)
        while data:
            if room.poll(200):
                data = data[os.write(self.pipe, data) :]
            elif os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                raise BrokenPipeError(f"worker (pid {self.pid}) has ended before it had read its dataset")


def _open_child_pipe(pipe: int, mode: str, closefd: bool) -> Any:
    """What `Popen._launch` calls in place of `open`."""
    return contextlib.nullcontext(_ChildPipe(pipe, sys._getframe(1).f_locals["self"].pid))


# --- The context ------------------------------------------------------------------------------------------------------
class _Context:
    """An iterator's multiprocessing context. The first queue that it makes is that of the results."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._guards = _guards
        self._has_results = False
        self.Process = _WORKERS[type(plain)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def get_context(self) -> Any:
        return self

    def Queue(self) -> Any:  # noqa: N802
        results, self._has_results = not self._has_results, True
        return _Queue(self._plain, self._guards, results)

    def Event(self) -> Any:  # noqa: N802
        return SharedFlag() if "done-event-lock" in self._guards else self._plain.Event()


def _guarded(context: Any) -> Any:
    """The context that an iterator gets in place of its loader's; the same, if it is none of multiprocessing's."""
    observe = sys.modules.get("minidl.record.observe")
    if observe is not None and isinstance(context, observe.ObservedContext):
        return observe.ObservedContext(_guarded(context.chosen), context.trace, context.transport)
    plain = torch.multiprocessing if context is None else context
    if plain is torch.multiprocessing or isinstance(plain, multiprocessing.context.BaseContext):
        plain = plain.get_context()
    return _Context(plain) if type(plain) in _WORKERS else context


# --- The iterator -----------------------------------------------------------------------------------------------------
def _init(self: Any, plain: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
    plain(self, WithContext(loader, _guarded(loader.multiprocessing_context)), *args, **kwargs)
    thread = getattr(self, "_pin_memory_thread", None)
    if thread is not None and "pin-thread-join" in _guards:
        thread.join = functools.partial(_join_pin, thread.join)


def _join_pin(plain: Callable[..., None], timeout: float | None = None) -> None:
    plain(INTERVAL if timeout is None else timeout)
    if getattr(plain, "__self__").is_alive():  # noqa: B009
        warnings.warn("the pin thread has not ended; it is left behind", RuntimeWarning, stacklevel=2)


def _reset(self: Any, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    self._first_number = next(_numbers)
    plain(self, *args, **kwargs)


def _get_data(self: Any, plain: Callable[..., Any]) -> Any:
    data = plain(self)
    while type(data[0]) is _Resume and data[0].number < self._first_number:
        data = plain(self)
    return data


def _try_get_data(self: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = plain(self, *args, **kwargs)
    if not found[0] and "exhausted-worker" in _guards:
        pairs = zip(self._workers, self._workers_status, strict=True)
        dead = [str(each.pid) for each, active in pairs if not active and each.exitcode]
        if dead and getattr(self._worker_result_queue, "jammed", bool)():
            raise RuntimeError(f"DataLoader worker (pid(s) {', '.join(dead)}) exited unexpectedly after its data's end")
    return found


def _shutdown_workers(self: Any, plain: Callable[..., Any]) -> Any:
    # When a module's names are cleared at exit, `_utils` is None before any other that is used here.
    if _utils is None or _utils.python_exit_status is not False or getattr(self, "_shutdown", True):
        return plain(self)
    deadline = _Deadline() if "joins-in-turn" in _guards else None
    for worker in self._workers:
        worker.deadline = deadline
    try:
        plain(self)
    finally:
        pinned = hasattr(self, "_pin_memory_thread")
        if pinned and "interrupted-shutdown" in _guards:
            self._pin_memory_thread_done_event.set()
        if pinned and "exit-feeder" in _guards:
            self._worker_result_queue.cancel_join_thread()
        for worker in self._workers if "unkillable-worker" in _guards else ():
            if worker.is_alive():
                worker.kill()
                worker.join(INTERVAL)


_INNER: Final = (_reset, _get_data, _try_get_data, _shutdown_workers)
_WRAPPED: Final[dict[str, Callable[..., Any]]] = {each.__name__: each for each in _INNER} | {"__init__": _init}
"""Method of torch's iterator -> what stands around it, and is called with the plain method."""


# --- harden() ---------------------------------------------------------------------------------------------------------
_guards: Mapping[str, str] = {}
"""The guards that are on: those of the `Hardened` that was made last."""

_undo = contextlib.ExitStack()


@dataclass(frozen=True)
class Hardened:
    """What `harden` has done. guards, unreachable: what is guarded, and what no guard reaches, in words."""

    guards: dict[str, str]
    unreachable: tuple[str, ...] = UNREACHABLE

    def undo(self) -> None:
        """Take the guards away from iterators that begin from now on, unless a later `harden` did."""
        global _guards
        if _guards is self.guards:
            _guards = {}
            _undo.close()

    def __str__(self) -> str:
        has = [f"  {name}: {purpose}" for name, purpose in self.guards.items()]
        lacks = [f"  {text}" for text in self.unreachable]
        return "\n".join([f"torch's DataLoader has {len(has)} more guards:", *has, "out of reach:", *lacks])


def harden(without: str | Collection[str] = ()) -> Hardened:
    """Guard torch's own DataLoader, whose classes stay: iterators with workers that begin from now on.

    without: one name or several, from `GUARDS`, of guards to leave out. Calling it again replaces the guards. Returns
    what is guarded; print it to read it. Raises ValueError for an unknown name, RuntimeError for a torch whose loader
    it does not know.
    """
    global _guards
    without = {without} if isinstance(without, str) else set(without)
    if unknown := sorted(without - set(GUARDS)):
        raise ValueError(f"no guard is called {', '.join(unknown)}: the names are {', '.join(GUARDS)}")
    check_torch()
    hardened = Hardened({name: purpose for name, purpose in GUARDS.items() if name not in without})
    _undo.close()
    _guards = hardened.guards
    for name, around in _WRAPPED.items():
        plain = getattr(_Iterator, name)
        setattr(_Iterator, name, functools.partialmethod(around, plain))
        _undo.callback(setattr, _Iterator, name, plain)
    if "spawn-import" in _guards:
        spawning = vars(popen_spawn_posix)
        spawning["open"] = _open_child_pipe
        _undo.callback(spawning.pop, "open")
    return hardened


def check_torch() -> None:
    """Raise RuntimeError if the installed torch's loader is none that `harden` knows."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    lacks = [name for name in _WRAPPED if name not in vars(_Iterator)]
    if not TORCH[0] <= version <= TORCH[1] or lacks:
        first, last = (".".join(map(str, each)) for each in TORCH)
        reason = f"its iterator has no {', '.join(lacks)}" if lacks else f"it knows torch {first} to {last}"
        raise RuntimeError(f"minidl.harden() does not fit torch {torch.__version__}: {reason}. Nothing was changed")
