"""Processes to measure in: forked, so that all of them begin alike, down to the addresses of their memory.

Interface: `Child(work, *args)` runs the generator `work(*args)` in a process of its own, one item for each `ask()`;
`in_child` is for a single answer. `metered` takes time and memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch
from typing_extensions import Self

PATIENCE = 30.0
"""Seconds that a child may take to end."""


class Child:
    """A process that works when it is asked to. Leave it through `with`.

    RuntimeError with the process's own traceback where the work fails there.
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
        """The next item."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    try:
        with contextlib.closing(work(*args)) as items:  # type: ignore[type-var]  # a generator has a close
            while _asked(end):
                end.send(next(items))
    except KeyboardInterrupt:
        pass  # the parent gets it too, and says so
    except Exception:
        with contextlib.suppress(OSError):  # the parent is gone: nobody is left to tell
            end.send(_Failure(traceback.format_exc()))


def _asked(end: Connection) -> bool:
    try:
        end.recv()
    except (EOFError, OSError):
        return False
    return True


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, computed in a process of its own, which is gone afterwards."""
    with Child(_once, function, args) as child:
        return child.ask()


def _once(function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[Any]:
    yield function(*args)


@dataclass
class Meter:
    """What a block took: seconds, and MiB by which the process grew at its peak."""

    seconds: float = 0.0
    mib: float = 0.0


@contextlib.contextmanager
def metered() -> Iterator[Meter]:
    """Measure the block; the Meter is filled in at its end."""
    _forget()
    meter, before, start = Meter(), _peak_mib(), time.perf_counter()
    yield meter
    meter.seconds = time.perf_counter() - start
    meter.mib = _peak_mib() - before


def _forget() -> None:
    """Give freed memory back and begin a new peak: what is used again, or was used before, would not show as growth."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # a kernel without it
        Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
