"""Indices that samplers give as NumPy's or torch's integers are in the trace as the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import minidl
from minidl.check import check
from minidl.record.indices import count, facts_of_index, indices_of, whole_number
from minidl.speed.audit import audit
from minidl.tracefile.events import Phase
from minidl.tracefile.reader import read_trace


class Broken:
    def __index__(self) -> int:
        raise RuntimeError("asked for its number")


@pytest.mark.parametrize(
    ("index", "number"),
    [(3, 3), (np.int64(3), 3), (np.uint8(3), 3), (torch.tensor(3), 3), (np.array(3), 3), (True, 1), (-2, -2)]
    + [(each, -1) for each in ("3", 3.0, None, (3,), [3], np.float64(3), np.arange(2), torch.arange(2), Broken())],
)
def test_an_index_is_a_number_if_it_is_an_integer(index: Any, number: int) -> None:
    found = whole_number(index)
    assert (found, type(found)) == (number, int)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda all_: [np.int32(i) for i in all_],
                                  lambda all_: [torch.tensor(i) for i in all_]])  # fmt: skip
def test_the_same_indices_have_the_same_digest(kind: Callable[[Any], Any]) -> None:
    assert facts_of_index(kind([5, 1, 4])) == facts_of_index([5, 1, 4]) == (3, 5, hash((5, 1, 4)))
    assert count(kind([5, 1, 4])) == 3
    assert [whole_number(each) for each in indices_of(kind([5, 1, 4]))] == [5, 1, 4]


@pytest.mark.parametrize(
    ("index", "facts"),
    [(np.int64(7), (1, 7, 0)), ("a key", (1, -1, 0)), ([], (0, -1, 0)), (["a", "b"], (2, -1, 0)), ([0.5], (1, -1, 0))]
    + [([3, [4]], (2, 3, 0)), (np.zeros((2, 2)), (1, -1, 0)), ([np.int64(3), "b"], (2, -1, 0))],
)
def test_what_is_no_row_of_integers_has_no_digest(index: Any, facts: tuple[int, int, int]) -> None:
    assert facts_of_index(index) == facts


ORDER = [5, 1, 4, 0, 3, 2]


class Squares(torch.utils.data.Dataset[Any]):
    """Of a number, or of several at once."""

    def __len__(self) -> int:
        return len(ORDER)

    def __getitem__(self, index: Any) -> Any:
        return torch.as_tensor(index) ** 2


OPTIONS: dict[str, dict[str, Any]] = {
    "NumPy's permutation": {"sampler": np.array(ORDER), "batch_size": 2},
    "torch's permutation": {"sampler": torch.tensor(ORDER), "batch_size": 2},
    "batches as arrays": {"batch_sampler": list(np.array(ORDER).reshape(3, 2))},
    "a batch at once": {"sampler": minidl.BatchSampler(ORDER, 2, False), "batch_size": None},
    "an array at once": {"sampler": list(np.array(ORDER).reshape(3, 2)), "batch_size": None},
}


@pytest.mark.live
@pytest.mark.parametrize(
    ("name", "workers", "observed"),
    [(name, 0, False) for name in OPTIONS] + [("batches as arrays", 1, True), ("NumPy's permutation", 1, True)],
)
def test_the_audit_knows_which_samples_were_seen(name: str, workers: int, observed: bool, tmp_path: Path) -> None:
    options = OPTIONS[name] | ({"multiprocessing_context": minidl.observe()} if observed else {})
    made: Any = torch.utils.data.DataLoader if observed else minidl.DataLoader
    with minidl.trace(tmp_path / "trace"):
        batches = [batch.tolist() for batch in made(Squares(), num_workers=workers, **options)]
    assert batches == [[25, 1], [16, 0], [9, 4]]
    trace = read_trace(tmp_path / "trace")
    assert check(trace) == []
    (subject,) = audit([trace]).subjects
    assert [one.indices for one in subject.passes[0]] == [tuple(ORDER)]


@pytest.mark.live
def test_a_key_of_several_numbers_is_no_batch(tmp_path: Path) -> None:
    """(3, 4) may be frame 4 of film 3."""
    with minidl.trace(tmp_path / "trace"):
        list(minidl.DataLoader({(3, 4): 1, (5, 6): 2}, batch_size=2, sampler=[(3, 4), (5, 6)]))
    trace = read_trace(tmp_path / "trace")
    assert check(trace) == []
    assert trace.select("sample", Phase.BEGIN)[["x", "y"]].tolist() == [(0, -1), (1, -1)]
