"""How a loader ends: the steps that `driver.Driver.close` decides, performed on the workers and the pin-memory thread.

A `Crew` is what one iterator has started. `Crew.shut_down` ends it: when the epoch is over, by `close()`, when the
iterator is garbage-collected, and (for persistent workers with a pin thread) when Python exits. Article 4 §shutdown;
upstream: `_shutdown_workers` and the note above it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any

from torch._C import _remove_worker_pids, _set_worker_pids

from minidl.live_repr import LiveRepr, numbers
from minidl.loader.driver import END, Driver, Effect, JoinPin, JoinWorkers, PutSentinel, Simple, Terminate
from minidl.loader.progress import ProgressBoard, Stage
from minidl.wire.messages import Sentinel
from minidl.wire.queues import NoThreadError
from minidl.wire.signal_handling import STEPS, _set_SIGCHLD_handler, raise_now
from minidl.wire.tensors import remove_left

STEPS.add(__name__)

python_exit_status: bool | None = False
"""Whether Python is exiting. Locks, threads and queues may no longer work then, so `Crew.shut_down` does nothing."""


def _set_python_exit_flag() -> None:
    global python_exit_status
    python_exit_status = True
    # multiprocessing terminates the workers next. A worker without handlers yet dies of SIGTERM; that is no error.
    for crew in tuple(_running):
        crew._forget_pids()


atexit.register(_set_python_exit_flag)

_running: set[Crew] = set()
"""Crews that are not shut down yet. This set keeps them alive, so that their queues still work.

An iterator may be collected as part of a reference cycle; a caught exception easily makes one. Python finalises the
objects of a cycle in no certain order. A queue's feeder thread or pipe might be gone when `__del__` sends the sentinel;
the worker would not receive it, and would be killed. So a crew holds no reference to its iterator.
"""


def _remove_segments() -> None:
    """Remove the segments of the workers that multiprocessing terminates at exit."""
    for crew in _running:
        remove_left(crew.pids())


util.Finalize(None, _remove_segments, exitpriority=-1)  # below 0: after multiprocessing has terminated and joined them


def _close_all() -> None:
    for crew in tuple(_running):
        if crew.closes_at_exit:
            crew.shut_down()


class Crew(LiveRepr):
    """The workers and the pin-memory thread of one iterator, with their queues, events and progress board.

    handles: what messages call a worker's `pid`.
    """

    handles = "pid"

    def __init__(self, driver: Driver, result_queue: Any, done_event: Any, board: ProgressBoard) -> None:
        self.driver = driver
        self.result_queue = result_queue
        self.done_event = done_event
        self.board = board
        self.workers: list[Any] = []
        self.index_queues: list[Any] = []
        self.pin_thread: Any = None
        self.pin_done_event: Any = None
        self.closes_at_exit = False
        self.pids_set = False
        self.named = False  # whether semaphores of the queues have names
        self.pid = os.getpid()  # a child that is forked with this object must not shut it down
        _running.add(self)

    def _phrases(self) -> Iterator[str]:
        for worker_id in range(len(self.workers)):
            yield f"worker {worker_id} {self._state_of(worker_id)}"
        if self.pin_thread is not None:
            yield f"pin thread {self.pin_thread!r}"
        yield f"result queue {self.result_queue!r}"

    def _state_of(self, worker_id: int) -> str:
        """The worker's process, place and tasks, in words."""
        worker, tasks = self.workers[worker_id], self.driver.dispatcher.held_by(worker_id)
        if self.pid != os.getpid():
            return f"({self.handles} {worker.pid}) belongs to process {self.pid}"
        life = "alive" if worker.is_alive() else f"exit code {worker.exitcode}"
        try:
            doing = self.doing(worker_id)
        except Exception as error:  # the repr of the user's index has failed
            doing = f"... {type(error).__name__}"
        seconds = self.board.read(worker_id).seconds
        return f"({self.handles} {worker.pid}, {life}) has {numbers('task', tasks)}, {doing} for {seconds:.1f} s"

    def doing(self, worker_id: int) -> str:
        """What the worker last wrote about itself on the board, in words."""
        place = self.board.read(worker_id)
        info = self.driver.dispatcher.task_info.get(place.task)
        return place.describe(info.index if info is not None and info.worker_id == worker_id else None)

    def add_worker(self, worker: Any, index_queue: Any) -> None:
        """List a worker that was started: a shutdown joins all that are listed, and only those can be joined."""
        self.workers.append(worker)
        self.index_queues.append(index_queue)
        self.driver.worker_started()

    def add_pin_thread(self, thread: Any, done_event: Any) -> None:
        """List the pin-memory thread, which was started."""
        self.pin_thread, self.pin_done_event = thread, done_event
        self.driver.pin_started()

    def pids(self) -> list[int]:
        """The workers' processes."""
        return [worker.pid for worker in self.workers]

    def watch_pids(self) -> None:
        """From now on SIGCHLD raises if one of the workers dies."""
        self.pids_set = True  # first: torch refuses the same id twice, also after an exception here
        _set_worker_pids(id(self), tuple(self.pids()))
        _set_SIGCHLD_handler()

    def close_at_exit(self) -> None:
        """Shut down when Python begins to exit, before daemonic workers are killed.

        For persistent workers with a pin-memory thread: killed workers could leave half a message for it to read.
        """
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # the last registered runs first: before the exit flag is set
        self.closes_at_exit = True

    def forget_names(self) -> None:
        """Remove the names of the queues' semaphores once every worker has opened them."""
        if all(self.board.read(worker_id).stage > Stage.STARTING for worker_id in range(len(self.workers))):
            for each in (self.result_queue, *self.index_queues):
                each.forget_names()
            self.named = False

    def put(self, worker_id: int, message: Any) -> None:
        """Put a message into a worker's queue, unless a signal's handler has closed the loader in the meantime."""
        try:
            self.index_queues[worker_id].put(message)
        except ValueError:
            if not self.driver.closed:
                raise

    # --- The shutdown -------------------------------------------------------------------------------------------------
    def shut_down(self) -> None:
        """End the pin thread, the workers and the queues.

        It does nothing if it has run before, while Python exits, or in a forked child. If it is interrupted, it ends
        the workers that are left, and then raises the interruption.
        """
        if python_exit_status is not False or os.getpid() != self.pid:
            return
        try:
            self._follow(self.driver.close())
        except BaseException:
            self._end_leftovers()
            raise

    def _end_leftovers(self) -> None:
        """End what an interrupted shutdown has left. If this is interrupted too, the next `shut_down` does it."""
        try:
            self.driver.interrupted()
            self._follow(self.driver.close())
        finally:
            self.driver.interrupted()
            self._leave_pin_sentinel()
            self._close_index_queues()  # those that the interruption has left open
            if self.driver.ended:
                self._let_go()

    def _leave_pin_sentinel(self) -> None:
        """Let Python exit though the pin thread's sentinel was not written.

        The steps that an interruption has cut off include the end of the result queue. One of the workers that were
        terminated in their place may have held the queue's lock, and Python would wait for the queue's feeder forever.
        """
        if self.pin_thread is not None:
            self.result_queue.cancel_join_thread()

    def _follow(self, effect: Effect) -> None:
        while effect is not END:
            self.perform(effect)
            effect = self.driver.done()
        if self.driver.ended:
            _running.discard(self)
            remove_left(self.pids())
            self._let_go()

    def _let_go(self) -> None:
        for each in (self.result_queue, *self.index_queues):
            each.let_go()

    def perform(self, effect: Effect) -> None:
        """Perform one step of the shutdown."""
        match effect:
            case PutSentinel(worker_id):
                self._mark_worker_as_unavailable(worker_id)
            case JoinPin(timeout):
                self._join_pin(timeout)
            case JoinWorkers(timeout):
                self._join_workers(timeout)
            case Terminate(kill, timeout):
                self._terminate("kill" if kill else "terminate", timeout)
            case _:
                _STEPS[effect](self)

    def _close_index_queues(self) -> None:
        for index_queue in self.index_queues:
            _close(index_queue)

    def _mark_worker_as_unavailable(self, worker_id: int) -> None:
        """Send the worker its sentinel; the shutdown joins it."""
        self.put(worker_id, Sentinel())

    def _wake_pin(self) -> None:
        with contextlib.suppress(NoThreadError):  # Python exits, and the pipe is full: its messages wake the pin thread
            self.result_queue.put(Sentinel())

    def _join_pin(self, timeout: float) -> None:
        self.pin_thread.join(timeout=timeout)
        if self.pin_thread.is_alive():
            warnings.warn(
                f"the pin memory thread did not end within {timeout:g} s: it is probably in the "
                "pin_memory() of a batch. It is left behind as a daemon thread; the workers are stopped.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _join_workers(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        try:
            raise_now()  # first, because a join takes the exit code of a worker that was killed
        finally:
            for worker in self.workers:
                worker.join(timeout=max(0.0, deadline - time.monotonic()))

    def _forget_pids(self) -> None:
        if self.pids_set:
            with contextlib.suppress(ValueError):  # they are not set, or removed, because an exception came in between
                _remove_worker_pids(id(self))
            self.pids_set = False

    def _terminate(self, end: str, timeout: float) -> None:
        """Terminate, or kill, the workers that are alive."""
        alive = [worker for worker in self.workers if worker.is_alive()]
        for worker in alive:
            getattr(worker, end)()
        for worker in alive:
            worker.join(timeout=timeout)


def _close(queue: Any) -> None:
    queue.cancel_join_thread()
    queue.close()


_STEPS: dict[Effect, Callable[[Crew], None]] = {
    Simple.SET_PIN_DONE: lambda crew: crew.pin_done_event.set(),
    Simple.WAKE_PIN: Crew._wake_pin,
    Simple.CLOSE_RESULT_QUEUE: lambda crew: _close(crew.result_queue),
    Simple.SET_WORKERS_DONE: lambda crew: crew.done_event.set(),
    Simple.CLOSE_INDEX_QUEUES: Crew._close_index_queues,
    Simple.FORGET_WORKERS: Crew._forget_pids,
}
"""What performs the steps of the shutdown that have no arguments."""
