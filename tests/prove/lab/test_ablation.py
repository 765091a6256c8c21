"""Our loader without a guard, shown beside the explorer's counterexample. All programs: test_ablations."""

from __future__ import annotations

from pathlib import Path

import pytest

from minidl import cli
from minidl.explore.guards import GUARDS
from minidl.prove.lab import ablation
from minidl.prove.lab.ablation import listed, show


def test_every_guard_is_listed() -> None:
    lines = list(listed())
    assert [line.split()[0] for line in lines[::2]] == list(GUARDS)


@pytest.mark.live
def test_a_run_without_its_guard_is_shown_beside_the_counterexample(tmp_path: Path) -> None:
    lines: list[str] = []
    assert show("done-event", tmp_path / "trace", lines.append)
    text = "\n".join(lines)
    assert "closes, with the guard: well" in text
    assert "without it: bad: exit codes [1, 1]" in text
    assert "ended with exit code 1" in text
    assert "worker 0: event SENTINEL is impossible in state WAITING" in text


@pytest.mark.parametrize(
    ("kept", "lost", "code", "said"),
    [
        ("well", "hangs", 0, "expected: hangs"),
        ("well", "well", 1, "without the guard, closes_while_a_worker_is_stuck did not end as expected"),
        ("hangs", "hangs", 1, "did not end well even with the guard"),
    ],
)
def test_a_run_that_does_not_show_its_guard_says_so_and_returns_1(
    kept: str, lost: str, code: int, said: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ablation, "outcome", lambda *run: ablation.ProgramEnd(lost if run[1:] else kept, 0.1))
    monkeypatch.setattr(ablation, "_recorded", lambda trace: iter(()))
    assert cli.main(["lab", "--without", "bounded-joins"]) == code
    assert said in capsys.readouterr().out
