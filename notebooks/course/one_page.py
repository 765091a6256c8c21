"""Questions and checks of 04_one_page, and the crew: workers by a clock that counts ticks.

A crew makes runs that are the same every time, so that a loader can be broken on purpose: where a process would wait
forever, `get` raises. Its messages are the package's own.
"""

from __future__ import annotations

import io
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import minidl
from course.asking import Asked, Choice, Count, Worker, question, rows
from course.checking import Wrong, exercise
from minidl.wire.errors import ExceptionWrapper
from minidl.wire.messages import Result, WorkerExhausted

if TYPE_CHECKING:
    from IPython.display import Image


class WaitsForever(Exception):
    """A `get` to which no worker will ever put anything."""


class Crew:
    """Workers that take tasks from queues of their own and put results into one that they share.

    dataset: samples by index; or, if `streams`, a list of samples for each worker, from which it takes the next ones,
    whatever the indices are. A sample takes one tick, or `slow[index]`. killed: worker -> the number of its tasks after
    which it is killed. reports: whether a worker sends an exception as its task's result; else it dies of it.
    """

    def __init__(
        self, dataset: Any, workers: int = 1, *, streams: bool = False, slow: Mapping[int, int] | None = None,
        killed: Mapping[int, int] | None = None, reports: bool = True,
    ) -> None:  # fmt: skip
        self.dataset, self.workers, self.reports = dataset, workers, reports
        self.slow, self.killed = dict(slow or {}), dict(killed or {})
        self.streams = [iter(share) for share in dataset] if streams else None
        self.now = 0
        self.outstanding = self.most = 0
        self.bars: list[tuple[str, int, int, str]] = []
        """Lane, begin, end and number of what was done."""
        self.tasks: list[tuple[int, int]] = []
        """Number and worker of each task, in the order in which they were put."""
        self._free, self._taken, self._dead = [0] * workers, [0] * workers, [False] * workers
        self._done: list[tuple[int, int, Result]] = []
        self._order = itertools.count()
        self._named: list[tuple[Any, str]] = []  # what was fetched, and the number of its task

    def put(self, worker: int, index: Sequence[int], idx: int = -1) -> None:
        """Put a task into a worker's index queue."""
        self.outstanding += 1
        self.most = max(self.most, self.outstanding)
        self.tasks.append((idx, worker))
        if self._dead[worker]:
            return
        if self.killed.get(worker) == self._taken[worker]:
            self._dead[worker] = True
            return
        self._taken[worker] += 1
        data = self._fetch(worker, index)
        begin = max(self.now, self._free[worker])
        if data is None:
            self._dead[worker] = True
            return
        took = 0 if isinstance(data, WorkerExhausted) else sum(self.slow.get(i, 1) for i in index)
        self._free[worker] = begin + took
        self._named.append((data, str(idx if idx >= 0 else len(self.tasks) - 1)))
        self.bars.append((f"worker {worker}", begin, begin + took, self._named[-1][1]))
        self._done.append((begin + took, next(self._order), Result(idx, worker, data)))

    def _fetch(self, worker: int, index: Sequence[int]) -> Any:
        try:
            if self.streams is None:
                return [self.dataset[i] for i in index]
            return list(itertools.islice(self.streams[worker], len(index))) or WorkerExhausted(worker)
        except Exception as error:
            return ExceptionWrapper(error, f"in worker {worker}") if self.reports else None

    def get(self, timeout: int | None = None) -> Any:
        """The next result of the queue that all share; None after `timeout` ticks. WaitsForever if there is no bound."""
        if not self._done and timeout is None:
            dead = [worker for worker in range(self.workers) if self._dead[worker]]
            raise WaitsForever(
                f"get() waits forever: {self.outstanding} tasks are outstanding, " + (f"and workers {dead} are dead" if dead else
                "and no worker has anything to do")
            )  # fmt: skip
        ready = min(self._done, default=None, key=lambda done: done[:2])
        if ready is None or (timeout is not None and ready[0] > self.now + timeout):
            self.now += timeout or 0
            return None
        self._done.remove(ready)
        if ready[0] > self.now:
            self.bars.append(("loop", self.now, ready[0], "waits"))
        self.now = max(self.now, ready[0])
        self.outstanding -= 1
        return ready[2]

    def alive(self, worker: int) -> bool:
        """Whether the worker's process runs."""
        return not self._dead[worker]

    def train(self, loader: Iterable[Any], ticks: int = 1) -> list[Any]:
        """A loop over the loader, which works on each batch; what it got."""
        got = []
        for number, batch in enumerate(loader):
            got.append(batch)
            name = next((name for data, name in self._named if data is batch), str(number))
            self.bars.append(("loop", self.now, self.now + ticks, name))
            self.now += ticks
        return got

    def picture(self, title: str = "") -> Image:
        """What loop and workers did, tick by tick. A number is a task's; hatched: the loop waits."""
        from IPython.display import Image
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        lanes = ["loop", *(f"worker {worker}" for worker in range(self.workers))]
        figure = Figure(figsize=(11, 0.7 + 0.36 * len(lanes)), dpi=100, layout="constrained")
        axes = figure.add_subplot()
        for lane, begin, end, text in self.bars:
            waits = text == "waits"
            style = {"facecolor": "white", "hatch": "///", "edgecolor": "#8a94a0"} if waits else {"edgecolor": "white"}
            colour = {} if waits else {"facecolor": "#1459c7" if lane == "loop" else "#8fc7bd"}
            axes.broken_barh([(begin, end - begin)], (lanes.index(lane) - 0.38, 0.76), **style, **colour)
            if not waits and end > begin:
                ink = "white" if lane == "loop" else "#1c2733"
                axes.text((begin + end) / 2, lanes.index(lane), text, ha="center", va="center", color=ink, fontsize=9)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_xlim(0, max((end for _, _, end, _ in self.bars), default=1))
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlabel("ticks")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        out = io.BytesIO()
        figure.savefig(out, format="png")
        return Image(out.getvalue(), alt=title)


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
def flood(crew: Crew) -> Asked:
    """Unbounded: the whole epoch is out at once."""
    return Asked(
        f"An epoch of {len(crew.tasks)} batches. How many finished or unfinished batches were outstanding at most?",
        Count(crew.most),
        "When does `AllAtOnce` stop putting tasks?",
        "All of them, before the loop has seen the first batch: `__init__` empties the sampler. A batch of 100 MB would fill the "
        "memory, and an endless sampler would never return.",
        slips={2: "`AllAtOnce` has no bound yet.", 1: "`AllAtOnce` has no bound yet."},
    )


@question
def swapped(crew: Crew, got: Sequence[Any]) -> Asked:
    """Unnumbered results come as they are ready."""
    return Asked(
        f"Worker 0's first sample is slow, worker 1's are not. The sampler gave the batches in the order 0, 1, 2, ... Which batch does "
        f"`Bounded` hand out first? (Batch n begins with sample {len(got[0])}n.)",
        Count(int(got[0][0]) // len(got[0])),
        "`get` takes what is there. Which worker has put first?",
        "The queue is shared, and nobody compares numbers: what is ready first comes first. The same seed would give another order "
        "on another day.",
    )


@question
def waiting_for(crew: Crew) -> Asked:
    """A worker that has ended is waited for."""
    ended = next(worker for worker in range(crew.workers) if crew._dead[worker])
    return Asked(
        "`InOrder` has raised `WaitsForever` instead of waiting. Whose task does it wait for?",
        Worker(ended),
        "Which worker's sample raised? What has this worker put into the result queue?",
        f"The exception ended worker {ended}, and with it all tasks that it had. In a real loader, your program would now hang, "
        "without a word.",
    )


@question
def between(effects: Sequence[str]) -> Asked:
    """The driver replaces a task before it yields the batch."""
    first = effects.index("Deliver")
    return Asked(
        "The driver has received the result of task 0, and it is its turn. What does it do before it hands the batch out: nothing, send "
        "the next task, or check the workers?",
        Choice("send the next task", {
            "nothing": ("hand it out",),
            "send the next task": ("next task", "send a task", "put a task", "sends a task", "DRAW", "Assignment", "draw an index"),
            "check the workers": ("check", "liveness", "liveness check"),
        }),
        "Look at `from_step_one[:16]`, the list of effects, from the first `Get` to the first `Deliver`.",
        f"{' → '.join(effects[first - 3 : first + 1])}: the worker gets its next task first, so that it has work while your loop has the "
        "batch. It is what `_process_data` of `InOrder` does.",
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
        "It is the loader of this page. Look at `Bounded.__init__`.",
        "`prefetch_factor * num_workers`, as on this page: the driver draws that many indices at the beginning, and one for each "
        "batch that it yields.",
        row,
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
@exercise
def try_put_index(base: type, method: Callable[[Any], None]) -> str:
    """The reader's method, in the notebook's loader: who gets which number, and when it stops."""

    def mine(loader: Any) -> None:
        try:
            method(loader)
        except StopIteration:  # a loop over the loader would just end
            raise Wrong(
                "`StopIteration` has left `_try_put_index`.",
                "The step `sampler_next`: it leaves `_process_data`, too, and with it the batch in hand. "
                "`next(self.indices, None)` gives `None` when the sampler has no more.",
            ) from None

    kind = type("MyLoader", (base,), {"_try_put_index": mine})
    for workers, prefetch, batches in ((1, 2, 5), (2, 2, 7), (3, 1, 4), (2, 3, 2)):
        crew = Crew(list(range(2 * batches)), workers, slow={0: 5})
        indices = [[2 * n, 2 * n + 1] for n in range(batches)]
        about = f"{workers} {'worker' if workers == 1 else 'workers'}, prefetch {prefetch}, {batches} batches"
        try:
            loader = kind(indices, crew, prefetch)
            first = len(crew.tasks)
            got = crew.train(loader)
        except (WaitsForever, KeyError) as error:
            raise _failed(
                crew, f"{about}: {type(error).__name__}: {error}",
                "The step `_try_put_index`: it sends a task for the next index, if the sampler has one, under the number `send_idx`, and "
                "remembers in `task_info` whose it is.",
            ) from None  # fmt: skip
        wanted = [(n, n % workers) for n in range(batches)]
        if crew.tasks != wanted:
            place = next((n for n, (a, b) in enumerate(zip(crew.tasks, wanted, strict=False)) if a != b), len(wanted))
            raise _failed(
                crew, f"{about}: task {place} should be the number {place}, for worker {place % workers}; "
                f"you have sent {crew.tasks[place] if place < len(crew.tasks) else 'nothing'}.",
                "The step `task_assigned`: numbers go up by one from 0, and workers take turns.",
            )  # fmt: skip
        if loader.task_info != dict(wanted):
            raise _failed(
                crew, f"{about}: `task_info` is {loader.task_info}; it should be {dict(wanted)}.",
                "The step `task_assigned`: `task_info[send_idx]` remembers the worker, before `send_idx` goes up.",
            )  # fmt: skip
        if got != indices:
            raise _failed(crew, f"{about}: the loop got {got}.", "The step `yield`: in the sampler's order.")
        if (first, crew.most) != (min(prefetch * workers, batches),) * 2:
            raise _failed(
                crew, f"{about}: {crew.most} tasks were outstanding, {first} of them at the beginning.",
                "The step `check_capacity`: `prefetch * workers` calls at the beginning, and one for each batch that is yielded.",
            )  # fmt: skip
    return "Tasks are numbered, dealt out in turn, bounded by `prefetch * workers`, and end with the sampler."


def _failed(crew: Crew, words: str, step: str) -> Wrong:
    """What is said of a run of a crew: with its tasks in the order in which they were put, and its picture."""
    told = "\n".join(f"put task {idx} into the queue of worker {worker}" for idx, worker in crew.tasks)
    return Wrong(words, step, evidence=told, picture=crew.picture("what loop and workers did in your run").data)


@exercise
def worker_loop(function: Callable[[Any, Any, Any], None]) -> str:
    """A worker's loop, in a thread with two queues."""
    step = "The worker's loop (`_worker_loop`): take a task, fetch, put the result; a sentinel (`None`) ends it."
    samples = {index: index * 10 for index in range(8)}  # a dataset: sample 9 raises KeyError
    cases = [
        ("two tasks", [(0, [0, 1]), (1, [2, 3]), None], [(0, [0, 10]), (1, [20, 30])]),
        ("nothing but the sentinel", [None], []),
        ("a sample raises", [(0, [9]), (1, [4]), None], [(0, KeyError), (1, [40])]),
        ("a task behind the sentinel", [(0, [5]), None, (1, [6])], [(0, [50])]),
    ]
    for name, tasks, wanted in cases:
        told: queue.Queue[Any] = queue.Queue()
        results: queue.Queue[Any] = queue.Queue()
        for task in tasks:
            told.put(task)
        ended: list[BaseException | None] = []
        thread = threading.Thread(target=_run, args=(function, samples, told, results, ended), daemon=True)
        thread.start()
        thread.join(5)
        if thread.is_alive():
            told.put(None)  # it may still leave
            raise Wrong(
                f"{name}: the worker has not left its loop.", "The step `sentinel_get`: `None` ends the loop. " + step
            )
        if isinstance(ended[0], NotImplementedError):
            raise ended[0]
        if ended[0] is not None:
            raise Wrong(
                f"{name}: {type(ended[0]).__name__}: {ended[0]} has ended the worker.",
                "The step `fetch`: an exception of the dataset is the result of its task. If it ends the worker, the loader waits for "
                "a result that never comes.",
            )
        got = [results.get_nowait() for _ in range(results.qsize())]
        if [_seen(one) for one in got] != [(idx, one if one is KeyError else tuple(one)) for idx, one in wanted]:  # type: ignore[arg-type]
            raise Wrong(
                f"{name}: the results should be {wanted}; they are {got}.",
                "The step `result_put`: one result a task, under the task's number. " + step,
            )
    return "Tasks are answered one by one, an exception is an answer, and the sentinel ends the loop at once."


def _run(
    function: Callable[..., None], samples: Any, told: Any, results: Any, ended: list[BaseException | None]
) -> None:
    try:
        function(samples, told, results)
        ended.append(None)
    except BaseException as error:
        ended.append(error)


def _seen(result: Any) -> Any:
    try:
        idx, data = result
        return idx, type(data) if isinstance(data, Exception) else tuple(data)
    except TypeError:
        return result
