"""Functions that a worker calls, recorded by viztracer into the loader's trace, on the loader's clock.

Interface: `require()` raises if that is impossible; `start(directory, min_us, ...)` records this process's functions
from now on into an attachment of the trace in `directory` (see `attachments`), until the process ends.

viztracer keeps its records in memory, and its own handlers would disturb the loader's shutdown. So only its tracer is
used, and a thread saves the calls that have returned, every SAVE_SECONDS. A kill loses the calls since the last save
and those that have not returned. The last save is a finalizer of `multiprocessing`, after the result queue's feeder
thread was joined. No error is raised into the process: a failure is reported on stderr once and in the attachment.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any, Final

import numpy as np

from minidl.record.bracketing import bracketed
from minidl.tracefile import attachments
from minidl.tracefile.arrays import Ints, Rows
from minidl.tracefile.attachments import SLICE, Name, SliceTrack
from minidl.tracefile.format import TraceError
from minidl.tracefile.words import size

DEFAULT_MIN_US: Final = 10.0
"""Default of the shortest recorded call."""

SAVE_SECONDS: Final = 0.5

ENTRIES: Final = 200_000
"""Most calls that viztracer keeps between two saves, the newest ones; about 16 MB."""

MOST_BYTES: Final = 128 << 20
"""Size of one process's file at which its recording ends; the file says so."""

_EXIT_PRIORITY: Final = -10  # a queue joins its feeder thread at -5, and higher numbers come first

_PROBES: Final = 20


def require() -> None:
    """Raise TraceError if viztracer cannot be imported. Called in the parent, so that forked workers have it."""
    try:
        import viztracer  # noqa: F401
    except ImportError as error:
        raise TraceError(
            f"functions cannot be recorded: viztracer cannot be imported ({error}): "
            "pip install viztracer, or record without functions"
        ) from error


def start(directory: str, min_us: float, worker: int = -1, loader: int = 0) -> FunctionRecorder | None:
    """Record this process's functions that take `min_us` microseconds or more, in this thread and in later ones.

    worker, loader: numbers of the process's; -1 = the main process. Returns None, after a line on stderr, on failure.
    """
    global _current
    try:
        if _current is not None:  # a parent's, whose tracer a fork brought along
            _current.abandon()
        _current = FunctionRecorder(directory, min_us, worker, loader)
        _current.start()
    except Exception as error:  # of any kind: the worker must go on
        _say(f"functions are not recorded: {type(error).__name__}: {error}")
        _current = None
    return _current


_current: FunctionRecorder | None = None


class FunctionRecorder:
    """viztracer's tracer of one process, and the file that it is saved to."""

    def __init__(self, directory: str, min_us: float, worker: int, loader: int) -> None:
        import viztracer

        self.pid = os.getpid()
        self.tracer = viztracer.VizTracer(
            tracer_entries=ENTRIES, verbose=0, register_global=False, min_duration=min_us, log_sparse=False
        )
        self.clock = _Clock(self.tracer)
        self.bytes = 0
        begun = time.monotonic_ns()
        name = f"functions-{self.pid}-{begun}{attachments.SUFFIX}"
        self._fd = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._saver = threading.Thread(target=self._save_now_and_then, name="minidl-functions", daemon=True)
        self._write(
            attachments.description(
                "functions", "viztracer", viztracer.__version__, self.pid,
                "CLOCK_MONOTONIC, read by viztracer; its scale measured at the begin and at each save",
                self.clock.error_ns, worker=worker, loader=loader, begun_ns=begun, min_us=min_us,
            )
        )  # fmt: skip

    def start(self) -> None:
        """Begin. The saver starts first, because threads that run already are not traced."""
        self._saver.start()
        Finalize(self, self.finish, exitpriority=_EXIT_PRIORITY)
        self.tracer.start()

    def _save_now_and_then(self) -> None:
        while not self._over.wait(SAVE_SECONDS):
            self.save()

    def save(self) -> None:
        """Write the calls that have returned since the last save."""
        with self._lock:
            if not self._over.is_set():
                self._save()

    def finish(self) -> None:
        """Stop; write the remaining calls and the closing line. Does nothing if repeated, or in a forked child."""
        if os.getpid() != self.pid:
            return
        with self._lock:
            if not self._over.is_set():
                self.tracer.stop()
                self._save()
                self._write(attachments.closing())
                self._over.set()
                os.close(self._fd)
        if self._saver.is_alive():
            self._saver.join(SAVE_SECONDS)

    def abandon(self) -> None:
        """Switch the parent's tracer off in a forked child; the file remains the parent's."""
        if os.getpid() != self.pid and not self._over.is_set():
            self.tracer.stop()
            os.close(self._fd)

    def _save(self) -> None:
        try:
            calls = _loaded(self.tracer)
            if len(calls) >= ENTRIES:
                self._write(attachments.note(f"more than {ENTRIES} calls between two saves: the oldest are lost"))
            lines = self._lines(calls)
        except Exception as error:  # of an unknown version of viztracer: the worker must go on
            self._stop(f"functions could not be saved: {type(error).__name__}: {error}")
            return
        for line in lines:
            self._write(line)
        if self.bytes > MOST_BYTES:
            self._stop(f"no functions are recorded from here on: the file has {size(MOST_BYTES)}")

    def _lines(self, calls: list[dict[str, Any]]) -> list[bytes]:
        titles = {e["tid"]: e["args"]["name"] for e in calls if e["ph"] == "M" and e["name"] == "thread_name"}
        # viztracer may have asked for a new thread's name before the thread had one.
        titles |= {thread.native_id: thread.name for thread in threading.enumerate()}
        savers = self._saver.native_id
        mine = [e for e in calls if e["ph"] == "X" and e["tid"] != savers]
        if not mine:
            return []
        tracks = {tid: n for n, tid in enumerate(dict.fromkeys(e["tid"] for e in mine))}
        names = {name: n for n, name in enumerate(dict.fromkeys(e["name"] for e in mine))}
        rows = np.empty(len(mine), SLICE)
        rows["begin"], rows["end"] = self.clock.monotonic([e["ts"] for e in mine], [e["dur"] for e in mine])
        rows["track"] = [tracks[e["tid"]] for e in mine]
        rows["name"] = [names[e["name"]] for e in mine]
        threads = [SliceTrack(self.pid, tid, titles.get(tid, f"thread {tid}")) for tid in tracks]
        return [attachments.chunk(threads, list(map(_name, names)), part) for part in _parts(rows)]

    def _stop(self, why: str) -> None:
        self.tracer.stop()
        _say(why)
        self._write(attachments.note(why))
        self._write(attachments.closing())
        self._over.set()

    def _write(self, line: bytes) -> None:
        """Append a line. If that fails, recording ends, because lines after a torn one could not be read."""
        if self._over.is_set():
            return
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError(0, "the disk is full")
            self.bytes += len(line)
        except OSError as error:
            self._over.set()
            self.tracer.stop()
            _say(f"no functions are recorded from here on: {error.strerror}")


def _parts(rows: Rows, most: int = 50_000) -> Iterator[Rows]:
    """Yield the rows in parts for lines of bounded length, so that a torn line loses little."""
    for at in range(0, len(rows), most):
        yield rows[at : at + most]


def _name(text: str) -> Name:
    """Parse viztracer's "function (file:line)"."""
    name, bracket, place = text.rpartition(" (")
    return Name(name, place[:-1]) if bracket and place.endswith(")") else Name(text)


def _loaded(tracer: Any) -> list[dict[str, Any]]:
    """Return and remove the tracer's calls. The collector is off: it could let another thread add to them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        loaded: list[dict[str, Any]] = tracer.load()
    finally:
        if collecting:
            gc.enable()
    return loaded


def _say(what: str) -> None:
    try:
        os.write(2, f"minidl trace: process {os.getpid()}: {what}. The run goes on.\n".encode("utf-8", "replace"))
    except OSError:
        pass


class _Clock:
    """Maps viztracer's times to CLOCK_MONOTONIC: their scale is off by up to 1e-6."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._first, self.error_ns = self._offset()

    def _offset(self) -> tuple[tuple[int, int], int]:
        """Return (viztracer's time, monotonic minus that), and by how much they may be off; ns."""
        theirs, ours = bracketed(lambda: round(self._tracer.getts() * 1000), _PROBES)
        return (theirs, ours.middle - theirs), ours.error

    def monotonic(self, begins_us: list[float], durations_us: list[float]) -> tuple[Ints, Ints]:
        """Return begins and ends in ns, in the same order; ends are rounded down so that neighbours do not overlap."""
        begin = np.rint(np.array(begins_us) * 1000).astype(np.int64)
        end = begin + np.floor(np.array(durations_us) * 1000).astype(np.int64)
        (at, offset), (now, offset_now) = self._first, self._offset()[0]
        drift = (offset_now - offset) / max(1, now - at)
        first, last = (t + offset + np.floor(drift * (t - at)).astype(np.int64) for t in (begin, end))
        return first, last
