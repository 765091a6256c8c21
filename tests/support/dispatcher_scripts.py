"""Random scripts for the dispatcher, and the model that it is compared with, written without looking at it.

`play(dispatcher_class, script)` is the checker: it drives a dispatcher as the loader drives it, keeps books of its own
in `Books`, and raises AssertionError at the first step that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from minidl.loader.dispatcher import EPOCH_END, STALE, STORED, Assignment, Deliver, Dispatcher, DispatchError, Wait


# --- The script -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Script:
    """One epoch, or several. `answers` says at each wait what comes: ("result", n) is the n-th task in flight,
    ("exhausted", n) the same as a worker's end, ("dead", w) the loss of a worker; when used up, the oldest task in
    flight is answered."""

    num_workers: int
    prefetch_factor: int
    in_order: bool
    tasks: tuple[int, ...]  # one epoch each: what the sampler has
    answers: tuple[tuple[str, int], ...]


NUMBER = st.integers(0, 11)
ANSWER = st.one_of(
    st.tuples(st.just("result"), NUMBER),
    st.tuples(st.just("exhausted"), NUMBER),
    st.tuples(st.just("dead"), NUMBER),
)
LIVELY = st.lists(st.tuples(st.just("result"), NUMBER), max_size=40)
MIXED = st.lists(ANSWER, max_size=25)


@st.composite
def scripts(draw: Any) -> Script:
    return Script(
        num_workers=draw(st.integers(1, 4)),
        prefetch_factor=draw(st.integers(1, 3)),
        in_order=draw(st.booleans()),
        tasks=tuple(draw(st.lists(st.integers(0, 25), min_size=1, max_size=2))),
        answers=tuple(draw(st.one_of(LIVELY, MIXED))),
    )


# --- The model --------------------------------------------------------------------------------------------------------
@dataclass
class Task:
    """One task that was sent. state: "flying", "kept" (in the reorder buffer), "yielded" or "lost" (never to come)."""

    worker: int
    index: str
    state: str = "flying"
    answered: bool = False


@dataclass
class Books:
    """Everything that was ever sent in this epoch. Nothing is counted along the way: each number is counted anew."""

    script: Script
    tasks: list[Task] = field(default_factory=list)
    active: list[bool] = field(default_factory=list)
    turn: int = 0  # the worker that is asked first for the next task

    def __post_init__(self) -> None:
        self.active = [True] * self.script.num_workers

    @property
    def capacity(self) -> int:
        return self.script.num_workers * self.script.prefetch_factor

    @property
    def unanswered(self) -> int:
        return sum(not task.answered for task in self.tasks)

    @property
    def first_open(self) -> int:
        """The first task that is not yielded and may still be."""
        done = ("yielded", "lost")
        return next((idx for idx, task in enumerate(self.tasks) if task.state not in done), len(self.tasks))

    def load(self, worker: int) -> int:
        """Tasks that the worker was sent and the consumer has not had."""
        return sum(task.worker == worker and task.state != "yielded" for task in self.tasks)

    def taker(self) -> int | None:
        """Who gets the next task; moves the turn on."""
        for _ in range(self.script.num_workers):
            worker, self.turn = self.turn, (self.turn + 1) % self.script.num_workers
            if not self.active[worker]:
                continue
            if self.script.in_order or self.load(worker) < self.capacity // sum(self.active):
                return worker
        return None

    def lose(self, worker: int) -> None:
        """The worker will answer nothing more, as far as the loader knows."""
        self.active[worker] = False

    def give_up(self) -> None:
        """Before it waits, the loader gives up what inactive workers owe, up to the first task that it can have."""
        for task in self.tasks:
            if task.state == "flying" and not self.active[task.worker]:
                task.state = "lost"
            elif task.state in ("flying", "kept"):
                return

    def flying(self) -> list[int]:
        return [idx for idx, task in enumerate(self.tasks) if not task.answered]


# --- The checker ------------------------------------------------------------------------------------------------------
class Player:
    """Drives one dispatcher through a script, checking each answer."""

    def __init__(self, dispatcher: Dispatcher, script: Script) -> None:
        self.dispatcher = dispatcher
        self.script = script
        self.answers = iter(script.answers)
        self.books = Books(script)
        self.yielded: list[int] = []
        self.supply: Iterator[str] = iter(())

    def play(self) -> list[list[int]]:
        """All epochs; returns the tasks yielded, epoch by epoch."""
        return [self.epoch(number, tasks) for number, tasks in enumerate(self.script.tasks)]

    def epoch(self, number: int, tasks: int) -> list[int]:
        if number > 0:
            self.dispatcher.reset()
        self.books, self.yielded = Books(self.script), []
        self.supply = (f"{number}:{idx}" for idx in range(tasks))
        self.agree("reset")
        for _ in range(self.books.capacity):
            self.send()
        for _ in range(1000):
            if self.step():
                self.check_epoch()
                return self.yielded
        raise AssertionError("the epoch does not end")

    def send(self) -> None:
        """One more task, if the sampler has one."""
        assert self.books.unanswered < self.books.capacity, "more tasks outstanding than the capacity"
        index = next(self.supply, None)
        if index is None:
            return
        worker = self.books.taker()
        given = self.dispatcher.assign(index)
        if worker is None:
            assert given is None, f"{given}, and no worker may take it"
        else:
            assert given == Assignment(len(self.books.tasks), worker), f"{given}: expected worker {worker}"
            self.books.tasks.append(Task(worker, index))
        self.agree("assign")

    def step(self) -> bool:
        """One turn of the loader's loop; True at the end of the epoch."""
        self.books.give_up()
        expected = self.books.first_open
        step = self.dispatcher.next_step()
        if step is EPOCH_END:
            assert expected == len(self.books.tasks), f"the epoch ends, and task {expected} is not yielded"
            return True
        assert expected < len(self.books.tasks), f"{step}, and every task is done"
        if isinstance(step, Deliver):
            assert self.books.tasks[expected].state == "kept", f"{step}: task {expected} comes first"
            self.deliver(step, expected)
        else:
            assert step == Wait(expected, self.books.tasks[expected].worker)
            self.agree("next_step", rcvd=expected)
            self.answer()
        return False

    def deliver(self, step: Any, idx: int) -> None:
        task = self.books.tasks[idx]
        assert step == Deliver(idx, task.worker, f"data of {task.index}"), f"{step}: expected task {idx}"
        turn = self.books.first_open
        task.state = "yielded"
        self.yielded.append(idx)
        self.agree("deliver", rcvd=turn + (idx == turn))
        self.send()

    def answer(self) -> None:
        """Something comes: a result, the end of a worker's dataset, or the news that a worker is dead."""
        kind, number = next(self.answers, ("result", 0))
        flying = self.books.flying()
        if kind == "dead":
            worker = number % self.script.num_workers
            self.dispatcher.worker_unavailable(worker)
            self.books.lose(worker)
            self.agree("worker_unavailable")
            return
        idx = flying[number % len(flying)]
        task = self.books.tasks[idx]
        if kind == "exhausted" and self.books.active[task.worker]:
            self.exhaust(idx, task)
        else:
            self.receive(idx, task)

    def exhaust(self, idx: int, task: Task) -> None:
        self.dispatcher.exhausted(idx, task.worker)
        task.answered, task.state = True, "lost"
        self.books.lose(task.worker)
        self.agree("exhausted")
        self.send()

    def receive(self, idx: int, task: Task) -> None:
        step = self.dispatcher.receive(idx, f"data of {task.index}")
        task.answered = True
        if task.state == "lost":
            assert step is STALE, f"{step}: task {idx} was given up"
            self.agree("stale")
        elif idx == self.books.first_open or not self.script.in_order:
            self.deliver(step, idx)
        else:
            assert step is STORED, f"{step}: task {idx} came before its turn"
            task.state = "kept"
            self.agree("stored")

    def agree(self, after: str, rcvd: int | None = None) -> None:
        """Every number of the dispatcher is what the books say."""
        d, books = self.dispatcher, self.books
        kept = {idx for idx, task in enumerate(books.tasks) if task.state == "kept"}
        open_ = {idx: task for idx, task in enumerate(books.tasks) if task.state in ("flying", "kept")}
        assert d.send_idx == len(books.tasks), after
        assert d.tasks_outstanding == books.unanswered, after
        assert d.tasks_outstanding <= d.capacity == books.capacity, after
        assert d.workers_status == books.active, after
        assert d.reorder_depth == len(kept), after
        assert all(d.workers_num_tasks[w] == books.load(w) for w, active in enumerate(books.active) if active), after
        assert {idx: (i.worker_id, i.index, i.fetched) for idx, i in d.task_info.items()} == {
            idx: (task.worker, task.index, idx in kept) for idx, task in open_.items()
        }, after
        assert rcvd is None or d.rcvd_idx == rcvd, after
        assert refuses(d) == (books.unanswered == books.capacity), after

    def check_epoch(self) -> None:
        """What must hold of a whole epoch, said without the books' step by step."""
        assert len(set(self.yielded)) == len(self.yielded), "a task was yielded twice"
        if self.script.in_order:
            assert self.yielded == sorted(self.yielded), "out of order"
        if all(self.books.active):
            assert sorted(self.yielded) == list(range(len(self.books.tasks))), "a task is missing"
            assert not self.books.unanswered, "the epoch ended with tasks outstanding"
            assert next(self.supply, None) is None, "the epoch ended before the sampler did"
            if self.script.in_order:
                turns = [idx % self.script.num_workers for idx in range(len(self.books.tasks))]
                assert [task.worker for task in self.books.tasks] == turns, "not round robin"


def refuses(dispatcher: Dispatcher) -> bool:
    """Whether the dispatcher says that no more tasks may be outstanding."""
    try:
        dispatcher.check_capacity()
    except DispatchError:
        return True
    return False


def play(dispatcher_class: type[Dispatcher], script: Script) -> list[list[int]]:
    """Drive a dispatcher of this class; returns the yielded tasks, epoch by epoch. Raises AssertionError."""
    dispatcher = dispatcher_class(script.num_workers, script.prefetch_factor, script.in_order)
    return Player(dispatcher, script).play()
