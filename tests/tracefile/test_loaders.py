"""Iterators of one DataLoader belong together, are named by it, and can be looked at alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracle_trace import write_process

from minidl.analysis.summary import summary
from minidl.tracefile import events as ev
from minidl.tracefile.format import TraceError
from minidl.tracefile.loaders import dataloaders, only
from minidl.tracefile.reader import Trace, read_trace
from minidl.views.chrome import Export
from minidl.views.layout import Emitters

TRAIN = {"dataset": "Photos", "sampler": "RandomSampler", "made_at": "src/train.py:12", "dataloader": 1}
VAL = {"dataset": "Photos", "sampler": "SequentialSampler", "made_at": "src/train.py:13", "dataloader": 2}


def epochs(path: Path, *params: dict[str, Any]) -> Trace:
    """Iterators with these parameters, numbered from 1, one after the other, of an epoch and a batch each."""
    steps = [
        (0, ev.EPOCH[0]), (1, ev.NEXT[0]), (3, ev.YIELD), (4, ev.NEXT[1]), (5, ev.CONSUMER[0]), (9, ev.CONSUMER[1]),
        (10, ev.EPOCH[1]),
    ]  # fmt: skip
    events = [
        {"time": 1 + 100 * n + t, "code": c, "task": 0, "loader": n}
        for n in range(1, len(params) + 1)
        for t, c in steps
    ]
    lines = [{"kind": "loader", "loader": n, **given} for n, given in enumerate(params, 1)]
    write_process(path, events, lines=lines, role="loader")
    return read_trace(path)


def test_train_and_validation_are_told_apart_for_all_their_epochs(tmp_path: Path) -> None:
    trace = epochs(tmp_path, TRAIN, VAL, TRAIN, VAL)
    assert [(one.name, one.iterators) for one in dataloaders(trace)] == [
        ("Photos by RandomSampler, train.py:12", (1, 3)),
        ("Photos by SequentialSampler, train.py:13", (2, 4)),
    ]
    assert [(slot.title, slot.loaders) for slot in Emitters(trace).slots] == [
        ("Photos by RandomSampler, train.py:12: iterators 1, 3", (1, 3)),
        ("Photos by SequentialSampler, train.py:13: iterators 2, 4", (2, 4)),
    ]
    assert Export(trace).titles() == ["train.py:12 consumer 1", "train.py:13 consumer 2", "loader 100"]
    text = summary(trace).text()
    assert "Photos by RandomSampler, train.py:12: iterators 1, 3; together " in text
    assert text.index("train.py:12") < text.index("iterator 1") < text.index("train.py:13") < text.index("iterator 2")


def test_two_of_one_name_are_numbered_and_those_that_say_nothing_stay_alone(tmp_path: Path) -> None:
    trace = epochs(tmp_path, TRAIN, TRAIN | {"dataloader": 3}, {}, {"dataset": "Photos"})
    assert [(one.name, one.iterators) for one in dataloaders(trace)] == [
        ("Photos by RandomSampler, train.py:12 #1", (1,)),
        ("Photos by RandomSampler, train.py:12 #2", (2,)),
        ("DataLoader", (3,)),
        ("Photos", (4,)),
    ]


def test_one_can_be_looked_at_alone(tmp_path: Path) -> None:
    trace = epochs(tmp_path, TRAIN, VAL, TRAIN)
    alone = only(trace, "Random")
    assert (sorted(alone.loaders), set(alone.events["loader"].tolist())) == ([1, 3], {1, 3})
    assert len(trace.loaders) == 3
    assert only(trace, "train.py:13").loaders == {2: trace.loaders[2]}
    for wrong, said in (("Photos", "several DataLoaders are 'Photos': Photos by R"), ("x", "no DataLoader is 'x': Ph")):
        with pytest.raises(TraceError, match=said):
            only(trace, wrong)
