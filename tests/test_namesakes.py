"""Each class of ours is a nominal subclass of torch's namesake: frameworks test the type, and all behaviour is ours."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data import dataloader as torch_dataloader

import minidl
from minidl.loader import dataloader, iterators
from minidl.run import replaced
from minidl.stand_in import StandIn

NAMES = (
    "DataLoader", "TensorDataset", "StackDataset", "ConcatDataset", "ChainDataset", "Subset", "SequentialSampler",
    "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "BatchSampler", "DistributedSampler",
)  # fmt: skip
ITERATORS = ("_BaseDataLoaderIter", "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")
PAIRS = [
    *((getattr(minidl, name), getattr(torch.utils.data, name)) for name in NAMES),
    *((getattr(iterators, name), getattr(torch_dataloader, name)) for name in ITERATORS),
    (dataloader._InfiniteConstantSampler, torch_dataloader._InfiniteConstantSampler),
]
NOT_NEEDED = {"__annotations__", "__orig_bases__", "__parameters__", "__doc__", "__module__", "__dict__", "__weakref__"}
TORCHS_OWN = {
    "_clean_up_persistent_workers_atexit",
    "_register_persistent_workers_atexit",
    "_mark_worker_as_unavailable",
    "_clean_up_worker",  # of torch 2.11
}
"""Steps of torch's shutdown, which `shutdown.Crew` takes here. Nothing calls them on our iterators."""


@pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=lambda pair: pair.__name__)
def test_a_class_is_its_namesakes_subclass_in_name_only(ours: Any, torchs: Any) -> None:
    assert issubclass(ours, torchs)
    own = [cls for cls in ours.__mro__ if cls.__module__.startswith("minidl")]
    defined = {name for cls in own for name in vars(cls)}
    inherited = set(vars(torchs)) - defined - NOT_NEEDED - TORCHS_OWN - {"__slotnames__"}  # which pickle leaves there
    assert not inherited, f"{ours.__name__} takes {sorted(inherited)} from torch's class"


@pytest.mark.live
def test_no_constructor_of_torchs_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise AssertionError(f"torch's __init__ runs for a {type(self).__name__}")

    for _, torchs in PAIRS:
        if inspect.isfunction(vars(torchs).get("__init__")):
            monkeypatch.setattr(torchs, "__init__", refuse)
    numbers = minidl.TensorDataset(torch.arange(8.0))
    both = minidl.ConcatDataset([minidl.Subset(numbers, [1, 2]), minidl.StackDataset(numbers)])
    assert len(both) == 10
    sampler = minidl.DistributedSampler(numbers, num_replicas=2, rank=0)
    loaders = [minidl.DataLoader(numbers, batch_size=2, sampler=sampler, num_workers=workers) for workers in (0, 1)]
    assert [len(list(loader)) for loader in loaders] == [2, 2]
    assert list(minidl.ChainDataset([])) == []


class Four(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


OF_DATAPIPES = {"_pg", "_rank", "_shared_seed", "_world_size"}
"""Attributes of torch's iterators that only their handling of DataPipes reads, which our loader refuses."""


@pytest.mark.live
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [list(range(8)), Four()], ids=["map", "iterable"])
def test_what_programs_find_on_torchs_loader_they_find_on_ours(dataset: Any, workers: int) -> None:
    """Also under the names that begin with an underscore: schedulers and profilers read them."""
    theirs, ours = (of(dataset, num_workers=workers) for of in (torch.utils.data.DataLoader, minidl.DataLoader))
    assert not {*dir(theirs)} - {*dir(ours)}
    assert isinstance(ours.sampler, torch_dataloader._InfiniteConstantSampler) == (dataset.__class__ is Four)
    iterators = iter(theirs), iter(ours)
    assert [next(one) for one in iterators] == [torch.tensor([0])] * 2
    missing = {name for name in vars(iterators[0]) if not hasattr(iterators[1], name)}
    assert missing <= OF_DATAPIPES
    if workers:
        assert [one._worker_pids_set for one in iterators] == [True, True]
        turns = [list(itertools.islice(one._worker_queue_idx_cycle, 3)) for one in iterators]
        assert turns[0] == turns[1]


def test_the_default_collate_function_is_torchs_object() -> None:
    numbers = minidl.TensorDataset(torch.arange(8.0))
    assert minidl.DataLoader(numbers).collate_fn is torch.utils.data.default_collate
    assert minidl.DataLoader(numbers, batch_size=None).collate_fn is torch.utils.data.default_convert


def test_what_stands_for_torchs_default_collate_function_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minidl.data.collate, "collate_tensor_fn", lambda batch, collate_fn_map=None: "ours")  # type: ignore[attr-defined]
    called = []
    monkeypatch.setattr("minidl.data.collate.collate", lambda batch, **_: called.append(batch) or "ours")
    numbers = minidl.TensorDataset(torch.arange(4.0))
    assert list(minidl.DataLoader(numbers, batch_size=2)) == ["ours", "ours"]
    assert len(called) == 2


def test_under_run_the_default_samplers_are_of_torchs_very_types() -> None:
    numbers = list(range(8))
    with replaced():
        loaders = [torch.utils.data.DataLoader(numbers, batch_size=2, shuffle=shuffle) for shuffle in (True, False)]
    assert [type(loader) for loader in loaders] == [StandIn] * 2
    assert [type(loader.sampler) for loader in loaders] == [RandomSampler, SequentialSampler]
    assert [type(loader.batch_sampler) for loader in loaders] == [BatchSampler] * 2
    assert type(minidl.DataLoader(numbers, shuffle=True).sampler) is minidl.RandomSampler
