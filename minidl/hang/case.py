"""One case: the evidence of a run's processes, with the role of each process and the place of each thread.

Interface: `RunFacts(looks, told)`. looks: evidence of one or more moments, the latest last. told: a trace's wait.
`loops` are the threads that iterate, `workers` the worker processes; `at` gives a thread with all that is known of it;
`name` names a process. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from minidl.hang.evidence.model import Frame, RunEvidence, SeenProcess, SeenThread, Syscall
from minidl.hang.evidence.waits import Blocked, KernelWait, waits
from minidl.hang.finding import RecordedWait, detail
from minidl.hang.limits import POLLED
from minidl.hang.places import AT_HOME, LoaderStep, ThreadPlace, is_worker, library, place_of

_OWN_THREADS: Final = frozenset({
    LoaderStep.FEEDER_IDLE, LoaderStep.SERVE, LoaderStep.PICKLE, LoaderStep.WRITE, LoaderStep.PIN, LoaderStep.WATCH,
})  # fmt: skip
_FETCHING: Final = frozenset({LoaderStep.SAMPLE, LoaderStep.ITERATE, LoaderStep.COLLATE})
_NOWHERE: Final = KernelWait(Blocked.UNKNOWN, "not seen")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ThreadFacts:
    """A thread of the run: where it is, and what it waits for. Empty values for a thread that was not examined.

    by, waiters: in a chain of waits, how the thread before it waits for it, and all threads before it.
    """

    case: RunFacts
    process: SeenProcess
    seen: SeenThread
    place: ThreadPlace
    wait: KernelWait
    by: str = ""
    waiters: tuple[ThreadFacts, ...] = ()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def tid(self) -> int:
        return self.seen.tid

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.tid

    @property
    def kind(self) -> Blocked:
        return self.wait.kind

    @property
    def step(self) -> LoaderStep:
        return self.place.step

    @property
    def stack(self) -> tuple[Frame, ...]:
        """Its frames, innermost first; none if they were not seen."""
        return self.seen.stack or ()

    @property
    def call(self) -> Syscall:
        return self.seen.call

    @property
    def name(self) -> str:
        """The name of its process, or of the worker that it is."""
        if self.is_worker_thread:
            return f"worker {self.worker if self.worker >= 0 else '?'}{detail(f' (thread {self.tid})')}"
        return self.case.name(self.pid)

    @property
    def is_worker_thread(self) -> bool:
        """Whether it is a worker of its process. All threads of a worker process have that name from the kernel."""
        is_named = self.seen.name == "pt_data_worker"
        return not self.is_main and is_named and (not self.in_worker or self.seen.python_name.startswith("worker "))

    @property
    def worker(self) -> int:
        """The number of the worker that it is, or is in; -1 = none."""
        if not self.is_worker_thread:
            return self.case.workers.get(self.pid, -1)
        by_name = self.seen.python_name.removeprefix("worker ")
        return self.case.told.numbers.get(self.tid, int(by_name) if by_name.isdecimal() else -1)

    @property
    def has_timeout(self) -> bool:
        """Whether its wait has a timeout that is longer than a poll's; a loop's for a batch counts as none.

        If a poll is seen late, its sleep so far and what is left of it are more than its timeout.
        """
        longer = self.wait.bounded and max(self.seen.idle, 0) + self.call.timeout > POLLED
        return longer and self.step is not LoaderStep.NEXT

    @property
    def in_timed_wait(self) -> bool:
        """Whether it waits for a lock, a condition or a semaphore with a timeout that is longer than a poll's."""
        return self.has_timeout and self.kind in (Blocked.FUTEX, Blocked.SEMAPHORE)

    @property
    def label(self) -> str:
        """Its own name within the process."""
        return self.seen.python_name or self.seen.name

    @property
    def is_main(self) -> bool:
        return self.tid == self.pid

    @property
    def in_worker(self) -> bool:
        return self.pid in self.case.workers

    @property
    def iterates(self) -> bool:
        """Whether it is in a loader's `next`, or in what that calls without workers."""
        steps = {self.step, *self.place.outer}
        return bool(steps & (AT_HOME | _FETCHING)) and LoaderStep.PIN not in steps

    @property
    def is_loaders(self) -> bool:
        """Whether it is a thread that the loader started: by its innermost step, or by a step around it."""
        return bool(_OWN_THREADS & {self.step, *self.place.outer})

    @property
    def before(self) -> SeenThread | None:
        """The thread at the first look; None if there was one look only, or if another process had that id."""
        then = self.case.looks[0].process(self.pid) if len(self.case.looks) > 1 else None
        return None if then is None or then.started != self.process.started else then.thread(self.tid)

    @property
    def place_before(self) -> ThreadPlace | None:
        """Its place at the first look; None without a first look or a stack."""
        then = self.before
        return place_of(then) if then is not None and then.stack else None

    @property
    def stays(self) -> bool:
        """Whether it was at the same line, task and sample at the first look."""
        now, before = self.place, self.place_before
        return before is not None and (before.task, before.sample, spot(before)) == (now.task, now.sample, spot(now))

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a task, as a worker's main thread: by its stack, or by what it is blocked in."""
        if self.place.seen:
            return self.step is LoaderStep.IDLE and not self.place.interrupted
        if self.kind is Blocked.FILE_LOCK:
            return False
        if self.seen.syscall is None:
            return self.polls()
        return 0 <= self.call.timeout < POLLED and self.kind is Blocked.PIPE_READ

    def polls(self, *, if_hidden: bool = True) -> bool:
        """Whether it polls a queue, by the kernel's function. if_hidden: the answer for a short sleep without one."""
        naps = not self.seen.wchan and 0 <= self.seen.idle <= POLLED
        return "poll" in self.seen.wchan or (naps and if_hidden)


class RunFacts:
    """The evidence of a run with the role of each process; see the module."""

    def __init__(self, looks: Sequence[RunEvidence], told: RecordedWait | None = None) -> None:
        self.looks = tuple(looks)
        self.now = looks[-1]
        self.told = told or RecordedWait()
        self.processes = {process.pid: process for process in self.now.processes}
        known = waits(self.now)
        self._threads = {
            (process.pid, seen.tid): ThreadFacts(self, process, seen, place_of(seen), known[process.pid, seen.tid])
            for process in self.now.processes
            for seen in process.threads
        }

    # --- threads
    def at(self, pid: int, tid: int = 0, by: str = "") -> ThreadFacts:
        """A thread; the main thread of its process if `tid` is 0. by: how another one waits for it."""
        found = self._threads.get((pid, tid or pid))
        if found is None:
            process = self.processes.get(pid) or SeenProcess(pid, 0, "", (), "?", 0.0)
            seen = SeenThread(tid or pid, "", ("?", "?"), (0.0, 0.0), (0, 0))
            found = ThreadFacts(self, process, seen, ThreadPlace(LoaderStep.OTHER, seen=False), _NOWHERE)
        return replace(found, by=by) if by else found

    def threads(self, pid: int) -> list[ThreadFacts]:
        """The threads of a process; none if it was not examined."""
        return [self.at(pid, seen.tid) for seen in self.processes[pid].threads] if pid in self.processes else []

    def helpers(self, pid: int, but: int = 0) -> list[ThreadFacts]:
        """The threads of a process, not the main one, that run Python code of the user or of libraries."""
        return [one for one in self.threads(pid) if one.tid not in (pid, but) and one.stack and not one.is_loaders]

    # --- the role of each process
    @cached_property
    def workers(self) -> dict[int, int]:
        """pid -> number of each worker process: by the trace, by its stack, or else by order of start."""
        found = [one for one in self.now.processes if self._is_worker(one)]
        by_stack = {one.pid: self.at(one.pid).place.worker for one in found}
        numbers = {pid: number for pid, number in by_stack.items() if number >= 0} | self.told.numbers
        crews: dict[tuple[int, bool], list[int]] = {}
        for one in sorted(found, key=lambda one: (one.started, one.pid)):
            crews.setdefault((one.ppid, one.pid in self.told.others), []).append(one.pid)
        for crew in crews.values():
            numbers |= self._by_order(crew, numbers)
        return {one.pid: numbers[one.pid] for one in found}

    def _by_order(self, crew: list[int], numbers: dict[int, int]) -> dict[int, int]:
        """Number those of a loader's workers that have no number yet. crew: pids in order of start."""
        recorded = self.told.numbers if self.told.numbers.keys() & set(crew) else {}
        taken = {*recorded.values(), *(numbers[pid] for pid in crew if pid in numbers)}
        free = (number for number in itertools.count() if number not in taken)
        return {pid: next(free) for pid in crew if pid not in numbers}

    def _is_worker(self, process: SeenProcess) -> bool:
        """Whether a process is a worker, and not a fork that a worker's code made: that has its name and stack."""
        parent = self.processes.get(process.ppid)
        forked = parent is not None and is_worker(parent)
        return process.pid in self.told.numbers or (is_worker(process) and not forked)

    @cached_property
    def loops(self) -> list[ThreadFacts]:
        """The threads that iterate, those that wait in the loader first; else the main threads of workers' parents."""
        homes = {self.home_of(pid) for pid in self.workers} | set(self.ranks)
        below = {one.pid for pid in self.workers for one in self.family(pid)}
        others = (one for one in self.now.processes if one.pid not in below and not one.ended)
        found = [loop for one in others for loop in self._loops_of(one, one.pid in homes | {self.now.main})]
        if any(one.pid in homes for one in found):
            found = [one for one in found if one.pid in homes or one.iterates]
        return sorted(found, key=lambda one: (one.pid != self.told.pid, not one.iterates, one.pid))

    def _loops_of(self, process: SeenProcess, is_home: bool) -> list[ThreadFacts]:
        """The threads of a process that iterate; else, if it has workers or is the program, its main thread."""
        if self.is_server(process.pid):
            return []
        instead = [self.at(process.pid)] if process.main is not None and is_home else []
        return [one for one in self.threads(process.pid) if one.iterates] or instead

    def is_loop(self, pid: int) -> bool:
        return any(pid == loop.pid for loop in self.loops)

    def family(self, pid: int) -> list[SeenProcess]:
        """A process and its descendants."""
        own, grows = {pid}, True
        while grows:
            more = {one.pid for one in self.processes.values() if one.ppid in own} - own
            own, grows = own | more, bool(more)
        return [one for one in self.processes.values() if one.pid in own]

    def workers_of(self, pid: int, queue: str = "") -> dict[int, ThreadFacts]:
        """Worker's number -> its main thread, of the workers that a process has started.

        queue: the address of the result queue that the loop waits at. A process may have several loaders: the workers
        of this one have its queue, at the same address if they were forked. Of two with one number the busy one stays.
        """
        mine = [worker for worker in self.workers if self.home_of(worker) == pid]
        if self.told.pid in (0, pid):  # what is told is about no other process
            mine = self._recorded(mine)
        queues = {worker: _queue_of(self.at(worker)) for worker in mine}
        if queue and queue in queues.values():  # unknown while a worker starts
            mine = [worker for worker in mine if queues[worker] in (queue, "")]
        threads = sorted((self.at(worker) for worker in mine), key=lambda worker: not worker.is_idle)
        return {self.workers[worker.pid]: worker for worker in threads}

    def _recorded(self, mine: list[int]) -> list[int]:
        """Of a process's workers those that the trace's wait is about, with those that have not recorded anything."""
        told = self.told
        if not told.numbers.keys() & set(mine):
            return [worker for worker in mine if worker not in told.others]
        late = [worker for worker in mine if worker not in told.numbers and worker not in told.others]
        known = [worker for worker in mine if worker in told.numbers]
        return known + [worker for worker in late if self.workers[worker] in told.unheard]

    def helper_processes(self, pid: int) -> list[SeenProcess]:
        """The living children of a process that are no workers: the program's own, and the fork server."""
        children = (one for one in self.now.processes if one.ppid == pid and not one.ended)
        return [one for one in children if one.pid not in self.workers]

    def home_of(self, worker: int) -> int:
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

    def forked(self, pid: int) -> bool | None:
        """Whether a process was forked from its parent without a new program; None = unknown."""
        process = self.processes.get(pid)
        if process is None or process.main is None:
            return None
        if process.main.stack:
            return any(frame.file.endswith("popen_fork.py") for frame in process.main.stack)
        parent = self.processes.get(process.ppid)
        return None if parent is None else parent.command == process.command

    # --- names
    def name(self, pid: int) -> str:
        """A process in words."""
        process, number = self.processes.get(pid), detail(f" (pid {pid})")
        if pid in self.workers:
            rank = self._rank(self.home_of(pid))
            return f"{rank}'s worker {self.workers[pid]}{number}" if rank else f"worker {self.workers[pid]}{number}"
        if process is None:
            return f"process {pid} (not examined)"
        if pid in self.ranks:
            return f"{self._rank(pid)}{number}"
        if self.is_loop(pid):
            if self.told.no_loader and pid == self.told.pid:
                return f"the program{number}"
            named = f"process {process.name} (pid {pid}), in no loader now"
            return named if self._in_no_loader(pid) else f"{self._rank(pid) or 'the loop'}{number}"
        if self.is_server(pid):
            return f"the fork server{number}"
        of = f", a child of worker {self.workers[process.ppid]}" if process.ppid in self.workers else ""
        return f"process {process.name} (pid {pid}){of}"  # several may have this name

    def _in_no_loader(self, pid: int) -> bool:
        """Whether there is no sign (stack, worker, trace) that a process iterates, or did so before."""
        told = self.told
        recorded = told.own_code or max(told.task, told.worker, told.sample) >= 0
        if recorded or any(self.home_of(worker) == pid for worker in self.workers):
            return False
        return all(one.place.seen and not one.iterates for one in self.loops if one.pid == pid)

    @cached_property
    def ranks(self) -> dict[int, int]:
        """pid -> rank of each process of a job: by the trace, by its launcher's variables, or by its stack."""
        told = {one.pid: one.rank for one in self.now.processes}  # children have their rank's variables, too
        own = [one for one in self.now.processes if one.pid not in self.workers and not one.ended]
        seen = {one.pid: one.rank for one in own if one.rank >= 0 and told.get(one.ppid) != one.rank}
        if not seen:
            seen = {one.pid: number for one in own if (number := self._variable(one, "rank")) >= 0}
            seen = seen if len(set(seen.values())) > 1 else {}
        return seen | self.told.ranks

    @cached_property
    def absent_ranks(self) -> list[int]:
        """The ranks of the job that are not among the processes; none if it is unknown how many it has."""
        known = [self.processes[pid] for pid in self.ranks if pid in self.processes]
        total = max((max(one.ranks, self._variable(one, "world_size")) for one in known), default=0)
        return sorted(set(range(total)) - set(self.ranks.values()))

    def _variable(self, process: SeenProcess, name: str) -> int:
        """The number that a variable of this name has in the outermost frame with one; -1 = there is none.

        The main thread comes first: at Python's exit it has none of the program's frames, but other threads do.
        """
        threads = sorted(process.threads, key=lambda one: one.tid != process.pid)
        texts = (frame.variables.get(name, "") for one in threads for frame in reversed(one.stack or ()))
        return next((int(text) for text in texts if text.isdecimal()), -1)

    def _rank(self, pid: int) -> str:
        return f"rank {self.ranks[pid]}" if pid in self.ranks else ""

    @property
    def apart(self) -> float:
        """Seconds between the first look and the last."""
        return (self.now.moment - self.looks[0].moment) / 1e9 + self.now.interval


def _has_servers_command(process: SeenProcess) -> bool:
    return "multiprocessing.forkserver" in " ".join(process.command)


def _queue_of(worker: ThreadFacts) -> str:
    """The address of a worker's result queue, by its stack."""
    found = (frame for frame in worker.stack if frame.name == "_worker_loop")
    return next((address(frame.variables.get("data_queue", "")) for frame in found), "")


def address(text: str) -> str:
    """The address in a repr such as "<Queue at 0x7f12>"; "" = none."""
    found = re.search(r"0x[0-9a-f]+", text)
    return found[0] if found else ""


def spot(place: ThreadPlace) -> str:
    """The place in the user's code: "D.hook at data.py:6"; "" = unknown."""
    frame = place.users or (place.inside[0] if place.inside else None)
    return f"{frame.function} at {frame.base}:{frame.line}" if frame is not None else ""


def in_library(place: ThreadPlace) -> str:
    """The innermost frame if it is a library's, "" if it is the user's own."""
    return str(place.inside[0]) if place.inside and library(place.inside[0].file) else ""
