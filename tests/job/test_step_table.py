"""The table of a rank's steps: to the microsecond of a made run, and whole in recorded ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made_trace import Run, made

import minidl
from minidl.job.digests import job_of
from minidl.job.meetings import keys_of
from minidl.job.step_table import CAUSES, RankTable, tables_of
from minidl.speed.wall_clock import WallClock
from minidl.tracefile import events as ev
from minidl.tracefile.join import ranks_of
from minidl.tracefile.reader import read_trace
from minidl.tracefile.spans import durations

TRACES = Path(__file__).parent.parent.parent / "traces"


def alone(path: Path) -> RankTable:
    (table,) = tables_of(read_trace(path))
    return table


def test_a_made_run_to_the_microsecond(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", batches=7, epochs=2, cost=lambda task: 1_000_000 * (1 + 4 * (task == 3)))
    (table,) = tables_of(trace)
    steps = table.steps
    assert list(zip(steps["epoch"].tolist(), steps["number"].tolist(), strict=True)) == [
        (epoch, number) for epoch in (0, 1) for number in range(7)
    ]
    assert (steps["own"] == 301).all()  # the loader's event takes a microsecond
    assert steps["worker"].tolist() == [0, 1, 0, 1, 0, 1, 0] * 2
    assert np.argmax(steps["fetch"][:7]) == 3
    assert (steps["samples"] == 4).all()
    assert (table.facts.taken, table.facts.last, table.facts.workers) == (14, (1, 7, True), 2)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["workers-4", "workers-0", "demo-cpu-4-workers", "many-small-tensors", "persistent"])
def test_the_waits_of_all_steps_are_those_of_the_wall_clock(name: str) -> None:
    trace = read_trace(TRACES / f"{name}.minidl")
    table, spans = alone(TRACES / f"{name}.minidl"), trace.spans()
    nexts = spans[(spans["code"] == ev.NEXT[0]) & (spans["end"] >= 0) & (spans["ey"] == ev.Outcome.DATA)]
    assert len(table.steps) == len(nexts)
    assert table.steps["waits"].sum() == pytest.approx(durations(nexts).sum() / 1000, rel=1e-3)
    whole = sum(sum(WallClock(trace, number, spans).causes().values()) for number in trace.loaders)
    assert table.steps["waits"].sum() <= whole / 1000 + len(CAUSES) * len(nexts)
    assert (np.diff(keys_of(table.steps)) > 0).all()


def test_spans_without_an_event_inside_the_judged_time_have_causes(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", batches=3)
    number = int(trace.events["loader"].max())
    spans = trace.spans()
    clock = WallClock(trace.cut(np.zeros(len(trace), bool)), number, spans[spans["end"] >= 0])
    assert sum(clock.causes().values()) > 0


def test_each_rank_of_a_joined_trace_has_its_own_table() -> None:
    trace = read_trace(TRACES / "ranks-4-one-gpu.minidl")
    cut, tables = ranks_of(trace), tables_of(trace)
    assert [(table.facts.rank, len(table.steps)) for table in tables] == [(rank, 24) for rank in range(4)]
    assert sum(len(one) for one in cut.values()) <= len(trace)
    assert [table.facts.rank for table in tables_of(cut[1])] == [1], "cut out, it is alone"
    assert job_of(cut[1]) is None


def test_a_step_that_did_not_end_is_no_step(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", batches=7)
    last = np.flatnonzero(trace.events["code"] == ev.CONSUMER[1])[-1]
    (table,) = tables_of(trace.cut(np.arange(len(trace)) < last))
    assert (len(table.steps), table.facts.taken) == (6, 7)


def test_loaders_that_are_made_at_one_line_are_one(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        for _ in range(3):
            for _ in minidl.DataLoader(torch.utils.data.TensorDataset(torch.arange(4)), batch_size=2):
                pass
    table = alone(tmp_path / "t")
    assert table.steps["epoch"].tolist() == [0, 0, 1, 1, 2, 2]
    assert table.steps["number"].tolist() == [0, 1] * 3
    assert "#" not in table.facts.loader


def test_a_trace_without_iterators_has_no_step(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        pass
    table = alone(tmp_path / "t")
    assert (len(table.steps), table.facts.loader, table.facts.over) == (0, "", True)
    assert made(tmp_path / "u", Run(batches=1)).loaders == {}
