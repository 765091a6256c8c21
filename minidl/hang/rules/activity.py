"""The activity of threads at two looks: whether they make progress, and whether they could end a wait."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Final

from minidl.hang.case import RunFacts, ThreadFacts, spot
from minidl.hang.chain import TWO_ENDS, follow, gil_starved
from minidl.hang.evidence.model import Frame
from minidl.hang.evidence.processes import MOST_THREADS
from minidl.hang.evidence.syscalls import is_private
from minidl.hang.evidence.waits import Blocked
from minidl.hang.limits import ENDLESS, STILL
from minidl.hang.places import USERS, LoaderStep
from minidl.hang.rules.judgement import exit_in_words
from minidl.tracefile.words import and_joined

_USERS_STEPS: Final = frozenset({
    LoaderStep.SAMPLE, LoaderStep.ITERATE, LoaderStep.COLLATE, LoaderStep.INIT, LoaderStep.OPEN,
})  # fmt: skip

IDLE_WAKES: Final = 2
"""The most wake-ups of a waiting thread: it polls every 5 s, and a signal may request its stack; plus one in 2 s."""

IDLE_SHARE: Final = 0.02
"""The largest share of a CPU that polls take."""


def times_asleep(end: ThreadFacts) -> int:
    """The number of times that a thread fell asleep between two looks, which both saw it asleep at one place.

    0 = fewer than twice.
    """
    then = end.before
    if then is None or then.syscall is None or then.syscall.name != end.call.name:
        return 0
    times = end.seen.switches[1] - then.switches[0]
    pause = 2 * end.case.apart / max(times, 1)  # a longer sleep now belongs to another rhythm
    fits = end.seen.idle <= pause and end.call.timeout <= pause
    return times if fits and times > 1 and end.stays else 0


def stirs(one: ThreadFacts) -> bool:
    """Whether a thread did more between the looks than wake up for an occasional poll: it ran, began or ended.

    A thread that waits for the GIL wakes up all the time without progress.
    """
    case, now = one.case, one.seen
    if now.idle > case.apart or one.tid in gil_starved(case, one.pid):
        return False
    then = one.before if len(case.looks) > 1 else now
    if then is None or then.state[1] != now.state[1] in "ZX":
        return True
    switches, cpu = now.switches[1] - then.switches[0], now.cpu[1] - then.cpu[0]
    return switches > IDLE_WAKES + case.apart / 2 or cpu > IDLE_SHARE * case.apart


def family_stirs(case: RunFacts, pid: int) -> bool:
    """Whether a thread of a process or of its descendants did more between the looks than poll."""
    return any(stirs(thread) for process in case.family(pid) for thread in case.threads(process.pid))


def family_reads(case: RunFacts, pid: int) -> bool:
    """Whether a thread of a process or of its descendants has read from a file or pipe between the looks."""
    threads = (thread for process in case.family(pid) for thread in case.threads(process.pid))
    return any(one.seen.read[1] > (one.before or one.seen).read[0] >= 0 for one in threads)


def at_work(one: ThreadFacts) -> bool:
    """Whether a thread makes progress: it computes, runs from time to time, or sleeps for a limited time.

    A wait with a timeout is a sleep, too, except in a library's thread, such as tqdm's monitor.
    """
    timed = one.has_timeout and (one.place.users is not None or any(map(_is_timer, one.stack)))
    naps = (one.kind is Blocked.SLEEPS or timed) and 0 <= one.call.timeout < ENDLESS
    return naps or one.kind in (Blocked.COMPUTES, Blocked.READY, Blocked.MOVES)


def _is_timer(frame: Frame) -> bool:
    """Whether it is of a `threading.Timer` or of an event loop, which calls the user's function later."""
    timer = frame.name == "run" and "finished.wait" in frame.source and frame.file.endswith("threading.py")
    return timer or frame.file.endswith("asyncio/base_events.py")


def any_at_work(case: RunFacts, pids: Iterable[int]) -> bool:
    """Whether a thread of the program's code in one of these processes, or what it waits for, makes progress."""
    threads = (one for pid in pids for one in (case.at(pid), *case.helpers(pid)))
    return any(at_work(one) or at_work(follow(one).end) for one in threads)


def in_users_code(case: RunFacts, pid: int) -> bool:
    """Whether a process runs the user's code: in a step that calls it, in a thread, or as the program's own process."""
    others = [] if pid in case.workers or case.is_loop(pid) else [case.at(pid)]
    helps = any(one.place.users is not None for one in (*others, *case.helpers(pid)))
    return helps or any(thread.step in _USERS_STEPS for thread in case.threads(pid))


def doing_of(threads: Iterable[ThreadFacts]) -> str:
    """Describe the threads of a process that could end a wait, as words after the process's name.

    Threads outside of the user's code are left out: they are a library's own. Threads that are workers, beside one that
    waits, are named as such.
    """
    users = [thread for thread in threads if thread.place.users is not None]
    whose = "" if all(thread.is_worker_thread for thread in users) else f"its thread{'s' * (len(users) > 1)} "
    return f" [{whose}{and_joined(list(map(_further, users)), 2)}]" if users else ""


def _further(thread: ThreadFacts) -> str:
    """A thread's wait, and what that leads to."""
    chain = follow(thread)
    further = f" ({chain.end.name} is {chain.end.wait.words})" if len(chain.links) > 1 and not chain.cycle else ""
    if is_its_own_other_end(thread):  # a chain ends there
        further = " (it has the other end itself)"
    return f"{thread.label} ({spot(thread.place)}) is {thread.wait.words}{further}"


def is_its_own_other_end(link: ThreadFacts) -> bool:
    """Whether only the waiting process has a socket's other end; for pipes see `kernel._only_itself`."""
    one_socket = link.kind is Blocked.SOCKET and bool(link.wait.target)  # of several, one may lead elsewhere
    return one_socket and {one.pid for one in link.wait.holders} == {link.pid}


def helpers_of_parent(worker: ThreadFacts) -> list[ThreadFacts]:
    """The threads of a worker's parent that run Python code, without the loop's: a fork copies none of them."""
    case, parent = worker.case, worker.process.ppid
    loop = next((loop.tid for loop in case.loops if loop.pid == parent), parent)
    return case.helpers(parent, but=loop)


def ended_children(case: RunFacts, did: str, *, killed: bool = False) -> tuple[str, ...]:
    """For `also`: the program's own children that have ended unreaped. did: a possible action of one of them.

    killed: only those that a signal ended, and that ran the program of their parent.
    """
    gone = [p for p in case.now.processes if p.ended and case.is_loop(p.ppid) and p.pid not in case.workers]
    if killed:
        gone = [p for p in gone if p.exit_code >= 0 and os.WIFSIGNALED(p.exit_code)]
        gone = [p for p in gone if p.name == case.processes[p.ppid].name]
    said = [f"process {p.name} (pid {p.pid}), which has ended ({exit_in_words(p.exit_code)})" for p in gone]
    return (f"{and_joined(said, 2)}, {did}",) if said else ()


def holders_of(link: ThreadFacts) -> list[int]:
    """The processes that have what a thread waits for: the other end of a pipe or socket, a share of a semaphore."""
    return [one.pid for one in link.wait.holders]


def none_can_end(link: ThreadFacts, pids: Collection[int]) -> bool:
    """Whether none of these processes can end a thread's wait; False if there are none.

    Each waits in the end for that thread, or for what that waits for, or is an idle worker of a loop that does. Another
    thread of such a process could end it; so could one whose own wait times out.
    """
    case = link.case
    if not pids or link.wait.bounded or case.helpers(link.pid, but=link.tid) or _parent_may(case.at(case.now.main)):
        return False
    return all(pid == link.pid or _leads_to(_giver(case.at(pid)), link) for pid in pids)


def none_wakes(end: ThreadFacts) -> bool:
    """Whether all threads of a process wait for one another, without a timeout: only a signal's handler could end that.

    The loader's own threads that hand over memory, or end an orphan, wake none of them; nor does a worker's death.
    """
    case, handled = end.case, {*end.process.caught} - _ENDS_NO_WAIT
    if not case.helper_processes(end.pid):  # torch's loader handles the deaths of its workers
        handled.discard("SIGCHLD")
    own = [one for one in case.threads(end.pid) if one.step not in (LoaderStep.SERVE, LoaderStep.WATCH)]
    if handled or len(own) >= MOST_THREADS - 1:  # more may not have been read; minidl's sampler is left out
        return False
    return all(is_private(one.call) and not one.wait.bounded and one.seen.idle >= STILL for one in own)


_ENDS_NO_WAIT: Final = frozenset({
    "SIGINT", "SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL", "signal 32", "signal 33",
})  # fmt: skip
"""Signals that Python and faulthandler catch, and glibc's own."""


def _giver(main: ThreadFacts) -> ThreadFacts:
    """The loop of an idle worker, which has nothing to do without it; any other thread itself."""
    return main.case.at(main.case.home_of(main.pid)) if _has_nothing_to_do(main) else main


def _parent_may(main: ThreadFacts) -> bool:
    """Whether the loop's process was started by another one, which was not looked at: that may share what it has."""
    started = any(frame.name == "_bootstrap" and frame.file.endswith("process.py") for frame in main.stack)
    return started and main.process.ppid not in main.case.processes


def _leads_to(main: ThreadFacts, link: ThreadFacts) -> bool:
    """Whether a process waits for a thread or for the same as it, and has no other thread of the user's."""
    links = follow(main).links
    at = next((i for i, one in enumerate(links) if one.key == link.key or _same_wait(one, link)), -1)
    others = {one.key for one in main.case.helpers(main.pid)} - {one.key for one in links}
    ends = any(one.wait.bounded and one.step in USERS for one in links[:at])
    return at >= 0 and not others and not ends


def _same_wait(one: ThreadFacts, link: ThreadFacts) -> bool:
    """Whether two threads wait for one thing, or for the same processes to accept their connections."""
    accept = {True} == {holder.listens for holder in (*one.wait.holders, *link.wait.holders)}
    return one.wait.target == link.wait.target != "" or (accept and holders_of(one) == holders_of(link))


def _has_nothing_to_do(main: ThreadFacts) -> bool:
    """Whether it is a worker that waits for a task, and no thread of it has anything to send."""
    sends = {one.step for one in main.case.threads(main.pid)} & {LoaderStep.PICKLE, LoaderStep.WRITE}
    return main.pid in main.case.workers and main.is_idle and not sends and not main.case.helpers(main.pid)


def wakes(link: ThreadFacts) -> int:
    """The wake-ups between the looks of a thread in a read or write without a timeout: each time bytes moved."""
    return 0 if link.kind not in TWO_ENDS or link.wait.bounded else _woken(link)


def polls_with_success(link: ThreadFacts) -> bool:
    """Whether a thread that polls a pipe or a socket woke up more often than by its own timeouts: bytes moved."""
    if link.kind not in TWO_ENDS or link.call.timeout <= 0:
        return False
    return _woken(link) > IDLE_WAKES + 2 * link.case.apart / link.call.timeout  # a poll may be cut short once


def _woken(link: ThreadFacts) -> int:
    then = link.before or link.seen
    return link.seen.switches[1] - min(link.seen.switches[0], then.switches[0])


def receives(link: ThreadFacts) -> bool:
    """Whether a thread receives bytes from time to time: the signal that requests its stack wakes it once a look."""
    return wakes(link) > 1
