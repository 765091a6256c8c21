"""Begins and ends: which end closes which begin, which span lies inside which, and rows in which spans nest.

Interface: `pairs(events)` -> array of SPAN; `ends(events)`, the positions of the same pairs; `nest(spans, track)`, the
span around each span; `within(rows, steps)`, the step around each of some spans; `stack(rows)`, rows for slices that
may overlap.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from minidl.tracefile.arrays import Bools, Ints, Rows, starts, table_of
from minidl.tracefile.events import (
    BEGINS,
    ENDS,
    EVENTS,
    RESULT_GET,
    RESULT_PICKLE,
    RESULT_REBUILD,
    RESULT_WRITE,
    Track,
    codes_where,
    columns_where,
)

SPAN = np.dtype(
    [
        ("code", "<u2"),  # of the begin
        ("begin", "<i8"),  # ns, CLOCK_MONOTONIC
        ("end", "<i8"),  # ns; -1 = no end was recorded
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("process", "<u4"),
        ("loader", "<u2"),
        ("task", "<i8"),  # of the begin, or of the end if the begin has none
        ("worker", "<i8"),
        ("begin_task", "<i8"),  # of the begin alone, -1 = none: of a wait, the task that is needed
        ("end_task", "<i8"),  # of the end; -1 = none, or open
        ("end_worker", "<i8"),
        *((name, "<i8") for name in ("bx", "by", "bz", "ex", "ey", "ez")),
        ("cpu", "<i8"),  # CPU time of the span's thread, ns, at most the span's length; 0 = not measured
        ("cpu_wait", "<i8"),  # how long the thread was ready to run and had no CPU, ns; 0 = not measured
    ]
)
"""One span: a begin and its end."""


MOST_LANES: Final = 16
"""Rows that slices of one track may be spread over; without a bound, a file made for that would take for ever."""

ROUNDING_NS: Final = 50
"""By so much may slices overlap since begins and durations were rounded, or mapped, apart; more is a real overlap."""


_BEGIN, _END = table_of(BEGINS), table_of(ENDS)
_CPU: Final = columns_where(lambda field: field.name in ("cpu", "cpu_wait"))
"""Where ends hold what their spans had of a CPU."""

_TOLD_LATER: Final = (("cpu", RESULT_PICKLE, RESULT_WRITE[0], "y"), ("cpu_wait", RESULT_REBUILD, RESULT_GET[1], "z"))
"""What of a span stands in the column of a later event of its thread."""

_ROAMING = table_of(codes_where(lambda event: event.track in (Track.LOADER, Track.CONSUMER)))


# --- Begins and ends --------------------------------------------------------------------------------------------------
def pairs(events: Rows) -> Rows:
    """Every begin with its end: array of SPAN, by begin.

    An end closes the last open begin of its name in its thread and loader. What is left of the loader's own spans is
    tried again without the thread: an iterator may be closed by another thread than the one that began the epoch.
    """
    return _spans(events, np.flatnonzero(_BEGIN[events["code"]]), ends(events))


def ends(events: Rows) -> Ints:
    """For each event, a begin, the position of its end; -1 = none, or no begin."""
    codes = events["code"]
    end_of = np.full(len(events), -1, np.int64)
    paired = _BEGIN[codes] | _END[codes]
    _match(events, np.flatnonzero(paired), ["process", "tid", "loader"], end_of)
    alone = end_of < 0
    alone[end_of[end_of >= 0]] = False
    _match(events, np.flatnonzero(paired & _ROAMING[codes] & alone), ["process", "loader"], end_of)
    return end_of


def _match(events: Rows, index: Ints, keys: list[str], end_of: Ints) -> None:
    """For the begins and ends at `index`, set end_of[begin] = position of its end, last in first out within `keys`."""
    codes = events["code"][index]
    is_begin = _BEGIN[codes]
    columns = [np.where(is_begin, codes, codes - 1), *(events[key][index] for key in keys)]
    order = np.lexsort(columns)
    group = np.cumsum(starts(*(column[order] for column in columns)))
    step = np.where(is_begin, 1, -1)[order]
    depth = np.cumsum(step) + (step < 0)  # after a begin, before an end: the same number for the two of a pair
    inner = np.lexsort((depth, group))
    begin, end = inner[:-1], inner[1:]
    paired = (group[begin] == group[end]) & (depth[begin] == depth[end]) & (step[begin] > 0) & (step[end] < 0)
    end_of[index[order[begin[paired]]]] = index[order[end[paired]]]


def _spans(events: Rows, begins: Ints, end_of: Ints) -> Rows:
    out = np.zeros(len(begins), SPAN)
    first = events[begins]
    ends = end_of[begins]
    closed = ends >= 0
    last = events[ends[closed]]
    for name in ("code", "pid", "tid", "process", "loader", "task", "worker"):
        out[name] = first[name]
    out["begin"], out["begin_task"] = first["time"], first["task"]
    for name in ("end", "end_task", "end_worker"):
        out[name] = -1
    out["end"][closed] = last["time"]
    for name in ("task", "worker"):
        out["end_" + name][closed] = last[name]
        out[name] = np.where(out[name] < 0, out["end_" + name], out[name])
    for name in "xyz":
        out["b" + name] = first[name]
        out["e" + name][closed] = last[name]
    for code, column in _CPU:
        mine = out["code"] == code - 1
        out[EVENTS[code].columns[column].name][mine] = out["e" + column][mine]
    for name, span, teller, column in _TOLD_LATER:
        mine = closed & (out["code"] == span[0])
        out[name][mine] = _told_by(events, span[1], teller, column)[end_of[begins[mine]]]
    _bound(out, closed & (first["tid"] == events["tid"][end_of[begins]]))
    return out


def _told_by(events: Rows, code: int, teller: int, column: str) -> Ints:
    """For each event of `code`, what the next `teller` of its thread and task has in `column`; 0 = there is none."""
    out = np.zeros(len(events), np.int64)
    at = np.flatnonzero(np.isin(events["code"], (code, teller)))
    at = at[np.lexsort((at, events["tid"][at], events["process"][at]))]
    before, after = at[:-1], at[1:]
    told = (events["code"][before] == code) & (events["code"][after] == teller)
    for name in ("process", "tid", "loader", "task"):
        told &= events[name][before] == events[name][after]
    out[before[told]] = events[column][after[told]]
    return out


def _bound(spans: Rows, measured: Bools) -> None:
    """Keep CPU times in their spans: clocks have granules, and a reading lies beside the event. None if not `measured`.

    A span that began in another thread than it ended has two clocks, and so no CPU time.
    """
    length = np.where(measured, spans["end"] - spans["begin"], 0)
    spans["cpu"] = np.clip(spans["cpu"], 0, length)
    spans["cpu_wait"] = np.clip(spans["cpu_wait"], 0, length - spans["cpu"])


def durations(spans: Rows) -> Ints:
    """How long each span took, ns; spans without an end must be left out before."""
    took: Ints = spans["end"] - spans["begin"]
    return took


def total(spans: Rows) -> int:
    """How long the spans took together, ns."""
    return int(durations(spans).sum())


# --- Nesting ----------------------------------------------------------------------------------------------------------
def within(rows: Rows, steps: Rows) -> Ints:
    """For each row the position of the step of its thread that it lies in, -1 = none.

    steps: one or more closed spans, by begin, none of which overlap.
    """
    place = np.searchsorted(steps["begin"], rows["begin"], side="right") - 1
    around = steps[place]
    inside = (place >= 0) & (rows["end"] >= 0) & (rows["end"] <= around["end"])
    inside &= (rows["process"] == around["process"]) & (rows["tid"] == around["tid"])
    found: Ints = np.where(inside, place, -1)
    return found


def nest(spans: Rows, track: Ints) -> tuple[Ints, Ints]:
    """An end for each span no later than that of the span around it, and which one that is, both among `spans`' track.

    spans: array of SPAN; track: a number for each. The end is -1 if neither has one; around is -1 for an outer span.
    """
    never = np.iinfo(np.int64).max
    ends = np.where(spans["end"] < 0, never, spans["end"])
    order = np.lexsort((-ends, spans["begin"], track))
    end: list[int] = ends.tolist()
    parent = [-1] * len(end)
    around: list[int] = []
    on = -1
    for i, lane, begin in zip(order.tolist(), track[order].tolist(), spans["begin"][order].tolist(), strict=True):
        if lane != on:
            on, around = lane, []
        while around and end[around[-1]] <= begin:
            around.pop()
        if around:
            parent[i] = around[-1]
            end[i] = min(end[i], end[around[-1]])
        around.append(i)
    until = np.array(end, np.int64)
    return np.where(until == never, -1, until), np.array(parent, np.int64)


def stack(rows: Rows) -> tuple[Ints, Ints]:
    """For each slice its row among its track's (from 0; -1 = none of MOST_LANES has room), and the end to draw.

    rows: array of SLICE. In one row of a track, slices nest or stand apart: viewers drop those that overlap in part.
    What overlaps by rounding alone is cut to fit; what really overlaps (streams, async operators) goes a row down.
    """
    order = np.lexsort((-rows["end"], rows["begin"], rows["track"]))
    end: list[int] = rows["end"].tolist()
    lane = [-1] * len(end)
    stacks: list[list[int]] = []
    on = -1
    begins, tracks = rows["begin"][order].tolist(), rows["track"][order].tolist()
    for i, begin, track in zip(order.tolist(), begins, tracks, strict=True):
        if track != on:
            on, stacks = track, [[]]
        for number, stack in enumerate(stacks):
            if _fits(stack, i, begin, end):
                lane[i] = number
                break
        else:
            if len(stacks) < MOST_LANES:
                lane[i] = len(stacks)
                stacks.append([i])
    return np.array(lane, np.int64), np.array(end, np.int64)


def _fits(stack: list[int], i: int, begin: int, end: list[int]) -> bool:
    """Put slice i on top of the slices that are open in a row, if it fits into the uppermost."""
    while stack:
        around = end[stack[-1]]
        if around <= begin:
            stack.pop()
        elif end[i] <= around:
            break
        elif around - begin <= min(ROUNDING_NS, end[i] - around):
            end[stack.pop()] = begin
        elif end[i] - around <= ROUNDING_NS:
            end[i] = around
        else:
            return False
    stack.append(i)
    return True
