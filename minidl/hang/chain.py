"""The chain of waits: from the loop to the thread that it waits for, and on to a thread that waits for no other one.

Interface: `follow(loop)` -> `Chain`. Pure. The table `STEPS` says whom a thread waits for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from minidl.hang.case import RunFacts, ThreadFacts, address
from minidl.hang.evidence.model import BACKLOG, Descriptor, Frame
from minidl.hang.evidence.waits import Blocked
from minidl.hang.places import AT_HOME, USERS, LoaderStep, ThreadPlace, library

LONGEST: Final = 12
NOT_RUNNING: Final = frozenset({Blocked.STOPPED, Blocked.TRACED, Blocked.UNINTERRUPTIBLE})
TWO_ENDS: Final = frozenset({Blocked.SOCKET, Blocked.PIPE_READ, Blocked.PIPE_WRITE})
OWNED: Final = frozenset({Blocked.FILE_LOCK, Blocked.MUTEX})
"""Locks with an owner."""

_ENDS: Final = NOT_RUNNING | {
    Blocked.COMPUTES, Blocked.READY, Blocked.SLEEPS, Blocked.ENDED, Blocked.TERMINAL, Blocked.FIFO,
}  # fmt: skip
"""States of a thread that no other thread of the run could end."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The links from the loop on. back: the position of the link that the last one waits for: a cycle; -1 = none.

    missing: the worker of the loop's batch is known and idle, so no process works on that batch.
    """

    links: tuple[ThreadFacts, ...]
    back: int = -1
    missing: bool = False

    @property
    def first(self) -> ThreadFacts:
        return self.links[0]

    @property
    def end(self) -> ThreadFacts:
        return self.links[-1]

    @property
    def cycle(self) -> bool:
        return self.back >= 0


def follow(loop: ThreadFacts) -> Chain:
    """The chain of waits that begins at a loop."""
    links = [loop]
    while len(links) < LONGEST:
        following, missing = _next(links[-1])
        if following is None:
            return Chain(tuple(links), missing=missing)
        seen = [link.key for link in links]
        links.append(replace(following, waiters=tuple(links)))
        if following.key in seen:
            return Chain(tuple(links), seen.index(following.key))
    return Chain(tuple(links))


def _next(link: ThreadFacts) -> tuple[ThreadFacts | None, bool]:
    """The thread that a link waits for, and whether there is none because the worker has nothing to do."""
    for step in STEPS:
        if step.applies is None:
            if (found := step.leads_to(link)) is not None:
                return found, False
        elif step.applies(link):
            found = step.leads_to(link)
            return found, found is None and step.missing(link)
    return None, False


# --- The loop and its workers -----------------------------------------------------------------------------------------
def _asks_for_a_batch(link: ThreadFacts) -> bool:
    asks = link.step in (LoaderStep.NEXT, LoaderStep.READ) and not link.in_worker
    return asks and (link.place.interrupted or link.place.users is None)  # the user's code waits for what it likes


def _polls_for_results(link: ThreadFacts) -> bool:
    """Whether a thread without a stack waits for a batch: by the trace, or because it polls a pipe of its workers."""
    told, workers = link.case.told, list(link.case.workers_of(link.pid).values())
    if link.place.seen or link.in_worker or not workers:
        return False
    return not told.own_code if told.pid == link.pid else _polls_a_pipe_of(link, workers)


def _polls_a_pipe_of(link: ThreadFacts, workers: list[ThreadFacts]) -> bool:
    if link.call.name:
        holders = {holder.pid for holder in link.wait.holders}
        return link.kind is Blocked.PIPE_READ and link.wait.bounded and any(one.pid in holders for one in workers)
    return link.polls(if_hidden=any(not worker.is_idle for worker in workers))


def _maker(link: ThreadFacts) -> ThreadFacts | None:
    """The thread that holds up the batch that the loop waits for: of the worker that makes it, or the pin thread."""
    case, number = link.case, awaited(link)
    if (pin := _pin_thread(case, link.pid)) is not None:
        return replace(pin, by="pins the batch")
    batch = f"batch {case.told.task}" if case.told.task >= 0 else "the next batch"
    workers = case.workers_of(link.pid, _queue(link))
    if number >= 0 and workers:
        return _maker_in(workers[number], batch) if number in workers else None
    busy = [worker for worker in workers.values() if not worker.is_idle]
    if busy:
        longest = max(busy, key=lambda worker: worker.seen.idle)
        return _maker_in(longest, f"{batch}, or another of {len(busy)} workers that have work")
    made = (_maker_in(worker, "a batch") for worker in workers.values())
    return next((thread for thread in made if not thread.is_main), None)


def _none_is_busy(link: ThreadFacts) -> bool:
    """Of a loop whose batch no thread makes: whether all its workers are idle, and not one of them gone."""
    return awaited(link) < 0 and bool(link.case.workers_of(link.pid, _queue(link)))


def _maker_in(worker: ThreadFacts, batch: str) -> ThreadFacts:
    """The worker's main thread, which has to make a batch; or its feeder, if the main thread has made it."""
    sends = (LoaderStep.PICKLE, LoaderStep.WRITE)
    for thread in worker.case.threads(worker.pid) if worker.is_idle else ():
        if thread.step in sends or _busy_unseen(thread):
            return replace(thread, by=f"has made {batch}")
    return replace(worker, by=f"has to make {batch}")


def _busy_unseen(thread: ThreadFacts) -> bool:
    """Whether another thread of a worker, without a stack, is not in the wait of an idle feeder or server."""
    if thread.is_main or thread.place.seen:
        return False
    serves = thread.kind is Blocked.SOCKET and thread.call.name.startswith("accept")
    return thread.kind not in (Blocked.FUTEX, Blocked.UNKNOWN, Blocked.OTHER) and not serves


def _queue(link: ThreadFacts) -> str:
    """The address of the result queue that a loop waits at, or its pin thread if it has one."""
    threads = [link, *(one for one in link.case.threads(link.pid) if _pins(one.place))]
    gets = (f for one in threads for f in one.stack if f.name == "get" and f.file.endswith("queues.py"))
    return next(filter(None, (address(frame.variables.get("self", "")) for frame in gets)), "")


def _pins(place: ThreadPlace) -> bool:
    return LoaderStep.PIN in (place.step, *place.outer)


def _pin_thread(case: RunFacts, pid: int) -> ThreadFacts | None:
    """The pin thread, unless it polls for the next result."""
    for one in case.threads(pid):
        polls = (one.wait.bounded and one.kind is Blocked.PIPE_READ) or one.kind is Blocked.MOVES
        if _pins(one.place) and one.step is not LoaderStep.NEXT and not polls:
            return one
    return None


def awaited(link: ThreadFacts) -> int:
    """The number of the worker that a loop waits for; -1 = unknown."""
    told = link.case.told
    return told.worker if told.pid == link.pid and told.worker >= 0 else link.place.worker


def _fetches_memory(link: ThreadFacts) -> bool:
    asks = not link.place.seen and link.kind is Blocked.SOCKET and not link.in_worker
    return link.step is LoaderStep.HAND_OVER or asks


def _has_memory(link: ThreadFacts) -> ThreadFacts | None:
    """The worker that has the memory which a loop fetches: the worker that can't answer, if there is one."""
    workers, handed_over = link.case.workers_of(link.pid), link.step is LoaderStep.HAND_OVER
    maker = workers.get(awaited(link))
    serving = [link.case.at(one.pid) for one in link.wait.holders if one.pid in link.case.workers]
    if not handed_over or len(serving) != 1:  # else the kernel knows the peer
        serving = _slow_to_answer(list(workers.values()), maker)
    chosen = next(iter(serving), maker if handed_over else None)
    return replace(chosen, by="has the batch's memory, and hands it out") if chosen is not None else None


def _slow_to_answer(workers: list[ThreadFacts], maker: ThreadFacts | None) -> list[ThreadFacts]:
    """The workers that can't answer; if `maker` would answer and another worker has the memory, those that compute."""
    slow = [worker for worker in workers if _cannot_answer(worker)]
    if slow or maker is None or not maker.is_idle:
        return slow
    return [worker for worker in workers if worker.kind in (Blocked.COMPUTES, Blocked.READY)]


def _cannot_answer(main: ThreadFacts) -> bool:
    """Whether a process can answer no request now: it is stopped, or a thread keeps its GIL."""
    threads = main.case.threads(main.pid)
    return any(one.kind in NOT_RUNNING for one in threads) or bool(gil_starved(main.case, main.pid))


def gil_starved(case: RunFacts, pid: int) -> list[int]:
    """The threads of a process that ask for the GIL again and again, and do not get it.

    CPython asks every 5 ms: such a thread gives up the CPU 100 to 200 times a second and computes nothing.
    """

    def starves(one: ThreadFacts) -> bool:
        asked = (one.seen.switches[1] - one.seen.switches[0]) / max(case.now.interval, 1e-3)
        short = one.call.name == "futex" and 0 <= one.call.timeout < 0.1
        rests = one.seen.used < 0.05 * case.now.interval
        return 60 <= asked <= 400 and rests and (short if one.call.name else "futex" in one.seen.wchan)

    return [one.tid for one in case.threads(pid) if starves(one)]


# --- Threads of one process -------------------------------------------------------------------------------------------
def _joined_thread(link: ThreadFacts) -> ThreadFacts | None:
    """The thread that this one joins: the one whose own frames have the same Thread object."""
    joins = ("join", "_wait_for_tstate_lock")
    asks = [f for f in link.place.inside[:4] if f.file.endswith("threading.py") and f.name in joins]
    wanted = {address(frame.variables.get("self", "")) for frame in asks} - {""}
    for thread in link.case.threads(link.pid):
        bottoms = {address(f.variables.get("self", "")) for f in thread.stack if f.name == "_bootstrap_inner"}
        if thread.tid != link.tid and bottoms & wanted:
            named = f" {thread.seen.python_name}" if thread.seen.python_name else ""
            return replace(thread, by=f"is the thread{named} that it joins")
    return None


_WAITS: Final = re.compile(r"^(wait|_wait|result|get|join|_wait_for_tstate_lock|put|acquire)$")


def waiting_in(link: ThreadFacts) -> str | None:
    """The library function in which a thread waits for another thread of its process; "" = it waits for a lock.

    None: it waits for no thread of its own process, or with a timeout: the user's code may ask again.
    """
    ends = link.wait.bounded and not (link.step in USERS and link.stays)
    if link.kind is not Blocked.FUTEX or ends or not link.place.inside:
        return None
    waiting = ""
    if link.place.inside[0].name == "__enter__" or link.place.inside[0].source.startswith("with "):
        return ""  # also the own lock of a queue
    for frame in link.place.inside:
        if not library(frame.file):
            break
        if _WAITS.match(frame.name) and frame.file.endswith(("threading.py", "queue.py", "_base.py", "pool.py")):
            waiting = f"{frame.function} ({frame.base})"
    return waiting


_POOLS: Final = (
    ("concurrent/futures/_base.py", "concurrent/futures/thread.py", "concurrent/futures/process.py"),
    ("multiprocessing/pool.py", "multiprocessing/pool.py", "multiprocessing/pool.py"),
)
"""Each kind of pool: the files of the waiting caller, of the pool's threads, of its processes."""


def pool_of(link: ThreadFacts) -> list[tuple[ThreadFacts, bool]]:
    """The threads that work for the pools of a process, one of whose threads waits; and whether each is in a task."""
    asked = [one for one in _POOLS if any(frame.file.endswith(one[0]) for frame in link.place.inside)]
    if not waiting_in(link) or not asked:
        return []
    case, (_, of_threads, of_processes) = link.case, asked[0]
    threads = [(one, of_threads) for one in case.threads(link.pid) if one.tid != link.tid]
    threads += [(case.at(child.pid), of_processes) for child in case.helper_processes(link.pid)]
    return [(one, _is_in_task(one, file)) for one, file in threads if _works_for_a_pool(one, file)]


def _works_for_a_pool(thread: ThreadFacts, file: str) -> bool:
    runs = ("_worker", "worker", "_process_worker")
    return any(frame.name in runs for frame in thread.stack if frame.file.endswith(file))


def _is_in_task(thread: ThreadFacts, file: str) -> bool:
    """Whether the user's code runs inside of a pool's own frames, and not only below them."""
    inside = next((i for i, frame in enumerate(thread.stack) if frame.file.endswith(file)), 0)
    return thread.place.users is not None and any(not library(frame.file) for frame in thread.stack[:inside])


def _task_of_a_pool(link: ThreadFacts) -> ThreadFacts | None:
    """For a thread that waits for a pool's result: the only thread of the pool that is in a task."""
    busy = [one for one, works in pool_of(link) if works]
    return replace(busy[0], by="runs a task of its pool") if len(busy) == 1 else None


def _inside_the_lock(link: ThreadFacts) -> ThreadFacts | None:
    """The holder of a lock without an owner, by the stacks: the thread that is further on in the waiting function."""
    found = _further_on(link)
    return replace(found[0], by="holds the lock, by its stack") if len(found) == 1 else None


def _cannot_release(link: ThreadFacts) -> ThreadFacts | None:
    """For a thread at the lock of one of the loader's queues: the process that shares the lock, and can't run."""
    if link.kind is not Blocked.SEMAPHORE or link.step not in LOADERS_LOCK or _further_on(link):
        return None
    stuck = [one for holder in link.wait.holders if _cannot_answer(one := link.case.at(holder.pid))]
    return replace(stuck[0], by="shares the lock of the loader's queue, and can't run") if len(stuck) == 1 else None


def _further_on(link: ThreadFacts) -> list[ThreadFacts]:
    """The threads that are further on in the function in which a thread waits for a lock."""
    shared = link.kind is Blocked.SEMAPHORE
    lock = (frame for frame in link.stack if not frame.file.endswith(("synchronize.py", "threading.py")))
    asks = next(lock, None)  # also the loader's own: a feeder asks for its lock
    if asks is None or link.kind not in (Blocked.SEMAPHORE, Blocked.FUTEX):
        return []
    pids = [holder.pid for holder in link.wait.holders] if shared else [link.pid]
    others = [one for pid in pids for one in link.case.threads(pid) if one.wait.target != link.wait.target]
    return [one for one in others if _is_further(one, asks, shared)]


_TAKEN: Final = re.compile(r"([\w.]+)\.acquire\(|(?:async )?with ([\w.]+)(?:\(\))?\s*(?::|,|\bas\b|$)")
_RELEASED: Final = re.compile(r"([\w.]+)\.release\(")


def _lock_of(pattern: re.Pattern[str], source: str) -> str:
    """The lock that a line takes or releases, as it is written there; "" = none."""
    found = pattern.search(source)
    return next(filter(None, found.groups()), "") if found is not None else ""


def taken_in(frame: Frame, asks: Frame, *, mine: bool) -> str:
    """The line by which a frame has taken the lock that another frame's line asks for, and still holds it; "" = none.

    mine: both frames are of one thread: a frame further out may take it in its own line, too, and of one class both
    have one object if that is unknown. In another thread the two must be known to have one.
    """
    lock = _lock_of(_TAKEN, asks.source)
    waits = f"{lock}.wait" in frame.source  # a Condition releases its lock while it waits
    if not lock or waits or not _same_object(lock.partition(".")[0], frame, asks, unknown=mine):
        return ""
    released = {_lock_of(_RELEASED, line) for line in frame.within}
    lines = (frame.source, *frame.within) if mine and frame is not asks else frame.within
    taken = next((line for line in lines if _lock_of(_TAKEN, line) == lock), "")
    return taken if taken.startswith(("with", "async")) or lock not in released else ""


def _same_object(name: str, frame: Frame, asks: Frame, *, unknown: bool) -> bool:
    """Whether a name stands for one object in two frames. unknown: the answer if their variables do not tell it."""
    here, there = (address(one.variables.get(name, "")) for one in (frame, asks))
    if here and there:
        return here == there
    if name == "self" and frame.function.rpartition(".")[0] != asks.function.rpartition(".")[0]:
        return False
    constant = name.isupper() and frame.file == asks.file  # by convention a module's own, and no variable of a call
    return (unknown or constant) and not here and not there


LOADERS_LOCK: Final = (LoaderStep.WRITE, LoaderStep.READ, LoaderStep.IDLE)
"""Steps in which a thread may wait for the lock of one of the loader's own queues."""


def _is_further(thread: ThreadFacts, asks: Frame, shared: bool) -> bool:
    """Whether a thread has got the lock that a frame asks for: it is further on in that function, of the same object.

    Or it is in another function, in a `with` statement of the same lock.
    shared: at the line that asks it has got the lock, too, if it does not wait for a semaphore.
    """

    def has_it(frame: Frame) -> bool:
        there = (
            shared and thread.kind is not Blocked.SEMAPHORE and (frame.line, frame.source) == (asks.line, asks.source)
        )
        objects = {address(one.variables.get("self", "")) for one in (frame, asks)} - {""}
        same = (frame.file, frame.function) == (asks.file, asks.function)
        around = taken_in(frame, asks, mine=False)
        return len(objects) < 2 and (bool(around) or (same and (frame.line > asks.line or there)))

    return any(map(has_it, thread.stack))


# --- Processes --------------------------------------------------------------------------------------------------------
def _holder(link: ThreadFacts) -> ThreadFacts | None:
    """The holder of what a thread waits for, if it is certain or the only candidate."""
    holders = [one for one in link.wait.holders if one.pid in link.case.processes]
    shared = link.kind in (Blocked.FILE_LOCK, Blocked.SEMAPHORE)  # a process that shares one need not hold it
    only = len({one.pid for one in holders}) == 1 and not shared
    if not holders or not (link.wait.certain or only):
        return None
    return replace(link.case.at(holders[0].pid, holders[0].tid), by=holders[0].why)


def _fork_server(link: ThreadFacts) -> ThreadFacts | None:
    """For a thread that starts a process by a fork server: the server, unless it waits for requests."""
    if not any(frame.file.endswith("multiprocessing/forkserver.py") for frame in link.place.inside):
        return None
    servers = [one.pid for one in link.case.helper_processes(link.pid) if link.case.is_server(one.pid)]
    busy = [one for one in map(link.case.at, servers) if _cannot_answer(one) or one.place.users is not None]
    return replace(busy[0], by="is the fork server, which has to start it") if len(busy) == 1 else None


_JOINING: Final = (
    "multiprocessing/process.py", "popen_fork.py", "popen_spawn_posix.py", "subprocess.py",
    "torch/multiprocessing/spawn.py",
)  # fmt: skip
_JOINS: Final = ("join", "wait", "poll", "_wait", "_try_wait")


def joins(link: ThreadFacts) -> bool:
    """Whether a thread waits for the end of a process."""
    joining = any(frame.file.endswith(_JOINING) and frame.name in _JOINS for frame in link.place.inside)
    return joining or link.step is LoaderStep.SHUTDOWN or link.kind is Blocked.CHILD


def _joined_process(link: ThreadFacts) -> ThreadFacts | None:
    """The child that a thread waits for: by the process id, or by the pipe that closes with it."""
    if not joins(link):
        return None
    children = _children_waited_for(link)
    server = next((pid for pid in children if link.case.is_server(pid)), 0)
    if server and link.kind is not Blocked.CHILD:
        return _child_of_a_server(link, server)
    if link.step is LoaderStep.SHUTDOWN and not children:
        children = _living_workers(link)
    return _first_to_end(link.case, children)


def _children_waited_for(link: ThreadFacts) -> list[int]:
    """The processes whose end a thread waits for, as the kernel shows: its children, or else others."""
    there = [one for holder in link.wait.holders if (one := link.case.processes.get(holder.pid)) is not None]
    there = [process for process in there if not process.ended]
    return [one.pid for one in there if one.ppid == link.pid] or [one.pid for one in there]


def _living_workers(link: ThreadFacts) -> list[int]:
    return [worker.pid for worker in link.case.workers_of(link.pid).values() if not worker.process.ended]


def _first_to_end(case: RunFacts, children: Sequence[int]) -> ThreadFacts | None:
    busy = [pid for pid in children if not case.at(pid).is_idle]
    chosen = next(iter(busy or children), 0)
    return case.at(chosen, by="is the process that it waits for to end") if chosen else None


def _child_of_a_server(link: ThreadFacts, server: int) -> ThreadFacts | None:
    """The child of a fork server that a thread waits for. The server writes to a pipe when the child has ended.

    The server itself does not end before its parent. It withholds the message only if it can't run.
    """
    case = link.case
    children = [one.pid for one in case.now.processes if one.ppid == server and not one.ended]
    if link.step is LoaderStep.SHUTDOWN:
        children = [pid for pid in _living_workers(link) if pid in children]
    if not children and _cannot_answer(case.at(server)):
        return case.at(server, by="has to report that a process has ended")
    return _first_to_end(case, children)


# --- The other end of a pipe or socket --------------------------------------------------------------------------------
def _at_the_other_end(link: ThreadFacts) -> ThreadFacts | None:
    """The thread that has a pipe's or socket's other end, if there is only one candidate.

    A descriptor belongs to a process; the stacks show which of its threads reads or writes there.
    """
    end, why = _descriptor(link), {one.pid: one.why for one in link.wait.holders if one.pid in link.case.processes}
    others = [pid for pid in why if pid != link.pid] or list(why)
    others = [pid for pid in others if not _waits_for_one_of(link.case.at(pid), others)]
    if len(others) != 1 or (link.case.is_server(others[0]) and joins(link)):  # the server's child is gone
        return None
    kept, (pid,) = end.about == BACKLOG or link.pid in why or _keeps_other_end(link, end), others
    if kept and pid in [one.pid for one in (*link.waiters, link)]:
        return None
    chosen = _uses_it(link, pid, end) or _in_a_call(link.case, pid) or _only_thread(link, pid)
    return replace(chosen, by=why[pid]) if chosen is not None else None


def _waits_for_one_of(main: ThreadFacts, pids: Sequence[int]) -> bool:
    """Whether a process waits for the end of another one of these: a shell has all that its child has."""
    return main.kind is Blocked.CHILD and any(one.pid in pids for one in main.wait.holders)


def _descriptor(link: ThreadFacts) -> Descriptor:
    """The descriptor that a thread waits at; an empty one if it is unknown."""
    known = (one for fd in link.call.fds if (one := link.process.descriptor(fd)) is not None)
    return next(known, Descriptor(-1, "", ""))


def _keeps_other_end(link: ThreadFacts, end: Descriptor) -> bool:
    """Whether a process has its own copy of a pipe's other end: the others may only have inherited theirs."""
    ends = (one for one in link.process.descriptors if one.inode == end.inode and one.mode != end.mode)
    return end.kind == "pipe" and any(ends)


def _uses_it(link: ThreadFacts, pid: int, end: Descriptor) -> ThreadFacts | None:
    """The thread of a process that is in a call at the other end."""
    inode = end.peer if end.kind == "socket" else end.inode
    for thread in link.case.threads(pid):
        at = {one.inode for fd in thread.call.fds if (one := thread.process.descriptor(fd)) is not None}
        if thread.key != link.key and inode and inode in at:
            return thread
    return None


def _in_a_call(case: RunFacts, pid: int) -> ThreadFacts | None:
    """The thread of a manager that is in a call for a client: it has a thread for each client."""
    serving = [(thread, method) for thread in case.threads(pid) if (method := serves(thread)) is not None]
    calls = [(thread, method) for thread, method in serving if thread.kind not in TWO_ENDS]
    return calls[0][0] if len({method for _, method in calls}) == 1 else None


def serves(thread: ThreadFacts) -> str | None:
    """The method that a thread of a multiprocessing.Manager runs for a client; "" = unknown, None = no such thread."""
    methods = (f.variables.get("methodname", "").strip("'\"") for f in thread.stack if f.name == "serve_client")
    return next(methods, None)


def _only_thread(link: ThreadFacts, pid: int) -> ThreadFacts | None:
    """The only thread of a process that could use its end: its main thread, unless that is in the loader."""
    main, could = link.case.at(pid), link.case.helpers(pid, but=link.tid)
    in_loader = main.is_idle if main.in_worker else bool(could) and main.step in AT_HOME
    if pid != link.pid and not in_loader:
        could.insert(0, main)
    return could[0] if len(could) == 1 else None


# --- Ranks ------------------------------------------------------------------------------------------------------------
_COLLECTIVE: Final = re.compile(
    r"^(\w+\.)?(all_reduce|all_gather\w*|barrier|monitored_barrier|broadcast\w*|reduce\w*|gather\w*|scatter\w*|recv|send|"
    r"all_to_all\w*|_all_gather\w*|wait|_sync\w*|init_process_group|new_group|new_subgroups\w*|synchronize)$"
)


BACKWARD: Final = "backward"
_CALLED: Final = re.compile(r"\bdist(?:ributed)?\.(\w+)\(")


def collective(one: ThreadFacts) -> str:
    """The collective of torch.distributed that a thread is in; "" = none.

    A stack that was read while its thread ran may lack frames, so the user's line counts, too, if a library waits. A
    rank that waits in backward is in one, too: DistributedDataParallel reduces gradients there.
    """
    place = one.place
    names = [f.name for f in place.inside if "torch/distributed/" in f.file.replace("\\", "/")]
    several = len(one.case.ranks) > 1
    if several and place.users is not None and place.users is not place.inside[0]:
        names += _CALLED.findall(place.users.source.partition("#")[0])
    backward = bool(place.inside) and place.inside[0].name == "_engine_run_backward"  # else a hook waits
    reduces = backward and one.kind is Blocked.FUTEX and several
    return next(filter(_COLLECTIVE.match, names), BACKWARD if reduces else "")


def _other_rank(link: ThreadFacts) -> ThreadFacts | None:
    """For a loop in a collective: a loop of another rank that is not in one, of several the one that rests longest."""
    name, case = collective(link), link.case
    launcher = link.process.ppid if case.at(link.process.ppid).kind is Blocked.CHILD else 0
    ranks = case.ranks or {one.pid for one in case.loops} - {launcher}
    others = [one for one in case.loops if name and one.pid in ranks and one.pid != link.pid and not collective(one)]
    last = max(others, key=lambda one: (one.kind in NOT_RUNNING, one.seen.idle), default=None)
    return None if last is None else replace(last, by=f"is a rank that has not reached the {name}")


def store_of(link: ThreadFacts) -> int:
    """The process whose TCPStore a thread in C code asks for a key; 0 = none. The store's thread has a name."""
    in_python = any(frame.file.endswith(("socket.py", "connection.py", "ssl.py")) for frame in link.place.inside[:2])
    pids = [] if link.kind is not Blocked.SOCKET or in_python else [one.pid for one in link.wait.holders]
    serve = (pid for pid in pids for one in link.case.threads(pid) if one.seen.name.startswith("pt_tcpstore"))
    return next(serve, 0) if link.place.seen else 0


# --- The table --------------------------------------------------------------------------------------------------------
def _nowhere(link: ThreadFacts) -> None:
    return None


class ChainStep(NamedTuple):
    """Whom a thread waits for. applies: the step decides if this holds, else if it leads to a thread.

    missing: if it leads nowhere, whether that is because the worker has nothing to do.
    """

    about: str
    leads_to: Callable[[ThreadFacts], ThreadFacts | None]
    applies: Callable[[ThreadFacts], bool] | None = None
    missing: Callable[[ThreadFacts], bool] = lambda link: False


STEPS: Final = (
    ChainStep("it polls in a collective for a rank",
              lambda link: _other_rank(link) if link.kind in (Blocked.SLEEPS, Blocked.COMPUTES) else None),
    ChainStep("no other thread could end this", _nowhere, lambda link: link.kind in _ENDS),
    ChainStep("a signal handler: the call that it interrupted is no wait now", _joined_thread,
              lambda link: link.place.interrupted),
    ChainStep("the loop waits for a batch", _maker, _asks_for_a_batch, _none_is_busy),
    ChainStep("the loop fetches a batch's memory", _has_memory, _fetches_memory),
    ChainStep("a worker waits for a task", _nowhere, lambda link: link.in_worker and link.is_main and link.is_idle,
              lambda link: not link.waiters or link.waiters[-1].kind not in OWNED),
    ChainStep("the loop, without a stack, waits for a batch", _maker, _polls_for_results, _none_is_busy),
    ChainStep("it joins a thread", _joined_thread),
    ChainStep("it joins a process", _joined_process),
    ChainStep("it waits for a rank", _other_rank),
    ChainStep("it waits for a lock", _inside_the_lock),
    ChainStep("it waits for the lock of a queue of the loader", _cannot_release),
    ChainStep("it starts a process", _fork_server),
    ChainStep("it waits for a pool", _task_of_a_pool),
    ChainStep("an event loop: the descriptors of its selector name no other thread", _nowhere,
              lambda link: any(frame.name == "_run_once" for frame in link.place.inside[:3])),
    ChainStep("a TCPStore answers when another process sets the key", _nowhere, lambda link: bool(store_of(link))),
    ChainStep("it reads or writes", _at_the_other_end, lambda link: link.kind in TWO_ENDS),
    ChainStep("the kernel knows the holder", _holder),
)  # fmt: skip
"""The first step that applies, or that leads to a thread, decides."""
