"""Solutions of 01_datasets."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import minidl


class Windows(minidl.Dataset[Sequence[int]]):
    def __init__(self, series: Sequence[int], width: int) -> None:
        self.series, self.width = series, width

    def __len__(self) -> int:
        return len(self.series) - self.width + 1

    def __getitem__(self, index: int) -> Sequence[int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.series[index : index + self.width]


def fetch(dataset: Any, indices: Sequence[int], collate_fn: Callable[[list[Any]], Any]) -> Any:
    if hasattr(dataset, "__getitems__"):
        return collate_fn(dataset.__getitems__(indices))
    return collate_fn([dataset[index] for index in indices])


class Numbers(minidl.IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        info = minidl.get_worker_info()
        return iter(range(self.size) if info is None else range(info.id, self.size, info.num_workers))
