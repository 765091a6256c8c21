"""Which rank of a distributed run this process is, where it records, and hooks at its process group's begin and end."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

HOMES: tuple[Any, ...] = (dist, getattr(dist, "distributed_c10d", dist))
"""The modules that a program finds torch's functions of process groups in."""


def rank_name() -> str:
    """The name of a rank's trace: "rank-3"; "" if no launcher has started several ranks (RANK, WORLD_SIZE)."""
    rank = os.environ.get("RANK", "")
    return f"rank-{rank}" if rank.isdecimal() and os.environ.get("WORLD_SIZE") != "1" else ""


def rank_directory(base: str | os.PathLike[str]) -> Path:
    """Where this process records if `base` is given: there, or, as a rank, in a directory of its own in it."""
    return Path(base, rank_name())


def place_in_group() -> dict[str, int]:
    """This process's rank and the number of ranks: by its process group, else by RANK and WORLD_SIZE; {} if alone.

    restart: how often torchrun has started the ranks anew before, if it has.
    """
    rank, size, restart = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    again = {"restart": int(restart)} if restart.isdecimal() and int(restart) else {}
    if dist.is_available() and dist.is_initialized():
        return {"rank": dist.get_rank(), "world_size": dist.get_world_size(), **again}
    if rank.isdecimal() and size.isdecimal() and int(rank) < int(size) > 1:
        return {"rank": int(rank), "world_size": int(size), **again}
    return {}


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
