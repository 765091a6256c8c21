"""What became of a job: its headline, and its summary on one screen, whatever the number of its ranks.

Interface: `JobReport(record)`: `finding`, one for the job as for a trace, and `text()`. The finding is the first of
these that happened: a rank went wrong by itself; a rank never started; a rank had fewer batches than one that waits;
the ranks wait for a straggler; else what bounds the ranks' loaders.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from minidl.hang.finding import Finding, HangCause, HangDegree, RunOutcome, Sure, from_trace
from minidl.hang.headline.uneven import REMEDY, had_fewer
from minidl.job.digests import JobRecord
from minidl.job.lateness import PART, reason_of
from minidl.job.meetings import STAYS, Meetings, Straggler, straggler
from minidl.job.step_table import CAUSES, RankFacts, RankTable
from minidl.speed.verdict import MARGIN, ROOM, judge
from minidl.speed.wall_clock import FEW_BATCHES, Bound, Waiting
from minidl.tracefile.arrays import Floats
from minidl.tracefile.words import counted, duration, listed, micros, named_ranks, percent, plain

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

_ALIKE: Final[dict[str, Callable[[RankTable], object]]] = {
    "commands": lambda one: program(one.facts.command),
    "DataLoaders": lambda one: one.facts.loader,
    "numbers of ranks": lambda one: one.facts.world,
    "numbers of workers": lambda one: one.facts.workers,
    "samples in a batch": lambda one: int(np.median(one.steps["samples"])) if len(one.steps) else 0,
}
_ALIKE_AT_THE_END: Final = {"numbers of batches": lambda one: f"{one.facts.taken}"}
"""What all ranks of a job have alike; "" and 0 = unknown. The last one if each of them ended well."""

_CUT: Final = RunOutcome.CUT.value
_STOPPED: Final = tuple(one.value for one in RunOutcome if one.stopped)


class JobReport:
    """A job, judged. meetings: its ranks' steps side by side; straggler: None = there is none."""

    def __init__(self, record: JobRecord) -> None:
        self.record, self.tables = record, record.ranks
        self.facts = [table.facts for table in record.ranks]
        self.meetings = Meetings(self.tables)
        self.straggler: Straggler | None = straggler(self.meetings) if len(self.meetings.keys) >= FEW_BATCHES else None
        self.waited: Floats = np.sum([table.waited for table in self.tables], axis=0)
        self.own = sum(table.own for table in self.tables)
        stopped = [one for one in self.facts if one.outcome in _STOPPED]
        began = any(one.events for one in self.facts) or any(one.waits_for_others for one in stopped)
        self.stopped: list[RankFacts] = stopped if began else []

    @functools.cached_property
    def finding(self) -> Finding:
        """The headline of the job."""
        cases = (self._never_started, self._never_joined, self._uneven, self._went_wrong, self._waits_for_straggler)
        return next(filter(None, (case() for case in cases)), None) or self._bounds()

    # --- A rank went wrong
    def _never_started(self) -> Finding | None:
        """The finding of ranks without a trace for which the others wait."""
        missing = self.record.missing
        taken = max(one.taken for one in self.facts)
        early = taken <= 1 and (self.stopped or not all(one.over for one in self.facts))
        waits = self.stopped and all(one.waits_for_others for one in self.stopped)
        if not missing or not (early or waits):
            return None
        what = (
            f"{named_ranks(missing)} of {self.record.world} left no trace: never started, or recorded elsewhere; the "
            f"other ranks took {counted(taken, 'batch', 'batches')}"
        )
        return self._found(RunOutcome.HUNG, what, "look at the launcher's log of these ranks, and at their nodes")

    def _never_joined(self) -> Finding | None:
        """The finding of ranks that the others waited for before the first batch, and that did nothing wrong else.

        A launcher ends ranks that still wait when one gives up: they have recorded nothing either, not even an end.
        """
        waiting = [one for one in self.stopped if one.waits_for_others]
        silent = [one for one in self.facts if one.outcome not in _STOPPED]
        silent += [one for one in self.stopped if one.outcome == _CUT and not (one.events or one.waits_for_others)]
        ended = [one for one in silent if one.over]
        idle = sorted(one.rank for one in ended or silent)
        by_itself = [one for one in self.stopped if one not in waiting and one not in silent]
        if not idle or not waiting or by_itself or any(one.taken for one in self.facts):
            return None
        others = "another rank" if len(self.facts) - len(idle) == 1 else f"{len(self.facts) - len(idle)} other ranks"
        did = " and did" if ended or len(idle) == 1 else ", and one of them or more did"
        what = (
            f"{named_ranks(idle, NAMED)} took no batch{did} not join the others: {others} waited in vain, and took none"
        )
        step = f"find out what these ranks did instead: minidl summary --rank {idle[0]}"
        return self._found(RunOutcome.HUNG, what, step, who={"ranks": idle})

    def _uneven(self) -> Finding | None:
        """The finding of ranks that wait for one that had fewer batches in the epoch."""
        known = {one.rank: one for one in self.facts}
        pairs = ((known[rank], known[other]) for rank, other in had_fewer({one.rank: one.last for one in self.facts}))
        for one, least in ((one, other) for one, other in pairs if one.outcome in _STOPPED and one.waits_for_others):
            what = (
                f"{one.name} waited in its step after batch {one.last.batches} of epoch {one.last.number}; "
                f"{least.name} had only {least.last.batches}: the ranks have different numbers of batches"
            )
            return self._found(RunOutcome.HUNG, what, REMEDY)
        return None

    def _went_wrong(self) -> Finding | None:
        """The finding of the rank that went wrong by itself; the others wait for it, or went wrong after it."""
        if not self.stopped:
            return None
        first, *others = sorted(self.stopped, key=_blame)
        waiting = [one for one in self.stopped if one.waits_for_others]
        whole = len(self.stopped) == len(self.facts)
        head, _, what = first.what.partition(": ")
        outcome = RunOutcome(first.outcome)
        alike = max(one.taken for one in self.facts) - min(one.taken for one in self.facts) <= 1
        if outcome is RunOutcome.CUT and others and not waiting and whole and alike:
            what = f"all {len(self.facts)} recordings end after {first.taken} batches, before the run's end"
            return self._found(outcome, what, first.next_step)
        if outcome is RunOutcome.CUT and not first.running and (waiting or others or not whole):
            outcome, head = RunOutcome.DIED, "died"
            what = f"nothing is recorded after its batch {first.taken}: it was killed, or its machine is gone"
        if waiting and first not in waiting:
            what += f"; {counted(len(waiting), 'other rank')} waited for it"
        said = [f"{one.name}: {one.what}" for one in others[:NAMED]]
        return self._found(
            outcome, what, first.next_step, said, head=f"{head}, {first.name}", who={"ranks": [first.rank]}
        )

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
        step = why.next_step.replace("--rank N", f"--rank {ranks[0]}")
        return self._found(RunOutcome.SLOW, what, step, evidence, who={"ranks": ranks})

    def who(self, rows: Sequence[int]) -> str:
        """Some ranks by name: "rank 37 (node4)", "node4 (ranks 32, 33, ...)", "2 ranks (3, 9)"."""
        chosen = [self.facts[row] for row in rows]
        numbers = sorted(one.rank for one in chosen)
        if len(chosen) == 1:
            return chosen[0].name
        node = chosen[0].node
        if node and numbers == [one.rank for one in self.facts if one.node == node]:
            return f"{node} (ranks {listed(numbers, NAMED)})"
        return f"{len(numbers)} ranks ({listed(numbers, NAMED)})"

    def _bounds(self) -> Finding:
        """What bounds the ranks' loaders, if they do not wait for each other."""
        running = any(one.running for one in self.facts)
        if not any(one.events for one in self.facts):
            what = f"no rank has recorded an iterator of a DataLoader{' yet' * running}"
            return self._found(RunOutcome.RUNNING if running else RunOutcome.CUT, what, "")
        causes = {cause: int(us) * 1000 for cause, us in zip(CAUSES, self.waited, strict=True)}
        batches = sum(len(table.steps) for table in self.tables)
        found = Waiting(causes, 1000 * int(self.own), batches, max(one.workers for one in self.facts), alike=1)
        none = f"{'no straggler' if len(self.tables) > 1 else 'one rank alone'}; all ranks: "
        verdict = judge(found, room=ROOM - len(none))
        fine = verdict.kind in (Bound.NOT_INPUT, Bound.TOO_FEW)
        step = "" if fine else f"minidl summary --rank {self.facts[0].rank} says more"
        outcome = RunOutcome.RUNNING if running else RunOutcome.FINE if fine else RunOutcome.SLOW
        return self._found(outcome, f"{none}{verdict.sentence}", step)

    def _found(self, outcome: RunOutcome, what: str, step: str, evidence: Sequence[str] = (), **more: Any) -> Finding:
        cause = HangCause.SLOW if outcome is RunOutcome.SLOW else HangCause.NONE
        if all(str(one.path or self.record.name).startswith(self.record.name) for one in self.tables):  # it is a path
            step = step.replace("minidl summary --rank", f"minidl summary {self.record.name} --rank")
        said = from_trace(*evidence, *self.lacks)
        return Finding(outcome, what, cause, evidence=said, sure=Sure.LIKELY, next_step=step, **more)

    # --- In words
    @functools.cached_property
    def lacks(self) -> tuple[str, ...]:
        """What of the job is missing, differs between ranks, or could not be read."""
        return tuple(map(plain, self._lacks()))

    def _lacks(self) -> Iterator[str]:
        yield from self.record.problems[: 2 * NAMED]
        if (more := len(self.record.problems) - 2 * NAMED) > 0:
            yield f"{more} more problems"
        if missing := self.record.missing:
            yield f"no trace of {counted(len(missing), 'rank')} of {self.record.world}: {listed(missing)}"
        if hurt := [one for one in self.facts if one.problem]:
            yield f"{named_ranks([one.rank for one in hurt], NAMED)}: {hurt[0].problem}{', or alike' * (len(hurt) > 1)}"
        yield from self._differences()
        yield from self._late_starts()
        if self.record.kept > 1:
            yield f"of the steps, one in {self.record.kept} was judged, evenly spread"

    def _differences(self) -> Iterator[str]:
        whole = not any(one.running or one.outcome in _STOPPED for one in self.facts)
        for what, of in (_ALIKE | (_ALIKE_AT_THE_END if whole else {})).items():
            values = {table.facts.rank: value for table in self.tables if (value := of(table))}
            usual = Counter(values.values()).most_common(1)[0][0] if values else None
            if odd := {rank: value for rank, value in values.items() if value != usual}:
                theirs = listed(dict.fromkeys(odd.values()), NAMED)
                yield f"the ranks have different {what}: {named_ranks([*odd], NAMED)}: {theirs}; the others: {usual}"

    def _late_starts(self) -> Iterator[str]:
        begun = [one for one in self.facts if one.began]
        usual = statistics.median_low([one.began for one in begun] or [0])
        for one in [one for one in begun if one.began - usual >= LATE_START * 1e9][:NAMED]:
            yield f"{one.name} began {duration(one.began - usual)} after the others, by the time of day"

    def text(self) -> str:
        """The summary: the job first, then the ranks that matter."""
        finding, meetings = self.finding, self.meetings
        nodes = len({one.node for one in self.facts} - {""})
        on = f" on {nodes} nodes" if nodes > 1 else ""
        lines = [
            *finding.lines(),
            f"{self.record.name}: {counted(len(self.tables), 'rank')}{on}, {counted(len(meetings.keys), 'step')} of "
            f"{micros(meetings.usual)}, {counted(sum(one.events for one in self.facts), 'event')}",
            *[f"  {one.command}" for one in self.facts[:1] if one.command],
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
        late = micros(float(np.median(self.meetings.late[row][held]))) if held.any() else "-"
        share = percent(mine.waiting) if len(mine.steps) else "-"
        own = micros(mine.own / len(mine.steps)) if len(mine.steps) else "-"
        said = facts.what if len(facts.what) <= ROW else facts.what[: ROW - 4].rpartition(" ")[0] + " ..."
        node = f"  {facts.node}" if facts.node else ""
        return facts.rank, node, facts.taken, int(np.count_nonzero(held)), late, share, own, said


def _blame(facts: RankFacts) -> tuple[bool, int, int, int]:
    """What tells the rank that went wrong by itself: it waits for no other, is surest, came least far, ended first."""
    order = [*HangDegree]
    degree = order.index(Finding(RunOutcome(facts.outcome), "").degree)
    return facts.waits_for_others, degree, facts.taken, facts.ended


def program(command: str) -> str:
    """A rank's command without the name of its own trace; "" if it starts a process of Ray, whatever that runs."""
    return "" if "/ray/_private/workers/" in command else re.sub(r"--trace[ =]\S+ ?", "", command)
