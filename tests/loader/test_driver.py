"""The driver, asked as the iterator asks it: its main paths, step by step, and every interleaving that chance finds."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from exceptions_everywhere import Interrupting, Interruption
from hypothesis import event, given, settings
from hypothesis import strategies as st

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


def test_an_epoch_ends_when_the_last_task_is_yielded() -> None:
    driver = made(workers=1)
    assert driver.begin() is DRAW
    assert driver.sampler_ended() is READY
    assert driver.next() is SHUT_DOWN
    assert steps_of(driver, driver.close())[-1] is END
    assert driver.done() is END
    assert driver.lifecycle.state is LoaderState.CLOSED
    assert driver.next() is END


def test_an_epoch_ends_also_where_no_shutdown_is_run() -> None:
    """In a forked child, whose workers they are not."""
    driver = made(workers=1)
    assert driver.begin() is DRAW
    assert driver.sampler_ended() is READY
    assert driver.next() is SHUT_DOWN
    assert driver.done() is END


def test_persistent_workers_stay_at_the_end_of_an_epoch() -> None:
    driver = made(persistent=True)
    assert driver.begin() is DRAW
    assert driver.sampler_ended() is DRAW
    assert driver.sampler_ended() is READY
    assert driver.next() is END
    assert driver.next() is END
    assert driver.lifecycle.state is LoaderState.EXHAUSTED


def test_an_exhausted_worker_gets_its_sentinel_and_another_worker_one_more_task() -> None:
    driver = begun()
    driver.next()
    assert driver.received(Result(0, 0, WorkerExhausted(0))) == PutSentinel(0)
    assert driver.dispatcher.workers_status == [False, True]
    assert driver.done() is DRAW
    assert driver.drawn(102) == Assignment(2, 1)
    assert driver.done() == GET


def test_a_persistent_worker_that_is_exhausted_gets_no_sentinel() -> None:
    driver = begun(persistent=True)
    driver.next()
    assert driver.received(Result(0, 0, WorkerExhausted(0))) is DRAW


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


def test_resuming_goes_on_where_nothing_was_said_of_an_interrupted_next() -> None:
    driver = begun(persistent=True)
    driver.next()
    assert steps_of(driver, driver.resume()) == [PutResume(0, 1), PutResume(1, 1), GET]


def test_resuming_may_be_tried_again() -> None:
    driver = begun(persistent=True)
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
    with pytest.raises(ProtocolError, match="impossible in state WAITING"):
        driver.next()


def test_a_task_that_could_not_be_sent_is_an_error_though_everybody_lives() -> None:
    driver = begun()
    driver.next()
    assert driver.nothing_came(Evidence({}, timed_out=True, unsent=(1,))) == Raise(Failure.TASK_LOST, (1,))


def test_a_message_to_a_worker_that_has_left_may_be_lost() -> None:
    driver = begun()
    driver.next()
    driver.dispatcher.worker_unavailable(1)
    assert driver.nothing_came(Evidence({}, unsent=(1,))) == GET


def test_nothing_came_and_everybody_lives() -> None:
    driver = begun(pin=True)
    driver.next()
    assert driver.nothing_came(Evidence({})) == GET


def test_a_worker_that_died_with_work_to_do_is_named() -> None:
    driver = begun()
    driver.next()
    effects = steps_of(driver, driver.nothing_came(Evidence({1: -9})))
    assert effects == [NoteDeath(1), PutSentinel(1), Raise(Failure.WORKER_DIED, (1,))]
    driver.failed()
    assert driver.dispatcher.workers_status == [True, False]
    assert PutSentinel(1) not in steps_of(driver, driver.close())


def test_a_persistent_worker_that_died_gets_another_one_in_the_shutdown_as_upstream() -> None:
    driver = begun(persistent=True)
    driver.next()
    assert steps_of(driver, driver.nothing_came(Evidence({1: -9}))).count(PutSentinel(1)) == 1
    driver.failed()
    assert PutSentinel(1) in steps_of(driver, driver.close())


def test_a_worker_that_left_is_suspected_only_if_the_lock_of_the_result_queue_is_jammed() -> None:
    driver = begun()
    driver.next()
    assert driver.received(Result(0, 0, WorkerExhausted(0))) == PutSentinel(0)
    assert driver.done() is DRAW
    assert driver.sampler_ended() == GET
    assert driver.leavers({0: 0}) == []
    assert driver.nothing_came(Evidence({0: 0}, jammed=True)) == GET
    assert driver.leavers({0: -9}) == [0]
    assert driver.nothing_came(Evidence({0: -9})) == GET
    effects = steps_of(driver, driver.nothing_came(Evidence({0: -9}, jammed=True)))
    assert effects == [NoteDeath(0), Raise(Failure.WORKER_DIED, (0,))]


def test_the_lock_of_the_result_queue_does_not_count_if_a_worker_died_at_work_or_after_close() -> None:
    driver = begun()
    driver.next()
    assert driver.received(Result(0, 0, WorkerExhausted(0))) == PutSentinel(0)
    driver.done()
    driver.sampler_ended()
    assert driver.leavers({0: -9, 1: -9}) == []
    assert steps_of(driver, driver.nothing_came(Evidence({0: -9, 1: 0}, jammed=True)))[-1] == Raise(
        Failure.WORKER_DIED, (1,)
    )
    steps_of(driver, driver.close())
    assert driver.leavers({0: -15, 1: -15}) == []


def test_a_dead_pin_thread_raises() -> None:
    driver = begun(pin=True)
    driver.next()
    effects = steps_of(driver, driver.nothing_came(Evidence({}, pin_alive=False)))
    assert effects == [NoteDeath(PIN), Raise(Failure.PIN_THREAD_DIED)]


def test_a_timeout_names_the_worker_that_is_waited_for() -> None:
    driver = begun(timeout=0.5)
    assert driver.next() == Get(0.5)
    assert driver.nothing_came(Evidence({}, timed_out=True)) == Raise(Failure.TIMED_OUT, (0,))


def test_a_timeout_while_an_epoch_begins_names_no_worker() -> None:
    driver = begun(timeout=0.5, persistent=True)
    assert steps_of(driver, driver.resume())[-1] == Get(0.5)
    assert driver.nothing_came(Evidence({}, timed_out=True)) == Raise(Failure.TIMED_OUT)


def test_a_death_comes_before_a_timeout() -> None:
    driver = begun(timeout=0.5)
    driver.next()
    assert driver.nothing_came(Evidence({0: 1}, timed_out=True)) == NoteDeath(0)


# --- The shutdown -----------------------------------------------------------------------------------------------------
def test_the_pin_thread_is_stopped_before_the_workers() -> None:
    driver = begun(pin=True)
    tell = [Simple.SET_WORKERS_DONE, PutSentinel(0), PutSentinel(1)]
    assert steps_of(driver, driver.close()) == [*STOP_PIN, *tell, *JOIN, *LEFTOVERS]
    assert driver.lifecycle.state is LoaderState.CLOSED


def test_the_lifecycle_moves_when_a_stage_is_done() -> None:
    driver = begun(pin=True)
    effect, states = driver.close(), []
    while effect is not END:
        states.append(driver.lifecycle.state)
        effect = driver.done()
    assert list(dict.fromkeys(states)) == [
        LoaderState.STOPPING_PIN, LoaderState.STOPPING_WORKERS, LoaderState.JOINING, LoaderState.TERMINATING,
    ]  # fmt: skip


def test_only_workers_that_were_started_are_told_to_leave() -> None:
    driver = Driver(Dispatcher(2, 1), LoaderLifecycle())
    assert steps_of(driver, driver.close()) == [*JOIN, *LEFTOVERS]
    driver = Driver(Dispatcher(2, 1), LoaderLifecycle())
    driver.worker_started()
    assert steps_of(driver, driver.close()) == [Simple.SET_WORKERS_DONE, PutSentinel(0), *JOIN, *LEFTOVERS]


def test_a_persistent_worker_that_is_exhausted_is_told_at_the_end() -> None:
    driver = begun(persistent=True)
    driver.next()
    driver.received(Result(0, 0, WorkerExhausted(0)))
    assert {PutSentinel(0), PutSentinel(1)} <= set(steps_of(driver, driver.close())[:3])


def test_a_second_close_does_nothing() -> None:
    driver = begun()
    assert driver.close() is Simple.SET_WORKERS_DONE
    assert driver.close() is END  # from the handler of a signal
    assert driver.done() == PutSentinel(0)
    assert steps_of(driver, driver.done())[-1] is END
    assert driver.close() is END


@pytest.mark.parametrize("input_", ["next", "drawn", "done", "received", "nothing_came"])
def test_after_close_nothing_is_asked_for(input_: str) -> None:
    driver = begun()
    driver.next()
    assert driver.received(Result(0, 0, "a")) is DRAW
    steps_of(driver, driver.close())
    arguments = {"drawn": [1], "received": [Result(1, 1, "b")], "nothing_came": [Evidence({0: 0, 1: 0})]}
    assert getattr(driver, input_)(*arguments.get(input_, [])) is END


def test_close_in_the_middle_of_priming() -> None:
    driver = made()
    assert driver.begin() is DRAW
    assert steps_of(driver, driver.close())[-1] is END
    assert driver.drawn(100) is END


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
    assert driver.close() is END


def test_an_interruption_after_the_end_of_the_shutdown_leaves_nothing_to_do() -> None:
    driver = begun()
    assert steps_of(driver, driver.close())[-1] is END
    driver.interrupted()
    assert driver.close() is END


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


def test_leftovers_that_are_interrupted_can_be_tried_again() -> None:
    driver = begun()
    driver.close()
    driver.interrupted()
    assert driver.close() is Simple.FORGET_WORKERS
    driver.interrupted()
    assert steps_of(driver, driver.close()) == LEFTOVERS


def test_after_close_no_death_is_looked_for() -> None:
    driver = begun()
    driver.next()
    steps_of(driver, driver.close())
    assert driver.deaths(Evidence(dead={0: -9})) is END


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
@dataclass(frozen=True)
class Plan:
    """A loader and its surroundings. choices: numbers that decide what happens next, until they are used up.

    lengths: batches that each worker's stream has, or None for a map-style dataset with `tasks` batches an epoch.
    """

    workers: int
    prefetch: int
    in_order: bool
    persistent: bool
    pin: bool
    timeout: float
    tasks: int
    lengths: tuple[int, ...] | None
    choices: tuple[int, ...]


@st.composite
def plans(draw: Any) -> Plan:
    workers = draw(st.integers(1, 3))
    streams = st.tuples(*[st.integers(0, 3)] * workers)
    return Plan(
        workers=workers,
        prefetch=draw(st.integers(1, 3)),
        in_order=draw(st.booleans()),
        persistent=draw(st.booleans()),
        pin=draw(st.booleans()),
        timeout=draw(st.sampled_from([0, 0.5])),
        tasks=draw(st.integers(0, 8)),
        lengths=draw(st.one_of(st.none(), streams)),
        choices=tuple(draw(st.lists(st.integers(0, 99), max_size=60))),
    )


class World:
    """An actor, the workers and a user, all moved by chance. Checks each effect when it is performed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.choices = deque(plan.choices)
        options = {"persistent": plan.persistent, "timeout": plan.timeout}
        self.driver = made(
            pin=plan.pin, workers=plan.workers, prefetch=plan.prefetch, in_order=plan.in_order, **options
        )
        self.queues: list[deque[Any]] = [deque() for _ in range(plan.workers)]
        self.results: deque[Any] = deque()
        self.shares = list(plan.lengths or [99] * plan.workers)
        self.left = list(self.shares)
        self.exhausted: set[int] = set()
        self.dead: dict[int, int] = {}
        self.sentinels: list[int] = []
        self.yielded: list[int] = []
        self.drawn = 0
        self.outstanding = 0
        self.interruptions = 0
        self.steps: list[Effect] = []

    def chance(self, one_in: int) -> bool:
        return bool(self.choices) and self.choices.popleft() % one_in == 1

    # The user
    def run(self) -> None:
        for epoch in range(2 if self.plan.persistent else 1):
            if self.begin(epoch) is not READY:
                break  # iter() raised, or the iterator is closed
            while not self.driver.closed and self.one_batch():
                if self.chance(9):
                    break  # the user leaves the epoch
            if self.driver.closed:
                break
        self.close()
        assert self.driver.lifecycle.state is LoaderState.CLOSED
        assert self.driver.next() is END
        assert self.driver.close() is END

    def begin(self, epoch: int) -> Effect:
        self.yielded, self.drawn, self.outstanding = [], 0, 0
        return self.perform(self.driver.resume() if epoch else self.driver.begin())

    def one_batch(self) -> bool:
        step = self.perform(self.driver.next())
        if type(step) is not Deliver:
            return False
        assert step.idx not in self.yielded
        assert not self.plan.in_order or not self.yielded or step.idx > self.yielded[-1]
        self.yielded.append(step.idx)
        if self.chance(8):
            self.driver.failed()  # the batch was the error of its task
        else:
            self.driver.yielded()
        return True

    def close(self) -> None:
        """A shutdown, with interruptions; a signal handler may close once more in the middle of it."""
        effect = self.driver.close()
        while effect is not END:
            assert type(effect) not in (Get, Deliver, Assignment, Raise, PutResume)
            assert effect not in (DRAW, READY, SHUT_DOWN)
            if self.interruptions < 3 and self.chance(7):
                self.interruptions += 1
                event("interrupted shutdown")
                self.driver.interrupted()
                effect = self.driver.close()
                continue
            if self.chance(9):
                assert self.driver.close() is END
            self.step(effect)
            effect = self.driver.done()
        assert set(self.sentinels) == set(range(self.plan.workers)) or self.interruptions

    def step(self, effect: Effect) -> None:
        self.steps.append(effect)
        assert len(self.steps) < 200
        if isinstance(effect, PutSentinel):
            assert effect.worker_id not in self.sentinels or effect.worker_id in self.dead
            self.sentinels.append(effect.worker_id)

    # The actor
    def perform(self, effect: Effect) -> Effect:
        while True:
            if self.driver.closed:
                assert effect is END
            elif self.chance(23):
                event("closed between an effect and its answer")
                self.close()
                if effect is not DRAW and type(effect) is not Get:  # a put into a closed queue raises
                    self.driver.failed()
                    return END
            if type(effect) is Deliver or effect in (END, READY):
                return effect
            if type(effect) is Raise:
                self.driver.failed()
                return effect
            if self.chance(29):
                event("an effect raised")
                self.driver.failed()
                return Raise(Failure.TIMED_OUT)
            effect = self.answer(effect)

    def answer(self, effect: Effect) -> Effect:
        if effect is DRAW:
            return self.draw()
        if type(effect) is Assignment:
            self.outstanding += 1
            assert self.outstanding <= self.plan.workers * self.plan.prefetch
            assert effect.worker_id not in self.sentinels
            self.queues[effect.worker_id].append(effect)
            return self.driver.done()
        if type(effect) is Get:
            return self.get()
        if type(effect) is PutResume:
            self.queues[effect.worker_id].append(effect)
            return self.driver.done()
        if effect is SHUT_DOWN:
            self.close()
            return self.driver.done()
        assert isinstance(effect, (PutSentinel, NoteDeath))
        self.step(effect)
        return self.driver.done()

    def draw(self) -> Effect:
        if self.plan.lengths is None and self.drawn >= self.plan.tasks:
            return self.driver.sampler_ended()
        self.drawn += 1
        return self.driver.drawn(self.drawn)

    def get(self) -> Effect:
        """A message, if a worker has one to give; else evidence of what is wrong with the others."""
        if self.chance(40) and len(self.dead) < self.plan.workers:
            event("a worker died")
            self.dead[min(set(range(self.plan.workers)) - set(self.dead))] = -9
        for worker in self.exhausted:  # skips what it gets, up to the message of a new epoch
            while self.queues[worker] and type(self.queues[worker][0]) is Assignment:
                self.queues[worker].popleft()
        ready = [w for w in range(self.plan.workers) if self.queues[w] and w not in self.dead]
        if not ready or self.chance(11):
            late = not ready or bool(self.plan.timeout)
            return self.driver.nothing_came(
                Evidence(
                    dict(self.dead),
                    pin_alive=bool(ready),
                    timed_out=bool(self.plan.timeout) and late,
                    jammed=True,
                )
            )
        pick = ready[self.choices.popleft() % len(ready)] if self.choices else ready[0]
        return self.driver.received(self.work(pick))

    def work(self, worker: int) -> Any:
        task = self.queues[worker].popleft()
        if type(task) is PutResume:
            self.left[worker] = self.shares[worker]
            self.exhausted.discard(worker)
            return ResumeIteration(task.epoch, worker)
        self.outstanding -= 1
        if not self.left[worker]:
            self.exhausted.add(worker)
            return Result(task.idx, worker, WorkerExhausted(worker))
        self.left[worker] -= 1
        return Result(task.idx, worker, f"batch {task.idx}")


@given(plans())
@settings(max_examples=400)
def test_whatever_happens_the_rules_hold(plan: Plan) -> None:
    """No batch twice, in order if asked for, bounded tasks, one sentinel a worker, and every shutdown ends."""
    World(plan).run()


@given(plans())
@settings(max_examples=200)
def test_without_faults_every_batch_is_yielded(plan: Plan) -> None:
    world = World(Plan(**{**vars(plan), "choices": (), "timeout": 0}))
    for epoch in range(2 if plan.persistent else 1):
        world.begin(epoch)
        while world.one_batch():
            pass
        assert len(world.yielded) == (plan.tasks if plan.lengths is None else sum(plan.lengths))
    world.close()
    assert sorted(world.sentinels) == list(range(plan.workers))
