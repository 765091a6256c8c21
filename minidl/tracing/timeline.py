"""A trace as text: a lane for each thread, a character for each moment, for a terminal or a report.

Interface: `render(trace)` gives the whole picture as one string; the same trace and arguments, the same string.
How to read it: a cell holds the letter of what took most time in it (`LETTERS`), small where that is less than half of
the cell; blank = nothing at all. Time inside an inner span is not counted as the outer one's. A number after the first
letter is the task. `>>>` is a span that had not ended when the trace did. Below the lanes: what each spent its time on,
in shares of the window, and each span that did not end. Waiting has no colour, so that work stands out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from minidl.tracing import events as ev
from minidl.tracing.events import EVENTS, Event, Phase, Track
from minidl.tracing.export import nest

if TYPE_CHECKING:
    from minidl.tracing.reader import Trace

Rows = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]

LETTERS: Final = {
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
_RESET: Final = "\x1b[0m"


def kind_of(event: Event) -> str:
    """What a span's time counts as: its stage, or its name where it has none."""
    return event.stage or event.name


@dataclass(frozen=True, order=True)
class _Lane:
    """Whose time it is. Sorts as the lanes are drawn."""

    loader: int
    worker: int  # -1 in the loader's process
    place: int
    name: str


@dataclass(frozen=True)
class _Window:
    """What is drawn: [start, end] in ns of CLOCK_MONOTONIC, in so many cells; origin is the trace's first event."""

    origin: int
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
    """The timeline, lines of at most `width` characters in the lanes.

    since, until: s after the trace's first event. worker: leave out the lanes of the other workers. batch: draw only
    what was done for the task with that number, and, without since and until, only that long. colour: None = if
    standard output is a terminal and NO_COLOR is unset. ValueError where there is nothing to draw.
    """
    spans = _spans(trace, worker, batch)
    if not len(spans):
        raise ValueError(_nothing(trace, worker, batch))
    lanes = _lanes(trace, spans)
    label = max(len(lane.name) for lane in lanes) + 1
    window = _window(trace, spans, max(_LEAST_CELLS, width - label), since, until, batch is not None)
    paint = _paint if _use_colour(colour) else _plain
    several = len({lane.loader for lane in lanes}) > 1
    out = [_ruler(window, label)]
    shares = []
    loader = None
    for lane, rows in sorted(lanes.items()):
        if several and lane.loader != loader:
            loader = lane.loader
            out.append(f"loader {loader}:")
            shares.append(f"loader {loader}:")
        fill = _fill(rows, window)
        out.append((lane.name.ljust(label) + paint(*_characters(rows, fill, window))).rstrip())
        shares.append(lane.name.ljust(label) + _shares(fill, window))
    return "\n".join([*out, "", *shares, *_open(lanes, window), "", *_legend(lanes, label + window.cells)])


def _nothing(trace: Trace, worker: int | None, batch: int | None) -> str:
    asked = [f"{name} {value}" for name, value in (("worker", worker), ("batch", batch)) if value is not None]
    return f"{trace.path}: the trace has no span{' of ' + ' and '.join(asked) if asked else ''} to draw"


def _spans(trace: Trace, worker: int | None, batch: int | None) -> Rows:
    spans = trace.spans()
    keep = spans["code"] != ev.EPOCH[0]
    if batch is not None:
        keep &= (spans["task"] == batch) | (spans["end_task"] == batch)
    if worker is not None:
        roles = np.array([p.worker if p.role == "worker" else -1 for p in trace.processes] or [-1])
        if worker not in roles:
            raise ValueError(
                f"{trace.path}: there is no worker {worker}, only {sorted({w for w in roles.tolist() if w >= 0})}"
            )
        keep &= np.isin(roles[spans["process"]], (-1, worker))
    kept: Rows = spans[keep]
    return kept


def _window(trace: Trace, spans: Rows, cells: int, since: float | None, until: float | None, tight: bool) -> _Window:
    origin = int(trace.events["time"][0])
    start, end = origin, int(trace.events["time"][-1])
    if tight:
        start = int(spans["begin"].min())
        end = end if (spans["end"] < 0).any() else int(spans["end"].max())
    start = start if since is None else origin + round(since * 1e9)
    end = max(end, start + 1) if until is None else origin + round(until * 1e9)
    if end <= start:
        raise ValueError(f"the window from {(start - origin) / 1e9:g} s until {(end - origin) / 1e9:g} s has no length")
    return _Window(origin, start, end, cells)


# --- Lanes ------------------------------------------------------------------------------------------------------------
def _lanes(trace: Trace, spans: Rows) -> dict[_Lane, Rows]:
    """The spans of each lane. A thread belongs to one lane, but for the consumer's spans, which have their own."""
    tracks = np.array([list(Track).index(EVENTS[c].track) if c in EVENTS else 0 for c in range(max(EVENTS) + 1)])
    track = tracks[spans["code"]]
    thread = np.stack([spans["process"], spans["tid"], spans["loader"]], axis=1).astype(np.int64)
    pinning = _pin_threads(trace)
    out: dict[_Lane, list[Rows]] = {}
    for process, tid, loader in np.unique(thread, axis=0).tolist():
        mine = (thread == (process, tid, loader)).all(axis=1)
        consumer = mine & (track == list(Track).index(Track.CONSUMER))
        for which in (consumer, mine & ~consumer):
            if which.any():
                kinds = {list(Track)[t] for t in np.unique(track[which]).tolist()}
                lane = _lane_of(trace, process, tid, loader, kinds, pinning.get((process, tid)))
                out.setdefault(lane, []).append(spans[which])
    return {lane: np.concatenate(parts) for lane, parts in out.items()}


def _pin_threads(trace: Trace) -> dict[tuple[int, int], str]:
    """The pin threads, (process, tid), and what to call each: one that only copies says so."""
    out = {}
    for row in trace.events[np.isin(trace.events["code"], [ev.PIN_START, *ev.PIN])]:
        out[int(row["process"]), int(row["tid"])] = "pin (simulated)" if row["y"] else "pin thread"
    return out


def _lane_of(trace: Trace, process: int, tid: int, loader: int, kinds: set[Track], pinning: str | None) -> _Lane:
    who = trace.processes[process]
    worker = who.worker if who.role == "worker" else -1
    number = f" {worker}" if worker >= 0 else ""
    if kinds == {Track.CONSUMER}:
        return _Lane(loader, worker, 1, "consumer")
    if kinds == {Track.DEVICE}:
        return _Lane(loader, worker, 4, trace.threads.get((who.pid, tid), "device"))
    if kinds == {Track.FEEDER}:
        return _Lane(loader, worker, 2, "feeder" + number)
    if pinning:
        return _Lane(loader, worker, 3, pinning)
    return _Lane(loader, worker, 0, f"worker{number}" if worker >= 0 else "loader")


# --- Cells ------------------------------------------------------------------------------------------------------------
def _kinds(rows: Rows) -> Ints:
    """Index in LETTERS for each span."""
    known = {c: _KINDS.index(kind_of(e)) for c, e in EVENTS.items() if e.phase is Phase.BEGIN and c != ev.EPOCH[0]}
    table = np.array([known.get(c, 0) for c in range(max(EVENTS) + 1)], np.int64)
    kinds = table[rows["code"]]
    waiting = np.isin(kinds, [_KINDS.index(kind) for kind in WAITING])
    return np.where(rows["end"] < 0, np.where(waiting, _OPEN[1], _OPEN[0]), kinds)


def _fill(rows: Rows, window: _Window) -> Ints:
    """ns that each kind (row) took of each cell (column), what is inside a span not counted as the span itself."""
    kinds = _kinds(rows)
    until, around = nest(rows, (rows["process"].astype(np.int64) << 32) | rows["tid"])
    until = np.where(until < 0, window.end, until)
    inner = around >= 0
    edges = window.edges
    out = np.zeros((len(_KINDS), window.cells), np.int64)
    for kind in np.unique(kinds).tolist():
        mine = kinds == kind
        out[kind] += _cover(rows["begin"][mine], until[mine], edges)
        taken = inner & (kinds[around] == kind)
        out[kind] -= _cover(rows["begin"][taken], until[taken], edges)
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


def _characters(rows: Rows, fill: Ints, window: _Window) -> tuple[str, list[int]]:
    """The lane's characters, and the kind of each cell (-1 = nothing)."""
    most = fill.max(axis=0)
    kinds = np.where(most > 0, fill.argmax(axis=0), -1).tolist()
    full = (2 * most >= np.diff(window.edges)).tolist()
    letters = [" " if k < 0 else LETTERS[_KINDS[k]] for k in kinds]
    text = [letter if whole else letter.lower() for letter, whole in zip(letters, full, strict=True)]
    for row in _roomy(rows, window):
        first, last = (
            window.cell(int(row["begin"])),
            window.cell(int(row["end"]) - 1 if row["end"] >= 0 else window.end),
        )
        number = str(row["task"])
        if row["begin"] >= window.start and last - first > len(number):
            text[first + 1 : first + 1 + len(number)] = number
    _label_open(text, kinds, rows)
    return "".join(text), kinds


def _label_open(text: list[str], kinds: list[int], rows: Rows) -> None:
    """Write into the `>>>` at the right edge what it is that did not end, if there is room."""
    begin = len(kinds)
    while begin and kinds[begin - 1] in _OPEN:
        begin -= 1
    hung = rows[rows["end"] < 0]
    if len(hung):
        words = f" {EVENTS[int(hung['code'][hung['begin'].argmax()])].name} did not end "
        at = begin + 1 + len(str(hung["task"].max())) + 2
        if at + len(words) + 2 <= len(text):
            text[at : at + len(words)] = words


def _roomy(rows: Rows, window: _Window) -> Rows:
    """The spans that may have their task's number written into them."""
    until = np.where(rows["end"] < 0, window.end, np.minimum(rows["end"], window.end))
    wide = until - rows["begin"] > 2 * (window.end - window.start) // window.cells
    roomy: Rows = rows[wide & np.isin(rows["code"], _NUMBERED) & (rows["task"] >= 0) & (rows["begin"] < window.end)]
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
    for n in range(-((window.origin - window.start) // step), (window.end - window.origin) // step + 1):
        at = label + window.cell(window.origin + n * step)
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


def _percent(part: int, total: int) -> str:
    share = 100 * part / total
    return f"{share:.0f} %" if share >= 1 or part == 0 else "<1 %"


def _open(lanes: dict[_Lane, Rows], window: _Window) -> Iterator[str]:
    """A line for each span that did not end, the innermost of its thread first."""
    rows = [(lane, row) for lane, spans in sorted(lanes.items()) for row in spans[spans["end"] < 0][::-1]]
    for number, (lane, row) in enumerate(rows):
        if number == 0:
            yield ""
        about = _facts(row)
        since = (int(row["begin"]) - window.origin) / 1e9
        yield f"did not end: {lane.name}: {EVENTS[int(row['code'])].name}{about}, since {since:.6f} s"


def _facts(row: np.void) -> str:
    event = EVENTS[int(row["code"])]
    facts = [f"task {row['task']}"] if row["task"] >= 0 else []
    facts += [f"worker {row['worker']}"] if row["worker"] >= 0 and event.track is Track.LOADER else []
    for field, column in zip(event.fields, ("bx", "by", "bz"), strict=False):
        value, unit = (row[column] / 1e9, "s") if field.unit == "ns" else (row[column], field.unit)
        if field.enum is None:
            facts.append(f"{field.name} {value:g} {unit}".rstrip())
    return f" ({', '.join(facts)})" if facts else ""


def _legend(lanes: dict[_Lane, Rows], width: int) -> list[str]:
    shown = {k for rows in lanes.values() for k in np.unique(_kinds(rows)).tolist()}
    names: dict[str, list[str]] = {}
    for index in sorted(shown):
        names.setdefault(LETTERS[_KINDS[index]], []).append(_KINDS[index])
    lines = [""]
    for letter, kinds in names.items():
        entry = f"{letter} {', '.join(kinds)}"
        if lines[-1] and len(lines[-1]) + 2 + len(entry) > width:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + entry
    return lines


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
    """The number of the colour, of 256, that comes nearest to the table's; None for waiting."""
    if kind in WAITING:
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
