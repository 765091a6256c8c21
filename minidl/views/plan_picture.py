"""A picture of a plan: batches/s against workers, the training loop's limit as a line, the recorded run as a point.

Interface: `draw(plan)` -> a matplotlib figure. Settings that differ in more than their workers have a line each; the
shaded range is the prediction's.
"""

from __future__ import annotations

import textwrap
from collections.abc import Hashable
from typing import TYPE_CHECKING, Final

from minidl.prediction import SpeedPlan
from minidl.speed.plan.predicted import Predicted
from minidl.tracefile.words import plain
from minidl.views.colours import RED, THEMES
from minidl.views.picture import DPI, figure_class

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, PAPER = (THEMES["light"][name] for name in ("ink", "faint", "paper"))

COLOURS: Final = ("#045c44", "#3c86dd", "#c940a8", "#b17e41", "#7a5cc0", "#15535b")

MOST_LINES: Final = len(COLOURS)

FEW: Final = 12
"""Numbers of workers up to which each has its tick."""


def draw(plan: SpeedPlan) -> Figure:
    """Draw the plan. Raises ImportError without matplotlib."""
    figure = figure_class()(figsize=(9.0, 5.0), dpi=DPI, facecolor=PAPER)
    title = textwrap.wrap(plain(plan.sentence), 100)
    axes = figure.add_axes((0.08, 0.12, 0.89, 0.8 - 0.035 * len(title)))
    alone = [one for one in plan.predicted if not one.setting.num_workers]
    lines: dict[Hashable, list[Predicted]] = {}
    for one in plan.predicted:
        if one.setting.num_workers:
            lines.setdefault(_label(plan, one), []).append(one)
    shown = list(lines.items())[:MOST_LINES]
    for colour, (label, found) in zip(COLOURS, shown, strict=False):
        found = sorted([*alone[:1], *found], key=lambda one: one.setting.num_workers)
        workers = [one.setting.num_workers for one in found]
        axes.fill_between(
            workers, [o.low for o in found], [o.high for o in found], color=colour, alpha=0.15, linewidth=0
        )
        axes.plot(
            workers, [one.by_s for one in found], color=colour, marker="o", markersize=4, label=label or "predicted"
        )
    top = max([plan.recorded.rate, *(one.high for one in plan.predicted)])
    if plan.limit < 3 * top:
        axes.axhline(plan.limit, color=INK, linestyle="--", linewidth=1, label="the training loop alone")
        top = max(top, plan.limit)
    axes.plot([plan.recorded.base.num_workers], [plan.recorded.rate], "D", color=RED, markersize=8, label="recorded")
    best = plan.recommended
    axes.annotate(
        "recommended", (best.setting.num_workers, best.by_s), xytext=(0, -34), textcoords="offset points", ha="center",
        color=INK, fontsize=9, arrowprops={"arrowstyle": "->", "color": INK},
    )  # fmt: skip
    ticks = sorted({one.setting.num_workers for one in plan.predicted})
    axes.set_xticks(ticks if len(ticks) <= FEW else ticks[:: -(-len(ticks) // FEW)])
    axes.set_ylim(0, 1.08 * top)
    axes.set_xlabel("num_workers", color=INK)
    axes.set_ylabel("batches/s, steady", color=INK)
    axes.grid(color=FAINT, alpha=0.3, linewidth=0.5)
    axes.tick_params(colors=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    figure.text(0.02, 0.97, "\n".join(title), va="top", color=INK, fontsize=10, weight="bold", parse_math=False)
    return figure


def _label(plan: SpeedPlan, one: Predicted) -> str:
    """What a line's settings have in common, of what differs."""
    return ", ".join(f"{name}={getattr(one.setting, name)}" for name in plan.varying)
