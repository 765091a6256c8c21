"""The audit of runs that a launcher has started: each planted mistake is found, and nothing else is called one."""

from __future__ import annotations

from pathlib import Path

import client_runs
import pytest
from client_runs import Client

from minidl.speed.audit import audit
from minidl.speed.findings import MISTAKE
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
USUAL = ("fork", "accelerate launch")


@pytest.mark.parametrize(
    ("launcher", "mode"),
    [
        pytest.param(each, mode, id=f"{each}-{mode}", marks=[] if each.name in USUAL else pytest.mark.slow)
        for each in LAUNCHERS
        for mode in each.modes
    ],
)
def test_what_was_planted_is_found_and_nothing_else(
    launcher: Client, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert found == {kind.__name__: sorted(kind.mistakes) for kind in client_runs.module_of("planted.py").ALL}
