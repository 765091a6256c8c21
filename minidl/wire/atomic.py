"""Steps that the exception of a signal's handler can't split: before them, or after them, but not in between.

CPython calls a signal's handler in the main thread, between two instructions of Python code. So Ctrl-C may come after a
call has returned and before its result is stored, and no `try` can help. A call of a function that is written in C is
one instruction, also if this function calls others: `list.extend` of a `map` calls a function and stores what it has
returned. Here are two forms of this. The functions that they are given must be written in C, too.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

_nowhere: collections.deque[Any] = collections.deque(maxlen=0)
call = operator.methodcaller("__call__")

Step = Callable[[], Any]
"""A function that is written in C, or a `functools.partial` of one."""


def at_once(*steps: Step) -> None:
    """Call them, in this order. An error that one of them raises leaves out the rest."""
    _nowhere.extend(map(call, steps))


def each_once(calls: Iterator[Any]) -> Step:
    """A step that takes all of `calls`, a `map` of such a function, and drops what they return."""
    return partial(_nowhere.extend, calls)
