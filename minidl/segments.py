"""Names of shared memory that processes leave under /dev/shm when they are killed. Needs no torch: see `watch`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection


def remove_segments_of(pids: Collection[int]) -> None:
    """Remove the segments that have the name of a process of `pids`, which have ended.

    torch's strategy `file_descriptor` takes a segment's name away as soon as it is mapped. A process that is killed in
    that moment leaves it.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/shm"):
            if name.startswith("torch_") and name.split("_")[1] in map(str, pids):
                with contextlib.suppress(OSError):
                    os.unlink(f"/dev/shm/{name}")
