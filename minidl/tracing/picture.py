"""A trace as a matplotlib figure: `timeline(trace)`. What is drawn where comes from `lanes`.

Rules of use: matplotlib is imported when the function is called, and pyplot never, so that no global state and no
display is needed: save with `figure.savefig("name.png")` or `.svg`; a notebook shows the figure by itself. Bars that
are narrower than a pixel are drawn as columns, as dense as they fill their pixel. Whatever text a trace holds is drawn
as it is, never read as mathematics.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from minidl.tracing import lanes
from minidl.tracing.lanes import Fate, Kind, Scene, paint
from minidl.tracing.reader import Trace, read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Rows = npt.NDArray[np.void]

DPI: Final = 144
ROW_INCHES, LEAST_ROW_INCHES = 0.2, 0.085  # of a row of height 1, in a small trace and in one of many lanes
HIGH_ENOUGH: Final = 14.0  # inches of all lanes, above which rows are made smaller
COUNTER_INCHES: Final = 0.42
LEGEND_INCHES: Final = 0.155  # a line of the legend
LEFT, RIGHT, GAP = 1.15, 0.3, 0.12  # inches beside and between the axes
LEAST_WIDTH: Final = 2.5
CAPTIONS: Final = 500
"""Most captions inside bars; beyond, the widest bars have theirs."""

LEAST_LETTERS: Final = 3.6
"""Points below which captions inside bars are left out."""

FADE: Final = 64
"""Pieces that an open bar fades in."""

SOFT, FAINTEST = 0.3, 0.15
"""Opacity of a wait's colour; and the least of a pixel that holds anything."""

INK, FAINT, PAPER, RED = "#1c2733", "#6b7683", "#ffffff", "#b3261e"
SLOT_COLOURS: Final = ("#3f5f8f", "#a05a2c", "#4f7f4f", "#8e3fc0", "#b0324a", "#6b5b4d")
BATCH_COLOURS: Final = ("#d6293e", "#1459c7", "#e07b00", "#7a1fa2", "#00796b", "#5d4037")
MARGIN: Final = 0.16  # of a row, above and below its bars


def timeline(
    trace: Trace | str | os.PathLike[str],
    *,
    since: float | None = None,
    until: float | None = None,
    batches: Iterable[lanes.BatchName] | None = None,
    workers: Iterable[int] | None = None,
    width: float = 13.0,
    title: str | None = None,
) -> Figure:
    """Draw a trace, or that at a path: a lane for each actor, a bar for each step, arrows for batches, counters below.

    since, until: seconds from the trace's first event. batches: task numbers, or (loader, epoch, task). workers: those
    to show. width: inches, 2.5 or more. Steps that did not end fade towards the right edge. Raises ValueError for a
    window, a batch or a worker that the trace has not, ImportError without matplotlib.
    """
    make = _figure_class()
    if not width >= LEAST_WIDTH:
        raise ValueError(f"width={width}: a figure is at least {LEAST_WIDTH} inches wide")
    trace = read_trace(trace)
    shown = lanes.scene(trace, since=since, until=until, workers=workers)
    picked = shown.pick(batches or ())
    return _Drawing(shown, make, width, lanes.title_of(trace) if title is None else title).draw(picked)


@functools.cache
def _figure_class() -> type[Figure]:
    """A Figure that a notebook shows by itself, also where pyplot was never imported."""
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
    """One figure in the making. Lengths are inches, times are in `unit`."""

    def __init__(self, scene: Scene, make: type[Figure], width: float, title: str) -> None:
        self.scene = scene
        self.width = width
        self.title = title
        self.scale, self.unit = _unit(scene.end - scene.begin)
        self.counters = [c for c in scene.counters if len(c.times)]
        self.counted = list(dict.fromkeys((c.name, c.unit) for c in self.counters))
        self.legend = list(self._legend())
        self.columns = self._legend_columns()
        self.head = 0.42 + LEGEND_INCHES * -(-len(self.legend) // self.columns)
        self.foot = 0.46 + 0.16 * min(4, len(scene.trace.problems))
        self.row = min(ROW_INCHES, max(LEAST_ROW_INCHES, HIGH_ENOUGH / max(1.0, scene.height)))
        self.lanes_high = max(1.0, scene.height) * self.row + 0.06
        below = len(self.counted) * (COUNTER_INCHES + GAP)
        self.high = self.head + self.lanes_high + below + self.foot
        self.figure = make(figsize=(width, self.high), dpi=DPI, facecolor=PAPER)
        self.pixels = max(1, int((width - LEFT - RIGHT) * DPI))

    def draw(self, batches: npt.NDArray[np.int64]) -> Figure:
        top = self.high - self.head - self.lanes_high
        axes = self._axes(top, self.lanes_high)
        axes.set_ylim(max(1.0, self.scene.height) + 0.15, -0.15)
        self._background(axes)
        self._bars(axes)
        self._alarms(axes)
        self._arrows(axes, batches)
        last = axes
        for name, unit in self.counted:
            last.tick_params(labelbottom=False)
            top -= COUNTER_INCHES + GAP
            last = self._axes(top, COUNTER_INCHES)
            self._count(last, name, unit)
        if self.scene.lanes:
            last.set_xlabel(f"{self.unit} since the first event", color=FAINT, fontsize=8)
        self._words()
        return self.figure

    def _axes(self, bottom: float, height: float) -> Axes:
        box = (LEFT / self.width, bottom / self.high, (self.width - LEFT - RIGHT) / self.width, height / self.high)
        axes = self.figure.add_axes(box)
        axes.set_xlim(self.scene.begin / self.scale, self.scene.end / self.scale)
        axes.grid(axis="x", color="#e3e6ea", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=7.5, colors=FAINT)
        for side in axes.spines.values():
            side.set_visible(False)
        return axes

    def _words(self) -> None:
        """Title, legend, and what the trace lacks."""
        trace, text = self.scene.trace, self.figure.text
        facts = f"{len(trace):,} events, {len(self.scene.bars):,} bars"
        y = 1 - 0.2 / self.high
        text(0.1 / self.width, y, self.title, fontsize=11, weight="bold", color=INK, va="center", parse_math=False)
        text(1 - RIGHT / self.width, y, facts, fontsize=7.5, color=FAINT, va="center", ha="right")
        if self.legend:
            self.figure.legend(
                handles=self.legend, loc="upper left", ncols=self.columns, frameon=False, fontsize=7.5, labelcolor=INK,
                bbox_to_anchor=(0.06 / self.width, 1 - 0.36 / self.high), columnspacing=1.4, handlelength=1.6,
                borderpad=0, labelspacing=0.4,
            )  # fmt: skip
        for line, problem in enumerate(trace.problems[:4]):
            said = f"The trace lacks something: {problem}"[: int(self.width * 17)]
            y = (0.1 + 0.16 * line) / self.high
            text(0.1 / self.width, y, said, fontsize=7, color=RED, va="center", parse_math=False)

    def _legend_columns(self) -> int:
        """As many as there is room for, each as wide as its longest label; the legend is filled column by column."""
        wide = [0.4 + 0.065 * len(patch.get_label()) for patch in self.legend]
        for columns in range(len(wide), 1, -1):
            parts = np.array_split(np.array(wide), columns)  # the first columns are the longer ones, as in the legend
            if sum(part.max() for part in parts) <= self.width - 0.1:
                return columns
        return 1

    def _legend(self) -> Iterator[Any]:
        """A patch for each kind of step that is drawn, in the table's order."""
        from matplotlib.patches import Patch

        bars, done = self.scene.bars, set()
        for code in sorted(np.unique(bars["code"]).tolist()):
            look, made_up = paint(code), bars["simulated"][bars["code"] == code].any()
            if (look.label, look.colour) in done:
                continue
            done.add((look.label, look.colour))
            label = f"{look.label} (simulated)" if made_up else look.label
            yield Patch(
                facecolor=_on_paper(look.colour, look.soft), edgecolor=PAPER if made_up else look.colour,
                linewidth=0 if made_up else 0.5, hatch="////" if made_up else None, label=label,
            )  # fmt: skip
        if np.isin(bars["fate"], lanes.FADING).any():
            yield Patch(facecolor="#d9dde2", edgecolor=INK, linestyle=":", linewidth=0.8, label="no end recorded")

    # --- lanes
    def _background(self, axes: Axes) -> None:
        places, names = [], []
        for lane in self.scene.lanes:
            shade = "#f6f7f9" if lane.kind is not Kind.FEEDER else "#fafbfc"
            axes.axhspan(lane.top, lane.bottom, color=shade, zorder=-3, linewidth=0)
            places.append((lane.top + lane.bottom) / 2)
            names.append(lane.title)
        axes.set_yticks(places, names)
        for lane, tick in zip(self.scene.lanes, axes.get_yticklabels(), strict=True):
            small = lane.kind in (Kind.FEEDER, Kind.QUEUE_FEEDERS, Kind.EPOCHS)
            tick.set(fontsize=self._letters(6.5 if small else 8.5), color=FAINT if small else INK)
        if not self.scene.lanes:
            axes.set_xticks([])
            axes.text(
                0.5, 0.5, "The trace has no events.", transform=axes.transAxes, ha="center", va="center", color=FAINT
            )
        if len(self.scene.slots) > 1:
            for number, slot in enumerate(self.scene.slots):
                top = min((lane.top for lane in self.scene.lanes if lane.slot == number), default=0.0)
                counted = any(counter.slot == number for counter in self.counters)
                colour = SLOT_COLOURS[number % len(SLOT_COLOURS)] if counted else FAINT  # that of its counters
                axes.text(self.scene.begin / self.scale, top - 0.2, slot.title, fontsize=8, color=colour, va="bottom")

    def _letters(self, size: float) -> float:
        """A font's size in points, less where rows are small."""
        return size * (0.3 + 0.7 * self.row / ROW_INCHES)

    def _box(self, lane: int, row: int) -> tuple[float, float]:
        """Top and bottom of a row's bars."""
        place = self.scene.lanes[lane]
        top, high = place.row_top(row), place.heights[row]
        margin = MARGIN * min(1.0, high) / 2
        return top + margin, top + high - margin

    def _bars(self, axes: Axes) -> None:
        scene = self.scene
        wide, columns = lanes.per_pixel(scene.bars, scene.begin, scene.end, self.pixels)
        for lane, row in _kinds(columns, "lane", "row"):
            self._columns(axes, columns[(columns["lane"] == lane) & (columns["row"] == row)], lane, row)
        fades = np.isin(wide["fate"], lanes.FADING)
        ended = wide[~fades]
        for lane, row, code in _kinds(ended, "lane", "row", "code"):
            mine = ended[(ended["lane"] == lane) & (ended["row"] == row) & (ended["code"] == code)]
            for made_up in (False, True):
                if (some := mine[mine["simulated"] == made_up]).size:
                    self._solid(axes, some, lane, row, code, made_up)
        for bar in wide[fades]:
            self._fading(axes, bar)
        self._captions(axes, ended)

    def _columns(self, axes: Axes, columns: Rows, lane: int, row: int) -> None:
        """A rectangle for each pixel: its steps' colours mixed, as dense as they fill it."""
        from matplotlib.collections import PolyCollection

        size = (self.scene.end - self.scene.begin) / self.pixels
        pixel, place = np.unique(columns["pixel"], return_inverse=True)
        looks = [paint(code) for code in columns["code"].tolist()]
        weight = columns["share"] * [SOFT if look.soft else 1.0 for look in looks]
        total = np.bincount(place, weight)
        colours = np.empty((len(pixel), 4))
        for channel, parts in enumerate(np.array([_rgb(look.colour) for look in looks]).T):
            colours[:, channel] = np.bincount(place, weight * parts) / np.maximum(total, 1e-12) / 255
        colours[:, 3] = np.clip(total, FAINTEST, 1)
        left = self.scene.begin + pixel * size
        shape = _rectangles(left / self.scale, (left + size) / self.scale, *self._box(lane, row))
        axes.add_collection(
            PolyCollection(shape, facecolors=colours, linewidths=0, antialiased=False, gid=f"narrow {lane} {row}"),
            autolim=False,
        )

    def _solid(self, axes: Axes, bars: Rows, lane: int, row: int, code: int, made_up: bool) -> None:
        from matplotlib.collections import PolyCollection

        look = paint(code)
        # A white edge keeps neighbours apart, but would hide a bar that is hardly wider than it.
        edges = np.where(bars["end"] - bars["begin"] > 4 * (self.scene.end - self.scene.begin) / self.pixels, 0.35, 0)
        shape = _rectangles(bars["begin"] / self.scale, bars["end"] / self.scale, *self._box(lane, row))
        axes.add_collection(
            PolyCollection(
                shape, facecolors=_on_paper(look.colour, look.soft), edgecolors=PAPER, linewidths=edges,
                hatch="////" if made_up else None, gid=f"bars {lane} {row} {code}",
            ),
            autolim=False,
        )  # fmt: skip

    def _fading(self, axes: Axes, bar: np.void) -> None:
        """A bar without an end: it fades, and says so."""
        from matplotlib.collections import PolyCollection
        from matplotlib.colors import to_rgba_array

        lane, row, code = int(bar["lane"]), int(bar["row"]), int(bar["code"])
        begin, end = max(int(bar["begin"]), self.scene.begin), min(int(bar["end"]), self.scene.end)
        look, (top, bottom) = paint(code), self._box(lane, row)
        cuts = np.linspace(begin, max(end, begin + 1), FADE + 1) / self.scale
        colours = to_rgba_array([_on_paper(look.colour, look.soft)] * FADE)
        colours[:, 3] = np.linspace(1, 0.12, FADE)
        shape = _rectangles(cuts[:-1], cuts[1:], top, bottom)
        pieces = PolyCollection(
            shape, facecolors=colours, linewidths=0, antialiased=False, gid=f"open {lane} {row} {code}"
        )
        axes.add_collection(pieces, autolim=False)
        outline = _rectangles(cuts[:1], cuts[-1:], top, bottom)
        axes.add_collection(
            PolyCollection(outline, facecolors="none", edgecolors=look.colour, linestyles=":", linewidths=0.7),
            autolim=False,
        )
        self._say_open(axes, bar, cuts[0], cuts[-1], (top + bottom) / 2)

    def _say_open(self, axes: Axes, bar: np.void, left: float, right: float, y: float) -> None:
        high = self.scene.lanes[bar["lane"]].heights[bar["row"]]
        words = f"{lanes.caption(self.scene, bar)[0]}: {lanes.FATES[Fate(bar['fate'])]}"
        size = self._letters(min(6.5, 11 * high))
        fits = (right - left) * self.scale / (self.scene.end - self.scene.begin) * self.pixels > _wide(words, size)
        around = None if fits else {"facecolor": PAPER, "alpha": 0.8, "linewidth": 0, "pad": 0.6}
        axes.text(
            right if fits else left, y, f"{words} ", fontsize=size, color=INK, va="center_baseline", ha="right",
            zorder=6, parse_math=False, bbox=around,
        )  # fmt: skip

    def _captions(self, axes: Axes, bars: Rows) -> None:
        """Numbers inside the bars that are wide enough for them."""
        from matplotlib.patheffects import withStroke

        scene = self.scene
        pixel = (scene.end - scene.begin) / self.pixels
        shown = (np.minimum(bars["end"], scene.end) - np.maximum(bars["begin"], scene.begin)) / pixel
        for at in np.argsort(-shown, kind="stable")[:CAPTIONS].tolist():
            bar, room = bars[at], float(shown[at])
            high = scene.lanes[bar["lane"]].heights[bar["row"]]
            size = self._letters(min(6.5, 9.5 * high))
            if room < _wide("0", size) or high < 0.35 or size < LEAST_LETTERS:
                continue
            words = next((w for w in lanes.caption(scene, bar) if w and _wide(w, size) < room), None)
            if words is None:
                continue
            look = paint(int(bar["code"]))
            middle = (max(int(bar["begin"]), scene.begin) + min(int(bar["end"]), scene.end)) / 2 / self.scale
            y = sum(self._box(int(bar["lane"]), int(bar["row"]))) / 2
            colour = INK if look.soft or _light(look.colour) else PAPER
            # On its bar's own colour: a hatch or an arrow behind it leaves it readable.
            halo = [withStroke(linewidth=3 if bar["simulated"] else 1.5, foreground=_on_paper(look.colour, look.soft))]
            axes.text(
                middle, y, words, fontsize=size, color=colour, ha="center", va="center_baseline", clip_on=True,
                zorder=7.5, path_effects=halo, parse_math=False,
            )  # fmt: skip

    # --- what went wrong, and the batches' ways
    def _alarms(self, axes: Axes) -> None:
        scene = self.scene
        for mark in scene.marks[scene.marks["alarm"]]:
            lane = scene.lanes[mark["lane"]]
            x = int(mark["time"]) / self.scale
            axes.plot(
                [x], [lane.top], marker="X", color=RED, markersize=6, markeredgecolor=PAPER, zorder=8, clip_on=False
            )
            words = lanes.alarm(scene, mark)[:80]
            late = mark["time"] > (scene.begin + scene.end) / 2
            axes.annotate(
                words, (x, lane.top), (-6 if late else 6, 0), textcoords="offset points", fontsize=6.5, color=RED,
                ha="right" if late else "left", va="center", zorder=8, parse_math=False,
                bbox={"facecolor": PAPER, "alpha": 0.85, "linewidth": 0, "pad": 0.8},
            )  # fmt: skip

    def _arrows(self, axes: Axes, batches: npt.NDArray[np.int64]) -> None:
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.patheffects import withStroke

        scene = self.scene
        halo = [withStroke(linewidth=2.6, foreground=PAPER)]
        arrows = scene.arrows(batches)
        named: list[float] = []
        for number, batch in enumerate(batches.tolist()):
            colour = BATCH_COLOURS[number % len(BATCH_COLOURS)]
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
        """Its number where its way begins; above the numbers that stand there already, whose places are in `named`."""
        stops = self.scene.stops[self.scene.stops["batch"] == batch]
        stops = stops[(stops["begin"] >= self.scene.begin) & (stops["begin"] <= self.scene.end)]
        if not len(stops):
            return
        x, y = int(stops["begin"][0]) / self.scale, self._middle(stops["lane"][0], stops["row"][0])
        words = f"batch {self.scene.batches['task'][batch]}"
        pixel = (x * self.scale - self.scene.begin) / (self.scene.end - self.scene.begin) * self.pixels
        above = sum(abs(pixel - other) < _wide(words, 7) for other in named)
        named.append(pixel)
        axes.annotate(
            words, (x, y), (0, 7 + 8 * above), textcoords="offset points", fontsize=6.5, weight="bold", color=colour,
            ha="center", zorder=9, annotation_clip=True,
            bbox={"facecolor": PAPER, "alpha": 0.85, "linewidth": 0, "pad": 0.6},
        )  # fmt: skip

    # --- counters
    def _count(self, axes: Axes, name: str, unit: str) -> None:
        """Step plots of one counter, a line for each slot."""
        peak = 0
        for counter in (c for c in self.counters if c.name == name):
            times = np.concatenate([[self.scene.begin], counter.times, [self.scene.end]]) / self.scale
            before = counter.values[:1] if counter.times[0] <= self.scene.begin else np.zeros(1, np.int64)
            values = np.concatenate([before, counter.values, counter.values[-1:]])
            colour = SLOT_COLOURS[counter.slot % len(SLOT_COLOURS)]
            axes.step(times, values, where="post", color=colour, linewidth=0.9, gid=f"counter {name} {counter.slot}")
            axes.fill_between(times, values, step="post", color=colour, alpha=0.15, linewidth=0)
            peak = max(peak, int(values.max()))
        factor, word = _bytes_unit(peak) if unit == "B" else (1, unit)
        axes.set_ylim(0, max(peak, 1) * 1.12)
        axes.set_yticks([0, peak], ["0", f"{peak / factor:.3g}"])
        axes.tick_params(axis="y", labelsize=6.5)
        axes.yaxis.tick_right()
        axes.text(-0.09 / (self.width - LEFT - RIGHT), 0.5, f"{name}\n{word}", transform=axes.transAxes, fontsize=7,
                  color=INK, ha="right", va="center")  # fmt: skip


def _kinds(rows: Rows, *keys: str) -> list[tuple[int, ...]]:
    """The values that `keys` have together."""
    if not len(rows):
        return []
    found = np.unique(np.stack([rows[key] for key in keys], axis=1).astype(np.int64), axis=0)
    return [tuple(row) for row in found.tolist()]


def _rectangles(left: Any, right: Any, top: float, bottom: float) -> Any:
    """Corners of rectangles: array of float64, shape (n, 4, 2)."""
    out = np.empty((len(left), 4, 2))
    out[:, 0, 0] = out[:, 1, 0] = left
    out[:, 2, 0] = out[:, 3, 0] = right
    out[:, [0, 3], 1] = top
    out[:, [1, 2], 1] = bottom
    return out


def _unit(span: int) -> tuple[float, str]:
    """ns a unit, and its name, for a window of `span` ns."""
    for factor, name, least in ((1e9, "s", 10e9), (1e6, "ms", 1e6), (1e3, "µs", 1e3)):
        if span >= least:
            return factor, name
    return 1.0, "ns"


def _bytes_unit(most: int) -> tuple[int, str]:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most >= 1024**power:
            return 1024**power, name
    return 1, "bytes"


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def _on_paper(colour: str, soft: bool) -> str:
    """The colour, a soft one as it looks on white."""
    return "#" + "".join(f"{round(255 - (255 - part) * (SOFT if soft else 1)):02x}" for part in _rgb(colour))


def _light(colour: str) -> bool:
    red, green, blue = _rgb(colour)
    return 0.3 * red + 0.59 * green + 0.11 * blue > 150


def _wide(words: str, size: float) -> float:
    """About how many pixels the words take, at `size` points, with a little room around."""
    return (len(words) * 0.6 + 0.6) * size * DPI / 72
