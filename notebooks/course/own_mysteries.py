"""Six hung runs for one student: programs of `minidl lab`, recorded when a copy is built. Students do not get this module.

`plan(handout)` chooses by the seed and the student's name which mystery has which cause, and in which sample, of batches of
which size; `recorded_for` runs these programs and packs their traces. `of_student` is for grading: it makes the plan again, needs
no file of answers, and uses a trace of the student's folder only if the doctor finds in it what was planned.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import minidl
from course import recorded
from course.data import until
from course.handout import Handout
from course.hang_lab import KINDS, MYSTERIES, NAMES, Answers
from minidl.hang.headline import headline
from minidl.live_repr import counted
from minidl.prove import sessions
from minidl.prove.kept import in_parallel
from minidl.prove.lab.case import LabOptions
from minidl.prove.lab.runner import program_of
from minidl.tracefile.format import MANIFEST, TraceError

CASES = {
    "fifo": "sample_stuck", "stopped": "worker_stopped", "lost-result": "result_not_picklable", "cycle": "lock_order",
    "thread-missing-after-fork": "threads_lost_at_fork", "barrier": "barrier_of_workers",
}  # fmt: skip
"""Cause -> the program of `minidl lab` that hangs of it."""

SAMPLES = (10, 18, 19, 23)
BATCHES = (3, 5)
"""Samples to choose the one with the fault from, and sizes of batches, with each of which another worker gets that sample.

They are few, so that students share recordings: thirty runs are enough for a class of any size.
"""
IN_SAMPLE = ("fifo", "stopped", "lost-result")
"""Causes that have a sample; the other three stand still where they must."""

STANDS = (6.0, 12.0, 24.0)
"""Seconds of standing still after which the watchdog takes its last look, in each try: the doctor compares looks that are
3 s apart, and on a busy machine they come late."""
BOUND = 60.0
"""Seconds of one recording."""
START = 'main(LabOptions(**__import__("json").load(open("options"))))'
"""How a program gets its options: a trace has the arguments of its processes, and these would tell the answer."""
AT_ONCE = 4
"""Recordings at a time. A program imports torch, which takes a core for some seconds, and then stands still."""


@dataclass(frozen=True)
class Planned:
    """A program to record. cause: a key of `KINDS`."""

    cause: str
    options: LabOptions

    @property
    def answers(self) -> Answers:
        """What the student has to find out."""
        return Answers(self.options.worker, self.cause, self.options.at)

    def is_found(self, trace: minidl.Trace) -> bool:
        """Whether the doctor finds in a trace what was planned; of a FIFO, whose sample is asked for, also where."""
        found = headline(trace)
        where = found.who.get("worker"), found.where.get("sample")
        right = self.options.worker, self.options.at
        return found.cause.value == self.cause and (self.cause != "fifo" or where == right)


def plan(handout: Handout) -> dict[str, Planned]:
    """A student's six mysteries. The first is always a FIFO: the notebook asks for its sample."""
    chance = random.Random(f"{handout.seed} {handout.student} mysteries")
    others = [cause for cause in CASES if cause != "fifo"]
    chance.shuffle(others)
    planned = {}
    for name, cause in zip(NAMES, ["fifo", *others], strict=True):
        at = chance.choice(SAMPLES if cause in IN_SAMPLE else SAMPLES[:1])
        planned[name] = Planned(cause, LabOptions(at=at, batch_size=chance.choice(BATCHES)))
    return planned


def of_student(folder: Path, handout: Handout) -> dict[str, tuple[str, Answers]]:
    """Mystery -> trace and answers of a student's six: the trace is the student's, or the course's of the same cause."""
    found = {}
    for name, planned in plan(handout).items() if handout.mysteries else ():
        path = folder / "course" / "mysteries" / f"{name}.minidl"
        is_own = False
        with suppress(TraceError, OSError):
            is_own = planned.is_found(recorded(path))
        usual = MYSTERIES / f"{NAMES[list(KINDS).index(planned.cause)]}.minidl"
        found[name] = str((path if is_own else usual).resolve()), planned.answers
    return found


def recorded_for(handouts: Iterable[Handout]) -> dict[Planned, bytes]:
    """Record what students get, each program once, also if several want it; return the packed traces."""
    wanted = list(dict.fromkeys(one for handout in handouts for one in plan(handout).values()))
    packed: dict[Planned, bytes] = {}
    if wanted:
        print(f"minidl: recording {counted(len(wanted), 'hung run')} for 09", file=sys.stderr)
    with in_parallel(_packed, wanted, AT_ONCE) as coming:
        for one, trace in coming:
            packed[one] = trace
            print(f"minidl: recorded {counted(len(packed), 'hung run')} of {len(wanted)} for 09", file=sys.stderr)
    return packed


def write(folder: Path, handout: Handout, packed: Mapping[Planned, bytes]) -> None:
    """Write a student's mysteries into a copy of the course, as NAME.minidl."""
    mysteries = folder / "course" / "mysteries"
    mysteries.mkdir()
    for name, one in plan(handout).items():
        (mysteries / f"{name}.minidl").write_bytes(packed[one])


def _packed(planned: Planned) -> bytes:
    """The trace of a program that hung, packed. Raises ValueError if the doctor never finds what was planned."""
    said = ""
    for stands in STANDS:
        with tempfile.TemporaryDirectory(prefix="mystery-", ignore_cleanup_errors=True) as made:
            try:
                trace = _run(planned, Path(made), stands)
            except TraceError as error:  # killed before its trace was whole
                said = str(error)
                continue
            if planned.is_found(trace):
                return trace.pack(Path(made) / "one.minidl").read_bytes()
            said = headline(trace).sentence
    raise ValueError(
        f"a hung run for 09 could not be recorded: it was to be {KINDS[planned.cause]}, and the doctor says: {said}. "
        "The doctor needs py-spy to see a sample (pip install 'minidl[doctor]'). Install it, record on another machine, "
        "or hand out the course's own runs with --same-mysteries"
    )


def _run(planned: Planned, folder: Path, stands: float) -> minidl.Trace:
    """Run a program until the watchdog has looked at its hang for the last time."""
    program = program_of(CASES[planned.cause]).replace("launch(main)", START)
    (folder / "train.py").write_text(program)
    (folder / "options").write_text(json.dumps(asdict(planned.options)))
    command = [sys.executable, "-m", "minidl", "run", "--trace", "trace", "--observe", "train.py"]
    variables = {"MINIDL_HANG_AFTER": f"{stands:g}", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    with sessions.running(command, folder, **variables) as program:
        until(lambda: program.ended or _seen(folder / "trace", stands), BOUND, 0.5)
    for path in (folder / "trace").glob("*.json*"):
        path.write_text(_of_no_machine(path.read_text(), folder))
    return minidl.read_trace(folder / "trace")


def _of_no_machine(text: str, folder: Path) -> str:
    """A file of a trace without the names of the machine and of the folders that it was recorded in."""
    packages = (Path(minidl.__file__).parents[1], Path(torch.__file__).parents[1], sys.prefix, sys.base_prefix)
    names = {f"{folder}/": "", f'"{folder}"': '"."', f'"{socket.gethostname()}"': '"lab"'}
    for name, other in (names | {str(package): "/usr/lib" for package in packages}).items():
        text = text.replace(name, other)
    return text


def _seen(trace: Path, stands: float) -> bool:
    """Whether the watchdog has looked at a wait that lasted long enough."""
    with suppress(TraceError):  # while it is being written
        if (trace / MANIFEST).exists():
            return any(look.at - look.stall.since >= stands * 1e9 for look in minidl.read_trace(trace).watched.looks)
    return False
