"""Steps that no exception of a signal's handler can split."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
from exceptions_everywhere import Interrupting, Interruption

from minidl.wire.atomic import Farewell, at_once, each_once

CODE = ("minidl.wire.atomic",)


class Thing:
    """What a weak reference can refer to."""


def test_steps_are_called_in_their_order() -> None:
    done: list[int] = []
    at_once(partial(done.append, 1), partial(done.append, 2), done.reverse)
    assert done == [2, 1]


def test_an_error_leaves_out_the_rest() -> None:
    done: list[int] = []
    with pytest.raises(IndexError):
        at_once(partial(done.append, 1), partial(done.__getitem__, 5), done.clear)
    assert done == [1]


def test_an_exception_at_any_instruction_comes_before_or_after_all_steps() -> None:
    came, at, finished = [], 0, False
    while not finished:
        at += 1
        done: list[int] = []
        try:
            with Interrupting(at, CODE):
                at_once(*(partial(done.append, number) for number in range(5)))
                finished = True
        except Interruption:
            pass
        came.append(len(done))
    assert set(came) == {0, 5}


def test_a_step_may_take_all_of_a_map() -> None:
    slots = [0, 0]
    at_once(each_once(map(slots.__setitem__, (0, 1), (7, 8))))
    assert slots == [7, 8]


def test_a_farewell_does_nothing_until_it_is_armed_and_then_once_without_any_instruction() -> None:
    done: list[Any] = []
    thing = Thing()
    farewell = Farewell.of(thing)
    del thing
    gc.collect()
    assert farewell() is None
    thing = Thing()
    farewell = Farewell.of(thing)
    at_once(farewell.arming([partial(done.append, 1), partial(done.append, 2)]))
    with Interrupting(1, CODE) as interrupting:
        del thing
        gc.collect()
    assert interrupting.count == 0
    assert done == [1, 2]


def test_a_farewell_that_is_dropped_first_says_nothing() -> None:
    done: list[Any] = []
    thing = Thing()
    farewell = Farewell.of(thing)
    at_once(farewell.arming([partial(done.append, 1)]))
    del farewell
    del thing
    gc.collect()
    assert done == []
