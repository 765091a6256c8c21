"""Rules on a task's way: drawn, assigned, sent, fetched, answered, received, yielded; each once and in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import numpy as np

from minidl.check.view import LoaderView, Violation, rule
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import starts
from minidl.tracefile.events import Ending, Outcome
from minidl.tracefile.words import name_of

_WAY: Final = (
    *(ev.TASK_ASSIGNED, ev.INDEX_PUT, ev.INDEX_GET[1], ev.FETCH[0], ev.FETCH[1], ev.RESULT_PUT),
    *(*ev.RESULT_PICKLE, ev.RESULT_WRITE[0], *ev.RESULT_REBUILD, ev.RESULT_GET[1]),
    *(ev.PIN[0], ev.PIN[1], ev.READY_PUT, ev.READY_GET[1], ev.YIELD),
)
"""The stages of a task, in order. `_may_skip` names those that may be left out."""

_PIN_ONLY: Final = {*ev.PIN, ev.READY_PUT, ev.READY_GET[1]}


def way(loader: LoaderView) -> tuple[int, ...]:
    """Return the stages that a task of this loader passes through."""
    if not loader.multiprocess:
        return (ev.FETCH[0], ev.FETCH[1], ev.YIELD)
    codes = tuple(code for code in _WAY if loader.pinned or code not in _PIN_ONLY)
    return tuple(code for code in codes if loader.records(code))


def _may_skip(code: int) -> bool:
    """Whether a task may lack a stage: an error is not fetched (a failed init) and not pinned; transport is detail."""
    return code in (*ev.FETCH, *ev.PIN, *ev.RESULT_PICKLE, *ev.RESULT_WRITE, *ev.RESULT_REBUILD)


def _of_task(loader: LoaderView, code: int, row: int) -> str:
    return f"{name_of(code)} of task {loader.task[row]}"


@rule(
    "sequence",
    "tasks are assigned in the order 0, 1, 2, …, and send_idx counts them",
    "A task was lost or numbered twice by the loader: its batch would be missing or come twice.",
)
def sequence(loader: LoaderView) -> Iterator[Violation]:
    rows = loader.pick(ev.TASK_ASSIGNED)
    epoch = loader.at_epoch[rows]
    first = starts(epoch)
    expected = np.where(first, 0, np.r_[0, loader.task[rows][:-1] + 1][: len(rows)])
    wrong = (loader.task[rows] != expected) & (~first | loader.whole_epoch(rows))
    for at in np.flatnonzero(wrong):
        before = [] if first[at] else [int(rows[at - 1])]
        yield loader.broken(f"the next task is {expected[at]}", int(rows[at]), *before)
    for row in rows[loader.x[rows] != loader.task[rows] + 1]:
        yield loader.broken(f"send_idx is {loader.x[row]} after task {loader.task[row]}", row)


@rule(
    "indices",
    "a task's indices are drawn from the sampler, and their number is the same at each stage",
    "A worker was sent other samples than the sampler gave.",
    needs="task",
)
def indices(loader: LoaderView) -> Iterator[Violation]:
    if not loader.records(ev.SAMPLER_NEXT[1]):
        return
    drawn = loader.stage(ev.SAMPLER_NEXT[1])
    rows = loader.stage(ev.TASK_ASSIGNED if loader.multiprocess else ev.FETCH[0])
    rows = rows[loader.whole_task(rows)]
    for row in rows[loader.last_of_task(rows, drawn) < 0]:
        missing = _of_task(loader, ev.SAMPLER_NEXT[1], row)
        yield loader.broken("its indices were never drawn from the sampler", row, missing=missing)
    chain = (ev.SAMPLER_NEXT[1], *((ev.INDEX_PUT, ev.INDEX_GET[1]) if loader.multiprocess else ()), ev.FETCH[0])
    for before, after in itertools.pairwise(chain):
        for row, earlier, has, had in loader.differing("count", before, after, last=True):
            yield loader.broken(f"{has} indices; at {name_of(before)} they were {had}", row, earlier)
    samples = loader.pick(ev.SAMPLE[0], ev.SAMPLE_INDEX)
    samples = samples[(loader.task[samples] >= 0) & (loader.x[samples] == 0) & (loader.y[samples] >= 0)]
    samples, come = loader.matched(samples, drawn, last=True)
    for at in np.flatnonzero((loader.y[come] >= 0) & (loader.y[samples] != loader.y[come])):
        told = f"sample {loader.y[samples[at]]}; the sampler's first is {loader.y[come[at]]}"
        yield loader.broken(told, samples[at], come[at])


@rule(
    "once",
    "a task passes through each stage at most once in an epoch",
    "A batch was made, sent or yielded twice: the training step saw the same samples again.",
)
def once(loader: LoaderView) -> Iterator[Violation]:
    for code in way(loader):
        rows = loader.stage(code)
        order = rows[np.argsort(loader.key[rows], kind="stable")]
        for at in np.flatnonzero(np.diff(loader.key[order]) == 0):
            yield loader.broken("happened before", order[at + 1], order[at])


@rule(
    "own-worker",
    "only the worker that a task was assigned to receives it, fetches it and answers it",
    "A message reached the wrong worker, or a result carries another worker's id: reorder and liveness go wrong.",
)
def own_worker(loader: LoaderView) -> Iterator[Violation]:
    for code in way(loader)[1:]:
        for row, given, _, worker in loader.differing("worker", ev.TASK_ASSIGNED, code):
            yield loader.broken(f"the task was assigned to worker {worker}", row, given)


@rule(
    "own-process",
    "a worker's events come from one process, which is no other worker's",
    "Two processes pass for one worker (a fork inside the dataset, say), or one for two.",
)
def own_process(loader: LoaderView) -> Iterator[Violation]:
    rows = loader.pick(ev.WORKER_READY, *ev.INDEX_GET, *ev.FETCH, *ev.COLLATE, ev.RESULT_PUT, ev.WORKER_EXIT)
    rows = rows[loader.worker[rows] >= 0]
    owners = {process: worker for worker, process in reversed(loader.homes.items())}
    workers, place = np.unique(loader.worker[rows], return_inverse=True)
    wanted = np.array([loader.homes.get(worker, -1) for worker in workers.tolist()], np.int64)[place]
    for row in rows[(wanted >= 0) & (loader.process[rows] != wanted)].tolist():
        worker = int(loader.worker[row])
        other = owners.get(int(loader.process[row]), -1)
        told = f"worker {worker} is {loader.trace.processes[loader.homes[worker]].name}"
        told += f"; this process is worker {other}" if other >= 0 else ""
        mine = rows[(loader.process[rows] == loader.homes[worker]) & (loader.worker[rows] == worker)]
        yield loader.broken(told, row, *mine[:1])
    for process, worker in owners.items():
        for other, home in loader.homes.items():
            if home == process and other != worker:
                late = rows[(loader.worker[rows] == other) & (loader.process[rows] == home)]
                yield from (loader.broken(f"its process is worker {worker}'s", row) for row in late[:1])


@rule(
    "whole-way",
    "a task that has reached a stage has passed the stages before it",
    "Something came out of nowhere: a message was forged, or its origin was not recorded.",
    needs="task",
)
def whole_way(loader: LoaderView) -> Iterator[Violation]:
    for before, after in _pairs(loader):
        rows = loader.stage(after)
        rows = rows[loader.whole_task(rows)]
        come = loader.match(rows, loader.stage(before))
        for row in rows[come < 0]:
            yield loader.broken("nothing it could come from", row, missing=_of_task(loader, before, row))
    of_data = [(ev.FETCH[1], ev.RESULT_PUT if loader.multiprocess else ev.YIELD, "data that no fetch has made")]
    of_data += [(ev.PIN[1], ev.READY_PUT, "data that is not pinned")]
    for before, after, told in of_data:
        data = loader.stage(after)
        data = data[(loader.x[data] == Outcome.DATA) & loader.whole_task(data) & loader.records(before)]
        for row in data[loader.match(data, loader.stage(before)) < 0]:
            yield loader.broken(told, row, missing=_of_task(loader, before, row))


def _pairs(loader: LoaderView) -> Iterator[tuple[int, int]]:
    """Yield each stage with the last one before it that no task leaves out, and the pairs beside the way."""
    stages = way(loader)
    for place, after in enumerate(stages):
        before = next((code for code in reversed(stages[:place]) if not _may_skip(code)), None)
        if before is not None:
            yield before, after
    if len(loader.pick(ev.RESULT_REBUILD[1])):
        yield ev.RESULT_REBUILD[1], ev.RESULT_GET[1]
    if loader.multiprocess:
        beside = ((ev.INDEX_GET[1], ev.DONE_EVENT_SEEN), (loader.received, ev.REORDER_STORE))
        for before, after in (*beside, (loader.received, ev.WORKER_EXHAUSTED)):
            if loader.records(before, after):
                yield before, after


@rule(
    "causality",
    "on the one clock of all processes, no stage of a task's way comes before the stages before it",
    "The order of events was changed, or the machine's processes do not share one clock.",
)
def causality(loader: LoaderView) -> Iterator[Violation]:
    stages = [loader.stage(code) for code in way(loader)]
    for place, rows in enumerate(stages[1:], start=1):
        for earlier in stages[:place]:
            before = loader.match(rows, earlier)
            for at in np.flatnonzero((before >= 0) & (loader.time[before] > loader.time[rows])):
                by = int(loader.time[before[at]] - loader.time[rows[at]])
                later = f"{by / 1000:.1f} µs" if by >= 1000 else f"{by} ns"
                told = f"{name_of(int(loader.code[before[at]]))} comes {later} later"
                yield loader.broken(told, rows[at], before[at])


@rule(
    "nested",
    "a task's samples and its collation lie inside its fetch, and the samples' positions count 0, 1, 2, …",
    "A sample was left out, asked for twice, or counted to another batch.",
)
def nested(loader: LoaderView) -> Iterator[Violation]:
    lanes = loader.pick(*ev.FETCH, ev.SAMPLE[0], ev.SAMPLE_INDEX, ev.COLLATE[0])
    lanes = lanes[np.argsort(loader.process[lanes], kind="stable")]
    if not len(lanes):
        return
    code, process = loader.code[lanes], loader.process[lanes]
    before = np.r_[-1, np.arange(len(lanes) - 1)]
    is_fetch = np.isin(code, ev.FETCH)
    last = np.maximum.accumulate(np.where(is_fetch, np.arange(len(lanes)), -1))
    known = ~is_fetch & (last >= 0) & (process[last] == process)
    inside = known & (code[last] == ev.FETCH[0]) & (loader.task[lanes][last] == loader.task[lanes])
    for at in np.flatnonzero(known & ~inside):
        yield loader.broken("outside the fetch of its task", lanes[at], lanes[last[at]])
    numbered = np.isin(code, [ev.SAMPLE[0], ev.SAMPLE_INDEX])
    expected = np.where(numbered[before] & (code[before] == code), loader.x[lanes][before] + 1, 0)
    counted = inside & numbered & (loader.x[lanes] >= 0)
    for at in np.flatnonzero(counted & (loader.x[lanes] != expected)):
        told = f"position {loader.x[lanes[at]]}, the next one is {expected[at]}"
        yield loader.broken(told, lanes[at], lanes[before[at]])


@rule(
    "fifo",
    "a receiver gets the messages of one sender in the order in which they were sent",
    "A queue lost or swapped a message: the loader would wait forever, or yield out of order.",
)
def fifo(loader: LoaderView) -> Iterator[Violation]:
    rebuilt = loader.pick(ev.RESULT_REBUILD[0])
    pairs = [(ev.INDEX_PUT, ev.INDEX_GET[1]), (ev.RESULT_PUT, ev.RESULT_GET[1]), (ev.READY_PUT, ev.READY_GET[1])]
    for put, get in pairs:
        puts, gets = loader.stage(put), loader.stage(get)
        puts = puts[np.argsort(loader.worker[puts], kind="stable")]
        gets = gets[np.argsort(loader.worker[gets], kind="stable")]
        gets, came = loader.matched(gets, puts)
        rank = np.zeros(len(loader.code), np.intp)
        rank[puts] = np.arange(len(puts))
        first = np.r_[True, loader.worker[came[1:]] != loader.worker[came[:-1]]][: len(came)]
        due = np.where(first, np.searchsorted(loader.worker[puts], loader.worker[came]), np.r_[0, rank[came] + 1][:-1])
        for at in np.flatnonzero((rank[came] > due) & (~first | loader.complete)):
            over = puts[due[at]]
            if get != ev.RESULT_GET[1] or loader.match(over[None], rebuilt)[0] < 0:  # else: taken out, then a Ctrl-C
                told = f"it overtakes task {loader.task[over]}, which was put before it"
                yield loader.broken(told, gets[at], over, came[at])


@rule(
    "outcomes",
    "an error never becomes data, a dataset's end stays an end, and only an end makes a worker exhausted",
    "A batch was yielded for a task that had failed, or a worker was given up that had more to give.",
)
def outcomes(loader: LoaderView) -> Iterator[Violation]:
    told = (ev.FETCH[1], ev.RESULT_PUT, ev.RESULT_GET[1], ev.READY_PUT, ev.READY_GET[1], ev.YIELD)
    for before, after in itertools.pairwise(code for code in told if len(loader.pick(code))):
        for row, earlier, now, was in loader.differing("outcome", before, after):
            if (was, now) != (Outcome.DATA, Outcome.ERROR):
                yield loader.broken(f"{_outcome(now)}; at {name_of(before)} it was {_outcome(was)}", row, earlier)
    answers, failed = loader.matched(loader.stage(ev.RESULT_PUT), loader.stage(ev.TASK_ERROR))
    wrong = (failed < answers) & (loader.x[answers] != Outcome.ERROR)  # later: the data could not be pickled
    for row, error in zip(answers[wrong], failed[wrong], strict=True):
        yield loader.broken(f"{_outcome(loader.x[row])}; at task_error it was ERROR", row, error)
    ended = loader.stage(ev.WORKER_EXHAUSTED)
    for row, get in zip(*loader.matched(ended, loader.stage(loader.received)), strict=True):
        if loader.y[get] != Outcome.EXHAUSTED:
            yield loader.broken(f"what came was {_outcome(loader.y[get])}", row, get)


def _outcome(value: int) -> str:
    return Outcome(value).name if value in list(Outcome) else str(value)


@rule(
    "bytes",
    "a message is rebuilt from as many bytes as it was pickled into, and is written whole",
    "A message was cut or mixed up on its way through the pipe.",
)
def sizes(loader: LoaderView) -> Iterator[Violation]:
    for before, after in ((ev.RESULT_PICKLE[1], ev.RESULT_REBUILD[0]), ev.RESULT_WRITE):
        for row, earlier, now, was in loader.differing("bytes", before, after):
            yield loader.broken(f"{now} bytes; at {name_of(before)} they were {was}", row, earlier)


# --- What is yielded --------------------------------------------------------------------------------------------------
@rule(
    "in-order",
    "with in_order, batches are yielded in the order of their tasks; only tasks that will not come are skipped",
    "The batches' order differs from the sampler's: a seeded run is not reproducible.",
)
def in_order(loader: LoaderView) -> Iterator[Violation]:
    rows = loader.stage(ev.YIELD)
    if not loader.in_order or not loader.multiprocess or not len(rows):
        return
    task, epoch = loader.task[rows], loader.at_epoch[rows]
    first = starts(epoch)
    due = np.where(first, 0, np.r_[0, task[:-1] + 1])
    wrong = (task != due) & (~first | loader.whole_epoch(rows))
    for at in np.flatnonzero(wrong).tolist():
        before = [] if first[at] else [int(rows[at - 1])]
        if task[at] < due[at]:
            yield loader.broken(f"yielded after task {task[at - 1]}", int(rows[at]), *before)
        elif (left := _left_out(loader, int(rows[at]), int(due[at]), before)) is not None:
            told = f"task {left} is due" + (f", after task {task[at - 1]}" if before else "")
            yield loader.broken(told, int(rows[at]), *before, missing=f"yield of task {left}")


def _left_out(loader: LoaderView, row: int, due: int, before: list[int]) -> int | None:
    """Return the first task in [due, the yielded one) that could still have come, by what the loader knew."""
    known = loader.pick(ev.WORKER_EXHAUSTED, *ev.DEATHS)
    ended = set(loader.worker[known[(known < row) & (loader.at_epoch[known] >= loader.at_epoch[row])]].tolist())
    assigned = loader.pick(ev.TASK_ASSIGNED)
    assigned = assigned[loader.at_epoch[assigned] == loader.at_epoch[row]]
    raised = loader.raised()  # the batch that was due may be lost then, in torch as here
    spare = int(np.sum((raised < row) & (raised > (before[0] if before else -1))))
    for at in assigned[(loader.task[assigned] >= due) & (loader.task[assigned] < loader.task[row])]:
        if int(loader.worker[at]) in ended:
            continue
        if not spare:
            return int(loader.task[at])
        spare -= 1
    return None


@rule(
    "handed-out",
    "a next that ends with a batch or a task's error has just yielded that task; no batch is yielded outside a next",
    "The training step got a batch that the loader did not account for.",
)
def handed_out(loader: LoaderView) -> Iterator[Violation]:
    rows = loader.pick(*ev.NEXT, ev.YIELD)
    if not len(rows) or not loader.records(ev.YIELD, *ev.NEXT):
        return
    code, task = loader.code[rows], loader.task[rows]
    before = np.r_[0, code[:-1]]
    for at in np.flatnonzero((code == ev.YIELD) & ~np.isin(before, [0, ev.NEXT[0]])):
        yield loader.broken("outside next", rows[at], rows[at - 1], missing="next begin")
    for at in np.flatnonzero((code == ev.NEXT[1]) & (task >= 0) & (before != 0)):
        if before[at] != ev.YIELD:
            missing = f"yield of task {task[at]}"
            yield loader.broken("a batch that was not yielded", rows[at], rows[at - 1], missing=missing)
        elif task[at - 1] != task[at]:
            yield loader.broken(f"what was yielded is task {task[at - 1]}", rows[at], rows[at - 1])


@rule(
    "counts",
    "the batches counted by yield, next, consumer and epoch are the batches yielded",
    "len(), progress bars and the epoch's own count disagree with what the training loop got.",
)
def counts(loader: LoaderView) -> Iterator[Violation]:
    if not loader.records(ev.YIELD, *ev.NEXT):
        return
    rows = loader.pick(ev.EPOCH[0], ev.YIELD, ev.NEXT[1], ev.CONSUMER[0], ev.EPOCH[1])
    if len(rows) < 2:
        return
    code = loader.code[rows]
    said = np.where(np.isin(code, [ev.YIELD, ev.EPOCH[1]]), loader.y[rows], loader.x[rows])
    said = np.where(code == ev.EPOCH[0], 0, said)
    batch = (code == ev.YIELD) & (loader.x[rows] == Outcome.DATA)
    expected = np.r_[0, said[:-1]] + batch
    # A Ctrl-C may come after a batch was counted, and before it is recorded as yielded.
    cut = (code == ev.EPOCH[1]) & (loader.z[rows] == Ending.CLOSED) & (said == expected + 1)
    cut &= loader.was_interrupted(int(rows[0]))
    for at in np.flatnonzero((said != expected) & ~cut & (code != ev.EPOCH[0]) & (np.arange(len(rows)) > 0)):
        told = f"it counts {said[at]} batches of this epoch, there are {expected[at]}"
        yield loader.broken(told, rows[at], rows[at - 1])


@rule(
    "accounted-for",
    "a task of an epoch that ran to its end is yielded, or its worker ended or died",
    "A batch was lost: the epoch had fewer samples than the sampler gave.",
    needs="epoch",
)
def accounted_for(loader: LoaderView) -> Iterator[Violation]:
    ends = {int(loader.at_epoch[row]): int(row) for row in loader.pick(ev.EPOCH[1])}
    assigned = loader.stage(ev.TASK_ASSIGNED)
    missing = assigned[loader.match(assigned, loader.stage(ev.YIELD)) < 0]
    missing = missing[loader.whole_epoch(missing)]
    over = loader.pick(ev.WORKER_EXHAUSTED)
    excused = set(zip(loader.at_epoch[over].tolist(), loader.worker[over].tolist(), strict=True))
    deaths = loader.pick(*ev.DEATHS)
    raised = loader.at_epoch[loader.raised()].tolist()
    read = loader.match(missing, loader.stage(loader.received)) >= 0
    for row, was_read in zip(missing, read, strict=True):
        epoch, worker = int(loader.at_epoch[row]), int(loader.worker[row])
        end = ends.get(epoch)
        if end is None or loader.z[end] != Ending.EXHAUSTED or (epoch, worker) in excused:
            continue
        if any(loader.of_worker(deaths, worker) < end):
            continue
        if was_read and epoch in raised:
            raised.remove(epoch)
            continue
        task = int(loader.task[row])
        told = f"task {task} was never yielded, though the epoch ran to its end"
        yield loader.broken(told, end, int(row), missing=f"yield of task {task}")
