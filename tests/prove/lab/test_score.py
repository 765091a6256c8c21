"""What the score makes of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minidl.prove.lab import score as lab_score
from minidl.prove.lab.case import LabOptions, Truth
from minidl.prove.lab.runner import Mode
from minidl.prove.lab.score import Answer, report

TRUTH = Truth("worker", 1, 13, ("sample",), ("fifo",))
RIGHT = {
    "state": "hung", "cause": "fifo", "sure": "certain",
    "who": {"role": "worker", "worker": 1}, "where": {"step": "sample", "sample": 13},
}  # fmt: skip


def answer(truth: Truth | None, **found: Any) -> Answer:
    return Answer("a_case", 0, "torch", "live", LabOptions(), truth, RIGHT | found)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ({}, "right"),
        ({"state": "may hang"}, "right"),
        ({"where": {"step": "unseen", "sample": 13}}, "right"),
        ({"where": {"step": "unseen", "sample": -1}}, "wrong"),
        ({"where": {"step": "sample", "sample": 14}}, "wrong"),
        ({"cause": "socket"}, "confident wrong"),
        ({"who": {"role": "loop", "worker": -1}}, "confident wrong"),
        ({"cause": "unknown", "sure": "unknown"}, "open"),
        ({"state": "moves", "cause": "none"}, "open"),
        ({"failed": "no answer"}, "failed"),
    ],
)
def test_an_answer_about_a_fault(found: dict[str, Any], verdict: str) -> None:
    assert answer(TRUTH, **found).verdict == verdict


@pytest.mark.parametrize(("state", "verdict"), [("hung", "false alarm"), ("may hang", "right"), ("moves", "right")])
def test_an_answer_about_a_healthy_program(state: str, verdict: str) -> None:
    assert answer(None, state=state).verdict == verdict


def test_a_score_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def fake(name: str, seed: int, mode: Mode) -> list[Answer]:
        asked.append((name, seed))
        return [Answer(name, seed, mode.value, "live", LabOptions(), TRUTH, RIGHT)]

    monkeypatch.setattr(lab_score, "asked", fake)
    kept, names = tmp_path / "kept", ["sample_stuck", "sample_raises"]
    first = lab_score.score(names, 1, 1, lambda line: None, [Mode.OURS], kept)
    kept.write_bytes(kept.read_bytes() + b'{"case": "cut')
    second = lab_score.score(names, 2, 1, lambda line: None, [Mode.OURS], kept)
    again = lab_score.score(names, 2, 1, lambda line: None, [Mode.OURS], kept)
    assert again == second
    assert sorted(asked) == sorted((name, seed) for name in names for seed in (0, 1))
    assert second[:2] == first
    assert len(second) == 4


def test_the_report_counts() -> None:
    lines = list(report([answer(TRUTH), answer(TRUTH, cause="socket"), answer(None), answer(None, state="moves")]))
    assert "  fifo                         1 as expected, 1 socket" in lines
    assert "all: 1 of 2 faults named (50.0%); 1 false alarms on 2 healthy runs" in lines
    assert "confident wrong: 1" in lines
