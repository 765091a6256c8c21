"""Whether a worker draws random numbers for its samples: only then equal seeds of two workers matter.

The states of the global generators (torch's, random's, NumPy's) are compared with those after worker_init_fn, behind
each of the worker's first tasks. It does not see a generator that the dataset has made itself.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

_TASKS: Final = 8
"""The number of tasks after which it checks: a check costs 30 µs."""


class Draws:
    """Tells whether fetching has drawn: after the first task, and again if a later one does so first."""

    def __init__(self, tell: Callable[[bool], Any]) -> None:
        self._tell = tell
        self._before = _states()
        self._left = _TASKS

    def look(self) -> None:
        """A task has been fetched."""
        if not self._left:
            return
        drawn = _states() != self._before
        if drawn or self._left == _TASKS:
            self._tell(drawn)
        self._left = 0 if drawn else self._left - 1


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), pickle.dumps(np.random.get_state())
