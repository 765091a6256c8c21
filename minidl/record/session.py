"""Recordings, begun and ended by `trace()` or by MINIDL_TRACE.

`trace(directory)` gives iterators that are made inside it a `TracedPorts`; MINIDL_TRACE=DIRECTORY does it for each
iterator of a program (`trace_from_environment`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from minidl.loader import ports
from minidl.record import device_clock, recorder, stack_samples, watchdog
from minidl.record import functions as function_level
from minidl.record.cpu_time import choose
from minidl.record.group import place_in_group, rank_directory
from minidl.record.ports import TracedPorts
from minidl.record.recorder import TraceConfig
from minidl.record.shared import live, number_loader, write_uncaught
from minidl.tracefile.format import TraceError


@contextlib.contextmanager
def trace(
    directory: str | os.PathLike[str],
    *,
    detail: str = "sample",
    ring_bytes: int | None = recorder.RING_BYTES,
    functions: bool = False,
    functions_main: bool = False,
    functions_min_us: float = function_level.DEFAULT_MIN_US,
    cpu_time: bool | None = None,
    hang_after: float | None = None,
    on_hang: str | None = None,
) -> Iterator[Path]:
    """Record the loaders whose iterators are made in the `with` block into `directory`.

    detail: "sample" has an event for each sample, "batch" has not. ring_bytes: keep only the newest events of each
    process, in about so many bytes of disk (64 MiB hold a million), and as many of all workers that have ended, packed
    (see `tracefile.folded`); None keeps all. functions: in workers, also record each function that takes
    `functions_min_us` microseconds or more, with viztracer; functions_main: also in this process. cpu_time: whether
    spans carry their thread's CPU time beside their wall time; None measures what the clock costs here, and reads a
    slow one while that takes at most 1% of a process's time. hang_after: a watchdog says on stderr if no batch comes
    for so many seconds, and puts evidence into the trace; 0 = none; on_hang: "report", "raise" or "kill". By default
    they are as MINIDL_HANG_AFTER and MINIDL_ON_HANG say (see `watchdog`). Gives the directory's path. Raises TraceError
    if the directory holds a trace already, if this process records one, if viztracer is missing, or for a setting of
    the watchdog that makes no sense.

    Workers go on recording until they end; an iterator that outlives the block is recorded up to the block's end.
    """
    if recorder.active() is not None:
        raise TraceError(f"this process already records to {recorder.active()!r}: end that trace first")
    if functions or functions_main:
        function_level.require()
    watch = watchdog.settings(hang_after, on_hang)
    measured, about = choose(cpu_time)
    path = recorder.create(directory, detail=detail, ring_bytes=ring_bytes, cpu_time=about)
    least = functions_min_us if functions else None
    recording = recorder.start(TraceConfig(str(path), detail, ring_bytes, least, measured, **watch))
    dog = watchdog.begin(recording)
    undo = ports.use(lambda: _new_ports(recording.config))
    own_functions = function_level.start(str(path), functions_min_us) if functions_main else None
    finalizing = sys.is_finalizing  # at exit, the interpreter may close this when this module's names are gone
    try:
        yield path
    except BaseException as error:
        if not finalizing():
            write_uncaught(error)
        raise
    finally:
        if not finalizing():
            undo()
            try:
                if own_functions is not None:
                    own_functions.finish()
            finally:
                _end(recording)
                watchdog.end(dog)


def _end(recording: recorder.Recorder) -> None:
    """Write what is left and stop; whatever fails, the recording stops, so that another trace can begin."""
    try:
        stack_samples.end()
        for loader in tuple(live):
            loader.emit_gone()
        recording.emit_pauses()
        device_clock.flush()
        recording.describe("trace_end", monotonic_ns=time.monotonic_ns(), realtime_ns=time.time_ns())
    finally:
        recorder.stop()


def _new_ports(config: TraceConfig) -> TracedPorts:
    ports = TracedPorts(config, number_loader(config.directory))
    live.add(ports)
    return ports


def trace_from_environment() -> None:
    """If MINIDL_TRACE names a directory, record every loader of this program.

    MINIDL_HANG_AFTER=SECONDS gives the trace a watchdog (see `watchdog`).

    MINIDL_TRACE_DETAIL is "sample" (default) or "batch"; MINIDL_TRACE_RING is "full", or the MiB that a process's file
    may grow to (default 64); MINIDL_TRACE_CPU is "on" or "off", else a slow clock is read only up to 1% of the time. A
    rank of a distributed run records into DIRECTORY/rank-N. A directory that holds a trace already is left alone: the
    next free DIRECTORY.2, DIRECTORY.3, ... is taken. A failure is said on stderr, and the program runs without a trace.
    """
    if os.environ.get("MINIDL_TRACE"):
        _record_later(_begin_from_environment)


def join_trace(config: TraceConfig) -> None:
    """From the first iterator on, record into a trace that another process has begun."""
    _record_later(lambda: recorder.start(config))


_begin: Callable[[], recorder.Recorder | None] = recorder.active
"""How this process begins to record, if it is to record from its first iterator on."""


def _record_later(begin: Callable[[], recorder.Recorder | None]) -> None:
    global _begin
    _begin = begin
    ports.use(_ports_when_needed)


def _ports_when_needed() -> ports.Ports:
    recording = current_recorder()
    return ports.Ports() if recording is None else _new_ports(recording.config)


def current_recorder() -> recorder.Recorder | None:
    """Return this process's recorder, None without a trace; the environment may ask to begin one."""
    return recorder.active() or _begin()


def write_place() -> None:
    """Write down which rank this process is, if it is one and a trace is on."""
    recording, place = current_recorder(), place_in_group()
    if recording is not None and place:
        recording.describe("process", **place)


def _begin_from_environment() -> recorder.Recorder | None:
    try:
        recording = recorder.start(_config_from_environment())
        watchdog.begin(recording)
    except (OSError, TraceError, ValueError) as error:
        print(f"minidl: MINIDL_TRACE: no trace is recorded: {error}", file=sys.stderr)
        _record_later(recorder.active)  # not again for each iterator
        return None
    print(f"minidl: recording to {recording.config.directory}", file=sys.stderr)
    return recording


def _config_from_environment() -> TraceConfig:
    base = rank_directory(os.environ["MINIDL_TRACE"])
    detail, ring_bytes = os.environ.get("MINIDL_TRACE_DETAIL", "sample"), _ring_from_environment()
    measured, about = choose(_cpu_time_from_environment())
    watch = watchdog.settings()
    for number in range(1, 1000):
        config = TraceConfig(
            str(base) if number == 1 else f"{base}.{number}", detail, ring_bytes, cpu_time=measured, **watch
        )
        try:
            recorder.create(config.directory, detail=detail, ring_bytes=ring_bytes, cpu_time=about)
            return config
        except TraceError as error:
            if error.__cause__ is not None:  # not taken, but impossible, and so would be the next
                raise
    raise TraceError(f"{base} and its numbered successors all hold traces: delete some, or name another directory")


def _ring_from_environment() -> int | None:
    text = os.environ.get("MINIDL_TRACE_RING", "")
    if text == "full":
        return None
    if text and not (text.isdecimal() and int(text)):
        raise ValueError(f"MINIDL_TRACE_RING is 'full' or a whole number of MiB from 1, not {text!r}")
    return int(text) << 20 if text else recorder.RING_BYTES


def _cpu_time_from_environment() -> bool | None:
    text = os.environ.get("MINIDL_TRACE_CPU", "")
    if text not in ("", "on", "off"):
        raise ValueError(f"MINIDL_TRACE_CPU is 'on' or 'off', not {text!r}")
    return None if not text else text == "on"
