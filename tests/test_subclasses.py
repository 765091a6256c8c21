"""Loaders that subclass the DataLoader and reach into it give the same on minidl's class as on torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from subclassed_loaders import Shards, multi_epochs, streaming

import minidl
from minidl.check import check
from minidl.dataloader import LoaderWithoutState
from minidl.process_stat import is_alive
from minidl.tracefile.reader import read_trace

BASES = (torch.utils.data.DataLoader, minidl.DataLoader, LoaderWithoutState)


def epochs(loader: Any, count: int = 3) -> list[Any]:
    return [[batch.tolist() for batch in loader] for _ in range(count)]


@pytest.mark.live
@pytest.mark.parametrize("workers", [0, 2])
def test_one_iterator_for_all_epochs(workers: int, tmp_path: Path) -> None:
    """timm's: an endless sampler behind the loader's back, so that the workers prefetch across epochs."""
    found = []
    with minidl.trace(tmp_path / "trace"):
        for base in BASES:
            torch.manual_seed(3)
            loader = multi_epochs(base)(range(10), batch_size=3, shuffle=True, num_workers=workers)
            found.append(epochs(loader))
            if workers:
                loader.close()
    assert found[0] == found[1] == found[2]
    assert [sorted(number for batch in epoch for number in batch) for epoch in found[1]] == [list(range(10))] * 3
    trace = read_trace(tmp_path / "trace")
    assert len(trace.select("yield")) == 24
    assert check(trace) == []


@pytest.mark.live
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_it_counts_what_it_yields(options: dict[str, Any], tmp_path: Path) -> None:
    """streaming's: an iterable dataset that is cut into shards by worker and counts its epochs where it lives."""
    found = []
    with minidl.trace(tmp_path / "trace"):
        for base in BASES:
            loader = streaming(base)(Shards(10), batch_size=3, **options)
            found.append((epochs(loader), loader.state_dict(), len(loader)))
            next(iter(loader))
            found[-1] += (loader.state_dict(),)
            workers = [worker.pid for worker in getattr(loader._iterator, "_workers", [])]
            del loader
            assert not any(map(is_alive, workers))
    assert found[0] == found[1] == found[2]
    assert found[1][1:] == ({"samples": 10}, 4, {"samples": 3})
    assert check(read_trace(tmp_path / "trace")) == []
