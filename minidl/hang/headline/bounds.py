"""Headlines of runs that ended well or go on: what bounds the loader that the loop waited for longest."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import Final

import numpy as np

from minidl.hang.finding import Finding, Focus, FocusScope, RunOutcome
from minidl.hang.headline.run_context import RunContext
from minidl.speed.verdict import summed, verdict
from minidl.speed.wall_clock import Bound
from minidl.tracefile import events as ev
from minidl.tracefile.events import Outcome
from minidl.tracefile.loaders import NamedLoader, dataloaders
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import durations, total

MOST_SUMMED: Final = 20
"""The number of iterators of one DataLoader that are judged together: those with the longest waits."""


MANY: Final = 4
"""The number of steps of one kind from which one of them may be compared with the others."""


NOTABLE: Final = 0.2
"""The share of all waiting from which one wait deserves the focus."""


def _of_rank(one: NamedLoader) -> str:
    return f"rank {one.rank}: {one.name}" if one.rank >= 0 else one.name


def _is_known(trace: Trace, one: NamedLoader) -> bool:
    """Whether the trace names the DataLoader that made these iterators, and has events of one of them."""
    there = np.isin(one.iterators, trace.events["loader"]).any()
    return bool(there and trace.loaders[one.iterators[0]].get("dataloader"))


def what_bounds(run: RunContext) -> Finding:
    """What bounds the DataLoader that the loop waited for longest; its iterators, one an epoch, are judged together."""
    waits = run.spans[(run.spans["code"] == ev.NEXT[0]) & (run.spans["end"] >= 0)]
    numbers = [int(number) for number in np.unique(run.events["loader"]) if number]
    if not numbers:
        return run.finding(RunOutcome.FINE, "no iterator of a DataLoader has recorded anything")
    waited = {number: total(waits[waits["loader"] == number]) for number in numbers}
    named = dataloaders(run.trace)
    known = [one for one in named if _is_known(run.trace, one)]
    groups = {_of_rank(one): [n for n in one.iterators if n in waited] for one in known}
    single = set(numbers) - {number for group in groups.values() for number in group}
    groups |= {f"iterator {number}": [number] for number in sorted(single)}
    name, group = max(groups.items(), key=lambda item: (sum(waited[number] for number in item[1]), -min(item[1])))
    group.sort(key=lambda number: (-waited[number], number))
    number = group[0]
    together = summed(run.trace, group[:MOST_SUMMED], run.spans) if len(group) > 1 else None
    found = together or verdict(run.trace, number, run.spans)
    said, evidence = found.brief, (*([found.apart] if found.apart else []), *found.evidence)
    if len(groups) > 1:
        kind = "iterators" if name == f"iterator {number}" else "DataLoaders"
        evidence = (f"the loop waited longest for this one of {len(groups)} {kind}: {name}", *evidence)
        mine = next((one for one in known if number in one.iterators), None)
        rank = mine.rank if mine is not None and len({one.rank for one in known}) > 1 else -1
        made_at = run.trace.loaders.get(number, {}).get("made_at") if len({one.name for one in known}) > 1 else ""
        who = [*([f"rank {rank}"] if rank >= 0 else []), *([PurePath(made_at).name] if made_at else [])]
        said = f"{' '.join(who)} is {said}" if who and found.kind not in (Bound.TOO_FEW, Bound.UNSEEN) else said
    if found.kind in (Bound.NOT_INPUT, Bound.TOO_FEW, Bound.UNSEEN):
        return run.finding(RunOutcome.FINE, said, evidence, found.next_step)
    mine = waits[(waits["loader"] == number) & (waits["ey"] == Outcome.DATA)]
    later = mine[mine["bx"] > 0]  # an epoch's first batch waits for the workers' start
    named = mine[mine["task"] == found.task]
    if len(named):
        mine = named
    elif found.kind is not Bound.START_UP and len(mine) > 1:
        mine = later if 3 * total(later) >= total(mine) else mine[1:]
    longest = mine[np.argmax(durations(mine))] if len(mine) else None
    if found.kind is Bound.START_UP:
        focus = _start(run, number)
    else:
        focus = None if longest is None else _waited_for(run, longest)
    alone = found.kind is Bound.HEAD_OF_LINE
    if focus is not None and not alone and _is_one_of_many(run, focus, group, total(mine)):
        focus = dataclasses.replace(focus, frame=FocusScope.ALIKE)
    return run.finding(RunOutcome.SLOW, said, evidence, found.next_step, focus)


def _is_one_of_many(run: RunContext, focus: Focus, group: list[int], waited: int) -> bool:
    """Whether the step in focus is hardly slower than others of its kind, or its wait a small part of all waiting."""
    rows = run.spans[np.isin(run.spans["loader"], group) & (run.spans["code"] == focus.code)]
    rows = rows[rows["end"] >= 0]
    step = rows[(rows["process"] == focus.process) & (rows["begin"] == focus.span)]
    if len(rows) < MANY or not len(step):
        return False
    usual = float(np.median(durations(rows)))
    return int(durations(step)[0]) < 2 * usual or focus.end - focus.begin < waited * NOTABLE


def _start(run: RunContext, number: int) -> Focus | None:
    """The longest step of an iterator's workers before their first batch or at their end."""
    kinds = [ev.WORKER_INIT[0], ev.MAKE_FETCHER[0], ev.WORKER_START[0], ev.JOIN[0]]
    rows = run.spans[(run.spans["loader"] == number) & np.isin(run.spans["code"], kinds)]
    rows = rows[rows["end"] >= 0]
    if not len(rows):
        return None
    row = rows[np.argmax(durations(rows))]
    return run.focus_of(row, int(row["end"]))


def _waited_for(run: RunContext, row: np.void) -> Focus:
    """The step that the longest wait was for: the innermost one of its task during the wait."""
    focus = run.focus_of(row, int(row["end"]))
    spans = run.spans
    there = (spans["loader"] == row["loader"]) & (spans["task"] == row["task"]) & (spans["process"] != row["process"])
    there &= (spans["begin"] <= row["end"]) & (spans["end"] >= row["begin"])
    steps = spans[there & np.isin(spans["code"], [ev.SAMPLE[0], ev.COLLATE[0], ev.FETCH[0]])]
    if not len(steps):
        return focus
    inner = steps[steps["code"] != ev.FETCH[0]]
    steps = inner if len(inner) else steps
    overlap = np.minimum(steps["end"], row["end"]) - np.maximum(steps["begin"], row["begin"])
    step = steps[np.argmax(overlap)]
    return run.focus(step, focus.begin, focus.end, int(step["worker"]))
