"""A dataset's fingerprint: another one for other data, and the same for the same, in another process too."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from minidl.record.datasets import fingerprint


class Files:
    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.lock = object()


class Broken:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")


class Arrow:
    _fingerprint = "of its own"


ROWS = torch.arange(12.0).reshape(6, 2)
NAMES = [f"{number}.png" for number in range(1000)]
MADE = {
    "files": lambda first: Files(NAMES[first:]),
    "strided files": lambda first: Files(NAMES[first::2]),
    "rows": lambda first: TensorDataset(ROWS + first),
    "arrays": lambda first: {"x": np.arange(100) + first},
    "subsets": lambda first: Subset(Files(NAMES), list(range(first, first + 10))),
    "subsets by tensor": lambda first: Subset(Files(NAMES), torch.arange(first, first + 10)),  # type: ignore[arg-type]
    "parts": lambda first: ConcatDataset([Subset(range(99), range(50)), Subset(range(99), [first])]),
    "ranges": lambda first: range(first, 100),
    "scalars": lambda first: [float(first)],
    "a rank of its own": lambda first: type("Part", (), {"__init__": lambda self: setattr(self, "part", first)})(),
}


@pytest.mark.parametrize("name", MADE)
def test_other_data_have_another_fingerprint(name: str) -> None:
    make = MADE[name]
    assert fingerprint(make(0)) == fingerprint(make(0)) != ""
    assert fingerprint(make(0)) != fingerprint(make(1))


def test_it_is_the_same_in_another_process() -> None:
    dataset = Subset(Files(NAMES), [3, 1])  # type: ignore[arg-type]
    assert fingerprint(pickle.loads(pickle.dumps(dataset))) == fingerprint(dataset)


def test_a_datasets_own_one_is_taken_and_an_error_is_none() -> None:
    assert fingerprint(Arrow()) == "of its own"
    assert fingerprint(Broken()) == ""


def test_its_cost_does_not_grow_with_the_data() -> None:
    """What it looks at is bounded, also where each of many values holds many."""

    class Counting(list):  # type: ignore[type-arg]
        def __getitem__(self, at: Any) -> Any:
            found = list.__getitem__(self, at)
            looked.append(len(found))
            return found

    looked: list[int] = []
    fingerprint(Counting(range(10**6)))
    assert max(looked[:1]) == 8
    nest: Any = 1.0
    for _ in range(8):
        nest = [nest] * 50
    assert fingerprint(nest)
    assert fingerprint(torch.empty(0)) != ""
    assert fingerprint(torch.zeros(())) != ""
