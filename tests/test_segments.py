"""Segments that killed processes leave: whose are removed, and whose stay."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from minidl.process_stat import remove_segments_of


@pytest.mark.live
def test_segments_go_of_processes_that_have_ended_and_stay_of_one_that_has_the_same_id_again() -> None:
    gone, zombie = (subprocess.Popen(["true"]) for _ in range(2))
    gone.wait()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    ended = [gone.pid, zombie.pid]
    left = {pid: Path(f"/dev/shm/torch_{pid}_17_0") for pid in (*ended, os.getpid(), os.getppid())}
    try:
        for segment in left.values():
            segment.touch()
        remove_segments_of({*ended, os.getpid()})
        assert [pid for pid, segment in left.items() if segment.exists()] == [os.getpid(), os.getppid()]
    finally:
        for segment in left.values():
            segment.unlink(missing_ok=True)
        zombie.wait()
