"""The audit of runs that a launcher has started: each planted mistake is found, and nothing else is called one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import client_runs
import pytest
from client_runs import Client

from minidl.analysis.audit import MISTAKE, audit
from minidl.tracefile.ranks import lacking
from minidl.tracefile.reader import read_trace

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]


def launched(name: str, how: str, *launcher: str, module: str = "torch", modes: tuple[str, ...] = ("run",)) -> Client:
    return Client(name, module, module, "planted.py", (how,), ranks=2, launcher=launcher, modes=modes)


LAUNCHERS = (
    launched("torchrun", "env", "torchrun", *client_runs.TORCHRUN, modes=("run", "observe")),
    launched("spawn", "spawn"),
    launched("fork", "fork"),
    launched("accelerate launch", "env", *client_runs.ACCELERATE, module="accelerate"),
    launched("Fabric", "ddp", module="lightning"),
)


@pytest.fixture(scope="module")
def planted() -> Any:
    """The program, as a module: what is planted in which loader."""
    sys.path.insert(0, str(client_runs.PROGRAMS))
    try:
        spec = importlib.util.spec_from_file_location("planted", client_runs.PROGRAMS / "planted.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(client_runs.PROGRAMS))


@pytest.mark.parametrize(
    ("launcher", "mode"), [pytest.param(each, mode, id=f"{each}-{mode}") for each in LAUNCHERS for mode in each.modes]
)
def test_what_was_planted_is_found_and_nothing_else(
    planted: Any, launcher: Client, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client_runs.require(launcher)
    monkeypatch.setenv("MEETING", str(tmp_path / "meeting"))
    done = client_runs.run(launcher, mode, tmp_path)
    assert done.code == 0, done.output[-3000:]
    assert done.trace is not None
    trace = read_trace(done.trace)
    assert lacking(trace.manifest, trace.lines) == []
    report = audit([trace])
    assert (report.ranks, report.world) == ([0, 1], 2)
    found = {
        subject.name.removeprefix("DataLoader of "): sorted(f.rule for f in subject.findings if f.level == MISTAKE)
        for subject in report.subjects
    }
    assert found == {kind.__name__: sorted(kind.mistakes) for kind in planted.ALL}
