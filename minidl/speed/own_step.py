"""What a loop's own steps consist of, by the parts of them that are spans (see `record.step_parts`).

Interface: `parts_of(spans, steps)` -> ns by part, the largest first; {} where no part was recorded. `stands_out` names
what makes some steps longer than others; `warm_up` are the first steps, in which kernels are loaded, chosen or
compiled; `device_lag` tells whether the device or the host is what the others take their time for.

Rules of use: the times are the host's: what a device still computes when a part ends is in a later part that waits for
it, or in OTHER. Parts that are recorded in sampled steps alone stand for as much in each of the others, within the time
that all steps took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows, distinct
from minidl.tracefile.spans import durations, total, within
from minidl.tracefile.words import counted, duration, percent

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

OTHER: Final = "other code"
EVALUATION, LOADER, VALIDATION, CHECKPOINT = "evaluation", "another loader", "validation", "torch.save"
COPIES: Final = "copies to a device"

_NAMES: Final = {
    ev.FORWARD[0]: "forward",
    ev.EVALUATE[0]: EVALUATION,
    ev.BACKWARD[0]: "backward",
    ev.OPTIMIZER[0]: "optimizer",
    ev.TO_DEVICE[0]: COPIES,
    ev.COLLECTIVE[0]: "collectives",
    ev.SAVE[0]: CHECKPOINT,
    ev.VALIDATION[0]: VALIDATION,
}
"""The parts in words."""

_OF_A_LOADER: Final = (ev.NEXT[0], ev.WORKER_START[0], ev.SHUTDOWN[0])
"""What a loop in a step waits for."""

_ALWAYS: Final = (*_OF_A_LOADER, *(span[0] for span in ev.ALWAYS_PARTS), ev.VALIDATION[0])
"""What is recorded in each step."""

MOST: Final = 0.5
"""What stands out is at least this part of what the long steps take longer."""

FAR_OUT: Final = 5
"""An outlier takes at least this many times the median."""

NOTABLE: Final = 20_000_000
"""An outlier takes at least so long, ns: a shorter step may only have waited for a CPU."""

BEHIND, ABREAST = 0.5, 0.1
"""Shares of a step: how far behind the host a device is that is the limit, at least; and one that waits, at most."""

BUSY: Final = 0.2
"""The share of a step for which a device that is the limit computes no part, at most."""

WARM_UP: Final = 3
"""A warm-up has at most so many steps."""


def warm_up(trace: Trace, loader: int, steps: Rows) -> Rows:
    """The first steps of an iterator's loop up to the last that takes far longer than others, if that happens once.

    steps: CONSUMER's spans of that iterator, by begin. Of a DataLoader that is iterated again, only the first iterator
    has a warm-up.
    """
    place = made_at(trace.loaders.get(loader, {}))
    again = any(other < loader and made_at(params) == place for other, params in trace.loaders.items())
    lost = trace.whole_from(loader) > 0 or (len(steps) > 0 and steps["bx"][0] > 1)
    if again or lost or len(steps) < 2 * WARM_UP:
        return steps[:0]
    took = durations(steps)
    others = took[WARM_UP:]
    far = np.flatnonzero(took[:WARM_UP] >= max(FAR_OUT * float(np.median(others)), NOTABLE))
    if not len(far) or np.count_nonzero(others >= took[far].max() / 2) > 1:  # as long ones come again
        return steps[:0]
    return steps[: far[-1] + 1]


def made_at(params: Mapping[str, Any]) -> tuple[str, str]:
    """Where a loader is made, in which rank: one that is made again there has a first batch each time."""
    return str(params.get("made_at", params)), str(params.get("rank"))


def parts_of(spans: Rows, steps: Rows) -> dict[str, int]:
    """The ns of each part of these steps, and of OTHER.

    spans: the trace's; steps: CONSUMER's spans of the iterators that are judged as one.
    """
    inner = spans[np.isin(spans["code"], [*_NAMES, *_OF_A_LOADER]) & (spans["end"] >= 0)]
    inner = inner[np.isin(inner["code"], list(_NAMES)) | ~np.isin(inner["loader"], steps["loader"])]
    found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # whether it is recorded in each step
    for process, tid in distinct(steps, "process", "tid"):
        mine = steps[(steps["process"] == process) & (steps["tid"] == tid)]
        theirs = _outermost(inner[(inner["process"] == process) & (inner["tid"] == tid)], mine)
        for code in np.unique(theirs["code"]).tolist():
            rows = theirs[theirs["code"] == code]
            ns = total(rows[within(rows, mine) >= 0])
            found[code in _ALWAYS][_NAMES.get(code, LOADER)] += ns
    rest, seen = total(steps) - found[True].total(), found[False].total()
    times = int((steps["task"] >= 0).sum()) / max(1, int(steps["by"].sum()))
    times = min(times, max(0, rest) / max(1, seen))
    known = Counter({name: round(ns * times) for name, ns in found[False].items()}) + found[True]
    if not known.keys() & _NAMES.values():
        return {}
    known[OTHER] = max(0, total(steps) - known.total())
    return dict(known.most_common())


def _outermost(rows: Rows, steps: Rows) -> Rows:
    """The spans of a thread, by begin, without those that lie in a validation in one of these steps of it."""
    around = rows[rows["code"] == ev.VALIDATION[0]]
    around = around[within(around, steps) >= 0]
    at = np.searchsorted(around["begin"], rows["begin"], side="right") - 1
    inside = (at >= 0) & (rows["code"] != ev.VALIDATION[0]) & (rows["begin"] < np.append(around["end"], 0)[at])
    outermost: Rows = rows[~inside]
    return outermost


@dataclass(frozen=True, slots=True)
class DeviceLag:
    """How far a device is behind the host in a loop's own steps, medians. behind: at the part's end at which it is
    furthest behind, ns; idle: the part of the time from a step's first part on the device to the next step's in which
    it computes none, None = unknown; it may do other work then. step: a step, ns; steps: how many were looked at;
    device: what it is called.
    """

    behind: float
    idle: float | None
    step: float
    steps: int
    device: str = "the device"

    @property
    def limit(self) -> bool | None:
        """Whether the device is what a step takes its time for; False = the host is, None = neither clearly."""
        share = self.behind / max(1.0, self.step)
        if share <= ABREAST:
            return False
        return True if share >= BEHIND and self.idle is not None and self.idle <= BUSY else None

    def words(self) -> str:
        none = "" if self.idle is None else f", and computes no part for {percent(self.idle)} of the time"
        return (
            f"{self.device} ends a part of a step up to {duration(self.behind)} after the host, in steps of "
            f"{duration(self.step)}{none} (medians of {counted(self.steps, 'step')})"
        )


def device_lag(spans: Rows, steps: Rows) -> DeviceLag | None:
    """How far the device is behind the host in these steps; None if that was not recorded in enough of them."""
    parts = spans[
        (spans["code"] == ev.DEVICE_PART[0]) & (spans["end"] >= 0) & np.isin(spans["loader"], steps["loader"])
    ]
    asked = parts["end"] - parts["ey"]  # when the host was at its end
    at = np.searchsorted(steps["begin"], asked, side="right") - 1
    mine = (at >= 0) & (asked <= steps["end"][at])
    for name in ("process", "loader"):
        mine &= parts[name] == steps[name][at]
    if len(found := np.unique(at[mine])) < WARM_UP:
        return None
    behind, first, last = np.zeros(len(steps)), np.full(len(steps), np.inf), np.zeros(len(steps))
    np.maximum.at(behind, at[mine], parts["ey"][mine])
    np.minimum.at(first, at[mine], parts["begin"][mine])
    np.maximum.at(last, at[mine], parts["end"][mine])
    two = found[:-1][np.diff(found) == 1]  # steps whose next one was looked at, too
    two = two[steps["loader"][two] == steps["loader"][two + 1]]
    none = (first[two + 1] - last[two]) / np.maximum(1, first[two + 1] - first[two])
    idle = max(0.0, float(np.median(none))) if len(two) else None
    name = "the device (simulated)" if parts["ez"].any() else "the device"
    step = float(np.median(durations(steps[found])))
    return DeviceLag(float(np.median(behind[found])), idle, step, len(found), name)


def stands_out(spans: Rows, steps: Rows, long: Rows) -> str:
    """The part that makes the `long` ones of some steps long; "" = none does, or none is known."""
    usual = steps[~np.isin(steps["begin"], long["begin"])]
    theirs, others = parts_of(spans, long), parts_of(spans, usual)
    share = len(long) / max(1, len(usual))
    more = {name: ns - others.get(name, 0) * share for name, ns in theirs.items()}
    if more.get(EVALUATION, 0) > 0 and more.get(LOADER, 0) > 0:
        more[VALIDATION] = more.pop(EVALUATION) + more.pop(LOADER)  # of a model that stays in its mode
    name = max(more, key=lambda part: more[part], default=OTHER)
    excess = total(long) - float(durations(usual).sum()) * share
    return name if name != OTHER and more[name] >= MOST * excess else ""
