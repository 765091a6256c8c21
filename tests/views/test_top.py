"""`minidl top`: the picture against a model of the queues, the reading of files' ends, and real processes."""

from __future__ import annotations

import argparse
import contextlib
import copy
import errno
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from made_trace import HEALTHY, HUNG, LOADER_PID, WAITS_FOR_TASK_0, Run, made, write
from oracle_trace import stop_recording, write_process

from minidl import cli
from minidl.hang import live
from minidl.hang.life import life
from minidl.hang.limits import LONG
from minidl.hang.live import LiveTrace, find_trace
from minidl.hang.snapshot import WINDOW, Doing, IteratorSnapshot, Job, Snapshot, snapshot
from minidl.loader.protocol import LoaderState
from minidl.process_stat import descendants_of
from minidl.record.recorder import Recorder, TraceConfig, create
from minidl.tracefile import events as ev
from minidl.tracefile.format import HEADER_BYTES, RECORD, TraceError
from minidl.tracefile.process import ProcessLife
from minidl.tracefile.reader import Trace, read_trace
from minidl.views import top
from minidl.views.top import follow

SECOND = 1_000_000_000


def cut(trace: Trace, time_ns: int) -> Trace:
    """The trace as it was at a moment."""
    trace.events = trace.events[trace.events["time"] <= time_ns]
    return trace


def last_of(trace: Trace) -> int:
    return int(trace.events["time"][-1])


def only(shot: Snapshot) -> IteratorSnapshot:
    (loader,) = shot.loaders
    return loader


# --- The picture ------------------------------------------------------------------------------------------------------
def test_a_hang_in_words(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", **HUNG)
    lives = {LOADER_PID: ProcessLife.ALIVE, LOADER_PID + 100: ProcessLife.ALIVE, LOADER_PID + 101: ProcessLife.DISK}
    shot = snapshot(trace, last_of(trace) + 12 * SECOND, lives)
    assert shot.text() == (
        "iterator 1 stalled for 12.0 s: waiting for worker 1 (pid 1101), which waits for a disk, in sample 38 "
        "(task 9); later batches that wait behind it: 2\n"
        f"{tmp_path / 't'}: running\n"
        "  train.py\n"
        "iterator 1: epoch 0, 9 yielded, waiting for task 9 of worker 1 for 12.0 s\n"
        "  0.0 batches/s, 0 B/s, no batch, over the last 5.00 s\n"
        "  in flight: index queue 1, worker 1, result queue 0, reorder buffer 2\n"
        "  worker  pid      process  queued  is                                          for\n"
        "  0       1100     alive         0  waiting for a task                       12.0 s\n"
        "  1       1101     disk          1  in sample 38 (task 9)                    12.0 s"
    )
    assert not shot.over


def test_waiting_is_a_stall_after_a_while(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", **HUNG)
    begin = int(trace.select("next", ev.Phase.BEGIN)["time"][-1])
    limit = begin + int(LONG * SECOND)
    assert not only(snapshot(trace, limit - 1)).stalled
    assert only(snapshot(trace, limit)).stalled


@pytest.mark.parametrize(
    ("life", "words"),
    [
        (ProcessLife.GONE, "waiting for worker 1 (pid 1101), which has ended, last seen in sample 38 (task 9)"),
        (ProcessLife.STOPPED, "worker 1 (pid 1101), which is stopped by a signal, in sample 38 (task 9)"),
        (ProcessLife.UNKNOWN, "waiting for worker 1 (pid 1101), in sample 38 (task 9)"),
    ],
)
def test_a_stall_says_what_became_of_the_worker(tmp_path: Path, life: ProcessLife, words: str) -> None:
    trace = made(tmp_path / "t", **HUNG)
    shot = snapshot(trace, last_of(trace) + 12 * SECOND, {LOADER_PID: ProcessLife.ALIVE, LOADER_PID + 101: life})
    assert words in only(shot).stalled


def stopped_recording(directory: Path, pid: int, last: int) -> tuple[Trace, int]:
    """The trace of a hang, in which the disk is full for a process, and when it was."""
    path = write(directory, Run(**HUNG))
    since = last_of(read_trace(path))
    stop_recording(path, pid, last, errno.ENOSPC, since)
    return read_trace(path), since


ALL_LIVE = dict.fromkeys((LOADER_PID, 1100, 1101), ProcessLife.ALIVE)


def test_a_loader_that_no_longer_records_is_shown_as_it_was_then(tmp_path: Path) -> None:
    """The job runs on, and nothing is said to stall."""
    trace, since = stopped_recording(tmp_path / "t", LOADER_PID, 7)
    shot = snapshot(trace, since + 600 * SECOND, ALL_LIVE)
    assert shot.state == "running, but its recording has stopped (see below): shown as of its last event"
    assert only(shot).doing.seconds < 60
    assert only(shot).stalled == ""
    said = "loader (pid 1000) stopped recording (No space left on device): its last 7 events are missing"
    assert shot.notes == [said]
    gone = snapshot(trace, since + 600 * SECOND, {LOADER_PID: ProcessLife.GONE})
    assert "has ended after its recording" in gone.state


def test_a_worker_that_no_longer_records_is_said_to_be_unknown(tmp_path: Path) -> None:
    trace, since = stopped_recording(tmp_path / "t", 1101, 7)
    shot = snapshot(trace, since + 30 * SECOND, ALL_LIVE)
    assert (only(shot).workers[1].doing.words, shot.state) == ("no longer recorded", "running")
    assert "worker 1 (pid 1101), no longer recorded" in only(shot).stalled


def test_of_two_processes_with_the_same_id_the_one_that_lives_counts(tmp_path: Path) -> None:
    write(path := tmp_path / "t", Run(**HEALTHY))
    manifest = {"boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "host": socket.gethostname()}
    follower = LiveTrace(path)
    trace, _ = follower.read()
    trace.manifest |= manifest
    both = {"7-1000": ProcessLife.ALIVE, "7-999": ProcessLife.GONE}
    for order in (both, dict(reversed(both.items()))):
        assert follower._by_pid(trace, order)[7] is ProcessLife.ALIVE


def test_a_trace_that_is_deleted_during_a_look_is_a_trace_error_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path := tmp_path / "t", Run(**HEALTHY))
    names = os.listdir(path)
    follower = LiveTrace(path)
    for side in path.glob("*.jsonl"):
        side.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda _: names)
        assert len(follower.read()[0]) == 0
    shutil.rmtree(path)
    with pytest.raises(TraceError, match="No such file or directory: give the directory of a trace"):
        follower.read()


class Model:
    """Where each task of an epoch is, by walking through the events one by one."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.places: dict[int, str] = {}
        self.workers: dict[int, int] = {}

    def take(self, row: np.void) -> None:
        code, task = int(row["code"]), int(row["task"])
        if code == ev.EPOCH[0]:
            self.places.clear()
        step = {
            ev.INDEX_PUT: "index queue",
            ev.INDEX_GET[1]: "worker",
            ev.RESULT_PUT: "result queue",
            ev.RESULT_GET[1]: "pin thread" if self.pinned else "loader",
            ev.READY_PUT: "ready queue",
            ev.READY_GET[1]: "loader",
            ev.REORDER_STORE: "reorder buffer",
            ev.REORDER_POP: "loader",
        }.get(code)
        if code == ev.INDEX_PUT:
            self.workers[task] = int(row["worker"])
        if code == ev.YIELD:
            del self.places[task]
        elif step is not None and task >= 0:
            self.places[task] = step


@pytest.mark.heavy
@pytest.mark.parametrize(("pin", "workers"), [(False, 1), (True, 3)])
def test_queues_at_every_moment_are_those_of_a_model(tmp_path: Path, pin: bool, workers: int) -> None:
    """Two epochs: what workers did for a task of the first is nothing for the task of that number in the second."""

    def uneven(task: int) -> int:
        return 400_000 + 900_000 * (task % 4)

    trace = made(tmp_path / "t", batches=7, workers=workers, pin=pin, epochs=2, cost=uneven, prefetch_factor=3)
    whole, model = trace.events, Model(pin)
    seen: Counter[str] = Counter()
    for position, row in enumerate(whole):
        model.take(row)
        later = whole["time"][position + 1] if position + 1 < len(whole) else None
        if later == row["time"] or row["code"] == ev.SHUTDOWN[0]:
            continue  # events of one moment are taken together
        trace.events = whole[: position + 1]
        shot = snapshot(trace, int(row["time"]))
        if not shot.loaders:
            continue
        loader = only(shot)
        expected = Counter(model.places.values())
        shown = loader.depths
        assert shown == {place: expected[place] for place in shown}, f"after event {position}: {row}"
        seen.update(place for place in shown if shown[place])
        queued = Counter(model.workers[task] for task, place in model.places.items() if place == "index queue")
        assert {w.worker: w.queued for w in loader.workers} == {w.worker: queued[w.worker] for w in loader.workers}
    common = {"index queue", "worker", "result queue"}
    assert common <= set(seen)
    assert workers == 1 or "reorder buffer" in seen


def test_rates_are_of_the_last_seconds(tmp_path: Path) -> None:
    events: list[dict[str, int]] = [{"code": ev.EPOCH[0], "time": 1}]
    for task in range(20):  # a batch each second, of which 250 ms are waited
        at = (task + 1) * SECOND
        events += [
            {"code": ev.NEXT[0], "time": at, "task": task, "x": task},
            {"code": ev.RESULT_REBUILD[0], "time": at + 1, "task": task, "worker": 0, "x": 100},
            {"code": ev.RESULT_REBUILD[1], "time": at + 2, "task": task, "worker": 0, "x": 1, "y": 900},
            {"code": ev.YIELD, "time": at + 3, "task": task, "worker": 0, "y": task + 1},
            {"code": ev.NEXT[1], "time": at + SECOND // 4, "task": task, "x": task + 1},
            {"code": ev.CONSUMER[0], "time": at + SECOND // 4 + 1, "task": task, "x": task + 1},
            {"code": ev.CONSUMER[1], "time": at + SECOND - 1, "task": task},
        ]
    write_process(tmp_path / "t", events, pid=100, role="loader", loader=1)
    trace = read_trace(tmp_path / "t")
    loader = only(snapshot(cut(trace, 20 * SECOND + SECOND // 2), 20 * SECOND + SECOND // 2))
    assert loader.window == WINDOW
    assert loader.batches_per_s == 1.0
    assert loader.bytes_per_s == 1000.0
    assert loader.wait == pytest.approx(0.25)
    assert loader.yielded == 20
    assert loader.doing.words == "in the consumer's code, after task 19"
    trace.events["y"][trace.events["code"] == ev.NEXT[1]] = ev.Outcome.EXHAUSTED
    assert only(snapshot(trace, 20 * SECOND)).wait is None  # the end of an epoch is no batch that was waited for
    early = only(snapshot(cut(trace, 2 * SECOND + 10), 2 * SECOND + 10))
    assert early.window == pytest.approx(2.0)
    assert early.batches_per_s == pytest.approx(1.0)


def state_of(events: list[dict[str, int]], directory: Path, **params: object) -> IteratorSnapshot:
    """What a loader of one process is at, 20 s after time 0."""
    line = {"kind": "loader", "loader": 1, **params}
    write_process(directory, events, pid=100, role="loader", loader=1, lines=[line])
    return only(snapshot(read_trace(directory), 20 * SECOND))


EPOCH, ENDED, SHUTDOWN = {"code": ev.EPOCH[0], "x": 4}, {"code": ev.EPOCH[1]}, {"code": ev.SHUTDOWN[0]}
NEXT, GET = {"code": ev.NEXT[0], "task": 3}, {"code": ev.RESULT_GET[0], "task": 3, "worker": 1}
JOIN = {"code": ev.JOIN[0], "worker": 2, "x": ev.Actor.WORKER}
FETCHES = [{"code": ev.FETCH[0], "task": 3}, {"code": ev.SAMPLE[0], "task": 3, "y": 9}]
RESUMES = [{"code": ev.RESUME_PUT, "x": 5, "worker": 0}, GET | {"task": -1}]


@pytest.mark.parametrize(
    ("events", "params", "state", "words", "seen"),
    [
        ([{"code": ev.WORKER_START[0], "worker": 1}], {}, LoaderState.STARTING, "starting worker 1", ""),
        ([EPOCH, {"code": ev.SAMPLER_NEXT[0], "task": 0}], {}, LoaderState.PRIMING, "asking the sampler", ""),
        ([EPOCH, NEXT, GET], {}, LoaderState.WAITING, "waiting for task 3 of worker 1", "stalled"),
        ([EPOCH, NEXT, GET], {"in_order": False}, LoaderState.WAITING, "waiting for a result", "stalled"),
        ([EPOCH, NEXT, *FETCHES], {}, LoaderState.WAITING, "in next, in sample 9 (task 3)", "stalled"),
        ([EPOCH, ENDED], {"num_workers": 2}, LoaderState.EXHAUSTED, "between two epochs", ""),
        ([EPOCH, ENDED], {"num_workers": 0}, LoaderState.EXHAUSTED, "has ended", "over"),
        ([EPOCH, ENDED, *RESUMES], {}, LoaderState.RESUMING, "waiting for its workers to resume", "stalled"),
        ([GET], {}, LoaderState.NEW, "waiting for task 3 of worker 1", "stalled"),
        ([EPOCH, ENDED, SHUTDOWN, JOIN], {}, LoaderState.STOPPING_PIN, "shutting down, waiting for worker 2 to end",
         "stalled"),
        ([SHUTDOWN, JOIN | {"x": ev.Actor.PIN_THREAD}], {}, LoaderState.STOPPING_PIN,
         "shutting down, waiting for the pin thread to end", "stalled"),
        ([EPOCH, ENDED, SHUTDOWN, {"code": ev.SHUTDOWN[1]}], {}, LoaderState.CLOSED, "has ended", "over"),
    ],
    ids=["start", "sampler", "wait", "any", "alone", "paused", "alone, ended", "resuming", "long ago", "shutdown",
         "pin thread", "ended"],
)  # fmt: skip
def test_what_a_loader_is_at(
    tmp_path: Path, events: list[dict[str, int]], params: dict[str, object], state: LoaderState, words: str, seen: str
) -> None:
    loader = state_of(events, tmp_path, **params)
    assert (loader.state, loader.doing.words) == (state, words)
    assert (loader.over, bool(loader.stalled)) == (seen == "over", seen == "stalled")
    assert loader.epoch == (4 if EPOCH in events else -1)


GOT = {"code": ev.INDEX_GET[1], "time": 6, "task": 0, "worker": 0, "x": ev.Message.TASK}
DONE = {"code": ev.RESULT_PUT, "time": 7, "task": 0, "worker": 0}
IDLE = {"code": ev.INDEX_GET[0], "time": 8, "worker": 0}
COLLATES = {"code": ev.COLLATE[0], "time": 8, "task": 0, "worker": 0}
IN_THE_QUEUE = "worker 0 has put task 0 into the result queue; its feeder"


def feeding(*codes: int) -> list[dict[str, int]]:
    """The events of a worker that has put its result, and whose feeder thread then does these steps."""
    of_feeder = {"task": 0, "worker": 0, "tid": 201}
    return [GOT, DONE, IDLE, *({"code": code, "time": 9 + n} | of_feeder for n, code in enumerate(codes))]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([IDLE], "waiting for worker 0 (pid 200), waiting for a task; task 0 is still in its index queue"),
        ([GOT, COLLATES], "waiting for worker 0 (pid 200), collating task 0"),
        (feeding(), f"{IN_THE_QUEUE} has not begun to pickle it"),
        (feeding(ev.RESULT_PICKLE[0]), f"{IN_THE_QUEUE} is pickling task 0"),
        (feeding(*ev.RESULT_PICKLE), f"{IN_THE_QUEUE} has not written it"),
        (feeding(ev.RESULT_WRITE[0]), f"{IN_THE_QUEUE} is writing task 0 to the pipe"),
        (feeding(*ev.RESULT_WRITE), f"{IN_THE_QUEUE} has written it to the pipe, but the loader has not read it yet"),
    ],
)
def test_why_a_task_is_not_here(tmp_path: Path, events: list[dict[str, int]], reason: str) -> None:
    write_process(tmp_path / "t", WAITS_FOR_TASK_0, pid=100, role="loader", loader=1)
    ready = {"code": ev.WORKER_READY, "time": 1, "worker": 0}
    write_process(tmp_path / "t", [ready, *events], pid=200, role="worker", worker=0, loader=1)
    loader = only(snapshot(read_trace(tmp_path / "t"), 20 * SECOND))
    assert loader.stalled == f"stalled for 20.0 s: {reason}"


@pytest.mark.parametrize(
    ("put", "place", "reason"),
    [(False, "pin thread", "the pin thread has it"), (True, "ready queue", "it is in the ready queue")],
)
def test_a_pin_thread_that_keeps_a_batch_is_named(tmp_path: Path, put: bool, place: str, reason: str) -> None:
    """The worker that made it has recorded nothing here, so only the places say where it is."""
    of_task = {"task": 0, "worker": 0}
    epoch, *asks, _ = WAITS_FOR_TASK_0
    made_it = {"code": ev.WORKER_START[1], "time": 2, "worker": 0, "x": 200}
    ready = {"code": ev.READY_GET[0], "time": 5} | of_task
    got = {"code": ev.RESULT_GET[1], "time": 9, "tid": 101, "x": ev.Message.RESULT} | of_task
    puts = [{"code": ev.READY_PUT, "time": 10, "tid": 101} | of_task] * put
    loader = state_of([epoch, made_it, *asks, ready, got, *puts], tmp_path)
    assert (loader.pinned, loader.depths[place]) == (True, 1)
    assert loader.stalled == f"stalled for 20.0 s: task 0 has left worker 0: {reason}"


def test_a_worker_that_never_spoke_is_shown(tmp_path: Path) -> None:
    loader = state_of([{"code": ev.WORKER_START[1], "time": SECOND, "worker": 3, "x": 777}], tmp_path)
    (worker,) = loader.workers
    assert (worker.worker, worker.pid, worker.doing.words) == (3, 777, "starting (nothing recorded yet)")
    assert worker.doing.seconds == 19


def test_an_idle_worker_has_been_idle_since_its_last_task(tmp_path: Path) -> None:
    """It polls its queue every five seconds, and each poll is a new span."""
    get, empty = {"code": ev.INDEX_GET[0], "worker": 0}, {"code": ev.INDEX_GET[1], "worker": 0, "x": ev.Message.EMPTY}
    polls = [e | {"time": (n + 3) * SECOND} for n, e in enumerate([get, empty, get, empty, get])]
    write_process(tmp_path / "t", [{"code": ev.EPOCH[0]}], pid=100, role="loader", loader=1)
    done = {"code": ev.RESULT_PUT, "time": 2 * SECOND, "task": 0, "worker": 0}
    write_process(tmp_path / "t", [done, *polls], pid=200, role="worker", worker=0, loader=1)
    (worker,) = only(snapshot(read_trace(tmp_path / "t"), 20 * SECOND)).workers
    assert worker.idle
    assert worker.doing == Doing("waiting for a task", 18.0)


def test_loaders_that_have_ended_are_hidden_behind_those_that_have_not(tmp_path: Path) -> None:
    runs = [Run(**HEALTHY, loader=1), Run(**HUNG, loader=2, first_pid=3000), Run(**HUNG, loader=3, first_pid=5000)]
    trace = read_trace(write(tmp_path / "t", *runs))
    shot = snapshot(trace, last_of(trace))
    assert [loader.number for loader in shot.loaders] == [2, 3]
    assert shot.hidden == 1
    assert shot.text().endswith("\nnot shown: 1 iterator that ended before")
    over = made(tmp_path / "over", **HEALTHY)
    shot = snapshot(over, last_of(over))
    assert [loader.over for loader in shot.loaders] == [True]
    assert "\n  worker  pid      process  is\n" in shot.text()
    assert " for" not in shot.text()


def test_how_the_run_stands(tmp_path: Path) -> None:
    healthy, hung = made(tmp_path / "a", **HEALTHY), made(tmp_path / "b", **HUNG)

    def state(trace: Trace, main: ProcessLife | None, worker: ProcessLife = ProcessLife.GONE) -> tuple[str, bool]:
        lives = {} if main is None else {LOADER_PID: main, LOADER_PID + 100: worker}
        shot = snapshot(trace, last_of(trace), lives)
        return shot.state, shot.over

    assert state(hung, ProcessLife.ALIVE) == ("running", False)
    assert state(hung, ProcessLife.STOPPED) == ("stopped by a signal", False)
    assert state(healthy, ProcessLife.GONE) == ("the run has ended", True)
    killed = "the process has ended without a shutdown (killed?), shown as of its last event"
    assert state(hung, ProcessLife.GONE) == (killed, True)
    left = f"; its worker processes still exist: pid {LOADER_PID + 100}"
    assert state(hung, ProcessLife.GONE, ProcessLife.ALIVE) == (killed + left, False)
    assert state(hung, None)[0].startswith("recorded on another machine")
    assert state(hung, None)[1]


def test_the_last_events_show_what_all_show(tmp_path: Path) -> None:
    """But for the epoch's number and the window, whose begin they do not hold."""
    write(tmp_path / "t", Run(batches=200, workers=3, cost=HUNG_LATE))
    whole = read_trace(tmp_path / "t")
    now = last_of(whole) + 9 * SECOND
    ends, _ = LiveTrace(tmp_path / "t", most=512).read()
    assert len(ends) < len(whole) / 2
    one, two = only(snapshot(whole, now)), only(snapshot(ends, now))
    assert (two.workers, two.depths, two.doing, two.stalled) == (one.workers, one.depths, one.doing, one.stalled)
    assert two.yielded == one.yielded == 188
    assert (one.epoch, two.epoch) == (0, -1)


def HUNG_LATE(task: int) -> int:  # noqa: N802  # a constant, as made_trace's HUNG
    return 10**15 if task == 188 else 900_000


def test_a_process_that_is_gone_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t", Run(**HEALTHY))
    follower = LiveTrace(tmp_path / "t")
    monkeypatch.setattr(live, "life", lambda pid, start: ProcessLife.ALIVE if pid == LOADER_PID else ProcessLife.GONE)
    read: list[str] = []
    plain = live.tail
    monkeypatch.setattr(live, "tail", lambda path, *most: read.append(path.name) or plain(path, *most))
    first, _ = follower.read()
    assert Counter(name.split("-")[0] for name in read) == {"1000": 1, "1100": 1, "1101": 1}
    worker = next(p for p in first.processes if p.role == "worker")
    assert 0 < worker.events <= live.EXITED_TAIL  # it has left: its last few events are enough
    read.clear()
    second, _ = follower.read()
    assert [name.split("-")[0] for name in read] == ["1000"]
    assert len(first) > 0
    assert len(second) == 0


# --- Processes --------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def python(program: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python that runs `program` and says a line on stdout when it is where it should be."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
        env=os.environ | environment,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def until(met: Callable[[], bool]) -> None:
    """Wait for a condition; the test's own timeout ends it."""
    while not met():
        time.sleep(0.01)


WAITS = "print('ready', flush=True); import sys; sys.stdin.read()"


@pytest.mark.live
def test_life() -> None:
    now = time.monotonic_ns()
    assert life(os.getpid(), now) is ProcessLife.ALIVE
    assert life(os.getpid(), 1) is ProcessLife.GONE  # a process of that id was there before this one was born
    with python(WAITS) as child:
        later = time.monotonic_ns()
        assert life(child.pid, later) in (ProcessLife.ALIVE, ProcessLife.DISK)
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: life(child.pid, later) is ProcessLife.STOPPED)
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: life(child.pid, later) is ProcessLife.GONE)  # a zombie
        child.wait()
        assert life(child.pid, later) is ProcessLife.GONE


RECORDS = """
import sys
from minidl.record.recorder import Recorder, TraceConfig, create
pens = [Recorder(TraceConfig(str(create(place)))) for place in sys.argv[1:]]
for pen in pens:
    pen.emit(10, 1)
"""


@pytest.mark.live
def test_a_trace_is_found_by_its_process_and_by_the_one_that_started_it(tmp_path: Path) -> None:
    place = tmp_path / "a trace with spaces"
    outer = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    with python(outer, RECORDS + WAITS, str(place)) as parent:
        assert find_trace(str(parent.pid)) == place
        (records,) = descendants_of(parent.pid)
        assert find_trace(str(records)) == place
        parent.communicate("")  # the child reads the same end of input


@pytest.mark.live
def test_processes_without_a_trace_to_show(tmp_path: Path) -> None:
    with python(WAITS) as child:
        assert refused(child.pid).startswith(f"neither process {child.pid} nor a child of it records a trace")
    assert refused(child.pid).startswith(f"there is no process {child.pid}")
    with python(WAITS, MINIDL_TRACE=str(tmp_path / "x")) as child:
        assert f"has MINIDL_TRACE={tmp_path}/x but records nothing" in refused(child.pid)
    with python(RECORDS + WAITS, str(tmp_path / "one"), str(tmp_path / "two")) as child:
        assert refused(child.pid).endswith(f"2 traces: give one of them: {tmp_path}/one, {tmp_path}/two")
    with python(RECORDS + WAITS, str(tmp_path / "gone")) as child:
        shutil.rmtree(tmp_path / "gone")
        assert f"records to {tmp_path}/gone, which does not exist here: it was deleted" in refused(child.pid)
    assert refused("nonsense").startswith("nonsense: no such file or directory")


def refused(target: object) -> str:
    with pytest.raises(TraceError) as raised:
        find_trace(str(target))
    return str(raised.value)


@pytest.mark.live
def test_a_directory_named_like_a_process_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    create(str(os.getpid()))
    assert find_trace(str(os.getpid())) == Path(str(os.getpid()))


JOB = """
import sys
import torch
import minidl
from minidl.record.session import trace

class Pipe(minidl.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if index == 7:
            open(sys.argv[2]).read()  # a FIFO that nobody writes to
        return torch.zeros(3)

with trace(sys.argv[1]):
    batches = iter(minidl.DataLoader(Pipe(), batch_size=2, num_workers=2))
    for _ in range(3):
        next(batches)
    print("ready", flush=True)
    next(batches)
"""


@pytest.mark.live
def test_a_live_hang_is_seen_and_what_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr("minidl.hang.snapshot.LONG", 0.0)
    with python(JOB, str(tmp_path / "t"), str(tmp_path / "fifo")) as job:

        def waits() -> bool:
            loader = only(look(job.pid))
            stuck = [w.doing.words for w in loader.workers if w.worker == 1]
            waits = loader.doing.words == "waiting for task 3 of worker 1" and stuck == ["in sample 7 (task 3)"]
            return waits and loader.depths["reorder buffer"] == 1

        until(waits)
        shot = look(job.pid)
        loader = only(shot)
        stuck = loader.workers[1]
        try:
            assert shot.state == "running"
            assert loader.yielded == 3
            assert stuck.life is ProcessLife.ALIVE
            assert f"waiting for worker 1 (pid {stuck.pid}), in sample 7 (task 3)" in loader.stalled
            assert loader.stalled.endswith("later batches that wait behind it: 2") or loader.depths["worker"]
            os.kill(job.pid, signal.SIGKILL)
            job.wait()
            after = look(tmp_path / "t")
            assert after.state.startswith("the process has ended without a shutdown (killed?)")
            assert str(stuck.pid) in after.state
            assert not after.over
        finally:
            for worker in loader.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: look(tmp_path / "t").over)
    assert "which has ended, last seen in sample 7 (task 3)" in only(look(tmp_path / "t")).stalled


def look(target: object) -> Snapshot:
    return follow(str(target), once=True, out=io.StringIO())


# --- The loop ---------------------------------------------------------------------------------------------------------
class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_is_drawn_until_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t", Run(**HUNG))
    slept: list[float] = []
    moments = iter([{LOADER_PID: ProcessLife.ALIVE}, {LOADER_PID: ProcessLife.ALIVE}, {LOADER_PID: ProcessLife.GONE}])
    monkeypatch.setattr(LiveTrace, "_by_pid", lambda self, trace, lives: next(moments))
    monkeypatch.setattr(time, "sleep", slept.append)
    now = last_of(read_trace(tmp_path / "t"))  # else the machine's own clock would tell of a stall, or of none
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    out = io.StringIO()
    shot = follow(tmp_path / "t", interval=0.5, out=out)
    assert shot.over
    assert slept == [0.5, 0.5]
    *before, last = (part.splitlines() for part in out.getvalue().split("\n\n"))
    assert [lines[0].split(": ")[1] for lines in before] == ["running", "running"]
    assert last[0].startswith("cut: the recording ends after 9 batches")
    assert last[1].endswith(": the process has ended without a shutdown (killed?), shown as of its last event")
    assert "\x1b" not in out.getvalue()


def test_a_terminal_is_redrawn_and_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t", Run(**HUNG))
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "9")
    out = Terminal()
    follow(tmp_path / "t", out=out)
    clear, text = out.getvalue()[:7], out.getvalue()[7:]
    assert clear == "\x1b[H\x1b[2J"
    lines = text.splitlines()
    assert len(lines) == 8
    assert max(map(len, lines)) <= 60
    assert lines[-1].endswith("more lines)")
    out = Terminal()
    follow(tmp_path / "t", once=True, out=out)
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_of_many_workers_the_stall_is_on_the_screen(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = made(tmp_path / "t", **HUNG | {"workers": 40})
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", str(rows))
    shot = snapshot(trace, last_of(trace) + 12 * SECOND, {LOADER_PID: ProcessLife.ALIVE})
    text = top._framed(shot.text())
    assert len(text.splitlines()) <= max(1, rows - 1)
    assert ("stalled for" in text) is (rows == 9)


def test_a_packed_trace_is_shown_as_of_its_end(tmp_path: Path) -> None:
    packed = made(tmp_path / "t", **HUNG).pack(tmp_path / "packed")
    shot = follow(packed, out=io.StringIO())
    assert shot.over
    assert only(shot).yielded == 9


@pytest.mark.live
def test_a_trace_of_this_process_ends_with_its_block(tmp_path: Path) -> None:
    place = create(tmp_path / "t")
    pen = Recorder(TraceConfig(str(place)))
    assert look(place).state == "nothing has been recorded yet"
    pen.role("loader", loader=1)
    pen.emit(ev.EPOCH[0], 1)
    shot = look(place)
    assert (shot.state, shot.over) == ("running", False)
    pen.describe("trace_end")
    pen.close()
    assert (look(place).state, look(place).over) == ("the trace has ended, shown as of its last event", True)


@pytest.mark.live
def test_a_run_that_died_before_it_recorded_anything_is_over(tmp_path: Path) -> None:
    place = create(tmp_path / "t")
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["monotonic_ns"] = 1  # this process was not born then: the one that made the trace is gone
    (place / "manifest.json").write_text(json.dumps(manifest))
    assert look(place).over
    manifest["boot_id"] = "another"
    (place / "manifest.json").write_text(json.dumps(manifest))
    assert look(place).state == "nothing has been recorded yet"


@pytest.mark.live
def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"is an empty directory, without a trace: record one with minidl run --trace"):
        follow(tmp_path, out=io.StringIO())
    with pytest.raises(TraceError, match=r"No such file.*give the directory of a trace"):
        LiveTrace(tmp_path / "none").read()
    (tmp_path / "run-1").mkdir()
    create(tmp_path / "run-1")
    with pytest.raises(TraceError, match=r"is not a trace but holds 1: give one of them: run-1"):
        follow(tmp_path, out=io.StringIO())


def arguments(*words: str) -> argparse.Namespace:
    return cli.parser().parse_args(["top", *words])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "t", Run(**HUNG))
    assert top.run(arguments("--once", str(tmp_path / "t"))) == 0
    assert "waiting for task 9 of worker 1" in capsys.readouterr().out
    assert arguments("x").interval == 1.0
    with pytest.raises(SystemExit):
        arguments("x", "--interval", "0")
    assert "'0' is not a number of seconds from 0.05 to 3600" in capsys.readouterr().err


@pytest.mark.live
def test_ctrl_c_leaves_the_command_in_peace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    place = create(tmp_path / "t")
    monkeypatch.setattr(time, "sleep", interrupted)
    assert top.run(arguments(str(place))) == 0


# --- A trace that grows -----------------------------------------------------------------------------------------------
def grow(source: Path, target: Path, until: int, missing: dict[int, int] | None = None) -> None:
    """Let the trace at `target` be the one at `source` as it was at a time. missing: pid -> an event to leave out."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".events":
            rows = np.frombuffer(data, RECORD, offset=HEADER_BYTES)
            gone = (missing or {}).get(int(path.name.split("-")[0]), 0)
            rows[(rows["time"] > until) | (rows["seq"] == gone)] = 0
        (target / path.name).write_bytes(data)


@pytest.mark.heavy
@pytest.mark.parametrize("pin", [False, True])
def test_look_by_look_a_growing_trace_shows_what_it_shows_at_once(
    tmp_path: Path, pin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "life", lambda pid, start: ProcessLife.ALIVE)
    write(tmp_path / "whole", Run(batches=40, workers=3, pin=pin, epochs=2, cost=HUNG_LATE))
    whole = read_trace(tmp_path / "whole")
    begin, end = int(whole.events["time"][0]), last_of(whole)
    live_trace, job = LiveTrace(tmp_path / "t"), Job()
    events = 0
    for now in np.linspace(begin, end, 25).astype(int).tolist():
        grow(tmp_path / "whole", tmp_path / "t", now)
        trace, _ = live_trace.read()
        events += len(trace)
        job.take(trace)
        at_once = snapshot(cut(copy.copy(whole), now), now)
        assert job.snapshot(trace, now, {}).text().splitlines()[1:] == at_once.text().splitlines()[1:]
    assert events == len(whole), "each event is read once"


def test_an_event_that_is_still_being_written_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its process wrote after it waits too; at the look after the next it is given up."""
    monkeypatch.setattr(live, "life", lambda pid, start: ProcessLife.ALIVE)
    write(tmp_path / "whole", Run(**HEALTHY))
    whole = read_trace(tmp_path / "whole")
    middle, end = int(whole.events["time"][len(whole) // 2]), last_of(whole)
    mine = whole.events[whole.events["pid"] == LOADER_PID]
    held = int(mine["seq"][mine["time"] <= middle].max()) + 5
    live_trace = LiveTrace(tmp_path / "t")

    def seen() -> list[int]:
        trace, _ = live_trace.read()
        return trace.events["seq"][trace.events["pid"] == LOADER_PID].tolist()

    grow(tmp_path / "whole", tmp_path / "t", middle)
    assert seen() == list(range(1, held - 4))
    grow(tmp_path / "whole", tmp_path / "t", end, {LOADER_PID: held})
    assert seen() == list(range(held - 4, held))
    assert seen() == []
    assert seen() == list(range(held + 1, len(mine) + 1))
    assert seen() == []


def test_events_that_a_look_skips_are_missing_until_the_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "life", lambda pid, start: ProcessLife.ALIVE)
    monkeypatch.setattr(live, "MOST_NEW", 100)
    monkeypatch.setattr(live, "MOST_WRITERS", 0)
    write(tmp_path / "whole", Run(batches=60, epochs=2))
    whole = read_trace(tmp_path / "whole")
    epochs = whole.select("epoch", ev.Phase.BEGIN)["time"]
    live_trace, job = LiveTrace(tmp_path / "t"), Job()
    for now, known in ((int(epochs[0]), True), (int(epochs[1]) - 1, False), (int(epochs[1]) + 10_000, True)):
        grow(tmp_path / "whole", tmp_path / "t", now)
        trace, _ = live_trace.read()
        job.take(trace)
        state = job.iterators[1].state
        assert (state.known, state.note.startswith("earlier events were overwritten")) == (known, not known)
    assert only(job.snapshot(trace, now, {})).epoch == 1
