"""Recording never ends a program: an error of the recording is reported once, and the program goes on without it.

Interface: `@harmless(instead)` around a function that only looks; `with substituted(...)` for what is put in the place
of torch's own; `WithContext`, a loader with another context; `@without_a_place`, of a function that is called in the
program's place; `say_once(text)`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def harmless(instead: Any) -> Callable[[_F], _F]:
    """Let a function return `instead` of raising: it reads the program's objects, which may raise anything.

    An exception of a signal handler that runs meanwhile passes through: it belongs to the program.
    """

    def decorate(look: _F) -> _F:
        @functools.wraps(look)
        def looking(*args: Any, **kwargs: Any) -> Any:
            try:
                return look(*args, **kwargs)
            except Exception as error:
                if is_of_a_handler(error):
                    raise
                say_once(f"not recorded: {look.__qualname__}: {type(error).__name__}: {error}. The run goes on")
                return instead

        return looking  # type: ignore[return-value]

    return decorate


def is_of_a_handler(error: BaseException) -> bool:
    """Whether a Python signal handler has raised it."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    calls = {getattr(each, "__func__", each) for each in handlers if callable(each)}
    codes = {getattr(each, "__code__", getattr(type(each).__call__, "__code__", None)) for each in calls}
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(code in codes for code in frames)


@contextlib.contextmanager
def substituted(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """While this is open, attributes (owner, name, value) have other values; then, inherited ones are so again."""
    with contextlib.ExitStack() as undo:
        for owner, name, value in changes:
            own = vars(owner)
            back = functools.partial(setattr, owner, name, own[name]) if name in own else None
            setattr(owner, name, value)
            undo.callback(back or functools.partial(delattr, owner, name))
        yield


class WithContext:
    """A loader as its iterator sees it: with another multiprocessing context."""

    def __init__(self, loader: Any, context: Any) -> None:
        self.__dict__.update(_loader=loader, multiprocessing_context=context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def without_a_place(function: _F) -> _F:
    """The function, of which no warning says that it is the place: `warnings` passes over what imports modules.

    A warning of torch's that has a stacklevel then points to the line that it points to without the recording.
    """
    code: types.CodeType = function.__code__
    function.__code__ = code.replace(co_filename=f"{code.co_filename}{NO_PLACE}")
    return function


NO_PLACE: Final = " (which warnings take for importlib._bootstrap)"
"""The end of the file's name of a function that is called in the program's place."""


def say_once(text: str) -> None:
    """Write a line to stderr, once in a process. A stderr that is closed hides it."""
    if (os.getpid(), text) not in _said:
        _said.add((os.getpid(), text))
        try:
            os.write(2, f"minidl: {text}.\n".encode("utf-8", "backslashreplace"))
        except OSError:
            pass


_said: Final[set[tuple[int, str]]] = set()
