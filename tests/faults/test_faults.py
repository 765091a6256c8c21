"""`minidl faults`: which cells it runs, what it prints, what it returns."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

import minidl.faults
from minidl import cli
from minidl.faults import select
from minidl.faults.cells import Cell, cells


class Judge:
    """Stands for a `Runner`: lets no cell pass whose fault is SIGKILL. meets: others that a cell waits for."""

    meets: threading.Barrier | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def run(self, cell: Cell, folder: Path) -> list[str]:
        assert folder.is_dir()
        if self.meets is not None:
            self.meets.wait(timeout=60)
        return ["it did not end within 60 s"] if cell.fault == "SIGKILL" else []


@pytest.fixture(autouse=True)
def judge(monkeypatch: pytest.MonkeyPatch) -> type[Judge]:
    monkeypatch.setattr(minidl.faults, "Runner", Judge)
    return Judge


def test_cells_are_chosen_by_words_and_patterns() -> None:
    assert select([], "upstream") == list(cells())
    some = select(["collate, SIG*fork,"], "upstream")
    assert {(cell.step, cell.method) for cell in some} == {("collate", "fork")}
    assert {cell.fault for cell in some} == {"SIGKILL", "SIGABRT", "SIGSTOP"}
    both = select(["collate, SIGABRT", "init, SIGSEGV"], "upstream")
    assert {cell.step for cell in both} == {"collate", "init"}


def test_the_list_says_what_follows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["faults", "--list", "collate, SIGKILL, fork"]) == cli.OK
    assert set(capsys.readouterr().out.splitlines()) == {
        f"{cell}: worker's death" for cell in cells() if str(cell).startswith("collate, SIGKILL, fork")
    }


def test_a_name_that_no_cell_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["faults", "no such step"]) == cli.USAGE
    assert capsys.readouterr().err == "minidl: faults: no cell's name holds 'no such step': --list prints the names\n"


def test_a_failure_is_printed_and_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert cli.main(["faults", "collate, SIG*fork,", "--jobs", "1", "--json", str(report)]) == cli.FOUND
    said = capsys.readouterr().out.splitlines()
    failed = [cell for cell in select(["collate, SIG*fork,"], "upstream") if cell.fault == "SIGKILL"]
    assert said[: len(failed)] == [f"{cell}: it did not end within 60 s (0.0 s)" for cell in failed]
    head, *lines = said[len(failed) : -2]
    assert head.split() == ["step", "fault", "what", "follows", "cells", "longest"]
    assert [line.split()[:2] for line in lines] == [["collate", name] for name in ("SIGKILL", "SIGABRT", "SIGSTOP")]
    assert [line.endswith(f"{len(failed)} failed") for line in lines] == [True, False, False]
    written: list[dict[str, Any]] = json.loads(report.read_text())
    assert [bool(row["wrong"]) for row in written] == [row["cell"]["fault"] == "SIGKILL" for row in written]
    assert cli.main(["faults", "collate, SIGABRT, fork"]) == cli.OK


def test_as_many_run_at_a_time_as_are_asked_for(monkeypatch: pytest.MonkeyPatch, judge: type[Judge]) -> None:
    chosen = select([], "upstream")[:4]
    monkeypatch.setattr(judge, "meets", threading.Barrier(2))
    assert [each.cell for each in minidl.faults.run_all(chosen, 2)] == chosen  # a broken barrier would raise
