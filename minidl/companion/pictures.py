"""A moment of a recorded run as a small SVG: the lanes around it, with a line where it is.

Interface: `picture(moment)` -> two SVGs that stand in a page: the lanes' names, and beside them, in a box that a narrow
page scrolls, the lanes. Texts and pale bars take the page's colours (classes `t`, `f`, `now`), so that they fit both
themes. It is drawn from the Scene, as all pictures are.
"""

from __future__ import annotations

import functools
import html
from collections import defaultdict
from typing import Final

import numpy as np

from minidl.companion.moments import Moment
from minidl.companion.phrases import labels, told
from minidl.companion.rows import LANGUAGES
from minidl.tracefile.arrays import Rows
from minidl.tracefile.events import Phase, Track
from minidl.tracefile.reader import Trace
from minidl.tracefile.words import duration
from minidl.views.colours import SOFT, is_light, paint, rgb
from minidl.views.layout import LaneKind
from minidl.views.scene import FADING, Scene, caption, per_pixel, scene_of

WIDTH, LEFT, ROW, GAP, LETTER = 640, 108, 15, 4, 5.4
"""Pixels: of the picture, of the lanes' names, of a row, between lanes, of a letter of a caption."""

TYPICAL: Final = 4
"""Batches that a picture holds, if the moment does not say how long it is."""

MOST_LANES: Final = 12

FADED: Final = 0.35
"""Opacity of a bar that has no recorded end."""

SLOT: Final = 13
"""Pixels above the first lane of a rank, for its title, if there are several."""


@functools.cache
def _scene(path: str, trace: Trace) -> Scene:
    return scene_of(trace)


def _window(moment: Moment, scene: Scene) -> tuple[int, int]:
    """Return begin and end of the picture, ns: around the moment, and around its span if it is of one."""
    if moment.window:
        half = moment.window // 2
    else:
        yielded = np.sort(scene.batches["yielded"][scene.batches["yielded"] >= 0])
        each = int(np.median(np.diff(yielded))) if len(yielded) > 1 else scene.end // 10
        half = TYPICAL * max(each, 1_000_000) // 2
    begin = end = moment.time
    span = _span_of(moment, scene)
    if span is not None:
        begin, end = int(span["begin"]) - scene.start, min(int(span["end"]) - scene.start, begin + 4 * half)
    return max(0, begin - half), min(scene.end, end + half)


def _span_of(moment: Moment, scene: Scene) -> np.void | None:
    """Return the span that begins with the moment's event, if it has ended."""
    event, spans = moment.trace.events[moment.row], scene.spans
    mine = spans[(spans["code"] == event["code"]) & (spans["tid"] == event["tid"]) & (spans["begin"] == event["time"])]
    return mine[0] if len(mine) and mine["end"][0] >= 0 else None


def picture(moment: Moment) -> str:
    """Return the picture of a moment."""
    scene = _scene(str(moment.trace.path), moment.trace)
    begin, end = _window(moment, scene)
    return _MomentCanvas(scene, moment, begin, max(end, begin + 1)).svg()


class _MomentCanvas:
    """One picture in the making. Lanes that have nothing in the window are left out."""

    def __init__(self, scene: Scene, moment: Moment, begin: int, end: int) -> None:
        self.scene, self.moment, self.begin, self.end = scene, moment, begin, end
        bars = scene.bars[(scene.bars["begin"] < end) & (scene.bars["end"] > begin)]
        own = self._own_lane(bars)
        shown = [lane for lane in np.unique(bars["lane"]).tolist() if self._wanted(lane) or lane == own]
        self.top: dict[int, float] = {}
        y = 4.0
        for lane in self._fewer(shown, own):
            rows = bars["row"][bars["lane"] == lane]
            self.top[lane] = y
            y += ROW * (min(int(rows.max()), 2) + 1) + GAP
            if self._begins_slot(lane):
                self.top[lane] += SLOT
                y += SLOT
        self.height = y + 16
        self.own = own
        self.bars = bars[np.isin(bars["lane"], list(self.top)) & (bars["row"] <= 2)]

    def _wanted(self, lane: int) -> bool:
        kind = self.scene.lanes[lane].kind
        feeders = self.moment.event.track is Track.FEEDER
        return kind not in (LaneKind.EPOCHS, LaneKind.QUEUE_FEEDERS) and (feeders or kind is not LaneKind.FEEDER)

    def _begins_slot(self, lane: int) -> bool:
        """Tell whether the lane is the first one shown of its slot, such as a rank, of several."""
        others = {self.scene.lanes[each].slot for each in self.top if each != lane}
        return len(self.scene.slots) > 1 and self.scene.lanes[lane].slot not in others

    def _own_lane(self, bars: Rows) -> int:
        """Return the lane that the moment's event stands on; -1 if nothing is drawn there."""
        row = self.moment.row
        marks = self.scene.marks[self.scene.marks["event"] == row]
        if len(marks):
            return int(marks["lane"][0])
        is_end = self.moment.event.phase is Phase.END
        at = bars[bars["code"] == self.moment.event.code - is_end]
        near = at[np.abs(at["end" if is_end else "begin"] - self.moment.time) < 2]
        return int(near["lane"][0]) if len(near) else -1

    def _fewer(self, lanes: list[int], own: int) -> list[int]:
        """Return at most MOST_LANES lanes: the moment's own, and the first others."""
        if len(lanes) <= MOST_LANES:
            return lanes
        first = [lane for lane in lanes if lane != own][: MOST_LANES - 1]
        return sorted({*first, *([own] if own in lanes else [])})

    def x(self, time: int) -> float:
        """Return the pixel of a moment."""
        inside = min(max(time, self.begin), self.end)
        return LEFT + (inside - self.begin) / (self.end - self.begin) * (WIDTH - LEFT - 4)

    def y(self, lane: int, row: int) -> float:
        return self.top[lane] + ROW * row

    def svg(self) -> str:
        title = html.escape(f"{self.moment.name}: {self.moment.event.name} at {duration(self.moment.time)}")
        names = f'<svg class="names" viewBox="0 0 {LEFT - 4} {self.height:g}" aria-hidden="true">'
        size = f'viewBox="{LEFT - 4} 0 {WIDTH - LEFT + 4} {self.height:g}"'
        head = f'</svg><div class="wide"><svg class="moment" {size} role="img"><title>{title}</title>'
        return "".join([names, *self._names(), *self._scale(), head, *self._bars(), *self._now(), "</svg></div>"])

    def _names(self) -> list[str]:
        out: list[str] = []
        slots = set[int]()
        for lane, top in self.top.items():
            slot = self.scene.lanes[lane].slot
            if len(self.scene.slots) > 1 and slot not in slots:
                title = told(self.scene.slots[slot].title)
                out.extend(labels("t", f'x="4" y="{top - 4:g}" font-weight="700"', title))
            slots.add(slot)
            at = f'x="{LEFT - 6}" y="{top + 11:g}" text-anchor="end" font-weight="{700 if lane == self.own else 400}"'
            names = {code: name[:18] for code, name in told(self.scene.lanes[lane].title).items()}
            out.extend(labels("t", at, names))
        return out

    def _bars(self) -> list[str]:
        wide, thin = per_pixel(self.bars, self.begin, self.end, WIDTH - LEFT)
        shapes: dict[tuple[str, float], list[str]] = defaultdict(list)
        texts: list[str] = []
        for bar in wide:
            look = paint(int(bar["code"]))
            left, right = self.x(int(bar["begin"])), self.x(int(bar["end"]))
            y = self.y(int(bar["lane"]), int(bar["row"]))
            width = max(right - left, 0.7)
            faint = bar["fate"] in FADING
            shapes[look.colour, (SOFT if look.soft else 1.0) * (FADED if faint else 1)].append(_box(left, y, width))
            kind = "t" if look.soft or faint else "k" if is_light(rgb(look.colour)) else "w"
            captions = [told(words) for words in caption(self.scene, bar) if words]
            fitting = {code: next((w[code] for w in captions if _width(w[code]) + 4 < width), "") for code in LANGUAGES}
            texts += labels(kind, f'x="{left + 3:.0f}" y="{y + 10.5:g}"', fitting)
        for column in thin:
            look = paint(int(column["code"]))
            y = self.y(int(column["lane"]), int(column["row"]))
            share = round(max(0.25, min(1.0, float(column["share"]))) * (SOFT if look.soft else 1.0), 1)
            shapes[look.colour, max(share, 0.1)].append(_box(LEFT + int(column["pixel"]), y, 1))
        lines = "".join(f"M{LEFT} {top + ROW + 1:g}H{WIDTH - 4}" for top in self.top.values())
        drawn = [f'<path class="f" d="{lines}"/>']
        drawn += [
            f'<path fill="{colour}"{f" fill-opacity={chr(34)}{opacity:g}{chr(34)}" if opacity < 1 else ""} '
            f'd="{"".join(boxes)}"/>'
            for (colour, opacity), boxes in shapes.items()
        ]
        return drawn + texts

    def _now(self) -> list[str]:
        x = self.x(self.moment.time)
        late = x > WIDTH * 0.6
        at = f'x="{x - 5 if late else x + 5:.1f}" y="{self.height - 5:g}" text-anchor="{"end" if late else "start"}"'
        # The time is told apart: "pin 7" is told as a bar's label.
        words = {code: f"{self.moment.event.name} {time}" for code, time in told(duration(self.moment.time)).items()}
        out = [f'<path class="now" d="M{x:.1f} 0V{self.height - 2:g}"/>', *labels("nowt", at, words)]
        if self.own in self.top:
            out.append(f'<circle class="dot" cx="{x:.1f}" cy="{self.top[self.own] + 7:g}" r="3.5"/>')
        return out

    def _scale(self) -> list[str]:
        return [*labels("t", f'x="4" y="{self.height - 5:g}"', told(f"{duration(self.end - self.begin)} shown"))]


def _width(text: str) -> float:
    """Return about how many pixels a caption takes; a Chinese character takes two letters."""
    return sum(LETTER * (1 + (letter >= "\u2e80")) for letter in text)


def _box(x: float, y: float, width: float) -> str:
    return f"M{x:.1f} {y:g}h{width:.1f}v{ROW - 2}h-{width:.1f}z"
