"""Rules on the recording itself: its numbering and clocks, its words, and the facts told beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from minidl.check.view import TABLE, LoaderView, Rule, Violation, rule
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import starts
from minidl.tracefile.events import EVENTS

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

TORN_SLOTS: Final = 16
"""A killed process leaves slots that its threads had begun to write, among its last; an earlier gap is a loss."""

TABLE["recording"] = Rule(
    "recording",
    "each process numbers its events without gap or repetition, and no thread's clock runs backwards",
    "The file was changed later, or the recorder has a bug: no other result is reliable.",
    "",
    lambda loader: iter(()),  # judged once for the whole trace: `recording`
)


def recording(trace: Trace) -> Iterator[Violation]:
    """Breaches of the rule "recording"."""
    seq, time = trace.events["seq"].astype(np.int64), trace.events["time"]
    process, tid = trace.events["process"], trace.events["tid"]
    final = np.zeros(len(trace.processes), np.int64)
    np.maximum.at(final, process, seq)
    order = np.lexsort((seq, process))
    same = ~starts(process[order])[1:]
    step = np.diff(seq[order])
    for at in np.flatnonzero(same & (step == 0)):
        rows = _later_first(order[at], order[at + 1])
        name = trace.processes[process[rows[0]]].name
        yield Violation("recording", "", f"{name} has two events number {seq[rows[0]]}", rows)
    for at in np.flatnonzero(same & (step > 1)):
        apart = trace.left_out["seq"][trace.left_out["process"] == process[order[at]]]
        lacks = step[at] - 1 - np.count_nonzero((apart > seq[order[at]]) & (apart < seq[order[at + 1]]))
        if not lacks:
            continue
        torn = final[process[order[at]]] - seq[order[at]] <= TORN_SLOTS
        if not torn and not trace.processes[process[order[at]]].lost:
            rows = _later_first(order[at], order[at + 1])
            name, number = trace.processes[process[rows[0]]].name, seq[order[at]]
            yield Violation("recording", "", f"{name} lacks {lacks} event(s) after number {number}", rows)
    # The collector may release a slab in the middle of the recording of another event, which is stamped after it; and
    # its own pauses are recorded afterwards.
    order = np.lexsort((seq, tid, process))
    order = order[~np.isin(trace.events["code"][order], ev.LATE)]
    same = ~starts(process[order], tid[order])[1:]
    for at in np.flatnonzero(same & (np.diff(time[order]) < 0)):
        rows = _later_first(order[at], order[at + 1])
        yield Violation("recording", "", f"the clock of thread {tid[rows[0]]} runs backwards", rows)


def _later_first(one: np.intp, other: np.intp) -> tuple[int, int]:
    return max(int(one), int(other)), min(int(one), int(other))


@rule(
    "vocabulary",
    "every event is declared, and a field with an enumeration holds one of its values",
    "The trace was written by another minidl, or changed: read it with the minidl that wrote it.",
)
def vocabulary(loader: LoaderView) -> Iterator[Violation]:
    for code in np.unique(loader.code).tolist():
        rows = loader.pick(code)
        event = EVENTS.get(code)
        if event is None:
            yield loader.broken(f"code {code} is not declared", rows[0])
            continue
        for column, spec in event.columns.items():
            if spec.enum is not None:
                values = getattr(loader, column)[rows]
                bad = ~np.isin(values, [int(value) for value in spec.enum])
                for row, value in zip(rows[bad], values[bad], strict=True):
                    yield loader.broken(f"{spec.name} is {value}, which has no meaning", row)


@rule(
    "facts",
    "the events agree with the loader's facts: worker ids below num_workers, the number of workers in an epoch",
    "Events of another loader are mixed in, or the facts were changed.",
)
def facts(loader: LoaderView) -> Iterator[Violation]:
    workers = loader.params.get("num_workers")
    if not isinstance(workers, int):
        return
    for row in loader.begins[~np.isin(loader.y[loader.begins], [workers, 0])].tolist():
        yield loader.broken(f"{loader.y[row]} workers; the loader has {workers}", row)
    for row in np.flatnonzero(loader.worker >= max(workers, 0)).tolist():
        yield loader.broken(f"there are only workers 0 to {workers - 1}", row)


@rule(
    "epochs",
    "epochs are numbered 0, 1, 2, …, and an epoch's end has its begin's number",
    "An epoch is lost from the trace, or two were mixed up.",
)
def epochs(loader: LoaderView) -> Iterator[Violation]:
    begins = loader.begins
    for before, row in itertools.pairwise(begins.tolist()):
        if loader.x[row] != loader.x[before] + 1:
            yield loader.broken(f"epoch {loader.x[row]} begins after epoch {loader.x[before]}", row, before)
    if len(begins) and loader.complete and loader.x[begins[0]] != 0:
        yield loader.broken(f"the first epoch is number {loader.x[begins[0]]}", int(begins[0]))
    ends = loader.pick(ev.EPOCH[1])
    for row, begin in zip(ends, loader.last_before(ends, begins), strict=True):
        if begin >= 0 and loader.x[row] != loader.x[begin]:
            yield loader.broken(f"the end of epoch {loader.x[row]} in epoch {loader.x[begin]}", row, begin)
