"""A task's indices in a trace: their number, and each index that is an integer of any type."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minidl.record.harmless import harmless

SEVERAL = (list, np.ndarray, torch.Tensor)
"""Types of the index by which a dataset is asked for several samples at once; a tuple may be one sample's key."""


def indices_of(index: Any) -> Sequence[Any]:
    """What a sampler gave for a task, as a sequence of indices: a list, a row of an array or tensor, or one index."""
    if isinstance(index, (list, tuple)):
        return index
    if isinstance(index, (np.ndarray, torch.Tensor)) and index.ndim == 1:
        return index.tolist()
    return (index,)


@harmless(-1)
def count(index: Any) -> int:
    """The number of indices."""
    return len(index) if isinstance(index, list) else len(indices_of(index))


def whole_number(index: Any) -> int:
    """The index if it is an integer, such as a NumPy integer or an integer tensor; else -1."""
    if type(index) is int:
        return index
    try:
        return operator.index(index)
    except Exception:  # whatever the user's type raises: the program itself may never ask for a number
        return -1


@harmless((-1, -1, 0))
def facts_of_index(index: Any) -> tuple[int, int, int]:
    """Return the number of indices, the first one, and a digest of them in order.

    The first is -1 and the digest 0 if the indices are no integers. The digest is the same in each process: it shows
    whether two epochs, or two ranks, had the same indices, without an event for each sample.
    """
    if not isinstance(index, (list, tuple)):
        index = indices_of(index)
        if len(index) == 1:
            return 1, whole_number(index[0]), 0
    first = index[0] if index else -1
    if type(first) is not int:
        index = [whole_number(each) for each in index]
        if not index or min(index) < 0:
            return len(index), -1, 0
        first = index[0]
    try:
        return len(index), first, hash(tuple(index)) if first >= 0 else 0
    except TypeError:
        return len(index), first, 0
