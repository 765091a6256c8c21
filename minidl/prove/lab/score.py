"""The doctor's score on the lab's cases: several runs of each case with varied options; the doctor gets no hints.

Interface: `score(names, runs, jobs, tell, ..., kept)` -> answers; `report(answers)` -> lines. A score that is kept in a
file continues after an interruption. The doctor runs as a separate process. It gets a process id while the program
stands still (live), and the trace after `kill -9` of all its processes (post mortem). It gets neither the case's name
nor its options.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from minidl.prove.kept import Kept, in_parallel
from minidl.prove.lab.case import LabCase, LabOptions, Truth
from minidl.prove.lab.runner import QUIET, LabRun, Mode, running
from minidl.prove.lab.table import cases
from minidl.prove.sessions import BOUND

WRONG_STATES: Final = ("hung", "died", "error")
"""What the doctor says of a run that does not go on."""

NAMED_STATES: Final = (*WRONG_STATES, "may hang")
"""States with a named cause: an endless computation is never a certain hang."""

SURE: Final = ("certain", "likely")

LATER: Final = 10.0
"""Seconds without a word after which a program that starts processes anew stands still."""

ASKING: Final = 60.0
"""The doctor's time limit, seconds."""


@dataclass(frozen=True)
class Answer:
    """One question to the doctor. when: "live" or "post mortem"; expected: the truth, None for a healthy program;
    found: the doctor's JSON, or what went wrong as {"failed": ...}."""

    case: str
    seed: int
    mode: str
    when: str
    options: LabOptions
    expected: Truth | None
    found: dict[str, Any]

    @property
    def state(self) -> str:
        """The state that was found."""
        return str(self.found.get("state", "failed"))

    @property
    def cause(self) -> str:
        """The kind of cause that was found."""
        return str(self.found.get("cause", "failed"))

    @property
    def who(self) -> bool:
        """Whether the right process was named."""
        truth, who = self.expected, self.found.get("who", {})
        if truth is None or not truth.role:
            return True
        return bool(who.get("role") == truth.role and truth.worker in (-1, who.get("worker", -1)))

    @property
    def where(self) -> bool:
        """Whether the right place was named: by the sample if there is one, else by the step."""
        truth, where = self.expected, self.found.get("where", {})
        if truth is None:
            return True
        if truth.sample >= 0 and where.get("sample", -1) >= 0:
            return bool(where["sample"] == truth.sample)
        return not truth.steps or where.get("step") in truth.steps

    @property
    def what(self) -> bool:
        """Whether the right kind of cause was named."""
        return self.expected is None or self.cause in self.expected.causes

    @property
    def verdict(self) -> str:
        """ "right", "open" (no cause is claimed), "false alarm", "confident wrong", "wrong" or "failed"."""
        if "failed" in self.found:
            return "failed"
        if self.expected is None:
            return "false alarm" if self.state in WRONG_STATES else "right"
        if self.who and self.where and self.what and self.state in NAMED_STATES:
            return "right"
        claims = self.state in WRONG_STATES and self.found.get("sure") in SURE and self.cause != "unknown"
        if claims and not (self.what and self.who):
            return "confident wrong"
        return "open" if self.cause in ("unknown", "none") or not claims else "wrong"

    def line(self) -> str:
        """The answer in one line."""
        marks = "".join(
            letter if right else "-" for letter, right in zip("123", (self.who, self.where, self.what), strict=True)
        )
        return f"{self.verdict:<15} {marks} {self.case} ({self.mode}, {self.when}, seed {self.seed}): " + str(
            self.found.get("sentence", self.found.get("failed", ""))
        )


def score(
    names: Sequence[str],
    runs: int,
    jobs: int,
    tell: Callable[[str], None],
    modes: Iterable[Mode] = Mode,
    kept: Path | None = None,
) -> list[Answer]:
    """Run the cases with seeds 0 to runs - 1, `jobs` at a time, on each loader; what the doctor answers.

    kept: a file that gets a line of JSON for each run when it has ended. The runs that it has are not made again, and
    their answers are among those that are returned.
    """
    modes = tuple(modes)
    keeping = Kept(kept)
    done = dict(keeping.read_as("a score", _kept_run))
    wanted = [
        (name, seed, mode)
        for seed in range(runs)
        for name in names
        for mode in modes
        if mode is not Mode.PLAIN or not cases()[name].ended(mode.loader)
    ]
    left = [one for one in wanted if one not in done]
    with in_parallel(lambda one: asked(*one), left, jobs) as coming:
        for number, (one, answers) in enumerate(coming, len(wanted) - len(left) + 1):
            done[one] = answers
            name, seed, mode = one
            keeping.add(case=name, seed=seed, mode=mode.value, answers=[asdict(answer) for answer in answers])
            for answer in answers:
                tell(f"{number} of {len(wanted)}  {answer.line()}")
    return [answer for one in wanted for answer in done[one]]


_Run = tuple[str, int, Mode]


def _kept_run(run: dict[str, Any]) -> tuple[_Run, list[Answer]]:
    return (run["case"], run["seed"], Mode(run["mode"])), [_answer(one) for one in run["answers"]]


def _answer(kept: dict[str, Any]) -> Answer:
    truth = kept["expected"]
    if truth is not None:
        truth = Truth(**truth | {key: tuple(truth[key]) for key in ("steps", "causes")})
    return Answer(**kept | {"options": LabOptions(**kept["options"]), "expected": truth})


def asked(name: str, seed: int, mode: Mode) -> list[Answer]:
    """Run a case once, and ask the doctor live and post mortem, as far as there is something to ask about."""
    case = cases()[name]
    options, truth = case.draw(seed), case.expected(case.draw(seed), mode.loader)

    def answer(when: str, found: dict[str, Any]) -> Answer:
        return Answer(name, seed, mode.value, when, options, truth, found)

    answers = []
    with running(name, options, mode) as run:
        if not _reached(run, case, options, seed, truth):
            return [
                answer("live", {"failed": f"it did not reach its fault: {run.said()[-200:]} {run.errors()[-300:]}"})
            ]
        if not run.ended:
            found = ask(str(run.process.pid), run)
            if truth is not None or not run.ended:  # a healthy program may end while the doctor looks at it
                answers.append(answer("live", found))
        elif truth is not None and not case.ended(mode.loader):
            return [answer("live", {"failed": f"it has ended: {run.errors()[-300:]}"})]
        if mode is not Mode.PLAIN:
            run.kill()
            answers.append(answer("post mortem", ask(str(run.trace), run)))
    return answers


def _reached(run: LabRun, case: LabCase, options: LabOptions, seed: int, truth: Truth | None) -> bool:
    """Wait until a case is where it should be; a healthy one is asked about at some moment, or after its end."""
    ends = case.ended(run.mode.loader)
    if truth is None and not (ends and seed % 2):
        there = run.wait_for_words("ready")
        time.sleep(random.Random(seed).uniform(3, 9))
        return there
    if ends:
        return run.wait(quiet=BOUND)
    if case.theme == "several ranks":  # they start one after the other, and meet, without a word
        run.wait_for_words("batch 0")
    return run.wait(QUIET if options.method == "fork" else LATER)


def doctor_says(target: str, run: LabRun) -> str:
    """What `minidl doctor` prints of a process or of a trace."""
    command = [sys.executable, "-m", "minidl", "doctor", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASKING, check=False, cwd=run.folder)
    return (done.stdout + done.stderr).rstrip()


def ask(target: str, run: LabRun) -> dict[str, Any]:
    """What `minidl doctor --json` says of a process or of a trace."""
    command = [sys.executable, "-m", "minidl", "doctor", "--json", target]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASKING, check=False, cwd=run.folder)
        found: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"failed": f"the doctor did not answer in {ASKING:g} s"}
    except ValueError:
        return {"failed": f"the doctor said: {(done.stdout + done.stderr)[-300:]!r}"}
    return found


# --- The report -------------------------------------------------------------------------------------------------------
def report(answers: Sequence[Answer]) -> Iterator[str]:
    """The matrix of causes, the shares, and the wrong answers."""
    faults = [answer for answer in answers if answer.expected is not None]
    controls = [answer for answer in answers if answer.expected is None]
    yield "expected -> found, by kind of cause:"
    matrix: dict[str, Counter[str]] = defaultdict(Counter)
    for answer in faults:
        assert answer.expected is not None
        matrix[answer.expected.causes[0]]["as expected" if answer.what else answer.cause] += 1
    for expected, found in sorted(matrix.items()):
        yield f"  {expected:<28} " + ", ".join(f"{count} {cause}" for cause, count in found.most_common())
    if controls:
        found = Counter(answer.state for answer in controls)
        yield f"  {'healthy':<28} " + ", ".join(f"{count} {state}" for state, count in found.most_common())
    yield "by loader and moment:"
    groups: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[answer.mode, answer.when].append(answer)
    for (mode, when), group in sorted(groups.items()):
        yield f"  {mode}, {when}: {_share(group)}"
    yield f"all: {_share(list(answers))}"
    if faults:
        who, where, what = (sum(getattr(a, key) for a in faults) / len(faults) for key in ("who", "where", "what"))
        yield f"of the faults: process {who:.1%}, place {where:.1%}, cause {what:.1%}"
    for kind in ("false alarm", "confident wrong", "failed"):
        yield f"{kind}: {sum(answer.verdict == kind for answer in answers)}"


def _share(group: Sequence[Answer]) -> str:
    faults = [answer for answer in group if answer.expected is not None]
    right = sum(answer.verdict == "right" for answer in faults)
    alarms = sum(answer.verdict == "false alarm" for answer in group)
    named = f"{right} of {len(faults)} faults named ({right / len(faults):.1%})" if faults else "no faults"
    return f"{named}; {alarms} false alarms on {len(group) - len(faults)} healthy runs"


def as_json(answers: Sequence[Answer]) -> str:
    """All answers, each with its verdict."""
    return json.dumps([{**asdict(answer), "verdict": answer.verdict} for answer in answers], indent=1)
