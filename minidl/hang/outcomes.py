"""The outcome of a chain of waits: it hangs, it may hang, it moves, or that is unknown.

Interface: `outcome_of(chain, found)` -> `RunOutcome`, by the table `OUTCOMES`; `still(chain)` -> seconds. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Final, NamedTuple

from minidl.hang.case import ThreadFacts, spot
from minidl.hang.chain import Chain
from minidl.hang.evidence.model import SeenProcess
from minidl.hang.evidence.waits import Blocked
from minidl.hang.finding import HangCause, RunOutcome, Sure
from minidl.hang.limits import ENDLESS, ENDLESS_COMPUTING, ENDLESS_WORK, JOINED, OPEN, POLLED, STILL
from minidl.hang.places import USERS, LoaderStep, is_ours, library
from minidl.hang.rules.activity import (
    family_reads,
    family_stirs,
    polls_with_success,
    receives,
    stirs,
    times_asleep,
    wakes,
)
from minidl.hang.rules.judgement import Judgement
from minidl.hang.rules.threads import LOCKING

_LOCKS: Final = (HangCause.SELF_LOCK, HangCause.FORK_LOCK)
_CLOSED: Final = frozenset({
    *_LOCKS, HangCause.STOPPED, HangCause.CYCLE, HangCause.MISSING_THREAD,
    HangCause.PERMIT_LOST, HangCause.DEAD_LOCK_HOLDER, HangCause.LOST_RESULT, HangCause.TORN_MESSAGE, HangCause.DIED,
})  # fmt: skip
"""Causes that leave no process, thread or server that could end the wait: time changes nothing."""

_AT_CPU: Final = (Blocked.COMPUTES, Blocked.READY)
_NOT_BY_ITSELF: Final = (Blocked.STOPPED, Blocked.TRACED, Blocked.ENDED)
_ASKS: Final = (LoaderStep.NEXT, LoaderStep.READ, LoaderStep.HAND_OVER)


def outcome_of(chain: Chain, found: Judgement) -> RunOutcome:
    """The outcome: a run that still moves is no certain hang, whatever the end of the chain shows."""
    standing = _Standing(chain, found)
    row = next(row for row in OUTCOMES if row.when(standing))
    outcome = row.then if row.unless(standing) else row.outcome
    return RunOutcome.MAYBE_HUNG if outcome is RunOutcome.HUNG and standing.goes_on_anyway() else outcome


class _Standing:
    """The facts about a chain from which the outcome follows."""

    def __init__(self, chain: Chain, found: Judgement) -> None:
        self.chain, self.found = chain, found
        self.end, self.case = chain.end, chain.end.case
        self.kind, self.told = self.end.kind, self.case.told
        self.ring = _ring(chain)
        self.least = min(self.ring, key=lambda one: one.seen.idle)
        self.unknown = found.cause is HangCause.UNKNOWN

    def goes_on(self) -> bool:
        """Whether it goes on by itself: a thread that wakes up now and then may stay at the same sample, or step."""
        stays = self.end.place_before is not None and self.end.step in USERS - {LoaderStep.OTHER}
        return self.found.moves and (self.found.cause is HangCause.NO_CPU or not stays)

    def goes_on_anyway(self) -> bool:
        """Whether a thread of the chain, or of the run if the chain names none, did more between the looks than poll.

        A thread that computes, or that sleeps repeatedly at one line, is judged by how long it does so.
        """
        if self.is_open() and any(one.kind is Blocked.COMPUTES for one in self.case.threads(self.end.pid)):
            return self.kind not in _AT_CPU
        if any(stirs(one) for one in self.chain.links if one.kind not in _AT_CPU and not times_asleep(one)):
            return True
        alone = self.chain.missing or (len(self.chain.links) == 1 and self.unknown)
        return alone and family_stirs(self.case, self.chain.first.pid)

    @cached_property
    def moved(self) -> bool:
        """Whether a thread of the chain was at another task or sample at the first look, or ran between the two."""
        waiting = [link for link in self.chain.links if not self.case.is_loop(link.pid)]  # loops poll
        went_on = any(map(_went_on, waiting or self.chain.links[:1]))
        fetched = self.chain.missing and family_reads(self.case, self.chain.first.pid)
        fed = not self.told.hung and any(map(polls_with_success, self.chain.links))
        return went_on or fetched or fed or wakes(self.end) > 0 or any(map(receives, self.chain.links))

    def stands(self) -> bool:
        """Whether the chain's end has been blocked for a second in a call without a timeout, or naps in one step."""
        blocked = all(one.seen.slept and one.seen.idle >= 1 and not one.wait.bounded for one in self.ring)
        return blocked or self._naps_in_one_step()

    def _naps_in_one_step(self) -> bool:
        """Whether a worker sleeps and, by the trace, has been in its step for long.

        torch's loader records no samples: its step is a whole batch, and the sample may have changed since the first
        look.
        """
        told, before = self.told, self.end.place_before
        if not told.step_since or self.end.key != (told.worker_pid, told.worker_pid):
            return False
        one = told.sample >= 0 or (before is not None and before.step is not self.end.step)
        return one and self.kind is Blocked.SLEEPS and self.case.now.moment - told.step_since >= STILL * 1e9

    def may_be_ended(self) -> bool:
        """Whether a person, a working process or the loop's own shutdown may end the wait."""
        asks = self.found.cause is HangCause.TERMINAL and not self.end.in_worker
        return asks or self.found.helped or self._shutdown_ends_it()

    def _shutdown_ends_it(self) -> bool:
        """Whether the loop shuts down and still has time to end the worker that it waits for.

        torch's loader sends SIGTERM, which a worker may ignore or block; minidl's loader sends SIGKILL in the end.
        """
        first, end = self.chain.first, self.end
        if first.step is not LoaderStep.SHUTDOWN or not end.in_worker or end is first:
            return False
        ours = any(is_ours(frame.file) for frame in first.stack)
        rounds = 1 + (2 if ours else 1) * len(self.case.workers_of(first.pid))
        return (ours or not ignores_sigterm(end.process)) and self.told.seconds < JOINED * rounds

    def is_open(self) -> bool:
        """Whether a process, a thread or a server that was not seen, or that works, may end the wait."""
        unopened = self.found.cause is HangCause.FIFO and self.end.in_worker  # no sample is meant to wait for a writer
        alone = self.chain.cycle or self.chain.missing or self.found.alone or self.kind in _NOT_BY_ITSELF or unopened
        may_be_other = self.found.sure is Sure.POSSIBLE and self.found.cause not in _LOCKS
        return not alone and (self.found.cause not in _CLOSED or may_be_other or self._waits_in_c_code())

    def _waits_in_c_code(self) -> bool:
        """Whether a line that takes no lock waits in a process that has threads of a C library: these may answer."""
        inside = self.end.place.inside[:1]
        locks = any(library(frame.file) or LOCKING.search(frame.source) for frame in inside)
        native = [one for one in self.case.threads(self.end.pid) if not one.is_main and one.seen.stack is None]
        return self.kind is Blocked.FUTEX and bool(inside) and not locks and bool(native)

    @cached_property
    def in_own_code(self) -> bool:
        """Whether the loop itself waits, for something of the program's own: for a user, a message, the next hour."""
        first, told = self.chain.first, self.told
        seen = first.place.seen and not first.iterates and first.step in (LoaderStep.OTHER, LoaderStep.CONSUMER)
        return self.end is first and not first.in_worker and (seen or (told.own_code and not first.place.seen))

    def may_be_at_work(self) -> bool:
        """Whether a wait that is long by the trace may still be work of unknown length.

        A first wait has no earlier waits to compare it with. Between two batches the loop's own code may do anything:
        an evaluation or a checkpoint is no hang, however short the earlier steps were.
        """
        told, first = self.told, self.chain.first
        asks = first.place.seen and first.step in _ASKS
        own = told.own_code and not asks  # one thread of it may call next after another
        short = told.seconds < max(OPEN, ENDLESS_WORK * told.past)
        if self.kind in _AT_CPU:
            return own or not told.past or short or told.seconds < ENDLESS_COMPUTING
        if self.kind is Blocked.SLEEPS and not (own and self.unknown):
            return (own or not told.past or short) and not self.sleeps_endlessly()
        return (own and self.unknown) or (self.is_open() and (short or self.in_own_code))

    def just_ended(self) -> bool:
        """Whether it was there at the first of several looks, or came after it: an epoch may end with its workers."""
        then = self.end.before
        return len(self.case.looks) > 1 and (then is None or then.state[1] not in "ZX")

    def naps(self) -> bool:
        """Whether it sleeps, or waits with a timeout: that ends by itself."""
        return self.kind is Blocked.SLEEPS or self.end.in_timed_wait

    def sleeps_endlessly(self) -> bool:
        return self.end.call.timeout > ENDLESS

    def slept_long(self) -> bool:
        least = self.least.seen
        return least.slept and least.idle >= (OPEN if self.is_open() else STILL)

    def stays_locked(self) -> bool:
        """Whether both looks saw a thread at a lock that it holds itself. Between the looks only signals wake it."""
        end, then, before = self.end, self.end.before, self.end.place_before
        if self.found.cause is not HangCause.SELF_LOCK or then is None or before is None or self.case.apart < STILL:
            return False
        same = then.syscall is not None and end.call.name and then.syscall.address == end.call.address
        return bool(same) and spot(before) == spot(end.place)


def still(chain: Chain) -> float:
    """For how many seconds no thread has run that has to go on; 0 = one runs, or that is unknown."""
    ring = _ring(chain)
    return max(0.0, min(one.seen.idle for one in ring)) if all(one.seen.slept for one in ring) else 0.0


def _ring(chain: Chain) -> tuple[ThreadFacts, ...]:
    """The links that have to go on: the chain's end, or all links of a cycle that do not poll."""
    ring = chain.links[chain.back :] if chain.cycle else (chain.end,)
    return tuple(link for link in ring if not link.wait.bounded) or ring


def _went_on(link: ThreadFacts) -> bool:
    """Whether a thread was at another task or sample at the first look.

    Without a stack: whether it woke up between two looks, other than from a poll, and went on.
    """
    now, before, then = link.place, link.place_before, link.before
    if before is not None:
        return now.seen and (before.step, before.task, before.sample) != (now.step, now.task, now.sample)
    ran = then is not None and link.seen.switches[1] != then.switches[1]
    return ran and not link.wait.bounded and link.kind is not Blocked.COMPUTES


def ignores_sigterm(process: SeenProcess) -> bool:
    return "SIGTERM" in process.ignored or (process.main is not None and "SIGTERM" in process.main.blocked)


class OutcomeRow(NamedTuple):
    """The outcome of a chain for which `when` holds; if `unless` holds too, the outcome is `then`."""

    about: str
    when: Callable[[_Standing], bool]
    outcome: RunOutcome
    unless: Callable[[_Standing], bool] = lambda of: False
    then: RunOutcome = RunOutcome.MAYBE_HUNG


OUTCOMES: Final = (
    OutcomeRow("it goes on by itself", lambda of: of.goes_on(), RunOutcome.MOVES,
               lambda of: of.kind is Blocked.SLEEPS and of.told.hung and not of.told.own_code and not of.moved),
    OutcomeRow("it moved between the looks, perhaps before it came to where it is now", lambda of: of.moved,
               RunOutcome.MOVES, lambda of: of.told.hung and of.stands()),
    OutcomeRow("the wait may be ended", lambda of: of.may_be_ended(), RunOutcome.MAYBE_HUNG),
    OutcomeRow("it runs now and then", lambda of: of.kind is Blocked.MOVES, RunOutcome.MAYBE_HUNG),
    OutcomeRow("what is missing may just have been sent", lambda of: of.chain.missing and of.case.apart < STILL,
               RunOutcome.MAYBE_HUNG),
    OutcomeRow("the wait is long by the trace", lambda of: of.told.hung, RunOutcome.HUNG,
               lambda of: of.may_be_at_work()),
    OutcomeRow("it is missing at both looks, though what was missing at the first may have come since",
               lambda of: of.chain.missing, RunOutcome.HUNG, lambda of: 0 <= of.told.seconds < STILL),
    OutcomeRow("a rank has ended, and others go on waiting for it",
               lambda of: of.found.cause is HangCause.DIED and of.found.alone, RunOutcome.HUNG,
               lambda of: max(of.case.apart, of.least.seen.idle) < STILL),
    OutcomeRow("it is stopped", lambda of: of.kind in (Blocked.STOPPED, Blocked.TRACED), RunOutcome.HUNG),
    OutcomeRow("it has ended, and the loop, which looks every 5 s but not in a read, has not noticed",
               lambda of: of.kind is Blocked.ENDED, RunOutcome.HUNG,
               lambda of: (of.case.apart <= POLLED and of.chain.first.step is not LoaderStep.READ)
               or of.just_ended()),
    OutcomeRow("it sleeps, or its wait has a timeout", lambda of: of.naps(), RunOutcome.MAYBE_HUNG,
               lambda of: of.sleeps_endlessly() and not of.in_own_code, RunOutcome.HUNG),
    OutcomeRow("what it is in can't be seen", lambda of: of.unknown and not of.end.place.seen, RunOutcome.UNKNOWN,
               lambda of: of.least.seen.idle > POLLED and len(of.chain.links) > 1),
    OutcomeRow("it waits for itself", lambda of: of.stays_locked(), RunOutcome.HUNG),
    OutcomeRow("the program's own code may wait as long as it likes",
               lambda of: of.in_own_code and of.is_open() and not of.unknown, RunOutcome.MAYBE_HUNG),
    OutcomeRow("it has slept for long", lambda of: of.slept_long(), RunOutcome.HUNG),
    OutcomeRow("nothing is known", lambda of: of.unknown, RunOutcome.UNKNOWN),
    OutcomeRow("it sleeps for a moment", lambda of: True, RunOutcome.MAYBE_HUNG),
)  # fmt: skip
"""The outcomes by the chain's end: the first row that holds decides."""
