"""The summary says what a trace holds: counts, bytes and names exactly, times as their relations allow."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
import torch
import workloads as wl
from oracle_trace import stop_recording, write_process

import minidl
from minidl.speed.ledger import Copy
from minidl.speed.wall_clock import waiting
from minidl.tracefile import events as ev
from minidl.tracefile.events import Phase
from minidl.tracefile.reader import read_trace
from minidl.tracefile.words import duration
from minidl.views.summary import Summary, summary

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

KIB = 1024


class Rows(minidl.Dataset[torch.Tensor]):
    """Samples of 1 KiB; number 10 waits until it has been told that it may go on."""

    def __init__(self, gate: int = -1) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 10 and self.gate >= 0:
            os.read(self.gate, 1)
        return torch.zeros(256)


def record(directory: Path, **options: Any) -> Summary:
    with minidl.trace(directory), minidl.DataLoader(Rows(), batch_size=4, **options) as loader:
        assert len(list(loader)) == len(loader)
    return summary(read_trace(directory))


@pytest.mark.live
def test_counts_and_bytes_of_a_run_with_workers(tmp_path: Path) -> None:
    """A sample lies inside its fetch, a wait inside its next: no part is longer than the whole."""
    told = record(tmp_path / "trace", num_workers=2, prefetch_factor=3)
    (loader,) = told.loaders
    assert (loader.epochs, loader.batches, loader.errors) == (1, 3, 0)
    assert [(worker.tasks, worker.ended) for worker in loader.workers] == [(2, "sentinel"), (1, "sentinel")]
    assert loader.account.moved(Copy.COLLATE) == (12 * KIB, 3)
    assert loader.account.moved(Copy.FEEDER) == (0, 0)
    stages = loader.stages
    assert [stages[name].count for name in ("fetch", "collate", "sample", "rebuild")] == [3, 3, 12, 3]
    assert "prefetch_factor=3" in told.text()
    assert (told.processes, told.problems) == (3, [])
    assert stages["sample"].total + stages["collate"].total <= stages["fetch"].total
    assert stages["wait"].total <= loader.waited
    assert loader.waited + loader.consumer <= loader.wall
    assert [name for name, s in stages.items() if not s.p50 <= s.p95 <= s.most <= s.total] == []
    assert [worker for worker in loader.workers if worker.fetching + worker.idle > worker.time] == []


@pytest.mark.live
def test_a_copy_by_the_feeder_and_a_simulated_pinning_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    (loader,) = record(tmp_path / "trace", num_workers=2, pin_memory=True, collate_fn=wl.as_list).loaders
    assert (loader.account.moved(Copy.COLLATE), loader.account.moved(Copy.FEEDER)) == ((0, 0), (12 * KIB, 12))
    assert "copied there by the feeder 12.0 KiB (12)" in loader.text()
    assert (loader.account.moved(Copy.PIN)[0], loader.pin_simulated) == (12 * KIB, True)
    assert "pinned (simulated) 12.0 KiB" in loader.text()
    trace = read_trace(tmp_path / "trace")
    assert loader.stages["wait"].count == len(trace.select("ready_get", Phase.END))
    assert loader.stages["pin idle"].count == len(trace.select("result_get", Phase.END))


def test_a_run_without_workers_or_without_a_loader(tmp_path: Path) -> None:
    told = record(tmp_path / "trace")
    (loader,) = told.loaders
    assert (loader.batches, loader.workers, loader.start_up, told.open) == (3, [], None, [])
    with minidl.trace(tmp_path / "empty"):
        pass
    assert "no iterator in this trace" in summary(read_trace(tmp_path / "empty")).text()


def test_an_error_is_no_batch(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "trace"):
        batches = iter(minidl.DataLoader([1, "two", 3], batch_size=1, collate_fn=lambda one: one[0] + 1))
        assert next(batches) == 2
        with pytest.raises(TypeError):
            next(batches)
        assert list(batches) == [4]
    trace = read_trace(tmp_path / "trace")
    assert (summary(trace).loaders[0].batches, waiting(trace, 1).batches) == (2, 2)


@pytest.mark.parametrize(("code", "ended"), [(-9, "SIGKILL"), (3, "exit code 3"), (0, "exit code 0")])
def test_how_a_worker_has_ended(code: int, ended: str, tmp_path: Path) -> None:
    gone = {"code": ev.WORKER_GONE, "loader": 1, "worker": 0, "x": 7, "y": code, "time": 5}
    write_process(tmp_path, [gone], pid=5, role="loader")
    write_process(tmp_path, [{"code": ev.FETCH[0], "loader": 1, "task": 1}], pid=7, role="worker", worker=0, loader=1)
    (worker,) = summary(read_trace(tmp_path)).loaders[0].workers
    assert worker.ended == ended


@pytest.mark.live
def test_the_slowest_sample_is_the_one_that_waited(tmp_path: Path) -> None:
    """Sample 10 is let go when every other has ended and it has taken longer than any: the live trace tells when."""

    def has_waited_longest() -> bool:
        spans = read_trace(tmp_path / "trace").spans()
        samples = spans[spans["code"] == ev.SAMPLE[0]]
        took = np.where(samples["end"] < 0, time.monotonic_ns(), samples["end"]) - samples["begin"]
        others = samples["by"] != 10
        return bool(others.sum() == 11 and np.all(samples["end"][others] > 0) and took[~others] > took[others].max())

    end, gate = os.pipe()
    try:
        with minidl.trace(tmp_path / "trace"), minidl.DataLoader(Rows(end), num_workers=2, prefetch_factor=6) as loader:
            batches = iter(loader)
            assert len([next(batches) for _ in range(10)]) == 10
            while not has_waited_longest():
                time.sleep(0.001)
            os.write(gate, b"x")
            assert len(list(batches)) == 2
    finally:
        os.close(end)
        os.close(gate)
    (told,) = summary(read_trace(tmp_path / "trace")).loaders
    assert told.slowest[["by", "task", "worker"]][0].tolist() == (10, 10, 0)


@pytest.mark.live
def test_pinning_that_is_simulated_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    (loader,) = record(tmp_path / "trace", num_workers=2, pin_memory=True).loaders
    trace = read_trace(tmp_path / "trace")
    assert (loader.account.moved(Copy.PIN)[0], loader.pin_simulated) == (12 * KIB, True)
    assert "pinned (simulated) 12.0 KiB" in loader.text()
    assert loader.stages["wait"].count == len(trace.select("ready_get", Phase.END))
    assert loader.stages["pin idle"].count == len(trace.select("result_get", Phase.END))


def imagined(directory: Path, **options: Any) -> Summary:
    return summary(made_trace.made(directory, **options))


def test_percentiles_and_totals_to_the_nanosecond(tmp_path: Path) -> None:
    """Twenty fetches that cost 1,000,000 ns each, but one that costs three times as much."""
    costs = {"batches": 20, "cost": lambda task: 3_000_000 if task == 7 else 1_000_000}
    (loader,) = imagined(tmp_path / "trace", **costs).loaders
    stage = loader.stages["fetch"]
    extra = stage.p50 - 1_000_000  # what the imagined worker does around the samples
    assert (stage.count, stage.most) == (20, 3_000_000 + extra)
    assert stage.total == 19 * (1_000_000 + extra) + 3_000_000 + extra
    assert stage.p50 <= stage.p95 < stage.most
    assert loader.slowest["task"][0] == 7


def test_the_verdict_is_told_with_its_evidence_and_the_next_step(tmp_path: Path) -> None:
    (loader,) = imagined(tmp_path / "trace", batches=200, step=10_000).loaders
    lines = loader.text().splitlines()
    place = lines.index("  " + loader.verdict.sentence)
    assert lines[place + 1].startswith("    waited ")
    assert "  next step: " + loader.verdict.next_step in lines[place:]


def test_in_a_hang_what_is_open_comes_first_and_no_hint_is_about_speed(tmp_path: Path) -> None:
    told = imagined(tmp_path / "trace", **made_trace.HUNG | {"poll": 5_000_000_000})
    assert any("worker 1" in text and "in sample 38 (task 9)" in text for text in told.open)
    assert any(text.startswith("loader") and "waiting for task 9 of worker 1" in text for text in told.open)
    lines = told.text().splitlines()
    assert lines[0] == told.headline.sentence
    assert lines[0].startswith("hung for 30.0 s, since 0.01 s: waiting for worker 1 (pid 1101), in sample 38 (task 9)")
    assert lines.index("when the trace ends:") < next(n for n, line in enumerate(lines) if line.startswith("iterator"))
    assert [line.strip() for line in lines if "next step" in line] == [f"next step: {told.headline.next_step}"]
    assert "slowest" not in told.text()
    healthy = imagined(tmp_path / "healthy", **made_trace.HEALTHY)
    assert healthy.text().splitlines()[0] == healthy.headline.sentence
    assert "  slowest " in healthy.text()


def test_who_polls_has_waited_since_his_first_poll(tmp_path: Path) -> None:
    """The loader asks whether its workers live and waits on: it has waited since it began to."""
    trace = made_trace.made(tmp_path / "t", **made_trace.HUNG | {"polls": 7})
    end = int(trace.events["time"][-1])
    gets = trace.select("result_get", Phase.BEGIN)
    gets = gets[gets["task"] == 9]
    ends = trace.select("result_get", Phase.END)
    begin = next(int(row["time"]) for row in gets if not np.any((ends["time"] >= row["time"]) & (ends["x"] != 0)))
    assert gets["time"][-1] > begin
    told = {text.partition(" (")[0]: text for text in summary(trace).open}
    assert told["loader"].endswith(f"for {duration(end - begin)}")


def test_a_process_id_that_is_used_again(tmp_path: Path) -> None:
    """Worker 0 of loader 1 has ended; its id is that of worker 3 of loader 2 now, which has not."""
    write_process(
        tmp_path, [{"code": ev.WORKER_GONE, "loader": 1, "worker": 0, "x": 7, "time": 5}], pid=5, role="loader"
    )
    fetch = {"code": ev.FETCH[0], "task": 1}
    write_process(tmp_path, [fetch | {"loader": 1, "time": 2}], pid=7, role="worker", worker=0, loader=1)
    last = [fetch | {"loader": 2, "time": 9_000_000}, {"code": ev.SHM_ALLOC, "loader": 2, "time": 19_000_000}]
    write_process(tmp_path, last, pid=7, start_ns=6, role="worker", worker=3, loader=2)
    assert summary(read_trace(tmp_path)).open == [
        "worker 0 (pid 7) ended while it was fetching task 1",
        "worker 3 (pid 7) has been fetching task 1 for 10.0 ms",
    ]


def test_who_stopped_recording_is_not_said_to_be_there_still(tmp_path: Path) -> None:
    """The loader's last `next` seems open until the workers' last events, which it did not wait for."""
    path = made_trace.write(tmp_path / "t", made_trace.Run(batches=40))
    since = int(read_trace(path).select("next", Phase.BEGIN)["time"][20])
    stop_recording(path, made_trace.LOADER_PID, 300, errno.ENOSPC, since)
    trace = read_trace(path)
    (line,) = (text for text in summary(trace).open if text.startswith("loader"))
    assert " when its recording stopped, " in line
    assert "has been" not in line
    found, begin = waiting(trace, 1), int(trace.events["time"][trace.events["loader"] == 1][0])
    assert found.total + found.consumer <= since - begin


@pytest.mark.live
def test_many_iterators_alike_are_told_in_a_line_each(tmp_path: Path) -> None:
    """A loader that does not keep its workers is a new iterator in each epoch; those of other parameters are apart."""
    with minidl.trace(tmp_path / "t"):  # each has batches enough for a verdict: either may be the headline's
        loader, other = minidl.DataLoader(Rows(), batch_size=4), minidl.DataLoader(Rows(), batch_size=2)
        for _ in range(6):
            assert len(list(loader)) == 3
        assert len(list(other)) == 6
    told = summary(read_trace(tmp_path / "t"))
    first = told.loaders[0].number
    lines = told.text().splitlines()
    assert len(told.loaders) == 7
    short = [line for line in lines if f"(as iterator {first})" in line]
    longest = max(told.loaders[:6], key=lambda one: one.waited)
    assert len(short) == 6 - len({first, longest.number})
    assert all("3 batches" in line for line in short)
    for full in (told.loaders[0], longest, told.loaders[6]):
        assert set(full.text(hints=False).splitlines()) <= set(lines)
    assert lines[1] == f"  next step: {told.headline.next_step}"
    assert lines.count(f"  {lines[1]}") == 0, "it is said once"
