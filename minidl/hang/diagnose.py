"""The verdict: follow each loop's chain of waits to its end, apply the rules, and state the result in a sentence.

Interface: `diagnose(looks, told)` -> `Finding`. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

from minidl.hang import remedies
from minidl.hang.case import RunFacts
from minidl.hang.chain import Chain, collective, follow
from minidl.hang.evidence.model import RunEvidence
from minidl.hang.finding import EvidenceLine, Finding, HangCause, RecordedWait, RunOutcome, Sure, short, whole
from minidl.hang.outcomes import outcome_of, still
from minidl.hang.rules.judgement import exit_in_words
from minidl.hang.rules.table import judged
from minidl.hang.sentence import facts_of, link_words, resources, sentence, where, who
from minidl.tracefile.words import and_joined, named_ranks, seconds

_RANK: Final = (RunOutcome.HUNG, RunOutcome.MAYBE_HUNG, RunOutcome.UNKNOWN, RunOutcome.MOVES)
"""The order of outcomes: of several loops, the verdict is about the one whose outcome comes first."""

_VAGUE: Final = (HangCause.COLLECTIVE, HangCause.UNKNOWN)
"""Causes that only name a wait for others."""


def diagnose(looks: Sequence[RunEvidence], told: RecordedWait | None = None) -> Finding:
    """Find what holds a run up. looks: evidence, the latest last; told: the wait in its trace, if it has a trace."""
    case = RunFacts(looks, told)
    chains = [follow(loop) for loop in case.loops]
    if not chains:
        return _no_loop(case)
    verdicts = {chain: _verdict(chain) for chain in chains}
    asked = [chain for chain in chains if chain.first.pid == case.told.pid] or chains

    def rank(one: Chain) -> tuple[int, bool]:
        return _RANK.index(verdicts[one].outcome), verdicts[one].cause in _VAGUE

    first = min(asked, key=rank)
    same_end = [one for one in chains if one.end.key == first.end.key and rank(one) <= rank(first)]
    chain = min(same_end, key=lambda one: len(one.links))
    best = verdicts[chain]
    behind = [one for one in chains if one is not chain and _waits_behind(one, chain, best.cause)]
    others = (verdicts[one] for one in chains if one is not chain and one not in behind)
    worse = [one for one in others if one.outcome in (RunOutcome.HUNG, RunOutcome.MAYBE_HUNG)]
    extra = tuple(EvidenceLine(f"another loop: {one.sentence}", "evidence") for one in worse[:3])
    words = _behind_in_words(behind)
    return dataclasses.replace(
        best, what=best.what + words, brief=best.brief + words, evidence=(*best.evidence, *extra),
        not_seen=_not_seen(case),
    )  # fmt: skip


def _waits_behind(one: Chain, chain: Chain, cause: HangCause) -> bool:
    """Whether a rank waits for the first of a chain, or in the same collective for a rank that is not there."""
    same = collective(one.end) == collective(chain.end) != "" and len(one.links) == 1
    absent = cause in (HangCause.COLLECTIVE, HangCause.DIED)
    return chain.first.key in [link.key for link in one.links[1:]] or (same and absent)


def _behind_in_words(behind: list[Chain]) -> str:
    """The ranks that wait in a collective, too: "; ranks 0 and 2 wait for it in all_reduce"."""
    ranks = sorted(one.first.case.ranks.get(one.first.pid, -1) for one in behind)
    if not ranks or min(ranks) < 0:
        return ""
    names = and_joined(list(dict.fromkeys(collective(one.first) for one in behind)))
    return f"; {named_ranks(ranks, 4, and_joined)} wait{'s' * (len(ranks) == 1)} in {names}"


def _verdict(chain: Chain) -> Finding:
    found, case, first = judged(chain), chain.end.case, chain.first.place
    outcome = outcome_of(chain, found)
    moves = outcome is RunOutcome.MOVES
    starves = found.cause is HangCause.NO_CPU
    timed = outcome is RunOutcome.HUNG and case.told.seconds >= 0
    waiting, reason = sentence(chain, found, timed)
    return Finding(
        outcome=outcome,
        what=whole(waiting + reason),
        cause=found.cause if not moves or starves else HangCause.NONE,
        head=outcome.value + (f" for {seconds(case.told.seconds)}" if timed else ""),
        brief=short(waiting + reason),
        waiting=short(waiting),
        chain=tuple(whole(link_words(chain, position)) for position in range(len(chain.links))),
        loop_step=first.step if first.seen else None,
        still=still(chain),
        evidence=tuple(_whole([*facts_of(chain), *found.facts, *case.told.facts, *resources(case)])),
        sure=found.sure,
        also=() if moves else tuple(map(whole, found.also)),
        next_step=_next_step(chain, outcome, found.cause),
        fix="" if moves and not starves else found.remedy,
        who=who(chain.end),
        where=where(chain),
    )


def _whole(lines: Iterable[EvidenceLine]) -> Iterable[EvidenceLine]:
    return (EvidenceLine(whole(line.text), line.source) for line in lines)


def _no_loop(case: RunFacts) -> Finding:
    process = case.processes.get(case.now.main)
    if process is None or process.ended:
        said = f"process {case.now.main} has ended"
        if process is None or process.exit_code in (0, -1):
            return Finding(RunOutcome.ENDED, said, sure=Sure.CERTAIN)
        how = exit_in_words(process.exit_code)
        return Finding(RunOutcome.DIED, f"{said}: {how}", HangCause.DIED, sure=Sure.CERTAIN)
    said = f"no loop over a DataLoader was found in process {process.pid}"
    other = "ask again if the program has just started; else give the id of the process that iterates, or of its parent"
    return Finding(RunOutcome.UNKNOWN, said, HangCause.UNKNOWN, not_seen=_not_seen(case), next_step=other)


_AGAIN: Final = {
    RunOutcome.MOVES: "look again later, or record the run: minidl run --observe shows where its time goes",
    RunOutcome.MAYBE_HUNG: "ask again in a minute: nothing moved during a short look, but the step may only be slow",
}


_BETWEEN: Final = frozenset({
    HangCause.FORK_LOCK, HangCause.MISSING_THREAD, HangCause.CYCLE, HangCause.LOCK, HangCause.SEMAPHORE,
    HangCause.PERMIT_LOST, HangCause.DEAD_LOCK_HOLDER, HangCause.QUEUE_FULL, HangCause.QUEUE_EMPTY, HangCause.BARRIER,
})  # fmt: skip
"""Causes that need more than one process: a sample alone does not hang of them."""


def _next_step(chain: Chain, outcome: RunOutcome, cause: HangCause) -> str:
    if outcome in _AGAIN or cause in _BETWEEN:
        return _AGAIN.get(outcome, "")
    end, told = chain.end, chain.end.case.told
    sample = end.place.sample if end.place.sample >= 0 else told.sample
    return remedies.in_step(end.step, sample if end.in_worker else -1)


def _not_seen(case: RunFacts) -> tuple[str, ...]:
    """The evidence that could not be read, with the processes concerned."""
    found: dict[str, list[str]] = {text: [] for text in case.now.not_seen}
    for process in case.now.processes:
        for text in process.not_seen:
            found.setdefault(text, []).append(str(process.pid))
    return tuple(f"{text} (pid {and_joined(pids)})" if pids else text for text, pids in found.items())
