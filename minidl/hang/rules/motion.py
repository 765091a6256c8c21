"""Rules for threads that move by themselves: sleep, computing, no CPU; and the last rule, for all the rest."""

from __future__ import annotations

import re
from typing import Final

from minidl.hang.case import RunFacts
from minidl.hang.chain import Chain, Link
from minidl.hang.evidence.graph import Blocked
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.limits import LONG
from minidl.hang.places import USERS
from minidl.hang.rules.activity import same_place, times_asleep
from minidl.hang.rules.judgement import Judgement, source_of, wait_seen


def sleeps(case: RunFacts, chain: Chain) -> Judgement | None:
    end = chain.end
    if end.wait.kind is not Blocked.SLEEPS:
        return None
    thread = case.thread(end.pid, end.tid)
    left = thread.syscall.timeout if thread is not None and thread.syscall is not None else -2.0
    what, times = f"is {end.wait.words}", times_asleep(case, end)
    seen = wait_seen(case, end)
    if times:
        what = f"polls: it slept for about {case.apart / times:.1g} s repeatedly in the {case.apart:.1f} s observed"
        source = end.place.inside[0].source if end.place.inside else ""
        what += f", in `{source}`" if _IN_BLOCK.match(source) else ""
        seen = EvidenceLine(f"it fell asleep {times} times between the looks, at one place", source_of(case, end))
    return Judgement(
        HangCause.SLEEP, what, facts=(seen,), moves=0 <= left <= LONG,
    )  # fmt: skip


_IN_BLOCK: Final = re.compile(r"(while|for|if|elif|except)\b")


def computes(case: RunFacts, chain: Chain) -> Judgement | None:
    end = chain.end
    before = case.before(end.pid, end.tid)
    moved = before is not None and (before.task, before.sample) != (end.place.task, end.place.sample)
    starves = end.wait.kind is Blocked.READY and before is not None and not moved and end.place.step in USERS
    if end.wait.kind is not Blocked.COMPUTES and not (starves and _share(case, end) >= STARVED):
        return None
    same = f" in the {case.apart:.1f} s observed" if before is not None and not moved else ""
    return Judgement(
        HangCause.COMPUTING, f"is {end.wait.words}{same}", Sure.LIKELY,
        (wait_seen(case, end),),
        ("an endless loop, or one slow sample: look again later",)
        + (("other threads use the CPUs that it needs",) if starves else ()),
        moves=moved,
    )  # fmt: skip


STARVED: Final = 0.05
"""Share of a CPU below which a thread that is ready to run does not compute: it waits for a CPU."""


def _share(case: RunFacts, end: Link) -> float:
    thread = case.thread(end.pid, end.tid)
    return thread.used / max(case.now.interval, 1e-3) if thread is not None else 0.0


def no_cpu(case: RunFacts, chain: Chain) -> Judgement | None:
    if chain.end.wait.kind is not Blocked.READY:
        return None
    process = case.processes[chain.end.pid]
    machine = case.now.machine
    quotas = [one.cpu_quota for one in machine.cgroups if one.cpu_quota > 0]
    facts = [EvidenceLine(f"it may use CPUs {list(process.cpus)} of {machine.cpus}; load {machine.load:.1f}", "/proc")]
    facts += [EvidenceLine(f"its cgroup has {min(quotas):g} CPUs", "cgroup")] if quotas else []
    return Judgement(
        HangCause.NO_CPU, f"is {chain.end.wait.words}", Sure.LIKELY, tuple(facts), moves=True,
    )  # fmt: skip


def moves(case: RunFacts, chain: Chain) -> Judgement | None:
    end = chain.end
    if end.wait.kind is not Blocked.MOVES:
        return None
    thread, then = case.thread(end.pid, end.tid), case.thread_before(end.pid, end.tid)
    times = thread.switches[1] - then.switches[0] if thread is not None and then is not None else 0
    naps = bool(end.place.inside) and "sleep" in end.place.inside[0].source
    if naps and times > 1 and same_place(case, end):
        what = f"polls: it woke {times} times in the {case.apart:.1f} s observed, and is still at the same line"
        return Judgement(
            HangCause.SLEEP, what, Sure.LIKELY, (wait_seen(case, end),), moves=True,
        )  # fmt: skip
    return Judgement(HangCause.NONE, f"is {end.wait.words}", moves=True)


def unknown(case: RunFacts, chain: Chain) -> Judgement | None:
    words = chain.end.wait.words
    seen = "" if chain.end.place.seen else "; the cause is unknown without its Python stack"
    return Judgement(
        HangCause.UNKNOWN, f"is {words}{seen}", Sure.UNKNOWN, (EvidenceLine(words, source_of(case, chain.end)),),
        fix="" if chain.end.place.seen else "install py-spy and run the doctor again, as root or with CAP_SYS_PTRACE",
    )  # fmt: skip
