"""Rules for the state of a process, independent of its code: ended, idle, stopped, in a cycle, keeping the GIL."""

from __future__ import annotations

from typing import Final

from minidl.hang.case import RunFacts, spot
from minidl.hang.chain import Chain, Link, gil_starved
from minidl.hang.evidence.graph import Blocked
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.places import USERS, LoaderStep
from minidl.hang.remedies import READ_ALL
from minidl.hang.rules.activity import family_stirs
from minidl.hang.rules.judgement import Judgement, exit_in_words, source_of, state_seen


def worker_is_gone(case: RunFacts, chain: Chain) -> Judgement | None:
    """The loop waits for a worker that has exited, and the chain leads to no other thread."""
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
    """The loop waits for the end of a worker, and the worker waits for a task."""
    if not chain.missing or chain.links[0].place.step not in (LoaderStep.SHUTDOWN, LoaderStep.EXIT):
        return None
    return Judgement(
        HangCause.NOBODY, "is idle; it was not told to end", Sure.POSSIBLE,
        (EvidenceLine(f"{case.name(chain.end.pid)} waits for a task", f"stacks of {chain.end.pid}"),),
        ("it was told to end, and is about to",), "close or exhaust the iterator before the program ends",
    )  # fmt: skip


def nobody_has_it(case: RunFacts, chain: Chain) -> Judgement | None:
    """All workers wait for tasks, and the loop waits for a result: the result was lost, or the task never sent."""
    if not chain.missing:
        return None
    loop = next(link for link in chain.links if link.pid not in case.workers)
    torn = _bytes_waiting(case, loop)
    told = case.told
    if not (told and told.hung) and family_stirs(case, loop.pid):
        return Judgement(HangCause.NONE, "is idle at this moment, but batches arrived between the looks", moves=True)
    task = f"task {told.task}" if told and told.task >= 0 else "the batch"
    named = chain.end.pid in case.workers
    worker = case.name(chain.end.pid) if named else "every worker"
    idle = "is idle" if named else "waits for a batch, and all its workers are idle"
    facts = [
        EvidenceLine(f"{worker} waits for a task, and its feeder has nothing to send", f"stacks of {chain.end.pid}")
    ]
    if torn > 0:
        facts.append(EvidenceLine(f"the result pipe contains {torn} bytes, less than a complete message", "FIONREAD"))
        return Judgement(
            HangCause.TORN_MESSAGE, f"{idle}; the result pipe contains an incomplete message of {torn} bytes",
            Sure.LIKELY, tuple(facts), ("the loop has not read the pipe yet",),
        )  # fmt: skip
    if torn == 0:
        facts.append(EvidenceLine("the result pipe is empty", "FIONREAD"))
    process = case.processes[chain.end.pid]
    most = process.limits.get("open files", 0)
    if named and most and len(process.descriptors) > 0.9 * most:
        idle += f", and has {len(process.descriptors)} of {most} descriptors open: none is left for sending a batch"
    sure = Sure.LIKELY if chain.links[0].place.seen else Sure.POSSIBLE  # a feeder without a stack may be blocked
    return Judgement(
        HangCause.LOST_RESULT, f"{idle}; {task} was lost on its way to the loop", sure,
        tuple(facts), ("the task was never sent (its indices could not be pickled)",),
    )  # fmt: skip


def _bytes_waiting(case: RunFacts, loop: Link) -> int:
    """The number of bytes in the pipe that the loop polls; -1 = unknown."""
    process, thread = case.processes.get(loop.pid), case.thread(loop.pid, loop.tid)
    if process is None or thread is None or thread.syscall is None:
        return -1
    waiting = [one.waiting for fd in thread.syscall.fds if (one := process.descriptor(fd)) is not None]
    return max(waiting, default=-1)


def worker_has_ended(case: RunFacts, chain: Chain) -> Judgement | None:
    """The worker that the loop waits for is dead, and the loop, in the middle of a message, does not notice."""
    end, first = chain.end, chain.links[0]
    if end.wait.kind is not Blocked.ENDED or end is first:
        return None
    how = exit_in_words(case.processes[end.pid].exit_code)
    facts = (EvidenceLine(f"{case.name(end.pid)} is a zombie: {how}", f"/proc/{end.pid}/stat"),)
    part = _bytes_waiting(case, first)
    if first.place.step is LoaderStep.READ or part > 0:
        said = f"the loop reads a message that has not arrived completely; {max(part, 0)} bytes are waiting"
        lying = EvidenceLine(said, "FIONREAD")
        return Judgement(
            HangCause.TORN_MESSAGE, f"has ended ({how}) in the middle of a message; the loop waits for the rest of it",
            Sure.LIKELY, (*facts, lying), ("it ended after a complete message, and the loop will soon notice",),
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
        HangCause.CYCLE, f"is {chain.links[1].wait.words}, which closes a cycle ({ring})",
        Sure.POSSIBLE if given_up else Sure.CERTAIN, facts, helped=given_up,
        also=("one of them has a timeout, which ends the cycle",) if given_up else (),
        fix="" if locks else READ_ALL,
    )  # fmt: skip


def stopped(case: RunFacts, chain: Chain) -> Judgement | None:
    kind, pid = chain.end.wait.kind, chain.end.pid
    if kind is Blocked.TRACED:
        tracer = case.processes[pid].tracer
        return Judgement(
            HangCause.STOPPED, f"is stopped by a debugger (pid {tracer})", facts=(state_seen(case, chain.end),),
            fix=f"continue it in the debugger (pid {tracer})",
        )  # fmt: skip
    if kind is not Blocked.STOPPED:
        return None
    return Judgement(
        HangCause.STOPPED, "is stopped by a signal (state T)", facts=(state_seen(case, chain.end),),
        fix=f"kill -CONT {pid}; find the sender of SIGSTOP (job control, a memory guard, a suspended container)",
    )  # fmt: skip


def uninterruptible(case: RunFacts, chain: Chain) -> Judgement | None:
    if chain.end.wait.kind is not Blocked.UNINTERRUPTIBLE:
        return None
    return Judgement(
        HangCause.UNINTERRUPTIBLE, f"is {chain.end.wait.words} (state D)", facts=(state_seen(case, chain.end),),
        also=("the disk or network file system is slow but may answer",),
    )  # fmt: skip


def keeps_the_gil(case: RunFacts, chain: Chain) -> Judgement | None:
    """Threads of the process wait for the GIL while another one sleeps, or computes in C."""
    pid = chain.end.pid
    starved = gil_starved(case, pid)
    process = case.processes.get(pid)
    if process is None:
        return None
    holders = [t for t in process.threads if t.gil and t.tid not in starved]
    if holders and not starved:  # a thread that sleeps with the GIL blocks all the others
        holders = [t for t in holders if t.slept]
    if not starved and not holders:
        return None
    holder = holders[0] if holders else case.thread(pid, chain.end.tid)
    if holder is None or holder.tid in starved:
        return None
    wait, place = case.wait(pid, holder.tid), case.place(pid, holder.tid)
    inside = f", {wait.words}" if wait is not None else ""
    facts = [EvidenceLine(f"thread {tid} asks in vain for the GIL", f"/proc/{pid}/task/{tid}") for tid in starved]
    if holder.gil:
        facts.append(EvidenceLine(f"thread {holder.tid} holds the GIL", "py-spy"))
    at = f" in {spot(place)}" if spot(place) and holder.tid != chain.end.tid else ""
    return Judgement(
        HangCause.GIL, f"keeps the GIL{at}{inside}", Sure.CERTAIN if holder.gil else Sure.LIKELY, tuple(facts),
    )  # fmt: skip
