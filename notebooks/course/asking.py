"""Predict, then reveal: questions that are made from a trace, and the grading of answers to them.

A question is a function from a trace to an `Asked`, decorated with `@question`. A notebook calls it with the reader's
answer, as in `ask.piped(trace, answer="hardly any")`; `...` stands for "no answer yet". It shows the question and, as
the answer demands, a hint, or the reason with the moment in the replay. What is not to be seen yet is folded, so that a
saved page holds it, too. Nothing is remembered: a cell may run twice, and in any order.
"""

from __future__ import annotations

import functools
import html
import math
import numbers
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from types import EllipsisType
from typing import Any, ClassVar

import minidl
from course import handout
from minidl.playback.words import lines

NUMBERS = dict(zip(
    ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"],
    range(17), strict=True,
)) | {"none": 0, "nothing": 0, "never": 0, "zero": 0, "once": 1, "twice": 2, "an": 1, "single": 1, "both": 2, "pair": 2, "couple": 2}  # fmt: skip
# A translation may have several forms of a word: "a|b".
NUMBERS = {form: number for word, number in NUMBERS.items() for form in word.split("|")}

NO_NUMBER = "|".join(("no", "none", "nothing", "never", "once", "twice", "an", "single", "both", "pair", "couple")).split("|")
"""Those of them that name no worker."""

COUNTED = re.compile(
    "(batch|process)(es)?|(byte|call|descriptor|draw|epoch|file|sample|segment|sentinel|slab|step|task|tensor|time|worker)s?"
    "|copy|copies|index|indices|ms|times as many"
)
"""What may stand behind a number. Any other word could turn its meaning: "not 4", "more than 4", "4 or 5"."""

BEFORE = re.compile("^(?:exactly )?(?:by )?(?:(?:a )?factor of )?")
"""What may stand before a number."""

MEASURED = re.compile("^([单双俩]|[0-9.,零一二两三四五六七八九十]+)(?![零一二两三四五六七八九十])(?=[\u4e00-\u9fff])")
"""A number to which its measure word is joined, as Chinese writes it."""

ENDS = " .!\u3002\uff01"
"""What may stand at the ends of an answer: the last two are the full stop and the exclamation mark of Chinese."""

UNITS = {"b": 1, "byte": 1, "bytes": 1, "kb": 1e3, "kib": 2**10, "mb": 1e6, "mib": 2**20}
ANSWERS_FOLDED = not handout.read(Path(__file__).parents[1]).student
"""Whether a question has its answer with it, folded: not in what a student gets."""
UNKNOWN = {"i don t know", "don t know", "idk", "no idea"}
"""Answers of a reader who has none, as `_plain` gives them."""


class Unreadable(Exception):
    """An answer of which the question makes no sense; the message says what it takes."""


# --- Forms of answers -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Count:
    """A number that is not negative. It may be given as a number or in words, and with what it counts: 4, "four tasks"."""

    value: int
    example = 'a whole number, such as 3 or "three", and nothing else than what it counts'

    def read(self, given: object) -> int:
        if isinstance(given, str):
            given = self._in_words(_small(given))
        number = _number(given)
        if number is None or number < 0 or number != int(number):
            raise Unreadable(self.example)
        return int(number)

    def _in_words(self, said: str) -> object:
        number, _, counted = MEASURED.sub(r"\1 ", BEFORE.sub("", said)).partition(" ")
        if COUNTED.fullmatch(number):  # "batch 1"
            number, counted = counted, ""
        if counted and not COUNTED.fullmatch(counted):
            return None
        digits = re.fullmatch(r"(\d[\d,_]*(?:\.\d+)?)(?:st|nd|rd|th|x)?", number)
        return _figure(digits[1]) if digits else NUMBERS.get(number)

    def __str__(self) -> str:
        return f"{self.value:,}"


def _small(given: str) -> str:
    """An answer in small letters, without its ends. A space between groups of three digits becomes a comma."""
    return re.sub(r"(?<=\d)\s(?=\d{3}(?!\d))", ",", given.casefold().strip(ENDS))


def _figure(digits: str) -> float | None:
    """The number. A comma stands between groups of three digits, or before the decimals, as in Russian."""
    if re.fullmatch(r"[1-9]\d{0,2}([,_]\d{3})+(\.\d+)?", digits):
        return float(re.sub("[,_]", "", digits))
    return float(digits.replace(",", ".")) if re.fullmatch(r"\d+([.,]\d+)?", digits) else None


def _number(given: object) -> float | None:
    """What is given, if it is one finite number; True, an array and a tensor are none."""
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    try:
        return float(given) if is_number and math.isfinite(given) else None  # type: ignore[arg-type]
    except OverflowError:  # 10 ** 400
        return None


class Worker(Count):
    """A worker's number: 0, "worker 0", "w0"."""

    example = 'a worker, such as 0 or "worker 0"'

    def _in_words(self, said: str) -> object:
        named = re.fullmatch(r"(?:the )?(?:worker|w)?[\s#]*(\w+)", said)
        no_worker = named is None or named[1] in NO_NUMBER
        return None if no_worker else super()._in_words(named[1])  # type: ignore[index]

    def __str__(self) -> str:
        return f"worker {self.value}"


@dataclass(frozen=True)
class Choice:
    """One of a few answers, given by its letter or in its words; True and False stand for "yes" and "no".

    options: answer -> what it misses, if it is wrong; then other words for it, of which one string may hold several, "a|b".
    A sentence about an answer is not taken for it: "not the host" is none of them.
    """

    value: str
    options: Mapping[str, Sequence[object]]

    def __post_init__(self) -> None:
        if lacking := self.options.keys() - self.slips.keys() - {self.value}:
            raise ValueError(f"say what these answers miss, if they are wrong: {', '.join(sorted(lacking))}")

    @property
    def slips(self) -> Mapping[str, object]:
        """A wrong answer -> what it misses."""
        return {name: others[0] for name, others in self.options.items() if name != self.value and others and others[0]}

    @property
    def listed(self) -> list[str]:
        """The answers with their letters; none for yes and no."""
        plain = list(self.options) == ["yes", "no"]
        return (
            [] if plain else [f"{letter}) {name}" for letter, name in zip(ascii_lowercase, self.options, strict=False)]
        )

    def read(self, given: object) -> str:
        said = given if not isinstance(given, bool) else "yes" if given else "no"
        known = {
            _plain(form): name
            for name, others in self.options.items() for word in (name, *others[1:]) for form in str(word).split("|")
        }  # fmt: skip
        known |= {letter: name for letter, name in zip(ascii_lowercase, self.options, strict=False) if self.listed}
        if isinstance(said, str):
            letter = re.fullmatch(r"\W*([a-z])\W*", said.casefold())
            said = letter[1] if letter else _plain(said)
        if not isinstance(said, str | int) or str(said) not in known:
            raise Unreadable("one of " + (", ".join(self.listed) or ", ".join(map(repr, self.options))))
        return known[str(said)]

    def __str__(self) -> str:
        return self.value


def yes_no(right: bool, slip: str) -> Choice:
    """The answers "yes" and "no". slip: what the wrong one misses."""
    options = {"yes": (slip, "yes", "it does", "it can"), "no": (slip, "no", "it does not", "it cannot")}
    return Choice("yes" if right else "no", options)


def _plain(given: object) -> str:
    """An answer without what does not count: articles, punctuation, the spaces that some set around Chinese letters."""
    words = re.sub(r"[^\w%/.+-]+", " ", re.sub(r" *([\u4e00-\u9fff]+) *", r"\1", str(given).casefold())).split()
    return " ".join(word for word in words if word not in ("the", "a", "an")).rstrip(".")


@dataclass(frozen=True)
class Share:
    """A part of a whole, in three sizes. It may be given in words, as a fraction, in per cent, or in units of `total`.

    middle: the name of the size between "hardly any" and "nearly all".
    """

    part: float
    total: float
    middle: str = "about half"

    LARGE: ClassVar = 0.85
    SMALL: ClassVar = 0.05
    WORDS: ClassVar = (
        ("", "almost none", "almost nothing", "none", "nothing", "zero", "very little", "few", "a few", "little"),
        ("", "about half", "half", "half of them", "some", "third", "about third", "1/3"),
        ("", "all", "all of them", "everything", "almost all", "most", "every byte"),
    )
    """Other words for the three sizes."""

    @property
    def value(self) -> str:
        return self._size(self.part / self.total)

    @property
    def sizes(self) -> tuple[str, str, str]:
        return "hardly any", self.middle, "nearly all"

    def read(self, given: object) -> str:
        if isinstance(given, str):
            number = re.fullmatch(r"(?:about|~)?\s*(\d[\d,]*(?:\.\d+)?)\s*(%|per ?cent|\w*)", _small(given))
            if number is None:
                return self._in_words(given)
            figure, unit = _figure(number[1]), number[2]
            of_one = {"%": 0.01, "percent": 0.01, "per cent": 0.01} | {u: b / self.total for u, b in UNITS.items()}
            if figure is None or (unit and unit not in of_one):
                raise Unreadable(self._example)
            given = figure
            if unit:
                share = figure * of_one[unit]
                given = share if share <= 1 else 1 if share < 1.05 else -1
        share = _number(given)
        if share is None or not 0 <= share <= max(1, self.total):
            raise Unreadable(self._example)
        return self._size(share if share <= 1 else share / self.total)

    @property
    def _example(self) -> str:
        return "a share: " + ", ".join(map(repr, self.sizes)) + ', a fraction, or "10 %"'

    def _in_words(self, said: str) -> str:
        known = {
            _plain(word): size for size, words in zip(self.sizes, self.WORDS, strict=True) for word in (size, *words)
        }
        if _plain(said) not in known:
            raise Unreadable(self._example)
        return known[_plain(said)]

    def _size(self, share: float) -> str:
        return self.sizes[(share > self.SMALL) + (share > self.LARGE)]

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Listed:
    """Numbers in an order, as a list or in a string: [1, 0], "1, 0", "batch 1, then batch 0"."""

    value: tuple[int, ...]

    def read(self, given: object) -> tuple[int, ...]:
        if isinstance(given, str):
            words = [word for word in re.split(r"[\s,;]+|\bthen\b|\band\b", given.casefold().strip(ENDS + "[]()")) if word]
            given = [word if word.isdecimal() else None for word in words if not COUNTED.fullmatch(word)] or None
        try:
            return tuple(Count(0).read(one) for one in given)  # type: ignore[attr-defined]
        except (TypeError, Unreadable):
            raise Unreadable('numbers in their order, such as [1, 0] or "1, 0"') from None

    def __str__(self) -> str:
        return ", ".join(map(str, self.value)) or "none"


Form = Count | Choice | Share | Listed


# --- Questions --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Asked:
    """A question about one trace. Text in backquotes is shown as code.

    why: the reason, by the step of the protocol. at: the row of `Trace.events` that shows it. slips: a wrong answer ->
    what it misses, shown in the place of the hint. trace: the one that `at` is a row of, if it is not the question's first.
    """

    text: str
    answer: Form
    hint: str
    why: str
    at: int | None = None
    slips: Mapping[Any, str] = field(default_factory=dict)
    trace: minidl.Trace | None = None


@dataclass(frozen=True)
class Prediction:
    """A question and what is said to an answer. `right` is None as long as there is no answer that makes sense."""

    asked: Asked
    given: object
    trace: minidl.Trace | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_judged", self._judge())

    def _judge(self) -> tuple[bool | None, str]:
        if self.given is ... or self.given is None:
            return None, "Write your answer in the place of `...` and run this cell again."
        if isinstance(self.given, str) and (not re.search(r"\w", self.given) or _plain(self.given) in UNKNOWN):
            return None, "Guess: a wrong guess costs nothing, and gets a hint."
        try:
            said = self.asked.answer.read(self.given)
        except Unreadable as wanted:
            return None, f"{textwrap.shorten(repr(self.given), 60)} cannot be read here: give {wanted}."
        if said == self.asked.answer.value:
            return True, f"Right: {self.asked.answer}."
        slips = {**getattr(self.asked.answer, "slips", {}), **self.asked.slips}
        return False, f"Not {said if isinstance(said, str) else self.given}. {slips.get(said, self.asked.hint)}"

    @property
    def right(self) -> bool | None:
        return self._judged[0]

    @property
    def verdict(self) -> str:
        return self._judged[1]

    def replay(self) -> Any:
        """The replay, at the moment that shows the reason."""
        if self.trace is None or self.asked.at is None:
            raise ValueError("this question points at no moment of a trace")
        run = minidl.replay(self.trace, int(self.trace.events["loader"][self.asked.at]))
        run.to_row(self.asked.at)
        return run

    def __repr__(self) -> str:
        reason = f" {self.asked.why}" if self.right else ""
        return "\n".join([self.asked.text, *self._listed, f"{self.verdict}{reason}"]).replace("`", "")

    @property
    def _listed(self) -> list[str]:
        return self.asked.answer.listed if isinstance(self.asked.answer, Choice) else []

    def _repr_html_(self) -> str:
        answer = "" if self.right else f"{self.asked.answer}. "
        reason = f"<p>{marked(answer + self.asked.why)}</p>{self._moment()}"
        hint = (
            "" if self.right is False and self.asked.hint in self.verdict else folded("hint", marked(self.asked.hint))
        )
        rest = reason if self.right else hint + (folded("answer and reason", reason) if ANSWERS_FOLDED else "")
        listed = f"<p>{'<br>'.join(map(marked, self._listed))}</p>" if self._listed else ""
        return boxed(
            self.right, f"<p><b>Predict.</b> {marked(self.asked.text)}</p>{listed}<p>{marked(self.verdict)}</p>{rest}"
        )

    def _moment(self) -> str:
        if self.trace is None or self.asked.at is None:
            return ""
        run = self.replay()
        ms = (int(run.event["time"]) - int(self.trace.events["time"][0])) / 1e6
        said = f"The moment: event {run.position} of {len(run)} in the replay ({ms:.1f} ms): {run.words}. It left:"
        rows = "".join(
            f'<tr><td style="{CELL};white-space:nowrap">{html.escape(line.name)}</td>'
            f'<td style="{CELL}">{html.escape(line.text)}</td></tr>'
            for line in lines(run.state) if line.text
        )  # fmt: skip
        return f"<p>{html.escape(said)}</p><table>{rows}</table>"


CELL = "text-align:left;padding:1px 10px 1px 0;vertical-align:top;white-space:normal"
EDGES = {True: "#2e7d32", False: "#b26a00", None: "#1459c7"}


def boxed(right: bool | None, inside: str) -> str:
    """HTML in a box whose edge says how the answer is."""
    return f'<div style="border:1px solid #8a94a0;border-left:6px solid {EDGES[right]};border-radius:6px;padding:10px 14px 2px;max-width:64em">{inside}</div>'


def folded(name: str, inside: str) -> str:
    """HTML that the reader unfolds."""
    return f'<details style="margin:6px 0"><summary style="cursor:pointer">{name}</summary>{inside}</details>'


def marked(text: str) -> str:
    """Text as HTML, with what is between backquotes as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def question(asks: Callable[..., Asked]) -> Callable[..., Prediction]:
    """Make a function that asks: of the same arguments, and `answer=`. Its first argument is the trace, if it has one."""

    @functools.wraps(asks)
    def ask(*about: Any, answer: object | EllipsisType = ..., **more: Any) -> Prediction:
        first = about[0] if about and isinstance(about[0], minidl.Trace) else None
        asked = asks(*about, **more)
        return Prediction(asked, answer, first if asked.trace is None else asked.trace)

    ask.is_question = True  # type: ignore[attr-defined]
    return ask


def rows(trace: minidl.Trace, name: str, phase: str = "", **fields: object) -> list[int]:
    """Rows of `Trace.events` with this name, phase ("B", "E", "i"; "" = any) and these fields, in time order."""
    events = trace.to_pandas()
    found = events.name == name
    for column, value in {"phase": phase, **fields}.items() if phase else fields.items():
        found &= (events[column] == value).fillna(False)
    return [int(row) for row in events.index[found]]


def workers_of(trace: minidl.Trace) -> int:
    """num_workers of the trace's only loader."""
    (facts,) = trace.loaders.values()
    return int(facts["num_workers"])
