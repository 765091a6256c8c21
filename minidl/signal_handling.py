"""How the loader's process hears at once that a worker was killed (upstream: `_utils.signal_handling`).

When a worker dies, the kernel sends its parent SIGCHLD. The handler installed here asks torch's own registry of worker
pids (in C++, shared with torch's loader) whether one of them failed, and if so raises a RuntimeError, wherever the main
thread is, even inside a blocking read. In a worker, torch's C handlers for SIGBUS, SIGSEGV, SIGFPE and SIGTERM print
what happened before the signal takes effect, since Python's own handlers would run too late. Article 4 §shutdown.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from torch._C import _error_if_any_worker_fails, _remove_worker_pids, _set_worker_pids, _set_worker_signal_handlers

__all__ = ["_remove_worker_pids", "_set_SIGCHLD_handler", "_set_worker_pids", "_set_worker_signal_handlers"]

_SIGCHLD_handler_set = False


def _set_SIGCHLD_handler() -> None:  # noqa: N802  # upstream's name
    """Install the handler, once a process, and only from the main thread, where alone Python allows it."""
    global _SIGCHLD_handler_set
    if _SIGCHLD_handler_set or threading.current_thread() is not threading.main_thread():
        return
    previous = signal.getsignal(signal.SIGCHLD)

    def handler(signum: int, frame: FrameType | None) -> None:
        # Uses waitid(WNOWAIT): the exit status stays there for Process.exitcode.
        _error_if_any_worker_fails()
        if callable(previous):
            previous(signum, frame)

    signal.signal(signal.SIGCHLD, handler)
    _SIGCHLD_handler_set = True
