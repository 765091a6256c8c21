"""SIGCHLD's error comes at once in the user's code and in a wait, but not in the middle of a step of the loader."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.data._utils.signal_handling as torchs
import workloads as wl

import minidl
from minidl.loader import crew, iterators, liveness
from minidl.loader.crew import Crew
from minidl.wire import queues, signal_handling
from minidl.wire.queues import BoundedQueue, ReadyQueue

pytestmark = pytest.mark.live


@pytest.fixture(params=["alone", "above torch's", "below torch's"])
def handler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, install_handler: Any) -> None:
    """Our handler is installed by the next iterator; torch's, if there is one, before it or between two of ours."""
    install_handler(signal.SIGCHLD, signal.SIG_DFL)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    monkeypatch.setattr(torchs, "_SIGCHLD_handler_set", False)
    if request.param == "below torch's":
        signal_handling._set_SIGCHLD_handler()
    if request.param != "alone":
        torchs._set_SIGCHLD_handler()


class Loaded:
    """An iterator after four batches, whose worker 1 has tasks 5 and 7, and does not end the first of them."""

    def __init__(self, directory: Path, pin_memory: bool = False) -> None:
        dataset, timeout = wl.Gate(20, directory / "never", at=5), 30  # the timeout ends the wait for what is lost
        options: dict[str, Any] = {"num_workers": 2, "timeout": timeout, "pin_memory": pin_memory}
        self.iterator: Any = iter(minidl.DataLoader(dataset, batch_size=None, **options))
        assert [next(self.iterator) for _ in range(4)] == [0, 1, 2, 3]
        with self.iterator._worker_result_queue._wlock:
            self.kills = 0  # worker 1 has written batch 3, and now it has also let go of the lock

    def kill(self) -> None:
        """Kill worker 1, once, and wait for its end: SIGCHLD is here before the next line of the caller runs."""
        if not self.kills:
            self.kills += 1
            pid = self.iterator._workers[1].pid
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, after whose first call worker 1 is dead."""

        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self.kill()
            return result

        return call


def after_a_message_is_read(loaded: Loaded, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loaded.iterator._data_queue, "_recv_bytes", loaded.after(loaded.iterator._data_queue._recv_bytes))


def after_bytes_are_read(loaded: Loaded, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "read", loaded.after(os.read))


def after_a_pinned_message_is_read(loaded: Loaded, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loaded.iterator._data_queue, "get", loaded.after(loaded.iterator._data_queue.get))


def after_a_task_is_assigned(loaded: Loaded, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(iterators, "Task", loaded.after(iterators.Task))


STEPS = (after_a_message_is_read, after_bytes_are_read, after_a_pinned_message_is_read, after_a_task_is_assigned)


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_the_loader_is_not_interrupted(
    step: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at the next wait. All batches of the other worker come after it."""
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    loaded = Loaded(tmp_path, pin_memory="pinned" in step.__name__)
    with monkeypatch.context() as patch:
        step(loaded, patch)
        batches, error = until_error(loaded.iterator)
        assert loaded.kills == 1
    assert "exited unexpectedly" in str(error)
    assert "is killed by signal" in str(error.__cause__)  # SIGCHLD's error, and not found by looking
    assert [*batches, *loaded.iterator] == [4, 6, *range(8, 20)]


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("handler", ["alone"], indirect=True)
def test_a_second_death_does_not_break_the_words_about_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SIGCHLD comes while the loader makes the error of the first."""
    loaded = Loaded(tmp_path)
    iterator, plain = loaded.iterator, liveness._worker_died
    while "task 5, sample" not in iterator._board.read(1).describe([5]):
        time.sleep(0.002)
    found: list[tuple[int, ...]] = []

    def kill_the_other_first(crew: Any, workers: tuple[int, ...]) -> RuntimeError:
        found.append(workers)
        pid = crew.workers[0].pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return plain(crew, workers)

    monkeypatch.setattr(liveness, "_worker_died", kill_the_other_first)
    after_a_task_is_assigned(loaded, monkeypatch)
    _, error = until_error(iterator)
    assert found == [(1,)]
    assert "worker 1: exit code -9, last in task 5, sample index 5" in str(error)


def until_error(iterator: Any) -> tuple[list[int], Exception]:
    """The batches before the first error, and the error."""
    batches: list[int] = []
    try:
        batches.extend(iterator)
    except RuntimeError as error:
        return batches, error
    raise AssertionError("no error")


@pytest.mark.usefixtures("handler")
def test_the_users_code_is_interrupted(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path)
    with pytest.raises(RuntimeError, match="is killed by signal"):
        loaded.kill()
    loaded.iterator.close()


@pytest.mark.usefixtures("handler")
def test_a_shutdown_goes_on_to_its_end_and_then_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers one is killed in the join; the other leaves by itself."""
    loaded = Loaded(tmp_path)
    monkeypatch.setattr(Crew, "_mark_worker_as_unavailable", loaded.after(Crew._mark_worker_as_unavailable))
    with pytest.raises(RuntimeError, match="is killed by signal"):
        loaded.iterator.close()
    assert [worker.exitcode for worker in loaded.iterator._workers] == [0, -9]
    assert loaded.iterator._driver.ended


@pytest.fixture
def put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that has been put off."""
    monkeypatch.setattr(signal_handling, "put_off", True)
    monkeypatch.setattr(signal_handling, "_error_if_any_worker_fails", fail)


def fail() -> None:
    raise RuntimeError("DataLoader worker is killed")


@pytest.mark.usefixtures("put_off")
def test_an_error_that_was_put_off_is_raised_once_and_in_the_main_thread() -> None:
    queue = ReadyQueue()
    thread = threading.Thread(target=lambda: queue.put("raises nothing here") or signal_handling.raise_now())  # type: ignore[func-returns-value]
    thread.start()
    thread.join()
    assert queue.get() == "raises nothing here"  # without a wait
    assert queues._News.wait.__code__ in signal_handling._waits
    with pytest.raises(RuntimeError, match="worker is killed"):
        queue.get(timeout=0)
    queue.put("the next")
    assert queue.get() == "the next"
    signal_handling.raise_now()


@pytest.mark.parametrize("made", [ReadyQueue, lambda: BoundedQueue(multiprocessing.get_context("fork"))])
def test_a_handler_that_comes_while_a_queue_waits_may_raise_at_once(made: Any, install_handler: Any) -> None:
    waiting: Any = made()
    install_handler(signal.SIGALRM, lambda signum, frame: fail() if frame.f_code in signal_handling._waits else None)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(RuntimeError, match="worker is killed"):
        waiting.get(timeout=wl.BOUND)


def test_the_programs_own_handler_is_called_too_and_ours_is_installed_once(
    monkeypatch: pytest.MonkeyPatch, install_handler: Any
) -> None:
    heard: list[Any] = []
    install_handler(signal.SIGCHLD, lambda *args: heard.append(args))
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    signal_handling._set_SIGCHLD_handler()
    ours = signal.getsignal(signal.SIGCHLD)
    signal_handling._set_SIGCHLD_handler()
    assert signal.getsignal(signal.SIGCHLD) is ours
    signal.raise_signal(signal.SIGCHLD)
    ((signum, frame),) = heard
    assert (signum, frame.f_code.co_name) == (signal.SIGCHLD, sys._getframe().f_code.co_name)
    assert not signal_handling._is_torchs(None), "a handler that is not Python's"


def test_a_function_that_waits_is_marked_and_stays_itself() -> None:
    def waits() -> None: ...

    assert signal_handling.wait(waits) is waits
    signal_handling._waits.remove(waits.__code__)


def test_a_step_is_what_calls_the_interrupted_code_unless_that_waits() -> None:
    def frame(module: str, back: Any = None, code: Any = None) -> Any:
        return SimpleNamespace(f_code=code, f_globals={"__name__": module}, f_back=back)

    step = frame("minidl.loader.iterators", frame("__main__"))
    wait = next(iter(signal_handling._waits))
    frames = [None, frame("__main__"), step, frame("queue", step), frame("queue", step, wait)]
    assert [signal_handling._in_a_step(each) for each in frames] == [False, False, True, True, False]


# --- While a worker is started ----------------------------------------------------------------------------------------
class Signals:
    """Item: the signals that a worker does not hear, or hears by another handler than the program's."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[int]:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return [*blocked, *(number for number in NUMBERS if signal.getsignal(number) is signal_handling._note)]


NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)

in_the_next_fork: list[Callable[[], None]] = []
os.register_at_fork(before=lambda: in_the_next_fork.pop()() if in_the_next_fork else None)


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_an_interrupt_while_a_worker_is_started_comes_once_it_is_listed(
    context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, crews, workers = iterators._start, [], []

    def start(worker: Any) -> None:
        plain(worker)
        workers.append(worker)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(iterators, "_start", start)
    kept = staticmethod(lambda *args: crews.append(Crew(*args)) or crews[-1])
    monkeypatch.setattr(iterators._MultiProcessingDataLoaderIter, "_crew_type", kept)
    with pytest.raises(KeyboardInterrupt):
        iter(minidl.DataLoader(wl.Numbers(4), num_workers=2, multiprocessing_context=context))
    assert crews[0].workers == workers
    assert len(workers) == 1
    crews[0].shut_down()
    assert not workers[0].is_alive()


def test_an_interrupt_in_the_middle_of_a_fork_is_not_lost() -> None:
    """CPython prints what is raised there, and goes on."""
    in_the_next_fork.append(lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        iter(minidl.DataLoader(wl.Numbers(4), num_workers=1, multiprocessing_context="fork"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("context", "transport"), [("fork", "upstream"), ("fork", "arena"), ("spawn", "arena")])
def test_a_worker_hears_all_signals_as_the_program_does(context: str, transport: Any, install_handler: Any) -> None:
    install_handler(signal.SIGALRM, print)
    loader = minidl.DataLoader(Signals(), None, num_workers=1, multiprocessing_context=context, transport=transport)
    assert list(loader) == [[]] * 4
    assert signal.getsignal(signal.SIGALRM) is print


def test_all_signals_that_came_are_heard_though_a_handler_raises(install_handler: Any) -> None:
    heard: list[int] = []

    def alarm(signum: int, frame: Any) -> None:
        heard.append(signum)
        raise TimeoutError

    install_handler(signal.SIGALRM, alarm)
    with pytest.raises(BaseException) as raised, signal_handling.put_off_all():  # noqa: PT012
        with signal_handling.put_off_all():  # nothing ends here
            for number in (signal.SIGALRM, signal.SIGINT, signal.SIGALRM):
                signal.raise_signal(number)
        assert heard == []
    assert heard == [signal.SIGALRM]
    assert {type(raised.value), type(raised.value.__context__)} == {KeyboardInterrupt, TimeoutError}
    assert signal.getsignal(signal.SIGALRM) is alarm


def test_a_handler_that_raises_while_they_are_installed_again_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, raises = signal.signal, [KeyboardInterrupt]

    def install(signum: int, handler: Any) -> Any:
        before = plain(signum, handler)
        if handler is signal.default_int_handler and raises:
            raise raises.pop()
        return before

    with pytest.raises(KeyboardInterrupt), signal_handling.put_off_all():
        monkeypatch.setattr(signal, "signal", install)
    assert not raises
    assert all(signal.getsignal(number) is not signal_handling._note for number in signal.valid_signals())


def test_a_signal_that_came_to_the_process_that_forked_is_not_the_childs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_handling, "_came", [(os.getppid(), signal.SIGINT)])
    signal_handling.run_again()
    assert signal_handling._came == []


def test_in_another_thread_nothing_is_put_off() -> None:
    seen: list[Any] = []

    def work() -> None:
        with signal_handling.put_off_all():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_condition_drops_the_error_by_which_a_signals_handler_tells_a_death() -> None:
    """A fact about Python: torch's loader, interrupted while it puts a task, finds that death by polling."""

    class Interrupted:
        def release(self) -> None:
            raise RuntimeError("DataLoader worker is killed by signal")

    condition: Any = threading.Condition()
    condition._waiters.append(Interrupted())
    with condition:
        condition.notify()
    assert not condition._waiters


def test_a_shutdown_at_exit_and_a_copy_to_a_device_are_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run without an iterator of the loader below them."""
    in_a_step: list[bool] = []

    def interrupted(batch: Any = None) -> Any:
        in_a_step.append(signal_handling._in_a_step(sys._getframe()))
        return batch

    monkeypatch.setattr(crew, "_running", [SimpleNamespace(closes_at_exit=True, shut_down=interrupted)])
    crew._close_all()
    assert len(list(minidl.DeviceLoader([torch.ones(2)], "sim", transform=interrupted))) == 1
    interrupted()
    assert in_a_step == [True, True, False]
