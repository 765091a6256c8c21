"""The dispatcher, driven by scripts of chance and held against a model that was written without looking at it.

`play(dispatcher_class, script)` is the checker: it drives a dispatcher as the loader drives it, keeps books of its own
in `Books`, and raises AssertionError at the first step that differs. `test_mutations.py` runs the same checker over
broken dispatchers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minidl.dispatcher import (
    EPOCH_END,
    NOT_FETCHED,
    STALE,
    STORED,
    Assignment,
    Deliver,
    Dispatcher,
    DispatchError,
    Signal,
    TaskInfo,
    Wait,
)


# --- The script: who answers what, and when ---------------------------------------------------------------------------
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
        task.answered = True
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


# --- Properties -------------------------------------------------------------------------------------------------------
@settings(max_examples=400, deadline=None)
@given(scripts())
def test_every_step_is_what_the_model_says(script: Script) -> None:
    yielded = play(Dispatcher, script)
    event("all tasks yielded" if tuple(map(len, yielded)) == script.tasks else "some given up")


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(8)), st.booleans())
def test_yields_in_order_or_on_arrival(arrivals: list[int], in_order: bool) -> None:
    """All eight tasks are in flight at once, and come in any order."""
    dispatcher = Dispatcher(4, 2, in_order)
    for index in range(8):
        dispatcher.assign(index)
    yielded = []
    for idx in arrivals:
        step: Deliver | Wait | Signal = dispatcher.receive(idx, f"batch {idx}")
        while isinstance(step, Deliver):
            yielded.append(step.data)
            step = dispatcher.next_step()
    assert yielded == [f"batch {idx}" for idx in (range(8) if in_order else arrivals)]
    assert dispatcher.next_step() is EPOCH_END


# --- Prose ------------------------------------------------------------------------------------------------------------
def primed(num_workers: int = 2, prefetch_factor: int = 2, in_order: bool = True) -> Dispatcher:
    dispatcher = Dispatcher(num_workers, prefetch_factor, in_order)
    for index in range(dispatcher.capacity):
        dispatcher.assign(f"index {index}")
    return dispatcher


def test_an_epoch_as_a_story() -> None:
    d = Dispatcher(num_workers=2, prefetch_factor=1)
    assert d.next_step() is EPOCH_END  # nothing was sent
    assert [d.assign("a"), d.assign("b")] == [Assignment(0, 0), Assignment(1, 1)]
    assert d.next_step() == Wait(idx=0, worker_id=0)
    assert d.receive(1, "B") is STORED  # worker 1 was faster
    assert (d.reorder_depth, d.tasks_outstanding) == (1, 1)
    assert d.next_step() == Wait(0, 0)  # head-of-line blocking
    assert d.receive(0, "A") == Deliver(0, 0, "A")
    assert d.assign("c") == Assignment(2, 0)
    assert d.next_step() == Deliver(1, 1, "B")
    assert d.next_step() == Wait(2, 0)


def test_the_capacity_is_a_bound() -> None:
    d = primed()
    with pytest.raises(DispatchError, match=r"task 4: 4 tasks are outstanding, the capacity is 2 \* 2 = 4"):
        d.assign("one too many")
    with pytest.raises(DispatchError, match="task 4"):
        d.check_capacity()
    assert d.send_idx == 4
    d.receive(3, "kept")  # received is no longer outstanding, even if not yielded
    d.check_capacity()


def test_out_of_order_a_slow_worker_gets_no_more_than_its_room() -> None:
    d = primed(num_workers=2, prefetch_factor=2, in_order=False)
    for idx in (1, 3):  # worker 1 is fast, worker 0 keeps its two
        d.receive(idx, "data")
        given = d.assign("next")
        assert given is not None
        assert given.worker_id == 1
    assert d.workers_num_tasks == [2, 2]


def test_out_of_order_the_room_of_an_ended_worker_is_shared() -> None:
    d = primed(num_workers=2, prefetch_factor=2, in_order=False)
    d.exhausted(0, 0)
    assert d.assign("next") == Assignment(4, 1)  # capacity 4, one worker active: room for four
    assert d.workers_num_tasks[1] == 3


def test_an_index_that_nobody_may_take_is_dropped() -> None:
    d = primed(num_workers=1, prefetch_factor=1)
    d.exhausted(0, 0)
    assert d.assign("for nobody") is None
    assert d.send_idx == 1


def test_round_robin_skips_who_has_ended_and_goes_on_from_there() -> None:
    d = primed(num_workers=3, prefetch_factor=1)
    d.exhausted(1, 1)
    assert d.assign("x") == Assignment(3, 0)
    d.receive(0, "A")
    assert d.assign("y") == Assignment(4, 2)


def test_a_dead_workers_tasks_are_given_up_and_what_still_comes_is_stale() -> None:
    d = primed(num_workers=2, prefetch_factor=2)
    d.worker_unavailable(0)
    assert d.next_step() == Wait(1, 1)  # task 0 of worker 0 is given up, task 2 is not reached yet
    assert 0 not in d.task_info
    assert d.receive(0, "written before it died") is STALE
    assert d.tasks_outstanding == 3
    with pytest.raises(DispatchError, match="task 0, which is unknown"):
        d.receive(0, "twice")
    # Task 2 is not given up before its turn: if its result comes first, it is used.
    assert d.receive(2, "C") is STORED
    assert d.receive(1, "B") == Deliver(1, 1, "B")
    assert d.next_step() == Deliver(2, 0, "C")


def test_results_that_no_task_explains_are_errors() -> None:
    d = primed()
    with pytest.raises(DispatchError, match="a result came for task 9, which is unknown"):
        d.receive(9, None)
    d.receive(1, None)
    with pytest.raises(DispatchError, match="a result came for task 1, which is fetched already"):
        d.receive(1, None)
    with pytest.raises(DispatchError, match="task 0 was sent to another worker than 1"):
        d.exhausted(0, 1)


def test_a_batch_of_none_is_a_batch() -> None:
    assert TaskInfo(0, "index", None).fetched
    assert not TaskInfo(0, "index", NOT_FETCHED).fetched


def test_reset_begins_at_task_and_worker_zero_with_everybody_active() -> None:
    d = primed(num_workers=3, prefetch_factor=1)
    d.exhausted(0, 0)
    d.next_step()
    d.reset()
    assert (d.send_idx, d.rcvd_idx, d.task_info, d.tasks_outstanding) == (0, 0, {}, 0)
    assert (d.workers_status, d.workers_num_tasks) == ([True] * 3, [0] * 3)
    assert [d.assign(index) for index in "abc"] == [Assignment(idx, idx) for idx in range(3)]
    assert d.receive(0, "new") == Deliver(0, 0, "new")  # not stale: what was given up is forgotten
