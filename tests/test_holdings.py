"""The two checks around every test see what they are there to see: what a test leaves, and a process that it starts."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from holdings import FD_ALLOWANCE, SHM, Holdings
from live import ProcessStartedError, no_process


def nothing() -> None: ...


@pytest.mark.live
def test_what_is_left_is_seen_by_its_kind(tmp_path: Path) -> None:
    before, end, segment = Holdings.now(), threading.Event(), SHM / f"torch_{os.getpid()}_left_over"
    others = SHM / "sem.mp-of_another"
    assert before.beyond(Holdings.now()) == {}
    threading.Thread(target=end.wait, name="left over", daemon=True).start()
    with ExitStack() as stack:
        for number in range(FD_ALLOWANCE + 1):
            stack.enter_context((tmp_path / str(number)).open("w"))
        child = stack.enter_context(subprocess.Popen([sys.executable, "-c", ""]))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        for file in (segment, others):
            stack.callback(file.unlink)
            file.write_bytes(b"")
        lock = multiprocessing.get_context("spawn").Lock()
        seen = Holdings.now().beyond(before)
        semaphore, *segments = seen["shared-memory files"]
        del lock
    assert seen.keys() == {"child processes", "threads", "shared-memory files", "open descriptors"}
    assert (list(seen["child processes"]), seen["threads"]) == ([child.pid], ["left over"])
    assert (semaphore.startswith("sem.mp"), segments, seen["open descriptors"] >= 1) == (True, [segment.name], True)
    end.set()


@pytest.mark.live
@pytest.mark.parametrize("start", [
    lambda: subprocess.run([sys.executable, "-c", ""], check=False),
    *(multiprocessing.get_context(method).Process(target=nothing).start for method in ("fork", "spawn", "forkserver")),
], ids=["subprocess", "fork", "spawn", "forkserver"])  # fmt: skip
def test_a_process_is_refused_to_a_test_that_is_not_live(start: Callable[[], object]) -> None:
    """Also one of a fork server that runs."""
    first = multiprocessing.get_context("forkserver").Process(target=nothing)
    first.start()
    first.join()
    with no_process("a test") as called, pytest.raises(ProcessStartedError, match=r"starts a process .* mark it"):
        start()
    assert len(called) == 1


def test_a_thread_that_python_did_not_start_counts_while_it_runs() -> None:
    before, ended, known = Holdings.now(), _thread.allocate_lock(), threading.Event()
    ended.acquire()

    def asked() -> None:
        threading.current_thread()
        known.set()
        ended.acquire()

    _thread.start_new_thread(asked, ())
    assert known.wait(60)
    (name,) = Holdings.now().beyond(before)["threads"]  # type: ignore[misc]
    assert name.startswith("Dummy")
    ended.release()
    until = time.monotonic() + 60
    while Holdings.now().beyond(before) and time.monotonic() < until:
        time.sleep(0.01)
    assert Holdings.now().beyond(before) == {}
