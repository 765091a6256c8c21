"""The verdict: whether the loader is the bottleneck, and which part of it, by what the training loop waited for.

Interface: `verdict(trace, loader)` -> `Verdict`, one sentence with its evidence and what to do next; `summed`, the same
of several iterators; `judge`, the same of a `Waiting` (see `wall_clock`).

The CPU time of fetches (`cpu_use`) shows whether samples compute, wait for a CPU or wait for a disk; in a trace without
it, the next step names both cases.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidl.speed.advice import ONE_SIDED, UNEVEN, Situation, next_step
from minidl.speed.cpu_use import CpuLimit, cpus_of
from minidl.speed.reasons import Case, SlowReason, growth, reason
from minidl.speed.wall_clock import FEW_BATCHES, KIND_OF, Bound, Cause, Waiting, waiting
from minidl.tracefile.arrays import Rows
from minidl.tracefile.words import duration, percent

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


KEEPS_UP = 0.1
"""The loader keeps up if the share of waiting is below this: a perfect loader could save no more."""

ONCE = 0.5
"""The share from which a start-up that happens once is the bottleneck: a smaller one vanishes in a longer run."""

MARGIN = 0.6
"""A kind of waiting is named beside the first one if it is at least this part of it: neither is the winner."""

SHORT = 130
"""Characters of a sentence with a reason, after its kind: a title has room for them and for a line of the program."""

NEARLY_ALL = 0.9
"""The part of all waiting from which a kind is named without a share of its own."""

SPARE = 0.25
"""Workers that wait for tasks for a smaller share of their time are the limit, whatever the loop does meanwhile:
a faster reader would only wait for them. If the reader is the limit, workers idle most of the time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a loader, in words; cause: the largest one of that kind, None = no cause.

    apart: the part that is judged separately, "" = none. task: the task that blocked the line, -1 = none. reason: why
    that is so, None = no more is known.
    """

    kind: Bound
    sentence: str
    evidence: tuple[str, ...]
    next_step: str
    cause: Cause | None = None
    task: int = -1
    apart: str = ""
    reason: SlowReason | None = None

    def lines(self) -> list[str]:
        """The verdict for a terminal."""
        step = [f"next step: {self.next_step}"] if self.next_step else []
        return [self.sentence, *(f"  {text}" for text in (*filter(None, [self.apart]), *self.evidence)), *step]


def verdict(trace: Trace, loader: int, spans: Rows | None = None) -> Verdict:
    """What bounds this loader iterator of `trace`. spans: `trace.spans()`, if the caller has them already."""
    spans = trace.spans() if spans is None else spans
    found = waiting(trace, loader, spans)
    if found.alike > 1 and _kind(found)[0] is Bound.TOO_FEW:
        found = _joined(trace, loader, found, spans)
    return _judged(trace, (loader,), found, spans)


def _judged(trace: Trace, loaders: Sequence[int], found: Waiting, spans: Rows) -> Verdict:
    params, cpus = trace.loaders.get(loaders[0], {}), cpus_of(trace.manifest)

    def why(kind: Bound, cause: Cause | None) -> SlowReason | None:
        return reason(Case(trace, tuple(loaders), spans, found, kind, cause, params, cpus))

    return judge(found, params, cpus, why, growth(trace, loaders))


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
    return _judged(trace, loaders, found, spans)


# --- The judgement ----------------------------------------------------------------------------------------------------
def judge(
    found: Waiting,
    params: dict[str, Any] | None = None,
    cpus: float | None = None,
    why: Callable[[Bound, Cause | None], SlowReason | None] = lambda kind, cause: None,
    also: str = "",
) -> Verdict:
    """Judge `found`.

    params: the loader's parameters in its trace; cpus: the usable CPUs, if known; why: its reason; also: what is wrong
    whatever bounds the loader, "" = nothing.
    """
    if isinstance(unseen := (params or {}).get("unseen"), list) and "next" in unseen:
        step = next_step(Situation(Bound.UNSEEN, None, found, {}, cpus))
        return Verdict(Bound.UNSEEN, _UNSEEN, (), step)
    kind, cause = _kind(found)
    because = why(kind, cause)
    situation = Situation(kind, cause, found, params or {}, cpus)
    sentence = "; ".join(filter(None, (_sentence(situation, because), also)))
    step = "; ".join(filter(None, (_FIND_GROWTH * bool(also), because.next_step if because is not None else "")))
    task = found.task if kind is Bound.HEAD_OF_LINE else -1
    apart = _apart(found, kind) if cause is not None else ""
    kind = Bound.PROGRAM if kind is Bound.NOT_INPUT and (because is not None or also) else kind
    return Verdict(kind, sentence, _evidence(found, cpus), step or next_step(situation), cause, task, apart, because)


_FIND_GROWTH = (
    "find what the program keeps: a list or a cache that is never cleared, in each worker (tracemalloc, memray)"
)
_UNSEEN = "unknown what bounds the loader: an observed loader with pinned memory does not show when the loop waits"


def _sentence(situation: Situation, because: SlowReason | None) -> str:
    """What bounds the loader, and why.

    All shares before the reason are of the loop's time: of its steady time, unless the start is what bounds it.
    """
    kind, cause, found = situation.kind, situation.cause, situation.found
    if kind is Bound.TOO_FEW:
        return f"too few batches to say what bounds the loader: {found.batches} (at least {FEW_BATCHES} are needed)"
    once = found.causes[Cause.START_UP]
    whole = found.total + found.consumer
    waited = found.total if kind is Bound.START_UP else found.total - once
    time = max(1, whole if kind is Bound.START_UP else whole - once)
    loop = f"the loop waited {percent(waited / time)} of its time"
    if kind is Bound.NOT_INPUT and because is not None:
        return f"{Bound.PROGRAM.value}: {because.words}; the loader keeps up"
    why = f": {because.words}" if because is not None else _whose(found) if kind is Bound.HEAD_OF_LINE else ""
    if kind is Bound.NOT_INPUT:
        all_in_all = found.total / max(1, whole)
        also = f" ({percent(1 - all_in_all)} with the start and end of its workers)"
        keeps = f"the loader keeps up, the training step takes {percent(1 - waited / time)} of the loop's time"
        return f"{kind.value}: {keeps}{also * (all_in_all - waited / time >= 0.05)}"
    if kind is Bound.START_UP:
        name = "shutdown-bound" if found.ends_slowly else kind.value
        return f"{name}: {loop}, {percent(once / time)} for {Cause.START_UP.value}{why}"
    if kind is Bound.SUPPLY and found.of(Bound.READING) > found.of(Bound.SUPPLY):
        assert cause is not None
        how = _how(situation) if because is None else why
        return f"{kind.value}: {loop}, and its workers were always busy, mostly with {cause.value}{how}"
    first, second = sorted((one for one in Bound if one in KIND_OF.values()), key=lambda one: -found.of(one))[:2]
    first, second = (first, second) if first is kind else (kind, first)
    close = found.of(second) >= MARGIN * found.of(first)
    what = {one: _what(situation, one, because is None) for one in (first, second)[: 1 + close]}
    told = ", and ".join(f"{percent(found.of(one) / time)} for {words}" for one, words in what.items())
    words = f" for {what[first]}" if found.of(first) >= NEARLY_ALL * waited else f", {told}"
    if because is not None and (first is Bound.HEAD_OF_LINE or len(loop + words + why) > SHORT):
        words = ""  # the kind's name, or the reason, says what for
    return f"{kind.value}: {loop}{words}{why}"


def _what(situation: Situation, kind: Bound, with_how: bool) -> str:
    """What the loop waits for, if this kind bounds it. with_how: and what samples mostly do."""
    found = situation.found
    mine = [cause for cause in KIND_OF if KIND_OF[cause] is kind]
    cause = situation.cause if situation.cause in mine else found.largest(kind)
    assert cause is not None
    how = _how(situation) if with_how and cause is situation.cause else ""
    if cause not in _MAKE:
        return cause.value
    return f"{f'workers that {_MAKE[cause]}' if found.workers else f'{cause.value}, without workers'}{how}"


def _how(situation: Situation) -> str:
    """What samples mostly do, if they are to blame and that is known."""
    limit = situation.limit
    return f", which {limit.value}" if situation.cause is Cause.SAMPLES and limit is not CpuLimit.UNKNOWN else ""


_MAKE = {
    Cause.SAMPLES: "fetch samples",
    Cause.COLLATE: "collate batches",
    Cause.IPC: "pickle and send batches",
}
"""What workers mostly do when they make batches."""


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
    kind = max(KIND_OF.values(), key=found.of)
    if kind is Bound.READING and found.workers and found.spare < SPARE:
        kind = Bound.SUPPLY
    return kind, found.largest(kind)


def _apart(found: Waiting, kind: Bound) -> str:
    """Why start-up is not the verdict, if the loop waited longer for it than for all causes of `kind`."""
    once = found.causes[Cause.START_UP]
    if kind is Bound.START_UP or once <= found.of(kind):
        return ""
    return (
        f"{Cause.START_UP.value} took {duration(once)} more, which does not count here: a longer run reduces its share"
    )


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
