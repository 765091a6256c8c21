"""Rules for waits at the kernel's objects: file locks, pipes, FIFOs, sockets, files, terminals, signals, children.

An event loop and a debugger also wait at one of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from minidl.hang.case import ThreadFacts
from minidl.hang.chain import Chain, joins
from minidl.hang.evidence.waits import Blocked
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.limits import ENDLESS, LONG
from minidl.hang.places import AT_HOME, USERS, LoaderStep
from minidl.hang.rules.activity import (
    any_at_work,
    at_work,
    doing_of,
    ended_children,
    holders_of,
    is_its_own_other_end,
    none_can_end,
    receives,
    times_asleep,
)  # fmt: skip
from minidl.hang.rules.judgement import Judgement, named, source_of, state_seen, wait_seen
from minidl.tracefile.words import and_joined


# --- File locks and children ------------------------------------------------------------------------------------------
def file_lock(chain: Chain) -> Judgement | None:
    """The chain ends at a file lock; if the lock's holder waits itself, see `table._held_lock`."""
    end, wait = chain.end, chain.end.wait
    if end.kind is not Blocked.FILE_LOCK:
        return None
    if any(one.pid == end.pid for one in wait.holders):
        return _held_by_itself(end)
    facts, polls = holders_seen(end), wait.bounded  # then the kernel knows of no wait: this lock is a conclusion
    who = named(end.case, [one.pid for one in wait.holders]) or "a process that could not be seen"
    sure = (Sure.CERTAIN if wait.certain and not polls else Sure.LIKELY) if facts else Sure.POSSIBLE
    passed = facts and not wait.certain and not polls
    ended = ": it has ended itself" * (not any(one.pid in end.case.processes for one in wait.holders))
    holds = f"took it, and may have passed it on to a child{ended}" if passed else "holds it"
    also = MAY_POLL if polls else () if facts else _ELSEWHERE
    if polls and not facts:  # a lock file without a lock of the kernel's
        fix = "delete that file if its maker has ended; use a lock that ends with its process (flock)"
        return Judgement(HangCause.FILE_LOCK, f"is {wait.words}", Sure.LIKELY, (wait_seen(end),), also, fix)
    return Judgement(HangCause.FILE_LOCK, f"is {wait.words}; {who} {holds}", sure, facts, also)


def _held_by_itself(end: ThreadFacts) -> Judgement:
    """The waiter's own process holds the lock by another open file; another thread of it may release that."""
    own = end.case.helpers(end.pid, but=end.tid)
    cause, who = (HangCause.FILE_LOCK, "its own process") if own else (HangCause.SELF_LOCK, "it")
    what = f"is {end.wait.words}; {who} holds that lock itself{doing_of(own)}"
    sure = Sure.CERTAIN if end.place.seen and end.call.name and not own else Sure.LIKELY
    return Judgement(cause, what, sure, holders_seen(end), fix=_ONCE, helped=any(map(at_work, own)))


_ONCE: Final = "lock it once, by one descriptor, or release it before you lock it again: a lock is of an open file"


def holders_seen(link: ThreadFacts) -> tuple[EvidenceLine, ...]:
    """The holders of the lock that a thread waits for, as evidence."""
    said = (f"{link.case.name(one.pid)} {one.why}" for one in link.wait.holders)
    source = "/proc/locks, fdinfo" if link.kind is Blocked.FILE_LOCK else source_of(link)
    return tuple(EvidenceLine(text, source) for text in said)


_ELSEWHERE: Final = ("a process on another machine (network file system) or in another container holds the lock",)
MAY_POLL: Final = ("it polls for something else, unrelated to the lock",)


def child(chain: Chain) -> Judgement | None:
    """The chain ends at a wait for a child; if the child waits itself, see `table._waiting_child`."""
    end = chain.end
    if end.kind is not Blocked.CHILD:
        return None
    known = named(end.case, [one.pid for one in end.wait.holders]) or "it has none left"
    return Judgement(HangCause.CHILD, f"waits for its child ({known})", Sure.LIKELY, (wait_seen(end),))


# --- Pipes ------------------------------------------------------------------------------------------------------------
def pipe_full(chain: Chain) -> Judgement | None:
    """A process writes into a pipe or a FIFO that no process reads.

    Does not apply to a worker that writes into the loader's own result pipe.
    """
    full = next((link for link in chain.links if link.kind is Blocked.PIPE_WRITE), None)
    if full is None or (full.step is LoaderStep.WRITE and full.in_worker):
        return None
    sides = [EvidenceLine(f"{full.case.name(one.pid)} {one.why}", "descriptors") for one in full.wait.holders]
    what = f"has the pipe's reading end but does not read: it is {chain.end.wait.words}"
    if full is chain.end:
        ends = _ends(full)
        has = "have" if len(ends) > 1 else "has"
        what = f"is {full.wait.words}" + (f"; {and_joined(ends)} {has} its reading end" if ends else "")
    return Judgement(HangCause.PIPE_FULL, what, Sure.LIKELY, (wait_seen(full), *sides))


def writer_is_elsewhere(chain: Chain) -> Judgement | None:
    """A process reads from a pipe, and the process with its writing end does something else."""
    empty, end = _empty_pipe(chain), chain.end
    if empty is None or empty is end:
        return None
    writes = "writes from time to time" if receives(empty) else "writes nothing"
    what = f"has the pipe's writing end and {writes}: it is {end.wait.words}"
    return Judgement(HangCause.PIPE_EMPTY, what, Sure.LIKELY, (wait_seen(empty),))


def queue_empty(chain: Chain) -> Judgement | None:
    """The pipe that no process writes to belongs to a multiprocessing queue."""
    empty = chain.end
    of_queue = any(frame.file.endswith("multiprocessing/queues.py") for frame in empty.place.inside)
    if not of_queue or _empty_pipe(chain) is not empty:
        return None
    circle, ends = none_can_end(empty, holders_of(empty)), _ends(empty)
    gone = ended_children(empty.case, "should have put it")
    could = f" ({and_joined(ends)} could)" if ends else ""
    fix = _ANSWERER if gone else _END_MARKS if circle and empty.in_worker else ""
    also = ("one of these processes will put it late",) if ends else ()
    if circle:
        names = named(empty.case, [one.pid for one in empty.wait.holders])
        could, also = f": only {names} could, and {'they wait' if len(ends) > 1 else 'it waits'} for this process", ()
    return Judgement(
        HangCause.QUEUE_EMPTY, f"waits in Queue.get for an item that no process puts{could}", Sure.LIKELY,
        (wait_seen(empty),), (*gone, *also), fix, alone=circle or _only_itself(empty),
        helped=_writer_works(empty),
    )  # fmt: skip


_END_MARKS: Final = (
    "let a process that waits for no batch put an item for each get(): for example, an end mark (None) for each worker"
)
_ANSWERER: Final = (
    "find out why that process has ended, and start it again: no other one answers; give get() a timeout, and check in "
    "the loop that it lives"
)


def pipe_empty(chain: Chain) -> Judgement | None:
    """A process reads from a pipe or a FIFO that no process writes to. After `queue_empty`: not a queue's pipe."""
    empty = chain.end
    if _empty_pipe(chain) is not empty:
        return None
    circle, ends = none_can_end(empty, holders_of(empty)), _ends(empty)
    who = f"; {and_joined(ends)} could write to it" if ends else ""
    who += f", but wait{'s' * (len(ends) == 1)} for the reader" if circle else ""
    return Judgement(
        HangCause.PIPE_EMPTY, f"is {empty.wait.words}{who}", Sure.LIKELY, (wait_seen(empty),),
        fix=_INHERITED if circle and empty.case.workers.keys() >= {*holders_of(empty)} else "",
        alone=circle or _only_itself(empty), helped=_writer_works(empty),
    )  # fmt: skip


_INHERITED: Final = (
    "start that process before the workers, or close its pipe in worker_init_fn: a reader sees no end of a pipe while "
    "a fork has the writing end"
)


def _empty_pipe(chain: Chain) -> ThreadFacts | None:
    """The last link that reads from a pipe of the user's.

    None if a link writes into a full pipe, or if the link reads only to learn that a process has ended.
    """
    if any(link.kind is Blocked.PIPE_WRITE for link in chain.links):
        return None
    reads = [one for one in chain.links if _reads_users_pipe(one) and (one is chain.end or not joins(one))]
    return reads[-1] if reads else None


def _reads_users_pipe(link: ThreadFacts) -> bool:
    """Whether a thread reads from a pipe that is not the loader's; without a stack, any read without a timeout."""
    if link.kind is not Blocked.PIPE_READ or (link.step in AT_HOME - USERS and not link.place.interrupted):
        return False
    loaders = link.step in (LoaderStep.NEXT, LoaderStep.IDLE, LoaderStep.READ)
    return not loaders if link.place.seen else not link.wait.bounded


def _writer_works(link: ThreadFacts) -> bool:
    return any_at_work(link.case, [one.pid for one in link.wait.holders])


def _only_itself(link: ThreadFacts) -> bool:
    """Whether only the waiter's own process has the other end of a pipe, and has no thread to use it."""
    letter = "w" if link.kind is Blocked.PIPE_READ else "r"
    same = (one for one in link.process.descriptors if link.wait.target == f"pipe:{one.inode}")
    own = any(letter in one.mode for one in same)
    return own and not link.wait.holders and not link.case.helpers(link.pid, but=link.tid)


def _ends(link: ThreadFacts) -> list[str]:
    """The processes that have the other end."""
    return [_could(link, one.pid) for one in link.wait.holders]


def _could(link: ThreadFacts, pid: int) -> str:
    """The name of a process that has the other end, with the reason why it does not use it, if seen."""
    main, helpers = link.case.at(pid), link.case.helpers(pid)
    if doing := doing_of(helpers):
        return main.name + doing
    if pid == link.pid:
        return f"{main.name} itself"
    if main.wait.target and main.wait.target == link.wait.target:
        return f"{main.name} [waits for the same]"
    waits = any(pid == one.pid for one in link.waiters) and not helpers
    return f"{main.name} [waits for it in turn]" if waits else main.name


# --- Sockets and the rest ---------------------------------------------------------------------------------------------
def event_loop(chain: Chain) -> Judgement | None:
    """An asyncio event loop that has nothing to run. No stack shows which coroutine waits for what."""
    end, frame = chain.end, chain.end.place.users
    inside = (one for one in end.place.inside[:3] if "asyncio/" in one.file.replace("\\", "/"))
    if not any(one.name == "_run_once" for one in inside):
        return None
    asked = f" that {frame.function} runs" if frame is not None else ""
    cause, also = HangCause.NOBODY, "a coroutine waits for the network, or for an event that no coroutine sets"
    what, timer = f"waits in the asyncio event loop{asked}, which has nothing to run", end.call.timeout
    if timer >= 0:
        cause, also = HangCause.SLEEP, "a coroutine waits for another thing, with a timeout"
        what += f" until a timer of {timer:g} s (asyncio.sleep)"
    return Judgement(
        cause, what, Sure.POSSIBLE, (wait_seen(end),), (also,),
        "print asyncio.all_tasks() from a signal handler (faulthandler does not show them); give awaits a timeout",
        moves=0 <= timer <= LONG or (end is chain.first and not end.in_worker), helped=0 <= timer < ENDLESS,
    )  # fmt: skip


def server_without_clients(chain: Chain) -> Judgement | None:
    """A thread waits for a client to connect."""
    end = chain.end
    if end.kind is not Blocked.SOCKET or not _accepts(end):
        return None
    return Judgement(
        HangCause.SOCKET, "waits for a client to connect", Sure.LIKELY, (wait_seen(end),),
        ("no client is expected to connect",), "give accept() a timeout (socket.settimeout), or accept in a thread",
        helped=not end.in_worker,
    )  # fmt: skip


def socket(chain: Chain) -> Judgement | None:
    """A thread waits at a connection, for what the other end sends or reads."""
    end, case = chain.end, chain.end.case
    if end.kind is not Blocked.SOCKET:
        return None
    times = times_asleep(end) if end.wait.bounded else 0
    what = f"is {end.wait.words}" + (f" with a timeout, {times} times in {case.apart:.1f} s: it polls" if times else "")
    alone = none_can_end(end, holders_of(end))
    own = {link.pid: link.wait.target for link in chain.links if link.kind is Blocked.SOCKET}
    wanted = set(own.values()) - {""}
    shared = [p.pid for p in case.now.processes if p.pid not in own and wanted & {one.target for one in p.descriptors}]
    taken = f"{named(case, shared)} inherited the same socket and may have read the answer: connect in each worker"
    return Judgement(
        HangCause.SOCKET, f"{what}; {_at_other_end(end)}", Sure.LIKELY, (wait_seen(end),),
        (*([taken] if shared else []), *(["the other end is slow but will answer"] if not alone else [])),
        "" if not alone else _ACCEPT if all(one.listens for one in end.wait.holders) else _READ_TOO,
        helped=any_at_work(case, holders_of(end)), alone=alone,
    )  # fmt: skip


_READ_TOO: Final = "receive what the other end sends before you send more, or in a thread: each waits for the other"
_ACCEPT: Final = "accept and answer in a thread or process of its own: the loop can't while it waits for a batch"


def _at_other_end(end: ThreadFacts) -> str:
    """Which process has the other end of a connection, or should accept it."""
    case, holders = end.case, end.wait.holders
    if is_its_own_other_end(end):
        return f"the other end: its own process{doing_of(case.helpers(end.pid, but=end.tid))}"
    who = and_joined(_ends(end))
    if not holders or not all(one.listens for one in holders):
        return f"the other end: {who or 'none of these processes has it'}"
    accepts = any(_accepts(thread) for one in holders for thread in case.threads(one.pid))
    return f"{who} should accept it" + ("" if accepts else ", but no thread of it calls accept()")


def _accepts(thread: ThreadFacts) -> bool:
    return thread.call.name.startswith("accept")


_DEBUGGER: Final = re.compile(r"(^|/)(pdb|bdb|cmd|code)\.py$|/(IPython|ipdb|pudb|debugpy|pydevd\w*)/")
_PROMPTS: Final = (Blocked.TERMINAL, Blocked.FILE, Blocked.PIPE_READ, Blocked.SOCKET, Blocked.FIFO)


def debugger(chain: Chain) -> Judgement | None:
    """A debugger waits for the next command of a person."""
    end = chain.end
    frame = next((f for f in end.place.inside if _DEBUGGER.search(f.file.replace("\\", "/"))), None)
    if frame is None or end.kind not in _PROMPTS:
        return None
    fact = EvidenceLine(f"it is in {frame.function}, {frame.file}:{frame.line}", f"stack of {end.pid}")
    return Judgement(HangCause.TERMINAL, "waits in a debugger for the next command of its user", Sure.LIKELY, (fact,))


class KindRow(NamedTuple):
    """A wait whose kind alone names the cause. what, fix: with {words} of the wait, {pid} and {tracer}.

    seen: its evidence.
    """

    cause: HangCause
    what: str = "is {words}"
    sure: Sure = Sure.CERTAIN
    also: tuple[str, ...] = ()
    fix: str = ""
    seen: Callable[[ThreadFacts], EvidenceLine] = wait_seen


KINDS: Final = {
    Blocked.STOPPED: KindRow(
        HangCause.STOPPED, "is stopped by a signal (state T)", seen=state_seen, also=("its parent will continue it",),
        fix="kill -CONT {pid}; find the sender of SIGSTOP (job control, a memory guard, a suspended container)",
    ),
    Blocked.TRACED: KindRow(
        HangCause.STOPPED, "is stopped by a debugger (pid {tracer})", seen=state_seen,
        fix="continue it in the debugger (pid {tracer})",
    ),
    Blocked.UNINTERRUPTIBLE: KindRow(
        HangCause.UNINTERRUPTIBLE, "is {words} (state D)", seen=state_seen,
        also=("the disk or network file system is slow but may answer",),
    ),
    Blocked.FIFO: KindRow(HangCause.FIFO, sure=Sure.LIKELY),
    Blocked.TERMINAL: KindRow(HangCause.TERMINAL, "is {words} (a debugger's prompt?)"),
    Blocked.SIGNAL: KindRow(HangCause.SIGNAL),
    Blocked.FILE: KindRow(HangCause.FILE, sure=Sure.LIKELY, also=("the disk is slow but will answer",)),
}  # fmt: skip


def by_kind(*kinds: Blocked) -> Callable[[Chain], Judgement | None]:
    """A rule for chains that end at one of these waits."""

    def test(chain: Chain) -> Judgement | None:
        end = chain.end
        if end.kind not in kinds:
            return None
        row, known = KINDS[end.kind], {"words": end.wait.words, "pid": end.pid, "tracer": end.process.tracer}
        what, fix = row.what.format(**known), row.fix.format(**known)
        may = end.kind in (Blocked.FIFO, Blocked.STOPPED)  # open the other end later, or continue it
        others = [one.pid for one in end.case.helper_processes(chain.first.pid)] if may else []
        late = any_at_work(end.case, [*others, end.process.ppid] if end.kind is Blocked.STOPPED else others)
        return Judgement(row.cause, what, row.sure, (row.seen(end),), row.also, fix, helped=late)

    return test
