"""A worker in this process: what it answers to each message, and how it ends."""

from __future__ import annotations

import dataclasses
import os
import queue
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data._utils.worker as torch_worker

from minidl.data import worker_info
from minidl.data.fetch import _DatasetKind
from minidl.loader import worker
from minidl.loader.driver import MP_STATUS_CHECK_INTERVAL
from minidl.loader.ports import Fetching, FoundDead, Note, Ports, WorkerEntered
from minidl.loader.progress import ProgressBoard, Stage, WorkerProgress
from minidl.loader.protocol import WorkerEvent, WorkerState
from minidl.loader.worker import Users, WorkerSpec, _Worker
from minidl.resume.stateful import FetchStart, StatefulFetching, no_state, pack
from minidl.wire.errors import ExceptionWrapper
from minidl.wire.message import WorkerPayload
from minidl.wire.messages import RebuildFailure, Result, ResumeIteration, Sentinel, Task, WorkerExhausted
from minidl.wire.queues import SharedFlag

WHERE = "in DataLoader worker process 1"


class Tasks:
    """An index queue with these messages, of which one may be queue.Empty. Behind them, the loader is done."""

    def __init__(self, done: SharedFlag, messages: tuple[Any, ...]) -> None:
        self.done, self.messages = done, list(messages)

    def get(self, *, timeout: float) -> Any:
        assert timeout == MP_STATUS_CHECK_INTERVAL
        if not self.messages:
            self.done.set()
            return Sentinel()
        message = self.messages.pop(0)
        if message is queue.Empty:
            raise queue.Empty
        return message


class Results(list[Any]):
    """A result queue; called: the names of its other methods, as they are called."""

    put = list.append

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.called.append(name)


class Told(WorkerProgress):
    """Keeps each task's outcome, and counts the waits."""

    outcomes: list[int]
    waits = 0

    def end(self, outcome: int) -> None:
        super().end(outcome)
        self.outcomes.append(outcome)

    def waiting(self) -> None:
        super().waiting()
        self.waits += 1


class Noting(Ports):
    """Plain messages; keeps notes."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.deciders: list[Any] = []

    def decider(self, kind: Any, *args: Any) -> Any:
        self.deciders.append(kind(*args))
        return self.deciders[-1]

    def note(self, note: Note) -> None:
        self.notes.append(note)

    def envelope(self, message: Task | Result) -> Any:
        return message

    def worker_progress(self, board: ProgressBoard, worker_id: int) -> WorkerProgress:
        told = Told(worker_id, board.row(worker_id))
        told.outcomes = []
        return told


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What threads would be started with."""
    made: list[dict[str, Any]] = []
    thread = lambda **options: made.append(options) or SimpleNamespace(start=lambda: None)  # noqa: E731
    monkeypatch.setattr(worker.threading, "Thread", thread)
    return made


def worker_of(
    *messages: Any, dataset: Any = (), users: Any = None, collate: Any = list, init: Any = None, **options: Any
) -> Any:
    """Worker 1 of 2; the messages lie in its index queue."""
    done = SharedFlag()
    usual: dict[str, Any] = {
        "worker_id": 1,
        "num_workers": 2,
        "dataset_kind": _DatasetKind.Map,
        "users": users or WorkerPayload(Users(dataset, collate, init)),
        "auto_collation": True,
        "drop_last": False,
        "base_seed": 40,
        "index_queue": Tasks(done, messages),
        "result_queue": Results(),
        "done_event": done,
        "board": ProgressBoard(2),
        "ports": Noting(),
        "manager_pid": os.getppid(),
        "fetching": Fetching(),
    }
    return _Worker(WorkerSpec(**usual | options))


def serve(worker: Any) -> None:
    """As `_worker_loop` does, in this process."""
    worker.unpack()
    worker.initialise()
    worker.run()


def ran(*messages: Any, **options: Any) -> tuple[Any, Results]:
    """A worker that has served all messages, and what it has sent."""
    made = worker_of(*messages, **options)
    serve(made)
    assert made.spec.index_queue.messages == []
    return made, made.spec.result_queue


def error_in(data: Any) -> tuple[str, str, str]:
    """The last line of an error, where it was, and the place."""
    assert isinstance(data, ExceptionWrapper)
    return data.last_line, data.where, data.place


class Stateful:
    """Its state is how many samples it has given. broken: it can't be told."""

    def __init__(self, broken: bool = False) -> None:
        self.given, self.broken = 0, broken

    def __getitem__(self, index: int) -> int:
        self.given += 1
        if index < 0:
            raise IndexError("below 0")
        return index * 10

    def state_dict(self) -> Any:
        if self.broken:
            raise OSError("no state")
        return self.given

    def load_state_dict(self, state: Any) -> None:
        self.given = state


def state(given: int) -> bytes:
    return pack({"dataset": given, "iterator": None, "ended": False})


# --- Tasks ------------------------------------------------------------------------------------------------------------
def test_each_task_is_answered_once_and_in_order() -> None:
    first = Task(0, 1, [2, 0])
    made, results = ran(first, queue.Empty, first, Task(2, 1, [1]), dataset="abc")
    assert results == [Result(0, 1, ["c", "a"]), Result(2, 1, ["b"])]
    assert made.lifecycle.state is WorkerState.ENDED
    assert made.progress.outcomes == [0, 0]
    assert made.progress.waits == 3, "a poll that brings nothing begins no new wait"
    assert made.spec.board.read(1).stage is Stage.WAITING
    assert results.called == []


def test_tasks_that_come_with_the_done_event_are_not_fetched() -> None:
    made = worker_of(Task(0, 1, [0]), dataset="abc")
    made.spec.done_event.set()
    serve(made)
    assert made.spec.result_queue == []
    assert made.lifecycle.state is WorkerState.ENDED


def test_an_error_of_a_sample_is_its_tasks() -> None:
    made, results = ran(Task(0, 1, [0, 3]), Task(1, 1, [1]), dataset="abc")
    assert error_in(results[0].data) == (
        "IndexError: string index out of range", WHERE, "Task 0 of worker 1: sample index 3 (place 2 of 2)."
    )  # fmt: skip
    assert results[1:] == [Result(1, 1, ["b"])]
    assert made.progress.outcomes == [1, 0]


def test_indices_that_could_not_travel_are_errors_of_their_tasks() -> None:
    unsent = ExceptionWrapper(ValueError("unsent"), "in the loader")
    _, results = ran(Task(4, 1, unsent), Task(5, 1, RebuildFailure(ValueError("unbuilt"))), dataset="abc")
    assert results[0].data is unsent
    assert error_in(results[1].data) == (
        "ValueError: unbuilt", f"{WHERE} while it unpickled a task's indices", "Task 5."
    )  # fmt: skip


def test_a_segment_that_could_not_be_sized_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[Any] = []
    monkeypatch.setattr(worker, "remove_unsized", removed.append)
    ran(Task(0, 1, [3]), dataset="abc")
    assert [type(error) for error in removed] == [IndexError]


# --- Beginnings -------------------------------------------------------------------------------------------------------
def test_worker_init_fn_gets_the_workers_number_before_the_dataset_is_opened() -> None:
    seen: list[Any] = []

    class Opened:
        def __iter__(self) -> Iterator[str]:
            seen.append(made.spec.board.read(1).stage)
            return iter("abc")

    def init(worker_id: int) -> None:
        seen.extend([worker_id, made.spec.board.read(1).stage])

    made = worker_of(dataset=Opened(), init=init, dataset_kind=_DatasetKind.Iterable)
    made.unpack()
    made.initialise()
    assert seen == [1, Stage.INITIALISING, Stage.OPENING]


@pytest.mark.parametrize("how", ["worker_init_fn", "__iter__"])
def test_a_failed_beginning_is_the_first_tasks_error_and_a_lack_for_the_rest(how: str) -> None:
    def init(worker_id: int) -> None:
        raise ValueError("no beginning")

    class NoIterator:
        def __iter__(self) -> Iterator[Any]:
            raise ValueError("no beginning")

    options = (
        {"dataset": "abc", "init": init} if how == "worker_init_fn" else {"dataset": NoIterator(), "dataset_kind": 1}
    )
    _, results = ran(Task(0, 1, [0]), Task(2, 1, [1]), **options)
    assert error_in(results[0].data) == ("ValueError: no beginning", WHERE, "")
    lacks = "RuntimeError: the worker has no fetcher, because its initialisation failed: ValueError: no beginning"
    assert error_in(results[1].data) == (lacks, WHERE, "Task 2.")


def test_without_a_dataset_each_task_says_why() -> None:
    class Broken:
        def unpack(self) -> Any:
            raise ImportError("no module")

    made, results = ran(Task(0, 1, [0]), ResumeIteration(1), Task(0, 1, [0]), users=Broken())
    for result in (results[0], results[2]):
        assert error_in(result.data) == (
            "ImportError: no module", f"{WHERE} while it unpickled its dataset", ""
        )  # fmt: skip
    assert results[1] == ResumeIteration(1, 1)
    assert made.fetcher is None


def test_a_resumed_worker_begins_where_it_is_told() -> None:
    start = FetchStart(pack({"dataset": 7, "iterator": None, "ended": False}), number=3)
    _, results = ran(Task(0, 1, [2]), dataset=Stateful(), fetching=StatefulFetching(start, 1))
    assert results == [Result(0, 1, [20], (4, state(8)))]


# --- Streams and epochs -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_ends_once_in_an_epoch(drop_last: bool) -> None:
    places = [None, None]
    made, results = ran(
        *(Task(number, 1, places) for number in range(3)),
        ResumeIteration(1),
        Task(0, 1, places),
        dataset="abc",
        dataset_kind=_DatasetKind.Iterable,
        drop_last=drop_last,
    )
    first = [Result(0, 1, ["a", "b"]), Result(1, 1, WorkerExhausted(1) if drop_last else ["c"])]
    assert results[:2] == first
    rest = [] if drop_last else [Result(2, 1, WorkerExhausted(1))]
    assert results[2:] == [*rest, ResumeIteration(1, 1), Result(0, 1, ["a", "b"])]
    assert made.progress.outcomes == [0, 2, 0] if drop_last else [0, 0, 2, 0]


def test_a_map_dataset_that_says_stop_has_failed() -> None:
    class Stops:
        def __getitem__(self, index: int) -> Any:
            raise StopIteration

    _, results = ran(Task(0, 1, [0]), dataset=Stops())
    assert error_in(results[0].data)[0] == "StopIteration"


def test_a_resumption_that_comes_twice_is_answered_once_and_tasks_count_anew() -> None:
    messages = Task(5, 1, [0]), ResumeIteration(1), ResumeIteration(1), Task(0, 1, [1]), ResumeIteration(2)
    _, results = ran(*messages, dataset="abc")
    assert results == [Result(5, 1, ["a"]), ResumeIteration(1, 1), Result(0, 1, ["b"]), ResumeIteration(2, 1)]


def test_an_epoch_that_fails_to_begin_does_not_go_on_with_the_samples_of_the_last() -> None:
    class FailsInItsSecondEpoch:
        epoch = -1

        def __iter__(self) -> Iterator[int]:
            self.epoch += 1
            if self.epoch == 1:
                raise ValueError("no second epoch")
            return iter(range(10 * self.epoch, 10 * self.epoch + 10))

    first, second = Task(0, 1, [None]), Task(1, 1, [None])
    messages = first, ResumeIteration(1), first, second, ResumeIteration(2), first
    _, results = ran(*messages, dataset=FailsInItsSecondEpoch(), dataset_kind=_DatasetKind.Iterable)
    assert (results[0], results[-1]) == (Result(0, 1, [0]), Result(0, 1, [20]))
    assert error_in(results[2].data)[0] == "ValueError: no second epoch"
    assert error_in(results[3].data)[0].startswith("RuntimeError: the worker has no fetcher")


# --- States -----------------------------------------------------------------------------------------------------------
def test_states_go_with_the_batches_and_with_the_answer_to_a_resumption() -> None:
    _, results = ran(
        Task(0, 1, [1]),
        Task(1, 1, [2]),
        ResumeIteration(1),
        dataset=Stateful(),
        fetching=StatefulFetching(FetchStart(), 1),
    )
    assert results == [
        Result(0, 1, [10], (1, state(1))), Result(1, 1, [20], (2, state(2))), ResumeIteration(1, 1, state(2))
    ]  # fmt: skip


def test_a_state_that_nobody_has_asked_for_may_fail() -> None:
    _, results = ran(
        Task(0, 1, [1]),
        ResumeIteration(1),
        Task(0, 1, [1]),
        dataset=Stateful(broken=True),
        fetching=StatefulFetching(FetchStart(), 0),
    )
    failed = no_state(OSError("no state"))
    assert results == [
        Result(0, 1, [10], (1, failed)), ResumeIteration(1, 1, failed), Result(0, 1, [10], (1, failed))
    ]  # fmt: skip


def test_a_state_that_was_asked_for_is_an_error_of_its_task() -> None:
    made, results = ran(
        Task(0, 1, [1]), Task(1, 1, [1]), dataset=Stateful(broken=True), fetching=StatefulFetching(FetchStart(), 1)
    )
    assert error_in(results[0].data) == ("OSError: no state", WHERE, "Task 0: taking the state after it.")
    assert results[0].state is None
    assert results[1] == Result(1, 1, [10])
    assert made.progress.outcomes == [1, 0]
    _, results = ran(Task(0, 1, [-1]), dataset=Stateful(broken=True), fetching=StatefulFetching(FetchStart(), 1))
    assert error_in(results[0].data)[0] == "IndexError: below 0"


def test_a_state_that_was_asked_for_at_the_end_of_an_epoch_is_an_error_of_the_next_one() -> None:
    dataset = Stateful(broken=True)
    _, results = ran(ResumeIteration(1), Task(0, 1, [1]), dataset=dataset, fetching=StatefulFetching(FetchStart(), 1))
    assert results[0] == ResumeIteration(1, 1, no_state(OSError("no state")))
    assert error_in(results[1].data) == ("OSError: no state", WHERE, "Epoch 1: taking the state before it.")


# --- Ends -------------------------------------------------------------------------------------------------------------
def test_an_orphan_reads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker_of(Task(0, 1, [0]), dataset="abc")
    monkeypatch.setattr(made.watchdog, "is_alive", lambda: False)
    serve(made)
    assert made.spec.ports.notes == [FoundDead("loader", 1, os.getppid(), None)]
    assert made.lifecycle.state is WorkerState.ENDED
    assert (made.spec.result_queue, made.spec.result_queue.called) == ([], ["cancel_join_thread"])


def test_a_watchdog_knows_its_loader_by_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = [5]
    monkeypatch.setattr(worker.os, "getppid", lambda: parents[-1])
    assert not worker.ManagerWatchdog(7).is_alive()
    for watchdog in (worker.ManagerWatchdog(5), worker.ManagerWatchdog()):
        assert (watchdog.manager_pid, watchdog.is_alive()) == (5, True)
        parents.append(1)
        assert not watchdog.is_alive()
        parents.pop()
        assert not watchdog.is_alive(), "another process may have got its number"


def test_below_a_fork_server_it_knows_the_loader_by_its_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SimpleNamespace(pid=77, is_alive=lambda: alive[0])
    alive = [True]
    monkeypatch.setattr(worker.multiprocessing, "parent_process", lambda: loader)
    watchdog, other = worker.ManagerWatchdog(), worker.ManagerWatchdog(os.getppid())
    assert (watchdog.manager_pid, watchdog.is_alive()) == (77, True)
    alive[0] = False
    assert (watchdog.is_alive(), other.is_alive()) == (False, True)


def test_an_orphan_that_stays_is_ended(monkeypatch: pytest.MonkeyPatch, threads: list[dict[str, Any]]) -> None:
    done: list[Any] = []
    monkeypatch.setattr(worker.time, "sleep", done.append)
    monkeypatch.setattr(worker.os, "_exit", lambda code: done.append(f"exit {code}"))
    made = worker_of()
    assert threads == [{"target": worker._end_orphan, "args": (made.watchdog,), "name": "end_orphan", "daemon": True}]
    answers = [True, True, False]
    monkeypatch.setattr(made.watchdog, "is_alive", lambda: answers.pop(0))
    worker._end_orphan(made.watchdog)
    assert done == [MP_STATUS_CHECK_INTERVAL] * 2 + [2 * MP_STATUS_CHECK_INTERVAL, "exit 1"]


# --- The loop as a whole ----------------------------------------------------------------------------------------------
@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a worker does to its process, by name; nothing is done to this one."""
    done: list[Any] = []
    for module, name in (
        (worker.signal_handling, "run_again"),
        (worker, "_set_worker_signal_handlers"),
        (worker.torch, "set_num_threads"),
        (worker.torch.multiprocessing, "_set_thread_name"),
        (worker, "_seed"),
        (worker, "_publish_worker_info"),
        (worker, "_hear_no_interrupt"),
    ):
        monkeypatch.setattr(module, name, lambda *args, name=name: done.append((name, *args)))
    return done


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_worker_prepares_its_process_before_it_runs_the_users_code(interrupted: bool, alone: list[Any]) -> None:
    def init(worker_id: int) -> None:
        alone.append("the user's code")
        if interrupted:
            raise KeyboardInterrupt

    spec = worker_of(Task(0, 1, [0]), dataset="abc", init=init).spec
    worker._worker_loop(spec)
    assert alone == [
        ("run_again",),
        ("_set_worker_signal_handlers",),
        ("set_num_threads", 1),
        ("_set_thread_name", "pt_data_worker"),
        ("_seed", spec),
        ("_publish_worker_info", spec, "abc"),
        "the user's code",
        ("_hear_no_interrupt",),
    ]
    assert spec.ports.notes == [WorkerEntered(1, 41)]
    assert spec.board.read(1).stage is Stage.ENDED
    assert spec.ports.deciders[-1].state is WorkerState.ENDED
    if interrupted:
        assert (spec.result_queue, spec.result_queue.called) == ([], ["enter_worker"])
    else:
        assert spec.result_queue == [Result(0, 1, ["a"])]
        assert spec.result_queue.called == ["enter_worker", "cancel_join_thread", "close"]


def test_an_interrupt_before_there_is_a_worker_ends_it_silently(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    spec = worker_of().spec
    monkeypatch.setattr(worker.signal_handling, "run_again", interrupt)
    worker._worker_loop(spec)
    assert (alone, spec.board.read(1).stage) == ([("_hear_no_interrupt",)], Stage.STARTING)


def test_seeds_are_torchs() -> None:
    spec = worker_of().spec
    assert worker.numpy_seed(40, 1) == torch_worker._generate_state(40, 1)
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()
    try:
        worker._seed(spec)
        assert random.random() == random.Random(41).random()
        assert torch.initial_seed() == 41
        assert np.random.rand() == np.random.RandomState(worker.numpy_seed(40, 1)).rand()
    finally:
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        np.random.set_state(before[2])


def test_worker_information_is_for_both_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_info, "_worker_info", None)
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    worker._publish_worker_info(worker_of().spec, "the dataset")
    found = worker_info.get_worker_info()
    assert worker_info._worker_info is found
    assert found == worker_info.WorkerInfo(id=1, num_workers=2, seed=41, dataset="the dataset")
    assert torch_worker._worker_info is found


def test_a_worker_knows_its_loader_and_what_a_sentinel_means() -> None:
    made = _Worker(dataclasses.replace(worker_of().spec, manager_pid=77))
    assert (made.watchdog.manager_pid, made.lifecycle.worker_id) == (77, 1)
    assert made.event_of(Sentinel()) is WorkerEvent.SENTINEL
    made.spec.done_event.set()
    assert made.event_of(Sentinel()) is WorkerEvent.SENTINEL_WHEN_DONE


def test_what_a_worker_does_at_its_end_is_not_interrupted(install_handler: Any) -> None:
    install_handler(signal.SIGINT, signal.default_int_handler)
    worker._hear_no_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.live
def test_no_worker_is_the_first_to_import_numpys_generators() -> None:
    """NumPy imports them when they are used first: each forked worker would, while its collector may run."""
    code = "import sys, minidl.loader.worker; sys.exit('numpy.random' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
