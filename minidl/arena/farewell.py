"""What the loader does at the moment when the last reference to a batch goes: steps as `wire.atomic` has them."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from minidl.wire.atomic import Step, call, each_once

_fence = threading.Lock()
_fence.acquire()  # no other code uses it, so no thread waits

FENCE: tuple[Step, ...] = (_fence.release, _fence.acquire)
"""Steps that order memory, also on a CPU that may swap a read and a later write, such as aarch64.

A release of a lock comes after all reads and writes before it, an acquire before all those after it, and an acquire
after the release that precedes it. So for other processes, too, what is before these steps comes before what is after.
"""


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
        return partial(setattr, self, "call", each_once(map(call, steps)))
