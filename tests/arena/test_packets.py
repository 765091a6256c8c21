"""Messages that a socket takes whole: the queue of a worker's tasks."""

from __future__ import annotations

import errno
import multiprocessing
import os
import queue
import select
import socket
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import workloads as wl

from minidl.arena import packets
from minidl.arena.packets import PACKET, Readable, TaskQueue
from minidl.arena.pickling import _BY_NUMBER, packed, unpacked
from minidl.wire.message import Envelope
from minidl.wire.messages import Task
from minidl.wire.queues import NoThreadError


@pytest.fixture
def tasks() -> Iterator[Any]:
    made = TaskQueue()
    yield made
    made.close()
    for thread in threading.enumerate():
        if thread.name == "task_queue":
            thread.join(wl.BOUND)


def test_messages_come_in_order_and_whole(tasks: Any) -> None:
    sent = [0, list(range(PACKET)), "x" * (PACKET - 1), None]
    for message in sent:
        tasks.put(message)
    assert [tasks.get(timeout=wl.BOUND) for _ in sent] == sent
    with pytest.raises(queue.Empty):
        tasks.get(block=False)
    assert repr(tasks) == "<TaskQueue: open>"


def test_a_message_of_any_length_comes_whole(tasks: Any) -> None:
    """Also where its pickle fills its packets to the last byte, or is one byte longer."""
    for length in range(PACKET - 40, PACKET + 3):
        tasks.put(bytes(length))
        assert len(tasks.get(timeout=wl.BOUND)) == length


class Waits:
    """A Readable that notes for how long it is to wait, and has found something so many times."""

    def __init__(self, found: int) -> None:
        self.found, self.seconds = found, list[Any]()

    def wait(self, seconds: float | None) -> bool:
        self.seconds.append(seconds)
        return len(self.seconds) <= self.found


def test_a_part_of_a_message_keeps_no_reader_waiting(tasks: Any) -> None:
    plain = tasks._readable
    for options in ({"block": False}, {"timeout": 0.0}, {"timeout": wl.BOUND}, {}):
        tasks._readable = waits = Waits(2)
        for _ in range(2):
            tasks._sender.send(packets._PART)
        with pytest.raises(queue.Empty):
            tasks.get(**options)
        if bound := options.get("timeout"):
            assert bound == waits.seconds[0] > waits.seconds[1] > waits.seconds[2] > 0
        else:
            assert waits.seconds == [0.0 if options else None] * 3
    tasks._readable = plain
    tasks.put("the rest")
    assert tasks.get(timeout=wl.BOUND) == "the rest"


class Counted(Envelope):
    """An envelope that becomes what no number stands for."""

    def __reduce__(self) -> Any:
        return str, (self.message.idx,)


def test_an_envelope_may_become_anything_and_a_task_travels_by_a_number(tasks: Any) -> None:
    tasks.put(Counted(Task(7, 0, [1, 2])))
    assert tasks.get(timeout=wl.BOUND) == "7"
    sent = packed(Envelope(Task(3, 1, [4, 5])))
    assert sent[0] < len(_BY_NUMBER)
    assert b"Task" not in sent
    assert unpacked(memoryview(sent)) == Task(3, 1, [4, 5])


class Answers:
    """A poll that answers in turn."""

    def __init__(self, *answers: list[int]) -> None:
        self.left = list(answers)

    def poll(self, timeout: float | None) -> list[int]:
        return self.left.pop(0)


def test_what_comes_meanwhile_is_found_without_a_sleep(tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    readable = Readable(tasks._receiver)
    monkeypatch.setattr(packets, "_SOON", wl.BOUND)
    readable._poll = Answers([], [], [1])  # type: ignore[assignment]
    assert readable.wait(wl.BOUND)
    monkeypatch.setattr(packets, "_SOON", 0.0)
    readable._poll = Answers([], [], [], [1])  # type: ignore[assignment]  # two waits: in vain, and at once to sleep
    assert [readable.wait(1.0), readable.wait(1.0)] == [False, True]
    assert readable._poll.left == []


def test_a_reader_that_looks_lets_a_sender_on_its_core_run(tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "_SOON", wl.BOUND)
    monkeypatch.setattr(os, "sched_yield", lambda: tasks.put("sent meanwhile"))
    assert tasks.get(timeout=wl.BOUND) == "sent meanwhile"


def test_what_finds_no_room_is_written_by_a_thread(tasks: Any) -> None:
    sent = [list(range(number, number + 9000)) for number in range(40)]
    for message in sent:
        tasks.put(message)
    assert "not written" in repr(tasks)
    assert [tasks.get(timeout=wl.BOUND) for _ in sent] == sent
    thread = tasks._thread
    thread is None or thread.join(wl.BOUND)
    assert tasks._thread is None
    tasks.put("the next one")
    assert tasks.get(timeout=wl.BOUND) == "the next one"


class Refusing:
    """A socket whose packets are refused with these errors first."""

    def __init__(self, own: socket.socket, *errors: int) -> None:
        self._socket, self._errors = own, list(errors)

    def send(self, data: bytes, flags: int) -> int:
        if self._errors:
            raise OSError(self._errors.pop(), "refused")
        return self._socket.send(data, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def test_what_the_kernel_has_no_memory_for_now_is_written_by_a_thread(tasks: Any) -> None:
    tasks._sender = Refusing(tasks._sender, errno.ENOMEM, errno.ENOBUFS)
    tasks.put(1)
    assert tasks.get(timeout=wl.BOUND) == 1
    thread = tasks._thread
    thread is None or thread.join(wl.BOUND)
    tasks._sender = Refusing(tasks._sender, errno.EPERM)
    with pytest.raises(PermissionError):
        tasks.put(2)


def test_no_thread_can_be_started(tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        tasks.put("what finds room needs none")
        with pytest.raises(NoThreadError, match="can't create new thread"):
            tasks.put("x" * 9 * PACKET)
    tasks.put("by a thread now")
    got = [tasks.get(timeout=wl.BOUND) for _ in range(3)]
    assert got == ["what finds room needs none", "x" * 9 * PACKET, "by a thread now"]


def test_a_put_does_not_wait_for_a_thread_that_writes(tasks: Any) -> None:
    locked, done = threading.Event(), threading.Event()

    def write() -> None:
        with tasks._writing:
            locked.set()
            done.wait(wl.BOUND)

    thread = threading.Thread(target=write)
    thread.start()
    assert locked.wait(wl.BOUND)
    tasks.put("left to the thread")
    assert repr(tasks) == "<TaskQueue: open; 1 packet not written>"
    done.set()
    thread.join()
    tasks.put("the next one")
    assert [tasks.get(timeout=wl.BOUND) for _ in range(2)] == ["left to the thread", "the next one"]


def test_a_put_may_interrupt_a_put(tasks: Any) -> None:
    """As the shutdown does that a signal's handler begins."""
    plain = tasks._sender

    class Interrupted:
        def send(self, *arguments: Any) -> int:
            tasks._sender = plain
            tasks.put("of the handler")
            return int(plain.send(*arguments))

    tasks._sender = Interrupted()
    tasks.put("first")
    assert [tasks.get(timeout=wl.BOUND) for _ in range(2)] == ["first", "of the handler"]


def test_a_closed_queue_takes_nothing_and_a_dead_worker_everything(tasks: Any) -> None:
    tasks._receiver.close()
    tasks.put("nobody reads it")
    assert not tasks._unsent
    tasks.close()
    tasks.close()
    assert repr(tasks) == "<TaskQueue: closed>"
    with pytest.raises(ValueError, match="closed"):
        tasks.put("too late")


def test_a_thread_that_has_ended_before_the_queue_is_a_failure(tasks: Any) -> None:
    go = threading.Event()
    for target in (go.wait, go.set):
        assert tasks.failure == ""
        tasks._thread = threading.Thread(target=target)
        tasks._thread.start()
    tasks._thread.join(wl.BOUND)
    assert tasks.failure == "the thread that writes it has ended"
    tasks.close()
    assert tasks.failure == ""


def test_a_thread_that_waits_for_room_ends_with_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, limits, poll = threading.Event(), list[Any](), select.poll

    def watched() -> Any:
        room = poll()

        def wait(limit: Any) -> Any:
            limits.append(limit)
            waits.set()
            return room.poll(limit)

        return SimpleNamespace(register=room.register, poll=wait)

    made: Any = TaskQueue()
    made._sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    monkeypatch.setattr(select, "poll", watched)
    for _ in range(9):
        made.put("x" * 2000)
    thread = made._thread
    assert thread.daemon, "it keeps no program that ends without closing the queue"
    assert waits.wait(wl.BOUND)
    with made._receiver.dup():  # as a worker has it
        made.close()
        thread.join(wl.BOUND)
    assert not thread.is_alive()
    assert None not in limits


def test_a_queue_that_was_never_made_can_be_closed() -> None:
    TaskQueue.__new__(TaskQueue).close()  # as __del__ does after an error in __init__


def test_a_worker_whose_loader_is_gone_gets_nothing_and_rests(tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks.put("the last one")
    tasks.leave()
    assert tasks.get(timeout=wl.BOUND) == "the last one"
    rests: list[float] = []
    monkeypatch.setattr(packets.time, "sleep", rests.append)
    for timeout in (0.01, wl.BOUND, None):
        with pytest.raises(queue.Empty):
            tasks.get(timeout=timeout)
    assert rests == [0.01, packets._STEP, packets._STEP]


def _answer(tasks: TaskQueue, answers: Any) -> None:
    assert tasks._sender.fileno() == -1
    answers.send(tasks.get(timeout=wl.BOUND))


@pytest.mark.live
def test_a_worker_has_only_the_reading_end(tasks: Any) -> None:
    """A spawned one has no more, either: the test below rebuilds it, and loaders with `spawn` use it."""
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=_answer, args=(tasks, there))
    worker.start()
    tasks.put(os.getpid())
    assert here.poll(wl.BOUND)
    assert here.recv() == os.getpid()
    worker.join(wl.BOUND)
    assert worker.exitcode == 0


def test_a_worker_and_a_forked_child_have_no_writing_end(tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = object.__new__(TaskQueue)
    other.__setstate__(tasks.__getstate__())
    assert not hasattr(other, "_sender")
    tasks.put("to the worker")
    assert other.get(timeout=wl.BOUND) == "to the worker"
    monkeypatch.setattr(packets, "_of_this_process", weakref.WeakSet([tasks]))
    packets._after_fork_in_child()
    assert tasks._sender.fileno() == -1
