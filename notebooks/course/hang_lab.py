"""Questions and checks of 09_hang_lab: six runs that hang, recorded on torch's loader and killed."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minidl
from course import recorded, table
from course.asking import Asked, Choice, Count, Worker, question
from course.checking import Wrong, exercise
from minidl.hang.case import RunFacts
from minidl.hang.consult import recorded_looks
from minidl.hang.evidence.model import RunEvidence, SeenProcess, SeenThread
from minidl.hang.finding import Finding
from minidl.hang.headline import headline

NAMES = ("one", "two", "three", "four", "five", "six")

KINDS = {
    "fifo": "a FIFO that nobody feeds",
    "stopped": "a signal has stopped it",
    "lost-result": "a result that was lost",
    "cycle": "a circle of two that wait for each other",
    "thread-missing-after-fork": "a thread that is not there",
    "barrier": "a barrier that not all reach",
}

WORDS: dict[str, tuple[str, ...]] = {
    KINDS["fifo"]: ("A thread that opens or reads a FIFO is in `openat` or `read`, and the table names the file.", "fifo", "a file that nobody feeds", "a named pipe"),
    "a file lock of another program": ("Then a thread would be in `flock` or `fcntl`, and no process of this table would hold the lock.", "file lock"),
    KINDS["stopped"]: ("A stopped thread has the state T. A thread that sleeps, S, is not stopped.", "signal", "stopped", "sigstop"),
    "a worker that has died": ("A dead worker has no threads, or is a zombie (Z). Are both workers there?", "dead worker", "a killed worker"),
    KINDS["lost-result"]: ("Then no thread would be at work: all workers would wait for a task, and their feeders for a batch.", "lost", "lost result"),
    KINDS["cycle"]: ("Two workers would hold one lock each, and want the other one's. Look at the locks on files.", "circle", "cycle", "deadlock"),
    "a full pipe": ("Then a feeder thread would be in `write`, and the loop would not be waiting for a result.", "full queue"),
    KINDS["thread-missing-after-fork"]: ("Then a worker would wait for work of a pool whose threads it does not have. Compare its threads with those of main.", "thread", "missing thread"),
    KINDS["barrier"]: ("Then a worker would be in `Barrier.wait`, and the other one would have no task that brings it there.", "barrier", "a barrier"),
    "a slow disk": ("A thread that waits for a disk has the state D, and its position in the file moves.", "disk", "slow storage"),
}  # fmt: skip
"""Ten answers: what an answer misses, if it is wrong, and other words for it."""


@dataclass(frozen=True)
class Answers:
    """What is to be found out of a mystery. kind: a key of `KINDS`; sample: -1 = it stands still outside a sample."""

    worker: int
    kind: str
    sample: int


MYSTERIES = Path(__file__).parent / "mysteries"
OWN: dict[str, tuple[Path, Answers]] = {}
"""Mystery -> its trace and its answers, while the work of a student is graded who has mysteries of their own."""


def mystery(name: str) -> minidl.Trace:
    """One of the six runs."""
    path, _ = OWN.get(name, (MYSTERIES / f"{name}.minidl", None))
    trace = recorded(path)
    trace.path = Path(name)
    return trace


def answers(trace: minidl.Trace) -> Answers:
    """What is to be found out of a mystery: what was planned for a student, or what the doctor finds."""
    if trace.path.name in OWN:
        return OWN[trace.path.name][1]
    found = verdict(trace)
    return Answers(int(found.who["worker"]), found.cause.value, int(found.where.get("sample", -1)))


def verdict(trace: minidl.Trace) -> Finding:
    """The doctor's."""
    return headline(trace)


def evidence(trace: minidl.Trace) -> RunEvidence:
    """The last look at the run's processes before it was killed."""
    told = headline(trace).wait
    assert told is not None
    return recorded_looks(trace, told)[-1]


def _name(case: RunFacts, pid: int) -> str:
    return f"worker {case.workers[pid]}" if pid in case.workers else "main"


def _call(process: SeenProcess, thread: SeenThread) -> str:
    """The system call that the thread is in, with its file, and the locks on files that its process holds."""
    call = thread.syscall
    if call is None:
        return ""
    files = {file.fd: file for file in process.descriptors if file.kind == "file"}
    named = [call.words.removeprefix("opens ")] if call.name == "openat" else []
    named += [files[fd].target for fd in call.fds if fd in files]
    held = [file.target for file in files.values() if any("FLOCK" in lock for lock in file.locks)]
    return " ".join([call.name, *named]) + (f"; holds {', '.join(held)}" if held else "")


def threads(trace: minidl.Trace) -> Any:
    """Every thread of the run: what the kernel says of it, and where its Python code is, innermost frame first."""
    look = evidence(trace)
    case = RunFacts([look])
    found = []
    for process in sorted(look.processes, key=lambda process: _name(case, process.pid)):
        for thread in process.threads:
            frames = [f"{frame.function} ({Path(frame.file).name}:{frame.line})" for frame in thread.stack or ()]
            name, states = _name(case, process.pid), " ".join(thread.state)
            call, code = html.escape(_call(process, thread)), html.escape(" ← ".join(frames[:4]))
            found.append((name, states, call, thread.wchan, code))
    return table(found, ["process", "state at two looks", "system call", "kernel function", "Python, from the inside"])


# --- Questions --------------------------------------------------------------------------------------------------------
@question
def who(trace: minidl.Trace) -> Asked:
    """The worker at the end of the chain."""
    found = verdict(trace)
    return Asked(
        "Which worker does the loop wait for?",
        Worker(answers(trace).worker),
        "Idle workers wait in `index_queue.get`. Which one has something else on its stack?",
        "From link to link: " + " → ".join(found.chain) + ".",
    )


@question
def what(trace: minidl.Trace) -> Asked:
    """The kind of cause."""
    found = verdict(trace)
    return Asked(
        "What keeps it from going on?",
        Choice(KINDS[answers(trace).kind], WORDS),
        "Look at the state (S sleeps, T is stopped), the system call, and the innermost frames of each thread that is not idle.",
        f"The doctor says: {found.sentence}.",
    )


@question
def sample(trace: minidl.Trace) -> Asked:
    """The sample at fault."""
    found = verdict(trace)
    (loader,) = trace.loaders.values()
    return Asked(
        "In which sample?",
        Count(answers(trace).sample),
        f"Batches of {loader['batch_size']}, in order, two workers. The loop waits for batch {found.where['task']}; the stack names the line, and the table the file.",
        f"The doctor says: {found.sentence}.",
    )


# --- Exercises --------------------------------------------------------------------------------------------------------
def _expect(
    rule: Callable[..., object], arguments: Callable[[str], tuple[Any, ...]], right: str, made: Mapping[tuple[Any, ...], bool], words: str
) -> None:  # fmt: skip
    """Try a rule on all six runs, of which it must fit one alone, and on made cases: arguments -> whether it fits."""
    cases = [
        (f"mystery {name}", arguments(name), answers(trace).kind == right, trace)
        for name, trace in ((name, mystery(name)) for name in NAMES)
    ]
    cases += [("a made case", given, wanted, None) for given, wanted in made.items()]
    for about, given, wanted, trace in cases:
        said = bool(rule(*(list(one) if isinstance(one, tuple) else one for one in given)))
        if said != wanted:
            shown = ", ".join(str(list(one) if isinstance(one, tuple) else one) for one in given)
            raise Wrong(f"On {about} your rule says {said}: it was given {shown}.", words, trace)


STATES = {("T", "T"): True, ("T", "S"): False, ("S", "T"): False} | {(state, state): False for state in "RSDZXtI"}
"""States of a thread at two looks -> whether it was stopped by a signal at both."""

STEPS: dict[tuple[Any, ...], bool] = {
    ("NEXT", ("IDLE", "IDLE", "IDLE")): True, ("NEXT", ("IDLE",)): True, ("NEXT", ("IDLE", "SAMPLE")): False,
    ("NEXT", ("COLLATE", "IDLE")): False, ("NEXT", ("IDLE", "PUT")): False, ("CONSUMER", ("IDLE", "IDLE")): False,
    ("SHUTDOWN", ("IDLE", "IDLE")): False,
}  # fmt: skip
"""The loop's step, and the workers' -> whether the loop waits for a batch that nobody has."""


@exercise
def stopped(rule: Callable[[str, str], object]) -> str:
    """rule(state before, state now) of the process at the end of the chain."""

    def states(name: str) -> tuple[str, str]:
        trace = mystery(name)
        process = evidence(trace).process(int(verdict(trace).who["pid"]))
        assert process is not None
        assert process.main is not None
        return process.main.state

    _expect(
        rule, states, "stopped", STATES,
        "A thread that sleeps (S) waits for something; one that is stopped (T) waits for SIGCONT. D waits for a disk, Z has ended, and t waits for a debugger.",
    )  # fmt: skip
    return "It names the stopped worker, and none of the five that sleep; nor one that was stopped at one look only."


@exercise
def lost(rule: Callable[[str, list[str]], object]) -> str:
    """rule(step of the loop, steps of the workers)."""

    def steps(name: str) -> tuple[str, tuple[str, ...]]:
        case = RunFacts([evidence(mystery(name))])
        loop = case.loops[0]
        workers = [case.at(pid).step for pid in case.workers]
        return loop.place.step.name, tuple(step.name for step in workers)

    _expect(
        rule, steps, "lost-result", STEPS,
        "The loop waits (NEXT), and whoever could send a batch waits for a task (IDLE): nobody has it. A loop that trains (CONSUMER) waits for no batch.",
    )  # fmt: skip
    return "It finds the lost result: all wait, and none of them has anything to do."
