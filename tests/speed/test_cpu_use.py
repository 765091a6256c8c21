"""Fetches that compute, wait for a CPU, or wait for something else are told apart, and what helps them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import made_trace
import numpy as np
import pytest

from minidl.speed.cpu_use import CpuLimit, CpuUse, cpu_use, cpus_of
from minidl.speed.verdict import verdict
from minidl.speed.wall_clock import Bound, Cause
from minidl.tracefile import events as ev
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import SPAN
from minidl.views.summary import summary

Parts = Callable[[int], tuple[int, int]]

RUNS: dict[str, tuple[Parts | None, CpuLimit]] = {
    "compute": (lambda took: (took * 9 // 10, 1), CpuLimit.COMPUTES),
    "too few CPUs": (lambda took: (took // 2, took * 2 // 5), CpuLimit.SHORT),
    "a slow disk": (lambda took: (took // 5, took // 50), CpuLimit.WAITS),
    "a little short of CPUs, and a slow disk": (lambda took: (took // 5, took * 3 // 10), CpuLimit.WAITS),
    "a kernel that does not tell": (lambda took: (took // 5, 0), CpuLimit.UNKNOWN),
    "an older trace": (None, CpuLimit.UNKNOWN),
}


def imagined(directory: Path, parts: Parts | None) -> Trace:
    """A supply-bound run. parts: of a fetch of so many ns, its CPU time and its wait for a CPU."""
    return made_trace.made(directory, batches=200, **({} if parts is None else {"cpu": parts}))


@pytest.mark.heavy
@pytest.mark.parametrize("name", RUNS)
def test_what_fetches_did_is_told_apart(name: str, tmp_path: Path) -> None:
    parts, held = RUNS[name]
    trace = imagined(tmp_path / "t", parts)
    assert cpu_use(trace.spans()).held(None)[0] is held
    told = verdict(trace, 1)
    assert (told.kind, told.cause) == (Bound.SUPPLY, Cause.SAMPLES)
    assert (held.value in told.sentence) or held is CpuLimit.UNKNOWN
    assert [line.startswith("fetching was computing ") for line in told.evidence].count(True) == (parts is not None)
    assert ("computing" in summary(trace).text()) == (parts is not None)


def test_the_shares_are_of_the_time_measured(tmp_path: Path) -> None:
    found = cpu_use(imagined(tmp_path / "t", RUNS["too few CPUs"][0]).spans())
    assert found.wall // 2 - found.cpu < 40  # rounded down in each of 40 fetches
    used = f"it used {found.cpu / found.during:.1f} of 2 CPUs on average"
    shares = "fetching was computing 50%, ready but without a CPU 40%, waiting for something else"
    assert re.fullmatch(f"{shares} .*; {used}", found.line(2))
    assert CpuUse(10, 4, 0, 5).line(None) == (
        "fetching was computing 40%, waiting, for a CPU or for something else, 60%; it used 0.8 CPUs on average"
    )
    assert CpuUse().line(2) == ""


def test_the_time_that_any_fetch_went_on_is_counted_once() -> None:
    spans = np.zeros(4, SPAN)
    spans["code"], spans["cpu"] = ev.FETCH[0], 5
    spans["begin"], spans["end"] = [0, 10, 15, 90], [50, 20, 60, 100]
    assert cpu_use(spans) == CpuUse(wall=115, cpu=20, no_cpu=0, during=70)
    assert cpu_use(spans[:0]) == CpuUse()


def test_where_all_cpus_are_in_use_more_workers_do_not_help() -> None:
    """Also if nothing tells of waits for a CPU, as with a quota: 1.8 of 2 CPUs are used."""
    full = CpuUse(wall=400, cpu=180, no_cpu=0, during=100)
    assert full.held(2)[0] is CpuLimit.SHORT
    assert full.held(8)[0] is CpuLimit.UNKNOWN
    assert replace(full, cpu=400, wall=410, during=200).held(2)[0] is CpuLimit.COMPUTES


@pytest.mark.parametrize(
    ("manifest", "cpus"),
    [
        ({}, None),
        ({"cpus": 8}, 8),
        ({"cpus": 8, "cpus_allowed": 4, "cpu_quota": None}, 4),
        ({"cpus": 8, "cpus_allowed": 4, "cpu_quota": 1.5}, 1.5),
        ({"cpus": "many", "cpu_quota": -1}, None),
    ],
)
def test_the_cpus_of_a_run(manifest: dict[str, object], cpus: float | None) -> None:
    assert cpus_of(manifest) == cpus
