"""Which rank of a distributed run this process is, where it records, and hooks at its process group's begin and end."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minidl.process_stat import launched

HOMES: tuple[Any, ...] = (dist, getattr(dist, "distributed_c10d", dist))
"""The modules that a program finds torch's functions of process groups in."""


def rank_name() -> str:
    """The name of a rank's trace: "rank-3", "rank-3.2" if all ranks were started again; "" if it is no rank of several.

    See `process_stat.LAUNCHERS`; RANK alone is enough, if WORLD_SIZE is not set.
    """
    place = launched({"WORLD_SIZE": str(sys.maxsize), **os.environ})
    return f"rank-{place.rank}" + f".{place.restart + 1}" * bool(place.restart) if place.rank >= 0 else ""


def job_directory() -> Path | None:
    """Where this process records as a rank if no place is given, None = its launcher does not name the job."""
    place = launched(os.environ)
    return Path("minidl-traces", f"job-{place.job}", rank_name()) if place.job else None


def rank_directory(base: str | os.PathLike[str]) -> Path:
    """Where this process records if `base` is given: there, or, as a rank, in a directory of its own in it."""
    return Path(base, rank_name())


def place_in_group() -> dict[str, int]:
    """This process's rank and the number of ranks: by its process group, else by its launcher; {} if alone.

    restart: how often the launcher has started the ranks before, if it has.
    """
    place = launched(os.environ)
    again = {"restart": place.restart} if place.restart else {}
    if dist.is_available() and dist.is_initialized():
        return {"rank": dist.get_rank(), "world_size": dist.get_world_size(), **again}
    return {"rank": place.rank, "world_size": place.ranks, **again} if place.rank >= 0 else {}


@contextlib.contextmanager
def at_process_group(begun: Callable[[], Any], ending: Callable[[], Any] | None = None) -> Iterator[None]:
    """While this is open, call `begun` whenever the script has made its process group, `ending` before it goes."""
    if not dist.is_available():
        yield
        return
    make, destroy = dist.init_process_group, dist.destroy_process_group

    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        begun()

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if ending is not None and (group is None or group is dist.group.WORLD):
            ending()
        destroy(group)

    before = [(home, home.init_process_group, home.destroy_process_group) for home in HOMES]
    try:
        for home in HOMES:
            home.init_process_group, home.destroy_process_group = init_process_group, destroy_process_group
        yield
    finally:
        for home, *both in before:
            home.init_process_group, home.destroy_process_group = both
