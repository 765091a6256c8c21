"""Rules for waits that several parties have to end: a barrier, a collective, the clients of a Manager."""

from __future__ import annotations

from typing import Final

from minidl.hang.case import RunFacts, spot
from minidl.hang.chain import Chain, collective, serves
from minidl.hang.evidence.graph import Blocked
from minidl.hang.evidence.model import Frame
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.places import ThreadPlace
from minidl.hang.rules import motion
from minidl.hang.rules.activity import same_place
from minidl.hang.rules.judgement import Judgement
from minidl.tracefile.words import and_joined


def barrier(case: RunFacts, chain: Chain) -> Judgement | None:
    """A barrier: it waits for a number of threads or processes, without naming them."""
    end = chain.end
    if not any(map(_of_barrier, end.place.inside)):
        return None
    stacks = {pid: [f for t in process.threads for f in t.stack or ()] for pid, process in case.processes.items()}
    there = [pid for pid, frames in stacks.items() if any(map(_of_barrier, frames))]
    others = [case.name(pid) for pid in case.workers if pid not in there]
    facts = (
        EvidenceLine(f"at the barrier: {and_joined([case.name(pid) for pid in there])}", "stacks"),
        *((EvidenceLine(f"not at the barrier: {and_joined(others)}", "stacks"),) if others else ()),
    )
    missing = f"; {and_joined(others)} {'have' if len(others) > 1 else 'has'} not reached it" if others else ""
    return Judgement(
        HangCause.BARRIER, f"waits at a barrier{missing}", Sure.CERTAIN, facts,
    )  # fmt: skip


def _of_barrier(frame: Frame) -> bool:
    """Whether a frame is of a barrier: Python before 3.11 does not name its class."""
    return frame.file.endswith("threading.py") and "Barrier" in frame.function + frame.variables.get("self", "")


_OTHER_HALF: Final = {"recv": "sends", "send": "receives"}
"""Operations between two ranks: the action of the other rank."""


def _operation(name: str) -> str:
    """The name of an operation in a sentence: recv and send are no collectives."""
    return name if name in _OTHER_HALF else f"the collective {name}"


def _in_collectives(case: RunFacts, but: int) -> list[tuple[int, ThreadPlace]]:
    """The other processes whose main thread is in a collective, and its place."""
    return [(pid, place) for pid in case.processes if pid != but and collective(place := case.place(pid, pid))]


def same_half(case: RunFacts, chain: Chain) -> Judgement | None:
    """Ranks that all receive, or all send: none of them does the other half."""
    end, name = chain.end, collective(chain.end.place)
    others = _in_collectives(case, but=end.pid)
    if name not in _OTHER_HALF or not others or any(collective(place) != name for _, place in others):
        return None
    ranks = and_joined([case.name(pid) for pid, _ in others])
    facts = [EvidenceLine(f"{case.name(pid)} is in {name}, {spot(place)}", f"stack of {pid}") for pid, place in others]
    return Judgement(
        HangCause.CYCLE, f"waits in {name} for another rank; so {'does' if len(others) == 1 else 'do'} {ranks}, and "
        f"none of them {_OTHER_HALF[name]}",
        Sure.LIKELY, (EvidenceLine(f"it is in {name}", f"stack of {end.pid}"), *facts),
        (f"a rank that {_OTHER_HALF[name]} is on another machine, or was not examined",),
        "let one rank send while the other receives (by rank number), or use dist.batch_isend_irecv",
    )  # fmt: skip


def collective_missed(case: RunFacts, chain: Chain) -> Judgement | None:
    """A rank waits for the others, in a collective or for one of them to send or receive."""
    end = chain.end
    name = collective(end.place)
    if not name:
        return None
    others = _in_collectives(case, but=end.pid)
    apart = [(pid, place) for pid, place in others if spot(place) != spot(end.place)]
    facts = [EvidenceLine(f"it is in {name}", f"stack of {end.pid}")]
    facts += [EvidenceLine(f"{case.name(pid)} is in {collective(p)}, {spot(p)}", f"stack of {pid}") for pid, p in apart]
    missed = "".join(f"; {case.name(pid)} is in {collective(place)} ({spot(place)})" for pid, place in apart[:1])
    also = ("the other ranks are on other machines, or were not examined: run the doctor on each",)
    return Judgement(
        HangCause.COLLECTIVE, f"waits in {_operation(name)} for the other ranks{missed}", Sure.LIKELY,
        tuple(facts), () if apart else also,
    )  # fmt: skip


def rank_naps(case: RunFacts, chain: Chain) -> Judgement | None:
    """A rank that sleeps for short times, while another rank waits for it in a collective."""
    name = collective(chain.links[-2].place) if len(chain.links) > 1 else ""
    found = motion.sleeps(case, chain) or motion.moves(case, chain) if name else None
    naps = found is not None and found.cause is HangCause.SLEEP and found.moves
    if found is None or not naps or not same_place(case, chain.end):
        return None
    return Judgement(
        HangCause.COLLECTIVE, f"has not reached {_operation(name)}: it {found.what}", Sure.LIKELY, found.facts,
        ("it reaches the collective once its own wait ends",),
        "find what that rank waits for; all ranks must run the same number of steps", helped=True,
    )  # fmt: skip


_COUNTERPART: Final = {
    "acquire": (HangCause.LOCK, "release"), "get": (HangCause.QUEUE_EMPTY, "put"), "put": (HangCause.QUEUE_FULL, "get"),
    "join": (HangCause.NOBODY, "task_done"), "wait": (HangCause.NOBODY, "set or notify"),
}  # fmt: skip
"""Methods of a multiprocessing.Manager's objects that wait: the cause, and the method that ends the wait."""


def manager(case: RunFacts, chain: Chain) -> Judgement | None:
    """A process of multiprocessing.Manager() is in a call for one client that only another client can end."""
    end, thread = chain.end, case.thread(chain.end.pid, chain.end.tid)
    method = serves(thread) if thread is not None else None
    if method not in _COUNTERPART or end.wait.kind is not Blocked.FUTEX or len(chain.links) < 2:
        return None
    cause, ends = _COUNTERPART[method]
    return Judgement(
        cause, f"belongs to a Manager and waits in {method}() until another client calls {ends}()", Sure.LIKELY,
        (EvidenceLine(f"it runs {method}() for a client", f"stack of thread {end.tid}"),),
        ("that client has ended before the call",),
        f"find which client should call {ends}(), and whether it waits for this worker; give the wait a timeout",
    )  # fmt: skip
