"""The prediction for one setting of a recorded loader, with its range.

Interface: `predict(recorded, setting, off)` -> `Predicted`.

Rules of use: the range is that of simulations of batches drawn from the recording in blocks, widened by how far the
simulation of the recorded setting is from the recording itself, and by the error that is usual for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from minidl.speed.plan.loading import Loaded, load, steady
from minidl.speed.plan.recorded import Recorded
from minidl.speed.plan.settings import LoaderSetting
from minidl.tracefile.arrays import Ints

DRAWS: Final = 6
"""Simulations from which the range is estimated, for each setting."""

DRAWN: Final = 300
"""Most batches of each."""

BLOCKS: Final = 12
"""A recording is cut into so many blocks of neighbours; each simulation draws as many, with repetition."""

MODEL: Final = 0.07
"""The standard deviation of what the model leaves out, as `minidl bench plan` measures it for other settings than the
recorded one (median error 2.2%, 90th percentile 13%)."""

LIKELY: Final = 1.96
"""Standard deviations of an interval of 95%."""

KEEPS_UP: Final = 0.05
"""The share of waiting below which the training loop is what limits."""

FULL: Final = 0.93
"""The share of the CPUs in use from which they limit."""

LONG: Final = 0.25
"""The share of a cycle that one cause must take to be the limit."""


@dataclass(frozen=True)
class Predicted:
    """The prediction for one setting.

    by_s, low, high: batches/s in the steady state, with a range of 95%. waiting: the share of the loop's time in which
    it waits; first, epoch: s to an epoch's first batch, and of a whole epoch.
    """

    setting: LoaderSetting
    by_s: float
    low: float
    high: float
    waiting: float
    first: float
    epoch: float
    peak_batches: int
    peak_bytes: int
    limited_by: str

    def facts(self) -> dict[str, Any]:
        """The figures, for JSON."""
        setting = self.setting
        return {
            "num_workers": setting.num_workers, "prefetch_factor": setting.prefetch_factor * (setting.num_workers > 0),
            "transport": setting.transport if setting.num_workers else None, "in_order": setting.in_order,
            "persistent_workers": setting.persistent, "pin_memory": setting.pin,
            "batch_size": setting.batch_size or None,
            "cpus": setting.cpus, "samples": setting.samples, "consumer": setting.consumer, "batches_per_s": self.by_s,
            "low": self.low, "high": self.high, "waiting_share": self.waiting, "first_batch_s": self.first,
            "epoch_s": self.epoch, "peak_batches": self.peak_batches, "peak_bytes": self.peak_bytes,
            "limited_by": self.limited_by,
        }  # fmt: skip


def predict(recorded: Recorded, setting: LoaderSetting, off: float) -> Predicted:
    """Simulate one setting. off: the relative error of the simulation of the recorded one."""
    costs, order = recorded.costs(setting), recorded.order(setting)
    found = load(costs, setting, order, recorded.others)
    count, ns = steady(found.yields, setting.capacity)
    by_s = 1e9 * count / ns
    model = MODEL * (setting != recorded.base)
    spread = np.hypot(LIKELY * np.hypot(_spread(recorded, setting, len(costs.fetch)), model), off)
    first = found.yields[0] / 1e9
    batches = recorded.epoch / (setting.batch_size / recorded.batch_size if setting.batch_size else 1.0)
    ending = recorded.shutdown / 1e9 if setting.num_workers and not setting.persistent else 0.0
    return Predicted(
        setting,
        by_s,
        by_s * float(np.exp(-spread)),
        by_s * float(np.exp(spread)),
        waiting=float(found.waits[1:].sum() / max(1.0, found.yields[-1] - found.yields[0])),
        first=float(first),
        epoch=float(first + max(0.0, batches - 1) / by_s + ending),
        peak_batches=found.peak_batches,
        peak_bytes=found.peak_bytes,
        limited_by=_limit(found, setting, recorded),
    )


def _spread(recorded: Recorded, setting: LoaderSetting, there: int) -> float:
    """The standard deviation of the logarithm of the rate, by simulations of blocks of batches that are drawn."""
    costs, random = recorded.costs(setting), np.random.default_rng(0)
    block = max(1, there // BLOCKS)
    length = max(min(there, DRAWN), 4 * setting.capacity, block)
    logs = []
    for _ in range(DRAWS):
        begins = random.integers(0, max(1, there - block + 1), size=-(-length // block))
        order: Ints = (begins[:, None] + np.arange(block)).ravel()[:length]
        count, ns = steady(load(costs, setting, order, recorded.others).yields, setting.capacity)
        logs.append(np.log(count / ns))
    return float(np.std(logs, ddof=1)) * float(min(1.0, length / there) ** 0.5)


def _limit(found: Loaded, setting: LoaderSetting, recorded: Recorded) -> str:
    """What limits the setting, in words."""
    time = max(1.0, float(found.yields[-1] - found.yields[0]))
    if not setting.num_workers:
        return "fetching in the loop itself"
    if found.waits[1:].sum() / time < KEEPS_UP:
        return "the training loop"
    if found.starved / time < KEEPS_UP:
        return "the loader's thread"
    if found.used + min(recorded.others, setting.cpus) >= FULL * setting.cpus:
        return "the CPUs"
    if found.idle / (time * setting.num_workers) > LONG and found.blocked / time > KEEPS_UP:
        return "one slow batch in order"
    return "the workers" if not recorded.exclusive else "what workers share"
