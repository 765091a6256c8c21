"""The floor of the core's coverage, and that each line left out of it has a reason."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
script = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("core_coverage.py"))))


def report(missing: list[int], covered: int, branches: int = 100) -> dict[str, Any]:
    return {
        "files": {"minidl/a.py": {"missing_lines": missing}, "minidl/b.py": {"missing_lines": []}},
        "totals": {"covered_branches": covered, "num_branches": branches},
    }


def test_the_cores_own_tests_are_marked(pytestconfig: pytest.Config) -> None:
    (conftest,) = [p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "of_the_core")]
    for test in ("loader/test_worker.py", "wire/test_queues.py"):
        assert conftest.of_the_core(Path(test))
    for test in ("test_run.py", "tracefile/test_worker.py"):
        assert not conftest.of_the_core(Path(test))


def test_a_line_that_no_test_runs_is_named() -> None:
    (fault,) = script.shortfalls(report([3, 17], 100), [])
    assert fault.startswith("minidl/a.py: no test runs lines 3, 17: ")


def test_a_file_that_no_test_imports_is_named() -> None:
    (fault,) = script.shortfalls(report([], 100), ["minidl/a.py", "minidl/c.py", "minidl/wire/*"])
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
