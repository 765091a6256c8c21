"""An exception on its way from a worker or the pin-memory thread to the consumer.

`ExceptionWrapper` carries the type, the formatted traceback and where it happened; `reraise` raises it again in the
reading process. What upstream raises, this raises, with the same first line; behind the traceback it adds the task, the
sample's index and its place in the batch. An exception whose constructor wants more than a message is rebuilt from its
pickle where that works, so that `except MyError` still catches it; where nothing works it becomes a RuntimeError that
holds the whole text.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import NoReturn

_LARGEST_PICKLE = 1 << 20  # bytes; an exception that drags a dataset along is sent as text only


class _Message(str):
    """KeyError shows the repr of its argument, which would turn a traceback into one line; this repr is the text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class RemoteTracebackError(Exception):
    """The text of a traceback from another process or thread; the cause of an exception that was rebuilt as it was."""


class ExceptionWrapper:
    """An exception with its traceback as text (upstream: `torch._utils.ExceptionWrapper`; article 1 §2.4.5).

    where: "in DataLoader worker process 2", said in the first line. place: one line more about the task, or "".
    """

    def __init__(self, error: BaseException, where: str, place: str = "") -> None:
        self.exc_type: type[BaseException] = type(error)
        self.exc_name = type(error).__name__
        self.exc_msg = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.last_line = "".join(traceback.format_exception_only(type(error), error)).strip()
        self.where = where
        self.place = place
        self._pickled = _pickled(error)

    @property
    def text(self) -> str:
        """First line, traceback, and the place of the task."""
        lines = [f"Caught {self.exc_name} {self.where}.\nOriginal {self.exc_msg}"]
        return "\n".join(lines + [self.place]) if self.place else lines[0]

    def portable(self) -> ExceptionWrapper:
        """The same error without the parts that may not pickle: its type becomes RuntimeError, its text stays."""
        other = object.__new__(ExceptionWrapper)
        other.__dict__.update(self.__dict__)
        other.exc_type, other._pickled = RuntimeError, b""
        return other

    def reraise(self) -> NoReturn:
        """Raise the exception here.

        In this order: the type called with the text (what upstream does; `message=` for types that have a `message`),
        the original from its pickle with the text as its cause, RuntimeError with the text.
        """
        rebuilt = self._from_text()
        original = self._from_pickle() if rebuilt is None else None
        try:
            if rebuilt is not None:
                raise rebuilt
            if original is not None:
                raise original from RemoteTracebackError(self.text)
            raise RuntimeError(self.text)
        finally:
            # The traceback holds this frame: with these names set, an error would hold itself, and its iterator's
            # workers would live until the garbage collector comes by.
            del rebuilt, original

    def _from_text(self) -> BaseException | None:
        text = _Message(self.text) if issubclass(self.exc_type, KeyError) else self.text
        try:
            if getattr(self.exc_type, "message", None):
                return self._make(message=text)
            return self._make(text)
        except Exception:
            return None

    @property
    def _make(self) -> Callable[..., BaseException]:
        return self.exc_type

    def _from_pickle(self) -> BaseException | None:
        try:
            error = pickle.loads(self._pickled)
        except Exception:
            return None
        return error if isinstance(error, BaseException) else None

    def __repr__(self) -> str:
        return f"<{self.exc_name} {self.where}>"


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
    except Exception:
        return b""
    return data if len(data) <= _LARGEST_PICKLE else b""
