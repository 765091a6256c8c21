"""Questions and checks of 09_hang_lab: six runs that hang, recorded on torch's loader and killed."""

from __future__ import annotations

import html
from collections.abc import Callable
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
    "fifo": "a file that nobody feeds",
    "stopped": "a signal",
    "lost-result": "a result that was lost",
    "cycle": "a circle",
    "thread-missing-after-fork": "a thread that is not there",
    "barrier": "a barrier",
}

WORDS = {
    "a file that nobody feeds": ("file", "fifo", "pipe", "read", "open"),
    "a signal": ("signal", "stopped", "sigstop", "stop"),
    "a result that was lost": ("lost", "lost result", "a lost result", "result"),
    "a circle": ("circle", "cycle", "deadlock", "each other"),
    "a thread that is not there": ("thread", "missing thread", "fork"),
    "a barrier": ("barrier",),
}


def mystery(name: str) -> minidl.Trace:
    """One of the six runs."""
    return recorded(Path(__file__).parent / "mysteries" / f"{name}.minidl")


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
            frames = [
                f"{frame.function} ({frame.file.rpartition('/')[2]}:{frame.line})" for frame in thread.stack or ()
            ]
            found.append(
                (
                    _name(case, process.pid),
                    thread.state[1],
                    html.escape(_call(process, thread)),
                    thread.wchan,
                    html.escape(" ← ".join(frames[:4])),
                )
            )
    return table(found, ["process", "state", "system call", "kernel function", "Python, from the inside"])


# --- Questions --------------------------------------------------------------------------------------------------------
@question
def who(trace: minidl.Trace) -> Asked:
    """The worker at the end of the chain."""
    found = verdict(trace)
    return Asked(
        "Which worker does the loop wait for?",
        Worker(int(found.who["worker"])),
        "Idle workers wait in `index_queue.get`. Which one has something else on its stack?",
        "From link to link: " + "; then ".join(found.chain) + ".",
    )


@question
def what(trace: minidl.Trace) -> Asked:
    """The kind of cause."""
    found = verdict(trace)
    return Asked(
        f"What keeps it from going on: {', '.join(KINDS.values())}?",
        Choice(KINDS[found.cause.value], WORDS),
        "Look at the state (S sleeps, T is stopped), the system call, and the innermost frames of each thread that is not idle.",
        f"The doctor says: {found.sentence}.",
    )


@question
def sample(trace: minidl.Trace) -> Asked:
    """The sample at fault."""
    found = verdict(trace)
    return Asked(
        "In which sample?",
        Count(int(found.where["sample"])),
        "Batches of 4, in order, two workers. The loop waits for batch 3; the stack names the line, and the evidence the file.",
        f"The doctor says: {found.sentence}.",
    )


# --- Exercises --------------------------------------------------------------------------------------------------------
def _expect(rule: Callable[..., object], arguments: Callable[[str], tuple[Any, ...]], right: str, words: str) -> None:
    """Try a rule on all six runs; it must fit one of them alone."""
    for name in NAMES:
        said, given = bool(rule(*arguments(name))), arguments(name)
        if said != (name == right):
            shown = ", ".join(str(value) for value in given)
            raise Wrong(
                f"On mystery {name} your rule says {said}: it was given {shown}.", words, mystery(name),
            )  # fmt: skip


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
        rule, states, "two", "A thread that sleeps (S) waits for something; one that is stopped (T) waits for SIGCONT."
    )
    return "It names the stopped worker, and none of the five that sleep."


@exercise
def lost(rule: Callable[[str, list[str]], object]) -> str:
    """rule(step of the loop, steps of the workers)."""

    def steps(name: str) -> tuple[str, list[str]]:
        case = RunFacts([evidence(mystery(name))])
        loop = case.loops[0]
        workers = [case.at(pid).step for pid in case.workers]
        return loop.place.step.name, [step.name for step in workers]

    _expect(
        rule,
        steps,
        "three",
        "The loop waits (NEXT), and whoever could send a batch waits for a task (IDLE): nobody has it.",
    )
    return "It finds the lost result: all wait, and none of them has anything to do."
