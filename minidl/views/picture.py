"""A trace as a matplotlib figure: `timeline(trace)`, drawn from the Scene.

matplotlib is imported when the function is called, and pyplot never is, so that neither global state nor a display is
needed: save with `figure.savefig("name.png")` or `.svg`; a notebook displays the figure by itself. Bars narrower than a
pixel are drawn as columns, as dense as they fill their pixel. Text of the trace is never parsed as mathematics.
"""

from __future__ import annotations

import functools
import io
import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Ints, Rows, distinct
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import counted, unit_of
from minidl.views.colours import (
    ACTORS,
    BATCHES,
    RED,
    SOFT,
    STATES,
    THEMES,
    Paint,
    Sign,
    is_light,
    mixed,
    on_paper,
    paint,
    rgb,
)
from minidl.views.layout import LaneKind
from minidl.views.scene import (
    FADING,
    IDLE,
    BatchName,
    Fate,
    Scene,
    alarm,
    batches_of,
    caption,
    legend_of,
    opening_of,
    per_pixel,
    scene_of,
    title_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DPI: Final = 144
ROW_INCHES, LEAST_ROW_INCHES = 0.2, 0.085  # of a row of height 1, in a small trace and in one of many lanes
HIGH_ENOUGH: Final = 14.0  # inches of all lanes, above which rows are made smaller
COUNTER_INCHES: Final = 0.42
LEGEND_INCHES: Final = 0.155  # a line of the legend
LINE_INCHES: Final = 0.21  # a line of the headline
LEFT, RIGHT, GAP = 1.15, 0.3, 0.12  # inches beside and between the axes
LEAST_WIDTH: Final = 2.5
CAPTIONS: Final = 500
"""Most captions inside bars; the widest bars come first."""

LEAST_LETTERS: Final = 3.6
"""Font size (points) below which captions inside bars are left out."""

FADE: Final = 64
"""Pieces of decreasing opacity that an open bar is made of."""

FAINTEST = 0.15
"""Least opacity of a pixel that holds anything."""

INK, FAINT, PAPER = (THEMES["light"][name] for name in ("ink", "faint", "paper"))
WAIT, DOTS = "////", "..."
"""Hatches of waits, and of what is simulated."""

LABEL: Final = {"facecolor": PAPER, "alpha": 0.85, "linewidth": 0, "pad": 0.6}
"""What words beside a mark stand on."""

MARGIN: Final = 0.16  # of a row, above and below its bars

STATE_LINES: Final = {ev.RESUMED: "resumed after {}", ev.STATE_TAKEN: "state taken: {}"}
"""Captions of the lines that these two draw through all lanes."""


def timeline(
    trace: Trace | str | os.PathLike[str],
    *,
    since: float | None = None,
    until: float | None = None,
    batches: Iterable[BatchName] | None = None,
    workers: Iterable[int] | None = None,
    width: float = 9.0,
    title: str | None = None,
    headline: bool = True,
) -> Figure:
    """Draw a trace, or the one at a path: lanes of bars, arrows for the batches that are asked for, counters below.

    since, until: seconds from the trace's first event. batches: task numbers, or (loader, epoch, task). workers: those
    to show. width: inches, at least 2.5; by default about a notebook's cell. title: by default the trace's name.
    headline: whether to say, and to outline, what bounds the run or stopped it. Steps that did not end fade towards the
    right edge. Raises ValueError for a window, a batch or a worker that is not in the trace, ImportError without
    matplotlib.
    """
    make = figure_class()
    if not width >= LEAST_WIDTH:
        raise ValueError(f"width={width}: a figure is at least {LEAST_WIDTH} inches wide")
    trace = read_trace(trace)
    shown = scene_of(trace, since=since, until=until, workers=workers)
    picked = shown.pick(batches or ())
    drawing = _Drawing(shown, width, title_of(trace) if title is None else title, headline)
    return drawing.draw(picked, make(figsize=(width, drawing.high), dpi=DPI, facecolor=PAPER))


def before_and_after(
    traces: Sequence[Trace], loaders: Sequence[tuple[int, ...]], headline: str, width: float = 9.0
) -> Figure:
    """Draw two traces, A above B, on one time axis: each from the first batch of its iterators `loaders`.

    It is as long as the slower one takes for FEW_BATCHES batches, or for all. headline: the title. width: inches. B's
    legend has what A's lacks. Raises ImportError without matplotlib.
    """
    batches = [batches_of(trace, numbers) for trace, numbers in zip(traces, loaders, strict=True)]
    ns = opening_of(batches)
    make = figure_class()
    drawings: list[_Drawing] = []
    for name, trace, times in zip("AB", traces, batches, strict=True):
        zero = int(times[0])
        shown = scene_of(trace, since=zero / 1e9, until=(zero + ns) / 1e9)
        known = [patch.get_label() for drawing in drawings for patch in drawing.legend]
        drawings.append(_Drawing(shown, width, f"{name}: {title_of(trace)}", False, zero, known))
    words = textwrap.wrap(headline, int(width * 10.5))
    high = sum(drawing.high for drawing in drawings) + LINE_INCHES * len(words)
    figure = make(figsize=(width, high), dpi=DPI, facecolor=PAPER)
    y = 0.2 / high
    for line in words:
        figure.text(0.1 / width, 1 - y, line, fontsize=11, color=INK, weight="bold", va="center", parse_math=False)
        y += LINE_INCHES / high
    for drawing, base in zip(drawings, (drawings[1].high, 0.0), strict=True):
        drawing.draw(np.empty(0, np.int64), figure, base)
    return figure


@functools.cache
def figure_class() -> type[Figure]:
    """Return a Figure class that a notebook displays by itself, even if pyplot was never imported."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("timeline() draws with matplotlib, which is not installed: pip install matplotlib") from error

    class TimelineFigure(Figure):
        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png")
            return out.getvalue()

    return TimelineFigure


class _Drawing:
    """One trace's part of a figure in the making. Lengths are in inches, times in `unit`.

    zero: the time 0 of a comparison's axis, ns; it has no counters, and its legend no sign of which the label is known.
    """

    def __init__(
        self, scene: Scene, width: float, title: str, headline: bool, zero: int | None = None, known: Sequence[str] = ()
    ) -> None:
        self.scene = scene
        self.width = width
        self.title = title
        self.zero, self.compared = zero or 0, zero is not None
        unit = unit_of(scene.end - self.zero) if self.compared else scene.unit
        self.scale, self.unit = unit.ns, unit.name
        self.counters = [c for c in scene.counters if len(c.times) and not self.compared]
        self.counted = list(dict.fromkeys((c.name, c.unit) for c in self.counters))
        self.framed = scene.framed if headline else None
        self.cause = scene.cause if headline else None
        self.legend = [patch for patch in self._legend() if patch.get_label() not in known]
        self.columns = self._legend_columns()
        sentence = scene.headline.title if headline else ""
        self.sentence = textwrap.wrap(sentence, max(20, int(width * 10.5)))
        step = f"next step: {scene.headline.helps}" if headline and scene.headline.helps else ""
        self.step = textwrap.wrap(step, max(20, int(width * 16)))
        self.above = LINE_INCHES * len(self.sentence) + 0.17 * (len(self.step) + 1)
        lines = -(-len(self.legend) // self.columns) + sum(patch.get_label().count("\n") for patch in self.legend)
        self.head = 0.28 + self.above + LEGEND_INCHES * lines
        self.foot = 0.46 + 0.16 * min(4, len(scene.trace.problems))
        self.row = min(ROW_INCHES, max(LEAST_ROW_INCHES, HIGH_ENOUGH / max(1.0, scene.height)))
        self.lanes_high = max(1.0, scene.height) * self.row + 0.06
        below = len(self.counted) * (COUNTER_INCHES + GAP)
        self.high = self.head + self.lanes_high + below + self.foot
        self.taken: list[tuple[float, float, float]] = []  # of labels beside marks: left and right pixel, y
        self.pixels = max(1, int((width - LEFT - RIGHT) * DPI))

    def draw(self, batches: Ints, figure: Figure, base: float = 0.0) -> Figure:
        """Draw it into a figure, `base` above its lower edge."""
        self.figure, self.base, self.page = figure, base, figure.get_figheight()
        top = self.high - self.head - self.lanes_high
        axes = self._axes(top, self.lanes_high)
        axes.set_ylim(max(1.0, self.scene.height) + 0.15, -0.15)
        self._background(axes)
        self._bars(axes)
        self._deaths(axes)
        self._alarms(axes)
        self._framed(axes)
        self._cause(axes)
        self._states(axes)
        self._arrows(axes, batches)
        self._end(axes)
        last = axes
        for name, unit in self.counted:
            last.tick_params(labelbottom=False)
            top -= COUNTER_INCHES + GAP
            last = self._axes(top, COUNTER_INCHES)
            self._count(last, name, unit)
        if self.scene.lanes:
            last.set_xlabel(
                f"{self.unit} since the first {'batch' if self.compared else 'event'}", color=FAINT, fontsize=8
            )
        self._words()
        return self.figure

    def _axes(self, bottom: float, height: float) -> Axes:
        from matplotlib.ticker import AutoLocator

        left, wide = LEFT / self.width, (self.width - LEFT - RIGHT) / self.width
        axes = self.figure.add_axes((left, (self.base + bottom) / self.page, wide, height / self.page))
        axes.set_xlim(self.scene.begin / self.scale, self.scene.end / self.scale)
        last, zero = min(self.scene.last, self.scene.end) / self.scale, self.zero / self.scale
        begin, end = self.scene.begin / self.scale, self.scene.end / self.scale if self.compared else last
        places = zero + np.asarray(AutoLocator().tick_values(begin - zero, end - zero))
        axes.set_xticks([place for place in places if begin <= place <= end])  # no number beyond the trace's end
        axes.xaxis.set_major_formatter(lambda at, _: f"{at - zero:.6g}")
        if self.scene.last < self.scene.end:
            axes.axvline(last, color=FAINT, linewidth=0.6, zorder=0)
        axes.grid(axis="x", color="#e3e6ea", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=7.5, colors=FAINT)
        for side in axes.spines.values():
            side.set_visible(False)
        return axes

    def _words(self) -> None:
        """Write the headline, the trace's name, the legend, and what is missing from the trace."""
        trace, text = self.scene.trace, self.figure.text
        colour = RED if self.scene.headline.outcome.wrong else INK
        lines = [(words, 11.0, colour, "bold") for words in self.sentence]
        lines += [(words, 8.5, INK, "normal") for words in self.step]
        lines += [(f"{self.title}: {len(trace):,} events, {len(self.scene.bars):,} bars", 7.5, FAINT, "normal")]
        y = 0.2
        for words, points, ink, weight in lines:
            text(
                0.1 / self.width, (self.base + self.high - y) / self.page, words, fontsize=points, color=ink,
                weight=weight, va="center", parse_math=False,
            )  # fmt: skip
            y += LINE_INCHES if weight == "bold" else 0.17
        if self.legend:
            self.figure.legend(
                handles=self.legend, loc="upper left", ncols=self.columns, frameon=False, fontsize=7.5, labelcolor=INK,
                bbox_to_anchor=(0.06 / self.width, (self.base + self.high - 0.14 - self.above) / self.page),
                columnspacing=1.4, handlelength=1.6,
                borderpad=0, labelspacing=0.4,
            )  # fmt: skip
        for line, problem in enumerate(trace.problems[:4]):
            words = f"Missing from the trace: {problem}"[: int(self.width * 17)]
            y = (self.base + 0.1 + 0.16 * line) / self.page
            text(0.1 / self.width, y, words, fontsize=7, color=RED, va="center", parse_math=False)

    def _legend_columns(self) -> int:
        """Return how many columns fit, each as wide as its longest label; the legend is filled column by column."""
        wide = [0.4 + 0.065 * max(map(len, patch.get_label().split("\n"))) for patch in self.legend]
        for columns in range(len(wide), 1, -1):
            parts = np.array_split(np.array(wide), columns)  # the first columns are the longer ones, as in the legend
            if sum(part.max() for part in parts) <= self.width - 0.1:
                return columns
        return 1

    def _legend(self) -> Iterator[Any]:
        """Yield a handle for each sign of the legend."""
        widest = max(12, int((self.width - 0.5) / 0.065))  # letters
        for sign in legend_of(self.scene, blames=self.framed is not None):
            yield _handle(replace(sign, label=textwrap.fill(sign.label, widest)))

    # --- lanes
    def _background(self, axes: Axes) -> None:
        places, names = [], []
        for lane in self.scene.lanes:
            shade = "#f6f7f9" if lane.kind is not LaneKind.FEEDER else "#fafbfc"
            axes.axhspan(lane.top, lane.bottom, color=shade, zorder=-3, linewidth=0)
            places.append((lane.top + lane.bottom) / 2)
            names.append(lane.title)
        axes.set_yticks(places, names)
        axes.tick_params(axis="y", pad=8)  # beside the colours of workers or ranks
        for lane, tick in zip(self.scene.lanes, axes.get_yticklabels(), strict=True):
            small = lane.kind in (LaneKind.FEEDER, LaneKind.QUEUE_FEEDERS, LaneKind.EPOCHS)
            tick.set(fontsize=self._letters(6.5 if small else 8.5), color=FAINT if small else INK)
            if (actor := lane.actor(len(self.scene.slots))) >= 0:
                self._swatch(axes, lane.top, lane.bottom, ACTORS[actor % len(ACTORS)])
        if not self.scene.lanes:
            axes.set_xticks([])
            axes.text(
                0.5, 0.5, "The trace has no events.", transform=axes.transAxes, ha="center", va="center", color=FAINT
            )
        if len(self.scene.slots) > 1:
            for number, slot in enumerate(self.scene.slots):
                top = min((lane.top for lane in self.scene.lanes if lane.slot == number), default=0.0)
                axes.text(
                    self.scene.begin / self.scale, top - 0.2, slot.title, fontsize=8, weight="bold", color=INK,
                    va="bottom", parse_math=False,
                )  # fmt: skip

    def _swatch(self, axes: Axes, top: float, bottom: float, colour: str) -> None:
        """Draw the colour of a rank or a worker at the left edge of its lane."""
        from matplotlib.patches import Rectangle

        wide = 0.05 / (self.width - LEFT - RIGHT)
        axes.add_patch(
            Rectangle(
                (-wide, top), wide, bottom - top, transform=axes.get_yaxis_transform(), facecolor=colour, linewidth=0,
                clip_on=False, gid="actor",
            )
        )  # fmt: skip

    def _letters(self, size: float) -> float:
        """Return a font size in points, smaller if rows are small."""
        return size * (0.3 + 0.7 * self.row / ROW_INCHES)

    def _box(self, lane: int, row: int) -> tuple[float, float]:
        """Return top and bottom of a row's bars."""
        place = self.scene.lanes[lane]
        top, high = place.row_top(row), place.heights[row]
        margin = MARGIN * min(1.0, high) / 2
        return top + margin, top + high - margin

    def _bars(self, axes: Axes) -> None:
        scene = self.scene
        wide, columns = per_pixel(scene.bars, scene.begin, scene.end, self.pixels)
        for lane, row in distinct(columns, "lane", "row"):
            self._columns(axes, columns[(columns["lane"] == lane) & (columns["row"] == row)], lane, row)
        fades = np.isin(wide["fate"], FADING)
        ended = wide[~fades]
        for lane, row, code in distinct(ended, "lane", "row", "code"):
            mine = ended[(ended["lane"] == lane) & (ended["row"] == row) & (ended["code"] == code)]
            for simulated in (False, True):
                if (some := mine[mine["simulated"] == simulated]).size:
                    self._solid(axes, some, lane, row, code, simulated)
        for bar in wide[fades]:
            self._fading(axes, bar)
        self._captions(axes, ended)

    def _columns(self, axes: Axes, columns: Rows, lane: int, row: int) -> None:
        """Draw a rectangle for each pixel: the mixed colours of its steps, as dense as they fill it."""
        size = (self.scene.end - self.scene.begin) / self.pixels
        pixel, place = np.unique(columns["pixel"], return_inverse=True)
        looks = [paint(code) for code in columns["code"].tolist()]
        weight = columns["share"] * [SOFT if look.soft else 1.0 for look in looks]
        total = np.bincount(place, weight)
        colours = np.empty((len(pixel), 4))
        for channel, parts in enumerate(np.array([rgb(look.colour) for look in looks]).T):
            colours[:, channel] = np.bincount(place, weight * parts) / np.maximum(total, 1e-12) / 255
        colours[:, 3] = np.clip(total, FAINTEST, 1)
        left = self.scene.begin + pixel * size
        self._rectangles(
            axes, left / self.scale, (left + size) / self.scale, lane, row,
            facecolors=colours, linewidths=0, antialiased=False, gid=f"narrow {lane} {row}",
        )  # fmt: skip

    def _rectangles(self, axes: Axes, left: Any, right: Any, lane: int, row: int, **style: Any) -> None:
        """Draw a rectangle in the row from each of `left` to each of `right`."""
        from matplotlib.collections import PolyCollection

        top, bottom = self._box(lane, row)
        corners = np.empty((len(left), 4, 2))
        corners[:, 0, 0] = corners[:, 1, 0] = left
        corners[:, 2, 0] = corners[:, 3, 0] = right
        corners[:, [0, 3], 1] = top
        corners[:, [1, 2], 1] = bottom
        axes.add_collection(PolyCollection(corners, **style), autolim=False)  # type: ignore[arg-type]

    def _solid(self, axes: Axes, bars: Rows, lane: int, row: int, code: int, simulated: bool) -> None:
        look = paint(code)
        # A white edge separates neighbours, but would hide a bar that is hardly wider than the edge.
        edges = np.where(bars["end"] - bars["begin"] > 4 * (self.scene.end - self.scene.begin) / self.pixels, 0.35, 0)
        self._rectangles(
            axes, bars["begin"] / self.scale, bars["end"] / self.scale, lane, row, facecolors=on_paper(look),
            edgecolors=_lines(look), linewidths=edges, hatch=DOTS if simulated else WAIT if look.waits else None,
            gid=f"bars {lane} {row} {code}",
        )  # fmt: skip

    def _fading(self, axes: Axes, bar: np.void) -> None:
        """Draw a bar without an end: it fades, and its caption says why."""
        from matplotlib.colors import to_rgba_array

        lane, row, code = int(bar["lane"]), int(bar["row"]), int(bar["code"])
        begin, end = max(int(bar["begin"]), self.scene.begin), min(int(bar["end"]), self.scene.end)
        look = paint(code)
        cuts = np.linspace(begin, max(end, begin + 1), FADE + 1) / self.scale
        colours = to_rgba_array([on_paper(look)] * FADE)
        colours[:, 3] = np.linspace(1, 0.12, FADE)
        self._rectangles(
            axes, cuts[:-1], cuts[1:], lane, row,
            facecolors=colours, linewidths=0, antialiased=False, gid=f"open {lane} {row} {code}",
        )  # fmt: skip
        self._rectangles(
            axes, cuts[:1], cuts[-1:], lane, row,
            facecolors="none", edgecolors=mixed(look.colour, 0.5) if look.waits else look.colour, linestyles=":",
            linewidths=0.7, hatch=WAIT if look.waits else None,
        )  # fmt: skip
        self._caption_open(axes, bar, cuts[0], cuts[-1])

    def _caption_open(self, axes: Axes, bar: np.void, left: float, right: float) -> None:
        from matplotlib.patheffects import withStroke

        look, high = paint(int(bar["code"])), self.scene.lanes[bar["lane"]].heights[bar["row"]]
        full, short = caption(self.scene, bar)
        size = self._letters(min(6.5, 11 * high))
        room = (right - left) * self.scale / (self.scene.end - self.scene.begin) * self.pixels
        idle = int(bar["code"]) in IDLE  # may end at any time
        said = (*(() if idle else (f"{full}: {self.scene.fates[Fate(bar['fate'])]}",)), full, short)
        words = next((each for each in said if each and _wide(each, size) < room), "")
        if words and not self._is_culprit(bar):
            axes.text(
                left, self._middle(bar["lane"], bar["row"]), f" {words} ", fontsize=size, color=INK,
                va="center_baseline", ha="left", zorder=6, parse_math=False,
                path_effects=[withStroke(linewidth=3, foreground=on_paper(look))] * look.waits,  # readable on its hatch
            )  # fmt: skip

    def _captions(self, axes: Axes, bars: Rows) -> None:
        """Write captions into the bars that are wide enough."""
        from matplotlib.patheffects import withStroke

        scene = self.scene
        pixel = (scene.end - scene.begin) / self.pixels
        shown = (np.minimum(bars["end"], scene.end) - np.maximum(bars["begin"], scene.begin)) / pixel
        for at in np.argsort(-shown, kind="stable")[:CAPTIONS].tolist():
            bar, room = bars[at], float(shown[at])
            high = scene.lanes[bar["lane"]].heights[bar["row"]]
            size = self._letters(min(6.5, 9.5 * high))
            if room < _wide("0", size) or high < 0.35 or size < LEAST_LETTERS or self._is_culprit(bar):
                continue
            look = paint(int(bar["code"]))
            spare = 30 if look.waits else 8 if bar["simulated"] else 0  # some of a pattern stays visible
            words = next((w for w in caption(scene, bar) if w and _wide(w, size) + spare < room), None)
            if words is None:
                continue
            middle = (max(int(bar["begin"]), scene.begin) + min(int(bar["end"]), scene.end)) / 2 / self.scale
            y = self._middle(bar["lane"], bar["row"])
            colour = INK if look.soft else "black" if is_light(rgb(look.colour)) else PAPER
            # A halo in the bar's colour keeps the text readable on a hatch or an arrow.
            halo = [
                withStroke(linewidth=4 if bar["simulated"] else 3 if look.waits else 1.5, foreground=on_paper(look))
            ]
            axes.text(
                middle, y, words, fontsize=size, color=colour, ha="center", va="center_baseline", clip_on=True,
                zorder=7.5, path_effects=halo, parse_math=False,
            )  # fmt: skip

    # --- failures, and the paths of batches
    def _alarms(self, axes: Axes) -> None:
        scene = self.scene
        for mark in scene.marks[scene.marks["alarm"]]:
            top, time = scene.lanes[mark["lane"]].top, int(mark["time"])
            weak = bool(mark["weak"])  # this lane only found it
            axes.plot(
                [time / self.scale], [top], marker="x" if weak else "X", color=FAINT if weak else RED,
                markersize=4 if weak else 6, markeredgecolor=None if weak else PAPER, zorder=8, clip_on=False,
            )  # fmt: skip
            self._beside(axes, alarm(scene, mark)[:80], time, top, 6.5, FAINT if weak else RED)

    def _deaths(self, axes: Axes) -> None:
        """Mark the death of a process on its own lane."""
        for death in self.scene.deaths:
            top = self.scene.lanes[death.lane].top
            axes.plot(
                [death.time / self.scale], [top], marker="X", color=RED, markersize=8, markeredgecolor=PAPER, zorder=9,
                clip_on=False,
            )  # fmt: skip
            arrow = self.cause.reached if self.cause is not None and self.cause.to_lane == death.lane else -1
            self._beside(axes, death.words, max(death.time, arrow), top, 7, RED, weight="bold")

    def _beside(self, axes: Axes, words: str, time: int, y: float, size: float, colour: str, **style: Any) -> None:
        """Write what a mark says above its lane: on the mark's right, on its left, or nowhere if there is no room."""
        pixel, wide = (time - self.scene.begin) / (self.scene.end - self.scene.begin) * self.pixels, _wide(words, size)
        for left in (pixel + 10, pixel - 10 - wide):
            if left < -LEFT * DPI or left + wide > self.pixels + RIGHT * DPI or not self._free(left, wide, y):
                continue
            self.taken.append((left, left + wide, y))
            self._label(axes, words, time, y, size, colour, (5 if left > pixel else -5, 0), **style)
            return

    def _label(
        self, axes: Axes, words: str, time: int, y: float, size: float, colour: str, offset: tuple[float, float],
        **style: Any,
    ) -> None:  # fmt: skip
        """Write words at an offset (points) from a moment (ns): on its right, or on its left if the offset is <= 0."""
        side = "left" if offset[0] > 0 else "right"
        how: dict[str, Any] = {"va": "bottom", "ha": side, "zorder": 9, "bbox": LABEL, "parse_math": False, **style}
        axes.annotate(
            words, (time / self.scale, y), offset, textcoords="offset points", fontsize=size, color=colour, **how
        )

    def _free(self, left: float, wide: float, y: float) -> bool:
        """Tell whether no label stands at these pixels, about as high as y."""
        return all(left > end or left + wide < begin or abs(y - at) > 0.5 for begin, end, at in self.taken)

    def _is_culprit(self, bar: np.void) -> bool:
        framed = self.framed
        if framed is None or not framed.alone:
            return False
        return int(self.scene.bars["span"][framed.bar]) == int(bar["span"])

    def _end(self, axes: Axes) -> None:
        """Say what the line at the trace's end is: what is drawn on its right is not in the trace."""
        if self.scene.last < self.scene.end:
            words = f"end of the trace, {self.scene.unit.at(self.scene.last - self.zero)}"
            self._label(axes, words, self.scene.last, -0.15, 6.5, FAINT, (0, 1), bbox=None)

    def _framed(self, axes: Axes) -> None:
        """Outline what the headline blames, and name it at its beginning: in red if it went wrong."""
        scene, framed = self.scene, self.framed
        if framed is None:
            return
        begin, end = max(framed.begin, scene.begin), max(min(framed.end, scene.end), framed.begin + 1)
        if begin >= end:
            return
        for lane, row in framed.rows:
            self._outline(axes, begin, end, lane, row)
        lane, row = framed.rows[0]
        size = self._letters(7)
        ns = (scene.end - scene.begin) / self.pixels
        fits = framed.alone and (end - begin) / ns > _wide(framed.words, size)
        late = (scene.end - begin) / ns < _wide(framed.words, size)
        # What has no room for it has its label below its lane, where no other bar is covered.
        y = self._middle(lane, row) if fits else scene.lanes[lane].bottom
        offset, middle = (-3 if late else 3, 0 if fits else 1), "center_baseline" if fits else "top"
        self._label(axes, framed.words, begin, y, size, self._blame, offset, va=middle, weight="bold")

    @property
    def _blame(self) -> str:
        """The colour of what the headline blames."""
        return RED if self.scene.headline.outcome.wrong else INK

    def _outline(self, axes: Axes, begin: int, end: int, lane: int, row: int) -> None:
        from matplotlib.patches import Rectangle

        place = self.scene.lanes[lane]
        top, bottom = self._box(lane, row) if row >= 0 else (place.top, place.bottom)
        axes.add_patch(
            Rectangle(
                (begin / self.scale, top), (end - begin) / self.scale, bottom - top, facecolor="none",
                edgecolor=self._blame, linewidth=1.6, zorder=8, gid=f"framed {lane} {row}",
            )
        )  # fmt: skip

    def _cause(self, axes: Axes) -> None:
        """Draw the arrow from the wait to what it waits for."""
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.patheffects import withStroke

        cause = self.cause
        ends = None if cause is None else cause.at(self.scene.begin, self.scene.end)
        if cause is None or ends is None:
            return
        down = cause.from_lane < cause.to_lane
        lane = self.scene.lanes[cause.to_lane]
        reached = self._box(cause.to_lane, cause.to_row) if cause.to_row >= 0 else (lane.top, lane.bottom)
        y = reached[0 if down else 1] if cause.reached < 0 else sum(reached) / 2
        x, to_x = (end / self.scale for end in ends)
        axes.add_patch(
            FancyArrowPatch(
                (x, self._middle(cause.from_lane, cause.from_row)), (to_x, y),
                arrowstyle="-|>", mutation_scale=11, color=self._blame, linewidth=1.8, shrinkA=0, shrinkB=0, zorder=8.5,
                path_effects=[withStroke(linewidth=3.6, foreground=PAPER)], gid="cause",
            )
        )  # fmt: skip

    def _states(self, axes: Axes) -> None:
        """Mark where the loader's state was sent, counted, resumed from and taken."""
        scene = self.scene
        for code, symbol in STATES.items():
            marks = scene.marks[scene.marks["code"] == code]
            if not len(marks):
                continue
            axes.plot(
                marks["time"] / self.scale, [scene.lanes[lane].top + 0.1 for lane in marks["lane"].tolist()], symbol,
                color=paint(code).colour, markersize=4, markeredgecolor=PAPER, markeredgewidth=0.5, zorder=8,
                clip_on=False, gid=f"state {code}",
            )  # fmt: skip
        lines = scene.marks[np.isin(scene.marks["code"], list(STATE_LINES))]
        captioned = float("inf")  # the pixel at which the next caption to the right begins
        for mark in lines[np.argsort(lines["time"], kind="stable")[::-1]]:
            captioned = self._state_line(axes, mark, captioned)

    def _state_line(self, axes: Axes, mark: np.void, limit: float) -> float:
        """Draw a line through all lanes, and the number of batches in the state if it ends before the pixel `limit`.

        Return the new limit. Captions stand on the right of their lines, or on the left where the picture ends.
        """
        scene, code, size = self.scene, int(mark["code"]), 6.5
        x, colour = int(mark["time"]) / self.scale, paint(code).colour
        axes.axvline(x, color=colour, linewidth=0.8, linestyle="--", zorder=5)
        words = STATE_LINES[code].format(counted(int(scene.trace.events[mark["event"]]["x"]), "batch", "batches"))
        left = (int(mark["time"]) - scene.begin) / (scene.end - scene.begin) * self.pixels
        late = left + _wide(words, size) > self.pixels
        begin = left - _wide(words, size) if late else left
        if begin + _wide(words, size) > limit:
            return limit
        offset = (-4 if late else 4, 2)
        self._label(axes, words, int(mark["time"]), axes.get_ylim()[0], size, colour, offset, zorder=8)
        return begin

    def _arrows(self, axes: Axes, batches: Ints) -> None:
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.patheffects import withStroke

        scene = self.scene
        halo = [withStroke(linewidth=2.6, foreground=PAPER)]
        arrows = scene.arrows(batches)
        named: list[float] = []
        for number, batch in enumerate(batches.tolist()):
            colour = BATCHES[number % len(BATCHES)]
            for arrow in arrows[arrows["batch"] == batch]:
                left = int(arrow["left"]) / self.scale, self._middle(arrow["from_lane"], arrow["from_row"])
                reached = int(arrow["reached"]) / self.scale, self._middle(arrow["to_lane"], arrow["to_row"])
                axes.add_patch(
                    FancyArrowPatch(
                        left, reached, arrowstyle="-|>", mutation_scale=7, color=colour, linewidth=1.1, shrinkA=0,
                        shrinkB=0, connectionstyle="arc3,rad=0.06", zorder=7, path_effects=halo, gid=f"arrow {batch}",
                    )
                )  # fmt: skip
            self._name_batch(axes, batch, colour, named)

    def _middle(self, lane: int, row: int) -> float:
        return sum(self._box(int(lane), int(row))) / 2

    def _name_batch(self, axes: Axes, batch: int, colour: str, named: list[float]) -> None:
        """Write a batch's number where its path begins, above numbers that are there already (pixels in `named`)."""
        stops = self.scene.stops[self.scene.stops["batch"] == batch]
        stops = stops[(stops["begin"] >= self.scene.begin) & (stops["begin"] <= self.scene.end)]
        if not len(stops):
            return
        time, y = int(stops["begin"][0]), self._middle(stops["lane"][0], stops["row"][0])
        words = f"batch {self.scene.batches['task'][batch]}"
        pixel = (time - self.scene.begin) / (self.scene.end - self.scene.begin) * self.pixels
        above = sum(abs(pixel - other) < _wide(words, 7) for other in named)
        named.append(pixel)
        clipped: dict[str, Any] = {"ha": "center", "va": "baseline", "annotation_clip": True}
        self._label(axes, words, time, y, 6.5, colour, (0, 7 + 8 * above), weight="bold", **clipped)

    # --- counters
    def _count(self, axes: Axes, name: str, unit: str) -> None:
        """Draw one counter as steps, a line for each slot."""
        peak, mine = 0, [counter for counter in self.counters if counter.name == name]
        for counter in mine:
            end = min(self.scene.end, max(self.scene.last, self.scene.begin))
            times = np.concatenate([[self.scene.begin], counter.times, [end]]) / self.scale
            before = counter.values[:1] if counter.times[0] <= self.scene.begin else np.zeros(1, np.int64)
            values = np.concatenate([before, counter.values, counter.values[-1:]])
            colour = ACTORS[counter.slot % len(ACTORS)] if len(self.scene.slots) > 1 else FAINT
            axes.step(times, values, where="post", color=colour, linewidth=0.9, gid=f"counter {name} {counter.slot}")
            if len(mine) == 1:  # several on top of each other are lines only
                axes.fill_between(times, values, step="post", color=colour, alpha=0.15, linewidth=0)
            peak = max(peak, int(values.max()))
        factor, word = _bytes_unit(peak) if unit == "B" else (1, unit)
        axes.set_ylim(0, max(peak, 1) * 1.12)
        most = peak / factor
        top = f"{most:.3g}" if most < 999.5 else f"{most:,.0f}"
        axes.set_yticks(*zip(*{0: "0", peak: top}.items(), strict=True))
        axes.tick_params(axis="y", labelsize=6.5)
        axes.yaxis.tick_right()
        axes.text(-0.09 / (self.width - LEFT - RIGHT), 0.5, f"{name}\n{word}", transform=axes.transAxes, fontsize=7,
                  color=INK, ha="right", va="center")  # fmt: skip


def _lines(look: Paint) -> str:
    """Return the colour of a bar's edge and hatch: white, so that neighbours are apart; of a wait, near its own."""
    return mixed(look.colour, 0.6) if look.waits else PAPER


def _handle(sign: Sign) -> Any:
    """Return the legend's handle of a sign."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marker: dict[str, dict[str, Any]] = {
        "": {"linestyle": ""},
        "state": {"linestyle": "", "marker": sign.marker, "color": sign.colour, "markersize": 4},
        "failed": {"linestyle": "", "marker": "X", "color": sign.colour, "markeredgecolor": PAPER, "markersize": 7},
        "cause": {"linestyle": "", "marker": r"$\downarrow$", "color": INK, "markersize": 8},
    }
    if sign.pattern in marker:
        return Line2D([], [], label=sign.label, **marker[sign.pattern])
    style: dict[str, dict[str, Any]] = {
        "work": {"facecolor": sign.colour},
        "around": {"facecolor": mixed(sign.colour or FAINT, SOFT)},
        "wait": {"facecolor": PAPER, "edgecolor": sign.colour, "linewidth": 0.5, "hatch": WAIT},
        "simulated": {"facecolor": FAINT, "edgecolor": PAPER, "linewidth": 0, "hatch": DOTS},
        "open": {"facecolor": THEMES["light"]["line"], "edgecolor": INK, "linestyle": ":", "linewidth": 0.8},
    }
    return Patch(label=sign.label, **style[sign.pattern])


def _bytes_unit(most: int) -> tuple[int, str]:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most >= 1024**power:
            return 1024**power, name
    return 1, "bytes"


def _wide(words: str, size: float) -> float:
    """Estimate how many pixels the words take at `size` points, with some room around."""
    return (len(words) * 0.58 + 0.45) * size * DPI / 72
