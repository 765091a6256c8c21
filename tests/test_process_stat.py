"""What /proc/PID/stat says, whatever a process is called and however it ends; and what it leaves in shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from minidl import process_stat
from minidl.process_stat import HeldProcess, every_process, is_alive, kill_if, remove_segments_of, stat_fields, stat_of


def test_a_name_may_hold_blanks_and_brackets() -> None:
    assert stat_of("12 (a) b) S 1 2") == ("a) b", ["S", "1", "2"])


def test_a_process_counts_whatever_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel cuts a name after 15 bytes, also within a character."""
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/stat").write_bytes(b"7 (\xc3) S 1 5 5 0")
    monkeypatch.setattr(os, "listdir", lambda folder: ["7", "8", "self"])  # 8 has ended meanwhile
    opened = lambda path, *_, **__: (tmp_path / path.lstrip("/")).open("rb")  # noqa: E731
    monkeypatch.setattr(process_stat, "open", opened, raising=False)
    assert list(every_process()) == [(7, ["S", "1", "5", "5", "0"])]


@pytest.mark.live
def test_a_zombie_has_ended() -> None:
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert stat_fields(zombie.pid)[0] == "Z"
    assert (is_alive(os.getpid()), is_alive(zombie.pid)) == (True, False)
    zombie.wait()
    assert not is_alive(zombie.pid)
    with pytest.raises(OSError, match=str(zombie.pid)):
        stat_fields(zombie.pid)


@pytest.mark.live
def test_a_process_is_held_until_it_has_ended_whoever_has_its_id_then() -> None:
    child = subprocess.Popen(["sleep", "60"])
    held = HeldProcess(child.pid)
    try:
        assert held.is_there()
        assert not kill_if(child.pid, lambda fields: int(fields[1]) != os.getpid()), "it is not the one that is meant"
        assert kill_if(child.pid, lambda fields: int(fields[1]) == os.getpid())
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not held.is_there(), "a zombie has ended"
        assert held.exit_code() is None, "it waits for its parent"
        assert child.wait() == -signal.SIGKILL
        release = tuple(map(int, os.uname().release.split(".")[:2]))
        assert held.exit_code() == (-signal.SIGKILL if release >= (6, 15) else None)
        held.pid = os.getpid()  # as if its id were another process's now
        assert not held.send(signal.SIGKILL)
        assert not kill_if(child.pid, lambda fields: True)
    finally:
        held.close()
        child.kill()
        child.wait()


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
