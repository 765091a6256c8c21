"""The types of rules and of their results, and words that rules share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from minidl.hang import remedies
from minidl.hang.case import RunFacts, in_library, spot
from minidl.hang.chain import Chain, Link
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.tracefile.words import ending


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a rule. what: for the sentence, after the name and the place of the chain's end.

    moves: it goes on by itself. helped: a thread that could end the wait is at work, so this is no certain hang.
    alone: no thread that could end the wait is left, so it is not merely slow. fix: an own remedy, "" = the cause's.
    """

    cause: HangCause
    what: str
    sure: Sure = Sure.CERTAIN
    facts: tuple[EvidenceLine, ...] = ()
    also: tuple[str, ...] = ()
    fix: str = ""
    moves: bool = False
    helped: bool = False
    alone: bool = False

    @property
    def remedy(self) -> str:
        """The remedy: the rule's own, or else the one for the cause."""
        return self.fix or remedies.BY_CAUSE.get(self.cause, "")


@dataclass(frozen=True, slots=True)
class CauseRule:
    """One rule. test: returns None if it does not apply. counter: evidence against it."""

    test: Callable[[RunFacts, Chain], Judgement | None]
    about: str
    counter: str


def exit_in_words(status: int) -> str:
    """How a process ended, by its wait status; -1 = unknown."""
    if status < 0:
        return "exit status unknown"
    return ending(os.waitstatus_to_exitcode(status))


def state_seen(case: RunFacts, link: Link) -> EvidenceLine:
    """The kernel's letter for a thread, at two looks."""
    thread = case.thread(link.pid, link.tid)
    before, now = thread.state if thread is not None else ("?", "?")
    both = " at both looks" if before == now else f", and was {before} before"
    return EvidenceLine(f"its state is {now}{both}", f"/proc/{link.pid}/stat")


def source_of(case: RunFacts, link: Link) -> str:
    """The source of the evidence of a thread's wait: its system call, or else the kernel's function."""
    thread = case.thread(link.pid, link.tid)
    if thread is None:
        return f"process {link.pid}"
    call = thread.syscall
    return f"{call.name if call else thread.wchan or 'state'} of thread {link.tid}"


def wait_seen(case: RunFacts, link: Link) -> EvidenceLine:
    """The wait of a thread, as evidence."""
    return EvidenceLine(link.wait.words, source_of(case, link))


def place_in_words(case: RunFacts, pid: int) -> str:
    """Where the main thread of a process is: the user's line, else the library's, else the loader's step."""
    place = case.place(pid, pid)
    return spot(place) or in_library(place) or place.step.value
