"""The prediction for one setting of a recorded loader, with its range.

Interface: `predict(recorded, setting, off)` -> `Predicted`.

Rules of use: the range is that of simulations of batches drawn from the recording in blocks, widened by how far the
simulation of the recorded setting is from the recording itself, and by the error that is usual for others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from minidl.speed.plan.loading import Costs, Loading, load
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
recorded one (median error 2% to 4%, 90th percentile 13% to 22%, by the machine and its load)."""

HANDED: Final = 80e-6
"""Seconds that a sample may lose if threads take the interpreter's lock from each other in it, as `minidl bench plan`
measures with many tiny samples: without that, four threads had 0.47 times the low end, eight 0.41 times.
"""

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
        with_workers = self.setting.num_workers > 0
        return asdict(self.setting) | {
            "prefetch_factor": self.setting.prefetch_factor * with_workers,
            "transport": self.setting.transport if self.setting.way != "alone" else None,
            "batch_size": self.setting.batch_size or None, "batches_per_s": self.by_s, "low": self.low,
            "high": self.high, "waiting_share": self.waiting, "first_batch_s": self.first, "epoch_s": self.epoch,
            "peak_batches": self.peak_batches, "peak_bytes": self.peak_bytes, "limited_by": self.limited_by,
        }  # fmt: skip


def predict(recorded: Recorded, setting: LoaderSetting, off: float) -> Predicted:
    """Simulate one setting. off: the relative error of the simulation of the recorded one.

    What threads hold the interpreter's lock for is unknown: they are as fast as if it were for all of their CPU time,
    and the range reaches to what they are if it is for none, and if they take it from each other in each sample.
    """
    if setting.threads and recorded.held is None:
        slow, fast = (predict(replace(recorded, held=held), setting, off) for held in (1.0, 0.0))
        handed = HANDED * recorded.steps.samples * recorded.larger(setting) * (1 - 1 / setting.num_workers)
        return replace(slow, low=1 / (1 / slow.low + handed), high=max(slow.high, fast.high))
    costs = recorded.costs(setting)
    found = load(costs, setting, recorded.order(setting))
    model = MODEL * (setting != recorded.base)
    spread = float(np.exp(np.hypot(LIKELY * np.hypot(_spread(costs, setting), model), off)))
    low, high = found.by_s / spread, found.by_s * spread
    first, batches = float(found.yields[0]) / 1e9, recorded.epoch / recorded.larger(setting)
    ends = setting.num_workers and not (setting.persistent_workers or setting.threads)
    epoch = first + max(0.0, batches - 1) / found.by_s + (recorded.shutdown / 1e9 if ends else 0.0)
    return Predicted(setting, found.by_s, low, high, found.waiting, first, epoch, *found.peak, _limit(found))


def _spread(costs: Costs, setting: LoaderSetting) -> float:
    """The standard deviation of the logarithm of the rate, by simulations of blocks of batches that are drawn."""
    there, random = costs.fetch.shape[1], np.random.default_rng(0)
    block = max(1, there // BLOCKS)
    length = max(min(there, DRAWN), 4 * setting.capacity, block)
    rates = []
    for _ in range(DRAWS):
        begins = random.integers(0, max(1, there - block + 1), size=-(-length // block))
        order: Ints = (begins[:, None] + np.arange(block)).ravel()[:length]
        rates.append(load(costs, setting, order).by_s)
    return float(np.std(np.log(rates), ddof=1)) * float(min(1.0, length / there) ** 0.5)


def _limit(found: Loading) -> str:
    """What limits the setting, in words."""
    workers, cpus = found.setting.num_workers, found.setting.cpus
    if not workers:
        return "fetching in the loop itself"
    if found.waiting < KEEPS_UP:
        return "the training loop"
    if found.starved / found.time < KEEPS_UP:
        return "the loader's thread"
    if found.used * found.costs.held >= FULL:
        return "the interpreter's lock"
    if found.used + min(found.costs.others, cpus) >= FULL * cpus:
        return "the CPUs"
    if found.idle / (found.time * workers) > LONG and found.blocked / found.time > KEEPS_UP:
        return "one slow batch in order"
    return "the workers" if not found.costs.exclusive else "what workers share"
