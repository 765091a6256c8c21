"""A trace as text for a terminal or a report: a line for each lane, a character for each moment.

Interface: `render(trace)` returns the whole picture as one string; the same arguments give the same string.

How to read it: a cell holds the letter of the step that took most of its time (`LETTERS`), small if that is less than
half of the cell, blank if nothing was recorded. Time inside an inner span does not count for the outer one. The number
after a first letter is the task. `>>>` is a span that did not end. Below the lanes: what each lane spent its time on,
as shares of the window; each span without an end; failures; the path of the batch that is asked for.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Rows
from minidl.tracefile.events import EVENTS, Phase, Track
from minidl.tracefile.spans import nest
from minidl.tracefile.words import duration, lacking, percent, plain, unit_of
from minidl.views.colours import WAITING, is_light, nearest_256, paint, rgb_256
from minidl.views.layout import LaneKind
from minidl.views.scene import FADING, FATES, IDLE, Fate, Scene, alarm, has_field, scene_of, window_of

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


LETTERS: Final = {
    **{event.label: event.letter for event in EVENTS.values() if event.letter},
    "did not end": ">",
    "still waiting": ">",
}
"""The character of each label, and of the spans without an end."""

_KINDS: Final = list(LETTERS)
_OPEN: Final = tuple(_KINDS.index(kind) for kind in ("did not end", "still waiting"))
_NUMBERED: Final = (ev.FETCH[0], ev.PIN[0], ev.CONSUMER[0], *ev.AWAITS)
_LEAST_CELLS: Final = 20
_MOST_ALARMS: Final = 50
_RESET: Final = "\x1b[0m"
_KEY: Final = (
    "a small letter: less than half of its cell", "a number: the task (of a wait: the one needed)",
    "blank: nothing recorded", "percent: of the time shown",
)  # fmt: skip


@dataclass(frozen=True)
class _Window:
    """[start, end] in ns since the trace's first event, drawn in so many cells."""

    start: int
    end: int
    cells: int

    @property
    def edges(self) -> Ints:
        """Borders of the cells, ns, one more than there are cells."""
        length = self.end - self.start
        return np.array([self.start + length * i // self.cells for i in range(self.cells + 1)], np.int64)

    def cell(self, at: int) -> int:
        """Return the cell of a moment."""
        return max(0, min(self.cells - 1, (at - self.start) * self.cells // (self.end - self.start)))


def render(
    trace: Trace,
    width: int = 100,
    colour: bool | None = None,
    since: float | None = None,
    until: float | None = None,
    worker: int | None = None,
    batch: int | None = None,
) -> str:
    """Return the timeline as text, lines of at most `width` characters in the lanes and in the words about them.

    since, until: seconds from the trace's first event. worker: leave out the lanes of the other workers. batch: draw
    only what concerns the task with that number and, without since and until, only its time. colour: None = if standard
    output is a terminal and NO_COLOR is unset. Raises ValueError if there is nothing to draw, or if the window is empty
    or outside the trace.
    """
    drawn = scene_of(trace, workers=None if worker is None else [worker])
    bars = drawn.bars if batch is None else drawn.bars[_is_about(drawn, batch)]
    if not len(bars):
        asked = [f"{name} {value}" for name, value in (("worker", worker), ("batch", batch)) if value is not None]
        raise ValueError(f"{trace.path}: the trace has no span{' of ' + ' and '.join(asked) if asked else ''} to draw")
    shown = [number for number in range(len(drawn.lanes)) if (bars["lane"] == number).any()]
    label = max(len(drawn.lanes[number].title) for number in shown) + 1
    window = _window(drawn, bars, max(_LEAST_CELLS, width - label), since, until, batch is not None)
    fits = label + window.cells
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") if colour is None else colour
    out, shares, slot = [_ruler(window, label, drawn.last)], [], -1
    title = textwrap.wrap(drawn.headline.title, fits)
    if step := drawn.headline.helps:
        title += textwrap.wrap(f"next step: {step}", fits, initial_indent="  ", subsequent_indent="  ")
    for number in shown:
        lane, mine = drawn.lanes[number], bars[bars["lane"] == number]
        if len(drawn.slots) > 1 and lane.slot != slot:
            slot = lane.slot
            out.append(f"{drawn.slots[slot].title}:")
            shares.append(f"{drawn.slots[slot].title}:")
        fill = _fill(drawn, mine, window)
        text, kinds = _characters(mine, fill, window)
        out.append((lane.title.ljust(label) + (_painted(text, kinds) if is_coloured else text)).rstrip())
        if lane.kind is not LaneKind.EPOCHS:
            mine["end"] = np.maximum(mine["begin"], mine["known"])
            shares += _wrapped(lane.title.ljust(label), _shares(_fill(drawn, mine, window), window, drawn.last), fits)
    path = [] if batch is None else _path(drawn, batch)
    failed = _alarms(drawn, window, batch)
    legend = _legend(bars[(bars["begin"] <= window.end) & (bars["end"] >= window.start)], fits)
    ends = [*_open(drawn, bars, window), *failed, *path, *lacking(trace.problems)]
    return "\n".join([*title, "", *out, "", *shares, *ends, "", *legend])


def _is_about(drawn: Scene, batch: int) -> Bools:
    """Tell which bars are about the task. A wait is about the task that is needed and about the one that came."""
    spans = drawn.spans[drawn.bars["span"]]
    mask: Bools = (spans["task"] == batch) | (spans["end_task"] == batch)
    return mask


def _window(drawn: Scene, bars: Rows, cells: int, since: float | None, until: float | None, tight: bool) -> _Window:
    if tight and since is until is None:
        return _Window(int(bars["begin"].min()), max(int(bars["end"].max()), int(bars["begin"].min()) + 1), cells)
    return _Window(*window_of(drawn.end, since, until), cells)


# --- Cells ------------------------------------------------------------------------------------------------------------
def _kinds(bars: Rows) -> Ints:
    """Return the index in LETTERS of each bar."""
    known = {c: _KINDS.index(paint(c).label) for c in ev.BEGINS}
    table = np.array([known.get(c, 0) for c in range(max(EVENTS) + 1)], np.int64)
    kinds = table[bars["code"]]
    waiting = np.isin(kinds, [_KINDS.index(kind) for kind in WAITING])
    return np.where(np.isin(bars["fate"], FADING), np.where(waiting, _OPEN[1], _OPEN[0]), kinds)


def _fill(drawn: Scene, bars: Rows, window: _Window) -> Ints:
    """Return the ns that each kind (row) took of each cell (column). An inner span's time is not the outer one's."""
    kinds = _kinds(bars)
    spans = drawn.spans[bars["span"]]
    until, around = nest(bars, (spans["process"].astype(np.int64) << 32) | spans["tid"])
    inner = around >= 0
    edges = window.edges
    out = np.zeros((len(_KINDS), window.cells), np.int64)
    for kind in np.unique(kinds).tolist():
        mine = kinds == kind
        out[kind] += _cover(bars["begin"][mine], until[mine], edges)
        taken = inner & (kinds[around] == kind)
        out[kind] -= _cover(bars["begin"][taken], until[taken], edges)
    return out


def _cover(begin: Ints, end: Ints, edges: Ints) -> Ints:
    """Return the ns of each cell that the intervals cover; overlaps count more than once.

    Up to an edge x they cover the sum of x - b over all b < x, less the sum of x - e over all e < x. The sums may
    overflow; their differences are still right.
    """
    return np.diff(_before(begin, edges) - _before(np.maximum(end, begin), edges))


def _before(points: Ints, edges: Ints) -> Ints:
    points = np.sort(points)
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(points)])
    count = np.searchsorted(points, edges)
    before: Ints = count * edges - sums[count]
    return before


def _characters(bars: Rows, fill: Ints, window: _Window) -> tuple[str, list[int]]:
    """Return the lane's characters, and the kind of each cell (-1 = nothing)."""
    most = fill.max(axis=0)
    kinds = np.where(most > 0, fill.argmax(axis=0), -1).tolist()
    full = (2 * most >= np.diff(window.edges)).tolist()
    letters = [" " if k < 0 else LETTERS[_KINDS[k]] for k in kinds]
    text = [letter if whole else letter.lower() for letter, whole in zip(letters, full, strict=True)]
    for bar in _roomy(bars, window):
        first, last = window.cell(int(bar["begin"])), window.cell(int(bar["end"]) - 1)
        number = str(bar["number"])
        if bar["begin"] >= window.start and last - first > len(number):
            text[first + 1 : first + 1 + len(number)] = number
    _label_open(text, kinds, bars)
    return "".join(text), kinds


def _label_open(text: list[str], kinds: list[int], bars: Rows) -> None:
    """Write the name of what did not end into the `>>>` at the right edge, if there is room."""
    begin = len(kinds)
    while begin and kinds[begin - 1] in _OPEN:
        begin -= 1
    hung = bars[np.isin(bars["fate"], FADING)]
    if len(hung):
        last = hung[hung["begin"].argmax()]
        label, idle = paint(int(last["code"])).label, int(last["code"]) in IDLE
        words = f" {label} " if idle else f" {label} {FATES[Fate(last['fate'])]} "
        at = begin + 1 + len(str(hung["task"].max())) + 2
        if at + len(words) + 2 <= len(text):
            text[at : at + len(words)] = words


def _roomy(bars: Rows, window: _Window) -> Rows:
    """Return the bars that have room for their task's number."""
    wide = np.minimum(bars["end"], window.end) - bars["begin"] > 2 * (window.end - window.start) // window.cells
    roomy: Rows = bars[wide & np.isin(bars["code"], _NUMBERED) & (bars["number"] >= 0) & (bars["begin"] < window.end)]
    return roomy


# --- Words ------------------------------------------------------------------------------------------------------------
def _ruler(window: _Window, label: int, last: int) -> str:
    """Return the line of times. What is drawn beyond `last`, the trace's end, has no number."""
    length = window.end - window.start
    unit = unit_of(min(window.end, last))
    least = 10 * length / window.cells  # ns between two marks
    step = max(1, unit.ns // 10**9)
    while step < least:
        step *= 10
    step = next((s for s in (step // 5, step // 2) if s >= least), step)
    text = [" "] * (label + window.cells)
    for n in range(-(-window.start // step), min(window.end, last) // step + 1):
        at = label + window.cell(n * step)
        mark = f"|{n * step / unit.ns:.12g}" + (f" {unit.name}" if "|" not in text else "")
        if at + len(mark) <= len(text):
            text[at : at + len(mark)] = mark
    return "".join(text).rstrip()


def _shares(fill: Ints, window: _Window, last: int) -> str:
    """Return what the lane spent the window on, up to `last`: "busy 83% (sample 60%, collate 23%), idle 12%"."""
    total = max(1, min(window.end, last) - window.start)
    spent: dict[str, int] = {}
    for kind, ns in zip(_KINDS, fill.sum(axis=1).tolist(), strict=True):
        spent[kind] = spent.get(kind, 0) + ns
    order = sorted((k for k in spent if spent[k] > 0), key=lambda k: (-spent[k], k))
    work = [k for k in order if k not in (*WAITING, "still waiting", "did not end")]
    rest = [k for k in order if k not in work]
    busy = f"busy {percent(sum(spent[k] for k in work) / total)}"
    if work:
        busy += f" ({', '.join(f'{k} {percent(spent[k] / total)}' for k in work)})"
    return ", ".join([busy, *(f"{k} {percent(spent[k] / total)}" for k in rest)])


def _wrapped(head: str, words: str, width: int) -> list[str]:
    """Return the words after the head, in as many lines as they need, broken after commas only."""
    whole = ", ".join(part.replace(" ", "\xa0") for part in words.split(", "))
    room = max(_LEAST_CELLS, width - len(head))
    lines = textwrap.wrap(whole, room, break_long_words=False, break_on_hyphens=False)
    return [(" " * len(head) if n else head) + line.replace("\xa0", " ") for n, line in enumerate(lines)]


def _open(drawn: Scene, bars: Rows, window: _Window) -> Iterator[str]:
    """Yield a line for each bar whose end was not recorded, what is to blame first; idle workers have none."""
    order = {int(drawn.bars["span"][at]): n for n, at in enumerate(drawn.unended())}
    idle = np.isin(bars["code"], IDLE) & np.isin(bars["fate"], FADING) & ~np.isin(bars["span"], list(order))
    left = bars[(bars["fate"] != Fate.ENDED) & ~idle]
    rank = np.array([order.get(span, len(order)) for span in left["span"].tolist()], int)
    for number, at in enumerate(np.lexsort((-left["begin"], left["lane"], rank)).tolist()):
        if number == 0:
            yield ""
        bar = left[at]
        name, about = paint(int(bar["code"])).label, _facts(drawn, drawn.spans[bar["span"]])
        where = f"{drawn.lanes[bar['lane']].title}: {name}{about}"
        until = f" until {bar['known'] / 1e9:.9f} s" if bar["end"] < drawn.end else ""
        yield f"{FATES[Fate(bar['fate'])]}: {where}, since {bar['begin'] / 1e9:.9f} s{until}"


def _alarms(drawn: Scene, window: _Window, batch: int | None) -> Iterator[str]:
    """Yield a line for each failure in the window; if a batch is asked for, only for those of its task."""
    marks = drawn.marks[drawn.marks["alarm"]]
    marks = marks[(marks["time"] >= window.start) & (marks["time"] <= window.end)]
    marks = np.sort(marks if batch is None else marks[marks["task"] == batch], order="time")
    for number, mark in enumerate(marks[:_MOST_ALARMS]):
        if number == 0:
            yield ""
        words = plain(alarm(drawn, mark)[:200])
        yield f"failure: {drawn.lanes[mark['lane']].title}: {words}, at {mark['time'] / 1e9:.9f} s"
    if len(marks) > _MOST_ALARMS:
        yield f"failure: {len(marks) - _MOST_ALARMS} more"


def _path(drawn: Scene, task: int) -> Iterator[str]:
    """Yield a line for each arrow of the batches with the task's number: from which lane and time to which."""
    for batch in np.flatnonzero(drawn.batches["task"] == task).tolist():
        about = drawn.batches[batch]
        yield f"\nbatch {task} of iterator {about['loader']}, epoch {about['epoch']}:"
        for arrow in drawn.arrows(np.array([batch])):
            left, reached = (f"{arrow[end] / 1e9:.9f} s" for end in ("left", "reached"))
            ends = [drawn.lanes[arrow[end]].title for end in ("from_lane", "to_lane")]
            yield f"  {left}  {ends[0]:<13} -> {reached}  {ends[1]:<13} {EVENTS[int(arrow['code'])].name}"
        yield from _computing(drawn, batch)


def _computing(drawn: Scene, batch: int) -> Iterator[str]:
    """Yield a line for each of the batch's steps with CPU time, without its samples."""
    spans = drawn.spans[drawn.bars["span"][drawn.bars["batch"] == batch]]
    for span in spans[(spans["cpu"] > 0) & (spans["code"] != ev.SAMPLE[0])]:
        took = span["end"] - span["begin"]
        parts = (("computing", span["cpu"]), ("ready but without a CPU", span["cpu_wait"]))
        told = ", ".join(f"{words} {percent(ns / took)}" for words, ns in parts if ns)
        yield f"  {EVENTS[int(span['code'])].name:<13} took {duration(took)}: {told}"


def _facts(drawn: Scene, row: np.void) -> str:
    event = EVENTS[int(row["code"])]
    facts = [f"task {row['task']}"] if row["task"] >= 0 else []
    facts += [f"worker {row['worker']}"] if row["worker"] >= 0 and event.track is Track.LOADER else []
    for field, column in zip(event.fields, ("bx", "by", "bz"), strict=False):
        value, unit = (row[column] / 1e9, "s") if field.unit == "ns" else (row[column], field.unit)
        if field.enum is None and not field.is_cpu and has_field(drawn.trace, row, field.name):
            facts.append(f"{field.name} {value:g} {unit}".rstrip())
    return f" ({', '.join(facts)})" if facts else ""


def _legend(bars: Rows, width: int) -> list[str]:
    kinds = _kinds(bars)
    simulated = set(kinds[bars["simulated"]].tolist())
    names: dict[str, list[str]] = {}
    for index in np.unique(kinds).tolist():
        words = f"{_KINDS[index]} (simulated)" if index in simulated else _KINDS[index]
        names.setdefault(LETTERS[_KINDS[index]], []).append(words)
    lines = [""]
    for letter, said in names.items():
        entry = f"{letter} {', '.join(said)}"
        if lines[-1] and len(lines[-1]) + 2 + len(entry) > width:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + entry
    return lines + textwrap.wrap("; ".join(_KEY), width)


# --- Colour -----------------------------------------------------------------------------------------------------------
def _painted(text: str, kinds: list[int]) -> str:
    """Return the text with each run of cells of one kind in its colour."""
    out = []
    begin = 0
    for at in range(1, len(kinds) + 1):
        if at == len(kinds) or kinds[at] != kinds[begin]:
            code = _code(_KINDS[kinds[begin]]) if kinds[begin] >= 0 else None
            run = text[begin:at]
            out.append(
                run if code is None else f"\x1b[48;5;{code};38;5;{16 if is_light(rgb_256(code)) else 231}m{run}{_RESET}"
            )
            begin = at
    return "".join(out)


def _code(kind: str) -> int | None:
    """Return the terminal colour nearest to that of a kind; None for waiting, so that work stands out, and an epoch."""
    if kind in (*WAITING, "still waiting", "epoch"):
        return None
    looks = (paint(code) for code, event in EVENTS.items() if event.phase is Phase.BEGIN)
    return nearest_256(next((look.colour for look in looks if look.label == kind), EVENTS[ev.FOUND_DEAD].colour))
