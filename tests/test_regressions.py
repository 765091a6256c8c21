"""What programs do with a DataLoader object besides iterating over it, and what once went wrong there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
from workloads import Numbers

from minidl import DataLoader

Loader = DataLoader[list[int]]


def by_pickle(loader: Loader) -> Loader:
    answer: Loader = pickle.loads(pickle.dumps(loader))
    return answer


def batches(loader: Loader) -> list[list[int]]:
    return [list(batch) for batch in loader]


@pytest.mark.parametrize("duplicate", [by_pickle, copy.deepcopy, copy.copy])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_duplicate_loads_the_same_while_the_original_is_going(
    duplicate: Callable[[Loader], Loader], num_workers: int
) -> None:
    loader: Loader = DataLoader(Numbers(5), batch_size=2, collate_fn=list, num_workers=num_workers)
    with iter(loader) as going:
        assert next(going) == [0, 1]
        assert batches(duplicate(loader)) == [[0, 1], [2, 3], [4]]
        assert next(going) == [2, 3]


@pytest.mark.parametrize("duplicate", [by_pickle, copy.deepcopy])
def test_closing_a_duplicate_leaves_the_original_going(duplicate: Callable[[Loader], Loader]) -> None:
    loader: Loader = DataLoader(Numbers(5), batch_size=2, collate_fn=list, num_workers=1)
    with loader:
        going = iter(loader)
        duplicate(loader).close()
        assert list(going) == [[0, 1], [2, 3], [4]]


def test_persistent_workers_do_not_travel() -> None:
    persistent: Loader = DataLoader(Numbers(2), collate_fn=list, num_workers=1, persistent_workers=True)
    with persistent as loader:
        assert by_pickle(loader)._iterator is None
        assert batches(loader) == [[0], [1]]
        with pytest.raises(NotImplementedError, match="cannot be pickled"):
            pickle.dumps(loader)
