"""Rules for waits within one process: locks of Python and of C libraries, threads that a fork did not copy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from minidl.hang.case import ThreadFacts
from minidl.hang.chain import Chain, pool_of, waiting_in
from minidl.hang.evidence.waits import Blocked
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.places import LoaderStep, library
from minidl.hang.remedies import AFTER_FORK
from minidl.hang.rules.activity import at_work, doing_of, helpers_of_parent
from minidl.hang.rules.judgement import Judgement, waits_of
from minidl.tracefile.words import and_joined


def _is_forked_main(end: ThreadFacts) -> bool:
    """Whether it is the main thread of a forked worker: another thread was started after the fork."""
    return end.in_worker and end.is_main and end.case.forked(end.pid) is True


def _no_other(end: ThreadFacts, so: str = "") -> EvidenceLine:
    return EvidenceLine(f"no other thread of its process runs the program's code{so}", f"threads of {end.pid}")


# --- Events, conditions, queues and pools -----------------------------------------------------------------------------
def thread_is_missing(chain: Chain) -> Judgement | None:
    """A thread waits for another thread, but its process, made by a fork, has none that could answer."""
    end, waiting = chain.end, waiting_in(chain.end)
    if not waiting or end.case.helpers(end.pid, but=end.tid) or not _is_forked_main(end):
        return None
    pooled = any(re.search(r"concurrent/futures|multiprocessing/pool", frame.file) for frame in end.place.inside)
    facts, parents = [_no_other(end)], [thread.label for thread in helpers_of_parent(end)]
    if parents:
        has = f"the parent process has the threads {and_joined(parents)}, which a fork does not copy"
        facts.append(EvidenceLine(has, "threads"))
    if not parents and not pooled:
        return None
    return Judgement(
        HangCause.MISSING_THREAD, f"waits in {waiting} for a thread that the fork did not copy",
        Sure.CERTAIN if parents and pooled else Sure.LIKELY, tuple(facts),
        () if pooled else ("no thread would answer without the fork either",),
    )  # fmt: skip


def pool_does_nothing(chain: Chain) -> Judgement | None:
    """A thread waits for the result of a pool, none of whose threads and processes has a task."""
    end, pool = chain.end, pool_of(chain.end)
    if not pool or any(works for _, works in pool):
        return None
    names = and_joined(list(dict.fromkeys(thread.name for thread, _ in pool)))
    return Judgement(
        HangCause.NOBODY, f"waits in {waiting_in(end)} for the result of an idle pool", Sure.LIKELY,
        (EvidenceLine(f"{names} waits for a task of the pool", "stacks"),),
        ("the pool never began the task, or the result is on its way",),
        "find what killed the process that had the task: a multiprocessing.Pool silently starts another one; "
        "ProcessPoolExecutor raises BrokenProcessPool",
    )  # fmt: skip


_CAUSES: Final = (
    (r"Queue\.put", HangCause.QUEUE_FULL), (r"Queue\.get|.*SimpleQueue", HangCause.QUEUE_EMPTY), ("", HangCause.NOBODY),
)  # fmt: skip
"""The cause by the function that waits: a full queue, an empty one, or a peer that does not answer."""


def _cause_of(waiting: str) -> HangCause:
    return next(cause for pattern, cause in _CAUSES if re.match(pattern, waiting))


def thread_answers_late(chain: Chain) -> Judgement | None:
    """A thread waits for an event, a condition or a queue of its own process; other threads could end the wait."""
    end, waiting = chain.end, waiting_in(chain.end)
    own = end.case.helpers(end.pid, but=end.tid)
    if not waiting or not own:
        return None
    busy = list(dict.fromkeys(thread.name for thread, works in pool_of(end) if works and at_work(thread)))
    doing = f"; of its pool, {and_joined(busy)} {'are' if len(busy) > 1 else 'is'} at work" if busy else ""
    also = "one of these threads should answer, and is late or blocked"
    if waiting.startswith(("Queue.join", "join (queue")):
        also = "a thread took an item, ended with an exception, and never called task_done()"
    return Judgement(
        _cause_of(waiting), f"waits in {waiting}{doing_of(own)}{doing}", Sure.POSSIBLE, (waits_of(own),), (also,),
        "find out why that thread does not answer", helped=bool(busy) or any(map(at_work, own)),
    )  # fmt: skip


def no_thread_answers(chain: Chain) -> Judgement | None:
    """A thread waits for an event, a condition or a queue of its own process, and no thread could end the wait.

    After `thread_answers_late`: no other thread of the process runs the program's code.
    """
    end, waiting = chain.end, waiting_in(chain.end)
    if not waiting:
        return None
    also = "the thread that should answer has ended, perhaps with an exception: look for its traceback on stderr"
    if any(frame.file.endswith("concurrent/futures/thread.py") for frame in end.stack):
        also = "it is a task of a pool that waits for another task of the same pool, which has no free thread"
    if _is_forked_main(end):
        also = "the thread that should answer is in the parent process: a fork copies no threads"
    return Judgement(
        _cause_of(waiting), f"waits in {waiting}, which no thread of its process can end", Sure.LIKELY,
        (_no_other(end),), (also,), "answer it from the same process, or give the wait a timeout",
    )  # fmt: skip


# --- Locks ------------------------------------------------------------------------------------------------------------
_LOCKING: Final = re.compile(r"\bwith\b|acquire|lock|print\(|write|flush|log|import|emit", re.IGNORECASE)


def native_pool_is_missing(chain: Chain) -> Judgement | None:
    """C code of a forked worker waits in a line that takes no lock: it waits for threads that the fork did not copy."""
    end = chain.end
    if waiting_in(end) != "" or not end.in_worker or end.case.forked(end.pid) is not True:
        return None
    line, parent = end.place.inside[0].source, end.case.threads(end.process.ppid)
    if not line or _LOCKING.search(line):
        return None
    had = sum(thread.seen.stack is None and not thread.is_main for thread in parent)
    facts = [EvidenceLine(f"its line calls C code: {line}", f"stack of {end.pid}")]
    facts += [EvidenceLine(f"its parent has {had} threads of C libraries", "threads")] if had else []
    return Judgement(
        HangCause.MISSING_THREAD, "waits in C code for threads that the fork did not copy (OpenMP, a library's pool)",
        Sure.LIKELY if had else Sure.POSSIBLE, tuple(facts), ("a lock inside of that library was held at the fork",),
        "torch.set_num_threads(1) or OMP_NUM_THREADS=1 before the workers start; multiprocessing_context='forkserver'",
    )  # fmt: skip


def mutex(chain: Chain) -> Judgement | None:
    """A mutex of glibc in a library; its memory names the owner."""
    end, owner = chain.end, chain.end.seen.owner
    if end.kind is not Blocked.MUTEX:
        return None
    cause, fix = HangCause.LOCK, "find out what the owner waits for"
    if owner == end.tid:
        cause, fix = HangCause.SELF_LOCK, "unlock the mutex before you lock it again"
    elif end.process.thread(owner) is None:
        cause, fix = HangCause.FORK_LOCK, ""
    fact = EvidenceLine(f"the mutex names thread {owner} as its owner", f"memory of {end.pid}")
    return Judgement(cause, f"is {end.wait.words}", facts=(fact,), fix=fix)


@dataclass(frozen=True, slots=True)
class _LockWait:
    """A wait for a lock of Python's, which has no owner. what: in words; shown: its source line as evidence.

    own: the other threads of the process that run Python code, one of which may hold it.
    """

    end: ThreadFacts
    what: str
    shown: tuple[EvidenceLine, ...]
    own: list[ThreadFacts]


def _lock_wait(end: ThreadFacts) -> _LockWait | None:
    if waiting_in(end) != "":
        return None
    frame = end.place.inside[0]
    shown = (EvidenceLine(f"its line: {frame.source}", f"stack of {end.pid}"),) if frame.source else ()
    what = f"waits for a lock in {frame}" if library(frame.file) else "waits for a lock"
    return _LockWait(end, what, shown, end.case.helpers(end.pid, but=end.tid))


def lock_of_another_thread(chain: Chain) -> Judgement | None:
    """A Python lock, which has no owner; other threads of the process may hold it."""
    found = _lock_wait(chain.end)
    if found is None or not found.own:
        return None
    crossed = ", as other threads do: each may hold the lock that the next one waits for"
    what = found.what + (crossed if _each_waits_for_a_lock(found) else "")
    return Judgement(
        HangCause.LOCK, f"{what}{doing_of(found.own)}", Sure.POSSIBLE, (*found.shown, waits_of(found.own)),
        ("one of these threads holds it", "the waiting thread holds it itself"), helped=any(map(at_work, found.own)),
    )  # fmt: skip


def _each_waits_for_a_lock(found: _LockWait) -> bool:
    """Whether all threads of a process that are in the user's code wait for locks, and for different ones."""
    others = [one for one in found.own if one.place.users is not None]
    targets = {one.wait.target for one in (found.end, *others)}
    return all(waiting_in(one) == "" for one in others) and len(targets) > 1


_SO_NONE_RELEASES: Final = ", so none can release it"
_NO_OTHER_LOCKED: Final = "the waiting thread holds the lock itself (not re-entrant)"


def lock_at_the_fork(chain: Chain) -> Judgement | None:
    """A lock that was held when the worker was forked: in the worker it stays locked.

    After `lock_of_another_thread`: no other thread of the process runs the program's code.
    """
    found, end = _lock_wait(chain.end), chain.end
    if found is None or not end.in_worker or end.case.forked(end.pid) is not True:
        return None
    facts, what = (*found.shown, _no_other(end, _SO_NONE_RELEASES)), "which was held when the worker was forked"
    if any(frame.function.startswith("_ModuleLock") for frame in end.place.inside):  # it would notice its own cycle
        fix = f"import the module before a thread does, and before the workers start; {AFTER_FORK}"
        what = f"waits for the import lock of a module, {what}"
        return Judgement(HangCause.FORK_LOCK, what, Sure.LIKELY, facts, (), fix)
    held = _held_by_another(end)
    if held is None:
        return None
    fact, also = held
    return Judgement(HangCause.FORK_LOCK, f"{found.what}, {what}", Sure.LIKELY, (*facts, fact), also)


def _held_by_another(end: ThreadFacts) -> tuple[EvidenceLine, tuple[str, ...]] | None:
    """Evidence that a forked worker does not hold the lock that it waits for, and an alternative; None = it may."""
    frame, parents = end.place.inside[0], helpers_of_parent(end)
    if parents:
        same = [thread for thread in parents if any(one.file == frame.file for one in thread.stack)]
        names = and_joined([thread.label for thread in same or parents])
        has = f"the parent process has the threads {names}, one of which may have held the lock"
        return EvidenceLine(has, "threads"), (_NO_OTHER_LOCKED,)
    reasons = (
        (_REENTRANT.search(frame.file.replace("\\", "/")) is not None, "its holder may take it again", ()),
        (_in_first_sample(end), "the worker makes its first sample",
         ("the worker has taken the lock twice in this sample",)),
    )  # fmt: skip
    for holds, why, also in reasons:
        if holds:
            return EvidenceLine(f"{why}, so it does not wait for itself", f"stack of {end.pid}"), also
    return None


_REENTRANT: Final = re.compile(r"(^|/)(logging/__init__|functools)\.py$")
"""The standard library's modules whose locks are re-entrant."""


def _in_first_sample(link: ThreadFacts) -> bool:
    """Whether a worker is in the first sample of its first task, in one function, so that it took no lock before."""
    place = link.place
    if link.step is not LoaderStep.SAMPLE or place.task != link.case.workers[link.pid] or place.sample < 0:
        return False
    first = re.compile(rf"\[{place.sample}[,\]]")
    fetches = (f for f in link.stack if library(f.file) and any(map(first.match, f.variables.values())))
    return any(fetches) and sum(not library(frame.file) for frame in place.inside) == 1


def lock_stays_held(chain: Chain) -> Judgement | None:
    """A Python lock that no other thread can release.

    After `lock_of_another_thread`: no other thread of the process runs the program's code.
    """
    found, end = _lock_wait(chain.end), chain.end
    if found is None:
        return None
    may, also = "no other thread can release", "a thread that has ended acquired it and never released it"
    if end.in_worker and end.case.forked(end.pid) is True:
        may = "no thread of its process can release"
        also = "the main thread, or a thread that has ended, held it when the worker was forked: use 'forkserver'"
    facts = (*found.shown, _no_other(end, _SO_NONE_RELEASES))
    return Judgement(HangCause.SELF_LOCK, f"{found.what} that {may}", Sure.LIKELY, facts, (also,))
