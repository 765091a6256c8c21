"""What all processes of a machine share: file locks, shared memory, memory, cgroups.

Interface: `read_locks(unseen)`, `read_machine(cgroups)`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from minidl.hang.evidence.model import Cgroup, FileLock, Machine

_UNLIMITED: Final = 1 << 60


def read_locks(unseen: Callable[[str, OSError], None]) -> tuple[FileLock, ...]:
    """The file locks of this machine, held and waited for."""
    try:
        return locks_of(Path("/proc/locks").read_text())
    except OSError as error:
        unseen("file locks and their holders (/proc/locks)", error)
        return ()


def locks_of(text: str) -> tuple[FileLock, ...]:
    """The lines of /proc/locks, as "1: FLOCK  ADVISORY  WRITE 712 08:01:13 0 EOF" or "1: -> FLOCK ..."."""
    out = []
    for line in text.splitlines():
        number, *words = line.split()
        waits = words[:1] == ["->"]
        kind, _, mode, pid, place, *_ = words[1:] if waits else words
        if place.count(":") != 2:  # "<none>:0" of a file that is not known
            continue
        major, minor, inode = place.split(":")
        device = os.makedev(int(major, 16), int(minor, 16))
        out.append(FileLock(int(number.rstrip(":")), kind, mode, int(pid), device, int(inode), waits))
    return tuple(out)


def read_machine(cgroups: Iterable[str], throttled: dict[str, float] | None = None) -> Machine:
    """What the machine has and gives. cgroups: lines of /proc/PID/cgroup, of all processes. throttled: of before."""
    memory = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            memory[name] = int(value.split()[0]) * 1024
    size = free = -1
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
        size, free = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    return Machine(
        cpus=os.cpu_count() or -1,
        load=os.getloadavg()[0],
        memory=memory.get("MemTotal", -1),
        memory_available=memory.get("MemAvailable", -1),
        shm_size=size,
        shm_free=free,
        max_map_count=_number(Path("/proc/sys/vm/max_map_count")),
        pid_max=_number(Path("/proc/sys/kernel/pid_max")),
        cgroups=tuple(_limiting(sorted(set(cgroups)), throttled or {})),
        pipe_buffer=65536,
    )


def throttled_now(cgroups: Iterable[str]) -> dict[str, float]:
    """cgroup -> seconds that it was kept from its CPUs."""
    return {str(path): _throttled(path) for line in set(cgroups) for path in _folders(line)}


def _limiting(lines: Iterable[str], before: dict[str, float]) -> Iterator[Cgroup]:
    """The cgroups that limit something, or have killed something."""
    done = set()
    for line in lines:
        for path in _folders(line):
            group = _cgroup(path, before)
            limits = group.memory_limit >= 0 or group.cpu_quota >= 0 or group.oom_kills > 0
            if path not in done and limits:
                yield group
            done.add(path)


def _folders(line: str) -> list[Path]:
    """The folders of a line of /proc/PID/cgroup, innermost first; of both versions."""
    _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
    names = controllers.split(",") if controllers else []
    if names and not {"memory", "cpu"} & set(names):
        return []
    root = Path("/sys/fs/cgroup") / (("memory" if "memory" in names else "cpu") if names else "")
    group = root / path.strip("/")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(root) and folder.is_dir()]


def _cgroup(path: Path, before: dict[str, float]) -> Cgroup:
    second = (path / "cgroup.controllers").exists()
    used, limit = ("memory.current", "memory.max") if second else ("memory.usage_in_bytes", "memory.limit_in_bytes")
    most = _number(path / limit)
    kills = _numbered(path / ("memory.events" if second else "memory.oom_control")).get("oom_kill", -1)
    throttled = _throttled(path)
    limited = most if 0 <= most < _UNLIMITED else -1
    return Cgroup(
        str(path), _number(path / used), limited, kills, _quota(path), (before.get(str(path), throttled), throttled)
    )


def _quota(path: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        if (path / "cpu.max").exists():
            quota, period = (path / "cpu.max").read_text().split()
        else:
            quota, period = ((path / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if float(quota) > 0:
            return float(quota) / float(period)
    return -1.0


def _throttled(path: Path) -> float:
    known = _numbered(path / "cpu.stat")
    if "throttled_usec" in known:
        return known["throttled_usec"] / 1e6
    return known["throttled_time"] / 1e9 if "throttled_time" in known else -1.0


def _numbered(path: Path) -> dict[str, int]:
    """The lines "NAME NUMBER" of a file."""
    with contextlib.suppress(OSError, ValueError):
        words = path.read_text().split()
        return {name: int(value) for name, value in zip(words[::2], words[1::2], strict=False)}
    return {}


def _number(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return -1
