"""The benchmark of plans: what is recorded, predicted and measured; never how well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minidl import cli
from minidl.prove.bench import planned
from minidl.prove.bench.planned import Cost, Workload
from minidl.speed.transport_costs import TYPICAL, TransportCosts, transport_costs


@pytest.mark.live
def test_bench_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"waiting": Workload(Cost(sleeps=1), batches=24), "stream": Workload(Cost(), batches=24, stream=True)}
    monkeypatch.setattr(planned, "WORKLOADS", short)
    monkeypatch.setattr(planned, "WORKERS", (0, 2))
    monkeypatch.setattr(planned, "calibrated", lambda rounds: TransportCosts(TYPICAL))
    *rows, _, _, least, within, held = planned.bench_plan(quick=True)
    compared, rows = ([row for row in rows if (row.name == "best threads") == best] for best in (True, False))
    assert [(row.group, row.against) for row in compared] == [(group, "best processes") for group in short]
    names = ["no workers", "2 workers", "2 workers, transport=arena", "2 workers, worker_method=thread"]
    assert [(row.group, row.name) for row in rows] == [(group, name) for group in short for name in names]
    assert all(row.ratio is not None and row.extra["low"] <= row.values[0] <= row.extra["high"] for row in rows)
    assert 0 < least.values[0] <= 1 >= within.values[0]
    assert 0 <= held.values[0] <= 1


@pytest.mark.live
def test_calibrated_costs_are_kept_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(planned, "calibrated", lambda: TransportCosts(TYPICAL))
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert cli.main(["bench", "transport", "--calibrate"]) == cli.OK
    file = tmp_path / "minidl" / "transport.json"
    assert str(file) in capsys.readouterr().out
    assert transport_costs({"host": "here"}) == TransportCosts(TYPICAL, measured=True)
    assert not transport_costs({"host": "elsewhere"}).measured
    for damage in ("", "[]", json.dumps({"host": "here", "lines": {"alone": 3}})):
        file.write_text(damage)
        assert not transport_costs({"host": "here"}).measured


def test_costs_are_told_apart_by_batch_tensor_and_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"alone": ((900, 60, 0.5), (0, 0, 0)), "upstream": ((2000, 70, 1.5), (3000, 10, 0.25)),
             "arena": ((1500, 40, 0.75), (1200, 0, 0))}  # fmt: skip

    def of(function: object, name: str, make: planned._Same, rounds: int) -> tuple[float, ...]:
        assert function is planned._cpu_times
        return tuple(batch + make.tensors * (tensor + make.size * byte) for batch, tensor, byte in costs[name])

    monkeypatch.setattr(planned, "in_child", of)
    found = planned.calibrated().lines
    assert list(found) == list(costs)
    for name, lines in costs.items():
        assert found[name] == tuple(pytest.approx(line) for line in lines)


@pytest.mark.live
def test_costs_of_transports_are_measured() -> None:
    lines = planned.calibrated(rounds=1).lines
    assert list(lines) == ["alone", "upstream", "arena"]
    assert lines["alone"][1] == (0, 0, 0)
    assert all(cost >= 0 for pair in lines.values() for line in pair for cost in line)
