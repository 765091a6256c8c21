"""Rules of a process's state, whatever its code is: it has ended, is idle or stopped, is in a circle, keeps the GIL."""

from __future__ import annotations

from typing import Final

from minidl.doctor.case import RunFacts, spot
from minidl.doctor.chain import Chain, Link, gil_starved
from minidl.doctor.finding import EvidenceLine, HangCause, Sure
from minidl.doctor.places import USERS, LoaderStep
from minidl.doctor.remedies import READ_ALL
from minidl.doctor.rules.activity import family_stirs
from minidl.doctor.rules.judgement import Judgement, exit_in_words, source_of, state_seen
from minidl.evidence.graph import Blocked


def worker_is_gone(case: RunFacts, chain: Chain) -> Judgement | None:
    """The loop waits for a worker that has exited, and no other thread of the run can be followed to."""
    loop, place = chain.end, chain.end.place
    waits = place.step in (LoaderStep.NEXT, LoaderStep.HAND_OVER, LoaderStep.READ) and not place.interrupted
    if len(chain.links) > 1 or not waits:
        return None
    told = case.told
    number = told.worker if told and told.worker >= 0 else place.worker
    name, workers = case.processes[loop.pid].name, case.workers_of(loop.pid)
    ended = [p for p in case.now.processes if p.ended and p.ppid == loop.pid and p.name == name]  # a fork of it
    starts = told is not None and number in told.unheard
    if not ended and (number < 0 or number in workers or not workers or starts):
        return None
    facts = tuple(
        EvidenceLine(f"pid {p.pid} has ended ({exit_in_words(p.exit_code)}), unreaped", f"/proc/{p.pid}") for p in ended
    )
    which = f"worker {number}" if number >= 0 else "a worker"
    how = f" ({exit_in_words(ended[0].exit_code)})" if ended else ""
    return Judgement(HangCause.DIED, f"waits for {which}, which has ended{how}", Sure.LIKELY, facts)


def idle_and_joined(case: RunFacts, chain: Chain) -> Judgement | None:
    """The loop waits for the end of a worker, and that waits for a task."""
    if not chain.missing or chain.links[0].place.step not in (LoaderStep.SHUTDOWN, LoaderStep.EXIT):
        return None
    return Judgement(
        HangCause.NOBODY, "is idle; nothing has told it to end", Sure.POSSIBLE,
        (EvidenceLine(f"{case.name(chain.end.pid)} waits for a task", f"stacks of {chain.end.pid}"),),
        ("it was told, and is about to end",), "close the iterator, or end it, before the program ends",
    )  # fmt: skip


def nobody_has_it(case: RunFacts, chain: Chain) -> Judgement | None:
    """All workers wait for tasks, and the loop waits for a result: it was lost on its way, or never sent."""
    if not chain.missing:
        return None
    loop = next(link for link in chain.links if link.pid not in case.workers)
    torn = _bytes_waiting(case, loop)
    told = case.told
    if not (told and told.hung) and family_stirs(case, loop.pid):
        return Judgement(HangCause.NONE, "is idle at this moment, and batches came between the looks", moves=True)
    task = f"task {told.task}" if told and told.task >= 0 else "the batch"
    named = chain.end.pid in case.workers
    worker = case.name(chain.end.pid) if named else "every worker"
    idle = "is idle" if named else "waits for a batch, and all its workers are idle"
    facts = [
        EvidenceLine(f"{worker} waits for a task, and its feeder has nothing to send", f"stacks of {chain.end.pid}")
    ]
    if torn > 0:
        facts.append(EvidenceLine(f"{torn} bytes lie in the result pipe and make no whole message", "FIONREAD"))
        return Judgement(
            HangCause.TORN_MESSAGE, f"{idle}; {torn} bytes of a message lie in the result pipe, unfinished",
            Sure.LIKELY, tuple(facts), ("the loop has not looked yet",),
        )  # fmt: skip
    if torn == 0:
        facts.append(EvidenceLine("the result pipe is empty", "FIONREAD"))
    process = case.processes[chain.end.pid]
    most = process.limits.get("open files", 0)
    if named and most and len(process.descriptors) > 0.9 * most:
        idle += f", and has {len(process.descriptors)} of its {most} descriptors open: none is left to send a batch by"
    sure = Sure.LIKELY if chain.links[0].place.seen else Sure.POSSIBLE  # a feeder may be stuck in what can't be seen
    return Judgement(
        HangCause.LOST_RESULT, f"{idle}; {task} was lost on its way to the loop", sure,
        tuple(facts), ("the task was never sent (its indices could not be pickled)",),
    )  # fmt: skip


def _bytes_waiting(case: RunFacts, loop: Link) -> int:
    """Bytes in the pipe that the loop polls; -1 = unknown."""
    process, thread = case.processes.get(loop.pid), case.thread(loop.pid, loop.tid)
    if process is None or thread is None or thread.syscall is None:
        return -1
    waiting = [one.waiting for fd in thread.syscall.fds if (one := process.descriptor(fd)) is not None]
    return max(waiting, default=-1)


def worker_has_ended(case: RunFacts, chain: Chain) -> Judgement | None:
    """The worker that the loop waits for is dead, and the loop does not notice: it is in the middle of a message."""
    end, first = chain.end, chain.links[0]
    if end.wait.kind is not Blocked.ENDED or end is first:
        return None
    how = exit_in_words(case.processes[end.pid].exit_code)
    facts = (EvidenceLine(f"{case.name(end.pid)} is a zombie: {how}", f"/proc/{end.pid}/stat"),)
    part = _bytes_waiting(case, first)
    if first.place.step is LoaderStep.READ or part > 0:
        lying = EvidenceLine(f"the loop reads a message that has not come whole; {max(part, 0)} bytes wait", "FIONREAD")
        return Judgement(
            HangCause.TORN_MESSAGE, f"has ended ({how}) in the middle of a message, whose rest the loop waits for",
            Sure.LIKELY, (*facts, lying), ("it ended after a whole message, and the loop is about to notice",),
        )  # fmt: skip
    return Judgement(HangCause.DIED, f"has ended ({how})", Sure.LIKELY, facts)


_LOCKS: Final = frozenset({Blocked.FILE_LOCK, Blocked.SEMAPHORE, Blocked.MUTEX, Blocked.FUTEX})


def cycle(case: RunFacts, chain: Chain) -> Judgement | None:
    if not chain.cycle:
        return None
    links = chain.links[chain.back :]
    ring = " -> ".join(case.name(link.pid) for link in links)
    said = links[:-1].index(chain.links[1]) if chain.links[1] in links[:-1] else -1
    ring += "".join(f"; {case.name(one.pid)} is {one.wait.words}" for i, one in enumerate(links[:-1]) if i != said)
    given_up = any(link.wait.bounded and link.place.step in USERS for link in links)  # the loader's own are polls
    locks = any(link.wait.kind in _LOCKS for link in links)
    facts = tuple(
        EvidenceLine(f"{case.name(link.pid)} is {link.wait.words}", source_of(case, link)) for link in chain.links[:-1]
    )
    return Judgement(
        HangCause.CYCLE, f"is {chain.links[1].wait.words}, which closes a circle ({ring})",
        Sure.POSSIBLE if given_up else Sure.CERTAIN, facts, helped=given_up,
        also=("one of them has a timeout, which ends the circle",) if given_up else (),
        fix="" if locks else READ_ALL,
    )  # fmt: skip


def stopped(case: RunFacts, chain: Chain) -> Judgement | None:
    kind, pid = chain.end.wait.kind, chain.end.pid
    if kind is Blocked.TRACED:
        tracer = case.processes[pid].tracer
        return Judgement(
            HangCause.STOPPED, f"is stopped by a debugger (pid {tracer})", facts=(state_seen(case, chain.end),),
            fix=f"let the debugger (pid {tracer}) continue it",
        )  # fmt: skip
    if kind is not Blocked.STOPPED:
        return None
    return Judgement(
        HangCause.STOPPED, "is stopped by a signal (state T)", facts=(state_seen(case, chain.end),),
        fix=f"kill -CONT {pid}; find who sent SIGSTOP (a job control, a memory guard, a suspended container)",
    )  # fmt: skip


def uninterruptible(case: RunFacts, chain: Chain) -> Judgement | None:
    if chain.end.wait.kind is not Blocked.UNINTERRUPTIBLE:
        return None
    return Judgement(
        HangCause.UNINTERRUPTIBLE, f"is {chain.end.wait.words} (state D)", facts=(state_seen(case, chain.end),),
        also=("a slow disk or network file system, which may still answer",),
    )  # fmt: skip


def keeps_the_gil(case: RunFacts, chain: Chain) -> Judgement | None:
    """Threads of the process ask for the interpreter's lock in vain while another one sleeps, or computes in C."""
    pid = chain.end.pid
    starved = gil_starved(case, pid)
    process = case.processes.get(pid)
    if process is None:
        return None
    holders = [t for t in process.threads if t.gil and t.tid not in starved]
    if holders and not starved:  # one that sleeps while it holds the lock keeps it from all the others
        holders = [t for t in holders if t.slept]
    if not starved and not holders:
        return None
    holder = holders[0] if holders else case.thread(pid, chain.end.tid)
    if holder is None or holder.tid in starved:
        return None
    wait, place = case.wait(pid, holder.tid), case.place(pid, holder.tid)
    inside = f", {wait.words}" if wait is not None else ""
    facts = [EvidenceLine(f"thread {tid} asks for the GIL in vain", f"/proc/{pid}/task/{tid}") for tid in starved]
    if holder.gil:
        facts.append(EvidenceLine(f"thread {holder.tid} holds the interpreter's lock", "py-spy"))
    at = f" in {spot(place)}" if spot(place) and holder.tid != chain.end.tid else ""
    return Judgement(
        HangCause.GIL, f"keeps the GIL{at}{inside}", Sure.CERTAIN if holder.gil else Sure.LIKELY, tuple(facts),
    )  # fmt: skip
