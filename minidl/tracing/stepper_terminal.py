"""`minidl replay`: a recorded run stepped through with keys, in the terminal; or one state of it, as text.

Interface: `render(replay, width)` gives the lines that show where a Replay is; `run(arguments)` is the command; `step`
moves a Replay by a key. Rule of use: the terminal is put back as it was however the stepping ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minidl.tracing.attachments import plain
from minidl.tracing.ledger import size
from minidl.tracing.state import ProtocolState, Queued
from minidl.tracing.stepper import Change, Replay, replay

if TYPE_CHECKING:
    from minidl.tracing.state import WorkerNow

MOST_CHANGES: Final = 6
"""Of what an event changed, so many lines are shown."""

HELP: Final = (
    "←→ h l event   ↑↓ k j 20 events   n p batch   g G begin, end   / t time   b batch number   : event number   q quit"
)


# --- Drawing ----------------------------------------------------------------------------------------------------------
def render(at: Replay, width: int = 100, *, cut: bool = True, colour: bool = False) -> list[str]:
    """Where the replay is, as lines; cut: to `width` characters. colour: what has just changed is set off."""
    changed = at.changed
    lines: list[tuple[str, tuple[str, ...]]] = [(line, ()) for line in _head(at, changed)]
    lines += [("─" * width, ()), *_body(at.state), (_bar(at, width), ())]
    out = []
    for line, fields in lines:
        shown = line[: width - 1] + "…" if cut and len(line) > width else line
        new = any(change.field.startswith(field) for change in changed for field in fields)
        out.append(f"\x1b[1;33m{shown}\x1b[0m" if colour and new else shown)
    return out


def _head(at: Replay, changed: tuple[Change, ...]) -> Iterator[str]:
    state = at.state
    epoch = "" if state.epoch is None else f"   epoch {state.epoch}"
    yield (
        f"event {at.position} of {len(at)}   {state.time:.6f} s   batches {at.batch} of {at.batches}{epoch}   "
        f"loader {at.loader} of {plain(str(at.trace.path))}"
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


def _body(state: ProtocolState) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Lines, each with the beginnings of the fields that it shows."""
    counts = "   ".join(
        f"{name} {'?' if value is None else value}"
        for name, value in (
            ("send_idx", state.send_idx), ("rcvd_idx", state.rcvd_idx), ("outstanding", state.tasks_outstanding)
        )
    )  # fmt: skip
    hand = "" if state.in_hand is None else f"   in hand: task {state.in_hand}"
    sampler = "" if state.sampling is None else f"   asks the sampler for task {state.sampling}"
    yield (
        _line("loader", f"{state.loader.name}   {counts}{_waits(state)}{hand}{sampler}"),
        ("loader", "send_idx", "rcvd_idx", "tasks_outstanding", "in_hand", "sampling", "waiting_for"),
    )
    tasks = (f"{n}→w{i.worker_id}{' fetched' if i.fetched else ''}" for n, i in state.task_info.items())
    yield _line("task_info", "   ".join(tasks) or "-"), ("task_info",)
    yield _line("reorder", ", ".join(map(str, state.reorder_buffer)) or "-"), ("reorder_buffer",)
    for worker in state.workers:
        yield _worker(state, worker), (f"workers[{worker.worker}]", f"workers_num_tasks[{worker.worker}]")
    yield _line("result queue", _queue(state.result_queue)), ("result_queue",)
    if state.pin is not None:
        doing = "" if state.pin.task < 0 else f"   task {state.pin.task}"
        pretence = "   (simulated)" if state.pin.simulated else ""
        yield _line("pin thread", state.pin.state.name + doing + pretence), ("pin",)
        yield _line("ready queue", _queue(state.ready_queue)), ("ready_queue",)
    yield _line("consumer", _consumer(state)), ("consumer", "yielded")
    ends = [which.name.lower().replace("_", " ") for which in state.done_events]
    joins = [f"{who.name.lower()} {n if n >= 0 else ''}".replace("_", " ").strip() for who, n in state.joining]
    yield (
        _line(
            "in flight",
            size(state.bytes_in_flight)
            + (f"   done event: {', '.join(ends)}" if ends else "")
            + (f"   waits for the end of {', '.join(joins)}" if joins else ""),
        ),
        ("bytes_in_flight", "done_events", "joining"),
    )


def _line(name: str, text: str) -> str:
    return f"{name:<13} {text}"


def _waits(state: ProtocolState) -> str:
    if state.waiting_for is None:
        return ""
    return f"   waits for task {state.waiting_for}" if state.waiting_for >= 0 else "   waits"


def _consumer(state: ProtocolState) -> str:
    if state.consumer is None:
        doing = "-"
    else:
        doing = f"works on task {state.consumer}" if state.consumer >= 0 else "its own code runs"
    return f"{doing}   {state.yielded} batches of this epoch handed out"


def _worker(state: ProtocolState, worker: WorkerNow) -> str:
    number = worker.worker
    if number < 0:
        return _line("fetching", f"{worker.doing}   (no workers: the loader's own process, pid {worker.pid})")
    counts = state.workers_num_tasks
    tasks = f"{counts[number]} tasks" if number < len(counts) else ""
    idle = "" if number >= len(state.workers_status) or state.workers_status[number] else ", no more"
    queue = _queue(worker.index_queue, of=False)
    return _line(f"worker {number}", f"{worker.state.name:<10}{tasks + idle:<17}{worker.doing:<44} queue: {queue}")


def _queue(queue: Iterable[Queued], *, of: bool = True) -> str:
    def told(message: Queued) -> str:
        worker = f"w{message.worker} " if of and message.worker >= 0 else ""
        return f"{message.task if message.task >= 0 else message.name} ({worker}{message.stage.value})"

    return ", ".join(map(told, queue)) or "-"


def _bar(at: Replay, width: int) -> str:
    place = round((width - 1) * at.position / max(len(at), 1))
    return "━" * place + "●" + "─" * (width - 1 - place)


# --- Keys -------------------------------------------------------------------------------------------------------------
KEYS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
"""Cuts what a terminal sends into keys."""

_MOVES: Final[dict[str, Callable[[Replay], object]]] = {}
for _keys, _move in (
    (("l", "\x1b[C", "\x1bOC", " "), lambda at: at.forward()),
    (("h", "\x1b[D", "\x1bOD"), lambda at: at.back()),
    (("j", "\x1b[B", "\x1bOB"), lambda at: at.forward(20)),
    (("k", "\x1b[A", "\x1bOA"), lambda at: at.back(20)),
    (("n", "\x1b[6~"), lambda at: at.next_batch()),
    (("p", "\x1b[5~"), lambda at: at.previous_batch()),
    (("g", "\x1b[H", "\x1bOH", "\x1b[1~"), lambda at: at.to(0)),
    (("G", "\x1b[F", "\x1bOF", "\x1b[4~"), lambda at: at.to(len(at))),
):
    _MOVES.update(dict.fromkeys(_keys, _move))

_ASKS: Final[dict[str, tuple[str, Callable[[Replay, str], object]]]] = {
    "/": ("seconds", lambda at, text: at.at(_seconds(text))),
    "t": ("seconds", lambda at, text: at.at(_seconds(text))),
    "b": ("batch", lambda at, text: at.to_batch(int(text))),
    ":": ("event", lambda at, text: at.to(int(text))),
}
"""Keys that ask for a number: what for, and what to do with it."""


def _seconds(text: str) -> float:
    seconds = float(text)
    if not abs(seconds) < 1e9:
        raise ValueError("no moment")
    return seconds


def step(at: Replay, key: str) -> bool:
    """Do what the key says; False where it is none that moves."""
    move = _MOVES.get(key)
    if move is not None:
        move(at)
    return move is not None


class _Screen:
    """The terminal while it is stepped in."""

    def __init__(self, at: Replay) -> None:
        self.at = at
        self.colour = not os.environ.get("NO_COLOR")
        self.asked = ""  # the key that asks for a number
        self.typed = ""
        self.said = HELP
        self.over = False

    def take(self, key: str) -> None:
        """Act on one key."""
        if self.asked:
            self._type(key)
        elif key in ("q", "Q", "\x04"):
            self.over = True
        elif key in _ASKS:
            self.asked, self.typed = key, ""
        else:
            self.said = HELP
            step(self.at, key)

    def _type(self, key: str) -> None:
        if key in ("\r", "\n"):
            what, go = _ASKS[self.asked]
            try:
                go(self.at, self.typed)
                self.said = HELP
            except IndexError as error:
                self.said = str(error)
            except ValueError:
                self.said = f"{self.typed!r} is no number of a {what}" if what != "seconds" else "no number of seconds"
            self.asked = ""
        elif key in ("\x7f", "\b"):
            self.typed = self.typed[:-1]
        elif key.startswith("\x1b"):
            self.asked = ""
        elif key.isprintable() and len(self.typed) < 20:
            self.typed += key

    def draw(self) -> str:
        """What to send to the terminal: the whole picture, from its corner."""
        columns, rows = shutil.get_terminal_size()
        lines = render(self.at, max(columns, 20), colour=self.colour)
        if len(lines) > rows - 1:
            lines = [*lines[: max(rows - 3, 0)], f"({len(lines) - max(rows - 3, 0) - 1} more lines)", lines[-1]]
        last = f"{_ASKS[self.asked][0]}: {self.typed}▏" if self.asked else self.said
        lines = [*lines[: rows - 1], last[: max(columns, 1) - 1]]
        return "\x1b[H" + "\x1b[K\n".join(lines) + "\x1b[K\x1b[J"


@contextlib.contextmanager
def _taken(fd: int, out: Any) -> Iterator[None]:
    """The terminal, key by key and on a screen of its own, given back however this ends."""
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
    """Step through `at` with the keys that come from the terminal `fd`, drawn to `out`, until q or the end of input."""
    screen = _Screen(at)
    with _taken(fd, out):
        drawn = ""
        while not screen.over:
            picture = screen.draw()
            if picture != drawn:
                out.write(picture)
                out.flush()
                drawn = picture
            if not select.select([fd], [], [], 0.5)[0]:
                continue  # the window may have another size now
            data = os.read(fd, 1024).decode("utf-8", "replace")
            if not data:
                return
            for key in KEYS.findall(data):
                screen.take(key)


# --- The command ------------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` needs."""
    parser.epilog = (
        "Example: minidl replay minidl-demo/trace-1 --batch 9. Not on a terminal: prints that state, or the last."
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help="a trace's directory, or a packed file")
    add("--batch", type=int, metavar="N", help="begin where batch N (from 0) is in the training loop's hands")
    add("--at", type=float, metavar="S", help="begin S seconds after the trace's first event")
    add("--event", type=int, metavar="N", help="begin after the loader's first N events")
    add("--loader", type=int, metavar="L", help="which iterator (default: the one with the most events)")
    add("--html", type=Path, metavar="FILE", help="write a page with a slider instead")


def run(arguments: argparse.Namespace) -> int:
    """`minidl replay`; the exit code. Raises TraceError, or ValueError or IndexError for what the trace has not."""
    at = replay(arguments.trace, arguments.loader)
    at.progress = _progress if sys.stderr.isatty() else None
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    moments = ((arguments.event, at.to), (arguments.batch, at.to_batch), (arguments.at, at.at))
    asked = [(moment, go) for moment, go in moments if moment is not None]
    for moment, go in asked:
        go(moment)
    if not asked and not interactive:
        at.to(len(at))
    if arguments.html is not None:
        print(at.html(arguments.html))
    elif interactive:
        interact(at, sys.stdin.fileno(), sys.stdout)
    else:
        print("\n".join(render(at, cut=False)))
    return 0


def _progress(done: int, of: int) -> None:
    """On the line where the cursor is, which is empty again at the end: on a screen that is drawn, the last one."""
    told = f"following the run's events: {done:,} of {of:,}" if done < of else ""
    print(f"\r\x1b[K{told}", end="", file=sys.stderr, flush=True)
