"""It is told whether fetching has drawn from a global generator, and nothing is drawn by looking."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minidl
from minidl.record.draws import Draws
from minidl.tracefile.reader import read_trace


def drawing(*tasks: Callable[[], Any]) -> list[bool]:
    told: list[bool] = []
    draws = Draws(told.append)
    for task in tasks:
        task()
        draws.look()
    return told


def nothing() -> None: ...


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand])
def test_each_global_generator_counts(draw: Callable[[], Any]) -> None:
    assert drawing(draw, draw) == [True]
    assert drawing(nothing, nothing, draw) == [False, True]
    assert drawing(nothing, nothing) == [False]
    assert drawing(*[nothing] * 8, draw) == [False]


class Samples:
    def __init__(self, random_too: bool) -> None:
        self.random_too = random_too

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return index + (torch.rand(()).item() if self.random_too else 0.0)


@pytest.mark.live
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("random_too", [False, True])
def test_a_worker_tells_it(random_too: bool, observed: bool, tmp_path: Path) -> None:
    kind: Any = torch.utils.data.DataLoader if observed else minidl.DataLoader
    context = minidl.observe() if observed else None
    with minidl.trace(tmp_path / "t"):
        assert len(list(kind(Samples(random_too), num_workers=1, multiprocessing_context=context))) == 4
    (line,) = read_trace(tmp_path / "t").described("drawn")
    assert (line["loader"], line["worker"], line["drawn"]) == (1, 0, random_too)
