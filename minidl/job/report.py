"""What became of a job: its headline, and its summary on one screen, whatever the number of its ranks.

Interface: `JobReport(record)`: `finding`, one for the job as for a trace, and `text()`. The finding is the first of
these that happened: a rank went wrong by itself; a rank never started; a rank had fewer batches than one that waits;
the ranks wait for a straggler; else what bounds the ranks' loaders.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from minidl.hang.finding import Finding, HangCause, HangDegree, RunOutcome, Sure, from_trace
from minidl.hang.headline.uneven import REMEDY, LastEpoch, had_fewer
from minidl.job.digests import JobRecord
from minidl.job.lateness import PART, reason_of
from minidl.job.meetings import STAYS, Meetings, Straggler, straggler
from minidl.job.step_table import CAUSES, RankFacts
from minidl.speed.verdict import MARGIN, ROOM, judge
from minidl.speed.wall_clock import FEW_BATCHES, Bound, Waiting
from minidl.tracefile.words import counted, duration, listed, percent, plain

SHOWN: Final = 10
"""The ranks that have a row of their own in a summary."""

NOTABLE, COMPARED = 0.05, 2
"""The share of all lateness from which a rank matters, and the number of others that stand beside those."""

NAMED: Final = 3
"""Ranks that a sentence names; of more, it says how many they are."""

LATE_START: Final = 10.0
"""Seconds by which a rank begins later than the median rank from which that is said."""

ROW: Final = 60
"""Characters of a rank's own headline in its row."""

_IN_TURN: Final = (
    (
        "their batches",
        "let batches cost the same on all ranks (mix cheap and expensive samples in each), or hide the difference by a "
        "larger prefetch_factor or more workers",
    ),
    (
        "their own steps",
        "let steps cost the same on all ranks: batches of equal size or length, CPUs that no other program uses",
    ),
)
"""What ranks are late with in turn, and what to do: their batches, or their steps."""

_ALIKE: Final = {
    "command": "commands", "loader": "DataLoaders", "world": "numbers of ranks", "workers": "numbers of workers",
}  # fmt: skip
"""What all ranks of a job have alike, by its name in their facts."""

_STOPPED: Final = tuple(one.value for one in RunOutcome if one.stopped)


class JobReport:
    """A job, judged. meetings: its ranks' steps side by side; straggler: None = there is none."""

    def __init__(self, record: JobRecord) -> None:
        self.record, self.tables = record, record.ranks
        self.facts = [table.facts for table in record.ranks]
        self.meetings = Meetings(self.tables)
        self.straggler: Straggler | None = straggler(self.meetings) if len(self.meetings.keys) >= FEW_BATCHES else None

    @functools.cached_property
    def finding(self) -> Finding:
        """The headline of the job."""
        stopped = [one for one in self.facts if one.outcome in _STOPPED]
        found = self._stopped(stopped) if stopped else None
        return found or self._never_started([]) or self._waits_for_straggler() or self._bounds()

    # --- A rank went wrong
    def _stopped(self, stopped: Sequence[RankFacts]) -> Finding | None:
        """The finding of ranks that did not end well: the one that went wrong by itself, and those that wait for it."""
        waiting = [one for one in stopped if one.waits_for_others]
        if not any(one.events for one in self.facts) and not waiting:
            return None
        if (found := self._never_started(stopped) or self._never_joined(stopped) or self._uneven(stopped)) is not None:
            return found
        first = min(stopped, key=_blame)
        others = [one for one in stopped if one is not first]
        sound = [one for one in self.facts if one not in stopped]
        cut = first.outcome == RunOutcome.CUT.value
        head, _, what = first.what.partition(": ")
        outcome = RunOutcome(first.outcome)
        if cut and others and not waiting and _at_one_place(stopped) and not sound:
            what = f"all {len(stopped)} recordings end after {first.taken[1]} batches, before the run's end"
            return self._found(outcome, what, first.next_step)
        if cut and not first.running and (waiting or others or sound):
            outcome, head = RunOutcome.DIED, "died"
            what = f"nothing is recorded after its batch {first.taken[1]}: it was killed, or its machine is gone"
        after = f"; {counted(len(waiting), 'other rank')} waited for it" if waiting and first not in waiting else ""
        found = self._found(outcome, f"{what}{after}", first.next_step, head=f"{head}, {first.name}")
        told = from_trace(*(f"{one.name}: {one.what}" for one in sorted(others, key=_blame)[:NAMED]))
        return replace(found, evidence=(*found.evidence, *told), who={"ranks": [first.rank]})

    def _never_started(self, stopped: Sequence[RankFacts]) -> Finding | None:
        """The finding of ranks without a trace for which the others wait."""
        missing = self.record.missing
        taken = max((one.taken[1] for one in self.facts), default=0)
        early = taken <= 1 and (stopped or not all(one.over for one in self.facts))
        if not missing or not (early or (stopped and all(one.waits_for_others for one in stopped))):
            return None
        who = f"rank{'s' * (len(missing) > 1)} {listed(missing)} of {self.record.world}"
        batches = counted(taken, "batch", "batches")
        what = f"{who} left no trace: never started, or recorded elsewhere; the other ranks took {batches}"
        return self._found(RunOutcome.HUNG, what, "look at the launcher's log of these ranks, and at their nodes")

    def _never_joined(self, stopped: Sequence[RankFacts]) -> Finding | None:
        """The finding of ranks that all others waited for before the first batch, and that did nothing wrong else."""
        idle = [one.rank for one in self.facts if one not in stopped and not one.taken[1]]
        if not idle or any(one.taken[1] or not one.waits_for_others for one in stopped):
            return None
        others = "another rank" if len(stopped) == 1 else f"{len(stopped)} other ranks"
        what = f"{_ranks(idle)} took no batch and did not join the others: {others} waited in vain, and took none"
        step = f"find out what these ranks did instead: minidl summary --rank {idle[0]}"
        found = self._found(RunOutcome.HUNG, what, step)
        return replace(found, who={"ranks": idle})

    def _uneven(self, stopped: Sequence[RankFacts]) -> Finding | None:
        """The finding of ranks that wait for one that had fewer batches in the epoch."""
        known = {one.rank: one for one in self.facts}
        last = {one.rank: LastEpoch(one.epoch, one.taken[0], one.ended_epoch) for one in self.facts}
        pairs = ((known[rank], known[other]) for rank, other in had_fewer(last))
        for one, least in ((one, other) for one, other in pairs if one in stopped and one.waits_for_others):
            what = (
                f"{one.name} waited in its step after batch {one.taken[0]} of epoch {one.epoch}; {least.name} had only "
                f"{least.taken[0]}: the ranks have different numbers of batches"
            )
            return self._found(RunOutcome.HUNG, what, REMEDY)
        return None

    # --- They all moved
    def _waits_for_straggler(self) -> Finding | None:
        found, meetings = self.straggler, self.meetings
        if found is None:
            return None
        share = percent(len(found.steps) / len(meetings.keys))
        steps = f"{counted(len(found.steps), 'step')} of {len(meetings.keys)}"
        lost = f"for {percent(meetings.lost)} of the job's time"
        if not found.ranks:
            of, step = _IN_TURN[found.loader < PART]
            weights = meetings.weights
            worst, second, *_ = most = np.argsort(-weights, kind="stable").tolist()
            clear = weights[worst] >= STAYS and weights[second] <= MARGIN * weights[worst]
            which = f"most often {self.facts[worst].name}" if clear else "another one each time"
            what = f"{share} of the job's steps wait for one rank, {which}, and mostly for {of}"
            last = ", ".join(f"{self.facts[row].name} ({percent(weights[row])})" for row in most[:NAMED])
            return self._found(RunOutcome.SLOW, what, step, (f"{steps} wait, {lost}", f"most often last: {last}"))
        why = reason_of(meetings, found)
        epoch, number = meetings.keys[found.since]
        since = f", since batch {number} of epoch {epoch}" if found.since > len(meetings.keys) // 10 else ""
        what = f"{share} of the job's steps wait for {self.who(found.ranks)}{since}: {why.words}"
        evidence = (f"{steps} wait for {'them' if len(found.ranks) > 1 else 'it'}, {lost}{since}", *why.evidence)
        ranks = [self.facts[row].rank for row in found.ranks]
        slow = self._found(RunOutcome.SLOW, what, why.next_step.replace("--rank N", f"--rank {ranks[0]}"), evidence)
        return replace(slow, who={"ranks": ranks})

    def who(self, rows: Sequence[int]) -> str:
        """Some ranks by name: "rank 37 (node4)", "node4 (ranks 32, 33, ...)", "ranks 3 and 9"."""
        chosen = [self.facts[row] for row in rows]
        numbers = sorted(one.rank for one in chosen)
        if len(chosen) == 1:
            return chosen[0].name
        node = chosen[0].node
        if node and {one.rank for one in self.facts if one.node == node} == set(numbers):
            return f"{node} (ranks {listed(numbers, NAMED)})"
        return f"{len(numbers)} ranks ({listed(numbers, NAMED)})"

    def _bounds(self) -> Finding:
        """What bounds the ranks' loaders, if they do not wait for each other."""
        running = any(one.running for one in self.facts)
        if not any(one.events for one in self.facts):
            what = f"no rank has recorded an iterator of a DataLoader{' yet' * running}"
            return self._found(RunOutcome.RUNNING if running else RunOutcome.CUT, what, "")
        waited = np.sum([table.waited for table in self.tables], axis=0)
        causes = {cause: int(us) * 1000 for cause, us in zip(CAUSES, waited, strict=True)}
        own = 1000 * int(sum(table.own for table in self.tables))
        batches = sum(len(table.steps) for table in self.tables)
        found = Waiting(causes, own, batches, max(one.workers for one in self.facts), alike=1)
        none = f"{'no straggler' if len(self.tables) > 1 else 'one rank alone'}; all ranks: "
        verdict = judge(found, room=ROOM - len(none))
        fine = verdict.kind in (Bound.NOT_INPUT, Bound.TOO_FEW)
        step = "" if fine else f"minidl summary --rank {self.facts[0].rank} says more"
        outcome = RunOutcome.FINE if fine else RunOutcome.SLOW
        outcome = RunOutcome.RUNNING if running else outcome
        return self._found(outcome, f"{none}{verdict.sentence}", step)

    def _found(
        self, outcome: RunOutcome, what: str, step: str, evidence: Sequence[str] = (), head: str = ""
    ) -> Finding:
        cause = HangCause.SLOW if outcome is RunOutcome.SLOW else HangCause.NONE
        return Finding(
            outcome, what, cause, head, evidence=from_trace(*evidence, *self.lacks), sure=Sure.LIKELY, next_step=step
        )

    # --- In words
    @functools.cached_property
    def lacks(self) -> tuple[str, ...]:
        """What of the job is missing, differs between ranks, or could not be read."""
        return tuple(map(plain, self._lacks()))

    def _lacks(self) -> Iterator[str]:
        yield from self.record.problems[: 2 * NAMED]
        if len(self.record.problems) > 2 * NAMED:
            yield f"{len(self.record.problems) - 2 * NAMED} more problems"
        if missing := self.record.missing:
            yield f"no trace of {counted(len(missing), 'rank')} of {self.record.world}: {listed(missing)}"
        if hurt := [one for one in self.facts if one.problems]:
            yield f"{_ranks([one.rank for one in hurt])}: {hurt[0].problems[0]}" + (
                ", or alike" if len(hurt) > 1 else ""
            )
        yield from self._differences()
        yield from self._uneven_ends()
        yield from self._late_starts()
        if self.record.kept > 1:
            yield f"of the steps, one in {self.record.kept} was judged, evenly spread"

    def _differences(self) -> Iterator[str]:
        sizes = [int(np.median(table.steps["samples"])) if len(table.steps) else 0 for table in self.tables]
        every = {what: [getattr(one, name) for one in self.facts] for name, what in _ALIKE.items()}
        every["commands"] = [program(one.command) for one in self.facts]
        for what, values in (every | {"samples in a batch": sizes}).items():
            (usual, _), *others = Counter(filter(None, values)).most_common() or [(None, 0)]
            if others:
                odd = {one.rank: of for one, of in zip(self.facts, values, strict=True) if of and of != usual}
                first = next(iter(odd.values()))
                yield f"the ranks have different {what}: {_ranks([*odd])}: {first}; the others: {usual}"

    def _uneven_ends(self) -> Iterator[str]:
        counts = Counter(one.taken[1] for one in self.facts)
        if len(counts) > 1 and not any(one.running or one.outcome in _STOPPED for one in self.facts):
            usual = counts.most_common(1)[0][0]
            odd = sorted((one for one in self.facts if one.taken[1] != usual), key=lambda one: one.taken[1])
            took = listed([one.taken[1] for one in odd], NAMED)
            yield f"uneven: {_ranks([one.rank for one in odd])} took {took} batches, the others {usual}"

    def _late_starts(self) -> Iterator[str]:
        begun = [one for one in self.facts if one.wall and one.begin]
        at = np.array([one.begin + one.wall for one in begun], np.float64) / 1e9
        if len(begun) > 1:
            late = at - np.sort(at)[(len(at) - 1) // 2]
            for row in np.flatnonzero(late >= LATE_START)[:NAMED].tolist():
                yield f"{begun[row].name} began {duration(late[row] * 1e9)} after the others, by the time of day"

    def text(self) -> str:
        """The summary: the job first, then the ranks that matter."""
        finding, meetings = self.finding, self.meetings
        nodes = len({one.node for one in self.facts} - {""})
        on = f" on {nodes} nodes" if nodes > 1 else ""
        events = counted(sum(one.events for one in self.facts), "event")
        lines = [
            *finding.lines(),
            f"{self.record.name}: {counted(len(self.tables), 'rank')}{on}, {counted(len(meetings.keys), 'step')} of "
            f"{duration(1000 * meetings.usual)}, {events}",
            *[f"  {one}" for one in dict.fromkeys(one.command for one in self.facts[:1]) if one],
            f"  {percent(meetings.share)} of the steps wait for a rank, {percent(meetings.lost)} of the job's time",
            *self._rows(),
        ]
        return "\n".join(map(plain, lines))

    def order(self) -> list[int]:
        """The rows of all ranks: those that went wrong, then those that the others wait for."""
        weights = self.meetings.weights
        return sorted(
            range(len(self.facts)),
            key=lambda row: (_blame(self.facts[row])[:2] if self.is_wrong(row) else (True, 99), -weights[row], row),
        )

    def outliers(self) -> list[int]:
        """The first of `order` that matter. Of many ranks, COMPARED others stand beside them."""
        order = self.order()
        matter = sum(self.is_wrong(row) or self.meetings.weights[row] >= NOTABLE for row in order)
        return order[: SHOWN if len(order) <= SHOWN else min(SHOWN, matter + COMPARED)]

    def is_wrong(self, row: int) -> bool:
        """Whether a rank did not end well."""
        return self.facts[row].outcome in _STOPPED

    def _rows(self) -> Iterator[str]:
        width = max(len(one.node) for one in self.facts)
        line = f"  {{:>6}}{{:<{width and max(6, width + 2)}}}{{:>9}}{{:>9}}{{:>10}}{{:>7}}{{:>10}}  {{}}".format
        yield line("rank", "  node" * bool(width), "batches", "late in", "by, p50", "waits", "own", "what")
        shown = self.outliers()
        yield from (line(*self._cells(row)) for row in shown)
        if len(self.facts) > len(shown):
            rest = np.setdiff1d(np.arange(len(self.facts)), shown)
            most = int(np.count_nonzero(self.meetings.late_ones[rest], axis=1).max())
            yield f"  the other {len(rest)} ranks were late in at most {counted(most, 'step')} each; --rank N shows one"

    def _cells(self, row: int) -> tuple[object, ...]:
        facts, mine, held = self.facts[row], self.tables[row], self.meetings.late_ones[row]
        late = duration(1000 * float(np.median(self.meetings.late[row][held]))) if held.any() else "-"
        share = percent(mine.waiting) if len(mine.steps) else "-"
        own = duration(1000 * mine.own / len(mine.steps)) if len(mine.steps) else "-"
        said = facts.what if len(facts.what) <= ROW else facts.what[: ROW - 4].rpartition(" ")[0] + " ..."
        node = f"  {facts.node}" if facts.node else ""
        return facts.rank, node, facts.taken[1], int(np.count_nonzero(held)), late, share, own, said


def _blame(facts: RankFacts) -> tuple[bool, int, int, int]:
    """What tells the rank that went wrong by itself: it waits for no other, is surest, came least far, ended first."""
    order = [*HangDegree]
    degree = order.index(Finding(RunOutcome(facts.outcome), "").degree)
    return facts.waits_for_others, degree, facts.taken[1], facts.end + facts.wall


def _at_one_place(stopped: Sequence[RankFacts]) -> bool:
    taken = [one.taken[1] for one in stopped]
    return max(taken) - min(taken) <= 1


def program(command: str) -> str:
    """A rank's command without the name of its own trace; "" if it starts a process of Ray, whatever that runs."""
    return "" if "/ray/_private/workers/" in command else re.sub(r"--trace[ =]\S+ ?", "", command)


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {listed(numbers, NAMED)}"
