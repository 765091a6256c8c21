"""How an iterator ends: the pin-memory thread first, then the workers, each for a bounded time, leftovers last.

`shut_down(iterator)` runs the steps in the order of `protocol.LOADER_TABLE`. It is called when the epoch is over, by
`close()`, when the iterator is garbage-collected, and (for persistent workers with a pin thread) when Python exits.
Article 4, shutdown; upstream: `_shutdown_workers` and the note above it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from minidl.messages import Sentinel
from minidl.ports import MP_STATUS_CHECK_INTERVAL
from minidl.protocol import LoaderEvent
from minidl.signals import _remove_worker_pids
from minidl.transport.queues import NoThreadError

if TYPE_CHECKING:
    from minidl.iterators import _MultiProcessingDataLoaderIter

python_exit_status: bool | None = False
"""Whether Python is exiting. Locks, threads and queues may be half gone then, so nothing is shut down by hand."""


def _set_python_exit_flag() -> None:
    global python_exit_status
    python_exit_status = True


atexit.register(_set_python_exit_flag)

_to_close_at_exit: weakref.WeakSet[_MultiProcessingDataLoaderIter] = weakref.WeakSet()


def close_at_exit(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Close this iterator when Python begins to exit, before daemonic workers are killed.

    For persistent workers with a pin-memory thread: killed workers could leave half a message for the thread to read.
    """
    if not _to_close_at_exit:
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # registered after, so it runs before, the exit flag is set
    _to_close_at_exit.add(iterator)


def _close_all() -> None:
    for iterator in tuple(_to_close_at_exit):
        iterator._shutdown_workers()


_held: dict[int, list[Any]] = {}  # an iterator's id -> its queues, until it is shut down


def hold(iterator: _MultiProcessingDataLoaderIter, queue: Any) -> None:
    """Keep a queue in working order until the iterator is shut down.

    An iterator may be collected as part of a reference cycle, as a caught exception easily makes one. Everything in
    the cycle is then ended in no certain order: the queue's feeder thread, or its pipe, might be gone when `__del__`
    sends the sentinel, and the worker would be waited for in vain and killed.
    """
    _held.setdefault(id(iterator), []).append(queue)


def shut_down(iterator: _MultiProcessingDataLoaderIter) -> None:
    """End the pin thread, the workers and the queues. Does nothing twice, at Python's exit, or in a forked child."""
    lifecycle = getattr(iterator, "_lifecycle", None)  # absent where __init__ failed early
    if python_exit_status is not False or os.getpid() != iterator._pid or iterator._shutdown or lifecycle is None:
        return
    iterator._shutdown = True
    lifecycle.handle(LoaderEvent.SHUT_DOWN)
    try:
        stop_pin_memory_thread(iterator)
        lifecycle.handle(LoaderEvent.PIN_STOPPED)
        signal_workers(iterator)
        lifecycle.handle(LoaderEvent.SIGNALLED)
        join_workers(iterator)
        lifecycle.handle(LoaderEvent.JOINED)
    finally:
        end_leftovers(iterator)
        _held.pop(id(iterator), None)
        lifecycle.handle(LoaderEvent.TERMINATED)


def stop_pin_memory_thread(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Done event, a sentinel to wake it, a bounded join: longer than it looks at its done event by itself.

    A worker may have died with the lock that the sentinel waits for. Its reads are bounded, but what it pins may be the
    user's own object, whose pin_memory() may take any time.
    """
    thread = getattr(iterator, "_pin_memory_thread", None)
    if thread is None:
        return
    iterator._pin_memory_thread_done_event.set()
    with contextlib.suppress(NoThreadError):  # while Python exits; then there are other messages to wake the pin thread
        iterator._worker_result_queue.put(Sentinel())
    patience = 2 * MP_STATUS_CHECK_INTERVAL
    thread.join(timeout=patience)
    if thread.is_alive():
        warnings.warn(
            f"the pin memory thread did not end within {patience:g} s: it is probably in the "
            "pin_memory() of a batch. It is left behind as a daemon thread; the workers are stopped.",
            RuntimeWarning,
            stacklevel=2,
        )
    iterator._worker_result_queue.cancel_join_thread()
    iterator._worker_result_queue.close()


def signal_workers(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Done event, then a sentinel to everybody who has not had one."""
    if not iterator._workers:
        return
    iterator._workers_done_event.set()
    for worker_id in range(len(iterator._workers)):
        if iterator._persistent_workers or iterator._workers_status[worker_id]:
            iterator._mark_worker_as_unavailable(worker_id)


def join_workers(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Wait for the workers, one deadline for all of them, and close the index queues."""
    deadline = time.monotonic() + MP_STATUS_CHECK_INTERVAL
    for worker in iterator._workers:
        worker.join(timeout=max(0.0, deadline - time.monotonic()))
    for index_queue in iterator._index_queues:
        index_queue.cancel_join_thread()
        index_queue.close()


def end_leftovers(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Terminate, and at last kill, whoever did not leave; then forget the workers' pids.

    The pids are forgotten last, so that a worker killed while it is waited for still raises through SIGCHLD. Where that
    came before the pin thread was told to end, it is told here.
    """
    if hasattr(iterator, "_pin_memory_thread") and not iterator._pin_memory_thread_done_event.is_set():
        iterator._pin_memory_thread_done_event.set()
    if iterator._worker_pids_set:
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    for end in ("terminate", "kill"):
        alive = [worker for worker in iterator._workers if worker.is_alive()]
        for worker in alive:
            getattr(worker, end)()
        for worker in alive:
            worker.join(timeout=MP_STATUS_CHECK_INTERVAL)
