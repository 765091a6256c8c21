"""The scene: everything that views draw of a trace (bars, marks, the paths of batches, counters), as data.

Interface: `scene_of(trace)` -> `Scene`, arrays and small dataclasses; `Scene.pick` and `Scene.arrows` for chosen
batches; `caption` and `alarm` describe a bar and a mark in words; `per_pixel` sums up bars that are narrower than a
pixel. All views draw from a Scene, so that they agree.

Times are ns since the trace's first event. `layout` says which lane and row a bar lies in.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from minidl.hang.finding import Finding, Focus, FocusScope, RunOutcome
from minidl.hang.headline import headline
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Rows, distinct, starts, table_of
from minidl.tracefile.batches import NEVER, Batches, are_batches, bytes_in_flight, outstanding, reorder_depth
from minidl.tracefile.events import EVENTS, Actor, Event, Message, Phase
from minidl.tracefile.loaders import first_epochs
from minidl.tracefile.open_spans import alive_until, has_arrived, left_alive
from minidl.tracefile.words import Unit, duration, ending, unit_of
from minidl.views.colours import FRAMES, RED, STATES, Sign, legend, paint
from minidl.views.layout import Lane, LaneKind, Layout, Slot, only

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

BatchName = int | tuple[int, int, int]

EDGE: Final = 0.04
"""Share of the trace's duration that is added at its end if a span is open there, so that the open end is visible."""


SLIVER: Final = 0.01
"""Share of the trace's duration that a step has at least in the picture in which a process died."""


FEW_BATCHES: Final = 60
"""A run of so few is shown whole: its bars can be told apart."""


class Fate(enum.IntEnum):
    """How a bar ends."""

    ENDED = 0
    OPEN = 1  # did not end: drawn to the edge of the trace, or to its dead process's last sign of life
    LOST = 2  # has ended, since the span around it has, but its end was not recorded
    UNSEEN = 3  # its process stopped recording, and continued
    ALIVE = 4  # the program ended by itself, and left its iterator as it was


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process that was found dead, on its own lane: its last sign of life, ns, and in words."""

    lane: int
    time: int
    words: str


@dataclass(frozen=True, slots=True)
class Framed:
    """What views frame since the headline blames it. begin, end: ns; words: what is said there.

    rows: (lane, row) of each frame; row -1 = the lane from its top to its bottom. bar: the one to select, -1 = none;
    alone: whether the frame is that bar's.
    """

    rows: tuple[tuple[int, int], ...]
    begin: int
    end: int
    words: str
    bar: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Pointer:
    """An arrow from a wait to what is waited for: lane and row of both ends, and when both are (ns).

    reached: when what is waited for ended, if that was before the wait, which begin and end are then of; else -1.
    """

    from_lane: int
    from_row: int
    to_lane: int
    to_row: int
    begin: int
    end: int
    reached: int = -1

    def at(self, begin: int, end: int) -> tuple[float, float] | None:
        """Return when its ends are drawn in a window: right of what is written at the begins of bars; None = not there.

        To what has ended it slants, from the wait's begin.
        """
        left, right = max(self.begin, begin), min(self.end, end)
        if left >= right or (self.reached >= 0 and not begin <= self.reached <= end):
            return None
        x = left + 0.75 * (right - left)
        return (x, x) if self.reached < 0 else (left, self.reached)


@dataclass(frozen=True, slots=True)
class Counter:
    """A value that changes in steps: values[i] from times[i] (ns) on, 0 before."""

    name: str
    unit: str
    slot: int
    times: Ints
    values: Ints


BAR = np.dtype(
    [
        ("lane", "<i4"), ("row", "<i4"), ("code", "<u2"), ("fate", "u1"), ("simulated", "?"),
        ("begin", "<i8"), ("end", "<i8"), ("task", "<i8"), ("worker", "<i8"),
        ("number", "<i8"),  # in its caption: of its task (a wait's: the one needed), sample, worker or epoch; -1 = none
        ("known", "<i8"),  # up to when it is known to have lasted: an open bar is drawn further, so that one sees it
        ("batch", "<i8"),  # index in Scene.batches; -1 = of no batch
        ("span", "<i8"),  # index in Scene.spans
    ]
)  # fmt: skip
MARK = np.dtype(
    [
        ("lane", "<i4"), ("code", "<u2"), ("time", "<i8"), ("task", "<i8"), ("worker", "<i8"),
        ("batch", "<i8"), ("event", "<i8"),  # event: index in Trace.events
        ("alarm", "?"),  # a failure
        ("weak", "?"),  # of another actor, which this one only found
    ]
)  # fmt: skip
STOP = np.dtype(
    [
        ("batch", "<i8"), ("lane", "<i4"), ("row", "<i4"), ("code", "<u2"), ("begin", "<i8"), ("end", "<i8"),
        ("span", "<i8"), ("event", "<i8"),  # index in Scene.spans, or in Trace.events; -1 = it is the other
    ]
)  # fmt: skip
"""A stop on a batch's path."""

ARROW = np.dtype(
    [
        ("batch", "<i8"), ("from_lane", "<i4"), ("from_row", "<i4"), ("left", "<i8"),
        ("to_lane", "<i4"), ("to_row", "<i4"), ("reached", "<i8"), ("code", "<u2"),
    ]
)  # fmt: skip
"""From the end of one stop (`left`, ns) to the begin of the next (`reached`); code: what is reached."""

COLUMN = np.dtype(
    [("lane", "<i4"), ("row", "<i4"), ("code", "<u2"), ("pixel", "<i8"), ("share", "<f8"), ("bars", "<i8")]
)
"""The bars of one kind in one pixel that are narrower than it: how many, and their share of the pixel's time."""

WAITS: Final = (
    *(ev.NEXT[0], *ev.AWAITS, ev.RESULT_REBUILD[0], ev.WORKER_START[0], ev.SHUTDOWN[0]),
    *(ev.JOIN[0],),
)
"""Spans of the loader's own thread in which it may need what another process does."""

WAY: Final = ev.codes_where(lambda event: event.way and event.phase is Phase.BEGIN)
"""Spans on a batch's path between its index_put and its yield; then, if it goes to a device, the spans there."""

AT_END: Final = (ev.READY_GET[0], ev.DEVICE_WAIT[0])
"""Those whose end is the stop: a wait for a batch begins before the batch is ready."""

FADING: Final = (Fate.OPEN, Fate.UNSEEN, Fate.ALIVE)
"""Bars that are drawn to the edge."""

IDLE: Final = (ev.INDEX_GET[0],)
"""A worker's wait for a task."""

FATES: Final = {
    Fate.OPEN: "did not end",
    Fate.LOST: "its end is not in the trace",
    Fate.UNSEEN: "still open when the recording ended",
    Fate.ALIVE: "alive at the program's end",
}
"""Words for a bar whose end was not recorded."""

ALARMS: Final = ev.codes_where(lambda event: event.colour == RED)
"""Marks of failures. A worker_gone with an exit code other than 0 is one too, if none of these reported the death."""

_COMES_LATE = table_of([*ev.POLLS, ev.NEXT[0]])  # spans that learn their task at their end
_COMES_EARLY = table_of([ev.SAMPLER_NEXT[0], ev.TASK_ASSIGNED])  # their batch is put after them


# --- Words ------------------------------------------------------------------------------------------------------------
def simulated_column(code: int) -> str:
    """Return the column, "x" to "z", in which an event says that it was simulated; "" if it has no such field."""
    return next((c for c, field in EVENTS[code].columns.items() if field.name == "simulated"), "")


@cache
def numbered(code: int) -> tuple[str, str, str]:
    """Return which number a kind of span has in its caption: its column of SPAN, words before it in full and in short.

    ("bx", "", "s") for "sample 9" and "s9", ("begin_task", " for task", "for t") for a wait; "" if it has none.
    """
    event = EVENTS[code]
    if code == ev.INDEX_GET[0]:
        return "", "", ""
    for column, field in event.columns.items():
        if field.name in ("index", "epoch"):
            return f"b{column}", "", field.name[0].replace("i", "s")
    if event.has_task:
        return ("begin_task", " for task", "for t") if code in ev.AWAITS else ("task", "", "t")
    return ("worker", " worker", "w") if event.has_worker else ("", "", "")


_NUMBERS: Final = {"t": "task", "s": "sample", "w": "worker", "e": "epoch"}


def letters(codes: Iterable[int]) -> str:
    """Return what the letters in the short captions of these kinds of span mean: "t task, s sample"; "" if none."""
    there = {numbered(code)[2][-1:] for code in codes}
    return ", ".join(f"{letter} {what}" for letter, what in _NUMBERS.items() if letter in there)


def caption(scene: Scene, bar: np.void) -> tuple[str, str]:
    """Return a bar's caption in full and in short: ("sample 65", "s65"), ("wait for task 9", "for t9")."""
    code, span, number = int(bar["code"]), scene.spans[bar["span"]], int(bar["number"])
    label = span_name(scene.trace, span) or paint(code).label
    if code == ev.EPOCH[0] and int(span["loader"]) in scene.own_epochs:
        label = f"iterator {span['loader']} epoch"
    _, before, letter = numbered(code)
    return (f"{label}{before} {number}", f"{letter}{number}") if number >= 0 else (label, "")


def has_field(trace: Trace, span: np.void, name: str) -> bool:
    """Tell whether a span's own field is shown: the timeout of a wait only if the user has set one, and no poll's."""
    return name != "timeout" or bool(trace.loaders.get(int(span["loader"]), {}).get("timeout_s"))


def span_name(trace: Trace, span: np.void) -> str:
    """Return the name that the user gave the span; "" if it is not a span that the user names."""
    named = is_named(EVENTS[int(span["code"])])
    return trace.strings.get((int(span["process"]), int(span["bx"])), "") if named else ""


def is_named(event: Event) -> bool:
    """Tell whether the user names the spans of this kind: whether their first field is a text."""
    return bool(event.fields) and event.fields[0].unit == "string"


def alarm(scene: Scene, mark: np.void) -> str:
    """Return what a mark of a failure says: its name, whom and what it concerns."""
    row, event = scene.trace.events[mark["event"]], EVENTS[int(mark["code"])]
    if mark["code"] == ev.WORKER_GONE:
        return f"worker {row['worker']} gone: {_exit_in_words(int(row['y']))}"
    words = [event.name.replace("_", " ")]
    for column, field in event.columns.items():
        if field.enum is not None:
            words += [m.name.lower().replace("_", " ") for m in field.enum if m == row[column]]
    if row["worker"] >= 0 and scene.lanes[mark["lane"]].worker < 0:
        words.append(f"worker {row['worker']}" if words[-1] != "worker" else str(row["worker"]))
    text = scene.trace.text(row)
    return " ".join(words) + (f": {text}" if text else "")


def alarming(events: Rows) -> Bools:
    """Tell which of a trace's events report a failure, each death once."""
    out: Bools = np.isin(events["code"], ALARMS)
    reported = events[np.isin(events["code"], [ev.FOUND_DEAD, ev.TERMINATE])]
    known = {(int(row["process"]), int(row["loader"]), int(row["worker"])) for row in reported}
    for at in np.flatnonzero((events["code"] == ev.WORKER_GONE) & (events["y"] != 0)).tolist():
        row = events[at]
        out[at] = (int(row["process"]), int(row["loader"]), int(row["worker"])) not in known
    return out


def _exit_in_words(code: int) -> str:
    """Return an exit code in words: a negative one is a signal's number."""
    return f"{'killed by ' if code < 0 else ''}{ending(code)}"


def title_of(trace: Trace) -> str:
    """Return the last part of the trace's path, as text that every encoding can write."""
    return trace.path.name.encode("utf-8", "backslashreplace").decode()


def legend_of(scene: Scene, blames: bool = True) -> list[Sign]:
    """Return the legend of what is drawn: one for all views. blames: whether what the headline blames is pointed at."""
    bars, marks = scene.bars, scene.marks
    return legend(
        np.unique(bars["code"]).tolist(),
        simulated=bool(bars["simulated"].any()),
        unended=bool(np.isin(bars["fate"], FADING).any()),
        letters=letters(np.unique(bars["code"]).tolist()),
        cause=blames and scene.cause is not None,
        failed=bool(marks["alarm"].any() or scene.deaths),
        states=[code for code in STATES if (marks["code"] == code).any()],
    )


# --- The scene --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Scene:
    """Everything that can be drawn of a trace in a window.

    Arrays: bars of BAR by lane, row and begin; marks of MARK by lane and time; batches of BATCH by put; stops of STOP
    by batch and time. begin, end: the window, ns. spans: all of the trace, array of SPAN. Epochs are the DataLoader's.
    """

    trace: Trace
    start: int  # CLOCK_MONOTONIC ns of time 0
    begin: int
    end: int
    last: int  # up to when the run is known, ns; open bars are drawn beyond it, unless the run goes on
    slots: tuple[Slot, ...]
    lanes: tuple[Lane, ...]
    bars: Rows
    marks: Rows
    batches: Rows
    stops: Rows
    counters: tuple[Counter, ...]
    spans: Rows
    deaths: tuple[Death, ...] = ()

    @cached_property
    def headline(self) -> Finding:
        return headline(self.trace, self.spans)

    @cached_property
    def own_epochs(self) -> list[int]:
        """Numbers of the iterators whose epochs are their own, since their DataLoader is not known; if it matters."""
        loaders = self.trace.loaders
        return [n for n in loaders if n not in first_epochs(self.trace)] if len(loaders) > 1 else []

    @cached_property
    def culprit(self) -> int:
        """The bar that the headline points at; -1 = none, or it is not drawn."""
        spot = self.headline.focus
        if spot is None:
            return -1
        spans = self.spans[self.bars["span"]]
        same = (spans["process"] == spot.process) & (spans["tid"] == spot.tid) & (self.bars["code"] == spot.code)
        at = spot.span - self.start  # of a wait that polls: of one of the polls
        found = np.flatnonzero(same & (self.bars["begin"] <= at) & (self.bars["end"] >= at))
        return int(found[-1]) if len(found) else -1

    @cached_property
    def unit(self) -> Unit:
        """The unit of all times that a picture of the scene shows."""
        return unit_of(min(self.end, self.last))

    @property
    def fates(self) -> dict[Fate, str]:
        """FATES of this trace: what did not end may still end while the run goes on."""
        return FATES | ({Fate.OPEN: "not ended yet"} if self.trace.seen else {})

    @cached_property
    def framed(self) -> Framed | None:
        """What the headline blames; None if that is not drawn."""
        spot, at = self.headline.focus, self.culprit
        if spot is None:
            return None
        if spot.frame is FocusScope.PROCESS:
            return self._standing_still(spot)
        if at < 0:
            return None
        bar = self.bars[at]
        begin, end = int(bar["begin"]), int(bar["end"])
        full = caption(self, bar)[0]
        if spot.frame is FocusScope.ALIKE:
            return self._alike(at)
        if self.headline.outcome is RunOutcome.SLOW:
            words = f"{full}: {duration(end - begin)}"
        else:
            said = bar["fate"] and int(bar["code"]) not in IDLE
            words = f"{full}: {self.fates[Fate(bar['fate'])]}" if said else full
        return Framed(((int(bar["lane"]), int(bar["row"])),), begin, end, words, at, alone=True)

    def _standing_still(self, spot: Focus) -> Framed | None:
        """Frame all of a process's lane since its last sign of life."""
        mine = self.spans["process"][self.bars["span"]] == spot.process
        kinds = np.array([lane.kind in (LaneKind.WORKER, LaneKind.LOADER) for lane in self.lanes], bool)
        lanes = self.bars["lane"][mine]
        lanes = lanes[kinds[lanes]]
        if not len(lanes):
            return None
        wait = self.waiter
        ended = wait >= 0 and self.bars["fate"][wait] == Fate.ENDED
        end = spot.end - self.start if ended else self.end
        return Framed(((int(lanes[-1]), -1),), spot.since - self.start, end, spot.words, self.culprit)

    def _alike(self, at: int) -> Framed:
        """Frame every row that has such steps, in all lanes of the same loader."""
        bar, bars = self.bars[at], self.bars
        slot = np.array([lane.slot for lane in self.lanes])
        like = bars[(bars["code"] == bar["code"]) & (slot[bars["lane"]] == slot[bar["lane"]])]
        like = like[like["fate"] == Fate.ENDED]
        each = duration(float(np.median(like["end"] - like["begin"])))
        words = f"{paint(int(bar['code'])).label}: {len(like):,} times, each about {each}"
        rows = tuple((lane, row) for lane, row in distinct(like, "lane", "row"))
        return Framed(rows, int(like["begin"].min()), int(like["end"].max()), words, at)

    @cached_property
    def waiter(self) -> int:
        """The bar of the loader that waited for what the headline blames, the innermost one; -1 = none."""
        spot = self.headline.focus
        if spot is None:
            return -1
        begin, end = spot.begin - self.start, spot.end - self.start
        there = np.flatnonzero(
            np.isin(self.bars["code"], WAITS) & (self.bars["begin"] < end) & (self.bars["end"] > begin)
        )
        bars = self.bars[there]
        spans = self.spans[bars["span"]]
        mine = spans["loader"] == spot.loader
        if self.headline.outcome is RunOutcome.SLOW and spot.task >= 0:
            mine &= np.isin(spans["begin_task"], (-1, spot.task))  # a wait for another batch is not for this step
        mine &= np.array([lane.kind is LaneKind.LOADER for lane in self.lanes], bool)[bars["lane"]]
        bars, there = bars[mine], there[mine]
        if not len(bars):
            return -1
        overlap = np.minimum(bars["end"], end) - np.maximum(bars["begin"], begin)
        return int(there[np.lexsort((bars["row"], overlap > 0.5 * overlap.max()))[-1]])

    @cached_property
    def cause(self) -> Pointer | None:
        """The arrow from the wait to what the headline blames; None if one of them is not drawn, or both are one."""
        framed, wait = self.framed, self.waiter
        if framed is None or wait < 0:
            return None
        bar = self.bars[wait]
        one = framed.rows[0] if framed.bar < 0 or len(framed.rows) == 1 else None
        lane, row = one or (int(self.bars["lane"][framed.bar]), int(self.bars["row"][framed.bar]))
        begin, end = framed.begin, framed.end
        if one is None:
            begin, end = int(self.bars["begin"][framed.bar]), int(self.bars["end"][framed.bar])
        before = self.headline.outcome is RunOutcome.DIED and end <= bar["begin"]  # it is waited for all the same
        reached = end if before else -1
        begin = max(begin, int(bar["begin"]))
        end = min(int(bar["end"]), max(self.last, 1), NEVER if before else end)
        if lane == bar["lane"] or begin >= end:
            return None
        return Pointer(int(bar["lane"]), int(bar["row"]), lane, row, begin, end, reached)

    def unended(self) -> list[int]:
        """Return the bars that did not end, what is to blame first: then work, the innermost first, waits, an epoch.

        An idle worker's wait for a task is none of them: it may end at any time.
        """
        bars = self.bars
        blamed = self.framed.bar if self.framed is not None else -1
        still = self.framed is not None and not self.framed.alone
        idle = np.isin(bars["code"], IDLE) & ((np.arange(len(bars)) != blamed) | (not still))
        there = np.flatnonzero(np.isin(bars["fate"], FADING) & ~idle)
        looks = [paint(code) for code in bars["code"][there].tolist()]
        rank = np.array([2 * (look.label in FRAMES) + look.waits for look in looks], int) - 4 * (there == blamed)
        found: list[int] = there[np.lexsort((-bars["begin"][there], rank))].tolist()
        return found

    @property
    def opening(self) -> tuple[int, int]:
        """Begin and end, ns, of what a view that can move shows first: around the focus, or a short run whole."""
        spot = self.headline.focus
        if spot is None or len(self.batches) <= FEW_BATCHES:
            return self.begin, self.end
        yielded = np.sort(self.batches["yielded"][self.batches["yielded"] >= 0])
        each = int(np.median(np.diff(yielded))) if len(yielded) > 1 else (self.end - self.begin) // 10
        begin, end = min(spot.begin, spot.span) - self.start, spot.end - self.start
        around = max((end - begin) // 2, 6 * each)
        begin, end = max(self.begin, begin - around), min(self.end, end + around)
        return (begin, end) if end - begin < 0.7 * (self.end - self.begin) else (self.begin, self.end)

    @property
    def height(self) -> float:
        return max((lane.bottom for lane in self.lanes), default=0.0)

    def pick(self, names: Iterable[BatchName]) -> Ints:
        """Return the indices of batches by name: a task's number, in any iterator and epoch, or all three.

        names: tasks, or (loader, epoch, task). Raises ValueError if the trace has no such batch.
        """
        known = self.batches
        out = []
        for name in names:
            if isinstance(name, tuple):
                loader, epoch, task = name
                found = (known["loader"] == loader) & (known["epoch"] == epoch) & (known["task"] == task)
            else:
                found = known["task"] == name
            if not found.any():
                have = f"tasks 0 to {known['task'].max()}" if len(known) else "no batches of workers"
                raise ValueError(f"batches: the trace has no batch {name}: it has {have}")
            out.append(np.flatnonzero(found))
        return np.unique(np.concatenate(out)) if out else np.empty(0, np.int64)

    def arrows(self, batches: Ints) -> Rows:
        """Return an array of ARROW for the batches with these indices, by batch and time."""
        stops = self.stops[np.isin(self.stops["batch"], batches)]
        tail, head = stops[:-1], stops[1:]
        joined = tail["batch"] == head["batch"]
        tail, head = tail[joined], head[joined]
        out = np.zeros(len(tail), ARROW)
        for name, source, column in (
            ("batch", tail, "batch"), ("from_lane", tail, "lane"), ("from_row", tail, "row"),
            ("to_lane", head, "lane"), ("to_row", head, "row"), ("reached", head, "begin"), ("code", head, "code"),
        ):  # fmt: skip
            out[name] = source[column]
        # A reader may begin before the writer returns from the write.
        out["left"] = np.minimum(tail["end"], head["begin"])
        return out


def scene_of(
    trace: Trace, *, since: float | None = None, until: float | None = None, workers: Iterable[int] | None = None
) -> Scene:
    """Lay out a trace. since, until: seconds from its first event; workers: those whose lanes are wanted.

    Raises ValueError if the window is empty or outside the trace, or if a worker is not in the trace.
    """
    maker = _Maker(trace)
    begin, end = window_of(maker.edge, since, until)
    lanes, bars, marks = maker.lanes, maker.bars(), maker.marks()
    if workers is not None:
        lanes, bars, marks = only(lanes, bars, marks, set(workers))
    stops = _stops(bars, marks)
    bars = bars[(bars["begin"] <= end) & (bars["end"] >= begin)]
    marks = marks[(marks["time"] <= end) & (marks["time"] >= begin)]
    return Scene(
        trace, maker.start, begin, end, maker.last, maker.crew.slots, lanes, bars, marks, maker.batches(), stops,
        tuple(_clipped(counter, begin, end) for counter in maker.counters()), maker.spans,
        tuple(death for death in _deaths(maker, lanes, bars) if begin <= death.time <= end),
    )  # fmt: skip


def window_of(edge: int, since: float | None, until: float | None) -> tuple[int, int]:
    """Return begin and end, ns, of the window in a trace that ends at `edge`. Raises ValueError if it is empty."""
    begin, end = 0, max(edge, 1)
    if all(math.isfinite(second * 1e9) for second in (since, until) if second is not None):
        begin, end = (at if s is None else round(s * 1e9) for s, at in ((since, begin), (until, end)))
        if begin < end and begin < max(edge, 1) and end > 0:
            return begin, end
    asked = ", ".join(f"{name}={s} s" for name, s in (("since", since), ("until", until)) if s is not None)
    raise ValueError(f"{asked}: no part of the trace is in this window; the trace goes from 0 to {edge / 1e9:.6g} s")


def _clipped(counter: Counter, begin: int, end: int) -> Counter:
    """Return the counter within the window, with its value at the window's begin."""
    first = max(0, int(np.searchsorted(counter.times, begin, side="right")) - 1)
    last = int(np.searchsorted(counter.times, end, side="right"))
    return Counter(counter.name, counter.unit, counter.slot, counter.times[first:last], counter.values[first:last])


def _stops(bars: Rows, marks: Rows) -> Rows:
    came = (bars["fate"] == Fate.ENDED) | ~np.isin(bars["code"], AT_END)
    spans = bars[np.isin(bars["code"], WAY) & (bars["batch"] >= 0) & came]
    points = marks[np.isin(marks["code"], [ev.INDEX_PUT, ev.YIELD]) & (marks["batch"] >= 0)]
    out = np.zeros(len(spans) + len(points), STOP)
    for name in ("batch", "lane", "code"):
        out[name] = np.concatenate([spans[name], points[name]])
    out["row"][: len(spans)] = spans["row"]
    out["begin"] = np.concatenate([spans["begin"], points["time"]])
    out["end"] = np.concatenate([spans["end"], points["time"]])
    out["span"] = np.concatenate([spans["span"], np.full(len(points), -1)])
    out["event"] = np.concatenate([np.full(len(spans), -1), points["event"]])
    late = np.isin(out["code"], AT_END)
    out["begin"][late] = out["end"][late]
    return out[np.lexsort((out["begin"], out["batch"]))]


def _deaths(maker: _Maker, lanes: tuple[Lane, ...], bars: Rows) -> Iterator[Death]:
    """Yield the death of each process that was found dead and has bars."""
    events, processes = maker.events, maker.trace.processes
    done = set[int]()
    for row in events[alarming(events) & np.isin(events["code"], ev.DEATHS)]:
        pid, code = ev.death_of(row)
        index = next((at for at in reversed(range(len(processes))) if processes[at].pid == pid), -1)
        if index < 0 or index in done or (row["code"] == ev.FOUND_DEAD and row["x"] == Actor.PIN_THREAD):
            continue
        done.add(index)
        own = bars["lane"][maker.spans["process"][bars["span"]] == index]
        own = own[[lanes[lane].kind in (LaneKind.WORKER, LaneKind.LOADER) for lane in own.tolist()]]
        if len(own):
            how = _exit_in_words(code) if code else "ended without a shutdown"
            yield Death(int(own[-1]), int(maker.lived[index]), f"{how}; last sign of life")


# --- From spans to bars -----------------------------------------------------------------------------------------------
class _Maker:
    """Makes a scene's parts from a trace. until, fate, row: of each span's bar its end (ns), how it ends, its row.

    lived, at_the_end: of each process its last sign of life (ns), and whether it was there when the trace ended.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events: Rows = trace.events
        self.start = trace.start
        self.spans = trace.spans()
        epochs = self.spans["code"] == ev.EPOCH[0]
        for column in ("bx", "ex"):
            self.spans[column][epochs] += self._first_epochs(self.spans[epochs])
        self.layout = Layout(trace, self.spans)
        self.crew = self.layout.crew
        self.begin, is_open = self.spans["begin"] - self.start, self.spans["end"] < 0
        last = trace.last - self.start if len(self.events) else 0
        lived: Ints = np.array(alive_until(trace), np.int64) - self.start
        seen = min(int(lived.max(initial=0)), trace.watched.until - self.start) if len(self.events) else 0
        self.last = max(last, seen)
        self.lived: Ints = np.minimum(lived, self.last)
        self.at_the_end = self.lived >= max(last, self.last - self._sliver)  # a kill of them all takes a moment
        goes_on = is_open & self.at_the_end[self.spans["process"]]
        margin = max(1, round(self.last * EDGE)) if goes_on.any() and not trace.seen else 0
        self.edge = min(self.last + margin, NEVER)
        self.until = np.where(is_open, self.edge, self.spans["end"] - self.start)
        self.fate = is_open.astype(np.uint8) * np.uint8(Fate.OPEN)
        self._end_with_the_enclosing()
        self._end_with_the_process()
        self._end_what_has_arrived()
        stopped = [line["process"] for line in trace.described("trace_end")]
        self.fate[(self.fate == Fate.OPEN) & np.isin(self.spans["process"], stopped)] = Fate.UNSEEN
        alive = np.isin(self.spans["loader"], list(left_alive(trace))) & (self.until >= self.edge)
        self.fate[np.isin(self.fate, FADING) & alive] = Fate.ALIVE
        self._end_with_the_successor()
        self.drawn = np.ones(len(self.spans), bool)
        self._join_polls()
        self.row, self.lanes = self.layout.stack(self.begin, self.until, self.drawn)
        self.iterator = self.crew.iterator[self.crew.of(self.events)]
        self.sent = Batches(self.events, self.iterator)

    def _first_epochs(self, rows: Rows) -> Ints:
        """Return for each row how many epochs its DataLoader had before its iterator."""
        first = first_epochs(self.trace)
        return np.array([first.get(loader, 0) for loader in rows["loader"].tolist()], np.int64)

    @property
    def _sliver(self) -> int:
        return max(1, round(self.last * SLIVER))

    def _end_with_the_enclosing(self) -> None:
        """End open spans with the innermost ended span around them."""
        lane, is_open = self.layout.span_lane, self.fate == Fate.OPEN
        for number in np.unique(lane[is_open]).tolist():
            mine = np.flatnonzero(lane == number)
            for at, limit in _enclosing(self.begin[mine], self.until[mine], is_open[mine]):
                self.until[mine[at]] = limit
                self.fate[mine[at]] = Fate.LOST

    def _end_with_the_process(self) -> None:
        """End a dead process's open spans with its last sign of life, or a little later, so that one sees them."""
        for process in np.flatnonzero(~self.at_the_end).tolist():
            mine = (self.fate == Fate.OPEN) & (self.spans["process"] == process)
            last = max(int(self.lived[process]), int(self.begin[mine].max(initial=0)) + self._sliver)
            self.until[mine] = np.minimum(self.until[mine], last)

    def _end_what_has_arrived(self) -> None:
        """End open writes of results that the loader has: the process ended before its feeder could say so."""
        for at in np.flatnonzero((self.fate == Fate.OPEN) & (self.spans["code"] == ev.RESULT_WRITE[0])).tolist():
            if has_arrived(self.trace, self.spans[at]):
                self.fate[at] = Fate.LOST
                self.until[at] = min(self.until[at], self.begin[at] + self._sliver)

    def _join_polls(self) -> None:
        """Draw polls that continue one wait as one bar, that of the last one: it began with the first."""
        spans = self.spans
        order = np.lexsort((spans["begin"], spans["loader"], spans["tid"], spans["process"]))
        rows = spans[order]
        empty = np.isin(rows["code"], ev.POLLS) & (rows["end"] >= 0) & (rows["ex"] == Message.EMPTY)
        goes_on = empty[:-1] & ~starts(*(rows[name] for name in ("process", "tid", "loader", "code")))[1:]
        begins = np.append(True, ~goes_on)[: len(rows)]
        self.begin[order] = self.begin[order][np.flatnonzero(begins)[np.cumsum(begins) - 1]]
        self.drawn[order[:-1][goes_on]] = False

    def _end_with_the_successor(self) -> None:
        """End an iterator's open spans when another iterator takes over its lanes."""
        crew, is_open = self.crew, np.flatnonzero(np.isin(self.fate, FADING))
        iterator = crew.iterator[crew.of(self.spans[is_open])]
        for slot in np.unique(crew.slot_of[iterator]).tolist():
            begins = np.sort(crew.begun[crew.slot_of == slot])
            mine = crew.slot_of[iterator] == slot
            after = np.searchsorted(begins, crew.begun[iterator[mine]], side="right")
            limit = np.append(begins - self.start, NEVER)[after]
            spans = is_open[mine]
            self.fate[spans[(limit < self.until[spans]) & (self.fate[spans] != Fate.ALIVE)]] = Fate.LOST
            self.until[spans] = np.minimum(self.until[spans], limit)

    def bars(self) -> Rows:
        spans, codes = self.spans, self.spans["code"]
        out = np.zeros(len(spans), BAR)
        out["lane"], out["row"], out["code"], out["fate"] = self.layout.span_lane, self.row, codes, self.fate
        out["begin"], out["end"], out["span"] = self.begin, self.until, np.arange(len(spans))
        out["known"] = np.maximum(np.minimum(self.until, self.lived[spans["process"]]), self.begin)
        came = _COMES_LATE[codes] & (spans["end"] >= 0)
        for name in ("task", "worker"):
            out[name] = np.where(came, spans["end_" + name], spans[name])
        out["number"] = -1
        for code in np.unique(codes).tolist():
            mine = codes == code
            if column := simulated_column(code):
                out["simulated"][mine] = spans["b" + column][mine] != 0
            out["simulated"][mine] |= "planned" in self.trace.manifest
            if column := numbered(code)[0]:
                out["number"][mine] = spans[column][mine]
        yielded = (codes == ev.NEXT[0]) & (spans["end_task"] >= 0)
        out["number"][yielded] = spans["end_task"][yielded]
        iterator = self.crew.iterator[self.crew.of(spans)]
        times = np.where(came, spans["end"], spans["begin"])
        out["batch"] = self.sent.find(iterator, out["task"], times, _COMES_EARLY[codes])
        out["batch"][(codes == ev.SAMPLER_NEXT[0]) & (spans["ex"] == 0)] = -1  # the sampler had no more
        out = out[self.drawn]
        return out[np.lexsort((out["begin"], out["row"], out["lane"]))]

    def marks(self) -> Rows:
        rows = self.events[self.layout.marks]
        out = np.zeros(len(rows), MARK)
        out["lane"], out["time"], out["event"] = self.layout.mark_lane, rows["time"] - self.start, self.layout.marks
        for name in ("code", "task", "worker"):
            out[name] = rows[name]
        iterator = self.iterator[self.layout.marks]
        out["batch"] = self.sent.find(iterator, rows["task"], rows["time"], _COMES_EARLY[rows["code"]])
        out["alarm"] = alarming(rows)
        out["weak"] = np.isin(rows["code"], ev.DEATHS)
        return out[np.lexsort((out["time"], out["lane"]))]

    def batches(self) -> Rows:
        """Return the array of SENT, with times since the trace's first event."""
        out = self.sent.table.copy()
        out["epoch"] += self._first_epochs(out)
        out["put"] -= self.start
        out["yielded"] -= np.where(out["yielded"] >= 0, self.start, 0)
        out["end"] -= np.where(out["end"] < NEVER, self.start, 0)
        return out

    def counters(self) -> Iterator[Counter]:
        """Yield for each slot: tasks outstanding, batches in the reorder buffer, bytes in flight."""
        slot_of = self.crew.slot_of
        for slot in range(len(self.crew.slots)):
            mine = slot_of[self.iterator] == slot
            events = self.events if mine.all() else self.events[mine]  # saves a copy
            for name, unit, (times, values) in (
                ("outstanding", "tasks", outstanding(events)),
                ("reorder buffer", "batches", reorder_depth(events)),
                ("in flight", "B", bytes_in_flight(self.sent, slot_of[self.sent.table["group"]] == slot)),
            ):
                if values.any():
                    yield Counter(name, unit, slot, times - self.start, values)


def _enclosing(begin: Ints, until: Ints, is_open: Bools) -> Iterable[tuple[int, int]]:
    """Yield for each open span (by begin) inside an ended one its position, and the end of the innermost such span."""
    around: list[int] = []  # ends of the ended spans that are not over yet
    first = int(np.argmax(is_open))
    before = np.flatnonzero(~is_open[:first] & (until[:first] > begin[first])).tolist()
    for at in [*before, *range(first, len(begin))]:
        while around and around[-1] <= begin[at]:
            around.pop()
        if not is_open[at]:
            around.append(int(until[at]))
        elif around:
            yield at, around[-1]


# --- What is narrower than a pixel ------------------------------------------------------------------------------------
def per_pixel(bars: Rows, begin: int, end: int, pixels: int) -> tuple[Rows, Rows]:
    """Return the bars that are a pixel wide or more, and an array of COLUMN for the rest.

    Each narrow bar counts in the pixel that its middle lies in: how many there are, and how much time is theirs.
    """
    size = (end - begin) / pixels
    took = bars["end"] - bars["begin"]
    wide = (took >= size) | np.isin(bars["fate"], FADING)
    thin = bars[~wide]
    pixel = np.clip(((thin["begin"] + thin["end"]) / 2 - begin) // size, 0, pixels - 1).astype(np.int64)
    order = np.lexsort((pixel, thin["code"], thin["row"], thin["lane"]))
    thin, pixel, took = thin[order], pixel[order], took[~wide][order]
    first = np.flatnonzero(starts(thin["lane"], thin["row"], thin["code"], pixel))
    out = np.zeros(len(first), COLUMN)
    for name in ("lane", "row", "code"):
        out[name] = thin[name][first]
    out["pixel"] = pixel[first]
    if len(first):
        out["share"] = np.minimum(1.0, np.add.reduceat(took, first) / size)
        out["bars"] = np.diff(np.append(first, len(thin)))
    return bars[wide], out


# --- Two traces on one axis -------------------------------------------------------------------------------------------
def batches_of(trace: Trace, loaders: tuple[int, ...]) -> Ints:
    """Return when these iterators yielded their batches, ns from the trace's first event."""
    mine = trace.events[np.isin(trace.events["loader"], loaders)]
    return np.asarray(mine["time"][are_batches(mine)] - trace.start, np.int64)


def opening_of(batches: Sequence[Ints]) -> int:
    """Return how long two traces are shown from their first batches on, ns: see `picture.before_and_after`."""
    return max(1000, *(int(times[:FEW_BATCHES][-1] - times[0]) for times in batches))
