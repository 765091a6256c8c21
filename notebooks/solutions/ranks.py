"""Solutions of 03_ranks."""

from collections.abc import Sequence


def share(order: Sequence[int], rank: int, ranks: int) -> list[int]:
    each = -(-len(order) // ranks)
    return [order[(rank + step * ranks) % len(order)] for step in range(each)]


def lost_and_shared(of_ranks: Sequence[Sequence[int]], size: int) -> tuple[set[int], set[int]]:
    seen = [set(one) for one in of_ranks]
    lost = set(range(size)).difference(*seen)
    return lost, {index for index in range(size) if sum(index in one for one in seen) > 1}
