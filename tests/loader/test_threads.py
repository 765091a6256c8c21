"""Workers that are threads: what differs from processes. What is the same, the tests of the iterators hold for both."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
import workloads as wl

import minidl
from minidl.check import examine
from minidl.data import worker_info
from minidl.data.fetch import Progress
from minidl.hang.evidence.stacks import py_spy
from minidl.loader import crew, threads
from minidl.loader.progress import Stage
from minidl.loader.protocol import LoaderState
from minidl.loader.threads import Flag, ThreadQueue, WorkerThread
from minidl.loader.worker import numpy_seed
from minidl.tracefile.reader import read_trace
from minidl.wire.messages import Task


def in_threads(dataset: Any, **options: Any) -> Any:
    return minidl.DataLoader(dataset, **{"batch_size": None, "num_workers": 2, "worker_method": "thread"} | options)


def living() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, WorkerThread)]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not living()
    assert not crew._running


class Held(wl.Numbers):
    """i -> i; but sample `at` is served once `go` is set. The worker is in it when `there` is set."""

    def __init__(self, n: int, at: int) -> None:
        super().__init__(n)
        self.at, self.there, self.go = at, threading.Event(), threading.Event()
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        if index == self.at:
            self.there.set()
            assert self.go.wait(wl.BOUND)
        return index


# --- What is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"worker_method": "fiber"}, r"one of \('multiprocessing', 'thread'\), but got worker_method='fiber'"),
        (
            {"multiprocessing_context": "spawn"},
            "starts none: leave out one of them, .* multiprocessing_context='spawn'",
        ),
        ({"transport": "arena"}, "transport='arena' is a way between processes"),
        ({"prefetch_factor": -1}, "prefetch_factor option should be non-negative"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        in_threads([1], **options)


def test_what_the_loader_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads need no warning, a transport that the environment names is for processes, 0 workers are none."""
    monkeypatch.setenv("MINIDL_TRANSPORT", "arena")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = in_threads(wl.Numbers(70), num_workers=64)
        assert sorted(loader) == list(range(70))
    assert (loader.transport, loader.worker_method) == ("thread", "thread")
    assert all(worker.daemon for worker in iter(loader)._workers)  # a stuck one must not keep Python from its exit
    assert "64 worker threads" in repr(loader)
    assert list(in_threads(wl.Numbers(2), num_workers=0)) == [0, 1]
    with pytest.raises(ValueError, match="worker_method attribute should not be set"):
        loader.worker_method = "multiprocessing"


# --- What a worker knows, and draws -----------------------------------------------------------------------------------
class Asks(wl.Numbers):
    def __getitem__(self, index: int) -> Any:
        return minidl.get_worker_info(), torch.utils.data.get_worker_info(), threading.current_thread().name


def test_worker_information_is_of_the_thread() -> None:
    """Also torch's function answers, which a dataset may have imported by name; elsewhere it answers as before."""
    seen = list(in_threads(Asks(4)))
    assert [ours is theirs for ours, theirs, _ in seen] == [True] * 4
    assert [(ours.id, ours.num_workers, ours.worker_method, name) for ours, _, name in seen] == [
        (worker, 2, "thread", f"worker {worker}") for worker in (0, 1, 0, 1)
    ]
    assert minidl.get_worker_info() is None
    assert torch.utils.data.get_worker_info() is None
    assert not worker_info.in_worker_process()


@pytest.mark.live
def test_a_forked_child_of_a_worker_is_no_worker() -> None:
    def child() -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if torch.utils.data.get_worker_info() is None else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork beside threads
        assert list(in_threads(wl.At(2, 1, child))) == [0, 0]


def test_the_global_generators_are_left_alone_and_each_worker_has_its_own() -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)  # type: ignore[func-returns-value]
    torch.empty((), dtype=torch.int64).random_()  # what the loader draws: the base seed
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    torch.manual_seed(3)
    draws = [chances for _, _, chances in in_threads(wl.Probe(4))]
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert after == before
    assert len({*map(str, draws)}) == 4


def test_a_workers_generators_draw_what_a_processs_global_ones_would() -> None:
    rng: Any = threads.RNG.of(SimpleNamespace(base_seed=5, worker_id=1, seed=6))  # type: ignore[arg-type]
    assert rng.random_generator.random() == random.Random(6).random()
    assert rng.numpy_generator.random() == np.random.RandomState(numpy_seed(5, 1)).rand()
    assert torch.equal(torch.rand(1, generator=rng.torch_generator), torch.rand(1, generator=seeded_with(6)))


def seeded_with(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kernels_name() -> str:
    return Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text()


def test_a_worker_has_the_name_in_the_kernel_that_a_process_has() -> None:
    """By which the doctor, `top -H` and py-spy know it."""
    assert next(iter(in_threads(wl.At(2, 0, kernels_name)))) == "pt_data_worker\n"


class Moves(wl.Numbers):
    """Serves what its attributes say, which worker_init_fn sets."""

    start = 0

    def __getitem__(self, index: int) -> Any:
        return self.start, id(self.shared)


def start_at(worker_id: int) -> None:
    info: Any = minidl.get_worker_info()
    info.dataset.start = 100 * info.id
    info.dataset.shared.append(worker_id)


def test_each_worker_has_a_shallow_copy_of_the_dataset() -> None:
    """As in torch's documentation, worker_init_fn may set what its worker serves."""
    dataset: Any = Moves(4)
    dataset.shared = []
    seen = list(in_threads(dataset, worker_init_fn=start_at))
    assert [start for start, _ in seen] == [0, 100, 0, 100]
    assert all(shared == id(dataset.shared) for _, shared in seen)
    assert (dataset.start, sorted(dataset.shared)) == (0, [0, 1])


class Delegates:
    """A wrapper whose attributes are those of what it wraps."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getitem__(self, index: int) -> Any:
        return self.wrapped[index]


class Slotted:
    __slots__ = ("__dict__", "more")


class Listed(list[int]):
    pass


def test_a_wrapper_that_delegates_is_copied_and_an_array_is_not() -> None:
    assert list(in_threads(Delegates([1, 2]))) == [1, 2]
    for same in (np.zeros(2), torch.zeros(2), [1], range(2)):
        assert threads._own(same) is same
    slotted, listed = Slotted(), Listed([1])
    slotted.more = slotted.name = listed.name = listed  # type: ignore[attr-defined]
    copied, other = threads._own(slotted), threads._own(listed)
    assert copied is not slotted
    assert copied.more is copied.name is listed
    assert other is not listed
    assert other == other.name == listed


def test_a_worker_has_the_gradient_mode_of_the_program() -> None:
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            assert next(iter(in_threads(wl.At(2, 0, torch.is_grad_enabled)))) is mode


class CannotBeCopied(wl.Numbers):
    def __copy__(self) -> Any:
        raise wl.SimpleError("not this one")


class Inherits(CannotBeCopied):
    """Says how it is copied by a method of its base class."""


@pytest.mark.parametrize("kind", [CannotBeCopied, Inherits])
def test_a_dataset_that_can_not_be_copied_is_an_error_of_each_task(kind: Any) -> None:
    iterator = iter(in_threads(kind(2)))
    for number in (0, 1):
        with pytest.raises(wl.SimpleError, match=f"in DataLoader worker thread {number} while it copied its dataset"):
            next(iterator)
    assert list(iterator) == []


def test_batches_are_the_workers_own_objects_and_in_no_shared_memory() -> None:
    sample = torch.zeros(3)
    assert next(iter(in_threads([sample]))) is sample
    (batch,) = in_threads([sample, sample], batch_size=2)
    assert not batch.is_shared()


def test_workers_compute_with_one_core_and_nobody_else_does() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert list(in_threads(wl.At(2, 0, torch.get_num_threads))) == [1, 1]
        later: list[int] = []
        other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        other.start(), other.join()  # type: ignore[func-returns-value]
        assert [torch.get_num_threads(), *later] == [3, 3]
    finally:
        torch.set_num_threads(before)


# --- How workers end before their time --------------------------------------------------------------------------------
def stop() -> None:
    raise GeneratorExit


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("end", "code"),
    [(sys.exit, 0), (lambda: sys.exit(3), 3), (lambda: sys.exit("no more"), 1), (stop, 1), (interrupt, 1)],
    ids=["exit()", "exit(3)", "exit(text)", "another exception", "an interrupt of its own"],
)
@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_worker_that_ends_is_found_at_once(
    end: Any, code: int, pin_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the exception that has ended it as the cause; no liveness check comes before the test's time is over."""
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    wl.impatient(monkeypatch, 1000.0)
    iterator = iter(in_threads(wl.At(8, 3, end), pin_memory=pin_memory))
    with pytest.raises(
        RuntimeError, match=f"exited unexpectedly .worker 1: exit code {code}, last in task 3"
    ) as raised:
        list(iterator)
    assert isinstance(raised.value.__cause__, (SystemExit, GeneratorExit, KeyboardInterrupt))
    assert "thread(s)" in str(raised.value)
    iterator.close()


@pytest.mark.heavy
def test_a_worker_that_ends_before_its_first_task() -> None:
    with pytest.raises(RuntimeError, match="exit code 0, last in worker_init_fn"):
        list(in_threads(wl.Numbers(4), worker_init_fn=lambda worker_id: sys.exit()))


# --- The shutdown -----------------------------------------------------------------------------------------------------
def test_a_worker_stops_at_its_next_sample() -> None:
    dataset = Held(64, at=1)
    iterator = iter(in_threads(dataset, batch_size=32, num_workers=1))
    assert dataset.there.wait(wl.BOUND)
    threading.Timer(0.05, dataset.go.set).start()
    iterator.close()
    assert dataset.asked == [0, 1]  # of 32
    assert iterator._lifecycle.state is LoaderState.CLOSED


def test_a_worker_that_stays_in_its_sample_is_left_behind_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves by itself when its sample is there, and neither the close nor the program waits for that."""
    wl.impatient(monkeypatch, 0.1)
    dataset = Held(9, at=1)
    iterator = iter(in_threads(dataset, batch_size=3))
    assert dataset.there.wait(wl.BOUND)
    words = r"worker 0 \(thread \d+\) is in task 0, sample index 1 \(place 2 of 3\), for .* A thread can't be killed"
    with pytest.warns(RuntimeWarning, match=words):
        iterator.close()
    assert iterator._lifecycle.state is LoaderState.CLOSED
    assert [worker.is_alive() for worker in iterator._workers] == [True, False]
    dataset.go.set()
    iterator._workers[0].join(wl.BOUND)
    assert [worker.exitcode for worker in iterator._workers] == [0, 0]


def test_after_an_interrupted_shutdown_the_workers_are_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before the done event is set."""
    monkeypatch.setattr(crew.Crew, "_join_pin", lambda crew, timeout: interrupt())
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    iterator = iter(in_threads(wl.Numbers(9), pin_memory=True))
    with pytest.raises(KeyboardInterrupt):
        iterator.close()
    assert not living()


def test_the_collector_may_end_an_iterator_in_one_of_its_workers() -> None:
    """A worker does not wait for its own end, and nothing is said about it."""
    ended = threading.Event()

    class Collects(Held):
        def __getitem__(self, index: int) -> int:
            super().__getitem__(index)
            if index == self.at:
                gc.collect()
                ended.set()
            return index

    dataset = Collects(4, at=1)
    iterator = iter(in_threads(dataset, num_workers=1))
    assert dataset.there.wait(wl.BOUND)
    worker, iterator.itself = iterator._workers[0], iterator
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del iterator
            dataset.go.set()
            assert ended.wait(wl.BOUND)
    finally:
        gc.enable()
    worker.join(wl.BOUND)
    assert not worker.is_alive()


def test_batches_that_nobody_has_read_go_with_the_iterator() -> None:
    iterator = iter(in_threads(wl.Tensors(9)))
    while iterator._worker_result_queue._messages.qsize() < 4:
        time.sleep(0.001)
    iterator.close()
    assert iterator._worker_result_queue._messages.empty()


@pytest.mark.live
@pytest.mark.parametrize("how", ["computing", "persistent", "interrupted"])
def test_the_interpreter_exits_in_the_middle_of_an_epoch(how: str) -> None:
    """The workers leave before Python ends; one that is stuck is warned of, and ends with the process.

    If a thread that computes in C++ came back while Python ends, that would abort the process.
    """
    done = wl.run(EXIT, how)
    assert done.returncode == {"interrupted": -signal.SIGINT}.get(how, 0), done.stderr
    assert ("A thread can't be killed" in done.stderr) == (how == "computing"), done.stderr
    assert done.stdout.split() == ["shut", "down"]


EXIT = """
import atexit, signal, sys, time
atexit.register(lambda: print("shut down" if kept[0]._lifecycle.state.name == "CLOSED" else "left"))
import minidl, torch, workloads as wl
from minidl.loader import driver
driver.MP_STATUS_CHECK_INTERVAL = 0.3
how = sys.argv[1]
def compute():
    while True:
        torch.ones(4096).sum()
dataset = wl.At(1000, 3, compute) if how == "computing" else wl.Tensors(1000)
loader = minidl.DataLoader(dataset, num_workers=2, worker_method="thread", persistent_workers=how == "persistent")
iterator = iter(loader)
kept = [iterator]
next(iterator)
while how == "computing" and (iterator._board.read(1).task, iterator._board.read(1).position) != (3, 0):
    time.sleep(0.005)
if how == "interrupted":
    signal.raise_signal(signal.SIGINT)
"""


# --- The parts --------------------------------------------------------------------------------------------------------
def test_a_queue_hands_over_the_object_itself() -> None:
    queue, task = ThreadQueue(), Task(0, 0, [1])
    queue.put(SimpleNamespace(message=task))
    queue.close()
    queue.cancel_join_thread()
    assert queue.writer(1) is queue
    assert (queue.get(timeout=1) is task, queue.failure, queue.jammed()) == (True, "", False)


def test_a_fetch_is_followed_until_the_done_event_is_set() -> None:
    progress, flag, seen = Progress(), Flag(), list[tuple[int, Any]]()
    progress.sample = lambda position, index: seen.append((position, index))  # type: ignore[method-assign]
    until_done = threads._UntilDone(progress, flag)
    until_done.sample(2, 7)
    flag.set()
    with pytest.raises(KeyboardInterrupt):
        until_done.sample(3, 8)
    assert seen == [(2, 7)]


def test_threads_are_joined_with_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [100.0], list[float]()

    def join(seconds: float) -> None:
        waited.append(seconds)
        now[0] += 2

    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    threads._join([SimpleNamespace(join=join)] * 3, 3.0)  # type: ignore[list-item]
    assert waited == [3.0, 1.0, 0.0]


def test_a_board_of_threads_is_in_no_shared_memory() -> None:
    board = threads.ThreadTransport().board(2)
    assert not board._cells.is_shared()
    assert board.read(1).stage is Stage.STARTING
    assert copy.copy(board)._cells is board._cells


# --- Recorded ---------------------------------------------------------------------------------------------------------
RECORDED: dict[str, dict[str, Any]] = {
    "map": {},
    "persistent": {"persistent_workers": True},
    "in no order": {"in_order": False, "batch_size": 3},
    "pinned": {"pin_memory": True},
    "a stream": {"dataset": wl.Stream(9)},
    "a persistent stream": {"dataset": wl.Stream(9), "persistent_workers": True},
    "an error": {"dataset": wl.At(9, 4, lambda: 1 // 0), "batch_size": 2},
    "an end": {"dataset": wl.At(9, 4, lambda: sys.exit(3)), "batch_size": 2},
    "an end, pinned": {"dataset": wl.At(9, 4, lambda: sys.exit(3)), "pin_memory": True},
    "an end before the first task": {"worker_init_fn": lambda worker_id: sys.exit(), "timeout": 0.5},
    "an interrupt": {"dataset": wl.At(9, 4, interrupt), "timeout": 0.5},
}


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("taken", [2, 99])
@pytest.mark.parametrize("case", RECORDED)
def test_a_trace_has_each_worker_as_a_process_of_its_own(
    case: str, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checker finds the protocol in it, and each tool shows a lane a worker."""
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    options = {"dataset": wl.Numbers(9)} | RECORDED[case]
    with (
        minidl.trace(tmp_path / "trace"),
        contextlib.suppress(ZeroDivisionError, RuntimeError),
        in_threads(**options) as loader,
    ):
        for _ in range(2):
            for _ in itertools.islice(loader, taken):
                pass
    recorded = read_trace(tmp_path / "trace")
    report = examine(recorded)
    assert not report.violations, report.text()
    workers = [process for process in recorded.processes if process.role == "worker"]
    assert {process.worker for process in workers} == {0, 1}
    assert os.getpid() not in {process.pid for process in workers}
    assert recorded.loaders[1]["transport"] == "thread"


@pytest.mark.live
@pytest.mark.skipif(py_spy() is None, reason="py-spy is not installed")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("sleeps", r"hung .*: worker [01], in sample 3 \(.*stuck\.py:4\), is asleep"),
        ("the loop has the lock", r"may hang: worker [01], in sample \d+, waits for a lock \[worker [01] is waiting"),
    ],
)
def test_a_hang_is_the_workers_with_its_line(program: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK[program])
    command = [
        "run",
        "--trace",
        str(tmp_path / "trace"),
        "--hang-after",
        "1",
        "--on-hang",
        "kill",
        str(tmp_path / "stuck.py"),
    ]
    done = subprocess.run([sys.executable, "-m", "minidl", *command], capture_output=True, text=True, timeout=wl.BOUND)
    assert re.search(words, done.stderr), done.stderr


STUCK = {
    "sleeps": """import minidl, time
class Sleeps(list):
    def __getitem__(self, index):
        time.sleep(1000 * (index == 3))
        return index
list(minidl.DataLoader(Sleeps(range(9)), 2, num_workers=2, worker_method="thread"))
""",
    "the loop has the lock": """import minidl, threading
lock = threading.Lock()
class Locks(list):
    def __getitem__(self, index):
        with lock:
            return index
for number, batch in enumerate(minidl.DataLoader(Locks(range(90)), 2, num_workers=2, worker_method="thread")):
    if number == 3:
        lock.acquire()
""",
}


# --- Saved and resumed ------------------------------------------------------------------------------------------------
class Counts(torch.utils.data.IterableDataset[int]):
    """A stream with a state, which each worker keeps in its own copy."""

    at = -1

    def __iter__(self) -> Iterator[int]:
        mine, workers, _ = wl.worker()
        self.at = mine if self.at < 0 else self.at
        while self.at < 24:
            self.at += workers
            yield self.at - workers

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("options", [{"dataset": wl.Numbers(24), "shuffle": True}, {}, {"state_every": 1}])
def test_an_epoch_goes_on_where_it_was_left(options: dict[str, Any]) -> None:
    def loader() -> Any:
        return in_threads(**{"dataset": Counts(), "batch_size": 3} | options)

    with loader() as first:
        iterator = iter(first)
        taken = [next(iterator).tolist() for _ in range(3)]
        state = first.state_dict()
        rest = [batch.tolist() for batch in iterator]
    with loader() as second:
        second.load_state_dict(state)
        assert [batch.tolist() for batch in second] == rest
    assert sorted(itertools.chain(*taken, *rest)) == list(range(24))
