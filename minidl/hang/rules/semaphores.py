"""Rules for semaphores shared between processes, which have no owner: locks, permits, bounded queues, events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minidl.hang.case import ThreadFacts
from minidl.hang.chain import LOADERS_LOCK, Chain, taken_in
from minidl.hang.evidence.waits import Blocked, semaphore_at
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.places import USERS
from minidl.hang.rules.activity import any_at_work, at_work, ended_children, in_users_code, none_can_end
from minidl.hang.rules.judgement import Judgement, named, place_in_words
from minidl.tracefile.words import and_joined


@dataclass(frozen=True, slots=True)
class _Shared:
    """A wait for a semaphore that processes share; it has no owner.

    pids: the processes that share it. same: those that wait for it, too. could: those that are in the user's code and
    do not wait for it: they may hold it, or set the event that it stands for.
    """

    end: ThreadFacts
    pids: tuple[int, ...]
    same: tuple[int, ...]
    could: tuple[int, ...]

    @property
    def facts(self) -> tuple[EvidenceLine, ...]:
        """The threads that wait for it, as evidence."""
        end, semaphore = self.end, semaphore_at(self.end.process, self.end.call.address)
        value = f", value {semaphore.value}" if semaphore is not None and semaphore.value >= 0 else ""
        own = EvidenceLine(f"{end.name} waits for {end.wait.target}{value}", f"futex of {end.tid}, maps")
        return own, *(EvidenceLine(f"{end.case.name(pid)} waits for the same one", "futex") for pid in self.same)

    def functions(self, file: str) -> list[str]:
        """The functions of a library's file that the waiting thread is in, innermost first."""
        return [frame.function for frame in self.end.place.inside if frame.file.endswith(file)]


def _shared(end: ThreadFacts) -> _Shared | None:
    """The wait of a thread for a semaphore that processes share, without a timeout or repeated."""
    asks_again = end.step in USERS and end.stays
    if end.kind is not Blocked.SEMAPHORE or (end.wait.bounded and not asks_again):
        return None
    pids = tuple(holder.pid for holder in end.wait.holders)
    waiting = {pid for pid in pids for one in end.case.threads(pid) if one.wait.target == end.wait.target}
    users = [pid for pid in pids if in_users_code(end.case, pid)]
    same = tuple(pid for pid in users if pid in waiting)
    return _Shared(end, pids, same, tuple(pid for pid in users if pid not in same))


def full_queue(chain: Chain) -> Judgement | None:
    """The semaphore counts the free places in a bounded queue of multiprocessing."""
    shared = _shared(chain.end)
    if shared is None or not "".join(shared.functions("multiprocessing/queues.py")[:1]).endswith("put"):
        return None
    what = "waits for room in a bounded queue that no process empties"
    helped = any_at_work(chain.end.case, shared.pids)
    return Judgement(HangCause.QUEUE_FULL, what, Sure.LIKELY, shared.facts, helped=helped)


def loaders_queue(chain: Chain) -> Judgement | None:
    """The semaphore is the lock of one of the loader's own queues, which a process holds for one message at a time."""
    shared = _shared(chain.end)
    if shared is None or chain.end.step not in LOADERS_LOCK:
        return None
    what, also = "waits for the lock of the loader's own queue", ("a stopped process holds it",)
    return Judgement(HangCause.DEAD_LOCK_HOLDER, what, Sure.LIKELY, shared.facts, also)


def none_notifies(chain: Chain) -> Judgement | None:
    """The semaphore belongs to an Event or a Condition of multiprocessing."""
    shared = _shared(chain.end)
    waits = shared.functions("multiprocessing/synchronize.py") if shared is not None else []
    if shared is None or not {"Event.wait", "Condition.wait", "wait"} & set(waits):
        return None
    event = "Event.wait" in waits or waits.count("wait") > 1  # Python 3.10 does not name the class
    what = "a shared Event that no process sets" if event else "the notify of a shared Condition"
    joins = any(function.endswith("join") for function in shared.functions("multiprocessing/queues.py"))
    what = "task_done() for each item of a JoinableQueue" if joins else what
    alone = none_can_end(chain.end, shared.pids)
    could = f" ({named(chain.end.case, shared.could)} could)" if shared.could and not alone else ""
    could = "; the processes that share it wait for this one" if alone else could
    return Judgement(
        HangCause.NOBODY, f"waits for {what}{could}", Sure.POSSIBLE if shared.could and not alone else Sure.LIKELY,
        shared.facts, () if event else (_TASK_DONE[0] if joins else "the notify came before the wait",),
        _TASK_DONE[1] if joins else _PREDICATE if alone and not event else
        "find which process should set or notify it, and whether it waits for this process in turn",
        helped=any_at_work(chain.end.case, shared.pids), alone=alone,
    )  # fmt: skip


_PREDICATE: Final = (
    "keep what is waited for in a shared value, and use wait_for(), because a notify before the wait is lost; let no "
    "sample wait for what the loop does after its batch"
)


_TASK_DONE: Final = (
    "a process took an item, and did not call task_done()",
    "call task_done() in a `finally` for each item that get() gave",
)


def held_by_itself(chain: Chain) -> Judgement | None:
    """A lock shared between processes that the waiting thread has taken before, by its own stack."""
    shared, inside = _shared(chain.end), chain.end.place.inside
    asks = next((frame for frame in inside if not frame.file.endswith("multiprocessing/synchronize.py")), None)
    if shared is None or asks is None:
        return None
    lines = ((frame, taken_in(frame, asks, mine=True)) for frame in inside)
    taken = (f"`{line}` in {frame}" for frame, line in lines if line.startswith("with"))
    if not (line := next(taken, "")):
        return None
    fact = EvidenceLine(f"its own stack has taken the lock: {line}", f"stack of {chain.end.pid}")
    waits = "waits for a lock shared between processes that it holds itself"
    if shared.same:
        waits = "waits for a lock or permit shared between processes that it has taken itself; others wait for it, too"
    return Judgement(HangCause.SELF_LOCK, waits, Sure.LIKELY, (*shared.facts, fact), fix=_RELEASE_FIRST)


_RELEASE_FIRST: Final = (
    "release it before you take it again; for a lock, use multiprocessing.RLock; for a semaphore, take one permit for "
    "all that needs it, or give it more"
)


def crossed_locks(chain: Chain) -> Judgement | None:
    """Two processes wait for one lock each, and only the other one may hold that lock."""
    shared = _shared(chain.end)
    if shared is None or len(shared.could) != 1:
        return None
    other = chain.end.case.at(shared.could[0])
    theirs = _shared(other)
    if theirs is None or theirs.could != (chain.end.pid,):
        return None
    return Judgement(
        HangCause.CYCLE,
        f"waits for a lock that only {other.name}, in {place_in_words(other)}, may hold; that one waits for a "
        "lock that only it may hold: a cycle",
        Sure.LIKELY, (*shared.facts, *theirs.facts), ("a process that has died holds both locks",),
    )  # fmt: skip


def shared_lock(chain: Chain) -> Judgement | None:
    """A process that shares the semaphore may hold it: it is in the user's code, or its stack is unknown."""
    shared, case = _shared(chain.end), chain.end.case
    if shared is None:
        return None
    if shared.could:
        could = [
            one for pid in shared.could for one in (case.at(pid), *case.helpers(pid)) if one.place.users is not None
        ]
        doing = (f"{one.name} shares it and is in its own code: {place_in_words(one)}" for one in could)
        return Judgement(
            HangCause.SEMAPHORE,
            f"waits for a lock shared between processes; {named(case, shared.could)} may hold it", Sure.POSSIBLE,
            (*shared.facts, *(EvidenceLine(text, "stack") for text in doing)), ("a permit was never given back",),
            helped=any_at_work(case, shared.could),
        )  # fmt: skip
    if all(case.at(pid).place.seen for pid in shared.pids):
        return None
    return Judgement(
        HangCause.SEMAPHORE, "waits for a lock or permit shared between processes", Sure.POSSIBLE, shared.facts,
        ("another of these processes holds it", "a permit was never given back"),
        "install py-spy: the stacks of the processes that share it show which of them holds it",
    )  # fmt: skip


_WITH_ITS_HOLDER: Final = "a process that has died held it (such a lock has no owner)"


_BY_BATCHES: Final = (
    "release it where the sample is read: permits that the loop gives back after a batch are all in prefetched batches "
    "sooner or later; of several loaders give each a semaphore of its own"
)


_BY_A_THREAD: Final = "find out whether that thread releases it, and when"


def permit_lost(chain: Chain) -> Judgement | None:
    """All processes that share the semaphore are seen, and none could release it: see `shared_lock`."""
    shared, case = _shared(chain.end), chain.end.case
    if shared is None:
        return None
    idle = named(case, [pid for pid in shared.pids if pid not in shared.same])
    seen = (EvidenceLine(f"{idle} share it, and are not in code that could release it", "stacks"),) if idle else ()
    keeps = chain.first.pid in shared.pids and chain.first is not chain.end
    held = f"{chain.first.name} holds it while waiting for the batch" if keeps else ""
    gone = ended_children(case, "held it", killed=True)
    also = [held] * bool(held) if gone else [_WITH_ITS_HOLDER, *ended_children(case, "held it")]
    later = [one for pid in shared.pids for one in case.helpers(pid) if at_work(one)]
    lost = f": perhaps {gone[0]}" if gone else f": it was lost, or {held}" if held else ""
    lost = f"; {and_joined([f'thread {one.label} of {one.name}' for one in later], 2)} may do so" if later else lost
    return Judgement(
        HangCause.PERMIT_LOST,
        f"waits for a lock or permit shared between processes that none of them is about to release{lost}",
        Sure.LIKELY, (*shared.facts, *seen), (*also, "the program never releases it"),
        _BY_A_THREAD if later else _BY_BATCHES if keeps and not gone else "", helped=any_at_work(case, shared.pids),
    )  # fmt: skip
