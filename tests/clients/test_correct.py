"""The audit of programs that share their data rightly, in the ways of the field: it calls none of them wrong."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import client_runs
import pytest
from client_runs import Client

from minidl.check import check
from minidl.speed.audit import audit
from minidl.speed.findings import MISTAKE, QUESTION
from minidl.tracefile.ranks import lacking
from minidl.tracefile.reader import read_trace

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

TORCHRUN = ("torchrun", *client_runs.TORCHRUN)
LAUNCHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("torch", TORCHRUN),
    "others": ("torchdata", TORCHRUN),
    "accelerate": ("accelerate", client_runs.ACCELERATE),
    "trainer": ("transformers", TORCHRUN),
    "lightning": ("lightning", ()),
}


@pytest.mark.parametrize(
    ("group", "mode"),
    [
        pytest.param(
            group, mode, id=f"{group}-{mode}", marks=[] if (group, mode) == ("plain", "run") else pytest.mark.slow
        )
        for group in LAUNCHERS
        for mode in ("run", "observe")
    ],
)
def test_no_mistake_is_found_and_what_can_not_be_known_is_asked(group: str, mode: str, tmp_path: Path) -> None:
    module, launcher = LAUNCHERS[group]
    client = Client(group, module, module, "correct.py", (group,), ranks=2, launcher=launcher)
    client_runs.require(client)
    done = client_runs.run(client, mode, tmp_path)
    assert done.code == 0, done.output[-3000:]
    assert done.trace is not None
    trace = read_trace(done.trace)
    assert (check(trace), lacking(trace.manifest, trace.lines)) == ([], [])
    report = audit([trace])
    assert (report.ranks, report.world) == ([0, 1], 2)
    found: dict[str, dict[str, set[str]]] = {level: defaultdict(set) for level in (MISTAKE, QUESTION)}
    for subject in report.subjects:
        name = subject.name.removeprefix("DataLoader of ").partition(" ")[0]
        for finding in subject.findings:
            if finding.level in found:
                found[finding.level][name].add(finding.rule)
    assert dict(found[MISTAKE]) == {}
    programs = client_runs.module_of("correct.py").GROUPS[group]
    assert dict(found[QUESTION]) == {name: each.questions for name, each in programs.items() if each.questions}
