"""The rules: each names one kind of cause from the end of a chain, and says what would speak against it.

Interface: `RULES`, in order; `judged(case, chain)` -> `Judgement` of the first that fits. Pure.

A rule is written from a cause, not from a case: it looks at what a thread is blocked in (of the kernel and of Python),
and not at which test program that might be. To add one, write a function and put it into `RULES` before those that it
is more special than. `counter` is evidence that would refute it; a rule that sees it says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from minidl.doctor.case import LoopThread, RunFacts, in_library, spot
from minidl.doctor.chain import (
    TWO_ENDS,
    Chain,
    Link,
    collective,
    follow,
    gil_starved,
    joins,
    pool_of,
    serves,
    waiting_in,
)
from minidl.doctor.diagnosis import EvidenceLine, HangCause, Sure
from minidl.doctor.places import AT_HOME, USERS, LoaderStep, library
from minidl.evidence.graph import Blocked, KernelWait, semaphore_at
from minidl.evidence.model import Frame, SeenThread

SOON: Final = 5.0
"""Seconds: a sleep that ends within them is no hang."""

NAP: Final = 60.0
"""Seconds: who sleeps for less may still answer."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a rule found. what: for the sentence, after the name and the place of the chain's end.

    moves: it goes on by itself. helped: somebody who could end the wait is at work, so it is no hang for certain.
    alone: nobody who could end the wait is left, so it is not slow either.
    """

    cause: HangCause
    what: str
    sure: Sure = Sure.CERTAIN
    facts: tuple[EvidenceLine, ...] = ()
    also: tuple[str, ...] = ()
    fix: str = ""
    moves: bool = False
    helped: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class CauseRule:
    """One rule. test: None = it does not apply. counter: what would speak against it."""

    test: Callable[[RunFacts, Chain], Judgement | None]
    about: str
    counter: str


# --- What a process is in, whatever its code --------------------------------------------------------------------------
def _idle_and_joined(case: RunFacts, chain: Chain) -> Judgement | None:
    """The loop waits for the end of a worker, and that waits for a task."""
    if not chain.missing or chain.links[0].place.step not in (LoaderStep.SHUTDOWN, LoaderStep.EXIT):
        return None
    return Judgement(
        HangCause.NOBODY, "is idle; nothing has told it to end", Sure.POSSIBLE,
        (EvidenceLine(f"{case.name(chain.end.pid)} waits for a task", f"stacks of {chain.end.pid}"),),
        ("it was told, and is about to end",), "close the iterator, or end it, before the program ends",
    )  # fmt: skip


def _nobody_has_it(case: RunFacts, chain: Chain) -> Judgement | None:
    """All workers wait for tasks, and the loop waits for a result: it was lost on its way, or never sent."""
    if not chain.missing:
        return None
    loop = next(link for link in chain.links if link.pid not in case.workers)
    torn = _bytes_waiting(case, loop)
    told = case.told
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
            "a writer was killed in the middle of a message: find what killed it (dmesg, exit codes)",
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
        "look for a traceback of QueueFeederThread on stderr: a result that can't be pickled is dropped there; return "
        "plain tensors",
    )  # fmt: skip


def _bytes_waiting(case: RunFacts, loop: Link) -> int:
    """Bytes in the pipe that the loop polls; -1 = unknown."""
    process, thread = case.processes.get(loop.pid), case.thread(loop.pid, loop.tid)
    if process is None or thread is None or thread.syscall is None:
        return -1
    waiting = [one.waiting for fd in thread.syscall.fds if (one := process.descriptor(fd)) is not None]
    return max(waiting, default=-1)


def _worker_is_gone(case: RunFacts, chain: Chain) -> Judgement | None:
    """The loop waits for a worker that is no more, and no other thread of the run can be followed to."""
    loop, place = chain.end, chain.end.place
    waits = place.step in (LoaderStep.NEXT, LoaderStep.HAND_OVER, LoaderStep.READ) and not place.interrupted
    if len(chain.links) > 1 or not waits:
        return None
    number = case.told.worker if case.told and case.told.worker >= 0 else place.worker
    name, workers = case.processes[loop.pid].name, case.workers_of(loop.pid)
    ended = [p for p in case.now.processes if p.ended and p.ppid == loop.pid and p.name == name]  # a fork of it
    if not ended and (number < 0 or number in workers or not workers):
        return None
    facts = tuple(
        EvidenceLine(f"pid {p.pid} has ended ({exit_in_words(p.exit_code)}), unreaped", f"/proc/{p.pid}") for p in ended
    )
    which = f"worker {number}" if number >= 0 else "a worker"
    how = f" ({exit_in_words(ended[0].exit_code)})" if ended else ""
    return Judgement(HangCause.DIED, f"waits for {which}, which has ended{how}", Sure.LIKELY, facts, fix=_KILLED)


def _worker_has_ended(case: RunFacts, chain: Chain) -> Judgement | None:
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
            Sure.LIKELY, (*facts, lying), ("it ended after a whole message, and the loop is about to notice",), _KILLED,
        )  # fmt: skip
    return Judgement(HangCause.DIED, f"has ended ({how})", Sure.LIKELY, facts, fix=_KILLED)


_KILLED: Final = "find what killed it: dmesg for the out-of-memory killer, the scheduler's log, python -X faulthandler"


def _cycle(case: RunFacts, chain: Chain) -> Judgement | None:
    if not chain.cycle:
        return None
    links = chain.links[chain.back :]
    ring = " -> ".join(case.name(link.pid) for link in links)
    said = links[:-1].index(chain.links[1]) if chain.links[1] in links[:-1] else -1
    ring += "".join(f"; {case.name(one.pid)} is {one.wait.words}" for i, one in enumerate(links[:-1]) if i != said)
    given_up = any(link.wait.bounded and link.place.step in USERS for link in links)  # the loader's own are polls
    locks = any(link.wait.kind in _LOCKS for link in links)
    facts = tuple(
        EvidenceLine(f"{case.name(link.pid)} is {link.wait.words}", _call(case, link)) for link in chain.links[:-1]
    )
    return Judgement(
        HangCause.CYCLE, f"is {chain.links[1].wait.words}, which closes a circle ({ring})",
        Sure.POSSIBLE if given_up else Sure.CERTAIN, facts, helped=given_up,
        also=("one of them has a timeout, which ends the circle",) if given_up else (),
        fix=_ONE_ORDER if locks else _READ_ALL,
    )  # fmt: skip


_LOCKS: Final = frozenset({Blocked.FILE_LOCK, Blocked.SEMAPHORE, Blocked.MUTEX, Blocked.FUTEX})
_ONE_ORDER: Final = "take the locks in one order everywhere, or hold none while waiting for another process"
_READ_ALL: Final = (
    "one of them has to go on without the other: read all pipes of a child while it runs (communicate(), a thread), "
    "and before it is waited for; answer requests in a thread of its own"
)


def _stopped(case: RunFacts, chain: Chain) -> Judgement | None:
    kind, pid = chain.end.wait.kind, chain.end.pid
    if kind is Blocked.TRACED:
        tracer = case.processes[pid].tracer
        return Judgement(
            HangCause.STOPPED, f"is stopped by a debugger (pid {tracer})", facts=(_state(case, chain.end),),
            fix=f"let the debugger (pid {tracer}) continue it",
        )  # fmt: skip
    if kind is not Blocked.STOPPED:
        return None
    return Judgement(
        HangCause.STOPPED, "is stopped by a signal (state T)", facts=(_state(case, chain.end),),
        fix=f"kill -CONT {pid}; find who sent SIGSTOP (a job control, a memory guard, a suspended container)",
    )  # fmt: skip


def _uninterruptible(case: RunFacts, chain: Chain) -> Judgement | None:
    if chain.end.wait.kind is not Blocked.UNINTERRUPTIBLE:
        return None
    return Judgement(
        HangCause.UNINTERRUPTIBLE, f"is {chain.end.wait.words} (state D)", facts=(_state(case, chain.end),),
        also=("a slow disk or network file system, which may still answer",),
        fix="look at the disk or the network file system that it reads from (dmesg, nfsstat); signals don't help",
    )  # fmt: skip


def _keeps_the_gil(case: RunFacts, chain: Chain) -> Judgement | None:
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
        fix="the C code that it calls must release the GIL (ctypes.CDLL instead of PyDLL, nogil in Cython), or return",
    )  # fmt: skip


def _no_cpu(case: RunFacts, chain: Chain) -> Judgement | None:
    if chain.end.wait.kind is not Blocked.READY:
        return None
    process = case.processes[chain.end.pid]
    machine = case.now.machine
    quotas = [one.cpu_quota for one in machine.cgroups if one.cpu_quota > 0]
    facts = [EvidenceLine(f"it may use CPUs {list(process.cpus)} of {machine.cpus}; load {machine.load:.1f}", "/proc")]
    facts += [EvidenceLine(f"its cgroup has {min(quotas):g} CPUs", "cgroup")] if quotas else []
    return Judgement(
        HangCause.NO_CPU, f"is {chain.end.wait.words}", Sure.LIKELY, tuple(facts), moves=True,
        fix="give it CPUs: fewer workers, a wider affinity (os.sched_setaffinity), a larger quota",
    )  # fmt: skip


# --- Locks ------------------------------------------------------------------------------------------------------------
def _file_lock(case: RunFacts, chain: Chain) -> Judgement | None:
    wait = chain.end.wait
    if wait.kind is not Blocked.FILE_LOCK:
        return None
    facts = _holders(case, wait)
    who = listed([case.name(one.pid) for one in wait.holders]) or "nobody that could be seen"
    polls = wait.bounded  # the kernel knows no wait: that it is for this lock is a conclusion
    sure = (Sure.CERTAIN if wait.certain and not polls else Sure.LIKELY) if facts else Sure.POSSIBLE
    passed = facts and not wait.certain and not polls
    holds = "took it, and may have passed it on to a child" if passed else "holds it"
    return Judgement(
        HangCause.FILE_LOCK, f"is {wait.words}; {who} {holds}", sure, facts,
        _POLLED if polls else () if facts else _ELSEWHERE,
        "end or fix the holder; lock with LOCK_NB and a timeout, and keep the lock for as short as possible",
    )  # fmt: skip


def _holders(case: RunFacts, wait: KernelWait) -> tuple[EvidenceLine, ...]:
    return tuple(EvidenceLine(f"{case.name(one.pid)} {one.why}", "/proc/locks, fdinfo") for one in wait.holders)


def _held_file_lock(case: RunFacts, chain: Chain) -> Judgement | None:
    """The holder of a file lock waits itself: what for says the rule of that wait."""
    locked = next((link.wait for link in reversed(chain.links) if link.wait.kind is Blocked.FILE_LOCK), None)
    if locked is None or locked is chain.end.wait:
        return None
    below = _judged_alone(case, chain)
    return Judgement(
        HangCause.FILE_LOCK,
        f"holds that lock, and {below.what}", Sure.LIKELY if locked.bounded else below.sure,
        (*_holders(case, locked), *below.facts), (*below.also, *(_POLLED if locked.bounded else ())),
        f"keep the lock for as short as possible, and do nothing slow while it is held; {below.fix}",
    )  # fmt: skip


_ELSEWHERE: Final = ("a lock of another machine (network file system), or of another container",)
_POLLED: Final = ("it polls for something else, and the lock has nothing to do with it",)


def _mutex(case: RunFacts, chain: Chain) -> Judgement | None:
    """A mutex of glibc, in a library: it names its owner."""
    end = chain.end
    if end.wait.kind is not Blocked.MUTEX:
        return None
    thread = case.thread(end.pid, end.tid)
    assert thread is not None
    fact = EvidenceLine(f"the mutex names thread {thread.owner} as its owner", f"memory of {end.pid}")
    if thread.owner == end.tid:
        return Judgement(
            HangCause.SELF_LOCK, f"is {end.wait.words}", facts=(fact,), fix="unlock before it is locked again"
        )
    if case.processes[end.pid].thread(thread.owner) is None:
        return Judgement(HangCause.FORK_LOCK, f"is {end.wait.words}", facts=(fact,), fix=_AFTER_FORK)
    return Judgement(HangCause.LOCK, f"is {end.wait.words}", facts=(fact,), fix="see what the owner waits for")


_AFTER_FORK: Final = (
    "start workers before any thread holds it: multiprocessing_context='forkserver' or 'spawn', or make the object in "
    "the worker (worker_init_fn)"
)


def _barrier(case: RunFacts, chain: Chain) -> Judgement | None:
    """A barrier: it waits for a number of threads or processes, and says nothing of which."""
    end = chain.end
    if not any(map(_of_barrier, end.place.inside)):
        return None
    stacks = {pid: [f for t in process.threads for f in t.stack or ()] for pid, process in case.processes.items()}
    there = [pid for pid, frames in stacks.items() if any(map(_of_barrier, frames))]
    others = [case.name(pid) for pid in case.workers if pid not in there]
    facts = (
        EvidenceLine(f"at the barrier: {listed([case.name(pid) for pid in there])}", "stacks"),
        *((EvidenceLine(f"not at the barrier: {listed(others)}", "stacks"),) if others else ()),
    )
    missing = f"; {listed(others)} {'have' if len(others) > 1 else 'has'} not come to it" if others else ""
    return Judgement(
        HangCause.BARRIER, f"waits at a barrier{missing}", Sure.CERTAIN, facts,
        fix="a barrier needs all of its parties: workers get different samples, so don't wait for one another in a "
        "dataset; give it a timeout",
    )  # fmt: skip


def _of_barrier(frame: Frame) -> bool:
    """Whether a frame is of a barrier: Python before 3.11 does not name its class."""
    return frame.file.endswith("threading.py") and "Barrier" in frame.function + frame.variables.get("self", "")


def _collective_missed(case: RunFacts, chain: Chain) -> Judgement | None:
    end = chain.end
    name = collective(end.place)
    if not name:
        return None
    others = [(pid, place) for pid in case.processes if pid != end.pid and collective(place := case.place(pid, pid))]
    apart = [(pid, place) for pid, place in others if spot(place) != spot(end.place)]
    facts = [EvidenceLine(f"it is in {name}", f"stack of {end.pid}")]
    facts += [EvidenceLine(f"{case.name(pid)} is in {collective(p)}, {spot(p)}", f"stack of {pid}") for pid, p in apart]
    missed = "".join(f"; {case.name(pid)} is in {collective(place)} ({spot(place)})" for pid, place in apart[:1])
    also = ("the other ranks are on other machines, or were not looked at: run the doctor on each",)
    return Judgement(
        HangCause.COLLECTIVE, f"waits in the collective {name} for the other ranks{missed}", Sure.LIKELY,
        tuple(facts), () if apart else also,
        "find the rank that has not come to it: it is the one whose loader or code hangs; ranks must run the same "
        "number of steps",
    )  # fmt: skip


def _rank_naps(case: RunFacts, chain: Chain) -> Judgement | None:
    """A rank that sleeps for short times, and that another one waits for in a collective."""
    name = collective(chain.links[-2].place) if len(chain.links) > 1 else ""
    found = _sleeps(case, chain) or _moves(case, chain) if name else None
    naps = found is not None and found.cause is HangCause.SLEEP and found.moves
    if found is None or not naps or not _same_place(case, chain.end):
        return None
    return Judgement(
        HangCause.COLLECTIVE, f"has not come to the collective {name}: it {found.what}", Sure.LIKELY, found.facts,
        ("it comes to the collective once it has what it waits for",),
        "find what that rank waits for; ranks must run the same number of steps", helped=True,
    )  # fmt: skip


def _same_place(case: RunFacts, end: Link) -> bool:
    """Whether a thread was at the same line, task and sample at the first look."""
    before = case.before(end.pid, end.tid)
    return before is not None and (before.task, before.sample, spot(before)) == (
        end.place.task, end.place.sample, spot(end.place),
    )  # fmt: skip


_COUNTERPART: Final = {
    "acquire": (HangCause.LOCK, "release"), "get": (HangCause.QUEUE_EMPTY, "put"), "put": (HangCause.QUEUE_FULL, "get"),
    "join": (HangCause.NOBODY, "task_done"), "wait": (HangCause.NOBODY, "set or notify"),
}  # fmt: skip
"""Of the methods that wait, of what a multiprocessing.Manager serves: the cause, and the method that ends the wait."""


def _manager(case: RunFacts, chain: Chain) -> Judgement | None:
    """A process of multiprocessing.Manager(), in a call for one client that only another client can end."""
    end, thread = chain.end, case.thread(chain.end.pid, chain.end.tid)
    method = serves(thread) if thread is not None else None
    if method not in _COUNTERPART or end.wait.kind is not Blocked.FUTEX or len(chain.links) < 2:
        return None
    cause, ends = _COUNTERPART[method]
    return Judgement(
        cause, f"is a Manager's, and waits in {method}() for another client of it to call {ends}()", Sure.LIKELY,
        (EvidenceLine(f"it runs {method}() for a client", f"stack of thread {end.tid}"),),
        ("a client that has ended was to do so",),
        f"see who is to call {ends}(), and whether that waits for this worker; give the wait a timeout",
    )  # fmt: skip


def _thread_is_missing(case: RunFacts, chain: Chain) -> Judgement | None:
    """It waits for what another thread has to do, and its process, made by a fork, has none that could."""
    end, waiting = chain.end, waiting_in(chain.end)
    if not waiting:
        return None
    process = case.processes[end.pid]
    own = case.users_threads(end.pid, but=end.tid)
    if own or end.tid != end.pid or end.pid not in case.workers or case.forked(end.pid) is not True:
        return None  # another thread than the main one was started after the fork
    parents = case.users_threads(process.ppid, but=_loop_tid(case, process.ppid))
    facts = [EvidenceLine("no other thread of it runs the program's code", f"threads of {end.pid}")]
    pooled = any(re.search(r"concurrent/futures|multiprocessing/pool", f.file) for f in end.place.inside)
    if parents:
        names = listed([thread.python_name or thread.name for thread in parents])
        facts.append(
            EvidenceLine(f"the process that forked it has the threads {names}, which a fork does not copy", "threads")
        )
    if not parents and not pooled:
        return None
    return Judgement(
        HangCause.MISSING_THREAD, f"waits in {waiting} for a thread that the fork did not copy",
        Sure.CERTAIN if parents and pooled else Sure.LIKELY, tuple(facts),
        () if pooled else ("nothing was ever to answer, fork or not",), _AFTER_FORK,
    )  # fmt: skip


def _loop_tid(case: RunFacts, pid: int) -> int:
    return next((loop.tid for loop in case.loops if loop.pid == pid), pid)


def _nobody_answers(case: RunFacts, chain: Chain) -> Judgement | None:
    """It waits for an event, a condition or a queue of its own process, in which no thread could end that."""
    end, waiting = chain.end, waiting_in(chain.end)
    if not waiting:
        return None
    own = case.users_threads(end.pid, but=end.tid)
    pool = pool_of(case, end)
    if pool and not any(works for _, _, works in pool):
        names = listed(list(dict.fromkeys(case.name(pid) for pid, _, _ in pool)))
        return Judgement(
            HangCause.NOBODY, f"waits in {waiting} for the result of a pool that does nothing", Sure.LIKELY,
            (EvidenceLine(f"{names} waits for a task of the pool", "stacks"),),
            ("the task was never begun, or its result is on its way",),
            "find what killed the process that had the task: a multiprocessing.Pool starts another one and says "
            "nothing; ProcessPoolExecutor raises BrokenProcessPool",
        )  # fmt: skip
    full = waiting.startswith("Queue.put")
    cause = HangCause.QUEUE_FULL if full else HangCause.NOBODY
    cause = HangCause.QUEUE_EMPTY if waiting.startswith("Queue.get") or "SimpleQueue" in waiting else cause
    also: tuple[str, ...]
    if own:
        names = listed([f"{t.python_name or t.name} ({case.waits[end.pid, t.tid].words})" for t in own])
        busy = list(dict.fromkeys(pid for pid, tid, works in pool if works and _at_work(case, pid, tid)))
        doing = _doing_of(case, end.pid, own)
        doing += f"; of its pool {listed([case.name(pid) for pid in busy])} is at work" if busy else ""
        also = ("one of these threads has to answer, and is late or stuck",)
        if waiting.startswith(("Queue.join", "join (queue")):
            also = ("a thread that had taken an item ended, by an exception, and never called task_done()",)
        return Judgement(
            cause, f"waits in {waiting}{doing}", Sure.POSSIBLE,
            (EvidenceLine(f"other threads of its process: {names}", "stacks"),), also,
            "see why that thread does not answer",
            helped=bool(busy) or any(_at_work(case, end.pid, t.tid) for t in own),
        )  # fmt: skip
    also = ("a signal handler is to end it",)
    thread = case.thread(end.pid, end.tid)
    if any(f.file.endswith("concurrent/futures/thread.py") for f in (thread.stack if thread else None) or ()):
        also = ("it is a task of a pool, and waits for another task of that pool, which has no thread left for it",)
    fork = case.forked(end.pid)
    if end.pid in case.workers and fork and end.tid == end.pid:
        also = ("the thread that was to answer lived in the process that forked it, and a fork copies no threads",)
    return Judgement(
        cause, f"waits in {waiting}, which no thread of its process can end", Sure.LIKELY,
        (EvidenceLine("no other thread of it runs the program's code", f"threads of {end.pid}"),), also,
        "answer it from the same process, or give the wait a timeout",
    )  # fmt: skip


def _doing_of(case: RunFacts, pid: int, threads: list[SeenThread]) -> str:
    """What the threads of a process that could end a wait are in, to stand after its name; "" = no such threads."""
    said = []
    for thread in threads:
        if (place := case.place(pid, thread.tid)).users is None:  # a library's own thread
            continue
        chain = follow(case, LoopThread(pid, thread.tid, place))
        first, end = chain.links[0], chain.end
        name = thread.python_name or thread.name
        further = f" ({case.name(end.pid)} is {end.wait.words})" if end is not first and not chain.cycle else ""
        said.append(f"{name} ({spot(place)}) is {first.wait.words}{further}")
    return f" [its thread{'s' * (len(said) > 1)} {listed(said, 2)}]" if said else ""


_LOCKING: Final = re.compile(r"\bwith\b|acquire|lock|print\(|write|flush|log|import|emit", re.IGNORECASE)


def _native_pool_is_missing(case: RunFacts, chain: Chain) -> Judgement | None:
    """C code of a forked worker waits, in a line that takes no lock: for threads that the fork did not copy."""
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
        HangCause.MISSING_THREAD, "waits in C code, for threads that the fork did not copy (OpenMP, a library's pool)",
        Sure.LIKELY if had else Sure.POSSIBLE, tuple(facts), ("a lock inside of that library was held at the fork",),
        "torch.set_num_threads(1) or OMP_NUM_THREADS=1 before the workers start; multiprocessing_context='forkserver'",
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


_REENTRANT: Final = re.compile(r"(^|/)(logging/__init__|functools)\.py$")
"""The standard library's modules whose locks are re-entrant."""


def _in_first_sample(case: RunFacts, link: Link) -> bool:
    """Whether a worker is in the first sample of its first task, in one function: nothing of it took a lock before."""
    number, place, thread = case.workers.get(link.pid, -1), link.place, case.thread(link.pid, link.tid)
    if place.step is not LoaderStep.SAMPLE or place.task != number or place.sample < 0 or thread is None:
        return False
    first = re.compile(rf"\[{place.sample}[,\]]")
    fetch = [f for f in thread.stack or () if library(f.file) and any(map(first.match, f.variables.values()))]
    return bool(fetch) and sum(not library(frame.file) for frame in place.inside) == 1


def _of_a_lock(case: RunFacts, chain: Chain) -> tuple[str, tuple[EvidenceLine, ...]] | None:
    """That the chain's end waits for a lock of Python's, and the line where it does; None if it does not."""
    end = chain.end
    if waiting_in(end) != "":
        return None
    frame = end.place.inside[0]
    line = f"{frame.function} ({frame.file.rpartition('/')[2]}:{frame.line})"
    shown = (EvidenceLine(f"its line: {frame.source}", f"stack of {end.pid}"),) if frame.source else ()
    return f"waits for a lock in {line}" if library(frame.file) else "waits for a lock", shown


def _lock_of_threads(case: RunFacts, chain: Chain) -> Judgement | None:
    """A lock of Python's, which has no owner; other threads of the process may hold it."""
    found, end = _of_a_lock(case, chain), chain.end
    own = case.users_threads(end.pid, but=end.tid)
    if found is None or not own:
        return None
    what, shown = found
    names = listed([f"{t.python_name or t.name} ({case.waits[end.pid, t.tid].words})" for t in own])
    if _each_waits_for_a_lock(case, end, own):
        what += ", as others do: each may hold the one that the next waits for"
    return Judgement(
        HangCause.LOCK, f"{what}{_doing_of(case, end.pid, own)}", Sure.POSSIBLE,
        (*shown, EvidenceLine(f"other threads of its process: {names}", "stacks")),
        ("one of these threads holds it", "it holds it itself"),
        "see which of them is inside of the lock; hold it for as short as possible",
        helped=any(_at_work(case, end.pid, t.tid) for t in own),
    )  # fmt: skip


def _alone(pid: int) -> EvidenceLine:
    return EvidenceLine(
        "no other thread of its process runs the program's code, so none can release it", f"threads of {pid}"
    )


def _lock_at_the_fork(case: RunFacts, chain: Chain) -> Judgement | None:
    """A lock that was held when the worker was forked: in the worker it stays so."""
    found, end = _of_a_lock(case, chain), chain.end
    if found is None or end.pid not in case.workers or case.forked(end.pid) is not True:
        return None
    (what, shown), frame, parent = found, end.place.inside[0], case.processes[end.pid].ppid
    held, fix = "which was held when the worker was forked", _AFTER_FORK
    facts = (*shown, _alone(end.pid))
    also: tuple[str, ...] = ("it holds the lock itself (not re-entrant)",)
    parents = case.users_threads(parent, but=_loop_tid(case, parent)) if parent in case.processes else []
    reentrant = _REENTRANT.search(frame.file.replace("\\", "/"))
    if any(f.function.startswith("_ModuleLock") for f in end.place.inside):  # it would notice its own circle
        what, also = "waits for the lock of a module's import", ()
        fix = f"import the module before a thread does, and before the workers start; {_AFTER_FORK}"
    elif parents:
        same = [t for t in parents if any(f.file == frame.file for f in t.stack or ())]
        names = listed([t.python_name or t.name for t in (same or parents)])
        has = f"the process that forked it has the threads {names}, one of which may have held it"
        facts += (EvidenceLine(has, "threads"),)
    elif reentrant or _in_first_sample(case, end):
        why = "its holder may take it again" if reentrant else "it is in the first sample that it makes"
        facts += (EvidenceLine(f"{why}, so it does not wait for itself", f"stack of {end.pid}"),)
        also = () if reentrant else ("it has taken the lock twice in this sample",)
    else:
        return None
    return Judgement(HangCause.FORK_LOCK, f"{what}, {held}", Sure.LIKELY, facts, also, fix)


def _lock_of_its_own(case: RunFacts, chain: Chain) -> Judgement | None:
    """A lock of Python's that no other thread can release."""
    found, end = _of_a_lock(case, chain), chain.end
    if found is None:
        return None
    what, shown = found
    may, also = "no other thread can release", "it was acquired, and never released, by a thread that has ended"
    if end.pid in case.workers and case.forked(end.pid) is True:
        may = "no thread of its process can release"
        also = "the main thread, or one that has ended, held it when the worker was forked: then use 'forkserver'"
    return Judgement(
        HangCause.SELF_LOCK, f"{what} that {may}", Sure.LIKELY, (*shown, _alone(end.pid)), (also,),
        "it holds the lock itself: use threading.RLock, or release it before it is taken again",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Shared:
    """A wait for a semaphore of several processes, which has no owner. pids: who shares it; could: those that are in
    the user's code, and do not wait for it themselves: they may hold it, or set what it stands for."""

    end: Link
    pids: tuple[int, ...]
    same: tuple[int, ...]
    could: tuple[int, ...]
    facts: tuple[EvidenceLine, ...]


def _shared(case: RunFacts, chain: Chain) -> _Shared | None:
    end = chain.end
    if end.wait.kind is not Blocked.SEMAPHORE or (end.wait.bounded and not _asks_again(case, end)):
        return None
    process, thread = case.processes[end.pid], case.thread(end.pid, end.tid)
    semaphore = semaphore_at(process, thread.syscall.address) if thread is not None and thread.syscall else None
    pids = tuple(holder.pid for holder in end.wait.holders)
    users = [pid for pid in pids if _in_users_code(case, pid)]
    same = tuple(pid for pid in users if _waits_for_same(case, pid, end.wait.target))
    value = f", value {semaphore.value}" if semaphore is not None and semaphore.value >= 0 else ""
    facts = [EvidenceLine(f"{case.name(end.pid)} waits for {end.wait.target}{value}", f"futex of {end.tid}, maps")]
    facts += [EvidenceLine(f"{case.name(pid)} waits for the same one", "futex") for pid in same]
    return _Shared(end, pids, same, tuple(pid for pid in users if pid not in same), tuple(facts))


def _asks_again(case: RunFacts, end: Link) -> bool:
    """Whether a thread waits in the user's code with a timeout, again and again."""
    return end.place.step in USERS and _same_place(case, end)


def _full_queue(case: RunFacts, chain: Chain) -> Judgement | None:
    """The semaphore counts the room in a bounded queue of multiprocessing."""
    shared = _shared(case, chain)
    if shared is None:
        return None
    frames = [f for f in shared.end.place.inside if f.file.endswith("multiprocessing/queues.py")]
    if not frames or not frames[0].function.endswith("put"):
        return None
    return Judgement(
        HangCause.QUEUE_FULL, "waits for room in a bounded queue that nobody empties", Sure.LIKELY, shared.facts,
        fix="read that queue while the workers run, or don't bound it",
    )  # fmt: skip


def _loaders_queue(case: RunFacts, chain: Chain) -> Judgement | None:
    """The semaphore is the lock of a queue of the loader's own, which is held for one message at a time."""
    shared = _shared(case, chain)
    if shared is None or shared.end.place.step not in (LoaderStep.WRITE, LoaderStep.IDLE, LoaderStep.READ):
        return None
    return Judgement(
        HangCause.DEAD_LOCK_HOLDER, "waits for the lock of the loader's own queue", Sure.LIKELY, shared.facts,
        ("a live process holds it and is stopped",),
        "a process that was killed in the middle of a message left it locked: find what killed it",
    )  # fmt: skip


def _nobody_notifies(case: RunFacts, chain: Chain) -> Judgement | None:
    """The semaphore is that of an Event or a Condition of multiprocessing."""
    shared = _shared(case, chain)
    if shared is None:
        return None
    waits = [f.function for f in shared.end.place.inside if f.file.endswith("multiprocessing/synchronize.py")]
    if not any(name in ("Event.wait", "Condition.wait", "wait") for name in waits):
        return None
    event = "Event.wait" in waits or waits.count("wait") > 1  # Python 3.10 does not name the class
    named = "an Event of several processes that nobody sets" if event else "the notify of a Condition"
    could = f" ({listed([case.name(pid) for pid in shared.could])} could)" if shared.could else ""
    return Judgement(
        HangCause.NOBODY, f"waits for {named}{could}", Sure.POSSIBLE if could else Sure.LIKELY, shared.facts,
        () if event else ("the notify came before the wait",),
        "see who is to set or notify it, and whether that waits for this worker; give the wait a timeout",
        helped=any(_at_work(case, pid, pid) for pid in shared.could),
    )  # fmt: skip


def _crossed_locks(case: RunFacts, chain: Chain) -> Judgement | None:
    """Two processes wait for one lock each, and each is the only one that may hold what the other waits for."""
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
        f"waits for a lock that only {case.name(pid)}, in {_doing(case, pid)}, may hold, and that one for a lock that "
        "only it may hold: a circle",
        Sure.LIKELY, (*shared.facts, *theirs.facts), ("both locks are held by a process that has died",),
        "take the locks in one order everywhere",
    )  # fmt: skip


def _shared_lock(case: RunFacts, chain: Chain) -> Judgement | None:
    """Who shares the semaphore, and is in code of the user's that may hold it; or can't be seen."""
    shared = _shared(case, chain)
    if shared is None:
        return None
    if shared.could:
        names = listed([case.name(pid) for pid in shared.could])
        theirs = (
            EvidenceLine(f"{case.name(pid)} shares it and is in its own code: {_doing(case, pid)}", "stack")
            for pid in shared.could
        )
        return Judgement(
            HangCause.SEMAPHORE, f"waits for a lock of several processes; {names} may hold it", Sure.POSSIBLE,
            (*shared.facts, *theirs), ("a permit was never given back",),
            "see whether that process is inside of the lock",
            helped=any(_at_work(case, pid, pid) for pid in shared.could),
        )  # fmt: skip
    if all(case.place(pid, pid).seen for pid in shared.pids):
        return None
    return Judgement(
        HangCause.SEMAPHORE, "waits for a lock or permit of several processes", Sure.POSSIBLE, shared.facts,
        ("another of these processes holds it", "a permit was never given back"),
        "install py-spy: the stacks of the processes that share it say which of them is inside of it",
    )  # fmt: skip


def _permit_lost(case: RunFacts, chain: Chain) -> Judgement | None:
    """All who share the semaphore are seen, and none is in code that could release it."""
    shared = _shared(case, chain)
    if shared is None:
        return None
    idle = listed([case.name(pid) for pid in shared.pids if pid not in shared.same])
    waits = [case.name(one.pid) for one in chain.links[:1] if one.pid in shared.pids and one is not shared.end]
    seen = (EvidenceLine(f"{idle} share it, and are not in code that could release it", "stacks"),) if idle else ()
    held = f": it was lost, or {listed(waits)} holds it, which waits for the batch" if waits else ""
    return Judgement(
        HangCause.PERMIT_LOST,
        f"waits for a lock or permit of several processes that none of them is about to release{held}",
        Sure.LIKELY, (*shared.facts, *seen),
        (
            *(_ended_children(case, "held it") or ("a process that has died held it (it has no owner)",)),
            "nobody was ever to release it",
        ),
        "release it in `finally` or by `with`; a process that dies while it holds it never gives it back",
        helped=any(
            _at_work(case, pid, one.tid)
            for pid in shared.pids
            for one in case.users_threads(pid)
            if case.place(pid, one.tid).users is not None
        ),
    )  # fmt: skip


def _ended_children(case: RunFacts, did: str) -> tuple[str, ...]:
    """The program's own processes that have ended and were not waited for: what they did, it may be."""
    loops = {loop.pid for loop in case.loops}
    gone = [p for p in case.now.processes if p.ended and p.ppid in loops and p.pid not in case.workers]
    said = [f"process {p.name} (pid {p.pid}), which has ended ({exit_in_words(p.exit_code)})" for p in gone]
    return (f"{listed(said, 2)}, {did}",) if said else ()


def _at_work(case: RunFacts, pid: int, tid: int) -> bool:
    """Whether a thread gets on: it computes, runs now and then, or sleeps for a while."""
    wait, thread = case.wait(pid, tid), case.thread(pid, tid)
    if wait is None or thread is None:
        return False
    naps = wait.kind is Blocked.SLEEPS and thread.syscall is not None and 0 <= thread.syscall.timeout < NAP
    return naps or wait.kind in (Blocked.COMPUTES, Blocked.READY, Blocked.MOVES)


def _in_users_code(case: RunFacts, pid: int) -> bool:
    steps = {case.place(pid, t.tid).step for t in case.processes[pid].threads} if pid in case.processes else set()
    helper = pid not in case.workers and all(pid != loop.pid for loop in case.loops)  # a process of the program's own
    if helper and case.place(pid, pid).users is not None:
        return True
    return bool(steps & {LoaderStep.SAMPLE, LoaderStep.ITERATE, LoaderStep.COLLATE, LoaderStep.INIT, LoaderStep.OPEN})


def _waits_for_same(case: RunFacts, pid: int, target: str) -> bool:
    return any(
        (wait := case.wait(pid, t.tid)) is not None and wait.target == target for t in case.processes[pid].threads
    )


# --- Pipes, sockets, files, children ----------------------------------------------------------------------------------
def _child(case: RunFacts, chain: Chain) -> Judgement | None:
    waiter = chain.end
    if waiter.wait.kind is not Blocked.CHILD:
        return None
    known = listed([case.name(one.pid) for one in waiter.wait.holders]) or "none is left"
    return Judgement(
        HangCause.CHILD, f"waits for its child ({known})", Sure.LIKELY,
        (EvidenceLine(waiter.wait.words, _call(case, waiter)),),
        fix="give the wait a timeout; see what the child does",
    )  # fmt: skip


def _waiting_child(case: RunFacts, chain: Chain) -> Judgement | None:
    """The child that is waited for waits itself: what for says the rule of that wait."""
    waiter = next((link for link in reversed(chain.links) if link.wait.kind is Blocked.CHILD), None)
    if waiter is None or waiter.pid == chain.end.pid or chain.end.pid in case.workers:
        return None
    below = _judged_alone(case, chain)
    return Judgement(
        HangCause.CHILD, below.what, below.sure, (EvidenceLine(waiter.wait.words, _call(case, waiter)), *below.facts),
        below.also, f"end the child, or give the wait for it a timeout; {below.fix}",
    )  # fmt: skip


def _pipe(case: RunFacts, chain: Chain) -> Judgement | None:
    link = chain.end
    full = next((one for one in chain.links if one.wait.kind is Blocked.PIPE_WRITE), None)
    if full is not None:
        ends = [_could(case, chain, one.pid) for one in full.wait.holders if one.pid != full.pid]
        sides = (EvidenceLine(f"{case.name(one.pid)} {one.why}", "descriptors") for one in full.wait.holders)
        facts = (EvidenceLine(full.wait.words, _call(case, full)), *sides)
        if full.place.step is LoaderStep.WRITE and full.pid in case.workers:
            return None
        if full is link:
            who = f"; {listed(ends)} {'have' if len(ends) > 1 else 'has'} its reading end" if ends else ""
            return Judgement(HangCause.PIPE_FULL, f"is {full.wait.words}{who}", Sure.LIKELY, facts, fix=_READ_IT)
        return Judgement(
            HangCause.PIPE_FULL, f"has the pipe's reading end and does not read: it is {link.wait.words}", Sure.LIKELY,
            facts, fix=_READ_IT,
        )  # fmt: skip
    reads = [one for one in chain.links if _reads_users_pipe(case, one) and (one is link or not joins(one))]
    if not reads:
        return None
    empty = reads[-1]
    ends = [_could(case, chain, one.pid) for one in empty.wait.holders]
    facts = (EvidenceLine(empty.wait.words, _call(case, empty)),)
    if empty is not link:
        writes = "writes now and then" if receives(case, empty) else "writes nothing"
        what = f"has the pipe's writing end and {writes}: it is {link.wait.words}"
        return Judgement(HangCause.PIPE_EMPTY, what, Sure.LIKELY, facts, fix=_WRITE_IT)
    who = f"; {listed(ends)} could write to it" if ends else ""
    circle = _all_wait_for_it(case, chain, empty)
    alone = circle or _only_itself(case, empty)
    helped = any(_at_work(case, one.pid, one.pid) for one in empty.wait.holders)
    if any(frame.file.endswith("multiprocessing/queues.py") for frame in empty.place.inside):
        could = f" ({listed(ends)} could)" if ends else ""
        also = ("one of these processes is about to, and is late",) if ends else ()
        if circle:
            names = listed([case.name(one.pid) for one in empty.wait.holders])
            could, also = f": only {names} could, and {'they wait' if len(ends) > 1 else 'it waits'} for it", ()
        what = f"waits in Queue.get for an item that nobody puts{could}"
        also = (*_ended_children(case, "was to put it"), *also)
        return Judgement(
            HangCause.QUEUE_EMPTY, what, Sure.LIKELY, facts, also, "give get() a timeout; see who is to put",
            alone=alone, helped=helped,
        )  # fmt: skip
    who += ", and waits for it" if circle else ""
    return Judgement(
        HangCause.PIPE_EMPTY, f"is {empty.wait.words}{who}", Sure.LIKELY, facts, fix=_WRITE_IT,
        alone=alone, helped=helped,
    )  # fmt: skip


def _only_itself(case: RunFacts, link: Link) -> bool:
    """Whether the other end of a pipe is open in the waiter's own process alone, which has no thread to use it."""
    letter = "w" if link.wait.kind is Blocked.PIPE_READ else "r"
    own = any(
        link.wait.target == f"pipe:{one.inode}" and letter in one.mode for one in case.processes[link.pid].descriptors
    )
    return own and not link.wait.holders and not case.users_threads(link.pid, but=link.tid)


def _all_wait_for_it(case: RunFacts, chain: Chain, link: Link) -> bool:
    """Whether all that have a pipe's other end wait, at last, for who waits there, or are idle workers of its loop.

    Another thread of theirs could use that end; so could one that gives up its own wait.
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
    """The name of a process that has the other end, with why it will not use it, as far as that is seen."""
    name, end = case.name(pid), chain.end
    helpers = case.users_threads(pid)
    if doing := _doing_of(case, pid, helpers):
        return name + doing
    wait = case.wait(pid, pid)
    if pid == end.pid:
        return f"{name} itself"
    if wait is not None and wait.target and wait.target == end.wait.target:
        return f"{name} [waits for the same]"
    waits = any(pid == link.pid for link in (*chain.before, *chain.links[:-1])) and not helpers
    return f"{name} [waits for it in turn]" if waits else name


_READ_IT: Final = "read the other end while it is written (communicate(), a thread), or write less than 64 KiB"
_WRITE_IT: Final = "find who is to write, or to close its end: a copy that a fork left open keeps a pipe from ending"


def wakes(case: RunFacts, link: Link) -> int:
    """How often a thread that reads or writes without a timeout woke up between the looks: then bytes have moved."""
    thread, then = case.thread(link.pid, link.tid), case.thread_before(link.pid, link.tid)
    if link.wait.kind not in TWO_ENDS or link.wait.bounded or thread is None:
        return 0
    return thread.switches[1] - min(thread.switches[0], then.switches[0] if then is not None else thread.switches[0])


def receives(case: RunFacts, link: Link) -> bool:
    """Whether a thread gets bytes now and then: the signal that asks it for its stack wakes it only once a look."""
    return wakes(case, link) > 1


def _reads_users_pipe(case: RunFacts, link: Link) -> bool:
    if link.wait.kind is not Blocked.PIPE_READ or (link.place.step in AT_HOME and not link.place.interrupted):
        return False
    return (
        link.place.step not in (LoaderStep.NEXT, LoaderStep.IDLE, LoaderStep.READ)
        if link.place.seen
        else not link.wait.bounded
    )


def _fifo(case: RunFacts, chain: Chain) -> Judgement | None:
    if chain.end.wait.kind is not Blocked.FIFO:
        return None
    return Judgement(
        HangCause.FIFO, f"is {chain.end.wait.words}",
        facts=(EvidenceLine(chain.end.wait.words, _call(case, chain.end)),),
        fix="start what opens the other end, or open it with os.O_NONBLOCK; is a FIFO expected at this path?",
    )  # fmt: skip


def _event_loop(case: RunFacts, chain: Chain) -> Judgement | None:
    """An event loop of asyncio's that has nothing to run: which coroutine waits for what, no stack tells."""
    end = chain.end
    names = [f.function.rpartition(".")[2] for f in end.place.inside[:3] if "asyncio/" in f.file.replace("\\", "/")]
    if "_run_once" not in names:
        return None
    frame = end.place.users
    asked = f" that {frame.function} runs" if frame is not None else ""
    return Judgement(
        HangCause.NOBODY, f"waits in the event loop of asyncio{asked}, which has nothing to run", Sure.POSSIBLE,
        (EvidenceLine(end.wait.words, _call(case, end)),),
        ("a coroutine waits for the network, or for what nobody sets",),
        "print asyncio.all_tasks() from a signal handler (faulthandler can't); give awaits a timeout",
        moves=end.pid not in case.workers,
    )  # fmt: skip


def _socket(case: RunFacts, chain: Chain) -> Judgement | None:
    end = chain.end
    if end.wait.kind is not Blocked.SOCKET:
        return None
    if _calls_accept(case, end.pid, end.tid):
        return Judgement(
            HangCause.SOCKET, "waits for a client to connect", Sure.LIKELY,
            (EvidenceLine(end.wait.words, _call(case, end)),), ("no client comes, and none is meant to",),
            "give accept() a timeout (socket.settimeout), or accept in a thread", helped=end.pid not in case.workers,
        )  # fmt: skip
    who = listed([_could(case, chain, one.pid) for one in end.wait.holders])
    own = bool(end.wait.holders) and all(one.pid == end.pid for one in end.wait.holders)
    helpers = _doing_of(case, end.pid, case.users_threads(end.pid, but=end.tid)) if own else ""
    other = f"the other end: {'it has that itself' + helpers if own else who or 'none of these processes has it'}"
    if end.wait.holders and not own and all("listens" in one.why for one in end.wait.holders):
        threads = [(one.pid, t.tid) for one in end.wait.holders for t in case.processes[one.pid].threads]
        accepts = any(_calls_accept(case, pid, tid) for pid, tid in threads)
        other = f"{who} should accept it" + ("" if accepts else ", and no thread of it accepts")
    times = _times_asleep(case, end) if end.wait.bounded else 0
    what = f"is {end.wait.words}" + (f" with a timeout, {times} times in {case.apart:.1f} s: it polls" if times else "")
    return Judgement(
        HangCause.SOCKET, f"{what}; {other}", Sure.LIKELY,
        (EvidenceLine(end.wait.words, _call(case, end)),), ("the other end is slow, and will answer",),
        helped=any(_at_work(case, one.pid, t.tid) for one in end.wait.holders for t in case.users_threads(one.pid)),
        fix="give the connection a timeout (socket.setdefaulttimeout, the client's timeout=), and retry",
    )  # fmt: skip


_DEBUGGER: Final = re.compile(r"(^|/)(pdb|bdb|cmd|code)\.py$|/(IPython|ipdb|pudb|debugpy|pydevd\w*)/")


def _debugger(case: RunFacts, chain: Chain) -> Judgement | None:
    """A person is asked for the next command of a debugger."""
    end = chain.end
    frame = next((f for f in end.place.inside if _DEBUGGER.search(f.file.replace("\\", "/"))), None)
    asleep = end.wait.kind in (Blocked.TERMINAL, Blocked.FILE, Blocked.PIPE_READ, Blocked.SOCKET, Blocked.FIFO)
    if frame is None or not asleep:
        return None
    return Judgement(
        HangCause.TERMINAL, "waits for the next command of a person, in a debugger", Sure.LIKELY,
        (EvidenceLine(f"it is in {frame.function}, {frame.file}:{frame.line}", f"stack of {end.pid}"),),
        fix="answer it, or remove the breakpoint",
    )  # fmt: skip


def _calls_accept(case: RunFacts, pid: int, tid: int) -> bool:
    thread = case.thread(pid, tid)
    return thread is not None and thread.syscall is not None and thread.syscall.name.startswith("accept")


def _terminal(case: RunFacts, chain: Chain) -> Judgement | None:
    if chain.end.wait.kind is not Blocked.TERMINAL:
        return None
    return Judgement(
        HangCause.TERMINAL, f"is {chain.end.wait.words} (a debugger's prompt?)", fix="answer it, or remove it"
    )


def _signal(case: RunFacts, chain: Chain) -> Judgement | None:
    if chain.end.wait.kind is not Blocked.SIGNAL:
        return None
    return Judgement(HangCause.SIGNAL, f"is {chain.end.wait.words}", fix="send it, or don't wait for it in a dataset")


def _file(case: RunFacts, chain: Chain) -> Judgement | None:
    if chain.end.wait.kind is not Blocked.FILE:
        return None
    return Judgement(
        HangCause.FILE, f"is {chain.end.wait.words}", Sure.LIKELY, also=("a slow disk, which will answer",),
        facts=(EvidenceLine(chain.end.wait.words, _call(case, chain.end)),),
        fix="look at the file system that the file is on",
    )  # fmt: skip


# --- What moves by itself ---------------------------------------------------------------------------------------------
def _sleeps(case: RunFacts, chain: Chain) -> Judgement | None:
    end = chain.end
    if end.wait.kind is not Blocked.SLEEPS:
        return None
    thread = case.thread(end.pid, end.tid)
    left = thread.syscall.timeout if thread is not None and thread.syscall is not None else -2.0
    what, times = f"is {end.wait.words}", _times_asleep(case, end)
    seen = EvidenceLine(end.wait.words, _call(case, end))
    if times:
        what = (
            f"polls, asleep for about {case.apart / times:.1g} s again and again, all the {case.apart:.1f} s of looking"
        )
        source = end.place.inside[0].source if end.place.inside else ""
        what += f", in `{source}`" if _IN_BLOCK.match(source) else ""
        seen = EvidenceLine(f"it fell asleep {times} times between the looks, at one place", _call(case, end))
    return Judgement(
        HangCause.SLEEP, what, facts=(seen,), fix="remove the sleep, or bound the retries that it belongs to",
        moves=0 <= left <= SOON,
    )  # fmt: skip


_IN_BLOCK: Final = re.compile(r"(while|for|if|elif|except)\b")


def _times_asleep(case: RunFacts, end: Link) -> int:
    """How often a thread fell asleep between two looks that both saw it asleep at one place; 0 = less than twice."""
    then, now = case.thread_before(end.pid, end.tid), case.thread(end.pid, end.tid)
    if then is None or now is None or then.syscall is None or now.syscall is None:
        return 0
    times = now.switches[1] - then.switches[0]
    pause = 2 * case.apart / max(times, 1)  # what sleeps for longer than that now has another rhythm
    fits = now.idle <= pause and now.syscall.timeout <= pause
    return times if _same_place(case, end) and fits and then.syscall.name == now.syscall.name and times > 1 else 0


def _computes(case: RunFacts, chain: Chain) -> Judgement | None:
    end = chain.end
    before = case.before(end.pid, end.tid)
    moved = before is not None and (before.task, before.sample) != (end.place.task, end.place.sample)
    starves = end.wait.kind is Blocked.READY and before is not None and not moved and end.place.step in USERS
    if end.wait.kind is not Blocked.COMPUTES and not (starves and _share(case, end) >= STARVED):
        return None
    same = f" all the {case.apart:.1f} s of looking" if before is not None and not moved else ""
    return Judgement(
        HangCause.COMPUTING, f"is {end.wait.words}{same}", Sure.LIKELY,
        (EvidenceLine(end.wait.words, _call(case, end)),),
        ("an endless loop, or one sample that takes long: look again later",)
        + (("others have the CPUs that it needs",) if starves else ()),
        "run that sample alone under a profiler; bound its loop", moves=moved,
    )  # fmt: skip


STARVED: Final = 0.05
"""Share of a CPU below which a thread that is ready to run does not compute: it waits for a CPU."""


def _share(case: RunFacts, end: Link) -> float:
    thread = case.thread(end.pid, end.tid)
    return thread.used / max(case.now.interval, 1e-3) if thread is not None else 0.0


def _moves(case: RunFacts, chain: Chain) -> Judgement | None:
    end = chain.end
    if end.wait.kind is not Blocked.MOVES:
        return None
    thread, then = case.thread(end.pid, end.tid), case.thread_before(end.pid, end.tid)
    times = thread.switches[1] - then.switches[0] if thread is not None and then is not None else 0
    naps = bool(end.place.inside) and "sleep" in end.place.inside[0].source
    if naps and times > 1 and _same_place(case, end):
        what = f"polls: it woke {times} times in the {case.apart:.1f} s of looking, and is at the same line"
        return Judgement(
            HangCause.SLEEP, what, Sure.LIKELY, (EvidenceLine(end.wait.words, _call(case, end)),), moves=True,
            fix="bound the retries that it belongs to",
        )  # fmt: skip
    return Judgement(HangCause.NONE, f"is {end.wait.words}", moves=True)


def _unknown(case: RunFacts, chain: Chain) -> Judgement | None:
    words = chain.end.wait.words
    seen = "" if chain.end.place.seen else "; without its Python stack the cause is not known"
    return Judgement(
        HangCause.UNKNOWN, f"is {words}{seen}", Sure.UNKNOWN, (EvidenceLine(words, _call(case, chain.end)),),
        fix="" if chain.end.place.seen else "install py-spy and ask again, as root or with CAP_SYS_PTRACE",
    )  # fmt: skip


RULES: Final = (
    CauseRule(_worker_is_gone, "a worker is no more", "it is there"),
    CauseRule(
        _idle_and_joined, "a worker is joined that was not told to end", "it is in anything but a wait for a task"
    ),
    CauseRule(_nobody_has_it, "a result was lost: all workers are idle", "a worker, or its feeder, is at work"),
    CauseRule(_worker_has_ended, "a worker died, perhaps in a message", "it runs"),
    CauseRule(_stopped, "SIGSTOP or a debugger", "its state is not T or t"),
    CauseRule(_uninterruptible, "the kernel waits for a device", "it ran between the looks"),
    CauseRule(_keeps_the_gil, "C code keeps the interpreter's lock", "other threads of the process run"),
    CauseRule(_cycle, "each waits for the next", "one link of the circle has a timeout"),
    CauseRule(_file_lock, "a file lock is held", "the lock is free in /proc/locks"),
    CauseRule(_held_file_lock, "a file lock's holder waits itself", "the lock is free in /proc/locks"),
    CauseRule(_event_loop, "an event loop has nothing to run", "it runs no event loop"),
    CauseRule(_mutex, "a library's mutex is held", "its owner is a thread of the process that runs"),
    CauseRule(_debugger, "a debugger waits for its user", "it has no debugger's frame"),
    CauseRule(_child, "a child does not end", "the child has ended"),
    CauseRule(_waiting_child, "a child waits itself", "the child has ended"),
    CauseRule(_barrier, "not all parties came", "all parties are at the barrier"),
    CauseRule(_collective_missed, "another rank did not come", "all ranks are in the collective"),
    CauseRule(_rank_naps, "a rank sleeps outside of the collective", "it has gone on since the first look"),
    CauseRule(_manager, "a Manager's object is waited for", "its client goes on"),
    CauseRule(_thread_is_missing, "fork copied no threads", "a thread of the process could answer"),
    CauseRule(_nobody_answers, "no thread can answer", "a thread of the process could answer"),
    CauseRule(_native_pool_is_missing, "fork copied no threads of a C library", "the line takes a lock"),
    CauseRule(_lock_of_threads, "another thread holds a lock of Python's", "its holder runs"),
    CauseRule(_lock_at_the_fork, "a lock was held at the fork", "the worker took it itself"),
    CauseRule(_lock_of_its_own, "a lock that nobody can release", "another thread may release it"),
    CauseRule(_full_queue, "a bounded queue is full", "somebody reads it"),
    CauseRule(_loaders_queue, "the lock of a loader's queue is held", "its holder runs"),
    CauseRule(_nobody_notifies, "an Event or Condition of several processes", "somebody sets it"),
    CauseRule(_crossed_locks, "two locks of several processes, crossed", "another process may hold one of them"),
    CauseRule(_shared_lock, "a lock of several processes is held", "its holder runs"),
    CauseRule(_permit_lost, "a permit was not given back", "a process that shares it could release it"),
    CauseRule(_pipe, "the other end does not read or write", "bytes move"),
    CauseRule(_fifo, "nobody opened the other end", "the other end is open"),
    CauseRule(_socket, "the other end does not answer", "bytes move"),
    CauseRule(_terminal, "it asks a person", "it has no terminal"),
    CauseRule(_signal, "it waits for a signal", "the signal is pending"),
    CauseRule(_file, "a file system does not answer", "bytes move"),
    CauseRule(_sleeps, "it sleeps", "the sleep ends soon"),
    CauseRule(_computes, "it computes", "its sample changed between the looks"),
    CauseRule(_no_cpu, "others have the CPUs", "it gets CPU time"),
    CauseRule(_moves, "it moves", ""),
    CauseRule(_unknown, "nothing above fits", ""),
)
"""The first that applies names the cause. What holds whatever the code is comes first."""


def judged(case: RunFacts, chain: Chain) -> Judgement:
    """What the first rule that applies says."""
    return next(found for rule in RULES if (found := rule.test(case, chain)) is not None)


def _judged_alone(case: RunFacts, chain: Chain) -> Judgement:
    """What the first rule that applies says of the chain's last link."""
    return judged(case, Chain(chain.links[-1:], before=chain.links[:-1]))


# --- Words ------------------------------------------------------------------------------------------------------------
def listed(items: list[str], most: int = 4) -> str:
    shown = items[:most] + ([f"{len(items) - most} more"] if len(items) > most else [])
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def exit_in_words(status: int) -> str:
    """How a process ended, by its wait status; -1 = unknown."""
    if status < 0:
        return "how is not known"
    return f"signal {status & 0x7F}" if status & 0x7F else f"exit code {status >> 8}"


def _state(case: RunFacts, link: Link) -> EvidenceLine:
    thread = case.thread(link.pid, link.tid)
    before, now = thread.state if thread is not None else ("?", "?")
    both = " at both looks" if before == now else f", and was {before} before"
    return EvidenceLine(f"its state is {now}{both}", f"/proc/{link.pid}/stat")


def _call(case: RunFacts, link: Link) -> str:
    thread = case.thread(link.pid, link.tid)
    if thread is None:
        return f"process {link.pid}"
    call = thread.syscall
    return f"{call.name if call else thread.wchan or 'state'} of thread {link.tid}"


def _doing(case: RunFacts, pid: int) -> str:
    place = case.place(pid, pid)
    return spot(place) or in_library(place) or place.step.value
