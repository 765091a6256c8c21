"""The recorder: what was emitted is in the file, whatever ends the process; and what was not is said."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from programs import python

from minidl.record import recorder
from minidl.record.recorder import FIRST_SLOTS, Recorder, TraceConfig, create
from minidl.tracefile import events as ev
from minidl.tracefile.format import EVENTS_SUFFIX, FORMAT_VERSION, MANIFEST, PACK, TraceError
from minidl.tracefile.reader import Trace, read_trace

KILLS = int(os.environ.get("MINIDL_KILLS", "60"))
"""How many processes the survival tests kill."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return create(tmp_path / "trace")


@pytest.fixture
def pen(place: Path) -> Iterator[Recorder]:
    pen = Recorder(TraceConfig(str(place)))
    yield pen
    pen.close()


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child that does nothing on its way out; returns its exit code, or -signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_threads(*works: Callable[[], object]) -> None:
    """Run each in a thread of its own, all at once."""
    threads = [threading.Thread(target=work, name=f"writer {number}") for number, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def alarms(handler: Callable[[], object]) -> Iterator[None]:
    """Call `handler` for each signal of the virtual timer."""
    previous = signal.signal(signal.SIGVTALRM, lambda *_: handler())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def numbered(pen: Recorder, count: int, start: int = 0) -> None:
    """Emit `count` events whose fields all follow from their number, so that a mixed-up record shows."""
    for n in range(start, start + count):
        pen.emit(ev.FETCH[0], 1, n, n % 7, n * 3, -n, n << 40)


def assert_numbered(rows: npt.NDArray[np.void]) -> None:
    n = rows["task"]
    expected = {"code": ev.FETCH[0], "loader": 1, "worker": n % 7, "x": n * 3, "y": -n, "z": n << 40, "seq": n + 1}
    for column, values in expected.items():
        assert (rows[column] == values).all(), column
    assert (rows["time"] > 0).all()


def words(trace: Trace) -> str:
    return "\n".join(trace.problems)


# --- Survival ---------------------------------------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.timeout(120 + KILLS // 5)
def test_a_kill_right_after_an_event_loses_nothing(tmp_path: Path) -> None:
    for trial in range(KILLS):
        place = create(tmp_path / str(trial))
        count = FIRST_SLOTS + 5 if trial % 20 == 0 else trial % 9 + 1

        def emit_and_die(place: Path = place, count: int = count) -> None:
            pen = Recorder(TraceConfig(str(place)))
            numbered(pen, count)
            os.kill(os.getpid(), signal.SIGKILL)

        assert in_child(emit_and_die) == -signal.SIGKILL
        trace = read_trace(place)
        assert (len(trace), trace.problems) == (count, [])
        assert_numbered(trace.events)
        shutil.rmtree(place)


@pytest.mark.live
@pytest.mark.timeout(120 + KILLS // 5)
@pytest.mark.parametrize("ring", [None, 1024 * 64])
def test_a_kill_at_any_moment_leaves_whole_records_only(place: Path, ring: int | None) -> None:
    for _ in range(max(1, KILLS // 6)):
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            pen = Recorder(TraceConfig(str(place), ring_bytes=ring))
            numbered(pen, 1)
            os.write(tell, b"!")
            numbered(pen, 10**9, start=1)
        os.read(ready, 1)
        time.sleep(random.random() / 200)  # when it dies does not matter, only that it is not always the same moment
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(tell)
    trace = read_trace(place)
    assert_numbered(trace.events)
    for index, process in enumerate(trace.processes):
        seqs = trace.events["seq"][trace.events["process"] == index]
        first = 1 if ring is None else max(1, int(seqs[-1]) - 1024 + 1)
        assert int(seqs[-1]) - first + 1 - len(seqs) in (0, 1), (
            process
        )  # one thread: one event at most was in the making


def test_the_header_is_written_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is written it is cleared, and a kill then would lose all events."""
    pen = Recorder(TraceConfig(str(place)))
    numbered(pen, 1)
    monkeypatch.setattr(recorder, "HEADER", None)
    numbered(pen, recorder.FIRST_SLOTS, start=1)
    pen.close()
    assert len(read_trace(place).events) == 1 + recorder.FIRST_SLOTS


def test_a_slot_is_emptied_before_it_is_written_and_numbered_last() -> None:
    slot = bytearray(b"\xff" * 64)
    with pytest.raises(struct.error):
        PACK.pack_into(slot, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, "interrupted here")
    assert slot[:56] == PACK.pack(1, 2, 3, 4, 5, 6, 7, 8, 9, 0)[:56]
    assert slot[56:] == bytes(8)


# --- Threads, signals, processes --------------------------------------------------------------------------------------
@pytest.mark.live
def test_a_process_has_files_from_its_first_event_on(pen: Recorder, place: Path) -> None:
    """A child that emits nothing has none, nor one of a process that has ended the recording."""
    assert os.listdir(place) == [MANIFEST]
    pen.emit(ev.YIELD)
    files = sorted(os.listdir(place))
    assert len(files) == 3
    assert in_child(lambda: None) == 0
    pen.close()
    assert in_child(lambda: pen.emit(ev.YIELD)) == 0
    assert sorted(os.listdir(place)) == files


def test_a_thread_is_named_when_its_first_event_is_in_the_file(
    pen: Recorder, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed while the name is written loses the name alone."""
    pen.emit(ev.YIELD, 1, 0)
    there: list[int] = []
    monkeypatch.setattr(Recorder, "describe", lambda *_, **__: there.append(len(read_trace(place))))
    in_threads(lambda: pen.emit(ev.YIELD, 1, 1))
    assert there == [2]


def test_threads_share_one_file_and_lose_nothing(pen: Recorder, place: Path) -> None:
    def work(worker: int) -> None:
        for task in range(5000):
            pen.emit(ev.FETCH[0], task=task, worker=worker)

    in_threads(*(functools.partial(work, k) for k in range(8)))
    trace = read_trace(place)
    assert trace.problems == []
    assert sorted(trace.events["seq"].tolist()) == list(range(1, 40_001))
    for k in range(8):
        rows = trace.events[trace.events["worker"] == k]
        assert rows["task"].tolist() == list(range(5000))
        assert {trace.threads[os.getpid(), tid] for tid in rows["tid"].tolist()} == {f"writer {k}"}


def test_a_growing_thread_is_not_disturbed_by_another(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread B begins to grow the file and is overtaken: A's longer map is replaced by B's shorter one."""
    pen = Recorder(TraceConfig(str(place)))
    numbered(pen, FIRST_SLOTS)
    b_is_growing, a_has_grown = threading.Event(), threading.Event()
    real = os.posix_fallocate

    def slow_for_b(fd: int, offset: int, size: int) -> None:
        if threading.current_thread().name == "B":
            b_is_growing.set()
            a_has_grown.wait()
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", slow_for_b)
    b = threading.Thread(target=numbered, args=(pen, 1, FIRST_SLOTS), name="B")
    b.start()
    b_is_growing.wait()
    numbered(pen, 4 * FIRST_SLOTS, start=FIRST_SLOTS + 1)
    a_has_grown.set()
    b.join()
    numbered(pen, 10, start=5 * FIRST_SLOTS + 1)
    trace = read_trace(place)
    pen.close()
    assert trace.problems == []
    assert sorted(trace.events["seq"].tolist()) == list(range(1, 5 * FIRST_SLOTS + 12))
    assert_numbered(trace.events)


def test_a_file_ends_with_a_page(place: Path) -> None:
    """Linux may clear what is behind the end of a file in its last page, when the file is lengthened.

    Four threads that lengthened a file by a few slots at a time lost one event in two thousand.
    """
    pen = Recorder(TraceConfig(str(place)))
    for slots in (1, FIRST_SLOTS + 1, 5 * FIRST_SLOTS - 1):
        assert len(pen._grow(slots)) % mmap.PAGESIZE == 0
        (file,) = place.glob("*" + EVENTS_SUFFIX)
        assert file.stat().st_size == len(pen._grow(slots))
    pen.close()


def test_a_map_that_shrinks_before_it_is_written_to(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where the other thread comes between this one's growing and its writing."""
    real = Recorder._grow

    def overtaken(self: Recorder, slots: int) -> object:
        grown = real(self, slots)
        self._map = bytearray()
        return grown

    monkeypatch.setattr(Recorder, "_grow", overtaken)
    pen = Recorder(TraceConfig(str(place)))
    numbered(pen, 20)
    trace = read_trace(place)
    assert (len(trace), trace.problems) == (20, [])


def test_a_signal_handler_may_emit_at_any_moment(pen: Recorder, place: Path) -> None:
    numbers = itertools.count(1)
    handled = emitted = 0

    def handler() -> None:  # itself interrupted by the next signal, now and then
        nonlocal handled
        handled = number = next(numbers)
        pen.emit(ev.YIELD, x=number)
        pen.string(f"signal {number}")

    with alarms(handler):
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0003, 0.0003)
        while handled < 50 or emitted < 20_000:
            pen.emit(ev.FETCH[0], task=emitted)
            emitted += 1
    handled = next(numbers) - 1
    trace = read_trace(place)
    assert trace.problems == []
    assert trace.select("fetch")["task"].tolist() == list(range(emitted))
    assert sorted(trace.select("yield")["x"].tolist()) == list(range(1, handled + 1))
    assert sorted(trace.strings.values()) == sorted(f"signal {n}" for n in range(1, handled + 1))


def emit_until_interrupted(pen: Recorder) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0002)
    for _ in range(10_000_000):
        pen.emit(ev.YIELD)


@pytest.mark.heavy
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, TimeoutError])
def test_what_a_signal_handler_raises_passes_through(pen: Recorder, error: type[BaseException]) -> None:
    """The loader's SIGCHLD handler raises; were `emit` to swallow it, a dead worker would go unnoticed."""

    def handler() -> None:
        raise error("from the handler")

    with alarms(handler):
        for _ in range(30):
            with pytest.raises(error, match="from the handler"):
                emit_until_interrupted(pen)


def test_a_timeout_that_a_handler_raises_while_the_file_grows(
    pen: Recorder, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an OSError too, and yet no reason to stop recording."""
    numbered(pen, FIRST_SLOTS)

    def interrupted(fd: int, offset: int, size: int) -> None:
        raise TimeoutError("from the handler")

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(TimeoutError, match="from the handler"):
        pen.emit(ev.YIELD)
    monkeypatch.undo()
    numbered(pen, 10, start=FIRST_SLOTS + 1)
    trace = read_trace(place)
    assert (pen.lost, len(trace)) == ("1 events: an exception of a signal's handler came between", FIRST_SLOTS + 10)


@pytest.mark.live
def test_a_forked_child_writes_files_of_its_own(place: Path) -> None:
    pen = recorder.start(TraceConfig(str(place)))
    try:
        pen.role("loader")
        assert pen.string("same text") == 1
        pen.emit(ev.YIELD, x=1, z=pen.string("parent's"))

        def work() -> None:
            assert recorder.active() is pen
            pen.role("worker", worker=3, loader=1)
            pen.emit(ev.TASK_ERROR, x=2, z=pen.string("child's"))
            os.kill(os.getpid(), signal.SIGKILL)

        assert in_child(work) == -signal.SIGKILL
        pen.emit(ev.YIELD, x=3)
    finally:
        recorder.stop()
    trace = read_trace(place)
    assert trace.problems == []
    parent, child = trace.processes
    assert (parent.pid, parent.role, parent.events) == (os.getpid(), "loader", 2)
    assert (child.ppid, child.role, child.worker, child.loader, child.events) == (os.getpid(), "worker", 3, 1, 1)
    row = trace.select("task_error")[0]
    assert (row["pid"], row["tid"], row["seq"]) == (child.pid, child.pid, 1)
    assert trace.text(row) == "child's"
    assert trace.strings == {(0, 1): "same text", (0, 2): "parent's", (1, 1): "child's"}


@pytest.mark.live
def test_a_fork_in_the_middle_of_other_threads_emits(pen: Recorder, place: Path) -> None:
    stop = threading.Event()

    def chatter() -> None:
        for _ in range(300_000):  # all three fit into the ring: on a loaded machine the forks take long
            if stop.is_set():
                return
            pen.emit(ev.INDEX_WRITE[0])

    threads = [threading.Thread(target=chatter) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert [in_child(lambda: numbered(pen, FIRST_SLOTS + 1)) for _ in range(10)] == [0] * 10
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    trace = read_trace(place)
    assert [p.events for p in trace.processes[1:]] == [FIRST_SLOTS + 1] * 10
    assert_numbered(trace.select("fetch"))
    assert trace.problems == []


LATE = """
import atexit, builtins, os, sys, threading
from minidl.record import recorder
from minidl.tracefile import events as ev

pen = recorder.start(recorder.TraceConfig(sys.argv[1]))
class Late:
    def __init__(self, x, count=1):
        self.emit, self.code, self.x, self.count, self.write = pen.emit, ev.QUEUE_CLOSE, x, count, os.write
    def __del__(self):
        try:
            for n in range(self.count): self.emit(self.code, x=self.x)
        except BaseException as error:
            self.write(2, repr(error).encode())

def feed(count, started):
    while count is None or (count := count - 1) >= 0:
        pen.emit(ev.INDEX_WRITE[0])
        started.set()

for count in (None, None, 3000):
    started = threading.Event()
    threading.Thread(target=feed, args=(count, started), daemon=count is None).start()
    started.wait()
builtins.late, sys.late = Late(1), Late(2, count=50_000)  # more than the file has room for, and it cannot grow now
atexit.register(pen.emit, ev.QUEUE_CLOSE, x=3)
"""


@pytest.mark.live
def test_events_from_an_interpreter_that_exits(place: Path) -> None:
    """Daemon threads emit until they are stopped; so do an exit handler, and objects that outlive a module's names."""
    done = python("-c", LATE, place, cwd=place)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    trace = read_trace(place)
    assert set(trace.select("queue_close")["x"].tolist()) == {1, 2, 3}
    assert len(trace.select("index_write")) > 3000
    assert "did not fit" not in words(trace)


# --- What cannot be recorded ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lost", [0, 2952])
def test_ring_keeps_the_newest(place: Path, lost: int) -> None:
    pen = Recorder(TraceConfig(str(place), ring_bytes=2048 * 64))
    numbered(pen, 2048 + lost)
    trace = read_trace(place)
    pen.close()
    assert trace.events["task"].tolist() == list(range(lost, lost + 2048))
    assert_numbered(trace.events)
    assert trace.processes[0].lost == lost
    said = f"other (pid {os.getpid()}): the oldest {lost} events overwritten (the ring holds 2048)"
    assert trace.problems == ([said] if lost else [])
    assert next(place.glob("*.events")).stat().st_size == 4096 + 2048 * 64


@pytest.mark.parametrize(("given", "slots"), [(None, 0), (1, 1024), (65536, 1024), (200_000, 2048), (1 << 20, 16384)])
def test_ring_is_rounded_down_to_a_power_of_two(given: int | None, slots: int) -> None:
    assert TraceConfig("x", ring_bytes=given).ring_slots == slots
    assert TraceConfig("x").ring_slots == 1_048_576, "a ring is what one gets"


def short_files(place: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def small_disk(place: Path) -> None:
    """Of 256 KiB, in a mount namespace of this process's own."""
    try:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
        for command in ("mount --make-rprivate /", f"mount -t tmpfs -o size=256k tmpfs {place}"):
            subprocess.run(command.split(), check=True, stderr=subprocess.DEVNULL)
    except (AssertionError, OSError, subprocess.CalledProcessError):
        os._exit(77)


CLONE_NEWNS = 0x20000


@pytest.mark.live
@pytest.mark.parametrize(("limited", "reason"), [(short_files, errno.EFBIG), (small_disk, errno.ENOSPC)])
def test_a_trace_that_is_cut_short(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], limited: Callable[[Path], None], reason: int
) -> None:
    """It has a whole beginning, and says how much is missing; stderr says it once."""

    def work() -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        limited(disk)
        place = create(disk / "trace")
        numbered(Recorder(TraceConfig(str(place))), 10_000)
        shutil.copytree(place, tmp_path / "copy")
        os.kill(os.getpid(), signal.SIGKILL)

    ended = in_child(work)
    if ended == 77:
        pytest.skip("mounting a small disk is not permitted here")
    assert ended == -signal.SIGKILL
    trace, err = read_trace(tmp_path / "copy"), capfd.readouterr().err
    kept = len(trace)
    assert 0 < kept < 10_000
    assert trace.events["task"].tolist() == list(range(kept))
    assert_numbered(trace.events)
    (process,) = trace.processes
    assert process.lost == 10_000 - kept
    assert words(trace) == f"{process.name}: {10_000 - kept} events could not be recorded: {os.strerror(reason)}"
    assert err.count("minidl trace") == 1
    assert f"process {process.pid} stops recording" in err


def test_full_disk_that_writes_half_a_line(pen: Recorder, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pen.emit(ev.YIELD)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]) if b"lost text" in data else real(fd, data))
    assert pen.string("lost text") == 0
    assert pen.string("swallowed by the half line") == 2
    assert pen.string("whole again") == 3
    pen.emit(ev.YIELD)
    trace = read_trace(place)
    assert len(trace) == 2
    assert trace.strings == {(0, 3): "whole again"}
    assert "1 description could not be recorded: No space left on device" in words(trace)
    assert "1 line of" in words(trace)


def full_disk(place: Path, patch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "posix_fallocate", no_space)


def deleted_directory(place: Path, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(place)


def deleted_file(place: Path, patch: pytest.MonkeyPatch) -> None:
    next(place.glob("*.events")).unlink()


def file_instead(place: Path, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(place)
    place.write_text("precious")


def left_at(place: Path) -> object:
    """The tasks of a trace's events, or the text of a file, or nothing."""
    if place.is_dir():
        return read_trace(place).events["task"].tolist()
    return place.read_text() if place.exists() else None


FIRST = [*range(FIRST_SLOTS)]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("accident", "before", "reason", "left"),
    [
        (full_disk, 0, "No space left on device", []),
        (full_disk, 100, "No space left on device", FIRST),
        (deleted_directory, 0, "No such file or directory", None),
        (deleted_directory, 100, "No such file or directory", None),
        (deleted_file, 100, "No such file or directory", []),
        (file_instead, 0, "Not a directory", "precious"),
    ],
)
@pytest.mark.parametrize("ring", [None, 4096 * 64])
def test_from_an_accident_on_events_are_lost_and_counted(
    place: Path, ring: int | None, accident: Any, before: int, reason: str, left: object,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Those that the file had room for are there; a ring does not begin again; no file is made anew."""
    pen = Recorder(TraceConfig(str(place), ring_bytes=ring))
    numbered(pen, before)
    accident(place, monkeypatch)
    numbered(pen, 10_000, start=before)
    monkeypatch.undo()
    numbered(pen, 10)
    assert pen.lost.startswith(f"{before + 10_010 - (FIRST_SLOTS if before else 0)} events")
    assert pen.lost.endswith(f": {reason}")
    assert capfd.readouterr().err.count("minidl trace") == 1
    assert left_at(place) == left
    pen.close()


@pytest.mark.live
def test_without_descriptors_events_go_on(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process that has run out of descriptors is one whose trace is wanted."""

    def work() -> None:
        pen = Recorder(TraceConfig(str(place)))
        numbered(pen, 1)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        numbered(pen, FIRST_SLOTS - 1, start=1)
        assert [pen.string("a"), pen.string("b")] == [0, 0]
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert pen.string("a") == 3
        numbered(pen, 10, start=FIRST_SLOTS)

    assert in_child(work) == 0
    trace = read_trace(place)
    assert len(trace) == FIRST_SLOTS + 10
    assert trace.strings == {(0, 3): "a"}
    assert words(trace).endswith("2 descriptions could not be recorded: Too many open files")
    assert capfd.readouterr().err.count("minidl trace") == 1


@pytest.mark.live
def test_a_descriptor_in_reserve_writes_on_where_the_program_has_taken_all_others(place: Path) -> None:
    """Also in a child that is forked then; and a number that the program has taken over is not closed."""

    def work() -> None:
        pen = Recorder(TraceConfig(str(place)))
        numbered(pen, 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with contextlib.suppress(OSError):
            while True:
                os.open(place, os.O_RDONLY)
        assert [pen.string("a"), pen.string("b")] == [1, 2]
        numbered(pen, FIRST_SLOTS, start=1)  # a longer file
        assert in_child(lambda: numbered(pen, 1)) == 0
        for number in range(3, 64):
            os.dup2(2, number)
        assert pen.string("c") == 0
        assert all(os.path.samestat(os.fstat(number), os.fstat(2)) for number in range(3, 64))

    assert in_child(work) == 0
    trace = read_trace(place)
    assert len(trace) == FIRST_SLOTS + 2
    assert sorted(trace.strings.values()) == ["a", "b"]


@pytest.mark.live
def test_stderr_that_is_closed_is_left_alone(tmp_path: Path) -> None:
    def work() -> None:
        os.close(2)
        pen = Recorder(TraceConfig(str(tmp_path / "nowhere")))
        numbered(pen, 10)
        assert pen.lost

    assert in_child(work) == 0


REFUSED: list[tuple[Any, ...]] = [
    *[("text",), (None,), ([],), (-1,)],
    *[(ev.YIELD, 1 << 16), (ev.YIELD, -1), (ev.YIELD, 1, 1 << 63), (ev.YIELD, 1, 0, 0, 1.5)],
]


@pytest.mark.parametrize("values", REFUSED, ids=str)
def test_values_that_fit_no_slot_are_refused_and_noted(pen: Recorder, place: Path, values: tuple[Any, ...]) -> None:
    pen.emit(ev.YIELD, x=1)
    for _ in range(3):
        pen.emit(*values)
    pen.emit(ev.YIELD, x=2)
    assert pen.lost.startswith("an event that does not fit a record: ")
    trace = read_trace(place)
    assert trace.events["x"].tolist() == [1, 2]
    assert words(trace).count("did not fit a record") == 1
    assert "3 events missing: begun and never completed" in words(trace)


# --- Words ------------------------------------------------------------------------------------------------------------
def test_the_same_text_has_the_same_number(pen: Recorder) -> None:
    assert [pen.string(t) for t in ("a", "b", "a", "", "b")] == [1, 2, 1, 3, 2]


def test_describe_takes_anything(pen: Recorder, place: Path) -> None:
    loop: list[object] = []
    loop.append(loop)
    assert pen.describe("loader", loader=1, dataset=object, unseen=("one", "two"), text="a\nb\x00")
    assert pen.describe("sizes", sizes=(1, 2))
    assert pen.describe("odd", loop=loop)
    trace = read_trace(place)
    assert trace.loaders == {1: {"dataset": "<class 'object'>", "unseen": ["one", "two"], "text": "a\nb\x00"}}
    assert trace.described("sizes")[0]["sizes"] == [1, 2]
    assert "odd: Circular reference" in words(trace)


def test_a_process_says_who_it_is(pen: Recorder, place: Path) -> None:
    pen.role("worker", worker=2, loader=5)
    (process,) = read_trace(place).processes
    assert (process.pid, process.ppid, process.name) == (os.getpid(), os.getppid(), f"worker 2 (pid {os.getpid()})")
    assert (process.loader, process.events) == (5, 0)
    (first, second) = read_trace(place).described("process")
    assert first["argv"] == sys.argv
    assert second == {"kind": "process", "process": 0, "role": "worker", "worker": 2, "loader": 5}


# --- Beginning and ending ---------------------------------------------------------------------------------------------
def test_detail_batch_leaves_out_the_details(place: Path) -> None:
    pen = Recorder(TraceConfig(str(place), detail="batch"))
    for code in ev.EVENTS:
        pen.emit(code)
    pen.close()
    emitted = set(read_trace(place).events["code"].tolist())
    assert emitted == {code for code, event in ev.EVENTS.items() if not event.detail}
    assert set(ev.SAMPLE).isdisjoint(emitted)
    with pytest.raises(ValueError, match="'sample' or 'batch', not 'all'"):
        TraceConfig("x", detail="all")


def test_config_is_independent_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert TraceConfig("runs").directory == str(tmp_path / "runs")


def test_start_and_stop(place: Path) -> None:
    config = TraceConfig(str(place))
    assert recorder.active() is None
    pen = recorder.start(config)
    try:
        assert recorder.active() is pen is recorder.start(TraceConfig(str(place)))
        with pytest.raises(RuntimeError, match=r"already records to .*trace: call stop\(\) before start\(\)"):
            recorder.start(TraceConfig(str(place), detail="batch"))
        pen.emit(ev.YIELD)
        assert repr(pen) == f"<Recorder {next(place.glob('*.events')).with_suffix('')}: recording>"
    finally:
        recorder.stop()
    assert recorder.active() is None
    pen.emit(ev.YIELD)
    pen.role("late")
    assert (pen.lost, len(read_trace(place)), read_trace(place).processes[0].role) == ("", 1, "other")
    assert repr(pen).endswith(": closed>")
    recorder.stop()


def test_a_thread_that_begins_while_the_recorder_closes_has_no_event_or_both(pen: Recorder, place: Path) -> None:
    """An end without its begin would look like a broken protocol."""
    pen.emit(ev.YIELD)
    pen._off = recorder._CLOSED  # the first step of `close`; the map is there still
    in_threads(lambda: [pen.emit(code) for code in ev.FETCH])
    assert read_trace(place).events["code"].tolist() == [ev.YIELD]


def test_create_writes_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "eight")
    path = create(tmp_path / "a" / "b", detail="sample", note={"seed": 1})
    manifest = json.loads((path / MANIFEST).read_text())
    assert os.listdir(path) == [MANIFEST]
    assert manifest["format"] == FORMAT_VERSION
    assert (manifest["rank"], manifest["world_size"], manifest["pid"]) == (3, None, os.getpid())
    assert manifest["versions"]["python"] == sys.version.split()[0]
    assert (manifest["detail"], manifest["note"]) == ("sample", {"seed": 1})
    assert set(manifest) >= {"host", "boot_id", "command", "cwd", "realtime_ns", "monotonic_ns"}


def test_create_keeps_a_trace_that_is_there(tmp_path: Path) -> None:
    path = create(tmp_path / "t")
    before = (path / MANIFEST).read_bytes()
    with pytest.raises(TraceError, match="already holds a trace: give another directory, or delete this one"):
        create(path)
    assert (path / MANIFEST).read_bytes() == before
    (path / MANIFEST).unlink()
    (path / "1-2.events").touch()
    with pytest.raises(TraceError, match="already holds a trace"):
        create(path)
    assert os.listdir(path) == ["1-2.events"]


def test_of_two_that_create_at_once_one_succeeds(tmp_path: Path) -> None:
    results: Counter[str] = Counter()
    barrier = threading.Barrier(4)

    def attempts() -> None:
        for trial in range(10):
            barrier.wait()
            try:
                create(tmp_path / str(trial))
                results["made"] += 1
            except TraceError:
                results["refused"] += 1

    in_threads(*[attempts] * 4)
    assert results == {"made": 10, "refused": 30}


def test_create_where_nothing_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match=r"no trace can be begun in .*file/inner: Not a directory: give another"):
        create(tmp_path / "file" / "inner")


@pytest.mark.live
def test_loaders_of_one_trace_never_share_a_number(tmp_path: Path) -> None:
    def number() -> None:
        numbers = [recorder.number_loader(str(tmp_path / "trace")) for _ in range(50)]
        (tmp_path / f"{os.getpid()}.numbers").write_text(json.dumps(numbers))

    (tmp_path / "trace").mkdir()
    in_threads(*[lambda: in_child(number)] * 4)
    found = [json.loads(file.read_text()) for file in tmp_path.glob("*.numbers")]
    assert len(found) == 4
    assert sorted(itertools.chain(*found)) == list(range(1, 201))


def test_a_trace_that_cannot_count_loaders_still_numbers_them(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert recorder.number_loader(missing) != recorder.number_loader(missing)
