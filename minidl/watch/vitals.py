"""Signs of life of processes and of their machine, read from /proc: cheap, and without a signal to them.

Interface: a `VitalSigns`, whose `sample(pids)` says what some processes, their busiest threads, the machine and the
busiest processes beside them did since its last call.

A sample takes a few ms, so that one a second costs less than 0.5 % of a CPU: threads are read of processes that have
computed, at most `MOST_THREADS` in all; the machine's other processes only if they are at most `MOST_OTHERS`, and so
seldom that it takes `OTHERS_SHARE` of a CPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from typing import Final

from minidl.hang.evidence.machine import read_machine
from minidl.hang.evidence.proc import TICK, ProcFiles
from minidl.process_stat import every_process
from minidl.tracefile.watched import Other, Sample, ThreadTime, Vitals

BUSIEST_THREADS: Final = 8
BUSIEST_OTHERS: Final = 3
MOST_THREADS: Final = 256
MOST_OTHERS: Final = 500
OTHERS_SHARE: Final = 0.001


class VitalSigns:
    """Samples a run's processes. What threads and other processes did is told from the second sample on."""

    def __init__(self) -> None:
        self._cpu: dict[int, int] = {}  # of each process, ms, at the last sample
        self._tasks: dict[tuple[int, int], tuple[int, int]] = {}  # of each thread, ms: computed, and waited for a CPU
        self._unread: set[int] = set()  # processes whose threads were not read when they had computed last
        self._others: dict[int, int] = {}  # of each process that was there, ticks
        self._others_at = 0  # when they were looked at, ns; 0 = never
        self._others_due = 0

    def sample(self, pids: Collection[int]) -> Sample:
        """Sample the existing processes and the machine that they share."""
        machine = read_machine(ProcFiles(os.getpid()).cgroups(), os.getpid())
        kills = max((group.oom_kills for group in machine.cgroups), default=-1)
        processes = {pid: one for pid in pids if (one := vitals(pid)) is not None}
        for pid, tasks in self._busiest(processes):
            processes[pid] = processes[pid]._replace(tasks=tasks)
        self._cpu = {pid: one.cpu_ms for pid, one in processes.items()}
        cpus = os.sysconf("SC_NPROCESSORS_ONLN")
        about = machine.shm_free, kills, machine.shm_size, cpus, *_used(), *self._look_at_others({*pids, os.getpid()})
        return Sample(time.monotonic_ns(), processes, *about)

    def _busiest(self, processes: dict[int, Vitals]) -> Iterator[tuple[int, tuple[ThreadTime, ...]]]:
        """Yield the busiest threads of each process that has computed since the last sample, and remember them all."""
        spent = {pid: one.cpu_ms - self._cpu.get(pid, 0) for pid, one in processes.items()}
        if not self._cpu:
            self._unread = set(processes)  # what they did until now is not of this run
        left, known = MOST_THREADS, dict[tuple[int, int], tuple[int, int]]()
        for pid in sorted((pid for pid in spent if spent[pid] > 0), key=lambda pid: -spent[pid]):
            threads = ProcFiles(pid).tids()
            if len(threads) > left:
                self._unread.add(pid)
                continue
            left -= len(threads)
            used = {(pid, tid): _used_by(pid, tid) for tid in threads}
            tasks = []
            for (_, tid), (computed, waited) in used.items():
                before = self._tasks.get((pid, tid), (0, 0))
                tasks.append(ThreadTime(tid, computed - before[0], waited - before[1]))
            known |= used
            if pid in self._unread:
                self._unread.remove(pid)
            else:
                tasks.sort(key=lambda task: -task.cpu_ms)
                yield pid, tuple(task for task in tasks[:BUSIEST_THREADS] if task.cpu_ms > 0)
        self._tasks = {key: ms for key, ms in self._tasks.items() if key[0] in processes} | known

    def _look_at_others(self, run: set[int]) -> tuple[int, tuple[Other, ...]]:
        """The busiest processes that do not record into the trace, in how many ms; 0 = it is not time."""
        now = time.monotonic_ns()
        if now < self._others_due:
            return 0, ()
        began = time.thread_time_ns()
        there = {}
        if sum(map(str.isdecimal, os.listdir("/proc"))) <= MOST_OTHERS:
            there = dict(every_process())
        ticks = {pid: int(fields[11]) + int(fields[12]) for pid, fields in there.items()}
        spent = [
            (1000 * (used - self._others.get(pid, 0)) // TICK, pid)
            for pid, used in ticks.items()
            if used > self._others.get(pid, 0) and pid not in run
        ]
        over = (now - self._others_at) // 10**6 if self._others_at and there else 0
        self._others, self._others_at = ticks, now
        self._others_due = now + int((time.thread_time_ns() - began) / OTHERS_SHARE)
        busiest = sorted(spent, reverse=True)[:BUSIEST_OTHERS] if over else []
        return over, tuple(Other(pid, _name(pid), cpu_ms) for cpu_ms, pid in busiest)


def _name(pid: int) -> str:
    return ProcFiles(pid).text("comm").strip()


def _used() -> tuple[int, int]:
    """What all processes of the machine have used since its start, and what its host has kept, ms; -1 = unknown."""
    try:
        with open("/proc/stat", "rb") as file:
            user, nice, system, _, _, irq, softirq, stolen, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return -1, -1
    return 1000 * (user + nice + system + irq + softirq) // TICK, 1000 * stolen // TICK


def _used_by(pid: int, tid: int) -> tuple[int, int]:
    """How long a thread has computed, and waited for a CPU, ms; 0 = it is gone, or the kernel does not say."""
    words = ProcFiles(pid, tid).text("schedstat").split()
    return (int(words[0]) // 10**6, int(words[1]) // 10**6) if len(words) == 3 else (0, 0)


def vitals(pid: int) -> Vitals | None:
    """Sample a process; None if it is gone."""
    files = ProcFiles(pid)
    stat, status = files.stat(), files.status()
    if stat is None:
        return None
    rss, shared, own, swap = (
        int(status.get(name, "-1").split()[0]) for name in ("VmRSS", "RssShmem", "RssAnon", "VmSwap")
    )
    return Vitals(
        stat.state, round(1000 * stat.cpu), rss, shared, _descriptors(files), stat.threads, files.wchan(), own, swap,
        stat.minor_faults, stat.major_faults,
    )  # fmt: skip


def _descriptors(files: ProcFiles) -> int:
    try:
        return os.stat(f"{files.place}/fd").st_size or len(files.names("fd"))  # since Linux 6.2, the size is the count
    except OSError:
        return -1
