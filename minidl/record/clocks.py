"""The offsets between the clocks of several ranks, measured while they run.

Interface: `align_clocks()` is called by the training script, on every rank, once the process group is up and again
before it is destroyed, or by `minidl run --align-clocks` in its place (`aligning`).

Ranks of one machine share CLOCK_MONOTONIC and need no alignment. Between machines, each rank asks rank 0 for its time
over a gloo group of its own: the offset is known to half of the shortest round trip. It never starts a collective
unasked. One that fails costs its timeout and a line on stderr, and the training goes on. `tracefile.join` uses what is
recorded here.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from minidl.record.group import at_process_group
from minidl.record.session import current_recorder

ROUNDS: Final = 30
"""Round trips of one alignment; the shortest counts."""


@dataclass(frozen=True)
class Reading:
    """One alignment, as a rank knows it: at_ns on its own clock, it had to add offset_ns to have rank 0's time.

    error_ns: half of the shortest round trip, by which the offset may be wrong; 0 on rank 0.
    """

    rank: int
    world_size: int
    at_ns: int
    offset_ns: int
    error_ns: int


def align_clocks(timeout: float = 10.0) -> Reading | None:
    """Compare this rank's clock with rank 0's, and write the result into the trace that this process records.

    Every rank must call it, at the same point of the script and inside its trace: after `init_process_group`, and
    again before `destroy_process_group`, so that the clocks' drift is known too. It waits for the others, for at most
    `timeout` seconds a step. None where there is no process group, or where it failed, which is said on stderr; it
    raises nothing. Several calls are fine; a rank that is not traced must call it nevertheless.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        reading = _read(time.monotonic_ns, timeout)
    except Exception as error:  # whatever a backend raises: the training goes on
        print(f"minidl: could not align the clocks of the ranks: {_first_line(error)}", file=sys.stderr)
        return None
    writer = current_recorder()
    if writer is not None:
        facts = {name: getattr(reading, name) for name in ("rank", "world_size", "at_ns", "offset_ns", "error_ns")}
        writer.describe("clock", reference=0, **facts)
    return reading


@contextlib.contextmanager
def aligning() -> Iterator[None]:
    """While this is open, `align_clocks` is called whenever the script makes its process group, or destroys it.

    For scripts that are not to be touched; as `align_clocks`, it must be done on all ranks or on none.
    """
    with at_process_group(align_clocks, align_clocks):
        yield


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _read(clock: Callable[[], int], timeout: float) -> Reading:
    """One reading, over a group of its own: the training's group is not touched, whatever happens here."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return Reading(rank, size, clock(), 0, 0)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    try:
        if rank:
            at, offset, error = _ask(clock, group)
            return Reading(rank, size, at, offset, error)
        for other in range(1, size):
            _answer(clock, group, other)
        return Reading(rank, size, clock(), 0, 0)
    finally:
        dist.destroy_process_group(group)


def _ask(clock: Callable[[], int], group: Any) -> tuple[int, int, int]:
    """When, the offset to rank 0's clock, and by how much it may be wrong: by the shortest of `ROUNDS` round trips."""
    best = (0, 0, sys.maxsize)
    answer = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        before = clock()
        dist.send(answer, 0, group=group)
        dist.recv(answer, 0, group=group)
        after = clock()
        half = (after - before + 1) // 2
        if half < best[2]:
            best = before + half, int(answer) - before - half, half
    return best


def _answer(clock: Callable[[], int], group: Any, other: int) -> None:
    time_now = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        dist.recv(time_now, other, group=group)
        time_now[0] = clock()
        dist.send(time_now, other, group=group)
