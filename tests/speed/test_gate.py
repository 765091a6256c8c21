"""The gate of `minidl diff --fail-if`, on imagined runs and through the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_trace import made

from minidl import cli
from minidl.speed.diff import diff
from minidl.speed.gate import Limit, judged, limit

MS = 1_000_000


def steady(ms: float) -> Callable[[int], int]:
    return lambda task: int(ms * MS)


def noisy(scale: float) -> Callable[[int], int]:
    """Tasks of which each sixth six are ten times as long."""
    return lambda task: int(scale * MS * (1 + 9 * (task // 6 % 2)))


def run(ms: float = 4, **more: Any) -> dict[str, Any]:
    return {"batches": 60, "cost": steady(ms)} | more


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("a", "b", "asked", "exceeded", "reason"),
    [
        (run(), run(5), "slower:5%", True, "(+24.8%, interval +"),
        (run(), run(5), "slower:50%", False, "within the limit"),
        (run(5), run(), "slower:0%", False, "within the limit"),
        (run(cost=noisy(1)), run(cost=noisy(1.3)), "slower:5%", False, "not certain"),
        (run(step=6 * MS), run(step=MS), "waiting:10%", True, "more than 10%"),
        (run(), run(), "waiting:1%", False, "within the limit"),
        (run(), run(12), "first-batch:50%", True, "more than 50%"),
        (run(), run(12, step=20 * MS, workers=4), "memory:20%", True, " MiB instead of "),
        (run(), run(), "memory:0%", False, "within the limit"),
        (run(batches=3), run(batches=3), "slower:5%", None, "this cannot be judged; record longer runs"),
    ],
)
def test_a_limit_is_exceeded_only_beyond_the_noise(
    tmp_path: Path, a: dict[str, Any], b: dict[str, Any], asked: str, exceeded: bool | None, reason: str
) -> None:
    traces = [made(tmp_path / "a", **a), made(tmp_path / "b", **b)]
    (found,) = judged(diff(*traces), traces, [limit(asked)])
    assert found.exceeded is exceeded
    assert reason in found.reason


@pytest.mark.parametrize("text", ["slower", "slower:x%", "faster:5%", "slower:-1%", "slower:nan%"])
def test_what_is_no_limit(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["diff", "a", "b", "--fail-if", text])
    assert f"{text!r} is no limit: give one of slower, waiting, first-batch, memory" in capsys.readouterr().err


def test_the_command_ends_with_1_and_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "a", **run())
    made(tmp_path / "b", **run(6))
    made(tmp_path / "few", batches=2)
    argv = ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-if"]
    assert limit("slower:5%") == Limit("slower", 0.05)
    assert cli.main([*argv, "slower:5%", "--fail-if", "memory:20%"]) == cli.FOUND
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("slower:5%: the time of a sample, ")
    assert second.startswith("memory:20%: the peak of bytes in flight, ")
    assert cli.main([*argv, "slower:99%", "--json"]) == cli.OK
    (one,) = json.loads(capsys.readouterr().out)["limits"]
    assert one["low"] < one["change"] < one["high"]
    assert one["exceeded"] is False
    assert cli.main(["diff", str(tmp_path / "few"), str(tmp_path / "few"), "--fail-if", "slower:5%"]) == cli.USAGE
    assert "this cannot be judged" in capsys.readouterr().err
