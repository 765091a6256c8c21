"""A test that is not marked `live` can't start a process."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import pytest
from live import ProcessStartedError, no_process


def nothing() -> None: ...


def test_a_subprocess_is_refused() -> None:
    with no_process("a test") as called:
        with pytest.raises(ProcessStartedError, match=r"a test starts a process .* mark it with pytest.mark.live"):
            subprocess.run([sys.executable, "-c", ""], check=False)
        assert len(called) == 1


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_process_is_refused(method: str) -> None:
    process = multiprocessing.get_context(method).Process(target=nothing)
    with no_process("a test") as called:
        with pytest.raises(ProcessStartedError, match="a test starts a process"):
            process.start()
        assert len(called) == 1


@pytest.mark.live
def test_a_running_fork_server_is_refused_too() -> None:
    context = multiprocessing.get_context("forkserver")
    first = context.Process(target=nothing)
    first.start()
    first.join()
    with no_process("a test"), pytest.raises(ProcessStartedError, match=r"Popen\._launch"):
        context.Process(target=nothing).start()
