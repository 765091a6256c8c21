"""Rules on the actors: start, resumption, stop signals, death, and the order in which they end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import numpy as np

from minidl.check.view import LOADER_THREAD, LoaderView, Violation, rule
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Positions
from minidl.tracefile.events import Actor, Message, QueueId
from minidl.tracefile.words import name_of


@rule(
    "started",
    "a worker is ready only after the loader has begun to start it, in the process that was started, seeded by its id",
    "A process that the loader did not start works for it, or workers share a seed and draw equal random numbers.",
    needs="all",
)
def started(loader: LoaderView) -> Iterator[Violation]:
    ready, begins, ends = (loader.pick(code) for code in (ev.WORKER_READY, *ev.WORKER_START))
    for row in ready:
        worker = int(loader.worker[row])
        begun, end = loader.of_worker(begins, worker), loader.of_worker(ends, worker)
        if not len(begun) or loader.time[begun[0]] > loader.time[row]:
            missing = f"worker_start of worker {worker}"
            yield loader.broken("the loader has not started this worker", row, *begun[:1], missing=missing)
        elif len(end) and loader.x[end[0]] != loader.x[row]:
            late = sorted((int(row), int(end[0])), reverse=True)
            yield loader.broken(f"pid {loader.x[late[0]]}; it was {loader.x[late[1]]}", *late)
    base = loader.z[ready] - loader.worker[ready]
    for at in np.flatnonzero(base[:1] != base):
        told = f"seed {loader.z[ready[at]]}; by its id and worker {loader.worker[ready[0]]}'s seed it is "
        yield loader.broken(told + str(base[0] + loader.worker[ready[at]]), ready[at], ready[0])


_NONE: Final = 0
_LAST_STEP: Final = {
    ev.WORKER_INIT[0]: (_NONE,),
    ev.MAKE_FETCHER[0]: (_NONE, ev.WORKER_INIT[1], ev.MAKE_FETCHER[1], ev.RESUME_ACK),
    ev.WORKER_READY: (ev.WORKER_INIT[1], ev.MAKE_FETCHER[1]),  # the first alone: worker_init_fn has failed
    ev.FETCH[0]: (ev.WORKER_INIT[1], ev.MAKE_FETCHER[1]),
}
"""What a worker's last step of `_STEPS` may be when an event comes."""

_STEPS: Final = {
    _NONE: ("the worker has not been initialised", ev.MAKE_FETCHER[1]),
    ev.WORKER_INIT[0]: ("worker_init_fn has not returned", ev.WORKER_INIT[1]),
    ev.WORKER_INIT[1]: ("worker_init_fn was called before", None),
    ev.MAKE_FETCHER[0]: ("the fetcher is not made yet", ev.MAKE_FETCHER[1]),
    ev.MAKE_FETCHER[1]: ("the fetcher was made before", None),
    ev.RESUME_ACK: ("the worker has no fetcher for the new epoch", ev.MAKE_FETCHER[1]),
}
"""Each step of an initialisation: what holds after it, in words, and the event that should have come since, if one."""


@rule(
    "initialised",
    "a worker calls worker_init_fn first and once, then makes a fetcher, and only then is ready and fetches",
    "Samples come from a dataset that is not set up: worker_init_fn or __iter__ has not run in the worker.",
    needs="all",
)
def initialised(loader: LoaderView) -> Iterator[Violation]:
    if not len(loader.pick(*ev.WORKER_INIT, *ev.MAKE_FETCHER)):
        return  # a trace from before these events, or without workers
    steps = loader.pick(*(code for code in _STEPS if code))
    for code, allowed in _LAST_STEP.items():
        rows = loader.pick(code)
        for worker in np.unique(loader.worker[rows]).tolist():
            mine = loader.of_worker(rows, worker)
            last = loader.last_before(mine, loader.of_worker(steps, worker))
            came = np.where(last >= 0, loader.code[last], _NONE)
            for at in np.flatnonzero(~np.isin(came, allowed)):
                reason, missing = _STEPS[int(came[at])]
                shown = last[at : at + 1][last[at : at + 1] >= 0]
                yield loader.broken(reason, mine[at], *shown, missing=name_of(missing) if missing else "")


@rule(
    "messages",
    "a new epoch is announced once; it and each sentinel are received once per sending, and later",
    "An actor acted on a message that was not sent.",
    needs="all",
)
def messages(loader: LoaderView) -> Iterator[Violation]:
    if not loader.records(ev.SENTINEL_PUT):
        return
    told, heard = loader.pick(ev.SENTINEL_PUT), loader.pick(ev.SENTINEL_GET)
    resumed = (
        loader.pick(ev.RESUME_PUT),
        loader.pick(ev.RESUME_ACK),
        *((loader.about(ev.RESULT_GET[1], Message.RESUME),) if loader.records(ev.RESULT_GET[1]) else ()),
    )
    everybody = np.unique(loader.worker[np.concatenate([told, heard, *resumed])]).tolist()
    for worker in (worker for worker in everybody if worker not in loader.lacks.absent):
        puts = loader.of_worker(resumed[0], worker)
        for before, row in itertools.pairwise(puts.tolist()):
            if loader.x[row] == loader.x[before]:
                yield loader.broken(f"epoch {loader.x[row]} was announced to it before", row, before)
        for which in QueueId:
            sent, got = loader.about(ev.SENTINEL_PUT, which), loader.about(ev.SENTINEL_GET, which)
            yield from _answered(loader, loader.of_worker(sent, worker), loader.of_worker(got, worker))
        for before, after in itertools.pairwise([loader.of_worker(rows, worker) for rows in resumed]):
            yield from _answered(loader, before, after)


def _answered(loader: LoaderView, before: Positions, after: Positions) -> Iterator[Violation]:
    """The n-th of `after` answers the n-th of `before`, and comes later."""
    for number, row in enumerate(after[len(before) :], len(before) + 1):
        told = f"it is number {number}, and {len(before)} were sent"
        yield loader.broken(told, row, *after[: number - 1], *before, missing="what it answers")
    for sent, got in zip(before, after, strict=False):
        if loader.time[sent] > loader.time[got]:
            yield loader.broken(f"{name_of(int(loader.code[sent]))} comes later", got, sent)


@rule(
    "told-to-leave",
    "after its sentinel, a worker gets no further message and does nothing more",
    "No actor waits for data after the sentinel, and its shared memory may be lost.",
)
def told_to_leave(loader: LoaderView) -> Iterator[Violation]:
    told, heard = (loader.about(code, QueueId.INDEX) for code in (ev.SENTINEL_PUT, ev.SENTINEL_GET))
    work = loader.pick(ev.INDEX_GET[0], *ev.FETCH, ev.RESULT_PUT, ev.RESUME_ACK)
    living = told[~np.isin(loader.worker[told], loader.worker[loader.pick(ev.FOUND_DEAD)])]
    for signals, after in (
        (told, loader.pick(ev.INDEX_PUT)),
        (living, loader.pick(ev.RESUME_PUT)),  # the next epoch's message goes to every worker, also to a dead one
        (heard, work),
        (loader.pick(ev.WORKER_EXIT), np.union1d(work, loader.pick(ev.WORKER_EXIT))),
        (living, told),
    ):
        for message in signals:
            for row in loader.of_worker(after[after > message], int(loader.worker[message]))[:1]:
                told_by = name_of(int(loader.code[message]))
                yield loader.broken(f"after this worker's {told_by}", row, message)


@rule(
    "gone",
    "an actor that has ended does nothing more: a worker gone, joined or found dead, the pin thread, the loader",
    "A liveness check was wrong, or another process writes with the id of a dead one.",
)
def gone(loader: LoaderView) -> Iterator[Violation]:
    for row in loader.pick(*ev.DEATHS, ev.JOIN[1]):
        code, actor, worker = int(loader.code[row]), int(loader.x[row]), int(loader.worker[row])
        if code == ev.JOIN[1] and not loader.y[row]:
            continue
        after = slice(int(row) + 1, None)
        if code == ev.WORKER_GONE or actor == Actor.WORKER:
            home = loader.homes.get(worker)
            mine = loader.process[after] == (-1 if home is None else home)
            mine &= ~np.isin(loader.code[after], LOADER_THREAD)
        elif actor == Actor.PIN_THREAD:
            mine = np.isin(loader.code[after], [*ev.PIN, ev.READY_PUT, ev.PIN_START, ev.PIN_EXIT])
        else:
            mine = np.isin(loader.code[after], LOADER_THREAD)
        late = int(row) + 1 + np.flatnonzero(mine)[:1]
        late = late[loader.time[late] > loader.time[row]]
        for event in late:
            yield loader.broken(f"after {name_of(code)} said that this actor has ended", event, row)
