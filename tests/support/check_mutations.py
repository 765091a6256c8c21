"""The checker's mutation table: real traces, each spoiled in one way, and the rule that must say so.

`MUTATIONS` are the kinds of corruption; `HARMLESS` are changes that no rule can object to, with the reason. An edit
takes the events of a trace (rows by time) and returns them spoiled.
`python tests/support/check_mutations.py` prints the table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import recorded

from minidl.check import examine
from minidl.tracefile import events as ev
from minidl.tracefile.events import DoneEvent, Ending, Message, Outcome, QueueId
from minidl.tracefile.reader import Trace
from minidl.tracefile.words import name_of

Rows = Any
Edit = Callable[[Rows], Rows]


# --- Finding events ---------------------------------------------------------------------------------------------------
def find(e: Rows, code: int, task: int | None = None, nth: int = 0, **columns: int) -> int:
    """Row of the n-th event of a kind, of a task, with these values."""
    found = e["code"] == code
    for column, value in (columns if task is None else {"task": task} | columns).items():
        found &= e[column] == value
    at = np.flatnonzero(found)
    assert len(at), f"no event {code} of task {task} with {columns}: the edit changes nothing"
    return int(at[nth])


def plain_task(e: Rows) -> int:
    """A task of the first epoch, from 2 on, that came in its turn, so that it never lay in the reorder buffer."""
    ends = np.flatnonzero(e["code"] == ev.EPOCH[1])
    first = e[: ends[0]] if len(ends) else e
    stored = set(first["task"][first["code"] == ev.REORDER_STORE].tolist())
    yielded = first["task"][first["code"] == ev.YIELD].tolist()
    return next(task for task in yielded[2:-1] if task not in stored)


def owner(e: Rows, task: int) -> int:
    return int(e["worker"][find(e, ev.TASK_ASSIGNED, task)])


def kept_task(e: Rows) -> int:
    """The task with which the first state came that counts."""
    return int(e["task"][find(e, ev.STATE_KEPT)])


def workers_done(e: Rows) -> int:
    return find(e, ev.DONE_EVENT_SET, x=DoneEvent.WORKERS)


# --- Ways to spoil ----------------------------------------------------------------------------------------------------
def drop(e: Rows, *at: int) -> Rows:
    return np.delete(e, at)


def double(e: Rows, *at: int) -> Rows:
    again = e[list(at)].copy()
    again["time"] += 1
    return np.concatenate([e, again])


def put(e: Rows, at: int, **columns: int) -> Rows:
    for column, value in columns.items():
        e[column][at] = value
    return e


def swap(e: Rows, one: int, other: int, *columns: str) -> Rows:
    for column in columns:
        e[column][one], e[column][other] = e[column][other].copy(), e[column][one].copy()
    return e


def move(e: Rows, at: int, to: int, by: int = -1) -> Rows:
    """Just before (or after) the event at `to`."""
    return put(e, at, time=int(e["time"][to]) + by)


def forge(e: Rows, like: int, after: int, **columns: int) -> Rows:
    """A copy of one event, just after another one."""
    extra = e[[like]].copy()
    extra["time"] = e["time"][after] + 1
    for column, value in columns.items():
        extra[column] = value
    return np.concatenate([e, extra])


def spoiled(trace: Trace, edit: Edit, *, renumber: bool = True) -> Trace:
    """The trace with its events edited; numbered anew, so that the numbers do not give the edit away."""
    other = copy.copy(trace)
    events = edit(trace.events.copy())
    events = events[np.argsort(events["time"], kind="stable")]
    if renumber:
        for process in np.unique(events["process"]):
            own = np.flatnonzero(events["process"] == process)
            events["seq"][own] = np.arange(1, len(own) + 1)
    other.events = events
    return other


# --- Longer edits -----------------------------------------------------------------------------------------------------
def to_the_other_worker(e: Rows) -> Rows:
    """Task 3 goes to the other worker, and every event agrees: only who decides can tell."""
    other = 1 - owner(e, 3)
    home = find(e, ev.WORKER_READY, worker=other)
    first, second = np.flatnonzero((e["task"] == 3) & (e["code"] == ev.TASK_ASSIGNED))[:2]
    place = np.arange(len(e))
    mine = (e["task"] == 3) & (place >= first) & (place < second)
    in_worker = mine & (e["process"] != e["process"][first])
    for column in ("process", "pid"):
        e[column][in_worker] = e[column][home]
    e["worker"][mine & (e["worker"] >= 0)] = other
    return e


def queue_overtaken(e: Rows) -> Rows:
    """Two tasks that lay in a worker's queue come out the other way round."""
    return swap(e, find(e, ev.INDEX_GET[1], 2), find(e, ev.INDEX_GET[1], 3), "task")


def yields_swapped(e: Rows) -> Rows:
    return swap(e, find(e, ev.YIELD, 0), find(e, ev.YIELD, 1), "task", "worker")


def early_fetch(e: Rows) -> Rows:
    """The second epoch's fetcher is made only after the first task of that epoch is taken up."""
    made = find(e, ev.MAKE_FETCHER[1], worker=1, nth=1)
    fetches = np.flatnonzero((e["code"] == ev.FETCH[0]) & (e["worker"] == 1))
    return move(e, made, int(fetches[fetches > made][0]), 1)


def silent_worker(e: Rows) -> Rows:
    ends = np.isin(e["code"], [ev.WORKER_EXIT, ev.WORKER_GONE, ev.SENTINEL_GET]) & (e["worker"] == 1)
    return np.delete(e, np.flatnonzero(ends))


def unjoined(e: Rows) -> Rows:
    """The worker that is terminated was not waited for before."""
    worker = int(e["worker"][find(e, ev.TERMINATE)])
    return drop(e, find(e, ev.JOIN[0], worker=worker), find(e, ev.JOIN[1], worker=worker))


def left_alone(e: Rows) -> Rows:
    """The join of worker 1 failed, and nobody did anything about it."""
    e = put(e, find(e, ev.JOIN[1], worker=1), y=0)
    e = put(e, find(e, ev.SHUTDOWN[1]), x=1)
    return drop(e, find(e, ev.WORKER_GONE, worker=1))


def lost_and_skipped(e: Rows) -> Rows:
    """The last batch is lost, and the loader's own counts agree with that."""
    task = int(e["task"][e["code"] == ev.YIELD][7])
    at = find(e, ev.YIELD, task)
    begin = np.flatnonzero((e["code"] == ev.NEXT[0]) & (np.arange(len(e)) < at))[-1]
    end = find(e, ev.NEXT[1], task)
    inside = np.flatnonzero((e["code"] == ev.CONSUMER[0]) | (e["code"] == ev.CONSUMER[1]))
    around = [int(inside[inside > end][0]), int(inside[inside > end][1])]
    e = put(e, find(e, ev.EPOCH[1]), y=7)
    follow = find(e, ev.NEXT[1], -1, y=Outcome.EXHAUSTED)
    e = put(e, follow, x=7)
    return drop(e, at, int(begin), end, *around)


def renumbered(e: Rows) -> Rows:
    """From task 3 on, the first epoch's tasks have the number after theirs."""
    end = find(e, ev.EPOCH[1])
    later = (np.arange(len(e)) < end) & (e["task"] >= 3)
    e["task"][later] += 1
    for code in (ev.TASK_ASSIGNED,):
        e["x"][later & (e["code"] == code)] += 1
    return e


def early_skip(e: Rows) -> Rows:
    """A worker skips a task before anything is over."""
    got = find(e, ev.INDEX_GET[1], 4)
    return forge(e, find(e, ev.RESULT_PUT, 4), got, code=ev.DONE_EVENT_SEEN, x=DoneEvent.WORKERS)


def resumed_alone(e: Rows) -> Rows:
    """The second epoch begins before worker 1 has answered."""
    begin = find(e, ev.EPOCH[0], nth=1)
    answer = find(e, ev.RESULT_GET[1], x=Message.RESUME, worker=1)
    if answer < begin:
        span = [answer, int(np.flatnonzero((e["code"] == ev.RESULT_GET[0]) & (np.arange(len(e)) < answer))[-1])]
        return drop(e, *span)
    raise AssertionError("the answer comes later already")


def sentinel_after_all(e: Rows) -> Rows:
    """A worker gets its sentinel, and answers a task that it has skipped."""
    skipped = int(e["task"][find(e, ev.DONE_EVENT_SEEN)])
    return forge(e, find(e, ev.RESULT_PUT, 0), find(e, ev.SENTINEL_GET), task=skipped, x=Outcome.ERROR)


def work_after_death(e: Rows) -> Rows:
    """The worker that was killed writes on."""
    gone = find(e, ev.WORKER_GONE)
    worker = int(e["worker"][gone])
    return forge(e, find(e, ev.INDEX_GET[0], worker=worker), gone)


@dataclass(frozen=True)
class Mutation:
    """run: the trace to spoil. how: dropped, doubled, swapped, moved, re-attributed, changed or forged. rule: the right
    reason. event: the first impossible event, by name; task: its task, None = whichever."""

    name: str
    how: str
    run: str
    rule: str
    event: str
    edit: Edit


def last_ready(events: Rows) -> int:
    """The worker that is ready last in the first epoch: before that, another has made its fetcher."""
    return int(events["worker"][np.flatnonzero(events["code"] == ev.WORKER_READY)[-1]])


def _table() -> list[Mutation]:
    out: list[Mutation] = []

    def add(name: str, how: str, rule: str, event: str, edit: Edit, run: str = "persistent") -> None:
        out.append(Mutation(name, how, run, rule, event, edit))

    # fmt: off
    # slabs
    add("a slab is written while its batch is visible", "dropped", "slab-unseen", "slab_take",
        lambda e: drop(e, find(e, ev.SLAB_RELEASE, 3)), "slabs")
    add("a slab is written while a forked child may see it", "changed", "slab-unseen", "slab_take",
        lambda e: put(e, find(e, ev.SLAB_RELEASE, 3), z=ev.SlabEnd.KEPT), "slabs")
    add("a slab is released twice", "doubled", "slab-released", "slab_release",
        lambda e: double(e, find(e, ev.SLAB_RELEASE, 3)), "slabs")
    add("a slab comes that was not sent", "dropped", "slab-sent", "slab_map",
        lambda e: drop(e, find(e, ev.SLAB_SEND, 3)), "slabs")
    add("a slab is released that did not come", "dropped", "slab-sent", "slab_release",
        lambda e: drop(e, find(e, ev.SLAB_MAP, 3)), "slabs")
    # a task's way: dropped
    add("a task is never assigned", "dropped", "whole-way", "index_put",
        lambda e: drop(e, find(e, ev.TASK_ASSIGNED, 3)))
    add("a task is assigned and never put", "dropped", "whole-way", "index_get end",
        lambda e: drop(e, find(e, ev.INDEX_PUT, 3)))
    add("a fetch without its task", "dropped", "whole-way", "fetch begin",
        lambda e: drop(e, find(e, ev.INDEX_GET[1], 3)))
    add("samples outside a fetch", "dropped", "nested", "sample begin", lambda e: drop(e, find(e, ev.FETCH[0], 3)))
    add("data that no fetch has made", "dropped", "whole-way", "result_put", lambda e: drop(e, find(e, ev.FETCH[1], 3)))
    add("a message that nobody put", "dropped", "whole-way", "result_pickle begin",
        lambda e: drop(e, find(e, ev.RESULT_PUT, 3)))
    add("a batch that nobody received", "dropped", "outstanding", "rcvd_advance",
        lambda e: drop(e, *(find(e, code, plain_task(e)) for code in (ev.RESULT_GET[1],))))
    add("a batch that was not yielded", "dropped", "handed-out", "next end",
        lambda e: drop(e, find(e, ev.YIELD, plain_task(e))))
    add("a batch lost at the epoch's end", "dropped", "accounted-for", "epoch end", lost_and_skipped)
    add("indices that were not drawn", "dropped", "indices", "task_assigned",
        lambda e: drop(e, find(e, ev.SAMPLER_NEXT[0], 3), find(e, ev.SAMPLER_NEXT[1], 3)))
    # ... doubled
    for name, code, event in (
        ("a task is put twice", ev.INDEX_PUT, "index_put"),
        ("a task is received twice by its worker", ev.INDEX_GET[1], "index_get end"),
        ("a task is answered twice", ev.RESULT_PUT, "result_put"),
        ("a result is received twice", ev.RESULT_GET[1], "result_get end"),
        ("a batch is yielded twice", ev.YIELD, "yield"),
        ("a result is written twice", ev.RESULT_WRITE[0], "result_write begin"),
    ):
        add(name, "doubled", "once", event, lambda e, code=code: double(e, find(e, code, 3)))  # type: ignore[misc]
    add("a task is assigned twice", "doubled", "sequence", "task_assigned",
        lambda e: double(e, find(e, ev.TASK_ASSIGNED, 3)))
    add("a task is fetched twice", "doubled", "once", "fetch begin",
        lambda e: double(e, find(e, ev.FETCH[0], 3), find(e, ev.FETCH[1], 3)))
    add("a sample is asked for twice", "doubled", "nested", "sample begin",
        lambda e: double(e, find(e, ev.SAMPLE[0], 3, 1)))
    add("an index is told twice", "doubled", "nested", "sample_index",
        lambda e: double(e, find(e, ev.SAMPLE_INDEX, 3, 1)), "at once")
    add("a batch is pinned twice", "doubled", "once", "pin begin",
        lambda e: double(e, find(e, ev.PIN[0], 3), find(e, ev.PIN[1], 3)), "pinned")
    # ... swapped and moved
    add("two batches are yielded in the wrong order", "swapped", "in-order", "yield", yields_swapped, "reordered")
    add("a task overtakes another in the index queue", "swapped", "fifo", "index_get end", queue_overtaken,
        "skipped tasks")
    add("a batch is read before it was sent", "moved", "causality", "result_get end",
        lambda e: move(e, find(e, ev.RESULT_GET[1], 3), find(e, ev.RESULT_PUT, 3)))
    add("a task arrives before it was put", "moved", "causality", "index_get end",
        lambda e: move(e, find(e, ev.INDEX_GET[1], 7), find(e, ev.INDEX_PUT, 7)))
    add("a batch is yielded before it was read", "moved", "causality", "yield",
        lambda e: move(e, find(e, ev.YIELD, plain_task(e)), find(e, ev.RESULT_GET[1], plain_task(e))))
    add("a batch is fetched before its task came", "moved", "causality", "fetch begin",
        lambda e: move(e, find(e, ev.FETCH[0], 3), find(e, ev.INDEX_GET[1], 3)))
    add("a batch is handed on before it is pinned", "moved", "causality", "ready_put",
        lambda e: move(e, find(e, ev.READY_PUT, 3), find(e, ev.PIN[0], 3)), "pinned")
    # ... re-attributed
    add("another worker fetches the task", "re-attributed", "own-worker", "fetch begin",
        lambda e: put(e, find(e, ev.FETCH[0], 3), worker=1 - owner(e, 3)))
    add("another worker answers the task", "re-attributed", "own-worker", "result_put",
        lambda e: put(e, find(e, ev.RESULT_PUT, 3), worker=1 - owner(e, 3)))
    add("another process fetches the task", "re-attributed", "own-process", "fetch begin",
        lambda e: put(e, find(e, ev.FETCH[0], 3), process=int(e["process"][find(e, ev.TASK_ASSIGNED, 3)])))
    add("a task goes to a worker out of turn, and all agree", "re-attributed", "turn",
        "task_assigned", to_the_other_worker)
    add("without in_order, a task goes to a worker out of turn", "re-attributed", "decisions", "task_assigned",
        lambda e: put(e, find(e, ev.TASK_ASSIGNED, 3), worker=1), "in_order off")
    add("a worker that does not exist", "re-attributed", "facts", "task_assigned",
        lambda e: put(e, find(e, ev.TASK_ASSIGNED, 3), worker=9))
    add("another task's batch is yielded", "re-attributed", "own-worker", "yield",
        lambda e: put(e, find(e, ev.YIELD, plain_task(e)), task=plain_task(e) + 1))
    # values
    add("a task's number is left out", "changed", "sequence", "task_assigned", renumbered)
    add("send_idx is off by one", "changed", "sequence", "task_assigned",
        lambda e: put(e, find(e, ev.TASK_ASSIGNED, 3), x=5))
    add("too many tasks outstanding", "changed", "capacity", "task_assigned",
        lambda e: put(e, find(e, ev.TASK_ASSIGNED, 3), y=5))
    add("outstanding tasks miscounted", "changed", "outstanding", "task_assigned",
        lambda e: put(e, find(e, ev.TASK_ASSIGNED, 3), y=3))
    add("rcvd_idx jumps", "changed", "rcvd-idx", "rcvd_advance", lambda e: put(e, find(e, ev.RCVD_ADVANCE, nth=2), x=7))
    add("rcvd_idx goes back", "changed", "rcvd-idx", "rcvd_advance",
        lambda e: put(e, find(e, ev.RCVD_ADVANCE, nth=2), x=1))
    add("rcvd_idx moves on untold", "dropped", "rcvd-idx", "yield", lambda e: drop(e, find(e, ev.RCVD_ADVANCE, nth=2)))
    add("a batch of another size is sent", "changed", "indices", "index_put",
        lambda e: put(e, find(e, ev.INDEX_PUT, 3), x=5))
    add("another sample than the sampler's", "changed", "indices", "sample begin",
        lambda e: put(e, find(e, ev.SAMPLE[0], 3), y=999))
    add("another index than the sampler's", "changed", "indices", "sample_index",
        lambda e: put(e, find(e, ev.SAMPLE_INDEX, 3), y=999), "at once")
    add("a message that shrinks on its way", "changed", "bytes", "result_rebuild begin",
        lambda e: put(e, find(e, ev.RESULT_REBUILD[0], 3), x=7))
    add("data out of an error", "changed", "outcomes", "yield",
        lambda e: put(e, find(e, ev.YIELD, x=Outcome.ERROR), x=Outcome.DATA), "dataset error")
    add("an outcome that does not exist", "changed", "vocabulary", "result_put",
        lambda e: put(e, find(e, ev.RESULT_PUT, 3), x=7))
    add("an epoch that miscounts", "changed", "counts", "epoch end", lambda e: put(e, find(e, ev.EPOCH[1]), y=7))
    add("a next that miscounts", "changed", "counts", "next end", lambda e: put(e, find(e, ev.NEXT[1], 3), x=7))
    add("an epoch is numbered twice", "changed", "epochs", "epoch begin",
        lambda e: put(e, find(e, ev.EPOCH[0], nth=1), x=0))
    add("a wait without a timeout", "changed", "bounded", "result_get begin",
        lambda e: put(e, find(e, ev.RESULT_GET[0], nth=2), x=0))
    add("two workers with one seed", "changed", "started", "worker_ready",
        lambda e: put(e, find(e, ev.WORKER_READY, nth=1), z=int(e["z"][find(e, ev.WORKER_READY)])))
    # the reorder buffer
    add("a batch is stored though order does not matter", "forged", "reorder", "reorder_store",
        lambda e: forge(e, find(e, ev.YIELD, 3), find(e, ev.RESULT_GET[1], 3),
            code=ev.REORDER_STORE, x=0, y=1), "in_order off")
    add("a batch leaves the reorder buffer and never came in", "forged", "reorder", "reorder_pop",
        lambda e: forge(e, find(e, ev.YIELD, plain_task(e)), find(e, ev.RESULT_GET[1], plain_task(e)),
            code=ev.REORDER_POP, x=plain_task(e) + 1, y=0))
    # iterable datasets
    add("a worker that has ended is given a task", "re-attributed", "exhausted", "task_assigned",
        lambda e: put(e, _next_assignment(e), worker=int(e["worker"][find(e, ev.WORKER_EXHAUSTED)])),
            "iterable, uneven")
    add("an end that counts too many workers", "changed", "exhausted", "worker_exhausted",
        lambda e: put(e, find(e, ev.WORKER_EXHAUSTED), x=1), "iterable, uneven")
    add("an end that turns into data", "changed", "outcomes", "result_get end",
        lambda e: put(e, find(e, ev.RESULT_GET[1], y=Outcome.EXHAUSTED), y=Outcome.DATA), "iterable, uneven")
    # starts, messages, ends
    add("a worker that nobody started", "dropped", "started", "worker_ready",
        lambda e: drop(e, find(e, ev.WORKER_START[0], worker=1), find(e, ev.WORKER_START[1], worker=1)))
    add("a worker that works before it is ready", "dropped", "lifecycle", "fetch begin",
        lambda e: drop(e, find(e, ev.WORKER_READY, worker=1)))
    add("a worker that is ready before its fetcher is made", "moved", "initialised", "worker_ready",
        lambda e: move(e, find(e, ev.MAKE_FETCHER[1], worker=1), find(e, ev.WORKER_READY, worker=1), 1))
    add("a worker that is ready and was not initialised", "dropped", "initialised", "worker_ready",
        lambda e: drop(e, *(find(e, code, worker=last_ready(e)) for code in (*ev.WORKER_INIT, *ev.MAKE_FETCHER))))
    add("worker_init_fn is called when the fetcher is made", "swapped", "initialised", "worker_init begin",
        lambda e: swap(swap(e, find(e, ev.WORKER_INIT[0], worker=1), find(e, ev.MAKE_FETCHER[0], worker=1), "code"),
            find(e, ev.WORKER_INIT[1], worker=1), find(e, ev.MAKE_FETCHER[1], worker=1), "code"))
    add("a fetch before the fetcher is made", "moved", "initialised", "fetch begin", early_fetch)
    add("a new epoch with the old fetcher", "dropped", "initialised", "fetch begin",
        lambda e: drop(e, *(find(e, code, worker=1, nth=1) for code in ev.MAKE_FETCHER)))
    add("an epoch that nobody began", "dropped", "lifecycle", "next begin", lambda e: drop(e, find(e, ev.EPOCH[0])))
    add("a new epoch that nobody announced", "dropped", "messages", "resume_ack",
        lambda e: drop(e, find(e, ev.RESUME_PUT, worker=1)))
    add("a new epoch that nobody acknowledged", "dropped", "messages", "result_get end",
        lambda e: drop(e, find(e, ev.RESUME_ACK, worker=1)))
    add("a new epoch before everybody has answered", "dropped", "resume", "epoch begin", resumed_alone)
    add("a sentinel that nobody sent", "dropped", "told-first", "join begin",
        lambda e: drop(e, find(e, ev.SENTINEL_PUT, worker=1), find(e, ev.SENTINEL_GET, worker=1),
            find(e, ev.WORKER_EXIT, worker=1)))
    add("a sentinel that came from nowhere", "dropped", "messages", "sentinel_get",
        lambda e: drop(e, find(e, ev.SENTINEL_PUT, worker=1)))
    add("a sentinel before the done event", "dropped", "done-first", "sentinel_put", lambda e: drop(e, workers_done(e)))
    add("a task skipped before the done event", "forged", "done-first", "done_event_seen", early_skip)
    add("data after the sentinel", "forged", "told-to-leave", "result_put", sentinel_after_all, "skipped tasks")
    add("a new epoch announced after the sentinel", "forged", "told-to-leave", "resume_put",
        lambda e: forge(e, find(e, ev.RESUME_PUT, worker=1), find(e, ev.SENTINEL_PUT, worker=1)))
    add("a worker that leaves unbidden", "dropped", "explained", "worker_exit",
        lambda e: drop(e, find(e, ev.SENTINEL_GET, worker=1)))
    add("a worker that is terminated and was not joined", "dropped", "join-first", "terminate", unjoined, "timeout")
    add("a worker that vanishes", "dropped", "explained", "worker_gone",
        lambda e: drop(e, find(e, ev.WORKER_EXIT, worker=1)))
    add("a worker whose end nobody saw", "dropped", "leftovers", "shutdown end", silent_worker)
    add("a worker that is left behind", "changed", "leftovers", "shutdown end", left_alone)
    add("a worker works on after its exit", "forged", "told-to-leave", "index_get begin",
        lambda e: forge(e, find(e, ev.INDEX_GET[0], worker=1), find(e, ev.WORKER_EXIT, worker=1)))
    add("a dead worker writes on", "forged", "gone", "index_get begin", work_after_death, "killed worker")
    add("an orphan that did not look", "changed", "explained", "worker_exit",
        lambda e: put(e, find(e, ev.WORKER_EXIT, worker=1), x=Ending.ORPHANED))
    # the pin thread
    add("the pin thread is not told to stop", "dropped", "pin-first", "sentinel_put",
        lambda e: drop(e, find(e, ev.DONE_EVENT_SET, x=DoneEvent.PIN_THREAD)), "pinned")
    add("the pin thread is not woken", "dropped", "pin-first", "join begin",
        lambda e: drop(e, find(e, ev.SENTINEL_PUT, x=QueueId.RESULT)), "pinned")
    add("the workers are stopped before the pin thread", "moved", "pin-first", "done_event_set",
        lambda e: move(e, workers_done(e), find(e, ev.DONE_EVENT_SET, x=DoneEvent.PIN_THREAD)), "pinned")
    add("the pin thread leaves before it is told to stop", "moved", "pin-end", "pin_exit",
        lambda e: move(e, find(e, ev.PIN_EXIT), find(e, ev.DONE_EVENT_SET, x=DoneEvent.PIN_THREAD)), "pinned")
    add("the pin thread outlives its join", "moved", "pin-first", "join end",
        lambda e: move(e, find(e, ev.PIN_EXIT), workers_done(e), 1), "pinned")
    add("the pin thread pins what it has not received", "dropped", "whole-way", "pin begin",
        lambda e: drop(e, find(e, ev.RESULT_GET[1], 3)), "pinned")
    add("a batch is read that was not handed on", "dropped", "whole-way", "ready_get end",
        lambda e: drop(e, find(e, ev.READY_PUT, nth=-1)), "pinned")
    # a loader's state
    add("a state that came with no result", "dropped", "state-sent", "state_kept",
        lambda e: drop(e, find(e, ev.STATE_PUT, kept_task(e))), "resumed")
    add("another worker's state", "re-attributed", "state-sent", "state_put",
        lambda e: put(e, find(e, ev.STATE_PUT, kept_task(e)), worker=1 - owner(e, kept_task(e))), "resumed")
    add("a state counts when its batch is received", "moved", "state-yielded", "state_kept",
        lambda e: move(e, find(e, ev.STATE_KEPT, kept_task(e)), find(e, ev.RESULT_GET[1], kept_task(e)), 1), "resumed")
    add("a state of what was fetched", "changed", "state-taken", "state_taken",
        lambda e: put(e, find(e, ev.STATE_TAKEN, nth=2), x=7), "resumed")
    add("a resumed epoch that forgets what was yielded before", "dropped", "turn", "task_assigned",
        lambda e: drop(e, find(e, ev.RESUMED)), "resumed")
    # spans
    add("a sample without an end", "dropped", "spans", "sample begin", lambda e: drop(e, find(e, ev.SAMPLE[1], 3)))
    add("a next without an end", "dropped", "spans", "next begin", lambda e: drop(e, find(e, ev.NEXT[1], 3)))
    add("a next inside a next", "doubled", "spans", "next begin", lambda e: double(e, find(e, ev.NEXT[0], 3)))
    add("a batch is yielded when next has returned", "moved", "handed-out", "next end",
        lambda e: move(e, find(e, ev.YIELD, 3), find(e, ev.NEXT[1], 3), 1), "no workers")
    # fmt: on
    return out


def _next_assignment(e: Rows) -> int:
    """The assignment that follows the first end of a worker."""
    end = find(e, ev.WORKER_EXHAUSTED)
    return int(np.flatnonzero((e["code"] == ev.TASK_ASSIGNED) & (np.arange(len(e)) > end))[0])


# --- What no rule can object to ---------------------------------------------------------------------------------------
def concurrent(e: Rows) -> Rows:
    """Two neighbours of different workers change places: neither knows of the other."""
    inner = np.isin(e["process"], e["process"][e["code"] == ev.WORKER_READY])
    both = inner[1:] & inner[:-1] & (e["process"][1:] != e["process"][:-1])
    at = int(np.flatnonzero(both)[0])
    return swap(e, at, at + 1, "time")


def without_a_wait(e: Rows) -> Rows:
    """A wait that brought nothing is left out."""
    end = find(e, ev.RESULT_GET[1], x=Message.EMPTY)
    begin = np.flatnonzero((e["code"] == ev.RESULT_GET[0]) & (np.arange(len(e)) < end))[-1]
    return drop(e, int(begin), end)


def other_pids(e: Rows) -> Rows:
    """Every thread has another number."""
    e["tid"] += 1000
    return e


def later(e: Rows) -> Rows:
    """The machine was started an hour earlier."""
    e["time"] += 3600 * 10**9
    return e


def another_sample(e: Rows) -> Rows:
    """A sample behind a batch's first is another one: the sampler's event tells the first index alone."""
    e = put(e, find(e, ev.SAMPLE[0], 3, 2), y=999)
    return put(e, find(e, ev.SAMPLE[1], 3, 2), y=999)


def last_words(e: Rows) -> Rows:
    """A worker's last event is not there, as if it had been killed before it: the loader tells of its end."""
    worker = e["process"] == e["process"][find(e, ev.WORKER_READY, worker=1)]
    return drop(e, int(np.flatnonzero(worker & (e["code"] != ev.WORKER_EXIT))[-1]))


def _without(code: int) -> Edit:
    return lambda e: drop(e, find(e, code))


HARMLESS: dict[str, tuple[str, str, Edit]] = {
    "two workers' steps change places": ("persistent", "neither knows of the other: both can come first", concurrent),
    "an empty wait is left out": ("timeout", "how often the loader looks round is no decision", without_a_wait),
    "threads have other numbers": ("persistent", "numbers of threads mean nothing", other_pids),
    "an hour later": ("persistent", "only differences of times mean something", later),
    "another sample inside a batch": (
        "persistent", "the sampler's event has the first index alone", another_sample),
    "a worker's last words": ("persistent", "a process that ends may leave its last event unwritten", last_words),
    "a segment is not told": (
        "persistent", "how many segments a batch needs is the batch's business", _without(ev.SHM_ALLOC)),
    "a whole message's length": ("persistent", "it belongs to no task", _without(ev.RESULT_READ)),
    "a queue that is not closed": ("persistent", "closing is tidiness; the process ends", _without(ev.QUEUE_CLOSE)),
    "a feeder that is waited for": (
        "persistent", "it delays the exit and changes nothing that was sent", _without(ev.CANCEL_JOIN_THREAD)),
}  # fmt: skip
"""Name -> the trace, why no event can give it away, and the edit."""


# --- The table --------------------------------------------------------------------------------------------------------
MUTATIONS = _table()


@dataclass(frozen=True)
class Caught:
    """What the checker says of one mutation. slice: events in the shortest slice; least: none can be left out."""

    mutation: Mutation
    rule: str
    event: str
    slice: int
    least: bool

    @property
    def right(self) -> bool:
        return (self.rule, self.event) == (self.mutation.rule, self.mutation.event)


def caught(mutation: Mutation) -> Caught:
    report = examine(spoiled(recorded.recorded(mutation.run), mutation.edit))
    first = report.first
    if first is None or report.slice is None:
        return Caught(mutation, "accepted", "", 0, False)
    event = name_of(int(report.trace.events["code"][first.at]))
    return Caught(mutation, first.rule, event, len(report.slice.rows), report.slice.minimal)


def table() -> str:
    """The mutation table: each corruption, the rule that says so, at which event, and the shortest slice's length."""
    lines = [f"{'corruption':<52}  {'how':<13}  {'trace':<16}  {'rule':<13}  {'first impossible event':<22}  slice"]
    everything = [caught(mutation) for mutation in MUTATIONS]
    for found in everything:
        m, least = found.mutation, "" if found.least else "+"
        wrong = "" if found.right else f"   NOT {m.rule} at {m.event}"
        start = f"{m.name:<52}  {m.how:<13}  {m.run:<16}  {found.rule:<13}  {found.event:<22}"
        lines.append(f"{start}  {found.slice}{least}{wrong}")
    right = sum(found.right for found in everything)
    lines.append(f"{right} of {len(MUTATIONS)} corruptions are caught by the right rule at the first impossible event")
    lines += ["", "accepted, since no event can give them away:"]
    for name, (run, why, edit) in HARMLESS.items():
        first = examine(spoiled(recorded.recorded(run), edit)).first
        lines.append(f"{name:<36}  {'accepted' if first is None else first.rule:<9}  {why}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
