"""Small programs that end well with all guards, and do not without one: what each guard of the loader is for.

`python -c "from minidl.prove.lab import guard_programs; guard_programs.main()" PROGRAM [GUARD]` runs one of its
functions, without GUARD if one is given. It says "waits" when it comes to the step that the guard is for, and at the
end "well" or what is wrong. A program that never gets there hangs; a program may also kill itself, and leave workers.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

import minidl
from minidl.explore.ablations import without
from minidl.loader import driver, pin_memory, worker
from minidl.loader.crew import Crew
from minidl.loader.driver import Simple
from minidl.loader.progress import Stage
from minidl.process_stat import status_of
from minidl.prove.lab import faulty
from minidl.record.forks import current_frames
from minidl.wire import signal_handling
from minidl.wire.queues import BoundedQueue, SharedFlag

BOUND: Final = 110.0
"""Seconds within which an end counts as bounded: far above any that is meant, even on a busy machine."""

WAITS: Final = "waits\n"
"""What a program says when it comes to the step that the guard is for."""

KEPT: list[Any] = []
"""Guards that are taken away until the program has ended."""

ENDED: list[str] = []
"""Signals that the loader has sent its workers."""

WARNED: list[str] = []
"""Warnings that the loader has given: all of them are about a pin thread that did not end."""


def intervals(others: float = 0.3, *, pin: float = 0.3, kept: float | None = None) -> None:
    """Set the seconds of each wait, the loader's and the workers', and the pin thread's; then take the guard away.

    kept: the loader's and the workers' if no guard is taken away, for a program of which no wait runs out then.
    """
    others = others if kept is None or sys.argv[2:] else kept
    for module, seconds in ((driver, others), (worker, others), (pin_memory, pin)):
        vars(module)["MP_STATUS_CHECK_INTERVAL"] = seconds
    for guard in sys.argv[2:]:
        KEPT.append(without(guard))  # for good: what is taken away stays away while Python exits
        KEPT[-1].__enter__()


def start(dataset: Any, workers: int = 2, **options: Any) -> Any:
    iterator: Any = iter(minidl.DataLoader(dataset, num_workers=workers, **options))
    for process in iterator._workers:
        process.terminate = functools.partial(_ended, process.terminate)
        process.kill = functools.partial(_ended, process.kill)
    return iterator


def _ended(end: Callable[[], None]) -> None:
    ENDED.append(end.__name__)
    end()


def idle(dataset: Any, **options: Any) -> Any:
    """An iterator that has given a batch, and whose workers wait for tasks."""
    iterator = start(dataset, **options)
    next(iterator)
    workers = range(len(iterator._workers))
    until(lambda: all(iterator._board.read(number).stage is Stage.WAITING for number in workers))
    return iterator


def stuck(sample: Callable[[], object]) -> Any:
    """An iterator that has given a batch, and whose worker 1 is in this sample."""
    iterator = start(faulty.At(10, 1, sample))
    next(iterator)
    until(lambda: iterator._board.read(1).stage is Stage.FETCHING)
    return iterator


def keep(iterator: Any) -> None:
    """Let the program's main module hold the iterator until Python takes it down."""
    vars(sys.modules["__main__"])["iterator"] = iterator


def waits() -> None:
    """Say that the step which counts begins now."""
    print(WAITS, end="", flush=True)


def say(iterator: Any, *problems: str, may_end: bool = False) -> None:
    """Say how the shutdown was: "well", or what is wrong. may_end: the loader may end workers by a signal."""
    wrong = [problem for problem in problems if problem]
    codes = [process.exitcode for process in iterator._workers]
    wrong += [f"{len(ENDED)} signals to workers"] if ENDED and not may_end else []
    wrong += [f"exit codes {codes}"] if any(codes) and not may_end else []
    wrong += ["a worker is alive"] if any(process.is_alive() for process in iterator._workers) else []
    wrong += ["the pin thread did not end in time"] if WARNED else []
    thread = iterator._crew.pin_thread
    wrong += ["the pin thread is alive"] if thread is not None and thread.is_alive() else []
    print("well" if not wrong else "bad: " + ", ".join(wrong), flush=True)


def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds; a program in which it never does ends with an error."""
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, "what the program waits for does not come"
        time.sleep(0.001)


def close(iterator: Any, *, may_end: bool = False) -> None:
    """Close it: the step which counts."""
    waits()
    iterator.close()
    say(iterator, may_end=may_end)


def error_of(iterator: Any) -> str:
    """The error that `next` raises, as text; "" if it raises none."""
    try:
        for _ in iterator:
            pass
    except RuntimeError as error:
        return str(error)
    return ""


def say_error(iterator: Any, error: str, expected: str = "exited unexpectedly") -> None:
    """Close it, and say whether it has raised the error that it should."""
    iterator.close()
    say(iterator, "" if expected in error else f"error {error!r}", may_end=True)


def fail(iterator: Any, expected: str = "exited unexpectedly") -> None:
    """Iterate until an error comes: the step which counts."""
    waits()
    say_error(iterator, error_of(iterator), expected)


class Wakeless(faulty.Numbers):
    """Batches that no pipe holds."""

    def __getitem__(self, index: int) -> Any:
        return bytes(300_000)


# --- The end of an epoch ----------------------------------------------------------------------------------------------
def closes() -> None:
    intervals(2.0, kept=60.0)
    close(idle(faulty.Numbers(20)))


def ends_streams() -> None:
    intervals(2.0, kept=60.0)
    iterator = start(faulty.SharedStream(3))
    list(iterator)
    close(iterator)


def closes_pinned() -> None:
    """The pin thread looks at its done event only when a message comes."""
    intervals(1.0, pin=60.0, kept=60.0)
    iterator = start(faulty.Numbers(4), pin_memory=True)
    for _ in range(4):
        next(iterator)
    close(iterator)


class Torn(faulty.Numbers):
    """Sample 1 leaves half a message, as a worker may that leaves: once it is told to."""

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            faulty.wait_for_the_end()
            faulty.begin_message(faulty.worker_spec().result_queue)
            os._exit(0)
        return index


def closes_while_a_worker_tears() -> None:
    """The pin thread waits for a message and the worker is in its sample, so both see the shutdown from its start."""
    intervals(1.0, pin=60.0, kept=60.0)
    iterator = start(Torn(2), pin_memory=True)
    next(iterator)
    until(lambda: iterator._board.read(1).stage is Stage.FETCHING)
    until(lambda: iterator._worker_result_queue._rlock._semlock._is_zero())
    plain, torn = Crew.perform, iterator._workers[1]

    def perform(self: Any, effect: Any) -> None:
        plain(self, effect)
        if effect is Simple.SET_WORKERS_DONE:
            until(lambda: not torn.is_alive())

    Crew.perform = perform  # type: ignore[method-assign]
    close(iterator)


def closes_with_full_pipe() -> None:
    intervals(2.0)
    close(idle(Wakeless(100), collate_fn=list))


def closes_while_a_worker_is_stuck() -> None:
    intervals()
    close(stuck(faulty.hang), may_end=True)


def closes_while_a_worker_ignores_sigterm() -> None:
    intervals()
    iterator = stuck(faulty.hang_without_sigterm)
    until(lambda: ignores(iterator._workers[1].pid, signal.SIGTERM))
    close(iterator, may_end=True)


def ignores(pid: int, number: int) -> bool:
    """Whether the process ignores the signal."""
    mask = status_of(Path(f"/proc/{pid}/status").read_text())["SigIgn"]
    return bool(int(mask, 16) >> (number - 1) & 1)


class Sticky:
    """A batch whose pin_memory() does not end."""

    def pin_memory(self) -> Any:
        faulty.hang()


def closes_while_the_pin_thread_is_stuck() -> None:
    intervals()
    iterator = start(faulty.Numbers(4), pin_memory=True, timeout=1, collate_fn=lambda samples: Sticky())
    error_of(iterator)
    waits()
    iterator.close()
    print("well" if not any(process.is_alive() for process in iterator._workers) else "bad: a worker is alive")


def is_interrupted_before_the_pin_thread_is_told() -> None:
    intervals()
    iterator = start(faulty.Numbers(4), pin_memory=True)
    plain, crew = Crew.perform, iterator._crew

    def perform(self: Any, effect: Any) -> None:
        Crew.perform = plain  # type: ignore[method-assign]
        raise RuntimeError("DataLoader worker is killed")

    Crew.perform = perform  # type: ignore[method-assign]
    waits()
    with contextlib.suppress(RuntimeError):
        iterator.close()
    crew.pin_thread.join(3.0 if sys.argv[2:] else BOUND)
    say(iterator, may_end=True)


def interrupt(*arguments: Any, **options: Any) -> None:
    """As Ctrl-C does."""
    raise KeyboardInterrupt


def is_interrupted_while_it_joins() -> None:
    intervals()
    iterator = stuck(faulty.hang)
    Crew._join_workers = interrupt  # type: ignore[method-assign]
    waits()
    with contextlib.suppress(KeyboardInterrupt):
        iterator.close()
    say(iterator, may_end=True)


def is_interrupted_while_an_epoch_begins() -> None:
    """The answer to the first of two messages that begin an epoch is still in the queue when the second is sent."""
    intervals()
    loader: Any = minidl.DataLoader(faulty.Numbers(4), num_workers=1, persistent_workers=True)
    list(loader)
    iterator = loader._iterator
    queue, error = iterator._data_queue, ""
    with contextlib.suppress(KeyboardInterrupt):
        queue.get = interrupt
        iter(loader)
    del queue.get
    waits()
    try:
        list(loader)
    except Exception as caught:
        error = type(caught).__name__
    iterator.close()
    say(iterator, error)


# --- A worker dies ----------------------------------------------------------------------------------------------------
# Its batches are lists: of one that has tensors, the loader would miss the memory if it were still to fetch it.
def a_worker_is_killed() -> None:
    intervals()
    fail(start(faulty.At(10, 3, faulty.kill_myself), collate_fn=list))


def a_worker_is_killed_in_a_message() -> None:
    intervals()
    fail(start(faulty.At(10, 3, faulty.die_in_the_middle_of_a_message), collate_fn=list))


def a_worker_is_killed_in_a_message_pinned() -> None:
    intervals(1.0)
    iterator = start(faulty.At(10, 3, faulty.die_in_the_middle_of_a_message), collate_fn=list, pin_memory=True)
    error = error_of(iterator)
    waits()
    say_error(iterator, error)


def die_in_the_done_events_lock() -> None:
    """As one dies that asks an Event: inside its lock, if it has one."""
    condition = getattr(faulty.worker_spec().done_event, "_cond", None)
    if condition is not None:
        condition.acquire()
    faulty.kill_myself()


def a_worker_is_killed_asking_the_done_event() -> None:
    intervals()
    fail(start(faulty.At(10, 3, die_in_the_done_events_lock), collate_fn=list))


class SlowLock:
    """A lock that its holder lets go of when the process waits for this at its end, or never: it is killed before."""

    def __init__(self, lock: Any, kill: bool, taken: SharedFlag) -> None:
        self.lock, self.kill, self.taken = lock, kill, taken

    def acquire(self, *arguments: Any, **options: Any) -> Any:
        taken = self.lock.acquire(*arguments, **options)
        self.taken.set()
        return taken

    def release(self) -> None:
        if self.kill:
            faulty.kill_myself()
        until(joins_a_feeder)
        self.lock.release()

    __enter__ = acquire

    def __exit__(self, *error: Any) -> None:
        self.release()


def joins_a_feeder() -> bool:
    """Whether the main thread of this process, which ends, waits for a feeder thread."""
    frame: Any = current_frames()[threading.main_thread().ident]  # type: ignore[index]
    while frame is not None and frame.f_code is not BoundedQueue._finalize_join.__code__:
        frame = frame.f_back
    return frame is not None


class EmptyFirst(minidl.IterableDataset[int]):
    """Worker 0 has no samples, and its feeder is slow to let go of the result queue's lock."""

    def __init__(self, kill: bool) -> None:
        self.kill, self.taken = kill, SharedFlag()

    def __iter__(self) -> Iterator[int]:
        mine, _, _ = faulty.worker()
        queue = faulty.worker_spec().result_queue
        if mine == 0:
            queue._wlock = SlowLock(queue._wlock, self.kill, self.taken)
            return iter(())
        return self.late()

    def late(self) -> Iterator[int]:
        until(self.taken.is_set)
        yield from range(3)


def a_stream_ends_while_its_feeder_writes() -> None:
    intervals(kept=60.0)
    iterator = start(EmptyFirst(kill=False))
    waits()
    batches = len(list(iterator))
    say(iterator, "" if batches == 3 else f"{batches} batches")


def a_worker_is_killed_after_its_stream() -> None:
    intervals()
    fail(start(EmptyFirst(kill=True)))


def the_pin_thread_dies() -> None:
    intervals()

    def fail(*arguments: Any) -> Any:
        raise SystemExit("pin thread")

    vars(pin_memory)["_pinned"] = fail
    fail(start(faulty.Numbers(4), pin_memory=True), "Pin memory thread exited unexpectedly")


# --- The loader dies --------------------------------------------------------------------------------------------------
def die_with(iterator: Any) -> None:
    """Be killed while the iterator lives: the step which counts."""
    waits()
    faulty.kill_myself()


def the_loader_is_killed() -> None:
    intervals()
    die_with(idle(faulty.Numbers(100)))


def no_thread_ends_orphans() -> None:
    """A worker that does not leave by itself would be ended some time later, by a thread of its own."""
    vars(worker)["_end_orphan"] = lambda watchdog: None


def the_loader_is_killed_with_full_pipe() -> None:
    intervals()
    no_thread_ends_orphans()
    die_with(idle(Wakeless(100), collate_fn=list))


def the_loader_is_killed_in_a_message() -> None:
    intervals()
    no_thread_ends_orphans()
    iterator = idle(faulty.Numbers(100))
    for queue in iterator._index_queues:
        faulty.begin_message(queue)
    until(lambda: not any(queue._reader.poll(0) for queue in iterator._index_queues))  # the workers have read it
    die_with(iterator)


# --- Python exits -----------------------------------------------------------------------------------------------------
def exits_unclosed() -> None:
    intervals()
    keep(idle(faulty.Numbers(100)))
    waits()
    print("well", flush=True)


def exits_unclosed_with_a_full_index_queue() -> None:
    intervals()
    iterator = start(faulty.At(400_000, 0, faulty.hang), batch_size=100_000, prefetch_factor=4, workers=1)
    keep(iterator)
    until(lambda: bool(iterator._index_queues[0]._buffer))  # the feeder writes what no worker reads
    waits()
    print("well", flush=True)


def exits_while_a_lock_is_held() -> None:
    """A thread that Python stops inside a queue's lock keeps it; here the lock is taken for good.

    The last of multiprocessing's exit handlers drops the iterator. It runs after that of the exit flag. When Python
    drops it by itself, the iterator's __del__ may come so late that it fails before it meets the lock.
    """
    intervals()
    iterator = idle(faulty.Numbers(100))
    keep(iterator)
    queue = iterator._index_queues[0]
    getattr(queue, "inner", queue)._sem = multiprocessing.Semaphore(0)  # "inner": of a recorded queue
    multiprocessing.util.Finalize(None, vars(sys.modules["__main__"]).pop, ["iterator"], exitpriority=-100)
    waits()
    print("well", flush=True)


def exits_with_the_pin_sentinel_unwritten() -> None:
    """A worker has died with the result queue's lock, and the shutdown was interrupted after it."""
    intervals()
    iterator = start(faulty.Numbers(20), pin_memory=True)
    next(iterator)
    plain = Crew._wake_pin

    def wake(self: Any) -> None:
        getattr(self.result_queue, "inner", self.result_queue)._wlock.acquire()
        plain(self)

    Crew._wake_pin = wake  # type: ignore[method-assign]
    Crew._join_pin = interrupt  # type: ignore[method-assign]
    waits()
    with contextlib.suppress(KeyboardInterrupt):
        iterator.close()
    print("well", flush=True)


PROGRAMS = {name: value for name, value in globals().items() if callable(value)}


def main() -> None:
    """Run the program that the command names."""
    signal_handling._SIGCHLD_handler_set = True  # a death is found by looking
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ["MINIDL_SIMULATE_DEVICE"] = "1"
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", RuntimeWarning)
    warnings.showwarning = lambda message, *rest, **options: WARNED.append(str(message))
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]]()
