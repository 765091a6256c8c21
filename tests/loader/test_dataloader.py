"""Options, attributes and names of the loader: what is refused in torch's words, what warns, what tools look for."""

from __future__ import annotations

import _thread
import contextlib
import copy
import inspect
import itertools
import linecache
import multiprocessing
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
import torch.multiprocessing
import torch.utils.data
import workloads as wl
from subclassed_loaders import streaming
from torch.utils.data import datapipes

import minidl
from minidl.dataloader import LoaderWithoutState
from minidl.loader.iterators import _MultiProcessingDataLoaderIter
from minidl.loader.ports import EpochRecord

TORCH: Any = torch.utils.data
MAP = wl.Numbers(7)
STREAM = wl.Stream(7)


def outcome(make: Callable[[], Any]) -> Any:
    """The error's type and words and the warnings' categories and words, or None and the latter."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make()
            error = None
        except Exception as raised:
            error = type(raised), str(raised)
    return error, [(warning.category, str(warning.message)) for warning in caught]


# --- The constructor --------------------------------------------------------------------------------------------------
REFUSED: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"num_workers": 2, "prefetch_factor": -1},
    {"persistent_workers": True},
    {"sampler": [0], "shuffle": True},
    {"batch_sampler": [[0]], "batch_size": 2},
    {"batch_sampler": [[0]], "shuffle": True},
    {"batch_sampler": [[0]], "sampler": [0]},
    {"batch_sampler": [[0]], "drop_last": True},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 0},
    {"batch_size": -3},
    {"batch_size": 2.5},
    {"batch_size": True},
    {"batch_size": 2, "drop_last": "yes"},
    {"multiprocessing_context": "fork"},
    {"num_workers": 1, "multiprocessing_context": "spoon"},
    {"num_workers": 1, "multiprocessing_context": 7},
    {"num_workers": 1, "multiprocessing_context": multiprocessing},
    {"dataset": STREAM, "shuffle": True},
    {"dataset": STREAM, "shuffle": 3},
    {"dataset": STREAM, "sampler": [0]},
    {"dataset": STREAM, "sampler": []},
    {"dataset": STREAM, "batch_sampler": [[0]]},
    {"dataset": wl.Numbers(0), "shuffle": True, "generator": 5},
    {"dataset": iter([]), "shuffle": True},
    {"num_workers": "two"},
    {"timeout": "long"},
    # Two at once: the same one is heard of.
    {"num_workers": -1, "timeout": -1},
    {"num_workers": -1, "persistent_workers": True},
    {"timeout": -1, "prefetch_factor": 3},
    {"dataset": STREAM, "shuffle": True, "batch_size": None, "drop_last": True},
    {"dataset": STREAM, "sampler": [0], "batch_sampler": [[0]]},
    {"batch_sampler": [[0]], "sampler": [0], "shuffle": True},
    {"multiprocessing_context": 7, "batch_sampler": [[0]], "drop_last": True},
]
ACCEPTED: list[dict[str, Any]] = [
    {},
    {"dataset": STREAM, "shuffle": False},
    {"batch_size": None, "sampler": [3]},
    {"batch_sampler": [[0]], "shuffle": False},
    {"num_workers": 1, "prefetch_factor": 0},
    {"num_workers": 1, "multiprocessing_context": torch.multiprocessing.get_context("spawn")},
    {"num_workers": 1, "multiprocessing_context": multiprocessing.get_context("fork")},
    {"num_workers": 1, "timeout": 0.5, "persistent_workers": True, "in_order": False},
    {"num_workers": 1000},
    {"num_workers": 1, "worker_init_fn": print, "multiprocessing_context": "spawn"},
    {"pin_memory": True, "pin_memory_device": "cuda"},
    {"timeout": 3},
]


def described(options: dict[str, Any]) -> str:
    return ",".join(f"{name}={value!r:.12}" for name, value in options.items()) or "defaults"


@pytest.mark.parametrize("options", REFUSED, ids=described)
def test_refused_in_torchs_words(options: dict[str, Any]) -> None:
    theirs, ours = (outcome(lambda lib=lib: lib.DataLoader(**({"dataset": MAP} | options))) for lib in (TORCH, minidl))
    assert ours == theirs
    assert ours[0] is not None


@pytest.mark.parametrize("options", ACCEPTED, ids=described)
def test_accepted_with_the_same_attributes(options: dict[str, Any]) -> None:
    def attributes(lib: Any) -> Any:
        loader = lib.DataLoader(**({"dataset": MAP} | options))
        values = {name: getattr(loader, name) for name in NAMES}
        context = loader.multiprocessing_context
        kinds = [type(value).__name__ for value in (loader.sampler, loader.batch_sampler, loader._index_sampler)]
        return values, kinds, None if context is None else context.get_start_method(), loader.collate_fn.__name__

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, ours = attributes(TORCH), attributes(minidl)
    assert ours == theirs
    assert outcome(lambda: attributes(minidl)) == outcome(lambda: attributes(TORCH))


NAMES = (
    "dataset", "batch_size", "num_workers", "pin_memory", "drop_last", "timeout", "worker_init_fn", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order", "_dataset_kind", "_auto_collation",
    "_iterator", "_IterableDataset_len_called",
)  # fmt: skip


def test_the_signature_is_torchs() -> None:
    """But for `state_every`, `transport` and `worker_method`, which come after it."""
    ours, theirs = (inspect.signature(lib.DataLoader.__init__).parameters for lib in (minidl, TORCH))
    defaults = {"state_every": None, "transport": None, "worker_method": "multiprocessing"}
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in defaults.items()]
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in (*theirs.values(), *own)
    ]


def test_datapipes_are_refused_by_name() -> None:
    pipe = datapipes.iter.IterableWrapper([1, 2])
    with pytest.raises(NotImplementedError, match=r"IterableWrapperIterDataPipe.*use torch\.utils\.data\.DataLoader"):
        minidl.DataLoader(pipe)
    with pytest.raises(NotImplementedError, match="SequenceWrapperMapDataPipe"):
        minidl.DataLoader(datapipes.map.SequenceWrapper([1, 2]))


# --- Attributes -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_is_fixed_after_init(name: str) -> None:
    def change(lib: Any) -> None:
        setattr(type("MyLoader", (lib.DataLoader,), {})(MAP), name, None)

    ours, theirs = (outcome(lambda lib=lib: change(lib)) for lib in (minidl, TORCH))
    assert ours == theirs
    assert ours[0] == (ValueError, f"{name} attribute should not be set after MyLoader is initialized")


@pytest.mark.live
def test_what_may_be_changed_after_init() -> None:
    loader: Any = minidl.DataLoader(MAP, collate_fn=wl.as_list)
    loader.num_workers, loader.prefetch_factor, loader.multiprocessing_context = 1, 1, "fork"
    loader.mine = 3
    assert next(iter(loader)) == [0]
    assert loader.multiprocessing_context.get_start_method() == "fork"
    assert outcome(lambda: setattr(loader, "multiprocessing_context", "spoon"))[0][0] is ValueError
    assert loader.multiprocessing_context.get_start_method() == "fork"
    loader.multiprocessing_context = None
    assert loader.multiprocessing_context is None


def test_a_persistent_iterator_is_kept_until_it_is_closed_or_there_are_no_workers() -> None:
    stream = wl.SizedStream(7, 4)
    loader: Any = minidl.DataLoader(stream, num_workers=1, persistent_workers=True)
    loader._get_iterator = lambda: iter(minidl.DataLoader(stream))  # in place of workers
    first = iter(loader)
    assert iter(loader) is first
    first.close()
    second = iter(loader)
    assert len(list(second)) == 7
    assert second._IterableDataset_len_called is None
    assert len(loader) == 4
    assert iter(loader) is second
    assert second._IterableDataset_len_called == 4
    loader.close()
    assert loader._iterator is None
    assert iter(loader) is not second
    second = iter(loader)
    loader.num_workers = 0
    assert iter(loader) is not second


@pytest.mark.live
def test_too_many_workers_warn_when_made_and_when_iterated() -> None:
    """A user who filters nothing reads it once."""
    cpus = len(os.sched_getaffinity(0))
    text = f"This DataLoader will create {cpus + 1} worker processes in total. Our suggested max number of worker"
    for action, times in (("always", 2), ("default", 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            minidl.DataLoader(MAP, num_workers=cpus + 1)._get_iterator().close()
        assert [str(one.message).startswith(text) for one in caught] == [True] * times
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        minidl.DataLoader(MAP, num_workers=cpus)


def test_the_number_of_cpus_is_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch counts them: where there is no affinity, all that there are; where nothing is known, it says so."""

    def all_words() -> list[Any]:
        return [outcome(lambda lib=lib: lib.DataLoader(MAP, num_workers=10**6)) for lib in (minidl, TORCH)]

    seen = [all_words()]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(12345))
    seen.append(all_words())
    monkeypatch.delattr(os, "sched_getaffinity")
    seen.append(all_words())
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    seen.append(all_words())
    for ours, theirs in seen:
        assert ours == theirs
    assert len({ours[1][0][1] for ours, _ in seen}) == 4


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.live)])
def test_pinning_without_an_accelerator_warns_and_goes_on(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

    def program(lib: Any) -> Any:
        loader = lib.DataLoader(MAP, pin_memory=True, pin_memory_device="cuda", num_workers=num_workers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            assert [int(batch) for batch in loader] == list(range(7))
        return [(w.category, str(w.message)) for w in caught], linecache.getline(caught[0].filename, caught[0].lineno)

    ours, where = program(minidl)
    assert ours == program(TORCH)[0]
    assert [words.split(",")[0] for _, words in ours] == [
        "pin_memory_device is deprecated",
        "'pin_memory' argument is set as true but no accelerator is found",
    ]
    assert "for batch in loader" in where


# --- Names that tools and tests of torch's loader look for ------------------------------------------------------------
@pytest.mark.live
def test_private_names_of_a_running_iterator() -> None:
    """Their values are torch's at every step; _task_info has torch's form."""

    def walk(lib: Any) -> list[Any]:
        loader = lib.DataLoader(MAP, num_workers=2, prefetch_factor=2, collate_fn=wl.as_list)
        iterator = iter(loader)
        seen = []
        for _ in range(8):
            # Whether a batch lies in the reorder buffer already is a matter of time; whose task it is is not.
            tasks = {idx: info[0] for idx, info in iterator._task_info.items()}
            turns = list(itertools.islice(copy.copy(iterator._worker_queue_idx_cycle), 4))
            seen.append((iterator._send_idx, iterator._rcvd_idx, tasks, iterator._num_yielded, turns))
            seen.append((iterator._workers_num_tasks, iterator._workers_status, iterator._shutdown))
            next(iterator, None)
        seen.append((iterator._tasks_outstanding, [worker.exitcode for worker in iterator._workers]))
        return seen

    assert walk(minidl) == walk(TORCH)


@pytest.mark.live
@pytest.mark.parametrize("pinned", [False, True])
def test_private_objects_of_a_running_iterator(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    with minidl.DataLoader(MAP, num_workers=2, persistent_workers=True, pin_memory=pinned) as loader:
        iterator: Any = iter(loader)
        assert loader._iterator is iterator
        assert isinstance(iterator, _MultiProcessingDataLoaderIter)
        assert [worker.daemon and worker.is_alive() for worker in iterator._workers] == [True, True]
        assert len(iterator._index_queues) == 2
        assert (iterator._data_queue is iterator._worker_result_queue) is not pinned
        assert not iterator._workers_done_event.is_set()
        assert iterator._tasks_outstanding == 4
        assert iterator._base_seed is not None
        assert len(iterator) == 7
        assert hasattr(iterator, "_pin_memory_thread") is pinned
        if pinned:
            assert iterator._pin_memory_thread.is_alive()
            assert not iterator._pin_memory_thread_done_event.is_set()
        iterator._shutdown_workers()
        assert iterator._workers_done_event.is_set()
        assert iterator._shutdown
        iterator._shutdown_workers()  # twice does nothing
        assert not pinned or not iterator._pin_memory_thread.is_alive()


class CountingHost:
    """Stands for a device that copies from page-locked memory; `locked`: addresses. It locks nothing."""

    name = "a host"
    simulated = True

    def __init__(self) -> None:
        self.locked: set[int] = set()

    def lock(self, address: int, size: int) -> None:
        self.locked.add(address)

    def unlock(self, address: int) -> None:
        self.locked.remove(address)


@pytest.mark.live
def test_slabs_are_locked_only_for_who_copies_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a pin thread. The next plain epoch begins anew: the program may keep its batches."""
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    host, options = CountingHost(), {"num_workers": 1, "pin_memory": True, "persistent_workers": True}
    with minidl.DataLoader(MAP, transport="arena", **options) as loader:  # type: ignore[arg-type]
        for_device: Any = loader.iterate_for(host)
        assert [batch.item() for batch in for_device] == list(range(7))
        assert (len(host.locked) > 0, hasattr(for_device, "_pin_memory_thread")) == (True, False)
        again: Any = loader.iterate_for(host)
        assert again is for_device
        plain: Any = iter(loader)
        assert [batch.item() for batch in plain] == list(range(7))
        assert (host.locked, plain._pin_memory_thread.is_alive()) == (set(), True)
    with minidl.DataLoader(MAP, transport="upstream", **options) as loader:  # type: ignore[arg-type]
        assert [batch.item() for batch in loader.iterate_for(host)] == list(range(7))
    assert host.locked == set()


# --- close and with ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.live)])
def test_close_ends_what_is_under_way(num_workers: int) -> None:
    loader = minidl.DataLoader(MAP, num_workers=num_workers)
    first, second = iter(loader), iter(loader)
    next(first)
    with iter(loader) as third:
        next(third)
    assert next(third, "ended") == "ended"
    loader.close()
    for iterator in (first, second, third):
        iterator.close()  # once more does nothing
        assert [next(iterator, "ended") for _ in range(2)] == ["ended"] * 2
        assert all(not worker.is_alive() for worker in getattr(iterator, "_workers", []))
    assert [int(batch) for batch in loader] == list(range(7))  # the loader itself may be used again


@pytest.mark.live
def test_leaving_the_with_block_closes_also_by_an_error() -> None:
    for kept in (minidl.DataLoader(MAP, num_workers=1), minidl.DataLoader(MAP, num_workers=1, persistent_workers=True)):
        iterator: Any = None
        with contextlib.suppress(wl.SimpleError), kept as loader:
            iterator = iter(loader)
            raise wl.SimpleError
        assert [worker.exitcode for worker in iterator._workers] == [0]
        assert kept._iterator is None
        assert len(list(kept)) == 7
        kept.close()


@pytest.mark.live
@pytest.mark.parametrize("collate", [minidl.default_collate, torch.utils.data.default_collate])
def test_either_collate_stacks_into_shared_memory_in_our_workers(collate: Any) -> None:
    """The batch arrives in the memory that the worker stacked it in: nothing was copied on the way."""
    for batch in minidl.DataLoader(wl.Tensors(4), batch_size=2, num_workers=1, collate_fn=collate):
        assert batch.is_shared()
    assert not next(iter(minidl.DataLoader(wl.Tensors(4), collate_fn=collate))).is_shared()


# --- Copies of a loader -----------------------------------------------------------------------------------------------
Loader = minidl.DataLoader[list[int]]


def by_pickle(loader: Loader) -> Loader:
    answer: Loader = pickle.loads(pickle.dumps(loader))
    return answer


@pytest.fixture(params=[by_pickle, copy.deepcopy, copy.copy])
def duplicate(request: pytest.FixtureRequest) -> Callable[[Loader], Loader]:
    """A way to copy a loader."""
    way: Callable[[Loader], Loader] = request.param
    return way


def test_a_duplicate_has_the_same_options(duplicate: Callable[[Loader], Loader]) -> None:
    loader: Loader = minidl.DataLoader(MAP, batch_size=2, num_workers=1, shuffle=True, multiprocessing_context=None)
    twin = duplicate(loader)
    names = set(NAMES) - {"dataset"}
    assert {name: getattr(twin, name) for name in names} == {name: getattr(loader, name) for name in names}
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        twin.batch_size = 3


def batches(loader: Loader) -> list[list[int]]:
    return [list(batch) for batch in loader]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.live)])
def test_a_duplicate_loads_the_same_while_the_original_is_going(
    duplicate: Callable[[Loader], Loader], num_workers: int
) -> None:
    loader: Loader = minidl.DataLoader(wl.Numbers(5), batch_size=2, collate_fn=list, num_workers=num_workers)
    with iter(loader) as going:
        assert next(going) == [0, 1]
        twin = duplicate(loader)
        assert batches(twin) == [[0, 1], [2, 3], [4]]
        if duplicate is not copy.copy:  # which shares what is to be closed
            twin.close()
        assert next(going) == [2, 3]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.live)])
def test_iterators_are_not_pickled_as_in_torch(num_workers: int) -> None:
    """Also where a persistent loader keeps it; before, it travels without."""
    for lib in (minidl, TORCH):
        loader = lib.DataLoader(MAP, num_workers=num_workers, persistent_workers=num_workers > 0)
        assert by_pickle(loader)._iterator is None
        iterator = iter(loader)
        for thing in [iterator, loader][: 1 + num_workers]:
            with pytest.raises(NotImplementedError, match="cannot be pickled"):
                pickle.dumps(thing)
        if num_workers:
            iterator._shutdown_workers()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.live)])
def test_profilers_see_the_same_labels(workers: int) -> None:
    def labels(lib: Any) -> list[tuple[str, int, bool]]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:  # else torch 2.11 warns
            list(lib.DataLoader(MAP, batch_size=2, num_workers=workers))
        return [
            (entry.key, entry.count, entry.is_user_annotation)
            for entry in profile.key_averages()
            if "DataLoader" in entry.key
        ]

    assert labels(minidl) == labels(TORCH)
    assert len(labels(minidl)) == 1


class OwnLoader(minidl.DataLoader[Any]):
    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)


def test_the_line_that_made_a_loader_is_the_programs() -> None:
    """Not a subclass's `__init__`, nor a framework's code, which makes all loaders in one line."""
    made = [minidl.DataLoader(MAP), OwnLoader(MAP)]
    framework: dict[str, Any] = {"minidl": minidl}
    exec(compile("def make(data): return minidl.DataLoader(data)", "/lib/site-packages/fw.py", "exec"), framework)
    made.append(framework["make"](MAP))
    here, first = OwnLoader.__init__.__code__.co_filename, made[0]._made_at
    line = int(first.removeprefix(f"{here}:"))
    assert [loader._made_at for loader in made] == [first, first, f"{here}:{line + 3}"]


def test_a_loader_that_only_libraries_make_is_the_innermost_ones() -> None:
    """One that C alone makes has no such line."""
    names: dict[str, Any] = {"minidl": minidl, "made": []}
    code = compile("made.append(minidl.DataLoader(range(2)))", "/usr/lib/site-packages/framework.py", "exec")
    thread = threading.Thread(target=exec, args=(code, names))  # so that no line of this file is on its stack
    thread.start()
    thread.join()
    _thread.start_new_thread(names["made"].extend, (map(minidl.DataLoader, [range(2)]),))
    while len(names["made"]) < 2:
        time.sleep(0.001)
    assert [loader._made_at for loader in names["made"]] == ["/usr/lib/site-packages/framework.py:1", ""]


# --- In the place of torch's ------------------------------------------------------------------------------------------
@runtime_checkable
class HasState(Protocol):
    """As Lightning asks."""

    def state_dict(self) -> Any: ...


def test_a_loader_in_torchs_place_has_no_state_however_it_is_asked() -> None:
    """Accelerate asks by `hasattr`, and calls what it finds; a subclass's own is there."""
    for base in (torch.utils.data.DataLoader, LoaderWithoutState):
        loader = base(range(2))
        assert not hasattr(loader, "state_dict")
        assert not hasattr(loader, "load_state_dict")
        assert not isinstance(loader, HasState)
        assert isinstance(streaming(base)(range(2)), HasState)
    assert isinstance(minidl.DataLoader(range(2)), HasState)


@pytest.mark.live
def test_a_loader_in_torchs_place_has_the_same_batches_and_keeps_no_state_of_them() -> None:
    with iter(LoaderWithoutState(wl.Numbers(4), num_workers=1)) as iterator:
        assert [int(batch) for batch in iterator] == [0, 1, 2, 3]
        assert type(iterator._record) is EpochRecord
