"""A gate for CI: whether run B is worse than run A by more than a limit, beyond the noise of the two runs.

Interface: `limit("slower:5%")` -> `Limit`; `judged(diff, traces, limits)` -> a `GateResult` for each.

Rules of use: a limit is exceeded if the whole interval of 95% of the change lies beyond it, so that noise within the
runs fails no build. The peak of memory, and the first batches of fewer than four epochs, have no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from minidl.speed.diff import Diff
from minidl.speed.intervals import LIKELY, Rate, Ratio, ratio
from minidl.speed.side import Side
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Ints
from minidl.tracefile.batches import Batches, bytes_in_flight
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import durations
from minidl.tracefile.words import duration, percent, size


@dataclass(frozen=True, slots=True)
class Limit:
    """A change for the worse that is allowed: what changes, and the largest share. See `KINDS`."""

    kind: str
    share: float

    def __str__(self) -> str:
        return f"{self.kind}:{100 * self.share:g}%"


@dataclass(frozen=True, slots=True)
class Worse:
    """How much worse B is, as a share: the best estimate and its interval; NaN = too few batches. words: a to b."""

    share: float
    low: float
    high: float
    words: str


@dataclass(frozen=True, slots=True)
class GateResult:
    """Whether a limit is exceeded; None = there are too few batches to say."""

    limit: Limit
    worse: Worse

    @property
    def exceeded(self) -> bool | None:
        return None if math.isnan(self.worse.low) else self.worse.low > self.limit.share

    @property
    def reason(self) -> str:
        """The judgement in a sentence."""
        limit, worse = self.limit, self.worse
        about = f"{limit}: {_ABOUT[limit.kind]}, {worse.words}"
        if self.exceeded is None:
            return f"{about}: this cannot be judged; record longer runs, or leave the limit out"
        between = f", interval {percent_of(worse.low)} to {percent_of(worse.high)}" * (worse.low < worse.high)
        change = f"{about} ({percent_of(worse.share)}{between})"
        if self.exceeded:
            return f"{change}: more than {percent(limit.share)}"
        return f"{change}: within the limit" if worse.share <= limit.share else f"{change}: not certain"

    def facts(self) -> dict[str, Any]:
        """The figures, for JSON."""
        known = [None if math.isnan(one) else one for one in (self.worse.share, self.worse.low, self.worse.high)]
        return {"limit": str(self.limit), "exceeded": self.exceeded, "reason": self.reason,
                **dict(zip(("change", "low", "high"), known, strict=True))}  # fmt: skip


def percent_of(share: float) -> str:
    """A change: "+6%", "-1%"."""
    return f"{100 * share:+.3g}%"


# --- What may change --------------------------------------------------------------------------------------------------
def _slower(diff: Diff, traces: Sequence[Trace]) -> Worse:
    """The time that a sample, or a batch, takes."""
    a, b = (rate.by_s for rate in diff.rates)
    unit = "samples/s" if diff.in_samples else "batches/s"
    return _longer(ratio(diff.rates[1], diff.rates[0]), f"{b:.4g} instead of {a:.4g} {unit}")


def _waiting(diff: Diff, traces: Sequence[Trace]) -> Worse:
    """The share of the loop's time that it waits for batches, in points."""
    shares = [each.waiting_share for each in (diff.a, diff.b)]
    spreads = [share * _variance(each) ** 0.5 for share, each in zip(shares, (diff.a, diff.b), strict=True)]
    change, reach = shares[1] - shares[0], LIKELY * math.hypot(*spreads)
    return Worse(
        change,
        max(-shares[0], change - reach),
        min(1 - shares[0], change + reach),
        f"{percent(shares[1])} instead of {percent(shares[0])}",
    )


def _variance(side: Side) -> float:
    waits = side.stages.get(("next", -1))
    return waits.rate.variance if waits else float("nan")


def _first_batch(diff: Diff, traces: Sequence[Trace]) -> Worse:
    """How long the loop waits for an epoch's first batch."""
    took = [_firsts(trace, each) for trace, each in zip(traces, (diff.a, diff.b), strict=True)]
    if not all(map(len, took)):
        return _longer(Ratio(*[float("nan")] * 3), "not recorded in one")
    means = [float(each.mean()) for each in took]
    rates = [Rate.of([(np.ones_like(each), each)]) for each in took]
    found = ratio(rates[1], rates[0])
    found = found if found.is_known else Ratio(*[means[1] / means[0]] * 3)
    return _longer(found, f"{duration(means[1])} instead of {duration(means[0])}")


def _firsts(trace: Trace, side: Side) -> Ints:
    spans = trace.spans()
    mine = spans[np.isin(spans["loader"], side.loaders) & (spans["code"] == ev.NEXT[0]) & (spans["end"] >= 0)]
    return durations(mine[(mine["ey"] == ev.Outcome.DATA) & (mine["ex"] == 1)])


def _memory(diff: Diff, traces: Sequence[Trace]) -> Worse:
    """The peak of the bytes that are made and not yet yielded."""
    a, b = (_peak(trace, each) for trace, each in zip(traces, (diff.a, diff.b), strict=True))
    share = b / a - 1 if a else float("nan")
    return Worse(share, share, share, f"{size(b)} instead of {size(a)}")


def _peak(trace: Trace, side: Side) -> int:
    batches = Batches(trace.events)
    _, values = bytes_in_flight(batches, np.isin(batches.table["loader"], side.loaders))
    return int(values.max(initial=0))


def _longer(found: Ratio, words: str) -> Worse:
    return Worse(found.factor - 1, found.low - 1, found.high - 1, words)


KINDS: Final[dict[str, Callable[[Diff, Sequence[Trace]], Worse]]] = {
    "slower": _slower, "waiting": _waiting, "first-batch": _first_batch, "memory": _memory,
}  # fmt: skip
"""What a limit may be about, and what measures it."""

_ABOUT: Final = {
    "slower": "the time of a sample", "waiting": "waiting for batches, in points of the loop's time",
    "first-batch": "the wait for an epoch's first batch", "memory": "the peak of bytes in flight",
}  # fmt: skip


def limit(text: str) -> Limit:
    """Read "slower:5%". Raises ValueError."""
    kind, _, share = text.partition(":")
    value = float(share.removesuffix("%")) / 100
    if not share.endswith("%") or kind not in KINDS or not 0 <= value < float("inf"):
        raise ValueError(text)
    return Limit(kind, value)


def judged(diff: Diff, traces: Sequence[Trace], limits: Sequence[Limit]) -> list[GateResult]:
    """Judge B by each limit. traces: A's and B's, which `diff` compares."""
    return [GateResult(one, KINDS[one.kind](diff, traces)) for one in limits]
