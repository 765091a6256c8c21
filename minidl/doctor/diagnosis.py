"""What the doctor says: a diagnosis, as text and as JSON. Pure values."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from minidl.tracefile.words import plain

SHOWN_EVIDENCE: Final = 12


class State(enum.Enum):
    """How the run stands; the sentence begins with it."""

    HUNG = "hung"
    MAYBE_HUNG = "may hang"
    MOVES = "moves"
    DIED = "died"
    ERROR = "error"
    SLOW = "slow"
    FINE = "fine"
    CUT = "cut"
    ENDED = "ended"
    UNKNOWN = "unknown"


WRONG: Final = frozenset({State.HUNG, State.DIED, State.ERROR})
"""States that are a fault for certain."""


class Sure(enum.Enum):
    """How sure a diagnosis is of its cause."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"
    UNKNOWN = "unknown"


class HangCause(enum.Enum):
    """The kinds of cause. The value is the name in JSON."""

    SLEEP = "sleep"
    COMPUTING = "computing"
    STOPPED = "stopped"
    UNINTERRUPTIBLE = "uninterruptible"
    GIL = "keeps-the-gil"
    FILE_LOCK = "file-lock"
    LOCK = "lock"
    FORK_LOCK = "lock-held-at-fork"
    SELF_LOCK = "lock-held-by-itself"
    MISSING_THREAD = "thread-missing-after-fork"
    NOBODY = "nobody-answers"
    CYCLE = "cycle"
    BARRIER = "barrier"
    COLLECTIVE = "collective"
    SEMAPHORE = "semaphore"
    PERMIT_LOST = "permit-lost"
    QUEUE_FULL = "bounded-queue"
    QUEUE_EMPTY = "empty-queue"
    CHILD = "child-process"
    PIPE_FULL = "full-pipe"
    PIPE_EMPTY = "empty-pipe"
    FIFO = "fifo"
    SOCKET = "socket"
    FILE = "file"
    TERMINAL = "terminal-input"
    SIGNAL = "waits-for-signal"
    LOST_RESULT = "lost-result"
    TORN_MESSAGE = "torn-message"
    DEAD_LOCK_HOLDER = "dead-lock-holder"
    NO_CPU = "no-cpu"
    DIED = "died"
    ERROR = "error"
    SLOW = "slow"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class EvidenceLine:
    """A line of evidence. source: where it is from: "stack of 712", "/proc/locks", "event 1041", "check"."""

    text: str
    source: str = ""

    def line(self) -> str:
        return f"{self.text}  [{self.source}]" if self.source else self.text


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A verdict. sentence: for a title, it begins with the state; chain: who waits for whom, from the loop on.

    who: role, worker, pid of the process at the chain's end; where: step, sample, function, file, line. also: what else
    fits the evidence; not_seen: what could not be looked at.
    """

    state: State
    cause: HangCause
    sentence: str
    chain: tuple[str, ...] = ()
    evidence: tuple[EvidenceLine, ...] = ()
    sure: Sure = Sure.UNKNOWN
    also: tuple[str, ...] = ()
    next_step: str = ""
    fix: str = ""
    not_seen: tuple[str, ...] = ()
    who: dict[str, Any] = field(default_factory=dict)
    where: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The sentence for a title: without process ids, and without how long each thread has slept."""
        head, colon, rest = re.sub(r" \(pid \d+\)", "", self.sentence).partition(": ")
        return head + colon + re.sub(r" for [\d.]+ (s|min)\b", "", rest)

    def text(self) -> str:
        """The diagnosis for a terminal."""
        lines = [self.sentence]
        lines += [f"  {'->' if i else '  '} {link}" for i, link in enumerate(self.chain)]
        if self.cause is not HangCause.NONE:
            lines.append(f"  cause: {self.cause.value} ({self.sure.value})")
        if self.evidence:
            lines.append("  evidence:")
            lines += [f"    {fact.line()}" for fact in self.evidence[:SHOWN_EVIDENCE]]
            if len(self.evidence) > SHOWN_EVIDENCE:
                lines.append(f"    and {len(self.evidence) - SHOWN_EVIDENCE} more: see --json")
        lines += [f"  what else fits: {text}" for text in self.also]
        lines += [f"  next step: {self.next_step}"] if self.next_step else []
        lines += [f"  fix: {self.fix}"] if self.fix else []
        lines += [f"  not seen: {text}" for text in self.not_seen]
        return "\n".join(map(plain, lines))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON has it."""
        return {
            "state": self.state.value,
            "cause": self.cause.value,
            "sentence": self.sentence,
            "chain": list(self.chain),
            "evidence": [{"text": fact.text, "source": fact.source} for fact in self.evidence],
            "sure": self.sure.value,
            "also": list(self.also),
            "next_step": self.next_step,
            "fix": self.fix,
            "not_seen": list(self.not_seen),
            "who": self.who,
            "where": self.where,
        }
