"""Ratios of rates: how often their interval holds the true ratio, on runs whose noise is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from minidl.speed.intervals import Rate, _student, ratio


def noisy(dice: np.random.Generator, count: int, alike: float, spread: float) -> np.ndarray:
    """Times of batches, each about as far off as the one before; the mean of many is 1 ms * exp(spread**2 / 2)."""
    noise = dice.normal(size=count + 50)
    for at in range(1, len(noise)):
        noise[at] = alike * noise[at - 1] + noise[at] * math.sqrt(1 - alike**2)
    return (1e6 * np.exp(spread * noise[50:])).astype(np.int64)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("counts", "alike", "spread"),
    [((8, 30), 0.0, 0.3), ((30, 16), 0.5, 0.3), ((60, 60), 0.5, 1.0), ((100, 60), 0.8, 0.3), ((400, 400), 0.9, 0.3)],
)
def test_the_interval_holds_the_true_ratio(counts: tuple[int, int], alike: float, spread: float) -> None:
    """In 90% to 99% of 400 pairs of runs, with neighbours that are alike, and batches of 8 samples beside 16."""
    dice, held = np.random.default_rng(7), 0
    for _ in range(400):
        a, b = (noisy(dice, count, alike, spread) for count in counts)
        found = ratio(Rate.of([(np.full_like(a, 16), a)]), Rate.of([(np.full_like(b, 8), b // 5)]))
        held += found.low <= 2.5 <= found.high
    assert 0.9 <= held / 400 <= 0.99


def test_equal_measurements_leave_no_doubt() -> None:
    ones = np.ones(8, np.int64)
    found = ratio(Rate.of([(ones, ones * 3)]), Rate.of([(ones, ones * 1)]))
    assert (found.low, found.factor, found.high) == pytest.approx((3, 3, 3))


def test_three_batches_are_too_few() -> None:
    ones = np.ones(3, np.int64)
    found = ratio(Rate.of([(ones, ones * 3)]), Rate.of([(np.ones(99, np.int64), np.arange(1, 100))]))
    assert not found.is_known
    assert not found.is_certain
    assert found.factor == pytest.approx(3 / 50)


def test_what_runs_side_by_side_is_added_up() -> None:
    fast, slow = (np.full(20, 8), np.full(20, 4)), (np.full(30, 8), np.full(30, 16))
    assert math.exp(Rate.of([fast, slow]).log) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("quantile", "freedom", "student"), [(1.960, 3, 3.182), (1.960, 6, 2.447), (1.960, 18, 2.101), (2.576, 6, 3.707)]
)
def test_students_quantile(quantile: float, freedom: int, student: float) -> None:
    """As in printed tables."""
    assert _student(quantile, freedom) == pytest.approx(student, rel=0.01)
