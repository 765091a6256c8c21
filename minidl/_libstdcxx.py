"""The C++ standard library's shuffle, number for number as libstdc++ (GCC 11 and later) computes it.

Interface: `Mt19937(seed)` is `std::mt19937`: calling it gives the next 32-bit number. `shuffle(items, draw)` is
`std::shuffle(items.begin(), items.end(), draw)`. `uniform_below(bound, draw)` is `std::uniform_int_distribution`.
The C++ standard defines the generator's numbers but not how a shuffle uses them. This is the algorithm of the library
with which the released Linux builds of torch are compiled.

Article 2 §3.3.3. Upstream: libstdc++ bits/stl_algo.h and bits/uniform_int_dist.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence
from typing import Any

import numpy as np

_NUMBERS = 1 << 32  # the number of values that one draw can have
_DRAWN_AT_ONCE = 4096


class Mt19937:
    """`std::mt19937(seed)`: uniform 32-bit numbers; only the low 32 bits of `seed` count, as in C++."""

    def __init__(self, seed: int) -> None:
        # RandomState seeds as C++ does, and NumPy guarantees its stream.
        self._state = np.random.RandomState(seed % _NUMBERS)
        self._numbers = self._stream()

    def _stream(self) -> Iterator[int]:
        while True:
            yield from self._state.randint(0, _NUMBERS, size=_DRAWN_AT_ONCE, dtype=np.uint32).tolist()

    def __call__(self) -> int:
        return next(self._numbers)


def uniform_below(bound: int, draw: Callable[[], int]) -> int:
    """Return a uniform number in [0, bound) for 1 <= bound < 2**32, by Lemire's method.

    Scaling a 32-bit number by `bound` gives 64 bits: the upper half is the result, the lower half is the
    place within the result's slot. Some slots hold one number more; redrawing the first 2**32 % bound of each evens
    them out.
    """
    scaled = draw() * bound
    if scaled % _NUMBERS < bound:  # a cheap test that nearly always avoids the division below
        surplus = _NUMBERS % bound
        while scaled % _NUMBERS < surplus:
            scaled = draw() * bound
    return scaled // _NUMBERS


def shuffle(items: MutableSequence[Any], draw: Callable[[], int]) -> None:
    """Shuffle in place: every item swaps with a random one at or before it.

    If one draw has room for two positions, n * n < 2**32, both are taken from it.
    ValueError for 2**32 items or more, which need numbers of more than 32 bits.
    """
    n = len(items)
    if n >= _NUMBERS:
        raise ValueError(f"shuffle: {n} items, but the limit of one draw is 2**32 - 1 positions; shuffle in parts")
    in_pairs = 0 < n * n < _NUMBERS
    for i, j in enumerate(_positions_in_pairs(n, draw) if in_pairs else _positions(n, draw), start=1):
        items[i], items[j] = items[j], items[i]


def _positions(n: int, draw: Callable[[], int]) -> Iterator[int]:
    for i in range(1, n):
        yield uniform_below(i + 1, draw)


def _positions_in_pairs(n: int, draw: Callable[[], int]) -> Iterator[int]:
    first = 1
    if n % 2 == 0:  # an odd number of swaps: one has a draw of its own
        yield uniform_below(2, draw)
        first = 2
    for i in range(first, n, 2):
        yield from divmod(uniform_below((i + 1) * (i + 2), draw), i + 2)
