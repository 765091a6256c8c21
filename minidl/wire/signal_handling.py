"""How the loader's process hears at once that a worker was killed (upstream: `_utils.signal_handling`).

When a worker dies, the kernel sends its parent SIGCHLD. The handler installed here asks torch's own registry of worker
pids (in C++, shared with torch's loader) whether one of them failed, and if so raises a RuntimeError in the user's code
or in a wait of the loader. In the middle of a step of the loader, an error would lose a message that is read and not
yet stored, or a task that is assigned and not yet sent. There the handler puts the error off to the next wait.

While a worker is started (`put_off_all`), every handler is put off: CPython prints what is raised while a process is
forked, and drops it; and a worker that runs must be listed.

In a worker, torch's C handlers for SIGBUS, SIGSEGV and SIGFPE print what happened before the signal takes effect, since
Python's own handlers would run too late. That for SIGTERM prints nothing: sent by the parent, it ends the worker with
exit code 0, so that SIGCHLD reports no failure; sent by any other process, it kills as usual. Article 4 §shutdown.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar

from torch._C import _error_if_any_worker_fails

_SIGCHLD_handler_set = False

STEPS: set[str] = set()
"""Names of the modules whose functions are the loader's steps, with all that they call: each adds its own."""

_waits: set[CodeType] = set()
"""Functions in which a step is only waiting: an error that is raised there changes nothing."""

put_off = False
"""A child has ended in the middle of a step: the next wait calls `raise_now`."""

F = TypeVar("F", bound=Callable[..., Any])


def wait(function: F) -> F:
    """Mark a function that waits, and calls `raise_now` before it if an error is `put_off`."""
    _waits.add(function.__code__)
    return function


@wait
def raise_now() -> None:
    """Raise the error that was put off, if a worker has failed indeed. Only the main thread hears of it."""
    global put_off
    if put_off and threading.current_thread() is threading.main_thread():
        put_off = False
        _error_if_any_worker_fails()


def _in_a_step(frame: FrameType | None) -> bool:
    """Whether the code that a signal has interrupted is a step of the loader, and not its wait."""
    if frame is not None and frame.f_code in _waits:
        return False
    while frame is not None:
        if frame.f_globals.get("__name__") in STEPS:
            return True
        frame = frame.f_back
    return False


_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
"""The program's handlers, by their signals, as long as they are put off."""

_came: list[tuple[int, int]] = []
"""Signals that came meanwhile: the process, a forked child or this one, and the signal."""


@contextmanager
def put_off_all() -> Iterator[None]:
    """In this block, handlers in Python are put off; they run at its end. Only the main thread runs any.

    A mask would not do, since the kernel gives the signal to another thread then, and Python's handler runs all the
    same; and programs that are executed would inherit it. A forked worker calls `run_again`.
    """
    if threading.current_thread() is not threading.main_thread() or _handlers:
        yield
        return
    _came.clear()
    try:
        for signum in signal.valid_signals():
            if callable(handler := signal.getsignal(signum)):
                _handlers[signum] = handler
                signal.signal(signum, _note)
        yield
    finally:
        run_again()


def _note(signum: int, frame: FrameType | None) -> None:
    if (os.getpid(), signum) not in _came:  # as the kernel does
        _came.append((os.getpid(), signum))


def run_again() -> None:
    """Install the handlers again, and run those whose signals came."""
    _install_again()
    _run_those_that_came()


def _install_again() -> None:
    try:
        for signum, handler in tuple(_handlers.items()):
            signal.signal(signum, handler)
            del _handlers[signum]
    except BaseException:  # by one that is installed again
        _install_again()
        raise


def _run_those_that_came() -> None:
    if _came:
        pid, signum = _came.pop(0)
        try:
            if pid == os.getpid():
                signal.raise_signal(signum)
        finally:
            _run_those_that_came()


def _is_torchs(handler: Any) -> bool:
    """Whether it is the handler of torch's loader, which raises at once, also in the middle of a step."""
    return getattr(handler, "__module__", None) == "torch.utils.data._utils.signal_handling"


def _set_SIGCHLD_handler() -> None:  # noqa: N802  # upstream's name
    """Install the handler, only from the main thread, where alone Python allows it.

    Once a process, and again if torch's loader has installed its own since, which would raise for our workers too.
    """
    global _SIGCHLD_handler_set
    if threading.current_thread() is not threading.main_thread():
        return
    previous = signal.getsignal(signal.SIGCHLD)
    raises_at_once = _is_torchs(previous)
    if _SIGCHLD_handler_set and not raises_at_once:
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        # Uses waitid(WNOWAIT): the exit status stays there for Process.exitcode.
        global put_off
        if _in_a_step(frame):
            put_off = True
            if raises_at_once:
                return
        else:
            _error_if_any_worker_fails()
        if callable(previous):
            previous(signum, frame)

    signal.signal(signal.SIGCHLD, handler)
    _SIGCHLD_handler_set = True
