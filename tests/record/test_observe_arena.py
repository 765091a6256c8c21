"""torch's own loader with the transport "arena": an argument more, and the same batches."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from pathlib import Path
from typing import Any

import own_iterators
import pytest
import torch
import workloads as wl
from sizes import slow
from torch.utils.data import DataLoader

import minidl
from minidl.check import check
from minidl.tracefile.reader import read_trace

pytestmark = pytest.mark.live

SIZE = 5000


class Wide(wl.Numbers):
    """i -> a tensor, a number and a word."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((SIZE,), float(index)), index, str(index)


def served(context: Any, **options: Any) -> list[Any]:
    loader = DataLoader(Wide(20), 4, num_workers=2, multiprocessing_context=context, **options)
    return [(images.tolist(), numbers.tolist(), words) for images, numbers, words in loader]


@pytest.mark.parametrize(("method", "options"), [("fork", {"in_order": False}), *slow(("spawn", {}))])
def test_the_same_batches(method: str, options: Any) -> None:
    found = served(minidl.observe(method, transport="arena"), **options)
    assert sorted(found, key=lambda batch: batch[1]) == served("fork")


def test_it_is_traced_and_keeps_every_rule(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        found = served(minidl.observe(transport="arena"))
        gc.collect()
    assert found == served("fork")
    trace = read_trace(tmp_path / "t")
    assert check(trace) == []
    assert len(trace.select("yield")) == 5
    assert len(trace.select("shm_alloc")) == 0
    for name in ("slab_send", "slab_map", "slab_release"):
        assert sorted(trace.select(name)["task"].tolist()) == [*range(5)], name
    assert trace.select("slab_send")["y"].tolist() == [4 * SIZE * 4] * 5
    assert trace.loaders[1]["transport"] == "arena"


class Unknown:
    """A context of a program's own, which makes queues that nobody knows."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing.get_context("fork"), name)


@pytest.mark.parametrize(("context", "takes"), [(multiprocessing, True), (Unknown(), False)])
def test_a_module_is_a_context_and_an_unknown_one_sends_no_slabs(tmp_path: Path, context: Any, takes: bool) -> None:
    """fastai's loader has the module multiprocessing for a context."""
    numbers = [torch.full((SIZE,), float(number)) for number in range(6)]
    loader = own_iterators.FastLoader(numbers, 2)
    loader.stand_in.context = minidl.observe(context, transport="arena")
    with minidl.trace(tmp_path / "t"):
        assert [batch[0].item() for batch in loader] == list(range(6))
        gc.collect()
    trace = read_trace(tmp_path / "t")
    assert check(trace) == []
    assert len(trace.select("slab_send")) == 6 * takes


def test_workers_persist_and_a_loop_may_end_early() -> None:
    loader = DataLoader(
        Wide(40), 4, num_workers=2, persistent_workers=True,
        multiprocessing_context=minidl.observe(transport="arena"),
    )  # fmt: skip
    for _ in range(2):
        for _, (images, _, _) in zip(range(3), loader, strict=False):
            assert images.shape == (4, SIZE)
    assert [numbers[0].item() for _, numbers, _ in loader] == list(range(0, 40, 4))
    loader._iterator._shutdown_workers()  # type: ignore[union-attr]


@pytest.mark.parametrize("traced", [False, True])
def test_a_batch_that_can_not_be_pickled_is_an_error_and_no_hang(tmp_path: Path, traced: bool) -> None:
    context = minidl.observe(transport="arena")
    loader = DataLoader(wl.Numbers(4), num_workers=1, collate_fn=unpicklable, multiprocessing_context=context)
    with minidl.trace(tmp_path / "t") if traced else contextlib.nullcontext():
        iterator = iter(loader)
        with pytest.raises(Exception, match="while worker 0 pickled a batch"):
            next(iterator)
        iterator._shutdown_workers()
        del iterator
        gc.collect()
    assert not traced or len(read_trace(tmp_path / "t").select("task_error")) >= 1


def unpicklable(samples: list[Any]) -> Any:
    return lambda: samples


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="'pigeon'"):
        minidl.observe(transport="pigeon")
