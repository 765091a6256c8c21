"""The floor of the core's coverage, and that each line left out of it has a reason."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from measured import NEW_PROCESSES, measured_if_of_the_core

ROOT = Path(__file__).parent.parent
script = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("core_coverage.py"))))


def report(missing: list[int], covered: int, branches: int = 100) -> dict[str, Any]:
    return {
        "files": {"minidl/a.py": {"missing_lines": missing}, "minidl/b.py": {"missing_lines": []}},
        "totals": {"covered_branches": covered, "num_branches": branches},
    }


@pytest.mark.parametrize(
    ("test", "measured"),
    [
        ("test_worker.py", True), ("transport/test_queues.py", True), ("test_run.py", False),
        ("tracefile/test_worker.py", False),
    ],
)  # fmt: skip
def test_only_what_mirrors_the_core_is_measured(test: str, measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    running = SimpleNamespace(
        get_option={"run:include": ["minidl/worker.py", "minidl/transport/*"]}.get,
        stop=lambda: done.append(f"stop {os.environ[NEW_PROCESSES]}"),
        start=lambda: done.append(f"start {NEW_PROCESSES in os.environ}"),
    )
    coverage = SimpleNamespace(Coverage=SimpleNamespace(current=lambda: running))
    monkeypatch.setitem(sys.modules, "coverage", coverage)  # type: ignore[arg-type]
    monkeypatch.setenv(NEW_PROCESSES, "config")
    with measured_if_of_the_core(Path(test)):
        assert (os.environ.get(NEW_PROCESSES) == "config") is measured
    assert os.environ[NEW_PROCESSES] == "config"
    assert done == ([] if measured else ["stop config", "start False"])


def test_a_line_that_no_test_runs_is_named() -> None:
    (fault,) = script.shortfalls(report([3, 17], 100), [])
    assert fault.startswith("minidl/a.py: no test runs lines 3, 17: ")


def test_a_file_that_no_test_imports_is_named() -> None:
    (fault,) = script.shortfalls(report([], 100), ["minidl/a.py", "minidl/c.py", "minidl/transport/*"])
    assert fault.startswith("minidl/c.py: not measured")


def test_branches_have_a_floor() -> None:
    assert list(script.shortfalls(report([], 98), [])) == []
    assert list(script.shortfalls(report([], 97), [])) == ["97.0% of 100 branches are covered; the floor is 98%"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("x = 1  # pragma: no cover", True),
        ("x = 1  # pragma: no cover:", True),
        ("x = 1  # pragma: no cover: torch 2.11 only", False),
        ("if x:  # pragma: no branch", True),
        ("if x:  # pragma: no branch: always true on Linux", False),
        ("x = 1  # a comment", False),
    ],
)
def test_a_pragma_needs_a_reason(line: str, fault: bool) -> None:
    assert script.without_reason(line) == ([1] if fault else [])


def test_each_line_left_out_has_its_reason() -> None:
    found = {path: script.without_reason(path.read_text()) for path in (ROOT / "minidl").rglob("*.py")}
    faults = {str(path.relative_to(ROOT)): lines for path, lines in found.items() if lines}
    assert not faults, f"write the reason behind the pragma (# pragma: no cover: REASON): {faults}"
