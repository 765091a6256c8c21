"""The digest beside a run: when the watchdog has one written, and what becomes of one that cannot be."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import minidl
from minidl.job.digests import JobRecord, keep, load
from minidl.watch import digest as module
from minidl.watch.digest import EVERY, Digest


class Time:
    """A clock that the test moves, and children that end when it says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.begun, self.ended = 1000.0, 0, (0, 0)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.os, "waitpid", lambda pid, flags: self.ended)

    def fork(self, act: Callable[[], object]) -> int:
        self.begun += 1
        return 4711

    def passes(self, seconds: float, dog: Digest) -> None:
        self.now += seconds
        dog.attend(self.fork)


def test_each_minute_and_less_often_if_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time(monkeypatch)
    dog = Digest(Path("job/rank-3"))
    for seconds, begun in ((EVERY - 1, 0), (1, 1)):
        clock.passes(seconds, dog)
        assert clock.begun == begun
    clock.ended = (4711, 0)
    clock.passes(2, dog)  # it took 2 s, which is to be a hundredth
    clock.passes(190, dog)
    assert clock.begun == 1
    clock.passes(10, dog)
    assert (clock.begun, dog.dropped) == (2, 0)


def test_what_cannot_be_written_is_counted_and_a_child_that_hangs_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time(monkeypatch)
    dog = Digest(Path("job/rank-3"))
    clock.passes(EVERY, dog)
    clock.passes(EVERY, dog)  # it still writes
    assert (clock.begun, dog.dropped) == (1, 1)
    dog.write_last(clock.fork)
    assert clock.begun == 1
    clock.ended = (4711, 256)  # it could not
    clock.passes(1, dog)
    assert dog.dropped == 2
    dog.write_last(clock.fork)
    assert clock.begun == 2
    clock.now = dog.due
    dog.attend(lambda act: 0)  # there is no room for a process
    assert dog.dropped == 3


def test_a_trace_that_is_no_rank_has_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time(monkeypatch)
    dog = Digest(Path("minidl-traces/run-3"))
    clock.passes(EVERY, dog)
    dog.write_last(clock.fork)
    assert clock.begun == 0


def test_a_digest_says_how_many_were_dropped_and_an_error_is_raised(tmp_path: Path) -> None:
    place = tmp_path / "trace"
    with minidl.trace(place):
        assert list(minidl.DataLoader(range(4), batch_size=None)) == [0, 1, 2, 3]
    keep(place, 2)
    (table,) = (load(place) or JobRecord()).ranks
    assert table.facts.problem == "2 digests could not be written"
    with np.load(place / "steps.npz") as kept:
        assert json.loads(kept["about"].tobytes())["version"]
    os.chmod(place, 0o500)
    try:
        with contextlib.nullcontext() if os.geteuid() == 0 else pytest.raises(PermissionError):
            keep(place, 0)
    finally:
        os.chmod(place, 0o700)
