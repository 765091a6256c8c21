"""The guards of the protocol: purpose, place, and the configurations in which each is taken away.

`Protocol` is the loader in the explored world: one field a guard, all of them there by default. `OURS` is this
package's loader, `UPSTREAM` torch's; `own(configuration)` is ours with processes or with threads. `GUARDS` maps a name,
as `--guard` takes it, to a `Guard`; `OF_THREADS` has more. The model says in one `if` what is missing if a field is
False.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from minidl.explore.configurations import Configuration, Crash

C = Configuration

PLAIN = C("plain", may_break=True)
STREAMS = C("streams", streams=(1, 2), may_break=True)
STREAM_OF_ONE = C("unequal streams", streams=(0, 2))
PINNED = C("pinned", pin=True, may_break=True)
NARROW = C("narrow pipe", may_break=True, result_room=1)
KILLED_WORKER = C("worker killed", crashes=(Crash.WORKER_KILLED,))
KILLED_STREAM = C("exhausted worker killed", streams=(0, 2), crashes=(Crash.WORKER_KILLED,))
KILLED_PINNED = C("worker killed, pinned", pin=True, may_break=True, crashes=(Crash.WORKER_KILLED,))
STUCK_PIN = C("pin thread stuck", pin=True, may_break=True, timeout=True, crashes=(Crash.PIN_STUCK,))
DEAD_PIN = C("pin thread dies", pin=True, crashes=(Crash.PIN_DIES,))
KILLED_LOADER = C("loader killed", crashes=(Crash.LOADER_KILLED,), may_break=True)
ORPHANED_WRITER = C("loader killed, narrow pipe", crashes=(Crash.LOADER_KILLED,), result_room=1)
HEARD = C("worker killed, SIGCHLD, pinned", heard=True, pin=True, may_break=True, crashes=(Crash.WORKER_KILLED,))
STUCK_WORKER = C("stuck worker", timeout=True, crashes=(Crash.WORKER_STUCK,))
STOPPED_WORKER = C("stopped worker", timeout=True, crashes=(Crash.WORKER_STOPPED,))
INTERRUPTED = C("Ctrl-C", ctrl_c=1)
BEGINS_AGAIN = C("Ctrl-C, begins again", ctrl_c=1, goes_on=1, persistent=True, epochs=3, prefetch=1, tasks=2)
UNCLOSED = C("exit unclosed, narrow pipe", exits=True, may_break=True, index_room=1)
INTERRUPTED_THREADS = C("threads, Ctrl-C", threads=True, ctrl_c=1)
UNCLOSED_THREADS = C("threads, exit unclosed", threads=True, exits=True, may_break=True)


@dataclass(frozen=True)
class Guard:
    """One guard. ours, upstream: "module:function" where it stands; upstream "" if torch has none."""

    name: str
    field: str
    purpose: str
    ours: str
    upstream: str
    where: tuple[Configuration, ...]


def _guard(name: str, purpose: str, ours: str, upstream: str, *where: Configuration) -> Any:
    """A guard that is there: a field of `Protocol`, with its row."""
    return dataclasses.field(default=True, metadata={"row": (name, purpose, ours, upstream, where)})


@dataclass(frozen=True)
class Protocol:
    """The loader's guards; False takes one away."""

    sentinel: bool = _guard("sentinel", "tells a worker to leave its loop",
        "loader.driver:_signal", "dataloader:_mark_worker_as_unavailable", PLAIN)  # fmt: skip
    exhausted_sentinel: bool = _guard("none-after-exhaustion", "lets a worker leave whose stream has ended",
        "loader.driver:_exhausted", "dataloader:_MultiProcessingDataLoaderIter._next_data", STREAMS)  # fmt: skip
    workers_done: bool = _guard("done-event", "makes a sentinel valid for a worker that is not exhausted",
        "loader.driver:_signal", "dataloader:_shutdown_workers", PLAIN)  # fmt: skip
    pin_done: bool = _guard("pin-done-event", "ends the pin thread's loop",
        "loader.driver:_tell_pin", "dataloader:_shutdown_workers", PINNED)  # fmt: skip
    wake_pin: bool = _guard("pin-sentinel", "wakes the pin thread to see its done event",
        "loader.driver:_stop_pin", "dataloader:_shutdown_workers", PINNED)  # fmt: skip
    watchdog: bool = _guard("watchdog", "shows a worker that its loader is gone",
        "loader.worker:ManagerWatchdog", "_utils.worker:ManagerWatchdog", KILLED_LOADER)  # fmt: skip
    loader_timeout: bool = _guard("get-timeout-loader", "lets the loader check its workers while it waits for a result",
        "loader.iterators:_try_get_data", "dataloader:_try_get_data", KILLED_WORKER)  # fmt: skip
    worker_timeout: bool = _guard("get-timeout-worker", "lets a worker check its loader while it waits for a task",
        "loader.worker:run", "_utils.worker:_worker_loop", KILLED_LOADER)  # fmt: skip
    pin_timeout: bool = _guard("get-timeout-pin", "lets the pin thread see its done event when no message can reach it",
        "loader.pin_memory:_pin_memory_loop", "_utils.pin_memory:_pin_memory_loop", KILLED_PINNED)  # fmt: skip
    liveness_check: bool = _guard("liveness-check", "tells the loader that the worker it waits for is dead",
        "loader.driver:_failed", "dataloader:_try_get_data", KILLED_WORKER)  # fmt: skip
    pin_liveness_check: bool = _guard("pin-liveness-check", "tells the loader that the pin thread is dead",
        "loader.driver:nothing_came", "dataloader:_get_data", DEAD_PIN)  # fmt: skip
    cancel_index_join: bool = _guard("cancel-join-index", "lets the loader exit though no worker reads an index queue",
        "loader.iterators:_start_workers", "dataloader:_MultiProcessingDataLoaderIter.__init__", UNCLOSED)  # fmt: skip
    join_results_until_done: bool = _guard(
        "join-results-until-done", "keeps an exhausted worker until its feeder has let go of the result queue's lock",
        "loader.worker:_worker_loop", "_utils.worker:_worker_loop", STREAM_OF_ONE)  # fmt: skip
    cancel_results_when_done: bool = _guard(
        "cancel-join-results-when-done", "lets a worker leave though the loader reads no results any more",
        "loader.worker:_worker_loop", "_utils.worker:_worker_loop", NARROW)  # fmt: skip
    pin_first: bool = _guard("pin-first", "ends the pin thread while the result queue is still whole",
        "loader.driver:_stages", "dataloader:_shutdown_workers", PINNED)  # fmt: skip
    bounded_joins: bool = _guard("bounded-joins", "lets the loader go on though a worker does not end",
        "loader.driver:_join", "dataloader:_shutdown_workers", STUCK_WORKER)  # fmt: skip
    daemon: bool = _guard("daemon", "has workers terminated when the interpreter exits with the iterator open",
        "loader.ports:worker", "dataloader:_MultiProcessingDataLoaderIter.__init__", UNCLOSED)  # fmt: skip
    exit_flag: bool = _guard("exit-flag", "keeps __del__ from touching queues while Python takes everything down",
        "loader.crew:shut_down", "dataloader:_shutdown_workers", UNCLOSED)  # fmt: skip
    bounded_result_read: bool = _guard("bounded-read", "lets a reader of the result queue give up a torn message",
        "wire.queues:BoundedQueue.get", "", KILLED_WORKER, KILLED_PINNED)  # fmt: skip
    bounded_index_read: bool = _guard("bounded-index-read", "lets a worker give up a torn task",
        "loader.worker:run", "", KILLED_LOADER)  # fmt: skip
    lock_free_event: bool = _guard(
        "lock-free-event", "keeps a worker that is killed from holding the done event's lock",
        "loader.crew:perform", "", KILLED_WORKER, KILLED_LOADER)  # fmt: skip
    leavers_checked: bool = _guard("leavers-checked", "finds a worker that was killed after its stream had ended",
        "loader.driver:leavers", "", KILLED_STREAM)  # fmt: skip
    bounded_pin_join: bool = _guard("bounded-pin-join", "lets the loader go on though the pin thread does not end",
        "loader.driver:_stop_pin", "", STUCK_PIN)  # fmt: skip
    pin_told_at_last: bool = _guard(
        "pin-told-at-last", "ends the pin thread though an exception cut the shutdown short",
        "loader.driver:_tell_pin_at_last", "", HEARD)  # fmt: skip
    killed_at_last: bool = _guard("kill-at-last", "ends a worker that SIGTERM does not reach",
        "loader.driver:_leftovers", "", STOPPED_WORKER)  # fmt: skip
    cancel_results_when_orphaned: bool = _guard(
        "cancel-join-results-when-orphaned", "lets an orphan leave though its results fill the pipe",
        "loader.worker:run", "", ORPHANED_WRITER)  # fmt: skip
    epochs_told_apart: bool = _guard(
        "epoch-in-acknowledgement", "tells a worker's answer from one to an epoch whose beginning was interrupted",
        "loader.driver:_acknowledged", "", BEGINS_AGAIN)  # fmt: skip
    leftovers_ended: bool = _guard("leftovers-ended", "ends the workers though an exception cut the shutdown short",
        "loader.crew:_end_leftovers", "dataloader:_shutdown_workers", INTERRUPTED)  # fmt: skip
    pin_sentinel_left: bool = _guard(
        "pin-sentinel-left", "lets the loader exit though nobody can write the pin thread's sentinel any more",
        "loader.crew:_leave_pin_sentinel", "", HEARD)  # fmt: skip

    def without(self, *guards: str) -> Protocol:
        """The same loader, these guards (names of fields) taken away."""
        return dataclasses.replace(self, **dict.fromkeys(guards, False))

    def having(self, *guards: str) -> Protocol:
        """The same loader, with these guards (names of fields) as well."""
        return dataclasses.replace(self, **dict.fromkeys(guards, True))


def _of(field: dataclasses.Field[bool]) -> Guard:
    name, purpose, ours, upstream, where = field.metadata["row"]
    return Guard(name, field.name, purpose, ours, upstream, where)


GUARDS: Final = {guard.name: guard for guard in map(_of, dataclasses.fields(Protocol))}


@dataclass(frozen=True)
class ThreadProtocol(Protocol):
    """The guards of a loader with worker threads, which torch has not."""

    told_at_last: bool = _guard("told-at-last", "tells threads to leave though an exception cut the shutdown short",
        "loader.threads:_terminate", "", INTERRUPTED_THREADS)  # fmt: skip
    closed_at_exit: bool = _guard("closed-at-exit", "ends the threads before Python ends its daemon threads",
        "loader.threads:__init__", "", UNCLOSED_THREADS)  # fmt: skip


OF_THREADS: Final = {
    guard.name: guard for guard in map(_of, dataclasses.fields(ThreadProtocol)) if guard.name not in GUARDS
}
"""The guards that only worker threads need."""

OURS: Final = Protocol()
OUR_THREADS: Final = ThreadProtocol()
UPSTREAM: Final = OURS.without(*(guard.field for guard in GUARDS.values() if not guard.upstream))


def own(configuration: Configuration) -> Protocol:
    """This package's loader in a configuration."""
    return OUR_THREADS if configuration.threads else OURS
