"""What a loop's own steps consist of, by the parts of them that are spans (see `record.step_parts`).

Interface: `parts_of(spans, steps)` -> ns by part, the largest first; {} where no part was recorded. `stands_out` names
what makes some steps longer than others.

Rules of use: the times are the host's: what a device still computes when a part ends is in a later part that waits for
it, or in OTHER. Parts that are recorded in sampled steps alone stand for as much in each of the others, within the time
that all steps took.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows, distinct
from minidl.tracefile.spans import durations, total, within

OTHER: Final = "other code"
EVALUATION, LOADER, VALIDATION, CHECKPOINT = "evaluation", "another loader", "validation", "torch.save"

_NAMES: Final = {
    ev.FORWARD[0]: "forward",
    ev.EVALUATE[0]: EVALUATION,
    ev.BACKWARD[0]: "backward",
    ev.OPTIMIZER[0]: "optimizer",
    ev.TO_DEVICE[0]: "copies to a device",
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
