"""Rules for semaphores shared between processes, which have no owner: locks, permits, bounded queues, events."""

from __future__ import annotations

from dataclasses import dataclass

from minidl.hang.case import RunFacts
from minidl.hang.chain import Chain, Link
from minidl.hang.evidence.graph import Blocked, semaphore_at
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.places import USERS, LoaderStep
from minidl.hang.rules.activity import at_work, ended_children, in_users_code, same_place
from minidl.hang.rules.judgement import Judgement, place_in_words
from minidl.tracefile.words import and_joined


@dataclass(frozen=True, slots=True)
class _Shared:
    """A wait for a semaphore that processes share; it has no owner.

    pids: the processes that share it. same: those that wait for it, too. could: those that are in the user's code and
    do not wait for it: they may hold it, or set the event that it stands for.
    """

    end: Link
    pids: tuple[int, ...]
    same: tuple[int, ...]
    could: tuple[int, ...]
    facts: tuple[EvidenceLine, ...]


def _shared(case: RunFacts, chain: Chain) -> _Shared | None:
    """The wait at the chain's end for a semaphore that processes share, without a timeout or repeated."""
    end = chain.end
    if end.wait.kind is not Blocked.SEMAPHORE or (end.wait.bounded and not _asks_again(case, end)):
        return None
    process, thread = case.processes[end.pid], case.thread(end.pid, end.tid)
    semaphore = semaphore_at(process, thread.syscall.address) if thread is not None and thread.syscall else None
    pids = tuple(holder.pid for holder in end.wait.holders)
    users = [pid for pid in pids if in_users_code(case, pid)]
    same = tuple(pid for pid in users if _waits_for_same(case, pid, end.wait.target))
    value = f", value {semaphore.value}" if semaphore is not None and semaphore.value >= 0 else ""
    facts = [EvidenceLine(f"{case.name(end.pid)} waits for {end.wait.target}{value}", f"futex of {end.tid}, maps")]
    facts += [EvidenceLine(f"{case.name(pid)} waits for the same one", "futex") for pid in same]
    return _Shared(end, pids, same, tuple(pid for pid in users if pid not in same), tuple(facts))


def _asks_again(case: RunFacts, end: Link) -> bool:
    """Whether a thread waits in the user's code with a timeout, again and again."""
    return end.place.step in USERS and same_place(case, end)


def _waits_for_same(case: RunFacts, pid: int, target: str) -> bool:
    return any(
        (wait := case.wait(pid, t.tid)) is not None and wait.target == target for t in case.processes[pid].threads
    )


def full_queue(case: RunFacts, chain: Chain) -> Judgement | None:
    """The semaphore counts the free places in a bounded queue of multiprocessing."""
    shared = _shared(case, chain)
    if shared is None:
        return None
    frames = [f for f in shared.end.place.inside if f.file.endswith("multiprocessing/queues.py")]
    if not frames or not frames[0].function.endswith("put"):
        return None
    return Judgement(
        HangCause.QUEUE_FULL, "waits for room in a bounded queue that no process empties", Sure.LIKELY, shared.facts,
    )  # fmt: skip


def loaders_queue(case: RunFacts, chain: Chain) -> Judgement | None:
    """The semaphore is the lock of one of the loader's own queues, which a process holds for one message at a time."""
    shared = _shared(case, chain)
    if shared is None or shared.end.place.step not in (LoaderStep.WRITE, LoaderStep.IDLE, LoaderStep.READ):
        return None
    return Judgement(
        HangCause.DEAD_LOCK_HOLDER, "waits for the lock of the loader's own queue", Sure.LIKELY, shared.facts,
        ("a stopped process holds it",),
    )  # fmt: skip


def nobody_notifies(case: RunFacts, chain: Chain) -> Judgement | None:
    """The semaphore belongs to an Event or a Condition of multiprocessing."""
    shared = _shared(case, chain)
    if shared is None:
        return None
    waits = [f.function for f in shared.end.place.inside if f.file.endswith("multiprocessing/synchronize.py")]
    if not any(name in ("Event.wait", "Condition.wait", "wait") for name in waits):
        return None
    event = "Event.wait" in waits or waits.count("wait") > 1  # Python 3.10 does not name the class
    named = "a shared Event that no process sets" if event else "the notify of a shared Condition"
    could = f" ({and_joined([case.name(pid) for pid in shared.could])} could)" if shared.could else ""
    return Judgement(
        HangCause.NOBODY, f"waits for {named}{could}", Sure.POSSIBLE if could else Sure.LIKELY, shared.facts,
        () if event else ("the notify came before the wait",),
        "find which process should set or notify it, and whether that waits for this worker; give the wait a timeout",
        helped=any(at_work(case, pid, pid) for pid in shared.could),
    )  # fmt: skip


def crossed_locks(case: RunFacts, chain: Chain) -> Judgement | None:
    """Two processes wait for one lock each, and only the other one may hold that lock."""
    shared = _shared(case, chain)
    if shared is None or len(shared.could) != 1:
        return None
    pid = shared.could[0]
    other = Link(pid, pid, case.place(pid, pid), case.wait(pid, pid) or shared.end.wait)
    theirs = _shared(case, Chain((other,)))
    if theirs is None or theirs.could != (shared.end.pid,):
        return None
    return Judgement(
        HangCause.CYCLE,
        f"waits for a lock that only {case.name(pid)}, in {place_in_words(case, pid)}, may hold; that one waits for a "
        "lock that only it may hold: a cycle",
        Sure.LIKELY, (*shared.facts, *theirs.facts), ("a process that has died holds both locks",),
    )  # fmt: skip


def shared_lock(case: RunFacts, chain: Chain) -> Judgement | None:
    """A process that shares the semaphore may hold it: it is in the user's code, or its stack is unknown."""
    shared = _shared(case, chain)
    if shared is None:
        return None
    if shared.could:
        names = and_joined([case.name(pid) for pid in shared.could])
        theirs = (
            EvidenceLine(f"{case.name(pid)} shares it and is in its own code: {place_in_words(case, pid)}", "stack")
            for pid in shared.could
        )
        return Judgement(
            HangCause.SEMAPHORE, f"waits for a lock shared between processes; {names} may hold it", Sure.POSSIBLE,
            (*shared.facts, *theirs), ("a permit was never given back",),
            helped=any(at_work(case, pid, pid) for pid in shared.could),
        )  # fmt: skip
    if all(case.place(pid, pid).seen for pid in shared.pids):
        return None
    return Judgement(
        HangCause.SEMAPHORE, "waits for a lock or permit shared between processes", Sure.POSSIBLE, shared.facts,
        ("another of these processes holds it", "a permit was never given back"),
        "install py-spy: the stacks of the processes that share it show which of them holds it",
    )  # fmt: skip


def permit_lost(case: RunFacts, chain: Chain) -> Judgement | None:
    """All processes that share the semaphore are seen, and none could release it: see `shared_lock`."""
    shared = _shared(case, chain)
    if shared is None:
        return None
    idle = and_joined([case.name(pid) for pid in shared.pids if pid not in shared.same])
    waits = [case.name(one.pid) for one in chain.links[:1] if one.pid in shared.pids and one is not shared.end]
    seen = (EvidenceLine(f"{idle} share it, and are not in code that could release it", "stacks"),) if idle else ()
    held = f": it was lost, or {and_joined(waits)} holds it while waiting for the batch" if waits else ""
    return Judgement(
        HangCause.PERMIT_LOST,
        f"waits for a lock or permit shared between processes that none of them is about to release{held}",
        Sure.LIKELY, (*shared.facts, *seen),
        (
            *(ended_children(case, "held it") or ("a process that has died held it (such a lock has no owner)",)),
            "the program never releases it",
        ),
        helped=any(
            at_work(case, pid, one.tid)
            for pid in shared.pids
            for one in case.users_threads(pid)
            if case.place(pid, one.tid).users is not None
        ),
    )  # fmt: skip
