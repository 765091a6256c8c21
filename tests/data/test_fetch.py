"""The fetchers, compared with torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch.utils.data._utils.fetch as torchs
import workloads as wl

from minidl.data import fetch as ours


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


class Watched:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def samples(self, count: int) -> None:
        self.told.append(("samples", count))

    def sample(self, position: int, index: Any) -> None:
        self.told.append((position, index))

    def collate(self, count: int) -> None:
        self.told.append(("collate", count))


COLLATE = ("collate", 3)


@pytest.mark.parametrize(
    ("dataset", "batched", "index", "told"),
    [
        (wl.Numbers(7), True, [5, 0, 2], [(0, 5), (1, 0), (2, 2), COLLATE]),
        (wl.Numbers(7), False, 5, [(0, 5), ("collate", 1)]),
        (wl.Batched(7), True, [5, 0, 2], [("samples", 3), COLLATE]),
        (wl.Batched(7), True, iter([5]), [("samples", 1), ("collate", 1)]),
        (wl.Stream(5), True, [None] * 3, [(0, None), (1, None), (2, None), COLLATE]),
        (wl.Stream(5), False, None, [(0, None), ("collate", 1)]),
    ],
    ids=["map", "one sample", "batched", "an iterator", "stream", "one of a stream"],
)
def test_each_sample_is_told_before_it_is_fetched(dataset: Any, batched: bool, index: Any, told: list[Any]) -> None:
    kind = ours._DatasetKind.Iterable if isinstance(dataset, wl.Stream) else ours._DatasetKind.Map
    watched = Watched()
    ours._DatasetKind.create_fetcher(kind, dataset, batched, wl.as_list, False, watched).fetch(index)
    assert watched.told == told


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_fetcher_is_made_of_what_the_loader_has(drop_last: bool) -> None:
    watched = Watched()
    made = ours._DatasetKind.create_fetcher(ours._DatasetKind.Map, wl.Numbers(1), True, list, drop_last, watched)
    assert (made.drop_last, made.progress) == (drop_last, watched)


def test_what_has_no_length_is_told_as_minus_one() -> None:
    class Generated:
        def __getitems__(self, indices: Any) -> Any:
            return (index for index in indices)

    watched = Watched()
    ours._MapDatasetFetcher(Generated(), True, list, False, watched).fetch(number for number in range(2))
    assert watched.told == [("samples", -1), ("collate", -1)]


def test_a_stream_that_has_ended_is_not_asked_again() -> None:
    class Once:
        """An iterator that must not be asked after its end, as a file's may not."""

        left = 3
        ended = False

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            assert not self.ended
            if not self.left:
                self.ended = True
                raise StopIteration
            self.left -= 1
            return self.left

    fetcher = ours._IterableDatasetFetcher(Once(), True, list, drop_last=False, progress=Watched())
    assert [fetcher.fetch([0, 1]), fetcher.fetch([0, 1])] == [[2, 1], [0]]
    assert isinstance(fetcher.progress, Watched)
    for _ in range(2):
        with pytest.raises(StopIteration):
            fetcher.fetch([0, 1])
