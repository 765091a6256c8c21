"""How many workers: from what a batch costs, and what this process may use. Pure decisions.

The training loop takes a batch each `step + take` seconds at most. All processes together need CPU time for it, which
the CPUs give in `(worker_cpu + own_cpu) / cpus` seconds at least. The larger of the two is the least `period`. Workers
that need `fetch + send` seconds for a batch keep up with it if there are `(fetch + send) / period` of them. If the CPUs
limit, some more keep them busy: as many as wait, instead of computing, out of a worker for each CPU. One slow batch
holds up a loop that wants them in order; the others make `prefetch_factor` batches each meanwhile, so `longest /
(prefetch_factor x period)` workers bridge it. Loading in the loop itself takes `fetch + step`. With workers, the loop
takes longer than these bounds by what waking up costs: by as much as it did when it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SPARE: Final = 1.1
"""So many times as many workers as keep up on average with the loop: batches differ."""

LESS: Final = 0.9
"""No workers are chosen only if the loop is to take less than this share of its time with workers: it is for good.

With a number that was tried, the time is known, and a fetch costs less without workers than with: no share is asked.
"""

MOST_PER_CPU: Final = 8
"""Most workers for each CPU: more of them wait for something else together, and each is a process."""


@dataclass(frozen=True)
class BatchCosts:
    """What a batch costs on average, in s. fetch: in a worker; send: CPU time that it takes there besides.

    longest: of all fetches; worker_cpu: CPU time of the worker's process. step: of the training loop; take: CPU time of
    the loop's thread for a batch that workers have made; own_cpu: CPU time of this process for both. period: from a
    batch to the next with so many `workers`; waits: those of it in next(). size: bytes of the larger of the first two
    batches' tensors.
    """

    fetch: float
    send: float
    longest: float
    worker_cpu: float
    step: float
    take: float
    own_cpu: float
    period: float
    waits: float
    size: int
    workers: int


@dataclass(frozen=True)
class Limits:
    """What bounds the workers. cpus: that this rank may count on; memory: bytes that batches and workers may take.

    worker_bytes: a worker's own memory. alone: whether there may be no workers. started: the most that could be.
    """

    cpus: float
    memory: float = math.inf
    worker_bytes: int = 0
    alone: bool = True
    started: float = math.inf

    def most(self, size: int, prefetch_factor: int) -> tuple[int, str]:
        """The most workers whose batches have so many bytes, and what bounds them."""
        each = max(1, self.worker_bytes + size * prefetch_factor)
        bounds = {
            f"{self.cpus:g} CPUs, {MOST_PER_CPU} workers each": max(1.0, self.cpus * MOST_PER_CPU),
            f"memory: {_mib(each)} a worker, {_mib(self.memory)} to take": self.memory / each,
            "this process may start no more": self.started,
        }
        why = min(bounds, key=lambda name: bounds[name])
        return int(max(0 if self.alone else 1, bounds[why])), why


@dataclass(frozen=True)
class Choice:
    """A number of workers, and why, in words."""

    workers: int
    reason: str


def choose(seen: BatchCosts, limits: Limits, prefetch_factor: int, periods: Mapping[int, float]) -> Choice:
    """The number of workers for batches as they were measured. periods: s that those take which were tried."""
    fetch, loop, cpu = seen.fetch + seen.send, seen.step + seen.take, (seen.worker_cpu + seen.own_cpu) / limits.cpus
    period, limit = max((loop, "the training loop limits"), (cpu, "the CPUs limit"))
    waiting = limits.cpus * max(0.0, 1 - seen.worker_cpu / fetch)
    enough = SPARE * fetch / period if loop > cpu else fetch / period + waiting
    wanted = max(1, math.ceil(enough), math.ceil(seen.longest / (prefetch_factor * period)))
    most, bound = limits.most(seen.size, prefetch_factor)
    workers = min(wanted, most)
    costs = f"a batch takes {_ms(fetch)} in a worker, and the loop {_ms(loop)}"
    slack = max(1.0, seen.period / max(period, fetch / seen.workers))
    takes = max(LESS * slack * max(period, fetch / max(1, workers)), periods.get(workers, 0.0))
    if limits.alone and workers and seen.fetch + seen.step < takes:
        return Choice(0, f"{costs}: to send batches costs more than workers save")
    if workers < wanted:
        return Choice(workers, f"{costs}: {wanted} would keep up; {bound}")
    return Choice(workers, f"{costs}: {limit}")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _mib(size: float) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
