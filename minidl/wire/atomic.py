"""Steps that the exception of a signal's handler can't split: before them, or after them, but not in between.

CPython calls a signal's handler in the main thread, between two instructions of Python code. So Ctrl-C may come after a
call has returned and before its result is stored, and no `try` can help. A call of a function that is written in C is
one instruction, also if this function calls others: `list.extend` of a `map` calls a function and stores what it has
returned. Here are two forms of this. The functions that they are given must be written in C, too.
"""

from __future__ import annotations

import collections
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

_nowhere: collections.deque[Any] = collections.deque(maxlen=0)
_call = operator.methodcaller("__call__")

Step = Callable[[], Any]
"""A function that is written in C, or a `functools.partial` of one."""


_fence = threading.Lock()
_fence.acquire()  # and nobody else uses it: a thread never waits

FENCE: tuple[Step, ...] = (_fence.release, _fence.acquire)
"""Steps that order memory, also on a CPU that may swap a read and a later write, such as aarch64.

A release of a lock comes after all reads and writes before it, an acquire before all those after it, and an acquire
after the release that precedes it. So for other processes, too, what is before these steps comes before what is after.
"""


def at_once(*steps: Step) -> None:
    """Call them, in this order. An error that one of them raises leaves out the rest."""
    _nowhere.extend(map(_call, steps))


def each_once(calls: Iterator[Any]) -> Step:
    """A step that takes all of `calls`, a `map` of such a function, and drops what they return."""
    return partial(_nowhere.extend, calls)


def move(take: Step, to: list[Any]) -> None:
    """Append what `take` returns to a list, at once."""
    to.extend(map(_call, (take,)))


class Farewell(weakref.ref):  # type: ignore[type-arg]
    """A weak reference whose steps are called, at once, when the object goes. It must be kept until then.

    An exception that comes while a callback in Python runs would be printed, and go nowhere; a Ctrl-C would be lost,
    and the rest of the callback, too. Here nothing is Python's.
    """

    call: Step = int  # nothing, as long as `arming` is not called

    @classmethod
    def of(cls, referent: Any) -> Farewell:
        """The reference, which does nothing yet."""
        return cls(referent, operator.methodcaller("call"))

    def arming(self, steps: Sequence[Step]) -> Step:
        """What lets it call `steps`: a step itself."""
        return partial(setattr, self, "call", each_once(map(_call, steps)))
