"""What led to a batch, as text."""

from __future__ import annotations

import re
from pathlib import Path

import made_trace
import pytest
import torch
import workloads as wl
from made_trace import Run

import minidl
from minidl import cli
from minidl.speed.critical_path import critical_path
from minidl.tracefile.reader import read_trace


def test_the_past_of_a_hang_ends_in_its_sample(tmp_path: Path) -> None:
    trace = read_trace(made_trace.write(tmp_path, Run(**made_trace.HUNG)))
    text = critical_path(trace, 9)
    assert text.startswith(
        "Batch 9 of iterator 1, epoch 0, was never yielded (times since the trace's first event). Its"
    )
    assert "worker 1" in text
    assert "sample 38 of task 9 begins; its end is not in the trace" in text
    assert "index_put of task 9" in text


def test_a_story_is_the_batchs_way_and_then_the_causes_that_came_last(tmp_path: Path) -> None:
    trace = read_trace(made_trace.write(tmp_path, Run(batches=4)))
    own, causes = critical_path(trace, 1, lines=3).split("\n\n")
    lines = own.splitlines()
    assert lines[0] == (
        "What led to the yield of batch 1 of iterator 1, epoch 0 (times since the trace's first event). Its own steps:"
    )
    steps = ["index_put", "index_write", "index_get", "fetch", "result_put", "result_pickle", "result_write",
             "result_rebuild", "result_get", "yield"]  # fmt: skip
    assert [next(step for step in steps if f" {step} of task 1" in line) for line in lines[1:]] == steps
    put = trace.select("index_put")
    ms = (put["time"][put["task"] == 1][0] - trace.events["time"][0]) / 1e6
    assert float(lines[1].split()[0]) == round(ms, 3), "by the clock of every view"
    assert "(4 sample 784 µs, 1 collate 262 µs, the longest sample 196 µs, index 7)" in own
    assert "...  18 earlier steps" in causes
    assert len(causes.splitlines()) == 6
    assert re.search(r" in all: \d+% \w", causes.splitlines()[-1])
    assert len(critical_path(trace, 1, lines=0).splitlines()) > len(critical_path(trace, 1, lines=3).splitlines())


@pytest.mark.live
def test_a_loader_without_workers_has_its_story_too(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        list(minidl.DataLoader(wl.Tensors(8), batch_size=2))
    assert "fetch of task 2" in critical_path(read_trace(tmp_path / "t"), 2)


@pytest.mark.live
@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"batch": 99}, "no batch 99: it has tasks 0 to 5$"), ({"batch": 1, "epoch": 7}, "no batch 1 of epoch 7")],
)
def test_a_batch_that_is_not_there_is_an_error(arguments: dict[str, int], message: str, tmp_path: Path) -> None:
    trace = read_trace(made_trace.write(tmp_path, Run(batches=6)))
    with pytest.raises(ValueError, match=message):
        critical_path(trace, **arguments)


class Rude(wl.Tensors):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise ValueError("no \x1b[31m")


@pytest.mark.live
def test_a_story_steers_no_terminal(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"), pytest.raises(ValueError, match="no "):
        list(minidl.DataLoader(Rude(2), num_workers=1))
    assert "task_error of task 0 (ValueError: no \\x1b[31m)" in critical_path(read_trace(tmp_path / "t"), 0)


def test_the_command_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_trace.write(tmp_path / "trace", Run(batches=4))
    assert cli.main(["before", str(path), "--batch", "2", "--lines", "5"]) == cli.OK
    assert capsys.readouterr().out == critical_path(read_trace(path), 2, lines=5) + "\n"
    assert cli.main(["before", str(path), "--batch", "44"]) == cli.USAGE
    assert "no batch 44: it has tasks 0 to 3" in capsys.readouterr().err
