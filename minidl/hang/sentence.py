"""A chain of waits and its cause in words, and as the fields of a finding.

Interface: `sentence(chain, found, timed)`, `link_words(chain, position)`, `who`, `where`; `facts_of(chain)` and
`resources(case)` are evidence. Texts mark their details (`finding.detail`): a title leaves these out. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from minidl.hang.case import RunFacts, ThreadFacts, in_library, spot
from minidl.hang.chain import Chain, waiting_in
from minidl.hang.evidence.waits import Blocked
from minidl.hang.finding import EvidenceLine, detail
from minidl.hang.outcomes import ignores_sigterm
from minidl.hang.places import AT_HOME, LoaderStep
from minidl.hang.rules.judgement import Judgement
from minidl.tracefile.words import seconds, size

_POLLS: Final = (LoaderStep.NEXT, LoaderStep.IDLE)
_SENDS: Final = (LoaderStep.WRITE, LoaderStep.PICKLE, LoaderStep.FEEDER_IDLE)
_FEEDS: Final = "in the feeder of its own queue"
_ABOUT: Final = 1.0
"""Seconds by which a sleep and the wait of the sentence may differ, and are one wait all the same."""


def sentence(chain: Chain, found: Judgement, timed: bool) -> tuple[str, str]:
    """The waits of a chain, and why they do not end. timed: the finding has the duration of the whole wait."""
    first, end, what = chain.first, chain.end, found.what + _deaf(chain)

    def place(link: ThreadFacts) -> str:
        words = _place(link)
        return words + detail(_asleep_for(link)) if words and not timed else words

    if first is end:
        return f"{first.name}{_comma(place(first))} {what}", ""
    second = chain.links[1]
    who, inside = f"{_loop_words(first)} {_named(second)}", waiting_in(second)
    if second is end or chain.cycle:
        return _described(who, place(second), what)
    if second.pid == end.pid and inside is None:
        return _described(who, place(end), what)
    waits = f"is {second.wait.words}" if inside is None else f"waits in {inside}" if inside else "waits for a lock"
    return _described(who, place(second), f"{waits}; {_named(end)}{_comma(place(end))} {what}")


def _deaf(chain: Chain) -> str:
    """Say that a worker ignores the signal by which the loop, which waits for its end, wants to end it."""
    stopping = chain.first.step in (LoaderStep.SHUTDOWN, LoaderStep.EXIT) and chain.end.in_worker
    ignores = stopping and ignores_sigterm(chain.end.process)
    return "; it ignores SIGTERM, the signal that should end it" if ignores else ""


def _named(link: ThreadFacts) -> str:
    """The name of a link: a thread's name if the link before it is another thread of the same process."""
    before, case = link.waiters[-1], link.case
    if link.pid == before.pid and link.tid != before.tid:
        return f"its thread {link.label}"
    own = link.in_worker and before.pid in case.ranks and case.home_of(link.pid) == before.pid
    return link.name.replace(f"rank {case.ranks[before.pid]}'s", "its", 1) if own else link.name


def _described(who: str, place: str, what: str) -> tuple[str, str]:
    return (f"{who}{_comma(place).removesuffix(',')}", f": it {what}") if place else (f"{who}, which {what}", "")


def _comma(place: str) -> str:
    """A place to go on after; one in parentheses needs no commas."""
    return place if place.startswith(" (") or not place else f",{place},"


def _loop_words(first: ThreadFacts) -> str:
    """The loop, up to the name of what it waits for."""
    task = first.case.told.task
    batch = f" batch {task} of" if task >= 0 else ""
    rows = (
        (first.place.interrupted, f", in a signal handler or finalizer ({spot(first.place)}), waits for"),
        (first.step is LoaderStep.SHUTDOWN, " shuts down, and waits for"),
        (first.step is LoaderStep.HAND_OVER, " fetches a batch's memory from"),
        (first.step in AT_HOME or not first.place.seen, f" waits for{batch}"),
        (first.step is LoaderStep.EXIT, f", {LoaderStep.EXIT.value}, waits for"),
        (True, ", in its own code, waits for"),
    )
    return first.name + next(words for applies, words in rows if applies)


def _sample_of(link: ThreadFacts) -> int:
    """The sample that a thread is in, by its stack or the trace; -1 = unknown."""
    told = link.case.told
    return told.sample if link.place.sample < 0 and told.worker_pid == link.pid else link.place.sample


def _place(link: ThreadFacts) -> str:
    """The place of a link, to stand after its name: " in sample 137 (D.get at data.py:6)"."""
    words, at = _step_words(link), _at(link)
    return (f" {words}" if words else "") + (f" ({at})" if at else "")


def _at(link: ThreadFacts) -> str:
    """The frame of a link; "" if it only polls."""
    polls = link.step in _POLLS and not link.place.interrupted and link.place.users is None
    return "" if polls else spot(link.place)


def _step_words(link: ThreadFacts) -> str:
    place, step, told, sample = link.place, link.step, link.case.told, _sample_of(link)
    own = not link.in_worker
    unplaced = step in (LoaderStep.OTHER, *_POLLS)
    rows = (
        (place.interrupted, "in a signal handler or finalizer"),
        (sample >= 0, f"in sample {sample}"),
        (place.seen and step is LoaderStep.OTHER and link.case.is_loop(link.pid), "in its own code" if own else ""),
        (own and step is LoaderStep.IMPORT, "importing a module"),
        (own and step in _SENDS, _FEEDS),
        (place.seen and not unplaced, step.value),
        (told.worker_pid == link.pid, told.step),
    )
    return next((words for applies, words in rows if applies), "")


def _asleep_for(link: ThreadFacts) -> str:
    """For how long its thread has slept; "" if it polls, or if it has slept for all of the recorded wait."""
    polls = link.wait.bounded and link.kind is not Blocked.SLEEPS
    told, slept = link.case.told, link.seen.idle
    waited = (link.case.now.moment - told.since) / 1e9 if told.since else math.inf
    return "" if polls or slept < 1 or slept > waited - _ABOUT else f" for {seconds(slept)}"


def link_words(chain: Chain, position: int) -> str:
    """A link of the chain: its name, where it is, and what it waits for."""
    link = chain.links[position]
    name = f"{link.name} {link.by}" if link.by else link.name
    if chain.cycle and link is chain.end:
        return f"{name}: this closes the cycle"
    feeds = not link.in_worker and link.step in _SENDS
    step = "no Python stack" if not link.place.seen else _FEEDS if feeds else link.step.value
    sample = f" (sample {link.place.sample})" if link.place.sample >= 0 else ""
    at = f", {_at(link)}" if _at(link) else ""
    return f"{name}: {step}{sample}{at}; {link.wait.words}{_asleep_for(link)}"


def who(end: ThreadFacts) -> dict[str, Any]:
    """The role of the chain's end."""
    role = "worker" if end.worker >= 0 else ("loop" if end.case.is_loop(end.pid) else "other")
    return {"role": role, "worker": end.worker, "pid": end.pid, "thread": end.tid}


def where(chain: Chain) -> dict[str, Any]:
    """The place of the chain's end. A thread that a sample has started is in that sample."""
    end, place, frame = chain.end, chain.end.place, chain.end.place.users
    mine = [one.place for one in chain.links if one.pid == end.pid and one.place.sample >= 0]
    if mine and place.step is LoaderStep.OTHER and place.seen and not place.interrupted:
        place = mine[-1]
    told = end.case.told
    sample = told.sample if place.sample < 0 and told.worker_pid == end.pid else place.sample
    step = "signal-handler" if end.place.interrupted else place.step.name.lower()
    found: dict[str, Any] = {"step": step if end.place.seen else "unseen", "sample": sample, "task": place.task}
    return found if frame is None else found | {"function": frame.function, "file": frame.file, "line": frame.line}


# --- Evidence ---------------------------------------------------------------------------------------------------------
def facts_of(chain: Chain) -> Iterator[EvidenceLine]:
    """The loop's line and batch, and the place in the user's code of each thread of the chain."""
    yield from _loop_seen(chain)
    for link in chain.links[: chain.back if chain.back > 0 else None]:
        if (frame := link.place.users) is not None:
            source, of = f": {frame.source}" if frame.source else "", f"stack of thread {link.tid}"
            yield EvidenceLine(f"{link.name} is in {frame.function}, {frame.file}:{frame.line}{source}", of)
            if inner := in_library(link.place):
                yield EvidenceLine(f"innermost frame: {inner}", of)


def _loop_seen(chain: Chain) -> Iterator[EvidenceLine]:
    """The line that iterates over the loader, and the task of the worker that the loop waits for, by their stacks."""
    first, told = chain.first, chain.end.case.told
    workers = [one.place.task for one in chain.links[1:2] if one.in_worker]
    task = told.task if told.task >= 0 else max(workers, default=-1)
    epoch = f"epoch {told.epoch}, " if told.epoch >= 0 else ""
    about = f"; {epoch}batch {task}" if task >= 0 else ""
    if (frame := first.place.caller) is not None and first.step in AT_HOME:
        source = f": {frame.source}" if frame.source else ""
        yield EvidenceLine(f"it iterates in {frame.function}, {frame.file}:{frame.line}{source}{about}",
                           f"stack of thread {first.tid}")  # fmt: skip


def resources(case: RunFacts) -> Iterator[EvidenceLine]:
    """The exhausted resources of the machine, whatever the cause."""
    machine = case.now.machine
    if 0 <= machine.shm_free < max(1 << 20, machine.shm_size // 50):
        yield EvidenceLine(f"/dev/shm has {size(machine.shm_free)} of {size(machine.shm_size)} left", "statvfs")
    for group in machine.cgroups:
        if group.oom_kills > 0:
            killed = f"the out-of-memory killer has killed {group.oom_kills} processes of {group.path}"
            yield EvidenceLine(killed, "cgroup")
        if 0 < group.memory_limit < group.memory / 0.95:
            yield EvidenceLine(f"{group.path} uses {size(group.memory)} of {size(group.memory_limit)}", "cgroup")
    for process in case.now.processes:
        for has, most, what in (
            (len(process.descriptors), process.limits.get("open files", 0), "descriptors"),
            (process.maps, machine.max_map_count, "mappings"),
        ):
            if has > 0.95 * most > 0:
                yield EvidenceLine(f"{case.name(process.pid)} has {has} of {most} {what}", "/proc")
