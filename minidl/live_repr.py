"""One-line reprs of live objects: what a debugger should show when a loader hangs.

Rules of use: derive from `LiveRepr` and yield phrases from `_phrases`. A phrase takes no lock and waits for nothing. An
exception ends the phrases with its name: the object may be half made, or closed, or Python may be exiting.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from typing import Any


class LiveRepr:
    """Makes the repr from `_phrases`. It never raises an Exception."""

    __slots__ = ()

    def _phrases(self) -> Iterator[str]:
        """What the object is, has and waits for, one phrase at a time, the most important one first."""
        raise NotImplementedError

    def __repr__(self) -> str:
        phrases = []
        try:
            for phrase in self._phrases():
                phrases.append(phrase)  # list(...) would lose them all if the last one failed
        except Exception as error:
            phrases.append(f"... {type(error).__name__}")
        return f"<{type(self).__name__}: {'; '.join(phrases)}>"


def numbers(what: str, values: Iterable[int]) -> str:
    """ "task 5" or "tasks 5 7"; "no tasks" if there are none."""
    words = [str(value) for value in values]
    return f"{what}{'s' * (len(words) != 1)} {' '.join(words)}" if words else f"no {what}s"


def counted(number: int, one: str, many: str = "") -> str:
    """ "1 message", "3 messages"; many: the plural, if it is not `one` and an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def short(obj: Any) -> str:
    """The repr of an object that may be the user's: of at most 30 characters or so, and without its errors."""
    return repr(obj) if isinstance(obj, LiveRepr) else reprlib.repr(obj)
