"""What a headline is: its kind, its sentence, its evidence and its place; and how a sentence becomes a title."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from minidl.doctor.case import Told
from minidl.doctor.diagnosis import Diagnosis


class What(enum.Enum):
    """What became of the run; the sentence begins with it."""

    DIED = "died"
    HUNG = "hung"
    ERROR = "error"
    CUT = "cut"
    RUNNING = "running"
    SLOW = "slow"
    FINE = "fine"

    @property
    def wrong(self) -> bool:
        """Whether it ended the run, or kept it from going on."""
        return self in (What.DIED, What.HUNG, What.ERROR)


class Blamed(enum.Enum):
    """What a view frames, of a spot."""

    STEP = "the step"
    PROCESS = "its process, which stands still: what its thread was in is not to blame"
    ALIKE = "every step of its kind: none is much worse than the others"


@dataclass(frozen=True, slots=True)
class Spot:
    """Where to look: a span of one thread, while somebody waited. Times: ns, CLOCK_MONOTONIC.

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
    frame: Blamed = Blamed.STEP
    since: int = 0
    words: str = ""


@dataclass(frozen=True, slots=True)
class Headline:
    """What held the loader up. next_step: what helps in this case, "" if nothing has to be done.

    told: the last wait, for the doctor; None if the last thing that happened was none. diagnosis: the doctor's, if the
    trace has evidence of what its processes were blocked in; then the sentence is its sentence.
    """

    kind: What
    sentence: str
    evidence: tuple[str, ...] = ()
    next_step: str = ""
    focus: Spot | None = None
    told: Told | None = None
    diagnosis: Diagnosis | None = None

    def lines(self) -> list[str]:
        """The headline for a terminal."""
        step = [f"  next step: {self.next_step}"] if self.next_step else []
        return [self.sentence, *(f"  {text}" for text in self.evidence), *step]


LONGEST: Final = 170
"""Characters of a sentence: it is a title. Of a longer one the evidence has the whole."""


def titled(sentence: str) -> str:
    """Return the sentence in at most LONGEST characters: without what is not its cause, first of all.

    First go what waits behind, a share of a share, the folders of paths, the functions and lines of code; the middle
    goes last, for a sentence begins with what happened and ends with why.
    """
    for pattern, short in (
        (r"; later batches that wait behind it: \d+", ""),
        (r" \(\d+% of their time\)", ""),
        (r"(?<![\w.])/\S*/", ".../"),
        (r" \((?:[^()]* at )?[^()\s]*:\d+\)", ""),
        (r" \(pid \d+\)", ""),
    ):
        if len(sentence) > LONGEST:
            sentence = re.sub(pattern, short, sentence)
    if len(sentence) > LONGEST:
        begin = LONGEST // 3
        first, last = sentence[:begin].rpartition(" ")[0], sentence[begin + 5 - LONGEST :].partition(" ")[2]
        sentence = f"{first or sentence[:begin]} ... {last or sentence[begin + 5 - LONGEST :]}"
    return sentence


def shortened(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
