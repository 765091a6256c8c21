"""Names of shared memory that processes leave under /dev/shm when they are killed. Needs no torch: see `watch`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection

from minidl.process_stat import is_alive

_SEGMENT = re.compile(r"torch_(\d+)_")


def remove_segments_of(pids: Collection[int]) -> None:
    """Remove the segments that have the name of a process of `pids` that has ended.

    torch's strategy `file_descriptor` takes a segment's name away as soon as it is mapped. A process that is killed in
    that moment leaves it. Where a process with its id is alive, that may be of another program.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/shm"):
            maker = _SEGMENT.match(name)
            if maker is not None and (pid := int(maker[1])) in pids and not is_alive(pid):
                with contextlib.suppress(OSError):
                    os.unlink(f"/dev/shm/{name}")
