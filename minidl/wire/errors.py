"""An exception on its way from a worker or the pin-memory thread to the consumer.

`ExceptionWrapper` carries the type, the formatted traceback and the place; `reraise` raises the exception again in the
reading process. It raises the same type as torch, with the same first line. After the traceback it adds the task, the
sample's index and its place in the batch. An exception whose constructor needs more than a message is rebuilt from its
pickle, so that `except MyError` still catches it. If that fails too, it becomes a RuntimeError with the whole text.
"""

from __future__ import annotations

import errno
import os
import pickle
import traceback
from collections.abc import Callable
from typing import NoReturn

_LARGEST_PICKLE = 1 << 20  # bytes; an exception that refers to a dataset is sent as text only


def more(about: str) -> str:
    """Say which page explains `about`, see `guides.more`; an epoch without an error loads no guides."""
    from minidl import guides

    return guides.more(about)


class LoaderHangError(RuntimeError):
    """No batch came for too long. The watchdog of a trace has it raised in the main thread (`--on-hang=raise`)."""

    def __str__(self) -> str:
        return f"{super().__str__()} ({more('hung')})"


class StateMismatchError(ValueError, AssertionError):
    """A state is to be resumed with a loader that it does not fit. torchdata raises an AssertionError for this."""

    def __str__(self) -> str:
        return f"{super().__str__()} ({more('state')})"


_SPARE_DESCRIPTORS = 10


def with_remedy(error: Exception) -> Exception:
    """The error; or, if ten more files can't be opened, one that names the remedies, with `error` as its cause.

    It is asked for where an error may have this cause: at the limit the kernel drops a passed descriptor without an
    error, and Python finds no folder for a socket.
    """
    opened: list[int] = []
    try:
        for _ in range(_SPARE_DESCRIPTORS):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as refused:
        if refused.errno in (errno.EMFILE, errno.ENFILE):
            lack = RuntimeError(
                "Too many open files. Communication with the workers is no longer possible. Please increase the limit "
                "using `ulimit -n` in the shell or change the sharing strategy by calling "
                "`torch.multiprocessing.set_sharing_strategy('file_system')` at the beginning of your code"
            )
            lack.__cause__ = error
            return lack
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return error


class _Message(str):
    """A text whose repr is itself: KeyError shows its argument's repr, which would put a traceback into one line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class RemoteTracebackError(Exception):
    """A traceback from another process or thread, as text: the cause of an exception rebuilt from its pickle."""


class ExceptionWrapper:
    """An exception with its traceback as text (upstream: `torch._utils.ExceptionWrapper`; article 1 §2.4.5).

    where: for the first line, e.g. "in DataLoader worker process 2". place: one more line about the task, or "".
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
        """The first line, the traceback, and the place of the task."""
        lines = [f"Caught {self.exc_name} {self.where}.\nOriginal {self.exc_msg}"]
        return "\n".join(lines + [self.place]) if self.place else lines[0]

    def portable(self) -> ExceptionWrapper:
        """Return the error without the parts that may not pickle: a RuntimeError with the same text."""
        other = object.__new__(ExceptionWrapper)
        other.__dict__.update(self.__dict__)
        other.exc_type, other._pickled = RuntimeError, b""
        return other

    def reraise(self) -> NoReturn:
        """Raise the exception here.

        It tries in this order: the type called with the text (as torch does; `message=` for types that have a
        `message`), the original from its pickle with the text as its cause, a RuntimeError with the text.
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
            # The traceback holds this frame: with these names set, an error would refer to itself, and its
            # iterator's workers would live until the garbage collector runs.
            del rebuilt, original

    def _from_text(self) -> BaseException | None:
        text = _Message(self.text) if issubclass(self.exc_type, KeyError) else self.text
        make: Callable[..., BaseException] = self.exc_type
        try:
            return make(message=text) if getattr(make, "message", None) else make(text)
        except Exception:
            return None

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
