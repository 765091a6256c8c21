"""What a process holds: children, threads, shared-memory files, descriptors."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FD_ALLOWANCE = 7
"""Descriptors that a process opens once and keeps: two for `multiprocessing`'s resource tracker, two for its fork
server, and what libraries open at their first use. An iterator that is left over holds more: two for each of its
queues, one for each of its workers, one for its progress board."""

SHM = Path("/dev/shm")

SHM_MANAGER = "torch_shm_manager"
"""What torch starts for the file_system strategy, once, and keeps until the interpreter ends."""


@dataclass(frozen=True)
class Holdings:
    """What this process holds at one moment."""

    children: frozenset[int]
    threads: frozenset[threading.Thread]
    segments: frozenset[str]
    descriptors: int

    @classmethod
    def now(cls) -> Holdings:
        children = {pid for pid in _children() if pid not in _servers() and not _command(pid).startswith(SHM_MANAGER)}
        return cls(frozenset(children), _threads(), _segments(), _descriptors())

    def beyond(self, before: Holdings) -> dict[str, object]:
        """What is held in addition to `before`, by kind; empty if nothing."""
        grown = {
            "child processes": {pid: _command(pid) for pid in self.children - before.children},
            "threads": sorted(thread.name for thread in self.threads - before.threads),
            "shared-memory files": sorted(new - _in_others_use(new))
            if (new := self.segments - before.segments)
            else [],
            "open descriptors": max(0, self.descriptors - before.descriptors - FD_ALLOWANCE),
        }
        return {kind: what for kind, what in grown.items() if what}


def _threads() -> frozenset[threading.Thread]:
    """Those that run. Python also lists, once asked, a thread that it did not start, even when it has ended."""
    tasks = set(os.listdir("/proc/self/task"))
    return frozenset(
        thread
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread) or str(thread.native_id) in tasks
    )


def _descriptors() -> int:
    """How many are open, but for the fonts that matplotlib keeps: two for each style of letters it has drawn."""
    return sum(not _link(f"/proc/self/fd/{number}").endswith(".ttf") for number in os.listdir("/proc/self/fd"))


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # the descriptor that has listed them
        return ""


def _children() -> Iterator[int]:
    """Yield the pids of all children, of whichever thread, zombies included."""
    try:  # most tests have none: one call, in place of a file for each thread
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                yield from map(int, file.read().split())
        except FileNotFoundError:  # the thread has ended meanwhile
            continue


def _servers() -> set[int | None]:
    """The helpers that `multiprocessing` starts once and keeps until the interpreter ends."""
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
    return {tracker, getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)}


SEMAPHORES = f"mp{os.getpid()}"
"""How the semaphores of this process and its children are named, so that those of other programs can be told apart."""

multiprocessing.current_process()._config["semprefix"] = f"/{SEMAPHORES}"  # type: ignore[attr-defined]


def _segments() -> frozenset[str]:
    names = os.listdir(SHM) if SHM.is_dir() else []
    return frozenset(name for name in names if not name.startswith("sem.") or SEMAPHORES in name)


def _in_others_use(segments: frozenset[str]) -> set[str]:
    """Of these shared-memory files, those that a process other than this one has mapped: another program's."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = "" if maps.parent.name == str(os.getpid()) else maps.read_text(errors="replace")
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
        found |= {name for name in segments if f"{SHM}/{name}" in text}
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "(ended)"
