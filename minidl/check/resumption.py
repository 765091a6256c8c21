"""Rules on a loader's state: it is of what was yielded, not of what was fetched."""

from __future__ import annotations

from collections.abc import Iterator

from minidl.check.view import LoaderView, Violation, rule
from minidl.tracefile import events as ev


@rule(
    "state-sent",
    "a state that counts came with a result: of its task, from the worker that has the task",
    "A resumed worker would go on from a state that is not its own.",
    needs="task",
)
def state_sent(loader: LoaderView) -> Iterator[Violation]:
    sent, kept = loader.pick(ev.STATE_PUT), loader.pick(ev.STATE_KEPT)
    for row, given, _, worker in loader.differing("worker", ev.TASK_ASSIGNED, ev.STATE_PUT):
        yield loader.broken(f"the task was assigned to worker {worker}", row, given)
    kept = kept[loader.whole_task(kept) & loader.multiprocess]
    come = loader.match(kept, sent)
    for row in kept[(come < 0) | (come > kept)]:
        yield loader.broken("it came with no result", row, missing=f"state_put of task {loader.task[row]}")


@rule(
    "state-yielded",
    "a worker's state counts only when the batch that it came with is yielded, or its dataset has ended after that",
    "Batches between the one yielded last and this one would be skipped in a resumed epoch: samples are lost.",
    needs="task",
)
def state_yielded(loader: LoaderView) -> Iterator[Violation]:
    kept = loader.pick(ev.STATE_KEPT)
    kept = kept[loader.whole_task(kept)]
    come = loader.match(kept, loader.pick(ev.YIELD, ev.WORKER_EXHAUSTED))
    for row, reason in zip(kept, come, strict=True):
        if not 0 <= reason < row:
            yield loader.broken("its batch is not yielded yet", row, missing=f"yield of task {loader.task[row]}")


@rule(
    "state-taken",
    "the loader's state says how many batches were yielded, those of the epoch that it was resumed from among them",
    "Samples would be lost or repeated when the epoch is resumed.",
    needs="epoch",
)
def state_taken(loader: LoaderView) -> Iterator[Violation]:
    taken = loader.pick(ev.STATE_TAKEN)
    taken = taken[loader.whole_epoch(taken)]
    yields, resumed = loader.pick(ev.YIELD), loader.pick(ev.RESUMED)
    for row, last, begin in zip(
        taken, loader.last_before(taken, yields), loader.last_before(taken, resumed), strict=True
    ):
        shown = [int(at) for at in (last, begin) if at >= 0 and loader.at_epoch[at] == loader.at_epoch[row]]
        count = sum(int(loader.y[at] if at == last else loader.x[at]) for at in shown)
        if loader.x[row] + loader.y[row] != count:
            yield loader.broken(
                f"{loader.x[row]} batches and {loader.y[row]} deferred; yielded are {count}", row, *shown
            )
