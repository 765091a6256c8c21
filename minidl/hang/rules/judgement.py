"""The types of rules and of their results, and words that rules share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from minidl.hang import remedies
from minidl.hang.case import RunFacts, ThreadFacts, in_library, spot
from minidl.hang.chain import Chain
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.tracefile.words import and_joined, ending


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

    test: Callable[[Chain], Judgement | None]
    about: str
    counter: str


def exit_in_words(status: int) -> str:
    """The end of a process in words, by its wait status; -1 = unknown."""
    return "exit status unknown" if status < 0 else ending(os.waitstatus_to_exitcode(status))


def state_seen(link: ThreadFacts) -> EvidenceLine:
    """The kernel's letter for a thread, at two looks."""
    before, now = link.seen.state
    both = " at both looks" if before == now else f", and was {before} before"
    return EvidenceLine(f"its state is {now}{both}", f"/proc/{link.pid}/stat")


def source_of(link: ThreadFacts) -> str:
    """The source of the evidence of a thread's wait: its system call, or else the kernel's function."""
    return f"{link.call.name or link.seen.wchan or 'state'} of thread {link.tid}"


def wait_seen(link: ThreadFacts, of: str = "") -> EvidenceLine:
    """The wait of a thread, as evidence. of: its name and "is"."""
    return EvidenceLine(f"{of}{link.wait.words}", source_of(link))


def place_in_words(link: ThreadFacts) -> str:
    """The place of a thread in words: the user's line, else the library's, else the loader's step."""
    return spot(link.place) or in_library(link.place) or link.step.value


def named(case: RunFacts, pids: Iterable[int]) -> str:
    """Some processes in words."""
    return and_joined([case.name(pid) for pid in pids])


def waits_of(threads: Iterable[ThreadFacts]) -> EvidenceLine:
    """The waits of a process's other threads, as evidence."""
    words = and_joined([f"{one.label} ({one.wait.words})" for one in threads])
    return EvidenceLine(f"other threads of its process: {words}", "stacks")
