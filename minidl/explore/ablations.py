"""The running loader without one of its guards: what `minidl explore` shows on the model, shown live.

`with without("done-event"):` takes the guard of this name (see `guards.GUARDS`) away from iterators that are made in
the block, and from the workers that they fork; with start method "spawn" or "forkserver" a worker's own guards stay.
The guards of the driver are methods, see `ablated`; each of the others is one function here, which replaces the one
piece of code that is the guard. For demonstrations and tests, in a process that may hang.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.queues
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from minidl.explore.ablated import ablated
from minidl.explore.guards import GUARDS
from minidl.loader import crew, iterators, pin_memory, worker
from minidl.loader.ports import Ports
from minidl.record.harmless import substituted
from minidl.wire.queues import BoundedQueue

Taken = contextlib.AbstractContextManager[None]
"""While it is open, a guard is taken away."""


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """Take the guard called `name` away while the block runs. Raises ValueError for a name that no guard has."""
    if name not in GUARDS:
        raise ValueError(f"{name!r} is none of {', '.join(map(repr, GUARDS))}")
    take = _OTHERS.get(name) or functools.partial(_with_driver_without, GUARDS[name].field)
    with take():
        yield


def _with_driver_without(guard: str) -> Taken:
    """Iterators get a driver without this guard."""
    return substituted((iterators, "Driver", ablated([guard], vars(iterators)["Driver"])))


def _without_call(method: str, caller: str) -> Taken:
    """A queue's method does nothing if the function called `caller` calls it."""
    plain = getattr(BoundedQueue, method)

    def unless(queue: Any, *arguments: Any) -> Any:
        calling: Any = sys._getframe(1)
        while calling.f_code.co_name == method:  # of a recorded queue, which passes the call on
            calling = calling.f_back
        return None if calling.f_code.co_name == caller else plain(queue, *arguments)

    return substituted((BoundedQueue, method, unless))


def _with_worker_loop(after: Callable[[Any], None]) -> Taken:
    """Workers do `after` once they have left their loop."""
    plain: Any = vars(iterators)["_worker_loop"]

    def loop(spec: Any) -> None:
        plain(spec)
        after(spec)

    return substituted((iterators, "_worker_loop", loop))


class _BlockingQueue(BoundedQueue):
    """A queue whose `get` waits without a bound for the rest of a message that has begun, as multiprocessing's does."""

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)
        self._recv_bytes: Any = self._reader.recv_bytes
        self._poll = self._reader.poll

    def get(self, block: bool = True, timeout: float | None = None, inbox: list[Any] | None = None) -> Any:
        message: Any = multiprocessing.queues.Queue.get(self, block, timeout)
        if inbox is not None:
            inbox.append(message)
        return message


def _with_port(method: str, which: str, make: Callable[[Any], Any]) -> Taken:
    """`Ports.queue` or `Ports.done_event` gives another thing for `which`; `make` gets the context, if there is one."""
    plain = getattr(Ports, method)

    def port(ports: Ports, name: str, *arguments: Any) -> Any:
        return make(arguments[0] if arguments else None) if name == which else plain(ports, name, *arguments)

    return substituted((Ports, method, port))


def _without_daemon() -> Taken:
    plain = Ports.worker

    def undaemonic(*arguments: Any) -> Any:
        process = plain(*arguments)
        process.daemon = False
        return process

    return substituted((Ports, "worker", undaemonic))


@contextlib.contextmanager
def _without_exit_flag() -> Iterator[None]:
    atexit.unregister(crew._set_python_exit_flag)
    try:
        yield
    finally:
        atexit.register(crew._set_python_exit_flag)


_OTHERS: Final[dict[str, Callable[[], Taken]]] = {
    "watchdog": lambda: substituted((worker.ManagerWatchdog, "is_alive", lambda watchdog: True)),
    "get-timeout-worker": lambda: substituted((worker, "MP_STATUS_CHECK_INTERVAL", None)),
    "get-timeout-pin": lambda: substituted((pin_memory, "MP_STATUS_CHECK_INTERVAL", None)),
    "cancel-join-index": lambda: _without_call("cancel_join_thread", "_start_workers"),
    "join-results-until-done": lambda: _with_worker_loop(lambda spec: spec.result_queue.cancel_join_thread()),
    "cancel-join-results-when-done": lambda: _without_call("cancel_join_thread", "_worker_loop"),
    "cancel-join-results-when-orphaned": lambda: _without_call("cancel_join_thread", "run"),
    "daemon": _without_daemon,
    "exit-flag": _without_exit_flag,
    "bounded-read": lambda: _with_port("queue", "result", _BlockingQueue),
    "bounded-index-read": lambda: _with_port("queue", "index", _BlockingQueue),
    "leftovers-ended": lambda: substituted((crew.Crew, "_end_leftovers", lambda crew: None)),
    "pin-sentinel-left": lambda: substituted((crew.Crew, "_leave_pin_sentinel", lambda crew: None)),
    "lock-free-event": lambda: _with_port("done_event", "workers", lambda _: multiprocessing.Event()),
}
"""Guards that are not the driver's -> what takes them away."""
