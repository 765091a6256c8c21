"""The verdict: follow each loop's chain of waits to its end, apply the rules, and state the result in a sentence.

Interface: `diagnose(looks, told)` -> `Finding`. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

from minidl.hang import remedies
from minidl.hang.case import RunFacts, in_library, spot
from minidl.hang.chain import Chain, Link, follow, waiting_in
from minidl.hang.evidence.graph import Blocked
from minidl.hang.evidence.model import RunEvidence, SeenProcess
from minidl.hang.finding import EvidenceLine, Finding, HangCause, RecordedWait, RunOutcome, Sure
from minidl.hang.limits import ENDLESS, ENDLESS_WORK, JOINED, OWN_CODE, POLLED, SLOW, STILL
from minidl.hang.places import AT_HOME, USERS, LoaderStep, is_ours
from minidl.hang.rules.activity import family_stirs, receives, stirs, times_asleep, wakes
from minidl.hang.rules.judgement import Judgement, exit_in_words
from minidl.hang.rules.table import judged
from minidl.tracefile.words import and_joined, seconds, size

_MAY_BE_SLOW: Final = frozenset({
    Blocked.SOCKET, Blocked.FILE, Blocked.CHILD, Blocked.PIPE_READ, Blocked.PIPE_WRITE, Blocked.UNINTERRUPTIBLE,
})  # fmt: skip

_RANK: Final = (RunOutcome.HUNG, RunOutcome.MAYBE_HUNG, RunOutcome.UNKNOWN, RunOutcome.MOVES)
"""The order of outcomes: of several loops, the verdict is about the one whose outcome comes first."""


def diagnose(looks: Sequence[RunEvidence], told: RecordedWait | None = None) -> Finding:
    """Find what holds a run up. looks: evidence, the latest last; told: the wait in its trace, if it has a trace."""
    case = RunFacts(looks, told)
    verdicts = [_verdict(case, follow(case, loop)) for loop in case.loops]
    if not verdicts:
        return _no_loop(case)
    if told is not None:
        mine = [one for loop, one in zip(case.loops, verdicts, strict=True) if loop.pid == told.pid]
        verdicts = mine or verdicts
    best = min(verdicts, key=lambda one: (_RANK.index(one.outcome), _vague(one)))
    others = [one for one in verdicts if one is not best and one.outcome in (RunOutcome.HUNG, RunOutcome.MAYBE_HUNG)]
    extra = tuple(EvidenceLine(f"another loop: {one.sentence}", "evidence") for one in others[:3])
    return dataclasses.replace(best, evidence=(*best.evidence, *extra), not_seen=_not_seen(case))


def _vague(one: Finding) -> int:
    """1 for a verdict that only names a wait for others, 0 for one that names the cause."""
    return int(one.cause in (HangCause.COLLECTIVE, HangCause.UNKNOWN))


def _verdict(case: RunFacts, chain: Chain) -> Finding:
    found = judged(case, chain)
    outcome = _outcome(case, chain, found)
    end, first, short = chain.end, chain.links[0].place, case.in_brief()
    waiting, reason = _sentence(short, chain, judged(short, chain), outcome)
    return Finding(
        outcome=outcome,
        what="".join(_sentence(case, chain, found, outcome)),
        cause=found.cause if outcome is not RunOutcome.MOVES or found.cause is HangCause.NO_CPU else HangCause.NONE,
        head=outcome.value + _how_long(case, outcome),
        brief=waiting + reason,
        waiting=waiting,
        chain=tuple(_link_words(case, chain, i) for i in range(len(chain.links))),
        loop_step=first.step if first.seen else None,
        evidence=(*_facts(case, chain), *found.facts, *(case.told.facts if case.told else ()), *_resources(case)),
        sure=found.sure,
        also=found.also if outcome is not RunOutcome.MOVES else (),
        next_step=_next_step(case, chain, outcome),
        fix="" if outcome is RunOutcome.MOVES and found.cause is not HangCause.NO_CPU else found.remedy,
        who=_who(case, end),
        where=_where(case, chain),
    )


def _no_loop(case: RunFacts) -> Finding:
    process = case.processes.get(case.now.main)
    if process is None or process.ended:
        said = f"process {case.now.main} has ended"
        if process is None or process.exit_code in (0, -1):
            return Finding(RunOutcome.ENDED, said, sure=Sure.CERTAIN)
        how = exit_in_words(process.exit_code)
        return Finding(RunOutcome.DIED, f"{said}: {how}", HangCause.DIED, sure=Sure.CERTAIN)
    said = f"no loop over a DataLoader was found in process {process.pid}"
    return Finding(RunOutcome.UNKNOWN, said, HangCause.UNKNOWN, not_seen=_not_seen(case))


# --- How it stands ----------------------------------------------------------------------------------------------------
def _outcome(case: RunFacts, chain: Chain, found: Judgement) -> RunOutcome:
    """The outcome: a run that still moves is no certain hang, whatever the end of the chain shows."""
    outcome = _seeming(_Seen(case, chain, found))
    return RunOutcome.MAYBE_HUNG if outcome is RunOutcome.HUNG and _goes_on(case, chain, found) else outcome


def _goes_on(case: RunFacts, chain: Chain, found: Judgement) -> bool:
    """Whether a thread of the chain, or of the run if the chain names none, did more between the looks than poll.

    A thread that computes, or that sleeps repeatedly at one line, is judged by how long it does so.
    """
    if any(stirs(case, one.pid, one.tid) for one in chain.links if not _at_cpu(one) and not times_asleep(case, one)):
        return True
    nobody = chain.missing or (len(chain.links) == 1 and found.cause is HangCause.UNKNOWN)
    return nobody and family_stirs(case, chain.links[0].pid)


class _Seen:
    """The facts about a chain from which the outcome follows."""

    def __init__(self, case: RunFacts, chain: Chain, found: Judgement) -> None:
        self.case, self.chain, self.found = case, chain, found
        self.end, self.kind = chain.end, chain.end.wait.kind
        self.told = case.told or RecordedWait()
        threads = [one for link in _ring(chain) if (one := case.thread(link.pid, link.tid)) is not None]
        self.thread = min(threads, key=lambda one: one.idle, default=None)
        self.idle = self.thread.idle if self.thread is not None else -1.0

    @cached_property
    def moved(self) -> bool:
        return _moved(self.case, self.chain)

    @property
    def unknown(self) -> bool:
        return self.found.cause is HangCause.UNKNOWN

    def goes_on(self) -> bool:
        return self.found.moves and (self.found.cause is HangCause.NO_CPU or not _stays(self.case, self.end))

    def stands(self) -> bool:
        return _stands(self.case, self.chain) or _naps_in_one_step(self.case, self.end)

    def may_be_ended(self) -> bool:
        """Whether a person, a working process or the loop's own shutdown may end the wait."""
        asks = self.found.cause is HangCause.TERMINAL and self.end.pid not in self.case.workers
        return asks or self.found.helped or _will_be_ended(self.case, self.chain)

    def slept_long(self) -> bool:
        long = SLOW if _may_be_slow(self.chain, self.found) else STILL
        return self.idle >= long and self.thread is not None and self.thread.slept


class _Standing(NamedTuple):
    """The outcome of a chain for which `when` holds; if `unless` holds too, the outcome is `then`."""

    about: str
    when: Callable[[_Seen], bool]
    outcome: RunOutcome
    unless: Callable[[_Seen], bool] = lambda of: False
    then: RunOutcome = RunOutcome.MAYBE_HUNG


_OUTCOMES: Final = (
    _Standing("it goes on by itself", lambda of: of.goes_on(), RunOutcome.MOVES,
              lambda of: of.kind is Blocked.SLEEPS and of.told.hung and not of.told.own_code and not of.moved),
    _Standing("it moved between the looks, perhaps before it came to where it is now", lambda of: of.moved,
              RunOutcome.MOVES, lambda of: of.told.hung and of.stands()),
    _Standing("the wait may be ended", lambda of: of.may_be_ended(), RunOutcome.MAYBE_HUNG),
    _Standing("it runs now and then", lambda of: of.told.hung and of.kind is Blocked.MOVES, RunOutcome.MAYBE_HUNG),
    _Standing("what is missing may just have been sent", lambda of: of.chain.missing and of.case.apart < STILL,
              RunOutcome.MAYBE_HUNG),
    _Standing("the wait is long by the trace", lambda of: of.told.hung, RunOutcome.HUNG,
              lambda of: _may_be_at_work(of.case, of.chain, of.found, of.told)),
    _Standing("it is missing at both looks, though what was missing at the first may have come since",
              lambda of: of.chain.missing, RunOutcome.HUNG, lambda of: 0 <= of.told.seconds < STILL),
    _Standing("it is stopped", lambda of: of.kind in (Blocked.STOPPED, Blocked.TRACED), RunOutcome.HUNG),
    _Standing("it has ended, and the loop, which looks every 5 s but not in a read, has not noticed",
              lambda of: of.kind is Blocked.ENDED, RunOutcome.HUNG,
              lambda of: of.case.apart <= POLLED and of.chain.links[0].place.step is not LoaderStep.READ),
    _Standing("it sleeps", lambda of: of.kind is Blocked.SLEEPS, RunOutcome.MAYBE_HUNG,
              lambda of: _is_endless(of.case, of.end), RunOutcome.HUNG),
    _Standing("what it is in can't be seen", lambda of: of.unknown and not of.end.place.seen, RunOutcome.UNKNOWN,
              lambda of: of.idle > POLLED and len(of.chain.links) > 1),
    _Standing("it waits for itself", lambda of: _stays_locked(of.case, of.end, of.found), RunOutcome.HUNG),
    _Standing("it has slept for long", lambda of: of.slept_long(), RunOutcome.HUNG),
    _Standing("nothing is known", lambda of: of.unknown, RunOutcome.UNKNOWN),
    _Standing("it sleeps for a moment", lambda of: True, RunOutcome.MAYBE_HUNG),
)  # fmt: skip
"""The outcomes by the chain's end: the first row that holds decides."""


def _seeming(seen: _Seen) -> RunOutcome:
    row = next(row for row in _OUTCOMES if row.when(seen))
    return row.then if row.unless(seen) else row.outcome


def _may_be_at_work(case: RunFacts, chain: Chain, found: Judgement, told: RecordedWait) -> bool:
    """Whether a wait that is long by the trace may still be work of unknown length.

    A first wait has no earlier waits to compare it with. Between two batches the loop's own code may do anything:
    an evaluation or a checkpoint is no hang, however short the earlier steps were.
    """
    first = chain.links[0].place
    asks = first.seen and first.step in (LoaderStep.NEXT, LoaderStep.READ, LoaderStep.HAND_OVER)
    own = told.own_code and not asks  # one thread of it may call next after another
    if _at_cpu(chain.end):
        return own or not told.past or told.seconds < max(OWN_CODE, ENDLESS_WORK * told.past)
    if own and found.cause is HangCause.UNKNOWN:
        return True
    if chain.end.wait.kind is Blocked.SLEEPS:
        return (own or not told.past) and not _is_endless(case, chain.end)
    return own and _may_be_slow(chain, found) and told.seconds < OWN_CODE


def _may_be_slow(chain: Chain, found: Judgement) -> bool:
    """Whether the process that is waited for may only be slow."""
    return chain.end.wait.kind in _MAY_BE_SLOW and not chain.cycle and not found.alone


def _stays_locked(case: RunFacts, end: Link, found: Judgement) -> bool:
    """Whether both looks saw a thread at a lock that it holds itself. Between the looks only signals wake it."""
    then, now = case.thread_before(end.pid, end.tid), case.thread(end.pid, end.tid)
    before = case.before(end.pid, end.tid)
    if found.cause is not HangCause.SELF_LOCK or then is None or now is None or before is None or case.apart < STILL:
        return False
    locks = [one.syscall.address for one in (then, now) if one.syscall is not None]
    return len(locks) == 2 and locks[0] == locks[1] and spot(before) == spot(end.place)


def _is_endless(case: RunFacts, end: Link) -> bool:
    thread = case.thread(end.pid, end.tid)
    return thread is not None and thread.syscall is not None and thread.syscall.timeout > ENDLESS


def _at_cpu(link: Link) -> bool:
    return link.wait.kind in (Blocked.COMPUTES, Blocked.READY)


def _will_be_ended(case: RunFacts, chain: Chain) -> bool:
    """Whether the loop shuts down and still has time to end the worker that it waits for.

    torch's loader sends SIGTERM, which a worker may ignore or block; minidl's loader sends SIGKILL in the end.
    """
    first, end = chain.links[0], chain.end
    if first.place.step is not LoaderStep.SHUTDOWN or end.pid not in case.workers or end is first:
        return False
    ours = any(is_ours(frame.file) for frame in case.stack(first.pid, first.tid))
    if _ignores_sigterm(case.processes[end.pid]) and not ours:
        return False
    rounds = 1 + (2 if ours else 1) * len(case.workers_of(first.pid))
    return case.told is None or case.told.seconds < JOINED * rounds


def _ignores_sigterm(process: SeenProcess) -> bool:
    return "SIGTERM" in process.ignored or (process.main is not None and "SIGTERM" in process.main.blocked)


def _ring(chain: Chain) -> tuple[Link, ...]:
    """The links that have to go on: the chain's end, or all links of a cycle that do not poll."""
    ring = chain.links[chain.back :] if chain.cycle else (chain.end,)
    return tuple(link for link in ring if not link.wait.bounded) or ring


def _stands(case: RunFacts, chain: Chain) -> bool:
    """Whether the chain's end has been blocked for a second in a call without a timeout."""
    ring = _ring(chain)
    threads = [case.thread(link.pid, link.tid) for link in ring]
    blocked = all(thread is not None and thread.slept and thread.idle >= 1 for thread in threads)
    return blocked and not any(link.wait.bounded for link in ring)


def _stays(case: RunFacts, end: Link) -> bool:
    """Whether a thread that wakes up now and then was at the same sample, or step, at both looks."""
    before = case.before(end.pid, end.tid)
    return before is not None and end.place.step in USERS and end.place.step is not LoaderStep.OTHER


def _moved(case: RunFacts, chain: Chain) -> bool:
    """Whether a thread of the chain was at another task or sample at the first look, or ran between the two."""
    loops = {loop.pid for loop in case.loops}  # they poll
    for link in [link for link in chain.links if link.pid not in loops] or chain.links[:1]:
        before = case.before(link.pid, link.tid)
        if before is not None and link.place.seen:
            was, now = (before.step, before.task, before.sample), (link.place.step, link.place.task, link.place.sample)
            if was != now:
                return True
        if len(case.looks) > 1 and before is None and _ran(case, link):
            return True
    return wakes(case, chain.end) > 0 or any(receives(case, link) for link in chain.links)


def _naps_in_one_step(case: RunFacts, end: Link) -> bool:
    """Whether a worker sleeps and, by the trace, has been in its step for long.

    torch's loader records no samples: its step is a whole batch, and the sample may have changed since the first look.
    """
    told, before = case.told, case.before(end.pid, end.tid)
    if told is None or not told.step_since or (end.pid, end.tid) != (told.worker_pid, told.worker_pid):
        return False
    one = told.sample >= 0 or (before is not None and before.step is not end.place.step)
    return one and end.wait.kind is Blocked.SLEEPS and case.now.moment - told.step_since >= STILL * 1e9


def _ran(case: RunFacts, link: Link) -> bool:
    """Whether a thread without a stack woke up between two looks, other than from a poll, and went on."""
    then, now = case.thread_before(link.pid, link.tid), case.thread(link.pid, link.tid)
    if then is None or now is None or now.switches[1] == then.switches[1]:
        return False
    return not link.wait.bounded and link.wait.kind is not Blocked.COMPUTES


# --- Words ------------------------------------------------------------------------------------------------------------
def _how_long(case: RunFacts, outcome: RunOutcome) -> str:
    """How long the wait lasts, if that is known."""
    known = case.told is not None and outcome is RunOutcome.HUNG and case.told.seconds >= 0
    return f" for {seconds(case.told.seconds)}" if known and case.told is not None else ""


def _sentence(case: RunFacts, chain: Chain, found: Judgement, outcome: RunOutcome) -> tuple[str, str]:
    """The chain of waits in words. If the wait's length is unknown, with how long each thread has slept."""
    links, first, end = chain.links, chain.links[0], chain.end
    asleep = not case.brief and not _how_long(case, outcome)

    def place(link: Link) -> str:
        words = _place(case, link)
        return words + _asleep_for(case, link) if words and asleep else words

    deaf = _deaf(case, chain)
    if len(links) == 1:
        return f"{case.name(first.pid)}{_comma(place(first))} {found.what}{deaf}", ""
    who = f"{_loop_words(case, first)} {_named(case, chain, 1)}"
    inside = waiting_in(links[1])
    if links[1] is end or chain.cycle:
        return _described(who, place(links[1]), found.what + deaf)
    if links[1].pid == end.pid and not inside:
        return _described(who, place(end), found.what + deaf)
    waits = f"waits in {inside}" if inside else f"is {links[1].wait.words}"
    last = f"; {_named(case, chain, len(links) - 1)}{_comma(place(end))} {found.what}{deaf}"
    return _described(who, place(links[1]), waits + last)


def _deaf(case: RunFacts, chain: Chain) -> str:
    """Say that a worker ignores the signal by which the loop, which waits for its end, wants to end it."""
    end, step = chain.end, chain.links[0].place.step
    stopping = step in (LoaderStep.SHUTDOWN, LoaderStep.EXIT) and end.pid in case.workers
    ignores = stopping and _ignores_sigterm(case.processes[end.pid])
    return "; it ignores SIGTERM, the signal that should end it" if ignores else ""


def _named(case: RunFacts, chain: Chain, position: int) -> str:
    """The name of a link: a thread's name if the link before it is another thread of the same process."""
    link, before = chain.links[position], chain.links[position - 1]
    thread = case.thread(link.pid, link.tid)
    if link.pid != before.pid or link.tid == before.tid or thread is None:
        return case.name(link.pid)
    return f"its thread {thread.python_name or thread.name}"


def _described(who: str, place: str, what: str) -> tuple[str, str]:
    return (f"{who},{place}", f": it {what}") if place else (f"{who}, which {what}", "")


def _comma(place: str) -> str:
    return f",{place}," if place else ""


def _loop_words(case: RunFacts, first: Link) -> str:
    name = case.name(first.pid)
    if first.place.interrupted:
        return f"{name}, in a signal handler or finalizer ({spot(first.place)}), waits for"
    if first.place.step is LoaderStep.SHUTDOWN:
        return f"{name} shuts down, and waits for"
    if first.place.step is LoaderStep.HAND_OVER:
        return f"{name} fetches a batch's memory from"
    if first.place.step in AT_HOME or not first.place.seen:
        task = f"batch {case.told.task} of" if case.told is not None and case.told.task >= 0 else ""
        return f"{name} waits for {task}".rstrip() if task else f"{name} waits for"
    where = first.place.step.value if first.place.step is LoaderStep.EXIT else "in its own code"
    return f"{name}, {where}, waits for"


def _place(case: RunFacts, link: Link) -> str:
    """Where a link is, to stand after its name: " in sample 137 (D.get at data.py:6)"."""
    place, told = link.place, case.told
    words, at = "", spot(place)
    sample = place.sample
    if sample < 0 and told is not None and told.worker_pid == link.pid:
        sample = told.sample
    if place.interrupted:
        words = "in a signal handler or finalizer"
    elif sample >= 0:
        words = f"in sample {sample}"
    elif place.seen and place.step is LoaderStep.OTHER and any(link.pid == loop.pid for loop in case.loops):
        words = "in its own code" if link.pid not in case.workers else ""
    elif place.step is LoaderStep.IMPORT and link.pid not in case.workers:
        words = "importing a module"
    elif place.step in (LoaderStep.WRITE, LoaderStep.PICKLE, LoaderStep.FEEDER_IDLE) and link.pid not in case.workers:
        words = "in the feeder of its own queue"
    elif place.seen and place.step not in (LoaderStep.OTHER, LoaderStep.IDLE, LoaderStep.NEXT):
        words = place.step.value
    elif told is not None and told.worker_pid == link.pid and told.step:
        words = told.step
    said = f" {words}" if words else ""
    polls = place.step in (LoaderStep.NEXT, LoaderStep.IDLE) and not place.interrupted
    return said + (f" ({at})" if at and not polls else "")


def _asleep_for(case: RunFacts, link: Link) -> str:
    thread = case.thread(link.pid, link.tid)
    if thread is None or thread.idle < 1 or (link.wait.bounded and link.wait.kind is not Blocked.SLEEPS):
        return ""
    return f" for {seconds(thread.idle)}"


def _link_words(case: RunFacts, chain: Chain, position: int) -> str:
    link = chain.links[position]
    by = f" {link.by}" if link.by else ""
    if chain.cycle and position == len(chain.links) - 1:
        return f"{case.name(link.pid)}{by}: this closes the cycle"
    step = link.place.step.value if link.place.seen else "no Python stack"
    place = f" (sample {link.place.sample})" if link.place.sample >= 0 else ""
    polls = link.place.step in (LoaderStep.NEXT, LoaderStep.IDLE) and not link.place.interrupted
    at = f", {spot(link.place)}" if spot(link.place) and not polls else ""
    return f"{case.name(link.pid)}{by}: {step}{place}{at}; {link.wait.words}{_asleep_for(case, link)}"


def _facts(case: RunFacts, chain: Chain) -> Iterator[EvidenceLine]:
    """Where in the user's code each thread of the chain is."""
    for link in chain.links[: chain.back if chain.cycle and chain.back > 0 else None]:
        if (frame := link.place.users) is not None:
            source, of = f": {frame.source}" if frame.source else "", f"stack of thread {link.tid}"
            yield EvidenceLine(f"{case.name(link.pid)} is in {frame.function}, {frame.file}:{frame.line}{source}", of)
            if inner := in_library(link.place):
                yield EvidenceLine(f"innermost frame: {inner}", of)


def _resources(case: RunFacts) -> Iterator[EvidenceLine]:
    """The exhausted resources of the machine, whatever the cause."""
    machine = case.now.machine
    if 0 <= machine.shm_free < max(1 << 20, machine.shm_size // 50):
        yield EvidenceLine(f"/dev/shm has {size(machine.shm_free)} of {size(machine.shm_size)} left", "statvfs")
    for group in machine.cgroups:
        if group.oom_kills > 0:
            killed = f"the out-of-memory killer has killed {group.oom_kills} processes of {group.path}"
            yield EvidenceLine(killed, "cgroup")
        if 0 < group.memory_limit < group.memory / 0.95:
            yield EvidenceLine(f"{group.path} uses {size(group.memory)} of {size(group.memory_limit)}", "cgroup")
    for process in case.now.processes:
        for has, most, what in (
            (len(process.descriptors), process.limits.get("open files", 0), "descriptors"),
            (process.maps, machine.max_map_count, "mappings"),
        ):
            if has > 0.95 * most > 0:
                yield EvidenceLine(f"{case.name(process.pid)} has {has} of {most} {what}", "/proc")


def _next_step(case: RunFacts, chain: Chain, outcome: RunOutcome) -> str:
    end = chain.end
    sample = end.place.sample if end.place.sample >= 0 else (case.told.sample if case.told is not None else -1)
    if outcome is RunOutcome.MOVES:
        return "look again later, or record the run: minidl run --observe shows where its time goes"
    if outcome is RunOutcome.MAYBE_HUNG:
        return "ask again in a minute: nothing moved during a short look, but the step may only be slow"
    return remedies.in_step(end.place.step, sample if end.pid in case.workers else -1)


def _who(case: RunFacts, end: Link) -> dict[str, Any]:
    loop = any(end.pid == one.pid for one in case.loops)
    role = "worker" if end.pid in case.workers else ("loop" if loop else "other")
    return {"role": role, "worker": case.workers.get(end.pid, -1), "pid": end.pid, "thread": end.tid}


def _where(case: RunFacts, chain: Chain) -> dict[str, Any]:
    """Where the chain's end is. A thread that a sample has started is in that sample."""
    end, frame = chain.end, chain.end.place.users
    mine = [one.place for one in chain.links if one.pid == end.pid and one.place.sample >= 0]
    started = end.place.step is LoaderStep.OTHER and end.place.seen and not end.place.interrupted
    place = mine[-1] if mine and started else end.place
    sample = place.sample
    if sample < 0 and case.told is not None and case.told.worker_pid == end.pid:
        sample = case.told.sample
    step = "signal-handler" if end.place.interrupted else place.step.name.lower()
    found: dict[str, Any] = {"step": step if end.place.seen else "unseen", "sample": sample, "task": place.task}
    if frame is not None:
        found |= {"function": frame.function, "file": frame.file, "line": frame.line}
    return found


def _not_seen(case: RunFacts) -> tuple[str, ...]:
    """What could not be read, with the processes concerned."""
    found: dict[str, list[str]] = {text: [] for text in case.now.not_seen}
    for process in case.now.processes:
        for text in process.not_seen:
            found.setdefault(text, []).append(str(process.pid))
    return tuple(f"{text} (pid {and_joined(pids)})" if pids else text for text, pids in found.items())
