"""A look at processes: `collect(main)` -> `RunEvidence`.

Rules of use: it changes nothing in what it looks at, needs no privilege, and takes `interval` seconds and some ms for
each process. py_spy=False: it starts no other program. A process that looks at itself gives its own stacks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from minidl.hang.evidence.descriptors import sockets, with_sockets
from minidl.hang.evidence.machine import read_locks, read_machine, throttled_now
from minidl.hang.evidence.model import FileLock, RunEvidence, SeenProcess, SeenThread
from minidl.hang.evidence.processes import Unseen, first_look, read_process
from minidl.hang.evidence.stacks import Stack, Stacks, spied
from minidl.hang.evidence.stacks import py_spy as py_spy_program
from minidl.process_stat import boot_id, descendants_of

_THEMSELVES = "the processes themselves"
_NO_STACKS = "Python stacks: "


def collect(
    main: int,
    others: Iterable[int] = (),
    *,
    interval: float = 0.5,
    py_spy: bool = True,
    stacks: Stacks | None = None,
) -> RunEvidence:
    """Look twice at a process and at others, with all their children.

    interval: seconds between the looks. stacks: those that the processes gave themselves, which py-spy need not read.
    """
    unseen = Unseen()
    before = {pid: look for pid in _all(main, others) if (look := first_look(pid)) is not None}
    throttled = throttled_now(_cgroups(before))
    time.sleep(interval)
    moment = time.monotonic_ns()
    found = [p for pid in _all(main, others) if (p := read_process(pid, before.get(pid))) is not None]
    known = sockets(unseen.because)
    found = [replace(process, descriptors=with_sockets(process.descriptors, known)) for process in found]
    given = dict(stacks or {})
    wanted = [p.pid for p in found if not p.ended and p.pid not in given and is_python(p)] if py_spy else []
    why: dict[int, str] = {}
    given.update(spied(wanted, why.__setitem__))
    found = [_with_stacks(process, given.get(process.pid, {}), why.get(process.pid, "")) for process in found]
    sources = [name for name, there in ((_THEMSELVES, stacks), ("py-spy", set(given) & set(wanted))) if there]
    return RunEvidence(
        moment=moment,
        interval=interval,
        main=main,
        by=os.getpid(),
        host=socket.gethostname(),
        boot=boot_id(),
        stacks=" and ".join(sources),
        processes=tuple(found),
        locks=_of_interest(read_locks(unseen.because), found),
        machine=read_machine([line for process in found for line in process.cgroups], throttled),
        not_seen=unseen.all(),
    )


def _of_interest(locks: tuple[FileLock, ...], processes: Iterable[SeenProcess]) -> tuple[FileLock, ...]:
    """The locks that these processes hold or wait for, and those of the same files."""
    pids = {process.pid for process in processes}
    files = {(one.device, one.inode) for one in locks if one.pid in pids}
    files |= {(one.device, one.inode) for process in processes for one in process.descriptors if one.inode}
    files |= {(one.device, one.inode) for one in locks if one.waits and one.pid in pids}
    return tuple(one for one in locks if (one.device, one.inode) in files)


def holders_for(pids: Iterable[int]) -> list[int]:
    """The processes, here or elsewhere, that hold a file lock which one of these waits for."""
    locks = read_locks(lambda what, error: None)
    wanted = {one.number for one in locks if one.waits and one.pid in set(pids)}
    return [one.pid for one in locks if one.number in wanted and not one.waits and one.pid > 0]


def is_python(process: SeenProcess) -> bool:
    """Whether a process runs Python, as far as its program's name says."""
    try:
        program = os.path.basename(os.readlink(f"/proc/{process.pid}/exe"))
    except OSError:
        program = os.path.basename(process.command[0]) if process.command else ""
    return "python" in program or py_spy_program() is None


def _all(main: int, others: Iterable[int]) -> list[int]:
    found = [pid for one in (main, *others) for pid in (one, *descendants_of(one))]
    return list(dict.fromkeys([*found, *holders_for(found)]))


def _cgroups(pids: Iterable[int]) -> list[str]:
    lines = []
    for pid in pids:
        try:
            lines += Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError:
            continue
    return lines


def _with_stacks(process: SeenProcess, stacks: dict[int, Stack], why: str) -> SeenProcess:
    threads = tuple(_with_stack(thread, stacks.get(thread.tid)) for thread in process.threads)
    missing = (f"{_NO_STACKS}{why}",) if why else ()
    return replace(process, threads=threads, not_seen=process.not_seen + missing)


def _with_stack(thread: SeenThread, stack: Stack | None) -> SeenThread:
    if stack is None:
        return thread
    return replace(thread, stack=stack.frames, gil=stack.gil, python_name=stack.thread_name)


def with_stacks(evidence: RunEvidence, stacks: Stacks) -> RunEvidence:
    """Add stacks that some processes gave themselves after they were looked at."""
    processes = tuple(
        replace(
            process,
            threads=tuple(_with_stack(thread, stacks[process.pid].get(thread.tid)) for thread in process.threads),
            not_seen=tuple(text for text in process.not_seen if not text.startswith(_NO_STACKS)),
        )
        if process.pid in stacks
        else process
        for process in evidence.processes
    )
    sources = [evidence.stacks] * bool(evidence.stacks) + [_THEMSELVES] * bool(stacks)
    return replace(evidence, processes=processes, stacks=" and ".join(sources))
