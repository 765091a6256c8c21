"""The benchmark of the device stage: measurements and output, on a simulated device and on a GPU if there is one."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from minidl import cli
from minidl.prove import bench
from minidl.prove.bench import device
from minidl.prove.bench.device import _AugmentAll, _Cycle, _memcpys, _Work, bench_device, compare_with_profiler, plan

_without = pytest.mark.skipif(os.environ.get("MINIDL_TEST_GPU") != "1", reason="needs a GPU, and MINIDL_TEST_GPU=1")


def gpu(test: Any) -> Any:
    """Mark a test that needs a GPU; its workers are processes."""
    return _without(pytest.mark.live(test))


@pytest.fixture
def small(simulate: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As little as there can be."""
    least = dataclasses.replace(plan(True), copies=2, images=2, side=20, crop=16, steps=2, work=0.01)
    monkeypatch.setattr(device, "plan", lambda simulate, quick=False: least)
    monkeypatch.setattr(device, "MEASURABLE", 0.01)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_on_a_simulated_device_every_group_says_so(small: None) -> None:
    rows = bench_device(True, simulate=True)
    copies = device.PLAIN, device.OURS, device.PLAIN_PAGEABLE, device.OURS_PAGEABLE
    to_device = device.BY_TORCH, device.BY_UPSTREAM, device.BY_ARENA
    in_steps = device.COMPUTE, device.IN_STEP_PAGEABLE, device.IN_STEP, device.ASIDE_PAGEABLE, device.ASIDE
    assert [(row.group, row.name) for row in rows] == [
        *(("copies of 1 MiB (simulated)", name) for name in copies),
        *(("2 images to the device (simulated)", name) for name in to_device),
        *(("a step of 2 images (simulated)", name) for name in (*in_steps, device.BY_WORKERS)),
    ]
    assert {row.name: row.against for row in rows[:4]}[device.OURS] == device.PLAIN
    assert all(row.extra["CPU s/GB"] > 0 for row in rows[4:7])
    by_name = {row.name: row for row in rows[7:]}
    extra = by_name[device.ASIDE].extra
    assert 0 <= extra["hidden %"] <= 100
    assert extra["MiB"] == 2 * 20 * 20 * 3 / (1 << 20)
    assert by_name[device.BY_WORKERS].extra["MiB"] == 4 * 2 * 16 * 16 * 3 / (1 << 20)
    assert "hidden %" not in by_name[device.IN_STEP].extra


def test_a_quick_benchmark_of_a_device_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    whole, quick = plan(False), plan(False, quick=True)
    assert len(quick.sizes) < len(whole.sizes)
    assert quick.copies * 2 < whole.copies
    assert quick.steps * 2 < whole.steps
    assert (quick.images, quick.work) == (whole.images, whole.work), "a step is the same, so that figures compare"


def test_the_workers_augmentation_is_the_devices() -> None:
    images = [torch.randint(0, 256, (20, 20, 3), dtype=torch.uint8) for _ in range(4)]
    from minidl.device.augment import Augment

    assert torch.equal(_AugmentAll(16)(images), Augment(16)(torch.stack(images)))


def test_the_cycle_gives_as_many_as_it_says() -> None:
    assert [int(batch) for batch in _Cycle([torch.tensor(1), torch.tensor(2)], 5)] == [1, 2, 1, 2, 1]


def test_the_profilers_copies_to_the_device_are_found() -> None:
    def event(name: str, ts: float, size: int, cat: str = "gpu_memcpy") -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": ts, "dur": 2.5, "args": {"bytes": size}}

    document = {
        "baseTimeNanoseconds": 1_000_000,
        "traceEvents": [
            event("Memcpy HtoD (Pinned -> Device)", 20.5, 64),
            event("Memcpy HtoD (Pinned -> Device)", 10.25, 64),
            event("Memcpy HtoD (Pinned -> Device)", 11.0, 8),
            event("Memcpy DtoH (Device -> Pinned)", 12.0, 64),
            event("Memcpy HtoD", 13.0, 64, cat="cuda_runtime"),
            {"ph": "M", "name": "process_name"},
        ],
    }
    assert _memcpys(document, 64).tolist() == [[1_010_250, 2_500], [1_020_500, 2_500]]
    assert _memcpys({"traceEvents": []}, 64).shape == (0, 2)


def test_without_an_accelerator_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert cli.main(["bench", "--device", "--json", str(tmp_path / "out.json")]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("minidl: bench --device: this machine has no accelerator")
    assert not (tmp_path / "out.json").exists()


def test_the_command_line_runs_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small: None
) -> None:
    asked: list[tuple[bool, bool]] = []

    def noted(quick: bool, simulate: bool) -> list[Any]:
        asked.append((quick, simulate))
        return []

    monkeypatch.setattr(device, "bench_device", noted)
    assert cli.main(["bench", "--quick", "--device", "sim"]) == 0
    assert asked == [(True, True)]
    assert "device: copies to a device" in capsys.readouterr().out
    assert "device" not in bench._BENCHMARKS, "no machine is asked for one by default"


@pytest.fixture(scope="module")
def used() -> None:
    """A GPU and a profiler whose first use, which opens what they keep, lies behind them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True):
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
        torch.cuda.synchronize()


@gpu
def test_our_copies_are_the_profilers(used: None) -> None:
    """One shift of the clocks puts each of the profiler's copies into our span of it, to the error of both clocks.

    Ours begins and ends with an event of the stream: it holds what the host needs to issue a copy on an idle stream.
    The profiler's clock is compared with the host's as ours is, so its error counts as much.
    """
    found = compare_with_profiler(plan(False), size=16, batches=32)
    assert set(found.bytes.tolist()) == {16 << 20}
    ends = found.begins + found.ours - found.theirs
    assert found.begins.max() <= ends.min() + 4 * found.error


@gpu
def test_the_work_takes_about_as_long_as_it_should(used: None) -> None:
    mine = plan(False)
    work = _Work(mine)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        work()
    end.record()
    end.synchronize()
    assert mine.work / 3 < start.elapsed_time(end) / 5 < mine.work * 3
