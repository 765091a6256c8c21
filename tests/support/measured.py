"""Which tests coverage measures: those of the loader's core."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

NEW_PROCESSES = "COVERAGE_PROCESS_CONFIG"
"""The variable of the environment that lets coverage measure a new process."""


@contextlib.contextmanager
def measured_if_of_the_core(test: Path) -> Iterator[None]:
    """If coverage runs, pause it in the block, and in the processes that it starts, unless `test` mirrors the core.

    A file of tests mirrors `minidl/transport/queues.py` if it is `transport/test_queues.py`; the core's files stand in
    pyproject.toml. Measuring doubles the processor time of a test that starts programs. So a line of the core counts
    as covered only if a test of the core runs it.
    """
    coverage = sys.modules.get("coverage")
    running = coverage and coverage.Coverage.current()
    mirrored = Path("minidl", test.parent, test.name.removeprefix("test_"))
    core = running and running.get_option("run:include")
    if not core or any(mirrored.match(pattern) for pattern in core):
        yield
        return
    running.stop()
    new = os.environ.pop(NEW_PROCESSES, None)
    try:
        yield
    finally:
        running.start()
        if new is not None:
            os.environ[NEW_PROCESSES] = new
