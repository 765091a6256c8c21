"""Tests that start processes are marked `live`; here a test that is not marked is stopped from starting one."""

from __future__ import annotations

import contextlib
import functools
import os
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

STARTERS = (
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.posix_spawnp",
    "os.system",
    "_posixsubprocess.fork_exec",
    "subprocess._fork_exec",
    "multiprocessing.popen_forkserver.Popen._launch",
)
"""The functions through which `os`, `subprocess` and `multiprocessing` start a process; a Python may lack some."""

TRACKER = b"from multiprocessing.resource_tracker import main"
"""How multiprocessing starts its resource tracker, once, for the first semaphore that has a name: it is allowed."""
FONTS = b"fc-list"
"""How matplotlib finds the fonts, once on a machine, for its cache: it is allowed."""


class ProcessStartedError(BaseException):
    """A test without the mark `live` starts a process. No `except Exception` of the code under test catches it."""


@contextlib.contextmanager
def no_process(test: str) -> Iterator[list[str]]:
    """Make each of STARTERS raise in this process; yields the list of those that were called."""
    called: list[str] = []

    def guard(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*arguments: Any, **options: Any) -> Any:
            words = tuple(_words(arguments))
            if os.getpid() != own or TRACKER in b" ".join(words) or words[:1] == (FONTS,):
                return start(*arguments, **options)
            called.append(name)
            raise ProcessStartedError(f"{test} starts a process ({name}): mark it with pytest.mark.live")

        return refuse

    own = os.getpid()
    before = [(module, function, getattr(module, function)) for module, function in _starters()]
    for module, function, start in before:
        setattr(module, function, guard(f"{module.__name__}.{function}", start))
    try:
        yield called
    finally:
        for module, function, start in before:
            setattr(module, function, start)


@functools.cache
def _starters() -> list[tuple[Any, str]]:
    """STARTERS that this Python has: their modules, or classes, and names."""
    parts = [name.rpartition(".") for name in STARTERS]
    found = [(pkgutil.resolve_name(home), function) for home, _, function in parts]
    return [(home, function) for home, function in found if hasattr(home, function)]


def _words(arguments: tuple[Any, ...]) -> Iterator[bytes]:
    """The command that a fork_exec is given."""
    for word in arguments[0] if arguments and isinstance(arguments[0], (list, tuple)) else ():
        yield os.fsencode(word)
