"""Questions and checks of 05_many_workers."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import minidl
from course.asking import Asked, Count, Worker, question, rows, yes_no
from course.checking import Wrong, exercise, explored, fails, runs, whole
from minidl.explore.configurations import Configuration
from minidl.loader.dispatcher import Deliver, Dispatcher


def settings(trace: minidl.Trace) -> tuple[int, int]:
    """num_workers and prefetch_factor of the trace's loader."""
    (facts,) = trace.loaders.values()
    return int(facts["num_workers"]), int(facts["prefetch_factor"])


def _with(trace: minidl.Trace) -> str:
    workers, prefetch = settings(trace)
    return f"{workers} workers, `prefetch_factor={prefetch}`"


@question
def first_tasks(trace: minidl.Trace) -> Asked:
    """Priming."""
    workers, prefetch = settings(trace)
    first = rows(trace, "next", "B")[0]
    sent = [row for row in rows(trace, "task_assigned") if row < first]
    for_each = "`prefetch_factor` is for each worker."
    return Asked(
        f"{_with(trace)}. How many tasks are sent before the loop asks for its first batch?",
        Count(len(sent)),
        "`iter(loader)` does not wait to be asked. How much work may each worker have, and how many workers are there?",
        f"`_reset` primes the loop: `prefetch_factor * num_workers` = {prefetch} * {workers} calls of `_try_put_index`. "
        "At this moment the last of them has been dealt out, and `rcvd_idx` is still 0.",
        sent[-1],
        {prefetch: for_each, workers: "With one task for each worker, a worker would have nothing to do while its batch is on its way."
         + (f" {for_each}" if workers == prefetch else ""),
         0: "Then all workers would be idle until the loop asks."},
    )  # fmt: skip


@question
def most_outstanding(trace: minidl.Trace) -> Asked:
    """The capacity."""
    events = trace.to_pandas()
    most = int(events.outstanding.max())
    last = [row for row in rows(trace, "task_assigned") if events.outstanding[row] == most][-1]
    return Asked(
        f"{_with(trace)}, {len(rows(trace, 'yield'))} batches. How many tasks are outstanding (sent, and not received yet) at most?",
        Count(most),
        "One task is sent at the start for each place. When is the next one sent?",
        "The capacity is `prefetch_factor * num_workers`; `check_capacity` guards it. A task is sent only for one that is yielded, "
        "so that memory stays bounded however slow your loop is.",
        last,
    )  # fmt: skip


@question
def sent_for_each(trace: minidl.Trace) -> Asked:
    """One in, one out."""
    assigned, yielded = rows(trace, "task_assigned"), rows(trace, "yield")
    between = [sum(a < row < b for row in assigned) for a, b in itertools.pairwise(yielded)]
    row = next(row for row in assigned if row > yielded[0])
    return Asked(
        "And while the sampler has indices left: how many tasks are sent for each batch that is yielded?",
        Count(max(between)),
        "Between one `yield` and the next, count `task_assigned`.",
        "`_process_data` sends one task for the one that it yields. It does so before it hands the batch out: the new task is "
        "fetched while your loop works.",
        row,
    )  # fmt: skip


@question
def owner(trace: minidl.Trace, task: int = 5) -> Asked:
    """Round robin."""
    (row,) = rows(trace, "task_assigned", task=task)
    worker = int(trace.events["worker"][row])
    return Asked(
        f"Which worker gets task {task}? There are {settings(trace)[0]} workers.",
        Worker(worker),
        "In order, workers take turns, however long their last task took.",
        f"`_next_worker` goes round: {task} % {settings(trace)[0]} = {worker}. It does not look who is free.",
        row,
    )


@question
def buffered(trace: minidl.Trace) -> Asked:
    """Head-of-line blocking, in a number."""
    workers, prefetch = settings(trace)
    (arrival,) = rows(trace, "result_get", "E", task=0)
    stored = [row for row in rows(trace, "reorder_store") if row < arrival]
    waiting = [task for task in range(workers * prefetch) if task % workers == 0][1:]
    behind = f"tasks {', '.join(map(str, waiting))} wait" if len(waiting) > 1 else f"task {waiting[0]} waits"
    return Asked(
        f"{_with(trace)}. Sample 0 is slow, so task 0 is. How many batches are finished, and wait in the reorder buffer, just "
        "before task 0 arrives?",
        Count(len(stored)),
        f"{workers * prefetch} tasks were sent, and no more are before one is yielded. Which of them can be finished? "
        "Whose index queue are the others in?",
        f"`prefetch_factor * (num_workers - 1)` = {prefetch} * {workers - 1}: {workers * prefetch} tasks were sent; {behind} behind task 0 in "
        "worker 0's own index queue; all others are done, and stored. No worker has anything to do.",
        stored[-1],
        {workers * prefetch - 1: "That would be all but task 0. But worker 0 has more than one task, and does them one after the other.",
         workers - 1: "That would be one for each other worker. Each has `prefetch_factor` tasks, and all the time that it needs.",
         0: "The other workers do not wait for worker 0. Only the loop does."},
    )  # fmt: skip


@question
def next_after_slow(trace: minidl.Trace) -> Asked:
    """What the buffer holds is not waited for."""
    yielded = rows(trace, "yield")
    popped = rows(trace, "reorder_pop")
    (arrival,) = rows(trace, "result_get", "E", task=0)
    events = trace.to_pandas()
    gets = [row for row in rows(trace, "result_get", "B") if row > arrival]
    handed = [int(events.task[row]) for row in yielded if row < gets[0]]
    return Asked(
        "Task 0 arrives at last. How many batches does the loop now receive without the loader waiting for any other result? "
        "(Task 0 counts.)",
        Count(len(handed)),
        "Go through the numbers from 0: which batches lie in the buffer? The first that does not ends the row.",
        f"`rcvd_idx` moves over what is there: tasks {', '.join(map(str, handed))}. Task {handed[-1] + 1} is worker 0's, which begins "
        "with it only now.",
        next((row for row in popped if row > arrival), yielded[0]),
    )  # fmt: skip


@question
def fewest(trace: minidl.Trace) -> Asked:
    """Out of order, a slow worker gets less."""
    events = trace.to_pandas()
    tasks = events[events.name == "task_assigned"].groupby("worker").task.count()
    worker = int(tasks.idxmin())
    last = rows(trace, "task_assigned", worker=worker)[-1]
    return Asked(
        "The same with `in_order=False`. Which worker gets the fewest tasks?",
        Worker(worker),
        "A worker that is busy for 0.6 s has no room for more. Which one is it?",
        f"Worker {worker} got {int(tasks.min())} tasks, the others {' and '.join(str(int(n)) for w, n in tasks.items() if w != worker)}. "
        "`_has_room`: out of order, a worker gets a task only while it holds less than its share of the capacity. This is the last one "
        "that it got.",
        last,
    )  # fmt: skip


@question
def last_batch(trace: minidl.Trace) -> Asked:
    """What giving up the order does not buy."""
    events = trace.to_pandas()
    order = [int(events.task[row]) for row in rows(trace, "yield")]
    early = order.index(0) * 2 < len(order)
    return Asked(
        "Can the epoch end before task 0 is finished, with `in_order=False`: yes or no?",
        yes_no(False, "Batches may overtake task 0. May the epoch leave it out?"),
        "Task 0 takes 0.6 s either way. How many batches does the loop receive in an epoch? Which samples are in them?",
        f"The loop had {order.index(0)} of {len(order)} batches before task 0, and then waited for it "
        f"{'in the middle' if early else 'with nothing else left'}. The wait has moved, and is shorter by what the loop "
        "received meanwhile; with enough later batches it would be hidden.",
        rows(trace, "yield")[order.index(0)],
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
PLAIN = Configuration("an epoch", workers=3, prefetch=2, tasks=8)


@exercise
def reorder_buffer(kind: type[Dispatcher]) -> str:
    """A dispatcher whose `receive` the reader has written: all interleavings of a small loader."""
    if not (isinstance(kind, type) and issubclass(kind, Dispatcher)):
        raise Wrong("Give the class itself: a subclass of `Dispatcher`.", "")
    kind(1, 1).receive  # noqa: B018  # a stub says here that it is not written yet
    _stub(kind)
    found = explored(PLAIN, dispatcher=kind)
    if found is not None:
        raise fails(
            *found, "The step `receive`: a result has come. It is delivered if it is task `rcvd_idx`; else it stays in `task_info` "
            "until its turn. Either way it is no longer outstanding.", batches=[0, 1],
        )  # fmt: skip
    dispatcher = kind(num_workers=2, prefetch_factor=1)
    got: list[Any] = []  # the explorer's results carry no data
    for idx in (0, 1):
        dispatcher.assign(idx)
    for idx in (1, 0):
        step = dispatcher.receive(idx, f"batch {idx}")
        while isinstance(step, Deliver):
            got.append(step.data)
            step = dispatcher.next_step()
    if got != ["batch 0", "batch 1"]:
        raise Wrong(
            f"Batches 1 and 0 came, with data; the loop got {got}.",
            "The step `receive`: keep `data` in `task_info[idx].data` before `_deliver`, which hands out what it finds there.",
        )
    return (
        "The explorer has gone through every interleaving of three workers and eight tasks with your `receive`: every epoch yields "
        "every batch, in order, and none hangs."
    )


def _stub(kind: type[Dispatcher]) -> None:
    """Call it once, so that a stub is told from a mistake."""
    dispatcher = kind(num_workers=1, prefetch_factor=1)
    dispatcher.assign(None)
    with contextlib.suppress(AttributeError, KeyError, AssertionError, TypeError):
        dispatcher.receive(0, "batch 0")


@exercise
def room(function: Callable[[Sequence[bool], Sequence[int], int, int], int | None]) -> str:
    """The choice of a worker, out of order, held against the dispatcher's in random histories."""
    for seed in range(200):
        dice = random.Random(seed)
        dispatcher = Dispatcher(num_workers=dice.randint(2, 4), prefetch_factor=dice.randint(1, 3), in_order=False)
        for _ in range(20):
            if dispatcher.tasks_outstanding and (
                dice.random() < 0.5 or dispatcher.tasks_outstanding == dispatcher.capacity
            ):
                idx = dice.choice(list(dispatcher.task_info))
                if dice.random() < 0.1 and sum(dispatcher.workers_status) > 1:
                    dispatcher.exhausted(idx, dispatcher.task_info[idx].worker_id)
                else:
                    assert isinstance(dispatcher.receive(idx, None), Deliver)
                continue
            status, held, turn = list(dispatcher.workers_status), list(dispatcher.workers_num_tasks), dispatcher._turn
            said = function(tuple(status), tuple(held), turn, dispatcher.capacity)
            said = (
                None
                if said is None
                else whole(said, "For one task", "The step `_next_worker`: a worker's number, or None.")
            )
            given = dispatcher.assign(None)
            right = None if given is None else given.worker_id
            if said != right:
                share = dispatcher.capacity // sum(status)
                raise Wrong(
                    f"The dispatcher gives the task to {'nobody' if right is None else f'worker {right}'}; your function to "
                    f"{'nobody' if said is None else f'worker {said}'}.",
                    f"The step `_next_worker`. It is worker {turn}'s turn; active: {status}; tasks held: {held}; capacity "
                    f"{dispatcher.capacity} among {sum(status)} active workers: each may hold {share}. From the one whose turn it is, "
                    "the first that is active and holds less gets the task.",
                )  # fmt: skip
    return "In 200 random histories it has chosen as the dispatcher does: in turn, but never beyond a worker's share."


@exercise
def blocked(function: Callable[[minidl.Trace], int]) -> str:
    """A verdict's rule: how many batches came before their turn while the loop waited."""
    for name, trace in runs("head-of-line-in-order", "head-of-line-out-of-order", "workers-4"):
        events = trace.to_pandas()
        most = max((int(events.depth[row]) for row in rows(trace, "reorder_store")), default=0)
        said = whole(
            function(trace), f"In {name}",
            "The step `reorder_store`: a run in which no batch came early has none at all, and its answer is 0.",
        )  # fmt: skip
        if said != most:
            raise Wrong(
                f"In {name}, at most {most} batches lay in the reorder buffer; your function says {said}.",
                "The steps `reorder_store` and `reorder_pop`: a batch goes into the buffer, or leaves it. Their field `depth` counts "
                "what is in it then. A run may have few of these events, or none.",
                trace,
            )  # fmt: skip
    return (
        "The deeper the buffer, the longer one batch was waited for while later ones were ready. `minidl summary` calls a run "
        "head-of-line blocked by the time of such waits."
    )
