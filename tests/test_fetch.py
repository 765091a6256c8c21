"""The fetchers, compared with torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch.utils.data._utils.fetch as torchs
import workloads as wl

from minidl import fetch as ours


@pytest.mark.parametrize("module", [torchs, ours])
def test_the_base_class_fetches_nothing(module: Any) -> None:
    fetcher = module._BaseDatasetFetcher(wl.Numbers(3), True, list, False)
    with pytest.raises(NotImplementedError):
        fetcher.fetch([0])


def indices(batch: Any) -> Any:
    """The indices in what was fetched, without the random numbers that the samples carry."""
    if isinstance(batch, list):
        return list(map(indices, batch))
    return batch[0] if isinstance(batch, tuple) else batch


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dataset", [wl.Numbers(7), wl.Batched(7)], ids=["map", "batched"])
def test_a_map_datasets_batches(dataset: Any, batched: bool) -> None:
    index = [5, 0, 2] if batched else 5
    fetched = [m._MapDatasetFetcher(dataset, batched, wl.as_list, False).fetch(index) for m in (torchs, ours)]
    assert [indices(batch) for batch in fetched] == [index, index]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_a_streams_batches_and_its_end(batched: bool, drop_last: bool) -> None:
    def batches(module: Any) -> list[Any]:
        fetcher = module._IterableDatasetFetcher(wl.Stream(5), batched, wl.as_list, drop_last)
        seen = []
        while True:
            try:
                seen.append(indices(fetcher.fetch([None] * 2)))
            except StopIteration:
                return seen

    assert batches(ours) == batches(torchs)
    sizes = [len(batch) for batch in batches(ours)] if batched else [1] * len(batches(ours))
    assert sizes == (([2, 2] if drop_last else [2, 2, 1]) if batched else [1] * 5)
