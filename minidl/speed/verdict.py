"""The verdict: whether the loader is the bottleneck, and which part of it, by what the training loop waited for.

Interface: `verdict(trace, loader)` -> `Verdict`, one sentence with its evidence and what to do next; `summed`, the same
of several iterators; `judge`, the same of a `Waiting` (see `wall_clock`).

The CPU time of fetches (`cpu_use`) shows whether samples compute, wait for a CPU or wait for a disk; in a trace without
it, the next step names both cases.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from minidl.speed.advice import ONE_SIDED, UNEVEN, Situation, next_step
from minidl.speed.cpu_use import CpuLimit, cpus_of
from minidl.speed.hot_spots import HotSpot, hot_spot
from minidl.speed.own_step import OTHER
from minidl.speed.reasons import (
    Case,
    SlowReason,
    blamed,
    device_or_host,
    first_steps,
    reason,
    step_does,
    step_parts,
    warnings,
)
from minidl.speed.wall_clock import FEW_BATCHES, KIND_OF, Bound, Cause, Waiting, waiting
from minidl.tracefile.arrays import Rows
from minidl.tracefile.spans import total
from minidl.tracefile.stack_samples import library
from minidl.tracefile.words import duration, percent

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


KEEPS_UP = 0.1
"""The loader keeps up if the share of waiting is below this: a perfect loader could save no more."""

ONCE = 0.5
"""The share from which a start-up that happens once is the bottleneck: a smaller one vanishes in a longer run."""

MARGIN = 0.6
"""A kind of waiting is named beside the first one if it is at least this part of it: neither is the winner."""

ROOM = 150
"""Characters of a sentence, so that a title is not cut; less if it begins with a line of the program."""

LONGEST_NAME = 24
"""Characters of a name of the program's that a sentence has room for."""

NAMED, MOST_NAMED = 0.05, 3
"""A sentence names a part of the step from this share of the loop's time on, and so many parts."""

LEAST = 0.005
"""Evidence leaves smaller parts out."""

NEARLY_ALL = 0.9
"""The part of all waiting from which a kind is named without a share of its own."""

SPARE = 0.25
"""Workers that wait for tasks for a smaller share of their time are the limit, whatever the loop does meanwhile:
a faster reader would only wait for them. If the reader is the limit, workers idle most of the time."""


class Reasons(NamedTuple):
    """The reason for what bounds a loader, what else is wrong, and what the training step mostly does, "" = unknown.

    spot: the line of the program that the blamed steps were mostly in, None = unknown. parts: the ns of each part of
    the training steps, the largest first; {} = unknown. first: what the first training steps take longer, once. limit:
    whether the device bounds the training step, or the host.
    """

    reason: SlowReason | None = None
    warnings: tuple[SlowReason, ...] = ()
    step: str = ""
    spot: HotSpot | None = None
    parts: Mapping[str, int] = MappingProxyType({})
    first: SlowReason | None = None
    limit: SlowReason | None = None


class _Wording(NamedTuple):
    """How much a sentence says. source: characters of the line of code, -1 = not even where it is; warnings: what else
    is wrong, and the reason, 2 = in full, 1 = briefly, 0 = briefly, and only growing memory; how: what samples mostly
    do; all_kinds: a second kind of waiting, and what the loop waits for beside a reason.
    """

    source: int
    warnings: int
    how: bool = True
    all_kinds: bool = True


_WORDINGS = tuple(
    _Wording(*one)
    for one in (
        (60, 2), (40, 2), (40, 1), (40, 1, False), (40, 2, False, False), (40, 1, False, False), (24, 1, False, False),
        (0, 1, False, False), (0, 0, False, False), (-1, 2), (-1, 1, False), (-1, 1, False, False),
        (-1, 0, False, False),
    )
)  # fmt: skip
"""From the one that says most to the one that says least; the first that fits is the sentence."""


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


def verdict(trace: Trace, loader: int, spans: Rows | None = None, room: int = ROOM) -> Verdict:
    """What bounds this loader iterator of `trace`. spans: `trace.spans()`, if the caller has them already.

    room: characters of the sentence.
    """
    spans = trace.spans() if spans is None else spans
    found = waiting(trace, loader, spans)
    if found.alike > 1 and _kind(found)[0] is Bound.TOO_FEW:
        return _judged(trace, *_joined(trace, loader, found, spans), spans, room)
    return _judged(trace, (loader,), found, spans, room)


def _judged(trace: Trace, loaders: Sequence[int], found: Waiting, spans: Rows, room: int) -> Verdict:
    params, cpus = trace.loaders.get(loaders[0], {}), cpus_of(trace.manifest)

    def why(kind: Bound, cause: Cause | None) -> Reasons:
        case = Case(kind, cause, found, params, cpus, trace, tuple(loaders), spans)
        because, step = reason(case), step_does(case) if kind is Bound.NOT_INPUT else ""
        spot = hot_spot(trace.stack_samples, blamed(case, because))
        if spot is not None and cause is Cause.OVERHEAD and library(spot.at.file):
            spot = None  # the loader itself waits there
        parts = step_parts(case)
        return Reasons(because, warnings(case), step, spot, parts, first_steps(case), device_or_host(case, parts))

    return judge(found, params, cpus, why, room)


def _joined(trace: Trace, loader: int, found: Waiting, spans: Rows) -> tuple[list[int], Waiting]:
    """This iterator and its neighbours with the same parameters, until there are enough batches; and their waiting."""
    params, joined = trace.loaders.get(loader, {}), [loader]
    alike = [other for other, theirs in trace.loaders.items() if other != loader and theirs == params]
    for other in sorted(alike, key=lambda number: abs(number - loader))[: 2 * FEW_BATCHES]:
        if found.batches >= FEW_BATCHES:
            break
        joined.append(other)
        found += waiting(trace, other, spans)
    return joined, found


def summed(trace: Trace, loaders: Sequence[int], spans: Rows, room: int = ROOM) -> Verdict:
    """Return one verdict on several iterators of one DataLoader, as if they were one. room: as in `verdict`."""
    each = sorted((waiting(trace, loader, spans) for loader in loaders), key=lambda one: one.total)
    found = functools.reduce(operator.add, each[:-1], each[-1])
    return _judged(trace, loaders, found, spans, room)


# --- The judgement ----------------------------------------------------------------------------------------------------
def judge(
    found: Waiting,
    params: dict[str, Any] | None = None,
    cpus: float | None = None,
    why: Callable[[Bound, Cause | None], Reasons] = lambda kind, cause: Reasons(),
    room: int = ROOM,
) -> Verdict:
    """Judge `found`.

    params: the loader's parameters in its trace; cpus: the usable CPUs, if known; why: the reason for what bounds it;
    room: characters of the sentence.
    """
    if isinstance(unseen := (params or {}).get("unseen"), list) and "next" in unseen:
        step = next_step(Situation(Bound.UNSEEN, None, found, {}, cpus))
        return Verdict(Bound.UNSEEN, _UNSEEN, (), step)
    kind, cause = _kind(found)
    steady = found.total - found.once
    if kind in KIND_OF.values() and found.step_time > steady and _outweighed(steady, why(Bound.NOT_INPUT, None).reason):
        kind, cause = Bound.NOT_INPUT, None
    reasons = because, also, _, spot, parts, first, limit = why(kind, cause)
    if kind is Bound.START_UP and (beside := _beside_the_start(found, why)) is not None:
        reasons = reasons._replace(warnings=(also := (beside, *also)))
    situation = Situation(kind, cause, found, params or {}, cpus)
    every = [_sentence(situation, reasons, wording) for wording in _WORDINGS]
    sentence = next((one for one in every if len(one) <= room), every[-1])  # the evidence has the rest
    own = next((one.next_step for one in (because, limit) if one is not None), "")
    idle = kind is Bound.NOT_INPUT and bool(also)  # no advice for a loader that keeps up
    steps = "; ".join([*(one.next_step for one in also), own or next_step(situation) * (not idle)])
    task = found.task if kind is Bound.HEAD_OF_LINE else -1
    apart = _apart(found, kind) if cause is not None else ""
    kind = Bound.PROGRAM if kind is Bound.NOT_INPUT and (because is not None or also) else kind
    told = [one for one in (because, *also, limit, first) if one is not None]
    evidence = (*(one.words for one in told if one.words not in sentence), *_evidence(found, cpus))
    evidence += (_parts_in_words(parts),) if parts else ()
    evidence += (spot.words(),) if spot is not None else ()
    return Verdict(kind, sentence, evidence, steps.strip("; "), cause, task, apart, because)


_UNSEEN = "unknown what bounds the loader: an older minidl observed it, which saw no wait for pinned memory"


def _steady_share(found: Waiting) -> float:
    """The share of the loop's steady time in which it waits."""
    steady = found.total - found.once
    return steady / max(1, steady + found.step_time)


def _outweighed(steady: int, because: SlowReason | None) -> bool:
    """Whether a few steps of the loop's own take longer than its steady waiting, ns."""
    return because is not None and because.rows is not None and total(because.rows) > steady


def _sentence(situation: Situation, reasons: Reasons, wording: _Wording) -> str:
    """What bounds the loader, why, and what else is wrong; that comes first if the loader bounds nothing.

    All shares before the reason are of the loop's time: of its steady time, unless the start is what bounds it.
    """
    kind, found = situation.kind, situation.found
    because, warned, step, spot, parts, first, limit = reasons
    brief = wording.warnings < 2
    at = f" ({spot.brief(wording.source)})" if spot is not None and wording.source >= 0 else ""
    words = "" if because is None else because.said(brief or bool(at))
    also = [one.said(brief) for one in warned if wording.warnings or one.name == "growth"]
    long = wording.warnings and found.warming >= ONCE * (found.total + found.consumer)
    early = [first.brief] if long and first is not None else []
    if kind is Bound.TOO_FEW:
        said = f"too few batches to say what bounds the loader: {found.batches} (at least {FEW_BATCHES} are needed)"
    elif kind is Bound.NOT_INPUT and (words or also):
        words += at * bool(words)
        share = _steady_share(found)
        loader = "the loader keeps up" if share < KEEPS_UP else f"the loop waited {percent(share)} of its time"
        said = f"{Bound.PROGRAM.value}: {'; '.join(filter(None, (words, *also)))}; {loader}"
        also = []
    elif kind is Bound.NOT_INPUT:
        said = _keeping_up(found, step, at, parts, limit)
    elif kind is Bound.START_UP:
        time = max(1, found.total + found.consumer)
        name = "shutdown-bound" if found.ends_slowly else kind.value
        starts = {Cause.START_UP.value: found.causes[Cause.START_UP], "the first batch": sum(found.opening.values())}
        what = ", ".join(f"{percent(ns / time)} for {does}" for does, ns in starts.items() if ns >= NAMED * time)
        what = f", {what}" * (not words or wording.all_kinds)
        said = ": ".join(filter(None, (f"{name}: {_waited(found.total, time)}{what}", words and words + at)))
    else:
        said = _steady(situation, words, at, wording)
    return "; ".join((said, *also, *early))


def _waited(ns: int, time: int) -> str:
    return f"the loop waited {percent(ns / time)} of its time"


def _keeping_up(found: Waiting, does: str, at: str, parts: Mapping[str, int], limit: SlowReason | None) -> str:
    whole = max(1, found.total + found.step_time - found.once)
    step, with_start = found.step_time / whole, found.consumer / max(1, found.total + found.consumer)
    also = f" ({percent(with_start)} with start-up and shutdown)" * (step - with_start >= 0.05)
    takes = f"the training step takes {percent(step)} of the loop's time"
    if next(iter(parts), OTHER) != OTHER:  # the parts say more than the line
        shares = {name: ns / whole for name, ns in parts.items() if name != OTHER}
        named = [f"{name} {percent(share)}" for name, share in shares.items() if share >= NAMED][:MOST_NAMED]
        at, also, takes = "", "", f"{takes}: {', '.join(named)}"
    elif limit is not None:
        also = ""
    elif does:
        takes += f" and mostly {does}"
    keeps_up, bound = ("the loader keeps up, ", "") if limit is None else ("", f"; {limit.brief}")
    return f"{Bound.NOT_INPUT.value}: {keeps_up}{takes}{at}{also * (not at)}{bound}"


def _parts_in_words(parts: Mapping[str, int]) -> str:
    said = ", ".join(f"{name} {duration(ns)}" for name, ns in parts.items() if ns >= LEAST * sum(parts.values()))
    return f"the training step, by the host's time: {said}"


def _steady(situation: Situation, words: str, at: str, wording: _Wording) -> str:
    """What the loop waits for in the steady state: one kind, or two if neither wins.

    words: the reason's, "" = none; at: the line of the program.
    """
    kind, cause, found = situation.kind, situation.cause, situation.found
    once = found.once
    waited, time = found.total - once, max(1, found.total + found.step_time - once)
    loop = _waited(waited, time)
    if kind is Bound.SUPPLY and found.of(Bound.READING) > found.of(Bound.SUPPLY):
        assert cause is not None
        how = f": {words}" if words else _how(situation)
        return f"{kind.value}: {loop}, and meanwhile its workers were busy, mostly with {cause.value}{how}{at}"
    if words and (kind is Bound.HEAD_OF_LINE or not wording.all_kinds):
        return f"{kind.value}: {loop}: {words}{at}"  # the kind's name, or the reason, says what for
    others = sorted((one for one in dict.fromkeys(KIND_OF.values()) if one is not kind), key=lambda one: -found.of(one))
    both = [kind, *(one for one in others[:1] if wording.all_kinds and found.of(one) >= MARGIN * found.of(kind))]
    said = [_what(situation, one, wording.how and not words, "" if words else at * (one is kind)) for one in both]
    parts = [f"{percent(found.of(one) / time)} for {what}" for one, what in zip(both, said, strict=True)]
    alone = found.of(kind) >= NEARLY_ALL * waited
    what = f" for {said[0]}" if alone else f", {', and '.join(parts)}"
    why = f": {words}{at}" if words else _whose(found) if kind is Bound.HEAD_OF_LINE and not at else ""
    return f"{kind.value}: {loop}{what}{why}"


def _what(situation: Situation, kind: Bound, with_how: bool, at: str) -> str:
    """What the loop waits for, if this kind bounds it. with_how: and what samples mostly do; at: the program's line."""
    found = situation.found
    mine = [cause for cause in KIND_OF if KIND_OF[cause] is kind]
    cause = situation.cause if situation.cause in mine else found.largest(kind)
    assert cause is not None
    how = _how(situation) if with_how and cause is situation.cause else ""
    if cause not in _MAKE:
        return cause.value + at
    name = str(situation.params.get("dataset" if cause is Cause.SAMPLES else "collate_fn") or "")
    own = name if cause is not Cause.IPC and len(name) <= LONGEST_NAME and name != "default_collate" else ""
    own = at or (f" ({own})" if own else "")
    if not found.workers:
        return f"{cause.value}{own}, without workers{how}"
    return f"{cause.value if at else f'workers that {_MAKE[cause]}'}{own}{how}"


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
    start_up = found.once
    again = found.alike > 1 and found.workers > 0
    if found.batches < FEW_BATCHES and not again:
        return Bound.TOO_FEW, None
    whole = max(1, found.total + found.consumer)
    if 2 * start_up > found.total and start_up / whole >= (KEEPS_UP if again else ONCE):
        return Bound.START_UP, Cause.START_UP
    if found.batches < FEW_BATCHES:
        return Bound.TOO_FEW, None
    if _steady_share(found) < KEEPS_UP:
        return Bound.NOT_INPUT, None
    kind = max(KIND_OF.values(), key=found.of)
    if kind is Bound.READING and found.workers and found.spare < SPARE:
        kind = Bound.SUPPLY
    return kind, found.largest(kind)


def _beside_the_start(found: Waiting, why: Callable[[Bound, Cause | None], Reasons]) -> SlowReason | None:
    """The reason for the waits between starts, if they are no shorter than MARGIN of the starts; None = no reason."""
    start_up = found.once
    if found.batches < FEW_BATCHES or found.total - start_up < MARGIN * start_up:
        return None
    kind = max(KIND_OF.values(), key=found.of)
    return why(kind, found.largest(kind)).reason


def _apart(found: Waiting, kind: Bound) -> str:
    """Why start-up is not the verdict, if the loop waited longer for it than for all causes of `kind`."""
    once = found.causes[Cause.START_UP]
    if kind is Bound.START_UP or once <= found.of(kind):
        return ""
    more = f"{Cause.START_UP.value} took {duration(once)} more"
    return f"{more}, which does not count here: a longer run reduces its share"


def _whose(found: Waiting) -> str:
    sample = f", sample {found.sample}" if found.sample >= 0 else ""
    return f" (longest: task {found.task} of worker {found.worker}{sample})" if found.task >= 0 else ""


def _evidence(found: Waiting, cpus: float | None) -> tuple[str, ...]:
    ranked = sorted((c for c in Cause if found.share(c) >= 0.005), key=lambda c: -found.causes[c])
    where = "inside next() and while workers started and ended" if found.causes[Cause.START_UP] else "inside next()"
    parts = ", ".join(f"{cause.value} {duration(found.causes[cause])}" for cause in ranked)
    steps = ", ".join(f"{cause.value} {duration(ns)}" for cause, ns in found.work.items())
    uneven, first = found.share_of(found.uneven) >= UNEVEN, found.share_of(found.first) >= ONE_SIDED
    alike = f"{found.alike} iterators with the same parameters"
    lines = [
        (True, f"waited {duration(found.total)} {where}: {parts}"),
        (found.workers, f"while the loop waited for a result, workers fetched for {percent(found.busy)} of their time"),
        (found.cpu.wall, found.cpu.line(cpus)),
        (uneven, f"{duration(found.uneven)} of that came after worker {found.out} had run out of data"),
        (first, f"{duration(found.first)} of that was for the first batches of epochs"),
        (sum(found.work.values()), f"work on the batches: {steps}"),
        (found.together > 1, f"{found.together} of {alike}, taken together"),
        (found.alike > 1 and found.together == 1, f"one of {alike}"),
    ]
    return tuple(line for holds, line in lines if holds)
