"""CPU time of spans: which spans carry it, and that it tells computing from waiting."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import minidl
from minidl.record import cpu_time, fetching
from minidl.record.cpu_time import SHORT_NS, choose, no_reading, run_delay, spent
from minidl.record.fetching import TracedProgress
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.events import columns_where
from minidl.tracefile.reader import Trace, read_trace

_COMPUTES = 0.02  # seconds of CPU time


class Unlike(minidl.Dataset[torch.Tensor]):
    """Even samples compute, odd ones sleep."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 2:
            time.sleep(0.05)
        else:
            end = time.thread_time() + _COMPUTES
            while time.thread_time() < end:
                pass
        return torch.ones(4)


def record(path: Path, cpu: bool, workers: int, observe: bool = False, detail: str = "sample") -> Trace:
    make: Any = torch.utils.data.DataLoader if observe else minidl.DataLoader
    with minidl.trace(path, cpu_time=cpu, detail=detail):
        context = minidl.observe() if observe else None
        loader = make(Unlike(), 2, num_workers=workers, collate_fn=list, multiprocessing_context=context)
        assert len(list(loader)) == 4
    return read_trace(path)


def of(trace: Trace, span: tuple[int, int]) -> Rows:
    spans = trace.spans()
    return spans[(spans["code"] == span[0]) & (spans["end"] >= 0)]


@pytest.mark.live
@pytest.mark.parametrize(("workers", "observe"), [(0, False), (2, False), (2, True)])
def test_a_computing_sample_is_told_from_one_that_sleeps(workers: int, observe: bool, tmp_path: Path) -> None:
    trace = record(tmp_path / "t", True, workers, observe)
    assert trace.problems == []
    assert trace.manifest["cpu_time"]["recorded"] is True
    assert trace.manifest["cpu_time"]["chosen_by"] == "user"
    fetches = of(trace, ev.FETCH)
    assert len(fetches) == 4
    assert (fetches["cpu"] >= _COMPUTES * 0.9e9).all()  # one sample of the two computes
    of_worker = ev.RESULT_PICKLE, ev.RESULT_WRITE, ev.SHM_COPY, ev.RESULT_REBUILD, ev.INDEX_WRITE
    for span in (ev.FETCH, ev.COLLATE, ev.CONSUMER, *(of_worker if workers else ())):
        rows = of(trace, span)
        name = ev.EVENTS[span[0]].name
        assert len(rows), name
        assert (rows["cpu"] > 0).all(), name
        assert (rows["cpu"] + rows["cpu_wait"] <= rows["end"] - rows["begin"]).all(), name
    for code, column in columns_where(lambda field: field.name in ("cpu_wait", "rebuild_wait")):
        delayed = trace.events[(trace.events["code"] == code) & (trace.events["task"] >= 0)]
        if workers or code != ev.RESULT_GET[1]:
            assert len(delayed)
            assert (delayed[column] > 0).all(), ev.EVENTS[code]
    if observe:
        return
    samples = of(trace, ev.SAMPLE)
    sleeps = samples["by"] % 2 == 1
    assert np.count_nonzero(sleeps) == 4
    wall = samples["end"] - samples["begin"]
    assert (samples["cpu"][sleeps] < wall[sleeps] / 2).all()
    assert (samples["cpu"][~sleeps] >= _COMPUTES * 0.9e9).all()


@pytest.mark.live
@pytest.mark.parametrize(("cpu", "detail"), [(False, "sample"), (True, "batch")])
def test_without_it_the_events_are_the_same(cpu: bool, detail: str, tmp_path: Path) -> None:
    trace = record(tmp_path / "t", cpu, 1, detail=detail)
    spans = trace.spans()
    assert (of(trace, ev.FETCH)["cpu"] > 0).all() == cpu
    if not cpu:
        assert not spans["cpu"].any()
        assert not spans["cpu_wait"].any()


def test_the_clock_s_cost_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for cost, how in ((150, 1), (400, 1), (401, 401)):
        clock = itertools.count()
        monkeypatch.setattr(cpu_time.time, "perf_counter_ns", lambda clock=clock, cost=cost: next(clock) * 32 * cost)
        assert choose() == (how, {"recorded": True, "reading_ns": cost, "chosen_by": "cost"})
        assert [choose(asked)[0] for asked in (True, False)] == [1, 0]
    assert [cpu_time.shortest(how) for how in (1, 201, 700)] == [50_000, 50_000, 140_000]


def test_a_slow_clock_is_read_while_it_has_cost_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process with long batches always; with short ones not for a while. Another process begins anew."""
    now = 0
    monkeypatch.setattr(cpu_time.time, "monotonic_ns", lambda: now)
    monkeypatch.setattr(cpu_time.time, "thread_time_ns", lambda: 7)
    readings: dict[int, list[int]] = {}
    for between in (72_000, 60_000):
        cpu_time._after_fork()
        readings[between] = []
        for _ in range(3 * cpu_time.LOOK):
            now += between
            readings[between].append(cpu_time.cpu_clock(700)())
    assert readings[72_000] == [7] * 3 * cpu_time.LOOK
    look = cpu_time.LOOK
    assert readings[60_000] == [7] * (look - 1) + [0] * look + [7] * (look + 1)
    cpu_time._budget.take(10**9)
    assert [read(700)() for read in (cpu_time.run_delay, cpu_time.cpu_clock)] == [0, 0], "they have one budget"
    assert cpu_time.cpu_clock(1) is cpu_time.time.thread_time_ns
    assert cpu_time.cpu_clock(0) is no_reading


def test_a_difference_needs_two_readings() -> None:
    assert [spent(5, 9), spent(5, 5), spent(0, 9), spent(5, 0)] == [4, 1, 0, 0]


def test_the_clock_is_not_read_at_short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they compute is counted at the next reading: after a longer sample, or at the collation."""
    told: list[tuple[int, ...]] = []
    at = 0
    monkeypatch.setattr(fetching, "monotonic_ns", lambda: at)
    clock = itertools.count(1000, 100)
    progress = TracedProgress(lambda *event: told.append(event), 0, clock.__next__, no_reading)
    progress.begin(3, range(4))
    for position, length in enumerate((SHORT_NS // 2, SHORT_NS * 2, 1, 1)):
        progress.sample(position, position)
        at += length
    progress.collate(4)
    progress.end(0)
    ends = {ev.SAMPLE[1]: 5, ev.COLLATE[1]: 3, ev.FETCH[1]: 4}
    assert [event[ends[event[0]]] for event in told if event[0] in ends] == [0, 100, 0, 100, 100, 300]


def test_the_kernel_s_run_delay_never_falls() -> None:
    """Each thread has one descriptor, which is closed when the thread ends."""
    before = os.listdir("/proc/self/fd")
    readings: list[int] = []
    thread = threading.Thread(target=lambda: readings.extend(run_delay(True)() for _ in range(3)))
    thread.start()
    thread.join()
    assert len(readings) == 3
    assert readings == sorted(readings)
    assert readings[0] > 0
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_descriptor_that_the_program_has_taken_is_left_alone(tmp_path: Path) -> None:
    with open(tmp_path / "its own", "w") as file:

        def run() -> None:
            run_delay(True)()
            os.dup2(file.fileno(), cpu_time._delays.reader._fd)
            numbers.append(cpu_time._delays.reader._fd)

        numbers: list[int] = []
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    os.close(numbers[0])


@pytest.mark.live
def test_a_forked_child_reads_its_own_delay() -> None:
    run_delay(True)()
    parents = cpu_time._delays.reader._fd
    child = os.fork()
    if not child:
        run_delay(True)()
        link = os.readlink(f"/proc/self/fd/{cpu_time._delays.reader._fd}")
        os._exit(0 if link == f"/proc/{os.getpid()}/task/{os.getpid()}/schedstat" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert cpu_time._delays.reader._fd == parents
