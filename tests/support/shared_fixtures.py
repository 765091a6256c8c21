"""Fixtures that test files share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_trace
import pytest
import workloads
from browser import Browser, driven

from minidl.device import sim
from minidl.tracefile.reader import Trace


@pytest.fixture
def no_sigchld() -> Iterator[None]:
    """Deaths are found by looking."""
    with workloads.no_sigchld():
        yield


@pytest.fixture(scope="session")
def rank_traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scenes of `rank_runs`; a process of xdist that comes later gets what another one has recorded."""
    import rank_runs

    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    with (place / "ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "ranks").exists():
            rank_runs.record(place / "being recorded")
            (place / "being recorded").rename(place / "ranks")
    return place / "ranks"


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The simulated accelerator is torch's; no work of the test is left on it."""
    monkeypatch.setenv(sim.VARIABLE, "1")
    sim.load()
    yield
    sim.repair()


@pytest.fixture
def install_handler() -> Iterator[Callable[[int, Any], None]]:
    """A function that installs a signal's handler until the test has ended."""
    with contextlib.ExitStack() as afterwards:

        def install(number: int, handler: Any) -> None:
            afterwards.callback(signal.signal, number, signal.signal(number, handler))

        yield install


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The trace of an imagined run that ends; no test changes it."""
    return made_trace.made(tmp_path_factory.mktemp("healthy"), **made_trace.HEALTHY)


@pytest.fixture(scope="session")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The trace of an imagined run that hangs in sample 38; no test changes it."""
    return made_trace.made(tmp_path_factory.mktemp("hung"), **made_trace.HUNG)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A headless Chromium."""
    with driven(tmp_path / "profile") as started:
        yield started
