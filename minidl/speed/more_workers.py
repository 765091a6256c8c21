"""How much more workers would help the loader that bounds a run, as a part of the next step.

Interface: `more_workers(trace, loader, found)` -> "6 workers: about 1.8 times as many batches/s (1.6 to 2), by minidl
plan"; "" = a plan has no answer that can be relied on.

Rules of use: there is no answer unless the simulation of the recorded setting AGREES with the recording, no other
program used the CPUs, samples compute (workers may share what samples wait or sleep for: a disk, a network, a limit of
requests), and the whole range is WORTH it. Few and short simulations find the setting: 0.2 s of a CPU at most.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from minidl.speed.plan.loading import CPU, WAIT, load
from minidl.speed.plan.predicted import predict
from minidl.speed.plan.recorded import Recorded, costs_of
from minidl.speed.plan.settings import CLOSE, LoaderSetting, PlanError, sensible_workers
from minidl.speed.side import groups
from minidl.speed.verdict import Verdict
from minidl.speed.wall_clock import Bound, Cause
from minidl.tracefile.reader import Trace
from minidl.tracefile.words import counted

AGREES: Final = 0.15
"""The simulation of the recorded setting is at most so far from the recording, as a logarithm."""

WORTH: Final = 1.15
"""The factor that the low end of the range has to reach."""

SHORT: Final = 200
"""Batches of a simulation that finds the number of workers."""

_KNOWN: Final = (None, "slow samples")
"""Reasons that a simulation knows, or that do not matter to it."""


def more_workers(trace: Trace, loader: int, found: Verdict) -> str:
    """What more workers would give; loader: an iterator that is judged."""
    reason = found.reason.name if found.reason is not None else None
    supplied = found.kind is Bound.SUPPLY and found.cause in (Cause.SAMPLES, Cause.COLLATE)
    streams = trace.loaders.get(loader, {}).get("dataset_kind") == "iterable"  # workers may not share it equally
    mine = next((one for one in groups(trace) if loader in one[0]), None)
    if not supplied or reason not in _KNOWN or streams or mine is None or "planned" in trace.manifest:
        return ""
    try:
        recorded = costs_of(trace, *mine)
    except PlanError:
        return ""
    waits = recorded.steps.fetch[WAIT].sum() > recorded.steps.fetch[CPU].sum()
    return "" if recorded.steps.others or waits else _gain(recorded)


def _gain(recorded: Recorded) -> str:
    base = recorded.base
    off = math.log(_rate(recorded, base) / recorded.rate)
    more = [n for n in sensible_workers(base.cpus, base.num_workers) if n > base.num_workers]
    if abs(off) > AGREES or not more:
        return ""
    rates = {n: _rate(recorded, replace(base, num_workers=n)) for n in more}
    fewest = min(n for n in more if rates[n] >= max(rates.values()) * (1 - CLOSE))
    there = predict(recorded, replace(base, num_workers=fewest), off)
    low, about, high = (rate / recorded.rate for rate in (there.low, there.by_s, there.high))
    if low < WORTH:
        return ""
    gives = f"about {about:.2g} times as many batches/s ({low:.2g} to {high:.2g})"
    return f"{counted(fewest, 'worker')}: {gives}, by minidl plan"


def _rate(recorded: Recorded, setting: LoaderSetting) -> float:
    """Batches/s of a short simulation."""
    return load(recorded.costs(setting), setting, recorded.order(setting)[: max(SHORT, 8 * setting.capacity)]).by_s
