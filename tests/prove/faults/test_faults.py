"""`minidl faults`: which cells it runs, what it prints, what it returns."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

import minidl.prove.faults
from minidl import cli
from minidl.prove.faults import select
from minidl.prove.faults.cells import Cell, cells
from minidl.prove.kept import Kept


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
    monkeypatch.setattr(minidl.prove.faults, "Runner", Judge)
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
    chosen = select(["collate, SIG*fork,"], "upstream")
    failed = [cell for cell in chosen if cell.fault == "SIGKILL"]
    *came, head = said[: len(chosen) + 1]
    assert [re.sub(r"[0-9.]+ s", "T", line) for line in came] == [
        f"{number} of {len(chosen)}, T  {cell}: {'it did not end within T' if cell in failed else 'ok'} (T)"
        for number, cell in enumerate(chosen, 1)
    ]
    lines = said[len(chosen) + 1 : -2]
    assert head.split() == ["step", "fault", "what", "follows", "cells", "longest"]
    assert [line.split()[:2] for line in lines] == [["collate", name] for name in ("SIGKILL", "SIGABRT", "SIGSTOP")]
    assert [line.endswith(f"{len(failed)} failed") for line in lines] == [True, False, False]
    written: list[dict[str, Any]] = json.loads(report.read_text())
    assert [bool(row["wrong"]) for row in written] == [row["cell"]["fault"] == "SIGKILL" for row in written]
    assert cli.main(["faults", "collate, SIGABRT, fork"]) == cli.OK


def test_as_many_run_at_a_time_as_are_asked_for(monkeypatch: pytest.MonkeyPatch, judge: type[Judge]) -> None:
    chosen = select([], "upstream")[:4]
    monkeypatch.setattr(judge, "meets", threading.Barrier(2))
    with minidl.prove.faults.running(chosen, 2) as results:
        assert {each.cell for each in results} == set(chosen)  # a broken barrier would raise


def test_results_are_kept_and_the_rest_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: type[Judge], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the middle: what was found so far is printed, and the same command goes on behind it."""
    chosen, ran = select(["collate, SIG*fork,"], "upstream"), list[Cell]()
    command = ["faults", "collate, SIG*fork,", "--jobs", "1", "--keep", str(tmp_path / "kept")]
    told = minidl.prove.faults.Kept.add

    def interrupted(self: Kept, **result: Any) -> None:
        told(self, **result)
        if len(self.path.read_bytes().splitlines()) == 3:  # type: ignore[union-attr]
            raise KeyboardInterrupt

    monkeypatch.setattr(minidl.prove.faults.Kept, "add", interrupted)
    assert cli.main(command) == cli.INTERRUPTED
    said = capsys.readouterr().out.splitlines()
    left = len(chosen) - 2  # the third was kept, and not printed
    assert f"stopped before {left} of {len(chosen)} cells: the same command goes on" in said
    assert said[-2].startswith("2 cells, ")
    monkeypatch.setattr(minidl.prove.faults.Kept, "add", told)
    monkeypatch.setattr(judge, "run", lambda self, cell, folder: ran.append(cell) or [])
    cli.main(command)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"3 of {len(chosen)} cells are in {tmp_path / 'kept'}"
    assert said[-2].startswith(f"{len(chosen)} cells, ")
    assert set(ran) == set(chosen[3:])


def test_a_file_of_other_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    Kept(kept).add(case="sample_stuck")
    assert cli.main(["faults", "collate, SIGABRT, fork", "--keep", str(kept)]) == cli.USAGE
    assert (
        capsys.readouterr().err == f"minidl: faults: {kept}: no results of cells: KeyError('cell'); name another file\n"
    )
