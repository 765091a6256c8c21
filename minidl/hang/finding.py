"""The finding: what holds a run up, as data, with its words for a title, a terminal and JSON. Pure values.

`RecordedWait` is what a trace says about the wait.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from minidl.hang.places import LoaderStep
from minidl.tracefile.words import plain

SHOWN_EVIDENCE: Final = 12

LONGEST: Final = 160
"""Characters of a title. The evidence repeats a longer title in full."""


_DETAIL: Final = re.compile("\x02([^\x03]*)\x03")


def detail(text: str) -> str:
    """Mark a part of a text that a title leaves out, such as a process id."""
    return f"\x02{text}\x03" if text else ""


def whole(text: str) -> str:
    """The text with its details."""
    return _DETAIL.sub(r"\1", text)


def short(text: str) -> str:
    """The text without its details."""
    return _DETAIL.sub("", text)


class RunOutcome(enum.Enum):
    """The outcome of the run; the sentence begins with it."""

    HUNG = "hung"
    MAYBE_HUNG = "may hang"
    MOVES = "moves"
    DIED = "died"
    ERROR = "error"
    CUT = "cut"
    RUNNING = "running"
    SLOW = "slow"
    FINE = "fine"
    ENDED = "ended"
    UNKNOWN = "unknown"

    @property
    def wrong(self) -> bool:
        """Whether the run ended early or stopped making progress."""
        return self in (RunOutcome.HUNG, RunOutcome.DIED, RunOutcome.ERROR)

    @property
    def stopped(self) -> bool:
        """Whether a wait, a death or an error ended the run, so that the doctor says more than the summary."""
        return self.wrong or self in (RunOutcome.MAYBE_HUNG, RunOutcome.CUT)


class Sure(enum.Enum):
    """The certainty of the cause."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"
    UNKNOWN = "unknown"


class HangDegree(enum.Enum):
    """How sure it is that the run does not go on by itself. The command's exit code is 1 for the first two."""

    CERTAIN = "certain"
    LIKELY = "likely"
    MAY_BE = "may be"
    NO = "not a hang"


class HangCause(enum.Enum):
    """The kinds of cause. The value is the name in JSON."""

    SLEEP = "sleep"
    COMPUTING = "computing"
    DEVICE = "device"
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


TRACE: Final = "trace"
"""The source of evidence that a trace's events give."""


def from_trace(*texts: str) -> tuple[EvidenceLine, ...]:
    return tuple(EvidenceLine(text, TRACE) for text in texts)


class FocusScope(enum.Enum):
    """The part of a picture that a view frames at a focus."""

    STEP = "the step"
    PROCESS = "its process, which stands still: the step of its thread is not the cause"
    ALIKE = "all steps of its kind: none is much worse than the others"


@dataclass(frozen=True, slots=True)
class Focus:
    """The place to look at: a span of one thread, while another one waited. Times: ns, CLOCK_MONOTONIC.

    begin, end: of the wait, or of what was waited for. process: its position in `Trace.processes`; code: of the span's
    begin, 0 = the thread was in none; span: when that was. task, worker: -1 = none. epoch: -1 = unknown. frame: what is
    to blame; since: of a process that stands still, its last sign of life; words: what is said there, "" = its name.
    """

    loader: int
    begin: int
    end: int
    process: int
    tid: int
    code: int
    span: int
    task: int = -1
    worker: int = -1
    epoch: int = -1
    frame: FocusScope = FocusScope.STEP
    since: int = 0
    words: str = ""


@dataclass(frozen=True, slots=True)
class RecordedWait:
    """A wait, by its trace. since: ns, CLOCK_MONOTONIC; seconds: how long it lasts, -1 = unknown; past: the
    longest before it, seconds.

    pid: of the process that iterates, tid: its thread, 0 = unknown. task, epoch, worker, sample: what it waits for,
    -1 = unknown. step: what the worker was in, in words; step_since: since when, ns, 0 = unknown. own_code: the
    program's own code does not call next; no_loader: it has iterated over none yet. numbers: pid -> worker, of those
    that have recorded something; workers: how many the loader has, 0 = unknown; others: pids of other loaders'
    workers; ranks: pid -> rank. facts: what the trace has as evidence.
    """

    hung: bool = False
    since: int = 0
    seconds: float = -1.0
    past: float = 0.0
    pid: int = 0
    tid: int = 0
    task: int = -1
    epoch: int = -1
    worker: int = -1
    worker_pid: int = 0
    sample: int = -1
    step: str = ""
    step_since: int = 0
    own_code: bool = False
    no_loader: bool = False
    numbers: dict[int, int] = field(default_factory=dict)
    workers: int = 0
    others: frozenset[int] = frozenset()
    ranks: dict[int, int] = field(default_factory=dict)
    facts: tuple[EvidenceLine, ...] = ()

    @property
    def unheard(self) -> set[int]:
        """The number of workers that have recorded nothing yet: they may still start."""
        return set(range(self.workers)) - set(self.numbers.values())


@dataclass(frozen=True, slots=True)
class Finding:
    """The cause that holds a run up: by its trace, by evidence of its processes, or by both.

    what: who waits for whom, and why that does not end; brief: the same for a title, "" = `what` will do; waiting: of
    `brief` the part that says who waits. head: how the sentence begins, "" = by the outcome. chain: who waits for
    whom, from the loop on; loop_step: the step of its first thread, None = not seen. still: for how many seconds no
    thread has run that has to go on, by the kernel's clock. also: other possible causes; not_seen: what could not be
    looked at. who: role, worker, pid, thread of the chain's end; where: step, sample, function, file, line. focus:
    where in the trace to look; wait: the last one of the trace, None = there was none.
    """

    outcome: RunOutcome
    what: str
    cause: HangCause = HangCause.NONE
    head: str = ""
    brief: str = ""
    waiting: str = ""
    chain: tuple[str, ...] = ()
    loop_step: LoaderStep | None = None
    still: float = 0.0
    evidence: tuple[EvidenceLine, ...] = ()
    sure: Sure = Sure.UNKNOWN
    also: tuple[str, ...] = ()
    next_step: str = ""
    fix: str = ""
    not_seen: tuple[str, ...] = ()
    who: dict[str, Any] = field(default_factory=dict)
    where: dict[str, Any] = field(default_factory=dict)
    focus: Focus | None = None
    wait: RecordedWait | None = None

    @property
    def degree(self) -> HangDegree:
        """How sure it is that the run has ended early or stands still."""
        if self.outcome.wrong:
            certain = self.sure is Sure.CERTAIN or self.outcome is not RunOutcome.HUNG
            return HangDegree.CERTAIN if certain else HangDegree.LIKELY
        unclear = self.outcome in (RunOutcome.MAYBE_HUNG, RunOutcome.UNKNOWN)
        return HangDegree.MAY_BE if unclear else HangDegree.NO

    @property
    def _degree_words(self) -> str:
        return f"a hang: {self.degree.value}; " if self.outcome in (RunOutcome.HUNG, RunOutcome.MAYBE_HUNG) else ""

    @property
    def begins(self) -> str:
        """The first words of the sentence."""
        return self.head or self.outcome.value

    @property
    def sentence(self) -> str:
        return f"{self.begins}: {self.what}"

    @property
    def title(self) -> str:
        """The sentence in at most LONGEST characters: without process ids, and for how long each thread has slept."""
        return titled(self._brief)

    @property
    def _brief(self) -> str:
        return plain(f"{self.begins}: {self.brief or self.what}")

    @property
    def helps(self) -> str:
        """The next step and the fix; "" if nothing has to be done."""
        return plain("; ".join(filter(None, (self.next_step, self.fix))))

    def notes(self) -> list[str]:
        """The lines below the title: the full sentence if the title was shortened, the chain, the evidence."""
        facts = (fact.text if fact.source == TRACE else fact.line() for fact in self.evidence)
        whole = [] if self.title == self._brief else [self._brief]
        return [*whole, *map(plain, (*self.chain, *facts))]

    def lines(self) -> list[str]:
        """The title and the lines below it, for a terminal."""
        step = [f"  next step: {self.helps}"] if self.helps else []
        return [self.title, *(f"  {text}" for text in self.notes()), *step]

    def text(self) -> str:
        """All of it, for a terminal."""
        lines = [self.title]
        lines += [f"  in full: {self.sentence}"] if self.title != self._brief else []
        lines += [f"  {'->' if i else '  '} {link}" for i, link in enumerate(self.chain)]
        if self.cause is not HangCause.NONE:
            lines.append(f"  {self._degree_words}cause: {self.cause.value} ({self.sure.value})")
        if self.evidence:
            lines.append("  evidence:")
            lines += [f"    {fact.line()}" for fact in self.evidence[:SHOWN_EVIDENCE]]
            if len(self.evidence) > SHOWN_EVIDENCE:
                lines.append(f"    and {len(self.evidence) - SHOWN_EVIDENCE} more: see --json")
        lines += [f"  also possible: {text}" for text in self.also]
        lines += [f"  next step: {self.next_step}"] if self.next_step else []
        lines += [f"  fix: {self.fix}"] if self.fix else []
        lines += [f"  not seen: {text}" for text in self.not_seen]
        return "\n".join(map(plain, lines))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON has it."""
        return {
            "state": self.outcome.value,
            "degree": self.degree.value,
            "cause": self.cause.value,
            "title": self.title,
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


def titled(sentence: str) -> str:
    """Return the sentence in at most LONGEST characters.

    It first drops details: batches that wait, folders of paths, times, functions and lines of code, what is in
    brackets, numbers of pipes and batches, how long it hangs. It drops the middle last, because a sentence begins with
    what happened and ends with the reason.
    """
    for pattern, short in (
        (r"; later batches that wait behind it: \d+", ""),
        (r"(?<![\w.])/\S*/", ".../"),
        (r",? since \d[\d.]* \w+", ""),
        (r" \((?:[^()]* at )?[^()\s]*:\d+\)", ""),
        (r" \(pid \d+\)", ""),
        (r" \[[^][]*\]", ""),
        (r"\bin (pipe|socket) \d+", r"in a \1"),
        (r"\bwaits for batch \d+ of ", "waits for "),
        (r"\bis waiting for\b", "waits for"),
        (r"^(hung|may hang) for \d[\d.]* \w+", r"\1"),
    ):
        if len(sentence) > LONGEST:
            sentence = re.sub(pattern, short, sentence)
    if len(sentence) > LONGEST:
        begin = LONGEST // 3
        first, last = sentence[:begin].rpartition(" ")[0], sentence[begin + 5 - LONGEST :].partition(" ")[2]
        sentence = f"{first or sentence[:begin]} ... {last or sentence[begin + 5 - LONGEST :]}"
    return sentence
