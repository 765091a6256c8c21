"""What two recordings with different numbers of workers tell together: how much workers hinder each other.

Interface: `fitted(a, b)` -> the costs of recording A, with what only one worker can use at a time (a disk, a lock), and
by how much CPU time grows with each CPU that is in use (cores that share their parts, memory's bandwidth).

Rules of use: that part of a fetch's waiting is chosen with which simulations of both settings wait as long as recorded.
The rest is that of the recording with fewer workers, where the queue is shorter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from minidl.speed.plan.loading import CPU, WAIT, load
from minidl.speed.plan.recorded import Recorded, largest
from minidl.speed.plan.settings import LoaderSetting, PlanError
from minidl.tracefile.arrays import Floats
from minidl.tracefile.words import counted, duration, percent

SAME: Final = ("dataset", "dataset_length", "dataset_kind", "batch_size", "collate_fn")
"""What two recordings of one program have in common."""

NOTABLE: Final = 1.1
"""A smaller factor between two recordings is noise."""

ROUNDS: Final = 3


def fitted(a: Recorded, b: Recorded) -> Recorded:
    """Return A's costs with what both recordings tell; if one is of threads, those of the other one.

    Raises PlanError for recordings of one number of workers, unless one has processes and one threads.
    """
    differs = [name for name in SAME if a.params.get(name) != b.params.get(name)]
    if differs:
        name = differs[0]
        raise PlanError(f"{a.trace.path} and {b.trace.path} are of different loaders: {name} is {a.params.get(name)!r} "
                        f"and {b.params.get(name)!r}: record one program with two numbers of workers")  # fmt: skip
    if a.base.threads != b.base.threads:
        return _with_lock(*sorted((a, b), key=lambda one: one.base.threads))
    few, many = sorted((a, b), key=lambda one: one.base.num_workers)
    if few.base.num_workers == many.base.num_workers:
        both = counted(few.base.num_workers, "worker")
        raise PlanError(
            f"{a.trace.path} and {b.trace.path} have {both} each: record one with another number of workers"
        )
    return _with_queue(_with_slowdown(a, few, many), few, many)


def _with_lock(processes: Recorded, threads: Recorded) -> Recorded:
    """For how much of their CPU time threads hold the interpreter's lock: simulated, they are as fast as recorded."""
    setting, order = threads.base, processes.order(threads.base)
    held = largest(
        1.0, lambda held: load(replace(processes, held=held).costs(setting), setting, order).by_s > threads.rate
    )
    words = f"workers that are threads hold the interpreter's lock for {percent(held)} of their CPU time"
    return replace(processes, held=held, notes=[*processes.notes, words])


def _with_slowdown(a: Recorded, few: Recorded, many: Recorded) -> Recorded:
    """CPU time that grows with the number of CPUs in use, if it grew by a NOTABLE factor."""
    once, more = (max(1.0, min(one.base.num_workers, one.base.cpus)) for one in (few, many))
    cost, larger = (float(one.steps.fetch[CPU].mean()) for one in (few, many))
    if larger < NOTABLE * cost or more == once:
        return a
    alone = max(cost * (more - 1) - larger * (once - 1), larger / 10)
    slower = min(1.0, (larger - cost) / alone)
    words = f"CPU time of a fetch grows by {percent(slower)} with each CPU in use"
    return replace(a, slower=slower, notes=[*a.notes, words])


def _with_queue(a: Recorded, few: Recorded, many: Recorded) -> Recorded:
    """What only one worker can use at a time, if waiting made fetches longer by a NOTABLE factor."""
    waited, longer = (float(one.steps.fetch[WAIT].mean()) for one in (few, many))
    whole = waited + float(few.steps.fetch[CPU].mean())
    if whole - waited + longer < NOTABLE * whole or not few.base.num_workers:
        return a

    def waits_less(exclusive: float) -> bool:
        trial = _queued(few, exclusive)
        wait = float(trial.steps.fetch[WAIT].mean()) + _queue(trial, replace(many.base, transport=few.base.transport))
        return wait < longer

    exclusive = largest(waited, waits_less)
    rest = float(_queued(few, exclusive).steps.fetch[WAIT].mean()) / max(1.0, float(a.steps.fetch[WAIT].mean()))
    words = f"workers use something one at a time for {duration(exclusive)} of each fetch, as a disk or a lock"
    return replace(_waiting(a, exclusive, a.steps.fetch[WAIT] * rest), notes=[*a.notes, words])


def _queued(recorded: Recorded, exclusive: float) -> Recorded:
    """The recording with a part of its waits as exclusive use, and the rest without the queue for it."""
    trial = replace(recorded, steps=replace(recorded.steps, exclusive=exclusive))
    for _ in range(ROUNDS):
        trial = _waiting(recorded, exclusive, recorded.steps.fetch[WAIT] - _queue(trial, recorded.base))
    return trial


def _waiting(recorded: Recorded, exclusive: float, waits: Floats) -> Recorded:
    """The recording with these waits of fetches, of which a part is exclusive use."""
    fetch = np.stack([recorded.steps.fetch[CPU], np.maximum(exclusive, waits)])
    return replace(recorded, steps=replace(recorded.steps, exclusive=exclusive, fetch=fetch))


def _queue(recorded: Recorded, setting: LoaderSetting) -> float:
    """How long a simulated fetch waits for its turn, ns."""
    order = recorded.order(setting)
    return load(recorded.costs(setting), setting, order).queued / len(order)
