"""The same work on each rank of a job, by several processes if the ranks are many, or by an engine.

Interface: `each(function, items)` yields what the function returns for each item, in order. `reduced(function, merge,
items, engine)` merges the results.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from typing import Final, TypeVar, cast

MANY: Final = 8
"""Paths from which several processes work on them."""

ENGINES: Final = ("processes", "dask")

AT_ONCE: Final = 8
"""Results that a task of an engine merges."""

S = TypeVar("S")
T = TypeVar("T")


def reduced(
    function: Callable[[S], T], merge: Callable[[Iterable[T]], T], items: Sequence[S], engine: str = ENGINES[0]
) -> T:
    """Merge what the function returns for each item, in their order. engine: one of ENGINES.

    dask: the cluster that DASK_SCHEDULER_ADDRESS or dask's configuration names, else one of this machine; a task for
    each item, and a tree of tasks that merge. Raises ImportError without dask.distributed.
    """
    if engine == "processes":
        return merge(each(function, items))
    bags, distributed = import_module("dask.bag"), import_module("distributed")
    address = import_module("dask").config.get("scheduler-address", None)
    with contextlib.ExitStack() as stack:
        with _main_hidden():
            cluster = address or stack.enter_context(distributed.LocalCluster(dashboard_address=None))
            client = stack.enter_context(distributed.Client(cluster))
        found = bags.from_sequence(items, partition_size=1).map(function)
        return cast("T", found.reduction(merge, merge, split_every=AT_ONCE).compute(scheduler=client))


def each(function: Callable[[S], T], paths: Sequence[S]) -> Iterator[T]:
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
