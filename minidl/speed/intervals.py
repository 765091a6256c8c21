"""The ratio of two rates with its interval, by measurements that depend on their neighbours.

Interface: `Rate.of(streams)` is a rate with its variance; `ratio(a, b)` -> `Ratio`, B's rate by A's.

Rules of use: neighbouring batches are alike, since a busy moment slows several. So each run is cut into blocks of
consecutive batches, and a block counts once; if neighbouring blocks are alike, too, the interval gets wider by what
their correlation costs. The interval is Student's, on the logarithms of the blocks' rates, with Welch's degrees of
freedom. It tells how exactly a run shows its own rate, not how much runs vary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from minidl.tracefile.arrays import Ints

FEWEST: Final = 4
"""With fewer measurements there is no interval, and with fewer blocks it would be too wide to be of use."""

MOST_BLOCKS, BLOCK = 10, 8
"""A run is cut into at most so many blocks; into fewer if they would have fewer measurements than BLOCK."""

MOST_ALIKE: Final = 0.5
"""The largest correlation of neighbouring blocks that is corrected for: a larger one is a trend, as of a cold cache."""

LIKELY, SURE = 1.960, 2.576
"""Normal quantiles of an interval of 95%, and of one of 99%, for tables: among many rows, few are wrong."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Work by time. log: its natural logarithm; variance: of that, NaN with fewer than FEWEST measurements.

    Without any, both are NaN.
    """

    log: float
    variance: float
    blocks: int

    @property
    def by_s(self) -> float:
        """The rate by s, of times in ns."""
        return math.exp(self.log) * 1e9

    @classmethod
    def of(cls, streams: Sequence[tuple[Ints, Ints]]) -> Rate:
        """The rate of what runs side by side, added up. streams: work and time of each measurement, in order."""
        fewest = min(len(took) for _, took in streams)
        whole = math.log(_rate(streams)) if fewest else float("nan")
        if fewest < FEWEST:
            return cls(whole, float("nan"), 0)
        blocks = int(np.clip(fewest // BLOCK, FEWEST, MOST_BLOCKS))
        cut = [zip(*(np.array_split(column, blocks) for column in stream), strict=True) for stream in streams]
        means = np.log([_rate(block) for block in zip(*cut, strict=True)])
        return cls(whole, _variance(means - means.mean()), blocks)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its interval; low and high are NaN if there are too few measurements."""

    factor: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        return bool(np.isfinite(self.low))

    @property
    def is_certain(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.low > 1 or self.high < 1

    def times(self, by: float) -> Ratio:
        """This ratio of something that is `by` times as large in B."""
        return Ratio(self.factor * by, self.low * by, self.high * by)


def ratio(a: Rate, b: Rate, width: float = LIKELY) -> Ratio:
    """B's rate by A's. width: a normal quantile, LIKELY or SURE."""
    difference, variance = b.log - a.log, a.variance + b.variance
    if not variance > 0:  # NaN, or measurements that are all equal
        reach = variance
    else:
        freedom = variance**2 / sum(one.variance**2 / (one.blocks - 1) for one in (a, b))
        reach = _student(width, freedom) * variance**0.5
    low, factor, high = (float(np.exp(difference + step)) for step in (-reach, 0, reach))
    return Ratio(factor, low, high)


def _rate(streams: Sequence[tuple[Ints, Ints]]) -> float:
    return sum(max(1.0, float(work.sum())) / max(1.0, float(took.sum())) for work, took in streams)


def _variance(around: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """The variance of the mean of values, of which these are the distances from it, in order of time."""
    squares = float(around @ around)
    if not squares:
        return 0.0
    count = len(around)
    alike = float(around[1:] @ around[:-1]) / squares + 1 / count  # independent ones show -1 / count on average
    alike = min(max(alike, 0.0), MOST_ALIKE)
    return squares / (count - 1) / count * (1 + alike) / (1 - alike)


def _student(z: float, freedom: float) -> float:
    """Student's quantile by the normal one: Abramowitz and Stegun 26.7.5, within 1% from 3 degrees on at 95%."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
