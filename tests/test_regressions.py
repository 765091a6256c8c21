"""What once went wrong, and what programs do with a DataLoader object besides iterating over it."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.multiprocessing
from workloads import Numbers

from minidl import DataLoader, Dataset, IterableDataset, read_trace, trace
from minidl.tracing.check import examine

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


class FailsInItsSecondEpoch(IterableDataset[int]):
    """Sample k of epoch e is 10 * e + k; the second call of __iter__ raises."""

    epoch = -1

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        if self.epoch == 1:
            raise ValueError("no second epoch")
        return iter(range(10 * self.epoch, 10 * self.epoch + 10))


def test_an_epoch_that_fails_to_begin_does_not_go_on_with_the_samples_of_the_last() -> None:
    loader: DataLoader[int] = DataLoader(
        FailsInItsSecondEpoch(), batch_size=None, num_workers=1, prefetch_factor=1, persistent_workers=True
    )
    with loader:
        assert next(iter(loader)) == 0
        second = iter(loader)
        with pytest.raises(ValueError, match="no second epoch"):
            next(second)
        with pytest.raises(RuntimeError, match="no fetcher"):
            next(second)
        assert list(loader) == list(range(20, 30))


class Calls(Numbers):
    """Sends the loader's process a signal as soon as it is asked for a sample, and then waits to be let go."""

    def __init__(self, let_go: Any) -> None:
        super().__init__(3)
        self.let_go = let_go

    def __getitem__(self, index: int) -> int:
        os.kill(os.getppid(), signal.SIGUSR1)
        self.let_go.wait()
        return index


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_signal_handler_may_close_the_iterator_that_is_waited_for(
    pin_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    let_go = torch.multiprocessing.get_context("fork").Event()
    loader: DataLoader[int] = DataLoader(
        Calls(let_go), batch_size=None, num_workers=1, pin_memory=pin_memory, multiprocessing_context="fork"
    )

    def close(number: int, frame: FrameType | None) -> None:
        let_go.set()
        loader.close()

    before = signal.signal(signal.SIGUSR1, close)
    try:
        assert list(loader) == []
    finally:
        signal.signal(signal.SIGUSR1, before)


class ClosesItsLoader:
    """A sampler that closes its loader when it is asked for its sixth index."""

    loader: DataLoader[int]

    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        self.loader.close()
        yield from range(5, 10)


@pytest.mark.parametrize(("num_workers", "before"), [(0, [0, 1, 2, 3, 4]), (1, [0, 1, 2])])
def test_user_code_that_runs_inside_next_may_close_the_iterator(
    num_workers: int, before: list[int], tmp_path: Path
) -> None:
    sampler = ClosesItsLoader()
    with trace(tmp_path / "trace"):
        loader: DataLoader[int] = DataLoader(Numbers(10), batch_size=None, sampler=sampler, num_workers=num_workers)
        sampler.loader = loader
        assert list(loader) == before
    report = examine(read_trace(tmp_path / "trace"))
    assert not report.violations, report.text()


class Suicidal(Dataset[int]):
    """Sample 5 kills the worker that fetches it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_killed_workers_end_is_recorded_though_the_shutdown_comes_after_the_trace(tmp_path: Path) -> None:
    with DataLoader(Suicidal(), batch_size=2, num_workers=2) as loader:
        with pytest.raises(RuntimeError), trace(tmp_path / "trace"):
            list(loader)
        recorded = read_trace(tmp_path / "trace")
    gone = recorded.select("worker_gone")
    assert [(row["worker"], row["y"]) for row in gone] == [(0, -signal.SIGKILL)]
