"""Memory of a loader and its workers: each process's own memory, and each piece of shared memory once.

Interface: `held(pids)`. PSS, which the kernel computes, leaves out what no process has mapped and touched: a segment
that is on its way is only a descriptor. So shared memory is counted by its files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_SHARED = ("/dev/shm/", "/memfd:")


def held(pids: Iterable[int]) -> int:
    """Bytes of anonymous memory and of shared memory.

    A page that several processes have is shared out among all of them, also those that `pids` does not name.
    """
    anonymous, sizes, blocks = 0, dict[str, int](), dict[str, int]()
    for pid in pids:
        place = Path(f"/proc/{pid}")
        rollup = (place / "smaps_rollup").read_text()
        anonymous += int(rollup.split("Pss_Anon:")[1].split()[0]) << 10
        for line in (place / "maps").read_text().splitlines():
            addresses, _, _, device, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(_SHARED):
                begin, end = (int(address, 16) for address in addresses.split("-"))
                sizes[f"{device} {inode}"] = end - begin
        for descriptor in (place / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(descriptor).startswith(_SHARED):
                    stat = descriptor.stat()
                    device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
                    blocks[f"{device} {stat.st_ino}"] = stat.st_blocks * 512
    return anonymous + sum((sizes | blocks).values())  # of a file that no process has open: what is mapped
