"""The loader without its layers: `loader.dataloader.DataLoader`, whose epochs keep nothing, is a whole loader."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils.data
import workloads as wl

from minidl.loader import dataloader
from minidl.loader.ports import EpochRecord, Fetching

PLAIN: Any = SimpleNamespace(DataLoader=dataloader.DataLoader)
TORCHS: Any = torch.utils.data


def two_epochs(library: Any, dataset: Any, **options: Any) -> list[Any]:
    """Batches, or the error that ended the epoch."""
    torch.manual_seed(1)
    seen: list[Any] = []
    loader = library.DataLoader(dataset, batch_size=2, **options)
    iterators = []
    for _ in range(2):
        iterators.append(iter(loader))
        try:
            seen.append([batch.tolist() for batch in iterators[-1]])
        except Exception as error:
            seen.append((type(error), "sample 3 is broken" in str(error)))
    for iterator in iterators if "num_workers" in options else ():
        iterator._shutdown_workers()  # left to the collector, torch's would wait for its workers for ten seconds
    return seen


class Broken(wl.Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise ValueError("sample 3 is broken")
        return super().__getitem__(index)


@pytest.mark.live
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize(("dataset", "shuffle"), [(wl.Numbers(7), True), (Broken(7), False), (wl.Stream(7), None)])
def test_it_loads_as_torchs_does(options: dict[str, Any], dataset: Any, shuffle: bool | None) -> None:
    ours, theirs = (two_epochs(library, dataset, shuffle=shuffle, **options) for library in (PLAIN, TORCHS))
    assert ours == theirs


def test_it_has_no_state() -> None:
    loader = dataloader.DataLoader(range(4))
    assert not hasattr(loader, "state_dict")
    assert type(iter(loader)._record) is EpochRecord


def test_a_workers_fetching_sends_no_state_along() -> None:
    fetching = Fetching()
    assert fetching.open("dataset", lambda: "a fetcher") == "a fetcher"
    assert fetching.after("a batch", 0, "worker 0") == ("a batch", None)
    assert fetching.between(1, "worker 0") == (None, None)


def test_what_was_handed_out_is_counted() -> None:
    record = EpochRecord()
    assert record.fetch(SimpleNamespace(fetch=str), 5) == "5"
    for task in (0, 1):
        record.hand_out((task, 0))
    record.fail((2, 1))
    record.end()
    assert (record.counted, record.batches, record.turn) == (3, 0, 0)


MOST_MODULES = 24


@pytest.mark.live
def test_it_loads_few_modules_and_none_of_its_layers() -> None:
    """Two workers, one epoch; modules that hold code."""
    program = """
import sys
from minidl.loader.dataloader import DataLoader
assert len(list(DataLoader(range(4), num_workers=2))) == 4
print(*(name for name, module in sys.modules.items() if name.startswith("minidl.") and not hasattr(module, "__path__")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert {name.split(".")[1] for name in names} <= {"data", "wire", "loader", "live_repr", "process_stat", "segments"}
    assert len(names) <= MOST_MODULES, names
