"""Rules for waits that several parties have to end: a barrier, a collective, the clients of a Manager."""

from __future__ import annotations

from typing import Final

from minidl.hang.case import ThreadFacts, spot
from minidl.hang.chain import BACKWARD, Chain, collective, follow, serves, store_of
from minidl.hang.evidence.model import Frame
from minidl.hang.evidence.waits import Blocked
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.limits import STILL
from minidl.hang.rules import motion
from minidl.hang.rules.activity import any_at_work, holders_of, none_can_end
from minidl.hang.rules.judgement import Judgement, exit_in_words, named
from minidl.tracefile.words import and_joined, named_ranks


def barrier(chain: Chain) -> Judgement | None:
    """A barrier: it waits for a number of threads or processes, without naming them."""
    case = chain.end.case
    if not any(map(_of_barrier, chain.end.place.inside)):
        return None
    stacks = {pid: [frame for one in case.threads(pid) for frame in one.stack] for pid in case.processes}
    there = [pid for pid, frames in stacks.items() if any(map(_of_barrier, frames))]
    others = [pid for pid in (*case.workers, *holders_of(chain.end)) if pid not in there and not case.is_loop(pid)]
    others = list(dict.fromkeys(others))
    facts = [EvidenceLine(f"at the barrier: {named(case, there)}", "stacks")]
    facts += [EvidenceLine(f"not at the barrier: {named(case, others)}", "stacks")] if others else []
    gone = [f"worker {number}" for pid, number in case.told.numbers.items() if pid not in case.processes]
    all_came = "; no worker is missing, so it is for more parties than these" if case.workers and not gone else ""
    late = [one for one in case.helpers(chain.end.pid) if one.place.users and not any(map(_of_barrier, one.stack))]
    awaited = and_joined([*[one.label for one in late], *([named(case, others)] if others else [])])
    missing = f"; {awaited} {'have' if len(others) + len(late) > 1 else 'has'} not reached it" if awaited else all_came
    missing += f"; {and_joined(gone)} {'have' if len(gone) > 1 else 'has'} ended" if gone else ""
    alone = chain.end.kind is Blocked.SEMAPHORE and none_can_end(chain.end, holders_of(chain.end))
    return Judgement(
        HangCause.BARRIER, f"waits at a barrier{missing}", Sure.CERTAIN, tuple(facts),
        fix=_PARTIES if all_came and not awaited else "",
        helped=any_at_work(case, (*others, chain.end.pid)), alone=alone,
    )  # fmt: skip


_PARTIES: Final = "make the barrier for as many parties as call wait(): the loop is none, unless it calls it too"


def _of_barrier(frame: Frame) -> bool:
    """Whether a frame is of a barrier; without py-spy a frame has no class: `_wait` is of no other one there."""
    known = "Barrier" in frame.function + frame.variables.get("self", "") or frame.function == "_wait"
    return frame.file.endswith("threading.py") and known


_OTHER_HALF: Final = {"recv": "sends", "send": "receives"}
"""Operations between two ranks: the action of the other rank."""


def _operation(name: str) -> str:
    """The name of an operation in a sentence: recv and send are no collectives."""
    return name if name in (*_OTHER_HALF, "init_process_group", BACKWARD) else f"the collective {name}"


def _others_in_collectives(end: ThreadFacts) -> list[ThreadFacts]:
    """The main threads of other processes that are in a collective."""
    mains = (end.case.at(pid) for pid in end.case.processes if pid != end.pid)
    return [one for one in mains if collective(one)]


def _is_in(one: ThreadFacts, name: str = "it") -> EvidenceLine:
    at = f", {spot(one.place)}" if name != "it" else ""
    return EvidenceLine(f"{name} is in {collective(one)}{at}", f"stack of {one.pid}")


def same_half(chain: Chain) -> Judgement | None:
    """Ranks that all receive, or all send: none of them does the other half."""
    end, name = chain.end, collective(chain.end)
    others = _others_in_collectives(end) if name in _OTHER_HALF else []
    if not others or any(collective(one) != name for one in others):
        return None
    ranks = named(end.case, [one.pid for one in others])
    return Judgement(
        HangCause.CYCLE, f"waits in {name} for another rank; so {'does' if len(others) == 1 else 'do'} {ranks}, and "
        f"none of them {_OTHER_HALF[name]}",
        Sure.LIKELY, (_is_in(end), *(_is_in(one, one.name) for one in others)),
        (f"a rank that {_OTHER_HALF[name]} is on another machine, or was not examined",),
        "let one rank send while the other receives (by rank number), or use dist.batch_isend_irecv",
    )  # fmt: skip


_SAME: Final = (
    "let all ranks call the same collectives in the same order, and run as many batches as each other "
    "(DistributedSampler, drop_last, or DistributedDataParallel's join())"
)


def collective_missed(chain: Chain) -> Judgement | None:
    """A rank waits for the others, in a collective or for one of them to send or receive."""
    end, name = chain.end, collective(chain.end)
    if not name:
        return None
    others, absent = _others_in_collectives(end), end.case.absent_ranks
    if absent:
        return _absent(end, name, absent)
    apart = [one for one in others if spot(one.place) != spot(end.place)]
    missed = "".join(f"; {one.name} is in {collective(one)} ({spot(one.place)})" for one in apart[:1])
    also = ("the other ranks are on other machines, or were not examined: run the doctor on each",)
    return Judgement(
        HangCause.COLLECTIVE, f"waits in {_operation(name)} for the other ranks{missed}", Sure.LIKELY,
        (_is_in(end), *(_is_in(one, one.name) for one in apart)), () if apart else also,
        _SAME if apart else "",
        alone=bool(apart) and all(one.seen.slept and one.seen.idle >= STILL for one in others),
    )  # fmt: skip


def _absent(end: ThreadFacts, name: str, absent: list[int]) -> Judgement:
    """A rank waits for ranks that are not among the processes of the job: ended, not started, or on other machines."""
    case = end.case
    ended = [one for one in case.now.processes if one.ended and one.ppid == end.process.ppid]
    ranks = named_ranks(absent, 4, and_joined)
    are = "are" if len(absent) > 1 else "is"
    if len(ended) == len(absent):
        how = and_joined(list(dict.fromkeys(exit_in_words(one.exit_code) for one in ended)))
        facts = tuple(EvidenceLine(f"pid {one.pid} has ended", f"/proc/{one.pid}/stat") for one in ended)
        what = f"waits in {_operation(name)} for {ranks}, which {'have' if len(absent) > 1 else 'has'} ended ({how})"
        return Judgement(HangCause.DIED, what, Sure.LIKELY, (_is_in(end), *facts), alone=True)
    what = f"waits in {_operation(name)} for {ranks}, which {are} not among the processes seen"
    return Judgement(
        HangCause.COLLECTIVE, what, Sure.LIKELY, (_is_in(end),),
        ("it was never started, or has ended", "it runs on another machine: run the doctor there"),
        "check in the launcher's log whether all ranks were started",
    )  # fmt: skip


def rank_naps(chain: Chain) -> Judgement | None:
    """A rank that sleeps for short times, while another rank waits for it in a collective."""
    end, name = chain.end, collective(chain.end.waiters[-1]) if chain.end is not chain.first else ""
    found = motion.sleeps(chain) or motion.moves(chain) if name else None
    if found is None or found.cause is not HangCause.SLEEP or not found.moves or not end.stays:
        return None
    return Judgement(
        HangCause.COLLECTIVE, f"has not reached {_operation(name)}: it {found.what}", Sure.LIKELY, found.facts,
        ("it reaches the collective once its own wait ends",),
        "find what that rank waits for; all ranks must run the same number of steps", helped=True,
    )  # fmt: skip


def store(chain: Chain) -> Judgement | None:
    """A TCPStore's answer is missing: no process has set the key."""
    end, pid = chain.end, store_of(chain.end)
    if not pid or collective(end):
        return None
    gone = [one for one in end.case.now.processes if one.ended and one.ppid == end.process.ppid]
    ended = "".join(f"; rank process {one.pid} has ended: {exit_in_words(one.exit_code)}" for one in gone[:1])
    return Judgement(
        HangCause.NOBODY, f"waits for a key that no process has set, in the TCPStore of {end.case.name(pid)}{ended}",
        Sure.LIKELY, (EvidenceLine("the other end of its socket is a thread of a TCPStore", f"threads of {pid}"),),
        ("the process of the store is stopped or slow",),
        "find which rank should set the key, and what it is in; give the store a timeout",
        helped=any_at_work(end.case, [one for one in end.case.ranks if one != end.pid]),
        alone=not end.case.absent_ranks,
    )  # fmt: skip


_COUNTERPART: Final = {
    "acquire": (HangCause.LOCK, "release"), "get": (HangCause.QUEUE_EMPTY, "put"), "put": (HangCause.QUEUE_FULL, "get"),
    "join": (HangCause.NOBODY, "task_done"), "wait": (HangCause.NOBODY, "set or notify"),
}  # fmt: skip
"""Methods of a multiprocessing.Manager's objects that wait: the cause, and the method that ends the wait."""


_WITH: Final = (
    "use `with lock:`, so that an exception releases it, and do not hold it while you wait for a batch: a Manager does "
    "not release the lock of a client that has ended"
)


def manager(chain: Chain) -> Judgement | None:
    """A process of multiprocessing.Manager() is in a call for one client that only another client can end."""
    end, method = chain.end, serves(chain.end)
    if method not in _COUNTERPART or end.kind is not Blocked.FUTEX or end is chain.first:
        return None
    cause, ends = _COUNTERPART[method]
    own = {one.inode for one in end.process.descriptors if one.kind == "socket" and one.inode}
    has_it = [p.pid for p in end.case.now.processes if any(one.peer in own for one in p.descriptors if one.peer)]
    clients = [pid for pid in has_it if pid not in (end.pid, end.waiters[-1].pid)]
    works = any_at_work(end.case, end.case.processes.keys() - {end.pid})  # a process is a client once it calls
    could = f" ({named(end.case, clients)} could)" if clients else ""
    alone = not works and bool(clients) and all(_asks_the_same(end, pid) for pid in clients)
    could = f"; {named(end.case, clients)} could, and wait{'s' * (len(clients) == 1)} for it" if alone else could
    return Judgement(
        cause, f"belongs to a Manager and waits in {method}() until another client calls {ends}(){could}", Sure.LIKELY,
        (EvidenceLine(f"it runs {method}() for a client", f"stack of thread {end.tid}"),),
        ("that client has ended before the call",),
        _WITH if method == "acquire" and not works else
        f"call {ends}() before you wait for a batch: the workers need it" if alone else
        f"find which client should call {ends}(), and whether it waits for this process in turn", helped=works,
        alone=alone,
    )  # fmt: skip


def _asks_the_same(end: ThreadFacts, pid: int) -> bool:
    """Whether a client of a Manager has no thread but one that waits, in the end, for a call to the same Manager."""
    last = follow(end.case.at(pid)).end
    waits = last.pid == end.pid and serves(last) in _COUNTERPART and last.kind is Blocked.FUTEX
    return waits and not end.case.helpers(pid)
