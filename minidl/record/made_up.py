"""A trace of a run that never happened, in the files of a recorder: what a model or a simulation tells.

Interface: `MadeUpRun()` keeps events (`add`); `write(directory, lines, facts)` writes the files of the loader's process
and of each worker. The caller's facts go into the manifest and must say that the run is made up.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from minidl.record.recorder import create
from minidl.tracefile.events import EVENTS
from minidl.tracefile.format import EVENTS_SUFFIX, PACK, SIDE_SUFFIX, Header, side_line, stem_of

START: Final = 1_000_000_000
"""Monotonic ns of a run's first event."""

LOADER: Final = 1
LOADER_PID: Final = 1000

Thread = tuple[int, int]
"""A process, a worker's number or -1 for the loader's; and a thread of it: 0 = the main one, 1 = the pin thread or a
worker's feeder, then the loader's feeders: of results, and of each worker's tasks."""


def pid_of(process: int) -> int:
    """Return the made-up pid of a worker, or with -1 of the loader."""
    return LOADER_PID + 1 + process


def _tid(thread: Thread) -> int:
    return pid_of(thread[0]) if thread[1] == 0 else 10 * pid_of(thread[0]) + thread[1]


def _thread_name(thread: Thread) -> str:
    process, number = thread
    if number == 0:
        return "MainThread"
    if process < 0:
        return {1: "pin_memory", 2: "QueueFeederThread (results)"}.get(number, f"QueueFeederThread ({number - 3})")
    return "QueueFeederThread"


class MadeUpRun:
    """The events of a run with one iterator."""

    def __init__(self) -> None:
        self._records: dict[int, list[bytes]] = defaultdict(list)
        self._threads: dict[int, set[Thread]] = defaultdict(set)

    def add(self, time: int, thread: Thread, code: int, arguments: tuple[int, ...]) -> None:
        """Keep an event. time: ns after START; arguments: task, worker, its own numbers. A worker's pid is made up."""
        task, worker, *own = (*arguments, -1, -1)[:2] if len(arguments) < 2 else arguments
        xyz = [int(value) for value in (*own, 0, 0, 0)[:3]]
        for place, field in enumerate(EVENTS[code].fields):
            if field.name == "pid" and worker >= 0:
                xyz[place] = pid_of(worker)
        self._threads[thread[0]].add(thread)
        mine = self._records[thread[0]]
        mine.append(PACK.pack(START + time, code, LOADER, _tid(thread), task, worker, *xyz, len(mine) + 1))

    def write(
        self, directory: str | os.PathLike[str], lines: list[dict[str, Any]], facts: dict[str, Any], host: str
    ) -> Path:
        """Write the run into `directory`, which is made for it; return its path. lines: of the loader's side file.

        Raises TraceError if the directory holds a trace or cannot be written.
        """
        nowhere = {"host": host, "pid": LOADER_PID, "cpus": None, "cpus_allowed": None, "cpu_quota": None,
                   "realtime_ns": START, "monotonic_ns": START, "detail": "sample", "ring_bytes": None}  # fmt: skip
        path = create(directory, **nowhere | facts)
        for process, records in self._records.items():
            self._write_process(path, process, records, lines if process < 0 else [])
        return path

    def _write_process(self, path: Path, process: int, records: list[bytes], lines: list[dict[str, Any]]) -> None:
        pid = pid_of(process)
        stem = stem_of(pid, START + process + 1)
        role: dict[str, Any] = {"role": "loader"} if process < 0 else {"role": "worker", "worker": process}
        parent = LOADER_PID - 1 if process < 0 else LOADER_PID
        side = [side_line("process", pid=pid, ppid=parent, loader=LOADER, argv=[], **role)]
        threads = sorted(self._threads[process])
        side += [side_line("thread", tid=_tid(thread), name=_thread_name(thread)) for thread in threads]
        side += [side_line(**line) for line in lines]
        (path / (stem + SIDE_SUFFIX)).write_bytes(b"".join(side))
        header = Header(pid, START, START, slots=len(records))
        (path / (stem + EVENTS_SUFFIX)).write_bytes(header.page() + b"".join(records))
