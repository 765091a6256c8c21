"""The floor of the core's coverage, and that each line left out of it has a reason."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
script = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("core_coverage.py"))))


def test_the_cores_own_tests_are_marked(pytestconfig: pytest.Config) -> None:
    (conftest,) = [p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "of_the_core")]
    for test in ("loader/test_worker.py", "wire/test_queues.py"):
        assert conftest.of_the_core(Path(test))
    for test in ("test_run.py", "tracefile/test_worker.py"):
        assert not conftest.of_the_core(Path(test))


def test_each_line_left_out_has_its_reason() -> None:
    found = {path: script.without_reason(path.read_text()) for path in (ROOT / "minidl").rglob("*.py")}
    faults = {str(path.relative_to(ROOT)): lines for path, lines in found.items() if lines}
    assert not faults, f"write the reason behind the pragma (# pragma: no cover: REASON): {faults}"
