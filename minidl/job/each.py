"""The same work on each rank of a job, by several processes if the ranks are many.

Interface: `each(function, paths)` yields what the function returns for each path, in order.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Final, TypeVar

MANY: Final = 8
"""Paths from which several processes work on them."""

T = TypeVar("T")


def each(function: Callable[[Path], T], paths: Sequence[Path]) -> Iterator[T]:
    """Yield `function(path)` for each path. If a process of several dies, this one does what is left.

    function: of a module, not a local one; raises nothing.
    """
    done = 0
    if len(paths) >= MANY:
        # Threads of this process may hold locks, which a forked one would keep for ever.
        context = multiprocessing.get_context("spawn")
        with (
            contextlib.suppress(BrokenProcessPool),
            ProcessPoolExecutor(os.cpu_count(), context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool,
        ):
            with _main_hidden():
                results = pool.map(function, paths, chunksize=4)
            for found in results:
                yield found
                done += 1
    yield from map(function, paths[done:])


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """While this is open, a process that is spawned does not run the program's main module again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
