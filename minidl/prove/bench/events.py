"""Cost of recording one event: with our recorder, with others, and without a trace.

Interface: `bench_events(rounds)`. viztracer is measured if it is installed.
Figures are nanoseconds of the calling thread's CPU time, which excludes the time that other processes have the core.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import logging
import os
import tempfile
import threading
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import minidl
from minidl.loader import ports
from minidl.prove.bench.own_thread import batch_by_batch
from minidl.prove.bench.pairs import Measured, Row, compare
from minidl.record.cpu_time import cpu_clock, run_delay
from minidl.record.fetching import TracedProgress
from minidl.record.recorder import GROW_SLOTS, Recorder, TraceConfig
from minidl.tracefile import events as ev
from minidl.wire.messages import Result
from minidl.wire.queues import ReadyQueue

Names = dict[str, Any]
Setup = Callable[[Path], AbstractContextManager[Names]]


@dataclass(frozen=True)
class _Case:
    """One way to record: the timed statement, and the setup that makes its names.

    records: events that it writes. at_median: the median of groups of sixteen repetitions, not the mean of all.
    """

    group: str
    name: str
    setup: Setup
    statement: str
    records: int = 1
    at_median: bool = False


# --- Ways to record ---------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _minidl(directory: Path, *, detail: str = "sample", ring_bytes: int | None = None) -> Iterator[Names]:
    recorder = Recorder(TraceConfig(str(directory), detail, ring_bytes))
    emit = recorder.emitter(1)
    for _ in range(GROW_SLOTS):  # past the small steps in which a new file grows
        emit(ev.YIELD)
    try:
        yield {"emit": emit, "string": recorder.string, "texts": map(str, itertools.count())}
    finally:
        recorder.close()


@contextlib.contextmanager
def _ended(directory: Path) -> Iterator[Names]:
    with _minidl(directory) as names:
        pass
    yield names


@contextlib.contextmanager
def _fetching(directory: Path, *, cpu_time: bool, long: bool = False) -> Iterator[Names]:
    """What a worker records of fetching a batch of `_SAMPLES` samples. long: each is long enough for a reading."""
    recorder = Recorder(TraceConfig(str(directory), ring_bytes=1 << 20))
    progress = TracedProgress(recorder.emitter(1), 0, cpu_clock(cpu_time), run_delay(cpu_time))
    indices = list(range(_SAMPLES))

    def fetch() -> None:
        progress.begin(7, indices)
        for position in indices:
            progress.sample(position, position)
            if long:
                progress.read_at = 0
        progress.collate(_SAMPLES)
        progress.end(0)

    try:
        yield {"fetch": fetch}
    finally:
        recorder.close()


def _no_emit(code: int, task: int, worker: int, x: int, y: int, z: int) -> None: ...


def _plain(names: Callable[[], Names]) -> Setup:
    """A setup that needs no directory, and leaves nothing."""
    return lambda directory: nullcontext(names())


_nothing = _plain(lambda: {"emit": _no_emit, "recorder": None})
_queue = _plain(lambda: {"queue": ports.new_ports().queue("ready", ReadyQueue()), "batch": Result(0, 0, None)})
_own_thread = _plain(lambda: {"batch": batch_by_batch()})
_record_function = _plain(lambda: {"record_function": torch.profiler.record_function})


@contextlib.contextmanager
def _traced(setup: Setup, directory: Path) -> Iterator[Names]:
    with minidl.trace(directory), setup(directory) as names:
        yield names


@contextlib.contextmanager
def _viztracer(directory: Path) -> Iterator[Names]:
    from viztracer import VizTracer

    tracer = VizTracer(verbose=0, register_global=False)
    tracer.start()  # an event before it is dropped
    try:
        yield {"tracer": tracer}
    finally:
        tracer.stop()
        tracer.clear()
        tracer.terminate()


@contextlib.contextmanager
def _profiled(directory: Path) -> Iterator[Names]:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with _muted():
        profiler.start()
    try:
        with _record_function(directory) as names:
            yield names
    finally:
        with _muted():
            profiler.stop()


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Discard stderr: torch's profiler logs its start and its stop from C++. It may also warn."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere, warnings.catch_warnings():
            os.dup2(nowhere.fileno(), 2)
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def _json_lines(directory: Path) -> Iterator[Names]:
    fd = os.open(directory / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    tid = threading.get_native_id()

    def write(**facts: object) -> None:
        os.write(fd, json.dumps({"time": time.monotonic_ns(), "tid": tid, **facts}).encode() + b"\n")

    try:
        yield {"write": write}
    finally:
        os.close(fd)


@contextlib.contextmanager
def _logging(directory: Path) -> Iterator[Names]:
    logger, handler = logging.Logger("bench"), logging.FileHandler(directory / "events.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(thread)d %(message)s"))
    logger.addHandler(handler)
    try:
        yield {"info": logger.info}
    finally:
        handler.close()


_ONE, _SPAN, _TEXT, _QUEUE = "an event", "a span", "an event with a text", "a queue's put and get"
_BATCH = "what the loader's own thread does for a batch"
_SAMPLES = 32
_FETCH, _FETCH_EVENTS = f"the fetch of {_SAMPLES} samples", 2 * (_SAMPLES + 2)
_NUMBERS = "7, 0, 1, 2, 3"  # task, worker, x, y, z
_EMIT = f"emit({ev.YIELD}, {_NUMBERS})"
_DETAIL = f"emit({ev.SAMPLE[0]}, {_NUMBERS})"

# The first of a group is what the others of the group are compared with.
_CASES = (
    _Case(_ONE, "emit", _minidl, _EMIT),
    _Case(_ONE, "emit, at the median", _minidl, _EMIT, at_median=True),
    _Case(_ONE, "emit into a ring of 1 MiB", partial(_minidl, ring_bytes=1 << 20), _EMIT),
    _Case(_ONE, "emit, left out of a trace of batches", partial(_minidl, detail="batch"), _DETAIL, 0),
    _Case(_ONE, "emit, after the trace's end", _ended, _EMIT, 0),
    _Case(_ONE, "no trace: if recorder is not None", _nothing, f"if recorder is not None: {_EMIT}", 0),
    _Case(_ONE, "a call that does nothing", _nothing, _EMIT, 0),
    _Case(_ONE, "viztracer add_instant", _viztracer, "tracer.add_instant('yield')"),
    _Case(_ONE, "viztracer add_instant with numbers", _viztracer,
          "tracer.add_instant('yield', args={'task': 7, 'worker': 0, 'x': 1, 'y': 2, 'z': 3})"),
    _Case(_ONE, "viztracer log_instant", _viztracer, "tracer.log_instant('yield')"),
    _Case(_ONE, "os.write of a JSON line", _json_lines, "write(name='yield', task=7, worker=0, x=1, y=2, z=3)"),
    _Case(_ONE, "logging to a file", _logging, "info('yield task=%d worker=%d x=%d y=%d z=%d', 7, 0, 1, 2, 3)"),
    _Case(_SPAN, "emit twice", _minidl, f"emit({ev.FETCH[0]}, {_NUMBERS}); emit({ev.FETCH[1]}, {_NUMBERS})", 2),
    _Case(_SPAN, "viztracer log_event", _viztracer, "with tracer.log_event('fetch'): pass"),
    _Case(_SPAN, "record_function, profiler off", _record_function,
          "with record_function('fetch'): pass", 0),
    _Case(_SPAN, "record_function, profiler on", _profiled,
          "with record_function('fetch'): pass"),
    _Case(_FETCH, "without CPU time", partial(_fetching, cpu_time=False), "fetch()", _FETCH_EVENTS),
    _Case(_FETCH, "with CPU time", partial(_fetching, cpu_time=True), "fetch()", _FETCH_EVENTS),
    _Case(_FETCH, "with CPU time, long samples", partial(_fetching, cpu_time=True, long=True), "fetch()",
          _FETCH_EVENTS),
    _Case(_TEXT, "emit, a known text", _minidl, f"emit({ev.TASK_ERROR}, 7, 0, 1, 2, string('out of range'))"),
    _Case(_TEXT, "emit, a new text each time", _minidl, f"emit({ev.TASK_ERROR}, 7, 0, 1, 2, string(next(texts)))"),
    _Case(_TEXT, "viztracer add_instant", _viztracer,
          "tracer.add_instant('error', args={'task': 7, 'worker': 0, 'text': 'out of range'})"),
    _Case(_TEXT, "os.write of a JSON line", _json_lines, "write(name='error', task=7, worker=0, text='out of range')"),
    _Case(_QUEUE, "no trace", _queue, "queue.put(batch); queue.get()", 0),
    _Case(_QUEUE, "traced", partial(_traced, _queue), "queue.put(batch); queue.get()", 3),
    _Case(_BATCH, "no trace", _own_thread, "batch()", 0),
    _Case(_BATCH, "traced", partial(_traced, _own_thread), "batch()", 15),
)  # fmt: skip


def bench_events(rounds: int, number: int = GROW_SLOTS) -> list[Row]:
    """Measure the ns of each way to record, from `number` repetitions a round; extra: the events that one records.

    By default our file grows once in that many events. The last two groups are the cost at a loader's seams: without a
    trace, it holds the plain queues themselves.
    """
    there = importlib.util.find_spec("viztracer") is not None
    cases = [case for case in _CASES if there or case.setup is not _viztracer]
    rows: list[Row] = []
    for group in dict.fromkeys(case.group for case in cases):
        own = [case for case in cases if case.group == group]
        turns = {case.name: partial(_nanoseconds, case, number) for case in own}
        rows += compare("events", group, "ns", turns, rounds, {case.name: own[0].name for case in own[1:]})
    return rows


def _nanoseconds(case: _Case, number: int) -> Measured:
    """Return the time that one execution of the case's statement takes."""
    with tempfile.TemporaryDirectory(prefix="minidl-bench-") as directory, case.setup(Path(directory)) as names:
        timer = timeit.Timer(case.statement, timer=time.thread_time, globals=names)
        timer.timeit(max(1, number // 20))  # leaves out the time to open files
        if case.at_median:  # leaves out the one in 64 that begins a page of the file
            groups = timeit.Timer(case.statement, globals=names).repeat(max(1, number // 16), 16)
            seconds = median(groups) / 16
        else:
            seconds = timer.timeit(number) / number
    return Measured(seconds * 1e9, {"events": case.records})
