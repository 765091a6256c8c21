"""The check around every test sees what it is there to see."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from holdings import FD_ALLOWANCE, SEMAPHORES, SHM, Holdings


def test_nothing_is_held_beyond_what_was_held() -> None:
    assert Holdings.now().beyond(Holdings.now()) == {}


@pytest.mark.live
def test_a_child_is_seen_until_it_is_waited_for() -> None:
    before = Holdings.now()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert list(Holdings.now().beyond(before)["child processes"]) == [child.pid]  # type: ignore[call-overload]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert "child processes" in Holdings.now().beyond(before)
    assert "child processes" not in Holdings.now().beyond(before)


def test_a_thread_is_seen() -> None:
    before, end = Holdings.now(), threading.Event()
    thread = threading.Thread(target=end.wait, name="left over", daemon=True)
    thread.start()
    assert Holdings.now().beyond(before) == {"threads": ["left over"]}
    end.set()
    thread.join()


def test_a_segment_is_seen() -> None:
    before = Holdings.now()
    segment = SHM / f"torch_{os.getpid()}_left_over"
    segment.write_bytes(b"")
    try:
        assert Holdings.now().beyond(before) == {"shared-memory files": [segment.name]}
    finally:
        segment.unlink()


@pytest.mark.live
def test_a_semaphore_of_ours_is_seen_and_another_programs_is_not() -> None:
    before = Holdings.now()
    semaphore = multiprocessing.get_context("spawn").Lock()
    (name,) = Holdings.now().segments - before.segments
    assert name.startswith(f"sem.{SEMAPHORES}-")
    other = SHM / "sem.mp-of_another"
    other.write_bytes(b"")
    try:
        assert other.name not in Holdings.now().segments
    finally:
        other.unlink()
        del semaphore


def test_descriptors_are_seen_beyond_the_allowance(tmp_path: Path) -> None:
    before = Holdings.now()
    with ExitStack() as stack:
        for number in range(FD_ALLOWANCE):
            stack.enter_context((tmp_path / str(number)).open("w"))
        assert Holdings.now().beyond(before) == {}
        stack.enter_context((tmp_path / "one more").open("w"))
        assert Holdings.now().beyond(before) == {"open descriptors": 1}
