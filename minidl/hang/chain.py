"""The chain of waits: from the loop to the thread that it waits for, and on to a thread that waits for no other one.

Interface: `follow(case, loop)` -> `Chain`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from minidl.hang.case import LoopThread, RunFacts, address
from minidl.hang.evidence.graph import Blocked, KernelWait
from minidl.hang.evidence.model import BACKLOG, Descriptor, Frame, SeenThread
from minidl.hang.limits import POLLED
from minidl.hang.places import AT_HOME, LoaderStep, ThreadPlace, library

_NOWHERE: Final = KernelWait(Blocked.UNKNOWN, "not seen")
_ENDS: Final = frozenset({
    Blocked.COMPUTES, Blocked.READY, Blocked.SLEEPS, Blocked.STOPPED, Blocked.TRACED, Blocked.UNINTERRUPTIBLE,
    Blocked.ENDED, Blocked.TERMINAL, Blocked.FIFO,
})  # fmt: skip
"""States of a thread that no other thread of the run could end."""

_COLLECTIVE: Final = re.compile(
    r"^(\w+\.)?(all_reduce|all_gather\w*|barrier|monitored_barrier|broadcast\w*|reduce\w*|gather\w*|scatter\w*|recv|send|"
    r"all_to_all\w*|_all_gather\w*|wait|_sync\w*|init_process_group|synchronize)$"
)
LONGEST: Final = 12


@dataclass(frozen=True, slots=True)
class Link:
    """A thread of the chain. by: how the thread before waits for it; "" for the first one."""

    pid: int
    tid: int
    place: ThreadPlace
    wait: KernelWait
    by: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """The links from the loop on. cycle: the last link waits for an earlier one, at position `back`.

    others: (pid, tid) of further threads that could end the last link's wait. missing: the worker of the loop's batch
    is known and idle, so no process works on that batch. before: for a part of a chain, the links that wait for it.
    """

    links: tuple[Link, ...]
    cycle: bool = False
    back: int = -1
    others: tuple[tuple[int, int], ...] = ()
    missing: bool = False
    before: tuple[Link, ...] = ()

    @property
    def end(self) -> Link:
        return self.links[-1]


def follow(case: RunFacts, loop: LoopThread) -> Chain:
    """The chain of waits that begins at a loop."""
    links = [_link(case, loop.pid, loop.tid, "")]
    while len(links) < LONGEST:
        following, missing = _next(case, links[-1], links)
        seen = [(link.pid, link.tid) for link in links]
        if not following:
            return Chain(tuple(links), missing=missing)
        pid, tid, by = following[0]
        if (pid, tid) in seen:
            return Chain((*links, _link(case, pid, tid, by)), cycle=True, back=seen.index((pid, tid)))
        if len(following) > 1 and not by:
            return Chain(tuple(links), others=tuple((one[0], one[1]) for one in following))
        links.append(_link(case, pid, tid, by))
    return Chain(tuple(links))


def _link(case: RunFacts, pid: int, tid: int, by: str) -> Link:
    return Link(pid, tid, case.place(pid, tid), case.wait(pid, tid) or _NOWHERE, by)


_Next = list[tuple[int, int, str]]


def _next(case: RunFacts, link: Link, links: list[Link]) -> tuple[_Next, bool]:
    """The threads that a link waits for, and whether the worker that it waits for has nothing to do."""
    for applies, followed in _DECIDED:
        if applies(case, link):
            return followed(case, link)
    for found in _TRIED:
        if following := found(case, link):
            return following, False
    if any(frame.name == "_run_once" for frame in link.place.inside[:3]):
        return [], False  # an event loop: the descriptors of its selector name no other thread
    if link.wait.kind in TWO_ENDS:
        return _at_the_other_end(case, link, links), False
    return _holder(case, link), False


def _holder(case: RunFacts, link: Link) -> _Next:
    """The holder of what a thread waits for, if it is certain or the only candidate."""
    holders = [(one.pid, one.tid or one.pid, one.why) for one in link.wait.holders if one.pid in case.processes]
    shared = link.wait.kind in (Blocked.FILE_LOCK, Blocked.SEMAPHORE)  # a process that shares one need not hold it
    only = len({pid for pid, _, _ in holders}) == 1 and not shared
    return holders[:1] if link.wait.certain or only else []


def _fetches_memory(case: RunFacts, link: Link) -> bool:
    asks = not link.place.seen and link.wait.kind is Blocked.SOCKET and link.pid not in case.workers
    return link.place.step is LoaderStep.HAND_OVER or asks


def _has_memory(case: RunFacts, link: Link) -> _Next:
    """The worker that has the memory which a loop fetches: the worker that can't answer, if there is one."""
    workers, handed_over = case.workers_of(link.pid), link.place.step is LoaderStep.HAND_OVER
    pid = workers.get(_awaited(case, link), 0)
    slow = [worker for worker in workers.values() if _cannot_answer(case, worker)]
    if not slow and pid and case.idle_worker(pid):  # it would answer: another worker has the memory
        slow = [worker for worker in workers.values() if _works(case, worker)]
    serving = [one.pid for one in link.wait.holders if one.pid in case.workers]
    if handed_over and len(serving) == 1:  # the kernel knows the peer
        slow = serving
    chosen = slow[0] if slow else (pid if handed_over else 0)
    return [(chosen, chosen, "has the batch's memory, and hands it out")] if chosen else []


TWO_ENDS: Final = frozenset({Blocked.SOCKET, Blocked.PIPE_READ, Blocked.PIPE_WRITE})


def _at_the_other_end(case: RunFacts, link: Link, links: list[Link]) -> _Next:
    """The thread that has a pipe's or socket's other end, if there is only one candidate.

    A descriptor belongs to a process; the stacks show which of its threads reads or writes there.
    """
    why = {one.pid: one.why for one in link.wait.holders if one.pid in case.processes}
    others = [pid for pid in why if pid != link.pid] or list(why)
    if len(others) != 1:
        return []
    pid = others[0]
    process, theirs = case.processes[pid], _other_end(case, link)
    if case.is_server(pid) and joins(link):  # the child is gone
        return []
    kept = link.pid in why or any(  # its own copy of the end: the others may only have inherited theirs
        theirs.kind == "pipe" and one.inode == theirs.inode and one.mode != theirs.mode
        for one in case.processes[link.pid].descriptors
    )
    if (theirs.about == BACKLOG or kept) and any(pid == one.pid for one in links):
        return []
    for thread in process.threads:
        fds = thread.syscall.fds if thread.syscall is not None else ()
        ends = {one.inode for fd in fds if (one := process.descriptor(fd)) is not None}
        inode = theirs.peer if theirs.kind == "socket" else theirs.inode
        if (pid, thread.tid) != (link.pid, link.tid) and inode and inode in ends:
            return [(pid, thread.tid, why[pid])]
    serving = [(t.tid, served) for t in process.threads if (served := serves(t)) is not None]
    calls = [(tid, one) for tid, one in serving if (at := case.wait(pid, tid)) is not None and at.kind not in TWO_ENDS]
    if calls and len({one for _, one in calls}) == 1:  # a manager has a thread for each client; these are in a call
        return [(pid, calls[0][0], why[pid])]
    could = [thread.tid for thread in case.users_threads(pid, but=link.tid)]
    in_loader = case.idle_worker(pid) if pid in case.workers else bool(could) and case.place(pid, pid).step in AT_HOME
    if pid != link.pid and not in_loader:
        could.insert(0, pid)
    return [(pid, could[0], why[pid])] if len(could) == 1 else []


def serves(thread: SeenThread) -> str | None:
    """The method that a thread of a multiprocessing.Manager runs for a client; "" = unknown, None = no such thread."""
    for frame in thread.stack or ():
        if frame.name == "serve_client":
            return frame.variables.get("methodname", "").strip("'\"")
    return None


def _other_end(case: RunFacts, link: Link) -> Descriptor:
    """The descriptor that a thread waits at; an empty one if it is unknown."""
    process, thread = case.processes[link.pid], case.thread(link.pid, link.tid)
    fds = thread.syscall.fds if thread is not None and thread.syscall is not None else ()
    return next((one for fd in fds if (one := process.descriptor(fd)) is not None), Descriptor(-1, "", ""))


def _maker(case: RunFacts, link: Link) -> tuple[_Next, bool]:
    """The thread that holds up the batch that the loop waits for: of the worker that makes it, or the pin thread."""
    pin = _pin_thread(case, link.pid)
    if pin is not None:
        return [(link.pid, pin, "pins the batch")], False
    workers = case.workers_of(link.pid, _queue(case, link))
    number = _awaited(case, link)
    if number in workers:
        return _in_worker(case, workers[number], _batch(case))
    if number >= 0 and workers:
        return [], False  # it is gone
    busy = [pid for pid in workers.values() if not case.idle_worker(pid)]
    busy.sort(key=lambda pid: -_quiet_for(case, pid))
    if busy:
        return _in_worker(case, busy[0], f"{_batch(case)}, or another of {len(busy)} workers that have work")
    for pid in workers.values():
        found, _ = _in_worker(case, pid, "a batch")
        if found and found[0][1] != pid:
            return found, False
    return [], bool(workers)


def _queue(case: RunFacts, link: Link) -> str:
    """The result queue that a loop waits at, or its pin thread if it has one."""
    for tid in (link.tid, *(t.tid for t in case.processes[link.pid].threads if _pins(case.place(link.pid, t.tid)))):
        if found := case.queue_at(link.pid, tid):
            return found
    return ""


def _pins(place: ThreadPlace) -> bool:
    return LoaderStep.PIN in (place.step, *place.outer)


def _batch(case: RunFacts) -> str:
    return f"batch {case.told.task}" if case.told and case.told.task >= 0 else "the next batch"


def _awaited(case: RunFacts, link: Link) -> int:
    """The number of the worker that a loop waits for; -1 = unknown."""
    told = case.told
    if told is not None and told.pid == link.pid and told.worker >= 0:
        return told.worker
    return link.place.worker


def _quiet_for(case: RunFacts, pid: int) -> float:
    thread = case.thread(pid, pid)
    return thread.idle if thread is not None else 0.0


def _in_worker(case: RunFacts, pid: int, batch: str) -> tuple[_Next, bool]:
    """The worker's main thread, which has to make a batch; or its feeder, if the main thread has made it."""
    main = (pid, pid, f"has to make {batch}")
    if not case.idle_worker(pid):
        return [main], False
    for thread in case.processes[pid].threads:
        if case.place(pid, thread.tid).step in (LoaderStep.PICKLE, LoaderStep.WRITE) or _busy_unseen(
            case, pid, thread.tid
        ):
            return [(pid, thread.tid, f"has made {batch}")], False
    return [main], True


def _busy_unseen(case: RunFacts, pid: int, tid: int) -> bool:
    """Whether another thread of a worker, without a stack, is not in the wait of an idle feeder or server."""
    wait, thread = case.wait(pid, tid), case.thread(pid, tid)
    if tid == pid or case.place(pid, tid).seen or wait is None or thread is None:
        return False
    serves = wait.kind is Blocked.SOCKET and thread.syscall is not None and thread.syscall.name.startswith("accept")
    return wait.kind not in (Blocked.FUTEX, Blocked.UNKNOWN, Blocked.OTHER) and not serves


def _pin_thread(case: RunFacts, pid: int) -> int | None:
    """The pin thread, unless it polls for the next result."""
    for thread in case.threads(pid):
        place, wait = case.place(pid, thread.tid), case.wait(pid, thread.tid)
        if _pins(place) and place.step is not LoaderStep.NEXT:
            polls = wait is not None and wait.bounded and wait.kind is Blocked.PIPE_READ
            if not polls and not (wait is not None and wait.kind is Blocked.MOVES):
                return thread.tid
    return None


def _works(case: RunFacts, pid: int) -> bool:
    wait = case.wait(pid, pid)
    return wait is not None and wait.kind in (Blocked.COMPUTES, Blocked.READY)


def _cannot_answer(case: RunFacts, pid: int) -> bool:
    """Whether a worker can serve no memory now: it is stopped, or a thread keeps its GIL."""
    process = case.processes[pid]
    kinds = {wait.kind for thread in process.threads if (wait := case.wait(pid, thread.tid)) is not None}
    return bool(kinds & {Blocked.STOPPED, Blocked.TRACED, Blocked.UNINTERRUPTIBLE}) or bool(gil_starved(case, pid))


def gil_starved(case: RunFacts, pid: int) -> list[int]:
    """The threads of a process that ask for the GIL again and again, and do not get it.

    CPython asks every 5 ms: such a thread gives up the CPU 100 to 200 times a second and computes nothing.
    """
    out = []
    for thread in case.threads(pid):
        asked = (thread.switches[1] - thread.switches[0]) / max(case.now.interval, 1e-3)
        call = thread.syscall
        short = call is not None and call.name == "futex" and 0 <= call.timeout < 0.1
        if 60 <= asked <= 400 and thread.used < 0.05 * case.now.interval and (short or "futex" in thread.wchan):
            out.append(thread.tid)
    return out


def _waits_for_results(case: RunFacts, link: Link) -> bool:
    """Whether a thread without a stack waits for a batch: by the trace, or because it polls a pipe of its workers."""
    workers = set(case.workers_of(link.pid).values())
    if link.pid in case.workers or not workers:
        return False
    if case.told is not None and case.told.pid == link.pid:
        return not case.told.own_code
    thread = case.thread(link.pid, link.tid)
    if thread is not None and thread.syscall is None:
        late = any(not case.idle_worker(pid) for pid in workers)
        return "poll" in thread.wchan or (not thread.wchan and 0 <= thread.idle <= POLLED and late)
    polled = link.wait.kind is Blocked.PIPE_READ and link.wait.bounded
    return polled and bool(workers & {holder.pid for holder in link.wait.holders})


def _joined_thread(case: RunFacts, link: Link) -> _Next:
    """The thread that this one joins: the one whose own frames have the same Thread object."""
    for frame in link.place.inside[:4]:
        name = frame.name
        if frame.file.endswith("threading.py") and name in ("join", "_wait_for_tstate_lock"):
            wanted = address(frame.variables.get("self", ""))
            process = case.processes[link.pid]
            for thread in process.threads:
                bottoms = [f for f in thread.stack or () if f.name == "_bootstrap_inner"]
                if (
                    wanted
                    and thread.tid != link.tid
                    and any(address(f.variables.get("self", "")) == wanted for f in bottoms)
                ):
                    named = f" {thread.python_name}" if thread.python_name else ""
                    return [(link.pid, thread.tid, f"is the thread{named} that it joins")]
    return []


_WAITS: Final = re.compile(r"^(wait|_wait|result|get|join|_wait_for_tstate_lock|put|acquire)$")


def waiting_in(link: Link) -> str | None:
    """The library function in which a thread waits for another thread of its process; "" = it waits for a lock.

    None: it waits for no thread of its own process, or with a timeout.
    """
    if link.wait.kind is not Blocked.FUTEX or link.wait.bounded or not link.place.inside:
        return None
    waiting = ""
    for frame in link.place.inside:
        name = frame.name
        if not library(frame.file):
            break
        if _WAITS.match(name) and frame.file.endswith(("threading.py", "queue.py", "_base.py", "pool.py")):
            waiting = f"{frame.function} ({frame.base})"
    return waiting


_POOLS: Final = (
    ("concurrent/futures/_base.py", "concurrent/futures/thread.py", "concurrent/futures/process.py"),
    ("multiprocessing/pool.py", "multiprocessing/pool.py", "multiprocessing/pool.py"),
)
"""Each kind of pool: the files of the waiting caller, of the pool's threads, of its processes."""


def pool_of(case: RunFacts, link: Link) -> list[tuple[int, int, bool]]:
    """The threads that work for the pools of a process, one of whose threads waits: (pid, tid, is in a task)."""
    asked = [one for one in _POOLS if any(f.file.endswith(one[0]) for f in link.place.inside)]
    if not waiting_in(link) or not asked:
        return []
    _, of_threads, of_processes = asked[0]
    out = []
    for process in case.now.processes:
        if process.ended or (process.pid != link.pid and (process.ppid != link.pid or process.pid in case.workers)):
            continue
        file = of_threads if process.pid == link.pid else of_processes
        for thread in process.threads if process.pid == link.pid else process.threads[:1]:
            place = case.place(process.pid, thread.tid)
            if (process.pid, thread.tid) == (link.pid, link.tid) or not place.seen:
                continue
            names = [f.name for f in thread.stack or () if f.file.endswith(file)]
            if any(name in ("_worker", "worker", "_process_worker") for name in names):
                out.append((process.pid, thread.tid, place.users is not None and _above(thread.stack or (), file)))
    return out


def _above(stack: tuple[Frame, ...], file: str) -> bool:
    """Whether the user's code runs inside of a pool's own frames, and not only below them."""
    inside = next((i for i, frame in enumerate(stack) if frame.file.endswith(file)), 0)
    return any(not library(frame.file) for frame in stack[:inside])


def _task_of_a_pool(case: RunFacts, link: Link) -> _Next:
    """For a thread that waits for a pool's result: the only thread of the pool that is in a task."""
    busy = [(pid, tid) for pid, tid, works in pool_of(case, link) if works]
    return [(*busy[0], "runs a task of its pool")] if len(busy) == 1 else []


def _fork_server(case: RunFacts, link: Link) -> _Next:
    """For a thread that starts a process by a fork server: the server, unless it waits for requests."""
    if not any(frame.file.endswith("multiprocessing/forkserver.py") for frame in link.place.inside):
        return []
    servers = [p for p in case.now.processes if p.ppid == link.pid and case.is_server(p.pid) and not p.ended]
    busy = [p for p in servers if _cannot_answer(case, p.pid) or case.place(p.pid, p.pid).users is not None]
    return [(busy[0].pid, busy[0].pid, "is the fork server, which has to start it")] if len(busy) == 1 else []


_JOINING: Final = (
    "multiprocessing/process.py", "popen_fork.py", "popen_spawn_posix.py", "subprocess.py",
    "torch/multiprocessing/spawn.py",
)  # fmt: skip


def joins(link: Link) -> bool:
    """Whether a thread waits for the end of a process."""
    return (
        link.place.step is LoaderStep.SHUTDOWN
        or link.wait.kind is Blocked.CHILD
        or any(
            frame.file.endswith(_JOINING) and frame.name in ("join", "wait", "poll", "_wait", "_try_wait")
            for frame in link.place.inside
        )
    )


def _joined_process(case: RunFacts, link: Link) -> _Next:
    """The child that a thread waits for: by the process id, or by the pipe that closes with it."""
    if not joins(link):
        return []
    children = [one.pid for one in link.wait.holders if one.pid in case.processes and not case.processes[one.pid].ended]
    children = [pid for pid in children if case.processes[pid].ppid == link.pid] or children
    server = next((pid for pid in children if case.is_server(pid)), 0)
    if server and link.wait.kind is not Blocked.CHILD:
        return _child_of_a_server(case, link, server)
    if link.place.step is LoaderStep.SHUTDOWN and not children:
        children = _living_workers(case, link.pid)
    return _first_to_end(case, children)


def _living_workers(case: RunFacts, pid: int) -> list[int]:
    return [worker for worker in case.workers_of(pid).values() if not case.processes[worker].ended]


def _first_to_end(case: RunFacts, children: list[int]) -> _Next:
    busy = [pid for pid in children if not case.idle_worker(pid)]
    return [(pid, pid, "is the process that it waits for to end") for pid in (busy or children)[:1]]


def _child_of_a_server(case: RunFacts, link: Link, server: int) -> _Next:
    """The child of a fork server that a thread waits for. The server writes to a pipe when the child has ended.

    The server itself does not end before its parent. It withholds the message only if it can't run.
    """
    children = [p.pid for p in case.now.processes if p.ppid == server and not p.ended]
    if link.place.step is LoaderStep.SHUTDOWN:
        children = [pid for pid in _living_workers(case, link.pid) if pid in children]
    if not children and _cannot_answer(case, server):
        return [(server, server, "has to report that a process has ended")]
    return _first_to_end(case, children)


def _inside_the_lock(case: RunFacts, link: Link) -> _Next:
    """The holder of a lock without an owner, by the stacks: a thread that is further on in the waiting function."""
    shared = link.wait.kind is Blocked.SEMAPHORE
    if not shared and link.wait.kind is not Blocked.FUTEX:
        return []
    stack = case.stack(link.pid, link.tid)  # also the loader's own: a feeder asks for its lock
    asks = next((f for f in stack if not f.file.endswith(("synchronize.py", "threading.py"))), None)
    pids = [holder.pid for holder in link.wait.holders] if shared else [link.pid]
    found: _Next = []
    if asks is None:
        return found
    for pid in pids:
        for thread in case.threads(pid):
            wait = case.wait(pid, thread.tid)
            if (pid, thread.tid) == (link.pid, link.tid) or wait is None or wait.target == link.wait.target:
                continue
            got_it = shared and wait.kind is not Blocked.SEMAPHORE  # at the line that asks, and not waiting for it
            if any(_further(frame, asks, or_there=got_it) for frame in thread.stack or ()):
                found.append((pid, thread.tid, "holds the lock, by its stack"))
    if not found and shared and link.place.step in (LoaderStep.WRITE, LoaderStep.READ, LoaderStep.IDLE):
        stuck = [pid for pid in pids if pid in case.processes and _cannot_answer(case, pid)]
        found = [(pid, pid, "shares the lock of the loader's queue, and can't run") for pid in stuck]
    return found if len(found) == 1 else []


def _further(frame: Frame, asks: Frame, or_there: bool) -> bool:
    """Whether a frame is in the same function as another one, further on, and of the same object if that is known.

    or_there: the same line counts, too.
    """
    there = or_there and (frame.line, frame.source) == (asks.line, asks.source)
    same = (frame.file, frame.function) == (asks.file, asks.function) and (frame.line > asks.line or there)
    objects = {address(one.variables.get("self", "")) for one in (frame, asks)} - {""}
    return same and len(objects) < 2


def collective(place: ThreadPlace) -> str:
    """The collective of torch.distributed that a thread is in; "" = none."""
    for frame in place.inside:
        name = frame.name
        if "torch/distributed/" in frame.file.replace("\\", "/") and _COLLECTIVE.match(name):
            return name
    return ""


def _other_rank(case: RunFacts, link: Link) -> _Next:
    """For a loop in a collective: a loop of another rank that is not in one."""
    if not collective(link.place):
        return []
    others = [one for one in case.loops if one.pid != link.pid and not collective(one.place)]
    return [(one.pid, one.tid, f"is a rank that has not reached the {collective(link.place)}") for one in others[:1]]


_DECIDED: Final[tuple[tuple[Callable[[RunFacts, Link], bool], Callable[[RunFacts, Link], tuple[_Next, bool]]], ...]] = (
    (lambda case, link: link.wait.kind in _ENDS, lambda case, link: ([], False)),
    # the call that the signal interrupted is no wait now
    (lambda case, link: link.place.interrupted, lambda case, link: (_joined_thread(case, link), False)),
    (lambda case, link: link.place.step in (LoaderStep.NEXT, LoaderStep.READ) and link.pid not in case.workers, _maker),
    (_fetches_memory, lambda case, link: (_has_memory(case, link), False)),
    (lambda case, link: link.pid in case.workers and link.tid == link.pid and case.idle_worker(link.pid),
     lambda case, link: ([], True)),
    (lambda case, link: not link.place.seen and _waits_for_results(case, link), _maker),
)  # fmt: skip
"""By a thread's step: the threads that it waits for, and whether these have nothing to do. The first match decides."""

_TRIED: Final = (_joined_thread, _joined_process, _other_rank, _inside_the_lock, _fork_server, _task_of_a_pool)
"""By a thread's stack: the process or thread that it waits for. The first function that finds one decides."""
