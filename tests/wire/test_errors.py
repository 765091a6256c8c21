"""What the consumer hears when something fails: which worker, task, sample and place; and what still works after it."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import re
import signal
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.utils.data
import workloads as wl
from sizes import slow

import minidl
from minidl.loader import iterators, liveness, worker
from minidl.loader.progress import ProgressBoard, Stage
from minidl.loader.protocol import ProtocolError
from minidl.wire import errors
from minidl.wire.errors import ExceptionWrapper, LoaderHangError, RemoteTracebackError, StateMismatchError, with_remedy
from minidl.wire.messages import Result


def errors_of(loader: Any) -> dict[int, Exception]:
    """One epoch: each error, under the number of the batch in whose place it came."""
    found = {}
    iterator = iter(loader)
    for number in range(1000):
        try:
            next(iterator)
        except StopIteration:
            return found
        except Exception as error:
            found[number] = error
    raise AssertionError("the epoch does not end")


def only_error(dataset: Any, **options: Any) -> tuple[int, Exception]:
    """The one error of an epoch with two workers and batches of two; every other batch came."""
    loader = minidl.DataLoader(dataset, **({"batch_size": 2, "num_workers": 2} | options))
    ((number, error),) = errors_of(loader).items()
    return number, error


# --- Where ------------------------------------------------------------------------------------------------------------
PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "sample": (
        {"dataset": wl.Failing(12, wl.SimpleError("here"), at=(6,)), "batch_size": 4},
        "Task 1 of worker 1: sample index 6 (place 3 of 4).",
    ),
    "shuffled sample": (
        {"dataset": wl.Failing(12, wl.SimpleError("here"), at=(6,)), "sampler": [9, 8, 7, 6, 5], "batch_size": 3},
        "Task 1 of worker 1: sample index 6 (place 1 of 2).",
    ),
    "single sample": (
        {"dataset": wl.Failing(8, wl.SimpleError("here"), at=(5,)), "batch_size": None},
        "Task 5 of worker 1: sample index 5.",
    ),
    "key": (
        {"dataset": {"cat": 1, "dog": 2}, "sampler": ["dog", "cow"], "batch_size": 2},
        "Task 0 of worker 0: sample index 'cow' (place 2 of 2).",
    ),
    "whole batch": (
        {"dataset": wl.FailingBatch(2)},
        "Task 0 of worker 0: its whole batch of 2 (__getitems__).",
    ),
    "collate": (
        {"dataset": wl.Numbers(8), "collate_fn": wl.failing_collate},
        "Task 1 of worker 1: collating.",
    ),
    "stream": (
        {"dataset": wl.FailingStream(4, "next"), "batch_size": 4, "num_workers": 1},
        "Task 0 of worker 0: a sample (place 3 of 4).",
    ),
    "stream of batches": (
        {"dataset": wl.FailingStream(4, "next"), "batch_size": None, "num_workers": 1},
        "Task 2 of worker 0: sample 1 of its stream's batch.",
    ),
}  # fmt: skip


@pytest.mark.live
@pytest.mark.parametrize("name", PLACES)
def test_an_error_names_worker_task_sample_and_place(name: str) -> None:
    options, place = PLACES[name]
    number, error = only_error(**options)
    first, *middle, last = str(error).strip("'").splitlines()
    worker = place.split("worker ")[1][0]
    assert first == f"Caught {type(error).__name__} in DataLoader worker process {worker}."
    assert middle[0] == "Original Traceback (most recent call last):"
    assert last == place
    assert place.startswith(f"Task {number} ")
    assert any('File "' in line for line in middle)


def test_in_one_process_the_error_is_the_datasets_own() -> None:
    error = wl.SimpleError("untouched")
    (raised,) = errors_of(minidl.DataLoader(wl.Failing(4, error))).values()
    assert raised is error


# --- Types ------------------------------------------------------------------------------------------------------------
def local_error() -> Exception:
    class HiddenError(Exception):
        """Its class can't be found by name, so it does not pickle."""

    return HiddenError("from inside a function")


def with_baggage() -> Exception:
    return ValueError("heavy", bytes(3_000_000))


def with_a_lambda() -> Exception:
    return ValueError("light", lambda: None)


TYPES: list[tuple[Callable[[], Exception], type[Exception], str]] = [
    (lambda: wl.TwoArgumentsError(7, "because"), wl.TwoArgumentsError, "(7, 'because')"),
    (lambda: wl.MessageError("by keyword"), wl.MessageError, "by keyword"),
    (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), UnicodeDecodeError, "0xff"),
    (lambda: wl.UnpicklableError(7, "because"), RuntimeError, "UnpicklableError: 7 because"),
    (local_error, RuntimeError, "HiddenError: from inside a function"),
    (with_baggage, ValueError, "heavy"),
    (with_a_lambda, ValueError, "light"),
    (lambda: KeyError("two\nlines"), KeyError, "'two\\nlines'"),
    (lambda: wl.SimpleError(), wl.SimpleError, "SimpleError"),
]


@pytest.mark.live
@pytest.mark.parametrize(("make", "kind", "words"), TYPES)
def test_the_type_is_kept_where_it_can_be_and_the_words_always(
    make: Callable[[], Exception], kind: type[Exception], words: str
) -> None:
    number, error = only_error(wl.Failing(8, make(), at=(2,)))
    whole = f"{error}\n{error.__cause__}"
    assert (number, type(error)) == (1, kind)
    assert words in whole
    assert "in DataLoader worker process 1." in whole
    assert "Task 1 of worker 1: sample index 2 (place 1 of 2)." in whole


@pytest.mark.live
def test_an_error_rebuilt_as_it_was_keeps_its_attributes_and_has_the_text_as_its_cause() -> None:
    _, error = only_error(wl.Failing(4, wl.TwoArgumentsError(7, "because"), at=(0,)))
    assert isinstance(error, wl.TwoArgumentsError)
    assert (error.code, error.reason) == (7, "because")
    assert isinstance(error.__cause__, RemoteTracebackError)
    assert "Original Traceback" in str(error.__cause__)


@pytest.mark.live
def test_a_readable_key_error() -> None:
    _, error = only_error(wl.Failing(4, KeyError("no such key"), at=(0,)))
    assert "\\n" not in str(error)
    assert "\nKeyError: 'no such key'\n" in str(error)


def test_a_wrapper_without_what_may_not_pickle_has_the_same_text() -> None:
    wrapper = ExceptionWrapper(wl.UnpicklableError(1, "x"), "in a test", "Task 4.")
    assert repr(wrapper) == "<UnpicklableError in a test>"
    assert wrapper.portable().text == wrapper.text
    with pytest.raises(RuntimeError, match=r"(?s)^Caught UnpicklableError in a test.*1 x.*Task 4\.$"):
        wrapper.portable().reraise()


class ToldError(Exception):
    """As torch's own errors with a `message`."""

    message = "a default"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)


class TwoArgumentsError(Exception):
    def __init__(self, code: int, words: str) -> None:
        super().__init__(code, words)
        self.code = code


class BecomesATextError(TwoArgumentsError):
    def __reduce__(self) -> Any:
        return str, ("no exception any more",)


def wrapped(error: Exception, place: str = "Task 3.") -> tuple[ExceptionWrapper, str]:
    """The wrapper of an error that was raised, and the text that it must have."""
    try:
        raise error
    except Exception as caught:
        trace = "".join(traceback.format_exception(caught))
        return ExceptionWrapper(
            caught, "there", place
        ), f"Caught {type(error).__name__} there.\nOriginal {trace}\n{place}"


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyError("key"), ToldError(message="told")], ids=repr)
def test_the_type_is_called_with_the_text(error: Exception) -> None:
    wrapper, text = wrapped(error)
    assert wrapper.text == text
    assert "in wrapped" in text
    with pytest.raises(type(error)) as caught:
        wrapper.reraise()
    assert str(caught.value) == text
    assert caught.value.__cause__ is None


def test_without_a_place_the_text_ends_with_the_traceback() -> None:
    wrapper = ExceptionWrapper(ValueError("wrong"), "there")
    assert wrapper.text == "Caught ValueError there.\nOriginal ValueError: wrong\n"
    assert wrapper.last_line == "ValueError: wrong"


def test_what_the_text_alone_does_not_make_is_rebuilt_from_its_pickle() -> None:
    wrapper, text = wrapped(TwoArgumentsError(3, "words"))
    with pytest.raises(TwoArgumentsError) as caught:
        wrapper.reraise()
    assert (caught.value.code, caught.value.args) == (3, (3, "words"))
    assert isinstance(caught.value.__cause__, RemoteTracebackError)
    assert str(caught.value.__cause__) == text


@pytest.mark.parametrize(
    "error", [BecomesATextError(3, "words"), TwoArgumentsError(3, lambda: "words")], ids=["text", "unpickled"]
)  # type: ignore[arg-type]
def test_what_can_not_be_rebuilt_is_a_runtime_error_with_the_text(error: Exception) -> None:
    wrapper, text = wrapped(error)
    with pytest.raises(RuntimeError) as caught:
        wrapper.reraise()
    assert str(caught.value) == text


@pytest.mark.parametrize(("over", "kind"), [(0, TwoArgumentsError), (1, RuntimeError)])
def test_an_error_that_refers_to_much_is_sent_as_text(
    over: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = TwoArgumentsError(3, "words")
    monkeypatch.setattr(errors, "_LARGEST_PICKLE", len(pickle.dumps(error)) - over)
    with pytest.raises(kind):
        wrapped(error)[0].reraise()


@pytest.mark.live
def test_an_error_does_not_keep_the_workers() -> None:
    """Neither the caught error nor a cycle through its traceback holds the iterator back."""

    def fail_once() -> Any:
        iterator = iter(minidl.DataLoader(wl.Failing(9, wl.SimpleError("once"), at=(0,)), num_workers=1))
        with pytest.raises(wl.SimpleError):
            next(iterator)
        return weakref.ref(iterator)

    gc.disable()
    try:
        assert fail_once()() is None
    finally:
        gc.enable()


# --- What can't be sent, or does not arrive ---------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.parametrize("device", ["", "1"], ids=["plain", "pinned"])
def test_a_batch_that_cannot_be_sent(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", device)
    number, error = only_error(wl.At(8, 2, wl.Unpicklable), collate_fn=wl.as_list, pin_memory=bool(device))
    assert (number, type(error)) == (1, TypeError)
    assert "Caught TypeError in DataLoader worker process 1 while it pickled a batch." in str(error)
    assert "this object does not travel" in str(error)
    assert "Task 1: its batch can't be sent between processes." in str(error)


@pytest.mark.live
@pytest.mark.parametrize("device", ["", "1"], ids=["plain", "pinned"])
def test_a_batch_that_cannot_be_rebuilt(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", device)
    number, error = only_error(wl.At(8, 2, wl.Unbuildable), collate_fn=wl.as_list, pin_memory=bool(device))
    assert (number, type(error)) == (1, ValueError)
    assert "Caught ValueError in the loader while it rebuilt a batch." in str(error)
    assert "this object does not arrive" in str(error)
    assert str(error).endswith("Task 1 of worker 1.")


@pytest.mark.live
@pytest.mark.parametrize(
    ("index", "kind", "words"),
    [
        (wl.Unpicklable(), TypeError, "Caught TypeError in the loader while it pickled a task's indices."),
        (wl.Unbuildable(), ValueError, "worker process 1 while it unpickled a task's indices."),
    ],
    ids=["unpicklable", "unbuildable"],
)
def test_indices_that_cannot_be_sent(index: Any, kind: type[Exception], words: str) -> None:
    loader = minidl.DataLoader(wl.Numbers(9), sampler=[0, index, 2, 3], num_workers=2)
    ((number, error),) = errors_of(loader).items()
    assert (number, type(error)) == (1, kind)
    assert words in str(error)
    assert "\nTask 1" in str(error)


@pytest.mark.live
def test_a_worker_that_cannot_be_started_says_why_as_torchs_does() -> None:
    def start(lib: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = lib.DataLoader(
                wl.Numbers(3), num_workers=2, collate_fn=lambda x: x, multiprocessing_context="spawn"
            )
            with pytest.raises((AttributeError, TypeError)) as raised:
                iter(loader)
        return [str(w.message) for w in caught if "pickle" in str(w.message)], type(raised.value)

    ours = start(minidl)
    assert ours == start(torch.utils.data)
    assert len(ours[0]) == 1


@pytest.mark.live
def test_after_its_initialisation_failed_a_worker_says_so_task_by_task() -> None:
    errors = errors_of(minidl.DataLoader(wl.Numbers(4), num_workers=2, worker_init_fn=wl.failing_init))
    assert [type(error) for error in errors.values()] == [wl.SimpleError] * 2 + [RuntimeError] * 2
    assert "worker 1 does not begin" in str(errors[1])
    assert "the worker has no fetcher, because its initialisation failed" in str(errors[2])


# --- Hanging, dying ---------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_a_timeout_says_who_where_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    wl.impatient(monkeypatch)
    loader = minidl.DataLoader(wl.At(9, 5, wl.hang), batch_size=2, num_workers=2, timeout=1)
    iterator: Any = iter(loader)
    while iterator._board.read(0).task != 2 or iterator._board.read(1).task != 3:
        time.sleep(0.005)  # the first batches are made: on a busy machine that can take longer than the timeout
    assert [batch.tolist() for batch in (next(iterator), next(iterator))] == [[0, 1], [2, 3]]
    pid = iterator._workers[0].pid
    words = (
        r"DataLoader timed out after 1 seconds: waited \d\.\d s for task 2 of worker 0 "
        rf"\(pid {pid}, alive\), which is in task 2, sample index 5 \(place 2 of 2\), for \d\.\d s"
    )
    with pytest.raises(RuntimeError, match=words):
        next(iterator)
    del iterator


@pytest.mark.live
def test_a_timeout_before_a_new_epoch_says_how_many_workers_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wl.impatient(monkeypatch)
    with minidl.DataLoader(wl.Numbers(2), num_workers=2, timeout=1, persistent_workers=True) as loader:
        iterator: Any = iter(loader)
        assert len(list(iterator)) == 2
        os.kill(iterator._workers[1].pid, signal.SIGSTOP)
        # 2 where it was stopped with the result queue's lock, without which the other can't answer
        with pytest.raises(RuntimeError, match=r"1 seconds: waited \d\.\d s for [12] of 2 workers to begin epoch 1"):
            iter(loader)


@pytest.mark.live
def test_a_timeout_also_ends_the_wait_for_the_memory_of_a_worker_that_is_stopped() -> None:
    iterator: Any = iter(minidl.DataLoader(wl.Tensors(4), batch_size=2, num_workers=1, timeout=1))
    assert iterator._worker_result_queue._reader.poll(20)
    worker = iterator._workers[0]
    os.kill(worker.pid, signal.SIGSTOP)
    words = rf"timed out after 1 seconds: the message of task 0 is here, but worker 0 \(pid {worker.pid}, alive\)"
    with pytest.raises(RuntimeError, match=words):
        next(iterator)
    os.kill(worker.pid, signal.SIGCONT)
    assert len(next(iterator)) == 2  # the epoch goes on with task 1
    iterator.close()


@pytest.mark.live
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": wl.Numbers(9), "worker_init_fn": wl.hang_in_init}, r"in worker_init_fn, for \d"),
        ({"dataset": wl.HangsAtOnce()}, r"making its fetcher \(an iterable dataset's __iter__\), for \d"),
    ],
    ids=["worker_init_fn", "__iter__"],
)
def test_a_timeout_knows_the_stages_before_the_first_task(
    options: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wl.impatient(monkeypatch)
    iterator: Any = iter(minidl.DataLoader(**options, num_workers=1, timeout=0.5))
    while iterator._board.read(0).stage is Stage.STARTING:
        time.sleep(0.005)
    with pytest.raises(RuntimeError, match=rf"which is {words}"):
        next(iterator)
    del iterator


@pytest.mark.live
def test_a_worker_waits_since_it_began_to_wait_and_not_since_its_last_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # for the worker that is forked, and not for its end
        wl.impatient(patch, 0.01)
        iterator: Any = iter(minidl.DataLoader(wl.Numbers(1), num_workers=1, persistent_workers=True))
    assert len(list(iterator)) == 1
    while iterator._board.read(0).stage is not Stage.WAITING:
        time.sleep(0.005)
    since = iterator._board.read(0).since
    time.sleep(0.2)  # twenty polls
    assert iterator._board.read(0).since == since
    iterator.close()


@pytest.fixture
def polling(no_sigchld: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead worker is found by looking, every 0.3 s, and not by SIGCHLD."""
    wl.impatient(monkeypatch)


DEATHS: list[tuple[Callable[[], None], str]] = [
    (wl.kill_myself, "-9"),
    (wl.exit_at_once, "7"),
    (wl.segfault, "-11"),
]


@pytest.mark.live
@pytest.mark.usefixtures("polling")
@pytest.mark.parametrize(("death", "code"), DEATHS, ids=["killed", "exit", "segfault"])
def test_a_dead_worker_is_named_and_the_others_batches_still_come(
    death: Callable[[], None], code: str, tmp_path: Path
) -> None:
    """It dies in task 12. That is given up, and so is task 14, which it had been sent; the rest goes to worker 1."""
    dataset = wl.Gate(40, tmp_path / "die", at=25, thing=death)
    iterator: Any = iter(minidl.DataLoader(dataset, batch_size=2, num_workers=2))
    assert [next(iterator).tolist()[0] for _ in range(12)] == list(range(0, 24, 2))
    (tmp_path / "die").touch()
    words = (
        f"DataLoader worker (pid(s) {iterator._workers[0].pid}) exited unexpectedly "
        f"(worker 0: exit code {code}, last in task 12, sample index 25 (place 2 of 2)) (more: minidl help hang)"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(words)}$"):
        next(iterator)
    assert [batch.tolist()[0] for batch in iterator] == [26, 30, 32, 34, 36, 38]


@pytest.mark.live
@pytest.mark.usefixtures("polling")
def test_a_batch_whose_worker_died_before_it_was_fetched(tmp_path: Path) -> None:
    """Its message is here, but its memory is the dead worker's to hand out: that is a death, not a broken batch."""
    dataset = wl.Gate(6, tmp_path / "die", at=1, thing=wl.kill_myself)
    iterator: Any = iter(minidl.DataLoader(dataset, num_workers=1))
    assert iterator._worker_result_queue._poll(10)
    (tmp_path / "die").touch()
    iterator._workers[0].join(10)
    with pytest.raises(RuntimeError, match=rf"^DataLoader worker \(pid\(s\) {iterator._workers[0].pid}\) exited"):
        next(iterator)
    assert next(iterator, "ended") == "ended"


class Dying:
    """A worker that has lost its sockets and can't be seen dead before it is waited for."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.joined = False

    def is_alive(self) -> bool:
        return not self.joined

    def join(self, timeout: float) -> None:
        self.joined = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


@pytest.mark.live
@pytest.mark.usefixtures("polling")
def test_a_batch_whose_worker_is_about_to_die(tmp_path: Path) -> None:
    """The process that does not answer is given a moment to end."""
    iterator: Any = iter(minidl.DataLoader(wl.Gate(6, tmp_path / "die", at=1, thing=wl.kill_myself), num_workers=1))
    assert iterator._worker_result_queue._poll(10)
    (tmp_path / "die").touch()
    iterator._workers[0].join(10)
    iterator._workers[0] = Dying(iterator._workers[0])
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(iterator)


@pytest.mark.live
def test_a_queue_that_fails_for_want_of_descriptors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that fails for another reason says that."""

    def fail(timeout: float, inbox: list[Any]) -> None:
        raise OSError(5, "the queue's own error")

    def no_file(*args: Any) -> None:
        raise OSError(24, "Too many open files")

    iterator: Any = iter(minidl.DataLoader(wl.Numbers(3), num_workers=1))
    with monkeypatch.context() as patch:
        patch.setattr(iterator._data_queue, "get", fail)
        with pytest.raises(OSError, match="the queue's own error"):
            next(iterator)
        patch.setattr(os, "open", no_file)
        with pytest.raises(RuntimeError, match=r"Too many open files.*ulimit -n"):
            next(iterator)
    assert len(list(iterator)) == 3


@pytest.mark.live
def test_an_interrupted_resumption_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the workers of the next epoch are waited for: those that answer late are not taken for others."""
    with minidl.DataLoader(wl.Numbers(4), num_workers=2, persistent_workers=True) as loader:
        iterator: Any = iter(loader)
        list(iterator)
        get, answers = iterator._get_data, iter([True, False])

        def interrupted(timeout: float) -> Any:
            if next(answers, True):
                return get(timeout)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(iterator, "_get_data", interrupted)
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
        for _ in range(2):
            with pytest.raises(ProtocolError, match="whose new epoch has not begun"):
                next(iterator)
        assert [int(batch) for batch in loader] == [0, 1, 2, 3]


@pytest.mark.live
def test_an_error_that_is_interrupted_comes_at_the_next_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = iter(minidl.DataLoader(wl.Gate(2, tmp_path / "go"), num_workers=1, timeout=0.5))

    def interrupted(*args: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(liveness, "error_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match="timed out after"):
        next(iterator)
    (tmp_path / "go").touch()
    assert [int(batch) for batch in iterator] == [0, 1]


@pytest.mark.live
@pytest.mark.usefixtures("polling")
def test_a_dead_persistent_worker_is_heard_of_when_the_next_epoch_begins() -> None:
    with minidl.DataLoader(wl.Numbers(4), num_workers=2, persistent_workers=True) as loader:
        iterator: Any = iter(loader)
        list(iterator)
        pid = iterator._workers[1].pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            RuntimeError, match=rf"pid\(s\) {pid}\) exited unexpectedly \(worker 1: exit code -9, last wait"
        ):
            iter(loader)


KILLED = """
import minidl, minidl.loader.pin_memory, minidl.loader.worker, workloads as wl

# The loader looks only after a long time, and no join of it ends before what is joined. The pin thread looks: a worker
# that dies while its feeder thread writes takes along the lock that the pin thread's sentinel needs.
minidl.loader.worker.MP_STATUS_CHECK_INTERVAL = minidl.loader.driver.MP_STATUS_CHECK_INTERVAL = 10
minidl.loader.pin_memory.MP_STATUS_CHECK_INTERVAL = 0.3

def words(pin, death):
    loader = minidl.DataLoader(wl.At(40, 25, death), 2, num_workers=2, pin_memory=pin, collate_fn=wl.as_list)
    iterator = None
    try:
        iterator = iter(loader)
        for batch in iterator:
            pass
    except RuntimeError as error:
        found = f"{error} <- {error.__cause__}"
    iterator.close()
    assert not any(worker.is_alive() for worker in iterator._workers)
    assert not pin or not iterator._pin_memory_thread.is_alive()
    return found

for pin in (False, True):
    for death in (wl.kill_myself, wl.exit_at_once, wl.segfault, wl.die_with_the_lock):
        said = words(pin, death)
        # A signal that comes after Python's last look at signals and before the wait in C ends no wait: once more.
        print(said if "(pid " in said else words(pin, death))
"""


@pytest.mark.live
def test_a_death_is_heard_of_by_signal_where_nobody_looks() -> None:
    """The error comes from SIGCHLD's handler, in the loader or around it; the shutdown ends whatever the dead hold."""
    done = wl.run(KILLED, MINIDL_SIMULATE_DEVICE="1")
    assert done.returncode == 0, done.stderr
    ends = ["is killed by signal: Killed", "exited unexpectedly with exit code 7", "is killed by signal: Segmentation"]
    ends += ends[:1]
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    for line, end in zip(lines, ends * 2, strict=True):
        assert re.search(rf"DataLoader worker \(pid \d+\) {end}", line), line


# --- A worker's own end and its arguments -----------------------------------------------------------------------------
@pytest.mark.live
def test_what_can_not_be_unpickled_in_a_spawned_worker_is_the_error_of_each_task() -> None:
    """In the next epoch, too."""
    loader = minidl.DataLoader(
        wl.Numbers(2), collate_fn=wl.Unbuildable(), num_workers=1, persistent_workers=True,
        multiprocessing_context="spawn",
    )  # fmt: skip
    with loader:
        for _ in range(2):
            iterator = iter(loader)
            for _ in range(2):
                with pytest.raises(ValueError, match="in DataLoader worker process 0 while it unpickled its dataset"):
                    next(iterator)


def test_a_thread_ends_an_orphan_that_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    ended: list[int] = []
    lives = iter([True, False])
    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(worker, "os", SimpleNamespace(_exit=ended.append))
    watchdog: Any = SimpleNamespace(is_alive=lambda: next(lives))
    worker._end_orphan(watchdog)
    assert (slept, ended) == ([5.0, 10.0], [1])


def test_a_connection_that_the_worker_has_closed_is_explained() -> None:
    told = liveness.explained(Result(3, 1, None), EOFError())
    with pytest.raises(RuntimeError, match=r"(?s)ulimit -n.*Task 3 of worker 1") as raised:
        told.data.reraise()
    assert "EOFError" in str(raised.value)


# --- The pin-memory thread --------------------------------------------------------------------------------------------
@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")


class Pinnable:
    """Pins itself, or does not."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def pin_memory(self) -> list[int]:
        if 2 in self.samples:
            raise wl.SimpleError("this batch stays where it is")
        return [*self.samples, -1]


@pytest.mark.live
@pytest.mark.usefixtures("simulated")
def test_a_batch_that_cannot_be_pinned() -> None:
    loader = minidl.DataLoader(wl.Numbers(6), 2, num_workers=1, pin_memory=True, collate_fn=Pinnable)
    iterator = iter(loader)
    assert next(iterator) == [0, 1, -1]
    with pytest.raises(wl.SimpleError) as raised:
        next(iterator)
    assert str(raised.value).startswith("Caught SimpleError in pin memory thread for device 0.")
    assert str(raised.value).endswith("Task 1: pinning.")
    assert list(iterator) == [[4, 5, -1]]


@pytest.mark.live
@pytest.mark.usefixtures("simulated")
def test_the_pin_threads_death_carries_its_own_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(result_queue: Any, ready_queue: Any, *rest: Any) -> None:
        ready_queue.put(result_queue.get())
        raise ZeroDivisionError("in the thread")

    wl.impatient(monkeypatch)
    monkeypatch.setattr(iterators, "_pin_memory_loop", loop)
    iterator = iter(minidl.DataLoader(wl.Numbers(6), num_workers=1, pin_memory=True))
    next(iterator)
    with pytest.raises(RuntimeError) as raised:
        next(iterator)
    assert str(raised.value) == "Pin memory thread exited unexpectedly: ZeroDivisionError: in the thread"
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="Pin memory thread exited unexpectedly"):
        next(iterator)


TORN = """
import sys, threading, warnings
import minidl, workloads as wl
import minidl.loader.driver, minidl.loader.pin_memory

minidl.loader.driver.MP_STATUS_CHECK_INTERVAL = minidl.loader.pin_memory.MP_STATUS_CHECK_INTERVAL = 0.3
pin = sys.argv[1] == "pinned"
iterator = iter(minidl.DataLoader(wl.At(40, 25, wl.die_in_the_middle_of_a_message), batch_size=2, num_workers=1,
                                  pin_memory=pin, collate_fn=list))  # no descriptors, whose passing tells of the death
def consume():
    try:
        for batch in iterator:
            pass
    except RuntimeError as error:
        print("heard:", str(error)[:60])

if sys.argv[1] == "thread":  # which no signal's handler can wake
    iterator._crew._forget_pids()
    consumer = threading.Thread(target=consume)
    consumer.start()
    consumer.join()
else:
    consume()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    iterator.close()
print("said:", [str(w.message)[:50] for w in caught])
print("exit code", iterator._workers[0].exitcode)
"""


@pytest.mark.live
@pytest.mark.parametrize("how", ["plain", "pinned", "thread"])
def test_a_message_torn_by_a_kill_hangs_nobody(how: str) -> None:
    """Its rest never comes, and no reader waits for it longer than its timeout."""
    done = wl.run(TORN, how, MINIDL_SIMULATE_DEVICE="1")
    assert done.returncode == 0, done.stderr
    heard, said, code = done.stdout.splitlines()
    assert heard.startswith("heard: DataLoader worker (pid")
    assert said == "said: []"
    assert code == "exit code -9"


JAMMED = """
import multiprocessing.util, os, sys, threading
import torch, minidl
import minidl.loader.driver, minidl.loader.pin_memory
from minidl.prove.lab.faulty import kill_myself, worker_spec

minidl.loader.driver.MP_STATUS_CHECK_INTERVAL = minidl.loader.pin_memory.MP_STATUS_CHECK_INTERVAL = 0.3
reading, writing = os.pipe()

class Ended(torch.utils.data.IterableDataset):
    # Worker 0 has no samples, leaves, and dies with the lock. Worker 1 has one, and sends it then.
    def __iter__(self):
        lock = worker_spec().result_queue._wlock
        def die():
            lock.acquire()
            kill_myself()
        os.close(writing)
        if torch.utils.data.get_worker_info().id == 0:
            multiprocessing.util.Finalize(None, die, exitpriority=10)
        else:
            os.read(reading, 1)  # the end of the file: all others have closed it
            yield 1

iterator = iter(minidl.DataLoader(Ended(), num_workers=2, pin_memory=sys.argv[1] == "pinned", transport="upstream"))
iterator._crew._forget_pids()
def consume():
    try:
        next(iterator)
    except RuntimeError as error:
        print("heard:", error)
consumer = threading.Thread(target=consume)  # which no signal's handler can wake
consumer.start()
iterator._workers[0].join()
os.close(writing)
consumer.join()
iterator.close()
print("exit code", iterator._workers[0].exitcode)
"""


@pytest.mark.live
@pytest.mark.parametrize("how", [*slow("plain"), "pinned"])
def test_a_worker_that_dies_with_the_lock_of_the_result_queue_when_it_leaves_is_told(how: str) -> None:
    done = wl.run(JAMMED, how, MINIDL_SIMULATE_DEVICE="1")
    assert done.returncode == 0, done.stderr
    heard, code = done.stdout.splitlines()
    assert heard.startswith("heard: DataLoader worker (pid(s) ")
    assert "exited unexpectedly (worker 0: exit code -9" in heard
    assert code == "exit code -9"


LOCKED = """
import itertools, os, sys, threading
import minidl, workloads as wl
import torch.utils.data
import minidl.loader.driver, minidl.loader.worker

minidl.loader.driver.MP_STATUS_CHECK_INTERVAL = minidl.loader.worker.MP_STATUS_CHECK_INTERVAL = 0.3
told = sys.argv[1] == "told to leave"

class Stream(minidl.IterableDataset):
    def __iter__(self):
        worker = minidl.get_worker_info().id
        if worker == 0 and not told:
            yield from range(3)
            wl.die_with_the_lock()
        yield from (itertools.count() if worker == 1 else range(1))

def die_when_done(collated=[]):  # after the last message of this worker is written
    spec = wl.worker_spec()
    class Queue(type(spec.index_queue)):
        def get(self, *args, **kwargs):
            message = super().get(*args, **kwargs)
            if isinstance(message, minidl.wire.messages.Sentinel):
                wl.die_with_the_lock()
            return message
    spec.index_queue.__class__ = Queue

def init(worker_id):
    if told and worker_id == 0:
        die_when_done()

iterator = iter(minidl.DataLoader(Stream(), batch_size=1, num_workers=2, worker_init_fn=init))
iterator._crew._forget_pids()  # a loader in a thread: no signal's handler speaks for the kernel
for attempt in range(2):
    try:
        for batch in iterator:
            pass
    except RuntimeError as error:
        print("heard:", str(error)[:22], "exit code -9" in str(error))
iterator.close()
print("exit codes", *(worker.exitcode for worker in iterator._workers))
"""


@pytest.mark.live
@pytest.mark.parametrize("how", ["at work", "told to leave"])
def test_a_worker_that_dies_with_the_queues_lock_hangs_nobody(how: str) -> None:
    """No result can come any more, not even of the others; whoever goes on after the error hears of it again."""
    done = wl.run(LOCKED, how)
    assert done.returncode == 0, done.stderr
    first, second, codes = done.stdout.splitlines()
    assert first == second == "heard: DataLoader worker (pid True"
    assert codes == "exit codes -9 0"


ORPHANS = """
import os, signal, struct, sys
import minidl, minidl.loader.worker, workloads as wl

minidl.loader.worker.MP_STATUS_CHECK_INTERVAL = 0.3
iterator = iter(minidl.DataLoader(wl.Numbers(100), batch_size=2, num_workers=2))
next(iterator)
for queue in iterator._index_queues:
    os.write(queue._writer.fileno(), struct.pack("!i", 1_000_000) + b"partial")
print(*(worker.pid for worker in iterator._workers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.live
def test_workers_leave_when_their_loader_is_killed_in_the_middle_of_a_task() -> None:
    """A worker keeps the writing end of its own queue open, so no end of file tells it."""
    done = wl.run(ORPHANS)
    assert done.returncode == -9, done.stderr
    wl.wait_until_gone([int(pid) for pid in done.stdout.split()])


# --- Descriptors ------------------------------------------------------------------------------------------------------
EXHAUSTED = """
import resource, tempfile
import minidl, workloads as wl

loader = minidl.DataLoader(wl.Tensors(400), batch_size=None, num_workers=1, collate_fn=lambda tensor: tensor.clone())
iterator = iter(loader)
kept = [next(iterator)]
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
tempfile.tempdir = None  # a program that has made no temporary file yet: it finds no folder for one now
try:
    for batch in iterator:
        kept.append(batch)
except RuntimeError as error:
    print(error)
assert len(kept) > 20
kept.clear()
iterator.close()
print("exit code", iterator._workers[0].exitcode)
"""


@pytest.mark.live
def test_exhausted_descriptors_name_the_remedies() -> None:
    done = wl.run(EXHAUSTED)
    assert done.returncode == 0, done.stderr
    assert "Too many open files" in done.stdout
    assert "`ulimit -n`" in done.stdout
    assert "torch.multiprocessing.set_sharing_strategy('file_system')" in done.stdout
    assert done.stdout.endswith("exit code 0\n")


@pytest.mark.live
@pytest.mark.parametrize("collate", [None, wl.not_shared], ids=["in collate", "in the feeder thread"])
def test_a_segment_that_cannot_be_sized_is_removed(collate: Any) -> None:
    """The leak check finds it otherwise."""
    options = {"collate_fn": collate, "worker_init_fn": wl.small_files}
    _, error = only_error(wl.Tensors(1, width=100_000), num_workers=1, **options)
    assert "unable to resize file </torch_" in str(error)


@pytest.mark.live
def test_a_worker_without_descriptors_names_the_remedies() -> None:
    dataset = wl.At(1, 0, wl.take_all_descriptors)
    number, error = only_error(dataset, num_workers=1, collate_fn=wl.not_shared)
    words = r"while it pickled a batch.*`ulimit -n`.*Task 0: its batch can't be sent"
    assert (number, type(error)) == (0, RuntimeError)
    assert re.search(words, str(error), re.DOTALL)


@pytest.mark.parametrize(("number", "named"), [(errno.EMFILE, True), (errno.ENFILE, True), (errno.EACCES, False)])
def test_only_a_lack_of_descriptors_is_named_as_one(number: int, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("rebuilding")
    assert with_remedy(error) is error

    def refuse(*_: Any) -> None:
        raise OSError(number, "no file")

    monkeypatch.setattr(os, "open", refuse)
    lack = with_remedy(error)
    assert (lack is not error, lack.__cause__) == ((True, error) if named else (False, None))
    assert lack is error or str(lack) == (  # torch's words
        "Too many open files. Communication with the workers is no longer possible. Please increase the limit using "
        "`ulimit -n` in the shell or change the sharing strategy by calling "
        "`torch.multiprocessing.set_sharing_strategy('file_system')` at the beginning of your code"
    )


def test_a_worker_that_has_not_begun_is_starting_since_its_board_was_made() -> None:
    """Not since the machine was."""
    before = time.monotonic_ns()
    place = ProgressBoard(2).read(1)
    assert place.stage is Stage.STARTING
    assert before <= place.since <= time.monotonic_ns()


def test_errors_end_with_their_page() -> None:
    assert str(LoaderHangError("no batch for 60 s")) == "no batch for 60 s (more: minidl help hang)"
    assert str(StateMismatchError("4 workers")) == "4 workers (more: minidl help resume)"
