"""Rules for waits within one process: locks of Python and of C libraries, threads that a fork did not copy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from minidl.hang.case import ThreadFacts, spot
from minidl.hang.chain import Chain, pool_of, taken_in, waiting_in
from minidl.hang.evidence.syscalls import is_private, wait_flags
from minidl.hang.evidence.waits import Blocked
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.limits import STILL
from minidl.hang.places import LoaderStep, library
from minidl.hang.remedies import AFTER_FORK
from minidl.hang.rules.activity import at_work, doing_of, helpers_of_parent, none_wakes
from minidl.hang.rules.judgement import Judgement, waits_of
from minidl.tracefile.words import and_joined


def _is_forked_main(end: ThreadFacts) -> bool:
    """Whether it is the main thread of a forked worker: another thread was started after the fork."""
    return end.in_worker and end.is_main and end.case.forked(end.pid) is True


def _no_other(end: ThreadFacts, so: str = "") -> EvidenceLine:
    return EvidenceLine(f"no other thread of its process runs the program's code{so}", f"threads of {end.pid}")


# --- Events, conditions, queues and pools -----------------------------------------------------------------------------
def exit_waits(chain: Chain) -> Judgement | None:
    """Python's exit waits for threads that are no daemons."""
    end = chain.end
    own = end.case.helpers(end.pid, but=end.tid)
    if end.step is not LoaderStep.EXIT or end.kind is not Blocked.FUTEX or not own:
        return None
    names = f"its thread{'s' * (len(own) > 1)} {and_joined([one.label for one in own], 2)}"
    return Judgement(
        HangCause.NOBODY, f"waits for the end of {names}{doing_of(own)}",
        Sure.LIKELY if len(own) == 1 else Sure.POSSIBLE, (waits_of(own),), (),
        "end the thread before the program ends (an Event, or None in its queue), or make it a daemon",
        helped=any(map(at_work, own)), alone=len(own) == 1 and waiting_in(own[0]) is not None,
    )  # fmt: skip


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
    end, pool, waiting = chain.end, pool_of(chain.end), waiting_in(chain.end) or ""
    if not pool or any(works for _, works in pool):
        return None
    names = and_joined(list(dict.fromkeys(thread.name for thread, _ in pool)))
    others = [one for one, _ in pool if one.pid != end.pid]
    waits = all(one.kind in (Blocked.PIPE_READ, Blocked.SEMAPHORE) and one.seen.idle >= STILL for one in others)
    return Judgement(
        HangCause.NOBODY, f"waits in {waiting} for the result of an idle pool", Sure.LIKELY,
        (EvidenceLine(f"{names} waits for a task of the pool", "stacks"),),
        ("the pool never began the task, or the result is on its way",),
        "find what killed the process that had the task: a multiprocessing.Pool silently starts another one; "
        "ProcessPoolExecutor raises BrokenProcessPool",
        alone=bool(others) and waits and "(pool.py)" in waiting,
    )  # fmt: skip


def import_waits_for_itself(chain: Chain) -> Judgement | None:
    """The code of a module waits, while it is imported, for threads that wait for the end of this import."""
    end = chain.end
    waiter = next((link for link in chain.links if link.pid == end.pid and waiting_in(link)), end)
    others = [one for one in end.case.helpers(end.pid, but=end.tid) if one.place.users] if waiter is end else [end]
    modules = sorted(set(map(_awaited_module, others)))
    if not waiting_in(waiter) or not modules or not {*modules} <= {*_imports(waiter)}:
        return None
    return Judgement(
        HangCause.CYCLE, f"is in a cycle: the import of {and_joined(modules)} waits for threads that wait for it",
        Sure.LIKELY, (waits_of(others),), (), "start no threads while a module is imported: do that in a function",
    )  # fmt: skip


def _at_import(one: ThreadFacts) -> bool:
    """Whether a thread waits for the import lock of a module."""
    return any(frame.function.startswith("_ModuleLock") for frame in one.place.inside[:2])


def _awaited_module(one: ThreadFacts) -> str:
    """The last name of the module whose import lock a thread waits for, by its line; "" = it waits for none."""
    line = next((frame.source for frame in one.place.inside if not frame.file.startswith("<frozen")), "")
    found = re.search(r"\b(?:from|import) [\w.]*?(\w+)\b(?!\.)", line) if _at_import(one) else None
    return found[1] if found else ""


def _imports(one: ThreadFacts) -> Iterable[str]:
    """The last names of the modules whose code a thread runs for an import."""
    runs = (code for code, by in pairwise(one.stack) if by.name == "_call_with_frames_removed")
    return (found[1] for code in runs if (found := re.search(r"(\w+)(/__init__)?\.py$", code.file)))


_CAUSES: Final = (
    (r"Queue\.put", HangCause.QUEUE_FULL), (r"Queue\.get|.*SimpleQueue", HangCause.QUEUE_EMPTY), ("", HangCause.NOBODY),
)  # fmt: skip
"""The cause by the function that waits: a full queue, an empty one, or a peer that does not answer."""


def _cause_of(waiting: str) -> HangCause:
    return next(cause for pattern, cause in _CAUSES if re.match(pattern, waiting))


class _StuckRow(NamedTuple):
    """Threads of a process that can answer only one another, while all of them wait. file: of the frames around."""

    file: str
    what: str
    fix: str


_STUCK: Final = (
    _StuckRow("asyncio/base_events.py", "the thread of its event loop waits for a result itself, so no coroutine runs",
              "await the result in a coroutine; only other threads may call result() of run_coroutine_threadsafe"),
    _StuckRow("concurrent/futures/thread.py", "all threads of its pool wait for results of that pool",
              "give the inner tasks a pool of their own, or do their work in the outer task"),
)  # fmt: skip


def threads_wait_for_one_another(chain: Chain) -> Judgement | None:
    """Each thread of a process waits for a result, those of its pool or event loop, too."""
    end, waiting = chain.end, waiting_in(chain.end)
    own = end.case.helpers(end.pid, but=end.tid)
    waits = {*map(waiting_in, own)}
    if not own or not waiting or None in waits or "" in waits:
        return None
    found = ((row, [one for one in own if _is_below(one, row.file)]) for row in _STUCK)
    row, there = next(((row, there) for row, there in found if there), (None, []))
    if row is None or not all("result (" in (waiting_in(one) or "") for one in there):
        return None
    return Judgement(
        HangCause.CYCLE, f"waits in {waiting}; {row.what} ({spot(there[0].place)})", Sure.LIKELY, (waits_of(own),),
        fix=row.fix, alone=True,
    )  # fmt: skip


def _is_below(one: ThreadFacts, file: str) -> bool:
    return any(frame.file.endswith(file) for frame in one.stack)


def thread_answers_late(chain: Chain) -> Judgement | None:
    """A thread waits for an event, a condition or a queue of its own process; other threads could end the wait."""
    end, waiting = chain.end, waiting_in(chain.end)
    own = end.case.helpers(end.pid, but=end.tid)
    if not waiting or not own:
        return None
    busy = list(dict.fromkeys(thread.name for thread, works in pool_of(end) if works and at_work(thread)))
    doing = f"; of its pool, {and_joined(busy)} {'are' if len(busy) > 1 else 'is'} at work" if busy else ""
    also, fix = "one of these threads should answer, and is late or blocked", "find out why that thread does not answer"
    alone = none_wakes(end)
    if alone:
        doing = ", and so does every other thread of its process: none can wake another"
        also, fix = "", _WHICH_ANSWERS
    if waiting.startswith(("Queue.join", "join (queue")):
        also, fix = "a thread took an item, ended with an exception, and never called task_done()", _TASK_DONE
    return Judgement(
        _cause_of(waiting), f"waits in {waiting}{doing}{doing_of(own)}", Sure.LIKELY if alone else Sure.POSSIBLE,
        (waits_of(own),), (also,) if also else (), fix,
        helped=bool(busy) or any(map(at_work, own)) or "SIGALRM" in end.process.caught, alone=alone,
    )  # fmt: skip


_WHICH_ANSWERS: Final = (
    "find which of these threads should answer; look at what a condition is about under its lock before each wait "
    "(wait_for does): notify() wakes only who waits already"
)
_TASK_DONE: Final = "call task_done() in a `finally`, and find the exception that ended a thread before it"


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
    handler = "SIGALRM" in end.process.caught
    joined = chain.first.key == (end.pid, end.pid) and end is not chain.first
    fix = _BEFORE_THE_JOIN.get(_cause_of(waiting), "") if joined else ""
    fix = _NO_SAMPLER if end.step is LoaderStep.SAMPLER else fix
    if _is_forked_main(end):
        also = "the thread that should answer is in the parent process: a fork copies no threads"
    return Judgement(
        _cause_of(waiting), f"waits in {waiting}, which no thread of its process can end", Sure.LIKELY,
        (_no_other(end),), ("the handler of SIGALRM ends it",) if handler else () if fix else (also,),
        fix or "answer it from the same process, or give the wait a timeout", helped=handler,
        alone=joined or end.step is LoaderStep.SAMPLER,
    )  # fmt: skip


_BEFORE_THE_JOIN: Final = {
    HangCause.QUEUE_FULL: "empty the thread's queue before you join it, or let put() time out and look at a flag",
    HangCause.QUEUE_EMPTY: "put an end mark (None) into the thread's queue before you join it, or make it a daemon",
}
_NO_SAMPLER: Final = "let the sampler not wait for what the loop does after a batch: it runs in the loop's own thread"


# --- Locks ------------------------------------------------------------------------------------------------------------
LOCKING: Final = re.compile(r"\bwith\b|acquire|lock|print\(|write|flush|log|import|emit", re.IGNORECASE)


def native_pool_is_missing(chain: Chain) -> Judgement | None:
    """C code of a forked worker waits in a line that takes no lock: it waits for threads that the fork did not copy."""
    end = chain.end
    if waiting_in(end) != "" or not end.in_worker or end.case.forked(end.pid) is not True:
        return None
    line, parent = end.place.inside[0].source, end.case.threads(end.process.ppid)
    if not line or LOCKING.search(line):
        return None
    had = sum(thread.seen.stack is None and not thread.is_main for thread in parent)
    facts = [EvidenceLine(f"its line calls C code: {line}", f"stack of {end.pid}")]
    facts += [EvidenceLine(f"its parent has {had} threads of C libraries", "threads")] if had else []
    row = NATIVE_POOLS.get(wait_flags(end.call), _ANY_POOL)
    facts += [EvidenceLine(f"it waits as {row.like} does", f"futex of thread {end.tid}")] if row.like else []
    return Judgement(
        HangCause.MISSING_THREAD, f"waits in C code for threads that the fork did not copy ({row.whose})",
        Sure.LIKELY if had else Sure.POSSIBLE, tuple(facts), ("a lock inside of that library was held at the fork",),
        f"multiprocessing_context='forkserver' or 'spawn', or first use the library in the worker{row.fix}",
    )  # fmt: skip


class PoolRow(NamedTuple):
    """Whose threads C code waits for. like: by how it waits, "" = unknown. fix: what helps, too."""

    whose: str
    like: str = ""
    fix: str = ""


_ANY_POOL: Final = PoolRow(
    "OpenMP's, or of a library's pool", "",
    "; for OpenMP (torch, NumPy) also torch.set_num_threads(1) or OMP_NUM_THREADS=1 before the workers start",
)  # fmt: skip
NATIVE_POOLS: Final = {
    frozenset(): _ANY_POOL._replace(whose="such as OpenMP's", like="GNU's OpenMP, or a plain lock of a C library,"),
    frozenset({"bitset"}): PoolRow(
        "of a library's pool, such as rayon's in tokenizers and Polars", "Rust's standard library",
        "; for tokenizers also TOKENIZERS_PARALLELISM=false (OMP_NUM_THREADS does not matter here)",
    ),
}  # fmt: skip
"""By the flags of the wait. Conditions of glibc, which any library may have, usually name a clock as well."""


def mutex(chain: Chain) -> Judgement | None:
    """A mutex of glibc in a library; its memory names the owner."""
    end, owner = chain.end, chain.end.seen.owner
    if end.kind is not Blocked.MUTEX:
        return None
    cause, fix = HangCause.LOCK, "find out what the owner waits for"
    if owner == end.tid:
        cause, fix = HangCause.SELF_LOCK, "unlock the mutex before you lock it again"
    elif not end.wait.holders and not is_private(end.call):
        cause, fix = HangCause.DEAD_LOCK_HOLDER, "make the mutex robust (PTHREAD_MUTEX_ROBUST): its next owner is told"
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
    if chain.end.place.interrupted and (taken := _taken_around(chain.end)):
        facts = (*found.shown, EvidenceLine(taken, f"stack of {chain.end.pid}"))
        return Judgement(HangCause.SELF_LOCK, f"{found.what}{_INTERRUPTED}", Sure.LIKELY, facts, fix=_IN_A_HANDLER)
    if _all_wait_for_one(found):
        what = f"{found.what} that no thread of its process can release: all of them wait for it"
        return Judgement(
            HangCause.SELF_LOCK, what, Sure.LIKELY, (*found.shown, waits_of(found.own)),
            ("a thread that has ended holds it",), "use `with lock:`, or release it in a `finally`: an exception left "
            "it locked, or one of these threads has taken it before (threading.RLock is re-entrant)",
            helped=any(map(at_work, found.own)),
        )  # fmt: skip
    crossed = ", as other threads do: each may hold the lock that the next one waits for"
    what = found.what + (crossed if _each_waits_for_a_lock(found) else "")
    alone = none_wakes(chain.end)
    sure, facts = Sure.LIKELY if alone else Sure.POSSIBLE, (*found.shown, waits_of(found.own))
    return Judgement(
        HangCause.LOCK, f"{what}{doing_of(found.own)}", sure, facts,
        ("one of these threads holds it", "the waiting thread holds it itself"), helped=any(map(at_work, found.own)),
        alone=alone,
    )  # fmt: skip


def _all_wait_for_one(found: _LockWait) -> bool:
    """Whether all threads of a process that are in the user's code wait for one lock, without a timeout."""
    end = found.end
    main = [] if end.is_main else [end.case.at(end.pid)]
    others = [*main, *(one for one in found.own if one.place.users is not None)]
    alike = all(one.wait.target == end.wait.target and not one.wait.bounded for one in others)
    return bool(others) and alike


def _each_waits_for_a_lock(found: _LockWait) -> bool:
    """Whether all threads of a process that are in the user's code wait for locks, and for different ones."""
    others = [one for one in found.own if one.place.users is not None]
    return all(waiting_in(one) == "" for one in others) and len({one.wait.target for one in (found.end, *others)}) > 1


_INTERRUPTED: Final = " that the code which it interrupted holds"
_IN_A_HANDLER: Final = "take no lock in a signal handler or finalizer: set a flag there, and act on it in the loop"
_SO_NONE_RELEASES: Final = ", so none can release it"
_TAKEN_BEFORE: Final = "this thread has taken the lock before (it is not re-entrant), or has never released it"
_AT_THE_FORK: Final = "another thread held it when the worker was forked: use 'forkserver'"


def module_lock(chain: Chain) -> Judgement | None:
    """The import lock of a module was held at the fork: by itself a thread would notice."""
    found, end = _lock_wait(chain.end), chain.end
    if found is None or not _at_import(end) or end.case.forked(end.pid) is not True:
        return None
    return Judgement(
        HangCause.FORK_LOCK, "waits for the import lock of a module, which was held when the worker was forked",
        Sure.LIKELY, (*found.shown, _no_other(end, _SO_NONE_RELEASES)), (),
        f"import the module before a thread does, and before the workers start; {AFTER_FORK}",
    )  # fmt: skip


def lock_at_the_fork(chain: Chain) -> Judgement | None:
    """A lock that no thread of a forked worker can release: it was held at the fork, or the worker holds it itself.

    After `lock_of_another_thread`: no other thread of the process runs the program's code.
    """
    found, end = _lock_wait(chain.end), chain.end
    if found is None or not end.in_worker or end.case.forked(end.pid) is not True:
        return None
    row, fact = next((row, fact) for row in HOLDERS if (fact := row.seen(end)))
    itself = row.cause is HangCause.SELF_LOCK
    what = "that no thread of its process can release" if itself else "which was held when the worker was forked"
    facts = *found.shown, _no_other(end, _SO_NONE_RELEASES), EvidenceLine(fact, f"{row.source} of {end.pid}")
    also = (_AT_THE_FORK if itself else _TAKEN_BEFORE,) if row.other else ()
    comma = "" if itself else ","
    return Judgement(row.cause, f"{found.what}{comma} {what}", row.sure, facts, also)


def _taken_around(end: ThreadFacts) -> str:
    """A line of the stack that has taken the lock already: around the waiting line, before it, or in a caller."""
    asks = end.place.inside[0]
    for frame in end.stack if end.place.interrupted else end.place.inside:
        if line := taken_in(frame, asks, mine=True):
            return f"its own stack has taken the lock: `{line}` in {frame}"
    return ""


def _is_new(end: ThreadFacts) -> str:
    value = end.seen.copies.get(str(end.process.ppid))
    return "its parent has no lock at this address: the worker made the lock itself" if value == -1 else ""


def _held_in_an_idle_fork(end: ThreadFacts) -> str:
    workers = [one for pid in end.case.workers if (one := end.case.at(pid)).is_idle]
    held = [one.name for one in workers if end.seen.copies.get(str(one.pid)) == 0]
    return f"the same lock is held in {and_joined(held)}, too, which waits for a task" if held else ""


def _held_in_the_parent(end: ThreadFacts) -> str:
    return "the same lock is held in the parent process now" if end.seen.copies.get(str(end.process.ppid)) == 0 else ""


def _same_code_in_the_parent(end: ThreadFacts) -> str:
    file, parents = end.place.inside[0].file, helpers_of_parent(end)
    same = [thread.label for thread in parents if any(one.file == file for one in thread.stack)]
    return f"the parent process has the threads {and_joined(same)}, which may have held the lock" if same else ""


def _in_reentrant_code(end: ThreadFacts) -> str:
    reentrant = _REENTRANT.search(end.place.inside[0].file.replace("\\", "/"))
    return "its holder may take it again, so it does not wait for itself" if reentrant else ""


def _takes_it_first(end: ThreadFacts) -> str:
    return "the worker makes its first sample, so it does not wait for itself" if _in_first_sample(end) else ""


def _two_at_one_line(end: ThreadFacts) -> str:
    others = [end.case.at(pid) for pid in end.case.workers if pid != end.pid]
    same = [one.name for one in others if spot(one.place) == spot(end.place) and waiting_in(one) == ""]
    return f"{and_joined(same)} waits at the same line" if same else ""


class HolderRow(NamedTuple):
    """Evidence of who holds a lock that a forked worker waits for. seen: in words, "" = none; other: may be wrong."""

    seen: Callable[[ThreadFacts], str]
    cause: HangCause
    sure: Sure = Sure.LIKELY
    other: bool = True
    source: str = "stack"


HOLDERS: Final = (
    HolderRow(_taken_around, HangCause.SELF_LOCK, other=False),
    HolderRow(_is_new, HangCause.SELF_LOCK, other=False, source="memory"),
    HolderRow(_held_in_an_idle_fork, HangCause.FORK_LOCK, source="memory"),
    HolderRow(_in_reentrant_code, HangCause.FORK_LOCK, other=False),
    HolderRow(_held_in_the_parent, HangCause.FORK_LOCK, source="memory"),
    HolderRow(_same_code_in_the_parent, HangCause.FORK_LOCK),
    HolderRow(_takes_it_first, HangCause.FORK_LOCK),
    HolderRow(_two_at_one_line, HangCause.FORK_LOCK, Sure.POSSIBLE),
    HolderRow(lambda end: "the lock has no owner, and no other process shows that it was held at the fork",
              HangCause.SELF_LOCK, Sure.POSSIBLE),
)  # fmt: skip
"""The first row with evidence decides."""


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

    After `lock_of_another_thread` and `lock_at_the_fork`: no other thread of the process runs the program's code.
    """
    found, end = _lock_wait(chain.end), chain.end
    if found is None or not LOCKING.search(end.place.inside[0].source or "lock"):
        return None  # C code waits for its own threads
    also = "a thread that has ended acquired it and never released it"
    facts = (*found.shown, _no_other(end, _SO_NONE_RELEASES))
    what, fix = f"{found.what} that no other thread can release", ""
    if end.place.interrupted:
        what, fix = f"{found.what}{_INTERRUPTED}", _IN_A_HANDLER
    return Judgement(HangCause.SELF_LOCK, what, Sure.LIKELY, facts, (also,), fix)
