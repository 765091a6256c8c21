"""Questions and checks of 04_one_page, and what keeps its broken loaders harmless.

Its loaders have worker processes, and some are broken on purpose: `get` raises where one would wait forever, and `train`
and `end` leave no worker behind.
"""

from __future__ import annotations

import difflib
import inspect
import io
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.context import ForkContext, ForkProcess
from types import SimpleNamespace
from typing import Any

import minidl
from course import PATIENCE
from course.asking import Asked, Choice, Count, Worker, question, rows
from course.checking import Wrong, exercise
from course.data import until
from minidl import mini


class WaitsForever(BaseException):
    """A wait for a message that nobody will send. No `except Exception` of a loader takes it for an error of a sample."""


class _Quiet(ForkProcess):
    def run(self) -> None:
        sys.stderr = io.StringIO()  # else the traceback of a worker that dies is shown, in whichever cell runs by then
        super().run()


class _Fork(ForkContext):
    Process = _Quiet  # type: ignore[assignment]


context = _Fork()


def get(messages: Any, workers: Sequence[Any], seconds: float = 1) -> Any:
    """The queue's next message. WaitsForever if none comes for so long and a worker is dead; or for PATIENCE."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            return messages.get(timeout=seconds)
        except queue.Empty:
            if dead := [number for number, worker in enumerate(workers) if not worker.is_alive()]:
                raise WaitsForever(f"no message comes any more: workers {dead} are dead") from None
    raise WaitsForever(f"no message has come for {PATIENCE} s: which task is the loader waiting for?")


def waiting(loader: Any) -> int:
    """The batches in the data queue, after so long a time that the workers have no task left."""
    if not until(lambda: loader._data_queue.qsize() >= loader._tasks_outstanding, PATIENCE, 0.001):
        raise WaitsForever(f"{loader._data_queue.qsize()} of {loader._tasks_outstanding} batches have come")
    return int(loader._data_queue.qsize())


def train(loader: Any, step: Callable[[Any], object] = lambda batch: None) -> list[Any]:
    """A loop over the loader, which takes a step with each batch; what it got. Ends the loader's workers."""
    got = []
    try:
        for batch in loader:
            got.append(batch)
            step(batch)
    finally:
        end(loader)
    return got


def end(loader: Any) -> None:
    """End the loader's workers: as it does it itself, if it can, and in any case."""
    getattr(loader, "_shutdown_workers", lambda: None)()
    for worker in loader._workers:
        worker.kill()
        worker.join()
    for index_queue in loader._index_queues:
        index_queue.cancel_join_thread()  # nobody reads what is left
        index_queue.close()


def beside(page: type, methods: Iterable[str]) -> float:
    """Print mini's methods beside the page's; return the share of the page's lines that are mini's, too.

    `+`: only mini has the line; `-`: only the page. Comments, and how deep a line is indented, do not count.
    """
    lines, kept, told = [], 0, 0
    for name in methods:
        pages, minis = (_code(getattr(kind, name)) for kind in (page, mini._MultiProcessingDataLoaderIter))
        matcher = difflib.SequenceMatcher(None, [line.strip() for line in pages], [line.strip() for line in minis])
        for tag, begin, stop, first, last in matcher.get_opcodes():
            same = tag == "equal"
            lines += [f"- {line}" for line in pages[begin:stop] if not same]
            lines += [f"{' ' if same else '+'} {line}" for line in minis[first:last]]
            kept += (stop - begin) * same
        lines.append("")
        told += len(pages)
    print("\n".join(lines))
    return kept / told


def _code(function: Any) -> list[str]:
    """A method's lines, without comments and docstring."""
    lines = inspect.getsource(function).replace(f'"""{function.__doc__}"""', "").splitlines()
    return [line[4:] for line in (line.split("  #")[0].rstrip() for line in lines) if line and line.strip()[0] != "#"]


# --- Questions --------------------------------------------------------------------------------------------------------
@question
def alternates(trace: minidl.Trace) -> Asked:
    """Without workers, one thing at a time."""
    samples, begins, ends = rows(trace, "sample", "B"), rows(trace, "consumer", "B"), rows(trace, "consumer", "E")
    inside = sum(any(begin < row < end for row in samples) for begin, end in zip(begins, ends, strict=False))
    return Asked(
        f"The loop had {len(rows(trace, 'yield'))} batches, and worked on each for a while. During how many of these times was a "
        "sample fetched?",
        Count(inside),
        "There is one process, with one thread. Can it fetch while it trains?",
        "`next(iterator)` fetches, then returns; the loop trains, then asks again. The two alternate: the time of an epoch is the "
        "sum of both.",
        next(row for row in begins if row > rows(trace, "yield")[0]),
    )  # fmt: skip


@question
def flood(waiting: Sequence[int]) -> Asked:
    """Unbounded: the whole epoch is out at once."""
    batches = len(waiting)
    return Asked(
        f"An epoch of {batches} batches. The loop works on batch 0, for long. How many finished batches wait for it in the data queue?",
        Count(waiting[0]),
        "When does `AllAtOnce` stop putting tasks?",
        "All but the one that the loop has: `_reset` empties the sampler before the loop has seen the first batch. A batch of 100 MB would "
        "fill the memory, and an endless sampler would never return.",
        slips={2: "`AllAtOnce` has no bound yet.", 1: "`AllAtOnce` has no bound yet.", batches: "The loop has one of them."},
    )  # fmt: skip


@question
def swapped(got: Sequence[Any]) -> Asked:
    """Unnumbered results come as they are ready."""
    return Asked(
        "Worker 0's first sample is slow, worker 1's are not. The sampler gave the batches in the order 0, 1, 2, ... Which batch does "
        f"`Bounded` hand out first? (Batch n begins with sample {len(got[0])}n.)",
        Count(got[0][0] // len(got[0])),
        "`_get_data` takes what is there. Which worker has put first?",
        "The queue is shared, and nobody compares numbers: what is ready first comes first. The same seed would give another order "
        "on another day.",
    )


@question
def waiting_for(loader: Any) -> Asked:
    """A worker that has ended is waited for."""
    ended = next(number for number, worker in enumerate(loader._workers) if worker.exitcode == 1)  # others were killed
    return Asked(
        "`InOrder` has raised `WaitsForever` instead of waiting. Whose task does it wait for?",
        Worker(ended),
        "Which worker's sample raised? What has this worker put into the data queue?",
        f"The exception ended worker {ended}, and with it all tasks that it had. In a real loader, your program would now hang, "
        "without a word of the loader.",
    )


@question
def early(got: Sequence[Any], shares: Sequence[Any]) -> Asked:
    """A StopIteration of a worker ends the loop."""
    size = sum(map(len, shares))
    return Asked(
        f"The shares have {size} samples: {' and '.join(str(len(share)) for share in shares)}. How many did the loop get from `Raising`?",
        Count(sum(map(len, got))),
        "The loader raises what is in the message. What does a `for` loop do with a `StopIteration`?",
        "Worker 0's second task has no samples. The loader raises its `StopIteration` when the task's turn has come, and the loop takes this "
        "for the end: the rest of worker 1's share is lost, and no error tells.",
        slips={size: "Worker 0's second task raises before the rest of worker 1's share has its turn."},
    )  # fmt: skip


@question
def between(effects: Sequence[Any]) -> Asked:
    """The driver replaces a task before it yields the batch."""
    named = [getattr(effect, "name", type(effect).__name__) for effect in effects]
    return Asked(
        "The driver has received the result of task 0, and it is its turn. What does it do before it hands the batch out?",
        Choice("send the next task" if named[-2:] == ["Assignment", "Deliver"] else "nothing", {
            "nothing": ("Then the worker would have one task less while your loop has the batch, and might run out of them.",),
            "send the next task": ("Is there an effect of this kind in the list?", "next task", "the next task", "send a task", "put a task", "DRAW", "Assignment"),
            "check the workers": ("It does that when nothing has come for a while. Here, a result has come.", "check", "liveness check"),
            "wait for the loop": ("The loop waits for the driver: it is in `next`.", "wait"),
        }),
        "It is what `_process_data` does, as torch's.",
        f"{' → '.join(named)}: the worker gets its next task first, so that it has work while your loop has the batch. It is what "
        "`_process_data` of this page does.",
    )  # fmt: skip


@question
def outstanding(trace: minidl.Trace) -> Asked:
    """The same bound, in the real loader."""
    events = trace.to_pandas()
    most = int(events.outstanding.max())
    (facts,) = trace.loaders.values()
    row = next(row for row in rows(trace, "task_assigned") if events.outstanding[row] == most)
    return Asked(
        f"The real loader: {facts['num_workers']} workers, `prefetch_factor={facts['prefetch_factor']}`. How many tasks were "
        "outstanding at most?",
        Count(most),
        "It is the loader of this page. Look at `Bounded._reset`.",
        "`prefetch_factor * num_workers`, as on this page: the driver draws that many indices at the beginning, and one for each "
        "batch that it yields.",
        row,
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
def _on_paper(
    base: type, method: Callable[[Any], None], workers: int, prefetch: int, indices: list[Any]
) -> tuple[Any, list[Any]]:
    """The notebook's loader with the reader's method, without processes; and number, worker, index of each task put.

    A task is answered when a result is wanted.
    """
    tasks: list[Any] = []
    answers = iter(tasks)  # also of what is put later

    def mine(loader: Any) -> None:
        try:
            method(loader)
        except StopIteration:  # a loop over the loader would just end
            raise Wrong(
                "`StopIteration` has left `_try_put_index`.",
                "The step `sampler_next`: it leaves `_process_data`, too, and with it the batch in hand. Catch it: the sampler has no more.",
            ) from None

    def answered(loader: Any) -> Any:
        for idx, _, index in answers:
            return idx, index
        raise WaitsForever("a result is waited for, and no task is outstanding")

    loader: Any = object.__new__(type("MyLoader", (base,), {"_try_put_index": mine, "_get_data": answered}))
    loader._num_workers, loader._prefetch_factor, loader._sampler_iter = workers, prefetch, iter(indices)
    loader._index_queues = [
        SimpleNamespace(put=lambda task, worker=worker: tasks.append((task[0], worker, task[1])))
        for worker in range(workers)
    ]
    return loader, tasks


@exercise
def try_put_index(base: type, method: Callable[[Any], None]) -> str:
    """The reader's method, in the notebook's loader: who gets which number, and when it stops."""
    for workers, prefetch, batches in ((1, 2, 5), (2, 2, 7), (3, 1, 4), (2, 3, 2)):
        indices, about = [[2 * n, 2 * n + 1] for n in range(batches)], f"num_workers={workers}, {batches} batches"
        loader, tasks = _on_paper(base, method, workers, prefetch, indices)

        def failed(words: str, step: str, tasks: list[Any] = tasks, about: str = about) -> Wrong:
            told = [f"put task {idx} into the queue of worker {worker}" for idx, worker, _ in tasks]
            return Wrong(f"{about}: {words}", step, evidence="\n".join(told))

        try:
            loader._reset(None)
            first, info = len(tasks), dict(loader._task_info)
            got = list(loader)
        except (WaitsForever, KeyError) as error:
            raise failed(
                f"{type(error).__name__}: {error}",
                "The step `_try_put_index`: it sends a task for the next index, if the sampler has one, under the number `_send_idx`, and "
                "remembers in `_task_info` whose it is.",
            ) from None
        sent, wanted = [task[:2] for task in tasks], [(n, n % workers) for n in range(batches)]
        if sent != wanted:
            place = next((n for n, (a, b) in enumerate(zip(sent, wanted, strict=False)) if a != b), len(wanted))
            raise failed(
                f"task {place} should be the number {place}, for worker {place % workers}; "
                f"you have sent {sent[place] if place < len(sent) else 'nothing'}.",
                "The step `task_assigned`: numbers go up by one from 0, and workers take turns.",
            )
        if first != min(prefetch * workers, batches):
            raise failed(
                f"{first} tasks were sent at the beginning.",
                "The step `check_capacity`: one task for each call; there are `prefetch_factor * num_workers` calls at the beginning.",
            )
        if info != {n: (worker,) for n, worker in wanted[:first]}:
            raise failed(
                f"`_task_info` is {info} at the beginning; it should be {{0: (0,), ...}}.",
                "The step `task_assigned`: `_task_info[_send_idx]` remembers the worker, before `_send_idx` goes up.",
            )
        if got != indices:
            raise failed(f"the loop got {got}.", "The step `yield`: in the sampler's order.")
    return "Tasks are numbered, dealt out in turn, bounded, and end with the sampler."


class _Tasks(queue.Queue[Any]):
    def get(self, *args: Any, **options: Any) -> Any:
        if self.empty():
            raise WaitsForever("the worker waits behind its sentinel")
        return super().get()


@exercise
def worker_loop(function: Callable[..., None]) -> str:
    """A worker's loop, in this process."""
    step = "The worker's loop: take a task, fetch, put the result; a sentinel, `(None, None)`, ends it."
    samples, sentinel = {index: index * 10 for index in range(8)}, (None, None)  # a dataset: sample 9 raises KeyError
    cases: list[tuple[str, bool, list[Any], list[Any]]] = [
        ("two tasks", False, [(0, [0, 1]), (1, [2, 3]), sentinel], [(0, [0, 10]), (1, [20, 30])]),
        ("nothing but the sentinel", False, [sentinel], []),
        ("a sample raises", False, [(0, [9]), (1, [4]), sentinel], [(0, KeyError), (1, [40])]),
        ("a task behind the sentinel", False, [(0, [5]), sentinel, (1, [6])], [(0, [50])]),
        ("the done event is set", True, [(0, [5]), (1, [6]), sentinel], []),
    ]
    for name, done, tasks, wanted in cases:
        told, results, event = _Tasks(), queue.Queue[Any](), threading.Event()
        for task in tasks:
            told.put(task)
        if done:
            event.set()
        try:
            function(lambda index: [samples[i] for i in index], told, results, event)
        except WaitsForever:
            raise Wrong(f"{name}: the worker has not left its loop.", f"The step `sentinel_get`. {step}") from None
        except KeyError as error:
            raise Wrong(
                f"{name}: KeyError: {error} has ended the worker.",
                "The step `fetch`: an exception of the dataset is the result of its task. If it ends the worker, the loader waits for "
                "a result that never comes.",
            ) from None
        got = [results.get_nowait() for _ in range(results.qsize())]
        if [_seen(one) for one in got] != wanted:
            raise Wrong(
                f"{name}: the results should be {wanted}; they are {got}.",
                f"The step `result_put`: one result a task, under the task's number. {step}",
            )
    return "Tasks are answered one by one, an exception is an answer, and the sentinel ends the loop at once."


def _seen(result: Any) -> Any:
    """A result as a number and a list, or the type of an exception (or of one that is wrapped)."""
    try:
        idx, data = result
        return idx, list(data) if isinstance(data, (list, tuple)) else getattr(data, "exc_type", type(data))
    except TypeError:
        return result
