"""Rules for waits at the kernel's objects: file locks, pipes, FIFOs, sockets, files, terminals, signals, children.

An event loop and a debugger also wait at one of these.
"""

from __future__ import annotations

import re
from typing import Final

from minidl.hang.case import LoopThread, RunFacts
from minidl.hang.chain import Chain, Link, follow, joins
from minidl.hang.evidence.graph import Blocked, KernelWait
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.places import AT_HOME, USERS, LoaderStep
from minidl.hang.rules.activity import (
    at_work,
    doing_of,
    ended_children,
    is_its_own_other_end,
    receives,
    times_asleep,
)
from minidl.hang.rules.judgement import Judgement, wait_seen
from minidl.tracefile.words import and_joined


def file_lock(case: RunFacts, chain: Chain) -> Judgement | None:
    """The chain ends at a file lock; if the lock's holder waits itself, see `table._held_file_lock`."""
    wait = chain.end.wait
    if wait.kind is not Blocked.FILE_LOCK:
        return None
    facts = holders_seen(case, wait)
    who = and_joined([case.name(one.pid) for one in wait.holders]) or "a process that could not be seen"
    polls = wait.bounded  # the kernel knows of no wait: this lock is a conclusion
    sure = (Sure.CERTAIN if wait.certain and not polls else Sure.LIKELY) if facts else Sure.POSSIBLE
    passed = facts and not wait.certain and not polls
    holds = "took it, and may have passed it on to a child" if passed else "holds it"
    return Judgement(
        HangCause.FILE_LOCK, f"is {wait.words}; {who} {holds}", sure, facts,
        POLLED if polls else () if facts else _ELSEWHERE,
    )  # fmt: skip


def holders_seen(case: RunFacts, wait: KernelWait) -> tuple[EvidenceLine, ...]:
    """The holders of the lock, as evidence."""
    return tuple(EvidenceLine(f"{case.name(one.pid)} {one.why}", "/proc/locks, fdinfo") for one in wait.holders)


_ELSEWHERE: Final = ("a process on another machine (network file system) or in another container holds the lock",)


POLLED: Final = ("it polls for something else, unrelated to the lock",)


def child(case: RunFacts, chain: Chain) -> Judgement | None:
    """The chain ends at a wait for a child; if the child waits itself, see `table._waiting_child`."""
    waiter = chain.end
    if waiter.wait.kind is not Blocked.CHILD:
        return None
    known = and_joined([case.name(one.pid) for one in waiter.wait.holders]) or "it has none left"
    return Judgement(
        HangCause.CHILD, f"waits for its child ({known})", Sure.LIKELY,
        (wait_seen(case, waiter),),
    )  # fmt: skip


def pipe_full(case: RunFacts, chain: Chain) -> Judgement | None:
    """A process writes into a pipe or a FIFO that no process reads.

    Does not apply to a worker that writes into the loader's own result pipe.
    """
    full = next((link for link in chain.links if link.wait.kind is Blocked.PIPE_WRITE), None)
    if full is None or (full.place.step is LoaderStep.WRITE and full.pid in case.workers):
        return None
    sides = (EvidenceLine(f"{case.name(one.pid)} {one.why}", "descriptors") for one in full.wait.holders)
    facts = (wait_seen(case, full), *sides)
    if full is chain.end:
        ends = [_could(case, chain, one.pid) for one in full.wait.holders if one.pid != full.pid]
        what = f"is {full.wait.words}"
        what += f"; {and_joined(ends)} {'have' if len(ends) > 1 else 'has'} its reading end" if ends else ""
    else:
        what = f"has the pipe's reading end but does not read: it is {chain.end.wait.words}"
    return Judgement(HangCause.PIPE_FULL, what, Sure.LIKELY, facts)


def _empty_pipe(case: RunFacts, chain: Chain) -> Link | None:
    """The last link that reads from a pipe of the user's.

    None if a link writes into a full pipe, or if the link reads only to learn that a process has ended.
    """
    if any(link.wait.kind is Blocked.PIPE_WRITE for link in chain.links):
        return None
    reads = [one for one in chain.links if _reads_users_pipe(case, one) and (one is chain.end or not joins(one))]
    return reads[-1] if reads else None


def writer_is_elsewhere(case: RunFacts, chain: Chain) -> Judgement | None:
    """A process reads from a pipe, and the process with its writing end does something else."""
    empty, end = _empty_pipe(case, chain), chain.end
    if empty is None or empty is end:
        return None
    writes = "writes from time to time" if receives(case, empty) else "writes nothing"
    return Judgement(
        HangCause.PIPE_EMPTY, f"has the pipe's writing end and {writes}: it is {end.wait.words}", Sure.LIKELY,
        (wait_seen(case, empty),),
    )  # fmt: skip


def queue_empty(case: RunFacts, chain: Chain) -> Judgement | None:
    """The pipe that no process writes to belongs to a multiprocessing queue."""
    empty = chain.end
    of_queue = any(frame.file.endswith("multiprocessing/queues.py") for frame in empty.place.inside)
    if _empty_pipe(case, chain) is not empty or not of_queue:
        return None
    circle = _all_wait_for_it(case, chain, empty)
    ends = [_could(case, chain, one.pid) for one in empty.wait.holders]
    could = f" ({and_joined(ends)} could)" if ends else ""
    also = ("one of these processes will put it late",) if ends else ()
    if circle:
        names = and_joined([case.name(one.pid) for one in empty.wait.holders])
        could, also = f": only {names} could, and {'they wait' if len(ends) > 1 else 'it waits'} for this process", ()
    return Judgement(
        HangCause.QUEUE_EMPTY, f"waits in Queue.get for an item that no process puts{could}", Sure.LIKELY,
        (wait_seen(case, empty),), (*ended_children(case, "should have put it"), *also),
        alone=circle or _only_itself(case, empty), helped=_writer_works(case, empty),
    )  # fmt: skip


def pipe_empty(case: RunFacts, chain: Chain) -> Judgement | None:
    """A process reads from a pipe or a FIFO that no process writes to. After `queue_empty`: not a queue's pipe."""
    empty = chain.end
    if _empty_pipe(case, chain) is not empty:
        return None
    circle = _all_wait_for_it(case, chain, empty)
    ends = [_could(case, chain, one.pid) for one in empty.wait.holders]
    who = f"; {and_joined(ends)} could write to it" if ends else ""
    who += " but waits for the reader" if circle else ""
    return Judgement(
        HangCause.PIPE_EMPTY, f"is {empty.wait.words}{who}", Sure.LIKELY,
        (wait_seen(case, empty),),
        alone=circle or _only_itself(case, empty), helped=_writer_works(case, empty),
    )  # fmt: skip


def _writer_works(case: RunFacts, link: Link) -> bool:
    return any(at_work(case, one.pid, one.pid) for one in link.wait.holders)


def _only_itself(case: RunFacts, link: Link) -> bool:
    """Whether only the waiter's own process has the other end of a pipe, and has no thread to use it."""
    letter = "w" if link.wait.kind is Blocked.PIPE_READ else "r"
    own = any(
        link.wait.target == f"pipe:{one.inode}" and letter in one.mode for one in case.processes[link.pid].descriptors
    )
    return own and not link.wait.holders and not case.users_threads(link.pid, but=link.tid)


def _all_wait_for_it(case: RunFacts, chain: Chain, link: Link) -> bool:
    """Whether all holders of a pipe's other end wait, in the end, for the waiter, or are idle workers of its loop.

    Another thread of such a process could use that end; so could one whose own wait times out.
    """
    idle = {pid for pid in case.workers_of(chain.links[0].pid).values() if _has_nothing_to_do(case, pid)}
    ends = {one.pid for one in link.wait.holders}
    if not ends or link.wait.bounded or case.users_threads(link.pid, but=link.tid):
        return False
    return all(pid in idle or _leads_to(case, pid, link) for pid in ends)


def _leads_to(case: RunFacts, pid: int, link: Link) -> bool:
    """Whether a process waits for a thread, without a timeout of the user's, and has no other thread of the user's."""
    links = follow(case, LoopThread(pid, pid, case.place(pid, pid))).links
    at = next((i for i, one in enumerate(links) if (one.pid, one.tid) == (link.pid, link.tid)), 0)
    ends = any(one.wait.bounded and one.place.step in USERS for one in links[:at])
    return at > 0 and not ends and not case.users_threads(pid)


def _has_nothing_to_do(case: RunFacts, pid: int) -> bool:
    """Whether a worker waits for a task, and no thread of it has anything to send."""
    sends = {case.place(pid, t.tid).step for t in case.processes[pid].threads} & {LoaderStep.PICKLE, LoaderStep.WRITE}
    return case.idle_worker(pid) and not sends and not case.users_threads(pid)


def _could(case: RunFacts, chain: Chain, pid: int) -> str:
    """The name of a process that has the other end, with the reason why it does not use it, if seen."""
    name, end = case.name(pid), chain.end
    helpers = case.users_threads(pid)
    if doing := doing_of(case, pid, helpers):
        return name + doing
    wait = case.wait(pid, pid)
    if pid == end.pid:
        return f"{name} itself"
    if wait is not None and wait.target and wait.target == end.wait.target:
        return f"{name} [waits for the same]"
    waits = any(pid == link.pid for link in (*chain.before, *chain.links[:-1])) and not helpers
    return f"{name} [waits for it in turn]" if waits else name


def _reads_users_pipe(case: RunFacts, link: Link) -> bool:
    """Whether a thread reads from a pipe that is not the loader's; without a stack, any read without a timeout."""
    if link.wait.kind is not Blocked.PIPE_READ or (link.place.step in AT_HOME and not link.place.interrupted):
        return False
    return (
        link.place.step not in (LoaderStep.NEXT, LoaderStep.IDLE, LoaderStep.READ)
        if link.place.seen
        else not link.wait.bounded
    )


def event_loop(case: RunFacts, chain: Chain) -> Judgement | None:
    """An asyncio event loop that has nothing to run. No stack shows which coroutine waits for what."""
    end = chain.end
    names = [f.name for f in end.place.inside[:3] if "asyncio/" in f.file.replace("\\", "/")]
    if "_run_once" not in names:
        return None
    frame = end.place.users
    asked = f" that {frame.function} runs" if frame is not None else ""
    return Judgement(
        HangCause.NOBODY, f"waits in the asyncio event loop{asked}, which has nothing to run", Sure.POSSIBLE,
        (wait_seen(case, end),),
        ("a coroutine waits for the network, or for an event that no coroutine sets",),
        "print asyncio.all_tasks() from a signal handler (faulthandler does not show them); give awaits a timeout",
        moves=end.pid not in case.workers,
    )  # fmt: skip


def socket(case: RunFacts, chain: Chain) -> Judgement | None:
    end = chain.end
    if end.wait.kind is not Blocked.SOCKET:
        return None
    if _calls_accept(case, end.pid, end.tid):
        return Judgement(
            HangCause.SOCKET, "waits for a client to connect", Sure.LIKELY,
            (wait_seen(case, end),), ("no client is expected to connect",),
            "give accept() a timeout (socket.settimeout), or accept in a thread", helped=end.pid not in case.workers,
        )  # fmt: skip
    who = and_joined([_could(case, chain, one.pid) for one in end.wait.holders])
    own = is_its_own_other_end(end)
    helpers = doing_of(case, end.pid, case.users_threads(end.pid, but=end.tid)) if own else ""
    other = f"the other end: {'its own process' + helpers if own else who or 'none of these processes has it'}"
    if end.wait.holders and not own and all(one.listens for one in end.wait.holders):
        threads = [(one.pid, t.tid) for one in end.wait.holders for t in case.processes[one.pid].threads]
        accepts = any(_calls_accept(case, pid, tid) for pid, tid in threads)
        other = f"{who} should accept it" + ("" if accepts else ", but no thread of it calls accept()")
    times = times_asleep(case, end) if end.wait.bounded else 0
    what = f"is {end.wait.words}" + (f" with a timeout, {times} times in {case.apart:.1f} s: it polls" if times else "")
    return Judgement(
        HangCause.SOCKET, f"{what}; {other}", Sure.LIKELY,
        (wait_seen(case, end),), ("the other end is slow but will answer",),
        helped=any(at_work(case, one.pid, t.tid) for one in end.wait.holders for t in case.users_threads(one.pid)),
    )  # fmt: skip


def _calls_accept(case: RunFacts, pid: int, tid: int) -> bool:
    thread = case.thread(pid, tid)
    return thread is not None and thread.syscall is not None and thread.syscall.name.startswith("accept")


_DEBUGGER: Final = re.compile(r"(^|/)(pdb|bdb|cmd|code)\.py$|/(IPython|ipdb|pudb|debugpy|pydevd\w*)/")


def debugger(case: RunFacts, chain: Chain) -> Judgement | None:
    """A debugger waits for the next command of a person."""
    end = chain.end
    frame = next((f for f in end.place.inside if _DEBUGGER.search(f.file.replace("\\", "/"))), None)
    asleep = end.wait.kind in (Blocked.TERMINAL, Blocked.FILE, Blocked.PIPE_READ, Blocked.SOCKET, Blocked.FIFO)
    if frame is None or not asleep:
        return None
    return Judgement(
        HangCause.TERMINAL, "waits in a debugger for the next command of its user", Sure.LIKELY,
        (EvidenceLine(f"it is in {frame.function}, {frame.file}:{frame.line}", f"stack of {end.pid}"),),
    )  # fmt: skip


_OBJECTS: Final = {
    Blocked.FIFO: (HangCause.FIFO, Sure.CERTAIN, ()),
    Blocked.TERMINAL: (HangCause.TERMINAL, Sure.CERTAIN, ()),
    Blocked.SIGNAL: (HangCause.SIGNAL, Sure.CERTAIN, ()),
    Blocked.FILE: (HangCause.FILE, Sure.LIKELY, ("the disk is slow but will answer",)),
}
"""Waits that the kernel itself names: the cause, its certainty, and alternatives."""


def named_by_the_kernel(case: RunFacts, chain: Chain) -> Judgement | None:
    """A thread opens a FIFO, waits for a person or for a signal, or reads a file."""
    end = chain.end
    if end.wait.kind not in _OBJECTS:
        return None
    cause, sure, also = _OBJECTS[end.wait.kind]
    prompt = " (a debugger's prompt?)" if end.wait.kind is Blocked.TERMINAL else ""
    return Judgement(cause, f"is {end.wait.words}{prompt}", sure, (wait_seen(case, end),), also)
