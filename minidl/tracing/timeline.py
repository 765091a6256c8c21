"""A trace as text: the lanes of `lanes.scene`, a character for each moment, for a terminal or a report.

Interface: `render(trace)` gives the whole picture as one string; the same trace and arguments, the same string.
How to read it: a cell holds the letter of what took most time in it (`LETTERS`), small where that is less than half of
the cell; blank = nothing at all. Time inside an inner span is not counted as the outer one's. A number after the first
letter is the task. `>>>` is a span that had not ended when the trace did. Below the lanes: what each spent its time on,
in shares of the window, each span whose end is missing, what went wrong, and the way of the batch that is asked for.
Waiting has no colour, so that work stands out.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from minidl.tracing import events as ev
from minidl.tracing.attachments import plain
from minidl.tracing.events import EVENTS, Event, Phase, Track
from minidl.tracing.export import nest
from minidl.tracing.lanes import FADING, FATES, Fate, Kind, Scene, alarm, scene, window_of

if TYPE_CHECKING:
    from minidl.tracing.reader import Trace

Rows = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

LETTERS: Final = {
    "epoch": "=",
    "start": "+",
    "sampling": "I",
    "idle": ".",
    "fetch": "F",
    "sample": "S",
    "collate": "C",
    "copy": "M",
    "pickle": "P",
    "write": "W",
    "index_write": "W",
    "wait": "-",
    "rebuild": "R",
    "pin": "L",
    "next": "N",
    "consumer": "T",
    "h2d": "E",
    "device copy": "H",
    "transform": "A",
    "compute": "U",
    "device compute": "U",
    "host wait": "-",
    "device wait": "-",
    "join": "J",
    "shutdown": "X",
    "did not end": ">",
    "still waiting": ">",
}
"""The character for each stage of the event table, for spans without a stage, and for spans without an end.
A letter is small where the stage took less than half of the cell."""

WAITING: Final = ("idle", "wait", "host wait", "device wait", "join", "still waiting")
"""Kinds of time in which a thread has nothing to do."""

_KINDS: Final = list(LETTERS)
_OPEN: Final = tuple(_KINDS.index(kind) for kind in ("did not end", "still waiting"))
_NUMBERED: Final = (ev.FETCH[0], ev.PIN[0], ev.CONSUMER[0], ev.RESULT_GET[0], ev.READY_GET[0])
_LEAST_CELLS: Final = 20
_MOST_ALARMS: Final = 50
_RESET: Final = "\x1b[0m"
_KEY: Final = ("a small letter takes less than half of its cell", "a number is a task's", "blank is nothing recorded")


def kind_of(event: Event) -> str:
    """What a span's time counts as: its stage, or its name where it has none."""
    return event.stage or event.name


@dataclass(frozen=True)
class _Window:
    """What is drawn: [start, end] in ns since the trace's first event, in so many cells."""

    start: int
    end: int
    cells: int

    @property
    def edges(self) -> Ints:
        """Borders of the cells, ns, one more than there are cells."""
        length = self.end - self.start
        return np.array([self.start + length * i // self.cells for i in range(self.cells + 1)], np.int64)

    def cell(self, at: int) -> int:
        """The cell that the moment is in."""
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
    """The timeline, lines of at most `width` characters in the lanes and in the words about them.

    since, until: s after the trace's first event. worker: leave out the lanes of the other workers. batch: draw only
    what was done for the task with that number, and, without since and until, only that long. colour: None = if
    standard output is a terminal and NO_COLOR is unset. ValueError where there is nothing to draw, or the
    window is empty or outside the trace.
    """
    drawn = scene(trace, workers=None if worker is None else [worker])
    bars = drawn.bars if batch is None else drawn.bars[_is_about(drawn, batch)]
    if not len(bars):
        raise ValueError(_nothing(trace, worker, batch))
    shown = [number for number in range(len(drawn.lanes)) if (bars["lane"] == number).any()]
    label = max(len(drawn.lanes[number].title) for number in shown) + 1
    window = _window(drawn, bars, max(_LEAST_CELLS, width - label), since, until, batch is not None)
    fits = label + window.cells
    paint = _paint if _use_colour(colour) else _plain
    out, shares, slot = [_ruler(window, label)], [], -1
    for number in shown:
        lane, mine = drawn.lanes[number], bars[bars["lane"] == number]
        if len(drawn.slots) > 1 and lane.slot != slot:
            slot = lane.slot
            out.append(f"{drawn.slots[slot].title}:")
            shares.append(f"{drawn.slots[slot].title}:")
        fill = _fill(drawn, mine, window)
        out.append((lane.title.ljust(label) + paint(*_characters(mine, fill, window))).rstrip())
        if lane.kind is not Kind.EPOCHS:
            shares += _wrapped(lane.title.ljust(label), _shares(fill, window), fits)
    way = [] if batch is None else _way(drawn, batch)
    wrong = _alarms(drawn, window, batch)
    legend = _legend(bars[(bars["begin"] <= window.end) & (bars["end"] >= window.start)], fits)
    lacks = [f"the trace lacks something: {problem}" for problem in trace.problems]
    return "\n".join([*out, "", *shares, *_open(drawn, bars, window), *wrong, *way, *lacks, "", *legend])


def _nothing(trace: Trace, worker: int | None, batch: int | None) -> str:
    asked = [f"{name} {value}" for name, value in (("worker", worker), ("batch", batch)) if value is not None]
    return f"{trace.path}: the trace has no span{' of ' + ' and '.join(asked) if asked else ''} to draw"


def _is_about(drawn: Scene, batch: int) -> Mask:
    """Which bars are about the task; a wait is about the one that it is for, and the one that came."""
    spans = drawn.spans[drawn.bars["span"]]
    mask: Mask = (spans["task"] == batch) | (spans["end_task"] == batch)
    return mask


def _window(drawn: Scene, bars: Rows, cells: int, since: float | None, until: float | None, tight: bool) -> _Window:
    if tight and since is until is None:
        return _Window(int(bars["begin"].min()), max(int(bars["end"].max()), int(bars["begin"].min()) + 1), cells)
    return _Window(*window_of(drawn.end, since, until), cells)


# --- Cells ------------------------------------------------------------------------------------------------------------
def _kinds(bars: Rows) -> Ints:
    """Index in LETTERS for each bar."""
    known = {c: _KINDS.index(kind_of(e)) for c, e in EVENTS.items() if e.phase is Phase.BEGIN}
    table = np.array([known.get(c, 0) for c in range(max(EVENTS) + 1)], np.int64)
    kinds = table[bars["code"]]
    waiting = np.isin(kinds, [_KINDS.index(kind) for kind in WAITING])
    return np.where(np.isin(bars["fate"], FADING), np.where(waiting, _OPEN[1], _OPEN[0]), kinds)


def _fill(drawn: Scene, bars: Rows, window: _Window) -> Ints:
    """ns that each kind (row) took of each cell (column), what is inside a span not counted as the span itself."""
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
    """ns of each cell that the intervals cover, overlaps counted more than once.

    Up to an edge x they cover the sum of x - b over all b < x, less the sum of x - e over all e < x. The sums may wrap
    around; their differences do not.
    """
    return np.diff(_before(begin, edges) - _before(np.maximum(end, begin), edges))


def _before(points: Ints, edges: Ints) -> Ints:
    points = np.sort(points)
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(points)])
    count = np.searchsorted(points, edges)
    before: Ints = count * edges - sums[count]
    return before


def _characters(bars: Rows, fill: Ints, window: _Window) -> tuple[str, list[int]]:
    """The lane's characters, and the kind of each cell (-1 = nothing)."""
    most = fill.max(axis=0)
    kinds = np.where(most > 0, fill.argmax(axis=0), -1).tolist()
    full = (2 * most >= np.diff(window.edges)).tolist()
    letters = [" " if k < 0 else LETTERS[_KINDS[k]] for k in kinds]
    text = [letter if whole else letter.lower() for letter, whole in zip(letters, full, strict=True)]
    for bar in _roomy(bars, window):
        first, last = window.cell(int(bar["begin"])), window.cell(int(bar["end"]) - 1)
        number = str(bar["task"])
        if bar["begin"] >= window.start and last - first > len(number):
            text[first + 1 : first + 1 + len(number)] = number
    _label_open(text, kinds, bars)
    return "".join(text), kinds


def _label_open(text: list[str], kinds: list[int], bars: Rows) -> None:
    """Write into the `>>>` at the right edge what it is that did not end, if there is room."""
    begin = len(kinds)
    while begin and kinds[begin - 1] in _OPEN:
        begin -= 1
    hung = bars[np.isin(bars["fate"], FADING)]
    if len(hung):
        last = hung[hung["begin"].argmax()]
        words = f" {EVENTS[int(last['code'])].name} {FATES[Fate(last['fate'])]} "
        at = begin + 1 + len(str(hung["task"].max())) + 2
        if at + len(words) + 2 <= len(text):
            text[at : at + len(words)] = words


def _roomy(bars: Rows, window: _Window) -> Rows:
    """The bars that may have their task's number written into them."""
    wide = np.minimum(bars["end"], window.end) - bars["begin"] > 2 * (window.end - window.start) // window.cells
    roomy: Rows = bars[wide & np.isin(bars["code"], _NUMBERED) & (bars["task"] >= 0) & (bars["begin"] < window.end)]
    return roomy


# --- Words ------------------------------------------------------------------------------------------------------------
def _ruler(window: _Window, label: int) -> str:
    length = window.end - window.start
    unit, name = (10**9, "s") if length >= 10**10 else (10**6, "ms")
    least = 10 * length / window.cells  # ns between two marks
    step = 1
    while step < least:
        step *= 10
    step = next((s for s in (step // 5, step // 2) if s >= least), step)
    text = [" "] * (label + window.cells)
    for n in range(-(-window.start // step), window.end // step + 1):
        at = label + window.cell(n * step)
        mark = f"|{n * step / unit:.12g}" + (f" {name}" if "|" not in text else "")
        if at + len(mark) <= len(text):
            text[at : at + len(mark)] = mark
    return "".join(text).rstrip()


def _shares(fill: Ints, window: _Window) -> str:
    """What the lane spent the window on: "busy 83 % (sample 60 %, collate 23 %), idle 12 %"."""
    total = window.end - window.start
    spent: dict[str, int] = {}
    for kind, ns in zip(_KINDS, fill.sum(axis=1).tolist(), strict=True):
        spent[kind] = spent.get(kind, 0) + ns
    order = sorted((k for k in spent if spent[k] > 0), key=lambda k: (-spent[k], k))
    work = [k for k in order if k not in (*WAITING, "did not end")]
    rest = [k for k in order if k not in work]
    busy = f"busy {_percent(sum(spent[k] for k in work), total)}"
    if work:
        busy += f" ({', '.join(f'{k} {_percent(spent[k], total)}' for k in work)})"
    return ", ".join([busy, *(f"{k} {_percent(spent[k], total)}" for k in rest)])


def _wrapped(head: str, words: str, width: int) -> list[str]:
    """The words behind the head, in as many lines as they take; broken after commas alone."""
    whole = ", ".join(part.replace(" ", "\xa0") for part in words.split(", "))
    room = max(_LEAST_CELLS, width - len(head))
    lines = textwrap.wrap(whole, room, break_long_words=False, break_on_hyphens=False)
    return [(" " * len(head) if n else head) + line.replace("\xa0", " ") for n, line in enumerate(lines)]


def _percent(part: int, total: int) -> str:
    share = 100 * part / total
    return f"{share:.0f} %" if share >= 1 or part == 0 else "<1 %"


def _open(drawn: Scene, bars: Rows, window: _Window) -> Iterator[str]:
    """A line for each bar whose end was not recorded, the innermost of its lane first."""
    left = bars[bars["fate"] != Fate.ENDED]
    for number, at in enumerate(np.lexsort((-np.arange(len(left)), -left["begin"], left["lane"])).tolist()):
        if number == 0:
            yield ""
        bar = left[at]
        name, about = EVENTS[int(bar["code"])].name, _facts(drawn.spans[bar["span"]])
        where = f"{drawn.lanes[bar['lane']].title}: {name}{about}"
        until = f" until {bar['end'] / 1e9:.9f} s" if bar["end"] < drawn.end else ""
        yield f"{FATES[Fate(bar['fate'])]}: {where}, since {bar['begin'] / 1e9:.9f} s{until}"


def _alarms(drawn: Scene, window: _Window, batch: int | None) -> Iterator[str]:
    """A line for each thing that went wrong in the window; of a batch that is asked for, with its task alone."""
    marks = drawn.marks[drawn.marks["alarm"]]
    marks = marks[(marks["time"] >= window.start) & (marks["time"] <= window.end)]
    marks = np.sort(marks if batch is None else marks[marks["task"] == batch], order="time")
    for number, mark in enumerate(marks[:_MOST_ALARMS]):
        if number == 0:
            yield ""
        said = plain(alarm(drawn, mark)[:200])
        yield f"went wrong: {drawn.lanes[mark['lane']].title}: {said}, at {mark['time'] / 1e9:.9f} s"
    if len(marks) > _MOST_ALARMS:
        yield f"went wrong: {len(marks) - _MOST_ALARMS} times more"


def _way(drawn: Scene, task: int) -> Iterator[str]:
    """The arrows of each batch with the task's number: a line for each, from where and when to where and when."""
    for batch in np.flatnonzero(drawn.batches["task"] == task).tolist():
        about = drawn.batches[batch]
        yield f"\nbatch {task} of loader {about['loader']}, epoch {about['epoch']}:"
        for arrow in drawn.arrows(np.array([batch])):
            left, reached = (f"{arrow[end] / 1e9:.9f} s" for end in ("left", "reached"))
            ends = [drawn.lanes[arrow[end]].title for end in ("from_lane", "to_lane")]
            yield f"  {left}  {ends[0]:<13} -> {reached}  {ends[1]:<13} {EVENTS[int(arrow['code'])].name}"


def _facts(row: np.void) -> str:
    event = EVENTS[int(row["code"])]
    facts = [f"task {row['task']}"] if row["task"] >= 0 else []
    facts += [f"worker {row['worker']}"] if row["worker"] >= 0 and event.track is Track.LOADER else []
    for field, column in zip(event.fields, ("bx", "by", "bz"), strict=False):
        value, unit = (row[column] / 1e9, "s") if field.unit == "ns" else (row[column], field.unit)
        if field.enum is None:
            facts.append(f"{field.name} {value:g} {unit}".rstrip())
    return f" ({', '.join(facts)})" if facts else ""


def _legend(bars: Rows, width: int) -> list[str]:
    kinds = _kinds(bars)
    made_up = set(kinds[bars["simulated"]].tolist())
    names: dict[str, list[str]] = {}
    for index in np.unique(kinds).tolist():
        words = f"{_KINDS[index]} (simulated)" if index in made_up else _KINDS[index]
        names.setdefault(LETTERS[_KINDS[index]], []).append(words)
    lines = [""]
    for letter, said in names.items():
        entry = f"{letter} {', '.join(said)}"
        if lines[-1] and len(lines[-1]) + 2 + len(entry) > width:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + entry
    return lines + textwrap.wrap("; ".join(_KEY), width)


# --- Colour -----------------------------------------------------------------------------------------------------------
def _use_colour(colour: bool | None) -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") if colour is None else colour


def _plain(text: str, kinds: list[int]) -> str:
    return text


def _paint(text: str, kinds: list[int]) -> str:
    """Colour each run of cells of one kind."""
    out = []
    begin = 0
    for at in range(1, len(kinds) + 1):
        if at == len(kinds) or kinds[at] != kinds[begin]:
            code = _code(_KINDS[kinds[begin]]) if kinds[begin] >= 0 else None
            run = text[begin:at]
            out.append(run if code is None else f"\x1b[48;5;{code};38;5;{_ink(code)}m{run}{_RESET}")
            begin = at
    return "".join(out)


def _code(kind: str) -> int | None:
    """The number of the colour, of 256, that comes nearest to the table's; None for waiting, and for a frame."""
    if kind in (*WAITING, "epoch"):
        return None
    colour = next((e.colour for e in EVENTS.values() if kind_of(e) == kind), _ALARM)
    return nearest_256(colour)


_ALARM: Final = EVENTS[ev.FOUND_DEAD].colour


def nearest_256(colour: str) -> int:
    """The number of "#rrggbb" in the terminal's cube of 6 x 6 x 6 colours, or in its 24 greys, whichever is nearer."""
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return min(range(16, 256), key=lambda code: (_distance(rgb, _rgb(code)), code))


def _rgb(code: int) -> list[int]:
    if code >= 232:
        return [8 + 10 * (code - 232)] * 3
    steps = (0, 95, 135, 175, 215, 255)
    return [steps[(code - 16) // size % 6] for size in (36, 6, 1)]


def _distance(one: Iterable[int], other: Iterable[int]) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def _ink(code: int) -> int:
    """Black or white, whichever is read better on the colour."""
    red, green, blue = _rgb(code)
    return 16 if 299 * red + 587 * green + 114 * blue > 140_000 else 231
