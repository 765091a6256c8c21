"""`minidl replay`: step through a recorded run with keys in the terminal, or print one state of it.

Interface: `render(replay, width)` returns the lines that show a Replay's position; `run(arguments)` is the command;
`step` moves a Replay by a key. The terminal's settings are restored however the stepping ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import signal
import sys
import termios
import textwrap
import tty
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from minidl import terminal
from minidl.hang.headline import headline
from minidl.job.digests import trace_of
from minidl.playback import words
from minidl.playback.stepper import Replay
from minidl.playback.words import FieldChange
from minidl.tracefile.loaders import in_words, only
from minidl.tracefile.words import lacking, plain
from minidl.views.replay_page import html, to_focus

MOST_CHANGES: Final = 6
"""Most changes of an event that are shown."""

HELP: Final = "← → event  n p batch  w W wait  F focus  ? keys  q quit"

ALL_KEYS: Final = (
    ("→ l   ← h", "the next event, the one before"),
    ("↓ j   ↑ k", "20 events on, 20 back"),
    ("n p", "the next batch in the training loop's hands, the one before"),
    ("w W", "the next long wait for a batch, the one before"),
    ("L", "the longest wait"),
    ("F", "the focus: the hang, the failure, or what slowed the run"),
    ("b N", "batch N"),
    ("v N", "the next fetch of worker N"),
    ("t S", "the moment S seconds after the first event"),
    (": N", "after N events"),
    ("i", "the next iterator, at the same moment"),
    ("space", "play, stop"),
    ("+ -", "play faster, slower"),
    ("g G", "the begin, the end"),
    ("q", "quit"),
)

SPEEDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Events a second."""

FRAMES: Final = 20
"""Most pictures a second while it plays."""


# --- Drawing ----------------------------------------------------------------------------------------------------------
def render(at: Replay, width: int = 100, *, cut: bool = True, colour: bool = False) -> list[str]:
    """Return the replay's position as lines. cut: wrap at `width` characters; colour: highlight what just changed."""
    changed = at.changed
    new = {change.field for change in changed}
    drawn: list[tuple[str, bool]] = [(line, False) for line in _head(at, changed)]
    drawn.append(("─" * width, False))
    drawn += [(str(line), not new.isdisjoint(line.fields)) for line in words.lines(at.state)]
    drawn.append((_bar(at, width), False))
    out = []
    for line, is_new in drawn:
        for shown in _wrapped(line, width) if cut else [line]:
            out.append(f"\x1b[1;33m{shown}\x1b[0m" if colour and is_new else shown)
    return out


def _wrapped(line: str, width: int) -> list[str]:
    """Return the line in parts of at most `width` characters, the others indented a little more than the first."""
    indent = " " * min(len(line) - len(line.lstrip()) + 2, width // 2)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [line]


def _head(at: Replay, changed: tuple[FieldChange, ...]) -> Iterator[str]:
    state = at.state
    yield headline(at.trace).title
    epoch = "" if state.epoch is None else f"   epoch {state.epoch}"
    yield (
        f"event {at.position} of {len(at)}   {state.time:.6f} s   batches {at.batch} of {at.batches}{epoch}   "
        f"{plain(in_words(at.trace, at.loader))} of {plain(str(at.trace.path))}"
    )
    yield f"» {at.words}"
    for change in changed[:MOST_CHANGES]:
        yield f"    {change}"
    if len(changed) > MOST_CHANGES:
        yield f"    and {len(changed) - MOST_CHANGES} more"
    if state.violation:
        yield f"!! not allowed: {plain(state.violation)}"
    if state.note:
        yield f"!  {state.note}"
    if at.position == len(at):
        yield "!  the trace ends here: " + (at.ending or "the run did not end, it was killed or is still running")


def _bar(at: Replay, width: int) -> str:
    place = round((width - 1) * at.position / max(len(at), 1))
    return "━" * place + "●" + "─" * (width - 1 - place)


# --- Keys -------------------------------------------------------------------------------------------------------------
KEYS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
"""Matches one key in a terminal's input."""

_MOVES: Final[dict[str, Callable[[Replay], object]]] = {}
for _keys, _move in (
    (("l", "\x1b[C", "\x1bOC"), lambda at: at.forward()),
    (("h", "\x1b[D", "\x1bOD"), lambda at: at.back()),
    (("j", "\x1b[B", "\x1bOB"), lambda at: at.forward(20)),
    (("k", "\x1b[A", "\x1bOA"), lambda at: at.back(20)),
    (("n", "\x1b[6~"), lambda at: at.next_batch()),
    (("p", "\x1b[5~"), lambda at: at.previous_batch()),
    (("w",), lambda at: at.to_wait(1)),
    (("W",), lambda at: at.to_wait(-1)),
    (("L",), lambda at: at.to_longest_wait()),
    (("F",), lambda at: to_focus(at)),
    (("g", "\x1b[H", "\x1bOH", "\x1b[1~"), lambda at: at.to(0)),
    (("G", "\x1b[F", "\x1bOF", "\x1b[4~"), lambda at: at.to(len(at))),
):
    _MOVES.update(dict.fromkeys(_keys, _move))

_ASKS: Final[dict[str, tuple[str, Callable[[Replay, str], object]]]] = {
    "/": ("seconds", lambda at, text: at.at(float(text))),
    "t": ("seconds", lambda at, text: at.at(float(text))),
    "b": ("batch", lambda at, text: at.to_batch(int(text))),
    "v": ("worker", lambda at, text: at.to_fetch(int(text))),
    ":": ("event", lambda at, text: at.to(int(text))),
}
"""Keys that ask for a number: its name, and the move that it makes."""


def step(at: Replay, key: str) -> bool:
    """Move a Replay by a key; return False if no move has this key."""
    move = _MOVES.get(key)
    if move is not None:
        move(at)
    return move is not None


class _Screen:
    """State of the terminal during the stepping."""

    def __init__(self, at: Replay) -> None:
        self.at = at
        self.colour = not os.environ.get("NO_COLOR")
        self.asked = ""  # the key that asks for a number
        self.typed = ""
        self.said = HELP
        self.speed = SPEEDS.index(10)
        self.plays = self.lists_keys = False
        self.over = False

    def take(self, key: str) -> None:
        """Act on one key."""
        if self.asked:
            self._type(key)
        elif key in ("q", "Q", "\x04"):
            self.over = True
        elif key in _ASKS:
            self.asked, self.typed, self.plays = key, "", False
        else:
            self.said, lists = HELP, self.lists_keys
            self.lists_keys = key == "?" and not lists
            if key == " ":
                self.plays = not self.plays
            elif key in ("+", "=", "-"):
                self.speed = max(0, min(len(SPEEDS) - 1, self.speed + (-1 if key == "-" else 1)))
                self.said = f"{SPEEDS[self.speed]} events a second: space plays"
            elif key == "i":
                self._next_iterator()
            elif step(self.at, key):
                self.plays = False

    def _next_iterator(self) -> None:
        """Go to the same moment in the iterator with the next number."""
        numbers = np.unique(self.at.trace.events["loader"]).tolist()
        others = [number for number in numbers if number > 0]
        at = Replay(self.at.trace, others[(others.index(self.at.loader) + 1) % len(others)])
        at.progress = self.at.progress
        at.at(min(self.at.state.time, at.last_time))
        self.said = f"iterator {at.loader} of {len(others)}" if len(others) > 1 else "the trace has no other iterator"
        self.at = at

    def wait(self) -> float:
        """Return how long to wait for a key, s."""
        return 1 / min(SPEEDS[self.speed], FRAMES) if self.plays else 0.5

    def tick(self) -> None:
        """Go on if it plays; called when no key came for as long as `wait` says."""
        if self.plays:
            self.at.forward(max(1, SPEEDS[self.speed] // FRAMES))
            self.plays = self.at.position < len(self.at)

    def _type(self, key: str) -> None:
        if key in ("\r", "\n"):
            what, go = _ASKS[self.asked]
            try:
                go(self.at, self.typed)
                self.said = HELP
            except IndexError as error:
                self.said = str(error)
            except ValueError:
                self.said = f"{self.typed!r}: give a number ({what})"
            self.asked = ""
        elif key in ("\x7f", "\b"):
            self.typed = self.typed[:-1]
        elif key.startswith("\x1b"):
            self.asked = ""
        elif key.isprintable() and len(self.typed) < 20:
            self.typed += key

    def draw(self) -> str:
        """Return the terminal's new content, from its upper left corner on."""
        columns, rows = terminal.size()
        lines = render(self.at, max(columns, 20), colour=self.colour)
        if self.lists_keys:
            lines = [f"{keys:<11}{what}" for keys, what in ALL_KEYS]
            lines = [part for line in lines for part in _wrapped(line, max(columns, 20))]
        if len(lines) > rows - 1:
            lines = [*lines[: max(rows - 3, 0)], f"({len(lines) - max(rows - 3, 0) - 1} more lines)", lines[-1]]
        last = f"{_ASKS[self.asked][0]}: {self.typed}▏" if self.asked else self.said
        if self.plays:
            last = f"{SPEEDS[self.speed]} events a second  space stop  + - speed"
        lines = [*lines[: rows - 1], last[: max(columns, 1) - 1]]
        return "\x1b[H" + "\x1b[K\n".join(lines) + "\x1b[K\x1b[J"


@contextlib.contextmanager
def _taken(fd: int, out: Any) -> Iterator[None]:
    """Read single keys on the alternate screen; restore the terminal however the block ends."""
    before = termios.tcgetattr(fd)
    enter, leave = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"

    def write(text: str) -> None:
        out.write(text)
        out.flush()

    def ended(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    def stopped(number: int, frame: object) -> None:
        write(leave)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        os.kill(os.getpid(), signal.SIGSTOP)
        tty.setcbreak(fd)
        write(enter)

    handlers = {signal.SIGTERM: ended, signal.SIGHUP: ended, signal.SIGTSTP: stopped}
    kept = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        tty.setcbreak(fd)
        write(enter)
        yield
    finally:
        try:
            write(leave)
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
            for number, handler in kept.items():
                signal.signal(number, handler)


def interact(at: Replay, fd: int, out: Any) -> None:
    """Step through `at` with the keys read from the terminal `fd`, drawn to `out`, until q or the end of input."""
    screen = _Screen(at)
    with _taken(fd, out):
        drawn = ""
        while not screen.over:
            picture = screen.draw()
            if picture != drawn:
                out.write(picture)
                out.flush()
                drawn = picture
            if not select.select([fd], [], [], screen.wait())[0]:
                screen.tick()
                continue  # draw again: the window's size may have changed
            data = os.read(fd, 1024).decode("utf-8", "replace")
            if not data:
                return
            for key in KEYS.findall(data):
                screen.take(key)


# --- The command ------------------------------------------------------------------------------------------------------
def run(arguments: argparse.Namespace) -> int:
    """Run `minidl replay`; return the exit code. Raises TraceError; ValueError or IndexError for a wrong position."""
    with terminal.busy(f"reading {arguments.trace}"):
        trace = only(trace_of([arguments.trace], arguments.rank), arguments.dataloader)
        spot = headline(trace).focus
    pointed = spot.loader if spot is not None and spot.loader else None  # 0: at the program's own code
    at = Replay(trace, pointed if arguments.iterator is None else arguments.iterator)
    at.progress = terminal.counting("following the run's events") if sys.stderr.isatty() else None
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    moments = ((arguments.event, at.to), (arguments.batch, at.to_batch), (arguments.at, at.at))
    asked = [(moment, go) for moment, go in moments if moment is not None]
    for moment, go in asked:
        go(moment)
    if not asked:
        to_focus(at)
    if arguments.html is not None:
        print(html(at, arguments.html))
    elif interactive:
        interact(at, sys.stdin.fileno(), sys.stdout)
    else:
        print("\n".join([*render(at, cut=False), *lacking(at.trace.problems)]))
    return 0
