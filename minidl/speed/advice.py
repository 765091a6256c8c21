"""What to do next about a loader's speed: one table, by what bounds the loader.

Interface: `next_step(Situation(...))`; of the kind's rows, the first whose condition holds gives the advice. In its
text, {found} is the Waiting, and other names are properties of the Situation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from minidl.speed.cpu_use import CpuLimit
from minidl.speed.ledger import HANDLE_BYTES, LARGE_PAYLOAD, MANY_TENSORS
from minidl.speed.wall_clock import Bound, Cause, Waiting
from minidl.tracefile.words import counted, size

ONE_SIDED: Final = 0.7
"""The share of head-of-line blocking from which one worker is the cause; also the share of epochs' first batches."""

UNEVEN: Final = 0.3
"""The share of waiting with a worker out of data from which even shards are the first remedy."""

LARGE_SAMPLES: Final = 1 << 20
"""Bytes of a batch's tensor from which copying dominates collation, and not the number of tensors."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What advice depends on. cpus: that the run could use, None = unknown."""

    kind: Bound
    cause: Cause | None
    found: Waiting
    params: Mapping[str, Any]
    cpus: float | None

    @property
    def limit(self) -> CpuLimit:
        return self.found.cpu.held(self.cpus)[0]

    @property
    def at_work(self) -> float:
        """The average number of fetching workers while the loop waited."""
        return self.found.busy * self.found.workers

    @property
    def shares_cpus(self) -> bool:
        """Whether the reader may lack a CPU because of the workers."""
        return self.limit is not CpuLimit.WAITS and self.cpus is not None and self.at_work >= self.cpus

    @property
    def in_cpus(self) -> str:
        return f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}"

    @property
    def workers(self) -> str:
        return counted(self.found.workers, "worker")

    @property
    def crowd(self) -> str:
        """The workers and CPUs of a run that lacks CPUs; whether other work uses them."""
        there = "" if self.cpus is None else f" ({self.in_cpus} for {self.workers})"
        rest = self.cpus is not None and self.found.cpu.at_once < self.cpus / 2
        used = f"; other work uses most of them: fetching used {self.found.cpu.at_once:.1f} on average"
        return f"{there}, so more workers do not help{used * rest}"

    @property
    def pickled(self) -> str:
        return size(self.found.payload)


_UNORDERED = "set in_order=False if the order does not matter; otherwise "
_LARGER = "use larger batches: rebuilding costs the same for each batch, whatever its size"
_BUSY = "{s.at_work:.1f} workers on average were busy and shared {s.in_cpus} with the reader"
_SLOW_END = "find what delays a worker's end (py-spy dump while it is joined): a thread or a library's exit handler"
_CHEAP_START = "make the start cheaper: fewer workers, less work in worker_init_fn, and with spawn fewer imports and a "
_CHEAP_START += "small pickled dataset"
_ENOUGH = "make samples cheaper: there are {s.workers} for {s.in_cpus}, so more workers "

_Row = tuple[Callable[[Situation], bool], str]


def _always(s: Situation) -> bool:
    return True


_SAMPLES: Final[tuple[_Row, ...]] = (
    (lambda s: s.limit is CpuLimit.WAITS,
     "use more workers, which wait together; or let samples wait less: a cache, a local copy, larger files"),
    (lambda s: s.limit is CpuLimit.SHORT, "make samples cheaper, or use more CPUs: they are short{s.crowd}"),
    (lambda s: s.cpus is None, "use more workers if CPUs are idle, or make samples cheaper"),
    (lambda s: s.found.workers < (s.cpus or 0),
     "use more workers ({found.workers} for {s.in_cpus}), or make samples cheaper"),
    (lambda s: s.limit is CpuLimit.COMPUTES, f"{_ENOUGH}do not help samples that compute"),
    (_always, f"{_ENOUGH}help only if samples wait (disk, network) and do not compute"),
)  # fmt: skip
"""Workers can wait together, but compute together only with enough CPUs."""

_READING: Final[tuple[_Row, ...]] = (
    (lambda s: s.cause is Cause.PIN, "send fewer bytes per batch, or do not pin"),
    (lambda s: s.found.payload > max(LARGE_PAYLOAD, (s.found.tensors + 1) * HANDLE_BYTES),
     "send the data as tensors, which travel by handle: {s.pickled} of each batch are pickled; see `minidl ledger`"),
    (lambda s: s.found.tensors > MANY_TENSORS,
     "join the tensors of a batch: it has {found.tensors:.0f}, and each of them costs a mapping"),
    (lambda s: not s.shares_cpus, _LARGER),
    (lambda s: s.limit is CpuLimit.UNKNOWN,
     f"if samples compute, make them cheaper: {_BUSY}; if they wait (disk, network), {_LARGER}"),
    (_always, f"make samples cheaper: {_BUSY}"),
)  # fmt: skip
"""The cost of rebuilding a batch grows with the pickled bytes and the number of tensors."""

_SUPPLY: Final[tuple[_Row, ...]] = (
    (lambda s: not s.found.workers,
     "use num_workers=1 or more, so that workers make batches during the training step"),
    (lambda s: s.found.share_of(s.found.uneven) >= UNEVEN,
     "make the shards even: worker {found.out} ran out of data and idled while other workers had batches left"),
    (lambda s: s.found.share_of(s.found.first) >= ONE_SIDED,
     "make epochs longer: workers begin no batch before its epoch, so the loop waits for each first one"),
    (lambda s: s.cause is Cause.IPC and s.params.get("transport") == "arena",
     "send fewer bytes in fewer tensors; see `minidl ledger`"),
    (lambda s: s.cause is Cause.IPC,
     'send fewer bytes in fewer tensors; see `minidl ledger`; or use transport="arena", without segments'),
    (lambda s: s.cause is Cause.COLLATE and s.limit is CpuLimit.WAITS,
     "find what collation waits for (py-spy dump of a worker); or use more workers, which wait together"),
    (lambda s: s.cause is Cause.COLLATE and s.params.get("collate_fn", "default_collate") != "default_collate",
     "make collation cheaper: default_collate, unlike your own collate_fn, stacks into shared memory without another "
     "copy"),
    (lambda s: s.cause is Cause.COLLATE and s.found.shared > LARGE_SAMPLES * max(1.0, s.found.tensors),
     "make collation cheaper: use fewer bytes per sample (uint8 instead of float32, converted on the device)"),
    (lambda s: s.cause is Cause.COLLATE, "make collation cheaper: use fewer and larger tensors per sample"),
    *_SAMPLES,
)  # fmt: skip

_START_UP: Final[tuple[_Row, ...]] = (
    (lambda s: s.found.ends_slowly and s.found.alike > 1,
     f"use persistent_workers=True, which ends workers only once; or {_SLOW_END}"),
    (lambda s: s.found.ends_slowly, _SLOW_END),
    (lambda s: s.found.alike > 1 and not s.params.get("persistent_workers"),
     f"use persistent_workers=True, which starts workers once and not in each epoch; or {_CHEAP_START}"),
    (_always, f"{_CHEAP_START}; it happens once, so its share falls in a longer run"),
)  # fmt: skip

ADVICE: Final[dict[Bound, tuple[_Row, ...]]] = {
    Bound.NOT_INPUT: ((_always, "make the training step faster: the loader has time to spare"),),
    Bound.SUPPLY: _SUPPLY,
    Bound.HEAD_OF_LINE: (
        (lambda s: s.found.lasting >= ONE_SIDED,
         f"{_UNORDERED}find out why worker {{found.worker}} is slower than the others (it blocked the line for "
         "{found.lasting:.0%} of the time): its samples (batch n goes to worker n mod {found.workers}: shuffle) or its "
         "process"),
        (_always, f"{_UNORDERED}spread slow samples over the batches, or raise prefetch_factor"),
    ),
    Bound.READING: _READING,
    Bound.START_UP: _START_UP,
    Bound.SAMPLER: (
        (_always, "make the sampler faster: it runs in the loader's thread, so more workers do not help"),
    ),
    Bound.OVERHEAD: ((_always, "use larger batches: each batch costs the same messages, whatever its size"),),
    Bound.TOO_FEW: (),
    Bound.PROGRAM: (),
    Bound.UNSEEN: ((_always, "record it again"),),
}  # fmt: skip


def next_step(situation: Situation) -> str:
    """What to do next; "" = nothing is known to help."""
    rows = ADVICE[situation.kind]
    return next((text.format(s=situation, found=situation.found) for holds, text in rows if holds(situation)), "")
