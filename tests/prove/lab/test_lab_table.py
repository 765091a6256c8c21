"""The lab's table: each row is complete, and its words are the doctor's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from minidl.hang.finding import HangCause
from minidl.hang.places import LoaderStep
from minidl.prove.lab.case import LabCase, LabOptions
from minidl.prove.lab.cases import sample_stuck
from minidl.prove.lab.runner import program_of
from minidl.prove.lab.table import THEMES, cases

FOLDER = Path(sample_stuck.__file__).parent
STEPS = {step.name.lower() for step in LoaderStep} | {"signal-handler"}
FAULTS = {name: case for name, case in cases().items() if case.truth is not None}


def test_there_are_enough_cases() -> None:
    assert len(FAULTS) >= 30
    assert len(cases()) - len(FAULTS) >= 8
    assert {case.theme for case in cases().values()} == set(THEMES)


@pytest.mark.parametrize("name", cases())
def test_a_row_is_complete(name: str) -> None:
    case = cases()[name]
    assert case.title
    assert case.users_see
    assert case.fix
    assert case.thread.startswith("https://github.com/") or not case.thread
    for seed in range(20):
        options = case.draw(seed)
        assert options.workers >= 1
        assert options == case.draw(seed)
        for truth in (case.expected(options, "torch"), case.expected(options, "ours")):
            if truth is not None:
                assert set(truth.causes) <= {cause.value for cause in HangCause}
                assert set(truth.steps) <= STEPS
                assert truth.worker < options.workers


@pytest.mark.parametrize("name", cases())
def test_the_program_says_nothing_of_its_case(name: str) -> None:
    program = program_of(name)
    whole = (FOLDER / f"{name}.py").read_text()
    assert "CASE" not in program
    assert name not in program
    assert ast.get_docstring(ast.parse(program)) is None
    lines = whole.rstrip("\n").split("\n")
    row_end = lines.index(")") + 1
    assert program.split("\n")[row_end : len(lines)] == lines[row_end:], "the lines of a stack would lie elsewhere"
    assert program.endswith("    launch(main)\n")


def test_options_arrive_as_they_were_given() -> None:
    options = LabOptions(workers=3, method="spawn", fixed=True)
    given = dict(text.removeprefix("--").split("=") for text in options.arguments() if "=" in text)
    assert given == {"workers": "3", "batch-size": "4", "at": "13", "pause": "0.01", "method": "spawn"}
    assert "--fixed" in options.arguments()


def test_a_truth_names_the_worker_that_gets_the_sample() -> None:
    options = LabOptions(workers=3, batch_size=4, at=21)
    assert options.worker == 2
    assert LabCase("", "", "", "", None).expected(options, "torch") is None
