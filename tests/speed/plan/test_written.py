"""A simulated run as a trace: it obeys the protocol, gives the simulated figures, and is marked in every view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_trace import Run
from made_trace import write as write_made

from minidl import cli
from minidl.check import examine
from minidl.hang.headline import headline
from minidl.prediction import plan
from minidl.speed.cpu_use import cpus_of
from minidl.speed.plan.written import write
from minidl.tracefile.reader import Trace, read_trace
from minidl.views.scene import scene_of
from minidl.views.text import render

MS = 1_000_000


def simulated(place: Path, **values: Any) -> tuple[float, Trace]:
    """A simulated run of an imagined recording, and its predicted batches/s."""
    run = Run(60, cost=lambda task: (30 if task % 20 == 7 else 8) * MS, cpu=lambda took: (took // 10, 0), pin=True)
    found = plan(
        read_trace(write_made(place / "recorded", run)), **{"transport": "upstream", "pin_memory": False} | values
    )
    return found.recommended.by_s, read_trace(write(found.recorded, found.recommended.setting, place / "plan"))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "values",
    [
        {"num_workers": 0},
        {"num_workers": 1, "prefetch_factor": 1},
        {"num_workers": 4},
        {"num_workers": 4, "transport": "arena"},
        {"num_workers": 3, "worker_method": "thread"},
        {"num_workers": 3, "in_order": False},
        {"num_workers": 3, "pin_memory": True},
    ],
)
def test_a_simulated_run_obeys_the_protocol_and_is_as_fast_as_predicted(tmp_path: Path, values: dict[str, Any]) -> None:
    by_s, trace = simulated(tmp_path, **values)
    assert not examine(trace).violations
    times = trace.select("yield")["time"]
    assert 1e9 * (len(times) - 1) / (times[-1] - times[0]) == pytest.approx(by_s, rel=0.05)


def test_every_view_marks_it_as_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, trace = simulated(tmp_path, num_workers=2)
    assert headline(trace).title.startswith("slow: simulated by minidl plan, 2 workers: ")
    assert scene_of(trace).bars["simulated"].all()
    assert "simulated" in render(trace, width=200)
    assert trace.manifest["planned"]["setting"] == "2 workers"
    assert cli.main(["summary", str(tmp_path / "plan.minidl")]) == cli.OK
    assert "simulated by minidl plan, 2 workers" in capsys.readouterr().out.splitlines()[0]


def test_it_has_the_settings_batches_and_cpus(tmp_path: Path) -> None:
    _, trace = simulated(tmp_path, num_workers=2, batch_size=16, cpus=1.5)
    assert (trace.loaders[1]["batch_size"], cpus_of(trace.manifest)) == (16, 1.5)
    assert not trace.problems
