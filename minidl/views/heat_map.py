"""Pictures of a job: ranks by steps, what each rank waited for, and which one came last.

Interface: `heat_map(report)` -> a matplotlib figure; `in_text(report, width)` the ranks that matter, for a terminal.

Rules of use: a cell mixes the colours of what its rank waited for, each by its share of what the step usually takes;
the rest is white. More steps or ranks than the picture has pixels are averaged.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

import numpy as np

from minidl.job.report import NOTABLE, JobReport
from minidl.job.step_table import CAUSES
from minidl.speed.wall_clock import Cause
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Floats, Ints
from minidl.tracefile.words import counted, micros, percent, plain, unit_of
from minidl.views.colours import RED, THEMES, paint, rgb
from minidl.views.picture import LABEL, figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, LEAST_HIGH, MOST_HIGH = 11.0, 2.0, 7.5
"""Inches of the picture's width, and of its map's height."""

DPI: Final = 144

ROW, LINE = 0.18, 0.2
"""Inches of a rank that one can see, and of a line of the title."""

MANY_ROWS, MOST_APART = 48, 6
"""From so many ranks on, the few that are late most are drawn once more."""

ABSENT: Final = 0.93
"""The grey of a step that a rank has not taken."""

MOST_COLUMNS, MOST_ROWS = 1000, 1024
"""Cells of the map; more steps or ranks share cells."""

OTHERS: Final = "other ranks"

_COLOURS: Final = {
    Cause.SAMPLES: paint(ev.SAMPLE[0]).colour,
    Cause.COLLATE: paint(ev.COLLATE[0]).colour,
    Cause.IPC: paint(ev.RESULT_PICKLE[0]).colour,
    Cause.HEAD_OF_LINE: "#da9c27",
    Cause.REBUILD: paint(ev.RESULT_REBUILD[0]).colour,
    Cause.PIN: paint(ev.PIN[0]).colour,
    Cause.SAMPLER: paint(ev.SAMPLER_NEXT[0]).colour,
}
_REST, _WAITS_FOR_OTHERS, _OWN = "#4c5054", "#c9d6e6", "#a9997f"

SEEN: Final = 0.01
"""The share of a rank's time from which a cause is in the legend."""

INK, FAINT, PAPER = (THEMES["light"][name] for name in ("ink", "faint", "paper"))


def heat_map(report: JobReport) -> Figure:
    """Draw a job: above, how late the last rank of each step was, and why; below, ranks by steps; beside, who is late.

    Of many ranks, those that are late most are drawn once more, as rows that one can see. Raises ValueError without two
    steps, ImportError without matplotlib.
    """
    meetings = report.meetings
    ranks, steps = meetings.there.shape
    if steps < 2:
        raise ValueError(f"{report.record.name}: a picture needs at least two steps that several ranks have taken")
    late = np.argsort(-meetings.weights, kind="stable")[:MOST_APART]
    apart = np.sort(late[meetings.weights[late] >= NOTABLE]) if ranks > MANY_ROWS else late[:0]
    heights = [0.7, *([ROW * len(apart)] * bool(len(apart))), min(MOST_HIGH, max(LEAST_HIGH, ROW * ranks))]
    title = textwrap.wrap(plain(report.finding.title), 118)
    high = sum(heights) + 1.7 + LINE * len(title)
    figure = figure_class()(figsize=(WIDTH, high), dpi=DPI, facecolor=PAPER)
    grid = figure.add_gridspec(
        len(heights), 2, height_ratios=heights, width_ratios=(8, 1), hspace=0.06, wspace=0.03,
        left=0.09, right=0.97, bottom=0.95 / high, top=1 - (0.2 + LINE * len(title)) / high,
    )  # fmt: skip
    cells = figure.add_subplot(grid[-1, 0])
    waits = waits_of(report)
    _map(report, cells, waits, np.arange(ranks))
    _steps(report, cells)
    if len(apart):
        rows = figure.add_subplot(grid[1, 0], sharex=cells)
        _map(report, rows, waits, apart)
        rows.tick_params(axis="x", labelbottom=False, length=0)
    _lateness(report, figure.add_subplot(grid[0, 0], sharex=cells))
    _shares(report, figure.add_subplot(grid[-1, 1], sharey=cells))
    figure.text(0.01, 1 - 0.08 / high, "\n".join(title), va="top", color=INK, fontsize=9, parse_math=False)
    _legend(figure, {f"waits for {name}": colour for name, (colour, _) in waits.items()})
    return figure


def waits_of(report: JobReport) -> dict[str, tuple[str, Floats]]:
    """Name -> colour and share of the step's usual time, of each cause that is seen: a row a rank, a column a step."""
    meetings = report.meetings
    usual = max(1.0, meetings.usual)
    found: dict[str, tuple[str, Floats]] = {}
    rest = np.zeros(meetings.there.shape)
    for at, cause in enumerate(CAUSES):
        share = meetings.steps["waits"][:, :, at] / usual
        if cause in _COLOURS and share.mean(axis=1).max() >= SEEN:
            found[cause.value] = _COLOURS[cause], share
        else:
            rest += share
    others = meetings.for_others.astype(np.float64) / usual
    every = [("other causes", _REST, rest), (OTHERS, _WAITS_FOR_OTHERS, others)]
    return found | {name: (colour, share) for name, colour, share in every if share.mean(axis=1).max() >= SEEN}


def _map(report: JobReport, axes: Axes, waits: dict[str, tuple[str, Floats]], rows: Ints) -> None:
    """Draw the steps of these ranks, and where one of them was the last."""
    meetings = report.meetings
    image = averaged(averaged(image_of(report, waits, rows), MOST_ROWS, 0), MOST_COLUMNS, 1)
    steps = len(meetings.keys)
    axes.imshow(image, aspect="auto", extent=(-0.5, steps - 0.5, len(rows) - 0.5, -0.5), interpolation="nearest")
    held = np.flatnonzero(meetings.held & np.isin(meetings.last, rows))
    size = float(np.clip(500 / steps, 1.5, 18))
    axes.scatter(held, np.searchsorted(rows, meetings.last[held]), s=size, c=RED, marker="s", linewidths=0, zorder=3)
    named = range(0, len(rows), max(1, -(-len(rows) // 24)))
    axes.set_yticks([*named], [str(report.facts[rows[at]].rank) for at in named], fontsize=7, color=INK)
    axes.set_ylabel("rank" if len(rows) == len(report.facts) else "the last\nranks", color=INK, fontsize=7)


def image_of(report: JobReport, waits: dict[str, tuple[str, Floats]], rows: Ints) -> Floats:
    """The colours of these ranks' steps, from 0 to 1: a row a rank, a column a step."""
    there = report.meetings.there[rows]
    image = np.ones((*there.shape, 3), np.float32)
    room = np.ones(there.shape, np.float32)
    for colour, share in waits.values():
        part = np.minimum(room, share[rows])
        room -= part
        image -= part[..., None] * (1 - np.array(rgb(colour), np.float32) / 255)
    image[~there] = ABSENT
    return image


def averaged(values: Floats, most: int, axis: int) -> Floats:
    """The values with at most so many places along an axis: means of neighbours."""
    count = values.shape[axis]
    if count <= most:
        return values
    edges = np.linspace(0, count, most + 1).astype(np.int64)[1:-1]
    return np.stack([part.mean(axis) for part in np.split(values, edges, axis)], axis)


def _steps(report: JobReport, axes: Axes) -> None:
    """Draw where epochs and nodes begin, and name the steps."""
    facts = report.facts
    keys = report.meetings.keys
    begins = [at for at, (epoch, number) in enumerate(keys) if not at or keys[at - 1][0] != epoch]
    for at in begins[1:] if len(begins) < 100 else []:
        axes.axvline(at - 0.5, color=FAINT, linewidth=0.6)
    nodes = [row for row in range(1, len(facts)) if facts[row].node != facts[row - 1].node]
    for row in nodes if len(nodes) < 40 else []:
        axes.axhline(row - 0.5, color=FAINT, linewidth=0.4)
    axes.tick_params(axis="x", labelsize=7, colors=INK)
    of = f"; lines: {counted(len(begins), 'epoch')}" * (1 < len(begins) < 100)
    axes.set_xlabel(f"step of the job{of}", color=INK, fontsize=8)


def _lateness(report: JobReport, axes: Axes) -> None:
    """Draw the critical path: by how much the last rank of each step was late, and because of what."""
    meetings = report.meetings
    unit = unit_of(1000 * float(meetings.cost.max(initial=1)))
    colours = [*(_COLOURS.get(cause, _REST) for cause in CAUSES), _OWN]
    below = np.zeros(len(meetings.keys))
    for colour, part in zip(colours, meetings.why(), strict=True):
        above = below + part * 1000 / unit.ns
        if part.any():
            axes.stairs(above, np.arange(len(above) + 1) - 0.5, baseline=below, fill=True, color=colour, linewidth=0)
        below = above
    axes.set_ylabel(f"last rank\nlate, {unit.name}", color=INK, fontsize=7)
    axes.tick_params(axis="x", labelbottom=False, length=0)
    axes.tick_params(axis="y", labelsize=7, colors=INK)
    axes.set_ylim(0, None)
    axes.spines[["top", "right"]].set_visible(False)


def _shares(report: JobReport, axes: Axes) -> None:
    """Draw each rank's share of all lateness, and name those with the most."""
    weights = report.meetings.weights
    axes.barh(np.arange(len(weights)), 100 * weights, height=1.0, color=RED, alpha=0.75, linewidth=0)
    for row in np.argsort(-weights, kind="stable")[:3].tolist():
        if weights[row] >= 0.02:
            name = plain(report.facts[row].name)
            axes.annotate(
                f"{name} {percent(weights[row])}", (0.02, row), xycoords=("axes fraction", "data"),
                fontsize=6.5, color=INK, va="center", parse_math=False, bbox=LABEL,
            )  # fmt: skip
    axes.tick_params(axis="y", labelleft=False, length=0)
    axes.tick_params(axis="x", labelsize=7, colors=INK)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of all lateness", color=INK, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, signs: dict[str, str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [Patch(facecolor=colour, label=name) for name, colour in signs.items()]
    handles.append(Patch(facecolor=PAPER, edgecolor=FAINT, linewidth=0.5, label="its own step"))
    handles.append(Patch(facecolor=_OWN, label="above: a longer step of its own"))
    handles.append(Line2D([], [], color=RED, marker="s", linewidth=0, markersize=4, label="the last rank of a step"))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.08, 0.0), ncols=4, fontsize=7, frameon=False)


# --- In a terminal ----------------------------------------------------------------------------------------------------
LAST, WAITS, MEETS, WORKS = "#", "w", "-", "."
"""What a rank mostly did: the others waited for it, it waited for batches, for other ranks, or neither."""

NOTED: Final = 0.15
"""The share of a step from which a wait is noted."""


def in_text(report: JobReport, width: int) -> str:
    """The headline, and a line for each rank that matters: a character for each step, or for some steps."""
    meetings = report.meetings
    steps = len(meetings.keys)
    room = max(10, width - 10)
    each = max(1, -(-steps // room))
    usual = max(1.0, meetings.usual)
    lines = [plain(report.finding.title)]
    for row in sorted(report.outliers()) if steps else []:
        every = np.stack([meetings.late_ones[row], meetings.waits[row] / usual, meetings.for_others[row] / usual])
        edges = np.arange(0, steps, each)
        late, waits, meets = np.add.reduceat(every, edges, axis=1) / np.minimum(each, steps - edges)
        signs = np.select([late >= 0.5, waits >= NOTED, meets >= NOTED], [LAST, WAITS, MEETS], WORKS)
        lines.append(f"{f'rank {report.facts[row].rank}':<9} {''.join(signs)}")
    lines.append(
        f"a character: {counted(each, 'step')} of {micros(usual)}; {LAST} the others wait for it, "
        f"{WAITS} waits for batches, {MEETS} waits for other ranks, {WORKS} its own step"
    )
    return "\n".join(lines)
