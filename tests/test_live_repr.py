"""What a debugger shows of live objects, word for word; and that no repr waits or fails in any state of its object."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pkgutil
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing
import workloads as wl

import minidl
import minidl.arena.arena_queue
import minidl.auto.loading
import minidl.loader.threads  # classes with a repr of their own are found once they are loaded
from minidl.device.loader import DeviceLoader
from minidl.live_repr import LiveRepr, counted, numbers, short
from minidl.loader import progress
from minidl.loader.dispatcher import Deliver, Dispatcher
from minidl.loader.driver import END, Driver, PutSentinel, Simple
from minidl.loader.pin_memory import PinMemoryThread
from minidl.loader.progress import ProgressBoard
from minidl.loader.protocol import LoaderLifecycle, PinEvent, PinLifecycle, PinState
from minidl.wire.messages import Result
from minidl.wire.queues import BoundedQueue, ReadyQueue, SharedFlag

FORK = torch.multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def four_seconds_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time that is shown is "4.2 s"."""
    monkeypatch.setattr(progress.Place, "seconds", property(lambda place: 4.2))


# --- Decisions --------------------------------------------------------------------------------------------------------
def test_a_dispatcher_shows_its_counts_and_who_has_which_task() -> None:
    dispatcher = Dispatcher(2, 2)
    for index in "abcd":
        dispatcher.assign(index)
    assert repr(dispatcher) == (
        "<Dispatcher: rcvd_idx 0, send_idx 4; 4 of 4 tasks outstanding; worker 0: tasks 0 2; worker 1: tasks 1 3>"
    )
    dispatcher.receive(1, "batch 1")
    dispatcher.receive(3, "batch 3")
    dispatcher.worker_unavailable(1)
    assert repr(dispatcher) == (
        "<Dispatcher: rcvd_idx 0, send_idx 4; 2 of 4 tasks outstanding; reorder buffer: tasks 1 3; "
        "worker 0: tasks 0 2; worker 1: no tasks, no more work>"
    )


def test_a_driver_shows_its_state_and_what_it_will_do() -> None:
    driver = Driver(Dispatcher(2, 2), LoaderLifecycle(), persistent=True)
    assert repr(driver) == "<Driver: NEW in epoch 0; rcvd_idx 0, send_idx 0; 0 of 4 tasks outstanding>"
    driver.lifecycle.handle(minidl.loader.protocol.LoaderEvent.START)
    for _ in range(2):
        driver.worker_started()
    driver.pin_started()
    driver.begin()
    driver.drawn("a")
    driver.done()
    sent = "rcvd_idx 0, send_idx 1; 1 of 4 tasks outstanding"
    assert repr(driver) == f"<Driver: PRIMING in epoch 0; {sent}; 3 draws of the first 4 left>"
    for _ in range(3):
        driver.sampler_ended()
    driver.next()
    driver.received(Result(0, 0, "batch"))
    assert repr(driver) == (
        "<Driver: WAITING in epoch 0; rcvd_idx 1, send_idx 1; 0 of 4 tasks outstanding; task 0 is yielded next>"
    )
    assert driver.sampler_ended() == Deliver(0, 0, "batch")
    driver.yielded()
    driver.resume()
    for _ in range(2):
        assert driver.done() is not END
    assert repr(driver).startswith("<Driver: RESUMING in epoch 1; ")
    assert repr(driver).endswith("; 2 acknowledgements missing>")
    driver.close()
    effect = driver.done()
    assert effect is Simple.WAKE_PIN
    assert repr(driver).endswith("; after this step JoinPin(timeout=10.0); told to leave: pin thread>")
    while effect != PutSentinel(1):
        effect = driver.done()
    told = "told to leave: worker 0; told to leave: pin thread>"
    assert repr(driver).endswith(f"; after this step JoinWorkers(timeout=5.0); {told}")
    driver.interrupted()
    assert repr(driver).endswith("; shutdown interrupted>")


# --- Channels ---------------------------------------------------------------------------------------------------------
def test_a_queue_shows_what_is_in_it_and_whose_lock_is_held() -> None:
    queue = BoundedQueue(FORK)
    assert repr(queue) == "<BoundedQueue: 0 messages>"
    for lock in (queue._rlock, queue._wlock):
        lock.acquire()  # as a process that was killed may have left them
    queue.put("a message")
    while queue._buffer:
        time.sleep(0.001)  # the feeder has it, and waits for the lock
    queue.put("another")
    assert repr(queue) == "<BoundedQueue: 2 messages; 1 not written; read lock held; write lock held>"
    for lock in (queue._rlock, queue._wlock):
        lock.release()
    assert queue.get() == "a message"
    assert queue.get() == "another"
    queue._writer._send(b"\0\0\0\7abc")  # type: ignore[attr-defined]  # of a message of 7 bytes
    with pytest.raises(minidl.wire.queues.queue.Empty):
        queue.get(timeout=0.01)
    assert repr(queue) == "<BoundedQueue: 0 messages; 7 B of the next one read>"
    queue.close()
    queue.join_thread()
    assert repr(queue) == "<BoundedQueue: closed>"


def test_a_queue_shows_that_no_thread_writes_its_messages() -> None:
    queue = BoundedQueue(FORK)
    queue._buffer.append("a message")
    queue._thread = threading.Thread()
    assert repr(queue) == "<BoundedQueue: 0 messages; 1 not written, no feeder thread>"
    queue.close()


def test_the_ready_queue_and_the_done_event() -> None:
    ready, flag = ReadyQueue(), SharedFlag()
    ready.put("a batch")
    assert repr(ready) == "<ReadyQueue: 1 message>"
    assert repr(flag) == "<SharedFlag: not set>"
    flag.set()
    assert repr(flag) == "<SharedFlag: set>"


# --- Actors -----------------------------------------------------------------------------------------------------------
def test_the_board_shows_each_worker() -> None:
    board = ProgressBoard(3)
    assert repr(ProgressBoard(1)) == "<ProgressBoard: worker 0 STARTING for 4.2 s>"
    board.writer(0).begin(5, [7, 8])
    board.writer(0).sample(1, 8)
    board.writer(1).begin(6, [9])
    board.writer(1).collate(1)
    board.writer(2).waiting()
    assert repr(board) == (
        "<ProgressBoard: worker 0 FETCHING task 5 sample 1 for 4.2 s; worker 1 COLLATING task 6 for 4.2 s; "
        "worker 2 WAITING for 4.2 s>"
    )


def test_the_pin_thread_shows_its_state_and_what_ended_it() -> None:
    def target(lifecycle: PinLifecycle) -> None:
        lifecycle.handle(PinEvent.READY)
        assert repr(thread) == f"<PinMemoryThread: WAITING; thread {threading.get_native_id()}>"
        lifecycle.handle(PinEvent.DIED)
        raise wl.SimpleError

    thread = PinMemoryThread(target, (), PinLifecycle())
    assert repr(thread) == "<PinMemoryThread: not started>"
    thread.start()
    thread.join()
    assert repr(thread) == f"<PinMemoryThread: ENDED; thread {thread.native_id}; ended by SimpleError>"


def test_a_loader_shows_what_it_loads_and_how() -> None:
    frame: Any = inspect.currentframe()
    loader, line = minidl.DataLoader(wl.Numbers(9), batch_size=4), frame.f_lineno
    start = "<DataLoader: Numbers by SequentialSampler, batch_size 4; 0 workers"
    made = f"made at {Path(__file__).name}:{line}>"
    assert repr(loader) == f"{start}; 0 live iterators; {made}"
    iterator: Any = iter(loader)
    next(iterator)
    assert repr(loader) == f"{start}; 1 live iterator; {made}"
    assert repr(iterator) == "<_SingleProcessDataLoaderIter: IDLE; 1 yielded>"
    iterator.close()
    assert repr(iterator) == "<_SingleProcessDataLoaderIter: CLOSED; 1 yielded>"
    other: minidl.DataLoader[Any] = minidl.DataLoader(
        wl.Numbers(9), batch_size=None, shuffle=True, num_workers=1, timeout=5, persistent_workers=True
    )
    assert repr(other).startswith(
        "<DataLoader: Numbers by RandomSampler, batch_size None; 1 worker, persistent_workers; prefetch_factor 2; "
        "timeout 5 s; 0 live iterators; made at "
    )


def test_the_device_stage() -> None:
    loader = DeviceLoader([[1], [2], [3]], "sim")
    iterator = iter(loader)
    assert repr(loader) == "<DeviceLoader: to sim:0, prefetch 2; 1 live iteration; of [[1], [2], [3]]>"
    next(iterator)
    assert re.fullmatch(
        r"<_DeviceIter: to sim:0, open; batches: 1 in flight, 0 in use; of <list_iterato.*>>", repr(iterator)
    )
    iterator.close()
    assert repr(iterator) == "<_DeviceIter: to sim:0, closed; batches: 0 in flight, 0 in use>"
    inner = minidl.DataLoader(wl.Numbers(9))
    assert repr(DeviceLoader(inner, "sim")).endswith(f"; of {inner!r}>")


# --- A loader that hangs ----------------------------------------------------------------------------------------------
class StuckInFive(wl.Gate):
    """Sample 5 does not end; sample 2, the first of worker 1, waits until the gate is open."""

    def __getitem__(self, index: int) -> Any:
        return wl.hang() if index == 5 else super().__getitem__(index)


@pytest.fixture
def stuck(no_sigchld: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A pinning iterator whose worker 0 hangs in sample 5, of task 2; every other batch that can be here is here."""
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    dataset = StuckInFive(20, tmp_path / "gate", at=2, thing=functools.partial(int, 2))
    iterator: Any = iter(minidl.DataLoader(dataset, batch_size=2, num_workers=2, pin_memory=True))
    assert next(iterator).tolist() == [0, 1]
    (tmp_path / "gate").touch()  # only now: else batch 3 may come before batch 0, and be read with it
    assert next(iterator).tolist() == [2, 3]
    while iterator._board.read(0).position != 1 or iterator._board.read(0).task != 2:
        time.sleep(0.005)
    pin = iterator._pin_memory_thread.lifecycle
    while (iterator._data_queue._messages.qsize(), pin.state) != (2, PinState.WAITING):
        time.sleep(0.005)
    while iterator._board.read(1).stage is not progress.Stage.WAITING:
        time.sleep(0.005)
    yield iterator
    with contextlib.suppress(ProcessLookupError):
        os.kill(iterator._workers[0].pid, signal.SIGKILL)  # it would be waited for
    iterator.close()


def without_locks(shown: Any) -> str:
    """The repr without the locks, which are as chance will have it.

    A reader lets go for a moment after each poll. A worker that is told to leave does not wait until its feeder thread,
    which has written, lets go.
    """
    return repr(shown).replace("; read lock held", "").replace("; write lock held", "")


@pytest.mark.live
def test_an_iterator_that_hangs_shows_where(stuck: Any) -> None:
    zero, one = (worker.pid for worker in stuck._workers)
    thread = stuck._pin_memory_thread.native_id
    head = "<_MultiProcessingDataLoaderIter: IDLE in epoch 0; rcvd_idx 2, send_idx 6; 4 of 4 tasks outstanding; "
    in_sample = "has tasks 2 4, in task 2, sample index 5 (place 2 of 2) for 4.2 s; "
    tail = (
        f"pin thread <PinMemoryThread: WAITING; thread {thread}>; "
        "result queue <BoundedQueue: 0 messages>; ready queue <ReadyQueue: 2 messages>>"
    )
    waiting = f"worker 1 (pid {one}, alive) has tasks 3 5, waiting for a task for 4.2 s; "
    assert without_locks(stuck) == f"{head}worker 0 (pid {zero}, alive) {in_sample}{waiting}{tail}"
    os.kill(zero, signal.SIGKILL)
    stuck._workers[0].join()
    assert without_locks(stuck) == f"{head}worker 0 (pid {zero}, exit code -9) {in_sample}{waiting}{tail}"
    its = tail.replace("; ready queue <ReadyQueue: 2 messages>", "")
    assert without_locks(stuck._crew) == f"<Crew: worker 0 (pid {zero}, exit code -9) {in_sample}{waiting}{its}"
    assert without_locks(stuck._index_queues[1]) == "<BoundedQueue: 0 messages>"


@pytest.mark.live
def test_an_iterator_in_a_forked_child(stuck: Any) -> None:
    """A child can't ask whether its siblings live."""
    words = f"worker 0 (pid {stuck._workers[0].pid}) belongs to process {os.getpid()}; worker 1 "
    child = os.fork()
    if not child:
        os._exit(0 if words in repr(stuck) and "..." not in repr(stuck) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.live
def test_an_iterator_that_has_ended() -> None:
    iterator: Any = iter(minidl.DataLoader(wl.Numbers(2), num_workers=1))
    list(iterator)
    assert without_locks(iterator) == (
        "<_MultiProcessingDataLoaderIter: CLOSED in epoch 0; rcvd_idx 2, send_idx 2; 0 of 2 tasks outstanding; "
        f"told to leave: worker 0; worker 0 (pid {iterator._workers[0].pid}, exit code 0) has no tasks, at its end "
        "for 4.2 s; result queue <BoundedQueue: 0 messages>>"
    )


@pytest.mark.live
def test_a_worker_that_works_on_an_index_without_a_repr() -> None:
    """The user's own object fails; what is known besides is shown."""
    iterator: Any = iter(minidl.DataLoader(wl.At(1, 0, 0), sampler=[Nameless()], batch_size=None, num_workers=1))
    while iterator._board.read(0).stage is not progress.Stage.WAITING:
        time.sleep(0.005)
    row = iterator._board.row(0)
    row[1], row[2] = progress.Stage.FETCHING, 0
    assert "alive) has task 0, ... ZeroDivisionError for 4.2 s; result queue" in repr(iterator)
    iterator.close()


class Nameless:
    """An index that can't be shown, and is 0."""

    def __repr__(self) -> str:
        raise ZeroDivisionError

    def __reduce__(self) -> Any:
        return int, ()


# --- At any moment ----------------------------------------------------------------------------------------------------
def shown() -> dict[str, Any]:
    """Each class with a designed repr. By name: Python 3.10 keeps what dataclass(slots=True) has replaced."""
    kinds, waiting = set[Any](), [LiveRepr]
    while waiting:
        found = waiting.pop().__subclasses__()
        kinds |= {kind for kind in found if kind.__module__.startswith("minidl.")}
        waiting += found
    apart = ("Traced", "_Base", "LoaderWithoutState", "StandIn")  # bases, and what differs in its methods alone
    named = {f"{kind.__module__}:{kind.__qualname__}" for kind in kinds if not kind.__name__.startswith(apart)}
    return {name: pkgutil.resolve_name(name) for name in sorted(named) if not name.startswith("minidl.explore")}


@pytest.mark.parametrize("kind", shown().values(), ids=shown())
def test_an_object_that_is_not_made_yet(kind: Any) -> None:
    """A debugger stops anywhere, in __init__ too."""
    new = kind.__new__(kind)
    try:
        assert re.fullmatch(rf"<{kind.__name__}: (.*; )?\.\.\. \w+Error>", repr(new))
    finally:
        for name in ("__del__", "_delete"):  # what is not made has nothing to end
            vars(new).setdefault(name, None) if hasattr(new, "__dict__") else None


AT_EXIT = """
import minidl, workloads as wl

class Shows:
    def __del__(self):
        print(*self.kept, sep="\\n")

kept = [minidl.DataLoader(wl.Numbers(50), num_workers=1)]
kept += [iter(kept[0])]
kept += [kept[1]._index_queues[0], kept[1]._driver, kept[1]._board, kept[1]._crew]
last = Shows()
last.kept = kept  # Python clears the program's names in no certain order
next(kept[1])
"""


@pytest.mark.live
def test_while_python_exits() -> None:
    done = wl.run(AT_EXIT)
    said = f"exit code {done.returncode}\n{done.stderr}\n{done.stdout}"
    assert (done.returncode, done.stderr) == (0, ""), said
    names = "DataLoader _MultiProcessingDataLoaderIter BoundedQueue Driver ProgressBoard Crew"
    assert re.findall(r"^<(\w+): ", done.stdout, re.MULTILINE) == names.split(), said
    # SIGTERM has ended the daemon; torch's handler exits with 0. Python may have taken the modules away before.
    assert "exit code 0) has task" in done.stdout or "<Crew: ... " in done.stdout, said


def test_words() -> None:
    assert [numbers("task", values) for values in ([], [5], [5, 7])] == ["no tasks", "task 5", "tasks 5 7"]
    assert [counted(number, "message") for number in (0, 1, 2)] == ["0 messages", "1 message", "2 messages"]
    assert short(list(range(100))) == "[0, 1, 2, 3, 4, 5, ...]"
    assert short(Nameless()).startswith("<Nameless instance at 0x")
    with pytest.raises(NotImplementedError):
        LiveRepr()._phrases()
    assert repr(LiveRepr()) == "<LiveRepr: ... NotImplementedError>"
