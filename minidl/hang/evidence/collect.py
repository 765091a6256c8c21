"""A look at processes: `collect(main)` -> `RunEvidence`.

Rules of use: it changes nothing in what it looks at, needs no privilege, and takes `interval` seconds and some ms for
each process. py_spy=False: it starts no other program.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from dataclasses import replace

from minidl.hang.evidence.descriptors import lock_files, sockets, with_sockets
from minidl.hang.evidence.machine import read_locks, read_machine
from minidl.hang.evidence.model import STACKS, FileLock, RunEvidence, SeenProcess, SeenThread
from minidl.hang.evidence.proc import ProcFiles, Unseen
from minidl.hang.evidence.processes import copies, first_look, read_process
from minidl.hang.evidence.stacks import Stack, Stacks, named_lock_files, spied
from minidl.hang.evidence.stacks import py_spy as py_spy_program
from minidl.process_stat import ENDED, boot_id, descendants_of, every_process


def collect(main: int, others: Iterable[int] = (), *, interval: float = 0.5, py_spy: bool = True) -> RunEvidence:
    """Look twice at a process and at others, with all their children. interval: the least seconds between the looks.

    Stacks are read between the looks: a thread that has slept from one look to the other was asleep in its stack.
    """
    unseen, orphans = Unseen(), _orphans_of(main)
    others = [*others, *orphans]
    before = {pid: look for pid in _all(main, others) if (look := first_look(pid)) is not None}
    begun = time.monotonic_ns()
    stacks = _Spied(before) if py_spy else None
    time.sleep(max(0.0, interval - (time.monotonic_ns() - begun) / 1e9))
    moment = time.monotonic_ns()
    found = [p for pid in _all(main, others) if (p := read_process(pid, before.get(pid))) is not None]
    found = [replace(one, ppid=main) if one.pid in orphans else one for one in found]
    found = stacks.added(found) if stacks is not None else found
    locks = _of_interest(read_locks(unseen), found)
    outside = [p for pid in _outside(found, locks) if (p := read_process(pid, None)) is not None]
    found += _Spied(one.pid for one in outside).added(outside) if py_spy else outside
    known = sockets(unseen)
    found = [replace(process, descriptors=with_sockets(process.descriptors, known)) for process in found]
    return RunEvidence(
        moment=moment,
        interval=(moment - begun) / 1e9,
        main=main,
        by=os.getpid(),
        host=socket.gethostname(),
        boot=boot_id(),
        stacks="py-spy" if any(thread.stack is not None for one in found for thread in one.threads) else "",
        processes=tuple(_with_copies(process, found) for process in found),
        locks=locks,
        machine=read_machine((line for process in found for line in process.cgroups), main),
        not_seen=unseen.all(),
    )


class _Spied:
    """The stacks that py-spy shows of some processes now."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.why: dict[int, str] = {}
        self.given = spied(filter(is_python, pids), self.why.__setitem__)

    def added(self, found: list[SeenProcess]) -> list[SeenProcess]:
        """Processes with their stacks, and with the lock files that these name."""
        known = (_with_stacks(one, self.given.get(one.pid, {}), self.why.get(one.pid, "")) for one in found)
        return [_with_lock_files(one) for one in known]


def _with_lock_files(process: SeenProcess) -> SeenProcess:
    names = named_lock_files(frame for thread in process.threads for frame in thread.stack or ())
    return replace(process, descriptors=(*process.descriptors, *lock_files(process.pid, names))) if names else process


def _all(main: int, others: Iterable[int]) -> list[int]:
    found = [pid for one in (main, *others) for pid in (one, *descendants_of(one))]
    return list(dict.fromkeys([*found, *_holders_for(set(found)), *_stores_for(found)]))


def _orphans_of(main: int) -> list[int]:
    """The processes that a program has left in the background, as a shell's `&` does: they count as its children.

    They have its process group, and their parent has not. The same is true of what has started the program, and of the
    others of its pipeline, which have the program's parent.
    """
    there = {pid: fields for pid, fields in every_process() if fields[0] not in ENDED}
    if main not in there:
        return []
    parents, above = {pid: int(fields[1]) for pid, fields in there.items()}, [main]
    while above[-1] in parents:
        above.append(parents[above[-1]])
    own = [pid for pid, fields in there.items() if fields[2] == there[main][2]]
    not_left = {*own, *above[1:2]} - {1}  # an orphan's parent is process 1, as the program's may be
    return [pid for pid in own if parents[pid] not in not_left and pid not in above]


def _stores_for(pids: Iterable[int]) -> list[int]:
    """The torchrun that has started one of these processes: it has the store which ranks ask for keys."""
    parents = dict.fromkeys(stat.ppid for pid in pids if (stat := ProcFiles(pid).stat()) is not None)
    return [pid for pid in parents if ProcFiles(pid).text("comm").strip() == "pt_elastic"]


def _holders_for(pids: set[int]) -> list[int]:
    """The processes, here or elsewhere, that hold a file lock which one of these waits for."""
    locks = read_locks(Unseen())
    wanted = {one.number for one in locks if one.waits and one.pid in pids}
    return [one.pid for one in locks if one.number in wanted and not one.waits and one.pid > 0]


def _outside(found: Iterable[SeenProcess], locks: Iterable[FileLock]) -> list[int]:
    """The other processes that own a mutex which one of these waits for, or that lock a file which one has open."""
    owners = [thread.owner for process in found for thread in process.threads if thread.owner > 0]
    pids = [int(ProcFiles(tid).status().get("Tgid", "0")) for tid in owners]
    pids += [one.pid for one in locks if one.mode == "WRITE" and not one.waits]
    return [pid for pid in dict.fromkeys(pids) if pid > 0 and all(pid != process.pid for process in found)]


def _with_copies(process: SeenProcess, found: Iterable[SeenProcess]) -> SeenProcess:
    """A process with what its forks and its parent have in the place of the lock that its main thread waits for."""
    family = [one for one in found if one.pid != process.pid and process.ppid in (one.pid, one.ppid)]
    values = copies(process, [one.pid for one in family if one.command == process.command])
    threads = (replace(one, copies=values) if one.tid == process.pid else one for one in process.threads)
    return replace(process, threads=tuple(threads)) if values else process


def _of_interest(locks: tuple[FileLock, ...], processes: Iterable[SeenProcess]) -> tuple[FileLock, ...]:
    """The locks that these processes hold or wait for, and those of the same files."""
    pids = {process.pid for process in processes}
    files = {(one.device, one.inode) for one in locks if one.pid in pids}
    files |= {(one.device, one.inode) for process in processes for one in process.descriptors if one.inode}
    return tuple(one for one in locks if (one.device, one.inode) in files)


def is_python(pid: int) -> bool:
    """Whether a process runs Python, as far as its program's name says. One that has ended has none."""
    try:
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        program = os.path.basename(next(iter(ProcFiles(pid).command()), ""))
    return "python" in program or (bool(program) and py_spy_program() is None)


def with_stacks(evidence: RunEvidence, stacks: Stacks) -> RunEvidence:
    """Add stacks that some processes gave themselves after they were looked at."""

    def without_reason(process: SeenProcess) -> SeenProcess:
        return replace(process, not_seen=tuple(text for text in process.not_seen if not text.startswith(f"{STACKS}: ")))

    processes = tuple(
        _with_stacks(without_reason(process), stacks[process.pid]) if process.pid in stacks else process
        for process in evidence.processes
    )
    sources = [evidence.stacks] * bool(evidence.stacks) + ["the processes themselves"] * bool(stacks)
    return replace(evidence, processes=processes, stacks=" and ".join(sources))


def _with_stacks(process: SeenProcess, stacks: dict[int, Stack], why: str = "") -> SeenProcess:
    """The process with its threads' stacks. why: there are none, "" = there are."""
    threads = tuple(_with_stack(thread, stacks.get(thread.tid)) for thread in process.threads)
    missing = (f"{STACKS}: {why}",) if why else ()
    return replace(process, threads=threads, not_seen=process.not_seen + missing)


def _with_stack(thread: SeenThread, stack: Stack | None) -> SeenThread:
    if stack is None:
        return thread
    return replace(thread, stack=stack.frames, gil=stack.gil, python_name=stack.thread_name)
