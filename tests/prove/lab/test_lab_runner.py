"""Cases run as programs, and nothing of them is left."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os

import pytest
from sizes import slow

from minidl.prove import sessions
from minidl.prove.lab.runner import Mode, running
from minidl.prove.lab.table import cases
from minidl.prove.sessions import SHM, living


@pytest.mark.live
@pytest.mark.parametrize("name", ["lock_of_the_main_process", "worker_stopped"])
def test_a_hanging_case_starts_and_is_cleaned_up(name: str) -> None:
    with running(name, cases()[name].draw(0), Mode.PLAIN) as run:
        assert run.wait_for_words("ready")
        assert run.process.poll() is None
        assert run.process.pid in living(run.process.pid)
    assert run.process.returncode is not None
    assert living(run.process.pid) == []
    assert not run.folder.exists()
    assert not list(SHM.glob(f"torch_{run.process.pid}_*"))


@pytest.mark.live
@pytest.mark.parametrize("name", ["sample_raises", *slow("torn_message")])
def test_a_fixed_case_ends_well(name: str) -> None:
    options = dataclasses.replace(cases()[name].draw(0), fixed=True)
    with running(name, options, Mode.PLAIN) as run:
        assert run.wait_for_end()
        assert run.process.returncode == 0, run.errors()
        assert run.said().endswith("the end\n")


@pytest.mark.live
def test_a_failing_case_ends_with_its_error() -> None:
    with running("sample_raises", cases()["sample_raises"].draw(0), Mode.PLAIN) as run:
        assert run.wait(sessions.BOUND)
        assert run.process.returncode == 1
        assert "KeyError: 'cow'" in run.errors()


def test_named_semaphores_of_a_process_are_found() -> None:
    """A spawned worker's keep their names until the process that made them ends well: kill -9 leaves them behind."""
    lock = multiprocessing.get_context("spawn").Lock()
    assert sessions._semaphores(os.getpid()) >= {SHM / f"sem.{lock._semlock.name.lstrip('/')}"}  # type: ignore[attr-defined]


def test_a_sessions_processes_come_in_the_order_of_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids wrap around: a worker's may be smaller than its loader's, which would see it die if it were killed first."""

    def fields(session: int, start: int, state: str = "S") -> list[str]:
        return [state, "1", "0", str(session), *["0"] * 15, str(start)]

    there = [(3, fields(900, 50)), (7, fields(900, 60, "Z")), (9, fields(8, 40)), (900, fields(900, 20))]
    monkeypatch.setattr(sessions, "every_process", lambda: there)
    assert sessions.living(900) == [900, 3]
