"""The driver, asked as the iterator asks it: its main paths, step by step, and every interleaving that chance finds."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from exceptions_everywhere import Interrupting, Interruption
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.explore.configurations import Configuration, Crash
from minidl.explore.guards import OURS
from minidl.explore.model import Model
from minidl.explore.search import judge
from minidl.loader.dispatcher import Assignment, Deliver, Dispatcher, DispatchError
from minidl.loader.driver import (
    DRAW,
    END,
    MP_STATUS_CHECK_INTERVAL,
    PIN,
    READY,
    SHUT_DOWN,
    Driver,
    Effect,
    Evidence,
    Failure,
    Get,
    JoinPin,
    JoinWorkers,
    NoteDeath,
    PutResume,
    PutSentinel,
    Raise,
    Simple,
    Terminate,
)
from minidl.loader.protocol import LoaderEvent as Event
from minidl.loader.protocol import LoaderLifecycle, LoaderState, ProtocolError
from minidl.wire.messages import Result, ResumeIteration, WorkerExhausted

GET = Get(MP_STATUS_CHECK_INTERVAL)
LEFTOVERS = [
    Simple.FORGET_WORKERS,
    Terminate(kill=False, timeout=MP_STATUS_CHECK_INTERVAL),
    Terminate(kill=True, timeout=MP_STATUS_CHECK_INTERVAL),
    END,
]
STOP_PIN = [
    Simple.SET_PIN_DONE,
    Simple.WAKE_PIN,
    JoinPin(2 * MP_STATUS_CHECK_INTERVAL),
    Simple.CLOSE_RESULT_QUEUE,
]
JOIN = [JoinWorkers(MP_STATUS_CHECK_INTERVAL), Simple.CLOSE_INDEX_QUEUES]


def made(*, pin: bool = False, workers: int = 2, prefetch: int = 1, in_order: bool = True, **options: Any) -> Driver:
    driver = Driver(Dispatcher(workers, prefetch, in_order), LoaderLifecycle(), **options)
    driver.lifecycle.handle(Event.START)
    for _ in range(workers):
        driver.worker_started()
    if pin:
        driver.pin_started()
    return driver


def begun(**options: Any) -> Driver:
    """A driver whose first tasks (indices 100, 101, ...) are sent."""
    driver = made(**options)
    prime(driver, driver.begin())
    return driver


def prime(driver: Driver, effect: Effect) -> None:
    index = 100
    while effect is not READY:
        assert effect is DRAW
        assert isinstance(driver.drawn(index), Assignment)
        index, effect = index + 1, driver.done()


def steps_of(driver: Driver, effect: Effect) -> list[Effect]:
    """Every effect up to one that is not answered by `done`."""
    steps = [effect]
    while effect not in (END, DRAW, READY) and not isinstance(effect, (Get, Raise, Assignment)):
        effect = driver.done()
        steps.append(effect)
    return steps


# --- An epoch ---------------------------------------------------------------------------------------------------------
def test_an_epoch_begins_with_as_many_tasks_as_may_be_outstanding() -> None:
    driver = made(workers=2, prefetch=2)
    effect = driver.begin()
    for idx in range(4):
        assert effect is DRAW
        assert driver.drawn(100 + idx) == Assignment(idx, idx % 2)
        assert driver.dispatcher.task_info[idx].index == 100 + idx
        effect = driver.done()
    assert effect is READY
    assert driver.lifecycle.state is LoaderState.IDLE


def test_a_batch_is_yielded_after_its_successor_is_sent() -> None:
    driver = begun()
    assert driver.next() == GET
    assert driver.received(Result(1, 1, "b")) == GET
    assert driver.received(Result(0, 0, "a")) is DRAW
    assert driver.drawn(102) == Assignment(2, 0)
    assert driver.done() == Deliver(0, 0, "a")
    driver.yielded()
    assert driver.next() is DRAW  # the other batch waits in the reorder buffer
    assert driver.sampler_ended() == Deliver(1, 1, "b")
    driver.yielded()
    assert driver.lifecycle.state is LoaderState.IDLE


@pytest.mark.parametrize("shut_down", [True, False], ids=["shut down", "in a forked child, whose workers they are not"])
def test_an_epoch_ends_when_the_last_task_is_yielded(shut_down: bool) -> None:
    driver = made(workers=1)
    assert driver.begin() is DRAW
    assert driver.sampler_ended() is READY
    assert driver.next() is SHUT_DOWN
    if shut_down:
        assert steps_of(driver, driver.close())[-1] is END
    assert driver.done() is END
    if shut_down:
        assert driver.lifecycle.state is LoaderState.CLOSED
        assert driver.next() is END


def test_persistent_workers_stay_at_the_end_of_an_epoch() -> None:
    driver = made(persistent=True)
    assert driver.begin() is DRAW
    assert driver.sampler_ended() is DRAW
    assert driver.sampler_ended() is READY
    assert driver.next() is END
    assert driver.next() is END
    assert driver.lifecycle.state is LoaderState.EXHAUSTED


@pytest.mark.parametrize("persistent", [False, True])
def test_an_exhausted_worker_gets_its_sentinel_and_another_worker_one_more_task(persistent: bool) -> None:
    """A persistent one gets no sentinel."""
    driver = begun(persistent=persistent)
    driver.next()
    effect = driver.received(Result(0, 0, WorkerExhausted(0)))
    if not persistent:
        assert effect == PutSentinel(0)
        effect = driver.done()
    assert effect is DRAW
    assert driver.dispatcher.workers_status == [False, True]
    assert driver.drawn(102) == Assignment(2, 1)
    assert driver.done() == GET


def test_an_index_that_no_worker_may_take_is_dropped() -> None:
    driver = begun(workers=1)
    driver.next()
    assert driver.received(Result(0, 0, WorkerExhausted(0))) == PutSentinel(0)
    assert driver.done() is DRAW
    assert driver.drawn(101) is SHUT_DOWN


def test_an_error_frees_the_driver_for_the_next_batch() -> None:
    driver = begun()
    driver.next()
    assert driver.received(Result(0, 0, "error")) is DRAW
    driver.failed()  # the sampler raised: the batch is lost, as it is upstream
    assert driver.plan == ()
    assert driver.next() == GET
    assert driver.received(Result(1, 1, WorkerExhausted(1))) == PutSentinel(1)
    assert driver.done() is DRAW
    assert driver.drawn(102) == Assignment(2, 0)
    assert driver.done() == GET, "the lost batch is not yielded in place of what the exhausted worker owed"


def test_an_error_changes_nothing_in_a_shutdown_that_has_begun() -> None:
    """A signal's handler has closed the iterator and not come to the end, and then raised."""
    driver = begun()
    driver.next()
    assert driver.close() is Simple.SET_WORKERS_DONE
    driver.failed()
    assert driver.done() == PutSentinel(0)


# --- Resuming ---------------------------------------------------------------------------------------------------------
def test_resuming_waits_for_every_worker_and_ignores_the_old_epoch() -> None:
    driver = begun(persistent=True)
    assert steps_of(driver, driver.resume()) == [PutResume(0, 1), PutResume(1, 1), GET]
    for old in (Result(0, 0, "old"), ResumeIteration(0, 1), ResumeIteration(1, 1)):
        assert driver.received(old) == GET
    effect = driver.received(ResumeIteration(1, 0))
    assert effect is DRAW
    prime(driver, effect)
    assert driver.epoch == 1
    assert (driver.dispatcher.send_idx, driver.dispatcher.rcvd_idx) == (2, 0)


def test_an_acknowledgement_in_the_middle_of_an_epoch_is_an_error() -> None:
    driver = begun(persistent=True)
    driver.next()
    with pytest.raises(DispatchError, match="in the middle of epoch 0"):
        driver.received(ResumeIteration(0, 0))


def test_a_batch_whose_next_was_interrupted_is_not_of_the_next_epoch() -> None:
    driver = begun(persistent=True)
    driver.next()
    assert driver.received(Result(0, 0, "a")) is DRAW
    driver.failed(again=True)
    steps_of(driver, driver.resume())
    assert driver.received(ResumeIteration(1, 0)) == GET
    prime(driver, driver.received(ResumeIteration(1, 1)))
    assert driver.next() == GET


def test_resuming_may_be_tried_again() -> None:
    driver = begun(persistent=True)
    driver.next()  # it was interrupted, and nobody has said so
    assert driver.resume() == PutResume(0, 1)
    driver.failed()
    assert steps_of(driver, driver.resume()) == [PutResume(0, 2), PutResume(1, 2), GET]


# --- Nothing came -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", [LoaderState.RESUMING, LoaderState.PRIMING])
def test_next_in_an_epoch_that_never_began_says_what_to_do(state: LoaderState) -> None:
    driver = made(persistent=True)
    driver.lifecycle.state = state
    with pytest.raises(ProtocolError, match=r"has not begun.*make a new DataLoader"):
        driver.next()
    driver.lifecycle.state = LoaderState.WAITING
    with pytest.raises(ProtocolError, match="still runs, in another thread"):
        driver.next()


NOTHING_CAME: dict[str, tuple[dict[str, Any], Evidence, list[Effect]]] = {
    "all live": ({"pin": True}, Evidence({}), [GET]),
    "a task could not be sent": ({}, Evidence({}, timed_out=True, unsent=(1,)), [Raise(Failure.TASK_LOST, (1,))]),
    "a worker died": ({}, Evidence({1: -9}), [NoteDeath(1), PutSentinel(1), Raise(Failure.WORKER_DIED, (1,))]),
    "the pin thread died": (
        {"pin": True}, Evidence({}, pin_alive=False), [NoteDeath(PIN), Raise(Failure.PIN_THREAD_DIED)],
    ),
    "the time is over": ({"timeout": 0.5}, Evidence({}, timed_out=True), [Raise(Failure.TIMED_OUT, (0,))]),
    "a worker died, and the time is over": (
        {"timeout": 0.5}, Evidence({0: 1}, timed_out=True),
        [NoteDeath(0), PutSentinel(0), Raise(Failure.WORKER_DIED, (0,))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTHING_CAME)
def test_what_follows_when_nothing_came(case: str) -> None:
    options, evidence, effects = NOTHING_CAME[case]
    driver = begun(**options)
    assert driver.next() == Get(options.get("timeout", MP_STATUS_CHECK_INTERVAL))
    assert steps_of(driver, driver.nothing_came(evidence)) == effects


@pytest.mark.parametrize("persistent", [False, True])
def test_only_a_persistent_worker_that_died_gets_another_sentinel_in_the_shutdown(persistent: bool) -> None:
    """As upstream."""
    driver = begun(persistent=persistent)
    driver.next()
    assert steps_of(driver, driver.nothing_came(Evidence({1: -9}))).count(PutSentinel(1)) == 1
    driver.failed()
    assert driver.dispatcher.workers_status == [True, False]
    assert (PutSentinel(1) in steps_of(driver, driver.close())) is persistent


def left_by_worker_0() -> Driver:
    """A driver whose worker 0 has no more samples, and was told to leave."""
    driver = begun()
    driver.next()
    assert driver.received(Result(0, 0, WorkerExhausted(0))) == PutSentinel(0)
    assert driver.done() is DRAW
    assert driver.sampler_ended() == GET
    return driver


def test_a_worker_that_left_is_suspected_only_if_the_lock_of_the_result_queue_is_jammed() -> None:
    driver = left_by_worker_0()
    assert driver.leavers({0: 0}) == []
    assert driver.nothing_came(Evidence({0: 0}, jammed=True)) == GET
    assert driver.leavers({0: -9}) == [0]
    assert driver.nothing_came(Evidence({0: -9}, unsent=(0,))) == GET, "a message to it may be lost, too"
    effects = steps_of(driver, driver.nothing_came(Evidence({0: -9}, jammed=True)))
    assert effects == [NoteDeath(0), Raise(Failure.WORKER_DIED, (0,))]


def test_the_lock_of_the_result_queue_does_not_count_if_a_worker_died_at_work_or_after_close() -> None:
    driver = left_by_worker_0()
    assert driver.leavers({0: -9, 1: -9}) == []
    effects = steps_of(driver, driver.nothing_came(Evidence({0: -9, 1: 0}, jammed=True)))
    assert effects[-1] == Raise(Failure.WORKER_DIED, (1,))
    steps_of(driver, driver.close())
    assert driver.leavers({0: -15, 1: -15}) == []


def test_a_timeout_while_an_epoch_begins_names_no_worker() -> None:
    driver = begun(timeout=0.5, persistent=True)
    assert steps_of(driver, driver.resume())[-1] == Get(0.5)
    assert driver.nothing_came(Evidence({}, timed_out=True)) == Raise(Failure.TIMED_OUT)


# --- The shutdown -----------------------------------------------------------------------------------------------------
def test_the_pin_thread_is_stopped_before_the_workers() -> None:
    """And the lifecycle moves when a stage is done."""
    driver = begun(pin=True)
    effect, steps, states = driver.close(), [], []
    while effect is not END:
        steps.append(effect)
        states.append(driver.lifecycle.state)
        effect = driver.done()
    tell = [Simple.SET_WORKERS_DONE, PutSentinel(0), PutSentinel(1)]
    assert [*steps, END] == [*STOP_PIN, *tell, *JOIN, *LEFTOVERS]
    assert list(dict.fromkeys([*states, driver.lifecycle.state])) == [
        LoaderState.STOPPING_PIN, LoaderState.STOPPING_WORKERS, LoaderState.JOINING, LoaderState.TERMINATING,
        LoaderState.CLOSED,
    ]  # fmt: skip


@pytest.mark.parametrize(("started", "tell"), [(0, []), (1, [Simple.SET_WORKERS_DONE, PutSentinel(0)])])
def test_only_workers_that_were_started_are_told_to_leave(started: int, tell: list[Effect]) -> None:
    driver = Driver(Dispatcher(2, 1), LoaderLifecycle())
    for _ in range(started):
        driver.worker_started()
    assert steps_of(driver, driver.close()) == [*tell, *JOIN, *LEFTOVERS]


def test_a_second_close_does_nothing() -> None:
    driver = begun()
    assert driver.close() is Simple.SET_WORKERS_DONE
    assert driver.close() is END  # from the handler of a signal
    assert driver.done() == PutSentinel(0)
    assert steps_of(driver, driver.done())[-1] is END
    assert driver.close() is END


@pytest.mark.parametrize("input_", ["next", "drawn", "done", "received", "nothing_came", "deaths"])
def test_after_close_nothing_is_asked_for(input_: str) -> None:
    driver = begun()
    driver.next()
    assert driver.received(Result(0, 0, "a")) is DRAW
    steps_of(driver, driver.close())
    died = [Evidence({0: 0, 1: -9})]
    arguments = {"drawn": [1], "received": [Result(1, 1, "b")], "nothing_came": died, "deaths": died}
    assert getattr(driver, input_)(*arguments.get(input_, [])) is END


@pytest.mark.parametrize("performed", [0, 1, 3, 5, 7])
def test_an_interrupted_shutdown_goes_on_with_its_leftovers(performed: int) -> None:
    driver = begun(pin=True)
    effect = driver.close()
    for _ in range(performed):
        effect = driver.done()
    driver.interrupted()
    tell_pin = [] if performed else [Simple.SET_PIN_DONE]
    assert steps_of(driver, driver.close()) == [*tell_pin, *LEFTOVERS]
    assert driver.lifecycle.state is LoaderState.CLOSED
    assert effect is not END
    driver.interrupted()  # after its end
    assert driver.close() is END


@pytest.mark.heavy
@pytest.mark.parametrize("pin", [False, True])
def test_an_exception_at_any_instruction_of_close_leaves_steps_that_end_everything(pin: bool) -> None:
    """As a signal's handler may raise one. Whoever closes again ends the workers."""
    at, done = 0, False
    while not done:
        at, driver = at + 1, begun(pin=pin)
        with contextlib.suppress(Interruption), Interrupting(at, {"minidl.loader.driver", "minidl.loader.protocol"}):
            driver.close()
            done = True
        driver.interrupted()
        assert steps_of(driver, driver.close())[-len(LEFTOVERS) :] == LEFTOVERS, at
        assert driver.ended
    assert at > 50


WAITS = ("of the first", "missing", "yielded next")


@pytest.mark.parametrize("begin", ["resume", "next", "begin"])
def test_a_loader_that_closes_waits_for_nothing_else(begin: str) -> None:
    """Its repr names no draw, no acknowledgement and no batch that is still to come."""
    driver = made(persistent=True) if begin == "begin" else begun(persistent=True)
    effect = getattr(driver, begin)()
    if begin == "next":
        assert driver.received(Result(0, 0, "a")) is DRAW
    before = list(driver._phrases())
    assert any(word in phrase for phrase in before for word in WAITS), effect
    assert driver.close() is Simple.SET_WORKERS_DONE
    after = " ".join(driver._phrases())
    assert not any(word in after for word in WAITS)
    assert "after this step PutSentinel(worker_id=0)" in after
    driver = begun(pin=True)
    driver.close()
    assert "after this step WAKE_PIN" in list(driver._phrases())
    assert not any(word in phrase for phrase in made()._phrases() for word in WAITS)


# --- What the explorer needs ------------------------------------------------------------------------------------------
def test_a_frozen_state_is_hashable_and_complete() -> None:
    driver, other = begun(pin=True), made(pin=True)
    other.thaw(driver.freeze())
    assert other.freeze() == driver.freeze()
    assert other.plan == ()
    driver.next()
    driver.received(Result(0, 0, "a"))
    hash(driver.freeze())
    other.thaw(driver.freeze())
    assert other.freeze() == driver.freeze()
    for either in (driver, other):
        assert either.drawn(7) == Assignment(2, 0)
        assert either.done() == Deliver(0, 0, "a")
    effects = [steps_of(either, either.close()) for either in (driver, other)]
    assert effects[0] == effects[1]


# --- Every interleaving -----------------------------------------------------------------------------------------------
@st.composite
def configurations(draw: Any) -> Configuration:
    """A loader and its surroundings, larger than those of `tests/explore`, which goes through all runs."""
    workers, persistent = draw(st.integers(1, 3)), draw(st.booleans())
    crashes = [(), (Crash.WORKER_KILLED,), (Crash.LOADER_KILLED,)]
    return Configuration(
        "by chance",
        workers=workers,
        prefetch=draw(st.integers(1, 3)),
        tasks=draw(st.integers(0, 8)),
        streams=draw(st.none() | st.tuples(*[st.integers(0, 3)] * workers)),
        persistent=persistent,
        epochs=1 + persistent,
        pin=draw(st.booleans()),
        in_order=draw(st.booleans()),
        may_break=draw(st.booleans()),
        timeout=draw(st.booleans()),
        ctrl_c=draw(st.integers(0, 2)),
        goes_on=draw(st.integers(0, 2)),
        crashes=draw(st.sampled_from(crashes)),
    )


@pytest.mark.heavy
@given(configurations(), st.lists(st.integers(0, 99), max_size=150))
@settings(max_examples=200)
def test_whatever_happens_the_rules_hold(configuration: Configuration, choices: list[int]) -> None:
    """The driver decides in the explorer's model, and chance chooses among the steps of all actors.

    No batch comes twice, all of them come, in order if that is asked for; tasks are bounded, and every shutdown ends.
    """
    model, chance = Model(configuration, OURS, reduced=True), iter(choices)
    state, steps = model.initial, model.steps(model.initial)
    while steps:
        choice = next(chance, None)
        possible = steps if choice is None else [*steps, *model.crashes(state)]
        _, state = possible[(choice or 0) % len(possible)]
        steps = model.steps(state)
        assert judge(model, state, steps) is None
    assert model.over(state)
