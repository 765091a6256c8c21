"""The dispatcher, driven by random scripts and compared with the model of `dispatcher_scripts`."""

from __future__ import annotations

import copy

import pytest
from dispatcher_scripts import Script, play, scripts
from hypothesis import event, given, settings

from minidl.loader.dispatcher import (
    EPOCH_END,
    NOT_FETCHED,
    STALE,
    STORED,
    Assignment,
    Deliver,
    Dispatcher,
    DispatchError,
    TaskInfo,
    Wait,
)


@pytest.mark.heavy
@given(scripts())
@settings(max_examples=300)
def test_every_step_is_what_the_model_says(script: Script) -> None:
    """In order and not; with workers that end, or die; in a second epoch, too."""
    yielded = play(Dispatcher, script)
    event("all tasks yielded" if tuple(map(len, yielded)) == script.tasks else "some given up")


# --- Examples, to read ------------------------------------------------------------------------------------------------
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


def test_out_of_order_the_room_of_an_ended_worker_is_shared() -> None:
    d = primed(num_workers=2, prefetch_factor=2, in_order=False)
    d.exhausted(0, 0)
    assert d.assign("next") == Assignment(4, 1)  # capacity 4, one worker active: room for four
    assert d.workers_num_tasks[1] == 3


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
    d.exhausted(0, 0)
    assert d.held_by(0) == [2]
    with pytest.raises(DispatchError, match="task 0, which is unknown"):
        d.receive(0, "again")


def test_a_batch_of_none_is_a_batch() -> None:
    assert TaskInfo(0, "index", None).fetched
    assert not TaskInfo(0, "index", NOT_FETCHED).fetched


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
