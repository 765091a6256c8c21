"""The protocol's tables as pictures: the three lifecycles, and the joint rules of the shutdown.

`python -m minidl.explore.diagrams [DIR]` writes one SVG a table (default: `minidl/diagrams`; the guide to the protocol
shows them).
A lifecycle is a column of states. A transition leaves its state at the right if it goes down, at the left if it goes up
or stays; states from which one event leads to one state share a line. The text of a transition stands on the piece of
line beside its state, so no two texts can overlap. A text with a slash is "events / action".
"""

from __future__ import annotations

import configparser
import html
import itertools
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minidl.check.joint_rules import JOINT_RULES, MAKES, RULES_OF, Act, Fact, Role
from minidl.loader import protocol

FOLDER: Final = Path(__file__).parent.parent / "diagrams"

SIZE, LETTER, LINE = 12, 7.4, 20
"""Height of the letters, width of a letter, and distance of two lines, in pixels."""
LANE, GAP, EDGE = 16, 24, 20
"""Distance of two vertical lines, of two boxes, and to the picture's edge."""

_STYLE: Final = """
text { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; fill: #24292f }
.paper { fill: #ffffff } .box { fill: #f0f1f3; stroke: #6e7781 } .end { stroke-width: 3 }
.line { fill: none; stroke: #8c959f } .tip { fill: #6e7781 } .quiet { fill: #57606a } .title { font-weight: bold }
@media (prefers-color-scheme: dark) {
text { fill: #d7dde4 } .paper { fill: #14181e } .box { fill: #262c34; stroke: #8b949e }
.line { stroke: #768390 } .tip { fill: #9aa5b1 } .quiet { fill: #a3adb8 } }
"""


class _Canvas:
    """Pieces of an SVG. Coordinates are pixels; `text` stands on y."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>'
        )  # fmt: skip

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        kind = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text{kind} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(words)}</text>')

    def line(self, *points: tuple[float, float]) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="line" points="{path}"/>')

    def tip(self, x: float, y: float, dx: int, dy: int) -> None:
        """An arrow's point at (x, y), which looks along (dx, dy)."""
        wings = [(x - 7 * dx - 4 * dy, y - 7 * dy - 4 * dx), (x - 7 * dx + 4 * dy, y - 7 * dy + 4 * dx)]
        path = " ".join(f"{a:g},{b:g}" for a, b in [(x, y), *wings])
        self.parts.append(f'<polygon class="tip" points="{path}"/>')

    def svg(self, width: float, height: float, title: str) -> str:
        """The picture, with its title at the upper left."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
        )
        self.text(EDGE, EDGE + SIZE, title, "title")
        paper = f'<rect class="paper" width="{width:g}" height="{height:g}" rx="6"/>'
        return "\n".join([head, paper, *self.parts, "</svg>"]) + "\n"


# --- A lifecycle ------------------------------------------------------------------------------------------------------
@dataclass
class _Move:
    """All transitions to one state by the same events with the same action."""

    sources: tuple[int, ...]
    target: int
    label: str
    lane: int = 0

    @property
    def up(self) -> bool:
        """Whether it is drawn at the left; only then may one of its sources be its target."""
        return self.target <= min(self.sources)

    @property
    def span(self) -> tuple[int, int]:
        """The rows that its vertical line passes."""
        return min(*self.sources, self.target), max(*self.sources, self.target)


def _states(table: Mapping[Any, Any]) -> list[Any]:
    kind: Any = type(next(iter(table)))
    return list(kind)


def _moves(table: Mapping[Any, Mapping[Any, Any]]) -> list[_Move]:
    """The transitions of a table; up and down are told apart. States are numbered in the order of their enumeration."""
    place = {state: number for number, state in enumerate(_states(table))}
    sources: dict[tuple[str, str, int, bool], list[int]] = defaultdict(list)
    for state in place:
        for event, entry in table[state].items():
            following, action = entry if isinstance(entry, tuple) else (entry, None)
            action_name = f" / {action.name.lower()}" if action is not None else ""
            up = place[following] <= place[state]
            sources[event.name, action_name, place[following], up].append(place[state])
    events: dict[tuple[tuple[int, ...], int, str], list[str]] = defaultdict(list)
    for (event_name, action_name, target, _), origins in sources.items():
        events[tuple(origins), target, action_name].append(event_name)
    return [_Move(origins, target, ", ".join(names) + action) for (origins, target, action), names in events.items()]


def _lanes(moves: list[_Move]) -> int:
    """Give each move a lane in which it meets no other, short ones inside; the number of lanes."""
    taken: list[list[tuple[int, int]]] = []
    for move in sorted(moves, key=lambda move: (move.span[1] - move.span[0], move.span)):
        first, last = move.span
        for lane in itertools.count():
            if lane == len(taken):
                taken.append([])
            if all(last < begin or end < first for begin, end in taken[lane]):
                taken[lane].append(move.span)
                move.lane = lane
                break
    return len(taken)


def lifecycle(title: str, table: Mapping[Any, Mapping[Any, Any]]) -> str:
    """A table as an SVG."""
    moves, states = _moves(table), _states(table)
    sides = {up: [move for move in moves if move.up == up] for up in (True, False)}
    lanes = {up: _lanes(side) for up, side in sides.items()}
    room = {up: LETTER * max((len(move.label) for move in side), default=0) + 16 for up, side in sides.items()}
    ports: dict[tuple[int, bool], list[tuple[_Move, bool]]] = defaultdict(list)  # of a state's side, from the top
    for up, side in sides.items():
        for move in side:
            ports[move.target, up].append((move, True))
            for source in move.sources:
                ports[source, up].append((move, False))
    width = LETTER * max(len(state.name) for state in states) + 24
    left = EDGE + lanes[True] * LANE + room[True]
    canvas, tops, y = _Canvas(), list[float](), EDGE + 2 * LINE
    for number, state in enumerate(states):
        tops.append(y)
        height = LINE * max(1, len(ports[number, True]), len(ports[number, False])) + 8
        leaves = any(number in move.sources and move.target != number for move in moves)
        canvas.box(left, y, width, height, "box" if leaves else "box end")
        canvas.text(left + width / 2, y + height / 2 + 4, state.name, "title", "middle")
        y += height + GAP
    for up, side in sides.items():
        edge, sign = (left, -1) if up else (left + width, 1)
        for move in side:
            ends = [
                (tops[state] + 4 + LINE * (number + 0.7), arrives)
                for state in dict.fromkeys((move.target, *move.sources))
                for number, (other, arrives) in enumerate(ports[state, up])
                if other is move
            ]
            _draw(canvas, move, ends, edge, edge + sign * (room[up] + (move.lane + 0.5) * LANE))
    right = left + width + room[False] + lanes[False] * LANE + EDGE
    return canvas.svg(max(right, 2 * EDGE + LETTER * len(title)), y - GAP + EDGE, title)


def _draw(canvas: _Canvas, move: _Move, ends: list[tuple[float, bool]], edge: float, lane: float) -> None:
    """Draw a move's lines. ends: y at the boxes' edge, and whether it arrives there; lane: x of the vertical line."""
    sign = -1 if move.up else 1
    for y, arrives in ends:
        canvas.line((edge, y), (lane, y))
        if arrives:
            canvas.tip(edge, y, -sign, 0)
        else:
            canvas.text(edge + sign * 8, y - 4, move.label, "quiet", "end" if move.up else "start")
    canvas.line((lane, min(ends)[0]), (lane, max(ends)[0]))


# --- The joint rules --------------------------------------------------------------------------------------------------
COLUMN, SPACE, WORDS = 330, 56, 40
"""Width of an actor's column and of the space between two, in pixels; width of a text, in letters."""

OF_EACH = {(Fact.KILLED, Fact.DEAD): "each worker was sent SIGKILL or is known to be dead"}
"""What a row requires of all workers, in words: there is no one worker that "it" could be."""


_UNSPACED = re.compile(r"(?<=[\u4e00-\u9fff]) (?=或)|(?<=或) (?=[\u4e00-\u9fff])")
"""Blanks that a line may be broken at, and that Chinese does not have."""


def _words(language: str) -> Callable[[str], str]:
    """What gives a text of the tables in a language. Raises KeyError if shutdown.ini has not got it."""
    known = configparser.ConfigParser(interpolation=None, delimiters="=")
    known.read(FOLDER / "shutdown.ini", encoding="utf-8")
    return lambda text: (
        text if language == "en" else known[text][language].replace("pin 线程", "pin\N{NO-BREAK SPACE}线程")
    )


def _steps(words: Callable[[str], str], width: int) -> Iterator[tuple[Role, Act, list[str]]]:
    """The acts of a shutdown in the table's order, each with what its rows require, in lines of `width` letters."""
    either = f" {words('or')} "
    begins = next(number for number, rule in enumerate(JOINT_RULES) if rule.act is Act.SET_PIN_DONE)
    for act in dict.fromkeys(rule.act for rule in JOINT_RULES[begins:]):
        rules = RULES_OF[act]
        required = [rule.requires for rule in rules if rule.requires and rule.requires != (Fact.BOUNDED,)]
        conditions = [
            "- " + (words(OF_EACH[facts]) if facts in OF_EACH else either.join(words(fact.value) for fact in facts))
            for facts in required
        ]
        yield (
            rules[0].who,
            act,
            [
                _UNSPACED.sub("", line)
                for text in conditions
                for line in textwrap.wrap(text, width, subsequent_indent="  ")
            ],
        )


def shutdown(title: str, language: str = "en") -> str:
    """The shutdown as a sequence: each actor's acts, what they require, and the acts of others that they wait for."""
    words = _words(language)
    canvas, y = _Canvas(), EDGE + 2.0 * LINE
    x = {role: float(EDGE + number * (COLUMN + SPACE)) for number, role in enumerate(Role)}
    for role, at in x.items():
        canvas.text(at + COLUMN / 2, y, words(role.value), "title", "middle")
    y += LINE
    boxes: list[tuple[Role, Act, list[str], float, float]] = []
    for role, act, lines in _steps(words, WORDS if language != "zh" else WORDS * 3 // 5):  # a Chinese letter is wider
        boxes.append((role, act, lines, y, LINE * (len(lines) + 1.5)))
        y = y + boxes[-1][-1] + GAP
    for at in x.values():
        canvas.line((at + COLUMN / 2, EDGE + 2.5 * LINE), (at + COLUMN / 2, y - GAP / 2))
    made = {fact: (x[role], top + 16) for role, act, _, top, _ in boxes if (fact := MAKES.get(act)) is not None}
    bends: dict[Role, dict[Fact, int]] = defaultdict(dict)
    for role, act, lines, top, height in boxes:
        for fact in dict.fromkeys(fact for rule in RULES_OF[act] for fact in rule.requires if fact in made):
            from_x, from_y = made[fact]
            if from_x < x[role]:  # in the gap before the column, which no box reaches into
                lanes = bends[role]
                lanes.setdefault(fact, len(lanes))
                bend, into = x[role] - SPACE + 18 + 12 * lanes[fact], top + 16 + 12 * lanes[fact]
                canvas.line((from_x + COLUMN, from_y), (bend, from_y), (bend, into), (x[role], into))
                canvas.tip(x[role], into, 1, 0)
        canvas.box(x[role], top, COLUMN, height, "box end" if act is Act.CLOSE else "box")
        canvas.text(x[role] + 12, top + 20, words(act.value), "title")
        for number, line in enumerate(lines, 1):
            canvas.text(x[role] + 12, top + 20 + number * LINE, line, "quiet")
    return canvas.svg(3 * COLUMN + 2 * SPACE + 2 * EDGE, y - GAP + EDGE, words(title))


SHUTDOWN: Final = "The shutdown: JOINT_RULES. An act requires each of its lines"
PICTURES: Final[dict[str, Callable[[], str]]] = {
    "loader.svg": lambda: lifecycle("The loader: LOADER_TABLE", protocol.LOADER_TABLE),
    "worker.svg": lambda: lifecycle("A worker: WORKER_TABLE", protocol.WORKER_TABLE),
    "pin-thread.svg": lambda: lifecycle("The pin thread: PIN_TABLE", protocol.PIN_TABLE),
    "shutdown.svg": lambda: shutdown(SHUTDOWN),
    "shutdown.ru.svg": lambda: shutdown(SHUTDOWN, "ru"),
    "shutdown.zh.svg": lambda: shutdown(SHUTDOWN, "zh"),
}
"""File name -> what draws it."""


def main(folder: Path = FOLDER) -> None:
    """Write every picture into `folder`, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
