"""Our loader without a guard, shown beside the explorer's counterexample. All programs: test_ablations."""

from __future__ import annotations

from pathlib import Path

import pytest

from minidl.explore.guards import GUARDS
from minidl.lab.ablation import listed, show


def test_every_guard_is_listed() -> None:
    lines = list(listed())
    assert [line.split()[0] for line in lines[::2]] == list(GUARDS)


@pytest.mark.live
def test_a_run_without_its_guard_is_shown_beside_the_counterexample(tmp_path: Path) -> None:
    text = "\n".join(show("done-event", tmp_path / "trace"))
    assert "closes, with the guard: well" in text
    assert "without it: bad: exit codes [1, 1]" in text
    assert "ended with exit code 1" in text
    assert "worker 0: event SENTINEL is impossible in state WAITING" in text
