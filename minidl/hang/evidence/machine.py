"""The resources that all processes of a machine share: file locks, shared memory, cgroups.

Interface: `read_locks(unseen)`, `read_machine(cgroups)`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from minidl.hang.evidence.model import Cgroup, FileLock, Machine
from minidl.hang.evidence.proc import Unseen, number, numbered
from minidl.usable import UNLIMITED, quota_of


def read_locks(unseen: Unseen) -> tuple[FileLock, ...]:
    """The file locks of this machine, held and waited for."""
    try:
        return locks_of(Path("/proc/locks").read_text())
    except OSError as error:
        unseen.because("file locks and their holders (/proc/locks)", error)
        return ()


def locks_of(text: str) -> tuple[FileLock, ...]:
    """The lines of /proc/locks, as "1: FLOCK  ADVISORY  WRITE 712 08:01:13 0 EOF" or "1: -> FLOCK ..."."""
    out = []
    for line in text.splitlines():
        first, *words = line.split()
        waits = words[:1] == ["->"]
        kind, _, mode, pid, place, *_ = words[1:] if waits else words
        if place.count(":") != 2:  # "<none>:0" of a file that is not known
            continue
        major, minor, inode = place.split(":")
        device = os.makedev(int(major, 16), int(minor, 16))
        out.append(FileLock(int(first.rstrip(":")), kind, mode, int(pid), device, int(inode), waits))
    return tuple(out)


def read_machine(cgroups: Iterable[str], main: int) -> Machine:
    """The resources of the machine. cgroups: lines of /proc/PID/cgroup, of all processes. main: whose /dev/shm it is.

    Of the cgroups it has those that limit something, or that have killed something.
    """
    size = free = -1
    with contextlib.suppress(OSError):
        shm = os.statvfs(f"/proc/{main}/root/dev/shm")  # of a container: another one than ours
        size, free = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    folders = dict.fromkeys(folder for line in sorted(set(cgroups)) for folder in _folders(line))
    limiting = (one for one in map(_cgroup, folders) if one.oom_kills > 0 or max(one.memory_limit, one.cpu_quota) >= 0)
    most = number("/proc/sys/vm/max_map_count")
    return Machine(os.cpu_count() or -1, os.getloadavg()[0], size, free, most, tuple(limiting))


def _folders(line: str) -> list[Path]:
    """The folders of a line of /proc/PID/cgroup, innermost first; of both versions."""
    _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
    names = controllers.split(",") if controllers else []
    if names and not {"memory", "cpu"} & set(names):
        return []
    root = Path("/sys/fs/cgroup") / (("memory" if "memory" in names else "cpu") if names else "")
    group = root / path.strip("/")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(root) and folder.is_dir()]


def _cgroup(path: Path) -> Cgroup:
    second = (path / "cgroup.controllers").exists()
    used, limit = ("memory.current", "memory.max") if second else ("memory.usage_in_bytes", "memory.limit_in_bytes")
    most = number(path / limit)
    kills = numbered(path / ("memory.events" if second else "memory.oom_control")).get("oom_kill", -1)
    most, quota = most if 0 <= most < UNLIMITED else -1, quota_of(path)
    return Cgroup(str(path), number(path / used), most, kills, -1.0 if quota is None else quota)
