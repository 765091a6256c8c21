"""Where a resumed epoch goes on: for any order of yields, nothing is lost and nothing comes twice."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any

import pytest
from exceptions_everywhere import Interrupting, Interruption
from hypothesis import given
from hypothesis import strategies as st
from sizes import slow

from minidl.resume.position import LAZY, EpochPosition, Position, fast_forward


def position(workers: int = 2, *, indexed: bool = True, **begin: object) -> EpochPosition:
    return EpochPosition([Position() for _ in range(workers)], indexed, **begin)  # type: ignore[arg-type]


@given(st.lists(st.permutations(range(6)), min_size=1, max_size=3), st.data())
def test_a_map_dataset_is_drawn_once_through_any_number_of_resumptions(
    orders: list[list[int]], data: st.DataObject
) -> None:
    """Tasks are yielded in any order; each epoch is left after some of them, and the next begins there."""
    got: list[int] = []
    one = position()
    for order in orders:
        left = list(fast_forward(iter(range(30)), 0, one.low, one.ahead))
        assert sorted(got + left) == list(range(30))
        for task in order[: data.draw(st.integers(0, len(order)))]:
            assert one.draw_of(task) == left[task]
            got.append(left[task])
            one.hand_out((task, 0))
        one.settle()
        one = position(low=one.low, ahead=one.ahead)
    assert sorted([*got, *fast_forward(iter(range(30)), 0, one.low, one.ahead)]) == list(range(30))


def test_a_state_counts_when_its_batch_is_yielded() -> None:
    one = position(indexed=False)
    one.received(2, 0, (2, b"second"))
    one.hand_out((0, 0))
    one.settle()
    assert one.places[0].state is None
    assert one.places[0].behind == 1
    one.hand_out((2, 0))
    one.settle()
    assert (one.places[0].state, one.places[0].behind, one.turn) == (b"second", 0, 1)
    one.received(4, 0, (2, b"exhausted"))
    assert one.places[0].state == b"exhausted", "it came after the worker's last batch"


def test_an_epoch_of_a_persistent_worker_begins_with_what_the_last_one_left() -> None:
    one = position(indexed=False)
    one.received(7, 1, (4, b"a leftover"))
    one.epoch_begun(1, b"left")
    one.epoch_begun(0, None)
    assert (one.places[1].state, one.places[1].over, list(one.places[1].arrived)) == (b"left", True, [])
    assert not one.places[0].over
    assert not one.resumed


def test_of_the_samplers_states_the_last_that_is_not_ahead_counts() -> None:
    one = position()
    for number in (1, 3, 5):
        one.drew(number, bytes([number]))
    assert one.sampler_state() is None
    for task in range(4):
        one.hand_out((task, task % 2))
    one.settle()
    assert one.sampler_state() == (3, b"\x03")
    assert len(one.drawn) == 2
    one.settle()
    one.hand_out((4, 0))
    one.hand_out((5, 1))
    assert one.low == 5, "while states wait, each batch is counted with the next one"
    assert one.sampler_state() == (5, b"\x05"), "it counts as soon as all that was drawn before it is yielded"
    assert len(one.drawn) == 1


def test_a_state_that_counts_is_told_with_its_task_and_worker() -> None:
    told: list[tuple[int, int]] = []

    class Told(EpochPosition):
        def keep(self, task: int, worker: int) -> None:
            told.append((task, worker))

    one = Told([Position(), Position(over=True)], indexed=False)
    one.received(1, 1, (1, b"first"))
    assert told == []
    one.hand_out((1, 1))
    one.settle()
    assert told == [(1, 1)]
    assert not one.places[1].over
    one.received(3, 1, (1, b"exhausted"))
    assert told == [(1, 1), (3, 1)]
    one.places[1].arrived.append((1, 5, b"left by an exception"))
    one.settle_but(None)
    assert told == [(1, 1), (3, 1), (5, 1)]


def test_an_epoch_is_resumed_if_something_of_it_was_yielded() -> None:
    assert not position().resumed
    assert all(
        one.resumed for one in (position(low=1), position(ahead={3}), EpochPosition([Position(1)], indexed=False))
    )


def test_what_is_deferred_counts_when_it_is_released() -> None:
    one = position()
    one.defer()
    one.hand_out((0, 0))
    one.fail((1, 1))
    one.end()
    assert (one.low, one.counted, one.deferred_batches) == (0, 3, 1)
    one.release(1)
    one.settle_but(None)
    assert (one.low, one.batches, one.ended) == (1, 1, False)
    one.release(2)
    one.release(2)
    assert (one.low, one.batches, one.ended) == (2, 1, False), "an error counts as its batch"
    one.settle_but(None)
    assert not one.ended
    steps: list[int] = []
    one.release(9, partial(steps.append, 1))
    assert steps == [1]
    one.settle_but(None)
    assert one.ended


def test_without_a_state_that_waits_many_are_counted_at_once() -> None:
    one = position()
    for task in range(LAZY + 2):
        assert one.low == (0 if task <= LAZY else LAZY)
        one.hand_out((task, task % 2))
    assert (one.counted, one.settled) == (LAZY + 2, LAZY)


@pytest.mark.parametrize("begin", [{}, {"low": 5}, {"low": 5, "ahead": {7, 9}}])
@pytest.mark.parametrize("swapped", [None, 0, 100, LAZY - 2])
def test_counted_at_once_or_one_by_one_it_is_the_same(begin: dict[str, Any], swapped: int | None) -> None:
    tasks = list(range(2 * LAZY))
    if swapped is not None:
        tasks[swapped], tasks[swapped + 1] = tasks[swapped + 1], tasks[swapped]
    ours, other = position(3, **copy.deepcopy(begin)), position(3, **copy.deepcopy(begin))
    for task in tasks:
        other.settle()
        ours.hand_out((task, task % 3))
        other.hand_out((task, task % 3))
        if len(ours.log) == 1:
            assert ours == other
    assert ours.settled == LAZY
    ours.settle()
    other.settle()
    assert ours == other
    assert ours.low == 2 * LAZY + begin.get("low", 0) + len(begin.get("ahead", ()))


@pytest.mark.parametrize("late", [0, 100, LAZY - 1])
def test_a_batch_that_comes_after_all_others_is_missing_until_then(late: int) -> None:
    """Tasks in a row without one of them are not all tasks up to the last."""
    one = position(3)
    for task in (task for task in range(3 * LAZY + 1) if task != late):
        one.hand_out((task, task % 3))
    one.settle()
    assert (one.low, one.ahead) == (late, set(range(late + 1, 3 * LAZY + 1)))
    one.hand_out((late, 0))
    one.settle()
    assert (one.low, one.ahead, one.turn) == (3 * LAZY + 1, set(), 1)


def test_batches_of_streams_are_no_draws() -> None:
    one = position(indexed=False)
    for task in range(2 * LAZY + 1):
        one.hand_out((task, task % 2))
    assert one.low == 0
    assert [place.yielded for place in one.places] == [LAZY, LAZY]
    assert one.batches == 2 * LAZY


def test_the_end_counts_at_once_if_nothing_is_deferred() -> None:
    one = position()
    one.end()
    assert one.ended


def test_fast_forwarding_draws_no_more_than_it_must() -> None:
    drawn: list[int] = []

    def draws() -> object:
        for number in range(100):
            drawn.append(number)
            yield number

    left = fast_forward(draws(), 0, 5, ())  # type: ignore[arg-type]
    assert drawn == list(range(5))
    assert next(left) == 5
    assert list(islice(fast_forward(iter(range(3, 100)), 3, 5, {7}), 4)) == [5, 6, 8, 9]
    assert drawn == list(range(6))


def test_a_sampler_that_ends_too_early_is_an_error() -> None:
    with pytest.raises(ValueError, match="after 5 draws from the sampler, which now gives 3: load it into"):
        fast_forward(iter(range(3)), 0, 5, ())


@pytest.mark.parametrize("deferred", [False, True])
def test_what_a_framework_holds_is_not_counted_and_neither_is_the_end(deferred: bool) -> None:
    """It says how many batches it holds when it asks for the state; the lag keeps as many back until then."""
    one = position(lag=2)
    if deferred:
        one.defer()
    for task in range(LAZY + 3):
        one.hand_out((task, task % 2))
    assert one.low == (0 if deferred else LAZY)
    for _ in range(2):
        one.release(LAZY + 3)
        one.settle()
    assert (one.low, one.deferred_batches) == (LAZY + 1, 2)
    one.settle_but(1)
    assert (one.low, one.deferred_batches) == (LAZY + 2, 1)
    one.end()
    one.release(one.counted)
    for _ in range(2):
        one.settle_but(0)
        assert (one.low, one.ended) == (LAZY + 3, False)
    one.settle_but(None)
    assert one.ended


def everything(one: EpochPosition) -> tuple[Any, ...]:
    place = one.places
    return (
        one.low, set(one.ahead), one.batches, one.turn, one.settled, list(one.log), one.ended, list(one.drawn),
        [(each.yielded, each.at, each.state) for each in place],
    )  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("first", [0, *slow(1)])
def test_an_exception_at_any_instruction_of_the_counting_changes_nothing_in_the_end(first: int) -> None:
    """As a signal's handler may raise one: what is asked for again gives the state that it would have given."""

    def begun() -> EpochPosition:
        one = position(ahead={3})
        for task in (*range(first, 3), *range(first)):
            one.hand_out((task, task % 2))
        one.places[1].arrived.append((1, 1, b"state"))
        return one

    expected, at, done = begun(), 0, False
    expected.settle_but(None)
    while not done:
        at, one = at + 1, begun()
        with contextlib.suppress(Interruption), Interrupting(at, {"minidl.resume.position", "minidl.wire.atomic"}):
            one._settle_at_once()
            one.settle_but(None)
            done = True
        one.settle_but(None)
        assert everything(one) == everything(expected), at
    assert at > 100


class Asking:
    """At the `at`-th instruction of the counting, a signal's handler asks for the state."""

    def __init__(self, at: int, ask: Callable[[], None]) -> None:
        self.left, self.ask = at, ask

    def call(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes = frame.f_globals.get("__name__") == "minidl.resume.position"
        return self.step

    def step(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.left -= event == "opcode"
        if not self.left:
            sys.settrace(None)
            self.ask()
        return self.step


@pytest.mark.heavy
@pytest.mark.parametrize(("first", "held"), [(0, 2), (1, None), *slow((0, None), (1, 2))])
def test_a_signals_handler_may_count_at_any_instruction_of_a_count(first: int, held: int | None) -> None:
    """All, or all but what a framework holds: nothing is counted twice, nor what it holds."""

    def begun() -> EpochPosition:
        one = position()
        for task in (*range(first, 5), *range(first)):
            one.hand_out((task, task % 2))
        one.places[1].arrived.extend([(1, 1, b"first"), (2, 3, b"second")])
        one.drawn.extend([(1, b"one"), (2, b"two"), (3, b"three"), (5, b"five")])
        return one

    def asks(one: EpochPosition) -> None:
        one.settle_but(held)
        one.sampler_state()

    expected, at, asking = begun(), 0, None
    asks(expected)
    while asking is None or not asking.left:
        at, one = at + 1, begun()
        asking, before = Asking(at, partial(asks, one)), sys.gettrace()
        sys.settrace(asking.call)
        try:
            if held is None:
                one._settle_at_once()
            asks(one)
        finally:
            sys.settrace(before)  # coverage's, perhaps
        asks(one)
        assert everything(one) == everything(expected), at
    assert at > 100
