"""How it ends: exhausted, abandoned, closed, at the interpreter's exit, by a signal; and that nobody is left behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.process
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.multiprocessing
import workloads as wl
from sizes import slow
from torch._C import _error_if_any_worker_fails

import minidl
from minidl.check import examine
from minidl.loader import crew as module
from minidl.loader import driver, iterators, pin_memory
from minidl.loader.progress import WorkerProgress
from minidl.loader.protocol import LoaderState
from minidl.loader.threads import ThreadCrew, WorkerThread
from minidl.loader.worker import _Worker
from minidl.process_stat import is_alive
from minidl.tracefile.reader import read_trace

pytestmark = pytest.mark.live


@pytest.fixture
def nobody_is_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker must leave by itself. Its exit code would not tell: torch's handler of SIGTERM exits with 0."""

    def refuse(process: Any) -> None:
        raise AssertionError(f"{process} had to be terminated")

    for name in ("terminate", "kill"):
        monkeypatch.setattr(multiprocessing.process.BaseProcess, name, refuse)
    monkeypatch.setattr(ThreadCrew, "_warn_of", lambda crew, stuck: [refuse(number) for number in stuck])


@pytest.fixture(
    params=["plain", "pinned", "persistent", "persistent and pinned", "threads", "persistent and pinned threads"]
)
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    pin, persistent = "pinned" in request.param, "persistent" in request.param
    method = "thread" if "threads" in request.param else "multiprocessing"
    return {"num_workers": 2, "pin_memory": pin, "persistent_workers": persistent, "worker_method": method}


def assert_ended(iterator: Any, codes: tuple[int, ...] = (0, 0)) -> None:
    """Workers, pin thread and queues are gone, the lifecycle is at its end, torch's registry has forgotten the pids."""
    assert tuple(worker.exitcode for worker in iterator._workers) == codes
    assert iterator._lifecycle.state is LoaderState.CLOSED
    assert iterator._workers_done_event.is_set()
    if any(isinstance(worker, WorkerThread) for worker in iterator._workers):
        assert not any(thread in iterator._workers for thread in threading.enumerate())
    else:
        assert all(queue._closed for queue in iterator._index_queues)
    assert iterator._crew not in module._running
    assert not iterator._crew.pids_set
    _error_if_any_worker_fails()
    if iterator._pin_memory:
        assert not iterator._pin_memory_thread.is_alive()


# --- In a program that goes on ----------------------------------------------------------------------------------------
@pytest.mark.usefixtures("nobody_is_terminated")
def test_exhausted(options: dict[str, Any]) -> None:
    with minidl.DataLoader(wl.Tensors(7), **options) as loader:
        iterator: Any = iter(loader)
        assert len(list(iterator)) == 7
        if options["persistent_workers"]:
            assert all(worker.is_alive() for worker in iterator._workers)
            assert len(list(loader)) == 7
        else:
            assert_ended(iterator)
    assert_ended(iterator)


@pytest.mark.usefixtures("nobody_is_terminated")
@pytest.mark.parametrize("taken", [0, 5])
def test_abandoned(options: dict[str, Any], taken: int) -> None:
    """An error in the training loop lets go of the iterator: all has ended before the next statement runs."""
    workers: list[Any] = []

    def train() -> None:
        iterator: Any = iter(minidl.DataLoader(wl.Tensors(20), **options))
        workers.extend(iterator._workers)
        for _ in range(taken):
            next(iterator)
        raise wl.SimpleError("in the step")

    with contextlib.suppress(wl.SimpleError):
        train()
    assert [worker.exitcode for worker in workers] == [0, 0]


@pytest.mark.usefixtures("nobody_is_terminated")
@pytest.mark.parametrize("dataset", [wl.Tensors(20), wl.Stream(5)], ids=["busy", "stream"])
def test_closed_in_the_middle(options: dict[str, Any], dataset: Any) -> None:
    loader = minidl.DataLoader(dataset, **options)
    iterator: Any = iter(loader)
    next(iterator)
    iterator.close()
    assert_ended(iterator)
    iterator.close()
    assert list(iterator) == []


@pytest.mark.usefixtures("nobody_is_terminated")
@pytest.mark.parametrize("samples", [20, 1, 0])
def test_collected_as_part_of_a_cycle(options: dict[str, Any], samples: int) -> None:
    """The collector ends queues, feeder threads and iterator in no certain order; the sentinels arrive all the same."""
    iterator: Any = iter(minidl.DataLoader(wl.Tensors(samples), **options))
    next(iterator, None)
    workers, iterator.itself = iterator._workers, iterator
    del iterator
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]


@pytest.mark.usefixtures("nobody_is_terminated")
def test_large_batches_that_nobody_reads() -> None:
    """The workers' feeder threads are stuck in a full pipe; a worker that leaves does not wait for them."""
    iterator: Any = iter(minidl.DataLoader(wl.Numbers(20), collate_fn=large, num_workers=2, prefetch_factor=4))
    next(iterator)
    iterator.close()
    assert_ended(iterator)


def large(samples: Any) -> bytes:
    return bytes(1_000_000)


class Killed(wl.Numbers):
    """The worker is killed in the first sample."""

    def __getitem__(self, index: int) -> Any:
        return wl.kill_myself()


def test_tasks_that_nobody_reads() -> None:
    """The loader's feeder thread is stuck in the full pipe of a worker that was killed: it ends all the same."""
    dataset = Killed(1_000_000)
    iterator: Any = iter(minidl.DataLoader(dataset, batch_size=50_000, num_workers=1, prefetch_factor=8))
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(iterator)
    iterator.close()
    assert_ended(iterator, (-signal.SIGKILL,))


class TakesTheLock(wl.Numbers):
    """In sample 5, the worker takes the lock that every writer of results needs, and keeps it."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            wl.worker_spec().result_queue._wlock.acquire()
        return super().__getitem__(index)


@pytest.mark.usefixtures("nobody_is_terminated")
def test_a_worker_that_ends_in_the_middle_of_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentinel of the pin thread waits for the lock of the worker's write: its feeder thread ends all the same."""
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    monkeypatch.setattr(pin_memory, "MP_STATUS_CHECK_INTERVAL", 0.1)
    iterator: Any = iter(minidl.DataLoader(TakesTheLock(20), num_workers=1, prefetch_factor=7, pin_memory=True))
    deadline = time.monotonic() + wl.BOUND
    while iterator._board.read(0).task < 6 and time.monotonic() < deadline:
        time.sleep(0.001)
    iterator.close()
    assert_ended(iterator, (0,))


LEAVES = """
import pathlib, minidl, workloads as wl
iterator = iter(minidl.DataLoader(wl.Tensors(100), num_workers=2))
next(iterator)
left = pathlib.Path(f"/dev/shm/torch_{iterator._workers[1].pid}_17_0")
left.touch()
print(left)
"""


def test_a_segment_that_a_worker_has_left_is_removed_at_exit() -> None:
    """torch names a segment for a moment; a worker that is ended in it leaves the name."""
    done = wl.run(LEAVES)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()


def test_what_was_not_begun_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterator whose __init__ failed while its workers were started is collected in silence."""
    started = []

    def start(process: Any) -> None:
        started.append(process)
        if len(started) == 2:
            raise OSError("no more processes")
        really_start(process)

    really_start = multiprocessing.process.BaseProcess.start
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with contextlib.suppress(OSError):
        iter(minidl.DataLoader(wl.Numbers(5), num_workers=2))
    assert started[0].exitcode == 0


@pytest.mark.usefixtures("nobody_is_terminated")
def test_a_forked_child_does_not_end_what_it_inherited() -> None:
    iterator: Any = iter(minidl.DataLoader(wl.Numbers(9), num_workers=2))
    next(iterator)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            iterator.close()
            iterator._shutdown_workers()
            status = 0 if not iterator._shutdown and not iterator._workers_done_event.is_set() else 2
            del iterator
            gc.collect()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(iterator)) == 8
    assert_ended(iterator)


# --- Workers that do not leave ----------------------------------------------------------------------------------------
@pytest.mark.usefixtures("no_sigchld")
@pytest.mark.parametrize(
    ("stuck", "code", "options"),
    [(wl.hang, 0, "plain"), (wl.hang_without_sigterm, -signal.SIGKILL, "persistent and pinned")],
    ids=["stuck", "ignores SIGTERM"],
    indirect=["options"],
)
def test_a_worker_stuck_in_a_sample_is_ended(
    stuck: Any, code: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its sentinel and a bounded wait: SIGTERM, at which torch's handler exits with 0; at last SIGKILL."""
    wl.impatient(monkeypatch, 1.0)
    iterator: Any = iter(minidl.DataLoader(wl.At(20, 4, stuck), batch_size=2, **options))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    while iterator._board.read(0).task != 2 or iterator._board.read(0).position != 0:
        time.sleep(0.005)  # until the worker is in the sample that it does not leave
    iterator.close()
    iterator._workers[0].join(wl.BOUND)  # on a busy machine, a killed process takes its time to be gone
    assert iterator._workers[0].exitcode == code
    assert iterator._lifecycle.state is LoaderState.CLOSED
    assert not any(worker.is_alive() for worker in iterator._workers)


@pytest.mark.usefixtures("no_sigchld", "nobody_is_terminated")
@pytest.mark.parametrize("options", ["plain", "persistent and pinned"], indirect=True)
def test_a_worker_that_was_killed_is_no_obstacle(options: dict[str, Any], tmp_path: Path) -> None:
    iterator: Any = iter(minidl.DataLoader(wl.Gate(20, tmp_path / "never", at=5), **options))
    for _ in range(5):
        next(iterator)
    # Worker 1 is in sample 5. Its feeder thread has written batch 3, and may still hold the queue's lock. If the worker
    # were killed now, nobody would get the lock any more.
    assert iterator._worker_result_queue._wlock.acquire(timeout=wl.BOUND)
    iterator._worker_result_queue._wlock.release()
    os.kill(iterator._workers[1].pid, signal.SIGKILL)
    iterator._workers[1].join()
    iterator.close()
    assert_ended(iterator, (0, -9))


def left(worker: Any, plain: Any = _Worker.run) -> None:
    plain(worker)
    signal.raise_signal(signal.SIGINT)


def about_to_leave(writer: Any, plain: Any = WorkerProgress.ended) -> None:
    signal.raise_signal(signal.SIGINT)
    plain(writer)


@pytest.mark.parametrize(
    ("owner", "name", "function"), [(_Worker, "run", left), (WorkerProgress, "ended", about_to_leave)]
)
def test_an_interrupt_of_a_worker_that_leaves_says_nothing(
    owner: Any, name: str, function: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(owner, name, function)
    iterator: Any = iter(minidl.DataLoader(wl.Numbers(4), num_workers=1))
    assert len(list(iterator)) == 4
    assert [worker.exitcode for worker in iterator._workers] == [0]
    assert capfd.readouterr().err == ""


# --- The program's end ------------------------------------------------------------------------------------------------
EXIT = """
import atexit, sys, threading

# Registered before anything else is, so it runs after everything else has ended.
atexit.register(lambda: print("shut down" if kept[0]._shutdown else "left to the daemons' end"))

import minidl, workloads as wl
from minidl.loader.crew import Crew

how, pin, persistent = sys.argv[1], "pinned" in sys.argv[2], "persistent" in sys.argv[2]

class Big(wl.Numbers):
    def __getitem__(self, index):
        return (wl.hang() if how == "stuck" else bytes(300_000)), index

def wake_pin(crew, plain=Crew._wake_pin):
    crew.result_queue._wlock.acquire()  # as a worker does that is terminated in the middle of a write
    plain(crew)

def join_pin(crew, timeout):
    raise KeyboardInterrupt

keys = [str(number) * 300_000 for number in range(9)] if how == "stuck" else range(1000)
loader = minidl.DataLoader(Big(1000), None, sampler=keys, num_workers=2, pin_memory=pin, persistent_workers=persistent,
                           collate_fn=list)
iterator = iter(loader)
kept = [iterator]
print(*(worker.pid for worker in iterator._workers), flush=True)
if how != "stuck":
    next(iterator)
if how == "cycle":
    iterator.itself = iterator
    del iterator
if how == "sys.exit":
    sys.exit(3)
if how == "interrupted close":
    Crew._wake_pin, Crew._join_pin = wake_pin, join_pin
    try:
        iterator.close()
    except KeyboardInterrupt:
        sys.exit(any(worker.is_alive() for worker in iterator._workers))
if how == "thread":
    threading.Thread(target=lambda: [next(iterator) for _ in range(5)]).start()
"""


@pytest.mark.parametrize(
    ("how", "what", "code"),
    [
        ("cycle", "plain", 0),
        ("stuck", "plain", 0),  # and the queues to the workers are full of long indices
        ("sys.exit", "pinned", 3),
        ("interrupted close", "pinned", 0),  # the pin thread's sentinel is left unwritten
        ("thread", "persistent and pinned", 0),
    ],
)
def test_the_interpreter_exits_in_the_middle_of_an_epoch(how: str, what: str, code: int) -> None:
    """Daemonic workers are killed; those of a pin thread that outlive epochs are shut down before that."""
    done = wl.run(EXIT, how, what, MINIDL_SIMULATE_DEVICE="1")
    assert (done.returncode, done.stderr) == (code, "")
    pids, end = done.stdout.splitlines()
    assert end == ("shut down" if how in ("thread", "interrupted close") else "left to the daemons' end")
    wl.wait_until_gone([int(pid) for pid in pids.split()])


SIGNALLED = """
import faulthandler, signal, sys, time
import minidl, minidl.loader.worker, workloads as wl

minidl.loader.worker.MP_STATUS_CHECK_INTERVAL = 0.3
if __name__ == "__main__":
    faulthandler.dump_traceback_later(60)  # it ends long before
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT for what it starts with &
    dataset = wl.Gate(1000, "/no/such/file", at=5)
    loader = minidl.DataLoader(dataset, num_workers=2, prefetch_factor=1, multiprocessing_context=sys.argv[1])
    iterator = iter(loader)
    pids = [worker.pid for worker in iterator._workers]
    for number, batch in enumerate(iterator):
        if number == 4:  # worker 1 will be in sample 5 for ever, worker 0 at its empty queue
            while "task 5, sample" not in iterator._board.read(1).describe([5]):
                time.sleep(0.005)
            print(*pids, flush=True)
"""


@pytest.mark.parametrize(
    ("what", "method"),
    [("killed", "fork"), *slow(("killed", "forkserver")), ("interrupted", "fork"), ("terminated", "fork")],
)
def test_a_program_that_ends_by_a_signal_leaves_no_worker(what: str, method: str, tmp_path: Path) -> None:
    """Its group hears Ctrl-C: one traceback, the program's own. SIGKILL it hears alone, and an idle worker notices.

    A worker that is stuck in a sample can't notice that its parent is gone.
    """
    send, number = {
        "killed": (os.kill, signal.SIGKILL),
        "interrupted": (os.killpg, signal.SIGINT),
        "terminated": (os.killpg, signal.SIGTERM),
    }[what]
    said = tmp_path / "said"
    with said.open("w") as words, wl.started(SIGNALLED, method, stderr=words) as program:
        idle, stuck = wl.pids_said_by(program)
        send(program.pid, number)
        try:
            code = program.wait(wl.BOUND)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the program did not end; it is at:\n{said.read_text()}")
    assert code == -number
    wl.wait_until_gone([idle])
    if what == "killed":
        assert is_alive(stuck)
        os.kill(stuck, signal.SIGKILL)
    wl.wait_until_gone([stuck])
    if what == "interrupted":
        assert said.read_text().count("Traceback") == 1
        assert said.read_text().strip().endswith("KeyboardInterrupt")


# --- Closed from inside -----------------------------------------------------------------------------------------------
class Calls(wl.Numbers):
    """Sends the loader's process a signal as soon as it is asked for a sample, and then waits to be let go."""

    def __init__(self, let_go: Any) -> None:
        super().__init__(3)
        self.let_go = let_go

    def __getitem__(self, index: int) -> int:
        os.kill(os.getppid(), signal.SIGUSR1)
        self.let_go.wait()
        return index


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_signal_handler_may_close_the_iterator_that_is_waited_for(
    pin_memory: bool, monkeypatch: pytest.MonkeyPatch, install_handler: Any
) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    wl.impatient(monkeypatch)
    let_go = torch.multiprocessing.get_context("fork").Event()
    loader: minidl.DataLoader[int] = minidl.DataLoader(
        Calls(let_go), batch_size=None, num_workers=1, pin_memory=pin_memory, multiprocessing_context="fork"
    )

    def close(number: int, frame: FrameType | None) -> None:
        let_go.set()
        loader.close()

    install_handler(signal.SIGUSR1, close)
    assert list(loader) == []


def test_a_signal_handler_may_close_the_iterator_while_a_batch_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer gets this batch, and no other one."""
    loader: minidl.DataLoader[int] = minidl.DataLoader(wl.Numbers(3), batch_size=None, num_workers=1)
    yielded = driver.Driver.yielded

    def closed_before(itself: driver.Driver) -> None:
        loader.close()
        yielded(itself)

    monkeypatch.setattr(driver.Driver, "yielded", closed_before)
    assert list(loader) == [0]


ON_THE_WAY: dict[str, tuple[Any, str]] = {
    "a task": (iterators, "Task"),
    "a new epoch's message": (iterators, "ResumeIteration"),
    "a sentinel": (module, "Sentinel"),
}
"""Messages, each with the module and the name of the class that is called between the driver's answer and the put."""


@pytest.mark.parametrize("what", ON_THE_WAY)
def test_a_signal_handler_may_close_the_iterator_before_a_message_is_put(
    what: str, monkeypatch: pytest.MonkeyPatch, install_handler: Any
) -> None:
    module, name = ON_THE_WAY[what]
    make, closed = getattr(module, name), []
    persistent = what == "a new epoch's message"
    stream = wl.Stream(0 if what == "a sentinel" else 3)  # an empty one: no batch can come before the first sentinel
    loader: Any = minidl.DataLoader(stream, num_workers=2, persistent_workers=persistent, batch_size=None)

    def close(number: int, frame: FrameType | None) -> None:
        closed.append(number)
        iterator.close()

    def make_and_close(*arguments: Any) -> Any:
        if not closed:
            signal.raise_signal(signal.SIGUSR1)
        return make(*arguments)

    iterator: Any = iter(loader)
    if persistent:
        assert len(list(iterator)) == 3
    elif what == "a task":
        next(iterator)
    install_handler(signal.SIGUSR1, close)
    monkeypatch.setattr(module, name, make_and_close)
    again = iter(loader) if persistent else iterator
    assert list(again) == []
    assert closed == [signal.SIGUSR1]
    assert_ended(iterator)


def test_a_signal_handler_may_close_the_iterator_in_the_middle_of_a_put(
    monkeypatch: pytest.MonkeyPatch, install_handler: Any
) -> None:
    """The put holds the lock of the queue's buffer, and the shutdown puts a sentinel into the same queue."""
    wl.impatient(monkeypatch)
    iterator: Any = iter(minidl.DataLoader(wl.Numbers(9), num_workers=1))
    next(iterator)
    ready = iterator._index_queues[0]._notempty
    notify, held = ready.notify, []

    def notify_and_close() -> None:
        if not held:
            held.append(ready._lock._is_owned())
            signal.raise_signal(signal.SIGUSR1)
        notify()

    install_handler(signal.SIGUSR1, lambda number, frame: iterator.close())
    monkeypatch.setattr(ready, "notify", notify_and_close)
    assert list(iterator) == []
    assert held == [True]
    assert_ended(iterator, (0,))  # of SIGTERM: the worker's sentinel could not be written meanwhile


class ClosesItsLoader:
    """A sampler that closes its loader when it is asked for its sixth index."""

    loader: minidl.DataLoader[int]

    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        self.loader.close()
        yield from range(5, 10)


@pytest.mark.parametrize(("num_workers", "before"), [(0, [0, 1, 2, 3, 4]), (1, [0, 1, 2])])
def test_user_code_that_runs_inside_next_may_close_the_iterator(
    num_workers: int, before: list[int], tmp_path: Path
) -> None:
    sampler = ClosesItsLoader()
    with minidl.trace(tmp_path / "trace"):
        loader: minidl.DataLoader[int] = minidl.DataLoader(
            wl.Numbers(10), batch_size=None, sampler=sampler, num_workers=num_workers
        )
        sampler.loader = loader
        assert list(loader) == before
    report = examine(read_trace(tmp_path / "trace"))
    assert not report.violations, report.text()


@pytest.mark.parametrize("traced", [False, True])
def test_an_iterator_that_is_kept_keeps_no_slabs(traced: bool, tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "trace") if traced else contextlib.nullcontext():
        iterator: Any = iter(minidl.DataLoader([torch.ones(9000)] * 4, num_workers=1, transport="arena"))
        batches = [batch.sum().item() for batch in iterator]
    assert batches == [9000.0] * 4
    assert [len(each._memory) for each in iterator._worker_result_queue._mappings] == [0]
