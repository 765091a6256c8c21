"""The collector's pauses: which are kept, in whose thread, and that the program notices nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils.data
import workloads as wl
from exceptions_everywhere import Interrupting, Interruption

import minidl
from minidl.check import check
from minidl.record import pauses as module
from minidl.record.pauses import LEAST_NS, MOST, Pause, Pauses
from minidl.record.recorder import Recorder, TraceConfig, create
from minidl.tracefile import events as ev
from minidl.tracefile.events import Phase
from minidl.tracefile.reader import read_trace

GARBAGE = 200_000
"""Lists, whose collection takes some milliseconds at least."""


@pytest.fixture
def pauses() -> Iterator[Pauses]:
    """The only callbacks: hypothesis has one in Python."""
    before, gc.callbacks[:] = list(gc.callbacks), []
    watched = Pauses()
    gc.collect()
    watched.watch()
    yield watched
    gc.callbacks[:] = before


def _cycle() -> list[Any]:
    cycle: list[Any] = [[] for _ in range(GARBAGE)]
    cycle.append(cycle)
    return cycle


def test_a_pause_is_kept_with_its_thread_and_what_was_collected(pauses: Pauses) -> None:
    def collect() -> None:
        gc.disable()  # no collection of its own counts the garbage, or some of it
        _cycle()
        tids.append(threading.get_native_id())
        gc.collect()
        gc.enable()

    tids: list[int] = []
    before = time.monotonic_ns()
    for run in (collect, lambda: None, collect):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    found = [one for one in pauses.taken() if one.about["collected"] > GARBAGE]
    assert [one.tid for one in found] == tids
    assert [one.about["generation"] for one in found] == [2, 2]
    assert all(one.took >= LEAST_NS for one in found)
    assert before < found[0].begin < found[0].begin + found[0].took < found[1].begin
    assert found[1].begin + found[1].took < time.monotonic_ns()
    assert pauses.taken() == []


def test_the_longest_pauses_are_kept_and_no_short_one(pauses: Pauses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_NS", 60 * 10**9)  # a busy machine may take milliseconds from any collection
    for _ in range(100):
        gc.collect(0)
    assert pauses.taken() == []
    monkeypatch.setattr(module, "LEAST_NS", 1)
    for _ in range(3 * MOST):
        gc.collect(0)
    kept = _cycle()
    gc.collect()
    found = pauses.taken()
    assert len(found) == MOST
    assert found == sorted(found, key=lambda one: one.begin)
    assert max(found).about["generation"] == 2
    del kept[-1]


def _collect_until_interrupted() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.003)
    for _ in range(30):
        gc.collect()


@pytest.mark.heavy
def test_an_error_of_a_signal_s_handler_comes_out_of_a_pause(pauses: Pauses) -> None:
    """A callback in Python would run the handler after the collection, and the collector would drop its error."""

    def handler(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, handler)
    kept = [[one] for one in range(5 * GARBAGE)]
    try:
        for _ in range(5):
            with pytest.raises(InterruptedError):
                _collect_until_interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(kept) == 5 * GARBAGE


def test_the_program_s_own_callbacks_stay_as_they_are() -> None:
    told: list[str] = []

    def own(phase: str, about: dict[str, int]) -> None:
        told.append(phase)

    def later(phase: str, about: dict[str, int]) -> None: ...

    before = list(gc.callbacks)
    gc.callbacks.append(own)
    watched = Pauses()
    watched.watch()
    gc.callbacks.append(later)
    gc.collect(0)
    watched.unwatch()
    watched.unwatch()
    assert gc.callbacks == [*before, own, later]
    gc.callbacks[:] = before
    assert told == ["start", "stop"]


def test_no_exception_of_a_signals_handler_parts_a_pauses_begin_from_its_end(tmp_path: Path) -> None:
    """As that of SIGCHLD's, which tells that a worker was killed."""
    pen: Any = Recorder(TraceConfig(str(create(tmp_path / "t"))))
    pen.emit(ev.CONSUMER[0])  # a first event makes the file
    stamps = itertools.count(time.monotonic_ns(), 10)
    pen.pauses = SimpleNamespace(taken=lambda: [Pause(5, next(stamps), 1, {"generation": 2, "collected": 3})])
    at, done = 0, False
    while not done:
        at += 1
        with contextlib.suppress(Interruption), Interrupting(at, ("minidl.record.recorder",)):
            pen.emit_pauses(1, 0)
            done = True
    pen.close()
    phases = [Phase(ev.EVENTS[code].phase) for code in read_trace(tmp_path / "t").select("gc")["code"].tolist()]
    assert at > 20
    assert phases == [Phase.BEGIN, Phase.END] * (len(phases) // 2)


@pytest.mark.live
@pytest.mark.parametrize("observe", [False, True])
def test_a_trace_has_them_in_the_worker_s_fetch_and_in_the_program_s_own_code(observe: bool, tmp_path: Path) -> None:
    dataset = wl.At(4, 2, wl.collect)
    with minidl.trace(tmp_path / "t"):
        loader: Any = (
            torch.utils.data.DataLoader(dataset, num_workers=2, multiprocessing_context=minidl.observe())
            if observe
            else minidl.DataLoader(dataset, num_workers=2)
        )
        list(loader)
        wl.collect()
    trace = read_trace(tmp_path / "t")
    assert trace.problems == []
    assert [str(violation) for violation in check(trace)] == []
    spans = trace.spans()
    pauses = spans[(spans["code"] == ev.GC[0]) & (spans["ey"] > GARBAGE)]
    assert pauses["worker"].tolist() == [0, -1]
    assert pauses["loader"].tolist() == [1, 1]
    (fetch,) = spans[(spans["code"] == ev.FETCH[0]) & (spans["task"] == 2)]
    assert fetch["begin"] < pauses["begin"][0] < pauses["end"][0] < fetch["end"]
    assert fetch["tid"] == pauses["tid"][0]
    assert pauses["pid"][1] == os.getpid()


@pytest.mark.live
def test_a_forked_child_has_none_of_its_parent_s(pauses: Pauses) -> None:
    _cycle()
    gc.collect()
    child = os.fork()
    if not child:
        left = pauses.taken()
        _cycle()
        gc.collect()
        os._exit(0 if not left and [one.tid for one in pauses.taken()][-1:] == [os.getpid()] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pauses.taken()
