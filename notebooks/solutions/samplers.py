"""Solutions of 02_samplers."""

from collections.abc import Iterator, Sequence

import torch


class MySampler:
    def __init__(self, data: Sequence[int], generator: torch.Generator) -> None:
        self.data, self.generator = data, generator

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(len(self.data), generator=self.generator).tolist()

    def __len__(self) -> int:
        return len(self.data)


def buckets(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for begin in range(0, len(order), batch_size):
        yield order[begin : begin + batch_size]
