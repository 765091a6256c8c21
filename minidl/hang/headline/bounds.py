"""Headlines of runs that ended well or go on: what bounds the loader that the loop waited for longest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple

import numpy as np

from minidl.hang.finding import Finding, Focus, FocusScope, RunOutcome
from minidl.hang.headline.run_context import RunContext
from minidl.speed.more_workers import more_workers
from minidl.speed.verdict import ROOM, Verdict, summed, verdict
from minidl.speed.wall_clock import Bound, Cause
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
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


_STEPS: Final[dict[Cause | None, list[int]]] = {
    Cause.SAMPLES: [ev.SAMPLE[0]],
    Cause.COLLATE: [ev.COLLATE[0]],
    Cause.IPC: [ev.RESULT_PICKLE[0], ev.RESULT_WRITE[0]],
    Cause.REBUILD: [ev.RESULT_REBUILD[0]],
    Cause.PIN: [ev.PIN[0]],
}
"""The steps that a cause is about: the focus lies on one of them, so that it shows what the title says."""

_FETCHING: Final = (ev.SAMPLE[0], ev.COLLATE[0], ev.FETCH[0])

_ENDED_WELL: Final = (Bound.NOT_INPUT, Bound.TOO_FEW, Bound.UNSEEN)
_UNNAMED: Final = (Bound.TOO_FEW, Bound.UNSEEN)


class _Judged(NamedTuple):
    """Iterators that are judged together, the one that the loop waited for longest first.

    loader: the DataLoader that made them; None = it is unknown, and this is a single iterator.
    """

    loader: NamedLoader | None
    iterators: tuple[int, ...]

    @property
    def name(self) -> str:
        if self.loader is None:
            return f"iterator {self.iterators[0]}"
        return f"rank {self.loader.rank}: {self.loader.name}" if self.loader.rank >= 0 else self.loader.name


def what_bounds(run: RunContext) -> Finding:
    """The bound of the DataLoader that the loop waited for longest. Its iterators, one an epoch, are judged as one."""
    waits = run.spans_of(ev.NEXT[:1])
    waits = waits[waits["end"] >= 0]
    numbers = [int(number) for number in np.unique(run.events["loader"]) if number]
    waited = {number: total(waits[waits["loader"] == number]) for number in numbers}
    if not waited:
        return run.finding(RunOutcome.FINE, "no iterator of a DataLoader has recorded anything")
    every = _groups(run, waited)
    group = max(every, key=lambda one: (sum(waited[number] for number in one.iterators), -min(one.iterators)))
    who = _who(run, group, every) if len(every) > 1 else ""
    room = ROOM - len(who)
    together = summed(run.trace, group.iterators[:MOST_SUMMED], run.spans, room) if len(group.iterators) > 1 else None
    found = together or verdict(run.trace, group.iterators[0], run.spans, room)
    said, evidence = found.sentence, (*([found.apart] if found.apart else []), *found.evidence)
    if len(every) > 1:
        kind = "DataLoaders" if group.loader is not None else "iterators"
        evidence = (f"the loop waited longest for this one of {len(every)} {kind}: {group.name}", *evidence)
        said = f"{who} is {said}" if who and found.kind not in _UNNAMED else said
    if found.kind in _ENDED_WELL:
        return run.finding(RunOutcome.FINE, said, evidence, found.next_step)
    more = "" if run.runs else more_workers(run.trace, group.iterators[0], found)
    step = "; ".join(filter(None, (found.next_step, more)))
    focus = _focus(run, group, found, waits)
    if found.reason is not None and found.reason.row is not None:
        row = found.reason.row
        focus = run.focus(row, int(row["begin"]), int(row["end"]), int(row["worker"]))
    return run.finding(RunOutcome.SLOW, said, evidence, step, focus)


def _groups(run: RunContext, waited: dict[int, int]) -> list[_Judged]:
    """The DataLoaders that the trace names, and each other iterator by itself. waited: for each iterator, ns."""

    def ranked(numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted((n for n in numbers if n in waited), key=lambda number: (-waited[number], number)))

    known = [one for one in dataloaders(run.trace) if _is_known(run.trace, one)]
    groups = [_Judged(one, ranked(one.iterators)) for one in known]
    single = waited.keys() - {number for group in groups for number in group.iterators}
    return groups + [_Judged(None, (number,)) for number in sorted(single)]


def _is_known(trace: Trace, one: NamedLoader) -> bool:
    """Whether the trace names the DataLoader that made these iterators, and has events of one of them."""
    there = np.isin(one.iterators, trace.events["loader"]).any()
    return bool(there and trace.loaders[one.iterators[0]].get("dataloader"))


def _who(run: RunContext, group: _Judged, every: list[_Judged]) -> str:
    """The words that tell a DataLoader from the others: its rank, and the line that made it."""
    known = [one.loader for one in every if one.loader is not None]
    ranks, names = {one.rank for one in known}, {one.name for one in known}
    rank = f"rank {group.loader.rank}" if group.loader is not None and group.loader.rank >= 0 and len(ranks) > 1 else ""
    made_at = run.trace.loaders.get(group.iterators[0], {}).get("made_at") or ""
    return " ".join(filter(None, (rank, PurePath(made_at).name if len(names) > 1 else "")))


def _focus(run: RunContext, group: _Judged, found: Verdict, waits: Rows) -> Focus | None:
    """The step that the longest wait was for, or the longest step of a start."""
    number = group.iterators[0]
    mine = waits[(waits["loader"] == number) & (waits["ey"] == Outcome.DATA)]
    named = mine[mine["task"] == found.task]
    later = mine[mine["bx"] > 0]  # an epoch's first batch waits for the workers' start
    if len(named):
        mine = named
    elif found.kind is not Bound.START_UP and len(mine) > 1:
        mine = later if 3 * total(later) >= total(mine) else mine[1:]
    if found.kind is Bound.START_UP:
        focus = _start(run, number)
    else:
        focus = _waited_for(run, mine[np.argmax(durations(mine))], found.cause) if len(mine) else None
    alone = found.kind is Bound.HEAD_OF_LINE
    if focus is not None and not alone and _is_one_of_many(run, focus, group.iterators, total(mine)):
        return dataclasses.replace(focus, frame=FocusScope.ALIKE)
    return focus


def _is_one_of_many(run: RunContext, focus: Focus, group: Sequence[int], waited: int) -> bool:
    """Whether the step in focus is hardly slower than others of its kind, or its wait a small part of all waiting."""
    rows = run.spans_of([focus.code])
    rows = rows[np.isin(rows["loader"], group)]
    rows = rows[rows["end"] >= 0]
    step = rows[(rows["process"] == focus.process) & (rows["begin"] == focus.span)]
    if len(rows) < MANY or not len(step):
        return False
    usual = float(np.median(durations(rows)))
    return int(durations(step)[0]) < 2 * usual or focus.end - focus.begin < waited * NOTABLE


def _start(run: RunContext, number: int) -> Focus | None:
    """The longest step of an iterator's workers before their first batch or at their end."""
    rows = run.spans_of((ev.WORKER_INIT[0], ev.MAKE_FETCHER[0], ev.WORKER_START[0], ev.JOIN[0]), loader=number)
    rows = rows[rows["end"] >= 0]
    if not len(rows):
        return None
    row = rows[np.argmax(durations(rows))]
    return run.focus_of(row, int(row["end"]))


def _waited_for(run: RunContext, row: np.void, cause: Cause | None) -> Focus:
    """The step of the cause that the longest wait was for; without one, the innermost of its task during the wait."""
    focus = run.focus_of(row, int(row["end"]))
    spans = run.spans_of([*_STEPS.get(cause, []), *_FETCHING], loader=int(row["loader"]))
    spans = spans[(spans["begin"] <= row["end"]) & (spans["end"] >= row["begin"])]
    its = spans["task"] == row["task"]  # none, if the worker that had it ran out of data
    of_cause = np.isin(spans["code"], _STEPS.get(cause, []))
    inner = its & (spans["process"] != row["process"]) & (spans["code"] != ev.FETCH[0])
    steps = next((spans[some] for some in (its & of_cause, of_cause, inner, its) if some.any()), None)
    if steps is None:
        return focus
    overlap = np.minimum(steps["end"], row["end"]) - np.maximum(steps["begin"], row["begin"])
    step = steps[np.argmax(overlap)]
    return run.focus(step, focus.begin, focus.end, int(step["worker"]))
