"""Cost of the samplers with many indices, beside torch's.

Interface: `bench_samplers(n)`. With n = 20 million a round takes about a minute, and up to 2 GiB.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.utils.data

import minidl.data.distributed
import minidl.data.sampler
from minidl.prove.bench.child import in_child, metered
from minidl.prove.bench.pairs import Measured, Row, compare

_Libraries = dict[str, Any]
_DISTRIBUTED: _Libraries = {"torch": torch.utils.data, "minidl": minidl.data.distributed}
_SAMPLER: _Libraries = {"torch": torch.utils.data, "minidl": minidl.data.sampler}
_CASES: dict[str, Callable[[str, range], Iterable[int]]] = {
    "RandomSampler": lambda library, data: _SAMPLER[library].RandomSampler(data),
    "SubsetRandomSampler": lambda library, data: _SAMPLER[library].SubsetRandomSampler(data),
    "DistributedSampler, one rank of 8": lambda library, data: _DISTRIBUTED[library].DistributedSampler(data, 8, 3),
    "DistributedSampler, one rank of 8, not shuffled": lambda library, data: _DISTRIBUTED[library].DistributedSampler(
        data, 8, 3, shuffle=False
    ),
}


def bench_samplers(n: int, rounds: int = 3) -> list[Row]:
    """Measure one epoch of each sampler over `n` indices, torch's and ours, each time in a process of its own.

    Values are seconds until the last index; extra: seconds until the first, and MiB by which the process grew.
    """
    return [row for case in _CASES for row in _rows(case, n, rounds)]


def _rows(case: str, n: int, rounds: int) -> list[Row]:
    turns = {library: partial(in_child, _measure, library, case, n) for library in ("torch", "minidl")}
    return compare("samplers", f"{case}, {n:,} indices", "s", turns, rounds, {"minidl": "torch"}, warm=False)


def _measure(library: str, case: str, n: int) -> Measured:
    """Return the seconds until the last and until the first index, and MiB."""
    sampler = _CASES[case](library, range(n))
    with metered() as meter:
        start = time.perf_counter()
        indices = iter(sampler)
        next(indices)
        first = time.perf_counter() - start
        deque(indices, maxlen=0)
    return Measured(meter.seconds, {"first index s": first, "MiB": meter.mib})
