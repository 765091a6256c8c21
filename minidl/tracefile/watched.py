"""What a watchdog saw of a run: signs of life, deaths, and evidence of each hang.

Interface: `read(attachments)` -> `Watched`, whose `looks` hold evidence (see `minidl.hang.evidence`); a trace's is
`Trace.watched`. `description`, `sample`, `ended`, `look`, `said` and `over` make the lines.

It is an attachment of the kind "watch" (see `attachments`): JSON by the line, each line stands alone, and a damaged one
is left out. Times are CLOCK_MONOTONIC ns. Reading executes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from minidl.tracefile import attachments
from minidl.tracefile.attachments import line, time_in
from minidl.tracefile.events import Call
from minidl.tracefile.facts import LATEST
from minidl.tracefile.stack_samples import CodeLine, frames_of, text_of

KIND: Final = "watch"


class ThreadTime(NamedTuple):
    """A thread of a process since the sample before: how long it computed, and was ready and had no CPU."""

    tid: int
    cpu_ms: int
    wait_ms: int


class Vitals(NamedTuple):
    """One sample of one process. state: the kernel's letter; cpu_ms: used since its start; memory in KiB.

    shm_kib, anon_kib: of `rss_kib`, what is shared memory, and what is its own and in no file. fds, threads: how many.
    wchan: the kernel's function that its main thread sleeps in, "" = none or hidden. minor_faults, major_faults: of
    pages since its start, without and with a read from disk. tasks: its busiest threads. -1 = could not be read.
    """

    state: str
    cpu_ms: int
    rss_kib: int
    shm_kib: int
    fds: int
    threads: int
    wchan: str = ""
    anon_kib: int = -1
    swap_kib: int = -1
    minor_faults: int = -1
    major_faults: int = -1
    tasks: tuple[ThreadTime, ...] = ()

    @property
    def private_kib(self) -> int:
        """Memory that no other process has, in RAM or swapped out; -1 = unknown."""
        return -1 if self.anon_kib < 0 else self.anon_kib + max(0, self.swap_kib)


class Other(NamedTuple):
    """A process that does not record into the trace; the CPU time that it has used since others were looked at."""

    pid: int
    name: str
    cpu_ms: int


@dataclass(frozen=True)
class Sample:
    """All processes at one moment, and the machine. -1 = unknown.

    shm_free, shm_size: bytes of /dev/shm, oom_kills: of the cgroup. cpus: that are online; busy_ms: what all processes
    of the machine have used, since its start; stolen_ms: what a virtual machine's host has kept. others: the busiest
    processes that do not record into the trace, in the last others_ms; 0 = they were not looked at. watch: which of
    the trace's watchdogs says it.
    """

    at: int
    processes: dict[int, Vitals]
    shm_free: int = -1
    oom_kills: int = -1
    shm_size: int = -1
    cpus: int = -1
    busy_ms: int = -1
    stolen_ms: int = -1
    others_ms: int = 0
    others: tuple[Other, ...] = ()
    watch: int = 0


@dataclass(frozen=True)
class Ended:
    """A process that the watchdog saw end. code: as multiprocessing's exitcode, -9 = SIGKILL; None = not seen.

    stack: of the thread that a fault ended, outermost frame first; () = unknown.
    """

    pid: int
    at: int
    code: int | None
    stack: tuple[CodeLine, ...] = ()


@dataclass(frozen=True)
class Stall:
    """A wait that took too long. call: the open call of the iterator; pid: of the process that waits.

    `Call.OWN`: no iterator of the process waits for anything, and its own code has not come back to one, or has not
    made the first yet: loader 0.
    """

    loader: int
    call: Call
    since: int
    pid: int


@dataclass(frozen=True)
class StallLook:
    """Evidence of one moment of a stall. number: from 1, in its stall; evidence: what `RunEvidence.from_data` reads."""

    stall: Stall
    number: int
    at: int
    evidence: dict[str, Any]


class ThreadUse(NamedTuple):
    """A thread's use of CPUs on average: 1.0 = one CPU all the time. wait: it was ready, and had none."""

    tid: int
    name: str
    cpu: float
    wait: float


class MachineUse(NamedTuple):
    """CPUs of a machine: how many were busy on average, were kept by a virtual machine's host, and are online."""

    busy: float
    stolen: float
    cpus: int


class Growth(NamedTuple):
    """A process's private memory: its slope by least squares, KiB/s, and how much it grew, in how many seconds."""

    kib_per_s: float
    kib: int
    seconds: float


class Faults(NamedTuple):
    """Page faults: minor ones need no read from disk, major ones do."""

    minor: int
    major: int


@dataclass
class Watched:
    """What the watchdogs of a trace saw. hang_after_s: their setting, 0 = there was none.

    complete: they ended with their run, and were not killed. cpu_ms: CPU time that they used themselves. names: of
    Python's threads, by pid and tid.

    `cpu_of`, `threads_of`, `faults_of`, `machine_busy`, `others` ask for the time from `begin` to `end` (ns,
    CLOCK_MONOTONIC), as far as samples lie around it; what no two samples say is None, or empty.
    """

    hang_after_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    looks: list[StallLook] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    complete: bool = False
    cpu_ms: int = 0
    damaged: int = 0
    names: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.hang_after_s or self.samples)

    def seen_alive(self) -> dict[int, int]:
        """pid -> when it was seen alive last."""
        samples = [(pid, vitals, one.at) for one in self.samples for pid, vitals in one.processes.items()]
        return {pid: at for pid, vitals, at in samples if vitals.state not in "ZX"}

    def most_threads(self, pid: int) -> int:
        """The most threads that a process was seen to have; -1 = unknown."""
        return max((one.processes[pid].threads for one in self.samples if pid in one.processes), default=-1)

    def death_of(self, pid: int) -> Ended | None:
        return next((one for one in self.ended if one.pid == pid), None)

    def cpu_of(self, pid: int, begin: int, end: int) -> float | None:
        """How many CPUs the process used on average."""
        spent = _between(self._of(pid, "cpu_ms"), begin, end)
        return None if spent is None else spent.cpus

    def threads_of(self, pid: int, begin: int, end: int) -> list[ThreadUse]:
        """The process's busiest threads, the busiest first. A thread that was not among them for a while lacks that."""
        spent: dict[int, list[int]] = {}
        mine = [(one.at, one.processes[pid].tasks) for one in self.samples if pid in one.processes]
        told = [(since, at, tasks) for (since, _), (at, tasks) in pairwise(mine) if begin < at and since < end]
        for task in (task for _, _, tasks in told for task in tasks):
            known = spent.setdefault(task.tid, [0, 0])
            known[:] = known[0] + task.cpu_ms, known[1] + task.wait_ms
        ns = max(1, sum(at - since for since, at, _ in told))  # a damaged file may say the same moment twice
        uses = [
            ThreadUse(tid, self.names.get((pid, tid), ""), 1e6 * cpu / ns, 1e6 * wait / ns)
            for tid, (cpu, wait) in spent.items()
        ]
        return sorted(uses, key=lambda use: -use.cpu)

    def faults_of(self, pid: int, begin: int, end: int) -> Faults | None:
        found = [_between(self._of(pid, name), begin, end) for name in ("minor_faults", "major_faults")]
        known = [round(one.amount) for one in found if one is not None]
        return Faults(*known) if len(known) == 2 else None

    def swapped(self, pid: int, begin: int, end: int) -> int:
        """The most memory of the process that was swapped out, KiB."""
        return max((kib for at, kib in self._of(pid, "swap_kib") if begin <= at <= end), default=0)

    def growth(self, pid: int, begin: int = 0, end: int = LATEST) -> Growth | None:
        """How the process's private memory grew; None if fewer than three samples tell."""
        points = [(at, kib) for at, kib in self._of(pid, "private_kib") if begin <= at <= end]
        if len(points) < 3:
            return None
        at, kib = np.array(points, np.float64).T
        seconds = (at - at[0]) / 1e9
        return Growth(float(np.polyfit(seconds, kib, 1)[0]), int(kib[-1] - kib[0]), float(seconds[-1]))

    def machine_busy(self, begin: int, end: int, pid: int = 0) -> MachineUse | None:
        """How busy the machine was. pid: a process on it, if ranks on several machines were joined; 0 = the first."""
        samples = [one for one in self._beside(pid) if one.busy_ms >= 0]
        busy = _between([(one.at, one.busy_ms) for one in samples], begin, end)
        stolen = _between([(one.at, one.stolen_ms) for one in samples], begin, end)
        if busy is None or stolen is None:
            return None
        return MachineUse(busy.cpus, stolen.cpus, samples[-1].cpus)

    def others(self, begin: int, end: int, pid: int = 0) -> list[tuple[int, str, float]]:
        """(pid, name, CPUs on average) of the busiest processes beside the run, the busiest first. pid: see above."""
        spent: dict[tuple[int, str], int] = {}
        until = {one.at: one.at - one.others_ms * 10**6 for one in self._beside(pid) if one.others_ms > 0}
        told = [one for one in self._beside(pid) if one.at in until and begin < one.at and until[one.at] < end]
        for other in (other for one in told for other in one.others):
            spent[other.pid, other.name] = spent.get((other.pid, other.name), 0) + other.cpu_ms
        ms = sum(one.others_ms for one in told)
        return sorted(((*who, of / ms) for who, of in spent.items()), key=lambda one: -one[2])

    def _of(self, pid: int, name: str) -> list[tuple[int, int]]:
        """The samples' times, and what they say of a process."""
        found = ((one.at, getattr(one.processes[pid], name)) for one in self.samples if pid in one.processes)
        return [(at, value) for at, value in found if value >= 0]

    def _beside(self, pid: int) -> list[Sample]:
        """The samples of the watchdog of a process: others may be of another machine."""
        watch = next((one.watch for one in self.samples if pid in one.processes or not pid), None)
        return [one for one in self.samples if one.watch == watch]

    @property
    def until(self) -> int:
        """The last moment that anything was seen at; 0 = none."""
        last: list[Sample | Ended | StallLook] = [*self.samples[-1:], *self.ended[-1:], *self.looks[-1:]]
        return max((one.at for one in last), default=0)


class _Spent(NamedTuple):
    """How much a counter rose, and in which time."""

    amount: float
    ns: int

    @property
    def cpus(self) -> float:
        """Of a counter of CPU time, in ms: the CPUs on average."""
        return 1e6 * self.amount / self.ns


def _between(points: Sequence[tuple[int, int]], begin: int, end: int) -> _Spent | None:
    """The rise of a counter from `begin` to `end`, as far as points (time, count) lie around that."""
    if len(points) < 2:
        return None
    at, count = np.array(points, np.int64).T
    begin, end = max(begin, int(at[0])), min(end, int(at[-1]))
    if end <= begin:
        return None
    first, last = np.interp([begin - at[0], end - at[0]], at - at[0], count - count[0])
    return _Spent(max(0.0, float(last - first)), end - begin)


# --- Writing ----------------------------------------------------------------------------------------------------------
def description(version: str, pid: int, hang_after_s: float, **facts: Any) -> bytes:
    """Return the first line. pid: of the process that began the trace."""
    clock = "CLOCK_MONOTONIC, read by the watchdog"
    return attachments.description(KIND, "minidl", version, pid, clock, 0, hang_after_s=hang_after_s, **facts)


def sample(one: Sample) -> bytes:
    processes = {str(pid): list(vitals) for pid, vitals in one.processes.items()}
    machine = [one.shm_size, one.cpus, one.busy_ms, one.stolen_ms, one.others_ms]
    about = {"shm_free": one.shm_free, "oom_kills": one.oom_kills, "machine": machine, "others": one.others}
    return line({"sample": one.at, "processes": processes, **about})


def ended(one: Ended) -> bytes:
    stack = {"stack": text_of(one.stack)} if one.stack else {}
    return line({"ended": one.pid, "at": one.at, "code": one.code, **stack})


def look(stall: Stall, number: int, at: int, evidence: Mapping[str, Any]) -> bytes:
    about = {"loader": stall.loader, "what": stall.call.value, "since": stall.since, "pid": stall.pid}
    return line({"look": number, "at": at, "stall": about, "evidence": evidence})


def said(text: str) -> bytes:
    """Return the line on what the watchdog has said on stderr."""
    return line({"said": text})


def over(cpu_ms: int) -> bytes:
    """Return the last line. cpu_ms: what the watchdog itself has used."""
    return line({"end": True, "cpu_ms": cpu_ms})


# --- Reading ----------------------------------------------------------------------------------------------------------
def read(files: Iterable[attachments.Attachment], names: Mapping[tuple[int, int], str] | None = None) -> Watched:
    """Read the attachments of this kind. Nothing here raises for what is in a file. names: of threads, by pid, tid."""
    out = Watched(complete=True, names=names or {})
    found = [one for one in files if one.about]
    for number, attachment in enumerate(found):
        after = attachment.about.get("hang_after_s")
        out.hang_after_s = max(out.hang_after_s, float(after) if isinstance(after, (int, float)) else 0.0)
        try:
            lines = attachment.data().split(b"\n")[1:]
        except OSError:
            continue
        complete = False
        for text in filter(None, lines):
            try:
                complete |= _take(out, json.loads(text), number)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
                out.damaged += 1
        out.complete &= complete
    out.complete &= bool(found)
    out.samples.sort(key=lambda one: one.at)
    out.ended.sort(key=lambda one: one.at)
    out.looks.sort(key=lambda one: one.at)
    return out


def _take(out: Watched, content: dict[str, Any], watch: int) -> bool:
    """Take in a line; return whether it is the last one. Raises ValueError, TypeError or KeyError if it is damaged."""
    if "sample" in content:
        processes = {int(pid): _vitals(values) for pid, values in content["processes"].items()}
        shm_free, oom_kills = _number(content["shm_free"]), _number(content["oom_kills"])
        machine = map(_number, content.get("machine", [-1, -1, -1, -1, 0]))  # which older traces lack
        size, cpus, busy, stolen, others_ms = machine
        others = tuple(Other(_number(pid), str(name), _number(ms)) for pid, name, ms in content.get("others", ()))
        about = shm_free, oom_kills, size, cpus, busy, stolen, others_ms, others
        out.samples.append(Sample(time_in(content["sample"]), processes, *about, watch=watch))
    elif "ended" in content:
        code = content["code"]
        stack = frames_of(str(content.get("stack", "[]")))
        out.ended.append(
            Ended(int(content["ended"]), time_in(content["at"]), None if code is None else int(code), stack)
        )
    elif "look" in content:
        about, evidence = content["stall"], content["evidence"]
        if not isinstance(evidence, dict):
            raise TypeError("evidence that is no object")
        stall = Stall(int(about["loader"]), Call(about["what"]), time_in(about["since"]), int(about["pid"]))
        out.looks.append(StallLook(stall, int(content["look"]), time_in(content["at"]), evidence))
    elif "said" in content:
        out.said.append(str(content["said"]))
    elif "note" not in content:
        out.cpu_ms += int(content.get("cpu_ms", 0))
        return content["end"] is True
    return False


def _vitals(values: Sequence[Any]) -> Vitals:
    state, cpu, rss, shm, fds, threads, wchan, *more = values
    anon, swap, minor, major, tasks = more or (-1, -1, -1, -1, ())  # which older traces lack
    cpu, rss, shm, fds, threads, anon, swap, minor, major = map(
        _number, (cpu, rss, shm, fds, threads, anon, swap, minor, major)
    )
    busiest = tuple(ThreadTime(*map(_number, task)) for task in tasks)
    return Vitals(str(state), cpu, rss, shm, fds, threads, str(wchan), anon, swap, minor, major, busiest)


def _number(value: Any) -> int:
    """A number that an array of 64-bit integers holds."""
    number = int(value)
    if abs(number) >= LATEST:
        raise ValueError("no number of the kernel's")
    return number
