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
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.utils.data
import workloads as wl

import minidl
from minidl.wire import errors
from minidl.wire.errors import ExceptionWrapper, LoaderHangError, RemoteTracebackError, StateMismatchError, with_remedy


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
    "shuffled sample": (
        {"dataset": wl.Failing(12, wl.SimpleError("here"), at=(6,)), "sampler": [9, 8, 7, 6, 5], "batch_size": 3},
        "Task 1 of worker 1: sample index 6 (place 1 of 2).",
    ),
    "whole batch": (
        {"dataset": wl.FailingBatch(2)},
        "Task 0 of worker 0: its whole batch of 2 (__getitems__).",
    ),
    "stream": (
        {"dataset": wl.FailingStream(4, "next"), "batch_size": 4, "num_workers": 1},
        "Task 0 of worker 0: a sample (place 3 of 4).",
    ),
}
"""What fails, and the last line of its error; `test_progress` has all the words."""


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
@pytest.mark.live
@pytest.mark.parametrize("error", [wl.TwoArgumentsError(7, "because"), wl.UnpicklableError(7, "because")], ids=repr)
def test_the_type_is_kept_where_it_can_be_and_the_words_always(error: Exception) -> None:
    """Where the text alone makes the type, it is torch's: see `test_iterators`."""
    _, raised = only_error(wl.Failing(8, error, at=(2,)))
    if isinstance(error, wl.TwoArgumentsError):
        assert isinstance(raised, wl.TwoArgumentsError)
        assert (raised.code, raised.reason) == (7, "because")
    else:
        assert type(raised) is RuntimeError
    assert re.fullmatch(
        rf"Caught {type(error).__name__} in DataLoader worker process 1\.\nOriginal Traceback.*7.*because.*\n"
        r"Task 1 of worker 1: sample index 2 \(place 1 of 2\)\.",
        str(raised.__cause__ or raised),
        re.DOTALL,
    )


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
LOST: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a batch that cannot be sent": (
        {"dataset": wl.At(8, 2, wl.Unpicklable), "collate_fn": wl.as_list},
        TypeError,
        r"in DataLoader worker process 1 while it pickled a batch\..*this object does not travel"
        r".*Task 1: its batch can't be sent between processes\.",
    ),
    "a batch that cannot be rebuilt": (
        {"dataset": wl.At(8, 2, wl.Unbuildable), "collate_fn": wl.as_list},
        ValueError,
        r"in the loader while it rebuilt a batch\..*this object does not arrive.*Task 1 of worker 1\.",
    ),
    "indices that cannot be sent": (
        {"dataset": wl.Numbers(9), "sampler": [0, wl.Unpicklable(), 2, 3], "batch_size": 1},
        TypeError,
        r"in the loader while it pickled a task's indices\..*Task 1: its batch can't be sent between processes\.",
    ),
    "indices that cannot be rebuilt": (
        {"dataset": wl.Numbers(9), "sampler": [0, wl.Unbuildable(), 2, 3], "batch_size": 1},
        ValueError,
        r"in DataLoader worker process 1 while it unpickled a task's indices\..*Task 1\.",
    ),
}


@pytest.mark.live
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("case", LOST)
def test_what_cannot_travel_is_an_error_of_its_task(
    case: str, pin_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    options, kind, words = LOST[case]
    number, error = only_error(**options, pin_memory=pin_memory)
    assert (number, type(error)) == (1, kind)
    assert re.fullmatch(f"Caught {kind.__name__} {words}", str(error), re.DOTALL)


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
def test_a_timeout_also_ends_the_wait_for_the_memory_of_a_worker_that_is_stopped() -> None:
    iterator: Any = iter(minidl.DataLoader(wl.Tensors(4), batch_size=2, num_workers=1, timeout=1))
    assert iterator._worker_result_queue._reader.poll(20)
    worker = iterator._workers[0]
    os.kill(worker.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)  # all its threads: one hands over the memory
    words = rf"timed out after 1 seconds: the message of task 0 is here, but worker 0 \(pid {worker.pid}, alive\)"
    with pytest.raises(RuntimeError, match=words):
        next(iterator)
    os.kill(worker.pid, signal.SIGCONT)
    assert len(next(iterator)) == 2  # the epoch goes on with task 1
    iterator.close()


@pytest.fixture
def polling(no_sigchld: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead worker is found by looking, every 0.3 s, and not by SIGCHLD."""
    wl.impatient(monkeypatch)


@pytest.mark.live
@pytest.mark.usefixtures("polling")
def test_a_dead_worker_is_named_and_the_others_batches_still_come(tmp_path: Path) -> None:
    """It dies in task 12. That is given up, and so is task 14, which it had been sent; the rest goes to worker 1."""
    dataset = wl.Gate(40, tmp_path / "die", at=25, thing=wl.kill_myself)
    iterator: Any = iter(minidl.DataLoader(dataset, batch_size=2, num_workers=2))
    assert [next(iterator).tolist()[0] for _ in range(12)] == list(range(0, 24, 2))
    (tmp_path / "die").touch()
    words = (
        f"DataLoader worker (pid(s) {iterator._workers[0].pid}) exited unexpectedly "
        "(worker 0: exit code -9, last in task 12, sample index 25 (place 2 of 2)) (more: minidl help hang)"
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


# --- A message, a lock, a program that ends in the middle -------------------------------------------------------------
TORN = """
import threading, warnings
import minidl, workloads as wl
import minidl.loader.driver, minidl.loader.pin_memory

minidl.loader.driver.MP_STATUS_CHECK_INTERVAL = minidl.loader.pin_memory.MP_STATUS_CHECK_INTERVAL = 0.3

def consume(iterator):
    try:
        for batch in iterator:
            pass
    except RuntimeError as error:
        print("heard:", str(error)[:22])

for how in ("plain", "pinned", "in a thread"):
    dataset = wl.At(40, 25, wl.die_in_the_middle_of_a_message)
    loader = minidl.DataLoader(dataset, 2, num_workers=1, pin_memory=how == "pinned",
                               collate_fn=list)  # no descriptors, whose passing tells of the death
    iterator = iter(loader)
    if how == "in a thread":  # which no signal's handler can wake
        iterator._crew._forget_pids()
        consumer = threading.Thread(target=consume, args=(iterator,))
        consumer.start()
        consumer.join()
    else:
        consume(iterator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iterator.close()
    print("said:", [str(w.message)[:50] for w in caught], iterator._workers[0].exitcode)
"""


@pytest.mark.live
def test_a_message_torn_by_a_kill_hangs_nobody() -> None:
    """Its rest never comes, and no reader waits for it longer than its timeout."""
    done = wl.run(TORN, MINIDL_SIMULATE_DEVICE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["heard: DataLoader worker (pid", "said: [] -9"] * 3


LOCKED = """
import itertools, sys
import minidl, workloads as wl
import minidl.loader.driver, minidl.loader.pin_memory, minidl.loader.worker

for module in (minidl.loader.driver, minidl.loader.pin_memory, minidl.loader.worker):
    module.MP_STATUS_CHECK_INTERVAL = 0.3

class Stream(minidl.IterableDataset):
    def __iter__(self):
        worker = minidl.get_worker_info().id
        if worker == 0 and how == "at work":
            yield from range(3)
            wl.die_with_the_lock()
        yield from (itertools.count() if worker == 1 else range(1))

def init(worker_id):
    if how == "at work" or worker_id:
        return
    queue = wl.worker_spec().index_queue
    class Queue(type(queue)):
        def get(self, *args, **kwargs):
            message = super().get(*args, **kwargs)
            if isinstance(message, minidl.wire.messages.Sentinel):  # all that this worker sends is written
                wl.die_with_the_lock()
            return message
    queue.__class__ = Queue

for how, pinned in (("at work", False), ("told to leave", False), ("told to leave", True)):
    iterator = iter(minidl.DataLoader(Stream(), 1, num_workers=2, worker_init_fn=init, pin_memory=pinned))
    iterator._crew._forget_pids()  # as in a thread: no signal's handler speaks for the kernel
    for attempt in range(2):
        try:
            for batch in iterator:
                pass
        except RuntimeError as error:
            print("heard:", str(error)[:22], "worker 0: exit code -9" in str(error))
    iterator.close()
    print("exit codes", *(worker.exitcode for worker in iterator._workers))
"""


@pytest.mark.live
def test_a_worker_that_dies_with_the_queues_lock_hangs_nobody() -> None:
    """No result can come any more, not even of the others; whoever goes on after the error hears of it again."""
    done = wl.run(LOCKED, MINIDL_SIMULATE_DEVICE="1")
    assert done.returncode == 0, done.stderr
    heard = "heard: DataLoader worker (pid True"
    assert done.stdout.splitlines() == [heard, heard, "exit codes -9 0"] * 3


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
    _, error = only_error(wl.At(1, 0, wl.take_all_descriptors), num_workers=1, collate_fn=wl.not_shared)
    assert type(error) is RuntimeError
    assert re.search(r"while it pickled a batch.*`ulimit -n`.*Task 0: its batch can't be sent", str(error), re.DOTALL)


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


def test_errors_end_with_their_page() -> None:
    assert str(LoaderHangError("no batch for 60 s")) == "no batch for 60 s (more: minidl help hang)"
    assert str(StateMismatchError("4 workers")) == "4 workers (more: minidl help resume)"
