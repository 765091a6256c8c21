"""What other settings would give: the predictions for each, the one to choose, and the words for it.

Interface: `plan(trace)` -> `SpeedPlan`: its `sentence`, `text()` and `facts()`.

Rules of use: the recommended setting has the shortest epoch; of those within CLOSE of it, the one with the fewest
workers and batches in advance, and the fewest changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from minidl.hang.headline import headline
from minidl.speed.plan import recorded as recordings
from minidl.speed.plan.fitting import fitted
from minidl.speed.plan.predicted import Predicted, predict
from minidl.speed.plan.recorded import Recorded
from minidl.speed.plan.settings import CLOSE, LoaderSetting, PlanError, grid, sensible_workers
from minidl.speed.plan.transport_costs import TransportCosts
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import and_joined, duration, percent, size

WIDE: Final = 12
"""Characters of a column that not every table has."""


@dataclass(frozen=True)
class SpeedPlan:
    """What `plan` found. same: the simulation of the recorded setting; notes: what a recording cannot tell."""

    recorded: Recorded
    same: Predicted
    predicted: list[Predicted]
    notes: list[str] = field(default_factory=list)

    @cached_property
    def recommended(self) -> Predicted:
        """The setting to choose: see the module's rules of use."""
        best = min(one.epoch for one in self.predicted)
        close = [one for one in self.predicted if one.epoch <= best * (1 + CLOSE)]
        return min(
            close, key=lambda one: (one.setting.num_workers, one.setting.capacity, self._changes(one), one.epoch)
        )

    def _changes(self, one: Predicted) -> int:
        names = ("transport", "in_order", "persistent", "pin")
        return sum(getattr(one.setting, name) != getattr(self.recorded.base, name) for name in names)

    @property
    def sentence(self) -> str:
        """The recommended setting, what it gives, and what limits it then."""
        best, now = self.recommended, self.recorded.rate
        larger = (best.setting.batch_size or self.recorded.batch_size) / self.recorded.batch_size
        factor = best.by_s * larger / now
        gain = f"{factor:.3g} times today's" if abs(factor - 1) > CLOSE else "as today"
        gain += " in samples/s" * bool(best.setting.batch_size)
        limits = f"{best.limited_by} limit{'s' * (best.limited_by not in ('the CPUs', 'the workers'))}"
        if best.setting == self.recorded.base:
            return f"keep {best.setting.name}: no setting is faster than today's {_three(now)} batches/s; {limits}"
        there = max(one.setting.num_workers for one in self.predicted)
        more = f"more do not help, {limits}" if 0 < best.setting.num_workers < there else limits
        rate = f"{_three(best.by_s)} batches/s ({_three(best.low)} to {_three(best.high)})"
        return f"{best.setting.name}: {rate}, {gain}; {more}"

    @property
    def limit(self) -> float:
        """The batches/s that the training loop itself takes, however fast the loader is."""
        step = self.recorded.step.times(self.predicted[0].setting.consumer)
        return float(1e9 / max(1.0, (step.cpu + step.wait).mean()))

    def text(self) -> str:
        """The sentence, a table of all settings, and what to know about it."""
        return "\n".join([self.sentence, "", *self._table(), "", *self.notes])

    def _table(self) -> Iterator[str]:
        varying = [name for name in _COLUMNS if len({getattr(p.setting, name) for p in self.predicted}) > 1]
        heads = "".join(f"{_COLUMNS[name]:>{WIDE}}" for name in varying if name != "num_workers")
        yield (f"{'workers':>7}{heads}{'batches/s':>11}{'range':>16}{'waits':>7}{'first':>9}{'epoch':>9}{'ahead':>7}"
               f"{'memory':>11}  limited by")  # fmt: skip
        for one in self.predicted:
            values = "".join(f"{_value(one, name):>{WIDE}}" for name in varying if name != "num_workers")
            between = f"{_three(one.low)} to {_three(one.high)}"
            mark = " *" if one is self.recommended else ""
            yield (f"{one.setting.num_workers:>7}{values}{_three(one.by_s):>11}{between:>16}{percent(one.waiting):>7}"
                   f"{duration(one.first * 1e9):>9}{duration(one.epoch * 1e9):>9}{one.peak_batches:>7}"
                   f"{size(one.peak_bytes):>11}  {one.limited_by}{mark}")  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """The figures, for JSON."""
        same = self.recorded.rate
        return {
            "sentence": self.sentence, "settings": [one.facts() for one in self.predicted],
            "recommended": self.recommended.facts(), "notes": self.notes,
            "recorded": self.same.facts() | {"batches_per_s": same, "simulated_batches_per_s": self.same.by_s},
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<SpeedPlan {self.sentence}>"


_COLUMNS: Final = {
    "num_workers": "workers", "prefetch_factor": "prefetch", "transport": "transport", "in_order": "in_order",
    "persistent": "persistent", "pin": "pinned", "batch_size": "batch", "cpus": "CPUs",
}  # fmt: skip


def _value(one: Predicted, name: str) -> str:
    value = getattr(one.setting, name)
    if not one.setting.num_workers and name in ("prefetch_factor", "transport", "in_order", "persistent"):
        return "-"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


# --- From a recording to predictions ----------------------------------------------------------------------------------
def plan(
    trace: Trace | str | os.PathLike[str],
    other: Trace | str | os.PathLike[str] | None = None,
    *,
    dataloader: str | None = None,
    transports: TransportCosts | None = None,
    **values: Any,
) -> SpeedPlan:
    """Predict what other settings would give, from one recording, or from two with different numbers of workers.

    values: lists by the name of a LoaderSetting's field (num_workers=[0, 2, 4], transport=["arena"]), or one value for
    all. transports: what transports cost, if that is measured already. Raises PlanError if nothing can be predicted, or
    a setting is refused.
    """
    recorded = read(read_trace(trace), dataloader)
    recorded = replace(recorded, transports=transports or recorded.transports)
    recorded = recorded if other is None else fitted(recorded, read(read_trace(other), dataloader))
    same = predict(recorded, recorded.base, 0.0)
    off = abs(np.log(same.by_s / recorded.rate))
    asked = choices(recorded, **{name: _listed(value) for name, value in values.items()})
    return SpeedPlan(
        recorded, same, [predict(recorded, one, off) for one in asked], _notes(recorded, same, other is not None)
    )


def read(trace: Trace, dataloader: str | None = None) -> Recorded:
    """Return what the loader with the most batches cost in a run that ended well. Raises PlanError."""
    outcome = headline(trace).outcome
    if outcome.wrong:
        raise PlanError(f"{trace.path}: the run did not end well ({outcome.value}), so its times say nothing about "
                        f"other settings: see minidl doctor {trace.path}")  # fmt: skip
    return recordings.read(trace, dataloader)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple, range)) else [value]


def choices(recorded: Recorded, **values: Sequence[Any]) -> list[LoaderSetting]:
    """Return the settings to predict; what is not asked for is as recorded, and the workers are a sensible range."""
    base, asked = recorded.base, {name: some for name, some in values.items() if some}
    cpus = max(map(float, asked.get("cpus") or [base.cpus]))
    asked.setdefault("num_workers", sensible_workers(cpus, base.num_workers))
    if not set(values) - {"num_workers", "cpus", "samples", "consumer"}:
        asked["transport"] = ["upstream", "arena"]
    return grid(base, **asked)


def _notes(recorded: Recorded, same: Predicted, several: bool) -> list[str]:
    """What to know about the predictions."""
    base, off = recorded.base, same.by_s / recorded.rate - 1
    notes = [f"recorded: {base.name}, {_three(recorded.rate)} batches/s; simulated with the same setting: "
             f"{_three(same.by_s)} ({off:+.0%})"]  # fmt: skip
    if recorded.others:
        notes.append(
            f"other programs used the CPUs, as {recorded.others:.1f} threads would: so they do in all predictions"
        )
    if not recorded.transports.measured:
        notes.append("the costs of another transport, or of none, are typical ones: minidl bench transport --calibrate "
                     "measures this machine's")  # fmt: skip
    if recorded.trace.loaders and any(one.get("dataset_kind") == "iterable" for one in recorded.trace.loaders.values()):
        notes.append("the dataset is iterable: it is assumed that any number of workers shares its samples equally")
    cannot = ["a disk that is saturated", "locks between workers", "caches"]
    if not several:
        notes.append(f"one recording does not tell of {and_joined(cannot)}: record another number of workers, and give "
                     f"both recordings")  # fmt: skip
    return [*notes, *recorded.notes]
