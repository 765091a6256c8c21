"""What is done when the last reference to a batch goes."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

from exceptions_everywhere import Interrupting

from minidl.arena.farewell import Farewell
from minidl.wire.atomic import at_once

CODE = ("minidl.arena.farewell", "minidl.wire.atomic")


class Thing:
    """What a weak reference can refer to."""


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
