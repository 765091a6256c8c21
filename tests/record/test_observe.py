"""`minidl.observe()`: torch's own loader does what it does without it, and everything that it shows is in the trace."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import own_iterators
import pytest
import torch
import torch.utils.data
import workloads as wl
from programs import python, write
from sizes import slow
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

import minidl
from minidl.check import check
from minidl.record import observe as module
from minidl.record import recorder
from minidl.record.observe import observed_iterators, shut_down_observed
from minidl.record.observed_channels import ResultsForLoader, ResultsForPinThread, joins_the_terminated
from minidl.record.observed_worker import Announcer
from minidl.tracefile import events
from minidl.tracefile.events import EVENTS, Ending, Outcome, Phase
from minidl.tracefile.format import TraceError
from minidl.tracefile.ranks import lacking
from minidl.tracefile.reader import Trace, read_trace
from minidl.wire.messages import Result

METHODS = ("fork", "spawn", "forkserver")

pytestmark = pytest.mark.live


def loader(dataset: Any, *, context: Any = None, **options: Any) -> DataLoader[Any]:
    """torch's loader, observed unless another context is given."""
    return DataLoader(dataset, num_workers=2, multiprocessing_context=context or minidl.observe("fork"), **options)


def clean(path: Path) -> Trace:
    """The trace, which breaks no rule."""
    trace = read_trace(path)
    assert not check(trace), "\n".join(map(str, check(trace)))
    return trace


def order(trace: Trace, number: int, *names: str) -> list[tuple[str, int]]:
    """The events with these names, of one loader, in order: name and task."""
    rows = trace.events[trace.events["loader"] == number]
    return [(EVENTS[int(r["code"])].name, int(r["task"])) for r in rows if EVENTS[int(r["code"])].name in names]


# --- Nothing changes --------------------------------------------------------------------------------------------------
class Unsure(wl.Numbers):
    """It fails to say whether it gives several samples at once."""

    @property
    def __getitems__(self) -> Any:
        raise RuntimeError("no idea")


class OpenedLate(wl.Numbers):
    """It gives several samples at once from when worker_init_fn has opened it; each says what it was asked with."""

    def __getattr__(self, name: str) -> Any:
        if name != "__getitems__":
            raise AttributeError(name)
        if "opened" not in self.__dict__:
            raise RuntimeError("not open yet")
        return lambda indices: [(type(indices).__name__, index) for index in indices]


def open_dataset(worker_id: int) -> None:
    torch.utils.data.get_worker_info().dataset.opened = True  # type: ignore[union-attr]


def program(context: Any) -> list[Any]:
    """What a run shows of itself: batches, errors with the tracebacks of the workers, warnings' places."""
    torch.manual_seed(5)
    seen: list[Any] = []
    for dataset, options in (
        (wl.Probe(7), {"shuffle": True, "batch_size": 2}),
        (wl.Failing(5, KeyError("no such key"), at=(1, 4)), {}),
        (wl.Numbers(6), {"batch_size": 2, "collate_fn": wl.failing_collate}),
        (wl.Numbers(3), {"worker_init_fn": wl.failing_init}),
        (Unsure(4), {"batch_size": 2}),
        (OpenedLate(4), {"batch_size": 2, "worker_init_fn": open_dataset, "collate_fn": wl.as_list}),
        (wl.Stream(5), {"batch_size": 2, "persistent_workers": True}),
    ):
        used = DataLoader(dataset, num_workers=2, multiprocessing_context=context, **options)
        iterator = iter(used)
        for _ in range(9):
            try:
                seen.append(next(iterator))
            except StopIteration:
                break
            except Exception as error:
                seen.append((type(error), str(error)))
                if options.get("worker_init_fn") is wl.failing_init and len(seen) % 2:
                    break
        seen.append([torch.rand(1).item()])
        if options.get("persistent_workers"):
            iterator._shutdown_workers()
    return seen


def test_batches_and_errors_are_those_without_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """To the letter, the workers' tracebacks included: no frame of ours is in them."""
    plain = repr(program("fork"))
    with minidl.trace(tmp_path / "t"):
        observed = repr(program(minidl.observe("fork")))
    assert observed == plain
    assert "failing_collate" in plain
    assert "[('list', 2), ('list', 3)]" in plain
    assert "not recorded" not in capfd.readouterr().err
    clean(tmp_path / "t")


def test_without_a_trace_the_context_is_the_plain_one() -> None:
    context = minidl.observe("fork")
    used = iter(loader(wl.Numbers(4), context=context))
    assert [type(used._worker_result_queue), type(used._workers[0]), type(used._workers_done_event)] == [
        multiprocessing.queues.Queue,
        multiprocessing.context.ForkProcess,
        multiprocessing.synchronize.Event,
    ]
    assert len(list(used)) == 4


@pytest.mark.parametrize("method", METHODS)
def test_the_context_passes_for_a_context(method: str) -> None:
    context = minidl.observe(method)
    assert context.get_start_method() == method
    assert context.get_context() is multiprocessing.get_context(method)
    assert pickle.loads(pickle.dumps(context)).get_start_method() == method
    assert repr(context) == f"minidl.observe({method!r})"
    assert context.Value("i", 3).value == 3


def test_a_context_of_the_programs_own_is_used() -> None:
    own = multiprocessing.get_context("fork")
    assert minidl.observe(own).get_context() is own
    with pytest.raises(ValueError, match="cannot find context for 'spoon'"):
        minidl.observe("spoon")


def test_other_users_of_the_context_get_plain_things(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        context = minidl.observe("fork")
        queue, event = context.Queue(), context.Event()
        process = context.Process(target=queue.put, args=(7,))
        process.start()
        assert queue.get(timeout=wl.BOUND) == 7
        process.join()
        assert not event.is_set()
        list(minidl.DataLoader(wl.Numbers(4), num_workers=1, multiprocessing_context=context))
        queue.close()
    trace = clean(tmp_path / "t")
    assert [facts.get("observed") for facts in trace.loaders.values()] == [None]


def test_a_torch_that_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any) -> None:
    monkeypatch.setattr(module, "_TAKEN", {"a_new_argument"})
    monkeypatch.setattr("minidl.record.harmless._said", set())
    with minidl.trace(tmp_path / "t"):
        for _ in range(2):
            assert len(list(loader(wl.Numbers(4)))) == 4
    assert capfd.readouterr().err.count("workers take no a_new_argument. The run goes on.") == 1
    assert len(read_trace(tmp_path / "t").events) == 0


# --- What is in the trace ---------------------------------------------------------------------------------------------
def test_the_table_says_of_every_event_how_torchs_loader_shows_it() -> None:
    for event in EVENTS.values():
        is_consumers = event.ours.startswith(("device.", "record."))
        assert sum(map(bool, (event.seen, event.derived, event.unseen))) == (not is_consumers), event


def test_a_batch_that_torch_loses_is_found_by_the_checker(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A batch that can't be pickled: torch's feeder thread says so, and drops it; the loader waits in vain."""
    with minidl.trace(tmp_path / "t"):
        used = iter(loader(wl.At(6, 1, wl.Unpicklable), timeout=1, collate_fn=wl.as_list))
        assert next(used) == [0]
        with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
            next(used)
        used._shutdown_workers()
    assert "TypeError: this object does not travel" in capfd.readouterr().err
    trace = read_trace(tmp_path / "t")
    assert {violation.rule for violation in check(trace)} == {"fifo"}
    pickled = trace.select("result_pickle", Phase.END)
    assert list(pickled[pickled["x"] == 0]["task"]) == [1]
    (lost,) = trace.select("task_error")
    assert (lost["task"], trace.text(lost)) == (1, "TypeError: this object does not travel")


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "said", "sample"),
    [
        (wl.Failing(4, ValueError("the fourth"), at=(3,)), None, "ValueError: the fourth", (1, 3)),
        (wl.Numbers(4), wl.failing_collate, "workloads.SimpleError: these two don't go together", (-1, -1)),
    ],
    ids=["of a sample", "of collation"],
)
def test_an_error_names_its_sample(
    tmp_path: Path, dataset: Any, collate_fn: Any, said: str, sample: tuple[int, int]
) -> None:
    """By its position in the batch and its index."""
    with minidl.trace(tmp_path / "t"), pytest.raises((ValueError, wl.SimpleError)):
        list(loader(dataset, batch_size=2, collate_fn=collate_fn))
    trace = clean(tmp_path / "t")
    (failed,) = trace.select("task_error")
    assert (trace.text(failed), failed["task"], failed["x"], failed["y"]) == (said, 1, *sample)


class LoadsOfItsOwn(torch.utils.data.IterableDataset[Any]):
    """Reads each of its epochs through a loader of its own, in the worker."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(wl.Numbers(4)))


def test_a_loader_inside_a_worker_makes_no_fetcher_of_the_worker(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        used = loader(LoadsOfItsOwn(), persistent_workers=True)
        assert [len(list(used)) for _ in range(2)] == [8, 8]
        used._iterator._shutdown_workers()  # type: ignore[union-attr]
    steps = order(clean(tmp_path / "t"), 1, "make_fetcher", "fetch")
    assert steps.count(("make_fetcher", -1)) == 2 * 2 * 2  # begins and ends, of two workers in two epochs


def test_an_iterator_that_outlives_its_trace(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        used = iter(loader(wl.Numbers(6)))
        next(used)
    assert len(list(used)) == 5
    clean(tmp_path / "t")


def test_a_directory_of_its_own(tmp_path: Path) -> None:
    used = loader(wl.Numbers(4), context=minidl.observe("fork", trace=tmp_path / "t"))
    try:
        assert [len(list(used)), len(list(used))] == [4, 4]
        assert recorder.active() is not None
    finally:
        recorder.stop()
    assert sorted(clean(tmp_path / "t").loaders) == [1, 2]
    with pytest.raises(TraceError, match="already holds a trace"):
        minidl.observe(trace=tmp_path / "t")


# --- Pinned memory ----------------------------------------------------------------------------------------------------
class PinnedAtTheEnd(wl.Unpinnable):
    """A batch whose pinning lasts until the iterator is shut down."""

    begun, done = threading.Event(), None

    def pin_memory(self) -> Any:
        self.begun.set()
        while self.done is None or not self.done.is_set():
            time.sleep(0.001)  # torch's pin thread polls so, too
        return self


def test_a_pin_that_the_shutdown_cuts_short_ends_with_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with minidl.trace(tmp_path / "t"), wl.pretended_device():
        iterator: Any = iter(loader(wl.Numbers(2), pin_memory=True, collate_fn=PinnedAtTheEnd))
        assert PinnedAtTheEnd.begun.wait(wl.BOUND)
        monkeypatch.setattr(PinnedAtTheEnd, "done", iterator._pin_memory_thread_done_event)
        iterator._shutdown_workers()
    trace = clean(tmp_path / "t")
    (begin,), (end,) = trace.select("pin", Phase.BEGIN), trace.select("pin", Phase.END)
    assert (end["tid"], end["task"]) == (begin["tid"], begin["task"])
    assert len(trace.select("ready_put")) == 0


def test_after_its_done_event_the_pin_thread_pins_nothing() -> None:
    done = threading.Event()
    emitted: list[Any] = []
    results: Any = object.__new__(ResultsForPinThread)
    results.shared = SimpleNamespace(
        loader_side=SimpleNamespace(pin_done=done), emit=lambda *row: emitted.append(row[0]), cpu=lambda: 0
    )
    results.pins(Result(0, 0, torch.zeros(1)))
    done.set()
    results.pins(Result(1, 0, torch.zeros(1)))
    assert emitted == [events.PIN[0]]


def test_a_pinned_iterator_takes_its_ready_queue_along(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        with wl.pretended_device(), minidl.trace(tmp_path / "t"):
            iterator: Any = iter(loader(wl.Numbers(4), pin_memory=True))
            ready = weakref.ref(iterator._data_queue)
            assert len(list(iterator)) == 4
            del iterator
            assert ready() is None
    finally:
        gc.enable()


def test_a_batch_that_cannot_be_pinned_begins_no_trace_that_has_ended(tmp_path: Path) -> None:
    with wl.pretended_device():
        with minidl.trace(tmp_path / "t"):
            iterator = iter(loader(wl.Numbers(12), pin_memory=True, collate_fn=wl.Unpinnable))
            with pytest.raises(ValueError, match="no room"):
                next(iterator)
        for _ in range(11):
            with pytest.raises(ValueError, match="no room"):
                next(iterator)
        assert recorder.active() is None
        assert next(iterator, None) is None


def test_batches_that_are_all_taken_end_no_epoch_that_is_not_asked_on(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        iterator = iter(loader(wl.Numbers(4)))
        assert len([next(iterator) for _ in range(4)]) == 4
        del iterator
    assert clean(tmp_path / "t").select("epoch", Phase.END)["z"].tolist() == [Ending.CLOSED]


def test_indices_are_announced_once() -> None:
    told: list[tuple[int, Any]] = []
    progress: Any = SimpleNamespace(sample=lambda position, index: told.append((position, index)))
    announcer = Announcer(progress, 0, True, wl.Numbers(9))
    assert announcer.announced([4]) == [4], "there is no fetcher yet"
    announcer.fetches = True
    indices = announcer.announced([7, 8])
    assert (list(indices), list(indices), told) == ([7, 8], [7, 8], [(0, 7), (1, 8)])


def test_a_sample_that_raises_stop_iteration_ends_no_epoch(tmp_path: Path) -> None:
    """torch raises it in the loop, and goes on if it is asked again."""
    with minidl.trace(tmp_path / "t"):
        iterator = iter(loader(wl.Failing(6, StopIteration("one"), at=(2,))))
        seen = [next(iterator, None) is not None for _ in range(7)]
        del iterator
    trace = clean(tmp_path / "t")
    assert seen == [True, True, False, True, True, True, False]
    assert trace.select("epoch", Phase.END)["z"].tolist() == [Ending.EXHAUSTED]
    assert trace.select("yield")["x"].tolist() == [Outcome.DATA] * 2 + [Outcome.ERROR] + [Outcome.DATA] * 3


# --- How it ends ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [loader, functools.partial(minidl.DataLoader, num_workers=2)], ids=["torch's", "ours"])
def test_nothing_is_kept_of_an_iterator(tmp_path: Path, kind: Callable[..., Any]) -> None:
    """What an iterator holds is let go with it, without the collector's help."""
    used = kind(wl.Tensors(4))
    with minidl.trace(tmp_path / "t"):
        list(used)
        gc.collect()
        gc.disable()
        try:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(4):
                list(used)
            deadline = time.monotonic() + 20  # a queue's feeder thread closes its end as it ends
            while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(os.listdir("/proc/self/fd")) <= before
        finally:
            gc.enable()


def test_an_iterator_in_a_cycle_is_ended_by_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may take the queues first: then torch waits in vain for its workers, and terminates them."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.3)
    with minidl.trace(tmp_path / "t"):
        used = iter(loader(wl.Tensors(12)))
        next(used)
        used.itself = used
        del used
        gc.collect()
    trace = clean(tmp_path / "t")
    assert len(trace.select("shutdown", Phase.END)) == 1
    assert list(trace.select("epoch", Phase.END)["z"]) == [Ending.CLOSED]


def test_a_death_that_is_heard_of_while_a_failed_get_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's death resets the connection of a get, and SIGCHLD follows at once: all of the get is in the trace."""

    def hear(signum: int, frame: Any) -> None:
        raise RuntimeError("a worker is dead")

    def reset(timeout: float) -> None:
        raise ConnectionResetError

    def emit(code: int, *row: int) -> None:
        emitted.append(code)
        if code == events.RESULT_GET[1]:
            signal.raise_signal(signal.SIGCHLD)

    emitted: list[Any] = []
    got_nothing: Any = lambda error: emitted.append(type(error))  # noqa: E731
    loader_side = SimpleNamespace(waits=lambda: (0, 0), got_nothing=got_nothing)
    results: Any = object.__new__(ResultsForLoader)
    results.shared = SimpleNamespace(loader=1, loader_side=loader_side, emit=emit, emit_pauses=lambda worker: None)
    results.worker_id = -1
    results.inner = SimpleNamespace(get=reset)
    monkeypatch.setattr(results, "_follow_pipe", lambda: None)
    before = signal.signal(signal.SIGCHLD, hear)
    try:
        with pytest.raises(RuntimeError, match="a worker is dead"):
            results.get(timeout=1)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert emitted == [*events.RESULT_GET, ConnectionResetError]
    assert signal.SIGCHLD not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def touch_and_hang(path: Path) -> None:
    path.touch()
    wl.hang()


def test_a_worker_that_is_terminated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.3)
    with minidl.trace(tmp_path / "t"):
        used = iter(loader(wl.At(4, 1, functools.partial(touch_and_hang, tmp_path / "hangs"))))
        next(used)
        while not (tmp_path / "hangs").exists():
            time.sleep(0.002)
        used._shutdown_workers()
    trace = clean(tmp_path / "t")
    assert list(trace.select("terminate")["worker"]) == [1]
    (left,) = trace.select("shutdown", Phase.END)["x"]
    assert left == 0 or not joins_the_terminated()  # then nobody has waited for it


def test_a_start_that_fails(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        with pytest.warns(UserWarning, match="Got pickle error"), pytest.raises(TypeError, match="does not travel"):
            iter(loader(wl.Numbers(3), context=minidl.observe("spawn"), collate_fn=wl.Unpicklable()))
        gc.collect()
    trace = clean(tmp_path / "t")
    assert len(trace.select("shutdown", Phase.END)) == 1
    assert len(trace.select("epoch")) == 0


SCRIPT = """
    import os, signal, sys
    import workloads as wl
    import minidl
    from torch.utils.data import DataLoader

    how, context = sys.argv[1], minidl.observe("fork") if os.environ.get("OBSERVED") else "fork"
    loader = DataLoader(wl.Tensors(400), num_workers=2, multiprocessing_context=context, persistent_workers=True)
    for number, batch in enumerate(loader):
        if number == 5 and how == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
        if number == 5 and how == "exit":
            sys.exit(3)
        if number == 5 and how == "killed":
            print("killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 5 and how == "error":
            raise ValueError("mine")
    print("done")
"""


@pytest.mark.parametrize("how", ["interrupted", "error", *slow("to the end", "exit", "killed")])
def test_programs_end_as_without_it(tmp_path: Path, how: str) -> None:
    script = textwrap.dedent(SCRIPT)
    plain = wl.run(script, how) if how != "killed" else subprocess.CompletedProcess([], -9, "killed\n", "")
    seen = wl.run(script, how, OBSERVED="1", MINIDL_TRACE=str(tmp_path / "t"))
    assert (seen.returncode, seen.stdout) == (plain.returncode, plain.stdout)
    last = [line for line in plain.stderr.splitlines() if line][-1:]
    assert [line for line in seen.stderr.splitlines() if line and "minidl: recording" not in line][-1:] == last
    trace = clean(tmp_path / "t")
    assert len(trace.select("yield")) >= 5


def test_a_loop_that_is_not_torchs_is_blamed_by_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    assert module.names_of(warned_at) is None  # a function that takes no worker's arguments
    assert "workers that run test_observe.warned_at take no auto_collation" in capfd.readouterr().err


class Lacking:
    """Stands for a loader, and has none of its attributes."""


def warned_at(make: Callable[[], Any], capfd: pytest.CaptureFixture[str]) -> tuple[list[Any], str]:
    """The files and lines of the warnings that making an iterator gives; and its error, with no word of minidl's."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
        try:
            make()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = ""
        gc.collect()
    capfd.readouterr()
    return [(one.filename, one.lineno, str(one.message)) for one in given], said


class OwnIterator(_BaseDataLoaderIter):
    """Its warnings point here."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)


class NeverMade(_MultiProcessingDataLoaderIter):
    def __del__(self) -> None: ...


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the warning is that there is no accelerator")
def test_a_warning_points_to_the_line_that_it_points_to_without_the_recording(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also an error is the one that torch's loader raises."""
    makers: tuple[Callable[[], Any], ...] = (
        lambda: iter(DataLoader(wl.Numbers(3), pin_memory=True)),
        lambda: iter(loader(wl.Numbers(3), context="fork", pin_memory=True)),
        lambda: iter(loader(wl.Numbers(3), context="spawn", collate_fn=wl.Unpicklable())),
        lambda: OwnIterator(DataLoader(wl.Numbers(3), pin_memory=True)),
        lambda: NeverMade(Lacking()),
        lambda: NeverMade(),
    )
    plain = [warned_at(make, capfd) for make in makers]
    with minidl.trace(tmp_path / "t"), observed_iterators():
        observed = [warned_at(make, capfd) for make in makers]
    assert observed == plain
    assert [len(warned) for warned, _ in plain] == [1, 1, 1, 1, 0, 0]
    assert plain[3][0][0][0] == __file__
    assert [bool(error) for _, error in plain] == [False, False, True, False, True, True]


def test_an_iterator_is_silent_in_a_process_that_has_inherited_it(tmp_path: Path) -> None:
    """A child of os.fork, and a worker of another loader, shut it down; the trace has its own process's shutdown."""

    def shut_down(*_: int) -> None:
        with contextlib.suppress(AssertionError):  # "can only join a child process"
            used._shutdown_workers()

    with minidl.trace(tmp_path / "t"), observed_iterators():
        used: Any = iter(DataLoader(wl.Numbers(4), num_workers=1, persistent_workers=True))
        assert len(list(used)) == 4
        child = os.fork()
        if child == 0:
            shut_down()
            shut_down_observed()
            os._exit(0)
        os.waitpid(child, 0)
        assert len(list(DataLoader(wl.Numbers(3), num_workers=1, worker_init_fn=shut_down))) == 3
        used._shutdown_workers()
    trace = clean(tmp_path / "t")
    begun = trace.select("shutdown", Phase.BEGIN)
    assert sorted(begun["loader"]) == sorted(set(trace.select("yield")["loader"]))
    assert set(begun["process"]) == set(trace.select("yield")["process"])


# --- Programs that nobody touches -------------------------------------------------------------------------------------
def test_every_loader_that_is_made_is_observed(tmp_path: Path) -> None:
    kinds = (_BaseDataLoaderIter, _MultiProcessingDataLoaderIter, DataLoader)
    before = [kind.__init__ for kind in kinds]
    with minidl.trace(tmp_path / "t"), observed_iterators():
        signature = inspect.signature(kinds[0].__init__)
        loader = DataLoader(wl.Numbers(4), num_workers=1)
        assert len(list(loader)) == 4
        assert loader.multiprocessing_context is None
        assert len(list(DataLoader(wl.Numbers(4), 2))) == 2
        assert len(list(minidl.DataLoader(wl.Numbers(4), 2))) == 2
        own = DataLoader(wl.Numbers(4), num_workers=1, multiprocessing_context="spawn")
        assert own.multiprocessing_context.get_start_method() == "spawn"
        assert len(list(own)) == 4
    assert [kind.__init__ for kind in kinds] == before
    assert signature == inspect.signature(before[0])
    trace = clean(tmp_path / "t")
    assert [facts.get("observed") for facts in trace.loaders.values()] == [True, True, None, True]
    made = [facts["made_at"].split(":") for facts in trace.loaders.values()]
    assert {name for name, _ in made} == {Path(__file__).name}
    assert len({line for _, line in made}) == 4
    assert trace.described("passed over") == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_subclass_with_an_iterator_of_its_own(tmp_path: Path, workers: int) -> None:
    """Its messages carry states, as torchdata's StatefulDataLoader's do."""
    with minidl.trace(tmp_path / "t"), observed_iterators():
        for dataset in (wl.Numbers(10), Stream(7)):
            batches = list(own_iterators.StatefulLoader(dataset, batch_size=2, num_workers=workers))
            assert sorted(torch.cat(batches).tolist()) == list(range(len(dataset)))
    trace = clean(tmp_path / "t")
    assert len(trace.loaders) == 2
    puts = trace.select("index_put")
    assert puts["x"][puts["loader"] == 1].tolist() == [2] * 5
    outcomes = trace.select("yield")["x"].tolist()
    assert outcomes == [Outcome.DATA] * len(outcomes)
    assert len(outcomes) == 5 + 4


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")
def test_a_loader_of_torchdata_that_is_resumed(tmp_path: Path) -> None:
    """Its first task goes to the worker behind the one that served last, and it counts the batches before."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    first, second = (stateful.StatefulDataLoader(wl.Numbers(20), batch_size=2, num_workers=3) for _ in range(2))
    with minidl.trace(tmp_path / "t"), observed_iterators():
        iterator = iter(first)
        seen = [next(iterator).tolist() for _ in range(4)]
        state = first.state_dict()
        iterator._shutdown_workers()
        second.load_state_dict(state)
        seen += [batch.tolist() for batch in second]
        assert len(list(second)) == 10
    assert seen == [[at, at + 1] for at in range(0, 20, 2)]
    trace = clean(tmp_path / "t")
    resumed = trace.select("resumed")
    assert resumed[["loader", "x", "y"]].tolist() == [(2, 4, 1)]
    assert trace.select("epoch", Phase.END)["y"].tolist() == [4, 6, 10]


class Stream(torch.utils.data.IterableDataset[int]):
    """0, 1, ..., dealt out to the workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        return iter(range(self.length) if info is None else range(info.id, self.length, info.num_workers))


def visits(lib: Any, dataset: Any, **options: Any) -> list[Any]:
    """What each next() of one epoch gives, and one after it; the errors as text."""
    found: list[Any] = []
    iterator = iter(lib.DataLoader(dataset, **options))
    while found[-2:] != ["the end"] * 2:
        try:
            found.append(next(iterator))
        except StopIteration:
            found.append("the end")
        except ValueError as error:
            found.append(str(error))
    return found


ALONE: dict[str, dict[str, Any]] = {
    "batches": {"dataset": wl.Numbers(5), "batch_size": 2, "collate_fn": wl.as_list},
    "samples": {"dataset": wl.Numbers(3), "batch_size": None},
    "a stream": {"dataset": Stream(5), "batch_size": 2, "collate_fn": wl.as_list},
    "an error": {"dataset": wl.Failing(4, ValueError("the third"), at=(2,)), "collate_fn": wl.as_list},
    "nothing": {"dataset": wl.Numbers(0)},
}


@pytest.mark.parametrize("name", ALONE)
def test_an_iterator_without_workers_is_recorded_as_minidls_but_for_its_samples(tmp_path: Path, name: str) -> None:
    plain = visits(torch.utils.data, **ALONE[name])
    for lib in (torch.utils.data, minidl):
        with minidl.trace(tmp_path / lib.__name__), observed_iterators():
            assert visits(lib, **ALONE[name]) == plain
    torchs, ours = (clean(tmp_path / lib.__name__) for lib in (torch.utils.data, minidl))
    names = {event.name for event in EVENTS.values()} - {"sample", "sample_index"}
    assert order(torchs, 1, *names) == order(ours, 1, *names)
    assert len(torchs.select("next", Phase.END)) == len(plain)
    assert torchs.select("yield")["x"].tolist() == ours.select("yield")["x"].tolist()


def test_an_iterator_without_workers_and_of_a_class_of_its_own_is_named(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"), observed_iterators():
        own_iterators.OwnSingle(DataLoader(wl.Numbers(4)))
    (passed,) = read_trace(tmp_path / "t").described("passed over")
    assert passed["iterator"] == "own_iterators.OwnSingle"


def test_a_loader_that_is_no_subclass(tmp_path: Path) -> None:
    """torch's iterator over a stand-in whose context can't be set, as fastai has it."""
    batches = [torch.full((2,), n) for n in range(6)]
    with minidl.trace(tmp_path / "t"), observed_iterators():
        for workers in (2, 0):
            assert [b.tolist() for b in own_iterators.FastLoader(batches, workers)] == [[n, n] for n in range(6)]
    trace = clean(tmp_path / "t")
    assert len(trace.loaders) == 2
    assert trace.select("yield")["x"].tolist() == [Outcome.DATA] * 12
    assert lacking(trace.manifest, trace.lines) == []


BROKEN = """
    import multiprocessing.process, sys, torch
    from torch.utils.data import DataLoader

    if __name__ == "__main__":
        multiprocessing.process.BaseProcess.terminate = lambda process: print("terminated", process)
        loader = DataLoader(torch.arange(100), num_workers=2, persistent_workers=sys.argv[1] == "persistent")
        for number, batch in enumerate(loader):
            if number == 3:
                raise ValueError("in the loop")
"""


@pytest.mark.parametrize("workers", ["persistent", *slow("not persistent")])
def test_run_ends_the_workers_after_an_exception_in_the_loop(tmp_path: Path, workers: str) -> None:
    """They get their sentinels: nobody waits for them in vain, and terminates them."""
    write(tmp_path / "train.py", BROKEN)
    seen = python("-m", "minidl", "run", "--observe", "--trace", "t", "train.py", workers, cwd=tmp_path)
    assert (seen.returncode, seen.stdout) == (1, "")
    assert "ValueError: in the loop" in seen.stderr
    trace = clean(tmp_path / "t")
    assert sorted(trace.select("worker_exit")["worker"]) == [0, 1]
    assert len(trace.select("terminate")) == 0


def kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    time.sleep(wl.BOUND)  # SIGCHLD's error ends it


def test_a_death_that_is_heard_of_in_the_users_code(tmp_path: Path) -> None:
    """torch's handler raises there, and no get sees it."""
    with minidl.trace(tmp_path / "t"):
        used = iter(loader(wl.Gate(6, tmp_path / "never", at=4)))
        for _ in range(4):
            next(used)
        pid = used._workers[0].pid
        with pytest.raises(RuntimeError, match=f"worker \\(pid {pid}\\) is killed by signal"):
            kill_and_wait(pid)
        del used
        gc.collect()
    trace = clean(tmp_path / "t")
    assert (0, -signal.SIGKILL) in [(row["worker"], row["y"]) for row in trace.select("worker_gone")]
