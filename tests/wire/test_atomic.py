"""Steps that no exception of a signal's handler can split."""

from __future__ import annotations

from functools import partial

import pytest
from exceptions_everywhere import Interrupting, Interruption

from minidl.wire.atomic import at_once, each_once

CODE = ("minidl.wire.atomic",)


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
