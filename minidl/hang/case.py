"""One case: the evidence of a run's processes, with the role of each process and the place of each thread.

Interface: `RunFacts(looks, told)`. looks: evidence of one or more moments, the latest last. told: a trace's wait.
`loops` are the threads that iterate, `workers` the worker processes; `name` names a process. Pure.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from minidl.hang.evidence.graph import Blocked, KernelWait, waits
from minidl.hang.evidence.model import Frame, RunEvidence, SeenProcess, SeenThread
from minidl.hang.finding import RecordedWait
from minidl.hang.limits import POLLED
from minidl.hang.places import AT_HOME, LoaderStep, ThreadPlace, is_worker, library, place_of

_OWN_THREADS: Final = frozenset({
    LoaderStep.FEEDER_IDLE, LoaderStep.SERVE, LoaderStep.PICKLE, LoaderStep.WRITE, LoaderStep.PIN, LoaderStep.WATCH,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoopThread:
    """A thread that iterates over a loader, or did so before."""

    pid: int
    tid: int
    place: ThreadPlace


class RunFacts:
    """The evidence of a run with the role of each process; see the module."""

    def __init__(self, looks: Sequence[RunEvidence], told: RecordedWait | None = None) -> None:
        self.looks = tuple(looks)
        self.now = looks[-1]
        self.told = told
        self.waits = waits(self.now)
        self.places = {(p.pid, t.tid): place_of(t) for p in self.now.processes for t in p.threads}
        self.processes = {process.pid: process for process in self.now.processes}
        self.brief = False  # for a title: words without process ids and times of sleep

    def in_brief(self) -> RunFacts:
        """The same case, with words for a title."""
        short = copy.copy(self)
        short.brief = True
        return short

    # --- who is who
    @cached_property
    def workers(self) -> dict[int, int]:
        """pid -> number of each worker process: by the trace, by its stack, or else by order of start."""
        told = self.told or RecordedWait()
        found = [
            p for p in self.now.processes if (p.pid in told.numbers or is_worker(p)) and not self._forked_by_worker(p)
        ]
        numbers = dict(told.numbers)
        crews: dict[tuple[int, bool], list[SeenProcess]] = {}
        for process in sorted(found, key=lambda p: (p.started, p.pid)):
            crews.setdefault((process.ppid, process.pid in told.others), []).append(process)
        for crew in crews.values():
            for process in crew:
                place = self.places.get((process.pid, process.pid))
                if place is not None and place.worker >= 0:
                    numbers.setdefault(process.pid, place.worker)
            recorded = told.numbers.values() if any(p.pid in told.numbers for p in crew) else ()
            taken = {*recorded, *(numbers[p.pid] for p in crew if p.pid in numbers)}
            free = (number for number in itertools.count() if number not in taken)
            for process in crew:
                if process.pid not in numbers:
                    numbers[process.pid] = next(free)
        return {process.pid: numbers[process.pid] for process in found}

    def _forked_by_worker(self, process: SeenProcess) -> bool:
        """Whether a worker's code made the process: a fork has its parent's name and stack."""
        parent = self.processes.get(process.ppid)
        return parent is not None and is_worker(parent) and (not self.told or process.pid not in self.told.numbers)

    @cached_property
    def loops(self) -> list[LoopThread]:
        """The threads that iterate, those that wait in the loader first; else the main threads of workers' parents."""
        out, homes = [], {self._home_of(pid) for pid in self.workers} | set(self.told.ranks if self.told else ())
        for process in self.now.processes:
            if (
                process.pid in self.workers
                or self._below_worker(process)
                or process.ended
                or self.is_server(process.pid)
            ):
                continue
            mine = [LoopThread(process.pid, t.tid, self.places[process.pid, t.tid]) for t in process.threads]
            inside = [one for one in mine if self._at_home(one)]
            if not inside and (process.pid in homes or process.pid == self.now.main):
                inside = [one for one in mine if one.tid == process.pid]
            out += inside
        told = self.told.pid if self.told else 0
        several = any(one.pid in homes for one in out)
        out = [one for one in out if one.pid in homes or not several or self._at_home(one)]
        return sorted(out, key=lambda one: (one.pid != told, not self._at_home(one), one.pid))

    def _at_home(self, one: LoopThread) -> bool:
        steps = {one.place.step, *one.place.outer}
        fetching = {LoaderStep.SAMPLE, LoaderStep.ITERATE, LoaderStep.COLLATE}
        return bool(steps & (AT_HOME | fetching)) and LoaderStep.PIN not in steps

    def _below_worker(self, process: SeenProcess) -> bool:
        seen = set()
        while process.ppid in self.processes and process.pid not in seen:
            seen.add(process.pid)
            process = self.processes[process.ppid]
            if process.pid in self.workers:
                return True
        return False

    def family(self, pid: int) -> list[SeenProcess]:
        """A process and its descendants."""
        own, grows = {pid}, True
        while grows:
            more = {one.pid for one in self.processes.values() if one.ppid in own} - own
            own, grows = own | more, bool(more)
        return [one for one in self.processes.values() if one.pid in own]

    def workers_of(self, pid: int, queue: str = "") -> dict[int, int]:
        """Worker's number -> pid, of the workers that a process has started.

        queue: the address of the result queue that the loop waits at. A process may have several loaders: the workers
        of this one have its queue, at the same address if they were forked. Of two with one number the busy one stays.
        """
        mine = [worker for worker in self.workers if self._home_of(worker) == pid]
        told = self.told if self.told and self.told.pid in (0, pid) else None  # it is about no other process
        if told and told.numbers.keys() & set(mine):
            late = [worker for worker in mine if worker not in told.numbers and worker not in told.others]
            mine = [worker for worker in mine if worker in told.numbers]
            mine += [worker for worker in late if self.workers[worker] in told.unheard]
        elif told:  # none of its own workers has recorded anything yet
            mine = [worker for worker in mine if worker not in told.others]
        queues = {worker: self._queue_of(worker) for worker in mine}
        if queue and queue in queues.values():  # unknown while a worker starts
            mine = [worker for worker in mine if queues[worker] in (queue, "")]
        mine = sorted(mine, key=lambda worker: not self.idle_worker(worker))
        return {self.workers[worker]: worker for worker in mine}

    def _queue_of(self, worker: int) -> str:
        """The address of a worker's result queue, by its stack."""
        found = (f for f in self.stack(worker, worker) if f.name == "_worker_loop")
        return next((address(f.variables.get("data_queue", "")) for f in found), "")

    def queue_at(self, pid: int, tid: int) -> str:
        """The address of the queue that a thread gets from, by its stack."""
        found = (f for f in self.stack(pid, tid) if f.name == "get" and f.file.endswith("queues.py"))
        return next((address(f.variables.get("self", "")) for f in found), "")

    def _home_of(self, worker: int) -> int:
        """The process that a worker belongs to: its parent, or the parent of its fork server."""
        parent = self.processes[worker].ppid
        return self.processes[parent].ppid if self.is_server(parent) else parent

    def is_server(self, pid: int) -> bool:
        """Whether a process is the fork server of multiprocessing, which starts processes and waits for none.

        A process that it starts (a worker, or a rank that iterates) has the same command line.
        """
        process = self.processes.get(pid)
        if process is None or not _has_servers_command(process) or is_worker(process):
            return False
        if process.main is not None and process.main.stack:
            return not any(frame.name == "_serve_one" for frame in process.main.stack)
        parent = self.processes.get(process.ppid)
        return pid != self.now.main and (parent is None or not _has_servers_command(parent))

    # --- names
    def name(self, pid: int) -> str:
        named = "" if self.brief else f" (pid {pid})"
        if pid in self.workers:
            return f"{self._rank(self._home_of(pid))}worker {self.workers[pid]}{named}"
        if any(pid == loop.pid for loop in self.loops):
            if self._in_no_loader(pid):
                return f"process {self.processes[pid].name}{named}, in no loader now"
            return f"{self._rank(pid)}the loop{named}"
        process = self.processes.get(pid)
        if process is None:
            return f"process {pid} (not examined)"
        if self.is_server(pid):
            return f"the fork server{named}"
        of = f", a child of worker {self.workers[process.ppid]}" if process.ppid in self.workers else ""
        return f"{self._rank(pid)}process {process.name}{named}{of}"

    def _in_no_loader(self, pid: int) -> bool:
        """Whether there is no sign (stack, worker, trace) that a process iterates, or did so before."""
        told = self.told
        recorded = told is not None and (told.own_code or told.task >= 0 or told.worker >= 0 or told.sample >= 0)
        mine = [loop for loop in self.loops if loop.pid == pid]
        working = any(self._home_of(worker) == pid for worker in self.workers)
        return not recorded and not working and all(one.place.seen and not self._at_home(one) for one in mine)

    def _rank(self, pid: int) -> str:
        if self.told and pid in self.told.ranks:
            return f"rank {self.told.ranks[pid]}: "
        return ""

    # --- what threads do
    def thread(self, pid: int, tid: int) -> SeenThread | None:
        process = self.processes.get(pid)
        return process.thread(tid) if process is not None else None

    def threads(self, pid: int) -> tuple[SeenThread, ...]:
        """The threads of a process; none if it was not examined."""
        return self.processes[pid].threads if pid in self.processes else ()

    def stack(self, pid: int, tid: int) -> tuple[Frame, ...]:
        """The frames of a thread, innermost first; none if they were not seen."""
        thread = self.thread(pid, tid)
        return (thread.stack if thread is not None else None) or ()

    def place(self, pid: int, tid: int) -> ThreadPlace:
        return self.places.get((pid, tid), ThreadPlace(LoaderStep.OTHER, seen=False))

    def wait(self, pid: int, tid: int) -> KernelWait | None:
        return self.waits.get((pid, tid))

    def idle_worker(self, pid: int) -> bool:
        """Whether a worker's main thread waits for a task, by its stack or by what it is blocked in."""
        place = self.place(pid, pid)
        if place.seen:
            return place.step is LoaderStep.IDLE and not place.interrupted
        thread, wait = self.thread(pid, pid), self.wait(pid, pid)
        if wait is None or thread is None:
            return False
        if wait.kind is Blocked.FILE_LOCK:
            return False
        if thread.syscall is None:
            return "poll" in thread.wchan or (not thread.wchan and 0 <= thread.idle <= POLLED)
        return _polls(thread) and wait.kind is Blocked.PIPE_READ

    def users_threads(self, pid: int, but: int = 0) -> list[SeenThread]:
        """The threads of a process that run Python code of the user or of libraries, but not the loader's own."""
        return [
            thread
            for thread in self.threads(pid)
            if thread.tid not in (pid, but) and thread.stack and not self._is_loaders(self.places[pid, thread.tid])
        ]

    @staticmethod
    def _is_loaders(place: ThreadPlace) -> bool:
        """Whether a thread is the loader's own: by its innermost step, or by a step around it."""
        return bool(_OWN_THREADS & {place.step, *place.outer})

    def forked(self, pid: int) -> bool | None:
        """Whether a process was forked from its parent without a new program; None = unknown."""
        process = self.processes.get(pid)
        if process is None or process.main is None:
            return None
        if process.main.stack:
            return any(frame.file.endswith("popen_fork.py") for frame in process.main.stack)
        parent = self.processes.get(process.ppid)
        return None if parent is None else parent.command == process.command

    def thread_before(self, pid: int, tid: int) -> SeenThread | None:
        """A thread at the first look; None if there was one look only, or if another process had that id."""
        now, then = self.processes.get(pid), self.looks[0].process(pid) if len(self.looks) > 1 else None
        if now is None or then is None or then.started != now.started:
            return None
        return then.thread(tid)

    def before(self, pid: int, tid: int) -> ThreadPlace | None:
        """Where a thread was at the first look; None without a first look or a stack."""
        thread = self.thread_before(pid, tid)
        return place_of(thread) if thread is not None and thread.stack else None

    @property
    def apart(self) -> float:
        """Seconds between the first look and the last."""
        return (self.now.moment - self.looks[0].moment) / 1e9 + self.now.interval


def _has_servers_command(process: SeenProcess) -> bool:
    return "multiprocessing.forkserver" in " ".join(process.command)


def _polls(thread: SeenThread) -> bool:
    call = thread.syscall
    return call is not None and 0 <= call.timeout <= 5.0


def address(text: str) -> str:
    """The address in a repr such as "<Queue at 0x7f12>"; "" = none."""
    found = re.search(r"0x[0-9a-f]+", text)
    return found[0] if found else ""


def spot(place: ThreadPlace) -> str:
    """Where in the user's code: "D.hook at data.py:6"; "" = unknown."""
    frame = place.users or (place.inside[0] if place.inside else None)
    if frame is None:
        return ""
    return f"{frame.function} at {frame.base}:{frame.line}"


def in_library(place: ThreadPlace) -> str:
    """The innermost frame if it is a library's, "" if it is the user's own."""
    if not place.inside or not library(place.inside[0].file):
        return ""
    return str(place.inside[0])
