"""Forked processes to measure in: all begin alike, down to the addresses of their memory.

Interface: `Child(work, *args)` runs the generator `work(*args)` in a process of its own, one item for each `ask()`;
`children` is for several, `in_child` for a single answer. `metered` measures time and memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
from typing_extensions import Self

from minidl.process_stat import status_of

PATIENCE = 30.0
"""Seconds that a child may take to end."""


class Child:
    """A process that computes an item when asked for it. A context manager.

    Asking raises RuntimeError, with the process's own traceback, if the work fails there.
    """

    _ends: ClassVar[set[Connection]] = set()

    def __init__(self, work: Callable[..., Iterator[Any]], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._end, end = context.Pipe()
        self._ends.add(self._end)
        self._process = context.Process(target=_serve, args=(end, work, args))
        self._process.start()
        end.close()

    def ask(self) -> Any:
        """Return the next item."""
        try:
            self._end.send(None)
            answer = self._end.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(PATIENCE)
            raise RuntimeError(f"bench: a measuring process ended with exit code {self._process.exitcode}") from error
        if isinstance(answer, _Failure):
            raise RuntimeError(f"bench: a measurement failed:\n{answer.text}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.discard(self._end)
        self._end.close()
        self._process.join(PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@dataclass(frozen=True)
class _Failure:
    text: str


def _serve(end: Connection, work: Callable[..., Iterator[Any]], args: tuple[Any, ...]) -> None:
    for other in Child._ends:
        other.close()  # inherited: while one of them is open, no child sees that the parent is gone
    torch.set_num_threads(1)  # torch's threads do not survive a fork
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more workers than cores are meant
    try:
        with contextlib.closing(work(*args)) as items:  # type: ignore[type-var]  # a generator has a close
            while _asked(end):
                end.send(next(items))
    except KeyboardInterrupt:
        pass  # the parent gets it too, and reports it
    except Exception:
        with contextlib.suppress(OSError):  # the parent is gone
            end.send(_Failure(traceback.format_exc()))


def _asked(end: Connection) -> bool:
    try:
        end.recv()
    except (EOFError, OSError):
        return False
    return True


@contextlib.contextmanager
def children(work: Callable[..., Iterator[Any]], names: Iterable[str], *args: Any) -> Iterator[dict[str, Any]]:
    """Run `work(name, *args)` in a process of its own for each name; yields the functions that ask for an item."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Child(work, name, *args)).ask for name in names}


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, computed in a process of its own."""

    def once() -> Iterator[Any]:
        yield function(*args)

    with Child(once) as child:
        return child.ask()


@dataclass
class Meter:
    """Seconds that a block took, and MiB by which the process grew at its peak."""

    seconds: float = 0.0
    mib: float = 0.0


@contextlib.contextmanager
def metered() -> Iterator[Meter]:
    """Measure the block; the Meter is filled in at its end."""
    _reset_peak()
    meter, before, start = Meter(), _peak_mib(), time.perf_counter()
    yield meter
    meter.seconds = time.perf_counter() - start
    meter.mib = _peak_mib() - before


def _reset_peak() -> None:
    """Give freed memory back and begin a new peak: memory that is used again would not show as growth."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # a kernel without it
        Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
    return int(status_of(Path("/proc/self/status").read_text())["VmHWM"].split()[0]) / 1024
