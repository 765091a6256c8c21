"""The dispatcher, driven by random scripts and compared with the model of `dispatcher_scripts`."""

from __future__ import annotations

import copy

import pytest
from dispatcher_scripts import Script, play, scripts
from hypothesis import event, given
from hypothesis import strategies as st

from minidl.loader.dispatcher import (
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


# --- Properties -------------------------------------------------------------------------------------------------------
@given(scripts())
def test_every_step_is_what_the_model_says(script: Script) -> None:
    yielded = play(Dispatcher, script)
    event("all tasks yielded" if tuple(map(len, yielded)) == script.tasks else "some given up")


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


def test_a_copy_goes_its_own_way() -> None:
    dispatcher = Dispatcher(2, 2)
    for index in "abc":
        dispatcher.assign(index)
    dispatcher.receive(1, "data of b")
    twin = copy.copy(dispatcher)
    assert twin.freeze() == dispatcher.freeze()
    assert twin.receive(0, "data of a") == Deliver(0, 0, "data of a")
    twin.worker_unavailable(1)
    assert (dispatcher.rcvd_idx, dispatcher.workers_status) == (0, [True, True])
    assert not dispatcher.task_info[0].fetched


def test_a_resumed_epoch_goes_on_in_turn() -> None:
    dispatcher = Dispatcher(3, 1)
    dispatcher.start_at(2)
    assert [dispatcher.assign(index) for index in "ab"] == [Assignment(0, 2), Assignment(1, 0)]


def test_a_copy_goes_on_by_itself() -> None:
    dispatcher = Dispatcher(3, 2, in_order=False)
    dispatcher.assign("a")
    other = copy.copy(dispatcher)
    assert other == dispatcher
    assert other.assign("b") == Assignment(1, 1)
    assert dispatcher.send_idx == 1


def test_a_worker_whose_dataset_has_ended_holds_no_task_that_it_has_answered() -> None:
    dispatcher = Dispatcher(1, 2)
    dispatcher.assign("a")
    dispatcher.assign("b")
    dispatcher.exhausted(0, 0)
    assert dispatcher.held_by(0) == [1]
    assert dispatcher.tasks_outstanding == 1
    with pytest.raises(DispatchError, match="task 0, which is unknown"):
        dispatcher.receive(0, "again")


def test_out_of_order_a_share_of_the_capacity_is_rounded_down() -> None:
    d = Dispatcher(4, 2, in_order=False)
    assert [d.assign(index) for index in range(8)][4] == Assignment(4, 0)
    d.exhausted(3, 3)
    assert d.assign(8) is None  # 8 tasks for 3 workers: 2 for each, which they have
    assert [d.held_by(worker) for worker in range(4)] == [[0, 4], [1, 5], [2, 6], [7]]
