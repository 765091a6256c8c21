"""Iterators of one DataLoader belong together, are named by it, and can be looked at alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracle_trace import rows_of, trace_of
from pages import Read

from minidl import cli
from minidl.hang.headline import headline
from minidl.hang.snapshot import snapshot
from minidl.playback.stepper import Replay
from minidl.tracefile import events as ev
from minidl.tracefile.format import TraceError
from minidl.tracefile.loaders import dataloaders, first_epochs, only
from minidl.tracefile.reader import Trace
from minidl.views.chrome import to_chrome
from minidl.views.export import Export
from minidl.views.layout import Emitters
from minidl.views.page import html
from minidl.views.scene import Scene, caption, scene_of
from minidl.views.summary import summary

TRAIN = {"dataset": "Photos", "sampler": "RandomSampler", "made_at": "src/train.py:12", "dataloader": 1}
VAL = {"dataset": "Photos", "sampler": "SequentialSampler", "made_at": "src/train.py:13", "dataloader": 2}


def epochs(path: Path, *params: dict[str, Any]) -> Trace:
    """Iterators with these parameters, numbered from 1, one after the other, of an epoch and a batch each."""
    steps = [
        (0, ev.EPOCH[0]), (1, ev.NEXT[0]), (3, ev.YIELD), (4, ev.NEXT[1]), (5, ev.CONSUMER[0]), (9, ev.CONSUMER[1]),
        (10, ev.EPOCH[1]),
    ]  # fmt: skip
    numbers = range(1, len(params) + 1)
    events = rows_of("time code loader", *((1 + 100 * n + t, code, n) for n in numbers for t, code in steps), task=0)
    lines = [{"kind": "loader", "loader": n, **given} for n, given in enumerate(params, 1)]
    return trace_of(path, events, lines=lines)


PHOTOS = ("Photos by RandomSampler, train.py:12", "Photos by SequentialSampler, train.py:13")


def test_train_and_validation_are_told_apart_for_all_their_epochs(tmp_path: Path) -> None:
    trace = epochs(tmp_path, TRAIN, VAL, TRAIN, VAL)
    assert [(one.name, one.iterators) for one in dataloaders(trace)] == [(PHOTOS[0], (1, 3)), (PHOTOS[1], (2, 4))]
    assert [(slot.title, slot.loaders) for slot in Emitters(trace).slots] == [
        (f"{PHOTOS[0]}: iterators 1, 3", (1, 3)), (f"{PHOTOS[1]}: iterators 2, 4", (2, 4)),
    ]  # fmt: skip
    assert [lane.name for lane in Export(trace).lanes] == ["train.py:12 consumer", "train.py:13 consumer", "loader"]
    text = summary(trace).text()
    assert f"{PHOTOS[0]}: iterators 1, 3; together " in text
    assert text.index("train.py:12") < text.index("iterator 1") < text.index("train.py:13") < text.index("iterator 2")


def test_two_of_one_name_are_numbered_and_those_that_say_nothing_stay_alone(tmp_path: Path) -> None:
    trace = epochs(tmp_path, TRAIN, TRAIN | {"dataloader": 3}, {}, {"dataset": "Photos"})
    names = {1: f"{PHOTOS[0]} #1", 2: f"{PHOTOS[0]} #2", 3: "DataLoader", 4: "Photos"}
    assert {number: one.name for one in dataloaders(trace) for number in one.iterators} == names


def test_one_can_be_looked_at_alone(tmp_path: Path) -> None:
    trace = epochs(tmp_path, TRAIN, VAL, TRAIN)
    train, val = only(trace, "Random"), only(trace, "train.py:13")
    assert (sorted(train.loaders), set(train.events["loader"].tolist()), len(trace.loaders)) == ([1, 3], {1, 3}, 3)
    assert val.loaders == {2: trace.loaders[2]}
    assert val.start == trace.start < int(val.events["time"][0])
    assert (first_epochs(train), first_epochs(val)) == ({1: 0, 3: 1}, {2: 0})
    assert only(trace, None) is trace
    for wrong, said in (("Photos", "several DataLoaders are 'Photos': Photos by R"), ("x", "no DataLoader is 'x': Ph")):
        with pytest.raises(TraceError, match=said):
            only(trace, wrong)


def said_of_epochs(drawn: Scene) -> list[str]:
    return [caption(drawn, bar)[0] for bar in drawn.bars[drawn.bars["code"] == ev.EPOCH[0]]]


def test_epochs_are_counted_by_dataloader_in_every_view(tmp_path: Path) -> None:
    """Workers that are started anew begin an iterator whose own epochs begin with 0."""
    trace = epochs(tmp_path, TRAIN, VAL, TRAIN, VAL, TRAIN)
    assert first_epochs(trace) == {1: 0, 2: 0, 3: 1, 4: 1, 5: 2}
    assert sorted(said_of_epochs(scene_of(trace))) == ["epoch 0", "epoch 0", "epoch 1", "epoch 1", "epoch 2"]
    page = Read(html(trace))
    assert sorted(page["bar.bx"][page["bar.code"] == ev.EPOCH[0]].tolist()) == [0, 0, 1, 1, 2]
    assert page.words["ownEpochs"] == []
    assert [name for name, _ in page.words["dataloaders"]] == list(PHOTOS)
    last = snapshot(trace, trace.last).loaders[-1]
    assert last.title() == f"iterator 5 ({PHOTOS[0]}): epoch 2, 0 yielded"
    at = Replay(trace, 3)
    at.to(1)
    assert (at.state.epoch, at.words) == (1, "epoch 1 begins")
    assert {e["name"] for e in to_chrome(trace)["traceEvents"] if e["ph"] == "b"} == {"epoch 0", "epoch 1", "epoch 2"}
    assert "iterator 3, epoch 1" in summary(trace).text()
    first = headline(trace).evidence[0].text
    assert first.startswith("the loop waited longest for this one of 2 DataLoaders: Photos by Random")


def test_epochs_of_iterators_that_do_not_say_whose_they_are_stay_their_own(tmp_path: Path) -> None:
    trace = epochs(tmp_path, {"dataset": "Photos"}, {"dataset": "Photos"})
    assert first_epochs(trace) == {}
    assert said_of_epochs(scene_of(trace)) == ["iterator 1 epoch 0", "iterator 2 epoch 0"]


@pytest.mark.parametrize("command", [["replay"], ["top", "--once"], ["diff"], ["audit"]])
def test_a_name_filters_the_other_commands_too(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    epochs(tmp_path, TRAIN, VAL)
    paths = [str(tmp_path)] * (2 if command == ["diff"] else 1)
    assert cli.main([*command, *paths, "--dataloader", "nowhere.py"]) == cli.USAGE
    assert "no DataLoader is 'nowhere.py': Photos by RandomSampler, train.py:12; Photos by" in capsys.readouterr().err
    if command[0] in ("replay", "top"):
        assert cli.main([*command, *paths, "--dataloader", "train.py:13"]) == cli.OK
        said = capsys.readouterr().out
        assert ("iterator 2" in said, "iterator 1" in said) == (True, False)
