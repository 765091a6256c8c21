"""Rules for waits within one process: locks of Python and of C libraries, threads that a fork did not copy."""

from __future__ import annotations

import re
from typing import Final

from minidl.hang.case import RunFacts
from minidl.hang.chain import Chain, Link, pool_of, waiting_in
from minidl.hang.evidence.graph import Blocked
from minidl.hang.evidence.model import SeenThread
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.places import LoaderStep, library
from minidl.hang.remedies import AFTER_FORK
from minidl.hang.rules.activity import at_work, doing_of, loop_tid
from minidl.hang.rules.judgement import Judgement
from minidl.tracefile.words import and_joined


def thread_is_missing(case: RunFacts, chain: Chain) -> Judgement | None:
    """A thread waits for another thread, but its process, made by a fork, has none that could answer."""
    end, waiting = chain.end, waiting_in(chain.end)
    if not waiting:
        return None
    process = case.processes[end.pid]
    own = case.users_threads(end.pid, but=end.tid)
    if own or end.tid != end.pid or end.pid not in case.workers or case.forked(end.pid) is not True:
        return None  # another thread than the main one was started after the fork
    parents = case.users_threads(process.ppid, but=loop_tid(case, process.ppid))
    facts = [EvidenceLine("no other thread of its process runs the program's code", f"threads of {end.pid}")]
    pooled = any(re.search(r"concurrent/futures|multiprocessing/pool", f.file) for f in end.place.inside)
    if parents:
        names = and_joined([thread.python_name or thread.name for thread in parents])
        facts.append(EvidenceLine(f"the parent process has the threads {names}, which a fork does not copy", "threads"))
    if not parents and not pooled:
        return None
    return Judgement(
        HangCause.MISSING_THREAD, f"waits in {waiting} for a thread that the fork did not copy",
        Sure.CERTAIN if parents and pooled else Sure.LIKELY, tuple(facts),
        () if pooled else ("no thread would answer without the fork either",),
    )  # fmt: skip


def pool_does_nothing(case: RunFacts, chain: Chain) -> Judgement | None:
    """A thread waits for the result of a pool, none of whose threads and processes has a task."""
    end, waiting = chain.end, waiting_in(chain.end)
    pool = pool_of(case, end) if waiting else []
    if not pool or any(works for _, _, works in pool):
        return None
    names = and_joined(list(dict.fromkeys(case.name(pid) for pid, _, _ in pool)))
    return Judgement(
        HangCause.NOBODY, f"waits in {waiting} for the result of an idle pool", Sure.LIKELY,
        (EvidenceLine(f"{names} waits for a task of the pool", "stacks"),),
        ("the pool never began the task, or the result is on its way",),
        "find what killed the process that had the task: a multiprocessing.Pool silently starts another one; "
        "ProcessPoolExecutor raises BrokenProcessPool",
    )  # fmt: skip


def _cause_of(waiting: str) -> HangCause:
    """The cause by the function that waits: a full queue, an empty one, or a peer that does not answer."""
    if waiting.startswith("Queue.put"):
        return HangCause.QUEUE_FULL
    return HangCause.QUEUE_EMPTY if waiting.startswith("Queue.get") or "SimpleQueue" in waiting else HangCause.NOBODY


def thread_answers_late(case: RunFacts, chain: Chain) -> Judgement | None:
    """A thread waits for an event, a condition or a queue of its own process; other threads could end the wait."""
    end, waiting = chain.end, waiting_in(chain.end)
    own = case.users_threads(end.pid, but=end.tid)
    if not waiting or not own:
        return None
    names = and_joined([f"{t.python_name or t.name} ({case.waits[end.pid, t.tid].words})" for t in own])
    busy = list(dict.fromkeys(pid for pid, tid, works in pool_of(case, end) if works and at_work(case, pid, tid)))
    doing = doing_of(case, end.pid, own)
    works = f"{and_joined([case.name(pid) for pid in busy])} {'are' if len(busy) > 1 else 'is'} at work"
    doing += f"; of its pool, {works}" if busy else ""
    also = "one of these threads should answer, and is late or blocked"
    if waiting.startswith(("Queue.join", "join (queue")):
        also = "a thread took an item, ended with an exception, and never called task_done()"
    return Judgement(
        _cause_of(waiting), f"waits in {waiting}{doing}", Sure.POSSIBLE,
        (EvidenceLine(f"other threads of its process: {names}", "stacks"),), (also,),
        "find out why that thread does not answer",
        helped=bool(busy) or any(at_work(case, end.pid, t.tid) for t in own),
    )  # fmt: skip


def nobody_answers(case: RunFacts, chain: Chain) -> Judgement | None:
    """A thread waits for an event, a condition or a queue of its own process, and no thread could end the wait.

    After `thread_answers_late`: no other thread of the process runs the program's code.
    """
    end, waiting = chain.end, waiting_in(chain.end)
    if not waiting:
        return None
    also = "the thread that should answer has ended, perhaps with an exception: look for its traceback on stderr"
    thread = case.thread(end.pid, end.tid)
    if any(f.file.endswith("concurrent/futures/thread.py") for f in (thread.stack if thread else None) or ()):
        also = "it is a task of a pool that waits for another task of the same pool, which has no free thread"
    if end.pid in case.workers and case.forked(end.pid) and end.tid == end.pid:
        also = "the thread that should answer is in the parent process: a fork copies no threads"
    return Judgement(
        _cause_of(waiting), f"waits in {waiting}, which no thread of its process can end", Sure.LIKELY,
        (EvidenceLine("no other thread of its process runs the program's code", f"threads of {end.pid}"),), (also,),
        "answer it from the same process, or give the wait a timeout",
    )  # fmt: skip


_LOCKING: Final = re.compile(r"\bwith\b|acquire|lock|print\(|write|flush|log|import|emit", re.IGNORECASE)


def native_pool_is_missing(case: RunFacts, chain: Chain) -> Judgement | None:
    """C code of a forked worker waits in a line that takes no lock: it waits for threads that the fork did not copy."""
    end = chain.end
    if waiting_in(end) != "" or end.pid not in case.workers:
        return None
    process, frame = case.processes[end.pid], end.place.inside[0]
    parent = case.processes.get(process.ppid)
    if case.forked(end.pid) is not True or not frame.source or _LOCKING.search(frame.source):
        return None
    had = [t.name for t in parent.threads if t.stack is None and t.tid != parent.pid] if parent is not None else []
    facts = [EvidenceLine(f"its line calls C code: {frame.source}", f"stack of {end.pid}")]
    facts += [EvidenceLine(f"its parent has {len(had)} threads of C libraries", "threads")] if had else []
    return Judgement(
        HangCause.MISSING_THREAD, "waits in C code for threads that the fork did not copy (OpenMP, a library's pool)",
        Sure.LIKELY if had else Sure.POSSIBLE, tuple(facts), ("a lock inside of that library was held at the fork",),
        "torch.set_num_threads(1) or OMP_NUM_THREADS=1 before the workers start; multiprocessing_context='forkserver'",
    )  # fmt: skip


def mutex(case: RunFacts, chain: Chain) -> Judgement | None:
    """A mutex of glibc in a library; its memory names the owner."""
    end = chain.end
    if end.wait.kind is not Blocked.MUTEX:
        return None
    thread = case.thread(end.pid, end.tid)
    assert thread is not None
    fact = EvidenceLine(f"the mutex names thread {thread.owner} as its owner", f"memory of {end.pid}")
    if thread.owner == end.tid:
        return Judgement(
            HangCause.SELF_LOCK, f"is {end.wait.words}", facts=(fact,), fix="unlock the mutex before you lock it again"
        )
    if case.processes[end.pid].thread(thread.owner) is None:
        return Judgement(HangCause.FORK_LOCK, f"is {end.wait.words}", facts=(fact,))
    return Judgement(HangCause.LOCK, f"is {end.wait.words}", facts=(fact,), fix="find out what the owner waits for")


def _of_a_lock(case: RunFacts, chain: Chain) -> tuple[str, tuple[EvidenceLine, ...]] | None:
    """If the chain's end waits for a Python lock: the words for it, and its source line as evidence."""
    end = chain.end
    if waiting_in(end) != "":
        return None
    frame = end.place.inside[0]
    line = str(frame)
    shown = (EvidenceLine(f"its line: {frame.source}", f"stack of {end.pid}"),) if frame.source else ()
    return f"waits for a lock in {line}" if library(frame.file) else "waits for a lock", shown


def lock_of_another_thread(case: RunFacts, chain: Chain) -> Judgement | None:
    """A Python lock, which has no owner; other threads of the process may hold it."""
    found, end = _of_a_lock(case, chain), chain.end
    own = case.users_threads(end.pid, but=end.tid)
    if found is None or not own:
        return None
    what, shown = found
    names = and_joined([f"{t.python_name or t.name} ({case.waits[end.pid, t.tid].words})" for t in own])
    if _each_waits_for_a_lock(case, end, own):
        what += ", as other threads do: each may hold the lock that the next one waits for"
    return Judgement(
        HangCause.LOCK, f"{what}{doing_of(case, end.pid, own)}", Sure.POSSIBLE,
        (*shown, EvidenceLine(f"other threads of its process: {names}", "stacks")),
        ("one of these threads holds it", "the waiting thread holds it itself"),
        helped=any(at_work(case, end.pid, t.tid) for t in own),
    )  # fmt: skip


def _each_waits_for_a_lock(case: RunFacts, end: Link, own: list[SeenThread]) -> bool:
    """Whether all threads of a process that are in the user's code wait for locks, and for different ones."""
    places = {thread.tid: case.place(end.pid, thread.tid) for thread in own}
    targets = {end.wait.target}
    for tid, place in places.items():
        if place.users is not None:
            wait = case.waits[end.pid, tid]
            if waiting_in(Link(end.pid, tid, place, wait)) != "":
                return False
            targets.add(wait.target)
    return len(targets) > 1


def _no_other_thread(pid: int) -> EvidenceLine:
    return EvidenceLine(
        "no other thread of its process runs the program's code, so none can release it", f"threads of {pid}"
    )


def lock_at_the_fork(case: RunFacts, chain: Chain) -> Judgement | None:
    """A lock that was held when the worker was forked: in the worker it stays locked.

    After `lock_of_another_thread`: no other thread of the process runs the program's code.
    """
    found, end = _of_a_lock(case, chain), chain.end
    if found is None or end.pid not in case.workers or case.forked(end.pid) is not True:
        return None
    (what, shown), frame, ppid = found, end.place.inside[0], case.processes[end.pid].ppid
    fix, facts = "", (*shown, _no_other_thread(end.pid))
    also: tuple[str, ...] = ("the waiting thread holds the lock itself (not re-entrant)",)
    parents = case.users_threads(ppid, but=loop_tid(case, ppid)) if ppid in case.processes else []
    reentrant = _REENTRANT.search(frame.file.replace("\\", "/"))
    if any(f.function.startswith("_ModuleLock") for f in end.place.inside):  # it would notice its own cycle
        what, also = "waits for the import lock of a module", ()
        fix = f"import the module before a thread does, and before the workers start; {AFTER_FORK}"
    elif parents:
        same = [t for t in parents if any(f.file == frame.file for f in t.stack or ())]
        names = and_joined([t.python_name or t.name for t in (same or parents)])
        has = f"the parent process has the threads {names}, one of which may have held the lock"
        facts += (EvidenceLine(has, "threads"),)
    elif reentrant or _in_first_sample(case, end):
        why = "its holder may take it again" if reentrant else "the worker makes its first sample"
        facts += (EvidenceLine(f"{why}, so it does not wait for itself", f"stack of {end.pid}"),)
        also = () if reentrant else ("the worker has taken the lock twice in this sample",)
    else:
        return None
    what += ", which was held when the worker was forked"
    return Judgement(HangCause.FORK_LOCK, what, Sure.LIKELY, facts, also, fix)


_REENTRANT: Final = re.compile(r"(^|/)(logging/__init__|functools)\.py$")
"""The standard library's modules whose locks are re-entrant."""


def _in_first_sample(case: RunFacts, link: Link) -> bool:
    """Whether a worker is in the first sample of its first task, in one function, so that it took no lock before."""
    number, place, thread = case.workers.get(link.pid, -1), link.place, case.thread(link.pid, link.tid)
    if place.step is not LoaderStep.SAMPLE or place.task != number or place.sample < 0 or thread is None:
        return False
    first = re.compile(rf"\[{place.sample}[,\]]")
    fetch = [f for f in thread.stack or () if library(f.file) and any(map(first.match, f.variables.values()))]
    return bool(fetch) and sum(not library(frame.file) for frame in place.inside) == 1


def lock_nobody_releases(case: RunFacts, chain: Chain) -> Judgement | None:
    """A Python lock that no other thread can release.

    After `lock_of_another_thread`: no other thread of the process runs the program's code.
    """
    found, end = _of_a_lock(case, chain), chain.end
    if found is None:
        return None
    what, shown = found
    may, also = "no other thread can release", "a thread that has ended acquired it and never released it"
    if end.pid in case.workers and case.forked(end.pid) is True:
        may = "no thread of its process can release"
        also = "the main thread, or a thread that has ended, held it when the worker was forked: use 'forkserver'"
    return Judgement(
        HangCause.SELF_LOCK, f"{what} that {may}", Sure.LIKELY, (*shown, _no_other_thread(end.pid)), (also,),
    )  # fmt: skip
