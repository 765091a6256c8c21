"""Output of commands besides their results: progress, messages, and text of any encoding.

Progress and messages go to stderr, so that stdout holds a command's result alone.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable

ERASE_LINE = "\r\x1b[K"


def progress(text: str) -> None:
    """Show `text` in place of the line that progress showed before; "" erases it. Without a terminal: nothing."""
    if sys.stderr.isatty():
        print(f"{ERASE_LINE}{text}", end="", file=sys.stderr, flush=True)


def counting(what: str) -> Callable[[int, int], None]:
    """Return a callback for (done, total) that shows "`what`: done of total", and erases it at the end."""

    def show(done: int, total: int) -> None:
        progress(f"{what}: {done:,} of {total:,}" if done < total else "")

    return show


def say(text: str) -> None:
    """Print a line to stderr at once."""
    print(text, file=sys.stderr, flush=True)


def columns(fallback: int = 100) -> int:
    """Return the terminal's width in characters; `fallback` if there is no terminal."""
    return shutil.get_terminal_size((fallback, 24)).columns


def escape_unencodable() -> None:
    """Let stdout and stderr write escapes for characters that their encoding does not have, and not raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
