"""Functions of the workers: on the loader's clock, saved as far as a kill allows, and nothing else changes."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import ROOT, python, write
from sizes import slow

import minidl
from minidl.check import check
from minidl.record import functions
from minidl.tracefile import events as ev
from minidl.tracefile.attachments import Attachment, Name
from minidl.tracefile.reader import Trace, read_trace
from minidl.views.chrome import to_chrome
from minidl.views.summary import summary


class Samples:
    """Each sample is its index and how this process answers SIGTERM; 1 ms is spent on each."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, str]:
        return read(index), str(signal.getsignal(signal.SIGTERM))


def read(index: int) -> int:
    time.sleep(0.001)
    return index


def loader(dataset: Any = None, *, workers: int = 2, method: str = "fork", batch_size: int = 3) -> Any:
    return minidl.DataLoader(
        dataset or Samples(), batch_size, num_workers=workers, collate_fn=list, multiprocessing_context=method
    )


def record(path: Path, *loaded: Any, functions: bool = True, functions_min_us: float = 10, **options: Any) -> list[Any]:
    """What a recorded run yields."""
    with minidl.trace(path, functions=functions, functions_min_us=functions_min_us):
        return list(loader(*loaded, **options))


def place_of(function: Any) -> str:
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def slices(one: Attachment, function: Any) -> list[tuple[int, int]]:
    """Begin and end of each slice of a function, in time order.

    function: one in Python is found by its place, since before Python 3.11 its name is without its class; one in C by
    its name.
    """
    names = [name.name if isinstance(function, str) else name.about for name in one.slices.names]
    wanted = function if isinstance(function, str) else place_of(function)
    which = [n for n, name in enumerate(names) if name == wanted]
    rows = one.slices.rows
    return sorted((int(r["begin"]), int(r["end"])) for r in rows if r["name"] in which)


def within(inner: list[tuple[int, int]], outer: list[tuple[int, int]]) -> bool:
    """Whether each of `inner` lies within one of `outer`."""
    return all(any(b <= begin and end <= e for b, e in outer) for begin, end in inner)


def sample_spans(trace: Trace, worker: int) -> list[tuple[int, int]]:
    spans = trace.spans()
    mine = spans[(spans["code"] == ev.SAMPLE[0]) & (spans["worker"] == worker)]
    return [(int(s["begin"]), int(s["end"])) for s in mine]


@pytest.mark.live
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), *slow(("spawn", 1), ("forkserver", 1))])
def test_functions_lie_within_the_samples_that_called_them(tmp_path: Path, method: str, workers: int) -> None:
    batches = record(tmp_path / "trace", workers=workers, method=method)
    trace = read_trace(tmp_path / "trace")
    assert [index for batch in batches for index, _ in batch] == list(range(12))
    assert (check(trace), trace.problems) == ([], [])
    assert sorted(one.about["worker"] for one in trace.attachments) == list(range(workers))
    for one in trace.attachments:
        assert one.problems == []
        fetched = slices(one, Samples.__getitem__)
        assert len(fetched) == 12 // workers
        assert within(fetched, sample_spans(trace, one.about["worker"]))
        assert within(slices(one, read), fetched)
        assert within(slices(one, "time.sleep")[:1], slices(one, read))
        assert one.slices.tracks[0][:3] == (one.about["pid"], one.about["pid"], "MainThread")
        assert len(one.slices.tracks) >= 2, "also the feeder thread"
        assert Name("read", place_of(read)) in one.slices.names


@pytest.mark.live
def test_batches_and_signals_are_as_without(tmp_path: Path) -> None:
    """And without being asked for, nothing is recorded."""
    assert record(tmp_path / "with", workers=1) == record(tmp_path / "without", workers=1, functions=False)
    assert read_trace(tmp_path / "without").attachments == []
    assert "minidl-functions" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.live
def test_only_calls_as_long_as_asked_for(tmp_path: Path) -> None:
    record(tmp_path / "all", workers=1, functions_min_us=0)
    record(tmp_path / "long", workers=1, functions_min_us=900)
    every, long = (read_trace(tmp_path / name).attachments[0].slices.rows for name in ("all", "long"))
    assert 0 <= (every["end"] - every["begin"]).min() < 100_000  # a call may take less than the clock's step
    assert (long["end"] - long["begin"]).min() >= 899_000
    assert 12 <= len(long) < len(every)


class Dies(Samples):
    """The worker is killed in sample 7, as soon as its functions were saved while it was in there."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __getitem__(self, index: int) -> tuple[int, str]:
        if index == 7:
            before = self.saved()
            returned()
            deadline = time.monotonic() + 20
            while self.saved() == before and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

    def saved(self) -> int:
        """Number of whole lines in the file; its size already grows while a line is being written."""
        (file,) = self.trace.glob(f"functions-{os.getpid()}-*")
        return file.read_bytes().count(b"\n")


def returned() -> None:
    time.sleep(0.001)


@pytest.mark.live
def test_a_killed_worker_keeps_what_returned_before_the_last_save(tmp_path: Path) -> None:
    """What the kill took is said in the summary and in the viewer."""
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        record(tmp_path / "trace", Dies(tmp_path / "trace"), workers=1)
    killed = read_trace(tmp_path / "trace")
    (one,) = killed.attachments
    assert len(slices(one, Samples.__getitem__)) == 7
    assert len(slices(one, returned)) == 1, "saved while its caller, which never returned, was still in the sample"
    assert slices(one, Dies.__getitem__)[7:] == []
    (problem,) = one.problems
    assert problem.startswith("functions of worker 0 (pid ")
    assert "it ends with its last save" in problem
    assert "it ends with its last save" in summary(killed).text()
    document = to_chrome(killed)
    (lost,) = [e for e in document["traceEvents"] if e["name"] == "functions lost"]
    assert "had not returned" in lost["args"]["lacks"][0]
    assert any("last save" in problem for problem in document["otherData"]["problems"])


@pytest.mark.live
def test_more_calls_than_the_buffer_holds_are_said_to_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "ENTRIES", 40)
    batches = record(tmp_path / "trace", workers=1, functions_min_us=0)
    (one,) = read_trace(tmp_path / "trace").attachments
    assert len(batches) == 4
    assert 0 < len(one.slices.rows) <= 40 * len(one.problems)
    assert "more than 40 calls between two saves: the oldest are lost" in one.problems[0]


@pytest.mark.live
def test_a_file_does_not_grow_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(functions, "MOST_BYTES", 1 << 10)
    batches = record(tmp_path / "trace", workers=1)
    (one,) = read_trace(tmp_path / "trace").attachments
    assert len(batches) == 4
    assert len(one.problems) == 1
    assert "no functions are recorded from here on" in one.problems[0]
    assert "no functions are recorded from here on" in capfd.readouterr().err


@pytest.fixture
def own(tmp_path: Path) -> Any:
    """A recorder of this process."""
    recorder = functions.FunctionRecorder(str(tmp_path), 0, 0, 1)
    yield recorder
    recorder.finish()


def profiled() -> bool:
    """Whether a profiler looks at this thread; from Python 3.12 on, viztracer is a tool of sys.monitoring."""
    monitoring = getattr(sys, "monitoring", None)
    tool = None if monitoring is None else monitoring.get_tool(monitoring.PROFILER_ID)
    return sys.getprofile() is not None or tool is not None


def test_a_full_disk_ends_the_recording_and_not_the_run(
    own: functions.FunctionRecorder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own.tracer.start()
    read(1)
    monkeypatch.setattr(functions.os, "write", functools.partial(_short, os.write, own._fd))
    own.save()
    monkeypatch.undo()
    assert "no functions are recorded from here on: the disk is full" in capfd.readouterr().err
    assert not profiled()
    own.save()
    own.finish()


def _short(write_all: Any, fd: int, to: int, data: bytes) -> int:
    return write_all(to, data[:20] if to == fd else data)


def test_whatever_viztracer_does_the_worker_goes_on(
    own: functions.FunctionRecorder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own, "tracer", _Odd(own.tracer))
    own.save()
    own.finish()
    assert "could not be saved: KeyError: 'ts'" in capfd.readouterr().err


class _Odd:
    """A tracer of another make."""

    def __init__(self, inner: Any) -> None:
        self.stop, self.getts = inner.stop, inner.getts

    def load(self) -> list[dict[str, Any]]:
        return [{"ph": "X", "tid": 1, "name": "f"}]


class _Still:
    """A tracer whose clock stands at 10 s."""

    def getts(self) -> float:
        return 1e7


@given(st.lists(st.integers(0, 3_000), max_size=20).map(sorted), st.floats(-5e-7, 5e-7))
def test_neighbours_stay_apart_when_their_times_are_mapped(gaps: list[int], drift: float) -> None:
    """A call that follows another at once; viztracer gives begins as rounded down, and durations unrounded."""
    clock = functions._Clock(_Still())
    clock._first = (0, int(1e10 * drift) + clock._first[1])
    times = [1_000_000_000 + sum(gaps[:n]) for n in range(len(gaps) + 1)]
    scaled = [t * (1 + drift) for t in times]
    begins = [math.floor(t) / 1000 for t in scaled[:-1]]
    durations = [(b - a) / 1000 for a, b in itertools.pairwise(scaled)]
    begin, end = (times.tolist() for times in clock.monotonic(begins, durations))
    assert all(e <= b for e, b in zip(end, begin[1:], strict=False))
    assert begin == sorted(begin)
    assert all(b <= e for b, e in zip(begin, end, strict=True))


@pytest.mark.live
def test_without_viztracer_the_run_does_not_begin(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "print('it ran')")
    write(tmp_path / "none" / "viztracer.py", "raise ImportError('simulated')")
    places = os.pathsep.join([str(tmp_path / "none"), str(ROOT)])
    done = python("-m", "minidl", "run", "--functions", "script.py", cwd=tmp_path, PYTHONPATH=places)
    assert (done.returncode, done.stdout) == (2, "")
    said = "functions cannot be recorded: viztracer cannot be imported (simulated): pip install viztracer"
    assert said in done.stderr
    assert list((tmp_path / "minidl-traces").iterdir()) == []


@pytest.mark.live
def test_a_worker_that_cannot_import_viztracer_works_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "viztracer", None)
    monkeypatch.setattr(functions, "require", lambda: None)
    assert len(record(tmp_path / "trace", workers=1)) == 4
    trace = read_trace(tmp_path / "trace")
    assert (trace.attachments, check(trace)) == ([], [])
    assert "functions are not recorded" in capfd.readouterr().err


@pytest.mark.live
def test_the_main_process_too(tmp_path: Path) -> None:
    """A forked worker switches its parent's tracer off, and keeps a file of its own."""
    with minidl.trace(tmp_path / "trace", functions=True, functions_main=True, functions_min_us=500):
        assert profiled()
        for _ in loader(workers=1, batch_size=1):
            read(0)
    assert not profiled()
    trace = read_trace(tmp_path / "trace")
    assert (check(trace), [one.problems for one in trace.attachments]) == ([], [[], []])
    main, worker = sorted(trace.attachments, key=lambda one: one.about["worker"])
    spans = trace.spans()
    steps = spans[(spans["code"] == ev.CONSUMER[0]) & (spans["bx"] > 0)]
    mine = slices(main, read)
    assert len(mine) == 12
    assert within(mine, [(int(s["begin"]), int(s["end"])) for s in steps])
    assert slices(main, Samples.__getitem__) == []
    assert len(slices(worker, Samples.__getitem__)) == 12
    assert {track.pid for track in worker.slices.tracks} == {worker.about["pid"]}
