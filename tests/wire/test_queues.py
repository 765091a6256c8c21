"""The queue whose reader never waits for the rest of a message, and the flag that has no lock."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import queue
import select
import signal
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.multiprocessing
import workloads as wl

from minidl.wire import queues
from minidl.wire.queues import BoundedQueue, NoThreadError, ReadyQueue, SharedFlag


@pytest.fixture
def pipe() -> Iterator[BoundedQueue]:
    """A queue that is written to by hand."""
    made = BoundedQueue(torch.multiprocessing)
    yield made
    made.close()
    made.join_thread()
    made._reader.close()
    made._writer.close()


def write(pipe: Any, data: bytes) -> None:
    pipe._sem.acquire()  # as put() does
    os.write(pipe._writer.fileno(), data)


def framed(message: object) -> bytes:
    data = pickle.dumps(message)
    return struct.pack("!i", len(data)) + data


def test_a_message_may_come_in_any_pieces(pipe: Any) -> None:
    came = []
    for byte in framed(["a message", 17]) + framed("the next"):
        write(pipe, bytes([byte]))
        with contextlib.suppress(queue.Empty):
            came.append(pipe.get(timeout=0))
    assert came == [["a message", 17], "the next"]


def test_a_message_of_more_than_two_gigabytes_announces_itself_otherwise(pipe: Any) -> None:
    data = pickle.dumps("long")
    write(pipe, struct.pack("!iQ", -1, len(data)) + data)
    write(pipe, framed("short"))
    assert [pipe.get(timeout=wl.BOUND), pipe.get(timeout=wl.BOUND)] == ["long", "short"]
    for byte in struct.pack("!iQ", -1, len(data)) + data:
        with pytest.raises(queue.Empty):
            pipe.get(block=False)
        write(pipe, bytes([byte]))
    assert pipe.get(block=False) == "long"


def test_a_queue_that_nothing_refers_to_ends_its_thread() -> None:
    """As after an interrupted shutdown, which has not closed it."""
    put: Any = BoundedQueue(torch.multiprocessing)
    put.put("a message")
    assert put.get(timeout=wl.BOUND) == "a message"
    thread = put._thread
    del put
    gc.collect()
    thread.join(wl.BOUND)
    assert not thread.is_alive()


@pytest.mark.parametrize("in_a_worker", [False, True])
def test_a_worker_whose_feeder_can_not_write_ends(
    in_a_worker: bool, pipe: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the loader would wait for the message for ever. In the loader's process, the queue says that it was lost."""
    ended: list[int] = []
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(queues.os, "_exit", ended.append)
    assert pipe.failure == ""
    if in_a_worker:
        pipe.enter_worker()
    try:
        raise OSError("no room")
    except OSError as error:
        pipe._on_queue_feeder_error(error, "a message")
    assert pipe.failure == "OSError: no room"
    assert "OSError: no room" in capsys.readouterr().err
    assert ended == [1] * in_a_worker


def test_an_empty_message_is_whole(pipe: Any) -> None:
    write(pipe, struct.pack("!i", 0))
    with pytest.raises(EOFError):  # pickle's: it has been handed on
        pipe.get(timeout=wl.BOUND)


def test_a_part_of_a_message_keeps_no_reader_waiting(pipe: Any) -> None:
    write(pipe, framed(bytes(1000))[:500])
    for options in ({"timeout": 0.05}, {"block": False}, {"timeout": 0.0}):
        with pytest.raises(queue.Empty):
            pipe.get(**options)
    write(pipe, framed(bytes(1000))[500:])
    assert pipe.get() == bytes(1000)


def test_a_slow_writer_does_not_prolong_the_timeout(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []

    def read(seconds: float | None) -> bool:
        waits.append(seconds)
        return len(waits) % 3 > 0  # a byte has come, twice

    monkeypatch.setattr(pipe._incoming, "read", read)
    for options in ({"timeout": wl.BOUND}, {"block": False}, {}):
        with pytest.raises(queue.Empty):
            pipe.get(**options)
    assert wl.BOUND >= waits[0] > waits[1] > waits[2] > 0
    assert waits[3:] == [0.0] * 3 + [None] * 3


def test_a_put_may_interrupt_a_put_and_only_the_first_one_puts_signals_off(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one starts the feeder; a signal's handler that shuts down puts, too."""
    began: list[Any] = []

    def put_off_all() -> Any:
        began.append(pipe._thread)
        return contextlib.nullcontext()

    monkeypatch.setattr(queues.signal_handling, "put_off_all", put_off_all)
    with pipe._notempty:
        pipe.put("first")
    pipe.put("second")
    assert began == [None]
    box: list[Any] = []
    assert [pipe.get(timeout=wl.BOUND), pipe.get(timeout=wl.BOUND, inbox=box)] == ["first", *box] == ["first", "second"]


def test_a_message_longer_than_the_pipe(pipe: Any) -> None:
    long = os.urandom(3_000_000)
    pipe.put(long)
    pipe.put("behind it")
    assert pipe.get(timeout=wl.BOUND) == long
    assert pipe.get(timeout=wl.BOUND) == "behind it"


def test_a_queue_without_writers_says_so(pipe: Any) -> None:
    write(pipe, framed(1)[:3])
    pipe._writer.close()
    with pytest.raises(EOFError, match=r"^every writer of the queue's pipe is gone$"):
        pipe.get(timeout=wl.BOUND)


@pytest.fixture
def no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that exits, from Python 3.12 on."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.usefixtures("no_new_thread")
def test_where_no_thread_can_be_started_a_message_is_written_at_once(pipe: Any) -> None:
    """The longest one fills what a pipe takes whole."""
    most = select.PIPE_BUF - 4 - (len(pickle.dumps(bytes(1000))) - 1000)  # 4: its length goes first
    pipe.put("first")
    pipe.put(bytes(most))
    with pytest.raises(NoThreadError):
        pipe.put(bytes(most + 1))
    assert [pipe.get(timeout=0), pipe.get(block=False)] == ["first", bytes(most)]
    assert pipe.qsize() == 0


@pytest.mark.usefixtures("no_new_thread")
@pytest.mark.parametrize("why", ["a long message", "a full pipe", "a lock whose holder is dead"])
@pytest.mark.heavy
def test_and_where_that_could_mean_to_wait_it_is_an_error(pipe: Any, why: str) -> None:
    message = "x" * (select.PIPE_BUF if why == "a long message" else 1)
    if why == "a full pipe":
        os.set_blocking(pipe._writer.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe._writer.fileno(), bytes(select.PIPE_BUF))
    if why == "a lock whose holder is dead":
        pipe._wlock.acquire()
    with pytest.raises(NoThreadError, match="can't create new thread"):
        pipe.put(message)
    assert pipe.qsize() == 0


@pytest.mark.usefixtures("no_new_thread")
def test_what_cannot_be_pickled_takes_no_place_in_the_queue(pipe: Any) -> None:
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        pipe.put(lambda: None)
    assert pipe.qsize() == 0


def test_an_error_that_a_signals_handler_raises_in_a_put_is_passed_on(pipe: Any) -> None:
    """Such as "a worker is killed": the message is sent all the same, once, by the thread that sends the others."""
    pipe.put("first")
    feeder, condition = pipe._thread, pipe._notempty

    class Interrupted:
        def __enter__(self) -> None:
            condition.acquire()

        def __exit__(self, *error: object) -> None:
            condition.release()
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

        notify = condition.notify

    pipe._notempty = Interrupted()
    with pytest.raises(RuntimeError, match="is killed by signal"):
        pipe.put("second")
    pipe._notempty = condition
    pipe.put("third")
    assert [pipe.get(timeout=wl.BOUND) for _ in range(3)] == ["first", "second", "third"]
    assert pipe._thread is feeder


def test_the_feeder_thread_ends_though_a_signals_handler_raises_while_it_is_told_to(pipe: Any) -> None:
    pipe.put("a message")
    assert pipe.get(timeout=wl.BOUND) == "a message"
    feeder, (_, condition) = pipe._thread, pipe._close._args
    notify = condition.notify

    def interrupted() -> None:
        condition.notify = notify
        raise KeyboardInterrupt

    condition.notify = interrupted
    with pytest.raises(KeyboardInterrupt):
        pipe.close()
    feeder.join(wl.BOUND)
    assert not feeder.is_alive()


def test_a_closed_queue_is_not_read(pipe: Any) -> None:
    assert pipe._wlock._semlock.name is None, "the semaphores of forked workers have no names"
    pipe.forget_names()
    pipe.close()
    with pytest.raises(ValueError, match="is closed"):
        pipe.get()


@pytest.mark.heavy
def test_only_a_lock_that_is_held_by_nobody_who_writes_jams(pipe: Any) -> None:
    assert not pipe.jammed()
    assert not pipe.jammed()  # it has let go of what it took
    pipe._wlock.acquire()
    reading, pipe._incoming._poll = pipe._incoming._poll, None  # another thread polls with it, and no two may
    assert pipe.jammed()
    pipe._incoming._poll = reading
    write(pipe, framed("I was only slow"))
    assert not pipe.jammed()
    pipe._wlock.release()


def answer(incoming: Any, outgoing: Any, flag: Any) -> None:
    message = incoming.get(timeout=wl.BOUND)
    outgoing.put((message, flag.is_set()))
    flag.set()


@pytest.mark.live
def test_queues_and_flags_between_processes() -> None:
    context: Any = torch.multiprocessing.get_context("fork")
    there, back, flag = BoundedQueue(context), BoundedQueue(context), SharedFlag()
    other = copy.copy(flag)
    process = context.Process(target=answer, args=(there, back, flag))
    process.start()
    there.put(["hello"] * 100_000)
    assert back.get(timeout=wl.BOUND) == (["hello"] * 100_000, False)
    process.join(wl.BOUND)
    assert process.exitcode == 0
    assert (flag.is_set(), other.is_set()) == (True, True)
    for each in (there, back):
        each.close()
        each.join_thread()


@pytest.mark.live
def test_a_forked_process_puts_into_a_queue_whose_feeder_thread_runs_in_its_parent() -> None:
    """The thread is not in the child, which starts its own; and the parent may be in the middle of a put."""
    context: Any = torch.multiprocessing.get_context("fork")
    both = BoundedQueue(context)
    both.put("of the parent")
    assert both.get(timeout=wl.BOUND) == "of the parent"
    with both._notempty:
        process = context.Process(target=both.put, args=("of the child",))
        process.start()
    assert both.get(timeout=wl.BOUND) == "of the child"
    process.join(wl.BOUND)
    assert process.exitcode == 0
    both.close()
    both.join_thread()


@pytest.mark.parametrize("message", ["release unlocked lock", "DataLoader worker (pid 7) is killed"])
def test_news_may_be_told_twice_at_once(message: str) -> None:
    """By a signal's handler, or by another thread. The error of a handler goes on."""

    def release() -> None:
        raise RuntimeError(message)

    news = queues._News()
    for _ in range(2):
        news.tell()
    assert news.wait()
    assert not news.wait(0)
    news._none = SimpleNamespace(locked=lambda: True, release=release)  # type: ignore[assignment]
    with contextlib.nullcontext() if "unlocked" in message else pytest.raises(RuntimeError, match="is killed"):
        news.tell()


def test_who_finds_the_queue_being_read_waits_no_longer_than_its_timeout(pipe: Any) -> None:
    write(pipe, framed("for the other one"))
    reader = threading.Thread(target=pipe._rlock.acquire)
    reader.start()
    reader.join()
    try:
        for options in ({"timeout": 0.01}, {"block": False}):
            with pytest.raises(queue.Empty):
                pipe.get(**options)
    finally:
        pipe._rlock.release()


def test_an_error_that_ends_the_feeder_thread_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, ended, worker = list[Any](), list[int](), BoundedQueue(torch.multiprocessing.get_context("fork"))
    monkeypatch.setattr(threading, "excepthook", seen.append)
    monkeypatch.setattr(os, "_exit", ended.append)
    worker.enter_worker()
    worker._thread = "the feeder"
    for thread in ("another", "the feeder"):
        threading.excepthook(SimpleNamespace(thread=thread))  # type: ignore[arg-type]
    assert ([about.thread for about in seen], ended) == (["another", "the feeder"], [1])


@pytest.mark.parametrize(
    ("alive", "closed", "failure"),
    [(True, False, ""), (False, False, "the thread that writes it has ended"), (False, True, "")],
)
def test_a_queue_whose_thread_has_ended_has_failed(alive: bool, closed: bool, failure: str) -> None:
    queue: Any = BoundedQueue(torch.multiprocessing.get_context("fork"))
    assert queue.failure == ""
    queue._thread, queue._closed = SimpleNamespace(is_alive=lambda: alive), closed
    assert queue.failure == failure


# --- The ready queue --------------------------------------------------------------------------------------------------
def test_the_ready_queue_keeps_order_and_its_timeout() -> None:
    ready = ReadyQueue()
    for timeout in (0, 0.02):
        with pytest.raises(queue.Empty):
            ready.get(timeout=timeout)
    for message in range(3):
        ready.put(message)
    assert [ready.get(), ready.get(timeout=0), ready.get()] == [0, 1, 2]
    with pytest.raises(queue.Empty):
        ready.get(timeout=0.02)  # the lock of a message that was not waited for is no message


def test_the_ready_queue_wakes_a_reader_that_waits() -> None:
    ready, got = ReadyQueue(), []
    reader = threading.Thread(target=lambda: got.extend(ready.get() for _ in range(2000)))
    reader.start()
    for message in range(2000):
        ready.put(message)
    reader.join(wl.BOUND)
    assert got == list(range(2000))


# --- Names of semaphores ----------------------------------------------------------------------------------------------
@pytest.mark.live
def test_names_are_removed_once_and_the_queue_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    """Only a new interpreter needs them. When the queue is collected, nobody looks for them any more."""
    made: Any = BoundedQueue(torch.multiprocessing.get_context("spawn"))
    names = {f"/dev/shm/sem.{lock._semlock.name[1:]}" for lock in (made._rlock, made._wlock, made._sem)}
    assert all(map(os.path.exists, names))
    made.forget_names()
    assert not any(map(os.path.exists, names))
    write(made, framed("still here"))
    assert made.get(timeout=wl.BOUND) == "still here"
    made.close()
    made._writer.close()
    del made
    gc.collect()
    assert capfd.readouterr().err == ""


class Finalizer:
    """As `multiprocessing` keeps them."""

    def __init__(self, called: list[Any], callback: Any, name: Any) -> None:
        self.called, self._callback, self._args = called, callback, (name, "more")

    def __call__(self) -> None:
        self.called.append(self)


def test_only_the_queues_own_names_are_removed(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    own = [Finalizer(called, queues.SemLock._cleanup, pipe._wlock._semlock.name) for _ in range(2)]
    others = [Finalizer(called, queues.SemLock._cleanup, "more"), Finalizer(called, print, pipe._wlock._semlock.name)]
    monkeypatch.setattr(queues.util, "_finalizer_registry", dict(enumerate([others[0], *own, others[1]])))
    pipe.forget_names()
    assert called == own


@pytest.mark.parametrize("fails", [False, True])
def test_a_tracker_alone_is_started_in_a_session_of_its_own(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[Any] = []
    tracker = ["python", "-s", "-c", "from multiprocessing.resource_tracker import main;main(5)"]

    def ensure_running() -> None:
        private: Any = queues.util
        assert private.spawnv_passfds("/python", tracker, [5]) == 17
        private.spawnv_passfds("/python", ["python", "-c", "main()"], [6])
        if fails:
            raise OSError

    def spawnv_passfds(*arguments: Any) -> int:
        spawned.append(arguments)
        return 17

    monkeypatch.setattr(queues.util, "spawnv_passfds", spawnv_passfds)
    monkeypatch.setattr(queues.resource_tracker, "ensure_running", ensure_running)
    with pytest.raises(OSError) if fails else contextlib.nullcontext():
        queues.start_tracker_apart()
    apart = f"import os; os.setsid(); {tracker[-1]}"
    assert spawned == [("/python", [*tracker[:-1], apart], [5]), ("/python", ["python", "-c", "main()"], [6])]
    assert queues.util.spawnv_passfds is spawnv_passfds  # type: ignore[attr-defined]


def test_a_signal_handler_may_take_longer_than_the_timeout_of_the_ready_queue(install_handler: Any) -> None:
    """CPython's SimpleQueue then waits without a bound."""
    install_handler(signal.SIGUSR1, lambda *_: time.sleep(0.4))
    signals = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    signals.start()
    with pytest.raises(queue.Empty):
        ReadyQueue().get(timeout=0.3)
    signals.join()
