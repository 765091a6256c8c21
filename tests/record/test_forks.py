"""What a process is like when it starts workers is in the trace: start method, threads, what a fork breaks."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from programs import python, write
from sizes import slow

from minidl.record import forks
from minidl.tracefile.reader import read_trace


def test_another_thread_is_named_with_the_line_that_it_is_at() -> None:
    go_on = threading.Event()

    def keeps_a_lock() -> None:
        go_on.wait(30)

    other = threading.Thread(target=keeps_a_lock, name="keeper", daemon=True)
    before = forks.about("fork")
    other.start()
    try:
        facts, spawned = forks.about("fork"), forks.about("spawn")
    finally:
        go_on.set()
        other.join()
    (keeper,) = [one for one in facts["threads"] if one["name"] == "keeper"]
    assert (keeper["tid"], keeper["daemon"]) == (other.native_id, True)
    assert any(at.startswith(f"{__file__}:") and at.endswith(" keeps_a_lock") for at in keeper["at"])
    assert len(facts["threads"]) == len(before["threads"]) + 1
    assert "threads" in facts["hazards"]
    assert (spawned["method"], spawned["hazards"]) == ("spawn", []), "a spawned worker inherits no lock"


def test_no_collection_begins_while_the_frames_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could wait for ever for the lock that is held meanwhile."""
    seen = []

    def frames() -> dict[int, Any]:
        seen.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", frames)
    forks.current_frames()
    assert gc.isenabled()
    gc.disable()
    try:
        forks.current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert seen == [False, False]


def test_it_keeps_nothing_of_its_callers_alive() -> None:
    """An iterator that starts its workers must end when the program drops it, not when the collector runs."""

    class Held: ...

    def starts_a_worker() -> weakref.ref[Held]:
        held = Held()
        forks.about("fork")
        return weakref.ref(held)

    gc.disable()
    try:
        assert starts_a_worker()() is None
    finally:
        gc.enable()


@pytest.mark.live
@pytest.mark.parametrize("options", [(), *slow((("--observe",),))], ids=["ours", "torch's"])
def test_it_is_described_once_and_again_when_it_has_changed(tmp_path: Path, options: tuple[str, ...]) -> None:
    write(tmp_path / "train.py", """
        import threading
        from torch.utils.data import DataLoader

        if __name__ == "__main__":
            loader = DataLoader(range(4), num_workers=2)
            list(loader)
            threading.Thread(target=threading.Event().wait, name="keeper", daemon=True).start()
            list(loader)
    """)  # fmt: skip
    done = python("-m", "minidl", "run", "--trace", "trace", *options, "train.py", cwd=tmp_path)
    assert (done.returncode, "Warning" in done.stderr) == (0, False)
    lines = read_trace(tmp_path / "trace").described("start")
    threads = {line["loader"]: {one["name"] for one in line["threads"]} for line in lines}
    assert [sorted(names & {"keeper"}) for _, names in sorted(threads.items())] == [[], ["keeper"]]
    assert {line["method"] for line in lines} == {multiprocessing.get_start_method()}
    assert {line["worker"] for line in lines} <= {0, 1}
