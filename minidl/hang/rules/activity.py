"""The activity of threads at two looks: whether they make progress, and whether they could end a wait."""

from __future__ import annotations

from typing import Final

from minidl.hang.case import LoopThread, RunFacts, spot
from minidl.hang.chain import TWO_ENDS, Link, follow, gil_starved
from minidl.hang.evidence.graph import Blocked
from minidl.hang.evidence.model import SeenThread
from minidl.hang.limits import ENDLESS
from minidl.hang.places import LoaderStep
from minidl.hang.rules.judgement import exit_in_words
from minidl.tracefile.words import and_joined


def same_place(case: RunFacts, end: Link) -> bool:
    """Whether a thread was at the same line, task and sample at the first look."""
    before = case.before(end.pid, end.tid)
    return before is not None and (before.task, before.sample, spot(before)) == (
        end.place.task, end.place.sample, spot(end.place),
    )  # fmt: skip


def times_asleep(case: RunFacts, end: Link) -> int:
    """How often a thread fell asleep between two looks that both saw it asleep at one place; 0 = fewer than twice."""
    then, now = case.thread_before(end.pid, end.tid), case.thread(end.pid, end.tid)
    if then is None or now is None or then.syscall is None or now.syscall is None:
        return 0
    times = now.switches[1] - then.switches[0]
    pause = 2 * case.apart / max(times, 1)  # a longer sleep now belongs to another rhythm
    fits = now.idle <= pause and now.syscall.timeout <= pause
    return times if same_place(case, end) and fits and then.syscall.name == now.syscall.name and times > 1 else 0


def stirs(case: RunFacts, pid: int, tid: int) -> bool:
    """Whether a thread did more between the looks than wake up for an occasional poll: it ran, began or ended.

    A thread that waits for the GIL wakes up all the time without progress.
    """
    now, then = case.thread(pid, tid), case.thread_before(pid, tid)
    if now is None or now.idle > case.apart or tid in gil_starved(case, pid):
        return False
    if len(case.looks) < 2:
        then = now
    elif then is None or then.state[1] != now.state[1] in "ZX":
        return True
    seconds, switches = case.apart, now.switches[1] - then.switches[0]
    return switches > IDLE_WAKES + seconds / 2 or now.cpu[1] - then.cpu[0] > IDLE_SHARE * seconds


IDLE_WAKES: Final = 2
"""The most wake-ups of a waiting thread: it polls every 5 s, and a signal may request its stack; plus one in 2 s."""

IDLE_SHARE: Final = 0.02
"""The largest share of a CPU that polls take."""


def family_stirs(case: RunFacts, pid: int) -> bool:
    """Whether a thread of a process or of its descendants did more between the looks than poll."""
    return any(stirs(case, p.pid, t.tid) for p in case.family(pid) for t in p.threads)


def at_work(case: RunFacts, pid: int, tid: int) -> bool:
    """Whether a thread makes progress: it computes, runs from time to time, or sleeps for a limited time."""
    wait, thread = case.wait(pid, tid), case.thread(pid, tid)
    if wait is None or thread is None:
        return False
    naps = wait.kind is Blocked.SLEEPS and thread.syscall is not None and 0 <= thread.syscall.timeout < ENDLESS
    return naps or wait.kind in (Blocked.COMPUTES, Blocked.READY, Blocked.MOVES)


def in_users_code(case: RunFacts, pid: int) -> bool:
    """Whether a process runs the user's code: in a step that calls it, or as a process of the program's own."""
    steps = {case.place(pid, t.tid).step for t in case.threads(pid)}
    helper = pid not in case.workers and all(pid != loop.pid for loop in case.loops)  # a process of the program's own
    if helper and case.place(pid, pid).users is not None:
        return True
    return bool(steps & {LoaderStep.SAMPLE, LoaderStep.ITERATE, LoaderStep.COLLATE, LoaderStep.INIT, LoaderStep.OPEN})


def doing_of(case: RunFacts, pid: int, threads: list[SeenThread]) -> str:
    """Describe the threads of a process that could end a wait, as words after the process's name.

    Threads outside of the user's code are left out.
    """
    said = []
    for thread in threads:
        if (place := case.place(pid, thread.tid)).users is None:  # a library's own thread
            continue
        chain = follow(case, LoopThread(pid, thread.tid, place))
        first, end = chain.links[0], chain.end
        name = thread.python_name or thread.name
        further = f" ({case.name(end.pid)} is {end.wait.words})" if end is not first and not chain.cycle else ""
        if is_its_own_other_end(first):  # a chain ends there
            further = " (it has the other end itself)"
        said.append(f"{name} ({spot(place)}) is {first.wait.words}{further}")
    return f" [its thread{'s' * (len(said) > 1)} {and_joined(said, 2)}]" if said else ""


def is_its_own_other_end(link: Link) -> bool:
    """Whether only the waiting process has a socket's other end; for pipes see `kernel._only_itself`."""
    holders = {one.pid for one in link.wait.holders}
    one_socket = link.wait.kind is Blocked.SOCKET and bool(link.wait.target)  # of several, one may lead elsewhere
    return one_socket and holders == {link.pid}


def loop_tid(case: RunFacts, pid: int) -> int:
    """The thread of a process that runs a loader's loop; the main thread if that is unknown."""
    return next((loop.tid for loop in case.loops if loop.pid == pid), pid)


def ended_children(case: RunFacts, did: str) -> tuple[str, ...]:
    """For `also`: the program's own children that have ended unreaped. did: a possible action of one of them."""
    loops = {loop.pid for loop in case.loops}
    gone = [p for p in case.now.processes if p.ended and p.ppid in loops and p.pid not in case.workers]
    said = [f"process {p.name} (pid {p.pid}), which has ended ({exit_in_words(p.exit_code)})" for p in gone]
    return (f"{and_joined(said, 2)}, {did}",) if said else ()


def wakes(case: RunFacts, link: Link) -> int:
    """How often a thread in a read or write without a timeout woke up between the looks: each time bytes moved."""
    thread, then = case.thread(link.pid, link.tid), case.thread_before(link.pid, link.tid)
    if link.wait.kind not in TWO_ENDS or link.wait.bounded or thread is None:
        return 0
    return thread.switches[1] - min(thread.switches[0], then.switches[0] if then is not None else thread.switches[0])


def receives(case: RunFacts, link: Link) -> bool:
    """Whether a thread receives bytes from time to time: the signal that requests its stack wakes it once a look."""
    return wakes(case, link) > 1
