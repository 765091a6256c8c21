"""How a recording begins and ends: by `minidl.trace`, or by the environment of a whole program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import workloads as wl

import minidl
from minidl.record import recorder, session
from minidl.tracefile.reader import read_trace

PROGRAM = """
import sys
import minidl, workloads as wl

print(len(list(minidl.DataLoader(wl.Numbers(6), num_workers=1))), len(list(minidl.DataLoader(wl.Numbers(4)))))
"""


@pytest.mark.live
def test_the_environment_traces_a_program(tmp_path: Path) -> None:
    done = wl.run(PROGRAM, MINIDL_TRACE=str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (0, "6 4\n"), done.stderr
    assert done.stderr == f"minidl: recording to {tmp_path / 'run'}\n"
    trace = read_trace(tmp_path / "run")
    assert trace.problems == []
    assert sorted(trace.loaders) == [1, 2]
    assert len(trace.select("yield")) == 10


@pytest.mark.live
def test_an_environment_that_cannot_be_followed_is_said_and_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = wl.run(PROGRAM, MINIDL_TRACE=str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (0, "6 4\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("minidl: MINIDL_TRACE: no trace is recorded: ")
    assert "file" in line


RING = "MINIDL_TRACE_RING is 'full' or a whole number of MiB"
SETTINGS: list[tuple[dict[str, str], dict[str, Any] | str]] = [
    ({}, {"detail": "sample", "ring_bytes": recorder.RING_BYTES, "hang_after": 0.0}),
    ({"MINIDL_TRACE_RING": "full"}, {"ring_bytes": None}),
    ({"MINIDL_TRACE_RING": "1"}, {"ring_slots": 16384}),
    ({"MINIDL_TRACE_RING": "none"}, RING),
    ({"MINIDL_TRACE_RING": "0"}, RING),
    ({"MINIDL_TRACE_RING": "-3"}, RING),
    ({"MINIDL_TRACE_CPU": "on"}, {"cpu_time": True}),
    ({"MINIDL_TRACE_CPU": "off"}, {"cpu_time": False}),
    ({"MINIDL_TRACE_CPU": "perhaps"}, "MINIDL_TRACE_CPU is 'on' or 'off', not 'perhaps'"),
    ({"MINIDL_TRACE_DETAIL": "batch"}, {"detail": "batch"}),
    ({"MINIDL_TRACE_DETAIL": "everything"}, "detail is 'sample' or 'batch', not 'everything'"),
    ({"MINIDL_HANG_AFTER": "2.5"}, {"hang_after": 2.5}),
]


@pytest.mark.parametrize(("given", "found"), SETTINGS, ids=str)
def test_the_environments_settings(
    given: dict[str, str], found: dict[str, Any] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (given | {"MINIDL_TRACE": str(tmp_path / "trace")}).items():
        monkeypatch.setenv(name, value)
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            session._config_from_environment()
        assert not (tmp_path / "trace").exists()
    else:
        config = session._config_from_environment()
        assert {name: getattr(config, name) for name in found} == found


def test_each_run_and_each_rank_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_TRACE", str(tmp_path / "run"))
    made = [session._config_from_environment().directory for _ in range(3)]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    made.append(session._config_from_environment().directory)
    assert made == [str(tmp_path / name) for name in ("run", "run.2", "run.3", "run/rank-1")]


@pytest.mark.live
def test_a_trace_that_nobody_ends_is_ended_by_the_program_in_silence(tmp_path: Path) -> None:
    program = """
import contextlib, sys
import minidl, workloads as wl
contextlib.ExitStack().enter_context(minidl.trace(sys.argv[1]))  # collected, and with it ended, at once
stack = contextlib.ExitStack()
stack.enter_context(minidl.trace(sys.argv[1] + "-2"))
list(minidl.DataLoader(wl.Tensors(8), num_workers=1))
"""
    done = wl.run(program, tmp_path / "trace")
    assert (done.returncode, done.stderr) == (0, "")
    trace = read_trace(tmp_path / "trace-2")
    assert (len(trace.select("yield")), trace.problems) == (8, [])


def test_two_traces_at_once_are_refused(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "one"), pytest.raises(minidl.TraceError, match="end that trace first"):
        minidl.trace(tmp_path / "two").__enter__()
    with pytest.raises(minidl.TraceError, match="already holds a trace"):
        minidl.trace(tmp_path / "one").__enter__()
