"""What led to a batch, as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import workloads as wl
from made_trace import made

import minidl
from minidl import cli
from minidl.speed.critical_path import critical_path
from minidl.tracefile.reader import Trace, read_trace


def test_the_past_of_a_hang_ends_in_its_sample(hung: Trace) -> None:
    text = critical_path(hung, 9)
    assert text.startswith(
        "Batch 9 of iterator 1, epoch 0, was never yielded (times since the trace's first event). Its"
    )
    assert "worker 1" in text
    assert "sample 38 of task 9 begins; its end is not in the trace" in text
    assert "index_put of task 9" in text


def test_a_story_is_the_batchs_way_and_then_the_causes_that_came_last(tmp_path: Path) -> None:
    trace = made(tmp_path, batches=4)
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


def test_a_loader_without_workers_has_its_story_too(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        list(minidl.DataLoader(wl.Tensors(8), batch_size=2))
    assert "fetch of task 2" in critical_path(read_trace(tmp_path / "t"), 2)


def test_a_batch_of_an_epoch_that_is_not_there_is_an_error(healthy: Trace) -> None:
    with pytest.raises(ValueError, match="no batch 1 of epoch 7"):
        critical_path(healthy, 1, epoch=7)


@pytest.mark.live
def test_a_story_steers_no_terminal(tmp_path: Path) -> None:
    rude = wl.Failing(2, ValueError("no \x1b[31m"), at=(0,))
    with minidl.trace(tmp_path / "t"), pytest.raises(ValueError, match="no "):
        list(minidl.DataLoader(rude, num_workers=1))
    assert "task_error of task 0 (ValueError: no \\x1b[31m)" in critical_path(read_trace(tmp_path / "t"), 0)


def test_the_command_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, path = made(tmp_path, batches=4), str(tmp_path)
    assert cli.main(["before", path, "--batch", "2", "--lines", "5"]) == cli.OK
    assert capsys.readouterr().out == critical_path(trace, 2, lines=5) + "\n"
    assert cli.main(["before", path, "--batch", "44"]) == cli.USAGE
    assert capsys.readouterr().err.endswith("no batch 44: it has tasks 0 to 3\n")
