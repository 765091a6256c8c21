"""Output of commands besides their results: progress, messages, and text of any encoding.

Progress and messages go to stderr, so that stdout holds a command's result alone.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

ERASE_LINE = "\r\x1b[K"


def progress(text: str) -> None:
    """Show `text` in place of the line that progress showed before; "" erases it. Without a terminal: nothing."""
    if is_shown():
        print(f"{ERASE_LINE}{text}", end="", file=sys.stderr, flush=True)


def is_shown() -> bool:
    """Whether stderr is a terminal. A script that was run may have closed it."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def counting(what: str) -> Callable[[int, int], None]:
    """Return a callback for (done, total) that shows "`what`: done of total", and erases it at the end."""

    def show(done: int, total: int) -> None:
        progress(f"{what}: {done:,} of {total:,}" if done < total else "")

    return show


BUSY_AFTER, BUSY_EVERY = 2.0, 0.5
"""Seconds after which work is said to go on, and between two updates."""


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """While this is open, and has been for two seconds, show `what` and for how long; erase it at the end."""
    if not is_shown():
        yield
        return
    began, ended = time.monotonic(), threading.Event()

    def show() -> None:
        patience = BUSY_AFTER
        while not ended.wait(patience):
            progress(f"{what}: {time.monotonic() - began:.0f} s")
            patience = BUSY_EVERY

    thread = threading.Thread(target=show, name="minidl-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress("")


def say(text: str) -> None:
    """Print a line to stderr at once, with escapes for what it cannot encode. Nothing if it is closed, or broken."""
    stream = sys.stderr
    if stream is not None:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError, ValueError):
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """While this is open, SIGTERM and SIGHUP raise SystemExit, so that what the block has opened is put away.

    A signal that is ignored or handled already is left as it is. No effect outside the main thread.
    """

    def ended(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    taken = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, ended)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def columns(fallback: int = 100) -> int:
    """Return the terminal's width in characters; `fallback` if there is no terminal."""
    return size(fallback)[0]


def size(columns: int = 80, rows: int = 24) -> tuple[int, int]:
    """Return the terminal's width and height in characters; `columns` and `rows` if there is no terminal."""
    given = shutil.get_terminal_size((columns, rows))
    return given.columns or columns, given.lines or rows  # Python 3.10 gives the zeros of a terminal that tells none


def escape_unencodable() -> None:
    """Let stdout and stderr write escapes for characters that their encoding does not have, and not raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
