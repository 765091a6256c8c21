"""Rules for the state of a process, independent of its code: ended, idle, in a cycle, keeping the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from minidl.hang.case import ThreadFacts, spot
from minidl.hang.chain import OWNED, Chain, gil_starved
from minidl.hang.evidence.waits import Blocked
from minidl.hang.finding import EvidenceLine, HangCause, Sure, detail, whole
from minidl.hang.places import USERS, LoaderStep
from minidl.hang.remedies import BY_CAUSE, IMPORTED_AGAIN, READ_ALL, SHARED_MEMORY
from minidl.hang.rules.activity import family_stirs
from minidl.hang.rules.judgement import Judgement, exit_in_words, wait_seen
from minidl.tracefile.words import size

_WAITS: Final = (LoaderStep.NEXT, LoaderStep.HAND_OVER, LoaderStep.READ)


def worker_is_gone(chain: Chain) -> Judgement | None:
    """The loop waits for a worker that has exited, and the chain leads to no other thread."""
    loop, case = chain.end, chain.end.case
    if loop is not chain.first or loop.step not in _WAITS or loop.place.interrupted:
        return None
    number = case.told.worker if case.told.worker >= 0 else loop.place.worker
    ended = [p for p in case.now.processes if p.ended and (p.ppid, p.name) == (loop.pid, loop.process.name)]  # its fork
    if not ended and not _is_missing(loop, number):
        return None
    ends = [(one.pid, exit_in_words(one.exit_code)) for one in ended]
    facts = tuple(EvidenceLine(f"pid {pid} has ended ({how}), unreaped", f"/proc/{pid}") for pid, how in ends)
    which = f"worker {number}" if number >= 0 else "a worker"
    how = f" ({ends[0][1]})" if ends else ""
    return Judgement(HangCause.DIED, f"waits for {which}, which has ended{how}", Sure.LIKELY, facts)


def _is_missing(loop: ThreadFacts, number: int) -> bool:
    """Whether a loop has workers, but not this one, and it does not start."""
    workers = loop.case.workers_of(loop.pid)
    return number >= 0 and bool(workers) and number not in workers and number not in loop.case.told.unheard


def idle_and_joined(chain: Chain) -> Judgement | None:
    """The loop waits for the end of a worker, and the worker waits for a task."""
    if not chain.missing or chain.first.step not in (LoaderStep.SHUTDOWN, LoaderStep.EXIT):
        return None
    return Judgement(
        HangCause.NOBODY, "is idle; it was not told to end", Sure.POSSIBLE,
        (EvidenceLine(f"{chain.end.name} waits for a task", f"stacks of {chain.end.pid}"),),
        ("it was told to end, and is about to",), "close or exhaust the iterator before the program ends",
    )  # fmt: skip


def none_has_it(chain: Chain) -> Judgement | None:
    """All workers wait for tasks, and the loop waits for a result: the result was lost, or the task never sent."""
    if not chain.missing:
        return None
    end, told = chain.end, chain.end.case.told
    loop = next(link for link in chain.links if not link.in_worker)
    if not told.hung and family_stirs(end.case, loop.pid):
        return Judgement(HangCause.NONE, "is idle at this moment, but batches arrived between the looks", moves=True)
    worker = end.name if end.in_worker else "every worker"
    idle = "is idle" if end.in_worker else "waits for a batch, and all its workers are idle"
    facts = [EvidenceLine(f"{worker} waits for a task, and its feeder has nothing to send", f"stacks of {end.pid}")]
    torn = _bytes_waiting(loop)
    if torn > 0:
        rest = EvidenceLine(f"the result pipe contains {torn} bytes, less than a complete message", "FIONREAD")
        return Judgement(
            HangCause.TORN_MESSAGE, f"{idle}; the result pipe contains an incomplete message of {torn} bytes",
            Sure.LIKELY, (*facts, rest), ("the loop has not read the pipe yet",),
        )  # fmt: skip
    facts += [EvidenceLine("the result pipe is empty", "FIONREAD")] if torn == 0 else []
    free, most = end.case.now.machine.shm_free, end.case.now.machine.shm_size
    small, full = 0 <= free < 64 << 20, 0 <= free < min(64 << 20, most / 2)  # a container has 64 MiB by default
    left = f"/dev/shm has {size(free)} of {size(most)} left"
    lost = f"{_batch(loop)} was lost on its way to the loop{f': {left}' * full}"
    sure = Sure.LIKELY if chain.first.place.seen else Sure.POSSIBLE  # a feeder without a stack may be blocked
    return Judgement(
        HangCause.LOST_RESULT, f"{idle}{_without_descriptors(end)}; {lost}", sure, tuple(facts),
        (*([f"it did not fit: {left}"] if small and not full else []), _NEVER_SENT),
        f"{SHARED_MEMORY}; then {BY_CAUSE[HangCause.LOST_RESULT]}" if full else "",
    )  # fmt: skip


def _batch(loop: ThreadFacts) -> str:
    """The lost batch: its task, or the number by which the program itself counts (enumerate) the last one before it."""
    frame, task = loop.place.caller, loop.case.told.task
    name = frame.source.removeprefix("for ").partition(",")[0] if frame and "enumerate(" in frame.source else ""
    number = frame.variables.get(name, "") if frame else ""
    batch = f"the batch after {name} = {number}" if number.isdecimal() else "the batch"
    return f"task {task}" if task >= 0 else batch


_NEVER_SENT: Final = "the task was never sent (its indices could not be pickled)"


def _without_descriptors(worker: ThreadFacts) -> str:
    """Say that a worker has no descriptor left."""
    has, most = len(worker.process.descriptors), worker.process.limits.get("open files", 0)
    if not worker.in_worker or not most or has <= 0.9 * most:
        return ""
    return f", and has {has} of {most} descriptors open: none is left for sending a batch"


def _bytes_waiting(loop: ThreadFacts) -> int:
    """The number of bytes in the pipe that the loop polls; -1 = unknown."""
    return max((one.waiting for fd in loop.call.fds if (one := loop.process.descriptor(fd)) is not None), default=-1)


def worker_has_ended(chain: Chain) -> Judgement | None:
    """The worker that the loop waits for is dead, and the loop, in the middle of a message, does not notice."""
    end, first = chain.end, chain.first
    if end.kind is not Blocked.ENDED or end is first:
        return None
    how = exit_in_words(end.process.exit_code)
    facts = (EvidenceLine(f"{end.name} is a zombie: {how}", f"/proc/{end.pid}/stat"),)
    part = _bytes_waiting(first)
    if first.step is not LoaderStep.READ and part <= 0:
        return Judgement(HangCause.DIED, f"has ended ({how})", Sure.LIKELY, facts)
    said = f"the loop reads a message that has not arrived completely; {max(part, 0)} bytes are waiting"
    return Judgement(
        HangCause.TORN_MESSAGE, f"has ended ({how}) in the middle of a message; the loop waits for the rest of it",
        Sure.LIKELY, (*facts, EvidenceLine(said, "FIONREAD")),
        ("it ended after a complete message, and the loop will soon notice",),
    )  # fmt: skip


_LOCKS: Final = frozenset({Blocked.FILE_LOCK, Blocked.SEMAPHORE, Blocked.MUTEX, Blocked.FUTEX})


def cycle(chain: Chain) -> Judgement | None:
    if not chain.cycle:
        return None
    links, second = chain.links[chain.back :], chain.links[1]
    further = (link for link in links[:-1] if link is not second)  # the sentence has the second one's wait already
    ring = " -> ".join(link.name for link in links)
    ring += "".join(f"; {link.name} is {link.wait.words}" for link in further)
    holds = f"; {chain.links[2].name} holds it" if second.kind in OWNED else ""
    given_up = any(link.wait.bounded and link.step in USERS for link in links)  # the loader's own are polls
    return Judgement(
        HangCause.CYCLE, f"is {second.wait.words}{holds}, which closes a cycle" + detail(f" ({whole(ring)})"),
        Sure.POSSIBLE if given_up else Sure.CERTAIN,
        tuple(wait_seen(link, f"{link.name} is ") for link in chain.links[:-1]),
        ("one of them has a timeout, which ends the cycle",) if given_up else (),
        _ring_remedy(links), helped=given_up,
    )  # fmt: skip


def _ring_remedy(links: Sequence[ThreadFacts]) -> str:
    """The remedy for threads that wait for one another; "" = that for locks."""
    if any(link.step is LoaderStep.IMPORT for link in links):
        return IMPORTED_AGAIN
    if any(link.kind is Blocked.FILE_LOCK for link in links) and links[0].case.is_loop(links[0].pid):
        return "let the loop hold no lock while it waits for a batch: commit, or release it, before the loop"
    return "" if any(link.kind in _LOCKS for link in links) else READ_ALL


def keeps_the_gil(chain: Chain) -> Judgement | None:
    """Threads of the process wait for the GIL while another one sleeps, or computes in C."""
    end, starved = chain.end, gil_starved(chain.end.case, chain.end.pid)
    have_it = [one for one in end.case.threads(end.pid) if one.seen.gil and one.tid not in starved]
    asleep = [one for one in have_it if one.seen.slept]  # a thread that sleeps with the GIL blocks all the others
    if not starved and not asleep:
        return None
    holder = next(iter(have_it if starved else asleep), end)
    if holder.tid in starved:
        return None
    facts = [EvidenceLine(f"thread {tid} asks in vain for the GIL", f"/proc/{end.pid}/task/{tid}") for tid in starved]
    facts += [EvidenceLine(f"thread {holder.tid} holds the GIL", "py-spy")] if holder.seen.gil else []
    at = f" in {spot(holder.place)}" if spot(holder.place) and holder.tid != end.tid else ""
    sure = Sure.CERTAIN if holder.seen.gil else Sure.LIKELY
    return Judgement(HangCause.GIL, f"keeps the GIL{at}, {holder.wait.words}", sure, tuple(facts))
