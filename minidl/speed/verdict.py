"""The verdict: whether the loader is the bottleneck, and which part of it, by what the training loop waited for.

Interface: `verdict(trace, loader)` -> `Verdict`, one sentence with its evidence and what to do next; `summed`, the same
of several iterators; `judge`, the same of a `Waiting` (see `wall_clock`).

The CPU time of fetches (`cpu_use`) shows whether samples compute, wait for a CPU or wait for a disk; in a trace without
it, the next step names both cases.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidl.speed.advice import ONE_SIDED, UNEVEN, Situation, next_step
from minidl.speed.cpu_use import CpuLimit, cpus_of
from minidl.speed.wall_clock import FEW_BATCHES, KIND_OF, Bound, Cause, Waiting, waiting
from minidl.tracefile.arrays import Rows
from minidl.tracefile.words import duration, percent

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


KEEPS_UP = 0.1
"""The loader keeps up if the share of waiting is below this: a perfect loader could save no more."""

ONCE = 0.5
"""The share from which a start-up that happens once is the bottleneck: a smaller one vanishes in a longer run."""

SPARE = 0.25
"""Workers that wait for tasks for a smaller share of their time are the limit, whatever the loop does meanwhile:
a faster reader would only wait for them. If the reader is the limit, workers idle most of the time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a loader, in words; cause: the largest one of that kind, None = no cause.

    brief: the sentence for a title, with one share only; apart: the part that is judged separately, "" = none.
    task: the task that the sentence names, -1 = none.
    """

    kind: Bound
    sentence: str
    evidence: tuple[str, ...]
    next_step: str
    cause: Cause | None = None
    task: int = -1
    brief: str = ""
    apart: str = ""

    def lines(self) -> list[str]:
        """The verdict for a terminal."""
        step = [f"next step: {self.next_step}"] if self.next_step else []
        return [self.sentence, *(f"  {text}" for text in self.evidence), *step]


def verdict(trace: Trace, loader: int, spans: Rows | None = None) -> Verdict:
    """What bounds this loader iterator of `trace`. spans: `trace.spans()`, if the caller has them already."""
    spans = trace.spans() if spans is None else spans
    found = waiting(trace, loader, spans)
    if found.alike > 1 and _kind(found)[0] is Bound.TOO_FEW:
        found = _joined(trace, loader, found, spans)
    return judge(found, trace.loaders.get(loader, {}), cpus_of(trace.manifest))


def _joined(trace: Trace, loader: int, found: Waiting, spans: Rows) -> Waiting:
    """The waiting of this iterator and of its neighbours with the same parameters, until there are enough batches."""
    params = trace.loaders.get(loader, {})
    alike = [other for other, theirs in trace.loaders.items() if other != loader and theirs == params]
    for other in sorted(alike, key=lambda number: abs(number - loader))[: 2 * FEW_BATCHES]:
        if found.batches >= FEW_BATCHES:
            break
        found += waiting(trace, other, spans)
    return found


def summed(trace: Trace, loaders: Sequence[int], spans: Rows) -> Verdict:
    """Return one verdict on several iterators of one DataLoader, as if they were one."""
    each = sorted((waiting(trace, loader, spans) for loader in loaders), key=lambda one: one.total)
    found = functools.reduce(operator.add, each[:-1], each[-1])
    return judge(found, trace.loaders.get(loaders[0], {}), cpus_of(trace.manifest))


# --- The judgement ----------------------------------------------------------------------------------------------------
def judge(found: Waiting, params: dict[str, Any] | None = None, cpus: float | None = None) -> Verdict:
    """Judge `found`. params: the loader's parameters in its trace; cpus: the usable CPUs, if known."""
    if isinstance(unseen := (params or {}).get("unseen"), list) and "next" in unseen:
        step = next_step(Situation(Bound.UNSEEN, None, found, {}, cpus))
        return Verdict(Bound.UNSEEN, _UNSEEN, (), step, brief=_UNSEEN)
    kind, cause = _kind(found)
    situation = Situation(kind, cause, found, params or {}, cpus)
    whose = _whose(found) if kind is Bound.HEAD_OF_LINE else ""
    sentence, brief = (_sentence(situation, brief) + whose for brief in (False, True))
    apart = _apart(found, kind) if cause is not None else ""
    task = found.task if whose else -1
    whole = f"{sentence}; {apart}" if apart else sentence
    return Verdict(kind, whole, _evidence(found, cpus), next_step(situation), cause, task, brief, apart)


_UNSEEN = "unknown what bounds the loader: an observed loader with pinned memory does not show when the loop waits"


def _sentence(situation: Situation, brief: bool) -> str:
    """What bounds the loader. brief: with one share, and not a share of a share."""
    kind, cause, found = situation.kind, situation.cause, situation.found
    loop = "the loop" if brief else "the training loop"
    share = found.total / max(1, found.total + found.consumer)
    if kind is Bound.TOO_FEW:
        return f"too few batches to say what bounds the loader: {found.batches} (at least {FEW_BATCHES} are needed)"
    if kind is Bound.NOT_INPUT:
        steady = found.total - found.causes[Cause.START_UP]
        kept = steady / max(1, steady + found.consumer)
        also = f" ({percent(share)} with the start and end of its workers)" if share - kept >= 0.05 else ""
        return f"not input-bound: the loader keeps up, {loop} waited {percent(kept)} of its time{also}"
    assert cause is not None
    if kind is Bound.SUPPLY:
        what = _supply(found, cause, situation.cpus, brief)
    else:
        what = f"{_part(found.share(cause), brief)} for {cause.value}"
    name = "shutdown-bound" if kind is Bound.START_UP and found.ends_slowly else kind.value
    return f"{name}: {loop} waited {percent(share)} of its time, {what}"


def _part(share: float, brief: bool) -> str:
    """A share of the waiting; the brief form has no number."""
    return f"{percent(share)} of that" if not brief else "mostly" if round(share, 2) >= 0.5 else "partly"


def _supply(found: Waiting, cause: Cause, cpus: float | None, brief: bool) -> str:
    """What the workers did while the loop waited for them."""
    supply, reading = found.share(*_MADE), found.share(Cause.REBUILD, Cause.PIN)
    held, part = found.cpu.held(cpus)
    known = cause is Cause.SAMPLES and held is not CpuLimit.UNKNOWN
    how = f", {held.value} ({percent(part)} of their time)" if known else ""
    if reading > supply:
        return f"while the workers were busy, mostly with {cause.value}{how}: faster reading would not help"
    did = _MADE[cause] if brief else f"made batches, mostly {cause.value}"
    return f"{_part(supply, brief)} while workers {did}{how}"


_MADE = {
    Cause.SAMPLES: "fetched samples",
    Cause.COLLATE: "collated batches",
    Cause.IPC: "pickled and sent batches",
}
"""What workers mostly did when they made batches."""


def _kind(found: Waiting) -> tuple[Bound, Cause | None]:
    """The kind, and the cause to blame. Steady waiting is judged without start-up, which a longer run spreads."""
    start_up = found.causes[Cause.START_UP]
    steady = found.total - start_up
    again = found.alike > 1 and found.workers > 0
    if found.batches < FEW_BATCHES and not again:
        return Bound.TOO_FEW, None
    whole = max(1, found.total + found.consumer)
    if 2 * start_up > found.total and start_up / whole >= (KEEPS_UP if again else ONCE):
        return Bound.START_UP, Cause.START_UP
    if found.batches < FEW_BATCHES:
        return Bound.TOO_FEW, None
    if steady / max(1, steady + found.consumer) < KEEPS_UP:
        return Bound.NOT_INPUT, None
    of_kind = {kind: sum(found.causes[c] for c in KIND_OF if KIND_OF[c] is kind) for kind in KIND_OF.values()}
    kind = max(of_kind, key=lambda k: of_kind[k])
    if kind is Bound.READING and found.workers and found.spare < SPARE:
        kind = Bound.SUPPLY
    # If a training step hides a part of the work, the wait falls into a task's last steps: so all work is compared.
    costs = found.work if kind is Bound.SUPPLY and found.work else found.causes
    return kind, max((c for c in KIND_OF if KIND_OF[c] is kind), key=lambda c: costs[c])


def _apart(found: Waiting, kind: Bound) -> str:
    """Why start-up is not the verdict, if the loop waited longer for it than for all causes of `kind`."""
    blamed = sum(found.causes[cause] for cause in KIND_OF if KIND_OF[cause] is kind)
    if kind is Bound.START_UP or found.causes[Cause.START_UP] <= blamed:
        return ""
    share = percent(found.share(Cause.START_UP))
    return f"{share} of the waiting was for {Cause.START_UP.value}, which does not count here: a longer run reduces it"


def _whose(found: Waiting) -> str:
    sample = f", sample {found.sample}" if found.sample >= 0 else ""
    return f" (longest: task {found.task} of worker {found.worker}{sample})" if found.task >= 0 else ""


def _evidence(found: Waiting, cpus: float | None) -> tuple[str, ...]:
    ranked = sorted((c for c in Cause if found.share(c) >= 0.005), key=lambda c: -found.causes[c])
    where = "inside next() and while workers started and ended" if found.causes[Cause.START_UP] else "inside next()"
    shares = ", ".join(f"{cause.value} {percent(found.share(cause))}" for cause in ranked)
    uneven, first, work = found.share_of(found.uneven), found.share_of(found.first), sum(found.work.values())
    steps = ", ".join(f"{cause.value} {percent(ns / max(1, work))}" for cause, ns in found.work.items())
    alike = f"{found.alike} iterators with the same parameters"
    lines = [
        (True, f"waited {duration(found.total)} {where}: {shares}"),
        (found.workers, f"while the loop waited for a result, workers fetched for {percent(found.busy)} of their time"),
        (found.cpu.wall, found.cpu.line(cpus)),
        (uneven >= UNEVEN, f"{percent(uneven)} of the waiting came after worker {found.out} had run out of data"),
        (first >= ONE_SIDED, f"{percent(first)} of the waiting was for the first batches of epochs"),
        (work, f"work on the batches: {steps}"),
        (found.together > 1, f"{found.together} of {alike}, taken together"),
        (found.alike > 1 and found.together == 1, f"one of {alike}"),
    ]
    return tuple(line for holds, line in lines if holds)
