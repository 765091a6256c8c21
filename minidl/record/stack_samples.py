"""Stack samples: a thread that looks, now and then, at where the thread that fetches or trains is.

Interface: `begin(recording)` samples the thread that calls it until `end()`; a second call while it does has no effect.

Rules of use: no signal is sent, and the thread that is looked at is not stopped: the sampling thread needs the GIL for
some 50 µs a look. The pause between two looks is a hundredth of the time so far, between EARLIEST and LATEST seconds,
and up to 30% more or less. The sampling thread is none of `threading`'s, takes no signal, and is not there while the
process forks: a child has no lock that it held. A child that records begins its own. The looks go into the side file
(`tracefile.stack_samples`), MOST_UNWRITTEN at a time, or once they span a second; a killed process loses the rest.

Until Python 3.12 a collection of garbage may begin inside `sys._current_frames`, and wait there for ever (gh-106883).
So no look is made when the collector is close to its next collection.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import linecache
import os
import re
import signal
import sys
import threading
import time
import types
from multiprocessing.util import Finalize
from typing import Final

from minidl.process_stat import SAMPLER_NAME
from minidl.record import recorder
from minidl.record.harmless import NO_PLACE
from minidl.tracefile.stack_samples import CodeLine, library, text_of

EARLIEST: Final = 0.04
LATEST: Final = 1.0
PART: Final = 0.01
"""The pause between two looks, as a part of the time so far."""

FLUSH_NS: Final = 1_000_000_000
MOST_UNWRITTEN: Final = 8
"""Looks that a process keeps to itself: a killed one takes them with it."""

MOST_FRAMES: Final = 200
MOST_KEPT: Final = 8
"""The innermost frames of the user's code that a stack keeps."""

MOST_STACKS: Final = 1000
"""The stacks that a process describes; a further one counts as none."""

_SHORT: Final = 120
_END_SECONDS: Final = 1.0
_AT_THE_END: Final = 90
"""After `shared.write_program_end`, before daemonic processes are ended."""
_COLLECTS_INSIDE: Final = sys.version_info < (3, 12)
_ROOM: Final = 32
"""Objects that a look may make, beside one for each thread."""

_LOADERS: Final = re.compile(r"torch/utils/data/(dataloader|_utils/(worker|fetch|pin_memory))\.py$|(^|/)minidl/")
_GIVEN: Final = re.compile(r"/minidl/data/(collate|sampler|dataset)\.py$")
"""Files of the loader, which call the user's code; and those of them that stand for the user's code."""

_USER, _OTHER, _LOADER = range(3)


class StackSampler:
    """Looks at one thread of this process. ident, tid: of that thread, for pthreads and for the kernel."""

    def __init__(self, recording: recorder.Recorder) -> None:
        self.recording, self.pid = recording, os.getpid()
        self.ident, self.tid = threading.get_ident(), threading.get_native_id()
        self.clock = _clock_of(self.ident)
        self.begun = time.monotonic()
        self.runs, self.thread = False, 0
        self.looks: list[tuple[int, int, int]] = []
        self.spent = -1  # what the thread's CPU clock showed at the last look, ns
        self.kinds: dict[int, int] = {}  # of a code object, by its id
        self.known: dict[tuple[int, ...], int] = {}
        self.kept: list[types.CodeType] = []  # so that no other code object gets the id of one of these
        self.resume()

    # --- the thread
    def resume(self) -> None:
        """Start the sampling thread, if it does not run."""
        if self.runs:
            return
        self.runs = True
        self.stop, self.ended = _thread.allocate_lock(), _thread.allocate_lock()
        self.stop.acquire()
        self.ended.acquire()
        try:
            _thread.start_new_thread(self._run, (self.stop, self.ended))
        except RuntimeError:  # no thread can be started: there are no samples
            self.ended.release()

    def pause(self) -> None:
        """End the sampling thread; at most _END_SECONDS are waited for it."""
        if self.stop.locked():
            self.stop.release()
        if self.ended.acquire(timeout=_END_SECONDS):
            self.ended.release()
            self.runs = False
            _wait_for_end(self.thread)

    def _run(self, stop: _thread.LockType, ended: _thread.LockType) -> None:
        try:
            self.thread = threading.get_native_id()
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            _call_this_thread(SAMPLER_NAME)
            while not stop.acquire(timeout=self._next()):
                self._look()
                if len(self.looks) >= MOST_UNWRITTEN or (
                    self.looks and self.looks[-1][0] - self.looks[0][0] > FLUSH_NS
                ):
                    self._flush()
        except Exception:  # whatever it is, the run goes on without samples
            self.looks.clear()
        finally:
            ended.release()

    def _next(self) -> float:
        """Seconds until the next look: never in step with the program."""
        pause = min(LATEST, max(EARLIEST, PART * (time.monotonic() - self.begun)))
        return pause * (0.7 + 0.6 * (len(self.looks) * 0.618 % 1))

    # --- a look
    def _look(self) -> None:
        if _COLLECTS_INSIDE and gc.isenabled():
            soon = gc.get_threshold()[0] - gc.get_count()[0]
            if soon < _ROOM + 2 * threading.active_count() and gc.get_threshold()[0]:
                return
        frame = sys._current_frames().get(self.ident)
        now, spent = time.monotonic_ns(), self._cpu()
        number = self._number(frame)
        del frame  # it keeps alive what its function has in variables
        used = (spent - self.spent) // 1000 if spent >= 0 and self.spent >= 0 else -1
        self.spent = spent
        self.looks.append((now, number, used))

    def _cpu(self) -> int:
        return -1 if self.clock is None else time.clock_gettime_ns(self.clock)

    def _number(self, frame: types.FrameType | None) -> int:
        """The number of the stack's string; 0 if it has none of the program's code."""
        own: list[tuple[types.CodeType, int]] = []  # innermost first
        inner: list[tuple[types.CodeType, int]] = []  # of libraries, inside of all that
        for _ in range(MOST_FRAMES):
            if frame is None or len(own) == MOST_KEPT:
                break
            kind = self._kind(frame.f_code)
            if kind == _LOADER:
                break
            if kind == _USER:
                own.append((frame.f_code, frame.f_lineno))
            elif not own:
                inner.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        stack = [*inner[:1], *inner[1:][-1:], *own]
        key = tuple(number for code, line in stack for number in (id(code), line))
        if not stack:
            return 0
        if key not in self.known:
            self.known[key] = self._described(stack) if len(self.known) < MOST_STACKS else 0
        return self.known[key]

    def _kind(self, code: types.CodeType) -> int:
        kind = self.kinds.get(id(code))
        if kind is None:
            file = code.co_filename
            calls = _LOADERS.search(file) and not _GIVEN.search(file) and not file.endswith(NO_PLACE)
            kind = self.kinds[id(code)] = _LOADER if calls else _OTHER if library(file) else _USER
            self.kept.append(code)
        return kind

    def _described(self, stack: list[tuple[types.CodeType, int]]) -> int:
        frames = [
            CodeLine(
                code.co_filename,
                line,
                str(getattr(code, "co_qualname", code.co_name)),
                linecache.getline(code.co_filename, line).strip()[:_SHORT],
            )
            for code, line in reversed(stack)
        ]
        return self.recording.string(text_of(frames))

    def _flush(self) -> None:
        looks, self.looks = self.looks, []
        begin = looks[0][0]
        told = [((at - begin) // 1000, number, used) for at, number, used in looks]
        self.recording.describe("sampled", monotonic_ns=begin, tid=self.tid, looks=told)

    def finish(self) -> None:
        """End the thread, and write what is left."""
        self.pause()
        if self.looks:
            self._flush()


def _clock_of(ident: int) -> int | None:
    """The CPU clock of a thread; None if the system has none."""
    with contextlib.suppress(OSError, AttributeError):
        clock = time.pthread_getcpuclockid(ident)
        time.clock_gettime_ns(clock)
        return clock
    return None


def _wait_for_end(tid: int) -> None:
    """Wait until the kernel has ended a thread that has nothing left to do: a fork counts its process's threads."""
    until = time.monotonic() + _END_SECONDS / 10
    while tid and os.path.exists(f"/proc/self/task/{tid}") and time.monotonic() < until:
        time.sleep(0.0001)


def _call_this_thread(name: str) -> None:
    """Give this thread a name that /proc shows."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write(name)


_sampler: StackSampler | None = None


def _mine() -> StackSampler | None:
    return _sampler if _sampler is not None and _sampler.pid == os.getpid() else None


def begin(recording: recorder.Recorder) -> None:
    """Sample the thread that calls this, if none of this process is sampled."""
    global _sampler
    if _mine() is None:
        _sampler = StackSampler(recording)
        Finalize(None, end, exitpriority=_AT_THE_END)  # a worker, too, calls it at its end


def end() -> None:
    """End the sampling of this process, and write what is left."""
    global _sampler
    mine, _sampler = _mine(), None
    if mine is not None:
        mine.finish()


def is_on() -> bool:
    """Whether this process has a sampling thread."""
    return _mine() is not None


def _before_fork() -> None:
    if (mine := _mine()) is not None:
        mine.pause()


def _after_fork() -> None:
    if (mine := _mine()) is not None:
        mine.resume()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)
