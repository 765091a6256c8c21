"""How good the number of workers is that a loader chooses: each workload with `num_workers="auto"` and fixed numbers.

Interface: `bench_auto(quick)` -> rows: the rate after the first epoch, compared with the best fixed number's; the last
group sums up: the least share of the best, how many have 90% of it, and the least share of no workers' rate.
"""

from __future__ import annotations

import statistics
from typing import Any, Final

import numpy as np

from minidl.prove.bench.child import in_child
from minidl.prove.bench.pairs import Row
from minidl.prove.bench.planned import WORKERS, Workload, workloads
from minidl.speed.plan.loading import steady_rate
from minidl.terminal import progress

GOOD: Final = 0.9
"""The share of the best fixed number's rate that a choice should reach."""


def bench_auto(quick: bool) -> list[Row]:
    """Measure each workload with each number of workers, and with one that the loader chooses. quick: once, not thrice.

    Values are batches/s of each epoch after the first, compared with those of the best fixed number.
    """
    rows = [_row(name, workload, 1 if quick else 3) for name, workload in workloads().items()]
    of_best, of_none = ([statistics.median(row.values) / to(row) for row in rows] for to in (_best, _none))
    summary = {"of the best, least": min(of_best), f"at least {GOOD:.0%} of the best, of all": float(
        np.mean([share >= GOOD for share in of_best])), "of no workers, least": min(of_none)}  # fmt: skip
    return rows + [Row("all workloads", what, "share", (value,)) for what, value in summary.items()]


def _best(row: Row) -> float:
    return row.base[0]


def _none(row: Row) -> float:
    return row.extra["no workers"]


def _row(name: str, workload: Workload, rounds: int) -> Row:
    rates: dict[Any, list[float]] = {number: [] for number in (*WORKERS, "auto")}
    last = 0
    for count in range(rounds):
        for number, own in rates.items():
            progress(f"auto: {name}: {number} workers, round {count + 1} of {rounds}")
            *epochs, last = in_child(_rates, workload, number)
            own += epochs
    progress("")
    fixed = {number: statistics.median(rates[number]) for number in WORKERS}
    best = max(fixed, key=lambda number: fixed[number])
    chosen = tuple(rates["auto"])
    extra = {"chosen": float(last), "best": float(best), "no workers": fixed[0]}
    return Row(name, "auto", "batches/s", chosen, "best fixed", (fixed[best],) * len(chosen), extra)


def _rates(workload: Workload, number: Any) -> list[float]:
    """Batches/s of each epoch, but for the loader's first one if it chooses; and the workers that it has at last."""
    with workload.loader(number) as loader:
        epochs = [workload.train(loader) for _ in range(3 if number == "auto" else 1)]
        count = int(loader.num_workers)
    return [*(steady_rate([came], 2 * count) for came in epochs[-2:]), count]
