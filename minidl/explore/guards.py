"""The guards of the protocol: purpose, place, and the configurations in which each is taken away.

`GUARDS` maps a name, as `--guard` takes it, to a `Guard`; `HOLES` lists what torch's own protocol lacks. Taking a guard
away is setting its field of `configurations.Protocol` to False; the model says in one `if` what is missing then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True)
class Guard:
    """One guard. ours, upstream: "module:function" where it stands; upstream "" if torch has none."""

    name: str
    field: str
    purpose: str
    ours: str
    upstream: str
    where: tuple[Configuration, ...]


_LIST = (
    Guard("sentinel", "sentinel", "tells a worker to leave its loop",
          "loader.driver:_signal", "dataloader:_mark_worker_as_unavailable", (PLAIN,)),
    Guard("none-after-exhaustion", "exhausted_sentinel", "lets a worker leave whose stream has ended",
          "loader.driver:_exhausted", "dataloader:_MultiProcessingDataLoaderIter._next_data", (STREAMS,)),
    Guard("done-event", "workers_done", "makes a sentinel valid for a worker that is not exhausted",
          "loader.driver:_signal", "dataloader:_shutdown_workers", (PLAIN,)),
    Guard("pin-done-event", "pin_done", "ends the pin thread's loop",
          "loader.driver:_tell_pin", "dataloader:_shutdown_workers", (PINNED,)),
    Guard("pin-sentinel", "wake_pin", "wakes the pin thread to see its done event",
          "loader.driver:_stop_pin", "dataloader:_shutdown_workers", (PINNED,)),
    Guard("watchdog", "watchdog", "shows a worker that its loader is gone",
          "loader.worker:ManagerWatchdog", "_utils.worker:ManagerWatchdog", (KILLED_LOADER,)),
    Guard("get-timeout-loader", "loader_timeout", "lets the loader check its workers while it waits for a result",
          "loader.iterators:_try_get_data", "dataloader:_try_get_data", (KILLED_WORKER,)),
    Guard("get-timeout-worker", "worker_timeout", "lets a worker check its loader while it waits for a task",
          "loader.worker:run", "_utils.worker:_worker_loop", (KILLED_LOADER,)),
    Guard("get-timeout-pin", "pin_timeout", "lets the pin thread see its done event when no message can reach it",
          "loader.pin_memory:_pin_memory_loop", "_utils.pin_memory:_pin_memory_loop", (KILLED_PINNED,)),
    Guard("liveness-check", "liveness_check", "tells the loader that the worker it waits for is dead",
          "loader.driver:_failed", "dataloader:_try_get_data", (KILLED_WORKER,)),
    Guard("pin-liveness-check", "pin_liveness_check", "tells the loader that the pin thread is dead",
          "loader.driver:nothing_came", "dataloader:_get_data", (DEAD_PIN,)),
    Guard("cancel-join-index", "cancel_index_join", "lets the loader exit though no worker reads an index queue",
          "loader.iterators:_start_workers", "dataloader:_MultiProcessingDataLoaderIter.__init__", (UNCLOSED,)),
    Guard("join-results-until-done", "join_results_until_done",
          "keeps an exhausted worker until its feeder has let go of the result queue's lock",
          "loader.worker:_worker_loop", "_utils.worker:_worker_loop", (STREAM_OF_ONE,)),
    Guard("cancel-join-results-when-done", "cancel_results_when_done",
          "lets a worker leave though the loader reads no results any more",
          "loader.worker:_worker_loop", "_utils.worker:_worker_loop", (NARROW,)),
    Guard("pin-first", "pin_first", "ends the pin thread while the result queue is still whole",
          "loader.driver:_stages", "dataloader:_shutdown_workers", (PINNED,)),
    Guard("bounded-joins", "bounded_joins", "lets the loader go on though a worker does not end",
          "loader.driver:_join", "dataloader:_shutdown_workers", (STUCK_WORKER,)),
    Guard("daemon", "daemon", "has workers terminated when the interpreter exits with the iterator open",
          "loader.ports:worker", "dataloader:_MultiProcessingDataLoaderIter.__init__", (UNCLOSED,)),
    Guard("exit-flag", "exit_flag", "keeps __del__ from touching queues while Python takes everything down",
          "loader.crew:shut_down", "dataloader:_shutdown_workers", (UNCLOSED,)),
    Guard("bounded-read", "bounded_result_read", "lets a reader of the result queue give up a torn message",
          "wire.queues:BoundedQueue.get", "", (KILLED_WORKER, KILLED_PINNED)),
    Guard("bounded-index-read", "bounded_index_read", "lets a worker give up a torn task",
          "loader.worker:run", "", (KILLED_LOADER,)),
    Guard("lock-free-event", "lock_free_event", "keeps a worker that is killed from holding the done event's lock",
          "loader.crew:perform", "", (KILLED_WORKER, KILLED_LOADER)),
    Guard("leavers-checked", "leavers_checked", "finds a worker that was killed after its stream had ended",
          "loader.driver:leavers", "", (KILLED_STREAM,)),
    Guard("bounded-pin-join", "bounded_pin_join", "lets the loader go on though the pin thread does not end",
          "loader.driver:_stop_pin", "", (STUCK_PIN,)),
    Guard("pin-told-at-last", "pin_told_at_last", "ends the pin thread though an exception cut the shutdown short",
          "loader.driver:_tell_pin_at_last", "", (HEARD,)),
    Guard("kill-at-last", "killed_at_last", "ends a worker that SIGTERM does not reach",
          "loader.driver:_leftovers", "", (STOPPED_WORKER,)),
    Guard("cancel-join-results-when-orphaned", "cancel_results_when_orphaned",
          "lets an orphan leave though its results fill the pipe", "loader.worker:run", "", (ORPHANED_WRITER,)),
    Guard("epoch-in-acknowledgement", "epochs_told_apart",
          "tells a worker's answer from one to an epoch whose beginning was interrupted",
          "loader.driver:_acknowledged", "",
          (BEGINS_AGAIN,)),
    Guard("leftovers-ended", "leftovers_ended", "ends the workers though an exception cut the shutdown short",
          "loader.crew:_end_leftovers", "dataloader:_shutdown_workers", (INTERRUPTED,)),
    Guard("pin-sentinel-left", "pin_sentinel_left",
          "lets the loader exit though nobody can write the pin thread's sentinel any more",
          "loader.crew:_leave_pin_sentinel", "", (HEARD,)),
)  # fmt: skip

GUARDS: Final = {guard.name: guard for guard in _LIST}
