"""The same program on torch's DataLoader and on ours: batches, order, errors, warnings, generators, seeds."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext
from types import SimpleNamespace
from typing import Any

import exceptions_everywhere
import numpy as np
import pytest
import torch
import torch.multiprocessing
import torch.utils.data
import torch.utils.data.distributed
import workloads as wl
from differential import (
    OPTIONS,
    TORCH,
    agree,
    allowed,
    epochs,
    grid,
    observe,
    steps,
)
from hypothesis import example, given
from hypothesis import strategies as st
from sizes import slow
from typing_extensions import Self

import minidl
from minidl.loader import iterators, liveness
from minidl.loader.driver import MP_STATUS_CHECK_INTERVAL, Get
from minidl.loader.ports import FoundAlive, FoundDead, Note, Opened, Ports, TimedOut, Transport
from minidl.loader.protocol import ProtocolError
from minidl.wire import tensors
from minidl.wire.errors import ExceptionWrapper
from minidl.wire.messages import RebuildFailure, Result, ResumeIteration, Sentinel, Task
from minidl.wire.tensors import NotHandedOverError


# --- The grid ---------------------------------------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.parametrize(
    ("together", "part"),
    [(2, 0), (2, 1), *slow((3, 0), (3, 1), (3, 2), (3, 3))],
)
def test_worker_processes(together: int, part: int) -> None:
    for case in grid(together)[part :: 2 * together - 2]:
        agree(lambda lib, case=case: epochs(lib, case), what=case, threads=True)


@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}).filter(allowed))
@example({name: values[-1] for name, values in OPTIONS.items()} | {"dataset": "stream", "shuffle": False})
def test_one_process(case: dict[str, Any]) -> None:
    case |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    agree(lambda lib: epochs(lib, case), what=case)


# --- Samplers ---------------------------------------------------------------------------------------------------------
def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(42)


KEYED = {"cat": 1, "dog": 2, "emu": 3}
SAMPLING: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sequential": lambda lib: {"batch_size": 3},
    "shuffle": lambda lib: {"shuffle": True},
    "shuffle with a generator": lambda lib: {"shuffle": True, "generator": seeded(), "batch_size": 2},
    "list": lambda lib: {"sampler": [5, 0, 3, 3], "batch_size": 3},
    "numpy": lambda lib: {"sampler": np.array([5, 0, 3]), "batch_size": 2},
    "subset": lambda lib: {"sampler": lib.SubsetRandomSampler([6, 2, 4], generator=seeded()), "batch_size": 2},
    "weighted": lambda lib: {"sampler": lib.WeightedRandomSampler([1, 0, 5, 0, 2], 6), "batch_size": 2},
    "replacement": lambda lib: {"sampler": lib.RandomSampler(range(7), replacement=True, num_samples=9)},
    "batches": lambda lib: {"batch_sampler": [[0], [1, 2], [], [3, 4, 5]], "collate_fn": wl.as_list},
    "batch sampler": lambda lib: {"batch_sampler": lib.BatchSampler(lib.RandomSampler(range(7)), 3, True)},
    "batches as samples": lambda lib: {"batch_size": None, "sampler": [[0, 1], [2, 6]]},
    "used up after one epoch": lambda lib: {"sampler": iter([4, 5, 6])},
    "two replicas": lambda lib: {"sampler": distributed(lib)(wl.Numbers(7), num_replicas=2, rank=1, seed=5)},
    "empty": lambda lib: {"sampler": []},
    "keys that are no integers": lambda lib: {"dataset": KEYED, "sampler": list(KEYED), "batch_size": 2},
    "permuted by iter()": lambda lib: {"sampler": Permuted(), "batch_size": None},
}


class Permuted:
    """Draws when it is asked for its iterator: with workers, twice an epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(7).tolist())


def distributed(lib: Any) -> Any:
    return getattr(lib, "DistributedSampler", None) or lib.distributed.DistributedSampler


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.live)])
@pytest.mark.parametrize("name", SAMPLING)
def test_samplers(name: str, num_workers: int) -> None:
    def program(lib: Any, samplers: Any = None) -> Any:
        options = {"dataset": wl.Probe(7), "num_workers": num_workers} | SAMPLING[name](samplers or lib)
        loader = lib.DataLoader(**options)
        return [steps(loader), steps(loader), length(loader)]

    agree(program, threads=num_workers > 0)
    if num_workers == 0:
        agree(program, lambda lib: program(lib, TORCH), "torch's sampler in our loader")
        agree(program, lambda lib: program(TORCH, minidl), "our sampler in torch's loader")


def length(loader: Any) -> Any:
    try:
        return len(loader)
    except TypeError as error:
        return str(error)


# --- Batches of every kind --------------------------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods(method: str) -> None:
    """torch's forked workers say what ours must say however they were started."""

    def program(lib: Any, method: str) -> Any:
        loader = lib.DataLoader(
            wl.Probe(5), 2, num_workers=2, persistent_workers=True, shuffle=True, worker_init_fn=wl.draw_once,
            multiprocessing_context=method,
        )  # fmt: skip
        seen = [steps(loader), steps(loader), loader.multiprocessing_context.get_start_method() == method]
        loader._iterator._shutdown_workers()
        return seen

    agree(lambda lib: program(lib, "fork"), lambda lib: program(lib, method))


# --- Iterating, and not to the end ------------------------------------------------------------------------------------
NONE_OR_TWO = [
    (0, False),
    pytest.param(2, False, marks=pytest.mark.live),
    pytest.param(2, True, marks=pytest.mark.live),
]


@pytest.mark.parametrize(
    ("num_workers", "persistent"),
    NONE_OR_TWO,
)
def test_epochs_that_are_broken_off(num_workers: int, persistent: bool) -> None:
    """What was prefetched is dropped, and the next epoch begins at its beginning, with a permutation of its own."""

    def program(lib: Any) -> Any:
        loader = lib.DataLoader(
            wl.Probe(8), 2, shuffle=True, num_workers=num_workers, persistent_workers=persistent
        )  # fmt: skip
        seen = [list(itertools.islice(loader, taken)) for taken in (2, 0, 1, 9)]
        iterator = iter(loader)
        seen.append([next(iterator), iter(iterator) is iterator, len(iterator)])
        if persistent:
            iterator._shutdown_workers()
        return seen

    agree(program, threads=num_workers > 0)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.live)])
def test_two_iterators_of_one_loader(num_workers: int) -> None:
    def program(lib: Any) -> Any:
        return list(zip(*[lib.DataLoader(wl.Probe(4), shuffle=True, num_workers=num_workers)] * 2, strict=True))

    agree(program, threads=num_workers > 0)


@pytest.mark.parametrize(
    ("num_workers", "persistent"),
    NONE_OR_TWO,
)
def test_streams_longer_than_they_say(num_workers: int, persistent: bool) -> None:
    """The warning comes with each batch past the length, in every epoch, and only where the length was asked for."""

    def program(lib: Any, ask: bool, batch_size: int | None) -> Any:
        loader = lib.DataLoader(
            wl.SizedStream(7, 4), batch_size=batch_size, num_workers=num_workers, persistent_workers=persistent
        )
        seen = [len(loader) if ask else None, steps(loader), steps(loader)]
        if persistent:
            loader._iterator._shutdown_workers()
        return seen

    for batch_size in (None, 1):
        ours = observe(lambda lib, b=batch_size: program(lib, True, b), minidl)
        assert [place for _, _, place in ours["warnings"]] == ["user"] * 6
        agree(lambda lib, b=batch_size: program(lib, True, b))
        assert not observe(lambda lib, b=batch_size: program(lib, False, b), minidl)["warnings"]


def test_the_warning_of_a_longer_stream_names_the_programs_line() -> None:
    loader = minidl.DataLoader(wl.SizedStream(2, 1), batch_size=None)
    assert len(loader) == 1
    with pytest.warns(UserWarning, match="samples have been fetched") as caught:
        list(loader)
    assert caught[0].filename == __file__


def test_lengths() -> None:
    def program(lib: Any) -> Any:
        cases = itertools.product([wl.Numbers(7), wl.SizedStream(7, 7)], [None, 1, 3, 7, 8], [False, True])
        sized = [len(lib.DataLoader(*case[:2], drop_last=case[2])) for case in cases if case[1:] != (None, True)]
        return sized, length(lib.DataLoader(wl.Stream(7))), length(lib.DataLoader({1: 2}, sampler=iter([1])))

    agree(program)


# --- Datasets of the other library ------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.live)])
def test_datasets_and_collate_of_the_other_library(num_workers: int) -> None:
    def program(lib: Any, dataset: Any, collate: Any = None) -> Any:
        return steps(lib.DataLoader(dataset, batch_size=2, num_workers=num_workers, collate_fn=collate))

    theirs = torch.utils.data.default_collate
    for dataset in (wl.OurNumbers(), wl.OurStream(7)):
        agree(lambda lib, d=dataset: program(lib, d), what="our dataset", threads=num_workers > 0)
    agree(lambda lib: program(lib, wl.Stream(7)), lambda lib: program(lib, wl.OurStream(7)), "our sharding")
    agree(lambda lib: program(lib, wl.Mixed(5)), lambda lib: program(lib, wl.Mixed(5), theirs), "torch's collate")
    agree(
        lambda lib: program(lib, wl.Mixed(5)),
        lambda lib: program(TORCH, wl.Mixed(5), minidl.default_collate),
        "our collate in torch's loader",
    )
    built = torch.utils.data.ConcatDataset([wl.Probe(2), minidl.Subset(wl.Probe(9), [8, 3])])
    agree(lambda lib: program(lib, built), what="a mixture")


# --- Errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.live)])
@pytest.mark.parametrize("name", wl.ERRORS)
def test_errors_of_every_type(name: str, num_workers: int) -> None:
    """Type and first line are torch's; the batches after the error still come."""
    dataset = wl.Failing(6, wl.ERRORS[name])

    def program(lib: Any) -> Any:
        return steps(lib.DataLoader(dataset, batch_size=2, num_workers=num_workers))

    seen = agree(program, threads=num_workers > 0)
    assert len(seen) == 3 or name == "stop"


PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    "sample": lambda: {"dataset": wl.Failing(6, wl.SimpleError("one"), at=(0, 5))},
    "unbatched sample": lambda: {"dataset": wl.Failing(6, wl.SimpleError("one")), "batch_size": None},
    "batch": lambda: {"dataset": wl.FailingBatch(4)},
    "collate": lambda: {"dataset": wl.Numbers(6), "collate_fn": wl.failing_collate},
    "default collate": lambda: {"dataset": [1, "text", 2, 3, object(), 4]},
    "unequal tensors": lambda: {"dataset": [torch.zeros(2), torch.zeros(3), torch.zeros(1), torch.ones(1)]},
    "stream": lambda: {"dataset": wl.FailingStream(4, "next"), "batch_size": 1},
    "sampler": lambda: {"dataset": wl.Numbers(9), "sampler": wl.FailingSampler([0, 1, 2])},
    "sampler at once": lambda: {"dataset": wl.Numbers(9), "sampler": wl.FailingSampler([])},
    "sampler's iterator": lambda: {"dataset": wl.Numbers(9), "sampler": wl.NotIterable()},
    "batch sampler": lambda: {
        "dataset": wl.Numbers(99), "batch_size": 1,
        "batch_sampler": wl.FailingSampler([[n] for n in range(9)], KeyError),
    },
    "index beyond the end": lambda: {"dataset": [1, 2, 3], "sampler": [0, 1, 2, 3]},
    "batch sampler of integers": lambda: {"dataset": wl.Numbers(9), "batch_size": 1, "batch_sampler": [1, 2]},
}  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.live)])
@pytest.mark.parametrize("place", PLACES)
def test_errors_in_every_place(place: str, num_workers: int) -> None:
    def program(lib: Any) -> Any:
        return steps(lib.DataLoader(**({"batch_size": 2, "num_workers": num_workers} | PLACES[place]())), limit=12)

    seen = agree(program, threads=num_workers > 0)
    assert any(isinstance(step, tuple) for step in seen)


def test_a_stop_iteration_of_the_dataset_ends_a_loop_and_the_next_goes_on_after_it() -> None:
    def program(lib: Any) -> Any:
        iterator = iter(lib.DataLoader(wl.Failing(6, StopIteration(), at=(2,)), batch_size=None))
        return [list(iterator) for _ in range(3)]

    assert agree(program) == [[0, 1], [3, 4, 5], []]


@pytest.mark.live
def test_errors_before_the_first_task() -> None:
    """Of a worker's first task; what comes after it is said more kindly by us, and checked elsewhere."""
    for case in (
        {"dataset": wl.Numbers(6), "worker_init_fn": wl.failing_init},
        {"dataset": wl.FailingStream(6, "iter")},
    ):
        seen = agree(lambda lib, case=case: steps(lib.DataLoader(num_workers=2, **case), limit=2), threads=True)
        assert [kind for kind, _ in seen] == [wl.SimpleError, wl.SimpleError]
    agree(lambda lib: steps(lib.DataLoader(wl.FailingStream(6, "iter"))))


@pytest.mark.live
def test_an_error_is_raised_at_its_turn_and_iteration_goes_on_after_it() -> None:
    dataset = wl.Failing(8, wl.SimpleError("again"), at=(0, 1, 5))

    def program(lib: Any) -> Any:
        loader = lib.DataLoader(dataset, num_workers=2, persistent_workers=True)
        seen = [steps(loader), steps(loader)]
        loader._iterator._shutdown_workers()
        return seen

    seen = agree(program, threads=True)
    assert [place for place, step in enumerate(seen[1]) if isinstance(step, tuple)] == [0, 1, 5]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.live)])
def test_generators_are_drawn_from_once_an_epoch(num_workers: int) -> None:
    """A loader with a generator of its own leaves the global one alone; without one it draws a seed from it."""

    def states(lib: Any, generator: torch.Generator | None) -> Any:
        loader = lib.DataLoader(wl.Numbers(3), num_workers=num_workers, generator=generator)
        seen = [torch.get_rng_state(), *(torch.get_rng_state() for _ in loader)]
        return seen, None if generator is None else generator.get_state()

    drawn, _ = agree(lambda lib: states(lib, None))
    assert [torch.equal(drawn[0], state) for state in drawn] == [True, False, False, False]
    untouched, _ = agree(lambda lib: states(lib, seeded()))
    assert all(torch.equal(untouched[0], state) for state in untouched)


def test_the_comparison_can_fail() -> None:
    def shuffled(lib: Any) -> Iterator[Any]:
        return steps(lib.DataLoader(wl.Probe(7), shuffle=lib is minidl))  # type: ignore[return-value]

    with pytest.raises(AssertionError, match="differ in"):
        agree(shuffled)


# --- Iterators that refuse --------------------------------------------------------------------------------------------
def test_each_iterator_checks_its_own_options() -> None:
    loader = minidl.DataLoader(wl.Numbers(3), num_workers=1)
    words = "^_SingleProcessDataLoaderIter requires timeout == 0 and num_workers == 0$"
    with pytest.raises(AssertionError, match=words):
        iterators._SingleProcessDataLoaderIter(loader)
    loader.num_workers = 0
    with pytest.raises(AssertionError, match="must be greater than 0"):
        iterators._MultiProcessingDataLoaderIter(loader)
    with pytest.raises(NotImplementedError):
        iterators._BaseDataLoaderIter._next_data(None)


class Forked(ForkContext):
    """Makes what fork needs, and says that it starts processes by another method."""

    def __init__(self, method: str) -> None:
        self.method = method

    def get_start_method(self, allow_none: bool = False) -> str:
        return self.method


class Unmoved(Ports):
    """Ports of workers that never run; `asked`: for which queues, done events and workers, in order."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.specs: list[Any] = []
        self.notes: list[Note] = []
        self.note = self.notes.append  # type: ignore[method-assign]

    def queue(self, which: Any, queue: Any, worker_id: int = -1) -> Any:
        self.asked.append((which, worker_id))
        return queue

    def done_event(self, which: Any, event: Any) -> Any:
        self.asked.append(which)
        return super().done_event(which, event)

    def worker(self, context: Any, worker_id: int, target: Any, args: Any) -> Any:
        self.asked.append(worker_id)
        self.specs += args
        return Process(worker_id)


class Process:
    """A worker that does nothing, and lives until it is terminated."""

    exitcode: int | None = None

    def __init__(self, worker_id: int) -> None:
        self.pid = (1 << 30) + worker_id
        self.joined: list[float] = []

    def start(self) -> None: ...

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float) -> None:
        self.joined.append(timeout)

    def terminate(self) -> None:
        self.exitcode = -15


class Watched(Transport):
    """`given`: what a result queue is made with."""

    def index_queue(self, context: Any) -> Any:
        return super().index_queue(FORK)

    def result_queue(self, context: Any, *given: Any) -> Any:
        self.given = given
        return super().result_queue(FORK, *given)


FORK = torch.multiprocessing.get_context("fork")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("options", [
    {"dataset": wl.Numbers(9), "drop_last": True, "persistent_workers": True, "pin_memory": True},
    {"dataset": wl.Stream(9), "timeout": 7.0, "in_order": False},
    {"dataset": wl.Numbers(9), "batch_size": None},
])  # fmt: skip
def test_what_workers_are_started_with(options: dict[str, Any], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, transport, trackers = Unmoved(), Watched(), list[None]()
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    monkeypatch.setattr(iterators, "start_tracker_apart", partial(trackers.append, None))
    monkeypatch.setattr(minidl.loader.ports, "_factory", lambda: seen)
    users = {"worker_init_fn": print, "collate_fn": list}
    loader: Any = minidl.DataLoader(num_workers=2, multiprocessing_context=Forked(method), **users, **options)
    loader._new_transport = lambda: transport
    with iter(loader) as iterator:
        done = iterator._workers_done_event
        pinned = ["pin thread", ("ready", -1)] if loader.pin_memory else []
        assert seen.asked == ["workers", ("result", -1), ("index", 0), 0, ("index", 1), 1, *pinned]
        assert transport.given == (2, done, seen)
        assert (iterator._crew.named, len(trackers)) == (method != "fork", method != "fork")
        assert (iterator._dispatcher.in_order, iterator._crew.closes_at_exit) == (loader.in_order, loader.pin_memory)
        assert seen.notes == [Opened(iterator, loader)]
        assert iterator._driver.persistent == loader.persistent_workers
        assert iterator._driver.get == Get(loader.timeout or MP_STATUS_CHECK_INTERVAL)
        assert iterator._record.base_seed == iterator._base_seed
        for number, spec in enumerate(seen.specs):
            expected = {
                "worker_id": number,
                "num_workers": 2,
                "manager_pid": None if method == "forkserver" else os.getpid(),
                "dataset_kind": loader._dataset_kind,
                "auto_collation": loader._auto_collation,
                "drop_last": loader.drop_last,
                "base_seed": iterator._base_seed,
                "index_queue": iterator._index_queues[number],
                "done_event": done,
                "board": iterator._board,
                "ports": seen,
            }
            assert {name: getattr(spec, name) for name in expected} == expected
            assert spec.users.unpack() == (loader.dataset, list, print)


def test_arguments_that_can_not_be_pickled_warn_where_torch_warns() -> None:
    """In the loader's method that makes the iterator."""

    def start() -> None:
        raise AttributeError("can't pickle a lambda")

    def in_start_workers() -> None:
        iterators._start(SimpleNamespace(start=start))

    def in_init() -> None:
        in_start_workers()

    def in_make_iterator() -> None:
        in_init()

    words = "^Got pickle error when attempting to start a worker Process"
    with pytest.raises(AttributeError, match="a lambda"), pytest.warns(UserWarning, match=words) as caught:
        in_make_iterator()
    assert caught[0].lineno == in_make_iterator.__code__.co_firstlineno + 1


def test_without_workers_batches_are_pinned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    samples = [torch.ones(2), torch.zeros(2)]
    pinned = list(minidl.DataLoader(samples, batch_size=None, pin_memory=True))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in pinned] == [sample.tolist() for sample in samples]
    assert [batch.data_ptr() for batch in pinned] != [sample.data_ptr() for sample in samples]


def test_what_the_transport_has_locked_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Locked(Transport):
        page_locked = True

    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    sample = torch.ones(2)
    loader: Any = minidl.DataLoader([sample], batch_size=None, pin_memory=True)  # type: ignore[arg-type]
    loader._new_transport = Locked
    assert next(iter(loader)).data_ptr() == sample.data_ptr()


def test_on_mps_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterators, "accelerator_type", lambda: "mps")
    with pytest.warns(UserWarning, match="not supported on MPS now"):
        (iterator,) = (iter(minidl.DataLoader(wl.Numbers(1), pin_memory=True)) for _ in range(1))
    assert not iterator._pin_memory


# --- Exceptions of signals' handlers ----------------------------------------------------------------------------------
@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers that die are found dead soon; there is an accelerator."""
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    with exceptions_everywhere.short_polls():
        yield


def swept(scene: str, loader: str, stride: int, first: int = 1) -> set[str]:
    runs = list(exceptions_everywhere.sweep(scene, loader, "line", stride, first))
    wrong = [run for run in runs if run[0] not in exceptions_everywhere.KINDS]
    assert not wrong
    assert runs
    return {what for what, _ in runs}


def test_an_interrupted_fetch_is_made_again() -> None:
    """Without workers."""
    assert {"again"} <= swept("next", "alone", 4) <= {"again", "handed", "error"}  # the sampler ends with it
    assert {"again"} <= swept("next, state_dict", "alone, states", 12) <= {"again", "handed"}


def test_samples_of_a_stream_that_an_exception_has_lost_are_an_error() -> None:
    assert {"again", "error"} <= swept("next", "alone, stream", 6)
    assert {"again"} <= swept("next, state_dict", "alone, stream", 9) <= {"again", "handed"}


def interrupted_once(values: Iterable[int]) -> Iterator[int]:
    yield from values
    raise KeyboardInterrupt


class InterruptedOnce(wl.Numbers):
    """Ctrl-C comes while it makes its first sample."""

    came = False

    def __getitem__(self, index: int) -> int:
        if not self.came:
            self.came = True
            raise KeyboardInterrupt
        return index


class InterruptedStream(minidl.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return interrupted_once([0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": wl.Numbers(3), "sampler": interrupted_once([0])}, "sampler has ended right after an exception"),
        ({"dataset": InterruptedStream()}, "while it asked an iterable dataset for samples: they are lost"),
    ],
)
def test_what_control_c_has_ended_is_an_error_at_the_next_next(options: dict[str, Any], words: str) -> None:
    iterator = iter(minidl.DataLoader(batch_size=None, **options))
    assert next(iterator) == 0
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match=words):
        next(iterator)


def test_a_state_after_an_interrupted_fetch_is_of_the_draws_before_it() -> None:
    loader = minidl.DataLoader(InterruptedOnce(9), batch_size=None, shuffle=True)
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    first, state = next(iterator), loader.state_dict()
    rest = list(iterator)
    loader.load_state_dict(state)
    assert list(loader) == rest
    assert sorted([first, *rest]) == list(range(9))


class Answers(Transport):
    """Queues without processes: each read brings the answer to a message that was put.

    first: a message that is answered before those that were put earlier. instead: what the next reads bring or raise.
    """

    def __init__(self) -> None:
        self.put: list[Any] = []
        self.first: Any = None
        self.instead: list[Any] = []
        self.reads: list[Any] = []

    def index_queue(self, context: Any) -> Any:
        return self._queue(put=lambda message: self.put.append(getattr(message, "message", message)))

    def result_queue(self, context: Any, *given: Any) -> Any:
        return self._queue(get=self.get, writer=lambda worker_id: None, jammed=lambda: False)

    def _queue(self, **methods: Any) -> Any:
        ends: Any = dict.fromkeys(("cancel_join_thread", "close", "let_go"), lambda: None)
        return SimpleNamespace(failure="", **ends, **methods)

    def get(self, timeout: Any, inbox: list[Any]) -> None:
        self.reads.append((timeout, tensors._handover.seconds))
        if not self.instead:
            message = next((each for each in self.put if each == self.first), self.put[0])
            self.put.remove(message)
            self.instead.append(answer(message) if type(message) is Task else message)
        if isinstance(message := self.instead.pop(0), BaseException):
            raise message
        inbox.append(message)


def answer(task: Task, data: Any = None) -> Result:
    return Result(task.idx, task.worker_id, task.index if data is None else data)


class Drawn:
    """A sampler of 0 to 5. interrupted: whether Ctrl-C comes at its next draw."""

    interrupted = False

    def __iter__(self) -> Self:
        self.left = iter(range(6))
        return self

    def __next__(self) -> int:
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        return next(self.left)


Answered = Callable[..., tuple[Any, Any, Answers]]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answered]:
    """A function that makes a loader of the batches 0 to 5, with two workers that are not there, and an iterator.

    Each read takes 0.25 s.
    """
    monkeypatch.setattr(minidl.loader.ports, "_factory", Unmoved)
    monkeypatch.setattr(iterators, "time", SimpleNamespace(monotonic=partial(next, itertools.count(5, 0.25))))
    with contextlib.ExitStack() as open_loaders:

        def make(**options: Any) -> tuple[Any, Any, Answers]:
            options = {"num_workers": 2, "prefetch_factor": 1, "persistent_workers": True} | options
            loader: Any = minidl.DataLoader(wl.Numbers(6), batch_size=None, sampler=Drawn(), **options)  # type: ignore[arg-type]
            transport = Answers()
            loader._new_transport = lambda: transport
            open_loaders.enter_context(loader)
            return loader, iter(loader), transport

        yield make


def interrupting(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function at whose first call Ctrl-C comes."""
    calls = itertools.count()

    def called(*args: Any) -> Any:
        if not next(calls):
            raise KeyboardInterrupt
        return call(*args)

    return called


@pytest.mark.parametrize("decision", ["next", "received", "yielded"])
def test_control_c_in_a_decision_is_an_error_of_the_next_next(answered: Answered, decision: str) -> None:
    """Nobody knows how far the driver has come."""
    _, iterator, _ = answered()
    setattr(iterator._driver, decision, interrupting(getattr(iterator._driver, decision)))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match=r"while it stored a batch: that batch may be lost"):
        next(iterator)


@pytest.mark.parametrize("place", ["read", "draw"])
def test_control_c_in_a_read_or_a_draw_loses_no_batch(answered: Answered, place: str) -> None:
    """The draw comes first in a next() whose batch is here already."""
    loader, iterator, answers = answered()
    if place == "draw":
        answers.first = Task(1, 1, 1)
    assert next(iterator) == 0
    assert iterator._task_info == {1: (1, 1) if place == "draw" else (1,), 2: (0,)}
    assert list(itertools.islice(iterator._worker_queue_idx_cycle, 3)) == [1, 0, 1]
    answers.instead += [KeyboardInterrupt()] * (place == "read")
    loader.sampler.interrupted = place == "draw"
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert list(iterator) == [1, 2, 3, 4, 5]


def test_an_epoch_that_control_c_has_kept_from_its_begin_gives_no_batch(answered: Answered) -> None:
    loader, iterator, answers = answered()
    answers.instead.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert answers.put == [Task(0, 0, 0), Task(1, 1, 1), ResumeIteration(1, 0), ResumeIteration(1, 1)]
    for _ in range(2):
        with pytest.raises(ProtocolError, match="whose new epoch has not begun"):
            next(iterator)
    assert list(loader) == list(range(6))
    assert iterator._record.base_seed == iterator._base_seed


def test_the_end_of_an_epoch_is_in_the_state_and_stays_the_end(answered: Answered) -> None:
    loader, iterator, _ = answered()
    assert (list(iterator), list(iterator), loader.state_dict()["ended"]) == (list(range(6)), [], True)
    next(iter(loader))
    loader.close()
    assert (list(iterator), loader.state_dict()["ended"]) == ([], False)


class OwnExit(BaseException):
    """Not an Exception, and not a Ctrl-C either, such as pytest's outcomes and asyncio's CancelledError."""


class LeavesSampler(wl.Numbers):
    """A sampler whose fourth index is an exception; it ends after that if it is a generator, else it goes on."""

    def __init__(self, generator: bool) -> None:
        super().__init__(7)
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        draws = map(wl.Failing(7, OwnExit("no index")).__getitem__, range(7))
        return (index for index in draws) if self.generator else draws


class LeavesStream(wl.Stream):
    def __iter__(self) -> Iterator[int]:
        return iter(LeavesSampler(False))


@pytest.mark.parametrize("options", [
    {"dataset": wl.Failing(6, OwnExit("no sample"))},
    {"dataset": LeavesStream(7)},
    {"dataset": wl.Numbers(7), "sampler": LeavesSampler(False)},
    {"dataset": wl.Numbers(7), "sampler": LeavesSampler(True)},
    pytest.param({"dataset": wl.Numbers(7), "sampler": LeavesSampler(False), "num_workers": 1}, marks=pytest.mark.live),
    pytest.param({"dataset": wl.Numbers(7), "sampler": LeavesSampler(True), "num_workers": 1}, marks=pytest.mark.live),
], ids=["sample", "stream", "sampler", "generator", "sampler, worker", "generator, worker"])  # fmt: skip
def test_an_exception_of_the_users_code_that_is_no_error_is_its_answer(options: dict[str, Any]) -> None:
    """As upstream: the next call goes on with what comes after it."""

    def program(lib: Any) -> list[Any]:
        iterator, seen = iter(lib.DataLoader(**options)), []
        for _ in range(9):
            try:
                seen.append(int(next(iterator)))
            except (OwnExit, StopIteration) as error:
                seen.append(type(error))
        return seen

    agree(program)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.live)])
def test_next_in_two_threads_is_refused(num_workers: int) -> None:
    """The sampler of the first one's next task waits until the second has been refused."""
    said: list[BaseException] = []

    class Sampler(wl.Numbers):
        def __iter__(self) -> Iterator[int]:
            for index in range(len(self)):
                if index == 2:
                    thread = threading.Thread(target=ask)
                    thread.start()
                    thread.join(wl.BOUND)
                yield index

    def ask() -> None:
        try:
            next(iterator)
        except ProtocolError as error:
            said.append(error)

    iterator = iter(minidl.DataLoader(wl.Numbers(4), sampler=Sampler(4), num_workers=num_workers, prefetch_factor=(
        1 if num_workers else None)))  # fmt: skip
    with contextlib.suppress(ProtocolError):
        list(iterator)
    assert ["in another thread" in str(error) for error in said] == [True]


def test_a_batch_of_the_users_own_class_needs_no_length() -> None:
    class Rows(list[int]):
        def __len__(self) -> int:
            raise NotImplementedError

    class Batches(wl.Numbers):
        def __getitems__(self, indices: list[int]) -> Rows:
            return Rows(indices)

    assert list(minidl.DataLoader(Batches(4), 2, collate_fn=lambda rows: list(map(int, rows)))) == [[0, 1], [2, 3]]


# --- No batch comes ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("timeout", [0, 0.5])
def test_a_read_takes_the_users_timeout_at_most(answered: Answered, timeout: float) -> None:
    """Without one it reads until a message comes."""
    _, iterator, answers = answered(timeout=timeout)
    answers.instead += [queue.Empty(), queue.Empty()] * (timeout == 0)
    assert list(iterator) == list(range(6))
    assert answers.reads == [(timeout or MP_STATUS_CHECK_INTERVAL, timeout or None)] * (6 if timeout else 8)


FAILURES: dict[str, tuple[Any, Any, str, list[Any]]] = {
    "timeout": (queue.Empty(), None, r"after 0.5 s.*waited 0.2 s for task 0 of worker 0", [FoundAlive, TimedOut]),
    "worker died": (queue.Empty(), -9, r"worker \(pid\(s\) 1073741824\) exited unexpectedly", [FoundDead]),
    "read failed": (OSError(errno.EMFILE, "no more"), None, "no more", [FoundAlive]),
    "read failed, worker died": (EOFError(), 1, "exited unexpectedly .worker 0: exit code 1", [FoundDead]),
    "not rebuilt": (RebuildFailure(ValueError("bad")), None, "bad", [FoundAlive]),
    "refused": (RebuildFailure(ConnectionResetError()), None, "worker has closed the connection", [FoundAlive]),
    "not rebuilt, worker died": (RebuildFailure(FileNotFoundError()), 1, "exited unexpectedly", [FoundDead]),
    "not handed over": (
        RebuildFailure(NotHandedOverError()), None, "0.5 s.*task 0 is here.*not hand over", [FoundAlive, TimedOut],
    ),
    "the task failed": (ExceptionWrapper(wl.SimpleError("one"), ""), None, "one", []),
}  # fmt: skip
"""What a read of task 0 brings or raises, its worker's exit code, the error's words, and what the ports are told."""


@pytest.mark.parametrize("case", FAILURES)
def test_a_read_that_brings_no_batch(answered: Answered, case: str) -> None:
    """Unless a worker died, the next batch comes, too: that of the task whose read has failed, or the next task's."""
    came, code, words, notes = FAILURES[case]
    _, iterator, answers = answered(timeout=0.5)
    is_result = not isinstance(came, Exception)
    answers.instead.append(Result(0, 0, came) if is_result else came)
    if is_result:
        answers.put.remove(Task(0, 0, 0))
    worker, told = iterator._workers[0], iterator._ports.notes
    worker.exitcode = code
    told.clear()
    with pytest.raises(Exception, match=words) as raised:
        next(iterator)
    assert [type(note) for note in told] == notes
    cause = getattr(came, "error", came)
    if code is None:
        assert next(iterator) == is_result
    else:
        assert raised.value.__cause__ is cause
        assert Sentinel() in answers.put
        assert told == [FoundDead("worker", 0, worker.pid, code)]
    assert worker.joined == ([1.0 if code is None else 5.0] if is_result and isinstance(cause, OSError) else [])


def test_a_read_that_fails_for_want_of_descriptors_names_the_remedies(
    answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, iterator, answers = answered()
    monkeypatch.setattr(iterators, "with_remedy", lambda error: RuntimeError(f"ulimit -n: {error}"))
    answers.instead.append(OSError("the queue's own error"))
    with pytest.raises(RuntimeError, match="ulimit -n: the queue's own error"):
        next(iterator)


@pytest.mark.parametrize(
    ("code", "words"),
    [(None, "waited 0.2 s for 2 of 2 workers to begin epoch 1"), (-9, "exited unexpectedly .worker 0: exit code -9")],
)
def test_a_new_epoch_that_no_worker_begins(answered: Answered, code: int | None, words: str) -> None:
    loader, iterator, answers = answered(timeout=0.5)
    iterator._workers[0].exitcode = code
    answers.instead.append(queue.Empty())
    with pytest.raises(RuntimeError, match=words):
        iter(loader)


def test_an_error_that_is_interrupted_comes_at_the_next_next(
    answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, iterator, answers = answered(timeout=0.5)
    monkeypatch.setattr(liveness, "error_of", interrupting(liveness.error_of))
    answers.instead.append(queue.Empty())
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match="timed out after"):
        next(iterator)
    assert list(iterator) == list(range(6))


@pytest.mark.parametrize("alive", [True, False])
def test_the_pin_thread_is_looked_at_before_each_read(answered: Answered, alive: bool) -> None:
    _, iterator, answers = answered()
    failure = ValueError("no room to pin in")
    thread = SimpleNamespace(is_alive=lambda: alive, failure=failure)
    iterator._pin_memory, iterator._pin_memory_thread, iterator._crew.pin_thread = True, thread, thread
    if alive:
        assert next(iterator) == 0
        return
    with pytest.raises(RuntimeError, match="exited unexpectedly: ValueError: no room") as raised:
        next(iterator)
    assert raised.value.__cause__ is failure
    assert answers.reads == []


def test_states_are_told_apart_by_epoch(answered: Answered) -> None:
    """What comes before each worker has begun the epoch may be of the last one."""
    loader, iterator, answers = answered()
    came: list[Any] = []
    iterator._record.state_came = lambda message, stale: came.append((message, stale))
    first = Result(0, 0, 0, (1, b""))
    answers.instead.append(first)
    next(iterator)
    loader._new_epoch = lambda ports: iterator._record
    answers.instead += [first, ResumeIteration(1, 0, b""), ResumeIteration(1, 1)]
    iter(loader)
    assert came == [(first, False), (first, True), (ResumeIteration(1, 0, b""), True)]


def test_workers_that_are_not_persistent_are_told_to_leave_at_the_end(answered: Answered) -> None:
    _, iterator, answers = answered(persistent_workers=False)
    assert list(iterator) == list(range(6))
    assert answers.put == [Sentinel(), Sentinel()]
    assert iterator._shutdown


@pytest.mark.live
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("scene", "loader", "stride", "first", "kinds"), [
    ("next", "arena", 8, 1, {"again", "error"}),
    ("next", "arena", 8, 4, {"again", "error"}),
    ("next", "upstream, pinned", 8, 1, {"again", "error"}),
    ("next", "upstream, pinned", 8, 4, {"again", "error"}),
    ("next", "threads, pinned", 8, 1, {"again"}),
    ("next, state_dict", "arena", 8, 1, {"again"}),
    ("device next", "arena", 8, 1, {"again"}),
    ("iter, persistent", "arena", 40, 1, {"again"}),
    ("iter", "threads", 40, 1, {"again"}),
    ("close", "arena", 60, 1, {"again"}),
    ("close", "threads, pinned", 30, 1, {"again"}),
])  # fmt: skip
def test_after_an_exception_at_some_lines_nothing_is_lost(
    scene: str, loader: str, stride: int, first: int, kinds: set[str]
) -> None:
    assert kinds <= swept(scene, loader, stride, first)


def test_the_state_that_an_interrupted_iter_was_to_go_on_from_is_that_of_the_next() -> None:
    assert {"again"} <= swept("iter, resumed", "alone, states", 25) <= {"again", "handed"}


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("scene", "loader"),
    [
        (scene, each)
        for scene, (_, loaders) in exceptions_everywhere.SCENES.items()
        if scene != "exit"  # a child that returns from pytest
        for each in loaders
    ],
)
def test_an_exception_at_any_line_loses_nothing(scene: str, loader: str) -> None:
    swept(scene, loader, 1 if scene in exceptions_everywhere.KEPT else 5)


@pytest.mark.live
@pytest.mark.usefixtures("quick")
def test_a_task_that_can_not_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes it has no memory, say; each worker lives, and waits."""
    loader = minidl.DataLoader(wl.Numbers(40), num_workers=1)
    with iter(loader) as iterator:
        next(iterator)
        send, sent = Connection._send_bytes, []

        def once(pipe: Connection, data: Any) -> None:
            if threading.current_thread() is not threading.main_thread():  # the feeder
                sent.append(1)
                if len(sent) == 1:
                    raise MemoryError("no room")
            send(pipe, data)

        monkeypatch.setattr(Connection, "_send_bytes", once)
        with pytest.raises(RuntimeError, match=r"could not send a task.*worker 0: MemoryError: no room"):
            list(iterator)
