"""Arrays of a trace: their types, and operations on columns that several modules need."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.void]
"""Events, spans or slices: a structured array."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.intp]
"""Of events, in the array that holds them."""


def table_of(codes: Iterable[int]) -> Bools:
    """Return an array whose element `code` says whether the code of an event is one of `codes`."""
    out = np.zeros(1 << 16, bool)
    out[list(codes)] = True
    return out


def starts(*columns: npt.NDArray[np.generic]) -> Bools:
    """Which rows differ, in one of the columns, from the row before; the first row always does."""
    out = np.ones(len(columns[0]), bool)
    out[1:] = columns[0][1:] != columns[0][:-1]
    for column in columns[1:]:
        out[1:] |= column[1:] != column[:-1]
    return out


def distinct(rows: Rows, *names: str) -> list[list[int]]:
    """The combinations of values that the columns have, sorted."""
    columns = [rows[name].astype(np.int64) for name in names]
    found: list[list[int]] = np.unique(np.stack(columns, axis=1), axis=0).tolist()
    return found
