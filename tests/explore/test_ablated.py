"""Guards of the shutdown, taken away from outside: their effects are missing then, and nothing else.

The other guards of the driver have no effects of their own; `test_explore` shows that each is gone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from minidl.explore.ablated import ABLATED, ENDLESS, ablated
from minidl.explore.guards import OURS
from minidl.loader.dispatcher import Dispatcher
from minidl.loader.driver import (
    END,
    MP_STATUS_CHECK_INTERVAL,
    READY,
    Driver,
    Effect,
    JoinPin,
    JoinWorkers,
    PutSentinel,
    Simple,
    Terminate,
)
from minidl.loader.protocol import LoaderEvent, LoaderLifecycle

JOIN_PIN = JoinPin(2 * MP_STATUS_CHECK_INTERVAL)
JOIN_WORKERS = JoinWorkers(MP_STATUS_CHECK_INTERVAL)
STOP_PIN = [Simple.SET_PIN_DONE, Simple.WAKE_PIN, JOIN_PIN, Simple.CLOSE_RESULT_QUEUE]
STOP_WORKERS = [
    *(Simple.SET_WORKERS_DONE, PutSentinel(0), PutSentinel(1), JOIN_WORKERS, Simple.CLOSE_INDEX_QUEUES),
]
LEFTOVERS = [Simple.FORGET_WORKERS, *(Terminate(kill, MP_STATUS_CHECK_INTERVAL) for kill in (False, True)), END]


def begun(*guards: str, **options: Any) -> Driver:
    """A driver without these guards, of two workers and a pin thread, in its first epoch."""
    driver = ablated(guards)(Dispatcher(2, 1), LoaderLifecycle(), **options)
    driver.lifecycle.handle(LoaderEvent.START)
    for _ in range(2):
        driver.worker_started()
    driver.pin_started()
    effect = driver.begin()
    while effect is not READY:
        driver.drawn(100)
        effect = driver.done()
    return driver


def shutdown_of(driver: Driver) -> list[Effect]:
    steps = [driver.close()]
    while steps[-1] is not END:
        steps.append(driver.done())
    return steps


def test_the_explorers_names_are_those_of_its_protocol() -> None:
    assert ABLATED.keys() < {field.name for field in dataclasses.fields(OURS)}
    assert ablated(()) is Driver


@pytest.mark.parametrize(
    ("guard", "effects"),
    [
        ("sentinel", [PutSentinel(0), PutSentinel(1)]),
        ("wake_pin", [Simple.WAKE_PIN]),
        ("workers_done", [Simple.SET_WORKERS_DONE]),
        ("pin_done", [Simple.SET_PIN_DONE]),
        ("killed_at_last", [LEFTOVERS[2]]),
    ],
)
def test_a_guard_that_is_taken_away_takes_its_effects_along(guard: str, effects: list[Effect]) -> None:
    whole = shutdown_of(begun())
    assert whole == [*STOP_PIN, *STOP_WORKERS, *LEFTOVERS]
    assert shutdown_of(begun(guard)) == [step for step in whole if step not in effects]


@pytest.mark.parametrize(
    ("guard", "join", "unbounded"),
    [("bounded_joins", JOIN_WORKERS, JoinWorkers(ENDLESS)), ("bounded_pin_join", JOIN_PIN, JoinPin(ENDLESS))],
)
def test_a_join_may_lose_its_bound(guard: str, join: Effect, unbounded: Effect) -> None:
    assert shutdown_of(begun(guard)) == [unbounded if step == join else step for step in shutdown_of(begun())]


def test_without_pin_first_the_workers_end_before_the_pin_thread() -> None:
    assert shutdown_of(begun("pin_first")) == [*STOP_WORKERS, *STOP_PIN, *LEFTOVERS]


@pytest.mark.parametrize("guard", ["pin_done", "pin_told_at_last", "", "wake_pin"])
def test_an_interrupted_shutdown_tells_the_pin_thread_unless_this_guard_is_gone(guard: str) -> None:
    driver = begun(*([guard] if guard else []))
    driver.close()
    driver.interrupted()
    assert shutdown_of(driver) == [*([] if guard.startswith("pin_") else [Simple.SET_PIN_DONE]), *LEFTOVERS]


def test_guards_are_taken_away_together_and_from_any_driver() -> None:
    class Hasty(Driver):
        def _join(self) -> Any:
            return ()

    three = begun("wake_pin", "bounded_pin_join", "killed_at_last")
    stop_pin = [Simple.SET_PIN_DONE, JoinPin(ENDLESS), Simple.CLOSE_RESULT_QUEUE]
    assert shutdown_of(three) == [*stop_pin, *STOP_WORKERS, *LEFTOVERS[:2], END]
    kind = ablated(["sentinel"], ablated(["workers_done"], Hasty))
    assert shutdown_of(kind(Dispatcher(2, 1), LoaderLifecycle())) == LEFTOVERS
