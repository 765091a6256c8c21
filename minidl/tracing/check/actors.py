"""Rules on the actors: who is started, resumed, told to stop, gone; in which order all of it ends."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator

import numpy as np

from minidl.tracing import events as ev
from minidl.tracing.check.view import LOADER_THREAD, LoaderView, Rows, Violation, name_of, rule
from minidl.tracing.events import Actor, DoneEvent, Ending, Message, QueueId


@rule(
    "started",
    "a worker is ready only after the loader has begun to start it, in the process that was started, seeded by its id",
    "A process that the loader did not start works for it, or workers share a seed and augment alike.",
    needs="all",
)
def started(loader: LoaderView) -> Iterator[Violation]:
    ready, begins, ends = (loader.pick(code) for code in (ev.WORKER_READY, *ev.WORKER_START))
    for row in ready:
        worker = int(loader.worker[row])
        begun, end = loader.of_worker(begins, worker), loader.of_worker(ends, worker)
        if not len(begun) or loader.time[begun[0]] > loader.time[row]:
            missing = f"worker_start of worker {worker}"
            yield loader.broken("started", "nobody has started this worker", row, *begun[:1], missing=missing)
        elif len(end) and loader.x[end[0]] != loader.x[row]:
            late = sorted((int(row), int(end[0])), reverse=True)
            yield loader.broken("started", f"pid {loader.x[late[0]]}; it was {loader.x[late[1]]}", *late)
    base = loader.z[ready] - loader.worker[ready]
    for at in np.flatnonzero(base[:1] != base):
        told = f"seed {loader.z[ready[at]]}; by its id and worker {loader.worker[ready[0]]}'s seed it is "
        yield loader.broken("started", told + str(base[0] + loader.worker[ready[at]]), ready[at], ready[0])


@rule(
    "resume",
    "a persistent loader's next epoch begins only when every worker has answered that it has dropped the old one",
    "Samples of the old epoch may be yielded in the new one.",
)
def resume(loader: LoaderView) -> Iterator[Violation]:
    if loader.capacity is None or not loader.records(loader.received):
        return
    answers = loader.about(loader.received, Message.RESUME)
    for before, row in zip(loader.begins[:-1], loader.begins[1:], strict=True):
        heard = set(loader.worker[answers[(answers > before) & (answers < row)]].tolist())
        silent = sorted(set(range(loader.capacity[0])) - heard)
        if silent:
            told = f"worker {silent[0]} has not answered"
            yield loader.broken("resume", told, row, before, missing=f"resume_ack of worker {silent[0]}")


@rule(
    "messages",
    "a new epoch is announced once; it, and a sentinel, is received once for each time that it was sent, and later",
    "An actor acted on a message that nobody sent.",
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
                yield loader.broken("messages", f"it has been told of epoch {loader.x[row]} already", row, before)
        for which in QueueId:
            sent, got = loader.about(ev.SENTINEL_PUT, which), loader.about(ev.SENTINEL_GET, which)
            yield from _answered(loader, loader.of_worker(sent, worker), loader.of_worker(got, worker))
        for before, after in itertools.pairwise([loader.of_worker(rows, worker) for rows in resumed]):
            yield from _answered(loader, before, after)


def _answered(loader: LoaderView, before: Rows, after: Rows) -> Iterator[Violation]:
    """The n-th of `after` answers the n-th of `before`, and comes later."""
    for number, row in enumerate(after[len(before) :], len(before) + 1):
        told = f"it is number {number}, and {len(before)} were sent"
        yield loader.broken("messages", told, row, *after[: number - 1], *before, missing="what it answers")
    for sent, got in zip(before, after, strict=False):
        if loader.time[sent] > loader.time[got]:
            yield loader.broken("messages", f"{name_of(int(loader.code[sent]))} comes later", got, sent)


@rule(
    "told-to-leave",
    "a worker that has been told to leave is sent nothing more, and does nothing more",
    "Data after the sentinel: nobody waits for it, and its shared memory may be lost.",
)
def told_to_leave(loader: LoaderView) -> Iterator[Violation]:
    told, heard = (loader.about(code, QueueId.INDEX) for code in (ev.SENTINEL_PUT, ev.SENTINEL_GET))
    work = loader.pick(ev.INDEX_GET[0], *ev.FETCH, ev.RESULT_PUT, ev.RESUME_ACK)
    for signals, after in (
        (told, loader.pick(ev.INDEX_PUT, ev.RESUME_PUT)),
        (heard, work),
        (loader.pick(ev.WORKER_EXIT), np.union1d(work, loader.pick(ev.WORKER_EXIT))),
        (told[~np.isin(loader.worker[told], loader.worker[loader.pick(ev.FOUND_DEAD)])], told),
    ):
        for message in signals:
            for row in loader.of_worker(after[after > message], int(loader.worker[message]))[:1]:
                told_by = name_of(int(loader.code[message]))
                yield loader.broken("told-to-leave", f"after this worker's {told_by}", row, message)


@rule(
    "gone",
    "who has been seen dead does nothing more: a worker gone, joined or found dead, the pin thread, an orphan's loader",
    "A liveness check was wrong, or another process writes under a dead one's name.",
)
def gone(loader: LoaderView) -> Iterator[Violation]:
    for row in loader.pick(ev.WORKER_GONE, ev.FOUND_DEAD, ev.JOIN[1]):
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
            yield loader.broken("gone", f"after {name_of(code)} said that this actor has ended", event, row)


@rule(
    "pin-first",
    "the pin thread is told to stop and waited for before the workers are told to leave",
    "A worker that leaves in the middle of a message leaves the pin thread reading for ever: the exit hangs.",
)
def pin_first(loader: LoaderView) -> Iterator[Violation]:
    if not loader.pinned:
        return
    stop, workers = (loader.about(ev.DONE_EVENT_SET, which) for which in (DoneEvent.PIN_THREAD, DoneEvent.WORKERS))
    waits, joins = (loader.about(code, Actor.PIN_THREAD) for code in ev.JOIN)
    told, woken = (loader.about(ev.SENTINEL_PUT, queue) for queue in (QueueId.INDEX, QueueId.RESULT))
    ended = loader.worker[loader.pick(ev.WORKER_EXHAUSTED, ev.FOUND_DEAD)]
    for row in waits:
        if not np.any(stop < row):
            missing = "done_event_set of the pin thread"
            yield loader.broken("pin-first", "it is waited for and was not told to stop", row, missing=missing)
        elif not np.any(woken < row) and loader.records(ev.SENTINEL_PUT):
            missing = "sentinel_put into the result queue"
            yield loader.broken("pin-first", "it is waited for and was not woken", row, missing=missing)
    for row in np.union1d(workers, told[~np.isin(loader.worker[told], ended)])[:1]:
        if not np.any(stop < row):
            missing = "done_event_set of the pin thread"
            yield loader.broken("pin-first", "the pin thread was not told to stop before", row, missing=missing)
        elif not np.any(joins < row):
            yield loader.broken("pin-first", "the pin thread was not waited for", row, int(stop[0]), missing="join end")
    exits, ran = loader.pick(ev.PIN_EXIT), len(loader.pick(ev.PIN_START)) > 0
    for join in joins[loader.y[joins] == 1]:
        if ran and loader.records(ev.PIN_EXIT) and loader.complete and not np.any(exits < join):
            yield loader.broken("pin-first", "it has ended and told nothing", join, missing="pin_exit")


@rule(
    "done-first",
    "a worker is told to leave only when the workers' done event is set, its dataset has ended, or it is dead; "
    "a task is skipped only when the done event is set",
    "A worker leaves while it has tasks: their batches are lost, and the loader waits for them.",
    needs="all",
)
def done_first(loader: LoaderView) -> Iterator[Violation]:
    if not loader.records(ev.DONE_EVENT_SET):
        return
    done = loader.about(ev.DONE_EVENT_SET, DoneEvent.WORKERS)
    since = int(done[0]) if len(done) else len(loader.code)
    why = loader.pick(ev.WORKER_EXHAUSTED, ev.FOUND_DEAD)
    told = loader.about(ev.SENTINEL_PUT, QueueId.INDEX)
    for row in told[told < since]:
        if not np.any(loader.of_worker(why, int(loader.worker[row])) < row):
            reason = "it has not ended, and the done event is not set"
            yield loader.broken("done-first", reason, row, missing="done_event_set")
    skipped = loader.pick(ev.DONE_EVENT_SEEN)
    for row in skipped[skipped < since]:
        yield loader.broken("done-first", "the done event is not set", row, missing="done_event_set")


@rule(
    "told-first",
    "in a shutdown a worker is waited for only after it was told to leave, was sent a signal, or is known to be dead",
    "The loader waits for a worker that waits for a task: the exit takes as long as the join's timeout.",
    needs="all",
)
def told_first(loader: LoaderView) -> Iterator[Violation]:
    if not loader.records(ev.SENTINEL_PUT):
        return
    known = loader.pick(ev.TERMINATE, ev.FOUND_DEAD, ev.WORKER_GONE)
    told = np.union1d(known, loader.about(ev.SENTINEL_PUT, QueueId.INDEX))
    waits = loader.about(ev.JOIN[0], Actor.WORKER)
    waits = waits[loader.last_before(waits, loader.pick(ev.SHUTDOWN[0])) >= 0]  # before, one that dies is waited for
    for row in waits:
        worker = int(loader.worker[row])
        if not np.any(loader.of_worker(told, worker) < row):
            missing = f"sentinel_put for worker {worker}"
            yield loader.broken("told-first", "this worker was not told to leave", row, missing=missing)


@rule(
    "leftovers",
    "a worker that did not end while it was waited for is terminated, and at last killed, before the shutdown ends; "
    "the shutdown counts who is left",
    "A process outlives its loader.",
    needs="all",
)
def leftovers(loader: LoaderView) -> Iterator[Violation]:
    ends = loader.pick(ev.SHUTDOWN[1])
    if not len(ends) or not loader.records(ev.WORKER_START[1], ev.WORKER_GONE):
        return
    end = int(ends[0])
    begun = loader.pick(ev.WORKER_START[1])
    begun = begun[(begun < end) & (loader.x[begun] > 0)]
    seen = loader.pick(ev.WORKER_GONE)
    there = set(loader.worker[begun].tolist()) - set(loader.worker[seen[seen < end]].tolist())
    if len(there) != loader.x[end]:
        told = f"{loader.x[end]} still alive, but nothing tells how these workers ended: {sorted(there) or 'none'}"
        rows = [int(row) for row in begun if int(loader.worker[row]) in there]
        yield loader.broken("leftovers", told, end, *rows, missing="worker_gone")
    killed = loader.pick(ev.TERMINATE)
    killed = killed[(killed < end) & ((loader.y[killed] == signal.SIGKILL) | loader.lacks.partial)]
    for row in begun:
        worker = int(loader.worker[row])
        if worker in there and not len(loader.of_worker(killed, worker)):
            missing = f"terminate of worker {worker} by SIGKILL"
            yield loader.broken("leftovers", f"worker {worker} is left behind", end, row, missing=missing)


@rule(
    "explained",
    "every actor's end is explained: told by itself, by the signal that it was sent, or by its exit code",
    "A worker vanished without a word: its code left the process by itself (os._exit, sys.exit).",
    needs="all",
)
def explained(loader: LoaderView) -> Iterator[Violation]:
    if not loader.records(ev.WORKER_EXIT):
        return
    exits, heard = loader.pick(ev.WORKER_EXIT), loader.pick(ev.SENTINEL_GET)
    dead = loader.about(ev.FOUND_DEAD, Actor.LOADER)
    known = loader.pick(ev.WORKER_EXIT, ev.FOUND_DEAD, ev.TERMINATE)  # torch's handler of SIGTERM exits with code 0
    for row in loader.pick(ev.WORKER_GONE):
        worker = int(loader.worker[row])
        said = np.any(loader.of_worker(known, worker) < row)
        if loader.y[row] == 0 and not said and worker not in loader.lacks.absent:
            missing = f"worker_exit of worker {worker}"
            yield loader.broken("explained", "exit code 0, and it has told nothing", row, missing=missing)
    for row in exits:
        worker, ending = int(loader.worker[row]), int(loader.x[row])
        if ending == Ending.SENTINEL and not np.any(loader.of_worker(heard, worker) < row):
            yield loader.broken(
                "explained", "it leaves for a sentinel it has not received", row, missing="sentinel_get"
            )
        if ending == Ending.ORPHANED and not np.any(loader.of_worker(dead, worker) < row):
            yield loader.broken("explained", "it has not found the loader dead", row, missing="found_dead")


@rule(
    "bounded",
    "every wait of the loader for a result has a timeout, so that a death is found",
    "A worker that dies while it is waited for would hang the loader for ever.",
)
def bounded(loader: LoaderView) -> Iterator[Violation]:
    rows = loader.pick(ev.RESULT_GET[0], ev.READY_GET[0])
    for row in rows[loader.x[rows] <= 0]:
        yield loader.broken("bounded", "a wait without a timeout", row)
