"""What other settings would give: the predictions for each, the one to choose, and the words for it.

Interface: `plan(trace)` -> `SpeedPlan`: its `sentence`, `text()` and `facts()`.

Rules of use: the recommended setting has the shortest epoch; of those within CLOSE of it, the one with the fewest
workers and batches in advance, and the fewest changes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from minidl.hang.headline import headline
from minidl.speed.plan import recorded as recordings
from minidl.speed.plan.fitting import fitted
from minidl.speed.plan.predicted import Predicted, predict
from minidl.speed.plan.recorded import Recorded
from minidl.speed.plan.settings import CLOSE, OPTIONS, WORKER_METHODS, PlanError, choices
from minidl.speed.transport_costs import TransportCosts
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import percent, rounded, seconds, size, table


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
        return min(close, key=self._cost)

    def _factor(self, one: Predicted) -> float:
        """By what the rate of samples differs from the recorded one."""
        return one.by_s * self.recorded.larger(one.setting) / self.recorded.rate

    def _cost(self, one: Predicted) -> tuple[float, ...]:
        """Workers, batches in advance, changes, and the epoch: of equal settings, the one with the least is chosen."""
        changes = sum(getattr(one.setting, name) != getattr(self.recorded.base, name) for name in OPTIONS)
        return one.setting.num_workers, one.setting.capacity, changes, one.epoch

    @property
    def sentence(self) -> str:
        """The recommended setting, what it gives, and what limits it then."""
        best, now = self.recommended, self.recorded.rate
        factor = self._factor(best)
        gain = f"{factor:.3g} times today's" if abs(factor - 1) > CLOSE else "as today"
        gain += " in samples/s" * bool(best.setting.batch_size)
        limits = f"{best.limited_by} limit{'s' * (best.limited_by not in ('the CPUs', 'the workers'))}"
        if best.setting == self.recorded.base:
            return f"keep {best.setting.name}: {rounded(now)} batches/s, and no setting has a shorter epoch; {limits}"
        larger = [self._factor(one) for one in self.predicted if one.setting.num_workers > best.setting.num_workers > 0]
        even = max(larger, default=0.0) <= (1 + CLOSE) * factor
        more = f"more {'do not help' if even else 'take too long to start'}, {limits}" if larger else limits
        rate = f"{rounded(best.by_s)} batches/s ({rounded(best.low)} to {rounded(best.high)})"
        return f"{best.setting.name}: {rate}, {gain}; {more}"

    @property
    def limit(self) -> float:
        """The batches/s that the training loop itself takes, however fast the loader is."""
        step = self.recorded.steps.step.sum(axis=0) * self.predicted[0].setting.consumer
        return float(1e9 / max(1.0, step.mean()))

    @property
    def varying(self) -> list[str]:
        """The options in which settings with workers differ, but for their number."""
        kinds = [one.setting for one in self.predicted if one.setting.num_workers]
        return [name for name in OPTIONS if len({getattr(one, name) for one in kinds}) > 1]

    def text(self) -> str:
        """The sentence, a table of all settings, and what to know about it."""
        return "\n".join([self.sentence, "", *self._table(), "", *self.notes])

    def _table(self) -> list[str]:
        cells = [_cells(one, self.varying) for one in self.predicted]
        limits = [f"{one.limited_by}{' *' * (one is self.recommended)}" for one in self.predicted]
        lines = table([list(cells[0]), *(list(one.values()) for one in cells)], str.rjust)
        return [f"{line}  {limit}" for line, limit in zip(lines, ["limited by", *limits], strict=True)]

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


def _cells(one: Predicted, options: Sequence[str]) -> dict[str, str]:
    """The columns of a table's line, with these options of the loader."""
    values = {name: str(one.setting.options.get(name, "-")) for name in options}
    return {
        "workers": str(one.setting.num_workers), **values, "batches/s": rounded(one.by_s),
        "range": f"{rounded(one.low)} to {rounded(one.high)}", "waits": percent(one.waiting),
        "first": seconds(one.first), "epoch": seconds(one.epoch), "ahead": str(one.peak_batches),
        "memory": size(one.peak_bytes),
    }  # fmt: skip


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
    runs = [read(read_trace(one), dataloader) for one in (trace, other) if one is not None]
    recorded, *more = (replace(run, transports=transports or run.transports) for run in runs)
    recorded = fitted(recorded, *more) if more else recorded
    same = predict(recorded, recorded.base, 0.0)
    off = abs(np.log(same.by_s / recorded.rate))
    if recorded.held is not None:
        values = {"worker_method": WORKER_METHODS} | values
    found = SpeedPlan(recorded, same, [predict(recorded, one, off) for one in choices(recorded.base, values)])
    threads = predict(recorded, replace(found.recommended.setting, worker_method="thread"), off)
    return replace(found, notes=_notes(recorded, same, threads, other is not None))


def read(trace: Trace, dataloader: str | None = None) -> Recorded:
    """Return what the loader with the most batches cost in a run that ended well. Raises PlanError."""
    outcome = headline(trace).outcome
    if outcome.wrong:
        raise PlanError(f"{trace.path}: the run did not end well ({outcome.value}), so its times say nothing about "
                        f"other settings: see minidl doctor {trace.path}")  # fmt: skip
    return recordings.read(trace, dataloader)


def _notes(recorded: Recorded, same: Predicted, threads: Predicted, several: bool) -> list[str]:
    """What to know about the predictions."""
    off = same.by_s / recorded.rate - 1
    notes = {
        f"recorded: {recorded.base.name}, {rounded(recorded.rate)} batches/s; simulated with the same setting: "
        f"{rounded(same.by_s)} ({off:+.0%})": True,
        f"other programs used the CPUs, as {recorded.steps.others:.1f} threads would: so they do in all predictions":
            recorded.steps.others > 0,
        "the costs of another transport, or of none, are typical ones: minidl bench transport --calibrate measures "
        "this machine's": not recorded.transports.measured,
        "the dataset is iterable: it is assumed that any number of workers shares its samples equally; if it has fewer "
        "shards than workers, record that number": recorded.params.get("dataset_kind") == "iterable",
        f"{threads.setting.name}: {rounded(threads.low)} to {rounded(threads.high)} batches/s; threads get the "
        f"batches/s if their code always holds the interpreter's lock, the low end if it takes it many times in a "
        f"sample, the high end if it never does: record a run with worker_method='thread', and give both recordings":
            recorded.held is None and threads.setting.threads,
        "recorded with threads: their waits for the interpreter's lock count as waits, which other settings have not: "
        "what is predicted is too good. Record processes": recorded.base.threads,
        "one recording does not tell of a disk that is saturated, locks between workers and caches: record another "
        "number of workers, and give both recordings": not several,
    }  # fmt: skip
    return [*(note for note, holds in notes.items() if holds), *recorded.notes]
